//! Opening a replica: what is safe, what a crash left, and where it stands.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use delta::{Epoch, Header, Method, Resume};
use device::{Disk, Folder, FolderLock};
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::apply::Applier;
use crate::destination::{Destination, DeviceDestination, FileDestination, Name};
use crate::error::{ReplicaError, Result, disk_error, io_error};
use crate::foreign::{self, covered};
use crate::journal::{self, ARRIVING, Contents, WHOLE};
use crate::lineage::{Lineage, Position, Stamp, State, StepKind, Toward};

/// How to open a replica.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The folder of the replica's state. Without it: `.NAME.dsync/` beside a file, one within `devices` for a device.
    pub folder: Option<PathBuf>,
    /// Where the folders of replicas on devices are, usually in the state directory; each is named after its disk.
    pub devices: PathBuf,
    /// Take what stands there, replica or not, as something that a compare will prove.
    pub adopt: bool,
    /// Let a seed take the place of what stands there.
    pub replace: bool,
    /// Let a seed begin another replica where the file of one is gone.
    pub create: bool,
    /// Let it pass that others changed the destination, which [`Status::changed`] then says: only a compare fits it.
    pub doubt: bool,
}

/// Where a replica stands: what its source must know to find what it lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The source it follows. `None` if there is no replica yet, or an adopted file.
    pub source: Option<Uuid>,
    /// The epoch of the last commit. `None` before the first.
    pub epoch: Option<Epoch>,
    /// It is ahead of that epoch by batches of a mirror.
    pub ahead: bool,
    /// How far the destination may be trusted. Incomplete if there is none.
    pub state: State,
    /// Bytes as of the last commit; of an adopted file those it has; 0 before the first seed is committed.
    pub size: u64,
    /// The source's block size in bytes, as of the last commit.
    pub block_size: u32,
    /// Bytes that a device has room for. `None` for a file.
    pub capacity: Option<u64>,
    /// The parts of the replica, ascending, its journal counted. Empty if there is nothing yet.
    pub positions: Vec<Position>,
    /// Names this very state, for deltas that fit nothing else.
    pub nonce: Uuid,
    /// A step was begun and not finished: what continues it is bound to the nonce.
    pub under_way: bool,
    /// The interrupted delta in the journal. What goes on from it says so; anything else drops it.
    pub resumes: Option<Resume>,
    /// What opening the replica had to mend, for people to read.
    pub recovered: Option<String>,
    /// In what way others changed the destination since the last commit, where [`Options::doubt`] let it pass.
    pub changed: Option<String>,
}

impl Status {
    /// There is no replica.
    pub fn nothing() -> Status {
        Status {
            source: None,
            epoch: None,
            ahead: false,
            state: State::Incomplete,
            size: 0,
            block_size: 0,
            capacity: None,
            positions: Vec::new(),
            nonce: Uuid::nil(),
            under_way: false,
            resumes: None,
            recovered: None,
            changed: None,
        }
    }

    /// A replica that is exactly at an epoch of its source, whose disk then had `size` bytes.
    pub fn at(source: Uuid, epoch: Epoch, size: u64) -> Status {
        Status {
            source: Some(source),
            epoch: Some(epoch),
            state: State::Exact,
            size,
            positions: vec![Position { epoch: Some(epoch), upto: size }],
            ..Status::nothing()
        }
    }
}

/// A destination with its lineage, held alone and in order: whatever a crash left was finished or undone when it was opened.
pub struct Replica {
    pub(crate) destination: Box<dyn Destination>,
    pub(crate) folder: Arc<dyn Folder>,
    pub(crate) lineage: Lineage,
    /// The lineage is on disk.
    pub(crate) kept: bool,
    /// The part of a delta in the journal.
    pub(crate) journal: Option<Contents>,
    pub(crate) adopt: bool,
    pub(crate) replace: bool,
    pub(crate) create: bool,
    /// There was a replica, and its file is gone.
    pub(crate) gone: bool,
    doubt: bool,
    changed: Option<&'static str>,
    /// What [`Lineage::foreign`] is to say from the next store on.
    pub(crate) noticed: AtomicBool,
    /// What the file looked like when this process left it alone ([`crate::foreign`]); `None` if it has no say.
    pub(crate) left: Option<Stamp>,
    /// Own writes to the file are noted.
    pub(crate) working: Option<foreign::Working>,
    /// A commit has come to where it can only be completed, and has not been: opening the replica anew does that. Until then
    /// nothing here tells what the destination holds.
    pub(crate) half_done: bool,
    /// Bytes that the next delta is expected to bring.
    pub(crate) expected: u64,
    /// A step in place is made durable every so many bytes.
    pub(crate) save_bytes: u64,
    recovered: Vec<String>,
    status: Status,
    lock: Option<FolderLock>,
    image: Option<device::ImageLock>,
}

/// The folder of a file's replica.
fn folder_beside(file: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(file.file_name().unwrap_or_default());
    name.push(".dsync");
    file.with_file_name(name)
}

