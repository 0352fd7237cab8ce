//! A replica that became a disk of its own: dsync serves it for writing or follows what is written to it. What is written then
//! is in no source, so no delta of the old one may be merged over it without a word from the user. The mark is durable before
//! the first write can go through, and ends with a compare that takes the destination over, or where nothing was written.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use device::{Dir, FolderLock};
use serde::{Deserialize, Serialize};

use crate::error::{ReplicaError, Result, io_error};
use crate::lineage::{Lineage, Stamp};
use crate::place::Which;
use crate::replica::{Options, Replica, inspect, state_folder};

/// In what way dsync opened a replica for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// Served to NBD clients.
    Served,
    /// Followed by a tracker while others write to it.
    Tracked,
}

/// What is noted of a replica that was opened for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promoted {
    /// By what.
    pub by: Use,
    /// Since when, in seconds since 1970.
    pub since: u64,
}

impl Promoted {
    /// What happened to the replica, as the part of a sentence that begins with its name.
    pub fn said(&self) -> String {
        let how = match self.by {
            Use::Served => "served for writing by \"dsync serve\"",
            Use::Tracked => "followed for writing by \"dsync track\"",
        };
        format!("was {how} on {}", device::moment(self.since))
    }
}

/// A replica that was marked.
#[derive(Debug)]
pub struct Promotion {
    path: PathBuf,
    options: Options,
    /// What the replica was.
    was: Lineage,
    /// The destination before anybody could write to it, where that could be looked at.
    before: Option<Stamp>,
}

/// Marks the replica at `path`, if it is one, as written to from now on; what a crash left of a commit is finished first.
/// Durable when this returns. `None` if it is not a replica.
///
/// # Errors
/// If somebody works on it, or its state can't be read or written.
pub fn promote(path: &Path, options: &Options, by: Use) -> Result<Option<Promotion>> {
    let Some(was) = inspect(path, options)? else { return Ok(None) };
    let promotion = |before| Promotion { path: path.into(), options: options.clone(), was, before };
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let mark = Some(Promoted { by, since });
    match Replica::open(path, &Options { doubt: true, ..options.clone() }) {
        Ok(mut replica) if replica.kept && replica.lineage.promoted.is_none() => {
            let before = replica.stamp(Which::Whole)?;
            replica.lineage.promoted = mark;
            replica.store()?;
            Ok(Some(Promotion {
                was: Lineage { promoted: None, ..replica.lineage.clone() },
                ..promotion(before)
            }))
        }
        Ok(replica) if replica.kept => Ok(Some(promotion(None))),
        // Its file had gone.
        Ok(_) => Ok(None),
        // It is mounted, or no longer what its last commit left: what is written to it now is all the more nobody else's.
        Err(ReplicaError::Busy { .. } | ReplicaError::Changed { .. } | ReplicaError::Device(_)) => {
            write_mark(path, options, |lineage| lineage.promoted = lineage.promoted.or(mark))?;
            Ok(Some(promotion(None)))
        }
        Err(error) => Err(error),
    }
}

/// Changes a lineage and nothing else: the destination may be in use.
fn write_mark(path: &Path, options: &Options, change: impl FnOnce(&mut Lineage)) -> Result<()> {
    let folder = state_folder(path, options)?;
    let dir = Dir::open(&folder).map_err(io_error("open", &folder))?;
    let _lock = match FolderLock::take(&folder).map_err(io_error("lock", &folder))? {
        Ok(lock) => lock,
        Err(holder) => return Err(ReplicaError::Busy { path: path.to_path_buf(), holder }),
    };
    let Some(mut lineage) = Lineage::load(&dir)? else { return Ok(()) };
    change(&mut lineage);
    lineage.store(&dir)
}

impl Promotion {
    /// What the replica was before it was marked.
    pub fn was(&self) -> &Lineage {
        &self.was
    }

    /// Takes the mark back: nobody came to write.
    ///
    /// # Errors
    /// If the state can't be written: then the mark stays.
    pub fn revert(self) -> Result<()> {
        if self.was.promoted.is_some() {
            return Ok(());
        }
        write_mark(&self.path, &self.options, |lineage| lineage.promoted = None)
    }

    /// Takes the mark back if nothing was written since. To be called when nobody can write any more. Returns whether it was.
    ///
    /// # Errors
    /// If the destination can't be looked at, or the state can't be written: then the mark stays.
    pub fn end(self) -> Result<bool> {
        let Some(before) = &self.before else { return Ok(false) };
        let replica = Replica::open(&self.path, &Options { doubt: true, ..self.options.clone() })?;
        let now = replica.stamp(Which::Whole)?;
        drop(replica);
        if !now.is_some_and(|now| before.is_proof_of(&now)) {
            return Ok(false);
        }
        self.revert().map(|()| true)
    }
}
