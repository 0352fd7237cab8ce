//! Which disk a block device is, and whether it was written to: what the kernel, the hardware and the content say.
//!
//! A device has no times. Within one boot the kernel's count of sectors written reveals every write; after a reboot, or
//! where a disk was attached again, only what most users of a disk change does: the edges of the disk and of its partitions,
//! where superblocks and partition tables are.
//!
//! # Which disk
//!
//! Any disk may be attached under a device's name. So the state of its replica is kept under an identifier of the
//! disk (WWN and serial numbers, a device-mapper UUID or name, the file and part behind a loop device, a
//! partition's place on its disk; the kernel's name only if none of these is known), and disks that alternate under one name each have
//! their own. State that was kept under the kernel's name is moved when it is opened. The lineage records how the device was left:
//! - the kernel's count of sectors written and discarded, with the boot and the diskseq for which it is valid: within one boot it reveals
//!   every write through this device or its partitions, and for a partition also writes through its disk outside all partitions;
//! - hashes of the first and the last MiB of the disk and of each partition in its table, where superblocks and tables are, and of
//!   sixteen blocks in between: after a reboot, or if the disk was attached again, these reveal mounts.
//!
//! After a reboot the first command that opens the replica records the current count, which is valid from then on. A detected write by
//! another program is recorded in the lineage, and only a comparison removes it.
//!
//! Not detected after a reboot: a write that changed neither an edge nor one of the sixteen blocks, such as one into a logical volume or
//! an encrypted device within a partition; writes from other hosts; and writes beneath the device (to a loop device's file, or through
//! another map over the same disk). `verify` finds them. A disk without any identifier that was detached and attached again within one
//! boot must be compared.

pub(crate) mod clock;
pub(crate) mod storage;
pub(crate) mod written;

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Buf;
use crate::disk::Disk;
use crate::disk::table;
use crate::error::is_unreadable;
use crate::identity::{diskseq, sysfs};
use crate::medium::clock::Boot;
use crate::medium::written::{Counters, WriteCounts};

/// A block device at a moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Medium {
    /// The identifier of the disk, wherever it is attached ([`disk_id`]); `None` if it has none.
    pub id: Option<String>,
    /// The boot in which the next two are valid.
    pub boot: String,
    /// The diskseq of the medium.
    pub diskseq: Option<u64>,
    /// What was written to it by then; `None` where the kernel does not count.
    pub written: Option<WriteCounts>,
    /// Hashes of the edges of the disk and its partitions, in pieces; see [`Medium::differs`]. Empty if they were not
    /// read, of both that are compared.
    pub edges: String,
}

/// Characters of a piece's hash.
const HASH: usize = 8;
/// The hash of an unreadable piece.
pub const UNREADABLE: &str = "????????";
/// What of each end of a disk or partition counts as its edge, and the pieces that it is hashed in, in bytes.
const EDGE: u64 = 1 << 20;
const PIECE: u64 = 128 << 10;

/// The kernel's data on a block device, read often from files that are kept open.
#[derive(Debug)]
pub struct Gauge {
    id: Option<String>,
    boot: String,
    device: u64,
    counters: Option<Counters>,
}

impl Gauge {
    /// For the block device of this number, which is held open as long as this lives.
    pub fn of(device: u64) -> Gauge {
        Gauge { id: disk_id(device), boot: Boot::current().id, device, counters: Counters::of(device) }
    }

    /// What the kernel reports now, without the content.
    pub fn read(&self) -> Medium {
        Medium {
            id: self.id.clone(),
            boot: self.boot.clone(),
            diskseq: diskseq(self.device),
            written: self.counters.as_ref().and_then(Counters::read),
            edges: String::new(),
        }
    }
}

impl Medium {
    /// How the block device behind a gauge is now; `disk` is the device, flushed.
    ///
    /// # Errors
    /// If it cannot be read, for other reasons than bad sectors.
    pub fn of(gauge: &Gauge, disk: &dyn Disk) -> io::Result<Medium> {
        // The count first: a write meanwhile changes it by the next time.
        let said = gauge.read();
        Ok(Medium { edges: edges(disk)?, ..said })
    }

