//! Runs in which disks change roles: promotions, planned and forced, demotions, failbacks, rewinds, and several of them one after the
//! other, on two sites or three. Any disk may be the source or a replica, or both at once in the opinion of two of them. After each step the
//! [`Epochs`] tell whether every disk is what it says it is, and whether anything was lost that nobody was told of.
//!
//! In every third run **disks change roles**: two or three disks, each on a host of its own, are written to, synced in any direction,
//! mirrored, promoted (as planned or by force), demoted (in favour of a replica, saving or giving up), rewound, and served, and any of
//! these commands may be killed and is run again. What the roles depend on is a trait (`sync/src/site.rs`), so the commands are those of
//! the product. The model knows what each epoch held and which one came after which, on all branches. After each step: a source names
//! every block in which it differs from any epoch of its history; a replica is its epoch, and each that is as true of a former source,
//! but for its unsure set; what was neither saved nor given up at a demotion is there; what takes over as planned is what its source was
//! at last; no sync overwrites a branch that is not in its source's past, or a source; a failback moves no more than the union of what
//! both sides wrote. In some of these runs each site has two disks, which are a group that is synced, promoted, demoted and rewound
//! together or in part: records are written to one disk first and then to the other, so after each of these commands, and wherever the
//! replicas are said to be at one moment, none is on the second disk that is not on the first. At the end one disk is the source, and all
//! others follow it.

mod group;
mod judge;
mod lineage;
mod model;
mod steps;

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::Disk as _;
use link::Link;
use replica::{Keep, Lineage};
use source::History;
use sync::{PromoteOptions, SyncError, SyncOptions};
use testing::Random;
use uuid::Uuid;

use crate::cell::{Commit, Table};
use crate::failure::{self, Failure};
use crate::machine::files::SimFolder;
use crate::machine::host::{Event, Host, Process};
use crate::machine::inode::PAGE;
use crate::machine::kernel::BLOCK;
use crate::machine::pipe::far_link;
use crate::roles::model::{Epochs, Place};
use crate::site::{Served, SimSite, open_options, source_folder};
use crate::world::{self, Cuts, IMAGES, folder_of};
use crate::write::Write;

/// What a run of roles is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scene {
    /// Disks, each on a host of its own.
    sites: usize,
    /// Disks that are devices.
    devices: [bool; 3],
    /// How replicas commit.
    commit: Commit,
    /// Replicas keep their past.
    pub keeps: bool,
    /// Each site has two disks, which are a group.
    pub group: bool,
    /// How many faults a round has at most.
    faults: u64,
}

impl Scene {
    /// Draws a scene from the dice of a seed.
    pub(crate) fn draw(dice: &mut Random) -> Scene {
        let devices = [dice.one_in(4), dice.one_in(4), dice.one_in(4)];
        let commit = match devices.contains(&true) {
            false => dice.pick(&[Commit::Journal, Commit::Journal, Commit::InPlace, Commit::Reflink]),
            true => dice.pick(&[Commit::Journal, Commit::InPlace]),
        };
        let keeps = commit == Commit::Journal && dice.coin();
        let group = commit == Commit::Journal && dice.coin();
        let devices = if group { [false; 3] } else { devices };
        let sites = if group { 2 } else { dice.within(2..4) as usize };
        Scene { sites, devices, commit, keeps, group, faults: dice.below(4) }
    }
}

impl std::fmt::Display for Scene {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let disks: Vec<_> =
            self.devices[..self.sites].iter().map(|device| if *device { "Device" } else { "File" }).collect();
        let keeps = if self.keeps { ", with a past" } else { "" };
        let group = if self.group { ", groups" } else { "" };
        write!(f, "Roles of {}, {:?}{keeps}{group}", disks.join(" and "), self.commit)
    }
}

