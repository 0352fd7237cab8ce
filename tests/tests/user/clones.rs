//! Images that are tracked by clones: on XFS and Btrfs the file system says what any program wrote to them, also while they are in use.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;

use dsync_tests::image::{self, assert_equal, differing_blocks};
use dsync_tests::listener::{HOST, Offering, key, trust};
use dsync_tests::mount::Mount;
use dsync_tests::{Background, Output, Random, Run, Site, need, need_root, rounds, skipped, until};
use rustix::fs::FallocateFlags;
use rustix::process::Signal;
use testing::stalled::{StalledWrite, is_cloning};

const RSH: &str = env!("CARGO_BIN_EXE_rsh");
const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// File systems that make clones: their kind and the options of their mount.
const KINDS: [(&str, &str); 4] =
    [("xfs", "loop"), ("btrfs", "loop"), ("btrfs", "loop,nodatacow"), ("btrfs", "loop,compress-force=zstd")];

/// An image on such a file system, and a replica elsewhere.
struct Cloned {
    site: Site,
    place: PathBuf,
    image: PathBuf,
    replica: PathBuf,
    random: Random,
    _mount: Mount,
}

impl Cloned {
    fn new((kind, options): (&str, &str), size: u64, what: &str) -> Option<Cloned> {
        let make = format!("mkfs.{kind}");
        let what = &format!("{what} ({kind}, {options})");
        if !need_root(what) || !need(&[&make], what) {
            return None;
        }
        let site = Site::new();
        let (disk, place) = (site.image("fs.img", 640 * MIB), site.path("fs"));
        Run::new(make).arg("-q").arg(&disk).ok();
        let Some(mount) = Mount::new(&["-o", options], &disk, &place) else {
            skipped(what, "it cannot be mounted from a loop device here");
            return None;
        };
        let (image, replica) = (place.join("vm.qcow2"), site.path("replica.qcow2"));
        image::sparse(&image, size);
        let mut random = Random::new(what);
        write(&image, 0, &text(&mut random, (size / 4) as usize));
        Some(Cloned { site, place, image, replica, random, _mount: mount })
    }

    /// The same, tracked and synced once.
    fn tracked(kind: (&str, &str), size: u64, what: &str) -> Option<Cloned> {
        let cloned = Cloned::new(kind, size, what)?;
        cloned.track("add").ok();
        cloned.sync(&[]).ok();
        Some(cloned)
    }

    fn track(&self, action: &str) -> Run {
        self.site.dsync(["track", action]).arg(&self.image)
    }

    fn sync(&self, options: &[&str]) -> Run {
        self.site.sync(&self.image, &self.replica, options)
    }

    /// The clones beside the image.
    fn clones(&self) -> Vec<PathBuf> {
        let name = self.image.file_name().expect("a name").to_string_lossy();
        let Ok(entries) = std::fs::read_dir(self.place.join(format!(".{name}.dsync-clones"))) else {
            return Vec::new();
        };
        let paths = entries.flatten().map(|entry| entry.path());
        paths.filter(|path| path.to_string_lossy().contains("/clone-")).collect()
    }

    /// The one clone that is kept, which is the moment that was synced last.
    fn clone(&self) -> PathBuf {
        let clones = self.clones();
        assert_eq!(clones.len(), 1, "{clones:?}");
        clones[0].clone()
    }

    /// Syncs by the record, and says how many blocks were sent.
    fn sync_tracked(&self) -> u64 {
        let done = self.sync(&[]).ok().summary();
        let method = done["method"].as_str().expect("a method");
        assert!(["tracked", "none"].contains(&method), "{done}");
        assert_equal(&self.image, &self.replica);
        done["blocks_changed"].as_u64().unwrap_or(0)
    }

    /// Syncs all of it, for this reason.
    fn sync_compared(&self, why: &str) {
        let done = self.sync(&[]).ok().summary();
        assert_eq!(done["method"], "compare", "{done}");
        assert!(done["trust"].as_str().expect("words").contains(why), "{done}");
        assert_equal(&self.image, &self.replica);
    }

    fn change(&mut self, block: u64) {
        let bytes = self.random.bytes(BLOCK as usize);
        write(&self.image, block * BLOCK, &bytes);
    }
}

/// Bytes that can be packed, and are not the same twice.
fn text(random: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 64);
    while bytes.len() < len {
        let word = random.bits().to_le_bytes();
        let times = 1 + random.index(8);
        (0..times).for_each(|_| bytes.extend_from_slice(&word));
    }
    bytes.truncate(len);
    bytes
}

fn write(image: &Path, offset: u64, bytes: &[u8]) {
    OpenOptions::new()
        .write(true)
        .open(image)
        .and_then(|file| file.write_all_at(bytes, offset))
        .expect("a write");
}

/// A program that never stops to write to an image, in all ways.
struct Writer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    fn start(image: &Path, mut random: Random) -> Writer {
        let stop = Arc::new(AtomicBool::new(false));
        let (file, stopped) =
            (OpenOptions::new().read(true).write(true).open(image).expect("the image"), stop.clone());
        let thread = std::thread::spawn(move || {
            while !stopped.load(SeqCst) {
                change(&file, &mut random);
                std::thread::sleep(Duration::from_micros(random.below(2000)));
            }
        });
        Writer { stop, thread: Some(thread) }
    }

    fn end(&mut self) {
        self.stop.store(true, SeqCst);
        self.thread.take().into_iter().for_each(|thread| thread.join().expect("a writer"));
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
    }
}

