//! A host that is rolled back, disk and state together, as a hypervisor's snapshot does it: what a mirror has brought to the replica since is the
//! last there is of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::host::Host;
use dsync_tests::mount::Loop;
use dsync_tests::{Random, Run, Server, Site, got, image, need, need_root, say, skipped};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = image::BLOCK;

/// A snapshot of a host.
struct Snapshot {
    disk: Vec<u8>,
    state: PathBuf,
}

impl Snapshot {
    fn take(host: &Host, name: &str) -> Snapshot {
        let state = host.site.path(name);
        Run::new("cp").arg("-a").args([host.site.state(), state.clone()]).ok();
        Snapshot { disk: std::fs::read(&host.disk).expect("a disk"), state }
    }

    fn restore(&self, host: &Host) {
        std::fs::write(&host.disk, &self.disk).expect("a disk");
        std::fs::remove_dir_all(host.site.state()).expect("a state");
        // What a demotion made of it.
        let _ = std::fs::remove_dir_all(host.disk.with_file_name(".vm.raw.dsync"));
        Run::new("cp").arg("-a").args([self.state.clone(), host.site.state()]).ok();
    }
}

/// Writes to blocks, and waits until the mirror has brought that to the replica.
fn write(server: &Server, (from, to): (&Host, &Host), blocks: &[u64], random: &mut Random) {
    let mut client = server.client("vm");
    for block in blocks {
        client.write(block * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
    }
    client.flush().and_then(|()| client.close()).expect("the end");
    let until = Instant::now() + Duration::from_secs(60);
    while std::fs::read(&from.disk).ok() != std::fs::read(&to.disk).ok() {
        assert!(Instant::now() < until, "not mirrored: {:?}", image::differing_blocks(&from.disk, &to.disk));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Mirrors from a to b in one epoch, with snapshots of a: before the mirror begins, and while it runs.
fn mirrored(a: &Host, b: &Host, random: &mut Random) -> [Snapshot; 2] {
    let server = a.site.serve(&[&a.disk], &[]);
    a.sync(b, &[]).ok();
    let before = Snapshot::take(a, "before");
    let mut mirror = a.towards(b, &["mirror", "--json"]).start();
    mirror.wait_to_say("mirroring to");
    write(&server, (a, b), &[1, 2, 3], random);
    // From here on each is noted by itself: the ones before were more than a second ago.
    std::thread::sleep(Duration::from_millis(1200));
    write(&server, (a, b), &[4], random);
    let amidst = Snapshot::take(a, "amidst");
    for block in [5, 6] {
        std::thread::sleep(Duration::from_millis(1200));
        write(&server, (a, b), &[block], random);
    }
    mirror.kill();
    server.kill();
    // The far side of the mirror ends by itself.
    let until = Instant::now() + Duration::from_secs(60);
    while !b.run(&["recover"]).output().status.success() {
        assert!(Instant::now() < until, "the replica is not let go");
        std::thread::sleep(Duration::from_millis(20));
    }
    [before, amidst]
}

#[test]
fn a_rolled_back_host_does_not_overwrite_what_a_mirror_has_brought() {
    let mut random = Random::new("a host that is rolled back");
    let (a, b) = (Host::with_disk(4 * MIB, &mut random), Host::new());
    let snapshots = mirrored(&a, &b, &mut random);
    let has = image::fingerprint(&b.disk).0;
    for (at, snapshot) in snapshots.iter().enumerate() {
        say(&format!("snapshot {at}"));
        snapshot.restore(&a);
        for served in [false, true] {
            let server = served.then(|| a.site.serve(&[&a.disk], &[]));
            for options in [&[][..], &["--method", "compare"], &["--method", "tracked"], &["-n"]] {
                let refused = a.sync(&b, options).code(4);
                refused.says(&["rolled back", "dsync promote --force", "--discard-there"]);
            }
            a.towards(&b, &["verify", "--repair"]).code(4).says(&["rolled back"]);
            a.towards(&b, &["verify"]).code(4).says(&["rolled back"]);
            if served {
                a.towards(&b, &["mirror"]).code(4).says(&["rolled back"]);
            }
            server.map(Server::stop);
            assert_eq!(has, image::fingerprint(&b.disk).0);
        }
    }
    // The way out that loses nothing.
    b.force();
    b.sync(&a, &[]).code(4).says(&["have diverged", "--save-there FILE"]);
    b.sync(&a, &["--discard-there"]).ok();
    image::assert_equal(&a.disk, &b.disk);
    assert_eq!(has, image::fingerprint(&b.disk).0);
}

/// The one that gives it up goes on as ever, with batches too.
#[test]
fn an_adopted_replica_is_mirrored_on() {
    let mut random = Random::new("a host that is rolled back, and goes on");
    let (a, b) = (Host::with_disk(4 * MIB, &mut random), Host::new());
    let snapshots = mirrored(&a, &b, &mut random);
    snapshots[1].restore(&a);
    a.sync(&b, &[]).code(4);
    let only = image::fingerprint(&b.disk).0;
    a.sync(&b, &["--adopt"])
        .code(4)
        .says(&["gives up nothing that only the replica has", "--adopt=overwrite"]);
    assert_eq!(image::fingerprint(&b.disk).0, only);
    a.sync(&b, &["--adopt=overwrite"]).ok();
    image::assert_equal(&a.disk, &b.disk);
    let [again, amidst] = mirrored(&a, &b, &mut random);
    // Nothing went back: what is left of the epoch is sent.
    let synced = a.sync(&b, &[]).ok().summary();
    assert_eq!(synced["method"], "tracked", "{synced}");
    image::assert_equal(&a.disk, &b.disk);
    drop((again, amidst));
}

/// It hands over before it meets the replica that the mirror brought ahead: who takes over knows as much of its batches as it did.
#[test]
fn who_takes_over_from_a_rolled_back_host_overwrites_no_batches() {
    let mut random = Random::new("a host that is rolled back, and hands over");
    for (rolled_back, to_itself) in [(false, false), (true, false), (false, true), (true, true)] {
        say(&format!("rolled back: {rolled_back}, taken back: {to_itself}"));
        let (a, b, c) = (Host::with_disk(4 * MIB, &mut random), Host::new(), Host::new());
        a.sync(&b, &[]).ok();
        let [_, amidst] = mirrored(&a, &c, &mut random);
        let has = image::fingerprint(&c.disk).0;
        if rolled_back {
            amidst.restore(&a);
        }
        let next = if to_itself {
            a.sync(&b, &[]).ok();
            a.run(&["demote"]).ok();
            a.force();
            &a
        } else {
            a.towards(&b, &["demote"]).ok();
            b.run(&["promote"]).ok();
            &b
        };
        if rolled_back {
            for options in [&[][..], &["--method", "compare"], &["-n"]] {
                next.sync(&c, options).code(4).says(&[
                    "has diverged",
                    "the only copy",
                    "dsync promote --force",
                ]);
            }
            assert_eq!(has, image::fingerprint(&c.disk).0);
        } else {
            assert_eq!(next.sync(&c, &[]).ok().summary()["method"], "tracked");
            image::assert_equal(&next.disk, &c.disk);
        }
    }
}

/// An old source is rolled back to before the epoch that it had in common with the one that took over: what is there and nowhere else is not
/// overwritten, also after its demotion, which knows nothing of the part before.
#[test]
fn who_took_over_is_not_overwritten_by_a_source_that_is_older_than_that() {
    let mut random = Random::new("an old source that is rolled back");
    // Its history leads back to the epoch in common, or it has never known the replica.
    for later in [false, true] {
        say(&format!("a replica made after the snapshot: {later}"));
        let (a, b) = (Host::with_disk(4 * MIB, &mut random), Host::new());
        if !later {
            a.sync(&b, &[]).ok();
        }
        a.write(0..10, &mut random);
        let snapshot = Snapshot::take(&a, "before");
        if later {
            a.sync(&b, &[]).ok();
        }
        a.write(100..120, &mut random);
        a.towards(&b, &["demote"]).ok();
        b.run(&["promote"]).ok();
        b.write(200..205, &mut random);
        snapshot.restore(&a);
        let c = Host::new();
        for block in 300..310 {
            a.write([block], &mut random);
            if block >= 308 {
                a.sync(&c, &[]).ok();
            }
        }
        let has = image::fingerprint(&b.disk).0;
        a.sync(&b, &[]).code(4).says(&[
            "have diverged",
            "cannot be saved as a delta",
            "so copy it first if it is wanted",
        ]);
        b.run(&["demote"]).ok();
        for options in [&[][..], &["--method", "compare"], &["-n"]] {
            let way = if later { "copy it first" } else { "--save-there FILE" };
            a.sync(&b, options).code(4).says(&["was demoted at epoch", way, "--discard-there"]);
        }
        assert_eq!(has, image::fingerprint(&b.disk).0);
        a.sync(&b, &["--discard-there"]).ok();
        image::assert_equal(&a.disk, &b.disk);
    }
}

/// One that takes over knows what a rolled back source has forgotten by the numbers that are taken, also behind a comparison, and from before its
/// own first copy.
#[test]
fn who_takes_over_does_not_overwrite_what_a_rolled_back_source_has_forgotten() {
    for (served, seeded) in [(false, false), (false, true), (true, false), (true, true)] {
        say(&format!("who takes over: served {served}, seeded after it {seeded}"));
        let mut random = Random::new("a forgotten epoch");
        let (a, b, c) = (Host::with_disk(4 * MIB, &mut random), Host::new(), Host::new());
        let serve = || served.then(|| a.site.serve(&[&a.disk], &[]));
        let change = |server: &Option<Server>, random: &mut Random, block: u64| match server {
            Some(server) => {
                let mut client = server.client("vm");
                client.write(block * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
                client.flush().and_then(|()| client.close()).expect("the end");
            }
            None => image::scribble(&a.disk, block * BLOCK, BLOCK, random),
        };
        let server = serve();
        if !seeded {
            a.sync(&b, &[]).ok();
        }
        a.sync(&c, &[]).ok();
        let before = Snapshot::take(&a, "before");
        change(&server, &mut random, 500);
        a.sync(&c, &[]).ok();
        let only = std::fs::read(&c.disk).expect("a replica");
        if let Some(server) = server {
            server.kill();
        }
        before.restore(&a);
        let server = serve();
        for block in [1, 2, 3] {
            change(&server, &mut random, block);
            a.sync(&b, &[]).ok();
        }
        drop(server);
        a.towards(&b, &["demote"]).ok();
        b.run(&["promote"]).ok();
        b.sync(&c, &[]).code(4).says(&["has diverged", "--discard-there"]);
        assert_eq!(std::fs::read(&c.disk).expect("a replica"), only);
        // What is at an epoch of its line, and lags behind, is no such thing.
        b.sync(&c, &["--discard-there"]).ok();
        b.sync(&a, &[]).ok();
        assert_eq!(std::fs::read(&c.disk).ok(), std::fs::read(&b.disk).ok());
    }
}

/// A backup of a disk, made last week.
fn backup_of(disk: &Path) -> PathBuf {
    let backup = disk.with_extension("backup");
    Run::new("cp").arg("-a").args([disk, &backup]).ok();
    Run::new("touch").args(["-d", "6 days ago"]).arg(&backup).ok();
    backup
}

/// Copies a backup into a disk, with its times.
fn put_back(backup: &Path, disk: &Path) {
    Run::new("cp").arg("--preserve=timestamps").args([backup, disk]).ok();
}

/// The disk dies, and last week's image is put in its place: renamed over it, or copied into it with its times.
#[test]
fn a_backup_in_the_place_of_a_disk_in_use_does_not_take_its_replica_back() {
    let mut random = Random::new("a disk that is restored from a backup");
    for (renamed, killed, restores) in
        [(true, false, true), (true, true, false), (false, false, false), (false, true, true)]
    {
        say(&format!("renamed: {renamed}, killed: {killed}, restored from the replica: {restores}"));
        let (a, b) = (Host::with_disk(4 * MIB, &mut random), Host::new());
        let backup = backup_of(&a.disk);
        let server = a.site.serve(&[&a.disk], &[]);
        a.sync(&b, &[]).ok();
        let mut client = server.client("vm");
        client.write(700 * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        client.flush().and_then(|()| client.close()).expect("the end");
        a.sync(&b, &[]).ok();
        if killed {
            server.kill();
        } else {
            server.stop();
        }
        let has = image::fingerprint(&b.disk).0;
        if renamed {
            std::fs::rename(&backup, &a.disk).expect("a backup");
        } else {
            put_back(&backup, &a.disk);
        }
        let words =
            ["may be the newest copy", "days before what was recorded", "sync --adopt", "--accept-source"];
        for served in [false, true, false] {
            let server = served.then(|| a.site.serve(&[&a.disk], &[]));
            for options in [&[][..], &["--method", "compare"], &["--method", "tracked"], &["-n"]] {
                a.sync(&b, options).code(4).says(&words);
            }
            a.towards(&b, &["verify", "--repair"]).code(4).says(&words);
            let command = if served { "mirror" } else { "demote" };
            a.towards(&b, &[command]).code(4).says(&words);
            server.map(Server::stop);
            assert_eq!(has, image::fingerprint(&b.disk).0);
        }
        if restores {
            b.sync(&a, &["--adopt"]).ok();
            a.sync(&b, &["--accept-source"]).ok();
            assert_eq!(has, image::fingerprint(&b.disk).0);
        } else {
            a.sync(&b, &["--accept-source"]).ok();
            assert_ne!(has, image::fingerprint(&b.disk).0);
        }
        image::assert_equal(&a.disk, &b.disk);
        assert_eq!(a.sync(&b, &[]).ok().summary()["method"], "tracked");
    }
}

/// One disk of a group is replaced: none of its replicas is brought to another moment without the others.
#[test]
fn a_backup_in_the_place_of_one_disk_of_a_group_is_noticed() {
    let (mut random, site) =
        (Random::new("a disk of a group that is restored from a backup"), Site::in_memory());
    let disks = ["data.raw", "log.raw"].map(|name| site.image(name, 4 * MIB));
    disks.iter().for_each(|disk| image::scribble(disk, 0, MIB, &mut random));
    let dir = site.path("replicas");
    std::fs::create_dir(&dir).expect("a folder");
    let group = |command: &str| site.dsync([command, "--group", "db"]).arg(&dir);
    let backup = backup_of(&disks[1]);
    let serve = || site.serve(&disks.each_ref().map(PathBuf::as_path), &["--group", "db"]);
    let server = serve();
    for name in ["data", "log"] {
        let mut client = server.client(name);
        client.write(700 * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        client.close().expect("the end");
    }
    group("sync").ok();
    server.stop();
    let replicas = ["data.raw", "log.raw"].map(|name| dir.join(name));
    let content = || replicas.each_ref().map(|replica| image::fingerprint(replica).0);
    let has = content();
    put_back(&backup, &disks[1]);
    let words = ["log.raw", "may be the newest copy", "days before what was recorded", "--accept-source"];
    for served in [false, true] {
        let server = served.then(serve);
        group("sync").code(4).says(&words);
        group("sync").arg("--method=compare").code(4).says(&words);
        group("sync").arg("-n").code(4).says(&words);
        group(if served { "mirror" } else { "demote" }).code(4).says(&words);
        server.map(Server::stop);
        assert_eq!(content(), has);
    }
    group("sync").arg("--accept-source").ok();
    disks.iter().zip(&replicas).for_each(|(disk, replica)| image::assert_equal(disk, replica));
}

/// Nothing tells what is on a device whose server was killed: it is compared. Another disk under its name is another source.
#[test]
fn another_disk_under_the_name_of_a_served_device_is_refused() {
    let what = "another disk under the name of a device";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let (mut random, site) = (Random::new(what), Site::new());
    let [image, other] = ["disk.img", "other.img"].map(|name| site.image(name, 4 * MIB));
    image::scribble(&other, MIB, MIB, &mut random);
    let copy = site.path("copy.raw");
    let Some(disk) = Loop::new(&image) else { return skipped(what, "there is no loop device") };
    let device = disk.device().to_path_buf();
    let sync = |options: &[&str]| site.sync(&device, &copy, options);
    let mut killed = || {
        let server = site.serve(&[&device], &["--trust-device"]);
        let mut client = server.client(&device.file_name().expect("a name").to_string_lossy());
        client.write(700 * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        client.flush().and_then(|()| client.close()).expect("the end");
        sync(&[]).ok();
        server.kill();
    };
    killed();
    // Beneath it: the kernel does not count that as a write to the device.
    Run::new("cp").args([&other, &image]).ok();
    Run::new("blockdev").arg("--flushbufs").arg(&device).ok();
    assert_eq!(sync(&[]).ok().summary()["method"], "compare");
    image::assert_equal(&other, &copy);
    killed();
    let has = image::fingerprint(&copy).0;
    drop(disk);
    let _disk = Loop::named(&device, &other).expect("a loop device");
    for trust in [&[][..], &["--trust-device"]] {
        sync(trust).code(4).says(&["is a copy of another source"]);
        let demote = site.dsync(["demote"]).arg(&device).arg(&copy).args(trust);
        demote.code(4).says(&["is not a source"]);
    }
    assert_eq!(image::fingerprint(&copy).0, has);
}

/// That a backup is in the place of a disk is said of every replica, and whatever else is not known of what was written.
#[test]
fn a_backup_is_noticed_whatever_was_lost_before_it() {
    let mut random = Random::new("a backup after a gap");
    for ended in [false, true] {
        let (a, b, c) = (Host::with_disk(4 * MIB, &mut random), Host::new(), Host::new());
        let backup = backup_of(&a.disk);
        a.write([700], &mut random);
        a.sync(&b, &[]).ok();
        a.sync(&c, &[]).ok();
        // Written to by another program, which the next opening notes; a sync ends the epoch that lacks it.
        image::scribble(&a.disk, MIB, BLOCK, &mut random);
        a.sync(&b, if ended { &[] } else { &["-n"] }).ok();
        let has = [&b, &c].map(|host| image::fingerprint(&host.disk).0);
        put_back(&backup, &a.disk);
        let told = a.site.dsync(["status", "--check"]).code(1).text();
        assert!(
            told.contains("source is not what it was") && told.contains("may be the newest copy"),
            "{told}"
        );
        for host in [&c, &b, &c] {
            a.sync(host, &[]).code(4).says(&["may be the newest copy", "days before what was recorded"]);
            a.towards(host, &["verify", "--repair"]).code(4).says(&["may be the newest copy"]);
        }
        assert_eq!(has, [&b, &c].map(|host| image::fingerprint(&host.disk).0));
        // Who says that it is the source says so of each replica.
        a.sync(&b, &["--accept-source"]).ok();
        a.sync(&c, &["-n"]).code(4).says(&["may be the newest copy"]);
        let told = a.site.dsync(["status", "-v"]).ok().text();
        assert!(told.contains("the next sync is refused: "), "{told}");
        a.sync(&c, &[]).code(4).says(&["may be the newest copy"]);
        a.sync(&c, &["--accept-source"]).ok();
        a.site.dsync(["status", "--check"]).ok();
        image::assert_equal(&a.disk, &c.disk);
    }
}

/// What dsync itself has put in the place of a disk may be older than a replica, as may be what others put there after that.
#[test]
fn a_backup_in_the_place_of_a_disk_that_was_restored_is_noticed() {
    let mut random = Random::new("a backup after a restore");
    let (a, b) = (Host::with_disk(4 * MIB, &mut random), Host::new());
    let backup = backup_of(&a.disk);
    a.write([700], &mut random);
    a.sync(&b, &[]).ok();
    a.write([701], &mut random);
    b.sync(&a, &["--adopt"]).ok();
    let has = image::fingerprint(&b.disk).0;
    a.site.dsync(["forget", "--replica"]).arg(&a.disk).ok();
    // Of the replicas one may be newer than that from which it was restored.
    a.sync(&b, &[]).code(4).says(&["may be the newest copy", "dsync has restored it"]);
    a.sync(&b, &["--accept-source"]).ok();
    a.write([702], &mut random);
    b.sync(&a, &["--adopt"]).ok();
    put_back(&backup, &a.disk);
    a.site.dsync(["forget", "--replica"]).arg(&a.disk).ok();
    for _ in 0..2 {
        a.sync(&b, &[]).code(4).says(&["may be the newest copy"]);
    }
    assert_eq!(has, image::fingerprint(&b.disk).0);
    a.sync(&b, &["--accept-source"]).ok();
    image::assert_equal(&a.disk, &b.disk);
}

/// What is only ever compared may be replaced by what is older, as a dump is; and a copy that has its times goes on as the disk that it is of.
#[test]
fn a_dump_and_a_disk_that_was_moved_are_compared() {
    let mut random = Random::new("a dump that is replaced");
    for served in [false, true] {
        let (a, b) = (Host::with_disk(4 * MIB, &mut random), Host::new());
        if served {
            a.write([700], &mut random);
        }
        a.sync(&b, &[]).ok();
        let other = a.site.path("other.raw");
        if served {
            Run::new("cp").arg("-a").args([&a.disk, &other]).ok();
        } else {
            image::scribble(&a.disk, 0, MIB, &mut random);
            Run::new("cp").args([&a.disk, &other]).ok();
            Run::new("touch").args(["-d", "6 days ago"]).arg(&other).ok();
        }
        std::fs::rename(&other, &a.disk).expect("a file");
        assert_eq!(a.sync(&b, &[]).ok().summary()["method"], "compare");
        image::assert_equal(&a.disk, &b.disk);
    }
}

/// A disk that was restored from an older replica, whatever is done before the first sync to a newer one.
#[test]
fn a_restored_disk_takes_no_newer_replica_back() {
    for steps in
        [&["sync"][..], &["forget", "sync"], &["verify", "forget", "sync"], &["serve", "forget", "sync"]]
    {
        let mut random = Random::new("an older replica");
        let (a, b, c) = (Host::with_disk(4 * MIB, &mut random), Host::new(), Host::new());
        a.write([700], &mut random);
        [&b, &c].iter().for_each(|to| drop(a.sync(to, &[]).ok()));
        a.write([701], &mut random);
        a.sync(&c, &[]).ok();
        let newest = image::fingerprint(&c.disk).0;
        if steps.len() == 1 {
            std::fs::remove_file(&a.disk).expect("it is lost");
            b.sync(&a, &["--create"]).ok();
        } else {
            b.sync(&a, &["--adopt"]).ok();
        }
        for step in steps {
            match *step {
                "forget" => drop(a.site.dsync(["forget", "--replica"]).arg(&a.disk).ok()),
                "verify" => drop(a.towards(&c, &["verify"]).code(5)),
                "serve" => drop(a.towards(&c, &["sync", "-n"]).code(4)),
                _ => drop(a.sync(&c, &[]).code(4).says(&["may be the newest copy", "dsync has restored it"])),
            }
        }
        assert_eq!(newest, image::fingerprint(&c.disk).0, "{steps:?}");
        a.sync(&c, &["--accept-source"]).ok();
        image::assert_equal(&a.disk, &c.disk);
    }
}

/// What was written to a disk since it was restored is in no replica: nothing overwrites it before its user has said so.
#[test]
fn a_restored_disk_that_was_written_to_is_not_repaired() {
    for looked in [false, true] {
        let mut random = Random::new("a restored disk that was written to");
        let (a, b) = (Host::with_disk(4 * MIB, &mut random), Host::new());
        a.sync(&b, &[]).ok();
        std::fs::remove_file(&a.disk).expect("it is lost");
        b.sync(&a, &["--create"]).ok();
        if looked {
            a.sync(&b, &[]).code(4).says(&["dsync has restored it"]);
        }
        std::thread::sleep(Duration::from_millis(30));
        image::scribble(&a.disk, MIB, BLOCK, &mut random);
        let written = image::fingerprint(&a.disk);
        let replica = image::fingerprint(&b.disk);
        let way = format!("dsync forget --replica {}", a.disk.display());
        for refused in [
            a.sync(&b, &[]),
            a.sync(&b, &["--accept-source"]),
            b.sync(&a, &[]),
            a.towards(&b, &["verify", "--repair"]),
            b.towards(&a, &["verify", "--repair"]),
        ] {
            refused.code(4).says(&[
                "was restored as a replica",
                &way,
                "--accept-source",
                "which no replica has",
            ]);
        }
        a.run(&["status"]).code(4).says(&[&way]);
        let shown = a.site.dsync(["status"]).ok().text();
        assert!(shown.contains(&way), "{shown}");
        assert_eq!((written, replica), (image::fingerprint(&a.disk), image::fingerprint(&b.disk)));
        a.site.dsync(["forget", "--replica"]).arg(&a.disk).ok();
        a.sync(&b, &[]).code(4).says(&["dsync has restored it"]);
        a.sync(&b, &["--accept-source"]).ok();
        image::assert_equal(&a.disk, &b.disk);
        assert_eq!(written, image::fingerprint(&a.disk));
        a.write([3], &mut random);
        a.sync(&b, &[]).ok();
        image::assert_equal(&a.disk, &b.disk);
    }
}

/// That its content is another one holds through changes of roles, and for whoever takes over from it.
#[test]
fn another_content_is_not_forgotten_by_a_promotion() {
    let ways = [
        "restored and promoted again",
        "restored and handed over",
        "a backup, promoted again",
        "a backup while it is served, promoted again",
    ];
    for way in ways {
        say(way);
        let mut random = Random::new("another content");
        let (a, b, c) = (Host::with_disk(4 * MIB, &mut random), Host::new(), Host::new());
        let backup = backup_of(&a.disk);
        a.write([700], &mut random);
        [&b, &c].iter().for_each(|to| drop(a.sync(to, &[]).ok()));
        a.write([701], &mut random);
        a.sync(&c, &[]).ok();
        let newest = image::fingerprint(&c.disk).0;
        match way {
            "a backup, promoted again" => {
                put_back(&backup, &a.disk);
                a.sync(&c, &[]).code(4).says(&["may be the newest copy"]);
            }
            "a backup while it is served, promoted again" => {
                let server = a.site.serve(&[&a.disk], &[]);
                std::fs::rename(&backup, &a.disk).expect("a file in its place");
                server.stop();
            }
            _ => {
                b.sync(&a, &["--adopt"]).ok();
                a.site.dsync(["forget", "--replica"]).arg(&a.disk).ok();
            }
        }
        let source = match way {
            "restored and handed over" => {
                a.sync(&b, &["--accept-source"]).ok();
                a.towards(&b, &["demote"]).ok();
                b.run(&["promote"]).ok();
                &b
            }
            _ => {
                a.run(&["demote"]).ok();
                a.run(&["promote", "--force"]).ok();
                &a
            }
        };
        source
            .sync(&c, &[])
            .code(4)
            .says(&["nothing tells whether this source has all that the replica has"]);
        assert_eq!(newest, image::fingerprint(&c.disk).0, "{way}");
        source.sync(&c, &["--discard-there"]).ok();
        image::assert_equal(&source.disk, &c.disk);
    }
}

/// A disk that dsync itself sets back, whichever way that is done, takes no newer replica with it.
#[test]
fn what_dsync_sets_back_overwrites_no_newer_replica() {
    for way in ["fed by deltas", "through a loop device", "passed on, rewound", "passed on, accepted"] {
        say(way);
        let mut random = Random::new("a disk that is set back");
        let host = Host::with_disk(4 * MIB, &mut random);
        let (site, disk) = (&host.site, &host.disk);
        let [older, newer] = ["older.raw", "newer.raw"].map(|name| site.path(name));
        let merge = |since: &str, to: &[&PathBuf]| {
            let delta = site.dsync(["extract", "--since", since]).arg(disk).ok().stdout;
            to.iter().for_each(|to| drop(site.dsync(["merge"]).arg(to).input(delta.clone()).ok()));
        };
        let sync = |from: &PathBuf, to: &PathBuf, options: &[&str]| site.sync(from, to, options);
        let (from, words) = match way {
            "fed by deltas" => {
                merge("0", &[&older, &newer]);
                host.write([700], &mut random);
                merge("1", &[&newer]);
                sync(&older, disk, &["--adopt"]).ok();
                site.dsync(["forget", "--replica"]).arg(disk).ok();
                (disk, "may be the newest copy")
            }
            "through a loop device" => {
                [&older, &newer].iter().for_each(|to| drop(sync(disk, to, &[]).ok()));
                host.write([700], &mut random);
                sync(disk, &newer, &[]).ok();
                let what = "a restore through a loop device";
                let device = if need_root(what) { Loop::new(disk) } else { None };
                if !got(device.as_ref().ok_or("there is no loop device"), what) {
                    continue;
                }
                let device = device.expect("a loop device");
                site.sync(&older, device.device(), &["--adopt"]).ok();
                site.dsync(["forget", "--replica"]).arg(device.device()).ok();
                (disk, "may be the newest copy")
            }
            _ => {
                let epochs = [700, 701].map(|block| {
                    host.write([block], &mut random);
                    let synced = sync(disk, &older, &["--keep-last", "5"]).ok().summary();
                    sync(&older, &newer, &[]).ok();
                    synced["epoch"].to_string()
                });
                if way == "passed on, rewound" {
                    site.dsync(["rewind", "--to", &epochs[0]]).arg(&older).ok();
                } else {
                    let backup = site.path("backup.raw");
                    image::copy(disk, &backup);
                    image::scribble(&backup, MIB, 4096, &mut random);
                    Run::new("touch").args(["-d", "6 days ago"]).arg(&backup).ok();
                    site.serve(&[disk], &[]).stop();
                    std::fs::rename(&backup, disk).expect("a file in its place");
                    sync(disk, &older, &["--accept-source"]).ok();
                }
                (&older, "may be the newest copy")
            }
        };
        let before = image::fingerprint(&newer).0;
        sync(from, &newer, &[]).code(4).says(&[words]);
        assert_eq!(before, image::fingerprint(&newer).0, "{way}");
        sync(from, &newer, &["--save-there", "lost.delta", "--accept-source"])
            .code(4)
            .says(&["cannot be saved"]);
        assert_eq!(before, image::fingerprint(&newer).0, "{way}");
        sync(from, &newer, &["--accept-source"]).ok();
        image::assert_equal(from, &newer);
    }
}

/// A disk that took over is in use, served or not; and to ask for its promotion again changes nothing.
#[test]
fn a_backup_in_the_place_of_a_disk_that_took_over_is_refused() {
    for served in [false, true] {
        let mut random = Random::new("a backup of a disk that took over");
        let (near, far) = (Host::with_disk(4 * MIB, &mut random), Host::new());
        near.sync(&far, &[]).ok();
        let backup = backup_of(&far.disk);
        near.write([700], &mut random);
        near.towards(&far, &["demote"]).ok();
        far.run(&["promote"]).ok();
        if served {
            far.write([701], &mut random);
            far.site.serve(&[&far.disk], &[]).stop();
            far.sync(&near, &[]).ok();
        }
        let newest = image::fingerprint(&near.disk).0;
        put_back(&backup, &far.disk);
        for _ in 0..2 {
            far.sync(&near, &[]).code(4).says(&["may be the newest copy"]);
            assert_eq!(newest, image::fingerprint(&near.disk).0);
            far.run(&["promote"]).code(4).says(&["is a source already (term 2)"]);
        }
        far.sync(&near, &["--accept-source"]).ok();
        image::assert_equal(&far.disk, &near.disk);
    }
}

/// A backup that is copied with its times into the file of a disk, while that is served and nobody writes, or after its server was killed.
#[test]
fn a_backup_in_the_file_of_a_disk_that_was_not_ended_is_refused() {
    for killed in [true, false] {
        let mut random = Random::new("a backup in the file of a disk");
        let (near, far) = (Host::with_disk(4 * MIB, &mut random), Host::new());
        let server = near.site.serve(&[&near.disk], &[]);
        let write = |block: u64, random: &mut Random| {
            let mut client = server.client("vm");
            client.write(block * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
            client.close().expect("the end");
        };
        write(1, &mut random);
        near.sync(&far, &[]).ok();
        let backup = backup_of(&near.disk);
        std::thread::sleep(Duration::from_millis(1100));
        write(2, &mut random);
        near.sync(&far, &[]).ok();
        let newest = image::fingerprint(&far.disk).0;
        let running = if killed {
            drop(server.kill());
            None
        } else {
            Some(server)
        };
        put_back(&backup, &near.disk);
        for options in [&[][..], &["--method", "compare"]] {
            near.sync(&far, options).code(4).says(&["may be the newest copy"]);
        }
        assert_eq!(newest, image::fingerprint(&far.disk).0, "killed: {killed}");
        drop(running);
        near.sync(&far, &[]).code(4).says(&["may be the newest copy"]);
        near.sync(&far, &["--accept-source"]).ok();
        image::assert_equal(&near.disk, &far.disk);
    }
}
