//! What the two ends of a sync say to each other.
//!
//! ```text
//!     source                                   replica
//!     Open: which replica, for which source ─▶
//!                                            ◀─ Status: what is there
//!     Plan: what will come, what to tell     ─▶
//!                                            ◀─ DigestReport … DigestReport, or Sums … Sums (only if they are asked for)
//!     Header, Frame … Frame, Trailer         ─▶
//!                                            ◀─ Committed, or after a pass over a live disk Status again
//! ```
//!
//! In a mirror, a Plan that says so is followed by one delta after the other, each bound to the state that the one before
//! leaves; the replica answers each with Confirmed.
//!
//! Either side may end the conversation with Failed at any time. Else it ends with a goodbye from each: the source's when it
//! wants no more, then the replica's, for which the source waits.
//!
//! Whatever the other side says is bounded where it is heard: [`Status::check`], [`Plan::check`] and [`text`] here, digests
//! and sums in the compare crate, deltas in the delta crate, the lengths of messages in the link.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use compare::rolling::{SumParams, SumReport};
use compare::{DigestReport, Scope};
use delta::{Epoch, Unit, UnitKind};
use device::{Buf, Storage};
use link::{Link, Message, Received, Receiver, Sender};
use replica::Commit;
use serde::{Deserialize, Serialize};
use source::About;
use uuid::Uuid;

use crate::digests::Digests;
use crate::error::{Class, SyncError};
use crate::pipeline::Stages;

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

/// Opens a replica.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Open {
    pub path: PathBuf,
    pub journal_dir: Option<PathBuf>,
    pub commit: Commit,
    pub adopt: bool,
    /// Begin another replica where one is gone.
    #[serde(default)]
    pub create: bool,
    /// It will be compared and perhaps mended: others may have changed it.
    pub verify: bool,
    /// Keep digests of the replica from one sync to the next.
    pub digests: Option<Digests>,
    /// Where the source is, for a replica's side that is on the same host.
    #[serde(default)]
    pub source: Option<Storage>,
}

impl Open {
    /// Neither to be adopted nor verified, and without digests.
    pub(crate) fn new(path: &Path, journal_dir: &Option<PathBuf>, commit: Commit, source: &About) -> Open {
        Open {
            path: path.to_path_buf(),
            journal_dir: journal_dir.clone(),
            commit,
            adopt: false,
            create: false,
            verify: false,
            digests: None,
            source: Storage::of(&source.path),
        }
    }
}

/// Where the replica is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Status {
    /// The destination's canonical path, as the replica's name.
    pub path: PathBuf,
    /// The replica itself.
    #[serde(flatten)]
    pub replica: replica::Status,
    /// Bytes that a replica's file has, where it should have others.
    pub wrong_size: Option<u64>,
    /// What is copied within it must come in an order in which that can be done in place.
    pub in_place: bool,
}

/// What will come.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Bytes of changes, as far as is known.
    pub bytes: u64,
    /// The source asks for digests of the replica.
    pub compare: Option<Scope>,
    /// The source asks for the sums of the replica's blocks, before it sends anything.
    pub rolling: Option<SumParams>,
    /// A delta follows; else the digests are all that is wanted.
    pub delta: bool,
    /// The delta is a pass over a live disk: what it carries is kept, and committed with the delta that ends at a cut. After
    /// its trailer comes a new Status.
    pub pass: bool,
    /// Batches of a mirror follow, until the source says goodbye.
    pub mirror: Option<MirrorPlan>,
}

/// How a mirror's batches come.
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
}

/// The replica is at the new epoch.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Committed {
    pub epoch: Epoch,
    pub bytes_written: u64,
    pub bytes_read: u64,
    /// What became of the digests that were asked for.
    pub digests: Option<String>,
}

/// The end.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failed {
    pub message: String,
    pub class: Class,
}

impl Failed {
    /// What an error says.
    pub(crate) fn of(error: &SyncError) -> Failed {
        Failed { message: error.to_string(), class: error.class() }
    }
}

/// A unit of a delta as a message: the same bytes in other clothes.
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

/// The longest text that is taken from the other side, in bytes.
const MAX_TEXT: usize = 4096;
/// The longest path that a system takes.
const MAX_PATH: usize = 4096;
/// Parts of a replica: one for each transfer that was cut, so more than any has.
const MAX_PARTS: usize = 1 << 16;
/// No disk is larger.
const MAX_SIZE: u64 = i64::MAX as u64;

/// A text of the other side as it may be shown: one line, of bounded length, that does nothing to a terminal.
pub(crate) fn text(said: &str) -> String {
    let end = (0..=said.len().min(MAX_TEXT)).rev().find(|&at| said.is_char_boundary(at)).unwrap_or(0);
    let rest = if end < said.len() { "…" } else { "" };
    format!("{}{rest}", link::printable(&said[..end]))
}

