//! What was done for each replica of a source so far: counts, the last verification, the last failure, and the work that is
//! under way. For people and monitors alone: nothing decides by it.
//!
//! One small file a replica, replaced as a whole and not flushed: a power cut may lose the latest of it, or all. So it is a plain
//! file, and not a [`StateFile`](device::StateFile), whose every call is a durable step.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use device::{Dir, Folder};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::record::bookmarks::Bookmarks;

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
    /// When a copy came to its end last; only of one that is fetched, as its own host keeps no bookmark of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetched: Option<u64>,
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
}

impl LastVerify {
    /// True if the replica differed, and was not repaired since.
    pub fn differs(&self) -> bool {
        self.bytes_differing > 0 && !self.repaired
    }

    /// A verification that ends now.
    pub fn now(bytes_differing: u64, repaired: bool) -> LastVerify {
        LastVerify { time: now(), bytes_differing, repaired, until_sync: false }
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
    pub process: u32,
    /// When the process began, as the kernel counts: numbers of processes are used again.
    born: u64,
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
        let process = std::process::id();
        Work {
            what: what.to_owned(),
            process,
            born: born(process).unwrap_or(0),
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
        born(self.process) == Some(self.born)
    }
}

/// When a process began, in ticks since the boot.
#[allow(clippy::disallowed_methods, reason = "in procfs")]
fn born(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program, in parentheses, may hold anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
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

    /// Counts a failure of what is to make a first copy, and ended before that began. One that has begun counts its own.
    pub fn fail_first(folder: &Path, replica: &str, message: &str) {
        Tally::change(folder, replica, |tally| {
            if tally.syncs == 0 && !tally.is_first_copy() {
                tally.fail(message);
            }
        });
    }

    /// Counts what a host has fetched, or has failed to, in a folder of its own.
    pub fn fetch(folder: &Path, what: &str, ended: Result<(), &str>) {
        if Dir::open(folder).is_ok() {
            Tally::change(folder, what, |tally| match ended {
                Ok(()) => (tally.syncs, tally.failed, tally.fetched) = (tally.syncs + 1, None, Some(now())),
                Err(message) => tally.fail(message),
            });
        }
    }

    /// Changes the tally of a replica. What cannot be written is left as it was.
    fn change(folder: &Path, replica: &str, change: impl FnOnce(&mut Tally)) {
        let Ok(dir) = Dir::existing(folder) else { return };
        let name = name_of(replica);
        let fresh = format!("{name}.new");
        let create = || dir.file(&fresh, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, 0o666);
        let abandoned = || {
            let begun = UNIX_EPOCH + Duration::from_nanos(dir.modified(&fresh)?);
            (begun.elapsed().ok()? > ABANDONED).then(|| dir.remove(&fresh)).and_then(Result::ok)
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
        let ends = message.char_indices().map(|(at, _)| at).chain([message.len()]);
        let end = ends.take_while(|at| *at <= MESSAGE_MAX).last().unwrap_or(0);
        self.failed = Some(LastFailure { time: now(), message: message[..end].to_owned(), ended: false });
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
        left.set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
        Tally::change(at, "a", |tally| tally.syncs += 1);
        assert_eq!(Tally::read(at, "a").syncs, 2);
        // Cut off by a power cut.
        std::fs::write(file(at, "a"), b"{\"sy").unwrap();
        assert_eq!(Tally::read(at, "a").syncs, 0);
    }

    #[test]
    fn what_root_notes_belongs_to_the_user_of_the_state() {
        use std::os::unix::fs::{MetadataExt, chown};
        if !testing::need_root("a tally of another user's state") {
            return;
        }
        let (folder, nobody) = (tempfile::tempdir().unwrap(), 65534);
        chown(folder.path(), Some(nobody), Some(nobody)).unwrap();
        let at = folder.path().join("state/fetches");
        Tally::fetch(&at, "near:vm /vm.raw", Err("it failed"));
        for path in file(&at, "near:vm /vm.raw").ancestors().take(3) {
            assert_eq!(std::fs::metadata(path).unwrap().uid(), nobody, "{}", path.display());
        }
    }

    #[test]
    fn work_ends_with_its_process() {
        let work = Work::begin("sync");
        assert!(work.is_alive());
        assert!(!Work { born: work.born.wrapping_sub(1), ..work }.is_alive());
    }
}
