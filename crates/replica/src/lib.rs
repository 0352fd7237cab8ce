//! A replica: a destination that knows its source and its epoch. How a delta becomes part of it, and what remains after a crash.
//!
//! [`Replica::open`] takes the replica for this process alone and completes or rolls back what a crash left. [`Replica::status`]
//! says what it holds; [`Replica::receive`] takes the header of a delta and gives a [`DeltaReceiver`] for its other units, whose
//! [`DeltaReceiver::finish`] commits. An interrupted delta is resumed by the next one.
//!
//! ```
//! use replica::{Replica, ReplicaOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let replica = Replica::open(&folder.path().join("vm.raw"), &ReplicaOptions::default())?;
//! assert!(replica.status().epoch.is_none(), "nothing was merged yet");
//! # Ok(())
//! # }
//! ```
//!
//! `examples/merge.rs` merges a delta.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod commit;
mod error;
mod foreign;
mod group;
mod journal;
mod known;
mod moments;
mod open;
mod past;
mod recover;
mod replica;
mod roles;
mod settled;
mod state;
mod status;
#[cfg(test)]
mod tests;

pub use commit::accept::{Acceptable, accept_unwritten};
pub use commit::batches::{BatchCommitter, BatchLog};
pub use commit::given_up::has_dropped;
pub use commit::receive::{CommitMode, Committed, DeltaReceiver};
pub use error::{ReplicaError, Result};
#[doc(hidden)]
pub use group::past::{FoundMembers, choose_members, past_of};
pub use group::past::{GroupHistory, GroupMoment, find_group, group_history, groups_in};
pub use group::view::{GroupView, WantedGroup, view_together};
pub use group::{Group, folder_of_replicas, name_in};
pub use journal::unsure::UnsureSet;
pub use known::origin::origin;
pub use known::verdict::{Coverage, Verdict, verdict};
pub use known::{Condition, KnownPast, KnownReplica, KnownReplicas};
pub use moments::rewind::{ReplicaPast, history, history_at_work};
pub use moments::view::{MomentView, readers};
pub use past::views::ReplicaReader;
pub use past::{GivenUpPast, Moment};
pub use replica::{ExpectedBytes, Replica};
pub use roles::demoted::{Demotion, demotes_anew};
#[doc(hidden)]
pub use roles::promoted::promotes_still_by;
pub use roles::promoted::{Outlook, promotes_still, to_promote};
pub use settled::{is_committing, settle};
#[doc(hidden)]
pub use state::destination::{Destination, DeviceDestination, Name};
pub use state::intent::{Intent, Member, ReplicaMembership};
pub use state::keep::{Keep, Span};
pub use state::lineage::{Lineage, Position, Stamp, State, Step, StepKind, Toward, Unsure};
pub use state::locate::inspect;
pub use state::options::{Herald, ReplicaOptions, SourceTime};
pub use state::role::{Demoted, FIRST_TERM, GaveUp, Promoted, Released, Role};
pub use status::Status;
