//! Groups: replicas that commit together. Each receives its delta, which is then *prepared*: whole and durable in its journal, and
//! merged by nobody. Then the group's [`Intent`] names all of them, in one step: that is the commit. Then each is merged, now or
//! when it is opened next.
//!
//! ```text
//!     a.raw:  journal ── prepared ──┐                       ┌── merge ── lineage
//!                                   ├── intent, durable ────┤
//!     b.raw:  journal ── prepared ──┘                       └── merge ── lineage
//! ```
//!
//! Whoever writes the intent holds the group's lock and all replicas of it, and has completed what the intent before says. So a
//! delta in the journal of a member is committed if the intent names it, and otherwise is only something to go on from.

pub(crate) mod past;
pub(crate) mod view;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use delta::Epoch;
use device::{Dir, Folder, FolderLock};
use uuid::Uuid;

use crate::commit::receive::Committed;
use crate::error::{ReplicaError, Result, io_error};
use crate::journal::{self, ARRIVING, seal};
use crate::past::commits::PastCommits;
use crate::past::moments;
use crate::replica::{PreparedCommit, Replica};
use crate::state::intent::{Intent, Member, ReplicaMembership};
use crate::state::lineage::{Lineage, StepKind, Toward};
use crate::state::locate::locate;
use crate::state::options::ReplicaOptions;
use crate::state::role::{Promoted, now};
use past::{FoundMembers, GroupMoment, find_members};

/// The replicas of a group in a folder, held by this process.
pub struct Group {
    name: String,
    folder: Box<dyn Folder>,
    intent: Option<Intent>,
    /// The intents before it.
    past: PastCommits,
    lock: Option<FolderLock>,
    /// Replicas may have joined, which are not opened without the folder.
    counts: bool,
}

impl Drop for Group {
    fn drop(&mut self) {
        // A folder that was made only for the lock goes again.
        if let Some(lock) = self.lock.take().filter(|_| self.intent.is_none() && !self.counts) {
            lock.remove();
        }
    }
}

/// The folder that holds the replica at `path`, without links.
///
/// # Errors
/// If there is no such folder.
pub fn folder_of_replicas(path: &Path) -> Result<PathBuf> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::canonicalize(parent).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => ReplicaError::Away(format!(
            "folder {} does not exist: mount its file system, or create it",
            parent.display()
        )),
        _ => io_error("find", parent)(e),
    })
}

/// What the replica at `path`, without links, is called in the folder `dir` of its group: by the name of its file there, or of a link to it.
pub fn name_in(dir: &Path, path: &Path) -> String {
    let leads = |entry: &PathBuf| {
        let hidden = entry.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
        !hidden && std::fs::canonicalize(entry).is_ok_and(|to| to == path)
    };
    let mut entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let link = if path.parent() == Some(dir) { None } else { entries.find(leads) };
    let name = link.as_deref().unwrap_or(path).file_name();
    name.unwrap_or_default().to_string_lossy().into_owned()
}

impl Group {
    /// Takes the group of this name whose replicas are in `dir`, a path without links, for this process alone.
    ///
    /// # Errors
    /// Refused if another process holds it, or if `dir` does not outlive the boot.
    pub fn open(dir: &Path, name: &str) -> Result<Group> {
        if dir.starts_with("/dev") && !dir.starts_with("/dev/shm") {
            return Err(ReplicaError::Refused(format!(
                "{} does not survive a reboot, so a group cannot keep its state there: make a folder on a disk with a link to each \
                 device, named after the source, and give that folder",
                dir.display()
            )));
        }
        let path = ReplicaMembership::folder_in(dir, name);
        let folder = Dir::open(&path).map_err(io_error("make", &path))?;
        let lock = match FolderLock::of(&folder).map_err(io_error("lock", &path))? {
            Ok(lock) => lock,
            Err(holder) => {
                return Err(ReplicaError::GroupBusy { group: name.into(), dir: dir.into(), holder });
            }
        };
        let mut group = Group::begin(Box::new(folder), name)?;
        group.lock = Some(lock);
        Ok(group)
    }

