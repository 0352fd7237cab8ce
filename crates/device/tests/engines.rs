//! Each engine against the common contract, and what `open` refuses.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use device::{
    Access, Buf, DeviceErrorKind, Disk, DiskOptions, Overlay, Piece, RamDisk, Request, RequestKind, adopt,
    identity, in_use, lock_image, open, open_without_uring,
};
use testing::faulty::{FaultyDisk, Outage, Power};
use testing::{Loop, Mount, contract, run, skipped};

const WRITE: DiskOptions = DiskOptions { write: true, direct: false, exclusive: false };
const DIRECT: DiskOptions = DiskOptions { write: true, direct: true, exclusive: false };

/// Makes files of any size in a folder.
struct Files(tempfile::TempDir, AtomicUsize);

impl Files {
    fn new() -> Files {
        Files(testing::temporary(), AtomicUsize::new(0))
    }

    fn make(&self, size: u64) -> PathBuf {
        let path = self.0.path().join(format!("disk{}", self.1.fetch_add(1, Ordering::Relaxed)));
        File::create(&path).unwrap().set_len(size).unwrap();
        path
    }
}

/// A loop device over a file of its own.
struct Looped {
    device: Loop,
    backing: tempfile::NamedTempFile,
}

impl Looped {
    /// `None`, and a line that says so, where this cannot be had.
    fn new(size: u64) -> Option<Looped> {
        Looped::with(&[], size)
    }

    fn with(options: &[&str], size: u64) -> Option<Looped> {
        let backing = tempfile::NamedTempFile::new().unwrap();
        backing.as_file().set_len(size.next_multiple_of(512)).unwrap();
        let device = Loop::with(options, backing.path());
        if device.is_none() {
            skip("loop devices need root and losetup");
        }
        Some(Looped { device: device?, backing })
    }

    fn path(&self) -> &Path {
        self.device.device()
    }
}

/// A new file system on a device, mounted; `None` where that is not allowed.
fn formatted(device: &Path, place: &Path) -> Option<Mount> {
    run("mkfs.ext4", ["-q".as_ref(), device.as_os_str()]).and_then(|_| Mount::new(&[], device, place))
}

/// Says that the test of this thread is left out.
fn skip(why: &str) {
    skipped(std::thread::current().name().unwrap_or("disks"), why);
}

#[test]
fn ram_keeps_the_contract() {
    contract(|size| Arc::new(RamDisk::new(size)));
}

#[test]
fn overlays_keep_the_contract_and_what_is_beneath() {
    let folder = testing::on_disk();
    contract(|size| Arc::new(Overlay::new(Arc::new(RamDisk::new(size)), folder.path()).unwrap()));
    let base = Arc::new(RamDisk::from_bytes(&[9; 70_000]));
    let disk = Overlay::new(base.clone(), folder.path()).unwrap();
    disk.write_at(5000, &[1; 10_000]).unwrap();
    disk.zero(40_000, 20_000, true, false).unwrap();
    let mut bytes = vec![0; 70_000];
    disk.read_at(0, &mut bytes).unwrap();
    let mut expected = vec![9; 70_000];
    expected[5000..15_000].fill(1);
    expected[40_000..60_000].fill(0);
    assert!(bytes == expected);
    base.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 9));
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
    // Zeroes without a hole would take room that nobody has asked for.
    let large = Overlay::new(Arc::new(RamDisk::new(16 << 20)), folder.path()).unwrap();
    large.zero(0, 16 << 20, false, false).unwrap();
    assert_eq!(large.taken().unwrap(), 0);
    disk.give_up().unwrap();
    assert!(disk.read_at(5000, &mut bytes[..10]).is_err() && disk.read_at(0, &mut bytes[..10]).is_ok());
}

#[test]
fn buffered_files_keep_the_contract() {
    let files = Files::new();
    contract(|size| open(&files.make(size), &WRITE).unwrap());
}

#[test]
fn direct_files_keep_the_contract() {
    let files = Files::new();
    if open(&files.make(8192), &DIRECT).unwrap().align() == 1 {
        return skip(&format!("no direct I/O in {}", files.0.path().display()));
    }
    match io_uring::IoUring::new(8) {
        Err(e) => skip(&format!("no io_uring: {e}")),
        Ok(_) => contract(|size| open(&files.make(size), &DIRECT).unwrap()),
    }
}

