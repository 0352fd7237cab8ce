//! Receiving a delta and committing it.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use delta::{Decoder, Encoder, Epoch, Event, Frame, Header, Method, Unit};
use device::Disk;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::apply::Applier;
use crate::copies::{Copies, Trouble, Written};
use crate::destination::Name;
use crate::error::{ReplicaError, Result, disk_error, io_error};
use crate::foreign::Keeping;
use crate::holes::Holes;
use crate::journal::{self, ARRIVING, Contents, Growing, Segment, Target, WHOLE, kept};
use crate::lineage::{
    Lineage, Position, State, Step, StepKind, Toward, known, overlay, reached, whole_blocks,
};
use crate::replica::{INTERRUPTED, Replica};

/// How a delta becomes part of a replica. A seed goes to NAME.partial, or in place on a device, whatever is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Commit {
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
    /// Where the replica stands.
    pub epoch: Epoch,
    /// Bytes written, to the journal and to the destination.
    pub bytes_written: u64,
    /// Bytes of the destination read, to be copied or to fill the gaps of what was written whole.
    pub bytes_read: u64,
}

/// How many bytes may be written, and how much time may pass, before what has come is made durable: as much is sent again
/// after a crash.
pub(crate) const SAVE_BYTES: u64 = 64 << 20;
const SAVE_TIME: Duration = Duration::from_secs(2);

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

/// A delta on its way to the journal.
struct ToJournal {
    file: Growing,
    /// What the journal held before.
    before: Contents,
    /// Bytes of it that are in order.
    bytes: u64,
    /// Holes of the destination that the delta will fill.
    holes: Option<Holes>,
    /// For a delta that copies.
    rolling: Option<Box<Resolved>>,
}

/// A delta whose copies are read before it goes to the journal: what lies there is one that was found by comparing, and may
/// be merged again and again.
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

/// A delta on its way to the destination, or to what will take its place.
struct Direct {
    disk: Arc<dyn Disk>,
    applier: Applier,
    /// For a delta that copies.
    copies: Option<Copies>,
    /// For one whose records stand in no order, as it is made where it reads: nothing can be said of how far it is.
    written: Option<Written>,
    /// Where the records of one that ascends have come.
    end: u64,
    /// Where the place stood before.
    base: Vec<Position>,
    saved: Instant,
    saved_bytes: u64,
}

