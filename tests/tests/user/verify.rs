//! `dsync verify`: what it finds, what it mends, and when it must find nothing.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::host::Host;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::load::{Load, Options};
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::scene::{fingerprints, number, restamp};
use dsync_tests::{Random, Run, Scene, Site, need, need_root, rounds, skipped, until};

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

fn verify(scene: &Scene, options: &[&str]) -> Run {
    scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica).arg("--json").args(options)
}

/// Flips single bits of a file within a range, in so many different blocks; their numbers.
fn flip(path: &Path, within: std::ops::Range<u64>, count: usize, random: &mut Random) -> BTreeSet<u64> {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("an image");
    let mut blocks = BTreeSet::new();
    while blocks.len() < count {
        let at = random.within(within.clone());
        if blocks.insert(at / BLOCK) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).expect("reading");
            byte[0] ^= 1 << random.below(8);
            file.write_all_at(&byte, at).expect("writing");
        }
    }
    blocks
}

/// Flips bits of a host's disk as a fault beneath it does: nothing else shows it.
fn damage(host: &Host, within: std::ops::Range<u64>, count: usize, random: &mut Random) {
    let before = std::fs::metadata(&host.disk).and_then(|file| file.modified()).expect("a time");
    flip(&host.disk, within, count, random);
    let file = OpenOptions::new().write(true).open(&host.disk).expect("a replica");
    file.set_modified(before).expect("its time");
    drop(file);
    restamp(&host.disk);
}

/// The blocks that a summary lists.
fn listed(summary: &serde_json::Value, field: &str) -> BTreeSet<u64> {
    let list = summary[field]["list"].as_array().expect("a list");
    list.iter()
        .flat_map(|e| {
            let (at, len) = (number(e, "offset"), number(e, "bytes"));
            at / BLOCK..(at + len).div_ceil(BLOCK)
        })
        .collect()
}

#[test]
fn a_hundred_flipped_bits_are_found_and_mended() {
    for (options, far) in [(&[][..], false), (&["--hash", "xxh3"], false), (&["--commit", "in-place"], true)]
    {
        let mut scene = Scene::new("flips", 96 * MIB + 1234);
        let beyond = far.then(|| Far::new(RSH));
        let run = |scene: &Scene, more: &[&str]| {
            // How a repair is committed means nothing where none is made.
            let applies = more.contains(&"--repair") || options.first() != Some(&"--commit");
            let all = [if applies { options } else { &[] }, more].concat();
            match &beyond {
                Some(far) => far.run("verify", scene, &all, None),
                None => verify(scene, &all),
            }
        };
        match &beyond {
            Some(far) => {
                far.sync(&scene, &[], None).ok();
                scene.replica = far.replica();
            }
            None => drop(scene.sync(&[]).ok()),
        }
        let sound = run(&scene, &[]).ok().summary();
        assert_eq!((number(&sound["differing"], "bytes"), &sound["trust"]), (0, &"exact".into()), "{sound}");
        let mut flipped = flip(&scene.replica, 0..96 * MIB + 1234, 98, &mut scene.random);
        // The very first bit and the very last.
        flipped.extend(flip(&scene.replica, 0..1, 1, &mut scene.random));
        flipped.extend(flip(&scene.replica, 96 * MIB + 1233..96 * MIB + 1234, 1, &mut scene.random));
        let before = image::fingerprint(&scene.replica);
        let found = run(&scene, &[]).code(5).summary();
        assert_eq!(listed(&found, "differing"), flipped, "{found}");
        assert_eq!(image::fingerprint(&scene.replica), before, "looking changes nothing");
        let mended = run(&scene, &["--repair"]).ok().summary();
        assert_eq!(listed(&mended, "differing"), flipped, "{mended}");
        assert!(mended["repaired"] == true, "{mended}");
        scene.equal();
        let sound = run(&scene, &[]).ok().summary();
        assert_eq!(number(&sound["differing"], "extents"), 0, "{sound}");
        // It is followed as before.
        let changed = scene.change(20);
        let summary = match &beyond {
            Some(far) => far.sync(&scene, &[], None).ok().summary(),
            None => scene.sync(&[]).ok().summary(),
        };
        assert_eq!(summary["method"], "tracked", "{summary}");
        assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
        scene.equal();
    }
}

