//! What dsync must refuse: each with a message that names the thing, the place and the way out, with the right exit
//! code, and with the destination left as it was.

use std::fs::Permissions;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsync_tests::far::Far;
use dsync_tests::image;
use dsync_tests::mount::{self, Loop, Mount};
use dsync_tests::scene::{fingerprints, number};
use dsync_tests::site::binary;
use dsync_tests::{Background, Output, Random, Run, Scene, Server, Site, need, need_root, rounds, skipped};

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// Runs something that must be refused with this code, and shows that nothing happened to the replica and what lies
/// beside it.
fn refused(scene: &Scene, run: Run, code: i32, words: &[&str]) -> Output {
    let before = fingerprints(&scene.replica);
    let output = run.code(code);
    output.says(words);
    let after = fingerprints(&scene.replica);
    assert_eq!(before, after, "something changed beside {}: {output}", scene.replica.display());
    output
}

/// As `refused`, for what may leave a journal behind: the replica itself is as it was, and a good sync goes through.
fn harmless(scene: &Scene, run: Run, words: &[&str]) -> Output {
    let before = scene.replica.exists().then(|| image::fingerprint(&scene.replica));
    let output = run.output();
    assert!(matches!(output.status.code(), Some(1 | 4)), "{output}");
    output.says(words);
    let after = scene.replica.exists().then(|| image::fingerprint(&scene.replica));
    assert_eq!(before, after, "{} changed: {output}", scene.replica.display());
    output
}

#[test]
fn bad_usage() {
    let site = Site::new();
    for words in [
        &["sync"][..],
        &["sync", "a"],
        &["sync", "a", "b", "--method", "magic"],
        &["sync", "a", "b", "--bwlimit", "fast"],
        &["serve"],
        &["serve", "a.raw"],
        &["serve", "a.raw", "--socket", "s", "--block-size", "5000"],
        &["frobnicate"],
    ] {
        let output = site.dsync(words).code(2);
        assert!(!output.stderr.is_empty(), "{output}");
    }
}

#[test]
fn a_source_that_is_not_there() {
    let scene = Scene::synced_in_memory("no source", 8 * MIB);
    for name in ["/nowhere/at/all.raw", "nobody"] {
        let output = harmless(&scene, scene.site.dsync(["sync", name]).arg(&scene.replica), &[name]);
        assert!(!output.stderr.contains("panicked"), "{output}");
    }
    let socket = scene.site.socket("other");
    let output = scene.site.dsync(["serve", "/nowhere/at/all.raw", "--socket"]).arg(&socket).output();
    assert_eq!(output.status.code(), Some(1), "{output}");
    output.says(&["/nowhere/at/all.raw"]);
}

#[test]
fn a_replica_of_another_source() {
    let scene = Scene::synced_in_memory("wrong source", 8 * MIB);
    let other = scene.site.image("other.raw", 8 * MIB);
    let _server = scene.site.serve(&[&other], &[]);
    let replica = scene.replica.display().to_string();
    refused(&scene, scene.site.sync(&other, &scene.replica, &[]), 4, &[&replica, "source"]);
    let delta = scene.site.dsync(["extract", "other", "--since", "0"]).ok().stdout;
    refused(&scene, scene.site.dsync(["merge"]).arg(&scene.replica).input(delta), 4, &[&replica]);
}

#[test]
fn a_source_that_was_set_back_to_an_older_state() {
    let mut scene = Scene::synced_in_memory("restored source", 8 * MIB);
    scene.stop();
    let (state, kept) = (scene.site.state(), scene.site.path("kept"));
    Run::new("cp").arg("-a").arg(&state).arg(&kept).ok();
    image::copy(&scene.image, &scene.site.path("kept.raw"));
    // The replica goes on...
    scene.start();
    scene.change(10);
    scene.sync(&[]).ok();
    scene.stop();
    // ...and the source is set back, its state with it. Its next epochs have the same numbers.
    std::fs::remove_dir_all(&state).expect("removing the state");
    Run::new("cp").arg("-a").arg(&kept).arg(&state).ok();
    Run::new("cp").arg(scene.site.path("kept.raw")).arg(&scene.image).ok();
    scene.start();
    scene.change(10);
    scene.site.sync(&scene.image, &scene.site.path("elsewhere.raw"), &[]).ok();
    scene.change(10);
    refused(&scene, scene.sync(&[]), 4, &["vm.raw", "epoch"]);
    // The way out.
    scene.sync(&["--discard-there"]).ok();
    scene.equal();
}

#[test]
fn a_delta_that_begins_elsewhere() {
    let mut scene = Scene::synced_in_memory("wrong epoch", 8 * MIB);
    scene.change(10);
    let early = scene.site.dsync(["extract", "vm"]).ok().stdout;
    let other = scene.site.path("other.raw");
    scene.site.sync(&scene.image, &other, &[]).ok();
    scene.change(10);
    scene.site.sync(&scene.image, &other, &[]).ok();
    scene.change(10);
    let status = scene.site.dsync(["status", "--json"]).arg(&other).ok().summary();
    let epoch = number(&status, "epoch").to_string();
    let late = scene.site.dsync(["extract", "vm", "--since", &epoch]).ok().stdout;
    let replica = scene.replica.display().to_string();
    let merge = |delta: &[u8]| scene.site.dsync(["merge"]).arg(&scene.replica).input(delta);
    refused(&scene, merge(&late), 4, &[&replica, "epoch", &epoch]);
    merge(&early).ok();
}

