//! The journal: the delta as stored beside the destination before it is merged.
//!
//! A journal is one file of units: segments in order, each a header and frames. All but the last are parts of deltas that were
//! cut off; each next one's header names the one before as what it goes on from. A trailer ends the last. A mirror's journal goes
//! on behind the trailer with the next batch, bound to the one before; behind the last trailer nothing counts.
//!
//! It grows under one name and is merged under another. The second name is durable before the first byte of the destination
//! is changed, and says by itself that the destination may be half merged.

pub(crate) mod index;
pub(crate) mod last_writes;
pub(crate) mod merged_blocks;
pub(crate) mod trail;
pub(crate) mod unsure;

use std::io::{self, IoSlice, Read, Write};
use std::ops::Deref;
use std::sync::Arc;

use delta::{Decoder, Epoch, Event, Frame, Header, Method, Record, Resume, Unit, UnitKind, Units, Writer};
use device::{Buf, Folder, StateFile};
use extents::Extents;
use uuid::Uuid;

use crate::error::{ReplicaError, Result, io_error, is_full};
use crate::state::lineage::{Position, known, reached, whole_blocks};

/// The name of a journal that grows.
pub(crate) const ARRIVING: &str = "journal";
/// The name of a journal that is whole, verified and durable, from before the merge until the lineage has moved.
pub(crate) const WHOLE: &str = "journal-whole";

/// Reads shorter than this are served from a buffer of so many bytes.
const SMALL: usize = 64 << 10;
/// Small writes are gathered to so many bytes.
const STEP: usize = 1 << 20;
/// The kernel is told to write back what has come every so many bytes, so that the sync at the end finds little to do.
const WRITE_BACK: u64 = 8 << 20;

/// A part of a journal: what was received of one delta.
#[derive(Debug, Clone)]
pub(crate) struct JournalSegment {
    /// Its header.
    pub header: Header,
    /// Its frames.
    pub frames: u64,
    /// The highest byte reached, one past.
    pub upto: u64,
    /// The digest after the last frame.
    pub digest: [u8; 32],
}

impl JournalSegment {
    /// What the header of a delta names that goes on from here.
    pub(crate) fn resume(&self) -> Resume {
        Resume { stream: self.header.stream, frames: self.frames, digest: self.digest }
    }

    /// The epoch it leads to.
    pub(crate) fn to(&self) -> Option<Epoch> {
        self.header.to().copied()
    }

    /// Where a replica is that holds this on top of `base`: what its source is told, and what the segment after it builds on.
    fn onto(&self, base: &[Position]) -> Vec<Position> {
        let Some(to) = self.to() else { return base.to_vec() };
        let upto = whole_blocks(self.upto, self.header.block_size, self.header.size_after);
        reached(base, to, upto, self.header.size_after)
    }
}

/// What a journal holds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Contents {
    /// The segments, in order; each has at least one frame or is the last of a whole journal.
    pub segments: Vec<JournalSegment>,
    /// Where it begins in the file.
    pub start: u64,
    /// Bytes from there on that are in order.
    pub bytes: u64,
    /// Bytes from there to the end of the last frame.
    pub frames_end: u64,
    /// The trailer is there.
    pub whole: bool,
    /// Records in all.
    pub records: u64,
    /// The bytes that its source could not read.
    pub unread: Extents,
}

impl Contents {
    /// What a next delta may go on from.
    pub(crate) fn resume(&self) -> Option<Resume> {
        self.segments.last().map(JournalSegment::resume)
    }

    /// True if a part is of a batch, or of a repair at the replica's own epoch: no next delta goes on from that.
    pub(crate) fn leads_nowhere(&self) -> bool {
        self.segments.iter().any(|part| part.header.batch || part.header.partial)
    }

    /// The contents without the trailer: something for the next delta to go on from.
    pub(crate) fn without_trailer(mut self) -> Contents {
        if self.whole {
            self.segments.retain(|segment| segment.frames > 0);
            (self.whole, self.bytes) = (false, self.frames_end);
        }
        self
    }

    /// The stream that the journal ends with.
    pub(crate) fn stream(&self) -> Option<Uuid> {
        self.segments.last().map(|s| s.header.stream)
    }

    /// The positions of a replica that holds this on top of `base`.
    pub(crate) fn positions(&self, base: &[Position]) -> Vec<Position> {
        self.segments.iter().fold(base.to_vec(), |positions, segment| segment.onto(&positions))
    }
}

