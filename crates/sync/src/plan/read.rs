//! Reading: from the extents that are wanted to frames with their data.
//!
//! A frame's extents are one request of many pieces, and several frames are in flight, so that a
//! scattered set of blocks is read at the disk's full depth. Where the wanted extents are many and close, the span is read whole and
//! what is between them is dropped: one long read beats picking.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Frame, Record};
use device::{Buf, Disk, Piece, Pieces, Queue, Request, RequestKind};
use extents::Bitmap;

use crate::plan::dense::fill_dense;
use crate::report::RunningTotals;

/// The most data of a frame, in bytes.
pub(crate) const FRAME: u64 = delta::MAX_DATA as u64;
/// The most extents that are read for one frame.
const FRAME_EXTENTS: usize = 2048;
/// Frames in flight, and the depth of the disk's queue.
const AHEAD: usize = 4;
const DEPTH: u32 = 64;
/// Wanted extents that are closer than this may be read as one span, if they fill it to a quarter.
const NEAR: u64 = 256 << 10;
/// Bytes that are read in the time that one more request takes: nor is there more than that between two of them, on average.
const GAP: u64 = 16 << 10;
/// Shorter extents are read without a check for holes.
const WORTH_ASKING: u64 = 64 << 10;

/// The size of the frames. A cut link costs the frame in transit: over a link that may break, frames begin
/// small and grow with what has arrived, so that the loss stays below one part in [`FrameSize::PART`] of that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameSize {
    grows: bool,
    least: u64,
    most: u64,
    given: u64,
}

impl FrameSize {
    pub(crate) const PART: u64 = 64;
    const LEAST: u64 = 8 << 10;

    pub(crate) fn new(may_be_cut: bool, block_size: u64) -> FrameSize {
        FrameSize { grows: may_be_cut, least: block_size.max(Self::LEAST), most: FRAME, given: 0 }
    }

    /// Frames small enough that this many bytes make several, for several threads.
    pub(crate) fn shared(bytes: u64, block_size: u64) -> FrameSize {
        const PARTS: u64 = 4;
        const LEAST: u64 = 64 << 10;
        let most = (bytes / PARTS).next_multiple_of(block_size).clamp(LEAST.max(block_size), FRAME);
        FrameSize { grows: false, least: block_size, most, given: 0 }
    }

    /// The most data of the next frame, in bytes.
    fn limit(&self) -> u64 {
        if self.grows { (self.given / Self::PART).clamp(self.least, self.most) } else { self.most }
    }
}

/// What is wanted, ascending: bytes of the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Want {
    /// Read it.
    Read(Range<u64>),
    /// Known to be zeroes.
    Zero(Range<u64>),
    /// Could not be read.
    Unread(Range<u64>),
}

/// What a delta has to carry: blocks marked in a bitmap, and from some offset on everything.
pub(crate) struct WantedBlocks {
    pub changes: Arc<Bitmap>,
    pub block_size: u64,
    pub size: u64,
    /// From this offset on, everything. `u64::MAX` for none.
    pub all_from: u64,
    /// From there on zeroes are named as well: the destination may hold something there.
    pub names_zeroes: bool,
    /// The last block is wanted, whatever it holds, so that the delta reaches the disk's end.
    pub to_end: bool,
}

/// How much is wanted.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Count {
    pub blocks: u64,
    pub extents: u64,
    pub bytes: u64,
    /// Bytes that are not holes.
    pub read: u64,
}

impl WantedBlocks {
    /// All that is allocated, for a blank destination: what is not named is zero there.
    pub(crate) fn allocated(size: u64, block_size: u64) -> WantedBlocks {
        WantedBlocks { all_from: 0, names_zeroes: false, ..Self::marked(Bitmap::new(0), size, block_size) }
    }

    /// The marked blocks.
    pub(crate) fn marked(changes: impl Into<Arc<Bitmap>>, size: u64, block_size: u64) -> WantedBlocks {
        let changes = changes.into();
        WantedBlocks { changes, block_size, size, all_from: u64::MAX, names_zeroes: true, to_end: false }
    }

    /// Adds what is beyond a byte of the disk, and the block that this byte is in.
    pub(crate) fn and_beyond(mut self, upto: u64) -> WantedBlocks {
        if upto < self.size {
            let block = upto / self.block_size;
            self.changes.set(block..(block + 1).min(self.changes.blocks()));
            self.all_from = block * self.block_size;
        }
        self
    }

