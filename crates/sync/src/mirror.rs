//! The source's end of a mirror: batch after batch, over the same views, deltas and commits as a sync.
//!
//! A mirror begins with a sync, and goes on with batches: parts of an epoch, each bound to the state that the one before leaves
//! at the replica. What was sent and is not confirmed is remembered, so that after a link fell the next batch takes up what
//! did not arrive. Whatever else goes wrong, a sync finds what the replica lacks in the source's history, as always.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use delta::{Compressor, Encoder, Epoch, Frame, Header, Method, encode_frame};
use extents::Bitmap;
use link::{Heard, Link, Receiver, Sender};
use serde::Serialize;
use source::{Batch, Batches, Handle};
use uuid::Uuid;

use crate::batching::{Batching, Interval};
use crate::error::{Class, SyncError};
use crate::messages::{
    BATCH, Confirmed, MirrorPlan, OPEN, Open, PING, PLAN, Plan, STANDING, Standing, expect, unexpected,
};
use crate::pipeline::Stages;
use crate::push::{Options, Packing, Progress, Sink, Summary, Totals, bookmark, push};
use crate::read::{FrameReader, FrameSize, Wanted};

/// Batches that may be on their way.
const WINDOW: usize = 16;
/// How often who waits looks at the world.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// After so long without a word the far side is asked for one.
const PING_EVERY: Duration = Duration::from_secs(5);
/// Between two attempts to reach the other side, at first and at most.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(30);

/// How to mirror.
#[derive(Debug, Clone)]
pub struct MirrorOptions {
    /// How the replica is brought up to date before the first batch, and after what no batch can mend.
    pub sync: Options,
    /// When batches are cut.
    pub batching: Batching,
    /// How the source's end shares its work.
    pub here: Stages,
    /// How the replica's end does.
    pub there: Stages,
    /// How often an epoch ends: after a crash of the source, what was written since is sent again.
    pub epoch_every: Duration,
    /// After so long without a word the far side is taken to be gone.
    pub timeout: Duration,
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
    /// The number of the epoch at which the replica stands, if it stands at one.
    pub epoch: Option<u64>,
    /// Wall-clock time.
    pub seconds: f64,
}

