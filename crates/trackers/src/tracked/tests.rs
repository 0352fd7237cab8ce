use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use device::{Clock, Dir, RamDisk};
use tempfile::TempDir;

use super::*;

const BLOCK: u64 = 4096;

fn member(temp: &TempDir) -> (Arc<RamDisk>, TrackedDisk, Arc<CowStore>) {
    let folder: Arc<dyn Folder> = Arc::new(Dir::open(temp.path()).unwrap());
    let ram = Arc::new(RamDisk::new(64 * BLOCK));
    let settings = TrackOptions {
        block_size: BLOCK as u32,
        region: TrackOptions::REGION,
        intents: true,
        allow_shrink: false,
        clock: Clock::system(),
    };
    let disk = TrackedDisk::open(ram.clone(), folder, settings, 0, true, false).unwrap();
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

/// The time is noted between the moment in which a write has entered and the one in which it looks who has changed the image.
#[test]
fn a_pulse_hides_no_other_writer() {
    let temp = TempDir::new().unwrap();
    let (_ram, disk, _view) = member(&temp);
    let (changed, pulses) = (Arc::new(AtomicU64::new(1)), disk.clone());
    let now = changed.clone();
    disk.watch(move || {
        pulses.pulse(0);
        Some(now.load(SeqCst))
    });
    assert!(disk.look(|| Some(1)).unwrap());
    write(&disk, &mut CurrentCache::default(), &[1; BLOCK as usize]);
    assert_eq!(disk.foreign(), None, "an own write");
    assert!(disk.look(|| Some(2)).unwrap());
    changed.store(3, SeqCst);
    write(&disk, &mut CurrentCache::default(), &[2; BLOCK as usize]);
    assert!(disk.foreign().is_some(), "another writer is missed");
}