#[test]
fn threads_keep_the_contract() {
    let files = Files::new();
    contract(|size| open_without_uring(&files.make(size), &DIRECT).unwrap());
}

#[test]
fn faulty_disks_without_faults_keep_the_contract() {
    for outage in [Outage::Kill, Outage::PowerCut] {
        let power = Power::new(outage);
        contract(|size| Arc::new(FaultyDisk::new(&power, Arc::new(RamDisk::new(size)))));
        let shuffled = |size| {
            let disk = FaultyDisk::new(&power, Arc::new(RamDisk::new(size)));
            disk.shuffle_completions(size);
            Arc::new(disk) as Arc<dyn Disk>
        };
        contract(shuffled);
    }
}

#[test]
fn adopted_files_keep_the_contract() {
    let files = Files::new();
    contract(|size| {
        let path = files.make(size);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        adopt(file, &path, &DIRECT).unwrap()
    });
}

#[test]
fn block_devices_keep_the_contract() {
    let Some(device) = Looped::new(6 << 20) else { return };
    contract(|_| {
        let disk = open(device.path(), &DiskOptions { exclusive: true, ..WRITE }).unwrap();
        disk.zero(0, disk.len(), true, false).unwrap();
        disk
    });
    contract(|_| {
        let disk = open_without_uring(device.path(), &WRITE).unwrap();
        disk.zero(0, disk.len(), false, false).unwrap();
        disk
    });
}

#[test]
fn a_block_devices_own_cache_is_not_asked() {
    let Some(device) = Looped::new(1 << 20) else { return };
    // Another program's buffered reader fills the cache; the device then changes below it.
    let cached = File::open(device.path()).unwrap();
    let mut byte = [1];
    cached.read_at(&mut byte, 0).unwrap();
    let disk = open(device.path(), &WRITE).unwrap();
    assert_eq!(disk.len(), 1 << 20);
    device.backing.as_file().write_at(&[7; 4096], 0).unwrap();
    device.backing.as_file().sync_all().unwrap();
    let mut found = [0; 4096];
    disk.read_at(0, &mut found).unwrap();
    assert_eq!(found[4095], 7);
    disk.read_at(100, &mut found[..5]).unwrap();
    assert_eq!(found[4], 7);
}

