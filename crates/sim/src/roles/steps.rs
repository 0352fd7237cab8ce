//! The commands of a run of roles, and what must be true of what they say they did.

use std::path::{Path, PathBuf};
use std::time::Duration;

use delta::{Event, Record};
use device::Disk as _;
use replica::ReplicaOptions;
use source::Handle;
use sync::{DemoteOptions, GiveUp, LastWord, MirrorOptions, PromoteOptions, Site as _, SyncError};
use uuid::Uuid;

use crate::machine::inode::PAGE;
use crate::machine::mirror::{self, Ends};
use crate::machine::pipe::far_link;
use crate::roles::model::{Place, differing};
use crate::roles::{Checked, Role, Run, short};
use crate::site::open_options;
use crate::world::Cuts;
use crate::write::Write;

impl Run {
    /// A sync from a source, or from what is none.
    pub(crate) fn sync(&mut self, from: usize, to: usize, adopt: bool) -> Checked {
        self.acting = Some(from);
        self.apart[self.disks[to].site] = true;
        let role = self.role(to);
        let (before, _, _) = self.recorded(to);
        let held = self.content(to);
        let own = self.disks[to].place.clone();
        let demoted = before.as_ref().is_some_and(|lineage| lineage.role.demoted.is_some());
        let mut options = self.sync_options(adopt);
        options.give_up = self.draw_consent(to, demoted);
        let consents = options.give_up.is_some();
        let cuts = self.draw_cuts();
        let (one, other) = (self.disks[from].name, self.disks[to].name);
        let consent = format!("{:?}", options.give_up.as_ref().map(|how| matches!(how, GiveUp::Save(_))));
        self.tell(format!(
            "sync from {one} to {other}{}, saving {consent}",
            if adopt { ", adopt" } else { "" }
        ));
        let site = self.disks[from].site;
        let promoting = self.scene.group && self.is_promoting(site);
        let related = (self.related(from, to).filter(|_| !adopt && !consents), (self.role(from), role));
        let result = self.push(from, to, &options, cuts);
        self.tell_result(result.as_ref().map(|s| format!("{} at epoch {:?}", s.trust, s.epoch)));
        self.compare_with_lineage(related, result.as_ref().map(|_| ()));
        self.settle();
        self.table.note("roles: syncs");
        self.check_promoting(site, promoting, result.is_ok(), "a disk of it was synced")?;
        let summary = match result {
            Ok(summary) => summary,
            Err(error) => {
                let refused = error.class().is_refusal() && role == Role::Source;
                if refused && (self.content(to) != held || self.role(to) != role && !consents) {
                    return Err(format!("refused, yet something changed on {other}: {error}"));
                }
                return Ok(());
            }
        };
        if let (Some(_), Some(GiveUp::Save(file))) = (&summary.given_up, &options.give_up) {
            self.check_saved(to, &held, file)?;
            self.table.note("roles: saved what was given up");
        }
        if role == Role::Source && !adopt && !consents {
            return Err(format!("{other} was a source itself, and a sync to it ended well"));
        }
        if self.role(from) != Role::Source {
            return Err(format!("{one} is not a source, and a sync from it ended well"));
        }
        self.check_synced(from, to)?;
        let past = self.epochs.past(self.disks[from].place.at);
        // What it stood at before is in the past of the source.
        let stood = before.as_ref().and_then(|lineage| lineage.epoch).map(|epoch| epoch.id);
        let since = stood;
        let mut stood: Vec<Uuid> = stood.into_iter().collect();
        stood.retain(|id| self.epochs.knows(*id));
        let lost = !stood.is_empty() && !stood.iter().any(|id| past.contains(id));
        if lost && !adopt && !consents && !self.disks[to].rewound {
            return Err(format!(
                "{other} was on a branch of its own, and a sync from {one} overwrote that unasked"
            ));
        }
        self.disks[to].rewound = false;
        if demoted && !adopt {
            self.disks[to].replaced = true;
            self.table.note(format!("roles: failbacks, {}", short(&summary.trust)));
            self.check_union(from, (&own, since.filter(|_| !consents)), &summary)?;
        }
        Ok(())
    }

