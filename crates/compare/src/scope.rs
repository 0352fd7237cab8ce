//! What is compared, and what one side says of it.

use std::io;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{DIGEST, Hash};

/// Bytes that are read and hashed in one step, and the most that one claim gives digests of.
pub(crate) const CHUNK: u64 = 1 << 20;
/// No disk is larger.
const MOST: u64 = i64::MAX as u64;
/// So many ranges in one comparison.
const MOST_RANGES: usize = 1 << 16;

/// What is compared, and how. Both sides work by the same scope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scope {
    /// Bytes of the source. What lies beyond the end of the other disk reads as zeroes.
    pub size: u64,
    /// Bytes of a block, a power of two from 512 to 1 MiB.
    pub block_size: u32,
    /// How blocks are digested.
    pub hash: Hash,
    /// The bytes to compare: whole blocks, ascending, apart from each other.
    pub ranges: Vec<Range<u64>>,
    /// Read at most this many bytes a second on each side; 16 KiB at least.
    pub rate: Option<u64>,
    /// Go on behind blocks that can't be read.
    pub keep_going: bool,
}

impl Scope {
    /// The least rate that may be asked for: a slower reader could not be stopped for minutes, as it sleeps after every chunk.
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

    /// The same, but these bytes alone, widened to whole blocks.
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

    /// Refuses a scope that makes no sense: it may come from the other side of a link.
    ///
    /// # Errors
    /// `InvalidData`, saying what is wrong.
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

/// What one side says of a stretch of its disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// It reads as zeroes.
    Zero(Range<u64>),
    /// Its blocks have these digests, one after the other; they come apart from this head.
    Digests(Range<u64>),
    /// It can't be read.
    Unreadable(Range<u64>),
}

impl Claim {
    /// The bytes that it speaks of.
    pub fn range(&self) -> &Range<u64> {
        match self {
            Claim::Zero(range) | Claim::Digests(range) | Claim::Unreadable(range) => range,
        }
    }
}

/// Checks that claims are a gapless account of a scope, in order.
pub(crate) struct Account<'a> {
    scope: &'a Scope,
    /// The range that the next claim belongs to, and where in it the next claim begins.
    index: usize,
    at: u64,
}

impl<'a> Account<'a> {
    pub(crate) fn new(scope: &'a Scope) -> Account<'a> {
        Account { scope, index: 0, at: scope.ranges.first().map_or(0, |r| r.start) }
    }

    /// Where the next claim begins; `None` if all is accounted for.
    pub(crate) fn due(&self) -> Option<u64> {
        (self.index < self.scope.ranges.len()).then_some(self.at)
    }

    /// Takes the next claim, which came with so many bytes of digests.
    pub(crate) fn take(&mut self, claim: &Claim, digests: usize) -> io::Result<()> {
        let range = claim.range();
        let block = u64::from(self.scope.block_size);
        let sound = self.scope.ranges.get(self.index).is_some_and(|whole| {
            range.start == self.at
                && range.end > range.start
                && range.end <= whole.end
                && (range.end % block == 0 || range.end == whole.end)
        });
        let fits = sound
            && match claim {
                Claim::Zero(_) | Claim::Unreadable(_) => digests == 0,
                Claim::Digests(r) => {
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
