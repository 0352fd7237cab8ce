//! Which of a journal's deltas writes a range last. When the deltas of a mirror's batches are merged again after a crash, what a
//! later one writes is left out of those before: a range that was trimmed since would need room once more for data that is
//! replaced at once, and where that room is gone, confirmed batches could not be merged.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use delta::{Frame, Header, Record};
use device::{Buf, Folder};

use crate::error::{Result, io_error};
use crate::journal::{self, Contents, Target};

/// For each range that is written, the number of the delta that does so last.
pub(crate) struct LastWrites {
    /// By their first bytes: where they end, and which delta it is.
    ranges: BTreeMap<u64, (u64, usize)>,
}

impl LastWrites {
    /// Reads the deltas of a folder's journal. `None` if there is only one, which has the last word.
    ///
    /// # Errors
    /// If they cannot be read, or are not what they were.
    pub(crate) fn of(folder: &dyn Folder, name: &str, deltas: &[Contents]) -> Result<Option<LastWrites>> {
        if deltas.len() < 2 {
            return Ok(None);
        }
        let mut last = LastWrites { ranges: BTreeMap::new() };
        for (delta, contents) in deltas.iter().enumerate() {
            let mut collect = Collect { last: &mut last, delta };
            let failed = io_error("read", &folder.path().join(name));
            journal::replay(folder, name, contents, &mut collect, &mut Vec::new(), failed)?;
        }
        Ok(Some(last))
    }

    /// `delta` writes a range, after all that came before.
    fn write(&mut self, range: Range<u64>, delta: usize) {
        if range.is_empty() {
            return;
        }
        if let Some((&start, &(end, before))) = self.ranges.range(..range.start).next_back() {
            if end >= range.start && before == delta {
                return self.write_from(start, start..range.end.max(end), delta);
            }
            if end > range.start {
                self.ranges.insert(start, (range.start, before));
                if end > range.end {
                    self.ranges.insert(range.end, (end, before));
                }
            }
        }
        self.write_from(range.start, range, delta);
    }

    /// Replaces what begins in the range.
    fn write_from(&mut self, start: u64, range: Range<u64>, delta: usize) {
        let covered: Vec<u64> = self.ranges.range(range.clone()).map(|(&start, _)| start).collect();
        for begin in covered {
            if let Some((end, before)) = self.ranges.remove(&begin).filter(|(end, _)| *end > range.end) {
                self.ranges.insert(range.end, (end, before));
            }
        }
        self.ranges.insert(start, (range.end, delta));
    }

    /// The parts of a range that `delta` writes last.
    fn of_delta(&self, range: Range<u64>, delta: usize) -> impl Iterator<Item = Range<u64>> {
        let first = self.ranges.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        let parts = self.ranges.range(first..range.end).filter(move |(_, (_, by))| *by == delta);
        parts
            .map(move |(&start, &(end, _))| start.max(range.start)..end.min(range.end))
            .filter(|part| !part.is_empty())
    }

    /// A frame of `delta` without what later ones write.
    fn filter(&self, frame: Frame, delta: usize) -> Frame {
        let whole = |record: &Record| {
            let range = record.offset()..record.end();
            !writes(record) || self.of_delta(range.clone(), delta).next() == Some(range)
        };
        if frame.records.iter().all(whole) {
            return frame;
        }
        let (mut records, mut data, mut at) = (Vec::new(), Vec::new(), 0);
        for record in frame.records {
            let start = record.offset();
            let bytes = if let Record::Data { len, .. } = record { len as usize } else { 0 };
            let content = &frame.data[at..at + bytes];
            at += bytes;
            if !writes(&record) {
                records.push(record);
                continue;
            }
            for part in self.of_delta(start..record.end(), delta) {
                let (offset, len) = (part.start, part.end - part.start);
                if bytes == 0 {
                    records.push(Record::Zero { offset, len });
                } else {
                    records.push(Record::Data { offset, len });
                    data.extend_from_slice(
                        &content[(part.start - start) as usize..(part.end - start) as usize],
                    );
                }
            }
        }
        Frame { records, data: Buf::from(&data[..]) }
    }
}

/// True if a record changes what the destination holds. Copies were resolved before they got into a journal.
fn writes(record: &Record) -> bool {
    matches!(record, Record::Data { .. } | Record::Zero { .. })
}

/// Takes down what the frames of a delta write.
struct Collect<'a> {
    last: &'a mut LastWrites,
    delta: usize,
}

impl Target for Collect<'_> {
    fn rewind(&mut self, _: &Header, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn frame(&mut self, frame: Frame) -> io::Result<()> {
        for record in frame.records.iter().filter(|record| writes(record)) {
            self.last.write(record.offset()..record.end(), self.delta);
        }
        Ok(())
    }
}

/// Passes on what a delta writes and no later one does.
pub(crate) struct WrittenLast<'a> {
    pub target: &'a mut dyn Target,
    /// `None` passes on everything.
    pub last: Option<&'a LastWrites>,
    pub delta: usize,
}

impl Target for WrittenLast<'_> {
    fn rewind(&mut self, header: &Header, known: u64) -> io::Result<()> {
        self.target.rewind(header, known)
    }

    fn frame(&mut self, frame: Frame) -> io::Result<()> {
        let frame = match self.last {
            Some(last) => last.filter(frame, self.delta),
            None => frame,
        };
        if frame.records.is_empty() { Ok(()) } else { self.target.frame(frame) }
    }
}

#[cfg(test)]
mod tests {
    use testing::Random;

    use super::*;

    /// Against a model of one number a byte.
    #[test]
    fn the_last_delta_has_each_byte() {
        let mut random = Random::new("last writes");
        for _ in 0..200 {
            let mut last = LastWrites { ranges: BTreeMap::new() };
            let mut model = [usize::MAX; 64];
            let mut frames = Vec::new();
            for delta in 0..1 + random.index(5) {
                for _ in 0..1 + random.index(6) {
                    let start = random.below(60);
                    let end = start + 1 + random.below(64 - start);
                    last.write(start..end, delta);
                    model[start as usize..end as usize].fill(delta);
                    frames.push((delta, start, end, random.coin()));
                }
            }
            for delta in 0..5 {
                let mut found = [false; 64];
                for part in last.of_delta(0..64, delta) {
                    assert!(found[part.start as usize..part.end as usize].iter().all(|byte| !byte));
                    found[part.start as usize..part.end as usize].fill(true);
                }
                assert!(
                    found.iter().zip(&model).all(|(found, by)| *found == (*by == delta)),
                    "{delta}: {model:?}"
                );
            }
            for (delta, start, end, zero) in frames {
                let (offset, len) = (start, end - start);
                let content: Vec<u8> =
                    if zero { Vec::new() } else { (start..end).map(|at| at as u8).collect() };
                let record = if zero { Record::Zero { offset, len } } else { Record::Data { offset, len } };
                let frame = Frame { records: vec![record], data: Buf::from(&content[..]) };
                let filtered = last.filter(frame, delta);
                let kept: u64 = filtered.records.iter().map(Record::len).sum();
                let owned = model[start as usize..end as usize].iter().filter(|by| **by == delta).count();
                assert_eq!(kept, owned as u64);
                let mut data = filtered.data.iter();
                for record in filtered.records.iter().filter(|_| !zero) {
                    assert!((record.offset()..record.end()).all(|at| data.next() == Some(&(at as u8))));
                }
                assert!(data.next().is_none());
            }
        }
    }
}
