//! One session with the replica: batches are cut, read, packed and sent, and their confirmations received.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use delta::{Compressor, Encoder, Epoch, Frame, Header, Method, encode_frame};
use extents::Bitmap;
use lineage::Lives;
use link::{Received, Receiver, Sender};
use source::{Batch, BatchFollower, Handle, Reached};
use uuid::Uuid;

use super::epoch_hook::{EpochHook, HookAnswer};
use super::grid::Grid;
use super::{BatchReport, LOOK_EVERY, MirrorEvent, MirrorOptions, MirrorSummary, Turns};
use crate::error::{Class, SyncError};
use crate::mirror::batching::Interval;
use crate::plan::facts::bookmark;
use crate::plan::read::{FrameReader, FrameSize, WantedBlocks};
use crate::report::RunningTotals;
use crate::source_end::account::Account;
use crate::transfer::pack::{Sink, reading};
use crate::wire::messages::{BATCH, Confirmed, StatusReply, text, unexpected};

/// How often the server is told where the replica is.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// The most batches in transit.
const WINDOW: usize = 16;

/// A batch in transit.
pub(super) struct Sent {
    pub(super) stream: Uuid,
    epoch: Epoch,
    ends: bool,
    pub(super) changes: Arc<Bitmap>,
    blocks: u64,
    bytes: u64,
    cut: Instant,
    /// The previous cut: what was written just after it has waited until now.
    cut_before: Instant,
    primary: Option<Duration>,
}

/// What a session needs from the mirror.
pub(super) struct SessionContext<'a> {
    pub(super) handle: &'a Handle,
    pub(super) batches: &'a BatchFollower,
    pub(super) options: &'a MirrorOptions,
    pub(super) stop: &'a AtomicBool,
    pub(super) pause: &'a AtomicBool,
    pub(super) tell: &'a (dyn Fn(MirrorEvent<'_>) + Sync),
    pub(super) turns: &'a Turns,
    pub(super) account: &'a Account,
    pub(super) sender: &'a Sender,
    pub(super) receiver: &'a Receiver,
}

/// One session with the replica.
pub(super) struct MirrorSession<'a> {
    context: SessionContext<'a>,
    bookmark: String,
    /// The state that the first batch is bound to, and the lives that led to it.
    nonce: Uuid,
    known: Lives,
    size: u64,
    state: Mutex<SessionState>,
    changed: Condvar,
    /// Held around the end of each epoch.
    hook: Option<EpochHook>,
}

impl<'a> Deref for MirrorSession<'a> {
    type Target = SessionContext<'a>;

    fn deref(&self) -> &SessionContext<'a> {
        &self.context
    }
}

/// The state of a session, passed on to the next.
pub(super) struct SessionState {
    /// Batches that were sent and not confirmed, oldest first.
    pub(super) unconfirmed: VecDeque<Sent>,
    pub(super) interval: Interval,
    /// When epochs end because the replica keeps moments.
    grid: Option<Grid>,
    /// The last batch that was sent ends within an epoch.
    ahead: bool,
    /// The last epoch that one has ended, or at which the replica was before.
    at: Option<Epoch>,
    /// The moment of the source that the replica is known to have reached.
    reached: Option<Instant>,
    /// The last batch that was confirmed.
    pub(super) confirmed: Option<Uuid>,
    pub(super) summary: MirrorSummary,
    failed: Option<SyncError>,
    /// No batch will follow.
    ended: bool,
    /// That is because of a pause.
    pub(super) paused: bool,
}

/// What passes through the stages.
enum Item {
    Header(Box<Header>),
    Frame(Uuid, u64, Frame),
    Trailer(Uuid, Instant),
}

enum Packed {
    Frame(Box<delta::Encoded>),
    Other(Item),
}

