//! The embedded tracker: a disk that records what is written through it.
//!
//! A write: its regions' intent durable → inside the gate: what open views need is saved, the bits are set → the data goes
//! down → the gate is left → the answer. A checkpoint publishes a fresh record (and perhaps a new view) and drains the gate:
//! then every write marked in the old record is on disk, and every later one is marked in the new record and saves its
//! blocks for the view.
//!
//! # Locks
//!
//! A thread that writes through an asynchronous queue stays inside the gate until it looks for completions, and it does not
//! look while it begins the next write or answers a question about the disk. If it then waits for a lock whose holder drains
//! the gate, that is a deadlock. So there are two classes of locks:
//!
//! - *Outer* locks may be held while the gate is drained: those of the caller that ends an epoch, then `Shared::ending`, then
//!   `Intents::sweeping`, then the gate's own turn. Only threads that have no write inside the gate take them: those that
//!   make checkpoints, cuts and sweeps.
//!   The locks of several disks that end their epochs at one moment are taken in one order.
//! - *Inner* locks are held for memory and file operations alone, never while the gate is drained and never while an outer
//!   lock is being taken: `Shared::current`, `Shared::spare`, `ForeignWatch::looked`, the write-intent log, and the stripes of a
//!   view. Every thread may take them.
//!
//! Whatever a writer calls ([`TrackedDisk`] as a `Disk`, its queues, [`TrackedDisk::dirty_runs`]) takes inner locks only.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock};
use std::time::Instant;

use device::{Clock, Disk, Done, Folder, Piece, Queue, Request, RequestKind, WriteCounts};
use extents::{Bitmap, OutOfMemory};

use crate::bitmap_file::BitmapFile;
use crate::cow_store::CowStore;
use crate::felt::Waits;
use crate::gate::{ClosedGates, Gate};
use crate::intent::Intents;
use crate::last_write_time::LastWriteTime;
use crate::unwritten::Unwritten;

/// What can be wrong with a record.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
    /// The source became smaller.
    #[error("the source shrank from {} to {}: pass --allow-shrink if that is intended", device::exact_size(*was), device::exact_size(*is))]
    Shrunk {
        /// Size in bytes that the record knows.
        was: u64,
        /// Size now.
        is: u64,
    },
    /// The state directory failed.
    #[error("{what} in {}: {error}", place.display())]
    State {
        /// What was tried.
        what: &'static str,
        /// The folder.
        place: std::path::PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The kernel would not.
    #[error("cannot {what} for {}: {error}", device.display())]
    Kernel {
        /// The action that failed, as a verb.
        what: &'static str,
        /// The device.
        device: std::path::PathBuf,
        /// What the kernel said.
        error: String,
    },
    /// The device or its path.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// Not supported by this machine or for this device.
    #[error("{0}")]
    Unable(String),
    /// Refused in the present state.
    #[error("{0}")]
    Refused(String),
}

impl TrackError {
    /// An error of the system, with what was tried there.
    pub fn state(what: &'static str, place: &Path) -> impl Fn(io::Error) -> TrackError + use<> {
        let place = place.to_path_buf();
        move |error| TrackError::State { what, place: place.clone(), error }
    }

    /// True if the present state forbids it, rather than a failure.
    pub fn is_refusal(&self) -> bool {
        match self {
            TrackError::Shrunk { .. } | TrackError::Refused(_) => true,
            TrackError::Device(e) => e.is_busy(),
            _ => false,
        }
    }
}

/// How to track.
#[derive(Debug, Clone)]
pub struct TrackOptions {
    /// Block size in bytes: a power of two from 4096 to 1 MiB.
    pub block_size: u32,
    /// Bytes a region of the write-intent log.
    pub region: u64,
    /// False omits the write-intent log: then a power cut loses bits. Only for measuring what the log costs, and for
    /// the test that shows what it is for.
    pub intents: bool,
    /// Accept a disk smaller than its record.
    pub allow_shrink: bool,
    /// The clock that stamps the image.
    pub clock: Clock,
}

impl TrackOptions {
    /// Bytes a region of the write-intent log.
    pub const REGION: u64 = 16 << 20;
}

/// What writers use; replaced as a whole.
#[derive(Clone)]
struct Current {
    record: Arc<BitmapFile>,
    /// Records swapped out and not yet released, ascending.
    frozen: Vec<Arc<BitmapFile>>,
    views: Vec<Arc<CowStore>>,
    followers: Vec<FollowerBits>,
}

/// What was written since a follower's last cut, in memory: the record of the epoch holds the same bits, and outlives the
/// process.
#[derive(Clone)]
struct FollowerBits {
    number: u64,
    blocks: Arc<Bitmap>,
}

/// Collects the writes between its cuts within an epoch. Ends when dropped.
pub struct Follower {
    number: u64,
    disk: TrackedDisk,
}