#[test]
fn a_file_that_is_no_replica() {
    let mut scene = Scene::in_memory("no replica", 8 * MIB);
    image::random(&scene.replica, 8 * MIB, &mut scene.random);
    let replica = scene.replica.display().to_string();
    refused(&scene, scene.sync(&[]), 4, &[&replica, "--adopt"]);
    refused(&scene, scene.sync(&["--method", "compare"]), 4, &[&replica, "--adopt"]);
    refused(&scene, scene.sync(&["--commit", "in-place"]), 4, &[&replica, "--adopt"]);
    let delta = scene.site.dsync(["extract", "vm", "--since", "0"]).ok().stdout;
    refused(&scene, scene.site.dsync(["merge"]).arg(&scene.replica).input(delta), 4, &[&replica]);
    refused(&scene, scene.site.dsync(["recover"]).arg(&scene.replica), 4, &[&replica]);
}

#[test]
fn places_where_nothing_can_be_written() {
    let scene = Scene::in_memory("no place", 8 * MIB);
    let site = &scene.site;
    let (missing, here) = (site.path("missing"), site.dir().to_path_buf());
    for (place, named) in
        [(missing.join("vm.raw"), &missing), (here.clone(), &here), ("/proc/vm.raw".into(), &"/proc".into())]
    {
        harmless(&scene, site.sync(&scene.image, &place, &[]), &[&named.display().to_string()]);
    }
    // Onto itself.
    let before = image::fingerprint(&scene.image);
    let output = site.sync(&scene.image, &scene.image, &[]).output();
    assert!(matches!(output.status.code(), Some(2 | 4)), "{output}");
    output.says(&["vm.raw"]);
    assert_eq!(before, image::fingerprint(&scene.image));
    // No state.
    let idle = site.image("idle.raw", MIB);
    let output = site.sync(&idle, &scene.replica, &[]).env("DSYNC_STATE_DIR", "/proc/state").output();
    assert!(!output.status.success(), "{output}");
    output.says(&["/proc/state"]);
}

/// What is no copy of the source is left as it was, however it would be written to, until its user says that it may go.
#[test]
fn what_holds_other_content_is_not_adopted_without_a_word() {
    let mut scene = Scene::in_memory("other content", 8 * MIB);
    let ways: [&[&str]; 4] =
        [&[], &["--commit", "in-place"], &["--method", "rolling"], &["--keep-last", "3"]];
    for (round, options) in ways.into_iter().enumerate() {
        let replica = scene.site.path(&format!("foreign-{round}/vm.raw"));
        std::fs::create_dir_all(replica.parent().expect("a folder")).expect("a folder");
        image::sparse(&replica, 8 * MIB);
        image::scribble(&replica, MIB, 3 * MIB, &mut scene.random);
        let sync = |adopt: &str| scene.site.sync(&scene.image, &replica, &[options, &[adopt]].concat());
        let before = fingerprints(&replica);
        let words =
            ["3.00 MiB of the 3.00 MiB", "wrong destination", "Nothing was changed", "--adopt=overwrite"];
        for _ in 0..2 {
            sync("--adopt").code(4).says(&words);
            assert_eq!(before, fingerprints(&replica), "{options:?}");
        }
        scene.site.sync(&scene.image, &replica, options).code(4).says(&["not a dsync replica"]);
        sync("--adopt=overwrite").ok();
        image::assert_equal(&scene.image, &replica);
    }
    // A source without data: all of what is there goes.
    let (blank, full) = (scene.site.image("blank.raw", 8 * MIB), scene.site.path("full.raw"));
    image::random(&full, 8 * MIB, &mut scene.random);
    let run = scene.site.dsync(["sync", "--adopt=overwrite", "-n"]).arg(&blank).arg(&full);
    let said = run.ok().text();
    assert!(said.contains("up to 8.00 MiB read at the replica, and overwritten where it differs"), "{said}");
    // One that is being mirrored to, and a disk that is restored from its replica.
    let other = scene.site.path("other.raw");
    image::random(&other, 8 * MIB, &mut scene.random);
    let mirror = scene.site.dsync(["mirror", "--adopt"]).arg(&scene.image).arg(&other);
    mirror.code(4).says(&["wrong destination", "--adopt=overwrite"]);
    scene.site.sync(&scene.image, &scene.replica, &[]).ok();
    scene.stop();
    let restored = |adopt: &str| scene.site.sync(&scene.replica, &other, &[adopt]);
    restored("--adopt").code(4).says(&["wrong destination"]);
    restored("--adopt=overwrite").ok();
    image::assert_equal(&scene.image, &other);
}

/// An empty file is no copy of anything: it is said before the disk is read.
#[test]
fn an_empty_file_is_not_adopted() {
    let scene = Scene::in_memory("an empty file", 8 * MIB);
    std::fs::write(&scene.replica, "").expect("an empty file");
    scene.sync(&[]).code(4).says(&["not a dsync replica"]);
    scene.sync(&["--adopt"]).code(4).says(&["is empty", "remove it, and omit --adopt"]);
    std::fs::remove_file(&scene.replica).expect("the file");
    scene.sync(&[]).ok();
    image::assert_equal(&scene.image, &scene.replica);
}

#[test]
fn a_device_with_other_content_is_not_adopted_without_a_word() {
    let what = "adopting a device";
    if !need(&["losetup"], what) || !need_root(what) {
        return;
    }
    let mut scene = Scene::in_memory(what, 8 * MIB);
    let disk = scene.site.path("disk.img");
    image::random(&disk, 16 * MIB, &mut scene.random);
    let Some(device) = Loop::new(&disk) else { return skipped(what, "there are no loop devices here") };
    let sync = |scene: &Scene, options: &[&str]| scene.site.sync(&scene.image, device.device(), options);
    let before = std::fs::read(device.device()).expect("the device");
    for commit in ["journal", "in-place"] {
        sync(&scene, &["--commit", commit, "--adopt"])
            .code(4)
            .says(&["wrong destination", "--adopt=overwrite"]);
        assert!(before == std::fs::read(device.device()).expect("the device"), "{commit}: it was written to");
    }
    sync(&scene, &["--adopt=overwrite"]).ok();
    scene.change(3);
    assert_eq!(sync(&scene, &[]).ok().summary()["method"], "tracked");
}

