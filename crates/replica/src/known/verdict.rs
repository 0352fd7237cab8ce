//! What a verification found, where it was not repaired: its source knows it, and here it is known for the day on which that is lost.

use std::path::Path;

use device::{Dir, Folder};
use serde::{Deserialize, Serialize};

use crate::error::{Result, io_error};
use crate::replica::Replica;
use crate::state::locate::state_folder;
use crate::state::options::ReplicaOptions;
use crate::state::role::now;

/// The file's name in the replica's folder.
const NAME: &str = "verdict";

/// A replica differed from its source, and was not repaired since.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// When it was verified, in seconds since 1970.
    pub time: u64,
    /// Bytes that differed.
    pub bytes_differing: u64,
    /// A later verification found the rest to be equal, but for blocks that its source changed meanwhile: the next sync sends those.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub until_sync: bool,
    /// The epoch at which it was mended. What is kept of earlier moments may bring it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mended: Option<u64>,
}

/// How much of a replica a commit makes equal to its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Coverage {
    /// Some blocks.
    Part,
    /// What changed since its last epoch.
    Changed,
    /// All: it was compared or copied.
    Whole,
}

impl Verdict {
    /// The verdict of the replica with this folder; `None` if it was never verified, or nothing differs. One that is damaged is none: the next
    /// verification finds it again.
    pub(crate) fn standing(folder: &dyn Folder) -> Option<Verdict> {
        Verdict::load(folder).filter(|found| found.mended.is_none())
    }

    /// The verdict on disk, also one that was mended since.
    fn load(folder: &dyn Folder) -> Option<Verdict> {
        let file = folder.open(NAME, false).ok()?;
        let mut bytes = vec![0; file.len().ok()?.min(1 << 10) as usize];
        file.read_at(0, &mut bytes).ok()?;
        serde_json::from_slice(&bytes).ok()
    }
}

/// What the last verification of the replica at `path` found, and was not repaired. Takes no lock.
pub fn verdict(path: &Path, options: &ReplicaOptions) -> Option<Verdict> {
    let folder = state_folder(path, options).ok()?;
    Verdict::standing(&Dir::existing(&folder).ok()?)
}

impl Replica {
    /// What the last verification found, and was not repaired.
    pub fn verdict(&self) -> Option<Verdict> {
        Verdict::standing(self.state())
    }

    /// Notes what a verification found: so many bytes differ, or none any more. `but_changed`: what its source changed since was not compared.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn note_verdict(&self, bytes_differing: u64, but_changed: bool) -> Result<()> {
        match (bytes_differing, self.verdict()) {
            (0, None) => Ok(()),
            (0, Some(before)) if but_changed => self.store_verdict(Verdict { until_sync: true, ..before }),
            (0, Some(before)) => {
                let mended = Some(self.status().epoch.map_or(0, |epoch| epoch.number));
                self.store_verdict(Verdict { mended, ..before })
            }
            _ => {
                self.store_verdict(Verdict { time: now(), bytes_differing, until_sync: false, mended: None })
            }
        }
    }

    fn store_verdict(&self, found: Verdict) -> Result<()> {
        let (folder, path) = (self.state(), self.folder().join(NAME));
        let bytes = serde_json::to_vec(&found).map_err(|e| io_error("write", &path)(e.into()))?;
        device::replace(folder, NAME, &bytes).map_err(io_error("write", &path))
    }

    /// Notes a rewind to an epoch: what was mended after it comes back. Durable on return.
    pub(crate) fn note_return(&self, epoch: u64) -> Result<()> {
        match Verdict::load(self.state()) {
            Some(found) if found.mended.is_some_and(|mended| epoch < mended) => {
                self.store_verdict(Verdict { mended: None, ..found })
            }
            _ => Ok(()),
        }
    }

    /// Forgets the verdict, as nothing is known of the disk as a replica any more: its own history begins anew.
    pub(crate) fn forget_verdict(&self) -> Result<()> {
        match self.state().remove(NAME) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(io_error("remove", &self.folder().join(NAME))(error))
            }
            _ => Ok(()),
        }
    }

    /// Notes that so much was committed. What cannot be written is found again.
    pub fn note_committed(&self, coverage: Coverage) {
        let least = |found: Verdict| if found.until_sync { Coverage::Changed } else { Coverage::Whole };
        if self.verdict().is_some_and(|found| coverage >= least(found)) {
            let _ = self.note_verdict(0, false);
        }
    }
}
