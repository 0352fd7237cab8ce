//! A disk in memory. Only pages that were written cost memory, so it may claim any size.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::disk::{Disk, InlineQueue, Queue};
use crate::error::within;

const PAGE: u64 = 4096;
/// Pages that share a lock and an entry of the map: large transfers take few locks, small ones rarely meet.
const PAGES: u64 = 512;
const CHUNK: u64 = PAGE * PAGES;
const SHARDS: usize = 64;

type Page = Box<[u8]>;
type Chunk = Box<[Option<Page>]>;
type Shard = BTreeMap<u64, Chunk>;

/// A sparse disk in memory.
pub struct RamDisk {
    len: AtomicU64,
    shards: Box<[RwLock<Shard>]>,
}

impl RamDisk {
    /// A disk of `len` bytes that read as zeroes.
    pub fn new(len: u64) -> RamDisk {
        RamDisk { len: AtomicU64::new(len), shards: (0..SHARDS).map(|_| RwLock::default()).collect() }
    }

    /// A disk with that content.
    pub fn from_bytes(bytes: &[u8]) -> RamDisk {
        let disk = RamDisk::new(bytes.len() as u64);
        disk.write_chunks(0, bytes);
        disk
    }

    /// Bytes of memory that hold pages.
    pub fn used(&self) -> u64 {
        let pages = |shard: &RwLock<Shard>| -> u64 {
            read(shard).values().map(|chunk| chunk.iter().flatten().count() as u64).sum()
        };
        self.shards.iter().map(pages).sum::<u64>() * PAGE
    }

    fn shard(&self, chunk: u64) -> &RwLock<Shard> {
        &self.shards[(chunk % SHARDS as u64) as usize]
    }

    fn write_chunks(&self, offset: u64, buf: &[u8]) {
        let mut rest = buf;
        for (chunk, range) in split(offset, buf.len() as u64, CHUNK) {
            let (now, later) = rest.split_at((range.end - range.start) as usize);
            rest = later;
            let mut shard = write(self.shard(chunk));
            let pages = shard.entry(chunk).or_insert_with(|| (0..PAGES).map(|_| None).collect());
            let mut from = now;
            for (page, within) in split(range.start, now.len() as u64, PAGE) {
                let (bytes, later) = from.split_at((within.end - within.start) as usize);
                from = later;
                let page = pages[page as usize].get_or_insert_with(|| vec![0; PAGE as usize].into());
                page[within.start as usize..within.end as usize].copy_from_slice(bytes);
            }
        }
    }

    /// Zeroes a range; whole pages are freed if `unmap`. Holes stay holes.
    fn clear(&self, offset: u64, len: u64, unmap: bool) {
        let Some(end) = offset.checked_add(len).filter(|_| len > 0) else { return };
        let (first, last) = (offset / CHUNK, (end - 1) / CHUNK);
        // Visits the chunks that exist rather than those of the range: a range of terabytes costs what it holds.
        for shard in &self.shards {
            let mut shard = write(shard);
            let mut empty = Vec::new();
            for (&chunk, pages) in shard.range_mut(first..=last) {
                let base = chunk * CHUNK;
                let range = offset.max(base) - base..end.min(base + CHUNK) - base;
                for (page, within) in split(range.start, range.end - range.start, PAGE) {
                    let slot = &mut pages[page as usize];
                    if unmap && within == (0..PAGE) {
                        *slot = None;
                    } else if let Some(page) = slot {
                        page[within.start as usize..within.end as usize].fill(0);
                    }
                }
                if pages.iter().all(Option::is_none) {
                    empty.push(chunk);
                }
            }
            for chunk in empty {
                shard.remove(&chunk);
            }
        }
    }

    fn check(&self, doing: &'static str, offset: u64, len: u64) -> io::Result<()> {
        within(Path::new("RAM disk"), doing, offset, len, self.len())
    }

    /// The end of the run of pages that do or do not hold memory from page `page` on, within its chunk.
    fn run(pages: &[Option<Page>], page: u64, present: bool) -> u64 {
        let rest = &pages[page as usize..];
        page + rest.iter().take_while(|p| p.is_some() == present).count() as u64
    }
}

