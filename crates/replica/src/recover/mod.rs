//! Recovery: completing or rolling back what a crash left. [`table`] decides, here it is carried out.

mod table;

use delta::{Header, Method};
use uuid::Uuid;

use crate::commit::holes::Holes;
use crate::error::{INTERRUPTED, ReplicaError, Result, SAFE, io_error};
use crate::journal::last_writes::LastWrites;
use crate::journal::{self, ARRIVING, Contents, WHOLE, compares};
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::intent::Intent;
use crate::state::lineage::{self, Lineage, Stamp, StepKind, Toward, Unsure};
use crate::state::note::{self, Foreign};
use table::{
    Action, Arriving, Column, Content, End, File, Purpose, Refusal, Repair, Sealed, Situation, Stage, decide,
};

/// What was found so far.
struct Found {
    situation: Situation,
    /// What is at the destination.
    now: Option<Stamp>,
    /// In what way others have changed it.
    why: Option<Foreign>,
    /// What `journal-whole` holds.
    deltas: Vec<Contents>,
    /// What `journal` holds.
    arriving: Option<Contents>,
}

impl Replica {
    /// Completes or rolls back what a crash left.
    pub(crate) fn recover(&mut self) -> Result<()> {
        // After a kill, what is seen need not be durable yet; what is done now builds on it.
        self.state().sync().map_err(io_error("sync", self.folder()))?;
        // A commit that was cut off after it had written its set has no room for another.
        self.sweep(self.state().open(WHOLE, false).is_ok())?;
        let mut found = self.look()?;
        let end = loop {
            match decide(&found.situation) {
                Action::Look(Column::Sealed) => self.look_at_sealed(&mut found)?,
                Action::Look(Column::Content) => self.look_at_content(&mut found)?,
                Action::Look(Column::Arriving) => self.look_at_arriving(&mut found)?,
                Action::Change(change) => self.change(change, &mut found)?,
                Action::End(end) => break end,
            }
        };
        self.end(end, &mut found)?;
        // What was judged is what was left: a second look might already find another program's write.
        if self.left().is_none() {
            self.set_left(found.now.map(Stamp::glance));
        }
        Ok(())
    }

    /// Makes a change, and brings what was found up to date.
    fn change(&mut self, change: Repair, found: &mut Found) -> Result<()> {
        match change {
            Repair::RemoveStray => self.remove_partial()?,
            Repair::DropStep => self.drop_step(found.situation.file)?,
            Repair::FinishRename => self.finish_rename(found.now.clone())?,
            Repair::FinishInDoubt => self.finish_in_doubt()?,
            Repair::PutInPlace => self.put_in_place()?,
            Repair::GiveUpSealed => self.give_up_sealed(found)?,
            Repair::DropMerged => {
                self.remove(note::NAME)?;
                self.remove(WHOLE)?;
                found.situation.sealed = Sealed::None;
                return Ok(());
            }
            Repair::TakeTimes => {
                self.keep_times()?;
                found.situation.content = self.proven();
                return Ok(());
            }
            Repair::MakeRoom => {
                let room = found.arriving.as_ref().map_or(Ok(false), |contents| self.has_room(contents))?;
                found.situation.arriving = if room { Arriving::HasRoom } else { Arriving::Useless };
                return Ok(());
            }
            Repair::DropArriving => {
                self.remove(ARRIVING)?;
                found.situation.arriving = Arriving::None;
                return Ok(());
            }
        }
        *found = self.look()?;
        Ok(())
    }

