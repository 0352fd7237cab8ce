//! A replica: a destination that knows its source and its epoch. How a delta becomes part of it, and what remains after a crash.
//!
//! [`Replica::open`] takes the replica for this process alone and completes or rolls back what a crash left. [`Replica::status`]
//! says what it holds; [`Replica::receive`] takes the header of a delta and gives a [`DeltaReceiver`] for its other units, whose
//! [`DeltaReceiver::finish`] commits. An interrupted delta is resumed by the next one.
//!
//! ```
//! use replica::{Options, Replica};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let replica = Replica::open(&folder.path().join("vm.raw"), &Options::default())?;
//! assert!(replica.status().epoch.is_none(), "nothing was merged yet");
//! # Ok(())
//! # }
//! ```
//!
//! `examples/merge.rs` merges a delta.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

// A file imports only files of the groups above its own.
mod aside;
mod attributes;
mod copies;
mod error;
mod index;
mod keep;
mod role;

mod version;

mod intent;

mod options;
mod past_commits;

mod lineage;

mod destination;
mod journal;
mod last_writes;
mod locate;
mod note;

mod unsure;

mod old;
mod present;
mod trail;

mod past;
mod saving;

mod views;

mod status;

mod apply;
mod replica;

mod fit;
mod foreign;
mod holes;

mod given_up;
mod undo;

mod accept;
mod origin;
mod undo_log;
mod viewed;

mod batches;
mod commit;
mod open;
mod receive;
mod recover;

mod demoted;
mod known;
mod promoted;
mod rewind;
mod settled;
mod verdict;
mod view;

mod group_past;

mod group;
mod view_together;

#[cfg(test)]
mod tests;

pub use accept::{Acceptable, accept_unwritten};
pub use batches::{BatchLog, Batches};
pub use demoted::{Demotion, demotes_anew};
#[doc(hidden)]
pub use destination::{Destination, DeviceDestination, Name};
pub use error::{ReplicaError, Result};
pub use given_up::has_dropped;
pub use group::{Group, folder_of_replicas, name_in};
#[doc(hidden)]
pub use group_past::{FoundMembers, choose_members, past_of};
pub use group_past::{GroupHistory, GroupMoment, find_group, group_history};
pub use intent::{Intent, Member, Membership};
pub use keep::{Keep, Span};
pub use known::{Condition, KnownPast, KnownReplica, KnownReplicas};
pub use lineage::{Lineage, Position, Stamp, State, Step, StepKind, Toward, Unsure};
pub use locate::inspect;
pub use options::{Herald, Options, SourceTime};
pub use origin::origin;
pub use past::{GivenUp, Moment};
pub use promoted::{Outlook, promotes_still, to_promote};
#[doc(hidden)]
pub use promoted::{promotes_still_by, to_promote_by};
pub use receive::{Commit, Committed, DeltaReceiver};
pub use replica::{Expected, Replica};
pub use rewind::{History, history, history_at_work};
pub use role::{Demoted, FIRST_TERM, GaveUp, Promoted, Released, Role};
pub use settled::{is_committing, settle};
pub use status::Status;
pub use unsure::UnsureSet;
pub use verdict::{Coverage, Verdict, verdict};
pub use view::{View, readers};
pub use view_together::{Wanted, view_together};
pub use views::Reader;
