//! A live disk as a source: a tracker in the kernel records what changes, and nothing saves what is overwritten.
//!
//! What is read from such a disk after a checkpoint is that epoch's content or newer; what is newer is in the tracker's
//! next record. So repeated passes over the changes converge, and the last, small one makes the copy exact: nothing
//! is written during it, because the file systems are frozen, or because there happened to be no writes.
//!
//! Writes that bypass the file systems, to the device itself or to a swap partition, are not stopped. The kernel's count of written
//! sectors and the tracker's marks, before and after the reading, reveal them: the cut is tried again, and then refused. (Where the
//! kernel does not count, as on brd, a write to a block that was also written in the moment before the freeze goes unnoticed.) If no file
//! system is mounted, the cut is valid if no write began while it was read and the tracker lost nothing; otherwise it is tried again, and
//! then refused. A write in flight at the checkpoint does not count as a write by another program: its block is marked in the next
//! record, and a copy with or without it is a state that a power cut could have left. So a write whose end the tracker did not see does
//! not prevent a cut, as long as the kernel counts none in flight and no sector written. `--freeze never` commits in spite of such
//! writes, marked fuzzy, and the sync says "without a cut".
//!
//! Before a checkpoint is released, and after its record was ended, the device is flushed: a block lost from the device's cache in a
//! power cut would be old at the source, new at the replica, and recorded nowhere. A loss that a checkpoint does not repair (a link of
//! the tracker is gone, the disk has another size) ends a sync before the first pass.
//!
//! A tracker's record belongs to the epoch whose id the tracker got at its last release. A history without this id (another one, an older
//! copy, or one from before the tracker was added again) does not trust the record: the replica is compared.
//!
//! A process that ends epochs holds the tracker's lock, in `/run/dsync/trackers`, named by the device number, so that two state
//! directories exclude each other. A process that does not see that lock (in a container with its own `/run`) is detected: each
//! checkpoint has a token, and a release with any but the last token fails; and if the record turns out to follow another epoch than this
//! history's last release, it is not trusted.

pub(crate) mod convergence;
pub(crate) mod freeze;
pub(crate) mod watchdog;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use delta::Epoch;
use device::{Boot, Dir, Disk, Folder, FolderLock, Identity, Mount, WriteCounts, WriteTimes};
use extents::Bitmap;
use serde::{Deserialize, Serialize};
use trackers::{Felt, TrackError, Tracker, TrackerLock};
use uuid::Uuid;

use crate::disk::backing::{Backing, open_reader};
use crate::disk::discard;
use crate::disk::rests::Rests;
use crate::live::convergence::Convergence;
use crate::record::bookmarks::{Bookmarks, Reached};
use crate::record::history::History;
use crate::record::lives;
use crate::record::stamp::ImageStamp;
use crate::record::state::{SourceMetadata, StateDir, about_in, write_about};
use crate::record::tally::Tally;
use crate::views::courtesy::{Courtesy, Feels};
use crate::views::memory_view::{MemoryReader, MemoryView};
use crate::views::shared::View;
use crate::{Gap, SourceError};
use freeze::{Freeze, FreezeError, PreparedFreeze};

/// Whether file systems may be frozen for the last pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum FreezeMode {
    /// Freeze what is mounted.
    #[default]
    Auto,
    /// Never freeze: the copy is fuzzy if anything is written meanwhile.
    Never,
    /// Freeze, and fail if nothing is mounted.
    Require,
}

/// How the last pass is made.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct CutOptions {
    /// Whether to freeze.
    pub freeze: FreezeMode,
    /// The longest time of a freeze.
    pub limit: Duration,
    /// The disks of a group are cut together: without a freeze they would not be of one moment.
    pub together: bool,
    /// A peer asks for it: file systems that were just frozen are left alone.
    #[serde(skip)]
    pub for_peer: bool,
}

impl Default for CutOptions {
    /// Freezes what is mounted, for at most ten seconds.
    fn default() -> CutOptions {
        CutOptions {
            freeze: FreezeMode::Auto,
            limit: Duration::from_secs(10),
            together: false,
            for_peer: false,
        }
    }
}

/// The most bytes that a cut holds.
const MOST: u64 = 256 << 20;

/// Bytes that are read in a few milliseconds, which do not matter under a freeze.
const LITTLE: u64 = 2 << 20;

/// How often a cut is tried while there are writes that a freeze does not stop.
const TRIES: usize = 5;

