//! Committing: what was received becomes the destination's content, and the lineage moves.

pub(crate) mod accept;
pub(crate) mod apply;
pub(crate) mod batches;
pub(crate) mod copies;
pub(crate) mod fit;
pub(crate) mod given_up;
pub(crate) mod holes;
pub(crate) mod marks;
pub(crate) mod receive;
pub(crate) mod undo;
pub(crate) mod undo_log;

use delta::Frame;
use uuid::Uuid;

use crate::commit::apply::Applier;
use crate::error::{INTERRUPTED, ReplicaError, Result, SAFE, disk_error, io_error};
use crate::journal::last_writes::{LastWrites, WrittenLast};
use crate::journal::trail::{Footprint, Noting};
use crate::journal::unsure::Marking;
use crate::journal::{self, Contents, WHOLE};
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::lineage::{Stamp, StepKind, Toward, Unsure, overlay};
use crate::state::note::Foreign;

impl Replica {
    /// True if the last commit was this very delta's: merging it again would change nothing, and the lineage would not say that it
    /// had begun.
    pub(crate) fn has(&self, stream: Uuid) -> bool {
        self.lineage().step.is_none() && self.lineage().committed == Some(stream)
    }

    /// Before the journal of a delta is sealed that was compared with a device to which others had written: notes how the device
    /// was then. After a kill nothing else tells whether others have written since.
    pub(crate) fn note_compared(&mut self) -> Result<()> {
        if self.destination().is_device() && self.changed().is_some() {
            self.work(false)?;
        }
        Ok(())
    }

    /// Merges the whole deltas of the journal in place, one after the other, and moves the lineage to the last. May be done
    /// again after a crash, from any point. Returns the bytes written and read. The frames of an only delta may be `held`: they are not read
    /// back then.
    pub(crate) fn merge(&mut self, deltas: &[Contents], mut held: Option<Vec<Frame>>) -> Result<(u64, u64)> {
        let last = deltas.last().and_then(|contents| contents.segments.last());
        let Some(toward) = last.and_then(|s| Toward::of(&s.header)) else {
            return Err(journal::damaged(&self.folder().join(WHOLE), "it has no header".into()));
        };
        let path = self.destination().path().to_path_buf();
        let failed = |what| disk_error(what, &path, SAFE);
        let disk = self.destination().open(Name::Final)?;
        let segments = deltas.iter().flat_map(|contents| &contents.segments);
        let longest = segments.map(|s| s.header.size_after).max().unwrap_or(toward.size);
        if deltas.iter().flat_map(|contents| &contents.segments).all(|segment| segment.header.partial) {
            // What is repaired is as old as it was.
            *self.arrival_mut() = self.lineage().at;
        }
        // To bring it to the destination takes its time, and after a crash it may have lain for long.
        self.note_arrival(WHOLE);
        self.begin_commit()?;
        self.keep_for_readers(|replica| replica.replaced_by(WHOLE, deltas))?;
        let keeping = self.work(true)?;
        if !self.destination().is_device() && disk.len() < longest {
            disk.resize(longest).map_err(failed("grow"))?;
        }
        let last = LastWrites::of(self.state(), WHOLE, deltas)?;
        // What a later delta has trimmed between two blocks of an earlier one has no room any more.
        let applier = match last {
            Some(_) => Applier::scattered(disk.clone()),
            None => Applier::new(disk.clone(), 0, false),
        };
        let mut applier = applier.map_err(failed("open"))?;
        applier.keep(keeping);
        let mut positions = self.positions();
        let mut set = self.unsure()?;
        let mut footprint = Footprint::new(self.lineage(), set.clone());
        for (delta, contents) in deltas.iter().enumerate() {
            let mut written = WrittenLast { target: &mut applier, last: last.as_ref(), delta };
            let mut marking = Marking { target: &mut written, was: set, passing: None };
            let mut noting = Noting { target: &mut marking, footprint: &mut footprint };
            match (held.take(), &contents.segments[..]) {
                (Some(frames), [only]) => {
                    journal::replay_held(&only.header, frames, &mut noting, &positions)
                        .map_err(failed("write to"))?;
                }
                _ => journal::replay(
                    self.state(),
                    WHOLE,
                    contents,
                    &mut noting,
                    &mut positions,
                    failed("write to"),
                )?,
            }
            set = marking.end();
            let leads = contents
                .segments
                .last()
                .and_then(|s| Toward::of(&s.header))
                .unwrap_or_else(|| toward.clone());
            if !self.leads_back(&leads) {
                footprint.reach(self.state(), &leads, &set);
            }
            let size = leads.size;
            applier.finish(size).map_err(failed("write to"))?;
        }
        if !self.destination().is_device() && disk.len() != toward.size {
            disk.resize(toward.size).map_err(failed("cut"))?;
        }
        applier.flush().map_err(failed("flush"))?;
        let counts = (applier.written, applier.read);
        applier.marks.leave(self.destination());
        drop((applier, disk));
        self.still_there(toward.size)?;
        let unsure = self.keep_unsure(&set, SAFE)?;
        self.moved(&toward, unsure)?;
        self.forget_note()?;
        self.remove(WHOLE)?;
        self.end_commit();
        self.age_past();
        Ok(counts)
    }

