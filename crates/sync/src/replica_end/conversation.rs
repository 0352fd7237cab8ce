//! The replica's end of a conversation: it says what is there, receives, and commits. One disk and the disks of a group are served alike; those of a
//! group are prepared one by one, and committed together.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use compare::rolling::SumParams;
use compare::{DigestReport, Scope};
use delta::{Epoch, Frame};
use device::Disk;
use link::{Message, Received, Receiver, Sender};
use replica::{CommitMode, Coverage, DeltaReceiver, ExpectedBytes, KnownReplicas, Replica, State};
use source::Attended;

use crate::error::{Class, SyncError};
use crate::options::GiveUp;
use crate::plan::primary::refuse_adoption;
use crate::replica_end::mirror_receiver::receive_batches;
use crate::replica_end::opening::{Opened, OpenedDisks, Opener, list_received};
use crate::report::Progress;
use crate::roles::demote::give_up;
use crate::site::{Site, list};
use crate::transfer::compared::while_linked;
use crate::transfer::saved::look_for_folder_of;
use crate::wire::digests::ReplicaDigests;
use crate::wire::messages::{
    Apart, COMMIT_GROUP, COMMITTED, CommitReply, FAILED, Failed, GROUP_COMMITTED, Moments, OPEN, Open,
    Opening, PLAN, PREPARED, Plan, RESULT, StatusReply, VERDICT, VerifyFinding, nonsense, of_digest_report,
    of_sum_report, to_unit, unexpected,
};

/// The replica's end of a conversation.
#[derive(Clone, Copy)]
pub(crate) struct ReplicaEnd<'a> {
    pub sender: &'a Sender,
    pub receiver: &'a Receiver,
    /// The host, if the caller opens its replicas by that.
    pub site: Option<&'a dyn Site>,
    /// The progress of what is received, or read to be compared.
    pub progress: Progress<'a>,
    /// False refuses whatever would write to the replica.
    pub writes: bool,
}