    fn end(&mut self, end: End, found: &mut Found) -> Result<()> {
        let path = || self.path().to_path_buf();
        let why = found.why.unwrap_or(Foreign::Written);
        match end {
            End::Open => Ok(()),
            End::Forget => self.forget(),
            End::Merge => self.merge_sealed(std::mem::take(&mut found.deltas)),
            End::SealAndMerge => {
                found.arriving.take().map_or(Ok(()), |contents| self.seal_and_merge(contents))
            }
            End::KeepArriving => {
                self.set_journal(found.arriving.take());
                Ok(())
            }
            End::Adopt => {
                found.why.iter().for_each(|why| self.notice(*why));
                found.now.clone().into_iter().for_each(|now| self.take(now));
                Ok(())
            }
            End::OpenInDoubt => {
                self.notice(why);
                self.set_changed(Some(why));
                Ok(())
            }
            End::Refuse(Refusal::Changed) => Err(self.touched(why)),
            End::Refuse(Refusal::NotAReplica) => Err(ReplicaError::NotAReplica(path())),
            End::Refuse(Refusal::Unproven) => Err(ReplicaError::Unproven(path())),
            End::Refuse(Refusal::Damaged) => Err(journal::damaged(
                &self.folder().join(WHOLE),
                "it does not begin with a whole delta any more".into(),
            )),
        }
    }
}

/// Looking.
impl Replica {
    /// Looks at what the lineage says and at the files' names.
    fn look(&self) -> Result<Found> {
        let (now, partial) = (self.stamp(Name::Final)?, self.stamp(Name::Temporary)?);
        let has = |stamp: &Option<Stamp>, inode| stamp.as_ref().is_some_and(|stamp| stamp.inode == inode);
        let under_way = self.lineage().step.as_ref();
        let (step, inode) = match under_way.map(|step| (step.kind, step.finished)) {
            None => (Stage::None, None),
            Some((StepKind::InPlace, _)) => (Stage::InPlace, None),
            Some((StepKind::NewFile { inode, .. }, true)) => (Stage::NewFileFinished, Some(inode)),
            Some((StepKind::NewFile { inode, .. }, false)) => (Stage::NewFile, Some(inode)),
            Some((StepKind::Clone { inode }, true)) => (Stage::CloneFinished, Some(inode)),
            Some((StepKind::Clone { inode }, false)) if self.begins_anew() => {
                (Stage::ClonePending, Some(inode))
            }
            Some((StepKind::Clone { inode }, false)) => (Stage::Clone, Some(inode)),
        };
        let file = match inode {
            Some(inode) if has(&now, inode) => File::InPlace,
            Some(inode) if has(&partial, inode) => File::Beside,
            None if partial.is_some_and(|partial| partial.size == 0) => File::Stray,
            _ => File::None,
        };
        let asked = match (self.options().adopt, self.options().doubt) {
            (true, _) => Purpose::Adopt,
            (false, true) => Purpose::Doubt,
            (false, false) => Purpose::Use,
        };
        let (sealed, content, arriving) = (Sealed::Unseen, Content::Unseen, Arriving::Unseen);
        let situation = Situation { step, file, sealed, content, arriving, asked };
        Ok(Found { situation, now, why: None, deltas: Vec::new(), arriving: None })
    }

    fn look_at_sealed(&self, found: &mut Found) -> Result<()> {
        let nothing = found.now.is_none() || found.situation.step == Stage::NewFile;
        let measured = if nothing { Ok(None) } else { journal::measure_all(self.state(), WHOLE) };
        let deltas = match measured {
            // Its user has all of it compared.
            Err(_) if self.options().adopt => {
                found.situation.sealed = Sealed::Damaged;
                return Ok(());
            }
            measured => measured?,
        };
        let last = deltas.as_ref().map(|deltas| deltas.last().and_then(Contents::stream));
        found.situation.sealed = match last {
            None => Sealed::None,
            // Nothing was merged from it: it was made durable before it got its name, and then emptied.
            Some(None) if self.is_empty(WHOLE)? => Sealed::Merged,
            Some(None) => Sealed::Damaged,
            Some(last) if last == self.lineage().committed => Sealed::Merged,
            Some(_) if deltas.as_ref().is_some_and(|deltas| self.outlives_adoption(deltas)) => Sealed::Merged,
            Some(_) => Sealed::Whole,
        };
        found.deltas = deltas.unwrap_or_default();
        Ok(())
    }

    /// True if a file of the state has nothing in it.
    fn is_empty(&self, name: &str) -> Result<bool> {
        let len = self.state().open(name, false).and_then(|file| file.len());
        Ok(len.map_err(io_error("look at", &self.folder().join(name)))? == 0)
    }