/// Where a destination is, without links; whether something is there; and where its state lies.
fn locate(path: &Path, options: &Options) -> Result<(PathBuf, Option<FileType>, PathBuf)> {
    let canonical = match std::fs::canonicalize(path) {
        Ok(path) => path,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let absolute = std::path::absolute(path).map_err(io_error("find", path))?;
            let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
                return Err(ReplicaError::Refused(format!("{} is no file's name: give one", path.display())));
            };
            if std::fs::symlink_metadata(&absolute).is_ok() {
                return Err(ReplicaError::Refused(format!(
                    "{} is a link that leads nowhere: remove it, or give another path",
                    path.display()
                )));
            }
            match std::fs::canonicalize(parent) {
                // What is made there is gone with the next boot, and takes the name of a device that is not attached.
                Ok(parent) if parent.starts_with("/dev") && !parent.starts_with("/dev/shm") => {
                    return Err(ReplicaError::Away(format!(
                        "there is no device {}: attach it, or give another path",
                        path.display()
                    )));
                }
                Ok(parent) => parent.join(name),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    return Err(ReplicaError::Away(format!(
                        "there is no folder {} for the replica: mount its file system, make it, or give another path",
                        parent.display()
                    )));
                }
                Err(e) => return Err(io_error("find", parent)(e)),
            }
        }
        Err(e) => return Err(io_error("find", path)(e)),
    };
    let kind = match rustix::fs::stat(&canonical) {
        Ok(found) => Some(FileType::from_raw_mode(found.st_mode)),
        Err(rustix::io::Errno::NOENT) => None,
        Err(e) => return Err(io_error("look at", &canonical)(e.into())),
    };
    let folder = match (&options.folder, kind) {
        (Some(folder), _) => folder.clone(),
        (None, Some(FileType::BlockDevice)) if options.devices.as_os_str().is_empty() => {
            return Err(ReplicaError::Refused(format!(
                "{} is a device, and no folder is given for the state of its replica: give one with --journal-dir",
                path.display()
            )));
        }
        (None, Some(FileType::BlockDevice)) => folder_of_device(path, &canonical, &options.devices)?,
        (None, _) => folder_beside(&canonical),
    };
    Ok((canonical, kind, folder))
}

/// The folder of a replica on a device: by what names the disk; by the kernel's name for it where nothing does, or where an
/// earlier dsync has made the folder.
fn folder_of_device(path: &Path, canonical: &Path, root: &Path) -> Result<PathBuf> {
    let by_name = |path: &Path| root.join(path.to_string_lossy().trim_start_matches('/').replace('/', "-"));
    let number = device::identity(canonical)?.dev;
    let Some(id) = device::disk_id(number) else { return Ok(by_name(canonical)) };
    let by_id = root.join(&id);
    if by_id.exists() {
        return Ok(by_id);
    }
    let absolute = std::path::absolute(path).map_err(io_error("find", path))?;
    for old in [by_name(canonical), by_name(&absolute)] {
        if !old.is_dir() {
            continue;
        }
        let dir = device::Dir::open(&old).map_err(io_error("open", &old))?;
        let known = Lineage::load(&dir)?;
        if known.is_some_and(|lineage| lineage.disk.is_none_or(|disk| disk == id)) {
            return Ok(old);
        }
    }
    Ok(by_id)
}

/// Gives a folder that is named after the kernel's name of a device the name of the disk.
fn name_after_disk(folder: PathBuf, canonical: &Path, options: &Options) -> Result<PathBuf> {
    let id = device::identity(canonical).ok().and_then(|identity| device::disk_id(identity.dev));
    let (None, Some(id), true) = (&options.folder, id, folder.is_dir()) else { return Ok(folder) };
    let by_id = options.devices.join(id);
    if by_id == folder {
        return Ok(folder);
    }
    let moved = std::fs::rename(&folder, &by_id);
    moved
        .and_then(|()| std::fs::File::open(&options.devices)?.sync_all())
        .map_err(io_error("rename", &folder))?;
    Ok(by_id)
}

/// The folder in which the state of the replica at `path` is kept, or would be.
pub(crate) fn state_folder(path: &Path, options: &Options) -> Result<PathBuf> {
    locate(path, options).map(|(_, _, folder)| folder)
}

/// A replica's file that was renamed in its folder, and left its state behind.
fn moved_from(path: &Path, folder: &Path) -> Option<ReplicaError> {
    use std::os::unix::fs::MetadataExt;
    let inode = std::fs::metadata(path).ok()?.ino();
    let beside = std::fs::read_dir(path.parent()?).ok()?.flatten().map(|entry| entry.path());
    let states = beside.filter(|at| at.extension().is_some_and(|end| end == "dsync") && at.is_dir());
    let mut known =
        states.filter_map(|at| Some((Lineage::load(&device::Dir::existing(&at).ok()?).ok()??, at)));
    let (lineage, from) = known.find(|(lineage, _)| {
        lineage.stamp.as_ref().is_some_and(|stamp| stamp.inode == inode) && !lineage.path.exists()
    })?;
    let (path, to) = (path.to_path_buf(), folder.to_path_buf());
    Some(ReplicaError::Moved { path, was: lineage.path, from, to })
}

/// What is written down of the replica at `path`, `None` if it is none. Changes nothing, recovers nothing, and takes no lock.
///
/// # Errors
/// If the lineage can't be read or understood.
pub fn inspect(path: &Path, options: &Options) -> Result<Option<Lineage>> {
    let (_, _, folder) = locate(path, options)?;
    if !folder.is_dir() {
        return Ok(None);
    }
    Lineage::load(&device::Dir::open(&folder).map_err(io_error("open", &folder))?)
}

/// A folder belongs to one replica, and to the disk it was made for.
fn refuse_others_state(lineage: &Lineage, path: &Path, folder: &Path, options: &Options) -> Result<()> {
    let disk = device::identity(path).ok().filter(device::Identity::is_block);
    let (had, has) = (&lineage.disk, disk.and_then(|identity| device::disk_id(identity.dev)));
    if options.adopt || (had.is_some() && *had == has) {
        return Ok(());
    }
    if let (Some(had), Some(has)) = (had, &has) {
        return Err(ReplicaError::Refused(format!(
            "{} holds the state of a replica on the disk {had}, and {} is the disk {has}: attach that one, give this one a \
             folder of its own with --journal-dir, or pass --adopt to \"dsync sync\", which overwrites {1} with a replica",
            folder.display(),
            path.display()
        )));
    }
    if lineage.path != path && lineage.path.exists() {
        return Err(ReplicaError::Refused(format!(
            "{} holds the state of another replica, {}: give one of its own with --journal-dir",
            folder.display(),
            lineage.path.display()
        )));
    }
    Ok(())
}