    /// What the kernel says of it, without its content.
    pub fn glance(&self) -> Medium {
        Medium { edges: String::new(), ..self.clone() }
    }

    /// The medium without so many of the sectors that were written since `before`.
    pub fn without(&self, before: &Medium, sectors: u64) -> Medium {
        let less = |now: WriteCounts, before: WriteCounts| {
            let since = now.sectors.saturating_sub(before.sectors);
            WriteCounts { sectors: now.sectors - since.min(sectors), ..now }
        };
        Medium {
            written: self.written.zip(before.written).map(|(now, before)| less(now, before)),
            ..self.clone()
        }
    }

    /// True if it is certain that nothing was written in between: the kernel has counted throughout.
    pub fn is_proof_of(&self, now: &Medium) -> bool {
        let one_life = !self.boot.is_empty() && (&self.boot, self.diskseq) == (&now.boot, now.diskseq);
        let counted = self.written.zip(now.written).is_some_and(|(before, now)| !before.has_moved(&now));
        one_life && self.diskseq.is_some() && counted
    }

    /// How a device shows that it is another one, or was written to since; `None` if nothing shows.
    pub fn differs(&self, now: &Medium) -> Option<MediumChange> {
        if let (Some(before), Some(now)) = (&self.id, &now.id) {
            if before != now {
                return Some(MediumChange::OtherDisk);
            }
        }
        let one_life = self.boot == now.boot && !self.boot.is_empty();
        if let (true, Some(before), Some(seq)) = (one_life, self.diskseq, now.diskseq) {
            if before != seq && (self.id.is_none() || now.id.is_none()) {
                return Some(MediumChange::Reattached);
            }
            let counts = self.written.zip(now.written);
            if before == seq && counts.is_some_and(|(before, now)| before.has_moved(&now)) {
                return Some(MediumChange::Written);
            }
        }
        let agree = agree(&self.edges, &now.edges);
        (!agree).then_some(MediumChange::Edges)
    }
}

/// How a device shows that it is another one, or was written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediumChange {
    /// Another disk has its name.
    OtherDisk,
    /// It may be another disk.
    Reattached,
    /// The kernel has counted writes.
    Written,
    /// What is at the edges of the disk or its partitions is not what it was.
    Edges,
}

impl fmt::Display for MediumChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MediumChange::OtherDisk => "another disk is attached under its name",
            MediumChange::Reattached => {
                "it was detached and attached again, and nothing shows that it is the same disk"
            }
            MediumChange::Written => "it was written to",
            MediumChange::Edges => {
                "its superblocks or partition table were changed: it was mounted or written to"
            }
        })
    }
}

/// True if two lists of hashes may be of the same content: none differs, and at least one agrees.
pub fn agree(before: &str, now: &str) -> bool {
    let (before, now): (Vec<_>, Vec<_>) = (hashes(before).collect(), hashes(now).collect());
    let told =
        || before.iter().zip(&now).filter(|(before, now)| **before != UNREADABLE && **now != UNREADABLE);
    before.len() == now.len()
        && told().all(|(before, now)| before == now)
        && (before.is_empty() || told().count() > 0)
}

/// The hashes of a list.
pub fn hashes(print: &str) -> impl Iterator<Item = &str> {
    print.as_bytes().chunks(HASH).map(|hash| std::str::from_utf8(hash).unwrap_or(UNREADABLE))
}

/// The hash of a part of a disk with these bytes, for [`agree`].
pub fn hash_of_bytes(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..HASH].to_owned()
}

/// The hash of a part of a disk, for [`agree`].
///
/// # Errors
/// As [`Medium::of`].
pub fn hash_of(disk: &dyn Disk, at: u64, buf: &mut [u8]) -> io::Result<String> {
    match disk.read_at(at, buf) {
        Ok(()) => Ok(hash_of_bytes(buf)),
        Err(error) if is_unreadable(&error) => Ok(UNREADABLE.to_owned()),
        Err(error) => Err(error),
    }
}

