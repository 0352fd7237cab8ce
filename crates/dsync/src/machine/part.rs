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
    /// Checkpoints are kept of it.
    pub is_listed: bool,
    /// The number of its image in this QEMU.
    pub index: Option<String>,
    /// Names the image as it is open in this QEMU; `None` if that is not known.
    pub mark: Option<String>,
    /// What is recorded of it, from before the job on.
    pub recorded: Option<Recorded>,
    pub since: Result<Basis, Untold>,
}

/// The most blocks of a bitmap: it has at most 32 MiB.
const MOST_BLOCKS: u64 = 1 << 28;
/// Bytes that a bit is for, at least.
const LEAST_BLOCK: u64 = 4096;

/// Bytes that a bit of a bitmap is for, of a disk of this size.
pub(super) fn block_of(size: u64) -> u64 {
    size.div_ceil(MOST_BLOCKS).next_power_of_two().max(LEAST_BLOCK)
}

/// The bitmap of what was written to a disk, as its export shows it.
pub(super) fn shown_as(target: &str) -> String {
    format!("backup-{target}")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bitmap_is_as_fine_as_its_size_allows() {
        let of = |gib: u64| block_of(gib << 30);
        assert_eq!([of(1), of(1024), of(1025), of(64 << 10)], [4096, 4096, 8192, 256 << 10]);
    }
}
