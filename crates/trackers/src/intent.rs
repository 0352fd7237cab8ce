//! The write-intent log: which regions may differ from what the bits on disk say.
//!
//! The first write into an idle region makes the region *active*, durably, before the write goes on. After a power cut the
//! active regions are dirty as a whole, whatever bits reached the disk. A region falls idle again when nothing was written to it
//! for a while: no writes in flight, bits durable, then the intent dropped.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};

use device::{Folder, StateFile};

use crate::gate::Gate;

const NAME: &str = "intent";
const MAGIC: u64 = u64::from_le_bytes(*b"dsyncint");
/// Bytes before the bits, and the unit in which the bits are written.
const PAGE: usize = 4096;
/// Regions that a page of bits covers.
const PER_PAGE: u64 = PAGE as u64 * 8;

/// The log of one disk.
pub(crate) struct Intents {
    region: u64,
    /// For each region the tick of its last write; 0 when idle.
    used: Box<[AtomicU8]>,
    /// From 1 to 255, then 1 again. Regions are swept long before a tick repeats.
    tick: AtomicU8,
    /// Held by a sweep from beginning to end, so before `log`. No writer takes it.
    sweeping: Mutex<()>,
    /// Taken by writers that are inside the gate with other writes: never held while the gate is drained.
    log: Mutex<Log>,
    /// Times that a write had to wait for the log, for the status.
    waits: AtomicU64,
    enabled: bool,
}

struct Log {
    file: Box<dyn StateFile>,
    /// The active regions: those in the file, or more.
    active: BTreeSet<u64>,
}

impl Intents {
    /// A fresh log, every region idle.
    pub(crate) fn create(folder: &dyn Folder, size: u64, region: u64, enabled: bool) -> io::Result<Intents> {
        let regions = size.div_ceil(region);
        let pages = regions.div_ceil(PER_PAGE);
        let fresh = format!("{NAME}.new");
        folder.remove(&fresh)?;
        let file = folder.open(&fresh, true)?;
        file.reserve(PAGE as u64 * (1 + pages))?;
        let mut head = Vec::with_capacity(24);
        for word in [MAGIC, size, region] {
            head.extend_from_slice(&word.to_le_bytes());
        }
        file.write_at(0, &head)?;
        file.sync()?;
        folder.rename(&fresh, NAME)?;
        folder.sync()?;
        // Zeroed lazily by the system: regions without writes cost no memory.
        let used = (0..regions).map(|_| AtomicU8::new(0)).collect();
        Ok(Intents {
            region,
            used,
            tick: AtomicU8::new(1),
            sweeping: Mutex::new(()),
            log: Mutex::new(Log { file, active: BTreeSet::new() }),
            waits: AtomicU64::new(0),
            enabled,
        })
    }

    /// The byte ranges that a log from an earlier run has active; `None` if there is no valid log, in which case nothing
    /// that it should have covered can be trusted.
    pub(crate) fn left_active(folder: &dyn Folder) -> io::Result<Option<Vec<Range<u64>>>> {
        let file = match folder.open(NAME, false) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let len = file.len()?;
        let mut head = [0u8; 24];
        if len < PAGE as u64 {
            return Ok(None);
        }
        file.read_at(0, &mut head)?;
        let word = |i: usize| u64::from_le_bytes(head[i * 8..i * 8 + 8].try_into().unwrap_or_default());
        let (magic, size, region) = (word(0), word(1), word(2));
        if magic != MAGIC || region == 0 || len < PAGE as u64 * (1 + size.div_ceil(region).div_ceil(PER_PAGE))
        {
            return Ok(None);
        }
        let mut bits = vec![0u8; (len - PAGE as u64) as usize];
        file.read_at(PAGE as u64, &mut bits)?;
        let mut ranges = Vec::new();
        for (at, byte) in bits.iter().enumerate().filter(|(_, b)| **b != 0) {
            for bit in (0..8).filter(|bit| byte & (1 << bit) != 0) {
                let start = (at as u64 * 8 + bit) * region;
                if start < size {
                    ranges.push(start..(start + region).min(size));
                }
            }
        }
        Ok(Some(ranges))
    }

    fn regions(&self, offset: u64, len: u64) -> Range<u64> {
        offset / self.region..(offset + len - 1) / self.region + 1
    }

