//! A replica's file system runs full: what cannot be committed is refused before anything is changed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dsync_tests::image::{self, BLOCK};
use dsync_tests::mount::{self, Loop, Mount};
use dsync_tests::{Background, Output, Random, Run, Scene, Site, need, need_root, rounds, skipped, until};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

/// A small file system, and a file that takes what is left of it.
struct Small {
    fill: PathBuf,
    place: PathBuf,
    _mount: Mount,
}

impl Small {
    /// A file system of this kind and size, in which a new replica of the scene is to be.
    fn new(scene: &mut Scene, kind: &str, size: u64, what: &str) -> Option<Small> {
        let make = format!("mkfs.{kind}");
        if !need_root(what) || !need(&[&make], what) {
            return None;
        }
        let (image, place) = (scene.site.image("small.img", size), scene.site.path("small"));
        let options: &[&str] = match kind {
            // XFS of less than 300 MiB is not made without a word.
            "xfs" => &["-q", "--unsupported"],
            "btrfs" => &["-q", "--mixed"],
            _ => &["-q", "-m", "0"],
        };
        Run::new(make).args(options).arg(&image).ok();
        let Some(mount) = Mount::new(&["-o", "loop"], &image, &place) else {
            skipped(what, &format!("{kind} cannot be mounted from a loop device here"));
            return None;
        };
        scene.replica = place.join("vm.raw");
        Some(Small { fill: place.join("fill"), place, _mount: mount })
    }

    fn free(&self) -> u64 {
        let text = Run::new("stat").args(["-f", "-c", "%a %S"]).arg(&self.place).ok().text();
        text.split_whitespace().map(|number| number.parse::<u64>().expect("a number")).product()
    }

    /// Leaves so much room.
    fn leave(&self, bytes: u64) {
        let len = self.free().saturating_sub(bytes).to_string();
        Run::new("fallocate").args(["-l", &len]).arg(&self.fill).ok();
    }

    /// Leaves none, to the last block.
    fn fill_up(&self) {
        for unit in ["1M", "4K"] {
            let fill = self.fill.display();
            Run::shell(&format!("dd if=/dev/zero bs={unit} oflag=append conv=notrunc of={fill} 2>/dev/null; sync -f {fill}; true"))
                .ok();
        }
    }

    fn make_room(&self) {
        std::fs::remove_file(&self.fill).expect("making room");
        // Btrfs gives it back with its next commit.
        Run::new("sync").arg("-f").arg(&self.place).ok();
    }
}

/// Overwrites the second half of the disk, of which the replica holds holes.
fn fill_holes(scene: &mut Scene, range: std::ops::Range<u64>) {
    let mut client = scene.client();
    for at in range.step_by(MIB as usize) {
        client.write(at, &scene.random.bytes(MIB as usize)).expect("a write");
    }
    client.close().expect("the end");
}

fn recover(scene: &Scene, replica: &Path) -> String {
    scene.site.dsync(["recover"]).arg(replica).ok().text()
}

/// The journal fits, and what the merge would write into holes does not: the replica stays what it was, and is more than that as
/// soon as there is room.
#[test]
fn holes_that_do_not_fit_are_refused_before_the_merge() {
    for kind in ["ext4", "xfs"] {
        let what = &format!("holes that do not fit on {kind}");
        let mut scene = Scene::new(what, 16 * MIB);
        let Some(small) = Small::new(&mut scene, kind, 48 * MIB, what) else { continue };
        scene.sync(&[]).ok();
        let (before, space) =
            (std::fs::read(&scene.replica).expect("a replica"), image::space(&scene.replica));
        fill_holes(&mut scene, 8 * MIB..16 * MIB);
        small.leave(12 * MIB);
        let free = small.free();
        for _ in 0..2 {
            let refused = scene.sync(&[]).code(1);
            refused.says(&["no space", "MiB", "vm.raw", "replica is unchanged"]);
            assert!(!refused.stderr.contains("bytes"), "{refused}");
            let told = recover(&scene, &scene.replica);
            assert!(told.contains("consistent, at epoch 1"), "{told}");
            assert_eq!(std::fs::read(&scene.replica).expect("a replica"), before);
            // Nothing is left of the attempt.
            assert!(small.free() + 64 * 1024 >= free, "{free} bytes were free, {}", small.free());
            // A file system may keep an extent block of the room that was taken and given back.
            let now = image::space(&scene.replica);
            assert!(now <= space + 64 * 1024, "the replica took {space} bytes, then {now}");
        }
        small.make_room();
        let summary = scene.sync(&[]).ok().summary();
        assert_eq!(summary["method"], "tracked", "{summary}");
        scene.equal();
    }
}

