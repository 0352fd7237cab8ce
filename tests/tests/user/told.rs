//! Syncs by a list of changes that somebody else has made: a storage array, Ceph, a script. The disk is seen through snapshots, or is at rest.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsync_tests::far::Far;
use dsync_tests::guest::{self, Guest};
use dsync_tests::image::{self, BLOCK, assert_equal, differing_blocks};
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::{Output, Random, Run, Scene, Site, need, need_root, skipped, until};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// A disk on another machine, of which only snapshots are seen here.
struct Volume {
    site: Site,
    /// What it is called. Nothing is there.
    name: PathBuf,
    /// Its snapshots, in order.
    snapshots: Vec<PathBuf>,
    replica: PathBuf,
    random: Random,
}

impl Volume {
    fn new(what: &str, size: u64) -> Volume {
        let site = Site::new();
        let mut random = Random::new(what);
        let first = site.path("0.snap");
        image::random(&first, size, &mut random);
        // On another machine: nothing of its path is here.
        let (name, replica) = (site.path("storage/volume"), site.path("replica.raw"));
        Volume { site, name, snapshots: vec![first], replica, random }
    }

    /// The same, with a replica of its first snapshot.
    fn synced(what: &str, size: u64) -> Volume {
        let volume = Volume::new(what, size);
        let summary = volume.first(&volume.replica).ok().summary();
        assert_eq!((&summary["method"], &summary["trust"]), (&json!("copy"), &json!("seeded")), "{summary}");
        volume
    }

    fn first(&self, replica: &Path) -> Run {
        self.sync_to(replica, 0, &[])
    }

    /// Takes a snapshot after writes to these blocks.
    fn write(&mut self, blocks: impl IntoIterator<Item = u64>) {
        let next = self.site.path(&format!("{}.snap", self.snapshots.len()));
        image::copy(self.last(), &next);
        for block in blocks {
            image::scribble(&next, block * BLOCK, BLOCK, &mut self.random);
        }
        self.snapshots.push(next);
    }

    fn last(&self) -> &Path {
        self.snapshots.last().expect("a snapshot")
    }

    /// The list of what differs between a snapshot and the one before it, by comparing them.
    fn list(&self, at: usize) -> PathBuf {
        let blocks = differing_blocks(&self.snapshots[at - 1], &self.snapshots[at]);
        let lines: String = blocks.iter().map(|block| format!("{} {BLOCK}\n", block * BLOCK)).collect();
        self.file(&format!("{at}.list"), lines)
    }

    fn file(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.site.path(name);
        std::fs::write(&path, text).expect("a list");
        path
    }

    /// A sync of a snapshot, which is called by its number.
    fn sync_to(&self, replica: &Path, at: usize, options: &[&str]) -> Run {
        let run = self.site.sync(&self.name, replica, &["--as", &format!("s{at}")]);
        run.arg("--moment").arg(&self.snapshots[at]).args(options)
    }

    /// The same by a list since the one before.
    fn sync_by(&self, list: &Path, replica: &Path, at: usize) -> Run {
        let since = format!("s{}", at - 1);
        self.sync_to(replica, at, &["--since", &since]).arg("--changes").arg(list)
    }

    /// Syncs the last snapshot by its list. Blocks that were sent.
    fn sync(&self, replica: &Path) -> u64 {
        let at = self.snapshots.len() - 1;
        let list = self.list(at);
        let summary = self.sync_by(&list, replica, at).ok().summary();
        told_by(&summary, &list);
        assert_equal(self.last(), replica);
        summary["blocks_changed"].as_u64().expect("a number")
    }

    fn verify(&self, options: &[&str]) -> Run {
        let name = format!("s{}", self.snapshots.len() - 1);
        let run = self.site.dsync(["verify", "--json", "--as", &name]).arg(&self.name).arg(&self.replica);
        run.arg("--moment").arg(self.last()).args(options)
    }

    fn status(&self) -> Value {
        self.site.dsync(["status", "--json"]).arg(&self.name).ok().summary()
    }
}

fn told_by(summary: &Value, list: &Path) {
    let trust = format!("as told by {}", list.display());
    assert_eq!((&summary["method"], &summary["trust"]), (&json!("tracked"), &json!(trust)), "{summary}");
}

/// Fails unless it was refused with these words, and left the replica as it was.
fn refused(volume: &Volume, run: Run, words: &[&str]) {
    let before = image::fingerprint(&volume.replica);
    run.code(4).says(words);
    assert_eq!(image::fingerprint(&volume.replica), before);
}

#[test]
fn a_list_of_changes_is_as_good_as_a_record() {
    let mut volume = Volume::synced("told", 16 * MIB);
    volume.write([3, 4, 100, 4095]);
    let list = volume.list(1);
    let before = image::fingerprint(&volume.replica);
    let dry = volume.sync_by(&list, &volume.replica, 1).arg("-n").ok().summary();
    told_by(&dry, &list);
    assert_eq!((&dry["blocks_changed"], image::fingerprint(&volume.replica)), (&json!(4), before));
    assert_eq!(volume.sync(&volume.replica), 4);
    // Nothing changed, and a snapshot all the same.
    volume.write(0..0);
    assert_eq!(volume.sync(&volume.replica), 0);
    assert_eq!(volume.status()["moment"], "s2");
    volume.write(7..8);
    assert_eq!(volume.sync(&volume.replica), 1);
    let verified = volume.verify(&[]).ok().summary();
    assert_eq!((&verified["trust"], &verified["epoch"]), (&json!("exact"), &verified["source_epoch"]));
    // A disk on another machine is not missing.
    let status = volume.status();
    assert_eq!((&status["moment"], &status["size"]), (&json!("s3"), &json!(16 * MIB)), "{status}");
    volume.site.dsync(["status", "--check"]).ok();
}

