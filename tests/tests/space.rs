//! A replica's file system runs full: what cannot be committed is refused before anything is changed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::image::{self, BLOCK};
use dsync_tests::mount::Mount;
use dsync_tests::{Background, Run, Scene, need, need_root, skipped};

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
        // XFS of less than 300 MiB is not made without a word.
        let options: &[&str] = if kind == "xfs" { &["-q", "--unsupported"] } else { &["-q", "-m", "0"] };
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

    fn make_room(&self) {
        std::fs::remove_file(&self.fill).expect("making room");
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
        let mut scene = Scene::new(what, 32 * MIB);
        let Some(small) = Small::new(&mut scene, kind, 64 * MIB, what) else { continue };
        scene.sync(&[]).ok();
        let run = scene
            .site
            .dsync(["mirror", "--epoch", "1h", "--rpo", "1s"])
            .arg(&scene.image)
            .arg(&scene.replica);
        let mut running = run.start();
        running.wait_to_say("mirroring to");
        fill_holes(&mut scene, 16 * MIB..17 * MIB);
        wait_until("a batch arrives", || image::first_difference(&scene.image, &scene.replica).is_none());
        let sessions = |running: &Background| running.stdout_so_far().matches("mirroring to").count();
        small.leave(6 * MIB);
        fill_holes(&mut scene, 18 * MIB..24 * MIB);
        fill_holes(&mut scene, 18 * MIB..24 * MIB);
        wait_until("it is refused and tried again", || sessions(&running) > 2);
        small.make_room();
        wait_until("all of it arrives", || image::first_difference(&scene.image, &scene.replica).is_none());
        let before = sessions(&running);
        small.leave(6 * MIB);
        fill_holes(&mut scene, 25 * MIB..32 * MIB);
        wait_until("it is refused once more", || sessions(&running) > before);
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
        if round % 8 == 7 {
            std::thread::sleep(Duration::from_millis(60));
        }
    }
    wait_until("all of it arrives", || image::first_difference(&scene.image, &scene.replica).is_none());
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

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(50));
    }
}
