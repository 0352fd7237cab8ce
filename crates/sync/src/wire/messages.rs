//! The messages between the two ends of a sync.
//!
//! ```text
//!     source                                   replica
//!     Opening: which replica, for which source ─▶
//!                                            ◀─ Status: what is there
//!     Plan: what will follow, what to send   ─▶
//!                                            ◀─ DigestReport … DigestReport, or Sums … Sums (only if requested)
//!     Header, Frame … Frame, Trailer         ─▶
//!                                            ◀─ Committed; Status again after a pass over a live disk, or where room must be made
//! ```
//!
//! If the replica's side began (see `pull`), the conversation has another beginning and end:
//!
//! ```text
//!                                            ◀─ Pull: which source, and what is asked of it
//!     SourceInfo: how the source is open     ─▶
//!     … Opening, and all of the above
//!     Result: what the source's side reports ─▶
//! ```
//!
//! A Plan for a mirror is followed by one delta after the other, each bound to the state that the previous one
//! leaves; the replica answers each with Confirmed.
//!
//! The replicas of a group share one conversation, in which each plan names the member that it is for:
//!
//! ```text
//!     Opening: which replicas, of which group ─▶
//!                                            ◀─ a Status for each, in order
//!     Plan for a member, and its delta       ─▶
//!                                            ◀─ Prepared; for a first copy, which is committed by itself, Committed and Status
//!     CommitGroup: the cut                   ─▶
//!                                            ◀─ GroupCommitted, and a Status for each
//! ```
//!
//! A source that was demoted has a conversation of its own, in which its Plan says that nothing follows any more.
//!
//! Either side may end the conversation with Failed at any time. Otherwise it ends with a goodbye from each: the source's when it
//! is done, then the replica's, for which the source waits.
//!
//! Whatever a peer sends is bounded where it is received: [`StatusReply::check`], [`Plan::check`] and [`text`] here, digests
//! and sums in the compare crate, deltas in the delta crate, the lengths of messages in the link.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use compare::rolling::{SumParams, SumReport};
use compare::{DigestReport, Scope};
use delta::{Epoch, Unit, UnitKind};
use device::{Buf, Format, Storage};
use lineage::Lives;
use link::{Message, Pace, Received, Receiver, Sender};
use replica::{Acceptable, CommitMode, Keep, Released, UnsureSet};
use serde::{Deserialize, Serialize};
use source::{Handle, SourceMetadata};
use uuid::Uuid;

use crate::error::{Class, SyncError};
use crate::options::{GiveUp, SyncOptions};
use crate::wire::digests::Digests;
use crate::wire::pipeline::Stages;

pub(crate) const OPEN: u8 = 1;
pub(crate) const STATUS: u8 = 2;
pub(crate) const PLAN: u8 = 3;
pub(crate) const CLAIM: u8 = 4;
pub(crate) const HEADER: u8 = 5;
pub(crate) const FRAME: u8 = 6;
pub(crate) const TRAILER: u8 = 7;
pub(crate) const COMMITTED: u8 = 8;
pub(crate) const FAILED: u8 = 9;
pub(crate) const SUMS: u8 = 10;
pub(crate) const BATCH: u8 = 11;
pub(crate) const UNSURE: u8 = 12;
pub(crate) const PULL: u8 = 13;
pub(crate) const SOURCE: u8 = 14;
pub(crate) const RESULT: u8 = 15;
pub(crate) const PREPARED: u8 = 17;
pub(crate) const COMMIT_GROUP: u8 = 18;
pub(crate) const GROUP_COMMITTED: u8 = 19;
pub(crate) const VERDICT: u8 = 20;

/// What a verification found.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct VerifyFinding {
    /// Bytes that differ, now that it has ended; 0 if they were repaired.
    pub bytes_differing: u64,
    /// Blocks that changed since the replica's epoch were not compared.
    pub but_changed: bool,
}

/// Opens a replica.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Open {
    pub path: PathBuf,
    pub journal_dir: Option<PathBuf>,
    pub commit: CommitMode,
    /// How the disk is to lie in the replica's file, where its user says.
    pub format: Option<Format>,
    /// The source is a file that is copied as it is, whatever is in it.
    pub container: bool,
    pub adopt: bool,
    /// Create another replica if one is gone.
    pub create: bool,
    /// It will be compared and perhaps repaired: other programs may have changed it.
    pub verify: bool,
    /// Keep digests of the replica from one sync to the next.
    pub digests: Option<Digests>,
    /// The source's storage, for a replica's side on the same host.
    pub source: Option<Storage>,
    /// What of its past the replica is to keep.
    pub keep: Option<Keep>,
    /// That applies although nothing may have to be sent, and so does that it leaves its group. False in a dry run.
    pub keep_anyway: bool,
    /// Which source it is. `None` where nothing comes of one.
    pub origin: Option<Origin>,
    /// What only it has may be given up, once the source's side has told since when.
    pub give_up: Option<GiveUp>,
}

