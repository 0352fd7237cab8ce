//! What the embedded tracker promises, against a model of the disk.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device::{Buf, Dir, Disk, Folder, InlineQueue, Piece, Queue, RamDisk, Request, RequestKind, ThreadQueue};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use testing::faulty::{FaultyDisk, FaultyFolder, Keep, Outage, Power};
use testing::{Random, rounds};
use trackers::{CowStore, TrackOptions, TrackedDisk, WriteMark};

const BLOCK: u64 = 4096;

fn settings() -> TrackOptions {
    TrackOptions {
        block_size: BLOCK as u32,
        region: TrackOptions::REGION,
        intents: true,
        allow_shrink: false,
        clock: device::Clock::system(),
    }
}

fn open(disk: Arc<dyn Disk>, folder: &Arc<dyn Folder>, last_epoch: u64) -> TrackedDisk {
    TrackedDisk::open(disk, folder.clone(), settings(), last_epoch, true, false).unwrap()
}

fn scratch() -> (tempfile::TempDir, Arc<dyn Folder>) {
    let temp = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(Dir::open(temp.path()).unwrap());
    (temp, folder)
}

fn blocks(bitmap: &extents::Bitmap) -> Vec<u64> {
    bitmap.runs().flatten().collect()
}

fn content(disk: &dyn Disk) -> Vec<u8> {
    let mut all = vec![0; disk.len() as usize];
    disk.read_at(0, &mut all).unwrap();
    all
}

#[test]
fn every_way_to_change_a_disk_is_marked_and_nothing_else() {
    let (_temp, folder) = scratch();
    let ram: Arc<dyn Disk> = Arc::new(RamDisk::new(100 * BLOCK + 7));
    let disk = Arc::new(open(ram, &folder, 0));
    disk.write_at(5, &[1; 10]).unwrap();
    disk.write_at(3 * BLOCK - 1, &[2; 2]).unwrap();
    disk.zero(10 * BLOCK, 5 * BLOCK, true, false).unwrap();
    disk.discard(20 * BLOCK + 1, 3 * BLOCK).unwrap();
    disk.write_at(100 * BLOCK + 6, &[3]).unwrap();
    let mut queue: Box<dyn Queue> = disk.clone().queue(8).unwrap();
    for (kind, offset, len) in [
        (RequestKind::Write { fua: true }, 40 * BLOCK, 2 * BLOCK),
        (RequestKind::Zero { unmap: true, fast: false, fua: false }, 50 * BLOCK, BLOCK),
        (RequestKind::Discard { fua: false }, 60 * BLOCK, 2 * BLOCK),
        (RequestKind::Read, 70 * BLOCK, BLOCK),
        (RequestKind::Flush, 0, 0),
    ] {
        let data = matches!(kind, RequestKind::Write { .. } | RequestKind::Read);
        let buf = Buf::new(if data { len as usize } else { 0 });
        let pieces = if len > 0 { [Piece { offset, len }].into_iter().collect() } else { Default::default() };
        queue.submit(Request { kind, pieces, buf, token: offset + 1 });
        let done = queue.complete(true).unwrap();
        assert_eq!(done.request.token, offset + 1);
        done.result.unwrap();
    }
    let refused = disk.write_at(100 * BLOCK + 7, &[1]);
    assert!(refused.is_err(), "a write beyond the end");
    drop(queue);
    let frozen = disk.checkpoint(None, None).unwrap();
    let expected: Vec<u64> =
        [0..1, 2..4, 10..15, 20..24, 40..42, 50..51, 60..62, 100..101].into_iter().flatten().collect();
    assert_eq!(blocks(&frozen.changes), expected);
}

