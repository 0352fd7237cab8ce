//! Freezing a real file system on a loop device: nobody writes meanwhile, and it never stays frozen.
#![allow(missing_docs)]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use source::{Freeze, FreezeError};
use testing::stalled::{StalledWrite, is_freezing};
use testing::{Loop, Mount, got, run, skipped};

/// An ext4 file system on a loop device, gone with the value.
struct Scene {
    _mounted: Mount,
    device: Loop,
    folder: tempfile::TempDir,
}

impl Scene {
    /// `None` where that cannot be had; a line says so.
    fn new(what: &str) -> Option<Scene> {
        let scene = Scene::made();
        got(scene.as_ref().ok_or("this needs root, mkfs.ext4 and a loop device"), what);
        scene
    }

    fn made() -> Option<Scene> {
        let folder = testing::temporary();
        let image = folder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        run("mkfs.ext4", ["-q".as_ref(), image.as_os_str()])?;
        let device = Loop::new(&image)?;
        let _mounted = Mount::new(&[], device.device(), &folder.path().join("mount"))?;
        Some(Scene { _mounted, device, folder })
    }

    fn device(&self) -> &Path {
        self.device.device()
    }

    fn mount(&self) -> PathBuf {
        self.folder.path().join("mount")
    }

    fn freeze(&self, limit: Duration) -> Result<Freeze, FreezeError> {
        let mounts = device::mounts_on(self.device()).unwrap();
        assert_eq!(mounts.iter().map(|m| m.places.clone()).collect::<Vec<_>>(), [[self.mount()]]);
        Freeze::prepare(&mounts, limit)?.freeze()
    }

    /// Writes from a thread; the channel hears when it is through.
    fn writer(&self) -> mpsc::Receiver<Instant> {
        let (done, heard) = mpsc::channel();
        let path = self.mount().join("file");
        std::thread::spawn(move || {
            std::fs::write(path, b"something").unwrap();
            done.send(Instant::now())
        });
        heard
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // Should a test have left it frozen.
        let _ = run("fsfreeze", ["--unfreeze".as_ref(), self.mount().as_os_str()]);
    }
}

#[test]
fn nobody_writes_during_a_freeze() {
    let Some(scene) = Scene::new("freezing a file system") else { return };
    let freeze = scene.freeze(Duration::from_secs(20)).unwrap();
    let writer = scene.writer();
    assert!(writer.recv_timeout(Duration::from_millis(200)).is_err(), "a write went through");
    assert!(matches!(scene.freeze(Duration::from_secs(1)), Err(FreezeError::Refused { .. })));
    let lasted = freeze.thaw().unwrap();
    assert!(lasted >= Duration::from_millis(200));
    writer.recv_timeout(Duration::from_secs(10)).expect("the write goes on after the thaw");
}

#[test]
fn a_freeze_ends_at_its_limit_and_then_proves_nothing() {
    let Some(scene) = Scene::new("the limit of a freeze") else { return };
    let began = Instant::now();
    let freeze = scene.freeze(Duration::from_millis(400)).unwrap();
    let ended = scene.writer().recv_timeout(Duration::from_secs(10)).expect("thawed by the watchdog");
    assert!(ended - began >= Duration::from_millis(300));
    let error = freeze.thaw().unwrap_err();
    assert!(matches!(error, FreezeError::TooLong { .. }), "{error}");
}

#[test]
fn a_thaw_by_another_program_is_noticed() {
    let Some(scene) = Scene::new("a freeze that another program ends") else { return };
    let freeze = scene.freeze(Duration::from_secs(20)).unwrap();
    run("fsfreeze", ["--unfreeze", scene.mount().to_str().unwrap()]).expect("it is frozen");
    let error = freeze.thaw().unwrap_err();
    assert!(matches!(error, FreezeError::Thawed { .. }), "{error}");
}