/// Notes what a frame says of the bytes that its source could not read.
pub(crate) fn note_unread(unread: &mut Extents, records: &[Record]) {
    for record in records {
        match record {
            Record::Unsure { .. } => unread.insert(record.offset()..record.end()),
            _ if unread.is_empty() => {}
            _ => unread.remove(record.offset()..record.end()),
        }
    }
}

/// Reads a journal and verifies its first delta. `None` if there is no such file.
pub(crate) fn measure(folder: &dyn Folder, name: &str) -> Result<Option<Contents>> {
    let Some(file) = existing(folder, name)? else { return Ok(None) };
    measure_at(&*file, 0).map(Some).map_err(io_error("read", &folder.path().join(name)))
}

/// Reads a journal and verifies it: its whole deltas, each bound to the one before. `None` if there is no such file.
pub(crate) fn measure_all(folder: &dyn Folder, name: &str) -> Result<Option<Vec<Contents>>> {
    let Some(file) = existing(folder, name)? else { return Ok(None) };
    let mut deltas: Vec<Contents> = Vec::new();
    loop {
        let start = deltas.last().map_or(0, |last| last.start + last.bytes);
        let next = measure_at(&*file, start).map_err(io_error("read", &folder.path().join(name)))?;
        let binds = next.segments.first().map(|s| (s.header.source, s.header.binds));
        let before = deltas.last().and_then(|last| last.segments.last());
        let goes_on = before.is_none_or(|b| binds == Some((b.header.source, Some(b.header.stream))));
        if !next.whole || !goes_on {
            return Ok(Some(deltas));
        }
        deltas.push(next);
    }
}

fn existing(folder: &dyn Folder, name: &str) -> Result<Option<Box<dyn StateFile>>> {
    match folder.open(name, false) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error("open", &folder.path().join(name))(e)),
    }
}

/// Reads and verifies the delta that begins at this byte of a file.
///
/// # Errors
/// If the file cannot be read: what it holds there is not known then, and may well have been confirmed.
pub(crate) fn measure_at(file: &Kept, start: u64) -> io::Result<Contents> {
    let mut contents = Contents { start, ..Contents::default() };
    match walk(&mut Input::new(file, start)?, &mut contents, None) {
        Err(Trouble::Delta(delta::Error::Read { error, .. }))
            if error.kind() != io::ErrorKind::UnexpectedEof =>
        {
            Err(error)
        }
        // Whatever else is wrong ends what is in order; what follows is then sent again.
        _ => Ok(contents),
    }
}

/// The frames of a delta that arrives, as long as they are few: what is merged at once need not be read back from the journal.
pub(crate) struct HeldFrames {
    frames: Option<Vec<Frame>>,
    bytes: usize,
}

/// Bytes of data, and frames, beyond which none are held.
const HELD: (usize, usize) = (32 << 20, 4096);

impl HeldFrames {
    /// Holds frames that are [added](HeldFrames::add); or none, for a delta of which a part is in the journal already.
    pub(crate) fn new(all: bool) -> HeldFrames {
        HeldFrames { frames: all.then(Vec::new), bytes: 0 }
    }

    /// Adds the next frame.
    pub(crate) fn add(&mut self, frame: Frame) {
        self.bytes += frame.data.len();
        match &mut self.frames {
            Some(frames) if self.bytes <= HELD.0 && frames.len() < HELD.1 => frames.push(frame),
            _ => self.frames = None,
        }
    }

    /// The frames, if all of them are held.
    pub(crate) fn frames(&self) -> Option<&[Frame]> {
        self.frames.as_deref()
    }

    /// The frames, taken out, if all of them are held.
    pub(crate) fn into_frames(self) -> Option<Vec<Frame>> {
        self.frames
    }
}

/// What a journal's frames are brought to, in order.
pub(crate) trait Target {
    /// The next part of the delta begins at the disk's start again; from `known` on, what it does not name becomes zero.
    fn rewind(&mut self, header: &Header, known: u64) -> io::Result<()>;
    /// Takes a frame.
    fn frame(&mut self, frame: Frame) -> io::Result<()>;
}