/// Begins a conversation about one replica, or about those of a group.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Opening {
    /// The group, whose replicas are all in one folder, and are committed together.
    pub group: Option<String>,
    /// Their order is that of their statuses, and of [`Plan::member`].
    pub members: Vec<Open>,
}

/// The most members of a group.
const MAX_MEMBERS: usize = 256;

/// Which source a replica is opened for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Origin {
    pub uuid: Uuid,
    pub term: u64,
    /// The epoch at which its term began.
    pub began: Option<Epoch>,
    /// The lives that led to what it is.
    pub lives: Lives,
    /// The group that it is in: a replica of another one leaves that.
    pub group: Option<String>,
    /// The time at its host, in seconds since 1970. `None` where that is not known.
    pub now: Option<u64>,
    /// Where it is, `HOST:PATH`, for people. Empty where that is not known.
    pub place: String,
}

impl Origin {
    pub(crate) fn of(about: &SourceMetadata, lives: Lives, group: Option<String>) -> Origin {
        Origin {
            uuid: about.uuid,
            term: about.term,
            began: about.began,
            lives,
            group,
            now: SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|now| now.as_secs()),
            place: format!("{}:{}", link::host_name(), about.path.display()),
        }
    }
}

/// What is at the replica's path where that is a source with the same id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Primary {
    pub term: u64,
    /// Its last epoch.
    pub epoch: Option<Epoch>,
    /// The last epoch that both have in common, as far as it knows.
    pub common: Option<Epoch>,
    /// Bytes written to it since, at least; `None` if that is not known.
    pub written: Option<u64>,
    /// The epoch at which its term began, and the lives that led to what it is.
    pub began: Option<Epoch>,
    pub lives: Lives,
    /// Its history goes back to the epoch in common.
    pub reaches: bool,
    /// Others may have written to it since: no delta has all of that.
    pub doubted: bool,
}

impl Open {
    /// Neither to be adopted nor verified, without digests and without a source.
    pub(crate) fn new(path: &Path, journal_dir: &Option<PathBuf>, commit: CommitMode) -> Open {
        Open {
            path: path.to_path_buf(),
            journal_dir: journal_dir.clone(),
            commit,
            format: None,
            container: false,
            adopt: false,
            create: false,
            verify: false,
            digests: None,
            source: None,
            keep: None,
            keep_anyway: false,
            origin: None,
            give_up: None,
        }
    }

    /// The request to open a replica for a sync.
    pub(crate) fn for_sync(path: &Path, options: &SyncOptions) -> Open {
        Open {
            adopt: options.adopt,
            create: options.create,
            format: options.format,
            give_up: options.give_up.clone(),
            keep: options.keep.clone(),
            keep_anyway: !options.dry_run,
            digests: options.digests.clone().map(|file| Digests { file, hash: options.hash }),
            ..Open::new(path, &options.journal_dir, options.commit)
        }
    }

    /// Adds which source it is opened for, and what that is stored on.
    pub(crate) fn beside(self, source: &Handle) -> Result<Open, SyncError> {
        let about = source.about();
        let origin = Origin::of(about, source.lives()?, source.group()?);
        let container = source.is_file();
        Ok(Open { source: source.storage(), origin: Some(origin), container, ..self })
    }
}

/// The status of the replica.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StatusReply {
    /// The destination's canonical path, as the replica's name.
    pub path: PathBuf,
    /// The replica itself.
    #[serde(flatten)]
    pub replica: replica::Status,
    /// The size of the replica's file, if it is wrong.
    pub wrong_size: Option<u64>,
    /// Copies within it are made in place, so they must come in a suitable order.
    pub in_place: bool,
    /// Bytes of its encoded unsure set, which follows as [`UNSURE`].
    pub unsure_bytes: usize,
    /// Some of its blocks take space: it is not known to read as zeroes.
    pub holds_data: bool,
    /// It is not a replica, but the same source itself: nothing will be received.
    pub primary: Option<Primary>,
    /// It keeps a moment of each of these periods.
    pub moments: Option<Moments>,
    /// A former source: the latest epochs at which it can be demoted anew, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub demotes_anew: Vec<delta::Epoch>,
    /// Others have changed it, and it keeps its past if so much of it is found to be as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acceptable: Option<Acceptable>,
}