    /// Adds the last block, whatever it holds.
    pub(crate) fn reach_end(&mut self) {
        self.to_end = true;
        let blocks = self.changes.blocks();
        self.changes.set(blocks.saturating_sub(1)..blocks);
    }

    /// Adds what is between marked blocks, where they are dense. Returns the blocks, extents and bytes that were marked
    /// before.
    pub(crate) fn fill_dense(&mut self) -> (u64, u64, u64) {
        let blocks = self.changes.count();
        let extents = self.changes.runs().count() as u64;
        fill_dense(&self.changes);
        (blocks, extents, blocks.saturating_mul(self.block_size).min(self.size))
    }

    /// The blocks of the disk that are wanted; `None` if that may be any.
    pub(crate) fn blocks(&self) -> Option<Bitmap> {
        if self.all_from == 0 {
            return None;
        }
        let blocks = Bitmap::new(self.changes.blocks());
        blocks.union_with(&self.changes);
        if self.all_from < self.size {
            blocks.set(self.all_from / self.block_size..blocks.blocks());
        }
        Some(blocks)
    }

    /// What is marked, or allocated where everything is wanted.
    pub(crate) fn count(&self, disk: &dyn Disk) -> io::Result<Count> {
        let Count { mut blocks, mut extents, mut bytes, mut read } = Count::default();
        let mut wants = self.wants(disk);
        while let Some(want) = wants.next()? {
            let range = match &want {
                Want::Read(range) | Want::Unread(range) => range.clone(),
                // With its size a disk gets zeroes from there on.
                Want::Zero(range) => range.start..range.end.min(self.all_from),
            };
            if range.is_empty() {
                continue;
            }
            extents += 1;
            bytes += range.end - range.start;
            blocks += (range.end - range.start).div_ceil(self.block_size);
            if matches!(want, Want::Read(_)) {
                read += range.end - range.start;
            }
        }
        Ok(Count { blocks, extents, bytes, read })
    }

    /// Where the last block begins.
    fn last_block(&self) -> u64 {
        self.size.saturating_sub(1) / self.block_size * self.block_size
    }

    /// The extents, ascending.
    pub(crate) fn wants<'a>(&'a self, disk: &'a dyn Disk) -> Wants<'a> {
        let marked_end = self.all_from.min(self.size);
        let blocks = marked_end.div_ceil(self.block_size).min(self.changes.blocks());
        Wants {
            runs: self.changes.runs_in(0..blocks),
            wanted: self,
            disk,
            marked_end,
            rest: marked_end,
            pending: VecDeque::new(),
        }
    }
}

/// The extents of [`WantedBlocks`], cut by what the disk knows of its holes.
pub(crate) struct Wants<'a> {
    runs: extents::Runs<'a>,
    wanted: &'a WantedBlocks,
    disk: &'a dyn Disk,
    marked_end: u64,
    rest: u64,
    pending: VecDeque<Want>,
}

impl Wants<'_> {
    pub(crate) fn next(&mut self) -> io::Result<Option<Want>> {
        if let Some(want) = self.pending.pop_front() {
            return Ok(Some(want));
        }
        if let Some(run) = self.runs.next() {
            let bs = self.wanted.block_size;
            let range = run.start * bs..(run.end * bs).min(self.marked_end);
            if range.end - range.start < WORTH_ASKING {
                return Ok(Some(Want::Read(range)));
            }
            return self.cut(range).map(Some);
        }
        while self.rest < self.wanted.size {
            let (bs, size, rest) = (self.wanted.block_size, self.wanted.size, self.rest);
            let Some(data) = self.disk.allocated(rest)? else {
                self.rest = size;
                let zeroes = if self.wanted.names_zeroes { rest } else { self.wanted.last_block().max(rest) };
                let named = self.wanted.names_zeroes || self.wanted.to_end;
                return Ok(named.then_some(Want::Zero(zeroes..size)));
            };
            let start = (data.start / bs * bs).max(rest);
            let end = round(data.end, bs).min(size);
            if self.wanted.names_zeroes && rest < start {
                self.rest = start.min(size);
                return Ok(Some(Want::Zero(rest..self.rest)));
            }
            self.rest = end.max(start);
            if start < end {
                return Ok(Some(Want::Read(start..end)));
            }
        }
        Ok(None)
    }

    /// Splits a range into what is allocated and what is known to be zero, in whole blocks.
    fn cut(&mut self, range: Range<u64>) -> io::Result<Want> {
        let bs = self.wanted.block_size;
        let mut at = range.start;
        while at < range.end {
            let data = match self.disk.allocated(at)? {
                Some(data) => {
                    (data.start / bs * bs).clamp(at, range.end)..round(data.end, bs).clamp(at, range.end)
                }
                None => range.end..range.end,
            };
            if data.start > at {
                self.pending.push_back(Want::Zero(at..data.start));
            }
            if !data.is_empty() {
                self.pending.push_back(Want::Read(data.clone()));
            }
            at = if data.end > at { data.end } else { range.end };
        }
        Ok(self.pending.pop_front().unwrap_or(Want::Read(range)))
    }
}

