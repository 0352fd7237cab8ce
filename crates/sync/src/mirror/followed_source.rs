//! A source whose writes are followed, over any number of conversations.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use delta::Epoch;
use extents::Bitmap;
use link::Link;
use source::{BatchFollower, Handle, SourceError};
use uuid::Uuid;

use super::session::{MirrorSession, Sent, SessionContext};
use super::{Ended, Mirror, MirrorEvent, MirrorSummary};
use crate::error::SyncError;
use crate::mirror::batching::Interval;
use crate::report::Summary;
use crate::source_end::account::{Account, count_failure};
use crate::source_end::push::push;
use crate::wire::messages::{MirrorPlan, Open, PLAN, Plan, StatusReply, open, part};

/// A followed source, and what the replica may have of it.
pub(super) struct FollowedSource {
    handle: Handle,
    batches: BatchFollower,
    /// Where the replica was last known to be.
    at: At,
    /// Batches that were sent and not confirmed, oldest first.
    unconfirmed: VecDeque<Sent>,
    interval: Interval,
    epoch_began: Instant,
    count: u64,
    /// How long the last conversation lasted.
    pub(super) stood: Duration,
}

/// Where a replica is.
#[derive(Clone, Copy, PartialEq)]
enum At {
    /// At an epoch, by a sync.
    Epoch(Option<Epoch>),
    /// Where the batch of this stream left it.
    Batch(Uuid),
}

/// Reaches the replica's side.
pub(super) fn connect(handle: &Handle, mirror: &mut Mirror<'_>) -> Result<Link, SyncError> {
    let way = &mirror.options.sync.way;
    (mirror.connect)().inspect_err(|error| {
        count_failure(handle, mirror.destination, mirror.name, way, &error.to_string());
    })
}

/// Brings the replica to the source's present state.
fn sync(handle: &Handle, mirror: &mut Mirror<'_>, summary: &mut MirrorSummary) -> Result<Summary, SyncError> {
    let link = connect(handle, mirror)?;
    let options = mirror.options_of(summary);
    let synced = push(handle, link, mirror.destination, mirror.name, &options, mirror.progress)?;
    mirror.synced(&synced, summary);
    Ok(synced)
}

/// The error, or the loss of the source's server, which has many symptoms.
pub(super) fn or_away(handle: &Handle, error: SyncError) -> SyncError {
    match handle.is_abandoned() {
        true => SourceError::Away(handle.about().path.clone()).into(),
        false => error,
    }
}

impl FollowedSource {
    /// The source.
    pub(super) fn source(&self) -> &Handle {
        &self.handle
    }

    /// Follows the source, and syncs: batches can continue from there.
    pub(super) fn begin(
        handle: Handle,
        mirror: &mut Mirror<'_>,
        summary: &mut MirrorSummary,
    ) -> Result<FollowedSource, SyncError> {
        // Before the checkpoint of the sync: what is written from there on is in the first batch.
        let batches = handle.follow()?;
        let synced = sync(&handle, mirror, summary).map_err(|error| or_away(&handle, error))?;
        let epoch = handle.last_epoch()?.filter(|e| Some(e.number) == synced.epoch);
        Ok(FollowedSource {
            handle,
            batches,
            at: At::Epoch(epoch),
            unconfirmed: VecDeque::new(),
            interval: Interval::new(&mirror.options.batching),
            epoch_began: Instant::now(),
            count: 0,
            stood: Duration::ZERO,
        })
    }

    /// Continues until stopped or an error.
    pub(super) fn go_on(
        &mut self,
        mirror: &mut Mirror<'_>,
        summary: &mut MirrorSummary,
    ) -> Result<Ended, SyncError> {
        self.converse(mirror, summary).map_err(|error| or_away(&self.handle, error))
    }

    /// Releases the source.
    pub(super) fn close(self) -> Result<(), SyncError> {
        Ok(self.handle.close()?)
    }

