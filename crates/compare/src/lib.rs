//! Finding changes without a tracker's record, by checksums of blocks on both sides.
//!
//! The destination sends digests to the source ([`answer`]), which compares them with its own blocks while it has them in
//! memory ([`differences`]): each side reads once, with many requests in flight, and hashes on all cores. Holes are reported,
//! not read. [`rolling`] also finds blocks that have moved.
//!
//! ```
//! use std::sync::Arc;
//!
//! use compare::{Finding, Scope, answer, differences};
//! use device::{Disk, RamDisk};
//!
//! # fn main() -> std::io::Result<()> {
//! let (source, copy): (Arc<dyn Disk>, Arc<dyn Disk>) = (Arc::new(RamDisk::new(1 << 20)), Arc::new(RamDisk::new(1 << 20)));
//! source.write_at(8192, &[7; 4096])?;
//! let scope = Scope::whole(source.len(), 4096);
//! // Usually there is a network between the two halves.
//! let mut reports = Vec::new();
//! answer(&copy, &scope, |report, digests| Ok(reports.push((report, digests))))?;
//! let mut reports = reports.into_iter();
//! let mut found = Vec::new();
//! differences(&source, &scope, |_| {}, || Ok(reports.next()), |finding| {
//!     if let Finding::Data { offset, data } = finding {
//!         found.push((offset, data.len()));
//!     }
//!     Ok(())
//! })?;
//! assert_eq!(found, [(8192, 4096)]);
//! # Ok(())
//! # }
//! ```
//!
//! A digest is the first half of BLAKE3 of a block, or XXH3-128. Digests go in order, a MiB at a time. Nothing that the peer says is
//! trusted: its reports must cover the disk without a gap or an overlap.

// Tests have lists of one range.
#![cfg_attr(test, allow(clippy::single_range_in_vec_init))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod answer;
mod differences;
mod digest;
mod digest_file;
mod ordered;
mod reader;
pub mod rolling;
mod scope;
mod segments;
#[cfg(test)]
mod tests;

pub use answer::{answer, answer_from};
pub use differences::{Finding, HeldBytes, differences};
pub use digest::{DIGEST, Digest, Hash, is_zero};
pub use digest_file::DigestFile;
pub use ordered::in_order;
pub use reader::salvage;
pub use scope::{DigestReport, Scope};

/// Threads that hash: more than 16 outrun any disk.
fn workers() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get()).min(16)
}
