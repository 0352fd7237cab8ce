//! Room for what is kept of a disk while it is in use: it leaves its file system to those who need it more.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// How many bytes are taken of a file's file system before it is looked again what that has left.
const LOOK_EVERY: u64 = 4 << 20;

/// What a scratch file may take: at most half of the space that its file system would have without it.
#[derive(Debug, Default)]
pub struct Room {
    /// Bytes that may be written before that is looked at again.
    quota: AtomicU64,
}

impl Room {
    /// Bytes that a file takes.
    ///
    /// # Errors
    /// If the file cannot be looked at.
    pub fn taken(file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.blocks() * 512)
    }

    /// True if this much more may be written to the file.
    ///
    /// # Errors
    /// If its file system cannot be looked at.
    pub fn take(&self, file: &File, bytes: u64) -> io::Result<bool> {
        if self.quota.fetch_update(SeqCst, SeqCst, |quota| quota.checked_sub(bytes)).is_ok() {
            return Ok(true);
        }
        let status = rustix::fs::fstatvfs(file)?;
        let (taken, free) = (Room::taken(file)?, status.f_bavail.saturating_mul(status.f_frsize));
        if taken.saturating_add(bytes) > free.saturating_sub(bytes) {
            return Ok(false);
        }
        self.quota.store(LOOK_EVERY.min((free - taken) / 4), SeqCst);
        Ok(true)
    }
}
