//! A source held by this process: its record, its history, its checkpoints.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use delta::Epoch;
use device::{Clock, Dir, Disk, Folder, FolderLock, Format, Identity, Life, WriteCounts, WriteWatch};
use extents::Bitmap;
use lineage::{Lives, Point};
use qcow2::Use;
use trackers::{CowStore, Follower, Frozen, LastWriteTime, TrackOptions, TrackedDisk};
use uuid::Uuid;

use crate::disk::backing::{Backing, PathBacking, disk_in, mark_of, open_image, write_mark};
use crate::disk::clones::{self, Around, NewClone};
use crate::disk::discard;
use crate::disk::export::ExportBacking;
use crate::disk::moments::{self, MomentBacking, NewMoment, Told};
use crate::disk::outside::Outside;
use crate::disk::rests::Rests;
use crate::disk::tend::Tending;
use crate::record::bookmarks::{Bookmarks, Reached};
use crate::record::history::{History, KnownPosition};
use crate::record::lives::{self, BatchNumbers};
use crate::record::stamp::{
    COPIED, DeviceTrust, DurableTimes, FOREIGN, FileMark, ImageStamp, LastWrite, REPLACED, StampVerdict,
    UNNAMED, UNRECORDED, bytes_of,
};
use crate::record::state::{SourceMetadata, StateDir, about_in, write_about};
use crate::record::tally::Tally;
use crate::views::courtesy::{Courtesy, Feels};
use crate::views::shared::View;
use crate::{Gap, SourceError};

/// How to open a source.
#[derive(Debug, Clone)]
pub struct SourceOptions {
    /// Block size in bytes; `None` takes that of the existing record, or chooses one by the size of the disk.
    pub block_size: Option<u32>,
    /// How the disk lies in its file. `None`: as is known of it, and raw if nothing is.
    pub format: Option<Format>,
    /// No writes go through the source while it is open here.
    pub read_only: bool,
    /// Track the image by clones from now on, if it is not.
    pub clones: bool,
    /// A peer asks for it: an image that was just cloned is left alone.
    pub for_peer: bool,
    /// What is held around the moment of its clone, if it is tracked so.
    pub around: Option<Arc<dyn Around>>,
    /// What others say of the moment that is to be read.
    pub told: Option<Told>,
    /// Whether nothing may write to the disk while it is open here.
    pub at_rest: AtRest,
    /// Write bypassing the page cache.
    pub direct: bool,
    /// When the record of a block device is trusted across a stop.
    pub device_trust: DeviceTrust,
    /// Accept a source smaller than its record.
    pub allow_shrink: bool,
    /// The most bytes that one view may save.
    pub view_limit: u64,
    /// False omits the write-intent log; see [`TrackOptions::intents`].
    pub intents: bool,
    /// Region size of the write-intent log in bytes.
    pub region: u64,
    /// Time between sweeps of the write-intent log; a region becomes idle after ten without a write.
    pub sweep_every: Duration,
}

/// Whether a disk has to be at rest while it is open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum AtRest {
    /// It may be read by a clone.
    #[default]
    NotNeeded,
    /// Nothing may write to it, also if it is tracked by clones: what is written after a clone would be in no sync.
    Needed,
    /// It is at rest, and a disk in use otherwise: of a VM that is off, or whose moment is read elsewhere, or one that takes over. An older content of
    /// such a disk is a backup.
    InUse,
}

impl Default for SourceOptions {
    fn default() -> SourceOptions {
        SourceOptions {
            block_size: None,
            format: None,
            read_only: false,
            clones: false,
            for_peer: false,
            around: None,
            told: None,
            at_rest: AtRest::NotNeeded,
            direct: false,
            device_trust: DeviceTrust::Never,
            allow_shrink: false,
            view_limit: SourceOptions::VIEW_LIMIT,
            intents: true,
            region: TrackOptions::REGION,
            sweep_every: SourceOptions::SWEEP_EVERY,
        }
    }
}

impl SourceOptions {
    /// The default of `view_limit`.
    pub const VIEW_LIMIT: u64 = 16 << 30;
    /// The default of `sweep_every`.
    pub const SWEEP_EVERY: Duration = Duration::from_secs(1);

    /// The block size for a disk: 4 KiB, larger where the bitmap would exceed 128 MiB, up to 1 MiB.
    fn block_size_for(size: u64) -> u32 {
        let mut block_size = 4096u32;
        while block_size < 1 << 20 && size / u64::from(block_size) > (128 << 20) * 8 {
            block_size *= 2;
        }
        block_size
    }

    /// Where the moment is that is to be read, if that is not the source's path.
    pub fn elsewhere(&self) -> Option<&Path> {
        self.told.as_ref()?.place.as_deref()
    }

    /// True if what is recorded is of the file, whatever is in it. The moment of a group is that of its disks.
    fn is_of_file(&self) -> bool {
        self.clones || self.told.as_ref().is_some_and(|told| told.group.is_none())
    }

    /// How its disk is tracked. `lost`: what was written is not known, so nothing can be lost by a smaller disk.
    fn settings(&self, block_size: u32, lost: bool, clock: Clock) -> TrackOptions {
        let allow_shrink = self.allow_shrink || lost;
        TrackOptions { block_size, region: self.region, intents: self.intents, allow_shrink, clock }
    }
}

/// The result of a checkpoint.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// The epoch of the source.
    pub epoch: Epoch,
    /// The store of its view, if one was requested.
    pub saved: Option<Arc<CowStore>>,
    /// Blocks written in the epoch that ended; `None` if that is not known.
    pub changes: Option<Arc<Bitmap>>,
}

/// What was written between two moments of a source.
#[derive(Debug, Clone)]
pub struct BatchChanges {
    /// The last epoch before the second moment; the one that ends there, if one does.
    pub epoch: Epoch,
    /// The second moment.
    pub at: Point,
    /// The store of the view of that moment.
    pub saved: Arc<CowStore>,
    /// Blocks written in between.
    pub changes: Arc<Bitmap>,
}

/// A source, held. Its lock is free again when this is dropped; [`Source::close`] ends it cleanly.
pub struct Source {
    about: SourceMetadata,
    folder: Arc<dyn Folder>,
    backing: Arc<dyn Backing>,
    disk: TrackedDisk,
    direct: bool,
    /// Clients may write to it.
    served: bool,
    views: Views,
    /// An outer lock, as all that a checkpoint holds (see `trackers/src/tracked.rs`): not for writers.
    epochs: Mutex<Epochs>,
    /// Why the changes before the next checkpoint are not known, and the number of the last epoch that was recorded. An inner lock:
    /// connections take it during their writes. Changed with `epochs` locked.
    lost: Mutex<(Option<Gap>, u64)>,
    /// Until when mirrors have brought replicas up to date, in seconds since 1970. An inner lock.
    mirrored: Mutex<BTreeMap<String, u64>>,
    /// An inner lock.
    batches: Mutex<BatchNumbers>,
    tending: Option<Tending>,
    locks: Option<(FolderLock, Option<device::ImageLock>)>,
    /// Created by this command, which only reads: removed again if it has no epoch.
    fresh: Option<StateDir>,
    /// An inner lock. Who said at its opening what was written before, until that is in an epoch.
    outside: Mutex<Option<Outside>>,
}

/// The views of a source.
struct Views {
    /// The most bytes that one may save.
    limit: u64,
    /// Where the readers of those that are shared wait for the guest.
    courtesy: Arc<Courtesy>,
    /// An outer lock, taken before `epochs`. Those that are open as `@view` (the empty name) and `@view.NAME`.
    shared: Mutex<BTreeMap<String, Weak<SharedView>>>,
}