#[test]
fn a_replica_that_others_changed() {
    let mut scene = Scene::synced_in_memory("changed replica", 8 * MIB);
    scene.change(10);
    std::thread::sleep(Duration::from_millis(50));
    image::scribble(&scene.replica, 3 * MIB, 10, &mut scene.random);
    let replica = scene.replica.display().to_string();
    refused(&scene, scene.sync(&[]), 4, &[&replica, "--adopt"]);
    // Another size.
    std::fs::OpenOptions::new()
        .write(true)
        .open(&scene.replica)
        .and_then(|f| f.set_len(5 * MIB))
        .expect("a file");
    refused(&scene, scene.sync(&[]), 4, &[&replica]);
    scene.sync(&["--adopt"]).ok();
    scene.equal();
}

#[test]
fn a_lineage_that_is_damaged() {
    let mut scene = Scene::synced_in_memory("damaged lineage", 8 * MIB);
    let lineage = scene.site.path("replica/.vm.raw.dsync/lineage");
    let good = std::fs::read(&lineage).expect("the lineage");
    scene.change(10);
    for bad in [&b"not json"[..], b"", b"{}", b"\xff\xfe", &good[..good.len() / 2]] {
        std::fs::write(&lineage, bad).expect("a file");
        let before = image::fingerprint(&scene.replica);
        let output = scene.sync(&[]).output();
        assert!(matches!(output.status.code(), Some(1 | 4)), "{output}");
        output.says(&["lineage"]);
        assert_eq!(before, image::fingerprint(&scene.replica));
    }
    std::fs::write(&lineage, good).expect("a file");
    scene.sync(&[]).ok();
    scene.equal();
}

/// A qemu-io that has opened an image, and so locked it: it asks for commands.
fn opened_by_qemu(image: &Path) -> Background {
    let mut holder = Run::new("qemu-io").args(["-f", "raw"]).arg(image).start_talking();
    let asked = holder.child.stdout.as_mut().expect("a pipe").read(&mut [0; 1]).expect("a prompt");
    assert_eq!(asked, 1, "qemu-io did not stay: {}", holder.stderr_so_far());
    holder
}

#[test]
fn a_destination_in_use() {
    let what = "a destination that QEMU has open";
    if !need(&["qemu-io"], what) {
        return;
    }
    let mut scene = Scene::synced_in_memory("in use", 8 * MIB);
    scene.change(10);
    let replica = scene.replica.display().to_string();
    let mut holder = opened_by_qemu(&scene.replica);
    refused(&scene, scene.sync(&[]), 6, &[&replica]);
    holder.kill();
    // Another dsync at work on it.
    scene.change(500);
    let mut slow = scene.sync(&["--bwlimit", "256K"]).start();
    slow.wait_to_say("bytes_done");
    scene.sync(&[]).code(6).says(&[&replica]);
    slow.kill();
    scene.sync(&[]).ok();
    scene.equal();
    // A source is served once.
    let socket = scene.site.socket("second");
    let second = scene.site.dsync(["serve"]).arg(&scene.image).arg("--socket").arg(&socket).code(6);
    second.says(&["vm.raw"]);
    // And not overwritten meanwhile: a restore waits for the end of its server.
    let restored = scene.site.sync(&scene.replica, &scene.image, &["--adopt"]).code(6);
    restored.says(&["vm.raw is in use", "stop that server"]);
}

#[test]
fn an_image_that_qemu_has_open_is_not_served() {
    let what = "serving an image that QEMU has open";
    if !need(&["qemu-io"], what) {
        return;
    }
    let site = Site::new();
    let disk = site.image("vm.raw", MIB);
    let mut holder = opened_by_qemu(&disk);
    let run = site.dsync(["serve"]).arg(&disk).arg("--socket").arg(site.socket("nbd"));
    run.code(6).says(&["vm.raw"]);
    holder.kill();
    // And the other way round: QEMU keeps off what dsync serves.
    let _server = site.serve(&[&disk], &[]);
    let output = Run::new("qemu-io").args(["-f", "raw", "-c", "write 0 4k"]).arg(&disk).output();
    assert!(!output.status.success() && output.stderr.contains("lock"), "{output}");
}

#[test]
fn devices_that_are_mounted_looped_or_too_small() {
    let what = "mounted, loop-backed and small destinations";
    if !need(&["mkfs.ext4", "losetup"], what) || !need_root(what) {
        return;
    }
    let mut scene = Scene::in_memory("devices", 16 * MIB);
    let small = scene.site.image("small.raw", 8 * MIB);
    let fitting = scene.site.image("fitting.raw", 16 * MIB);
    Run::new("mkfs.ext4").arg("-q").arg(&fitting).ok();
    let (Some(small), Some(fitting)) = (Loop::new(&small), Loop::new(&fitting)) else {
        return skipped(what, "there are no loop devices here");
    };
    let to = |scene: &Scene, place: &Path, options: &[&str]| scene.site.sync(&scene.image, place, options);
    let name = |device: &Loop| device.device().display().to_string();
    let refused = to(&scene, small.device(), &["--adopt"]).output();
    assert!(matches!(refused.status.code(), Some(1 | 4)), "{refused}");
    refused.says(&[&name(&small)]);
    // The file under a loop device is in use.
    scene
        .site
        .sync(&scene.image, &scene.site.path("fitting.raw"), &["--adopt"])
        .code(6)
        .says(&["fitting.raw"]);
    {
        let Some(_mount) = Mount::new(&[], fitting.device(), &scene.site.path("mount")) else {
            return skipped(what, "loop devices cannot be mounted here");
        };
        let before = image::fingerprint(&scene.site.path("fitting.raw"));
        to(&scene, fitting.device(), &["--adopt"]).code(6).says(&[&name(&fitting), "mounted"]);
        assert_eq!(before.0, image::fingerprint(&scene.site.path("fitting.raw")).0);
        // Nor is a live disk copied as if it stood still, nor served beside those who write to it.
        let from = || scene.site.sync(fitting.device(), &scene.site.path("from.raw"), &[]);
        from().code(4).says(&[&name(&fitting), "mounted", "read-only"]);
        let socket = scene.site.socket("mounted");
        let serve = scene.site.dsync(["serve"]).arg(fitting.device()).arg("--socket").arg(&socket);
        serve.code(6).says(&[&name(&fitting), "mounted"]);
        Run::new("mount").args(["-o", "remount,ro"]).arg(scene.site.path("mount")).ok();
        from().ok();
    }
    // Unmounted it will do.
    to(&scene, fitting.device(), &["--adopt=overwrite"]).ok();
    scene.change(20);
    to(&scene, fitting.device(), &[]).ok();
    drop(fitting);
    image::assert_equal(&scene.image, &scene.site.path("fitting.raw"));
}

