//! A disk that is mounted and busy is followed and copied, with its file system frozen for a moment.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::image;
use dsync_tests::mount::{Loop, Mount, wait_until_free};
use dsync_tests::scene::number;
use dsync_tests::site::binary;
use dsync_tests::tracked::{Tracked, Untrack};
use dsync_tests::{Output, Random, Run, Site, got, need, repository, rounds, say, skipped, until};
use testing::stalled::{StalledWrite, is_freezing};

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// A database in which a lost or a torn commit shows.
fn database(action: &str) -> Run {
    Run::new("/usr/bin/python3").arg(repository().join("tests/chain.py")).arg(action)
}

/// A replica's file system, mounted. It is a copy of the copy: what is mounted is written to.
struct Look {
    mount: Mount,
    device: Loop,
    place: PathBuf,
}

impl Look {
    fn at(site: &Site, copy: &Path) -> Look {
        let (image, place) = (site.path("look.raw"), site.path("look"));
        Run::new("cp").args(["--sparse=always"]).arg(copy).arg(&image).ok();
        let device = Loop::new(&image).expect("a loop device");
        let mount = Mount::new(&[], device.device(), &place).expect("the replica mounts");
        Look { mount, device, place }
    }

    fn place(&self) -> &Path {
        &self.place
    }

