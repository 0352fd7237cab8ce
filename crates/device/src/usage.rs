//! Other users of a file or a block device, and free space.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::DeviceError;
use crate::identity::sysfs;

/// Says who uses the file or block device at `path`, or a partition of it, or the disk it is a partition of, in a way that
/// forbids writing to it: `mounted on /srv`, `held by vg-root`, `the backing of /dev/loop3`. `None` if no user is known.
///
/// `None` is not a guarantee: open a block device with `exclusive` for one, and take
/// [`lock_image`](crate::lock_image) for a file.
pub fn in_use(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok()?;
    if !metadata.file_type().is_block_device() {
        return swapped_on(|m| (m.dev(), m.ino()) == (metadata.dev(), metadata.ino()))
            .or_else(|| loop_over(|m| (m.dev(), m.ino()) == (metadata.dev(), metadata.ino())));
    }
    let devices = related(metadata.rdev());
    let is_one = |m: &std::fs::Metadata| m.file_type().is_block_device() && devices.contains(&m.rdev());
    mounted(&devices, |_| true)
        .or_else(|| swapped_on(is_one))
        .or_else(|| held(&devices))
        .or_else(|| loop_over(is_one))
        .or_else(|| opened_exclusively(path))
}

/// What may write to the block device at `path` while it is read: what [`in_use`] finds, but of file systems only
/// those that are mounted for writing. `None` for a file, whose times show writes.
pub fn may_change(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok()?;
    if !metadata.file_type().is_block_device() || is_read_only(metadata.rdev()) {
        return None;
    }
    let devices = related(metadata.rdev());
    mounted(&devices, |mount| !mount.read_only)
        .or_else(|| swapped_on(|m| m.file_type().is_block_device() && devices.contains(&m.rdev())))
        .or_else(|| held(&devices))
}

/// True if a block device is read-only.
pub(crate) fn is_read_only(device: u64) -> bool {
    std::fs::read_to_string(sysfs(device).join("ro")).is_ok_and(|text| text.trim() == "1")
}

/// Drops what the system keeps in memory of a block device's content: a file system on it is written to past that, so who reads the device
/// through it would read what was there before. What others use stays.
///
/// # Errors
/// If the device cannot be opened.
pub fn drop_cached(path: &Path) -> Result<(), DeviceError> {
    let file = std::fs::File::open(path).map_err(|e| DeviceError::from_io("open", path, e))?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
        .map_err(|e| DeviceError::from_io("drop what is cached of", path, e.into()))
}

/// Bytes that an ordinary user may still write to the file system that holds `path`.
pub fn free_space(path: &Path) -> Result<u64, DeviceError> {
    match rustix::fs::statvfs(path) {
        Ok(status) => Ok(status.f_bavail.saturating_mul(status.f_frsize)),
        Err(e) => Err(DeviceError::from_io("look at", path, e.into())),
    }
}

/// A program that has the block device at `path`, a partition of it or the disk that it is a partition of open for writing, as far as we
/// may see. [`in_use`] shows such a program only if it opened the device exclusively.
pub fn opened_for_writing(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok().filter(|m| m.file_type().is_block_device())?;
    let devices = related(metadata.rdev());
    // The link to a descriptor may be written to if the descriptor may.
    let writes = |link: &Path| std::fs::symlink_metadata(link).is_ok_and(|m| m.mode() & 0o200 != 0);
    let is_one = |m: &std::fs::Metadata| m.file_type().is_block_device() && devices.contains(&m.rdev());
    let within = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    within(Path::new("/proc")).find_map(|process| {
        let found = within(&process.join("fd"))
            .any(|fd| std::fs::metadata(&fd).is_ok_and(|m| is_one(&m)) && writes(&fd));
        let name = || std::fs::read_to_string(process.join("comm")).unwrap_or_default();
        let pid = process.file_name().filter(|_| found)?.display().to_string();
        Some(format!("opened for writing by {}, pid {pid}", name().trim()))
    })
}

/// The device, its partitions, and the disk it is a partition of.
fn related(device: u64) -> Vec<u64> {
    let mut devices = partitions(device);
    if let Some(place) = std::fs::canonicalize(sysfs(device)).ok().filter(|p| p.join("partition").exists()) {
        devices.extend(place.parent().and_then(device_number));
    }
    devices
}

pub(crate) fn device_number(place: &Path) -> Option<u64> {
    parse_number(std::fs::read_to_string(place.join("dev")).ok()?.trim())
}

