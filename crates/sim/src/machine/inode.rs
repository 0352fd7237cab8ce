//! What a file or a device holds: now, and for certain.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

use device::Mapping;
use rustix::fs::MemfdFlags;
use testing::Random;
use twox_hash::XxHash3_128;

pub(crate) const EIO: i32 = 5;
pub(crate) const ENOSPC: i32 = 28;

/// The unit that a disk writes whole.
const SECTOR: usize = 512;
/// The unit in which the system remembers what it has to write back.
pub(crate) const PAGE: usize = 4096;

/// What names a content: its hash and its length.
pub type Content = (u128, u64);

/// Names a content.
pub fn content_of(bytes: &[u8]) -> Content {
    let pages = bytes.chunks(PAGE).enumerate().map(|(at, page)| page_sum(at, page));
    (pages.fold(0, u128::wrapping_add), bytes.len() as u64)
}

/// A page's part of a content's name: a sum of them need not be made again for each write.
fn page_sum(at: usize, page: &[u8]) -> u128 {
    XxHash3_128::oneshot_with_seed(at as u64, page)
}

/// The pages that a range touches.
fn pages(range: &Range<usize>) -> Range<usize> {
    if range.is_empty() { 0..0 } else { range.start / PAGE..range.end.div_ceil(PAGE) }
}

/// What a power cut loses of what was not flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Nothing.
    Nothing,
    /// All.
    All,
    /// Each sector as the dice fall.
    Some,
}

/// A file or a device.
pub(crate) struct Inode {
    pub is_device: bool,
    data: Vec<u8>,
    durable: Vec<u8>,
    /// For each page: which of its sectors were written since they were durable.
    dirty: Vec<u8>,
    /// For each page: what it adds to the content's name; `None` where it has changed.
    sums: Vec<Option<u128>>,
    /// Pages whose sync failed, as they were then: the system takes them for clean.
    forgotten: Vec<(usize, Vec<u8>)>,
    mapped: Option<(Mapping, u64)>,
    /// When it changed last, in nanoseconds since 1970.
    pub time: i64,
    durable_time: i64,
    /// When its content changed last.
    pub written: i64,
    /// Sectors written since it appeared: what a kernel counts of a device.
    pub counted: u64,
    /// For each page: whether it takes space.
    allocated: Vec<bool>,
    /// Bytes that cannot be read.
    pub bad: Vec<Range<usize>>,
}

impl Inode {
    pub(crate) fn new(len: u64, is_device: bool, time: i64) -> Inode {
        let data = vec![0; len as usize];
        Inode {
            is_device,
            durable: data.clone(),
            data,
            dirty: Vec::new(),
            sums: Vec::new(),
            forgotten: Vec::new(),
            mapped: None,
            time,
            written: time,
            durable_time: time,
            counted: 0,
            allocated: Vec::new(),
            bad: Vec::new(),
        }
    }

    /// What it holds, by name.
    pub(crate) fn name(&mut self) -> Content {
        let count = self.data.len().div_ceil(PAGE);
        self.sums.resize(count, None);
        let mut total = 0u128;
        for (at, page) in self.data.chunks(PAGE).enumerate() {
            total = total.wrapping_add(*self.sums[at].get_or_insert_with(|| page_sum(at, page)));
        }
        (total, self.data.len() as u64)
    }

    /// True if a page takes space.
    pub(crate) fn is_allocated(&self, page: usize) -> bool {
        self.allocated.get(page).copied().unwrap_or(false)
    }

    /// Says whether pages take space.
    pub(crate) fn allocate(&mut self, pages: Range<usize>, is: bool) {
        if self.allocated.len() < pages.end {
            self.allocated.resize(pages.end, false);
        }
        self.allocated[pages].fill(is);
    }

    pub(crate) fn len(&self) -> u64 {
        self.data.len() as u64
    }

