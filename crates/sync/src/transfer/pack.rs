//! Packing: the wanted blocks of a view, or the results of a comparison, as the units of a delta.
//!
//! **Unreadable blocks** end a sync with an error that names the first one. With `--keep-going` the sync is run again, and its delta
//! names these blocks: they join the replica's unsure set, and the replica is incomplete until a later delta has written them. Rolling
//! searches all of the source for moved blocks, so it falls back to a compare then. Blocks that cannot be read at the replica are sent,
//! whatever they held; the exit code is 1 all the same, because such a disk is failing. Unreadable sectors among those sampled when a
//! device is opened, or between blocks that are written as one, do not affect a sync.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::available_parallelism;

use compare::rolling::Change;
use compare::{Finding, in_order};
use delta::{Compressor, Encoder, Frame, Header, Record, Unit, encode_frame};
use link::Sender;
use source::View;

use crate::error::SyncError;
use crate::options::{SyncOptions, Unreadable};
use crate::plan::SyncPlan;
use crate::plan::read::{FrameReader, FrameSize, Packer, WantedBlocks};
use crate::report::RunningTotals;
use crate::wire::messages::of_unit;

/// Where the units of a delta go.
pub(crate) trait Sink {
    fn unit(&mut self, unit: Unit) -> Result<(), SyncError>;
}

impl Sink for &Sender {
    fn unit(&mut self, unit: Unit) -> Result<(), SyncError> {
        Ok(self.send(of_unit(unit))?)
    }
}

/// How frames are packed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packing {
    /// A zstd level.
    pub compress: Option<i32>,
    pub frames: FrameSize,
    /// Leave out what cannot be read at the source.
    pub leave_out: bool,
}

impl Packing {
    pub(crate) fn new(options: &SyncOptions, block_size: u32) -> Packing {
        Packing {
            compress: options.compress,
            frames: FrameSize::new(options.way.may_be_cut(), block_size.into()),
            leave_out: options.unreadable == Unreadable::LeaveOut,
        }
    }
}

/// The error of reading what is sent.
pub(crate) fn reading(error: std::io::Error) -> SyncError {
    match device::is_unreadable(&error) {
        true => SyncError::Unreadable(error.to_string()),
        false => SyncError::io("read the source")(error),
    }
}

/// Reads what a plan wants from a view, packs it as a delta, and passes its units on, in order.
pub(crate) fn pack(
    mut sink: impl Sink,
    view: &Arc<View>,
    plan: &SyncPlan,
    packing: Packing,
    totals: &RunningTotals<'_>,
) -> Result<(), SyncError> {
    let (mut encoder, unit) = Encoder::new(&plan.header, None)?;
    sink.unit(unit)?;
    let how = (packing.frames, packing.leave_out);
    let mut frames = FrameReader::new(&plan.wanted, view, how, totals).map_err(reading)?;
    let (stream, block_size) = (plan.header.stream, plan.wanted.block_size);
    match packing.compress {
        None => {
            while let Some((frame, end)) = frames.next(None).map_err(reading)? {
                totals.add(&frame, block_size, plan.wanted.all_from);
                let unit = encoder.frame(frame)?;
                sink.unit(unit)?;
                view.taken(end);
                totals.progress(totals.bytes.load(Relaxed));
            }
            totals.read.fetch_add(frames.bytes_read(), Relaxed);
        }
        Some(level) => {
            let read = AtomicU64::new(0);
            let mut sequence = 0;
            in_order(
                available_parallelism().map_or(2, |n| n.get()),
                || -> Result<_, SyncError> {
                    let next = frames.next(None).map_err(reading)?;
                    read.store(frames.bytes_read(), Relaxed);
                    sequence += 1;
                    if let Some((frame, _)) = &next {
                        totals.add(frame, block_size, plan.wanted.all_from);
                    }
                    Ok(next.map(|(frame, end)| (sequence - 1, frame, end)))
                },
                || Compressor::new(level),
                |compressor, (sequence, frame, end)| {
                    let compressor = compressor.as_mut().map_err(|e| SyncError::Refused(e.to_string()))?;
                    Ok((encode_frame(stream, sequence, frame, Some(compressor))?, end))
                },
                |(encoded, end)| {
                    let unit = encoder.append(encoded)?;
                    sink.unit(unit)?;
                    view.taken(end);
                    totals.progress(totals.bytes.load(Relaxed));
                    Ok(())
                },
            )?;
            totals.read.fetch_add(read.load(Relaxed), Relaxed);
        }
    }
    // The last chance to notice that the data read mixes several moments: without a trailer nothing is committed.
    view.verify().map_err(reading)?;
    sink.unit(encoder.trailer())
}