/// Applies a journal's frames in order. `failed` makes an error of what the disk says.
pub(crate) fn replay(
    folder: &dyn Folder,
    name: &str,
    journal: &Contents,
    target: &mut dyn Target,
    positions: &mut Vec<Position>,
    failed: impl FnOnce(io::Error) -> ReplicaError,
) -> Result<()> {
    let path = folder.path().join(name);
    let file = folder.open(name, false).map_err(io_error("open", &path))?;
    let mut input = Input::new(&*file, journal.start).map_err(io_error("read", &path))?;
    // Only what was verified before: bytes behind it count for nothing.
    input.end = input.end.min(journal.start + journal.bytes);
    input.forget = true;
    let mut again = Contents::default();
    let result = walk(&mut input, &mut again, Some((target, positions)));
    match result {
        Ok(()) if again.bytes == journal.bytes && again.whole == journal.whole => Ok(()),
        Err(Trouble::Disk(error)) => Err(failed(error)),
        Err(Trouble::Delta(delta::Error::Read { error, .. })) => Err(io_error("read", &path)(error)),
        Err(Trouble::Delta(error)) => Err(damaged(&path, error.to_string())),
        Ok(()) => Err(damaged(&path, "it has changed since it was verified".into())),
    }
}

/// Applies a delta from the frames held in memory: the journal has them too, durably, and they were verified as they arrived.
pub(crate) fn replay_held(
    header: &Header,
    frames: Vec<Frame>,
    target: &mut dyn Target,
    positions: &[Position],
) -> io::Result<()> {
    target.rewind(header, kept(header, positions))?;
    frames.into_iter().try_for_each(|frame| target.frame(frame))
}

/// Up to where the destination keeps what a delta does not name; beyond, that becomes zero. A compare has looked at all there
/// is, whatever is known of it. A delta for any replica in its chain was made for the first of them: beyond the size that the
/// disk had then it names no zeroes, though this replica may hold something there.
pub(crate) fn kept(header: &Header, positions: &[Position]) -> u64 {
    let known = known(positions);
    match header.method {
        Method::Compare | Method::Rolling => u64::MAX,
        Method::Tracked if header.binds.is_none() && header.resumes.is_none() => {
            known.min(header.size_before)
        }
        Method::Tracked | Method::Copy => known,
    }
}

/// The error of a damaged journal whose destination may be half merged.
pub(crate) fn damaged(path: &std::path::Path, why: String) -> ReplicaError {
    ReplicaError::Damaged {
        path: path.to_path_buf(),
        why,
        way_out: "the replica may be half merged: \"dsync sync --adopt SRC DST\" compares all of it with its source and overwrites what differs".into(),
    }
}

enum Trouble {
    Delta(delta::Error),
    Disk(io::Error),
}

impl From<delta::Error> for Trouble {
    fn from(error: delta::Error) -> Trouble {
        Trouble::Delta(error)
    }
}

/// Goes through the units of a journal, verifies them, and applies them if asked to.
fn walk(
    input: &mut Input<&Kept>,
    contents: &mut Contents,
    mut onto: Option<(&mut dyn Target, &mut Vec<Position>)>,
) -> std::result::Result<(), Trouble> {
    let mut units = Units::new(input);
    let mut decoder = Decoder::new();
    loop {
        let Some(unit) = units.next()? else { return Ok(()) };
        let mut before = None;
        if unit.kind == UnitKind::Header {
            let ended = std::mem::take(&mut decoder);
            before = ended.header().map(|header| JournalSegment {
                header: header.clone(),
                frames: ended.frames(),
                upto: ended.end(),
                digest: ended.digest(),
            });
        }
        match decoder.push(unit)? {
            Event::Header(header) => {
                if header.method == Method::Rolling {
                    return Err(delta::Error::Header { why: "its copies were never read" }.into());
                }
                let goes_on = header.resumes == before.as_ref().map(JournalSegment::resume)
                    && before.as_ref().is_none_or(|b| b.header.source == header.source);
                if !goes_on {
                    return Err(delta::Error::Header { why: "it does not continue the one before" }.into());
                }
                if let Some((target, positions)) = &mut onto {
                    if let Some(before) = &before {
                        **positions = before.onto(positions);
                    }
                    target.rewind(&header, kept(&header, positions)).map_err(Trouble::Disk)?;
                }
                continue;
            }
            Event::Frame(frame) => {
                contents.records += frame.records.len() as u64;
                note_unread(&mut contents.unread, &frame.records);
                if let Some((target, _)) = &mut onto {
                    target.frame(frame).map_err(Trouble::Disk)?;
                }
            }
            Event::End(_) => contents.whole = true,
        }
        let Some(header) = decoder.header() else { continue };
        // A segment counts from its first frame.
        let (frames, upto) = (decoder.frames(), decoder.end());
        match contents.segments.last_mut().filter(|s| s.header.stream == header.stream) {
            Some(segment) => (segment.frames, segment.upto) = (frames, upto),
            None => {
                let header = header.clone();
                contents.segments.push(JournalSegment { header, frames, upto, digest: [0; 32] });
            }
        }
        if let Some(segment) = contents.segments.last_mut() {
            segment.digest = decoder.digest();
        }
        contents.bytes = units.bytes();
        if !contents.whole {
            contents.frames_end = contents.bytes;
        }
        if contents.whole {
            return Ok(());
        }
    }
}

