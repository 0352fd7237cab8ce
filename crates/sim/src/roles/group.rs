//! The commands of a run of roles whose disks are a group: two on each site, `a` and `b`, that are cut, committed, promoted, demoted and
//! rewound together. A record is written to `a` first, and to `b` when it is durable there: so at no common moment is a record on `b`
//! that is not on `a`, nor one on `a` whose predecessor is not on `b`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::Disk as _;
use replica::Intent;
use source::{GroupHandle, SourceMembership};
use sync::{DemoteOptions, LastWord, PromoteOptions, Site as _, SyncError};

use crate::machine::files::{SimFolder, group_folder};
use crate::machine::host::Process;
use crate::roles::{Checked, Role, Run};
use crate::site::open_options;
use crate::site::{GROUP, source_folder};
use crate::world::Cuts;
use crate::write::Write;

/// Disks of a site.
const OF_SITE: usize = 2;

/// The number of the last record on a disk.
fn record_of(content: &[u8]) -> u64 {
    content.get(..8).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default()))
}

/// A record.
fn record(number: u64) -> Write {
    Write::Data { offset: 0, bytes: number.to_le_bytes().repeat(64) }
}

impl Run {
    fn of_site(site: usize) -> [usize; OF_SITE] {
        [site * OF_SITE, site * OF_SITE + 1]
    }

    fn site_of(&self, roles: Role) -> Option<usize> {
        (0..self.disks.len() / OF_SITE)
            .find(|site| Self::of_site(*site).iter().all(|at| self.role(*at) == roles))
    }

    /// True while a promotion of the group at a site is not complete.
    pub(crate) fn is_promoting(&self, site: usize) -> bool {
        let host = &self.disks[site * OF_SITE].host;
        let process = host.process();
        let intent = Intent::read(&SimFolder::new(&process, &group_folder(GROUP)));
        host.state().end(&process);
        matches!(intent, Ok(Some(intent)) if intent.promotes())
    }

    /// Until then nothing serves a disk, reads it or gives it up. `promoting`: it was so before.
    pub(crate) fn check_promoting(
        &mut self,
        site: usize,
        promoting: bool,
        used: bool,
        what: &str,
    ) -> Checked {
        if !promoting {
            return Ok(());
        }
        if Self::of_site(site).into_iter().any(|at| self.role(at) == Role::Source) {
            self.table.note("roles: uses of groups that are half promoted");
        }
        if used {
            return Err(format!("the promotion of the group at site {site} is not complete, and {what}"));
        }
        Ok(())
    }

    /// No server runs of a disk whose group is promoted half.
    pub(crate) fn check_servers(&mut self, site: usize) -> Checked {
        let served = Self::of_site(site).into_iter().any(|at| self.disks[at].server.is_some());
        let promoting = served && self.is_promoting(site);
        self.check_promoting(site, promoting, served, "one of its disks is served")
    }

    fn dir(&self) -> PathBuf {
        self.disks[0].host.scratch.clone()
    }

    /// Makes a group of the sources.
    pub(crate) fn begin_group(&mut self) -> Checked {
        for at in Self::of_site(0) {
            let process = self.disks[at].host.process();
            let folder = SimFolder::new(&process, &source_folder(self.disks[at].name));
            let first = SourceMembership::first(GROUP);
            let joined = source::join_in(&folder, &self.path(at), first, &|_| Ok(Vec::new()));
            self.disks[at].host.state().end(&process);
            joined.map_err(|error| error.to_string())?;
        }
        self.sync_group(0, 1)
    }

    /// One step of a run with a group.
    pub(crate) fn group_step(&mut self) -> Checked {
        let what = self.dice.below(24);
        let site = self.dice.index(self.disks.len() / OF_SITE);
        let of = self.dice.index(OF_SITE);
        let (from, to) = (site * OF_SITE + of, (1 - site) * OF_SITE + of);
        let source = self.site_of(Role::Source).unwrap_or(site);
        let replica = self.site_of(Role::Replica).unwrap_or(site);
        match what {
            0..=5 => self.write_records(source),
            6..=10 => self.sync_group(source, 1 - source)?,
            11 => self.sync(from, to, false)?,
            // One that is ahead of the others, at what was their common epoch.
            12 | 13 if self.role(from) == Role::Source => {
                if self.dice.coin() {
                    self.sync_group(site, 1 - site)?;
                }
                self.mirror(from, to)?;
                self.settle();
                if self.dice.coin() {
                    self.promote_group(1 - site)?;
                }
            }
            14 | 15 => self.promote_group(replica)?,
            16 => {
                self.promote_group(site)?;
            }
            17 => {
                let force = !self.dice.one_in(3);
                self.promote(to, &PromoteOptions { force, ..PromoteOptions::default() })?;
            }
            18 | 19 => {
                self.demote_group(source)?;
            }
            20 | 21 => self.switch_group(source)?,
            22 if self.scene.keeps => self.rewind_group(replica)?,
            23 => self.stop(from),
            _ => {}
        }
        Ok(())
    }