impl ReplicaEnd<'_> {
    /// The conversation, from the statuses of what is requested to the source's goodbye. What the source reported, if it did.
    pub(crate) fn converse(
        &self,
        mut asked: Opening,
        opener: Opener<'_>,
    ) -> Result<Option<Message>, SyncError> {
        let known = self.site.and_then(Site::known);
        let mut opened = opener(&asked)?;
        for replica in opened.members.iter().filter_map(Opened::replica) {
            if replica.status().source.is_some() {
                list(replica, known.as_ref());
            }
        }
        let mut covered = self.say_all(&asked, &mut opened.members)?;
        let mut doubted = None;
        loop {
            let plan: Plan = match self.receiver.recv()? {
                Some(message) if message.kind == PLAN => message.json()?,
                Some(message) if message.kind == COMMIT_GROUP => {
                    self.commit_group(&asked, &mut opened, message.json()?, &covered)?;
                    covered = self.say_all(&asked, &mut opened.members)?;
                    continue;
                }
                // Whatever has become of them since, it is found as by every opening.
                Some(message) if message.kind == OPEN => {
                    asked.withdraw(Opening::of(&message)?);
                    drop(opened);
                    opened = opener(&asked)?;
                    covered = self.say_all(&asked, &mut opened.members)?;
                    continue;
                }
                // Nothing more is to be done: up to date, or a dry run.
                end @ (None | Some(Message { kind: RESULT, .. })) => {
                    self.apply(&asked, &mut opened.members)?;
                    return end.map_or(Ok(None), |message| self.last_word(Some(message), None));
                }
                Some(message) => return Err(unexpected(&message)),
            };
            plan.check()?;
            let at = plan.member;
            let (Some(open), Some(member)) = (asked.members.get(at), opened.members.get_mut(at)) else {
                return Err(nonsense("a member of the group"));
            };
            self.admit(open, member, &plan, known.as_ref())?;
            if let Some(apart) = plan.give_up {
                let path = member.path().to_path_buf();
                // Its lock is needed.
                drop(opened);
                self.give_up((open, asked.group.is_some()), &path, apart)?;
                opened = opener(&asked)?;
                self.say_given_up(open, opened.members.get_mut(at))?;
                continue;
            }
            let Opened::Replica(replica) = member else {
                return Err(nonsense("what is to be done with a source"));
            };
            if let Some(group) = &mut opened.group {
                if !plan.suits_group() {
                    return Err(nonsense("what is to be done with a member of a group"));
                }
                group.counts();
            }
            if open.verify && plan.compare.is_some() {
                // Whatever ends it from here on: what it is about to find is not to be missed by digests.
                doubted.get_or_insert_with(|| replica.doubts_digests().unwrap_or(true));
                let _ = replica.doubt_digests();
            }
            match self.carry_out(open, replica, plan)? {
                Step::Prepared(covers) => covered[at] = covers,
                Step::Goes => {}
                Step::Done => return Ok(None),
                Step::Committed if open.verify => {
                    return self.last_word(None, Some((replica, doubted.unwrap_or(true))));
                }
                Step::Committed if opened.group.is_some() => say_status(self.sender, replica, open.commit)?,
                // The other end opens it anew, or says goodbye, when it has recorded that.
                Step::Committed => {}
            }
        }
    }

    /// Says where all of them are. None is covered by a delta of the commit to come.
    fn say_all(&self, asked: &Opening, members: &mut [Opened]) -> Result<Vec<Coverage>, SyncError> {
        for (open, member) in asked.members.iter().zip(&mut *members) {
            match member {
                Opened::Replica(replica) => say_status(self.sender, replica, open.commit)?,
                // A source itself: nothing is received for it as it is.
                Opened::Primary(path, primary) => {
                    let (path, primary) = (path.clone(), Some(primary.clone()));
                    let status = StatusReply::of(replica::Status::nothing());
                    StatusReply { path, primary, ..status }.say(self.sender)?;
                }
            }
        }
        Ok(vec![Coverage::Part; members.len()])
    }

    /// Refuses to do what a plan says with a disk that is only looked at, or that may not be written to.
    fn admit(
        &self,
        open: &Open,
        member: &Opened,
        plan: &Plan,
        known: Option<&KnownReplicas>,
    ) -> Result<(), SyncError> {
        // Comparing is always allowed; what follows writes.
        if plan.looks() {
            return Ok(());
        }
        if !self.writes {
            return Err(nonsense("changes, although none were asked for"));
        }
        let Opened::Replica(replica) = member else { return Ok(()) };
        if let (true, Some(site)) = (open.verify, self.site) {
            refuse_adoption(replica.path(), &site.opening(open.journal_dir.as_deref()), site)?;
        }
        replica.mergeable()?;
        list_received(replica, known, open);
        Ok(())
    }

    /// Does what a plan says with a replica.
    fn carry_out(&self, open: &Open, replica: &mut Replica, plan: Plan) -> Result<Step, SyncError> {
        let ReplicaEnd { sender, receiver, .. } = *self;
        if let Some(released) = plan.release {
            replica.release(released)?;
            sender.send_json(COMMITTED, &CommitReply::nothing_written(released.epoch))?;
            return Ok(Step::Committed);
        }
        if plan.accept {
            replica.accept()?;
            let epoch = replica.status().epoch.ok_or_else(|| nonsense("an acceptance"))?;
            sender.send_json(COMMITTED, &CommitReply::nothing_written(epoch))?;
            return Ok(Step::Committed);
        }
        if let Some(mirror) = &plan.mirror {
            return receive_batches(sender, receiver, replica, mirror).map(|()| Step::Done);
        }
        if let (Some(scope), false) = (&plan.compare, plan.delta) {
            self.answer(&replica.content()?, scope, None).map_err(SyncError::of_replica)?;
            if !plan.looks_first {
                return Ok(Step::Committed);
            }
            say_status(sender, replica, open.commit)?;
            return Ok(Step::Goes);
        }
        Ok(match self.take_delta(replica, open, plan)? {
            Taken::Committed(committed) => {
                self.forget_former(open, replica);
                sender.send_json(COMMITTED, &committed)?;
                Step::Committed
            }
            Taken::Prepared(covers) => {
                sender.send_json(PREPARED, &())?;
                Step::Prepared(covers)
            }
            Taken::Kept => {
                say_status(sender, replica, open.commit)?;
                Step::Goes
            }
        })
    }

    /// Commits what the members of a group have prepared.
    fn commit_group(
        &self,
        asked: &Opening,
        OpenedDisks { members, group }: &mut OpenedDisks,
        cut: Epoch,
        covered: &[Coverage],
    ) -> Result<(), SyncError> {
        let group = group.as_mut().ok_or_else(|| nonsense("the commit of a group"))?;
        let mut replicas = Vec::new();
        for member in std::mem::take(members) {
            match member {
                Opened::Replica(replica) => replicas.push(*replica),
                Opened::Primary(..) => return Err(nonsense("the commit of a source")),
            }
        }
        let done = group.commit(cut, &mut replicas)?;
        let mut committed = Vec::new();
        for (((replica, open), covered), done) in
            replicas.iter_mut().zip(&asked.members).zip(covered).zip(&done)
        {
            replica.note_committed(*covered);
            // Of those to which nothing was sent as well.
            replica.apply_options()?;
            self.forget_former(open, replica);
            let warnings = replica.take_warnings();
            let sound = replica.verdict().is_none();
            committed.push(done.as_ref().map(|done| CommitReply {
                warnings,
                sound,
                ..CommitReply::of(done)
            }));
        }
        *members = replicas.into_iter().map(|replica| Opened::Replica(Box::new(replica))).collect();
        Ok(self.sender.send_json(GROUP_COMMITTED, &committed)?)
    }

    /// Takes over what the user wants of the replicas, where nothing was sent.
    fn apply(&self, asked: &Opening, members: &mut [Opened]) -> Result<(), SyncError> {
        for (open, member) in asked.members.iter().zip(members) {
            if let (Opened::Replica(replica), true) = (member, open.keep_anyway && self.writes) {
                replica.apply_options()?;
            }
        }
        Ok(())
    }

    /// Forgets the source that an adopted disk was before, if it follows that source's other self now. One that was restored from
    /// its replica goes on as its own source. What is left if this fails is not trusted: the disk has changed.
    fn forget_former(&self, open: &Open, replica: &Replica) {
        let Some(site) = self.site.filter(|_| open.adopt) else { return };
        if let Ok(Some((place, about))) = site.source(&replica.path().to_string_lossy()) {
            if replica.status().source == Some(about.uuid) {
                let _ = site.forget(&place, &about);
            }
        }
    }

    /// Gives up what was written to a disk since it went its own way, as its user has consented to.
    fn give_up(&self, (open, in_group): (&Open, bool), path: &Path, apart: Apart) -> Result<(), SyncError> {
        let (Some(site), Some(how)) = (self.site, &open.give_up) else {
            return Err(nonsense("what is to be given up"));
        };
        // Before it is promoted: what fails here has changed nothing.
        if let GiveUp::Save(file) = how {
            look_for_folder_of(file, in_group)?;
        }
        give_up(site, path, open.journal_dir.as_deref(), (apart.since, how), self.progress)
    }

    /// Says what a disk is that has given up what it had.
    fn say_given_up(&self, open: &Open, member: Option<&mut Opened>) -> Result<(), SyncError> {
        match member {
            Some(Opened::Replica(replica)) => say_status(self.sender, replica, open.commit),
            Some(Opened::Primary(path, _)) => Err(SyncError::Refused(format!(
                "{} became a source again while it was given up: stop what does that, and run the command again",
                path.display()
            ))),
            None => Err(nonsense("a member of the group")),
        }
    }

    /// Receives to the source's goodbye, with what a verification may have found of the replica, and whether digests of it were in doubt before.
    fn last_word(
        &self,
        mut result: Option<Message>,
        verified: Option<(&Replica, bool)>,
    ) -> Result<Option<Message>, SyncError> {
        while let Some(message) = self.receiver.recv()? {
            match (message.kind, verified) {
                (RESULT, _) => result = Some(message),
                (VERDICT, Some((replica, doubted))) => {
                    let found: VerifyFinding = message.json()?;
                    // The source knows it, whether it can be written down here or not.
                    let VerifyFinding { bytes_differing, but_changed } = found;
                    if bytes_differing == 0 && !doubted {
                        replica.believe_digests();
                    }
                    let _ = replica.note_verdict(bytes_differing, 0, but_changed);
                }
                (FAILED, _) => return Err(unexpected(&message)),
                _ => {}
            }
        }
        Ok(result)
    }
}

