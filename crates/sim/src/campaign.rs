//! A run: rounds of writing and commands with faults, and the conditions that must hold after each.

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use device::Disk as _;
use replica::{ReplicaError, State, Status};
use source::SourceError;
use sync::{Class, Method, SyncError, Unreadable};
use testing::Random;

use crate::cell::{Cell, Change, Commit, Origin, Table, Target, Verb, Way};
use crate::failure::{self, Failure};
use crate::machine::host::{Event, lock};
use crate::machine::inode::content_of;
use crate::machine::kernel::BLOCK;
use crate::roles::{self, Scene};
use crate::world::{Cuts, DISK, IMAGES, SPARE, World};
use crate::write::Write;

/// The cell of a seed.
pub fn cell(seed: u64) -> String {
    let mut dice = Random::seeded(seed);
    match changes_roles(seed) {
        true => Scene::draw(&mut dice).to_string(),
        false => Cell::draw(&mut dice).to_string(),
    }
}

/// True if disks change roles in the run of this seed.
fn changes_roles(seed: u64) -> bool {
    seed % 3 == 0
}

/// Earlier epochs for which trails were looked at, in all runs.
pub static TRAILS: AtomicU64 = AtomicU64::new(0);

/// Does the run of a seed.
///
/// # Errors
/// What went wrong.
pub fn run(seed: u64, scratch: &Path) -> Result<Table, Failure> {
    run_with(seed, scratch, false)
}

/// Does the run of a seed where the tracker of a live disk has a fault: it forgets what is in flight at a checkpoint. A campaign that does
/// not find that finds nothing.
///
/// # Errors
/// What went wrong.
pub fn canary(seed: u64, scratch: &Path) -> Result<Table, Failure> {
    run_with(seed, scratch, true)
}

fn run_with(seed: u64, scratch: &Path, forgetful: bool) -> Result<Table, Failure> {
    let mut dice = Random::seeded(seed);
    if changes_roles(seed) {
        let scene = Scene::draw(&mut dice);
        return roles::run(seed, scene, &mut dice, scratch).map_err(|failure| *failure);
    }
    let cell = Cell::draw(&mut dice);
    let world = World::new(cell, &mut dice, scratch);
    world.near.state().trackers.values_mut().for_each(|tracker| tracker.forgetful = forgetful);
    let pipes = dice.one_in(16) && !cell.origin.is_live();
    let mut run = Run {
        world,
        table: Table::default(),
        faults: dice.below(4),
        last_steps: 200,
        lagging: false,
        pipes,
        backups: Vec::new(),
        known_size: None,
        shrunk: Shrunk::No,
    };
    run.table.run();
    let done = std::panic::catch_unwind(AssertUnwindSafe(|| run.all()));
    let Some(why) = failure::why(done) else { return Ok(run.table) };
    run.world.bury();
    Err(Failure { seed, cell: cell.to_string(), why, steps: run.world.told.clone() })
}

struct Run {
    world: World,
    table: Table,
    /// How many faults a round has at most.
    faults: u64,
    /// Steps of the last round.
    last_steps: u64,
    /// What was extracted may not have arrived.
    lagging: bool,
    /// Nothing but extracts and merges.
    pipes: bool,
    /// What replicas held once, to be copied over them.
    backups: Vec<Vec<u8>>,
    /// The source's size when a command ended well last.
    known_size: Option<u64>,
    shrunk: Shrunk,
}

/// Whether the source is smaller than its state knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shrunk {
    No,
    /// No command with consent to that has succeeded.
    Unasked,
    /// And somebody may have agreed to that: a command that was allowed to read it failed.
    Perhaps,
}

type Checked = Result<(), String>;

/// A replica's content and lineage.
type Digest = (Option<u128>, Vec<(String, Vec<u8>)>);

fn is_full(error: &ReplicaError) -> bool {
    match error {
        ReplicaError::Full { .. } => true,
        ReplicaError::Io { error, .. } => error.kind() == std::io::ErrorKind::StorageFull,
        _ => false,
    }
}

fn adopts(error: &SyncError) -> bool {
    let said = error.to_string();
    said.contains("--adopt") || said.contains("--discard-there")
}

impl Run {
    fn all(&mut self) -> Checked {
        self.world.add_replica();
        let rounds = self.world.dice.within(3..9);
        for round in 0..rounds {
            if round > 1 && !self.pipes && self.world.dice.one_in(8) && self.world.replicas.len() < 2 {
                self.world.add_replica();
            }
            let which = self.world.dice.below(self.world.replicas.len() as u64) as usize;
            self.round(which, round == 0)?;
            if self.world.dice.one_in(400) && !self.world.cell.origin.is_live() {
                self.age()?;
            }
        }
        self.converge()
    }

