//! The sources' end of a sync of a group: one cut of all sources, a delta to each replica, one commit.
//!
//! ```text
//!     statuses ──▶ first copies, each committed by itself ──▶ cut ──▶ a delta to each, prepared ──▶ commit of all
//! ```
//!
//! Everything that refuses a member is asked before the cut. What a source may forget of its history is recorded after the commit.

use std::path::{Path, PathBuf};
use std::time::Instant;

use delta::{Epoch, Method};
use link::{Link, Receiver, Sender};
use serde::Serialize;
use source::{GroupHandle, Handle, View};

use crate::conflict::{Conflict, ways_of_group, with_ends};
use crate::cut_hook::around;
use crate::error::SyncError;
use crate::options::{GiveUp, SyncOptions};
use crate::plan::Choice;
use crate::report::{Progress, RunningTotals, Summary};
use crate::source_end::account::Account;
use crate::source_end::apart::{Consented, Outcome, consent};
use crate::source_end::live::Approach;
use crate::source_end::member::{self, PlannedMember, at_view, pick};
use crate::source_end::push::{bring, estimate};
use crate::transfer::pack::reading;
use crate::transfer::{Transfer, heard};
use crate::wire::messages::{
    COMMIT_GROUP, CommitReply, GROUP_COMMITTED, OPEN, Open, Opening, StatusReply, expect, nonsense, part,
};

/// What a sync of a group did, besides the summaries of its members.
#[derive(Debug, Clone, Serialize)]
pub struct GroupSummary {
    kind: &'static str,
    /// The name of the group.
    pub group: String,
    /// The folder of its replicas, as the user named it.
    pub destination: String,
    /// The number of the cut at which all replicas are. `None` after a dry run.
    pub epoch: Option<u64>,
    /// Its id.
    pub epoch_id: Option<uuid::Uuid>,
    /// The members that were copied for the first time.
    pub seeded: Vec<String>,
    /// Bytes sent over the link, framing included.
    pub bytes_sent: u64,
    /// Bytes received over the link.
    pub bytes_received: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// Nothing was sent, only counted.
    pub dry_run: bool,
}

/// Brings the replicas of a group at the other end of `link` to one moment. They are in the folder `dir`, and have the names of
/// the sources; `name` is how the user named the folder. With [`SyncOptions::give_up`], all are asked what they would give up before one does; it
/// names the folder in which each is saved.
pub fn push_group(
    group: &GroupHandle,
    link: Link,
    (dir, name): (&Path, &str),
    options: &SyncOptions,
    progress: Progress<'_>,
) -> Result<(GroupSummary, Vec<Summary>), SyncError> {
    let (sender, receiver) = link.split();
    let began = Instant::now();
    let traffic = sender.traffic();
    let pushed = (|| {
        let ends = (&sender, &receiver);
        let mut session = GroupSession::begin(ends, group, (dir, name), options, progress)?;
        let (mut summary, members) = session.round()?;
        summary.seconds = began.elapsed().as_secs_f64();
        if !options.dry_run {
            (summary.bytes_sent, summary.bytes_received) = (traffic.sent(), traffic.received());
        }
        Ok((summary, members))
    })();
    part(sender, &receiver, pushed)
}

/// A conversation about the replicas of a group, in which they may be brought to one moment again and again.
pub(crate) struct GroupSession<'a> {
    sender: &'a Sender,
    receiver: &'a Receiver,
    group: &'a GroupHandle,
    destination: &'a str,
    options: SyncOptions,
    /// The options of each member: those for its first copy, without the hook, as nobody is told of its cut, and those for what it prepares with
    /// the others.
    own: Vec<[SyncOptions; 2]>,
    progress: Progress<'a>,
    /// What each member's sync is counted as.
    accounts: Vec<Account>,
    /// The replicas, as the user would name them, and their paths there.
    names: Vec<String>,
    paths: Vec<PathBuf>,
    /// The replicas' statuses for the round that comes next; empty if they have not been heard yet.
    statuses: Vec<StatusReply>,
}

