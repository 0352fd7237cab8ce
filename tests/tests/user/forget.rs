//! What commands leave behind in the state directory: nothing where they are refused, and nothing of what is to be forgotten.

use std::fs::File;
use std::path::{Path, PathBuf};

use dsync_tests::far::Far;
use dsync_tests::image;
use dsync_tests::mount::Loop;
use dsync_tests::{Scene, Site, need_root, skipped, until};

const MIB: u64 = 1 << 20;

/// The sources that the state directory knows.
fn sources(site: &Site) -> usize {
    let Ok(entries) = std::fs::read_dir(site.state().join("sources")) else { return 0 };
    entries.flatten().filter(|entry| entry.path().is_dir()).count()
}

fn resize(image: &Path, size: u64) {
    File::options().write(true).open(image).and_then(|file| file.set_len(size)).expect("another size");
}

#[test]
fn a_refused_command_leaves_no_source_behind() {
    let site = Site::new();
    let (disk, copy) = (site.image("vm.raw", MIB), site.path("copy.raw"));
    std::fs::write(&copy, b"somebody's file").expect("a file");
    site.sync(&disk, &copy, &[]).code(4).says(&["copy.raw"]);
    assert_eq!(sources(&site), 0, "a refused sync");
    let (new, taken) = (site.path("in-the-way.raw"), site.path("in-the-way.raw.partial"));
    std::fs::write(taken, b"somebody's file").expect("a file");
    site.sync(&disk, &new, &[]).code(4).says(&["in-the-way.raw.partial", "move it aside"]);
    assert!(!new.with_file_name(".in-the-way.raw.dsync").exists(), "state of a refused copy");
    site.sync(&disk, &site.path("nowhere/copy.raw"), &[]).output();
    assert_eq!(sources(&site), 0, "a sync to no folder");
    site.sync(&disk, &site.path("new.raw"), &["--block-size", "3000"]).output();
    site.dsync(["changes"]).arg(&disk).args(["--since", "backup"]).output();
    site.dsync(["checkpoint"]).arg(&disk).args(["backup", "--at", "7"]).output();
    site.sync(&disk, &site.path("new.raw"), &["-n"]).ok();
    assert_eq!(sources(&site), 0, "nothing was recorded");
    // What is recorded stays.
    site.sync(&disk, &site.path("new.raw"), &[]).ok();
    assert_eq!(sources(&site), 1);
    site.sync(&disk, &copy, &[]).code(4);
    assert_eq!(sources(&site), 1, "a known source is not forgotten by a refusal");
}

/// A forgotten replica is not shown as up to date for ever.
#[test]
fn who_forgets_a_replica_is_told_that_its_source_lists_it() {
    let site = Site::new();
    let (disk, replica) = (site.image("vm.raw", MIB), site.path("copy.raw"));
    site.sync(&disk, &replica, &[]).ok();
    let told = site.dsync(["forget"]).arg(&replica).ok().text();
    let way = format!("dsync forget {} {}", disk.display(), replica.display());
    assert!(told.contains(&way), "{told}");
    site.dsync(["forget"]).args([&disk, &replica]).ok();
    assert!(!site.dsync(["status"]).ok().text().contains("copy.raw"));
}

/// A copy of a replica takes no sync and is not promoted; where the source is gone, it becomes a plain disk, as the message says.
#[test]
fn a_copied_replica_may_be_forgotten() {
    let scene = Scene::synced("copied", MIB);
    let folder = scene.replica.parent().expect("a folder");
    let copy = scene.site.path("copied");
    dsync_tests::Run::new("cp").arg("-a").args([folder, &copy]).ok();
    std::fs::remove_dir_all(folder).expect("the replica");
    let replica = copy.join("vm.raw");
    let run = |command: &[&str]| scene.site.dsync(command).arg(&replica);
    run(&["promote", "--force"]).code(4).says(&["dsync forget /"]);
    let before = image::fingerprint(&replica);
    run(&["forget"]).ok();
    assert_eq!(before, image::fingerprint(&replica));
    scene.site.serve(&[&replica], &[]).stop();
}

#[test]
fn a_refused_shrink_is_no_leave_for_another_replica() {
    let site = Site::new();
    let disk = site.image("vm.raw", 4 * MIB);
    let (one, two, third) = (site.path("one.raw"), site.path("two.raw"), site.path("third.raw"));
    site.sync(&disk, &one, &[]).ok();
    site.sync(&disk, &two, &[]).ok();
    std::fs::write(&third, b"somebody's file").expect("a file");
    resize(&disk, MIB);
    site.sync(&disk, &one, &[]).code(4).says(&["shrank", "--allow-shrink"]);
    site.sync(&disk, &third, &["--allow-shrink"]).code(4).says(&["third.raw"]);
    site.sync(&disk, &two, &["--allow-shrink", "-n"]).ok();
    let before = image::fingerprint(&two);
    site.sync(&disk, &two, &[]).code(4).says(&["shrank", "--allow-shrink"]);
    assert_eq!(before, image::fingerprint(&two));
    // Once it is meant, and done, it need not be said again.
    site.sync(&disk, &one, &["--allow-shrink"]).ok();
    image::assert_equal(&disk, &one);
    site.sync(&disk, &two, &[]).ok();
    image::assert_equal(&disk, &two);
    // Grown again in between, it has not shrunk.
    resize(&disk, MIB / 2);
    site.sync(&disk, &third, &["--allow-shrink"]).code(4);
    resize(&disk, 2 * MIB);
    site.sync(&disk, &one, &[]).ok();
    image::assert_equal(&disk, &one);
}

