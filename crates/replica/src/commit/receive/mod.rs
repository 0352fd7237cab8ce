//! Receiving a delta: to the journal, or straight to where it is written.

use std::io;

use delta::{Decoder, Epoch, Event, Header, Method, Unit};
use serde::{Deserialize, Serialize};

use crate::commit::copies::CopyError;
use crate::error::{INTERRUPTED, ReplicaError, Result, disk_error};
use crate::journal::Contents;
use crate::journal::trail::Footprint;
use crate::known::verdict::Coverage;
use crate::replica::Replica;
use crate::state::lineage::{Step, StepKind, Toward};

mod direct;
mod journaled;

use direct::Direct;
use journaled::ToJournal;

/// How a delta becomes part of a replica. A seed goes to NAME.partial, or in place on a device, whatever is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CommitMode {
    /// Stored in the journal as it arrives, merged once it is whole.
    #[default]
    Journal,
    /// Written to the destination as it arrives, which is incomplete meanwhile.
    InPlace,
    /// Written to a clone (XFS, Btrfs), which takes the destination's place at the end.
    Reflink,
}

/// What a commit did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The epoch that the replica is at.
    pub epoch: Epoch,
    /// Bytes written, to the journal and to the destination.
    pub bytes_written: u64,
    /// Bytes of the destination read, to be copied or to fill the gaps of what was written whole.
    pub bytes_read: u64,
}

/// A delta being received. Dropped before [`DeltaReceiver::finish`], it keeps what has come, as [`DeltaReceiver::keep`] does.
pub struct DeltaReceiver<'a> {
    replica: &'a mut Replica,
    decoder: Decoder,
    toward: Toward,
    sink: Sink,
    /// A unit could not be taken: none that follows is, and nothing is committed.
    failed: bool,
}

enum Sink {
    Journal(Box<ToJournal>),
    Direct(Box<Direct>),
    Closed,
}