impl StatusReply {
    /// The most of [`StatusReply::demotes_anew`]: one that is further back is taken for one that its history does not reach.
    pub(crate) const MOST_ANEW: usize = 256;
}

/// The periods of each of which a replica keeps a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moments {
    /// How long they are, in seconds; they are counted since 1970.
    pub every: u64,
    /// The time at the replica, in microseconds since 1970.
    pub now: u64,
}

/// What will follow.
///
/// More than fifteen fields: each is a kind of plan, or what only one kind needs.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Bytes of changes, as far as is known.
    pub bytes: u64,
    /// Of these, what may need room: all but what the source knows to be zero.
    pub data: u64,
    /// The source asks for digests of the replica.
    pub compare: Option<Scope>,
    /// The source asks for the sums of the replica's blocks, before it sends anything.
    pub rolling: Option<SumParams>,
    /// A delta follows; otherwise only the digests are needed.
    pub delta: bool,
    /// The delta is a pass over a live disk: it is kept, and committed with the delta that ends at a cut. After
    /// its trailer comes a new Status.
    pub pass: bool,
    /// Batches of a mirror follow, until the source says goodbye.
    pub mirror: Option<MirrorPlan>,
    /// The member of the group that the delta is for.
    pub member: usize,
    /// The delta is prepared for the commit of the group. Answered with Prepared.
    pub prepare: bool,
    /// Nothing follows, now or later: the source has ended with this epoch. Answered with Committed.
    pub release: Option<Released>,
    /// The delta is a seed: epochs of the source that came before its own, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<Epoch>,
    /// Only digests are needed for now: after them comes a new Status, and another plan.
    pub looks_first: bool,
    /// The delta repairs damage at the replica's own epoch, in all of it; true if blocks that changed since are passed over.
    #[serde(default)]
    pub mends: Option<bool>,
    /// The replica was found to be as it was, whatever its times say. Answered with Committed.
    pub accept: bool,
    /// What was written there since the point in common is given up, as Open has said. Answered with a new Status, and another plan.
    pub give_up: Option<Apart>,
    /// The delta may be answered with a new Status: it was counted, as there was no room for it, and is to be sent once more.
    pub resends: bool,
}

/// Since when a destination goes its own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Apart {
    /// The number of the last epoch that it has in common with the source; `None` if that is not known, or not in its history.
    pub since: Option<u64>,
}

/// How a mirror sends batches.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct MirrorPlan {
    /// How the replica's end shares its work.
    pub stages: Stages,
}

/// A batch is committed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Confirmed {
    /// Its stream.
    pub stream: Uuid,
    /// From its first byte to its commit, in microseconds.
    pub micros: u64,
    /// What the user should know of it, and of those before.
    pub warnings: Vec<String>,
}

/// The replica is at the new epoch.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CommitReply {
    pub epoch: Epoch,
    pub bytes_written: u64,
    pub bytes_read: u64,
    /// What became of the requested digests.
    pub digests: Option<String>,
    /// They stood for the replica, which was not read.
    #[serde(default)]
    pub by_digests: bool,
    /// Nothing is known there of differences that a verification has found.
    #[serde(default)]
    pub sound: bool,
    /// What the user should know of the commit.
    pub warnings: Vec<String>,
}

impl CommitReply {
    /// The replica is at this epoch, and nothing was to be written.
    pub(crate) fn nothing_written(epoch: Epoch) -> CommitReply {
        CommitReply {
            epoch,
            bytes_written: 0,
            bytes_read: 0,
            digests: None,
            by_digests: false,
            sound: false,
            warnings: Vec::new(),
        }
    }

    /// What a replica says of a commit.
    pub(crate) fn of(committed: &replica::Committed) -> CommitReply {
        CommitReply {
            bytes_written: committed.bytes_written,
            bytes_read: committed.bytes_read,
            ..CommitReply::nothing_written(committed.epoch)
        }
    }
}

/// The conversation failed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failed {
    pub message: String,
    pub class: Class,
}

impl Failed {
    /// The text of an error.
    pub(crate) fn of(error: &SyncError) -> Failed {
        Failed { message: error.to_string(), class: error.class() }
    }
}

