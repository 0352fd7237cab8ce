//! The tracked block device: a whole disk, or one partition of it.

use std::path::{Path, PathBuf};

use device::Identity;

use crate::TrackError;

/// A block device as the kernel counts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BlockDevice {
    /// Its path without links.
    pub path: PathBuf,
    /// Its number, as `major:minor`.
    pub number: String,
    /// The disk's diskseq, which the kernel gives to no other disk.
    pub diskseq: u64,
    /// Where it begins on the disk, in sectors of 512 bytes.
    pub first_sector: u64,
    /// Bytes.
    pub size: u64,
    /// Of a loop device: the part of its file.
    pub part: Option<[u64; 2]>,
    /// Its folder in sysfs.
    pub sysfs: PathBuf,
}

impl BlockDevice {
    /// Looks at the block device at `path`.
    pub(super) fn at(path: &Path) -> Result<BlockDevice, TrackError> {
        let identity = device::identity(path)?;
        if !identity.is_block() {
            return Err(TrackError::Unable(format!(
                "{} is not a block device: for a file use \"dsync serve\"",
                path.display()
            )));
        }
        Self::of(&identity)
    }

    /// Looks at the block device of this identity.
    pub(super) fn of(identity: &Identity) -> Result<BlockDevice, TrackError> {
        let number = format!("{}:{}", libc::major(identity.dev), libc::minor(identity.dev));
        let sysfs = PathBuf::from("/sys/dev/block").join(&number);
        let Some(diskseq) = identity.diskseq else {
            return Err(TrackError::Unable(format!(
                "the kernel gives {} no diskseq (Linux 5.15): use \"dsync sync --method compare\"",
                identity.path.display()
            )));
        };
        Ok(BlockDevice {
            path: identity.path.clone(),
            number,
            diskseq,
            // A whole disk has no `start`.
            first_sector: read_number(&sysfs.join("start")).unwrap_or(0),
            size: identity.size,
            part: identity.part,
            sysfs,
        })
    }

    /// The folder of the whole disk in sysfs.
    pub(super) fn whole_disk(&self) -> PathBuf {
        let place = std::fs::canonicalize(&self.sysfs).unwrap_or_else(|_| self.sysfs.clone());
        match place.parent() {
            Some(disk) if place.join("partition").exists() => disk.to_path_buf(),
            _ => place,
        }
    }

    /// The file behind a loop device, or a partition of one; empty if it is detached. `None` for any other disk.
    pub(super) fn backing_file(&self) -> Option<String> {
        let disk = self.whole_disk();
        let is_loop = disk.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"loop"));
        let file = || std::fs::read_to_string(disk.join("loop/backing_file")).unwrap_or_default();
        is_loop.then(|| file().trim_end().to_owned())
    }

    /// True for zoned disks, whose zones change by operations of their own.
    pub(super) fn is_zoned(&self) -> bool {
        std::fs::read_to_string(self.whole_disk().join("queue/zoned")).is_ok_and(|z| z.trim() != "none")
    }
}

/// Reads a file that holds one number.
pub(super) fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The path that the kernel gives to the block device of a number, as `major:minor`.
pub(super) fn path_of(number: &str) -> Option<PathBuf> {
    let said = std::fs::read_to_string(Path::new("/sys/dev/block").join(number).join("uevent")).ok()?;
    let name = said.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    Some(Path::new("/dev").join(name))
}