#[test]
fn a_record_outlives_its_process_until_it_is_released() {
    let (_temp, folder) = scratch();
    let ram: Arc<dyn Disk> = Arc::new(RamDisk::new(64 * BLOCK));
    let disk = open(ram.clone(), &folder, 0);
    disk.write_at(BLOCK, &[1; 8]).unwrap();
    // Killed: nothing is closed.
    drop(disk);
    let disk = open(ram.clone(), &folder, 0);
    disk.write_at(3 * BLOCK, &[1; 8]).unwrap();
    let frozen = disk.checkpoint(None, None).unwrap();
    assert_eq!(blocks(&frozen.changes), [1, 3]);
    disk.write_at(5 * BLOCK, &[1; 8]).unwrap();
    // Killed between the checkpoint and its release: the epoch is widened, nothing is lost.
    drop(disk);
    let disk = open(ram.clone(), &folder, 0);
    let again = disk.checkpoint(None, None).unwrap();
    assert_eq!(blocks(&again.changes), [1, 3, 5]);
    // Asked again before the release, it is there again.
    disk.write_at(7 * BLOCK, &[1; 8]).unwrap();
    let again = disk.checkpoint(None, None).unwrap();
    assert_eq!(blocks(&again.changes), [1, 3, 5, 7]);
    disk.release().unwrap();
    disk.write_at(9 * BLOCK, &[1; 8]).unwrap();
    drop(disk);
    let disk = open(ram, &folder, again.number);
    assert_eq!(blocks(&disk.checkpoint(None, None).unwrap().changes), [9]);
}

#[test]
fn a_power_cut_makes_the_active_regions_dirty_and_no_others() {
    let (_temp, folder) = scratch();
    let size = 4 * TrackOptions::REGION;
    let ram: Arc<dyn Disk> = Arc::new(RamDisk::new(size));
    let disk = open(ram.clone(), &folder, 0);
    disk.write_at(0, &[1; 8]).unwrap();
    disk.sweep(0).unwrap();
    disk.sweep(0).unwrap();
    assert_eq!(disk.active_regions().0, 0, "swept");
    disk.write_at(2 * TrackOptions::REGION + 1, &[1; 8]).unwrap();
    assert_eq!(disk.active_regions().0, 1);
    drop(disk);
    let disk = TrackedDisk::open(ram, folder, settings(), 0, true, true).unwrap();
    let per_region = TrackOptions::REGION / BLOCK;
    let changes = disk.checkpoint(None, None).unwrap().changes;
    let runs: Vec<Range<u64>> = changes.runs().collect();
    assert_eq!(runs, [0..1, 2 * per_region..3 * per_region]);
}

/// What an opening takes over from earlier records is durable before these go: another power cut right after it loses nothing.
#[test]
fn what_an_opening_took_over_outlives_the_next_power_cut() {
    let temp = tempfile::tempdir().unwrap();
    let ram: Arc<dyn Disk> = Arc::new(RamDisk::new(4 * TrackOptions::REGION));
    let lose_power = |power: &Power| power.crash(Keep::KeepAll, Keep::LoseUnsynced, 0).unwrap();
    for life in 0..3 {
        let power = Power::new(Outage::PowerCut);
        let folder: Arc<dyn Folder> = Arc::new(FaultyFolder::new(&power, temp.path()).unwrap());
        let disk = TrackedDisk::open(ram.clone(), folder, settings(), 0, true, life > 0).unwrap();
        if life == 0 {
            disk.write_at(5 * BLOCK, &[1; 8]).unwrap();
            disk.sweep(0).unwrap();
        }
        assert_eq!((blocks(&disk.dirty().unwrap()), disk.active_regions().0), (vec![5], 0), "in life {life}");
        drop(disk);
        lose_power(&power);
    }
}

/// The first write after a rest looks before it leaves a note of its own, which would hide that others have written.
#[test]
fn a_foreign_write_before_the_first_own_one_is_counted() {
    for others in [false, true] {
        let (_temp, folder) = scratch();
        let changed = Arc::new(AtomicU64::new(7));
        let disk = open(Arc::new(RamDisk::new(1 << 20)), &folder, 0);
        let (seen, written) = (changed.clone(), changed.clone());
        disk.watch(move || Some(WriteMark::Changed(seen.load(SeqCst))));
        disk.write_at(0, &[1; 8]).unwrap();
        disk.look(|| Some(WriteMark::Changed(changed.load(SeqCst)))).unwrap();
        if others {
            written.store(8, SeqCst);
        }
        disk.write_at(BLOCK, &[1; 8]).unwrap();
        // Own writes move it as well.
        written.store(9, SeqCst);
        disk.look(|| Some(WriteMark::Changed(changed.load(SeqCst)))).unwrap();
        assert_eq!(disk.foreign().is_some(), others);
    }
}

