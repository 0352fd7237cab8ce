//! Bringing frames onto a disk: many requests on their way at once, dense regions as whole spans.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Frame, Header, Record};
use device::{Buf, Disk, Done, Piece, Pieces, Queue, Request, RequestKind};

use crate::commit::marks::Marks;
use crate::journal::Target;
use crate::state::note::Keeping;

/// Operations kept on their way.
const DEPTH: u32 = 64;
/// Bytes kept on their way: some frames more than the disk works on, so that it never waits for the next.
const FLIGHT: usize = 8 << 20;

/// Where scattered blocks cover more than one part in this of a span, the span is written whole.
const DENSE_PART: u64 = 4;
/// The longest span that is written whole, in bytes.
const DENSE_SPAN: u64 = 8 << 20;
/// The widest gap that is read to fill a span, in bytes.
const DENSE_GAP: u64 = 128 << 10;

/// A run of a frame's data: its place on the disk and in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    offset: u64,
    len: u64,
    at: usize,
}

impl Run {
    fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// What is done with a frame.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// Written one by one.
    picked: Vec<Run>,
    /// Read, overlaid, and written whole.
    spans: Vec<Vec<Run>>,
    /// Zeroed.
    zeroes: Vec<Range<u64>>,
}

/// Decides what is done with a frame's records. `cursor` is where the records before it end. From `known` on, what no record
/// names becomes zero.
fn plan(records: &[Record], mut cursor: u64, known: u64) -> Plan {
    let mut plan = Plan::default();
    let mut group: Vec<Run> = Vec::new();
    let mut at = 0;
    for record in records {
        let (offset, len) = (record.offset(), record.len());
        let gap = cursor.max(known)..offset;
        if !gap.is_empty() {
            plan.zeroes.push(gap);
        }
        if let Record::Data { .. } = record {
            let joins = group.first().zip(group.last()).is_some_and(|(first, last)| {
                // Beyond `known` a gap is not the disk's to fill.
                offset.checked_sub(last.end()).is_some_and(|gap| gap <= DENSE_GAP)
                    && offset + len - first.offset <= DENSE_SPAN
                    && offset <= known
            });
            if !joins {
                plan.close(&mut group);
            }
            group.push(Run { offset, len, at });
            at += len as usize;
        } else {
            plan.close(&mut group);
            match record {
                Record::Zero { .. } => plan.zeroes.push(offset..offset + len),
                Record::Unsure { .. } if offset + len > known => {
                    plan.zeroes.push(offset.max(known)..offset + len)
                }
                _ => {}
            }
        }
        cursor = offset + len;
    }
    plan.close(&mut group);
    plan
}

/// What a frame of an ascending delta writes, the gaps that are filled included. From `known` on, what no record names becomes
/// zero.
pub(crate) fn written(records: &[Record], known: u64) -> impl Iterator<Item = Range<u64>> {
    let plan = plan(records, u64::MAX, known);
    let spans = plan.spans.into_iter().filter_map(|runs| Some(runs.first()?.offset..runs.last()?.end()));
    plan.picked.into_iter().map(|run| run.offset..run.end()).chain(spans)
}

impl Plan {
    /// Puts a group of neighbouring runs where it belongs.
    fn close(&mut self, group: &mut Vec<Run>) {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { return };
        let span = last.end() - first.offset;
        let data: u64 = group.iter().map(|r| r.len).sum();
        // A few long runs are as good as a span.
        let scattered = group.len() > 4 && data / (group.len() as u64) < 64 << 10;
        if scattered && data < span && data * DENSE_PART > span {
            self.spans.push(std::mem::take(group));
        } else {
            self.picked.append(group);
        }
    }
}

/// Where runs are on the disk.
fn pieces(runs: &[Run]) -> Pieces {
    let mut pieces: Pieces = Pieces::with_capacity(runs.len());
    for run in runs {
        match pieces.last_mut() {
            Some(last) if last.offset + last.len == run.offset => last.len += run.len,
            _ => pieces.push(Piece { offset: run.offset, len: run.len }),
        }
    }
    pieces
}

