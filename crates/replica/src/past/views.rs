//! What is kept for the readers of a replica while others commit to it: for each the blocks that were replaced since its moment, in a
//! log of its own, `view-ID`. A reader makes the file with its claim in the head, and holds a lock on it as long as it lives; who
//! commits appends what is about to be replaced, *then* says in the head how far the log reaches, *then* writes to the destination.
//!
//! A reader reads the destination *first*, and then the log. If a block that it has read was already overwritten, the log holds it, and
//! holds it as it was at the reader's moment; if the log does not, what was read is of that moment. So neither waits for the other.
//! Nothing is synced: no reader outlives a power cut.
//!
//! Whatever fails for a reader ends its log, never the commit: the head says that it is lost before the first block is
//! overwritten that was not kept, or the log has no name any more, which says the same. The logs give way first where space is
//! short: a commit that needs it waits until the readers have let go of what they held.
//!
//! Recovery appends what its journal touches before it merges again. A copy that is put in place by a rename needs no log: the reader has
//! the old file open. A log whose reader is gone is removed by the next commit, within a second by a mirror.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering::SeqCst, fence};
use std::time::{Duration, Instant};

use delta::{Epoch, Header, Method};
use device::{Dir, Disk, Folder, StateFile};
use rustix::fs::{FlockOperation, OFlags, flock};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;
use uuid::Uuid;

use crate::past::present::{Present, Shown, ShownResult};
use crate::past::saving::Saving;

/// What the names of logs begin with.
pub(crate) const NAME: &str = "view-";
/// Bytes of a log's head: how far it reaches, why it was lost, and the claim of its reader.
pub(crate) const HEAD: u64 = 4096;
/// Where the head says that it is lost, and why, and where the claim is. How far it reaches is written elsewhere than that it is lost:
/// the one never takes the other back.
const LOST: u64 = 8;
const WHY: u64 = 16;
/// Where a reader says, after it lost, that it holds nothing any more.
const LET_GO: u64 = 496;
const CLAIM: u64 = 512;
/// Where the reader says what it reads, for people: a commit does not look there.
const ABOUT: u64 = 2560;
/// How long it is waited for readers that have lost to let go. A reader looks twice a second.
const LETS_GO_WITHIN: Duration = Duration::from_secs(5);
/// How often it is looked whether they have let go.
const POLL_EVERY: Duration = Duration::from_millis(5);
/// How often it is looked whether readers live.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Puts a text between two places of a head, with its length, and a hash that shows whether it is whole.
fn put(head: &mut Vec<u8>, text: &[u8], (from, to): (u64, u64)) -> io::Result<()> {
    head.resize(from as usize, 0);
    head.extend(XxHash3_128::oneshot(text).to_le_bytes());
    head.extend((text.len() as u32).to_le_bytes());
    head.extend(text);
    if head.len() as u64 > to {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    head.resize(to as usize, 0);
    Ok(())
}

/// The text at a place of a head; `None` if there is none yet.
fn text_at(head: &[u8], from: u64) -> Option<&[u8]> {
    let (hash, rest) = head.get(from as usize..)?.split_at_checked(16)?;
    let (len, rest) = rest.split_at_checked(4)?;
    let text = rest.get(..u32::from_le_bytes(len.try_into().ok()?) as usize)?;
    (XxHash3_128::oneshot(text).to_le_bytes() == *hash).then_some(text)
}

/// What a reader claims.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    pub shown: Shown,
    /// For messages.
    pub process: u32,
}

impl Claim {
    /// The head of a log that begins.
    pub(crate) fn head(&self) -> io::Result<Vec<u8>> {
        let mut head = HEAD.to_le_bytes().to_vec();
        put(&mut head, &serde_json::to_vec(self)?, (CLAIM, ABOUT))?;
        head.resize(HEAD as usize, 0);
        Ok(head)
    }