impl Replica {
    /// Opens the replica at `path`, or the place for one. Finishes or undoes what a crash left; [`Status::recovered`] tells.
    ///
    /// # Errors
    /// Refused if somebody else uses it, if it is no replica and is not to be adopted or replaced, if it was changed by
    /// others, or if a delta is there that can neither be finished nor dropped.
    pub fn open(path: &Path, options: &Options) -> Result<Replica> {
        let (path, kind, folder_path) = locate(path, options)?;
        match kind {
            None | Some(FileType::RegularFile | FileType::BlockDevice) => {}
            Some(_) => {
                return Err(ReplicaError::Refused(format!(
                    "{} is neither a file nor a block device: give one of these",
                    path.display()
                )));
            }
        }
        let device = kind == Some(FileType::BlockDevice);
        let folder_path = if device { name_after_disk(folder_path, &path, options)? } else { folder_path };
        // What is refused leaves no folder behind.
        if kind.is_some() && !device && !options.adopt && !options.replace && !folder_path.exists() {
            return Err(moved_from(&path, &folder_path).unwrap_or(ReplicaError::NotAReplica(path)));
        }
        let folder = device::Dir::open(&folder_path).map_err(io_error("make", &folder_path))?;
        let lock = match FolderLock::of(&folder).map_err(io_error("lock", &folder_path))? {
            Ok(lock) => lock,
            Err(holder) => return Err(ReplicaError::Busy { path, holder }),
        };
        let opened = (|| {
            if let Some(lineage) = Lineage::load(&folder)? {
                refuse_others_state(&lineage, &path, &folder_path, options)?;
            }
            if let Some(user) = kind.and_then(|_| device::in_use(&path)) {
                return Err(ReplicaError::Busy { path: path.clone(), holder: user });
            }
            let image =
                kind.map(|_| device::lock_image(&path, device::Access::Write)).transpose().or_else(|e| {
                    // A file system without locks can't tell of others, and can't be asked.
                    if e.kind() == device::DeviceErrorKind::Unsupported { Ok(None) } else { Err(e) }
                })?;
            let destination: Box<dyn Destination> = if device {
                Box::new(DeviceDestination::new(path.clone())?)
            } else {
                Box::new(FileDestination::new(path.clone()).map_err(io_error("open the folder of", &path))?)
            };
            if !folder.is_at_path().map_err(io_error("look at", &folder_path))? {
                return Err(covered(&path));
            }
            let mut replica = Replica::begin(destination, Box::new(folder), options)?;
            replica.image = image;
            Ok(replica)
        })();
        match opened {
            Ok(mut replica) => {
                replica.lock = Some(lock);
                Ok(replica)
            }
            Err(e) => {
                lock.remove();
                Err(e)
            }
        }
    }

    /// Opens what is at a place, with its state in `folder`. Takes no lock.
    ///
    /// # Errors
    /// As for [`Replica::open`].
    #[doc(hidden)]
    pub fn begin(
        destination: Box<dyn Destination>,
        folder: Box<dyn Folder>,
        options: &Options,
    ) -> Result<Replica> {
        let lineage = Lineage::load(&*folder)?;
        let mut replica = Replica {
            destination,
            folder: folder.into(),
            kept: lineage.is_some(),
            status: Status::nothing(),
            lineage: lineage.unwrap_or_else(Lineage::new),
            journal: None,
            adopt: options.adopt,
            replace: options.replace,
            create: options.create,
            gone: false,
            doubt: options.doubt,
            changed: None,
            noticed: AtomicBool::new(false),
            left: None,
            working: None,
            half_done: false,
            expected: 0,
            save_bytes: crate::receiver::SAVE_BYTES,
            recovered: Vec::new(),
            lock: None,
            image: None,
        };
        if replica.kept {
            replica.changed = replica.lineage.foreign.then_some(foreign::WRITTEN);
            replica.refuse_promoted()?;
            replica.recover()?;
        } else {
            replica.first()?;
        }
        if replica.left.is_none() {
            replica.leave()?;
        }
        replica.refresh()?;
        Ok(replica)
    }

    /// Where the replica stands.
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// The destination's path, without links.
    pub fn path(&self) -> &Path {
        self.destination.path()
    }

    /// The folder of the replica's state.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What the destination holds, to be compared: without what lies in a journal, so a delta that was found by comparing
    /// must not go on from it.
    ///
    /// # Errors
    /// If there is nothing, or it can't be opened.
    pub fn content(&self) -> Result<Arc<dyn Disk>> {
        self.sound()?;
        self.destination.open(self.writes_to())
    }

    /// Says how many bytes of data the next delta is likely to bring, so that the space for its journal can be checked first.
    pub fn expect(&mut self, bytes: u64) {
        self.expected = bytes;
    }

    /// Where the step under way writes, or the next will.
    pub(crate) fn writes_to(&self) -> Name {
        match self.lineage.step.as_ref().map(|s| s.kind) {
            Some(StepKind::NewFile { .. } | StepKind::Clone { .. }) => Name::Temporary,
            Some(StepKind::InPlace) | None => Name::Final,
        }
    }

    /// Where the replica stands by its lineage alone, or by its step.
    pub(crate) fn positions(&self) -> Vec<Position> {
        self.lineage.positions()
    }

    pub(crate) fn nonce(&self) -> Uuid {
        self.lineage.step.as_ref().map_or(self.lineage.nonce, |s| s.nonce)
    }

