//! Where tests put files; and devices and mounts, for root.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::search_path;

/// A folder on a real disk, where files can be opened directly; removed with the value. In `DSYNC_TEST_DIR`, or else in cargo's
/// target folder.
pub fn on_disk() -> TempDir {
    let place = std::env::var_os("DSYNC_TEST_DIR")
        .map(PathBuf::from)
        .unwrap_or_else(|| profile_dir().parent().expect("target").join("tmp"));
    std::fs::create_dir_all(&place).unwrap_or_else(|e| panic!("{}: {e}", place.display()));
    TempDir::with_prefix_in("dsync-test-", &place).unwrap_or_else(|e| panic!("{}: {e}", place.display()))
}

/// A folder in memory, where there is such a place, for tests that use thousands of them; removed with the value.
pub fn in_memory() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.expect("a folder")
}

/// The folder of a profile (`target/debug`) that this test was built into.
pub fn profile_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's own path");
    exe.ancestors()
        .find(|folder| folder.file_name().is_some_and(|name| name == "deps"))
        .and_then(Path::parent)
        .map(Path::to_path_buf)
        .expect("a test lies in target/PROFILE/deps")
}

/// What a program prints, without blanks around it; `None` if it fails or is missing. Looked up in root's PATH too.
pub fn run<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) -> Option<String> {
    let path = std::env::join_paths(search_path()).expect("PATH");
    let mut command = Command::new(program);
    let output = command.args(arguments).env("PATH", path).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A loop device over an image, detached with the value.
pub struct Loop(PathBuf);

impl Loop {
    /// Attaches; `None` where that is not allowed.
    pub fn new(image: &Path) -> Option<Loop> {
        Loop::with(&[], image)
    }

    /// Attaches with these options of losetup; `None` where that is not allowed.
    pub fn with(options: &[&str], image: &Path) -> Option<Loop> {
        let options = ["--find", "--show"].iter().chain(options).map(OsStr::new);
        run("losetup", options.chain([image.as_os_str()])).map(|device| Loop(device.into()))
    }

    /// Attaches as the device of this name; `None` where that is not allowed.
    pub fn named(device: &Path, image: &Path) -> Option<Loop> {
        run("losetup", [device, image]).map(|_| Loop(device.to_path_buf()))
    }

    /// The device.
    pub fn device(&self) -> &Path {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", ["--detach".as_ref(), self.0.as_os_str()]);
    }
}

/// A mount that ends with the value.
pub struct Mount(PathBuf);

impl Mount {
    /// Mounts; `None` where that is not allowed.
    pub fn new(options: &[&str], what: &Path, place: &Path) -> Option<Mount> {
        std::fs::create_dir_all(place).unwrap_or_else(|e| panic!("{}: {e}", place.display()));
        let options = options.iter().map(OsStr::new);
        run("mount", options.chain([what.as_os_str(), place.as_os_str()])).map(|_| Mount(place.to_path_buf()))
    }

    /// One that another program made.
    pub fn made(place: &Path) -> Mount {
        Mount(place.to_path_buf())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        run("umount", ["--lazy".as_ref(), self.0.as_os_str()]);
    }
}
