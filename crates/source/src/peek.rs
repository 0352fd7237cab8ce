//! What is known of a source without holding it: whether its record can be believed, and what was written since its last epoch.

use std::path::Path;

use device::Dir;
use extents::Bitmap;
use serde::Serialize;
use trackers::{TrackedDisk, Tracker};

use crate::control::ControlClient;
use crate::disk::clones;
use crate::live::{OTHER_HISTORY, follows};
use crate::record::history::History;
use crate::record::stamp::{DeviceTrust, ImageStamp};
use crate::record::state::SourceMetadata;
use crate::source::Source;
use crate::{Gap, SourceError};

/// Why the next sync could not use what was recorded since the last epoch of a source, and would compare; `None` if it could.
/// Ends nothing and takes no lock.
///
/// # Errors
/// If its state cannot be read, or its server or its tracker fails.
pub fn lost(place: &Path, about: &SourceMetadata, history: &History) -> Result<Option<Gap>, SourceError> {
    if let Some(client) = ControlClient::connect_to_look(place)? {
        return Ok(client.status(history)?.lost);
    }
    match trackers::find(&about.path)? {
        Some(tracker) => record_lost(&*tracker, about, history),
        None => match Source::doubt(place, about, DeviceTrust::Never)? {
            Some(why) => clones::lost(&opened(place)?, history, why),
            None => Ok(None),
        },
    }
}

fn opened(place: &Path) -> Result<Dir, SourceError> {
    Dir::existing(place).map_err(SourceError::state("open", place))
}

/// Why the disk of a source that no process holds may not be as the last command left it that did; `None` if it is. Changes nothing and
/// takes no lock.
///
/// # Errors
/// If its state or its disk cannot be looked at.
pub fn doubt(place: &Path, about: &SourceMetadata, trust: DeviceTrust) -> Result<Option<Gap>, SourceError> {
    Source::doubt(place, about, trust)
}

/// True if the source was ever served, or tracked by clones: then its changes are to be recorded, and that they are not is worth a word.
pub fn was_served(place: &Path) -> bool {
    stamp_in(place).is_some_and(|stamp| stamp.is_in_use())
}

/// True if the source was ever served, or is tracked; of a device also if it was tracked until its last epoch.
pub fn was_recorded(place: &Path, about: &SourceMetadata, history: &History) -> bool {
    let is_tracked = || trackers::find(&about.path).is_ok_and(|tracker| tracker.is_some());
    // One that was tracked in the kernel has no stamp, or one of the end of that.
    let last_known = || history.epochs().last().is_some_and(|last| last.lost.is_none());
    let was_tracked =
        |stamp: Option<&ImageStamp>| about.identity.is_block() && (stamp.is_none() || last_known());
    let stamp = stamp_in(place);
    stamp.as_ref().is_some_and(ImageStamp::is_in_use) || was_tracked(stamp.as_ref()) || is_tracked()
}

fn stamp_in(place: &Path) -> Option<ImageStamp> {
    Dir::existing(place).ok().and_then(|folder| ImageStamp::read(&folder).ok().flatten())
}

/// What the clone of an image takes that is tracked by clones.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct KeptClone {
    /// Bytes of what was overwritten since, which it keeps.
    pub kept_bytes: u64,
    /// Bytes that are free on its file system.
    pub free_bytes: u64,
}

/// What is known of the writes to a source since its last epoch.
#[derive(Debug)]
pub struct SourceWrites {
    /// Why they are not known; `None` if they are.
    pub unknown: Option<Gap>,
    /// What its clone takes, if it is tracked by clones.
    pub clone: Option<KeptClone>,
}

/// True if the source is an image that is tracked by clones.
pub(crate) fn is_cloned(place: &Path) -> bool {
    Dir::existing(place).is_ok_and(|folder| clones::are_kept(&folder).unwrap_or(false))
}

/// Why the record of a tracker does not say what was written since the last epoch of this history.
fn record_lost(
    tracker: &dyn Tracker,
    about: &SourceMetadata,
    history: &History,
) -> Result<Option<Gap>, SourceError> {
    if let Some(why) = tracker.lost()? {
        return Ok(Some(why.into()));
    }
    let is_ours = tracker.released()?.map_or(Ok(false), |id| follows(tracker, history, id))?;
    Ok((!is_ours || tracker.block_size() != about.block_size).then(|| OTHER_HISTORY.into()))
}

/// Adds to `into`, in blocks of the source's block size, what was written since the last epoch of its history: not all of it, if that is not known.
/// Ends nothing and takes no lock. An epoch that ends meanwhile takes what it has with it: a history that is read afterwards has that.
///
/// # Errors
/// If the source's server or its tracker fails.
pub fn written_since(
    place: &Path,
    about: &SourceMetadata,
    history: &History,
    into: &Bitmap,
) -> Result<SourceWrites, SourceError> {
    let folder = opened(place)?;
    let cloned = clones::written(&folder, history, &about.path)?;
    let clone = cloned.as_ref().map(|found| KeptClone {
        kept_bytes: found.as_ref().map_or(0, |written| written.kept),
        free_bytes: device::free_space(&about.path).unwrap_or(0),
    });
    let unknown = match (recorded_since(place, about, history, into)?, cloned.flatten()) {
        (Some(unknown), _) => unknown,
        (None, Some(written)) => {
            let unit = u64::from(about.block_size);
            for range in written.ranges {
                let end = range.end.div_ceil(unit).min(into.blocks());
                into.set((range.start / unit).min(end)..end);
            }
            let more = "what was written last may not be on its file system yet";
            Source::doubt(place, about, DeviceTrust::Never)?.map(|_| more.into())
        }
        (None, None) => {
            let last = history.last().map_or(0, |last| last.number);
            TrackedDisk::add_recorded(&folder, last, about.block_size.into(), into)
                .map_err(SourceError::state("read the records in", place))?;
            Some("writes to the source are not recorded at present".into())
        }
    };
    Ok(SourceWrites { unknown, clone })
}

/// Adds what a server or a tracker has recorded, and returns why that is not known; `None` if there is neither.
fn recorded_since(
    place: &Path,
    about: &SourceMetadata,
    history: &History,
    into: &Bitmap,
) -> Result<Option<Option<Gap>>, SourceError> {
    if let Some(client) = ControlClient::connect_to_look(place)? {
        let lost = client.status(history)?.lost;
        if lost.is_none() {
            client.dirty(into)?;
        }
        return Ok(Some(lost));
    }
    let Some(tracker) = trackers::find(&about.path)? else { return Ok(None) };
    let lost = record_lost(&*tracker, about, history)?;
    if lost.is_none() {
        for run in tracker.dirty()?.runs() {
            into.set(run.start.min(into.blocks())..run.end.min(into.blocks()));
        }
    }
    Ok(Some(lost))
}
