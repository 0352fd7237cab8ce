//! Content that two files share, if their file system supports it (XFS, Btrfs).

use std::fs::File;
use std::io;
use std::ops::Range;

use crate::sys;

/// A file that may share the content of another.
pub struct Sharing {
    from: File,
    to: File,
    /// What can be shared, in bytes.
    block: u64,
}

impl Sharing {
    /// Lets the file `to`, open for writing, share what `from` holds.
    ///
    /// # Errors
    /// If their file system cannot be asked.
    pub fn new(from: File, to: File) -> io::Result<Sharing> {
        let block = rustix::fs::fstatvfs(&to)?.f_bsize.max(1);
        Ok(Sharing { from, to, block })
    }

    /// The whole blocks that can be shared of a range of `to` which is to hold what `from` holds from `at` on; empty if there are
    /// none, or the two lie in different parts of a block.
    pub fn part(&self, range: Range<u64>, at: u64) -> Range<u64> {
        let start = range.start.next_multiple_of(self.block);
        let end = range.end / self.block * self.block;
        if range.start % self.block == at % self.block && start < end { start..end } else { end..end }
    }

    /// Shares whole blocks: `range` of `to` is then what `from` holds from `at` on. Durable when `to` is flushed.
    ///
    /// # Errors
    /// If the file system cannot, or refuses.
    pub fn share(&self, range: Range<u64>, at: u64) -> io::Result<()> {
        sys::clone_range((&self.from, at), (&self.to, range.start), range.end - range.start)
    }
}
