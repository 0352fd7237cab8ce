//! The replica's end: report its status, receive, commit.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use compare::rolling::SumParams;
use compare::{DigestReport, Scope};
use delta::{Frame, Units};
use device::{Disk, Storage};
use link::{Message, Received, Receiver, Sender};
use replica::{
    CommitMode, Coverage, DeltaReceiver, ExpectedBytes, Herald, Keep, KnownReplicas, Replica, ReplicaError,
    SourceTime, State,
};
use serde::Serialize;
use source::{Attended, SourceError, StateDir};

use crate::error::{Class, SyncError};
use crate::plan::primary::{primary_at, refuse_adoption, refuse_merge};
use crate::replica_end::mirror_receiver::receive_batches;
use crate::report::Progress;
use crate::roles::demote::give_up;
use crate::site::{Site, list};
use crate::transfer::compared::while_linked;
use crate::wire::digests::ReplicaDigests;
use crate::wire::messages::{
    Apart, COMMITTED, CommitReply, FAILED, Failed, Moments, Open, PLAN, Plan, Primary, RESULT, StatusReply,
    VERDICT, VerifyFinding, nonsense, of_digest_report, of_sum_report, to_unit, unexpected,
};

/// Opens a replica of this host.
pub(crate) fn open_here(open: &Open, path: &Path, state: &dyn Site) -> Result<Opened, SyncError> {
    open_member(open, path, state, None)
}

/// Opens a replica of this host, as a member of the group if one is given.
pub(crate) fn open_member(
    open: &Open,
    path: &Path,
    state: &dyn Site,
    group: Option<replica::ReplicaMembership>,
) -> Result<Opened, SyncError> {
    refuse_source(open.source.as_ref(), path, state)?;
    let here = replica::ReplicaOptions { group, ..state.opening(open.journal_dir.as_deref()) };
    let options = asked_for(open, here);
    if let Some(origin) = &open.origin {
        if let Some(primary) = primary_at(path, &options, state, origin)? {
            return Ok(Opened::Primary(path.to_path_buf(), primary));
        }
    }
    if open.adopt {
        refuse_adoption(path, &options, state)?;
    }
    if !open.create {
        refuse_missing_source(path, &options, state)?;
    }
    Ok(Opened::Replica(Box::new(open_replica(path, &options, state)?)))
}

/// Refuses to begin a replica in the place of a source that is missing: most likely its file system is not mounted, and what was written to it
/// since its last sync is nowhere else.
fn refuse_missing_source(
    path: &Path,
    options: &replica::ReplicaOptions,
    state: &dyn Site,
) -> Result<(), SyncError> {
    if state.exists(path) || state.lineage(path, options)?.is_some() {
        return Ok(());
    }
    let Some((_, about)) = state.source(&path.to_string_lossy())? else { return Ok(()) };
    Err(SyncError::Away(format!(
        "{} is a source of its host (term {}), and is missing there. If its file system is not mounted or its disk not attached, bring it back \
         and run again: what was written to it since its last sync is nowhere else. If it is gone for good, \"dsync sync --create\" restores it",
        path.display(),
        about.term
    )))
}

/// What the source's side asks for, beside what is said here.
pub(crate) fn asked_for(open: &Open, here: replica::ReplicaOptions) -> replica::ReplicaOptions {
    replica::ReplicaOptions {
        adopt: open.adopt,
        create: open.create,
        format: open.format,
        container: open.container,
        doubt: open.verify,
        keep: open.keep.clone(),
        source_group: open.origin.as_ref().and_then(|origin| origin.group.clone()),
        term: open.origin.as_ref().map_or(0, |origin| origin.term),
        source_time: open.origin.as_ref().and_then(|origin| origin.now).map(SourceTime::said),
        ..here
    }
}

/// Opens a replica. One whose state is in another folder than is said is told from what is none.
///
/// # Errors
/// As [`Replica::open`].
pub fn open_replica(
    path: &Path,
    options: &replica::ReplicaOptions,
    state: &dyn Site,
) -> Result<Replica, SyncError> {
    state.open(path, options).map_err(|error| match error {
        ReplicaError::NotAReplica(path) => not_a_replica(path, options.doubt, state),
        other => other.into(),
    })
}

