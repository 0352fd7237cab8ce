//! What messages advise is there, and works.

use std::fs::rename;

use dsync_tests::mount::{Loop, Mount};
use dsync_tests::{Run, Scene, Site, image, need, need_root, skipped};

const MIB: u64 = 1 << 20;

/// A command that a message quotes: what begins with `dsync` and ends at the quotation mark, in words.
fn quoted<'a>(text: &'a str, begins: &str) -> Vec<&'a str> {
    let at = text.find(begins).unwrap_or_else(|| panic!("{begins} is not advised: {text}"));
    let command = text[at..].split('"').next().expect("a command");
    command.split_whitespace().skip(1).collect()
}

#[test]
fn epochs_and_checkpoints_that_are_asked_for_are_listed_where_the_refusal_says() {
    let mut scene = Scene::synced("advice", 4 * MIB);
    scene.change(3);
    scene.site.dsync(["checkpoint", "vm", "backup"]).ok();
    for wrong in ["999", "nothing"] {
        let refused = scene.site.dsync(["changes", "vm", "--since", wrong]).code(1);
        let listed = scene.site.dsync(quoted(&refused.stderr, "dsync status")).ok().text();
        assert!(listed.contains("  epoch 2, ") && listed.contains("12.0 KiB changed"), "{listed}");
        assert!(listed.contains("checkpoint backup at epoch 2"), "{listed}");
    }
}

#[test]
fn a_delta_that_the_refusal_of_another_names_fits() {
    let mut scene = Scene::synced("advice of merge", 4 * MIB);
    let extract =
        |scene: &Scene, since: &str| scene.site.dsync(["extract", "vm", "--since", since]).ok().stdout;
    let merge = |scene: &Scene, delta: &[u8]| scene.site.dsync(["merge"]).arg(&scene.replica).input(delta);
    scene.change(1);
    let first = extract(&scene, "1");
    scene.change(1);
    let second = extract(&scene, "2");
    let refused = merge(&scene, &second).code(4);
    let advised = quoted(&refused.stderr, "dsync extract");
    assert_eq!(advised, ["extract", "SRC", "--since", "1"]);
    let both = extract(&scene, advised[3]);
    merge(&scene, &both).ok();
    scene.equal();
    merge(&scene, &first).code(4).says(&["is at epoch 3", "end of this delta at epoch 2", "skip"]);
}

#[test]
fn a_served_image_that_was_renamed_is_known_as_such() {
    let mut scene = Scene::synced("renamed", 4 * MIB);
    let renamed = scene.site.path("renamed.raw");
    scene.change(2);
    rename(&scene.image, &renamed).expect("a rename");
    let status = scene.site.dsync(["status"]).ok().text();
    assert!(status.contains("was moved or deleted") && status.contains("2 blocks written since"), "{status}");
    scene.site.sync(&renamed, &scene.replica, &[]).ok();
    image::assert_equal(&renamed, &scene.replica);
}

#[test]
fn every_command_says_the_same_of_a_replica_whose_file_system_is_not_mounted() {
    let mut scene = Scene::synced("not mounted", 4 * MIB);
    let folder = scene.replica.parent().expect("a folder");
    rename(folder, scene.site.path("elsewhere")).expect("a rename");
    std::fs::create_dir(folder).expect("an empty mount point");
    scene.change(1);
    let missing = ["is missing", "last synced on", "epoch 1", "not mounted"];
    scene.sync(&[]).code(4).says(&missing);
    let verify = scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica);
    verify.code(4).says(&missing);
    for command in ["recover", "status"] {
        scene.site.dsync([command]).arg(&scene.replica).code(1).says(&missing);
    }
}

#[test]
fn a_replica_on_a_read_only_mount_is_proven_and_not_changed() {
    let what = "a replica on a file system that is mounted read-only";
    if !need_root(what) || !need(&["mkfs.ext4"], what) {
        return;
    }
    let site = Site::new();
    let (fs, place) = (site.image("fs", 64 * MIB), site.path("mounted"));
    Run::new("mkfs.ext4").arg("-q").arg(&fs).ok();
    let Some(device) = Loop::new(&fs) else { return skipped(what, "loop devices are not allowed here") };
    let Some(_mount) = Mount::new(&[], device.device(), &place) else {
        return skipped(what, "mounting is not allowed here");
    };
    let (disk, replica) = (site.image("vm.raw", 4 * MIB), place.join("vm.raw"));
    site.sync(&disk, &replica, &[]).ok();
    Run::new("mount").args(["-o", "remount,ro"]).arg(&place).ok();
    let verify = || site.dsync(["verify"]).arg(&disk).arg(&replica);
    verify().ok();
    site.dsync(["status"]).arg(&replica).ok();
    site.sync(&disk, &replica, &["-n"]).ok();
    std::fs::write(&disk, vec![7; 4 << 20]).expect("another content");
    verify().code(5);
    site.sync(&disk, &replica, &[]).code(1).says(&["mounted read-only", "remount"]);
    Run::new("mount").args(["-o", "remount,rw"]).arg(&place).ok();
    site.sync(&disk, &replica, &[]).ok();
    image::assert_equal(&disk, &replica);
}