    /// What becomes of what only a disk has that is a source, or was one; mostly nothing is said of it.
    fn draw_consent(&mut self, to: usize, demoted: bool) -> Option<GiveUp> {
        if !(demoted || self.role(to) == Role::Source) || self.dice.one_in(3) {
            return None;
        }
        let file = self.disks[to].host.scratch.join(format!("saved-{}-{}", self.seed, self.saved.len()));
        let saves = self.dice.coin();
        self.saved.extend(saves.then(|| file.clone()));
        Some(if saves { GiveUp::Save(file) } else { GiveUp::Discard })
    }

    /// What a disk held is what was in common, with what was saved.
    fn check_saved(&self, at: usize, held: &[u8], file: &Path) -> Checked {
        let name = self.disks[at].name;
        let failed =
            |error: &dyn std::fmt::Display| format!("what was saved of {name} cannot be read: {error}");
        let input = std::fs::File::open(file).map_err(|error| failed(&error))?;
        let mut reader = delta::Reader::new(std::io::BufReader::new(input));
        let base = reader.header().map_err(|error| failed(&error))?.chain.first().copied();
        let Some(base) = base.and_then(|epoch| self.epochs.content(epoch.id)).cloned() else { return Ok(()) };
        let pages = differing(&applied(base, file)?, held);
        if pages.is_empty() {
            return Ok(());
        }
        Err(format!("{name} gave up what it had in pages {pages:?}, and that was not saved"))
    }

    pub(crate) fn check_synced(&self, from: usize, to: usize) -> Checked {
        let (source, replica) = (self.content(from), self.content(to));
        if replica.len() < source.len() || replica[..source.len()] != source[..] {
            let pages = differing(&source, &replica[..source.len().min(replica.len())]);
            let (one, other) = (self.disks[from].name, self.disks[to].name);
            return Err(format!("a sync ended well, and {other} is not {one}: pages {pages:?} differ"));
        }
        Ok(())
    }

    /// A failback moves no more than what was written on either side.
    fn check_union(
        &mut self,
        from: usize,
        (own, since): (&Place, Option<Uuid>),
        summary: &sync::Summary,
    ) -> Checked {
        // Where a failback has replaced blocks, that moves as well.
        if !self.calm || summary.trust != "tracked" || self.disks[from].replaced {
            return Ok(());
        }
        let there = &self.disks[from].place;
        let Some(common) = self.epochs.common(there.at, own.at) else { return Ok(()) };
        if since.is_some_and(|since| self.epochs.past(Some(common)).iter().skip(1).any(|id| *id == since)) {
            // Demoted as of an epoch before it: what commits have replaced there since moves as well.
            return Ok(());
        }
        let sides = [(there.at, &there.dirty), (own.at, &own.dirty)];
        // What was written after the epoch that was taken for the common one is one set.
        let mut union = since.and_then(|since| self.epochs.written(since, own.at)).unwrap_or_default();
        for (at, dirty) in sides {
            union.extend(self.epochs.written(common, at).unwrap_or_default());
            union.extend(dirty);
        }
        self.table.note("roles: failbacks that were counted");
        if summary.blocks_changed > union.len() as u64 {
            return Err(format!(
                "a failback moved {} blocks, and {} were written on both sides",
                summary.blocks_changed,
                union.len()
            ));
        }
        Ok(())
    }

    pub(crate) fn tell_result<E: std::fmt::Display>(&mut self, result: Result<String, E>) {
        self.tell(match result {
            Ok(what) => format!("  {what}"),
            Err(error) => format!("  failed: {error}"),
        });
    }

    /// A promotion of what may be promoted, or not.
    pub(crate) fn promote(&mut self, at: usize, options: &PromoteOptions) -> Result<bool, String> {
        self.apart[self.disks[at].site] = true;
        let (role, name) = (self.role(at), self.disks[at].name);
        let process = self.disks[at].host.process();
        let site = self.site(&process);
        self.tell(format!("promote {name}{}", if options.force { ", force" } else { "" }));
        let result = sync::promote(&site, &self.path(at), options);
        drop(site);
        self.disks[at].host.state().end(&process);
        self.tell_result(
            result
                .as_ref()
                .map(|p| format!("term {}, from epoch {}, released {}", p.term, p.epoch, p.released)),
        );
        self.settle();
        let Ok(promotion) = result else { return Ok(false) };
        self.table
            .note(format!("roles: promotions, {}", if promotion.released { "planned" } else { "forced" }));
        if role == Role::Source {
            return Err(format!("{name} was a source, and was promoted"));
        }
        self.calm &= promotion.bytes_ahead == 0;
        let content = self.content(at);
        let disk = &mut self.disks[at];
        disk.rewound = false;
        if promotion.released && !disk.words.contains(&content) {
            return Err(format!("{name} took over as planned, and is not what its source was at last"));
        }
        Ok(true)
    }