#[test]
fn a_delta_cut_off_or_with_a_flipped_bit() {
    let mut scene = Scene::synced_in_memory("damaged delta", 8 * MIB);
    scene.change(40);
    let status = scene.site.dsync(["status", "--json"]).arg(&scene.replica).ok().summary();
    let since = number(&status, "epoch").to_string();
    let extract =
        |options: &[&str]| scene.site.dsync(["extract", "vm", "--since", &since]).args(options).ok().stdout;
    let (plain, packed) = (extract(&[]), extract(&["--compress"]));
    let merge = |delta: Vec<u8>| scene.site.dsync(["merge"]).arg(&scene.replica).input(delta);
    for delta in [&plain, &packed] {
        let len = delta.len() as u64;
        // The edges by hand, the rest by chance.
        let mut places: Vec<u64> = vec![0, 1, 7, 8, 15, 16, 40, len / 2, len - 40, len - 2, len - 1];
        for _ in 0..rounds(30, 3000) {
            places.push(scene.random.below(len));
        }
        for place in places {
            println!("cut, then flipped at byte {place} of {len}");
            let cut = delta[..place as usize].to_vec();
            harmless(&scene, merge(cut), &["delta"]);
            let mut flipped = delta.clone();
            flipped[place as usize] ^= 1 << scene.random.below(8);
            harmless(&scene, merge(flipped), &["delta"]);
        }
        // Something behind the end.
        println!("longer than {len}");
        let mut longer = delta.clone();
        longer.extend(b"and more");
        harmless(&scene, merge(longer), &["delta"]);
    }
    harmless(&scene, merge(b"#!/bin/sh\necho no delta at all\n".to_vec()), &["delta"]);
    // The whole one still fits.
    merge(plain).ok();
    scene.equal();
}

#[test]
fn no_space_beside_the_replica() {
    let what = "a full destination";
    let Some((mut scene, _mounted)) = Scene::with_small_replica("full destination", 8 * MIB, "12m", what)
    else {
        return;
    };
    // The seed does not fit.
    let fill = scene.replica.with_file_name("fill");
    std::fs::write(&fill, vec![1; 11 * MIB as usize + 900_000]).expect("filling");
    harmless(&scene, scene.sync(&[]), &["space"]);
    assert!(!scene.replica.exists());
    std::fs::remove_file(&fill).expect("making room");
    scene.sync(&[]).ok();
    // The journal does not fit.
    scene.change(1200);
    let room = 12 * MIB - image::space(&scene.replica);
    std::fs::write(&fill, vec![1; room.saturating_sub(MIB) as usize]).expect("filling");
    harmless(&scene, scene.sync(&[]), &["space"]);
    std::fs::remove_file(&fill).expect("making room");
    scene.sync(&["--commit", "in-place"]).ok();
    scene.equal();
}

/// What a mirror's journal may take follows the room there is: much more passes through it than would ever fit.
#[test]
fn a_mirror_with_a_small_journal_folder() {
    let what = "a small journal folder";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::synced_in_memory("small journal", 32 * MIB);
    let place = scene.site.path("journal");
    let Some(_mounted) = mount::small(&place, "12m", what) else { return };
    let dsync = |arguments: &[&str]| scene.site.dsync(arguments).arg("--journal-dir").arg(&place);
    std::fs::remove_file(&scene.replica).expect("a replica");
    let mut running = dsync(&["mirror", "--create"]).arg(&scene.image).arg(&scene.replica).arg("-v").start();
    running.wait_to_say("mirroring to");
    let mut client = scene.client();
    for round in 0..48u64 {
        let block = scene.random.bytes(512 << 10);
        client.write((round % 32) << 20, &block).expect("a write");
        std::thread::sleep(std::time::Duration::from_millis(60));
    }
    client.close().expect("the end");
    // Killed with what lies in the journal, and the folder filled up: it is merged all the same.
    running.kill();
    let fill = place.join("fill");
    Run::shell(&format!("cat /dev/zero >{} 2>/dev/null; true", fill.display())).ok();
    dsync(&["recover"]).arg(&scene.replica).ok();
    std::fs::remove_file(&fill).expect("making room");
    dsync(&["sync", "--commit", "in-place"]).arg(&scene.image).arg(&scene.replica).ok();
    scene.equal();
}

