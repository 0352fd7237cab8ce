//! The dirty bitmap of one epoch, as a file that outlives the process.
//!
//! A record is never cleared: each epoch has a fresh file, and a frozen one is removed once its content is in the history.
//! The kernel may write mapped pages back whenever it likes, which is why clearing in place could lose a bit after a crash.
//!
//! Linux reports a failed write-back once and then treats the pages as clean: it does not write them again, and may drop
//! them from memory. So a record with one such failure is *damaged* for the rest of its life, and marked so in its file: it
//! never counts as durable again, and no intent is dropped because of it.

use std::io;
use std::ops::{Deref, Range};
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

use device::{Folder, Mapping, StateFile};
use extents::Bitmap;

/// Bytes before the bitmap.
const HEAD: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"dsyncrec");
/// The word of the head that is set once the file could not be written. After magic, number, size and block size.
const DAMAGED: usize = 4;

/// Words of a mapping.
pub(crate) struct Section {
    mapping: Mapping,
    words: Range<usize>,
}

impl Section {
    pub(crate) fn new(mapping: &Mapping, words: Range<usize>) -> Section {
        Section { mapping: mapping.clone(), words }
    }
}

impl Deref for Section {
    type Target = [AtomicU64];
    fn deref(&self) -> &[AtomicU64] {
        &self.mapping[self.words.clone()]
    }
}

/// A dirty bitmap in a file `record-N`, N being the number of the epoch that it will become.
pub struct BitmapFile {
    number: u64,
    size: u64,
    block_size: u32,
    file: Box<dyn StateFile>,
    head: Section,
    bits: Bitmap<Section>,
}

impl BitmapFile {
    /// The file's name for an epoch.
    fn name(number: u64) -> String {
        format!("record-{number}")
    }

    /// The numbers of the records in a folder, ascending.
    pub(crate) fn list(folder: &dyn Folder) -> io::Result<Vec<u64>> {
        let names = folder.list()?;
        let mut numbers: Vec<u64> =
            names.iter().filter_map(|n| n.strip_prefix("record-")?.parse().ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// A fresh record, its space reserved and its file durable, so that setting a bit never needs space.
    pub(crate) fn create(
        folder: &dyn Folder,
        number: u64,
        size: u64,
        block_size: u32,
    ) -> io::Result<BitmapFile> {
        let name = Self::name(number);
        folder.remove(&name)?;
        let file = folder.open(&name, true)?;
        let words = Bitmap::<Section>::words(size.div_ceil(u64::from(block_size)));
        file.reserve(HEAD + words * 8)?;
        let mut head = Vec::with_capacity(40);
        for word in [MAGIC, number, size, u64::from(block_size)] {
            head.extend_from_slice(&word.to_le_bytes());
        }
        file.write_at(0, &head)?;
        file.sync()?;
        folder.sync()?;
        Self::over(file, number, size, block_size)
    }

    /// Opens a record left by an earlier run. `None` if the file is incomplete: then it was never used.
    pub(crate) fn open(folder: &dyn Folder, number: u64) -> io::Result<Option<BitmapFile>> {
        let file = folder.open(&Self::name(number), false)?;
        let mut head = [0u8; 32];
        if file.len()? < HEAD {
            return Ok(None);
        }
        file.read_at(0, &mut head)?;
        let word = |i: usize| u64::from_le_bytes(head[i * 8..i * 8 + 8].try_into().unwrap_or_default());
        let (size, block_size) = (word(2), word(3));
        let sound = word(0) == MAGIC && word(1) == number;
        let block_size = match u32::try_from(block_size) {
            Ok(b) if sound && b.is_power_of_two() => b,
            _ => return Ok(None),
        };
        let words = Bitmap::<Section>::words(size.div_ceil(u64::from(block_size)));
        if file.len()? < HEAD + words * 8 {
            return Ok(None);
        }
        Self::over(file, number, size, block_size).map(Some)
    }

    fn over(file: Box<dyn StateFile>, number: u64, size: u64, block_size: u32) -> io::Result<BitmapFile> {
        let blocks = size.div_ceil(u64::from(block_size));
        let words = Bitmap::<Section>::words(blocks);
        let mapping = file.map(HEAD + words * 8)?;
        let first = (HEAD / 8) as usize;
        let bits = Bitmap::over(Section::new(&mapping, first..first + words as usize), blocks)
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        let head = Section::new(&mapping, 0..first);
        Ok(BitmapFile { number, size, block_size, file, head, bits })
    }

    /// Removes the file. Durable after the folder's sync.
    pub(crate) fn remove(folder: &dyn Folder, number: u64) -> io::Result<()> {
        folder.remove(&Self::name(number))
    }

    /// The number of the epoch that this record will become.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Size in bytes of the disk that it records.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Block size in bytes.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Marks the blocks that a byte range touches, and returns them.
    pub(crate) fn mark(&self, offset: u64, len: u64) -> Range<u64> {
        let shift = self.block_size.trailing_zeros();
        let end = if len > 0 { ((offset + len - 1) >> shift) + 1 } else { offset >> shift };
        let blocks = offset >> shift..end;
        self.bits.set(blocks.clone());
        blocks
    }

    /// Marks everything that another record has marked; its block size may differ, and its disk may be smaller.
    pub(crate) fn absorb(&self, other: &BitmapFile) {
        for run in other.bits.runs() {
            let start = run.start * u64::from(other.block_size);
            let end = (run.end * u64::from(other.block_size)).min(self.size);
            self.mark(start, end.saturating_sub(start));
        }
    }

    /// True if any block in the byte range is marked.
    pub fn any(&self, offset: u64, len: u64) -> bool {
        let shift = self.block_size.trailing_zeros();
        len > 0 && self.bits.any(offset >> shift..((offset + len - 1) >> shift) + 1)
    }

    /// Blocks marked.
    pub fn count(&self) -> u64 {
        self.bits.count()
    }

    /// The marked runs of blocks within a range of blocks, ascending.
    pub fn runs_in(&self, blocks: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.bits.runs_in(blocks)
    }

    /// A copy of what is marked, added to `into`, which must count the same blocks.
    pub fn add_to(&self, into: &Bitmap) {
        into.union_with(&self.bits);
    }

    /// True if nothing is marked.
    pub fn is_clean(&self) -> bool {
        self.bits.runs().next().is_none()
    }

    /// Makes the bits durable. Once it has failed, it always fails.
    pub(crate) fn sync(&self) -> io::Result<()> {
        if self.is_damaged() {
            return Err(io::Error::other(format!(
                "{} could not be written earlier",
                Self::name(self.number)
            )));
        }
        self.file.sync().inspect_err(|_| self.head[DAMAGED].store(1, SeqCst))
    }

    fn is_damaged(&self) -> bool {
        self.head[DAMAGED].load(SeqCst) != 0
    }

    /// True if no bit can have been lost so far: no page of the file failed to be written, be
    /// it by [`BitmapFile::sync`] or by the kernel on its own.
    pub(crate) fn is_sound(&self) -> bool {
        if !self.is_damaged() && self.file.failed().is_err() {
            self.head[DAMAGED].store(1, SeqCst);
        }
        !self.is_damaged()
    }
}

impl std::fmt::Debug for BitmapFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BitmapFile({} of {} bytes, blocks of {})", self.number, self.size, self.block_size)
    }
}

/// A word of shared memory that only grows; helper for stamps and counters kept in mappings.
pub(crate) fn raise(word: &AtomicU64, to: u64) {
    if word.load(Relaxed) < to {
        word.fetch_max(to, Relaxed);
    }
}