/// What is asked for in memory is not brought there; what is there is the file's content, whoever wrote it last.
#[test]
fn only_what_is_cached_is_read_from_the_cache() {
    let files = Files::new();
    let path = files.make(1 << 20);
    let disk = open(&path, &DiskOptions { write: true, direct: true, ..DiskOptions::default() }).unwrap();
    let mut buf = Buf::new(300_000);
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    if !disk.read_cached(4097, &mut buf) {
        return skip("this kernel does not tell what its page cache holds");
    }
    assert!(buf.iter().all(|b| *b == 7));
    assert!(!disk.read_cached((1 << 20) - 5, &mut buf[..10]), "beyond the end");
    disk.write_at(8192, &Buf::from(&[9; 8192][..])).unwrap();
    disk.flush().unwrap();
    assert!(!disk.read_cached(0, &mut buf[..65536]) || buf[8192..16384].iter().all(|b| *b == 9));
    let file = std::fs::File::open(&path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    for _ in 0..2 {
        assert!(!disk.read_cached(0, &mut buf), "nobody has read it");
    }
}

#[test]
fn what_is_used_elsewhere_is_refused_and_named() {
    let Some(device) = Looped::new(16 << 20) else { return };
    let backing = device.backing.path();
    let said = in_use(backing).unwrap();
    assert_eq!(said, format!("the backing of {}", device.path().display()));
    let exclusive = DiskOptions { exclusive: true, ..WRITE };
    let error = open(backing, &exclusive).err().unwrap();
    assert_eq!(error.kind(), DeviceErrorKind::InUse);
    assert!(error.to_string().contains(&said), "{error}");

    assert_eq!(in_use(device.path()), None);
    let first = open(device.path(), &exclusive).unwrap();
    let error = open(device.path(), &exclusive).err().unwrap();
    assert_eq!(error.kind(), DeviceErrorKind::InUse);
    assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
    drop(first);

    let folder = testing::temporary();
    let Some(mount) = formatted(device.path(), folder.path()) else { return skip("cannot mount here") };
    let said = in_use(device.path());
    let refused = open(device.path(), &exclusive).map(|_| ());
    drop(mount);
    assert_eq!(said, Some(format!("mounted on {}", folder.path().display())));
    let error = refused.unwrap_err();
    assert!(error.to_string().contains(&said.unwrap()), "{error}");
    assert_eq!(in_use(device.path()), None);
}

#[test]
fn qemu_and_we_refuse_each_other() {
    if Command::new("qemu-io").arg("--version").output().is_err() {
        return skip("no qemu-io");
    }
    let files = Files::new();
    let path = files.make(1 << 20);
    let qemu = |access: &[&str], command: &str| {
        let output = Command::new("qemu-io")
            .args(["-f", "raw", "-c", command])
            .args(access)
            .arg(&path)
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        (output.status.success() && !text.contains("lock"), text)
    };
    // Ours first.
    let reading = lock_image(&path, Access::ReadShared).unwrap();
    let (fine, text) = qemu(&["-r"], "read 0 4k");
    assert!(fine, "{text}");
    let (fine, text) = qemu(&[], "write 0 4k");
    assert!(!fine, "{text}");
    drop(reading);
    let writing = lock_image(&path, Access::Write).unwrap();
    // A reader of a raw image minds no writer.
    assert!(qemu(&["-r"], "read 0 4k").0);
    assert!(!qemu(&[], "write 0 4k").0);
    drop(writing);
    // Theirs first: a server that stays until it is ended.
    for (read_only, allowed) in [(true, [Access::ReadShared].as_slice()), (false, &[])] {
        let socket = files.0.path().join("socket");
        let mut command = Command::new("qemu-nbd");
        command.args(["-f", "raw", "--persistent", "-k"]).arg(&socket).arg(&path);
        if read_only {
            command.arg("-r");
        }
        let mut server = command.spawn().unwrap();
        let begin = std::time::Instant::now();
        // It listens before it opens the image, and greets after.
        let greeted = |socket: &Path| {
            let mut stream = std::os::unix::net::UnixStream::connect(socket)?;
            stream.read_exact(&mut [0; 8])
        };
        while greeted(&socket).is_err() {
            assert!(begin.elapsed().as_secs() < 20, "qemu-nbd doesn't start");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let found =
            [Access::ReadShared, Access::Write].map(|access| (access, lock_image(&path, access).map(|_| ())));
        server.kill().unwrap();
        server.wait().unwrap();
        let _ = std::fs::remove_file(&socket);
        for (access, result) in found {
            match result {
                Ok(()) => {
                    assert!(allowed.contains(&access), "{access:?} beside qemu-nbd, read-only {read_only}")
                }
                Err(e) => {
                    assert!(!allowed.contains(&access) && e.kind() == DeviceErrorKind::InUse, "{e}");
                    assert!(e.to_string().contains("qemu-nbd, pid"), "{e}");
                }
            }
        }
    }
    assert!(qemu(&[], "write 0 4k").0);
}

#[test]
fn what_is_no_disk_is_refused() {
    let files = Files::new();
    let folder = files.0.path();
    let refused = |path: &Path, options: &DiskOptions, kind, says: &str| {
        let error = open(path, options).err().unwrap();
        let text = error.to_string();
        assert_eq!(error.kind(), kind, "{text}");
        let path = path.display().to_string();
        assert!(text.contains(&path) && text.contains(says), "{text}");
        assert!(text.matches(": ").count() >= 2, "no way out: {text}");
        assert_eq!(std::io::Error::from(error).to_string(), text);
    };
    refused(&folder.join("missing"), &WRITE, DeviceErrorKind::Missing, "check the path");
    refused(&files.make(1).join("below"), &WRITE, DeviceErrorKind::Missing, "check the path");
    refused(folder, &WRITE, DeviceErrorKind::NotADisk, "directory");
    refused(Path::new("/dev/null"), &WRITE, DeviceErrorKind::NotADisk, "character device");
    let pipe = folder.join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    refused(&pipe, &WRITE, DeviceErrorKind::NotADisk, "pipe");
    let socket = folder.join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    refused(&socket, &WRITE, DeviceErrorKind::NotADisk, "socket");
    let mine = folder.join("mine");
    File::options().write(true).create(true).truncate(true).mode(0o400).open(&mine).unwrap();
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::thread::scope(|scope| {
        let denied = scope.spawn(|| {
            // Root is denied nothing, so becomes nobody: this thread alone.
            let nobody = rustix::thread::Uid::from_raw(65534);
            if rustix::process::geteuid().is_root() {
                rustix::thread::set_thread_uid(nobody).unwrap();
            }
            refused(&mine, &WRITE, DeviceErrorKind::Denied, "owner");
        });
        denied.join().unwrap();
    });
}

#[test]
fn a_disk_for_reading_is_not_written() {
    let files = Files::new();
    for direct in [false, true] {
        let path = files.make(8192);
        let disk = open(&path, &DiskOptions { direct, ..DiskOptions::default() }).unwrap();
        for result in
            [disk.write_at(0, &[1]), disk.zero(0, 1, true, false), disk.discard(0, 1), disk.resize(1)]
        {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        }
    }
}

#[test]
fn a_file_that_shrinks_meanwhile_is_no_success() {
    let files = Files::new();
    for options in [WRITE, DIRECT] {
        let path = files.make(1 << 20);
        let disk = open(&path, &options).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(100_000).unwrap();
        let mut queue = Arc::clone(&disk).queue(8).unwrap();
        for (offset, fine) in [(0, true), (98_304, false), (500_000, false)] {
            let pieces = [Piece { offset, len: 8192 }].into_iter().collect();
            let buf = Buf::new(8192);
            queue.submit(Request { kind: RequestKind::Read, pieces, buf, token: 0 });
            let result = queue.complete(true).unwrap().result;
            assert_eq!(result.is_ok(), fine, "{options:?} {offset}");
            if let Err(e) = result {
                assert_eq!(e.kind(), std::io::ErrorKind::UnexpectedEof, "{e}");
                assert!(e.to_string().contains(&path.display().to_string()), "{e}");
            }
        }
    }
}

#[test]
fn punched_and_zeroed_space_is_given_back() {
    let files = Files::new();
    for options in [WRITE, DIRECT] {
        let disk = open(&files.make(8 << 20), &options).unwrap();
        assert_eq!(disk.allocated(0).unwrap(), None);
        disk.write_at(0, &vec![1; 8 << 20]).unwrap();
        disk.zero(1 << 20, 1 << 20, true, true).unwrap();
        disk.discard(4 << 20, 1 << 20).unwrap();
        disk.flush().unwrap();
        let mut runs = Vec::new();
        while let Some(run) = disk.allocated(runs.last().map_or(0, |r: &std::ops::Range<u64>| r.end)).unwrap()
        {
            runs.push(run);
        }
        assert_eq!(runs, [0..1 << 20, 2 << 20..4 << 20, 5 << 20..8 << 20]);
    }
}

#[test]
fn plain_calls_beside_a_busy_queue() {
    // Kernels exist whose direct writes end only in the thread that began them, while a zeroing waits for their end.
    let files = Files::new();
    let disk = open(&files.make(8 << 20), &DIRECT).unwrap();
    disk.write_at(0, &vec![1; 8 << 20]).unwrap();
    let (say, done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut queue = Arc::clone(&disk).queue(64).unwrap();
        for round in 0..100u64 {
            for n in 0..64 {
                let pieces = [Piece { offset: n * 65536, len: 65536 }].into_iter().collect();
                let kind = RequestKind::Write { fua: false };
                queue.submit(Request { kind, pieces, buf: Buf::new(65536), token: 0 });
            }
            queue.start();
            disk.zero(5 << 20, 100_000, round % 2 == 0, false).unwrap();
            disk.discard(6 << 20, 100_000).unwrap();
            disk.resize((8 << 20) - round).unwrap();
            disk.write_at(7 << 20, &[3; 5000]).unwrap();
            disk.flush().unwrap();
            while let Some(done) = queue.complete(true) {
                done.result.unwrap();
            }
        }
        say.send(()).unwrap();
    });
    done.recv_timeout(std::time::Duration::from_secs(60)).expect("the thread hangs");
}

#[test]
fn a_new_medium_is_another_device() {
    let Some(device) = Looped::new(1 << 20) else { return };
    let first = identity(device.path()).unwrap();
    assert!(first.is_block() && first.size == 1 << 20 && first.ino == 0);
    assert_eq!(identity(device.path()).unwrap(), first);
    drop(device);
    let Some(device) = Looped::new(1 << 20) else { return };
    let second = identity(device.path()).unwrap();
    assert!(!second.same_object(&first));
    if first.diskseq.is_none() {
        skip("this kernel doesn't number media");
    } else {
        assert_ne!(second.diskseq, first.diskseq);
    }
}

#[test]
fn a_read_only_device_is_denied_as_such() {
    let Some(device) = Looped::with(&["--read-only"], 1 << 20) else { return };
    let error = open(device.path(), &WRITE).err().unwrap();
    assert_eq!(error.kind(), DeviceErrorKind::Denied);
    assert!(error.to_string().contains("it is read-only"), "{error}");
    open(device.path(), &DiskOptions::default()).unwrap();
}

#[test]
fn a_mounted_partition_takes_its_disk_and_not_its_sibling() {
    let Some(device) = Looped::with(&["--partscan"], 16 << 20) else { return };
    for (n, start) in [("1", "2048"), ("2", "10240")] {
        let _ = Command::new("addpart").arg(device.path()).args([n, start, "8192"]).status();
    }
    let part = |n| PathBuf::from(format!("{}p{n}", device.path().display()));
    let folder = testing::temporary();
    let Some(mount) = formatted(&part(1), folder.path()) else {
        return skip("cannot make and mount partitions here");
    };
    let said = [part(1), device.path().to_path_buf(), part(2)].map(|path| in_use(&path));
    let sequences = [part(1), device.path().to_path_buf()].map(|path| identity(&path).unwrap().diskseq);
    drop(mount);
    let mounted = Some(format!("mounted on {}", folder.path().display()));
    assert_eq!(said, [mounted.clone(), mounted, None]);
    assert_eq!(sequences[0], sequences[1]);
}

#[test]
fn neighbours_in_a_sector_lose_nothing() {
    let Some(device) = Looped::new(1 << 20) else { return };
    let disk = open(device.path(), &WRITE).unwrap();
    std::thread::scope(|scope| {
        for half in 0..2u64 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..500u64 {
                    let bytes = [round as u8; 256];
                    disk.write_at(half * 256, &bytes).unwrap();
                    let mut found = [0; 256];
                    disk.read_at(half * 256, &mut found).unwrap();
                    assert_eq!(found, bytes, "half {half}, round {round}");
                }
            });
        }
    });
}