impl Replica {
    /// Begins to receive a delta by its header.
    ///
    /// # Errors
    /// Refused if the delta does not fit what [`Replica::status`] says; then nothing was changed.
    pub fn receive(&mut self, header: Unit, commit: Commit) -> Result<DeltaReceiver<'_>> {
        self.sound()?;
        self.drop_unknown_clone()?;
        let wrong = |error: String| ReplicaError::Delta { path: self.path().to_path_buf(), error };
        let mut raw = Vec::new();
        delta::Writer::new(&mut raw).unit(&header).map_err(|e| wrong(e.to_string()))?;
        let mut decoder = Decoder::new();
        let header = match decoder.push(header) {
            Ok(Event::Header(header)) => header,
            Ok(_) => return Err(wrong("it does not begin with its header".into())),
            Err(e) => return Err(wrong(e.to_string())),
        };
        let toward = self.toward(&header).ok_or_else(|| wrong("it names no epoch".into()))?;
        if header.method == Method::Rolling && header.resumes.is_some() {
            return Err(wrong("it copies, and goes on from another one".into()));
        }
        self.check_resume(&header)?;
        let fit = self.check(&header);
        if let (Err(_), Some(Step { kind: StepKind::Clone { .. }, .. })) = (&fit, &self.lineage.step) {
            // It may fit what the clone was made from, which is as it was.
            let step = self.lineage.step.take();
            if let Err(e) = self.check(&header) {
                self.lineage.step = step;
                return Err(e);
            }
            self.remove_partial()?;
            self.store()?;
        } else {
            fit?;
        }
        let seeds = header.is_seed() && header.resumes.is_none() && self.lineage.epoch != Some(toward.epoch);
        let sink = match self.lineage.step.as_ref().map(|s| s.kind) {
            _ if seeds => self.seed(&toward, &header)?,
            Some(StepKind::NewFile { .. } | StepKind::Clone { .. }) => self.go_on(&toward, &header)?,
            _ => match commit {
                Commit::Journal => self.journal_sink(&header, &raw)?,
                Commit::InPlace => self.in_place(&toward, &header)?,
                Commit::Reflink => self.reflink(&toward, &header)?,
            },
        };
        Ok(DeltaReceiver { replica: self, decoder, toward, sink, failed: false })
    }

    /// True if a delta that is committed this way is made where the destination's content lies, so that its copies must stand
    /// in an order in which they can be made. Otherwise all deltas ascend.
    pub fn is_in_place(&self, commit: Commit) -> bool {
        match self.lineage.step.as_ref().map(|s| s.kind) {
            Some(StepKind::NewFile { .. } | StepKind::Clone { .. }) => true,
            Some(StepKind::InPlace) | None => commit == Commit::InPlace,
        }
    }

    /// Whether what the delta goes on from is what the journal holds.
    fn check_resume(&self, header: &Header) -> Result<()> {
        let Some(resumes) = header.resumes else { return Ok(()) };
        let held = self.journal.as_ref().and_then(Contents::resume);
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

    /// Removes NAME.partial, durably: before the lineage forgets that it is ours.
    pub(crate) fn remove_partial(&self) -> Result<()> {
        let removed = self.destination.remove().and_then(|()| self.destination.sync());
        removed.map_err(io_error("remove the unfinished copy of", self.destination.path()))
    }

    fn given_up(&self) -> ReplicaError {
        ReplicaError::Delta { path: self.path().to_path_buf(), error: "it was given up".into() }
    }

    /// Drops what of a delta is in the journal.
    pub(crate) fn drop_journal(&mut self) -> Result<()> {
        self.journal = None;
        self.remove(ARRIVING)?;
        self.remove(&device::reserved(crate::lineage::NAME))?;
        // It may have got its last name already. Nothing was merged from it.
        self.remove(WHOLE)
    }

    /// The journal can't be written, so it goes. Where space is short, others need that too; and after a failed sync the
    /// system forgets what it could not write, so that a later sync succeeds over a journal that is not there.
    fn journal_failed(&mut self, error: io::Error) -> ReplicaError {
        self.half_done = self.drop_journal().is_err();
        let state = "the replica is unchanged, and what had come of the delta is dropped";
        disk_error("write the journal", &self.folder.path().join(ARRIVING), state)(error)
    }

    fn journal_sink(&mut self, header: &Header, raw: &[u8]) -> Result<Sink> {
        let path = self.folder.path().join(ARRIVING);
        let place = format!("for the journal {}", path.display());
        if let Some(free) = self.folder.free().filter(|free| *free < self.expected) {
            let state = "the replica is unchanged";
            return Err(ReplicaError::Full { place, missing: Some(self.expected - free), state });
        }
        if !self.kept {
            // What was adopted: its journal means nothing without the state it is bound to.
            self.store()?;
        }
        self.reserve().inspect_err(|_| drop(self.drop_journal()))?;
        let before = match header.resumes {
            Some(_) => self.journal.take().unwrap_or_default(),
            None => {
                self.journal = None;
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
        let begun = Growing::open(&*self.folder, before.bytes).and_then(|mut file| {
            io::Write::write_all(&mut file, raw)?;
            Ok(file)
        });
        let file = begun.map_err(|e| self.journal_failed(e))?;
        let holes = match before.bytes {
            0 => self.holes(0)?,
            _ => self.holes_of(ARRIVING, &before)?,
        };
        let mut sink = ToJournal { file, bytes: before.bytes, before, holes, rolling };
        if let Some(holes) = &mut sink.holes {
            let known = kept(header, &sink.before.positions(&self.positions()));
            holes.rewind(known).map_err(io_error("look for holes in", self.path()))?;
        }
        Ok(Sink::Journal(Box::new(sink)))
    }

    /// Reads the copies of a delta from the destination, and begins the delta that holds them as data.
    fn resolved(&self, header: &Header) -> Result<(Resolved, Unit)> {
        let header = Header { method: Method::Compare, ..header.clone() };
        let (encoder, unit) = Encoder::new(&header, None)
            .map_err(|e| ReplicaError::Delta { path: self.path().to_path_buf(), error: e.to_string() })?;
        let copies = Copies::new(&self.content()?).map_err(io_error("open", self.destination.path()))?;
        let digest = encoder.digest();
        Ok((Resolved { copies, header, encoder: Some(encoder), frames: 0, upto: 0, digest }, unit))
    }

    fn seed(&mut self, toward: &Toward, header: &Header) -> Result<Sink> {
        if self.gone && !self.create {
            return Err(ReplicaError::Away(format!(
                "the file of replica {} is gone: bring it back, or pass --create to begin a new replica there",
                self.path().display()
            )));
        }
        self.drop_journal()?;
        if self.gone {
            for name in [journal::WHOLE, crate::foreign::NAME] {
                self.remove(name)?;
            }
            self.gone = false;
        }
        if self.writes_to() == Name::Temporary {
            self.remove_partial()?;
        }
        // Nothing of an old replica is worth anything from here on; where one is replaced, it stays until the rename.
        let lineage = Lineage::new();
        if self.destination.is_device() {
            self.lineage = lineage;
            return self.begin_step(StepKind::InPlace, Vec::new(), toward, header, false);
        }
        // A replica of nothing is an empty file, and ours.
        let ours = self.replace || self.lineage.epoch.is_some();
        let replaces = ours && self.stamp(Name::Final)?.is_some();
        let inode = self.create()?;
        self.lineage = lineage;
        self.begin_step(StepKind::NewFile { inode, replaces }, Vec::new(), toward, header, true)
    }

    fn create(&self) -> Result<u64> {
        // Without its name, what comes could not be gone on from after a power cut.
        match self.destination.create().and_then(|inode| self.destination.sync().map(|()| inode)) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                let mut name = self.destination.path().as_os_str().to_owned();
                name.push(".partial");
                Err(ReplicaError::PartialTaken(name.into()))
            }
            other => {
                other.map_err(disk_error("make an unfinished copy of", self.destination.path(), INTERRUPTED))
            }
        }
    }

    fn in_place(&mut self, toward: &Toward, header: &Header) -> Result<Sink> {
        self.untouched()?;
        let base = while_made(header, self.positions());
        let sink = self.begin_step(StepKind::InPlace, base, toward, header, false)?;
        self.take_journal(sink, toward, header)
    }

    fn reflink(&mut self, toward: &Toward, header: &Header) -> Result<Sink> {
        let path = self.destination.path().to_path_buf();
        if self.destination.is_device() || self.lineage.step.is_some() {
            let why =
                if self.destination.is_device() { "is a device" } else { "has an in-place commit under way" };
            return Err(ReplicaError::Refused(format!(
                "{} {why}, so it can't be committed by reflink: use --commit journal",
                path.display()
            )));
        }
        // What others wrote must not get into the clone.
        self.untouched()?;
        let base = self.positions();
        let inode = self.create()?;
        // The intent first, so that a crash leaves nothing that nobody knows. It says what the clone holds once that is
        // durable.
        let begun = self.step(StepKind::Clone { inode }, Vec::new(), toward);
        let cloned = begun.and_then(|()| self.clone_final());
        let made =
            cloned.and_then(|()| self.direct(Name::Temporary, Name::Final, base, toward, header, false));
        let begun = made.and_then(|sink| self.take_journal(sink, toward, header));
        if begun.is_err() {
            self.drop_unknown_clone()?;
        }
        begun
    }

    /// Drops a clone of which nobody knows what it holds: it was never made durable, or not even cloned.
    fn drop_unknown_clone(&mut self) -> Result<()> {
        let unknown = |step: &Step| matches!(step.kind, StepKind::Clone { .. }) && step.positions.is_empty();
        if self.lineage.step.as_ref().is_some_and(unknown) {
            self.remove_partial()?;
            self.lineage.step = None;
            self.store()?;
            self.refresh()?;
        }
        Ok(())
    }

    fn clone_final(&self) -> Result<()> {
        let path = self.destination.path();
        self.destination.clone_final().map_err(|e| {
            match e.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
                Some(
                    rustix::io::Errno::OPNOTSUPP
                    | rustix::io::Errno::NOTTY
                    | rustix::io::Errno::INVAL
                    | rustix::io::Errno::XDEV,
                ) => ReplicaError::Refused(format!(
                    "the file system of {} can't clone files ({e}), XFS and Btrfs can: use --commit journal",
                    path.display()
                )),
                _ => disk_error("clone", path, INTERRUPTED)(e),
            }
        })
    }

    /// Goes on with NAME.partial.
    fn go_on(&mut self, toward: &Toward, header: &Header) -> Result<Sink> {
        let Some(step) = self.lineage.step.clone() else { return Ok(Sink::Closed) };
        let base = while_made(header, step.positions);
        let sink = self.begin_step(step.kind, base, toward, header, false)?;
        self.take_journal(sink, toward, header)
    }

    /// Writes down what is about to happen, durably.
    fn step(&mut self, kind: StepKind, positions: Vec<Position>, toward: &Toward) -> Result<()> {
        if kind == StepKind::InPlace {
            self.lineage.state = State::Incomplete;
        }
        let step = Step { kind, nonce: Uuid::new_v4(), positions, toward: *toward, finished: false };
        self.lineage.step = Some(step);
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
        }
        self.step(kind, base.clone(), toward)?;
        self.direct(self.writes_to(), self.writes_to(), base, toward, header, blank)
    }

    /// Begins to write to one place what is copied from one.
    fn direct(
        &mut self,
        name: Name,
        copied: Name,
        base: Vec<Position>,
        toward: &Toward,
        header: &Header,
        blank: bool,
    ) -> Result<Sink> {
        let keeping = if name == Name::Final { self.work(true)? } else { Keeping::default() };
        let failed = |what| disk_error(what, self.destination.path(), INTERRUPTED);
        let disk = self.destination.open(name)?;
        if !self.destination.is_device() && disk.len() < toward.size {
            disk.resize(toward.size).map_err(failed("grow"))?;
        }
        let rolling = header.method == Method::Rolling;
        let written = (rolling && copied == name).then(Written::default);
        let copies = match rolling {
            true if copied == name => Some(Copies::new(&disk).map_err(failed("open"))?),
            true => {
                let copies = Copies::new(&self.destination.open(copied)?).map_err(failed("open"))?;
                Some(copies.sharing(self.destination.sharing()))
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
            disk,
            applier,
            copies,
            written,
            base,
            end: 0,
            saved: Instant::now(),
            saved_bytes: 0,
        })))
    }

    /// Brings what the delta goes on from out of the journal to where the delta goes itself, and drops any other.
    fn take_journal(&mut self, mut sink: Sink, toward: &Toward, header: &Header) -> Result<Sink> {
        let held = self.journal.take().filter(|_| header.resumes.is_some());
        if let (Some(contents), Sink::Direct(direct)) = (held, &mut sink) {
            let failed = |what| disk_error(what, self.destination.path(), INTERRUPTED);
            let longest = contents.segments.iter().map(|s| s.header.size_after).max().unwrap_or(0);
            if !self.destination.is_device() && direct.disk.len() < longest {
                direct.disk.resize(longest).map_err(failed("grow"))?;
            }
            let mut positions = direct.base.clone();
            journal::replay(
                &*self.folder,
                ARRIVING,
                &contents,
                &mut direct.applier,
                &mut positions,
                failed("write to"),
            )?;
            direct.base = contents.positions(&direct.base);
            direct.applier.rewind(kept(header, &direct.base)).map_err(failed("write to"))?;
            direct.save(self, toward)?;
        }
        self.drop_journal()?;
        Ok(sink)
    }
}