/// A unit of a delta as a message, with the same bytes.
pub(crate) fn of_unit(unit: Unit) -> Message {
    let kind = match unit.kind {
        UnitKind::Header => HEADER,
        UnitKind::Frame => FRAME,
        UnitKind::Trailer => TRAILER,
    };
    Message { kind, head: unit.head, body: unit.body }
}

/// The unit that a message carries; `None` if it is of another kind.
pub(crate) fn to_unit(message: Message) -> Result<Unit, Message> {
    let kind = match message.kind {
        HEADER => UnitKind::Header,
        FRAME => UnitKind::Frame,
        TRAILER => UnitKind::Trailer,
        _ => return Err(message),
    };
    Ok(Unit { kind, head: message.head, body: message.body })
}

pub(crate) fn of_digest_report(report: &DigestReport, digests: &[u8]) -> std::io::Result<Message> {
    Ok(Message { kind: CLAIM, head: serde_json::to_vec(report)?, body: Buf::from(digests) })
}

pub(crate) fn of_sum_report(told: &SumReport, sums: &[u8]) -> std::io::Result<Message> {
    Ok(Message { kind: SUMS, head: serde_json::to_vec(told)?, body: Buf::from(sums) })
}

/// Bytes of an encoded unsure set in a message.
const UNSURE_PART: usize = 1 << 20;
/// The longest text accepted from a peer, in bytes.
const MAX_TEXT: usize = 4096;
/// The longest path that a system accepts.
const MAX_PATH: usize = 4096;
/// The most parts of a replica. Each interrupted transfer adds one.
const MAX_PARTS: usize = 1 << 16;
/// The largest disk, in bytes.
pub(crate) const MAX_SIZE: u64 = i64::MAX as u64;

/// A peer's text, made safe to print: one line, of bounded length, without control characters.
pub(crate) fn text(said: &str) -> String {
    let (text, rest) = bounded(said);
    format!("{}{rest}", link::printable(text))
}

/// A peer's error, made safe to print, in several lines: whoever prints it keeps them apart from lines of its own.
fn lines(said: &str) -> String {
    let (text, rest) = bounded(said);
    format!("{}{rest}", link::printable_lines(text))
}

fn bounded(said: &str) -> (&str, &str) {
    let end = (0..=said.len().min(MAX_TEXT)).rev().find(|&at| said.is_char_boundary(at)).unwrap_or(0);
    (&said[..end], if end < said.len() { "…" } else { "" })
}

/// The error for an invalid message of the peer.
pub(crate) fn nonsense(what: &str) -> SyncError {
    SyncError::Far {
        message: format!(
            "the far side sent an invalid message ({what}): check that it runs the same version of dsync"
        ),
        class: Class::Failed,
    }
}

pub(crate) fn check_path(what: &str, path: Option<&Path>) -> Result<(), SyncError> {
    use std::os::unix::ffi::OsStrExt;
    let sound = |path: &Path| {
        let bytes = path.as_os_str().as_bytes();
        bytes.len() <= MAX_PATH && !bytes.contains(&0)
    };
    if path.is_none_or(sound) { Ok(()) } else { Err(nonsense(&format!("{what} is not a path"))) }
}

impl Open {
    /// Where what is given up is saved.
    pub(crate) fn saves(&self) -> Option<&Path> {
        match &self.give_up {
            Some(GiveUp::Save(file)) => Some(file),
            _ => None,
        }
    }

    /// Refuses an invalid request.
    fn check(&self) -> Result<(), SyncError> {
        check_path("the replica", Some(&self.path))?;
        check_path("the journal's folder", self.journal_dir.as_deref())?;
        check_path("the digest file", self.digests.as_ref().and_then(|digests| digests.file.as_deref()))?;
        check_path("the file to save to", self.saves())?;
        if self.origin.as_ref().is_some_and(|origin| !origin.lives.is_sound()) {
            return Err(nonsense("the lives of the source"));
        }
        if self.keep.as_ref().is_some_and(|keep| !keep.is_sound()) {
            return Err(nonsense("what is to be kept of the past"));
        }
        Ok(())
    }
}

impl Opening {
    /// Receives the beginning of a conversation.
    pub(crate) fn hear(receiver: &Receiver) -> Result<Opening, SyncError> {
        Opening::of(&request(receiver, OPEN)?)
    }