/// A file that is given for a moment again is what it was then.
#[test]
fn a_moment_that_was_written_to_is_another_one() {
    let volume = Volume::synced("a moment that was written to", MIB);
    let again = || volume.sync_to(&volume.replica, 0, &["--since", "s0"]);
    again().ok();
    let mut random = volume.random.clone();
    image::scribble(volume.last(), 3 * BLOCK, BLOCK, &mut random);
    let words = ["was written to or replaced since the moment \"s0\"", "a name of its own"];
    refused(&volume, again(), &words);
    refused(&volume, volume.verify(&["--repair"]), &words);
    // Nor is another file, wherever it is.
    let other = volume.site.path("other.snap");
    image::copy(volume.last(), &other);
    let run = volume.site.sync(&volume.name, &volume.replica, &["--as", "s0", "--since", "s0"]);
    refused(&volume, run.arg("--moment").arg(&other), &["is another one"]);
}

/// A replica is settled before it is read, also as the moment of another disk.
#[test]
fn a_replica_between_two_epochs_is_no_moment() {
    let mut scene = Scene::synced("an incomplete replica as a moment", 32 * MIB);
    let far = Far::new(RSH);
    far.sync(&scene, &[], None).ok();
    let (site, between) = (&far.site, far.replica());
    let copy = site.path("copy.raw");
    let moment = ["--as", "m", "--moment", between.to_str().expect("UTF-8")];
    scene.change(1200);
    let cut = far.sync(&scene, &["--commit", "in-place"], Some(2 * MIB)).output();
    assert!(!cut.status.success(), "it was to be cut off");
    site.sync(Path::new("/vol/db"), &copy, &moment).code(4).says(&["cut off between"]);
    assert!(!copy.exists(), "something was copied");
    far.sync(&scene, &[], None).ok();
    site.sync(Path::new("/vol/db"), &copy, &moment).ok();
    assert_equal(&scene.image, &copy);
}

#[test]
fn a_list_counts_from_the_moment_of_the_last_epoch_or_is_refused() {
    let mut volume = Volume::synced("told since", MIB);
    volume.write(3..5);
    volume.write(9..10);
    let (first, second) = (volume.list(1), volume.list(2));
    let replica = volume.replica.clone();
    // A list too late.
    refused(&volume, volume.sync_by(&second, &replica, 2), &["since \"s1\"", "the moment \"s0\""]);
    volume.sync_by(&first, &replica, 1).ok();
    // One of the time before, for another moment; and a name that is used twice.
    let again = volume.sync_to(&replica, 2, &["--since", "s0"]).arg("--changes").arg(&first);
    refused(&volume, again, &["since \"s0\"", "the moment \"s1\""]);
    refused(
        &volume,
        volume.sync_to(&replica, 1, &["--since", "s0"]).arg("--changes").arg(&second),
        &["\"s1\" already"],
    );
    refused(
        &volume,
        volume.sync_to(&replica, 1, &["--since", "s1"]).arg("--changes").arg(&second),
        &["\"s1\" already"],
    );
    refused(&volume, volume.verify(&[]), &["the moment \"s1\"", "not the moment \"s2\""]);
    assert_eq!(volume.sync(&replica), 1);
    // An epoch without a name ends the chain; the next one with a name begins another.
    volume.write(1..2);
    let run = volume.site.sync(&volume.name, &replica, &[]).arg("--moment").arg(volume.last());
    assert_eq!(run.ok().summary()["method"], "compare");
    let list = volume.list(3);
    refused(&volume, volume.sync_by(&list, &replica, 3), &["a moment without a name", "omit --changes"]);
    assert_eq!(volume.sync_to(&replica, 3, &[]).ok().summary()["method"], "compare");
    volume.write(2..3);
    assert_eq!(volume.sync(&replica), 1);
    // The list and the names go together.
    let list = ["--changes", "x", "--since", "s3", "--as", "s4"];
    for options in [&list[..2], &list[..4], &list[2..4], &list[2..]] {
        volume.site.sync(&volume.name, &replica, options).code(2);
    }
}

#[test]
fn a_list_that_is_none_or_does_not_fit_its_disk_is_refused() {
    let mut volume = Volume::synced("told what", MIB);
    volume.write(3..5);
    let replica = volume.replica.clone();
    for (list, words) in [
        ("0 4096\n12288 4K\n", &["line 2 is \"12288 4K\""][..]),
        ("12288 8192\n16384 40", &["ends amid line 2", "cut off"]),
        ("1044480 8192\n", &["up to 1052672", "has 1048576"]),
        ("[{\"start\":12288,\"length\":8192,\"depth\":0}]", &["start"]),
        ("{\"size\":2097152,\"ranges\":[[12288,8192]]}", &["of a disk of 2.00 MiB", "has 1.00 MiB"]),
    ] {
        let path = volume.file("list", list);
        refused(&volume, volume.sync_by(&path, &replica, 1), words);
    }
    volume.sync_by(&volume.site.path("none"), &replica, 1).code(1).says(&["cannot read"]);
    // Nothing came of those.
    assert_eq!(volume.status()["moment"], "s0");
    // Through a pipe, with ranges that overlap, in hexadecimal.
    let run = volume.sync_by(Path::new("-"), &replica, 1).input("0x4000 0x1000\n12288 8192\n");
    assert_eq!(run.ok().summary()["trust"], "as told by standard input");
    assert_equal(volume.last(), &replica);
}

#[test]
fn what_a_list_omits_is_found_by_verify() {
    let mut volume = Volume::synced("told wrong", MIB);
    volume.write([3, 4, 70]);
    let wrong = volume.file("wrong", "12288 8192\n");
    volume.sync_by(&wrong, &volume.replica, 1).ok();
    let found = volume.verify(&[]).code(5).summary();
    assert_eq!(found["differing"]["list"], json!([{ "offset": 70 * BLOCK, "bytes": BLOCK }]), "{found}");
    volume.verify(&["--repair"]).ok();
    assert_equal(volume.last(), &volume.replica);
    // The chain goes on.
    volume.write(8..9);
    assert_eq!(volume.sync(&volume.replica), 1);
}