    /// One round: a change of the source, then a command, with faults meanwhile.
    fn round(&mut self, which: usize, first: bool) -> Checked {
        self.world.use_state_of(which);
        self.prepare()?;
        if !first {
            let change = self.change();
            self.table.note(format!("change {change:?}"));
            self.plan_fault_of_writer();
            self.write(change);
            self.world.bury();
            self.others(which);
        }
        let verb = self.draw_verb(first);
        self.table.round(self.world.cell, verb);
        let before = self.digest(which).filter(|_| verb != Verb::Both);
        let from = lock(&self.world.moments).count().saturating_sub(1);
        let (cuts, faultless) = self.plan_faults(which, verb);
        let history = self.history_len();
        self.world.allow_shrink = match self.shrunk {
            Shrunk::No => false,
            Shrunk::Unasked => self.world.dice.one_in(2),
            Shrunk::Perhaps => true,
        };
        let result = match verb {
            Verb::Sync => self.sync(which, cuts),
            Verb::Both => self.syncs(which, cuts, from)?,
            Verb::Mirror => self.mirror(which, cuts),
            Verb::Extract => self.extract(which),
            Verb::Verify => self.verify(which, cuts),
        };
        self.world.tell(match &result {
            Ok(what) => format!("  {what}"),
            Err(error) => format!("  failed ({:?}): {error}", error.class()),
        });
        let asked = matches!(result, Err(SyncError::Source(SourceError::Shrank { .. })));
        self.ask_for_shrink(result.is_ok(), asked)?;
        self.shrunk = match &result {
            Ok(_) if verb == Verb::Verify && self.shrunk != Shrunk::No => Shrunk::Perhaps,
            Ok(_) => Shrunk::No,
            // A failed command has not agreed: only an epoch records consent.
            Err(_) if self.history_len() == history => self.shrunk,
            Err(_) if self.world.allow_shrink => Shrunk::Perhaps,
            Err(_) => self.shrunk,
        };
        if result.is_ok() && self.shrunk == Shrunk::No {
            self.known_size = Some(self.world.size());
        }
        let steps = self.world.near.state().steps;
        self.last_steps = (self.last_steps + steps.min(2000)) / 2;
        for host in [&self.world.near, &self.world.far] {
            host.heal();
        }
        self.world.bury();
        self.world.replicas[which].meanwhile = false;
        if let Err(error) = &result {
            let told = error.class() == Class::Changed;
            self.world.replicas[which].noticed |= told && faultless && self.has_room();
        }
        if let (Err(error), Some(before)) = (&result, before) {
            // What passes over a live disk sent is kept.
            let passes = matches!(error, SyncError::Source(SourceError::Restless(_) | SourceError::Track(_)));
            let passes = passes || self.world.replicas[which].touched;
            if faultless
                && !passes
                && error.class().is_refusal()
                && self.digest(which).as_ref() != Some(&before)
            {
                return Err(format!("refused, but something changed at the replica: {error}"));
            }
        }
        self.world.replicas[which].settled = false;
        if self.world.dice.one_in(3) {
            return Ok(());
        }
        self.check(which, from, &result)
    }

    /// There is space to record what was noticed.
    fn has_room(&self) -> bool {
        self.world.far.state().files.room.is_none()
    }

    fn history_len(&self) -> Option<u64> {
        let state = self.world.near.state();
        Some(state.files.len(state.files.find(&self.world.state, "history")?))
    }

    /// A served source needs its server most of the time.
    fn prepare(&mut self) -> Checked {
        if self.world.cell.origin.is_live() {
            return Ok(());
        }
        let stops = self.world.dice.one_in(4);
        if self.world.server.is_some() && stops {
            let cleanly = self.world.dice.one_in(2);
            self.world.tell(format!("the server stops, {}", if cleanly { "cleanly" } else { "killed" }));
            let stopped = self.world.stop(cleanly);
            self.world.moment();
            if let Err(error) = stopped {
                self.world.tell(format!("  {error}"));
            }
            if self.world.dice.one_in(2) {
                self.tamper_source();
            }
        }
        if self.world.server.is_none() && !self.world.dice.one_in(4) {
            self.serve()?;
        }
        Ok(())
    }

    fn serve(&mut self) -> Checked {
        self.world.tell("a server starts");
        self.world.allow_shrink = self.shrunk == Shrunk::Perhaps;
        let mut served = self.world.serve();
        self.ask_for_shrink(served.is_ok(), matches!(served, Err(SourceError::Shrank { .. })))?;
        if served.is_err() && self.world.near.state().files.room.is_some() {
            self.world.tell("  no room to serve: some is freed");
            self.world.near.free_room();
            served = self.world.serve();
        }
        if served.is_err() && self.shrunk == Shrunk::Unasked {
            self.world.allow_shrink = true;
            served = self.world.serve();
        }
        // A server continues with the smaller disk at once.
        (self.shrunk, self.known_size) = (Shrunk::No, Some(self.world.size()));
        served.map_err(|error| format!("no server starts: {error}"))
    }

    /// A smaller source is refused until the user has agreed, once and for all.
    fn ask_for_shrink(&mut self, done: bool, asked: bool) -> Checked {
        match self.shrunk {
            Shrunk::No if asked => Err("what was agreed to, or did not shrink, is asked for again".into()),
            Shrunk::Unasked if done && !self.world.allow_shrink => {
                Err("a smaller source was accepted without consent".into())
            }
            _ => Ok(()),
        }
    }

    /// Another program writes to an image that is not served.
    fn tamper_source(&mut self) {
        let len = self.world.size();
        let offset = self.world.dice.below(len / 512) * 512;
        let byte = self.world.dice.bits() as u8;
        self.world.tell(format!("another program writes byte {byte} to the source at {offset}"));
        {
            let disk = self.world.disk();
            let mut state = self.world.near.state();
            let time = state.later();
            if let Some(inode) = state.files.inodes.get_mut(&disk) {
                inode.write(offset, &[byte; 512], time);
                inode.sync(true);
            }
        }
        self.world.moment();
    }

