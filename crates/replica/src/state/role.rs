//! What a disk is among the copies of a source: the source itself, or a replica, and by whose word. A disk without a lineage is
//! an ordinary source.
//!
//! ```text
//!     replica ── promote ──▶ promoted (a source, its term one higher) ── demote ──▶ demoted (a replica) ── commit ──▶ replica
//! ```

use std::path::PathBuf;

use delta::Epoch;
use lineage::{Lives, Point};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The term of a source before any promotion.
pub const FIRST_TERM: u64 = 1;

/// What a disk with a lineage is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Role {
    /// The term of the source that it last took something from, or was itself.
    pub term: u64,
    /// The lives that led to what it holds, but for the blocks that it is unsure of. Of a promoted one, to what it was then.
    #[serde(default, skip_serializing_if = "Lives::is_empty")]
    pub lives: Lives,
    /// It is the source itself, and takes no deltas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promoted: Option<Promoted>,
    /// The folder of the group with which it was promoted: a name beside the disk's file, or a path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promoted_in: Option<PathBuf>,
    /// The state directory in which it was made the source, to the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_in: Option<PathBuf>,
    /// The source has ended at the epoch of the last commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<Released>,
    /// It was the source until then; the next commit ends this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub demoted: Option<Demoted>,
}

/// A promotion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promoted {
    /// When, in seconds since 1970.
    pub since: u64,
    /// Names it: the id of the epoch with which it begins.
    pub id: Uuid,
    /// Its term.
    pub term: u64,
    /// Its source had said that there was no more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub released: bool,
}

/// The last word of a source that was demoted: nothing was written to it after this epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// Its last epoch.
    pub epoch: Epoch,
    /// Its term.
    pub term: u64,
}

/// A demotion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Demoted {
    /// When, in seconds since 1970.
    pub since: u64,
    /// Which replica was told that this was all, by the name that its user gives it. No other is told so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told: Option<String>,
    /// What was given up with its demotion was saved in this file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<PathBuf>,
    /// The lives that led to all that was written to it.
    #[serde(default, skip_serializing_if = "Lives::is_empty")]
    pub lives: Lives,
    /// All that was written to it as a source is in the epoch at which it was demoted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub complete: bool,
    /// The promotion with which its last term had begun, if that gave up something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gave_up: Option<GaveUp>,
}

/// A promotion that gave up what its source had written later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GaveUp {
    /// The term that began with it.
    pub term: u64,
    /// The epoch after which it did.
    pub began: Epoch,
}

impl Role {
    /// A replica, of a source with that term, to which these lives led.
    pub fn replica(term: u64, lives: Lives) -> Role {
        Role { term, lives, promoted: None, promoted_in: None, made_in: None, released: None, demoted: None }
    }

    /// The promotion that comes next. `released`: the source has said of what is there that there was no more.
    pub(crate) fn next_promotion(&self, released: bool) -> Promoted {
        let term = self.released.map_or(self.term, |released| released.term.max(self.term)) + 1;
        Promoted { since: now(), id: Uuid::new_v4(), term, released }
    }

    /// What a replica is when it becomes the source by this promotion.
    pub(crate) fn promoted_so(&self, promoted: Promoted) -> Role {
        Role {
            term: promoted.term,
            lives: self.all_lives().clone(),
            promoted: Some(promoted),
            made_in: None,
            released: None,
            ..self.clone()
        }
    }

    /// The lives that led to all that it holds: those of a former source to what was written to it, too.
    pub fn all_lives(&self) -> &Lives {
        match &self.demoted {
            Some(demoted) if demoted.lives.leads_over(&self.lives) => &demoted.lives,
            _ => &self.lives,
        }
    }

    /// What it holds counts as this later epoch of the source that it was.
    pub fn counts_as(&mut self, epoch: &Epoch) {
        self.lives = self.all_lives().upto(Point::number(epoch.number, 0));
    }
}

impl Default for Role {
    fn default() -> Role {
        Role::replica(FIRST_TERM, Lives::default())
    }
}

impl Promoted {
    /// What happened to the replica, as the part of a sentence that begins with its name.
    pub fn said(&self) -> String {
        format!("was promoted on {} (term {})", device::moment(self.since), self.term)
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
