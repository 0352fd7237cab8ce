//! One conversation at the source's end, about one disk or about the disks of a group, in which their replicas may be brought to the
//! present moment again and again.
//!
//! ```text
//!     statuses ──▶ consent ──▶ choices ──▶ first copies in a group, each committed by itself ──▶ cut ──▶ a delta to each ──▶ commit
//! ```
//!
//! Everything that refuses a disk is asked before the cut. The delta of a single disk commits itself; those of a group are prepared, and
//! committed together. What a source may forget of its history is recorded after the commit.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use delta::{Epoch, Method};
use link::{Receiver, Sender};
use source::{GroupHandle, Handle, View};

use crate::conflict::{Conflict, ways_of_group, with_ends};
use crate::cut_hook::around;
use crate::error::SyncError;
use crate::options::{GiveUp, SyncOptions};
use crate::plan::Choice;
use crate::report::{Progress, RunningTotals, Summary};
use crate::source_end::account::Account;
use crate::source_end::apart::{Consented, Outcome, consent};
use crate::source_end::live::{Approach, catch_up};
use crate::source_end::member::{self, PlannedMember, at_view, estimate, pick};
use crate::transfer::pack::reading;
use crate::transfer::{DeltaAnswer, Transfer, heard};
use crate::wire::messages::{
    COMMIT_GROUP, CommitReply, GROUP_COMMITTED, OPEN, Open, Opening, StatusReply, expect, nonsense,
};

/// A conversation about the replicas of one disk or of a group.
pub(crate) struct Session<'a> {
    sender: &'a Sender,
    receiver: &'a Receiver,
    /// `None` for a single disk.
    group: Option<&'a GroupHandle>,
    /// How the user named the replica, or the folder of the group's.
    destination: &'a str,
    options: SyncOptions,
    members: Vec<SyncedDisk<'a>>,
    /// Where the replicas are, as far as that was heard.
    statuses: Vec<StatusReply>,
    /// The disks of which a status is under way.
    unheard: Vec<usize>,
    /// What the opening has cost; `None` after the first round.
    opening: Option<Spent>,
}

/// A disk and its replica.
struct SyncedDisk<'a> {
    handle: &'a Handle,
    /// The replica, as the user would name it, and its path there.
    name: String,
    path: PathBuf,
    /// Without the hook in a group: that is told of the cut of all.
    options: SyncOptions,
    /// What its sync is counted as.
    account: Arc<Account>,
    progress: Box<dyn Fn(u64, u64) + Sync + 'a>,
}

/// What one round has done.
#[derive(Default)]
pub(crate) struct Round {
    /// The cut of a group.
    pub cut: Option<Epoch>,
    /// The replicas that were copied for the first time.
    pub seeded: Vec<String>,
    pub members: Vec<Summary>,
    /// Bytes sent and received over the link.
    pub moved: (u64, u64),
    pub seconds: f64,
}

/// What part of a conversation has cost since it began.
#[derive(Clone, Copy)]
struct Spent {
    began: Instant,
    /// What had been sent and received.
    before: (u64, u64),
}

impl<'a> Session<'a> {
    /// Opens the replica `place` of one disk: its path there, and how the user named it.
    pub(crate) fn of_disk(
        ends: (&'a Sender, &'a Receiver),
        handle: &'a Handle,
        (path, name): (&Path, &'a str),
        options: &SyncOptions,
        progress: Progress<'a>,
    ) -> Result<Session<'a>, SyncError> {
        let place = (path.to_owned(), name.to_owned());
        let member = SyncedDisk::new(handle, place, options.clone(), progress);
        Session::begin(ends, None, name, options.clone(), vec![member])
    }

