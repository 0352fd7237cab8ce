//! Whether the image matches its record: a stamp is taken at the end of writing, and compared before the record is
//! trusted again.
//!
//! # When a record is trusted
//!
//! A record is trusted after a stop only if the image is as dsync left it. A clean stop stamps the image's inode, size and times last.
//! After an unclean one the image must not have changed later than the last write through the server: that time is kept in a mapped file,
//! by the clock that stamps files. After a power cut the comparison uses the last durable value of that time, and the time of this boot.
//! A disk that was detached and attached again within one boot, which its kernel number (diskseq) shows, may have lost what a power cut
//! takes: after an unclean stop, an image that was written to is compared if its disk, or that of the state directory, has another
//! diskseq. File systems over a network or in layers have no such number; of those over several disks, only Btrfs names them. While the
//! image is held, its times are checked soon after each burst of writes, before the first write after such a check, once a second, at
//! each checkpoint and at the end: if the time of change moved without a write through the server, another program wrote, and this is
//! noted in the same mapped file. Another file at its path is refused. A block device has no such times: it is compared, unless the user
//! passes `--trust-device`. A command that is not told so compares, and leaves the record as it found it until an epoch ends: one that is
//! told so can still use it. Before dsync itself writes to a device as to a replica, it notes in the stamps of the sources on it that
//! their records do not hold (`source/src/record/overwritten.rs`): nobody's word overrides that. From one step of a demotion to the next, also where
//! another process completes it, the record of a device holds as long as the kernel has counted no write (`DeviceTrust`). Every failed check
//! becomes a gap in the history.
//!
//! An epoch makes the image durable with its times, and the stamp keeps its time of change (`durable`): an image that bears an earlier
//! one was rolled back, whatever a power cut may have taken. Where a file is a disk in use (it was ever served or tracked, or is one of a
//! VM), one that is older than its record, or another in its place, is no disk to bring its replicas up to date from: sync, mirror and
//! `verify --repair` refuse it until its user says that it is the source as it is (`--accept-source`). After a power cut, which may take the
//! times of a day, it has to be older by more. What was refused stays so, whatever
//! is written to it. Any other file, such as a dump, is compared. A disk that dsync
//! itself has restored is refused in the same way (`source/src/record/overwritten.rs`).
//!
//! Four cases cannot be detected from outside:
//!
//! - a write to a replica's file whose time of the content (mtime) was set back afterwards, to the nanosecond. That a file's owner, mode,
//!   name or links alone were changed is told by this time, where it is finer than a millisecond and not of a file system in memory;
//!   elsewhere, and between the batches of a mirror, it counts as a write;
//! - a write by another program among writes through the server;
//! - one within 50 ms after the server was killed while writes were in flight. The server records the time every few milliseconds while
//!   writes are in flight; later changes of the image are detected;
//! - one within some seconds before a power cut, after a clean stop of the server, or to a replica's file. A file's content may become
//!   durable before its times do: at once with `O_DIRECT`, or when the system writes the page back before the file system commits its
//!   journal. After the power cut the file then has the new content and the old times. `fsync` by the writer makes both durable.

use std::path::Path;

use device::{Boot, Disk, DiskKind, Folder, Identity, Life, StateFile, WriteCounts};
use extents::Bitmap;
use serde::{Deserialize, Serialize};
use trackers::TrackedDisk;

use crate::{Gap, SourceError};

const NAME: &str = "stamp";

/// When the record of a block device is trusted across a stop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceTrust {
    /// Never: other hosts may share its medium, and write to that.
    #[default]
    Never,
    /// If this kernel has counted no write to it since: for the steps of one command, and for completing a command that has ended its source.
    Counted,
    /// Its user says that nothing else wrote to it.
    Said,
}

impl DeviceTrust {
    /// By what its user says.
    pub fn of(said: bool) -> DeviceTrust {
        if said { DeviceTrust::Said } else { DeviceTrust::Never }
    }
}