/// The data of some of a frame's runs.
fn pick(runs: &[Run], data: &Buf) -> Buf {
    let mut picked = Buf::scratch(runs.iter().map(|r| r.len as usize).sum());
    let mut at = 0;
    for run in runs {
        picked[at..at + run.len as usize].copy_from_slice(&data[run.at..run.at + run.len as usize]);
        at += run.len as usize;
    }
    picked
}

/// A request on its way.
struct Flying {
    /// Its first byte on the disk.
    first: u64,
    /// Memory it holds.
    bytes: usize,
    /// For a span being read: what goes over it.
    overlay: Option<(Arc<Buf>, Vec<Run>)>,
}

/// Brings the frames of one delta onto a disk.
pub(crate) struct Applier {
    disk: Arc<dyn Disk>,
    queue: Box<dyn Queue>,
    flying: BTreeMap<u64, Flying>,
    token: u64,
    bytes: usize,
    cursor: u64,
    known: u64,
    blank: bool,
    scattered: bool,
    /// The first error: what has failed once never counts as complete, whatever is said after it.
    failed: Option<(io::ErrorKind, String)>,
    /// The note of own writes.
    keeping: Keeping,
    /// A flush has failed: the system forgets what it could not write, so no later one says anything about that.
    forgotten: bool,
    /// Some of the blocks that it was told to change.
    pub marks: Marks,
    /// Bytes written to the disk, the filled gaps of spans included.
    pub written: u64,
    /// Bytes read to fill the gaps of spans.
    pub read: u64,
}

impl Applier {
    /// An applier for a disk whose content ends at `known`: beyond, what no record names becomes zero. A `blank` disk reads as zeroes
    /// everywhere, and making zeroes costs nothing.
    pub(crate) fn new(disk: Arc<dyn Disk>, known: u64, blank: bool) -> io::Result<Applier> {
        let queue = disk.clone().queue(DEPTH)?;
        Ok(Applier {
            disk,
            queue,
            flying: BTreeMap::new(),
            token: 0,
            bytes: 0,
            cursor: 0,
            known,
            blank,
            scattered: false,
            failed: None,
            keeping: Keeping::default(),
            forgotten: false,
            marks: Marks::default(),
            written: 0,
            read: 0,
        })
    }

    /// An applier for a delta whose records are in any order: nothing between them is filled.
    pub(crate) fn scattered(disk: Arc<dyn Disk>) -> io::Result<Applier> {
        Ok(Applier { scattered: true, ..Applier::new(disk, u64::MAX, false)? })
    }

    /// Where all records that end before it are complete.
    pub(crate) fn position(&self) -> u64 {
        self.flying.values().map(|f| f.first).min().unwrap_or(self.cursor).min(self.cursor)
    }

    /// Keeps this note from now on.
    pub(crate) fn keep(&mut self, note: Keeping) {
        self.keeping = note;
    }

    /// Fails if anything has.
    fn sound(&self) -> io::Result<()> {
        self.failed.as_ref().map_or(Ok(()), |(kind, text)| Err(io::Error::new(*kind, text.clone())))
    }