    /// Called inside the gate: true if every region of the range is active. They stay active until the gate is left.
    ///
    /// Touches by compare-exchange: a plain store could reactivate a region that the sweep has just marked idle.
    pub(crate) fn covers(&self, offset: u64, len: u64) -> bool {
        if !self.enabled || len == 0 {
            return true;
        }
        let tick = self.tick.load(SeqCst);
        self.regions(offset, len).all(|region| {
            let used = &self.used[region as usize];
            let mut seen = used.load(SeqCst);
            loop {
                if seen == 0 {
                    return false;
                }
                if seen == tick {
                    return true;
                }
                match used.compare_exchange_weak(seen, tick, SeqCst, SeqCst) {
                    Ok(_) => return true,
                    Err(now) => seen = now,
                }
            }
        })
    }

    /// Makes the regions of a range active, durably. Called outside the gate, before entering it again; other
    /// writes of the same thread may be inside all the while.
    pub(crate) fn activate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.waits.fetch_add(1, SeqCst);
        let mut log = self.log();
        let regions = self.regions(offset, len);
        let fresh: Vec<u64> = regions.clone().filter(|r| self.used[*r as usize].load(SeqCst) == 0).collect();
        if fresh.is_empty() {
            return Ok(());
        }
        log.active.extend(&fresh);
        log.write(&fresh)?;
        let tick = self.tick.load(SeqCst);
        for region in fresh {
            self.used[region as usize].store(tick, SeqCst);
        }
        Ok(())
    }

    /// Makes regions idle that were not written for `age` ticks, and begins the next tick. `sync` makes the bits of all
    /// unreleased records durable.
    ///
    /// Marking a region idle comes first: later writes find it idle, and activate it again. Writes already inside
    /// the gate are waited for, then the bits are made durable. Only then does the intent go, unless the region was
    /// activated meanwhile: what was written since may not be among the bits that were made durable.
    ///
    /// The log is free while the gate is drained, because a thread inside the gate may be waiting for the log: with one
    /// write on its way it begins another, in an idle region, and until that has begun it does not look for completions.
    /// Sweeps exclude each other, or one could drop an intent that was renewed and marked idle by the other.
    pub(crate) fn sweep(
        &self,
        age: u8,
        gate: &Gate,
        sync: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let _alone = self.sweeping.lock().unwrap_or_else(|e| e.into_inner());
        let idle = self.take_down(age);
        if idle.is_empty() {
            return Ok(());
        }
        gate.drain();
        sync()?;
        let mut log = self.log();
        // Only `activate` reactivates a region, with the log locked.
        let dropped: Vec<u64> =
            idle.into_iter().filter(|region| self.used[*region as usize].load(SeqCst) == 0).collect();
        if dropped.is_empty() {
            return Ok(());
        }
        for region in &dropped {
            log.active.remove(region);
        }
        log.write(&dropped)
    }

    /// Marks as idle what was not written for `age` ticks, and begins the next tick. The intents stay.
    fn take_down(&self, age: u8) -> Vec<u64> {
        let log = self.log();
        let now = self.tick.load(SeqCst);
        let mut idle = Vec::new();
        for region in &log.active {
            let used = &self.used[*region as usize];
            let seen = used.load(SeqCst);
            // The ticks 1..=255 form a ring.
            let old = if now >= seen { now - seen } else { now + (255 - seen) };
            if seen == 0 || (old >= age && used.compare_exchange(seen, 0, SeqCst, SeqCst).is_ok()) {
                idle.push(*region);
            }
        }
        self.tick.store(if now == 255 { 1 } else { now + 1 }, SeqCst);
        idle
    }

    /// The byte ranges active now, ascending: where bits may be set that are not durable.
    pub(crate) fn active_ranges(&self, size: u64) -> Vec<Range<u64>> {
        let log = self.log();
        log.active.iter().map(|r| r * self.region..((r + 1) * self.region).min(size)).collect()
    }

    /// Regions active now.
    pub(crate) fn active(&self) -> u64 {
        self.log().active.len() as u64
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Region size in bytes.
    pub(crate) fn region(&self) -> u64 {
        self.region
    }
}

impl Log {
    /// Writes the pages that hold the given regions, and makes them durable. A page torn by a power cut is harmless: each
    /// sector is old or new, and both cover what was allowed to be written so far.
    fn write(&self, changed: &[u64]) -> io::Result<()> {
        let mut page = u64::MAX;
        for region in changed {
            if region / PER_PAGE == page {
                continue;
            }
            page = region / PER_PAGE;
            let mut bits = vec![0u8; PAGE];
            for active in self.active.range(page * PER_PAGE..(page + 1) * PER_PAGE) {
                let at = active % PER_PAGE;
                bits[(at / 8) as usize] |= 1 << (at % 8);
            }
            self.file.write_at(PAGE as u64 * (1 + page), &bits)?;
        }
        self.file.sync()
    }
}
