//! A process's access to its machine: folders, state files, images and devices.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::{Disk, Folder, InlineQueue, Mapping, Queue, StateFile};

use crate::machine::host::{Call, Held, Process, State};
use crate::machine::inode::{EIO, Inode, PAGE};

fn eio() -> io::Error {
    io::Error::from_raw_os_error(EIO)
}

/// The folder of the state of a group.
pub(crate) fn group_folder(name: &str) -> String {
    format!("group {name}")
}

/// A folder of state files.
pub struct SimFolder {
    _held: Option<Arc<Held>>,
    process: Arc<Process>,
    name: String,
    path: PathBuf,
}

impl SimFolder {
    /// The folder of that name on the process's machine.
    pub fn new(process: &Arc<Process>, name: &str) -> SimFolder {
        // Some calls need a real folder.
        SimFolder {
            _held: None,
            process: process.clone(),
            name: name.into(),
            path: process.host.scratch.clone(),
        }
    }

    /// The folder with its lock, held as long as it is open.
    pub(crate) fn held(self, held: Arc<Held>) -> SimFolder {
        SimFolder { _held: Some(held), ..self }
    }

    fn call<T>(&self, call: Call, act: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        self.process.host.call(&self.process, call, act)
    }
}

impl Folder for SimFolder {
    fn open(&self, name: &str, create: bool) -> io::Result<Box<dyn StateFile>> {
        let inode = self.call(if create { Call::Name } else { Call::Read }, |state| {
            match state.files.find(&self.name, name) {
                Some(inode) => Ok(inode),
                None if !create => Err(io::ErrorKind::NotFound.into()),
                None if state.is_broken() => Err(eio()),
                None => {
                    state.take(1)?;
                    let inode = state.make(0, false);
                    state.files.link(&self.name, name, inode);
                    Ok(inode)
                }
            }
        })?;
        Ok(Box::new(SimFile { process: self.process.clone(), folder: self.name.clone(), inode }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.call(
            Call::Name,
            |state| if state.is_broken() { Err(eio()) } else { state.rename(&self.name, from, to) },
        )
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.call(Call::Name, |state| match state.files.find(&self.name, name) {
            Some(_) if state.is_broken() => Err(eio()),
            _ => {
                state.files.unlink(&self.name, name);
                Ok(())
            }
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.call(Call::Sync, |state| {
            if state.is_broken() {
                return Err(eio());
            }
            state.files.sync_names(&self.name);
            Ok(())
        })
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.call(Call::Read, |state| {
            Ok(state
                .files
                .folders
                .get(&self.name)
                .map(|names| names.now.keys().cloned().collect())
                .unwrap_or_default())
        })
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn free(&self) -> Option<u64> {
        self.process.host.state().files.room
    }

    fn modified(&self, name: &str) -> Option<u64> {
        let found = self.call(Call::Read, |state| {
            let inode = state.files.find(&self.name, name);
            inode.map(|inode| Ok(state.files.inode(inode)?.time)).transpose()
        });
        found.ok().flatten().map(|time| time.max(0) as u64)
    }
}

/// A state file.
struct SimFile {
    process: Arc<Process>,
    folder: String,
    inode: u64,
}

impl SimFile {
    fn call<T>(&self, call: Call, act: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        self.process.host.call(&self.process, call, act)
    }
}

/// Writes to a file or device, after the faults.
fn write(state: &mut State, number: u64, offset: u64, buf: &[u8]) -> io::Result<()> {
    let time = state.tick();
    if state.is_broken() {
        // Some of it may have arrived.
        let part = state.dice.below(buf.len() as u64 + 1) as usize / 512 * 512;
        let inode = state.files.inode(number)?;
        if part > 0 && offset + part as u64 <= inode.len() {
            inode.write(offset, &buf[..part], time);
        }
        return Err(eio());
    }
    let grows = state.files.inode(number)?.grows(offset, buf.len());
    state.take(grows)?;
    state.files.inode(number)?.write(offset, buf, time);
    Ok(())
}

fn resize(state: &mut State, number: u64, len: u64) -> io::Result<()> {
    let time = state.tick();
    if state.is_broken() {
        return Err(eio());
    }
    let before = state.files.inode(number)?.space();
    state.files.inode(number)?.resize(len, time);
    state.files.freed(number, before);
    Ok(())
}

pub(crate) fn sync(state: &mut State, number: u64, all: bool) -> io::Result<()> {
    let broken = state.is_broken();
    let inode = state.files.inode(number)?;
    if broken {
        inode.sync_fails();
        return Err(eio());
    }
    inode.sync(all);
    Ok(())
}

impl StateFile for SimFile {
    fn len(&self) -> io::Result<u64> {
        self.call(Call::Read, |state| Ok(state.files.inode(self.inode)?.len()))
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.call(Call::Read, |state| state.files.inode(self.inode)?.read(offset, buf))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.call(Call::Write, |state| write(state, self.inode, offset, buf))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.call(Call::Write, |state| resize(state, self.inode, len))
    }

    fn reserve(&self, len: u64) -> io::Result<()> {
        self.call(Call::Write, |state| {
            let time = state.tick();
            if state.is_broken() {
                return Err(eio());
            }
            let grows = state.files.inode(self.inode)?.grows(0, len as usize);
            if let Err(full) = state.take(grows) {
                state.files.starved.insert(self.inode);
                return Err(full);
            }
            state.files.starved.remove(&self.inode);
            let inode = state.files.inode(self.inode)?;
            inode.allocate(0..(len as usize).div_ceil(PAGE), true);
            if inode.len() < len {
                inode.resize(len, time);
            }
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.call(Call::Sync, |state| {
            sync(state, self.inode, true)?;
            state.files.sync_name_of(&self.folder, self.inode);
            Ok(())
        })
    }

    fn map(&self, len: u64) -> io::Result<Mapping> {
        let process = self.process.number();
        self.call(Call::Read, |state| state.files.inode(self.inode)?.map(len, process))
    }
}

/// An image or a device.
pub struct SimDisk {
    process: Arc<Process>,
    inode: u64,
}

impl SimDisk {
    /// The content of an inode.
    pub fn new(process: &Arc<Process>, inode: u64) -> SimDisk {
        SimDisk { process: process.clone(), inode }
    }

    fn call<T>(&self, call: Call, act: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        self.process.host.call(&self.process, call, act)
    }

    fn look<T>(&self, look: impl FnOnce(&Inode) -> T) -> Option<T> {
        self.process.host.state().files.inodes.get(&self.inode).map(look)
    }
}

fn within(inode: &Inode, offset: u64, len: u64) -> io::Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= inode.len() => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "beyond the end of the disk")),
    }
}

impl Disk for SimDisk {
    fn len(&self) -> u64 {
        self.look(Inode::len).unwrap_or(0)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.call(Call::Read, |state| state.files.inode(self.inode)?.read(offset, buf))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.call(Call::Write, |state| {
            within(state.files.inode(self.inode)?, offset, buf.len() as u64)?;
            write(state, self.inode, offset, buf)
        })
    }

    fn zero(&self, offset: u64, len: u64, unmap: bool, _fast: bool) -> io::Result<()> {
        self.call(Call::Write, |state| {
            let time = state.tick();
            within(state.files.inode(self.inode)?, offset, len)?;
            if state.is_broken() {
                return Err(eio());
            }
            if !unmap {
                let grows = state.files.inode(self.inode)?.grows(offset, len as usize);
                state.take(grows)?;
            }
            let before = state.files.inode(self.inode)?.space();
            state.files.inode(self.inode)?.zero(offset as usize..(offset + len) as usize, unmap, time);
            state.files.freed(self.inode, before);
            Ok(())
        })
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.zero(offset, len, true, false)
    }

    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        self.call(Call::Write, |state| {
            let time = state.tick();
            if state.files.inode(self.inode)?.is_device {
                return Ok(());
            }
            if state.is_broken() {
                return Err(eio());
            }
            let grows = state.files.inode(self.inode)?.grows(offset, len as usize);
            state.take(grows)?;
            state.files.inode(self.inode)?.reserve(offset as usize..(offset + len) as usize, time);
            Ok(())
        })
    }

    fn flush(&self) -> io::Result<()> {
        self.call(Call::Sync, |state| sync(state, self.inode, false))
    }

    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        self.call(Call::Read, |state| {
            let inode = state.files.inode(self.inode)?;
            let len = inode.len();
            if from >= len {
                return Ok(None);
            }
            if inode.is_device {
                return Ok(Some(from..len));
            }
            let all = from as usize / PAGE..(len as usize).div_ceil(PAGE);
            let Some(first) = all.clone().find(|page| inode.is_allocated(*page)) else { return Ok(None) };
            let end = (first..all.end).find(|page| !inode.is_allocated(*page)).unwrap_or(all.end);
            let run = ((first * PAGE) as u64).max(from)..((end * PAGE) as u64).min(len);
            Ok((run.start < run.end).then_some(run))
        })
    }

    fn resize(&self, len: u64) -> io::Result<()> {
        self.call(Call::Write, |state| {
            if state.files.inode(self.inode)?.is_device {
                return Err(io::ErrorKind::Unsupported.into());
            }
            resize(state, self.inode, len)
        })
    }

    fn queue(self: Arc<Self>, _depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(InlineQueue::new(self)))
    }
}

/// Makes a file durable with its times.
pub(crate) fn settle(process: &Process, folder: &str, number: u64) -> io::Result<()> {
    process.host.call(process, Call::Sync, |state| {
        sync(state, number, true)?;
        state.files.sync_name_of(folder, number);
        Ok(())
    })
}
