//! A disk that fails.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device::{Disk, Done, Queue, Request, RequestKind, ThreadQueue};

use super::{Keep, Member, Power, SECTOR, is_cut, lock, no_space};
use crate::Random;

/// Passes everything on to another disk while the [`Power`] is on, remembers what was not flushed, and fails where told.
pub struct FaultyDisk {
    power: Power,
    core: Arc<Core>,
}

struct Core {
    inner: Arc<dyn Disk>,
    durable: Mutex<Durable>,
    faults: Mutex<Faults>,
}

/// What a power cut may bring back.
struct Durable {
    /// The durable content of the sectors that were changed since.
    sectors: BTreeMap<u64, [u8; SECTOR as usize]>,
    /// The durable content of the sectors that a failed flush forgot: no later flush writes them.
    forgotten: BTreeMap<u64, [u8; SECTOR as usize]>,
    len: u64,
}

#[derive(Default)]
struct Faults {
    reads: Vec<(Range<u64>, i32)>,
    writes: Vec<(Range<u64>, i32)>,
    delay: Duration,
    /// Bytes that may still be written.
    room: Option<u64>,
    shuffle: Option<u64>,
}

impl FaultyDisk {
    /// Hangs `inner` on the switch. What it holds now counts as durable.
    pub fn new(power: &Power, inner: Arc<dyn Disk>) -> FaultyDisk {
        let durable =
            Mutex::new(Durable { sectors: BTreeMap::new(), forgotten: BTreeMap::new(), len: inner.len() });
        let core = Arc::new(Core { inner, durable, faults: Mutex::default() });
        power.join(Arc::clone(&core) as _);
        FaultyDisk { power: power.clone(), core }
    }

    /// Reads that touch the range (in bytes) fail with this error number.
    pub fn fail_reads(&self, range: Range<u64>, errno: i32) {
        lock(&self.core.faults).reads.push((range, errno));
    }

    /// Writes, zeroings and discards that touch the range (in bytes) fail with this error number and have no effect.
    pub fn fail_writes(&self, range: Range<u64>, errno: i32) {
        lock(&self.core.faults).writes.push((range, errno));
    }

    /// Each write, zeroing and discard takes effect only after this time. Queues made from now on keep as many on their way
    /// as their depth says, up to 16.
    pub fn delay(&self, time: Duration) {
        lock(&self.core.faults).delay = time;
    }

    /// After this many more bytes, writes fail with ENOSPC and have no effect.
    pub fn full_after(&self, bytes: u64) {
        lock(&self.core.faults).room = Some(bytes);
    }

    /// Queues created from now on return completions in random order.
    pub fn shuffle_completions(&self, seed: u64) {
        lock(&self.core.faults).shuffle = Some(seed);
    }

    /// Cancels all faults.
    pub fn heal(&self) {
        *lock(&self.core.faults) = Faults::default();
    }

    /// One change of a range, after its delay, unless a fault prevents it. `written` are the bytes that take
    /// space: none for a zeroing.
    fn change(
        &self,
        offset: u64,
        len: u64,
        written: u64,
        durable: bool,
        apply: impl FnOnce(&dyn Disk) -> io::Result<()>,
    ) -> io::Result<()> {
        let delay = lock(&self.core.faults).delay;
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let _step = self.power.step()?;
        {
            let mut faults = lock(&self.core.faults);
            fault(&faults.writes, offset, len)?;
            if let Some(room) = &mut faults.room {
                *room = room.checked_sub(written).ok_or_else(|| no_space(Path::new("faulty disk")))?;
            }
        }
        if !self.power.forgets() {
            apply(&*self.core.inner)?;
            return if durable { self.core.inner.flush() } else { Ok(()) };
        }
        let mut book = lock(&self.core.durable);
        if written > 0 {
            self.core.remember(&mut book, offset, len)?;
        } else {
            self.core.remember_data(&mut book, offset, len)?;
        }
        apply(&*self.core.inner)?;
        if durable {
            for sector in sectors(offset, len) {
                book.sectors.remove(&sector);
            }
        }
        Ok(())
    }

