//! The record across a reboot: saved with a stamp after the last writer closed the device, and trusted only if nothing was
//! written since.
//!
//! Writes in between are detected by: within one boot, the disk's count of sectors written; in a new boot,
//! that count from zero; and, since another system may have had the disk, a fingerprint of the places that every
//! mount changes, on the disk and each of its partitions.
//!
//! `dsync-track@.service` saves the record after the last unmount and restores it before the first mount (a tracker of a disk that was
//! detached since is replaced by a new one). It is trusted if the disk's count of written sectors and a fingerprint of what every mount
//! changes show no write in between. The fingerprint covers the first and the last MiB of the disk and of its partitions. Writes through
//! LVM, LUKS, md, bcache, ZFS and swap leave no trace there, so if one of their signatures is found, no record is trusted after a reboot.
//! A write to the middle of a raw disk by another system, one that does not run this service, is not detected.

use std::fs::File;
use std::path::{Path, PathBuf};

use device::Folder;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;
use uuid::Uuid;

use super::disk::{BlockDevice, read_number};
use super::{BEGAN, BpfTracker, folder, load};
use crate::{TrackError, Tracker};

pub(super) const NAME: &str = "bpf-record";

/// The state of the disk when its record was saved.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct DiskStamp {
    boot: String,
    diskseq: u64,
    size: u64,
    first_sector: u64,
    block_size: u32,
    /// The hardware's name.
    name: String,
    written: SectorCounts,
    fingerprint: String,
    /// Why the record was already lost.
    lost: Option<String>,
    /// The epoch released last.
    released: Option<Uuid>,
    /// Hash of the encoded record.
    record: String,
}

/// The kernel's count of sectors changed since the disk appeared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
struct SectorCounts {
    written: u64,
    discarded: u64,
}

/// The result of restoring a tracker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Restored {
    /// It had not stopped.
    WentOn,
    /// The saved record is trusted.
    Trusted,
    /// It is not, or there was none: the tracker knows only later writes.
    Lost(String),
}

/// Saves the record of a device in a folder, for [`restore`] after a reboot. Tracking goes on meanwhile; what is written
/// after this is not in the record, so there must be no writes until the machine stops.
///
/// # Errors
/// `Refused` if the device is still in use, or not tracked. Then no record is left in the folder.
pub fn save(device: &Path, to: &dyn Folder) -> Result<(), TrackError> {
    let state = |what| TrackError::state(what, to.path());
    to.remove(NAME).map_err(state("cannot remove the old record"))?;
    let disk = BlockDevice::at(device)?;
    let Some(tracker) = BpfTracker::find(&folder(&disk.number), &disk.path)? else {
        return Err(TrackError::Refused(format!(
            "{} is not tracked: start with \"dsync track add {0}\"",
            device.display()
        )));
    };
    if let Some(user) = device::in_use(device) {
        return Err(TrackError::Refused(format!(
            "{} is still in use ({user}): unmount it first; without a saved record, everything is compared after the reboot",
            device.display()
        )));
    }
    let flushed = File::open(&disk.path).and_then(|file| file.sync_all());
    flushed.map_err(tracker.failed("flush the device"))?;
    let written = SectorCounts::of(&disk).ok_or_else(|| {
        TrackError::Refused(format!("the kernel does not count the writes to {}", device.display()))
    })?;
    let mut bits = Vec::new();
    tracker.dirty()?.encode(&mut bits);
    let stamp = DiskStamp {
        boot: load::boot_id(),
        diskseq: disk.diskseq,
        size: disk.size,
        first_sector: disk.first_sector,
        block_size: tracker.block_size(),
        name: hardware_name(&disk),
        written,
        fingerprint: fingerprint(&disk)?,
        lost: tracker.lost()?,
        released: tracker.released()?,
        record: hash(&bits),
    };
    if SectorCounts::of(&disk) != Some(written) {
        return Err(TrackError::Refused(format!("{} is still being written", device.display())));
    }
    let head = serde_json::to_vec(&stamp).map_err(|e| state("cannot save the record")(e.into()))?;
    let mut file = (head.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(&head);
    file.extend_from_slice(&bits);
    device::replace(to, NAME, &file).map_err(state("cannot save the record"))
}

/// Tracks a device again after a reboot, from the record in a folder. A record is used once, and never after any
/// doubt: then only later writes are known.
pub fn restore(device: &Path, from: &dyn Folder) -> Result<Restored, TrackError> {
    let state = TrackError::state("cannot take the saved record", from.path());
    let saved = read(from).map_err(&state)?;
    from.remove(NAME).and_then(|()| from.sync()).map_err(&state)?;
    let disk = BlockDevice::at(device)?;
    match BpfTracker::find(&folder(&disk.number), &disk.path) {
        Ok(None) => {}
        // It tracks a disk that was detached since, or nothing any more: replace it.
        Ok(Some(tracker)) if tracker.severed(&tracker.notes()?)?.is_some() => {
            super::remove(device)?;
        }
        Ok(Some(tracker)) => return Ok(tracker.lost()?.map_or(Restored::WentOn, Restored::Lost)),
        Err(_) => {
            super::remove(device)?;
        }
    }
    let (block_size, saved) = match saved {
        Ok((stamp, bits)) => (Some(stamp.block_size), Ok((stamp, bits))),
        Err(why) => (None, Err(why)),
    };
    // Tracking starts before the check, so a write in between is both recorded and detected.
    let tracker = load::begin(&disk, block_size, BEGAN)?;
    let verdict = saved.and_then(|(stamp, bits)| {
        stamp.verdict(&disk)?;
        let words = tracker.records[0].bits.decode_into(&bits);
        words.map_err(|e| format!("the saved record is damaged: {e}"))?;
        Ok(stamp.released)
    });
    let mut notes = tracker.notes()?;
    match verdict {
        Ok(released) => (notes.released, notes.lost) = (released, None),
        Err(why) => notes.lost = Some(why),
    }
    tracker.write_notes(&notes)?;
    Ok(notes.lost.map_or(Restored::Trusted, Restored::Lost))
}

/// The stamp and the encoded record, or why they cannot be used.
#[allow(clippy::type_complexity)]
fn read(from: &dyn Folder) -> std::io::Result<Result<(DiskStamp, Vec<u8>), String>> {
    let file = match from.open(NAME, false) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Err("no record was saved at shutdown".into()));
        }
        Err(e) => return Err(e),
    };
    let damaged = || Ok(Err("the saved record is damaged".to_owned()));
    // A record has 128 MiB at most; encoded, one percent more.
    let len = file.len()?;
    if !(8..256 << 20).contains(&len) {
        return damaged();
    }
    let mut bytes = vec![0; len as usize];
    file.read_at(0, &mut bytes)?;
    let (head, rest) = bytes.split_at(8);
    let head = u64::from_le_bytes(head.try_into().unwrap_or_default());
    if head > rest.len() as u64 {
        return damaged();
    }
    let (head, bits) = rest.split_at(head as usize);
    match serde_json::from_slice::<DiskStamp>(head) {
        Ok(stamp) if stamp.record == hash(bits) => Ok(Ok((stamp, bits.to_vec()))),
        _ => damaged(),
    }
}

