//! Freezing a real file system on a loop device: nobody writes meanwhile, and it never stays frozen.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use source::{Freeze, FreezeError};

fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// An ext4 file system on a loop device, gone with the value.
struct Scene {
    folder: tempfile::TempDir,
    device: String,
}

impl Scene {
    /// `None` where that can't be had; a line says so.
    fn new(what: &str) -> Option<Scene> {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        std::fs::create_dir(folder.path().join("mount")).unwrap();
        let image = image.to_str().unwrap();
        let scene = run("mkfs.ext4", &["-q", image])
            .and_then(|_| run("losetup", &["--find", "--show", image]))
            .map(|device| Scene { folder, device });
        let mounted = scene.filter(|s| run("mount", &[&s.device, s.mount().to_str().unwrap()]).is_some());
        if mounted.is_none() {
            assert!(std::env::var_os("DSYNC_STRICT").is_none_or(|v| v != "1"), "no loop device, no mount");
            println!("SKIPPED: {what}: needs root, mkfs.ext4 and a loop device");
        }
        mounted
    }

    fn mount(&self) -> PathBuf {
        self.folder.path().join("mount")
    }

    fn freeze(&self, limit: Duration) -> Result<Freeze, FreezeError> {
        let mounts = device::mounts_on(Path::new(&self.device)).unwrap();
        assert_eq!(mounts.iter().map(|m| m.place.clone()).collect::<Vec<_>>(), [self.mount()]);
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
        let mount = self.mount();
        let mount = mount.to_str().unwrap();
        // Should a test have left it frozen.
        let _ = run("fsfreeze", &["--unfreeze", mount]);
        let _ = run("umount", &[mount]).or_else(|| run("umount", &["--lazy", mount]));
        let _ = run("losetup", &["--detach", &self.device]);
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
    assert!(matches!(error, FreezeError::Thawed { .. }), "{error}");
}

/// The process that is killed in the test below.
#[test]
fn freezes_and_waits() {
    let Some(place) = std::env::var_os("DSYNC_TEST_FREEZES") else { return };
    let mounts = device::mounts_on(Path::new(&place)).unwrap();
    let _freeze = Freeze::prepare(&mounts, Duration::from_secs(60)).unwrap().freeze().unwrap();
    println!("frozen");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn who_dies_while_freezing_leaves_nothing_frozen() {
    let Some(scene) = Scene::new("a freeze whose owner is killed") else { return };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "freezes_and_waits", "--nocapture"])
        .env("DSYNC_TEST_FREEZES", &scene.device)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert!(lines.any(|line| line.unwrap().contains("frozen")));
    let writer = scene.writer();
    assert!(writer.recv_timeout(Duration::from_millis(200)).is_err(), "it is not frozen");
    child.kill().unwrap();
    let _ = child.wait();
    writer.recv_timeout(Duration::from_secs(10)).expect("thawed although its owner was killed");
}
