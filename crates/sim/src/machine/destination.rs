//! The destinations of replicas on a simulated machine: a file, a device.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::{Boot, Clock, Disk, Folder, Medium, WriteCounts};
use replica::{Destination, Name, ReplicaMembership, Stamp};

use crate::machine::files::{SimDisk, SimFolder, group_folder, settle};
use crate::machine::host::{Call, Held, Process, State};
use crate::machine::inode::EIO;

/// A file.
pub struct SimFile {
    _held: Arc<Held>,
    process: Arc<Process>,
    folder: String,
    name: String,
    partial: String,
    path: PathBuf,
}

impl SimFile {
    /// The file of a name in a folder.
    pub fn new(held: Arc<Held>, process: &Arc<Process>, folder: &str, name: &str) -> SimFile {
        let path = process.host.scratch.join(name);
        SimFile {
            _held: held,
            process: process.clone(),
            folder: folder.into(),
            name: name.into(),
            partial: format!("{name}.partial"),
            path,
        }
    }

    fn file_name(&self, name: Name) -> &str {
        match name {
            Name::Final => &self.name,
            Name::Temporary => &self.partial,
        }
    }

    fn call<T>(&self, call: Call, act: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        self.process.host.call(&self.process, call, |state| {
            if call != Call::Read && state.is_broken() {
                return Err(io::Error::from_raw_os_error(EIO));
            }
            act(state)
        })
    }

    fn find(&self, name: Name) -> io::Result<u64> {
        let found =
            self.call(Call::Read, |state| Ok(state.files.find(&self.folder, self.file_name(name))))?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Destination for SimFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn boot(&self) -> Boot {
        let (id, began) = self.process.host.state().boot();
        Boot { id, began }
    }

    fn clock(&self) -> Clock {
        self.process.host.clock()
    }

    fn is_device(&self) -> bool {
        false
    }

    fn stamp(&self, name: Name) -> io::Result<Option<Stamp>> {
        self.call(Call::Read, |state| {
            let Some(number) = state.files.find(&self.folder, self.file_name(name)) else { return Ok(None) };
            let inode = state.files.inode(number)?;
            Ok(Some(Stamp {
                inode: number,
                size: inode.len(),
                changed: inode.time,
                written: Some(inode.written),
                ..Stamp::default()
            }))
        })
    }

    fn settle(&self) -> io::Result<Stamp> {
        settle(&self.process, &self.folder, self.find(Name::Final)?)?;
        self.stamp(Name::Final)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn open(&self, name: Name) -> replica::Result<Arc<dyn Disk>> {
        let failed = |error| replica::ReplicaError::Io { what: "open", path: self.path.clone(), error };
        Ok(Arc::new(SimDisk::new(&self.process, self.find(name).map_err(failed)?)))
    }

    fn create(&self) -> io::Result<u64> {
        self.call(Call::Name, |state| {
            if state.files.find(&self.folder, &self.partial).is_some() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            state.take(1)?;
            let inode = state.make(0, false);
            state.files.link(&self.folder, &self.partial, inode);
            Ok(inode)
        })
    }

    fn clone_final(&self) -> io::Result<()> {
        let (from, to) = (self.find(Name::Final)?, self.find(Name::Temporary)?);
        self.call(Call::Write, |state| {
            let (content, time) = (state.files.content(from), state.tick());
            let clone = state.files.inode(to)?;
            clone.resize(content.len() as u64, time);
            clone.write(0, &content, time);
            Ok(())
        })
    }

    fn rename(&self, replace: bool) -> io::Result<()> {
        self.call(Call::Name, |state| {
            if !replace && state.files.find(&self.folder, &self.name).is_some() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            state.rename(&self.folder, &self.partial, &self.name)
        })
    }

    fn remove(&self) -> io::Result<()> {
        self.call(Call::Name, |state| {
            state.files.unlink(&self.folder, &self.partial);
            Ok(())
        })
    }

    fn group(&self, group: &ReplicaMembership) -> io::Result<Box<dyn Folder>> {
        Ok(Box::new(SimFolder::new(&self.process, &group_folder(&group.name))))
    }

    fn sync(&self) -> io::Result<()> {
        self.call(Call::Sync, |state| {
            state.files.sync_names(&self.folder);
            Ok(())
        })
    }
}

/// A device's place, whose kernel counts what is written to it.
pub struct SimDevice {
    _held: Arc<Held>,
    process: Arc<Process>,
    number: u64,
    path: PathBuf,
}

impl SimDevice {
    /// The place of a device.
    pub fn new(held: Arc<Held>, process: &Arc<Process>, name: &str, number: u64) -> SimDevice {
        SimDevice { _held: held, process: process.clone(), number, path: Path::new("/dev").join(name) }
    }

    fn disk(&self) -> SimDisk {
        SimDisk::new(&self.process, self.number)
    }

    /// Hashes of its ends, and nothing of what is between.
    fn ends(&self) -> io::Result<String> {
        const END: u64 = 4096;
        let disk = self.disk();
        let mut block = [0; END as usize];
        let last = disk.len().saturating_sub(END);
        Ok(device::hash_of(&disk, 0, &mut block)? + &device::hash_of(&disk, last, &mut block)?)
    }
}

impl Destination for SimDevice {
    fn path(&self) -> &Path {
        &self.path
    }

    fn boot(&self) -> Boot {
        let (id, began) = self.process.host.state().boot();
        Boot { id, began }
    }

    fn clock(&self) -> Clock {
        self.process.host.clock()
    }

    fn is_device(&self) -> bool {
        true
    }

    fn stamp(&self, name: Name) -> io::Result<Option<Stamp>> {
        if name == Name::Temporary {
            return Ok(None);
        }
        let Some(stamp) = self.glance()? else { return Ok(None) };
        let edges = self.ends()?;
        let medium = stamp.medium.map(|medium| Medium { edges: edges.clone(), ..medium });
        Ok(Some(Stamp { print: edges, medium, ..stamp }))
    }

    fn glance(&self) -> io::Result<Option<Stamp>> {
        self.process.host.call(&self.process, Call::Read, |state| {
            let boot = state.boot().0;
            let inode = state.files.inode(self.number)?;
            let written = WriteCounts { sectors: inode.counted, ..WriteCounts::default() };
            let medium = Medium {
                id: Some(format!("disk-{}", self.number)),
                boot,
                diskseq: Some(self.number),
                written: Some(written),
                edges: String::new(),
            };
            Ok(Some(Stamp { size: inode.len(), medium: Some(medium), ..Stamp::default() }))
        })
    }

    fn settle(&self) -> io::Result<Stamp> {
        self.disk().flush()?;
        self.stamp(Name::Final)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn group(&self, group: &ReplicaMembership) -> io::Result<Box<dyn Folder>> {
        Ok(Box::new(SimFolder::new(&self.process, &group_folder(&group.name))))
    }

    fn open(&self, _name: Name) -> replica::Result<Arc<dyn Disk>> {
        Ok(Arc::new(self.disk()))
    }
}
