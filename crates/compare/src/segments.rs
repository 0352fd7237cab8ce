//! Cutting ranges of a disk into holes and chunks of data.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::Disk;

/// A hole or a chunk of allocated bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Segment {
    /// Reads as zeroes; of any length.
    Hole(Range<u64>),
    /// To be read; ends at the next multiple of a chunk, or at the end of its range.
    Data(Range<u64>),
}

/// The segments of some ranges, ascending. A hole that begins or ends in the middle of a chunk is read with its neighbours.
pub(crate) struct Segments {
    disk: Arc<dyn Disk>,
    ranges: std::vec::IntoIter<Range<u64>>,
    chunk: u64,
    /// What is left of the current range.
    left: Range<u64>,
    /// The allocated range last reported by the disk.
    data: Option<Range<u64>>,
}

impl Segments {
    pub(crate) fn new(disk: &Arc<dyn Disk>, ranges: Vec<Range<u64>>, chunk: u64) -> Segments {
        Segments { disk: disk.clone(), ranges: ranges.into_iter(), chunk, left: 0..0, data: None }
    }

    pub(crate) fn next(&mut self) -> io::Result<Option<Segment>> {
        while self.left.is_empty() {
            let Some(next) = self.ranges.next() else { return Ok(None) };
            self.left = next;
        }
        let Range { start, end } = self.left;
        if self.data.as_ref().is_none_or(|d| d.end <= start) {
            self.data = self.disk.allocated(start)?;
        }
        let hole = match &self.data {
            Some(data) if data.start < end => data.start.max(start) / self.chunk * self.chunk,
            _ => end,
        };
        self.left.start = if hole > start { hole } else { ((start / self.chunk + 1) * self.chunk).min(end) };
        let range = start..self.left.start;
        Ok(Some(if hole > start { Segment::Hole(range) } else { Segment::Data(range) }))
    }
}