    /// Records, first to `a`.
    pub(crate) fn write_records(&mut self, site: usize) {
        let [a, b] = Self::of_site(site);
        if self.role(a) != Role::Source || self.role(b) != Role::Source || !self.serve(a) || !self.serve(b) {
            return;
        }
        self.moving = true;
        self.table.note("roles: records of groups");
        let count = self.dice.within(1..4);
        self.tell(format!("{count} records at site {site}"));
        for _ in 0..count {
            let (on_a, on_b) = (record_of(&self.content(a)), record_of(&self.content(b)));
            let next = if on_a == on_b { on_a + 1 } else { on_a };
            let also = self.draw_writes(a, 3);
            let wrote = self.write_record(a, next, also) && {
                let also = self.draw_writes(b, 3);
                self.write_record(b, next, also)
            };
            if !wrote {
                break;
            }
        }
    }

    /// Records for both disks of a site, where both are served.
    pub(crate) fn records_for_mirror(&mut self, site: usize) -> Vec<(usize, Write)> {
        let [a, b] = Self::of_site(site);
        let both = self.role(a) == Role::Source && self.role(b) == Role::Source;
        if !both || !self.serve(a) || !self.serve(b) {
            return Vec::new();
        }
        let (on_a, on_b) = (record_of(&self.content(a)), record_of(&self.content(b)));
        let first = if on_a == on_b { on_a + 1 } else { on_a };
        let last = first + self.dice.within(1..5);
        (first..last).flat_map(|number| [(a, record(number)), (b, record(number))]).collect()
    }

    fn write_record(&mut self, at: usize, number: u64, also: Vec<Write>) -> bool {
        let disk = &mut self.disks[at];
        let Some(server) = &disk.server else { return false };
        for write in &also {
            disk.place.dirty.extend(write.pages());
            if write.through(server.source.disk()).is_err() {
                return false;
            }
        }
        disk.place.dirty.insert(0);
        record(number).through(server.source.disk()).is_ok() && server.source.disk().flush().is_ok()
    }

    fn stop_site(&mut self, site: usize) {
        for at in Self::of_site(site) {
            self.end_server(at, true);
        }
    }

    /// What is to be true of the disks of a site that are at a common moment.
    fn check_records(&self, site: usize, what: &str) -> Checked {
        let [a, b] = Self::of_site(site).map(|at| record_of(&self.content(at)));
        if b > a || a > b + 1 {
            return Err(format!("{what}, site {site} has record {a} on a, and record {b} on b"));
        }
        Ok(())
    }

    fn push_group(
        &self,
        near: &Arc<Process>,
        group: &GroupHandle,
        to: usize,
        options: &sync::SyncOptions,
        cuts: Cuts,
    ) -> Result<(sync::GroupSummary, Vec<sync::Summary>), SyncError> {
        let dir = self.dir();
        self.converse(near, to * OF_SITE, cuts, |link, _, _| {
            sync::push_group(group, link, (&dir, "far:dir"), options, &|_, _| {})
        })
    }

