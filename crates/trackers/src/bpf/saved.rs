//! The record across a reboot: saved with a stamp after the last writer closed the device, and trusted only if nothing was
//! written since.
//!
//! `dsync-track@.service` saves the record after the last unmount and restores it before the first mount (a tracker of a disk that was
//! detached since is replaced by a new one). In between nothing may be written that the record does not have:
//!
//! - **In the boot that saves it** the disk is read-only afterwards. Whoever goes on (an epoch, [`restore`], the end of the tracker) removes the
//!   saved record, durably, before the disk is writable again.
//! - **Another system** may have had the disk while this one was down: a mount by it shows in [`DiskContent`], and a disk on which it
//!   would not is not trusted. A write past its file systems, such as to the middle of the disk, is not detected.
//! - **In the new boot** the disk's count of sectors written begins at zero, and must still be there.
//! - **A history** takes a restored record only as of its own last epoch ([`Tracker::is_restored`]).

use std::fs::File;
use std::path::Path;

use device::Folder;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::content::{DiskContent, hash};
use super::disk::BlockDevice;
use super::notes::{Notes, SavedIn};
use super::{BpfTracker, folder, load, sys};
use crate::tracker::BEGAN;
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

/// Saves the record of a device in a folder, for [`restore`] after a reboot. The device is read-only from then on, until the machine
/// stops or tracking goes on with [`restore`], an epoch, or [`remove`](super::remove), each of which removes what was saved: what would be
/// written after this is not in the record.
///
/// # Errors
/// `Refused` if the device is still in use, or not tracked. Then no record is left in the folder.
pub fn save(device: &Path, to: &dyn Folder) -> Result<(), TrackError> {
    discard(to)?;
    let disk = BlockDevice::at(device)?;
    let Some(tracker) = BpfTracker::find(&folder(&disk.number), &disk.path)? else {
        return Err(TrackError::Refused(format!(
            "{} is not tracked: start with \"dsync track add {0}\"",
            device.display()
        )));
    };
    let _lock = tracker.lock()?;
    let mut notes = tracker.notes()?;
    tracker.go_on(&mut notes)?;
    refuse_user(&disk.path)?;
    let opened = File::open(&disk.path).map_err(tracker.failed("open the device"))?;
    let place = std::path::absolute(to.path()).map_err(TrackError::state("find", to.path()))?;
    // Noted first: who goes on after a crash undoes it.
    let was_locked = sys::is_read_only(&opened).map_err(tracker.failed("look at the device"))?;
    notes.saved = Some(SavedIn { folder: place, locks: !was_locked });
    tracker.write_notes(&notes)?;
    let lock = sys::set_read_only(&opened, true).map_err(tracker.failed("make the device read-only"));
    let saved = lock.and_then(|()| write_record(&tracker, &disk, &opened, to));
    if saved.is_err() {
        tracker.go_on(&mut notes)?;
    }
    saved
}

/// Removes what was saved of a device, for good: it is written to from now on.
pub fn discard(from: &dyn Folder) -> Result<(), TrackError> {
    let removed = from.remove(NAME).and_then(|()| from.sync());
    removed.map_err(TrackError::state("cannot remove the saved record", from.path()))
}

/// Undoes what [`save`] has noted of the device whose tracker is pinned in `place`.
pub(super) fn withdraw(notes: &Notes, place: &Path) -> Result<(), TrackError> {
    let Some(SavedIn { folder, locks }) = &notes.saved else { return Ok(()) };
    match device::Dir::existing(folder) {
        Ok(folder) => discard(&folder)?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(TrackError::state("cannot open the saved record", folder)(error)),
    }
    // What has its name by now may be another disk.
    let is_it = BlockDevice::at(&notes.device).is_ok_and(|now| super::folder(&now.number) == place);
    if !locks || !is_it {
        return Ok(());
    }
    let unlocked = File::open(&notes.device).and_then(|device| sys::set_read_only(&device, false));
    unlocked.map_err(|error| TrackError::Kernel {
        what: "make the device writable again",
        device: notes.device.clone(),
        error: error.to_string(),
    })
}

