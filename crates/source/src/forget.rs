//! Forgetting a source, or one of its bookmarks.

use std::path::Path;

use device::{Dir, FolderLock};

use crate::SourceError;
use crate::control::ControlClient;
use crate::disk::discard::remove;
use crate::record::bookmarks::Bookmarks;
use crate::record::state::{SourceMetadata, StateDir};
use crate::record::tally::Tally;

/// Forgets the source whose folder is `place`: its history, its bookmarks and its record. Its disk is not touched.
///
/// # Errors
/// `Refused` or `Busy` while it is served, tracked in the kernel, or held by another command.
pub fn forget_source(state: &StateDir, place: &Path, about: &SourceMetadata) -> Result<(), SourceError> {
    if let Some(why) = in_use(place, about)? {
        return Err(SourceError::Refused(why));
    }
    let _minting = state.lock()?;
    let lock = held(place, about)?;
    let folder = Dir::existing(place).map_err(SourceError::state("open", place))?;
    remove(&folder, lock)
}

/// Why a source cannot be forgotten now, and what to do first; `None` if it can.
pub fn in_use(place: &Path, about: &SourceMetadata) -> Result<Option<String>, SourceError> {
    let path = about.path.display();
    if ControlClient::connect(place)?.is_some() {
        return Ok(Some(format!("{path} is being served: stop its server first")));
    }
    // A disk that is gone is not tracked.
    if about.path.exists() && trackers::find(&about.path)?.is_some() {
        return Ok(Some(format!("{path} is tracked: run \"dsync track remove {path}\" first")));
    }
    Ok(None)
}

/// True if the writes to a source are recorded, or were: it is more than a disk that was copied.
///
/// # Errors
/// If that cannot be asked.
pub fn is_recorded(place: &Path, about: &SourceMetadata) -> Result<bool, SourceError> {
    Ok(crate::was_served(place) || in_use(place, about)?.is_some())
}

/// Removes the bookmark of a replica, or a named checkpoint: the changes since are no longer kept for it.
///
/// # Errors
/// `Unknown` if there is none of that name; `Busy` while a command holds the source.
pub fn forget_bookmark(place: &Path, about: &SourceMetadata, name: &str) -> Result<(), SourceError> {
    let folder = Dir::existing(place).map_err(SourceError::state("open", place))?;
    let known = Bookmarks::read(&folder)?;
    let name = known.named(name).map_or(name, |(key, _)| key);
    if known.named(name).is_none() && Tally::read(place, name).is_first_copy() {
        // It has no bookmark yet.
    } else if let Some(client) = ControlClient::connect(place)? {
        client.forget_bookmark(name)?;
    } else {
        let _lock = held(place, about)?;
        Bookmarks::remove(&folder, &about.path, name)?;
    }
    Tally::forget(place, name);
    Ok(())
}

fn held(place: &Path, about: &SourceMetadata) -> Result<FolderLock, SourceError> {
    let taken = FolderLock::take(place).map_err(SourceError::state("lock", place))?;
    taken.map_err(|holder| SourceError::Busy { path: about.path.clone(), holder })
}
