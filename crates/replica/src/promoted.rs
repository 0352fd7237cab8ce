//! A replica that became a disk of its own: dsync serves it for writing or follows what is written to it. What is written then
//! is in no source, so no delta of the old one may be merged over it without a word from the user. The mark is durable before
//! the first write can go through, and ends with a compare that takes the destination over, or where nothing was written.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use device::{Dir, FolderLock};
use uuid::Uuid;

use crate::destination::Name;
use crate::error::{ReplicaError, Result, io_error};
use crate::lineage::{Lineage, Promoted, Stamp, Use};
use crate::locate::{inspect, state_folder};
use crate::options::Options;
use crate::replica::Replica;

/// A replica that was marked.
#[derive(Debug)]
pub struct Promotion {
    path: PathBuf,
    options: Options,
    /// Names the mark.
    id: Uuid,
    /// What the replica was.
    was: Lineage,
    /// The destination before anything could be written to it; `None` if it could not be looked at.
    before: Option<Stamp>,
}

/// Marks the replica at `path`, if it is one, as written to from now on; what a crash left of a commit is finished first.
/// Durable when this returns. `None` if it is not a replica.
///
/// # Errors
/// If another process uses it, or its state cannot be read or written.
pub fn promote(path: &Path, options: &Options, by: Use) -> Result<Option<Promotion>> {
    if inspect(path, options)?.is_none() {
        return Ok(None);
    }
    let id = Uuid::new_v4();
    let promotion = |was, before| Promotion { path: path.into(), options: options.clone(), id, was, before };
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    // A mark keeps its date, but from here on only this promotion may take it back.
    let mark = |lineage: &mut Lineage| {
        let was = lineage.clone();
        lineage.promoted = Some(Promoted { id, ..was.promoted.unwrap_or(Promoted { by, since, id }) });
        was
    };
    match Replica::open(path, &Options { doubt: true, ..options.clone() }) {
        Ok(mut replica) if replica.is_kept() => {
            let before = match replica.lineage().promoted {
                None => replica.stamp(Name::Final)?,
                Some(_) => None,
            };
            let was = mark(replica.lineage_mut());
            replica.store()?;
            Ok(Some(promotion(was, before)))
        }
        // Its file was gone.
        Ok(_) => Ok(None),
        // It is mounted, or no longer what its last commit left: it is marked all the same.
        Err(ReplicaError::Busy { .. } | ReplicaError::Changed { .. } | ReplicaError::Device(_)) => {
            Ok(change_mark(path, options, mark)?.map(|was| promotion(was, None)))
        }
        Err(error) => Err(error),
    }
}

/// Changes a lineage and nothing else: the destination may be in use.
fn change_mark<T>(
    path: &Path,
    options: &Options,
    change: impl FnOnce(&mut Lineage) -> T,
) -> Result<Option<T>> {
    let folder = state_folder(path, options)?;
    let dir = Dir::open(&folder).map_err(io_error("open", &folder))?;
    let _lock = match FolderLock::take(&folder).map_err(io_error("lock", &folder))? {
        Ok(lock) => lock,
        Err(holder) => return Err(ReplicaError::Busy { path: path.to_path_buf(), holder }),
    };
    let Some(mut lineage) = Lineage::load(&dir)? else { return Ok(None) };
    let changed = change(&mut lineage);
    lineage.store(&dir)?;
    Ok(Some(changed))
}

impl Promotion {
    /// What the replica was before it was marked.
    pub fn was(&self) -> &Lineage {
        &self.was
    }

    /// True if the replica was neither promoted nor adopted since.
    fn is_last(&self, lineage: &Lineage) -> bool {
        lineage.promoted.is_some_and(|promoted| promoted.id == self.id)
    }

    /// Takes the mark back: nothing was opened for writing. An earlier mark is restored, and one that another process has set
    /// meanwhile stays.
    ///
    /// # Errors
    /// If the state cannot be written: then the mark stays.
    pub fn revert(self) -> Result<()> {
        let revert = |lineage: &mut Lineage| {
            if self.is_last(lineage) {
                lineage.promoted = self.was.promoted;
            }
        };
        change_mark(&self.path, &self.options, revert).map(drop)
    }

    /// Takes the mark back if nothing was written since, and the replica was not promoted again. To be called when this
    /// promotion's clients cannot write any more. Returns whether it was.
    ///
    /// # Errors
    /// If the destination cannot be looked at, or the state cannot be written: then the mark stays.
    pub fn end(self) -> Result<bool> {
        let Some(before) = &self.before else { return Ok(false) };
        let mut replica = match Replica::open(&self.path, &Options { doubt: true, ..self.options.clone() }) {
            // Another process uses it by now.
            Err(error @ (ReplicaError::Busy { .. } | ReplicaError::Device(_))) if error.is_refusal() => {
                return Ok(false);
            }
            opened => opened?,
        };
        // The replica is held from the look to the change: it cannot be promoted in between.
        let now = replica.stamp(Name::Final)?;
        let unwritten = now.is_some_and(|now| before.is_proof_of(&now));
        if !unwritten || !replica.is_kept() || !self.is_last(replica.lineage()) {
            return Ok(false);
        }
        replica.lineage_mut().promoted = None;
        replica.store()?;
        Ok(true)
    }
}