impl Direct {
    /// Makes what has come durable, and says so in the lineage.
    fn save(&mut self, replica: &mut Replica, toward: &Toward) -> Result<()> {
        let upto = whole_blocks(self.applier.position(), toward.block_size, toward.size);
        self.applier.flush().map_err(disk_error("flush", replica.destination.path(), INTERRUPTED))?;
        (self.saved, self.saved_bytes) = (Instant::now(), self.applier.written);
        if self.written.is_some() {
            return Ok(());
        }
        // What is lacking was left out below that, too.
        let upto = if toward.lacking { 0 } else { upto };
        let positions = reached(&self.base, toward.epoch, upto, toward.size);
        match &mut replica.lineage.step {
            Some(step) if step.positions != positions => step.positions = positions,
            _ => return Ok(()),
        }
        replica.store()
    }
}

/// The positions of what a delta changes while that is under way. One that copies within the same place leaves nothing of
/// which anybody could say what it holds.
fn while_made(header: &Header, positions: Vec<Position>) -> Vec<Position> {
    if header.method != Method::Rolling {
        return positions;
    }
    let upto = known(&positions).max(header.size_before).max(header.size_after);
    vec![Position { epoch: None, upto }]
}

/// Why a delta can't be taken any further.
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

impl From<Trouble> for Stop {
    fn from(trouble: Trouble) -> Stop {
        match trouble {
            Trouble::Disk(error) => Stop::Disk(error),
            Trouble::Other { offset, from } => Stop::Delta(format!(
                "what stands at byte {from} is not what it copies to byte {offset}: run \"dsync sync\" again"
            )),
        }
    }
}

