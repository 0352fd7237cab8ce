//! What was done for each replica of a source so far: counts, the last verification, the last failure, and the work that is
//! under way. For people and monitors alone: nothing decides by it.
//!
//! One small file a replica, replaced as a whole and not flushed: a power cut may lose the latest of it, or all. So it is a plain
//! file, and not a [`StateFile`](device::StateFile), whose every call is a durable step.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use device::{Dir, Folder};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::record::bookmarks::Bookmarks;
use crate::record::process::{ProcessMark, cut, now};

/// Begins the names of the files.
const PREFIX: &str = "tally-";
/// A file that was begun so long ago is of a process that was killed.
const ABANDONED: Duration = Duration::from_secs(5);
/// Bytes of a failure's message that are kept.
const MESSAGE_MAX: usize = 1000;
/// Bytes of a file that are read.
const MOST: u64 = 1 << 20;

/// What was done for a replica. Times are in seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    /// Its name, as in the bookmarks.
    pub replica: String,
    /// Syncs that succeeded, those of a mirror included.
    pub syncs: u64,
    /// Batches of mirrors that were confirmed.
    pub batches: u64,
    /// Syncs, conversations of a mirror and verifications that failed.
    pub failures: u64,
    /// Bytes sent over the link, framing included.
    pub bytes_sent: u64,
    /// How long the last freeze of a file system took, in milliseconds; `None` if there was none.
    pub freeze_ms: Option<u64>,
    /// The last verification that came to its end.
    pub verified: Option<LastVerify>,
    /// The last failure.
    pub failed: Option<LastFailure>,
    /// What is there is a disk of the same source, and no sync to it has begun: the last one was refused.
    pub refused: bool,
    /// What is under way. That the process lives is to be checked with [`Work::is_alive`].
    pub work: Option<Work>,
}

/// The end of a verification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastVerify {
    /// When.
    pub time: u64,
    /// Bytes that differed, or could not be read at the replica.
    pub bytes_differing: u64,
    /// What differed was sent and committed.
    pub repaired: bool,
    /// A later verification found the rest to be equal, but for blocks that changed meanwhile: the next sync sends those.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub until_sync: bool,
    /// What differed may be changes of the source. A sync that does not compare all of it leaves what was none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub inexact: bool,
}

impl LastVerify {
    /// True if the replica differed by more than changes of the source, and was not repaired since.
    pub fn differs(&self) -> bool {
        self.stands() && !self.inexact
    }

    /// True if something differed, and nothing has shown since that it does not any more.
    pub fn stands(&self) -> bool {
        self.bytes_differing > 0 && !self.repaired
    }

    /// A verification that ends now.
    pub fn now(bytes_differing: u64, repaired: bool) -> LastVerify {
        LastVerify { time: now(), bytes_differing, repaired, until_sync: false, inexact: false }
    }

    /// A sync has succeeded, which has made all of the replica equal to the source if it has `proven` that. `sound`: the replica itself knows of no
    /// difference any more.
    pub fn synced(&mut self, proven: bool, sound: bool) {
        if proven || self.until_sync && sound {
            (self.repaired, self.until_sync) = (true, false);
        }
        self.inexact = false;
    }
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastFailure {
    /// When.
    pub time: u64,
    /// What was reported.
    pub message: String,
    /// Work has succeeded since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ended: bool,
}

/// What is under way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// The command: `sync`, `mirror` or `verify`.
    pub what: String,
    /// The process.
    #[serde(flatten)]
    pub mark: ProcessMark,
    /// When the work began.
    pub since: u64,
    /// Bytes done so far; of a mirror, bytes of changes.
    pub bytes_done: u64,
    /// Bytes to do; 0 where there is no end.
    pub bytes_total: u64,
    /// Bytes a second, over the last seconds.
    pub rate: u64,
    /// Of a mirror: how far the replica was behind at the last batch, in seconds.
    pub lag: Option<f64>,
    /// Of a mirror: nothing is moved at this hour.
    pub paused: bool,
    /// Of a mirror: how far it may fall behind, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rpo: Option<f64>,
}

impl Work {
    /// True if it sends nothing that the source has, but for a repair.
    pub fn only_looks(&self) -> bool {
        self.what == "verify"
    }

    /// Work of this process that begins now.
    pub fn begin(what: &str) -> Work {
        Work {
            what: what.to_owned(),
            mark: ProcessMark::this(),
            since: now(),
            bytes_done: 0,
            bytes_total: 0,
            rate: 0,
            lag: None,
            paused: false,
            rpo: None,
        }
    }