/// What others write next may bear the time that the image bears already: then a look has not told anything yet.
#[test]
fn a_look_tells_once_the_time_that_it_sees_is_past() {
    const SECOND: u64 = 1_000_000_000;
    let (_temp, folder) = scratch();
    let disk = open(Arc::new(RamDisk::new(1 << 20)), &folder, 0);
    let now = || device::Clock::system().now();
    let whole = || now() / SECOND * SECOND;
    let past = (whole() / SECOND / 2 * 2 - 3) * SECOND;
    for (changed, tells) in [(whole(), false), (now(), false), (past, true), (now() - SECOND - 1, true)] {
        assert_eq!(disk.look(|| Some(WriteMark::Changed(changed))).unwrap(), tells, "{changed} at {}", now());
    }
    // A foreign write is told at once.
    disk.look(|| Some(WriteMark::Changed(past))).unwrap();
    let before = disk.foreign();
    assert!(!disk.look(|| Some(WriteMark::Changed(whole()))).unwrap());
    assert!(disk.foreign() > before);
}

#[test]
fn growth_is_marked_and_shrinking_refused() {
    let (_temp, folder) = scratch();
    drop(open(Arc::new(RamDisk::new(10 * BLOCK)), &folder, 0));
    let grown = open(Arc::new(RamDisk::new(13 * BLOCK)), &folder, 0);
    assert_eq!(blocks(&grown.checkpoint(None, None).unwrap().changes), [10, 11, 12]);
    drop(grown);
    let shrunk: Arc<dyn Disk> = Arc::new(RamDisk::new(5 * BLOCK));
    let refused = TrackedDisk::open(shrunk.clone(), folder.clone(), settings(), 0, true, false);
    assert!(refused.is_err());
    let meant = TrackOptions { allow_shrink: true, ..settings() };
    assert!(TrackedDisk::open(shrunk, folder, meant, 0, true, false).is_ok());
}

/// The lost-update race: writes that are in flight at the checkpoint and land 400 ms later. A copy taken after each
/// checkpoint, of the blocks reported and no others, must end up equal to the disk.
#[test]
fn no_update_is_lost_to_writes_that_land_late() {
    let (_temp, folder) = scratch();
    let count = 512u64;
    let ram = Arc::new(RamDisk::new(count * BLOCK));
    // The data lands long after the write was let in.
    let slow = FaultyDisk::new(&Power::new(Outage::Kill), ram.clone());
    slow.delay(Duration::from_millis(400));
    let disk = Arc::new(open(Arc::new(slow), &folder, 0));
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..8u64)
        .map(|w| {
            let (disk, stop) = (disk.clone(), stop.clone());
            std::thread::spawn(move || {
                let mut random = Random::seeded(w);
                while !stop.load(SeqCst) {
                    let block = random.below(count);
                    disk.write_at(block * BLOCK, &[random.below(255) as u8 + 1; BLOCK as usize]).unwrap();
                }
            })
        })
        .collect();
    let mut copy = vec![0u8; (count * BLOCK) as usize];
    let mut sync = |disk: &TrackedDisk| {
        let frozen = disk.checkpoint(None, None).unwrap();
        for block in frozen.changes.runs().flatten() {
            let at = (block * BLOCK) as usize;
            ram.read_at(block * BLOCK, &mut copy[at..at + BLOCK as usize]).unwrap();
        }
        disk.release().unwrap();
    };
    for _ in 0..6 {
        std::thread::sleep(Duration::from_millis(130));
        sync(&disk);
    }
    stop.store(true, SeqCst);
    writers.into_iter().for_each(|w| w.join().unwrap());
    sync(&disk);
    let now = content(&*ram);
    let lost = (0..count as usize)
        .filter(|b| copy[b * 4096..(b + 1) * 4096] != now[b * 4096..(b + 1) * 4096])
        .count();
    assert_eq!(lost, 0, "{lost} of {count} blocks lost");
}

