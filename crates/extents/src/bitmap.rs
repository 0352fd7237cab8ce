//! Bitmaps of two levels that many threads may set at once.
//!
//! # Why a bitmap and not a Bloom filter
//!
//! A filter for just as many blocks as were modified is smaller, but sends its error rate times the *whole* disk, must be asked for
//! every block of it, and has to know the number of blocks before: 2.5 GiB for nothing at 1 % of 256 GiB, and 1.3 s for each list
//! (`bench/RESULTS.md`, record). The bitmap takes 32 MiB for 1 TiB at most; pages in which nothing was noted take none.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::{Deref, Range};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::memory::{OutOfMemory, tries};
use crate::{DecodeError, Extents};

mod coding;

/// Words of leaves that one summary bit stands for: eight cache lines, small enough that a few scattered blocks cost few
/// reads, large enough that the summary of a 128 MiB bitmap (32 KiB) stays in the nearest cache.
pub(crate) const GROUP_WORDS: usize = 64;
/// Blocks that one summary bit stands for.
pub(crate) const GROUP_BLOCKS: u64 = 64 * GROUP_WORDS as u64;

/// One bit a block, and above it one summary bit for each group of 4096 blocks, so that what is clean is skipped.
///
/// The storage is a boxed slice, or anything that gives atomic words: a mapping of a file, for one. The leaves come first,
/// padded to whole groups, then the summary; the words are in the machine's byte order.
///
/// **Order.** A leaf is never set before its group's summary bit. So a set leaf can always be found through the summary:
///
/// - by other threads, whatever they see first: the leaf is set with release order after the summary bit, and a thread that finds
///   the leaf set already has read it with acquire order, so the summary bit is visible to it too, and to every thread that
///   sees what it does next;
/// - by the next process, when this one was killed between the two: memory shared with a file keeps both or the summary
///   bit alone, and a summary bit over clean leaves only costs a read.
///
/// Once [`Bitmap::set`] has returned, the bits are visible to every thread that sees anything the caller did afterwards: a
/// reader that waits for the writers, then reads the bitmap, sees all they marked. A power cut, which may
/// keep one page of a file and lose another, breaks the order: after it the words cannot be trusted.
pub struct Bitmap<S = Box<[AtomicU64]>> {
    storage: S,
    blocks: u64,
}

/// The storage given to [`Bitmap::over`] has the wrong size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a bitmap of {blocks} blocks needs {needed} words of storage, not {found}")]
pub struct StorageError {
    /// Blocks asked for.
    pub blocks: u64,
    /// Words of 64 bits that they need.
    pub needed: u64,
    /// Words given.
    pub found: u64,
}

impl Bitmap {
    /// A clean bitmap in fresh memory, of which only what is touched is ever allocated.
    ///
    /// Where the system refuses the address space, the program ends, as with every allocation.
    pub fn new(blocks: u64) -> Bitmap {
        let words = usize::try_from(Self::words(blocks)).unwrap_or(usize::MAX);
        let layout = Layout::array::<AtomicU64>(words).unwrap_or(Layout::new::<AtomicU64>());
        // SAFETY: the layout's size is not zero where this is called.
        let storage = zeroed(words, |layout| unsafe { alloc_zeroed(layout) });
        Bitmap { storage: storage.unwrap_or_else(|| handle_alloc_error(layout)), blocks }
    }

    /// A clean bitmap, or an error where [`Bitmap::new`] would end the program.
    ///
    /// # Errors
    /// If the system refuses the address space.
    pub fn try_new(blocks: u64) -> Result<Bitmap, OutOfMemory> {
        let words = Self::words(blocks);
        // SAFETY: the layout's size is not zero where this is called.
        let allocate = |layout| tries(|| unsafe { alloc_zeroed(layout) });
        let storage = zeroed(usize::try_from(words).unwrap_or(usize::MAX), allocate);
        Ok(Bitmap { storage: storage.ok_or(OutOfMemory { bytes: words.saturating_mul(8) })?, blocks })
    }
}

/// Allocates zero words by `allocate`; `None` if memory is refused.
fn zeroed(words: usize, allocate: impl FnOnce(Layout) -> *mut u8) -> Option<Box<[AtomicU64]>> {
    if words == 0 {
        return Some(Box::default());
    }
    let memory = allocate(Layout::array::<AtomicU64>(words).ok()?);
    if memory.is_null() {
        return None;
    }
    // SAFETY: allocated with the layout of such a slice, and zero bytes are valid words.
    Some(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory.cast(), words)) })
}

