//! Who may end the epochs of a tracker.

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

/// Where the locks are kept: as long as a tracker lives at most, which is until the machine stops.
const HOLDS: &str = "/run/dsync/trackers";

/// For so long a tracker is waited for: another sync may be ending just now.
const PATIENCE: Duration = Duration::from_millis(500);

impl TrackerLock {
    /// Holds the tracker of the block device at `device`. The inner `Err` says who has it.
    pub fn take(device: &Path) -> Result<Result<TrackerLock, String>, TrackError> {
        let identity = device::identity(device)?;
        let number = format!("{}:{}", libc::major(identity.dev), libc::minor(identity.dev));
        // Files that stand in for a device share the number of their file system.
        let name = if identity.is_block() { number } else { format!("{number}-{}", identity.ino) };
        let place = Path::new(HOLDS).join(name);
        let until = Instant::now() + PATIENCE;
        loop {
            let taken = device::Dir::open(&place).and_then(|_| FolderLock::take(&place));
            match taken.map_err(|error| TrackError::State {
                what: "cannot lock",
                place: place.clone(),
                error,
            })? {
                Ok(lock) => return Ok(Ok(TrackerLock { _lock: lock })),
                Err(holder) if Instant::now() > until => return Ok(Err(holder)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}