    fn change(&mut self) -> Change {
        let mut all = vec![
            Change::Nothing,
            Change::Scattered,
            Change::Scattered,
            Change::Scattered,
            Change::Dense,
            Change::Moved,
            Change::Trimmed,
        ];
        if self.world.cell.origin != Origin::Bpf && self.world.cell.origin != Origin::Dm {
            all.extend([Change::Grown, Change::Shrunk]);
        }
        let at = self.world.dice.below(all.len() as u64) as usize;
        all[at]
    }

    fn write(&mut self, change: Change) {
        let len = self.world.size();
        let dice = &mut self.world.dice;
        let writes: Vec<Write> = match change {
            Change::Nothing => Vec::new(),
            Change::Scattered => (0..dice.within(1..12)).map(|_| Write::draw(dice, len)).collect(),
            Change::Dense => (0..len / BLOCK)
                .filter_map(|block| {
                    let bytes = vec![dice.bits() as u8; BLOCK as usize];
                    (!dice.one_in(4)).then_some(Write::Data { offset: block * BLOCK, bytes })
                })
                .collect(),
            Change::Moved => {
                let content = self.world.content();
                let dice = &mut self.world.dice;
                let part = dice.within(1..len / 2);
                let (from, to) = (dice.below(len - part), dice.below(len - part));
                vec![Write::Data {
                    offset: to,
                    bytes: content[from as usize..(from + part) as usize].to_vec(),
                }]
            }
            Change::Trimmed => (0..dice.within(1..4)).map(|_| Write::trim(dice, len)).collect(),
            Change::Grown | Change::Shrunk => return self.resize(change == Change::Grown),
        };
        if !writes.is_empty() {
            self.world.tell(format!("{} writes ({change:?})", writes.len()));
        }
        let flush = self.world.dice.one_in(2);
        if self.world.cell.origin.is_live() {
            let disk = self.world.disk();
            for write in writes {
                let mut state = self.world.near.state();
                write.queue(&mut state, disk);
                state.end_writes(disk);
                drop(state);
                self.world.moment();
            }
            let mut state = self.world.near.state();
            if flush {
                if let Some(inode) = state.files.inodes.get_mut(&disk) {
                    inode.sync(true);
                }
            }
            if self.world.dice.one_in(3) {
                state.tracker(disk).idle();
            }
        } else if let Some(server) = &self.world.server {
            for write in writes {
                let _ = write.through(server.source.disk());
                self.world.moment();
            }
            if flush {
                let _ = server.source.disk().flush();
            }
            if self.world.dice.one_in(3) {
                let _ = server.source.disk().sweep(0);
            }
        } else if !writes.is_empty() {
            self.tamper_source();
        }
    }

    fn resize(&mut self, grows: bool) {
        if self.world.dice.one_in(2) {
            return;
        }
        let len = self.world.size();
        let dice = &mut self.world.dice;
        // Of any size, not only of whole blocks.
        let odd = if dice.one_in(2) { 512 * dice.within(1..BLOCK / 512) } else { 0 };
        let whole = len / BLOCK * BLOCK;
        let wanted = if grows {
            (whole + BLOCK * dice.within(1..20)).min(200 * BLOCK) + odd
        } else {
            (whole - BLOCK * dice.within(1..8)).max(8 * BLOCK) + odd
        };
        self.resize_to(wanted);
    }

    /// The source is resized while it is not served.
    fn resize_to(&mut self, wanted: u64) {
        if self.world.stop(true).is_err() {
            return;
        }
        self.world.moment();
        let len = self.world.size();
        // A device at the other end has a fixed size.
        let most =
            self.world.replicas.iter().enumerate().filter(|_| self.world.cell.target == Target::Device);
        let most = most.filter_map(|(which, _)| self.world.raw_size(which)).min();
        let wanted = wanted.min(most.unwrap_or(u64::MAX)).min(len + SPARE);
        self.world.tell(format!("the source is resized from {len} to {wanted}"));
        let disk = self.world.disk();
        let mut state = self.world.near.state();
        let time = state.later();
        if let Some(inode) = state.files.inodes.get_mut(&disk) {
            inode.resize(wanted, time);
            inode.sync(true);
        }
        drop(state);
        self.world.moment();
        self.shrunk = match self.known_size {
            Some(known) if wanted < known && self.shrunk != Shrunk::Perhaps => Shrunk::Unasked,
            _ if wanted < len || self.shrunk != Shrunk::No => Shrunk::Perhaps,
            _ => Shrunk::No,
        };
    }

    /// More epochs pass than a history keeps, and the source grows meanwhile.
    fn age(&mut self) -> Checked {
        const KEPT: u64 = 512;
        self.table.note("histories of more than 512 epochs");
        self.world.near.free_room();
        for part in 0..2 {
            if self.world.server.is_none() {
                self.serve()?;
            }
            let count = KEPT / 2 + self.world.dice.below(20);
            self.world.tell(format!("{count} epochs pass"));
            let len = self.world.size();
            let Some(server) = &self.world.server else { break };
            for _ in 0..count {
                let _ = Write::draw(&mut self.world.dice, len).through(server.source.disk());
                self.world.near.state().pass(1_000_000_000);
                server.source.checkpoint(false).map_err(|error| format!("no checkpoint: {error}"))?;
            }
            self.world.moment();
            if part == 0 {
                self.resize_to(len + 4 * BLOCK);
            }
        }
        Ok(())
    }