/// Looks for holes that a frame will fill.
fn look(holes: &mut Option<Holes>, frame: &Frame) -> std::result::Result<(), Stop> {
    holes.as_mut().map_or(Ok(()), |holes| holes.records(&frame.records)).map_err(Stop::Disk)
}

impl ToJournal {
    fn unit(
        &mut self,
        unit: Unit,
        decoder: &mut Decoder,
        seen: impl FnOnce(&Frame),
    ) -> std::result::Result<(), Stop> {
        let Some(rolling) = &mut self.rolling else {
            self.file.unit(&unit).map_err(Stop::Journal)?;
            if let Event::Frame(frame) = decoder.push(unit)? {
                seen(&frame);
                look(&mut self.holes, &frame)?;
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
            look(&mut self.holes, &frame)?;
            self.file.unit(&encoder.frame(frame)?).map_err(Stop::Journal)?;
            (rolling.frames, rolling.upto) = (encoder.frames(), encoder.end());
            rolling.digest = encoder.digest();
            self.bytes = self.file.len();
        }
        if let Some(encoder) = rolling.encoder.take_if(|_| whole) {
            self.file.unit(&encoder.trailer()).map_err(Stop::Journal)?;
            self.bytes = self.file.len();
        }
        Ok(())
    }
}

impl Direct {
    /// Applies a frame; without one, all that is left of those before.
    fn frame(&mut self, frame: Option<Frame>) -> std::result::Result<(), Stop> {
        let all = frame.is_none();
        let Some(copies) = &mut self.copies else {
            return frame.map_or(Ok(()), |frame| self.applier.frame(frame)).map_err(Stop::Disk);
        };
        for record in frame.iter().flat_map(|frame| &frame.records) {
            let fits = match &mut self.written {
                Some(written) => written.add(record),
                None if record.offset() >= std::mem::replace(&mut self.end, record.end()) => Ok(()),
                None => Err(format!("it writes byte {} in no order", record.offset())),
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
}

impl DeltaReceiver<'_> {
    /// Takes the next unit.
    ///
    /// # Errors
    /// What is wrong with the delta, or with the place it goes to. What came before is kept.
    pub fn unit(&mut self, unit: Unit) -> Result<()> {
        self.unit_seen(unit, |_| {})
    }

    /// The delta's header.
    pub fn header(&self) -> Option<&Header> {
        self.decoder.header()
    }

    /// Takes the next unit as [`DeltaReceiver::unit`] does, and shows a frame, verified, before it goes where it belongs.
    ///
    /// # Errors
    /// As for [`DeltaReceiver::unit`].
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
        let error = "what came before could not be taken".into();
        Err(ReplicaError::Delta { path: self.replica.path().to_path_buf(), error })
    }

    fn take(&mut self, unit: Unit, seen: impl FnOnce(&delta::Frame)) -> Result<()> {
        let path = self.replica.destination.path().to_path_buf();
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
                return Err(disk_error(what, &path, INTERRUPTED)(e));
            }
            Err(Stop::Journal(e)) => {
                self.sink = Sink::Closed;
                return Err(self.replica.journal_failed(e));
            }
        }
        if let Sink::Direct(direct) = &mut self.sink {
            let much = direct.applier.written - direct.saved_bytes >= self.replica.save_bytes;
            if much || direct.saved.elapsed() >= SAVE_TIME {
                direct.save(self.replica, &self.toward)?;
            }
        }
        Ok(())
    }

