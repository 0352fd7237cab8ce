//! Others at the destination. Between its own writes a replica's file rests: whatever changes it then is somebody else's
//! doing, and must not be sealed by the next commit.
//!
//! While a replica is open, the stamp with which its file was left is kept in memory. Between batches of a mirror, whose
//! stamps in the lineage are of long ago, it is noted in the folder too: not durably, for a process that is killed leaves the
//! system's memory behind, and after a power cut nobody can say what the file's times should be.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{ReplicaError, Result, io_error};
use crate::journal::Contents;
use crate::lineage::Stamp;
use crate::place::Which;
use crate::replica::Replica;

/// The note's file.
pub(crate) const NAME: &str = "rest";
/// The note is written in one piece, and of one length.
const LEN: usize = 512;

#[derive(Serialize, Deserialize)]
struct Note {
    /// See [`crate::place::Place::life`].
    life: String,
    /// `None` while batches are brought to the file.
    stamp: Option<Stamp>,
}

impl Stamp {
    /// True if it is certain that nothing was written between the two.
    pub(crate) fn is_proof_of(&self, now: &Stamp) -> bool {
        let counted = match (&self.medium, &now.medium) {
            (Some(before), Some(now)) => before.is_proof_of(now),
            (None, None) => self.inode != 0,
            _ => false,
        };
        counted && self.differs(now).is_none()
    }

    /// In what way a destination is not as it was left; `None` if nothing tells.
    pub(crate) fn differs(&self, now: &Stamp) -> Option<&'static str> {
        let medium = self.medium.as_ref().zip(now.medium.as_ref()).and_then(|(was, now)| was.differs(now));
        match () {
            () if self.inode != now.inode => Some("another file has taken its place"),
            () if self.size != now.size => Some("its size is another"),
            () if self.changed != now.changed => Some("it was written to"),
            () if medium.is_some() => medium,
            () if !device::agree(&self.print, &now.print) => Some("it is another disk, or was written to"),
            () => None,
        }
    }
}

/// The path leads elsewhere by now.
pub(crate) fn covered(path: &Path) -> ReplicaError {
    ReplicaError::Away(format!(
        "replica {} is not where it was: another file system was mounted over its folder, or its own was unmounted",
        path.display()
    ))
}

impl Replica {
    /// Makes sure that the path still leads to the destination that is open.
    pub(crate) fn at_path(&self) -> Result<()> {
        match self.place.is_at_path().map_err(io_error("look at the folder of", self.path()))? {
            true => Ok(()),
            false => Err(covered(self.path())),
        }
    }

    fn touched(&self, why: &str) -> ReplicaError {
        ReplicaError::Changed { path: self.path().to_path_buf(), why: why.into() }
    }

    fn gone(&self) -> ReplicaError {
        ReplicaError::Away(format!(
            "replica {} is not there any more: it was removed, or its file system was unmounted",
            self.path().display()
        ))
    }

    /// The file is left alone from now on, until the next own write. A device is not looked at: it has no times.
    pub(crate) fn leave(&mut self) -> Result<()> {
        self.left = if self.place.is_device() { None } else { self.stamp(Which::Whole)? };
        Ok(())
    }

    /// Makes sure that nobody else has changed the file since it was left alone.
    pub(crate) fn untouched(&self) -> Result<()> {
        self.at_path()?;
        let Some(left) = &self.left else { return Ok(()) };
        let why = match self.stamp(Which::Whole)? {
            None => return Err(self.gone()),
            Some(now) => left.differs(&now),
        };
        why.map_or(Ok(()), |why| Err(self.touched(why)))
    }

    /// Makes sure that the file which was written to is still the one that stands there. `size` is its size by now.
    pub(crate) fn still_there(&self, size: u64) -> Result<()> {
        self.at_path()?;
        let Some(left) = &self.left else { return Ok(()) };
        let why = match self.stamp(Which::Whole)? {
            None => return Err(self.gone()),
            // Own writes have changed its time.
            Some(now) => Stamp { size, changed: now.changed, ..left.clone() }.differs(&now),
        };
        why.map_or(Ok(()), |why| Err(self.touched(why)))
    }

    /// Notes that batches are brought to the file, or how it is left after.
    pub(crate) fn note(&self, resting: bool) -> Result<()> {
        let life = self.place.life();
        if self.place.is_device() || life.is_empty() {
            return Ok(());
        }
        let note = Note { life, stamp: self.left.clone().filter(|_| resting) };
        let failed = || io_error("write", &self.folder.path().join(NAME));
        let mut bytes = serde_json::to_vec(&note).map_err(|e| failed()(e.into()))?;
        bytes.resize(bytes.len().max(LEN), b' ');
        self.folder.open(NAME, true).and_then(|file| file.write_at(0, &bytes)).map_err(failed())
    }

    /// In what way the file is not as the last batch left it, as far as that was noted, or its size is none that a journal
    /// which was being merged could have left.
    pub(crate) fn since_batches(&self, now: &Stamp, journal: &[Contents]) -> Result<Option<&'static str>> {
        // A step in place has changed it as well.
        if self.place.is_device() || self.lineage.step.is_some() {
            return Ok(None);
        }
        let noted = match self.folder.open(NAME, false) {
            Ok(file) => {
                let mut bytes = vec![0; LEN];
                file.read_at(0, &mut bytes).ok().and_then(|()| serde_json::from_slice::<Note>(&bytes).ok())
            }
            Err(_) => None,
        };
        let left = noted.filter(|note| note.life == self.place.life()).and_then(|note| note.stamp);
        if let Some(why) = left.and_then(|left| left.differs(now)) {
            return Ok(Some(why));
        }
        let sizes = || journal.iter().flat_map(|contents| &contents.segments).map(|s| s.header.size_after);
        let before = self.lineage.stamp.as_ref().map(|stamp| stamp.size);
        let possible = before.is_none_or(|before| before == now.size) || sizes().any(|size| size == now.size);
        Ok((!possible).then_some("its size is another"))
    }
}