    fn note<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        if let Err(e) = &result {
            self.failed.get_or_insert_with(|| (e.kind(), e.to_string()));
        }
        result
    }

    /// True once a flush has failed: nothing that was not durable before ever will be.
    pub(crate) fn has_forgotten(&self) -> bool {
        self.forgotten
    }

    /// The next part of the delta begins at the disk's start again. Everything before is complete on return.
    pub(crate) fn rewind(&mut self, known: u64) -> io::Result<()> {
        self.drain()?;
        (self.cursor, self.known) = (0, known);
        Ok(())
    }

    /// Applies a frame. Returns once it is on its way. After an error nothing more is applied.
    pub(crate) fn frame(&mut self, frame: Frame) -> io::Result<()> {
        if frame.records.iter().any(|r| matches!(r, Record::Copy { .. })) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a copy that was not read"));
        }
        self.frame_of_copies(frame)
    }

    /// Applies a frame that comes out of [`crate::commit::copies`]: a copy that is still in it was carried out already.
    pub(crate) fn frame_of_copies(&mut self, frame: Frame) -> io::Result<()> {
        self.sound()?;
        let Frame { records, data } = frame;
        let mut plan = plan(&records, self.cursor, self.known);
        if self.scattered {
            plan.picked.extend(plan.spans.drain(..).flatten());
            plan.picked.sort_by_key(|run| run.at);
        }
        for record in &records {
            self.marks.add(&(record.offset()..record.offset() + record.len()));
        }
        self.zero(&plan.zeroes)?;
        if plan.spans.is_empty() {
            if !plan.picked.is_empty() {
                self.write(&plan.picked, data)?;
            }
        } else {
            if !plan.picked.is_empty() {
                self.write(&plan.picked, pick(&plan.picked, &data))?;
            }
            let data = Arc::new(data);
            for runs in plan.spans {
                self.span(runs, &data)?;
            }
        }
        if let Some(last) = records.last() {
            self.cursor = last.offset() + last.len();
        }
        self.queue.start();
        while let Some(done) = self.queue.complete(false) {
            self.done(done)?;
        }
        self.room(0)
    }

    /// Ends the delta of a disk of `size` bytes: what follows the last record is zeroed where it must be. All is complete
    /// on return, not durable.
    pub(crate) fn finish(&mut self, size: u64) -> io::Result<()> {
        let tail = self.cursor.max(self.known)..size;
        if !tail.is_empty() {
            self.zero(&[tail])?;
        }
        self.cursor = self.cursor.max(size);
        self.drain()
    }

    /// Waits until nothing is on its way any more. Fails if anything has, now or before.
    pub(crate) fn drain(&mut self) -> io::Result<()> {
        self.queue.start();
        while let Some(done) = self.queue.complete(true) {
            // The first error is kept.
            let _ = self.done(done);
        }
        self.sound()
    }

    /// Waits for the next of what is on its way, so that what waits behind it starts. False if nothing is on its way. What has failed is
    /// told by the next call that can fail.
    pub(crate) fn advance(&mut self) -> bool {
        self.queue.start();
        let Some(first) = self.queue.complete(true) else { return false };
        let _ = self.done(first);
        while let Some(done) = self.queue.complete(false) {
            let _ = self.done(done);
        }
        true
    }

    /// Makes durable what is complete, up to [`Applier::position`]. Fails for good if a flush has failed before.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.forgotten {
            return self.sound();
        }
        let flushed = self.disk.flush();
        self.forgotten = flushed.is_err();
        self.note(flushed)
    }

    fn write(&mut self, runs: &[Run], buf: Buf) -> io::Result<()> {
        self.written += buf.len() as u64;
        self.submit(RequestKind::Write { fua: false }, pieces(runs), buf, None)
    }

    fn span(&mut self, runs: Vec<Run>, data: &Arc<Buf>) -> io::Result<()> {
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return Ok(()) };
        let piece = Piece { offset: first.offset, len: last.end() - first.offset };
        self.written += piece.len;
        self.read += piece.len;
        let buf = Buf::scratch(piece.len as usize);
        self.submit(RequestKind::Read, Pieces::from_slice(&[piece]), buf, Some((data.clone(), runs)))
    }

    fn zero(&mut self, ranges: &[Range<u64>]) -> io::Result<()> {
        if self.blank || ranges.is_empty() {
            return Ok(());
        }
        let pieces: Pieces = ranges.iter().map(|r| Piece { offset: r.start, len: r.end - r.start }).collect();
        self.submit(RequestKind::Zero { unmap: true, fast: false, fua: false }, pieces, Buf::default(), None)
    }

    fn submit(
        &mut self,
        kind: RequestKind,
        pieces: Pieces,
        buf: Buf,
        overlay: Option<(Arc<Buf>, Vec<Run>)>,
    ) -> io::Result<()> {
        self.room(buf.len())?;
        let first = pieces.iter().map(|p| p.offset).min().unwrap_or(0);
        let (token, bytes, overlaid) = (self.token, buf.len(), overlay.is_some());
        self.token += 1;
        self.bytes += bytes;
        self.flying.insert(token, Flying { first, bytes, overlay });
        self.keeping.note();
        // What is read to be overlaid is written next.
        if kind != RequestKind::Read || overlaid {
            self.keeping.hands_over(self.sectors(&pieces), matches!(kind, RequestKind::Zero { .. }));
        }
        self.queue.submit(Request { kind, pieces, buf, token });
        Ok(())
    }

    /// The sectors, of 512 bytes, that a write to these pieces may touch: the disk takes whole units.
    fn sectors(&self, pieces: &Pieces) -> u64 {
        let unit = u64::from(self.disk.align()).max(512);
        let units = |p: &Piece| (p.offset + p.len).div_ceil(unit) - p.offset / unit;
        pieces.iter().map(units).sum::<u64>() * (unit / 512)
    }

    /// Waits until `more` bytes have room.
    fn room(&mut self, more: usize) -> io::Result<()> {
        while self.bytes > 0 && self.bytes + more > FLIGHT {
            self.queue.start();
            match self.queue.complete(true) {
                Some(done) => self.done(done)?,
                None => break,
            }
        }
        Ok(())
    }

    fn done(&mut self, done: Done) -> io::Result<()> {
        self.keeping.note();
        let result = self.complete(done);
        self.note(result)
    }

    fn complete(&mut self, done: Done) -> io::Result<()> {
        let Done { mut request, result } = done;
        let Some(mut flying) = self.flying.remove(&request.token) else { return result };
        let unreadable = result.as_ref().is_err_and(device::is_unreadable);
        if let Some((data, runs)) = flying.overlay.take_if(|_| unreadable) {
            // The gaps are unreadable: they stay as they are.
            self.written -= request.buf.len() as u64;
            request.buf = pick(&runs, &data);
            self.written += request.buf.len() as u64;
            request.pieces = pieces(&runs);
            request.kind = RequestKind::Write { fua: false };
            self.flying.insert(request.token, flying);
            self.queue.submit(request);
            self.queue.start();
            return Ok(());
        }
        if let Err(e) = result {
            // It stays in flight for `position`: nothing from here on may count as complete.
            flying.overlay = None;
            self.flying.insert(request.token, flying);
            return Err(e);
        }
        match flying.overlay.take() {
            Some((data, runs)) => {
                let start = flying.first;
                for run in runs {
                    let to = (run.offset - start) as usize;
                    request.buf[to..to + run.len as usize]
                        .copy_from_slice(&data[run.at..run.at + run.len as usize]);
                }
                self.flying.insert(request.token, flying);
                request.kind = RequestKind::Write { fua: false };
                self.queue.submit(request);
                self.queue.start();
            }
            None => self.bytes -= flying.bytes,
        }
        Ok(())
    }
}