/// The bytes outside of what both write are those of the request that wrote them.
fn parts_beside_whole_units(disk: Arc<dyn Disk>, what: &str) {
    const LEN: u64 = 128 << 10;
    let mut queue = disk.clone().queue(64).unwrap();
    for round in 0..200u64 {
        let whole = (round + 1) as u8;
        let at = round * 997 % (LEN - 700);
        let len = [100, 512, 600][round as usize % 3];
        let at = if len == 512 { at / 512 * 512 } else { at };
        for (offset, len, byte) in [(0, LEN, whole), (at, len, !whole)] {
            let mut buf = Buf::new(len as usize);
            buf.fill(byte);
            let (kind, pieces) = (RequestKind::Write { fua: false }, [Piece { offset, len }].into());
            queue.submit(Request { kind, pieces, buf, token: offset });
            queue.start();
        }
        while let Some(done) = queue.complete(true) {
            done.result.unwrap_or_else(|e| panic!("{what}: round {round}: {e}"));
        }
        disk.flush().unwrap_or_else(|e| panic!("{what}: round {round}: {e}"));
        let mut found = vec![0; LEN as usize];
        disk.read_at(0, &mut found).unwrap();
        let other = found
            .iter()
            .enumerate()
            .find(|(place, byte)| **byte != whole && !(at..at + len).contains(&(*place as u64)));
        assert!(other.is_none(), "{what}: round {round}: {len} bytes at {at}: {other:?} is not {whole}");
    }
}

