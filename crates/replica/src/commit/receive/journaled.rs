//! A delta on its way to the journal.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use delta::{Decoder, Encoder, Event, Frame, Header, Method, Unit, UnitKind};
use device::Folder;

use super::{Sink, Stop};
use extents::Extents;

use crate::commit::copies::Copies;
use crate::commit::holes::{Holes, rounded};
use crate::commit::undo::Touched;
use crate::error::{IN_PLACE, ReplicaError, Result, disk_error, io_error};
use crate::journal::{self, ARRIVING, Contents, Growing, HeldFrames, JournalSegment, Target, kept};
use crate::replica::{PreparedCommit, Replica};
use crate::state::lineage::Toward;

/// A delta on its way to the journal.
pub(super) struct ToJournal {
    file: Growing,
    /// What the journal held before.
    before: Contents,
    /// Bytes of it that are in order.
    bytes: u64,
    /// Bytes of it up to the end of the last frame.
    frames_end: u64,
    /// What of the delta and of what was held before its source could not read.
    unread: Extents,
    /// Holes of the destination that the delta will fill.
    holes: Option<Holes>,
    /// What the delta replaces, if that is to be kept.
    touched: Option<Touched>,
    /// Moments were dropped to make room for the journal.
    gave: Arc<AtomicBool>,
    /// For a delta that copies.
    rolling: Option<Box<Resolved>>,
    held: HeldFrames,
}

/// A delta whose copies are read before it goes to the journal, where it is like one that was found by comparing: it may be
/// merged again and again.
struct Resolved {
    copies: Copies,
    header: Header,
    /// `None` after the trailer.
    encoder: Option<Encoder>,
    /// What the encoder said last.
    frames: u64,
    upto: u64,
    digest: [u8; 32],
}

/// What has become of a replica whose delta finds no room.
const UNCHANGED: &str = "the replica is unchanged, and what had arrived of the delta is dropped";
/// What has become of one whose past was to make room for that.
const UNCHANGED_WITHOUT_PAST: &str = "the replica is unchanged, but the oldest moments of its past were dropped to make room, and what had arrived of the delta is dropped";

impl Replica {
    /// Removes a journal that cannot be written. If space is short, others need it too; and after a failed sync the kernel drops
    /// what it could not write, so that a later sync succeeds over a journal that is not there. `gave`: moments were dropped to
    /// make room for it. `grows`: bytes that the merge needs in the destination besides.
    pub(super) fn journal_failed(&mut self, gave: bool, grows: u64, error: io::Error) -> ReplicaError {
        self.give_up_journal();
        let state = if gave { UNCHANGED_WITHOUT_PAST } else { UNCHANGED };
        let mut error = disk_error("write the journal", &self.folder().join(ARRIVING), state)(error);
        if let ReplicaError::Full { missing, otherwise, .. } = &mut error {
            // A commit in place keeps nothing of the past, and a group is committed by its journals.
            if !self.keeps_past() && self.lineage().group.is_none() {
                *otherwise = IN_PLACE;
            }
            // A journal in a folder of its own is on a file system of its own, as a rule.
            let grows = if self.options().folder.is_none() { grows } else { 0 };
            let needed = Some(self.expected()).filter(|bytes| *bytes > 0);
            let needed = needed.map(|bytes| bytes.saturating_add(grows));
            let lacks = self.state().free().and_then(|free| needed?.checked_sub(free));
            *missing = lacks.map(rounded);
        }
        error
    }

    pub(super) fn journal_sink(&mut self, header: &Header, raw: &[u8]) -> Result<Sink> {
        self.reserve().inspect_err(|_| drop(self.drop_journal()))?;
        let before = match header.resumes {
            Some(_) => self.set_journal(None).unwrap_or_default(),
            None => {
                self.set_journal(None);
                Contents::default()
            }
        };
        let (mut own, mut rolling) = (Vec::new(), None);
        if header.method == Method::Rolling {
            let (resolved, unit) = self.resolved(header)?;
            delta::Writer::new(&mut own)
                .unit(&unit)
                .map_err(|e| ReplicaError::Delta { path: self.path().to_path_buf(), error: e.to_string() })?;
            rolling = Some(Box::new(resolved));
        }
        let raw = if rolling.is_some() { &own } else { raw };
        let begun = Growing::open(self.state(), before.bytes).and_then(|mut file| {
            io::Write::write_all(&mut file, raw)?;
            Ok(file)
        });
        let mut file = begun.map_err(|e| self.journal_failed(false, 0, e))?;
        let gave = Arc::<AtomicBool>::default();
        file.relieve(self.relief(gave.clone()));
        let holes = match before.bytes {
            0 => self.holes(0)?,
            _ => self.holes_of(ARRIVING, &before)?,
        };
        let touched = match before.bytes {
            0 => self.touched_by(),
            _ => self.touched_of(ARRIVING, &before)?,
        };
        let touched = touched.filter(|_| self.keeps_what_is_replaced(header));
        let unread = before.unread.clone();
        let (bytes, frames_end) = (before.bytes, before.frames_end);
        let held = HeldFrames::new(before.bytes == 0 && rolling.is_none());
        let mut sink =
            ToJournal { file, bytes, frames_end, unread, before, holes, touched, gave, rolling, held };
        let known = kept(header, &sink.before.positions(&self.positions()));
        if let Some(touched) = &mut sink.touched {
            touched.header(header, known);
        }
        if let Some(holes) = &mut sink.holes {
            holes.rewind(header, known).map_err(io_error("look for holes in", self.path()))?;
        }
        Ok(Sink::Journal(Box::new(sink)))
    }