/// The state of the image when its record was last valid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ImageStamp {
    /// The record was closed; while a source is open this is false.
    pub clean: bool,
    /// Why changes were lost since the last checkpoint; to be written into the history as a gap.
    pub lost: Option<Gap>,
    /// The image at that moment.
    pub identity: Identity,
    /// The boot in which the stamp was taken, and the diskseqs beneath the image and its state.
    pub boot: String,
    /// The number of the history's last epoch at that moment. A history that ends earlier has lost what the record of
    /// today does not hold.
    pub epoch: u64,
    /// Bytes that the source had before it shrank, until an epoch of its new size is in the history: a command that was
    /// allowed to read the smaller one, and failed, has not agreed to it for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub larger: Option<u64>,
    /// Of a block device the kernel's count of writes when the record was closed or, while it is open to be read, when that was opened. `None`
    /// where there is none, and while it is served: then own writes are counted as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<WriteCounts>,
    /// The record was believed, or an epoch has ended since: what the count shows it to have, it has.
    #[serde(default)]
    pub proven: bool,
    /// Bytes of the blocks that the record had when it was closed: it has no checksum, because it is written through a mapping. `None` while a
    /// source is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub marked: Option<u64>,
    /// The times of a file at its last epoch.
    #[serde(flatten)]
    pub durable: DurableTimes,
    /// It was served once: it is a disk in use, and no dump that is made anew now and then.
    pub served: bool,
    /// It is a disk in use for another reason: it was tracked by clones once, is a disk of a VM, or took over from another one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_use: bool,
    /// The file at the source's path, where a moment of it was read elsewhere: then the identity is not that of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<FileMark>,
    /// When the file of this stamp was made, in nanoseconds since 1970, as far as its file system tells: in another one it is a copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub born: Option<i64>,
}

/// The times that a file had at its last epoch, which were durable with its content, in nanoseconds since 1970; 0 where they are not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DurableTimes {
    /// Of its change: a power cut leaves it none that is earlier.
    #[serde(rename = "durable", default, skip_serializing_if = "is_unknown")]
    pub changed: i64,
    /// Of its content: only others set it back.
    #[serde(rename = "durable_content", default, skip_serializing_if = "is_unknown")]
    pub content: i64,
}

/// Which file is at a path, and when it was written to last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileMark {
    ino: u64,
    /// In nanoseconds since 1970; `None` where the file system does not tell. A number may be that of another file that is gone.
    born_ns: Option<i64>,
    /// In nanoseconds since 1970.
    mtime_ns: i64,
    /// The id of the boot in which it was looked at.
    boot: String,
}

/// Some file systems tell no more of a time.
const A_SECOND: i64 = 1_000_000_000;
/// A file system may keep times in memory for as long, which a power cut takes with it (`lazytime`).
const IN_MEMORY_NS: i64 = 24 * 3600 * 1_000_000_000;

impl FileMark {
    /// Looks at the file at a path; `None` if there is none.
    pub(crate) fn of(path: &Path) -> Option<FileMark> {
        let found = device::identity(path).ok().filter(|found| found.kind == DiskKind::File)?;
        let Identity { ino, born_ns, mtime_ns, .. } = found;
        Some(FileMark { ino, born_ns, mtime_ns, boot: Boot::of(&[path]).id })
    }

    /// The mark of the file at a path. Where each write was told, the file is the one before, whatever is at the path by now: who writes holds it.
    pub(crate) fn next(before: Option<FileMark>, path: &Path) -> Option<FileMark> {
        before.filter(|before| before.other(path, true).is_some()).or_else(|| FileMark::of(path))
    }

    /// That the file at a path is older than this one, or another one whose content is not that of this one by its times: others have put a backup in its
    /// place. Only of a disk in use another one is no newer version of it.
    fn other(&self, path: &Path, in_use: bool) -> Option<Gap> {
        let now = FileMark::of(path)?;
        let lost = if now.boot == self.boot { 0 } else { IN_MEMORY_NS };
        let is_older = now.mtime_ns.saturating_add(lost) < self.mtime_ns;
        let is_another = match (now.born_ns, self.born_ns) {
            (Some(now), Some(then)) => now != then,
            // Some file systems number their files anew at each mount.
            _ => now.ino != self.ino && now.boot == self.boot,
        };
        let moved = in_use && is_another && now.mtime_ns != self.mtime_ns;
        let place = if moved { IN_ITS_PLACE } else { "" };
        (is_older || moved).then(|| other_content(place, now.mtime_ns, self.mtime_ns))
    }
}

/// What is said of another file.
const IN_ITS_PLACE: &str = "another file is in its place, ";