/// Fewer moments are kept than were asked for before none is left, and the sync that drops some says so.
#[test]
fn moments_that_are_dropped_for_want_of_room_are_told_of() {
    let what = "moments for which there is no room";
    let mut scene = Scene::new(what, 16 * MIB);
    let Some(small) = Small::new(&mut scene, "ext4", 64 * MIB, what) else { return };
    fill_holes(&mut scene, 0..16 * MIB);
    scene.sync(&["--keep-last", "10"]).ok();
    for _ in 0..6 {
        scene.change(300);
        let warnings = scene.sync(&[]).ok().summary()["warnings"].to_string();
        assert_eq!(warnings, "[]");
    }
    small.leave(5 * MIB);
    scene.change(300);
    let place = small.place.display().to_string();
    let told = scene.sync(&[]).ok().summary()["warnings"].to_string();
    for words in ["dropped and", "left of what is to be kept (the last 10)", &place, "keep less"] {
        assert!(told.contains(words), "{told}");
    }
    let left = scene.site.dsync(["rewind", "--json"]).arg(&scene.replica).ok().summary()["moments"]
        .as_array()
        .map(Vec::len);
    assert!(left.is_some_and(|left| (1..6).contains(&left)), "{left:?}");
    // What a bound costs was asked for.
    small.make_room();
    scene.change(300);
    let bounded = scene.sync(&["--keep-last", "10", "--keep-bytes", "2M"]).ok().summary();
    assert_eq!(bounded["warnings"].to_string(), "[]");
}

/// The number of moments that are kept.
fn moments(scene: &Scene) -> usize {
    let listed = scene.site.dsync(["rewind", "--json"]).arg(&scene.replica).ok().summary();
    listed["moments"].as_array().map_or(0, Vec::len)
}

/// A replica of 32 MiB with three moments of 8 MiB each, and 2 MiB left beside it.
fn crowded(what: &str) -> Option<(Scene, Small)> {
    let mut scene = Scene::new(what, 32 * MIB);
    let small = Small::new(&mut scene, "ext4", 96 * MIB, what)?;
    fill_holes(&mut scene, 0..32 * MIB);
    scene.sync(&["--keep-last", "10"]).ok();
    for _ in 0..3 {
        fill_holes(&mut scene, 0..8 * MIB);
        scene.sync(&[]).ok();
    }
    small.leave(2 * MIB);
    assert_eq!(moments(&scene), 3);
    Some((scene, small))
}

/// How much a comparison finds is not known before: it is counted before a moment goes, and none goes where all would not suffice.
#[test]
fn a_comparison_takes_as_much_of_the_past_as_it_needs_or_nothing() {
    for method in ["compare", "rolling"] {
        let Some((mut scene, small)) = crowded(&format!("moments that give way to {method}")) else { return };
        fill_holes(&mut scene, 0..32 * MIB);
        let failed = scene.sync(&["--method", method]).code(1);
        failed.says(&["no space", "the replica is unchanged, and what had arrived"]);
        assert!(!failed.stderr.contains("its past"), "{}", failed.stderr);
        assert_eq!(moments(&scene), 3);
        small.make_room();
        scene.sync(&[]).ok();
        drop((scene, small));
        let Some((mut scene, _small)) = crowded(&format!("a moment that gives way to {method}")) else {
            return;
        };
        fill_holes(&mut scene, 8 * MIB..14 * MIB);
        let told = scene.sync(&["--method", method]).ok().summary();
        assert!(told["warnings"].to_string().contains("oldest moments"), "{told}");
        assert_eq!(told["method"], *method, "{told}");
        assert!((1..3).contains(&moments(&scene)), "{}", moments(&scene));
        scene.equal();
    }
}

