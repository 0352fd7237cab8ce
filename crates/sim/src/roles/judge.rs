//! What must be true of the disks of a run of roles, after any step and at the end.

use replica::{ReplicaError, ReplicaOptions, State};
use sync::{Conflict, PromoteOptions, Site as _, SyncError};

use crate::roles::model::{Pages, Place, differing};
use crate::roles::{Checked, Role, Run, short};
use crate::site::open_options;

impl Run {
    /// Takes note of the epochs that there are since the last step.
    pub(crate) fn note_epochs(&mut self) {
        let still = !std::mem::take(&mut self.moving);
        let acting = self.acting.map(|source| (source, self.disks[source].place.clone()));
        for at in 0..self.disks.len() {
            let (lineage, _, history) = self.recorded(at);
            if lineage.is_none_or(|lineage| lineage.role.promoted.is_some()) {
                self.note_history(at, &history, still);
            }
        }
        for at in 0..self.disks.len() {
            let (lineage, ..) = self.recorded(at);
            let Some(lineage) = lineage.filter(|lineage| lineage.role.promoted.is_none()) else { continue };
            let at_epoch = lineage.epoch.map(|epoch| epoch.id);
            let (place, former) = (&mut self.disks[at].place, lineage.role.demoted.is_some());
            let was = place.clone();
            if place.at != at_epoch {
                *place = Place { at: at_epoch, dirty: if former { was.dirty.clone() } else { Pages::new() } };
            }
            if let Some(id) = at_epoch.filter(|id| !self.epochs.knows(*id)) {
                // Its source has ended since: it was that itself, or the one of this step.
                let of =
                    if former { was } else { acting.clone().map(|(_, place)| place).unwrap_or_default() };
                self.epochs.add(id, of.at.filter(|at| *at != id), None, of.dirty);
            }
        }
    }

    fn note_history(&mut self, at: usize, history: &[delta::Epoch], still: bool) {
        let content = still.then(|| self.content(at));
        for epoch in history {
            let place = &mut self.disks[at].place;
            if self.epochs.past(place.at).contains(&epoch.id) {
                // What is after it may be folded into one that is listed later.
                continue;
            }
            if !self.epochs.knows(epoch.id) {
                let dirty = if still { std::mem::take(&mut place.dirty) } else { place.dirty.clone() };
                self.epochs.add(epoch.id, place.at, content.clone(), dirty);
            }
            place.at = Some(epoch.id);
        }
    }

    /// Whether a disk is what it says it is.
    pub(crate) fn look(&mut self, at: usize) -> Checked {
        match self.role(at) {
            Role::Nothing | Role::Unfinished => Ok(()),
            Role::Source => self.look_at_source(at),
            Role::Replica => self.look_at_replica(at),
        }
    }

    /// What was written since each epoch of its history is recorded.
    fn look_at_source(&mut self, at: usize) -> Checked {
        let name = self.disks[at].name;
        let process = self.disks[at].host.process();
        let site = self.site(&process);
        let found = (|| {
            let handle = sync::attach(&site, &self.path(at).to_string_lossy(), &open_options())?;
            let content = self.content(at);
            let mut missed = None;
            for info in handle.history()?.epochs() {
                let Some(held) = self.epochs.content(info.epoch.id) else { continue };
                let Ok((blocks, _)) = handle.written_after(&info.epoch) else { continue };
                let missing = differing(held, &content).into_iter().find(|page| !blocks.get(*page));
                missed = missed.or(missing.map(|page| (info.epoch.number, page)));
            }
            handle.close()?;
            Ok::<_, sync::SyncError>(missed)
        })();
        drop(site);
        self.disks[at].host.state().end(&process);
        self.note_epochs();
        let site = self.disks[at].site;
        if self.scene.group && self.is_promoting(site) {
            return self.check_promoting(site, true, found.is_ok(), "one of its disks is read");
        }
        match found {
            Ok(None) => Ok(()),
            Ok(Some((epoch, page))) => {
                Err(format!("{name} does not know that page {page} was written after its epoch {epoch}"))
            }
            // With its group, of which the demotion is to be completed first.
            Err(SyncError::Conflict(Conflict::Ending { .. })) if self.scene.group => Ok(()),
            Err(error) => Err(format!("the source {name} cannot be opened: {error}")),
        }
    }

    /// It holds what its epoch held, but where it says that it is not sure.
    fn look_at_replica(&mut self, at: usize) -> Checked {
        let name = self.disks[at].name;
        let process = self.disks[at].host.process();
        let opened = self.site(&process).open(&self.path(at), &ReplicaOptions::default());
        let status = opened.map(|replica| replica.status().clone());
        self.disks[at].host.state().end(&process);
        self.note_epochs();
        let status = match status {
            Ok(status) => status,
            // Opening it has completed the promotion of its group.
            Err(_) if self.scene.group && self.role(at) != Role::Replica => return Ok(()),
            // An adoption that was cut off says so until another compares it.
            Err(ReplicaError::Unproven(_)) => return Ok(()),
            Err(error) => return Err(format!("the replica {name} cannot be opened: {error}")),
        };
        self.tell(format!(
            "  {name} says epoch {:?}, ahead {}, {:?}, under way {}, unsure of {}",
            status.epoch.map(|epoch| epoch.number),
            status.ahead,
            status.state,
            status.under_way(),
            status.unsure.bytes()
        ));
        if status.changed.is_some() {
            return Err(format!("nobody changed {name}, yet: {:?}", status.changed));
        }
        let in_place = status.under_way();
        let Some(epoch) = status.epoch.filter(|_| status.state == State::Exact && !in_place) else {
            return Ok(());
        };
        let mut held = self.content(at);
        held.truncate(status.size as usize);
        if status.unsure.is_empty() && !status.ahead && !self.epochs.bind(epoch.id, &held) {
            return Err(format!("{name} says that it is epoch {}, which held something else", epoch.number));
        }
        let sure = |page: &u64| {
            let at = page * crate::machine::inode::PAGE as u64;
            !status.unsure.ranges().any(|range| range.contains(&at))
        };
        let Some(was) = self.epochs.content(epoch.id) else { return Ok(()) };
        match differing(was, &held).into_iter().find(sure) {
            Some(page) => {
                Err(format!("{name} is not at epoch {} in page {page}, where it is sure", epoch.number))
            }
            None => Ok(()),
        }
    }

