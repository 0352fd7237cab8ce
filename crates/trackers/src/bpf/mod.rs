//! The bpf tracker: follows any block device while it is in use, from within the kernel, with no daemon and no module.
//!
//! Programs at tracepoints of the block layer mark what is written in a record (see `bpf/track.bpf.c`). Programs,
//! maps and links are pinned below `/sys/fs/bpf/dsync/MAJOR:MINOR/`, and live until they are removed or the machine stops.
//!
//! There are two records. One is in use; the other is clean, or holds what the last checkpoint returned and was not
//! released. So a process that dies in between leaves nothing ambiguous: whatever either record has
//! was written since the last release.
//!
//! - **Two records.** One is in use; the other is clean, or holds what the last checkpoint returned and was not released. A checkpoint
//!   puts the other one in use; the kernel returns from that when no program works with the old one. They have the layout of a `Bitmap`,
//!   summary included, and are mapped: the cost of each step is proportional to the changes.
//! - **Writes in flight** are kept in a table, by bio, from queueing to completion. After the swap every entry is marked in the new
//!   record too. Request-based disks complete in `block_rq_complete`, all others in `block_bio_complete`. Part of a split bio may
//!   complete after the rest, so the table has the whole bio.
//! - **The record is lost** after: a full table, a missed event, a completion without a start (the write began before the tracking), a
//!   pin or a link that is missing or replaced, another disk under the same number, another size, another boot, a command
//!   with data for the disk that a program has sent past the block layer (SG_IO, NVMe passthrough). A disk that was smaller for a
//!   while is told by the functions of the kernel that set sizes; where the kernel shows no functions, by what was read or written meanwhile.
//! - **Partitions** are tracked by sectors of the whole disk.
//!
//! Not detected: such commands without data (FORMAT UNIT, NVMe Write Zeroes), and writers on other hosts. With request-based
//! multipath, track the multipath device.

mod content;
mod disk;
mod load;
mod notes;
mod saved;
mod sys;
#[cfg(test)]
mod tests;
mod unseen;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use extents::Bitmap;
use rustix::fs::FlockOperation;
use uuid::Uuid;

use crate::tracker::{BEGAN, taken};
use crate::{TrackError, Tracker};
use disk::BlockDevice;
use notes::{Counts, Notes};
use sys::Words;

pub use saved::{Restored, discard, restore, save};

/// What is pinned, by the names that the objects have in the program: the maps, the two records, and the links.
const MAPS: [&str; 4] = ["slot", "flight", "counts", "notes"];
const RECORDS: [&str; 2] = ["record-a", "record-b"];
const LINKS: [&str; 8] =
    ["bio_complete", "rq_complete", "split", "remap", "queue", "capacity", "new_capacity", "partition"];
/// The tracepoint of each of the first links. Completions come first, so that no write is seen to begin whose completion is missed.
const TRACEPOINTS: [&str; 5] =
    ["block_bio_complete", "block_rq_complete", "block_split", "block_bio_remap", "block_bio_queue"];
/// The function of the kernel of each of the others, which are left out where the kernel shows no functions.
const FUNCTIONS: [&str; 3] = ["set_capacity", "set_capacity_and_notify", "bdev_resize_partition"];
/// How many of them are for completions.
const ENDS: usize = 2;

/// The number of a link that could not be made.
const LEFT_OUT: u32 = 0;

/// What is missed where a link is left out.
const SHRUNK_UNNOTICED: &str = "if it is made smaller or reset, and then as large as before, with no read or write in between, this is not \
                                noticed: the kernel lets no BPF program see changes of sizes";

/// Where a device's tracker is pinned.
fn folder(number: &str) -> PathBuf {
    crate::folder("DSYNC_BPF_DIR", "/sys/fs/bpf/dsync").join(number)
}

/// Refuses pins that another user could have made, or can exchange: what they hold is believed.
fn check_owner(place: &Path) -> Result<(), TrackError> {
    use std::os::unix::fs::MetadataExt;
    for folder in [place.parent().unwrap_or(place), place] {
        let Ok(found) = std::fs::symlink_metadata(folder) else { continue };
        if !found.is_dir() || found.uid() != 0 || found.mode() & 0o022 != 0 {
            return Err(TrackError::Refused(format!(
                "{} is not a folder of root's to which only root may write: remove it, and begin again with \"dsync track add\"",
                folder.display()
            )));
        }
    }
    Ok(())
}