#[test]
fn what_is_forgotten_is_gone_and_what_is_in_use_is_not_forgotten() {
    let mut scene = Scene::synced("forget", 8 * MIB);
    let replica = scene.replica.display().to_string();
    let forget = |scene: &Scene, words: &[&str]| scene.site.dsync(["forget", "--json"]).args(words);
    scene.site.dsync(["checkpoint", "vm", "backup"]).ok();
    let told = forget(&scene, &["-n", "vm", "backup"]).ok().summary();
    assert!(told["cost"].as_str().is_some_and(|cost| cost.contains("read everything")), "{told}");
    forget(&scene, &["vm", "nothing"]).output().says(&["nothing"]);
    forget(&scene, &["vm", "backup"]).ok();
    forget(&scene, &["vm", "backup"]).output().says(&["backup"]);
    forget(&scene, &["vm"]).code(4).says(&["served"]);
    let told = forget(&scene, &["-n", "vm"]).ok().summary();
    assert!(told["cost"].as_str().is_some_and(|cost| cost.contains("stop its server first")), "{told}");
    assert_eq!(sources(&scene.site), 1, "a dry run forgot it");

    // The source: nothing happens to its disk, and its replica says what it takes to go on.
    scene.stop();
    let told = forget(&scene, &["-n", "vm"]).ok().summary();
    assert!(told["cost"].as_str().is_some_and(|cost| cost.contains(&replica)), "{told}");
    assert_eq!(sources(&scene.site), 1, "a dry run forgot it");
    let before = image::fingerprint(&scene.image);
    forget(&scene, &["vm"]).ok();
    assert_eq!((sources(&scene.site), before), (0, image::fingerprint(&scene.image)));
    scene.sync(&[]).code(4).says(&["--adopt"]);
    assert_eq!(sources(&scene.site), 0);
    scene.sync(&["--adopt"]).ok();
    scene.start();
    scene.change(10);
    scene.sync(&[]).ok();
    scene.equal();

    // The bookmark of a replica that is no more, and the replica itself.
    forget(&scene, &["vm", &replica]).ok();
    scene.sync(&[]).ok();
    let content = std::fs::read(&scene.replica).expect("the replica");
    forget(&scene, &["-n", &replica]).ok();
    scene.sync(&[]).ok();
    forget(&scene, &[&replica]).ok();
    assert!(content == std::fs::read(&scene.replica).expect("the file"), "the file was touched");
    let beside = std::fs::read_dir(scene.replica.parent().expect("a folder")).expect("a folder").count();
    assert_eq!(beside, 1, "something was left beside the file");
    forget(&scene, &[&replica]).output().says(&["neither"]);
    scene.sync(&[]).code(4).says(&["--adopt"]);
}

/// Names for one destination are one replica to its source: it is at one epoch, counts once, and is forgotten by either.
#[test]
fn a_replica_that_is_reached_by_two_names_has_one_bookmark() {
    let far = Far::new(env!("CARGO_BIN_EXE_rsh"));
    let mut scene = Scene::new("two names", 8 * MIB);
    let folder = far.replica().parent().expect("a folder").display().to_string();
    let names =
        [far.name(), format!("root@far:{folder}/../{}/vm.raw", folder.rsplit('/').next().expect("a name"))];
    let known = |scene: &Scene| {
        let told = scene.site.dsync(["status", "--json", "vm"]).ok().summary();
        assert_eq!(told["first_copies"].as_array().map(Vec::len), Some(0), "{told}");
        let replicas = told["replicas"].as_array().expect("replicas").clone();
        assert_eq!(replicas.len(), 1, "{replicas:?}");
        replicas[0].clone()
    };
    for turn in 0..4 {
        scene.change(10);
        let name = &names[turn % 2];
        let told = far.run_to(name, "sync", &scene, &[], None).ok().summary();
        let warned = told["warnings"].to_string().contains(&format!("was known as {}", names[0]));
        assert_eq!(warned, turn == 1, "{told}");
        let replica = known(&scene);
        assert_eq!((replica["replica"].as_str(), &replica["epoch"]), (Some(name.as_str()), &told["epoch"]));
        assert_eq!(replica["tally"]["syncs"], turn + 1, "{replica}");
    }
    // One that was lost is told by the name that was not used last, too.
    std::fs::remove_file(far.replica()).expect("a replica");
    std::fs::remove_dir_all(far.site.path(".vm.raw.dsync")).expect("its state");
    far.run_to(&names[0], "sync", &scene, &[], None).code(4).says(&["missing"]);
    scene.site.dsync(["forget", "vm", &names[0]]).ok();
    let told = scene.site.dsync(["status", "--json", "vm"]).ok().summary();
    assert_eq!(told["replicas"].as_array().map(Vec::len), Some(0), "{told}");
    scene.site.dsync(["forget", "vm", &names[1]]).output().says(&["no checkpoint or replica"]);
}