    /// Brings [`Replica::status`] up to date.
    pub(crate) fn refresh(&mut self) -> Result<()> {
        let positions = self.positions();
        let capacity = match self.destination.is_device() {
            true => Some(self.destination.open(Name::Final)?.len()),
            false => None,
        };
        let lineage = &self.lineage;
        self.status = Status {
            source: lineage.source.or(lineage.step.as_ref().map(|s| s.toward.source)),
            epoch: lineage.epoch,
            ahead: lineage.ahead,
            state: lineage.state,
            size: lineage.size,
            block_size: lineage.block_size,
            capacity,
            positions: self.journal.as_ref().map_or(positions.clone(), |j| j.positions(&positions)),
            nonce: self.nonce(),
            under_way: lineage.step.is_some(),
            resumes: self.journal.as_ref().and_then(Contents::resume),
            recovered: (!self.recovered.is_empty()).then(|| self.recovered.join("; ")),
            changed: self.changed.map(str::to_owned),
        };
        Ok(())
    }

    /// Fails if a commit is half done.
    pub(crate) fn sound(&self) -> Result<()> {
        if !self.half_done {
            return Ok(());
        }
        Err(ReplicaError::Refused(format!(
            "a commit to {} was interrupted by an error: run the command again, which completes the commit first",
            self.path().display()
        )))
    }

    pub(crate) fn stamp(&self, name: Name) -> Result<Option<Stamp>> {
        self.destination.stamp(name).map_err(io_error("look at", self.destination.path()))
    }

    /// Makes room for the next lineage, before a journal takes what there is: without it, that could never be merged.
    pub(crate) fn reserve(&self) -> Result<()> {
        let state = "the replica is unchanged";
        device::reserve(&*self.folder, crate::lineage::NAME, crate::lineage::ROOM).map_err(disk_error(
            "write the lineage",
            &self.folder.path().join(crate::lineage::NAME),
            state,
        ))?;
        self.reserve_note()
    }

    pub(crate) fn store(&mut self) -> Result<()> {
        self.lineage.path = self.destination.path().to_path_buf();
        self.lineage.foreign |= self.noticed.load(SeqCst);
        self.lineage.disk = self.destination.disk();
        self.lineage.store(&*self.folder)?;
        self.kept = true;
        Ok(())
    }