/// Starts tracking the block device at `device`, in blocks of `block_size` bytes, or of 4 KiB and more for disks above
/// 4 TiB. What was written before is not known: [`Tracker::lost`] says so until the first release.
///
/// # Errors
/// `Unable` if the machine or the device does not support it, `Refused` if it is tracked already.
pub fn add(device: &Path, block_size: Option<u32>) -> Result<Box<dyn Tracker>, TrackError> {
    let disk = BlockDevice::at(device)?;
    match folder(&disk.number).exists() || left_behind(&disk.path, &disk.number)?.is_none() {
        true => Ok(Box::new(load::begin(&disk, block_size, BEGAN)?)),
        // A second one beside it would leave that to be found by nobody.
        false => Err(BrokenTracker::of_gone(disk.path, disk.size).error()),
    }
}

/// Stops tracking a device, and drops its record. False if it was not tracked.
pub fn remove(device: &Path) -> Result<bool, TrackError> {
    let (path, own) = match device::identity(device) {
        Ok(identity) => (identity.path.clone(), Some(BlockDevice::of(&identity)?.number)),
        Err(_) => (device.to_path_buf(), None),
    };
    let number = match own {
        Some(own) if folder(&own).exists() => Some(own),
        own => left_behind(&path, own.as_deref().unwrap_or_default())?,
    };
    let Some(place) = number.map(|number| folder(&number)) else { return Ok(false) };
    let held = load::alone(&place, FlockOperation::LockExclusive);
    // Of a tracker that is broken nothing is known.
    if let Ok(notes) = sys::get(&place.join("notes")).and_then(|map| Notes::read(map.as_fd())) {
        saved::withdraw(&notes, &place)?;
    }
    match held.and_then(|held| held.map(|_held| load::unpin(&place)).transpose()) {
        Ok(removed) => Ok(removed.is_some()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(TrackError::state("cannot remove the tracker", &place)(error)),
    }
}

/// The bpf tracker of a device, if it has one.
pub(crate) fn find(device: &Path) -> Result<Option<Box<dyn Tracker>>, TrackError> {
    let Ok(identity) = device::identity(device) else { return Ok(None) };
    if !identity.is_block() {
        return Ok(None);
    }
    let number = format!("{}:{}", libc::major(identity.dev), libc::minor(identity.dev));
    let place = folder(&number);
    match place.try_exists() {
        Ok(true) => {}
        // Pins that are not safe are not believed.
        _ if left_behind(&identity.path, &number).is_ok_and(|number| number.is_some()) => {
            return Ok(Some(Box::new(BrokenTracker::of_gone(identity.path, identity.size))));
        }
        _ => return Ok(None),
    }
    Ok(Some(match BpfTracker::find(&place, &identity.path) {
        Ok(Some(tracker)) => Box::new(tracker),
        Ok(None) => return Ok(None),
        // Users without root cannot read the record: for them the disk is not tracked, and is compared.
        Err(TrackError::State { error, .. }) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(None);
        }
        Err(error) => {
            Box::new(BrokenTracker { device: identity.path, size: identity.size, why: error.to_string() })
        }
    }))
}

/// The tracked devices, by their paths when tracking began.
pub(crate) fn list() -> Result<Vec<PathBuf>, TrackError> {
    Ok(pinned()?.into_iter().map(|(_, path)| path).collect())
}

/// The number of a disk that was tracked under a path, where the disk with the number `own` is by now, or none.
fn left_behind(path: &Path, own: &str) -> Result<Option<String>, TrackError> {
    let others = |(number, tracked): &(String, PathBuf)| tracked == path && number != own;
    Ok(pinned()?.into_iter().find(others).map(|(number, _)| number))
}

/// Number and path of what is tracked.
fn pinned() -> Result<Vec<(String, PathBuf)>, TrackError> {
    let Ok(entries) = std::fs::read_dir(folder("")) else { return Ok(Vec::new()) };
    // The name ends with a slash.
    check_owner(&folder("0:0"))?;
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let number = entry.file_name().to_string_lossy().into_owned();
        let notes = sys::get(&entry.path().join("notes")).and_then(|map| Notes::read(map.as_fd()));
        let device = match notes {
            Ok(notes) => notes.device,
            // Enough to name and remove it.
            Err(_) => disk::path_of(&number).unwrap_or_else(|| Path::new("/dev/block").join(&number)),
        };
        found.push((number, device));
    }
    found.sort();
    Ok(found)
}