    /// The claim of a head; `None` if there is none yet.
    fn of(head: &[u8]) -> Option<Claim> {
        serde_json::from_slice(text_at(head, CLAIM)?).ok()
    }
}

/// What a reader says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReaderInfo {
    pub process: u32,
    /// When it began, in seconds since 1970.
    pub since: u64,
    /// The epoch that it reads, or the one before what it reads.
    pub epoch: Epoch,
    pub ahead: bool,
    /// When the replica came to that, in seconds since 1970, if it is known.
    pub at: Option<u64>,
    /// Bytes of its scratch file.
    pub scratch: u64,
}

impl ReaderInfo {
    /// Writes what a reader says of itself to the head of a log.
    pub(crate) fn tell(&self, file: &File) -> io::Result<()> {
        let mut text = Vec::new();
        put(&mut text, &serde_json::to_vec(self)?, (0, HEAD - ABOUT))?;
        file.write_all_at(&text, ABOUT)
    }
}

/// A reader of a replica at a moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplicaReader {
    /// The id of its process.
    pub process: u32,
    /// When it began, in seconds since 1970.
    pub since: u64,
    /// The number of the epoch that it reads, or of the one before what it reads.
    pub epoch: u64,
    /// It reads a moment after that epoch, to which a mirror had brought the replica.
    pub ahead: bool,
    /// When the replica came to what is read, in seconds since 1970, if that is known.
    pub at: Option<u64>,
    /// Why it can read no more; `None` while it can.
    pub lost: Option<String>,
    /// Bytes that are kept for it beside the replica: what commits have replaced, and what its clients have written.
    pub bytes: u64,
}

/// The readers of the replica of a folder, those of the oldest epoch first. Takes no lock.
pub(crate) fn readers(folder: &Path) -> io::Result<Vec<ReplicaReader>> {
    // Those that end just now are none.
    let mut readers: Vec<ReplicaReader> =
        logs(&Dir::existing(folder)?)?.filter_map(|log| reader(&log.ok()?)).collect();
    readers.sort_by_key(|reader| (reader.epoch, reader.since, reader.process));
    Ok(readers)
}

/// The names of the logs in a folder.
fn names(folder: &dyn Folder) -> io::Result<impl Iterator<Item = String>> {
    Ok(folder.list()?.into_iter().filter(|name| name.starts_with(NAME)))
}

/// The logs in a folder, opened to be looked at and locked.
fn logs(folder: &dyn Folder) -> io::Result<impl Iterator<Item = io::Result<File>>> {
    Ok(names(folder)?.map(|name| probe(folder, &name)))
}

/// Opens a log by itself, as a lock belongs to an opening.
fn probe(folder: &dyn Folder, name: &str) -> io::Result<File> {
    Dir::existing(folder.path())?.file(name, OFlags::RDONLY, 0)
}

fn reader(log: &File) -> Option<ReplicaReader> {
    let mut head = vec![0; HEAD as usize];
    log.read_exact_at(&mut head, 0).ok()?;
    let about: ReaderInfo = serde_json::from_slice(text_at(&head, ABOUT)?).ok()?;
    let kept = log.metadata().ok()?.len().saturating_sub(HEAD);
    let ReaderInfo { process, since, epoch, ahead, at, scratch } = about;
    let (lost, epoch) = (reach(log).err(), epoch.number);
    let bytes = if lost.is_some() { 0 } else { kept + scratch };
    (!is_gone(log)).then_some(ReplicaReader { process, since, epoch, ahead, at, lost, bytes })
}