#[test]
fn a_sound_replica_of_a_busy_source_raises_no_alarm() {
    let mut scene = Scene::synced("no false alarm", 64 * MIB);
    let mut random = scene.random.clone();
    let load = Load::start(
        &scene.server().address(),
        "vm",
        &Options { rate: 1500, ..Options::default() },
        &mut random,
    );
    load.wait_for(200);
    for round in 0..rounds(4, 60) {
        let summary = verify(&scene, &[]).ok().summary();
        assert_eq!(summary["trust"], "exact", "{summary}");
        assert!(number(&summary, "bytes_changed_since") > 0, "nothing was written: {summary}");
        assert_eq!(number(&summary["differing"], "extents"), 0, "{summary}");
        load.wait_for(load.answered() + 100);
        if round % 2 == 1 {
            scene.sync(&[]).ok();
        }
    }
    // Damage is found all the same, unless the source has written there since; and mended.
    scene.sync(&[]).ok();
    let flipped = flip(&scene.replica, 0..64 * MIB, 100, &mut scene.random);
    let found = verify(&scene, &[]).code(5).summary();
    let seen = listed(&found, "differing");
    assert!(seen.is_subset(&flipped), "a false alarm: {found}");
    let since = number(&found, "bytes_changed_since") / BLOCK;
    assert!(flipped.len() as u64 - seen.len() as u64 <= since, "{found}");
    let mended = verify(&scene, &["--repair"]).ok().summary();
    assert!(number(&mended, "epoch_after") > number(&mended, "epoch"), "{mended}");
    let summary = verify(&scene, &[]).ok().summary();
    assert_eq!(number(&summary["differing"], "extents"), 0, "{summary}");
    let written = load.stop();
    assert_eq!(scene.sync(&[]).ok().summary()["method"], "tracked");
    scene.equal();
    written.check(&scene.replica);
}

#[test]
fn ranges_are_looked_at_and_mended_by_themselves() {
    let mut scene = Scene::synced("ranges", 32 * MIB);
    // Damage that the system does not tell of: the file's times are set back to what the lineage knows.
    let inside = flip(&scene.replica, 8 * MIB..9 * MIB, 3, &mut scene.random);
    let outside = flip(&scene.replica, 20 * MIB..21 * MIB, 3, &mut scene.random);
    scene.restamp();
    let range = ["--range", "8M:1M", "--range", "3:5"];
    let found = verify(&scene, &range).code(5).summary();
    assert_eq!(listed(&found, "differing"), inside, "{found}");
    assert_eq!(number(&found, "bytes_compared"), MIB + BLOCK, "{found}");
    assert!(number(&found, "bytes_read") <= 2 * MIB + BLOCK, "{found}");
    // The source goes on, within the range too; the replica stays where it is.
    scene.client().write(8 * MIB + 512 * 1024, &[9; 4096]).expect("a write");
    let changed = 8 * MIB / BLOCK + 128;
    let mended = verify(&scene, &[&["--repair"][..], &range].concat()).ok().summary();
    let seen: BTreeSet<u64> = inside.iter().copied().filter(|block| *block != changed).collect();
    assert_eq!(listed(&mended, "differing"), seen, "{mended}");
    assert_eq!(number(&mended, "epoch_after"), number(&mended, "epoch"), "{mended}");
    let rest = verify(&scene, &[]).code(5).summary();
    assert_eq!(listed(&rest, "differing"), outside, "{rest}");
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!((&summary["method"], number(&summary, "blocks_changed")), (&"tracked".into(), 1), "{summary}");
    // What others changed is not declared whole because a part of it is.
    flip(&scene.replica, 8 * MIB..9 * MIB, 1, &mut scene.random);
    let before = fingerprints(&scene.replica);
    verify(&scene, &["--repair", "--range", "8M:1M"]).code(4).says(&["vm.raw", "--range"]);
    assert_eq!(fingerprints(&scene.replica), before);
    verify(&scene, &["--range", "1T:4K"]).code(4).says(&["vm.raw"]);
    verify(&scene, &["--range", "1T"]).code(2);
    verify(&scene, &["--repair"]).ok();
    scene.equal();
}

