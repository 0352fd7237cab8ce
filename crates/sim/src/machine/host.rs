//! A machine: its file system and devices, processes that are killed, a power supply that fails, and a list of faults
//! by step.
//!
//! Every call that reaches the machine is a step. Before it is executed, the events planned for it happen: it fails, the
//! process is killed, the power fails, or another program does something.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use testing::Random;

use crate::machine::file_system::FileSystem;
use crate::machine::inode::{EIO, ENOSPC, Inode, Loss};
use crate::machine::kernel::Kernel;

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
    /// No space for this many steps.
    Full(u64),
    /// Writes and syncs fail for this many steps.
    Broken(u64),
    /// The process that makes this step is killed.
    Kill,
    /// The power fails.
    PowerCut,
    /// Another program does something.
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

/// Notified of a process's end.
pub trait Cut: Send + Sync {
    /// The process has ended.
    fn cut(&self);
}

/// The state of a machine.
pub struct State {
    /// Calls so far.
    pub steps: u64,
    faults: Faults,
    /// Its files and devices.
    pub files: FileSystem,
    /// The time of the last change, in nanoseconds since 1970.
    clock: i64,
    boot: u64,
    booted: u64,
    /// The power is off.
    pub is_down: bool,
    processes: Vec<Weak<Process>>,
    /// Processes so far.
    started: u64,
    /// What happened, for the report of a failure.
    pub told: Vec<String>,
    /// What the kernel's trackers of live disks know, by inode.
    pub trackers: HashMap<u64, Kernel>,
    /// Replicas that were opened since the last boot, with room to note what the kernel counts.
    pub opened: BTreeSet<String>,
    /// Which process has which replica open.
    pub held: HashMap<String, Weak<Held>>,
    /// What other programs wrote to replicas, until the campaign looks.
    pub foreign: Vec<Foreign>,
    /// Called at each step, between calls: writers of live disks.
    pub dice: Random,
}

/// Planned faults.
#[derive(Default)]
struct Faults {
    planned: BTreeMap<u64, Vec<Event>>,
    /// Events that wait for a call that they fit.
    due: Vec<Event>,
    broken_until: u64,
    full_until: u64,
}

/// Another program has written to a replica.
#[derive(Debug, Clone)]
pub struct Foreign {
    /// The replica's name.
    pub name: String,
    /// It cannot be distinguished from own writes.
    pub blind: bool,
    /// It came long after all that was written before.
    pub late: bool,
    /// The replica is a device.
    pub is_device: bool,
}

/// Held while a replica or a source's state is open, like the folder's lock.
pub struct Held {
    process: Arc<Process>,
}

impl Held {
    /// Takes the lock of that name; `None` if a live process has it.
    pub fn take(process: &Arc<Process>, name: &str) -> Option<Arc<Held>> {
        let mut state = process.host.state();
        let holder = state.held.get(name).and_then(Weak::upgrade);
        if holder.is_some_and(|held| held.process.is_alive()) {
            return None;
        }
        let held = Arc::new(Held { process: process.clone() });
        state.held.insert(name.to_owned(), Arc::downgrade(&held));
        Some(held)
    }
}

/// A process on a machine.
pub struct Process {
    /// Its machine.
    pub host: Arc<Host>,
    alive: AtomicBool,
    links: Mutex<Vec<Arc<dyn Cut>>>,
    number: u64,
    /// Nothing fails that it does, and no time passes.
    judges: bool,
}

impl Process {
    /// True until it is killed.
    pub fn is_alive(&self) -> bool {
        self.alive.load(SeqCst)
    }

