//! A replica: a destination that knows its source and its epoch. How a delta becomes part of it, and what remains after a crash.
//!
//! [`Replica::open`] takes the replica for this process alone and completes or rolls back what a crash left. [`Replica::status`]
//! says where it stands; [`Replica::receive`] takes the header of a delta and gives a [`DeltaReceiver`] for its other units, whose
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

mod apply;
mod batches;
mod copies;
mod destination;
mod error;
mod foreign;
mod holes;
mod journal;
mod lineage;
mod promoted;
mod receiver;
mod replica;
mod settled;
#[cfg(test)]
mod tests;

pub use batches::{BatchLog, Batches};
#[doc(hidden)]
pub use destination::{Destination, DeviceDestination, Name};
pub use error::{ReplicaError, Result};
pub use lineage::{Lineage, Position, Stamp, State, Step, StepKind, Toward};
pub use promoted::{Promoted, Promotion, Use, promote};
pub use receiver::{Commit, Committed, DeltaReceiver};
pub use replica::{Options, Replica, Status, inspect};
pub use settled::settle;