/// Puts a record in use. Returns when no program works with the one before.
fn put_in_slot(slot: BorrowedFd, record: BorrowedFd) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    sys::update(slot, 0, &record.as_raw_fd().to_ne_bytes())
}

/// See the module.
pub(crate) struct BpfTracker {
    place: PathBuf,
    device: PathBuf,
    size: u64,
    block_size: u32,
    slot: OwnedFd,
    flight: OwnedFd,
    counts: OwnedFd,
    notes: OwnedFd,
    records: [MappedBitmap; 2],
    /// The last checkpoint made through this object.
    ended: Mutex<Option<Uuid>>,
    /// What the last checkpoint marked for writes in flight.
    in_flight: Mutex<Option<Bitmap>>,
}

struct MappedBitmap {
    map: OwnedFd,
    id: u32,
    bits: Bitmap<Words>,
}

impl BpfTracker {
    /// Opens what is pinned in a folder, for the device at a path, as [`BpfTracker::open`] does. `None` if there is nothing any more: who makes or removes
    /// a tracker is waited for.
    fn find(place: &Path, device: &Path) -> Result<Option<BpfTracker>, TrackError> {
        BpfTracker::open(place, device).map(Some).or_else(|_| {
            // Where it cannot be locked, it cannot be made either.
            let _held = load::alone(place, FlockOperation::LockShared);
            if place.exists() { BpfTracker::open(place, device).map(Some) } else { Ok(None) }
        })
    }

