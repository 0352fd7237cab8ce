//! Two sources of one id: a disk that was meant as a destination, and is the same source itself.
//!
//! Such a destination, by its folder or by its lineage, says so instead of a status, whatever it is opened for; the plan refuses it before
//! anything is written, with both terms, the epoch in common, and what was written on either side since (`plan.rs`, `refuse_diverged`). So is a replica that is ahead, or forked, or of which no life is known
//! to be in both, whatever the method: only `--adopt` overwrites it. `merge` refuses a replica that batches of a mirror brought to a
//! point that is not on the delta's path. `serve` and `track` do not find a lineage in a `--journal-dir`.

use std::path::Path;

use delta::Epoch;
use device::Folder;
use extents::Bitmap;
use replica::FIRST_TERM;
use source::{DeviceTrust, Handle, History, KnownPosition, SourceError, SourceMetadata};

use crate::conflict::Since;
use crate::error::SyncError;
use crate::site::Site;
use crate::wire::messages::{Origin, Primary};

/// Refuses to adopt a disk that was promoted, whatever source it is to follow: what was written to it since is in no other.
pub(crate) fn refuse_adoption(
    path: &Path,
    options: &replica::ReplicaOptions,
    state: &dyn Site,
) -> Result<(), SyncError> {
    let lineage = state.lineage(path, options).unwrap_or(None);
    let marked = lineage.and_then(|lineage| lineage.role.promoted).map(|promoted| promoted.term);
    let known = state.source(&path.to_string_lossy()).unwrap_or(None).map(|(_, about)| about.term);
    // A source in its first term may be restored from a replica.
    match marked.or(known).filter(|term| *term > FIRST_TERM) {
        Some(term) => Err(SyncError::Refused(is_source(path, term))),
        None => Ok(()),
    }
}

/// Refuses a delta for a disk that is a source, and was never a replica.
pub(crate) fn refuse_merge(
    path: &Path,
    options: &replica::ReplicaOptions,
    state: &dyn Site,
) -> Result<(), SyncError> {
    let replica = state.lineage(path, options).map_or(true, |lineage| lineage.is_some());
    match state.source(&path.to_string_lossy()).unwrap_or(None).filter(|_| state.exists(path) && !replica) {
        Some((_, about)) => Err(SyncError::Refused(is_source(path, about.term))),
        None => Ok(()),
    }
}

/// Why nothing is written to a source, and the way out.
fn is_source(path: &Path, term: u64) -> String {
    let path = path.display();
    format!(
        "{path} is a source itself (term {term}), and what was written to it would be overwritten. To make it a replica, run \
         \"dsync demote {path}\" where it is; a sync to it then says what that overwrites, and how it is saved"
    )
}

/// What is at `path`, if that is the source of `origin` itself: a source without a lineage, or a replica that was promoted.
pub(crate) fn primary_at(
    path: &Path,
    options: &replica::ReplicaOptions,
    state: &dyn Site,
    origin: &Origin,
) -> Result<Option<Primary>, SyncError> {
    // What cannot be looked at is reported when it is opened.
    let lineage = state.lineage(path, options).unwrap_or(None);
    let promoted = lineage.as_ref().and_then(|l| l.role.promoted);
    if (lineage.is_some() && promoted.is_none()) || !state.exists(path) {
        return Ok(None);
    }
    let follows = lineage.as_ref().is_some_and(|lineage| lineage.source == Some(origin.uuid));
    let known = state.source(&path.to_string_lossy()).unwrap_or(None);
    match (known.filter(|(_, about)| about.uuid == origin.uuid), promoted.filter(|_| follows)) {
        (Some((place, about)), _) => Ok(Some(primary(state, (&place, &about), origin)?)),
        // Its promotion was interrupted.
        (None, Some(promoted)) => {
            let epoch = lineage.as_ref().and_then(|lineage| lineage.epoch);
            let lives = lineage.map(|lineage| lineage.role.lives.and(promoted.id)).unwrap_or_default();
            Ok(Some(Primary {
                term: promoted.term,
                epoch,
                common: None,
                written: None,
                began: epoch,
                lives,
                reaches: false,
                doubted: false,
            }))
        }
        (None, None) => Ok(None),
    }
}