impl<'a> GroupSession<'a> {
    /// Opens the replicas.
    pub(crate) fn begin(
        (sender, receiver): (&'a Sender, &'a Receiver),
        group: &'a GroupHandle,
        (dir, destination): (&Path, &'a str),
        options: &SyncOptions,
        progress: Progress<'a>,
    ) -> Result<GroupSession<'a>, SyncError> {
        if let Some(pace) = &options.bwlimit {
            sender.pace(pace);
        }
        let (mut names, mut paths, mut members) = (Vec::new(), Vec::new(), Vec::<Open>::new());
        let (mut accounts, mut own) = (Vec::new(), Vec::new());
        let (statuses, mut options) = (Vec::new(), options.clone());
        options.live.cut.together = true;
        for (handle, file) in group.members().iter().zip(group.files()) {
            handle.be_polite(options.polite);
            let mut of_member = options.clone();
            if let Some(GiveUp::Save(to)) = &mut of_member.give_up {
                *to = to.join(format!("{file}.delta"));
            }
            names.push(format!("{}/{file}", destination.trim_end_matches('/')));
            paths.push(dir.join(file));
            members.push(Open::for_sync(&dir.join(file), &of_member).beside(handle)?);
            own.push([SyncOptions { hook: None, ..of_member.clone() }, of_member]);
            let name = names.last().map_or("", String::as_str);
            let account = Account::begin(handle, (&dir.join(file), name), &options.way, "sync");
            accounts.push(if options.dry_run { account.dry() } else { account });
        }
        sender.send_json(OPEN, &Opening { group: Some(group.name().to_owned()), members })?;
        Ok(GroupSession {
            sender,
            receiver,
            group,
            destination,
            options,
            own,
            progress,
            accounts,
            names,
            paths,
            statuses,
        })
    }

    /// Brings all replicas to one moment.
    pub(crate) fn round(&mut self) -> Result<(GroupSummary, Vec<Summary>), SyncError> {
        let done = self.give_up().and_then(|given_up| {
            let (group, mut members) = self.bring_together()?;
            members.iter_mut().zip(given_up).for_each(|(member, outcome)| outcome.tell(member));
            Ok((group, members))
        });
        let mut done = done.map_err(|error| self.named(error));
        match &mut done {
            Ok((_, members)) => {
                for (account, member) in self.accounts.iter().zip(members) {
                    account.synced(&Ok(member.clone()));
                    account.say_doubts(member);
                }
            }
            // What it is about is not known of each.
            Err(error) => self.accounts.iter().for_each(|account| account.failed(error)),
        }
        done
    }

    /// Hears where the replicas are, and has them give up what only they have, if their user consents. All are asked first, so that a refusal finds
    /// each as it was.
    fn give_up(&mut self) -> Result<Vec<Outcome>, SyncError> {
        self.statuses.clear();
        for _ in self.group.members() {
            self.statuses.push(StatusReply::hear(self.receiver)?);
        }
        let mut done = vec![Outcome::default(); self.statuses.len()];
        let rounds: &[bool] = if self.options.dry_run { &[true] } else { &[true, false] };
        for &dry_run in rounds {
            for (at, handle) in self.group.members().iter().enumerate() {
                let asked = SyncOptions { dry_run, ..self.options_of(at, true).clone() };
                let Some(how) = &asked.give_up else { continue };
                let transfer = Transfer { options: &asked, ..self.transfer(at, true) };
                let consented = consent(handle, &transfer, self.statuses[at].clone(), how)?;
                if dry_run == self.options.dry_run {
                    let Consented { status, options, outcome } = consented;
                    self.own[at] = [SyncOptions { hook: None, ..options.clone() }, options];
                    (self.statuses[at], done[at]) = (status, outcome);
                }
            }
        }
        Ok(done)
    }