    /// A sync of the group.
    pub(crate) fn sync_group(&mut self, from: usize, to: usize) -> Checked {
        self.stop_site(from);
        let options = self.sync_options(false);
        let cuts = self.draw_cuts();
        self.tell(format!("sync of the group from site {from} to site {to}"));
        let promoting = self.is_promoting(from);
        let pairs: Vec<_> = Self::of_site(from).into_iter().zip(Self::of_site(to)).collect();
        let roles = (self.role(pairs[0].0), self.role(pairs[0].1));
        let related = (self.related_groups(&pairs), roles);
        let near = self.disks[from * OF_SITE].host.process();
        let site = self.site(&near);
        let result = (|| {
            let group = sync::attach_group(&site, GROUP, &open_options())?;
            let pushed = self.push_group(&near, &group, to, &options, cuts);
            let closed = group.close();
            let pushed = pushed?;
            closed?;
            Ok::<_, SyncError>(pushed)
        })();
        drop(site);
        self.disks[from * OF_SITE].host.state().end(&near);
        self.tell_result(result.as_ref().map(|(group, _)| format!("common epoch {:?}", group.epoch)));
        self.compare_with_lineage(related, result.as_ref().map(|_| ()));
        self.settle();
        self.table.note("roles: syncs of groups");
        self.check_promoting(from, promoting, result.is_ok(), "it was synced")?;
        if result.is_err() {
            return Ok(());
        }
        for (one, other) in pairs {
            self.disks[other].rewound = false;
            self.check_synced(one, other)?;
        }
        self.apart[to] = false;
        // A disk that was given up to the other site is in the group no more.
        if Self::of_site(from).into_iter().any(|at| self.role(at) != Role::Source) {
            return Ok(());
        }
        self.check_records(to, "after a sync of the group")
    }

    /// A promotion of the group.
    pub(crate) fn promote_group(&mut self, site: usize) -> Checked {
        let force = !self.dice.one_in(3);
        self.tell(format!("promote the group at site {site}{}", if force { ", force" } else { "" }));
        let process = self.disks[site * OF_SITE].host.process();
        let here = self.site(&process);
        let options = PromoteOptions { force, ..PromoteOptions::default() };
        let result = sync::promote_group(&here, &self.dir(), &options);
        drop(here);
        self.disks[site * OF_SITE].host.state().end(&process);
        self.tell_result(result.as_ref().map(|promotion| format!("from common epoch {}", promotion.epoch)));
        self.settle();
        let Ok(promotion) = result else { return Ok(()) };
        self.table.note("roles: promotions of groups");
        for (at, member) in Self::of_site(site).into_iter().zip(&promotion.members) {
            self.calm &= member.bytes_ahead == 0;
            let content = self.content(at);
            let disk = &mut self.disks[at];
            disk.rewound = false;
            if member.released && !disk.words.contains(&content) {
                return Err(format!(
                    "{} took over as planned, and is not what its source was at last",
                    disk.name
                ));
            }
        }
        self.check_records(site, "after a promotion of the group")
    }

    /// A demotion of the group, which another one has succeeded, or not.
    pub(crate) fn demote_group(&mut self, site: usize) -> Result<bool, String> {
        self.stop_site(site);
        let how = DemoteOptions { open: open_options(), ..DemoteOptions::default() };
        self.apart[site] = true;
        self.tell(format!("demote the group at site {site}"));
        let promoting = self.is_promoting(site);
        let near = self.disks[site * OF_SITE].host.process();
        let here = self.site(&near);
        let result = sync::demote_group(&here, GROUP, &how, None, &mut |_| Ok(()), &|_, _| {});
        drop(here);
        self.disks[site * OF_SITE].host.state().end(&near);
        self.tell_result(result.as_ref().map(|done| format!("{} demoted", done.len())));
        self.settle();
        self.check_promoting(site, promoting, result.is_ok(), "it was demoted")?;
        let Ok(summaries) = result else { return Ok(false) };
        self.table.note("roles: demotions of groups");
        match summaries.iter().find(|summary| !summary.again && summary.bytes_unsure != Some(0)) {
            Some(summary) => {
                Err(format!("{} was demoted, and something of it is given up", summary.path.display()))
            }
            None => Ok(true),
        }
    }