fn is_unknown(time: &i64) -> bool {
    *time == 0
}

/// That a file was written to last at the first of these times, and something of it recorded at the second, in nanoseconds since 1970.
pub(crate) fn other_content(place: &str, written: i64, recorded: i64) -> Gap {
    let at = |time: i64| device::moment((time.max(0) / 1_000_000_000) as u64);
    let age = match (recorded - written) / 1_000_000_000 {
        0 => "at about the same time as".to_owned(),
        seconds if seconds > 0 => format!("{} before", device::human_time(seconds.unsigned_abs())),
        seconds => format!("{} after", device::human_time(seconds.unsigned_abs())),
    };
    Gap::OtherContent(format!(
        "{place}written to last on {}, {age} what was recorded ({})",
        at(written),
        at(recorded)
    ))
}

/// What the next process finds of the last write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastWrite {
    /// Nanoseconds since 1970, and a tick of the clock that stamps the image; see [`trackers::LastWriteTime`].
    pub time: u64,
    /// Writes were in flight when the process died: the image may have been changed by them a little later.
    pub in_flight: bool,
    /// The image's time of change at the process's last check; 0 if there was none.
    pub seen: u64,
    /// The process saw that others had changed the image.
    pub foreign: bool,
    /// Of a block device, the kernel's count of writes now.
    pub written: Option<WriteCounts>,
}

/// Why the record of a block device is not believed.
const UNPROVEN: &str =
    "the block device may have been written to while it was not served (pass --trust-device if it was not)";
/// The loss where another disk may have the name of the block device.
pub(crate) const UNNAMED: &str = "the machine was started, or the device attached anew, and nothing shows that it is the same disk, as it has no identifier (such \
     as a serial number)";
/// The loss behind an NBD server: it may also show another moment, or another disk, under the same name.
pub(crate) const UNRECORDED: &str = "it is behind an NBD server, where nobody records writes";
/// The loss where the kernel has counted writes since: of others, or of dsync with a later state than this one, which is a copy.
const UNSERVED: &str = "the block device was written to after this state of it was saved";
/// The loss of a device, about which only its user would know.
pub(crate) const COPIED: &str = "its state was copied or restored from a copy, and nothing shows what was written to the block device since";
/// The loss after a write that bypassed the server.
pub(crate) const FOREIGN: &str = "the image was changed by another program while dsync had it open";
/// The loss if the image is older than its history.
const SET_BACK: &str = "the image was reset to an earlier state, from before its last epoch";
/// The loss if something else is at the path now.
pub(crate) const REPLACED: &str = "another file or device is in its place";

/// The result of checking a stamp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StampVerdict {
    /// There is no record yet.
    New,
    /// The record is valid.
    Trusted { power_lost: bool },
    /// The record is valid if nothing wrote to the device while dsync did not hold it, which nobody has said: why it is not believed.
    Unproven { why: Gap, power_lost: bool },
    /// The record is not valid.
    Lost(Gap),
}

impl StampVerdict {
    /// Whether the record is used, which one that is not proven is only if it is `spared`; and whether power was lost since.
    pub(crate) fn trusted(&self, spared: bool) -> (bool, bool) {
        match self {
            StampVerdict::Trusted { power_lost } => (true, *power_lost),
            StampVerdict::Unproven { power_lost, .. } if spared => (true, *power_lost),
            _ => (false, false),
        }
    }

    /// Why what was written is not known.
    pub(crate) fn loss(&self) -> Option<Gap> {
        match self {
            StampVerdict::Lost(why) | StampVerdict::Unproven { why, .. } => Some(why.clone()),
            StampVerdict::New => Some("the source was not tracked before".into()),
            StampVerdict::Trusted { .. } => None,
        }
    }
}

/// Bytes of these blocks of a disk.
pub(crate) fn bytes_of(blocks: &Bitmap, disk: &TrackedDisk) -> u64 {
    let size = u64::from(disk.block_size());
    blocks.runs().map(|run| (run.end * size).min(disk.len()).saturating_sub(run.start * size)).sum()
}

impl ImageStamp {
    pub(crate) fn read(folder: &dyn Folder) -> Result<Option<ImageStamp>, SourceError> {
        crate::record::json::read_json(folder, NAME)
    }

    /// True for a disk in use, of which no older content is taken without a word.
    pub(crate) fn is_in_use(&self) -> bool {
        self.served || self.in_use
    }