/// What a plan has led to.
enum Step {
    /// Another plan is to come, or the goodbye.
    Goes,
    /// The replica waits for the commit of its group.
    Prepared(Coverage),
    /// What was asked for is done.
    Committed,
    /// The source has said goodbye.
    Done,
}

/// What a delta comes to that has come whole.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AtEnd {
    /// It is committed.
    Commit,
    /// It is kept, as a pass over a live disk.
    Keep,
    /// It waits for the commit of the group.
    Prepare,
}

impl AtEnd {
    fn of(plan: &Plan) -> AtEnd {
        match (plan.pass, plan.prepare) {
            (true, _) => AtEnd::Keep,
            (false, true) => AtEnd::Prepare,
            (false, false) => AtEnd::Commit,
        }
    }
}

/// How a delta is committed.
fn commit_of(open: &Open, plan: &Plan, replica: &Replica) -> CommitMode {
    match open.commit {
        // No other delta goes on with a clone of a replica that keeps its past.
        CommitMode::Reflink if plan.pass && replica.keeps_past() => CommitMode::Journal,
        asked => asked,
    }
}

/// What became of a delta.
pub(crate) enum Taken {
    Committed(CommitReply),
    Kept,
    Prepared(Coverage),
}

/// A path without symbolic links, the same before and after there is a file.
fn canonical(path: &Path) -> std::io::Result<PathBuf> {
    std::fs::canonicalize(path).or_else(|error| match (path.parent(), path.file_name()) {
        (Some(folder), Some(name)) => Ok(std::fs::canonicalize(folder)?.join(name)),
        _ => Err(error),
    })
}