    /// Forgets the replica: its lineage, its journal and a copy that was begun. The destination stays as it is.
    pub fn disown(mut self) -> Result<()> {
        // First what makes it a replica: what is left after a crash belongs to nothing.
        self.remove(crate::lineage::NAME)?;
        self.folder.sync().map_err(io_error("sync", self.folder.path()))?;
        if !self.destination.is_device() {
            self.destination
                .remove()
                .map_err(io_error("remove the copy begun for", self.destination.path()))?;
        }
        for name in self.folder.list().map_err(io_error("look into", self.folder.path()))? {
            if name != FolderLock::NAME {
                self.remove(&name)?;
            }
        }
        if let Some(lock) = self.lock.take() {
            lock.remove();
        }
        Ok(())
    }

    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        self.folder.remove(name).map_err(io_error("remove", &self.folder.path().join(name)))
    }

    /// A place without a lineage.
    fn first(&mut self) -> Result<()> {
        // They belong to nothing.
        for name in [ARRIVING, WHOLE, foreign::NAME] {
            self.remove(name)?;
        }
        self.remove_unclaimed()?;
        let Some(stamp) = self.stamp(Name::Final)? else { return Ok(()) };
        if self.adopt {
            return self.take(stamp);
        }
        let free = self.replace || (self.destination.is_device() && self.is_blank()?);
        if free { Ok(()) } else { Err(ReplicaError::NotAReplica(self.destination.path().to_path_buf())) }
    }

    /// True if a device bears nothing that anybody would miss: its first and last MiB are zeroes.
    fn is_blank(&self) -> Result<bool> {
        let disk = self.destination.open(Name::Final)?;
        let len = disk.len().min(1 << 20);
        let mut buf = device::Buf::new(len as usize);
        for offset in [0, disk.len() - len] {
            // Sector by sector, so that one that can't be read is named.
            for (at, sector) in (offset..).step_by(4096).zip(buf.chunks_mut(4096)) {
                let read = disk.read_at(at, sector).map_err(|e| device::unreadable(at, e));
                read.map_err(io_error("read", self.destination.path()))?;
            }
            if buf.iter().any(|b| *b != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes what stands there as something of which nothing is known.
    fn take(&mut self, stamp: Stamp) -> Result<()> {
        let partial = self.writes_to() == Name::Temporary;
        (self.journal, self.changed, self.noticed) = (None, None, AtomicBool::new(false));
        self.lineage = Lineage { size: stamp.size, stamp: Some(stamp), ..Lineage::new() };
        // Without its journal, what was half merged is no longer what the lineage said, even if the adoption comes to nothing.
        let names = self.folder.list().map_err(io_error("look into", self.folder.path()))?;
        if std::mem::take(&mut self.kept) && names.iter().any(|name| name == WHOLE) {
            self.store()?;
        }
        for name in [ARRIVING, WHOLE, foreign::NAME] {
            self.remove(name)?;
        }
        if partial {
            self.remove_partial()?;
        }
        Ok(())
    }

    /// What dsync's own server or tracker let others write is nobody else's, and nothing is merged over it unasked.
    fn refuse_promoted(&mut self) -> Result<()> {
        if self.lineage.promoted.is_some() {
            self.changed = Some("dsync served it or followed it for writing");
        }
        if self.doubt { Ok(()) } else { self.mergeable() }
    }

    /// Fails if dsync let others write to it since the last commit, and it was not opened to be adopted. To be asked before a
    /// delta is taken where [`Options::doubt`] let that pass: doubt is for looking.
    ///
    /// # Errors
    /// [`ReplicaError::Promoted`].
    pub fn mergeable(&self) -> Result<()> {
        let Some(promoted) = self.lineage.promoted.filter(|_| !self.adopt) else { return Ok(()) };
        let at = match (self.lineage.epoch, self.lineage.source) {
            (Some(epoch), Some(source)) => format!("epoch {} of source {source}", epoch.number),
            _ => "a copy that was not complete".into(),
        };
        Err(ReplicaError::Promoted { path: self.path().to_path_buf(), promoted: promoted.said(), at })
    }

    /// Makes it a replica of this source, if it is another's and `whole` says that all of it was compared. Which epochs of the
    /// other source stood where is forgotten.
    pub(crate) fn follow(&mut self, source: Uuid, whole: bool) -> Result<()> {
        if !whole || self.lineage.source.is_none_or(|s| s == source) {
            return Ok(());
        }
        let lineage = &mut self.lineage;
        (lineage.source, lineage.epoch, lineage.ahead) = (Some(source), None, false);
        lineage.state = State::Incomplete;
        self.store()?;
        self.refresh()
    }

    /// Finishes or undoes what a crash left.
    fn recover(&mut self) -> Result<()> {
        // After a kill, what is seen need not be durable yet; what is done now builds on it.
        self.folder.sync().map_err(io_error("sync", self.folder.path()))?;
        self.recover_partial()?;
        let whole = self.stamp(Name::Final)?;
        let had = self.lineage.epoch.is_some() || !self.positions().is_empty();
        let Some(whole) = whole else {
            if had && self.writes_to() == Name::Final {
                return self.forget();
            }
            return self.recover_journal(None);
        };
        if let Some(StepKind::NewFile { replaces, .. }) = self.lineage.step.as_ref().map(|s| s.kind) {
            // Unless it is what the seed replaces, somebody has put something in its place meanwhile.
            return match self.changed {
                _ if self.adopt => self.take(whole),
                Some(why) => Err(self.touched(why)),
                None if replaces => Ok(()),
                None => Err(ReplicaError::NotAReplica(self.destination.path().into())),
            };
        }
        if !had && !self.destination.is_device() && !self.replace {
            return if self.adopt {
                self.take(whole)
            } else {
                Err(ReplicaError::NotAReplica(self.destination.path().into()))
            };
        }
        self.recover_journal(Some(whole.clone()))?;
        // What was judged is what was left: a second look might already find somebody's write.
        self.left = self.left.take().or(Some(whole.glance()));
        Ok(())
    }

    /// Removes a NAME.partial that was made before its step could be written down: such a one is empty.
    fn remove_unclaimed(&self) -> Result<()> {
        match self.stamp(Name::Temporary)? {
            Some(stamp) if stamp.size == 0 => self.remove_partial(),
            _ => Ok(()),
        }
    }

    /// A new file that was to take the destination's place.
    fn recover_partial(&mut self) -> Result<()> {
        let Some(step) = self.lineage.step.clone() else { return self.remove_unclaimed() };
        let (inode, replaces) = match step.kind {
            StepKind::NewFile { inode, replaces } => (inode, replaces),
            StepKind::Clone { inode } => (inode, true),
            StepKind::InPlace => return self.remove_unclaimed(),
        };
        let epoch = step.toward.epoch;
        let is_ours = |s: &Option<Stamp>| s.as_ref().is_some_and(|s| s.inode == inode);
        let whole = self.stamp(Name::Final)?;
        if let Some(whole) = whole.clone().filter(|_| step.finished && is_ours(&whole)) {
            if let Some(why) = self.since_own_writes(&whole, &[]) {
                // Told next.
                self.changed = Some(why);
                return Ok(());
            }
            self.recovered.push(format!("epoch {epoch} had been put in place; its commit is finished now"));
            return self.renamed(&step.toward, Some(whole));
        }
        if is_ours(&self.stamp(Name::Temporary)?) {
            let cloned = matches!(step.kind, StepKind::Clone { .. });
            let left = self.lineage.stamp.as_ref().filter(|_| cloned).zip(whole);
            if step.finished && left.is_some_and(|(left, now)| left.differs(&now).is_some()) {
                // What others have done to the file that would be replaced is told next.
                return Ok(());
            }
            if step.finished {
                let copy = self.rename(replaces)?;
                self.recovered
                    .push(format!("the copy of epoch {epoch} was complete; it is put in place now"));
                return self.renamed(&step.toward, copy);
            }
            if matches!(step.kind, StepKind::NewFile { .. }) || !step.positions.is_empty() {
                return Ok(());
            }
            // Whether it was cloned already, nobody knows.
            self.remove_partial()?;
        }
        // It never became durable, or somebody has removed it: nothing is lost but time.
        self.recovered.push(format!("the unfinished copy of epoch {epoch} is gone; it is begun anew"));
        self.lineage.step = None;
        self.store()?;
        self.remove_unclaimed()
    }

    /// Puts NAME.partial in place.
    /// Returns what it looked like before.
    pub(crate) fn rename(&self, replace: bool) -> Result<Option<Stamp>> {
        self.at_path()?;
        let copy = self.stamp(Name::Temporary)?;
        match self.destination.rename(replace) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                Err(ReplicaError::NotAReplica(self.destination.path().to_path_buf()))
            }
            other => other.map_err(io_error("put in place", self.destination.path())).map(|()| copy),
        }
    }

    /// Moves the lineage after NAME.partial was put in place, unless others have written to it since it was `copy`.
    pub(crate) fn renamed(&mut self, toward: &Toward, copy: Option<Stamp>) -> Result<()> {
        self.destination.sync().map_err(io_error("sync the folder of", self.destination.path()))?;
        let stamp = self.settle()?;
        // Its new name has changed the other time.
        if copy.is_some_and(|copy| (copy.size, copy.written) != (stamp.size, stamp.written)) {
            // Without the note, whoever opens it next doubts it as well.
            self.forget_note()?;
            return Err(self.touched(foreign::WRITTEN));
        }
        self.moved_to(toward, stamp)
    }

    fn settle(&self) -> Result<Stamp> {
        self.destination.settle().map_err(disk_error("flush", self.destination.path(), INTERRUPTED))
    }

    /// What a delta makes of this replica.
    pub(crate) fn toward(&self, header: &Header) -> Option<Toward> {
        let toward = toward(header)?;
        // Compared at its own epoch, leaving out what has changed since: that it is ahead in some of these blocks stays.
        let compared = header.method == Method::Compare && self.lineage.epoch == Some(toward.epoch);
        Some(Toward { ahead: toward.ahead || compared && self.lineage.ahead, ..toward })
    }

    /// Moves the lineage: the destination is complete.
    pub(crate) fn moved(&mut self, toward: &Toward) -> Result<()> {
        let stamp = self.settle()?;
        // Making it durable takes its time, and nothing that came in it is own.
        self.only_own(&stamp.clone().glance(), toward.size)?;
        self.moved_to(toward, stamp)
    }

    fn moved_to(&mut self, toward: &Toward, stamp: Stamp) -> Result<()> {
        let renamed = self.writes_to() == Name::Temporary;
        let after = self.lineage.after(toward, stamp.clone());
        self.noticed = AtomicBool::new(false);
        let before = std::mem::replace(&mut self.lineage, after);
        if let Err(e) = self.store() {
            // What this process goes on from is what the next one finds at least.
            self.lineage = before;
            return Err(e);
        }
        self.left = Some(stamp.glance());
        self.changed = None;
        if renamed { self.forget_note() } else { Ok(()) }
    }

    /// The destination is gone: what was known of it says nothing of a new one.
    fn forget(&mut self) -> Result<()> {
        self.recovered.push("the replica's file is gone".into());
        // What is on disk stays until another replica is begun: the file may come back.
        self.gone = true;
        self.lineage = Lineage::new();
        self.kept = false;
        Ok(())
    }

    /// What lies in the journal: merged if it is whole, kept if it can be gone on from, removed otherwise.
    fn recover_journal(&mut self, whole: Option<Stamp>) -> Result<()> {
        let Some(now) = whole else {
            // An unfinished copy may have been begun from a journal; without a destination there is nothing else to merge into.
            return self.keep_journal();
        };
        let before = self.lineage.stamp.clone();
        if before.as_ref().is_some_and(|b| b.inode != now.inode) {
            if self.adopt {
                return self.take(now);
            }
            self.changed = Some("another file has taken its place");
        }
        let deltas = journal::measure_all(&*self.folder, WHOLE)?;
        if let Some(last) = deltas.as_ref().map(|deltas| deltas.last().and_then(Contents::stream)) {
            if last.is_some() && last == self.lineage.committed {
                // Its work is done; only the removal was missing.
                self.remove(foreign::NAME)?;
                self.remove(WHOLE)?;
            } else if self.adopt {
                return self.take(now);
            } else if let Some(why) = self.changed.filter(|_| !self.is_compared(deltas.as_deref())) {
                return Err(self.touched(why));
            } else if last.is_none() {
                let path = self.folder.path().join(WHOLE);
                return Err(journal::damaged(&path, "it was whole once and is not any more".into()));
            } else if let Some(why) = self.since_own_writes(&now, deltas.as_deref().unwrap_or_default()) {
                return Err(self.touched(why));
            } else {
                self.left = Some(now.glance());
                let mut deltas = deltas.unwrap_or_default();
                while let Some(first) = self.first_without_room(&deltas)? {
                    deltas.truncate(first);
                }
                // Whoever was killed may not have synced what it appended last; what was never confirmed may be too long.
                let end = deltas.last().map_or(0, |last| last.start + last.bytes);
                let file = self.folder.open(WHOLE, false).and_then(|file| {
                    file.set_len(end)?;
                    file.sync()
                });
                file.map_err(io_error("sync", &self.folder.path().join(WHOLE)))?;
                return self.redo(&deltas);
            }
        }
        // A step in place has changed it itself; all else leaves it alone.
        let noted = self.has_note();
        let why = if noted || self.lineage.step.as_ref().is_some_and(|s| s.kind == StepKind::InPlace) {
            self.since_own_writes(&now, &[])
        } else {
            before.and_then(|before| before.differs(&now)).or_else(|| self.since_attached(&now))
        };
        self.changed = self.changed.or(why);
        if let Some(why) = self.changed {
            self.notice(why);
            return match (self.adopt, self.doubt) {
                (true, _) => self.take(now),
                // What lies in the journal belongs to what was there before.
                (false, true) => Ok(()),
                (false, false) => Err(self.touched(why)),
            };
        }
        self.left = Some(now.glance());
        if noted {
            self.keep_times()?;
        }
        let contents = journal::measure(&*self.folder, ARRIVING)?.unwrap_or_default();
        let again = contents.stream().is_some_and(|stream| self.has(stream));
        let merges =
            contents.whole && !again && self.writes_to() == Name::Final && self.fits_journal(&contents);
        if merges && self.has_room(&contents)? {
            let file = self.folder.open(ARRIVING, false).map_err(io_error("open", self.folder.path()))?;
            let durable = file.sync().and_then(|()| self.folder.rename(ARRIVING, WHOLE));
            durable.and_then(|()| self.folder.sync()).map_err(io_error("sync", self.folder.path()))?;
            return self.redo(&[contents]);
        }
        self.keep_journal()?;
        let unproven = self.lineage.source.is_none()
            && self.lineage.epoch.is_none()
            && self.lineage.step.is_none()
            && !self.positions().is_empty();
        if unproven && !self.adopt {
            return Err(ReplicaError::Unproven(self.destination.path().to_path_buf()));
        }
        Ok(())
    }

    /// Makes room for what a whole delta of the journal writes, before it is merged. Without it the delta is dropped, as the
    /// process would have done that received it.
    fn has_room(&mut self, contents: &Contents) -> Result<bool> {
        self.untouched()?;
        let holes = self.holes_of(ARRIVING, contents)?;
        match self.make_room(holes, false, "the replica is unchanged") {
            Err(error @ ReplicaError::Full { .. }) => {
                self.recovered.push(format!("a delta that was cut off at its end is dropped: {error}"));
                Ok(false)
            }
            made => made.map(|()| true),
        }
    }

    /// The first delta of a journal for which there is no room. All that was ever confirmed had its room before; the first one
    /// too, so if that lacks it the merge will say so.
    fn first_without_room(&mut self, deltas: &[Contents]) -> Result<Option<usize>> {
        for (number, contents) in deltas.iter().enumerate() {
            let holes = self.holes_of(WHOLE, contents)?;
            match self.make_room(holes, true, SAFE) {
                Err(ReplicaError::Full { .. }) => return Ok((number > 0).then_some(number)),
                made => made?,
            }
        }
        Ok(None)
    }

    /// True if all that is known against the destination is that others wrote to it before the journal's first delta was made,
    /// by comparing: then that mends what they did.
    fn is_compared(&self, deltas: Option<&[Contents]>) -> bool {
        let first = deltas.and_then(|deltas| deltas.first()?.segments.first());
        let marked = self.lineage.foreign && self.changed == Some(foreign::WRITTEN);
        marked && first.is_some_and(|s| compares(&s.header) && s.header.binds == Some(self.nonce()))
    }

    /// Before the journal of a delta is sealed that was compared with a device to which others had written: notes how the device
    /// was then. After a kill nothing else tells whether anybody has written since.
    pub(crate) fn note_compared(&mut self) -> Result<()> {
        if self.destination.is_device() && self.changed.is_some() {
            self.work(false)?;
        }
        Ok(())
    }

    /// Keeps what of a delta is in the journal if it fits, removes it otherwise.
    fn keep_journal(&mut self) -> Result<()> {
        match journal::measure(&*self.folder, ARRIVING)? {
            Some(contents)
                if !contents.segments.is_empty() && !contents.whole && self.fits_journal(&contents) =>
            {
                self.journal = Some(contents);
                Ok(())
            }
            Some(_) => self.remove(ARRIVING),
            None => Ok(()),
        }
    }

    /// True if the last commit was this very delta's: merging it again would change nothing, and the lineage would not say that it
    /// had begun.
    pub(crate) fn has(&self, stream: Uuid) -> bool {
        self.lineage.step.is_none() && self.lineage.committed == Some(stream)
    }

    fn fits_journal(&self, contents: &Contents) -> bool {
        contents.segments.first().is_some_and(|s| s.header.resumes.is_none() && self.check(&s.header).is_ok())
    }

    /// Merges a whole journal that a crash left.
    fn redo(&mut self, deltas: &[Contents]) -> Result<()> {
        self.merge(deltas)?;
        if let (Some(epoch), ahead) = (self.lineage.epoch, self.lineage.ahead) {
            let what = if ahead { "batches after" } else { "the journal of" };
            let was = if ahead { "were" } else { "was" };
            let now = if ahead { "they are" } else { "it is" };
            self.recovered.push(format!("{what} epoch {epoch} {was} whole; {now} merged now"));
        }
        Ok(())
    }

    /// Merges the whole deltas of the journal in place, one after the other, and moves the lineage to the last. May be done
    /// again after a crash, from any point. Returns the bytes written and read.
    pub(crate) fn merge(&mut self, deltas: &[Contents]) -> Result<(u64, u64)> {
        let last = deltas.last().and_then(|contents| contents.segments.last());
        let Some(toward) = last.and_then(|s| self.toward(&s.header)) else {
            return Err(journal::damaged(&self.folder.path().join(WHOLE), "it has no header".into()));
        };
        let path = self.destination.path().to_path_buf();
        let failed = |what| disk_error(what, &path, SAFE);
        let disk = self.destination.open(Name::Final)?;
        let segments = deltas.iter().flat_map(|contents| &contents.segments);
        let longest = segments.map(|s| s.header.size_after).max().unwrap_or(toward.size);
        self.half_done = true;
        let keeping = self.work(true)?;
        if !self.destination.is_device() && disk.len() < longest {
            disk.resize(longest).map_err(failed("grow"))?;
        }
        let mut applier = Applier::new(disk.clone(), 0, false).map_err(failed("open"))?;
        applier.keep(keeping);
        let mut positions = self.positions();
        for contents in deltas {
            journal::replay(
                &*self.folder,
                WHOLE,
                contents,
                &mut applier,
                &mut positions,
                failed("write to"),
            )?;
            let size = contents.segments.last().map_or(toward.size, |s| s.header.size_after);
            applier.finish(size).map_err(failed("write to"))?;
        }
        if !self.destination.is_device() && disk.len() != toward.size {
            disk.resize(toward.size).map_err(failed("cut"))?;
        }
        applier.flush().map_err(failed("flush"))?;
        let counts = (applier.written, applier.read);
        drop((applier, disk));
        self.still_there(toward.size)?;
        self.moved(&toward)?;
        self.forget_note()?;
        self.remove(WHOLE)?;
        self.half_done = false;
        Ok(counts)
    }

    /// Whether a delta fits what the replica is. What it goes on from is not looked at: that the journal holds it says that it
    /// fits.
    pub(crate) fn check(&self, header: &Header) -> Result<()> {
        let path = || self.destination.path().to_path_buf();
        let lineage = &self.lineage;
        if let Some(capacity) = self.status.capacity.filter(|c| *c < header.size_after) {
            return Err(ReplicaError::WrongSize {
                path: path(),
                has: capacity,
                given: format!(
                    "the source has {}: give a device at least that large",
                    device::exact_size(header.size_after)
                ),
            });
        }
        let source = lineage.source.or(lineage.step.as_ref().map(|s| s.toward.source));
        let compared = compares(header);
        if let Some(why) = self.changed.filter(|_| !compared) {
            return Err(self.touched(why));
        }
        let proves = self.adopt && compared;
        let seeds = header.is_seed() && header.resumes.is_none();
        if let Some(has) = source.filter(|s| *s != header.source && !proves && !(seeds && self.replace)) {
            return Err(ReplicaError::WrongSource { path: path(), has, given: header.source });
        }
        if let Some(binds) = header.binds {
            if binds != self.nonce() {
                let given = "the delta was made for another state of it: run \"dsync sync\" again";
                return Err(self.at_another("has moved on", given));
            }
            // What it goes on from may be the comparison that has shown what is there.
            let held = self.journal.as_ref().filter(|_| header.resumes.is_some());
            let positions = held.map_or_else(|| self.positions(), |held| held.positions(&self.positions()));
            if !compared && positions.iter().any(|p| p.epoch.is_none()) {
                return Err(self.at_another(UNVERIFIED, "so only \"dsync sync\" can update it"));
            }
        } else if header.resumes.is_none() {
            let fresh = lineage.epoch.is_none() && self.is_free();
            if !(seeds && (fresh || self.replace)) {
                self.check_chain(header, seeds, fresh)?;
            }
        }
        Ok(())
    }

    fn at_another(&self, has: impl Into<String>, given: impl Into<String>) -> ReplicaError {
        ReplicaError::WrongEpoch {
            path: self.destination.path().to_path_buf(),
            has: has.into(),
            given: given.into(),
        }
    }

    /// Whether a delta that is bound to no state fits by its epochs. `fresh` if there is nothing at the destination yet.
    fn check_chain(&self, header: &Header, seeds: bool, fresh: bool) -> Result<()> {
        let (lineage, path) = (&self.lineage, || self.destination.path().to_path_buf());
        let wants = match header.chain.first() {
            _ if seeds => "the delta is a whole copy".into(),
            Some(first) => format!("the delta begins at {}", first.number),
            None => "the delta names no epoch".into(),
        };
        let Some(epoch) = lineage.epoch else {
            let has = if fresh && lineage.step.is_none() { "does not exist yet" } else { "is incomplete" };
            if fresh {
                return Err(ReplicaError::Unseeded { path: path(), has: has.into(), given: wants });
            }
            return Err(self.at_another(has, format!("{wants}: complete it first, with \"dsync sync\"")));
        };
        for position in self.positions() {
            let Some(at) = position.epoch else {
                return Err(self.at_another(UNVERIFIED, "so only \"dsync sync\" can update it"));
            };
            if header.position(&at).is_none_or(|i| lineage.ahead && i + 1 >= header.chain.len()) {
                return Err(self.not_in_chain(header, &at, seeds, &wants));
            }
        }
        let first = header.chain.first() == Some(&epoch);
        if first && header.chain.len() > 1 && header.size_before != lineage.size {
            return Err(ReplicaError::WrongSize {
                path: path(),
                has: lineage.size,
                given: format!(
                    "the delta begins with {} at the same epoch: \"dsync sync --adopt SRC {}\" compares all of it with its \
                     source and overwrites what differs",
                    device::exact_size(header.size_before),
                    self.path().display()
                ),
            });
        }
        Ok(())
    }

    /// Why a delta does not fit a replica at an epoch, and what would.
    fn not_in_chain(&self, header: &Header, at: &Epoch, seeds: bool, wants: &str) -> ReplicaError {
        let ahead = if self.lineage.ahead { ", and ahead of it by batches of a mirror" } else { "" };
        let has = format!("is at epoch {}{ahead}", at.number);
        let given = if header.chain.iter().any(|e| e.number == at.number) {
            format!(
                "and the delta's epoch {} is another one, of a copied or restored source: run \"dsync sync\" from the right \
                 source",
                at.number
            )
        } else if let Some(to) = header.to().filter(|to| to.number <= at.number) {
            format!("beyond the end of this delta at epoch {}: skip this delta", to.number)
        } else if seeds {
            format!("{wants}: {SEED_ELSEWHERE}")
        } else {
            format!(
                "{wants}: merge the deltas between the two first, or make one that fits with \"dsync extract SRC --since {}\"",
                at.number
            )
        };
        self.at_another(has, given)
    }

    /// True if nothing that is worth anything stands at the destination.
    fn is_free(&self) -> bool {
        match self.lineage.step.as_ref().map(|s| s.kind) {
            Some(StepKind::NewFile { .. }) => true,
            // The first seed of a device: nothing was there before.
            Some(StepKind::InPlace) => self.lineage.stamp.is_none(),
            Some(StepKind::Clone { .. }) => false,
            None => self.lineage.size == 0,
        }
    }
}