impl Follower {
    /// Blocks written since the last cut.
    pub fn pending(&self) -> u64 {
        let current = self.disk.current();
        current.followers.iter().find(|f| f.number == self.number).map_or(0, |f| f.blocks.count())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.disk.shared.replace(|current| current.followers.retain(|f| f.number != self.number));
    }
}

struct Shared {
    disk: Arc<dyn Disk>,
    folder: Arc<dyn Folder>,
    settings: TrackOptions,
    gate: Gate,
    intents: Intents,
    served: LastWriteTime,
    current: RwLock<Arc<Current>>,
    /// Counts the replacements of `current`, so that a queue need not take the lock for each write.
    version: AtomicU64,
    /// Followers created so far.
    followers: AtomicU64,
    /// Held throughout a checkpoint and a release: one at a time.
    ending: Mutex<()>,
    /// The next record, created ahead.
    spare: Mutex<Option<BitmapFile>>,
    foreign: ForeignWatch,
    /// Where the disk ends by now, in bytes, if that is before its end when it was opened.
    end: AtomicU64,
    unwritten: Unwritten,
}

/// Whether others write to the disk.
#[derive(Default)]
struct ForeignWatch {
    /// The mark of the disk at the last check.
    looked: Mutex<Option<WriteMark>>,
    /// No change was admitted since the last check. The next one checks again first: afterwards its own mark would hide foreign writes. Only
    /// that ends the rest, and a disk that cannot be looked at, which is doubted.
    at_rest: AtomicBool,
    /// Returns the mark of the disk, as for [`TrackedDisk::look`].
    watch: OnceLock<Watch>,
}

type Watch = Box<dyn Fn() -> Option<WriteMark> + Send + Sync>;

/// What each write to a disk moves, whoever writes.
#[derive(Debug, Clone, Copy)]
pub enum WriteMark {
    /// The time of change of an image, in nanoseconds since 1970.
    Changed(u64),
    /// The kernel's count of writes to a block device.
    Counted(WriteCounts),
}

impl WriteMark {
    fn has_moved(&self, now: &WriteMark) -> bool {
        match (self, now) {
            (WriteMark::Changed(was), WriteMark::Changed(now)) => was != now,
            (WriteMark::Counted(was), WriteMark::Counted(now)) => was.has_moved(now),
            _ => true,
        }
    }
}

/// A disk whose writes are recorded.
#[derive(Clone)]
pub struct TrackedDisk {
    shared: Arc<Shared>,
}

/// What a checkpoint froze.
#[derive(Debug)]
pub struct Frozen {
    /// The number of the epoch that ends here: above that of every record in it.
    pub number: u64,
    /// Blocks changed since what was released last.
    pub changes: Bitmap,
    /// The view of this moment, if one was asked for.
    pub view: Option<Arc<CowStore>>,
    /// Blocks written since the last cut of the follower that took part.
    pub followed: Option<Arc<Bitmap>>,
}

impl TrackedDisk {
    /// Opens the records in `folder` that come after `last_epoch`, as left by an earlier run, and goes on recording.
    /// `trusted` is false where what the folder holds cannot be trusted: then everything before is forgotten (and the caller
    /// writes a gap into the history). `power_lost` says that the kernel has been away since: then what was active is dirty.
    pub fn open(
        disk: Arc<dyn Disk>,
        folder: Arc<dyn Folder>,
        settings: TrackOptions,
        last_epoch: u64,
        trusted: bool,
        power_lost: bool,
    ) -> Result<TrackedDisk, TrackError> {
        let failed = |what| TrackError::state(what, folder.path());
        let record = Self::begin_record(&*folder, disk.len(), &settings, last_epoch, trusted, power_lost)?;
        let intents = Intents::create(&*folder, disk.len(), settings.region, settings.intents)
            .map_err(failed("cannot make the write-intent log"))?;
        let served = LastWriteTime::open(&*folder, settings.clock.clone())
            .map_err(failed("cannot make the stamp of the last write"))?;
        let unwritten = Unwritten::open(&*folder).map_err(failed("cannot read a file"))?;
        Ok(TrackedDisk {
            shared: Arc::new(Shared {
                disk,
                folder,
                settings,
                gate: Gate::new(served.words()),
                intents,
                served,
                current: RwLock::new(Arc::new(Current {
                    record: Arc::new(record),
                    frozen: Vec::new(),
                    views: Vec::new(),
                    followers: Vec::new(),
                })),
                version: AtomicU64::new(1),
                followers: AtomicU64::new(0),
                ending: Mutex::new(()),
                spare: Mutex::new(None),
                foreign: ForeignWatch::default(),
                end: AtomicU64::new(u64::MAX),
                unwritten,
            }),
        })
    }

