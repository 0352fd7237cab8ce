//! Beginning and ending to track an image by clones.

use std::path::Path;
use std::time::Duration;

use delta::Epoch;
use device::{Dir, FolderLock};

use crate::SourceError;
use crate::control::ControlClient;
use crate::disk::clones;
use crate::record::state::StateDir;
use crate::source::{Source, SourceOptions};

/// Tracks an image by clones from now on: ends its epoch, and keeps a clone of that. The image may be in use, and one that is no source yet
/// becomes one. What was written to it before is known as far as it was recorded. Returns the epoch, and how long writers waited.
///
/// # Errors
/// `Refused` if its file system makes no clones, and while it is served; `Busy` while a command holds it.
pub fn track_by_clones(
    state: &StateDir,
    image: &Path,
    block_size: Option<u32>,
) -> Result<(Epoch, Duration), SourceError> {
    if let Some((place, about)) = state.source(&image.to_string_lossy())? {
        if ControlClient::connect(&place)?.is_some() {
            return Err(SourceError::Refused(format!(
                "{} is being served, so its writes are recorded already",
                about.path.display()
            )));
        }
    }
    let options = SourceOptions { read_only: true, clones: true, block_size, ..SourceOptions::default() };
    let source = Source::open(state, image, &options).map_err(|error| match error {
        SourceError::Shrank { path, was, is } => SourceError::Refused(format!(
            "{} shrank from {} to {}: run \"dsync sync --allow-shrink\" first, if that is intended",
            path.display(),
            device::exact_size(was),
            device::exact_size(is)
        )),
        other => other,
    })?;
    let waited = source.waited();
    let epoch = source.checkpoint(false)?.epoch;
    source.close()?;
    Ok((epoch, waited))
}

/// Ends tracking an image by clones, and removes them: it is compared from then on, which monitors do not report unless it was served. Returns
/// whether there was one; `None` if it was not tracked so.
///
/// # Errors
/// `Busy` while a command holds it; if the state cannot be read or written, or a clone not removed.
pub fn untrack(state: &StateDir, what: &Path) -> Result<Option<bool>, SourceError> {
    let Some((place, about)) = state.source(&what.to_string_lossy())? else { return Ok(None) };
    let folder = Dir::existing(&place).map_err(SourceError::state("open", &place))?;
    let taken = FolderLock::take(&place).map_err(SourceError::state("lock", &place))?;
    let _lock = taken.map_err(|holder| SourceError::Busy { path: about.path.clone(), holder })?;
    let was = clones::are_kept(&folder)?;
    // Also of an attempt that was killed.
    let found = clones::end(&folder, &about)?;
    if !was && !found {
        return Ok(None);
    }
    Ok(Some(found))
}
