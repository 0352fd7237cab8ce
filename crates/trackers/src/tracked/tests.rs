use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use device::{Clock, Dir, RamDisk};
use tempfile::TempDir;

use super::*;

const BLOCK: u64 = 4096;

fn settings(clock: Clock) -> TrackOptions {
    let (block_size, region) = (BLOCK as u32, TrackOptions::REGION);
    TrackOptions { block_size, region, intents: true, allow_shrink: false, clock }
}

fn member(temp: &TempDir) -> (Arc<RamDisk>, TrackedDisk, Arc<CowStore>) {
    let folder: Arc<dyn Folder> = Arc::new(Dir::open(temp.path()).unwrap());
    let ram = Arc::new(RamDisk::new(64 * BLOCK));
    let disk = TrackedDisk::open(ram.clone(), folder, settings(Clock::system()), 0, true, false).unwrap();
    let view = Arc::new(CowStore::create(temp.path(), 64 * BLOCK, BLOCK as u32, 1 << 20).unwrap());
    (ram, disk, view)
}

/// The number of the last write that a view shows.
fn number(ram: &RamDisk, view: &CowStore) -> u64 {
    let mut block = vec![0; BLOCK as usize];
    ram.read_at(0, &mut block).unwrap();
    view.mend(0, &mut block).unwrap();
    u64::from_le_bytes(block[..8].try_into().unwrap())
}

/// A write as a client's queue makes it.
fn write(disk: &TrackedDisk, cache: &mut CurrentCache, block: &[u8]) {
    let side = disk.shared.begin(&[Piece { offset: 0, len: BLOCK }], cache).unwrap();
    disk.shared.disk.write_at(0, block).unwrap();
    disk.shared.end(side);
}

/// Between the swap of the first disk and that of the second the cut is held up, for as long as a writer takes for thousands of pairs.
/// Without the gates, the second is then far ahead.
#[test]
fn nothing_is_written_between_two_swaps() {
    let temps = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let members = temps.each_ref().map(member);
    let disks = members.each_ref().map(|(_, disk, _)| disk.clone());
    let [first, second] = &disks;
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut block = vec![0; BLOCK as usize];
            let mut caches = [(); 2].map(|()| CurrentCache::default());
            while !stop.load(SeqCst) {
                let number = written.load(SeqCst) + 1;
                block[..8].copy_from_slice(&number.to_le_bytes());
                disks.iter().zip(&mut caches).for_each(|(disk, cache)| write(disk, cache, &block));
                written.store(number, SeqCst);
            }
        });
        let wait = |done: &dyn Fn() -> bool| {
            let until = Instant::now() + Duration::from_secs(60);
            while !done() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        wait(&|| written.load(SeqCst) > 100);
        let version = first.shared.version.load(SeqCst);
        // Those who write need it only where something was replaced.
        let held = second.shared.current.read().unwrap();
        let cut = scope.spawn(|| {
            let both = members.each_ref().map(|(_, disk, view)| (disk, view.clone()));
            TrackedDisk::checkpoint_together(&both).map(drop)
        });
        wait(&|| first.shared.version.load(SeqCst) != version);
        std::thread::sleep(Duration::from_millis(50));
        drop(held);
        let done = cut.join();
        stop.store(true, SeqCst);
        done.unwrap().unwrap();
    });
    let [data, log] = members.each_ref().map(|(ram, _, view)| number(ram, view));
    assert!(data > 0 && log <= data, "torn: the first disk is at {data}, the second at {log}");
}

/// A disk with an image whose time of change is told by what a test says it is, and writes of the test's own.
struct Marked {
    disk: TrackedDisk,
    /// The image's time of change; 0 where it cannot be looked at.
    time: Arc<AtomicU64>,
    _temp: TempDir,
}

impl Marked {
    fn new(clock: Clock) -> Marked {
        let temp = TempDir::new().unwrap();
        let folder: Arc<dyn Folder> = Arc::new(Dir::open(temp.path()).unwrap());
        let ram = Arc::new(RamDisk::new(64 * BLOCK));
        let disk = TrackedDisk::open(ram, folder, settings(clock), 0, true, false).unwrap();
        Marked { disk, time: Arc::new(AtomicU64::new(1)), _temp: temp }
    }

