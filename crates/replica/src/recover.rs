//! Recovery: finishing or undoing what a crash left.

use crate::destination::Name;
use crate::error::{ReplicaError, Result, SAFE, io_error};
use crate::fit::compares;
use crate::journal::{self, ARRIVING, Contents, WHOLE};
use crate::lineage::{Lineage, Stamp, StepKind};
use crate::note::{self, WRITTEN};
use crate::replica::Replica;

impl Replica {
    /// Finishes or undoes what a crash left.
    pub(crate) fn recover(&mut self) -> Result<()> {
        // After a kill, what is seen need not be durable yet; what is done now builds on it.
        self.folder.sync().map_err(io_error("sync", self.folder.path()))?;
        self.recover_partial()?;
        let whole = self.stamp(Name::Final)?;
        let had = self.lineage.epoch.is_some() || !self.positions().is_empty();
        let Some(whole) = whole else {
            if had && self.writes_to() == Name::Final {
                return self.forget();
            }
            return self.recover_journal(None);
        };
        if let Some(StepKind::NewFile { replaces, .. }) = self.lineage.step.as_ref().map(|s| s.kind) {
            // Unless it is what the seed replaces, somebody has put something in its place meanwhile.
            return match self.changed {
                _ if self.adopt => self.take(whole),
                Some(why) => Err(self.touched(why)),
                None if replaces => Ok(()),
                None => Err(ReplicaError::NotAReplica(self.destination.path().into())),
            };
        }
        if !had && !self.destination.is_device() && !self.replace {
            return if self.adopt {
                self.take(whole)
            } else {
                Err(ReplicaError::NotAReplica(self.destination.path().into()))
            };
        }
        self.recover_journal(Some(whole.clone()))?;
        // What was judged is what was left: a second look might already find somebody's write.
        self.left = self.left.take().or(Some(whole.glance()));
        Ok(())
    }

    /// Removes a NAME.partial that was made before its step could be written down: such a one is empty.
    pub(crate) fn remove_unclaimed(&self) -> Result<()> {
        match self.stamp(Name::Temporary)? {
            Some(stamp) if stamp.size == 0 => self.remove_partial(),
            _ => Ok(()),
        }
    }

    /// A new file that was to take the destination's place.
    fn recover_partial(&mut self) -> Result<()> {
        let Some(step) = self.lineage.step.clone() else { return self.remove_unclaimed() };
        let (inode, replaces) = match step.kind {
            StepKind::NewFile { inode, replaces } => (inode, replaces),
            StepKind::Clone { inode } => (inode, true),
            StepKind::InPlace => return self.remove_unclaimed(),
        };
        let epoch = step.toward.epoch;
        let is_ours = |s: &Option<Stamp>| s.as_ref().is_some_and(|s| s.inode == inode);
        let whole = self.stamp(Name::Final)?;
        if let Some(whole) = whole.clone().filter(|_| step.finished && is_ours(&whole)) {
            if let Some(why) = self.since_own_writes(&whole, &[]) {
                // Told next.
                self.changed = Some(why);
                return Ok(());
            }
            self.recovered.push(format!("epoch {epoch} had been put in place; its commit is finished now"));
            return self.renamed(&step.toward, Some(whole));
        }
        if is_ours(&self.stamp(Name::Temporary)?) {
            let cloned = matches!(step.kind, StepKind::Clone { .. });
            let left = self.lineage.stamp.as_ref().filter(|_| cloned).zip(whole);
            if step.finished && left.is_some_and(|(left, now)| left.differs(&now).is_some()) {
                // What others have done to the file that would be replaced is told next.
                return Ok(());
            }
            if step.finished {
                let copy = self.rename(replaces)?;
                self.recovered
                    .push(format!("the copy of epoch {epoch} was complete; it is put in place now"));
                return self.renamed(&step.toward, copy);
            }
            if matches!(step.kind, StepKind::NewFile { .. }) || !step.positions.is_empty() {
                return Ok(());
            }
            // Whether it was cloned already, nobody knows.
            self.remove_partial()?;
        }
        // It never became durable, or somebody has removed it: nothing is lost but time.
        self.recovered.push(format!("the unfinished copy of epoch {epoch} is gone; it is begun anew"));
        self.lineage.step = None;
        self.store()?;
        self.remove_unclaimed()
    }

    /// The destination is gone: what was known of it says nothing of a new one.
    fn forget(&mut self) -> Result<()> {
        self.recovered.push("the replica's file is gone".into());
        // What is on disk stays until another replica is begun: the file may come back.
        self.gone = true;
        self.lineage = Lineage::new();
        self.kept = false;
        Ok(())
    }

