//! The source's end of a mirror: batch after batch, over the same views, deltas and commits as a sync.
//!
//! A mirror begins with a sync, and goes on with batches: parts of an epoch, each bound to the state that the one before leaves
//! at the replica. What was sent and is not confirmed is remembered, so that after a link fell the next batch takes up what
//! did not arrive. Whatever else goes wrong, a sync finds what the replica lacks in the source's history, as always.

mod followed_source;
mod session;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use link::Link;
use serde::Serialize;
use source::{Handle, SourceError};

use self::followed_source::FollowedSource;
use crate::batching::Batching;
use crate::error::{Class, SyncError};
use crate::options::SyncOptions;
use crate::pipeline::Stages;
use crate::report::{Progress, Summary};

/// How often a wait is interrupted to look for events, where the user grants no shorter lag.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Between two attempts to reach the other side, at first and at most.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(30);
/// A wait that is meant to keep the replica close is no shorter than this.
const CLOSE_RETRY: Duration = Duration::from_secs(1);
/// So many conversations may be cut before a batch has come through: then a sync takes its place.
const FRUITLESS: u32 = 3;
/// How often a replica that is in use is asked for again at once.
const BUSY_LOOKS: u32 = 40;

/// How to mirror.
#[derive(Debug, Clone)]
pub struct MirrorOptions {
    /// How the replica is brought up to date before the first batch, and after what no batch can mend.
    pub sync: SyncOptions,
    /// When batches are cut.
    pub batching: Batching,
    /// How the source's end shares its work.
    pub here: Stages,
    /// How the replica's end does.
    pub there: Stages,
    /// How often an epoch ends: after a crash of the source, what was written since is sent again.
    pub epoch_every: Duration,
}

impl MirrorOptions {
    fn look_every(&self) -> Duration {
        LOOK_EVERY.min(self.batching.rpo)
    }
}

/// What happens, to be told.
#[derive(Debug)]
pub enum MirrorEvent<'a> {
    /// The replica was brought up to date by a sync.
    Synced(&'a Summary),
    /// Batches follow.
    Mirroring,
    /// A batch was confirmed.
    Batch(&'a BatchReport),
    /// Something failed; it is tried again after a while.
    Broken(&'a SyncError, Duration),
}

/// A confirmed batch. Times in seconds.
#[derive(Debug, Clone, Serialize)]
pub struct BatchReport {
    /// Counts the batches of this mirror.
    pub batch: u64,
    /// The last epoch before its end; the one that ended with it, if one did.
    pub epoch: u64,
    /// Blocks that had changed.
    pub blocks: u64,
    /// Bytes of such blocks.
    pub bytes: u64,
    /// The interval as it was adjusted.
    pub interval: f64,
    /// The time of the source's site: assembling, compressing, sending.
    pub primary: f64,
    /// The time of the replica's site: receiving, decompressing, writing.
    pub backup: f64,
    /// From the cut to the confirmation.
    pub whole: f64,
    /// The age of the oldest write that the replica lacked until now.
    pub lag: f64,
    /// Bytes sent over the link so far, framing included.
    pub sent: u64,
}

/// What a mirror did in all.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MirrorSummary {
    /// Batches confirmed.
    pub batches: u64,
    /// Bytes of changed blocks in them.
    pub bytes_changed: u64,
    /// Bytes sent over links, those of syncs included.
    pub bytes_sent: u64,
    /// Syncs that were made: the first, and what no batch could mend.
    pub syncs: u64,
    /// How often the link or the other side failed.
    pub broken: u64,
    /// The number of the epoch of the replica, if it is exactly at one.
    pub epoch: Option<u64>,
    /// Wall-clock time.
    pub seconds: f64,
}

/// A mirror to be run: its two ends, and what it tells.
pub struct Mirror<'a> {
    /// Reaches the source; called again when its server has failed.
    pub attach: &'a mut dyn FnMut() -> Result<Handle, SyncError>,
    /// Reaches the replica's side; called again when the link has failed.
    pub connect: &'a mut dyn FnMut() -> Result<Link, SyncError>,
    /// The replica, as its side names it.
    pub destination: &'a Path,
    /// The replica, as the user names it.
    pub name: &'a str,
    /// How to mirror.
    pub options: &'a MirrorOptions,
    /// Ends it when true: the epoch ends, and the replica has it.
    pub stop: &'a AtomicBool,
    /// Told what happens.
    pub tell: &'a (dyn Fn(MirrorEvent<'_>) + Sync),
    /// Told how far a sync is.
    pub progress: Progress<'a>,
}

