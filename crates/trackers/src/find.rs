//! Which disks are tracked, and by what.

use std::path::{Path, PathBuf};

use crate::{TrackError, Tracker, bpf, dm};

/// The tracker of the block device at `path`, if it has one.
pub fn find(path: &Path) -> Result<Option<Box<dyn Tracker>>, TrackError> {
    if device::is_export(path) {
        return Ok(None);
    }
    match bpf::find(path)? {
        None => dm::find(path),
        found => Ok(found),
    }
}

/// The devices that are tracked on this machine.
pub fn list() -> Result<Vec<PathBuf>, TrackError> {
    let mut devices = bpf::list()?;
    devices.extend(dm::list());
    Ok(devices)
}
