//! A machine: a file system and devices in memory, processes that are killed, a power supply that fails, and a list of what
//! goes wrong at which step.
//!
//! Every call that reaches the machine is a step. Before it is carried out, what was planned for it happens: it fails, the
//! process is killed, the power goes, or somebody else does something. What was not flushed is remembered, so that a power
//! cut can lose any of it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use testing::Random;

use crate::foreign::Foreign;
use crate::inode::{Content, Inode, Loss};

/// What a call does to the machine, for faults that fit some calls only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Reads.
    Read,
    /// Changes content.
    Write,
    /// Makes durable.
    Sync,
    /// Changes a name.
    Name,
}

/// What happens at a step.
pub enum Event {
    /// The next call that changes or syncs something fails once with EIO.
    Fails,
    /// The next read fails once with EIO.
    Unreadable,
    /// No space for the next so many steps.
    Full(u64),
    /// Writes and syncs fail for the next so many steps.
    Broken(u64),
    /// The process that makes this step is killed.
    Kill,
    /// The power goes.
    PowerCut,
    /// Somebody else does something.
    Does(Box<dyn FnOnce(&mut State) + Send>),
}

/// A machine.
pub struct Host {
    /// For messages.
    pub name: &'static str,
    /// A real folder, for what needs one.
    pub scratch: PathBuf,
    state: Mutex<State>,
}

/// Somebody who is told of a process's end.
pub trait Cut: Send + Sync {
    /// The process has ended.
    fn cut(&self);
}

/// What a machine has.
pub struct State {
    /// Calls so far.
    pub steps: u64,
    events: BTreeMap<u64, Vec<Event>>,
    /// Events that wait for a call that they fit.
    due: Vec<Event>,
    broken_until: u64,
    full_until: u64,
    /// Bytes by which files may still grow; `None` where there is enough.
    pub room: Option<u64>,
    /// Nobody frees any before the end.
    pub room_stays: bool,
    pub(crate) inodes: HashMap<u64, Inode>,
    last_inode: u64,
    pub(crate) folders: BTreeMap<String, Names>,
    /// The time of the last change, in nanoseconds since 1970.
    clock: i64,
    boot: u64,
    booted: u64,
    /// The power is off.
    pub is_down: bool,
    processes: Vec<Weak<Process>>,
    /// A file's sync makes its name durable.
    pub syncs_names: bool,
    /// What happened, for the report of a failure.
    pub told: Vec<String>,
    /// What the kernel's trackers of live disks know, by inode.
    pub trackers: HashMap<u64, crate::tracker::Kernel>,
    /// Replicas that were opened since the last boot, with room to note what the kernel counts.
    pub opened: BTreeSet<String>,
    /// Who has which replica open.
    pub held: HashMap<String, Weak<crate::destination::Held>>,
    /// What other programs wrote to replicas, until the campaign looks.
    pub foreign: Vec<Foreign>,
    /// Who looks at each step, between calls: writers of live disks.
    pub dice: Random,
}

/// The names in a folder.
#[derive(Default, Clone)]
pub(crate) struct Names {
    pub now: BTreeMap<String, u64>,
    durable: BTreeMap<String, u64>,
    unsynced: Vec<Change>,
}

#[derive(Clone)]
enum Change {
    Is { name: String, inode: u64, was: Option<String> },
    Gone { name: String },
}

impl Change {
    fn apply(&self, names: &mut BTreeMap<String, u64>) {
        match self {
            Change::Is { name, inode, was } => {
                if let Some(was) = was.as_ref().filter(|was| names.get(*was) == Some(inode)) {
                    names.remove(was);
                }
                names.insert(name.clone(), *inode);
            }
            Change::Gone { name } => {
                names.remove(name);
            }
        }
    }
}

/// A process on a machine.
pub struct Process {
    /// Its machine.
    pub host: Arc<Host>,
    alive: AtomicBool,
    links: Mutex<Vec<Arc<dyn Cut>>>,
    number: u64,
}

impl Process {
    /// True until it is killed.
    pub fn is_alive(&self) -> bool {
        self.alive.load(SeqCst)
    }

    /// Has its end told to somebody.
    pub fn on_end(&self, link: Arc<dyn Cut>) {
        lock(&self.links).push(link);
    }

