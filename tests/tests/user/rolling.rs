//! `dsync sync --method rolling`: files whose content has moved, by every way to commit them, and plain files that nobody
//! serves.

use std::path::Path;
use std::time::Duration;

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::mount::Mount;
use dsync_tests::scene::number;
use dsync_tests::{Random, Run, Scene, Site, need, need_root, rounds};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// A plain file and its replica.
struct Plain {
    site: Site,
    random: Random,
    source: std::path::PathBuf,
    replica: std::path::PathBuf,
}

impl Plain {
    fn new(what: &str, size: u64) -> Plain {
        let mut random = Random::new(what);
        let site = Site::new();
        let (source, replica) = (site.path("dump.sql"), site.path("copy.sql"));
        std::fs::write(&source, random.bytes(size as usize)).expect("a file");
        site.sync(&source, &replica, &[]).ok();
        Plain { site, random, source, replica }
    }

    /// Edits the source, so that its times tell.
    fn edit(&mut self, edit: impl FnOnce(&mut Vec<u8>, &mut Random)) -> u64 {
        let mut bytes = std::fs::read(&self.source).expect("the source");
        edit(&mut bytes, &mut self.random);
        std::thread::sleep(Duration::from_millis(60));
        std::fs::write(&self.source, &bytes).expect("a file");
        bytes.len() as u64
    }

    fn rolling(&self, options: &[&str]) -> Value {
        let all = [&["--method", "rolling", "--allow-shrink"], options].concat();
        let summary = self.site.sync(&self.source, &self.replica, &all).ok().summary();
        assert_eq!(summary["method"], "rolling", "{summary}");
        assert!(summary["trust"].as_str().is_some_and(|t| t.starts_with("compared")), "{summary}");
        image::assert_equal(&self.source, &self.replica);
        summary
    }
}

fn any_edit(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..random.within(1..6) {
        let size = bytes.len() as u64;
        let at = random.below(size.max(1)) as usize;
        let len = (random.below(size / 4 + 1) as usize).min(bytes.len() - at.min(bytes.len()));
        let to = random.below(size.max(1)) as usize;
        match random.below(9) {
            0 => drop(bytes.splice(at..at, random.bytes(len))),
            1 => drop(bytes.drain(at..at + len)),
            2 => {
                let part: Vec<u8> = bytes.drain(at..at + len).collect();
                let to = to.min(bytes.len());
                bytes.splice(to..to, part);
            }
            3 => (0..len.min(bytes.len() - to)).for_each(|n| bytes.swap(at + n, to + n)),
            4 => {
                let part = bytes[at..at + len].to_vec();
                bytes.splice(to..to, part);
            }
            5 => bytes[at..at + len].reverse(),
            6 => bytes.truncate(bytes.len() - len),
            7 => bytes.extend(random.bytes(len)),
            _ => bytes[at..at + len].fill(0),
        }
        bytes.truncate(12 << 20);
    }
}

#[test]
fn what_has_moved_is_not_sent_again() {
    for commit in ["journal", "in-place"] {
        let mut plain = Plain::new("moved", 24 * MIB);
        let fresh = MIB as usize + 77;
        plain.edit(|bytes, random| drop(bytes.splice(0..0, random.bytes(fresh))));
        let summary = plain.rolling(&["--commit", commit]);
        let sent = number(&summary, "bytes_sent");
        assert!(sent < fresh as u64 + 64 * 1024, "{sent} bytes sent for {fresh}: {summary}");
        assert!(number(&summary, "bytes_copied") > 23 * MIB, "{summary}");
        // And back: nothing but the places is sent.
        plain.edit(|bytes, _| drop(bytes.drain(0..fresh)));
        let summary = plain.rolling(&["--commit", commit]);
        assert!(number(&summary, "bytes_sent") < 64 * 1024, "{summary}");
        // Nothing has changed.
        let summary = plain.rolling(&["--commit", commit]);
        assert_eq!(number(&summary, "blocks_changed"), 0, "{summary}");
    }
}

