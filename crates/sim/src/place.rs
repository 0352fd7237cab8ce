//! The place of a replica's file on a simulated machine.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::{Boot, Clock, Disk};
use replica::{Place, Stamp, Which};

use crate::files::{SimDisk, settle};
use crate::host::{Call, EIO, Process, State};

/// A file's place.
pub struct SimPlace {
    process: Arc<Process>,
    folder: String,
    name: String,
    partial: String,
    path: PathBuf,
}

impl SimPlace {
    /// The place of a name in a folder.
    pub fn new(process: &Arc<Process>, folder: &str, name: &str) -> SimPlace {
        let path = process.host.scratch.join(name);
        SimPlace {
            process: process.clone(),
            folder: folder.into(),
            name: name.into(),
            partial: format!("{name}.partial"),
            path,
        }
    }

    fn name(&self, which: Which) -> &str {
        match which {
            Which::Whole => &self.name,
            Which::Partial => &self.partial,
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

    fn find(&self, which: Which) -> io::Result<u64> {
        let found = self.call(Call::Read, |state| Ok(state.find(&self.folder, self.name(which))))?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Place for SimPlace {
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

    fn stamp(&self, which: Which) -> io::Result<Option<Stamp>> {
        self.call(Call::Read, |state| {
            let Some(number) = state.find(&self.folder, self.name(which)) else { return Ok(None) };
            let inode = state.inode(number)?;
            Ok(Some(Stamp {
                inode: number,
                size: inode.len(),
                changed: inode.time,
                written: Some(inode.written),
                print: String::new(),
                medium: None,
            }))
        })
    }

    fn settle(&self) -> io::Result<Stamp> {
        settle(&self.process, &self.folder, self.find(Which::Whole)?)?;
        self.stamp(Which::Whole)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn open(&self, which: Which) -> replica::Result<Arc<dyn Disk>> {
        let failed = |error| replica::ReplicaError::Io { what: "open", path: self.path.clone(), error };
        Ok(Arc::new(SimDisk::new(&self.process, self.find(which).map_err(failed)?)))
    }

    fn create(&self) -> io::Result<u64> {
        self.call(Call::Name, |state| {
            if state.find(&self.folder, &self.partial).is_some() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            state.take(1)?;
            let inode = state.make(0, false);
            state.link(&self.folder, &self.partial, inode);
            Ok(inode)
        })
    }

    fn clone_whole(&self) -> io::Result<()> {
        let (from, to) = (self.find(Which::Whole)?, self.find(Which::Partial)?);
        self.call(Call::Write, |state| {
            let (content, time) = (state.content(from), state.tick());
            let clone = state.inode(to)?;
            clone.resize(content.len() as u64, time);
            clone.write(0, &content, time);
            Ok(())
        })
    }

    fn rename(&self, replace: bool) -> io::Result<()> {
        self.call(Call::Name, |state| {
            if !replace && state.find(&self.folder, &self.name).is_some() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            state.rename(&self.folder, &self.partial, &self.name)
        })
    }

    fn remove(&self) -> io::Result<()> {
        self.call(Call::Name, |state| {
            state.unlink(&self.folder, &self.partial);
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.call(Call::Sync, |state| {
            state.sync_names(&self.folder);
            Ok(())
        })
    }
}
