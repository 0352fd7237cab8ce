//! A delta on its way to the destination, or to the file that will replace it.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use delta::{Frame, Header, Method};
use device::Disk;
use uuid::Uuid;

use super::{Sink, Stop};
use crate::commit::apply::Applier;
use crate::commit::copies::{Copies, WrittenRanges};
use crate::commit::holes::rounded;
use crate::commit::undo::Touched;
use crate::error::{INTERRUPTED, ReplicaError, Result, disk_error};
use crate::journal::trail::Footprint;
use crate::journal::unsure::{Passing, UnsureSet};
use crate::journal::{self, ARRIVING, kept};
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::lineage::{Lineage, Position, State, Step, StepKind, Toward, known, reached, whole_blocks};
use crate::state::note::{self, Keeping};
use crate::state::role::Role;

/// How much time may pass before what has come is made durable: as much is sent again after a crash.
const SAVE_TIME: Duration = Duration::from_secs(2);

/// A delta on its way to the destination, or to what will take its place.
pub(super) struct Direct {
    disk: Arc<dyn Disk>,
    /// Bytes for which a first copy had no room from the beginning, as far as that is known.
    pub(super) lacks: Option<u64>,
    applier: Applier,
    /// For a delta that copies.
    copies: Option<Copies>,
    /// For one whose records are in no order, as it is made where it reads: how far it is cannot be said.
    written: Option<WrittenRanges>,
    /// Where the records of one that ascends have come.
    end: u64,
    /// Where the place stood before.
    base: Vec<Position>,
    saved: Instant,
    saved_bytes: u64,
    /// The unsure set of the destination before, and what becomes of it.
    unsure_before: UnsureSet,
    /// What the delta replaces, if that is to be kept.
    touched: Option<Touched>,
    passing: Passing,
    /// What it adds to the trail.
    footprint: Option<Footprint>,
}

impl Replica {
    pub(super) fn seed(&mut self, toward: &Toward, header: &Header) -> Result<Sink> {
        if self.is_gone() && !self.options().create {
            return Err(ReplicaError::Away(format!(
                "the file of replica {0} is gone. If its file system is not mounted, mount it and run again; if it is gone for good, \
                 \"dsync forget {0}\" forgets it, and the same command begins a new replica there",
                self.path().display()
            )));
        }
        self.drop_journal()?;
        if self.is_gone() {
            for name in [journal::WHOLE, note::NAME] {
                self.remove(name)?;
            }
            self.set_gone(false);
        }
        if self.writes_to() == Name::Temporary {
            self.remove_partial()?;
        }
        // An old replica is forgotten from here on; its file stays until the rename.
        let role = self.lineage().role.clone();
        let lineage = Lineage { role: Role::replica(role.term, role.lives), ..Lineage::new() };
        if self.destination().is_device() {
            *self.lineage_mut() = lineage;
            return self.begin_step(StepKind::InPlace, Vec::new(), toward, header, false);
        }
        // A replica of nothing is an empty file, and ours.
        let ours = self.options().replace || self.lineage().epoch.is_some();
        let replaces = ours && self.stamp(Name::Final)?.is_some();
        let inode = self.create()?;
        *self.lineage_mut() = lineage;
        self.begin_step(StepKind::NewFile { inode, replaces }, Vec::new(), toward, header, true)
    }

    /// The error where another has a file of the name that the new copy needs.
    pub(crate) fn partial_taken(&self) -> ReplicaError {
        let mut name = self.destination().path().as_os_str().to_owned();
        name.push(".partial");
        ReplicaError::PartialTaken(name.into())
    }