    /// A request, each of its pieces a step. Forced access makes those pieces durable and nothing else.
    fn run(&self, request: &mut Request) -> io::Result<()> {
        request.check()?;
        let mut at = 0;
        for piece in &request.pieces {
            let (offset, len) = (piece.offset, piece.len);
            match request.kind {
                RequestKind::Write { fua } => {
                    let data = &request.buf[at..at + len as usize];
                    self.change(offset, len, len, fua, |disk| disk.write_at(offset, data))?;
                    at += len as usize;
                }
                RequestKind::Zero { unmap, fast, fua } => {
                    self.change(offset, len, 0, fua, |disk| disk.zero(offset, len, unmap, fast))?;
                }
                RequestKind::Discard { fua } => {
                    self.change(offset, len, 0, fua, |disk| disk.discard(offset, len))?
                }
                RequestKind::Read | RequestKind::Flush => return request.run(self),
            }
        }
        if request.kind == RequestKind::Flush { self.flush() } else { Ok(()) }
    }
}

fn fault(faults: &[(Range<u64>, i32)], offset: u64, len: u64) -> io::Result<()> {
    match faults.iter().find(|(range, _)| range.start < offset.saturating_add(len) && offset < range.end) {
        Some((_, errno)) => Err(io::Error::from_raw_os_error(*errno)),
        None => Ok(()),
    }
}

/// The numbers of the sectors that a range touches.
fn sectors(offset: u64, len: u64) -> Range<u64> {
    if len == 0 {
        return 0..0;
    }
    offset / SECTOR..offset.saturating_add(len).div_ceil(SECTOR)
}

impl Core {
    /// Keeps the durable content of a range that is about to be written.
    fn remember(&self, book: &mut Durable, offset: u64, len: u64) -> io::Result<()> {
        let size = self.inner.len();
        for sector in sectors(offset, len) {
            let start = sector * SECTOR;
            if start >= size || book.sectors.contains_key(&sector) {
                continue;
            }
            if let Some(content) = book.forgotten.remove(&sector) {
                book.sectors.insert(sector, content);
                continue;
            }
            let mut content = [0; SECTOR as usize];
            self.inner.read_at(start, &mut content[..(size - start).min(SECTOR) as usize])?;
            book.sectors.insert(sector, content);
        }
        Ok(())
    }

    /// Keeps the durable data of a range about to be zeroed or cut off, where holes have nothing to lose: terabytes of them are quick.
    fn remember_data(&self, book: &mut Durable, offset: u64, len: u64) -> io::Result<()> {
        // What a failed flush forgot is written again, be it a hole by now.
        let mut again = book.forgotten.split_off(&sectors(offset, len).start);
        book.forgotten.append(&mut again.split_off(&sectors(offset, len).end));
        book.sectors.append(&mut again);
        let (mut from, end) = (offset, offset.saturating_add(len));
        while let Some(run) = self.inner.allocated(from)?.filter(|run| run.start < end) {
            let start = run.start.max(from);
            self.remember(book, start, run.end.min(end) - start)?;
            from = run.end;
        }
        Ok(())
    }
}

impl Member for Core {
    fn cut(&self) {}

    fn crash(&self, disks: Keep, _folders: Keep, dice: &mut Random) -> io::Result<()> {
        let mut book = lock(&self.durable);
        let lost = |dice: &mut Random| match disks {
            Keep::KeepAll => false,
            Keep::LoseUnsynced => true,
            Keep::Random => dice.coin(),
        };
        let cut_off = self.inner.len();
        if book.len != cut_off && lost(dice) {
            self.inner.resize(book.len)?;
        }
        let size = self.inner.len();
        let forgotten = std::mem::take(&mut book.forgotten);
        for (sector, content) in std::mem::take(&mut book.sectors).into_iter().chain(forgotten) {
            let offset = sector * SECTOR;
            // A length that comes back brings back what lay there.
            if (lost(dice) || offset >= cut_off) && offset < size {
                self.inner.write_at(offset, &content[..(size - offset).min(SECTOR) as usize])?;
            }
        }
        Ok(())
    }
}

impl Disk for FaultyDisk {
    fn len(&self) -> u64 {
        self.core.inner.len()
    }

    fn align(&self) -> u32 {
        self.core.inner.align()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let _look = self.power.look()?;
        fault(&lock(&self.core.faults).reads, offset, buf.len() as u64)?;
        self.core.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let len = buf.len() as u64;
        self.change(offset, len, len, false, |disk| disk.write_at(offset, buf))
    }

