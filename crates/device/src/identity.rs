//! The identity of files and devices.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rustix::fs::{SeekFrom, StatFs};
use serde::{Deserialize, Serialize};

use crate::error::{DeviceError, DeviceErrorKind};

/// What statfs(2) says of an overlay of file systems.
const OVERLAYFS: i64 = 0x794c_7630;

/// What it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskKind {
    /// A regular file.
    File,
    /// A block device.
    Block,
    /// An export of an NBD server.
    Export,
}

/// What a path leads to, and its state. Equal identities mean that nothing was changed, as far as the system shows:
/// for a file its times do, for a device nothing does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// File, block device or export.
    pub kind: DiskKind,
    /// The path without symbolic links.
    pub path: PathBuf,
    /// Of a file the number of the device it is on; of a block device its own number.
    pub dev: u64,
    /// Inode of a file; 0 for a block device; of an export a hash of its URI.
    pub ino: u64,
    /// Of a block device: a number that the kernel gives to each medium once in its life (Linux 5.15).
    pub diskseq: Option<u64>,
    /// Of a loop device: the part of its file that it shows, as offset and limit. Both may change while it is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<[u64; 2]>,
    /// Bytes.
    pub size: u64,
    /// Last change of a file's content, nanoseconds since 1970; 0 for a block device.
    pub mtime_ns: i64,
    /// Last change of a file's inode or content, nanoseconds since 1970; 0 for a block device.
    pub ctime_ns: i64,
    /// When a file was made, nanoseconds since 1970; `None` where its file system does not tell. An inode may be that of a file that is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub born_ns: Option<i64>,
}

impl Identity {
    /// True if both are the same file or device, whatever has happened to it since.
    pub fn same_object(&self, other: &Identity) -> bool {
        (self.kind, self.dev, self.ino, self.diskseq) == (other.kind, other.dev, other.ino, other.diskseq)
            && self.same_birth(other).unwrap_or(true)
            && self.part.zip(other.part).is_none_or(|(this, other)| this == other)
    }

    /// True if both files were made at one time, false if they were not; `None` where that is not known.
    pub fn same_birth(&self, other: &Identity) -> Option<bool> {
        self.born_ns.zip(other.born_ns).map(|(this, other)| this == other)
    }

    /// True for a block device.
    pub fn is_block(&self) -> bool {
        self.kind == DiskKind::Block
    }
}

/// The identity of the file or block device at `path`. Symbolic links are followed.
pub fn identity(path: &Path) -> Result<Identity, DeviceError> {
    let fail = |e: io::Error| DeviceError::from_io("look at", path, e);
    let canonical = std::fs::canonicalize(path).map_err(fail)?;
    let metadata = std::fs::metadata(&canonical).map_err(fail)?;
    let kind = metadata.file_type();
    if kind.is_file() {
        return Ok(of_file(canonical, &metadata));
    }
    if !kind.is_block_device() {
        let (why, way_out) = if kind.is_dir() {
            ("it is a directory", "give the path of a file or a block device")
        } else {
            ("it is neither a file nor a block device", "give a file or a block device")
        };
        return Err(DeviceError::new(DeviceErrorKind::NotADisk, "look at", path, why, way_out));
    }
    let device = metadata.rdev();
    Ok(Identity {
        kind: DiskKind::Block,
        size: block_size(&canonical, device).map_err(fail)?,
        path: canonical,
        dev: device,
        ino: 0,
        diskseq: diskseq(device),
        part: part_of_file(device),
        mtime_ns: 0,
        ctime_ns: 0,
        born_ns: None,
    })
}

fn of_file(path: PathBuf, metadata: &Metadata) -> Identity {
    let nanoseconds = |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
    let born_ns = born_ns(metadata, || rustix::fs::statfs(&path));
    Identity {
        kind: DiskKind::File,
        path,
        dev: metadata.dev(),
        ino: metadata.ino(),
        diskseq: None,
        part: None,
        size: metadata.len(),
        mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
        ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        born_ns,
    }
}

/// When a file was made, in nanoseconds since 1970. `None` where its file system does not say so, or may make another file of it.
pub(crate) fn born_ns(
    metadata: &Metadata,
    file_system: impl FnOnce() -> rustix::io::Result<StatFs>,
) -> Option<i64> {
    let born = metadata.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
    // On an overlay the first opening for writing makes another file, with the inode of the former.
    let lasts = || file_system().is_ok_and(|found| found.f_type & 0xffff_ffff != OVERLAYFS);
    if born.is_zero() || !lasts() { None } else { i64::try_from(born.as_nanos()).ok() }
}

/// The identity of an open file that was found at `path`, whatever that leads to by now.
///
/// # Errors
/// `InvalidInput` for anything but a regular file; if it cannot be looked at.
pub fn identity_of(file: &File, path: &Path) -> io::Result<Identity> {
    let metadata = file.metadata()?;
    match metadata.is_file() {
        true => Ok(of_file(path.to_path_buf(), &metadata)),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file")),
    }
}

/// The folder of a block device in sysfs.
pub(crate) fn sysfs(device: u64) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device)))
}

/// From sysfs, which everyone may read; otherwise by opening the device.
fn block_size(path: &Path, device: u64) -> io::Result<u64> {
    let sectors =
        std::fs::read_to_string(sysfs(device).join("size")).ok().and_then(|s| s.trim().parse::<u64>().ok());
    match sectors {
        // The kernel counts in sectors of 512 bytes there, whatever the device's own are.
        Some(sectors) => Ok(sectors.saturating_mul(512)),
        None => Ok(rustix::fs::seek(std::fs::File::open(path)?, SeekFrom::End(0))?),
    }
}

/// A partition has its disk's.
pub(crate) fn diskseq(device: u64) -> Option<u64> {
    let place = std::fs::canonicalize(sysfs(device)).ok()?;
    let read = |place: &Path| std::fs::read_to_string(place.join("diskseq")).ok();
    read(&place).or_else(|| read(place.parent()?))?.trim().parse().ok()
}

/// A partition has its disk's.
fn part_of_file(device: u64) -> Option<[u64; 2]> {
    let place = std::fs::canonicalize(sysfs(device)).ok()?;
    let disk = if place.join("partition").exists() { place.parent()? } else { &place };
    let read = |name: &str| std::fs::read_to_string(disk.join("loop").join(name)).ok()?.trim().parse().ok();
    Some([read("offset")?, read("sizelimit")?])
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_write_and_a_replacement_show() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [1; 5000]).unwrap();
        let first = identity(&path).unwrap();
        assert_eq!((first.kind, first.size), (DiskKind::File, 5000));
        assert_eq!(identity(&path).unwrap(), first);
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::File::options().write(true).open(&path).unwrap().write_at(b"x", 7).unwrap();
        let second = identity(&path).unwrap();
        assert!(second.same_object(&first) && second != first);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(identity(&link).unwrap(), second);
        std::fs::write(folder.path().join("other"), [1; 5000]).unwrap();
        std::fs::rename(folder.path().join("other"), &path).unwrap();
        assert!(!identity(&path).unwrap().same_object(&first));
    }

    #[test]
    fn what_is_no_disk_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let error = identity(folder.path()).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::NotADisk);
        assert!(error.to_string().contains(&folder.path().display().to_string()), "{error}");
        let error = identity(&folder.path().join("missing")).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::Missing);
    }
}