#[test]
fn what_a_verification_found_is_shown_until_it_is_mended() {
    let mut scene = Scene::synced("rot", 8 * MIB);
    flip(&scene.replica, 0..8 * MIB, 3, &mut scene.random);
    scene.restamp();
    verify(&scene, &[]).code(5);
    let is_shown = || scene.site.dsync(["status", "vm"]).ok().text().contains("when verified on");
    assert!(is_shown());
    let warned = scene.sync(&[]).ok();
    let warning = warned.summary()["warnings"][0].as_str().expect("a warning").to_owned();
    assert!(warning.contains("not repaired: run \"dsync verify --repair\""), "{warned}");
    let compared = scene.sync(&["--method", "compare"]).ok();
    assert!(compared.summary()["warnings"] == serde_json::json!([]) && !is_shown(), "{compared}");
    scene.equal();
}

/// What a verification found is known where the replica is, for the day on which its source is lost.
#[test]
fn a_replica_that_differs_is_not_promoted_without_a_word() {
    let mut random = Random::new("a damaged replica");
    let (near, far) = (Host::with_disk(8 * MIB, &mut random), Host::new());
    near.sync(&far, &[]).ok();
    let damage = |random: &mut Random| damage(&far, 0..8 * MIB, 3, random);
    let is_shown = || {
        let shown = far.run(&["status", "-v"]).ok().text();
        let checked = far.site.dsync(["status", "--check"]).output().text();
        assert_eq!(
            shown.contains("when it was verified on"),
            checked.contains("replica differs"),
            "{shown}{checked}"
        );
        shown.contains("when it was verified on")
    };
    damage(&mut random);
    near.towards(&far, &["verify"]).code(5);
    assert!(is_shown());
    // A sound part tells nothing of the rest.
    near.towards(&far, &["verify", "--range", "0:4K"]).output();
    assert!(near.run(&["status", "-v"]).ok().text().contains("when verified on"));
    near.sync(&far, &[]).ok();
    assert!(is_shown());
    near.towards(&far, &["verify", "--repair"]).ok();
    assert!(!is_shown());
    damage(&mut random);
    near.towards(&far, &["verify"]).code(5);
    near.sync(&far, &["--method", "compare"]).ok();
    assert!(!is_shown());
    damage(&mut random);
    near.towards(&far, &["verify"]).code(5);
    near.towards(&far, &["demote"]).code(4).says(&[
        "differed from",
        "before it takes over",
        "is still the source",
    ]);
    // Where the count of the source is lost, the replica knows it.
    let counts =
        std::fs::read_dir(near.state_file("source").parent().expect("a folder")).expect("a state").flatten();
    for count in counts.filter(|file| file.file_name().to_string_lossy().starts_with("tally-")) {
        std::fs::remove_file(count.path()).expect("a count");
    }
    near.towards(&far, &["demote"]).ok();
    far.run(&["promote"]).code(4).says(&["it differed from its source in 12.0 KiB", "dsync verify --repair"]);
    // The way that it names.
    near.run(&["promote", "--force"]).ok();
    near.towards(&far, &["verify", "--repair"]).ok();
    near.towards(&far, &["demote"]).ok();
    let promoted = far.run(&["promote", "--json"]).ok().summary();
    assert!(promoted["verdict"].is_null(), "{promoted}");
    image::assert_equal(&near.disk, &far.disk);
}

