//! The source's end of a mirror: batch after batch, over the same views, deltas and commits as a sync.
//!
//! A mirror begins with a sync, and continues with batches: parts of an epoch, each bound to the state that the previous one leaves
//! at the replica. What was sent and is not confirmed is remembered, so that after a link broke the next batch includes what
//! did not arrive. After any other failure, a sync finds what the replica lacks in the source's history.
//!
//! Besides its record, the tracked disk has one bitmap in memory for each mirror (`trackers/src/tracked.rs`, `Follower`). A batch takes it and publishes a fresh one together
//! with a view, in one step at the gate, as a checkpoint does with the record: so the batch is what was written between two moments, and
//! the view shows the second. Nothing is made durable at the source: the record still has all of it. From time to time (`--epoch`) the
//! cut is a checkpoint as well, and the replica is at an epoch.
//!
//! What was just written is read from the page cache, frame by frame; workers compress; frames are sent in order; the other side appends
//! them to the journal, decompresses and verifies them, and at the trailer syncs the journal: that commits the batch, and confirms it.
//! Then it is written to the destination. All these are stages of one pipeline (`sync/src/wire/pipeline.rs`) in which several batches may be
//! in progress; the number of workers follows the measured load.
//!
//! If the name of the replica's state is not known (another process, a restarted server, another command that changed the replica), a
//! sync finds what it lacks since its epoch, which is at least what it lacks since its last batch. What is in a batch is not recorded at
//! the source; the replica's unsure set has that.

pub(crate) mod attempts;
pub(crate) mod batching;
pub(crate) mod group;

mod epoch_hook;
mod followed_source;
mod grid;
mod rounds;
mod session;
mod turns;

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use link::Link;
use serde::Serialize;
use source::Handle;

use self::followed_source::{FollowedSource, connect, or_away};
use self::rounds::Rounds;
pub use self::turns::Turns;
use crate::error::SyncError;
use crate::mirror::attempts::{Attempts, Interruption, LOOK_EVERY, is_cut, rest_while};
use crate::mirror::batching::Batching;
use crate::options::SyncOptions;
use crate::report::{Progress, Summary};
use crate::source_end::account::note_pause;
use crate::source_end::session::Session;
use crate::wire::messages::part;
use crate::wire::pipeline::Stages;

/// After this many cut conversations without a confirmed batch, a sync takes its place.
const FRUITLESS: u32 = 3;

/// How to mirror.
#[derive(Debug, Clone)]
pub struct MirrorOptions {
    /// Options of syncs: before the first batch, and after failures that batches cannot fix.
    pub sync: SyncOptions,
    /// When batches are cut.
    pub batching: Batching,
    /// How the source's end shares its work.
    pub here: Stages,
    /// How the replica's end does.
    pub there: Stages,
    /// How often an epoch ends: after a crash of the source, what was written since is sent again. One ends more often where the replica
    /// keeps a moment of each shorter period, because moments are epochs.
    pub epoch_every: Duration,
    /// For how long to wait for a source or a replica that another program uses, before that counts as a failure; two seconds at
    /// least.
    pub busy_for: Duration,
}

impl MirrorOptions {
    fn look_every(&self) -> Duration {
        LOOK_EVERY.min(self.batching.rpo)
    }
}

/// Events, for the caller to report.
#[derive(Debug)]
pub enum MirrorEvent<'a> {
    /// The replica was brought up to date by a sync.
    Synced(&'a Summary),
    /// Batches follow.
    Mirroring,
    /// Nothing is moved until it is told to go on.
    Paused,
    /// A batch was confirmed.
    Batch(&'a BatchReport),
    /// A batch with the end of an epoch was confirmed: the replica has committed the epoch of this number.
    Epoch(u64),
    /// The replica's side has something to say.
    Warned(&'a str),
    /// The source or the replica is in use; it is requested again for that long.
    Waiting(&'a SyncError, Duration),
    /// An attempt failed; another follows after a pause.
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

/// The totals of a mirror.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MirrorSummary {
    /// Batches confirmed.
    pub batches: u64,
    /// Bytes of changed blocks in them.
    pub bytes_changed: u64,
    /// Bytes sent over links, those of syncs included.
    pub bytes_sent: u64,
    /// Syncs: the first, and those after failures that batches cannot fix.
    pub syncs: u64,
    /// How often the link or the other side failed.
    pub broken: u64,
    /// The number of the epoch of the replica, if it is exactly at one.
    pub epoch: Option<u64>,
    /// Wall-clock time.
    pub seconds: f64,
}

/// A mirror to run: its two ends, and its callbacks.
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
    /// Stops it when true: the epoch ends, and the replica gets it.
    pub stop: &'a AtomicBool,
    /// Keeps it from moving anything while true: a conversation ends after what was sent, and another begins later.
    pub pause: &'a AtomicBool,
    /// Gets the events.
    pub tell: &'a (dyn Fn(MirrorEvent<'_>) + Sync),
    /// Gets the progress of syncs.
    pub progress: Progress<'a>,
    /// Counts the turns of its loop.
    pub turns: &'a Turns,
}