#[test]
fn no_space_for_the_sources_state() {
    let what = "a full state folder";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::in_memory("full state", 8 * MIB);
    scene.stop();
    let state = scene.site.state();
    let _ = std::fs::remove_dir_all(&state);
    let Some(_mounted) = mount::small(&state, "1m", what) else { return };
    scene.start();
    scene.sync(&[]).ok();
    scene.change(50);
    // To the last byte.
    let fill = state.join("fill");
    Run::shell(&format!("cat /dev/zero >{} 2>/dev/null; true", fill.display())).ok();
    // A record made ahead, and what is left in a page of the history, last for one more.
    if scene.sync(&[]).output().status.success() {
        scene.equal();
        scene.change(50);
    }
    let output = harmless(&scene, scene.sync(&[]), &["space"]);
    assert!(output.stderr.contains(&state.display().to_string()), "{output}");
    // The disk goes on, and so does the record.
    scene.change(50);
    std::fs::remove_file(&fill).expect("making room");
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    scene.equal();
    // A server that cannot write its state does not start.
    scene.stop();
    Run::shell(&format!("cat /dev/zero >{} 2>/dev/null; true", fill.display())).ok();
    let other = scene.site.image("other.raw", 64 * MIB);
    let run = scene.site.dsync(["serve"]).arg(&other).arg("--socket").arg(scene.site.socket("other"));
    let output = run.output();
    assert_eq!(output.status.code(), Some(1), "{output}");
    output.says(&["space"]);
}

#[test]
fn a_view_that_overflows_breaks_and_the_guest_does_not() {
    let mut scene = Scene::synced_in_memory("view overflow", 32 * MIB);
    scene.stop();
    scene.server = Some(scene.site.serve(&[&scene.image], &["--view-limit", "1M"]));
    let mut client = scene.client();
    let mut fill = |random: &mut Random, what: &str| {
        let data = random.bytes(MIB as usize);
        for at in 0..16 {
            client.write(at * MIB, &data).expect(what);
        }
    };
    fill(&mut scene.random, "a write before the view");
    let mut view = scene.server().client("vm@view");
    view.read(0, 4096).expect("a read");
    // Sixteen times what the view may keep, over data it needs.
    fill(&mut scene.random, "a write goes through, whatever becomes of the view");
    let lost = (0..32).any(|at| view.read(at * MIB, 4096).is_err());
    assert!(lost, "a view beyond its limit still claims to be whole");
    let output = harmless(&scene, scene.sync(&["--at-view"]), &["view"]);
    assert!(output.stderr.contains("--view-limit") || output.stderr.contains("limit"), "{output}");
    drop(view);
    scene.sync(&[]).ok();
    scene.equal();
}

#[test]
fn a_host_that_does_not_answer() {
    let scene = Scene::in_memory("unreachable", 8 * MIB);
    let sync = |host: &str, rsh: &str| {
        let destination = format!("{host}:/srv/vm.raw");
        scene.site.dsync(["sync", "--rsh", rsh, "--"]).arg(&scene.image).arg(destination)
    };
    sync("unreachable", RSH).code(1).says(&["unreachable", "No route to host"]);
    sync("far", "/nowhere/ssh").code(1).says(&["/nowhere/ssh"]);
    let before = scene.dirty();
    sync("-oProxyCommand=touch owned", "ssh").output().says(&["host"]);
    assert_eq!(before, scene.dirty(), "a refused sync left an epoch behind");
    if need(&["ssh"], "an unknown host through ssh") {
        let output = sync("no-such-host.invalid", "ssh -o BatchMode=yes -o ConnectTimeout=5").code(1);
        output.says(&["no-such-host.invalid"]);
    }
}