#[test]
fn any_edit_by_any_way() {
    let mut plain = Plain::new("any edit", 6 * MIB);
    let ways: [&[&str]; 4] = [
        &["--commit", "journal"],
        &["--commit", "in-place"],
        &["--commit", "in-place", "--cycles", "delete"],
        &["--commit", "journal", "--compress"],
    ];
    for round in 0..rounds(12, 200) {
        let size = plain.edit(any_edit);
        let summary = plain.rolling(ways[round as usize % ways.len()]);
        assert!(number(&summary, "bytes_sent") < size + size / 16 + 256 * 1024, "{summary}");
    }
    // A file without a byte, and from one.
    plain.edit(|bytes, _| bytes.clear());
    plain.rolling(&["--commit", "in-place"]);
    plain.edit(|bytes, random| *bytes = random.bytes(100_001));
    plain.rolling(&[]);
    plain.edit(|bytes, _| bytes.clear());
    plain.rolling(&[]);
    plain.edit(|bytes, random| *bytes = random.bytes(100_001));
    plain.site.sync(&plain.source, &plain.replica, &[]).ok();
    image::assert_equal(&plain.source, &plain.replica);
}

#[test]
fn into_a_clone() {
    let what = "--method rolling --commit reflink on XFS";
    if !need(&["mkfs.xfs"], what) || !need_root(what) {
        return;
    }
    let mut plain = Plain::new("rolling reflink", 8 * MIB);
    let disk = plain.site.image("xfs.img", 512 * MIB);
    Run::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&disk).ok();
    let Some(_mount) = Mount::new(&["-o", "loop"], &disk, &plain.site.path("xfs")) else {
        return dsync_tests::skipped(what, "XFS cannot be mounted here");
    };
    plain.replica = plain.site.path("xfs/copy.sql");
    plain.site.sync(&plain.source, &plain.replica, &[]).ok();
    for _ in 0..rounds(4, 40) {
        plain.edit(any_edit);
        plain.rolling(&["--commit", "reflink"]);
    }
    // What has moved by whole blocks is shared with the old file, and not written.
    plain.edit(|bytes, random| *bytes = random.bytes(12 << 20));
    plain.rolling(&["--commit", "reflink"]);
    for (inserted, most) in [(1 << 20, 3 * MIB), (777, 14 * MIB)] {
        plain.edit(|bytes, random| drop(bytes.splice(0..0, random.bytes(inserted))));
        let summary = plain.rolling(&["--commit", "reflink"]);
        assert!(number(&summary, "bytes_copied") > 11 * MIB, "{summary}");
        let written = number(&summary, "bytes_written");
        assert!(written < most, "{written} bytes were written for {inserted} inserted: {summary}");
    }
}

/// A source that nobody serves has no record: whatever happened to it is found.
#[test]
fn a_plain_file_is_compared_always() {
    for method in ["auto", "compare", "rolling", "copy"] {
        let mut plain = Plain::new("plain", 4 * MIB);
        // Once an equal size, once another.
        for n in 0..2u64 {
            plain.edit(|bytes, _| {
                bytes[MIB as usize] ^= 1;
                bytes.truncate((4 * MIB - n * 5000) as usize);
            });
            let options = ["--method", method, "--allow-shrink"];
            let summary = plain.site.sync(&plain.source, &plain.replica, &options).ok().summary();
            assert_ne!(summary["method"], "tracked", "{summary}");
            image::assert_equal(&plain.source, &plain.replica);
        }
    }
}

