//! Finding changes without a record, by checksums of blocks on both sides.
//!
//! The destination's digests flow to the source ([`answer`]), which compares them with its own blocks while it holds them
//! ([`differences`]): each side reads once, with many requests in flight, and hashes on all cores. Holes are announced, not read.
//! [`rolling`] also finds blocks that have moved.
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
//! // Usually a network lies between the two halves.
//! let mut claims = Vec::new();
//! answer(&copy, &scope, |claim, digests| Ok(claims.push((claim, digests))))?;
//! let mut claims = claims.into_iter();
//! let mut found = Vec::new();
//! differences(&source, &scope, |_| {}, || Ok(claims.next()), |finding| {
//!     if let Finding::Data { offset, data } = finding {
//!         found.push((offset, data.len()));
//!     }
//!     Ok(())
//! })?;
//! assert_eq!(found, [(8192, 4096)]);
//! # Ok(())
//! # }
//! ```

// Lists of one range are just that.
#![cfg_attr(test, allow(clippy::single_range_in_vec_init))]

mod answer;
mod differences;
mod digest;
mod digest_file;
mod ordered;
mod reader;
pub mod rolling;
mod scope;
#[cfg(test)]
mod tests;

pub use answer::{answer, answer_from};
pub use differences::{Finding, differences};
pub use digest::{DIGEST, Digest, Hash, is_zero};
pub use digest_file::DigestFile;
pub use ordered::in_order;
pub use reader::salvage;
pub use scope::{Claim, Scope};

/// Threads that hash: more than this many outrun any disk.
fn workers() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get()).min(16)
}
