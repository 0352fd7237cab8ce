//! A replica that is held alone: its parts, and what every use of it needs.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use delta::Epoch;
use device::{Disk, Folder, FolderLock, ImageLock};
use lineage::Lives;
use uuid::Uuid;

use crate::error::{ReplicaError, Result, disk_error, io_error};
use crate::journal::unsure::{self, UnsureSet};
use crate::journal::{ARRIVING, Contents, WHOLE};
use crate::past::PastSettings;
use crate::past::views::Views;
use crate::state::destination::{Destination, Name};
use crate::state::lineage::{Lineage, Position, Stamp, State, StepKind, Toward, Unsure};
use crate::state::note::{Foreign, Working};
use crate::state::options::ReplicaOptions;
use crate::state::role::{FIRST_TERM, Role};
use crate::status::Status;

/// How many bytes may be written before what has come is made durable: as much is sent again after a crash.
pub(crate) const SAVE_BYTES: u64 = 64 << 20;

/// A destination with its lineage, held alone and in order: whatever a crash left was finished or undone when it was opened.
pub struct Replica {
    destination: Box<dyn Destination>,
    folder: Arc<dyn Folder>,
    /// What it knows of itself: on disk as of the last store.
    lineage: Lineage,
    /// The lineage is on disk.
    kept: bool,
    /// The part of a delta in the journal.
    journal: Option<Contents>,
    options: ReplicaOptions,
    /// What of its past is kept; `None` if nothing is.
    settings: Option<PastSettings>,
    /// Bytes that the next delta is expected to bring.
    expected: ExpectedBytes,
    /// Bytes that passes over a live disk have written for the next commit.
    passed: u64,
    /// A step in place is made durable every so many bytes.
    save_bytes: u64,
    known: Known,
    /// Others were told that it is written to, and whether that it goes back.
    heralded: Option<bool>,
    status: Status,
    /// What is kept for readers.
    views: Views,
    locks: Locks,
}

/// What is known of the bytes of data that the next delta brings: where room is short, the past gives way only if that helps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpectedBytes {
    /// Nothing.
    #[default]
    Unknown,
    /// So many, or less.
    AtMost(u64),
    /// Nothing, but the delta can be sent twice: where room runs out it is counted to its end, and comes again.
    Countable,
}

/// What this process alone knows.
///
/// More than fifteen fields: each is one thing that was found or done since the opening, and asked for by itself.
#[derive(Default)]
struct Known {
    /// What it was recorded to hold before it was adopted.
    former: Option<Box<Status>>,
    /// There was a replica, and its file is gone.
    gone: bool,
    /// A commit has come to where it can only be completed, and has not been: opening the replica anew does that. Until then
    /// nothing here tells what the destination holds.
    half_done: bool,
    /// In what way others have changed the destination.
    changed: Option<Foreign>,
    /// From the next store on [`Lineage::unsure`] is to say everything.
    noticed: AtomicBool,
    /// Where the replica wrote that this process adopts, while the state in the folder is still that replica's.
    adopts: Option<Name>,
    /// Unsure sets were kept since the lineage was stored.
    named: bool,
    /// What the file looked like when this process left it alone ([`crate::foreign`]); `None` if it has no say.
    left: Option<Stamp>,
    /// Own writes to the file are noted.
    working: Option<Working>,
    /// Own writes of an earlier process did not end in order.
    unclean: bool,
    /// Waits for the commit of the group.
    prepared: Option<PreparedCommit>,
    /// The replica goes back to an earlier moment: none is dropped to make room.
    rewinds: bool,
    /// When the last of what is committed arrived, in seconds since 1970, if that was earlier than now.
    arrived: Option<u64>,
    /// Epochs of the source before that of the seed that comes.
    before: Vec<Epoch>,
    /// What opening it had to mend.
    recovered: Vec<String>,
    /// What its user should know of a commit.
    warnings: Vec<String>,
}

/// A whole delta in the journal that waits for the commit of the group.
pub(crate) struct PreparedCommit {
    /// The journal.
    pub contents: Contents,
    /// What it makes of the replica.
    pub toward: Toward,
    /// Bytes written and read for it so far.
    pub cost: (u64, u64),
}