/// Whoever interrupts a sync that has dropped moments is told, and so is who syncs next.
#[test]
fn an_interrupted_sync_says_that_moments_were_dropped() {
    let Some((mut scene, _small)) = crowded("moments that gave way to a sync that is interrupted") else {
        return;
    };
    fill_holes(&mut scene, 8 * MIB..14 * MIB);
    let undos = || {
        let names =
            std::fs::read_dir(scene.replica.with_file_name(".vm.raw.dsync")).expect("a folder").flatten();
        names.filter(|entry| entry.file_name().to_string_lossy().starts_with("undo-0")).count()
    };
    let before = undos();
    let mut sync = scene.sync(&["--method", "compare", "--bwlimit", "3M"]).start();
    until("a moment is dropped", || undos() < before);
    sync.signal(Signal::INT);
    sync.output(Duration::from_secs(60)).says(&["interrupted", "oldest moments of its past were dropped"]);
    let told = scene.sync(&[]).ok().summary()["warnings"].to_string();
    assert!(told.contains("dropped to make room for a sync that did not end"), "{told}");
    assert!(
        !scene.sync(&["--method", "compare"]).ok().summary()["warnings"].to_string().contains("did not end")
    );
}

/// A rewind that finds no room leaves the replica and its moments as they were, and works when there is some.
#[test]
fn a_rewind_without_room_is_refused_or_done() {
    let what = "a rewind without room on ext4";
    let mut scene = Scene::new(what, 16 * MIB);
    let Some(small) = Small::new(&mut scene, "ext4", 96 * MIB, what) else { return };
    fill_holes(&mut scene, 0..16 * MIB);
    scene.sync(&["--keep-last", "9", "--keep-bytes", "1G"]).ok();
    let before = std::fs::read(&scene.replica).expect("a replica");
    scene.change(2000);
    scene.sync(&[]).ok();
    let after = std::fs::read(&scene.replica).expect("a replica");
    let rewind = |to: &str| scene.site.dsync(["rewind", "--to", to]).arg(&scene.replica);
    let (mut refused, mut done) = (0, 0);
    for left in [1, 2, 4, 7, 9, 12] {
        if refused > 0 {
            small.make_room();
        }
        small.leave(left * MIB);
        let output = rewind("1").output();
        let now = std::fs::read(&scene.replica).expect("a replica");
        if output.status.success() {
            assert!(now == before, "{left} MiB left: it is not what it was");
            done += 1;
            break;
        }
        output.says(&["no space", "replica is unchanged"]);
        assert!(now == after, "{left} MiB left: {output}");
        recover(&scene, &scene.replica);
        refused += 1;
    }
    small.make_room();
    if done == 0 {
        rewind("1").ok();
    }
    assert!(std::fs::read(&scene.replica).expect("a replica") == before);
    assert!(refused > 0, "there was always room");
}

/// The same in the midst of a mirror.
#[test]
fn batches_whose_holes_do_not_fit_are_not_confirmed() {
    for kind in ["ext4", "xfs"] {
        let what = &format!("batches that do not fit on {kind}");
        let mut scene = Scene::new(what, 64 * MIB);
        let Some(small) = Small::new(&mut scene, kind, 192 * MIB, what) else { continue };
        scene.sync(&[]).ok();
        let run = scene
            .site
            .dsync(["mirror", "--epoch", "1h", "--rpo", "1s"])
            .arg(&scene.image)
            .arg(&scene.replica);
        let mut running = run.start();
        running.wait_to_say("mirroring to");
        fill_holes(&mut scene, 32 * MIB..33 * MIB);
        until("a batch arrives", || image::first_difference(&scene.image, &scene.replica).is_none());
        let sessions = |running: &Background| running.stdout_so_far().matches("mirroring to").count();
        small.leave(6 * MIB);
        fill_holes(&mut scene, 34 * MIB..40 * MIB);
        fill_holes(&mut scene, 34 * MIB..40 * MIB);
        until("it is refused and tried again", || sessions(&running) > 2);
        small.make_room();
        until("all of it arrives", || image::first_difference(&scene.image, &scene.replica).is_none());
        let before = sessions(&running);
        // More than fits into this and into what the journal gives back when it is begun anew.
        small.leave(3 * MIB);
        fill_holes(&mut scene, 41 * MIB..64 * MIB);
        until("it is refused once more", || sessions(&running) > before);
        running.kill();
        // Though there is as little room as before.
        recover(&scene, &scene.replica);
        small.make_room();
        scene.sync(&[]).ok();
        scene.equal();
    }
}

