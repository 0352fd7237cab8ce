//! Metadata contexts of an export.

use std::io;
use std::sync::Arc;

use device::Disk;

/// The flags of the contexts that many clients know.
pub mod state {
    /// `base:allocation`: no space is allocated.
    pub const HOLE: u32 = 1;
    /// `base:allocation`: reads as zeroes.
    pub const ZERO: u32 = 2;
    /// `qemu:dirty-bitmap:NAME`: changed.
    pub const DIRTY: u32 = 1;
}

/// A run of bytes that share their flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockStatus {
    /// Bytes; above zero.
    pub len: u64,
    /// Flags; their meaning is the context's.
    pub flags: u32,
}

/// A metadata context of an export, queried with NBD's block status.
pub trait Context: Send + Sync {
    /// Namespace, colon and leaf, as in `qemu:dirty-bitmap:dsync`.
    fn name(&self) -> &str;

    /// Prepares to answer, when a client selects it. On an error the context is refused to that client.
    fn prepare(&self) -> io::Result<()> {
        Ok(())
    }

    /// The status of the runs that follow one another from `offset`, within the export. At least one run and at most
    /// `limit`; together they may fall short of `len` bytes or go beyond. What goes beyond is cut off.
    fn status(&self, offset: u64, len: u64, limit: usize) -> io::Result<Vec<BlockStatus>>;
}

/// `base:allocation`, from the holes of the disk.
pub(crate) struct Allocation {
    pub(crate) disk: Arc<dyn Disk>,
}

impl Context for Allocation {
    fn name(&self) -> &str {
        "base:allocation"
    }

    fn status(&self, offset: u64, len: u64, limit: usize) -> io::Result<Vec<BlockStatus>> {
        let end = offset.saturating_add(len);
        let mut runs = Vec::new();
        let mut at = offset;
        while at < end && runs.len() < limit {
            let data = self
                .disk
                .allocated(at)?
                .map_or(end..end, |run| run.start.clamp(at, end)..run.end.clamp(at, end));
            if data.start > at {
                runs.push(BlockStatus { len: data.start - at, flags: state::HOLE | state::ZERO });
            }
            if !data.is_empty() && runs.len() < limit {
                runs.push(BlockStatus { len: data.end - data.start, flags: 0 });
            }
            if data.is_empty() && data.start < end {
                return Err(io::Error::other("the disk reports an allocated run without a byte"));
            }
            at = data.end;
        }
        Ok(runs)
    }
}

/// Fits a context's answer to the protocol: runs within `len` bytes that fit 32 bits, equal neighbours merged.
/// `None` if the answer does not make sense.
pub(crate) fn tidy(runs: &[BlockStatus], len: u32, limit: usize) -> Option<Vec<(u32, u32)>> {
    let mut tidied: Vec<(u32, u32)> = Vec::with_capacity(runs.len().min(limit));
    let mut left = len;
    for run in runs {
        if left == 0 {
            break;
        }
        let len = u32::try_from(run.len).unwrap_or(u32::MAX).min(left);
        if len == 0 {
            return None;
        }
        left -= len;
        let full = tidied.len() == limit;
        match tidied.last_mut() {
            Some(last) if last.1 == run.flags => last.0 += len,
            _ if full => break,
            _ => tidied.push((len, run.flags)),
        }
    }
    (!tidied.is_empty()).then_some(tidied)
}