/// The locks that keep other processes away.
#[derive(Default)]
struct Locks {
    folder: Option<FolderLock>,
    image: Option<ImageLock>,
}

/// What it consists of.
impl Replica {
    /// A replica of these parts, not judged yet.
    pub(crate) fn new(
        destination: Box<dyn Destination>,
        folder: Box<dyn Folder>,
        lineage: Option<Lineage>,
        options: &ReplicaOptions,
    ) -> Replica {
        Replica {
            destination,
            folder: folder.into(),
            kept: lineage.is_some(),
            lineage: lineage.unwrap_or_else(Lineage::new),
            journal: None,
            options: options.clone(),
            settings: None,
            expected: ExpectedBytes::default(),
            passed: 0,
            save_bytes: SAVE_BYTES,
            known: Known::default(),
            heralded: None,
            status: Status::nothing(),
            views: Views::default(),
            locks: Locks::default(),
        }
    }

    /// Holds the locks as long as the replica lives.
    pub(crate) fn hold(&mut self, folder: FolderLock, image: Option<ImageLock>) {
        self.locks = Locks { folder: Some(folder), image };
    }

    pub(crate) fn destination(&self) -> &dyn Destination {
        &*self.destination
    }

    /// What is kept for readers.
    pub(crate) fn views(&self) -> &Views {
        &self.views
    }

    pub(crate) fn views_mut(&mut self) -> &mut Views {
        &mut self.views
    }

    /// The files of the replica's state.
    pub(crate) fn state(&self) -> &dyn Folder {
        &*self.folder
    }

    /// The files of the replica's state, for another thread.
    pub(crate) fn shared_state(&self) -> Arc<dyn Folder> {
        self.folder.clone()
    }

    pub(crate) fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    /// The lineage in memory; it becomes durable with [`Replica::store`].
    pub(crate) fn lineage_mut(&mut self) -> &mut Lineage {
        &mut self.lineage
    }

    /// True if the lineage is on disk.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept
    }

    /// Goes on from another lineage, without the one on disk, which stays until the next store.
    pub(crate) fn start_over(&mut self, lineage: Lineage) {
        let former = std::mem::replace(&mut self.lineage, lineage);
        self.kept = false;
        let recorded = former.source.zip(former.epoch).map(|(source, epoch)| Status {
            ahead: former.is_ahead(),
            block_size: former.block_size,
            role: former.role,
            ..Status::at(source, epoch, former.size)
        });
        self.known.former = recorded.map(Box::new);
    }

    /// The part of a delta in the journal.
    pub(crate) fn journal(&self) -> Option<&Contents> {
        self.journal.as_ref()
    }

    /// Sets what the next delta may go on from, and returns what that was.
    pub(crate) fn set_journal(&mut self, contents: Option<Contents>) -> Option<Contents> {
        std::mem::replace(&mut self.journal, contents)
    }

    pub(crate) fn options(&self) -> &ReplicaOptions {
        &self.options
    }

    /// Announces that it is written to from now on, once, and once more where what it will hold does not follow what it held.
    pub(crate) fn herald(&mut self, goes_back: bool) -> Result<()> {
        if self.heralded >= Some(goes_back) {
            return Ok(());
        }
        if let Some(herald) = &self.options.herald {
            herald.ask(self.destination.path(), goes_back)?;
        }
        self.heralded = Some(goes_back);
        Ok(())
    }

    /// Announces a step after which it does not hold what follows what it held, whatever was announced before.
    pub(crate) fn herald_back(&mut self) -> Result<()> {
        self.heralded = None;
        self.herald(true)
    }

    /// What of its past is kept; `None` if nothing is.
    pub(crate) fn settings(&self) -> Option<&PastSettings> {
        self.settings.as_ref()
    }

    pub(crate) fn set_settings(&mut self, settings: Option<PastSettings>) {
        self.settings = settings;
    }

    /// Bytes that the next delta brings at most; 0 if unknown.
    pub(crate) fn expected(&self) -> u64 {
        match self.expected {
            ExpectedBytes::AtMost(bytes) => bytes,
            ExpectedBytes::Unknown | ExpectedBytes::Countable => 0,
        }
    }

    /// True if a delta of unknown size may be counted first.
    pub(crate) fn counts(&self) -> bool {
        self.expected == ExpectedBytes::Countable
    }

    /// All of a delta was counted, and there may be room for it.
    pub(crate) fn counted(&mut self, bytes: u64) {
        self.expected = ExpectedBytes::AtMost(bytes);
    }

    /// A step in place is made durable every so many bytes.
    pub(crate) fn save_bytes(&self) -> u64 {
        self.save_bytes
    }

    #[cfg(test)]
    pub(crate) fn save_every(&mut self, bytes: u64) {
        self.save_bytes = bytes;
    }
}

