//! Where the content of undo deltas is: by ranges of the disk.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Decoder, Event, Header, Record, Units};
use device::StateFile;

use crate::journal::Input;

/// Where the content of a range is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Zero,
    /// In this file, from this byte on.
    File(u32, u64),
}

impl Place {
    /// The place of what is so many bytes further on the disk.
    fn after(self, bytes: u64) -> Place {
        match self {
            Place::Zero => Place::Zero,
            Place::File(file, at) => Place::File(file, at + bytes),
        }
    }
}

/// A range of the disk, from its key on.
#[derive(Debug, Clone, Copy)]
struct Run {
    end: u64,
    place: Place,
}

/// Content of some ranges of a disk, in files of undo deltas.
#[derive(Default)]
pub(crate) struct UndoIndex {
    runs: BTreeMap<u64, Run>,
    files: Vec<Arc<dyn StateFile>>,
}

impl UndoIndex {
    /// Adds a file, and returns its number.
    pub(crate) fn file(&mut self, file: Arc<dyn StateFile>) -> u32 {
        self.files.push(file);
        self.files.len() as u32 - 1
    }

    /// Takes the undo delta that begins at this byte of a file, over what is there; returns where it ends.
    ///
    /// # Errors
    /// If it is damaged: then a part of it may be there.
    pub(crate) fn take(&mut self, number: u32, start: u64) -> io::Result<u64> {
        let file = self.files[number as usize].clone();
        let mut units = Units::new(Input::new(&*file, start)?);
        let mut decoder = Decoder::new();
        while let Some(unit) = units.next().map_err(io::Error::other)? {
            let body = (start + units.bytes() - unit.body.len() as u64, unit.body.len());
            match decoder.push(unit).map_err(io::Error::other)? {
                Event::Header(header) => self.resize(&header),
                Event::Frame(frame) if frame.data.len() == body.1 => {
                    let mut at = body.0;
                    for record in &frame.records {
                        let place = match record {
                            Record::Zero { .. } => Place::Zero,
                            Record::Data { len, .. } => {
                                at += len;
                                Place::File(number, at - len)
                            }
                            _ => return Err(io::Error::other("an undo delta has data and zeroes only")),
                        };
                        self.put(record.offset()..record.end(), place);
                    }
                }
                Event::Frame(_) => return Err(io::Error::other("an undo delta is not compressed")),
                Event::End(_) => return Ok(start + units.bytes()),
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    /// Changes the size of the disk: what is cut off is gone, and what is added is zero.
    fn resize(&mut self, header: &Header) {
        let (before, after) = (header.size_before, header.size_after);
        if before < after {
            self.put(before..after, Place::Zero);
        }
    }

    /// Puts a range in place of what is there.
    fn put(&mut self, range: Range<u64>, place: Place) {
        if range.is_empty() {
            return;
        }
        self.cut(range.start);
        self.cut(range.end);
        let inside: Vec<u64> = self.runs.range(range.clone()).map(|(start, _)| *start).collect();
        inside.iter().for_each(|start| {
            self.runs.remove(start);
        });
        if let Some((start, last)) = self.runs.range_mut(..range.start).next_back() {
            if last.end == range.start && last.place.after(range.start - start) == place {
                last.end = range.end;
                return;
            }
        }
        self.runs.insert(range.start, Run { end: range.end, place });
    }

    /// Divides the run that reaches over a byte.
    fn cut(&mut self, at: u64) {
        let Some((start, run)) = self.runs.range_mut(..at).next_back() else { return };
        if run.end > at {
            let rest = Run { end: run.end, place: run.place.after(at - start) };
            run.end = at;
            self.runs.insert(at, rest);
        }
    }

    /// The runs of a range, each as far as it is within.
    fn within(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, Place)> {
        let before = self.runs.range(..range.start).next_back();
        let runs = before.into_iter().chain(self.runs.range(range.clone()));
        runs.filter(move |(_, run)| run.end > range.start).map(move |(start, run)| {
            let from = (*start).max(range.start);
            (from..run.end.min(range.end), run.place.after(from - start))
        })
    }

    /// Puts what is there over what was read from this byte on.
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        for (range, place) in self.within(offset..offset + buf.len() as u64) {
            let part = &mut buf[(range.start - offset) as usize..(range.end - offset) as usize];
            match place {
                Place::Zero => part.fill(0),
                Place::File(file, at) => self.files[file as usize].read_at(at, part)?,
            }
        }
        Ok(())
    }

    /// The parts of a range of which nothing is there.
    pub(crate) fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let (mut missing, mut at) = (Vec::new(), range.start);
        let ends = std::iter::once((range.end..range.end, Place::Zero));
        for (run, _) in self.within(range.clone()).chain(ends) {
            if at < run.start {
                missing.push(at..run.start);
            }
            at = run.end;
        }
        missing
    }

    /// The first range at or after a byte of which something is there.
    pub(crate) fn next(&self, from: u64) -> Option<Range<u64>> {
        self.within(from..u64::MAX).next().map(|(range, _)| range)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Agrees with a model of one place for each byte.
        #[test]
        fn later_ranges_lie_over_earlier_ones(
            puts in proptest::collection::vec((0u64..200, 1u64..60, prop::bool::ANY), 0..40),
        ) {
            let (mut index, mut bytes) = (UndoIndex::default(), vec![None; 300]);
            for (number, (start, len, zero)) in puts.into_iter().enumerate() {
                let place = if zero { Place::Zero } else { Place::File(number as u32, 1000) };
                index.put(start..start + len, place);
                for at in start..start + len {
                    bytes[at as usize] = Some(place.after(at - start));
                }
            }
            for (from, to) in [(0, 300), (17, 90), (50, 51), (120, 240)] {
                let mut found = vec![None; 300];
                for (range, place) in index.within(from..to) {
                    for at in range.clone() {
                        found[at as usize] = Some(place.after(at - range.start));
                    }
                }
                prop_assert_eq!(&found[from as usize..to as usize], &bytes[from as usize..to as usize]);
                let missing: Vec<u64> = index.missing(from..to).into_iter().flatten().collect();
                let expected: Vec<u64> = (from..to).filter(|at| bytes[*at as usize].is_none()).collect();
                prop_assert_eq!(missing, expected);
                let next = (from..300).find(|at| bytes[*at as usize].is_some());
                prop_assert_eq!(index.next(from).map(|range| range.start), next);
            }
        }
    }
}
