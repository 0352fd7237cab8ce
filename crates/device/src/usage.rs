//! Who else uses a file or a block device, and how much room there is.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::DeviceError;
use crate::identity::sysfs;

/// Says who uses the file or block device at `path`, or a partition of it, or the disk it is a partition of, in a way that
/// forbids writing to it: `mounted on /srv`, `held by vg-root`, `the backing of /dev/loop3`. `None` if nobody is seen.
///
/// Nobody seen is no promise: open with `exclusive` to have one for a block device, and take
/// [`lock_image`](crate::lock_image) for a file.
pub fn in_use(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok()?;
    if !metadata.file_type().is_block_device() {
        return swapped_on(|m| (m.dev(), m.ino()) == (metadata.dev(), metadata.ino()))
            .or_else(|| loop_over(|m| (m.dev(), m.ino()) == (metadata.dev(), metadata.ino())));
    }
    let devices = related(metadata.rdev());
    let is_one = |m: &std::fs::Metadata| m.file_type().is_block_device() && devices.contains(&m.rdev());
    mounted(&devices)
        .or_else(|| swapped_on(is_one))
        .or_else(|| held(&devices))
        .or_else(|| loop_over(is_one))
        .or_else(|| opened_exclusively(path))
}

/// Bytes that an ordinary user may still write to the file system that holds `path`.
pub fn free_space(path: &Path) -> Result<u64, DeviceError> {
    match rustix::fs::statvfs(path) {
        Ok(status) => Ok(status.f_bavail.saturating_mul(status.f_frsize)),
        Err(e) => Err(DeviceError::from_io("look at", path, e.into())),
    }
}

/// The device, its partitions, and the disk it is a partition of.
fn related(device: u64) -> Vec<u64> {
    let mut devices = vec![device];
    let Ok(place) = std::fs::canonicalize(sysfs(device)) else { return devices };
    if place.join("partition").exists() {
        devices.extend(place.parent().and_then(device_number));
    } else {
        let entries = std::fs::read_dir(&place).into_iter().flatten().flatten();
        devices.extend(
            entries.filter(|e| e.path().join("partition").exists()).filter_map(|e| device_number(&e.path())),
        );
    }
    devices
}

fn device_number(place: &Path) -> Option<u64> {
    parse_number(std::fs::read_to_string(place.join("dev")).ok()?.trim())
}

fn parse_number(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn mounted(devices: &[u64]) -> Option<String> {
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    table.split(|b| *b == b'\n').find_map(|line| {
        let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
        let number = parse_number(std::str::from_utf8(fields.get(2)?).ok()?)?;
        let place = unescape(fields.get(4)?);
        // Btrfs shows a number of its own there: its source says which device it lies on.
        let separator = fields.iter().position(|f| *f == b"-")?;
        let source = fields.get(separator + 2).map(|f| unescape(f));
        let by_source = || {
            let metadata = source.filter(|s| s.is_absolute()).and_then(|s| std::fs::metadata(s).ok());
            metadata.is_some_and(|m| m.file_type().is_block_device() && devices.contains(&m.rdev()))
        };
        (devices.contains(&number) || by_source()).then(|| format!("mounted on {}", place.display()))
    })
}

fn swapped_on(is_it: impl Fn(&std::fs::Metadata) -> bool) -> Option<String> {
    let table = std::fs::read("/proc/swaps").ok()?;
    table.split(|b| *b == b'\n').skip(1).find_map(|line| {
        let path = unescape(line.split(|b| b.is_ascii_whitespace()).next().filter(|p| !p.is_empty())?);
        is_it(&std::fs::metadata(path).ok()?).then(|| "used as swap space".to_string())
    })
}

fn held(devices: &[u64]) -> Option<String> {
    devices.iter().find_map(|device| {
        let holder = std::fs::read_dir(sysfs(*device).join("holders")).ok()?.flatten().next()?;
        let name = std::fs::read_to_string(holder.path().join("dm/name"));
        let name = name.unwrap_or_else(|_| holder.file_name().to_string_lossy().into_owned());
        Some(format!("held by {}", name.trim()))
    })
}

fn loop_over(is_it: impl Fn(&std::fs::Metadata) -> bool) -> Option<String> {
    std::fs::read_dir("/sys/block").ok()?.flatten().find_map(|entry| {
        let mut backing = std::fs::read(entry.path().join("loop/backing_file")).ok()?;
        while backing.last() == Some(&b'\n') {
            backing.pop();
        }
        let metadata = std::fs::metadata(PathBuf::from(OsString::from_vec(backing))).ok()?;
        is_it(&metadata).then(|| format!("the backing of /dev/{}", entry.file_name().to_string_lossy()))
    })
}

fn opened_exclusively(path: &Path) -> Option<String> {
    let error =
        OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK).open(path).err()?;
    if error.raw_os_error() != Some(libc::EBUSY) {
        return None;
    }
    let who = File::open(path).ok().and_then(|file| openers(&file));
    Some(who.map_or("opened exclusively by another program".to_string(), |who| format!("opened by {who}")))
}

/// The programs that have the same file or device open, as far as we may see. Slow: for messages only.
pub(crate) fn openers(file: &File) -> Option<String> {
    let wanted = file.metadata().ok()?;
    let same = |m: &std::fs::Metadata| {
        if wanted.file_type().is_block_device() {
            m.file_type().is_block_device() && m.rdev() == wanted.rdev()
        } else {
            (m.dev(), m.ino()) == (wanted.dev(), wanted.ino())
        }
    };
    let ours = std::process::id();
    let mut found = Vec::new();
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let descriptors = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        // Through the link, so the file itself, wherever its path leads by now. Our own descriptor is one of ours.
        let count = descriptors.filter(|d| std::fs::metadata(d.path()).is_ok_and(|m| same(&m))).count();
        if count > usize::from(pid == ours) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            found.push(format!("{}, pid {pid}", name.trim()));
        }
    }
    (!found.is_empty()).then(|| found.join("; "))
}

/// The kernel's tables write blanks and the like as `\040`.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, others @ ..] = rest {
        let octal = others.get(..3).filter(|_| *first == b'\\').and_then(|d| std::str::from_utf8(d).ok());
        match octal.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &others[3..];
            }
            None => {
                bytes.push(*first);
                rest = others;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_in_the_kernels_tables() {
        assert_eq!(unescape(b"/a\\040b\\134c\\9"), PathBuf::from("/a b\\c\\9"));
    }

    #[test]
    fn the_root_file_systems_device_is_in_use() {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let device = table.lines().find_map(|l| {
            l.split(" - ")
                .nth(1)?
                .split(' ')
                .nth(1)
                .filter(|d| d.starts_with("/dev/") && Path::new(d).exists())
        });
        match device {
            Some(device) => {
                let said = in_use(Path::new(device)).unwrap();
                assert!(said.starts_with("mounted on /"), "{said}");
            }
            None => println!("skipped: no mounted block device is visible here"),
        }
    }

    #[test]
    fn an_ordinary_file_is_free_and_there_is_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, b"x").unwrap();
        assert_eq!(in_use(&path), None);
        assert!(free_space(folder.path()).unwrap() > 0);
        assert!(free_space(&folder.path().join("missing")).is_err());
    }
}
