//! A replica that is held alone: its parts, and what every use of it needs.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use device::{Disk, Folder, FolderLock};
use uuid::Uuid;

use crate::destination::{Destination, Name};
use crate::error::{ReplicaError, Result, disk_error, io_error};
use crate::journal::{ARRIVING, Contents, WHOLE};
use crate::lineage::{Lineage, Position, Stamp, State, StepKind};
use crate::note::Working;
use crate::status::Status;

/// How many bytes may be written before what has come is made durable: as much is sent again after a crash.
pub(crate) const SAVE_BYTES: u64 = 64 << 20;

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
    pub(crate) doubt: bool,
    pub(crate) changed: Option<&'static str>,
    /// What [`Lineage::foreign`] is to say from the next store on.
    pub(crate) noticed: AtomicBool,
    /// What the file looked like when this process left it alone ([`crate::foreign`]); `None` if it has no say.
    pub(crate) left: Option<Stamp>,
    /// Own writes to the file are noted.
    pub(crate) working: Option<Working>,
    /// A commit has come to where it can only be completed, and has not been: opening the replica anew does that. Until then
    /// nothing here tells what the destination holds.
    pub(crate) half_done: bool,
    /// Bytes that the next delta is expected to bring.
    pub(crate) expected: u64,
    /// A step in place is made durable every so many bytes.
    pub(crate) save_bytes: u64,
    pub(crate) recovered: Vec<String>,
    pub(crate) status: Status,
    pub(crate) lock: Option<FolderLock>,
    pub(crate) image: Option<device::ImageLock>,
}

impl Replica {
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

    /// Removes NAME.partial, durably: before the lineage forgets that it is ours.
    pub(crate) fn remove_partial(&self) -> Result<()> {
        let removed = self.destination.remove().and_then(|()| self.destination.sync());
        removed.map_err(io_error("remove the unfinished copy of", self.destination.path()))
    }

    /// Drops what of a delta is in the journal.
    pub(crate) fn drop_journal(&mut self) -> Result<()> {
        self.journal = None;
        self.remove(ARRIVING)?;
        self.remove(&device::reserved(crate::lineage::NAME))?;
        // It may have got its last name already. Nothing was merged from it.
        self.remove(WHOLE)
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
