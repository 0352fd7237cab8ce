//! What syncs, mirrors and verifications did, as it is counted at the source: see [`source::Tally`].

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use delta::Method;
use source::{Counter, Handle, LastVerify, Work};

use crate::conflict::with_ends;
use crate::error::{Class, SyncError};
use crate::options::Way;
use crate::plan::facts::known_as;
use crate::report::Summary;

/// How often work under way is written down, and over how long its rate is measured.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// Work for a replica, from its beginning to its end.
pub(crate) struct Account {
    /// `None` for a dry run.
    counter: Option<Counter>,
    /// The source and the replica, as they are named on this host.
    ends: (String, String),
    told: Mutex<Told>,
}

/// What was last written down.
struct Told {
    work: Work,
    at: Instant,
    /// Bytes sent over this link, as far as they are counted.
    sent: u64,
    batches: u64,
}

/// Counts for the replica at `destination`, which the user calls `name`.
fn counter(handle: &Handle, destination: &Path, name: &str, way: &Way) -> Counter {
    let found = std::fs::canonicalize(destination).ok().or_else(|| {
        let folder = std::fs::canonicalize(destination.parent()?).ok()?;
        Some(folder.join(destination.file_name()?))
    });
    let path = match way {
        Way::Local => found.as_deref().unwrap_or(destination),
        // On another host.
        Way::Far | Way::Pulled(_) => destination,
    };
    handle.counter(known_as(name, path, way))
}

/// Counts a failure to reach the replica's side.
pub fn count_failure(handle: &Handle, destination: &Path, name: &str, way: &Way, message: &str) {
    counter(handle, destination, name, way).fail(message);
}

/// Writes down that a mirror to it moves nothing for a while, or that it goes on.
pub(crate) fn note_pause(handle: &Handle, destination: &Path, name: &str, way: &Way, paused: bool) {
    let mut work = Work::begin("mirror");
    work.paused = paused;
    let work = paused.then_some(work);
    counter(handle, destination, name, way).count_known(|tally| tally.work = work);
}

impl Account {
    /// What a verification found to differ in the replica, in bytes, and when, if that was not repaired since.
    fn unrepaired(&self) -> Option<(u64, u64)> {
        let verified = self.counter.as_ref()?.tally().verified?;
        verified.differs().then_some((verified.bytes_differing, verified.time))
    }

    /// Says in the summary of a sync that the source is empty, and what a verification found that was not repaired.
    pub(crate) fn say_doubts(&self, summary: &mut Summary) {
        let is_empty = summary.disk_size == 0;
        summary.warnings.extend(is_empty.then(|| "the source is empty: it has 0 bytes".to_owned()));
        summary.unrepaired = self.unrepaired();
        summary.warnings.extend(summary.unrepaired.map(|(bytes, time)| {
            format!(
                "it differed from its source in {} when it was verified on {}, and that was not repaired: run \"dsync verify --repair\"",
                device::human_size(bytes),
                device::moment(time)
            )
        }));
    }

    /// Begins to account for work.
    pub(crate) fn begin(handle: &Handle, place: (&Path, &str), way: &Way, what: &str) -> Account {
        // Not written down yet: the replica may be refused, or another command be at work for it.
        let told = Told { work: Work::begin(what), at: Instant::now(), sent: 0, batches: 0 };
        let ends = (handle.about().path.display().to_string(), place.1.to_owned());
        Account { counter: Some(counter(handle, place.0, place.1, way)), ends, told: Mutex::new(told) }
    }