impl Target for Applier {
    fn rewind(&mut self, _: &Header, known: u64) -> io::Result<()> {
        Applier::rewind(self, known)
    }

    fn frame(&mut self, frame: Frame) -> io::Result<()> {
        Applier::frame(self, frame)
    }
}

#[cfg(test)]
mod tests {
    use device::RamDisk;
    use proptest::prelude::*;
    use testing::faulty::{FaultyDisk, Outage, Power};

    use super::*;

    fn data(offset: u64, len: u64) -> Record {
        Record::Data { offset, len }
    }

    fn offsets(runs: &[Run]) -> Vec<u64> {
        runs.iter().map(|r| r.offset).collect()
    }

    #[test]
    fn dense_regions_become_spans() {
        const K: u64 = 4096;
        let every = |step: u64, from: u64, count: u64| -> Vec<Record> {
            (0..count).map(|n| data((from + n * step) * K, K)).collect()
        };
        // Every third block is dense, every tenth is not.
        let dense = plan(&every(3, 0, 200), 0, u64::MAX);
        assert_eq!((dense.picked.len(), dense.spans.len(), dense.spans[0].len()), (0, 1, 200));
        let sparse = plan(&every(10, 0, 200), 0, u64::MAX);
        assert_eq!((sparse.picked.len(), sparse.spans.len()), (200, 0));
        // Both in one frame, with a wide gap between.
        let both: Vec<Record> = [every(10, 0, 20), every(2, 1000, 50)].concat();
        let both = plan(&both, 0, u64::MAX);
        assert_eq!((both.picked.len(), both.spans.len(), both.spans[0][0].at), (20, 1, 20 * 4096));
        // What is written whole anyway, and long runs.
        assert!(plan(&[data(0, 1 << 20)], 0, u64::MAX).spans.is_empty());
        let long: Vec<Record> = (0..8).map(|n| data(n * 256 * K, 128 * K)).collect();
        assert!(plan(&long, 0, u64::MAX).spans.is_empty());
        // A zero record parts what lies around it; beyond what is known every gap is a zeroing.
        let parted =
            [every(2, 0, 10), vec![Record::Zero { offset: 100 * K, len: K }], every(2, 200, 10)].concat();
        let parted = plan(&parted, 0, u64::MAX);
        let hole = 100 * K..101 * K;
        assert_eq!((parted.spans.len(), parted.zeroes.clone()), (2, vec![hole]));
        let beyond = plan(&every(2, 0, 10), 0, 9 * K);
        assert_eq!(offsets(&beyond.picked), [10, 12, 14, 16, 18].map(|n| n * K));
        assert_eq!(beyond.zeroes, [9, 11, 13, 15, 17].map(|n| n * K..(n + 1) * K));
        assert_eq!(offsets(&beyond.spans[0]), [0, 2, 4, 6, 8].map(|n| n * K));
        // A span is not longer than its bound.
        let wide = plan(&every(3, 0, 4000), 0, u64::MAX);
        assert!(wide.spans.len() > 1);
        for span in &wide.spans {
            assert!(span.last().unwrap().end() - span[0].offset <= DENSE_SPAN);
        }
    }