    fn write_through(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let len = buf.len() as u64;
        self.change(offset, len, len, true, |disk| disk.write_at(offset, buf))
    }

    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        self.change(offset, len, 0, false, |disk| disk.zero(offset, len, unmap, fast))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.change(offset, len, 0, false, |disk| disk.discard(offset, len))
    }

    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        let _look = self.power.look()?;
        self.core.inner.prefetch(offset, len)
    }

    fn flush(&self) -> io::Result<()> {
        let _step = self.power.step().inspect_err(|error| {
            if !is_cut(error) {
                let book = &mut *lock(&self.core.durable);
                book.forgotten.append(&mut book.sectors);
            }
        })?;
        self.power.count_sync();
        let mut book = lock(&self.core.durable);
        self.core.inner.flush()?;
        book.sectors.clear();
        book.len = self.core.inner.len();
        Ok(())
    }

    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let _look = self.power.look()?;
        self.core.inner.allocated(from)
    }

    fn resize(&self, len: u64) -> io::Result<()> {
        let _step = self.power.step()?;
        let before = self.len();
        if self.power.forgets() && len < before {
            let mut book = lock(&self.core.durable);
            self.core.remember_data(&mut book, len, before - len)?;
        }
        self.core.inner.resize(len)
    }

    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        let (delayed, shuffle) = {
            let faults = lock(&self.core.faults);
            (!faults.delay.is_zero(), faults.shuffle)
        };
        if delayed {
            return Ok(Box::new(ThreadQueue::new(Arc::new(move |request| self.run(request)), depth)?));
        }
        Ok(Box::new(FaultyQueue { disk: self, done: Vec::new(), shuffle: shuffle.map(Random::seeded) }))
    }
}

/// Does the work as it is submitted, so that the steps of a run are the same each time.
struct FaultyQueue {
    disk: Arc<FaultyDisk>,
    done: Vec<Done>,
    shuffle: Option<Random>,
}

impl Queue for FaultyQueue {
    fn submit(&mut self, mut request: Request) {
        let result = self.disk.run(&mut request);
        self.done.push(Done { request, result });
    }

    fn start(&mut self) {}

    fn complete(&mut self, _wait: bool) -> Option<Done> {
        if self.done.is_empty() {
            return None;
        }
        let index = self.shuffle.as_mut().map_or(0, |dice| dice.below(self.done.len() as u64));
        Some(self.done.remove(index as usize))
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Outage, is_cut};
    use super::*;
    use device::{Buf, Piece, RamDisk};

    fn disk(outage: Outage) -> (Power, Arc<FaultyDisk>, Arc<RamDisk>) {
        let (power, ram) = (Power::new(outage), Arc::new(RamDisk::from_bytes(&[1; 8192])));
        (power.clone(), Arc::new(FaultyDisk::new(&power, Arc::clone(&ram) as _)), ram)
    }

    fn bytes(ram: &RamDisk) -> Vec<u8> {
        let mut bytes = vec![0; ram.len() as usize];
        ram.read_at(0, &mut bytes).unwrap();
        bytes
    }

    fn write(offset: u64, byte: u8, len: usize, fua: bool) -> Request {
        let pieces = [Piece { offset, len: len as u64 }].into_iter().collect();
        Request {
            kind: RequestKind::Write { fua },
            pieces,
            buf: Buf::from(&vec![byte; len][..]),
            token: offset,
        }
    }

    #[test]
    fn the_step_that_is_cut_has_no_effect() {
        let (power, disk, ram) = disk(Outage::Kill);
        power.cut_at(3);
        disk.write_at(0, &[2; 100]).unwrap();
        disk.zero(200, 100, true, false).unwrap();
        let error = disk.write_at(300, &[3; 100]).unwrap_err();
        assert!(is_cut(&error) && power.is_cut());
        assert!(is_cut(&disk.read_at(0, &mut [0]).unwrap_err()));
        assert!(is_cut(&disk.flush().unwrap_err()));
        power.crash(Keep::LoseUnsynced, Keep::LoseUnsynced, 0).unwrap();
        let found = bytes(&ram);
        assert_eq!((found[0], found[150], found[250], found[300]), (2, 1, 0, 1));
    }

    #[test]
    fn what_was_not_flushed_is_lost_and_forced_access_saves_its_own() {
        let (power, disk, ram) = disk(Outage::PowerCut);
        disk.write_at(0, &[2; 512]).unwrap();
        disk.flush().unwrap();
        disk.write_at(0, &[3; 1024]).unwrap();
        disk.zero(2048, 512, true, false).unwrap();
        disk.resize(4096).unwrap();
        let mut queue = Arc::clone(&disk).queue(4).unwrap();
        queue.submit(write(1024, 4, 512, true));
        queue.complete(true).unwrap().result.unwrap();
        power.crash(Keep::LoseUnsynced, Keep::KeepAll, 0).unwrap();
        let found = bytes(&ram);
        assert_eq!(found.len(), 8192);
        assert!(found[..512].iter().all(|b| *b == 2));
        assert!(found[512..1024].iter().all(|b| *b == 1));
        assert!(found[1024..1536].iter().all(|b| *b == 4));
        assert!(found[1536..].iter().all(|b| *b == 1));
    }