/// Does the run of a seed, whose scene was drawn.
pub(crate) fn run(seed: u64, scene: Scene, dice: &mut Random, scratch: &Path) -> Result<Table, Box<Failure>> {
    let mut run = Run::new(seed, scene, dice, scratch);
    let done = std::panic::catch_unwind(AssertUnwindSafe(|| run.all()));
    for file in std::mem::take(&mut run.saved) {
        let _ = std::fs::remove_file(&file).or_else(|_| std::fs::remove_dir_all(file));
    }
    let Some(why) = failure::why(done) else { return Ok(run.table) };
    run.bury();
    Err(Box::new(Failure { seed, cell: scene.to_string(), why, steps: run.told.clone() }))
}

pub(crate) type Checked = Result<(), String>;

/// What a disk is by what is written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// There is nothing.
    Nothing,
    Source,
    Replica,
    /// Its promotion was interrupted.
    Unfinished,
}

/// A disk and its host.
pub(crate) struct Disk {
    pub name: &'static str,
    pub site: usize,
    pub host: Arc<Host>,
    pub server: Option<Served>,
    pub place: Place,
    /// What it held when it was told that there was no more.
    pub words: Vec<Vec<u8>>,
    /// It was brought back to an earlier moment since its last commit.
    pub rewound: bool,
    /// A failback has replaced blocks of it.
    pub replaced: bool,
}

pub(crate) struct Run {
    pub seed: u64,
    pub scene: Scene,
    pub dice: Random,
    pub table: Table,
    pub told: Vec<String>,
    pub disks: Vec<Disk>,
    pub epochs: Epochs,
    /// Deltas of what was given up.
    pub saved: Vec<PathBuf>,
    /// Nothing has failed yet, in the whole run, and all is known that was written.
    pub calm: bool,
    /// Sources were written to in this step.
    pub moving: bool,
    /// A replica of the site was changed without its group since the last common commit.
    pub apart: [bool; 3],
    /// The source that the command of this step is about.
    pub acting: Option<usize>,
}

impl Run {
    fn new(seed: u64, scene: Scene, dice: &mut Random, scratch: &Path) -> Run {
        let size = BLOCK * dice.within(10..48);
        let hosts = ["near", "far", "third"].map(|name| Host::new(name, scratch, dice));
        let places: Vec<(&'static str, usize)> = match scene.group {
            true => vec![("a", 0), ("b", 0), ("a", 1), ("b", 1)],
            false => [("a", 0), ("b", 1), ("c", 2)][..scene.sites].to_vec(),
        };
        let sources = if scene.group { 2 } else { 1 };
        let disks: Vec<Disk> = places
            .into_iter()
            .map(|(name, site)| Disk {
                name,
                site,
                host: hosts[site].clone(),
                server: None,
                place: Place::default(),
                words: Vec::new(),
                rewound: false,
                replaced: false,
            })
            .collect();
        for (at, disk) in disks.iter().enumerate() {
            let mut state = disk.host.state();
            let device = !scene.group && scene.devices[at];
            if at >= sources && !device {
                continue;
            }
            let number = state.make(size, device);
            state.files.link(IMAGES, disk.name, number);
            state.files.sync_names(IMAGES);
            let time = state.tick();
            let mut content = if at < sources { dice.bytes(size as usize) } else { vec![0; size as usize] };
            content[..PAGE].fill(0);
            if let Some(inode) = state.files.inodes.get_mut(&number) {
                inode.write(0, &content, time);
                inode.sync(true);
            }
        }
        let mut table = Table::default();
        table.run();
        Run {
            seed,
            scene,
            dice: dice.fork(),
            table,
            told: Vec::new(),
            disks,
            epochs: Epochs::default(),
            saved: Vec::new(),
            calm: true,
            moving: false,
            acting: None,
            apart: [true; 3],
        }
    }

    pub(crate) fn tell(&mut self, what: impl Into<String>) {
        let steps: Vec<_> = self.disks.iter().map(|disk| disk.host.state().steps.to_string()).collect();
        self.told.push(format!("[{}] {}", steps.join(" "), what.into()));
    }

    pub(crate) fn path(&self, at: usize) -> PathBuf {
        self.disks[at].host.scratch.join(self.disks[at].name)
    }

    pub(crate) fn content(&self, at: usize) -> Vec<u8> {
        let state = self.disks[at].host.state();
        state
            .files
            .find(IMAGES, self.disks[at].name)
            .map(|disk| state.files.content(disk))
            .unwrap_or_default()
    }