#[test]
fn two_disks_that_had_one_name_are_told_apart() {
    let what = "two disks under one name";
    if !need_root(what) {
        return;
    }
    let site = Site::new();
    let images = [site.image("one", MIB), site.image("two", MIB)];
    let mut ids = Vec::new();
    let mut name: Option<std::path::PathBuf> = None;
    for image in &images {
        let attached = match &name {
            None => Loop::new(image),
            Some(name) => Loop::named(name, image),
        };
        let Some(device) = attached else { return skipped(what, "loop devices are not allowed here") };
        let replica = image.with_extension("replica");
        site.sync(device.device(), &replica, &[]).ok();
        name = Some(device.device().to_path_buf());
        let status = site.dsync(["status", "--json"]).arg(device.device()).ok().summary();
        ids.push(status["uuid"].as_str().expect("an id").to_owned());
    }
    assert_ne!(ids[0], ids[1]);
    let status = site.dsync(["status"]).ok().text();
    assert!(ids.iter().all(|id| status.contains(id.as_str())), "{status}");
    // The one that is gone can be named by it.
    site.dsync(["forget", &ids[0]]).ok();
    let status = site.dsync(["status"]).ok().text();
    let lists = |id: &str| status.contains(&format!("id {id}\n"));
    assert!(!lists(&ids[0]) && lists(&ids[1]), "{status}");
}

#[test]
fn what_is_refused_is_blamed_on_what_caused_it() {
    let site = Site::new();
    let disk = site.image("vm.raw", MIB);
    let sync = |options: &[&str]| site.dsync(["sync"]).args(options).arg(&disk).arg("far:/vm.raw");
    sync(&["--compress", "3"]).code(2).says(&["--compress=3"]);
    sync(&["--timeout", "0"]).code(2).says(&["1s to 1h"]);
    sync(&["-e", "false"]).code(1).says(&["remote shell \"false\"", "--rsh"]);
    // A source that was never synced has no identity that the next refusal would not contradict.
    let replica = site.path("replica.raw");
    site.sync(&disk, &replica, &[]).ok();
    let other = site.image("other.raw", MIB);
    let refusals = [(); 2].map(|()| site.sync(&other, &replica, &[]).code(4).stderr);
    assert_eq!(refusals[0], refusals[1]);
}

#[test]
fn options_without_effect_are_named() {
    let scene = Scene::synced("options", 4 * MIB);
    let says = |options: &[&str], words: &[&str]| {
        let output = scene.sync(options).ok();
        assert!(words.iter().all(|word| output.text().contains(word)), "{output}");
    };
    says(&["--timeout", "9s", "--rsh", "ssh"], &["--rsh and --timeout have no effect", "on this host"]);
    says(&["--passes", "3"], &["--passes has no effect", "not a disk tracked"]);
    says(&["--allow-shrink"], &["--allow-shrink has no effect", "is served"]);
    says(&["--block-size", "64K"], &["--block-size has no effect", "is served"]);
    says(&["--method", "tracked", "--hash", "xxh3"], &["--hash has no effect"]);
    let quiet = scene.sync(&["--compress", "--bwlimit", "1G", "--block-size", "4K"]).ok();
    assert!(!quiet.text().contains("effect"), "{quiet}");
    scene.sync(&["--freeze", "require"]).code(4).says(&["not a tracked disk"]);
    let verify = scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica);
    verify.args(["--commit", "in-place"]).code(2).says(&["--repair"]);
    let serve = scene.site.dsync(["serve"]).arg(&scene.image).args(["--socket", "s", "--read-only"]);
    serve.args(["--block-size", "8K"]).code(2).says(&["--block-size"]);
}

#[test]
fn a_state_directory_that_was_removed_beneath_its_server_is_found_out() {
    let mut scene = Scene::synced("removed state", 4 * MIB);
    std::fs::remove_dir_all(scene.site.state()).expect("the state");
    scene.change(2);
    scene.sync(&[]).code(4).says(&["--state-dir", "removed", "restart"]);
    scene.server.take().expect("a server").kill();
    // Nothing is known any more, and nothing is taken for known.
    scene.start();
    scene.sync(&[]).code(4).says(&["another source", "--adopt"]);
    scene.sync(&["--adopt"]).ok();
    scene.equal();
}
