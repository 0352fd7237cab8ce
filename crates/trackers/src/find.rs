//! Which disks are tracked, and by what.

use std::path::{Path, PathBuf};

use crate::{TrackError, Tracker, bpf, dm};

/// The tracker that follows the block device at `device`, if one does.
pub fn find(device: &Path) -> Result<Option<Box<dyn Tracker>>, TrackError> {
    match bpf::find(device)? {
        None => dm::find(device),
        found => Ok(found),
    }
}

/// The devices that are tracked here.
pub fn list() -> Result<Vec<PathBuf>, TrackError> {
    let mut devices = bpf::list()?;
    devices.extend(dm::list());
    Ok(devices)
}