    /// What is committed next had arrived when this file of the state was last written to, unless an earlier time was noted.
    pub(crate) fn note_arrival(&mut self, name: &str) {
        let written = self.state().modified(name).map(|nanoseconds| nanoseconds / 1_000_000_000);
        let now = self.now();
        let arrival = self.arrival_mut();
        *arrival = arrival.or(written.map(|written| written.min(now)));
    }

    /// When the source was as `toward` makes the destination, or what that takes had all arrived, in seconds since 1970.
    pub(crate) fn arrived(&mut self, toward: &Toward) -> u64 {
        let arrived = self.arrival_mut().take();
        let rewound = self.settings().and_then(|settings| settings.rewound);
        let first = rewound.filter(|(state, _)| *state == toward.stream).map(|(_, at)| at);
        first.or(arrived).unwrap_or_else(|| self.now())
    }

    /// True if a step leads back to a moment of the past. After a crash, and in a group, another call completes what a rewind has begun.
    fn leads_back(&self, toward: &Toward) -> bool {
        let rewound = self.settings().and_then(|settings| settings.rewound);
        self.rewinds() || rewound.is_some_and(|(state, _)| state == toward.stream)
    }

    /// Moves the lineage: the destination is complete.
    pub(crate) fn moved(&mut self, toward: &Toward, unsure: Unsure) -> Result<()> {
        let stamp = self.settle()?;
        // Making it durable takes its time, and nothing that came in it is own.
        self.only_own(&stamp.clone().glance(), toward.size)?;
        self.moved_to(toward, stamp, unsure)
    }

    fn moved_to(&mut self, toward: &Toward, stamp: Stamp, unsure: Unsure) -> Result<()> {
        let renamed = self.writes_to() == Name::Temporary;
        let at = self.arrived(toward);
        let after = self.lineage().after(toward, stamp.clone(), unsure, at);
        let (before, mends) =
            (self.lineage().nonce, self.lineage().epoch == Some(toward.epoch) && !toward.batch);
        self.advance(after, stamp.glance())?;
        if mends {
            self.stays_rewound(before, toward.stream);
        }
        if renamed { self.forget_note() } else { Ok(()) }
    }

    /// Puts NAME.partial in place, and returns what it looked like before.
    pub(crate) fn rename(&self, replace: bool) -> Result<Option<Stamp>> {
        self.at_path()?;
        let copy = self.stamp(Name::Temporary)?;
        match self.destination().rename(replace) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                Err(ReplicaError::NotAReplica(self.destination().path().to_path_buf()))
            }
            other => other.map_err(io_error("put in place", self.destination().path())).map(|()| copy),
        }
    }

    /// Moves the lineage after NAME.partial was put in place, unless others have written to it since it was `copy`.
    pub(crate) fn renamed(&mut self, toward: &Toward, copy: Option<Stamp>) -> Result<()> {
        self.destination().sync().map_err(io_error("sync the folder of", self.destination().path()))?;
        let stamp = self.settle()?;
        // Its new name has changed the other time.
        if copy.is_some_and(|copy| (copy.size, copy.written) != (stamp.size, stamp.written)) {
            // Without the note, the next process doubts it as well.
            self.forget_note()?;
            return Err(self.touched(Foreign::Written));
        }
        let unsure = self.lineage().unsure().clone();
        self.moved_to(toward, stamp, unsure)
    }

    fn settle(&self) -> Result<Stamp> {
        self.destination().settle().map_err(disk_error("flush", self.destination().path(), INTERRUPTED))
    }

    /// Commits the step under way, all of which is written and durable.
    pub(crate) fn commit_step(&mut self, toward: &Toward, unsure: Unsure) -> Result<()> {
        let Some(kind @ (StepKind::NewFile { .. } | StepKind::Clone { .. })) =
            self.lineage().step.as_ref().map(|s| s.kind)
        else {
            self.still_there(toward.size)?;
            self.moved(toward, unsure)?;
            self.forget_note()?;
            self.age_past();
            return Ok(());
        };
        if let StepKind::Clone { .. } = kind {
            // Once it is finished, what it replaces is not looked at again.
            self.untouched()?;
        }
        // The new name moves one of the file's times. The note says who did that, if the lineage finds no room after all.
        self.work_noted(false, INTERRUPTED)?;
        self.begin_commit()?;
        if let Some(step) = &mut self.lineage_mut().step {
            step.positions = overlay(&[], toward.epoch, toward.size);
            step.unsure = unsure;
            step.finished = true;
        }
        self.store()?;
        let copy = self.rename(kind.replaces())?;
        self.renamed(toward, copy)?;
        self.end_commit();
        self.age_past();
        Ok(())
    }
}
