//! What a disk is stored on: the file behind a loop device, the disk of a partition, the disks under a mapped device, the device of
//! a file's file system. Two paths may lead to one storage in many ways; along these chains they meet.
//!
//! The source tells the replica's side what it is stored on. If both sides run under one kernel and these chains share bytes, or one end
//! is stored on the other, the destination is refused. Not detected: two device-mapper or md devices over the same part of one disk, and
//! a loop device whose file has no name here any more.

use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::identity::{diskseq, sysfs};
use crate::usage::{device_number, file_system_device, members};

/// The most layers that are followed.
const MOST: usize = 64;

/// What a file or block device is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Storage {
    /// The boot in which the numbers are valid.
    boot: String,
    /// The file or device itself first, then what it is stored on.
    layers: Vec<Layer>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Layer {
    what: Object,
    /// Which bytes of it are used; `None` if that is not known.
    range: Option<Range<u64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Object {
    /// By its file system's device number and its inode.
    File(u64, u64),
    /// By its number.
    Block(u64),
}

impl Storage {
    /// What the file or block device at `path` is stored on; for a missing file, its folder. `None` if that is
    /// not known.
    pub fn of(path: &Path) -> Option<Storage> {
        Storage::layered(path, true)
    }

    /// What is written when the file or block device at `path` is, without what the file system of a file is stored on: that sees an ordinary
    /// write of its own.
    pub fn of_bytes(path: &Path) -> Option<Storage> {
        Storage::layered(path, false)
    }

    fn layered(path: &Path, beneath_file_systems: bool) -> Option<Storage> {
        let found = std::fs::metadata(path).or_else(|_| {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            std::fs::metadata(parent.unwrap_or(Path::new(".")))
        });
        let found = found.ok()?;
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned();
        let mut layers = vec![if found.file_type().is_block_device() {
            Layer { what: Object::Block(found.rdev()), range: Some(0..u64::MAX) }
        } else {
            Layer { what: Object::File(found.dev(), found.ino()), range: Some(0..u64::MAX) }
        }];
        let mut at = 0;
        while let Some(layer) = layers.get(at).cloned().filter(|_| at < MOST) {
            let below = match layer.what {
                Object::File(file_system, _) if beneath_file_systems => on_file_system(file_system),
                Object::File(..) => Vec::new(),
                Object::Block(device) => below(&std::fs::canonicalize(sysfs(device)).ok()?, layer.range),
            };
            layers.extend(below);
            at += 1;
        }
        Some(Storage { boot, layers })
    }

    /// Both.
    pub fn with(mut self, other: Storage) -> Storage {
        self.layers.extend(other.layers);
        self
    }

    /// True if both share bytes, or one is stored on the other: writing to one changes the other.
    pub fn overlaps(&self, other: &Storage) -> bool {
        let shared = |a: &Layer, b: &Layer| match (&a.range, &b.range) {
            (Some(a), Some(b)) => a.start < b.end && b.start < a.end,
            // Which part of it is not known, only that it is not elsewhere.
            _ => self.layers.first() == Some(a) || other.layers.first() == Some(b),
        };
        let mut pairs = self.layers.iter().flat_map(|a| other.layers.iter().map(move |b| (a, b)));
        self.boot == other.boot && pairs.any(|(a, b)| a.what == b.what && shared(a, b))
    }
}

/// The file over which a loop device is; `None` of anything else.
fn loop_file(device: &Path) -> Option<PathBuf> {
    let found = std::fs::metadata(device).ok().filter(|found| found.file_type().is_block_device())?;
    let file = std::fs::read_to_string(sysfs(found.rdev()).join("loop/backing_file")).ok()?;
    Some(PathBuf::from(file.trim_end_matches('\n')))
}

/// What the device at `path` is all or a part of, the nearest first: the file of a loop device, the disk of a partition, and what these are of.
pub fn parts_of(path: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    while found.len() < MOST {
        let at = found.last().map_or(path, PathBuf::as_path);
        let Some(next) = loop_file(at).or_else(|| disk_of(at)) else { break };
        found.push(next);
    }
    found
}

/// The disk of a partition; `None` of anything else.
fn disk_of(device: &Path) -> Option<PathBuf> {
    let found = std::fs::metadata(device).ok().filter(|found| found.file_type().is_block_device())?;
    let place = std::fs::canonicalize(sysfs(found.rdev())).ok()?;
    // In sysfs a name has "!" where the node has a folder.
    let disk = place.parent()?.file_name()?.to_str()?.replace('!', "/");
    place.join("partition").exists().then(|| Path::new("/dev").join(disk))
}

/// The numbers (diskseq) of the disks on which the file or device at `path` is, outermost first, as far as each is on one
/// alone; of a Btrfs over several the numbers of all.
pub(crate) fn disks_beneath(path: &Path) -> Vec<u64> {
    let mut numbers = Vec::new();
    let Ok(found) = std::fs::metadata(path) else { return numbers };
    let mut at = match found.file_type().is_block_device() {
        true => vec![found.rdev()],
        false => file_system_device(found.dev()).map(members).unwrap_or_default(),
    };
    for _ in 0..MOST {
        let mut next: Vec<u64> = at.iter().filter_map(|device| diskseq(*device)).collect();
        next.sort_unstable();
        // A partition has its disk's.
        next.retain(|number| !numbers.contains(number));
        numbers.extend(next);
        let [device] = at[..] else { break };
        let Ok(place) = std::fs::canonicalize(sysfs(device)) else { break };
        at = match below(&place, None)[..] {
            [Layer { what: Object::Block(device), .. }] => vec![device],
            [Layer { what: Object::File(file_system, _), .. }] => {
                file_system_device(file_system).map(members).unwrap_or_default()
            }
            _ => break,
        };
    }
    numbers
}

fn on_file_system(number: u64) -> Vec<Layer> {
    let device = file_system_device(number);
    device.map(|device| Layer { what: Object::Block(device), range: None }).into_iter().collect()
}

/// What a device lies on, by its folder in sysfs.
fn below(place: &Path, range: Option<Range<u64>>) -> Vec<Layer> {
    let read = |name: &str| Some(std::fs::read_to_string(place.join(name)).ok()?.trim().to_owned());
    let number = |name: &str| read(name)?.parse::<u64>().ok();
    let size = number("size").unwrap_or(u64::MAX / 512).saturating_mul(512);
    let shifted = |by: u64| {
        let range = range.clone()?;
        Some(range.start.min(size).saturating_add(by)..range.end.min(size).saturating_add(by))
    };
    if let (Some(start), Some(disk)) = (number("start"), place.parent().and_then(device_number)) {
        let range = shifted(start.saturating_mul(512));
        return vec![Layer { what: Object::Block(disk), range }];
    }
    if let Some(file) = read("loop/backing_file").and_then(|path| std::fs::metadata(PathBuf::from(path)).ok())
    {
        let range = shifted(number("loop/offset").unwrap_or(0));
        let what = match file.file_type().is_block_device() {
            true => Object::Block(file.rdev()),
            false => Object::File(file.dev(), file.ino()),
        };
        return vec![Layer { what, range }];
    }
    let slaves = std::fs::read_dir(place.join("slaves")).into_iter().flatten().flatten();
    let devices = slaves.filter_map(|slave| device_number(&slave.path()));
    devices.map(|device| Layer { what: Object::Block(device), range: None }).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn one_file_under_several_names() {
        let temp = tempfile::tempdir().unwrap();
        let at = |name: &str| temp.path().join(name);
        for name in ["disk", "other"] {
            fs::write(at(name), [0; 4096]).unwrap();
        }
        fs::hard_link(at("disk"), at("linked")).unwrap();
        std::os::unix::fs::symlink(at("disk"), at("link")).unwrap();
        let of = |name: &str| Storage::of(&at(name)).unwrap();
        assert!(["disk", "linked", "link"].iter().all(|name| of(name).overlaps(&of("disk"))));
        assert!(!of("other").overlaps(&of("disk")) && !of("missing").overlaps(&of("disk")));
    }

    #[test]
    fn parts_overlap_where_they_share_bytes_or_one_lies_on_the_other() {
        let (disk, file) = (Object::Block(8), Object::File(1, 2));
        let storage = |layers: &[(Object, Option<Range<u64>>)]| Storage {
            boot: "a".into(),
            layers: layers.iter().cloned().map(|(what, range)| Layer { what, range }).collect(),
        };
        let whole = Some(0..u64::MAX);
        let of_disk = storage(&[(disk, whole.clone())]);
        let part =
            |n: u64| storage(&[(Object::Block(8 + n), whole.clone()), (disk, Some(n * 100..n * 100 + 100))]);
        let over =
            |n: u64| storage(&[(Object::Block(70 + n), whole.clone()), (file, Some(n * 100..n * 100 + 150))]);
        let on_disk = storage(&[(file, whole.clone()), (disk, None)]);
        let mapped = |n: u64| storage(&[(Object::Block(250 + n), whole.clone()), (disk, None)]);
        for (a, b, overlap) in [
            (&of_disk, &part(1), true),
            (&part(1), &part(2), false),
            (&part(1), &part(1), true),
            (&over(1), &over(2), true),
            (&over(1), &over(3), false),
            (&over(1), &on_disk, true),
            (&on_disk, &of_disk, true),
            (&on_disk, &part(1), false),
            (&mapped(1), &mapped(2), false),
            (&mapped(1), &mapped(1), true),
            (&mapped(1), &of_disk, true),
        ] {
            assert_eq!((a.overlaps(b), b.overlaps(a)), (overlap, overlap), "{a:?} {b:?}");
            assert!(!Storage { boot: "b".into(), ..a.clone() }.overlaps(b));
        }
    }
}