/// The result of the last pass.
pub struct Cut {
    /// The changes and what else was requested, as of the checkpoint. Nothing else may be read from it.
    pub view: View,
    /// How long file systems were frozen; `None` if nothing had to be.
    pub freeze: Option<Duration>,
    /// There were writes meanwhile: the data mixes several moments.
    pub fuzzy: bool,
    captured: Arc<MemoryView>,
}

impl Cut {
    /// True if all these blocks can be read from the view.
    pub fn holds(&self, blocks: &Bitmap) -> bool {
        self.captured.holds(blocks)
    }
}

/// A live disk, held.
pub struct Live {
    about: SourceMetadata,
    folder: Arc<dyn Folder>,
    tracker: Box<dyn Tracker>,
    disk: Arc<dyn Disk>,
    epochs: Mutex<Epochs>,
    courtesy: Arc<Courtesy>,
    /// Released when this is dropped.
    locks: Option<(FolderLock, TrackerLock)>,
    /// Created by this command: removed again if it has no epoch.
    fresh: Option<StateDir>,
}

impl Drop for Live {
    fn drop(&mut self) {
        if let (Some(state), Some((lock, _hold))) = (&self.fresh, self.locks.take()) {
            discard::undo(state, self.folder.path(), Some(lock));
        }
    }
}

/// A disk whose last pass is being made.
struct Held<'a> {
    live: &'a Live,
    epochs: MutexGuard<'a, Epochs>,
    capture: MemoryReader,
}

struct Epochs {
    history: History,
    lost: Option<Gap>,
    /// The epoch that the tracker's record follows, as far as this history knows.
    since: Option<Uuid>,
}

/// A disk that is tracked in the kernel: its identity does not reflect its content.
struct LiveBacking {
    identity: Identity,
    disk: Arc<dyn Disk>,
}

impl Backing for LiveBacking {
    fn identity(&self) -> Result<Identity, SourceError> {
        Ok(Identity { size: self.disk.len(), ..self.identity.clone() })
    }
    fn boot(&self) -> Boot {
        Boot::current()
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        Ok(self.disk.clone())
    }
}

/// Why a record that was released to another history is not trusted.
pub(crate) const OTHER_HISTORY: &str = "what the tracker recorded belongs to another history";

/// Whether what a tracker has recorded since the release of an epoch is all that was written since an epoch of this history.
pub(crate) fn follows(tracker: &dyn Tracker, history: &History, released: Uuid) -> Result<bool, TrackError> {
    Ok(match tracker.is_restored()? {
        // It was a copy: a later epoch may have ended after it was made.
        true => history.last().is_some_and(|last| last.id == released),
        // The record has everything since that epoch, whatever the history has learned since.
        false => history.knows(released),
    })
}

impl Live {
    /// Opens the disk at `path`, tracked by `tracker`. Takes the locks of the source and the tracker.
    ///
    /// # Errors
    /// `Busy` if another program holds it.
    pub fn open(state: &StateDir, path: &Path, tracker: Box<dyn Tracker>) -> Result<Live, SourceError> {
        let path = std::fs::canonicalize(path).map_err(SourceError::state("find", path))?;
        let identity = device::identity(&path)?;
        if identity.size == 0 {
            return Err(SourceError::Refused(format!(
                "{0} has no disk: attach it, or the file behind a loop device, and run \"dsync track remove {0}\" and \"dsync track add {0}\"",
                path.display()
            )));
        }
        let minting = state.lock()?;
        let known = state.source(&path.to_string_lossy())?;
        let uuid = known.as_ref().map_or_else(Uuid::new_v4, |(_, about)| about.uuid);
        let fresh = known.is_none().then(|| state.clone());
        let place = known.as_ref().map_or_else(|| state.source_folder(uuid), |(place, _)| place.clone());
        let folder = Dir::open(&place).map_err(SourceError::state("make", &place))?;
        let lock = match FolderLock::take(&place).map_err(SourceError::state("lock", &place))? {
            Ok(lock) => lock,
            Err(holder) => return Err(SourceError::Busy { path, holder }),
        };
        let hold = match TrackerLock::take(&path)? {
            Ok(hold) => hold,
            Err(holder) => return Err(SourceError::Busy { path, holder }),
        };
        let disk = open_reader(&path, &identity, true)?;
        let block_size = tracker.block_size();
        let about = SourceMetadata { path, ..SourceMetadata::new(uuid, identity, block_size) };
        let about = match known {
            Some((_, known)) => about.in_term_of(about_in(&folder)?.unwrap_or(known)),
            None => about,
        };
        let mut live = Self::over(about, disk, Arc::new(folder), tracker)?;
        drop(minting);
        live.locks = Some((lock, hold));
        live.fresh = fresh;
        Ok(live)
    }