    /// Actions of other programs between rounds.
    fn others(&mut self, which: usize) {
        if self.world.dice.one_in(4) {
            self.backups.extend(self.world.raw(which));
        }
        match self.world.dice.below(20) {
            0 | 2 => self.tamper_replica(which),
            3 => self.copy_over(which),
            4 => self.rot(),
            1 => {
                let far = self.world.dice.one_in(2);
                self.world.tell(format!(
                    "the power goes at the {} end, at rest",
                    if far { "replica's" } else { "source's" }
                ));
                let host = if far { self.world.far.clone() } else { self.world.near.clone() };
                let process = host.process();
                host.plan(0, Event::PowerCut);
                let _ = device::Folder::sync(&crate::machine::files::SimFolder::new(&process, "nothing"));
                self.world.bury();
            }
            _ => {}
        }
    }

    fn tamper_replica(&mut self, which: usize) {
        let Some(size) = self.world.raw_size(which).filter(|size| *size >= 512) else { return };
        let offset = self.world.dice.below(size / 512) * 512;
        let byte = self.world.dice.bits() as u8;
        let name = self.world.replicas[which].name.clone();
        self.world.far.state().foreign_write(&name, offset, &[byte; 512], true);
        self.world.bury();
        if self.world.dice.one_in(2) {
            // A rebooted host has not seen the write.
            self.world.tell("the replica's machine is switched off and on");
            self.world.far.restart();
            self.world.bury();
        }
    }

    /// An older copy of the replica is put over it.
    fn copy_over(&mut self, which: usize) {
        if self.backups.is_empty() || self.world.cell.target == Target::Device {
            return;
        }
        let backup = self.backups[self.world.dice.below(self.backups.len() as u64) as usize].clone();
        let name = self.world.replicas[which].name.clone();
        let mut state = self.world.far.state();
        let Some(number) = state.files.find(IMAGES, &name) else { return };
        let time = state.later();
        if let Some(inode) = state.files.inodes.get_mut(&number) {
            inode.resize(backup.len() as u64, time);
            inode.write(0, &backup, time);
            inode.sync(true);
        }
        drop(state);
        self.world.tell(format!("an older copy is put over {name}"));
        self.world.replicas[which].touched = true;
    }

    /// A byte of the source's history is corrupted.
    fn rot(&mut self) {
        if self.world.server.is_some() {
            return;
        }
        let at = self.world.dice.bits();
        let mut state = self.world.near.state();
        let Some(number) = state.files.find(&self.world.state, "history") else { return };
        let mut content = state.files.content(number);
        // The first bytes say that it is one.
        if content.len() < 16 {
            return;
        }
        let at = 8 + at as usize % (content.len() - 8);
        content[at] ^= 0x10;
        if let Some(inode) = state.files.inodes.get_mut(&number) {
            inode.put(&content);
        }
        let len = content.len();
        drop(state);
        self.world.tell(format!("byte {at} of {len} of the history rots"));
        for known in &mut self.world.replicas {
            known.adopting = true;
        }
    }

    fn draw_verb(&mut self, first: bool) -> Verb {
        let served = self.world.server.is_some();
        if self.pipes {
            return Verb::Extract;
        }
        match self.world.dice.below(12) {
            0 | 1 if served => Verb::Mirror,
            2 | 3 if !first => Verb::Extract,
            4 if !first && !self.world.cell.origin.is_live() => Verb::Verify,
            5 if self.shrunk == Shrunk::No => Verb::Both,
            _ => Verb::Sync,
        }
    }

    /// Faults while the source is written to.
    fn plan_fault_of_writer(&mut self) {
        if self.faults == 0 || self.world.server.is_none() || !self.world.dice.one_in(4) {
            return;
        }
        let dice = &mut self.world.dice;
        let at = dice.within(1..25);
        let (what, event) = match dice.below(4) {
            0 | 1 => ("one failure", Event::Fails),
            2 => ("a kill", Event::Kill),
            _ => ("a power cut", Event::PowerCut),
        };
        self.world.near.plan(at, event);
        self.world.tell(format!("planned: {what} at near, {at} steps on"));
    }

    /// Faults of this round.
    fn plan_faults(&mut self, which: usize, verb: Verb) -> (Cuts, bool) {
        let faults = if self.world.dice.one_in(3) { 0 } else { self.world.dice.below(self.faults + 1) };
        let mut cuts = Cuts::NEVER;
        for _ in 0..faults {
            let dice = &mut self.world.dice;
            let at = dice.within(1..self.last_steps.max(20) * 3 / 2);
            let far = dice.one_in(2);
            let steps = dice.within(1..60);
            let (what, event) = match dice.below(10) {
                0 | 1 => ("one failure", Event::Fails),
                2 => ("one failed read", Event::Unreadable),
                3 => ("no space for a while", Event::Full(steps)),
                4 => ("failures for a while", Event::Broken(steps)),
                5 | 6 => ("a kill", Event::Kill),
                7 | 8 => ("a power cut", Event::PowerCut),
                _ => {
                    let left = 1 << dice.below(20);
                    cuts = if far { Cuts(u64::MAX, left) } else { Cuts(left, u64::MAX) };
                    self.world.tell(format!(
                        "planned: the line is cut after {left} bytes, {}",
                        if far { "back" } else { "out" }
                    ));
                    continue;
                }
            };
            let host = if far { &self.world.far } else { &self.world.near };
            host.plan(at, event);
            let name = host.name;
            self.world.tell(format!("planned: {what} at {name}, {at} steps on"));
        }
        if self.faults > 0 && self.world.dice.one_in(10) {
            self.limit_room();
        }
        for _ in 0..2 {
            if self.world.dice.one_in(12) {
                self.plan_tampering(which);
            }
        }
        if self.world.cell.origin.is_live() && verb != Verb::Mirror {
            self.plan_writes();
        }
        (cuts, faults == 0)
    }