impl Replica {
    /// Begins to receive a delta by its header.
    ///
    /// # Errors
    /// Refused if the delta does not fit what [`Replica::status`] says; then nothing was changed.
    pub fn receive(&mut self, header: Unit, commit: CommitMode) -> Result<DeltaReceiver<'_>> {
        self.sound()?;
        self.drop_useless_clone()?;
        let wrong = |error: String| ReplicaError::Delta { path: self.path().to_path_buf(), error };
        let mut raw = Vec::new();
        delta::Writer::new(&mut raw).unit(&header).map_err(|e| wrong(e.to_string()))?;
        let mut decoder = Decoder::new();
        let header = match decoder.push(header) {
            Ok(Event::Header(header)) => header,
            Ok(_) => return Err(wrong("it does not begin with its header".into())),
            Err(e) => return Err(wrong(e.to_string())),
        };
        let toward = Toward::of(&header).ok_or_else(|| wrong("it names no epoch".into()))?;
        self.destination().check_size(toward.size).map_err(|why| {
            ReplicaError::Refused(format!(
                "{} cannot become as large as its source: {why}",
                self.path().display()
            ))
        })?;
        if header.method == Method::Rolling && header.resumes.is_some() {
            return Err(wrong("a rolling delta cannot continue another one".into()));
        }
        self.check_resume(&header)?;
        let fit = self.check(&header);
        if let (Err(_), Some(Step { kind: StepKind::Clone { .. }, .. })) = (&fit, &self.lineage().step) {
            // It may fit what the clone was made from, which is as it was.
            let step = self.lineage_mut().step.take();
            if let Err(e) = self.check(&header) {
                self.lineage_mut().step = step;
                return Err(e);
            }
            self.remove_partial()?;
            self.store()?;
        } else {
            fit?;
        }
        let seeds =
            header.is_seed() && header.resumes.is_none() && self.lineage().epoch != Some(toward.epoch);
        if !seeds && commit == CommitMode::InPlace && self.lineage().step.is_none() && self.keeps_past() {
            return Err(self.keeps_nothing_in_place());
        }
        match header.partial {
            // What is repaired stays at its epoch, which is as old as it was.
            true => *self.arrival_mut() = self.lineage().at,
            false => self.admit_alone()?,
        }
        self.refuse_ahead(&header, seeds)?;
        if self.lineage().epoch.is_some() && !self.lineage().is_followed_by(&toward) {
            self.herald_back()?;
        }
        self.take_over()?;
        self.keep_doubt()?;
        self.hear_term()?;
        self.set_keep()?;
        let footprint = self.footprint(&header)?;
        let mut sink = match self.lineage().step.as_ref().map(|s| s.kind) {
            _ if seeds => self.seed(&toward, &header)?,
            Some(StepKind::NewFile { .. } | StepKind::Clone { .. }) => self.go_on(&toward, &header)?,
            _ => match commit {
                CommitMode::Journal => {
                    if self.lineage().step.is_none() {
                        // Before its end can be durable: from then on only the group commits it. And before room is reserved for
                        // the next lineage: this one would take it.
                        self.join_group()?;
                    }
                    self.journal_sink(&header, &raw)?
                }
                CommitMode::InPlace => self.in_place(&toward, &header)?,
                CommitMode::Reflink => self.reflink(&toward, &header)?,
            },
        };
        if let Sink::Direct(direct) = &mut sink {
            direct.leaves(footprint);
        }
        Ok(DeltaReceiver { replica: self, decoder, toward, sink, failed: false })
    }

    /// Refuses a delta from a file where batches of a mirror have brought the replica ahead, and it is of a branch that does not have them, even
    /// if it names their blocks: this replica may be the only one that does.
    fn refuse_ahead(&self, header: &Header, seeds: bool) -> Result<()> {
        let own = self.options().term != 0 || self.rewinds();
        let has_all = header.lives.leads_over(&self.lineage().role.lives);
        if own || seeds || header.binds.is_some() || header.batch || has_all || !self.lineage().is_ahead() {
            return Ok(());
        }
        let (path, epoch) = (self.path().display(), self.lineage().epoch);
        let number = epoch.map_or(0, |epoch| epoch.number);
        Err(ReplicaError::Refused(format!(
            "{path} was brought ahead of epoch {number} by a mirror, and the source of the delta did not have what was brought ({}) when that was \
             made. Nothing was changed. \"dsync sync\" from its source brings it to an epoch. If that is gone, \"dsync promote --force \
             {path}\" goes on with what may be the only copy of what was written last. To give that up, run \"dsync rewind --to {number} {path}\" if \
             its past is kept (\"dsync rewind\" lists it), and merge again",
            device::human_size(self.lineage().unsure_bytes())
        )))
    }

    /// What a delta with this header adds to the trail, if it goes where the destination is. A journal says it itself.
    fn footprint(&self, header: &Header) -> Result<Footprint> {
        let mut footprint = Footprint::new(self.lineage(), self.unsure()?);
        footprint.header(header);
        if header.is_seed() {
            footprint.begins_after(self.before());
        }
        if header.resumes.is_some() {
            footprint.is_late();
        }
        Ok(footprint)
    }

    /// Remembers the source's term before anything of it is taken. A delta in a file does not tell.
    fn hear_term(&mut self) -> Result<()> {
        if self.rewinds() {
            return Ok(());
        }
        let term = self.options().term;
        if term == 0 || term == self.lineage().role.term {
            return Ok(());
        }
        self.lineage_mut().role.term = term;
        if self.is_kept() { self.store() } else { Ok(()) }
    }

    /// True if a delta that is committed this way is made within the destination's content, so that its copies must be in an
    /// order in which they can be made. Otherwise all deltas ascend.
    pub fn is_in_place(&self, commit: CommitMode) -> bool {
        match self.lineage().step.as_ref().map(|s| s.kind) {
            Some(StepKind::NewFile { .. } | StepKind::Clone { .. }) => true,
            Some(StepKind::InPlace) | None => commit == CommitMode::InPlace,
        }
    }

    /// Whether what the delta goes on from is what the journal holds.
    fn check_resume(&self, header: &Header) -> Result<()> {
        let Some(resumes) = header.resumes else { return Ok(()) };
        let held = self.journal().and_then(Contents::resume);
        if held == Some(resumes) {
            return Ok(());
        }
        let has = match held {
            Some(held) => format!("holds {} frames of an interrupted delta {}", held.frames, held.stream),
            None => "holds no interrupted delta".into(),
        };
        let given = format!(
            "the delta continues one of {} frames, {}: run \"dsync sync\" again",
            resumes.frames, resumes.stream
        );
        Err(ReplicaError::WrongEpoch { path: self.path().to_path_buf(), has, given })
    }

    fn keeps_nothing_in_place(&self) -> ReplicaError {
        ReplicaError::Refused(format!(
            "the past of {} is kept, and a commit in place overwrites it as the delta comes: pass --commit journal, or \
             --keep none, which drops the moments kept so far",
            self.path().display()
        ))
    }

    fn given_up(&self) -> ReplicaError {
        ReplicaError::Delta {
            path: self.path().to_path_buf(),
            error: "receiving it was ended by an error".into(),
        }
    }
}

