//! What goes on beside the writes to a tracked disk: a thread that watches it, and one that tends its record.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use device::Identity;
use trackers::TrackedDisk;

use crate::disk::backing::{Backing, write_mark};

/// Sweeps without a write after which a region becomes idle.
const IDLE_TICKS: u8 = 10;
/// Time between notes of a busy disk, and between checks of an idle one.
const BUSY_PULSE: Duration = Duration::from_millis(5);
const IDLE_PULSE: Duration = Duration::from_millis(100);
/// How often it is looked whether a disk was resized.
const LOOK_AT_SIZE: Duration = Duration::from_millis(500);

/// The threads of a tracked disk; they end when it is dropped.
pub(crate) struct Tending {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Tending {
    /// Starts them, for a disk that is `served` or only read. The size of one that was `opened` as this is looked at, too: it may be
    /// resized beneath its server.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(crate) fn begin(
        disk: &TrackedDisk,
        backing: &Arc<dyn Backing>,
        (served, opened): (bool, Option<Identity>),
        every: Duration,
    ) -> io::Result<Tending> {
        let mut tending = Tending { stop: Arc::default(), threads: Vec::new() };
        let (watched, at, stop) = (disk.clone(), backing.clone(), tending.stop.clone());
        tending.start("watch", move || watch(&watched, &*at, (served, opened.as_ref()), &stop, every))?;
        let (tended, stop) = (disk.clone(), tending.stop.clone());
        tending.start("tend", move || tend(&tended, &stop, every))?;
        let (watcher, at) = (tending.threads[0].thread().clone(), backing.clone());
        disk.watch(move || {
            // A write after a rest: others may write next, which only a look after it tells.
            watcher.unpark();
            write_mark(&*at, served)
        });
        Ok(tending)
    }

    fn start(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.threads.push(thread::Builder::new().name(name.into()).spawn(work)?);
        Ok(())
    }
}

impl Drop for Tending {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Notes the time while a disk is busy, and looks soon after its writes whether others write to it, too. It never waits for the disk of
/// the state: what others write before a look is not told from own writes.
fn watch(
    disk: &TrackedDisk,
    backing: &dyn Backing,
    (served, opened): (bool, Option<&Identity>),
    stop: &AtomicBool,
    every: Duration,
) {
    let (mut last, mut wrote, mut looked, mut sized) = (0, Instant::now(), Instant::now(), Instant::now());
    // One check soon after the last write, as soon as it tells, then one each time that it is tended. A failure is left to the next checkpoint.
    let mut look = true;
    while !stop.load(SeqCst) {
        let busy = wrote.elapsed() < every;
        thread::park_timeout(if busy { BUSY_PULSE } else { IDLE_PULSE });
        let (moved, now) = disk.pulse(last);
        last = now;
        if moved {
            (wrote, look) = (Instant::now(), true);
        } else if look {
            look = disk.look(|| write_mark(backing, served)).is_ok_and(|told| !told);
        }
        if let Some(opened) = opened.filter(|_| sized.elapsed() >= LOOK_AT_SIZE) {
            sized = Instant::now();
            let now = backing.identity().ok().filter(|now| now.same_object(opened));
            let end = now.map(|now| if now.size < opened.size { now.size } else { u64::MAX });
            end.into_iter().for_each(|end| disk.ends_at(end));
        }
        if looked.elapsed() >= every {
            (looked, look) = (Instant::now(), true);
        }
    }
}

/// Keeps the record of a disk: the next one made ahead, the log of intents swept, the time of the last write durable.
fn tend(disk: &TrackedDisk, stop: &AtomicBool, every: Duration) {
    let mut swept = Instant::now();
    // Not in the first second, which may be the only one; after a failure not before the next sweep.
    let mut spare = false;
    while !stop.load(SeqCst) {
        thread::park_timeout(every.min(IDLE_PULSE));
        spare = spare && disk.prepare().is_ok();
        if swept.elapsed() >= every && !stop.load(SeqCst) {
            (swept, spare) = (Instant::now(), true);
            // A sweep that fails leaves more regions active than need be; the next one tries again.
            let _ = disk.sweep(IDLE_TICKS);
        }
    }
}
