//! What dsync notes about a tracker, in a map beside its record in the kernel, with the record's lifetime.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::sys;

/// Bytes of the map's one value.
const ROOM: usize = 4096;

/// Counts of writes that were not recorded. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Counts {
    /// Writes that did not fit into the table of writes in flight.
    pub dropped: u64,
    /// Writes that completed and had not been in that table.
    pub stray: u64,
    /// Starts of writes for which a program did not run because it was already running on that processor.
    pub missed: u64,
    /// Completions missed in the same way. Alone they are harmless: a write stays in the table longer than needed.
    pub unended: u64,
    /// Times that the disk was made smaller.
    pub shrunk: u64,
    /// Commands with data for the disk that were sent past the block layer.
    #[serde(default)]
    pub passed: u64,
}

impl Counts {
    /// What was not recorded between `base` and these counts, as text.
    pub(super) fn since(&self, base: &Counts, doubtful: bool) -> Option<String> {
        let more = |what: fn(&Counts) -> u64| what(self).saturating_sub(what(base));
        let why = if more(|c| c.dropped) > 0 {
            format!("{} writes did not fit into the table of writes in flight", more(|c| c.dropped))
        } else if more(|c| c.missed) > 0 {
            format!("{} events were missed", more(|c| c.missed))
        } else if more(|c| c.stray) > 0 {
            format!("{} writes completed whose start was not seen", more(|c| c.stray))
        } else if doubtful && more(|c| c.unended) > 0 {
            // A write whose start was missed is known only by its completion.
            format!("{} ends of writes were missed after missed starts", more(|c| c.unended))
        } else if more(|c| c.passed) > 0 {
            format!(
                "{} commands that may write were sent past the block layer (SG_IO, NVMe passthrough)",
                more(|c| c.passed)
            )
        } else if more(|c| c.shrunk) > 0 {
            "the disk was made smaller in the meantime, and what was cut off is lost".into()
        } else {
            return None;
        };
        Some(why)
    }
}

/// See the module.
///
/// More than fifteen fields: it is the one value of a map, in which each is found by its name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Notes {
    /// The device's path when tracking began.
    pub device: PathBuf,
    pub diskseq: u64,
    pub first_sector: u64,
    pub size: u64,
    /// Of a loop device: the part of its file.
    #[serde(default)]
    pub part: Option<[u64; 2]>,
    pub block_size: u32,
    /// The boot id.
    pub boot: String,
    /// Numbers of the links.
    pub links: [u32; super::LINKS.len()],
    /// Why writes since the last release are not known; `None` if they are.
    pub lost: Option<String>,
    /// The epoch that was released last.
    pub released: Option<Uuid>,
    /// The counts at the checkpoint that was released last.
    pub base: Counts,
    /// The counts just before the last checkpoint, if it is not released.
    pub pending: Option<Counts>,
    /// The token of the last checkpoint, if it is not released.
    pub ended: Option<Uuid>,
    /// Writes of the epoch released last were not recorded: one of them may land in this one.
    pub doubtful: bool,
    /// What was written before the last boot was saved then, and no epoch has been released since.
    #[serde(default)]
    pub restored: bool,
    /// Where the record is saved, until it goes on.
    #[serde(default)]
    pub saved: Option<SavedIn>,
}

/// Where a record is saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedIn {
    pub folder: PathBuf,
    /// The device is read-only since then, and was not before.
    pub locks: bool,
}

impl Notes {
    pub(super) fn read(map: BorrowedFd) -> io::Result<Notes> {
        let mut value = vec![0; ROOM];
        sys::lookup(map, 0, &mut value)?;
        let end = value.iter().position(|b| *b == 0).unwrap_or(ROOM);
        Ok(serde_json::from_slice(&value[..end])?)
    }

    pub(super) fn write(&self, map: BorrowedFd) -> io::Result<()> {
        let mut value = serde_json::to_vec(self)?;
        if value.len() >= ROOM {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the notes of the tracker are too long"));
        }
        value.resize(ROOM, 0);
        sys::update(map, 0, &value)
    }
}
