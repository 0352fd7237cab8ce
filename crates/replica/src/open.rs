//! Opening a replica: taking it for this process alone, and deciding what a destination without a lineage is.

use std::path::Path;

use device::{Folder, FolderLock, Format};

use crate::error::{ReplicaError, Result, io_error};
use crate::foreign::covered;
use crate::journal::{ARRIVING, WHOLE};
use crate::past::PastSettings;
use crate::past::views::Views;
use crate::replica::Replica;
use crate::state::destination::{Destination, DeviceDestination, ExportDestination, FileDestination, Name};
use crate::state::lineage::{Lineage, Stamp, Unsure};
use crate::state::locate::{DestinationKind, locate, moved_from, refuse_others_state};
use crate::state::note::{self, Foreign};
use crate::state::options::ReplicaOptions;
use crate::state::role::Promoted;

/// Places at which a device is looked at before a first copy to it.
const SAMPLES: u64 = 512;
/// Where file systems keep a second superblock, whatever became of the first: ext4 with blocks of 1 and of 4 KiB at the beginning of some of its
/// groups, in bytes; Btrfs at two places.
const GROUPS: [u64; 2] = [8 << 20, 128 << 20];
const IN_GROUPS: [u64; 8] = [1, 3, 5, 7, 9, 25, 27, 49];
const OF_BTRFS: [u64; 2] = [64 << 20, 256 << 30];
/// XFS has one in each of its parts, of which it has four mostly.
const PARTS_OF_XFS: u64 = 4;

/// The places of 4 KiB on a device of this size at which it shows that it is not blank, in bytes.
fn samples(size: u64) -> impl Iterator<Item = u64> {
    let evenly = (1..=SAMPLES).map(move |at| size / (SAMPLES + 1) * at);
    let groups = GROUPS.into_iter().flat_map(|group| IN_GROUPS.map(|at| group * at));
    let parts = (1..PARTS_OF_XFS).map(move |at| size.div_ceil(4096).div_ceil(PARTS_OF_XFS) * 4096 * at);
    let all = evenly.chain(groups).chain(OF_BTRFS).chain(parts).map(|at| at / 4096 * 4096);
    all.filter(move |at| at.checked_add(4096).is_some_and(|end| end <= size))
}

/// Locks a file or a device for its only writer. `None` where its file system has no locks, or what opens it locks it.
fn lock_image(path: &Path, format: Format) -> Result<Option<device::ImageLock>> {
    let busy = |holder| ReplicaError::Busy { path: path.to_path_buf(), holder };
    if let Some(user) = device::in_use(path) {
        return Err(busy(user));
    }
    let locked = match format {
        Format::Raw => device::lock_image(path, device::Access::Write).map(Some),
        Format::Qcow2 => qcow2::free(path, device::Access::Write).map(|()| None),
    };
    locked.or_else(|e| match e.dsync_holder() {
        _ if e.kind() == device::DeviceErrorKind::Unsupported => Ok(None),
        Some(process) => Err(busy(format!("{process}, has it open: if it serves it, stop that server"))),
        None => Err(e.into()),
    })
}