    /// Nothing fails any more: one disk is the source, and the others follow it.
    pub(crate) fn converge(&mut self) -> Checked {
        for disk in &self.disks {
            disk.host.free_room();
        }
        self.settle();
        for site in 0..2 {
            if self.scene.group {
                self.complete_group(site)?;
            }
        }
        let mut names: Vec<_> = self.disks.iter().map(|disk| disk.name).collect();
        names.sort_unstable();
        names.dedup();
        match self.scene.group {
            false => self.converge_disks(&(0..self.disks.len()).collect::<Vec<_>>())?,
            true => names.into_iter().try_for_each(|name| {
                let of: Vec<_> = (0..self.disks.len()).filter(|at| self.disks[*at].name == name).collect();
                self.converge_disks(&of)
            })?,
        }
        (0..self.disks.len()).try_for_each(|at| self.look(at))
    }

    fn converge_disks(&mut self, disks: &[usize]) -> Checked {
        let force = PromoteOptions { force: true, ..PromoteOptions::default() };
        for at in disks.iter().copied() {
            if self.role(at) == Role::Unfinished && !self.promote(at, &force)? {
                return Err(format!("the promotion of {} cannot be completed", self.disks[at].name));
            }
        }
        let term = |run: &Run, at: usize| run.recorded(at).1.map_or(0, |about| about.term);
        let sources = |run: &Run| {
            let all = disks.iter().copied().filter(|at| run.role(*at) == Role::Source);
            all.max_by_key(|at| term(run, *at))
        };
        if sources(self).is_none() {
            for at in disks.iter().copied() {
                self.leave_alone(at);
                if self.role(at) == Role::Replica && self.promote(at, &force)? {
                    break;
                }
            }
        }
        let Some(primary) = sources(self) else {
            self.table.note("roles: no disk could be promoted");
            return Ok(());
        };
        // Its replicas leave the group with it, and follow it.
        self.leave_group(primary)?;
        for at in disks.iter().copied().filter(|at| *at != primary) {
            self.converge_one(primary, at)?;
        }
        Ok(())
    }

    /// Completes what a crash left of a promotion or a demotion of the group.
    fn complete_group(&mut self, site: usize) -> Checked {
        let disks = [site * 2, site * 2 + 1];
        if self.is_promoting(site) || disks.iter().any(|at| self.role(*at) == Role::Unfinished) {
            self.promote_group(site)?;
        }
        let ended = disks.iter().any(|at| {
            let process = self.disks[*at].host.process();
            let here = self.site(&process);
            let refused = self.role(*at) == Role::Source
                && sync::attach(&here, &self.path(*at).to_string_lossy(), &open_options()).is_err();
            self.disks[*at].host.state().end(&process);
            refused
        });
        if ended && !self.demote_group(site)? {
            return Err(format!("the demotion of the group at site {site} cannot be completed"));
        }
        Ok(())
    }

    /// Takes a source out of its group, if it is in one.
    fn leave_group(&mut self, at: usize) -> Checked {
        let near = self.disks[at].host.process();
        let site = self.site(&near);
        let known = site.source(&self.path(at).to_string_lossy()).map_err(|error| error.to_string())?;
        if let Some((place, _)) = known {
            let folder = site.folder(&place).map_err(|error| error.to_string())?;
            source::leave_in(&*folder).map_err(|error| error.to_string())?;
        }
        drop(site);
        self.disks[at].host.state().end(&near);
        Ok(())
    }

    /// Takes a replica out of its group. One that cannot be opened says why when it is promoted.
    fn leave_alone(&mut self, at: usize) {
        let near = self.disks[at].host.process();
        let site = self.site(&near);
        let _ = site
            .open(&self.path(at), &ReplicaOptions::default())
            .and_then(|mut replica| replica.leave_group());
        drop(site);
        self.disks[at].host.state().end(&near);
    }

    fn converge_one(&mut self, from: usize, to: usize) -> Checked {
        let mut last = String::new();
        for _ in 0..5 {
            let adopt = last.contains("--adopt");
            if adopt {
                self.table.note("roles: adopted at last");
            }
            let mut options = self.sync_options(adopt);
            options.create = last.contains("--create");
            if last.contains("--discard-there") {
                options.give_up = Some(sync::GiveUp::Discard);
                self.end_server(to, true);
            }
            let name = self.disks[to].name;
            self.tell(format!("at last, a sync to {name}{}", if adopt { ", adopt" } else { "" }));
            let result = self.push(from, to, &options, crate::world::Cuts::NEVER);
            self.settle();
            match result {
                Ok(summary) => {
                    self.tell(format!("  {} at epoch {:?}", summary.trust, summary.epoch));
                    self.table.note(format!("roles: at last, {}", short(&summary.trust)));
                    return self.check_synced(from, to);
                }
                Err(error) => last = error.to_string(),
            }
            self.tell(format!("  failed: {last}"));
        }
        Err(format!("nothing fails, and no sync brings {} up to date: {last}", self.disks[to].name))
    }
}
