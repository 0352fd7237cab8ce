//! A disk that is mounted and busy is followed and copied, with its file system frozen for a moment.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsync_tests::mount::{Loop, Mount};
use dsync_tests::scene::number;
use dsync_tests::{Run, Site, got, need, need_root, rounds, say};

const MIB: u64 = 1 << 20;

/// A database whose rows are a chain of digests: each holds that of the one before, so that a lost or a torn commit shows.
const DATABASE: &str = r#"
import hashlib, os, sqlite3, sys
place, stop = sys.argv[1], sys.argv[2]
db = sqlite3.connect(place, isolation_level=None)
db.execute("pragma journal_mode=wal")
db.execute("pragma synchronous=normal")
db.execute("create table if not exists chain (n integer primary key, filler blob, digest text)")
last = "begin"
n = 0
while not os.path.exists(stop):
    db.execute("begin immediate")
    for _ in range(20):
        n += 1
        filler = os.urandom(700)
        last = hashlib.sha256(last.encode() + filler).hexdigest()
        db.execute("insert into chain values (?, ?, ?)", (n, filler, last))
    db.execute("commit")
    if n % 400 == 0:
        db.execute("delete from chain where n < ?", (n - 4000,))
"#;

/// Reads such a database, checks it whole, and prints how many rows it has.
const CHECK: &str = r#"
import hashlib, sqlite3, sys
db = sqlite3.connect(sys.argv[1])
assert db.execute("pragma integrity_check").fetchone()[0] == "ok", "integrity"
last, before = None, None
for n, filler, digest in db.execute("select n, filler, digest from chain order by n"):
    if last is not None:
        assert n == before + 1, "a gap after row %d" % before
        assert digest == hashlib.sha256(last.encode() + filler).hexdigest(), "row %d" % n
    last, before = digest, n
assert (before or 0) % 20 == 0, "half a commit: up to row %d" % before
print(before or 0)
"#;

/// The BPF file system may have to be mounted for a test, and the tests of this file share it.
static BPF: Mutex<()> = Mutex::new(());

/// A loop device that dsync tracks, an ext4 file system on it mounted. The fields are let go in this order.
struct Tracked {
    _mount: Mount,
    device: Loop,
    place: PathBuf,
    site: Site,
    _bpf: Option<Mount>,
    _alone: MutexGuard<'static, ()>,
}

impl Tracked {
    fn new(what: &str, size: u64) -> Option<Tracked> {
        if !need_root(what) || !need(&["mkfs.ext4", "losetup", "e2fsck"], what) {
            return None;
        }
        let alone = BPF.lock().unwrap_or_else(PoisonError::into_inner);
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("the table of mounts");
        let mounted = mounts.lines().any(|line| line.split(' ').nth(1) == Some("/sys/fs/bpf"));
        let bpf = if mounted {
            None
        } else {
            Mount::new(&["-t", "bpf"], Path::new("bpf"), Path::new("/sys/fs/bpf"))
        };
        let site = Site::new();
        let image = site.image("disk.raw", size);
        let device = Loop::new(&image);
        if !got(device.as_ref().ok_or("there is no free loop device"), what) {
            return None;
        }
        let device = device?;
        Run::new("mkfs.ext4").arg("-q").arg(device.device()).ok();
        let place = site.path("mount");
        let mount = Mount::new(&[], device.device(), &place);
        if !got(mount.as_ref().ok_or("mounting is not allowed"), what) {
            return None;
        }
        let tracked = Tracked { _mount: mount?, device, place, site, _bpf: bpf, _alone: alone };
        let added = tracked.site.dsync(["track", "add"]).arg(tracked.device.device()).output();
        let can = if added.status.success() { Ok(()) } else { Err(added.stderr) };
        got(can, what).then_some(tracked)
    }

    fn device(&self) -> &Path {
        self.device.device()
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.site.dsync(["track", "remove"]).arg(self.device.device()).output();
    }
}

#[test]
fn a_busy_file_system_is_copied_as_of_one_moment() {
    let what = "syncs of a mounted disk under load";
    let Some(tracked) = Tracked::new(what, 512 * MIB) else { return };
    if !need(&["fio", "python3"], what) {
        return;
    }
    let (place, site) = (&tracked.place, &tracked.site);
    let (stop, copy) = (site.path("stop"), site.path("copy.raw"));
    let python = || Run::new("/usr/bin/python3").arg("-c");
    let database = python().arg(DATABASE).arg(place.join("chain.db")).arg(&stop).start();
    let fio = Run::new("fio")
        .args([
            "--name=load",
            "--rw=randwrite",
            "--bs=4k-64k",
            "--size=64m",
            "--ioengine=psync",
            "--fsync=50",
        ])
        .args(["--rate_iops=2000", "--time_based", "--runtime=600", "--output=/dev/null"])
        .arg(format!("--directory={}", place.display()));
    let mut load = fio.start();
    std::thread::sleep(Duration::from_secs(1));
    let (mut frozen, mut last) = (Vec::new(), 0u64);
    for round in 0..rounds(5, 50) {
        let synced = site.sync(tracked.device(), &copy, &["--freeze", "require"]).ok().summary();
        frozen.push(number(&synced, "freeze_ms"));
        if round > 0 {
            assert_eq!(synced["method"], "tracked", "{synced}");
        }
        // A copy of the copy: what is mounted is written to.
        let mounted = site.path("look.raw");
        Run::new("cp").args(["--sparse=always"]).arg(&copy).arg(&mounted).ok();
        let device = Loop::new(&mounted).expect("a loop device");
        {
            let look = site.path("look");
            let _mount = Mount::new(&[], device.device(), &look).expect("the replica mounts");
            let rows = python().arg(CHECK).arg(look.join("chain.db")).ok().text();
            let rows: u64 = rows.trim().parse().expect("a number");
            assert!(rows >= last, "round {round}: the database went back from {last} to {rows}");
            last = rows;
        }
        Run::new("e2fsck").args(["-fn"]).arg(device.device()).ok();
    }
    std::fs::write(&stop, "").expect("a file");
    database.output(Duration::from_secs(30));
    load.kill();
    frozen.sort_unstable();
    say(&format!(
        "frozen for {} ms (median), {} at most; {last} rows",
        frozen[frozen.len() / 2],
        frozen[frozen.len() - 1]
    ));
    assert!(last > 0);
}

#[test]
fn what_can_not_be_frozen_or_is_not_tracked_is_refused() {
    let Some(tracked) = Tracked::new("refusals of syncs of live disks", 64 * MIB) else { return };
    let (site, copy) = (&tracked.site, tracked.site.path("copy.raw"));
    // State on the disk that is to be frozen.
    let inside = tracked.place.join("state");
    let place = tracked.place.display().to_string();
    site.sync(tracked.device(), &copy, &[])
        .env("DSYNC_STATE_DIR", &inside)
        .code(4)
        .says(&["--state-dir", &place]);
    // It was thawed, or never frozen: a write goes through.
    let began = Instant::now();
    std::fs::write(tracked.place.join("file"), b"still here").expect("a write");
    assert!(began.elapsed() < Duration::from_secs(5));
}