/// How far a log reaches, or why it is lost.
pub(crate) fn reach(file: &File) -> Result<u64, String> {
    // G: after the destination was read.
    fence(SeqCst);
    let mut bytes = [0; WHY as usize];
    if file.read_exact_at(&mut bytes, 0).is_err() {
        return Err("what commits replaced could not be kept".into());
    }
    let (end, lost) = bytes.split_at(LOST as usize);
    // One that was removed is nobody's who commits any more, whatever it says.
    let removed = file.metadata().is_ok_and(|meta| meta.nlink() == 0);
    if lost.iter().all(|byte| *byte == 0) && !removed {
        return Ok(end.iter().rev().fold(0, |end, byte| end << 8 | u64::from(*byte)));
    }
    let mut why = vec![0; (LET_GO - WHY) as usize];
    let read = file.read_exact_at(&mut why, WHY);
    let why = String::from_utf8_lossy(&why).trim_end_matches('\0').to_owned();
    Err(if read.is_err() || why.is_empty() { "what commits replaced could not be kept".into() } else { why })
}

/// Says that the reader of a lost log holds nothing any more.
pub(crate) fn let_go(file: &File) -> io::Result<()> {
    file.write_all_at(&[1], LET_GO)
}

/// True if a reader holds nothing any more: it has said so, or is gone.
fn has_let_go(probe: &File) -> bool {
    let mut said = [0];
    probe.read_exact_at(&mut said, LET_GO).is_ok_and(|()| said != [0]) || is_gone(probe)
}

/// A reader's log, as a process that commits sees it.
struct ViewLog {
    name: String,
    saving: Saving,
    shown: Shown,
    /// The log, opened once more to see whether the reader lives.
    probe: File,
}

/// All that is kept for readers.
#[derive(Default)]
pub(crate) struct Views {
    /// Where it is said what the destination holds, as soon as that is something.
    folder: Option<Dir>,
    present: Option<Present>,
    logs: Vec<ViewLog>,
    looked: Option<Instant>,
    /// There may be readers that were not seen yet.
    unseen: bool,
}

impl Views {
    /// For a folder whose lock is held, whose destination may be half written until [`Views::rest`].
    pub(crate) fn of(folder: &Dir) -> io::Result<Views> {
        let present = Present::take(folder, false)?;
        Ok(Views { folder: Some(folder.clone()), present, ..Views::default() })
    }

    /// True if no reader is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.logs.is_empty()
    }

    /// The destination will be written to. Returns whether readers are to be looked for.
    pub(crate) fn begin(&mut self) -> io::Result<bool> {
        if let Some(present) = &mut self.present {
            self.unseen |= present.begin()?;
        }
        Ok(self.unseen)
    }

    /// The destination rests.
    pub(crate) fn rest(&mut self, held: ShownResult) {
        if let (None, Some(folder), Ok(_)) = (&self.present, &self.folder, &held) {
            self.present = Present::take(folder, true).unwrap_or_default();
        }
        // Where it cannot be said, readers wait.
        let _ = self.present.as_mut().map(|present| present.rest(held));
    }

    /// Looks for readers. Logs of readers that are gone are removed.
    pub(crate) fn look(
        &mut self,
        folder: &dyn Folder,
        disk: &dyn Fn() -> io::Result<Arc<dyn Disk>>,
    ) -> io::Result<()> {
        self.looked = Some(Instant::now());
        for name in names(folder)? {
            if self.logs.iter().any(|log| log.name == name) {
                continue;
            }
            match ViewLog::open(folder, &name, disk) {
                Ok(Some(log)) => self.logs.push(log),
                Ok(None) => {}
                Err(error) => {
                    lose(folder, &name, &format!("it could not be read: {error}"))?;
                }
            }
        }
        self.unseen = false;
        Ok(())
    }

    /// Forgets those of whom nothing is to be kept any more: the reader is gone, or reads another file than that of this inode.
    pub(crate) fn refresh(&mut self, folder: &dyn Folder, inode: u64) {
        self.logs.retain(|log| log.shown.inode == inode);
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return;
        }
        self.looked = Some(Instant::now());
        self.logs.retain(|log| {
            let gone = is_gone(&log.probe);
            if gone {
                let _ = folder.remove(&log.name);
            }
            !gone
        });
    }

    /// Keeps what is about to be replaced, for all readers.
    ///
    /// # Errors
    /// If something could be neither kept nor said to be lost.
    pub(crate) fn keep(
        &mut self,
        folder: &dyn Folder,
        replaced: &[Range<u64>],
        from: Uuid,
    ) -> io::Result<()> {
        let mut failed = Ok(());
        self.logs.retain_mut(|log| match log.keep(folder, replaced, from) {
            Ok(()) => true,
            Err(why) => {
                let lost = lose(folder, &log.name, &why);
                // Whoever is not told must not be forgotten.
                let told = lost.is_ok();
                failed = std::mem::replace(&mut failed, Ok(())).and(lost.map(drop));
                !told
            }
        });
        // F: a reader that sees what is written next sees what was kept.
        fence(SeqCst);
        failed
    }

    /// Ends the logs of all readers, for this reason.
    pub(crate) fn lose(&mut self, folder: &dyn Folder, why: &str) -> io::Result<()> {
        lose_all(folder, why)?;
        self.logs.clear();
        Ok(())
    }
}