    /// The record of the next epoch, in which all stands that the earlier ones say, and which alone is left in the folder.
    fn begin_record(
        folder: &dyn Folder,
        size: u64,
        settings: &TrackOptions,
        last_epoch: u64,
        trusted: bool,
        power_lost: bool,
    ) -> Result<BitmapFile, TrackError> {
        let failed = |what| TrackError::state(what, folder.path());
        let numbers = BitmapFile::list(folder).map_err(failed("cannot list the records"))?;
        let mut old = Vec::new();
        for number in numbers.iter().filter(|number| trusted && **number > last_epoch) {
            old.extend(BitmapFile::open(folder, *number).map_err(failed("cannot open a record"))?);
        }
        let was = old.iter().map(BitmapFile::size).max();
        if let Some(was) = was.filter(|was| *was > size && !settings.allow_shrink) {
            return Err(TrackError::Shrunk { was, is: size });
        }
        let number = numbers.last().copied().unwrap_or(0).max(last_epoch) + 1;
        let record = BitmapFile::create(folder, number, size, settings.block_size)
            .map_err(failed("cannot make a record"))?;
        for earlier in &old {
            record.absorb(earlier);
        }
        if let Some(was) = was.filter(|was| *was < size) {
            record.mark(was, size - was);
        }
        let damaged = || old.iter().any(|earlier| !earlier.is_sound() || earlier.lags());
        if !old.is_empty() && (power_lost || damaged()) {
            match Intents::left_active(folder).map_err(failed("cannot read the write-intent log"))? {
                Some(active) if settings.intents => active.iter().for_each(|r| {
                    let end = r.end.min(size);
                    record.mark(r.start, end.saturating_sub(r.start));
                }),
                Some(_) => {}
                None => {
                    record.mark(0, size);
                }
            }
        }
        // The order matters: what the old files say stands in the new record, durably, before they go.
        record.sync().map_err(failed("cannot write a record"))?;
        for number in &numbers {
            BitmapFile::remove(folder, *number).map_err(failed("cannot remove a record"))?;
        }
        folder.sync().map_err(failed("cannot sync the folder"))?;
        Ok(record)
    }

