//! The replicas that this host has, as far as that is written down: those on devices have their state in one folder, and the others
//! are in a list, because their state is beside them. For looking only: nothing here takes a lock, and a sync may go on meanwhile.
//!
//! The list is `known-replicas` of the state directory. `status --check` judges replicas from what is written down: one that is opened is
//! locked, and refuses a sync. What never began is written down nowhere but in the job that is to make it: so it reads the jobs, too, and looks for
//! each of their copies among the bookmarks (`dsync/src/status/job_copies.rs`). How the runs of a job ended is kept in `STATE/jobs`: of a replica
//! that this host fetches, the other host may be gone, and of a job that is refused, nothing else is left.

pub(crate) mod origin;
pub(crate) mod verdict;

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use device::{Dir, Folder, FolderLock};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::error::{ReplicaError, Result, io_error};
use crate::journal::WHOLE;
use crate::known::verdict::Verdict;
use crate::past::views::{self, ReplicaReader};
use crate::past::{self, GivenUpPast, PastSettings};
use crate::replica::Replica;
use crate::state::destination::{Destination, FileDestination, Name};
use crate::state::lineage::{self, Lineage, State, StepKind, Unsure};
use crate::state::locate::folder_beside;
use crate::state::note::{self, Foreign};
use crate::state::role::Role;

/// The replicas that this host has.
#[derive(Debug, Clone)]
pub struct KnownReplicas {
    /// One file a replica, so that two syncs that end at once do not overwrite each other's entry.
    list: PathBuf,
    devices: PathBuf,
}

/// An entry of the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    path: PathBuf,
    /// The folder of its state.
    folder: PathBuf,
}

impl Entry {
    /// The name of its file.
    fn name(&self) -> String {
        format!("{:016x}", twox_hash::XxHash3_64::oneshot(self.folder.as_os_str().as_encoded_bytes()))
    }
}

/// A replica of this host.
#[derive(Debug)]
pub struct KnownReplica {
    /// Where it is, or was.
    pub path: PathBuf,
    /// What is written down of it; `None` if that is gone.
    pub lineage: Option<Lineage>,
    /// What that amounts to.
    pub condition: Condition,
    /// When that was last written, in nanoseconds since 1970: with the last commit of an epoch, or since.
    pub written: Option<u64>,
    /// How old it is, and what was kept.
    pub past: KnownPast,
    /// Who reads it at a moment, as far as that can be looked at.
    pub readers: Vec<ReplicaReader>,
}

/// How old a replica is, and what was kept of it before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownPast {
    /// When it came to what it holds, in seconds since 1970: its content is no newer.
    pub at: Option<u64>,
    /// It was brought back to that, and no sync has come since.
    pub rewound: bool,
    /// A past that is asked for was given up, and when and why that was last.
    pub given_up: Option<GivenUpPast>,
    /// The time of a moment that was dropped for want of room, in seconds since 1970, as long as it would be kept otherwise.
    pub lacks: Option<u64>,
    /// Nothing of it is kept.
    pub is_empty: bool,
    /// A verification found that it differed from its source.
    pub verdict: Option<Verdict>,
    /// Where its source is, `HOST:PATH`, if that has said so.
    pub origin: Option<String>,
}

impl KnownPast {
    fn of(dir: &Dir, lineage: &Lineage) -> KnownPast {
        // Damaged settings are reported by the next sync, which fails.
        let settings = PastSettings::load(dir).unwrap_or_default();
        let rewound = settings.as_ref().and_then(|settings| settings.rewound);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        KnownPast {
            lacks: settings.as_ref().and_then(|settings| past::lacks(dir, lineage.nonce, settings, now)),
            at: lineage.epoch.and_then(|_| past::since(dir, lineage, settings.as_ref())),
            rewound: rewound.is_some_and(|(state, _)| state == lineage.nonce),
            given_up: settings.and_then(|settings| settings.given_up),
            is_empty: past::is_empty(dir),
            verdict: Verdict::standing(dir).filter(|_| lineage.role.promoted.is_none()),
            origin: origin::place(dir, lineage.source),
        }
    }
}

/// How a replica is. The first that applies, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Its state cannot be read, for this reason.
    Unreadable(String),
    /// Its file or its disk is gone, or its state with it.
    Missing,
    /// Its file or its disk is there, and its state is not where it was.
    Stateless(PathBuf),
    /// It was made the source itself.
    Promoted,
    /// Others have changed it since its last commit, in this way.
    Changed(String),
    /// What has arrived for it is whole, and may be half merged: the process that merged it is gone. The next command completes it.
    Interrupted,
    /// A first copy or a commit in place has not ended, or parts of the source could not be read.
    Incomplete,
    /// It was copied from a disk in use, without a freeze.
    Fuzzy,
    /// It is one moment of its source.
    Exact,
}