    /// A file system runs out of space, in this round or to the end.
    fn limit_room(&mut self) {
        let size = self.world.size();
        let dice = &mut self.world.dice;
        let room = match dice.below(3) {
            0 => dice.below(8 << 10),
            1 => dice.below(64 << 10),
            _ => dice.below(size * 2),
        };
        let (far, stays) = (!dice.one_in(4), dice.one_in(2));
        let host = if far { self.world.far.clone() } else { self.world.near.clone() };
        (host.state().files.room, host.state().files.room_stays) = (Some(room), stays);
        let how_long = if stays { "from now on" } else { "for a round" };
        self.world.tell(format!("{room} bytes of room are left at {} {how_long}", host.name));
        self.table.note(format!("room is short {how_long}"));
    }

    /// Another program writes to the replica during a command, or just after.
    fn plan_tampering(&mut self, which: usize) {
        let Some(size) = self.world.raw_size(which).filter(|size| *size >= 512) else { return };
        let dice = &mut self.world.dice;
        let (at, late) = (dice.within(1..self.last_steps.max(20)), dice.one_in(2));
        let offset = dice.below(size / 512) * 512;
        let name = self.world.replicas[which].name.clone();
        self.world.tell(format!("planned: another program writes to {name} at {offset}, {at} steps on"));
        self.world.replicas[which].meanwhile = true;
        let act = move |state: &mut crate::machine::host::State| {
            state.foreign_write(&name, offset, &[0xEE; 512], late)
        };
        self.world.far.plan(at, Event::Does(Box::new(act)));
    }

    /// Writers of a live disk continue while it is read.
    fn plan_writes(&mut self) {
        if self.world.dice.one_in(2) {
            return;
        }
        let disk = self.world.disk();
        let len = self.world.size();
        let count = self.world.dice.within(1..8);
        self.world.tell(format!("planned: {count} writes meanwhile"));
        if self.world.dice.one_in(8) {
            let dice = &mut self.world.dice;
            let at = dice.within(1..self.last_steps.max(20));
            let epoch = uuid::Uuid::from_u128(u128::from(dice.bits()));
            self.world.tell(format!("planned: another program takes the record, {at} steps on"));
            let act = move |state: &mut crate::machine::host::State| {
                state.tracker(disk).take_record(epoch);
                state.told.push("another program takes the record".into());
            };
            self.world.near.plan(at, Event::Does(Box::new(act)));
        }
        let slow = self.world.dice.one_in(3);
        for _ in 0..count {
            let dice = &mut self.world.dice;
            let at = dice.within(1..self.last_steps.max(20));
            // A slow one is in flight over whole checkpoints.
            let lands = at + if slow { dice.within(60..200) } else { dice.below(12) };
            let write = Write::draw(dice, len);
            let idles = dice.one_in(4);
            let moments = self.world.moments.clone();
            self.world.near.plan(at, Event::Does(Box::new(move |state| write.queue(state, disk))));
            let landing = move |state: &mut crate::machine::host::State| {
                state.end_writes(disk);
                lock(&moments).add(state.files.content_name(disk));
                if idles {
                    state.tracker(disk).idle();
                }
            };
            self.world.near.plan(lands, Event::Does(Box::new(landing)));
        }
    }

    fn sync(&mut self, which: usize, cuts: Cuts) -> Result<String, SyncError> {
        let how = match self.world.dice.below(10) {
            0 => Some(Method::Compare),
            1 if !self.world.cell.origin.is_live() => Some(Method::Rolling),
            2 => Some(Method::Copy),
            _ => None,
        };
        let mut options = self.world.options(how);
        options.adopt = self.world.replicas[which].touched && self.world.dice.one_in(2);
        options.overwrite = options.adopt;
        options.compress = self.world.dice.one_in(8).then_some(1);
        let unread = !self.world.cell.origin.is_live() && self.world.dice.one_in(6);
        if unread {
            options.unreadable = Unreadable::LeaveOut;
            self.world.spoil();
            self.table.note("a source that cannot be read in part");
        }
        self.world.replicas[which].adopting |= options.adopt;
        self.table.note(format!("method {how:?}"));
        self.world.tell(format!(
            "sync of {} ({how:?}{})",
            self.world.replicas[which].name,
            if options.adopt { ", adopt" } else { "" }
        ));
        let writing = self.write_meanwhile();
        let result = std::thread::scope(|scope| {
            let world = &self.world;
            let server = world.server.as_ref().map(|server| server.source.disk().clone());
            let (moments, near, disk) = (world.moments.clone(), world.near.clone(), world.disk());
            let writer = scope.spawn(move || {
                for write in writing {
                    let Some(server) = &server else { break };
                    std::thread::yield_now();
                    let mut all = lock(&moments);
                    let _ = write.through(server);
                    all.add(near.state().files.content_name(disk));
                }
            });
            let result = world.sync(which, &options, cuts);
            let _ = writer.join();
            result
        });
        let disk = self.world.disk();
        self.world.near.state().files.mend(disk);
        self.world.moment();
        result.map(|summary| self.synced(which, &summary))
    }