/// A state file that is open for as long as that takes.
type Kept = dyn StateFile + 'static;

/// Reads a state file from front to back.
pub(crate) struct Input<F> {
    file: F,
    at: u64,
    end: u64,
    /// The page cache is left without what was read.
    forget: bool,
    forgotten: u64,
    buf: Buf,
    /// What of `buf` is still to be handed out.
    left: std::ops::Range<usize>,
}

impl<F: Deref<Target = Kept>> Input<F> {
    pub(crate) fn new(file: F, start: u64) -> io::Result<Input<F>> {
        let end = file.len()?.max(start);
        let buf = Buf::scratch(SMALL);
        Ok(Input { file, at: start, end, forget: false, forgotten: start, buf, left: 0..0 })
    }

    fn fetch(&mut self, out: &mut [u8]) -> io::Result<()> {
        self.file.read_at(self.at, out)?;
        self.at += out.len() as u64;
        let behind = self.at - self.forgotten;
        if self.forget && (behind >= WRITE_BACK || self.at == self.end) {
            self.file.uncache(self.forgotten, behind);
            self.forgotten = self.at;
        }
        Ok(())
    }
}

impl<F: Deref<Target = Kept>> Read for Input<F> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.left.is_empty() {
            let most = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
            if out.len() >= SMALL && most >= SMALL {
                // Data goes where it belongs at once.
                let len = out.len().min(most);
                self.fetch(&mut out[..len])?;
                return Ok(len);
            }
            let len = most.min(SMALL);
            if len == 0 {
                return Ok(0);
            }
            let mut buf = std::mem::take(&mut self.buf);
            let fetched = self.fetch(&mut buf[..len]);
            self.buf = buf;
            fetched?;
            self.left = 0..len;
        }
        let len = out.len().min(self.left.len());
        out[..len].copy_from_slice(&self.buf[self.left.start..self.left.start + len]);
        self.left.start += len;
        Ok(len)
    }
}

/// A delta that was made by comparing all that the replica holds.
pub(crate) fn compares(header: &Header) -> bool {
    matches!(header.method, Method::Compare | Method::Rolling) && header.binds.is_some() && !header.partial
}

/// A journal that grows.
pub(crate) struct Growing {
    file: Arc<dyn StateFile>,
    /// What was handed over and not written yet.
    pending: Vec<u8>,
    written: u64,
    started: u64,
    /// Makes room where there is none, if it can.
    relief: Option<Relief>,
    /// Room has run out: what is not written any more.
    counting: Option<Counting>,
}

/// Makes some room behind what was written, in bytes.
pub(crate) type Relief = Box<dyn FnMut(u64) -> Relieved + Send>;

/// What becomes of a journal that finds no room.
pub(crate) enum Relieved {
    /// There may be some now.
    Made,
    /// There is none to be made.
    Not,
    /// So many bytes may be found. Whether that suffices is not known before all has come, so the rest is counted.
    Counts(u64),
}

impl From<bool> for Relieved {
    fn from(made: bool) -> Relieved {
        if made { Relieved::Made } else { Relieved::Not }
    }
}

/// Bytes that are counted and not written, and how many may be.
struct Counting {
    bytes: u64,
    most: u64,
}