impl Views {
    fn new(folder: &dyn Folder, limit: u64) -> Views {
        let feels = LastWriteTime::felt_in(folder).ok().map(|felt| Box::new(move || felt.read()) as Feels);
        Views { limit, courtesy: Arc::new(Courtesy::new(feels)), shared: Mutex::default() }
    }
}

/// What a source is opened from.
pub(crate) struct Parts {
    /// Who says what was written before.
    pub outside: Option<Outside>,
    pub about: SourceMetadata,
    pub disk: Arc<dyn Disk>,
    pub folder: Arc<dyn Folder>,
    pub backing: Box<dyn Backing>,
    pub history: History,
    pub identity: Identity,
}

/// What was found of a source when it was opened.
pub(crate) struct Found {
    /// Whether its record can be believed.
    pub verdict: StampVerdict,
    /// The size that its image had, in bytes.
    pub was: u64,
    /// The times of a foreign write, if one was noticed.
    pub foreign: Option<u64>,
    /// Of a block device, the kernel's count of writes by which that was found.
    pub counted: Option<WriteCounts>,
}

impl Parts {
    /// Makes a clone of an image that is tracked so. It becomes the source's disk, unless the image has to be at rest or is to be written to. Returns why
    /// none can be made.
    ///
    /// # Errors
    /// Why none can be made, if the image is to be tracked so from now on; otherwise as [`NewClone::make`], and while it rests.
    fn make_clone(&mut self, options: &SourceOptions) -> Result<Option<String>, SourceError> {
        if options.for_peer {
            Rests::of_image(&*self.folder)?.refuse(&self.about.path)?;
        }
        let (state, last) = (self.folder.clone(), self.history.last());
        // Also for a server and a dry run, which throw it away: their record says that it has all that was written until then, and only a clone waits
        // for direct writes that are under way, which no map shows before they end.
        let clone = match NewClone::make(state, &self.about, last, options.around.as_deref())? {
            Ok(clone) => clone,
            Err(why) if options.clones => {
                return Err(SourceError::Refused(format!(
                    "{} cannot be tracked by clones ({why}): that takes a file on XFS (made with reflink=1, as is usual) or Btrfs, some room there, and the \
                     right to write to its folder. Serve it with \"dsync serve\", and have its user write through that; or let each sync compare it",
                    self.about.path.display()
                )));
            }
            Err(why) => return Ok(Some(why)),
        };
        // From before the clone: what is written to an image after that counts as others' writes.
        self.identity = clone.image.clone();
        // An image that has to be at rest is read by its clone, too: what is sent of it is of one moment, whatever ends the sync.
        if options.read_only {
            self.disk = clone.disk()?;
            let image = std::mem::replace(&mut self.backing, Box::new(clone.backing()));
            if options.at_rest != AtRest::NotNeeded {
                self.backing = Box::new(clone.at_rest(image));
            }
        }
        self.outside = Some(Outside::Clone(clone));
        Ok(None)
    }
}

/// What a checkpoint changes, under one lock.
struct Epochs {
    history: History,
    stamp: ImageStamp,
    /// The record that is not believed stands as it was found, until an epoch ends.
    spared: bool,
    /// What was sent of the disk itself: of which epoch, and to a replica in which state.
    sent: Vec<(Epoch, Uuid)>,
}

/// What a checkpoint finds of a source before it swaps the record.
struct Present {
    /// Why what was written is not known.
    lost: Option<Gap>,
    /// The count of foreign writes, to be settled.
    foreign: Option<u64>,
    /// Bytes of the disk.
    size: u64,
    /// The last epoch, if it is still the present one where nothing was written.
    stands: Option<Epoch>,
}

/// A view that is open as long as there is a reference to it.
pub struct SharedView {
    /// The view.
    pub view: View,
    checkpoint: Checkpoint,
    disk: TrackedDisk,
    /// The named checkpoints at its opening, except those before a gap, by their names and by the ids of their epochs.
    since: BTreeMap<String, Arc<ChangesSince>>,
}

/// What changed from a named checkpoint to a view. It is the same for all readers of the view, wherever the name moves.
struct ChangesSince {
    epoch: Epoch,
    /// An outer lock, taken before `epochs`. Computed when first needed.
    changes: Mutex<Option<Arc<Bitmap>>>,
}

impl SharedView {
    /// The checkpoint that it shows.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The named checkpoints since which the changes up to this view are known, each also by the id of its epoch.
    pub fn checkpoints(&self) -> impl Iterator<Item = &str> {
        self.since.keys().map(String::as_str)
    }

    /// What changed from a named checkpoint, as it stood when the view was opened, up to this view; in blocks of `source`,
    /// whose view this is.
    ///
    /// # Errors
    /// If the history does not know them.
    pub fn changes(&self, source: &Source, checkpoint: &str) -> Result<Arc<Bitmap>, SourceError> {
        let since = self.since.get(checkpoint).ok_or_else(|| {
            SourceError::Unknown(format!("what changed since checkpoint {checkpoint} is not known"))
        })?;
        let mut found = since.changes.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(changes) = &*found {
            return Ok(changes.clone());
        }
        let block_size = source.about.block_size;
        let changes = Bitmap::try_new(self.view.len().div_ceil(u64::from(block_size)))
            .map_err(SourceError::memory(&source.about.path))?;
        let upto = self.checkpoint.epoch;
        source.with_history(|h| h.changes_between(&since.epoch, &upto, block_size, &changes))?;
        Ok(found.insert(Arc::new(changes)).clone())
    }
}

impl Drop for SharedView {
    fn drop(&mut self) {
        if let Some(saved) = &self.checkpoint.saved {
            self.disk.drop_view(saved);
        }
    }
}

impl Source {
    /// Opens the source at `path`, creating its folder in the state directory if it is new. Takes the source's lock.
    ///
    /// # Errors
    /// `Busy` if another program holds it.
    pub fn open(state: &StateDir, path: &Path, options: &SourceOptions) -> Result<Source, SourceError> {
        let mut made = None;
        let opened = Self::open_noting(state, path, options, &mut made);
        if let (Err(_), Some(place)) = (&opened, made) {
            discard::undo(state, &place, None);
        }
        opened
    }