/// True unless a replica is known to read as zeroes. One that cannot be opened is refused later, with the reason.
fn holds_data(replica: &Replica) -> bool {
    replica.content().is_ok_and(|disk| !matches!(disk.allocated(0), Ok(None)))
}

pub(crate) fn say_status(
    sender: &Sender,
    replica: &mut Replica,
    commit: CommitMode,
) -> Result<(), SyncError> {
    let path = replica.path().to_path_buf();
    let status = replica.status().clone();
    // A device may be larger than its source.
    let len = match status.changed {
        Some(_) if status.capacity.is_none() => Some(replica.content()?.len()),
        _ => None,
    };
    let holds_data = status.epoch.is_some() && holds_data(replica);
    let (size, mut said) = (status.size, StatusReply::of(status));
    said.holds_data = holds_data;
    said.path = canonical(&path).unwrap_or(path);
    said.wrong_size = len.filter(|len| *len != size);
    said.in_place = replica.is_in_place(commit);
    let anew = replica.demotes_anew();
    said.demotes_anew = anew[anew.len().saturating_sub(StatusReply::MOST_ANEW)..].to_vec();
    said.acceptable = replica.acceptable();
    said.moments = replica.keeps_every().map(|every| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Moments { every, now: now.as_micros().try_into().unwrap_or(u64::MAX) }
    });
    said.say(sender)
}

