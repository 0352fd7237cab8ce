//! A replica that is to be read as a disk: as the source of another replica, or served.
//! Between two of its commits it may hold what its source never was.

use std::path::Path;

use crate::error::{ReplicaError, Result, io_error};
use crate::journal::{ARRIVING, WHOLE};
use crate::known::changed;
use crate::replica::Replica;
use crate::state::lineage::{Lineage, State, StepKind, Unsure};
use crate::state::locate::{inspect, state_folder};
use crate::state::note::Foreign;
use crate::state::options::ReplicaOptions;

impl Lineage {
    /// Why the destination holds what its source never was at one moment, as the part of a sentence; `None` if it holds what
    /// its source was.
    pub fn unsettled(&self) -> Option<String> {
        let step = self.step.as_ref().filter(|step| step.kind == StepKind::InPlace);
        match (step, self.state, self.epoch) {
            (Some(step), _, Some(epoch)) => Some(format!(
                "a commit in place was cut off between epoch {epoch} and epoch {}",
                step.toward.epoch
            )),
            (Some(step), _, None) => {
                Some(format!("the first copy, of epoch {}, was cut off", step.toward.epoch))
            }
            (None, ..) if self.unsure == Unsure::Everything => {
                Some("another program wrote to it since its last commit".into())
            }
            (None, State::Incomplete, _) if self.role.demoted.is_some() => {
                Some("it was demoted without knowing what was written to it".into())
            }
            (None, State::Incomplete, _) => Some(
                "its copy was never completed, or lacks blocks that were unreadable at its source or not in what was merged"
                    .into(),
            ),
            (None, State::Fuzzy, _) => {
                Some("it was copied from a disk in use, so its parts are of different moments".into())
            }
            (None, State::Exact, _) => None,
        }
    }
}

/// True if what its group has committed may not be merged yet.
fn merges(folder: &Path, lineage: &Lineage) -> bool {
    folder.join(WHOLE).exists() || lineage.group.is_some() && folder.join(ARRIVING).exists()
}

/// True if a commit to the replica at `path` may be under way, or was interrupted: its lineage does not say yet what the next command
/// makes of it. Takes no lock.
///
/// # Errors
/// As [`inspect`].
pub fn is_committing(path: &Path, lineage: &Lineage, options: &ReplicaOptions) -> Result<bool> {
    Ok(merges(&state_folder(path, options)?, lineage))
}

/// Makes sure that what is at `path` may be read as a disk, where it is a replica: what a crash left of a commit is finished,
/// if that is needed and can be done. One that was promoted is a disk of its own.
///
/// # Errors
/// Refused if it holds what its source never was; as for [`Replica::open`] if it cannot be completed.
pub fn settle(path: &Path, options: &ReplicaOptions) -> Result<()> {
    let Some(lineage) = inspect(path, options)? else { return Ok(()) };
    let folder = state_folder(path, options)?;
    let at = std::fs::canonicalize(path).map_err(io_error("find", path))?;
    let is_as_it_was = lineage.unsettled().is_none() && changed(&folder, &at)?.is_none();
    if lineage.role.promoted.is_some() || (is_as_it_was && !merges(&folder, &lineage)) {
        return Ok(());
    }
    let replica = match Replica::open(path, &ReplicaOptions { doubt: true, ..options.clone() }) {
        // It was created where a replica was to be.
        Err(ReplicaError::NotAReplica(_)) => return Ok(()),
        opened => opened?,
    };
    if let Some(why) = replica.changed() {
        return Err(replica.touched(why));
    }
    if replica.lineage().unsure == Unsure::Everything {
        return Err(replica.touched(Foreign::Written));
    }
    let Some(why) = replica.lineage().unsettled().filter(|_| replica.is_kept()) else { return Ok(()) };
    Err(ReplicaError::Refused(format!(
        "cannot read {0} as a disk: it is a replica, and {why}; its content never was the disk of its source. Complete it \
         first, with \"dsync sync\" from its source. To use it as it is, make it a plain image with \"dsync forget --journal-dir \
         {1} {0}\": the next \"dsync sync\" to it then needs --adopt and compares everything",
        path.display(),
        folder.display()
    )))
}