#[test]
fn a_far_side_that_is_not_dsync_or_another_version_of_it() {
    let (scene, far) = (Scene::in_memory("versions", 8 * MIB), Far::new(RSH));
    let sync = |remote: &str| far.sync(&scene, &["--remote-dsync", remote], None);
    let script = |name: &str, text: &str| {
        let path = far.site.path(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a file");
        Run::new("chmod").arg("+x").arg(&path).ok();
        path.display().to_string()
    };
    sync("no-such-dsync").code(1).says(&["no-such-dsync", "far", "--remote-dsync"]);
    sync(&script("chatty", "echo welcome to this machine; cat >/dev/null")).code(1).says(&["welcome", "far"]);
    sync(&script("silent", "exit 0")).code(1).says(&["far"]);
    sync(&script("failing", "echo the disk is on fire >&2; exit 3")).code(1).says(&["the disk is on fire"]);
    let hello = r"printf '\223dsync\r\n\007\000\000\000\000\000\020\000'; cat >/dev/null";
    sync(&script("newer", hello)).code(1).says(&["version 7", "same version"]);
    assert!(!far.replica().exists());
}

/// Whatever of descriptors and threads the system refuses, that is what is said, and nothing panics.
#[test]
fn without_descriptors_or_threads_a_sync_says_so() {
    if !need_root("limits of another user's processes")
        || !need(&["prlimit", "setpriv"], "limits of a process")
    {
        return;
    }
    let mut scene = Scene::synced("no descriptors", 8 * MIB);
    let line = |limits: &str, dsync: &Path, state: &Path, words: &str| {
        Run::shell(&format!("exec {limits} {} --state-dir {} {words}", dsync.display(), state.display()))
    };
    let judged = |output: &Output, what: &str| {
        assert!(!output.stderr.contains("panicked"), "{what}: {output}");
        assert!(!output.stderr.contains("version"), "{what}: {output}");
        if !output.status.success() {
            let words = [
                "Too many open files",
                "os error 24",
                "ulimit",
                "thread",
                "temporarily unavailable",
                "os error 11",
            ];
            assert!(words.iter().any(|word| output.stderr.contains(word)), "{what}: {output}");
        }
        output.status.success()
    };
    let sync = format!("sync --method compare {} {}", scene.image.display(), scene.replica.display());
    let (mut worked, mut failed) = (0, 0);
    for files in 6..60 {
        let done = judged(
            &line(
                &format!("prlimit --nofile={files}:{files}"),
                dsync_tests::site::binary(),
                &scene.site.state(),
                &sync,
            )
            .output(),
            &format!("{files} files"),
        );
        *(if done { &mut worked } else { &mut failed }) += 1;
    }
    assert!(worked > 0 && failed > 0, "{worked} worked, {failed} failed");
    // Of another user, for whom the limit counts: it has no other processes.
    let folder = scene.site.path("others");
    let (disk, copy, state) = (folder.join("disk"), folder.join("copy"), folder.join("state"));
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(&disk, scene.random.bytes(4 << 20)).expect("a disk");
    Run::shell(&format!("chmod 711 {}; chown -R 61234 {}", scene.site.dir().display(), folder.display()))
        .ok();
    let dsync = folder.join("dsync");
    std::fs::copy(dsync_tests::site::binary(), &dsync).expect("a copy");
    let sync = format!("sync --method compare {} {}", disk.display(), copy.display());
    for threads in [40, 1, 2, 3, 4, 5, 6, 8, 40] {
        let limits = format!("setpriv --reuid 61234 --clear-groups prlimit --nproc={threads}:{threads}");
        let words = sync.replace("--method compare", if copy.exists() { "--method compare" } else { "" });
        let done = judged(&line(&limits, &dsync, &state, &words).output(), &format!("{threads} threads"));
        assert!(done || threads < 40, "{threads}");
    }
}

/// There is nothing to mend and nothing to forget after it, on either host.
#[test]
fn a_device_that_is_too_small_is_refused_without_a_trace() {
    let what = "a device that is too small";
    if !need(&["losetup"], what) || !need_root(what) {
        return;
    }
    let (site, far) = (Site::new(), Far::new(RSH));
    let (disk, small) = (site.image("vm.raw", 8 * MIB), site.image("small.raw", 4 * MIB));
    let Some(small) = Loop::new(&small) else { return skipped(what, "there are no loop devices here") };
    let words = ["4.00 MiB", "8.00 MiB", "give a device at least that large"];
    let traces = |site: &Site| {
        let entries = |name: &str| std::fs::read_dir(site.state().join(name)).into_iter().flatten().flatten();
        let folders =
            ["replicas", "sources"].map(|name| entries(name).filter(|at| at.path().is_dir()).count());
        assert_eq!(folders, [0, 0]);
        let check = site.dsync(["status", "--check"]).output().text();
        assert!(check.contains("nothing is watched") || check == "OK\n", "{check}");
    };
    for options in [&["-n"][..], &[], &["--adopt=overwrite"]] {
        site.sync(&disk, small.device(), options).code(4).says(&words);
        traces(&site);
        let destination = format!("far:{}", small.device().display());
        let sync = site.dsync(["sync"]).arg(&disk).arg(destination).args(["--rsh", RSH]).args(options);
        sync.env("RSH_STATE", far.site.state()).env("RSH_LOG", far.site.path("log")).code(4).says(&words);
        traces(&site);
        traces(&far.site);
    }
}

#[test]
fn a_refused_sync_leaves_no_epoch_behind() {
    let mut scene = Scene::synced_in_memory("no epoch", 8 * MIB);
    let changed = scene.change(10);
    let taken = scene.site.path("taken.raw");
    image::random(&taken, 8 * MIB, &mut scene.random);
    let dirty = scene.dirty();
    let status = |scene: &Scene| scene.site.dsync(["status", "--json"]).arg(&scene.image).ok().text();
    let before = status(&scene);
    for _ in 0..3 {
        scene.site.sync(&scene.image, &taken, &[]).code(4);
    }
    assert_eq!(dirty, scene.dirty());
    assert_eq!(before, status(&scene));
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["blocks_changed"], changed.len(), "{summary}");
}

#[test]
fn two_replicas_share_no_folder() {
    let scene = Scene::synced("two replicas of one folder", 8 << 20);
    let (folder, other) = (scene.site.path("journal"), scene.site.path("replica/other.raw"));
    let sync = |replica: &Path| {
        let folder = folder.to_str().expect("a name");
        scene.site.sync(&scene.image, replica, &["--journal-dir", folder])
    };
    let first = scene.site.path("replica/first.raw");
    sync(&first).ok();
    sync(&other).code(4).says(&["another replica", "first.raw", "--journal-dir"]);
    assert!(!other.exists());
    sync(&first).ok();
    // Where the first is gone, the folder is free to be judged by what stands there.
    std::fs::rename(&first, &other).expect("another name");
    sync(&other).ok();
}

/// The owner of a replica's folder, such as the user of `dsync receive`, directs nothing that root does there: a link in the place of a
/// state file is neither followed nor waited for.
#[test]
fn root_follows_no_link_of_the_owner_of_a_replica() {
    if !need_root("links in the state of a replica that belongs to another user") {
        return;
    }
    let nobody = Some(65534);
    let scene = Scene::synced_in_memory("links of another user", 8 * MIB);
    let name = scene.replica.file_name().expect("a name").to_string_lossy();
    let folder = scene.replica.with_file_name(format!(".{name}.dsync"));
    let victim = scene.site.path("victim");
    std::fs::write(&victim, [1; 8192]).expect("a file");
    let names = std::fs::read_dir(&folder).expect("the state").map(|entry| entry.expect("an entry").path());
    let names: Vec<_> = names.collect();
    assert!(names.len() > 2, "{names:?}");
    for file in names.iter().chain([&folder]) {
        std::os::unix::fs::chown(file, nobody, nobody).expect("root may");
    }
    for file in &names {
        let name = file.file_name().expect("a name").to_string_lossy().into_owned();
        let kept = scene.site.path("kept");
        std::fs::rename(file, &kept).expect("a name");
        let link = |made: std::io::Result<()>| made.expect("a link");
        link(std::os::unix::fs::symlink(&victim, file));
        // What a command has no need of, it need not refuse.
        let used = ["lineage", "lock", "present"].contains(&&*name);
        for command in [&["recover"][..], &["promote", "-n", "--force"]] {
            let output = scene.site.dsync(command).arg(&scene.replica).output();
            let refused = output.stderr.contains("is a symbolic link, and not made by dsync: remove it");
            assert!(refused || output.status.success() && !used, "{name}: {output}");
        }
        std::fs::remove_file(file).expect("the link");
        link(std::fs::hard_link(&victim, file));
        let output = scene.site.dsync(["recover"]).arg(&scene.replica).output();
        let refused = output.stderr.contains("has another name as well, and not made by dsync: remove it");
        assert!(refused || output.status.success() && !used, "{name}: {output}");
        std::fs::rename(&kept, file).expect("a name");
        assert_eq!(std::fs::read(&victim).expect("a file"), [1; 8192], "{name}");
    }
    scene.site.dsync(["recover"]).arg(&scene.replica).ok();
}

