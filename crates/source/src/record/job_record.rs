//! What a job did last: one small file for each job of a host, for people and monitors alone.
//!
//! It is overwritten in place, in one page: a file system without room takes it once it is there, and a kill leaves the old or the new
//! content. It is not flushed: a power cut may lose the latest of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use device::Dir;
use rustix::fs::{FlockOperation, OFlags, flock};
use serde::{Deserialize, Serialize};

use crate::record::process::{ProcessMark, cut, now};

/// Bytes of a file: a page.
const SIZE: usize = 4096;
/// Bytes of a message that are kept: twice as many where each is escaped.
const MESSAGE_MAX: usize = 800;
/// How often a file is read again that is being written, and after what time.
const LOOKS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(2);

/// What a job did last. Times are in seconds since 1970.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    /// When the last attempt began.
    began: u64,
    /// Its process; `None` once it has ended.
    at_work: Option<ProcessMark>,
    /// How the last attempt that has ended did so.
    pub ended: Option<JobEnd>,
    /// The last failure that no success has ended.
    failed: Option<JobEnd>,
    /// The last copy that it has fetched from another host.
    pub fetched: Option<FetchedCopy>,
}

/// The end of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobEnd {
    /// When; of a process that was killed, when it began.
    pub time: u64,
    /// Its exit code; `None` if its process is gone without one: it was killed, or its machine went down.
    pub code: Option<u8>,
    /// What was reported.
    pub message: String,
}

/// What the end of an attempt says of its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobOutcome {
    /// It did what it is to do: a failure before it is over.
    Done,
    /// It did not.
    Failed,
    /// Nothing: a failure before it stands.
    Neither,
}

/// A copy that came to its end. The names are kept as hashes: a path may be longer than the record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FetchedCopy {
    /// When.
    pub time: u64,
    source: u64,
    replica: u64,
}

impl FetchedCopy {
    /// A copy of `source`, as its job calls it, to `replica` that ends now.
    pub fn now(source: &str, replica: &str) -> FetchedCopy {
        FetchedCopy { time: now(), source: hash(source), replica: hash(replica) }
    }

    /// True if it is of this source, else false; `None` if it is another replica's.
    pub fn is_of(&self, source: &str, replica: &str) -> Option<bool> {
        (self.replica == hash(replica)).then(|| self.source == hash(source))
    }
}

fn hash(name: &str) -> u64 {
    twox_hash::XxHash3_64::oneshot(name.as_bytes())
}

impl JobRecord {
    /// An attempt of this process begins. One of another process that still runs goes on being the last one.
    pub fn begin(folder: &Path, job: &str) {
        JobRecord::change(folder, job, |record| {
            if record.is_running() {
                return;
            }
            record.failed = record.standing();
            (record.began, record.at_work) = (now(), Some(ProcessMark::this()));
        });
    }

    /// An attempt of this process ends.
    pub fn end(folder: &Path, job: &str, (code, message): (u8, &str), outcome: JobOutcome) {
        JobRecord::change(folder, job, |record| {
            let end = JobEnd { time: now(), code: Some(code), message: shortened(message) };
            match outcome {
                JobOutcome::Done => record.failed = None,
                JobOutcome::Failed => record.failed = Some(end.clone()),
                JobOutcome::Neither => {}
            }
            if record.at_work.as_ref().is_none_or(|process| *process == ProcessMark::this()) {
                (record.at_work, record.ended) = (None, Some(end));
            }
        });
    }

    /// A copy was fetched.
    pub fn fetch(folder: &Path, job: &str, copy: FetchedCopy) {
        JobRecord::change(folder, job, |record| record.fetched = Some(copy));
    }

    /// The record of a job; `None` if there is none, or it cannot be read.
    pub fn read(folder: &Path, job: &str) -> Option<JobRecord> {
        let file = Dir::existing(folder).ok()?.file(job, OFlags::RDONLY, 0).ok()?;
        let mut looks = (0..LOOKS).map(|at| {
            std::thread::sleep(PAUSE * at.min(1));
            read(&file)
        });
        looks.find_map(|record| record)
    }

    /// All records in the folder: of jobs that are gone, too.
    pub fn all(folder: &Path) -> Vec<JobRecord> {
        let names = Dir::existing(folder).and_then(|folder| device::Folder::list(&folder));
        names.unwrap_or_default().iter().filter_map(|name| JobRecord::read(folder, name)).collect()
    }

    /// True while its process is at work, as far as that can be seen from here.
    pub fn is_running(&self) -> bool {
        self.at_work.as_ref().is_some_and(ProcessMark::is_alive)
    }

    /// The failure that stands: the last one that no success has ended, or that the process of the last attempt is gone without an end.
    pub fn standing(&self) -> Option<JobEnd> {
        let killed = || JobEnd { time: self.began, code: None, message: String::new() };
        let is_killed = self.at_work.as_ref().is_some_and(|process| !process.is_alive());
        if is_killed { Some(killed()) } else { self.failed.clone() }
    }