/// Where it differs is in no record: the first sync from it looks at everything.
#[test]
fn a_replica_that_differs_and_takes_over_is_compared() {
    let mut random = Random::new("a damaged replica takes over");
    let (near, far, third) = (Host::with_disk(8 * MIB, &mut random), Host::new(), Host::new());
    for host in [&far, &third] {
        near.sync(host, &[]).ok();
    }
    damage(&far, 0..8 * MIB, 3, &mut random);
    near.towards(&far, &["verify"]).code(5);
    assert!(!far.force()["verdict"].is_null());
    far.write([9], &mut random);
    for host in [&near, &third] {
        assert_eq!(far.sync(host, &["--discard-there"]).ok().summary()["method"], "compare");
        image::assert_equal(&far.disk, &host.disk);
    }
    far.write([9], &mut random);
    assert_eq!(far.sync(&near, &[]).ok().summary()["method"], "tracked");
    image::assert_equal(&far.disk, &near.disk);
}

/// After that the disk is what its sources say: what was found is of no use, neither where it is nor where it was.
#[test]
fn a_replica_that_was_the_source_meanwhile_is_handed_over_to() {
    let mut random = Random::new("a damaged replica, there and back");
    let (near, far) = (Host::with_disk(8 * MIB, &mut random), Host::new());
    near.sync(&far, &[]).ok();
    damage(&far, 0..8 * MIB, 3, &mut random);
    near.towards(&far, &["verify"]).code(5);
    far.force();
    far.sync(&near, &["--discard-there"]).ok();
    for (from, to) in [(&far, &near), (&near, &far)] {
        from.towards(to, &["demote"]).ok();
        let promoted = to.run(&["promote", "--json"]).ok().summary();
        assert!(promoted["verdict"].is_null(), "{promoted}");
    }
    image::assert_equal(&near.disk, &far.disk);
}

/// A moment from before it was mended has the damage.
#[test]
fn what_was_mended_is_known_again_after_a_rewind_to_before_that() {
    let mut random = Random::new("a damaged moment");
    let (near, far) = (Host::with_disk(8 * MIB, &mut random), Host::new());
    near.sync(&far, &["--keep-last", "10"]).ok();
    damage(&far, 0..8 * MIB, 3, &mut random);
    near.towards(&far, &["verify"]).code(5);
    near.write([9], &mut random);
    let mended = number(&near.sync(&far, &["--method", "compare"]).ok().summary(), "epoch");
    let is_known = || far.run(&["status", "-v"]).ok().text().contains("when it was verified on");
    assert!(!is_known());
    near.write([10], &mut random);
    near.sync(&far, &[]).ok();
    far.run(&["rewind", "--to", &mended.to_string()]).ok();
    assert!(!is_known());
    far.run(&["rewind", "--to", "1"]).ok();
    assert!(is_known());
    let promoted = far.force();
    assert!(!promoted["verdict"].is_null(), "{promoted}");
}

/// What a comparison at one epoch replaces was damaged there, and is in the moments before.
#[test]
fn damage_that_a_comparison_has_mended_is_known_in_earlier_moments() {
    let mut random = Random::new("a damaged moment of one epoch");
    let (near, far) = (Host::with_disk(8 * MIB, &mut random), Host::new());
    near.sync(&far, &["--keep-last", "10"]).ok();
    near.write([9], &mut random);
    near.sync(&far, &[]).ok();
    damage(&far, 4 * MIB..8 * MIB, 3, &mut random);
    near.sync(&far, &["--method", "compare"]).ok();
    image::assert_equal(&near.disk, &far.disk);
    let is_known = || far.run(&["status", "-v"]).ok().text().contains("when it was verified on");
    assert!(!is_known());
    let listed = far.run(&["rewind"]).ok().text();
    assert!(listed.contains("from before a repair"), "{listed}");
    let state = far.run(&["rewind", "--json"]).ok().summary()["moments"][0]["state"].clone();
    // Of the same epoch.
    far.run(&["rewind", "--to", state.as_str().expect("an id")]).ok().says(&["it may hold what was damaged"]);
    assert!(is_known());
}