impl KnownReplicas {
    /// The replicas in the folder `list`, and those on devices, with folders in [`ReplicaOptions::devices`](crate::ReplicaOptions::devices).
    pub fn new(list: PathBuf, devices: PathBuf) -> KnownReplicas {
        KnownReplicas { list, devices }
    }

    /// Adds a replica, if it is not among them.
    ///
    /// # Errors
    /// If the list cannot be written.
    pub fn add(&self, replica: &Replica) -> io::Result<()> {
        let folder = std::fs::canonicalize(replica.folder())?;
        if folder.parent() == std::fs::canonicalize(&self.devices).ok().as_deref() {
            return Ok(());
        }
        let entry = Entry { path: replica.path().to_path_buf(), folder };
        if read(&self.list.join(entry.name())).is_some_and(|known| known == entry) {
            return Ok(());
        }
        device::replace(&Dir::open(&self.list)?, &entry.name(), &serde_json::to_vec_pretty(&entry)?)
    }

    /// Removes the entry of the replica at `path`. Returns whether there was one.
    ///
    /// # Errors
    /// If the list cannot be read or written.
    pub fn remove(&self, path: &Path) -> io::Result<bool> {
        let entries = self.entries()?;
        let mut named = entries.iter().filter(|entry| entry.path == path).peekable();
        let found = named.peek().is_some();
        if !found {
            return Ok(false);
        }
        let list = Dir::existing(&self.list)?;
        // Another process may forget it as well.
        named.try_for_each(|entry| list.remove(&entry.name()))?;
        Ok(true)
    }

    /// True if the replica at `path` is in the list.
    ///
    /// # Errors
    /// If the list cannot be read.
    pub fn lists(&self, path: &Path) -> io::Result<bool> {
        Ok(self.entries()?.iter().any(|entry| entry.path == path))
    }

    /// Where the state of the replica at `path` is, if it is in the list and still has its state there.
    ///
    /// # Errors
    /// If the list cannot be read.
    pub fn folder_of(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        let mut entries = self.entries()?.into_iter().filter(|entry| entry.path == path);
        Ok(entries.find(|entry| entry.folder.is_dir()).map(|entry| entry.folder))
    }

    /// The replicas in the list that are the file at `path` and whose state is not in the folder beside that: by this name or, if the file has
    /// several, by another. Their paths, and the folders of their state.
    ///
    /// # Errors
    /// If the list cannot be read.
    pub fn of_file(&self, path: &Path) -> io::Result<Vec<(PathBuf, PathBuf)>> {
        use std::os::unix::fs::MetadataExt;
        let Ok(at) = std::fs::canonicalize(path) else { return Ok(Vec::new()) };
        // Others are not looked at: their file system may be away, and hang.
        let linked = std::fs::metadata(&at).ok().filter(|file| file.is_file() && file.nlink() > 1);
        let is_same = |other: &Path| {
            let file = linked.as_ref().zip(std::fs::metadata(other).ok());
            file.is_some_and(|(one, other)| (one.dev(), one.ino()) == (other.dev(), other.ino()))
        };
        let mut entries = self.entries()?;
        let usual = folder_beside(&at);
        entries.retain(|entry| entry.folder != usual && (entry.path == at || is_same(&entry.path)));
        // Another disk may have the name of a device.
        let lineage = |entry: &Entry| Lineage::load(&Dir::existing(&entry.folder).ok()?).ok()?;
        let is_another = |entry: &Entry| {
            lineage(entry).and_then(|lineage| lineage.disk).is_some_and(|disk| !is_disk(&at, &disk))
        };
        entries.retain(|entry| !is_another(entry));
        Ok(entries.into_iter().map(|entry| (entry.path, entry.folder)).collect())
    }

    /// The folder of the state of a replica on a device that is away, or of one whose state cannot be read, by the path that [`KnownReplica`] has.
    ///
    /// # Errors
    /// If the folder for devices cannot be read.
    pub fn away(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        Ok(files(&self.devices)?.into_iter().find(|folder| {
            let known = KnownReplica::at(folder, None);
            let is_away = known.condition == Condition::Missing && known.lineage.is_some();
            known.path == path && (is_away || matches!(known.condition, Condition::Unreadable(_)))
        }))
    }