/// Writes, punches, preallocates, zeroes, moves or flushes a part of an image.
fn change(file: &File, random: &mut Random) {
    let size = file.metadata().expect("the image").len();
    let most = if random.coin() { 5000 } else { 300_000 };
    let (offset, len) = (random.below(size - 300_000), 1 + random.below(most));
    let (block, blocks) = (offset / BLOCK * BLOCK, len.div_ceil(BLOCK) * BLOCK);
    let keeps = FallocateFlags::KEEP_SIZE;
    match random.below(10) {
        0 => _ = rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | keeps, block, blocks),
        1 => _ = rustix::fs::fallocate(file, keeps, block, blocks),
        2 => _ = rustix::fs::fallocate(file, FallocateFlags::ZERO_RANGE | keeps, block, blocks),
        3 => {
            // As a defragmentation or a guest that copies: the same bytes at another place.
            let mut bytes = vec![0; blocks as usize];
            file.read_exact_at(&mut bytes, block).expect("a read");
            file.write_all_at(&bytes, random.below(size - blocks) / BLOCK * BLOCK).expect("a write");
        }
        4 => file.sync_data().expect("a flush"),
        _ => file.write_all_at(&text(random, len as usize), offset).expect("a write"),
    }
}

fn campaign(kind: (&str, &str)) {
    let what = "an image that is written to all the time";
    let Some(mut scene) = Cloned::tracked(kind, 128 * MIB, what) else { return };
    let mut writer = Writer::start(&scene.image, scene.random.fork());
    let mut before = scene.site.path("before");
    for round in 0..rounds(5, 60) {
        std::thread::sleep(Duration::from_millis(scene.random.below(300)));
        image::copy(&scene.replica, &before);
        let done = scene.sync(&[]).ok().summary();
        assert_eq!(done["method"], "tracked", "{done}");
        // What the clone has is what was there at one moment.
        assert_equal(&scene.clone(), &scene.replica);
        let (named, differing) = (
            done["blocks_changed"].as_u64().expect("a number"),
            differing_blocks(&before, &scene.replica).len() as u64,
        );
        assert!(named >= differing, "{kind:?}: {named} blocks named of {differing}");
        if round % 4 == 3 {
            scene.site.dsync(["verify", "--json"]).arg(&scene.image).arg(&scene.replica).ok();
            before = scene.site.path("before");
        }
    }
    writer.end();
    scene.sync_tracked();
}

#[test]
fn xfs_says_what_was_written_to_an_image_in_use() {
    campaign(KINDS[0]);
}

#[test]
fn btrfs_says_what_was_written_to_an_image_in_use() {
    campaign(KINDS[1]);
}

#[test]
fn btrfs_without_copy_on_write_says_it_too() {
    campaign(KINDS[2]);
}

#[test]
fn of_what_is_packed_the_content_is_compared() {
    campaign(KINDS[3]);
}

#[test]
fn only_what_was_written_is_named() {
    for kind in KINDS {
        let Some(mut scene) = Cloned::tracked(kind, 64 * MIB, "few writes") else { return };
        assert_eq!(scene.sync_tracked(), 0);
        for block in [3, 700, 701, 9000] {
            scene.change(block);
        }
        let packed = kind.1.contains("compress");
        let named = scene.sync_tracked();
        assert!(named == 4 || packed && named <= 4 * 32, "{kind:?}: {named}");
        // By any program, past any server; and what is the same as before, written again.
        write(&scene.image, 0, &std::fs::read(scene.clone()).expect("a clone")[..BLOCK as usize]);
        assert!(scene.sync_tracked() <= if packed { 32 } else { 1 });
    }
}

/// A balance moves the content of both clones while their maps are read.
#[test]
fn what_is_moved_is_not_missed() {
    let what = "a balance meanwhile";
    if !need(&["btrfs"], what) {
        return;
    }
    let Some(mut scene) = Cloned::tracked(KINDS[1], 96 * MIB, what) else { return };
    let stop = Arc::new(AtomicBool::new(false));
    let (place, stopped) = (scene.place.clone(), stop.clone());
    let balance = std::thread::spawn(move || {
        while !stopped.load(SeqCst) {
            Run::new("btrfs").args(["balance", "start", "-d"]).arg(&place).output();
        }
    });
    let mut writer = Writer::start(&scene.image, scene.random.fork());
    for _ in 0..rounds(3, 40) {
        // Where it never rests, that is said, and all of it is compared.
        let done = scene.sync(&[]).ok().summary();
        assert!(["tracked", "compare"].contains(&done["method"].as_str().expect("a method")), "{done}");
        assert_equal(&scene.clone(), &scene.replica);
    }
    writer.end();
    stop.store(true, SeqCst);
    balance.join().expect("a balance");
    scene.change(5);
    scene.sync(&[]).ok();
    assert_equal(&scene.image, &scene.replica);
}