    /// A planned switch, up to the promotion.
    pub(crate) fn switch(&mut self, from: usize, to: usize) -> Checked {
        if !self.dice.one_in(8) {
            self.end_server(from, true);
        }
        self.acting = Some(from);
        let options = sync::SyncOptions { existing: true, ..self.sync_options(false) };
        let cuts = self.draw_cuts();
        let (one, other) = (self.disks[from].name, self.disks[to].name);
        self.tell(format!("demote {one}, in favour of {other}"));
        let near = self.disks[from].host.process();
        let site = self.site(&near);
        let what = self.path(from);
        let how = DemoteOptions { open: open_options(), ..DemoteOptions::default() };
        let mut last_sync = |handle: &Handle| {
            self.converse(&near, to, cuts, |link, path, name| {
                sync::push(handle, link, path, name, &options, &|_, _| {})
            })
        };
        let result = sync::demote(&site, &what.to_string_lossy(), &how, Some(&mut last_sync), &|_, _| {});
        let mut told = None;
        if let Ok((demoted, Some(released))) = result.as_ref().map(|summary| (summary, summary.released)) {
            let word = LastWord { demoted, released, state: &site, own_journal_dir: None };
            told = Some(
                self.converse(&near, to, Cuts::NEVER, |link, path, name| word.give(link, path, name, &None)),
            );
        }
        drop(site);
        self.disks[from].host.state().end(&near);
        self.tell_result(result.as_ref().map(|s| format!("epoch {:?}, again {}", s.epoch, s.again)));
        if let Some(told) = told {
            let content = self.content(from);
            self.disks[to].words.push(content);
            self.tell_result(told.map(|term| format!("{other} was told, term {term:?}")));
        }
        self.settle();
        let Ok(summary) = result else { return Ok(()) };
        self.table.note("roles: planned demotions");
        if summary.again || self.role(to) == Role::Source {
            return Ok(());
        }
        self.check_synced(from, to)
    }

    /// A demotion of a source whose replica was promoted without it, or was not: nothing of it is given up.
    pub(crate) fn demote(&mut self, at: usize) -> Checked {
        if !self.dice.one_in(8) {
            self.end_server(at, true);
        }
        self.acting = Some(at);
        let (how, held) =
            (DemoteOptions { open: open_options(), ..DemoteOptions::default() }, self.content(at));
        let name = self.disks[at].name;
        self.tell(format!("demote {name}"));
        let near = self.disks[at].host.process();
        let site = self.site(&near);
        let result = sync::demote(&site, &self.path(at).to_string_lossy(), &how, None, &|_, _| {});
        drop(site);
        self.disks[at].host.state().end(&near);
        self.tell_result(result.as_ref().map(|s| format!("epoch {:?}", s.epoch)));
        self.settle();
        self.table.note("roles: forced demotions");
        match result {
            Ok(summary)
                if !summary.again && (summary.bytes_unsure != Some(0) || self.content(at) != held) =>
            {
                Err(format!("{name} was demoted, and something of it is given up"))
            }
            _ => Ok(()),
        }
    }

    /// A replica is brought back to a moment that it has kept.
    pub(crate) fn rewind(&mut self, at: usize) -> Checked {
        let process = self.disks[at].host.process();
        let site = self.site(&process);
        let chosen = self.dice.bits();
        let name = self.disks[at].name;
        let result = site.open(&self.path(at), &ReplicaOptions::default()).and_then(|mut replica| {
            let moments = replica.history()?.moments;
            let moment = moments.get(chosen as usize % moments.len().max(1)).cloned();
            let Some(moment) = moment else { return Ok(None) };
            replica.rewind(moment.state)?;
            Ok(Some(moment))
        });
        drop(site);
        self.disks[at].host.state().end(&process);
        let result = result.map(|moment| moment.map(|moment| moment.epoch.number));
        self.tell(format!("rewind of {name}: {result:?}"));
        if matches!(result, Ok(None)) {
            return Ok(());
        }
        // What failed may be completed.
        self.disks[at].rewound = true;
        self.table.note("roles: rewinds");
        Ok(())
    }

