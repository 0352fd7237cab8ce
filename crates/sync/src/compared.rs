//! Comparing a view with a replica: the digests come from the far side, and what differs is handed on as it is found.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use compare::rolling::Change;
use compare::{Claim, Finding, Scope};
use delta::{Encoder, Frame, Header, Record};
use device::{Buf, Disk};
use extents::Bitmap;
use link::{Receiver, Sender};
use source::View;

use crate::error::SyncError;
use crate::messages::{CLAIM, PLAN, Plan, expect, of_unit};
use crate::push::{Packing, Progress, Sink, Totals, fill_dense};
use crate::read::Packer;

/// Hears the far side's digests of a scope and hands what differs from the view to `found`; with `fill` also what lies between
/// where much differs.
pub(crate) fn compare(
    receiver: &Receiver,
    view: &Arc<View>,
    scope: &Scope,
    fill: bool,
    totals: &Totals,
    progress: Progress<'_>,
    mut found: impl FnMut(Finding<'_>) -> Result<(), SyncError>,
) -> Result<(), SyncError> {
    // Errors of the link keep their words through the compare room, which knows only those of the system.
    let heard_trouble = Mutex::new(None);
    let mut trouble = None;
    let stopped = || io::Error::other("the far side stopped");
    let hear = || {
        let next = (|| -> Result<(Claim, Vec<u8>), SyncError> {
            let message = expect(receiver, CLAIM)?;
            Ok((message.json::<Claim>()?, message.body.to_vec()))
        })();
        next.map(Some).map_err(|error| {
            *heard_trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            stopped()
        })
    };
    let all = scope.bytes();
    let mut seen = Seen { ranges: &scope.ranges, before: 0 };
    let disk: Arc<dyn Disk> = view.clone();
    let widen = |blocks: &Bitmap| {
        if fill {
            fill_dense(blocks);
        }
    };
    let compared = compare::differences(&disk, scope, widen, hear, |finding| {
        let upto = match finding {
            Finding::Upto(upto, read) => {
                totals.read.fetch_add(read, Relaxed);
                Some(upto)
            }
            _ => None,
        };
        found(finding).map_err(|error| {
            trouble = Some(error);
            stopped()
        })?;
        if let Some(upto) = upto {
            // What was read is in our hands: the writers need not keep it any more.
            view.taken(upto);
            progress(seen.below(upto), all);
        }
        Ok(())
    });
    let heard_trouble = heard_trouble.into_inner().unwrap_or_else(PoisonError::into_inner);
    compared.map_err(|error| {
        let own = || SyncError::io("compare the source")(error);
        match (trouble, heard_trouble) {
            // The link broke because of what the other side had said.
            (Some(SyncError::Link(_)), Some(said @ SyncError::Far { .. })) => said,
            (trouble, heard) => trouble.or(heard).unwrap_or_else(own),
        }
    })?;
    // The last moment to notice that what was read was no one moment.
    view.verify().map_err(SyncError::io("read the source"))
}

/// Counts the bytes of ranges below an offset that rises.
struct Seen<'a> {
    ranges: &'a [Range<u64>],
    before: u64,
}

impl Seen<'_> {
    fn below(&mut self, upto: u64) -> u64 {
        while let Some((first, rest)) = self.ranges.split_first().filter(|(first, _)| first.end <= upto) {
            self.before += first.end - first.start;
            self.ranges = rest;
        }
        self.before + self.ranges.first().map_or(0, |r| upto.saturating_sub(r.start))
    }
}

/// Sends differences as a delta.
pub(crate) struct Sending<'a> {
    sender: &'a Sender,
    encoder: Encoder,
    packer: Packer,
    totals: &'a Totals,
    block_size: u64,
}

impl<'a> Sending<'a> {
    /// Begins the delta.
    pub fn begin(
        sender: &'a Sender,
        header: &Header,
        how: Packing,
        totals: &'a Totals,
    ) -> Result<Sending<'a>, SyncError> {
        let (encoder, unit) = Encoder::new(header, how.compress)?;
        let mut sink = sender;
        sink.unit(unit)?;
        let block_size = u64::from(header.block_size);
        Ok(Sending { sender, encoder, packer: Packer::new(how.size), totals, block_size })
    }

    fn frame(&mut self, frame: Frame) -> Result<(), SyncError> {
        Ok(self.sender.send(of_unit(self.encoder.frame(frame)?))?)
    }

    /// Counts what has changed, which is not all that is sent.
    fn changed(&self, range: Range<u64>) {
        self.totals.changed(range, self.block_size);
    }

    /// Adds a finding.
    pub fn add(&mut self, finding: &Finding<'_>) -> Result<(), SyncError> {
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
            Finding::Unreadable(_) | Finding::UnreadableThere(_) | Finding::Upto(..) => None,
        };
        full.map_or(Ok(()), |frame| self.frame(frame))
    }

    /// Adds what was found to have moved, or not.
    pub fn change(&mut self, change: Change) -> Result<(), SyncError> {
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
    pub fn end(mut self) -> Result<(), SyncError> {
        if !self.packer.is_empty() {
            let frame = self.packer.take();
            self.frame(frame)?;
        }
        let mut sink = self.sender;
        sink.unit(self.encoder.trailer())
    }
}

/// Bytes of a disk's last block.
fn last_block(size: u64, block_size: u64) -> u64 {
    if size == 0 { 0 } else { (size - 1) % block_size + 1 }
}

/// Sends what differs from the view as a delta.
#[allow(clippy::too_many_arguments)]
pub(crate) fn send_differences(
    sender: &Sender,
    receiver: &Receiver,
    view: &Arc<View>,
    header: &Header,
    scope: &Scope,
    how: Packing,
    totals: &Totals,
    progress: Progress<'_>,
) -> Result<(), SyncError> {
    let plan = Plan { compare: Some(scope.clone()), delta: true, pass: how.pass, ..Plan::default() };
    sender.send_json(PLAN, &plan)?;
    let (lacking, pass, fill) = (how.lacking, how.pass, how.fill);
    let mut sending = Sending::begin(sender, header, how, totals)?;
    let mut end = 0;
    compare(receiver, view, scope, fill, totals, progress, |finding| match finding {
        Finding::Unreadable(range) if lacking => {
            totals.left_out(&range);
            Ok(())
        }
        Finding::Unreadable(range) => Err(SyncError::Unreadable(range.start)),
        Finding::UnreadableThere(range) => {
            totals.unreadable_there(&range);
            Ok(())
        }
        other => {
            end = match &other {
                Finding::Data { offset, data } => offset + data.len() as u64,
                Finding::Zero(range) => range.end,
                _ => end,
            };
            sending.add(&other)
        }
    })?;
    if pass && end < view.len() {
        let mut block = Buf::new(last_block(view.len(), header.block_size.into()) as usize);
        let offset = view.len() - block.len() as u64;
        view.read_at(offset, &mut block).map_err(SyncError::io("read the source"))?;
        sending.add(&Finding::Data { offset, data: &block })?;
    }
    sending.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_counts_what_is_asked_for_alone() {
        let mut seen = Seen { ranges: &[10..20, 30..50], before: 0 };
        assert_eq!([10, 15, 20, 30, 40, 50].map(|upto| seen.below(upto)), [0, 5, 10, 10, 20, 30]);
    }
}