    /// Removes the stamp, which is no longer valid.
    pub(crate) fn forget(folder: &dyn Folder) -> Result<(), SourceError> {
        let gone = folder.remove(NAME).and_then(|()| folder.sync());
        gone.map_err(SourceError::state("remove a stamp in", folder.path()))
    }

    /// Notes that dsync writes to the disk as to a replica: its record does not hold any more, and what is in its place is no backup. Durable on
    /// return.
    pub(crate) fn overwritten(folder: &dyn Folder) -> Result<(), SourceError> {
        match ImageStamp::read(folder)? {
            Some(stamp) if stamp.lost != Some(Gap::AsReplica) => {
                ImageStamp { lost: Some(Gap::AsReplica), ..stamp }.store(folder)
            }
            // There is none to be trusted.
            _ => Ok(()),
        }
    }

    /// Why the record of a disk that was opened with it is not believed.
    pub(crate) fn damage(&self, disk: &TrackedDisk, now: &Identity) -> Result<Option<Gap>, SourceError> {
        let marked = bytes_of(&disk.dirty().map_err(SourceError::memory(&now.path))?, disk);
        // More is what it may have in larger blocks than before, and misses nothing.
        let then = self.marked.filter(|then| self.identity.size == now.size && *then > marked);
        let why = |then| {
            let [then, now] = [then, marked].map(device::exact_size);
            format!(
                "the record in the state directory is damaged: it had {then} of changed blocks, and now has {now}"
            )
        };
        Ok(then.map(|then| why(then).into()))
    }

    /// True of one whose content is not what was recorded last.
    fn is_other(&self) -> bool {
        matches!(self.lost, Some(Gap::OtherContent(_)))
    }

    /// Puts it in place of the folder's. With the first one of another content the source `leaves` the way on which its replicas are, before that is
    /// noted: it is noticed once.
    pub(crate) fn write(
        &self,
        folder: &dyn Folder,
        leaves: impl FnOnce(&dyn Folder) -> Result<(), SourceError>,
    ) -> Result<(), SourceError> {
        if self.is_other() && !ImageStamp::read(folder)?.is_some_and(|before| before.is_other()) {
            leaves(folder)?;
        }
        self.store(folder)
    }

    fn store(&self, folder: &dyn Folder) -> Result<(), SourceError> {
        let stored = |file: &dyn StateFile| {
            let stamp = ImageStamp { born: file.born_ns(), ..self.clone() };
            serde_json::to_vec_pretty(&stamp).map_err(std::io::Error::from)
        };
        let failed = SourceError::state("write a stamp in", folder.path());
        device::replace_with(folder, NAME, stored).map_err(failed)
    }

    /// True of one that was copied, or restored from a copy, with the state that it is in: what was written since is in none of that.
    pub(crate) fn is_copied(&self, folder: &dyn Folder) -> bool {
        let is = folder.open(NAME, false).ok().and_then(|file| file.born_ns());
        self.born.zip(is).is_some_and(|(was, is)| was != is)
    }