/// Two queues change the two halves of a unit at the same time, one by zeroing: neither undoes what the other has done.
fn zeroes_beside_a_part(disk: &Arc<dyn Disk>, what: &str) {
    let request = |kind, offset, len: u64| {
        let mut buf = Buf::new(if matches!(kind, RequestKind::Write { .. }) { len as usize } else { 0 });
        buf.fill(7);
        Request { kind, pieces: [Piece { offset, len }].into(), buf, token: 0 }
    };
    let zero = RequestKind::Zero { unmap: false, fast: false, fua: false };
    let kinds = [(zero, 0, 300), (RequestKind::Write { fua: false }, 400, 100)];
    for start in (0..disk.len() - 511).step_by(512).take(1000) {
        disk.write_at(start, &[9; 512]).unwrap();
        std::thread::scope(|scope| {
            for (kind, from, len) in kinds {
                scope.spawn(move || {
                    let mut queue = disk.clone().queue(4).unwrap();
                    queue.submit(request(kind, start + from, len));
                    queue.start();
                    queue.complete(true).unwrap().result.unwrap();
                });
            }
        });
        let mut found = [1; 512];
        disk.read_at(start, &mut found).unwrap();
        assert!(found[..300].iter().all(|byte| *byte == 0), "{what}: zeroes at {start} are lost");
        assert!(found[400..500].iter().all(|byte| *byte == 7), "{what}: a write at {start} is lost");
    }
}