#[test]
fn a_served_disk_and_one_far_away() {
    let (mut scene, far) = (Scene::new("rolling, far", 32 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    // A guest moves a part of its disk.
    let mut client = scene.client();
    let part = client.read(0, 4 * MIB as u32).expect("a read");
    client.write(17 * MIB + 3 * BLOCK, &part).expect("a write");
    client.close().expect("the end");
    for commit in ["journal", "in-place"] {
        let changed = scene.change(20);
        far.carried();
        let summary = far.sync(&scene, &["--method", "rolling", "--commit", commit], None).ok().summary();
        assert_eq!(summary["method"], "rolling", "{summary}");
        image::assert_equal(&scene.image, &far.replica());
        let (sent, _) = far.carried();
        assert!(sent < changed.len() as u64 * 16 * 1024 + MIB / 2, "{sent} bytes: {summary}");
    }
    // The record goes on from there.
    let changed = scene.change(30);
    let summary = far.sync(&scene, &[], None).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
}

#[test]
fn a_transfer_that_is_cut_leaves_old_or_incomplete_and_is_mended() {
    for commit in ["journal", "in-place"] {
        let (mut scene, far) = (Scene::new("rolling, cut", 16 * MIB), Far::new(RSH));
        far.sync(&scene, &[], None).ok();
        let before = std::fs::read(far.replica()).expect("the replica");
        scene.change(1024);
        for cut in [500, 100_000, 2 * MIB] {
            let options = ["--method", "rolling", "--commit", commit];
            let run = far.sync(&scene, &options, Some(cut)).output();
            assert!(!run.status.success(), "{run}");
            if commit == "journal" {
                assert!(std::fs::read(far.replica()).expect("the replica") == before, "it changed: {run}");
            }
        }
        let status = far.site.dsync(["recover"]).arg(far.replica()).arg("--json").output();
        let state = if commit == "journal" { "exact" } else { "incomplete" };
        assert!(status.text().contains(state), "{commit}: {status}");
        // Without a word about the method: what was cut off in place is compared.
        let summary = far.sync(&scene, &[], None).ok().summary();
        let method = if commit == "journal" { "tracked" } else { "compare" };
        assert_eq!(summary["method"], method, "{summary}");
        image::assert_equal(&scene.image, &far.replica());
    }
}

/// Killed at any moment: old or new with a journal, incomplete or new in place; and the next sync mends it.
#[test]
fn killed_at_any_moment() {
    let mut plain = Plain::new("rolling, killed", 8 * MIB);
    for round in 0..rounds(10, 100) {
        let commit = if round % 2 == 0 { "journal" } else { "in-place" };
        let old = std::fs::read(&plain.replica).expect("the replica");
        plain.edit(|bytes, random| {
            let fresh = random.within(1..400_000);
            bytes.splice(0..0, random.bytes(fresh as usize));
            bytes.rotate_left(MIB as usize);
            bytes.truncate(8 << 20);
        });
        let new = std::fs::read(&plain.source).expect("the source");
        let options = ["--method", "rolling", "--commit", commit];
        let mut run = plain.site.sync(&plain.source, &plain.replica, &options).start();
        std::thread::sleep(Duration::from_millis(plain.random.below(250)));
        run.kill();
        run.killed();
        let recovered = plain.site.dsync(["recover"]).arg(&plain.replica).ok();
        if commit == "journal" {
            let now = std::fs::read(&plain.replica).expect("the replica");
            assert!(now == old || now == new, "neither old nor new: {recovered}");
        }
        let again = if round % 3 == 0 { "auto" } else { "rolling" };
        let options = ["--method", again, "--commit", commit];
        plain.site.sync(&plain.source, &plain.replica, &options).ok();
        image::assert_equal(&plain.source, &plain.replica);
    }
}

#[test]
fn a_device_and_a_copy_carried_by_hand() {
    let mut plain = Plain::new("rolling, adopt", 4 * MIB);
    let carried = plain.site.path("carried.sql");
    image::copy(&plain.source, &carried);
    plain.edit(|bytes, random| drop(bytes.splice(0..0, random.bytes(9000))));
    // At its place nothing is as it was.
    plain
        .site
        .sync(&plain.source, &carried, &["--method", "rolling", "--adopt"])
        .code(4)
        .says(&["=overwrite"]);
    let options = ["--method", "rolling", "--adopt=overwrite"];
    let summary = plain.site.sync(&plain.source, &carried, &options).ok().summary();
    assert!(number(&summary, "bytes_sent") < 100_000, "{summary}");
    image::assert_equal(&plain.source, &carried);

    let what = "--method rolling to a device";
    if !need(&["losetup"], what) || !need_root(what) {
        return;
    }
    let disk = plain.site.image("disk.img", 8 * MIB);
    image::scribble(&disk, 5 * MIB, 2 * MIB, &mut plain.random);
    let Some(device) = dsync_tests::mount::Loop::new(&disk) else {
        return dsync_tests::skipped(what, "no loop device");
    };
    let to = |plain: &Plain, options: &[&str]| plain.site.sync(&plain.source, device.device(), options).ok();
    // It is not blank.
    to(&plain, &["--adopt=overwrite"]);
    for commit in ["journal", "in-place"] {
        // It grows over what a device held before.
        let size = plain.edit(|bytes, random| drop(bytes.splice(7..7, random.bytes(600_001))));
        let summary = to(&plain, &["--method", "rolling", "--commit", commit]).summary();
        assert!(number(&summary, "bytes_sent") < 900_000, "{summary}");
        same_beginning(&plain.source, device.device(), size);
    }
}

fn same_beginning(source: &Path, device: &Path, size: u64) {
    use std::io::Read;
    let mut found = vec![0; size as usize];
    std::fs::File::open(device).and_then(|mut d| d.read_exact(&mut found)).expect("the device");
    assert!(std::fs::read(source).expect("the source") == found, "the device differs");
}
