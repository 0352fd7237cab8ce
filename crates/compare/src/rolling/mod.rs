//! Finding data that has moved.
//!
//! The destination sends the sums of its blocks ([`block_sums`]); the source keeps them in an [`BlockIndex`] and searches all of its
//! own bytes for what can be copied ([`changes`]). After "The rsync algorithm" (Tridgell and Mackerras), with these differences:
//!
//! - The weak sum depends on a key drawn for each sync, so collisions cannot be crafted.
//! - Equal blocks have one entry in the index, so the work grows with the file only, whatever its content.
//! - Blocks already in place are left there, and the file is searched in chunks on all cores.
//! - For a rebuild in place, copies are ordered by what they read and overwrite ([`Cycles`]).
//!
//! Memory at the source: the index, up to eight chunks of 4 MiB per core, and, in place, 150 bytes for each token of a
//! window (80 MiB for a full one). At the destination: eight chunks per core.
//!
//! - *journal*, *reflink*: copies read the old content, so the delta ascends like any other. The result of a copy is stored in the
//!   journal as data: merging again is harmless, and an interrupted transfer resumes. In a clone, a result that is aligned to blocks of
//!   the file system is shared with the old file, checked and not written.
//! - *in place*: copies are the nodes of a graph, with an edge from each to those that overwrite what it reads, and are made in
//!   topological order; the smallest part of a cycle is sent instead. What is sent is written after all copies of its window (half a
//!   million tokens). After an interruption the content is not known: the replica is incomplete, and the next sync compares it.
//!
//! The block size is the power of two at or above the square root of the size, from 512 bytes to 128 KiB. The source holds 29 to 45 bytes
//! per block: 6 MiB for a GiB in blocks of 8 KiB, 360 KiB per GiB of a disk of 16 GiB or more. Of the sums of a block 12 bytes are
//! strong: a block that is in place is accepted by 96 bits of a hash whose key was not known when the content was written.

mod index;
mod order;
mod plan;
mod scan;
mod sums;
#[cfg(test)]
mod tests;
mod weak;

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk};

pub use index::BlockIndex;
pub use order::Cycles;
pub use plan::{Change, InPlace, changes};
pub use sums::{SUMS, SumParams, SumReport, block_sums};

use crate::salvage;

/// Threads that read and hash: twice the cores, so that half of them may wait for the disk.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get()).saturating_mul(2).clamp(2, 32)
}

/// Reads a range into a reusable buffer. Returns the blocks of `block` bytes that cannot be read, which are zeroes in the
/// buffer; without `keep_going` the first of them is an error.
fn read(
    disk: &Arc<dyn Disk>,
    range: Range<u64>,
    buf: &mut Buf,
    block: u32,
    keep_going: bool,
) -> io::Result<Vec<Range<u64>>> {
    let len = (range.end - range.start) as usize;
    if buf.capacity() < len {
        *buf = Buf::new(len);
    }
    buf.set_len(len);
    if disk.read_cached(range.start, buf) {
        return Ok(Vec::new());
    }
    match disk.read_at(range.start, buf) {
        Err(error) if device::is_unreadable(&error) => salvage(&**disk, range.start, buf, block, keep_going),
        other => other.map(|()| Vec::new()),
    }
}
