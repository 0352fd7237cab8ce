//! The destination's blocks, by their sums.

use std::io;
use std::ops::Range;

use extents::Extents;

use super::sums::{CHUNK, Hasher, SUMS, SumParams, SumReport, Sums, UNREADABLE, ZERO, parts};
use super::weak::SumFilter;

/// The most slots probed for one sum: more than any set of sums that was not crafted needs.
const PROBES: usize = 64;
const EMPTY: u32 = u32::MAX;

/// The blocks of a destination by their sums. Equal blocks have one entry, so many of them cost no more than one.
///
/// It takes 29 to 45 bytes per block: at most 6 MiB per GiB in blocks of 8 KiB (a disk of 64 MiB), and 360 KiB per GiB of a
/// disk of 16 GiB or more.
pub struct BlockIndex {
    params: SumParams,
    pub(super) hasher: Hasher,
    /// By the block's number.
    sums: Vec<Sums>,
    /// What reads as zeroes, holes and blocks.
    zeroes: Extents,
    /// End of the reports so far.
    heard: u64,
    /// End of the last block that has sums.
    summed: u64,
    /// Nothing may be copied from beyond this offset.
    movable: u64,
    table: Vec<u32>,
    pub(super) filter: SumFilter,
}

impl BlockIndex {
    /// An empty index; copies may read the first `movable` bytes of the destination.
    ///
    /// # Errors
    /// `InvalidData` for parameters out of range.
    pub fn new(params: SumParams, movable: u64) -> io::Result<BlockIndex> {
        params.check()?;
        let hasher = Hasher::new(&params);
        Ok(BlockIndex {
            hasher,
            params,
            sums: Vec::new(),
            zeroes: Extents::new(),
            heard: 0,
            summed: 0,
            movable,
            table: Vec::new(),
            filter: SumFilter::new(0),
        })
    }

    /// Block size in bytes.
    pub(super) fn block(&self) -> usize {
        self.params.block as usize
    }

