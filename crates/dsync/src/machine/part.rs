//! A disk in a backup job.

use std::path::PathBuf;
use std::time::Duration;

use source::{Handle, Recorded, SourceError};

use super::Untold;

/// How long a job may take to end.
pub(super) const ENDS_WITHIN: Duration = Duration::from_secs(60);
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What the names of our checkpoints and sockets begin with.
pub(super) const OURS: &str = "dsync-";

/// From what it is known what was written to a disk since its last sync.
#[derive(Debug, Clone)]
pub(super) enum Basis {
    /// The checkpoint of this name.
    Checkpoint(String),
    /// What its tracker has recorded.
    Record,
}

/// A disk in a backup job, with that from which its changes are told, or why they are not.
#[derive(Debug)]
pub(super) struct Part {
    pub target: String,
    pub path: PathBuf,
    pub is_qcow2: bool,
    /// A tracker may have recorded what was written to it.
    pub is_raw_device: bool,
    /// libvirt keeps checkpoints of it.
    pub is_listed: bool,
    /// Names the image as it is open in this QEMU; `None` if that is not known.
    pub mark: Option<String>,
    /// What is recorded of it, from before the job on.
    pub recorded: Option<Recorded>,
    pub since: Result<Basis, Untold>,
}

impl Part {
    /// True if QEMU tells what was written to it.
    pub(super) fn has_bitmap(&self) -> bool {
        matches!(self.since, Ok(Basis::Checkpoint(_)))
    }

    /// Takes what its source knows against its bitmap.
    ///
    /// # Errors
    /// If that cannot be asked.
    pub(super) fn doubt(&mut self, handle: &Handle) -> Result<(), SourceError> {
        if let (Ok(_), Some(why)) = (&self.since, handle.lost()?) {
            self.since = Err(Untold::Because(why.to_string()));
        }
        Ok(())
    }
}
