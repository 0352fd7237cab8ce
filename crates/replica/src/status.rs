//! The status of a replica: what its source must know to find what it lacks.

use delta::{Epoch, Resume};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::journal::unsure::UnsureSet;
use crate::state::lineage::{Position, State};
use crate::state::role::Role;

/// The status of a replica: what its source must know to find what it lacks.
///
/// More than fifteen fields: they are the keys of its message, which is flat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The source it follows. `None` if there is no replica yet, or an adopted file.
    pub source: Option<Uuid>,
    /// The epoch of the last commit. `None` before the first.
    pub epoch: Option<Epoch>,
    /// Batches of a mirror have brought it ahead of that epoch. For people: the unsure set tells what to send.
    pub ahead: bool,
    /// How far the destination may be trusted. Incomplete if there is none.
    pub state: State,
    /// Bytes as of the last commit; of an adopted file those it has; 0 before the first seed is committed.
    pub size: u64,
    /// The source's block size in bytes, as of the last commit.
    pub block_size: u32,
    /// Bytes that a device has room for. `None` for a file.
    pub capacity: Option<u64>,
    /// The parts of the replica, ascending, its journal counted. Empty if there is nothing yet.
    pub positions: Vec<Position>,
    /// The blocks in which it may not be what the positions say. Not in JSON: a set may be large.
    #[serde(skip)]
    pub unsure: UnsureSet,
    /// Names this very state, for deltas that fit nothing else.
    pub nonce: Uuid,
    /// The epoch to which a step leads that was begun and not finished: what continues it is bound to the nonce. Parts of that
    /// epoch may be anywhere, so a source that does not know it cannot tell what to send.
    pub toward: Option<Epoch>,
    /// The interrupted delta in the journal. What goes on from it says so; anything else drops it.
    pub resumes: Option<Resume>,
    /// What opening the replica had to mend, as a text.
    pub recovered: Option<String>,
    /// There was a replica, and its file is gone: another one begins only where that is asked for.
    pub gone: bool,
    /// In what way others changed the destination since the last commit, where [`crate::ReplicaOptions::doubt`] let it pass.
    pub changed: Option<String>,
    /// What a replica was recorded to hold that is adopted because others have changed it: what only it has is still there, as far as they have left it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former: Option<Box<Status>>,
    /// What it is, and the terms and epochs that go with that.
    #[serde(flatten)]
    pub role: Role,
    /// The group whose replicas it is committed with.
    pub group: Option<String>,
}

impl Status {
    /// There is no replica.
    pub fn nothing() -> Status {
        Status {
            source: None,
            epoch: None,
            ahead: false,
            state: State::Incomplete,
            size: 0,
            block_size: 0,
            capacity: None,
            positions: Vec::new(),
            unsure: UnsureSet::new(),
            nonce: Uuid::nil(),
            toward: None,
            resumes: None,
            recovered: None,
            gone: false,
            changed: None,
            former: None,
            role: Role::default(),
            group: None,
        }
    }

    /// True if a step was begun and not finished.
    pub fn under_way(&self) -> bool {
        self.toward.is_some()
    }

    /// A replica that is exactly at an epoch of its source, whose disk then had `size` bytes.
    pub fn at(source: Uuid, epoch: Epoch, size: u64) -> Status {
        Status {
            source: Some(source),
            epoch: Some(epoch),
            state: State::Exact,
            size,
            positions: vec![Position { epoch: Some(epoch), upto: size }],
            ..Status::nothing()
        }
    }
}
