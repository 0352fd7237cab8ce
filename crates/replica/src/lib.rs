//! A replica: a destination that knows its source and its epoch. How a delta becomes part of it, and what remains after a crash.
//!
//! [`Replica::open`] takes the replica for this process alone and completes or rolls back what a crash left. [`Replica::standing`]
//! says where it stands; [`Replica::receive`] takes the header of a delta and gives a [`DeltaReceiver`] for its other units, whose
//! [`DeltaReceiver::finish`] commits. An interrupted delta is resumed by the next one.
//!
//! ```
//! use replica::{Options, Replica};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let replica = Replica::open(&folder.path().join("vm.raw"), &Options::default())?;
//! assert!(replica.standing().epoch.is_none(), "nothing was merged yet");
//! # Ok(())
//! # }
//! ```
//!
//! `examples/merge.rs` merges a delta.

#![forbid(unsafe_code)]

mod apply;
mod batches;
mod copies;
mod error;
mod foreign;
mod holes;
mod journal;
mod lineage;
mod place;
mod promoted;
mod receiver;
mod replica;
mod settled;
#[cfg(test)]
mod tests;

pub use batches::{BatchLog, Batches};
pub use error::{ReplicaError, Result};
pub use lineage::{Lineage, Position, Stamp, State, Step, StepPlace, Toward};
#[doc(hidden)]
pub use place::{DevicePlace, Place, Which};
pub use promoted::{Promoted, Promotion, Use, promote};
pub use receiver::{Commit, Committed, DeltaReceiver};
pub use replica::{Options, Replica, Standing, inspect};
pub use settled::settle;