    /// Records in ascending order: gap, length, zero or not, end of frame.
    fn records() -> impl Strategy<Value = Vec<(u64, u64, bool, bool)>> {
        prop::collection::vec(
            (
                prop_oneof![4 => 0u64..4, 1 => 0u64..200],
                prop_oneof![6 => 1u64..3, 1 => 1u64..60],
                prop::bool::weighted(0.15),
                prop::bool::weighted(0.1),
            ),
            1..80,
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the shape, and in whatever order the disk completes, the result is that of one write after the other.
        #[test]
        fn frames_are_applied_as_they_say(
            records in records(),
            unit in prop_oneof![Just(512u64), Just(4096u64), Just(700u64)],
            known in prop_oneof![Just(u64::MAX), 0u64..400],
            seed in any::<u64>(),
        ) {
            let known = known.saturating_mul(unit);
            let mut at = 0;
            let mut frames: Vec<Vec<Record>> = vec![vec![]];
            for (gap, len, zero, ends) in records {
                let (offset, len) = ((at + gap) * unit, len * unit);
                at += gap + len / unit;
                frames.last_mut().unwrap().push(if zero { Record::Zero { offset, len } } else { data(offset, len) });
                if ends {
                    frames.push(vec![]);
                }
            }
            frames.retain(|f| !f.is_empty());
            let size = (at + 50) * unit;
            let before: Vec<u8> = (0..size).map(|n| (n % 251 + 1) as u8).collect();
            let mut expected = before.clone();
            let (mut cursor, mut n) = (0, 0u8);
            let ram = Arc::new(RamDisk::from_bytes(&before));
            let power = Power::new(Outage::Kill);
            let disk = Arc::new(FaultyDisk::new(&power, ram.clone() as _));
            disk.shuffle_completions(seed);
            let mut applier = Applier::new(disk, known, false).unwrap();
            for records in frames {
                let mut bytes = Vec::new();
                for record in &records {
                    let place = record.offset() as usize..record.end() as usize;
                    let gap = cursor.max(known).min(size)..record.offset();
                    if !gap.is_empty() {
                        expected[gap.start as usize..gap.end as usize].fill(0);
                    }
                    if let Record::Data { .. } = record {
                        n = n.wrapping_add(1).max(1);
                        expected[place.clone()].fill(n);
                        bytes.extend_from_slice(&expected[place]);
                    } else {
                        expected[place].fill(0);
                    }
                    cursor = record.end();
                }
                applier.frame(Frame { records, data: Buf::from(&bytes[..]) }).unwrap();
                // All that lies below the position is there already.
                let upto = applier.position();
                prop_assert!(upto <= cursor);
                let mut now = vec![0; upto as usize];
                ram.read_at(0, &mut now).unwrap();
                prop_assert!(now == expected[..upto as usize]);
            }
            applier.finish(size).unwrap();
            if cursor.max(known) < size {
                expected[cursor.max(known) as usize..].fill(0);
            }
            let mut found = vec![0; size as usize];
            ram.read_at(0, &mut found).unwrap();
            prop_assert!(found == expected);
            prop_assert_eq!(applier.position(), size);
        }
    }

    const EIO: i32 = 5;

    /// What failed never counts as complete, nor what comes after it.
    #[test]
    fn the_position_stays_before_what_failed() {
        let power = Power::new(Outage::Kill);
        let disk = Arc::new(FaultyDisk::new(&power, Arc::new(RamDisk::new(1 << 20))));
        disk.fail_writes(40960..45056, EIO);
        let mut applier = Applier::new(disk.clone(), u64::MAX, false).unwrap();
        for block in 0..20 {
            let frame = Frame { records: vec![data(block * 8192, 4096)], data: Buf::new(4096) };
            if applier.frame(frame).is_err() {
                break;
            }
        }
        let _ = applier.drain();
        assert_eq!(applier.position(), 40960);
        // It is not forgotten by being told once.
        disk.heal();
        let frame = Frame { records: vec![data(512 << 10, 4096)], data: Buf::new(4096) };
        assert!(
            applier.drain().is_err() && applier.frame(frame).is_err() && applier.finish(1 << 20).is_err()
        );
        assert_eq!(applier.position(), 40960);
        // What was complete before can be made durable; not after a flush that failed.
        applier.flush().unwrap();
        power.fail_at(power.steps() + 1, 1, EIO);
        assert!(applier.flush().is_err() && applier.flush().is_err() && applier.has_forgotten());
    }

    #[test]
    fn a_gap_that_cannot_be_read_keeps_nothing_from_being_written() {
        let before = vec![9; 1 << 20];
        let ram = Arc::new(RamDisk::from_bytes(&before));
        let disk = Arc::new(FaultyDisk::new(&Power::new(Outage::Kill), ram.clone() as _));
        disk.fail_reads(4096 * 7..4096 * 7 + 1, EIO);
        let mut applier = Applier::new(disk, u64::MAX, false).unwrap();
        let records: Vec<Record> = (0..20).map(|n| data(n * 8192, 4096)).collect();
        applier.frame(Frame { records, data: Buf::from(&[3; 20 * 4096][..]) }).unwrap();
        applier.finish(1 << 20).unwrap();
        let mut found = vec![0; 1 << 20];
        ram.read_at(0, &mut found).unwrap();
        for (block, bytes) in found.chunks(4096).enumerate() {
            let expected = if block < 40 && block % 2 == 0 { 3 } else { 9 };
            assert!(bytes.iter().all(|b| *b == expected), "block {block}");
        }
        assert_eq!(applier.written, 20 * 4096);
    }
}
