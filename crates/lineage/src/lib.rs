//! Who is ahead of whom: the log of commits that every disk keeps in either role, where the disk stands in it, and what two such logs say
//! of each other.
//!
//! Each opening of a source begins a *life*; its commits are numbered within that life, so a [`Point`] is a life and a number. A life
//! begins at a point of another one, which makes a tree of all that ever became of a disk. A disk stands at one point of it (its
//! [`Head`]), and all that led there is its [`Lives`].
//!
//! [`relation()`] compares two disks by their paths, and by what was written to each that is in no commit. It reads and writes nothing.
//! What is not known is [`Relation::Unknown`], never a guess.
//!
//! ```text
//!     L1 ─ 1 ─ 2 ─ 3 ─ 4          the source, until it is lost
//!              └── L2 ─ 1 ─ 2     the replica that was at L1:2, promoted: forked at L1:2
//! ```
//!
//! The rules have counterparts elsewhere: git finds the common ancestor of two commits, DRBD compares generation identifiers, ZFS the guids
//! of snapshots.

mod commit;
mod file;
#[cfg(test)]
mod file_tests;
mod head;
#[cfg(test)]
mod histories;
mod lives;
mod log;
mod relation;
#[cfg(test)]
mod situations;

pub use commit::{Changes, Commit, Gap, Kind, Point};
pub use file::{LogError, LogFile};
pub use head::{Head, Part, Set};
pub use lives::{Branch, Lives};
pub use log::Log;
pub use relation::{Doubt, Relation, Side, relation};