/// Of a packed extent another part can be shared at the same place: the map says the same, and the content differs.
#[test]
fn another_part_of_what_is_packed_is_seen() {
    let what = "another part of a packed extent";
    if !need(&["xfs_io"], what) {
        return;
    }
    let Some(scene) = Cloned::new(KINDS[3], 16 * MIB, what) else { return };
    let donor = scene.place.join("donor");
    std::fs::write(&donor, [[1u8; 65536], [2u8; 65536]].concat()).expect("a file");
    Run::new("sync").arg(&donor).ok();
    let share = |from: u64| {
        let part = format!("reflink {} {from} {} 65536", donor.display(), 8 * MIB);
        Run::new("xfs_io").args(["-c", &part]).arg(&scene.image).ok();
    };
    share(0);
    scene.track("add").ok();
    scene.sync(&[]).ok();
    share(65536);
    assert_eq!(scene.sync_tracked(), 16);
    // What was read for that stays in nobody's way.
    let kept = scene.clone();
    assert_eq!(scene.sync_tracked(), 0);
    assert_eq!((scene.clone(), image::cached(&kept)), (kept, Some(0)));
}

#[test]
fn a_sync_that_is_killed_leaves_nothing_behind() {
    for kind in &KINDS[..2] {
        let what = "kills of a sync by clones";
        let Some(mut scene) = Cloned::tracked(*kind, 64 * MIB, what) else { return };
        for _ in 0..rounds(8, 200) {
            for _ in 0..1 + scene.random.below(40) {
                let block = scene.random.below(64 * MIB / BLOCK);
                scene.change(block);
            }
            let mut sync = scene.sync(&[]).start();
            std::thread::sleep(Duration::from_micros(scene.random.below(150_000)));
            sync.kill();
            drop(sync);
            if scene.random.coin() {
                // Wherever it was cut off, that costs no comparison.
                scene.sync_tracked();
                scene.clone();
            }
        }
        scene.sync_tracked();
        scene.clone();
    }
}

/// Killed at each of its calls that make something durable, or move or remove a file, one after another.
#[test]
fn wherever_a_sync_is_cut_off_the_next_one_knows_what_was_written() {
    let what = "a sync by clones that is killed at each call";
    if !need(&["strace"], what) {
        return;
    }
    let Some(mut scene) = Cloned::tracked(KINDS[0], 64 * MIB, what) else { return };
    for calls in ["fsync,fdatasync", "/^rename", "/^unlink"] {
        let (trace, mut at, mut killed) = (format!("trace={calls}"), 1, 0);
        loop {
            scene.change(at % 1000);
            let kill = format!("inject={calls}:signal=KILL:when={at}");
            let sync = ["-f", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &kill];
            let strace = dsync_tests::find("strace").expect("strace");
            let sync = scene.site.run(&strace).args(sync).arg(dsync_tests::site::binary());
            let done = sync.args(["sync"]).arg(&scene.image).arg(&scene.replica).output();
            let was_cut_off = !done.status.success();
            killed += u64::from(was_cut_off);
            if at % 3 == 0 {
                // What the record says by itself is true as well.
                scene.track("remove").ok();
                assert_eq!(scene.clones().len(), 0);
                scene.sync(&[]).ok();
                assert_equal(&scene.image, &scene.replica);
                scene.track("add").ok();
            }
            scene.sync_tracked();
            scene.clone();
            if !was_cut_off {
                break;
            }
            at += 1;
        }
        assert!(killed > 0, "{calls}");
    }
}

#[test]
fn a_clone_that_is_not_what_was_left_says_nothing() {
    let Some(mut scene) = Cloned::tracked(KINDS[0], 64 * MIB, "a clone that was changed") else { return };
    scene.change(7);
    write(&scene.clone(), 7 * BLOCK, &[0; 4096]);
    scene.sync_compared("was changed or removed");
    scene.change(8);
    std::fs::remove_file(scene.clone()).expect("a clone");
    let check = scene.site.dsync(["status", "--check"]).arg(&scene.image).code(1).text();
    assert!(check.contains("tracking is lost") && check.contains("was changed or removed"), "{check}");
    scene.sync_compared("was changed or removed");
    scene.change(9);
    assert_eq!(scene.sync_tracked(), 1);
    // A new file in its place: whether that is the disk only its user can say.
    let new = scene.place.join("new");
    Run::new("cp").arg("--reflink=always").arg(&scene.image).arg(&new).ok();
    std::fs::rename(&new, &scene.image).expect("a rename");
    scene.change(10);
    scene.sync(&[]).code(4).says(&["another file is in its place", "--accept-source"]);
    scene.sync(&["--accept-source"]).ok();
    assert_equal(&scene.image, &scene.replica);
    scene.change(11);
    assert_eq!(scene.sync_tracked(), 1);
}

/// An image that is older than what was synced does not take the replica back with it.
#[test]
fn a_backup_in_its_place_is_refused() {
    let Some(mut scene) = Cloned::tracked(KINDS[1], 64 * MIB, "a backup in the place of an image") else {
        return;
    };
    let backup = scene.place.join("backup");
    Run::new("cp").args(["-p", "--reflink=always"]).arg(&scene.image).arg(&backup).ok();
    scene.change(7);
    scene.sync_tracked();
    std::fs::rename(&backup, &scene.image).expect("a rename");
    let before = std::fs::read(&scene.replica).expect("the replica");
    scene.sync(&[]).code(4).says(&["not what was recorded last"]);
    assert!(before == std::fs::read(&scene.replica).expect("the replica"));
    assert_eq!(scene.clones().len(), 1);
}