    /// Two syncs at once: of two replicas, or of one.
    fn syncs(&mut self, which: usize, cuts: Cuts, from: usize) -> Result<Result<String, SyncError>, String> {
        if self.world.replicas.len() < 2 {
            self.world.add_replica();
        }
        let other = if self.world.dice.one_in(4) { which } else { 1 - which };
        let mut options = self.world.options(None);
        options.adopt = self.world.dice.one_in(4);
        options.overwrite = options.adopt;
        let (one, two) = (&self.world.replicas[which].name, &self.world.replicas[other].name);
        self.world
            .tell(format!("syncs of {one} and {two} at once{}", if options.adopt { ", adopt" } else { "" }));
        for which in [which, other] {
            self.world.replicas[which].adopting |= options.adopt;
            self.world.replicas[which].settled = false;
        }
        let [one, two] = self.world.syncs((which, &options, cuts), (other, &options, Cuts::NEVER));
        self.world.moment();
        let one = one.map(|summary| self.synced(which, &summary));
        let two = two.map(|summary| self.synced(other, &summary));
        self.world.tell(match &two {
            Ok(what) => format!("  {other}: {what}"),
            Err(error) => format!("  {other}: failed ({:?}): {error}", error.class()),
        });
        if other != which {
            for host in [&self.world.near, &self.world.far] {
                host.heal();
            }
            self.world.bury();
            self.check(other, from, &two)?;
        }
        Ok(one)
    }

    /// What a successful sync reports of a replica.
    fn synced(&mut self, which: usize, summary: &sync::Summary) -> String {
        let known = &mut self.world.replicas[which];
        if summary.trust != "tracked" && summary.trust != "seeded" && !summary.trust.starts_with("fuzzy") {
            known.adopting = false;
            if !known.meanwhile {
                (known.touched, known.tainted) = (false, false);
            }
        }
        if summary.trust == "seeded" && !summary.resumed && !known.meanwhile {
            known.tainted = false;
        }
        format!("{} at epoch {:?}, {} blocks", summary.trust, summary.epoch, summary.blocks_changed)
    }

    /// Writes to a served source while it is read.
    fn write_meanwhile(&mut self) -> Vec<Write> {
        let len = self.world.size();
        if self.world.server.is_none() || self.world.dice.one_in(2) {
            return Vec::new();
        }
        let dice = &mut self.world.dice;
        let writes: Vec<Write> = (0..dice.within(1..10)).map(|_| Write::draw(dice, len)).collect();
        self.world.tell(format!("{} writes meanwhile", writes.len()));
        writes
    }