    /// A planned switch of the group, up to the promotion.
    fn switch_group(&mut self, from: usize) -> Checked {
        self.stop_site(from);
        let to = 1 - from;
        let options = sync::SyncOptions { existing: true, ..self.sync_options(false) };
        let cuts = self.draw_cuts();
        self.apart[from] = true;
        self.tell(format!("demote the group at site {from}, in favour of site {to}"));
        let promoting = self.is_promoting(from);
        let near = self.disks[from * OF_SITE].host.process();
        let here = self.site(&near);
        let how = DemoteOptions { open: open_options(), ..DemoteOptions::default() };
        let mut told = Vec::new();
        let mut last_sync = |group: &GroupHandle| self.push_group(&near, group, to, &options, cuts);
        let mut afterwards = |demoted: &[sync::DemoteSummary]| {
            for summary in demoted {
                let Some(released) = summary.released else { continue };
                let name = summary.path.file_name().unwrap_or_default().to_os_string();
                let at = Self::of_site(to).into_iter().find(|at| name == self.disks[*at].name);
                let Some(at) = at else { continue };
                told.push(at);
                let word = LastWord { demoted: summary, released, state: &here, own_journal_dir: None };
                self.converse(&near, at, Cuts::NEVER, |link, path: &Path, name| {
                    word.give(link, path, name, &None)
                })?;
            }
            Ok(())
        };
        let result =
            sync::demote_group(&here, GROUP, &how, Some(&mut last_sync), &mut afterwards, &|_, _| {});
        drop(here);
        self.disks[from * OF_SITE].host.state().end(&near);
        for at in told {
            let content = self.content(from * OF_SITE + at % OF_SITE);
            self.disks[at].words.push(content);
        }
        self.tell_result(result.as_ref().map(|done| format!("{} demoted", done.len())));
        self.settle();
        self.check_promoting(from, promoting, result.is_ok(), "it was demoted")?;
        let Ok(summaries) = result else { return Ok(()) };
        self.table.note("roles: planned demotions of groups");
        if summaries.iter().any(|summary| summary.again) || self.role(to * OF_SITE) == Role::Source {
            return Ok(());
        }
        let pairs = Self::of_site(from).into_iter().zip(Self::of_site(to));
        pairs.into_iter().try_for_each(|(one, other)| self.check_synced(one, other))
    }

    /// The replicas of the group are brought back to an earlier common commit.
    fn rewind_group(&mut self, site: usize) -> Checked {
        let process = self.disks[site * OF_SITE].host.process();
        let here = self.site(&process);
        let chosen = self.dice.bits();
        let dir = self.dir();
        let result = (|| {
            let (dir, mut group) = here.group(&dir.join("replica"), GROUP)?;
            let found = here.found(&dir)?;
            let mut replicas = here.members(&group, &dir, true)?;
            let history = |path: &Path| {
                let replica = replicas.iter().find(|replica| replica.path() == path);
                replica.map_or_else(|| Err(replica::ReplicaError::NotAReplica(path.into())), |r| r.history())
            };
            let past = replica::past_of(&dir, GROUP, &here.group_folder(), found, &history)?;
            let moment = past.moments.get(chosen as usize % past.moments.len().max(1)).cloned();
            let Some(moment) = moment else { return Ok(None) };
            group.rewind(&moment, &mut replicas)?;
            Ok::<_, replica::ReplicaError>(Some(moment.epoch.number))
        })();
        drop(here);
        self.disks[site * OF_SITE].host.state().end(&process);
        self.tell(format!("rewind of the group at site {site}: {result:?}"));
        self.settle();
        for at in Self::of_site(site) {
            self.disks[at].rewound |= !matches!(result, Ok(None));
        }
        if !matches!(result, Ok(Some(_))) {
            return Ok(());
        }
        self.table.note("roles: rewinds of groups");
        self.check_records(site, "after a rewind of the group")
    }

    fn site_of_replicas(&self, site: usize) -> bool {
        Self::of_site(site).iter().all(|at| self.role(*at) == Role::Replica)
    }

    /// Replicas that their group takes for those of one moment are that.
    pub(crate) fn look_at_group(&mut self, site: usize) -> Checked {
        if Self::of_site(site).iter().any(|at| self.role(*at) != Role::Replica) {
            return Ok(());
        }
        let process = self.disks[site * OF_SITE].host.process();
        let here = self.site(&process);
        let dir = self.dir();
        let opened = here
            .group(&dir.join("replica"), GROUP)
            .and_then(|(dir, group)| here.members(&group, &dir, false).map(|members| members.len()));
        drop(here);
        self.disks[site * OF_SITE].host.state().end(&process);
        self.settle();
        match opened {
            Ok(_) => self.check_records(site, "although all are said to be at one moment"),
            Err(error) if !self.apart[site] && self.site_of_replicas(site) => Err(format!(
                "only their group has changed the replicas of site {site}, and they are not of one moment: {error}"
            )),
            Err(_) => Ok(()),
        }
    }
}