/// A file system may stamp its files to the second. What is written in the second of a commit is noticed all the same, at either end.
#[test]
fn writes_are_noticed_where_times_are_whole_seconds() {
    let what = "a replica on an ext4 whose times are whole seconds";
    if !need_root(what) || !need(&["mkfs.ext4"], what) {
        return;
    }
    let mut random = Random::new(what);
    let site = Site::new();
    let (image, place) = (site.path("fs.img"), site.path("fs"));
    image::sparse(&image, 64 * MIB);
    Run::new("mkfs.ext4").args(["-q", "-F", "-I", "128"]).arg(&image).ok();
    std::fs::create_dir(&place).expect("a folder");
    let Some(device) = Loop::new(&image) else { return skipped(what, "there is no loop device") };
    let Some(_mounted) = Mount::new(&[], device.device(), &place) else {
        return skipped(what, "it cannot be mounted");
    };
    let (source, replica) = (place.join("a.raw"), place.join("b.raw"));
    image::sparse(&source, 4 * MIB);
    image::scribble(&source, 0, MIB, &mut random);
    let sync = |options: &[&str]| site.dsync(["sync"]).arg(&source).arg(&replica).args(options);
    let begin_of_second = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a time");
        std::thread::sleep(Duration::from_secs(1) - Duration::from_nanos(now.subsec_nanos().into()));
    };
    sync(&[]).ok();
    for block in 0..rounds(1, 3) {
        begin_of_second();
        sync(&[]).ok();
        image::scribble(&source, block * 4096, 4096, &mut random);
        sync(&[]).ok();
        image::assert_equal(&source, &replica);
        image::scribble(&replica, MIB + block * 4096, 4096, &mut random);
        sync(&[]).code(4).says(&["modified outside dsync"]);
        sync(&["--adopt"]).ok();
        image::assert_equal(&source, &replica);
    }
    // Also at a disk that is served, once the second of its last write through the server is over; and where the server was killed in it.
    for killed in [false, true] {
        let server = site.serve(&[&source], &[]);
        sync(&[]).ok();
        begin_of_second();
        let mut client = server.client("a");
        client.write(0, &random.bytes(4096)).and_then(|()| client.close()).expect("a write");
        let mut server = Some(server);
        match killed {
            true => drop(server.take().map(Server::kill)),
            false => std::thread::sleep(Duration::from_millis(2500)),
        }
        image::scribble(&source, MIB, 4096, &mut random);
        let done = sync(&["--json"]).ok().summary();
        assert_eq!(done["method"], "compare", "killed: {killed}: {done}");
        image::assert_equal(&source, &replica);
        server.map(Server::stop);
    }
}

/// A replica whose folder of state belongs to another user, and that folder.
fn of_another_user(what: &str, size: u64) -> (Scene, PathBuf) {
    let scene = Scene::synced_in_memory(what, size);
    let name = scene.replica.file_name().expect("a name").to_string_lossy();
    let folder = scene.replica.with_file_name(format!(".{name}.dsync"));
    let inside = std::fs::read_dir(&folder).expect("the state").map(|entry| entry.expect("an entry").path());
    for file in inside.chain([folder.clone()]) {
        std::os::unix::fs::chown(file, Some(65534), Some(65534)).expect("root may");
    }
    (scene, folder)
}

#[test]
fn kept_digests_are_written_to_no_file_elsewhere() {
    if !need_root("a link in the state of a replica that belongs to another user") {
        return;
    }
    let (scene, folder) = of_another_user("digests of another user", 8 * MIB);
    let (victim, digests) = (scene.site.path("victim"), folder.join("digests"));
    let sync = || scene.sync(&["--method", "compare", "--digests"]);
    std::os::unix::fs::symlink(&victim, &digests).expect("a link");
    sync().code(1).says(&["digests is a symbolic link, and not made by dsync: remove it"]);
    assert!(!victim.exists(), "made through a link");
    std::fs::remove_file(&digests).expect("the link");
    sync().ok();
    use std::os::unix::fs::MetadataExt;
    assert_eq!(std::fs::metadata(&digests).expect("the digests").uid(), 65534, "its owner goes on with them");
    // Where a file is named, its folder may be open to all.
    let open = scene.site.path("open");
    std::fs::create_dir(&open).expect("a folder");
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o1777)).expect("a mode");
    let named = open.join("digests");
    std::fs::copy(&digests, &named).expect("a copy");
    std::os::unix::fs::chown(&named, Some(65534), None).expect("root may");
    let sync = scene.sync(&["--method", "compare", &format!("--digests={}", named.display())]);
    sync.code(1).says(&["digests is a file of another user"]);
}

#[test]
fn nothing_waits_for_a_pipe_among_the_readers_of_a_replica() {
    if !need_root("a pipe in the state of a replica that belongs to another user") {
        return;
    }
    let (mut scene, folder) = of_another_user("a pipe of another user", 8 * MIB);
    let pipe = folder.join("view-x");
    // Whoever sees that no reader is behind it may remove it.
    let make = || {
        let _ = std::fs::remove_file(&pipe);
        Run::new("mkfifo").arg(&pipe).ok();
    };
    let limit = Duration::from_secs(60);
    for command in [&["status"][..], &["status", "--check"], &["status", "--prometheus"]] {
        make();
        scene.site.dsync(command).limit(limit).output();
        make();
        scene.site.dsync(command).arg(&scene.replica).limit(limit).output();
    }
    make();
    scene.change(20);
    scene.sync(&[]).limit(limit).ok();
    scene.equal();
    // Nor is a link followed. It is in the way of no sync.
    let _ = std::fs::remove_file(&pipe);
    let victim = scene.site.path("victim");
    std::fs::write(&victim, [0; 8192]).expect("a file");
    std::os::unix::fs::symlink(&victim, &pipe).expect("a link");
    scene.change(20);
    scene.sync(&[]).ok();
    scene.equal();
    assert_eq!(std::fs::read(&victim).expect("a file"), [0; 8192]);
}