/// A repair mends nothing of what the moments hold that another mending has left to them.
#[test]
fn a_repair_hides_no_damage_of_earlier_moments() {
    let mut random = Random::new("two damages");
    let (near, far) = (Host::with_disk(8 * MIB, &mut random), Host::new());
    near.sync(&far, &["--keep-last", "10"]).ok();
    near.write([9], &mut random);
    near.sync(&far, &[]).ok();
    damage(&far, 110 * BLOCK..111 * BLOCK, 1, &mut random);
    near.sync(&far, &["--method", "compare"]).ok();
    damage(&far, 200 * BLOCK..201 * BLOCK, 1, &mut random);
    near.towards(&far, &["verify", "--repair"]).ok();
    far.run(&["rewind", "--to", "1"]).ok().says(&["8.00 KiB", "it may hold what was damaged"]);
    assert!(far.run(&["status", "-v"]).ok().text().contains("when it was verified on"));
}

/// A repair does not compare what has changed since, and the next commit keeps that for the moment before.
#[test]
fn what_a_repair_passed_over_is_known_in_earlier_moments() {
    let mut random = Random::new("a damaged block beside a repair");
    let (near, far) = (Host::with_disk(8 * MIB, &mut random), Host::new());
    near.sync(&far, &["--keep-last", "10"]).ok();
    for block in [20, 62] {
        damage(&far, block * BLOCK..(block + 1) * BLOCK, 1, &mut random);
    }
    near.write([62], &mut random);
    near.towards(&far, &["verify", "--repair"]).ok();
    near.sync(&far, &[]).ok();
    image::assert_equal(&near.disk, &far.disk);
    let is_known = || far.run(&["status", "-v"]).ok().text().contains("when it was verified on");
    assert!(!is_known());
    far.run(&["rewind", "--to", "1"]).ok().says(&["it may hold what was damaged"]);
    assert!(is_known());
}

/// What the source has changed since is not compared: what was found there stays known until a sync has sent that.
#[test]
fn what_was_not_compared_is_not_cleared() {
    let mut random = Random::new("a damaged block that changes");
    let (near, far) = (Host::with_disk(8 * MIB, &mut random), Host::new());
    near.sync(&far, &[]).ok();
    damage(&far, 7 * BLOCK..8 * BLOCK, 1, &mut random);
    near.towards(&far, &["verify"]).code(5);
    near.write([7], &mut random);
    let is_known = || {
        let there = far.run(&["status", "-v"]).ok().text().contains("when it was verified on");
        let here = near.run(&["status", "-v"]).ok().text().contains("when verified on");
        assert_eq!(there, here);
        there
    };
    for options in [&["verify"][..], &["verify", "--repair"]] {
        near.towards(&far, options).ok();
        assert!(is_known());
    }
    assert_eq!(near.sync(&far, &[]).ok().summary()["method"], "tracked");
    assert!(!is_known());
    image::assert_equal(&near.disk, &far.disk);
}

/// Digests tell what the replica held once.
#[test]
fn after_a_verification_that_found_differences_no_digests_stand_for_the_replica() {
    let mut random = Random::new("damage and digests");
    let site = Site::new();
    let (disk, replica) = (site.image("disk.raw", 8 * MIB), site.path("vm.raw"));
    image::random(&disk, 8 * MIB, &mut random);
    let sync = || site.sync(&disk, &replica, &["--digests"]).ok().summary();
    let verify = || site.dsync(["verify"]).arg(&disk).arg(&replica).arg("--json");
    sync();
    for changed in [false, true] {
        flip(&replica, 0..MIB, 3, &mut random);
        restamp(&replica);
        if changed {
            std::thread::sleep(Duration::from_millis(50));
            image::scribble(&disk, 2 * MIB, BLOCK, &mut random);
        }
        // Where nothing else tells what changed, a difference is not called damage.
        let found = verify().code(5).summary();
        assert_eq!(found["trust"] == "exact", !changed, "{found}");
        let tallied = || site.dsync(["status"]).arg(&disk).ok().text().contains("when verified on");
        assert_eq!(tallied(), !changed);
        let summary = site.sync(&disk, &replica, &["--digests", "--method", "compare"]).ok().summary();
        let digests = summary["digests"].as_str().expect("what became of them");
        assert!(digests.contains("a verification found differences"), "{summary}");
        assert!(!tallied());
        image::assert_equal(&disk, &replica);
        image::scribble(&disk, 3 * MIB, BLOCK, &mut random);
        assert_eq!(sync()["digests"], "used");
        verify().ok();
    }
}

