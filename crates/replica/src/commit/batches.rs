//! Committing a mirror's batches: each is appended to the journal, and committed by one sync of that. What it changes is brought
//! to the destination after; that is flushed, and the journal begun anew, only where that has grown long. Opening the replica
//! merges what the journal holds.
//!
//! Two threads may share the work: one appends what arrives to the [`BatchLog`], the other commits with [`BatchCommitter`].

use std::ops::Range;
use std::sync::Arc;

use delta::{Decoded, Decoder, Event, Unit, UnitKind};
use device::{Buf, Folder, StateFile};
use uuid::Uuid;

use crate::commit::apply::Applier;
use crate::commit::holes::Holes;
use crate::commit::undo_log::UndoLog;
use crate::error::{ReplicaError, Result, SAFE, disk_error, io_error};
use crate::journal::trail::Footprint;
use crate::journal::unsure::{self, Passing, UnsureSet};
use crate::journal::{self, ARRIVING, Contents, Growing, HeldFrames, WHOLE};
use crate::past::views;
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::lineage::{State, Toward, Unsure};

/// Bytes of the journal at which it is begun anew, where there is room for as many.
const LONG: u64 = 256 << 20;
/// The part of the room that is left which a journal may take: what it holds, compressed, may have to go to the same file system
/// once more.
const SHARE: u64 = 2;
/// What became of the replica where a batch could not be taken.
const CONFIRMED: &str = "the replica is at the last batch that was confirmed";
/// Room for so many ranges of the unsure set is made at a time.
const RANGES_AHEAD: u64 = 1024;

/// Where batches are appended as they arrive.
pub struct BatchLog {
    file: Growing,
    folder: Arc<dyn Folder>,
    /// Where an epoch has ended, the journal is begun anew: its past is kept.
    keeps: bool,
    ended: bool,
}

impl BatchLog {
    /// Appends a unit as it came. It is verified when it is committed.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn unit(&mut self, unit: &Unit) -> Result<()> {
        if self.keeps && unit.kind == UnitKind::Header {
            let head = Unit { kind: unit.kind, head: unit.head.clone(), body: Buf::default() };
            // What is wrong with it is said where it is committed.
            self.ended = matches!(Decoder::new().push(head), Ok(Event::Header(header)) if !header.batch);
        }
        self.file.unit(unit).map_err(|e| self.failed(e))
    }

    /// Ends a batch: hands all of it to the file, and returns where it ends there.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn end(&mut self) -> Result<u64> {
        self.file.keep().map_err(|e| self.failed(e))?;
        Ok(self.file.len())
    }

    /// True if it has grown long or an epoch has ended whose past is kept, and should be begun anew with [`BatchCommitter::settle`] before the next batch.
    pub fn is_long(&self) -> bool {
        let room = self.folder.free().map_or(LONG, |free| free / SHARE);
        self.ended || self.file.len() >= room.clamp(1, LONG)
    }

    fn failed(&self, error: std::io::Error) -> ReplicaError {
        disk_error("write the journal", &self.folder.path().join(ARRIVING), CONFIRMED)(error)
    }
}

/// Commits batches, in order.
pub struct BatchCommitter<'a> {
    replica: &'a mut Replica,
    file: Arc<dyn StateFile>,
    applier: Applier,
    /// The journal bears the name of one that may be half merged.
    sealed: bool,
    /// Where the last committed batch ends in the journal.
    end: u64,
    batch: Option<Arriving>,
    /// The blocks in which the destination is not of its epoch, committed batches counted.
    unsure: UnsureSet,
    /// What the batch that arrives makes of them.
    passing: Option<Passing>,
    /// What the delta that arrives adds to the trail, if it ends an epoch.
    footprint: Option<Footprint>,
    /// For so many ranges of the set there is room, and so many may be in it.
    room: u64,
    ranges: u64,
    /// Keeps what is replaced.
    undo: Option<UndoLog>,
    /// Committed, and not brought to the destination.
    committed: Option<Arriving>,
    /// A batch could not be taken: what follows it in the journal counts for nothing, so no other is, until that is begun anew.
    closed: bool,
}

/// A batch that arrives.
struct Arriving {
    decoder: Decoder,
    toward: Toward,
    held: HeldFrames,
    contents: Contents,
    /// Those that it will fill.
    holes: Option<Holes>,
}