/// The journal's folder is a small file system of its own, through which goes much more than would ever fit.
#[test]
fn a_mirror_with_a_small_journal_folder_on_xfs() {
    let what = "a small journal folder on XFS";
    let mut scene = Scene::new(what, 64 * MIB);
    let replica = scene.replica.clone();
    let Some(small) = Small::new(&mut scene, "xfs", 40 * MIB, what) else { return };
    scene.replica = replica;
    let dsync = |arguments: &[&str]| scene.site.dsync(arguments).arg("--journal-dir").arg(&small.place);
    let mut running = dsync(&["mirror", "--epoch", "1h", "-v"]).arg(&scene.image).arg(&scene.replica).start();
    running.wait_to_say("mirroring to");
    let mut client = scene.client();
    for round in 0..192u64 {
        client.write((round % 96) << 19, &scene.random.bytes(512 << 10)).expect("a write");
        // A part of what fits at once, and not all of it, may be on its way.
        if round % 24 == 23 {
            until("all of it arrives", || image::first_difference(&scene.image, &scene.replica).is_none());
        }
    }
    // Killed with what is in the journal, and the folder filled up: it is merged all the same.
    for at in 0..8 {
        client.write(at * MIB, &scene.random.bytes(BLOCK as usize)).expect("a write");
    }
    client.close().expect("the end");
    running.kill();
    Run::shell(&format!("cat /dev/zero >{} 2>/dev/null; true", small.fill.display())).ok();
    dsync(&["recover"]).arg(&scene.replica).ok();
    small.make_room();
    dsync(&["sync", "--commit", "in-place"]).arg(&scene.image).arg(&scene.replica).ok();
    scene.equal();
}

/// Fails the test unless a command ended by itself, and with a word where it failed.
fn named(output: &Output) {
    assert!(!output.was_killed(), "{output}");
    assert!(output.status.success() || output.stderr.starts_with("dsync: "), "{output}");
}

/// On Btrfs even what is allocated is written elsewhere, and a snapshot shares what would not be: where nothing is left, a command
/// says so. None dies of a page that cannot be written to.
#[test]
fn nothing_dies_of_a_full_btrfs() {
    let what = "a replica on a full Btrfs";
    let mut scene = Scene::new(what, 24 * MIB);
    let Some(small) = Small::new(&mut scene, "btrfs", 130 * MIB, what) else { return };
    let (volume, copy) = (small.place.join("volume"), small.place.join("copy"));
    let btrfs =
        |words: &[&str], paths: &[&Path]| Run::new("btrfs").args(["-q", "subvolume"]).args(words).args(paths);
    btrfs(&["create"], &[&volume]).ok();
    scene.replica = volume.join("vm.raw");
    scene.sync(&["--keep-last", "3"]).ok();
    for round in 0..rounds(6, 60) {
        // One that is killed before all is full, or one that writes meanwhile: then its note of that is written to.
        let (at_work, snapshot) = (round % 2 == 0, round % 3 > 0);
        if at_work {
            fill_holes(&mut scene, 0..8 * MIB);
        } else {
            scene.change(300);
        }
        let pause = Duration::from_millis(if at_work { 900 } else { 5 + scene.random.below(60) });
        let run = |options: &[&str]| scene.sync(options);
        let in_place = ["--commit", "in-place", "--bwlimit", "4M", "--keep", "none"];
        let mut sync = run(if at_work { &in_place } else { &[] }).start();
        std::thread::sleep(pause);
        if !at_work {
            sync.kill();
        }
        if snapshot {
            btrfs(&["snapshot", "-r"], &[&volume, &copy]).ok();
        }
        small.fill_up();
        if at_work {
            named(&sync.output(Duration::from_secs(60)));
        }
        for _ in 0..2 {
            named(&scene.site.dsync(["recover"]).arg(&scene.replica).output());
            named(&run(&[]).output());
        }
        small.make_room();
        if snapshot {
            btrfs(&["delete", "-C"], &[&copy]).ok();
        }
        let synced = run(&["--keep-last", "3"]).output();
        // Where own writes could not be noted, they may pass for others'.
        if !synced.status.success() {
            synced.says(&["was modified outside dsync", "verify --repair"]);
            scene.site.dsync(["verify", "--repair"]).arg(&scene.image).arg(&scene.replica).ok();
            run(&["--keep-last", "3"]).ok();
        }
        scene.equal();
    }
}

