//! The dirty bitmap of one epoch, as a file that outlives the process.
//!
//! A record is never cleared: each epoch has a fresh file, and a frozen one is removed once its content is in the history.
//! The kernel may write mapped pages back whenever it likes, which is why clearing in place could lose a bit after a crash.
//!
//! Linux reports a failed write-back once and then treats the pages as clean: it does not write them again, and may drop
//! them from memory. So a record with one such failure is *damaged* for the rest of its life, and marked so in its file: it
//! never counts as durable again, and no intent is dropped because of it.
//!
//! Where the file cannot be mapped ([`StateFile::map`]), the record is in memory, and [`BitmapFile::sync`] brings it to the file: a file
//! that *lags*. Of one that was left behind a kill tells no more than a power cut does: what was active is dirty.
//!
//! There only what the write-intent log needs durable is brought to the file. So a kill there is like a power cut: regions that were
//! active count as dirty as a whole.

use std::io;
use std::ops::{Deref, Range};
use std::sync::Mutex;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

use device::{Folder, Mapping, StateFile};
use extents::Bitmap;

/// Bytes before the bitmap.
const HEAD: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"dsyncrec");
/// The word of the head that is set once the file could not be written. After magic, number, size and block size.
const DAMAGED: usize = 4;
/// The word that is set in a file which lags.
const LAGS: usize = 5;
/// Words that are brought to the file at once.
const PAGE: usize = 512;

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
    mapping: Mapping,
    head: Section,
    bits: Bitmap<Section>,
    /// Of a file that lags.
    ahead: Option<Ahead>,
}

/// What a file lags behind.
struct Ahead {
    /// The pages of leaves with marks that it may not have.
    pages: Box<[AtomicBool]>,
    /// Held while they are brought there.
    turn: Mutex<()>,
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
        let record = Self::over(file, number, size, block_size)?;
        if record.mapping.is_copy() {
            record.head[LAGS].store(1, SeqCst);
            record.mapping.put(0..PAGE)?;
        }
        Ok(record)
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
        let leaves = Bitmap::<Section>::leaf_words(blocks);
        let pages = || (0..leaves.div_ceil(PAGE as u64)).map(|_| AtomicBool::new(false)).collect();
        let ahead = mapping.is_copy().then(|| Ahead { pages: pages(), turn: Mutex::new(()) });
        Ok(BitmapFile { number, size, block_size, file, mapping, head, bits, ahead })
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
        let fresh = self.bits.set(blocks.clone());
        // After the marks: who brings them to the file waits for their writer first, and clears this before it looks.
        if let Some(ahead) = self.ahead.as_ref().filter(|_| fresh) {
            let page = PAGE as u64 * 64;
            let touched = ahead.pages.iter().take(((blocks.end - 1) / page + 1) as usize);
            touched.skip((blocks.start / page) as usize).for_each(|page| page.store(true, SeqCst));
        }
        blocks
    }

    /// Brings what a file that lags does not have to it.
    fn catch_up(&self, ahead: &Ahead) -> io::Result<()> {
        let _turn = ahead.turn.lock().unwrap_or_else(|e| e.into_inner());
        let (first, leaves) =
            ((HEAD / 8) as usize, Bitmap::<Section>::leaf_words(self.bits.blocks()) as usize);
        let pages: Vec<usize> =
            (0..ahead.pages.len()).filter(|page| ahead.pages[*page].swap(false, SeqCst)).collect();
        if pages.is_empty() {
            return Ok(());
        }
        // The summary first: a leaf without it is never found.
        let put = self.mapping.put(first + leaves..self.mapping.len()).and_then(|()| {
            pages.iter().try_for_each(|page| {
                let leaf = page * PAGE;
                self.mapping.put(first + leaf..first + (leaf + PAGE).min(leaves))
            })
        });
        put.inspect_err(|_| pages.iter().for_each(|page| ahead.pages[*page].store(true, SeqCst)))
    }

    /// True if the file may have less than its process had when it died: all of that lies in what was active.
    pub(crate) fn lags(&self) -> bool {
        self.head[LAGS].load(SeqCst) != 0
    }

    /// Marks everything that another record has marked; its block size may differ, and its disk may be smaller.
    pub(crate) fn absorb(&self, other: &BitmapFile) {
        for run in other.bits.runs() {
            let start = run.start * u64::from(other.block_size);
            let end = (run.end * u64::from(other.block_size)).min(self.size);
            self.mark(start, end.saturating_sub(start));
        }
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
        self.ahead.as_ref().map_or(Ok(()), |ahead| self.catch_up(ahead))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    /// A folder whose files are copied to memory, as on a file system that copies on write.
    struct Copying(device::Dir);

    struct Copied(Box<dyn StateFile>, PathBuf);

    impl Folder for Copying {
        fn open(&self, name: &str, create: bool) -> io::Result<Box<dyn StateFile>> {
            Ok(Box::new(Copied(self.0.open(name, create)?, self.0.path().join(name))))
        }
        fn rename(&self, from: &str, to: &str) -> io::Result<()> {
            self.0.rename(from, to)
        }
        fn remove(&self, name: &str) -> io::Result<()> {
            self.0.remove(name)
        }
        fn sync(&self) -> io::Result<()> {
            self.0.sync()
        }
        fn list(&self) -> io::Result<Vec<String>> {
            self.0.list()
        }
        fn path(&self) -> &Path {
            self.0.path()
        }
    }

    impl StateFile for Copied {
        fn len(&self) -> io::Result<u64> {
            self.0.len()
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
            self.0.read_at(offset, buf)
        }
        fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
            self.0.write_at(offset, buf)
        }
        fn set_len(&self, len: u64) -> io::Result<()> {
            self.0.set_len(len)
        }
        fn reserve(&self, len: u64) -> io::Result<()> {
            self.0.reserve(len)
        }
        fn sync(&self) -> io::Result<()> {
            self.0.sync()
        }
        fn map(&self, len: u64) -> io::Result<Mapping> {
            Mapping::copy(&std::fs::File::options().read(true).write(true).open(&self.1)?, len)
        }
    }

    #[test]
    fn a_file_that_lags_has_all_that_was_marked_before_a_sync() {
        let temp = tempfile::tempdir().unwrap();
        let dir = device::Dir::open(temp.path()).unwrap();
        let (size, block) = (64 << 30, 4096u64);
        let marked = |record: &BitmapFile| record.runs_in(0..size / block).collect::<Vec<_>>();
        let record = BitmapFile::create(&Copying(dir.clone()), 3, size, block as u32).unwrap();
        assert!(record.lags());
        let last = size / block - 1;
        record.mark(7 * block, block);
        record.mark(5 << 30, 3 << 20);
        record.sync().unwrap();
        let durable = [7..8, (5 << 18)..(5 << 18) + 768];
        record.mark(last * block, block);
        record.mark(7 * block, 2 * block);
        // Another process finds what was synced, by a mapping as well as by a copy.
        let left: [&dyn Folder; 2] = [&dir, &Copying(dir.clone())];
        for folder in left {
            let left = BitmapFile::open(folder, 3).unwrap().unwrap();
            assert_eq!(marked(&left), durable);
            assert!(left.lags() && left.is_sound());
        }
        record.sync().unwrap();
        let all = [7..9, durable[1].clone(), last..last + 1];
        assert_eq!(marked(&BitmapFile::open(&dir, 3).unwrap().unwrap()), all);
        assert_eq!(marked(&record), all);
        assert!(!BitmapFile::create(&dir, 4, size, block as u32).unwrap().lags());
    }
}