    /// True if the deltas are from before the destination was adopted: only their removal was missing.
    fn outlives_adoption(&self, deltas: &[Contents]) -> bool {
        let first = deltas.first().and_then(|delta| delta.segments.first());
        self.proven() == Content::Unproven && first.is_none_or(|s| s.header.binds != Some(self.nonce()))
    }

    fn look_at_content(&mut self, found: &mut Found) -> Result<()> {
        let Situation { step, file, sealed, .. } = found.situation;
        let known = self.lineage().epoch.is_some() || !self.positions().is_empty();
        let Some(now) = &found.now else {
            found.situation.content = if known { Content::Gone } else { Content::None };
            return Ok(());
        };
        let finished = matches!(step, Stage::NewFileFinished | Stage::CloneFinished);
        let seeds = matches!(step, Stage::NewFile | Stage::NewFileFinished);
        let unknown = match self.lineage().step.as_ref().filter(|_| seeds) {
            Some(step) => !step.kind.replaces(),
            None => !known && !self.destination().is_device() && !self.options().replace,
        };
        found.why = match (finished, file) {
            (true, File::InPlace) => self.since_own_writes(now, &[])?,
            _ if seeds => self.changed(),
            _ if unknown => None,
            _ => self.changed_since(now, sealed, &found.deltas)?,
        };
        found.situation.content = match found.why {
            Some(_) => Content::Changed,
            None if unknown => Content::Unknown,
            None => {
                self.set_left(Some(now.clone().glance()));
                match self.has_note()? {
                    true => Content::Reserved,
                    false if self.differs_in_attributes(now) => {
                        self.tell(format!(
                            "the owner, mode, name or links of {} were changed outside dsync; its content is as old as it was left, and is \
                             taken for what it was",
                            self.path().display()
                        ));
                        Content::Reserved
                    }
                    false => self.proven(),
                }
            }
        };
        Ok(())
    }

    /// In what way others have changed the destination since the lineage was stored, or since own writes that came later.
    fn changed_since(&self, now: &Stamp, sealed: Sealed, deltas: &[Contents]) -> Result<Option<Foreign>> {
        let before = self.lineage().stamp.as_ref();
        if before.is_some_and(|before| !before.is_of_file(now)) {
            return Ok(Some(Foreign::OtherFile));
        }
        if let Some(why) = self.changed().filter(|_| !self.is_compared(deltas)) {
            return Ok(Some(why));
        }
        if self.is_copied(now)? {
            return Ok(Some(Foreign::Copied));
        }
        let in_place = self.lineage().step.as_ref().is_some_and(|step| step.kind == StepKind::InPlace);
        match sealed {
            Sealed::Damaged => Ok(None),
            Sealed::Whole => self.since_own_writes(now, deltas),
            // Own writes have changed it; all else leaves it alone.
            _ if in_place || self.has_note()? => self.since_own_writes(now, &[]),
            _ => match before.and_then(|before| before.differs(now)) {
                None => self.since_attached(now),
                Some(_) if self.differs_in_attributes(now) => Ok(None),
                differs => Ok(differs),
            },
        }
    }

    /// True if others have changed the owner, mode, name or links of its file since the lineage was stored, and that is all.
    fn differs_in_attributes(&self, now: &Stamp) -> bool {
        let before = self.lineage().stamp.as_ref();
        let alone = before.is_some_and(|before| before.differs_in_attributes(now));
        alone && self.lineage().step.is_none() && self.destination().times_writes()
    }

    /// True if all that is known against the destination is that others wrote to it before the journal's first delta was made,
    /// by comparing: then that mends what they did.
    fn is_compared(&self, deltas: &[Contents]) -> bool {
        let first = deltas.first().and_then(|delta| delta.segments.first());
        let marked = self.lineage().unsure == Unsure::Everything && self.changed() == Some(Foreign::Written);
        marked && first.is_some_and(|s| compares(&s.header) && s.header.binds == Some(self.nonce()))
    }

    fn proven(&self) -> Content {
        let Lineage { source, epoch, step, .. } = &self.lineage();
        let proven = source.is_some() || epoch.is_some() || step.is_some() || self.positions().is_empty();
        if proven { Content::AsLeft } else { Content::Unproven }
    }