fn round(offset: u64, block: u64) -> u64 {
    offset.checked_next_multiple_of(block).unwrap_or(u64::MAX)
}

/// A frame's extents in flight.
struct Job {
    wants: Vec<Want>,
    /// The spans that are read, and for each where its bytes are in the buffer.
    spans: Vec<Range<u64>>,
}

impl Job {
    /// Plans the reads of a frame: neighbours become one read where that saves more requests than it costs in bytes.
    fn new(wants: Vec<Want>) -> Job {
        let mut spans: Vec<Range<u64>> = Vec::with_capacity(wants.len());
        let reads: Vec<&Range<u64>> =
            wants.iter().filter_map(|w| if let Want::Read(r) = w { Some(r) } else { None }).collect();
        let mut at = 0;
        while at < reads.len() {
            let mut end = at + 1;
            let mut data = reads[at].end - reads[at].start;
            while end < reads.len() && reads[end].start - reads[end - 1].end <= NEAR {
                data += reads[end].end - reads[end].start;
                end += 1;
            }
            let span = reads[at].start..reads[end - 1].end;
            let len = span.end - span.start;
            let close = data * 4 >= len && len - data <= GAP * (end - at - 1) as u64;
            if data >= WORTH_ASKING && close {
                spans.push(span);
            } else {
                for read in &reads[at..end] {
                    match spans.last_mut() {
                        Some(last) if last.end == read.start => last.end = read.end,
                        _ => spans.push((*read).clone()),
                    }
                }
            }
            at = end;
        }
        Job { wants, spans }
    }

    fn request(&self, token: u64, mut buf: Buf) -> Request {
        let bytes: u64 = self.spans.iter().map(|s| s.end - s.start).sum();
        if buf.capacity() < bytes as usize {
            buf = Buf::scratch(bytes as usize);
        }
        buf.set_len(bytes as usize);
        let pieces: Pieces =
            self.spans.iter().map(|s| Piece { offset: s.start, len: s.end - s.start }).collect();
        Request { kind: RequestKind::Read, pieces, buf, token }
    }

    /// What was read, as a frame: what is between them is dropped, zeroes become records without data; those that begin
    /// in `unnamed` no records at all. Returns the end of the frame's last extent too.
    fn frame(self, mut buf: Buf, block_size: u64, unnamed: Range<u64>) -> (Frame, u64) {
        let mut records: Vec<Record> = Vec::with_capacity(self.wants.len());
        let (mut kept, mut span, mut before) = (0usize, 0usize, 0u64);
        let mut end = 0;
        let mut push = |record: Record| {
            if !records.last_mut().is_some_and(|last| last.extend(record)) {
                records.push(record);
            }
        };
        for want in &self.wants {
            let range = match want {
                Want::Read(range) => range,
                Want::Zero(range) | Want::Unread(range) => {
                    let (offset, len) = (range.start, range.end - range.start);
                    push(match want {
                        Want::Zero(_) => Record::Zero { offset, len },
                        _ => Record::Unsure { offset, len },
                    });
                    end = range.end;
                    continue;
                }
            };
            while self.spans[span].end < range.end {
                before += self.spans[span].end - self.spans[span].start;
                span += 1;
            }
            let start = (before + range.start - self.spans[span].start) as usize;
            let mut at = range.start;
            while at < range.end {
                let len = block_size.min(range.end - at);
                let from = start + (at - range.start) as usize;
                let to = from + len as usize;
                if compare::is_zero(&buf[from..to]) {
                    if !unnamed.contains(&at) {
                        push(Record::Zero { offset: at, len });
                    }
                } else {
                    push(Record::Data { offset: at, len });
                    if from != kept {
                        buf.copy_within(from..to, kept);
                    }
                    kept += len as usize;
                }
                at += len;
            }
            end = range.end;
        }
        buf.set_len(kept);
        (Frame { records, data: buf }, end)
    }
}