    /// One that the first write after a rest looks at.
    fn watched(clock: Clock) -> Marked {
        let image = Marked::new(clock);
        let now = image.time.clone();
        image.disk.watch(move || Marked::mark(&now));
        image
    }

    fn mark(time: &AtomicU64) -> Option<WriteMark> {
        Some(time.load(SeqCst)).filter(|time| *time != 0).map(WriteMark::Changed)
    }

    fn look(&self) -> bool {
        self.disk.look(|| Self::mark(&self.time)).unwrap()
    }

    fn write(&self) {
        write(&self.disk, &mut CurrentCache::default(), &[2; BLOCK as usize]);
    }

    fn noticed(&self) {
        assert!(self.disk.foreign().is_some(), "another writer is missed");
    }
}

/// The time is noted between the moment in which a write has entered and the one in which it looks who has changed the image.
#[test]
fn a_pulse_hides_no_other_writer() {
    let image = Marked::new(Clock::system());
    let (pulses, now) = (image.disk.clone(), image.time.clone());
    image.disk.watch(move || {
        pulses.pulse(0);
        Marked::mark(&now)
    });
    assert!(image.look());
    image.write();
    assert_eq!(image.disk.foreign(), None, "an own write");
    image.time.store(2, SeqCst);
    assert!(image.look());
    assert_eq!(image.disk.foreign(), None, "an own write");
    image.time.store(3, SeqCst);
    image.write();
    image.noticed();
}

/// A write ends a rest while somebody looks.
#[test]
fn a_look_that_meets_a_write_hides_no_other_writer() {
    let image = Marked::watched(Clock::system());
    assert!(image.look());
    image.time.store(2, SeqCst);
    std::thread::scope(|scope| {
        let looked = image.disk.look(|| {
            scope.spawn(|| image.write());
            while !image.disk.shared.gate.is_busy() {
                std::thread::yield_now();
            }
            Marked::mark(&image.time)
        });
        looked.unwrap();
    });
    image.noticed();
}

/// A write has entered, which leaves again to log its intent; meanwhile the time is noted, and somebody looks.
#[test]
fn a_look_while_an_intent_is_logged_hides_no_other_writer() {
    let image = Marked::watched(Clock::system());
    assert!(image.look());
    image.time.store(2, SeqCst);
    let noted = image.disk.last_write();
    let side = image.disk.shared.gate.enter();
    image.disk.pulse(0);
    assert_eq!(image.disk.last_write(), noted, "what has not been admitted is no write");
    image.disk.shared.gate.leave(side);
    image.look();
    image.noticed();
}

/// The image cannot be looked at once: then nothing tells what others do meanwhile.
#[test]
fn an_image_that_cannot_be_looked_at_is_doubted() {
    for by_write in [false, true] {
        let image = Marked::watched(Clock::system());
        assert!(image.look());
        image.time.store(0, SeqCst);
        if by_write {
            image.write()
        } else {
            assert!(image.look())
        }
        image.time.store(3, SeqCst);
        image.look();
        image.noticed();
        // Once is enough.
        image.disk.foreign().into_iter().for_each(|times| image.disk.settle(times));
        image.look();
        image.write();
        assert_eq!(image.disk.foreign(), None);
    }
}

/// The clock is set back while nobody writes, and later others do.
#[test]
fn a_clock_that_is_set_back_hides_no_other_writer() {
    const SECOND: u64 = 1_000_000_000;
    let clock = Arc::new(AtomicU64::new(100_000 * SECOND));
    let ticks = clock.clone();
    let image = Marked::watched(Clock::exact(move || ticks.fetch_add(1, SeqCst)));
    let mut last = 0;
    let mut wait = |from: u64| {
        for second in from..from + 10 {
            clock.store(second * SECOND, SeqCst);
            last = image.disk.pulse(last).1;
            image.look();
        }
    };
    image.write();
    image.time.store(100_000 * SECOND, SeqCst);
    wait(100_002);
    wait(96_400);
    assert_eq!(image.disk.foreign(), None);
    image.time.store(96_410 * SECOND, SeqCst);
    wait(96_411);
    image.noticed();
}