    /// A mirror for a while.
    pub(crate) fn mirror(&mut self, from: usize, to: usize) -> Checked {
        if !self.serve(from) {
            return Ok(());
        }
        self.acting = Some(from);
        self.apart[self.disks[to].site] = true;
        let writes = self.mirror_writes(from);
        let every = Duration::from_millis(self.dice.pick(&[1, 1000]));
        let options = mirror::options(self.sync_options(false), every);
        let cuts = self.draw_cuts();
        let (one, other) = (self.disks[from].name, self.disks[to].name);
        self.tell(format!("a mirror of {one} to {other}, {} writes", writes.len()));
        for (at, write) in &writes {
            self.disks[*at].place.dirty.extend(write.pages());
        }
        let disk_of = |at: usize| self.disks[at].server.as_ref().map(|server| server.source.disk().clone());
        let writes: Vec<_> =
            writes.into_iter().filter_map(|(at, write)| Some((disk_of(at)?, write))).collect();
        self.moving = true;
        let result = self.mirror_over((from, to), cuts, &options, move |ended| {
            for (disk, write) in writes {
                // Later records stay in their order.
                if ended() || write.through(&disk).is_err() || disk.flush().is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        self.tell_result(result.map(|s| format!("{} batches, {} syncs", s.batches, s.syncs)));
        self.table.note("roles: mirrors");
        Ok(())
    }

    /// What is written during a mirror, and to which disk: with a group, to the other one of the site as well.
    fn mirror_writes(&mut self, from: usize) -> Vec<(usize, Write)> {
        if self.scene.group {
            return self.records_for_mirror(self.disks[from].site);
        }
        self.draw_writes(from, 20).into_iter().map(|write| (from, write)).collect()
    }

    fn mirror_over(
        &self,
        (from, to): (usize, usize),
        cuts: Cuts,
        options: &MirrorOptions,
        write: impl FnOnce(&dyn Fn() -> bool) + Send,
    ) -> Result<sync::MirrorSummary, SyncError> {
        let (near, far) = (self.disks[from].host.process(), self.disks[to].host.process());
        let (here, there) = (self.site(&near), self.site(&far));
        let what = self.path(from);
        let mut first = Some(cuts);
        let ends = Ends {
            near: &near,
            far: &far,
            line: &mut || {
                let Cuts(out, back) = first.take().unwrap_or(Cuts::NEVER);
                far_link(&near, &far, out, back)
            },
            attach: &mut || sync::attach(&here, &what.to_string_lossy(), &open_options()),
            receive: &|theirs| sync::receive(theirs, &there),
            destination: &self.path(to),
            name: &format!("{0}:{0}", self.disks[to].name),
        };
        let result = mirror::run(ends, options, write);
        drop((here, there));
        self.disks[from].host.state().end(&near);
        self.disks[to].host.state().end(&far);
        result
    }
}

/// A content with the delta in a file applied to it.
fn applied(mut content: Vec<u8>, file: &Path) -> Result<Vec<u8>, String> {
    let failed = |what: String| format!("what was saved cannot be read: {what}");
    let bytes = std::fs::read(PathBuf::from(file)).map_err(|e| failed(e.to_string()))?;
    let mut reader = delta::Reader::new(&bytes[..]);
    while let Some(event) = reader.next().map_err(|e| failed(e.to_string()))? {
        let Event::Frame(frame) = event else { continue };
        let mut data = &frame.data[..];
        for record in &frame.records {
            let range = record.offset() as usize..record.end() as usize;
            if content.len() < range.end {
                content.resize(range.end.next_multiple_of(PAGE), 0);
            }
            match record {
                Record::Data { len, .. } => {
                    content[range].copy_from_slice(&data[..*len as usize]);
                    data = &data[*len as usize..];
                }
                Record::Zero { .. } => content[range].fill(0),
                other => return Err(failed(format!("{other:?}"))),
            }
        }
    }
    Ok(content)
}