    /// Begins a group over its folder. Takes no lock, unlike [`Group::open`].
    ///
    /// # Errors
    /// If its intent cannot be read.
    #[doc(hidden)]
    pub fn begin(folder: Box<dyn Folder>, name: &str) -> Result<Group> {
        let intent = Intent::read(&*folder)?;
        let past = PastCommits::load(&*folder).map_err(io_error("look into", folder.path()))?;
        Ok(Group { name: name.to_owned(), folder, intent, past, lock: None, counts: false })
    }

    /// A replica is about to take a delta as a member: from here on the folder stays, which says whether that was committed.
    pub fn counts(&mut self) {
        self.counts = true;
    }

    /// The last common commit.
    pub fn intent(&self) -> Option<&Intent> {
        self.intent.as_ref()
    }

    /// What was committed before of replicas that are not among these, and may not have been completed: they may be away, and find
    /// the next intent when they are back.
    fn owed(&self, members: &[Replica]) -> BTreeMap<PathBuf, Member> {
        let Some(intent) = &self.intent else { return BTreeMap::new() };
        let options = members.first().map(|member| member.options().clone()).unwrap_or_default();
        let absent = |(path, member): &(&PathBuf, &Member)| {
            let Some(stream) = member.stream else { return false };
            // By its source: folders are moved, and devices get other names.
            let here =
                |replica: &Replica| replica.lineage().source == Some(member.source) || replica.has(stream);
            !members.iter().any(here) && !self.is_complete(path, stream, &options)
        };
        let all = intent.owed.iter().chain(&intent.members).filter(absent);
        all.map(|(path, member)| (path.clone(), *member)).collect()
    }

    /// True if the replica at this path has what was committed of it, or nothing that could be completed.
    fn is_complete(&self, path: &Path, stream: Uuid, options: &ReplicaOptions) -> bool {
        let found = locate(path, options).ok().and_then(|(_, _, folder)| Dir::existing(&folder).ok());
        let Some(folder) = found else { return false };
        let Ok(Some(lineage)) = Lineage::load(&folder) else { return false };
        let waits = lineage.group.is_some_and(|group| group.name == self.name);
        // An error that passes hides nothing.
        let gone = |e: std::io::Error| e.kind() == std::io::ErrorKind::NotFound;
        !waits || lineage.committed == Some(stream) || folder.open(ARRIVING, false).is_err_and(gone)
    }

    /// Commits what the members have prepared, together, as the cut of that number and id: when this returns, all of them are there,
    /// durable. Those that have prepared nothing are there already.
    ///
    /// # Errors
    /// Before the intent is durable none of them has moved. After that, all of them will: what fails here is completed when the
    /// replica is opened next.
    pub fn commit(&mut self, cut: Epoch, members: &mut [Replica]) -> Result<Vec<Option<Committed>>> {
        self.commit_at(cut, now(), members)
    }

