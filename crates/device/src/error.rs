//! Errors that name the disk, the place and a way out.

use std::io;
use std::path::{Path, PathBuf};

/// The kind of a [`DeviceError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceErrorKind {
    /// There is nothing at the path.
    Missing,
    /// The user may not do that.
    Denied,
    /// Neither a regular file nor a block device.
    NotADisk,
    /// Mounted, locked, held, or opened exclusively by another program.
    InUse,
    /// The file system or the kernel cannot do that.
    Unsupported,
    /// The system call failed.
    Failed,
}

/// A disk could not be opened, locked or examined: what was tried, where, why it failed and what to do.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {}: {why}: {way_out}", path.display())]
pub struct DeviceError {
    kind: DeviceErrorKind,
    doing: &'static str,
    path: PathBuf,
    why: String,
    way_out: String,
    /// The system's error, which `why` tells.
    system: Option<io::Error>,
}

impl DeviceError {
    pub(crate) fn new(
        kind: DeviceErrorKind,
        doing: &'static str,
        path: &Path,
        why: impl Into<String>,
        way_out: impl Into<String>,
    ) -> DeviceError {
        let (why, way_out) = (why.into(), way_out.into());
        DeviceError { kind, doing, path: path.to_path_buf(), why, way_out, system: None }
    }

    pub(crate) fn from_io(doing: &'static str, path: &Path, error: io::Error) -> DeviceError {
        use io::ErrorKind::*;
        let (kind, why, way_out) = match error.kind() {
            NotFound => (DeviceErrorKind::Missing, "no such file or device".into(), "check the path".into()),
            NotADirectory => (
                DeviceErrorKind::Missing,
                "a part of the path is not a directory".into(),
                "check the path".to_string(),
            ),
            PermissionDenied => (
                DeviceErrorKind::Denied,
                "permission denied".into(),
                "run as root or its owner, or change its owner or mode".into(),
            ),
            ReadOnlyFilesystem => (
                DeviceErrorKind::Denied,
                "it is read-only".into(),
                "remount the file system for writing, or make the device writable".into(),
            ),
            ResourceBusy | ExecutableFileBusy => (
                DeviceErrorKind::InUse,
                "another program has it open exclusively".into(),
                "unmount it, or stop that program".into(),
            ),
            IsADirectory => (
                DeviceErrorKind::NotADisk,
                "it is a directory".into(),
                "give a file or a block device".into(),
            ),
            Unsupported => (
                DeviceErrorKind::Unsupported,
                error.to_string(),
                "use another file system or a newer kernel".into(),
            ),
            _ => (DeviceErrorKind::Failed, error.to_string(), "see the kernel's log (dmesg)".into()),
        };
        DeviceError { kind, doing, path: path.to_path_buf(), why, way_out, system: Some(error) }
    }

    /// The kind of error.
    pub fn kind(&self) -> DeviceErrorKind {
        self.kind
    }

    /// True if another program's use of the disk forbids it, rather than a failure: that may end soon.
    pub fn is_busy(&self) -> bool {
        self.kind == DeviceErrorKind::InUse
    }

    /// The process of dsync itself that has it open, if that is what forbids it.
    pub fn dsync_holder(&self) -> Option<&str> {
        let begins = self.why.find("(dsync").filter(|_| self.is_busy())?;
        self.why[begins + 1..].split(')').next()
    }
}

impl From<DeviceError> for io::Error {
    fn from(error: DeviceError) -> io::Error {
        let kind = match (&error.system, error.kind) {
            (Some(source), _) => source.kind(),
            (None, DeviceErrorKind::Missing) => io::ErrorKind::NotFound,
            (None, DeviceErrorKind::Denied) => io::ErrorKind::PermissionDenied,
            (None, DeviceErrorKind::NotADisk) => io::ErrorKind::InvalidInput,
            (None, DeviceErrorKind::InUse) => io::ErrorKind::ResourceBusy,
            (None, DeviceErrorKind::Unsupported) => io::ErrorKind::Unsupported,
            (None, DeviceErrorKind::Failed) => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

/// A request that failed: keeps the kind of the system's error, which callers match on, and adds the place.
#[derive(Debug, thiserror::Error)]
#[error("{}: {doing} of {len} bytes at byte {offset}: {source}", path.display())]
struct Fault {
    path: PathBuf,
    doing: &'static str,
    offset: u64,
    len: u64,
    source: io::Error,
}

/// Bytes that the medium cannot read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read at byte {offset}: {source}")]
struct Unreadable {
    offset: u64,
    source: io::Error,
}

/// Adds the first unreadable byte to the error of a read.
pub fn unreadable(offset: u64, source: io::Error) -> io::Error {
    io::Error::new(source.kind(), Unreadable { offset, source })
}

/// True if a read failed because of the medium, and not for any other reason: other parts of the disk
/// may be readable.
pub fn is_unreadable(error: &io::Error) -> bool {
    let inner = error.get_ref();
    if let Some(unreadable) = inner.and_then(|e| e.downcast_ref::<Unreadable>()) {
        return is_unreadable(&unreadable.source);
    }
    let fault = inner.and_then(|e| e.downcast_ref::<Fault>());
    let number = fault.map_or(error, |fault| &fault.source).raw_os_error();
    // Errors of drivers and file systems for a bad sector or a wrong checksum.
    matches!(
        number,
        Some(libc::EIO | libc::EREMOTEIO | libc::ENODATA | libc::EILSEQ | libc::EBADMSG | libc::EUCLEAN)
    )
}

/// Names the disk and the place in a failed request's error.
pub(crate) fn at(path: &Path, doing: &'static str, offset: u64, len: u64, source: io::Error) -> io::Error {
    io::Error::new(source.kind(), Fault { path: path.to_path_buf(), doing, offset, len, source })
}

/// Refuses a range that is not within a disk of `size` bytes.
pub(crate) fn within(path: &Path, doing: &'static str, offset: u64, len: u64, size: u64) -> io::Result<()> {
    if offset.checked_add(len).is_some_and(|end| end <= size) {
        return Ok(());
    }
    let kind = if doing == "read" { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::InvalidInput };
    let path = path.display();
    Err(io::Error::new(
        kind,
        format!(
            "{path}: {doing} of {len} bytes at byte {offset} is beyond the end of the disk at byte {size}"
        ),
    ))
}