    fn create(&self) -> Result<u64> {
        // Without its name, what comes could not be gone on from after a power cut.
        match self.destination().create().and_then(|inode| self.destination().sync().map(|()| inode)) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(self.partial_taken()),
            other => other.map_err(disk_error(
                "make an unfinished copy of",
                self.destination().path(),
                INTERRUPTED,
            )),
        }
    }

    pub(super) fn in_place(&mut self, toward: &Toward, header: &Header) -> Result<Sink> {
        self.untouched()?;
        let base = while_made(header, self.positions());
        let sink = self.begin_step(StepKind::InPlace, base, toward, header, false)?;
        self.take_journal(sink, toward, header)
    }

    pub(super) fn reflink(&mut self, toward: &Toward, header: &Header) -> Result<Sink> {
        let path = self.destination().path().to_path_buf();
        if self.destination().is_device() || self.lineage().step.is_some() {
            let why = if self.destination().is_device() {
                "is a device"
            } else {
                "has an in-place commit under way"
            };
            return Err(ReplicaError::Refused(format!(
                "{} {why}, so it cannot be committed by reflink: pass --commit journal",
                path.display()
            )));
        }
        // What others wrote must not get into the clone.
        self.untouched()?;
        let (base, mut touched) = (self.positions(), self.touched_by());
        let held = self.journal().cloned().filter(|_| header.resumes.is_some());
        if let Some(held) = &held {
            touched = self.touched_of(ARRIVING, held)?;
        }
        touched = touched.filter(|_| self.keeps_what_is_replaced(header));
        if let Some(touched) = &mut touched {
            touched.header(header, kept(header, &held.map_or_else(|| base.clone(), |h| h.positions(&base))));
        }
        let inode = self.create()?;
        // The intent first, so that a crash leaves nothing unknown. It says what the clone holds once that is durable.
        let begun = self.step(StepKind::Clone { inode }, Vec::new(), toward);
        let cloned = begun.and_then(|()| self.clone_final());
        let made = cloned.and_then(|()| self.direct(Name::Final, base, toward, header, false));
        let begun = made.and_then(|mut sink| {
            if let Sink::Direct(direct) = &mut sink {
                direct.touched = touched;
            }
            self.take_journal(sink, toward, header)
        });
        if begun.is_err() {
            self.drop_useless_clone()?;
        }
        begun
    }

    /// True if the step under way is a commit to a clone that is not gone on from: nothing of it is durable, or the past is kept. What a process
    /// that was killed wrote to it last, a comparison finds equal, and the way back would lack it.
    pub(crate) fn begins_anew(&self) -> bool {
        let keeps = self.settings().is_some();
        let useless = |step: &Step| {
            matches!(step.kind, StepKind::Clone { .. })
                && !step.finished
                && (keeps || step.positions.is_empty())
        };
        self.lineage().step.as_ref().is_some_and(useless)
    }

    /// Drops a clone that is not gone on from.
    pub(super) fn drop_useless_clone(&mut self) -> Result<()> {
        if self.begins_anew() {
            self.remove_partial()?;
            self.lineage_mut().step = None;
            self.store()?;
            self.refresh()?;
        }
        Ok(())
    }

    fn clone_final(&self) -> Result<()> {
        let path = self.destination().path();
        self.destination().clone_final().map_err(|e| {
            match e.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
                Some(
                    rustix::io::Errno::OPNOTSUPP
                    | rustix::io::Errno::NOTTY
                    | rustix::io::Errno::INVAL
                    | rustix::io::Errno::XDEV,
                ) => ReplicaError::Refused(format!(
                    "the file system of {} cannot clone files ({e}); XFS and Btrfs can: pass --commit journal",
                    path.display()
                )),
                _ => disk_error("clone", path, INTERRUPTED)(e),
            }
        })?;
        // Any error: without them it may be open to others, and must not take the file's place.
        self.destination().carry_attributes().map_err(|e| {
            ReplicaError::Refused(format!(
                "a clone of {} cannot have all of its attributes ({e}), so it cannot be committed by reflink: pass --commit journal, which \
                 writes to the file itself",
                path.display()
            ))
        })
    }

    /// Goes on with NAME.partial.
    pub(super) fn go_on(&mut self, toward: &Toward, header: &Header) -> Result<Sink> {
        let Some(step) = self.lineage().step.clone() else { return Ok(Sink::Closed) };
        self.destination().mend(Name::Temporary)?;
        let base = while_made(header, step.positions);
        let sink = self.begin_step(step.kind, base, toward, header, false)?;
        self.take_journal(sink, toward, header)
    }

    /// Writes down what is about to happen, durably.
    fn step(&mut self, kind: StepKind, positions: Vec<Position>, toward: &Toward) -> Result<()> {
        if kind == StepKind::InPlace {
            self.lineage_mut().state = State::Incomplete;
        }
        let (nonce, unsure) = (Uuid::new_v4(), self.lineage().unsure().clone());
        let durable = self.lineage().step.as_ref().map_or(0, |step| step.durable);
        let step = Step { kind, nonce, positions, unsure, toward: toward.clone(), finished: false, durable };
        self.lineage_mut().step = Some(step);
        self.store()
    }

    fn begin_step(
        &mut self,
        kind: StepKind,
        base: Vec<Position>,
        toward: &Toward,
        header: &Header,
        blank: bool,
    ) -> Result<Sink> {
        if kind == StepKind::InPlace {
            // Without a note, what is written next could not be told from others' writes after a kill.
            self.reserve_note()?;
            self.announce()?;
            self.lose_readers("a commit in place overwrites the replica as the delta comes")?;
        }
        self.step(kind, base.clone(), toward)?;
        self.direct(self.writes_to(), base, toward, header, blank)
    }

    /// Begins to write what the step writes; copies are read from `copied`.
    fn direct(
        &mut self,
        copied: Name,
        base: Vec<Position>,
        toward: &Toward,
        header: &Header,
        blank: bool,
    ) -> Result<Sink> {
        let name = self.writes_to();
        let unsure = self.unsure()?;
        let keeping = if name == Name::Final { self.work(true)? } else { Keeping::default() };
        let failed = |what| disk_error(what, self.destination().path(), INTERRUPTED);
        let disk = self.destination().open(name)?;
        if !self.destination().is_device() && disk.len() < toward.size {
            disk.resize(toward.size).map_err(failed("grow"))?;
        }
        let rolling = header.method == Method::Rolling;
        let written = (rolling && copied == name).then(WrittenRanges::default);
        let copies = match rolling {
            true if copied == name => Some(Copies::new(&disk).map_err(failed("open"))?),
            true => {
                let copies = Copies::new(&self.destination().open(copied)?).map_err(failed("open"))?;
                Some(copies.sharing(self.destination().sharing()))
            }
            false => None,
        };
        let applier = match written {
            Some(_) => Applier::scattered(disk.clone()),
            None => Applier::new(disk.clone(), kept(header, &base), blank),
        };
        let mut applier = applier.map_err(failed("open"))?;
        applier.keep(keeping);
        Ok(Sink::Direct(Box::new(Direct {
            lacks: self.first_copy_lacks(),
            disk,
            applier,
            copies,
            written,
            base,
            end: 0,
            saved: Instant::now(),
            saved_bytes: 0,
            touched: None,
            footprint: None,
            passing: Passing::new(unsure.clone(), header),
            unsure_before: unsure,
        })))
    }

    /// Bytes of room that the rest of a first copy needs and its file system has not, if what is to come is known. Of any other delta it is not known
    /// what it brings that has a place already.
    fn first_copy_lacks(&self) -> Option<u64> {
        let expected = Some(self.expected()).filter(|bytes| *bytes > 0 && self.lineage().epoch.is_none())?;
        expected.checked_sub(self.destination().free()?).map(rounded)
    }

    /// Brings what the delta goes on from out of the journal to where the delta goes itself, and drops any other.
    fn take_journal(&mut self, mut sink: Sink, toward: &Toward, header: &Header) -> Result<Sink> {
        let held = self.set_journal(None).filter(|_| header.resumes.is_some());
        if let (Some(contents), Sink::Direct(direct)) = (held, &mut sink) {
            let failed = |what| disk_error(what, self.destination().path(), INTERRUPTED);
            let longest = contents.segments.iter().map(|s| s.header.size_after).max().unwrap_or(0);
            if !self.destination().is_device() && direct.disk.len() < longest {
                direct.disk.resize(longest).map_err(failed("grow"))?;
            }
            let mut positions = direct.base.clone();
            journal::replay(
                self.state(),
                ARRIVING,
                &contents,
                &mut direct.applier,
                &mut positions,
                failed("write to"),
            )?;
            direct.passing.extend(&contents.unread);
            direct.unsure_before.extend(&contents.unread);
            direct.base = contents.positions(&direct.base);
            direct.applier.rewind(kept(header, &direct.base)).map_err(failed("write to"))?;
            direct.save(self, toward)?;
        }
        self.drop_journal()?;
        Ok(sink)
    }
}

