//! Mounts and loop devices, for root.

use std::path::{Path, PathBuf};

use crate::Run;

/// A mount that ends with the value.
pub struct Mount(PathBuf);

impl Mount {
    /// Mounts; `None` where that is not allowed.
    pub fn new(options: &[&str], what: &Path, place: &Path) -> Option<Mount> {
        std::fs::create_dir_all(place).unwrap_or_else(|e| panic!("{}: {e}", place.display()));
        let output = Run::new("mount").args(options).arg(what).arg(place).output();
        output.status.success().then(|| Mount(place.to_path_buf()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        Run::new("umount").arg("--lazy").arg(&self.0).output();
    }
}

/// A loop device over an image, detached with the value.
pub struct Loop(PathBuf);

impl Loop {
    /// Attaches; `None` where that is not allowed.
    pub fn new(image: &Path) -> Option<Loop> {
        let output = Run::new("losetup").args(["--find", "--show"]).arg(image).output();
        output.status.success().then(|| Loop(PathBuf::from(output.text().trim())))
    }

    /// The device.
    pub fn device(&self) -> &Path {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        Run::new("losetup").arg("--detach").arg(&self.0).output();
    }
}