    /// Reads the copies of a delta from the destination, and begins the delta that holds them as data.
    fn resolved(&self, header: &Header) -> Result<(Resolved, Unit)> {
        let header = Header { method: Method::Compare, ..header.clone() };
        let (encoder, unit) = Encoder::new(&header, None)
            .map_err(|e| ReplicaError::Delta { path: self.path().to_path_buf(), error: e.to_string() })?;
        let copies = Copies::new(&self.content()?).map_err(io_error("open", self.destination().path()))?;
        let digest = encoder.digest();
        Ok((Resolved { copies, header, encoder: Some(encoder), frames: 0, upto: 0, digest }, unit))
    }
}

/// Looks at what a frame will replace, and for holes that it will fill.
fn look(
    holes: &mut Option<Holes>,
    touched: &mut Option<Touched>,
    frame: &Frame,
) -> std::result::Result<(), Stop> {
    if let Some(touched) = touched {
        touched.records(&frame.records);
    }
    holes.as_mut().map_or(Ok(()), |holes| holes.records(&frame.records)).map_err(Stop::Disk)
}

impl ToJournal {
    /// Takes a unit, and shows its frame.
    pub(super) fn unit(
        &mut self,
        unit: Unit,
        decoder: &mut Decoder,
        seen: impl FnOnce(&Frame),
    ) -> std::result::Result<(), Stop> {
        let Some(rolling) = &mut self.rolling else {
            if unit.kind == UnitKind::Trailer {
                self.file.keep().map_err(Stop::Journal)?;
            }
            self.file.unit(&unit).map_err(Stop::Journal)?;
            if let Event::Frame(frame) = decoder.push(unit)? {
                seen(&frame);
                journal::note_unread(&mut self.unread, &frame.records);
                look(&mut self.holes, &mut self.touched, &frame)?;
                self.frames_end = self.file.len();
                self.held.add(frame);
            }
            self.bytes = self.file.len();
            return Ok(());
        };
        let whole = match decoder.push(unit)? {
            Event::Frame(frame) => {
                seen(&frame);
                rolling.copies.push(frame);
                false
            }
            _ => true,
        };
        while let Some(frame) = rolling.copies.next(whole)? {
            let Some(encoder) = &mut rolling.encoder else { break };
            look(&mut self.holes, &mut self.touched, &frame)?;
            self.file.unit(&encoder.frame(frame)?).map_err(Stop::Journal)?;
            (rolling.frames, rolling.upto) = (encoder.frames(), encoder.end());
            rolling.digest = encoder.digest();
            self.bytes = self.file.len();
            self.frames_end = self.bytes;
        }
        if let Some(encoder) = rolling.encoder.take_if(|_| whole) {
            self.file.keep().and_then(|()| self.file.unit(&encoder.trailer())).map_err(Stop::Journal)?;
            self.bytes = self.file.len();
        }
        Ok(())
    }

    /// Commits the delta, once its trailer was taken. Returns the bytes written and read.
    pub(super) fn finish(
        mut self,
        replica: &mut Replica,
        decoder: &Decoder,
        toward: &Toward,
    ) -> Result<(u64, u64)> {
        let held = std::mem::replace(&mut self.held, HeldFrames::new(false)).into_frames();
        let (whole, (bytes, copied)) = self.complete(replica, decoder, toward, Growing::close)?;
        let Some(contents) = whole else { return Ok((bytes, copied)) };
        let (written, read) = replica.merge(&[contents], held)?;
        Ok((bytes + written, copied + read))
    }

    /// Prepares the delta for the group's commit, whose intent decides, once its trailer was taken.
    pub(super) fn prepare(self, replica: &mut Replica, decoder: &Decoder, toward: &Toward) -> Result<()> {
        let (whole, cost) = self.complete(replica, decoder, toward, Growing::prepare)?;
        replica.set_prepared(whole.map(|contents| PreparedCommit { contents, toward: toward.clone(), cost }));
        Ok(())
    }