    /// Opens what is pinned in a folder, for the device at a path.
    fn open(place: &Path, device: &Path) -> Result<BpfTracker, TrackError> {
        check_owner(place)?;
        let get = |name: &str| {
            let pin = place.join(name);
            sys::get(&pin).map_err(TrackError::state("cannot open the tracker's pin", &pin))
        };
        let [slot, flight, counts, notes] = [get(MAPS[0])?, get(MAPS[1])?, get(MAPS[2])?, get(MAPS[3])?];
        let state = TrackError::state("cannot use the tracker", place);
        let known = Notes::read(notes.as_fd()).map_err(&state)?;
        let (size, block_size) = (known.size, known.block_size);
        if !block_size.is_power_of_two() || !(4096..=1 << 20).contains(&block_size) {
            return Err(state(io::Error::new(io::ErrorKind::InvalidData, "invalid block size")));
        }
        let record = |name: &str| -> Result<MappedBitmap, TrackError> {
            let map = get(name)?;
            let blocks = size.div_ceil(u64::from(block_size));
            let words = Words::map(map.as_fd(), Bitmap::<Words>::words(blocks)).map_err(&state)?;
            let id = sys::map_id(map.as_fd()).map_err(&state)?;
            let bits = Bitmap::over(words, blocks)
                .map_err(|e| state(io::Error::new(io::ErrorKind::InvalidData, e)))?;
            Ok(MappedBitmap { map, id, bits })
        };
        let records = [record(RECORDS[0])?, record(RECORDS[1])?];
        let (place, device) = (place.to_owned(), device.to_owned());
        let (ended, in_flight) = (Mutex::new(None), Mutex::new(None));
        Ok(BpfTracker {
            place,
            device,
            size,
            block_size,
            slot,
            flight,
            counts,
            notes,
            records,
            ended,
            in_flight,
        })
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> TrackError {
        let device = self.device.clone();
        move |error| TrackError::Kernel { what, device, error: error.to_string() }
    }

    fn notes(&self) -> Result<Notes, TrackError> {
        Notes::read(self.notes.as_fd()).map_err(self.failed("read the tracker's notes"))
    }

    fn write_notes(&self, notes: &Notes) -> Result<(), TrackError> {
        notes.write(self.notes.as_fd()).map_err(self.failed("write the tracker's notes"))
    }

    fn ended(&self) -> MutexGuard<'_, Option<Uuid>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the tracker: one process at a time ends an epoch or reads both records.
    fn lock(&self) -> Result<File, TrackError> {
        let lock = File::open(&self.place).and_then(|folder| {
            rustix::fs::flock(&folder, FlockOperation::LockExclusive)?;
            Ok(folder)
        });
        lock.map_err(self.failed("lock the tracker"))
    }

    /// The record in use, and the other one. `None` if neither is in use.
    fn in_use(&self) -> Result<Option<(&MappedBitmap, &MappedBitmap)>, TrackError> {
        let mut id = [0; 4];
        sys::lookup(self.slot.as_fd(), 0, &mut id).map_err(self.failed("look at the record in use"))?;
        let id = u32::from_ne_bytes(id);
        let [a, b] = &self.records;
        Ok(if a.id == id {
            Some((a, b))
        } else if b.id == id {
            Some((b, a))
        } else {
            None
        })
    }

    /// The ids of each link and its program; an error if it is not pinned.
    fn links(&self) -> [io::Result<(u32, u32)>; LINKS.len()] {
        LINKS.map(|name| sys::get(&self.place.join(name)).and_then(|link| sys::link_ids(link.as_fd())))
    }

    fn counts(&self) -> Result<Counts, TrackError> {
        let count = |key| {
            let mut value = [0; 8];
            sys::lookup(self.counts.as_fd(), key, &mut value).map(|()| u64::from_ne_bytes(value))
        };
        let read = || {
            let [dropped, stray, shrunk, passed] = [count(0)?, count(1)?, count(2)?, count(3)?];
            let mut counts = Counts { dropped, stray, shrunk, passed, ..Counts::default() };
            // Those that may be left out have nothing to do with writes.
            for (i, link) in self.links().into_iter().enumerate().take(TRACEPOINTS.len()) {
                let misses = sys::misses(link?.1)?;
                *(if i < ENDS { &mut counts.unended } else { &mut counts.missed }) += misses;
            }
            Ok(counts)
        };
        read().map_err(self.failed("read the tracker's counts"))
    }

    /// Why it no longer records this disk's writes; a checkpoint does not help.
    fn severed(&self, notes: &Notes) -> Result<Option<String>, TrackError> {
        let said = |why: &str| Ok(Some(format!("{why}; run \"dsync track remove\" and \"dsync track add\"")));
        let Ok(now) = BlockDevice::at(&self.device) else {
            return said("the device no longer exists");
        };
        if now.diskseq != notes.diskseq || folder(&now.number) != self.place {
            return match now.backing_file().as_deref() {
                Some("") => said("the loop device is detached"),
                Some(file) => {
                    said(&format!("the loop device was detached, and is attached to {file} by now"))
                }
                None => said("another disk now has the name of the device"),
            };
        }
        if now.size != notes.size || now.first_sector != notes.first_sector {
            return said("the device was resized or moved");
        }
        if notes.part.is_some() && now.part != notes.part {
            return said("the loop device shows another part of its file");
        }
        if load::boot_id() != notes.boot {
            return said("the machine was rebooted");
        }
        for ((link, name), id) in self.links().into_iter().zip(LINKS).zip(notes.links) {
            match link {
                Ok((found, _)) if found == id => {}
                Err(_) if id == LEFT_OUT => {}
                Ok(_) => return said(&format!("its link {name} was replaced")),
                Err(_) => return said(&format!("its link {name} is no longer pinned")),
            }
        }
        if self.in_use()?.is_none() {
            return said("its record was replaced");
        }
        Ok(None)
    }

    /// What both records have. The lock is held.
    fn both(&self) -> Bitmap {
        let all = Bitmap::new(self.records[0].bits.blocks());
        self.records.iter().for_each(|record| all.union_with(&record.bits));
        all
    }

    /// The record goes on, so what was saved of it is not believed any more. The lock is held.
    fn go_on(&self, notes: &mut Notes) -> Result<(), TrackError> {
        if notes.saved.is_none() {
            return Ok(());
        }
        saved::withdraw(notes, &self.place)?;
        notes.saved = None;
        self.write_notes(notes)
    }

    /// [`Tracker::checkpoint`]; `mark_again` is false only in the test that shows what the second mark is for.
    fn swap(&self, mark_again: bool) -> Result<Bitmap, TrackError> {
        let _lock = self.lock()?;
        let mut notes = self.notes()?;
        self.go_on(&mut notes)?;
        let Some((last, next)) = self.in_use()? else {
            return Err(self.failed("find the record in use")(io::ErrorKind::NotFound.into()));
        };
        // Before the swap: what is counted from here on belongs to the next epoch too. If a link is gone, counts mean nothing.
        notes.pending = Some(self.counts().unwrap_or(notes.base));
        notes.ended = Some(Uuid::new_v4());
        // Before the records change places, too: what another checkpoint has taken before is not released by it any more.
        self.write_notes(&notes)?;
        if !next.bits.is_clean() {
            // Not released: it is part of what is returned.
            last.bits.union_with(&next.bits);
            next.bits.clear(0..next.bits.blocks());
        }
        put_in_slot(self.slot.as_fd(), next.map.as_fd()).map_err(self.failed("begin the next record"))?;
        if mark_again {
            // Every write marked in the old record has left its program: it is in the table, or on disk.
            let flight = sys::values::<2>(self.flight.as_fd())
                .map_err(self.failed("read the table of writes in flight"))?;
            let marked = Bitmap::new(next.bits.blocks());
            for [first, after] in flight.into_iter().map(|[first, last]| [first, last.saturating_add(1)]) {
                marked.set(first..after);
            }
            next.bits.union_with(&marked);
            *self.in_flight.lock().unwrap_or_else(PoisonError::into_inner) = Some(marked);
        }
        *self.ended() = notes.ended;
        let changes = Bitmap::new(last.bits.blocks());
        changes.union_with(&last.bits);
        Ok(changes)
    }
}

impl Tracker for BpfTracker {
    fn kind(&self) -> &'static str {
        "bpf"
    }