/// A replica on a disk that is not attached any more is forgotten by the name that the status shows.
#[test]
fn a_replica_on_a_detached_device_is_forgotten_by_its_name() {
    let what = "forgetting a replica on a detached loop device";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::new(what, 8 * MIB);
    let image = scene.site.image("device.img", 8 * MIB);
    let Some(device) = Loop::new(&image) else { return skipped(what, "there is no loop device") };
    scene.replica = device.device().to_path_buf();
    scene.sync(&[]).ok();
    drop(device);
    let replicas = |scene: &Scene| {
        let told = scene.site.dsync(["status", "--json"]).ok().json();
        told.into_iter().filter(|it| it["kind"] == "replica").collect::<Vec<_>>()
    };
    let shown = replicas(&scene);
    assert_eq!((shown.len(), &shown[0]["state"]), (1, &"missing".into()), "{shown:?}");
    let name = shown[0]["path"].as_str().expect("a path").to_owned();
    let told = scene.site.dsync(["forget", "--json", "-n", &name]).ok().summary();
    assert!(told["cost"].as_str().is_some_and(|cost| cost.contains("not attached")), "{told}");
    assert_eq!(replicas(&scene).len(), 1, "a dry run forgot it");
    scene.site.dsync(["forget", &name]).ok();
    assert_eq!(replicas(&scene), Vec::<serde_json::Value>::new());
    scene.site.dsync(["forget", &name]).output().says(&["neither"]);
    // What its source has of it is another thing.
    scene.site.dsync(["forget", "vm", &name]).ok();
}

/// What a source on the same host is told to forget is whole: nothing is left beside the place, and no alarm.
#[test]
fn a_first_copy_that_was_killed_is_given_up_by_one_command() {
    let what = "a first copy that is given up";
    let mut scene = Scene::new(what, 32 * MIB);
    let give_up = |scene: &Scene| {
        let check = || scene.site.dsync(["status", "--check"]).output().text();
        let copy = scene.sync(&["--bwlimit", "200K"]).start();
        // Beside a file, and in the state directory for a device. A command that asks would hold it for a moment.
        let beside = scene.replica.with_file_name(".vm.raw.dsync/lineage");
        let devices =
            || std::fs::read_dir(scene.site.state().join("replicas")).into_iter().flatten().flatten();
        let is_there = |folder: PathBuf| folder.join("lineage").exists();
        until("the copy is written down", || {
            beside.exists() || devices().any(|folder| is_there(folder.path()))
        });
        copy.killed();
        let told = check();
        assert!(told.contains(&format!("replica {} is incomplete", scene.replica.display())), "{told}");
        scene.site.dsync(["forget", "-n", "vm"]).arg(&scene.replica).ok();
        assert_eq!(check(), told, "a dry run forgot it");
        scene.site.dsync(["forget", "vm"]).arg(&scene.replica).ok();
        assert_eq!(check(), "OK\n");
    };
    give_up(&scene);
    let folder = scene.replica.parent().expect("a folder");
    assert_eq!(std::fs::read_dir(folder).expect("a folder").count(), 0);
    // One that is gone.
    scene.sync(&[]).ok();
    std::fs::remove_file(&scene.replica).expect("a replica");
    scene.site.dsync(["status", "--check"]).code(1);
    scene.site.dsync(["forget", "vm"]).arg(&scene.replica).ok();
    assert_eq!(scene.site.dsync(["status", "--check"]).output().text(), "OK\n");
    scene.sync(&[]).ok();
    // A complete one stays a replica.
    scene.site.dsync(["forget", "vm"]).arg(&scene.replica).ok();
    scene.sync(&[]).ok();
    // On a device, by the name of that.
    if !need_root(what) {
        return;
    }
    scene.site.dsync(["forget"]).arg(&scene.replica).ok();
    scene.site.dsync(["forget", "vm"]).arg(&scene.replica).ok();
    let image = scene.site.image("device.img", 32 * MIB);
    std::fs::write(&image, vec![0; 32 * MIB as usize]).expect("a blank disk");
    let Some(device) = Loop::new(&image) else { return skipped(what, "there is no loop device") };
    scene.replica = device.device().to_path_buf();
    give_up(&scene);
}

#[test]
fn a_file_of_another_that_is_named_as_an_unfinished_copy_stays() {
    let scene = Scene::synced("another's partial", MIB);
    let partial = scene.replica.with_extension("raw.partial");
    std::fs::write(&partial, b"somebody's file").expect("a file");
    scene.site.dsync(["forget"]).arg(&scene.replica).ok();
    assert_eq!(std::fs::read(&partial).expect("the file"), b"somebody's file");
}