/// Why the rest of a delta is not taken.
enum Stop {
    /// Something is wrong with it.
    Delta(String),
    /// The destination's disk has failed.
    Disk(io::Error),
    /// The journal has.
    Journal(io::Error),
}

impl From<delta::Error> for Stop {
    fn from(error: delta::Error) -> Stop {
        Stop::Delta(error.to_string())
    }
}

impl From<CopyError> for Stop {
    fn from(trouble: CopyError) -> Stop {
        match trouble {
            CopyError::Disk(error) => Stop::Disk(error),
            CopyError::Other { offset, from } => Stop::Delta(format!(
                "byte {from} does not hold what it copies to byte {offset}: run \"dsync sync\" again"
            )),
        }
    }
}

impl DeltaReceiver<'_> {
    /// Takes the next unit.
    ///
    /// # Errors
    /// What is wrong with the delta, or with the place it goes to. What came before is kept.
    pub fn unit(&mut self, unit: Unit) -> Result<()> {
        self.unit_seen(unit, |_| {})
    }

    /// How much of the replica is equal to the source after its commit, as far as is known.
    pub fn covers(&self) -> Coverage {
        match self.decoder.header() {
            None => Coverage::Part,
            Some(header) if header.partial => Coverage::Part,
            Some(header) if header.is_seed() => Coverage::Whole,
            // What one that goes on does not look at was looked at when the replica was another.
            Some(header) if header.resumes.is_some() => Coverage::Changed,
            Some(header) if header.binds.is_some() && header.method != Method::Tracked => Coverage::Whole,
            Some(_) => Coverage::Changed,
        }
    }

    /// The delta's header.
    pub fn header(&self) -> Option<&Header> {
        self.decoder.header()
    }

    /// Takes the next unit as [`DeltaReceiver::unit`] does, and shows a frame, verified, before it goes where it belongs.
    ///
    /// # Errors
    /// As [`DeltaReceiver::unit`].
    pub fn unit_seen(&mut self, unit: Unit, seen: impl FnOnce(&delta::Frame)) -> Result<()> {
        self.sound()?;
        let taken = self.take(unit, seen);
        self.failed = taken.is_err();
        taken
    }

    fn sound(&self) -> Result<()> {
        if !self.failed {
            return Ok(());
        }
        let error = "an earlier part of it failed".into();
        Err(ReplicaError::Delta { path: self.replica.path().to_path_buf(), error })
    }

    fn take(&mut self, unit: Unit, seen: impl FnOnce(&delta::Frame)) -> Result<()> {
        let path = self.replica.destination().path().to_path_buf();
        let taken = match &mut self.sink {
            Sink::Journal(journal) => journal.unit(unit, &mut self.decoder, seen),
            Sink::Direct(direct) => (|| {
                let frame = match self.decoder.push(unit)? {
                    Event::Frame(frame) => {
                        seen(&frame);
                        Some(frame)
                    }
                    _ => None,
                };
                direct.frame(frame)
            })(),
            Sink::Closed => return Err(self.replica.given_up()),
        };
        match taken {
            Ok(()) => {}
            Err(Stop::Delta(error)) => return Err(ReplicaError::Delta { path, error }),
            Err(Stop::Disk(e)) => {
                let what = if self.decoder.header().is_some_and(|h| h.method == Method::Rolling) {
                    "read or write"
                } else {
                    "write to"
                };
                let mut error = disk_error(what, &path, INTERRUPTED)(e);
                if let (ReplicaError::Full { missing, .. }, Sink::Direct(direct)) = (&mut error, &self.sink) {
                    *missing = direct.lacks;
                }
                return Err(error);
            }
            Err(Stop::Journal(e)) => {
                let (gave, grows) = match std::mem::replace(&mut self.sink, Sink::Closed) {
                    Sink::Journal(journal) => {
                        (journal.gave_way(), journal.grows(self.replica.expected(), self.toward.size))
                    }
                    _ => (false, 0),
                };
                return Err(self.replica.journal_failed(gave, grows, e));
            }
        }
        if let Sink::Direct(direct) = &mut self.sink {
            direct.save_now_and_then(self.replica, &self.toward)?;
        }
        Ok(())
    }

    /// True if room ran out, so that the rest is only counted: once its trailer was taken, [`DeltaReceiver::keep`] drops the delta, and it is to be
    /// sent again. Nothing is given up for it before.
    pub fn is_counted(&self) -> bool {
        matches!(&self.sink, Sink::Journal(journal) if journal.is_counted())
    }

    /// Goes on with what was taken, for a caller that has no unit at hand. False if there is nothing to go on with. What fails is told by
    /// the next unit, or by [`DeltaReceiver::finish`].
    pub fn advance(&mut self) -> bool {
        match &mut self.sink {
            Sink::Direct(direct) => direct.advance(),
            Sink::Journal(_) | Sink::Closed => false,
        }
    }

    /// Ends a delta that cannot be completed: nothing of it is kept.
    pub(crate) fn give_up(mut self) {
        if let Sink::Journal(_) = std::mem::replace(&mut self.sink, Sink::Closed) {
            self.replica.give_up_journal();
        }
    }

    /// Commits the delta, once its trailer was taken: durable when this returns.
    ///
    /// # Errors
    /// If the trailer is missing, or the place it goes to fails. What came is kept, and finished or gone on from later.
    pub fn finish(mut self) -> Result<Committed> {
        self.whole()?;
        let replica = &mut *self.replica;
        if replica.lineage().group.is_some() && !self.decoder.header().is_some_and(|h| h.partial) {
            return Err(replica.in_group());
        }
        let (written, read) = match std::mem::replace(&mut self.sink, Sink::Closed) {
            Sink::Journal(journal) => journal.finish(replica, &self.decoder, &self.toward)?,
            Sink::Direct(direct) => direct.finish(replica, &self.toward)?,
            Sink::Closed => return Err(replica.given_up()),
        };
        replica.refresh()?;
        let bytes_written = replica.take_passed() + written;
        Ok(Committed { epoch: self.toward.epoch, bytes_written, bytes_read: read })
    }

    /// Prepares the delta for the commit of the group, once its trailer was taken: durable when this returns, and not merged.
    ///
    /// # Errors
    /// As [`DeltaReceiver::finish`]; refused if it does not go to the journal.
    pub fn prepare(mut self) -> Result<Epoch> {
        self.whole()?;
        let replica = &mut *self.replica;
        if let Some(refused) = replica.no_journal() {
            return Err(refused);
        }
        match std::mem::replace(&mut self.sink, Sink::Closed) {
            Sink::Journal(journal) if replica.lineage().group.is_some() => {
                journal.prepare(replica, &self.decoder, &self.toward)?;
            }
            _ => return Err(replica.given_up()),
        }
        Ok(self.toward.epoch)
    }

    /// Fails if a unit was not taken, or has not come.
    fn whole(&self) -> Result<()> {
        self.sound()?;
        if self.decoder.is_complete() {
            return Ok(());
        }
        let error = delta::Error::NoTrailer { units: self.decoder.units() }.to_string();
        Err(ReplicaError::Delta { path: self.replica.path().to_path_buf(), error })
    }

    /// Ends a delta that was cut off: what has come is kept, and a next delta may go on from it.
    ///
    /// # Errors
    /// If it cannot be recorded.
    pub fn keep(mut self) -> Result<()> {
        self.put_away()?;
        self.replica.refresh()
    }

    /// Ends the delta of a pass, after which that of the cut comes: what has come is kept. What was another source's replica is this one's
    /// from here on, if the pass reached its end: only then may the delta of the cut go on from it.
    ///
    /// # Errors
    /// If it cannot be recorded.
    pub fn keep_pass(mut self) -> Result<()> {
        let written = self.written();
        self.put_away()?;
        self.replica.count_pass(written);
        self.replica.refresh()?;
        let (source, epoch, size) = (self.toward.source, self.toward.epoch, self.toward.size);
        let first = self.replica.status().positions.first();
        let whole = first.is_some_and(|p| p.epoch == Some(epoch) && p.upto >= size);
        self.replica.follow(source, whole)
    }

    /// Bytes that were written of it so far.
    fn written(&self) -> u64 {
        match &self.sink {
            Sink::Journal(journal) => journal.written(),
            Sink::Direct(direct) => direct.written(),
            Sink::Closed => 0,
        }
    }

    fn put_away(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.sink, Sink::Closed) {
            Sink::Journal(journal) => journal.keep(self.replica, &self.decoder),
            Sink::Direct(direct) => direct.keep(self.replica, &self.toward),
            Sink::Closed => Ok(()),
        }
    }
}

impl Drop for DeltaReceiver<'_> {
    fn drop(&mut self) {
        // After an error; `keep` is for callers that must know.
        let _ = self.put_away();
        self.replica.set_working(None);
        let _ = self.replica.refresh();
    }
}