/// What a replica is that was adopted, and not compared to the end.
const UNVERIFIED: &str = "was adopted and not compared to the end";
/// What to do with a whole copy where a replica is.
const SEED_ELSEWHERE: &str = "merge it at a path where there is no replica, or run \"dsync sync\"";

/// What became of the destination when space or a disk failed.
pub(crate) const SAFE: &str = "the delta is safe in the journal, and the next command finishes the commit";
pub(crate) const INTERRUPTED: &str =
    "the replica is unchanged or marked as incomplete, and the next sync goes on";

/// A delta that was made by comparing all that the replica holds.
fn compares(header: &Header) -> bool {
    matches!(header.method, Method::Compare | Method::Rolling) && header.binds.is_some()
}

/// What a delta makes of a replica.
pub(crate) fn toward(header: &Header) -> Option<Toward> {
    Some(Toward {
        source: header.source,
        epoch: *header.to()?,
        size: header.size_after,
        block_size: header.block_size,
        fuzzy: header.fuzzy,
        lacking: header.lacking,
        ahead: header.ahead,
        stream: header.stream,
    })
}

impl Drop for Replica {
    fn drop(&mut self) {
        // A folder that was made only for the lock goes again.
        if let Some(lock) = self.lock.take() {
            if !self.kept {
                lock.remove();
            }
        }
        self.image = None;
    }
}