    fn look_at_arriving(&self, found: &mut Found) -> Result<()> {
        found.arriving = match journal::measure(self.state(), ARRIVING) {
            // Its user has all of it compared.
            Err(_) if self.options().adopt => {
                found.situation.arriving = Arriving::Useless;
                return Ok(());
            }
            measured => measured?,
        };
        let group = match found.arriving.as_ref().and_then(Contents::stream) {
            Some(stream) if !self.has(stream) => match self.committed_by_group(stream) {
                // Its user has all of it compared.
                Err(_) if self.options().adopt => Some(false),
                // What is not whole was never committed, but for damage, of which nothing tells then.
                Err(ReplicaError::Away(_)) if found.arriving.as_ref().is_some_and(|part| !part.whole) => {
                    Some(false)
                }
                committed => committed?,
            },
            Some(_) => None,
            None if self.options().adopt => None,
            None => self.missing_commit()?,
        };
        found.situation.arriving = match &found.arriving {
            None => Arriving::None,
            Some(contents) if group == Some(true) => match contents.whole && self.fits_journal(contents) {
                true => Arriving::Committed,
                false if self.options().adopt => Arriving::Useless,
                false => return Err(self.lost_journal()),
            },
            Some(contents) if contents.segments.is_empty() || !self.fits_journal(contents) => {
                Arriving::Useless
            }
            // It leads to no epoch: by the name of the one before, the delta of another branch would go on from it.
            Some(contents) if !contents.whole && contents.leads_nowhere() => Arriving::Useless,
            Some(contents) if !contents.whole => Arriving::Part,
            Some(contents) if contents.stream().is_some_and(|stream| self.has(stream)) => Arriving::Useless,
            // A repair of one member is not its group's to commit.
            Some(contents) if group == Some(false) && contents.leads_nowhere() => Arriving::Useless,
            // The group has not committed it, and nobody else will.
            Some(_) if group == Some(false) => Arriving::Part,
            Some(_) => Arriving::Complete,
        };
        if found.situation.arriving == Arriving::Part {
            found.arriving = found.arriving.take().map(Contents::without_trailer);
        }
        Ok(())
    }

    /// Whether the replica's group has committed this delta; `None` if it is in none.
    fn committed_by_group(&self, stream: Uuid) -> Result<Option<bool>> {
        let Some(group) = &self.lineage().group else { return Ok(None) };
        let path = group.folder_for(self.path());
        let folder = self.destination().group(group).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => ReplicaError::Away(format!(
                "the folder of the group {0}, {1}, is missing: it says whether a commit of {2} is to be completed. Put it back; if it is \
                 gone for good, \"dsync sync --adopt --group {0} DIR\" compares all of its replicas with their sources and overwrites what differs",
                group.name,
                path.display(),
                self.path().display()
            )),
            _ => io_error("open", &path)(e),
        })?;
        let committed = Intent::read(&*folder)?.is_some_and(|intent| intent.commits(stream));
        if committed {
            // What is seen need not be durable yet, and what is merged now builds on it.
            folder.sync().map_err(io_error("sync", &path))?;
        }
        Ok(Some(committed))
    }

    /// Fails if the replica's group has committed a delta of which the journal has nothing any more.
    fn missing_commit(&self) -> Result<Option<bool>> {
        let Some(group) = &self.lineage().group else { return Ok(None) };
        let folder = match self.destination().group(group) {
            Ok(folder) => folder,
            // Without its folder nothing can be missed that was there.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error("open", &group.folder_for(self.path()))(e)),
        };
        let Some(intent) = Intent::read(&*folder)? else { return Ok(None) };
        let named = intent.of(self.path()).filter(|member| {
            Some(member.source) == self.lineage().source
                && member.stream.is_some_and(|stream| !self.has(stream))
                && self.lineage().epoch.is_some_and(|epoch| member.epoch.number > epoch.number)
        });
        if named.is_some() { Err(self.lost_journal()) } else { Ok(None) }
    }

    /// The error where the group has committed what the journal does not hold any more.
    fn lost_journal(&self) -> ReplicaError {
        let group = self.lineage().group.as_ref().map_or("", |group| &group.name);
        ReplicaError::Damaged {
            path: self.folder().join(ARRIVING),
            why: "its group has committed what it held".into(),
            way_out: format!(
                "\"dsync sync --adopt --group {group} DIR\" compares all of its replicas with their sources and overwrites what differs"
            ),
        }
    }

    fn fits_journal(&self, contents: &Contents) -> bool {
        contents.segments.first().is_some_and(|s| s.header.resumes.is_none() && self.check(&s.header).is_ok())
    }
}