    /// True if a part of it was only counted.
    pub(super) fn is_counted(&self) -> bool {
        self.file.is_counted()
    }

    /// True if moments were dropped to make room for it.
    pub(super) fn gave_way(&self) -> bool {
        self.gave.load(SeqCst)
    }

    /// Bytes of holes that a delta of `expected` bytes, towards a disk of `size`, fills at most.
    pub(super) fn grows(&self, expected: u64, size: u64) -> u64 {
        let rest = expected.saturating_sub(self.written());
        // The journal's error is told, and not that of this.
        self.holes.as_ref().map_or(0, |holes| holes.at_most(rest, size).unwrap_or(rest))
    }

    /// Bytes of the journal that are this delta's.
    pub(super) fn written(&self) -> u64 {
        self.file.len() - self.before.bytes
    }

    /// Makes all durable that a merge needs. Returns what is to be merged, and the bytes written and read for it.
    fn complete(
        self,
        replica: &mut Replica,
        decoder: &Decoder,
        toward: &Toward,
        close: impl FnOnce(Growing, &dyn Folder) -> io::Result<()>,
    ) -> Result<(Option<Contents>, (u64, u64))> {
        let bytes = self.written();
        let contents = self.contents(decoder, true);
        let copied = self.rolling.as_ref().map_or(0, |r| r.copies.read);
        replica.untouched()?;
        if replica.has(toward.stream) {
            // If merged again and interrupted, nothing would tell that it had begun.
            replica.drop_journal()?;
            return Ok((None, (bytes, copied)));
        }
        let room = replica.reserve_unsure(&contents, UNCHANGED);
        if let Err(mut e) = room.and_then(|()| replica.make_room_of_past(self.holes, UNCHANGED)) {
            // Where room is short, the journal's is needed too.
            replica.give_up_journal();
            let gave = self.gave.load(SeqCst) || replica.settings().is_some_and(|settings| settings.dropped);
            if let (ReplicaError::Full { state, .. }, true) = (&mut e, gave) {
                *state = UNCHANGED_WITHOUT_PAST;
            }
            return Err(e);
        }
        replica.note_compared()?;
        if let Err(e) = replica.keep_past(self.touched, toward) {
            if replica.rewinds() {
                replica.give_up_journal();
            }
            return Err(e);
        }
        if let Err(e) = close(self.file, replica.state()) {
            return Err(replica.journal_failed(self.gave.load(SeqCst), 0, e));
        }
        if self.gave.load(SeqCst) {
            replica.warn_of_room();
        }
        Ok((Some(contents), (bytes, copied)))
    }

    /// Keeps what has come of a delta that was cut off.
    pub(super) fn keep(mut self, replica: &mut Replica, decoder: &Decoder) -> Result<()> {
        let contents = self.contents(decoder, decoder.is_complete());
        if let Err(e) = self.file.keep() {
            let grows = self.grows(replica.expected(), decoder.header().map_or(0, |h| h.size_after));
            return Err(replica.journal_failed(self.gave_way(), grows, e));
        }
        if self.is_counted() {
            let holes = self.holes.as_ref().map_or(0, Holes::bytes);
            if decoder.is_complete() {
                replica.counted(self.bytes.saturating_add(holes));
            }
            if !self.file.may_fit(holes) {
                return Err(replica.journal_failed(false, 0, io::ErrorKind::StorageFull.into()));
            }
            replica.give_up_journal();
            return Ok(());
        }
        if !contents.whole && decoder.header().is_some_and(|header| header.partial) {
            replica.give_up_journal();
            return Ok(());
        }
        replica.set_journal((!contents.segments.is_empty()).then_some(contents));
        Ok(())
    }

    /// What the journal holds with what has come of this delta.
    fn contents(&self, decoder: &Decoder, whole: bool) -> Contents {
        let mut contents = self.before.clone();
        let segment = match &self.rolling {
            Some(r) => Some((&r.header, r.frames, r.upto, r.digest)),
            None => decoder.header().map(|h| (h, decoder.frames(), decoder.end(), decoder.digest())),
        };
        let segment = segment.filter(|(_, frames, ..)| *frames > 0 || whole);
        if let Some((header, frames, upto, digest)) = segment {
            contents.segments.push(JournalSegment { header: header.clone(), frames, upto, digest });
            (contents.bytes, contents.frames_end) = (self.bytes, self.frames_end);
            contents.unread.clone_from(&self.unread);
            contents.records += decoder.totals().records;
        }
        contents.whole = whole;
        contents
    }
}