/// What this process knows.
impl Replica {
    /// True if there was a replica, and its file is gone.
    pub(crate) fn is_gone(&self) -> bool {
        self.known.gone
    }

    pub(crate) fn set_gone(&mut self, gone: bool) {
        self.known.gone = gone;
    }

    /// A commit has come to where it can only be completed: if something fails from here on, by the next opening.
    pub(crate) fn begin_commit(&mut self) -> Result<()> {
        self.known.half_done = true;
        self.announce()
    }

    /// A commit that could only be completed has been.
    pub(crate) fn end_commit(&mut self) {
        self.known.half_done = false;
        self.publish();
    }

    /// What waits for the commit of the group.
    pub(crate) fn prepared(&self) -> Option<&PreparedCommit> {
        self.known.prepared.as_ref()
    }

    /// A pass has written so many bytes.
    pub(crate) fn count_pass(&mut self, written: u64) {
        self.passed += written;
    }

    /// What passes have written for what is committed now.
    pub(crate) fn take_passed(&mut self) -> u64 {
        std::mem::take(&mut self.passed)
    }

    pub(crate) fn set_prepared(&mut self, prepared: Option<PreparedCommit>) {
        self.known.prepared = prepared;
    }

    pub(crate) fn take_prepared(&mut self) -> Option<PreparedCommit> {
        self.known.prepared.take()
    }

    /// True while it goes back to an earlier moment.
    pub(crate) fn rewinds(&self) -> bool {
        self.known.rewinds
    }

    pub(crate) fn set_rewinds(&mut self, rewinds: bool) {
        self.known.rewinds = rewinds;
    }

    /// When the last of what is committed arrived, if that was noted; it is then noted anew.
    pub(crate) fn arrival_mut(&mut self) -> &mut Option<u64> {
        &mut self.known.arrived
    }

    /// Keeps in mind what opening the replica had to mend.
    pub(crate) fn tell(&mut self, mended: String) {
        self.known.recovered.push(mended);
    }

    /// Keeps in mind what the user should know of a commit.
    pub(crate) fn warn(&mut self, warning: String) {
        if !self.known.warnings.contains(&warning) {
            self.known.warnings.push(warning);
        }
    }

    /// In what way others have changed the destination.
    pub(crate) fn changed(&self) -> Option<Foreign> {
        self.known.changed
    }

    pub(crate) fn set_changed(&mut self, why: Option<Foreign>) {
        self.known.changed = why;
    }

    /// The next store records that others have written to it. Returns whether it would have anyway.
    pub(crate) fn mark_noticed(&self) -> bool {
        self.known.noticed.swap(true, SeqCst)
    }

    /// What others wrote is no longer there.
    pub(crate) fn clear_noticed(&mut self) {
        self.known.noticed = AtomicBool::new(false);
    }

    /// Keeps in mind that nothing in the folder is of what was adopted: `wrote` is where the step before would have written.
    pub(crate) fn adopt(&mut self, wrote: Name) {
        self.known.adopts = Some(wrote);
    }

    /// Where the replica wrote whose state the folder still has.
    pub(crate) fn adopted(&mut self) -> Option<Name> {
        self.known.adopts.take()
    }

    /// Goes on from another lineage, of what others have not changed, with the destination as it was `left`.
    pub(crate) fn advance(&mut self, lineage: Lineage, left: Stamp) -> Result<()> {
        self.clear_noticed();
        let before = std::mem::replace(&mut self.lineage, lineage);
        if let Err(e) = self.store() {
            // What this process goes on from is what the next one finds at least.
            self.lineage = before;
            return Err(e);
        }
        let everything = self.lineage.unsure == Unsure::Everything;
        (self.known.left, self.known.changed) = (Some(left), everything.then_some(Foreign::Written));
        Ok(())
    }