/// Acting.
impl Replica {
    /// Forgets a step whose file is of no use.
    fn drop_step(&mut self, file: File) -> Result<()> {
        if file == File::Beside {
            self.remove_partial()?;
        }
        if let Some(step) = self.lineage_mut().step.take() {
            let epoch = step.toward.epoch;
            self.tell(format!("the unfinished copy of epoch {epoch} is gone; the next sync begins another"));
        }
        self.store()
    }

    /// Moves the lineage to a step whose file, `copy`, has its last name.
    fn finish_rename(&mut self, copy: Option<Stamp>) -> Result<()> {
        let Some(toward) = self.lineage().step.as_ref().map(|step| step.toward.clone()) else {
            return Ok(());
        };
        self.tell(format!("epoch {} was in place; its commit has been completed", toward.epoch));
        self.note_arrival(lineage::NAME);
        self.renamed(&toward, copy)
    }

    /// Moves the lineage to a step whose file has its last name and was written to by others since: what it holds has to be compared.
    fn finish_in_doubt(&mut self) -> Result<()> {
        let Some(toward) = self.lineage().step.as_ref().map(|step| step.toward.clone()) else {
            return Ok(());
        };
        self.destination().sync().map_err(io_error("sync the folder of", self.path()))?;
        let stamp = self.destination().settle().map_err(io_error("flush", self.path()))?;
        self.note_arrival(lineage::NAME);
        let at = self.arrived(&toward);
        let after = self.lineage().after(&toward, stamp.clone(), Unsure::Nothing, at);
        self.advance(Lineage { unsure: Unsure::Everything, ..after }, stamp.glance())?;
        self.forget_note()
    }

    /// Gives up what may be half merged into what others have written to since: all of that has to be compared.
    fn give_up_sealed(&mut self, found: &Found) -> Result<()> {
        let compared = found.deltas.first().and_then(|delta| delta.segments.first());
        let compared = compared.is_some_and(|segment| compares(&segment.header));
        // The mark first: without the journal nothing else says that it is half merged.
        let lineage = self.lineage_mut();
        lineage.unsure = Unsure::Everything;
        lineage.step.iter_mut().for_each(|step| step.unsure = Unsure::Everything);
        if compared {
            // Bound to this state, it would pass for what mends what the mark says.
            lineage.nonce = Uuid::new_v4();
            lineage.step.iter_mut().for_each(|step| step.nonce = Uuid::new_v4());
        }
        self.store()?;
        self.set_changed(Some(found.why.unwrap_or(Foreign::Written)));
        self.remove(WHOLE)?;
        self.remove(note::NAME)
    }

    /// Ends a step whose file is complete.
    fn put_in_place(&mut self) -> Result<()> {
        let Some((kind, toward)) = self.lineage().step.as_ref().map(|step| (step.kind, step.toward.clone()))
        else {
            return Ok(());
        };
        self.note_arrival(lineage::NAME);
        self.reserve()?;
        self.work_noted(false, INTERRUPTED)?;
        let copy = self.rename(kind.replaces())?;
        self.tell(format!("the copy of epoch {} was complete and has been put in place", toward.epoch));
        self.renamed(&toward, copy)
    }

    /// The destination is gone: what was known of it says nothing of a new one.
    fn forget(&mut self) -> Result<()> {
        let past = match self.has_past_of(self.lineage().nonce) {
            true => {
                ", and a new replica begins without the moments that are kept of it: if the file was only moved, put it back to keep them"
            }
            false => "",
        };
        self.tell(format!("the replica's file is gone{past}"));
        // What is on disk stays until another replica is begun: the file may come back.
        self.set_gone(true);
        self.start_over(Lineage::new());
        Ok(())
    }

