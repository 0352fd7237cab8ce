//! The trait of trackers of live disks.

use std::path::Path;

use extents::Bitmap;
use uuid::Uuid;

use crate::TrackError;

/// Why the record of a disk that has just been begun is not known.
pub(crate) const BEGAN: &str = "it was not tracked before";

/// True if no epoch has been released since the tracking began: what came before is not known, and nothing was lost.
///
/// # Errors
/// If the tracker cannot be read.
pub fn is_fresh(tracker: &dyn Tracker) -> Result<bool, TrackError> {
    Ok(tracker.released()?.is_none())
}

/// Records the writes to a live disk in the kernel, also while no dsync process runs.
///
/// An epoch ends with `checkpoint`, then [`lost`](Tracker::lost) (what it says of the record covers all that was written
/// before the checkpoint), then the history, then `release`. A crash in between only widens the next epoch.
///
/// The caller takes a [`TrackerLock`](crate::TrackerLock) first. A process without it is detected: a release fails if another
/// checkpoint came since one's own, and [`released`](Tracker::released), asked after a checkpoint, names the epoch that the
/// record follows.
pub trait Tracker: Send + Sync {
    /// `bpf` or `dm`.
    fn kind(&self) -> &'static str;

    /// Block size in bytes.
    fn block_size(&self) -> u32;

    /// Bytes of the disk when tracking began.
    fn size(&self) -> u64;

    /// Why the record since the last release cannot be trusted; `None` if it can.
    fn lost(&self) -> Result<Option<String>, TrackError>;

    /// Ends the record and begins the next. A write in flight meanwhile is on disk when this returns, or is marked
    /// in the next record too.
    ///
    /// Returns all blocks written since the last release: called again before the release, it returns the same and
    /// more.
    fn checkpoint(&self) -> Result<Bitmap, TrackError>;

    /// Drops what this object's last checkpoint returned: it is in the history now, as the epoch with this id.
    ///
    /// # Errors
    /// `Refused` if another program has made a checkpoint since, or released it: what that returned is not in this history.
    fn release(&self, epoch: Uuid) -> Result<(), TrackError>;

    /// The id given at the last release: the record follows that epoch. `None` before the first. It lives and
    /// dies with the record, so that no other history, and no older copy of this one, takes the record for its own.
    fn released(&self) -> Result<Option<Uuid>, TrackError>;

    /// True if the record was saved before the machine was restarted, and no epoch has been released since: then it was a copy, and
    /// belongs to a history only if that has learned of no epoch since.
    fn is_restored(&self) -> Result<bool, TrackError> {
        Ok(false)
    }

    /// Blocks written since the last release, without ending the epoch.
    fn dirty(&self) -> Result<Bitmap, TrackError>;

    /// What happens to the disk unnoticed because the running kernel does not show it, as a sentence; `None` if nothing does.
    fn unnoticed(&self) -> Result<Option<&'static str>, TrackError> {
        Ok(None)
    }

    /// Blocks that this object's last checkpoint marked in the next record because a write to them was in flight, or was taken
    /// to be: such a mark alone does not mean a later write. `None` if checkpoints make no such marks.
    fn in_flight(&self) -> Option<Bitmap> {
        None
    }
}

/// The error of a release whose checkpoint is not the last one.
pub(crate) fn taken(device: &Path) -> TrackError {
    TrackError::Refused(format!(
        "another program has ended an epoch of {} in the meantime: run one sync of a disk at a time",
        device.display()
    ))
}

/// The block size for a disk: 4 KiB, larger where the bitmap would exceed 128 MiB, up to 1 MiB.
pub(crate) fn block_size_for(size: u64) -> u32 {
    let mut block_size = 4096u32;
    while block_size < 1 << 20 && size / u64::from(block_size) > (128 << 20) * 8 {
        block_size *= 2;
    }
    block_size
}