    /// All of it as it is.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.data.clone();
        self.fetch(&mut bytes);
        bytes
    }

    /// Brings what lies in a mapping into `bytes`.
    fn fetch(&self, bytes: &mut [u8]) {
        if let Some((mapping, _)) = &self.mapped {
            for (to, word) in bytes.chunks_exact_mut(8).zip(mapping.iter()) {
                to.copy_from_slice(&word.load(SeqCst).to_ne_bytes());
            }
        }
    }

    /// The moment of the last change; a device has none.
    pub(crate) fn changed(&mut self, time: i64) {
        self.time = time;
    }

    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let start = offset as usize;
        let end = start.saturating_add(buf.len());
        if end > self.data.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if self.bad.iter().any(|bad| bad.start < end && start < bad.end) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        match &self.mapped {
            None => buf.copy_from_slice(&self.data[start..end]),
            Some(_) => buf.copy_from_slice(&self.bytes()[start..end]),
        }
        Ok(())
    }

    /// Bytes by which the file would grow, or a hole would be filled.
    pub(crate) fn grows(&self, offset: u64, len: usize) -> u64 {
        let pages = pages(&(offset as usize..offset as usize + len));
        pages.filter(|page| !self.is_allocated(*page)).count() as u64 * PAGE as u64
    }

    pub(crate) fn write(&mut self, offset: u64, buf: &[u8], time: i64) {
        let start = offset as usize;
        let end = start + buf.len();
        if end > self.data.len() {
            self.data.resize(end, 0);
        }
        self.data[start..end].copy_from_slice(buf);
        if let Some((mapping, _)) = &self.mapped {
            let words = start / 8..end.div_ceil(8).min(mapping.len());
            let mut bytes = vec![0; words.len() * 8];
            for (at, to) in words.clone().zip(bytes.chunks_exact_mut(8)) {
                to.copy_from_slice(&mapping[at].load(SeqCst).to_ne_bytes());
            }
            let from = start - words.start * 8;
            let len = buf.len().min(bytes.len() - from);
            bytes[from..from + len].copy_from_slice(&buf[..len]);
            for (at, from) in words.zip(bytes.chunks_exact(8)) {
                mapping[at].store(u64::from_ne_bytes(from.try_into().unwrap_or_default()), SeqCst);
            }
        }
        self.allocate(pages(&(start..end)), true);
        self.touch(start..end, time);
    }

    /// Takes space for a range, and changes nothing in it.
    pub(crate) fn reserve(&mut self, range: Range<usize>, time: i64) {
        self.allocate(pages(&range), true);
        (self.time, self.written) = (time, time);
    }

    fn touch(&mut self, range: Range<usize>, time: i64) {
        (self.time, self.written) = (time, time);
        self.counted += range.len().div_ceil(SECTOR) as u64;
        self.soil(range.start / SECTOR..range.end.div_ceil(SECTOR));
        for page in pages(&range) {
            if let Some(sum) = self.sums.get_mut(page) {
                *sum = None;
            }
        }
        self.forgotten.retain(|(page, _)| page * PAGE >= range.end || (page + 1) * PAGE <= range.start);
    }

    /// Sectors are to be written back.
    fn soil(&mut self, sectors: Range<usize>) {
        const EACH: usize = PAGE / SECTOR;
        if self.dirty.len() < sectors.end.div_ceil(EACH) {
            self.dirty.resize(sectors.end.div_ceil(EACH), 0);
        }
        for sector in sectors {
            self.dirty[sector / EACH] |= 1 << (sector % EACH);
        }
    }

    /// The sectors that are to be written back, which are taken for written back from now on.
    fn take_dirty(&mut self) -> Vec<usize> {
        let dirty = std::mem::take(&mut self.dirty).into_iter().enumerate().filter(|(_, mask)| *mask != 0);
        dirty
            .flat_map(|(page, mask)| {
                (0..PAGE / SECTOR)
                    .filter(move |at| mask & 1 << at != 0)
                    .map(move |at| page * PAGE / SECTOR + at)
            })
            .collect()
    }

    /// Bytes of space that it takes.
    pub(crate) fn space(&self) -> u64 {
        self.allocated.iter().filter(|is| **is).count() as u64 * PAGE as u64
    }

    /// Makes a range read as zeroes; whole pages are given back, if `unmap`.
    pub(crate) fn zero(&mut self, range: Range<usize>, unmap: bool, time: i64) {
        self.data[range.clone()].fill(0);
        if unmap {
            let whole = range.start.div_ceil(PAGE)..range.end / PAGE;
            if !whole.is_empty() {
                self.allocate(whole, false);
            }
        } else {
            self.allocate(pages(&range), true);
        }
        self.touch(range, time);
    }

    pub(crate) fn resize(&mut self, len: u64, time: i64) {
        let (before, len) = (self.data.len(), len as usize);
        self.data.resize(len, 0);
        self.allocated.truncate(len.div_ceil(PAGE));
        self.sums.truncate(len / PAGE);
        self.touch(before.min(len)..before.max(len), time);
    }

    /// Makes it durable: its times too, with `all`.
    pub(crate) fn sync(&mut self, all: bool) {
        if self.mapped.is_some() {
            self.gather();
        }
        let forgotten = self.still_forgotten();
        self.durable.resize(self.data.len(), 0);
        for sector in self.take_dirty() {
            let bytes = sector * SECTOR..((sector + 1) * SECTOR).min(self.data.len());
            if bytes.start >= bytes.end || forgotten.contains(&(sector * SECTOR / PAGE)) {
                continue;
            }
            self.durable[bytes.clone()].copy_from_slice(&self.data[bytes]);
        }
        if all {
            self.durable_time = self.time;
        }
    }

    /// A sync that fails: the system forgets what it could not write.
    pub(crate) fn sync_fails(&mut self) {
        if self.mapped.is_some() {
            self.gather();
        }
        let pages = self.dirty.iter().enumerate().filter(|(_, mask)| **mask != 0).map(|(page, _)| page);
        for page in pages.collect::<Vec<_>>() {
            self.forgotten.retain(|(other, _)| *other != page);
            let content = self.page(page).to_vec();
            self.forgotten.push((page, content));
        }
    }

    fn page(&self, page: usize) -> &[u8] {
        let len = self.data.len();
        &self.data[(page * PAGE).min(len)..((page + 1) * PAGE).min(len)]
    }

    /// Pages that were not changed since their sync failed.
    fn still_forgotten(&mut self) -> BTreeSet<usize> {
        let mut forgotten = std::mem::take(&mut self.forgotten);
        forgotten.retain(|(page, content)| self.page(*page) == content);
        let pages = forgotten.iter().map(|(page, _)| *page).collect();
        self.forgotten = forgotten;
        pages
    }

    /// Takes over what was stored to the mapping.
    fn gather(&mut self) {
        let bytes = self.bytes();
        let differ = bytes.chunks(SECTOR).zip(self.durable.chunks(SECTOR)).enumerate();
        let differ: Vec<usize> =
            differ.filter(|(_, (now, was))| now != was).map(|(sector, _)| sector).collect();
        differ.into_iter().for_each(|sector| self.soil(sector..sector + 1));
        (self.data, self.sums) = (bytes, Vec::new());
    }

    pub(crate) fn map(&mut self, len: u64, process: u64) -> io::Result<Mapping> {
        if let Some((mapping, owner)) = &self.mapped {
            if mapping.len() as u64 * 8 >= len && *owner == process {
                return Ok(mapping.clone());
            }
            self.unmap();
        }
        let file = std::fs::File::from(rustix::fs::memfd_create("sim", MemfdFlags::CLOEXEC)?);
        file.set_len(self.data.len() as u64)?;
        std::os::unix::fs::FileExt::write_all_at(&file, &self.data, 0)?;
        let mapping = Mapping::new(&file, len)?;
        self.mapped = Some((mapping.clone(), process));
        Ok(mapping)
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.is_some()
    }

    pub(crate) fn is_mapped_by(&self, process: u64) -> bool {
        self.mapped.as_ref().is_some_and(|(_, owner)| *owner == process)
    }

    /// The process has gone: what it stores from now on goes nowhere.
    pub(crate) fn unmap(&mut self) {
        if self.mapped.is_some() {
            self.gather();
            self.mapped = None;
        }
    }

    /// What a power cut leaves.
    pub(crate) fn crash(&mut self, loss: Loss, dice: &mut Random) {
        let forgotten = self.still_forgotten();
        let lost = |dice: &mut Random| match loss {
            Loss::Nothing => false,
            Loss::All => true,
            Loss::Some => dice.one_in(2),
        };
        let len = if self.durable.len() != self.data.len() && lost(dice) {
            self.durable.len()
        } else {
            self.data.len()
        };
        if loss != Loss::Nothing || !forgotten.is_empty() {
            self.durable.resize(self.durable.len().max(self.data.len()), 0);
            self.data.resize(self.durable.len(), 0);
            let all: Vec<usize> = match len == self.data.len() {
                true => self.take_dirty(),
                false => (0..self.data.len().div_ceil(SECTOR)).collect(),
            };
            for sector in all {
                let bytes = sector * SECTOR..((sector + 1) * SECTOR).min(self.data.len());
                let gone = forgotten.contains(&(sector * SECTOR / PAGE)) || lost(dice);
                if gone && bytes.start < bytes.end {
                    self.data[bytes.clone()].copy_from_slice(&self.durable[bytes]);
                }
            }
            if lost(dice) {
                self.time = self.durable_time;
                self.written = self.written.min(self.time);
            }
        }
        self.data.resize(len, 0);
        self.durable = self.data.clone();
        self.dirty.clear();
        self.forgotten.clear();
        self.durable_time = self.time;
        self.sums.clear();
        self.allocated = vec![true; self.data.len().div_ceil(PAGE)];
    }

    /// Becomes that, durably.
    pub(crate) fn put(&mut self, content: &[u8]) {
        self.data = content.to_vec();
        self.durable = content.to_vec();
        self.dirty.clear();
        self.sums.clear();
        self.allocated = vec![true; self.data.len().div_ceil(PAGE)];
    }
}