impl Replica {
    /// Opens the replica at `path`, or the path for a new one. Completes or rolls back what a crash left; [`crate::Status::recovered`] tells.
    ///
    /// # Errors
    /// Refused if another process uses it, if it is not a replica and is not to be adopted or replaced, if it was changed by
    /// others, or if there is a delta that can neither be completed nor dropped.
    pub fn open(path: &Path, options: &ReplicaOptions) -> Result<Replica> {
        let (path, kind, folder_path) = locate(path, options)?;
        if kind == Some(DestinationKind::Other) {
            return Err(ReplicaError::Refused(format!(
                "{} is neither a file nor a block device: choose another path, or a file in it if it is a folder",
                path.display()
            )));
        }
        // What is refused leaves no folder behind.
        if kind == Some(DestinationKind::File) && !options.replace && !folder_path.exists() {
            if options.adopt && path.metadata().is_ok_and(|file| file.len() == 0) {
                return Err(ReplicaError::Refused(format!(
                    "{} is empty, so there is nothing to compare: remove it, and omit --adopt",
                    path.display()
                )));
            }
            if !options.adopt {
                return Err(moved_from(&path, &folder_path).unwrap_or(ReplicaError::NotAReplica(path)));
            }
        }
        let folder = device::Dir::open(&folder_path).map_err(io_error("make", &folder_path))?;
        let lock = match FolderLock::of(&folder).map_err(io_error("lock", &folder_path))? {
            Ok(lock) => lock,
            Err(holder) => return Err(ReplicaError::Busy { path, holder }),
        };
        let opened = (|| {
            // Another command may have made it, or put another thing in its place, before this one had the lock.
            if locate(&path, options)?.1 != kind {
                let holder = "another command has just made it".into();
                return Err(ReplicaError::Busy { path: path.clone(), holder });
            }
            let lineage = Lineage::load(&folder)?;
            if let Some(lineage) = &lineage {
                refuse_others_state(lineage, &path, &folder_path, options)?;
            }
            let format = format_of(&path, kind, lineage.as_ref(), options)?;
            // Who else uses an export, only its server knows.
            let image = match kind.filter(|kind| *kind != DestinationKind::Export) {
                Some(_) => lock_image(&path, format)?,
                None => None,
            };
            let destination: Box<dyn Destination> = match kind {
                Some(DestinationKind::Device) => Box::new(DeviceDestination::new(path.clone())?),
                Some(DestinationKind::Export) => Box::new(ExportDestination::new(&path, options.doubt)?),
                _ => Box::new(
                    FileDestination::new(path.clone(), format)
                        .map_err(io_error("open the folder of", &path))?,
                ),
            };
            if !folder.is_at_path().map_err(io_error("look at", &folder_path))? {
                return Err(covered(&path));
            }
            // Before anything is completed that a crash left.
            let views = Views::of(&folder).map_err(io_error("write to", &folder_path))?;
            Ok((Replica::begin_read(destination, Box::new(folder), options, views)?, image))
        })();
        match opened {
            Ok((mut replica, image)) => {
                replica.hold(lock, image);
                Ok(replica)
            }
            Err(e) => {
                lock.remove();
                Err(e)
            }
        }
    }

    /// Opens a destination, with its state in `folder`. Takes no lock.
    ///
    /// # Errors
    /// As [`Replica::open`].
    #[doc(hidden)]
    pub fn begin(
        destination: Box<dyn Destination>,
        folder: Box<dyn Folder>,
        options: &ReplicaOptions,
    ) -> Result<Replica> {
        Replica::begin_read(destination, folder, options, Views::default())
    }

    /// Opens a destination that may have readers, with its state in `folder`. Takes no lock.
    pub(crate) fn begin_read(
        destination: Box<dyn Destination>,
        folder: Box<dyn Folder>,
        options: &ReplicaOptions,
        views: Views,
    ) -> Result<Replica> {
        let lineage = Lineage::load(&*folder)?;
        let settings = PastSettings::load(&*folder)?;
        if let Some(stamp) = lineage.as_ref().and_then(|lineage| lineage.stamp.as_ref()) {
            destination.mark(&stamp.marks);
        }
        let mut replica = Replica::new(destination, folder, lineage, options);
        *replica.views_mut() = views;
        if settings.as_ref().is_some_and(|settings| settings.dropped) {
            replica.warn(
                "the oldest moments of its past were dropped to make room for a sync that did not end".into(),
            );
        }
        replica.set_settings(settings);
        // Where it cannot be read, that is told where something depends on it.
        let note = note::read(replica.state()).ok().flatten();
        replica.set_unclean(note.is_some_and(|(note, _)| note.stamp.is_none()));
        replica.find_readers()?;
        if replica.is_kept() {
            let everything = replica.lineage().unsure == Unsure::Everything;
            replica.set_changed(everything.then_some(Foreign::Written));
            if let Err(ReplicaError::Damaged { .. }) = replica.unsure() {
                // Not known where means anywhere.
                let lineage = replica.lineage_mut();
                lineage.unsure = Unsure::Everything;
                lineage.step.iter_mut().for_each(|step| step.unsure = Unsure::Everything);
                replica.set_changed(Some(Foreign::Unsure));
            }
            replica.refuse_promoted()?;
            let was_promoted = replica.lineage().role.promoted.is_some();
            replica.recover()?;
            if !was_promoted {
                replica.refuse_promoted()?;
            }
            replica.complete_promotion()?;
        } else {
            replica.first()?;
        }
        if replica.left().is_none() {
            replica.leave()?;
        }
        replica.refresh()?;
        Ok(replica)
    }