#[test]
fn a_list_is_taken_again_until_its_epoch_has_arrived() {
    let mut volume = Volume::synced("told and killed", 24 * MIB);
    volume.write(1024..5120);
    let list = volume.list(1);
    let mut running = volume.sync_by(&list, &volume.replica, 1).args(["--bwlimit", "2M"]).start();
    let journal = volume.site.path(".replica.raw.dsync/journal");
    until("a part has arrived", || std::fs::metadata(&journal).is_ok_and(|found| found.len() > MIB));
    running.kill();
    drop(running);
    let summary = volume.sync_by(&list, &volume.replica, 1).ok().summary();
    told_by(&summary, &list);
    assert!(summary["blocks_changed"].as_u64() < Some(4096) && summary["resumed"] == true, "{summary}");
    assert_equal(volume.last(), &volume.replica);
    volume.write(1..2);
    assert_eq!(volume.sync(&volume.replica), 1);
}

/// A list counts from a moment that was read in place while others wrote, and the disk was set back to that moment: what had arrived of it may not be it.
#[test]
fn a_moment_that_was_not_read_to_its_end_is_counted_from_by_nobody() {
    for kill in [false, true] {
        let volume = Volume::new("told in place and cut off", 6 * MIB);
        let (mut random, disk, replica) =
            (Random::new("writes"), volume.last().to_path_buf(), &volume.replica);
        let sync = |name: &str, more: &[&str]| {
            volume.site.sync(&disk, replica, &[&["--as", name][..], more].concat())
        };
        sync("s0", &[]).ok();
        image::scribble(&disk, 0, 6 * MIB, &mut random);
        let saved = volume.site.path("saved");
        image::copy(&disk, &saved);
        let list = volume.file("1.list", format!("0 {}\n", 6 * MIB));
        let told = |name: &str, since: &str| {
            sync(name, &["--since", since, "--changes", list.to_str().expect("a path")])
        };
        let mut first = told("s1", "s0").args(["--bwlimit", "2M"]).start();
        let journal = volume.site.path(".replica.raw.dsync/journal");
        until("a part has arrived", || journal.metadata().is_ok_and(|found| found.len() > MIB));
        image::scribble(&disk, 4 * MIB, MIB, &mut random);
        until("more has arrived", || {
            first.ended().is_some() || journal.metadata().is_ok_and(|found| found.len() > 5 * MIB + MIB / 2)
        });
        if kill {
            first.kill();
            drop(first);
        } else {
            first.output(std::time::Duration::from_secs(60)).says(&["another program wrote"]);
        }
        // In its place, as a snapshot is rolled back.
        let bytes = std::fs::read(&saved).expect("the moment");
        std::fs::write(&disk, bytes).expect("the disk");
        image::scribble(&disk, 5 * BLOCK, BLOCK, &mut random);
        volume.file("1.list", format!("{} {BLOCK}\n", 5 * BLOCK));
        let summary = told("s2", "s1").ok().summary();
        assert_eq!(summary["method"], "compare", "{summary}");
        assert_equal(&disk, replica);
        // To verify it raises no doubt.
        volume.site.dsync(["verify", "--as", "s2"]).args([&disk, replica]).ok();
        image::scribble(&disk, 7 * BLOCK, BLOCK, &mut random);
        volume.file("1.list", format!("{} {BLOCK}\n", 7 * BLOCK));
        told_by(&told("s3", "s2").ok().summary(), &list);
        assert_equal(&disk, replica);
    }
}

/// What was written to a snapshot while it was read is in no later list.
#[test]
fn a_snapshot_that_was_written_to_while_it_was_read_is_counted_from_by_nobody() {
    let mut volume = Volume::synced("a snapshot that is written to", 12 * MIB);
    volume.write(0..3072);
    let list = volume.list(1);
    let first = volume.sync_by(&list, &volume.replica, 1).args(["--bwlimit", "4M"]).start();
    let journal = volume.site.path(".replica.raw.dsync/journal");
    until("a part has arrived", || journal.metadata().is_ok_and(|found| found.len() > MIB));
    let snapshot = volume.last().to_path_buf();
    let clean = std::fs::read(&snapshot).expect("the snapshot");
    image::scribble(&snapshot, 10 * MIB, MIB, &mut volume.random);
    first.output(LIMIT).says(&["another program wrote"]);
    // The next one is taken of the disk, which has nothing of that.
    std::fs::write(&snapshot, clean).expect("the snapshot");
    volume.write([5]);
    let list = volume.list(2);
    let summary = volume.sync_by(&list, &volume.replica, 2).ok().summary();
    assert_eq!(summary["method"], "compare", "{summary}");
    assert_equal(volume.last(), &volume.replica);
    volume.write([6]);
    assert_eq!(volume.sync(&volume.replica), 1);
}

/// A line that is cut leaves no doubt of a disk to which nobody wrote meanwhile.
#[test]
fn a_list_counts_from_a_moment_whose_transfer_was_cut_off() {
    let volume = Volume::new("told in place over a line that is cut", 8 * MIB);
    let (mut random, disk, far) = (Random::new("writes"), volume.last().to_path_buf(), Site::new());
    let list = volume.file("list", format!("0 {}\n", 8 * MIB));
    let to = format!("far:{}", volume.replica.display());
    let sync = |options: &[&str]| {
        let run = volume.site.dsync(["sync", "--json", "--rsh", RSH]).arg(&disk).arg(&to);
        run.args(options).env("RSH_STATE", far.state())
    };
    sync(&["--as", "s0"]).ok();
    image::scribble(&disk, 0, 8 * MIB, &mut random);
    let list = list.to_str().expect("a path");
    let told = |name: &str, since: &str| sync(&["--as", name, "--since", since, "--changes", list]);
    told("s1", "s0").env("RSH_CUT", (4 * MIB).to_string()).code(1).says(&["was cut"]);
    image::scribble(&disk, BLOCK, BLOCK, &mut random);
    std::fs::write(list, format!("{BLOCK} {BLOCK}\n")).expect("a list");
    let summary = told("s2", "s1").ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    assert_equal(&disk, &volume.replica);
}