/// Reads frames from a disk, in order, several ahead.
pub(crate) struct FrameReader<'a> {
    wants: Wants<'a>,
    queue: Box<dyn Queue>,
    block_size: u64,
    /// Where zeroes need no record.
    unnamed: Range<u64>,
    size: FrameSize,
    left_over: Option<Want>,
    jobs: BTreeMap<u64, (Job, Option<io::Result<Buf>>)>,
    next_token: u64,
    due: u64,
    ended: bool,
    read: u64,
    disk: &'a dyn Disk,
    /// Skip what cannot be read.
    leave_out: bool,
    totals: &'a RunningTotals<'a>,
}

impl<'a> FrameReader<'a> {
    pub(crate) fn new<D: Disk + 'static>(
        wanted: &'a WantedBlocks,
        disk: &'a Arc<D>,
        (size, leave_out): (FrameSize, bool),
        totals: &'a RunningTotals<'a>,
    ) -> io::Result<FrameReader<'a>> {
        let end = if wanted.to_end { wanted.last_block() } else { u64::MAX };
        Ok(FrameReader {
            disk: &**disk,
            leave_out,
            unnamed: if wanted.names_zeroes { 0..0 } else { wanted.all_from..end },
            totals,
            wants: wanted.wants(&**disk),
            queue: disk.clone().queue(DEPTH)?,
            block_size: wanted.block_size,
            size,
            left_over: None,
            jobs: BTreeMap::new(),
            next_token: 0,
            due: 0,
            ended: false,
            read: 0,
        })
    }

    /// Bytes read from the disk so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.read
    }

    /// The extents of the next frame; empty at the end.
    fn gather(&mut self) -> io::Result<Vec<Want>> {
        let mut wants = Vec::new();
        let mut data = 0;
        // A frame is many times a block.
        let limit = self.size.limit().min(self.disk.at_once().max(self.block_size));
        while data < limit && wants.len() < FRAME_EXTENTS {
            let Some(want) = (match self.left_over.take() {
                Some(want) => Some(want),
                None => self.wants.next()?,
            }) else {
                break;
            };
            match want {
                Want::Zero(_) | Want::Unread(_) => wants.push(want),
                Want::Read(range) => {
                    let room = limit - data;
                    let len = range.end - range.start;
                    if len <= room {
                        data += len;
                        wants.push(Want::Read(range));
                    } else {
                        // Cut at a block, and never to nothing: a frame is many times a block.
                        let take = room / self.block_size * self.block_size;
                        if take > 0 {
                            wants.push(Want::Read(range.start..range.start + take));
                            data += take;
                        }
                        self.left_over = Some(Want::Read(range.start + take..range.end));
                        break;
                    }
                }
            }
        }
        self.size.given += data;
        Ok(wants)
    }

    /// The next frame and the end of its last extent; `None` at the end. `spare` is a buffer to use again.
    pub(crate) fn next(&mut self, mut spare: Option<Buf>) -> io::Result<Option<(Frame, u64)>> {
        loop {
            match self.step(spare.take())? {
                // A frame may be empty where zeroes need no record.
                Some((frame, _)) if frame.records.is_empty() => spare = Some(frame.data),
                step => return Ok(step),
            }
        }
    }

    fn step(&mut self, mut spare: Option<Buf>) -> io::Result<Option<(Frame, u64)>> {
        while !self.ended && self.jobs.len() < AHEAD {
            let wants = self.gather()?;
            if wants.is_empty() {
                self.ended = true;
                break;
            }
            let job = Job::new(wants);
            let token = self.next_token;
            self.next_token += 1;
            if job.spans.is_empty() {
                self.jobs.insert(token, (job, Some(Ok(Buf::default()))));
            } else {
                self.queue.submit(job.request(token, spare.take().unwrap_or_default()));
                self.jobs.insert(token, (job, None));
            }
        }
        self.queue.start();
        loop {
            match self.jobs.get(&self.due) {
                None => return Ok(None),
                Some((_, Some(_))) => break,
                Some((_, None)) => {}
            }
            let Some(done) = self.queue.complete(true) else {
                return Err(io::Error::other("the disk's queue lost a request"));
            };
            self.read += done.request.buf.len() as u64;
            if let Some((_, slot)) = self.jobs.get_mut(&done.request.token) {
                *slot = Some(done.result.map(|()| done.request.buf));
            }
        }
        let Some((job, Some(result))) = self.jobs.remove(&self.due) else { return Ok(None) };
        self.due += 1;
        let (job, buf) = match result {
            Ok(buf) => (job, buf),
            Err(error) => self.salvage(job, error)?,
        };
        Ok(Some(job.frame(buf, self.block_size, self.unnamed.clone())))
    }

    /// Reads a frame's extents again, block by block; those that cannot be read are named as such, or it fails.
    fn salvage(&self, job: Job, error: io::Error) -> io::Result<(Job, Buf)> {
        if !device::is_unreadable(&error) {
            return Err(error);
        }
        let (mut wants, mut data) = (Vec::new(), Vec::new());
        for want in job.wants {
            let Want::Read(range) = want else {
                wants.push(want);
                continue;
            };
            let mut bytes = vec![0; (range.end - range.start) as usize];
            let block = u32::try_from(self.block_size).unwrap_or(u32::MAX);
            let bad = compare::salvage(self.disk, range.start, &mut bytes, block, self.leave_out)?;
            let mut at = range.start;
            for bad in bad.into_iter().chain(std::iter::once(range.end..range.end)) {
                let good = at..bad.start;
                at = bad.end;
                if !good.is_empty() {
                    data.extend(
                        &bytes[(good.start - range.start) as usize..(good.end - range.start) as usize],
                    );
                    wants.push(Want::Read(good));
                }
                if !bad.is_empty() {
                    self.totals.left_out(&bad);
                    wants.push(Want::Unread(bad));
                }
            }
        }
        let spans = wants.iter().filter_map(|w| if let Want::Read(r) = w { Some(r.clone()) } else { None });
        Ok((Job { spans: spans.collect(), wants }, Buf::from(&data[..])))
    }
}

