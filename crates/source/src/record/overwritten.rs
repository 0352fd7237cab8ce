//! A disk that is a source and is about to be written to as a replica: it is restored from its own replica, or passes on what it
//! receives. The times of a file tell that by themselves, but not that it was dsync. A device has none, and only its user would say what has become
//! of it.

use std::path::{Path, PathBuf};

use delta::Epoch;
use device::{Dir, Folder, FolderLock, Storage};
use extents::Bitmap;
use uuid::Uuid;

use crate::record::history::History;
use crate::record::lives;
use crate::record::stamp::ImageStamp;
use crate::record::state::{SourceMetadata, StateDir};
use crate::{Gap, SourceError};

/// What is said of a disk that dsync has restored.
const RESTORED: &str = "dsync has restored it, perhaps from an older copy";

/// Notes that dsync is about to write to the disk at `path` as to a replica. What the sources that are stored there have recorded does not hold from then
/// on, whatever `trust_device` says; the next sync of one compares. Of files those that are in use: a backup that others put in their place would be refused.
///
/// Where what it will hold does not follow what it held (`goes_back`), it is another content: it begins to be a replica, and is perhaps restored from an
/// older copy than one of its own replicas is, or it is rewound, or its source was. An epoch of that ends here in its history, and it leaves the way on
/// which its replicas are, so that none of them is brought up to date from it until its user says so. Durable on return.
///
/// # Errors
/// `Busy` if another program holds one of them; if its state cannot be read or written.
pub fn overwritten(state: &StateDir, path: &Path, goes_back: bool) -> Result<(), SourceError> {
    for (place, about) in stored_at(state, path)? {
        let folder = Dir::existing(&place).map_err(SourceError::state("open", &place))?;
        let is_in_use = ImageStamp::read(&folder)?.is_some_and(|stamp| stamp.is_in_use());
        if !about.identity.is_block() && !is_in_use && !goes_back {
            continue;
        }
        let lock = match FolderLock::take(&place).map_err(SourceError::state("lock", &place))? {
            Ok(lock) => lock,
            Err(holder) => return Err(SourceError::Busy { path: about.path, holder }),
        };
        if goes_back {
            restored(&folder, &about)?;
        }
        ImageStamp::overwritten(&folder)?;
        drop(lock);
    }
    Ok(())
}

/// Ends an epoch of a source that knows some, after which it has another content.
fn restored(folder: &dyn Folder, about: &SourceMetadata) -> Result<(), SourceError> {
    lives::leave(folder)?;
    let mut history = History::hold(folder)?;
    let Some(last) = history.last() else { return Ok(()) };
    let size = history.size_at(&last).unwrap_or(about.identity.size);
    let other = Some(Gap::OtherContent(RESTORED.into()));
    // An entry whose changes are not known has none of them.
    let none = Bitmap::new(0);
    let epoch = Epoch { number: last.number + 1, id: Uuid::new_v4() };
    history.append(epoch, other, size, about.block_size, &none)
}

/// The sources of what is at a path, under whatever name: of the file or device itself, of a part of it, and of a device over it.
fn stored_at(state: &StateDir, path: &Path) -> Result<Vec<(PathBuf, SourceMetadata)>, SourceError> {
    let mut found = Vec::from_iter(state.source(&path.to_string_lossy())?);
    if !path.exists() {
        return Ok(found);
    }
    let here = Storage::of_bytes(path);
    for (place, about) in state.survey()?.sources {
        let overlaps = || {
            let there = Some(&about.path).filter(|there| there.exists());
            here.as_ref().zip(there.and_then(|there| Storage::of(there))).is_some_and(|(h, t)| h.overlaps(&t))
        };
        if found.iter().all(|(known, _)| *known != place) && overlaps() {
            found.push((place, about));
        }
    }
    Ok(found)
}