    /// What the file looked like when this process left it alone; `None` if it has no say.
    pub(crate) fn left(&self) -> Option<&Stamp> {
        self.known.left.as_ref()
    }

    pub(crate) fn set_left(&mut self, left: Option<Stamp>) {
        self.known.left = left;
    }

    /// Own writes of an earlier process did not end in order.
    pub(crate) fn set_unclean(&mut self, unclean: bool) {
        self.known.unclean = unclean;
    }

    /// True, once, if own writes of an earlier process did not end in order.
    pub(crate) fn take_unclean(&mut self) -> bool {
        std::mem::take(&mut self.known.unclean)
    }

    /// What notes own writes, while there are any.
    pub(crate) fn working(&self) -> Option<&Working> {
        self.known.working.as_ref()
    }

    pub(crate) fn set_working(&mut self, working: Option<Working>) -> Option<Working> {
        std::mem::replace(&mut self.known.working, working)
    }
}

impl Replica {
    /// What its source must know of it to find what it lacks.
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// What its user should know of the commits since this was asked last.
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.note_dropped(false);
        std::mem::take(&mut self.known.warnings)
    }

    /// The destination's path, without links.
    pub fn path(&self) -> &Path {
        self.destination.path()
    }

    /// The folder of the replica's state.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What the destination holds, to be compared: without what is in a journal, so a delta that was found by comparing
    /// must not go on from it. It is made durable first: a power cut must not take away what the delta takes for granted.
    ///
    /// # Errors
    /// If there is nothing, or it cannot be opened or flushed.
    pub fn content(&self) -> Result<Arc<dyn Disk>> {
        self.sound()?;
        let disk = self.destination.open(self.writes_to())?;
        disk.flush().map_err(disk_error("flush", self.path(), "nothing was compared"))?;
        Ok(disk)
    }

    /// Says how much the next delta brings, and, of a seed, the epochs that its source had before. Where [that was
    /// counted](crate::DeltaReceiver::is_counted), it stays known.
    pub fn expect(&mut self, data: ExpectedBytes, before: &[Epoch]) {
        if data != ExpectedBytes::Unknown {
            self.expected = data;
        }
        self.known.before = before.to_vec();
    }

    /// Epochs of the source before that of the next delta, if that is a seed.
    pub(crate) fn before(&self) -> &[Epoch] {
        &self.known.before
    }

    /// Where the step under way writes, or the next will.
    pub(crate) fn writes_to(&self) -> Name {
        match self.lineage.step.as_ref().map(|s| s.kind) {
            Some(StepKind::NewFile { .. } | StepKind::Clone { .. }) => Name::Temporary,
            Some(StepKind::InPlace) | None => Name::Final,
        }
    }

    /// The positions by its lineage alone, or by its step.
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
        let mut unsure = self.unsure()?;
        if let Some(journal) = &self.journal {
            unsure.extend(&journal.unread);
        }
        let lineage = &self.lineage;
        self.status = Status {
            source: lineage.source.or(lineage.step.as_ref().map(|s| s.toward.source)),
            epoch: lineage.epoch,
            ahead: lineage.is_ahead(),
            state: lineage.state,
            size: lineage.size,
            block_size: lineage.block_size,
            capacity,
            positions: self.journal.as_ref().map_or(positions.clone(), |j| j.positions(&positions)),
            unsure,
            nonce: self.nonce(),
            toward: lineage.step.as_ref().map(|step| step.toward.epoch),
            resumes: self.journal.as_ref().and_then(Contents::resume),
            recovered: (!self.known.recovered.is_empty()).then(|| self.known.recovered.join("; ")),
            gone: self.known.gone,
            changed: self.known.changed.map(|why| self.how_changed(why)),
            former: self.known.former.clone(),
            role: lineage.role.clone(),
            group: lineage.group.as_ref().map(|group| group.name.clone()),
        };
        self.publish();
        Ok(())
    }

    /// Fails if a commit is half done.
    pub(crate) fn sound(&self) -> Result<()> {
        if !self.known.half_done {
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
        let (name, state) = (crate::state::lineage::NAME, "the replica is unchanged");
        self.at_readers_cost(|| {
            let reserved = device::reserve(&*self.folder, name, self.lineage.room());
            reserved.map_err(disk_error("write the lineage", &self.folder.path().join(name), state))?;
            self.reserve_note()
        })
    }

    pub(crate) fn store(&mut self) -> Result<()> {
        self.lineage.path = self.destination.path().to_path_buf();
        if self.known.noticed.load(SeqCst) {
            self.lineage.unsure = Unsure::Everything;
        }
        self.lineage.disk = self.destination.disk();
        self.lineage.format = self.destination.format();
        self.lineage.store(&*self.folder)?;
        self.kept = true;
        match std::mem::take(&mut self.known.named) {
            true => self.sweep(false).and_then(|()| unsure::give_back(&*self.folder)),
            false => Ok(()),
        }
    }

    /// The unsure set of what is there, or of the step under way.
    pub(crate) fn unsure(&self) -> Result<UnsureSet> {
        unsure::load(&*self.folder, self.lineage.unsure())
    }

    /// Keeps an unsure set, for the lineage that is stored next to name. `state` is what becomes of the replica where that
    /// fails.
    pub(crate) fn keep_unsure(&mut self, set: &UnsureSet, state: &'static str) -> Result<Unsure> {
        self.known.named = true;
        unsure::store(&*self.folder, set, state)
    }

    /// Makes room for the unsure set that a journal leaves. Most leave none.
    pub(crate) fn reserve_unsure(&self, contents: &Contents, state: &'static str) -> Result<()> {
        let batch = contents.segments.last().is_some_and(|segment| segment.header.batch);
        let ranges = self.unsure()?.count() + contents.unread.count() as u64;
        match ranges > 0 || batch {
            true => self.at_readers_cost(|| unsure::reserve(&*self.folder, ranges + contents.records, state)),
            false => Ok(()),
        }
    }

    /// Removes unsure sets that the lineage does not name.
    pub(crate) fn sweep(&self, reuse: bool) -> Result<()> {
        unsure::sweep(&*self.folder, &[&self.lineage.unsure, self.lineage.unsure()], reuse)
    }

    /// Forgets the replica: its lineage, its journal and a copy that was begun. The destination stays as it is.
    pub fn disown(mut self) -> Result<()> {
        self.announce()?;
        self.lose_readers("the replica was forgotten")?;
        let begun = self.writes_to() == Name::Temporary;
        // First what makes it a replica: what is left after a crash belongs to nothing.
        self.remove(crate::state::lineage::NAME)?;
        self.folder.sync().map_err(io_error("sync", self.folder.path()))?;
        if begun {
            self.remove_partial()?;
        }
        for name in self.folder.list().map_err(io_error("look into", self.folder.path()))? {
            if name != FolderLock::NAME {
                self.remove(&name)?;
            }
        }
        if let Some(lock) = self.locks.folder.take() {
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
        self.remove(&device::reserved(crate::state::lineage::NAME))?;
        unsure::give_back(&*self.folder)?;
        // It may have got its last name already. Nothing was merged from it.
        self.remove(WHOLE)
    }

    /// Drops what of a delta is in the journal, after an error. If that fails too, only opening the replica again tells what the journal holds.
    pub(crate) fn give_up_journal(&mut self) {
        self.known.half_done = self.drop_journal().is_err();
    }

    /// Makes it a replica of this source, if it is another's and `whole` says that all of it was compared. Which epochs of the
    /// other source stood where is forgotten.
    pub(crate) fn follow(&mut self, source: Uuid, whole: bool) -> Result<()> {
        if !whole || self.lineage.source.is_none_or(|s| s == source) {
            return Ok(());
        }
        let lineage = &mut self.lineage;
        (lineage.source, lineage.epoch, lineage.unsure) = (Some(source), None, Unsure::Nothing);
        lineage.state = State::Incomplete;
        lineage.role = Role::replica(self.options.term.max(FIRST_TERM), Lives::default());
        self.store()?;
        self.refresh()
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // A folder that was made only for the lock goes again.
        if let Some(lock) = self.locks.folder.take() {
            if !self.kept {
                // That of a device is among those of the state directory, where it would count as a replica.
                if self.destination.is_device()
                    && self.state().open(crate::state::lineage::NAME, false).is_err()
                {
                    self.drop_origin();
                }
                lock.remove();
            }
        }
        self.locks.image = None;
    }
}