/// What a verification finds is not to be missed by digests, however it ends.
#[test]
fn no_digests_stand_for_a_replica_whose_verification_was_cut_off() {
    let mut random = Random::new("digests, and a verification that is cut off");
    let site = Site::new();
    let (disk, replica) = (site.image("disk.raw", 8 * MIB), site.path("vm.raw"));
    image::random(&disk, 8 * MIB, &mut random);
    let sync = || site.sync(&disk, &replica, &["--digests", "--method", "compare"]).ok().summary();
    sync();
    for repair in [&[][..], &["--repair"]] {
        flip(&replica, 0..MIB, 3, &mut random);
        restamp(&replica);
        let mut verify =
            site.dsync(["verify"]).args([&disk, &replica]).args(["--rate", "1M"]).args(repair).start();
        until("it compares", || replica.with_file_name(".vm.raw.dsync/digests-doubted").exists());
        verify.kill();
        let summary = sync();
        assert!(summary["digests"].as_str().is_some_and(|digests| digests != "used"), "{summary}");
        image::assert_equal(&disk, &replica);
        // One that finds nothing costs nothing.
        site.dsync(["verify"]).args([&disk, &replica]).ok();
        assert_eq!(sync()["digests"], "used");
    }
}

/// That the next sync sends what differs holds for what the replica was at that time.
#[test]
fn what_was_damaged_earlier_is_not_cleared_by_a_sync_after_a_rewind() {
    let mut random = Random::new("two damages, and a rewind");
    let (near, far) = (Host::with_disk(8 * MIB, &mut random), Host::new());
    near.sync(&far, &["--keep-last", "10"]).ok();
    near.write([9], &mut random);
    near.sync(&far, &[]).ok();
    damage(&far, 100 * BLOCK..101 * BLOCK, 1, &mut random);
    near.towards(&far, &["verify"]).code(5);
    near.sync(&far, &["--method", "compare"]).ok();
    near.write([10], &mut random);
    near.sync(&far, &[]).ok();
    damage(&far, 200 * BLOCK..201 * BLOCK, 1, &mut random);
    near.towards(&far, &["verify"]).code(5);
    near.write([200], &mut random);
    near.towards(&far, &["verify"]).ok();
    far.run(&["rewind", "--to", "1"]).ok();
    near.write([11], &mut random);
    near.sync(&far, &[]).ok();
    let there = far.run(&["status", "-v"]).ok().text();
    assert!(there.contains("when it was verified on"), "{there}");
    let here = near.run(&["status", "-v"]).ok().text();
    assert!(here.contains("when verified on"), "{here}");
    near.towards(&far, &["verify"]).code(5);
}

/// A repair that is cut off leaves nothing half done behind, keeps the way back, and what it found is not forgotten.
#[test]
fn a_repair_that_is_cut_off_has_changed_nothing() {
    let mut random = Random::new("a repair that is cut off");
    let (near, far) = (Host::with_disk(16 * MIB, &mut random), Host::new());
    near.write(0..16 * MIB / BLOCK, &mut random);
    near.sync(&far, &["--keep", "24h"]).ok();
    near.write([1], &mut random);
    near.sync(&far, &[]).ok();
    for kill in [true, false] {
        damage(&far, 0..16 * MIB, 2000, &mut random);
        let was = std::fs::read(&far.disk).expect("the replica");
        let mut repair = near.towards(&far, &["verify", "--repair", "--bwlimit", "1M"]).start();
        until("some of it has arrived", || {
            far.disk.with_file_name(".vm.raw.dsync/journal").metadata().is_ok_and(|file| file.len() > MIB)
        });
        if kill {
            repair.kill();
        } else {
            repair.signal(rustix::process::Signal::TERM);
            until("it has ended", || repair.ended().is_some());
        }
        drop(repair);
        let summary = near.sync(&far, &[]).ok().summary();
        assert_eq!(number(&summary, "bytes_written"), 0, "{summary}");
        assert!(std::fs::read(&far.disk).expect("the replica") == was, "half of it was merged");
        near.towards(&far, &["verify", "--repair"]).ok();
        let kept = far.run(&["rewind"]).ok().text();
        assert!(kept.contains("epoch 2, from before a repair"), "{kept}");
        image::assert_equal(&near.disk, &far.disk);
    }
}

