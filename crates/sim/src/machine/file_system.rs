//! The file systems and devices of a machine, in memory. What was not flushed is remembered, so that a power cut can lose any of
//! it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

use testing::Random;

use crate::machine::inode::{Content, ENOSPC, Inode, Loss, PAGE};

/// Folders, and what their names stand for.
pub struct FileSystem {
    pub(crate) inodes: HashMap<u64, Inode>,
    /// How many were made so far: numbers are not used again.
    made: u64,
    pub(crate) folders: BTreeMap<String, Names>,
    /// A file's sync makes its name durable.
    syncs_names: bool,
    /// Bytes by which files may still grow; `None` for no limit.
    pub room: Option<u64>,
    /// The limit stays until the end.
    pub room_stays: bool,
    /// Files of state, by inode, for which there was no room when it was last asked for.
    pub(crate) starved: BTreeSet<u64>,
}

/// The names in a folder.
#[derive(Default, Clone)]
pub(crate) struct Names {
    pub now: BTreeMap<String, u64>,
    durable: BTreeMap<String, u64>,
    unsynced: Vec<Change>,
}

impl Names {
    fn sync(&mut self) {
        self.durable = self.now.clone();
        self.unsynced.clear();
    }
}

#[derive(Clone)]
enum Change {
    Is { name: String, inode: u64, was: Option<String> },
    Gone { name: String },
}

impl Change {
    fn apply(&self, names: &mut BTreeMap<String, u64>) {
        match self {
            Change::Is { name, inode, was } => {
                if let Some(was) = was.as_ref().filter(|was| names.get(*was) == Some(inode)) {
                    names.remove(was);
                }
                names.insert(name.clone(), *inode);
            }
            Change::Gone { name } => {
                names.remove(name);
            }
        }
    }
}

impl FileSystem {
    /// Without any file.
    pub(crate) fn new(syncs_names: bool) -> FileSystem {
        let (inodes, folders) = (HashMap::new(), BTreeMap::new());
        let starved = BTreeSet::new();
        FileSystem { inodes, made: 0, folders, syncs_names, room: None, room_stays: false, starved }
    }

    /// Creates a file or device of this size, and returns its inode.
    pub(crate) fn make(&mut self, len: u64, is_device: bool, time: i64) -> u64 {
        self.made += 1;
        let number = self.made;
        self.inodes.insert(number, Inode::new(len, is_device, time));
        number
    }