/// The same for the state of a server: its guest goes on writing, and after a kill nothing is missed.
#[test]
fn a_server_outlives_a_full_btrfs_below_its_state() {
    let what = "a server whose state is on a full Btrfs";
    if !need_root(what) || !need(&["mkfs.btrfs", "btrfs"], what) {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new(what));
    let (image, replica, fs) =
        (site.image("vm.raw", 256 * MIB), site.path("copy.raw"), site.image("fs.img", 130 * MIB));
    Run::new("mkfs.btrfs").args(["-q", "--mixed"]).arg(&fs).ok();
    let Some(mount) = Mount::new(&["-o", "loop"], &fs, &site.state()) else {
        return skipped(what, "Btrfs cannot be mounted from a loop device here");
    };
    let small = Small { fill: site.state().join("fill"), place: site.state(), _mount: mount };
    site.sync(&image, &replica, &[]).ok();
    for round in 0..rounds(2, 40) {
        let mut server = Some(site.serve(&[&image], &[]));
        let mut client = server.as_ref().expect("a server").client("vm");
        // All of it in regions that are active already when no room is left, and in others.
        let mut write = |blocks: std::ops::Range<u64>, random: &mut Random| {
            let tried = (0..60)
                .map(|_| client.write(random.within(blocks.clone()) * BLOCK, &random.bytes(BLOCK as usize)));
            tried.filter(Result::is_ok).count()
        };
        assert_eq!(write(0..4096, &mut random), 60);
        if round % 2 == 1 {
            Run::new("btrfs")
                .args(["-q", "subvolume", "snapshot", "-r"])
                .args([&small.place, &small.place.join("snap")])
                .ok();
        }
        small.fill_up();
        assert!(write(0..4096, &mut random) > 0, "active regions can be written to");
        write(4096..65536, &mut random);
        std::thread::sleep(Duration::from_millis(1500));
        write(0..4096, &mut random);
        let running = server.as_mut().expect("a server").process().ended();
        assert!(running.is_none(), "the server has died: {running:?}");
        drop(client);
        server.take().expect("a server").kill();
        named(&site.sync(&image, &replica, &[]).output());
        if round % 2 == 1 {
            Run::new("btrfs").args(["-q", "subvolume", "delete", "-C"]).arg(small.place.join("snap")).ok();
        }
        small.make_room();
        // Where the time of the last write could not be noted, all is compared.
        let synced = site.sync(&image, &replica, &[]).ok().summary();
        let told =
            [&synced["method"], &synced["trust"]].map(|word| word.as_str().unwrap_or_default().to_owned());
        assert!(told[0] == "tracked" || told[1].contains("after its server was killed"), "{synced}");
        image::assert_equal(&image, &replica);
    }
}