/// The moment of a disk that is mounted is a device of its own: what is written to the disk says nothing of it. And a transfer that was cut off leaves
/// no doubt of what was read in order.
#[test]
fn the_snapshot_of_a_mounted_device_is_counted_from() {
    let what = "the snapshot of a mounted device";
    if !need_root(what) || !need(&["mkfs.ext4"], what) {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new(what));
    let (disk, place) = (site.image("disk", 16 * MIB), site.path("place"));
    Run::new("mkfs.ext4").arg("-q").arg(&disk).ok();
    let Some(origin) = Loop::new(&disk) else { return skipped(what, "no loop device is free") };
    let Some(_mount) = Mount::new(&[], origin.device(), &place) else {
        return skipped(what, "it cannot be mounted here");
    };
    let replicas = [site.path("one.raw"), site.path("two.raw")];
    let mut snapshot = site.path("0.snap");
    image::random(&snapshot, 16 * MIB, &mut random);
    for at in 0..3 {
        let next = site.path(&format!("{}.snap", at + 1));
        image::copy(&snapshot, &next);
        image::scribble(&next, at * MIB, BLOCK, &mut random);
        let device = Loop::new(&snapshot).expect("a loop device");
        // While the disk itself is written to.
        std::fs::write(place.join("file"), random.bytes(1 << 20)).expect("a file");
        let named =
            ["--as".to_owned(), format!("s{at}"), "--moment".into(), device.device().display().to_string()];
        let list = site.path("list");
        std::fs::write(&list, format!("{} {BLOCK}\n", at.saturating_sub(1) * MIB)).expect("a list");
        let list = list.to_str().expect("a path").to_owned();
        let since = ["--since".to_owned(), format!("s{}", at.saturating_sub(1)), "--changes".into(), list];
        for (number, replica) in replicas.iter().enumerate() {
            let sync = site.sync(origin.device(), replica, &[]).args(&named);
            let sync = match (at, number) {
                (0, 0) => sync,
                // Of the same moment.
                (0, _) => sync.args(["--since", "s0"]),
                _ => sync.args(&since),
            };
            let summary = sync.ok().summary();
            let method = if at == 0 { "copy" } else { "tracked" };
            assert_eq!(summary["method"], method, "s{at}, replica {number}: {summary}");
            site.dsync(["verify"]).arg(origin.device()).arg(replica).args(&named).ok();
            assert_equal(&snapshot, replica);
        }
        snapshot = next;
    }
}

#[test]
fn each_replica_gets_what_it_lacks() {
    let mut volume = Volume::synced("told twice", MIB);
    let second = volume.site.path("second.raw");
    // Of the same moment.
    let summary = volume.sync_to(&second, 0, &["--since", "s0"]).ok().summary();
    assert_eq!((&summary["method"], &summary["epoch"]), (&json!("copy"), &json!(1)), "{summary}");
    volume.write(3..5);
    assert_eq!(volume.sync(&volume.replica), 2);
    volume.write(5..6);
    assert_eq!(volume.sync(&volume.replica), 1);
    // Two steps behind, and by the list that was taken already.
    assert_eq!(volume.sync(&second), 3);
    volume.write(6..7);
    assert_eq!(volume.sync(&second), 1);
    assert_eq!(volume.sync(&volume.replica), 1);
}

#[test]
fn a_disk_that_grows_or_shrinks_is_told_of_by_its_size() {
    let mut volume = Volume::synced("told sizes", MIB);
    let replica = volume.replica.clone();
    let next = volume.site.path("1.snap");
    image::copy(volume.last(), &next);
    std::fs::OpenOptions::new()
        .write(true)
        .open(&next)
        .and_then(|file| file.write_all_at(&[7; 4096], MIB + 4096))
        .expect("a write");
    volume.snapshots.push(next);
    let none = volume.file("none", "");
    // The rest of what is new is a hole.
    assert_eq!(volume.sync_by(&none, &replica, 1).ok().summary()["blocks_changed"], 1);
    assert_equal(volume.last(), &replica);
    let next = volume.site.path("2.snap");
    image::copy(volume.last(), &next);
    std::fs::OpenOptions::new().write(true).open(&next).and_then(|file| file.set_len(MIB)).expect("a cut");
    volume.snapshots.push(next);
    refused(&volume, volume.sync_by(&none, &replica, 2), &["shrank from", "--allow-shrink"]);
    volume.sync_by(&none, &replica, 2).arg("--allow-shrink").ok();
    assert_equal(volume.last(), &replica);
    // With larger blocks all is the same.
    volume.write(3..4);
    assert_eq!(volume.sync(&replica), 1);
}

#[test]
fn a_source_that_dsync_records_is_told_of_by_nobody() {
    let mut volume = Volume::new("told and served", MIB);
    let (image, list) = (volume.site.image("vm.raw", MIB), volume.file("list", "0 4096\n"));
    volume.name = image.clone();
    volume.first(&volume.replica).ok();
    let options = |volume: &Volume| {
        let run = volume.site.sync(&image, &volume.replica, &["--as", "s1", "--since", "s0"]);
        run.arg("--changes").arg(&list)
    };
    let server = volume.site.serve(&[&image], &[]);
    refused(&volume, options(&volume), &["dsync itself records", "omit --changes"]);
    server.stop();
    let server = volume.site.serve(&[&image], &["--group", "db"]);
    server.stop();
    refused(&volume, options(&volume), &["in the group db"]);
    let far = format!("far:{}", image.display());
    let run = volume.site.sync(Path::new(&far), &volume.replica, &["--rsh", RSH, "--as", "s1"]);
    run.code(2).says(&["on far"]);
    let name = Path::new("nowhere");
    volume
        .site
        .sync(name, &volume.replica, &["--moment"])
        .arg(volume.last())
        .code(4)
        .says(&["absolute path"]);
}