    /// Adds the next report.
    ///
    /// # Errors
    /// `InvalidData` where it does not follow the one before, or is longer than agreed.
    pub fn hear(&mut self, said: &SumReport, told: &[u8]) -> io::Result<()> {
        let range = said.range().clone();
        let block = u64::from(self.params.block);
        let sound = range.start == self.heard
            && range.end > range.start
            && range.end <= self.params.size
            // Only the last block may be short; nothing follows it.
            && (self.heard % block == 0 || *said == SumReport::Zero(self.heard..self.params.size));
        let expected = match said {
            SumReport::Zero(_) => 0,
            SumReport::Sums(r) if r.end.saturating_sub(r.start) <= CHUNK => {
                (r.end - r.start).div_ceil(block) as usize * SUMS
            }
            SumReport::Sums(_) => usize::MAX,
        };
        if !sound || told.len() != expected || range.end.div_ceil(block) >= u64::from(EMPTY) {
            let text = format!("the sums of the peer are out of order at byte {}", self.heard);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        match said {
            SumReport::Zero(range) => self.zeroes.insert(range.clone()),
            SumReport::Sums(range) => {
                // Memory grows with the sums received, not with the length claimed for zeroes.
                self.sums.resize((range.start / block) as usize, ZERO);
                for (sums, number) in told.chunks_exact(SUMS).zip(range.start / block..) {
                    let mut own = ZERO;
                    own.copy_from_slice(sums);
                    if own == ZERO {
                        self.zeroes.insert(number * block..((number + 1) * block).min(range.end));
                    }
                    self.sums.push(own);
                }
                self.summed = range.end;
            }
        }
        self.heard = range.end;
        Ok(())
    }

    /// The unreadable ranges of the destination, ascending.
    pub fn unreadable(&self) -> Vec<Range<u64>> {
        let bad = self.sums.iter().zip(0..).filter(|(sums, _)| **sums == UNREADABLE);
        bad.map(|(_, number)| self.extent(number)).collect()
    }

    /// Bytes of the destination reported so far.
    pub fn heard(&self) -> u64 {
        self.heard
    }

    /// True when the whole destination has been reported.
    pub fn is_whole(&self) -> bool {
        self.heard == self.params.size
    }

    /// Makes the index searchable, once it is complete.
    pub fn finish(&mut self) {
        let wanted = self.sums.len().saturating_mul(2).next_power_of_two().max(64);
        self.table = vec![EMPTY; wanted];
        self.filter = SumFilter::new(self.sums.len());
        // Zeroes have no entry, but their sum must pass the filter.
        self.filter.insert(0);
        self.zeroes.insert(self.heard..u64::MAX);
        for number in 0..self.sums.len() as u32 {
            let sums = self.sums[number as usize];
            if sums == ZERO
                || self.place(number).is_none_or(|r| r.end - r.start < u64::from(self.params.block))
            {
                continue;
            }
            let (weak, _) = parts(&sums);
            let (free, known) = self.find(weak, |other| self.sums[other as usize] == sums);
            if let (Some(free), None) = (free, known) {
                self.table[free] = number;
                self.filter.insert(weak);
            }
        }
    }

    /// The free slot where a search for a weak sum ends, or the block found.
    fn find(&self, weak: u64, mut is: impl FnMut(u32) -> bool) -> (Option<usize>, Option<u32>) {
        let mask = self.table.len() - 1;
        // The lowest bits choose the bit of `filter`.
        let start = (weak >> 12) as usize ^ weak as usize;
        for probe in 0..PROBES {
            let slot = (start + probe) & mask;
            match self.table[slot] {
                EMPTY => return (Some(slot), None),
                number if is(number) => return (None, Some(number)),
                _ => {}
            }
        }
        (None, None)
    }

    /// The blocks with this weak sum; their strong sums decide.
    pub(super) fn candidates(&self, weak: u64, out: &mut Vec<u32>) {
        out.clear();
        let short = Hasher::short(weak);
        self.find(short, |number| {
            if parts(&self.sums[number as usize]).0 == short {
                out.push(number);
            }
            false
        });
    }

    /// True if a block has this weak sum.
    pub(super) fn has(&self, weak: u64) -> bool {
        let short = Hasher::short(weak);
        self.find(short, |number| parts(&self.sums[number as usize]).0 == short).1.is_some()
    }

    /// The strong sum of a block that may be copied or left where it is; `None` if there is no such block.
    pub(super) fn strong(&self, number: u64) -> Option<&[u8]> {
        let sums = self.sums.get(usize::try_from(number).ok()?)?;
        (*sums != ZERO).then(|| parts(sums).1)
    }

    /// Where a block lies that may be copied.
    pub(super) fn place(&self, number: u32) -> Option<Range<u64>> {
        let place = self.extent(u64::from(number));
        (!place.is_empty() && place.end <= self.movable).then_some(place)
    }

    /// Where a block lies.
    pub(super) fn extent(&self, number: u64) -> Range<u64> {
        let block = u64::from(self.params.block);
        let start = number.saturating_mul(block).min(self.summed);
        start..start.saturating_add(block).min(self.summed)
    }

    /// The last block, if it is a short one that may be copied.
    pub(super) fn short(&self) -> Option<u32> {
        let last = u32::try_from(self.summed / u64::from(self.params.block)).ok()?;
        let place = self.place(last)?;
        (place.end - place.start < u64::from(self.params.block) && self.strong(last.into()).is_some())
            .then_some(last)
    }

    /// The parts of a range that do not read as zeroes at the destination.
    pub(super) fn not_zero(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut parts = Vec::new();
        let mut at = range.start;
        for zero in self.zeroes.clip(range.clone()).iter() {
            if at < zero.start {
                parts.push(at..zero.start);
            }
            at = zero.end;
        }
        if at < range.end {
            parts.push(at..range.end);
        }
        parts
    }
}