    fn mirror(&mut self, which: usize, cuts: Cuts) -> Result<String, SyncError> {
        let len = self.world.size();
        let dice = &mut self.world.dice;
        let count = dice.within(1..20);
        let writes: Vec<Write> = (0..count).map(|_| Write::draw(dice, len)).collect();
        let every = Duration::from_millis(dice.pick(&[1, 1000]));
        self.world.tell(format!("a mirror to {}, {count} writes", self.world.replicas[which].name));
        let world = &self.world;
        let Some(server) = &world.server else { return Ok("no server".into()) };
        let (moments, near, disk) = (world.moments.clone(), world.near.clone(), world.disk());
        let summary = world.mirror(which, cuts, every, |ended| {
            for write in writes {
                if ended() {
                    break;
                }
                {
                    let mut all = lock(&moments);
                    let _ = write.through(server.source.disk());
                    all.add(near.state().files.content_name(disk));
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        self.world.moment();
        summary.map(|summary| {
            self.table.note("mirrors that ended well");
            format!("{} batches, {} syncs, broken {} times", summary.batches, summary.syncs, summary.broken)
        })
    }

    fn extract(&mut self, which: usize) -> Result<String, SyncError> {
        let breaks = if self.world.dice.one_in(4) { 1 << self.world.dice.below(20) } else { u64::MAX };
        let arrives = if self.world.dice.one_in(4) { Some(self.world.dice.bits()) } else { None };
        self.world.tell(format!(
            "extract, and merge to {}{}{}",
            self.world.replicas[which].name,
            if breaks == u64::MAX {
                String::new()
            } else {
                format!("; the pipe breaks after {breaks} bytes")
            },
            if arrives.is_some() { "; only a part arrives" } else { "" }
        ));
        let first = self.world.extract(None, breaks);
        let delta = match first {
            Err(SyncError::Refused(why)) if why.contains("--since") => {
                // With the replica's own epoch, as one is told.
                let status = self.world.recover(which).ok().and_then(|(status, ..)| status.epoch);
                self.world.extract(status.map(|epoch| epoch.number), breaks)?
            }
            other => other?,
        };
        let whole = delta.len() as u64;
        let part = arrives.map_or(whole, |n| n % (whole + 1));
        self.lagging |= part < whole;
        let merged = self.world.merge(which, &delta[..part as usize])?;
        Ok(format!("merged {part} of {whole} bytes, epoch {}", merged.epoch))
    }

    fn verify(&mut self, which: usize, cuts: Cuts) -> Result<String, SyncError> {
        let repair = self.world.dice.one_in(2);
        let len = self.world.size();
        let ranges = match self.world.dice.one_in(2) {
            true => {
                let start = self.world.dice.below(len / BLOCK) * BLOCK;
                std::iter::once(start..(start + BLOCK * 8).min(len)).collect()
            }
            false => Vec::new(),
        };
        self.world
            .tell(format!("verify of {}, repair {repair}, {ranges:?}", self.world.replicas[which].name));
        let whole = ranges.is_empty();
        let options = sync::VerifyOptions {
            repair,
            ranges,
            commit: self.world.cell.commit.into(),
            way: sync::Way::to(self.world.cell.way == Way::Far),
            ..sync::VerifyOptions::default()
        };
        let verified = self.world.verify(which, &options, cuts)?;
        let known = &mut self.world.replicas[which];
        // What has changed at the source since is not compared: an unnoticed write in it stays until the next sync.
        if repair && whole && !known.meanwhile && !(known.tainted && verified.passed_over) {
            (known.touched, known.tainted) = (false, false);
        }
        let innocent = !known.touched && verified.trust == "exact" && verified.changed.is_none();
        if innocent && verified.differing.extents > 0 && !verified.repaired {
            // Told below, where the replica is looked at.
            self.table.note("verifies that found a difference");
        }
        Ok(format!("{} extents differ, trust {}", verified.differing.extents, verified.trust))
    }

    /// The part of a replica that a refusal must not change; `None` if something must still be recovered.
    fn digest(&self, which: usize) -> Option<Digest> {
        let folder = self.world.far.state().files.snapshot(&self.world.folder_of(which));
        let known = &self.world.replicas[which];
        if folder.keys().any(|name| !(name == "lineage" || name == "rest" || name.starts_with("unsure-")))
            || known.touched
            || !known.settled
        {
            return None;
        }
        let lineage = folder.into_iter().filter(|(name, _)| name != "rest");
        Some((self.world.raw(which).map(|raw| content_of(&raw).0), lineage.collect()))
    }

    /// A replica's status and content.
    fn check(&mut self, which: usize, from: usize, result: &Result<String, SyncError>) -> Checked {
        let known = self.world.replicas[which].clone();
        let (status, content, trail) = match self.world.recover(which) {
            Ok(found) => found,
            Err(error) if self.may_refuse(which, &error) => return Ok(()),
            Err(error) => return Err(format!("{} cannot be opened: {error}", known.name)),
        };
        self.world.tell(format!(
            "  {} says epoch {:?}, ahead {}, {:?}, under way {}",
            known.name,
            status.epoch.map(|epoch| epoch.number),
            status.ahead,
            status.state,
            status.under_way()
        ));
        self.world.replicas[which].settled = !status.under_way();
        if let Some(why) = &status.changed {
            self.world.replicas[which].noticed |= self.has_room();
            self.world.replicas[which].touched |= self.is_unnoted(which);
            return if self.world.replicas[which].touched {
                Ok(())
            } else {
                Err(format!("nobody changed {}, yet: {why}", known.name))
            };
        }
        let claims = status.state == State::Exact && status.epoch.is_some();
        let in_place = status.under_way() && self.world.cell.commit == Commit::InPlace;
        if !claims || known.tainted || in_place {
            return Ok(());
        }
        // The destination itself, and not the copy that is to take its place.
        let held = if status.under_way() { self.world.raw(which) } else { content };
        let Some(held) = held else { return Err("it says that it is whole, and cannot be read".into()) };
        let held = &held[..(status.size as usize).min(held.len())];
        self.check_moment(which, &status, held, from, result)?;
        self.check_trail(which, &status, &trail)
    }

    /// What a replica knows of the way to its epoch names all in which that differs from the epochs before.
    fn check_trail(&self, which: usize, status: &Status, trail: &source::Trail) -> Checked {
        let Some(at) = status.epoch else { return Ok(()) };
        let missed = lock(&self.world.moments).missed(trail, at.id, &TRAILS);
        missed.map_or(Ok(()), |(epoch, byte)| {
            let name = &self.world.replicas[which].name;
            Err(format!(
                "the trail of {name} to epoch {} misses a change since epoch {epoch}, at byte {byte}",
                at.number
            ))
        })
    }

    /// A full file system left no room for the note of own writes: if they are interrupted, nothing tells them from others'.
    fn is_unnoted(&self, which: usize) -> bool {
        let state = self.world.far.state();
        let note = state.files.find(&self.world.folder_of(which), "rest");
        note.is_some_and(|note| state.files.starved.contains(&note))
    }

    /// A replica may refuse to be opened with this error, after what was done to it.
    fn may_refuse(&mut self, which: usize, error: &ReplicaError) -> bool {
        let noticed = matches!(error, ReplicaError::Changed { .. }) && self.has_room();
        let unnoted = self.is_unnoted(which);
        let known = &mut self.world.replicas[which];
        known.noticed |= noticed;
        known.touched |= unnoted && matches!(error, ReplicaError::Changed { .. });
        match error {
            ReplicaError::Changed { .. } => known.touched,
            ReplicaError::NotAReplica(_) | ReplicaError::Unproven(_) => known.touched || known.adopting,
            // What was committed may need blocks that were holes.
            error if is_full(error) => self.world.far.state().files.room.is_some(),
            _ => known.touched && error.is_refusal(),
        }
    }

    /// A replica that claims to be complete holds a state of the source: none before the previous one, the one that its epoch
    /// is bound to, and after a successful sync none from before that sync.
    fn check_moment(
        &mut self,
        which: usize,
        status: &Status,
        held: &[u8],
        from: usize,
        result: &Result<String, SyncError>,
    ) -> Checked {
        let known = &mut self.world.replicas[which];
        let mut moments = lock(&self.world.moments);
        let content = content_of(held);
        let Some(place) = moments.last(&content) else {
            return Err(format!("{} claims to be complete, and is not a state of the source", known.name));
        };
        if place < known.at {
            return Err(format!("{} went back, from moment {} to {place}", known.name, known.at));
        }
        let epoch = status.epoch.filter(|_| !status.ahead);
        if let Some(epoch) = epoch.filter(|epoch| !moments.bind(epoch.id, content, held)) {
            return Err(format!(
                "{} says that it is epoch {}, which held something else",
                known.name, epoch.number
            ));
        }
        let at = status.epoch.filter(|_| !status.under_way() && status.resumes.is_none());
        if let Some(stray) = at.and_then(|at| moments.stray(at.id, &status.unsure, held)) {
            return Err(format!("{} is not at its epoch at byte {stray}, where it is sure", known.name));
        }
        let synced = result.as_ref().is_ok_and(|what| {
            what.contains(" at epoch ") && !what.starts_with("fuzzy") && !what.contains("extents differ")
        });
        if synced && !self.lagging && moments.since(&content, from).is_none() {
            return Err(format!("{} is older than the sync that ended well", known.name));
        }
        known.at = moments.since(&content, known.at).unwrap_or(place);
        Ok(())
    }

    /// Nothing fails any more: a few syncs bring every replica to the source's state.
    fn converge(&mut self) -> Checked {
        for host in [self.world.near.clone(), self.world.far.clone()] {
            host.free_room();
            host.heal();
        }
        self.world.bury();
        if !self.world.cell.origin.is_live() && self.world.server.is_none() && self.world.dice.one_in(2) {
            self.serve()?;
        }
        let disk = self.world.disk();
        self.world.near.state().end_writes(disk);
        self.world.moment();
        if self.pipes {
            self.converge_by_pipe()?;
        }
        for which in 0..self.world.replicas.len() {
            self.converge_one(which)?;
        }
        Ok(())
    }

    /// Brings the first replica to the source's state with nothing but `extract | merge`.
    fn converge_by_pipe(&mut self) -> Checked {
        let (mut last, mut whole) = (String::new(), false);
        if self.world.replicas[0].touched || self.world.replicas[0].adopting {
            return Ok(());
        }
        for _ in 0..4 {
            self.world.tell("at last, extract | merge");
            // As one is told.
            self.world.allow_shrink = last.contains("--allow-shrink");
            let piped = self
                .world
                .extract(whole.then_some(0), u64::MAX)
                .and_then(|delta| self.world.merge(0, &delta));
            // A first copy that did not arrive is requested once more, as a whole.
            whole = matches!(piped, Err(SyncError::Replica(ReplicaError::Unseeded { .. })));
            match piped {
                Ok(_)
                    if self
                        .world
                        .raw(0)
                        .as_deref()
                        .is_some_and(|raw| raw.starts_with(&self.world.content())) =>
                {
                    return Ok(());
                }
                Ok(merged) => last = format!("it is at epoch {}, and differs from the source", merged.epoch),
                Err(SyncError::Source(SourceError::Lost { .. })) => return Ok(()),
                Err(error) => last = error.to_string(),
            }
            self.world.tell(format!("  {last}"));
            self.world.bury();
        }
        Err(format!("nothing fails, and no extract and merge brings the replica up to date: {last}"))
    }

    fn converge_one(&mut self, which: usize) -> Checked {
        let mut last = String::new();
        self.world.use_state_of(which);
        for _ in 0..5 {
            let known = self.world.replicas[which].clone();
            let mut options = self.world.options(None);
            // A source that is empty needs a word as well, where what was written to it is not known.
            let empty = self.world.content().iter().all(|byte| *byte == 0);
            let may_ask = known.touched || known.adopting || empty;
            options.adopt = may_ask && last.contains("--adopt");
            options.overwrite = options.adopt;
            options.give_up = (may_ask && last.contains("--discard-there")).then_some(sync::GiveUp::Discard);
            if known.tainted {
                options.method = Some(Method::Compare);
            }
            let from = lock(&self.world.moments).count().saturating_sub(1);
            self.world.tell(format!(
                "at last, a sync of {}{}",
                known.name,
                if options.adopt { ", adopt" } else { "" }
            ));
            match self.world.sync(which, &options, Cuts::NEVER) {
                Ok(summary) => {
                    self.world.tell(format!("  {} at epoch {:?}", summary.trust, summary.epoch));
                    if summary.trust != "tracked" {
                        let known = &mut self.world.replicas[which];
                        (known.touched, known.tainted) = (false, false);
                    }
                    self.world.bury();
                    self.check(which, from, &Ok(format!("{} at epoch ", summary.trust)))?;
                    let raw = self.world.raw(which).unwrap_or_default();
                    let content = self.world.content();
                    let holds = raw.len() >= content.len() && raw[..content.len()] == content[..];
                    let exact = self.world.cell.target == Target::Device || raw.len() == content.len();
                    if self.world.replicas[which].tainted || (holds && exact) {
                        return Ok(());
                    }
                    return Err(format!("a sync ended well, and {} is not {DISK}", known.name));
                }
                Err(error) => {
                    last = error.to_string();
                    self.world.tell(format!("  {last}"));
                    if adopts(&error) && !may_ask {
                        return Err(format!("without a cause, {} is to be adopted: {last}", known.name));
                    }
                    if last.contains("--allow-shrink") {
                        self.world.allow_shrink = true;
                    }
                    self.world.bury();
                }
            }
        }
        Err(format!(
            "nothing fails, and no sync brings {} up to date: {last}",
            self.world.replicas[which].name
        ))
    }
}