fn parse_number(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The block device that a file system is on, by the device number of its files.
pub(crate) fn file_system_device(number: u64) -> Option<u64> {
    if sysfs(number).exists() {
        return Some(number);
    }
    // Btrfs shows a number of its own.
    let mount = mount_table().ok()?.into_iter().find(|mount| mount.dev == number)?;
    let device = std::fs::metadata(mount.source.filter(|source| source.is_absolute())?).ok()?;
    device.file_type().is_block_device().then(|| device.rdev())
}

/// A file system that is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Where, in the order of the kernel's table; at least one place. Another file system may be mounted over it.
    pub places: Vec<PathBuf>,
    /// The number by which the table names it: one for each file system. See [`file_system`].
    pub dev: u64,
}

/// The number by which the kernel's table of mounts names the file system of an open file: `st_dev`, except on Btrfs, where
/// that tells subvolumes apart.
pub fn file_system(file: &File) -> std::io::Result<u64> {
    let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let id = about.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    // An open file keeps its file system mounted, so its number is not reused before the table is read.
    let mount = mount_table()?.into_iter().find(|mount| Some(mount.id) == id);
    mount.map(|mount| mount.dev).ok_or_else(|| std::io::Error::other("it is not in the table of mounts"))
}

/// The file systems on the block device at `path`: on itself, on its partitions, and on what holds these, as
/// device-mapper and md devices do.
///
/// # Errors
/// If the device or the table of mounts cannot be read.
pub fn mounts_on(path: &Path) -> Result<Vec<Mount>, DeviceError> {
    let fail = |e| DeviceError::from_io("look at", path, e);
    let metadata = std::fs::metadata(path).map_err(fail)?;
    if !metadata.file_type().is_block_device() {
        return Ok(Vec::new());
    }
    let devices = lying_on(metadata.rdev());
    let mut found: Vec<Mount> = Vec::new();
    for mount in mount_table().map_err(fail)? {
        if !mount.is_on(&devices) {
            continue;
        }
        match found.iter_mut().find(|m| m.dev == mount.dev) {
            Some(known) => known.places.push(mount.place),
            None => found.push(Mount { places: vec![mount.place], dev: mount.dev }),
        }
    }
    Ok(found)
}

/// Says where a file system on the block device at `path`, as [`mounts_on`] looks for them, is mounted for writing without
/// being in this process's table of mounts: in the mount namespace of another process, or where only the kernel still has it.
pub fn hidden_mount(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok()?;
    let seen = mount_table().ok()?;
    let is_seen = |device: &u64| seen.iter().any(|mount| mount.is_on(&[*device]));
    let mut devices = lying_on(metadata.rdev());
    devices.retain(|device| metadata.file_type().is_block_device() && !is_seen(device));
    // Most paths are files: the processes of the host are not asked for them.
    if devices.is_empty() {
        return None;
    }
    let mut spaces: Vec<PathBuf> = std::fs::read_link("/proc/self/ns/mnt").into_iter().collect();
    for process in std::fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path()) {
        let Ok(space) = std::fs::read_link(process.join("ns/mnt")) else { continue };
        if spaces.contains(&space) {
            continue;
        }
        spaces.push(space);
        for mount in mounts_listed(&process.join("mountinfo")).unwrap_or_default() {
            if mount.is_on(&devices) && !mount.read_only {
                let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
                let pid = process.file_name().unwrap_or_default().display();
                let place = mount.place.display();
                return Some(format!(
                    "mounted on {place} in the mount namespace of {}, pid {pid}",
                    name.trim()
                ));
            }
            devices.retain(|device| !mount.is_on(&[*device]));
        }
    }
    // A lazy unmount, or a namespace without a process.
    let used = devices.into_iter().find_map(|device| {
        let place = std::fs::canonicalize(sysfs(device)).ok()?;
        let name = place.file_name()?;
        let has_it = |kind: &&str| Path::new("/sys/fs").join(kind).join(name).exists();
        let used = ["ext4", "xfs", "f2fs"].iter().any(has_it) || of_btrfs(device).is_some();
        used.then(|| name.display().to_string())
    });
    used.map(|name| format!("mounted, as {name}, where no process shows it"))
}

/// A block device, its partitions, and what holds these, with its partitions.
fn lying_on(device: u64) -> Vec<u64> {
    let mut devices = partitions(device);
    let mut at = 0;
    while let Some(&device) = devices.get(at) {
        for above in holders(device).flat_map(partitions) {
            if !devices.contains(&above) {
                devices.push(above);
            }
        }
        at += 1;
    }
    devices
}

/// A block device and its partitions.
fn partitions(device: u64) -> Vec<u64> {
    let entries = std::fs::read_dir(sysfs(device)).into_iter().flatten().flatten();
    let below =
        entries.filter(|e| e.path().join("partition").exists()).filter_map(|e| device_number(&e.path()));
    std::iter::once(device).chain(below).collect()
}

