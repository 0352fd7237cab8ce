//! Where tests put files; and devices and mounts, for root.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::needs::run;
use crate::{leftovers, stopwatch};

/// A folder on a real disk, where files can be opened directly; removed with the value. In `DSYNC_TEST_DIR`, or else in cargo's
/// target folder.
pub fn on_disk() -> TempDir {
    stopwatch::start();
    let place = std::env::var_os("DSYNC_TEST_DIR")
        .map(PathBuf::from)
        .unwrap_or_else(|| profile_dir().parent().expect("target").join("tmp"));
    std::fs::create_dir_all(&place).unwrap_or_else(|e| panic!("{}: {e}", place.display()));
    leftovers::remove(&place);
    TempDir::with_prefix_in(leftovers::name(), &place).unwrap_or_else(|e| panic!("{}: {e}", place.display()))
}

/// A folder with a short path, as the path of a Unix socket may have 107 bytes; removed with the value.
pub fn temporary() -> TempDir {
    stopwatch::start();
    TempDir::with_prefix(leftovers::name()).expect("a temporary folder")
}

/// A folder in memory, where there is such a place, for tests that use thousands of them; removed with the value.
pub fn in_memory() -> TempDir {
    stopwatch::start();
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => TempDir::with_prefix_in(leftovers::name(), memory).expect("a folder"),
        false => temporary(),
    }
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

/// A device whose writes the kernel counts, whatever was set of its number before.
fn counted(device: PathBuf) -> PathBuf {
    let name = device.file_name().unwrap_or_default();
    let _ = std::fs::write(Path::new("/sys/block").join(name).join("queue/iostats"), "1");
    device
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
        run("losetup", options.chain([image.as_os_str()])).map(|device| Loop(counted(device.into())))
    }

    /// Attaches as the device of this name; `None` where that is not allowed.
    pub fn named(device: &Path, image: &Path) -> Option<Loop> {
        run("losetup", [device, image]).map(|_| Loop(counted(device.to_path_buf())))
    }

    /// The device.
    pub fn device(&self) -> &Path {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let name = self.0.file_name().unwrap_or_default();
        let place = Path::new("/sys/block").join(name).join("loop/backing_file");
        let file = || std::fs::read(&place).ok();
        let was = file();
        run("losetup", ["--detach".as_ref(), self.0.as_os_str()]);
        // The kernel lets go of it once the last who looks at the device has closed it.
        let until = Instant::now() + Duration::from_secs(10);
        while was.is_some() && file() == was && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
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