impl ViewLog {
    fn open(
        folder: &dyn Folder,
        name: &str,
        disk: &dyn Fn() -> io::Result<Arc<dyn Disk>>,
    ) -> io::Result<Option<ViewLog>> {
        let probe = match probe(folder, name) {
            // Of another machine's life, or removed by its reader.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return folder.remove(name).map(|()| None),
            opened => opened?,
        };
        if is_gone(&probe) {
            return folder.remove(name).map(|()| None);
        }
        let file: Arc<dyn StateFile> = match folder.open(name, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?.into(),
        };
        let mut head = vec![0; HEAD as usize];
        if file.len()? < HEAD {
            return Ok(None);
        }
        file.read_at(0, &mut head)?;
        let Some(claim) = Claim::of(&head) else { return Ok(None) };
        // One that is lost stays so, and is removed with its reader.
        let Ok(end) = reach(&probe) else { return Ok(None) };
        let shown = claim.shown;
        let sizes = (shown.size, shown.size);
        let header = Header::new(shown.source, Method::Tracked, vec![shown.epoch], sizes, shown.block_size);
        let mut saving = Saving::new(file, disk()?, HEAD, header, false);
        while saving.end < end {
            saving.end = saving.cover(saving.end)?;
        }
        Ok(Some(ViewLog { name: name.into(), saving, shown, probe }))
    }

    /// Keeps what of these ranges it does not hold. Fails with the reason why it is lost.
    fn keep(&mut self, folder: &dyn Folder, replaced: &[Range<u64>], from: Uuid) -> Result<(), String> {
        // It has given way, in another thread.
        reach(&self.probe)?;
        let size = self.shown.size;
        let within = |range: &Range<u64>| range.start < size;
        let missing =
            self.saving.missing(replaced.iter().filter(|r| within(r)).map(|r| r.start..r.end.min(size)));
        if missing.is_empty() {
            return Ok(());
        }
        let bytes: u64 = missing.iter().map(|range| range.end - range.start).sum();
        // At most half of what there would be without it.
        if folder.free().is_some_and(|free| self.saving.end + bytes > free.saturating_sub(bytes)) {
            return Err(no_room(folder));
        }
        let failed = |error: io::Error| match crate::error::is_full(&error) {
            true => no_room(folder),
            false => format!("what was to be replaced could not be kept: {error}"),
        };
        self.saving.append(missing, from, self.shown.state).map_err(failed)?;
        self.saving.file.write_at(0, &self.saving.end.to_le_bytes()).map_err(failed)
    }
}

fn no_room(folder: &dyn Folder) -> String {
    format!("there was no room in {} to keep what commits replaced", folder.path().display())
}

/// True if nobody holds the lock on a log.
fn is_gone(probe: &File) -> bool {
    match flock(probe, FlockOperation::NonBlockingLockShared) {
        Ok(()) => flock(probe, FlockOperation::Unlock).is_ok(),
        Err(_) => false,
    }
}