    /// Forgets a replica of which only the state is there, in this folder.
    ///
    /// # Errors
    /// `Busy` if a command is at work on it; if the folder cannot be removed.
    pub fn forget_state(folder: &Path) -> Result<()> {
        let failed = |e| io_error("remove", folder)(e);
        let _lock = FolderLock::take(folder)
            .map_err(failed)?
            .map_err(|holder| ReplicaError::Busy { path: folder.to_path_buf(), holder })?;
        // First what makes it a replica: what is left after a crash belongs to nothing.
        let dir = Dir::existing(folder).map_err(failed)?;
        dir.remove(lineage::NAME).and_then(|()| dir.sync()).map_err(failed)?;
        std::fs::remove_dir_all(folder).map_err(failed)
    }

    fn entries(&self) -> io::Result<Vec<Entry>> {
        // One that has another name yet is being written, or what a process that was killed has left.
        let named =
            |entry: &Entry, file: &Path| file.file_name().is_some_and(|name| name == entry.name().as_str());
        let read = |file: &PathBuf| read(file).filter(|entry| named(entry, file));
        Ok(files(&self.list)?.iter().filter_map(read).collect())
    }

    /// All of them, sorted by path.
    ///
    /// # Errors
    /// If the list, or the folder for devices, cannot be read.
    pub fn all(&self) -> io::Result<Vec<KnownReplica>> {
        let listed = self.entries()?.into_iter();
        let mut all: Vec<KnownReplica> =
            listed.map(|entry| KnownReplica::at(&entry.folder, Some(entry.path))).collect();
        for folder in files(&self.devices)? {
            let replica = KnownReplica::at(&folder, None);
            // Without a lineage it belongs to nothing: the first copy was refused, or ended before it wrote anything.
            if matches!(replica.condition, Condition::Unreadable(_)) || replica.lineage.is_some() {
                all.push(replica);
            }
        }
        all.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(all)
    }
}

/// The entries of a folder, which need not exist.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Bytes of an entry that are read.
const MOST: u64 = 1 << 20;