    fn block_size(&self) -> u32 {
        self.block_size
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn lost(&self) -> Result<Option<String>, TrackError> {
        let notes = self.notes()?;
        if let Some(why) = self.severed(&notes)? {
            return Ok(Some(why));
        }
        if notes.lost.is_some() {
            return Ok(notes.lost);
        }
        Ok(self.counts()?.since(&notes.base, notes.doubtful))
    }

    fn checkpoint(&self) -> Result<Bitmap, TrackError> {
        self.swap(true)
    }

    fn release(&self, epoch: Uuid) -> Result<(), TrackError> {
        let _lock = self.lock()?;
        let mut notes = self.notes()?;
        self.go_on(&mut notes)?;
        let ours = self.ended().take();
        let Some(pending) = notes.pending.take().filter(|_| ours.is_some() && notes.ended == ours) else {
            return Err(taken(&self.device));
        };
        notes.ended = None;
        if let Some((_, frozen)) = self.in_use()? {
            frozen.bits.clear(0..frozen.bits.blocks());
        }
        notes.doubtful = pending.since(&notes.base, notes.doubtful).is_some();
        notes.base = pending;
        notes.lost = None;
        notes.released = Some(epoch);
        notes.restored = false;
        self.write_notes(&notes)
    }

    fn released(&self) -> Result<Option<Uuid>, TrackError> {
        Ok(self.notes()?.released)
    }

    fn in_flight(&self) -> Option<Bitmap> {
        let marked = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        let copy = Bitmap::new(marked.as_ref()?.blocks());
        copy.union_with(marked.as_ref()?);
        Some(copy)
    }

    fn dirty(&self) -> Result<Bitmap, TrackError> {
        let _lock = self.lock()?;
        Ok(self.both())
    }

    fn unnoticed(&self) -> Result<Option<&'static str>, TrackError> {
        let notes = self.notes()?;
        let left_out = notes.links[TRACEPOINTS.len()..].contains(&LEFT_OUT);
        Ok(left_out.then_some(SHRUNK_UNNOTICED))
    }

    fn is_restored(&self) -> Result<bool, TrackError> {
        Ok(self.notes()?.restored)
    }
}

/// What is left of a tracker some of whose pins are gone, or whose disk is.
struct BrokenTracker {
    device: PathBuf,
    size: u64,
    why: String,
}

impl BrokenTracker {
    /// The tracker of a disk or partition that is gone; what has its path now has this size.
    fn of_gone(device: PathBuf, size: u64) -> BrokenTracker {
        let why = "the disk or partition that was tracked is gone, and another one is in its place".into();
        BrokenTracker { device, size, why }
    }

    fn error(&self) -> TrackError {
        TrackError::Refused(format!(
            "the tracker of {0} is broken ({1}): run \"dsync track remove {0}\" and \"dsync track add {0}\"",
            self.device.display(),
            self.why
        ))
    }
}

impl Tracker for BrokenTracker {
    fn kind(&self) -> &'static str {
        "bpf"
    }
    fn block_size(&self) -> u32 {
        4096
    }
    fn size(&self) -> u64 {
        self.size
    }
    fn lost(&self) -> Result<Option<String>, TrackError> {
        Ok(Some(self.error().to_string()))
    }
    fn checkpoint(&self) -> Result<Bitmap, TrackError> {
        Err(self.error())
    }
    fn release(&self, _epoch: Uuid) -> Result<(), TrackError> {
        Err(self.error())
    }
    fn released(&self) -> Result<Option<Uuid>, TrackError> {
        Ok(None)
    }
    fn dirty(&self) -> Result<Bitmap, TrackError> {
        Err(self.error())
    }
}
