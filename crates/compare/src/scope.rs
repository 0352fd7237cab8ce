//! What is compared, and how the destination reports it.

use std::io;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{DIGEST, Hash};

/// Bytes that are read and hashed in one step, and the most covered by one report with digests.
pub(crate) const CHUNK: u64 = 1 << 20;
/// The largest disk, in bytes.
const MOST: u64 = i64::MAX as u64;
/// The most ranges of one comparison.
const MOST_RANGES: usize = 1 << 16;

/// What is compared, and how. Both sides use the same scope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scope {
    /// Bytes of the source. A shorter disk reads as zeroes beyond its end.
    pub size: u64,
    /// Block size in bytes, a power of two from 512 to 1 MiB.
    pub block_size: u32,
    /// The hash of blocks.
    pub hash: Hash,
    /// The bytes to compare: whole blocks, ascending, not adjacent.
    pub ranges: Vec<Range<u64>>,
    /// Read at most this many bytes a second on each side; 16 KiB at least.
    pub rate: Option<u64>,
    /// Skip unreadable blocks.
    pub keep_going: bool,
}

impl Scope {
    /// The lowest rate allowed: a slower reader, which sleeps after every chunk, could not be stopped for minutes.
    pub const LEAST_RATE: u64 = 16 << 10;

    /// All of a disk.
    pub fn whole(size: u64, block_size: u32) -> Scope {
        Scope {
            size,
            block_size,
            hash: Hash::default(),
            ranges: Some(0..size).filter(|r| !r.is_empty()).into_iter().collect(),
            rate: None,
            keep_going: false,
        }
    }

    /// Restricts the scope to these bytes, widened to whole blocks.
    pub fn within(self, ranges: &[Range<u64>]) -> Scope {
        let block = u64::from(self.block_size);
        let mut wanted: Vec<Range<u64>> = ranges
            .iter()
            .map(|r| r.start / block * block..r.end.min(self.size).next_multiple_of(block).min(self.size))
            .filter(|r| !r.is_empty())
            .collect();
        wanted.sort_by_key(|r| r.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in wanted {
            match joined.last_mut() {
                Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        Scope { ranges: joined, ..self }
    }

    /// Bytes to compare.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|r| r.end - r.start).sum()
    }

    /// Refuses an invalid scope: it may come from a peer.
    ///
    /// # Errors
    /// `InvalidData`, with the reason.
    pub fn check(&self) -> io::Result<()> {
        let block = u64::from(self.block_size);
        let mut before = None;
        let mut sound = |r: &Range<u64>| {
            let apart = before.is_none_or(|end| r.start > end);
            before = Some(r.end);
            apart
                && r.start < r.end
                && r.end <= self.size
                && r.start % block == 0
                && (r.end % block == 0 || r.end == self.size)
        };
        let why = if !self.block_size.is_power_of_two() || !(512..=CHUNK).contains(&block) {
            "its block size is not a power of two from 512 bytes to 1 MiB"
        } else if self.size > MOST {
            "its disk size is out of range"
        } else if self.ranges.len() > MOST_RANGES || !self.ranges.iter().all(&mut sound) {
            "its ranges are too many, out of order, beyond the end, or not of whole blocks"
        } else if self.rate.is_some_and(|rate| rate < Scope::LEAST_RATE) {
            "its rate is below 16 KiB a second"
        } else {
            return Ok(());
        };
        Err(io::Error::new(io::ErrorKind::InvalidData, format!("invalid request to compare: {why}")))
    }
}

/// What the destination reports of a range of its disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DigestReport {
    /// Reads as zeroes.
    Zero(Range<u64>),
    /// The digests of its blocks follow, in order, in the body of the message.
    Digests(Range<u64>),
    /// Cannot be read.
    Unreadable(Range<u64>),
}

impl DigestReport {
    /// The range reported.
    pub fn range(&self) -> &Range<u64> {
        match self {
            DigestReport::Zero(range) | DigestReport::Digests(range) | DigestReport::Unreadable(range) => {
                range
            }
        }
    }
}

/// Checks that reports cover a scope in order and without a gap.
pub(crate) struct CoverageCheck<'a> {
    scope: &'a Scope,
    /// The range of the next report, and the offset where that report begins.
    index: usize,
    at: u64,
}

impl<'a> CoverageCheck<'a> {
    pub(crate) fn new(scope: &'a Scope) -> CoverageCheck<'a> {
        CoverageCheck { scope, index: 0, at: scope.ranges.first().map_or(0, |r| r.start) }
    }

    /// Where the next report begins; `None` if the scope is covered.
    pub(crate) fn due(&self) -> Option<u64> {
        (self.index < self.scope.ranges.len()).then_some(self.at)
    }

    /// Takes the next report, which came with `digests` bytes of digests.
    pub(crate) fn take(&mut self, report: &DigestReport, digests: usize) -> io::Result<()> {
        let range = report.range();
        let block = u64::from(self.scope.block_size);
        let sound = self.scope.ranges.get(self.index).is_some_and(|whole| {
            range.start == self.at
                && range.end > range.start
                && range.end <= whole.end
                && (range.end % block == 0 || range.end == whole.end)
        });
        let fits = sound
            && match report {
                DigestReport::Zero(_) | DigestReport::Unreadable(_) => digests == 0,
                DigestReport::Digests(r) => {
                    r.end - r.start <= CHUNK && digests == (r.end - r.start).div_ceil(block) as usize * DIGEST
                }
            };
        if !fits {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the digests of the peer are out of order at byte {}", self.at),
            ));
        }
        self.at = range.end;
        if self.scope.ranges.get(self.index).is_some_and(|whole| whole.end == self.at) {
            self.index += 1;
            self.at = self.scope.ranges.get(self.index).map_or(self.at, |r| r.start);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_widened_joined_and_cut() {
        let scope = Scope::whole(10_001, 4096);
        assert_eq!(scope.clone().within(&[5000..5001, 1..2, 9000..20_000]).ranges, scope.ranges);
        assert_eq!(scope.clone().within(&[9000..9001, 0..1, 20_000..30_000]).ranges, [0..4096, 8192..10_001]);
        assert_eq!(scope.bytes(), 10_001);
        assert!(Scope::whole(0, 4096).ranges.is_empty());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let good = Scope::whole(10_001, 4096);
        assert!(good.check().is_ok() && Scope::whole(0, 4096).check().is_ok());
        let ranges = |ranges: &[Range<u64>]| Scope { ranges: ranges.to_vec(), ..good.clone() };
        for bad in [
            Scope { block_size: 0, ..good.clone() },
            Scope { block_size: 5000, ..good.clone() },
            Scope { block_size: 1 << 31, ..good.clone() },
            Scope { size: u64::MAX, ..good.clone() },
            Scope { rate: Some(0), ..good.clone() },
            Scope { rate: Some(Scope::LEAST_RATE - 1), ..good.clone() },
            ranges(&[0..20_000]),
            ranges(&[1..4096]),
            ranges(&[0..4095]),
            ranges(&[4096..8192, 0..4096]),
            ranges(&[0..4096, 4096..8192]),
            ranges(&[0..0]),
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
