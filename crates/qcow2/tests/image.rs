//! The disk in a qcow2 file, with QEMU's own tools as the oracle.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use device::Disk;
use qcow2::{Image, ImageHeader, Use};

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

fn image(path: &Path, access: Use) -> Arc<Image> {
    Arc::new(Image::open(open(path), path, access).unwrap())
}

/// A new one of this size.
fn new(folder: &Path, len: u64) -> (PathBuf, Arc<Image>) {
    let path = folder.join("vm.qcow2");
    File::create(&path).unwrap();
    qcow2::create(&open(&path)).unwrap();
    let disk = image(&path, Use::Write);
    disk.resize(len).unwrap();
    (path, disk)
}

fn qemu_img(what: &str, path: &Path) -> String {
    let done = Command::new("qemu-img").args([what, "-f", "qcow2"]).arg(path).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{text}");
    text
}

/// True if no process has it open for QEMU.
fn is_left_alone(path: &Path) -> bool {
    device::lock_image(path, device::Access::Write).is_ok()
}

#[test]
fn it_is_a_disk_as_any_other() {
    // Thousands of flushes.
    let temp = tempfile::tempdir_in("/dev/shm").unwrap();
    testing::contract(|len| {
        let folder = tempfile::tempdir_in(temp.path()).unwrap();
        new(&folder.keep(), len.next_multiple_of(512)).1
    });
    for folder in temp.path().read_dir().unwrap() {
        let path = folder.unwrap().path().join("vm.qcow2");
        assert!(qemu_img("check", &path).contains("No errors were found"));
    }
}

#[test]
fn nothing_moves_its_times_once_it_is_settled() {
    let temp = tempfile::tempdir().unwrap();
    let (path, disk) = new(temp.path(), 64 << 20);
    let times = || {
        let now = path.metadata().unwrap();
        (now.mtime(), now.mtime_nsec(), now.ctime(), now.ctime_nsec(), now.len())
    };
    for cluster in 0..20 {
        disk.write_at((cluster * 3) << 20, &[cluster as u8 + 1; 70_000]).unwrap();
    }
    disk.settle().unwrap();
    let settled = times();
    let mut read = [0; 70_000];
    disk.read_at((19 * 3) << 20, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 20));
    disk.settle().unwrap();
    drop(disk);
    assert_eq!(times(), settled, "neither reading nor closing writes");
    assert!(qemu_img("check", &path).contains("No errors were found"));
    drop(image(&path, Use::Write));
    drop(image(&path, Use::Read));
    assert_eq!(times(), settled, "nor does opening");
}

#[test]
fn it_grows_and_shrinks_under_a_queue() {
    let temp = tempfile::tempdir().unwrap();
    let (path, disk) = new(temp.path(), 1 << 20);
    let mut queue = disk.clone().queue(4).unwrap();
    let mut write = |offset: u64| {
        let pieces = [device::Piece { offset, len: 4096 }].into_iter().collect();
        let buf = device::Buf::from(&[9; 4096][..]);
        queue.submit(device::Request {
            kind: device::RequestKind::Write { fua: false },
            pieces,
            buf,
            token: 1,
        });
        queue.start();
        queue.complete(true).unwrap().result
    };
    write(0).unwrap();
    assert!(write(2 << 20).is_err());
    disk.resize(4 << 20).unwrap();
    write(2 << 20).unwrap();
    disk.resize(2 << 20).unwrap();
    assert!(write(2 << 20).is_err());
    assert_eq!(disk.len(), 2 << 20);
    assert_eq!(ImageHeader::of(&open(&path)).unwrap().unwrap().size, 2 << 20);
    let odd = disk.resize(1000).unwrap_err();
    assert!(odd.to_string().contains("512") && disk.read_at(0, &mut [0]).is_ok(), "{odd}");
}

