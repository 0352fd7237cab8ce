//! Cutting a disk into what is worth reading.

use std::io;
use std::ops::Range;

use device::Disk;

/// A stretch of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stretch {
    /// Reads as zeroes; of any length.
    Hole(Range<u64>),
    /// To be read; ends at the next multiple of a chunk, or at the end.
    Data(Range<u64>),
}

/// The stretches of a disk, ascending. Holes count in whole chunks alone: what is less is read with its neighbours.
pub(super) struct Stretches<'a> {
    disk: &'a dyn Disk,
    at: u64,
    end: u64,
    chunk: u64,
    data: Option<Range<u64>>,
}

impl<'a> Stretches<'a> {
    /// Of the first `end` bytes of a disk, which has as many.
    pub(super) fn new(disk: &'a dyn Disk, end: u64, chunk: u64) -> Stretches<'a> {
        Stretches { disk, at: 0, end, chunk, data: None }
    }

    pub(super) fn next(&mut self) -> io::Result<Option<Stretch>> {
        let start = self.at;
        if start >= self.end {
            return Ok(None);
        }
        if self.data.as_ref().is_none_or(|d| d.end <= start) {
            self.data = self.disk.allocated(start)?;
        }
        let hole = match &self.data {
            Some(data) if data.start < self.end => data.start.max(start) / self.chunk * self.chunk,
            _ => self.end,
        };
        if hole > start {
            self.at = hole;
            return Ok(Some(Stretch::Hole(start..hole)));
        }
        self.at = ((start / self.chunk + 1) * self.chunk).min(self.end);
        Ok(Some(Stretch::Data(start..self.at)))
    }
}
