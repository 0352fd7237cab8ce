//! The lock for ending the epochs of a tracker.

use std::path::Path;
use std::time::{Duration, Instant};

use device::FolderLock;

use crate::TrackError;

/// The right to end epochs of a device's tracker. It belongs to the tracker, so that two state directories exclude each
/// other too.
#[derive(Debug)]
pub struct TrackerLock {
    _lock: FolderLock,
}

/// How long to wait for the lock: another sync may be just ending.
const PATIENCE: Duration = Duration::from_millis(500);

impl TrackerLock {
    /// Locks the tracker of the block device at `device`. The inner `Err` names the holder.
    pub fn take(device: &Path) -> Result<Result<TrackerLock, String>, TrackError> {
        let identity = device::identity(device)?;
        let number = format!("{}:{}", libc::major(identity.dev), libc::minor(identity.dev));
        // Files in place of a device (in tests) share the device number of their file system.
        let name = if identity.is_block() { number } else { format!("{number}-{}", identity.ino) };
        let place = crate::run_folder().join("trackers").join(name);
        let until = Instant::now() + PATIENCE;
        loop {
            let taken = device::Dir::open(&place).and_then(|_| FolderLock::take(&place));
            match taken.map_err(TrackError::state("cannot lock", &place))? {
                Ok(lock) => return Ok(Ok(TrackerLock { _lock: lock })),
                Err(holder) if Instant::now() > until => return Ok(Err(holder)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}