/// What is at a path that is not that of a replica with its state where it is looked for. Who only looks is not offered to overwrite it.
fn not_a_replica(path: PathBuf, looks: bool, state: &dyn Site) -> SyncError {
    let shown = path.display();
    if let Some(Ok(Some(folder))) = state.known().map(|known| known.folder_of(&path)) {
        return SyncError::Refused(format!(
            "{shown} is a replica whose state is in {}: pass --journal-dir {0}",
            folder.display()
        ));
    }
    match state.source(&path.to_string_lossy()) {
        source if looks => SyncError::Refused(format!(
            "{shown} is not a dsync replica{}, so there is nothing to verify: give the source first, and its replica second, as \"dsync status\" \
             shows both",
            if matches!(source, Ok(Some(_))) { " but a source itself" } else { "" }
        )),
        Ok(Some((_, about))) => SyncError::Refused(format!(
            "{shown} is not a dsync replica but a source itself (term {}), and what was written to it since its last sync is \
             nowhere else. If a replica is to take over from it, run \"dsync promote\" on that. To restore it from a copy, run \
             \"dsync sync --adopt SRC DST\", which compares it in full and overwrites what differs",
            about.term
        )),
        _ => ReplicaError::NotAReplica(path).into(),
    }
}

/// The replicas of the host whose state directory this is.
pub fn known_replicas(state: &StateDir) -> KnownReplicas {
    KnownReplicas::new(state.replica_list(), state.replicas_folder())
}

/// Lists a replica that something is received for, with where that comes from.
pub(crate) fn list_received(replica: &Replica, known: Option<&KnownReplicas>, open: &Open) {
    list(replica, known);
    if let Some(origin) = open.origin.as_ref().filter(|origin| !origin.place.is_empty()) {
        replica.note_origin(origin.uuid, &origin.place);
    }
}

/// Forgets the source that an adopted disk was before, if it follows that source's other self now. One that was restored from
/// its replica goes on as its own source. What is left if this fails is not trusted: the disk has changed.
fn forget_former(state: &dyn Site, replica: &Replica) {
    if let Ok(Some((place, about))) = state.source(&replica.path().to_string_lossy()) {
        if replica.status().source == Some(about.uuid) {
            let _ = state.forget(&place, &about);
        }
    }
}