impl<S> Bitmap<S> {
    /// Words of 64 bits that a bitmap of this many blocks needs as storage.
    pub const fn words(blocks: u64) -> u64 {
        let groups = blocks.div_ceil(GROUP_BLOCKS);
        groups * GROUP_WORDS as u64 + groups.div_ceil(64)
    }

    /// How many of these words are leaves: the first. The rest is the summary.
    pub const fn leaf_words(blocks: u64) -> u64 {
        blocks.div_ceil(GROUP_BLOCKS) * GROUP_WORDS as u64
    }

    /// Blocks it has a bit for.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The storage, to flush it for example.
    pub fn storage(&self) -> &S {
        &self.storage
    }
}

impl<S: Deref<Target = [AtomicU64]>> Bitmap<S> {
    /// A bitmap over existing words, whose leaves and summary are trusted. Bits past the last block are cleared.
    pub fn over(storage: S, blocks: u64) -> Result<Self, StorageError> {
        let needed = Self::words(blocks);
        let found = storage.len() as u64;
        if needed != found {
            return Err(StorageError { blocks, needed, found });
        }
        let map = Bitmap { storage, blocks };
        // Searches need no end check if nothing is set behind it.
        map.clip_words(&map.leaves()[(blocks / 64) as usize..], blocks % 64);
        map.clip_words(&map.summary()[map.groups() / 64..], map.groups() as u64 % 64);
        Ok(map)
    }

    /// Clears all but the first `keep` (below 64) bits of `words`.
    fn clip_words(&self, words: &[AtomicU64], keep: u64) {
        let mut mask = !(u64::MAX << keep);
        for word in words {
            // Most are clean already, and a page of a mapping that is not written stays shared and clean.
            if word.load(Relaxed) & !mask != 0 {
                word.fetch_and(mask, Relaxed);
            }
            mask = 0;
        }
    }

    /// Sets the bits of a range, clipped to the number of blocks. True if any of them was clear, which of several racing
    /// callers exactly one gets for each block.
    ///
    /// Setting a bit that is set already costs a load, and writes nothing.
    pub fn set(&self, range: Range<u64>) -> bool {
        let mut fresh = false;
        for (word, mask) in self.span(range) {
            fresh |= self.set_word(word, mask);
        }
        fresh
    }

    fn set_word(&self, word: usize, mask: u64) -> bool {
        let leaf = &self.storage[word];
        // Acquire: its setter had set the summary before; see the type's documentation.
        if leaf.load(Acquire) & mask == mask {
            return false;
        }
        self.mark(word / GROUP_WORDS);
        leaf.fetch_or(mask, AcqRel) & mask != mask
    }

