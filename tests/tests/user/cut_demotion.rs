//! The demotion of a group that is killed: the same command completes it, and the replicas take over, whatever others write to the
//! disks meanwhile. What they write once a disk has ended as a source is never overwritten unasked.

use std::path::{Path, PathBuf};

use dsync_tests::image::{self, BLOCK};
use dsync_tests::{Random, Run, Server, Site, need, need_root, rounds, skipped};
use testing::{Loop, find};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 4 * MIB;
const WHAT: &str = "the demotion of a group that is killed";

/// A sync by whose consent its destination ends as a source is killed, and run again: what is left is a replica, which can take over.
#[test]
fn a_consent_that_is_killed_leaves_one_role() {
    const WHAT: &str = "a consent that is killed";
    if !need(&["strace"], WHAT) {
        return;
    }
    let mut random = Random::new(WHAT);
    let mut killed = 0;
    for _ in 0..rounds(6, 60) {
        let site = Site::new();
        let (near, far) = (site.image("near.raw", SIZE), site.path("far.raw"));
        let sync = |from: &Path, to: &Path, how: &[&str]| site.sync(from, to, how);
        sync(&near, &far, &[]).ok();
        site.dsync(["promote", "--force"]).arg(&far).ok();
        sync(&far, &near, &["--discard-there"]).ok();
        site.dsync(["promote", "--force"]).arg(&near).ok();
        let server = site.serve(&[&near], &[]);
        Disks::change(&server, &near, &mut random);
        server.stop();
        let cut = site.killed_at_rename(4 + random.below(14), ["sync", "--discard-there"]);
        let cut = cut.args([&far, &near]).output();
        killed += u64::from(!cut.status.success());
        sync(&far, &near, &["--discard-there"]).ok();
        image::assert_equal(&near, &far);
        site.dsync(["demote"]).args([&far, &near]).ok();
        site.dsync(["promote"]).arg(&near).ok();
        sync(&near, &far, &[]).ok();
    }
    println!("{killed} were killed");
}

/// A disk that was demoted with writes that only it has is given up by a command that is killed at any step, and run again as it was.
#[test]
fn a_command_that_gives_up_a_former_source_is_run_again_after_a_kill() {
    const WHAT: &str = "a command that gives up a former source";
    if !need(&["strace"], WHAT) {
        return;
    }
    let mut random = Random::new(WHAT);
    for at in 1.. {
        let site = Site::new();
        let (near, far) = (site.image("near.raw", SIZE), site.path("far.raw"));
        let both = site.path("both.raw");
        [&far, &both].iter().for_each(|to| drop(site.sync(&near, to, &[]).ok()));
        site.dsync(["promote", "--force"]).arg(&far).ok();
        let server = site.serve(&[&near], &[]);
        Disks::change(&server, &near, &mut random);
        server.stop();
        let wrote = std::fs::read(&near).expect("a disk");
        site.dsync(["demote"]).arg(&near).ok();
        let saved = site.path("saved.delta");
        let save = ["--save-there", saved.to_str().expect("a path")];
        let cut = site.killed_at_rename(at, ["sync"]).args([&far, &near]).args(save).output();
        if !cut.status.success() {
            site.sync(&far, &near, &save).ok();
        }
        image::assert_equal(&near, &far);
        // What was saved is all of it, over what both had.
        site.dsync(["merge"]).arg(&both).input(std::fs::read(&saved).expect("a delta")).ok();
        assert!(std::fs::read(&both).expect("a replica") == wrote, "killed at rename {at}");
        if cut.status.success() {
            assert!(at > 10, "{at} renames");
            break;
        }
    }
}

/// A promotion that was killed is completed for the source that it is of, and for no other.
#[test]
fn another_source_completes_no_promotion() {
    const WHAT: &str = "a promotion that was killed";
    if !need(&["strace"], WHAT) {
        return;
    }
    let mut random = Random::new(WHAT);
    let mut interrupted = 0;
    for at in 1.. {
        let site = Site::new();
        let (near, far) = (site.image("near.raw", SIZE), site.path("far.raw"));
        let (other, third) = (site.image("other.raw", SIZE), site.path("third.raw"));
        image::scribble(&other, 0, SIZE, &mut random);
        site.sync(&near, &far, &[]).ok();
        let cut = site.killed_at_rename(at, ["promote", "--force"]).arg(&far).output();
        if cut.status.success() {
            break;
        }
        let is_interrupted = || {
            let read = site.sync(&far, &third, &["-n"]).output();
            read.stderr.contains("the promotion of")
        };
        if is_interrupted() {
            interrupted += 1;
            site.sync(&other, &far, &["--discard-there"]).code(4);
            assert!(is_interrupted(), "killed at rename {at}: it was completed");
        }
    }
    assert!(interrupted > 0, "no promotion was interrupted");
}

/// The renames of a demotion, among them that of its intent, at which it is killed.
const FIRST: u64 = 14;
const LAST: u64 = 34;

/// What happens to a disk before the command is run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    Written,
    /// A device is attached anew: nothing has counted what was written to it.
    Attached,
}

/// Two disks that were served and synced as a group, and written to since.
struct Disks {
    site: Site,
    images: Vec<PathBuf>,
    devices: Vec<Loop>,
    replicas: PathBuf,
}