    /// A destination without a lineage.
    fn first(&mut self) -> Result<()> {
        // They belong to nothing.
        for name in [ARRIVING, WHOLE, note::NAME] {
            self.remove(name)?;
        }
        // It was made before its step could be written down; with something in it, it is another's.
        let partial = self.stamp(Name::Temporary)?;
        let taken = partial.as_ref().is_some_and(|stamp| stamp.size > 0);
        if partial.is_some() && !taken {
            self.remove_partial()?;
        }
        let begins = || if taken { Err(self.partial_taken()) } else { Ok(()) };
        let Some(stamp) = self.stamp(Name::Final)? else { return begins() };
        if self.options().adopt {
            self.destination().examine()?;
            self.take(stamp);
            return Ok(());
        }
        let free = self.options().replace || (self.destination().is_device() && self.is_blank()?);
        if free { begins() } else { Err(ReplicaError::NotAReplica(self.destination().path().to_path_buf())) }
    }

    /// True if a device seems blank: its first and last MiB, and 4 KiB at [`samples`] between them, are zeroes.
    fn is_blank(&self) -> Result<bool> {
        let disk = self.destination().open(Name::Final)?;
        let len = disk.len().min(1 << 20);
        let between = samples(disk.len()).map(|at| (at, 4096));
        for (offset, len) in [(0, len), (disk.len() - len, len)].into_iter().chain(between) {
            let mut buf = device::Buf::new(len as usize);
            // Sector by sector, so that an unreadable one is named.
            for (at, sector) in (offset..).step_by(4096).zip(buf.chunks_mut(4096)) {
                let read = disk.read_at(at, sector).map_err(|e| device::unreadable(at, e));
                read.map_err(io_error("read", self.destination().path()))?;
            }
            if buf.iter().any(|b| *b != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adopts what is there: nothing is known of it until a compare has proven it. The folder stays as it is until a delta
    /// comes ([`Replica::take_over`]), so an adoption that comes to nothing forgets nothing.
    pub(crate) fn take(&mut self, stamp: Stamp) {
        self.adopt(self.writes_to());
        self.set_journal(None);
        self.set_changed(None);
        self.clear_noticed();
        self.start_over(Lineage { size: stamp.size, stamp: Some(stamp), ..Lineage::new() });
    }

    /// A delta comes to what was adopted: from here on nothing counts that was known of it before.
    pub(crate) fn take_over(&mut self) -> Result<()> {
        let Some(wrote) = self.adopted() else { return Ok(()) };
        if wrote == Name::Temporary {
            // As long as the lineage names its step, it is known for ours.
            self.remove_partial()?;
        }
        let before = Lineage::load(self.state()).ok().flatten();
        if self.settings().is_some() && before.is_some_and(|before| self.has_past_of(before.nonce)) {
            self.give_up_past("what others had changed was adopted");
        }
        // Until it is removed, the old journal is told by the state to which its deltas are bound.
        self.store()?;
        for name in [ARRIVING, WHOLE, note::NAME] {
            self.remove(name)?;
        }
        Ok(())
    }

    /// Before a delta comes to what others have changed: from here on its times are moved by own writes, too, and tell nothing.
    pub(crate) fn keep_doubt(&mut self) -> Result<()> {
        if self.changed().is_none() || !self.is_kept() || self.lineage().unsure == Unsure::Everything {
            return Ok(());
        }
        let lineage = self.lineage_mut();
        lineage.unsure = Unsure::Everything;
        lineage.step.iter_mut().for_each(|step| step.unsure = Unsure::Everything);
        self.store()
    }

    /// Refuses a replica that was promoted: nothing is merged over its writes unasked.
    pub(crate) fn refuse_promoted(&mut self) -> Result<()> {
        let Some(promoted) = self.lineage().role.promoted else { return Ok(()) };
        let is_there = self.destination().is_device() || self.stamp(Name::Final)?.is_some();
        self.set_changed(is_there.then_some(Foreign::Promoted));
        if self.options().doubt {
            return Ok(());
        }
        if is_there {
            return self.mergeable();
        }
        // Nothing is overwritten where nothing is, but it may only be away.
        match self.options().create {
            true => Ok(()),
            false => Err(ReplicaError::Away(format!(
                "{0} {1}, and is gone. If its file system is not mounted, mount it and run again; if it is gone for good, \"dsync \
                 forget {0}\" where it was forgets it, and \"dsync sync --create\" begins a new replica there",
                self.path().display(),
                promoted.said()
            ))),
        }
    }

    /// Fails if it was promoted since the last commit, and not opened to be adopted. To be asked before a
    /// delta is taken where [`ReplicaOptions::doubt`] let that pass: doubt is for looking.
    ///
    /// # Errors
    /// [`ReplicaError::Promoted`].
    pub fn mergeable(&self) -> Result<()> {
        let Some(promoted) = self.lineage().role.promoted.filter(|_| !self.options().adopt) else {
            return Ok(());
        };
        Err(self.lineage().refusal(self.path(), promoted))
    }
}

/// How the disk at a path lies in its file, or will.
fn format_of(
    path: &Path,
    kind: Option<DestinationKind>,
    lineage: Option<&Lineage>,
    options: &ReplicaOptions,
) -> Result<Format> {
    let contradicts = |is: Format, what: &str| {
        let asked = options.format.filter(|asked| *asked != is)?;
        Some(ReplicaError::Refused(format!(
            "{} is {what}, and --format {asked} was given: omit it, or give another path",
            path.display()
        )))
    };
    let (format, what) = match (lineage, kind) {
        (_, Some(DestinationKind::Device)) => {
            (Format::Raw, "a device, whose bytes are those of the disk".to_owned())
        }
        (_, Some(DestinationKind::Export)) => {
            (Format::Raw, "an export, whose bytes are those of the disk".to_owned())
        }
        (Some(lineage), there) if there.is_some() || !options.create => {
            (lineage.format, format!("a {} replica", lineage.format))
        }
        (_, None) => {
            let named = if options.container { Format::Raw } else { Format::of_name(path) };
            return Ok(options.format.unwrap_or(named));
        }
        // A file that is adopted, or replaced, is what it is.
        (_, Some(_)) => {
            let is_qcow2 = device::container_format(path) == Some("qcow2");
            let named = !options.container && Format::of_name(path) == Format::Qcow2;
            match (options.format, is_qcow2) {
                (Some(Format::Raw), _) => return Ok(Format::Raw),
                (Some(Format::Qcow2), true) => return Ok(Format::Qcow2),
                (None, true) if named => return Ok(Format::Qcow2),
                _ => (Format::Raw, "no qcow2 file".to_owned()),
            }
        }
    };
    contradicts(format, &what).map_or(Ok(format), Err)
}

impl Lineage {
    /// Why nothing is merged into what was promoted.
    pub(crate) fn refusal(&self, path: &Path, promoted: Promoted) -> ReplicaError {
        let at = match (self.epoch, self.source) {
            (Some(epoch), Some(source)) => format!("epoch {} of source {source}", epoch.number),
            _ => "a copy that was not complete".into(),
        };
        ReplicaError::Promoted { path: path.to_path_buf(), promoted: promoted.said(), at }
    }
}
