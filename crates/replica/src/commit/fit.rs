//! Whether a delta fits what a replica is, by its header.

use delta::{Epoch, Header};

use crate::error::{ReplicaError, Result};
use crate::journal::compares;
use crate::replica::Replica;
use crate::state::lineage::{StepKind, Unsure};

impl Replica {
    /// Whether a delta fits what the replica is. What it goes on from is not looked at: that the journal holds it says that it
    /// fits.
    pub(crate) fn check(&self, header: &Header) -> Result<()> {
        let path = || self.destination().path().to_path_buf();
        let lineage = &self.lineage();
        if let Some(capacity) = self.status().capacity.filter(|c| *c < header.size_after) {
            return Err(ReplicaError::WrongSize {
                path: path(),
                has: capacity,
                given: format!(
                    "the source has {}: give a device at least that large",
                    device::exact_size(header.size_after)
                ),
            });
        }
        let source = lineage.source.or(lineage.step.as_ref().map(|s| s.toward.source));
        let compared = compares(header);
        if let Some(why) = self.changed().filter(|_| !compared) {
            return Err(self.touched(why));
        }
        let proves = self.options().adopt && compared;
        let seeds = header.is_seed() && header.resumes.is_none();
        if let Some(has) =
            source.filter(|s| *s != header.source && !proves && !(seeds && self.options().replace))
        {
            return Err(ReplicaError::WrongSource { path: path(), has, given: header.source });
        }
        if header.partial && !lineage.unsure.is_nothing() {
            let given = "a part of it cannot be repaired alone: omit --range";
            return Err(self.at_another("has blocks that may be of another moment than its epoch", given));
        }
        if let Some(binds) = header.binds {
            if binds != self.nonce() {
                let given = "the delta was made for another state of it: run \"dsync sync\" again";
                return Err(self.at_another("has moved on", given));
            }
            // What it goes on from may be the comparison that has shown what is there.
            let held = self.journal().filter(|_| header.resumes.is_some());
            let positions = held.map_or_else(|| self.positions(), |held| held.positions(&self.positions()));
            if !compared && positions.iter().any(|p| p.epoch.is_none()) {
                return Err(self.at_another(UNVERIFIED, "so only \"dsync sync\" can update it"));
            }
        } else if header.resumes.is_none() {
            let fresh = lineage.epoch.is_none() && self.is_free();
            if !(seeds && (fresh || self.options().replace)) {
                self.check_chain(header, seeds, fresh)?;
            }
        }
        Ok(())
    }

    fn at_another(&self, has: impl Into<String>, given: impl Into<String>) -> ReplicaError {
        ReplicaError::WrongEpoch {
            path: self.destination().path().to_path_buf(),
            has: has.into(),
            given: given.into(),
        }
    }

    /// Whether a delta that is bound to no state fits by its epochs. `fresh` if there is nothing at the destination yet.
    fn check_chain(&self, header: &Header, seeds: bool, fresh: bool) -> Result<()> {
        let (lineage, path) = (&self.lineage(), || self.destination().path().to_path_buf());
        let wants = match header.chain.first() {
            _ if seeds => "the delta is a whole copy".into(),
            Some(first) => format!("the delta begins at {}", first.number),
            None => "the delta names no epoch".into(),
        };
        let Some(epoch) = lineage.epoch else {
            let has = if fresh && lineage.step.is_none() { "does not exist yet" } else { "is incomplete" };
            if fresh {
                return Err(ReplicaError::Unseeded { path: path(), has: has.into(), given: wants });
            }
            return Err(self.at_another(has, format!("{wants}: complete it first, with \"dsync sync\"")));
        };
        for position in self.positions() {
            let Some(at) = position.epoch else {
                return Err(self.at_another(UNVERIFIED, "so only \"dsync sync\" can update it"));
            };
            if header
                .position(&at)
                .is_none_or(|i| !lineage.unsure.is_nothing() && i + 1 >= header.chain.len())
            {
                return Err(self.not_in_chain(header, &at, seeds, &wants));
            }
        }
        let first = header.chain.first() == Some(&epoch);
        if first && header.chain.len() > 1 && header.size_before != lineage.size {
            return Err(ReplicaError::WrongSize {
                path: path(),
                has: lineage.size,
                given: format!(
                    "the delta begins with {} at the same epoch: \"dsync sync --adopt SRC DST\" compares all of it with its \
                     source and overwrites what differs",
                    device::exact_size(header.size_before)
                ),
            });
        }
        Ok(())
    }

    /// Why a delta does not fit a replica at an epoch, and what would.
    fn not_in_chain(&self, header: &Header, at: &Epoch, seeds: bool, wants: &str) -> ReplicaError {
        let ahead = match self.lineage().unsure {
            Unsure::Nothing => "",
            _ if self.lineage().is_ahead() => ", and ahead of it by batches of a mirror",
            _ => ", and unsure in a part of it",
        };
        let has = format!("is at epoch {}{ahead}", at.number);
        let own = &self.lineage().role.lives;
        let leads_to_it = own.tip().is_some_and(|tip| header.lives.has(tip));
        let apart = header.lives.tip().is_some_and(|tip| !own.has(tip) && !leads_to_it);
        let given = if header.chain.iter().any(|e| e.number == at.number && e != at) {
            format!(
                "and the delta's epoch {} is another one, of a copied or restored source: run \"dsync sync\" from the right \
                 source",
                at.number
            )
        } else if apart && !seeds {
            "and the delta is of a source that has gone its own way since: run \"dsync sync\" from the right source".into()
        } else if let Some(to) = header.to().filter(|to| to.number <= at.number) {
            format!("beyond the end of this delta at epoch {}: skip this delta", to.number)
        } else if seeds {
            format!("{wants}: {SEED_ELSEWHERE}")
        } else {
            format!(
                "{wants}: merge the deltas between the two first, or make one that fits with \"dsync extract SRC --since {}\"",
                at.number
            )
        };
        self.at_another(has, given)
    }

    /// True if there is nothing at the destination that a seed could destroy.
    fn is_free(&self) -> bool {
        match self.lineage().step.as_ref().map(|s| s.kind) {
            Some(StepKind::NewFile { .. }) => true,
            // The first seed of a device: nothing was there before.
            Some(StepKind::InPlace) => self.lineage().stamp.is_none(),
            Some(StepKind::Clone { .. }) => false,
            None => self.lineage().size == 0,
        }
    }
}

/// What a replica is that was adopted, and not compared to the end.
const UNVERIFIED: &str = "was adopted but not compared to the end";

/// What to do with a whole copy where a replica is.
const SEED_ELSEWHERE: &str = "merge it at a path without a replica, or run \"dsync sync\"";