    /// True if `folder` holds a sound record that comes after `last_epoch`. From the first opening on there is always one:
    /// a folder without has lost what was written.
    pub fn has_record(folder: &dyn Folder, last_epoch: u64) -> io::Result<bool> {
        for number in BitmapFile::list(folder)?.into_iter().filter(|n| *n > last_epoch) {
            if BitmapFile::open(folder, number)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Adds to `into`, in blocks of `block_size` bytes, what the records in `folder` say that come after `last_epoch`. For a disk
    /// that nothing writes to; changes nothing.
    ///
    /// # Errors
    /// If the folder or a record cannot be read.
    pub fn add_recorded(
        folder: &dyn Folder,
        last_epoch: u64,
        block_size: u64,
        into: &Bitmap,
    ) -> io::Result<()> {
        for number in BitmapFile::list(folder)?.into_iter().filter(|n| *n > last_epoch) {
            let Some(record) = BitmapFile::open(folder, number)? else { continue };
            let unit = u64::from(record.block_size());
            for run in record.runs_in(0..record.size().div_ceil(unit)) {
                let end = (run.end * unit).div_ceil(block_size).min(into.blocks());
                into.set((run.start * unit / block_size).min(end)..end);
            }
            if record.lags() {
                for range in Intents::left_active(folder)?.unwrap_or_default() {
                    into.set(range.start / block_size..range.end.div_ceil(block_size).min(into.blocks()));
                }
            }
        }
        Ok(())
    }

    /// Takes into the record what was written before it was opened, in ranges of bytes. Durable on return.
    ///
    /// # Errors
    /// If the record cannot be written.
    pub fn mark(&self, ranges: &[Range<u64>]) -> Result<(), TrackError> {
        let record = self.record();
        for range in ranges {
            let end = range.end.min(self.len());
            record.mark(range.start, end.saturating_sub(range.start));
        }
        record.sync().map_err(self.failed("cannot write a record"))
    }

    /// Ends the record and begins the next, atomically for the writers; waits for the writes in flight; makes the source
    /// durable. What was frozen stays on disk, and is part of every later answer, until [`TrackedDisk::release`]. At the same
    /// moment a `follower` is cut.
    pub fn checkpoint(
        &self,
        view: Option<Arc<CowStore>>,
        follower: Option<&Follower>,
    ) -> Result<Frozen, TrackError> {
        let _alone = self.alone();
        let swapped = self.next()?.swap(view, follower);
        self.end_swap(swapped, follower)
    }

    /// Takes a checkpoint of several disks at one moment, each with a view: a write to one of them that began after a write to another had
    /// been answered is never in its view without that one. So the gates of all are closed before the first record is swapped,
    /// and opened after the last; meanwhile nothing is waited for. In the order of `members`, which must be the same for all
    /// callers.
    ///
    /// # Errors
    /// If a record cannot be ended: then no view is left open, and what was frozen is part of the next answer.
    pub fn checkpoint_together(members: &[(&TrackedDisk, Arc<CowStore>)]) -> Result<Vec<Frozen>, TrackError> {
        let _alone: Vec<_> = members.iter().map(|(disk, _)| disk.alone()).collect();
        let nexts = members.iter().map(|(disk, _)| disk.next()).collect::<Result<Vec<_>, _>>()?;
        let closed = ClosedGates::close(members.iter().map(|(disk, _)| &disk.shared.gate));
        let swapped: Vec<_> = nexts
            .into_iter()
            .zip(members)
            .map(|(next, (_, view))| next.swap(Some(view.clone()), None))
            .collect();
        drop(closed);
        let settled: Result<Vec<_>, _> =
            members.iter().zip(swapped).map(|((disk, _), swapped)| disk.end_swap(swapped, None)).collect();
        if settled.is_err() {
            members.iter().for_each(|(disk, view)| disk.drop_view(view));
        }
        settled
    }

    /// The record that comes next, made if there is none yet.
    fn next(&self) -> Result<Next<'_>, TrackError> {
        // Held until the record is in use: the next spare gets its number from it.
        let mut spare = self.shared.spare.lock().unwrap_or_else(|e| e.into_inner());
        if spare.is_none() {
            *spare = Some(self.next_record()?);
        }
        // What was written is gathered behind the cut, which cannot be taken back for want of memory.
        let blocks = Bitmap::try_new(self.blocks());
        let blocks = blocks.map_err(|e| self.failed("cannot gather what was written; state")(e.into()))?;
        Ok(Next { disk: self, spare, blocks })
    }

    /// After a swap: waits for the writes in flight, and makes the source durable.
    fn end_swap(&self, swapped: Swapped, follower: Option<&Follower>) -> Result<Frozen, TrackError> {
        let Swapped { frozen, followed, view, blocks } = swapped;
        self.shared.gate.drain();
        // The frozen record itself need not be durable: until it is released, no intent is dropped before it is, and what
        // was active counts as written.
        if let Err(error) = self.shared.disk.flush() {
            self.shared.unwritten.note(&*self.shared.folder, &error);
            let error = self.failed("cannot flush the source; state")(error);
            if let Some(view) = view {
                self.drop_view(&view);
            }
            if let (Some(follower), Some(followed)) = (follower, followed) {
                self.give_back(follower, &followed);
            }
            return Err(error);
        }
        let number = frozen.last().map_or(0, |last| last.number());
        Ok(Frozen { number, changes: self.marked(blocks, &frozen), view, followed })
    }

    /// Follows what is written from now on. A write that is in flight may go unnoticed: the checkpoint that comes next waits
    /// for it, and what it wrote belongs to the epoch that ends there.
    pub fn follow(&self) -> Follower {
        let number = self.shared.followers.fetch_add(1, SeqCst);
        let blocks = Arc::new(Bitmap::new(self.blocks()));
        self.shared.replace(|current| current.followers.push(FollowerBits { number, blocks }));
        Follower { number, disk: self.clone() }
    }

    /// Cuts a follower within an epoch, atomically for the writers: waits for the writes in flight, and returns the blocks
    /// written since its last cut. `view` shows this moment, and keeps those blocks alone. Nothing is made durable: the
    /// record still has all of it.
    pub fn cut(&self, follower: &Follower, view: &Arc<CowStore>) -> Arc<Bitmap> {
        let followed = self.shared.replace(|current| {
            current.views.push(view.clone());
            current.begin_anew(follower)
        });
        self.shared.gate.drain();
        let followed = followed.unwrap_or_else(|| Arc::new(Bitmap::new(self.blocks())));
        view.narrow(&followed);
        followed
    }

    /// Takes a cut back: what it gave is part of the next.
    pub fn give_back(&self, follower: &Follower, blocks: &Bitmap) {
        if let Some(f) = self.current().followers.iter().find(|f| f.number == follower.number) {
            f.blocks.union_with(blocks);
        }
    }

    /// Makes the next record ahead, so that a checkpoint need not wait for it. Does nothing if there is one.
    pub fn prepare(&self) -> Result<(), TrackError> {
        let mut spare = self.shared.spare.lock().unwrap_or_else(|e| e.into_inner());
        if spare.is_none() {
            *spare = Some(self.next_record()?);
        }
        Ok(())
    }

    /// A record with the number after that of the one in use; to be called with `spare` locked.
    fn next_record(&self) -> Result<BitmapFile, TrackError> {
        let s = &self.shared;
        BitmapFile::create(&*s.folder, self.record().number() + 1, s.disk.len(), s.settings.block_size)
            .map_err(self.failed("cannot make a record"))
    }

    /// Opens a view without ending the record, which is possible if nothing was written since what was released last.
    /// False if something was: then there is no view.
    pub fn view_of_unchanged(&self, view: Option<&Arc<CowStore>>) -> bool {
        let s = &self.shared;
        let _alone = self.alone();
        let Current { record, frozen, .. } = &*self.current();
        let is_clean = || record.is_clean() && record.is_sound();
        if !frozen.is_empty() || !is_clean() {
            return false;
        }
        if let Some(view) = view {
            s.replace(|current| current.views.push(view.clone()));
        }
        // Writes that entered before the view was published have left, and left a mark; later ones save for the view.
        // Without a mark, the view shows both this moment and the last checkpoint.
        s.gate.drain();
        let unchanged = is_clean();
        if let Some(view) = view.filter(|_| !unchanged) {
            self.drop_view(view);
        }
        unchanged
    }

    /// Drops what is frozen: it is in the history now.
    pub fn release(&self) -> Result<(), TrackError> {
        let s = &self.shared;
        let _alone = self.alone();
        for record in &self.current().frozen {
            BitmapFile::remove(&*s.folder, record.number()).map_err(self.failed("cannot remove a record"))?;
        }
        // Not synced: a record that comes back after a power cut has a number that the history knows, and is removed then.
        s.replace(|current| current.frozen.clear());
        Ok(())
    }

    /// Ends a view: nothing more is saved for it, and what was is gone. A queue that rests may hold it for long.
    pub fn drop_view(&self, view: &Arc<CowStore>) {
        self.shared.replace(|current| current.views.retain(|v| !Arc::ptr_eq(v, view)));
        view.give_up();
    }

    /// Views open now.
    pub fn views(&self) -> Vec<Arc<CowStore>> {
        self.current().views.clone()
    }

    /// The record being written.
    pub fn record(&self) -> Arc<BitmapFile> {
        self.current().record.clone()
    }

    /// Blocks written since what was released last, at this moment. Does not wait for a checkpoint that is under way.
    ///
    /// # Errors
    /// If there is no memory for a bitmap of its blocks.
    pub fn dirty(&self) -> Result<Bitmap, OutOfMemory> {
        let blocks = Bitmap::try_new(self.blocks())?;
        let current = self.current();
        let records: Vec<_> = current.frozen.iter().chain([&current.record]).cloned().collect();
        Ok(self.marked(blocks, &records))
    }

    /// The runs of blocks within a range that were written since what was released last, ascending, at most `limit`. Does
    /// not wait for a checkpoint that is under way.
    ///
    /// # Errors
    /// As [`TrackedDisk::dirty`].
    pub fn dirty_runs(&self, blocks: Range<u64>, limit: usize) -> Result<Vec<Range<u64>>, OutOfMemory> {
        let current = self.current();
        if current.frozen.is_empty() {
            let runs = current.record.runs_in(blocks.clone()).take(limit).collect();
            if current.record.is_sound() {
                return Ok(runs);
            }
        }
        Ok(self.dirty()?.runs_in(blocks).take(limit).collect())
    }

    /// The union of the records. If one of them could not be written to disk, its marks may be gone from memory
    /// too: those that had not reached the disk before are in active regions, which count as written whole.
    fn marked(&self, blocks: Bitmap, records: &[Arc<BitmapFile>]) -> Bitmap {
        records.iter().for_each(|record| record.add_to(&blocks));
        // In this order: what was read before the check is valid if the check passes.
        if !records.iter().all(|record| record.is_sound()) {
            let (size, block_size) = (self.shared.disk.len(), u64::from(self.block_size()));
            for range in self.shared.intents.active_ranges(size) {
                blocks.set(range.start / block_size..range.end.div_ceil(block_size));
            }
        }
        blocks
    }

    /// Housekeeping, to be called about once a second: lets regions fall idle that were not written for `age` calls, and
    /// makes the stamp of the last write durable.
    pub fn sweep(&self, age: u8) -> Result<(), TrackError> {
        let s = &self.shared;
        s.intents
            .sweep(age, &s.gate, || self.sync_records())
            .and_then(|()| s.served.sync())
            .map_err(self.failed("cannot tend the write-intent log"))
    }

    /// Notes the time if writes are in flight: called every few milliseconds, it tells a next process how long this one
    /// lived. Returns whether there were writes since `before`, an earlier result.
    pub fn pulse(&self, before: u64) -> (bool, u64) {
        let s = &self.shared;
        // What waits to be admitted after a rest has not written: a note would make what others wrote before it an own write after a kill.
        if s.gate.is_busy() && !s.foreign.at_rest.load(SeqCst) || s.served.is_ahead() {
            s.served.note();
        }
        let last = s.served.last();
        (last != before, last)
    }

    /// Checks whether another program has written to the disk: its mark moved although no write was admitted since the last look, or is not
    /// told any more. `mark` is asked for it, and must look when it is called: an older answer makes one's own writes foreign. While
    /// writes come and go, nothing is seen. `None` where nothing tells.
    ///
    /// False if it is too early: what others write next may be stamped with the time that the image bears already.
    pub fn look(&self, mark: impl FnOnce() -> Option<WriteMark>) -> Result<bool, TrackError> {
        let s = &self.shared;
        let mut looked = s.foreign.looked.lock().unwrap_or_else(|e| e.into_inner());
        let noted = s.served.last();
        // At rest, whatever is in the gate waits for this lock before it is admitted.
        let rested = s.foreign.at_rest.load(SeqCst);
        let now = mark();
        if !rested {
            // Before the gate is checked: a write that enters from now on waits for this check, and then checks first.
            s.foreign.at_rest.store(true, SeqCst);
            // In this order: a write in progress during the check is still inside the gate, or has left a note.
            if s.gate.is_busy() || s.served.last() != noted {
                s.foreign.at_rest.store(false, SeqCst);
                return Ok(true);
            }
        }
        let moved = match (&*looked, &now) {
            (Some(_), None) => true,
            (Some(was), Some(now)) => rested && was.has_moved(now),
            (None, _) => false,
        };
        *looked = now;
        if now.is_none() {
            s.foreign.at_rest.store(false, SeqCst);
        }
        if moved {
            s.served.doubt().map_err(self.failed("cannot record that the image was changed by others"))?;
        }
        let Some(WriteMark::Changed(changed)) = now else { return Ok(true) };
        // Last: after a kill, what was seen and not doubted is what it should be.
        s.served.see(changed);
        Ok(s.settings.clock.is_past(changed as i64))
    }

    /// Sets the function for the mark of the disk, for the first write after a rest. Later calls have no effect.
    pub fn watch(&self, mark: impl Fn() -> Option<WriteMark> + Send + Sync + 'static) {
        let _ = self.shared.foreign.watch.set(Box::new(mark));
    }

    /// The disk ends here by now, in bytes: what is beyond is refused from now on. A write there would make a file longer again.
    pub fn ends_at(&self, size: u64) {
        self.shared.end.store(size, SeqCst);
    }

    /// When it was written to last, in nanoseconds since 1970; 0 if it never was.
    pub fn last_write(&self) -> u64 {
        self.shared.served.last()
    }

    /// How often others were seen to have changed the image, if that was not [settled](TrackedDisk::settle) yet.
    pub fn foreign(&self) -> Option<u64> {
        self.shared.served.foreign()
    }

    /// The history has what [`TrackedDisk::foreign`] returned.
    pub fn settle(&self, times: u64) {
        self.shared.served.settle(times);
    }

    /// A clean stop: flushes the disk, makes every bit durable and drops all intents. No write may follow.
    pub fn close(&self) -> Result<(), TrackError> {
        let s = &self.shared;
        s.gate.drain();
        let flushed = s.disk.flush();
        let kept = s.unwritten.close(&*s.folder, flushed.as_ref().err());
        flushed.map_err(self.failed("cannot flush the source; state"))?;
        kept.map_err(self.failed("cannot remove a file"))?;
        self.sync_records().map_err(self.failed("cannot write a record"))?;
        if let Some(spare) = s.spare.lock().unwrap_or_else(|e| e.into_inner()).take() {
            BitmapFile::remove(&*s.folder, spare.number()).map_err(self.failed("cannot remove a record"))?;
        }
        s.intents
            .sweep(0, &s.gate, || Ok(()))
            .and_then(|()| s.served.sync())
            .map_err(self.failed("cannot drop the write-intent log"))
    }

    /// Regions that a power cut now would make dirty, and bytes a region.
    pub fn active_regions(&self) -> (u64, u64) {
        (self.shared.intents.active(), self.shared.intents.region())
    }

    /// Block size in bytes.
    pub fn block_size(&self) -> u32 {
        self.shared.settings.block_size
    }

    fn blocks(&self) -> u64 {
        self.shared.disk.len().div_ceil(u64::from(self.block_size()))
    }

    /// Makes the bits of all unreleased records durable. One look at the records is enough: a record that takes the place of
    /// another later has only the marks of later writes.
    fn sync_records(&self) -> io::Result<()> {
        let current = self.current();
        current.frozen.iter().chain([&current.record]).try_for_each(|record| record.sync())
    }

    fn alone(&self) -> MutexGuard<'_, ()> {
        self.shared.ending.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn current(&self) -> Arc<Current> {
        self.shared.current.read().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// The errors of what is tried with the state in its folder.
    fn failed(&self, what: &'static str) -> impl Fn(io::Error) -> TrackError + use<> {
        TrackError::state(what, self.shared.folder.path())
    }
}

/// The record that a checkpoint puts in use, and the lock under which it does.
struct Next<'a> {
    disk: &'a TrackedDisk,
    spare: MutexGuard<'a, Option<BitmapFile>>,
    /// A bitmap for the blocks that were written, with none set.
    blocks: Bitmap,
}

/// What a swap has taken out of use.
struct Swapped {
    frozen: Vec<Arc<BitmapFile>>,
    followed: Option<Arc<Bitmap>>,
    view: Option<Arc<CowStore>>,
    blocks: Bitmap,
}

impl Next<'_> {
    /// Puts the record in use, and with it a view, in one step for the writers. Waits for none of them.
    fn swap(mut self, view: Option<Arc<CowStore>>, follower: Option<&Follower>) -> Swapped {
        let next = self.spare.take();
        let (frozen, followed) = self.disk.shared.replace(|current| {
            current.views.extend(view.clone());
            if let Some(next) = next {
                let last = std::mem::replace(&mut current.record, Arc::new(next));
                current.frozen.push(last);
            }
            (current.frozen.clone(), follower.and_then(|f| current.begin_anew(f)))
        });
        Swapped { frozen, followed, view, blocks: self.blocks }
    }
}

