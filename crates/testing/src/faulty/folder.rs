//! A folder that fails.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use device::{Dir, Disk, Folder, Mapping, RamDisk, StateFile};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::{Keep, Member, Power, SECTOR, is_cut, lock, no_space};
use crate::Random;

/// A real folder while the [`Power`] is on; remembers what was not synced, and can run full.
///
/// A new file's name is durable only once the folder is synced, and a file's sync does nothing for it: less than most file
/// systems promise, and all that POSIX does. [`FaultyFolder::syncing_links`] is the friendlier kind.
///
/// Changes made to the folder by other means go unnoticed. Syncs do not reach the real disk, so runs are fast.
#[derive(Clone)]
pub struct FaultyFolder {
    power: Power,
    core: Arc<Core>,
}

struct Core {
    path: PathBuf,
    sync_links: bool,
    entries: Mutex<Entries>,
}

/// Files by a number of their own, as inodes: names come and go.
type Id = u64;

#[derive(Default)]
struct Entries {
    files: HashMap<Id, Arc<Content>>,
    names: BTreeMap<String, Id>,
    durable: BTreeMap<String, Id>,
    /// Changes of names since the folder was last synced.
    unsynced: Vec<Change>,
    /// Bytes by which the files may still grow.
    room: Option<u64>,
}

#[derive(Clone)]
enum Change {
    Create { name: String, id: Id },
    Rename { from: String, to: String, id: Id },
    Remove { name: String },
}

impl Change {
    fn apply(&self, names: &mut BTreeMap<String, Id>) {
        match self {
            Change::Create { name, id } => {
                names.insert(name.clone(), *id);
            }
            Change::Rename { from, to, id } => {
                if names.get(from) == Some(id) {
                    names.remove(from);
                }
                names.insert(to.clone(), *id);
            }
            Change::Remove { name } => {
                names.remove(name);
            }
        }
    }

    /// True if this is what gave the file its name.
    fn names(&self, wanted: Id) -> bool {
        matches!(self, Change::Create { id, .. } | Change::Rename { id, .. } if *id == wanted)
    }
}

struct Content {
    file: File,
    state: Mutex<FileState>,
    /// Bytes that take space, for a folder that runs full.
    used: AtomicU64,
}

struct FileState {
    /// The content as of the last sync.
    durable: RamDisk,
    /// What was written since, in bytes.
    changed: Vec<Range<u64>>,
    /// Stores to a mapping leave no trace: everything may have changed.
    mapped: bool,
    /// What a mapped file held when the power was cut.
    at_cut: Option<RamDisk>,
    /// What a mapped file held when writing it back failed. Pages that are still so count as clean: they are not written.
    failed: Option<RamDisk>,
    /// The failure was not told yet.
    untold: bool,
}

impl FaultyFolder {
    /// Hangs the folder at `path` on the switch; makes it if it is missing. What it holds now counts as durable.
    pub fn new(power: &Power, path: &Path) -> io::Result<FaultyFolder> {
        Self::open(power, path, false)
    }

    /// Hangs the folder on the switch as [`FaultyFolder::new`] does, but syncing a file makes its name durable too, as ext4, XFS and Btrfs do.
    pub fn syncing_links(power: &Power, path: &Path) -> io::Result<FaultyFolder> {
        Self::open(power, path, true)
    }

    fn open(power: &Power, path: &Path, sync_links: bool) -> io::Result<FaultyFolder> {
        let dir = Dir::open(path)?;
        let mut entries = Entries::default();
        for name in dir.list()? {
            if path.join(&name).symlink_metadata()?.is_file() {
                entries.find(path, &name)?;
            }
        }
        let core = Arc::new(Core { path: path.into(), sync_links, entries: Mutex::new(entries) });
        power.join(Arc::clone(&core) as _);
        Ok(FaultyFolder { power: power.clone(), core })
    }

    /// After its files have grown by this many more bytes, growing them fails with ENOSPC.
    pub fn full_after(&self, bytes: u64) {
        lock(&self.core.entries).room = Some(bytes);
    }