/// A list that counts from a moment would make a replica of the other content that is no state of the disk.
#[test]
fn the_name_of_a_moment_goes_over_to_no_other_content() {
    let site = Site::new();
    let mut random = Random::new("the name of a moment");
    let (disk, snapshot, other) = (site.path("disk.raw"), site.path("snap1"), site.path("other.raw"));
    image::random(&disk, MIB, &mut random);
    image::copy(&disk, &snapshot);
    let at = |place: &Path| ["--moment".to_owned(), place.display().to_string()];
    let sync = |replica: &str, options: &[&str], place: &[String]| {
        site.sync(&disk, &site.path(replica), options).args(place)
    };
    let (first, again) = (["--as", "m1"], ["--as", "m1", "--since", "m1"]);
    // Of a snapshot, while the disk goes on.
    sync("x.raw", &first, &at(&snapshot)).ok();
    image::scribble(&disk, 60 * BLOCK, BLOCK, &mut random);
    sync("y.raw", &again, &[]).code(4).says(&["was read elsewhere", "--moment"]);
    assert!(!site.path("y.raw").exists());
    sync("y.raw", &again, &at(&snapshot)).ok();
    assert_equal(&snapshot, &site.path("y.raw"));
    // Of the disk itself.
    sync("x.raw", &["--as", "m2"], &[]).ok();
    image::copy(&disk, &other);
    image::scribble(&other, 70 * BLOCK, BLOCK, &mut random);
    let again = ["--as", "m2", "--since", "m2"];
    sync("y.raw", &again, &at(&other)).code(4).says(&["was read there, and not in", "omit --moment"]);
    sync("y.raw", &again, &[]).ok();
    assert_equal(&disk, &site.path("y.raw"));
    // It was written to since: by another program, and through a server.
    image::scribble(&disk, 80 * BLOCK, BLOCK, &mut random);
    sync("y.raw", &again, &[])
        .code(4)
        .says(&["is not the moment \"m2\" any more (the image was changed", "--as"]);
    sync("x.raw", &["--as", "m3"], &[]).ok();
    let before = std::fs::read(&disk).expect("the disk");
    let server = site.serve(&[&disk], &[]);
    server.client("disk").write(90 * BLOCK, &[7; BLOCK as usize]).expect("a write");
    server.stop();
    sync("y.raw", &["--as", "m3", "--since", "m3"], &[])
        .code(4)
        .says(&["any more (it was written to since)"]);
    assert!(std::fs::read(site.path("x.raw")).expect("a replica") == before);
}

/// The disk itself is at rest, and is read at its path.
#[test]
fn a_disk_at_rest_is_told_of_as_well() {
    let what = "lists of a disk at rest";
    if !need_root(what) {
        return;
    }
    let site = Site::new();
    let Some(device) = Loop::new(&site.image("disk.img", 4 * MIB)) else {
        return skipped(what, "there are no loop devices");
    };
    let (disk, replica) = (device.device().to_path_buf(), site.path("replica.raw"));
    let mut random = Random::new(what);
    let old = site.path("old");
    let sync = |name: &str, options: &[&str]| {
        site.sync(&disk, &replica, &["--as", name]).args(options).ok().summary()
    };
    assert_eq!(sync("mon", &[])["trust"], "seeded");
    image::scribble(&disk, 8 * BLOCK, 2 * BLOCK, &mut random);
    std::fs::File::open(&disk).and_then(|file| file.sync_all()).expect("a flush");
    // Told, and not done: it is no record of what was written.
    sync("tue", &["--changes", "/dev/null", "--since", "mon", "-n"]);
    let dry = site.sync(&disk, &replica, &["-n", "--trust-device"]).ok().summary();
    assert_eq!(dry["method"], "compare", "{dry}");
    let list = site.path("list");
    std::fs::write(&list, "0x8000 8192\n").expect("a list");
    let list = list.to_str().expect("a path");
    let summary = sync("tue", &["--changes", list, "--since", "mon"]);
    told_by(&summary, Path::new(list));
    assert_eq!(summary["blocks_changed"], 2);
    image::copy(&disk, &old);
    assert_equal(&old, &replica);
}

#[test]
fn lists_of_ceph_and_of_qemu_are_taken() {
    let mut volume = Volume::synced("told by others", MIB);
    volume.write(3..5);
    // The output of "rbd diff --whole-object --from-snap s0 --format json".
    let ceph = volume.file(
        "ceph",
        r#"[{"offset":12288,"length":4096,"exists":"true"},{"offset":16384,"length":4096,"exists":"false"}]"#,
    );
    assert_eq!(volume.sync_by(&ceph, &volume.replica, 1).ok().summary()["blocks_changed"], 2);
    assert_equal(volume.last(), &volume.replica);
    if !need(&["qemu-img", "qemu-io", "jq"], "lists of qemu-img") {
        return;
    }
    // What is in the overlay of an external snapshot was written since.
    let (base, overlay) = (volume.last().to_path_buf(), volume.site.path("overlay.qcow2"));
    Run::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
        .arg(&base)
        .arg(&overlay)
        .ok();
    let write = "write -P 9 300k 10k";
    Run::new("qemu-io").args(["-c", write]).arg(&overlay).ok();
    let map = Run::new("qemu-img").args(["map", "--output=json"]).arg(&overlay).ok();
    let filter = ".[] | select(.depth == 0) | \"\\(.start) \\(.length)\"";
    let lines: Output = Run::new("jq").args(["-r", filter]).input(map.stdout).ok();
    let next = volume.site.path("2.snap");
    Run::new("qemu-img").args(["convert", "-O", "raw"]).arg(&overlay).arg(&next).ok();
    volume.snapshots.push(next);
    let list = volume.file("qemu", lines.stdout);
    let summary = volume.sync_by(&list, &volume.replica, 2).ok().summary();
    told_by(&summary, &list);
    assert_equal(volume.last(), &volume.replica);
}

