//! A replica and its readers ([`crate::past::views`] has the rules): what it holds is said whenever it rests, and what is replaced is kept for
//! them.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::commit::undo::Touched;
use crate::error::{ReplicaError, Result, disk_error, io_error};
use crate::journal::{self, Contents};
use crate::past;
use crate::past::present::{Shown, ShownResult};
use crate::past::views;
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::lineage::{State, StepKind, Unsure};

impl Replica {
    /// Looks for readers, before what a crash left is completed.
    pub(crate) fn find_readers(&mut self) -> Result<()> {
        let mut views = std::mem::take(self.views_mut());
        let disk = || self.destination().open(Name::Final).map_err(std::io::Error::other);
        let found = views.look(self.state(), &disk);
        *self.views_mut() = views;
        found.map_err(io_error("look for readers in", self.folder()))
    }

    /// The destination will be written to: from here on no reader begins, and those that have begun are known.
    pub(crate) fn announce(&mut self) -> Result<()> {
        let failed = io_error("write to", self.folder());
        if self.views_mut().begin().map_err(failed)? { self.find_readers() } else { Ok(()) }
    }

    /// The destination rests: says what it holds.
    pub(crate) fn publish(&mut self) {
        if self.sound().is_ok() {
            let held = self.held();
            self.views_mut().rest(held);
        }
    }

    /// Fails if it cannot be shown.
    pub(crate) fn showable(&self) -> Result<()> {
        let refused =
            |why| ReplicaError::Refused(format!("{} cannot be shown: {why}", self.path().display()));
        self.held().map(drop).map_err(refused)
    }

    /// What readers may see of it, or why nothing.
    fn held(&self) -> ShownResult {
        let lineage = self.lineage();
        let (Some(source), Some(epoch)) = (lineage.source, lineage.epoch) else {
            return Err("it is not complete yet: run \"dsync sync\" first".into());
        };
        let in_place = lineage.step.as_ref().is_some_and(|step| step.kind == StepKind::InPlace);
        match () {
            () if lineage.role.promoted.is_some() => Err(
                "it was promoted, and is a source itself now: \"dsync serve\" serves it, and its present moment as NAME@view"
                    .into(),
            ),
            () if lineage.role.demoted.is_some() => Err(format!(
                "it was a source until it was demoted, and is at no moment of the one that it follows until the next sync to it, which \
                 overwrites what that does not have. \"dsync serve --read-only {}\" shows it as it is",
                self.path().display()
            )),
            () if self.changed().is_some() || lineage.unsure == Unsure::Everything => Err(
                "it was modified outside dsync: \"dsync verify SRC DST\" shows what differs, and --repair overwrites it".into(),
            ),
            () if in_place || lineage.state == State::Incomplete => {
                Err("it is not complete: run \"dsync sync\" first".into())
            }
            () => Ok(Shown {
                source,
                epoch,
                ahead: lineage.is_ahead(),
                fuzzy: lineage.state == State::Fuzzy,
                at: match lineage.is_ahead() {
                    true => Some(self.now()),
                    false => past::since(self.state(), lineage, self.settings()),
                },
                size: lineage.size,
                block_size: lineage.block_size,
                state: lineage.nonce,
                inode: self.inode()?,
            }),
        }
    }

    /// The inode of the replica's file; 0 for a device.
    fn inode(&self) -> std::result::Result<u64, String> {
        if self.destination().is_device() {
            return Ok(0);
        }
        match self.stamp(Name::Final) {
            Ok(stamp) => stamp.map(|stamp| stamp.inode).ok_or_else(|| "its file is gone".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Keeps for readers what is about to be replaced, which `replaced` names.
    pub(crate) fn keep_for_readers(
        &mut self,
        replaced: impl FnOnce(&Replica) -> Result<Vec<Range<u64>>>,
    ) -> Result<()> {
        if self.views().is_empty() {
            return Ok(());
        }
        let folder = self.shared_state();
        let inode = match self.inode() {
            Ok(inode) => inode,
            Err(why) => return self.lose_readers(&format!("its file could not be looked at: {why}")),
        };
        self.views_mut().refresh(&*folder, inode);
        if self.views().is_empty() {
            return Ok(());
        }
        let (ranges, from) = (replaced(self)?, self.lineage().nonce);
        let failed = disk_error("write to", folder.path(), crate::error::SAFE);
        self.views_mut().keep(&*folder, &ranges, from).map_err(failed)
    }

    /// What deltas of a journal replace.
    pub(crate) fn replaced_by(&self, name: &str, deltas: &[Contents]) -> Result<Vec<Range<u64>>> {
        let mut touched = Touched::new(self.lineage());
        let mut positions = self.positions();
        for contents in deltas {
            let failed = io_error("read", self.path());
            journal::replay(self.state(), name, contents, &mut touched, &mut positions, failed)?;
        }
        Ok(touched.ranges().collect())
    }

    /// Ends all views: what comes next is not kept for their readers.
    pub(crate) fn lose_readers(&mut self, why: &str) -> Result<()> {
        let folder = self.shared_state();
        let lost = self.views_mut().lose(&*folder, why);
        lost.map_err(io_error("write to", folder.path()))
    }

    /// Tries once more without readers where there is no room.
    pub(crate) fn at_readers_cost<T>(&self, mut make: impl FnMut() -> Result<T>) -> Result<T> {
        match make() {
            Err(ReplicaError::Full { .. }) if self.readers_give_way() => make(),
            made => made,
        }
    }

    /// True if `needed` bytes may find room where `free` are, once readers have lost and the past was dropped; also where that cannot be
    /// told. Otherwise neither is to be given up in vain.
    pub(crate) fn may_find(&self, needed: u64, free: u64) -> bool {
        let gives = self.settings().is_some() && !self.rewinds();
        past::findable(self.state(), self.lineage().nonce, gives) >= needed.saturating_sub(free)
    }

    /// [`Replica::may_find`] on the file system of the destination, which may not be that of the past.
    pub(crate) fn may_find_here(&self, needed: u64, free: u64) -> bool {
        let device = |path: Option<&Path>| Some(path?.metadata().ok()?.dev());
        let (past, here) = (device(Some(self.state().path())), device(self.path().parent()));
        past.zip(here).is_none_or(|(past, here)| past == here) && self.may_find(needed, free)
    }

    /// Makes room at the cost of readers. True if that may have made some.
    pub(crate) fn readers_give_way(&self) -> bool {
        views::give_way(self.state())
    }
}
