//! Removing the folder of a source.

use std::path::Path;

use device::{Dir, Folder, FolderLock};

use crate::SourceError;
use crate::disk::clones;
use crate::record::history::History;
use crate::record::state::{ABOUT, StateDir, about_in};

/// Removes a source's folder. To be called with the state directory locked, so that no process opens it meanwhile.
pub(crate) fn remove(folder: &dyn Folder, lock: FolderLock) -> Result<(), SourceError> {
    if let Some(about) = about_in(folder)? {
        clones::drop_kept(folder, &about)?;
    }
    clear(folder).map_err(SourceError::state("remove", folder.path()))?;
    lock.remove();
    Ok(())
}

/// Removes all of a source's folder but the lock; first what makes it a source, so what a crash leaves is not one.
///
/// # Errors
/// If a file cannot be removed.
#[doc(hidden)]
pub fn clear(folder: &dyn Folder) -> std::io::Result<()> {
    folder.remove(ABOUT)?;
    folder.sync()?;
    for name in folder.list()? {
        if name != FolderLock::NAME {
            folder.remove(&name)?;
        }
    }
    folder.sync()
}

/// Removes a source that this command has created, if it has no epoch: a refused command leaves no trace.
/// If that fails, an entry without an epoch is left.
pub(crate) fn undo(state: &StateDir, place: &Path, lock: Option<FolderLock>) {
    let Ok(_minting) = state.lock() else { return };
    let lock = lock.or_else(|| FolderLock::take(place).ok()?.ok());
    let (Some(lock), Ok(folder)) = (lock, Dir::open(place)) else { return };
    if History::read(&folder).is_ok_and(|history| history.last().is_none()) {
        let _ = remove(&folder, lock);
    }
}