impl Current {
    /// What a follower has, which begins again.
    fn begin_anew(&mut self, follower: &Follower) -> Option<Arc<Bitmap>> {
        let following = self.followers.iter_mut().find(|f| f.number == follower.number)?;
        let fresh = Arc::new(Bitmap::new(following.blocks.blocks()));
        Some(std::mem::replace(&mut following.blocks, fresh))
    }
}

impl Shared {
    /// Replaces what writers use. After the gate is drained, all of them have seen it.
    fn replace<T>(&self, change: impl FnOnce(&mut Current) -> T) -> T {
        let mut current = self.current.write().unwrap_or_else(|e| e.into_inner());
        let mut next = Current::clone(&current);
        let result = change(&mut next);
        *current = Arc::new(next);
        self.version.fetch_add(1, SeqCst);
        result
    }

    /// Admits a change of the given ranges. Returns the side of the gate to leave by.
    fn begin(&self, pieces: &[Piece], cache: &mut CurrentCache) -> io::Result<usize> {
        loop {
            let side = self.gate.enter();
            let idle = pieces.iter().find(|p| !self.intents.covers(p.offset, p.len));
            let Some(idle) = idle else {
                let current = cache.current(self);
                for view in &current.views {
                    for piece in pieces {
                        view.keep(&*self.disk, piece.offset, piece.len);
                    }
                }
                for piece in pieces {
                    let blocks = current.record.mark(piece.offset, piece.len);
                    for follower in &current.followers {
                        follower.blocks.set(blocks.clone());
                    }
                }
                if self.foreign.at_rest.load(SeqCst) {
                    self.wake();
                }
                self.served.note();
                return Ok(side);
            };
            // The log is written outside the gate: leave it, and check everything again.
            self.gate.leave(side);
            self.intents.activate(idle.offset, idle.len).map_err(|e| {
                let place = self.folder.path().display();
                io::Error::new(e.kind(), format!("cannot log the intent to write in {place}: {e}"))
            })?;
        }
    }