impl DiskStamp {
    /// Whether the record is valid for the disk as it is now.
    fn verdict(&self, now: &BlockDevice) -> Result<(), String> {
        let lost = |why: &str| Err(why.to_owned());
        if let Some(why) = &self.lost {
            return Err(why.clone());
        }
        if (self.size, self.first_sector) != (now.size, now.first_sector) {
            return lost("the device was resized or moved while it was not tracked");
        }
        let same_boot = self.boot == load::boot_id();
        if self.name != hardware_name(now) || (same_boot && self.diskseq != now.diskseq) {
            return lost("another disk now has the name of the device");
        }
        // Another system may have written, which this kernel's count does not include.
        if let (false, Some(holder)) = (same_boot, holder(now).map_err(|error| error.to_string())?) {
            return Err(format!(
                "the machine was rebooted, and writes to {holder} cannot be detected afterwards"
            ));
        }
        let expected = if same_boot { self.written } else { SectorCounts::default() };
        if SectorCounts::of(now) != Some(expected) {
            return lost("the device was written to while it was not tracked");
        }
        match fingerprint(now) {
            Ok(fingerprint) if fingerprint == self.fingerprint => Ok(()),
            Ok(_) => lost("the device was mounted or written to while it was not tracked"),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl SectorCounts {
    /// `None` where the kernel doesn't count.
    fn of(disk: &BlockDevice) -> Option<SectorCounts> {
        let number = std::fs::read_to_string(disk.whole_disk().join("dev")).ok()?;
        let (major, minor) = number.trim().split_once(':')?;
        let count = device::WriteCounts::of(libc::makedev(major.parse().ok()?, minor.parse().ok()?))?;
        Some(SectorCounts { written: count.sectors, discarded: count.discarded })
    }
}

/// The hardware's name, or its substitute.
fn hardware_name(disk: &BlockDevice) -> String {
    let place = disk.whole_disk();
    let files = ["wwid", "device/wwid", "serial", "device/serial", "dm/uuid", "md/uuid", "loop/backing_file"];
    files.iter().filter_map(|f| std::fs::read_to_string(place.join(f)).ok()).collect()
}

/// A hash of the places that every mount changes, on the whole disk and on each of its partitions: the first and the last
/// MiB, with the superblocks of ext4, XFS, Btrfs, LVM, md and partition tables.
pub(super) fn fingerprint(disk: &BlockDevice) -> Result<String, TrackError> {
    let mut content = Vec::new();
    edges(disk, |part| content.extend_from_slice(hash(part).as_bytes()))?;
    Ok(hash(&content))
}

/// Passes on the first and the last MiB of the disk, then of each of its partitions.
fn edges(disk: &BlockDevice, mut take: impl FnMut(&[u8])) -> Result<(), TrackError> {
    const EDGE: u64 = 1 << 20;
    for path in std::iter::once(disk.path.clone()).chain(partitions(disk)) {
        let opened =
            device::open(&path, &device::DiskOptions { write: false, direct: true, exclusive: false })?;
        let len = opened.len();
        let edge = EDGE.min(len);
        for begin in [0, len - edge] {
            let mut part = vec![0; edge as usize];
            opened.read_at(begin, &mut part).map_err(TrackError::state("cannot read the device", &path))?;
            take(&part);
        }
    }
    Ok(())
}

/// What is on the disk or a partition that can be written through without a change at the edges.
fn holder(disk: &BlockDevice) -> Result<Option<&'static str>, TrackError> {
    let mut found = None;
    edges(disk, |part| found = found.or(signature(part)))?;
    Ok(found)
}

/// The signature of such a layer in the first or the last MiB of a device.
fn signature(edge: &[u8]) -> Option<&'static str> {
    const MD: &[u8] = &0xa92b_4efc_u32.to_le_bytes();
    const ZFS: &[u8] = &0x00ba_b10c_u64.to_le_bytes();
    const BCACHE: &[u8] = b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81";
    let at = |offset: usize, magic: &[u8]| edge.get(offset..).is_some_and(|rest| rest.starts_with(magic));
    // An md superblock of version 1.0 or 0.90 is at a multiple of 4 KiB near the end.
    let on_page = |magic: &[u8]| edge.chunks(4096).any(|page| page.starts_with(magic));
    let on_sector = |magic: &[u8]| edge.chunks(512).any(|sector| sector.starts_with(magic));
    let kinds = [
        ("an LVM physical volume", on_sector(b"LABELONE")),
        ("an encrypted volume (LUKS)", at(0, b"LUKS\xba\xbe")),
        ("a member of an md array", on_page(MD)),
        ("a bcache device", at(4096 + 24, BCACHE)),
        ("a ZFS pool", on_sector(ZFS)),
        ("swap space", [4096, 16384, 65536].iter().any(|page| at(page - 10, b"SWAPSPACE2"))),
    ];
    kinds.into_iter().find_map(|(name, is_it)| is_it.then_some(name))
}

/// The partitions of a whole disk, sorted by number.
fn partitions(disk: &BlockDevice) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(&disk.sysfs).into_iter().flatten().flatten();
    let mut found: Vec<(u64, PathBuf)> = entries
        .filter_map(|entry| {
            let number = read_number(&entry.path().join("partition"))?;
            Some((number, Path::new("/dev").join(entry.file_name())))
        })
        .collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

fn hash(bytes: &[u8]) -> String {
    format!("{:032x}", XxHash3_128::oneshot(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_write_through_is_known_by_its_signature() {
        let signed = |offset: usize, magic: &[u8]| {
            let mut edge = vec![0; 1 << 20];
            edge[offset..offset + magic.len()].copy_from_slice(magic);
            signature(&edge)
        };
        assert_eq!(signed(0, b""), None);
        // The magic number of ext4, whose superblock every mount changes.
        assert_eq!(signed(1024 + 56, &[0x53, 0xef]), None);
        assert!(signed(512, b"LABELONE").is_some_and(|s| s.contains("LVM")));
        assert!(signed(0, b"LUKS\xba\xbe\0\x02").is_some_and(|s| s.contains("LUKS")));
        for superblock in [0, 4096, (1 << 20) - 8192, (1 << 20) - (64 << 10)] {
            assert!(signed(superblock, &0xa92b_4efc_u32.to_le_bytes()).is_some_and(|s| s.contains("md")));
        }
        assert!(signed(4096 - 10, b"SWAPSPACE2").is_some());
        assert!(signed(128 << 10, &0x00ba_b10c_u64.to_le_bytes()).is_some_and(|s| s.contains("ZFS")));
        assert_eq!(signature(&[]), None);
    }
}
