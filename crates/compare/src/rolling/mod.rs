//! Finding data that has moved.
//!
//! The destination tells the sums of its blocks ([`tell`]), the source keeps them in an [`Index`] and looks in all of its own
//! bytes for what it can copy ([`changes`]). After "The rsync algorithm" (Tridgell and Mackerras), with these differences:
//!
//! - The weak sum depends on a key that is drawn for every sync, so nobody can make blocks with equal ones.
//! - Equal blocks stand in the index once. So the work grows with the file, whatever it holds.
//! - A block that stands at its place already is left there, and the file is searched in chunks on all cores.
//! - Where the destination is rebuilt in its own space, copies are ordered by what they read and overwrite ([`Cycles`]).
//!
//! Memory at the source: the index (see there), up to eight chunks of 4 MiB a core; in place beside that 150 bytes for each
//! part of a window, 80 MiB for a full one. At the destination eight chunks a core.

mod cut;
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

pub use index::Index;
pub use order::Cycles;
pub use plan::{Change, InPlace, changes};
pub use sums::{SUMS, Shape, Told, tell};

use crate::salvage;

/// Threads that read and sum: twice the cores, so that half of them may wait for the disk.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get()).saturating_mul(2).clamp(2, 32)
}

/// Reads a range of at most some chunks into a buffer that is kept. Returns which of its blocks of `block` bytes can't be
/// read, and are zeroes in the buffer; without `keep_going` the first of them is an error, by its place.
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