/// A store to a page of a file that was cut short ends the process.
#[test]
fn who_owns_the_state_of_a_replica_ends_no_process_by_cutting_it_short() {
    if !need_root("state that belongs to another user, and is cut short") {
        return;
    }
    let (mut scene, folder) = of_another_user("state cut short", 64 * MIB);
    let note = folder.join("rest");
    scene.fill();
    let mut sync = scene.sync(&["--method", "copy", "--bwlimit", "24M"]).start();
    let mut cut = 0;
    while sync.ended().is_none() {
        let opened = std::fs::File::options().write(true).open(&note);
        cut += u32::from(opened.is_ok_and(|note| note.set_len(0).is_ok()));
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(cut > 20, "cut {cut} times");
    let output = sync.output(Duration::from_secs(60));
    match output.status.code() {
        Some(0) => scene.equal(),
        // It was cut while it was made.
        code => assert!(code == Some(1) && output.text().contains("rest"), "{output}"),
    }
}

/// Where nothing was begun, no promotion is to be completed.
#[test]
fn what_is_no_replica_is_not_half_promoted() {
    let scene = Scene::synced_in_memory("no promotion", MIB);
    let pipe = scene.site.path("pipe");
    Run::new("mkfifo").arg(&pipe).ok();
    let slash = scene.site.path("replica/vm.raw/");
    for path in [pipe, slash, scene.site.path("absent.raw")] {
        let refused = scene.site.dsync(["promote", "--force"]).arg(&path).output();
        assert!(!refused.status.success() && !refused.stderr.contains("is not complete"), "{refused}");
    }
}

/// A user who may not look at a replica is not told that its promotion was begun.
#[test]
fn what_a_user_may_not_open_is_not_half_promoted() {
    if !need_root("a promotion by an ordinary user") {
        return;
    }
    let scene = Scene::synced_in_memory("no promotion by a user", MIB);
    let replica = &scene.replica;
    for (mode, path) in [(0o700, replica), (0o700, &scene.site.path("absent.raw")), (0o755, replica)] {
        std::fs::set_permissions(scene.site.dir(), Permissions::from_mode(mode)).expect("a folder");
        let user = scene.site.run("setpriv".as_ref()).args(["--reuid=65534", "--clear-groups"]).arg(binary());
        let user = user.env("DSYNC_STATE_DIR", "/nonexistent");
        let refused = user.args(["promote", "--force"]).arg(path).code(1);
        refused.says(&["was not promoted: it is a replica as before", "Permission denied"]);
        assert!(!refused.stderr.contains("is not complete"), "{refused}");
    }
}

/// What is wrong with a value is said once, in words of ours.
#[test]
fn a_value_that_cannot_be_read_is_named_once() {
    let site = Site::new();
    for words in [
        &["sync", "--compress=x", "a", "b"][..],
        &["sync", "--compress=99", "a", "b"],
        &["sync", "--timeout=0", "a", "b"],
        &["sync", "--timeout=x", "a", "b"],
        &["sync", "--keep=x", "a", "b"],
        &["sync", "--keep-last=x", "a", "b"],
        &["sync", "--keep-bytes=x", "a", "b"],
        &["sync", "--connections=x", "a", "b"],
        &["sync", "--freeze-limit=x", "a", "b"],
        &["sync", "--freeze-limit=301s", "a", "b"],
        &["sync", "--bwlimit=0", "a", "b"],
        &["sync", "--bwlimit=08:00=1M", "a", "b"],
        &["mirror", "--rpo=x", "a", "b"],
        &["mirror", "--rpo=99999999999999999999", "a", "b"],
        &["status", "--watch=0s"],
        &["status", "--watch=x"],
        &["status", "--check", "--max-age=x"],
        &["status", ""],
        &["forget", ""],
        &["checkpoint", ""],
        &["verify", "--range=x", "a", "b"],
        &["serve", "--tcp=x", "a"],
        &["serve", "--metrics=x", "--socket=s", "a"],
        &["receive", "--listen=x"],
        &["key", "trust", "x", "dsync-ed25519", "--expires=x"],
        &["demo", "--size=x"],
    ] {
        let output = site.dsync(words).code(2);
        let said = output.stderr.lines().next().unwrap_or_default();
        assert!(said.matches("invalid").count() <= 1, "{words:?}: {said}");
        for foreign in
            ["digit found", "is not in", "parse", "absolute", "float literal", "cannot be turned off; "]
        {
            assert!(!said.contains(foreign), "{words:?}: {said}");
        }
        assert!(
            said.contains("use ") || said.contains("give ") || said.contains("value is required"),
            "{said}"
        );
    }
}

#[test]
fn words_of_other_tools_lead_to_ours() {
    let site = Site::new();
    for (word, way) in [
        ("backup", "dsync sync SRC DST"),
        ("check", "dsync verify SRC DST"),
        ("restore", "dsync sync --adopt REPLICA DISK"),
        ("init", "nothing is to be set up"),
        ("list", "dsync status"),
    ] {
        site.dsync([word, "/srv/vm.raw"]).code(2).says(&[&format!("there is no command \"{word}\""), way]);
    }
    site.dsync(["frobnicate"]).code(2).says(&["unrecognized subcommand"]);
}