    /// Commits the delta, once its trailer was taken: durable when this returns.
    ///
    /// # Errors
    /// If the trailer is missing, or the place it goes to fails. What came is kept, and finished or gone on from later.
    pub fn finish(mut self) -> Result<Committed> {
        self.sound()?;
        if !self.decoder.is_complete() {
            let error = delta::Error::NoTrailer { units: self.decoder.units() }.to_string();
            return Err(ReplicaError::Delta { path: self.replica.path().to_path_buf(), error });
        }
        let (written, read) = match std::mem::replace(&mut self.sink, Sink::Closed) {
            Sink::Journal(journal) => {
                let bytes = journal.file.len() - journal.before.bytes;
                let contents = contents(&journal, &self.decoder, true);
                let copied = journal.rolling.as_ref().map_or(0, |r| r.copies.read);
                self.replica.untouched()?;
                if self.replica.has(self.toward.stream) {
                    // Merged again and cut off there, nobody could tell that it was.
                    self.replica.drop_journal()?;
                    self.replica.refresh()?;
                    return Ok(Committed {
                        epoch: self.toward.epoch,
                        bytes_written: bytes,
                        bytes_read: copied,
                    });
                }
                let state = "the replica is unchanged, and what had come of the delta is dropped";
                if let Err(e) = self.replica.make_room(journal.holes, false, state) {
                    // Where room is short, the journal's is needed too.
                    self.replica.half_done = self.replica.drop_journal().is_err();
                    return Err(e);
                }
                self.replica.note_compared()?;
                if let Err(e) = journal.file.close(&*self.replica.folder) {
                    return Err(self.replica.journal_failed(e));
                }
                let (written, read) = self.replica.merge(&[contents])?;
                (bytes + written, copied + read)
            }
            Sink::Direct(direct) => self.finish_direct(*direct)?,
            Sink::Closed => return Err(self.replica.given_up()),
        };
        self.replica.refresh()?;
        Ok(Committed { epoch: self.toward.epoch, bytes_written: written, bytes_read: read })
    }