    /// Opens a live disk from its parts. Takes no lock.
    #[doc(hidden)]
    pub fn over(
        mut about: SourceMetadata,
        disk: Arc<dyn Disk>,
        folder: Arc<dyn Folder>,
        tracker: Box<dyn Tracker>,
    ) -> Result<Live, SourceError> {
        write_about(&*folder, &about)?;
        // A stamp of a server is not valid from here on.
        ImageStamp::forget(&*folder)?;
        let history = History::hold(&*folder)?;
        lives::open(&*folder, &mut about, history.last(), true)?;
        let since = tracker.released()?;
        let lost = match since {
            _ if tracker.size() != disk.len() => Some(Gap::Resized),
            None => Some("the disk was not tracked before".into()),
            Some(id) if follows(&*tracker, &history, id)? => tracker.lost()?.map(Gap::from),
            Some(_) => Some(OTHER_HISTORY.into()),
        };
        let epochs = Mutex::new(Epochs { history, lost, since });
        let times = WriteTimes::of(about.identity.dev).filter(|_| about.identity.is_block());
        let felt = |times: &WriteTimes| {
            let (inside, ended, millis) = times.read()?;
            Some(Felt { inside, ended, nanos: millis * 1_000_000 })
        };
        let feels = times.map(|times| Box::new(move || felt(&times)) as Feels);
        let courtesy = Arc::new(Courtesy::new(feels));
        Ok(Live { about, folder, tracker, disk, epochs, courtesy, locks: None, fresh: None })
    }

    /// What the source's folder says of it.
    pub fn about(&self) -> &SourceMetadata {
        &self.about
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.disk.len()
    }

    pub(crate) fn backing(&self) -> Arc<dyn Backing> {
        Arc::new(LiveBacking { identity: self.about.identity.clone(), disk: self.disk.clone() })
    }

    /// How readers of its passes treat who writes to it. The last pass, in which nobody can, waits for nobody.
    pub(crate) fn courtesy(&self) -> &Arc<Courtesy> {
        &self.courtesy
    }

    pub(crate) fn folder(&self) -> Arc<dyn Folder> {
        self.folder.clone()
    }

    fn epochs(&self) -> MutexGuard<'_, Epochs> {
        self.epochs.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Why what came before the next checkpoint is not known; `None` if it is.
    pub fn lost(&self) -> Result<Option<Gap>, SourceError> {
        self.doubt(&self.epochs())
    }

    fn doubt(&self, epochs: &Epochs) -> Result<Option<Gap>, SourceError> {
        match &epochs.lost {
            Some(why) => Ok(Some(why.clone())),
            // The releaser took what was recorded until then.
            None if self.tracker.released()? != epochs.since => Ok(Some(OTHER_HISTORY.into())),
            None => Ok(self.tracker.lost()?.map(Gap::from)),
        }
    }

    /// Ends the epoch and begins the next. Data read afterwards is of this epoch, or newer and in the next record.
    pub fn checkpoint(&self) -> Result<View, SourceError> {
        let mut epochs = self.epochs();
        let changes = self.tracker.checkpoint()?;
        let epoch = self.write_down(&mut epochs, &changes)?;
        Ok(self.view(epoch, self.disk.clone()).beside(&self.courtesy))
    }

    /// Appends what a checkpoint of the tracker returned to the history, and releases it.
    ///
    /// The device is flushed before: what it loses from its cache at a power cut must be in the record, or it would
    /// be old here, new at the replica, and recorded nowhere.
    fn write_down(&self, epochs: &mut Epochs, changes: &Bitmap) -> Result<Epoch, SourceError> {
        // Asked after the checkpoint, to include any loss up to then.
        let lost = self.doubt(epochs)?;
        if lost.is_some() || !changes.is_clean() {
            self.flush_device()?;
        }
        let size = self.disk.len();
        let last = epochs.history.last();
        let same =
            last.filter(|e| lost.is_none() && changes.is_clean() && epochs.history.size_at(e) == Some(size));
        let epoch = match same {
            Some(epoch) => epoch,
            None => {
                let number = last.map_or(0, |e| e.number) + 1;
                let epoch = Epoch { number, id: Uuid::new_v4() };
                epochs.history.append(epoch, lost, size, self.about.block_size, changes)?;
                epoch
            }
        };
        self.tracker.release(epoch.id)?;
        (epochs.lost, epochs.since) = (None, Some(epoch.id));
        Ok(epoch)
    }