impl Disk for RamDisk {
    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check("read", offset, buf.len() as u64)?;
        let len = buf.len() as u64;
        let mut rest = buf;
        for (chunk, range) in split(offset, len, CHUNK) {
            let (now, later) = rest.split_at_mut((range.end - range.start) as usize);
            rest = later;
            let shard = read(self.shard(chunk));
            let Some(pages) = shard.get(&chunk) else {
                now.fill(0);
                continue;
            };
            let count = now.len() as u64;
            let mut to = now;
            for (page, within) in split(range.start, count, PAGE) {
                let (bytes, later) = to.split_at_mut((within.end - within.start) as usize);
                to = later;
                match &pages[page as usize] {
                    Some(page) => bytes.copy_from_slice(&page[within.start as usize..within.end as usize]),
                    None => bytes.fill(0),
                }
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check("write", offset, buf.len() as u64)?;
        self.write_chunks(offset, buf);
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64, unmap: bool, _fast: bool) -> io::Result<()> {
        self.check("zeroing", offset, len)?;
        self.clear(offset, len, unmap);
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check("discard", offset, len)?;
        self.clear(offset, len, true);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let len = self.len();
        let mut start = None;
        let mut at = from;
        while at < len {
            let (chunk, page) = (at / CHUNK, at % CHUNK / PAGE);
            let shard = read(self.shard(chunk));
            let Some(pages) = shard.get(&chunk) else {
                if let Some(start) = start {
                    return Ok(Some(start..at));
                }
                drop(shard);
                let next =
                    self.shards.iter().filter_map(|s| read(s).range(chunk + 1..).next().map(|e| *e.0)).min();
                let Some(next) = next else { return Ok(None) };
                at = next * CHUNK;
                continue;
            };
            let base = chunk * CHUNK;
            let page = if start.is_none() { Self::run(pages, page, false) } else { page };
            at = at.max(base + page * PAGE);
            if page == PAGES || at >= len {
                continue;
            }
            let first = *start.get_or_insert(at);
            let end = Self::run(pages, page, true);
            at = base + end * PAGE;
            if end < PAGES {
                return Ok(Some(first..at.min(len)));
            }
        }
        Ok(start.filter(|start| *start < len).map(|start| start..len))
    }

    fn resize(&self, len: u64) -> io::Result<()> {
        let before = self.len();
        self.len.store(len, Ordering::Release);
        if len < before {
            self.clear(len, before.next_multiple_of(CHUNK) - len, true);
        }
        Ok(())
    }

    fn queue(self: Arc<Self>, _depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(InlineQueue::new(self)))
    }
}

impl std::fmt::Debug for RamDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RamDisk({} bytes)", self.len())
    }
}

/// Cuts a range at multiples of `unit`: the unit's number, and the part of it that is meant.
fn split(offset: u64, len: u64, unit: u64) -> impl Iterator<Item = (u64, Range<u64>)> {
    let (mut at, end) = (offset, offset + len);
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (number, from) = (at / unit, at % unit);
        let count = (unit - from).min(end - at);
        at += count;
        Some((number, from..from + count))
    })
}

// A panic elsewhere leaves the pages whole: each change is a copy of bytes.
fn read(shard: &RwLock<Shard>) -> RwLockReadGuard<'_, Shard> {
    shard.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(shard: &RwLock<Shard>) -> RwLockWriteGuard<'_, Shard> {
    shard.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_cost_nothing_and_show() {
        let disk = RamDisk::new(64 << 40);
        assert_eq!(disk.allocated(0).unwrap(), None);
        disk.write_at(CHUNK * 1000 - 100, &[7; 200]).unwrap();
        disk.write_at((64 << 40) - 1, &[8]).unwrap();
        assert_eq!(disk.used(), 3 * PAGE);
        let edge = CHUNK * 1000;
        assert_eq!(disk.allocated(0).unwrap(), Some(edge - PAGE..edge + PAGE));
        assert_eq!(disk.allocated(edge).unwrap(), Some(edge..edge + PAGE));
        assert_eq!(disk.allocated(edge + PAGE).unwrap(), Some((64 << 40) - PAGE..64 << 40));
        disk.zero(0, 64 << 40, true, true).unwrap();
        assert_eq!(disk.used(), 0);
        assert_eq!(disk.allocated(0).unwrap(), None);
    }

    #[test]
    fn shrinking_forgets_and_growing_shows_zeroes() {
        let disk = RamDisk::from_bytes(&[5; 10_000]);
        disk.resize(5_000).unwrap();
        disk.resize(10_000).unwrap();
        let mut bytes = vec![1; 10_000];
        disk.read_at(0, &mut bytes).unwrap();
        assert!(bytes[..5_000].iter().all(|b| *b == 5) && bytes[5_000..].iter().all(|b| *b == 0));
        assert_eq!(disk.allocated(0).unwrap(), Some(0..8192));
        assert_eq!(disk.allocated(8192).unwrap(), None);
    }

    #[test]
    fn ends_are_refused() {
        let disk = RamDisk::new(100);
        assert_eq!(disk.read_at(90, &mut [0; 11]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(disk.write_at(u64::MAX, &[0; 11]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(disk.allocated(0).unwrap(), None);
    }
}