    /// Unmounted, it has no fault.
    fn check(self) {
        let Look { mount, device, .. } = self;
        drop(mount);
        Run::new("e2fsck").args(["-fn"]).arg(device.device()).ok();
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
    let mut writer = database("write").arg(place.join("chain.db")).arg(&stop).start();
    writer.wait_to_say("the first commit is done");
    let fio = Run::new("fio")
        .args(["--name=load", "--thread", "--rw=randwrite", "--bs=4k-64k", "--size=64m"])
        .args(["--ioengine=psync", "--fsync=50"])
        .args(["--rate_iops=2000", "--time_based", "--runtime=600", "--output=/dev/null"])
        .arg(format!("--directory={}", place.display()));
    let mut load = fio.start();
    std::thread::sleep(Duration::from_secs(1));
    let (mut frozen, mut last) = (Vec::new(), 0u64);
    for round in 0..rounds(3, 50) {
        let synced = site.sync(tracked.device(), &copy, &["--freeze", "require"]).ok().summary();
        frozen.push(number(&synced, "freeze_ms"));
        if round > 0 {
            assert_eq!(synced["method"], "tracked", "{synced}");
        }
        let look = Look::at(site, &copy);
        let rows = database("check").arg(look.place().join("chain.db")).ok().text();
        let rows: u64 = rows.trim().parse().expect("a number");
        assert!(rows >= last, "round {round}: the database went back from {last} to {rows}");
        last = rows;
        look.check();
    }
    std::fs::write(&stop, "").expect("a file");
    writer.output(Duration::from_secs(30));
    load.kill();
    frozen.sort_unstable();
    say(&format!(
        "frozen for {} ms (median), {} at most; {last} rows",
        frozen[frozen.len() / 2],
        frozen[frozen.len() - 1]
    ));
    assert!(last > 0);
}

/// Round after round, over one connection; over another once that is cut.
#[test]
fn a_mounted_disk_is_mirrored() {
    for cut in [None, Some(3 * MIB)] {
        let what = "a mirror of a mounted disk";
        let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
        let (far, calls) = (Site::new(), tracked.site.path("calls"));
        let copy = far.path("copy.raw");
        let mirror = tracked.site.dsync(["mirror", "--json", "--rpo", "2s", "--rsh", RSH]);
        let mirror = mirror.arg(tracked.device()).arg(format!("far:{}", copy.display()));
        let mirror = mirror.env("RSH_STATE", far.state()).env("RSH_LOG", &calls);
        let mut mirror = cut.iter().fold(mirror, |run, cut| run.env("RSH_CUT", cut.to_string())).start();
        mirror.wait_to_say("\"trust\"");
        let mut random = Random::new(what);
        let content: Vec<Vec<u8>> = (0..20).map(|_| random.bytes(300_000)).collect();
        for (number, bytes) in content.iter().enumerate() {
            std::fs::write(tracked.place.join(format!("file-{number}")), bytes).expect("a file");
            std::thread::sleep(Duration::from_millis(150));
        }
        // One that is cut off as it ends is not up to date.
        if cut.is_some() {
            mirror.wait_to_say("retrying");
        }
        mirror.signal(rustix::process::Signal::TERM);
        let output = mirror.output(Duration::from_secs(60));
        assert!(output.status.success(), "{output}");
        assert!(number(&output.summary(), "syncs") >= 3, "{output}");
        match cut {
            Some(_) => assert!(number(&output.summary(), "broken") > 0, "{output}"),
            None => {
                let calls = std::fs::read_to_string(&calls).expect("the calls");
                assert_eq!(calls.lines().count(), 1, "{calls}: {output}");
            }
        }
        let look = Look::at(&tracked.site, &copy);
        for (number, bytes) in content.iter().enumerate() {
            let there = std::fs::read(look.place().join(format!("file-{number}"))).expect("a file");
            assert!(there == *bytes, "file {number} is another at the replica");
        }
        look.check();
    }
}

/// A replica that was interrupted in a pass has parts of an epoch that nobody else has, and no state of its own by that.
#[test]
fn a_replica_with_an_interrupted_pass_follows_another_that_was_promoted() {
    let what = "an interrupted pass to a replica that is taken over";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (site, far) = (&tracked.site, Site::new());
    let (heir, other) = (site.path("heir.raw"), far.path("other.raw"));
    let to_other = |source: &Path| {
        let run = site.dsync(["sync", "--rsh", RSH]).arg(source).arg(format!("far:{}", other.display()));
        run.env("RSH_STATE", far.state())
    };
    to_other(tracked.device()).ok();
    site.sync(tracked.device(), &heir, &[]).ok();
    std::fs::write(tracked.place.join("file"), Random::new(what).bytes(12 * MIB as usize)).expect("a file");
    let cut = to_other(tracked.device()).env("RSH_CUT", (6 * MIB).to_string()).output();
    assert!(!cut.status.success(), "it was to be cut off");
    site.dsync(["promote", "--force"]).arg(&heir).ok();
    to_other(&heir).ok();
    image::assert_equal(&heir, &other);
}

/// Each round finds the replica as every sync does, also where nothing is to be sent.
#[test]
fn a_mirror_of_an_idle_disk_notices_what_becomes_of_its_replica() {
    let what = "a replica of an idle disk that others write to";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (site, far) = (&tracked.site, Site::new());
    let copy = far.path("copy.raw");
    for others in ["write", "remove"] {
        let mirror = site.dsync(["mirror", "--rpo", "1s", "--adopt=overwrite", "--rsh", RSH]);
        let mirror = mirror.arg(tracked.device()).arg(format!("far:{}", copy.display()));
        let mut mirror = mirror.env("RSH_STATE", far.state()).start();
        mirror.wait_to_say("copy.raw");
        std::thread::sleep(Duration::from_secs(1));
        if others == "remove" {
            std::fs::remove_file(&copy).expect("a replica");
            until("it is missed", || mirror.stderr_so_far().contains("is missing"));
            mirror.kill();
            continue;
        }
        image::scribble(&copy, 8 * MIB, MIB, &mut Random::new(what));
        until("it ends", || mirror.ended().is_some());
        let output = mirror.output(Duration::from_secs(10));
        assert_eq!(output.status.code(), Some(4), "{output}");
    }
}

/// A line that is too slow for it is told.
#[test]
fn a_mirror_of_a_mounted_disk_that_falls_behind_is_a_problem() {
    let what = "a mirror of a mounted disk that falls behind";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let copy = tracked.site.path("copy.raw");
    let mirror = tracked.site.dsync(["mirror", "--rpo", "1s"]).arg(tracked.device()).arg(&copy);
    let mut mirror = mirror.args(["--bwlimit", "300K"]).start();
    mirror.wait_to_say("copy.raw");
    std::fs::write(tracked.place.join("file"), Random::new(what).bytes(6 * MIB as usize)).expect("a file");
    until("it is told", || {
        let checked = tracked.site.dsync(["status", "--check"]).output();
        checked.status.code() == Some(1) && checked.text().contains("is to keep it within 1.00 s (--rpo)")
    });
    mirror.kill();
}

/// Killed at any moment: in a pass, between two, under the freeze, in the commit. Nothing stays frozen, nothing is lost.
#[test]
fn a_sync_that_is_killed_leaves_a_disk_that_is_followed_and_thawed() {
    let what = "syncs of a mounted disk that are killed";
    let Some(tracked) = Tracked::new(what, 256 * MIB) else { return };
    if !need(&["fio", "mkfs.xfs", "mkfs.btrfs"], what) {
        return;
    }
    let (site, mut random) = (&tracked.site, Random::new(what));
    for (fs, options, commit) in [
        ("ext4", &[] as &[&str], "journal"),
        ("xfs", &["-q", "-m", "reflink=1"], "reflink"),
        ("btrfs", &["-q"], "reflink"),
    ] {
        let place = site.path(fs);
        let _mount = if options.is_empty() {
            std::fs::create_dir(&place).expect("a folder");
            None
        } else {
            let image = site.image(&format!("{fs}.raw"), 640 * MIB);
            Run::new(format!("mkfs.{fs}")).args(options).arg(&image).ok();
            let mount = Mount::new(&["-o", "loop"], &image, &place);
            if mount.is_none() {
                skipped(what, &format!("{fs} cannot be mounted from a loop device here"));
                continue;
            }
            mount
        };
        let copy = place.join("copy.raw");
        let sync = || site.sync(tracked.device(), &copy, &["--commit", commit, "--passes", "3"]);
        sync().ok();
        let load = Run::new("fio")
            .args(["--name=load", "--thread", "--rw=randwrite", "--bs=4k-64k", "--size=32m"])
            .args([
                "--ioengine=psync",
                "--rate_iops=1000",
                "--time_based",
                "--runtime=600",
                "--output=/dev/null",
            ])
            .arg(format!("--directory={}", tracked.place.display()));
        let mut load = load.start();
        for _ in 0..rounds(3, 40) {
            let mut syncing = sync().start();
            std::thread::sleep(Duration::from_millis(random.below(700)));
            syncing.kill();
            let began = Instant::now();
            std::fs::write(tracked.place.join("probe"), b"thawed").expect("a write");
            assert!(began.elapsed() < Duration::from_secs(5), "it stayed frozen for {:?}", began.elapsed());
        }
        // The watchdog of the one that was killed holds the source until it has thawed.
        let until = Instant::now() + Duration::from_secs(20);
        let synced = loop {
            let output = sync().output();
            if output.status.success() || Instant::now() > until || !output.stderr.contains("in use (") {
                assert!(output.status.success(), "{output}");
                break output.summary();
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        assert_eq!(synced["method"], "tracked", "{fs}: {synced}");
        load.kill();
        // Nobody writes any more: the files are those of the copy.
        let synced = sync().ok().summary();
        assert_eq!(synced["method"], "tracked", "{fs}: {synced}");
        let look = Look::at(site, &copy);
        Run::new("diff").arg("-r").arg(&tracked.place).arg(look.place()).ok();
        look.check();
    }
}

/// A host with one disk: dsync's own state is on the file system that is frozen.
#[test]
fn the_state_may_be_on_the_disk_that_is_frozen() {
    let what = "the state on a disk that is frozen";
    let Some(tracked) = Tracked::new(what, 96 * MIB) else { return };
    if !need(&["python3"], what) {
        return;
    }
    let (place, site, copy) = (&tracked.place, &tracked.site, tracked.site.path("copy.raw"));
    let (state, stop) = (tracked.place.join("state"), site.path("stop"));
    let sync = || {
        let options = ["--freeze", "require", "--freeze-limit", "5"];
        site.sync(tracked.device(), &copy, &options).env("DSYNC_STATE_DIR", &state)
    };
    // An earlier sync may have to be finished.
    let mut killed = sync().start();
    std::thread::sleep(Duration::from_millis(300));
    killed.kill();
    let mut writer = database("write").arg(place.join("chain.db")).arg(&stop).start();
    writer.wait_to_say("the first commit is done");
    let mut last = 0;
    for round in 0..rounds(2, 50) {
        let synced = sync().arg("--wait").ok().summary();
        assert!(number(&synced, "freeze_ms") < 5000, "{synced}");
        assert!(round == 0 || synced["method"] == "tracked", "{synced}");
        let look = Look::at(site, &copy);
        let rows = database("check").arg(look.place().join("chain.db")).ok().text();
        let rows: u64 = rows.trim().parse().expect("a number");
        assert!(rows >= last, "round {round}: the database went back from {last} to {rows}");
        last = rows;
        // The state that was copied is that of a source one epoch before.
        assert!(look.place().join("state/sources").is_dir());
        look.check();
    }
    std::fs::write(&stop, "").expect("a file");
    writer.output(Duration::from_secs(30));
    // A mirror, whose every sync writes to its own source.
    let mirror = ["mirror", "--rpo", "4s"];
    let mut running =
        site.dsync(mirror).arg(tracked.device()).arg(&copy).env("DSYNC_STATE_DIR", &state).start();
    running.wait_to_say("is at epoch");
    std::thread::sleep(Duration::from_secs(3));
    running.signal(rustix::process::Signal::TERM);
    let ended = running.output(Duration::from_secs(60));
    assert!(ended.status.success() && ended.stderr.is_empty(), "{ended}");
    let look = Look::at(site, &copy);
    look.check();
}

/// A mount that only another mount namespace has, or nobody any more but the kernel, cannot be frozen from here.
#[test]
fn a_mount_that_is_not_seen_is_not_taken_for_none() {
    let what = "a mount in another mount namespace";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    if !need(&["unshare"], what) {
        return;
    }
    let (site, copy) = (&tracked.site, tracked.site.path("copy.raw"));
    let sync = |options: &[&str]| site.sync(tracked.device(), &copy, options);
    sync(&["--freeze", "require"]).ok();
    let place = tracked.place.display().to_string();
    // The other namespace has a copy of the mount.
    let script = ["--mount", "--propagation", "private", "sh", "-c", "echo there; exec sleep 1000"];
    let mut other = Run::new("unshare").args(script).start();
    other.wait_to_say("there");
    Run::new("umount").arg(&place).ok();
    for options in [&[][..], &["--freeze", "require"]] {
        sync(options).code(4).says(&["mount namespace", "nsenter", "--freeze never"]);
    }
    sync(&["--freeze", "never"]).ok();
    other.kill();
    // Mounted nowhere, but a file is open.
    let _mount = Mount::new(&[], tracked.device(), &tracked.place).expect("a mount");
    let open = std::fs::File::create(tracked.place.join("open")).expect("a file");
    sync(&["--freeze", "require"]).ok();
    Run::new("umount").args(["--lazy", &place]).ok();
    sync(&[]).code(4).says(&["where no process shows it"]);
    drop(open);
    wait_until_free(tracked.device());
    sync(&[]).ok();
}

#[test]
fn who_writes_past_a_frozen_file_system_is_noticed() {
    let what = "writes past a frozen file system";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    if !need(&["fio"], what) {
        return;
    }
    let (site, copy) = (&tracked.site, tracked.site.path("copy.raw"));
    // The same block again and again: it is marked before the freeze, so only the count of writes tells.
    let writer = Run::new("fio").arg(format!("--filename={}", tracked.device().display()));
    let writer = writer.arg(format!("--offset={}", 63 * MIB)).args([
        "--name=load",
        "--thread",
        "--allow_mounted_write=1",
        "--rw=randwrite",
        "--bs=4k",
        "--size=4k",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=32",
        "--norandommap",
        "--time_based",
        "--runtime=600",
        "--output=/dev/null",
    ]);
    let writes = || {
        let name = tracked.device().file_name().expect("a name").to_string_lossy();
        let counts = std::fs::read_to_string(format!("/sys/class/block/{name}/stat")).expect("its counts");
        counts.split_whitespace().nth(4).and_then(|count| count.parse::<u64>().ok()).expect("writes")
    };
    let before = writes();
    let mut writer = writer.start();
    until("another program writes", || writes() > before + 100);
    // One in whose cut he happens to pause is good, as are most on a busy machine.
    let mut refused = None;
    until("a write past the freeze is noticed", || {
        let output = site.sync(tracked.device(), &copy, &[]).output();
        refused = (!output.status.success()).then_some(output);
        refused.is_some()
    });
    refused.expect("a refusal").says(&["past its file systems", "swapoff"]);
    writer.kill();
    site.sync(tracked.device(), &copy, &[]).ok();
}

/// What is read while a file system is frozen for too long is thrown away, and the next sync goes on.
#[test]
fn a_freeze_that_takes_too_long_ends_the_sync() {
    let what = "a freeze beyond its limit";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (site, copy) = (&tracked.site, tracked.site.path("copy.raw"));
    let sync = || site.sync(tracked.device(), &copy, &["--freeze-limit", "1"]);
    sync().ok();
    let before = image::fingerprint(&copy);
    std::fs::write(tracked.place.join("file"), [7; 8192]).expect("a write");
    let Some(stalled) = StalledWrite::new(&tracked.place.join("stalled"), what) else { return };
    let syncing = sync().start();
    let process = Path::new("/proc").join(syncing.pid().as_raw_nonzero().to_string());
    until("it freezes", || is_freezing(&process));
    std::thread::sleep(Duration::from_millis(1100));
    stalled.end();
    let failed = syncing.output(Duration::from_secs(20));
    assert_eq!(failed.status.code(), Some(4), "{failed}");
    let place = tracked.place.display().to_string();
    failed.says(&["the freeze of", &place, "longer than its limit of 1000 ms", "may mix several moments"]);
    assert_eq!(image::fingerprint(&copy), before);
    std::fs::write(tracked.place.join("thawed"), [7; 8192]).expect("a write");
    assert_eq!(sync().ok().summary()["method"], "tracked");
    let look = Look::at(site, &copy);
    Run::new("diff").arg("-r").arg(&tracked.place).arg(look.place()).ok();
    look.check();
}

#[test]
fn two_state_directories_do_not_share_a_record() {
    let Some(tracked) = Tracked::new("two state directories on one tracked disk", 64 * MIB) else { return };
    let (site, ours, theirs) =
        (&tracked.site, tracked.site.path("ours.raw"), tracked.site.path("theirs.raw"));
    let fill = |name: &str| {
        let random = Random::new("the content of a tracked disk").bytes(8 << 20);
        std::fs::write(tracked.place.join(name), random).expect("a write");
    };
    fill("before");
    let other = |options: &[&str]| {
        site.sync(tracked.device(), &theirs, options).env("DSYNC_STATE_DIR", site.path("other-state"))
    };
    other(&[]).ok();
    site.sync(tracked.device(), &ours, &[]).ok();
    fill("after");
    // The other one may hold it at that very moment.
    let mut slow = site.sync(tracked.device(), &ours, &["--bwlimit", "2M", "--wait"]).start();
    // While the slow one makes its passes, the other one takes nothing from it.
    let refused = loop {
        let output = other(&[]).output();
        // Who has just begun has not said yet who it is.
        if output.status.code() == Some(6) && !output.stderr.contains("(another process)") {
            break output;
        }
        assert!(output.status.success() || output.status.code() == Some(6), "{output}");
        assert!(slow.ended().is_none(), "the slow sync ended, and the other one was never refused");
    };
    refused.says(&["in use (dsync"]);
    let slow = slow.output(Duration::from_secs(60));
    assert!(slow.status.success(), "{slow}");
    // Both see what they lack, whoever was first.
    fill("later");
    for _ in 0..2 {
        other(&[]).ok();
        site.sync(tracked.device(), &ours, &[]).ok();
    }
    let look = Look::at(site, &ours);
    Run::new("diff").arg("-r").arg(&tracked.place).arg(look.place()).ok();
    look.check();
    let look = Look::at(site, &theirs);
    Run::new("diff").arg("-r").arg(&tracked.place).arg(look.place()).ok();
    look.check();
}

/// The paper's commands, by their names, between syncs.
#[test]
fn dmextract_and_dmmerge_go_on_from_a_sync() {
    let what = "dmextract of a mounted disk";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (site, copy) = (&tracked.site, tracked.site.path("copy.raw"));
    let mut random = Random::new(what);
    let mut write = |name: &str| {
        std::fs::write(tracked.place.join(name), random.bytes(80 << 10)).expect("a file");
    };
    for name in ["dmextract", "dmmerge"] {
        std::os::unix::fs::symlink(binary(), site.path(name)).expect("a link");
    }
    site.sync(tracked.device(), &copy, &[]).ok();
    write("one");
    let delta = site.run(&site.path("dmextract")).arg(tracked.device()).ok().stdout;
    assert!(delta.len() < 4 << 20, "{} bytes", delta.len());
    site.run(&site.path("dmmerge")).arg(&copy).input(delta).ok();
    let look = Look::at(site, &copy);
    Run::new("diff").arg("-r").arg(&tracked.place).arg(look.place()).ok();
    look.check();
    write("two");
    let synced = site.sync(tracked.device(), &copy, &[]).ok().summary();
    assert_eq!(synced["method"], "tracked", "{synced}");
}

#[test]
fn status_of_a_tracked_disk_says_what_is_known_to_whom() {
    let what = "status of a tracked disk";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (site, copy) = (&tracked.site, tracked.site.path("copy.raw"));
    site.sync(tracked.device(), &copy, &[]).ok();
    let content = Random::new(what).bytes(4 << 20);
    std::fs::write(tracked.place.join("file"), content).expect("a write");
    Run::new("sync").arg("-f").arg(&tracked.place).ok();
    let status = site.dsync(["status", "--json"]).arg(tracked.device()).ok().json();
    let source = status.iter().find(|s| s["kind"] == "source").expect("the source");
    assert!(number(&source["replicas"][0], "blocks") >= 1024, "{source}");
    let said = site.dsync(["status"]).arg(tracked.device()).ok().text();
    assert!(said.contains("is tracked by bpf"), "{said}");
    // An ordinary user is told that it is followed, and of nothing to be ended.
    if !need(&["setpriv"], what) {
        return;
    }
    let user =
        site.run("setpriv".as_ref()).args(["--reuid=65534", "--clear-groups"]).arg(binary()).arg("status");
    let asked = user.env("DSYNC_STATE_DIR", "/nonexistent").ok().text();
    let device = tracked.device().display().to_string();
    // Where the BPF file system is root's alone, as systemd mounts it, that is all there is to say.
    let told = asked.contains(&device) && asked.contains("is tracked");
    assert!(told || asked.contains("tracked disks are shown to root only"), "{asked}");
    assert!(!asked.contains("remove") && !asked.contains("no longer"), "{asked}");
}

/// Where no program may be attached to functions of the kernel, as without ftrace or under a lockdown.
#[test]
fn what_a_kernel_does_not_show_is_said() {
    let what = "a tracked disk on a kernel that shows no functions";
    let Some(tracked) = Tracked::new(what, 16 * MIB) else { return };
    let (site, device) = (&tracked.site, tracked.device());
    site.dsync(["track", "remove"]).arg(device).ok();
    let added = site.dsync(["track", "add"]).arg(device).ok();
    let pins = site.pins().read_dir().expect("pins").next().expect("a tracker").expect("a folder").path();
    let is_left_out = !pins.join("capacity").exists();
    let sentence = "with no read or write in between, this is not noticed";
    assert_eq!(added.stderr.contains(sentence) && added.stderr.contains("warning"), is_left_out, "{added}");
    site.sync(device, &site.path("copy.raw"), &[]).ok();
    let told = site.dsync(["status"]).arg(device).ok().text();
    assert_eq!(told.contains(sentence), is_left_out, "{told}");
    let told = site.dsync(["status", "--json"]).arg(device).ok().text();
    assert!(told.contains(if is_left_out { sentence } else { "\"unnoticed\":null" }), "{told}");
}

/// A tracked disk has no view for a verify. What nobody notices at its replica is found by a comparison, as docs/guide.md says.
#[test]
fn a_comparison_finds_at_the_replica_what_a_verify_cannot() {
    let what = "an unnoticed write to the replica of a tracked disk";
    let Some(tracked) = Tracked::new(what, 16 * MIB) else { return };
    let (site, image) = (&tracked.site, tracked.site.image("copy.raw", 16 * MIB));
    let Some(copy) = Loop::new(&image) else { return skipped(what, "there is no loop device") };
    let sync = |options: &[&str]| site.sync(tracked.device(), copy.device(), options).ok().summary();
    sync(&[]);
    // Beneath the device, where the kernel does not count.
    let file = std::fs::File::options().read(true).write(true).open(&image).expect("the file");
    file.write_all_at(&[7; 4096], 9 * MIB).and_then(|()| file.sync_all()).expect("a write");
    let differs = || {
        let mut block = [0; 4096];
        file.read_exact_at(&mut block, 9 * MIB).expect("the block");
        block == [7; 4096]
    };
    assert_eq!(sync(&[])["method"], "tracked");
    assert!(differs());
    let verify = site.dsync(["verify"]).arg(tracked.device()).arg(copy.device());
    verify.code(4).says(&["keeps no view of it for a verify", "sync --method compare"]);
    assert_eq!(sync(&["--method", "compare"])["method"], "compare");
    assert!(!differs());
}

/// A file system writes past what the system has in memory of its device.
#[test]
fn what_anybody_reads_after_a_checkpoint_is_no_older() {
    let Some(tracked) = Tracked::new("a reader of a disk in use", 32 * MIB) else { return };
    let (device, store) = (tracked.device(), tracked.site.path("store"));
    let (file, mut random) = (tracked.place.join("file"), Random::new("a reader"));
    let mut write = || {
        std::fs::write(&file, random.bytes(2 << 20)).expect("a file");
        Run::new("sync").arg("-f").arg(&file).ok();
    };
    let id = |said: Output| said.summary()["epoch_id"].as_str().expect("an id").to_owned();
    write();
    let mut last = id(tracked.site.dsync(["checkpoint"]).arg(device).args(["backup", "--json"]).ok());
    std::fs::write(&store, std::fs::read(device).expect("the device")).expect("a copy");
    for _ in 0..2 {
        write();
        let changes = tracked.site.dsync(["changes", "--json", "--since", &last]).arg(device).ok();
        let summary = changes.summary();
        let (from, to) = (std::fs::File::open(device), std::fs::File::options().write(true).open(&store));
        let (from, to) = (from.expect("the device"), to.expect("the copy"));
        for range in summary["ranges"].as_array().expect("ranges") {
            let [at, len] = [0, 1].map(|part| range[part].as_u64().expect("a number"));
            let mut bytes = vec![0; len as usize];
            from.read_exact_at(&mut bytes, at).expect("the device");
            to.write_all_at(&bytes, at).expect("the copy");
        }
        last = id(changes);
        tracked.site.dsync(["checkpoint"]).arg(device).args(["backup", "--at", &last]).ok();
    }
    let current = std::fs::read(&file).expect("the file");
    let copied = std::fs::read(&store).expect("the copy");
    // The file is somewhere in the copy, in pieces of a block at least.
    let has = |block: &[u8]| copied.chunks(1024).any(|at| at.starts_with(block));
    assert!(current.chunks(256 << 10).all(|part| has(&part[..1024])), "the copy has not the last content");
}

#[test]
fn a_mount_point_is_answered_with_its_disk() {
    let Some(tracked) = Tracked::new("a mount point to be tracked", 64 * MIB) else { return };
    let refused = tracked.site.dsync(["track", "add"]).arg(&tracked.place).code(4);
    refused.says(&[&format!("run \"dsync track add {}\"", tracked.device().display())]);
}

/// What the passes of a first copy write is written by it, and what goes on with one that was interrupted is a first copy.
#[test]
fn a_first_copy_says_what_it_wrote() {
    let what = "a first copy of a tracked disk";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (site, copy) = (&tracked.site, tracked.site.path("copy.raw"));
    std::fs::write(tracked.place.join("file"), Random::new(what).bytes(8 << 20)).expect("a write");
    Run::new("sync").arg("-f").arg(&tracked.place).ok();
    for commit in ["journal", "in-place"] {
        let summary = site.sync(tracked.device(), &copy, &["--commit", commit]).ok().summary();
        let written = number(&summary, "bytes_written");
        assert!(written >= 8 << 20 && written <= 2 * number(&summary, "bytes_read"), "{summary}");
        std::fs::write(tracked.place.join("file"), Random::new(commit).bytes(8 << 20)).expect("a write");
        Run::new("sync").arg("-f").arg(&tracked.place).ok();
    }
}

/// A replica that keeps its past goes on with no clone, and each pass over a live disk goes on with what the last one brought.
#[test]
fn passes_reach_a_replica_that_is_committed_by_reflink_and_keeps_its_past() {
    let what = "a tracked disk whose replica is committed by reflink and keeps its past";
    if !need(&["mkfs.xfs"], what) {
        return;
    }
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (site, disk) = (&tracked.site, tracked.device());
    let image = site.path("xfs.img");
    std::fs::File::create(&image).and_then(|file| file.set_len(512 * MIB)).expect("an image");
    Run::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&image).ok();
    let Some(_mount) = Mount::new(&["-o", "loop"], &image, &site.path("xfs")) else {
        return dsync_tests::skipped(what, "XFS cannot be mounted");
    };
    let copy = site.path("xfs/copy.raw");
    let mut random = Random::new(what);
    for method in ["auto", "compare", "auto", "copy", "auto"] {
        std::fs::write(tracked.place.join("file"), random.bytes(20 << 20)).expect("a write");
        Run::new("sync").arg("-f").arg(&tracked.place).ok();
        let how = ["--commit", "reflink", "--keep-last", "9", "--method", method];
        let summary = site.sync(disk, &copy, &how).ok().summary();
        // Nothing is read twice but what was written meanwhile.
        let most = if method == "auto" { 38 * MIB } else { 100 * MIB };
        assert!(number(&summary, "bytes_read") < most || summary["trust"] == "seeded", "{summary}");
    }
    Run::new("umount").arg(&tracked.place).ok();
    site.sync(disk, &copy, &["--commit", "reflink"]).ok();
    Run::new("cmp").arg(disk).arg(&copy).ok();
    let moments = site.dsync(["rewind", "--json"]).arg(&copy).ok().summary();
    assert_eq!(moments["moments"].as_array().map(Vec::len), Some(5), "{moments}");
}

#[test]
fn two_first_syncs_at_once_agree_on_what_the_disk_is() {
    let what = "two first syncs of one tracked disk at once";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let site = &tracked.site;
    for round in 0..rounds(3, 15) {
        let copies = ["a", "b"].map(|name| site.path(&format!("{name}-{round}.raw")));
        let started = copies.clone().map(|copy| site.sync(tracked.device(), &copy, &[]).start());
        for output in started.map(|sync| sync.output(Duration::from_secs(60))) {
            assert!(output.status.success() || output.stderr.contains("in use ("), "{output}");
        }
        for copy in &copies {
            site.sync(tracked.device(), copy, &[]).ok();
        }
        let folders = std::fs::read_dir(site.state().join("sources")).expect("the sources").flatten();
        assert_eq!(folders.filter(|e| e.path().is_dir()).count(), 1, "one disk became two sources");
        std::fs::remove_dir_all(site.state()).expect("the state");
    }
}

/// A number in a file, overwritten in place and durable.
fn put(file: &std::fs::File, number: u64) {
    file.write_all_at(&number.to_le_bytes(), 0).expect("a write");
    file.sync_data().expect("a sync");
}

fn taken(place: &Path) -> u64 {
    let bytes = std::fs::read(place.join("number")).expect("a number");
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

/// The number goes to the second disk once it is durable on the first.
#[test]
fn two_mounted_disks_are_cut_at_one_moment() {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    let what = "a group of mounted disks";
    let Some(tracked) = Tracked::new(what, 48 * MIB) else { return };
    let site = &tracked.site;
    let image = site.image("second-disk.raw", 48 * MIB);
    let device = Loop::new(&image);
    if !got(device.as_ref().ok_or("there is no free loop device"), what) {
        return;
    }
    let device = device.expect("a device");
    Run::new("mkfs.ext4").arg("-q").arg(device.device()).ok();
    let second = site.path("second");
    let _mount = Mount::new(&[], device.device(), &second).expect("it mounts");
    let _untrack = Untrack(site, device.device());
    for device in [tracked.device(), device.device()] {
        let joined = site.dsync(["track", "add", "--group", "db"]).arg(device).ok();
        assert!(joined.text().contains("is in group db"), "{joined}");
    }
    let dir = site.path("replicas");
    std::fs::create_dir(&dir).expect("a folder");
    // However slow the disk is.
    let sync = |options: &[&str]| {
        site.dsync(["sync", "--group", "db", "--json", "--freeze-limit", "300"]).arg(&dir).args(options)
    };
    let files = [&tracked.place, &second].map(|place| {
        let file = std::fs::File::create(place.join("number")).expect("a file");
        put(&file, 0);
        file
    });
    sync(&["--freeze", "never"]).code(4).says(&["not of one moment"]);
    sync(&[]).ok();
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            let mut number = 0;
            while !stop.load(SeqCst) {
                number += 1;
                files.iter().for_each(|file| put(file, number));
            }
            number
        });
        let mut before = 0;
        for round in 0..rounds(4, 100) {
            let synced = sync(&[]).output();
            if !synced.status.success() {
                stop.store(true, SeqCst);
                panic!("round {round}: {synced}");
            }
            let at = [tracked.device(), device.device()].map(|device| {
                let look = Look::at(site, &dir.join(device.file_name().expect("a name")));
                let number = taken(look.place());
                look.check();
                number
            });
            let whole = at[1] <= at[0] && at[0] <= at[1] + 1 && at[0] > before;
            if !whole {
                stop.store(true, SeqCst);
            }
            assert!(
                whole,
                "round {round}: torn: the first disk is at {}, the second at {}, before {before}",
                at[0], at[1]
            );
            before = at[0];
        }
        stop.store(true, SeqCst);
        assert!(writer.join().expect("the writer") >= before);
    });
    let members = sync(&[]).ok().json();
    assert!(members.iter().any(|member| member["method"] == "tracked"), "{members:?}");
}