    /// Notes how far a mirror may fall behind.
    pub(crate) fn within(&self, rpo: Duration) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).work.rpo = Some(rpo.as_secs_f64());
    }

    /// Counts nothing, for a dry run.
    pub(crate) fn dry(self) -> Account {
        Account { counter: None, ..self }
    }

    /// The replica is open, and the work is under way.
    pub(crate) fn opened(&self) {
        let Some(counter) = &self.counter else { return };
        let work = self.told.lock().unwrap_or_else(PoisonError::into_inner).work.clone();
        // A verification sends nothing: what was refused is still so.
        let still = work.only_looks();
        counter.count(|tally| (tally.work, tally.refused) = (Some(work), tally.refused && still));
    }

    /// Progress in bytes.
    pub(crate) fn progress(&self, done: u64, total: u64) {
        self.tell(|told, past| {
            let more = done.saturating_sub(told.work.bytes_done);
            (told.work.bytes_done, told.work.bytes_total) = (done, total);
            told.work.rate = (more as f64 / past.as_secs_f64()) as u64;
        });
    }

    /// Writes down what changed, if it is time to.
    fn tell(&self, change: impl FnOnce(&mut Told, Duration)) {
        let Some(counter) = &self.counter else { return };
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let past = told.at.elapsed();
        if past < TOLD_EVERY {
            return;
        }
        told.at = Instant::now();
        change(&mut told, past);
        let work = told.work.clone();
        counter.count(|tally| tally.work = Some(work));
    }

    /// A sync has succeeded.
    pub(crate) fn synced(&self, summary: &Summary) {
        self.succeeded(|tally| {
            tally.succeed();
            tally.syncs += 1;
            tally.bytes_sent += summary.bytes_sent;
            tally.freeze_ms = summary.freeze_ms.or(tally.freeze_ms);
            // What compares or sends all of it leaves nothing that differs, unless kept digests stood for the replica, or a part was compared before.
            let whole = matches!(summary.method, Method::Compare | Method::Rolling | Method::Copy);
            let in_part = summary.resumed && summary.method == Method::Compare;
            let proven = whole && !summary.by_digests && !in_part;
            tally.verified.iter_mut().for_each(|verified| verified.synced(proven, summary.sound));
        });
    }

    /// A batch was confirmed: bytes of changes, and of all that was sent over this link; how far the replica was behind.
    pub(crate) fn batch(&self, bytes: u64, all_sent: u64, lag: f64) {
        let Some(counter) = &self.counter else { return };
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let past = told.at.elapsed();
        told.work.bytes_done += bytes;
        told.work.lag = Some(lag);
        told.batches += 1;
        if past < TOLD_EVERY {
            return;
        }
        let sent = all_sent.saturating_sub(std::mem::replace(&mut told.sent, all_sent));
        let batches = std::mem::take(&mut told.batches);
        told.work.rate = (sent as f64 / past.as_secs_f64()) as u64;
        told.at = Instant::now();
        let work = told.work.clone();
        counter.count(|tally| {
            tally.succeed();
            tally.work = Some(work);
            tally.bytes_sent += sent;
            tally.batches += batches;
        });
    }

    /// A conversation of a mirror has ended; `sent` is what it sent in all.
    pub(crate) fn mirrored<T>(&self, result: &Result<T, SyncError>, sent: u64) {
        let (before, batches) = {
            let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            (told.sent, told.batches)
        };
        if let Some(counter) = &self.counter {
            counter.count(|tally| {
                tally.bytes_sent += sent.saturating_sub(before);
                tally.batches += batches;
            });
        }
        self.ended(result, |tally, _| tally.succeed());
    }

    /// A verification that did not end has found differences.
    pub(crate) fn found(&self, found: LastVerify) {
        if let Some(counter) = &self.counter {
            // What was known before is more than what a part of it shows.
            let bytes = found.bytes_differing;
            let known = |known: &LastVerify| known.differs() && known.bytes_differing > bytes;
            counter.count(|tally| {
                if !tally.verified.as_ref().is_some_and(known) {
                    tally.verified = Some(found);
                }
            });
        }
    }

    /// Work has ended: what is to be counted if it succeeded.
    pub(crate) fn ended<T>(&self, result: &Result<T, SyncError>, done: impl FnOnce(&mut source::Tally, &T)) {
        match result {
            Ok(result) => self.succeeded(|tally| done(tally, result)),
            Err(error) => self.failed(error),
        }
    }

    fn succeeded(&self, done: impl FnOnce(&mut source::Tally)) {
        let Some(counter) = &self.counter else { return };
        counter.count(|tally| {
            tally.work = None;
            done(tally);
        });
    }

    /// Work has failed.
    pub(crate) fn failed(&self, error: &SyncError) {
        let Some(counter) = &self.counter else { return };
        let message = with_ends(&error.to_string(), &self.ends.0, &self.ends.1).replace('\n', ". ");
        let looks = self.told.lock().unwrap_or_else(PoisonError::into_inner).work.only_looks();
        match error {
            // Another command is at work for the replica: what is written down is its work.
            error if error.class() == Class::Busy => {}
            _ if looks => counter.fail_to_look(),
            error if error.class() == Class::Diverged => counter.refuse(&message),
            _ => counter.fail(&message),
        }
    }
}