    /// A machine as a process of it sees it.
    pub(crate) fn site(&self, process: &Arc<Process>) -> SimSite {
        let served = self.disks.iter().filter_map(|disk| {
            let here = Arc::ptr_eq(&disk.host, &process.host);
            Some((disk.name.to_owned(), disk.server.clone().filter(|_| here)?))
        });
        // No two commands draw the same UUID: what is read and is not a source yet becomes one under it.
        let number = u128::from(self.told.len() as u64) << 8 | u128::from(process.number());
        let fresh = Uuid::from_u128(u128::from(self.seed) << 64 | number);
        SimSite { process: process.clone(), served: served.collect::<BTreeMap<_, _>>(), fresh }
    }

    /// What is written down.
    pub(crate) fn recorded(
        &self,
        at: usize,
    ) -> (Option<Lineage>, Option<source::SourceMetadata>, Vec<delta::Epoch>) {
        let disk = &self.disks[at];
        let process = disk.host.judge();
        let lineage = Lineage::load(&SimFolder::new(&process, &folder_of(disk.name))).ok().flatten();
        let state = SimFolder::new(&process, &source_folder(disk.name));
        let about = source::about_in(&state).ok().flatten();
        let history = about.as_ref().and_then(|_| History::read(&state).ok());
        let epochs = history.map(|history| history.epochs()).unwrap_or_default();
        disk.host.state().end(&process);
        (lineage, about, epochs.into_iter().map(|info| info.epoch).collect())
    }

    pub(crate) fn role(&self, at: usize) -> Role {
        let (lineage, about, _) = self.recorded(at);
        let marked = lineage.as_ref().map(|lineage| lineage.role.promoted);
        match (marked, about) {
            (None, None) => Role::Nothing,
            (None, Some(_)) => Role::Source,
            (Some(None), _) => Role::Replica,
            (Some(Some(mark)), Some(about)) if about.term == mark.term => Role::Source,
            (Some(Some(_)), _) => Role::Unfinished,
        }
    }

    fn is_former(&self, at: usize) -> bool {
        self.recorded(at).0.is_some_and(|lineage| lineage.role.demoted.is_some())
    }

    pub(crate) fn pick(&mut self, role: Role) -> Option<usize> {
        let all: Vec<usize> = (0..self.disks.len()).filter(|at| self.role(*at) == role).collect();
        (!all.is_empty()).then(|| all[self.dice.index(all.len())])
    }

    fn other(&mut self, than: usize) -> usize {
        let (name, group) = (self.disks[than].name, self.scene.group);
        let fits = |at: &usize| *at != than && (!group || self.disks[*at].name == name);
        let all: Vec<usize> = (0..self.disks.len()).filter(fits).collect();
        all[self.dice.index(all.len())]
    }

    fn all(&mut self) -> Checked {
        let names: &[&str] = if self.scene.group { &["a", "b"] } else { &["a"] };
        for name in names {
            let process = self.disks[0].host.process();
            let begun = self.site(&process).open_source(name, true).map(|(source, _)| source.close());
            self.disks[0].host.state().end(&process);
            begun.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        }
        match self.scene.group {
            true => self.begin_group()?,
            false => self.sync(0, 1, false)?,
        }
        for _ in 0..self.dice.within(6..20) {
            self.step()?;
        }
        self.converge()
    }