impl Arriving {
    /// What it replaces.
    fn replaced(&self, replica: &Replica) -> Result<Vec<Range<u64>>> {
        let Some(frames) = self.held.frames() else {
            let mut contents = self.contents.clone();
            contents.segments.clear();
            return replica.replaced_by(WHOLE, &[contents]);
        };
        let records = frames.iter().flat_map(|frame| &frame.records);
        Ok(records.map(|record| record.offset()..record.end()).collect())
    }
}

impl Replica {
    /// Begins to receive batches: deltas that are each bound to the state that the one before left.
    ///
    /// # Errors
    /// Refused if there is no replica that a batch could fit, or a step is under way.
    pub fn batches(&mut self) -> Result<(BatchLog, BatchCommitter<'_>)> {
        if self.lineage().state == State::Incomplete
            || self.lineage().epoch.is_none()
            || self.lineage().step.is_some()
            || self.status().changed.is_some()
        {
            return Err(ReplicaError::Refused(format!(
                "{} is not a complete replica yet: run \"dsync sync\" first",
                self.path().display()
            )));
        }
        self.sound()?;
        self.admit_alone()?;
        self.untouched()?;
        self.set_keep()?;
        self.set_journal(None);
        let disk = self.destination().open(Name::Final)?;
        let applier = Applier::new(disk, u64::MAX, false);
        let applier = applier.map_err(io_error("open", self.destination().path()))?;
        let undo = self.begin_log()?;
        let log = self.new_log()?;
        let (file, unsure) = (log.file.file(), self.unsure()?);
        let batches = BatchCommitter {
            replica: self,
            file,
            applier,
            sealed: false,
            end: 0,
            batch: None,
            passing: None,
            footprint: None,
            room: 0,
            ranges: unsure.count(),
            unsure,
            undo,
            committed: None,
            closed: false,
        };
        Ok((log, batches))
    }

    fn new_log(&self) -> Result<BatchLog> {
        self.reserve()?;
        let path = self.folder().join(ARRIVING);
        let mut file =
            Growing::open(self.state(), 0).map_err(disk_error("write the journal", &path, CONFIRMED))?;
        let (keeps, folder) = (self.settings().is_some(), self.shared_state());
        let readers = folder.clone();
        file.relieve(Some(Box::new(move |_| views::give_way(&*readers).into())));
        Ok(BatchLog { file, folder, keeps, ended: false })
    }
}