    /// Inside the gate, before the first change since the last check. Other changes wait here meanwhile.
    fn wake(&self) {
        let looked = self.foreign.looked.lock().unwrap_or_else(|e| e.into_inner());
        if !self.foreign.at_rest.load(SeqCst) {
            return;
        }
        if let (Some(was), Some(watch)) = (&*looked, self.foreign.watch.get()) {
            // What is not told is not believed.
            if watch().is_none_or(|now| was.has_moved(&now)) {
                // Counted in memory that outlives the process; that it is durable, too, is not for a write to wait for.
                self.served.count_foreign();
            }
        }
        self.foreign.at_rest.store(false, SeqCst);
    }

    fn end(&self, side: usize) {
        self.served.note();
        self.gate.leave(side);
        self.served.keep();
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.disk.len().min(self.end.load(SeqCst)) => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "beyond the end of the disk")),
        }
    }

    fn change(
        &self,
        offset: u64,
        len: u64,
        work: impl FnOnce(&dyn Disk) -> io::Result<()>,
    ) -> io::Result<()> {
        self.check(offset, len)?;
        let side = self.begin(&[Piece { offset, len }], &mut CurrentCache::default())?;
        let result = work(&*self.disk);
        self.end(side);
        result
    }
}

/// A queue's cached reference to the current state, refreshed when it was replaced.
#[derive(Default)]
struct CurrentCache {
    version: u64,
    current: Option<Arc<Current>>,
}

