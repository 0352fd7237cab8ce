//! Locks on images. They are those of QEMU, so that each refuses the other.
//!
//! QEMU locks single bytes far below any data's meaning, always shared: byte 100+n says "I use permission n", byte 200+n
//! says "I do not share permission n". After locking its own it checks, for each permission it uses, whether another program
//! does not share it, and for each it does not share, whether another program uses it. The locks belong to the open file description.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::error::{DeviceError, DeviceErrorKind};
use crate::usage;

/// The intended use of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading, along with other readers. No program may write.
    ReadShared,
    /// Writing. No other program may write, or rely on what it reads.
    Write,
}

const USED: i64 = 100;
const NOT_SHARED: i64 = 200;
/// Reading, with no changes meanwhile.
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// Permissions denied to other programs in either case.
const DENIED: [i64; 2] = [WRITE, RESIZE];

impl Access {
    fn uses(self) -> &'static [i64] {
        match self {
            Access::ReadShared => &[READ],
            Access::Write => &[READ, WRITE, RESIZE],
        }
    }
}

/// A lock on an image; released when dropped.
#[derive(Debug)]
pub struct ImageLock {
    file: File,
}

impl Drop for ImageLock {
    /// By name: closing is not enough while a child that another thread has just forked still shares the open file.
    fn drop(&mut self) {
        let mut all = byte_lock(libc::F_UNLCK, USED);
        all.l_len = 2 * (NOT_SHARED - USED) as libc::off_t;
        let _ = set(&self.file, &all);
    }
}

/// The way out if dsync itself holds the lock: for a source with the same state directory, it would have been reported as in use.
const OTHER_STATE: &str =
    "stop it, or pass its state directory with --state-dir; if that was removed, restart it";

/// Locks the file or block device at `path` against other users, QEMU's programs among them. Of kind
/// [`DeviceErrorKind::InUse`] if it is in use in a way that conflicts with `access`.
pub fn lock_image(path: &Path, access: Access) -> Result<ImageLock, DeviceError> {
    let fail = |e: io::Error| match e.raw_os_error() {
        Some(libc::ENOLCK | libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS) => DeviceError::new(
            DeviceErrorKind::Unsupported,
            "lock",
            path,
            "its file system has no locks",
            "move it to one that has, or mount this one with locks",
        ),
        _ => DeviceError::from_io("lock", path, e),
    };
    let file = File::open(path).map_err(fail)?;
    for byte in access.uses().iter().map(|n| USED + n).chain(DENIED.map(|n| NOT_SHARED + n)) {
        set(&file, &byte_lock(libc::F_RDLCK, byte)).map_err(fail)?;
    }
    for byte in DENIED.map(|n| USED + n).into_iter().chain(access.uses().iter().map(|n| NOT_SHARED + n)) {
        if locked_by_others(&file, byte).map_err(fail)? {
            let does = match byte - if byte < NOT_SHARED { USED } else { NOT_SHARED } {
                WRITE if byte < NOT_SHARED => "another program has it open for writing",
                RESIZE if byte < NOT_SHARED => "another program may resize it",
                _ => "another program requires that its content does not change",
            };
            let who = usage::openers(&file).map(|who| format!(" ({who})")).unwrap_or_default();
            let way_out = if who.starts_with(" (dsync") { OTHER_STATE } else { "stop that program first" };
            return Err(DeviceError::new(
                DeviceErrorKind::InUse,
                "lock",
                path,
                format!("{does}{who}"),
                way_out,
            ));
        }
    }
    Ok(ImageLock { file })
}

fn byte_lock(kind: i32, byte: i64) -> libc::flock {
    // SAFETY: flock is plain data, for which zeroes are a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = byte as _;
    lock.l_len = 1;
    lock
}

fn set(file: &File, wanted: &libc::flock) -> io::Result<()> {
    // SAFETY: the kernel reads a flock from the pointer, which outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const *wanted) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn locked_by_others(file: &File, byte: i64) -> io::Result<bool> {
    let mut asked = byte_lock(libc::F_WRLCK, byte);
    // SAFETY: the kernel reads and writes a flock at the pointer, which outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut asked) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::from(asked.l_type) != libc::F_UNLCK) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_writer_or_many_readers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 4096]).unwrap();
        let reader = lock_image(&path, Access::ReadShared).unwrap();
        let second = lock_image(&path, Access::ReadShared).unwrap();
        let error = lock_image(&path, Access::Write).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::InUse);
        let text = error.to_string();
        assert!(text.contains("disk") && text.contains(&format!("pid {}", std::process::id())), "{text}");
        drop((reader, second));
        let writer = lock_image(&path, Access::Write).unwrap();
        assert!(lock_image(&path, Access::ReadShared).is_err());
        let text = lock_image(&path, Access::Write).unwrap_err().to_string();
        assert!(text.contains("open for writing"), "{text}");
        // What a child of another thread has of it until it runs its own program.
        let forked = writer.file.try_clone().unwrap();
        drop(writer);
        lock_image(&path, Access::Write).unwrap();
        drop(forked);
    }
}