    fn finish_direct(&mut self, direct: Direct) -> Result<(u64, u64)> {
        let replica = &mut *self.replica;
        let Direct { disk, mut applier, copies, .. } = direct;
        let size = self.toward.size;
        {
            let failed = |what| disk_error(what, replica.destination.path(), INTERRUPTED);
            applier.finish(size).map_err(failed("write to"))?;
            if !replica.destination.is_device() && disk.len() != size {
                disk.resize(size).map_err(failed("cut"))?;
            }
            applier.flush().map_err(failed("flush"))?;
        }
        let counts = (applier.written, applier.read + copies.as_ref().map_or(0, |c| c.read));
        drop((applier, copies, disk));
        let toward = self.toward;
        match replica.lineage.step.as_ref().map(|s| s.kind) {
            Some(kind @ (StepKind::NewFile { .. } | StepKind::Clone { .. })) => {
                if let StepKind::Clone { .. } = kind {
                    // Once it is finished, nobody looks again at what it takes the place of.
                    replica.untouched()?;
                }
                replica.work(false)?;
                replica.half_done = true;
                if let Some(step) = &mut replica.lineage.step {
                    step.positions = overlay(&[], toward.epoch, size);
                    step.finished = true;
                }
                replica.store()?;
                let copy = replica.rename(!matches!(kind, StepKind::NewFile { replaces: false, .. }))?;
                replica.renamed(&toward, copy)?;
                replica.half_done = false;
            }
            _ => {
                replica.still_there(size)?;
                replica.moved(&toward)?;
                replica.forget_note()?;
            }
        }
        Ok(counts)
    }