/// Copies of this many bytes end a frame.
const COPIED: u64 = 16 << 20;

/// Packs differences, which come with their data, into frames.
pub(crate) struct Packer {
    size: FrameSize,
    records: Vec<Record>,
    data: Option<Buf>,
    /// Bytes of the copies among the records.
    copied: u64,
}

impl Packer {
    pub(crate) fn new(size: FrameSize) -> Packer {
        Packer { size, records: Vec::new(), data: None, copied: 0 }
    }

    fn record(&mut self, record: Record) {
        if !self.records.last_mut().is_some_and(|last| last.extend(record)) {
            self.records.push(record);
        }
    }

    /// Adds zeroes, or what could not be read; returns the frame that became full.
    pub(crate) fn dataless(&mut self, record: Record) -> Option<Frame> {
        let full = (self.records.len() >= FRAME_EXTENTS).then(|| self.take());
        self.record(record);
        full
    }

    /// Adds zeroes; returns the frame that became full.
    pub(crate) fn zero(&mut self, range: Range<u64>) -> Option<Frame> {
        self.dataless(Record::Zero { offset: range.start, len: range.end - range.start })
    }

    /// Adds data, at most [`FRAME`] bytes; returns the frame that became full.
    pub(crate) fn data(&mut self, offset: u64, data: &[u8]) -> Option<Frame> {
        let limit = self.size.limit() as usize;
        let held = self.data.as_ref().map_or(0, |d| d.len());
        let ends = self.records.len() >= FRAME_EXTENTS || (held > 0 && held + data.len() > limit);
        let full = ends.then(|| self.take());
        let buf = self.data.get_or_insert_with(|| {
            let mut buf = Buf::scratch(FRAME as usize);
            buf.set_len(0);
            buf
        });
        let more = data.len() as u64;
        self.size.given += more;
        let at = buf.len();
        buf.set_len(at + data.len());
        buf[at..].copy_from_slice(data);
        self.record(Record::Data { offset, len: more });
        full
    }

