//! What is known of the destination: which blocks it has, and where.

use std::io;
use std::ops::Range;

use extents::Extents;

use super::sums::{CHUNK, SUMS, Shape, Summer, Sums, Told, UNREADABLE, ZERO, parts};
use super::weak::Likely;

/// Places that are looked at for one sum, at most: more than any honest set of sums needs.
const PROBES: usize = 64;
const EMPTY: u32 = u32::MAX;

/// The blocks of a destination by their sums. Equal blocks stand in it once, so that many of them cost no more than one.
///
/// 29 to 45 bytes a block: at most 6 MiB for each GiB in blocks of 8 KiB (a disk of 64 MiB), 360 KiB for each GiB of a disk
/// of 16 GiB or more.
pub struct Index {
    shape: Shape,
    pub(super) summer: Summer,
    /// By the block's number.
    sums: Vec<Sums>,
    /// What reads as zeroes, holes and blocks.
    zeroes: Extents,
    /// Where the account ends so far.
    heard: u64,
    /// Where the last block ends of which there are sums.
    summed: u64,
    /// Beyond this nothing may be copied from.
    movable: u64,
    table: Vec<u32>,
    pub(super) likely: Likely,
}

impl Index {
    /// An index for the destination's account; copies may be made from its first `movable` bytes.
    ///
    /// # Errors
    /// `InvalidData` for a shape that nobody needs.
    pub fn new(shape: Shape, movable: u64) -> io::Result<Index> {
        shape.check()?;
        let summer = Summer::new(&shape);
        Ok(Index {
            summer,
            shape,
            sums: Vec::new(),
            zeroes: Extents::new(),
            heard: 0,
            summed: 0,
            movable,
            table: Vec::new(),
            likely: Likely::new(0),
        })
    }

    /// Bytes a block.
    pub(super) fn block(&self) -> usize {
        self.shape.block as usize
    }

    /// Takes the next part of the account.
    ///
    /// # Errors
    /// `InvalidData` where it does not follow the one before, or is longer than agreed.
    pub fn hear(&mut self, said: &Told, told: &[u8]) -> io::Result<()> {
        let range = said.range().clone();
        let block = u64::from(self.shape.block);
        let sound = range.start == self.heard
            && range.end > range.start
            && range.end <= self.shape.size
            // Only the last block may be short; what follows does not exist.
            && (self.heard % block == 0 || *said == Told::Zero(self.heard..self.shape.size));
        let expected = match said {
            Told::Zero(_) => 0,
            Told::Sums(r) if r.end.saturating_sub(r.start) <= CHUNK => {
                (r.end - r.start).div_ceil(block) as usize * SUMS
            }
            Told::Sums(_) => usize::MAX,
        };
        if !sound || told.len() != expected || range.end.div_ceil(block) >= u64::from(EMPTY) {
            let text = format!("the sums of the peer are out of order at byte {}", self.heard);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        match said {
            Told::Zero(range) => self.zeroes.insert(range.clone()),
            Told::Sums(range) => {
                // Memory follows what was told, not what is said of zeroes.
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

    /// What can't be read at the destination, ascending.
    pub fn unreadable(&self) -> Vec<Range<u64>> {
        let bad = self.sums.iter().zip(0..).filter(|(sums, _)| **sums == UNREADABLE);
        bad.map(|(_, number)| self.extent(number)).collect()
    }

    /// Bytes of the destination of which was told.
    pub fn heard(&self) -> u64 {
        self.heard
    }

    /// True when all was told.
    pub fn is_whole(&self) -> bool {
        self.heard == self.shape.size
    }

    /// Makes the index searchable, once all was told.
    pub fn finish(&mut self) {
        let wanted = self.sums.len().saturating_mul(2).next_power_of_two().max(64);
        self.table = vec![EMPTY; wanted];
        self.likely = Likely::new(self.sums.len());
        // Sums of zeroes are looked for too, though no block is.
        self.likely.insert(0);
        self.zeroes.insert(self.heard..u64::MAX);
        for number in 0..self.sums.len() as u32 {
            let sums = self.sums[number as usize];
            if sums == ZERO
                || self.place(number).is_none_or(|r| r.end - r.start < u64::from(self.shape.block))
            {
                continue;
            }
            let (weak, _) = parts(&sums);
            let (free, known) = self.find(weak, |other| self.sums[other as usize] == sums);
            if let (Some(free), None) = (free, known) {
                self.table[free] = number;
                self.likely.insert(weak);
            }
        }
    }

    /// Where a search for a weak sum ends, and the block that was found on the way.
    fn find(&self, weak: u64, mut is: impl FnMut(u32) -> bool) -> (Option<usize>, Option<u32>) {
        let mask = self.table.len() - 1;
        // The lowest bits choose the bit of `likely`.
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

    /// The blocks with this weak sum, to be compared by their strong ones.
    pub(super) fn candidates(&self, weak: u64, out: &mut Vec<u32>) {
        out.clear();
        let short = Summer::short(weak);
        self.find(short, |number| {
            if parts(&self.sums[number as usize]).0 == short {
                out.push(number);
            }
            false
        });
    }

    /// True if a block has this weak sum.
    pub(super) fn has(&self, weak: u64) -> bool {
        let short = Summer::short(weak);
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
        let block = u64::from(self.shape.block);
        let start = number.saturating_mul(block).min(self.summed);
        start..start.saturating_add(block).min(self.summed)
    }

    /// The last block, if it is a short one that may be copied.
    pub(super) fn short(&self) -> Option<u32> {
        let last = u32::try_from(self.summed / u64::from(self.shape.block)).ok()?;
        let place = self.place(last)?;
        (place.end - place.start < u64::from(self.shape.block) && self.strong(last.into()).is_some())
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