    /// Registers a callback for its end.
    pub fn on_end(&self, link: Arc<dyn Cut>) {
        lock(&self.links).push(link);
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
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

/// The error of all calls of a dead process.
pub fn dead() -> io::Error {
    io::Error::other("the process was killed")
}

impl Host {
    /// A machine that is on.
    pub fn new(name: &'static str, scratch: &Path, dice: &mut Random) -> Arc<Host> {
        let state = State {
            steps: 0,
            faults: Faults::default(),
            clock: BEGAN + dice.below(1 << 40) as i64,
            boot: dice.bits(),
            booted: BEGAN as u64,
            is_down: false,
            processes: Vec::new(),
            started: 0,
            files: FileSystem::new(dice.one_in(2)),
            told: Vec::new(),
            trackers: HashMap::new(),
            opened: BTreeSet::new(),
            held: HashMap::new(),
            foreign: Vec::new(),
            dice: dice.fork(),
        };
        Arc::new(Host { name, scratch: scratch.to_path_buf(), state: Mutex::new(state) })
    }

    /// The machine's state, for the campaign.
    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Starts a process.
    pub fn process(self: &Arc<Host>) -> Arc<Process> {
        self.start(false)
    }

    /// Starts a process that looks at what there is, and disturbs nothing.
    pub(crate) fn judge(self: &Arc<Host>) -> Arc<Process> {
        self.start(true)
    }

    fn start(self: &Arc<Host>, judges: bool) -> Arc<Process> {
        let mut state = self.state();
        state.processes.retain(|process| process.strong_count() > 0);
        state.started += 1;
        let number = state.started;
        let process = Arc::new(Process {
            host: self.clone(),
            alive: AtomicBool::new(true),
            links: Mutex::default(),
            number,
            judges,
        });
        state.processes.push(Arc::downgrade(&process));
        process
    }

    /// A call of a process: planned events happen first, then `act`, unless they prevent it.
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
        if process.judges {
            return act(&mut state);
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
        state.files.sync();
        state.cut_power();
    }

    /// Cancels planned events, and ends lasting faults.
    pub fn heal(&self) {
        let mut state = self.state();
        state.faults = Faults::default();
        state.files.room = state.files.room.filter(|_| state.files.room_stays);
    }

    /// Frees space.
    pub fn free_room(&self) {
        let mut state = self.state();
        (state.files.room, state.files.room_stays) = (None, false);
    }

    /// Plans an event, this many steps from now.
    pub fn plan(&self, after: u64, event: Event) {
        let mut state = self.state();
        let step = state.steps + after;
        state.faults.planned.entry(step).or_default().push(event);
    }
}

/// Simulated time begins here, in nanoseconds since 1970.
const BEGAN: i64 = 1_700_000_000_000_000_000;
/// The duration of a step, in nanoseconds: so short that a thread that reads the clock now and then, in real time, never seems to have
/// slept for long.
const STEP: i64 = 5_000;
/// What a boot takes, in nanoseconds.
const BOOT: i64 = 3_000_000_000;

impl State {
    /// The boot of the machine, and its time in nanoseconds since 1970.
    pub fn boot(&self) -> (String, u64) {
        (format!("boot {}", self.boot), self.booted)
    }

    /// Lets time pass, in nanoseconds. Otherwise only steps advance the clock, so that a run's times do not depend on the
    /// real machine's.
    pub fn pass(&mut self, time: i64) {
        self.clock += time;
    }

    /// The time: different from that of every change and of every other call.
    pub fn tick(&mut self) -> i64 {
        self.clock += 1;
        self.clock
    }

    /// A time so late that own writes have certainly ended, after a kill or a power cut.
    pub(crate) fn later(&mut self) -> i64 {
        self.pass(2 * device::Boot::LATE as i64);
        self.tick()
    }

    fn happens(&mut self, process: &Process, call: Call) -> io::Result<()> {
        while let Some(entry) = self.faults.planned.first_entry().filter(|e| *e.key() <= self.steps) {
            let events = entry.remove();
            self.faults.due.extend(events);
        }
        let changes = call != Call::Read;
        for event in std::mem::take(&mut self.faults.due) {
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
                Event::Full(steps) => self.faults.full_until = self.steps + steps,
                Event::Broken(steps) => self.faults.broken_until = self.steps + steps,
                Event::Fails if changes => {
                    self.told.push(format!("{}: a {call:?} fails at step {}", process.host.name, self.steps));
                    self.faults.broken_until = self.faults.broken_until.max(self.steps + 1);
                }
                Event::Unreadable if !changes => {
                    self.told.push(format!("{}: a read fails at step {}", process.host.name, self.steps));
                    return Err(io::Error::from_raw_os_error(EIO));
                }
                waits => self.faults.due.push(waits),
            }
            if self.is_down || !process.is_alive() {
                return Err(dead());
            }
        }
        Ok(())
    }

    /// True if nothing fails now, or failed just before.
    pub(crate) fn is_well(&self) -> bool {
        self.steps > self.faults.broken_until + 60 && self.steps > self.faults.full_until + 60
    }

    /// True if this step is one of those that fail.
    pub(crate) fn is_broken(&self) -> bool {
        self.steps < self.faults.broken_until
    }

    /// Takes this much of the free space.
    pub(crate) fn take(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > 0 && self.steps < self.faults.full_until {
            return Err(io::Error::from_raw_os_error(ENOSPC));
        }
        self.files.take(bytes)
    }

    /// Kills a process: what it wrote stays.
    pub fn end(&mut self, process: &Process) {
        for inode in self.files.inodes.values_mut().filter(|inode| inode.is_mapped_by(process.number)) {
            inode.unmap();
        }
        process.end();
    }

    fn cut_power(&mut self) {
        self.is_down = true;
        self.opened.clear();
        // The kernel's counts restart, and times may be those of own writes whose note is lost.
        self.foreign.iter_mut().for_each(|foreign| foreign.blind |= foreign.is_device || !foreign.late);
        self.files.inodes.values_mut().for_each(Inode::unmap);
        for process in std::mem::take(&mut self.processes).iter().filter_map(Weak::upgrade) {
            process.end();
        }
        let mut dice = self.dice.fork();
        let loss = dice.pick(&[Loss::Nothing, Loss::All, Loss::Some, Loss::Some]);
        self.files.crash(loss, &mut dice);
        let mut trackers: Vec<_> = self.trackers.keys().copied().collect();
        trackers.sort_unstable();
        for number in trackers {
            if let Some(tracker) = self.trackers.get_mut(&number) {
                tracker.crash();
            }
        }
    }

    /// Creates a file or device of this size, and returns its inode.
    pub fn make(&mut self, len: u64, is_device: bool) -> u64 {
        let time = self.tick();
        self.files.make(len, is_device, time)
    }

    /// What the kernel's tracker knows of a live disk.
    pub fn tracker(&mut self, disk: u64) -> &mut Kernel {
        self.trackers.get_mut(&disk).expect("a live disk")
    }

    /// What was queued at the tracker of a live disk lands.
    pub fn end_writes(&mut self, disk: u64) {
        let time = self.tick();
        let landing = self.trackers.get_mut(&disk).map(Kernel::land);
        if let Some(inode) = self.files.inodes.get_mut(&disk) {
            landing.into_iter().flatten().for_each(|(offset, data)| inode.write(offset, &data, time));
        }
    }

    pub(crate) fn rename(&mut self, folder: &str, from: &str, to: &str) -> io::Result<()> {
        let time = self.tick();
        self.files.rename(folder, from, to, time)
    }
}