/// Writers on several queues, checkpoints with views under them: each view must show the disk as it was, byte for byte,
/// however it is read, and the epochs together must name every block that changed.
#[test]
fn views_show_one_moment_and_epochs_name_every_change() {
    let seconds = rounds(4, 60);
    let mut random = Random::new("views_show_one_moment");
    let (temp, folder) = scratch();
    let count = 2048u64;
    let ram = Arc::new(RamDisk::new(count * BLOCK - 100));
    let disk = Arc::new(open(ram.clone(), &folder, 0));
    let stop = Arc::new(AtomicBool::new(false));
    // Writers stop between requests while the truth is looked at: a view is compared with a copy made in that pause.
    let pause = Arc::new(std::sync::RwLock::new(()));
    let writes = Arc::new(AtomicU64::new(0));
    let writers: Vec<_> = (0..4u64)
        .map(|_| {
            let (disk, stop, pause, writes) = (disk.clone(), stop.clone(), pause.clone(), writes.clone());
            let mut random = random.fork();
            std::thread::spawn(move || {
                let len = disk.len();
                let mut queue = disk.queue(4).unwrap();
                while !stop.load(SeqCst) {
                    let _going = pause.read().unwrap();
                    let offset = random.below(len);
                    let most = (len - offset).min(5 * BLOCK);
                    let bytes = 1 + random.below(most);
                    let kind = match random.below(8) {
                        0 => RequestKind::Zero { unmap: true, fast: false, fua: false },
                        1 => RequestKind::Discard { fua: false },
                        _ => RequestKind::Write { fua: false },
                    };
                    let mut buf =
                        Buf::new(if matches!(kind, RequestKind::Write { .. }) { bytes as usize } else { 0 });
                    buf.fill(random.below(256) as u8);
                    queue.submit(Request {
                        kind,
                        pieces: [Piece { offset, len: bytes }].into_iter().collect(),
                        buf,
                        token: 0,
                    });
                    queue.complete(true).unwrap().result.unwrap();
                    writes.fetch_add(1, SeqCst);
                }
            })
        })
        .collect();
    let began = std::time::Instant::now();
    let mut replica = content(&*ram);
    let mut views = 0;
    let open_views: Mutex<Vec<(Arc<CowStore>, Vec<u8>)>> = Mutex::default();
    let check = |saved: &Arc<CowStore>, truth: &[u8], random: &mut Random| {
        let mut offset = 0u64;
        while offset < truth.len() as u64 {
            let len = (1 + random.below(70_000)).min(truth.len() as u64 - offset);
            let mut part = vec![0; len as usize];
            ram.read_at(offset, &mut part).unwrap();
            saved.mend(offset, &mut part).unwrap();
            let expected = &truth[offset as usize..(offset + len) as usize];
            if let Some(at) = part.iter().zip(expected).position(|(a, b)| a != b) {
                panic!("the view differs at byte {}", offset + at as u64);
            }
            offset += len;
        }
    };
    // The first checkpoint only sets the stage.
    disk.checkpoint(None, None).unwrap();
    disk.release().unwrap();
    {
        let _still = pause.write().unwrap();
        let frozen = disk.checkpoint(None, None).unwrap();
        disk.release().unwrap();
        drop(frozen);
        replica.copy_from_slice(&content(&*ram));
    }
    while began.elapsed() < Duration::from_secs(seconds) {
        let saved = Arc::new(CowStore::create(temp.path(), disk.len(), BLOCK as u32, 1 << 30).unwrap());
        let (frozen, truth) = {
            let _still = pause.write().unwrap();
            let frozen = disk.checkpoint(Some(saved.clone()), None).unwrap();
            (frozen, content(&*ram))
        };
        disk.release().unwrap();
        views += 1;
        std::thread::sleep(Duration::from_millis(random.below(20)));
        for run in frozen.changes.runs() {
            let bytes = run.start * BLOCK..(run.end * BLOCK).min(disk.len());
            let part = &mut replica[bytes.start as usize..bytes.end as usize];
            ram.read_at(bytes.start, part).unwrap();
            saved.mend(bytes.start, part).unwrap();
        }
        assert!(replica == truth, "the blocks of the epoch, read from its view, make the replica equal");
        let mut open = open_views.lock().unwrap();
        open.push((saved, truth));
        if open.len() > 2 {
            let (saved, truth) = open.remove(random.below(3) as usize);
            check(&saved, &truth, &mut random);
            disk.drop_view(&saved);
        }
    }
    stop.store(true, SeqCst);
    writers.into_iter().for_each(|w| w.join().unwrap());
    for (saved, truth) in open_views.lock().unwrap().drain(..) {
        check(&saved, &truth, &mut random);
    }
    println!("{views} views under {} writes", writes.load(SeqCst));
    assert!(views > 5 && writes.load(SeqCst) > 100);
}