/// A zeroing that is not fast is refused before it has changed anything.
#[test]
fn a_refused_zeroing_changes_nothing() {
    // tmpfs has no command for zeroes.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = folder.path().join("image");
    std::fs::write(&image, [5; 16384]).unwrap();
    for disk in [open(&image, &DIRECT).unwrap(), open_without_uring(&image, &DIRECT).unwrap()] {
        let mut queue = disk.clone().queue(4).unwrap();
        for (offset, len) in [(4196, 8192), (4096, 8292), (4096, 4096)] {
            let kind = RequestKind::Zero { unmap: false, fast: true, fua: false };
            queue.submit(Request {
                kind,
                pieces: [Piece { offset, len }].into(),
                buf: Buf::new(0),
                token: 0,
            });
            queue.start();
            if queue.complete(true).unwrap().result.is_ok() {
                return skip("this tmpfs zeroes by itself");
            }
            let mut found = vec![0; 16384];
            disk.read_at(0, &mut found).unwrap();
            assert!(found.iter().all(|byte| *byte == 5), "{len} bytes at {offset}");
        }
    }
}

#[test]
fn a_zeroing_of_a_part_and_a_write_of_another_lose_nothing() {
    let folder = testing::on_disk();
    for size in [1 << 20, (1 << 20) + 100] {
        let image = folder.path().join(size.to_string());
        File::create(&image).unwrap().set_len(size).unwrap();
        zeroes_beside_a_part(&open(&image, &DIRECT).unwrap(), "file");
        zeroes_beside_a_part(&open_without_uring(&image, &DIRECT).unwrap(), "file, by threads");
        zeroes_beside_a_part(&open(&image, &WRITE).unwrap(), "cached file");
    }
    let Some(device) = Looped::with(&["--direct-io=on"], 1 << 20) else { return };
    zeroes_beside_a_part(&open(device.path(), &WRITE).unwrap(), "device");
}

#[test]
fn a_part_of_a_unit_undoes_nothing_that_is_in_flight() {
    let folder = testing::on_disk();
    let image = folder.path().join("image");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    parts_beside_whole_units(open(&image, &DIRECT).unwrap(), "file");
    parts_beside_whole_units(open_without_uring(&image, &DIRECT).unwrap(), "file, by threads");
    // Its last sector ends beyond it.
    File::options().write(true).open(&image).unwrap().set_len((1 << 20) + 100).unwrap();
    parts_beside_whole_units(open(&image, &DIRECT).unwrap(), "file of an odd size");
    for sector in ["512", "4096"] {
        let Some(device) = Looped::with(&["--direct-io=on", "--sector-size", sector], 1 << 20) else {
            return;
        };
        parts_beside_whole_units(
            open(device.path(), &WRITE).unwrap(),
            &format!("device with sectors of {sector}"),
        );
    }
}