    /// Resumes batches where the replica is, until stopped or an error.
    fn converse(&mut self, mirror: &mut Mirror<'_>, summary: &mut MirrorSummary) -> Result<Ended, SyncError> {
        self.stood = Duration::ZERO;
        let link = connect(&self.handle, mirror)?;
        let (traffic, way) = (link.traffic(), &mirror.options.sync.way);
        let account = Account::begin(&self.handle, (mirror.destination, mirror.name), way, "mirror");
        account.within(mirror.options.batching.rpo);
        let ended = self.converse_over(link, mirror, summary, &account);
        summary.bytes_sent += traffic.sent();
        account.mirrored(&ended, traffic.sent());
        ended
    }

    /// Resumes batches over a link where the replica is, until stopped or an error.
    fn converse_over(
        &mut self,
        link: Link,
        mirror: &mut Mirror<'_>,
        summary: &mut MirrorSummary,
        account: &Account,
    ) -> Result<Ended, SyncError> {
        let options = mirror.options;
        let (folder, commit) = (&options.sync.journal_dir, options.sync.commit);
        let replica = Open::new(mirror.destination, folder, commit).beside(&self.handle)?;
        let replica = Open { keep: options.sync.keep.clone(), ..replica };
        let (sender, receiver) = link.split();
        let status = open(&sender, &receiver, replica, options.sync.bwlimit.as_ref())?;
        // A batch that gives way keeps its view for longer, of which the guest feels more than it is spared.
        self.handle.be_polite(false);
        account.opened();
        let Some(lacking) = self.recognise(&status) else {
            return part(sender, &receiver, Ok(Ended::Apart));
        };
        for changes in lacking {
            self.batches.give_back(&changes)?;
        }
        let plan = MirrorPlan { stages: options.there };
        let plan = Plan { delta: true, mirror: Some(plan), ..Plan::default() };
        sender.send_json(PLAN, &plan)?;
        (mirror.tell)(MirrorEvent::Mirroring);
        let context = SessionContext {
            handle: &self.handle,
            batches: &self.batches,
            options,
            stop: mirror.stop,
            pause: mirror.pause,
            tell: mirror.tell,
            turns: mirror.turns,
            account,
            sender: &sender,
            receiver: &receiver,
        };
        let timing = (self.interval.clone(), self.epoch_began);
        let session = MirrorSession::new(context, mirror.name, &status, timing);
        let began = Instant::now();
        let (result, left) = session.run(&mut self.epoch_began, &mut self.count);
        self.stood = began.elapsed();
        self.interval = left.interval;
        self.unconfirmed = left.unconfirmed;
        self.at = At::Batch(left.confirmed.unwrap_or(status.replica.nonce));
        summary.batches += left.summary.batches;
        summary.bytes_changed += left.summary.bytes_changed;
        summary.epoch = left.summary.epoch.or(summary.epoch);
        result?;
        part(sender, &receiver, Ok(if left.paused { Ended::Paused } else { Ended::Stopped }))
    }

    /// The sent batches that the replica lacks, if it is where a batch left it.
    fn recognise(&mut self, status: &StatusReply) -> Option<Vec<Arc<Bitmap>>> {
        let status = &status.replica;
        if status.under_way() || status.resumes.is_some() || status.changed.is_some() {
            return None;
        }
        let sent = std::mem::take(&mut self.unconfirmed);
        let known = match self.at {
            At::Batch(stream) => stream == status.nonce,
            At::Epoch(epoch) => epoch.is_some() && epoch == status.epoch && status.unsure.is_empty(),
        };
        // Confirmations may have been lost with the link.
        let arrived = match sent.iter().position(|s| s.stream == status.nonce) {
            Some(at) => at + 1,
            None if known => 0,
            None => return None,
        };
        self.at = At::Batch(status.nonce);
        Some(sent.into_iter().skip(arrived).map(|s| s.changes).collect())
    }
}