/// Now and then nothing was written between two looks: then a view needs no new record. Writers that come in meanwhile are
/// neither missed nor seen.
#[test]
fn a_view_of_an_unchanged_disk_misses_no_writer() {
    let seconds = rounds(3, 60);
    let mut random = Random::new("a_view_of_an_unchanged_disk");
    let (temp, folder) = scratch();
    let count = 64u64;
    let ram = Arc::new(RamDisk::new(count * BLOCK));
    let disk = open(ram.clone(), &folder, 0);
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..2)
        .map(|_| {
            let (disk, stop) = (disk.clone(), stop.clone());
            let mut random = random.fork();
            std::thread::spawn(move || {
                while !stop.load(SeqCst) {
                    let offset = random.below(count * BLOCK - 100);
                    disk.write_at(offset, &[random.below(256) as u8; 100]).unwrap();
                    std::thread::sleep(Duration::from_micros(random.below(3) * random.below(400)));
                }
            })
        })
        .collect();
    let new_view = || Arc::new(CowStore::create(temp.path(), disk.len(), BLOCK as u32, 1 << 30).unwrap());
    let shown = |saved: &CowStore| {
        let mut all = content(&*ram);
        saved.mend(0, &mut all).unwrap();
        all
    };
    let mut replica = content(&*ram);
    let (mut unchanged, mut changed) = (0, 0);
    let began = std::time::Instant::now();
    // A busy machine takes longer to come by enough of both.
    let enough = |unchanged, changed| unchanged > 20 && changed > 20;
    while began.elapsed() < Duration::from_secs(seconds)
        || !enough(unchanged, changed) && began.elapsed() < Duration::from_secs(60)
    {
        let saved = new_view();
        if disk.view_of_unchanged(Some(&saved)) {
            unchanged += 1;
            std::thread::sleep(Duration::from_micros(random.below(300)));
            assert!(shown(&saved) == replica, "a view of what did not change shows something else");
            disk.drop_view(&saved);
            continue;
        }
        changed += 1;
        assert!(disk.views().is_empty());
        if random.below(2) == 0 {
            disk.prepare().unwrap();
        }
        let saved = new_view();
        let frozen = disk.checkpoint(Some(saved.clone()), None).unwrap();
        disk.release().unwrap();
        let now = shown(&saved);
        for block in blocks(&frozen.changes) {
            let bytes = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
            replica[bytes.clone()].copy_from_slice(&now[bytes]);
        }
        assert!(now == replica, "a change was missed");
        disk.drop_view(&saved);
    }
    stop.store(true, SeqCst);
    writers.into_iter().for_each(|w| w.join().unwrap());
    println!("{unchanged} views without and {changed} with a new record");
    assert!(enough(unchanged, changed));
}

