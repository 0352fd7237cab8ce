//! A mirror of a group: one common commit after the other, over one conversation for as long as that lasts.
//!
//! Each commit is a cut of all sources, of what was written since the one before. Nothing is sent while nothing is written. After a
//! failure the next conversation finds what the replicas lack in the histories of their sources.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use link::Link;
use serde::Serialize;
use source::{GroupHandle, Handle, SourceError};

use crate::error::SyncError;
use crate::mirror::Turns;
use crate::mirror::attempts::{Attempts, Interruption};
use crate::options::SyncOptions;
use crate::report::{Progress, Summary};
use crate::source_end::account::count_failure;
use crate::source_end::group::{GroupSession, GroupSummary};
use crate::wire::messages::part;

/// The shortest time from one cut to the next.
const LEAST: Duration = Duration::from_millis(250);
/// The shortest time between cuts that cost those who write: file systems of live disks are frozen each time, and a hook holds what it holds.
const LEAST_HELD: Duration = Duration::from_secs(1);
/// How long a turn of the loop takes at most.
const TURN: Duration = Duration::from_secs(1);

/// Events, for the caller to report.
#[derive(Debug)]
pub enum GroupEvent<'a> {
    /// All replicas are at one moment.
    Committed(&'a GroupSummary, &'a [Summary]),
    /// A source or a replica is in use; it is requested again for that long.
    Waiting(&'a SyncError, Duration),
    /// An attempt failed; another follows after a pause.
    Broken(&'a SyncError, Duration),
}

impl<'a> From<Interruption<'a>> for GroupEvent<'a> {
    fn from(trouble: Interruption<'a>) -> GroupEvent<'a> {
        match trouble {
            Interruption::Waiting(error, left) => GroupEvent::Waiting(error, left),
            Interruption::Broken(error, pause) => GroupEvent::Broken(error, pause),
        }
    }
}

/// The totals of a mirror of a group.
#[derive(Debug, Clone, Default, Serialize)]
pub struct GroupMirrorSummary {
    /// The name of the group.
    pub group: String,
    /// Common commits.
    pub commits: u64,
    /// Bytes of changed blocks in them.
    pub bytes_changed: u64,
    /// Bytes sent over links.
    pub bytes_sent: u64,
    /// How often the link, the other side or the server failed.
    pub broken: u64,
    /// The number of the cut at which all replicas are.
    pub epoch: Option<u64>,
    /// Wall-clock time.
    pub seconds: f64,
}

/// A mirror of a group to run: its two ends, and its callbacks.
pub struct GroupMirror<'a> {
    /// Reaches the sources, whose writes are recorded; called again when their server has failed.
    pub attach: &'a mut dyn FnMut() -> Result<GroupHandle, SyncError>,
    /// Reaches the replicas' side; called again when the link has failed.
    pub connect: &'a mut dyn FnMut() -> Result<Link, SyncError>,
    /// The folder of the replicas, as their side names it.
    pub dir: &'a Path,
    /// The folder, as the user names it.
    pub name: &'a str,
    /// How to sync; taking over and creating replicas apply to the first common commit.
    pub options: &'a SyncOptions,
    /// How far the replicas may fall behind while the link keeps up.
    pub rpo: Duration,
    /// For how long to wait for what another program uses, before that counts as a failure; two seconds at least.
    pub busy_for: Duration,
    /// Stops it when true: the replicas get what was written until then.
    pub stop: &'a AtomicBool,
    /// While it is true, nothing is sent.
    pub pause: &'a AtomicBool,
    /// Gets the events.
    pub tell: &'a dyn Fn(GroupEvent<'_>),
    /// Gets the progress of transfers.
    pub progress: Progress<'a>,
    /// Counts the turns of its loop.
    pub turns: &'a Turns,
}