/// What became zero needs no room, however it became so: by a trim, as zeroes that the image's file system knows of, or as data.
#[test]
fn zeroes_need_no_room() {
    const FLAG_NO_HOLE: u16 = 2;
    for how in ["trim", "write-zeroes", "data"] {
        let what = &format!("little room for zeroes made by {how}");
        let mut scene = Scene::new(what, 64 * MIB);
        let Some(small) = Small::new(&mut scene, "ext4", 96 * MIB, what) else { return };
        fill_holes(&mut scene, 32 * MIB..64 * MIB);
        scene.sync(&[]).ok();
        small.leave(8 * MIB);
        let mut client = scene.client();
        for at in (32..64).map(|mib| mib * MIB) {
            match how {
                "trim" => client.trim(at, MIB as u32),
                "write-zeroes" => client.zero(at, MIB as u32, FLAG_NO_HOLE),
                _ => client.write(at, &vec![0; MIB as usize]),
            }
            .expect("zeroes");
        }
        client.close().expect("the end");
        let summary = scene.sync(&[]).ok().summary();
        assert_eq!(summary["method"], "tracked", "{summary}");
        scene.equal();
    }
}

/// The second half of a disk of 64 MiB, which its replica has as data, is trimmed.
fn trim_half(scene: &Scene) {
    let mut client = scene.client();
    (32..64).for_each(|mib| client.trim(mib * MIB, MIB as u32).expect("a trim"));
    client.close().expect("the end");
}

/// Zeroes need no room either when a demotion or a mirror brings them.
#[test]
fn zeroes_of_a_demotion_or_a_mirror_need_no_room() {
    for command in ["mirror", "demote"] {
        let what = &format!("little room for zeroes of a {command}");
        let mut scene = Scene::new(what, 64 * MIB);
        let Some(small) = Small::new(&mut scene, "ext4", 96 * MIB, what) else { return };
        fill_holes(&mut scene, 32 * MIB..64 * MIB);
        scene.sync(&[]).ok();
        small.leave(8 * MIB);
        let run = scene.site.dsync([command]).arg(&scene.image).arg(&scene.replica);
        if command == "demote" {
            trim_half(&scene);
            scene.stop();
            run.ok();
        } else {
            let mut running = run.start();
            running.wait_to_say("mirroring to");
            trim_half(&scene);
            until("it arrives", || {
                let said = running.stderr_so_far();
                assert!(said.is_empty(), "{said}");
                image::first_difference(&scene.image, &scene.replica).is_none()
            });
            running.signal(Signal::TERM);
            let ended = running.output(Duration::from_secs(60));
            assert!(ended.status.success() && ended.stderr.is_empty(), "{ended}");
        }
        scene.equal();
    }
}

/// Zeroes for a device need no room in the folder of its journal.
#[test]
fn zeroes_for_a_device_need_no_room_for_its_journal() {
    let what = "a small journal folder of a device";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::new(what, 64 * MIB);
    let Some(device) = Loop::new(&scene.site.image("device.img", 64 * MIB)) else {
        return skipped(what, "there is no loop device");
    };
    let folder = scene.site.path("journal");
    let Some(_mounted) = mount::small(&folder, "8m", what) else { return };
    fill_holes(&mut scene, 32 * MIB..64 * MIB);
    let options = ["--journal-dir", folder.to_str().expect("a path")];
    let sync = || scene.site.sync(&scene.image, device.device(), &options).ok().summary();
    sync();
    trim_half(&scene);
    let summary = sync();
    assert_eq!(summary["method"], "tracked", "{summary}");
    assert!(
        std::fs::read(&scene.image).expect("a disk") == std::fs::read(device.device()).expect("a device")
    );
}