/// Refuses a destination that shares storage with the source, under whatever names, if both are on this host.
fn refuse_source(source: Option<&Storage>, path: &Path, state: &dyn Site) -> Result<(), SyncError> {
    match (source, state.storage(path)) {
        (Some(source), Some(here)) if source.overlaps(&here) => Err(SyncError::Refused(format!(
            "{} is the source itself under some name, or shares storage with it: what is written to the one changes the \
             other. Give a destination on another disk or in another file",
            path.display()
        ))),
        _ => Ok(()),
    }
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

/// How a replica of the host whose state directory this is is opened, with its state in a folder if one is given.
pub fn open_options(journal_dir: Option<&Path>, state: &StateDir) -> replica::ReplicaOptions {
    let here = state.clone();
    let herald = move |disk: &Path, goes_back| {
        source::overwritten(&here, disk, goes_back).map_err(|error| told(disk, error))
    };
    replica::ReplicaOptions {
        folder: journal_dir.map(Path::to_path_buf),
        devices: state.replicas_folder(),
        herald: Some(Herald::new(herald)),
        ..replica::ReplicaOptions::default()
    }
}

/// Why a device that is a source is not written to.
fn told(device: &Path, error: SourceError) -> ReplicaError {
    let path = device.to_path_buf();
    match error {
        SourceError::Busy { holder, .. } => ReplicaError::Busy { path, holder },
        refusal if refusal.is_refusal() => ReplicaError::Refused(refusal.to_string()),
        failed => ReplicaError::Io {
            what: "note that a source is overwritten:",
            path,
            error: io::Error::other(failed),
        },
    }
}

/// What was opened.
pub(crate) enum Opened {
    /// The requested replica.
    Replica(Box<Replica>),
    /// A source with the same id as the one at the other end of the link.
    Primary(PathBuf, Primary),
}

/// Opens the requested replica.
pub(crate) type Opener<'a> = &'a dyn Fn(&Open) -> Result<Opened, SyncError>;

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
    /// The conversation, from the status of the requested replica to the source's goodbye. What the source reported, if it did.
    pub(crate) fn converse(&self, open: &Open, opened: Opener<'_>) -> Result<Option<Message>, SyncError> {
        let ReplicaEnd { sender, receiver, .. } = *self;
        let mut replica = match opened(open)? {
            Opened::Replica(replica) => replica,
            Opened::Primary(path, primary) => match self.say_primary(&path, primary)? {
                Some(message) if message.kind == PLAN => {
                    let plan: Plan = message.json()?;
                    self.give_up(open, &path, plan.give_up, opened)?
                }
                end => return end.map_or(Ok(None), |message| self.last_word(Some(message), None)),
            },
        };
        let known = self.site.and_then(Site::known);
        if replica.status().source.is_some() {
            list(&replica, known.as_ref());
        }
        loop {
            say_status(sender, &mut replica, open.commit)?;
            let plan: Plan = match receiver.recv()? {
                Some(message) if message.kind == PLAN => message.json()?,
                // Nothing to be done: up to date, or a dry run.
                end @ (None | Some(Message { kind: RESULT, .. })) => {
                    self.apply(&mut replica, open)?;
                    return end.map_or(Ok(None), |message| self.last_word(Some(message), None));
                }
                Some(message) => return Err(unexpected(&message)),
            };
            plan.check()?;
            // Comparing is always allowed; what follows writes.
            let looks = plan.compare.is_some() && !plan.delta && plan.mirror.is_none() && !plan.accept;
            if !looks {
                if !self.writes {
                    return Err(nonsense("changes, although none were asked for"));
                }
                if let (true, Some(site)) = (open.verify, self.site) {
                    refuse_adoption(replica.path(), &site.opening(open.journal_dir.as_deref()), site)?;
                }
                replica.mergeable()?;
                list_received(&replica, known.as_ref(), open);
            }
            if let Some(apart) = plan.give_up {
                let path = replica.path().to_path_buf();
                // Its lock is needed.
                drop(replica);
                replica = self.give_up(open, &path, Some(apart), opened)?;
                continue;
            }
            if let Some(released) = plan.release {
                replica.release(released)?;
                let epoch = released.epoch;
                sender.send_json(COMMITTED, &CommitReply::nothing_written(epoch))?;
                return self.last_word(None, None);
            }
            if plan.accept {
                replica.accept()?;
                let epoch = replica.status().epoch.ok_or_else(|| nonsense("an acceptance"))?;
                sender.send_json(COMMITTED, &CommitReply::nothing_written(epoch))?;
                return self.last_word(None, open.verify.then_some(&replica));
            }
            if let Some(mirror) = &plan.mirror {
                return receive_batches(sender, receiver, &mut replica, mirror).map(|()| None);
            }
            if let (Some(scope), false) = (&plan.compare, plan.delta) {
                self.answer(&replica.content()?, scope, None).map_err(SyncError::of_replica)?;
                if plan.looks_first {
                    continue;
                }
                return self.last_word(None, open.verify.then_some(&replica));
            }
            if let Taken::Committed(committed) = self.take_delta(&mut replica, open, plan)? {
                self.site.iter().filter(|_| open.adopt).for_each(|site| forget_former(*site, &replica));
                sender.send_json(COMMITTED, &committed)?;
                // The other end says goodbye when it has recorded that.
                return self.last_word(None, open.verify.then_some(&replica));
            }
        }
    }

    /// Takes over what the user wants of the replica, where nothing was sent.
    fn apply(&self, replica: &mut Replica, open: &Open) -> Result<(), SyncError> {
        if open.keep_anyway && self.writes {
            replica.apply_options()?;
        }
        Ok(())
    }

    /// Says that the destination is a source itself: nothing is received for it as it is. What the source's side answers; `None` if it says
    /// goodbye.
    fn say_primary(&self, path: &Path, primary: Primary) -> Result<Option<Message>, SyncError> {
        let status = StatusReply::of(replica::Status::nothing());
        StatusReply { path: path.to_path_buf(), primary: Some(primary), ..status }.say(self.sender)?;
        match self.receiver.recv()? {
            Some(message) if ![PLAN, RESULT].contains(&message.kind) => Err(unexpected(&message)),
            answer => Ok(answer),
        }
    }

    /// Gives up what was written to a disk since it went its own way, as its user has consented to, and opens the replica that it is then.
    fn give_up(
        &self,
        open: &Open,
        path: &Path,
        apart: Option<Apart>,
        opened: Opener<'_>,
    ) -> Result<Box<Replica>, SyncError> {
        let (Some(site), Some(how), Some(apart), true) = (self.site, &open.give_up, apart, self.writes)
        else {
            return Err(nonsense("what is to be given up"));
        };
        give_up(site, path, open.journal_dir.as_deref(), (apart.since, how), self.progress)?;
        match opened(open)? {
            Opened::Replica(replica) => Ok(replica),
            Opened::Primary(..) => Err(SyncError::Refused(format!(
                "{} became a source again while it was given up: stop what does that, and run the command again",
                path.display()
            ))),
        }
    }

    /// Receives to the source's goodbye, with what a verification may have found of the replica.
    fn last_word(
        &self,
        mut result: Option<Message>,
        verified: Option<&Replica>,
    ) -> Result<Option<Message>, SyncError> {
        while let Some(message) = self.receiver.recv()? {
            match (message.kind, verified) {
                (RESULT, _) => result = Some(message),
                (VERDICT, Some(replica)) => {
                    let found: VerifyFinding = message.json()?;
                    // The source knows it, whether it can be written down here or not.
                    let VerifyFinding { bytes_differing, bytes_repaired, but_changed } = found;
                    let _ = replica.note_verdict(bytes_differing, bytes_repaired, but_changed);
                }
                (FAILED, _) => return Err(unexpected(&message)),
                _ => {}
            }
        }
        Ok(result)
    }
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
        let ReplicaEnd { sender, receiver, progress, .. } = *self;
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
        let receipt = replica.receive(header, open.commit)?;
        if let Some(kept) = &mut kept {
            kept.begin(plan.compare.as_ref(), receipt.header(), &status)?;
        }
        let (seen, at_end, mut replaced) = (kept.as_ref(), AtEnd::of(&plan), 0);
        // By kept digests the source is compared with what the replica held once.
        let covers = if seen.is_some() { receipt.covers().min(Coverage::Changed) } else { receipt.covers() };
        let taken = match (&plan.compare, disk) {
            (Some(scope), Some(disk)) => std::thread::scope(|threads| {
                let answering =
                    std::thread::Builder::new().name("answer".into()).spawn_scoped(threads, move || {
                        self.answer(&disk, scope, seen).map_err(|error| {
                            let error = SyncError::of_replica(error);
                            // The source waits for the rest, and this side for the source's reply.
                            let _ = sender.send_json(FAILED, &Failed::of(&error));
                            error
                        })
                    });
                let answering = answering.map_err(SyncError::io("start a thread"))?;
                let received = self.take_units(receipt, seen, at_end, |frame| replaced += bytes_of(frame));
                match answering.join() {
                    // A link that broke during the answers broke for the units too, with a better error there.
                    Ok(Err(error)) if received.is_ok() => Err(error),
                    Ok(_) => received,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            })?,
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
                })?
            }
        };
        Ok(match taken {
            Taken::Committed(mut committed) => {
                replica.note_committed(covers);
                note_damage(replica, (&status, committed.epoch), (covers, replaced));
                committed.warnings = replica.take_warnings();
                committed.digests = kept.map(|kept| kept.end(replica.status().nonce));
                Taken::Committed(committed)
            }
            Taken::Prepared(_) => Taken::Prepared(covers),
            Taken::Kept => Taken::Kept,
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

/// How to merge.
#[derive(Debug, Clone, Default)]
pub struct MergeOptions {
    /// The commit mode.
    pub commit: CommitMode,
    /// Where the replica keeps lineage and journal.
    pub journal_dir: Option<PathBuf>,
    /// Create a new replica if the file of one is gone.
    pub create: bool,
    /// What of its past the replica is to keep from now on. `None`: what it kept before.
    pub keep: Option<Keep>,
}

/// The result of a merge.
#[derive(Debug, Clone, Serialize)]
pub struct Merged {
    /// The replica.
    pub destination: PathBuf,
    /// Its source.
    pub source: uuid::Uuid,
    /// The number of its epoch afterwards.
    pub epoch: u64,
    /// The id of that epoch.
    pub epoch_id: uuid::Uuid,
    /// Bytes of the delta.
    pub bytes_read: u64,
    /// Bytes written, journal included.
    pub bytes_written: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// What opening the replica recovered.
    pub recovered: Option<String>,
    /// What the user should know of the commit.
    pub warnings: Vec<String>,
}

/// Merges a delta from a byte stream into the replica at `path`.
pub fn merge(
    path: &Path,
    options: &MergeOptions,
    state: &StateDir,
    input: impl Read,
) -> Result<Merged, SyncError> {
    let how = replica::ReplicaOptions {
        create: options.create,
        keep: options.keep.clone(),
        ..open_options(options.journal_dir.as_deref(), state)
    };
    let open = || {
        refuse_merge(path, &how, state)?;
        open_replica(path, &how, state)
    };
    let (merged, replica) = merge_into(open, options.commit, input)?;
    // Not before: a merge that is refused makes no replica.
    list(&replica, Some(&known_replicas(state)));
    Ok(Merged { destination: path.to_path_buf(), ..merged })
}

/// Merges a delta from a byte stream into a replica that the caller opens, wherever it is.
#[doc(hidden)]
pub fn merge_over(
    open: impl FnOnce() -> replica::Result<Replica>,
    commit: CommitMode,
    input: impl Read,
) -> Result<Merged, SyncError> {
    merge_into(|| Ok(open()?), commit, input).map(|(merged, _)| merged)
}

fn merge_into(
    open: impl FnOnce() -> Result<Replica, SyncError>,
    commit: CommitMode,
    input: impl Read,
) -> Result<(Merged, Replica), SyncError> {
    let began = Instant::now();
    let mut units = Units::new(input);
    let no_delta = || delta::Error::NoTrailer { units: 0 };
    // The header first: input that is not a delta leaves no trace.
    let header = units.next()?.ok_or_else(no_delta)?;
    let mut replica = open()?;
    let destination = replica.path().to_path_buf();
    let recovered = replica.status().recovered.clone();
    let mut receipt = replica.receive(header, commit)?;
    // What changed after its end is not in it.
    let whole = receipt.covers() == Coverage::Whole;
    let committed = loop {
        let unit = match units.next() {
            Ok(Some(unit)) => unit,
            end => {
                receipt.keep()?;
                return Err(match end {
                    Err(error) => error.into(),
                    Ok(_) => delta::Error::NoTrailer { units: units.count() }.into(),
                });
            }
        };
        if unit.kind == delta::UnitKind::Trailer {
            // Before anything is merged: data after the trailer is not from an extract.
            let number = units.count();
            if !matches!(units.next(), Ok(None)) {
                return Err(delta::Error::AfterEnd { unit: number }.into());
            }
            receipt.unit(unit)?;
            break receipt.finish()?;
        }
        receipt.unit(unit)?;
    };
    replica.note_committed(if whole { Coverage::Whole } else { Coverage::Part });
    let merged = Merged {
        destination,
        source: replica.status().source.unwrap_or_default(),
        epoch: committed.epoch.number,
        epoch_id: committed.epoch.id,
        bytes_read: units.bytes(),
        bytes_written: committed.bytes_written,
        seconds: began.elapsed().as_secs_f64(),
        recovered,
        warnings: replica.take_warnings(),
    };
    Ok((merged, replica))
}