impl Growing {
    /// Opens the journal of a folder to add to it after `bytes`; what follows is dropped. 0 begins a new one.
    pub(crate) fn open(folder: &dyn Folder, bytes: u64) -> io::Result<Growing> {
        if bytes == 0 {
            folder.remove(ARRIVING)?;
        }
        let file = folder.open(ARRIVING, true)?;
        if bytes > 0 {
            file.set_len(bytes)?;
        }
        Ok(Growing::after(file.into(), bytes))
    }

    /// Goes on with a file of units behind `bytes`.
    pub(crate) fn after(file: Arc<dyn StateFile>, bytes: u64) -> Growing {
        Growing { file, pending: Vec::new(), written: bytes, started: bytes, relief: None, counting: None }
    }

    /// Adds a unit.
    pub(crate) fn unit(&mut self, unit: &Unit) -> io::Result<()> {
        match Writer::new(&mut *self).unit(unit) {
            Ok(()) => Ok(()),
            Err(delta::Error::Write(error)) => Err(error),
            Err(other) => Err(io::Error::other(other)),
        }
    }

    /// Has room made from now on where there is none.
    pub(crate) fn relieve(&mut self, relief: Option<Relief>) {
        self.relief = relief;
    }

    /// Bytes so far.
    pub(crate) fn len(&self) -> u64 {
        self.written + self.pending.len() as u64 + self.counting.as_ref().map_or(0, |it| it.bytes)
    }

    /// True if a part of it was only counted: such a journal is never sealed.
    pub(crate) fn is_counted(&self) -> bool {
        self.counting.is_some()
    }

    /// True if room may be found for what was counted, and for so many bytes besides.
    pub(crate) fn may_fit(&self, more: u64) -> bool {
        self.counting.as_ref().is_none_or(|it| it.bytes.saturating_add(more) <= it.most)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(counting) = &mut self.counting {
            counting.bytes += bytes.len() as u64;
            let fits = counting.bytes <= counting.most;
            return fits.then_some(()).ok_or_else(|| io::ErrorKind::StorageFull.into());
        }
        while let Err(error) = self.file.write_at(self.written, bytes) {
            let relief = self.relief.as_mut().filter(|_| is_full(&error));
            match relief.map_or(Relieved::Not, |relief| relief(self.written)) {
                Relieved::Made => {}
                Relieved::Not => return Err(error),
                Relieved::Counts(most) => {
                    self.counting = Some(Counting { bytes: 0, most });
                    return self.put(bytes);
                }
            }
        }
        self.written += bytes.len() as u64;
        if self.written - self.started >= WRITE_BACK {
            self.file.write_back(self.started, self.written - self.started);
            self.started = self.written;
        }
        Ok(())
    }

    fn empty(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let mut pending = std::mem::take(&mut self.pending);
        self.put(&pending)?;
        pending.clear();
        self.pending = pending;
        Ok(())
    }

    /// Hands what has come to the file. Not durable; what is not in order is found out when it is measured.
    pub(crate) fn keep(&mut self) -> io::Result<()> {
        self.empty()
    }

    /// The file, to make durable what was [kept](Growing::keep).
    pub(crate) fn file(&self) -> Arc<dyn StateFile> {
        self.file.clone()
    }

    /// The journal is whole: makes it durable, under the name that it has.
    pub(crate) fn prepare(mut self, folder: &dyn Folder) -> io::Result<()> {
        self.end()?;
        self.file.sync()?;
        folder.sync()
    }

    /// The journal is whole: makes it durable, under the name that says so.
    pub(crate) fn close(mut self, folder: &dyn Folder) -> io::Result<()> {
        self.end()?;
        seal(&*self.file, folder)
    }

    /// Writes what is left. The trailer is not there before: with it, the journal would be whole.
    fn end(&mut self) -> io::Result<()> {
        self.empty()?;
        if self.is_counted() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

/// Makes a journal that begins with a whole delta durable, under the name that says so.
pub(crate) fn seal(file: &dyn StateFile, folder: &dyn Folder) -> io::Result<()> {
    file.sync()?;
    folder.rename(ARRIVING, WHOLE)?;
    folder.sync()
}

impl Write for Growing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        for slice in slices {
            if slice.len() >= SMALL {
                // Too long to copy.
                self.empty()?;
                self.put(slice)?;
            } else {
                self.pending.extend_from_slice(slice);
                if self.pending.len() >= STEP {
                    self.empty()?;
                }
            }
        }
        Ok(slices.iter().map(|s| s.len()).sum())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.empty()
    }
}