#[test]
fn nothing_is_freed_while_it_is_written() {
    let temp = tempfile::tempdir_in("/dev/shm").unwrap();
    let (path, disk) = new(temp.path(), 64 << 20);
    let mut queue = disk.clone().queue(2).unwrap();
    let write = device::RequestKind::Write { fua: false };
    let zero = device::RequestKind::Zero { unmap: true, fua: false, fast: false };
    for cluster in (0..64 << 20).step_by(65536) {
        // Zeroes that stay allocated: the write goes to that place, and with it under way all of the cluster is zeroes yet.
        disk.write_at(cluster, &[1; 65536]).unwrap();
        disk.zero(cluster, 65536, false, false).unwrap();
        // Beside the write, and all of the cluster.
        let zeroed = if cluster % (128 << 10) == 0 { (cluster + 32768, 4096) } else { (cluster, 65536) };
        for (kind, (offset, len)) in [(write, (cluster, 4096)), (zero, zeroed)] {
            let pieces = [device::Piece { offset, len }].into_iter().collect();
            queue.submit(device::Request { kind, pieces, buf: device::Buf::from(&[2; 4096][..]), token: 0 });
        }
        queue.start();
        for _ in 0..2 {
            queue.complete(true).unwrap().result.unwrap();
        }
    }
    drop(queue);
    drop(disk);
    assert!(qemu_img("check", &path).contains("No errors were found"));
}

#[test]
fn what_a_kill_left_unused_is_freed() {
    let temp = tempfile::tempdir().unwrap();
    let (path, disk) = new(temp.path(), 4 << 20);
    disk.write_at(0, &[1; 65536]).unwrap();
    disk.write_at(1 << 20, &[2; 65536]).unwrap();
    drop(disk);
    // As if the second cluster's entry had not been written: the second table, by the place that the head says.
    let number = |at| {
        let mut bytes = [0; 8];
        open(&path).read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes) & 0x00ff_ffff_ffff_fe00
    };
    open(&path).write_all_at(&[0; 8], number(number(40)) + 16 * 8).unwrap();
    let leaks = || {
        !Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(&path).status().unwrap().success()
    };
    assert!(leaks());
    let disk = image(&path, Use::Write);
    disk.reclaim().unwrap();
    let mut read = [0; 65536];
    disk.read_at(0, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 1));
    drop(disk);
    assert!(!leaks());
}

#[test]
fn another_user_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let (path, disk) = new(temp.path(), 1 << 20);
    drop(disk);
    let other = device::lock_image(&path, device::Access::Write).unwrap();
    let refused = Image::open(open(&path), &path, Use::Write).err().unwrap();
    assert_eq!(refused.kind(), std::io::ErrorKind::ResourceBusy);
    let text = refused.to_string();
    assert!(text.contains("vm.qcow2") && text.contains(&format!("pid {}", std::process::id())), "{text}");
    drop(other);
    // A process that another test has just forked holds the lock up to its exec.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let writer = loop {
        match Image::open(open(&path), &path, Use::Write) {
            Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy && std::time::Instant::now() < until => {}
            opened => break Arc::new(opened.unwrap()),
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    writer.write_at(4096, &[5; 512]).unwrap();
    writer.flush().unwrap();
    let reader = image(&path, Use::ReadBesideWriter);
    let mut read = [0; 512];
    reader.read_at(4096, &mut read).unwrap();
    assert_eq!(read, [5; 512]);
    assert!(reader.write_at(0, &[1]).is_err());
}

#[test]
fn what_qemu_says_is_told_and_none_is_left() {
    let temp = tempfile::tempdir().unwrap();
    let (path, disk) = new(temp.path(), 1 << 20);
    assert!(!is_left_alone(&path));
    drop(disk);
    assert!(is_left_alone(&path));
    // Clusters of 32 bytes.
    open(&path).write_all_at(&[5], 23).unwrap();
    let refused = Image::open(open(&path), &path, Use::Write).err().unwrap().to_string();
    assert!(refused.contains("vm.qcow2") && !refused.contains("/proc/"), "{refused}");
    assert!(is_left_alone(&path));
}
