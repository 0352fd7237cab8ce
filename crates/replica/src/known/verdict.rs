//! What a verification found, where it was not repaired: its source knows it, and here it is known for the day on which that is lost.

use std::path::Path;

use device::{Dir, Folder};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{Result, io_error};
use crate::replica::Replica;
use crate::state::locate::state_folder;
use crate::state::options::ReplicaOptions;
use crate::state::role::now;

/// The file's name in the replica's folder.
const NAME: &str = "verdict";
/// The name of the empty file that is there while the digests of the replica are not believed.
const DOUBTED: &str = "digests-doubted";

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
    /// A repair has mended the moments before with it, if it was damage and no change that had been missed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    repaired: bool,
    /// The one state of that epoch that is known to be whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    whole: Option<Uuid>,
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

    /// What the state of this epoch may hold, as it is from before that was mended; `None` if nothing is known.
    pub(crate) fn in_state(folder: &dyn Folder, epoch: u64, state: Uuid) -> Option<Verdict> {
        let is_before = |mended: u64, whole| epoch < mended || epoch == mended && whole != Some(state);
        Verdict::load(folder).filter(|found| found.mended.is_none_or(|mended| is_before(mended, found.whole)))
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

    /// Notes what a verification found: so many bytes differ, or none any more as so many were `repaired`. `but_changed`: what its source changed
    /// since was not compared.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn note_verdict(&self, bytes_differing: u64, repaired: u64, but_changed: bool) -> Result<()> {
        let now = |bytes| Verdict {
            time: now(),
            bytes_differing: bytes,
            until_sync: false,
            mended: None,
            repaired: repaired > 0 && !but_changed,
            whole: None,
        };
        match (bytes_differing, self.verdict()) {
            (0, None) if repaired == 0 => Ok(()),
            (0, Some(before)) if but_changed => self.store_verdict(Verdict { until_sync: true, ..before }),
            // The moments that are kept may hold it.
            (0, before) => {
                let mended = Some(self.status().epoch.map_or(0, |epoch| epoch.number));
                let whole = Some(self.status().nonce).filter(|_| !but_changed);
                // What was mended before is in those moments still.
                let earlier = || Verdict::load(self.state());
                let both = |old: Verdict| Verdict {
                    bytes_differing: old.bytes_differing.saturating_add(repaired),
                    repaired: old.repaired && !but_changed,
                    ..now(repaired)
                };
                let found = before.or_else(|| earlier().map(both)).unwrap_or_else(|| now(repaired));
                self.store_verdict(Verdict { mended, whole, until_sync: false, ..found })
            }
            _ => self.store_verdict(Verdict { repaired: false, ..now(bytes_differing) }),
        }
    }

    /// Notes that so many bytes differed at its epoch, and that a commit has just mended them: what is kept of before has them.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn note_mended(&self, bytes: u64) -> Result<()> {
        if bytes > 0 {
            self.note_verdict(bytes, 0, false)?;
            self.note_verdict(0, 0, false)?;
        }
        Ok(())
    }

    /// True if something else than commits has changed what the replica holds, or may have: digests that were kept of it are not believed.
    ///
    /// # Errors
    /// If it cannot be told.
    pub fn doubts_digests(&self) -> Result<bool> {
        match self.state().open(DOUBTED, false) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_error("open", &self.folder().join(DOUBTED))(error)),
        }
    }

    /// Has the next comparison read the replica, whatever digests were kept of it: a verification begins, which may find differences, or it is
    /// brought back to what it held before. Durable on return.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn doubt_digests(&self) -> Result<()> {
        let made = self.state().open(DOUBTED, true).and_then(|_| self.state().sync());
        made.map_err(io_error("create", &self.folder().join(DOUBTED)))
    }

    /// Takes the doubt back. What cannot be removed stays in doubt.
    pub fn believe_digests(&self) {
        let _ = self.state().remove(DOUBTED);
    }

    fn store_verdict(&self, found: Verdict) -> Result<()> {
        let (folder, path) = (self.state(), self.folder().join(NAME));
        let bytes = serde_json::to_vec(&found).map_err(|e| io_error("write", &path)(e.into()))?;
        device::replace(folder, NAME, &bytes).map_err(io_error("write", &path))
    }

    /// Notes a rewind to a moment: what was mended after it comes back. Durable on return.
    pub(crate) fn note_return(&mut self, epoch: u64, state: Uuid) -> Result<()> {
        let Some(found) = Verdict::in_state(self.state(), epoch, state) else { return Ok(()) };
        // From here on the next sync sends what changed since another state.
        if found.mended.is_none() || !found.repaired {
            self.store_verdict(Verdict { mended: None, whole: None, until_sync: false, ..found })?;
        }
        let may = match found.repaired {
            true => {
                "if a change had been missed, and nothing was damaged, it holds what was written there later"
            }
            false => "it may hold what was damaged",
        };
        self.warn(format!(
            "epoch {epoch} of {} is from before {} were mended, which differed from the source on {}: {may}",
            self.path().display(),
            device::human_size(found.bytes_differing),
            device::moment(found.time)
        ));
        Ok(())
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
        if coverage == Coverage::Whole {
            self.believe_digests();
        }
        let least = |found: Verdict| if found.until_sync { Coverage::Changed } else { Coverage::Whole };
        if self.verdict().is_some_and(|found| coverage >= least(found)) {
            let _ = self.note_verdict(0, 0, false);
        }
    }
}