    /// Sets a group's summary bit.
    fn mark(&self, group: usize) {
        let (word, bit) = (&self.summary()[group / 64], 1 << (group % 64));
        // No order is needed to read it: later threads see this value of the same word or a later one.
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, AcqRel);
        }
    }

    /// Clears the bits of a range. Only while no other thread sets bits: the summary bit of a group that
    /// becomes clean is cleared.
    pub fn clear(&self, range: Range<u64>) {
        let range = range.start..range.end.min(self.blocks);
        let mut group = (range.start / GROUP_BLOCKS) as usize;
        while let Some(found) = self.next_group(group).filter(|&g| (g as u64 * GROUP_BLOCKS) < range.end) {
            let first = found as u64 * GROUP_BLOCKS;
            for (word, mask) in self.span(range.start.max(first)..range.end.min(first + GROUP_BLOCKS)) {
                self.clear_word(word, mask);
            }
            self.unmark_if_clean(found);
            group = found + 1;
        }
    }

    fn clear_word(&self, word: usize, mask: u64) {
        if self.storage[word].load(Relaxed) & mask != 0 {
            self.storage[word].fetch_and(!mask, AcqRel);
        }
    }

    /// Leaves first, then the summary: a crash in between must leave a valid state.
    fn unmark_if_clean(&self, group: usize) {
        if self.group(group).iter().all(|w| w.load(Relaxed) == 0) {
            self.summary()[group / 64].fetch_and(!(1 << (group % 64)), AcqRel);
        }
    }

    /// True if the block's bit is set; false past the end.
    pub fn get(&self, block: u64) -> bool {
        block < self.blocks && self.storage[(block / 64) as usize].load(Acquire) >> (block % 64) & 1 == 1
    }

    /// True if any bit of the range is set.
    pub fn any(&self, range: Range<u64>) -> bool {
        self.next_set(range.start, range.end).is_some()
    }

    /// True if all bits of the range are set; false if it reaches past the end, true if it is empty.
    pub fn all(&self, range: Range<u64>) -> bool {
        range.start >= range.end
            || (range.end <= self.blocks && self.next_clear(range.start, range.end) == range.end)
    }

    /// True if no bit is set.
    pub fn is_clean(&self) -> bool {
        !self.any(0..self.blocks)
    }

    /// Bits set.
    pub fn count(&self) -> u64 {
        let mut count = 0;
        let mut group = 0;
        while let Some(found) = self.next_group(group) {
            count += self.group(found).iter().map(|w| u64::from(w.load(Relaxed).count_ones())).sum::<u64>();
            group = found + 1;
        }
        count
    }

    /// The longest runs of set bits, ascending.
    pub fn runs(&self) -> Runs<'_, S> {
        self.runs_in(0..self.blocks)
    }

    /// The runs of set bits within a range, ascending, cut at its ends.
    pub fn runs_in(&self, range: Range<u64>) -> Runs<'_, S> {
        Runs { map: self, at: range.start, end: range.end.min(self.blocks) }
    }

    /// The set as ranges.
    pub fn extents(&self) -> Extents {
        self.runs().collect()
    }

    /// Sets every bit that `other` has set, up to this one's end.
    pub fn union_with<T: Deref<Target = [AtomicU64]>>(&self, other: &Bitmap<T>) {
        self.each_word_of(other, |word, bits| {
            self.set_word(word, bits);
        });
    }

    /// Clears every bit that `other` has set. Only while no other thread sets bits.
    pub fn subtract<T: Deref<Target = [AtomicU64]>>(&self, other: &Bitmap<T>) {
        let mut last = None;
        self.each_word_of(other, |word, bits| {
            self.clear_word(word, bits);
            let group = word / GROUP_WORDS;
            if let Some(done) = last.replace(group).filter(|&g| g != group) {
                self.unmark_if_clean(done);
            }
        });
        if let Some(group) = last {
            self.unmark_if_clean(group);
        }
    }

    /// Calls `f` for every word of `other` with bits set, cut to this bitmap's blocks.
    fn each_word_of<T: Deref<Target = [AtomicU64]>>(&self, other: &Bitmap<T>, mut f: impl FnMut(usize, u64)) {
        let (whole, rest) = ((self.blocks / 64) as usize, self.blocks % 64);
        let mut group = 0;
        while let Some(found) = other.next_group(group) {
            for (i, word) in other.group(found).iter().enumerate() {
                let (word, mut bits) = (found * GROUP_WORDS + i, word.load(Relaxed));
                if word >= whole {
                    bits &= if word == whole { !(u64::MAX << rest) } else { 0 };
                }
                if bits != 0 {
                    f(word, bits);
                }
            }
            group = found + 1;
        }
    }

    /// Appends a compact form: a few bytes per run, and never more than the leaves themselves plus one percent.
    pub fn encode(&self, out: &mut Vec<u8>) {
        coding::encode(self, out);
    }

    /// Sets every bit that an encoding has set. The encoding must be of a bitmap of as many blocks; after an error
    /// nothing is set. Allocates nothing.
    pub fn decode_into(&self, bytes: &[u8]) -> Result<(), DecodeError> {
        // Once to validate it, once to apply it.
        coding::decode(bytes, self.blocks, |_| {})?;
        coding::decode(bytes, self.blocks, |part| match part {
            coding::Item::Run(run) => {
                self.set(run);
            }
            coding::Item::Word(word, bits) => {
                self.set_word(word, bits);
            }
        })
    }

    fn groups(&self) -> usize {
        self.blocks.div_ceil(GROUP_BLOCKS) as usize
    }

    fn leaves(&self) -> &[AtomicU64] {
        &self.storage[..self.groups() * GROUP_WORDS]
    }

    fn summary(&self) -> &[AtomicU64] {
        &self.storage[self.groups() * GROUP_WORDS..]
    }

    pub(crate) fn group(&self, group: usize) -> &[AtomicU64] {
        &self.storage[group * GROUP_WORDS..(group + 1) * GROUP_WORDS]
    }

    /// The words of a range, each with the mask of its bits.
    fn span(&self, range: Range<u64>) -> impl Iterator<Item = (usize, u64)> + use<S> {
        let (start, end) = (range.start, range.end.min(self.blocks));
        let words = if start < end { start / 64..(end - 1) / 64 + 1 } else { 0..0 };
        words.map(move |word| {
            let mut mask = u64::MAX;
            if word == start / 64 {
                mask <<= start % 64;
            }
            if word == (end - 1) / 64 {
                mask &= u64::MAX >> (63 - (end - 1) % 64);
            }
            (word as usize, mask)
        })
    }

    /// The first group from `from` on whose summary bit is set.
    fn next_group(&self, from: usize) -> Option<usize> {
        let summary = self.summary();
        let mut mask = u64::MAX << (from % 64);
        for (i, word) in summary.iter().enumerate().skip(from / 64) {
            let bits = word.load(Acquire) & mask;
            if bits != 0 {
                return Some(i * 64 + bits.trailing_zeros() as usize);
            }
            mask = u64::MAX;
        }
        None
    }

    /// The first set bit in `from..end`.
    fn next_set(&self, from: u64, end: u64) -> Option<u64> {
        let end = end.min(self.blocks);
        if from >= end {
            return None;
        }
        // Searches need no ordering: they see what happened before they began, and may or may not see later changes.
        let mut word = (from / 64) as usize;
        let first = self.storage[word].load(Relaxed) & u64::MAX << (from % 64);
        let mut found = (first != 0).then_some((word, first));
        word += 1;
        while found.is_none() {
            if word % GROUP_WORDS == 0 {
                word = self.next_group(word / GROUP_WORDS)? * GROUP_WORDS;
            }
            if word as u64 * 64 >= end {
                return None;
            }
            let rest = (word + 1).next_multiple_of(GROUP_WORDS);
            found = first_set(&self.storage[word..rest]).map(|(i, bits)| (word + i, bits));
            word = rest;
        }
        found.map(|(word, bits)| word as u64 * 64 + u64::from(bits.trailing_zeros())).filter(|&b| b < end)
    }

    /// The first clear bit in `from..end`, else `end`; `from` is below `end`, and `end` within the blocks.
    fn next_clear(&self, from: u64, end: u64) -> u64 {
        let mut mask = u64::MAX << (from % 64);
        for word in (from / 64) as usize..=((end - 1) / 64) as usize {
            let clear = !self.storage[word].load(Relaxed) & mask;
            if clear != 0 {
                return end.min(word as u64 * 64 + u64::from(clear.trailing_zeros()));
            }
            mask = u64::MAX;
        }
        end
    }
}

