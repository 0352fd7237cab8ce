//! A replica: a destination with its lineage. What it holds, how a delta becomes part of it, and what is left of that after a
//! crash.
//!
//! [`Replica::open`] takes the replica for this process alone and finishes or undoes what a crash left. [`Replica::standing`]
//! tells where it stands; [`Replica::receive`] takes a delta's header and gives a [`Receipt`] for the other units, whose
//! [`Receipt::finish`] commits. Whatever is cut off between is gone on from by a next delta.

mod apply;
mod batches;
mod copies;
mod error;
mod journal;
mod lineage;
mod place;
mod promoted;
mod receipt;
mod replica;
mod rest;
mod settled;
#[cfg(test)]
mod tests;

pub use batches::{BatchLog, Batches};
pub use error::{ReplicaError, Result};
pub use lineage::{Lineage, Position, Stamp, State, Step, StepPlace, Toward};
#[doc(hidden)]
pub use place::{DevicePlace, Place, Which};
pub use promoted::{Promoted, Promotion, Use, promote};
pub use receipt::{Commit, Committed, Receipt};
pub use replica::{Options, Replica, Standing, inspect};
pub use settled::settle;