/// The devices that hold a block device.
fn holders(device: u64) -> impl Iterator<Item = u64> {
    let entries = std::fs::read_dir(sysfs(device).join("holders")).into_iter().flatten().flatten();
    entries.filter_map(|e| device_number(&e.path()))
}

/// The devices of the Btrfs that has this one, or this one alone.
pub(crate) fn members(device: u64) -> Vec<u64> {
    of_btrfs(device).unwrap_or_else(|| vec![device])
}

/// The devices of the mounted Btrfs that has this one, if one does.
fn of_btrfs(device: u64) -> Option<Vec<u64>> {
    let within = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    within(Path::new("/sys/fs/btrfs"))
        .map(|one| within(&one.join("devices")).filter_map(|device| device_number(&device)).collect())
        .find(|devices: &Vec<u64>| devices.contains(&device))
}

/// A line of the kernel's table.
struct Mounted {
    id: u64,
    place: PathBuf,
    dev: u64,
    source: Option<PathBuf>,
    /// Nothing can be written through any of its mounts.
    read_only: bool,
}

impl Mounted {
    fn is_on(&self, devices: &[u64]) -> bool {
        // Btrfs shows a number of its own: its source says which device it lies on, or one of them.
        let by_source = || {
            let metadata =
                self.source.as_ref().filter(|s| s.is_absolute()).and_then(|s| std::fs::metadata(s).ok());
            metadata.is_some_and(|m| {
                let is_on = |member: &u64| devices.contains(member);
                m.file_type().is_block_device() && members(m.rdev()).iter().any(is_on)
            })
        };
        devices.contains(&self.dev) || by_source()
    }
}

fn mount_table() -> std::io::Result<Vec<Mounted>> {
    mounts_listed(Path::new("/proc/self/mountinfo"))
}

fn mounts_listed(path: &Path) -> std::io::Result<Vec<Mounted>> {
    let table = std::fs::read(path)?;
    let line = |line: &[u8]| {
        let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
        let id = std::str::from_utf8(fields.first()?).ok()?.parse().ok()?;
        let dev = parse_number(std::str::from_utf8(fields.get(2)?).ok()?)?;
        let place = unescape(fields.get(4)?);
        let separator = fields.iter().position(|f| *f == b"-")?;
        let read_only =
            fields.get(separator + 3).is_some_and(|o| o.split(|b| *b == b',').any(|option| option == b"ro"));
        Some(Mounted { id, place, dev, source: fields.get(separator + 2).map(|f| unescape(f)), read_only })
    };
    Ok(table.split(|b| *b == b'\n').filter_map(line).collect())
}

/// The block device whose file system is mounted at a folder. `None` for other folders, and where the kernel names none.
pub fn mounted_at(folder: &Path) -> Option<PathBuf> {
    let last = mount_table().ok()?.into_iter().rev().find(|mount| mount.place == folder)?;
    last.source.filter(|source| std::fs::metadata(source).is_ok_and(|m| m.file_type().is_block_device()))
}

fn mounted(devices: &[u64], counts: impl Fn(&Mounted) -> bool) -> Option<String> {
    let mount = mount_table().ok()?.into_iter().find(|m| m.is_on(devices) && counts(m))?;
    Some(format!("mounted on {}", mount.place.display()))
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

/// How long a killed process may take to let go of a device: the kernel closes the files of its io_uring after it is gone.
const LETS_GO: Duration = Duration::from_secs(2);

fn opened_exclusively(path: &Path) -> Option<String> {
    let until = Instant::now() + LETS_GO;
    loop {
        let error =
            OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK).open(path).err()?;
        if error.raw_os_error() != Some(libc::EBUSY) {
            return None;
        }
        if let Some(who) = File::open(path).ok().and_then(|file| openers(&file)) {
            return Some(format!("opened by {who}"));
        }
        if Instant::now() >= until {
            return Some("opened exclusively by another program".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The programs that have the same file or device open, as far as we may see; this one only if there is no other. Slow: for messages only.
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
    let (mut found, mut own) = (Vec::new(), None);
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let descriptors = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        // Through the link, so the file itself, wherever its path leads by now. Our own descriptor is one of ours.
        let count = descriptors.filter(|d| std::fs::metadata(d.path()).is_ok_and(|m| same(&m))).count();
        if count > usize::from(pid == ours) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            let name = format!("{}, pid {pid}", name.trim());
            if pid == ours { own = Some(name) } else { found.push(name) }
        }
    }
    if found.is_empty() { own } else { Some(found.join("; ")) }
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
            None => testing::beyond("the root file system in use", "no mounted block device is visible here"),
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