/// What was served or tracked is a disk in use, also once it is not tracked by clones any more.
#[test]
fn a_backup_of_what_was_served_or_tracked_once_is_refused() {
    for served in [true, false] {
        let Some(mut scene) = Cloned::new(KINDS[1], 64 * MIB, "a backup of a disk that was served") else {
            return;
        };
        if served {
            scene.site.serve(&[&scene.image], &["--format", "raw"]).stop();
        }
        scene.track("add").ok();
        scene.sync(&[]).ok();
        let backup = scene.place.join("backup");
        Run::new("cp").args(["-p", "--reflink=always"]).arg(&scene.image).arg(&backup).ok();
        scene.change(7);
        scene.sync_tracked();
        scene.track("remove").ok();
        std::fs::rename(&backup, &scene.image).expect("a rename");
        scene.sync(&[]).code(4).says(&["not what was recorded last"]);
        let check = scene.site.dsync(["status", "--check"]).code(1).text();
        assert!(check.contains("source is not what it was"), "{check}");
    }
}

/// A command whose calls of this kind take longer, at their entry or their exit; and what is done in that time, once its clone is there.
fn slowly(scene: &Cloned, args: &[&str], delay: &str, meanwhile: impl FnOnce(&Path)) -> Output {
    let (strace, before) = (dsync_tests::find("strace").expect("strace"), scene.clones());
    let delay = format!("inject=ioctl:{delay}=250000");
    let command =
        scene.site.run(&strace).args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=ioctl", "-e", &delay]);
    let command = command.arg(dsync_tests::site::binary()).args(args).start();
    let new = || scene.clones().into_iter().find(|clone| !before.contains(clone));
    // Before the call that fills it, or just after.
    let is_due =
        |clone: &Path| delay.contains("enter") || std::fs::metadata(clone).is_ok_and(|found| found.len() > 0);
    until("a new clone", || new().is_some_and(|clone| is_due(&clone)));
    if delay.contains("enter") {
        std::thread::sleep(Duration::from_millis(100));
    }
    meanwhile(&new().expect("a clone"));
    command.output(Duration::from_secs(60))
}

/// What is written while a clone is made is in it or not, and is known to be.
#[test]
fn what_is_written_while_a_clone_is_made_is_not_missed() {
    let what = "writes while a clone is made";
    if !need(&["strace"], what) {
        return;
    }
    for (at, delay) in ["delay_enter", "delay_exit"].into_iter().enumerate() {
        let Some(mut scene) = Cloned::new(KINDS[0], 16 * MIB, what) else { return };
        let image = scene.image.display().to_string();
        let bytes: Vec<Vec<u8>> = (0..4).map(|_| scene.random.bytes(4096)).collect();
        let wrote = |block: usize| write(&scene.image, block as u64 * BLOCK, &bytes[block]);
        // The record of an image at rest is good until then.
        scene.sync(&[]).ok();
        slowly(&scene, &["track", "add", &image], delay, |_| wrote(0));
        scene.sync(&[]).ok();
        assert_equal(&scene.image, &scene.replica);
        let replica = scene.replica.display().to_string();
        slowly(&scene, &["sync", &image, &replica], delay, |_| wrote(1));
        scene.sync_tracked();
        scene.site.serve(&[&scene.image], &[]).stop();
        slowly(&scene, &["sync", &image, &replica], delay, |_| wrote(2));
        scene.sync(&[]).ok();
        assert_equal(&scene.image, &scene.replica);
        // A disk that hands over has all that was written to it.
        let demoted = slowly(&scene, &["demote", &image, &replica], delay, |_| wrote(3));
        if demoted.status.success() {
            assert_equal(&scene.image, &scene.replica);
        } else {
            assert!(demoted.stderr.contains("another program"), "{at}: {demoted}");
        }
    }
}

/// Who owns the folder may put anything in the place of a clone: it is not read, and not removed.
#[test]
fn what_is_put_in_the_place_of_a_clone_is_left_alone() {
    let what = "a link in the place of a clone";
    if !need(&["strace"], what) {
        return;
    }
    let Some(scene) = Cloned::tracked(KINDS[0], 16 * MIB, what) else { return };
    let secret = scene.site.path("secret");
    std::fs::write(&secret, vec![7; 16 << 20]).expect("a file");
    let (image, replica) = (scene.image.display().to_string(), scene.replica.display().to_string());
    for delay in ["delay_enter", "delay_exit"] {
        write(&scene.image, 0, &[1; 4096]);
        slowly(&scene, &["sync", &image, &replica], delay, |clone| {
            std::fs::rename(clone, scene.place.join("taken")).expect("a rename");
            std::os::unix::fs::symlink(&secret, clone).expect("a link");
        });
        assert_equal(&scene.image, &scene.replica);
        scene.sync(&[]).ok();
        scene.sync(&[]).ok();
        assert_equal(&scene.image, &scene.replica);
        assert_eq!(image::size(&secret), 16 << 20);
        scene.clone();
    }
}