    /// Reads it from its message.
    pub(crate) fn of(message: &Message) -> Result<Opening, SyncError> {
        let opening: Opening = message.json()?;
        let Opening { group, members } = &opening;
        let folder = members.first().map(|open| open.path.parent());
        let together = members.iter().all(|open| Some(open.path.parent()) == folder);
        let plain = members.iter().all(|open| open.journal_dir.is_none() && open.digests.is_none());
        let is_sound = match group {
            Some(name) => {
                source::check_name(name)?;
                (1..=MAX_MEMBERS).contains(&members.len()) && together && plain
            }
            None => members.len() == 1,
        };
        if !is_sound {
            return Err(nonsense("the replicas to open"));
        }
        members.iter().try_for_each(Open::check)?;
        Ok(opening)
    }
}

impl Opening {
    /// Takes back what the source's end does not ask for any more, as it opens the replicas anew: it gets nothing by that. What it is by now is
    /// its own word.
    pub(crate) fn withdraw(&mut self, again: Opening) {
        for (open, again) in self.members.iter_mut().zip(again.members) {
            let is_same =
                |origin: &Origin| open.origin.as_ref().is_some_and(|known| known.uuid == origin.uuid);
            open.origin = again.origin.filter(is_same).or(open.origin.take());
            open.adopt &= again.adopt;
            open.create &= again.create;
            open.give_up = open.give_up.take().filter(|_| again.give_up.is_some());
        }
    }
}

impl StatusReply {
    /// A status with defaults for all but the replica.
    pub(crate) fn of(replica: replica::Status) -> StatusReply {
        StatusReply {
            path: PathBuf::new(),
            replica,
            wrong_size: None,
            in_place: false,
            unsure_bytes: 0,
            holds_data: false,
            primary: None,
            moments: None,
            demotes_anew: Vec::new(),
            acceptable: None,
        }
    }

    /// Says where the replica is.
    pub(crate) fn say(mut self, sender: &Sender) -> Result<(), SyncError> {
        let unsure = &self.replica.unsure;
        let encoded = if unsure.is_empty() { Vec::new() } else { unsure.encode() };
        self.unsure_bytes = encoded.len();
        sender.send_json(STATUS, &self)?;
        for part in encoded.chunks(UNSURE_PART) {
            sender.send(Message { kind: UNSURE, head: Vec::new(), body: Buf::from(part) })?;
        }
        Ok(())
    }

    /// Receives the replica's status.
    pub(crate) fn hear(receiver: &Receiver) -> Result<StatusReply, SyncError> {
        StatusReply::of_message(&expect(receiver, STATUS)?, receiver)
    }

    /// Receives the replica's status, of which the first message was received already.
    pub(crate) fn of_message(message: &Message, receiver: &Receiver) -> Result<StatusReply, SyncError> {
        let status: StatusReply = message.json()?;
        status.check()?;
        let mut encoded = Vec::new();
        while encoded.len() < status.unsure_bytes {
            let part = expect(receiver, UNSURE)?.body;
            if part.is_empty() {
                break;
            }
            encoded.extend_from_slice(&part);
        }
        let unsure = match status.unsure_bytes {
            0 => Some(UnsureSet::new()),
            len => UnsureSet::decode(&encoded).filter(|_| encoded.len() == len),
        };
        let unsure = unsure.ok_or_else(|| nonsense("the blocks in which the replica is unsure"))?;
        let text = |said: Option<String>| said.as_deref().map(text);
        let replica = replica::Status {
            recovered: text(status.replica.recovered),
            changed: text(status.replica.changed),
            unsure,
            ..status.replica
        };
        Ok(StatusReply { replica, ..status })
    }

    /// Refuses an invalid status.
    fn check(&self) -> Result<(), SyncError> {
        check_path("the replica", Some(&self.path))?;
        let replica::Status { positions, size, role, .. } = &self.replica;
        let ascend = positions.windows(2).all(|two| matches!(two, [a, b] if a.upto < b.upto));
        let within = positions.iter().all(|part| part.upto <= MAX_SIZE);
        let bounded = self.unsure_bytes <= UnsureSet::LONGEST;
        let bounded = bounded && role.lives.is_sound();
        let bounded = bounded && self.primary.as_ref().is_none_or(|primary| primary.lives.is_sound());
        match positions.len() <= MAX_PARTS && ascend && within && bounded && *size <= MAX_SIZE {
            true => Ok(()),
            false => Err(nonsense("the parts of the replica")),
        }
    }
}

impl Plan {
    /// True if it is one of a mirror, or gives or takes a role, or a word for it.
    fn is_special(&self) -> bool {
        self.mirror.is_some() || self.release.is_some() || self.give_up.is_some() || self.accept
    }

