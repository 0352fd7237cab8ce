//! Two sources of one id: a disk that was meant as a destination, and is the same source itself.

use std::path::Path;

use delta::Epoch;
use extents::Bitmap;
use source::{About, History, Position, SourceError, StateDir};

use crate::error::SyncError;
use crate::messages::{Origin, Primary};

/// What is at `path`, if that is the source of `origin` itself: a source without a lineage, or a replica that was promoted.
pub(crate) fn primary_at(
    path: &Path,
    options: &replica::Options,
    state: &StateDir,
    origin: &Origin,
) -> Result<Option<Primary>, SyncError> {
    // What cannot be looked at is reported when it is opened.
    let lineage = replica::inspect(path, options).unwrap_or(None);
    let promoted = lineage.as_ref().and_then(|l| l.role.promoted).filter(|promoted| promoted.term > 0);
    if (lineage.is_some() && promoted.is_none()) || !path.exists() {
        return Ok(None);
    }
    let follows = lineage.as_ref().is_some_and(|lineage| lineage.source == Some(origin.uuid));
    let known = state.source(&path.to_string_lossy()).unwrap_or(None);
    match (known.filter(|(_, about)| about.uuid == origin.uuid), promoted.filter(|_| follows)) {
        (Some((place, about)), _) => Ok(Some(primary(&place, &about, origin)?)),
        // Its promotion was interrupted.
        (None, Some(promoted)) => {
            let epoch = lineage.and_then(|lineage| lineage.epoch);
            Ok(Some(Primary { term: promoted.term, epoch, common: epoch, written: None }))
        }
        (None, None) => Ok(None),
    }
}

fn primary(place: &Path, about: &About, origin: &Origin) -> Result<Primary, SyncError> {
    let folder = device::Dir::existing(place).map_err(SyncError::io(format!("open {}", place.display())))?;
    let history = History::read(&folder)?;
    let common = common(&history, origin.began, about.began);
    let written = common.and_then(|common| written_after(place, about, &history, &common).unwrap_or(None));
    Ok(Primary { term: about.term, epoch: history.last(), common, written })
}

/// The epoch that two sources have in common: where the term of one of them began, if the history of this one has it.
pub(crate) fn common(history: &History, theirs: Option<Epoch>, ours: Option<Epoch>) -> Option<Epoch> {
    let known = |epoch: &Epoch| history.size_at(epoch).is_some();
    theirs.filter(known).or(ours.filter(known))
}

/// Bytes written to a source after an epoch, at least: those are not counted that another program wrote. `None` if that is not known.
pub(crate) fn written_after(
    place: &Path,
    about: &About,
    history: &History,
    epoch: &Epoch,
) -> Result<Option<u64>, SourceError> {
    let block_size = u64::from(about.block_size);
    let size = history.last().and_then(|last| history.size_at(&last)).unwrap_or(0).max(about.identity.size);
    let blocks = Bitmap::new(size.div_ceil(block_size));
    let position = Position { epoch: *epoch, upto: u64::MAX };
    if history.changes_since(&[position], about.block_size, &blocks).is_err() {
        return Ok(None);
    }
    source::recorded_since(place, about, history, &blocks)?;
    Ok(Some(blocks.count().saturating_mul(block_size)))
}
