//! The replica's end of a mirror: batches are received, verified, committed, confirmed, and written to the destination, in
//! parallel stages.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use delta::{Decoded, Decompressor, Unit, UnitKind, decode_frame};
use link::{Received, Receiver, Sender};
use replica::Replica;
use uuid::Uuid;

use crate::error::{Class, SyncError};
use crate::wire::messages::{BATCH, Confirmed, MirrorPlan, to_unit, unexpected};

/// How often a waiting stage checks whether another has failed.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What passes through the stages.
enum Item {
    Header(Unit, Uuid, Instant),
    Frame(Uuid, u64, Unit),
    Trailer {
        unit: Unit,
        end: u64,
    },
    /// The journal is long: begin a new one, and return it.
    Settle(crossbeam_channel::Sender<replica::BatchLog>),
}

enum Worked {
    Frame(Box<Decoded>),
    Other(Item),
}

/// Receives batches until the source says goodbye. However it ends, what was confirmed is in the destination.
pub(crate) fn receive_batches(
    sender: &Sender,
    receiver: &Receiver,
    replica: &mut Replica,
    plan: &MirrorPlan,
) -> Result<(), SyncError> {
    let path = replica.path().to_path_buf();
    let (log, batches) = replica.batches()?;
    let (done_in, done) = crossbeam_channel::unbounded();
    let stopped = AtomicBool::new(false);
    let intake = Intake { receiver, log, done, overlap: plan.stages.overlap, stopped: &stopped };
    let mut committing = Committing { sender, batches, begun: None, done: done_in };
    let received = plan.stages.run(
        |give| intake.run(give),
        || Decompressor::new().ok(),
        |decompressor, item| decode(&path, decompressor.as_mut(), item),
        |worked| committing.take(worked),
        || stopped.store(true, SeqCst),
    );
    // A broken link leaves nothing undone.
    let finished = committing.batches.finish();
    received?;
    Ok(finished?)
}

/// The first stage: units are received and written to the journal.
struct Intake<'a> {
    receiver: &'a Receiver,
    log: replica::BatchLog,
    /// Notified when a batch is in the destination.
    done: crossbeam_channel::Receiver<()>,
    /// A batch may begin before the previous one is done.
    overlap: bool,
    /// Another stage has failed.
    stopped: &'a AtomicBool,
}

impl Intake<'_> {
    fn run(mut self, give: &mut dyn FnMut(Item) -> Result<(), SyncError>) -> Result<(), SyncError> {
        let (mut stream, mut sequence) = (Uuid::nil(), 0);
        loop {
            self.go_on()?;
            let message = match self.receiver.recv_within(LOOK_EVERY)? {
                Received::Message(message) => message,
                Received::Goodbye => return Ok(()),
                Received::Nothing => continue,
            };
            let unit = to_unit(message).map_err(|m| unexpected(&m))?;
            match unit.kind {
                UnitKind::Header => {
                    if self.log.is_long() {
                        let (fresh_in, fresh) = crossbeam_channel::bounded(1);
                        give(Item::Settle(fresh_in))?;
                        self.log = fresh.recv().map_err(|_| SyncError::Stopped)?;
                    }
                    let began = Instant::now();
                    self.log.unit(&unit)?;
                    (stream, sequence) = (stream_of(&unit)?, 0);
                    give(Item::Header(unit, stream, began))?;
                }
                UnitKind::Frame => {
                    self.log.unit(&unit)?;
                    give(Item::Frame(stream, sequence, unit))?;
                    sequence += 1;
                }
                UnitKind::Trailer => {
                    self.log.unit(&unit)?;
                    let end = self.log.end()?;
                    give(Item::Trailer { unit, end })?;
                    while !self.overlap && self.done.recv_timeout(LOOK_EVERY).is_err() {
                        self.go_on()?;
                    }
                }
            }
        }
    }

    fn go_on(&self) -> Result<(), SyncError> {
        if self.stopped.load(SeqCst) { Err(SyncError::Stopped) } else { Ok(()) }
    }
}

/// The second stage: frames are decompressed and verified.
fn decode(path: &Path, decompressor: Option<&mut Decompressor>, item: Item) -> Result<Worked, SyncError> {
    let Item::Frame(stream, sequence, unit) = item else { return Ok(Worked::Other(item)) };
    let decoded = decode_frame(stream, sequence, unit, decompressor);
    decoded.map(|decoded| Worked::Frame(Box::new(decoded))).map_err(|error| SyncError::Far {
        message: format!("the data received for {} is damaged: {error}", path.display()),
        class: Class::Failed,
    })
}

/// The last stage: batches are committed, confirmed, and written to the destination.
struct Committing<'a> {
    sender: &'a Sender,
    batches: replica::BatchCommitter<'a>,
    /// The batch that has begun, and when.
    begun: Option<(Uuid, Instant)>,
    done: crossbeam_channel::Sender<()>,
}

impl Committing<'_> {
    fn take(&mut self, worked: Worked) -> Result<(), SyncError> {
        match worked {
            Worked::Frame(decoded) => self.batches.frame(*decoded)?,
            Worked::Other(Item::Header(unit, stream, began)) => {
                self.batches.begin(unit)?;
                self.begun = Some((stream, began));
            }
            Worked::Other(Item::Trailer { unit, end }) => {
                self.batches.commit(unit, end)?;
                let Some((stream, began)) = self.begun.take() else { return Ok(()) };
                let micros = began.elapsed().as_micros().try_into().unwrap_or(u64::MAX);
                self.sender.send_json(
                    BATCH,
                    &Confirmed { stream, micros, warnings: self.batches.take_warnings() },
                )?;
                self.batches.apply()?;
                let _ = self.done.send(());
            }
            Worked::Other(Item::Settle(fresh)) => {
                let _ = fresh.send(self.batches.settle()?);
            }
            Worked::Other(Item::Frame(..)) => {}
        }
        Ok(())
    }
}

/// The stream that a header names.
fn stream_of(unit: &Unit) -> Result<Uuid, SyncError> {
    let header = Unit { kind: unit.kind, head: unit.head.clone(), body: device::Buf::default() };
    match delta::Decoder::new().push(header)? {
        delta::Event::Header(header) => Ok(header.stream),
        _ => Ok(Uuid::nil()),
    }
}