impl<'a> MirrorSession<'a> {
    /// A session with the replica that the user calls `name`, from where it is.
    pub(super) fn new(
        context: SessionContext<'a>,
        name: &str,
        status: &StatusReply,
        (interval, epoch_began): (Interval, Instant),
    ) -> MirrorSession<'a> {
        let state = SessionState {
            unconfirmed: VecDeque::new(),
            interval,
            grid: Grid::new(status.moments, epoch_began.elapsed()),
            ahead: !status.replica.unsure.is_empty(),
            at: status.replica.epoch,
            reached: None,
            confirmed: None,
            summary: MirrorSummary::default(),
            failed: None,
            ended: false,
            paused: false,
        };
        let hook = context.options.sync.hook.clone();
        MirrorSession {
            hook: hook.map(|hook| EpochHook::new(hook, context.options.epoch_every)),
            bookmark: bookmark(name, status, &context.options.sync.way),
            context,
            nonce: status.replica.nonce,
            known: status.replica.role.lives.clone(),
            size: status.replica.size,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits a little, or until notified.
    fn wait(&self, least: Duration) {
        let state = self.state();
        let waited = self.changed.wait_timeout(state, least.min(self.options.look_every()));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Ends all of it.
    fn fail(&self, error: SyncError) {
        self.state().failed.get_or_insert(error);
        self.changed.notify_all();
        self.sender.cut();
    }

    /// Runs until stopped or an error. The first error is returned, as the others follow from it.
    pub(super) fn run(
        self,
        epoch_began: &mut Instant,
        count: &mut u64,
    ) -> (Result<(), SyncError>, SessionState) {
        std::thread::scope(|scope| {
            let hear = || self.hear().unwrap_or_else(|error| self.fail(error));
            let hearing = std::thread::Builder::new().name("hear".into()).spawn_scoped(scope, hear);
            let hearing = match hearing {
                Ok(hearing) => hearing,
                Err(error) => return self.fail(SyncError::io("start a thread")(error)),
            };
            match self.send_batches(epoch_began, count) {
                Ok(()) => {
                    self.state().ended = true;
                    self.changed.notify_all();
                }
                Err(error) => {
                    let mut state = self.state();
                    // After an error of the source, the blocks of a batch may be gone: this must not look like a link
                    // that broke, after which batches continue.
                    let tells_more = matches!(error, SyncError::Source(_));
                    if tells_more || state.failed.as_ref().is_none_or(|e| matches!(e, SyncError::Stopped)) {
                        state.failed = Some(error);
                    }
                    drop(state);
                    // The far side's reason may still be in transit; nothing more is expected after it.
                    self.wait(LOOK_EVERY);
                    self.sender.cut();
                }
            }
            let _ = hearing.join();
        });
        let mut state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let failed = state.failed.take();
        (failed.map_or(Ok(()), Err), state)
    }

    /// Batch after batch through the stages.
    fn send_batches(&self, epoch_began: &mut Instant, count: &mut u64) -> Result<(), SyncError> {
        let mut encoder: Option<Encoder> = None;
        let totals = RunningTotals::new(&|_, _| {});
        let level = self.options.sync.compress;
        self.options.here.run(
            |give| self.turns.within(|| self.cut_batches(give, epoch_began, count, &totals)),
            || level.and_then(|level| Compressor::new(level).ok()),
            |compressor, item| match item {
                Item::Frame(stream, sequence, frame) => {
                    let encoded = encode_frame(stream, sequence, frame, compressor.as_mut())?;
                    Ok(Packed::Frame(Box::new(encoded)))
                }
                other => Ok(Packed::Other(other)),
            },
            |packed| {
                let mut sink = self.sender;
                match (packed, &mut encoder) {
                    (Packed::Other(Item::Header(header)), _) => {
                        let (begun, unit) = Encoder::new(&header, None)?;
                        encoder = Some(begun);
                        sink.unit(unit)
                    }
                    (Packed::Frame(frame), Some(encoder)) => sink.unit(encoder.append(*frame)?),
                    (Packed::Other(Item::Trailer(stream, cut)), slot) => {
                        if let Some(encoder) = slot.take() {
                            sink.unit(encoder.trailer())?;
                        }
                        self.sent(stream, cut.elapsed());
                        Ok(())
                    }
                    _ => Ok(()),
                }
            },
            || {
                self.state().failed.get_or_insert(SyncError::Stopped);
                self.changed.notify_all();
            },
        )
    }

    /// The source's site has finished a batch.
    fn sent(&self, stream: Uuid, took: Duration) {
        let mut state = self.state();
        state.interval.primary(took);
        if let Some(sent) = state.unconfirmed.iter_mut().find(|s| s.stream == stream) {
            sent.primary = Some(took);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Cuts batches on time, reads them, and passes their frames on.
    fn cut_batches(
        &self,
        give: &mut dyn FnMut(Item) -> Result<(), SyncError>,
        epoch_began: &mut Instant,
        count: &mut u64,
        totals: &RunningTotals<'_>,
    ) -> Result<(), SyncError> {
        let mut nonce = self.nonce;
        let block_size = u64::from(self.handle.about().block_size);
        let mut cut_before = Instant::now();
        let mut pause = Duration::ZERO;
        let hook = self.hook.as_ref();
        loop {
            let Some(last) = self.await_interval(cut_before, pause)? else { return Ok(()) };
            let due = epoch_began.elapsed() >= self.options.epoch_every && self.state().ahead;
            let due = due || self.moment_is_due()?;
            if last && !self.state().ahead && self.batches.pending()? == 0 {
                return Ok(());
            }
            let held = hook.filter(|hook| (last || due) && self.holds(hook, last));
            // Without its hook no epoch ends, not even the last: the replica is ahead of one then, as it is after a kill.
            let ends = (last || due) && (held.is_some() || hook.is_none());
            let cut = Instant::now();
            let at = self.state().at;
            let batch = self.batches.next(at, ends);
            held.inspect(|hook| hook.cut(batch.as_ref().is_ok_and(Option::is_some)));
            let Some(batch) = batch? else {
                // Nothing was written: the next check may come later, as no write is waiting.
                (pause, cut_before) = (Duration::ZERO, cut);
                let mut state = self.state();
                if state.unconfirmed.is_empty() {
                    state.reached = Some(cut);
                }
                drop(state);
                if last {
                    return Ok(());
                }
                self.wait(LOOK_EVERY);
                continue;
            };
            if ends {
                *epoch_began = cut;
                self.state().grid.iter_mut().for_each(Grid::ends);
            }
            *count += 1;
            let stream = Uuid::new_v4();
            let blocks = batch.changes.count();
            let bytes = blocks * block_size;
            self.begin_batch(&batch, stream, ends, (blocks, bytes), (cut, cut_before));
            pause = self.state().interval.at_least(bytes);
            cut_before = cut;
            give(Item::Header(Box::new(self.header(&batch, stream, nonce, ends)?)))?;
            nonce = stream;
            self.read(&batch, (stream, bytes), give, totals)?;
            self.batches.done(&batch)?;
            give(Item::Trailer(stream, cut))?;
            if !self.options.here.overlap {
                self.await_sent(stream)?;
            }
            if last {
                return Ok(());
            }
        }
    }

    /// True if the replica keeps a moment of each period, another one has begun, and something has changed.
    fn moment_is_due(&self) -> Result<bool, SyncError> {
        let (due, ahead) = {
            let state = self.state();
            (state.grid.as_ref().is_some_and(Grid::is_due), state.ahead)
        };
        Ok(due && (ahead || self.batches.pending()? > 0))
    }

    /// True once the hook holds. If it fails, that is said, and it is asked again after the time of an epoch. Only for the last
    /// batch this waits for it.
    fn holds(&self, hook: &EpochHook, last: bool) -> bool {
        loop {
            match hook.hold(last) {
                HookAnswer::Ready => return true,
                HookAnswer::Failed(error) => {
                    (self.tell)(MirrorEvent::Warned(&error.to_string()));
                    return false;
                }
                HookAnswer::Waiting if last && self.state().failed.is_none() => {
                    self.turns.turn();
                    self.wait(LOOK_EVERY);
                }
                HookAnswer::Waiting => return false,
            }
        }
    }

    /// Waits for the time of the next cut. `None` if there will be none; otherwise whether it is the last.
    fn await_interval(&self, cut_before: Instant, pause: Duration) -> Result<Option<bool>, SyncError> {
        let hook = self.hook.as_ref();
        loop {
            self.turns.turn();
            let (interval, threshold, on_their_way, next_moment) = {
                let state = self.state();
                if state.failed.is_some() {
                    return Ok(None);
                }
                let next_moment = state.grid.as_ref().map_or(Duration::MAX, Grid::until_next);
                let interval = &state.interval;
                (interval.current(), interval.threshold(), state.unconfirmed.len(), next_moment)
            };
            if self.stop.load(SeqCst) {
                return Ok(Some(true));
            }
            if self.pause.load(SeqCst) {
                self.state().paused = true;
                return Ok(None);
            }
            let past = cut_before.elapsed();
            let due = interval.max(pause);
            if on_their_way >= WINDOW {
                self.wait(LOOK_EVERY);
            } else if past >= due
                || hook.is_some_and(EpochHook::has_answered)
                || (past >= pause && on_their_way <= 1 && self.batches.pending()? >= threshold)
                || (past >= pause && hook.is_none_or(EpochHook::may_be_asked) && self.moment_is_due()?)
            {
                return Ok(Some(false));
            } else {
                // Wakes up in between: much may be written in a long interval.
                let wait = (due - past).min((interval / 2).max(Duration::from_millis(5)));
                self.wait(wait.min(next_moment.max(Duration::from_millis(1))));
            }
        }
    }

    fn await_sent(&self, stream: Uuid) -> Result<(), SyncError> {
        loop {
            let state = self.state();
            if state.failed.is_some() {
                return Err(SyncError::Stopped);
            }
            let waits = state.unconfirmed.iter().any(|s| s.stream == stream && s.primary.is_none());
            drop(state);
            if !waits {
                return Ok(());
            }
            self.wait(LOOK_EVERY);
        }
    }

    fn begin_batch(
        &self,
        batch: &Batch,
        stream: Uuid,
        ends: bool,
        (blocks, bytes): (u64, u64),
        (cut, cut_before): (Instant, Instant),
    ) {
        let mut state = self.state();
        state.ahead = !ends;
        state.unconfirmed.push_back(Sent {
            stream,
            epoch: batch.epoch,
            ends,
            changes: batch.changes.clone(),
            blocks,
            bytes,
            cut,
            cut_before,
            primary: None,
        });
    }

    fn header(&self, batch: &Batch, stream: Uuid, nonce: Uuid, ends: bool) -> Result<Header, SyncError> {
        let about = self.handle.about();
        let sizes = (self.size, device::Disk::len(&*batch.view));
        let mut chain = vec![batch.epoch];
        let at = self.state().at;
        if ends {
            let way = self.handle.history()?.way(at.as_ref(), &batch.epoch);
            chain = if way.first() == at.as_ref() { way } else { chain };
            self.state().at = Some(batch.epoch);
        }
        let header = Header::new(about.uuid, Method::Tracked, chain, sizes, about.block_size);
        let lives = batch.lives.since(&self.known);
        Ok(Header { stream, binds: Some(nonce), batch: !ends, lives, ..header })
    }

    /// Reads a batch from its view.
    fn read(
        &self,
        batch: &Batch,
        (stream, bytes): (Uuid, u64),
        give: &mut dyn FnMut(Item) -> Result<(), SyncError>,
        totals: &RunningTotals<'_>,
    ) -> Result<(), SyncError> {
        let block_size = u64::from(self.handle.about().block_size);
        let size = device::Disk::len(&*batch.view);
        let wanted = WantedBlocks::marked(batch.changes.clone(), size, block_size);
        let how = (FrameSize::shared(bytes, block_size), false);
        let mut frames = FrameReader::new(&wanted, &batch.view, how, totals).map_err(reading)?;
        let mut sequence = 0;
        while let Some((frame, end)) = frames.next(None).map_err(reading)? {
            batch.view.taken(end);
            give(Item::Frame(stream, sequence, frame))?;
            self.turns.turn();
            sequence += 1;
        }
        batch.view.verify().map_err(reading)
    }

    /// Receives confirmations, until all that was sent is confirmed and nothing more follows.
    fn hear(&self) -> Result<(), SyncError> {
        let mut told = Instant::now();
        loop {
            let reached = {
                let state = self.state();
                if state.failed.is_some() || (state.ended && state.unconfirmed.is_empty()) {
                    return Ok(());
                }
                state.reached
            };
            if let Some(reached) = reached.filter(|_| told.elapsed() >= TELL_EVERY) {
                told = Instant::now();
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                // For people and monitors only: a server that is older does not know of it.
                let _ = self.handle.reached(&self.bookmark, now.saturating_sub(reached.elapsed()).as_secs());
            }
            let message = match self.receiver.recv_within(self.options.look_every())? {
                Received::Message(message) => message,
                Received::Goodbye => {
                    return Err(SyncError::Far {
                        message: "the far side ended the mirror".into(),
                        class: Class::Failed,
                    });
                }
                Received::Nothing => continue,
            };
            match message.kind {
                BATCH => self.confirm(&message.json()?)?,
                _ => return Err(unexpected(&message)),
            }
        }
    }

    fn confirm(&self, confirmed: &Confirmed) -> Result<(), SyncError> {
        let mut state = self.state();
        let next = state.unconfirmed.pop_front().filter(|s| s.stream == confirmed.stream);
        let Some(sent) = next else {
            return Err(SyncError::Far {
                message: "the far side confirmed an unexpected batch".into(),
                class: Class::Failed,
            });
        };
        confirmed.warnings.iter().for_each(|warning| (self.tell)(MirrorEvent::Warned(&text(warning))));
        let whole = sent.cut.elapsed();
        // A peer's time cannot exceed the total.
        let backup = Duration::from_micros(confirmed.micros).min(whole);
        state.interval.backup(backup, whole, sent.blocks);
        (state.confirmed, state.reached) = (Some(sent.stream), Some(sent.cut));
        state.summary.batches += 1;
        state.summary.bytes_changed += sent.bytes;
        if sent.ends {
            state.summary.epoch = Some(sent.epoch.number);
        }
        let report = BatchReport {
            batch: state.summary.batches,
            epoch: sent.epoch.number,
            blocks: sent.blocks,
            bytes: sent.bytes,
            interval: state.interval.current().as_secs_f64(),
            primary: sent.primary.unwrap_or(whole).as_secs_f64(),
            backup: backup.as_secs_f64(),
            whole: whole.as_secs_f64(),
            lag: sent.cut_before.elapsed().as_secs_f64(),
            sent: self.sender.traffic().sent(),
        };
        drop(state);
        self.changed.notify_all();
        self.account.batch(report.bytes, report.sent, report.lag);
        (self.tell)(MirrorEvent::Batch(&report));
        if sent.ends {
            let (was, state) = (Some(self.nonce), Some(sent.stream));
            self.handle.acknowledge(&self.bookmark, Reached { was, state, ..Reached::epoch(sent.epoch) })?;
            (self.tell)(MirrorEvent::Epoch(sent.epoch.number));
            self.hook.iter().for_each(EpochHook::committed);
        }
        Ok(())
    }
}