fn refuse_user(device: &Path) -> Result<(), TrackError> {
    match device::in_use(device).or_else(|| device::opened_for_writing(device)) {
        None => Ok(()),
        Some(user) => Err(TrackError::Refused(format!(
            "{} is still in use ({user}): unmount it or stop that program first; without a saved record, everything is compared after \
             the reboot",
            device.display()
        ))),
    }
}

/// Writes the record of a device that has just been made read-only.
fn write_record(
    tracker: &BpfTracker,
    disk: &BlockDevice,
    opened: &File,
    to: &dyn Folder,
) -> Result<(), TrackError> {
    let state = TrackError::state("cannot save the record", to.path());
    opened.sync_all().map_err(tracker.failed("flush the device"))?;
    // Who came before it was read-only.
    refuse_user(&disk.path)?;
    let written = SectorCounts::of(disk).ok_or_else(|| {
        TrackError::Refused(format!("the kernel does not count the writes to {}", disk.path.display()))
    })?;
    let mut bits = Vec::new();
    tracker.both().encode(&mut bits);
    let stamp = DiskStamp {
        boot: load::boot_id(),
        diskseq: disk.diskseq,
        size: disk.size,
        first_sector: disk.first_sector,
        block_size: tracker.block_size(),
        name: hardware_name(disk),
        written,
        fingerprint: DiskContent::of(disk)?.fingerprint,
        lost: tracker.lost()?,
        released: tracker.released()?,
        record: hash(&bits),
    };
    if SectorCounts::of(disk) != Some(written) || SectorCounts::are_moving(disk) {
        return Err(TrackError::Refused(format!("{} is still being written", disk.path.display())));
    }
    let head = serde_json::to_vec(&stamp).map_err(std::io::Error::from);
    let file = head.map(|head| [&(head.len() as u64).to_le_bytes()[..], &head, &bits].concat());
    file.and_then(|file| device::replace(to, NAME, &file)).map_err(state)
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
        Ok(Some(tracker)) => {
            let _lock = tracker.lock()?;
            tracker.go_on(&mut tracker.notes()?)?;
            return Ok(tracker.lost()?.map_or(Restored::WentOn, Restored::Lost));
        }
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
        Ok(released) => (notes.released, notes.lost, notes.restored) = (released, None, true),
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
        let content = DiskContent::of(now).map_err(|error| error.to_string())?;
        // Another system may have written, which this kernel's count does not include.
        if let (false, Some(silent)) = (same_boot, content.silent) {
            return Err(format!(
                "the machine was rebooted, and writes to {silent} cannot be detected afterwards"
            ));
        }
        let expected = if same_boot { self.written } else { SectorCounts::default() };
        if SectorCounts::of(now) != Some(expected) {
            return lost("the device was written to while it was not tracked");
        }
        if content.fingerprint != self.fingerprint {
            return lost("the device was mounted or written to while it was not tracked");
        }
        Ok(())
    }
}

impl SectorCounts {
    /// `None` where the kernel doesn't count.
    fn of(disk: &BlockDevice) -> Option<SectorCounts> {
        let count = counts(&disk.whole_disk())?;
        Some(SectorCounts { written: count.sectors, discarded: count.discarded })
    }

    /// True if a write to the device has begun and not ended.
    fn are_moving(disk: &BlockDevice) -> bool {
        counts(&disk.sysfs).is_none_or(|count| count.in_flight != 0)
    }
}

/// What the kernel counts of the disk or partition with this folder in sysfs.
fn counts(place: &Path) -> Option<device::WriteCounts> {
    let number = std::fs::read_to_string(place.join("dev")).ok()?;
    let (major, minor) = number.trim().split_once(':')?;
    device::WriteCounts::of(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The hardware's name, or its substitute.
fn hardware_name(disk: &BlockDevice) -> String {
    let place = disk.whole_disk();
    let files = [
        "wwid",
        "device/wwid",
        "serial",
        "device/serial",
        "dm/uuid",
        "md/uuid",
        "loop/backing_file",
        "loop/offset",
        "loop/sizelimit",
    ];
    files.iter().filter_map(|f| std::fs::read_to_string(place.join(f)).ok()).collect()
}