    /// One step, with faults meanwhile.
    fn step(&mut self) -> Checked {
        if self.scene.group {
            self.plan_faults();
            self.group_step()?;
            return self.end_step();
        }
        let source = self.pick(Role::Source);
        let replica = self.pick(Role::Replica);
        let what = self.dice.below(24);
        self.plan_faults();
        match (what, source, replica) {
            (0..=5, Some(source), _) => self.write(source),
            (6..=10, Some(source), _) => {
                let other = self.other(source);
                let adopt = self.dice.one_in(20);
                self.sync(source, other, adopt)?;
            }
            (11..=12, Some(source), Some(replica)) => self.mirror(source, replica)?,
            (13, Some(source), _) => {
                let how = self.promote_options();
                self.promote(source, &how)?;
            }
            (14..=16, _, Some(replica)) => {
                let how = self.promote_options();
                self.promote(replica, &how)?;
            }
            (17..=18, Some(source), Some(replica)) => self.switch(source, replica)?,
            (19..=20, Some(source), _) => {
                self.demote(source)?;
            }
            (21, _, Some(replica)) if self.scene.keeps => self.rewind(replica)?,
            (22, Some(source), _) => self.stop(source),
            // Of others a source of its own would be made, to which nothing here belongs.
            (23, _, Some(replica)) if self.is_former(replica) => {
                let other = self.other(replica);
                self.sync(replica, other, false)?;
            }
            _ => {}
        }
        if let Some(at) = self.pick(Role::Unfinished).filter(|_| self.dice.coin()) {
            self.promote(at, &PromoteOptions { force: true, ..PromoteOptions::default() })?;
        }
        self.end_step()
    }

    fn promote_options(&mut self) -> PromoteOptions {
        PromoteOptions { force: !self.dice.one_in(3), ..PromoteOptions::default() }
    }

    /// What was planned and has not happened does not happen any more, and every disk is looked at.
    fn end_step(&mut self) -> Checked {
        self.settle();
        if self.scene.group {
            (0..2).try_for_each(|site| self.check_servers(site))?;
        }
        if self.dice.one_in(3) {
            return Ok(());
        }
        for at in 0..self.disks.len() {
            self.look(at)?;
        }
        if self.scene.group {
            (0..2).try_for_each(|site| self.look_at_group(site))?;
        }
        Ok(())
    }

    pub(crate) fn settle(&mut self) {
        for disk in &self.disks {
            disk.host.heal();
        }
        self.bury();
        self.note_epochs();
    }

    fn plan_faults(&mut self) {
        if self.scene.faults == 0 || self.dice.coin() {
            return;
        }
        for _ in 0..self.dice.below(self.scene.faults + 1) {
            let at = self.dice.within(1..160);
            let which = self.dice.index(self.disks.len());
            let steps = self.dice.within(1..60);
            let (what, event) = match self.dice.below(9) {
                0 => ("one failure", Event::Fails),
                1 => ("one failed read", Event::Unreadable),
                2 => ("no space for a while", Event::Full(steps)),
                3 => ("failures for a while", Event::Broken(steps)),
                4 | 5 => ("a kill", Event::Kill),
                _ => ("a power cut", Event::PowerCut),
            };
            self.disks[which].host.plan(at, event);
            let name = self.disks[which].name;
            self.tell(format!("planned: {what} at {name}, {at} steps on"));
            self.calm = false;
        }
    }

    /// Drops what died with its machine or its process.
    pub(crate) fn bury(&mut self) {
        for at in 0..self.disks.len() {
            if self.disks[at].server.as_ref().is_some_and(|server| !server.process.is_alive()) {
                self.end_process(at, false);
            }
            let host = &self.disks[at].host;
            if host.state().is_down {
                host.boot();
            }
            let told = std::mem::take(&mut host.state().told);
            self.told.extend(told);
        }
    }

    /// Ends the server of a disk, if there is one.
    pub(crate) fn end_server(&mut self, at: usize, cleanly: bool) {
        self.end_process(at, cleanly);
        self.bury();
    }

    fn end_process(&mut self, at: usize, cleanly: bool) {
        let Some(Served { process, source, .. }) = self.disks[at].server.take() else { return };
        let _ = world::end_server(&process, source, cleanly);
    }

    /// A server of the source, if one can be started.
    pub(crate) fn serve(&mut self, at: usize) -> bool {
        if self.disks[at].server.is_none() {
            self.start(at);
            self.bury();
        }
        self.disks[at].server.is_some()
    }

    fn start(&mut self, at: usize) {
        let process = self.disks[at].host.process();
        let name = self.disks[at].name;
        let site = self.site(&process);
        // The command asks this first.
        let allowed = sync::refuse_replica(&self.path(at), &site, "");
        let opened = allowed.and_then(|()| Ok(site.open_source(name, false)?));
        match opened {
            Ok((source, reader)) => {
                self.tell(format!("a server of {name} starts"));
                self.disks[at].server = Some(Served { process, source: Arc::new(source), reader });
            }
            Err(error) => {
                self.disks[at].host.state().end(&process);
                self.tell(format!("no server of {name} starts: {error}"));
            }
        }
    }