fn edges(disk: &dyn Disk) -> io::Result<String> {
    let len = disk.len();
    let mut hashes = String::new();
    let mut buf = Buf::new(PIECE as usize);
    // By the table as it is on the disk: the kernel may not have read it since it was written.
    for range in std::iter::once(0..len).chain(table::partitions(disk)?) {
        let edge = EDGE.min(range.end - range.start);
        for start in [range.start, range.end - edge] {
            let mut at = start;
            while at < start + edge {
                let piece = PIECE.min(start + edge - at);
                hashes.push_str(&hash_of(disk, at, &mut buf[..piece as usize])?);
                at += piece;
            }
        }
    }
    Ok(hashes)
}

/// The identifier of the disk behind the block device of this number, wherever it is attached and whatever it holds; fit for a file
/// name. `None` if it has none.
///
/// Of a disk its WWN or serial number, of a device-mapper device its UUID or name, of a loop device the file and the part of it
/// that is attached, of a partition its disk's and its place there.
pub fn disk_id(device: u64) -> Option<String> {
    let id = id_at(&std::fs::canonicalize(sysfs(device)).ok()?)?;
    let safe: String =
        id.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.:".contains(c) { c } else { '_' }).collect();
    // Add a hash, so that names that differ only in what was replaced or cut off stay different.
    if safe == id && safe.len() <= 120 {
        return Some(safe);
    }
    let cut: String = safe.chars().take(120).collect();
    Some(format!("{cut}-{}", &blake3::hash(id.as_bytes()).to_hex()[..HASH]))
}