fn primary(
    state: &dyn Site,
    (place, about): (&Path, &SourceMetadata),
    origin: &Origin,
) -> Result<Primary, SyncError> {
    let folder = state.folder(place).map_err(SyncError::io(format!("open {}", place.display())))?;
    let history = History::read(&*folder)?;
    let (term, began) = (about.term, about.began);
    let lives = source::lives(&*folder, about, history.last())?;
    let common = lives.common(&origin.lives, |_, n| n).and_then(|point| history.by_number(point.cut()));
    // Where this side does not know the one in common, the other may know the beginning of this one's term.
    let since = common.or(began).filter(|epoch| knows(&history, epoch));
    // What cannot be looked at is reported by the command that is named.
    let found =
        since.and_then(|since| written_after(state, (place, about), (&*folder, &history), &since).ok());
    let (written, doubted) = found.map_or((None, false), |found| (found.bytes, found.doubted));
    let (epoch, reaches) = (history.last(), since.is_some());
    Ok(Primary { term, epoch, common, written, began, lives, reaches, doubted })
}

fn knows(history: &History, epoch: &Epoch) -> bool {
    history.size_at(epoch).is_some()
}

/// Two sources of one id.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct TwoSources {
    /// The last epoch that they have in common, if that is known.
    pub common: Option<u64>,
    /// What the source that is asked has since.
    pub here: Since,
    /// What the other has.
    pub there: Since,
}

/// Compares this source with another one of its id.
pub(crate) fn two_sources(handle: &Handle, theirs: &Primary) -> Result<TwoSources, SyncError> {
    let (about, history, lives) = (handle.about(), handle.history()?, handle.lives()?);
    let point = lives.common(&theirs.lives, |_, n| n);
    let ours = point.and_then(|point| history.by_number(point.cut()));
    // Of one number there may be two epochs, where one of the two is a copy.
    let agreed = ours.zip(theirs.common).is_none_or(|(ours, theirs)| ours == theirs);
    let common = point.filter(|_| agreed).map(|point| point.cut());
    let mut lost = false;
    let here = ours.filter(|ours| agreed && knows(&history, ours)).map(|common| {
        let written = handle.written_after(&common);
        lost = matches!(written, Err(SourceError::Lost { .. })) && !about.identity.is_block();
        let blocks = written.ok().map(|(blocks, _)| blocks.count());
        blocks.map(|blocks| blocks.saturating_mul(about.block_size.into()))
    });
    let counted = common.is_some() && common == theirs.common.or(theirs.began).map(|epoch| epoch.number);
    let there = (counted && (theirs.reaches || theirs.written.is_some())).then_some(theirs.written);
    let since = |bytes: Option<Option<u64>>, doubted: bool| Since {
        has: bytes.is_some() || common.is_some(),
        doubted,
        ..Since::of(bytes)
    };
    Ok(TwoSources { common, here: since(here, lost), there: since(there, theirs.doubted) })
}

/// What is known to be written to a source after an epoch.
struct Written {
    /// Bytes, at least: those are not counted that another program wrote. `None` where its history has a gap since.
    bytes: Option<u64>,
    /// Some of it is in no record, so no delta has all of it. Of a device at rest, only its user can know.
    doubted: bool,
}

fn written_after(
    state: &dyn Site,
    (place, about): (&Path, &SourceMetadata),
    (folder, history): (&dyn Folder, &History),
    epoch: &Epoch,
) -> Result<Written, SourceError> {
    let block_size = u64::from(about.block_size);
    let size = history.last().and_then(|last| history.size_at(&last)).unwrap_or(0).max(about.identity.size);
    let blocks = Bitmap::new(size.div_ceil(block_size));
    let unrecorded = state.written_since(place, about, history, &blocks)?.is_some();
    let position = KnownPosition { epoch: *epoch, upto: u64::MAX };
    // Read after the record: an epoch may have ended meanwhile.
    let history = History::read(folder)?;
    if history.changes_since(&[position], about.block_size, &blocks).is_err() {
        return Ok(Written { bytes: None, doubted: true });
    }
    let rests = unrecorded && !about.identity.is_block();
    let doubted = rests && state.doubt(place, about, DeviceTrust::Never).is_ok_and(|doubt| doubt.is_some());
    Ok(Written { bytes: Some(blocks.count().saturating_mul(block_size)), doubted })
}
