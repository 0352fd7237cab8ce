//! Finding changes without a record: checksums of aligned blocks on both sides.
//!
//! The destination's digests flow to the source ([`answer`]), which compares them with its own blocks while it holds them
//! ([`differences`]), so that each side reads once, with many requests on their way, and hashes on all cores. Holes are
//! told, not read.

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