impl CurrentCache {
    /// Inside the gate. The version is read after the gate was entered: what a checkpoint published before its drain is
    /// seen by every write that the drain does not wait for.
    fn current<'a>(&'a mut self, shared: &Shared) -> &'a Current {
        let version = shared.version.load(SeqCst);
        let current = match self.current.take() {
            Some(current) if self.version == version => current,
            _ => {
                let current = shared.current.read().unwrap_or_else(|e| e.into_inner());
                // Read under the lock, so that number and content belong together.
                self.version = shared.version.load(SeqCst);
                current.clone()
            }
        };
        self.current.insert(current)
    }
}

impl Disk for TrackedDisk {
    fn failed(&self) -> Option<String> {
        self.shared.disk.failed().or_else(|| self.shared.unwritten.why().map(str::to_owned))
    }
    fn len(&self) -> u64 {
        self.shared.disk.len()
    }
    fn align(&self) -> u32 {
        self.shared.disk.align()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.shared.disk.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.shared.change(offset, buf.len() as u64, |d| d.write_at(offset, buf))
    }
    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        self.shared.change(offset, len, |d| d.zero(offset, len, unmap, fast))
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shared.change(offset, len, |d| d.discard(offset, len))
    }
    fn flush(&self) -> io::Result<()> {
        self.shared.disk.flush()
    }
    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        self.shared.disk.allocated(from)
    }
    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(TrackedQueue {
            inner: self.shared.disk.clone().queue(depth)?,
            shared: self.shared.clone(),
            cache: CurrentCache::default(),
            passes: Vec::new(),
            free: Vec::new(),
            refused: VecDeque::new(),
            waits: Waits::default(),
        }))
    }
}