impl Disks {
    fn new(of_devices: bool, random: &mut Random) -> Option<Disks> {
        let site = Site::new();
        let images: Vec<PathBuf> =
            ["data.raw", "log.raw"].iter().map(|name| site.image(name, SIZE)).collect();
        images.iter().for_each(|image| image::scribble(image, 0, SIZE, random));
        let replicas = site.path("replicas");
        std::fs::create_dir(&replicas).expect("a folder");
        let attached: Option<Vec<Loop>> =
            images.iter().filter(|_| of_devices).map(|image| Loop::new(image)).collect();
        let disks = Disks { site, images, devices: attached?, replicas };
        let paths = disks.paths();
        let server =
            disks.site.serve(&paths.iter().map(PathBuf::as_path).collect::<Vec<_>>(), &["--group", "db"]);
        disks.site.dsync(["sync", "--group", "db"]).arg(&disks.replicas).ok();
        for path in &paths {
            Disks::change(&server, path, random);
        }
        server.stop();
        Some(disks)
    }

    fn change(server: &Server, disk: &Path, random: &mut Random) {
        let name = disk.file_stem().expect("a name").to_string_lossy().into_owned();
        let mut client = server.client(&name);
        for _ in 0..5 {
            client.write(random.below(SIZE / BLOCK) * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        }
        client.close().expect("the end");
    }

    /// The sources.
    fn paths(&self) -> Vec<PathBuf> {
        match self.devices.is_empty() {
            true => self.images.clone(),
            false => self.devices.iter().map(|device| device.device().to_path_buf()).collect(),
        }
    }

    fn replica(&self, disk: &Path) -> PathBuf {
        self.replicas.join(disk.file_name().expect("a name"))
    }

    fn demote(&self) -> Run {
        self.site.dsync(["demote", "--group", "db"]).arg(&self.replicas)
    }

    /// Demotes them, and is killed at a rename of its first thread.
    fn cut(&self, rename: u64) {
        let strace = self.site.run(&find("strace").expect("strace"));
        let kill = format!("inject=renameat:signal=KILL:when={rename}");
        let strace = strace
            .args(["-f", "-qq", "-e", "trace=renameat", "-e", &kill, "-o"])
            .arg(self.site.path("trace"));
        let _ = strace
            .arg(dsync_tests::site::binary())
            .args(["demote", "--group", "db"])
            .arg(&self.replicas)
            .output();
    }

    /// Attaches the last device anew, under its name.
    fn reattach(&mut self) {
        let (image, device) = (self.images.last().expect("one"), self.devices.pop().expect("one"));
        let name = device.device().to_path_buf();
        drop(device);
        self.devices.push(Loop::named(&name, image).expect("a loop device"));
    }
}

fn told(of_devices: bool, rename: u64, meanwhile: Meanwhile, random: &mut Random) {
    let what = format!("killed at rename {rename}, devices: {of_devices}, meanwhile: {meanwhile:?}");
    let Some(mut disks) = Disks::new(of_devices, random) else {
        return skipped(WHAT, "there is no loop device");
    };
    disks.cut(rename);
    let written = disks.paths().pop().expect("one");
    let before = std::fs::read(&written).expect("a disk");
    match meanwhile {
        Meanwhile::Nothing => {}
        Meanwhile::Written => image::scribble(&written, MIB, BLOCK, random),
        Meanwhile::Attached => disks.reattach(),
    }
    let again = disks.demote().ok().text();
    // They take over without a force: each has all that its source had when that ended.
    disks.site.dsync(["promote", "--group"]).arg(&disks.replicas).ok();
    let asks = again.contains("others may have written");
    assert!(!asks || meanwhile != Meanwhile::Nothing, "{what}: {again}");
    for disk in disks.paths() {
        let replica = disks.replica(&disk);
        let held = std::fs::read(&replica).expect("a replica");
        let holds = std::fs::read(&disk).expect("a disk");
        // One that was demoted by then was written to as a replica, which its next sync says.
        if disk == written && (asks || held != holds) {
            assert!(held == before, "{what}: the replica is not what the source was when it ended");
            disks.site.sync(&replica, &disk, &[]).code(4).says(&["was modified outside dsync"]);
            disks.site.sync(&replica, &disk, &["--adopt"]).ok();
        } else {
            assert!(held == holds, "{what}: {} differs", replica.display());
            disks.site.sync(&replica, &disk, &[]).ok();
        }
        assert!(
            std::fs::read(&disk).expect("a disk") == held,
            "{what}: {} was not brought up to date",
            disk.display()
        );
    }
}

#[test]
fn the_same_command_completes_it() {
    if !need(&["strace", "losetup"], WHAT) || !need_root(WHAT) {
        return;
    }
    let mut random = Random::new(WHAT);
    for _ in 0..rounds(4, 200) {
        let of_devices = random.coin();
        let rename = FIRST + random.below(LAST - FIRST);
        let ways: &[Meanwhile] = match of_devices {
            true => &[Meanwhile::Nothing, Meanwhile::Written, Meanwhile::Attached],
            false => &[Meanwhile::Nothing, Meanwhile::Written],
        };
        told(of_devices, rename, ways[random.below(ways.len() as u64) as usize], &mut random);
    }
}
