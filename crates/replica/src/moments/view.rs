//! A replica as it is at one moment, or was at an earlier one, to be read while others commit to it. Reading never makes a commit wait or fail:
//! where what a reader needs cannot be kept for it, the reader loses, and says so.
//!
//! What is read is the destination, over it what was replaced since the reader's moment ([`crate::past::views`]), and for an earlier moment
//! over both what the undo deltas hold that lead there. Their files are held open: they may be folded or dropped meanwhile. A reader that
//! has lost its moment lets go of all of them ([`MomentView::let_go`]), so that their space is free.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use delta::Epoch;
use device::{Dir, Disk, Folder, FolderLock, Queue, StateFile, ThreadQueue};
use qcow2::{Image, Use};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, StatVfsMountFlags, flock, statat};
use rustix::io::Errno;
use uuid::Uuid;

use crate::error::{ReplicaError, Result, io_error};
use crate::journal::index::UndoIndex;
use crate::journal::{ARRIVING, WHOLE};
use crate::known::verdict::Verdict;
use crate::past::present::{Shown, Watched, share};
use crate::past::views::{self, Claim, HEAD, NAME, ReaderInfo, ReplicaReader, let_go, reach};
use crate::past::{self, Past};
use crate::replica::Replica;
use crate::state::destination::{Destination, FileDestination, Name};
use crate::state::lineage::Lineage;
use crate::state::locate::{DestinationKind, locate, state_folder};
use crate::state::options::ReplicaOptions;
use crate::state::role::now;

/// How long a commit under way is waited for.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long that goes on before it is looked whether it was killed.
const KILLED_AFTER: Duration = Duration::from_millis(500);
/// How often it is looked whether it has come to rest.
const LOOK_EVERY: Duration = Duration::from_micros(300);

/// A replica at a moment, read-only.
pub struct MomentView {
    path: PathBuf,
    shown: Shown,
    align: u32,
    /// When it began, in seconds since 1970.
    since: u64,
    log: Log,
    /// On a file system that is mounted read-only, what tells if it is written to all the same, and its number then.
    fixed: Option<(Watched, u64)>,
    /// `None` once it was let go.
    held: RwLock<Option<Held>>,
}

/// What is read.
struct Held {
    disk: Arc<dyn Disk>,
    /// What an earlier moment had instead.
    past: Option<UndoIndex>,
}

/// What came of an attempt.
enum Attempt {
    Made(Box<MomentView>),
    /// The destination is written to, or was just then.
    NotNow,
    /// The moment is not among those that can be reached.
    NoSuchMoment,
}

/// Opens the destination, and says which inode it is; 0 for a device.
type OpenRaw<'a> = dyn Fn() -> Result<(Arc<dyn Disk>, u64)> + 'a;