    /// Lets the system's own writing back of mapped files fail, once: the next sync of each fails, and later ones succeed
    /// without writing what has not changed since.
    pub fn fail_write_back(&self) -> io::Result<()> {
        lock(&self.core.entries).files.values().try_for_each(|content| {
            let state = &mut *lock(&content.state);
            if state.mapped {
                state.failed = Some(content.now()?);
                state.untold = true;
            }
            Ok(())
        })
    }

    /// Drops from memory what could not be written back and counts as clean: it reads as the disk has it.
    pub fn reclaim(&self) -> io::Result<()> {
        lock(&self.core.entries).files.values().try_for_each(|content| {
            let state = &*lock(&content.state);
            let Some(failed) = &state.failed else { return Ok(()) };
            for page in pages(content.file.metadata()?.len()) {
                let [mut now, mut then, mut durable] =
                    [(); 3].map(|()| vec![0; (page.end - page.start) as usize]);
                content.file.read_exact_at(&mut now, page.start)?;
                read_padded(failed, page.start, &mut then)?;
                read_padded(&state.durable, page.start, &mut durable)?;
                if now == then {
                    content.file.write_all_at(&durable, page.start)?;
                }
            }
            Ok(())
        })
    }

    /// Removes the limit.
    pub fn heal(&self) {
        lock(&self.core.entries).room = None;
    }
}

impl Entries {
    /// The file of that name, one found on the disk included.
    fn find(&mut self, folder: &Path, name: &str) -> io::Result<Id> {
        if let Some(id) = self.names.get(name) {
            return Ok(*id);
        }
        let file = File::options().read(true).write(true).open(folder.join(name))?;
        let content = Content::new(file);
        {
            let state = &mut *lock(&content.state);
            let len = content.file.metadata()?.len();
            state.durable.resize(len)?;
            copy_data(&content.file, 0..len, &state.durable)?;
            content.used.store(len, SeqCst);
        }
        let id = self.add(content);
        self.names.insert(name.into(), id);
        self.durable.insert(name.into(), id);
        Ok(id)
    }

    fn add(&mut self, content: Content) -> Id {
        let id = self.files.keys().max().map_or(1, |last| last + 1);
        self.files.insert(id, Arc::new(content));
        id
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.names);
        self.unsynced.push(change);
    }

    /// Takes `bytes` of what room there is.
    fn take(&mut self, folder: &Path, bytes: u64) -> io::Result<()> {
        if let Some(room) = &mut self.room {
            *room = room.checked_sub(bytes).ok_or_else(|| no_space(folder))?;
        }
        Ok(())
    }
}

