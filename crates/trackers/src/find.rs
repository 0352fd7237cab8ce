//! Which disks are tracked, and by what.

use std::path::{Path, PathBuf};

use crate::{TrackError, Tracker, bpf, dm};

/// The tracker of the block device at `device`, if it has one.
pub fn find(device: &Path) -> Result<Option<Box<dyn Tracker>>, TrackError> {
    match bpf::find(device)? {
        None => dm::find(device),
        found => Ok(found),
    }
}

/// The devices that are tracked on this machine.
pub fn list() -> Result<Vec<PathBuf>, TrackError> {
    let mut devices = bpf::list()?;
    devices.extend(dm::list());
    Ok(devices)
}