/// Where no clone can be made, the image is read as one that rests, and refusals lead on.
#[test]
fn an_image_that_cannot_be_cloned_any_more_is_compared() {
    let Some(mut scene) = Cloned::tracked(KINDS[0], 64 * MIB, "an image that cannot be cloned any more")
    else {
        return;
    };
    scene.change(3);
    Run::new("mount").args(["-o", "remount,ro"]).arg(&scene.place).ok();
    scene.track("remove").code(1).says(&["cannot remove the clone"]);
    scene.sync_compared("no clone of it could be made: ");
    scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica).ok();
    Run::new("mount").args(["-o", "remount,rw"]).arg(&scene.place).ok();
    scene.change(4);
    scene.sync(&[]).ok();
    assert_equal(&scene.image, &scene.replica);
    scene.change(5);
    assert_eq!(scene.sync_tracked(), 1);
    // A pipe in its place is waited for by nothing.
    std::fs::rename(&scene.image, scene.place.join("away")).expect("a rename");
    Run::new("mkfifo").arg(&scene.image).ok();
    let status = scene.site.dsync(["status"]).limit(Duration::from_secs(20)).ok().text();
    assert!(status.contains("vm"), "{status}");
    std::fs::remove_file(&scene.image).expect("a pipe");
    std::fs::rename(scene.place.join("away"), &scene.image).expect("a rename");
    // To a file system that makes no clones.
    let elsewhere = scene.site.path("vm.qcow2");
    Run::new("cp").arg(&scene.image).arg(&elsewhere).ok();
    std::fs::remove_file(&scene.image).expect("the image");
    std::os::unix::fs::symlink(&elsewhere, &scene.image).expect("a link");
    scene.track("add").code(4).says(&["cannot be tracked by clones", "XFS"]);
}

/// A full file system: the clone that is kept makes room for the next one, and the disk is compared.
#[test]
fn on_a_full_file_system_the_old_clone_goes_first() {
    let Some(mut scene) = Cloned::tracked(KINDS[0], 192 * MIB, "a full file system") else { return };
    write(&scene.image, 0, &text(&mut scene.random, 150 << 20));
    Run::new("sync").arg(&scene.image).ok();
    let fill = scene.place.join("fill");
    for unit in ["1M", "4K"] {
        let line = format!(
            "dd if=/dev/zero bs={unit} oflag=append conv=notrunc of={} 2>/dev/null; sync -f {0}; true",
            fill.display()
        );
        Run::shell(&line).ok();
    }
    let check = scene.site.dsync(["status", "--check"]).arg(&scene.image).code(1).text();
    assert!(check.contains("file system is filling up") && check.contains("dsync track remove"), "{check}");
    // Nobody has to stop: it is the new clone that is read.
    let log = scene.site.path("calls");
    let strace = scene.site.run(&dsync_tests::find("strace").expect("strace"));
    let strace = strace.args(["-f", "-qq", "-e", "trace=ioctl", "-o"]).arg(&log);
    strace.arg(dsync_tests::site::binary()).arg("sync").args([&scene.image, &scene.replica]).ok();
    let calls = std::fs::read_to_string(&log).expect("the calls");
    let cloned = |line: &str| line.contains("FICLONE") && line.ends_with("= 0");
    assert!(calls.lines().any(cloned), "{calls}");
    assert_equal(&scene.image, &scene.replica);
    scene.site.dsync(["status", "--check"]).arg(&scene.image).ok();
    std::fs::remove_file(&fill).expect("a file");
    scene.sync(&[]).ok();
    scene.change(3);
    assert_eq!(scene.sync_tracked(), 1);
}

#[test]
fn an_image_grows_shrinks_and_moves() {
    const ODD: u64 = 64 * MIB + 1536;
    let Some(mut scene) = Cloned::tracked(KINDS[0], ODD, "an image of another size") else { return };
    // The block at its old end has bytes that only the next delta can name.
    let image = OpenOptions::new().write(true).open(&scene.image).expect("the image");
    let end =
        |byte| std::os::unix::fs::FileExt::write_all_at(&image, &[byte; 1536], 64 * MIB).expect("a write");
    end(5);
    scene.sync_tracked();
    end(0);
    let size = |bytes| {
        OpenOptions::new()
            .write(true)
            .open(&scene.image)
            .and_then(|file| file.set_len(bytes))
            .expect("a size")
    };
    size(80 * MIB + 4096);
    scene.change(70 * MIB / BLOCK);
    scene.sync_tracked();
    let size = |bytes| {
        OpenOptions::new()
            .write(true)
            .open(&scene.image)
            .and_then(|file| file.set_len(bytes))
            .expect("a size")
    };
    size(40 * MIB);
    scene.sync(&[]).code(4).says(&["shrank", "--allow-shrink"]);
    scene.sync(&["--allow-shrink"]).ok();
    assert_equal(&scene.image, &scene.replica);
    scene.change(70);
    assert_eq!(scene.sync_tracked(), 1);
    let other = scene.place.join("other.qcow2");
    std::fs::rename(&scene.image, &other).expect("a rename");
    let before = std::mem::replace(&mut scene.image, other);
    scene.change(71);
    assert_eq!(scene.sync_tracked(), 1);
    assert!(scene.clone().to_string_lossy().contains(".other.qcow2.dsync-clones"));
    assert!(!before.with_file_name(".vm.qcow2.dsync-clones").exists());
}

/// A server records what is written through it, and a clone would only take room.
#[test]
fn a_server_takes_over_and_gives_back() {
    let Some(mut scene) = Cloned::tracked(KINDS[1], 64 * MIB, "a server of a tracked image") else { return };
    // What was written before it stands in its record.
    scene.change(2);
    let server = scene.site.serve(&[&scene.image], &[]);
    assert_eq!(scene.clones().len(), 0);
    let mut client = server.client("vm");
    client.write(0, &[7; 4096]).expect("a write");
    client.close().expect("the end");
    scene.track("add").code(4).says(&["is being served"]);
    let done = scene.sync(&[]).ok().summary();
    assert_eq!(
        (done["method"].as_str(), done["blocks_changed"].as_u64()),
        (Some("tracked"), Some(2)),
        "{done}"
    );
    server.stop();
    assert_equal(&scene.image, &scene.replica);
    // The record of a server that ended is as good, until somebody else writes.
    assert_eq!(scene.sync_tracked(), 0);
    scene.change(3);
    assert_eq!(scene.sync_tracked(), 1);
    scene.site.serve(&[&scene.image], &[]).stop();
    scene.change(4);
    scene.sync_compared("no clone is kept of its last epoch");
    scene.change(5);
    assert_eq!(scene.sync_tracked(), 1);
}

