//! A mirror of a group: one common commit after the other, over one conversation for as long as that lasts.
//!
//! Each commit is a cut of all sources, of what was written since the one before. Nothing is sent while nothing is written. After a
//! failure the next conversation finds what the replicas lack in the histories of their sources.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use link::Link;
use serde::Serialize;
use source::{GroupHandle, Handle, SourceError};

use super::rounds::Rounds;
use super::{Ended, Turns};
use crate::error::SyncError;
use crate::mirror::attempts::{Attempts, Interruption, rest_while};
use crate::options::SyncOptions;
use crate::report::{Progress, Summary};
use crate::source_end::account::{count_failure, note_pause};
use crate::source_end::push::GroupSummary;
use crate::source_end::session::Session;
use crate::wire::messages::part;

/// Events, for the caller to report.
#[derive(Debug)]
pub enum GroupEvent<'a> {
    /// All replicas are at one moment.
    Committed(&'a GroupSummary, &'a [Summary]),
    /// Nothing is moved until it is told to go on.
    Paused,
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
    /// Keeps it from moving anything while true: a conversation ends after what was sent, and another begins later.
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
            let ended = self.converse(&mut summary);
            if summary.commits > before {
                attempts.succeeded();
            }
            match ended {
                Ok(Ended::Stopped) => break,
                Ok(_) => {}
                Err(error) => {
                    let tell = |trouble: Interruption<'_>| (self.tell)(trouble.into());
                    summary.broken += u64::from(attempts.failed(error, &tell)?);
                }
            }
        }
        summary.seconds = began.elapsed().as_secs_f64();
        Ok(summary)
    }

    /// One conversation, until stopped, a pause is over, or an error.
    fn converse(&mut self, summary: &mut GroupMirrorSummary) -> Result<Ended, SyncError> {
        let group = (self.attach)()?;
        summary.group = group.name().to_owned();
        self.rest_while_paused(&group);
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
            let (ends, place) = ((&sender, &receiver), (self.dir, self.name));
            let mut session = Session::of_group(ends, &group, place, &options, self.progress)?;
            let rounds = Rounds {
                disks: group.members(),
                rpo: self.rpo,
                hooked: self.options.hook.is_some(),
                stop: self.stop,
                pause: self.pause,
                turns: self.turns,
            };
            rounds.run(&mut session, |round| {
                let (committed, members) = GroupSummary::of(round, group.name(), self.name, false);
                summary.commits += 1;
                summary.bytes_changed += members.iter().map(|member| member.bytes_changed).sum::<u64>();
                summary.epoch = committed.epoch;
                (self.tell)(GroupEvent::Committed(&committed, &members));
            })
        })();
        summary.bytes_sent += traffic.sent();
        let mirrored = part(sender, &receiver, mirrored);
        mirrored.map_err(|error| match group.members().iter().find(|member| member.is_abandoned()) {
            Some(gone) => SourceError::Away(gone.about().path.clone()).into(),
            None => error,
        })
    }

    /// Each disk with the path of its replica, and how the user would name that.
    fn each(&self, group: &GroupHandle, mut run: impl FnMut(&Handle, &Path, &str)) {
        for (handle, file) in group.members().iter().zip(group.files()) {
            run(handle, &self.dir.join(file), &format!("{}/{file}", self.name.trim_end_matches('/')));
        }
    }

    /// The other side could not be reached.
    fn count_failure(&self, group: &GroupHandle, error: &SyncError) {
        self.each(group, |handle, path, name| {
            count_failure(handle, path, name, &self.options.way, &error.to_string());
        });
    }

    /// Sleeps as long as it is to pause, or until stopped.
    fn rest_while_paused(&self, group: &GroupHandle) {
        rest_while(self.pause, self.stop, |paused| {
            if paused {
                (self.tell)(GroupEvent::Paused);
            }
            self.each(group, |handle, path, name| note_pause(handle, path, name, &self.options.way, paused));
        });
    }
}