    /// Adds a copy; returns the frame that became full.
    pub(crate) fn copy(&mut self, record: Record) -> Option<Frame> {
        // Let the far side start with what it has.
        let ends = self.records.len() >= FRAME_EXTENTS || self.copied >= COPIED;
        let full = ends.then(|| self.take());
        self.copied += record.len();
        self.records.push(record);
        full
    }

    /// The last frame.
    pub(crate) fn take(&mut self) -> Frame {
        self.copied = 0;
        Frame { records: std::mem::take(&mut self.records), data: self.data.take().unwrap_or_default() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use device::RamDisk;

    use super::*;

    #[test]
    fn what_is_between_extents_is_read_where_that_saves_requests() {
        let spans = |extents: &[Range<u64>]| {
            Job::new(extents.iter().map(|blocks| Want::Read(blocks.start << 12..blocks.end << 12)).collect())
                .spans
        };
        let every = |step: u64, blocks: u64, count: u64| {
            (0..count).map(|at| at * step..at * step + blocks).collect::<Vec<_>>()
        };
        // Two of three blocks, and every fourth, in one read; every tenth in as many as there are.
        assert_eq!(spans(&every(3, 2, 100)).len(), 1);
        assert_eq!(spans(&every(4, 1, 200)).len(), 1);
        assert_eq!(spans(&every(10, 1, 200)).len(), 200);
        // Long ones fill their span, but one request less is not worth what is between them.
        assert_eq!(spans(&every(48, 16, 10)).len(), 10);
        // What is adjacent is one read, and few are not worth it.
        assert_eq!(spans(&[0..1, 1..2, 4..5]), [0..2 << 12, 4 << 12..5 << 12]);
    }

    /// Of a destination that is not blank nothing is left as it was from the old end on, wherever in a block that is.
    #[test]
    fn all_that_a_disk_grew_by_is_named_from_its_old_end_on() {
        let mut random = testing::Random::new("what a disk grew by");
        for _ in 0..300 {
            let block = 512 << random.below(4);
            let (upto, size) = (random.below(40_000), 40_000 + random.below(40_000));
            let disk = Arc::new(RamDisk::new(size));
            for _ in 0..random.below(6) {
                let (at, fill) = (random.below(size), random.below(2) as u8);
                disk.write_at(at, &vec![fill; random.below((size - at).min(9000)) as usize]).unwrap();
            }
            let blocks = Bitmap::new(size.div_ceil(block));
            let wanted = WantedBlocks::marked(blocks, size, block).and_beyond(upto);
            let totals = RunningTotals::new(&|_, _| {});
            let size_of = FrameSize::new(true, block);
            let mut reader = FrameReader::new(&wanted, &disk, (size_of, false), &totals).unwrap();
            let mut named = upto;
            while let Some((frame, _)) = reader.next(None).unwrap() {
                for record in &frame.records {
                    assert!(
                        record.offset() <= named,
                        "{named} to {} of {size}, from {upto}",
                        record.offset()
                    );
                    named = record.end();
                }
            }
            assert_eq!(named, size, "from {upto}");
        }
    }

    #[test]
    fn frames_grow_with_what_was_sent_also_within_one_long_extent() {
        const SIZE: u64 = 64 << 20;
        let disk = Arc::new(RamDisk::new(SIZE));
        for at in (0..SIZE).step_by(1 << 20) {
            disk.write_at(at, &[7; 1 << 20]).unwrap();
        }
        let wanted = WantedBlocks::allocated(SIZE, 4096);
        let size = FrameSize::new(true, 4096);
        let totals = RunningTotals::new(&|_, _| {});
        let mut reader = FrameReader::new(&wanted, &disk, (size, false), &totals).unwrap();
        let (mut frames, mut sent) = (0, 0);
        while let Some((frame, _)) = reader.next(None).unwrap() {
            let len = frame.data.len() as u64;
            assert!(len <= (sent / FrameSize::PART).max(FrameSize::LEAST), "{len} bytes after {sent}");
            sent += len;
            frames += 1;
        }
        // 64 of the least size, then each a 64th of all before: 64 * ln(128) more until a frame is a MiB.
        assert_eq!(sent, SIZE);
        assert!(frames < 450, "{frames} frames");
    }
}