/// Mirrors a source until `stop` turns true, which ends the epoch and waits until the replica has it. `attach` reaches the
/// source, `connect` the replica's side; both are called again when they fail later on. `name` is how the user calls the
/// destination.
///
/// # Errors
/// What stands in the way at the beginning; later, only what trying again can't mend.
pub fn mirror(
    attach: &mut dyn FnMut() -> Result<Handle, SyncError>,
    connect: &mut dyn FnMut() -> Result<Link, SyncError>,
    (destination, name): (&Path, &str),
    options: &MirrorOptions,
    stop: &AtomicBool,
    tell: &(dyn Fn(MirrorEvent<'_>) + Sync),
    progress: Progress<'_>,
) -> Result<MirrorSummary, SyncError> {
    let began = Instant::now();
    let mut summary = MirrorSummary::default();
    let mut followed: Option<Followed> = None;
    let mut wait = FIRST_RETRY;
    // Until it has worked once, what fails is most likely the user's to mend: all but a link that was cut.
    let mut worked = false;
    let (mut busy, mut stopped) = (0, false);
    loop {
        let ended = match &mut followed {
            None => begin(attach, connect, (destination, name), options, &mut summary, tell, progress).map(
                |begun| {
                    followed = Some(begun);
                    worked = true;
                    Ended::Apart
                },
            ),
            Some(follow) => {
                let ended = match follow.handle.live() {
                    Some(_) => {
                        let both = (destination, name);
                        follow.round(connect, both, options, &mut summary, stop, tell, progress)
                    }
                    None => follow.mirror(connect, (destination, name), options, &mut summary, stop, tell),
                };
                // What was known of the source goes with its server, or where the replica is another.
                let anew = matches!(ended, Err(SyncError::Source(_)) | Ok(Ended::Apart));
                followed = followed.filter(|_| !anew);
                ended
            }
        };
        match ended {
            Ok(Ended::Stopped) => break,
            Ok(Ended::Apart | Ended::Round) => (wait, busy) = (FIRST_RETRY, 0),
            Err(error) if is_final(&error) || !(worked || is_cut(&error)) => return Err(error),
            // The end of the conversation before has not been heard everywhere yet.
            Err(error) if error.class() == Class::Busy && busy < BUSY_LOOKS => {
                busy += 1;
                std::thread::sleep(LOOK_EVERY);
            }
            // After the word to stop, one more attempt is worth its time, and no more.
            Err(error) if stopped => return Err(error),
            Err(error) => {
                summary.broken += 1;
                tell(MirrorEvent::Broken(&error, wait));
                let until = Instant::now() + wait;
                while Instant::now() < until && !stop.load(SeqCst) {
                    std::thread::sleep(LOOK_EVERY);
                }
                wait = (wait * 2).min(LAST_RETRY);
                stopped = stop.load(SeqCst);
            }
        }
    }
    summary.seconds = began.elapsed().as_secs_f64();
    if let Some(follow) = followed {
        follow.handle.close()?;
    }
    Ok(summary)
}

/// How often a replica that is in use is asked for again at once.
const BUSY_LOOKS: u32 = 40;

/// What another attempt can't mend: another source, another replica, a source that shrank. What is merely in use may be free
/// soon: the far side of a link that fell lets go when it notices.
fn is_final(error: &SyncError) -> bool {
    match error {
        // The far side of a source's restart.
        SyncError::Source(_) => false,
        _ => error.class() == Class::Refused,
    }
}

/// A link that stood and fell.
fn is_cut(error: &SyncError) -> bool {
    matches!(error, SyncError::Link(link::Error::Cut { .. }))
}

/// How a session ended in order.
enum Ended {
    /// All is confirmed, and the epoch has ended.
    Stopped,
    /// The replica does not stand where any batch left it: a sync must find what it lacks.
    Apart,
    /// A live disk's batch is done.
    Round,
}

/// Follows the source, and syncs: from there on batches can go on.
#[allow(clippy::too_many_arguments)]
fn begin(
    attach: &mut dyn FnMut() -> Result<Handle, SyncError>,
    connect: &mut dyn FnMut() -> Result<Link, SyncError>,
    (destination, name): (&Path, &str),
    options: &MirrorOptions,
    summary: &mut MirrorSummary,
    tell: &(dyn Fn(MirrorEvent<'_>) + Sync),
    progress: Progress<'_>,
) -> Result<Followed, SyncError> {
    let handle = attach()?;
    // Before the checkpoint of the sync: what is written from there on is in the first batch.
    let batches = if handle.live().is_some() { None } else { Some(handle.follow()?) };
    let synced = push(&handle, connect()?, destination, name, &options.sync, progress)?;
    summary.syncs += 1;
    summary.bytes_sent += synced.bytes_sent;
    summary.epoch = synced.epoch;
    tell(MirrorEvent::Synced(&synced));
    let epoch = handle.last_epoch()?.filter(|e| Some(e.number) == synced.epoch);
    Ok(Followed {
        handle,
        batches,
        at: At::Epoch(epoch),
        unconfirmed: VecDeque::new(),
        interval: Interval::new(&options.batching),
        epoch_began: Instant::now(),
        count: 0,
    })
}

/// A source that is followed, and what of it the replica may have.
struct Followed {
    handle: Handle,
    /// `None` for a live disk, each of whose batches is a sync.
    batches: Option<Batches>,
    /// Where the replica stood when it was last heard of.
    at: At,
    /// Batches that were sent and not confirmed, oldest first.
    unconfirmed: VecDeque<Sent>,
    interval: Interval,
    epoch_began: Instant,
    count: u64,
}

/// Where a replica stands.
#[derive(Clone, Copy, PartialEq)]
enum At {
    /// At an epoch, by a sync.
    Epoch(Option<Epoch>),
    /// Where the batch of this stream left it.
    Batch(Uuid),
}

/// A batch on its way.
struct Sent {
    stream: Uuid,
    epoch: Epoch,
    ends: bool,
    changes: Arc<Bitmap>,
    blocks: u64,
    bytes: u64,
    cut: Instant,
    /// The cut before: what was written just after it has waited until now.
    cut_before: Instant,
    primary: Option<Duration>,
}

impl Followed {
    /// A batch of a live disk: a sync with its freeze.
    #[allow(clippy::too_many_arguments)]
    fn round(
        &mut self,
        connect: &mut dyn FnMut() -> Result<Link, SyncError>,
        (destination, name): (&Path, &str),
        options: &MirrorOptions,
        summary: &mut MirrorSummary,
        stop: &AtomicBool,
        tell: &(dyn Fn(MirrorEvent<'_>) + Sync),
        progress: Progress<'_>,
    ) -> Result<Ended, SyncError> {
        // A freeze costs its writers: more than one a second is no way to treat a host.
        let interval = self.interval.current().max(Duration::from_secs(1));
        let until = self.epoch_began + interval;
        while Instant::now() < until && !stop.load(SeqCst) {
            std::thread::sleep(LOOK_EVERY);
        }
        // The last one begins after the word to stop: what was written before that is in it.
        let last = stop.load(SeqCst);
        let began = Instant::now();
        let synced = push(&self.handle, connect()?, destination, name, &options.sync, progress)?;
        self.interval.primary(began.elapsed());
        self.interval.backup(began.elapsed(), began.elapsed(), synced.blocks_changed);
        self.epoch_began = began;
        summary.syncs += 1;
        summary.batches += 1;
        summary.bytes_sent += synced.bytes_sent;
        summary.bytes_changed += synced.bytes_changed;
        summary.epoch = synced.epoch;
        tell(MirrorEvent::Synced(&synced));
        Ok(if last { Ended::Stopped } else { Ended::Round })
    }

    /// Takes up batches where the replica stands, until told to stop or something fails.
    fn mirror(
        &mut self,
        connect: &mut dyn FnMut() -> Result<Link, SyncError>,
        (destination, name): (&Path, &str),
        options: &MirrorOptions,
        summary: &mut MirrorSummary,
        stop: &AtomicBool,
        tell: &(dyn Fn(MirrorEvent<'_>) + Sync),
    ) -> Result<Ended, SyncError> {
        let (sender, receiver) = connect()?.split();
        if let Some(rate) = options.sync.bwlimit {
            sender.limit(rate);
        }
        let open = Open {
            path: destination.to_path_buf(),
            journal_dir: options.sync.journal_dir.clone(),
            commit: options.sync.commit,
            adopt: false,
            verify: false,
            digests: None,
        };
        sender.send_json(OPEN, &open)?;
        let standing: Standing = expect(&receiver, STANDING)?.json()?;
        let lacking = self.recognise(&standing);
        let (Some(lacking), Some(batches)) = (lacking, &self.batches) else {
            sender.finish()?;
            return Ok(Ended::Apart);
        };
        for changes in lacking {
            batches.give_back(&changes)?;
        }
        let plan = MirrorPlan {
            stages: options.there,
            timeout_ms: options.timeout.as_millis().try_into().unwrap_or(u32::MAX),
        };
        let mirror = Some(plan);
        let plan = Plan { bytes: 0, compare: None, rolling: None, delta: true, pass: false, mirror };
        sender.send_json(PLAN, &plan)?;
        tell(MirrorEvent::Mirroring);
        let traffic = sender.traffic();
        let session = Session {
            handle: &self.handle,
            batches,
            options,
            bookmark: bookmark(name, &standing),
            size: standing.size,
            stop,
            tell,
            sender: &sender,
            receiver: &receiver,
            state: Mutex::new(State {
                unconfirmed: VecDeque::new(),
                interval: self.interval.clone(),
                ahead: standing.ahead,
                confirmed: None,
                summary: MirrorSummary::default(),
                failed: None,
                ended: false,
            }),
            changed: Condvar::new(),
        };
        let result = session.run(standing.nonce, &mut self.epoch_began, &mut self.count);
        let state = session.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.interval = state.interval;
        self.unconfirmed = state.unconfirmed;
        self.at = At::Batch(state.confirmed.unwrap_or(standing.nonce));
        summary.batches += state.summary.batches;
        summary.bytes_changed += state.summary.bytes_changed;
        summary.epoch = state.summary.epoch.or(summary.epoch);
        summary.bytes_sent += traffic.sent();
        match (result, state.failed) {
            // What failed first tells why the others did.
            (_, Some(error)) | (Err(error), None) => Err(error),
            (Ok(()), None) => {
                sender.finish()?;
                while receiver.recv()?.is_some() {}
                Ok(Ended::Stopped)
            }
        }
    }

    /// What the replica lacks of what was sent, if it stands where a batch has left it.
    fn recognise(&mut self, standing: &Standing) -> Option<Vec<Arc<Bitmap>>> {
        if standing.under_way || standing.resumes.is_some() || standing.changed.is_some() {
            return None;
        }
        let sent = std::mem::take(&mut self.unconfirmed);
        let known = match self.at {
            At::Batch(stream) => stream == standing.nonce,
            At::Epoch(epoch) => epoch.is_some() && epoch == standing.epoch && !standing.ahead,
        };
        // Confirmations may have been lost with the link.
        let arrived = match sent.iter().position(|s| s.stream == standing.nonce) {
            Some(at) => at + 1,
            None if known => 0,
            None => return None,
        };
        self.at = At::Batch(standing.nonce);
        Some(sent.into_iter().skip(arrived).map(|s| s.changes).collect())
    }
}

/// One conversation with the replica.
struct Session<'a> {
    handle: &'a Handle,
    batches: &'a Batches,
    options: &'a MirrorOptions,
    bookmark: String,
    size: u64,
    stop: &'a AtomicBool,
    tell: &'a (dyn Fn(MirrorEvent<'_>) + Sync),
    sender: &'a Sender,
    receiver: &'a Receiver,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    unconfirmed: VecDeque<Sent>,
    interval: Interval,
    /// The last batch that was sent ends within an epoch.
    ahead: bool,
    /// The last batch that was confirmed.
    confirmed: Option<Uuid>,
    summary: MirrorSummary,
    failed: Option<SyncError>,
    /// No batch will follow.
    ended: bool,
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

impl Session<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits a little, or until something happens.
    fn wait(&self, least: Duration) {
        let state = self.state();
        let waited = self.changed.wait_timeout(state, least.min(LOOK_EVERY));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Ends all of it.
    fn fail(&self, error: SyncError) {
        self.state().failed.get_or_insert(error);
        self.changed.notify_all();
        self.sender.cut();
    }

    fn run(&self, nonce: Uuid, epoch_began: &mut Instant, count: &mut u64) -> Result<(), SyncError> {
        std::thread::scope(|scope| {
            let hearing = scope.spawn(|| {
                self.hear().unwrap_or_else(|error| self.fail(error));
            });
            let mut encoder: Option<Encoder> = None;
            let totals = Totals::default();
            let level = self.options.sync.compress;
            let sent = self.options.here.run(
                |give| self.cut_batches(give, nonce, epoch_began, count, &totals),
                || level.and_then(|level| Compressor::new(level).ok()),
                |compressor, item| match item {
                    Item::Frame(stream, sequence, frame) => Ok(Packed::Frame(Box::new(encode_frame(
                        stream,
                        sequence,
                        frame,
                        compressor.as_mut(),
                    )?))),
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
                    self.state().failed.get_or_insert(SyncError::Refused("stopped".into()));
                    self.changed.notify_all();
                },
            );
            match sent {
                Ok(()) => {
                    self.state().ended = true;
                    self.changed.notify_all();
                }
                Err(error) => {
                    let mut state = self.state();
                    if state.failed.as_ref().is_none_or(|e| matches!(e, SyncError::Refused(_))) {
                        state.failed = Some(error);
                    }
                    drop(state);
                    // The reason may still be on its way from the far side; then nothing more is expected of it.
                    self.wait(LOOK_EVERY);
                    self.sender.cut();
                }
            }
            let _ = hearing.join();
            Ok(())
        })
    }

    /// The source's site is through with a batch.
    fn sent(&self, stream: Uuid, took: Duration) {
        let mut state = self.state();
        state.interval.primary(took);
        if let Some(sent) = state.unconfirmed.iter_mut().find(|s| s.stream == stream) {
            sent.primary = Some(took);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Cuts batches in time, reads them, and gives their frames on.
    fn cut_batches(
        &self,
        give: &mut dyn FnMut(Item) -> Result<(), SyncError>,
        mut nonce: Uuid,
        epoch_began: &mut Instant,
        count: &mut u64,
        totals: &Totals,
    ) -> Result<(), SyncError> {
        let block_size = u64::from(self.handle.about().block_size);
        let mut cut_before = Instant::now();
        let mut pause = Duration::ZERO;
        loop {
            let Some(last) = self.await_interval(cut_before, pause)? else { return Ok(()) };
            let due = epoch_began.elapsed() >= self.options.epoch_every && self.state().ahead;
            let ends = last || due;
            if last && !self.state().ahead && self.batches.pending()? == 0 {
                return Ok(());
            }
            let cut = Instant::now();
            let Some(batch) = self.batches.next(ends)? else {
                // Nothing was written: the next look may come later, and nobody's write has waited.
                (pause, cut_before) = (Duration::ZERO, cut);
                self.wait(LOOK_EVERY);
                continue;
            };
            if ends {
                *epoch_began = cut;
            }
            *count += 1;
            let stream = Uuid::new_v4();
            let blocks = batch.changes.count();
            let bytes = blocks * block_size;
            self.begin_batch(&batch, stream, ends, (blocks, bytes), (cut, cut_before));
            pause = self.state().interval.at_least(bytes);
            cut_before = cut;
            give(Item::Header(Box::new(self.header(&batch, stream, nonce, ends))))?;
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

    /// Waits for the moment of the next cut. `None` if there will be none; else whether it is the last.
    fn await_interval(&self, cut_before: Instant, pause: Duration) -> Result<Option<bool>, SyncError> {
        loop {
            let (interval, threshold, on_their_way) = {
                let state = self.state();
                if state.failed.is_some() {
                    return Ok(None);
                }
                (state.interval.current(), state.interval.threshold(), state.unconfirmed.len())
            };
            if self.stop.load(SeqCst) {
                return Ok(Some(true));
            }
            let past = cut_before.elapsed();
            let due = interval.max(pause);
            if on_their_way >= WINDOW {
                self.wait(LOOK_EVERY);
            } else if past >= due
                || (past >= pause && on_their_way <= 1 && self.batches.pending()? >= threshold)
            {
                return Ok(Some(false));
            } else {
                // Not slept through: much may be written in a long interval.
                self.wait((due - past).min((interval / 2).max(Duration::from_millis(5))));
            }
        }
    }

    fn await_sent(&self, stream: Uuid) -> Result<(), SyncError> {
        loop {
            let state = self.state();
            if state.failed.is_some() {
                return Err(SyncError::Refused("stopped".into()));
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

    fn header(&self, batch: &Batch, stream: Uuid, nonce: Uuid, ends: bool) -> Header {
        let about = self.handle.about();
        Header {
            stream,
            source: about.uuid,
            chain: vec![batch.epoch],
            size_before: self.size,
            size_after: device::Disk::len(&*batch.view),
            block_size: about.block_size,
            method: Method::Tracked,
            binds: Some(nonce),
            resumes: None,
            fuzzy: false,
            lacking: false,
            ahead: !ends,
        }
    }

    /// Reads a batch from its view.
    fn read(
        &self,
        batch: &Batch,
        (stream, bytes): (Uuid, u64),
        give: &mut dyn FnMut(Item) -> Result<(), SyncError>,
        totals: &Totals,
    ) -> Result<(), SyncError> {
        let block_size = u64::from(self.handle.about().block_size);
        let size = device::Disk::len(&*batch.view);
        let wanted =
            Wanted { changes: batch.changes.clone(), block_size, size, all_from: u64::MAX, to_end: false };
        let packing = Packing {
            compress: self.options.sync.compress,
            size: FrameSize::shared(bytes, block_size),
            lacking: false,
            pass: false,
        };
        let reading = || SyncError::io("read the view of the source");
        let mut frames = FrameReader::new(&wanted, &batch.view, &packing, totals).map_err(reading())?;
        let mut sequence = 0;
        while let Some((frame, end)) = frames.next(None).map_err(reading())? {
            batch.view.taken(end);
            give(Item::Frame(stream, sequence, frame))?;
            sequence += 1;
        }
        batch.view.verify().map_err(reading())
    }

    /// Hears confirmations, until all that was sent is confirmed and nothing more will be.
    fn hear(&self) -> Result<(), SyncError> {
        let traffic = self.sender.traffic();
        let (mut received, mut heard, mut pinged) = (traffic.received(), Instant::now(), Instant::now());
        loop {
            {
                let state = self.state();
                if state.failed.is_some() || (state.ended && state.unconfirmed.is_empty()) {
                    return Ok(());
                }
            }
            let message = match self.receiver.recv_within(LOOK_EVERY)? {
                Heard::Message(message) => message,
                Heard::Goodbye => {
                    return Err(SyncError::Far {
                        message: "the far side ended the mirror".into(),
                        class: Class::Failed,
                    });
                }
                Heard::Nothing => {
                    if traffic.received() != received {
                        (received, heard) = (traffic.received(), Instant::now());
                    }
                    if heard.elapsed() > self.options.timeout {
                        return Err(SyncError::Far {
                            message: format!(
                                "nothing came from the far side for {} s: the link is given up",
                                self.options.timeout.as_secs()
                            ),
                            class: Class::Failed,
                        });
                    }
                    let idle = self.state().unconfirmed.is_empty();
                    if idle && pinged.elapsed() > PING_EVERY {
                        pinged = Instant::now();
                        self.sender.send_json(PING, &())?;
                    }
                    continue;
                }
            };
            (received, heard) = (traffic.received(), Instant::now());
            match message.kind {
                PING => {}
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
                message: "the far side confirmed a batch that is not due".into(),
                class: Class::Failed,
            });
        };
        let (whole, backup) = (sent.cut.elapsed(), Duration::from_micros(confirmed.micros));
        state.interval.backup(backup, whole, sent.blocks);
        state.confirmed = Some(sent.stream);
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
        (self.tell)(MirrorEvent::Batch(&report));
        if sent.ends {
            self.handle.acknowledge(&self.bookmark, sent.epoch)?;
        }
        Ok(())
    }
}