    /// Opens a source as [`Source::open`] does; `made` gets the folder that was created for it.
    fn open_noting(
        state: &StateDir,
        path: &Path,
        options: &SourceOptions,
        made: &mut Option<PathBuf>,
    ) -> Result<Source, SourceError> {
        let (export, identity) = look_at(path, options)?;
        let path = identity.path.clone();
        let read = options.elsewhere().unwrap_or(&path);
        if path.to_str().is_none() {
            return Err(SourceError::Refused(format!(
                "the name of {} is not UTF-8, so its state could not be found again: rename it",
                path.display()
            )));
        }
        let is_export = export.is_some();
        if !is_export {
            refuse_used(read, options)?;
        }
        let minting = state.lock()?;
        let known = state.source(&path.to_string_lossy())?;
        let uuid = known.as_ref().map_or_else(Uuid::new_v4, |(_, about)| about.uuid);
        let place = known.as_ref().map_or_else(|| state.source_folder(uuid), |(place, _)| place.clone());
        let format = format_of(&path, known.as_ref().map(|(_, about)| about), options)?;
        let lock_image = || {
            let access = if options.read_only { device::Access::ReadShared } else { device::Access::Write };
            match format {
                // Who else uses an export, only its server knows.
                _ if is_export => Ok(None),
                Format::Raw => device::lock_image(read, access).map(Some),
                // What opens it locks it.
                Format::Qcow2 => Ok(None),
            }
        };
        // A failure leaves no new folder behind; for a known source the folder's lock names the holder.
        let early = if known.is_none() && !options.clones { lock_image()? } else { None };
        *made = known.is_none().then(|| place.clone());
        let folder = Dir::open(&place).map_err(SourceError::state("make", &place))?;
        let lock = match FolderLock::take(&place).map_err(SourceError::state("lock", &place))? {
            Ok(lock) => lock,
            Err(holder) => return Err(SourceError::Busy { path, holder }),
        };
        let folder = Arc::new(folder);
        let is_tracked = options.clones || clones::are_kept(&*folder)?;
        let (disk, backing) = open_disk(export, identity.clone(), &folder, format, options)?;
        let image = match early {
            Some(lock) => Some(lock),
            // A clone may be made whoever writes.
            None if is_tracked && options.read_only && options.at_rest == AtRest::NotNeeded => None,
            None => lock_image()?,
        };
        let block_size = match (options.block_size, &known) {
            (Some(size), _) => size,
            (None, Some((_, about))) => about.block_size,
            (None, None) => SourceOptions::block_size_for(disk.len()),
        };
        check_block_size(block_size)?;
        let about =
            SourceMetadata { format, ..SourceMetadata::new(uuid, disk_in(identity, format)?, block_size) };
        let about = match known {
            // Read again: the process that held it may have begun a life.
            Some((_, known)) => about.in_term_of(about_in(&*folder)?.unwrap_or(known)),
            None => about,
        };
        write_about(&*folder, &about)?;
        drop(minting);
        let mut source = Self::over(about, disk, folder, backing, options)?;
        // Where no clone could be made, the image is read as one that rests.
        let rests = options.read_only && !source.backing.is_clone();
        let image = if image.is_none() && rests { lock_image()? } else { image };
        source.locks = Some((lock, image));
        source.fresh = made.is_some().then(|| state.clone()).filter(|_| options.read_only);
        Ok(source)
    }

