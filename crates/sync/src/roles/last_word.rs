//! The last word of a source: one replica is told that there was no more, and can be promoted without losing anything. What is told
//! to one is never told to another, which would be promoted as well.

use std::path::{Path, PathBuf};

use device::Storage;
use link::Link;
use replica::{CommitMode, Released, ReplicaOptions};

use crate::error::SyncError;
use crate::options::Way;
use crate::plan::facts::bookmark;
use crate::roles::demote::DemoteSummary;
use crate::site::Site;
use crate::wire::messages::{COMMITTED, CommitReply, Open, Origin, PLAN, Plan, Primary, expect, open, part};

/// A demoted source that has a last word.
pub struct LastWord<'a> {
    /// What its demotion said.
    pub demoted: &'a DemoteSummary,
    /// Its last epoch.
    pub released: Released,
    /// The state directory of its host.
    pub state: &'a dyn Site,
    /// Where it keeps lineage and journal, as a replica.
    pub own_journal_dir: Option<&'a Path>,
}

impl LastWord<'_> {
    /// Tells the replica at the other end of `link`, which its user calls `name`, that nothing was written to its source after its
    /// last epoch. Returns its term if it was promoted already, from that epoch.
    ///
    /// # Errors
    /// Refused if it is not at that epoch, or was promoted from another one, and if another one was told.
    pub fn give(
        &self,
        link: Link,
        destination: &Path,
        name: &str,
        journal_dir: &Option<PathBuf>,
    ) -> Result<Option<u64>, SyncError> {
        let (source, path, released) = (self.demoted.source, &self.demoted.path, self.released);
        let origin = Origin {
            uuid: source,
            term: released.term,
            began: None,
            lives: self.demoted.lives.clone(),
            group: None,
            now: None,
            place: String::new(),
        };
        let request = Open {
            source: Storage::of(path),
            origin: Some(origin),
            ..Open::new(destination, journal_dir, CommitMode::default())
        };
        let (sender, receiver) = link.split();
        let told = (|| {
            let status = open(&sender, &receiver, request, None)?;
            if let Some(primary) = status.primary {
                // Of a copy of the source, the same number is another epoch.
                let same = primary.common.is_none_or(|common| common == released.epoch);
                return match same && primary.lives.leads_over(&self.demoted.lives) {
                    true => Ok(Some(primary.term)),
                    false => Err(self.went_another_way(destination, &primary)),
                };
            }
            let at = status.replica.epoch.filter(|_| status.replica.source == Some(source));
            if at != Some(released.epoch) {
                let way = match self.told() {
                    Some(told) => format!(", which was {told}"),
                    None => format!(
                        ". If no disk has taken over, \"dsync promote --force {}\" makes this the source again and loses nothing; the same command \
                         then sends what is lacking",
                        path.display()
                    ),
                };
                return Err(SyncError::Refused(format!(
                    "{} is not at epoch {} of {}: give the replica of the last sync{way}",
                    destination.display(),
                    released.epoch,
                    path.display()
                )));
            }
            // First: after a crash the word may have been heard.
            self.promise(&bookmark(name, &status, &Way::default()))?;
            sender.send_json(PLAN, &Plan { release: Some(released), ..Plan::default() })?;
            let _: CommitReply = expect(&receiver, COMMITTED)?.json()?;
            Ok(None)
        })();
        part(sender, &receiver, told)
    }

    /// Why a disk that was promoted from another epoch is not told.
    fn went_another_way(&self, destination: &Path, primary: &Primary) -> SyncError {
        let (path, last) = (self.demoted.path.display(), self.released.epoch.number);
        let there = destination.display();
        let from = match primary.lives.common(&self.demoted.lives, |_, n| n) {
            Some(common) if common.cut() < last => format!(" from epoch {}", common.cut()),
            _ => String::new(),
        };
        let (told, promote) = match self.told() {
            Some(told) => (format!(", of which {told} was told"), format!("promote {told}; or, if none")),
            None => (String::new(), "if no disk".into()),
        };
        SyncError::Refused(format!(
            "{there} was promoted{from} (term {}), and is not known to have epoch {last} of {path}, its last one{told}. Nothing was changed. To go on \
             with what {path} has, {promote} was promoted from that epoch, \"dsync promote --force {path}\" makes this the source again. To go on with \
             {there}, sync from it: that says how to save what was written here, before it overwrites it",
            primary.term
        ))
    }

    /// The replica that was told before.
    fn told(&self) -> Option<String> {
        let options = self.state.opening(self.own_journal_dir);
        self.state.lineage(&self.demoted.path, &options).ok()??.role.demoted?.told
    }

    fn promise(&self, name: &str) -> Result<(), SyncError> {
        // What others have written to it since it ended changes nothing of its last word.
        let options = ReplicaOptions { doubt: true, ..self.state.opening(self.own_journal_dir) };
        Ok(self.state.open(&self.demoted.path, &options)?.promise(name)?)
    }
}