/// A program writes to a tracked image that has to be at rest: to track it helps no more.
fn refused_in_use(output: &Output) {
    output.says(&["another program wrote to source", "had to be at rest", "stop that program"]);
    assert!(!output.stderr.contains("dsync track add"), "{output}");
}

/// A server tells by a clone, too, what was written before it: that waits for a write that has begun, and the image's map does not.
#[test]
fn a_write_that_is_under_way_when_a_server_starts_is_not_missed() {
    let what = "a write under way at the start of a server";
    let Some(scene) = Cloned::tracked(KINDS[0], 16 * MIB, what) else { return };
    let serve = scene.site.dsync(["serve", "--socket"]).arg(scene.site.socket("nbd")).arg(&scene.image);
    // Dropped after the write, for which it waits.
    let mut server: Option<Background> = None;
    let Some(stalled) = StalledWrite::direct(&scene.image, what) else { return };
    let server = server.insert(serve.start());
    let serves = |server: &Background| server.stdout_so_far().contains("serving vm");
    let process = Path::new("/proc").join(server.pid().as_raw_nonzero().to_string());
    until("it clones or serves", || is_cloning(&process) || serves(server));
    stalled.end();
    until("it serves", || serves(server));
    server.signal(Signal::TERM);
    until("the server ends", || server.ended().is_some());
    assert_eq!(scene.sync_tracked(), 1);
}

/// What is written after a clone is in no sync: a disk that is demoted, or cut together with others, has to be at rest.
#[test]
fn who_hands_over_is_at_rest() {
    let Some(mut scene) = Cloned::tracked(KINDS[0], 64 * MIB, "a switch of a tracked image") else { return };
    scene.change(3);
    let lock = device::lock_image(&scene.image, device::Access::Write).expect("a lock");
    let demote = || scene.site.dsync(["demote"]).arg(&scene.image).arg(&scene.replica);
    demote().code(6);
    assert_eq!(differing_blocks(&scene.image, &scene.replica), [3], "nothing was sent");
    // Another sync goes on.
    scene.sync(&[]).ok();
    drop(lock);
    // Nor does one that takes no lock.
    let mut writer = Writer::start(&scene.image, Random::new("a writer"));
    refused_in_use(&demote().code(1));
    writer.end();
    scene.sync(&[]).ok();
    scene.change(4);
    let demote = || scene.site.dsync(["demote"]).arg(&scene.image).arg(&scene.replica);
    demote().ok();
    assert_equal(&scene.image, &scene.replica);
    assert_eq!(scene.clones().len(), 0);
    scene.track("add").code(4).says(&["replica"]);
    scene.site.dsync(["promote"]).arg(&scene.replica).ok();
    write(&scene.replica, 0, &[1; 4096]);
    scene.site.sync(&scene.replica, &scene.image, &[]).ok();
    assert_equal(&scene.image, &scene.replica);
}