    /// Makes room for what a whole delta of the journal writes, before it is merged. Without it the delta is dropped, as the
    /// process would have done that received it.
    fn has_room(&mut self, contents: &Contents) -> Result<bool> {
        self.untouched()?;
        let holes = self.holes_of(ARRIVING, contents)?;
        let state = "the replica is unchanged";
        match self.reserve_unsure(contents, state).and_then(|()| self.make_room(holes, false, state)) {
            Err(error @ ReplicaError::Full { .. }) => {
                self.tell(format!("a delta that was interrupted at its end was dropped: {error}"));
                Ok(false)
            }
            made => made.map(|()| true),
        }
    }

    fn seal_and_merge(&mut self, contents: Contents) -> Result<()> {
        // What is kept from here on, a mirror's log does not know of.
        self.close_logs()?;
        // A comparison may have been begun in doubt: what it replaces is then none of the source's states.
        let doubts = |header: &Header| header.method != Method::Tracked && !header.partial;
        let touched = match contents.segments.iter().any(|segment| doubts(&segment.header)) {
            true => {
                if !self.options().doubt && self.settings().is_some() && self.has_past_of(self.nonce()) {
                    self.give_up_past("a comparison was interrupted at its end, and may have been a repair");
                }
                None
            }
            false => self.touched_of(ARRIVING, &contents)?,
        };
        if let Some(toward) = contents.segments.last().and_then(|s| Toward::of(&s.header)) {
            self.keep_past(touched, &toward)?;
        }
        // The file's time says when it arrived.
        self.note_arrival(ARRIVING);
        let failed = |what| io_error(what, self.folder());
        let file = self.state().open(ARRIVING, false).map_err(failed("open"))?;
        // What followed was never confirmed, and nothing of what it replaces is kept.
        if file.len().map_err(failed("look at"))? != contents.bytes {
            file.set_len(contents.bytes).map_err(failed("cut"))?;
        }
        journal::seal(&*file, self.state()).map_err(failed("sync"))?;
        self.redo(&[contents])
    }

    /// Merges what was sealed, all of it: nothing tells which of its batches were confirmed, and some may be half merged. Where there is no room for
    /// that, the journal stays, and the replica is not opened until there is.
    fn merge_sealed(&mut self, deltas: Vec<Contents>) -> Result<()> {
        self.ask_for_room(&deltas)?;
        // A process that was killed may not have synced what it appended last; what is not whole was never confirmed.
        let end = deltas.last().map_or(0, |last| last.start + last.bytes);
        // Its time says when it arrived, and is left alone where nothing is cut off.
        self.note_arrival(WHOLE);
        let file = self.state().open(WHOLE, false).and_then(|file| {
            if file.len()? != end {
                file.set_len(end)?;
            }
            file.sync()
        });
        file.map_err(io_error("sync", &self.folder().join(WHOLE)))?;
        self.complete_log(&deltas)?;
        self.redo(&deltas)
    }

    /// Has readers make room for what is to be merged. If there is none all the same, the merge says so, as far as it comes: what was confirmed had its
    /// room, but for what a later batch has trimmed, which is then the one that counts there.
    fn ask_for_room(&mut self, deltas: &[Contents]) -> Result<()> {
        let last = LastWrites::of(self.state(), WHOLE, deltas)?;
        for (number, contents) in deltas.iter().enumerate() {
            let holes = self.holes_of_one(WHOLE, contents, number, last.as_ref())?;
            match self.make_room(holes.map(Holes::keeping), true, SAFE) {
                Err(ReplicaError::Full { .. }) => {}
                made => made?,
            }
        }
        Ok(())
    }

    /// Merges a whole journal that a crash left.
    fn redo(&mut self, deltas: &[Contents]) -> Result<()> {
        self.merge(deltas, None)?;
        if let (Some(epoch), ahead) = (self.lineage().epoch, self.lineage().is_ahead()) {
            self.tell(match ahead {
                true => format!("batches after epoch {epoch} were whole and have been merged"),
                false => format!("the journal of epoch {epoch} was whole and has been merged"),
            });
        }
        Ok(())
    }
}