impl ReplicaEnd<'_> {
    /// Receives a delta, and commits it if that is its end.
    pub(crate) fn take_delta(
        &self,
        replica: &mut Replica,
        open: &Open,
        plan: Plan,
    ) -> Result<Taken, SyncError> {
        let ReplicaEnd { receiver, progress, .. } = *self;
        let expected = match plan.data {
            0 if plan.resends => ExpectedBytes::Countable,
            0 => ExpectedBytes::Unknown,
            bytes => ExpectedBytes::AtMost(bytes),
        };
        replica.expect(expected, &plan.before);
        if let Some(params) = &plan.rolling {
            self.say_sums(&replica.content()?, params)?;
        }
        let message = receiver.recv()?.ok_or_else(|| SyncError::Far {
            message: "the source ended the conversation early: run again".into(),
            class: Class::Failed,
        })?;
        // Digests cannot be bound to what a pass leaves: it is not a state of the replica.
        let asked = open.digests.as_ref().filter(|_| !plan.pass);
        let mut kept = asked.map(|asked| ReplicaDigests::open(asked, replica, open.adopt)).transpose()?;
        let status = replica.status().clone();
        let disk = plan.compare.as_ref().map(|_| replica.content()).transpose()?;
        let header = to_unit(message).map_err(|m| unexpected(&m))?;
        let receipt = replica.receive(header, commit_of(open, &plan, replica))?;
        if let Some(kept) = &mut kept {
            kept.begin(plan.compare.as_ref(), receipt.header(), &status)?;
        }
        let (seen, at_end, mut replaced) = (kept.as_ref(), AtEnd::of(&plan), 0);
        // By kept digests the source is compared with what the replica held once.
        let by_digests = plan.compare.is_some() && seen.is_some_and(ReplicaDigests::stand);
        let covers = if by_digests { Coverage::Part } else { receipt.covers() };
        let passes_over = plan.mends;
        let mends = receipt.header().is_some_and(|header| header.partial);
        let taken = match (&plan.compare, disk) {
            (Some(scope), Some(disk)) => self.while_answering((&disk, scope, seen), || {
                self.take_units(receipt, seen, at_end, |frame| replaced += bytes_of(frame))
            }),
            _ => {
                let mut done = 0;
                self.take_units(receipt, seen, at_end, |frame| match &plan.rolling {
                    // After the sums the source goes through its disk.
                    Some(params) => {
                        done = frame.records.last().map_or(done, |record| done.max(record.end()));
                        progress(params.size + done, params.size * 2);
                    }
                    None => {
                        done += bytes_of(frame);
                        progress(done, plan.bytes);
                    }
                })
            }
        };
        let taken = taken.inspect_err(|_| {
            if mends && replaced > 0 {
                // What was found so far is not repaired. What was known before is more than a part of it shows.
                let known = replica.verdict().map_or(0, |known| known.bytes_differing);
                let _ = replica.note_verdict(replaced.max(known), 0, false);
            }
        })?;
        Ok(match taken {
            Taken::Committed(mut committed) => {
                replica.note_committed(covers);
                note_damage(replica, (&status, committed.epoch), (covers, replaced));
                if let Some(but_changed) = passes_over {
                    let _ = replica.note_verdict(0, replaced, but_changed);
                }
                committed.sound = replica.verdict().is_none();
                committed.warnings = replica.take_warnings();
                committed.by_digests = by_digests;
                committed.digests = kept.map(|kept| kept.end(replica.status().nonce));
                Taken::Committed(committed)
            }
            Taken::Prepared(_) => Taken::Prepared(covers),
            Taken::Kept => Taken::Kept,
        })
    }

    /// Sends digests while the delta comes that is made of them.
    fn while_answering(
        &self,
        (disk, scope, kept): (&Arc<dyn Disk>, &Scope, Option<&ReplicaDigests>),
        take: impl FnOnce() -> Result<Taken, SyncError>,
    ) -> Result<Taken, SyncError> {
        std::thread::scope(|threads| {
            let answering =
                std::thread::Builder::new().name("answer".into()).spawn_scoped(threads, move || {
                    self.answer(disk, scope, kept).map_err(|error| {
                        let error = SyncError::of_replica(error);
                        // The source waits for the rest, and this side for the source's reply.
                        let _ = self.sender.send_json(FAILED, &Failed::of(&error));
                        error
                    })
                });
            let answering = answering.map_err(SyncError::io("start a thread"))?;
            let received = take();
            match answering.join() {
                // A link that broke during the answers broke for the units too, with a better error there.
                Ok(Err(error)) if received.is_ok() => Err(error),
                Ok(_) => received,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Sends the sums of the replica's blocks.
    fn say_sums(&self, disk: &Arc<dyn Disk>, params: &SumParams) -> Result<(), SyncError> {
        let mut trouble = None;
        let told = compare::rolling::block_sums(disk, params, |(told, sums)| {
            (self.progress)(told.range().end, params.size * 2);
            self.sender.send(of_sum_report(&told, &sums)?).map_err(|error| {
                trouble = Some(error);
                std::io::Error::other("the source stopped")
            })
        });
        told.map_err(|error| match trouble {
            Some(trouble) => trouble.into(),
            None => SyncError::of_replica(error),
        })
    }

    /// Sends the digests of the replica's blocks.
    pub(crate) fn answer(
        &self,
        disk: &Arc<dyn Disk>,
        scope: &Scope,
        kept: Option<&ReplicaDigests>,
    ) -> std::io::Result<()> {
        // At a low rate nothing is said for long.
        let disk: &Arc<dyn Disk> = &(Arc::new(Attended::new(disk.clone(), while_linked(self.receiver))) as _);
        let mut done = 0;
        let say = |report: DigestReport, digests: Vec<u8>| {
            let range = report.range();
            done += range.end - range.start;
            (self.progress)(done, scope.bytes());
            self.sender.send(of_digest_report(&report, &digests)?).map_err(std::io::Error::other)
        };
        match kept {
            Some(kept) => kept.answer(disk, scope, say),
            None => compare::answer(disk, scope, say),
        }
    }

    /// The next message; `None` after the peer's goodbye. Until one is there, the disk goes on with what has come: it would wait as well
    /// otherwise, as each frame is more than it takes at once.
    fn next_of(&self, receipt: &mut DeltaReceiver<'_>) -> link::Result<Option<Message>> {
        loop {
            match self.receiver.recv_within(Duration::ZERO)? {
                Received::Message(message) => return Ok(Some(message)),
                Received::Goodbye => return Ok(None),
                Received::Nothing if receipt.advance() => {}
                Received::Nothing => return self.receiver.recv(),
            }
        }
    }

    /// Receives the frames of a delta, and its trailer.
    fn take_units(
        &self,
        mut receipt: DeltaReceiver<'_>,
        kept: Option<&ReplicaDigests>,
        at_end: AtEnd,
        mut seen: impl FnMut(&Frame),
    ) -> Result<Taken, SyncError> {
        loop {
            let message = match self.next_of(&mut receipt) {
                Ok(Some(message)) => message,
                end => {
                    // What has arrived is kept: the next sync resumes there.
                    receipt.keep()?;
                    return Err(match end {
                        Err(error) => error.into(),
                        Ok(_) => SyncError::Far {
                            message: "the source ended the transfer early: run again to resume it".into(),
                            class: Class::Failed,
                        },
                    });
                }
            };
            let unit = match to_unit(message) {
                Ok(unit) => unit,
                Err(message) => {
                    receipt.keep()?;
                    return Err(unexpected(&message));
                }
            };
            let last = unit.kind == delta::UnitKind::Trailer;
            if last && at_end == AtEnd::Keep {
                // Kept like an interrupted transfer: the next delta resumes it.
                receipt.keep_pass()?;
                return Ok(Taken::Kept);
            }
            receipt.unit_seen(unit, |frame| {
                if let Some(kept) = kept {
                    kept.frame(frame);
                }
                seen(frame);
            })?;
            if last && receipt.is_counted() {
                receipt.keep()?;
                return Ok(Taken::Kept);
            }
            if last && at_end == AtEnd::Prepare {
                receipt.prepare()?;
                return Ok(Taken::Prepared(Coverage::Part));
            }
            if last {
                return Ok(Taken::Committed(CommitReply::of(&receipt.finish()?)));
            }
        }
    }
}

/// Notes what a comparison of all has replaced in a replica that was at that epoch already: damage, or a change that was missed. Of a
/// repair its source says what it was.
fn note_damage(
    replica: &Replica,
    (was, epoch): (&replica::Status, delta::Epoch),
    (covers, replaced): (Coverage, u64),
) {
    let whole = covers == Coverage::Whole
        && was.state == State::Exact
        && was.unsure.is_empty()
        && was.changed.is_none();
    if whole && was.epoch == Some(epoch) {
        let _ = replica.note_mended(replaced);
    }
}

/// Bytes of a disk that a frame names.
fn bytes_of(frame: &Frame) -> u64 {
    frame.records.iter().map(|record| record.end() - record.offset()).sum()
}

/// Ends a conversation from the replica's end, whatever its result. The receiver must live until then.
pub(crate) fn end_with<T>(sender: Sender, result: Result<T, SyncError>) -> Result<T, SyncError> {
    match result {
        Ok(done) => {
            sender.finish()?;
            Ok(done)
        }
        Err(error) => {
            // The peer may be gone.
            let _ = sender.send_json(FAILED, &Failed::of(&error));
            let _ = sender.finish();
            Err(error)
        }
    }
}