/// The record made ahead is only a record: a crash leaves it, a stop takes it away.
#[test]
fn a_spare_record_is_used_by_the_next_checkpoint_and_taken_away_at_the_end() {
    let (temp, folder) = scratch();
    let ram: Arc<dyn Disk> = Arc::new(RamDisk::new(64 * BLOCK));
    let records = || {
        let names = std::fs::read_dir(temp.path()).unwrap();
        names.filter(|n| n.as_ref().unwrap().file_name().to_string_lossy().starts_with("record-")).count()
    };
    let disk = open(ram.clone(), &folder, 0);
    disk.prepare().unwrap();
    disk.prepare().unwrap();
    assert_eq!(records(), 2);
    disk.write_at(BLOCK, &[1; 8]).unwrap();
    drop(disk);
    let disk = open(ram.clone(), &folder, 0);
    assert_eq!(records(), 1);
    disk.prepare().unwrap();
    let frozen = disk.checkpoint(None, None).unwrap();
    assert_eq!((blocks(&frozen.changes), records()), (vec![1], 2));
    disk.release().unwrap();
    disk.write_at(2 * BLOCK, &[1; 8]).unwrap();
    disk.prepare().unwrap();
    disk.close().unwrap();
    assert_eq!(records(), 1);
    let disk = open(ram, &folder, frozen.number);
    assert_eq!(blocks(&disk.checkpoint(None, None).unwrap().changes), [2]);
}

/// The disk may be larger than the largest file: what is kept has its own places.
#[test]
fn a_view_of_a_huge_disk_keeps_what_is_overwritten_anywhere() {
    let (temp, _) = scratch();
    let size = 1u64 << 50;
    let saved = CowStore::create(temp.path(), size, 1 << 20, 1 << 30).unwrap();
    let there = CowStore::from_parts(saved.parts().unwrap()).unwrap();
    /// Each block of 4 KiB holds its number, the odd ones of each MiB nothing.
    struct Numbered(u64);
    impl Disk for Numbered {
        fn len(&self) -> u64 {
            self.0
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
            for (at, block) in buf.chunks_mut(4096).enumerate() {
                let number = offset / 4096 + at as u64;
                block.fill(0);
                if number % 2 == 0 {
                    block[..8].copy_from_slice(&number.to_le_bytes());
                }
            }
            Ok(())
        }
        fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
            unreachable!()
        }
        fn zero(&self, _: u64, _: u64, _: bool, _: bool) -> io::Result<()> {
            unreachable!()
        }
        fn discard(&self, _: u64, _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
        fn queue(self: Arc<Self>, _: u32) -> io::Result<Box<dyn Queue>> {
            Ok(Box::new(InlineQueue::new(self)))
        }
    }
    let disk = Numbered(size);
    for offset in [size - 4096, 1 << 44, (1 << 44) - 4096, 0, 1 << 49] {
        saved.keep(&disk, offset, 8192.min(size - offset));
    }
    for offset in [0, (1 << 44) - (1 << 20), 1 << 44, 1 << 49, size - (1 << 20)] {
        let (mut found, mut expected) = (vec![0xff; 1 << 20], vec![0; 1 << 20]);
        there.mend(offset, &mut found).unwrap();
        disk.read_at(offset, &mut expected).unwrap();
        assert!(found == expected, "at {offset}");
    }
    assert!(!there.is_broken());
}

#[test]
fn a_full_view_breaks_and_the_writer_goes_on() {
    let (temp, folder) = scratch();
    // Of zeroes nothing would be kept.
    let ram = Arc::new(RamDisk::from_bytes(&[9; 64 * BLOCK as usize]));
    let disk = open(ram, &folder, 0);
    let saved = Arc::new(CowStore::create(temp.path(), disk.len(), BLOCK as u32, 3 * BLOCK).unwrap());
    disk.checkpoint(Some(saved.clone()), None).unwrap();
    let mut part = [0; 100];
    for block in 0..3 {
        disk.write_at(block * BLOCK, &[1; 4096]).unwrap();
    }
    saved.mend(0, &mut part).unwrap();
    disk.write_at(3 * BLOCK, &[1; 4096]).unwrap();
    let error = saved.mend(0, &mut part).unwrap_err().to_string();
    assert!(error.contains("snapshot has failed") && error.contains("--view-limit"), "{error}");
}