impl Direct {
    /// What it adds to the trail is noted from here on: nothing was written yet.
    pub(super) fn leaves(&mut self, footprint: Footprint) {
        self.footprint = Some(footprint);
    }

    /// Makes what has come durable if much has, or not for a while.
    pub(super) fn save_now_and_then(&mut self, replica: &mut Replica, toward: &Toward) -> Result<()> {
        let much = self.applier.written - self.saved_bytes >= replica.save_bytes();
        if much || self.saved.elapsed() >= SAVE_TIME { self.save(replica, toward) } else { Ok(()) }
    }

    /// Makes what has come durable, and says so in the lineage.
    fn save(&mut self, replica: &mut Replica, toward: &Toward) -> Result<()> {
        let upto = whole_blocks(self.applier.position(), toward.block_size, toward.size);
        self.applier.flush().map_err(disk_error("flush", replica.destination().path(), INTERRUPTED))?;
        (self.saved, self.saved_bytes) = (Instant::now(), self.applier.written);
        if self.written.is_some() {
            return Ok(());
        }
        let positions = reached(&self.base, toward.epoch, upto, toward.size);
        let unsure = match self.passing.has_unread() {
            true => {
                let mut set = self.unsure_before.clone();
                set.join(self.passing.set());
                Some(replica.keep_unsure(&set, INTERRUPTED)?)
            }
            false => None,
        };
        let step = replica.lineage().step.as_ref();
        if step.is_none_or(|step| step.positions == positions && unsure.is_none()) {
            return Ok(());
        }
        let in_place = replica.writes_to() == Name::Final && !replica.destination().is_device();
        // With its times: a file that bears an earlier one does not have these parts.
        let settled = in_place.then(|| replica.destination().settle()).transpose();
        let settled = settled.map_err(disk_error("flush", replica.destination().path(), INTERRUPTED))?;
        if let Some(step) = &mut replica.lineage_mut().step {
            step.durable = settled.map_or(0, |stamp| stamp.changed);
            step.positions = positions;
            step.unsure = unsure.unwrap_or_else(|| step.unsure.clone());
            // Not before the step says so: if what comes in between fails, the next save must say it.
            self.passing.kept_unread();
        }
        replica.store()
    }
}