/// Sends differences as a delta.
pub(crate) struct DeltaSender<'a> {
    sender: &'a Sender,
    encoder: Encoder,
    packer: Packer,
    totals: &'a RunningTotals<'a>,
    block_size: u64,
    /// Where what was added ends.
    pub end: u64,
}

impl<'a> DeltaSender<'a> {
    /// Begins the delta.
    pub(crate) fn begin(
        sender: &'a Sender,
        header: &Header,
        packing: Packing,
        totals: &'a RunningTotals<'a>,
    ) -> Result<DeltaSender<'a>, SyncError> {
        let (encoder, unit) = Encoder::new(header, packing.compress)?;
        let mut sink = sender;
        sink.unit(unit)?;
        let block_size = u64::from(header.block_size);
        Ok(DeltaSender { sender, encoder, packer: Packer::new(packing.frames), totals, block_size, end: 0 })
    }

    fn frame(&mut self, frame: Frame) -> Result<(), SyncError> {
        Ok(self.sender.send(of_unit(self.encoder.frame(frame)?))?)
    }

    /// Counts what has changed, which is not all that is sent.
    fn changed(&self, range: Range<u64>) {
        self.totals.changed(range, self.block_size);
    }

    /// Adds blocks, all of which come before what is found.
    pub(crate) fn wanted(
        &mut self,
        wanted: &WantedBlocks,
        view: &Arc<View>,
        packing: Packing,
    ) -> Result<(), SyncError> {
        let how = (packing.frames, packing.leave_out);
        let mut frames = FrameReader::new(wanted, view, how, self.totals).map_err(reading)?;
        while let Some((frame, end)) = frames.next(None).map_err(reading)? {
            self.totals.add(&frame, self.block_size, wanted.all_from);
            self.end = frame.records.last().map_or(self.end, Record::end);
            self.frame(frame)?;
            view.taken(end);
        }
        self.totals.read.fetch_add(frames.bytes_read(), Relaxed);
        Ok(())
    }

    /// Sends what was found so far: a delta has come as far as what it names.
    pub(crate) fn flush(&mut self) -> Result<(), SyncError> {
        if self.packer.is_empty() {
            return Ok(());
        }
        let frame = self.packer.take();
        self.frame(frame)
    }

    /// Adds a finding.
    pub(crate) fn add(&mut self, finding: &Finding<'_>) -> Result<(), SyncError> {
        self.end = match finding {
            Finding::Data { offset, data } | Finding::Between { offset, data } => offset + data.len() as u64,
            Finding::Zero(range) => range.end,
            _ => self.end,
        };
        let full = match finding {
            Finding::Data { offset, data } => {
                self.changed(*offset..offset + data.len() as u64);
                self.packer.data(*offset, data)
            }
            Finding::Zero(range) => {
                self.changed(range.clone());
                self.packer.zero(range.clone())
            }
            Finding::Between { offset, data } => self.packer.data(*offset, data),
            Finding::Unreadable(_) | Finding::UnreadableThere(_) | Finding::Held(_) | Finding::Upto(..) => {
                None
            }
        };
        full.map_or(Ok(()), |frame| self.frame(frame))
    }

    /// Adds what could not be read.
    pub(crate) fn unsure(&mut self, range: Range<u64>) -> Result<(), SyncError> {
        self.end = range.end;
        let full = self.packer.dataless(Record::Unsure { offset: range.start, len: range.end - range.start });
        full.map_or(Ok(()), |frame| self.frame(frame))
    }

    /// Adds a change found by the rolling search.
    pub(crate) fn change(&mut self, change: Change) -> Result<(), SyncError> {
        let full = match change {
            Change::Data { offset, data } => {
                self.changed(offset..offset + data.len() as u64);
                self.packer.data(offset, &data)
            }
            Change::Zero(range) => {
                self.changed(range.clone());
                self.packer.zero(range)
            }
            Change::Copy { offset, len, from, hash } => {
                self.changed(offset..offset + len);
                self.totals.copied.fetch_add(len, Relaxed);
                self.packer.copy(Record::Copy { offset, len, from, hash })
            }
        };
        full.map_or(Ok(()), |frame| self.frame(frame))
    }

    /// Ends the delta.
    pub(crate) fn end(mut self) -> Result<(), SyncError> {
        self.flush()?;
        let mut sink = self.sender;
        sink.unit(self.encoder.trailer())
    }
}