    /// True if its process lives, as far as that can be seen from here.
    pub fn is_alive(&self) -> bool {
        self.mark.is_alive()
    }
}

impl Tally {
    /// A sync or a mirror has succeeded.
    pub fn succeed(&mut self) {
        self.failed.iter_mut().for_each(|failed| failed.ended = true);
    }

    /// The tally of a replica; empty if there is none, or it cannot be read.
    pub fn read(folder: &Path, replica: &str) -> Tally {
        let tally = Dir::existing(folder).ok().and_then(|folder| read(&folder, &name_of(replica)));
        let tally: Tally = tally.unwrap_or_default();
        // Two names of one hash, which no one has seen yet.
        let is_it = tally.replica == replica;
        if is_it { tally } else { Tally { replica: replica.to_owned(), ..Tally::default() } }
    }

    /// The tallies in a source's folder, by the names of the replicas.
    pub fn all(folder: &Path) -> Vec<Tally> {
        let Ok(folder) = Dir::existing(folder) else { return Vec::new() };
        let names = folder.list().unwrap_or_default().into_iter();
        let names = names.filter(|name| name.starts_with(PREFIX) && !name.contains('.'));
        let mut all: Vec<Tally> = names.filter_map(|name| read(&folder, &name)).collect();
        all.sort_by(|a, b| a.replica.cmp(&b.replica));
        all
    }

    /// True if a copy to the replica has begun, and none has ever come to its end.
    pub fn is_first_copy(&self) -> bool {
        let copies = |work: &Work| !work.only_looks();
        self.syncs == 0 && (self.failed.is_some() || self.work.as_ref().is_some_and(copies))
    }

    /// Changes the tally of a replica. What cannot be written is left as it was.
    fn change(folder: &Path, replica: &str, change: impl FnOnce(&mut Tally)) {
        let Ok(dir) = Dir::existing(folder) else { return };
        let name = name_of(replica);
        let fresh = format!("{name}.new");
        let create = || dir.file(&fresh, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, 0o666);
        let abandoned = || {
            let begun = UNIX_EPOCH + Duration::from_nanos(dir.modified(&fresh)?);
            // A time that is still to come is that of a clock that was wrong.
            let is_old = begun.elapsed().map_or(true, |age| age > ABANDONED);
            is_old.then(|| dir.remove(&fresh)).and_then(Result::ok)
        };
        let Ok(mut out) = create().or_else(|error| abandoned().map_or(Err(error), |()| create())) else {
            return;
        };
        let mut tally = Tally::read(folder, replica);
        change(&mut tally);
        let written = serde_json::to_vec(&tally).is_ok_and(|text| out.write_all(&text).is_ok());
        if !(written && dir.rename(&fresh, &name).is_ok()) {
            let _ = dir.remove(&fresh);
        }
    }

    /// What was counted of a replica by other names than its bookmark has now goes on by that.
    pub(crate) fn follow(folder: &dyn Folder, bookmarks: &Bookmarks, replica: &str) {
        let load =
            |name: &str| -> Option<Tally> { crate::record::json::read_json(folder, &name_of(name)).ok()? };
        for before in bookmarks.0.get(replica).iter().flat_map(|bookmark| &bookmark.also) {
            let Some(counted) = load(before) else { continue };
            let work = load(replica).and_then(|begun| begun.work);
            let counted = Tally { replica: replica.to_owned(), work, ..counted };
            if crate::record::json::write_json(folder, &name_of(replica), &counted).is_ok() {
                let _ = folder.remove(&name_of(before));
            }
        }
    }

    /// Removes the tally of a replica.
    pub(crate) fn forget(folder: &Path, replica: &str) {
        let _ = Dir::existing(folder).and_then(|folder| folder.remove(&name_of(replica)));
    }

    /// Counts a failure.
    pub fn fail(&mut self, message: &str) {
        self.failures += 1;
        let message = cut(message, MESSAGE_MAX).to_owned();
        self.failed = Some(LastFailure { time: now(), message, ended: false });
    }
}

/// What counts for a replica.
#[derive(Debug, Clone)]
pub struct Counter {
    folder: PathBuf,
    replica: String,
}

impl Counter {
    /// Counts for the replica of this name, in the source's folder.
    pub(crate) fn new(folder: &Path, replica: String) -> Counter {
        Counter { folder: folder.to_path_buf(), replica }
    }

