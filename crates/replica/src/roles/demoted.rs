//! A source that becomes a replica: what is given up of it, all that was written after an epoch, is what it is unsure of, so that the next sync
//! sends the differences alone. The lineage is made in one step: before it the disk is a source, after it a replica.

use std::path::{Path, PathBuf};

use delta::Epoch;
use device::{Dir, Folder};
use lineage::Lives;
use source::Trail;
use uuid::Uuid;

use crate::error::{ReplicaError, Result, io_error};
use crate::journal::unsure::UnsureSet;
use crate::journal::{ARRIVING, WHOLE};
use crate::replica::Replica;
use crate::state::destination::{Destination, FileDestination, Name};
use crate::state::lineage::{Lineage, Stamp, State, Unsure};
use crate::state::locate::locate;
use crate::state::options::ReplicaOptions;
use crate::state::role::{Demoted, GaveUp, Role, now};

/// What a source was.
#[derive(Debug, Clone)]
pub struct Demotion {
    /// Its UUID.
    pub source: Uuid,
    /// Its term.
    pub term: u64,
    /// The lives that led to what it is.
    pub lives: Lives,
    /// The promotion with which its term had begun, if that gave up something.
    pub gave_up: Option<GaveUp>,
    /// Its block size in bytes.
    pub block_size: u32,
    /// Bytes of its disk.
    pub size: u64,
    /// An epoch of it, and the blocks written after that, which are given up. `None` if it is not known what was written: then the next
    /// sync compares.
    pub since: Option<(Epoch, UnsureSet)>,
    /// Others may have written to the disk since it ended as a source at that epoch, as they may to any replica.
    pub others_wrote: bool,
    /// What was written was saved as a delta in this file.
    pub saved: Option<PathBuf>,
}

impl Demotion {
    /// The epoch that has all that was written to the source; `None` if some of that is given up.
    pub fn last(&self) -> Option<Epoch> {
        self.since.as_ref().filter(|(_, unsure)| unsure.is_empty()).map(|(epoch, _)| *epoch)
    }
}

/// The epochs at which a former source can be demoted anew once it is promoted again, oldest first: those after which its own history
/// knows what was written. None if it would not be promoted as it is. Changes nothing, recovers nothing, and takes no lock.
pub fn demotes_anew(path: &Path, options: &ReplicaOptions) -> Vec<Epoch> {
    let read = || -> Option<Vec<Epoch>> {
        let (path, _, folder) = locate(path, options).ok()?;
        let folder = Dir::existing(&folder).ok()?;
        let lineage = Lineage::load(&folder).ok()??;
        // What has come would be merged.
        if [ARRIVING, WHOLE].into_iter().any(|name| folder.open(name, false).is_ok()) {
            return None;
        }
        if path.is_file() {
            let now = FileDestination::new(path, lineage.format).ok()?.stamp(Name::Final).ok()??;
            lineage.stamp.as_ref().filter(|stamp| stamp.differs(&now).is_none())?;
        }
        Some(lineage.demotes_anew(&folder))
    };
    read().unwrap_or_default()
}

impl Lineage {
    /// The promotion that had made a source of a former source, if that gave up what its own source wrote later. `None` once it has taken
    /// something since its demotion.
    pub fn gave_up(&self) -> Option<&GaveUp> {
        self.role.demoted.as_ref()?.gave_up.as_ref()
    }

    fn demotes_anew(&self, folder: &dyn Folder) -> Vec<Epoch> {
        let whole = self.state == State::Exact && self.unsure != Unsure::Everything && self.step.is_none();
        let former = self.role.demoted.is_some() && self.role.promoted.is_none();
        let Some(epoch) = self.epoch.filter(|_| whole && former) else { return Vec::new() };
        let mut epochs = Trail::leading_to(folder, &epoch).epochs();
        if epochs.last() != Some(&epoch) {
            epochs = vec![epoch];
        }
        epochs
    }
}

impl Replica {
    /// The epochs at which this former source can be demoted anew once it is promoted again, oldest first; see [`demotes_anew`].
    pub fn demotes_anew(&self) -> Vec<Epoch> {
        match self.changed() {
            None => self.lineage().demotes_anew(self.state()),
            Some(_) => Vec::new(),
        }
    }

    /// Makes a source, which was opened to be adopted, a replica. `unwritten` tells if the disk, as it is found and then held, is what
    /// the source's state was read for. Durable on return.
    ///
    /// # Errors
    /// Refused if it is written to meanwhile; then it is the source that it was.
    pub fn demote(&mut self, demotion: &Demotion, unwritten: &dyn Fn(&Stamp) -> bool) -> Result<()> {
        let stamp = self.destination().settle().map_err(io_error("flush", self.path()))?;
        if !unwritten(&stamp) {
            return Err(ReplicaError::Refused(format!(
                "{} was written to while it was demoted: stop what writes to it, and run the command again",
                self.path().display()
            )));
        }
        self.untouched()?;
        let (epoch, unsure) =
            demotion.since.clone().map_or((None, UnsureSet::new()), |(epoch, unsure)| (Some(epoch), unsure));
        let unsure = match demotion.others_wrote {
            true => Unsure::Everything,
            false => self.keep_unsure(&unsure, "the disk is the source that it was")?,
        };
        let mut role = Role::replica(demotion.term, demotion.lives.clone());
        role.demoted = Some(Demoted {
            since: now(),
            told: None,
            saved: demotion.saved.clone(),
            lives: demotion.lives.clone(),
            complete: demotion.last().is_some(),
            gave_up: demotion.gave_up,
        });
        if let Some(epoch) = &epoch {
            role.counts_as(epoch);
        }
        // Where it was the replica that was found to differ, its history as a source begins with a gap.
        self.forget_verdict()?;
        *self.lineage_mut() = Lineage {
            source: Some(demotion.source),
            epoch,
            state: if epoch.is_some() { State::Exact } else { State::Incomplete },
            size: demotion.size,
            block_size: demotion.block_size,
            stamp: Some(stamp),
            unsure,
            role,
            ..Lineage::new()
        };
        self.take_over()?;
        if !self.is_kept() {
            self.store()?;
        }
        self.refresh()
    }

    /// Keeps in mind which replica is told that nothing more was written to this former source; durable on return. `to` is the name
    /// that its user gives it.
    ///
    /// # Errors
    /// Refused if another one was told, or if it is not a former source.
    pub fn promise(&mut self, to: &str) -> Result<()> {
        let path = self.path().display().to_string();
        let refuse = |why: String| Err(ReplicaError::Refused(why));
        let epoch = self.lineage().epoch.map_or(0, |epoch| epoch.number);
        match self.lineage_mut().role.demoted.as_mut().map(|demoted| &mut demoted.told) {
            None => {
                refuse(format!("{path} is not a former source: run \"dsync demote\" where the source is"))
            }
            Some(Some(told)) if told == to => Ok(()),
            Some(Some(told)) => refuse(format!(
                "{told} was told that it has all of {path}, so it can be promoted without --force, and may have been: the same \
                 cannot be said to {to}. If {told} is lost, \"dsync promote --force\" on {to} loses nothing, as long as {told} was \
                 not written to after epoch {epoch}"
            )),
            Some(told) => {
                *told = Some(to.to_owned());
                self.store()?;
                self.refresh()
            }
        }
    }
}