#[test]
fn a_view_keeps_only_what_its_reader_still_needs() {
    let (temp, folder) = scratch();
    let ram = Arc::new(RamDisk::from_bytes(&[9; 64 * BLOCK as usize]));
    let disk = open(ram, &folder, 0);
    let saved = Arc::new(CowStore::create(temp.path(), disk.len(), BLOCK as u32, 1 << 30).unwrap());
    disk.checkpoint(Some(saved.clone()), None).unwrap();
    let needed = extents::Bitmap::new(64);
    needed.set(10..20);
    saved.narrow(&needed);
    saved.taken(12);
    disk.write_at(0, &vec![1; 64 * BLOCK as usize]).unwrap();
    assert_eq!(saved.kept_bytes(), 8 * BLOCK);
    disk.drop_view(&saved);
}

#[test]
fn the_intent_is_durable_before_the_data() {
    // A folder's file is looked at while the write is still on its way.
    let (temp, folder) = scratch();
    let ram = Arc::new(RamDisk::new(4 * TrackOptions::REGION));
    struct Watch {
        inner: Arc<RamDisk>,
        intent: std::path::PathBuf,
        seen: AtomicBool,
    }
    impl Disk for Watch {
        fn len(&self) -> u64 {
            self.inner.len()
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
            self.inner.read_at(offset, buf)
        }
        fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
            let log = std::fs::read(&self.intent)?;
            let region = offset / TrackOptions::REGION;
            self.seen.store(log[4096 + (region / 8) as usize] & (1 << (region % 8)) != 0, SeqCst);
            self.inner.write_at(offset, buf)
        }
        fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
            self.inner.zero(offset, len, unmap, fast)
        }
        fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
            self.inner.discard(offset, len)
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
        fn queue(self: Arc<Self>, _depth: u32) -> io::Result<Box<dyn Queue>> {
            Ok(Box::new(InlineQueue::new(self)))
        }
    }
    let watch =
        Arc::new(Watch { inner: ram, intent: temp.path().join("intent"), seen: AtomicBool::new(false) });
    let disk = open(watch.clone(), &folder, 0);
    disk.write_at(3 * TrackOptions::REGION, &[1]).unwrap();
    assert!(watch.seen.load(SeqCst));
}

/// A folder on a machine that loses what was not synced, a disk with three writes of which the first is durable in the
/// record, and a write-back of the records that failed afterwards.
fn with_a_failed_write_back() -> (tempfile::TempDir, Power, FaultyFolder, Arc<dyn Disk>, TrackedDisk) {
    let temp = tempfile::tempdir().unwrap();
    let power = Power::new(Outage::PowerCut);
    let faulty = FaultyFolder::new(&power, temp.path()).unwrap();
    let ram: Arc<dyn Disk> = Arc::new(RamDisk::new(8 * TrackOptions::REGION));
    let disk = open(ram.clone(), &(Arc::new(faulty.clone()) as Arc<dyn Folder>), 0);
    disk.write_at(0, &[1; 8]).unwrap();
    disk.sweep(0).unwrap();
    assert_eq!(disk.active_regions().0, 0);
    disk.write_at(2 * TrackOptions::REGION, &[1; 8]).unwrap();
    disk.write_at(5 * TrackOptions::REGION, &[1; 8]).unwrap();
    faulty.fail_write_back().unwrap();
    (temp, power, faulty, ram, disk)
}

/// The first block, and all of regions 2 and 5.
fn what_may_have_been_written() -> Vec<Range<u64>> {
    let per_region = TrackOptions::REGION / BLOCK;
    vec![0..1, 2 * per_region..3 * per_region, 5 * per_region..6 * per_region]
}