impl Folder for FaultyFolder {
    fn open(&self, name: &str, create: bool) -> io::Result<Box<dyn StateFile>> {
        let found = {
            let _look = self.power.look()?;
            lock(&self.core.entries).find(&self.core.path, name)
        };
        let missing = matches!(&found, Err(e) if create && e.kind() == io::ErrorKind::NotFound);
        // A step begins with nothing locked: it may be the cut, which locks everything.
        let _step = if missing { self.power.step()? } else { self.power.look()? };
        let entries = &mut *lock(&self.core.entries);
        let id = if missing && !entries.names.contains_key(name) {
            let path = self.core.path.join(name);
            let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
            let id = entries.add(Content::new(file));
            entries.change(Change::Create { name: name.into(), id });
            id
        } else if missing {
            entries.find(&self.core.path, name)?
        } else {
            found?
        };
        let content = Arc::clone(&entries.files[&id]);
        Ok(Box::new(FaultyFile { power: self.power.clone(), core: Arc::clone(&self.core), id, content }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let _step = self.power.step()?;
        let entries = &mut *lock(&self.core.entries);
        let id = entries.find(&self.core.path, from)?;
        std::fs::rename(self.core.path.join(from), self.core.path.join(to))?;
        entries.change(Change::Rename { from: from.into(), to: to.into(), id });
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let _step = self.power.step()?;
        let entries = &mut *lock(&self.core.entries);
        let id = match entries.find(&self.core.path, name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        std::fs::remove_file(self.core.path.join(name))?;
        entries.change(Change::Remove { name: name.into() });
        if let Some(room) = &mut entries.room {
            *room += entries.files[&id].used.swap(0, SeqCst);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let _step = self.power.step()?;
        self.power.count_sync();
        let entries = &mut *lock(&self.core.entries);
        entries.durable = entries.names.clone();
        entries.unsynced.clear();
        let Entries { files, names, .. } = entries;
        files.retain(|id, content| Arc::strong_count(content) > 1 || names.values().any(|named| named == id));
        Ok(())
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let _look = self.power.look()?;
        Dir::open(&self.core.path)?.list()
    }

    fn path(&self) -> &Path {
        &self.core.path
    }

    fn modified(&self, name: &str) -> Option<u64> {
        Dir::open(&self.core.path).ok()?.modified(name)
    }

    fn free(&self) -> Option<u64> {
        lock(&self.core.entries).room.or_else(|| device::free_space(&self.core.path).ok())
    }
}

struct FaultyFile {
    power: Power,
    core: Arc<Core>,
    id: Id,
    content: Arc<Content>,
}

impl FaultyFile {
    /// Makes room for the first `len` bytes.
    fn grow(&self, len: u64) -> io::Result<()> {
        let more = len.saturating_sub(self.content.used.load(SeqCst));
        if more > 0 {
            lock(&self.core.entries).take(&self.core.path, more)?;
            self.content.used.fetch_add(more, SeqCst);
        }
        Ok(())
    }
}

impl StateFile for FaultyFile {
    fn len(&self) -> io::Result<u64> {
        let _look = self.power.look()?;
        Ok(self.content.file.metadata()?.len())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let _look = self.power.look()?;
        self.content.file.read_exact_at(buf, offset)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let _step = self.power.step()?;
        let state = &mut *lock(&self.content.state);
        self.grow(offset + buf.len() as u64)?;
        if self.power.forgets() {
            state.changed.push(offset..offset + buf.len() as u64);
        }
        self.content.file.write_all_at(buf, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let _step = self.power.step()?;
        let state = &mut *lock(&self.content.state);
        let before = self.content.file.metadata()?.len();
        state.changed.push(before.min(len)..before.max(len));
        let used = self.content.used.fetch_min(len, SeqCst);
        if let Some(room) = &mut lock(&self.core.entries).room {
            *room += used.saturating_sub(len);
        }
        self.content.file.set_len(len)
    }

    fn reserve(&self, len: u64) -> io::Result<()> {
        let _step = self.power.step()?;
        let _alone = lock(&self.content.state);
        self.grow(len)?;
        if self.content.file.metadata()?.len() < len { self.content.file.set_len(len) } else { Ok(()) }
    }

    fn sync(&self) -> io::Result<()> {
        let _step = self.power.step().inspect_err(|error| {
            // The kernel drops what it could not write; what was interrupted was not begun.
            if !is_cut(error) && error.kind() != io::ErrorKind::Interrupted {
                lock(&self.content.state).changed.clear();
            }
        })?;
        self.power.count_sync();
        if !self.power.forgets() {
            return Ok(());
        }
        {
            let state = &mut *lock(&self.content.state);
            if std::mem::take(&mut state.untold) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            let len = self.content.file.metadata()?.len();
            state.durable.resize(len)?;
            if let Some(failed) = &state.failed {
                copy_changed(&self.content.file, failed, &state.durable)?;
                return Ok(());
            }
            let changed = std::mem::take(&mut state.changed);
            let all = std::iter::once(0..len).filter(|_| state.mapped);
            for range in all.chain(changed.into_iter().filter(|_| !state.mapped)) {
                copy_data(&self.content.file, range.start.min(len)..range.end.min(len), &state.durable)?;
            }
        }
        if self.core.sync_links {
            let entries = &mut *lock(&self.core.entries);
            let (now, later) = entries.unsynced.drain(..).partition(|change| change.names(self.id));
            entries.unsynced = later;
            now.iter().for_each(|change: &Change| change.apply(&mut entries.durable));
        }
        Ok(())
    }

    fn failed(&self) -> io::Result<()> {
        let _look = self.power.look()?;
        match std::mem::take(&mut lock(&self.content.state).untold) {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => Ok(()),
        }
    }

    fn map(&self, len: u64) -> io::Result<Mapping> {
        let _look = self.power.look()?;
        let state = &mut *lock(&self.content.state);
        if lock(&self.core.entries).room.is_some() && self.content.used.load(SeqCst) < len {
            // A real process would be killed by SIGBUS at some store.
            return Err(io::Error::other(
                "a mapping of space that is not reserved, in a folder that may run full",
            ));
        }
        state.mapped = true;
        Mapping::new(&self.content.file, len)
    }
}

/// The pages of a file, the last perhaps short.
fn pages(len: u64) -> impl Iterator<Item = Range<u64>> {
    (0..len.div_ceil(4096)).map(move |page| page * 4096..(page * 4096 + 4096).min(len))
}

/// Reads what a disk has; beyond its end are zeroes.
fn read_padded(disk: &RamDisk, offset: u64, buf: &mut [u8]) -> io::Result<()> {
    let have = disk.len().saturating_sub(offset).min(buf.len() as u64) as usize;
    disk.read_at(offset, &mut buf[..have])
}

/// Copies the pages of a file that are not as they were in `before`.
fn copy_changed(file: &File, before: &RamDisk, to: &RamDisk) -> io::Result<()> {
    for page in pages(file.metadata()?.len()) {
        let [mut now, mut then] = [(); 2].map(|()| vec![0; (page.end - page.start) as usize]);
        file.read_exact_at(&mut now, page.start)?;
        read_padded(before, page.start, &mut then)?;
        if now != then {
            to.write_at(page.start, &now)?;
        }
    }
    Ok(())
}

impl Content {
    fn new(file: File) -> Content {
        let state = FileState {
            durable: RamDisk::new(0),
            changed: Vec::new(),
            mapped: false,
            at_cut: None,
            failed: None,
            untold: false,
        };
        Content { file, state: Mutex::new(state), used: AtomicU64::new(0) }
    }

    /// All of the file as it is.
    fn now(&self) -> io::Result<RamDisk> {
        let len = self.file.metadata()?.len();
        let now = RamDisk::new(len);
        copy_data(&self.file, 0..len, &now)?;
        Ok(now)
    }

    /// What a crash leaves of the file.
    fn left(&self, keep: Keep, dice: &mut Random) -> io::Result<RamDisk> {
        let state = &mut *lock(&self.state);
        let now = match state.at_cut.take() {
            Some(at_cut) => at_cut,
            None => self.now()?,
        };
        let durable = std::mem::replace(&mut state.durable, RamDisk::new(0));
        match keep {
            Keep::KeepAll => Ok(now),
            Keep::LoseUnsynced => Ok(durable),
            Keep::Random => {
                let len = if dice.coin() { now.len() } else { durable.len() };
                mix(&now, &durable, dice)?;
                durable.resize(len)?;
                Ok(durable)
            }
        }
    }
}

impl Member for Core {
    fn cut(&self) {
        // Threads of the dead process may go on storing to their mappings: that is not part of what it left.
        for content in lock(&self.entries).files.values() {
            let state = &mut *lock(&content.state);
            if state.mapped {
                // What cannot be read now is read at the crash, as it is then.
                state.at_cut = content.now().ok();
            }
        }
    }

    fn crash(&self, _disks: Keep, folders: Keep, dice: &mut Random) -> io::Result<()> {
        let entries = &mut *lock(&self.entries);
        let names = match folders {
            Keep::KeepAll => entries.names.clone(),
            Keep::LoseUnsynced => entries.durable.clone(),
            Keep::Random => {
                let mut names = entries.durable.clone();
                entries.unsynced.iter().filter(|_| dice.coin()).for_each(|change| change.apply(&mut names));
                names
            }
        };
        let mut left = Vec::new();
        for (name, id) in &names {
            let content = &entries.files[id];
            let untouched = folders == Keep::KeepAll && !lock(&content.state).mapped;
            if !untouched {
                left.push((name, content.left(folders, dice)?));
            }
        }
        for name in entries.names.keys() {
            if folders != Keep::KeepAll && !names.contains_key(name) {
                std::fs::remove_file(self.path.join(name))?;
            }
        }
        for (name, content) in left {
            // A new inode: the dead process's mappings lead to the old one.
            let path = self.path.join(name);
            let _ = std::fs::remove_file(&path);
            write_out(&content, &path)?;
        }
        Ok(())
    }
}

/// Copies a range of a file. Holes become holes.
fn copy_data(file: &File, range: Range<u64>, to: &RamDisk) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    to.zero(range.start, range.end - range.start, true, true)?;
    let mut bytes = vec![0; 1 << 16];
    let mut at = range.start;
    while at < range.end {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.max(at),
            Err(Errno::NXIO) => return Ok(()),
            Err(Errno::INVAL) => at,
            Err(e) => return Err(e.into()),
        };
        let count = range.end.saturating_sub(at).min(bytes.len() as u64) as usize;
        file.read_exact_at(&mut bytes[..count], at)?;
        to.write_at(at, &bytes[..count])?;
        at += count as u64;
    }
    Ok(())
}

/// Puts sectors of `now` into `into` as the dice fall; `into` becomes as long as the longer of both.
fn mix(now: &RamDisk, into: &RamDisk, dice: &mut Random) -> io::Result<()> {
    let len = now.len().max(into.len());
    into.resize(len)?;
    let sized = now.len();
    let mut from = 0;
    // Where neither has data both read as zeroes.
    while let Some(run) = next_run(now, into, from)? {
        let mut at = run.start;
        while at < run.end {
            let count = SECTOR.min(run.end - at);
            if dice.coin() {
                let mut sector = [0; SECTOR as usize];
                let present = sized.saturating_sub(at).min(count) as usize;
                now.read_at(at.min(sized), &mut sector[..present])?;
                into.write_at(at, &sector[..count as usize])?;
            }
            at += count;
        }
        from = run.end;
    }
    Ok(())
}

fn next_run(a: &RamDisk, b: &RamDisk, from: u64) -> io::Result<Option<Range<u64>>> {
    Ok(match (a.allocated(from)?, b.allocated(from)?) {
        (Some(a), Some(b)) => Some(if a.start <= b.start { a } else { b }),
        (a, b) => a.or(b),
    })
}

fn write_out(content: &RamDisk, path: &Path) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.set_len(content.len())?;
    let mut bytes = vec![0; 1 << 16];
    let mut from = 0;
    while let Some(run) = content.allocated(from)? {
        let count = (run.end - run.start).min(bytes.len() as u64) as usize;
        content.read_at(run.start, &mut bytes[..count])?;
        file.write_all_at(&bytes[..count], run.start)?;
        from = run.start + count as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::super::{Outage, is_cut};
    use super::*;
    use device::replace;

    const POLICIES: [Keep; 3] = [Keep::KeepAll, Keep::LoseUnsynced, Keep::Random];

    fn content(path: &Path, name: &str) -> Option<Vec<u8>> {
        std::fs::read(path.join(name)).ok()
    }

    /// Cuts `act` at each of its steps under each policy; `check` sees what is left. Gives the number of outcomes.
    fn every_cut(
        start: impl Fn(&dyn Folder),
        act: impl Fn(&dyn Folder) -> io::Result<()>,
        mut check: impl FnMut(&Path),
    ) -> usize {
        let mut outcomes = 0;
        for (outage, policy, seeds) in [(Outage::Kill, Keep::KeepAll, 1)]
            .into_iter()
            .chain(POLICIES.map(|p| (Outage::PowerCut, p, if p == Keep::Random { 20 } else { 1 })))
        {
            for seed in 0..seeds {
                for step in 1.. {
                    let place = tempfile::tempdir().unwrap();
                    start(&Dir::open(place.path()).unwrap());
                    let power = Power::new(outage);
                    let folder = FaultyFolder::new(&power, place.path()).unwrap();
                    power.cut_at(step);
                    let result = act(&folder);
                    power.crash(policy, policy, seed).unwrap();
                    check(place.path());
                    outcomes += 1;
                    match result {
                        Err(e) => assert!(is_cut(&e), "{e}"),
                        Ok(()) => break,
                    }
                }
            }
        }
        outcomes
    }

    #[test]
    fn replace_leaves_the_old_or_the_new() {
        let old: Vec<u8> = (0..3000u32).map(|i| i as u8).collect();
        let new = vec![9; 2000];
        let start = |folder: &dyn Folder| replace(folder, "x", &old).unwrap();
        let (mut olds, mut news) = (0, 0);
        every_cut(
            start,
            |folder| replace(folder, "x", &new),
            |path| {
                let found = content(path, "x").unwrap();
                assert!(found == old || found == new, "neither: {} bytes", found.len());
                *(if found == old { &mut olds } else { &mut news }) += 1;
            },
        );
        assert!(olds > 10 && news > 10, "{olds} {news}");
    }

    #[test]
    fn a_replacement_without_syncs_is_caught() {
        for (sync_file, sync_folder) in [(false, true), (true, false)] {
            let mut bad = 0;
            every_cut(
                |folder| replace(folder, "x", &[1; 3000]).unwrap(),
                |folder| {
                    let file = folder.open("new", true)?;
                    file.write_at(0, &[2; 2000])?;
                    if sync_file {
                        file.sync()?;
                    }
                    folder.rename("new", "x")?;
                    if sync_folder {
                        folder.sync()?;
                    }
                    // Told to others, who count on it.
                    std::fs::write(folder.path().join("told"), b"").map(|_| ())
                },
                |path| {
                    let found = content(path, "x").unwrap();
                    let told = content(path, "told").is_some();
                    bad += usize::from(found != vec![1; 3000] && found != vec![2; 2000]);
                    bad += usize::from(told && found != vec![2; 2000]);
                },
            );
            assert!(bad > 0, "sync of the file {sync_file}, of the folder {sync_folder}");
        }
    }

    #[test]
    fn a_new_name_needs_the_folders_sync() {
        for (friendly, kept) in [(false, false), (true, true)] {
            let place = tempfile::tempdir().unwrap();
            let power = Power::new(Outage::PowerCut);
            let folder = FaultyFolder::open(&power, place.path(), friendly).unwrap();
            let file = folder.open("x", true).unwrap();
            file.write_at(0, b"content").unwrap();
            file.sync().unwrap();
            power.crash(Keep::LoseUnsynced, Keep::LoseUnsynced, 0).unwrap();
            assert_eq!(content(place.path(), "x").is_some(), kept);
        }
    }

    #[test]
    fn stores_to_a_mapping_are_durable_after_a_sync_and_gone_after_the_cut() {
        let place = tempfile::tempdir().unwrap();
        let power = Power::new(Outage::PowerCut);
        let folder = FaultyFolder::new(&power, place.path()).unwrap();
        let file = folder.open("map", true).unwrap();
        file.reserve(1 << 20).unwrap();
        folder.sync().unwrap();
        let map = file.map(1 << 20).unwrap();
        let before = power.steps();
        map[0].store(1, Relaxed);
        map[1000].store(2, Relaxed);
        assert_eq!(power.steps(), before);
        file.sync().unwrap();
        map[1].store(3, Relaxed);
        map[2000].store(4, Relaxed);
        power.cut();
        map[3000].store(5, Relaxed);
        let words = |keep| {
            power.crash(keep, keep, 7).unwrap();
            let bytes = content(place.path(), "map").unwrap();
            let word = |n: usize| u64::from_ne_bytes(bytes[n * 8..n * 8 + 8].try_into().unwrap());
            assert_eq!(bytes.len(), 1 << 20);
            [0, 1000, 1, 2000, 3000].map(word)
        };
        assert_eq!(words(Keep::LoseUnsynced), [1, 2, 0, 0, 0]);
        map[0].store(9, Relaxed);
        assert_eq!(content(place.path(), "map").unwrap()[0], 1);
        assert!(is_cut(&file.sync().unwrap_err()));
    }

    #[test]
    fn a_killed_process_leaves_its_mappings_as_they_were() {
        let place = tempfile::tempdir().unwrap();
        let power = Power::new(Outage::Kill);
        let folder = FaultyFolder::new(&power, place.path()).unwrap();
        let file = folder.open("map", true).unwrap();
        file.set_len(4096).unwrap();
        let map = file.map(4096).unwrap();
        map[0].store(1, Relaxed);
        power.cut();
        map[1].store(2, Relaxed);
        power.crash(Keep::LoseUnsynced, Keep::LoseUnsynced, 0).unwrap();
        let bytes = content(place.path(), "map").unwrap();
        assert_eq!((bytes[0], bytes[8]), (1, 0));
    }

    #[test]
    fn a_failed_sync_forgets_and_passes() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("x"), [1; 2048]).unwrap();
        let power = Power::new(Outage::PowerCut);
        let folder = FaultyFolder::new(&power, place.path()).unwrap();
        let file = folder.open("x", false).unwrap();
        file.write_at(0, &[2; 1024]).unwrap();
        power.fail_at(2, 1, libc::EIO);
        assert_eq!(file.sync().unwrap_err().raw_os_error(), Some(libc::EIO));
        file.write_at(512, &[3; 512]).unwrap();
        file.sync().unwrap();
        assert_eq!(content(place.path(), "x").unwrap()[..512], [2; 512]);
        power.crash(Keep::LoseUnsynced, Keep::LoseUnsynced, 0).unwrap();
        assert_eq!(content(place.path(), "x").unwrap()[..1024], [[1; 512], [3; 512]].concat());
    }

    #[test]
    fn a_full_folder_refuses_growth_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let power = Power::new(Outage::Kill);
        let folder = FaultyFolder::new(&power, place.path()).unwrap();
        let file = folder.open("x", true).unwrap();
        file.reserve(1000).unwrap();
        folder.full_after(100);
        file.write_at(0, &[1; 1000]).unwrap();
        file.write_at(1000, &[1; 100]).unwrap();
        assert_eq!(file.write_at(1100, &[1]).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(
            folder.open("y", true).unwrap().reserve(1).unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
        assert_eq!(file.len().unwrap(), 1100);
        folder.remove("x").unwrap();
        folder.open("y", true).unwrap().write_at(0, &[1; 1100]).unwrap();
        folder.heal();
        folder.open("y", true).unwrap().write_at(0, &[1; 5000]).unwrap();
    }

    #[test]
    fn random_loss_mixes_sectors_and_lengths() {
        let (mut lengths, mut mixed) = (std::collections::BTreeSet::new(), 0);
        for seed in 0..40 {
            let place = tempfile::tempdir().unwrap();
            std::fs::write(place.path().join("x"), [1; 4096]).unwrap();
            let power = Power::new(Outage::PowerCut);
            let folder = FaultyFolder::new(&power, place.path()).unwrap();
            folder.open("x", false).unwrap().write_at(0, &[2; 6000]).unwrap();
            power.crash(Keep::KeepAll, Keep::Random, seed).unwrap();
            let found = content(place.path(), "x").unwrap();
            lengths.insert(found.len());
            for sector in found.chunks(512) {
                assert!(sector.iter().all(|b| *b == sector[0]), "a sector is torn");
            }
            mixed += usize::from(found[..4096].contains(&1) && found[..4096].contains(&2));
        }
        assert_eq!(lengths.into_iter().collect::<Vec<_>>(), [4096, 6000]);
        assert!(mixed > 30);
    }
}