    fn end(&self) {
        self.alive.store(false, SeqCst);
        for link in lock(&self.links).drain(..) {
            link.cut();
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The error of whatever a process tries that is dead.
pub fn dead() -> io::Error {
    io::Error::other("the process was killed")
}

impl Host {
    /// A machine that is on.
    pub fn new(name: &'static str, scratch: &Path, dice: &mut Random) -> Arc<Host> {
        let state = State {
            steps: 0,
            events: BTreeMap::new(),
            due: Vec::new(),
            broken_until: 0,
            full_until: 0,
            room: None,
            room_stays: false,
            inodes: HashMap::new(),
            last_inode: 10,
            folders: BTreeMap::new(),
            clock: BEGAN + dice.below(1 << 40) as i64,
            boot: dice.bits(),
            booted: BEGAN as u64,
            is_down: false,
            processes: Vec::new(),
            syncs_names: dice.one_in(2),
            told: Vec::new(),
            trackers: HashMap::new(),
            opened: BTreeSet::new(),
            held: HashMap::new(),
            foreign: Vec::new(),
            dice: dice.fork(),
        };
        Arc::new(Host { name, scratch: scratch.to_path_buf(), state: Mutex::new(state) })
    }

    /// The machine's state, for who stands outside of it.
    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Starts a process.
    pub fn process(self: &Arc<Host>) -> Arc<Process> {
        let mut state = self.state();
        let number = state.processes.len() as u64 + 1;
        let process = Arc::new(Process {
            host: self.clone(),
            alive: AtomicBool::new(true),
            links: Mutex::default(),
            number,
        });
        state.processes.push(Arc::downgrade(&process));
        process
    }

    /// A call of a process: what was planned happens first, then `act`, if nothing speaks against it.
    pub(crate) fn call<T>(
        &self,
        process: &Process,
        call: Call,
        act: impl FnOnce(&mut State) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut state = self.state();
        if !process.is_alive() {
            return Err(dead());
        }
        state.steps += 1;
        state.pass(STEP);
        let happens = state.happens(process, call);
        if !process.is_alive() {
            return Err(dead());
        }
        happens?;
        act(&mut state)
    }

    /// The clock by which its files are stamped.
    pub fn clock(self: &Arc<Host>) -> device::Clock {
        let host = self.clone();
        device::Clock::exact(move || host.state().tick() as u64)
    }

    /// Switches a machine on again after a power cut.
    pub fn boot(&self) {
        let mut state = self.state();
        state.is_down = false;
        state.pass(BOOT);
        (state.boot, state.booted) = (state.boot + 1, state.tick() as u64);
    }

    /// Shuts the machine down in order, and starts it again.
    pub fn restart(&self) {
        let mut state = self.state();
        state.inodes.values_mut().for_each(|inode| inode.sync(true));
        let folders: Vec<String> = state.folders.keys().cloned().collect();
        folders.iter().for_each(|folder| state.sync_names(folder));
        state.cut_power();
    }

    /// Forgets what was planned, and mends what is broken.
    pub fn heal(&self) {
        let mut state = self.state();
        state.events.clear();
        state.due.clear();
        (state.broken_until, state.full_until) = (0, 0);
        state.room = state.room.filter(|_| state.room_stays);
    }

    /// Frees room.
    pub fn free_room(&self) {
        let mut state = self.state();
        (state.room, state.room_stays) = (None, false);
    }

    /// Plans an event, so many steps from now.
    pub fn plan(&self, after: u64, event: Event) {
        let mut state = self.state();
        let step = state.steps + after;
        state.events.entry(step).or_default().push(event);
    }
}

/// Simulated time begins here, in nanoseconds since 1970.
const BEGAN: i64 = 1_700_000_000_000_000_000;
/// What a step takes, in nanoseconds: so little that no thread which looks at the clock now and then, in real time, seems to have
/// slept for long.
const STEP: i64 = 5_000;
/// What a boot takes, in nanoseconds.
const BOOT: i64 = 3_000_000_000;

impl State {
    /// The machine's life, and when it began, in nanoseconds since 1970.
    pub fn boot(&self) -> (String, u64) {
        (format!("boot {}", self.boot), self.booted)
    }

    /// Lets time pass, in nanoseconds. Nothing else moves the clock but steps, so that a run's times do not depend on the
    /// real machine's.
    pub fn pass(&mut self, time: i64) {
        self.clock += time;
    }

    /// What time it is: a moment that no change bears, and no other look.
    pub fn tick(&mut self) -> i64 {
        self.clock += 1;
        self.clock
    }

    /// A moment so late that neither a kill nor a power cut leaves a doubt whether own writes had ended by then.
    pub(crate) fn later(&mut self) -> i64 {
        self.pass(2 * device::Boot::LATE as i64);
        self.tick()
    }

    fn happens(&mut self, process: &Process, call: Call) -> io::Result<()> {
        while let Some(entry) = self.events.first_entry().filter(|e| *e.key() <= self.steps) {
            let events = entry.remove();
            self.due.extend(events);
        }
        let changes = call != Call::Read;
        for event in std::mem::take(&mut self.due) {
            match event {
                Event::Kill => {
                    self.told.push(format!(
                        "{}: process {} is killed at step {}",
                        process.host.name, process.number, self.steps
                    ));
                    self.end(process);
                }
                Event::PowerCut => {
                    self.told.push(format!("{}: the power goes at step {}", process.host.name, self.steps));
                    self.cut_power();
                }
                Event::Does(act) => act(self),
                Event::Full(steps) => self.full_until = self.steps + steps,
                Event::Broken(steps) => self.broken_until = self.steps + steps,
                Event::Fails if changes => {
                    self.told.push(format!("{}: a {call:?} fails at step {}", process.host.name, self.steps));
                    self.broken_until = self.broken_until.max(self.steps + 1);
                }
                Event::Unreadable if !changes => {
                    self.told.push(format!("{}: a read fails at step {}", process.host.name, self.steps));
                    return Err(io::Error::from_raw_os_error(EIO));
                }
                waits => self.due.push(waits),
            }
            if self.is_down || !process.is_alive() {
                return Err(dead());
            }
        }
        Ok(())
    }

    /// Nothing fails for the moment, nor failed a moment ago.
    pub(crate) fn is_well(&self) -> bool {
        self.steps > self.broken_until + 60 && self.steps > self.full_until + 60
    }

    /// True if this step is one of those that fail.
    pub(crate) fn is_broken(&self) -> bool {
        self.steps < self.broken_until
    }

    /// Takes so many bytes of what room there is.
    pub(crate) fn take(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > 0 && self.steps < self.full_until {
            return Err(io::Error::from_raw_os_error(ENOSPC));
        }
        if let Some(room) = &mut self.room {
            *room = room.checked_sub(bytes).ok_or_else(|| io::Error::from_raw_os_error(ENOSPC))?;
        }
        Ok(())
    }

    /// Ends a process: what it wrote stays.
    pub fn end(&mut self, process: &Process) {
        for inode in self.inodes.values_mut().filter(|inode| inode.is_mapped_by(process.number)) {
            inode.unmap();
        }
        process.end();
    }

    fn cut_power(&mut self) {
        self.is_down = true;
        self.opened.clear();
        // The kernel's counts begin anew, and times may be those of own writes whose note is lost.
        self.foreign.iter_mut().for_each(|foreign| foreign.blind |= foreign.is_device || !foreign.late);
        self.inodes.values_mut().for_each(Inode::unmap);
        for process in std::mem::take(&mut self.processes).iter().filter_map(Weak::upgrade) {
            process.end();
        }
        let mut dice = self.dice.fork();
        let loss = dice.pick(&[Loss::Nothing, Loss::All, Loss::Some, Loss::Some]);
        for names in self.folders.values_mut() {
            let mut left = match loss {
                Loss::Nothing => names.now.clone(),
                _ => names.durable.clone(),
            };
            if loss == Loss::Some {
                names.unsynced.iter().filter(|_| dice.one_in(2)).for_each(|change| change.apply(&mut left));
            }
            *names = Names { now: left.clone(), durable: left, unsynced: Vec::new() };
        }
        let mut numbers: Vec<u64> = self.inodes.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            if let Some(inode) = self.inodes.get_mut(&number) {
                inode.crash(loss, &mut dice);
            }
        }
        let mut trackers: Vec<_> = self.trackers.keys().copied().collect();
        trackers.sort_unstable();
        for number in trackers {
            if let Some(tracker) = self.trackers.get_mut(&number) {
                tracker.crash();
            }
        }
    }

    /// Makes a file or device of so many bytes, and returns its inode.
    pub fn make(&mut self, len: u64, is_device: bool) -> u64 {
        self.last_inode += 1;
        let time = self.tick();
        self.inodes.insert(self.last_inode, Inode::new(len, is_device, time));
        self.last_inode
    }

    pub(crate) fn inode(&mut self, number: u64) -> io::Result<&mut Inode> {
        self.inodes.get_mut(&number).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Names what a file or device holds now.
    pub fn content_name(&mut self, number: u64) -> Content {
        self.inodes.get_mut(&number).map(Inode::name).unwrap_or_default()
    }

    /// Bytes of a file or device.
    pub fn len(&self, number: u64) -> u64 {
        self.inodes.get(&number).map_or(0, Inode::len)
    }

    /// What a file or device holds now.
    pub fn content(&self, number: u64) -> Vec<u8> {
        self.inodes.get(&number).map(Inode::bytes).unwrap_or_default()
    }

    fn names(&mut self, folder: &str) -> &mut Names {
        self.folders.entry(folder.to_owned()).or_default()
    }

    /// The inode of a name.
    pub fn find(&self, folder: &str, name: &str) -> Option<u64> {
        self.folders.get(folder)?.now.get(name).copied()
    }

    /// Gives an inode a name.
    pub fn link(&mut self, folder: &str, name: &str, inode: u64) {
        let change = Change::Is { name: name.into(), inode, was: None };
        let names = self.names(folder);
        change.apply(&mut names.now);
        names.unsynced.push(change);
    }

    pub(crate) fn rename(&mut self, folder: &str, from: &str, to: &str) -> io::Result<()> {
        let inode = self.find(folder, from).ok_or(io::ErrorKind::NotFound)?;
        let time = self.tick();
        self.inode(inode)?.changed(time);
        let change = Change::Is { name: to.into(), inode, was: Some(from.into()) };
        let names = self.names(folder);
        change.apply(&mut names.now);
        names.unsynced.push(change);
        Ok(())
    }

    pub(crate) fn unlink(&mut self, folder: &str, name: &str) {
        let Some(inode) = self.find(folder, name) else { return };
        let change = Change::Gone { name: name.into() };
        let names = self.names(folder);
        change.apply(&mut names.now);
        names.unsynced.push(change);
        let freed = self.inodes.get(&inode).map_or(0, Inode::space);
        if let Some(room) = &mut self.room {
            *room += freed;
        }
    }

    /// Gives back what an inode takes less than before.
    pub(crate) fn freed(&mut self, inode: u64, before: u64) {
        let now = self.inodes.get(&inode).map_or(0, Inode::space);
        if let Some(room) = &mut self.room {
            *room += before.saturating_sub(now);
        }
    }

    pub(crate) fn sync_names(&mut self, folder: &str) {
        let names = self.names(folder);
        names.durable = names.now.clone();
        names.unsynced.clear();
    }

    /// What a file's sync does for its names, where it does.
    pub(crate) fn sync_name_of(&mut self, folder: &str, inode: u64) {
        if !self.syncs_names {
            return;
        }
        let names = self.names(folder);
        let changes = std::mem::take(&mut names.unsynced);
        for change in changes {
            match &change {
                Change::Is { inode: of, .. } if *of == inode => change.apply(&mut names.durable),
                _ => names.unsynced.push(change),
            }
        }
    }

    /// A folder and all in it, to be put back later.
    pub fn snapshot(&self, folder: &str) -> BTreeMap<String, Vec<u8>> {
        let names = self.folders.get(folder).map(|names| &names.now);
        names.into_iter().flatten().map(|(name, inode)| (name.clone(), self.content(*inode))).collect()
    }

    /// Puts a folder back: durable, and with fresh inodes.
    pub fn restore(&mut self, folder: &str, snapshot: &BTreeMap<String, Vec<u8>>) {
        let mut names = BTreeMap::new();
        for (name, content) in snapshot {
            let inode = self.make(0, false);
            if let Some(inode) = self.inodes.get_mut(&inode) {
                inode.put(content);
            }
            names.insert(name.clone(), inode);
        }
        self.folders
            .insert(folder.into(), Names { now: names.clone(), durable: names, unsynced: Vec::new() });
    }

    /// All names in all folders, for who looks whether something changed.
    pub fn listing(&self) -> BTreeSet<String> {
        let all =
            self.folders.iter().flat_map(|(folder, names)| names.now.keys().map(move |name| (folder, name)));
        all.map(|(folder, name)| format!("{folder}/{name}")).collect()
    }
}

pub(crate) const EIO: i32 = 5;
pub(crate) const ENOSPC: i32 = 28;

impl Process {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}