/// Ends a log, and gives its room back. False if it was lost already. What its head says tells the reader, and so does its removal: where
/// the log cannot be opened or written, that is enough.
///
/// # Errors
/// If nothing tells the reader.
fn lose(folder: &dyn Folder, name: &str, why: &str) -> io::Result<bool> {
    let told = match say_lost(folder, name, why) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(_) => match folder.remove(name) {
            // A folder of that name was not made by a reader, and is left alone.
            Err(e) if e.kind() == io::ErrorKind::IsADirectory => Ok(false),
            removed => removed.map(|()| true),
        },
        told => told,
    };
    // F: before anything is written that was not kept.
    fence(SeqCst);
    told
}

/// Says in a log's head that it is lost. It stays for as long as its reader, so that others see why.
fn say_lost(folder: &dyn Folder, name: &str, why: &str) -> io::Result<bool> {
    let file = folder.open(name, false)?;
    if file.len()? < HEAD {
        // Its reader is about to write the head over what is said there.
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut said = [0; (WHY - LOST) as usize];
    file.read_at(LOST, &mut said)?;
    if said != [0; (WHY - LOST) as usize] {
        return Ok(false);
    }
    let mut text = why.as_bytes().to_vec();
    text.resize((LET_GO - WHY) as usize, 0);
    file.write_at(WHY, &text)?;
    file.write_at(LOST, &[1; (WHY - LOST) as usize])?;
    file.set_len(HEAD)?;
    Ok(true)
}

/// Ends all logs of a folder. Returns whether there was one that was not lost already.
pub(crate) fn lose_all(folder: &dyn Folder, why: &str) -> io::Result<bool> {
    let mut told = Ok(false);
    for name in names(folder)? {
        let lost = lose(folder, &name, why);
        told = told.and_then(|before| lost.map(|now| before || now));
    }
    told
}

/// Bytes that the readers of a folder would let go of if they lost. `None` if that cannot be told: one of them reads another moment than the
/// present state, and may hold files that have no name any more, or has lost and is about to let go.
pub(crate) fn may_give(folder: &dyn Folder, present: Uuid) -> Option<u64> {
    logs(folder)
        .ok()?
        .flatten()
        .map(|log| if has_let_go(&log) { Some(0) } else { held_by(&log, present) })
        .sum()
}

fn held_by(log: &File, present: Uuid) -> Option<u64> {
    let mut head = vec![0; HEAD as usize];
    log.read_exact_at(&mut head, 0).ok()?;
    let (shown, reader) = (Claim::of(&head)?.shown, reader(log)?);
    let is_present =
        shown.state == present && (shown.epoch.number, shown.ahead) == (reader.epoch, reader.ahead);
    (is_present && reader.lost.is_none()).then_some(reader.bytes)
}

/// Ends all logs to make room, and waits until their readers, and those that had lost before, have let go of what they held: their
/// scratch files, and earlier moments and replaced files that have no name any more. True if that may have made some room.
pub(crate) fn give_way(folder: &dyn Folder) -> bool {
    let logs = logs(folder).into_iter().flatten().flatten();
    // One that has not let go in that time, as its process is stopped, is not waited for again.
    let recent = |log: &File| {
        let changed = log.metadata().and_then(|meta| meta.modified()).map(|time| time.elapsed());
        changed.is_ok_and(|ago| ago.is_ok_and(|ago| ago < LETS_GO_WITHIN))
    };
    let may_let_go = |log: &File| !has_let_go(log) && (reach(log).is_ok() || recent(log));
    let holding: Vec<File> = logs.filter(may_let_go).collect();
    let gave = lose_all(folder, &no_room(folder)).unwrap_or(false);
    let began = Instant::now();
    while began.elapsed() < LETS_GO_WITHIN && !holding.iter().all(has_let_go) {
        std::thread::sleep(POLL_EVERY);
    }
    gave || holding.iter().any(has_let_go)
}