impl Direct {
    /// Goes on with what was applied. False if all of it is complete.
    pub(super) fn advance(&mut self) -> bool {
        self.applier.advance()
    }

    /// Applies a frame; without one, all that is left of those before.
    pub(super) fn frame(&mut self, frame: Option<Frame>) -> std::result::Result<(), Stop> {
        let all = frame.is_none();
        if let Some(frame) = &frame {
            self.passing.records(&frame.records);
            if let Some(footprint) = &mut self.footprint {
                footprint.records(&frame.records);
            }
            if let Some(touched) = &mut self.touched {
                touched.records(&frame.records);
            }
        }
        let Some(copies) = &mut self.copies else {
            return frame.map_or(Ok(()), |frame| self.applier.frame(frame)).map_err(Stop::Disk);
        };
        for record in frame.iter().flat_map(|frame| &frame.records) {
            let fits = match &mut self.written {
                Some(written) => written.add(record),
                None if record.offset() >= std::mem::replace(&mut self.end, record.end()) => Ok(()),
                None => Err(format!("its records are out of order at byte {}", record.offset())),
            };
            fits.map_err(Stop::Delta)?;
        }
        if let Some(frame) = frame {
            copies.push(frame);
        }
        while let Some(frame) = copies.next(all)? {
            self.applier.frame_of_copies(frame).map_err(Stop::Disk)?;
        }
        Ok(())
    }

    /// Bytes written to the destination so far.
    pub(super) fn written(&self) -> u64 {
        self.applier.written
    }

    /// Commits the delta, once its trailer was taken. Returns the bytes written and read.
    pub(super) fn finish(self, replica: &mut Replica, toward: &Toward) -> Result<(u64, u64)> {
        let Direct { disk, mut applier, copies, passing, touched, footprint, .. } = self;
        let size = toward.size;
        {
            let failed = |what| disk_error(what, replica.destination().path(), INTERRUPTED);
            applier.finish(size).map_err(failed("write to"))?;
            if !replica.destination().is_device() && disk.len() != size {
                disk.resize(size).map_err(failed("cut"))?;
            }
            applier.flush().map_err(failed("flush"))?;
        }
        let counts = (applier.written, applier.read + copies.as_ref().map_or(0, |c| c.read));
        applier.marks.leave(replica.destination());
        drop((applier, copies, disk));
        replica.keep_past(touched, toward)?;
        let set = passing.end();
        if let Some(mut footprint) = footprint {
            footprint.reach(replica.state(), toward, &set);
        }
        let unsure = replica.keep_unsure(&set, INTERRUPTED)?;
        replica.commit_step(toward, unsure)?;
        Ok(counts)
    }

    /// Keeps what has come of a delta that was cut off.
    pub(super) fn keep(mut self, replica: &mut Replica, toward: &Toward) -> Result<()> {
        let drained = self.applier.drain();
        // Nothing but its own writes may be taken for the destination's.
        let whole = replica.writes_to() == Name::Final;
        let useless = replica.settings().is_some() && replica.begins_anew();
        let saved = match self.applier.has_forgotten() || useless {
            true => replica.drop_useless_clone(),
            false => self.save(replica, toward),
        };
        if whole {
            replica.rest()?;
        }
        saved?;
        drained.map_err(disk_error("write to", replica.destination().path(), INTERRUPTED))
    }
}

/// The positions of what a delta changes while that is under way. One that copies within the same place leaves
/// content that is unknown.
fn while_made(header: &Header, positions: Vec<Position>) -> Vec<Position> {
    if header.method != Method::Rolling {
        return positions;
    }
    let upto = known(&positions).max(header.size_before).max(header.size_after);
    vec![Position { epoch: None, upto }]
}
