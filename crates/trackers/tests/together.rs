//! Several disks that are cut at one moment: no write is in a view without one that had been answered before it began.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use device::{Clock, Dir, Disk, Folder, RamDisk};
use tempfile::TempDir;
use testing::rounds;
use trackers::{CowStore, TrackOptions, TrackedDisk};

const BLOCK: u64 = 4096;
const SIZE: u64 = 64 * BLOCK;

/// A disk, and the folder of its records.
struct Member {
    _temp: TempDir,
    ram: Arc<RamDisk>,
    disk: TrackedDisk,
}

impl Member {
    fn new() -> Member {
        let temp = tempfile::tempdir().unwrap();
        let folder: Arc<dyn Folder> = Arc::new(Dir::open(temp.path()).unwrap());
        let ram = Arc::new(RamDisk::new(SIZE));
        let settings = TrackOptions {
            block_size: BLOCK as u32,
            region: TrackOptions::REGION,
            intents: true,
            allow_shrink: false,
            clock: Clock::system(),
        };
        let disk = TrackedDisk::open(ram.clone(), folder, settings, 0, true, false).unwrap();
        Member { _temp: temp, ram, disk }
    }

    fn view(&self) -> Arc<CowStore> {
        Arc::new(CowStore::create(self._temp.path(), SIZE, BLOCK as u32, 1 << 20).unwrap())
    }

    /// The number in a view.
    fn number(&self, view: &CowStore) -> u64 {
        let mut block = vec![0; BLOCK as usize];
        self.ram.read_at(0, &mut block).unwrap();
        view.mend(0, &mut block).unwrap();
        u64::from_le_bytes(block[..8].try_into().unwrap())
    }
}

/// Writes a number to the first, and when that was answered to the second, and again, while cuts are made. Returns how often the
/// second was ahead.
fn torn(rounds: u64, cut: impl Fn(&[Member; 2]) -> [Arc<CowStore>; 2]) -> u64 {
    let members = [Member::new(), Member::new()];
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (disks, stop, written) =
            (members.each_ref().map(|member| member.disk.clone()), stop.clone(), written.clone());
        std::thread::spawn(move || {
            let mut block = vec![0; BLOCK as usize];
            while !stop.load(SeqCst) {
                let number = written.load(SeqCst) + 1;
                block[..8].copy_from_slice(&number.to_le_bytes());
                disks.iter().for_each(|disk| disk.write_at(0, &block).unwrap());
                written.store(number, SeqCst);
            }
        })
    };
    let mut torn = 0;
    for _ in 0..rounds {
        let before = written.load(SeqCst);
        while written.load(SeqCst) < before + 3 {
            std::thread::yield_now();
        }
        let views = cut(&members);
        let [first, second] = [0, 1].map(|at: usize| members[at].number(&views[at]));
        torn += u64::from(second > first);
        // What was answered before the cut began is in it.
        assert!(second >= before, "{second} after {before}");
        for (member, view) in members.iter().zip(&views) {
            member.disk.drop_view(view);
            member.disk.release().unwrap();
        }
    }
    stop.store(true, SeqCst);
    writer.join().unwrap();
    torn
}

#[test]
fn disks_that_are_cut_together_keep_the_order_of_writes() {
    let together = |members: &[Member; 2]| {
        let views = members.each_ref().map(Member::view);
        let both = [0, 1].map(|at: usize| (&members[at].disk, views[at].clone()));
        let frozen = TrackedDisk::checkpoint_together(&both).unwrap();
        assert!(frozen.iter().all(|frozen| frozen.changes.count() == 1));
        views
    };
    assert_eq!(torn(rounds(120, 20_000), together), 0);
}

/// What the test above is worth: without the gates of all closed, it fails.
#[test]
fn disks_that_are_cut_one_by_one_do_not() {
    let one_by_one = |members: &[Member; 2]| {
        members.each_ref().map(|member| {
            let view = member.view();
            member.disk.checkpoint(Some(view.clone()), None).unwrap();
            std::thread::sleep(Duration::from_millis(1));
            view
        })
    };
    assert!(torn(20, one_by_one) > 0);
}