    /// Changes a record. What cannot be written is left as it was.
    fn change(folder: &Path, job: &str, change: impl FnOnce(&mut JobRecord)) {
        let open = || Dir::open(folder)?.file(job, OFlags::RDWR | OFlags::CREATE, 0o666);
        let Ok(file) = open() else { return };
        // Where locks are not supported, two attempts at once may lose the end of one.
        let _ = flock(&file, FlockOperation::LockExclusive);
        let empty = JobRecord { began: 0, at_work: None, ended: None, failed: None, fetched: None };
        let mut record = read(&file).unwrap_or(empty);
        change(&mut record);
        let Ok(mut text) = serde_json::to_vec(&record) else { return };
        text.resize(SIZE, b' ');
        let _ = file.write_all_at(&text, 0);
    }
}

/// What a file has; `None` if that is no record.
fn read(file: &File) -> Option<JobRecord> {
    let mut text = [0; SIZE];
    file.read_exact_at(&mut text, 0).ok()?;
    serde_json::from_slice(&text).ok()
}

/// A message of one line that has room.
fn shortened(message: &str) -> String {
    let plain: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    cut(&plain, MESSAGE_MAX).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(at: &Path, code: u8, outcome: JobOutcome) -> Option<Option<u8>> {
        JobRecord::end(at, "job", (code, "a message"), outcome);
        JobRecord::read(at, "job").unwrap().standing().map(|end| end.code)
    }

    #[test]
    fn a_failure_stands_until_a_success() {
        let temp = tempfile::tempdir().unwrap();
        let at = &temp.path().join("state/jobs");
        assert_eq!(JobRecord::read(at, "job"), None);
        JobRecord::begin(at, "job");
        assert!(JobRecord::read(at, "job").unwrap().is_running());
        assert_eq!(failed(at, 4, JobOutcome::Failed), Some(Some(4)));
        for (code, outcome) in [(6, JobOutcome::Neither), (130, JobOutcome::Neither)] {
            JobRecord::begin(at, "job");
            assert_eq!(failed(at, code, outcome), Some(Some(4)));
            assert_eq!(JobRecord::read(at, "job").unwrap().ended.unwrap().code, Some(code));
        }
        JobRecord::begin(at, "job");
        assert_eq!(failed(at, 0, JobOutcome::Done), None);
    }

    #[test]
    fn a_process_that_is_gone_without_an_end_is_a_failure() {
        let temp = tempfile::tempdir().unwrap();
        let at = temp.path();
        JobRecord::change(at, "job", |record| record.at_work = Some(ProcessMark::gone()));
        let killed = |record: JobRecord| record.standing().is_some_and(|end| end.code.is_none());
        assert!(killed(JobRecord::read(at, "job").unwrap()));
        // The next attempt does not hide it.
        JobRecord::begin(at, "job");
        assert!(killed(JobRecord::read(at, "job").unwrap()));
        assert_eq!(failed(at, 0, JobOutcome::Done), None);
    }

    /// The second is refused, because the first is at work.
    #[test]
    fn of_two_attempts_at_once_the_first_is_the_last_one() {
        let temp = tempfile::tempdir().unwrap();
        let at = temp.path();
        let mut first = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mark = ProcessMark::of(first.id());
        JobRecord::change(at, "job", |record| record.at_work = Some(mark));
        JobRecord::begin(at, "job");
        assert_eq!(failed(at, 6, JobOutcome::Neither), None);
        assert!(JobRecord::read(at, "job").unwrap().is_running());
        first.kill().unwrap();
        first.wait().unwrap();
        assert!(JobRecord::read(at, "job").unwrap().standing().is_some());
    }

    #[test]
    fn a_message_of_any_kind_has_room() {
        let temp = tempfile::tempdir().unwrap();
        let at = temp.path();
        for message in ["é", "\"", "\\", "\n", "\u{1}", "\u{7f}", "\u{2028}"] {
            let outcome = JobOutcome::Failed;
            JobRecord::end(at, "job", (1, &message.repeat(10_000)), outcome);
            let kept = JobRecord::read(at, "job").unwrap().standing().unwrap().message;
            assert!(kept.len() > MESSAGE_MAX - 4 && kept.len() <= MESSAGE_MAX, "{message:?}");
        }
        assert_eq!(std::fs::metadata(at.join("job")).unwrap().len(), SIZE as u64);
    }

    #[test]
    fn what_root_notes_belongs_to_the_user_of_the_state() {
        use std::os::unix::fs::{MetadataExt, chown};
        if !testing::need_root("a record of a job in another user's state") {
            return;
        }
        let (folder, nobody) = (tempfile::tempdir().unwrap(), 65534);
        chown(folder.path(), Some(nobody), Some(nobody)).unwrap();
        let at = folder.path().join("state/jobs");
        JobRecord::begin(&at, "job");
        for path in at.join("job").ancestors().take(3) {
            assert_eq!(std::fs::metadata(path).unwrap().uid(), nobody, "{}", path.display());
        }
    }
}