#[test]
fn a_file_that_nobody_serves_is_verified_too() {
    let mut random = Random::new("plain file");
    let site = Site::new();
    let (disk, replica) = (site.image("vm.raw", 16 * MIB), site.path("copy.raw"));
    image::scribble(&disk, MIB, 4 * MIB, &mut random);
    site.sync(&disk, &replica, &[]).ok();
    let verify =
        |options: &[&str]| site.dsync(["verify"]).arg(&disk).arg(&replica).arg("--json").args(options);
    assert_eq!(verify(&[]).ok().summary()["trust"], "exact");
    // Nobody wrote down what changed: a difference may be a change, and is told as such.
    std::thread::sleep(Duration::from_millis(50));
    image::scribble(&disk, 2 * MIB, 10_000, &mut random);
    let output = verify(&[]).code(5);
    assert!(output.summary()["trust"].as_str().is_some_and(|t| t.contains("may be changes")), "{output}");
    // A part cannot be mended then; all of it can.
    verify(&["--repair", "--range", "0:4M"]).code(4).says(&["--range"]);
    verify(&["--repair"]).ok();
    image::assert_equal(&disk, &replica);
    verify(&[]).ok();
    // Shorter and longer replicas.
    for size in [5 * MIB + 17, 40 * MIB] {
        let file = OpenOptions::new().write(true).open(&replica).expect("the replica");
        file.set_len(size).expect("another size");
        drop(file);
        let found = verify(&[]).code(5).summary();
        assert_eq!(number(&found, "wrong_size"), size, "{found}");
        verify(&["--repair"]).ok();
        image::assert_equal(&disk, &replica);
    }
}

#[test]
fn what_is_no_replica_is_not_verified() {
    let mut scene = Scene::new("no replica", 8 * MIB);
    verify(&scene, &[]).code(4).says(&["vm.raw"]);
    image::random(&scene.replica, 8 * MIB, &mut scene.random);
    // Who may have mistyped a name is not offered to overwrite what is there.
    let refused = verify(&scene, &[]).code(4);
    assert!(!refused.stderr.contains("--adopt"), "{refused}");
    refused.says(&["vm.raw", "there is nothing to verify"]);
    let swapped = scene.site.dsync(["verify"]).args([&scene.replica, &scene.image]).code(4);
    assert!(!swapped.stderr.contains("--adopt"), "{swapped}");
    std::fs::remove_file(&scene.replica).expect("a file");
    // One that is incomplete.
    scene.fill();
    let mut process = scene.sync(&["--bwlimit", "1M"]).start();
    process.wait_to_say("bytes_done");
    process.kill();
    verify(&scene, &[]).code(4).says(&["vm.raw", "sync"]);
    scene.sync(&[]).ok();
    verify(&scene, &[]).ok();
    // And of another source.
    let other = scene.site.image("other.raw", 8 * MIB);
    let run = scene.site.dsync(["verify"]).arg(&other).arg(&scene.replica);
    run.code(4).says(&["vm.raw", "source"]);
    verify(&scene, &["--rate", "0"]).code(2);
    verify(&scene, &["--rate", "15K"]).code(2).says(&["16K or more"]);
}

#[test]
fn reading_keeps_to_a_rate() {
    let scene = Scene::new("rate", 16 * MIB);
    let mut client = scene.client();
    client.write(0, &vec![7; 8 * MIB as usize]).expect("a write");
    scene.sync(&[]).ok();
    let began = Instant::now();
    verify(&scene, &["--rate", "5M"]).ok();
    let time = began.elapsed();
    assert!(
        time > Duration::from_millis(1200) && time < Duration::from_secs(15),
        "8 MiB at 5 MiB/s took {time:?}"
    );
}