    fn bring_together(&mut self) -> Result<(GroupSummary, Vec<Summary>), SyncError> {
        let choices = self.choose_all()?;
        if !self.options.dry_run {
            self.refuse_unlike(&choices)?;
        }
        self.accounts.iter().for_each(Account::opened);
        let mut done = GroupSummary {
            kind: "group",
            group: self.group.name().to_owned(),
            destination: self.destination.to_owned(),
            epoch: None,
            epoch_id: None,
            seeded: Vec::new(),
            bytes_sent: 0,
            bytes_received: 0,
            seconds: 0.0,
            dry_run: self.options.dry_run,
        };
        if self.options.dry_run {
            return Ok((done, self.estimate_all(choices)?));
        }
        let seeded = self.seed(&choices)?;
        done.seeded = seeded.iter().map(|(at, _)| self.names[*at].clone()).collect();
        // What was seeded is at an epoch now.
        let choices = if seeded.is_empty() { choices } else { self.choose_all()? };
        let (cut, mut members) = match self.group.is_live() {
            true => self.cut_live(choices)?,
            false => {
                let (cut, views) = around(&self.options.hook, || Ok(self.group.cut()?))?;
                (cut, self.plan_all(choices, views)?)
            }
        };
        for member in &mut members {
            let handle = member.handle;
            self.prepare(member).map_err(|error| of_member(handle, error))?;
        }
        let mut summaries = self.commit(cut, members)?;
        (done.epoch, done.epoch_id) = (Some(cut.number), Some(cut.id));
        // What was taken over or created is a replica like any other now.
        for options in self.own.iter_mut().flatten() {
            (options.adopt, options.create) = (false, false);
        }
        for (at, seed) in seeded {
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
        Ok((done, summaries))
    }

    /// What the other side said of a replica, with the ends of its sync in the commands that it names.
    fn named(&self, error: SyncError) -> SyncError {
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
                let (name, dir) = (self.group.name(), self.destination);
                let way = format!("--group {name} --discard-there {dir}");
                return SyncError::Refused(unsaveable.to_string().replace("--discard-there SRC DST", &way));
            }
            SyncError::Conflict(Conflict::Diverged(diverged)) => {
                let said = diverged.said(&ways_of_group(self.group.name()));
                return SyncError::Diverged(said);
            }
            other => return other,
        };
        let members = self.group.members().iter().zip(&self.paths).zip(&self.names);
        let is_meant = |path: &PathBuf| {
            let after = path.to_str().and_then(|path| Some(message.split_once(path)?.1));
            after.is_some_and(|after| !after.starts_with(|c: char| c.is_alphanumeric() || ".-_/".contains(c)))
        };
        let meant = members.into_iter().find(|((_, path), _)| is_meant(path));
        let message = match meant {
            Some(((handle, _), name)) => with_ends(&message, &handle.about().path.to_string_lossy(), name),
            None => message,
        };
        SyncError::Far { message, class }
    }

    fn each(&self) -> impl Iterator<Item = (&'a Handle, &StatusReply, &str)> {
        let named = self.names.iter().map(String::as_str);
        self.group
            .members()
            .iter()
            .zip(&self.statuses)
            .zip(named)
            .map(|((handle, status), name)| (handle, status, name))
    }

    /// Picks a method for each member, or refuses all of them for one.
    fn choose_all(&self) -> Result<Vec<Choice>, SyncError> {
        let mut choices = Vec::new();
        for (at, (handle, status, name)) in self.each().enumerate() {
            choices.push(pick(handle, status, name, self.options_of(at, true))?);
        }
        Ok(choices)
    }

    /// Refuses all members for one that is not a copy of its source, before anything is sent to any.
    fn refuse_unlike(&self, choices: &[Choice]) -> Result<(), SyncError> {
        for (at, ((handle, status, _), choice)) in self.each().zip(choices).enumerate() {
            let refused = self.transfer(at, true).refuse_unlike(handle, choice, status);
            refused.map_err(|error| of_member(handle, error))?;
        }
        Ok(())
    }

    fn estimate_all(&self, choices: Vec<Choice>) -> Result<Vec<Summary>, SyncError> {
        let mut summaries = Vec::new();
        for (at, ((handle, status, name), choice)) in self.each().zip(choices).enumerate() {
            let mut summary = member::summary(handle, status, name, true);
            estimate(handle, choice, status, self.options_of(at, true), &mut summary)?;
            summaries.push(summary);
        }
        Ok(summaries)
    }

    /// The options of a member, for what it prepares with the others or for its first copy.
    fn options_of(&self, at: usize, prepare: bool) -> &SyncOptions {
        &self.own[at][usize::from(prepare)]
    }

    fn transfer(&self, at: usize, prepare: bool) -> Transfer<'_> {
        Transfer {
            sender: self.sender,
            receiver: self.receiver,
            name: &self.names[at],
            options: self.options_of(at, prepare),
            totals: RunningTotals::new(self.progress),
            in_place: self.statuses[at].in_place,
            member: (at, prepare),
            resends: false,
        }
    }

    /// Makes the first copies, each of which is committed by itself.
    fn seed(&mut self, choices: &[Choice]) -> Result<Vec<(usize, Summary)>, SyncError> {
        let mut seeded = Vec::new();
        for (at, (handle, choice)) in self.group.members().iter().zip(choices).enumerate() {
            let status = &self.statuses[at];
            if choice.method != Method::Copy && !status.replica.under_way() {
                continue;
            }
            let (traffic, began) = (self.sender.traffic(), Instant::now());
            let before = (traffic.sent(), traffic.received());
            let summary = bring(handle, self.transfer(at, false), status.clone(), || ());
            let mut summary = summary.map_err(|error| of_member(handle, error))?;
            summary.bytes_sent = traffic.sent() - before.0;
            summary.bytes_received = traffic.received() - before.1;
            summary.seconds = began.elapsed().as_secs_f64();
            seeded.push((at, summary));
            self.statuses[at] = StatusReply::hear(self.receiver)?;
        }
        Ok(seeded)
    }

    /// Makes passes over all disks until the rest can be read in a moment, and cuts them.
    fn cut_live(&self, choices: Vec<Choice>) -> Result<(Epoch, Vec<PlannedMember<'_>>), SyncError> {
        let traffic = self.sender.traffic();
        let mut members = Vec::new();
        for (at, ((handle, status, name), choice)) in self.each().zip(choices).enumerate() {
            let summary = member::summary(handle, status, name, false);
            members.push((handle, self.transfer(at, true), summary, Approach::new(status.clone(), choice)));
        }
        let mut lacking = Vec::new();
        // While one was copied, the others were written to: then little is left of all.
        for _ in 0..2 {
            lacking.clear();
            for (handle, transfer, summary, approach) in &mut members {
                let handle = *handle;
                let Some(live) = handle.live() else { continue };
                let before = (traffic.sent(), traffic.received());
                let close = approach.come_close(handle, live, transfer);
                lacking.push(heard(self.receiver, close).map_err(|error| of_member(handle, error))?);
                summary.bytes_sent += traffic.sent() - before.0;
                summary.bytes_received += traffic.received() - before.1;
            }
        }
        let limits = &self.options.live.cut;
        let (cut, cuts) = around(&self.options.hook, || Ok(self.group.cut_live(&lacking, limits)?))?;
        let mut planned = Vec::new();
        for ((handle, transfer, summary, approach), cut) in members.into_iter().zip(&cuts) {
            let prepared = approach.arrive(handle, cut, transfer.options)?;
            planned.push(PlannedMember::new(handle, transfer, prepared, summary));
        }
        Ok((cut, planned))
    }

    fn plan_all(&self, choices: Vec<Choice>, views: Vec<View>) -> Result<Vec<PlannedMember<'_>>, SyncError> {
        let mut members = Vec::new();
        for (at, (((handle, status, name), choice), view)) in self.each().zip(choices).zip(views).enumerate()
        {
            let prepared = at_view(handle, view, choice, status.clone(), self.options_of(at, true))?;
            let summary = member::summary(handle, status, name, false);
            members.push(PlannedMember::new(handle, self.transfer(at, true), prepared, summary));
        }
        Ok(members)
    }

    /// Sends a member's delta, unless it is where it should be.
    fn prepare(&self, member: &mut PlannedMember<'_>) -> Result<(), SyncError> {
        if member.is_done() {
            return Ok(());
        }
        let began = Instant::now();
        let transfer = &member.transfer;
        let traffic = self.sender.traffic();
        let before = (traffic.sent(), traffic.received());
        transfer.prepare(&member.view, &member.plan)?;
        let summary = &mut member.summary;
        summary.bytes_sent += traffic.sent() - before.0;
        summary.bytes_received += traffic.received() - before.1;
        summary.seconds = began.elapsed().as_secs_f64();
        Ok(())
    }

    /// Commits what all members have prepared, and records that at the sources.
    fn commit(&self, cut: Epoch, members: Vec<PlannedMember<'_>>) -> Result<Vec<Summary>, SyncError> {
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
        self.group.committed(cut, &epochs)?;
        members.into_iter().zip(committed).map(|(member, committed)| member.settle(committed)).collect()
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