    /// The name of its bookmark, and whether it has one.
    fn name(&self) -> (String, bool) {
        let known =
            Dir::existing(&self.folder).map_or(Ok(Bookmarks::default()), |folder| Bookmarks::read(&folder));
        let known = known.unwrap_or_default();
        let name = known.named(&self.replica).map(|(name, _)| name.clone());
        (name.clone().unwrap_or_else(|| self.replica.clone()), name.is_some())
    }

    /// Changes its tally. That it cannot be written is not an error.
    pub fn count(&self, change: impl FnOnce(&mut Tally)) {
        Tally::change(&self.folder, &self.name().0, change);
    }

    /// Changes its tally if its source knows it: of others, nothing is kept.
    pub fn count_known(&self, change: impl FnOnce(&mut Tally)) {
        if self.name().1 {
            self.count(change);
        }
    }

    /// What was counted so far.
    pub fn tally(&self) -> Tally {
        Tally::read(&self.folder, &self.name().0)
    }

    /// Work for it ended with a failure. Of a replica that its source does not know, nothing is kept, unless a first copy to it has
    /// begun.
    pub fn fail(&self, message: &str) {
        self.end(|tally| tally.fail(message));
    }

    /// A verification has failed, or other work that brings nothing to the replica: that is as up to date as it was.
    pub fn fail_to_look(&self) {
        self.end(|tally| tally.failures += 1);
    }

    fn end(&self, change: impl FnOnce(&mut Tally)) {
        if self.name().1 || Tally::read(&self.folder, &self.replica).is_first_copy() {
            self.count(|tally| {
                tally.work = None;
                change(tally);
            });
        } else {
            Tally::forget(&self.folder, &self.replica);
        }
    }

    /// Work for another disk of its source was refused. It is kept also where the source does not know that one yet: after a promotion, it
    /// may be the old source, to which nothing is synced until somebody sees to it.
    pub fn refuse(&self, message: &str) {
        self.count(|tally| {
            tally.refused |= !tally.is_first_copy() && tally.syncs == 0;
            tally.work = None;
            tally.fail(message);
        });
    }
}

fn name_of(replica: &str) -> String {
    format!("{PREFIX}{:016x}", twox_hash::XxHash3_64::oneshot(replica.as_bytes()))
}

/// A tally; `None` if there is none, or it cannot be read.
fn read(folder: &Dir, name: &str) -> Option<Tally> {
    let mut text = Vec::new();
    folder.file(name, OFlags::RDONLY, 0).ok()?.take(MOST).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(folder: &Path, replica: &str) -> PathBuf {
        folder.join(name_of(replica))
    }

    #[test]
    fn a_tally_adds_up_and_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        for _ in 0..3 {
            Tally::change(at, "far:/a", |tally| tally.syncs += 1);
        }
        Tally::change(at, "far:/a", |tally| tally.fail(&"é".repeat(MESSAGE_MAX)));
        let tally = Tally::read(at, "far:/a");
        assert_eq!((tally.syncs, tally.failures), (3, 1));
        assert!(tally.failed.unwrap().message.len() <= MESSAGE_MAX);
        assert_eq!(Tally::read(at, "far:/b").syncs, 0);
        Tally::forget(at, "far:/a");
        assert_eq!(Tally::read(at, "far:/a").syncs, 0);
        assert_eq!(std::fs::read_dir(at).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_a_kill_left_is_in_the_way_for_seconds_only() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        Tally::change(at, "a", |tally| tally.syncs += 1);
        let fresh = file(at, "a").with_extension("new");
        let left = std::fs::File::create(&fresh).unwrap();
        Tally::change(at, "a", |tally| tally.syncs += 1);
        assert_eq!(Tally::read(at, "a").syncs, 1);
        left.set_modified(std::time::SystemTime::now() - 2 * ABANDONED).unwrap();
        Tally::change(at, "a", |tally| tally.syncs += 1);
        assert_eq!(Tally::read(at, "a").syncs, 2);
        // Of a clock that was ahead.
        let left = std::fs::File::create(&fresh).unwrap();
        left.set_modified(std::time::SystemTime::now() + 1000 * ABANDONED).unwrap();
        Tally::change(at, "a", |tally| tally.syncs += 1);
        assert_eq!(Tally::read(at, "a").syncs, 3);
        // Cut off by a power cut.
        std::fs::write(file(at, "a"), b"{\"sy").unwrap();
        assert_eq!(Tally::read(at, "a").syncs, 0);
    }
}