    /// What is missing from a folder that was in use before; `None` if it is complete, or new.
    fn missing(
        folder: &dyn Folder,
        stamp: Option<&ImageStamp>,
        last: u64,
    ) -> Result<Option<&'static str>, SourceError> {
        let Some(stamp) = stamp else {
            let why = "how dsync left the disk is not known: its writes were recorded in another way meanwhile, or a file is missing from the \
                       state directory";
            return Ok((last > 0).then_some(why));
        };
        let recorded =
            TrackedDisk::has_record(folder, last).map_err(SourceError::state("look into", folder.path()))?;
        Ok(match recorded {
            false => Some("the record of changed blocks is missing from the state directory"),
            true if stamp.epoch > last => Some("the end of its history is missing from the state directory"),
            true => None,
        })
    }

    /// What the state in `folder` says of the image as it is.
    fn verdict(
        folder: &dyn Folder,
        backing: &dyn Backing,
        identity: &Identity,
        last: Option<Epoch>,
        trust: DeviceTrust,
    ) -> Result<Found, SourceError> {
        let served = LastWriteTime::open(folder, backing.clock())
            .map_err(SourceError::state("open", folder.path()))?;
        let last_write = LastWrite {
            time: served.last().saturating_add(backing.clock().tick()),
            in_flight: served.was_busy(),
            seen: served.seen(),
            foreign: served.foreign().is_some(),
            written: backing.counted(),
        };
        let stamp = ImageStamp::read(folder)?;
        let was = stamp.as_ref().map_or(0, |s| s.identity.size.max(s.larger.unwrap_or(0)));
        let missing = Self::missing(folder, stamp.as_ref(), last.map_or(0, |last| last.number))?;
        let lost = moments::elsewhere(folder, last)?.or(missing.map(Gap::from));
        let boot = backing.boot();
        let verdict = match (lost, &stamp) {
            (Some(why), _) => StampVerdict::Lost(why),
            (None, None) => StampVerdict::New,
            // Also where its user vouches that nothing wrote to it: that says nothing of another disk under its name.
            (None, Some(stamp)) if boot.life(&stamp.boot) != Life::This && !backing.is_named() => {
                StampVerdict::Lost(UNNAMED.into())
            }
            (None, Some(stamp)) if identity.is_block() && stamp.is_copied(folder) => {
                StampVerdict::Lost(COPIED.into())
            }
            (None, Some(stamp)) => stamp.verdict(identity, &boot, last_write, trust),
        };
        // Which content it is, is another question than what is known of its changes.
        let verdict = match (verdict, stamp) {
            (StampVerdict::Lost(why), Some(stamp)) => {
                let there = if backing.elsewhere().is_some() {
                    device::identity(&identity.path).ok()
                } else {
                    Some(identity.clone())
                };
                let other = there.and_then(|there| stamp.other(&there, &boot, served.last(), served.seen()));
                StampVerdict::Lost(other.unwrap_or(why))
            }
            (verdict, _) => verdict,
        };
        Ok(Found { verdict, was, foreign: served.foreign(), counted: last_write.written })
    }

    /// Why the record of a source that no process holds could not be believed; `None` if it could. Takes no lock, and changes nothing.
    pub(crate) fn doubt(
        place: &Path,
        about: &SourceMetadata,
        trust: DeviceTrust,
    ) -> Result<Option<Gap>, SourceError> {
        if device::is_export(&about.path) {
            return Ok(Some(UNRECORDED.into()));
        }
        let folder = Dir::existing(place).map_err(SourceError::state("open", place))?;
        Self::doubt_in(&folder, &PathBacking::new(about.identity.clone(), place, about.format), trust)
    }

    /// Why the record in the state folder of a source that no process holds could not be believed; `None` if it could.
    #[doc(hidden)]
    pub fn doubt_in(
        folder: &dyn Folder,
        backing: &dyn Backing,
        trust: DeviceTrust,
    ) -> Result<Option<Gap>, SourceError> {
        if ImageStamp::read(folder)?.is_none() {
            return Ok(Some("writes to the source are not recorded at present".into()));
        }
        let look = || -> Result<StampVerdict, SourceError> {
            let last = History::read(folder)?.last();
            match (backing.identity(), moments::elsewhere(folder, last)?) {
                // A disk of which others tell need not be on this machine.
                (Err(_), Some(why)) => Ok(StampVerdict::Lost(why)),
                (identity, _) => Ok(Self::verdict(folder, backing, &identity?, last, trust)?.verdict),
            }
        };
        let verdict = match look()? {
            // A command that holds it may have ended an epoch between two looks.
            StampVerdict::Lost(_) | StampVerdict::Unproven { .. } => look()?,
            other => other,
        };
        Ok(match verdict {
            StampVerdict::Lost(why) | StampVerdict::Unproven { why, .. } => Some(why),
            StampVerdict::New | StampVerdict::Trusted { .. } => None,
        })
    }

    /// Opens a source from its parts: the disk, the folder of its state, and what is to know of the medium. Takes no lock.
    pub fn over(
        about: SourceMetadata,
        disk: Arc<dyn Disk>,
        folder: Arc<dyn Folder>,
        backing: Box<dyn Backing>,
        options: &SourceOptions,
    ) -> Result<Source, SourceError> {
        let (history, identity) = (History::hold(&*folder)?, backing.identity()?);
        let mut parts = Parts { outside: None, about, disk, folder, backing, history, identity };
        let is_tracked = options.clones || clones::are_kept(&*parts.folder)?;
        let unmade = match &options.told {
            Some(told) => {
                let told = told.listed(&*parts.backing, &parts.about, parts.disk.len())?;
                let (folder, size) = (parts.folder.clone(), parts.disk.len());
                let moment = NewMoment::take(folder, &parts.about, &parts.history, &told, size)?;
                parts.outside = Some(Outside::Moment(moment));
                None
            }
            None if is_tracked => parts.make_clone(options)?,
            None => None,
        };
        let Parts { folder, backing, identity, .. } = &parts;
        let last = parts.history.last();
        let found = Self::verdict(&**folder, &**backing, identity, last, options.device_trust)?;
        let verdict = match (&parts.outside, unmade, found.verdict) {
            (Some(outside), _, recorded) => outside.verdict(recorded)?,
            (None, Some(why), StampVerdict::Lost(Gap::Told(_))) => {
                StampVerdict::Lost(format!("no clone of it could be made: {why}").into())
            }
            (None, _, recorded) => recorded,
        };
        let source = Self::begin(parts, Found { verdict, ..found }, options)?;
        if is_tracked && !options.read_only {
            // What was written before is in the record, as is what will be.
            source.outside().take();
            clones::drop_kept(&*source.folder, &source.about)?;
        }
        Ok(source)
    }

    /// Opens a source by what was found of it.
    pub(crate) fn begin(parts: Parts, found: Found, options: &SourceOptions) -> Result<Source, SourceError> {
        let Parts { outside, mut about, disk, folder, backing, history, identity } = parts;
        let Found { verdict, was, foreign, counted } = found;
        // What others write from here on shows, to a file also since its identity was read.
        let (served, opened) = (!options.read_only, mark_of(&identity, &*backing, !options.read_only));
        let last = history.last().map_or(0, |e| e.number);
        if was > identity.size && !options.allow_shrink {
            return Err(SourceError::Shrank { path: about.path, was, is: identity.size });
        }
        let mut lost = verdict.loss();
        // What only reads leaves the record to one that is told that it holds, as long as it ends no epoch.
        let mut spared = options.read_only && matches!(verdict, StampVerdict::Unproven { .. });
        let closed = ImageStamp::read(&*folder)?;
        let is_cloned = matches!(outside, Some(Outside::Clone(_)));
        let before = closed.as_ref().and_then(|c| c.file.clone()).filter(|_| lost.is_none());
        let ended = closed.as_ref().filter(|_| lost.is_none() || spared);
        // Durable before the first write goes through: from here on a stop is unclean, and what was lost stays lost
        // until the history has it.
        let mut stamp = ImageStamp {
            clean: false,
            lost: lost.clone().filter(|_| !spared).or_else(|| outside.as_ref()?.unrecorded()),
            identity: identity.clone(),
            boot: backing.boot().id,
            epoch: last,
            // A server continues with the smaller disk at once.
            larger: Some(was).filter(|was| options.read_only && *was > identity.size),
            written: counted.filter(|_| options.read_only),
            proven: !spared,
            marked: None,
            durable: ended.map(|closed| closed.durable).unwrap_or_default(),
            served: !options.read_only || closed.as_ref().is_some_and(|c| c.served),
            in_use: is_cloned
                || options.at_rest == AtRest::InUse
                || closed.as_ref().is_some_and(|c| c.in_use),
            file: backing.elsewhere().and_then(|_| FileMark::next(before, &identity.path)),
            born: None,
        };
        let settings = options.settings(about.block_size, lost.is_some(), backing.clock());
        let (trusted, power_lost) = verdict.trusted(spared);
        if !trusted {
            stamp.write(&*folder, lives::leave)?;
        }
        let disk = TrackedDisk::open(disk, folder.clone(), settings, last, trusted, power_lost)?;
        let told = outside.as_ref().and_then(|outside| outside.since().ok());
        let closed = closed.filter(|_| trusted && told.is_none());
        if let Some(why) = closed.map_or(Ok(None), |closed| closed.damage(&disk, &identity))? {
            (spared, lost) = (false, Some(why));
            stamp.lost = lost.clone();
        }
        // Before the stamp, which says that the record has all.
        told.map_or(Ok(()), |ranges| disk.mark(ranges))?;
        // After the records: a power cut before this finds the old stamp and checks the regions again.
        stamp.write(&*folder, lives::leave)?;
        lives::open(&*folder, &mut about, history.last(), options.read_only)?;
        foreign.into_iter().for_each(|times| disk.settle(times));
        let backing: Arc<dyn Backing> = backing.into();
        disk.look(|| opened)?;
        let resized = Some(identity).filter(|_| about.format.is_raw() && served);
        let tending = Tending::begin(&disk, &backing, (served, resized), options.sweep_every)
            .map_err(SourceError::state("start a thread for", folder.path()))?;
        Ok(Source {
            about,
            views: Views::new(&*folder, options.view_limit),
            folder,
            backing,
            disk,
            direct: options.direct,
            served,
            epochs: Mutex::new(Epochs { history, stamp, spared, sent: Vec::new() }),
            lost: Mutex::new((lost, last)),
            mirrored: Mutex::default(),
            batches: Mutex::default(),
            tending: Some(tending),
            locks: None,
            fresh: None,
            outside: Mutex::new(outside),
        })
    }

    /// How long the writers of an image had to wait while it was cloned at its opening.
    pub(crate) fn waited(&self) -> Duration {
        self.outside().as_ref().map_or(Duration::ZERO, Outside::waited)
    }

    fn outside(&self) -> std::sync::MutexGuard<'_, Option<Outside>> {
        self.outside.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What the source's folder says of it.
    pub fn about(&self) -> &SourceMetadata {
        &self.about
    }

    pub(crate) fn parts(&self) -> (Arc<dyn Folder>, Arc<dyn Backing>) {
        (self.folder.clone(), self.backing.clone())
    }

    /// The folder of the source's state.
    pub fn folder(&self) -> &dyn Folder {
        &*self.folder
    }

    /// Writes down under which name it is served, for [`StateDir::source`](crate::StateDir::source).
    ///
    /// # Errors
    /// If that cannot be written.
    pub fn note_served_as(&self, name: &str) -> Result<(), SourceError> {
        crate::record::state::note_served_as(self.folder(), self.about(), name)
    }

    /// The disk to write through.
    pub fn disk(&self) -> &TrackedDisk {
        &self.disk
    }

    /// Why the changes before the next checkpoint are not known; `None` if they are. Does not wait for a checkpoint in
    /// progress: until that is in the history, the answer is the previous one.
    pub fn lost(&self) -> Option<Gap> {
        self.lost_since().0
    }

    /// What [`Source::lost`] says, with the last epoch that it takes into account: the history may have a later one, not yet recorded here.
    pub(crate) fn lost_since(&self) -> (Option<Gap>, u64) {
        let (lost, since) = self.lost.lock().unwrap_or_else(|e| e.into_inner()).clone();
        (lost.or_else(|| self.disk.foreign().map(|_| FOREIGN.into())), since)
    }

    /// What was recorded since the last epoch does not hold, for this reason.
    pub(crate) fn outdate(&self, why: &str) {
        let mut epochs = self.epochs();
        epochs.spared = false;
        self.lost.lock().unwrap_or_else(|e| e.into_inner()).0.get_or_insert_with(|| why.into());
    }

    fn epochs(&self) -> std::sync::MutexGuard<'_, Epochs> {
        self.epochs.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Ends the epoch and begins the next. If nothing was written since the last one, the source stays at it
    /// and no epoch is added. With `view`, what writers overwrite from this moment on is saved until
    /// [`TrackedDisk::drop_view`].
    pub fn checkpoint(&self, view: bool) -> Result<Checkpoint, SourceError> {
        self.end_epoch(&mut self.epochs(), view, None).map(|(checkpoint, _)| checkpoint)
    }

    /// Follows writes from now on, for [`Source::batch_changes`].
    pub fn follow(&self) -> Follower {
        self.disk.follow()
    }

    /// What was written since the follower's last batch, and the view of this moment, for which writers save until
    /// [`TrackedDisk::drop_view`]. Nothing is made durable, and the epoch continues unless `ends` is set: then this is a
    /// checkpoint too. `None` if nothing was written and `ends` is not set. The follower's replica was last at the epoch `known`.
    ///
    /// # Errors
    /// `Lost` if what was written since then is not known, though another client's epoch may have ended with that; `Server` in a life that a client
    /// has ended.
    pub fn batch_changes(
        &self,
        follower: &Follower,
        known: Option<Epoch>,
        ends: bool,
    ) -> Result<Option<BatchChanges>, SourceError> {
        let mut epochs = self.epochs();
        self.look(&mut epochs)?;
        if about_in(&*self.folder)?.is_some_and(|known| life_of(&known) != self.life()) {
            return Err(SourceError::Server("it went on in a life that has ended: start it again".into()));
        }
        let since = epochs.history.last();
        if let Some(why) = self.lost() {
            return Err(SourceError::Lost { since: since.map_or(0, |e| e.number), why });
        }
        let position = known.map(|epoch| KnownPosition { epoch, upto: u64::MAX });
        let reaches = |epochs: &Epochs| epochs.history.reaches(position.as_slice());
        if ends {
            let (Checkpoint { epoch, saved, .. }, followed) =
                self.end_epoch(&mut epochs, true, Some(follower))?;
            // After it: the epoch may have ended with a gap that was noticed just now.
            if let Err(lost) = reaches(&epochs) {
                saved.iter().for_each(|saved| self.disk.drop_view(saved));
                return Err(lost);
            }
            let blocks = self.disk.len().div_ceil(u64::from(self.about.block_size));
            let changes = followed.unwrap_or_else(|| Arc::new(Bitmap::new(blocks)));
            let n = Point::number(epoch.number, 0);
            let lives = lives::lives(&*self.folder, &self.about, Some(epoch))?.upto(n);
            let at = lives.tip().copied().unwrap_or(Point { life: self.life(), n });
            return Ok(saved.map(|saved| {
                saved.narrow(&changes);
                BatchChanges { epoch, at, saved, changes }
            }));
        }
        reaches(&epochs)?;
        if follower.pending() == 0 {
            return Ok(None);
        }
        let epoch = since.ok_or_else(|| {
            SourceError::Refused(format!(
                "{} has no epoch yet for a batch to follow",
                self.about.path.display()
            ))
        })?;
        // Before the cut, for which writers save what they overwrite; and in its order, as the epochs are held.
        let mut batches = self.batches.lock().unwrap_or_else(|e| e.into_inner());
        let at = batches.next(&*self.folder, self.life(), epoch.number)?;
        let saved = self.new_view()?;
        let changes = self.disk.cut(follower, &saved);
        Ok(Some(BatchChanges { epoch, at, saved, changes }))
    }

    /// The present life.
    fn life(&self) -> Uuid {
        life_of(&self.about)
    }

    /// True if writes through the source bypass the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Checks that it is still the same image, and whether other programs have changed it.
    fn look(&self, epochs: &mut Epochs) -> Result<(), SourceError> {
        let now = self.backing.identity()?;
        if !now.same_object(&epochs.stamp.identity) {
            return Err(SourceError::Replaced(self.about.path.clone()));
        }
        if now.path != epochs.stamp.identity.path {
            // A branch may have been noted since it was opened.
            let known = about_in(&*self.folder)?.unwrap_or_else(|| self.about.clone());
            let about = SourceMetadata { path: now.path.clone(), identity: now.clone(), ..known };
            write_about(&*self.folder, &about)?;
            epochs.stamp.identity.path.clone_from(&now.path);
        }
        // Asked again, under the check's own ordering: the identity above may be older than a write that has completed since.
        if !self.look_for_writes()? && self.disk.foreign().is_some() {
            // Once no later change can bear that time, what is doubted now is all that others have written by then.
            let clock = self.backing.clock();
            let apart = clock.apart(self.backing.identity()?.ctime_ns);
            std::thread::sleep(Duration::from_nanos(apart + clock.tick()));
            self.look_for_writes()?;
        }
        self.look_for_other(epochs)
    }

    /// Checks whether others have written to it, as [`TrackedDisk::look`].
    fn look_for_writes(&self) -> Result<bool, SourceError> {
        Ok(self.disk.look(|| write_mark(&*self.backing, self.served))?)
    }

    /// Others have changed it, perhaps to what it was before: then it leaves the way on which its replicas are.
    fn look_for_other(&self, epochs: &mut Epochs) -> Result<(), SourceError> {
        if self.disk.foreign().is_none() {
            return Ok(());
        }
        let (now, boot) = (self.backing.identity()?, self.backing.boot());
        let other = epochs.stamp.other(&now, &boot, self.disk.last_write(), 0);
        other.map_or(Ok(()), |other| self.note_other(epochs, other))
    }

    /// It has another content, until an epoch ends with that: it leaves the way on which its replicas are.
    fn note_other(&self, epochs: &mut Epochs, other: Gap) -> Result<(), SourceError> {
        if matches!(epochs.stamp.lost, Some(Gap::OtherContent(_))) {
            return Ok(());
        }
        epochs.stamp.lost = Some(other.clone());
        epochs.stamp.write(&*self.folder, lives::leave)?;
        epochs.spared = false;
        self.lost.lock().unwrap_or_else(|e| e.into_inner()).0 = Some(other);
        Ok(())
    }

    /// The disk is a replica that passes on what it receives, and this way led to what it holds. Where that does not lead over what it held when it was
    /// passed on last, it was set back, by whatever: it has another content.
    ///
    /// # Errors
    /// If the state cannot be read or written.
    pub(crate) fn passes_on(&self, lives: &Lives) -> Result<(), SourceError> {
        let mut epochs = self.epochs();
        let (Some(tip), Some(about)) = (lives.tip(), about_in(&*self.folder)?) else { return Ok(()) };
        // It had epochs of its own before: it was restored as a replica, and passes on nothing.
        if about.passed.is_none() && epochs.history.last().is_some() {
            return Ok(());
        }
        if about.passed.is_some_and(|passed| !lives.has(&passed)) {
            self.note_other(&mut epochs, Gap::OtherContent("it is a replica, which was set back".into()))?;
        }
        if about.passed == Some(*tip) {
            return Ok(());
        }
        let known = about_in(&*self.folder)?.unwrap_or(about);
        write_about(&*self.folder, &SourceMetadata { passed: Some(*tip), ..known })
    }

    /// A checkpoint, and what a follower had at its moment.
    fn end_epoch(
        &self,
        epochs: &mut Epochs,
        view: bool,
        follower: Option<&Follower>,
    ) -> Result<(Checkpoint, Option<Arc<Bitmap>>), SourceError> {
        self.look(epochs)?;
        let Present { lost, foreign, size, stands } = self.present(epochs);
        // What a follower has may be older than the epoch, so its batch may not be empty although nothing was written since.
        if let Some(epoch) = stands.filter(|_| follower.is_none_or(|f| f.pending() == 0)) {
            let saved = if view { Some(self.new_view()?) } else { None };
            if self.disk.view_of_unchanged(saved.as_ref()) {
                self.keep_outside(epochs, epoch)?;
                let blocks = size.div_ceil(u64::from(self.about.block_size));
                let changes = Bitmap::try_new(blocks).map_err(SourceError::memory(&self.about.path))?;
                let changes = Some(Arc::new(changes));
                return Ok((Checkpoint { epoch, saved, changes }, None));
            }
        }
        let saved = if view { Some(self.new_view()?) } else { None };
        let frozen = self.disk.checkpoint(saved, follower)?;
        self.record_epoch(epochs, Present { lost, foreign, size, stands }, frozen, follower)
    }

    /// Writes down the epoch that ended with what a checkpoint froze.
    fn record_epoch(
        &self,
        epochs: &mut Epochs,
        present: Present,
        frozen: Frozen,
        follower: Option<&Follower>,
    ) -> Result<(Checkpoint, Option<Arc<Bitmap>>), SourceError> {
        let Present { lost, foreign, size, stands } = present;
        let saved = frozen.view.clone();
        let same = stands.filter(|_| frozen.changes.is_clean());
        let epoch = match same {
            Some(last) => {
                self.keep_outside(epochs, last)?;
                last
            }
            None => {
                let epoch = Epoch { number: frozen.number, id: Uuid::new_v4() };
                let (blocks, changes) = (self.about.block_size, &frozen.changes);
                let mut outside = self.outside().take();
                let settled = self.backing.durable_times().and_then(|(changed, content)| {
                    outside.as_mut().map_or(Ok(()), |outside| outside.keep(epoch, &*self.backing))?;
                    epochs.history.append(epoch, lost.clone(), size, blocks, changes)?;
                    epochs.stamp.durable = DurableTimes { changed, content };
                    // The gap is in the history. And a history that ends before this epoch is not trusted any more:
                    // soon no record has what it lacks.
                    let mut gap = self.lost.lock().unwrap_or_else(|e| e.into_inner());
                    *gap = (None, epoch.number);
                    foreign.into_iter().for_each(|times| self.disk.settle(times));
                    drop(gap);
                    (epochs.stamp.lost, epochs.stamp.larger, epochs.stamp.epoch) = (None, None, epoch.number);
                    (epochs.spared, epochs.stamp.proven) = (false, true);
                    epochs.stamp.write(&*self.folder, lives::leave)
                });
                if let Err(error) = settled {
                    if let Some(saved) = &saved {
                        self.disk.drop_view(saved);
                    }
                    if let (Some(follower), Some(followed)) = (follower, &frozen.followed) {
                        self.disk.give_back(follower, followed);
                    }
                    return Err(error);
                }
                outside.into_iter().for_each(|outside| outside.drop_others());
                epoch
            }
        };
        // The epoch is durable: what follows only tidies up, and is repeated at the next opening if it fails here.
        self.disk.release()?;
        let changes = lost.is_none().then(|| Arc::new(frozen.changes));
        Ok((Checkpoint { epoch, saved, changes }, frozen.followed))
    }

    /// Keeps what the opening has brought with the last epoch, since which nothing was written: a clone if that has none, the name of a moment.
    fn keep_outside(&self, epochs: &mut Epochs, last: Epoch) -> Result<(), SourceError> {
        let Some(mut outside) = self.outside().take_if(|outside| outside.joins()) else { return Ok(()) };
        outside.keep(last, &*self.backing)?;
        if outside.unrecorded().is_some() {
            epochs.stamp.lost = None;
            epochs.stamp.write(&*self.folder, lives::leave)?;
        }
        Ok(())
    }

    /// Ends the epochs of several sources at one moment, with a view of each; see [`TrackedDisk::checkpoint_together`]. All callers
    /// name their sources in one order.
    ///
    /// # Errors
    /// If an epoch cannot be ended: then no view is left open, and a source may have one more epoch.
    pub(crate) fn checkpoint_together(sources: &[Arc<Source>]) -> Result<Vec<Checkpoint>, SourceError> {
        let mut all: Vec<_> = sources.iter().map(|source| source.epochs()).collect();
        let mut presents = Vec::new();
        for (source, epochs) in sources.iter().zip(&mut all) {
            source.look(epochs)?;
            presents.push(source.present(epochs));
        }
        let views = sources.iter().map(|source| source.new_view()).collect::<Result<Vec<_>, _>>()?;
        let members: Vec<_> = sources.iter().zip(views).map(|(source, view)| (&source.disk, view)).collect();
        let frozen = TrackedDisk::checkpoint_together(&members)?;
        let parts = sources.iter().zip(&mut all).zip(presents.into_iter().zip(frozen));
        let ended = parts.map(|((source, epochs), (present, frozen))| {
            source.record_epoch(epochs, present, frozen, None).map(|(checkpoint, _)| checkpoint)
        });
        let ended: Result<Vec<_>, _> = ended.collect();
        if ended.is_err() {
            members.iter().for_each(|(disk, view)| disk.drop_view(view));
        }
        ended
    }

    /// What a checkpoint finds.
    fn present(&self, epochs: &Epochs) -> Present {
        let foreign = self.disk.foreign();
        let lost = self.lost();
        let size = self.disk.len();
        let stands =
            epochs.history.last().filter(|last| lost.is_none() && epochs.history.size_at(last) == Some(size));
        Present { lost, foreign, size, stands }
    }

    fn new_view(&self) -> Result<Arc<CowStore>, SourceError> {
        let place = self.folder.path();
        CowStore::create(place, self.disk.len(), self.about.block_size, self.views.limit)
            .map(Arc::new)
            .map_err(SourceError::state("make a view in", place))
    }

    /// The view that readers share as `@view`, or with a name as `@view.NAME`: the open one, else a new one at a
    /// checkpoint taken now.
    pub fn shared_view(&self, name: &str) -> Result<Arc<SharedView>, SourceError> {
        let mut slots = self.slots();
        if let Some(open) = slots.get(name).and_then(Weak::upgrade) {
            return Ok(open);
        }
        let reader = self.backing.reader()?;
        let mut epochs = self.epochs();
        let bookmarks = Bookmarks::read(&*self.folder)?;
        let (checkpoint, _) = self.end_epoch(&mut epochs, true, None)?;
        let known = |epoch: Epoch| epochs.history.reaches(&[KnownPosition { epoch, upto: u64::MAX }]).is_ok();
        let since = bookmarks.checkpoints().filter(|(_, b)| known(b.epoch)).flat_map(|(name, b)| {
            let since = Arc::new(ChangesSince { epoch: b.epoch, changes: Mutex::default() });
            [(name.clone(), since.clone()), (b.epoch.id.to_string(), since)]
        });
        let since = since.collect();
        drop(epochs);
        let (saved, alive) = (checkpoint.saved.clone(), Arc::new(|| Ok(())));
        let view = View::new(checkpoint.epoch, reader, self.disk.len(), saved, alive).shared();
        let view = view.beside(&self.views.courtesy);
        let shared = Arc::new(SharedView { view, checkpoint, disk: self.disk.clone(), since });
        slots.retain(|_, view| view.strong_count() > 0);
        slots.insert(name.to_owned(), Arc::downgrade(&shared));
        Ok(shared)
    }

    /// Whether readers of [shared views](Source::shared_view) wait for the guest from now on. At first they do not.
    pub fn be_polite(&self, polite: bool) {
        self.views.courtesy.be_polite(polite);
    }

    /// The view open as `@view`, if there is one.
    pub fn held_view(&self) -> Option<Arc<SharedView>> {
        self.slots().get("").and_then(Weak::upgrade)
    }

    fn slots(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Weak<SharedView>>> {
        self.views.shared.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The epochs of open views, at which a reader may yet set a checkpoint. To be asked before `epochs` is locked.
    fn open_epochs(&self) -> Vec<Epoch> {
        let open: Vec<Arc<SharedView>> = self.slots().values().filter_map(Weak::upgrade).collect();
        open.iter().map(|view| view.checkpoint.epoch).collect()
    }

    /// A view of a source that is not written while this process holds it: the image itself, and a check at the end that
    /// it has not changed.
    pub(crate) fn still_view(&self, checkpoint: &Checkpoint) -> Result<View, SourceError> {
        let (path, backing) = (self.about.path.clone(), self.backing.clone());
        let before = settled(&*backing)?;
        let watch = backing.watch()?;
        let moved =
            if clones::are_kept(&*self.folder)? { SourceError::NotAtRest } else { SourceError::Moved };
        // What was written since the checkpoint has found what changed is in none of that; to a device, since it was opened.
        let counted = self.backing.counted();
        let mut epochs = self.epochs();
        self.look(&mut epochs)?;
        if self.disk.foreign().is_some() || self.has_moved(&epochs.stamp, counted) {
            return Err(moved(path));
        }
        drop(epochs);
        let alive = move || match backing.identity() {
            Ok(now) if now == before && watch.as_ref().is_none_or(WriteWatch::is_still) => backing.still(),
            Ok(_) => Err(io::Error::other(moved(path.clone()).to_string())),
            Err(e) => Err(io::Error::other(e.to_string())),
        };
        Ok(View::new(checkpoint.epoch, self.backing.reader()?, self.disk.len(), None, Arc::new(alive)))
    }

    /// Reads from the history under this source's lock.
    pub fn with_history<T>(&self, read: impl FnOnce(&History) -> T) -> T {
        read(&self.epochs().history)
    }

    /// What is read of an epoch is about to be sent to the replica in this state.
    pub(crate) fn sends(&self, epoch: Epoch, replica: Uuid) -> Result<(), SourceError> {
        self.epochs().sent.push((epoch, replica));
        moments::note_sent(&*self.folder, epoch, replica, false)
    }

    /// Records the epoch of a replica, and tidies the history.
    pub fn acknowledge(&self, replica: &str, at: Reached) -> Result<(), SourceError> {
        let open = self.open_epochs();
        let mut epochs = self.epochs();
        at.was.map_or(Ok(()), |was| moments::note_sent(&*self.folder, at.epoch, was, true))?;
        let bookmarks = Bookmarks::set(&*self.folder, replica, at)?;
        Tally::follow(&*self.folder, &bookmarks, replica);
        epochs.history.tidy(&*self.folder, &bookmarks.epochs(), &open)
    }

    /// A mirror has brought a replica up to date as of then.
    pub(crate) fn reached(&self, replica: String, time: u64) {
        self.mirrored.lock().unwrap_or_else(|e| e.into_inner()).insert(replica, time);
    }

    /// Until when mirrors have brought replicas up to date, in seconds since 1970.
    pub(crate) fn mirrored(&self) -> BTreeMap<String, u64> {
        self.mirrored.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Sets a named checkpoint at an epoch; without one at the present, which ends the epoch. See [`Bookmarks`].
    ///
    /// # Errors
    /// `Refused` if the name is invalid, is in use, or would move back; then no epoch has ended.
    pub fn name_checkpoint(&self, name: &str, at: Option<Epoch>) -> Result<Epoch, SourceError> {
        let open = self.open_epochs();
        let mut epochs = self.epochs();
        Bookmarks::read(&*self.folder)?.admits(&self.about.path, &epochs.history, name, at)?;
        let epoch = match at {
            Some(epoch) => epoch,
            None => self.end_epoch(&mut epochs, false, None)?.0.epoch,
        };
        let bookmarks = Bookmarks::set(&*self.folder, name, Reached::epoch(epoch))?;
        epochs.history.tidy(&*self.folder, &bookmarks.epochs(), &open)?;
        Ok(epoch)
    }

    /// Removes the bookmark of a replica or a named checkpoint.
    pub fn forget_bookmark(&self, name: &str) -> Result<(), SourceError> {
        let _book = self.epochs();
        self.mirrored.lock().unwrap_or_else(|e| e.into_inner()).remove(name);
        Bookmarks::remove(&*self.folder, &self.about.path, name)
    }

    /// What was written since the last checkpoint.
    ///
    /// # Errors
    /// If there is no memory for a bitmap of its blocks.
    pub fn dirty(&self) -> Result<Bitmap, SourceError> {
        self.disk.dirty().map_err(SourceError::memory(&self.about.path))
    }

    /// False if another program has written to the disk since it was opened. One that is served is watched otherwise.
    ///
    /// # Errors
    /// If it cannot be looked at.
    pub(crate) fn has_rested(&self) -> Result<bool, SourceError> {
        let now = settled(&*self.backing)?;
        Ok(self.had_rested(&self.epochs().stamp, &now, self.backing.counted()))
    }

    /// True if the kernel has counted writes to a device that this process only reads since it was opened.
    fn has_moved(&self, opened: &ImageStamp, counted: Option<WriteCounts>) -> bool {
        !self.served && opened.written.zip(counted).is_some_and(|(then, now)| then.has_moved(&now))
    }

    /// Whether the disk had rested since it was opened, when it was found so.
    fn had_rested(&self, opened: &ImageStamp, now: &Identity, counted: Option<WriteCounts>) -> bool {
        match (now.is_block(), opened.written, counted) {
            _ if self.served => true,
            (false, ..) => *now == opened.identity,
            (true, Some(then), Some(now)) => !then.has_moved(&now),
            // The kernel does not count.
            (true, ..) => device::may_change(&now.path).is_none(),
        }
    }

    /// Closes cleanly: makes the record durable, and stamps the image. To be called when no writer is left.
    pub fn close(mut self) -> Result<(), SourceError> {
        // Before the end of what is under way and the flush, which may take long: what others write meanwhile shows.
        let looked = self.look_for_writes();
        self.tending = None;
        self.disk.close()?;
        looked?;
        let identity = settled(&*self.backing)?;
        // After a power cut the image must not be older than its stamp.
        self.backing.durable_times()?;
        self.look_for_writes()?;
        let epochs = self.epochs();
        let replaced = !identity.same_object(&epochs.stamp.identity);
        let doubted = self.lost().filter(|_| !epochs.spared);
        let (boot, wrote) = (self.backing.boot(), self.disk.last_write());
        let other = || epochs.stamp.other(&identity, &boot, wrote, 0).unwrap_or(REPLACED.into());
        // One that was made smaller while it was open is asked about at the next opening.
        let opened = epochs.stamp.identity.size;
        let shrank = !identity.is_block() && self.about.format.is_raw() && opened > identity.size;
        let larger = epochs.stamp.larger.or(Some(opened).filter(|_| shrank && !replaced));
        let unrecorded = self.outside().as_ref().and_then(Outside::unrecorded);
        let lost = match (replaced, shrank) {
            (true, _) => Some(other()),
            // More than that is not known of who changed it.
            (_, true) => Some(SHRANK.into()),
            _ => doubted.or(unrecorded),
        };
        let (last, boot, written) = (epochs.history.last(), boot.id.clone(), self.backing.counted());
        // A count that begins here says nothing of what was read before.
        let written =
            written.filter(|_| self.served || !identity.is_block() || epochs.stamp.written.is_some());
        let epoch = last.map_or(0, |last| last.number);
        let is_file_elsewhere = self.backing.elsewhere().is_some() && !identity.is_block();
        let has_moved =
            self.has_moved(&epochs.stamp, written) || is_file_elsewhere && identity != epochs.stamp.identity;
        // Of a disk that is only read, the next count begins here.
        let lost = lost.or_else(|| Some(FOREIGN.into()).filter(|_| has_moved));
        last.filter(|_| has_moved).map_or(Ok(()), |last| moments::note_spoiled(&*self.folder, last))?;
        if lost.is_none() && self.had_rested(&epochs.stamp, &identity, written) {
            // What was sent was of the moment, whether it has arrived or not.
            let mut sent = epochs.sent.iter();
            sent.try_for_each(|(epoch, replica)| moments::note_sent(&*self.folder, *epoch, *replica, true))?;
        }
        // Of a disk that was resized meanwhile it has other blocks when it is opened.
        let marked = self
            .disk
            .dirty()
            .ok()
            .map(|dirty| bytes_of(&dirty, &self.disk))
            .filter(|_| self.disk.len() == identity.size);
        // What is the same in any state is kept.
        let kept = epochs.stamp.clone();
        let proven = !epochs.spared && self.had_rested(&epochs.stamp, &identity, written);
        ImageStamp { clean: true, lost, identity, boot, epoch, larger, written, proven, marked, ..kept }
            .write(&*self.folder, lives::leave)
    }
}

/// The life of a source that goes on.
fn life_of(about: &SourceMetadata) -> Uuid {
    about.lives.lives().first().map_or(Uuid::nil(), |life| life.life)
}

impl Drop for Source {
    fn drop(&mut self) {
        self.tending = None;
        drop(self.outside().take());
        // The lock is released last.
        let locks = self.locks.take();
        if let (Some(state), Some((lock, _image))) = (&self.fresh, locks) {
            discard::undo(state, self.folder.path(), Some(lock));
        }
    }
}

fn check_block_size(block_size: u32) -> Result<(), SourceError> {
    match block_size.is_power_of_two() && (4096..=1 << 20).contains(&block_size) {
        true => Ok(()),
        false => Err(SourceError::Refused(format!(
            "invalid block size {block_size}: use a power of two from 4K to 1M"
        ))),
    }
}

/// Refuses a disk that something else uses in a way that forbids to open it so.
fn refuse_used(path: &Path, options: &SourceOptions) -> Result<(), SourceError> {
    let user = if options.read_only { device::may_change(path) } else { device::in_use(path) };
    let Some(user) = user else { return Ok(()) };
    if !options.read_only {
        return Err(SourceError::Busy { path: path.to_path_buf(), holder: user });
    }
    let is_recorded = options.told.as_ref().is_some_and(|told| told.recorded().is_some());
    let why = match rustix::process::geteuid().is_root() {
        _ if is_recorded => "may change while it is read: unmount it, or mount it read-only",
        true => {
            "may change while it is read: track it with \"dsync track add\", mount it read-only or copy a snapshot"
        }
        false => {
            "may change while it is read: if it is tracked, run this as root, because other users cannot see that; else \
             track it with \"dsync track add\", mount it read-only or copy a snapshot"
        }
    };
    Err(SourceError::Refused(format!("{} is {user} and {why}", path.display())))
}

/// What is at the path of a source: its identity, and the export of an NBD server if the path is a URI. What shows the moment of a source
/// that is elsewhere is looked at instead of that.
fn look_at(path: &Path, options: &SourceOptions) -> Result<(Option<ExportBacking>, Identity), SourceError> {
    let shown = options.elsewhere();
    let bitmap = options.told.as_ref().and_then(Told::bitmap);
    let export = ExportBacking::open(shown.unwrap_or(path), options.read_only && !options.clones, bitmap)?;
    if let Some(shown) = shown {
        let size = match &export {
            Some(export) => export.disk.len(),
            None => device::identity(shown)?.size,
        };
        return Ok((export, moments::identity(path, size)?));
    }
    let identity = export.as_ref().map_or_else(|| Ok(device::identity(path)?), Backing::identity)?;
    Ok((export, identity))
}

/// A disk, and what else is asked of it.
type Opened = (Arc<dyn Disk>, Box<dyn Backing>);

/// Opens the disk of a source whose state is in `folder`.
fn open_disk(
    export: Option<ExportBacking>,
    identity: Identity,
    folder: &Dir,
    format: Format,
    options: &SourceOptions,
) -> Result<Opened, SourceError> {
    let path = identity.path.clone();
    if let Some(export) = export {
        let disk = export.disk.clone();
        let backing: Box<dyn Backing> = match options.elsewhere() {
            Some(_) => Box::new(MomentBacking::new(path, Box::new(export), options.told.as_ref())?),
            None => Box::new(export),
        };
        return Ok((disk, backing));
    }
    if let Some(shown) = options.elsewhere() {
        let opening = device::DiskOptions { write: false, direct: options.direct, exclusive: false };
        let backing = PathBacking::new(device::identity(shown)?, folder.path(), Format::Raw);
        let backing = MomentBacking::new(path, Box::new(backing), options.told.as_ref())?;
        return Ok((device::open(shown, &opening)?, Box::new(backing)));
    }
    // A device that is served is nobody else's: what a file system on it writes shows too late, when it leaves the page cache.
    let exclusive = !options.read_only && identity.is_block();
    let backing = PathBacking::new(identity, folder.path(), format);
    let opening = device::DiskOptions { write: !options.read_only, direct: options.direct, exclusive };
    let (access, serves) = match options.read_only {
        true => (Use::Read, None),
        false => (Use::Write, Some(folder.path())),
    };
    Ok(match format {
        Format::Raw => (device::open(&path, &opening)?, Box::new(backing)),
        Format::Qcow2 => {
            let image = open_image(&path, access, serves)?;
            (image.clone(), Box::new(backing.over(image)))
        }
    })
}

/// How the disk at a path lies in its file.
fn format_of(
    path: &Path,
    known: Option<&SourceMetadata>,
    options: &SourceOptions,
) -> Result<Format, SourceError> {
    let Some(known) = known else { return Ok(options.format.unwrap_or_default()) };
    let contradicts = match options.format.filter(|asked| *asked != known.format) {
        Some(asked) => format!("and --format {asked} was given"),
        None if options.is_of_file() && !known.format.is_raw() => {
            "of which \"dsync serve\" records what is written to the disk; clones and lists of changes are of the file"
                .to_owned()
        }
        None => return Ok(known.format),
    };
    let path = path.display();
    Err(SourceError::Refused(format!(
        "{path} is known as a source whose file is {}, {contradicts}: \"dsync forget {path}\" makes it a new source, whose replicas are compared",
        known.format
    )))
}

/// The identity of the backing, read so that a later write shows: one in the same clock tick as the last would have the
/// same time.
fn settled(backing: &dyn Backing) -> Result<Identity, SourceError> {
    let identity = backing.identity()?;
    let clock = backing.clock();
    if identity.is_block() || clock.is_past(identity.ctime_ns) {
        return Ok(identity);
    }
    std::thread::sleep(Duration::from_nanos(clock.apart(identity.ctime_ns) + clock.tick()));
    backing.identity()
}

/// The loss where a disk was made smaller beneath its server.
const SHRANK: &str = "the image was made smaller while it was served";