    /// The kernel's count of writes to the disk, if there is one.
    fn written(&self) -> Option<WriteCounts> {
        let identity = &self.about.identity;
        identity.is_block().then(|| WriteCounts::of(identity.dev)).flatten()
    }

    /// Drops what the system has in memory of the device, for those who read it by their own means.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub(crate) fn drop_cached(&self) -> Result<(), SourceError> {
        Ok(device::drop_cached(&self.about.path)?)
    }

    fn flush_device(&self) -> Result<(), SourceError> {
        self.disk.flush().map_err(SourceError::state("flush", &self.about.path))
    }

    /// True if the disk has another size than when its tracker began: a checkpoint does not help.
    pub fn is_resized(&self) -> bool {
        self.tracker.size() != self.disk.len()
    }

    /// Why writes to the disk stay unknown even after a checkpoint; `None` if a checkpoint helps. To be asked
    /// after a checkpoint.
    pub fn lost_for_good(&self) -> Result<Option<Gap>, SourceError> {
        if self.lost()?.is_none() {
            return Ok(None);
        }
        // Something may have been lost in that very moment.
        self.checkpoint()?;
        self.lost()
    }

    fn view(&self, epoch: Epoch, disk: Arc<dyn Disk>) -> View {
        View::new(epoch, disk, self.disk.len(), None, Arc::new(|| Ok(())))
    }

    /// What was written since the last checkpoint.
    pub fn dirty(&self) -> Result<Bitmap, SourceError> {
        Ok(self.tracker.dirty()?)
    }

    /// The last pass: a checkpoint, and all changes up to it, and `also`, read while there are no writes.
    ///
    /// The source's own state may be on a file system that is frozen: between freeze and thaw it is not written to, and nothing
    /// is waited for that another thread may write there.
    ///
    /// # Errors
    /// `Refused` if that is impossible: too much changes, a freeze ends early, or writes bypass the file systems.
    pub fn cut(&self, also: &Bitmap, options: &CutOptions) -> Result<Cut, SourceError> {
        let mounts = self.mounts(options)?;
        let frozen = match mounts.is_empty() {
            true => None,
            false => Live::frozen_cut(&[(self, also)], &mounts, options)?.pop(),
        };
        frozen.map_or_else(|| self.unfrozen_cut(also, options), Ok)
    }

    /// The last pass of several disks, all as of one moment: all file systems are frozen before the first record is read.
    ///
    /// # Errors
    /// As [`Live::cut`]; refused without a freeze.
    pub(crate) fn cut_together(
        members: &[(&Live, &Bitmap)],
        options: &CutOptions,
    ) -> Result<Vec<Cut>, SourceError> {
        if options.freeze == FreezeMode::Never {
            return Err(SourceError::Refused(
                "without a freeze the disks of a group are not of one moment: omit --freeze never".into(),
            ));
        }
        let mut mounts: Vec<Mount> = Vec::new();
        for (live, _) in members {
            for mount in live.mounts(options)? {
                if !mounts.iter().any(|known| known.dev == mount.dev) {
                    mounts.push(mount);
                }
            }
        }
        Live::frozen_cut(members, &mounts, options)
    }

    /// The file systems that a cut freezes, if it can.
    fn mounts(&self, options: &CutOptions) -> Result<Vec<Mount>, SourceError> {
        let mounts = match options.freeze {
            FreezeMode::Never => return Ok(Vec::new()),
            _ => device::mounts_on(&self.about.path)?,
        };
        if let Some(place) = device::hidden_mount(&self.about.path) {
            let never = match options.together {
                true => "",
                false => "; --freeze never copies it without a freeze, as a power cut would leave it",
            };
            return Err(SourceError::Refused(format!(
                "{} is {place}, so this process cannot freeze its file system: run dsync in that mount namespace (\"nsenter \
                 --mount --target PID\") or unmount it there{never}",
                self.about.path.display()
            )));
        }
        if mounts.is_empty() && options.freeze == FreezeMode::Require {
            return Err(SourceError::Refused(format!(
                "no mounted file system on {} to freeze: omit --freeze require, and stop programs that write to the disk \
                 itself",
                self.about.path.display()
            )));
        }
        if options.for_peer {
            Rests::of_file_systems(mounts.iter().map(|mount| mount.dev))?.refuse(&self.about.path)?;
        }
        Ok(mounts)
    }

    /// Writes out the caches of the file systems that a cut freezes: the tracker sees those writes only then.
    ///
    /// # Errors
    /// If a cut would be refused: before a pass, so that nothing is copied in vain.
    pub fn flush(&self, options: &CutOptions) -> Result<(), SourceError> {
        freeze::flush(&self.mounts(options)?).map_err(refused)
    }

    /// The last passes of disks whose file systems these are. A disk without any is of that moment if nothing writes to it.
    fn frozen_cut(
        members: &[(&Live, &Bitmap)],
        mounts: &[Mount],
        options: &CutOptions,
    ) -> Result<Vec<Cut>, SourceError> {
        let mut all = Vec::new();
        for (live, also) in members {
            let epochs = live.epochs();
            let mut capture = live.begin_capture()?;
            live.read_and_keep(&mut capture, also)?;
            all.push(Held { live, epochs, capture });
        }
        // While one was read, others were written to.
        let sweeps = if all.len() > 1 { 2 } else { 1 };
        for _ in 0..TRIES {
            let prepared = Freeze::prepare(mounts, options.limit).map_err(refused)?;
            for _ in 0..sweeps {
                for held in &mut all {
                    let left =
                        held.live.read_while_it_shrinks(&mut held.epochs, &prepared, &mut held.capture)?;
                    // The freeze itself causes further writes.
                    held.capture.prepare(2 * left + (8 << 20));
                }
            }
            // Before the freeze, since it takes the kernel some time. What is written from here to the freeze is of
            // both epochs.
            all.iter().try_for_each(|held| held.live.tracker.checkpoint().map(drop))?;
            prepared.settle().map_err(refused)?;
            let freeze = prepared.freeze().map_err(refused)?;
            // All records before the first disk is read: from here to the end nothing may be written to any.
            let ended = all.iter().map(|held| Ok((held.live.tracker.dirty()?, held.live.written())));
            let ended = ended.collect::<Result<Vec<_>, SourceError>>()?;
            let read: Vec<_> =
                all.iter_mut().zip(&ended).map(|(held, (changes, _))| held.capture.read(changes)).collect();
            let mut still = true;
            for (held, (changes, written)) in all.iter().zip(&ended) {
                // A write to a block that was marked before shows in the count only, once it has ended.
                still &= *written == held.live.written()
                    && written.as_ref().is_none_or(|count| count.in_flight == 0)
                    && changes.count() == held.live.tracker.dirty()?.count();
            }
            let lasted = freeze.thaw().map_err(refused)?;
            for (held, read) in all.iter_mut().zip(read) {
                held.live.kept(read, &mut held.capture)?;
            }
            if still {
                let cuts = all.into_iter().zip(ended).map(|(mut held, (changes, _))| {
                    let epoch = held.live.write_down(&mut held.epochs, &changes)?;
                    Ok(held.live.cut_of(epoch, held.capture, Some(lasted), false))
                });
                return cuts.collect();
            }
        }
        let paths: Vec<String> =
            members.iter().map(|(live, _)| live.about.path.display().to_string()).collect();
        let never = match options.together {
            true => "",
            false => ", or pass --freeze never to take a copy that may mix several moments",
        };
        Err(SourceError::Restless(format!(
            "{} is being written to past its file systems while these are frozen: stop programs that write to the device itself, \
             or to a partition that is not mounted (\"swapoff\" for swap space){never}",
            paths.join(" or ")
        )))
    }

    /// Reads what a freeze would have to read while nothing is frozen yet. Returns the bytes of the last pass.
    fn read_while_it_shrinks(
        &self,
        epochs: &mut Epochs,
        prepared: &PreparedFreeze,
        capture: &mut MemoryReader,
    ) -> Result<u64, SourceError> {
        let mut convergence = Convergence::new(LITTLE);
        loop {
            prepared.settle().map_err(refused)?;
            let changes = self.tracker.checkpoint()?;
            self.write_down(epochs, &changes)?;
            self.read_and_keep(capture, &changes)?;
            let bytes = changes.count().saturating_mul(self.about.block_size.into());
            if !convergence.pays(bytes) {
                return Ok(bytes);
            }
        }
    }

    /// Without a freeze the pass is exact if nothing was written while it was read.
    fn unfrozen_cut(&self, also: &Bitmap, options: &CutOptions) -> Result<Cut, SourceError> {
        let mut epochs = self.epochs();
        let mut capture = self.begin_capture()?;
        self.read_and_keep(&mut capture, also)?;
        for left in (0..TRIES).rev() {
            // Write the device's own page cache out now, not during the read.
            self.flush_device()?;
            let changes = self.tracker.checkpoint()?;
            let epoch = self.write_down(&mut epochs, &changes)?;
            let written = self.written();
            self.read_and_keep(&mut capture, &changes)?;
            let still = self.nobody_wrote(written)?;
            // A record that another program has released meanwhile is clean, too.
            let doubt = self.doubt(&epochs)?;
            let fuzzy = !still || doubt.is_some();
            if !fuzzy || (left == 0 && options.freeze == FreezeMode::Never) {
                return Ok(self.cut_of(epoch, capture, None, fuzzy));
            }
            if let (0, true, Some(why)) = (left, still, doubt) {
                return Err(SourceError::Lost { since: epoch.number, why });
            }
        }
        Err(SourceError::Restless(format!(
            "{} is being written to, and has no mounted file system to freeze: stop the writer for a moment, or \
             pass --freeze never to take a copy that may mix several moments",
            self.about.path.display()
        )))
    }

    /// True if no write began since the last checkpoint. `before` is the count of writes after it.
    ///
    /// A write in flight at the checkpoint does not matter: whether it reached the disk before the read or after, the copy is
    /// a state that a power cut at the checkpoint could have left. But a later one to the same blocks shows in the count only.
    fn nobody_wrote(&self, before: Option<WriteCounts>) -> Result<bool, SourceError> {
        let dirty = self.tracker.dirty()?;
        let now = self.written();
        let counted = now.is_some_and(|count| count.in_flight == 0) && now == before;
        if let Some(in_flight) = self.tracker.in_flight().filter(|_| counted) {
            dirty.subtract(&in_flight);
        }
        Ok(dirty.is_clean())
    }

    fn cut_of(&self, epoch: Epoch, capture: MemoryReader, freeze: Option<Duration>, fuzzy: bool) -> Cut {
        let captured = Arc::new(capture.finish());
        Cut { view: self.view(epoch, captured.clone()), freeze, fuzzy, captured }
    }

    fn begin_capture(&self) -> Result<MemoryReader, SourceError> {
        let capture = MemoryReader::new(&self.disk, self.about.block_size.into(), MOST);
        capture.map_err(SourceError::state("read", &self.about.path))
    }

    fn read_and_keep(&self, capture: &mut MemoryReader, blocks: &Bitmap) -> Result<(), SourceError> {
        let read = capture.read(blocks);
        self.kept(read, capture)
    }

    /// The result of a read, with all data in place.
    fn kept(&self, read: std::io::Result<bool>, capture: &mut MemoryReader) -> Result<(), SourceError> {
        let path = &self.about.path;
        if read.map_err(SourceError::state("read", path))? && capture.keep() {
            return Ok(());
        }
        Err(SourceError::Refused(format!(
            "{} changes faster than it can be copied: more than {} MiB were left for the last pass. Run again under less \
             load, or allow more passes with --passes",
            path.display(),
            MOST >> 20
        )))
    }

    /// Records the epoch of a replica, and tidies the history.
    pub fn acknowledge(&self, replica: &str, at: Reached) -> Result<(), SourceError> {
        let mut epochs = self.epochs();
        let bookmarks = Bookmarks::set(&*self.folder, replica, at)?;
        Tally::follow(&*self.folder, &bookmarks, replica);
        epochs.history.tidy(&*self.folder, &bookmarks.epochs(), &[])
    }

    /// Sets a named checkpoint at an epoch; without one at the present, which ends the epoch. See
    /// [`Source::name_checkpoint`](crate::Source::name_checkpoint).
    pub fn name_checkpoint(&self, name: &str, at: Option<Epoch>) -> Result<Epoch, SourceError> {
        let mut epochs = self.epochs();
        Bookmarks::read(&*self.folder)?.admits(&self.about.path, &epochs.history, name, at)?;
        let epoch = match at {
            Some(epoch) => epoch,
            None => {
                let changes = self.tracker.checkpoint()?;
                self.write_down(&mut epochs, &changes)?
            }
        };
        let bookmarks = Bookmarks::set(&*self.folder, name, Reached::epoch(epoch))?;
        epochs.history.tidy(&*self.folder, &bookmarks.epochs(), &[])?;
        Ok(epoch)
    }
}

fn refused(error: FreezeError) -> SourceError {
    SourceError::Refused(format!("{error}: run again, or see --freeze"))
}