    /// Opens the replicas of a group in a folder: its path there, and how the user named it. They have the names of the sources.
    pub(crate) fn of_group(
        ends: (&'a Sender, &'a Receiver),
        group: &'a GroupHandle,
        (dir, destination): (&Path, &'a str),
        options: &SyncOptions,
        progress: Progress<'a>,
    ) -> Result<Session<'a>, SyncError> {
        let mut options = options.clone();
        options.live.cut.together = true;
        let mut members = Vec::new();
        for (handle, file) in group.members().iter().zip(group.files()) {
            let mut of_member = SyncOptions { hook: None, ..options.clone() };
            if let Some(GiveUp::Save(to)) = &mut of_member.give_up {
                *to = to.join(format!("{file}.delta"));
            }
            let place = (dir.join(file), format!("{}/{file}", destination.trim_end_matches('/')));
            members.push(SyncedDisk::new(handle, place, of_member, progress));
        }
        Session::begin(ends, Some(group), destination, options, members)
    }

    fn begin(
        (sender, receiver): (&'a Sender, &'a Receiver),
        group: Option<&'a GroupHandle>,
        destination: &'a str,
        options: SyncOptions,
        members: Vec<SyncedDisk<'a>>,
    ) -> Result<Session<'a>, SyncError> {
        if let Some(pace) = &options.bwlimit {
            sender.pace(pace);
        }
        let opening = Some(Spent { began: Instant::now(), before: (0, 0) });
        let unheard: Vec<usize> = (0..members.len()).collect();
        let statuses = unheard.iter().map(|_| StatusReply::of(replica::Status::nothing())).collect();
        let session =
            Session { sender, receiver, group, destination, options, members, statuses, unheard, opening };
        session.members.iter().for_each(|member| member.handle.be_polite(session.options.polite));
        session.open().inspect_err(|error| session.failed(error))?;
        Ok(session)
    }

    fn open(&self) -> Result<(), SyncError> {
        let mut members = Vec::new();
        for member in &self.members {
            members.push(Open::for_sync(&member.path, &member.options).beside(member.handle)?);
        }
        let group = self.group.map(|group| group.name().to_owned());
        Ok(self.sender.send_json(OPEN, &Opening { group, members })?)
    }

    /// Notes how far a mirror may let the replicas fall behind.
    pub(crate) fn within(&self, rpo: Duration) {
        self.members.iter().for_each(|member| member.account.within(rpo));
    }

    /// Brings the replicas to one moment.
    pub(crate) fn round(&mut self) -> Result<Round, SyncError> {
        let cost = self.opening.take().unwrap_or_else(|| Spent::begin(self.sender));
        // A commit of a group looks at all replicas, and tells where they are.
        if self.unheard.is_empty() {
            self.open().inspect_err(|error| self.failed(error))?;
            self.unheard = (0..self.members.len()).collect();
        }
        let mut outcomes = vec![Outcome::default(); self.members.len()];
        let done = self.give_up(&mut outcomes).and_then(|()| self.bring());
        let mut round = done.map_err(|error| {
            let error = self.after_giving_up(self.named(error), &outcomes);
            self.failed(&error);
            error
        })?;
        round.seconds = cost.began.elapsed().as_secs_f64();
        if !self.options.dry_run {
            round.moved = cost.moved(self.sender);
        }
        if let (None, Some(summary)) = (self.group, round.members.first_mut()) {
            cost.add(self.sender, summary);
        }
        for ((member, outcome), summary) in self.members.iter().zip(outcomes).zip(&mut round.members) {
            outcome.tell(summary);
            member.account.synced(summary);
            member.account.say_doubts(summary);
        }
        Ok(round)
    }

    /// Which of several disks a failure is about is not known.
    fn failed(&self, error: &SyncError) {
        self.members.iter().for_each(|member| member.account.failed(error));
    }

    /// Hears where the replicas are that something was done with.
    fn hear(&mut self) -> Result<(), SyncError> {
        for at in std::mem::take(&mut self.unheard) {
            self.statuses[at] = StatusReply::hear(self.receiver)?;
        }
        Ok(())
    }

    /// Hears where the replicas are, and has them give up what only they have, if their user consents. All are asked first, so that a refusal finds
    /// each as it was.
    fn give_up(&mut self, outcomes: &mut [Outcome]) -> Result<(), SyncError> {
        self.hear()?;
        let rounds: &[bool] = if self.options.dry_run { &[true] } else { &[true, false] };
        for &dry_run in rounds {
            for (at, outcome) in outcomes.iter_mut().enumerate() {
                let asked = SyncOptions { dry_run, ..self.members[at].options.clone() };
                let Some(how) = &asked.give_up else { continue };
                let transfer = Transfer { options: &asked, ..self.transfer(at, false) };
                let consented = consent(self.members[at].handle, &transfer, self.statuses[at].clone(), how)?;
                if dry_run == self.options.dry_run {
                    let Consented { status, options, outcome: given_up } = consented;
                    self.members[at].options = options;
                    (self.statuses[at], *outcome) = (status, given_up);
                }
            }
        }
        Ok(())
    }

    /// An error, with what was given up before it.
    fn after_giving_up(&self, error: SyncError, outcomes: &[Outcome]) -> SyncError {
        let said = |(member, outcome): (&SyncedDisk<'_>, &Outcome)| outcome.said(&member.name);
        let said: Vec<String> = self.members.iter().zip(outcomes).filter_map(said).collect();
        match error {
            error if said.is_empty() || self.options.dry_run => error,
            SyncError::Far { message, class } => {
                SyncError::Far { message: format!("{message}. Before that, {}", said.join(", ")), class }
            }
            error => SyncError::GaveUp { given_up: said.join(", "), error: Box::new(error) },
        }
    }

    fn bring(&mut self) -> Result<Round, SyncError> {
        let choices = self.choose_all()?;
        if self.options.dry_run {
            return Ok(Round { members: self.estimate_all(choices)?, ..Round::default() });
        }
        self.refuse_unlike(&choices)?;
        // Nothing is kept of a first copy that never was.
        self.members.iter().for_each(|member| member.account.opened());
        let round = match self.group {
            Some(group) => self.bring_group(group, choices)?,
            None => {
                let mut members = Vec::new();
                for (at, choice) in choices.into_iter().enumerate() {
                    members.push(self.bring_alone(at, choice)?);
                }
                Round { members, ..Round::default() }
            }
        };
        // What was taken over or created is a replica like any other now.
        for member in &mut self.members {
            let options = &mut member.options;
            (options.adopt, options.accept_source, options.create) = (false, false, false);
        }
        Ok(round)
    }

    /// Brings a replica up to date by itself.
    fn bring_alone(&self, at: usize, choice: Choice) -> Result<Summary, SyncError> {
        let (planned, committed) = self.commit_alone(at, choice)?;
        planned.settle(committed)
    }

    /// Has a replica commit by itself what it lacks, if anything.
    fn commit_alone(
        &self,
        at: usize,
        mut choice: Choice,
    ) -> Result<(PlannedMember<'_>, Option<CommitReply>), SyncError> {
        let SyncedDisk { handle, name, options, .. } = &self.members[at];
        let mut status = self.statuses[at].clone();
        let mut transfer = self.transfer(at, false);
        loop {
            let summary = member::summary(handle, &status, name, false);
            let prepared = match handle.live() {
                None => {
                    let view = around(&options.hook, || Ok(handle.view(options.at_view)?))?;
                    at_view(handle, view, choice, status, options)?
                }
                Some(live) => heard(self.receiver, catch_up(handle, live, &transfer, status, choice))?,
            };
            let planned = PlannedMember::new(handle, transfer, prepared, summary);
            if planned.is_done() {
                return Ok((planned, None));
            }
            match planned.transfer.commit(&planned.view, &planned.plan)? {
                DeltaAnswer::Committed(committed) => return Ok((planned, Some(committed))),
                // From another view: this one lets go of what was sent.
                DeltaAnswer::Counted(counted) => {
                    status = *counted;
                    choice = pick(handle, &status, name, options)?;
                    transfer = Transfer { resends: false, ..planned.transfer };
                }
            }
        }
    }

    /// Brings the replicas of a group to one cut.
    fn bring_group(&mut self, group: &GroupHandle, choices: Vec<Choice>) -> Result<Round, SyncError> {
        let seeded = self.seed(&choices)?;
        // What was seeded is at an epoch now.
        let choices = if seeded.is_empty() { choices } else { self.choose_all()? };
        let (cut, mut members) = match group.is_live() {
            true => self.cut_live(group, choices)?,
            false => {
                let (cut, views) = around(&self.options.hook, || Ok(group.cut()?))?;
                (cut, self.plan_all(choices, views)?)
            }
        };
        for member in &mut members {
            let handle = member.handle;
            self.prepare(member).map_err(|error| of_member(handle, error))?;
        }
        let mut summaries = self.commit(group, cut, members)?;
        self.unheard = (0..self.members.len()).collect();
        let mut names = Vec::new();
        for (at, seed) in seeded {
            names.push(self.members[at].name.clone());
            match summaries.get_mut(at) {
                Some(summary) if summary.blocks_changed == 0 => {
                    *summary = Summary { epoch: summary.epoch, ..seed };
                }
                // What was written meanwhile came by itself.
                Some(summary) => {
                    summary.bytes_sent += seed.bytes_sent;
                    summary.bytes_received += seed.bytes_received;
                    summary.seconds += seed.seconds;
                }
                None => {}
            }
        }
        Ok(Round { cut: Some(cut), seeded: names, members: summaries, ..Round::default() })
    }

    /// What the other side said of a replica of a group, with the ends of its sync in the commands that it names.
    fn named(&self, error: SyncError) -> SyncError {
        let Some(group) = self.group.map(GroupHandle::name) else { return error };
        let (message, class) = match error {
            SyncError::Far { message, class } => (message, class),
            SyncError::Conflict(Conflict::Newer(newer)) => match self.named(SyncError::Conflict(*newer)) {
                SyncError::Conflict(conflict) => return Conflict::Newer(Box::new(conflict)).into(),
                SyncError::Diverged(said) => {
                    return SyncError::Diverged(format!(
                        "--adopt gives up nothing that only the replica has (if that can be lost, pass --adopt=overwrite): {said}"
                    ));
                }
                other => return other,
            },
            SyncError::Conflict(unsaveable @ Conflict::Unsaveable { .. }) => {
                let way = format!("--group {group} --discard-there {}", self.destination);
                return SyncError::Refused(unsaveable.to_string().replace("--discard-there SRC DST", &way));
            }
            SyncError::Conflict(Conflict::Diverged(diverged)) => {
                return SyncError::Diverged(diverged.said(&ways_of_group(group)));
            }
            other => return other,
        };
        let is_meant = |member: &&SyncedDisk<'_>| {
            let after = member.path.to_str().and_then(|path| Some(message.split_once(path)?.1));
            after.is_some_and(|after| !after.starts_with(|c: char| c.is_alphanumeric() || ".-_/".contains(c)))
        };
        let message = match self.members.iter().find(is_meant) {
            Some(SyncedDisk { handle, name, .. }) => {
                with_ends(&message, &handle.about().path.to_string_lossy(), name)
            }
            None => message,
        };
        SyncError::Far { message, class }
    }

    fn each(&self) -> impl Iterator<Item = (&SyncedDisk<'a>, &StatusReply)> {
        self.members.iter().zip(&self.statuses)
    }

    /// Picks a method for each disk, or refuses all of them for one.
    fn choose_all(&self) -> Result<Vec<Choice>, SyncError> {
        let pick = |(member, status): (&SyncedDisk<'_>, _)| {
            pick(member.handle, status, &member.name, &member.options)
        };
        self.each().map(pick).collect()
    }

    /// Refuses all disks for one that is not a copy of its source, before anything is sent to any.
    fn refuse_unlike(&self, choices: &[Choice]) -> Result<(), SyncError> {
        for (at, ((member, status), choice)) in self.each().zip(choices).enumerate() {
            let refused =
                self.transfer(at, self.group.is_some()).refuse_unlike(member.handle, choice, status);
            refused.map_err(|error| self.of_one(at, error))?;
        }
        Ok(())
    }

    /// What a sync would move, without a cut.
    fn estimate_all(&self, choices: Vec<Choice>) -> Result<Vec<Summary>, SyncError> {
        let mut summaries = Vec::new();
        for ((member, status), choice) in self.each().zip(choices) {
            let mut summary = member::summary(member.handle, status, &member.name, true);
            estimate(member.handle, choice, status, &member.options, &mut summary)?;
            summaries.push(summary);
        }
        Ok(summaries)
    }

    /// A conversation about a replica by itself, or about one that is prepared for the commit of its group.
    fn transfer(&self, at: usize, prepare: bool) -> Transfer<'_> {
        let member = &self.members[at];
        Transfer {
            sender: self.sender,
            receiver: self.receiver,
            name: &member.name,
            options: &member.options,
            totals: RunningTotals::new(&*member.progress),
            in_place: self.statuses[at].in_place,
            member: (at, prepare),
            resends: self.group.is_none(),
        }
    }

    /// Makes the first copies in a group, each of which is committed by itself.
    fn seed(&mut self, choices: &[Choice]) -> Result<Vec<(usize, Summary)>, SyncError> {
        let mut seeded = Vec::new();
        for (at, choice) in choices.iter().enumerate() {
            if choice.method != Method::Copy && !self.statuses[at].replica.under_way() {
                continue;
            }
            let cost = Spent::begin(self.sender);
            let mut summary = self.bring_alone(at, choice.clone()).map_err(|error| self.of_one(at, error))?;
            cost.add(self.sender, &mut summary);
            seeded.push((at, summary));
            self.unheard.push(at);
            self.hear()?;
        }
        Ok(seeded)
    }

    /// Makes passes over all disks until the rest can be read in a moment, and cuts them.
    fn cut_live(
        &self,
        group: &GroupHandle,
        choices: Vec<Choice>,
    ) -> Result<(Epoch, Vec<PlannedMember<'_>>), SyncError> {
        let mut members = Vec::new();
        for (at, ((member, status), choice)) in self.each().zip(choices).enumerate() {
            let summary = member::summary(member.handle, status, &member.name, false);
            let approach = Approach::new(status.clone(), choice);
            members.push((member.handle, self.transfer(at, true), summary, approach));
        }
        let mut lacking = Vec::new();
        // While one was copied, the others were written to: then little is left of all.
        for _ in 0..2 {
            lacking.clear();
            for (handle, transfer, summary, approach) in &mut members {
                let handle = *handle;
                let Some(live) = handle.live() else { continue };
                let cost = Spent::begin(self.sender);
                let close = approach.come_close(handle, live, transfer);
                lacking.push(heard(self.receiver, close).map_err(|error| of_member(handle, error))?);
                cost.add(self.sender, summary);
            }
        }
        let limits = &self.options.live.cut;
        let (cut, cuts) = around(&self.options.hook, || Ok(group.cut_live(&lacking, limits)?))?;
        let mut planned = Vec::new();
        for ((handle, transfer, summary, approach), cut) in members.into_iter().zip(&cuts) {
            let prepared = approach.arrive(handle, cut, transfer.options)?;
            planned.push(PlannedMember::new(handle, transfer, prepared, summary));
        }
        Ok((cut, planned))
    }

    fn plan_all(&self, choices: Vec<Choice>, views: Vec<View>) -> Result<Vec<PlannedMember<'_>>, SyncError> {
        let mut members = Vec::new();
        for (at, (((member, status), choice), view)) in self.each().zip(choices).zip(views).enumerate() {
            let SyncedDisk { handle, name, options, .. } = member;
            let prepared = at_view(handle, view, choice, status.clone(), options)?;
            let summary = member::summary(handle, status, name, false);
            members.push(PlannedMember::new(handle, self.transfer(at, true), prepared, summary));
        }
        Ok(members)
    }

    /// Sends a member's delta, unless it is where it should be.
    fn prepare(&self, member: &mut PlannedMember<'_>) -> Result<(), SyncError> {
        if !member.is_done() {
            let cost = Spent::begin(self.sender);
            member.transfer.prepare(&member.view, &member.plan)?;
            cost.add(self.sender, &mut member.summary);
        }
        Ok(())
    }

    /// Commits what all members have prepared, and records that at the sources. All say where they are then.
    fn commit(
        &self,
        group: &GroupHandle,
        cut: Epoch,
        members: Vec<PlannedMember<'_>>,
    ) -> Result<Vec<Summary>, SyncError> {
        // A delta was exact when it was sent. What another program has written to a source at rest since may be in the delta of
        // another member that was read later.
        for member in &members {
            member.view.verify().map_err(reading).map_err(|error| of_member(member.handle, error))?;
        }
        self.sender.send_json(COMMIT_GROUP, &cut)?;
        let answer = heard(self.receiver, expect(self.receiver, GROUP_COMMITTED))?;
        let committed: Vec<Option<CommitReply>> = answer.json()?;
        if committed.len() != members.len() {
            return Err(nonsense("the members of a group"));
        }
        let epochs: Vec<Epoch> = members.iter().map(|member| member.view.epoch()).collect();
        group.committed(cut, &epochs)?;
        members.into_iter().zip(committed).map(|(member, committed)| member.settle(committed)).collect()
    }

    /// Names the disk in an error that does not, where there are several.
    fn of_one(&self, at: usize, error: SyncError) -> SyncError {
        if self.group.is_some() { of_member(self.members[at].handle, error) } else { error }
    }
}