/// Linux tells of a failed write-back once, and takes the pages for clean from then on.
#[test]
fn a_record_that_could_not_be_written_once_is_never_taken_for_durable() {
    let (temp, power, _, ram, disk) = with_a_failed_write_back();
    assert!(disk.sweep(0).is_err(), "the failure is told");
    for _ in 0..3 {
        let _ = disk.sweep(0);
    }
    assert_eq!(disk.active_regions().0, 2, "the bits are not on the disk: the intents must stay");
    power.crash(Keep::LoseUnsynced, Keep::LoseUnsynced, 0).unwrap();
    let folder: Arc<dyn Folder> = Arc::new(Dir::open(temp.path()).unwrap());
    let disk = TrackedDisk::open(ram, folder, settings(), 0, true, true).unwrap();
    let runs: Vec<_> = disk.checkpoint(None, None).unwrap().changes.runs().collect();
    assert_eq!(runs, what_may_have_been_written());
}

/// Pages that count as clean may be dropped from memory, and be read from the disk again without their bits.
#[test]
fn what_a_record_forgot_after_a_failed_write_counts_as_written() {
    // Nobody has asked for a sync yet; or a sweep was told.
    for told in [false, true] {
        let (_temp, _, faulty, _, disk) = with_a_failed_write_back();
        if told {
            disk.sweep(0).unwrap_err();
        }
        faulty.reclaim().unwrap();
        assert!(!disk.view_of_unchanged(None));
        let dirty: Vec<_> = disk.dirty().unwrap().runs().collect();
        assert_eq!(dirty, what_may_have_been_written());
        assert_eq!(disk.dirty_runs(0..1 << 20, 9).unwrap(), dirty);
        let runs: Vec<_> = disk.checkpoint(None, None).unwrap().changes.runs().collect();
        assert_eq!(runs, dirty);
        // The next record is another file.
        disk.release().unwrap();
        disk.sweep(0).unwrap();
        assert_eq!((disk.active_regions().0, disk.dirty().unwrap().count()), (0, 0));
    }
}

/// The process dies, the system does not: what the record's file holds now is less than what was marked.
#[test]
fn a_record_that_was_damaged_is_known_as_such_by_the_next_process() {
    for told in [false, true] {
        let (_temp, _, faulty, ram, disk) = with_a_failed_write_back();
        if told {
            disk.sweep(0).unwrap_err();
        }
        faulty.reclaim().unwrap();
        drop(disk);
        let disk = open(ram, &(Arc::new(faulty) as Arc<dyn Folder>), 0);
        let runs: Vec<_> = disk.checkpoint(None, None).unwrap().changes.runs().collect();
        assert_eq!(runs, what_may_have_been_written());
    }
}

/// A disk whose flushes wait for a lock.
struct SlowFlush(RamDisk, Mutex<()>);

impl Disk for SlowFlush {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, buf)
    }
    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        self.0.zero(offset, len, unmap, fast)
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.discard(offset, len)
    }
    fn flush(&self) -> io::Result<()> {
        drop(self.1.lock().unwrap());
        Ok(())
    }
    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(ThreadQueue::new(Arc::new(move |request| request.run(&*self)), depth)?))
    }
}

/// A server polls its client and the disk together: a request that comes after a slow flush is not held up by it.
#[test]
fn a_queue_can_be_waited_for_beside_something_else() {
    let (_temp, folder) = scratch();
    let slow = Arc::new(SlowFlush(RamDisk::new(64 * BLOCK), Mutex::new(())));
    let disk = Arc::new(open(slow.clone(), &folder, 0));
    let mut queue = disk.queue(8).unwrap();
    let flushes = slow.1.lock().unwrap();
    queue.submit(Request {
        kind: RequestKind::Flush,
        pieces: Default::default(),
        buf: Buf::default(),
        token: 1,
    });
    queue.start();
    assert!(queue.complete(false).is_none());
    let pieces = [Piece { offset: 0, len: BLOCK }].into_iter().collect();
    queue.submit(Request {
        kind: RequestKind::Write { fua: false },
        pieces,
        buf: Buf::new(BLOCK as usize),
        token: 2,
    });
    queue.start();
    let mut next = || loop {
        if let Some(done) = queue.complete(false) {
            done.result.unwrap();
            return done.request.token;
        }
        let fd = queue.wait_fd().expect("a descriptor");
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap(), 1);
    };
    assert_eq!(next(), 2);
    drop(flushes);
    assert_eq!(next(), 1);
}