/// Data for which there is no room costs no moment of the past in vain.
#[test]
fn a_delta_that_never_fits_leaves_the_past() {
    let what = "a delta that never fits";
    let mut scene = Scene::new(what, 32 * MIB);
    let Some(small) = Small::new(&mut scene, "ext4", 64 * MIB, what) else { return };
    scene.sync(&["--keep-last", "5"]).ok();
    for _ in 0..3 {
        scene.change(20);
        scene.sync(&[]).ok();
    }
    let moments =
        || scene.site.dsync(["rewind", "--json"]).arg(&scene.replica).ok().summary()["moments"].clone();
    let (kept, before) = (moments(), std::fs::read(&scene.replica).expect("a replica"));
    small.leave(4 * MIB);
    let (random, mut client) = (Random::new(what).bytes(MIB as usize), scene.client());
    (0..24).for_each(|mib| client.write(mib * MIB, &random).expect("a write"));
    client.close().expect("the end");
    let refused = scene.sync(&[]).code(1);
    refused.says(&["no space left", "free about 4", "replica is unchanged"]);
    // Neither helps a replica whose past is kept.
    assert!(!["--journal-dir", "in-place"].iter().any(|way| refused.stderr.contains(way)), "{refused}");
    assert_eq!(moments(), kept);
    assert!(std::fs::read(&scene.replica).expect("a replica") == before);
    small.make_room();
    scene.sync(&[]).ok();
    scene.equal();
}

/// A delta that leads to a size of which the file system has no files is refused before it is taken in: it could never be merged.
#[test]
fn a_disk_that_grows_beyond_the_largest_file_is_refused() {
    let what = "a disk that grows beyond the largest file of a file system";
    let mut scene = Scene::new(what, 4 * MIB);
    // With blocks of 1 KiB, and without extents, 16 GiB.
    let Some(_small) = Small::new(&mut scene, "ext2", 64 * MIB, what) else { return };
    for commit in ["journal", "in-place"] {
        let source = scene.site.image(&format!("{commit}.raw"), 4 * MIB);
        let replica = scene.replica.with_file_name(format!("{commit}.raw"));
        let resize = |len| {
            let file = std::fs::OpenOptions::new().write(true).open(&source).expect("a disk");
            file.set_len(len).expect("another size");
        };
        scene.site.sync(&source, &replica, &["--keep", "24h"]).ok();
        image::scribble(&source, 0, BLOCK, &mut scene.random);
        scene.site.sync(&source, &replica, &[]).ok();
        let before = image::fingerprint(&replica);
        resize(20 << 30);
        let refused = scene.site.sync(&source, &replica, &["--commit", commit]).code(4);
        refused.says(&["cannot become as large as its source", "has no files of 20.0 GiB"]);
        assert_eq!(image::fingerprint(&replica), before);
        scene.site.dsync(["rewind"]).arg(&replica).args(["--to", "1"]).ok();
        resize(4 * MIB);
        scene.site.sync(&source, &replica, &["--allow-shrink"]).ok();
        image::assert_equal(&source, &replica);
    }
}

/// The past is not given up where it takes no room from the replica.
#[test]
fn a_past_on_another_file_system_makes_no_room() {
    let what = "a past on another file system";
    let mut scene = Scene::new(what, 32 * MIB);
    let Some(small) = Small::new(&mut scene, "ext4", 64 * MIB, what) else { return };
    let apart = scene.site.path("apart");
    let apart = ["--journal-dir", apart.to_str().expect("a path")];
    let sync = |scene: &Scene, more: &[&str]| scene.sync(&[&apart[..], more].concat());
    fill_holes(&mut scene, 0..8 * MIB);
    sync(&scene, &["--keep-last", "5"]).ok();
    for _ in 0..3 {
        fill_holes(&mut scene, 0..8 * MIB);
        sync(&scene, &[]).ok();
    }
    let moments = || {
        let listed = scene.site.dsync(["rewind", "--json"]).arg(&scene.replica).args(apart);
        listed.ok().summary()["moments"].as_array().map_or(0, Vec::len)
    };
    assert_eq!(moments(), 3);
    small.leave(MIB);
    let (random, mut client) = (Random::new(what).bytes(MIB as usize), scene.client());
    (16..24).for_each(|mib| client.write(mib * MIB, &random).expect("a write"));
    client.close().expect("the end");
    sync(&scene, &[]).code(1).says(&["no space left", "replica is unchanged"]);
    assert_eq!(moments(), 3);
    small.make_room();
    sync(&scene, &[]).ok();
    scene.equal();
}