/// What one dsync prints another one takes: the disk of the second is a copy of the first one's at the same moments.
#[test]
fn the_changes_of_one_dsync_are_a_list_for_another() {
    let mut volume = Volume::new("told by dsync", MIB);
    let here = Site::new();
    let image = here.path("vm.raw");
    image::copy(volume.last(), &image);
    let server = here.serve(&[&image], &[]);
    here.dsync(["checkpoint", "vm", "far"]).ok();
    volume.first(&volume.replica).ok();
    server.client("vm").write(20 * BLOCK, &[3; 8192]).expect("a write");
    let changes = here.dsync(["changes", "vm", "--since", "far", "--json"]).ok();
    server.stop();
    let next = volume.site.path("1.snap");
    image::copy(&image, &next);
    volume.snapshots.push(next);
    let list = volume.file("changes.json", changes.stdout);
    assert_eq!(volume.sync_by(&list, &volume.replica, 1).ok().summary()["blocks_changed"], 2);
    assert_equal(volume.last(), &volume.replica);
}

/// A qcow2 image on which QEMU keeps a bitmap, and QEMU's server of it.
struct Bitmap {
    image: PathBuf,
    uri: String,
    server: Option<dsync_tests::Background>,
    socket: PathBuf,
}

impl Bitmap {
    fn new(site: &Site, size: &str) -> Bitmap {
        let (image, socket) = (site.path("vm.qcow2"), site.socket("moment"));
        Run::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg(size).ok();
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        Bitmap { image, uri, server: None, socket }
    }

    /// Writes to the disk while it is not served.
    fn write(&mut self, what: &str) {
        self.server = None;
        Run::new("qemu-io").args(["-f", "qcow2", "-c", what]).arg(&self.image).ok();
    }

    fn image_tool(&mut self, words: &[&str], more: &[&str]) {
        self.server = None;
        Run::new("qemu-img").args(words).arg(&self.image).args(more).ok();
    }

    fn serve(&mut self, options: &[&str]) {
        self.server = None;
        let _ = std::fs::remove_file(&self.socket);
        let run = Run::new("qemu-nbd").args(["-t", "-f", "qcow2", "-k"]).arg(&self.socket).args(options);
        self.server = Some(run.arg(&self.image).start());
        until("the server listens", || std::os::unix::net::UnixStream::connect(&self.socket).is_ok());
    }

    fn sync(&self, site: &Site, options: &[&str]) -> Run {
        site.sync(&self.image, &site.path("replica.raw"), &["--moment", &self.uri]).args(options)
    }
}

#[test]
fn the_bitmap_that_an_export_offers_is_a_list() {
    if !need(&["qemu-img", "qemu-io", "qemu-nbd"], "bitmaps of QEMU as lists") {
        return;
    }
    let site = Site::new();
    let mut disk = Bitmap::new(&site, "16M");
    disk.write("write -P 7 1M 3M");
    disk.serve(&["-r"]);
    let seeded = disk.sync(&site, &["--as", "s0"]).ok().summary();
    assert_eq!((&seeded["trust"], &seeded["disk_size"]), (&json!("seeded"), &json!(16 * MIB)), "{seeded}");
    disk.image_tool(&["bitmap", "--add"], &["b0"]);
    disk.write("write -P 8 5M 100k");
    disk.write("discard 2M 64k");
    let list = ["--as", "s1", "--since", "s0", "--changes", "qemu:dirty-bitmap:b0"];
    // The server has it, and does not offer it; then it has another one.
    disk.serve(&["-r"]);
    disk.sync(&site, &list).code(4).says(&["does not offer qemu:dirty-bitmap:b0", "omit --changes"]);
    disk.serve(&["-r", "-B", "b0"]);
    let other = ["--as", "s1", "--since", "s0", "--changes", "qemu:dirty-bitmap:b1"];
    disk.sync(&site, &other).code(4).says(&["does not offer qemu:dirty-bitmap:b1"]);
    let late = ["--as", "s2", "--since", "s1", "--changes", "qemu:dirty-bitmap:b0"];
    disk.sync(&site, &late).code(4).says(&["since \"s1\"", "the moment \"s0\""]);
    // Tried, and done.
    for (options, blocks) in [(&["-n"][..], 48), (&[], 48)] {
        let summary = disk.sync(&site, &list).args(options).ok().summary();
        told_by(&summary, Path::new("qemu:dirty-bitmap:b0"));
        assert_eq!(summary["blocks_changed"], blocks, "{summary}");
    }
    // The same blocks may be dirty again, with other content.
    disk.sync(&site, &list).code(4).says(&["a bitmap does not tell", "--since \"s1\" without --changes"]);
    let shown = site.path("shown.raw");
    Run::new("qemu-img").args(["convert", "-f", "raw", "-O", "raw", &disk.uri]).arg(&shown).ok();
    assert_equal(&shown, &site.path("replica.raw"));
    let verify = ["verify", "--as", "s1", "--moment", &disk.uri];
    site.dsync(verify).arg(&disk.image).arg(site.path("replica.raw")).ok();
    // The image is a qcow2 file; what is read is the disk in it.
    let inner = site.path("inner.qcow2");
    let again = ["--json", "--as", "s1", "--since", "s1", "--moment", &disk.uri];
    site.dsync(["sync"]).arg(&disk.image).arg(&inner).args(again).ok();
    let (shown, inner) = (shown.display().to_string(), inner.display().to_string());
    Run::new("qemu-img").args(["compare", "-f", "raw", "-F", "qcow2", &shown, &inner]).ok();
    // What QEMU may write to is no moment.
    disk.serve(&["-B", "b0"]);
    disk.sync(&site, &["--as", "s2"]).code(4).says(&["can be written to"]);
    disk.server = None;
    disk.sync(&site, &["--as", "s2"]).code(1).says(&["cannot reach", "start its NBD server"]);
}

