//! Exports and their descriptions.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use device::Disk;

use crate::context::Context;
use crate::protocol::{REP_ERR_POLICY, REP_ERR_UNKNOWN};

/// The exports of a server. Called by every connection, from its own thread.
pub trait Exports: Send + Sync {
    /// The exports that are listed to a client, in order. Unlisted ones may be opened by name.
    fn list(&self) -> Vec<ExportInfo>;

    /// Opens an export for one connection, by the name that a client requested.
    ///
    /// A client that queries an export before it connects makes two calls for one connection. The first [`Export`] is dropped
    /// before the second is requested, unless it has the same name: then it is reused.
    fn open(&self, name: &str) -> Result<Export, ExportRefusal>;

    /// The export that the empty name stands for: the only one listed, if there is exactly one.
    fn default_name(&self) -> Option<String> {
        let mut listed = self.list();
        if listed.len() == 1 { listed.pop().map(|one| one.name) } else { None }
    }
}

/// An export in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name to open it by.
    pub name: String,
    /// A line for people to read; may be empty.
    pub description: String,
}

/// Why an export was not opened. The message goes to the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportRefusal {
    pub(crate) code: u32,
    /// The reason, and the way out.
    pub message: String,
}

impl ExportRefusal {
    /// There is no such export.
    pub fn unknown(message: impl Into<String>) -> ExportRefusal {
        ExportRefusal { code: REP_ERR_UNKNOWN, message: message.into() }
    }

    /// The export exists but is not available: it is busy, broken, or not for this client.
    pub fn denied(message: impl Into<String>) -> ExportRefusal {
        ExportRefusal { code: REP_ERR_POLICY, message: message.into() }
    }
}

impl fmt::Display for ExportRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ExportRefusal {}

/// Limits on the sizes of requests, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of it: a power of two, from 1 to 64 KiB.
    pub min: u32,
    /// Requests of multiples of it are fast: a power of two, at least 512 and at least `min`.
    pub preferred: u32,
    /// The most data that one read or write may carry; at least `preferred`.
    pub max: u32,
}

impl BlockSizes {
    pub(crate) fn check(&self) -> Result<(), ExportRefusal> {
        let good = self.min.is_power_of_two()
            && self.min <= 1 << 16
            && self.preferred.is_power_of_two()
            && self.preferred >= self.min.max(512)
            && self.max >= self.preferred;
        if good {
            return Ok(());
        }
        let BlockSizes { min, preferred, max } = self;
        Err(ExportRefusal::denied(format!("invalid block sizes {min}, {preferred} and {max} of the export")))
    }
}

impl Default for BlockSizes {
    /// What clients assume by default: 1 byte, 4 KiB, 32 MiB.
    fn default() -> BlockSizes {
        BlockSizes { min: 1, preferred: 4096, max: 32 << 20 }
    }
}

/// An export, opened for one connection and dropped when the connection ends.
pub struct Export {
    /// The name by which it is listed.
    pub name: String,
    /// A line for people to read; may be empty.
    pub description: String,
    /// The disk. Its size is read as the connection begins.
    pub disk: Arc<dyn Disk>,
    /// Writes, trims and zeroes are refused.
    pub read_only: bool,
    /// Limits on the sizes of requests.
    pub block: BlockSizes,
    /// A flush on one connection covers what was completed on every other.
    pub multi_conn: bool,
    /// The disk can tell whether zeroing is faster than writing zeroes ([`Disk::zero`] with `fast`).
    pub fast_zero: bool,
    /// Clients should order their requests as for a spinning disk.
    pub rotational: bool,
    /// Metadata contexts, besides `base:allocation`, which every export has.
    pub contexts: Vec<Arc<dyn Context>>,
    /// The most requests of one connection in flight; above zero.
    pub queue_depth: u32,
    /// Dropped last when the connection ends.
    pub guard: Box<dyn Any + Send>,
}

impl Export {
    /// A writable disk, for several connections if the client wants them.
    pub fn new(name: impl Into<String>, disk: Arc<dyn Disk>) -> Export {
        let usual = BlockSizes::default();
        let preferred = disk.align().clamp(usual.preferred, 1 << 20);
        Export {
            name: name.into(),
            description: String::new(),
            disk,
            read_only: false,
            block: BlockSizes { preferred, ..usual },
            multi_conn: true,
            fast_zero: true,
            rotational: false,
            contexts: Vec::new(),
            queue_depth: 64,
            guard: Box::new(()),
        }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("name", &self.name)
            .field("size", &self.disk.len())
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}
