//! Disks and folders that fail when a test says so.
//!
//! Everything a program writes goes through disks and folders. Those of one [`Power`] count each write, flush, rename and so on
//! as a step; a test counts the steps of a run, and then runs it again with the power cut at each of them. What is left is what
//! the program must make sense of when it opens it again.
//!
//! Two kinds of outage. After [`Outage::Kill`] the system lives on, so all that was done before stays. After
//! [`Outage::PowerCut`] only what was flushed stays for certain; of the rest [`Power::crash`] keeps what the test chooses.
//!
//! A step may also fail for a moment ([`Power::fail_at`]): it has no effect, and the next ones succeed. A flush or sync that
//! fails so forgets what it should have written, as Linux does: later ones succeed without it.
//!
//! A `Power` is good for one life: what hangs on it stays dead. The next life opens the same places with a new `Power`, or
//! with none.

mod disk;
mod folder;

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

pub use disk::FaultyDisk;
pub use folder::FaultyFolder;

use crate::Random;

/// What the cut takes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outage {
    /// The process: what it did before stays.
    Kill,
    /// The machine: what was not flushed may be gone.
    PowerCut,
}

/// What a power cut leaves of what was not flushed. More than any real disk or file system would do is never done, but all
/// that some may: sectors of 512 bytes are kept or lost whole, and each for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Everything.
    KeepAll,
    /// Nothing.
    LoseUnsynced,
    /// Each sector, each length and each rename, creation or removal at random.
    Random,
}

/// The error of everything that is tried after the cut.
#[derive(Debug, thiserror::Error)]
#[error("the power is cut")]
struct Cut;

/// True if `error` comes from a cut.
pub fn is_cut(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Cut>())
}

fn cut_error() -> io::Error {
    io::Error::other(Cut)
}

/// The switch that the disks and folders of one machine hang on.
#[derive(Clone)]
pub struct Power(Arc<Inner>);

struct Inner {
    outage: Outage,
    /// Held shared by each operation under way, alone while the power is cut.
    gate: RwLock<()>,
    steps: AtomicU64,
    syncs: AtomicU64,
    last: AtomicU64,
    passing: Mutex<(Range<u64>, i32)>,
    cut: AtomicBool,
    members: Mutex<Vec<Arc<dyn Member>>>,
}

/// What hangs on a switch.
trait Member: Send + Sync {
    /// The power is being cut: nothing is under way, nothing will be.
    fn cut(&self);
    /// Leaves behind what a power cut would.
    fn crash(&self, disks: Keep, folders: Keep, dice: &mut Random) -> io::Result<()>;
}

impl Power {
    /// A switch that is on.
    pub fn new(outage: Outage) -> Power {
        Power(Arc::new(Inner {
            outage,
            gate: RwLock::new(()),
            steps: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            last: AtomicU64::new(u64::MAX),
            passing: Mutex::new((0..0, 0)),
            cut: AtomicBool::new(false),
            members: Mutex::default(),
        }))
    }

    /// Steps so far: writes, zeroings, discards, resizes and flushes of disks; writes, changes of length, reservations and
    /// syncs of state files; creations, renames, removals and syncs of folders. Stores to mappings are none.
    pub fn steps(&self) -> u64 {
        self.0.steps.load(Ordering::SeqCst)
    }

    /// How many of them make something durable: flushes of disks, syncs of files and folders.
    pub fn syncs(&self) -> u64 {
        self.0.syncs.load(Ordering::SeqCst)
    }

    fn count_sync(&self) {
        self.0.syncs.fetch_add(1, Ordering::SeqCst);
    }

    /// Cuts the power in place of the step number `step`, counted from 1: it and all later operations fail with an error that
    /// [`is_cut`] knows, and have no effect.
    pub fn cut_at(&self, step: u64) {
        self.0.last.store(step, Ordering::SeqCst);
    }

    /// The `count` steps from number `step` on, counted from 1, fail with this error number and have no effect; what follows
    /// succeeds again. A flush or sync among them forgets what was written since the last one: that stays visible, and is lost
    /// with the power unless it is written again. With EINTR it was not begun, and forgets nothing.
    pub fn fail_at(&self, step: u64, count: u64, errno: i32) {
        *lock(&self.0.passing) = (step..step.saturating_add(count), errno);
    }

    /// Cuts the power now. What is under way is finished first.
    pub fn cut(&self) {
        let _alone = self.0.gate.write().unwrap_or_else(PoisonError::into_inner);
        if !self.0.cut.swap(true, Ordering::SeqCst) {
            for member in lock(&self.0.members).iter() {
                member.cut();
            }
        }
    }

    /// True once the power is cut.
    pub fn is_cut(&self) -> bool {
        self.0.cut.load(Ordering::SeqCst)
    }

    /// Cuts the power if it is on, and leaves the disks and folders as they would be found: what was flushed, and of the rest
    /// what `disks` and `folders` say. Also takes back what a thread of the dead process has stored to a mapping since, so it
    /// is worth calling after a kill too, where all is kept whatever is asked.
    pub fn crash(&self, disks: Keep, folders: Keep, seed: u64) -> io::Result<()> {
        self.cut();
        let _alone = self.0.gate.write().unwrap_or_else(PoisonError::into_inner);
        let mut dice = Random::seeded(seed);
        let (disks, folders) = match self.0.outage {
            Outage::Kill => (Keep::KeepAll, Keep::KeepAll),
            Outage::PowerCut => (disks, folders),
        };
        lock(&self.0.members).iter().try_for_each(|member| member.crash(disks, folders, &mut dice))
    }

    fn join(&self, member: Arc<dyn Member>) {
        lock(&self.0.members).push(member);
    }

    /// True where what is not flushed may be lost, so has to be remembered.
    fn forgets(&self) -> bool {
        self.0.outage == Outage::PowerCut
    }

    /// Begins a step; it lasts as long as the guard.
    fn step(&self) -> io::Result<RwLockReadGuard<'_, ()>> {
        let under_way = self.look()?;
        let step = self.0.steps.fetch_add(1, Ordering::SeqCst) + 1;
        if step < self.0.last.load(Ordering::SeqCst) {
            let (failing, errno) = &*lock(&self.0.passing);
            return if failing.contains(&step) {
                Err(io::Error::from_raw_os_error(*errno))
            } else {
                Ok(under_way)
            };
        }
        drop(under_way);
        self.cut();
        Err(cut_error())
    }

    /// Begins an operation that changes nothing, and is not a step.
    fn look(&self) -> io::Result<RwLockReadGuard<'_, ()>> {
        let under_way = self.0.gate.read().unwrap_or_else(PoisonError::into_inner);
        if self.is_cut() { Err(cut_error()) } else { Ok(under_way) }
    }
}

impl std::fmt::Debug for Power {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Power({:?}, {} steps{})",
            self.0.outage,
            self.steps(),
            if self.is_cut() { ", cut" } else { "" }
        )
    }
}

/// The unit that a disk writes atomically.
const SECTOR: u64 = 512;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn no_space(path: &std::path::Path) -> io::Error {
    let full = io::Error::from_raw_os_error(libc::ENOSPC);
    io::Error::new(full.kind(), format!("{}: {full}", path.display()))
}