    /// True if the replica is only read.
    pub(crate) fn looks(&self) -> bool {
        self.compare.is_some() && !self.delta && !self.is_special()
    }

    /// True if it leaves the replica to a commit of its group, or is a first copy of it.
    pub(crate) fn suits_group(&self) -> bool {
        !self.is_special() && (self.delta || self.looks_first)
    }

    /// Refuses an invalid plan.
    pub(crate) fn check(&self) -> Result<(), SyncError> {
        let sense = |checked: std::io::Result<()>| checked.map_err(|error| nonsense(&error.to_string()));
        sense(self.compare.as_ref().map_or(Ok(()), Scope::check))?;
        sense(self.rolling.as_ref().map_or(Ok(()), SumParams::check))?;
        if self.bytes.max(self.data) > MAX_SIZE {
            return Err(nonsense("the bytes of changes"));
        }
        Ok(())
    }
}

/// The error for an unexpected message: the far side's own, if it is Failed.
pub(crate) fn unexpected(message: &Message) -> SyncError {
    if message.kind == FAILED {
        if let Ok(Failed { message, class }) = message.json() {
            return SyncError::Far { message: lines(&message), class };
        }
    }
    SyncError::Far {
        message: format!(
            "the far side sent an unexpected message (kind {}): check that it runs the same version of dsync",
            message.kind
        ),
        class: Class::Failed,
    }
}

/// The next message, which must be of this kind.
pub(crate) fn expect(receiver: &Receiver, kind: u8) -> Result<Message, SyncError> {
    match next(receiver)? {
        message if message.kind == kind => Ok(message),
        message => Err(unexpected(&message)),
    }
}

/// The next message, whatever it is.
pub(crate) fn next(receiver: &Receiver) -> Result<Message, SyncError> {
    receiver.recv()?.ok_or_else(|| SyncError::Far {
        message: "the far side ended the conversation early: run again".into(),
        class: Class::Failed,
    })
}

/// The first message of a conversation, which must be of this kind.
pub(crate) fn request(receiver: &Receiver, kind: u8) -> Result<Message, SyncError> {
    let message = receiver.recv()?.ok_or_else(|| nonsense("nothing"))?;
    match message.kind {
        asked if asked == kind => Ok(message),
        OPEN => Err(SyncError::Refused(
            "this is \"dsync send\", which sends sources: to accept replicas, run \"dsync receive\" here"
                .into(),
        )),
        PULL => Err(SyncError::Refused(
            "this is \"dsync receive\", which accepts replicas: to send sources, run \"dsync send\" here"
                .into(),
        )),
        _ => Err(unexpected(&message)),
    }
}

/// Begins a conversation about one replica: requests it, and receives its status. `pace` limits what is sent.
pub(crate) fn open(
    sender: &Sender,
    receiver: &Receiver,
    replica: Open,
    pace: Option<&Pace>,
) -> Result<StatusReply, SyncError> {
    if let Some(pace) = pace {
        sender.pace(pace);
    }
    sender.send_json(OPEN, &Opening { group: None, members: vec![replica] })?;
    StatusReply::hear(receiver)
}

/// How long a side has to answer an error.
const LAST_WORD: Duration = Duration::from_secs(2);

/// Ends a conversation with an error. Without that, the other side would report a cut.
pub(crate) fn report(sender: Sender, receiver: &Receiver, error: &SyncError) {
    // It may be busy: then do not wait for it.
    let told = sender.send_json(FAILED, &Failed::of(error)).and_then(|()| sender.finish());
    let until = Instant::now() + LAST_WORD;
    let left = || until.saturating_duration_since(Instant::now());
    while told.is_ok() && matches!(receiver.recv_within(left()), Ok(Received::Message(_))) {}
}

/// Ends a conversation from the source's end, whatever its result. A link that breaks after the last message does
/// not matter; an error that the other side reports there does.
pub(crate) fn part<T>(
    sender: Sender,
    receiver: &Receiver,
    result: Result<T, SyncError>,
) -> Result<T, SyncError> {
    let done = match result {
        Ok(done) => done,
        // It knows already, or cannot be reached.
        Err(error @ (SyncError::Far { .. } | SyncError::Link(_))) => return Err(error),
        Err(error) => {
            report(sender, receiver, &error);
            return Err(error);
        }
    };
    if sender.finish().is_ok() {
        while let Ok(Some(message)) = receiver.recv() {
            if message.kind == FAILED {
                return Err(unexpected(&message));
            }
        }
    }
    Ok(done)
}