    #[test]
    fn a_failed_flush_forgets_and_passes() {
        let (power, disk, ram) = disk(Outage::PowerCut);
        power.fail_at(3, 2, libc::EIO);
        disk.write_at(0, &[2; 1024]).unwrap();
        disk.write_at(2048, &[2; 512]).unwrap();
        assert_eq!(disk.flush().unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(disk.write_at(4096, &[9; 512]).unwrap_err().raw_os_error(), Some(libc::EIO));
        // Only what is written again is written back.
        disk.write_at(512, &[3; 512]).unwrap();
        disk.flush().unwrap();
        assert_eq!(bytes(&ram)[..1024], [[2; 512], [3; 512]].concat());
        power.crash(Keep::LoseUnsynced, Keep::LoseUnsynced, 0).unwrap();
        let found = bytes(&ram);
        assert_eq!(found[..1024], [[1; 512], [3; 512]].concat());
        assert_eq!((found[2048], found[4096]), (1, 1));
    }

    #[test]
    fn random_loss_is_by_sectors() {
        let (power, disk, ram) = disk(Outage::PowerCut);
        disk.write_at(100, &[2; 8000]).unwrap();
        power.crash(Keep::Random, Keep::KeepAll, 5).unwrap();
        let found = bytes(&ram);
        let kept = found.chunks(512).filter(|s| s[200] == 2).count();
        assert!((1..16).contains(&kept));
        assert!(found.chunks(512).skip(1).take(14).all(|s| s.iter().all(|b| *b == s[0])));
    }

    #[test]
    fn faults_come_where_they_were_ordered() {
        let (_power, disk, ram) = disk(Outage::Kill);
        disk.fail_reads(100..200, libc::EIO);
        disk.fail_writes(4096..8192, libc::EIO);
        disk.full_after(50);
        assert_eq!(disk.read_at(150, &mut [0]).unwrap_err().raw_os_error(), Some(libc::EIO));
        disk.read_at(200, &mut [0; 4000]).unwrap();
        assert_eq!(disk.zero(4000, 100, true, false).unwrap_err().raw_os_error(), Some(libc::EIO));
        let mut queue = Arc::clone(&disk).queue(4).unwrap();
        queue.submit(write(0, 9, 50, false));
        queue.submit(write(50, 9, 1, false));
        assert!(queue.complete(true).unwrap().result.is_ok());
        let full = queue.complete(true).unwrap().result.unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        assert_eq!(bytes(&ram)[..60], [[9; 50].as_slice(), &[1; 10]].concat());
        disk.heal();
        disk.write_at(4096, &[5; 100]).unwrap();
    }

    #[test]
    fn delayed_writes_land_late_and_together() {
        let (_power, disk, ram) = disk(Outage::Kill);
        disk.delay(Duration::from_millis(100));
        let mut queue = Arc::clone(&disk).queue(8).unwrap();
        let begin = std::time::Instant::now();
        (0..8).for_each(|n| queue.submit(write(n * 512, 7, 512, false)));
        assert!(queue.complete(false).is_none());
        assert_eq!(bytes(&ram)[0], 1);
        assert_eq!(std::iter::from_fn(|| queue.complete(true)).map(|d| d.result.unwrap()).count(), 8);
        let took = begin.elapsed().as_millis();
        assert!((100..600).contains(&took), "{took} ms");
        assert!(bytes(&ram)[..4096].iter().all(|b| *b == 7));
    }

    #[test]
    fn completions_come_in_any_order_when_shuffled() {
        let (_power, disk, _ram) = disk(Outage::Kill);
        disk.shuffle_completions(1);
        let mut queue = Arc::clone(&disk).queue(8).unwrap();
        (0..8).for_each(|n| queue.submit(write(n, 7, 1, false)));
        let order: Vec<u64> = std::iter::from_fn(|| queue.complete(false)).map(|d| d.request.token).collect();
        let mut sorted = order.clone();
        sorted.sort();
        assert_eq!(sorted, (0..8).collect::<Vec<_>>());
        assert_ne!(order, sorted);
    }
}
