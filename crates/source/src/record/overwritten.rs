//! A disk that is a source and is about to be written to as a replica: it is restored from its own replica, or passes on what it
//! receives. The times of a file tell that by themselves, but not that it was dsync. A device has none, and only its user would say what has become
//! of it.

use std::path::{Path, PathBuf};

use device::{Dir, FolderLock, Storage};

use crate::record::stamp::ImageStamp;
use crate::record::state::{SourceMetadata, StateDir};
use crate::{Gap, SourceError};

/// Notes that dsync is about to write to the disk at `path` as to a replica. What the sources that are stored there have recorded does not hold
/// from then on, whatever `trust_device` says; the next sync of one compares. Of files those that were served: a backup that others put in their
/// place would be refused. Durable on return.
///
/// # Errors
/// `Busy` if another program holds one of them; if its state cannot be read or written.
pub fn overwritten(state: &StateDir, path: &Path) -> Result<(), SourceError> {
    for (place, about) in stored_at(state, path)? {
        let folder = Dir::existing(&place).map_err(SourceError::state("open", &place))?;
        if !about.identity.is_block() && !ImageStamp::read(&folder)?.is_some_and(|stamp| stamp.is_in_use()) {
            continue;
        }
        let lock = match FolderLock::take(&place).map_err(SourceError::state("lock", &place))? {
            Ok(lock) => lock,
            Err(holder) => return Err(SourceError::Busy { path: about.path, holder }),
        };
        ImageStamp::overwritten(&folder)?;
        drop(lock);
    }
    Ok(())
}

/// Notes that a disk to which dsync has written as to a replica is one no more: where it is a source, it was restored, perhaps from an older copy than one
/// of its replicas is. Those are not brought up to date from it until its user says so. Durable on return; returns whether that is so.
///
/// # Errors
/// `Busy` if another program holds it; if its state cannot be read or written.
pub fn restored(state: &StateDir, path: &Path) -> Result<bool, SourceError> {
    let mut is_restored = false;
    for (place, about) in stored_at(state, path)? {
        let folder = Dir::existing(&place).map_err(SourceError::state("open", &place))?;
        let stamp = ImageStamp::read(&folder)?;
        if !stamp.is_some_and(|stamp| stamp.is_in_use() && stamp.lost == Some(Gap::AsReplica)) {
            continue;
        }
        let lock = match FolderLock::take(&place).map_err(SourceError::state("lock", &place))? {
            Ok(lock) => lock,
            Err(holder) => return Err(SourceError::Busy { path: about.path, holder }),
        };
        is_restored |= ImageStamp::restored(&folder)?;
        drop(lock);
    }
    Ok(is_restored)
}

fn is_device(path: &Path) -> bool {
    device::identity(path).is_ok_and(|found| found.is_block())
}

/// The sources of a file, or on a device, under whatever name, or on a part of it.
fn stored_at(state: &StateDir, path: &Path) -> Result<Vec<(PathBuf, SourceMetadata)>, SourceError> {
    let mut found = Vec::from_iter(state.source(&path.to_string_lossy())?);
    if !is_device(path) {
        return Ok(found);
    }
    let here = Storage::of(path);
    for (place, about) in state.survey()?.sources {
        let overlaps = || {
            let there = Storage::of(&about.path);
            here.as_ref().zip(there.as_ref()).is_some_and(|(here, there)| here.overlaps(there))
        };
        if about.identity.is_block() && found.iter().all(|(known, _)| *known != place) && overlaps() {
            found.push((place, about));
        }
    }
    Ok(found)
}