impl Mirror<'_> {
    /// Runs until stopped.
    ///
    /// # Errors
    /// Any error at the beginning; later, only those that another attempt cannot fix.
    pub fn run(mut self) -> Result<MirrorSummary, SyncError> {
        let began = Instant::now();
        let mut summary = MirrorSummary::default();
        let mut followed: Option<FollowedSource> = None;
        let stop = self.stop;
        let mut attempts = Attempts::new(stop, self.options.batching.rpo, self.options.busy_for);
        // Consecutive conversations that were cut with nothing confirmed.
        let mut fruitless = 0;
        loop {
            self.rest_while_paused(followed.as_ref());
            let before = summary.batches;
            let ended = match &mut followed {
                None => self.begin(&mut summary, &mut followed),
                Some(follow) => {
                    let ended = follow.go_on(&mut self, &mut summary);
                    fruitless = match &ended {
                        Err(error) if is_cut(error) && summary.batches == before => fruitless + 1,
                        _ => 0,
                    };
                    // The state of batches is lost with the server, or if the replica is another. If no batch gets
                    // through a link that breaks repeatedly, a sync does, because it resumes.
                    let anew = matches!(ended, Err(SyncError::Source(_)) | Ok(Ended::Apart))
                        || fruitless >= FRUITLESS;
                    followed = followed.filter(|_| !anew);
                    ended
                }
            };
            // A link that lasted longer than the pause works, even if there was nothing to send.
            let lasted = followed.as_ref().is_some_and(|follow| follow.stood > attempts.pause());
            if summary.batches > before || lasted {
                attempts.succeeded();
            }
            match ended {
                Ok(Ended::Stopped) => break,
                Ok(Ended::Apart | Ended::Paused) => attempts.succeeded(),
                Err(error) => {
                    let tell = |trouble: Interruption<'_>| (self.tell)(trouble.into());
                    summary.broken += u64::from(attempts.failed(error, &tell)?);
                }
            }
        }
        summary.seconds = began.elapsed().as_secs_f64();
        if let Some(follow) = followed {
            follow.close()?;
        }
        Ok(summary)
    }

    /// Reaches the source. A disk that is served is followed from then on; of a live one, the replica is brought up to date in rounds, until
    /// stopped, paused or an error.
    fn begin(
        &mut self,
        summary: &mut MirrorSummary,
        followed: &mut Option<FollowedSource>,
    ) -> Result<Ended, SyncError> {
        let handle = (self.attach)()?;
        if handle.live().is_some() {
            return self.live_rounds(&handle, summary).map_err(|error| or_away(&handle, error));
        }
        *followed = Some(FollowedSource::begin(handle, self, summary)?);
        Ok(Ended::Apart)
    }

    /// One conversation about a live disk, each of whose rounds has a freeze of its own.
    fn live_rounds(&mut self, handle: &Handle, summary: &mut MirrorSummary) -> Result<Ended, SyncError> {
        let (sender, receiver) = connect(handle, self)?.split();
        let options = self.options_of(summary);
        let mirrored = (|| {
            let (ends, place) = ((&sender, &receiver), (self.destination, self.name));
            let mut session = Session::of_disk(ends, handle, place, &options, self.progress)?;
            let rounds = Rounds {
                disks: std::slice::from_ref(handle),
                rpo: self.options.batching.rpo,
                hooked: options.hook.is_some(),
                stop: self.stop,
                pause: self.pause,
                turns: self.turns,
            };
            rounds.run(&mut session, |round| {
                for synced in round.members {
                    summary.batches += 1;
                    summary.bytes_changed += synced.bytes_changed;
                    self.synced(&synced, summary);
                }
            })
        })();
        part(sender, &receiver, mirrored)
    }

    /// The options of a sync: a replica is taken over or created by the first only.
    fn options_of(&self, summary: &MirrorSummary) -> SyncOptions {
        let (options, first) = (&self.options.sync, summary.syncs == 0);
        SyncOptions {
            adopt: options.adopt && first,
            accept_source: options.accept_source && first,
            create: options.create && first,
            ..options.clone()
        }
    }

    /// Counts a sync, and tells of it.
    fn synced(&self, synced: &Summary, summary: &mut MirrorSummary) {
        summary.syncs += 1;
        summary.bytes_sent += synced.bytes_sent;
        summary.epoch = synced.epoch;
        (self.tell)(MirrorEvent::Synced(synced));
    }

    /// Sleeps as long as it is to pause, or until stopped.
    fn rest_while_paused(&mut self, followed: Option<&FollowedSource>) {
        rest_while(self.pause, self.stop, |paused| {
            if paused {
                (self.tell)(MirrorEvent::Paused);
            }
            self.note_pause(followed, paused);
        });
    }

    /// Writes down that nothing is moved, or that it goes on. Where the source cannot be reached now, the next attempt says why.
    fn note_pause(&mut self, followed: Option<&FollowedSource>, paused: bool) {
        let (destination, name, way) = (self.destination, self.name, &self.options.sync.way);
        match followed {
            Some(followed) => note_pause(followed.source(), destination, name, way, paused),
            None => {
                let Ok(handle) = (self.attach)() else { return };
                note_pause(&handle, destination, name, way, paused);
                let _ = handle.close();
            }
        }
    }
}

impl<'a> From<Interruption<'a>> for MirrorEvent<'a> {
    fn from(trouble: Interruption<'a>) -> MirrorEvent<'a> {
        match trouble {
            Interruption::Waiting(error, left) => MirrorEvent::Waiting(error, left),
            Interruption::Broken(error, pause) => MirrorEvent::Broken(error, pause),
        }
    }
}

/// The orderly end of a session.
enum Ended {
    /// All is confirmed, and the epoch has ended.
    Stopped,
    /// The replica is not where a batch left it, and a sync must find what it lacks; or it was brought up to date, and batches can follow.
    Apart,
    /// All that was sent is confirmed, and a pause has begun.
    Paused,
}