#[test]
fn a_bitmap_is_taken_of_the_disk_alone_and_of_one_size() {
    if !need(&["qemu-img", "qemu-io", "qemu-nbd"], "bitmaps of QEMU that do not fit") {
        return;
    }
    let site = Site::new();
    let mut disk = Bitmap::new(&site, "16M");
    disk.write("write -P 7 1M 3M");
    disk.serve(&["-r"]);
    disk.sync(&site, &["--as", "s0"]).ok();
    disk.image_tool(&["bitmap", "--add"], &["b0"]);
    disk.serve(&["-r", "-B", "b0"]);
    let list = ["--as", "s1", "--since", "s0", "--changes", "qemu:dirty-bitmap:b0"];
    // A file has no bitmap, and one that is called so is a list.
    let raw = site.image("raw", 16 * MIB);
    let of_file = site.sync(&disk.image, &site.path("replica.raw"), &list);
    of_file.arg("--moment").arg(&raw).code(4).says(&["is a bitmap of an NBD server"]);
    std::fs::write(site.path("qemu:dirty-bitmap:b0"), "0 4K").expect("a list");
    let named = ["--as", "s1", "--since", "s0", "--changes", "./qemu:dirty-bitmap:b0"];
    disk.sync(&site, &named).code(4).says(&["line 1 is \"0 4K\""]);
    // The export of another disk than the one in the image.
    let other = site.path("other.qcow2");
    std::fs::rename(&disk.image, &other).expect("a move");
    Run::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&disk.image).arg("8M").ok();
    disk.sync(&site, &list).code(4).says(&["has 8.00 MiB", "has 16.0 MiB", "the export of that disk"]);
    std::fs::rename(&other, &disk.image).expect("a move");
    // QEMU marks nothing when it changes the size.
    disk.image_tool(&["resize", "-q"], &["17M"]);
    disk.serve(&["-r", "-B", "b0"]);
    disk.sync(&site, &list).code(4).says(&["had 16.0 MiB", "has 17.0 MiB", "omit --changes"]);
    assert_eq!(disk.sync(&site, &["--as", "s1"]).ok().summary()["method"], "compare");
}

/// A script of the guide.
pub(crate) fn of_guide(name: &str) -> String {
    let guide = std::fs::read_to_string(dsync_tests::repository().join("docs/guide.md")).expect("the guide");
    let scripts = guide.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let mut named = scripts.filter(|script| script.starts_with(&format!("#!/bin/sh\n# {name} ")));
    named.next().unwrap_or_else(|| panic!("no {name}")).to_owned()
}

/// Stands for Ceph: an image and its snapshots are files in a folder.
const RBD: &str = r#"#!/bin/sh
set -e
cd "$RBD"
case "$1 $2" in
"snap create") cp live "${3#*@}" ;;
"snap rm") rm "${3#*@}" ;;
"snap ls") ls | jq -R '{name: .}' | jq -s . ;;
"map --read-only") echo "$RBD/${3#*@}" ;;
"unmap "*) ;;
"diff --format") cmp -l "$5" "${6#*@}" | awk '
    BEGIN { printf "[" }
    { at = int(($1 - 1) / 4096) * 4096 }
    at != last || NR == 1 { printf "%s{\"offset\":%d,\"length\":4096,\"exists\":\"true\"}", comma, at; comma = ","; last = at }
    END { print "]" }' ;;
*) exit 3 ;;
esac
"#;

#[test]
fn the_script_of_the_guide_follows_an_image_of_ceph() {
    if !need(&["jq"], "the script of the guide") {
        return;
    }
    let mut volume = Volume::new("the script of the guide", MIB);
    let (ceph, bin, first) = (volume.site.path("ceph"), volume.site.path("bin"), volume.replica.clone());
    for folder in [&ceph, &bin] {
        std::fs::create_dir(folder).expect("a folder");
    }
    let live = ceph.join("live");
    image::copy(volume.last(), &live);
    volume.file("bin/rbd", RBD);
    volume.file("bin/hostname", "#!/bin/sh\necho $NAME\n");
    Run::new("chmod").arg("+x").args([bin.join("rbd"), bin.join("hostname")]).ok();
    let path = volume.file("rbd-sync", of_guide("rbd-sync"));
    // Another host, whose name begins like the first one's, syncs the same image.
    let (other, second) = (Site::new(), volume.site.path("second.raw"));
    let run = |site: &Site, name: &str, replica: &Path| {
        let inner = "PATH=$BIN:$PATH exec sh \"$@\"";
        let run = site.run("/bin/sh".as_ref()).env("RBD", &ceph).env("BIN", &bin).env("NAME", name);
        let said =
            run.args(["-c", inner, "sh"]).arg(&path).arg("pool/image").arg(replica).limit(LIMIT).ok().text();
        assert_equal(&live, replica);
        said
    };
    assert!(run(&other, "db-2", &second).contains("seeded"));
    assert!(run(&volume.site, "db", &first).contains("seeded"));
    for blocks in [0, 3] {
        if blocks > 0 {
            image::scribble(&live, 40 * BLOCK, blocks * BLOCK, &mut volume.random);
        }
        for said in [run(&volume.site, "db", &first), run(&other, "db-2", &second)] {
            assert!(said.contains("as told by"), "{said}");
        }
        let names = std::fs::read_dir(&ceph).expect("the snapshots").count();
        assert_eq!(names, 3, "one snapshot of each host is kept");
    }
    // One of a run that was killed.
    image::copy(&live, &ceph.join("dsync:db:20000101T000000.0"));
    run(&volume.site, "db", &first);
    assert_eq!(std::fs::read_dir(&ceph).expect("the snapshots").count(), 3);
}