impl<'a> SyncedDisk<'a> {
    /// A disk whose replica has that path, and that name for its user.
    fn new(
        handle: &'a Handle,
        (path, name): (PathBuf, String),
        options: SyncOptions,
        progress: Progress<'a>,
    ) -> SyncedDisk<'a> {
        let account = Account::begin(handle, (&path, &name), &options.way, "sync");
        let account = Arc::new(if options.dry_run { account.dry() } else { account });
        let told = account.clone();
        let progress = Box::new(move |done, total| {
            told.progress(done, total);
            progress(done, total);
        });
        SyncedDisk { handle, name, path, options, account, progress }
    }
}

impl Spent {
    fn begin(sender: &Sender) -> Spent {
        let traffic = sender.traffic();
        Spent { began: Instant::now(), before: (traffic.sent(), traffic.received()) }
    }

    /// Bytes sent and received since.
    fn moved(&self, sender: &Sender) -> (u64, u64) {
        let traffic = sender.traffic();
        (traffic.sent() - self.before.0, traffic.received() - self.before.1)
    }

    /// Adds it to a summary; of a dry run, only its time.
    fn add(&self, sender: &Sender, summary: &mut Summary) {
        if !summary.dry_run {
            let (sent, received) = self.moved(sender);
            summary.bytes_sent += sent;
            summary.bytes_received += received;
        }
        summary.seconds += self.began.elapsed().as_secs_f64();
    }
}

/// Names the member in an error that does not.
fn of_member(handle: &Handle, error: SyncError) -> SyncError {
    match error {
        error @ (SyncError::Io { .. } | SyncError::Unreadable(_)) => {
            SyncError::Member { path: handle.about().path.clone(), error: Box::new(error) }
        }
        other => other,
    }
}