    /// Ends a delta that was cut off: what has come is kept, and a next delta may go on from it.
    ///
    /// # Errors
    /// If it can't be written down.
    pub fn keep(mut self) -> Result<()> {
        self.put_away()?;
        self.replica.refresh()
    }

    /// The same at the end of a pass, behind which the delta of the cut comes. What was another source's replica is this one's
    /// from here on, if the pass reached its end: only then may what comes go on from it.
    ///
    /// # Errors
    /// If it can't be written down.
    pub fn keep_pass(mut self) -> Result<()> {
        self.put_away()?;
        self.replica.refresh()?;
        let (source, epoch, size) = (self.toward.source, self.toward.epoch, self.toward.size);
        let first = self.replica.status().positions.first();
        let whole = first.is_some_and(|p| p.epoch == Some(epoch) && p.upto >= size);
        self.replica.follow(source, whole)
    }

    fn put_away(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.sink, Sink::Closed) {
            Sink::Journal(mut journal) => {
                let contents = contents(&journal, &self.decoder, self.decoder.is_complete());
                if let Err(e) = journal.file.keep() {
                    return Err(self.replica.journal_failed(e));
                }
                self.replica.journal = (!contents.segments.is_empty()).then_some(contents);
                Ok(())
            }
            Sink::Direct(mut direct) => {
                let drained = direct.applier.drain();
                // Nothing but its own writes may be taken for the destination's.
                let whole = self.replica.writes_to() == Name::Final;
                let saved = match direct.applier.has_forgotten() {
                    true => self.replica.drop_unknown_clone(),
                    false => direct.save(self.replica, &self.toward),
                };
                if whole {
                    self.replica.rest()?;
                }
                saved?;
                drained.map_err(disk_error("write to", self.replica.destination.path(), INTERRUPTED))
            }
            Sink::Closed => Ok(()),
        }
    }
}

/// What the journal holds with what has come of this delta.
fn contents(journal: &ToJournal, decoder: &Decoder, whole: bool) -> Contents {
    let mut contents = journal.before.clone();
    let segment = match &journal.rolling {
        Some(r) => Some((&r.header, r.frames, r.upto, r.digest)),
        None => decoder.header().map(|h| (h, decoder.frames(), decoder.end(), decoder.digest())),
    };
    let segment = segment.filter(|(header, frames, ..)| (*frames > 0 && !header.lacking) || whole);
    if let Some((header, frames, upto, digest)) = segment {
        contents.segments.push(Segment { header: header.clone(), frames, upto, digest });
        contents.bytes = journal.bytes;
    }
    contents.whole = whole;
    contents
}

impl Drop for DeltaReceiver<'_> {
    fn drop(&mut self) {
        // After an error; whoever wants to know calls `keep`.
        let _ = self.put_away();
        self.replica.working = None;
        let _ = self.replica.refresh();
    }
}