    /// Commits what the members have prepared as [`Group::commit`] does, as of a time in seconds since 1970.
    fn commit_at(
        &mut self,
        cut: Epoch,
        time: u64,
        members: &mut [Replica],
    ) -> Result<Vec<Option<Committed>>> {
        let mut named = BTreeMap::new();
        for member in members.iter_mut() {
            named.insert(member.path().to_path_buf(), member.stand(&self.name)?);
        }
        let stands = self.intent.as_ref().is_some_and(|intent| {
            let same = |(path, is): (&PathBuf, &Member)| {
                let what = |member: &Member| (member.source, member.epoch, member.state);
                intent.members.get(path).is_some_and(|was| what(was) == what(is))
            };
            // What was decided since, of more or of other replicas, ends with this commit.
            intent.cut == cut
                && !intent.promotes()
                && intent.members.len() == named.len()
                && named.values().all(|member| member.stream.is_none())
                && named.iter().all(same)
        });
        if !stands {
            let intent = Intent {
                version: Intent::VERSION,
                group: self.name.clone(),
                cut,
                time,
                owed: self.owed(members),
                members: named,
                files: BTreeMap::new(),
            };
            self.keep_past(members);
            intent.store(&*self.folder)?;
            self.intent = Some(intent);
        }
        let mut done = Vec::new();
        let mut failed = None;
        for member in members.iter_mut() {
            match member.commit_prepared() {
                Ok(committed) => done.push(committed),
                // The others are where they belong all the same.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(done), Err)
    }

    /// Keeps the last common commit with those before it, before another takes its place, if the replicas keep their past. The
    /// commit goes on without where this fails: its user is told.
    fn keep_past(&mut self, members: &mut [Replica]) {
        let Some(intent) = &self.intent else { return };
        let folder = &*self.folder;
        let kept = match members.iter().any(|member| member.settings().is_some()) {
            false => self.past.remove(folder),
            true => self.past.append(folder, intent),
        };
        let tidied = kept.and_then(|()| match self.past.is_long() {
            false => Ok(()),
            true => {
                let reached = members.iter().map(|m| Ok((m.lineage().source, m.reached()?)));
                let reached = reached.collect::<std::io::Result<Vec<_>>>()?;
                self.past.retain(folder, |intent| is_reached(intent, &reached))
            }
        });
        if let (Err(error), Some(first)) = (tidied, members.first_mut()) {
            first.warn(format!("the common moments of the group {} are not kept: {error}", self.name));
        }
    }

    /// Brings back to an earlier common commit, in one step, all members that had a part in it. Those that have joined since stay as they are,
    /// and come after the others among the members. Durable when this returns.
    ///
    /// # Errors
    /// As [`Replica::rewind`]; before the intent is durable none of them has moved, and after that all of them will.
    pub fn rewind(&mut self, to: &GroupMoment, members: &mut [Replica]) -> Result<Vec<Option<Committed>>> {
        members.sort_by_key(|member| to.member(member.lineage().source).is_none());
        let had_part = members.partition_point(|member| to.member(member.lineage().source).is_some());
        let (members, _) = members.split_at_mut(had_part);
        let prepared = members.iter_mut().try_for_each(|member| {
            let at = to.member(member.lineage().source).and_then(|at| at.state);
            match at {
                Some(state) if state == member.lineage().nonce => Ok(()),
                Some(state) => member.prepare_rewind(state).map(drop),
                None => Err(ReplicaError::Refused(format!(
                    "{} has no part in common epoch {} of the group {}",
                    member.path().display(),
                    to.epoch.number,
                    self.name
                ))),
            }
        });
        if let Err(error) = prepared {
            // Nobody asks for it again.
            for member in members {
                if member.take_prepared().is_some() {
                    member.give_up_journal();
                }
            }
            return Err(error);
        }
        self.commit_at(to.epoch, to.at, members)
    }

    /// Makes sources of all members, in one step. Durable when this returns.
    ///
    /// # Errors
    /// As [`Replica::promote`]; before the intent is durable none of them is a source, and after that all of them will be.
    pub fn promote(&mut self, members: &mut [Replica]) -> Result<Vec<Promoted>> {
        self.check_promoted(members)?;
        let Some(before) = &self.intent else { return Err(self.uncommitted()) };
        let mut named = BTreeMap::new();
        for member in members.iter_mut() {
            member.untouched()?;
            if member.lineage().role.promoted.is_none() {
                member.admit_alone()?;
                // One that had left would not find what is decided.
                member.join_group()?;
            }
            let lineage = member.lineage();
            if let Some(why) = member.changed().filter(|_| lineage.role.promoted.is_none()) {
                return Err(member.touched(why));
            }
            let (Some(source), Some(epoch)) = (lineage.source, lineage.epoch) else {
                return Err(self.uncommitted());
            };
            let promoted = lineage.role.promoted.unwrap_or_else(|| member.next_promotion());
            named.insert(
                member.path().to_path_buf(),
                Member { state: Some(lineage.nonce), promoted: Some(promoted), ..Member::at(source, epoch) },
            );
        }
        let marks: Vec<Promoted> =
            members.iter().filter_map(|member| named.get(member.path())?.promoted).collect();
        if !members.iter().all(|member| member.lineage().role.promoted.is_some()) {
            let intent = Intent { members: named, owed: self.owed(members), ..before.clone() };
            intent.store(&*self.folder)?;
            self.intent = Some(intent);
        }
        for (member, promoted) in members.iter_mut().zip(&marks) {
            if member.lineage().role.promoted.is_none() {
                member.become_source(*promoted)?;
            }
        }
        Ok(marks)
    }

    /// The promotion is complete: nobody is made a source by it any more, and those that it has made may follow another one.
    ///
    /// # Errors
    /// If the intent cannot be written: then it is as it was.
    pub fn end_promotion(&mut self) -> Result<()> {
        let Some(mut intent) = self.intent.clone().filter(Intent::promotes) else { return Ok(()) };
        intent.members.values_mut().for_each(|member| member.promoted = None);
        intent.store(&*self.folder)?;
        self.intent = Some(intent);
        Ok(())
    }

    /// Refuses a group of which a replica was promoted by itself.
    ///
    /// # Errors
    /// Refused then.
    pub fn check_promoted(&self, members: &[Replica]) -> Result<()> {
        let alone = members.iter().find(|member| {
            let lineage = member.lineage();
            let with_it = |mark| self.intent.as_ref().is_some_and(|i| i.marks(lineage.source, mark));
            lineage.role.promoted.as_ref().is_some_and(|mark| !with_it(mark))
        });
        let Some(member) = alone else { return Ok(()) };
        Err(ReplicaError::Refused(format!(
            "{} was promoted by itself, so it may not be at the common moment of the group {} any more: make it a replica again \
             with \"dsync demote\", or take each of the others out with \"dsync forget --group {1} REPLICA\" and promote it by itself",
            member.path().display(),
            self.name
        )))
    }

    /// Opens all replicas of the group, which is in this folder without links. An interrupted promotion is completed.
    ///
    /// # Errors
    /// As [`Replica::open`]; refused if one is missing, or is not at the last common commit, unless `apart` says that this
    /// does not matter.
    pub fn open_members(&self, dir: &Path, options: &ReplicaOptions, apart: bool) -> Result<Vec<Replica>> {
        let found = find_members(dir, &self.name, options)?;
        self.open_found(dir, found, (options, apart), &Replica::open)
    }

    /// Opens the replicas that were found, each by `open`. An interrupted promotion is completed.
    ///
    /// # Errors
    /// As [`Group::open_members`].
    #[doc(hidden)]
    pub fn open_found(
        &self,
        dir: &Path,
        (intent, found): FoundMembers,
        (options, apart): (&ReplicaOptions, bool),
        open: &dyn Fn(&Path, &ReplicaOptions) -> Result<Replica>,
    ) -> Result<Vec<Replica>> {
        let mut members = Vec::new();
        for (path, lineage) in found {
            // What others have written before an interrupted promotion was complete does not undo it.
            let doubt = intent.promotes() || lineage.role.promoted.is_some();
            let at = std::fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
            let group = lineage.role.promoted.is_none().then(|| ReplicaMembership::of(&at, dir, &self.name));
            members.push(open(&path, &ReplicaOptions { doubt, group, ..options.clone() })?);
        }
        let promoted = |member: &Replica| member.lineage().role.promoted.is_some();
        let lineages = members.iter().filter(|m| !promoted(m)).map(|m| (m.path(), m.lineage()));
        let lacking = past::apart(&intent, lineages);
        if apart || lacking.is_empty() {
            return Ok(members);
        }
        self.refuse_demoted(&members, dir)?;
        let without = |member: &&Replica| !promoted(member) && !intent.names(member.lineage().source);
        let others: Vec<_> = members.iter().filter(without).map(|m| m.path().display().to_string()).collect();
        if others.len() == lacking.len() {
            return Err(ReplicaError::Refused(format!(
                "the group {} in {} was committed without {}: {}. If its source was taken out of the group, run \"dsync forget REPLICA\" here, which \
                 leaves it as a plain disk; the others are promoted then. If it belongs to the group, \"dsync sync --group {0} DIR\" where the sources \
                 are brings them to one moment",
                self.name,
                dir.display(),
                others.join(", "),
                lacking.join("; ")
            )));
        }
        Err(ReplicaError::Refused(format!(
            "the replicas of the group {} in {} are not of one moment: {}. Bring them to one with \"dsync sync --group {0} DIR\" where \
             their sources are, or with \"dsync rewind --group {1} --to EPOCH\"; to promote them as they are, take \
             each out with \"dsync forget --group {0} REPLICA\" and promote it by itself",
            self.name,
            dir.display(),
            lacking.join("; ")
        )))
    }

    /// Refuses disks that were demoted: they are at no common epoch until the sources that took over are synced to them.
    fn refuse_demoted(&self, members: &[Replica], dir: &Path) -> Result<()> {
        let demoted = |member: &&Replica| member.lineage().role.demoted.is_some();
        let Some(member) = members.iter().find(demoted) else { return Ok(()) };
        let each: Vec<String> = members
            .iter()
            .filter(demoted)
            .map(|member| dir.join(name_in(dir, member.path())))
            .map(|disk| format!("\"dsync promote --force {}\"", disk.display()))
            .collect();
        Err(ReplicaError::Refused(format!(
            "{} was demoted with the group {} in {}, and has taken nothing since from the disks that were to take over. If those did, run \
             \"dsync sync --group {1} [HOST:]{2}\" where they are. If they are lost, or never took over, make the disks here the sources again: \
             {}; then \"dsync serve --group {1}\" with all of them",
            member.path().display(),
            self.name,
            dir.display(),
            each.join(", ")
        )))
    }

    fn uncommitted(&self) -> ReplicaError {
        ReplicaError::Refused(format!(
            "the group {} has no common commit yet: run \"dsync sync --group {0} DIR\"",
            self.name
        ))
    }
}

/// States of a replica, each with the epoch that it is, if it is one.
type ReachedStates = Vec<(Uuid, Option<Epoch>)>;

/// True if all replicas that had a part in it can still be brought to what they were there. Each has the states that it reaches.
fn is_reached(intent: &Intent, reached: &[(Option<Uuid>, ReachedStates)]) -> bool {
    let of = |source: &Option<Uuid>| intent.members.values().find(|member| Some(member.source) == *source);
    let mut had_part = reached.iter().filter_map(|(source, states)| Some((of(source)?, states))).peekable();
    had_part.peek().is_some()
        && had_part.all(|(member, states)| {
            states.iter().any(|(state, epoch)| Some(*state) == member.state || *epoch == Some(member.epoch))
        })
}

impl Replica {
    /// The states that it can be brought to, the present one among them, each with the epoch that it is.
    fn reached(&self) -> std::io::Result<ReachedStates> {
        let present = (self.lineage().nonce, self.lineage().epoch.filter(|_| !self.lineage().is_ahead()));
        let moments = moments(self.state(), present.0)?.into_iter();
        let moments = moments.map(|moment| (moment.state, Some(moment.epoch).filter(|_| !moment.ahead)));
        Ok(moments.chain([present]).collect())
    }

    /// Joins the group for which it was opened: from here on its journal is committed with those of the others only.
    pub(crate) fn join_group(&mut self) -> Result<()> {
        let Some(group) = self.options().group.clone() else { return Ok(()) };
        if self.lineage().group.as_ref() == Some(&group) || !self.is_kept() {
            return Ok(());
        }
        self.lineage_mut().group = Some(group);
        self.store()
    }

    /// Before a delta is taken: a member of a group takes none but with its group, as long as its source is in that.
    pub(crate) fn admit_alone(&mut self) -> Result<()> {
        let Some(group) = self.lineage().group.clone() else { return Ok(()) };
        if self.options().group.as_ref().is_some_and(|with| with.name == group.name) {
            return Ok(());
        }
        if !self.leaves_group() {
            return Err(self.in_group());
        }
        self.warn(format!("it has left the group {}: its source is not in that any more", group.name));
        self.leave_group()
    }

    /// Takes it out of its group: it is promoted, rewound and synced by itself from then on. Durable on return.
    ///
    /// # Errors
    /// If that cannot be written down.
    pub fn leave_group(&mut self) -> Result<()> {
        self.unprepare()?;
        self.lineage_mut().group = None;
        self.store()
    }

    /// What was prepared and not committed by its group is a part to go on from: alone, it would count as whole. Durable on return.
    fn unprepare(&mut self) -> Result<()> {
        let Some(contents) = journal::measure(self.state(), ARRIVING)?.filter(|contents| contents.whole)
        else {
            return Ok(());
        };
        let part = contents.without_trailer();
        if part.segments.is_empty() {
            return self.drop_journal();
        }
        let end = part.start + part.bytes;
        let cut =
            self.state().open(ARRIVING, false).and_then(|file| file.set_len(end).and_then(|()| file.sync()));
        cut.map_err(io_error("cut off", &self.folder().join(ARRIVING)))
    }

    /// True if the source that sends is not in its group any more. A delta in a file does not tell.
    pub(crate) fn leaves_group(&self) -> bool {
        let (options, group) = (self.options(), &self.lineage().group);
        let told = options.term != 0;
        told && group.as_ref().is_some_and(|group| options.source_group.as_ref() != Some(&group.name))
    }

    /// The error of a command that would bring a member out of step.
    pub(crate) fn in_group(&self) -> ReplicaError {
        let name = self.lineage().group.as_ref().map(|group| group.name.clone()).unwrap_or_default();
        ReplicaError::InGroup { path: self.path().to_path_buf(), group: name }
    }

    /// Why a commit with a group is not possible from here; `None` if it is.
    pub(crate) fn no_journal(&self) -> Option<ReplicaError> {
        let step = self.lineage().step.as_ref()?;
        let what = match step.kind {
            StepKind::InPlace => "a commit in place",
            StepKind::NewFile { .. } => "a first copy",
            StepKind::Clone { .. } => "a commit to a clone",
        };
        Some(ReplicaError::Refused(format!(
            "{} has {what} under way that was interrupted: complete it by itself first, with \"dsync sync SRC DST\"",
            self.path().display()
        )))
    }

    /// What it will be at the common commit. Nothing but that commit may follow.
    fn stand(&mut self, group: &str) -> Result<Member> {
        self.sound()?;
        self.untouched()?;
        self.admit_alone()?;
        self.join_group()?;
        let none = || {
            ReplicaError::Refused(format!(
                "{} is not a whole replica, so it cannot be committed with the group {group}: run \"dsync sync --group {group}\" again",
                self.path().display()
            ))
        };
        if let Some(prepared) = self.prepared() {
            let Toward { source, epoch, stream, .. } = prepared.toward;
            return Ok(Member { stream: Some(stream), state: Some(stream), ..Member::at(source, epoch) });
        }
        let lineage = self.lineage();
        let whole = lineage.step.is_none() && self.is_kept() && lineage.unsure.is_nothing();
        match (lineage.source, lineage.epoch) {
            (Some(source), Some(epoch)) if whole => {
                Ok(Member { state: Some(lineage.nonce), ..Member::at(source, epoch) })
            }
            _ => Err(none()),
        }
    }

    /// After the intent: merges what was prepared. `None` if nothing was.
    fn commit_prepared(&mut self) -> Result<Option<Committed>> {
        let Some(PreparedCommit { contents, toward, cost: (written, read) }) = self.take_prepared() else {
            return Ok(None);
        };
        // From here on only opening it anew tells what it holds.
        self.begin_commit()?;
        self.untouched()?;
        let failed = |what| io_error(what, self.folder());
        let file = self.state().open(ARRIVING, false).map_err(failed("open"))?;
        seal(&*file, self.state()).map_err(failed("sync"))?;
        let (merged, filled) = self.merge(&[contents], None)?;
        self.refresh()?;
        Ok(Some(Committed {
            epoch: toward.epoch,
            bytes_written: self.take_passed() + written + merged,
            bytes_read: read + filled,
        }))
    }
}
