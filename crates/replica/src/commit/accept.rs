//! A replica of which its times do not tell whether others have written to it, and that was found to hold what it did, or whose user says so
//! where there is no source to compare it with: it goes on as it was, with its past. A repair gives the state another name, which no undo delta
//! leads from.

use std::path::Path;

use device::{Dir, Folder};
use serde::{Deserialize, Serialize};

use crate::error::{ReplicaError, Result};
use crate::journal::{ARRIVING, WHOLE};
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::lineage::{Lineage, State, Unsure};
use crate::state::locate::locate;
use crate::state::options::ReplicaOptions;

/// How much of a replica that others have changed must be found equal to its epoch, to take it for what it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Acceptable {
    /// What its source has not changed since. It is the file that was left, and its content is as old as it was: whoever wrote to it has
    /// set that time back, to the nanosecond.
    Unchanged,
    /// All.
    Whole,
}

/// Takes the replica at `path` for what it was, by its user's word that nothing was written to it: others changed its owner, mode, name or links,
/// or it was copied with its times. Returns false if nothing had changed. Durable on return.
///
/// # Errors
/// Refused if its size or the time of its content is another one, if it is a device, and if a commit to it was interrupted; as for
/// [`Replica::open`]. It is as before then.
pub fn accept_unwritten(path: &Path, options: &ReplicaOptions) -> Result<bool> {
    let (_, _, folder) = locate(path, options)?;
    // Opening a changed replica gives up what such a commit has brought.
    if let Ok(folder) = Dir::existing(&folder) {
        let settled = Lineage::load(&folder)?.is_none_or(|lineage| lineage.is_settled());
        if !settled || [ARRIVING, WHOLE].into_iter().any(|name| folder.open(name, false).is_ok()) {
            return Err(not_accepted(path, "it is not complete, or a transfer to it was interrupted"));
        }
    }
    let mut replica = Replica::open(path, &ReplicaOptions { doubt: true, ..options.clone() })?;
    let Some(why) = replica.changed() else { return Ok(false) };
    if !replica.is_as_old() {
        let why = replica.how_changed(why);
        return Err(not_accepted(path, &why));
    }
    replica.take_as_it_was()?;
    Ok(true)
}

fn not_accepted(path: &Path, why: &str) -> ReplicaError {
    ReplicaError::Refused(format!(
        "{0} cannot be taken for what it was: {why}. If its source is there, \"dsync verify --repair SRC DST\" compares it; if that is gone, \
         \"dsync forget {0}\" makes it a plain disk as it is",
        path.display()
    ))
}

impl Lineage {
    /// True if it says all there is to say of the content.
    fn is_settled(&self) -> bool {
        let whole = self.state != State::Incomplete && self.unsure != Unsure::Everything;
        // What a mirror has brought came after the stamp.
        let rests = self.unsure.is_nothing() || self.role.demoted.is_some();
        whole && rests && self.step.is_none() && self.epoch.is_some()
    }
}

impl Replica {
    /// True if the content of its file is as long and as old as it was left at the last commit: whoever wrote to it has set that time back, to the
    /// nanosecond. False for a device, which has no times, and where it is known that others have written.
    pub(crate) fn is_as_old(&self) -> bool {
        let found = self.destination().stamp(Name::Final).ok().flatten();
        let of = |stamp: &crate::state::lineage::Stamp| Some((stamp.size, stamp.written?));
        let left = self.lineage().stamp.as_ref().and_then(of);
        let is_told = left.is_some() && self.lineage().unsure != Unsure::Everything;
        is_told && left == found.as_ref().and_then(of)
    }

    /// How much of it must be found equal to its epoch, if that makes a difference: others have changed it, moments of its past are kept, and
    /// it was one moment of its source. `None` otherwise.
    pub fn acceptable(&self) -> Option<Acceptable> {
        let lineage = self.lineage();
        let settled = lineage.step.is_none() && lineage.state == State::Exact && lineage.unsure.is_nothing();
        let alone = lineage.role.promoted.is_none();
        let sealed = self.state().open(WHOLE, false).is_ok();
        if self.changed().is_none() || !settled || !alone || sealed || !self.has_past_of(lineage.nonce) {
            return None;
        }
        let (left, now) = (lineage.stamp.as_ref()?, self.destination().stamp(Name::Final).ok()??);
        let same = left.inode == now.inode && self.is_as_old();
        Some(if same { Acceptable::Unchanged } else { Acceptable::Whole })
    }

    /// Takes it for what it was. To be asked for once as much as [`Replica::acceptable`] says was found equal to its epoch, on this very
    /// open. Durable on return.
    ///
    /// # Errors
    /// Refused if it is not acceptable; [`ReplicaError::Changed`] if others have changed it since it was opened. If it cannot be recorded:
    /// then it is as before.
    pub fn accept(&mut self) -> Result<()> {
        if self.acceptable().is_none() {
            return Err(ReplicaError::Refused(format!(
                "replica {} cannot be accepted as it was: run \"dsync verify --repair\" again",
                self.path().display()
            )));
        }
        self.take_as_it_was()
    }

    /// Goes on from the state that is written down, as the destination is now.
    fn take_as_it_was(&mut self) -> Result<()> {
        self.sound()?;
        self.mergeable()?;
        let before = self.lineage().stamp.clone();
        self.note_stamp()?;
        self.clear_noticed();
        if let Err(error) = self.store() {
            self.lineage_mut().stamp = before;
            return Err(error);
        }
        self.set_changed(None);
        self.forget_note()?;
        self.refresh()
    }
}