/// The process that is killed in the tests below. Its argument: a device, and the limit in milliseconds.
#[test]
fn freezes_and_waits() {
    let Ok(what) = std::env::var("DSYNC_TEST_FREEZES") else { return };
    let (place, limit) = what.split_once(' ').unwrap();
    let mounts = device::mounts_on(Path::new(place)).unwrap();
    let prepared = Freeze::prepare(&mounts, Duration::from_millis(limit.parse().unwrap())).unwrap();
    println!("prepared");
    let _freeze = prepared.freeze().unwrap();
    println!("frozen");
    std::thread::sleep(Duration::from_secs(60));
}

/// That process. It stands first in its control group, if it is given one.
fn freezer(scene: &Scene, limit: Duration, group: Option<&Path>) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", "test -z \"$GROUP\" || echo $$ >\"$GROUP\"/cgroup.procs; exec \"$@\"", "sh"]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", "freezes_and_waits", "--nocapture"]);
    command.env("GROUP", group.unwrap_or(Path::new("")));
    command.env("DSYNC_TEST_FREEZES", format!("{} {}", scene.device().display(), limit.as_millis()));
    command.stdout(Stdio::piped()).spawn().unwrap()
}

/// Reads its output up to a word.
fn hears(child: &mut Child, word: &str) {
    let mut heard = Vec::new();
    let output = child.stdout.as_mut().unwrap();
    while !String::from_utf8_lossy(&heard).contains(word) {
        let mut byte = [0];
        assert_eq!(output.read(&mut byte).unwrap(), 1, "it ended without '{word}'");
        heard.push(byte[0]);
    }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "it takes too long until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A write that every freeze waits for.
fn stalled(scene: &Scene, what: &str) -> Option<StalledWrite> {
    StalledWrite::new(&scene.mount().join("stalled"), what)
}

#[test]
fn a_freeze_that_comes_about_after_its_limit_proves_nothing() {
    let what = "a freeze that waits for a write";
    let Some(scene) = Scene::new(what) else { return };
    let Some(stalled) = stalled(&scene, what) else { return };
    std::thread::scope(|scope| {
        let freezing = scope.spawn(|| {
            let freeze = scene.freeze(Duration::from_millis(200))?;
            // What the kernel froze late is thawed late.
            std::thread::sleep(Duration::from_millis(200));
            freeze.thaw()
        });
        until("it freezes", || is_freezing(Path::new("/proc/self")));
        std::thread::sleep(Duration::from_millis(600));
        stalled.end();
        let error = freezing.join().unwrap().unwrap_err();
        assert!(matches!(error, FreezeError::TooLong { .. }), "{error}");
    });
    scene.writer().recv_timeout(Duration::from_secs(10)).expect("it is thawed");
}

#[test]
fn a_freeze_that_comes_about_after_its_owner_was_killed_is_thawed() {
    let what = "a freeze that waits for a write while its owner is killed";
    let Some(scene) = Scene::new(what) else { return };
    // Killed beyond the limit, and before it.
    for limit in [Duration::from_millis(200), Duration::from_secs(60)] {
        let Some(stalled) = stalled(&scene, what) else { return };
        let mut child = freezer(&scene, limit, None);
        hears(&mut child, "prepared");
        let process = PathBuf::from(format!("/proc/{}", child.id()));
        until("it freezes", || is_freezing(&process));
        std::thread::sleep(Duration::from_millis(500));
        child.kill().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        stalled.end();
        child.wait().unwrap();
        // Frozen at its very end, so that a write before that tells nothing.
        scene.writer().recv_timeout(Duration::from_secs(10)).expect("thawed although its owner was killed");
    }
}

/// A control group of the test's own, gone with the value.
struct Group(PathBuf);

impl Group {
    fn new() -> Option<Group> {
        let hierarchies = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
        let place = hierarchies.into_iter().find(|h| h.join("cgroup.controllers").exists());
        let place = place?.join(format!("dsync-test-{}", std::process::id()));
        std::fs::create_dir(&place).ok()?;
        let group = Group(place);
        group.0.join("cgroup.kill").exists().then_some(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn who_ends_all_of_a_control_group_does_not_end_the_watchdog() {
    let what = "a freeze whose owner's control group is killed";
    let Some(scene) = Scene::new(what) else { return };
    let Some(group) = Group::new() else {
        return skipped(what, "this needs control groups of version 2, and Linux 5.14");
    };
    let mut child = freezer(&scene, Duration::from_secs(60), Some(&group.0));
    hears(&mut child, "frozen");
    let there = std::fs::read_to_string(group.0.join("cgroup.procs")).unwrap();
    assert_eq!(there.trim(), child.id().to_string(), "its watchdog is elsewhere");
    let writer = scene.writer();
    assert!(writer.recv_timeout(Duration::from_millis(200)).is_err(), "it is not frozen");
    std::fs::write(group.0.join("cgroup.kill"), "1").unwrap();
    child.wait().unwrap();
    writer.recv_timeout(Duration::from_secs(10)).expect("thawed although its owner's group was killed");
}

#[test]
fn what_is_hidden_by_another_file_system_is_not_frozen_in_its_stead() {
    let what = "a mount over a mount";
    let (Some(scene), Some(over)) = (Scene::new(what), Scene::new(what)) else { return };
    let above = Mount::new(&[], over.device(), &scene.mount()).unwrap();
    let mounts = device::mounts_on(scene.device()).unwrap();
    let error = Freeze::prepare(&mounts, Duration::from_secs(1)).err().expect("a refusal");
    assert!(error.to_string().contains("mounted over it"), "{error}");
    // Where it is to be seen it can be frozen.
    let second = scene.folder.path().join("second");
    let _again = Mount::new(&[], scene.device(), &second).unwrap();
    let mounts = device::mounts_on(scene.device()).unwrap();
    let freeze = Freeze::prepare(&mounts, Duration::from_secs(20)).unwrap().freeze().unwrap();
    let through = std::fs::write(over.mount().join("file"), b"something");
    let frozen = run("fsfreeze", ["--freeze".as_ref(), second.as_os_str()]);
    assert!(frozen.is_none(), "it was not frozen");
    freeze.thaw().unwrap();
    drop(above);
    through.unwrap();
}

/// Each subvolume of Btrfs has a device number of its own, and so has the whole.
#[test]
fn btrfs_is_known_by_its_subvolumes() {
    let what = "freezing Btrfs";
    let folder = testing::temporary();
    let (image, place) = (folder.path().join("image"), folder.path().join("mount"));
    std::fs::File::create(&image).unwrap().set_len(300 << 20).unwrap();
    let made = run("mkfs.btrfs", ["-q".as_ref(), image.as_os_str()]);
    let Some(device) = made.and_then(|_| Loop::new(&image)) else {
        return skipped(what, "this needs root and mkfs.btrfs");
    };
    let subvolume = place.join("subvolume");
    let mounted = Mount::new(&[], device.device(), &place);
    let create = ["-q".as_ref(), "subvolume".as_ref(), "create".as_ref(), subvolume.as_os_str()];
    if mounted.is_none() || run("btrfs", create).is_none() {
        return skipped(what, "it cannot be mounted");
    }
    let mounts = device::mounts_on(device.device()).unwrap();
    let inside = device::file_system(&std::fs::File::open(&subvolume).unwrap()).unwrap();
    let frozen =
        Freeze::prepare(&mounts, Duration::from_secs(20)).and_then(|p| p.freeze()).and_then(Freeze::thaw);
    let mounts: Vec<_> = mounts.iter().map(|m| m.dev).collect();
    assert_eq!(mounts, [inside]);
    frozen.unwrap();
}

#[test]
fn who_dies_while_freezing_leaves_nothing_frozen() {
    let Some(scene) = Scene::new("a freeze whose owner is killed") else { return };
    let mut child = freezer(&scene, Duration::from_secs(60), None);
    hears(&mut child, "frozen");
    let writer = scene.writer();
    assert!(writer.recv_timeout(Duration::from_millis(200)).is_err(), "it is not frozen");
    child.kill().unwrap();
    let _ = child.wait();
    writer.recv_timeout(Duration::from_secs(10)).expect("thawed although its owner was killed");
}