/// A device over a file that has become shorter: what lies behind its end cannot be read.
#[test]
fn sectors_that_cannot_be_read() {
    let what = "unreadable sectors";
    if !need(&["losetup"], what) || !need_root(what) {
        return;
    }
    let mut random = Random::new("unreadable");
    let site = Site::new();
    let (file, replica) = (site.image("disk.raw", 16 * MIB), site.path("copy.raw"));
    image::random(&file, 16 * MIB, &mut random);
    let Some(device) = Loop::new(&file) else { return skipped(what, "there are no loop devices here") };
    let verify = |options: &[&str]| {
        site.dsync(["verify"])
            .arg(device.device())
            .arg(&replica)
            .args(["--json", "--trust-device"])
            .args(options)
    };
    site.sync(device.device(), &replica, &[]).ok();
    image::assert_equal(&file, &replica);
    verify(&[]).ok();
    let shorter = OpenOptions::new().write(true).open(&file).expect("the file");
    shorter.set_len(16 * MIB - 3 * BLOCK).expect("cutting");
    Run::new("blockdev").arg("--flushbufs").arg(device.device()).output();
    let first = (16 * MIB - 3 * BLOCK).to_string();
    verify(&[]).code(1).says(&[&first]);
    // The rest is looked at.
    let sound = std::fs::read(&replica).expect("the replica");
    flip(&replica, 0..8 * MIB, 2, &mut random);
    let found = verify(&["--keep-going"]).code(1).summary();
    assert_eq!(number(&found["unreadable"], "bytes"), 3 * BLOCK, "{found}");
    assert_eq!(number(&found["differing"], "bytes"), 2 * BLOCK, "{found}");
    // What is known to differ may be in what could not be read.
    std::fs::write(&replica, sound).expect("the replica");
    let found = verify(&["--keep-going"]).code(1).summary();
    assert_eq!(number(&found["differing"], "bytes"), 0, "{found}");
    let known = site.dsync(["status"]).arg(device.device()).output().text();
    assert!(known.contains("when verified on"), "{known}");
}

/// What others have changed is repaired, the repair is cut off, and every word on the way leads to its end.
#[test]
fn a_repair_by_reflink_that_is_killed_is_completed() {
    let what = "a repair by reflink that is killed";
    if !need_root(what) || !need(&["mkfs.xfs"], what) {
        return;
    }
    let mut scene = Scene::new(what, 64 * MIB);
    let (fs, place) = (scene.site.image("fs.img", 400 * MIB), scene.site.path("place"));
    Run::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&fs).ok();
    let Some(_mount) = Mount::new(&["-o", "loop"], &fs, &place) else {
        return skipped(what, "XFS cannot be mounted from a loop device here");
    };
    scene.replica = place.join("vm.raw");
    let mut client = scene.client();
    for at in 0..32 {
        client.write(at * MIB, &scene.random.bytes(MIB as usize)).expect("a write");
    }
    client.close().expect("the end");
    scene.sync(&[]).ok();
    for in_the_clone in [false, true] {
        image::scribble(&scene.replica, 0, 32 * MIB, &mut scene.random);
        let slowly = ["--repair", "--commit", "reflink", "--bwlimit", "4M"];
        let mut repair = verify(&scene, &slowly).start();
        let partial = place.join("vm.raw.partial");
        until("the clone is made", || partial.exists());
        let is_begun = || image::first_difference(&partial, &scene.replica).is_some_and(|at| at < 32 * MIB);
        until("it is repaired", || !in_the_clone || is_begun());
        repair.kill();
        assert!(partial.exists(), "it was not cut off");
        scene.sync(&[]).code(4).says(&["was modified outside dsync", "dsync verify --repair"]);
        let looked = verify(&scene, &[]).output();
        if !looked.status.success() {
            assert!(
                looked.status.code() == Some(5) || looked.stderr.contains("dsync verify --repair"),
                "{looked}"
            );
        }
        verify(&scene, &["--repair", "--commit", "reflink"]).ok();
        scene.equal();
        scene.change(3);
        assert_eq!(number(&scene.sync(&[]).ok().summary(), "blocks_changed"), 3);
        scene.equal();
    }
}
