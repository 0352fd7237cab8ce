//! A replica of which its times do not tell whether others have written to it, and that was found to hold what it did: it goes on as it
//! was, with its past. A repair gives the state another name, which no undo delta leads from.

use serde::{Deserialize, Serialize};

use crate::destination::Name;
use crate::error::{ReplicaError, Result};
use crate::journal::WHOLE;
use crate::lineage::State;
use crate::replica::Replica;

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

impl Replica {
    /// How much of it must be found equal to its epoch, if that makes a difference: others have changed it, moments of its past are kept, and
    /// it was one moment of its source. `None` otherwise.
    pub fn acceptable(&self) -> Option<Acceptable> {
        let lineage = self.lineage();
        let settled = lineage.step.is_none() && lineage.state == State::Exact && lineage.unsure.is_nothing();
        let alone = lineage.role.also().is_empty() && lineage.role.promoted.is_none();
        let sealed = self.state().open(WHOLE, false).is_ok();
        if self.changed().is_none() || !settled || !alone || sealed || !self.has_past_of(lineage.nonce) {
            return None;
        }
        let (left, now) = (lineage.stamp.as_ref()?, self.destination().stamp(Name::Final).ok()??);
        let same = (left.inode, left.size) == (now.inode, now.size);
        let as_old = left.written.is_some() && left.written == now.written;
        Some(if same && as_old { Acceptable::Unchanged } else { Acceptable::Whole })
    }

    /// Takes it for what it was. To be asked for once as much as [`Replica::acceptable`] says was found equal to its epoch, on this very
    /// open. Durable on return.
    ///
    /// # Errors
    /// Refused if it is not acceptable; [`ReplicaError::Changed`] if others have changed it since it was opened. If it cannot be recorded:
    /// then it is as before.
    pub fn accept(&mut self) -> Result<()> {
        self.sound()?;
        self.mergeable()?;
        if self.acceptable().is_none() {
            return Err(ReplicaError::Refused(format!(
                "replica {} cannot be accepted as it was: run \"dsync verify --repair\" again",
                self.path().display()
            )));
        }
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