    /// What there is to say of the file of a disk in use whose times show that its content is not what this record ends with. `wrote`: when it
    /// was written to last through its server, in nanoseconds since 1970; `seen`: its time of change when it was looked at last, 0 if it never was. Of a
    /// device nothing tells.
    pub(crate) fn other(&self, now: &Identity, boot: &Boot, wrote: u64, seen: u64) -> Option<Gap> {
        // Until its user has said that it is wanted.
        if let Some(other @ Gap::OtherContent(_)) = &self.lost {
            return Some(other.clone());
        }
        let then = &self.identity;
        // What dsync has put in its place itself may be another file, and is no older one.
        if self.lost == Some(Gap::AsReplica) {
            let before = self.file.as_ref().map_or(then.mtime_ns, |file| file.mtime_ns);
            let is_older = self.is_in_use() && !now.is_block() && now.mtime_ns < before;
            return is_older.then(|| other_content("", now.mtime_ns, before));
        }
        if let Some(file) = &self.file {
            return file.other(&now.path, self.is_in_use());
        }
        if !self.is_in_use() || now.is_block() || then.kind == DiskKind::Export {
            return None;
        }
        let moved = then.kind != now.kind || !then.same_birth(now).unwrap_or(then.ino == now.ino);
        let (recorded, older) = match self.clean {
            true => (then.mtime_ns, now.mtime_ns < then.mtime_ns || now.ctime_ns < then.ctime_ns),
            // Unless the clock was set back. A power cut takes the times that were not durable when the disk was opened.
            false => {
                let set_back = now.ctime_ns < self.durable.changed && wrote as i64 >= self.durable.changed;
                let recorded = then.mtime_ns.max(wrote as i64);
                // Own writes bear their time, also where the clock was set back: what is older than the last of them is not own.
                let before_own = |time: i64, known: i64| {
                    known != 0
                        && time.saturating_add(A_SECOND)
                            < if wrote == 0 { known } else { known.min(wrote as i64) }
                };
                let is_restored = before_own(now.mtime_ns, self.durable.content);
                let before = match boot.life(&self.boot) {
                    Life::This => now.mtime_ns < then.mtime_ns || before_own(now.ctime_ns, seen as i64),
                    _ => now.mtime_ns.saturating_add(IN_MEMORY_NS) < recorded,
                };
                (recorded, set_back || before || is_restored)
            }
        };
        // A copy that took its times along has what it had.
        let same = self.clean && now.mtime_ns == then.mtime_ns && now.size == then.size;
        if same && now.ctime_ns >= then.ctime_ns || !moved && !older {
            return None;
        }
        Some(other_content(if moved { IN_ITS_PLACE } else { "" }, now.mtime_ns, recorded))
    }

    /// Whether the record of this stamp can be trusted for the image as it is.
    pub(crate) fn verdict(
        &self,
        now: &Identity,
        boot: &Boot,
        last: LastWrite,
        trust: DeviceTrust,
    ) -> StampVerdict {
        if let Some(why) = &self.lost {
            return StampVerdict::Lost(why.clone());
        }
        if last.foreign {
            return StampVerdict::Lost(FOREIGN.into());
        }
        if !self.identity.same_object(now) {
            return StampVerdict::Lost(REPLACED.into());
        }
        if now.kind == DiskKind::Export {
            return StampVerdict::Lost(UNRECORDED.into());
        }
        let life = boot.life(&self.boot);
        if now.is_block() {
            let power_lost = !self.clean && life != Life::This;
            let counts = self.written.zip(last.written).filter(|_| life == Life::This);
            let has_moved = counts.map(|(then, now)| then.has_moved(&now));
            if has_moved == Some(true) {
                return StampVerdict::Lost(UNSERVED.into());
            }
            let is_trusted = match trust {
                DeviceTrust::Never => false,
                DeviceTrust::Counted => self.proven && has_moved == Some(false),
                DeviceTrust::Said => true,
            };
            return match is_trusted {
                true => StampVerdict::Trusted { power_lost },
                false => StampVerdict::Unproven { why: UNPROVEN.into(), power_lost },
            };
        }
        if self.clean {
            return if self.identity == *now {
                StampVerdict::Trusted { power_lost: false }
            } else {
                StampVerdict::Lost("the image was changed while it was not served".into())
            };
        }
        if self.identity.size != now.size {
            return StampVerdict::Lost("the image was resized while it was not served".into());
        }
        // What the history has, the record does not: an image from before that cannot be brought up to date by either.
        if now.ctime_ns < self.durable.changed {
            return StampVerdict::Lost(SET_BACK.into());
        }
        self.unclean_verdict(now, boot, life, last)
    }