/// A queue whose changes pass the gate.
struct TrackedQueue {
    inner: Box<dyn Queue>,
    shared: Arc<Shared>,
    cache: CurrentCache,
    /// For each change in flight its caller's token, its side of the gate, and when it began; the inner token is the place here.
    passes: Vec<(u64, usize, Instant)>,
    free: Vec<usize>,
    refused: VecDeque<Done>,
    waits: Waits,
}

fn changes(kind: RequestKind) -> bool {
    matches!(kind, RequestKind::Write { .. } | RequestKind::Zero { .. } | RequestKind::Discard { .. })
}

/// True if what it answers for is to be durable.
fn is_durable(kind: RequestKind) -> bool {
    match kind {
        RequestKind::Flush => true,
        RequestKind::Write { fua } | RequestKind::Zero { fua, .. } | RequestKind::Discard { fua } => fua,
        RequestKind::Read => false,
    }
}

impl Queue for TrackedQueue {
    fn submit(&mut self, mut request: Request) {
        if changes(request.kind) {
            let begun = Instant::now();
            let checked = request.pieces.iter().try_for_each(|p| self.shared.check(p.offset, p.len));
            match checked.and_then(|()| self.shared.begin(&request.pieces, &mut self.cache)) {
                Ok(side) => {
                    let pass = (request.token, side, begun);
                    let place = match self.free.pop() {
                        Some(place) => {
                            self.passes[place] = pass;
                            place
                        }
                        None => {
                            self.passes.push(pass);
                            self.passes.len() - 1
                        }
                    };
                    request.token = place as u64;
                }
                Err(error) => return self.refused.push_back(Done { request, result: Err(error) }),
            }
        }
        self.inner.submit(request)
    }

    fn start(&mut self) {
        self.inner.start()
    }

    fn complete(&mut self, wait: bool) -> Option<Done> {
        if let Some(done) = self.refused.pop_front() {
            return Some(done);
        }
        let mut done = self.inner.complete(wait)?;
        if is_durable(done.request.kind) {
            // A forced write may fail, and the next one succeed.
            let is_final = done.request.kind == RequestKind::Flush || self.shared.disk.failed().is_some();
            done.result = self.shared.unwritten.tell(done.result, is_final);
        }
        if changes(done.request.kind) {
            let place = done.request.token as usize;
            let (token, side, begun) = self.passes[place];
            let now = Instant::now();
            self.shared.served.felt(now.saturating_duration_since(begun) + self.waits.since(now));
            self.shared.end(side);
            self.free.push(place);
            done.request.token = token;
        }
        Some(done)
    }

    fn in_flight(&self) -> usize {
        self.refused.len() + self.inner.in_flight()
    }

    /// Refused requests need no descriptor: `complete` returns them first, and a poll comes after it has returned `None`.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}

impl Drop for TrackedQueue {
    /// Requests inside the gate must leave it, or no checkpoint would ever end.
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            if self.complete(true).is_none() {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests;
