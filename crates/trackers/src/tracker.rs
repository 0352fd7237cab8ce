//! What records the writes to a live disk, and which one follows a given disk.

use std::path::Path;

use extents::Bitmap;
use uuid::Uuid;

use crate::TrackError;

/// Records the writes to a live disk, from the kernel: it goes on while no process of ours runs.
///
/// An epoch ends with `checkpoint`, then [`lost`](Tracker::lost) (what it says of the record covers all that was written
/// before the checkpoint), then the history, then `release`. Whoever dies in between widens the next epoch, no more.
///
/// Who ends epochs takes a [`TrackerLock`](crate::TrackerLock) first. A holder that does not know of it is found out: a release fails if another
/// checkpoint came since one's own, and [`released`](Tracker::released), asked after a checkpoint, names the epoch that the
/// record follows.
pub trait Tracker: Send + Sync {
    /// What kind it is: `bpf` or `dm`.
    fn kind(&self) -> &'static str;

    /// Bytes a block.
    fn block_size(&self) -> u32;

    /// Bytes of the disk when tracking began.
    fn size(&self) -> u64;

    /// Why what it has recorded since what was released last can't be trusted; `None` if it can.
    fn lost(&self) -> Result<Option<String>, TrackError>;

    /// Ends the record and begins the next. A write that was in flight meanwhile has landed when this returns, or is marked
    /// in the next record too.
    ///
    /// Returns all that was written since what was released last: asked again before the release, it returns the same and
    /// more.
    fn checkpoint(&self) -> Result<Bitmap, TrackError>;

    /// Forgets what this object's last checkpoint returned: it stands in the history now, as the epoch of this id.
    ///
    /// # Errors
    /// `Refused` if somebody else has made a checkpoint since, or released it: what that returned is not in this history.
    fn release(&self, epoch: Uuid) -> Result<(), TrackError>;

    /// The id given at the last release: what is recorded came after that epoch. `None` before the first. It lives and
    /// dies with the record, so that no other history, and no older copy of this one, takes the record for its own.
    fn released(&self) -> Result<Option<Uuid>, TrackError>;

    /// Blocks written since what was released last, at this moment, without ending anything.
    fn dirty(&self) -> Result<Bitmap, TrackError>;

    /// Blocks that this object's last checkpoint marked in the next record because a write to them was in flight, or was taken
    /// to be: such a mark alone is no sign of a write since. `None` where no checkpoint makes such marks.
    fn in_flight(&self) -> Option<Bitmap> {
        None
    }
}

/// What a release says when the checkpoint that it ends is not the last one.
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