/// A past that made room for the journal, and not for what the merge adds, has not gone without a word.
#[test]
fn moments_that_were_dropped_in_vain_are_told_of() {
    let what = "moments that are dropped in vain";
    let mut scene = Scene::new(what, 32 * MIB);
    let Some(small) = Small::new(&mut scene, "ext4", 64 * MIB, what) else { return };
    fill_holes(&mut scene, 0..8 * MIB);
    scene.sync(&["--keep-last", "5"]).ok();
    for _ in 0..3 {
        fill_holes(&mut scene, 0..MIB);
        scene.sync(&[]).ok();
    }
    let before = moments(&scene);
    small.leave(MIB / 16);
    fill_holes(&mut scene, 16 * MIB..18 * MIB);
    let refused = scene.sync(&[]).code(1);
    refused.says(&["no space left", "replica is unchanged"]);
    let told = refused.stderr.contains("moments of its past were dropped");
    assert_eq!(told, moments(&scene) < before, "{refused}");
    assert!(told, "nothing was dropped, so this test shows nothing: {refused}");
}

/// What the message names besides room is a command that works.
#[test]
fn a_journal_that_does_not_fit_is_not_needed() {
    let what = "a journal that does not fit";
    let mut scene = Scene::new(what, 32 * MIB);
    let Some(small) = Small::new(&mut scene, "ext4", 64 * MIB, what) else { return };
    fill_holes(&mut scene, 0..32 * MIB);
    scene.sync(&[]).ok();
    fill_holes(&mut scene, 0..24 * MIB);
    small.leave(4 * MIB);
    let refused = scene.sync(&[]).code(1);
    refused.says(&["no space left", "--commit in-place"]);
    assert!(!refused.stderr.contains("--journal-dir"), "{refused}");
    scene.sync(&["--commit", "in-place"]).ok();
    scene.equal();
}

#[test]
fn a_first_copy_says_how_much_room_it_lacks() {
    let what = "a first copy that does not fit";
    let mut scene = Scene::new(what, 64 * MIB);
    let Some(small) = Small::new(&mut scene, "ext4", 64 * MIB, what) else { return };
    fill_holes(&mut scene, 0..64 * MIB);
    small.leave(16 * MIB);
    let refused = scene.sync(&[]).code(1).stderr;
    let figure = refused.split_once("free about ").and_then(|(_, rest)| rest.split_once(" MiB"));
    let mib: f64 = figure.and_then(|(figure, _)| figure.parse().ok()).expect(&refused);
    assert!((46.0..53.0).contains(&mib), "{refused}");
    // Not even its state finds room.
    std::fs::remove_dir_all(small.place.join(".vm.raw.dsync")).expect("its state");
    std::fs::remove_file(small.place.join("vm.raw.partial")).expect("its beginning");
    small.fill_up();
    scene.sync(&[]).code(1).says(&["No space left", "free some space on its file system"]);
}

/// The figure is that of the journal and of what the merge adds: with so much more room the next sync succeeds.
#[test]
fn the_room_that_is_asked_for_suffices() {
    let what = "the room that is asked for";
    let mut scene = Scene::new(what, 32 * MIB);
    let Some(small) = Small::new(&mut scene, "ext4", 128 * MIB, what) else { return };
    // A quarter of what comes is in the replica's file already.
    fill_holes(&mut scene, 0..5 * MIB);
    scene.sync(&[]).ok();
    fill_holes(&mut scene, 0..20 * MIB);
    small.leave(8 * MIB);
    let refused = scene.sync(&[]).code(1).stderr;
    let figure = refused.split_once("free about ").and_then(|(_, rest)| rest.split_once(" MiB"));
    let mib: f64 = figure.and_then(|(figure, _)| figure.parse().ok()).expect("a figure");
    assert!((20.0..33.0).contains(&mib), "{refused}");
    let fill = std::fs::File::options().write(true).open(&small.fill).expect("the filling");
    let len = fill.metadata().expect("its size").len();
    fill.set_len(len - (mib * MIB as f64) as u64).expect("room");
    scene.sync(&[]).ok();
    scene.equal();
}