    pub(crate) fn inode(&mut self, number: u64) -> io::Result<&mut Inode> {
        self.inodes.get_mut(&number).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Pages that cannot be read, until [`FileSystem::mend`].
    pub fn spoil(&mut self, number: u64, pages: &[usize]) {
        if let Ok(inode) = self.inode(number) {
            inode.bad = pages.iter().map(|page| page * PAGE..(page + 1) * PAGE).collect();
        }
    }

    /// All can be read again.
    pub fn mend(&mut self, number: u64) {
        self.spoil(number, &[]);
    }

    /// Names what a file or device holds now.
    pub fn content_name(&mut self, number: u64) -> Content {
        self.inodes.get_mut(&number).map(Inode::name).unwrap_or_default()
    }

    /// Bytes of a file or device.
    pub fn len(&self, number: u64) -> u64 {
        self.inodes.get(&number).map_or(0, Inode::len)
    }

    /// What a file or device holds now.
    pub fn content(&self, number: u64) -> Vec<u8> {
        self.inodes.get(&number).map(Inode::bytes).unwrap_or_default()
    }

    fn names(&mut self, folder: &str) -> &mut Names {
        self.folders.entry(folder.to_owned()).or_default()
    }

    fn change(&mut self, folder: &str, change: Change) {
        let names = self.names(folder);
        change.apply(&mut names.now);
        names.unsynced.push(change);
    }

    /// The inode of a name.
    pub fn find(&self, folder: &str, name: &str) -> Option<u64> {
        self.folders.get(folder)?.now.get(name).copied()
    }

    /// Gives an inode a name.
    pub fn link(&mut self, folder: &str, name: &str, inode: u64) {
        self.change(folder, Change::Is { name: name.into(), inode, was: None });
    }

    pub(crate) fn rename(&mut self, folder: &str, from: &str, to: &str, time: i64) -> io::Result<()> {
        let inode = self.find(folder, from).ok_or(io::ErrorKind::NotFound)?;
        self.inode(inode)?.changed(time);
        self.change(folder, Change::Is { name: to.into(), inode, was: Some(from.into()) });
        Ok(())
    }

    pub(crate) fn unlink(&mut self, folder: &str, name: &str) {
        let Some(inode) = self.find(folder, name) else { return };
        self.change(folder, Change::Gone { name: name.into() });
        self.free(self.inodes.get(&inode).map_or(0, Inode::space));
    }

    /// Returns the space that an inode has freed.
    pub(crate) fn freed(&mut self, inode: u64, before: u64) {
        self.free(before.saturating_sub(self.inodes.get(&inode).map_or(0, Inode::space)));
    }

    fn free(&mut self, bytes: u64) {
        self.room = self.room.map(|room| room + bytes);
    }

    /// Takes this much of the free space.
    pub(crate) fn take(&mut self, bytes: u64) -> io::Result<()> {
        if let Some(room) = &mut self.room {
            *room = room.checked_sub(bytes).ok_or_else(|| io::Error::from_raw_os_error(ENOSPC))?;
        }
        Ok(())
    }

    pub(crate) fn sync_names(&mut self, folder: &str) {
        self.names(folder).sync();
    }

    /// Makes a file's names durable at its sync, if the file system does that.
    pub(crate) fn sync_name_of(&mut self, folder: &str, inode: u64) {
        if !self.syncs_names {
            return;
        }
        let names = self.names(folder);
        let changes = std::mem::take(&mut names.unsynced);
        for change in changes {
            match &change {
                Change::Is { inode: of, .. } if *of == inode => change.apply(&mut names.durable),
                _ => names.unsynced.push(change),
            }
        }
    }

    /// A copy of a folder, to restore it later.
    pub fn snapshot(&self, folder: &str) -> BTreeMap<String, Vec<u8>> {
        let names = self.folders.get(folder).map(|names| &names.now);
        names.into_iter().flatten().map(|(name, inode)| (name.clone(), self.content(*inode))).collect()
    }

    /// Frees the memory of files to which no name leads, now or after a power cut: for runs of many rounds. To be called while
    /// no process has one open.
    pub fn sweep(&mut self) {
        let mut named: BTreeSet<u64> = BTreeSet::new();
        for names in self.folders.values() {
            named.extend(names.now.values().chain(names.durable.values()));
            named.extend(names.unsynced.iter().filter_map(|change| match change {
                Change::Is { inode, .. } => Some(*inode),
                Change::Gone { .. } => None,
            }));
        }
        self.inodes.retain(|number, _| named.contains(number));
    }

    /// Makes everything durable.
    pub(crate) fn sync(&mut self) {
        self.inodes.values_mut().for_each(|inode| inode.sync(true));
        self.folders.values_mut().for_each(Names::sync);
    }

    /// What a power cut leaves.
    pub(crate) fn crash(&mut self, loss: Loss, dice: &mut Random) {
        for names in self.folders.values_mut() {
            let mut left = match loss {
                Loss::Nothing => names.now.clone(),
                _ => names.durable.clone(),
            };
            if loss == Loss::Some {
                names.unsynced.iter().filter(|_| dice.one_in(2)).for_each(|change| change.apply(&mut left));
            }
            *names = Names { now: left.clone(), durable: left, unsynced: Vec::new() };
        }
        let mut numbers: Vec<u64> = self.inodes.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            if let Some(inode) = self.inodes.get_mut(&number) {
                inode.crash(loss, dice);
            }
        }
    }
}