    /// Whether the record can be trusted after an unclean stop, by the times of the image: the last write to it must have been our own. Its time
    /// is noted just before it goes down, in memory that outlives the process but not the kernel.
    fn unclean_verdict(&self, now: &Identity, boot: &Boot, life: Life, last: LastWrite) -> StampVerdict {
        let changed = now.ctime_ns.max(0) as u64;
        // A time of whole seconds stands for all of its second.
        let at_latest = changed.saturating_add(device::grain(now.ctime_ns) as u64 - 1);
        let slack = match life {
            Life::This if last.in_flight => Boot::DYING,
            Life::This => 0,
            _ => Boot::LATE,
        };
        let written = last.time.saturating_add(slack);
        // A stamp that was taken within that second does not tell what came later in it.
        let untouched = self.identity.ctime_ns == now.ctime_ns && (at_latest == changed || written < changed);
        if life == Life::This {
            // Not so after a power cut: then a file's time may be older than its content.
            if changed < last.seen {
                return StampVerdict::Lost(
                    "after its server was killed, the image was reset to an earlier state".into(),
                );
            }
            // The process saw others change the image, and the history has that gap: nothing has changed it since.
            let settled = changed == last.seen;
            if untouched || settled || at_latest <= written {
                return StampVerdict::Trusted { power_lost: false };
            }
            return StampVerdict::Lost(
                "after its server was killed, the image was changed by another program".into(),
            );
        }
        if untouched || (at_latest <= written && at_latest < boot.began) {
            return StampVerdict::Trusted { power_lost: true };
        }
        StampVerdict::Lost(match life {
            Life::Detached => {
                "its disk, or that of the state directory, was detached while dsync had it open".into()
            }
            _ => "after the power cut, the image was changed by another program".into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stamp of a disk that is served, as its opening in this boot took it.
    fn unclean(identity: Identity, boot: &str) -> ImageStamp {
        ImageStamp {
            clean: false,
            lost: None,
            identity,
            boot: boot.into(),
            epoch: 1,
            larger: None,
            written: None,
            proven: true,
            marked: None,
            durable: DurableTimes::default(),
            served: true,
            in_use: false,
            file: None,
            born: None,
        }
    }

    #[test]
    fn a_device_is_as_it_was_while_the_kernel_has_counted_no_write() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let now = Identity { kind: DiskKind::Block, ..device::identity(file.path()).unwrap() };
        let count = |sectors| Some(WriteCounts { sectors, ..WriteCounts::default() });
        let last = LastWrite { time: 0, in_flight: false, seen: 0, foreign: false, written: count(7) };
        let known = ImageStamp { written: count(7), ..unclean(now.clone(), "this one") };
        let of = |stamp: &ImageStamp, boot: &str, last, trust| {
            let verdict = stamp.verdict(&now, &Boot { id: boot.into(), began: 0 }, last, trust);
            matches!(verdict, StampVerdict::Trusted { .. })
        };
        let here = "this one";
        for clean in [true, false] {
            let stamp = ImageStamp { clean, ..known.clone() };
            assert!(of(&stamp, here, last, DeviceTrust::Counted));
            assert!(!of(&stamp, here, last, DeviceTrust::Never), "other hosts may write to it");
            // Nothing has counted, all has been counted, or it was not known then.
            assert!(!of(&stamp, "another", last, DeviceTrust::Counted));
            assert!(!of(&stamp, here, LastWrite { written: count(8), ..last }, DeviceTrust::Counted));
            assert!(!of(&ImageStamp { proven: false, ..stamp }, here, last, DeviceTrust::Counted));
        }
        // Nobody's word holds against the count.
        for clean in [true, false] {
            let stamp = ImageStamp { clean, ..known.clone() };
            assert!(!of(&stamp, here, LastWrite { written: count(8), ..last }, DeviceTrust::Said));
        }
        let uncounted = LastWrite { written: None, ..last };
        assert!(!of(&ImageStamp { written: None, ..known }, here, uncounted, DeviceTrust::Counted));
    }

    #[test]
    fn after_a_kill_the_image_is_no_older_than_it_was_seen() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let now = device::identity(file.path()).unwrap();
        let changed = now.ctime_ns as u64;
        let boot = Boot { id: "this one".into(), began: 0 };
        let stamp = |ctime_ns| unclean(Identity { ctime_ns, ..now.clone() }, &boot.id);
        let last = |seen| LastWrite { time: changed, in_flight: false, seen, foreign: false, written: None };
        let trusted = StampVerdict::Trusted { power_lost: false };
        assert_eq!(stamp(1).verdict(&now, &boot, last(changed), DeviceTrust::Never), trusted);
        // Rolled back, even to the very state that was opened; or written to after the clock was set back.
        for opened in [1, now.ctime_ns] {
            let verdict = stamp(opened).verdict(&now, &boot, last(changed + 1), DeviceTrust::Never);
            assert!(
                matches!(&verdict, StampVerdict::Lost(why) if why.to_string().contains("earlier state")),
                "{verdict:?}"
            );
        }
        let seen = LastWrite { foreign: true, ..last(changed) };
        assert_eq!(
            stamp(1).verdict(&now, &boot, seen, DeviceTrust::Never),
            StampVerdict::Lost(FOREIGN.into())
        );
        // A change by others later than every own write: compared, and nothing since; and one that nobody has seen.
        let late = |seen| LastWrite { time: changed - 1, ..last(seen) };
        assert_eq!(stamp(1).verdict(&now, &boot, late(changed), DeviceTrust::Never), trusted);
        let verdict = stamp(1).verdict(&now, &boot, late(changed - 1), DeviceTrust::Never);
        assert!(
            matches!(&verdict, StampVerdict::Lost(why) if why.to_string().contains("another program")),
            "{verdict:?}"
        );
    }

    /// A file system that stamps to the second stamps others' writes as own ones of the same second.
    #[test]
    fn a_time_of_whole_seconds_stands_for_its_second() {
        const SECOND: u64 = 1_000_000_000;
        let file = tempfile::NamedTempFile::new().unwrap();
        // No even one, which could be of two seconds.
        let changed = 1_700_000_001 * SECOND;
        let now = Identity { ctime_ns: changed as i64, ..device::identity(file.path()).unwrap() };
        let boot = Boot { id: "this one".into(), began: u64::MAX };
        for life in [&boot.id, "an earlier one"] {
            for (opened, time, seen, trusted) in [
                (1, changed + SECOND / 2, 0, false),
                (1, changed + SECOND, 0, true),
                (1, changed + SECOND / 2, changed, true),
                // An epoch or an opening has stamped it in that second; the latter before anything was written.
                (now.ctime_ns, changed + SECOND / 2, 0, false),
                (now.ctime_ns, 0, 0, true),
            ] {
                // After a power cut a note may be some seconds late.
                let late = if life == boot.id { 0 } else { Boot::LATE };
                let time = u64::saturating_sub(time, late);
                let last = LastWrite { time, in_flight: false, seen, foreign: false, written: None };
                let stamp = unclean(Identity { ctime_ns: opened, ..now.clone() }, life);
                let verdict = stamp.verdict(&now, &boot, last, DeviceTrust::Never);
                let expected = trusted && (seen == 0 || life == boot.id);
                if matches!(verdict, StampVerdict::Trusted { .. }) != expected {
                    panic!("{life}, opened at {opened}, written at {time}, seen at {seen}: {verdict:?}");
                }
            }
        }
    }

    /// A power cut may take what was not flushed, and nothing that an epoch has made durable.
    #[test]
    fn no_power_cut_leaves_an_image_from_before_its_last_epoch() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let now = device::identity(file.path()).unwrap();
        let changed = now.ctime_ns as u64;
        let boot = Boot { id: "this one".into(), began: u64::MAX };
        let last = LastWrite { time: changed, in_flight: false, seen: 0, foreign: false, written: None };
        for (opened, life) in [(1, "this one"), (1, "an earlier one"), (now.ctime_ns, "an earlier one")] {
            let verdict = |changed| {
                let opened = Identity { ctime_ns: opened, ..now.clone() };
                let stamp =
                    ImageStamp { durable: DurableTimes { changed, content: 0 }, ..unclean(opened, life) };
                stamp.verdict(&now, &boot, last, DeviceTrust::Never)
            };
            assert!(matches!(verdict(now.ctime_ns), StampVerdict::Trusted { .. }), "{life}");
            assert_eq!(verdict(now.ctime_ns + 1), StampVerdict::Lost(SET_BACK.into()), "{life}");
        }
    }