impl GroupMirror<'_> {
    /// Runs until stopped.
    ///
    /// # Errors
    /// Any error at the beginning; later, only those that another attempt cannot fix.
    pub fn run(mut self) -> Result<GroupMirrorSummary, SyncError> {
        let began = Instant::now();
        let mut summary = GroupMirrorSummary::default();
        let stop = self.stop;
        let mut attempts = Attempts::new(stop, self.rpo, self.busy_for);
        loop {
            let before = summary.commits;
            let ended = self.converse(&mut summary, &attempts);
            if summary.commits > before {
                attempts.succeeded();
            }
            match ended {
                Ok(()) => break,
                Err(error) => {
                    let tell = |trouble: Interruption<'_>| (self.tell)(trouble.into());
                    summary.broken += u64::from(attempts.failed(error, &tell)?);
                }
            }
        }
        summary.seconds = began.elapsed().as_secs_f64();
        Ok(summary)
    }

    /// One conversation, until stopped or an error.
    fn converse(
        &mut self,
        summary: &mut GroupMirrorSummary,
        attempts: &Attempts<'_>,
    ) -> Result<(), SyncError> {
        let group = (self.attach)()?;
        summary.group = group.name().to_owned();
        let connected = (self.connect)().inspect_err(|error| self.count_failure(&group, error));
        let (sender, receiver) = connected?.split();
        let traffic = sender.traffic();
        let mirrored = (|| {
            let first = summary.commits == 0;
            let options = &self.options;
            let options = SyncOptions {
                adopt: options.adopt && first,
                accept_source: options.accept_source && first,
                create: options.create && first,
                ..SyncOptions::clone(options)
            };
            let ends = (&sender, &receiver);
            let mut session =
                GroupSession::begin(ends, &group, (self.dir, self.name), &options, self.progress)?;
            self.rounds(&group, &mut session, summary, attempts)
        })();
        summary.bytes_sent += traffic.sent();
        let mirrored = part(sender, &receiver, mirrored);
        mirrored.map_err(|error| match group.members().iter().find(|member| member.is_abandoned()) {
            Some(gone) => SourceError::Away(gone.about().path.clone()).into(),
            None => error,
        })
    }

    /// The other side could not be reached.
    fn count_failure(&self, group: &GroupHandle, error: &SyncError) {
        for (handle, file) in group.members().iter().zip(group.files()) {
            let name = format!("{}/{file}", self.name.trim_end_matches('/'));
            count_failure(handle, &self.dir.join(file), &name, &self.options.way, &error.to_string());
        }
    }

    fn rounds(
        &self,
        group: &GroupHandle,
        session: &mut GroupSession<'_>,
        summary: &mut GroupMirrorSummary,
        attempts: &Attempts<'_>,
    ) -> Result<(), SyncError> {
        // Also without a write now and then: another command may have ended an epoch.
        let mut last: Option<Instant> = None;
        loop {
            // Asked first: what is written before the stop is in the last round.
            let stops = self.stop.load(SeqCst);
            let began = Instant::now();
            let due = !self.pause.load(SeqCst) || stops;
            let changed = || self.turns.within(|| has_changed(group));
            if due && (last.is_none_or(|last| last.elapsed() >= self.rpo / 2) || changed()?) {
                let (committed, members) = session.round()?;
                // As for the batches of one disk: only the first round may be long.
                group.members().iter().for_each(|member| member.be_polite(false));
                last = Some(began);
                summary.commits += 1;
                summary.bytes_changed += members.iter().map(|member| member.bytes_changed).sum::<u64>();
                summary.epoch = committed.epoch;
                (self.tell)(GroupEvent::Committed(&committed, &members));
            }
            if stops {
                return Ok(());
            }
            // As long as there is time for two rounds within the bound.
            let least = self.least(group);
            let interval = (began.elapsed() * 2).max(least).min((self.rpo / 2).max(least));
            self.turns.within(|| self.rest_until(began + interval, attempts));
        }
    }

    /// The shortest time from one cut to the next. A hook is asked four times within the bound at most.
    fn least(&self, group: &GroupHandle) -> Duration {
        match &self.options.hook {
            Some(_) => (self.rpo / 4).max(LEAST_HELD),
            None if group.is_live() => LEAST_HELD,
            None => LEAST,
        }
    }

    fn rest_until(&self, until: Instant, attempts: &Attempts<'_>) {
        while Instant::now() < until && !self.stop.load(SeqCst) {
            attempts.rest_until(until.min(Instant::now() + TURN));
            self.turns.turn();
        }
    }
}

/// True if something was written since the last cut, or that is not known.
fn has_changed(group: &GroupHandle) -> Result<bool, SyncError> {
    let changed = |member: &Handle| member.status().map(|status| status.dirty > 0 || status.lost.is_some());
    for member in group.members() {
        if changed(member)? {
            return Ok(true);
        }
    }
    Ok(false)
}