impl Mirror<'_> {
    /// Runs until it is told to stop.
    ///
    /// # Errors
    /// What is in the way at the beginning; later, only what trying again cannot mend.
    pub fn run(mut self) -> Result<MirrorSummary, SyncError> {
        let began = Instant::now();
        let mut summary = MirrorSummary::default();
        let mut followed: Option<FollowedSource> = None;
        let mut wait = FIRST_RETRY;
        // Until both ends were reached once, what fails is most likely the user's to mend.
        let mut worked = false;
        let (mut busy, mut stopped) = (0, false);
        // Conversations that were cut one after the other, and nothing confirmed in any of them.
        let mut fruitless = 0;
        loop {
            let before = summary.batches;
            let ended = match &mut followed {
                None => FollowedSource::begin(&mut self, &mut summary).map(|begun| {
                    followed = Some(begun);
                    worked = true;
                    Ended::Apart
                }),
                Some(follow) => {
                    let ended = follow.go_on(&mut self, &mut summary);
                    fruitless = match &ended {
                        Err(error) if is_cut(error) && summary.batches == before => fruitless + 1,
                        _ => 0,
                    };
                    // What was known of the source goes with its server, or where the replica is another. What no batch gets
                    // through a line that falls again and again, a sync does: it goes on where it was cut.
                    let anew = matches!(ended, Err(SyncError::Source(_)) | Ok(Ended::Apart))
                        || fruitless >= FRUITLESS;
                    followed = followed.filter(|_| !anew);
                    ended
                }
            };
            // What held for longer than was waited for it is a line that works, whether there was something to send or not.
            if summary.batches > before || followed.as_ref().is_some_and(|follow| follow.stood > wait) {
                wait = FIRST_RETRY;
            }
            match ended {
                Ok(Ended::Stopped) => break,
                Ok(Ended::Apart | Ended::Round) => (wait, busy) = (FIRST_RETRY, 0),
                // The end of a conversation before, of a mirror that was killed too, has not been heard everywhere yet.
                Err(error) if error.class() == Class::Busy && busy < BUSY_LOOKS => {
                    busy += 1;
                    std::thread::sleep(LOOK_EVERY);
                }
                Err(error) if is_final(&error) || !(worked || is_outage(&error)) => return Err(error),
                // After the word to stop, one more attempt is worth its time, and no more.
                Err(error) if stopped => return Err(error),
                Err(error) => {
                    worked = true;
                    summary.broken += 1;
                    (self.tell)(MirrorEvent::Broken(&error, wait));
                    self.rest_until(Instant::now() + wait);
                    wait = (wait * 2).min(self.options.batching.rpo.clamp(CLOSE_RETRY, LAST_RETRY));
                    stopped = self.stop.load(SeqCst);
                }
            }
        }
        summary.seconds = began.elapsed().as_secs_f64();
        if let Some(follow) = followed {
            follow.close()?;
        }
        Ok(summary)
    }

    /// Sleeps until then, or until the word to stop.
    fn rest_until(&self, until: Instant) {
        while Instant::now() < until && !self.stop.load(SeqCst) {
            std::thread::sleep(self.options.look_every());
        }
    }
}

/// What another attempt cannot mend: another source, another replica, a source that shrank. What is merely in use may be free
/// soon: the far side of a link that fell lets go when it notices.
fn is_final(error: &SyncError) -> bool {
    match error {
        // The far side of a source's restart.
        SyncError::Source(_) => false,
        _ => error.class() == Class::Refused,
    }
}

/// What stood and fell: a link, or the source's server.
fn is_outage(error: &SyncError) -> bool {
    is_cut(error) || matches!(error, SyncError::Source(SourceError::Away(_)))
}

/// A link that stood and fell.
fn is_cut(error: &SyncError) -> bool {
    matches!(error, SyncError::Link(link::Error::Cut { .. }))
}

/// How a session ended in order.
enum Ended {
    /// All is confirmed, and the epoch has ended.
    Stopped,
    /// The replica is not where any batch left it: a sync must find what it lacks.
    Apart,
    /// A live disk's batch is done.
    Round,
}