    /// What lies in the journal: merged if it is whole, kept if it can be gone on from, removed otherwise.
    fn recover_journal(&mut self, whole: Option<Stamp>) -> Result<()> {
        let Some(now) = whole else {
            // An unfinished copy may have been begun from a journal; without a destination there is nothing else to merge into.
            return self.keep_journal();
        };
        let before = self.lineage.stamp.clone();
        if before.as_ref().is_some_and(|b| b.inode != now.inode) {
            if self.adopt {
                return self.take(now);
            }
            self.changed = Some("another file has taken its place");
        }
        let deltas = journal::measure_all(&*self.folder, WHOLE)?;
        if let Some(last) = deltas.as_ref().map(|deltas| deltas.last().and_then(Contents::stream)) {
            if last.is_some() && last == self.lineage.committed {
                // Its work is done; only the removal was missing.
                self.remove(note::NAME)?;
                self.remove(WHOLE)?;
            } else if self.adopt {
                return self.take(now);
            } else if let Some(why) = self.changed.filter(|_| !self.is_compared(deltas.as_deref())) {
                return Err(self.touched(why));
            } else if last.is_none() {
                let path = self.folder.path().join(WHOLE);
                return Err(journal::damaged(&path, "it was whole once and is not any more".into()));
            } else if let Some(why) = self.since_own_writes(&now, deltas.as_deref().unwrap_or_default()) {
                return Err(self.touched(why));
            } else {
                self.left = Some(now.glance());
                let mut deltas = deltas.unwrap_or_default();
                while let Some(first) = self.first_without_room(&deltas)? {
                    deltas.truncate(first);
                }
                // Whoever was killed may not have synced what it appended last; what was never confirmed may be too long.
                let end = deltas.last().map_or(0, |last| last.start + last.bytes);
                let file = self.folder.open(WHOLE, false).and_then(|file| {
                    file.set_len(end)?;
                    file.sync()
                });
                file.map_err(io_error("sync", &self.folder.path().join(WHOLE)))?;
                return self.redo(&deltas);
            }
        }
        // A step in place has changed it itself; all else leaves it alone.
        let noted = self.has_note();
        let why = if noted || self.lineage.step.as_ref().is_some_and(|s| s.kind == StepKind::InPlace) {
            self.since_own_writes(&now, &[])
        } else {
            before.and_then(|before| before.differs(&now)).or_else(|| self.since_attached(&now))
        };
        self.changed = self.changed.or(why);
        if let Some(why) = self.changed {
            self.notice(why);
            return match (self.adopt, self.doubt) {
                (true, _) => self.take(now),
                // What lies in the journal belongs to what was there before.
                (false, true) => Ok(()),
                (false, false) => Err(self.touched(why)),
            };
        }
        self.left = Some(now.glance());
        if noted {
            self.keep_times()?;
        }
        let contents = journal::measure(&*self.folder, ARRIVING)?.unwrap_or_default();
        let again = contents.stream().is_some_and(|stream| self.has(stream));
        let merges =
            contents.whole && !again && self.writes_to() == Name::Final && self.fits_journal(&contents);
        if merges && self.has_room(&contents)? {
            let file = self.folder.open(ARRIVING, false).map_err(io_error("open", self.folder.path()))?;
            let durable = file.sync().and_then(|()| self.folder.rename(ARRIVING, WHOLE));
            durable.and_then(|()| self.folder.sync()).map_err(io_error("sync", self.folder.path()))?;
            return self.redo(&[contents]);
        }
        self.keep_journal()?;
        let unproven = self.lineage.source.is_none()
            && self.lineage.epoch.is_none()
            && self.lineage.step.is_none()
            && !self.positions().is_empty();
        if unproven && !self.adopt {
            return Err(ReplicaError::Unproven(self.destination.path().to_path_buf()));
        }
        Ok(())
    }

    /// Makes room for what a whole delta of the journal writes, before it is merged. Without it the delta is dropped, as the
    /// process would have done that received it.
    fn has_room(&mut self, contents: &Contents) -> Result<bool> {
        self.untouched()?;
        let holes = self.holes_of(ARRIVING, contents)?;
        match self.make_room(holes, false, "the replica is unchanged") {
            Err(error @ ReplicaError::Full { .. }) => {
                self.recovered.push(format!("a delta that was cut off at its end is dropped: {error}"));
                Ok(false)
            }
            made => made.map(|()| true),
        }
    }

    /// The first delta of a journal for which there is no room. All that was ever confirmed had its room before; the first one
    /// too, so if that lacks it the merge will say so.
    fn first_without_room(&mut self, deltas: &[Contents]) -> Result<Option<usize>> {
        for (number, contents) in deltas.iter().enumerate() {
            let holes = self.holes_of(WHOLE, contents)?;
            match self.make_room(holes, true, SAFE) {
                Err(ReplicaError::Full { .. }) => return Ok((number > 0).then_some(number)),
                made => made?,
            }
        }
        Ok(None)
    }

    /// True if all that is known against the destination is that others wrote to it before the journal's first delta was made,
    /// by comparing: then that mends what they did.
    fn is_compared(&self, deltas: Option<&[Contents]>) -> bool {
        let first = deltas.and_then(|deltas| deltas.first()?.segments.first());
        let marked = self.lineage.foreign && self.changed == Some(WRITTEN);
        marked && first.is_some_and(|s| compares(&s.header) && s.header.binds == Some(self.nonce()))
    }

    /// Keeps what of a delta is in the journal if it fits, removes it otherwise.
    fn keep_journal(&mut self) -> Result<()> {
        match journal::measure(&*self.folder, ARRIVING)? {
            Some(contents)
                if !contents.segments.is_empty() && !contents.whole && self.fits_journal(&contents) =>
            {
                self.journal = Some(contents);
                Ok(())
            }
            Some(_) => self.remove(ARRIVING),
            None => Ok(()),
        }
    }

    fn fits_journal(&self, contents: &Contents) -> bool {
        contents.segments.first().is_some_and(|s| s.header.resumes.is_none() && self.check(&s.header).is_ok())
    }

    /// Merges a whole journal that a crash left.
    fn redo(&mut self, deltas: &[Contents]) -> Result<()> {
        self.merge(deltas)?;
        if let (Some(epoch), ahead) = (self.lineage.epoch, self.lineage.ahead) {
            let what = if ahead { "batches after" } else { "the journal of" };
            let was = if ahead { "were" } else { "was" };
            let now = if ahead { "they are" } else { "it is" };
            self.recovered.push(format!("{what} epoch {epoch} {was} whole; {now} merged now"));
        }
        Ok(())
    }
}