impl BatchCommitter<'_> {
    fn wrong(&self, error: impl ToString) -> ReplicaError {
        ReplicaError::Delta { path: self.replica.path().to_path_buf(), error: error.to_string() }
    }

    /// Takes a part of a batch; after one has failed, none is taken.
    fn guard(&mut self, take: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.replica.sound()?;
        if self.closed {
            return Err(self.wrong("an earlier part of it failed"));
        }
        let taken = take(self);
        self.closed = taken.is_err();
        taken
    }

    /// Begins a batch by its header.
    ///
    /// # Errors
    /// Refused if it does not fit what the one before left.
    pub fn begin(&mut self, header: Unit) -> Result<()> {
        self.guard(|batches| batches.take_header(header))
    }

    fn take_header(&mut self, header: Unit) -> Result<()> {
        let mut decoder = Decoder::new();
        let header = match decoder.push(header).map_err(|e| self.wrong(e))? {
            Event::Header(header) => header,
            _ => return Err(self.wrong("a batch does not begin with its header")),
        };
        let lineage = &self.replica.lineage();
        if header.binds.is_none() || header.resumes.is_some() || header.size_after != lineage.size {
            return Err(self.wrong("it is not a batch for this replica"));
        }
        self.replica.check(&header)?;
        let toward = Toward::of(&header).ok_or_else(|| self.wrong("it names no epoch"))?;
        let contents = Contents { start: self.end, ..Contents::default() };
        let held = HeldFrames::new(true);
        let holes = self.replica.holes(u64::MAX)?;
        // Joined with those before at the commit.
        let before = if header.batch { UnsureSet::new() } else { self.unsure.clone() };
        self.passing = Some(Passing::new(before, &header));
        self.footprint = (!header.batch).then(|| {
            let mut footprint = Footprint::new(self.replica.lineage(), self.unsure.clone());
            footprint.header(&header);
            footprint
        });
        if let Some(undo) = &mut self.undo {
            undo.begin();
        }
        self.batch = Some(Arriving { decoder, toward, held, contents, holes });
        Ok(())
    }

    /// Takes the next frame of the batch, which was verified in itself.
    ///
    /// # Errors
    /// If it is out of order.
    pub fn frame(&mut self, decoded: Decoded) -> Result<()> {
        self.guard(|batches| batches.take_frame(decoded))
    }

    fn take_frame(&mut self, decoded: Decoded) -> Result<()> {
        let Some(batch) = &mut self.batch else {
            return Err(self.wrong("a frame outside of a batch"));
        };
        let taken = batch.decoder.append(decoded);
        match taken {
            Ok(frame) => {
                if let Some(passing) = &mut self.passing {
                    passing.records(&frame.records);
                    self.ranges += frame.records.len() as u64;
                }
                if let Some(footprint) = &mut self.footprint {
                    footprint.records(&frame.records);
                }
                if let Some(undo) = &mut self.undo {
                    undo.records(&frame.records);
                }
                let path = self.replica.destination().path();
                let looked = batch.holes.as_mut().map(|holes| holes.records(&frame.records));
                looked.transpose().map_err(io_error("look for holes in", path))?;
                batch.held.add(frame);
                Ok(())
            }
            Err(e) => Err(self.wrong(e)),
        }
    }

    /// Commits the batch with its trailer; `end` is what [`BatchLog::end`] returned after it. Durable when this returns: the
    /// batch is then brought to the destination with [`BatchCommitter::apply`].
    ///
    /// # Errors
    /// If the batch is not whole, another program has changed the destination, or the journal cannot be made durable: then
    /// the replica is where it was.
    pub fn commit(&mut self, trailer: Unit, end: u64) -> Result<()> {
        self.guard(|batches| batches.take_trailer(trailer, end))
    }

    fn take_trailer(&mut self, trailer: Unit, end: u64) -> Result<()> {
        let Some(mut batch) = self.batch.take() else {
            return Err(self.wrong("a trailer outside of a batch"));
        };
        match batch.decoder.push(trailer) {
            Ok(Event::End(_)) => {}
            Ok(_) => return Err(self.wrong("a batch does not end with its trailer")),
            Err(e) => return Err(self.wrong(e)),
        }
        if let Err(e) = self
            .replica
            .untouched()
            .and_then(|()| self.reserve_unsure())
            .and_then(|()| self.replica.make_room(batch.holes.take(), self.sealed, CONFIRMED))
        {
            // Whoever opens the journal next must not merge it, and must see which delta the destination has got last.
            let _ = self.file.set_len(self.end).and_then(|()| self.file.sync());
            return Err(e);
        }
        let folder = self.replica.state();
        let durable = if self.sealed { self.file.sync() } else { journal::seal(&*self.file, folder) };
        let state = CONFIRMED;
        if let Err(e) = durable {
            // The kernel drops what it could not write, but shows it to the next process that opens the journal.
            let _ = self.file.set_len(self.end);
            return Err(disk_error("sync the journal", &folder.path().join(WHOLE), state)(e));
        }
        self.sealed = true;
        batch.contents.bytes = end - self.end;
        batch.contents.whole = true;
        self.end = end;
        let Some(stamp) = self.replica.lineage().stamp.clone() else {
            return Err(self.wrong("the replica was never committed"));
        };
        match self.passing.take().map(|passing| (passing.adds(), passing.end())) {
            Some((true, written)) => self.unsure.join(&written),
            renewed => self.unsure = renewed.map(|(_, set)| set).unwrap_or_default(),
        }
        if let Some(mut footprint) = self.footprint.take() {
            footprint.reach(self.replica.state(), &batch.toward, &self.unsure);
        }
        // Kept when the journal is begun anew: until then that tells which blocks these are.
        let unsure = match self.unsure.is_empty() {
            true => Unsure::Nothing,
            false => Unsure::Blocks { file: Uuid::nil(), bytes: 0 },
        };
        let at = self.replica.arrived(&batch.toward);
        *self.replica.lineage_mut() = self.replica.lineage().after(&batch.toward, stamp, unsure, at);
        self.committed = Some(batch);
        Ok(())
    }

    /// Makes room for the unsure set, before the journal is sealed that makes it one.
    fn reserve_unsure(&mut self) -> Result<()> {
        if self.ranges > self.room {
            let more = self.ranges + RANGES_AHEAD;
            let replica = &*self.replica;
            replica.at_readers_cost(|| unsure::reserve(replica.state(), more, CONFIRMED))?;
            self.room = more;
        }
        Ok(())
    }

    /// What the user should know, since this was asked last.
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.replica.take_warnings()
    }

    /// Brings what was committed to the destination. Not durable, as the journal has it.
    ///
    /// # Errors
    /// If the destination fails: the batch is safe in the journal, and so are all that were not made durable there. Nothing
    /// more can be done with this replica then: opening it anew merges them again.
    pub fn apply(&mut self) -> Result<()> {
        self.replica.sound()?;
        let Some(batch) = self.committed.take() else { return Ok(()) };
        self.replica.begin_commit()?;
        self.replica.keep_for_readers(|replica| batch.replaced(replica))?;
        let path = self.replica.destination().path().to_path_buf();
        let failed = |what| disk_error(what, &path, SAFE);
        let undo = self.undo.take();
        self.undo = self.replica.keep_replaced(undo, batch.toward.stream, !batch.toward.batch)?;
        self.applier.keep(self.replica.work(false)?);
        self.applier.rewind(u64::MAX).map_err(failed("write to"))?;
        match batch.held.into_frames() {
            Some(frames) => {
                for frame in frames {
                    self.applier.frame(frame).map_err(failed("write to"))?;
                }
            }
            None => {
                let mut contents = batch.contents;
                contents.segments.clear();
                let mut positions = self.replica.positions();
                let folder = self.replica.state();
                let to = failed("write to");
                journal::replay(folder, WHOLE, &contents, &mut self.applier, &mut positions, to)?;
            }
        }
        self.applier.drain().map_err(failed("write to"))?;
        self.replica.still_there(self.replica.lineage().size)?;
        self.replica.rest()?;
        self.replica.end_commit();
        Ok(())
    }

    /// Makes the destination durable, moves the lineage, and begins the journal anew.
    ///
    /// # Errors
    /// If the destination cannot be flushed: all is safe in the journal.
    pub fn settle(&mut self) -> Result<BatchLog> {
        self.apply()?;
        self.flush()?;
        if self.undo.as_ref().is_none_or(UndoLog::has_ended) {
            self.undo = None;
            self.replica.age_past();
            self.undo = self.replica.begin_log()?;
        }
        let log = self.replica.new_log()?;
        self.file = log.file.file();
        // What an empty journal had reserved is given back.
        (self.end, self.closed, self.room) = (0, false, 0);
        Ok(log)
    }

    fn flush(&mut self) -> Result<()> {
        self.replica.sound()?;
        self.replica.begin_commit()?;
        if self.sealed {
            self.make_durable()?;
        } else {
            self.replica.drop_journal()?;
        }
        self.replica.end_commit();
        Ok(())
    }

    fn make_durable(&mut self) -> Result<()> {
        self.replica.untouched()?;
        let path = self.replica.destination().path().to_path_buf();
        let failed = |what| disk_error(what, &path, SAFE);
        self.applier.drain().and_then(|()| self.applier.flush()).map_err(failed("flush"))?;
        std::mem::take(&mut self.applier.marks).leave(self.replica.destination());
        self.replica.note_stamp()?;
        let unsure = self.replica.keep_unsure(&self.unsure, SAFE)?;
        self.replica.lineage_mut().unsure = unsure;
        self.replica.store()?;
        (self.room, self.ranges) = (0, self.unsure.count());
        self.replica.forget_note()?;
        self.replica.remove(WHOLE)?;
        self.sealed = false;
        Ok(())
    }

    /// Ends: what was committed is in the destination, durably.
    ///
    /// # Errors
    /// As [`BatchCommitter::settle`].
    pub fn finish(mut self) -> Result<()> {
        self.apply()?;
        self.flush()?;
        self.undo = None;
        self.replica.age_past();
        self.replica.refresh()
    }
}

impl Drop for BatchCommitter<'_> {
    fn drop(&mut self) {
        // The lineage says what the journal holds, and only its next opening brings both together.
        if self.sealed {
            let _ = self.replica.begin_commit();
        }
        self.replica.set_working(None);
    }
}
