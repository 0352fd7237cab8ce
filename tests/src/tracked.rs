//! Disks that dsync tracks in the kernel.

use std::path::{Path, PathBuf};

use crate::mount::{Loop, Mount};
use crate::{Run, Site, got, need, need_root};

const MIB: u64 = 1 << 20;

/// A loop device that dsync tracks, an ext4 file system on it mounted. The fields are let go in this order.
pub struct Tracked {
    _mount: Mount,
    device: Loop,
    /// Where it is mounted.
    pub place: PathBuf,
    /// The site that tracks it.
    pub site: Site,
}

impl Tracked {
    /// On a disk of so many bytes. `None` where that cannot be had: then `what` is reported as skipped.
    pub fn new(what: &str, size: u64) -> Option<Tracked> {
        if !need_root(what) || !need(&["mkfs.ext4", "losetup", "e2fsck"], what) {
            return None;
        }
        let site = Site::new();
        let image = site.image("disk.raw", size);
        let device = Loop::new(&image);
        if !got(device.as_ref().ok_or("there is no free loop device"), what) {
            return None;
        }
        let device = device?;
        // The last MiB is nobody's.
        let blocks = format!("{}k", (size - MIB) >> 10);
        Run::new("mkfs.ext4").arg("-q").arg(device.device()).arg(blocks).ok();
        let place = site.path("mount");
        let mount = Mount::new(&[], device.device(), &place);
        if !got(mount.as_ref().ok_or("mounting is not allowed"), what) {
            return None;
        }
        let tracked = Tracked { _mount: mount?, device, place, site };
        let added = tracked.site.dsync(["track", "add"]).arg(tracked.device.device()).output();
        let can = if added.status.success() { Ok(()) } else { Err(added.stderr) };
        got(can, what).then_some(tracked)
    }

    /// The device.
    pub fn device(&self) -> &Path {
        self.device.device()
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.site.dsync(["track", "remove"]).arg(self.device.device()).output();
    }
}

/// Ends the tracking of a disk by a site.
pub struct Untrack<'a>(pub &'a Site, pub &'a Path);

impl Drop for Untrack<'_> {
    fn drop(&mut self) {
        self.0.dsync(["track", "remove"]).arg(self.1).output();
    }
}
