//! The backing of a source, simulated.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use device::{Clock, Disk, DiskKind, Identity};
use source::{Backing, Boot, SourceError};

use crate::machine::files::SimDisk;
use crate::machine::host::{Call, Held, Process, lock};

/// An image or device, as the process sees it that holds the source.
pub struct SimBacking {
    _held: Arc<Held>,
    process: Arc<Process>,
    /// The process that reads: another one if the source is served.
    reader: Arc<Mutex<Arc<Process>>>,
    folder: String,
    name: String,
}

impl SimBacking {
    /// The image or device of that name.
    pub fn new(
        held: Arc<Held>,
        process: &Arc<Process>,
        reader: &Arc<Mutex<Arc<Process>>>,
        folder: &str,
        name: &str,
    ) -> SimBacking {
        SimBacking {
            _held: held,
            process: process.clone(),
            reader: reader.clone(),
            folder: folder.into(),
            name: name.into(),
        }
    }

    fn failed(&self, error: std::io::Error) -> SourceError {
        SourceError::State { what: "look at", path: PathBuf::from(&self.name), error }
    }

    fn find(&self) -> Result<u64, SourceError> {
        let found = self.process.host.state().files.find(&self.folder, &self.name);
        found.ok_or_else(|| self.failed(std::io::ErrorKind::NotFound.into()))
    }
}

impl Backing for SimBacking {
    fn identity(&self) -> Result<Identity, SourceError> {
        let number = self.find()?;
        let host = &self.process.host;
        host.call(&self.process, Call::Read, |state| {
            let inode = state.files.inode(number)?;
            let kind = if inode.is_device { DiskKind::Block } else { DiskKind::File };
            let time = if inode.is_device { 0 } else { inode.time };
            Ok(Identity {
                kind,
                path: host.scratch.join(&self.name),
                dev: 7,
                ino: if inode.is_device { 0 } else { number },
                diskseq: None,
                size: inode.len(),
                mtime_ns: time,
                ctime_ns: time,
                born_ns: None,
                part: None,
            })
        })
        .map_err(|error| self.failed(error))
    }

    fn boot(&self) -> Boot {
        let (id, began) = self.process.host.state().boot();
        Boot { id, began }
    }

    fn clock(&self) -> Clock {
        self.process.host.clock()
    }

    fn durable_times(&self) -> Result<(i64, i64), SourceError> {
        let number = self.find()?;
        let host = &self.process.host;
        host.call(&self.process, Call::Sync, |state| {
            let inode = state.files.inode(number)?;
            let time = if inode.is_device { 0 } else { inode.time };
            crate::machine::files::sync(state, number, true)?;
            Ok((time, time))
        })
        .map_err(|error| self.failed(error))
    }

    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        let number = self.find()?;
        Ok(Arc::new(SimDisk::new(&lock(&self.reader), number)))
    }
}