impl MomentView {
    /// Opens the replica at `path` as it is now, or as it was in this [state](crate::Moment::state). Takes no lock, unless a commit was
    /// killed, which is completed then. A commit under way is waited for.
    ///
    /// # Errors
    /// Refused if there is no replica, it is incomplete, was changed by others, or is a source itself; if there is no such
    /// moment; if a commit goes on for longer than two minutes.
    pub fn open(path: &Path, options: &ReplicaOptions, to: Option<Uuid>) -> Result<MomentView> {
        let (path, kind, folder) = locate(path, options)?;
        let device = is_shown_as_device(&path, kind, &folder)?;
        let dir = Dir::existing(&folder).map_err(io_error("open", &folder))?;
        let raw = || {
            let held = Dir::existing(path.parent().unwrap_or(Path::new("/")));
            let name = path.file_name().unwrap_or_default();
            let open = |dir: Dir| device::open_within(dir.held(), name, OFlags::RDONLY, Mode::empty());
            let file = held.and_then(|dir| Ok(open(dir)?)).map_err(io_error("open", &path))?;
            let inode = file.metadata().map_err(io_error("look at", &path))?.ino();
            if Lineage::load(&dir)?.is_some_and(|lineage| !lineage.format.is_raw()) {
                // Its tables only gain what was not there at the reader's moment, but for what is kept for it.
                let image = Image::open(file, &path, Use::ReadBesideWriter);
                return Ok((Arc::new(image.map_err(io_error("open", &path))?) as _, inode));
            }
            let reading = device::DiskOptions { write: false, direct: true, exclusive: false };
            Ok((device::adopt(file, &path, &reading)?, if device { 0 } else { inode }))
        };
        let (began, mut looked) = (Instant::now(), None::<Instant>);
        if is_doubtful(&path, device, &dir)? {
            // What another dsync has open, that one watches over.
            if let Some(busy) = rests(Replica::open(&path, options))? {
                if FolderLock::of(&dir).map_err(io_error("lock", &folder))?.is_ok() {
                    return Err(busy);
                }
            }
        }
        let fixed = options.scratch.as_deref().filter(|_| is_read_only(&dir));
        loop {
            match MomentView::attempt(&path, &dir, &raw, to, fixed)? {
                Attempt::Made(view) => return Ok(*view),
                Attempt::NotNow if fixed.is_some() => {
                    return Err(ReplicaError::Refused(format!(
                        "{} cannot be shown: its file system is mounted read-only, and what was begun on it is not complete: mount it for writing, \
                         and run \"dsync recover {0}\"",
                        path.display()
                    )));
                }
                Attempt::NoSuchMoment => {
                    return Err(ReplicaError::Refused(format!(
                        "{} cannot be shown as it was then: \"dsync rewind {0}\" lists the moments that it can",
                        path.display()
                    )));
                }
                Attempt::NotNow => {}
            }
            if looked.map_or(began, |looked| looked).elapsed() >= KILLED_AFTER {
                looked = Some(Instant::now());
                let rests = rests(Replica::open(&path, options));
                match rests {
                    Ok(Some(busy)) if began.elapsed() >= PATIENCE => return Err(busy),
                    Ok(None) if began.elapsed() >= PATIENCE => {
                        return Err(ReplicaError::Refused(format!(
                            "{} cannot be shown: what it holds could not be written to {}: free some space there",
                            path.display(),
                            folder.display()
                        )));
                    }
                    other => other.map(drop)?,
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Tries for a while to show a destination that rests now and then.
    #[cfg(test)]
    pub(crate) fn over(
        path: &Path,
        dir: &Dir,
        raw: &OpenRaw<'_>,
        to: Option<Uuid>,
    ) -> Result<Option<MomentView>> {
        match MomentView::attempt(path, dir, raw, to, None)? {
            Attempt::Made(view) => Ok(Some(*view)),
            Attempt::NotNow | Attempt::NoSuchMoment => Ok(None),
        }
    }

    /// `fixed`: where to keep what is needed, if nothing can be written beside the replica.
    fn attempt(
        path: &Path,
        dir: &Dir,
        raw: &OpenRaw<'_>,
        to: Option<Uuid>,
        fixed: Option<&Path>,
    ) -> Result<Attempt> {
        let failed = |e| io_error("read", dir.path())(e);
        let watched = if fixed.is_some() { Watched::open_fixed(dir) } else { Watched::open(dir) };
        let Some(watched) = watched.map_err(failed)? else { return Ok(Attempt::NotNow) };
        let looked = if fixed.is_some() { watched.look_back() } else { watched.look() };
        let Some((sequence, held)) = looked else { return Ok(Attempt::NotNow) };
        let refused = |why| ReplicaError::Refused(format!("{} cannot be shown: {why}", path.display()));
        let shown = held.map_err(refused)?;
        let (disk, inode) = raw()?;
        if inode != shown.inode {
            return Ok(Attempt::NotNow);
        }
        if fixed.is_some() && !is_at_rest(path, dir, &shown)? {
            return Ok(Attempt::NotNow);
        }
        let place = fixed.unwrap_or(dir.path());
        let log = match fixed {
            Some(place) => Dir::open(place).and_then(|place| Log::make(&place, &shown)),
            None => Log::make(dir, &shown),
        };
        let log = log.map_err(io_error("make a log in", place))?;
        if fixed.is_none() {
            watched.ask().map_err(failed)?;
        }
        if !watched.is_at(sequence) {
            return Ok(Attempt::NotNow);
        }
        let fixed = fixed.map(|_| (watched, sequence));
        let (align, held) = (disk.align(), RwLock::new(Some(Held { disk, past: None })));
        let view = MomentView { path: path.to_path_buf(), shown, align, since: now(), log, fixed, held };
        let made = match to.filter(|to| *to != view.shown.state) {
            Some(to) => view.go_back(dir, to)?,
            None => Attempt::Made(Box::new(view)),
        };
        if let Attempt::Made(view) = &made {
            view.tell(0);
        }
        Ok(made)
    }

    /// Goes back to an earlier state.
    fn go_back(mut self, dir: &Dir, to: Uuid) -> Result<Attempt> {
        let past = Past::load(dir, self.shown.state).map_err(io_error("look into", dir.path()))?;
        let undos = past.path(to);
        // A log has each block as it was when the log began: the states within are not whole.
        let Some(last) = undos.last().filter(|undo| undo.start == 0) else {
            return Ok(Attempt::NoSuchMoment);
        };
        let mut index = UndoIndex::default();
        for undo in &undos {
            let file = match dir.open(&undo.name, false) {
                // It was folded just now.
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Attempt::NotNow),
                opened => opened.map_err(io_error("open", &dir.path().join(&undo.name)))?,
            };
            let number = index.file(file.into());
            index.take(number, undo.start).map_err(|e| ReplicaError::Damaged {
                path: dir.path().join(&undo.name),
                why: e.to_string(),
                way_out: "no moment behind it can be shown: choose a later one".into(),
            })?;
        }
        let Some(header) = past::header_of(dir, last).map(|(header, _)| header) else {
            return Ok(Attempt::NotNow);
        };
        let Some(epoch) = header.to().copied() else { return Ok(Attempt::NoSuchMoment) };
        let (at, size, fuzzy) = (Some(last.at), header.size_after, header.fuzzy);
        self.shown = Shown { epoch, at, fuzzy, ahead: last.kind.is_batch(), state: to, ..self.shown };
        if let Some(held) = self.held.get_mut().unwrap_or_else(PoisonError::into_inner) {
            held.past = Some(index);
        }
        self.log.size = self.shown.size;
        self.shown.size = size;
        Ok(Attempt::Made(Box::new(self)))
    }

    /// The path of the replica, without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of the replica's state.
    pub fn folder(&self) -> &Path {
        self.log.folder.path()
    }

    /// The epoch of the source that it shows.
    pub fn epoch(&self) -> Epoch {
        self.shown.epoch
    }

    #[cfg(test)]
    pub(crate) fn state(&self) -> Uuid {
        self.shown.state
    }

    /// True for a moment after that epoch, to which batches of a mirror have brought the replica.
    pub fn is_ahead(&self) -> bool {
        self.shown.ahead
    }

    /// True if it was copied from a live disk without a cut.
    pub fn is_fuzzy(&self) -> bool {
        self.shown.fuzzy
    }

    /// True if it is from before a verification found what differed, and may hold that.
    pub fn is_doubted(&self) -> bool {
        Verdict::in_state(&self.log.folder, self.shown.epoch.number, self.shown.state).is_some()
    }

    /// When the replica came to this, in seconds since 1970; `None` if that is not known.
    pub fn at(&self) -> Option<u64> {
        self.shown.at
    }

    /// Why it can be read no more; `None` while it can.
    pub fn lost(&self) -> Option<String> {
        if self.fixed.as_ref().is_some_and(|(watched, sequence)| !watched.is_at(*sequence)) {
            return Some("its file system was mounted for writing, and written to".into());
        }
        reach(&self.log.file).err()
    }

    fn lost_error(&self, why: &str) -> io::Error {
        io::Error::other(format!("the moment of {} that is read is lost: {why}", self.path.display()))
    }

    /// The log, with all that was kept before what was read last could be overwritten.
    fn kept(&self) -> io::Result<RwLockReadGuard<'_, UndoIndex>> {
        let end = reach(&self.log.file).map_err(|why| self.lost_error(&why))?;
        if self.log.taken.load(SeqCst) < end {
            self.log.take(end).map_err(|e| self.lost_error(&format!("its log is damaged: {e}")))?;
        }
        Ok(self.log.index.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Says what it reads, for `dsync status` and `dsync promote`, and how many bytes its scratch file takes. Where that cannot be said, nobody
    /// misses it but people.
    pub fn tell(&self, scratch: u64) {
        let Shown { epoch, ahead, at, .. } = self.shown;
        let about = ReaderInfo { process: std::process::id(), since: self.since, epoch, ahead, at, scratch };
        let _ = about.tell(&self.log.file);
    }

    /// Lets go of all that it holds, once it is lost: the destination's file, which may have been replaced, and undo deltas, which may have
    /// been dropped. Waits for reads under way. A commit that needs room waits for this: what else was held for the reader must have been let go
    /// before.
    pub fn let_go(&self) {
        *self.held.write().unwrap_or_else(PoisonError::into_inner) = None;
        let _ = let_go(&self.log.file);
    }

    fn held(&self) -> RwLockReadGuard<'_, Option<Held>> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error where nothing is held any more.
    fn gone(&self) -> io::Error {
        self.lost_error(&self.lost().unwrap_or_else(|| "it was let go".into()))
    }

    /// Reads what the replica had when the reader began.
    fn read_present(&self, disk: &dyn Disk, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let read = disk.read_at(offset, buf);
        let mut kept = self.kept()?;
        if let Err(error) = read {
            // It was cut off since, or a part cannot be read: that does not matter where it was kept.
            let missing = kept.missing(offset..offset + buf.len() as u64);
            drop(kept);
            for part in missing {
                let within = (part.start - offset) as usize..(part.end - offset) as usize;
                if within.len() == buf.len() {
                    return Err(error);
                }
                disk.read_at(part.start, &mut buf[within])?;
            }
            kept = self.kept()?;
        }
        let read = kept.read(offset, buf);
        // What was lost meanwhile may have been cut off while it was read.
        self.lost().map_or(read, |why| Err(self.lost_error(&why)))
    }
}

/// Who reads the replica at `path` at a moment, as [`MomentView`] does. Takes no lock and changes nothing.
///
/// # Errors
/// If its state cannot be read.
pub fn readers(path: &Path, options: &ReplicaOptions) -> Result<Vec<ReplicaReader>> {
    let folder = state_folder(path, options)?;
    views::readers(&folder).map_err(io_error("look into", &folder))
}

/// True if nothing can be written beside a replica.
fn is_read_only(dir: &Dir) -> bool {
    rustix::fs::fstatvfs(dir.held()).is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// True if a destination holds what it is said to hold, also after a power cut: its lineage says the same, and nothing was begun since.
fn is_at_rest(path: &Path, dir: &Dir, shown: &Shown) -> Result<bool> {
    let Some(lineage) = Lineage::load(dir)? else { return Ok(false) };
    let is_begun =
        lineage.step.is_some() || [ARRIVING, WHOLE].iter().any(|name| dir.open(name, false).is_ok());
    let agrees = lineage.nonce == shown.state && lineage.unsure.is_nothing() && !is_begun;
    Ok(agrees && (shown.inode == 0 || !is_doubtful(path, false, dir)?))
}

/// True for a device, false for a file; refused if it cannot be shown.
fn is_shown_as_device(path: &Path, kind: Option<DestinationKind>, folder: &Path) -> Result<bool> {
    match kind {
        None if folder.is_dir() => Err(ReplicaError::Away(format!(
            "replica {} no longer exists: it was removed, or its file system was unmounted",
            path.display()
        ))),
        Some(DestinationKind::Export) => Err(ReplicaError::Refused(format!(
            "{} is behind an NBD server, and is shown by that: dsync serves replicas in files and on devices only",
            path.display()
        ))),
        Some(kind @ (DestinationKind::File | DestinationKind::Device)) if folder.is_dir() => {
            Ok(kind == DestinationKind::Device)
        }
        _ => Err(ReplicaError::NotAReplica(path.to_path_buf())),
    }
}

/// True if another program may have written to the destination since dsync left it alone, or the file does not tell. Of a device
/// only its opening tells.
fn is_doubtful(path: &Path, device: bool, dir: &Dir) -> Result<bool> {
    if device {
        return Ok(true);
    }
    let Some(lineage) = Lineage::load(dir)? else {
        return Err(ReplicaError::NotAReplica(path.to_path_buf()));
    };
    let failed = |e| io_error("look at", path)(e);
    let now = FileDestination::new(path.to_path_buf(), lineage.format)
        .and_then(|file| file.stamp(Name::Final))
        .map_err(failed)?;
    // Its group may have committed what is not merged yet.
    if lineage.group.is_some() && dir.open(ARRIVING, false).is_ok() {
        return Ok(true);
    }
    Ok(match (&lineage.stamp, now) {
        (Some(left), Some(now)) => left.differs(&now).is_some(),
        _ => true,
    })
}

/// Completes what was interrupted, and has it said what the replica holds. Returns the error of one that is in use.
fn rests(opened: Result<Replica>) -> Result<Option<ReplicaError>> {
    match opened {
        Ok(replica) => replica.showable().map(|()| None),
        Err(busy @ ReplicaError::Busy { .. }) => Ok(Some(busy)),
        Err(error) => Err(error),
    }
}

/// What was kept for this reader.
struct Log {
    name: String,
    folder: Dir,
    /// Locked as long as the reader lives.
    file: File,
    /// Bytes of the disk at its moment.
    size: u64,
    /// Bytes of the log that are in the index.
    taken: AtomicU64,
    index: RwLock<UndoIndex>,
}

impl Log {
    /// Makes a log with its claim.
    fn make(folder: &Dir, shown: &Shown) -> io::Result<Log> {
        // Whoever may remove the log could keep this going.
        for _ in 0..100 {
            let name = format!("{NAME}{}", Uuid::new_v4().simple());
            let file = folder.file(&name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, 0o600)?;
            share(&file, folder)?;
            let mut log = Log {
                name,
                folder: folder.clone(),
                file,
                size: shown.size,
                taken: AtomicU64::new(HEAD),
                index: RwLock::default(),
            };
            match flock(&log.file, FlockOperation::NonBlockingLockExclusive) {
                // Somebody looks whether its reader is gone.
                Err(Errno::WOULDBLOCK) => continue,
                locked => locked?,
            }
            let ours = log.file.metadata()?;
            let here = statat(folder.held(), &log.name, AtFlags::SYMLINK_NOFOLLOW);
            if !here.is_ok_and(|here| (here.st_dev, here.st_ino) == (ours.dev(), ours.ino())) {
                continue;
            }
            let file: Arc<dyn StateFile> = Folder::open(folder, &log.name, false)?.into();
            log.index.get_mut().unwrap_or_else(PoisonError::into_inner).file(file);
            let claim = Claim { shown: shown.clone(), process: std::process::id() };
            log.file.write_all_at(&claim.head()?, 0)?;
            return Ok(log);
        }
        Err(io::Error::other("another process removes it again and again"))
    }

    /// Takes what was appended, up to this byte.
    fn take(&self, end: u64) -> io::Result<()> {
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        let mut taken = self.taken.load(SeqCst);
        while taken < end {
            taken = index.take(0, taken)?;
        }
        self.taken.store(taken, SeqCst);
        Ok(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let _ = self.folder.remove(&self.name);
    }
}

impl Disk for MomentView {
    fn len(&self) -> u64 {
        self.shown.size
    }

    fn align(&self) -> u32 {
        self.align
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.len()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let present = self.log.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        let (there, beyond) = buf.split_at_mut(present);
        beyond.fill(0);
        let held = self.held();
        let held = held.as_ref().ok_or_else(|| self.gone())?;
        if !there.is_empty() {
            self.read_present(&*held.disk, offset, there)?;
        }
        held.past.as_ref().map_or(Ok(()), |past| past.read(offset, buf))
    }

    fn read_only(&self) -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, "a moment of a replica is read-only")
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// The destination is asked before what was kept: a hole that is filled or made in between was kept before.
    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let held = self.held();
        let held = held.as_ref().ok_or_else(|| self.gone())?;
        let raw = held.disk.allocated(from.min(held.disk.len()))?;
        let kept = self.kept()?.next(from);
        let past = held.past.as_ref().and_then(|past| past.next(from));
        // Overlapping runs are returned as one, up to the end of the first: the next call finds the rest.
        let first = [raw, kept, past].into_iter().flatten().map(|run| run.start.max(from)..run.end);
        let first = first.filter(|run| run.start < run.end).min_by_key(|run| run.start);
        let size = self.len();
        Ok(first.map(|run| run.start..run.end.min(size)).filter(|run| !run.is_empty()))
    }

    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(ThreadQueue::new(Arc::new(move |request| request.run(&*self)), depth)?))
    }
}