/// Stand for LVM: the folder has what each volume's run does to the metadata snapshot of its pool.
const LVM: [(&str, &str); 6] = [
    (
        "lvs",
        "case \"$*\" in *lv_dm_path*) echo /dev/mapper/vg-pool ;; *pool_lv*) echo pool ;; *thin_id*) echo 1 ;; esac",
    ),
    (
        "dmsetup",
        r#"case $4 in
reserve*) [ ! -e held ] || exit 1; echo $ME >held ;;
release*) [ -e held ] || exit 1; rm held ;;
esac"#,
    ),
    (
        "thin_delta",
        r#"touch "reads-$ME"
for i in $(seq 50); do [ "$(cat held)" = $ME ] || { echo "the metadata snapshot is gone" >&2; exit 1; }; sleep 0.02; done
echo '<superblock data_block_size="128">'"#,
    ),
    ("lvcreate", ""),
    ("blockdev", "echo 1048576"),
    (
        "dsync",
        "case $1 in status) echo '{\"moment\":\"m0\"}' ;; *) [ -e \"$9\" ] && touch \"synced-$ME\" ;; esac",
    ),
];

#[test]
fn volumes_of_a_thin_pool_take_turns_with_the_snapshot_of_its_metadata() {
    if !need(&["jq"], "the script of the guide") {
        return;
    }
    let site = Site::in_memory();
    let (bin, script) = (site.path("bin"), site.path("thin-sync"));
    std::fs::create_dir(&bin).expect("a folder");
    for (name, what) in LVM {
        std::fs::write(bin.join(name), format!("#!/bin/sh\n{what}\n")).expect("a program");
        Run::new("chmod").arg("+x").arg(bin.join(name)).ok();
    }
    let locks = format!("{}/", site.dir().display());
    std::fs::write(&script, of_guide("thin-sync").replace("/run/lock/", &locks)).expect("the script");
    let start = |name: &str| {
        let run = Run::shell("PATH=$PWD/bin:$PATH exec sh thin-sync vg/$ME replica-$ME").dir(site.dir());
        run.env("ME", name).limit(LIMIT).start()
    };
    // Of a run that was killed.
    std::fs::write(site.path("held"), "nobody").expect("a file");
    let first = start("lv1");
    until("the first one reads", || site.path("reads-lv1").exists());
    let second = start("lv2");
    for (run, name) in [(first, "lv1"), (second, "lv2")] {
        let output = run.output(LIMIT);
        assert!(output.status.success() && site.path(&format!("synced-{name}")).exists(), "{output}");
    }
    assert!(!site.path("held").exists());
}

/// A volume in a thin pool, on which a guest runs the script of the guide.
const THIN: &str = r#"set -e
export LVM_SYSTEM_DIR=/tmp/lvm DSYNC_STATE_DIR=/tmp/state DSYNC_RUN_DIR=/tmp/run-dsync LVM_SUPPRESS_FD_WARNINGS=1
export PATH=/tmp/files:$PATH
mkdir -p /tmp/lvm /run/lock/lvm
printf '%s\n' 'activation { udev_sync = 0 udev_rules = 0 monitoring = 0 }' 'devices { use_devicesfile = 0 obtain_device_list_from_udev = 0 }' \
    'backup { backup = 0 archive = 0 }' >/tmp/lvm/lvm.conf
vgcreate -q my-vg /dev/vda
lvcreate -q -L 64M -c 64k -T my-vg/the-pool
lvcreate -q -V 32M -T my-vg/the-pool -n vm
vm=/dev/my-vg/vm
put() { dd if=/dev/urandom of=$vm bs=64k seek="$1" count="$2" conv=fsync 2>/dev/null; }
run() {
    sh /tmp/files/thin-sync my-vg/vm /tmp/replica.raw >/tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    cat /tmp/said
    grep -q "$1" /tmp/said
    cmp $vm /tmp/replica.raw
    # The pool, the volume and its last snapshot; and nothing holds the metadata.
    [ "$(lvs --noheadings my-vg | wc -l)" = 3 ]
    dmsetup message my--vg-the--pool-tpool 0 reserve_metadata_snap
    dmsetup message my--vg-the--pool-tpool 0 release_metadata_snap
}
put 0 100
run seeded
put 7 1
put 200 2
blkdiscard -o 2621440 -l 262144 $vm
run "as told by"
run "is up to date"
put 9 1
dmsetup message my--vg-the--pool-tpool 0 reserve_metadata_snap
dd if=/dev/zero of=$vm bs=64k seek=300 count=1 conv=fsync 2>/dev/null
run "as told by"
mark done
"#;

#[test]
fn the_script_of_the_guide_follows_a_volume_of_a_thin_pool() {
    let what = "the script of the guide in a guest with LVM";
    if !guest::wanted(what) || !guest::possible(what) || !need(&["lvm", "thin_delta", "dmsetup", "jq"], what)
    {
        return;
    }
    let site = Site::new();
    let script = site.path("thin-sync");
    std::fs::write(&script, of_guide("thin-sync")).expect("the script");
    let guest = Guest::boot(&guest::Options {
        script: THIN.into(),
        disks: vec![site.image("disk.raw", 192 * MIB).display().to_string()],
        modules: vec!["dm_thin_pool".into(), "dm_snapshot".into()],
        files: vec![script, dsync_tests::site::binary().into()],
        ..guest::Options::default()
    });
    let said = guest.finish(Duration::from_secs(300));
    assert!(said.iter().any(|line| line.contains("done")), "{said:#?}");
}