/// An entry; `None` for what is none, such as one that was cut off while it was written.
fn read(file: &Path) -> Option<Entry> {
    let (folder, name) = (Dir::existing(file.parent()?).ok()?, file.file_name()?.to_str()?);
    let mut bytes = Vec::new();
    folder.file(name, OFlags::RDONLY, 0).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

impl KnownReplica {
    /// True if it was made the source itself.
    pub fn is_source(&self) -> bool {
        self.condition == Condition::Promoted
    }

    /// The replica whose state is in `folder`; `path` is where it was when it was listed.
    fn at(folder: &Path, path: Option<PathBuf>) -> KnownReplica {
        let dir = match Dir::existing(folder) {
            Ok(dir) => Ok(Some(dir)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io_error("open", folder)(e)),
        };
        let has_folder = matches!(dir, Ok(Some(_)));
        let written = dir.as_ref().ok().and_then(|dir| dir.as_ref()?.modified(lineage::NAME));
        let mut past = KnownPast::default();
        let lineage = dir.and_then(|dir| {
            let Some(dir) = dir else { return Ok(None) };
            let lineage = Lineage::load(&dir)?;
            past = lineage.as_ref().map(|lineage| KnownPast::of(&dir, lineage)).unwrap_or_default();
            Ok(lineage)
        });
        let otherwise = || path.clone().unwrap_or_else(|| folder.to_path_buf());
        let (path, condition) = match &lineage {
            Err(error) => (otherwise(), Condition::Unreadable(error.to_string())),
            Ok(None) => match path.as_ref().filter(|path| device::is_there(path)) {
                Some(path) => (path.clone(), Condition::Stateless(folder.to_path_buf())),
                // The first attempt ended before anything was made.
                None if has_folder => (otherwise(), Condition::Incomplete),
                None => (otherwise(), Condition::Missing),
            },
            Ok(Some(lineage)) => {
                let path = if lineage.path.as_os_str().is_empty() { otherwise() } else { present(lineage) };
                let condition = condition(folder, &path, lineage)
                    .unwrap_or_else(|error| Condition::Unreadable(error.to_string()));
                (path, condition)
            }
        };
        let readers = views::readers(folder).unwrap_or_default();
        KnownReplica { path, lineage: lineage.unwrap_or_default(), condition, written, past, readers }
    }
}

fn condition(folder: &Path, path: &Path, lineage: &Lineage) -> Result<Condition> {
    let step = lineage.step.as_ref().map(|step| step.kind);
    let begun = matches!(step, Some(StepKind::NewFile { .. }));
    Ok(match lineage {
        _ if !begun && !is_there(path, lineage) => Condition::Missing,
        Lineage { role: Role { promoted: Some(_), .. }, .. } => Condition::Promoted,
        Lineage { unsure: Unsure::Everything, .. } => Condition::Changed(Foreign::Written.to_string()),
        _ => match (changed(folder, path)?, lineage.state) {
            (Some(why), _) => Condition::Changed(why.to_string()),
            (None, _) if step == Some(StepKind::InPlace) => Condition::Incomplete,
            (None, _) if is_interrupted(folder) => Condition::Interrupted,
            (None, State::Incomplete) => Condition::Incomplete,
            (None, State::Fuzzy) => Condition::Fuzzy,
            (None, State::Exact) => Condition::Exact,
        },
    })
}

/// True if a journal waits to be merged, and nobody is at work.
fn is_interrupted(folder: &Path) -> bool {
    let waits = || {
        let found = Dir::existing(folder).and_then(|dir| dir.file(WHOLE, OFlags::RDONLY, 0)?.metadata());
        found.is_ok_and(|found| found.len() > 0)
    };
    // One that ends meanwhile has merged it.
    waits() && !FolderLock::is_held(folder) && waits()
}

/// True if the disk or the file at `path` is the replica's.
fn is_there(path: &Path, lineage: &Lineage) -> bool {
    match &lineage.disk {
        Some(disk) => is_disk(path, disk),
        None => device::is_there(path),
    }
}

fn is_disk(path: &Path, disk: &str) -> bool {
    device::identity(path).is_ok_and(|it| it.is_block() && device::disk_id(it.dev).as_deref() == Some(disk))
}

/// Where a replica is now: the kernel may have given its disk another name.
fn present(lineage: &Lineage) -> PathBuf {
    let Some(disk) = lineage.disk.as_ref().filter(|disk| !is_disk(&lineage.path, disk)) else {
        return lineage.path.clone();
    };
    let devices = files(Path::new("/sys/class/block")).unwrap_or_default();
    let mut named = devices.iter().filter_map(|at| Some(Path::new("/dev").join(at.file_name()?)));
    named.find(|path| is_disk(path, disk)).unwrap_or_else(|| lineage.path.clone())
}

/// In what way others have changed the file of a replica since dsync left it, as far as that is certain without holding it.
/// A device cannot be looked at while a sync has it open: of that, the lineage says what was noticed.
///
/// # Errors
/// If the state or the file cannot be read.
pub(crate) fn changed(folder: &Path, path: &Path) -> Result<Option<Foreign>> {
    let dir = Dir::existing(folder).map_err(io_error("open", folder))?;
    let seen = || -> Result<_> {
        let note = note::read(&dir).map_err(io_error("read", &folder.join(note::NAME)))?;
        Ok((Lineage::load(&dir)?, note.map(|(note, _)| note), dir.open(WHOLE, false).is_ok()))
    };
    let before = seen()?;
    let (Some(lineage), noted, merging) = &before else { return Ok(None) };
    let Some(stamp) = lineage.stamp.as_ref().filter(|stamp| stamp.inode != 0 && lineage.step.is_none())
    else {
        return Ok(None);
    };
    let file = match FileDestination::new(path.to_path_buf(), lineage.format) {
        Ok(file) => file,
        Err(e) => return Err(io_error("open the folder of", path)(e)),
    };
    let left = match noted {
        // At work, or of an earlier boot: the next command that opens the replica can tell.
        Some(note) => {
            note.stamp.as_ref().filter(|_| Destination::boot(&file).life(&note.life) == device::Life::This)
        }
        None if *merging => None,
        None => Some(stamp),
    };
    let (Some(left), Some(now)) = (left, file.stamp(Name::Final).map_err(io_error("look at", path))?) else {
        return Ok(None);
    };
    let Some(why) = left.differs(&now) else { return Ok(None) };
    // The next command that opens the replica takes it for what it was.
    if noted.is_none() && left.differs_in_attributes(&now) && file.times_writes() {
        return Ok(None);
    }
    // A commit that came between the two looks has changed it.
    Ok(Some(why).filter(|_| seen().is_ok_and(|after| after == before)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_that_is_being_written_is_none_yet() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("vm.raw");
        let known = KnownReplicas::new(temp.path().join("list"), temp.path().join("devices"));
        let entry = Entry { path: path.clone(), folder: temp.path().join(".vm.raw.dsync") };
        let (list, text) = (Dir::open(&known.list).unwrap(), serde_json::to_vec(&entry).unwrap());
        // As one that was killed leaves it.
        std::fs::write(known.list.join(device::reserved(&entry.name())), &text).unwrap();
        assert!(!known.lists(&path).unwrap() && known.all().unwrap().is_empty());
        assert!(!known.remove(&path).unwrap());
        device::replace(&list, &entry.name(), &text).unwrap();
        std::fs::write(known.list.join(device::reserved(&entry.name())), &text).unwrap();
        assert_eq!(known.all().unwrap().len(), 1);
        assert!(known.remove(&path).unwrap());
        assert!(known.all().unwrap().is_empty());
    }
}
