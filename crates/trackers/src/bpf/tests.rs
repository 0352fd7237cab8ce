//! On loop devices of this machine. Each test has a mount namespace of its own: its mounts and pins end with its thread.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use device::Folder;
use extents::Bitmap;
use testing::{got, need};

use super::*;

const BLOCK: usize = 4096;
const EPOCH: uuid::Uuid = uuid::Uuid::from_u128(7);

/// False, with a line that says why, where the machine cannot run these tests. Else this thread has its own mounts.
fn ready(tools: &[&str]) -> bool {
    let what = "the bpf tracker";
    let able = if !rustix::process::geteuid().is_root() {
        Err("this needs root")
    } else if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        Err("this kernel has no BTF")
    } else {
        Ok(())
    };
    if !got(able, what) || !need(tools, what) {
        return false;
    }
    // SAFETY: nothing in this thread depends on sharing its mounts or its working directory with the others.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
    run("mount --make-rprivate /");
    run("mount -t bpf bpf /sys/fs/bpf");
    true
}

/// Runs a line of shell; it must succeed.
fn run(line: &str) -> String {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new("sh").args(["-ec", line]).env("PATH", path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(output.status.success(), "{line}: {text} {}", String::from_utf8_lossy(&output.stderr));
    text
}

/// A loop device over a file of random content.
struct Loop {
    device: PathBuf,
    image: PathBuf,
    folder: tempfile::TempDir,
}

impl Loop {
    fn new(mib: u64) -> Loop {
        let folder = testing::temporary();
        let image = folder.path().join("image");
        run(&format!("head -c {mib}M /dev/urandom >{}", image.display()));
        Self::over(image, folder)
    }

    fn over(image: PathBuf, folder: tempfile::TempDir) -> Loop {
        // Of a number that no other test is given while this one detaches it.
        static NEXT: AtomicU32 = AtomicU32::new(300);
        let program = testing::find("losetup").expect("losetup");
        let attached = (0..100).find_map(|_| {
            let device = PathBuf::from(format!("/dev/loop{}", NEXT.fetch_add(1, SeqCst)));
            let losetup =
                Command::new(&program).arg("-P").arg(&device).arg(&image).stderr(Stdio::null()).status();
            losetup.is_ok_and(|status| status.success()).then_some(device)
        });
        Loop { device: attached.expect("a loop device"), image, folder }
    }

    /// A node for a partition of so many MiB, which the kernel is told of where it does not read such tables itself.
    fn partition(&self, number: u32, first_mib: u64, mib: u64) -> PathBuf {
        let node = self.folder.path().join(format!("p{number}"));
        let name = format!("{}p{number}", self.device.file_name().unwrap().display());
        let place = Path::new("/sys/class/block").join(name).join("dev");
        if !place.exists() {
            run(&format!("addpart {} {number} {} {}", self.name(), first_mib * 2048, mib * 2048));
        }
        let number = std::fs::read_to_string(place).unwrap();
        run(&format!("mknod {} b {}", node.display(), number.trim().replace(':', " ")));
        node
    }

    fn name(&self) -> String {
        self.device.display().to_string()
    }

    fn read(&self) -> Vec<u8> {
        run(&format!("sync {}", self.name()));
        std::fs::read(&self.image).unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let name = self.name();
        let mounts = format!("umount {name} {name}p* 2>/dev/null; losetup -d {name}");
        let _ = Command::new("sh").args(["-c", &mounts]).stderr(Stdio::null()).status();
    }
}

/// Blocks whose content differs.
fn differing(before: &[u8], after: &[u8]) -> Bitmap {
    let blocks = Bitmap::new((after.len() / BLOCK) as u64);
    for (i, (a, b)) in before.chunks(BLOCK).zip(after.chunks(BLOCK)).enumerate() {
        if a != b {
            blocks.set(i as u64..i as u64 + 1);
        }
    }
    blocks
}

/// The runs of a set, as text.
fn runs(blocks: &Bitmap) -> String {
    format!("{:?}", blocks.runs().collect::<Vec<_>>())
}

/// Every block that differs is in `reported`.
fn assert_covers(reported: &Bitmap, differing: &Bitmap, what: &str) {
    let missed = differing.extents();
    for run in missed.iter() {
        assert!(reported.all(run.clone()), "{what}: of {run:?} not all are reported");
    }
}

#[test]
fn what_differs_is_reported_after_mixed_workloads() {
    if !ready(&["mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "fio", "sfdisk"]) {
        return;
    }
    let disk = Loop::new(320);
    let (dev, mnt) = (disk.name(), disk.folder.path().join("mnt"));
    std::fs::create_dir(&mnt).unwrap();
    let mnt = mnt.display();
    let fio = |more: &str| {
        format!(
            "fio --name=t --filename={dev} --size=320M --refill_buffers --minimal --io_size=20M --randseed={} {more} \
             >/dev/null",
            more.len()
        )
    };
    let fill = format!(
        "mount {dev} {mnt}; for i in 1 2 3; do head -c 9000000 /dev/urandom >{mnt}/$i; done; sync; \
         head -c 100000 /dev/urandom | dd of={mnt}/1 conv=notrunc bs=1000 seek=77 2>/dev/null; rm {mnt}/2; umount {mnt}"
    );
    // What it does, and whether it discards: then blocks may be reported that read as before.
    let workloads = [
        (
            "direct",
            fio(
                "--rw=randwrite --direct=1 --ioengine=io_uring --iodepth=32 --bsrange=512-256k --bs_unaligned=0",
            ),
            false,
        ),
        ("buffered", fio("--rw=randwrite --bsrange=512-64k --bs_unaligned=1 --end_fsync=1"), false),
        ("sequential", fio("--rw=write --bs=1M --direct=1 --offset=123M"), false),
        ("ext4", format!("mkfs.ext4 -q -E nodiscard {dev}; {fill}"), false),
        ("xfs", format!("mkfs.xfs -q -f -K {dev}; {fill}"), false),
        ("btrfs", format!("mkfs.btrfs -q -f -K {dev}; {fill}"), false),
        ("zeroes", format!("blkdiscard -f -z -o 5M -l 33M {dev}"), false),
        ("discard", format!("blkdiscard -f -o 100M -l 150M {dev}; blkdiscard -f -o 4608 -l 512 {dev}"), true),
        ("mkfs with discard", format!("mkfs.ext4 -q {dev}; {fill}"), true),
        (
            "table",
            format!(
                "wipefs -qa {dev}; printf '2048,204800\\n206848,409600\\n' | sfdisk -q --no-tell-kernel {dev}"
            ),
            true,
        ),
    ];
    let through_partitions = |p1: &str, p2: &str| {
        format!(
            "head -c 3000000 /dev/urandom | dd of={p1} bs=4k seek=10 oflag=direct iflag=fullblock conv=notrunc 2>&1; \
             head -c 3000000 /dev/urandom | dd of={p2} bs=3k seek=99 conv=notrunc,fsync 2>&1; \
             blkdiscard -f -z -o 8k -l 16k {p1}; \
             head -c 50000 /dev/urandom | dd of={dev} bs=512 seek=77777 conv=notrunc,fsync 2>&1"
        )
    };
    let tracker = add(&disk.device, None).unwrap();
    assert_eq!((tracker.kind(), tracker.block_size(), tracker.size()), ("bpf", 4096, 320 << 20));
    assert!(tracker.lost().unwrap().is_some(), "what came before is not known");
    tracker.checkpoint().unwrap();
    tracker.release(EPOCH).unwrap();
    assert_eq!(tracker.lost().unwrap(), None);
    let mut before = disk.read();
    let mut reported_before = Bitmap::new((before.len() / BLOCK) as u64);
    for (what, line, discards) in workloads.into_iter().chain([("partitions", String::new(), false)]) {
        if what == "partitions" {
            run(&format!("blockdev --rereadpt {dev}"));
            let (p1, p2) = (disk.partition(1, 1, 100), disk.partition(2, 101, 200));
            run(&through_partitions(&p1.display().to_string(), &p2.display().to_string()));
        } else {
            run(&line);
        }
        let after = disk.read();
        // Another process looks at it: nothing hangs on ours.
        let tracker = find(&disk.device).unwrap().unwrap();
        let reported = tracker.checkpoint().unwrap();
        assert_eq!(tracker.lost().unwrap(), None, "{what}");
        tracker.release(EPOCH).unwrap();
        let differing = differing(&before, &after);
        assert_covers(&reported, &differing, what);
        let (all, changed) = (reported.count(), differing.count());
        println!("{what}: {changed} blocks differ, {all} reported");
        assert!(changed > 0, "{what} changed nothing");
        // What is in flight at a checkpoint is marked in both epochs.
        let surplus = Bitmap::new(reported.blocks());
        surplus.union_with(&reported);
        surplus.subtract(&differing);
        surplus.subtract(&reported_before);
        let surplus = surplus.count();
        assert!(
            discards || surplus * 20 <= all,
            "{what}: {all} reported, {changed} differ, {surplus} beyond"
        );
        (before, reported_before) = (after, reported);
    }
    assert!(remove(&disk.device).unwrap());
    assert!(!remove(&disk.device).unwrap());
    assert!(find(&disk.device).unwrap().is_none());
}

#[test]
fn a_partition_is_followed_whoever_writes_to_it() {
    if !ready(&["addpart"]) {
        return;
    }
    let disk = Loop::new(8);
    let (first, second) = (disk.partition(1, 1, 2), disk.partition(2, 3, 4));
    let tracker = add(&second, None).unwrap();
    assert_eq!(tracker.size(), 4 << 20);
    tracker.checkpoint().unwrap();
    tracker.release(EPOCH).unwrap();
    write(&second, 7);
    write(&first, 511);
    // Through the whole disk: before it, across its end, within, after it.
    write(&disk.device, 767);
    run(&format!(
        "dd if=/dev/urandom of={0} bs=1M count=2 seek=6 oflag=direct conv=notrunc 2>&1",
        disk.name()
    ));
    write(&disk.device, 768 + 20);
    write(&disk.device, 2000);
    assert_eq!(runs(&tracker.checkpoint().unwrap()), "[7..8, 20..21, 768..1024]");
    // Writes beside it are no strays.
    assert_eq!(tracker.lost().unwrap(), None);
    assert!(find(&disk.device).unwrap().is_none());
    remove(&second).unwrap();
}

/// A process, ended with its children when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(line: &str) -> Running {
    Running(Command::new("sh").args(["-c", &format!("exec {line}")]).stdout(Stdio::null()).spawn().unwrap())
}

/// A loop device whose writes take 400 ms, and the file beneath it as it is at this moment.
struct Slow {
    disk: Option<Loop>,
    content: PathBuf,
    mount: String,
    server: Running,
}

impl Slow {
    fn new() -> Slow {
        Slow::with("head -c 16M /dev/urandom >")
    }

    /// With the content that this makes of a file.
    fn with(content_by: &str) -> Slow {
        let folder = testing::temporary();
        let (content, mount) = (folder.path().join("content"), folder.path().join("slow"));
        std::fs::create_dir(&mount).unwrap();
        run(&format!("{content_by}{}", content.display()));
        let mount = mount.display().to_string();
        let server = start(&format!(
            "nbdfuse -C 32 {mount} --command nbdkit -s --filter=delay file {} delay-write=400ms",
            content.display()
        ));
        let image = PathBuf::from(format!("{mount}/nbd"));
        let until = Instant::now() + Duration::from_secs(10);
        while !image.exists() {
            assert!(Instant::now() < until, "nbdfuse does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        Slow { disk: Some(Loop::over(image, folder)), content, mount, server }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        // The folder of all this lives in the disk: unmounted before it goes.
        let disk = self.disk.take();
        if let Some(disk) = &disk {
            run(&format!("losetup -d {}", disk.name()));
        }
        let _ = Command::new("sh").args(["-c", &format!("sleep 0.2; umount -l {}", self.mount)]).status();
    }
}

/// Copies what each checkpoint reports, at once, while writes that take 400 ms are in flight; then looks which blocks the
/// copy lacks that the next checkpoint does not report. Returns how many.
fn lost_updates(mark_again: bool) -> u64 {
    let slow = Slow::new();
    let disk = slow.disk.as_ref().unwrap();
    let number = BlockDevice::at(&disk.device).unwrap().number;
    add(&disk.device, None).unwrap();
    let tracker = BpfTracker::open(&folder(&number), &disk.device).unwrap();
    tracker.swap(true).unwrap();
    tracker.release(EPOCH).unwrap();
    let mut lost = 0;
    let mut load = start(&format!(
        "fio --name=t --filename={} --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=16 --refill_buffers \
         --size=16M --time_based --runtime=4 --minimal",
        disk.name()
    ));
    let mut copy = std::fs::read(&slow.content).unwrap();
    let mut ended = false;
    while !ended {
        // The last round begins when all has landed.
        ended = load.0.try_wait().unwrap().is_some();
        std::thread::sleep(Duration::from_millis(if ended { 900 } else { 530 }));
        let changes = tracker.swap(mark_again).unwrap();
        assert_eq!(tracker.lost().unwrap(), None);
        let now = std::fs::read(&slow.content).unwrap();
        for run in changes.runs() {
            let bytes = run.start as usize * BLOCK..run.end as usize * BLOCK;
            copy[bytes.clone()].copy_from_slice(&now[bytes]);
        }
        tracker.release(EPOCH).unwrap();
        if ended {
            lost = differing(&copy, &now).count();
        }
    }
    remove(&disk.device).unwrap();
    lost
}

#[test]
fn a_write_in_flight_at_the_checkpoint_is_not_lost() {
    if !ready(&["nbdkit", "nbdfuse", "fio"]) {
        return;
    }
    // All but none of it is waiting: beside each other.
    let (with, without) = std::thread::scope(|scope| {
        let without = scope.spawn(|| lost_updates(false));
        (lost_updates(true), without.join().unwrap())
    });
    assert_eq!(with, 0);
    assert!(without > 0, "nothing was lost without the second mark, so this test shows nothing");
    println!("{without} of 4096 blocks are lost without the second mark");
}

/// A discard that the kernel cuts is a chain: each part leads to the next. Here the first is older than the tracker, and the second is not.
#[test]
fn a_write_that_is_older_than_its_tracker_is_not_excused_by_one_that_it_leads_to() {
    if !ready(&["nbdkit", "nbdfuse", "blkdiscard"]) {
        return;
    }
    // Two parts of 4 GiB and some.
    let slow = Slow::with("truncate -s 10G ");
    let disk = slow.disk.as_ref().unwrap();
    let system = Path::new("/sys/class/block").join(disk.device.file_name().unwrap());
    std::fs::write(system.join("queue/nr_requests"), PLACES.to_string()).unwrap();
    let server = slow.server.0.id().to_string();
    run(&format!("kill -STOP {server}"));
    // Reads hold the places, which no tracker looks at.
    let holders: Vec<_> = (1..=PLACES)
        .map(|place| {
            let dd = format!("dd if={} of=/dev/null bs=4k count=1 skip={}", disk.name(), place * 1000);
            start(&format!("{dd} iflag=direct status=none"))
        })
        .collect();
    soon("the queue is full", || read(&system.join("inflight")).starts_with(&format!("{PLACES:8} ")));
    let mut discard = start(&format!("blkdiscard -f {}", disk.name()));
    let wchan = PathBuf::from(format!("/proc/{}/wchan", discard.0.id()));
    soon("the discard waits for a place", || read(&wchan).contains("get_tag"));
    let tracker = add(&disk.device, None).unwrap();
    tracker.checkpoint().unwrap();
    tracker.release(EPOCH).unwrap();
    assert_eq!(tracker.lost().unwrap(), None);
    run(&format!("kill -CONT {server}"));
    assert!(discard.0.wait().unwrap().success());
    let why = tracker.lost().unwrap().unwrap_or_default();
    drop(tracker);
    for mut holder in holders {
        assert!(holder.0.wait().unwrap().success());
    }
    remove(&disk.device).unwrap();
    assert!(why.contains("1 writes completed whose start was not seen"), "{why}");
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn soon(what: &str, mut is: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !is() {
        assert!(Instant::now() < until, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A loop device whose writes wait for their place in its queue, which others hold, as long as the file system beneath it is frozen.
struct Held {
    disk: Option<Loop>,
    _beneath: Loop,
    mount: String,
    holders: Vec<Running>,
}

/// Writes that a queue has place for.
const PLACES: u64 = 4;

impl Held {
    /// One that writes at once, up to [`Held::hold`].
    fn new() -> Held {
        let beneath = Loop::new(64);
        let folder = testing::temporary();
        let mount = folder.path().join("beneath");
        std::fs::create_dir(&mount).unwrap();
        run(&format!("mkfs.ext4 -q {0}; mount {0} {1}", beneath.name(), mount.display()));
        let image = mount.join("image");
        run(&format!("head -c 32M /dev/zero >{0}; sync {0}", image.display()));
        let disk = Loop::over(image, folder);
        let queue = Path::new("/sys/class/block").join(disk.device.file_name().unwrap()).join("queue");
        for (name, value) in [("nr_requests", PLACES), ("max_sectors_kb", 64)] {
            std::fs::write(queue.join(name), value.to_string()).unwrap();
        }
        let mount = mount.display().to_string();
        Held { disk: Some(disk), _beneath: beneath, mount, holders: Vec::new() }
    }

    fn name(&self) -> String {
        self.disk.as_ref().unwrap().name()
    }

    /// Freezes the file system, and fills the queue.
    fn hold(&mut self) {
        run(&format!("fsfreeze -f {}", self.mount));
        for place in 0..PLACES {
            let dd = format!("dd if=/dev/zero of={} bs=4k count=1 seek={place} oflag=direct", self.name());
            self.holders.push(start(&format!("{dd} conv=notrunc status=none")));
        }
        let flying =
            Path::new("/sys/class/block").join(self.name().trim_start_matches("/dev/")).join("inflight");
        let until = Instant::now() + Duration::from_secs(10);
        while std::fs::read_to_string(&flying).unwrap().split_whitespace().nth(1) != Some(&PLACES.to_string())
        {
            assert!(Instant::now() < until, "the queue is not full");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Lets all go, and waits for their end.
    fn let_go(&mut self, mut last: Running) {
        run(&format!("fsfreeze -u {}", self.mount));
        for running in self.holders.iter_mut().chain([&mut last]) {
            assert!(running.0.wait().unwrap().success());
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = Command::new("sh").args(["-c", &format!("fsfreeze -u {} 2>/dev/null", self.mount)]).status();
        let disk = self.disk.take();
        if let Some(disk) = &disk {
            let _ = Command::new("losetup").args(["-d", &disk.name()]).status();
        }
        let _ = Command::new("sh").args(["-c", &format!("sleep 0.2; umount {}", self.mount)]).status();
    }
}

/// Whoever looks at the table of writes in flight may be past the place of a part by the time at which it is entered.
#[test]
fn a_part_that_is_split_off_after_the_swap_is_marked_in_the_new_record() {
    if !ready(&["mkfs.ext4", "fsfreeze"]) {
        return;
    }
    let mut held = Held::new();
    let disk = held.disk.as_ref().unwrap();
    let number = BlockDevice::at(&disk.device).unwrap().number;
    track(disk);
    let tracker = BpfTracker::open(&folder(&number), &disk.device).unwrap();
    held.hold();
    let last = start(&format!(
        "dd if=/dev/zero of={} bs=192k count=1 seek=100 oflag=direct status=none",
        held.name()
    ));
    // It is queued, and its first part waits.
    let until = Instant::now() + Duration::from_secs(10);
    while tracker.dirty().unwrap().runs_in(4800..4848).next().is_none() {
        assert!(Instant::now() < until, "it is not queued");
        std::thread::sleep(Duration::from_millis(10));
    }
    // As if it had been nowhere in the table.
    tracker.swap(false).unwrap();
    tracker.release(EPOCH).unwrap();
    held.let_go(last);
    let marked = tracker.swap(true).unwrap();
    assert_eq!(marked.runs_in(4800..4848).map(|run| run.end - run.start).sum::<u64>(), 48);
    remove(&held.disk.as_ref().unwrap().device).unwrap();
}

fn write(device: &Path, block: u64) {
    run(&format!(
        "head -c 4096 /dev/urandom | dd of={} bs=4k seek={block} conv=notrunc oflag=direct iflag=fullblock 2>&1",
        device.display()
    ));
}

#[test]
fn nobody_releases_what_another_checkpoint_has_taken() {
    if !ready(&[]) {
        return;
    }
    let disk = Loop::new(8);
    let one = add(&disk.device, None).unwrap();
    let other = find(&disk.device).unwrap().unwrap();
    write(&disk.device, 3);
    assert_eq!(runs(&one.checkpoint().unwrap()), "[3..4]");
    write(&disk.device, 9);
    assert_eq!(runs(&other.checkpoint().unwrap()), "[3..4, 9..10]");
    // Block 9 stands in no history of the one's.
    assert!(matches!(one.release(Uuid::from_u128(1)), Err(TrackError::Refused(_))));
    assert_eq!(runs(&one.dirty().unwrap()), "[3..4, 9..10]");
    other.release(Uuid::from_u128(2)).unwrap();
    assert!(one.release(Uuid::from_u128(1)).is_err(), "nothing is left to release");
    // What the next checkpoint of the one returns came after an epoch that it does not know.
    write(&disk.device, 5);
    assert_eq!(runs(&one.checkpoint().unwrap()), "[5..6]");
    assert_eq!(one.released().unwrap(), Some(Uuid::from_u128(2)));
    // One that stops between the two records and what it would read after, as if it were killed there.
    let number = BlockDevice::at(&disk.device).unwrap().number;
    let mut other = BpfTracker::open(&folder(&number), &disk.device).unwrap();
    other.flight = std::fs::File::open("/dev/null").unwrap().into();
    write(&disk.device, 9);
    assert!(other.checkpoint().is_err());
    assert!(matches!(one.release(Uuid::from_u128(3)), Err(TrackError::Refused(_))));
    assert_eq!(runs(&one.dirty().unwrap()), "[5..6, 9..10]");
    remove(&disk.device).unwrap();
}

#[test]
fn what_is_not_released_is_returned_again() {
    if !ready(&[]) {
        return;
    }
    let disk = Loop::new(8);
    let tracker = add(&disk.device, None).unwrap();
    assert!(matches!(add(&disk.device, None), Err(TrackError::Refused(_))));
    write(&disk.device, 3);
    // A release before any checkpoint releases nothing, and a tracker that began knows nothing of before.
    tracker.release(EPOCH).unwrap_err();
    assert!(tracker.lost().unwrap().is_some());
    assert_eq!(tracker.released().unwrap(), None);
    assert_eq!(runs(&tracker.checkpoint().unwrap()), "[3..4]");
    write(&disk.device, 9);
    // As if the process had died here.
    drop(tracker);
    let tracker = find(&disk.device).unwrap().unwrap();
    assert!(tracker.lost().unwrap().is_some());
    assert_eq!(runs(&tracker.dirty().unwrap()), "[3..4, 9..10]");
    assert_eq!(runs(&tracker.checkpoint().unwrap()), "[3..4, 9..10]");
    assert_eq!(runs(&tracker.checkpoint().unwrap()), "[3..4, 9..10]");
    write(&disk.device, 5);
    tracker.release(EPOCH).unwrap();
    assert_eq!((tracker.lost().unwrap(), tracker.released().unwrap()), (None, Some(EPOCH)));
    assert_eq!(runs(&tracker.dirty().unwrap()), "[5..6]");
    assert_eq!(runs(&tracker.checkpoint().unwrap()), "[5..6]");
    tracker.release(EPOCH).unwrap();
    assert!(tracker.dirty().unwrap().is_clean());
    remove(&disk.device).unwrap();
}

#[test]
fn a_pin_a_link_or_a_disk_that_is_gone_means_lost() {
    if !ready(&[]) {
        return;
    }
    let mut disk = Loop::new(8);
    let place = folder(&BlockDevice::at(&disk.device).unwrap().number);
    let trusted = |disk: &Loop| {
        let _ = remove(&disk.device);
        let tracker = add(&disk.device, None).unwrap();
        tracker.checkpoint().unwrap();
        tracker.release(EPOCH).unwrap();
        assert_eq!(tracker.lost().unwrap(), None);
    };
    let lost = |disk: &Loop| find(&disk.device).unwrap().unwrap().lost().unwrap();
    for name in MAPS.iter().chain(&RECORDS).chain(&LINKS[..TRACEPOINTS.len()]) {
        trusted(&disk);
        std::fs::remove_file(place.join(name)).unwrap();
        assert!(lost(&disk).is_some(), "{name}");
    }
    // Another link in its place, another record in use.
    trusted(&disk);
    std::fs::rename(place.join("queue"), place.join("was")).unwrap();
    std::fs::rename(place.join("remap"), place.join("queue")).unwrap();
    std::fs::rename(place.join("was"), place.join("remap")).unwrap();
    assert!(lost(&disk).unwrap().contains("replaced"));
    trusted(&disk);
    // Another disk under the same number, and the same one with another size.
    run(&format!("losetup -d {}", disk.name()));
    run(&format!("losetup {} {}", disk.name(), disk.image.display()));
    assert!(lost(&disk).unwrap().contains("is attached to"));
    trusted(&disk);
    run(&format!("truncate -s 9M {}; losetup -c {}", disk.image.display(), disk.name()));
    assert!(lost(&disk).unwrap().contains("resized"));
    // What counts as unrecorded.
    trusted(&disk);
    let counts = sys::get(&place.join("counts")).unwrap();
    for key in 0..2 {
        sys::update(counts.as_fd(), key, &7u64.to_ne_bytes()).unwrap();
        assert!(lost(&disk).unwrap().contains("7 writes"));
        let tracker = find(&disk.device).unwrap().unwrap();
        tracker.checkpoint().unwrap();
        tracker.release(EPOCH).unwrap();
        assert_eq!(lost(&disk), None);
    }
    // A tracker whose device is gone can still be removed, by its path.
    run(&format!("losetup -d {}", disk.name()));
    disk.device = disk.device.clone();
    assert!(remove(&disk.device).unwrap());
    assert!(!place.exists());
}

/// Makes a loop device show this part of its file.
fn show(disk: &Loop, offset: u64, limit: u64) {
    use std::os::fd::AsRawFd;
    // In the kernel's headers, with the places of these two in `struct loop_info64`.
    const LOOP_SET_STATUS64: libc::Ioctl = 0x4c04;
    const LOOP_GET_STATUS64: libc::Ioctl = 0x4c05;
    let device = std::fs::File::open(&disk.device).unwrap();
    let mut about = [0u64; 29];
    // SAFETY: the structure has 232 bytes.
    assert_eq!(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut about) }, 0);
    (about[3], about[4]) = (offset, limit);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_STATUS64, &raw const about) }, 0);
}

/// Neither its number, nor that of the kernel, nor its size tells that it has other content.
#[test]
fn a_loop_device_that_shows_another_part_of_its_file_is_not_what_it_was() {
    if !ready(&[]) {
        return;
    }
    let disk = Loop::new(16);
    show(&disk, 0, 8 << 20);
    let tracker = track(&disk);
    let look = || device::identity(&disk.device).unwrap();
    let before = look();
    assert_eq!(tracker.lost().unwrap(), None);
    show(&disk, 4 << 20, 8 << 20);
    assert!(!look().same_object(&before));
    assert_eq!(device::Identity { part: before.part, ..look() }, before);
    assert!(tracker.lost().unwrap().is_some_and(|why| why.contains("another part of its file")));
    tracker.checkpoint().unwrap();
    tracker.release(EPOCH).unwrap();
    assert!(tracker.lost().unwrap().is_some(), "an epoch mends nothing");
    remove(&disk.device).unwrap();
}

/// What was cut off is gone, and no write has said so.
#[test]
fn a_disk_that_was_smaller_for_a_while_is_not_what_it_was() {
    if !ready(&[]) {
        return;
    }
    let disk = Loop::new(8);
    let tracker = add(&disk.device, None).unwrap();
    let settle = || {
        tracker.checkpoint().unwrap();
        tracker.release(EPOCH).unwrap();
        assert_eq!(tracker.lost().unwrap(), None);
    };
    let resize = |mib: u64| {
        run(&format!("truncate -s {mib}M {}; losetup -c {}", disk.image.display(), disk.name()));
    };
    let smaller = || tracker.lost().unwrap().is_some_and(|why| why.contains("made smaller"));
    settle();
    resize(4);
    // Only where something is read or written meanwhile does every kernel show it.
    run(&format!("dd if={} of=/dev/null bs=4k count=1 iflag=direct status=none", disk.name()));
    resize(8);
    assert!(smaller());
    settle();
    // Larger for a while, it has what it had.
    resize(16);
    resize(8);
    assert_eq!(tracker.lost().unwrap(), None);
    let shown = folder(&BlockDevice::at(&disk.device).unwrap().number).join("capacity").exists();
    assert_eq!(tracker.unnoticed().unwrap().is_some(), !shown);
    if shown {
        resize(4);
        resize(8);
        assert!(smaller());
    } else {
        let what = "a disk that is made smaller and larger with nothing read between";
        testing::beyond(what, "this kernel shows no program its functions");
    }
    remove(&disk.device).unwrap();
}

#[test]
fn a_disk_of_64_tib_is_followed() {
    if !ready(&[]) {
        return;
    }
    // Where a file may be so large, with nothing in it.
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return testing::skipped("a disk of 64 TiB", "there is no /dev/shm for such a file");
    };
    let image = folder.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(64 << 40).unwrap();
    let disk = Loop::over(image, folder);
    let tracker = add(&disk.device, None).unwrap();
    assert_eq!((tracker.block_size(), tracker.size()), (64 << 10, 64 << 40));
    tracker.checkpoint().unwrap();
    tracker.release(EPOCH).unwrap();
    for block in [16, 5 << 30, (16 << 30) - 1] {
        write(&disk.device, block);
    }
    let began = Instant::now();
    let last = (1 << 30) - 1;
    assert_eq!(
        runs(&tracker.checkpoint().unwrap()),
        format!("[1..2, 335544320..335544321, {last}..{}]", last + 1)
    );
    tracker.release(EPOCH).unwrap();
    assert!(tracker.dirty().unwrap().is_clean());
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(tracker.lost().unwrap(), None);
    remove(&disk.device).unwrap();
}

#[test]
fn a_tracker_is_removed_under_load() {
    if !ready(&["fio"]) {
        return;
    }
    let disk = Loop::new(32);
    let load = start(&format!(
        "fio --name=t --filename={} --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=32 --size=32M \
         --time_based --runtime=30 --minimal",
        disk.name()
    ));
    for round in 0..8 {
        let tracker = add(&disk.device, Some(4096 << (round % 4))).unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while tracker.dirty().unwrap().is_clean() {
            assert!(Instant::now() < until, "nothing is recorded");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!tracker.checkpoint().unwrap().is_clean());
        tracker.release(EPOCH).unwrap();
        assert!(remove(&disk.device).unwrap());
        assert!(find(&disk.device).unwrap().is_none());
    }
    drop(load);
}

/// Ends the tracking of a disk, as no command of dsync does.
fn forget(disk: &Loop) {
    load::unpin(&folder(&BlockDevice::at(&disk.device).unwrap().number)).unwrap();
    run(&format!("blockdev --setrw {}", disk.name()));
}

/// Tracks a disk from an epoch on.
fn track(disk: &Loop) -> Box<dyn Tracker> {
    let tracker = find(&disk.device).unwrap().unwrap_or_else(|| add(&disk.device, None).unwrap());
    tracker.checkpoint().unwrap();
    tracker.release(EPOCH).unwrap();
    tracker
}

fn lost(restored: Restored, why: &str) {
    match restored {
        Restored::Lost(said) => assert!(said.contains(why), "{said}"),
        other => panic!("{other:?} although it {why}"),
    }
}

fn state() -> (tempfile::TempDir, device::Dir) {
    let folder = testing::temporary();
    let state = device::Dir::open(folder.path()).unwrap();
    (folder, state)
}

#[test]
fn a_saved_record_is_believed_only_if_nobody_wrote_since() {
    if !ready(&[]) {
        return;
    }
    let disk = Loop::new(128);
    let (_folder, state) = state();
    assert!(matches!(save(&disk.device, &state), Err(TrackError::Refused(_))));
    let end = |between: &dyn Fn()| {
        track(&disk);
        write(&disk.device, 20_000);
        save(&disk.device, &state).unwrap();
        forget(&disk);
        between();
        restore(&disk.device, &state).unwrap()
    };
    assert_eq!(end(&|| ()), Restored::Trusted);
    let tracker = find(&disk.device).unwrap().unwrap();
    assert_eq!((tracker.lost().unwrap(), tracker.released().unwrap()), (None, Some(EPOCH)));
    assert_eq!(runs(&tracker.dirty().unwrap()), "[20000..20001]");
    assert!(tracker.is_restored().unwrap());
    tracker.checkpoint().unwrap();
    tracker.release(EPOCH).unwrap();
    assert!(!tracker.is_restored().unwrap());
    drop(tracker);
    lost(end(&|| write(&disk.device, 30_000)), "was written");
    lost(end(&|| state.remove(saved::NAME).unwrap()), "no record was saved");
    let again = format!("losetup -d {0}; losetup {0} {1}", disk.name(), disk.image.display());
    lost(end(&|| drop(run(&again))), "another disk");
    remove(&disk.device).unwrap();
}

/// What is written after a record was saved would be in no record: it cannot be written, until what was saved is gone.
#[test]
fn nobody_writes_while_a_saved_record_is_there() {
    if !ready(&["blockdev"]) {
        return;
    }
    let disk = Loop::new(8);
    let (_folder, state) = state();
    let is_locked = || run(&format!("blockdev --getro {}", disk.name())) == "1";
    let is_saved = || state.open(saved::NAME, false).is_ok();
    let checkpoint = |tracker: &dyn Tracker| drop(tracker.checkpoint().unwrap());
    type GoOn<'a> = &'a dyn Fn(&dyn Tracker);
    let ways: [(&str, GoOn); 4] = [
        ("checkpoint", &checkpoint),
        ("restore", &|_| assert_eq!(restore(&disk.device, &state).unwrap(), Restored::WentOn)),
        ("save", &|_| {
            run(&format!("echo 0 >/sys/block/{}/queue/iostats", disk.device.file_name().unwrap().display()));
            let refused = save(&disk.device, &state).unwrap_err();
            run(&format!("echo 1 >/sys/block/{}/queue/iostats", disk.device.file_name().unwrap().display()));
            assert!(refused.to_string().contains("does not count"), "{refused}");
        }),
        ("remove", &|_| assert!(remove(&disk.device).unwrap())),
    ];
    for (what, go_on) in ways {
        let tracker = track(&disk);
        save(&disk.device, &state).unwrap();
        assert!(is_locked() && is_saved(), "{what}");
        let opened = std::fs::File::options().write(true).open(&disk.device).unwrap();
        opened.write_all_at(&[7; 4096], 0).unwrap_err();
        drop(opened);
        go_on(&*tracker);
        assert!(!is_locked() && !is_saved(), "{what}");
        write(&disk.device, 7);
    }
    // One that was read-only before stays so.
    track(&disk);
    run(&format!("blockdev --setro {}", disk.name()));
    save(&disk.device, &state).unwrap();
    assert_eq!(restore(&disk.device, &state).unwrap(), Restored::WentOn);
    assert!(is_locked() && !is_saved());
    run(&format!("blockdev --setrw {}", disk.name()));
    remove(&disk.device).unwrap();
}

#[test]
fn the_record_of_a_disk_in_use_is_not_saved() {
    if !ready(&["mkfs.ext4"]) {
        return;
    }
    let disk = Loop::new(16);
    let (_folder, state) = state();
    let refused = |why: &str| {
        let said = save(&disk.device, &state).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
        state.open(saved::NAME, false).err().expect("nothing is saved");
    };
    track(&disk);
    // As QEMU has a raw disk, without O_EXCL.
    let writer = std::fs::File::options().write(true).open(&disk.device).unwrap();
    refused("opened for writing by");
    writer.write_all_at(&[7; 4096], 0).unwrap();
    drop(writer);
    let mnt = disk.folder.path().join("mnt");
    run(&format!("mkfs.ext4 -qF {0}; mkdir {1}; mount {0} {1}", disk.name(), mnt.display()));
    refused("still in use");
    run(&format!("umount {}", mnt.display()));
    save(&disk.device, &state).unwrap();
    remove(&disk.device).unwrap();
}

/// Attaches a disk anew, to a kernel that counts from zero and has another boot id.
fn reboot(disk: &Loop) {
    // In the kernel's headers.
    const LOOP_CTL_REMOVE: libc::Ioctl = 0x4c81;
    load::unpin(&folder(&BlockDevice::at(&disk.device).unwrap().number)).unwrap();
    run(&format!("losetup -d {}", disk.name()));
    let control = std::fs::File::options().read(true).write(true).open("/dev/loop-control").unwrap();
    let number: libc::c_int = disk.name().strip_prefix("/dev/loop").unwrap().parse().unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        use std::os::fd::AsRawFd;
        // SAFETY: the argument is a number.
        if unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_REMOVE, number) } >= 0 {
            break;
        }
        assert!(Instant::now() < until, "{}", io::Error::last_os_error());
        std::thread::sleep(Duration::from_millis(20));
    }
    let id = disk.folder.path().join("boot_id");
    run(&format!(
        "umount /proc/sys/kernel/random/boot_id 2>/dev/null || true; cat /proc/sys/kernel/random/uuid >{0}.new; mv {0}.new {0}; mount --bind {0} /proc/sys/kernel/random/boot_id",
        id.display()
    ));
}

/// What another system did meanwhile with a disk shows in no count of this one.
#[test]
fn across_a_reboot_a_record_is_believed_only_where_a_mount_would_show() {
    if !ready(&["mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "sfdisk", "xfs_io"]) {
        return;
    }
    // In partitions that the host does not see, and one of which has nothing on it.
    let parts = |last: &str| {
        format!(
            "printf 'label: gpt\\n,120M\\n{last}' | sfdisk -q $image; losetup -o 1M --sizelimit 120M $other $image; mkfs.ext4 -qF $other; \
             losetup -d $other"
        )
    };
    let xfs = "mkfs.xfs -qf $image";
    let used = "mount $other $mnt; echo 1 >$mnt/x; umount $mnt";
    // Far from the edges, and with no more than the log to show it.
    let full = "mkfs.xfs -qf $image; mount -o loop $image $mnt; head -c 16M /dev/zero >$mnt/x; umount $mnt";
    let cut = "mount $other $mnt; echo 1 | dd of=$mnt/x bs=1M seek=8 conv=notrunc,fsync status=none; xfs_io -xc shutdown $mnt; \
               umount $mnt";
    let attach = "losetup $other $image;";
    let (in_part, none) = ("losetup -o 1M --sizelimit 120M $other $image;", "");
    let cases = [
        ("mkfs.ext4 -qF $image", attach, none, ""),
        ("mkfs.ext4 -qF $image", attach, used, "was mounted"),
        (xfs, attach, none, ""),
        (xfs, attach, used, "was mounted"),
        (full, attach, cut, "was mounted"),
        ("mkfs.btrfs -qf $image", attach, none, ""),
        ("mkfs.btrfs -qf $image", attach, used, "was mounted"),
        (&parts(""), in_part, none, ""),
        (&parts(""), in_part, used, "was mounted"),
        (&parts(",8M\\n"), in_part, none, "that does not have ext4, XFS or Btrfs"),
        (":", attach, none, "that does not have ext4, XFS or Btrfs"),
        ("printf 'LUKS\\272\\276' | dd of=$image conv=notrunc status=none", attach, none, "LUKS"),
    ];
    for (make, attach, between, why) in cases {
        let folder = testing::temporary();
        let image = folder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(320 << 20).unwrap();
        let disk = Loop::over(image, folder);
        let (_folder, state) = state();
        let other = format!("/dev/loop{}", 100 + disk.name()["/dev/loop".len()..].parse::<u32>().unwrap());
        let (image, mnt) = (disk.image.display(), disk.folder.path().join("mnt"));
        std::fs::create_dir(&mnt).unwrap();
        let names = format!("image={image}; other={other}; mnt={};", mnt.display());
        run(&format!("losetup -d {0}; {names} {make}; losetup {0} {image}", disk.name()));
        track(&disk);
        save(&disk.device, &state).unwrap();
        reboot(&disk);
        if !between.is_empty() {
            run(&format!("{names} {attach} {between}; losetup -d $other"));
        }
        run(&format!("losetup {0} {image}", disk.name()));
        let restored = restore(&disk.device, &state).unwrap();
        match why {
            "" => assert_eq!(restored, Restored::Trusted, "{make}"),
            _ => lost(restored, why),
        }
        remove(&disk.device).unwrap();
    }
}

/// A tracker of the disk that stood there before follows nothing any more: it makes way, with or without a saved record.
#[test]
fn a_disk_that_was_attached_anew_is_followed_again() {
    if !ready(&[]) {
        return;
    }
    let disk = Loop::new(8);
    let state = testing::temporary();
    let state = device::Dir::open(state.path()).unwrap();
    for saved in [false, true] {
        let _ = remove(&disk.device);
        let tracker = add(&disk.device, None).unwrap();
        tracker.checkpoint().unwrap();
        tracker.release(EPOCH).unwrap();
        if saved {
            save(&disk.device, &state).unwrap();
        }
        run(&format!("losetup -d {0}; losetup {0} {1}", disk.name(), disk.image.display()));
        let restored = restore(&disk.device, &state).unwrap();
        assert!(matches!(restored, Restored::Lost(_)), "{restored:?}");
        let tracker = find(&disk.device).unwrap().unwrap();
        tracker.checkpoint().unwrap();
        tracker.release(EPOCH).unwrap();
        write(&disk.device, 5);
        assert_eq!((tracker.lost().unwrap(), runs(&tracker.dirty().unwrap())), (None, "[5..6]".into()));
    }
    remove(&disk.device).unwrap();
}

#[test]
fn what_can_not_be_tracked_is_refused() {
    let folder = testing::temporary();
    let file = folder.path().join("file");
    std::fs::write(&file, [0; 8192]).unwrap();
    let said = add(&file, None).err().unwrap().to_string();
    assert!(said.contains("dsync serve"), "{said}");
    assert!(matches!(add(&folder.path().join("missing"), None), Err(TrackError::Device(_))));
    assert!(find(&file).unwrap().is_none());
    assert!(find(&folder.path().join("missing")).unwrap().is_none());
    if !ready(&[]) {
        return;
    }
    let disk = Loop::new(8);
    // Where the file system of pins cannot be mounted.
    run("umount /sys/fs/bpf; mount -t tmpfs none /sys/fs");
    let said = add(&disk.device, None).err().unwrap().to_string();
    assert!(said.contains("mount -t bpf"), "{said}");
    run("umount /sys/fs");
    // Where it is only not mounted yet, as without systemd.
    run("while mountpoint -q /sys/fs/bpf; do umount /sys/fs/bpf; done");
    add(&disk.device, None).unwrap();
    let mounts = std::fs::read_to_string("/proc/thread-self/mounts").unwrap();
    let bpf = mounts.lines().find(|line| line.starts_with("bpf /sys/fs/bpf bpf ")).expect(&mounts);
    assert!(bpf.contains("nosuid") && bpf.contains("mode=700"), "{bpf}");
    remove(&disk.device).unwrap();
}

/// Whoever changes the source must run `make bpf`.
#[test]
fn the_object_is_built_from_the_source() {
    let version = Command::new("clang").arg("--version").output();
    let Ok(version) = version else {
        return testing::skipped("bpf/track.bpf.o", "there is no clang to build it with");
    };
    let version = String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default().to_owned();
    if !version.contains(" 14.0.6") {
        return testing::beyond(
            "bpf/track.bpf.o",
            &format!("it was built by clang 14.0.6, here is {version}"),
        );
    }
    let folder = testing::temporary();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    run(&format!(
        "cp -r {0}/bpf {0}/Makefile {0}/scripts {0}/Cargo.toml {1}; cd {1}; cp bpf/track.bpf.o old; make -s bpf; \
         cmp old bpf/track.bpf.o",
        root.display(),
        folder.path().display()
    ));
}

/// Where an end was not seen, the write is marked in every record, and told apart from what was written since.
#[test]
fn a_write_that_is_taken_to_be_in_flight_is_told() {
    if !ready(&[]) {
        return;
    }
    let disk = Loop::new(8);
    let number = BlockDevice::at(&disk.device).unwrap().number;
    add(&disk.device, None).unwrap();
    let tracker = BpfTracker::open(&folder(&number), &disk.device).unwrap();
    assert!(tracker.in_flight().is_none(), "there was no checkpoint yet");
    // No bio lies at that address.
    sys::put(tracker.flight.as_fd(), 8, [5u64, 6]).unwrap();
    for _ in 0..2 {
        tracker.checkpoint().unwrap();
        tracker.release(EPOCH).unwrap();
        write(&disk.device, 9);
        assert_eq!(runs(&tracker.dirty().unwrap()), "[5..7, 9..10]");
        assert_eq!(runs(&tracker.in_flight().unwrap()), "[5..7]");
    }
    assert_eq!(tracker.lost().unwrap(), None);
    remove(&disk.device).unwrap();
}

/// Who looks for a tracker while it is made or removed finds it whole, or none.
#[test]
fn no_part_of_a_tracker_is_found() {
    if !ready(&["losetup"]) {
        return;
    }
    let disk = Loop::new(1);
    let ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..10 {
                drop(add(&disk.device, None).unwrap());
                assert!(remove(&disk.device).unwrap());
            }
            ended.store(true, SeqCst);
        });
        while !ended.load(SeqCst) {
            // One that is removed after it was found says so in other words.
            let lost = find(&disk.device).unwrap().and_then(|found| found.lost().ok()?);
            let broken = lost.as_ref().is_some_and(|why| why.contains("is broken"));
            assert!(!broken, "{}", lost.unwrap_or_default());
        }
    });
}