    #[test]
    fn a_disk_in_use_is_no_older_than_its_record() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let now = device::identity(file.path()).unwrap();
        let (stamped, hour) = (now.ctime_ns, 3_600_000_000_000);
        let boot = Boot { id: "this one".into(), began: 0 };
        let stamp = |clean, identity: &Identity| ImageStamp {
            clean,
            durable: DurableTimes { changed: if clean { 0 } else { identity.ctime_ns }, content: 0 },
            ..unclean(identity.clone(), &boot.id)
        };
        let at = |time| Identity { mtime_ns: time, ctime_ns: time, ..now.clone() };
        let moved = |time| Identity { ino: now.ino + 1, born_ns: None, ..at(time) };
        for clean in [true, false] {
            let other = |then: &Identity| stamp(clean, then).other(&now, &boot, then.ctime_ns as u64, 0);
            // What was written since, and what was copied with its times.
            assert_eq!(other(&at(stamped)), None, "{clean}");
            assert_eq!(other(&at(stamped - hour)), None, "{clean}");
            assert_eq!(other(&moved(stamped)).is_some(), !clean);
            // The inode may be used again, or be numbered anew.
            let born = |born_ns| Identity { born_ns, ..at(stamped - hour) };
            assert!(other(&born(now.born_ns.map(|born| born - 1))).is_some() && other(&born(None)).is_none());
            assert!(
                other(&moved(stamped - hour)).is_some_and(|why| why.to_string().contains("after what")),
                "{clean}"
            );
            // What dsync has put there may be another file, and is no older one.
            for (then, is_older) in [(moved(stamped - hour), false), (at(stamped + hour), true)] {
                let replica = ImageStamp { lost: Some(Gap::AsReplica), ..stamp(clean, &then) };
                assert_eq!(replica.other(&now, &boot, 0, 0).is_some(), is_older);
            }
            for then in [at(stamped + 3 * hour), moved(stamped + 3 * hour)] {
                let why = other(&then).unwrap();
                assert!(why.to_string().contains("3 h before what was recorded"), "{why}");
                // Whether or not its changes are known.
                let lost = Some(Gap::Damaged);
                assert!(ImageStamp { lost, ..stamp(clean, &then) }.other(&now, &boot, 0, 0).is_some());
                // Read from an export meanwhile.
                let export = Identity { kind: DiskKind::Export, ..then.clone() };
                assert_eq!(other(&export), None);
                // A dump.
                assert_eq!(
                    ImageStamp { served: false, ..stamp(clean, &then) }.other(&now, &boot, 0, 0),
                    None
                );
            }
        }
        // A clock that was set back while the disk was served.
        let ahead = Identity { ctime_ns: stamped + hour, ..now.clone() };
        assert_eq!(stamp(false, &ahead).other(&now, &boot, stamped as u64, 0), None);
        // Times that were not durable yet when the power went.
        let later = Boot { id: "another".into(), began: u64::MAX };
        let opened = ImageStamp {
            durable: DurableTimes { changed: stamped, content: 0 },
            ..stamp(false, &at(stamped + hour))
        };
        assert_eq!(opened.other(&now, &later, (stamped + hour) as u64, 0), None);
        assert!(opened.other(&now, &boot, (stamped + hour) as u64, 0).is_some());
        // Its content is older than at the last epoch, whatever a power cut has taken, and then than the last own write.
        let ended = ImageStamp {
            durable: DurableTimes { content: stamped + 2 * hour, ..opened.durable },
            ..opened.clone()
        };
        for boot in [&boot, &later] {
            let ended = ImageStamp { identity: at(stamped), ..ended.clone() };
            assert!(ended.other(&now, boot, (stamped + 3 * hour) as u64, 0).is_some());
            assert_eq!(ended.other(&now, boot, stamped as u64, 0), None, "the clock was set back");
        }
        // So is one that was seen with a later time.
        let seen = (stamped + hour) as u64;
        let opened_then = ImageStamp { durable: DurableTimes::default(), ..stamp(false, &at(stamped)) };
        assert!(opened_then.other(&now, &boot, seen, seen).is_some());
        assert_eq!(opened_then.other(&now, &later, seen, seen), None);
        // Older than a power cut makes it.
        assert!(opened.other(&now, &later, (stamped + 25 * hour) as u64, 0).is_some());
    }

    /// After a power cut nothing of the new boot is an own write, however late the note of the last one may be.
    #[test]
    fn what_changed_since_the_reboot_is_no_own_write() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let now = device::identity(file.path()).unwrap();
        let changed = now.ctime_ns as u64;
        let last = LastWrite { time: changed, in_flight: false, seen: 0, foreign: false, written: None };
        let stamp = unclean(Identity { ctime_ns: 1, ..now.clone() }, "an earlier one");
        let verdict =
            |began| stamp.verdict(&now, &Boot { id: "this one".into(), began }, last, DeviceTrust::Never);
        assert_eq!(verdict(changed + 1), StampVerdict::Trusted { power_lost: true });
        assert!(
            matches!(verdict(changed), StampVerdict::Lost(why) if why.to_string().contains("after the power cut"))
        );
    }
}