    pub(crate) fn stop(&mut self, at: usize) {
        let cleanly = self.dice.coin();
        self.calm &= cleanly || self.disks[at].server.is_none();
        let name = self.disks[at].name;
        self.tell(format!("the server of {name} ends, {}", if cleanly { "cleanly" } else { "killed" }));
        self.end_server(at, cleanly);
    }

    pub(crate) fn draw_writes(&mut self, at: usize, most: u64) -> Vec<Write> {
        let len = self.content(at).len() as u64;
        let drawn = (0..self.dice.within(1..most)).map(|_| Write::draw(&mut self.dice, len));
        let group = self.scene.group;
        drawn.filter(|write| !group || write.pages().start > 0).collect()
    }

    fn write(&mut self, at: usize) {
        if !self.serve(at) {
            return;
        }
        let writes = self.draw_writes(at, 10);
        let name = self.disks[at].name;
        self.tell(format!("{} writes to {name}", writes.len()));
        let flush = self.dice.coin();
        let disk = &mut self.disks[at];
        let Some(server) = &disk.server else { return };
        self.moving = true;
        for write in writes {
            disk.place.dirty.extend(write.pages());
            let _ = write.through(server.source.disk());
        }
        if flush {
            let _ = server.source.disk().flush();
        }
        self.table.note("roles: writes");
    }

    /// A conversation about a disk, with `say` at the other end.
    pub(crate) fn converse<T>(
        &self,
        near: &Arc<Process>,
        to: usize,
        cuts: Cuts,
        say: impl FnOnce(Link, &Path, &str) -> Result<T, SyncError>,
    ) -> Result<T, SyncError> {
        let far = self.disks[to].host.process();
        let (here, there) = far_link(near, &far, cuts.0, cuts.1);
        let site = self.site(&far);
        let name = format!("{0}:{0}", self.disks[to].name);
        let path = self.path(to);
        let said = std::thread::scope(|scope| {
            let site = &site;
            scope.spawn(move || sync::receive(there, site));
            say(here, &path, &name)
        });
        self.disks[to].host.state().end(&far);
        said
    }

    pub(crate) fn sync_options(&mut self, adopt: bool) -> SyncOptions {
        let keep = Keep { last: 4, ..Keep::default() };
        SyncOptions {
            commit: self.scene.commit.into(),
            way: sync::Way::Far,
            adopt,
            overwrite: adopt,
            keep: self.scene.keeps.then_some(keep),
            ..SyncOptions::default()
        }
    }

    pub(crate) fn draw_cuts(&mut self) -> Cuts {
        if self.scene.faults == 0 || !self.dice.one_in(10) {
            return Cuts::NEVER;
        }
        self.calm = false;
        let left = 1 << self.dice.below(18);
        self.tell(format!("planned: the line is cut after {left} bytes"));
        if self.dice.coin() { Cuts(left, u64::MAX) } else { Cuts(u64::MAX, left) }
    }

    pub(crate) fn push(
        &self,
        from: usize,
        to: usize,
        options: &SyncOptions,
        cuts: Cuts,
    ) -> Result<sync::Summary, SyncError> {
        let near = self.disks[from].host.process();
        let site = self.site(&near);
        let done = (|| {
            let handle = sync::attach(&site, &self.path(from).to_string_lossy(), &open_options())?;
            let pushed = self.converse(&near, to, cuts, |link, path, name| {
                sync::push(&handle, link, path, name, options, &|_, _| {})
            });
            let closed = handle.close();
            let pushed = pushed?;
            closed?;
            Ok(pushed)
        })();
        self.disks[from].host.state().end(&near);
        done
    }
}

/// The first word of a text.
pub(crate) fn short(text: &str) -> &str {
    text.split([' ', ',', ':']).next().unwrap_or_default()
}