/// The first word that is not zero, with its index. Eight at once: clean memory costs one branch per cache line.
fn first_set(words: &[AtomicU64]) -> Option<(usize, u64)> {
    for (i, line) in words.chunks(8).enumerate() {
        if line.iter().fold(0, |or, w| or | w.load(Relaxed)) != 0 {
            // Set bits stay set, so the second read finds what the first one saw.
            let found = line.iter().map(|w| w.load(Relaxed)).enumerate().find(|w| w.1 != 0);
            return found.map(|(j, bits)| (i * 8 + j, bits));
        }
    }
    None
}

/// Runs of set bits, ascending. Bits set meanwhile beyond the current place are included, those before it are not.
pub struct Runs<'a, S = Box<[AtomicU64]>> {
    map: &'a Bitmap<S>,
    at: u64,
    end: u64,
}

impl<S: Deref<Target = [AtomicU64]>> Iterator for Runs<'_, S> {
    type Item = Range<u64>;
    fn next(&mut self) -> Option<Range<u64>> {
        let start = self.map.next_set(self.at, self.end)?;
        // A bit that was seen set counts, even if another thread clears it against the rules.
        let end = self.map.next_clear(start, self.end).max(start + 1);
        self.at = end;
        Some(start..end)
    }
}

impl<S: Deref<Target = [AtomicU64]>> std::fmt::Debug for Bitmap<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bitmap({} of {} blocks)", self.count(), self.blocks)
    }
}

#[cfg(test)]
mod tests;