/// An id that a device keeps, from its folder in sysfs.
fn id_at(place: &Path) -> Option<String> {
    let read = |name: &str| {
        let text = std::fs::read_to_string(place.join(name)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    if let Some(number) = read("partition") {
        return Some(format!("{}-part{number}-{}", id_at(place.parent()?)?, read("start")?));
    }
    if let Some(uuid) = read("dm/uuid") {
        return Some(format!("dm-uuid-{uuid}"));
    }
    if let Some(name) = read("dm/name") {
        return Some(format!("dm-name-{name}"));
    }
    if let Some(uuid) = read("md/uuid") {
        return Some(format!("md-{uuid}"));
    }
    if let Some(backing) = read("loop/backing_file") {
        let backing = PathBuf::from(backing);
        let file = std::fs::metadata(&backing).ok()?;
        let ino = file.ino();
        // FUSE has no identifier that lasts: there, that of this mount. Two of them may have files of the same number.
        let site = match rustix::fs::statvfs(&backing).ok()?.f_fsid {
            0 => file.dev(),
            lasting => lasting,
        };
        let (offset, limit) = (read("loop/offset")?, read("loop/sizelimit")?);
        return Some(format!("loop-{site:x}-{ino}-{offset}-{limit}"));
    }
    // Cheap bridges share their serial numbers: use everything available.
    let names = ["wwid", "device/wwid", "serial", "device/serial"].iter().filter_map(|name| read(name));
    let hardware = names.collect::<Vec<_>>().join("-");
    if !hardware.is_empty() {
        return Some(format!("disk-{hardware}"));
    }
    by_id(place.file_name()?.to_str()?)
}

/// The name that udev made for a disk from the hardware's answers.
fn by_id(kernel_name: &str) -> Option<String> {
    let device = Path::new("/dev").join(kernel_name);
    let mut names: Vec<String> = std::fs::read_dir("/dev/disk/by-id")
        .ok()?
        .flatten()
        .filter(|entry| std::fs::canonicalize(entry.path()).is_ok_and(|path| path == device))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names.into_iter().next().map(|name| format!("id-{name}"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::RamDisk;

    fn medium(disk: &RamDisk) -> Medium {
        let written = Some(WriteCounts::default());
        Medium {
            id: Some("a".into()),
            boot: "b".into(),
            diskseq: Some(7),
            written,
            edges: edges(disk).unwrap(),
        }
    }

    #[test]
    fn a_write_another_disk_and_a_partitions_superblock_show() {
        let disk = Arc::new(RamDisk::new(32 << 20));
        let was = medium(&disk);
        assert_eq!(was.differs(&was), None);
        assert!(was.is_proof_of(&was));
        let moved = Some(WriteCounts { sectors: 8, ..WriteCounts::default() });
        let changed = |now: Medium| was.differs(&now);
        assert_eq!(changed(Medium { written: moved, ..was.clone() }), Some(MediumChange::Written));
        assert_eq!(changed(Medium { id: Some("c".into()), ..was.clone() }), Some(MediumChange::OtherDisk));
        assert_eq!(
            changed(Medium { id: None, diskseq: Some(8), ..was.clone() }),
            Some(MediumChange::Reattached)
        );
        // Another boot: neither its counts nor its numbers are comparable.
        let later = Medium { boot: "d".into(), diskseq: Some(9), written: moved, ..was.clone() };
        assert_eq!(was.differs(&later), None);
        assert!(!was.is_proof_of(&later));
        let unknown = [Medium { written: None, ..was.clone() }, Medium { diskseq: None, ..was.clone() }];
        assert!(!unknown.iter().any(|unknown| was.is_proof_of(unknown) || unknown.is_proof_of(unknown)));
        assert_eq!(was.differs(&Medium { diskseq: Some(9), written: moved, ..was.clone() }), None);
        // A partition of 8 MiB from 16 MiB on, in whose superblock something changes.
        let mut entry = [0; 16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&(32768u32).to_le_bytes());
        entry[12..16].copy_from_slice(&(16384u32).to_le_bytes());
        disk.write_at(446, &entry).unwrap();
        disk.write_at(510, &[0x55, 0xaa]).unwrap();
        let was = medium(&disk);
        disk.write_at((16 << 20) + 1080, &[1]).unwrap();
        let now = Medium { boot: "d".into(), ..medium(&disk) };
        assert_eq!(was.differs(&now), Some(MediumChange::Edges));
        assert_eq!(was.edges.len(), now.edges.len());
    }

    #[test]
    fn what_names_a_disk() {
        let temp = tempfile::tempdir().unwrap();
        let at = |name: &str, files: &[(&str, &str)]| {
            for (file, text) in files {
                let path = temp.path().join(name).join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            id_at(&temp.path().join(name))
        };
        assert_eq!(at("sda", &[("device/wwid", "naa.5000\n"), ("size", "1")]).unwrap(), "disk-naa.5000");
        let part = at("sda/sda1", &[("partition", "1\n"), ("start", "2048\n")]).unwrap();
        assert_eq!(part, "disk-naa.5000-part1-2048");
        assert_eq!(at("vda", &[("serial", "x"), ("wwid", "")]).unwrap(), "disk-x");
        assert_eq!(at("dm-0", &[("dm/uuid", "LVM-x\n"), ("dm/name", "vg-a\n")]).unwrap(), "dm-uuid-LVM-x");
        assert_eq!(at("dm-1", &[("dm/uuid", "\n"), ("dm/name", "a\n")]).unwrap(), "dm-name-a");
        let file = temp.path().join("file");
        fs::write(&file, "x").unwrap();
        let file = format!("{}\n", file.display());
        let whole = [("loop/backing_file", &*file), ("loop/offset", "0\n"), ("loop/sizelimit", "0\n")];
        let first = at("loop0", &whole).unwrap();
        assert_eq!(at("loop1", &whole).unwrap(), first);
        assert_ne!(at("loop2", &[whole[0], ("loop/offset", "512\n"), whole[2]]).unwrap(), first);
        assert_eq!(at("ram0", &[("size", "1")]), None);
    }
}