/// What the other side said makes no sense.
fn nonsense(what: &str) -> SyncError {
    SyncError::Far {
        message: format!(
            "the far side sent an invalid message ({what}): check that it runs the same version of dsync"
        ),
        class: Class::Failed,
    }
}

fn check_path(what: &str, path: Option<&Path>) -> Result<(), SyncError> {
    use std::os::unix::ffi::OsStrExt;
    let sound = |path: &Path| {
        let bytes = path.as_os_str().as_bytes();
        bytes.len() <= MAX_PATH && !bytes.contains(&0)
    };
    if path.is_none_or(sound) { Ok(()) } else { Err(nonsense(&format!("{what} is not a path"))) }
}

impl Open {
    /// Hears which replica is asked for.
    pub(crate) fn hear(receiver: &Receiver) -> Result<Open, SyncError> {
        let open: Open = expect(receiver, OPEN)?.json()?;
        check_path("the replica", Some(&open.path))?;
        check_path("the journal's folder", open.journal_dir.as_deref())?;
        check_path("the digest file", open.digests.as_ref().and_then(|digests| digests.file.as_deref()))?;
        Ok(open)
    }
}

impl Status {
    /// Of a replica that nobody has at hand.
    pub(crate) fn of(replica: replica::Status) -> Status {
        Status { path: PathBuf::new(), replica, wrong_size: None, in_place: false }
    }

    /// Hears where the replica is.
    pub(crate) fn hear(receiver: &Receiver) -> Result<Status, SyncError> {
        let status: Status = expect(receiver, STATUS)?.json()?;
        status.check()?;
        let text = |said: Option<String>| said.as_deref().map(text);
        let replica = replica::Status {
            recovered: text(status.replica.recovered),
            changed: text(status.replica.changed),
            ..status.replica
        };
        Ok(Status { replica, ..status })
    }

    /// Refuses what no replica says of itself.
    fn check(&self) -> Result<(), SyncError> {
        check_path("the replica", Some(&self.path))?;
        let replica::Status { positions, size, .. } = &self.replica;
        let ascend = positions.windows(2).all(|two| matches!(two, [a, b] if a.upto < b.upto));
        let within = positions.iter().all(|part| part.upto <= MAX_SIZE);
        match positions.len() <= MAX_PARTS && ascend && within && *size <= MAX_SIZE {
            true => Ok(()),
            false => Err(nonsense("the parts of the replica")),
        }
    }
}

impl Plan {
    /// Refuses what no source plans.
    pub(crate) fn check(&self) -> Result<(), SyncError> {
        let sense = |checked: std::io::Result<()>| checked.map_err(|error| nonsense(&error.to_string()));
        sense(self.compare.as_ref().map_or(Ok(()), Scope::check))?;
        sense(self.rolling.as_ref().map_or(Ok(()), SumParams::check))?;
        if self.bytes > MAX_SIZE {
            return Err(nonsense("the bytes of changes"));
        }
        Ok(())
    }
}

/// What to make of a message that was not expected: the far side's own words, if it is its end.
pub(crate) fn unexpected(message: &Message) -> SyncError {
    if message.kind == FAILED {
        if let Ok(Failed { message, class }) = message.json() {
            return SyncError::Far { message: text(&message), class };
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
    match receiver.recv()? {
        Some(message) if message.kind == kind => Ok(message),
        Some(message) => Err(unexpected(&message)),
        None => Err(SyncError::Far {
            message: "the far side ended the conversation early: run again".into(),
            class: Class::Failed,
        }),
    }
}

/// Begins a conversation: asks for a replica, and hears where it is. `rate` limits what is sent, in bytes a second.
pub(crate) fn open(
    link: Link,
    replica: &Open,
    rate: Option<u64>,
) -> Result<(Sender, Receiver, Status), SyncError> {
    let (sender, receiver) = link.split();
    if let Some(rate) = rate {
        sender.limit(rate);
    }
    sender.send_json(OPEN, replica)?;
    let status = Status::hear(&receiver)?;
    Ok((sender, receiver, status))
}

/// How long a side that was told of an error has to answer it.
const LAST_WORD: Duration = Duration::from_secs(2);

/// Ends a conversation from the source's end, in order whatever came of it. A link that falls after the last word takes
/// nothing away from what was done; an error that the other side names there does.
pub(crate) fn part<T>(
    sender: Sender,
    receiver: &Receiver,
    result: Result<T, SyncError>,
) -> Result<T, SyncError> {
    let done = match result {
        Ok(done) => done,
        // It knows already, or cannot be told.
        Err(error @ (SyncError::Far { .. } | SyncError::Link(_))) => return Err(error),
        Err(error) => {
            // Else it takes the link for cut. It may be deep in its own work: then it is not waited for.
            let told = sender.send_json(FAILED, &Failed::of(&error)).and_then(|()| sender.finish());
            let until = Instant::now() + LAST_WORD;
            let left = || until.saturating_duration_since(Instant::now());
            while told.is_ok() && matches!(receiver.recv_within(left()), Ok(Received::Message(_))) {}
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