/// The moment and what changed are told at the host of the image, whoever asks and by whatever way.
#[test]
fn another_host_gets_what_the_clones_tell() {
    let Some(mut scene) = Cloned::tracked(KINDS[0], 32 * MIB, "clones and another host") else { return };
    let (far, image) = (Site::new(), scene.image.display().to_string());
    let offering = Offering::start(&scene.site, &[&scene.image], &[]);
    trust(&far, HOST, &scene.site, &[]);
    scene.site.dsync(["key", "trust", "far", &key(&far), "--for", "serve"]).ok();
    let (pulled, pushed, over_tls) = (far.path("pulled"), far.path("pushed"), far.path("over-tls"));
    let pull = |scene: &Cloned| {
        let run = far.dsync(["sync", "--json", "--rsh", RSH]).arg(format!("far:{image}")).arg(&pulled);
        run.env("RSH_STATE", scene.site.state()).ok().summary()
    };
    let push = |scene: &Cloned| {
        let run = scene
            .site
            .dsync(["sync", "--json", "--rsh", RSH, &image])
            .arg(format!("far:{}", pushed.display()));
        run.env("RSH_STATE", far.state()).ok().summary()
    };
    let fetch = |_: &Cloned| {
        far.dsync(["sync", "--json", "--wait=10s"]).arg(offering.source(&image)).arg(&over_tls).ok().summary()
    };
    type Sync<'a> = &'a dyn Fn(&Cloned) -> serde_json::Value;
    let ways: [(Sync<'_>, &Path); 3] = [(&pull, &pulled), (&push, &pushed), (&fetch, &over_tls)];
    for (sync, _) in ways {
        sync(&scene);
    }
    let lock = device::lock_image(&scene.image, device::Access::Write).expect("a lock");
    for (at, (sync, replica)) in ways.into_iter().enumerate() {
        scene.change(50 + at as u64);
        let done = sync(&scene);
        assert_eq!(
            (&done["method"], &done["blocks_changed"]),
            (&"tracked".into(), &(at as u64 + 1).into()),
            "{done}"
        );
        assert_equal(&scene.clone(), replica);
    }
    drop(lock);
}

/// Its writers wait while an image is cloned: a peer that asks for one session after another makes them do so for a tenth of the time.
#[test]
fn a_peer_has_an_image_cloned_for_a_tenth_of_the_time() {
    let what = "clones for a peer";
    if !need(&["strace"], what) {
        return;
    }
    let Some(mut scene) = Cloned::tracked(KINDS[0], 16 * MIB, what) else { return };
    let (far, image) = (Site::new(), scene.image.display().to_string());
    let offerings = [(); 2].map(|()| Offering::start(&scene.site, &[&scene.image], &[]));
    trust(&far, HOST, &scene.site, &[]);
    scene.site.dsync(["key", "trust", "far", &key(&far), "--for", "serve"]).ok();
    let fetch = |from: &Offering, command: &[&str]| {
        far.dsync(command).arg(from.source(&image)).arg(far.path("fetched")).arg("--wait=1s")
    };
    // The first clone takes as long as one of an image in many pieces.
    let process = offerings[0].process.pid().as_raw_nonzero().to_string();
    let strace = Run::new("strace").args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=ioctl"]);
    let strace = strace.args(["-e", "inject=ioctl:delay_exit=400000", "-p", &process]).start();
    let status = Path::new("/proc").join(process).join("status");
    let is_traced = || std::fs::read_to_string(&status).is_ok_and(|text| !text.contains("TracerPid:\t0\n"));
    until("it is traced", is_traced);
    fetch(&offerings[0], &["sync"]).ok();
    drop(strace);
    until("it is not traced", || !is_traced());
    scene.change(3);
    for offering in &offerings {
        fetch(offering, &["sync"]).code(6).says(&["no more than a tenth of the time"]);
    }
    fetch(&offerings[0], &["verify"]).code(6).says(&["no more than a tenth of the time"]);
    // The host's own syncs are not held up.
    assert_eq!(scene.sync_tracked(), 1);
}

/// Its hook is held around the moment that is copied.
#[test]
fn a_hook_is_held_around_the_clone() {
    let Some(mut scene) = Cloned::tracked(KINDS[1], 64 * MIB, "a hook around a clone") else { return };
    let mark = |word: &str, block: u64| {
        format!(
            "printf {word} | dd of='{}' bs=4096 seek={block} conv=notrunc status=none",
            scene.image.display()
        )
    };
    let hook = format!("read w; {}; echo ready; read w; {}; read w", mark("before", 5), mark("after", 6));
    scene.sync(&["-n", "--hook", &hook]).ok();
    scene.sync(&["--hook", "exit 3"]).code(1);
    assert_equal(&scene.image, &scene.replica);
    scene.sync(&["--hook", &hook]).ok();
    assert_eq!(differing_blocks(&scene.image, &scene.replica), [6]);
    assert_equal(&scene.clone(), &scene.replica);
    scene.change(7);
    assert_eq!(scene.sync_tracked(), 2);
}

/// QEMU writes to its qcow2 meanwhile: the copy is what a kill would have left.
#[test]
fn the_qcow2_of_a_machine_that_runs_is_copied_whole() {
    let what = "a qcow2 in use";
    if !need(&["qemu-img"], what) {
        return;
    }
    let Some(scene) = Cloned::new(KINDS[0], 64 * MIB, what) else { return };
    Run::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&scene.image).arg("96M").ok();
    scene.track("add").ok();
    let bench =
        ["bench", "-q", "-w", "-f", "qcow2", "-d", "8", "-s", "12288", "-S", "77824", "-c", "100000000"];
    let mut machine =
        Run::new("qemu-img").args(bench).args(["--flush-interval=64"]).arg(&scene.image).start();
    for _ in 0..rounds(6, 40) {
        scene.sync(&["--quiet"]).ok();
        assert!(machine.ended().is_none(), "it does not run any more");
        assert_equal(&scene.clone(), &scene.replica);
        let check = Run::new("qemu-img").args(["check", "--output=json"]).arg(&scene.replica).output();
        let found: serde_json::Value = serde_json::from_slice(&check.stdout).expect("what qemu-img found");
        assert!(found["corruptions"].as_u64().unwrap_or(0) == 0 && found["check-errors"] == 0, "{check}");
    }
    machine.kill();
    scene.sync_tracked();
}

/// The clones of two images are of two moments.
#[test]
fn a_group_of_tracked_images_is_at_rest() {
    let Some(mut scene) = Cloned::tracked(KINDS[0], 64 * MIB, "a group of tracked images") else { return };
    let (log, replicas) = (scene.place.join("log.raw"), scene.site.path("replicas"));
    image::sparse(&log, 16 * MIB);
    std::fs::create_dir(&replicas).expect("a folder");
    scene.site.dsync(["track", "add"]).arg(&log).ok();
    scene.site.serve(&[&scene.image, &log], &["--group", "db"]).stop();
    let bytes = scene.random.bytes(4096);
    let sync = || scene.site.dsync(["sync", "--group", "db", "--json"]).arg(&replicas);
    sync().ok();
    write(&scene.image, 9 * BLOCK, &bytes);
    sync().ok();
    assert_equal(&scene.image, &replicas.join("vm.qcow2"));
    let lock = device::lock_image(&log, device::Access::Write).expect("a lock");
    sync().code(6);
    drop(lock);
    let mut writer = Writer::start(&scene.image, Random::new("a group's writer"));
    refused_in_use(&sync().code(1));
    writer.end();
    sync().ok();
    assert_equal(&scene.image, &replicas.join("vm.qcow2"));
    assert_equal(&log, &replicas.join("log.raw"));
}

/// What was read of an image beside another program's writes is not one moment of it. Left in a journal, and the image given back from a clone of the
/// moment, it must not be taken for that.
#[test]
fn what_was_read_at_rest_is_of_the_moment_that_is_gone_on_from() {
    for (kill, kind) in [(false, KINDS[0]), (true, KINDS[1])] {
        let Some(mut scene) = Cloned::tracked(kind, 12 * MIB, "a group that is written to") else { return };
        let (saved, replicas) = (scene.place.join("saved"), scene.site.path("replicas"));
        let replica = replicas.join("vm.qcow2");
        std::fs::create_dir(&replicas).expect("a folder");
        let all = scene.random.bytes(12 << 20);
        write(&scene.image, 0, &all);
        scene.site.serve(&[&scene.image], &["--group", "db"]).stop();
        scene.track("add").ok();
        let sync = || scene.site.dsync(["sync", "--group", "db"]).arg(&replicas);
        sync().ok();
        write(&scene.image, 0, &scene.random.bytes(12 << 20));
        let clone = |from: &Path, to: &Path| Run::new("cp").arg("--reflink=always").args([from, to]).ok();
        clone(&scene.image, &saved);
        let mut first = sync().args(["--bwlimit", "4M"]).start();
        let journal = replicas.join(".vm.qcow2.dsync/journal");
        until("some of it has arrived", || journal.metadata().is_ok_and(|file| file.len() > MIB));
        // What is not read yet.
        write(&scene.image, 9 * MIB, &scene.random.bytes(1 << 20));
        until("more has arrived", || {
            first.ended().is_some() || journal.metadata().is_ok_and(|file| file.len() > 11 * MIB)
        });
        if kill {
            first.kill();
            drop(first);
        } else {
            refused_in_use(&first.output(Duration::from_secs(60)));
        }
        clone(&saved, &scene.image);
        sync().ok();
        assert_equal(&scene.image, &replica);
    }
}

/// A map is as long as its image is in pieces.
#[test]
fn status_reads_each_map_once() {
    let what = "the maps that status reads";
    if !need(&["strace"], what) {
        return;
    }
    let Some(scene) = Cloned::tracked(KINDS[0], 16 * MIB, what) else { return };
    let (strace, calls) = (dsync_tests::find("strace").expect("strace"), scene.site.path("calls"));
    let strace = scene.site.run(&strace).args(["-f", "-qq", "-e", "trace=ioctl", "-o"]).arg(&calls);
    strace.arg(dsync_tests::site::binary()).arg("status").arg(&scene.image).ok();
    let calls = std::fs::read_to_string(calls).expect("its calls");
    assert_eq!(calls.matches("FIEMAP").count(), 2, "of the clone and of the image: {calls}");
}

#[test]
fn the_end_leaves_nothing_behind() {
    let Some(mut scene) = Cloned::tracked(KINDS[0], 64 * MIB, "the end of tracking") else { return };
    let status = scene.site.dsync(["status"]).arg(&scene.image).ok().text();
    assert!(
        status.contains("tracked by clones: what was overwritten since the last one takes 0 B"),
        "{status}"
    );
    scene.change(3);
    Run::new("sync").arg(&scene.image).ok();
    let status = scene.site.dsync(["status", "--json"]).arg(&scene.image).ok().summary();
    assert_eq!(status["clone"]["kept_bytes"], 4096, "{status}");
    scene.sync_tracked();
    scene.track("remove").ok();
    assert_eq!(scene.clones().len(), 0);
    scene.track("remove").code(4).says(&["is not tracked"]);
    // At rest since.
    assert_eq!(scene.sync_tracked(), 0);
    scene.change(3);
    scene.sync_compared("");
    scene.track("add").ok();
    scene.sync(&[]).ok();
    scene.site.dsync(["forget"]).arg(&scene.image).ok();
    assert_eq!(scene.clones().len(), 0);
    assert!(!scene.place.join(".vm.qcow2.dsync-clones").exists());
}

#[test]
fn what_cannot_be_tracked_by_clones_is_said() {
    let what = "an image that cannot be cloned";
    if !need_root(what) || !need(&["mkfs.ext4"], what) {
        return;
    }
    let site = Site::new();
    let (disk, place) = (site.image("fs.img", 64 * MIB), site.path("fs"));
    Run::new("mkfs.ext4").arg("-q").arg(&disk).ok();
    let Some(_mount) = Mount::new(&["-o", "loop"], &disk, &place) else {
        return skipped(what, "ext4 cannot be mounted from a loop device here");
    };
    let image = place.join("vm.raw");
    image::sparse(&image, MIB);
    let add = |options: &[&str]| site.dsync(["track", "add"]).arg(&image).args(options);
    add(&[]).code(4).says(&["its file system makes none", "XFS", "Btrfs", "dsync serve"]);
    add(&["--group", "db"]).code(2).says(&["block devices"]);
    add(&["--with", "dm"]).code(2).says(&["block devices"]);
    site.dsync(["track", "save"]).arg(&image).code(2).says(&["is a file"]);
    site.dsync(["track", "remove"]).arg(&image).code(4).says(&["is not tracked"]);
    let status = site.dsync(["status"]).ok().text();
    assert!(status.contains("no sources yet"), "{status}");
    until("nothing is left", || !place.join(".vm.raw.dsync-clones").exists());
}
