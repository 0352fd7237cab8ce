//! The replica's end of a mirror: batches come, are verified, committed, confirmed, and brought to the destination, each stage
//! beside the others.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use delta::{Decoded, Decompressor, Unit, UnitKind, decode_frame};
use link::{Heard, Receiver, Sender};
use replica::Replica;
use uuid::Uuid;

use crate::error::{Class, SyncError};
use crate::messages::{BATCH, Confirmed, MirrorPlan, to_unit, unexpected};

/// How often who waits looks whether another stage has failed.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What passes through the stages.
enum Item {
    Header(Unit, Uuid, Instant),
    Frame(Uuid, u64, Unit),
    Trailer {
        unit: Unit,
        end: u64,
    },
    /// The journal is long: begin a new one, and hand it back.
    Settle(crossbeam_channel::Sender<replica::BatchLog>),
}

enum Worked {
    Frame(Box<Decoded>),
    Other(Item),
}

/// Receives batches until the source says goodbye. Whatever ends it, what was confirmed stands in the destination.
pub(crate) fn receive_batches(
    sender: &Sender,
    receiver: &Receiver,
    replica: &mut Replica,
    plan: &MirrorPlan,
) -> Result<(), SyncError> {
    let path = replica.path().to_path_buf();
    let (mut log, mut batches) = replica.batches()?;
    // Without overlap, the next batch is taken up when the one before is done.
    let (done_in, done) = crossbeam_channel::unbounded::<()>();
    let stopped = AtomicBool::new(false);
    let stop = || SyncError::Stopped;
    let mut begun: Option<(Uuid, Instant)> = None;
    let received = plan.stages.run(
        |give| {
            let (mut stream, mut sequence) = (Uuid::nil(), 0);
            loop {
                if stopped.load(SeqCst) {
                    return Err(stop());
                }
                let message = match receiver.recv_within(LOOK_EVERY)? {
                    Heard::Message(message) => message,
                    Heard::Goodbye => return Ok(()),
                    Heard::Nothing => continue,
                };
                let unit = to_unit(message).map_err(|m| unexpected(&m))?;
                match unit.kind {
                    UnitKind::Header => {
                        if log.is_long() {
                            let (fresh_in, fresh) = crossbeam_channel::bounded(1);
                            give(Item::Settle(fresh_in))?;
                            log = fresh.recv().map_err(|_| stop())?;
                        }
                        let began = Instant::now();
                        log.unit(&unit)?;
                        (stream, sequence) = (stream_of(&unit)?, 0);
                        give(Item::Header(unit, stream, began))?;
                    }
                    UnitKind::Frame => {
                        log.unit(&unit)?;
                        give(Item::Frame(stream, sequence, unit))?;
                        sequence += 1;
                    }
                    UnitKind::Trailer => {
                        log.unit(&unit)?;
                        let end = log.end()?;
                        give(Item::Trailer { unit, end })?;
                        while !plan.stages.overlap && done.recv_timeout(LOOK_EVERY).is_err() {
                            if stopped.load(SeqCst) {
                                return Err(stop());
                            }
                        }
                    }
                }
            }
        },
        || Decompressor::new().ok(),
        |decompressor, item| match item {
            Item::Frame(stream, sequence, unit) => {
                let decoded = decode_frame(stream, sequence, unit, decompressor.as_mut());
                decoded.map(|decoded| Worked::Frame(Box::new(decoded))).map_err(|e| SyncError::Far {
                    message: format!("what came for {} is damaged: {e}", path.display()),
                    class: Class::Failed,
                })
            }
            other => Ok(Worked::Other(other)),
        },
        |worked| {
            match worked {
                Worked::Frame(decoded) => batches.frame(*decoded)?,
                Worked::Other(Item::Header(unit, stream, began)) => {
                    batches.begin(unit)?;
                    begun = Some((stream, began));
                }
                Worked::Other(Item::Trailer { unit, end }) => {
                    batches.commit(unit, end)?;
                    let Some((stream, began)) = begun.take() else { return Ok(()) };
                    let micros = began.elapsed().as_micros().try_into().unwrap_or(u64::MAX);
                    sender.send_json(BATCH, &Confirmed { stream, micros })?;
                    batches.apply()?;
                    let _ = done_in.send(());
                }
                Worked::Other(Item::Settle(fresh)) => {
                    let _ = fresh.send(batches.settle()?);
                }
                Worked::Other(Item::Frame(..)) => {}
            }
            Ok(())
        },
        || stopped.store(true, SeqCst),
    );
    // A link that fell leaves nothing undone.
    let finished = batches.finish();
    received?;
    Ok(finished?)
}

/// The stream that a header names.
fn stream_of(unit: &Unit) -> Result<Uuid, SyncError> {
    let header = Unit { kind: unit.kind, head: unit.head.clone(), body: device::Buf::default() };
    match delta::Decoder::new().push(header)? {
        delta::Event::Header(header) => Ok(header.stream),
        _ => Ok(Uuid::nil()),
    }
}
