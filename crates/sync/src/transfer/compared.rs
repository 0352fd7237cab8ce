//! Comparing a disk with a replica: the far side sends digests, and differences are passed on as they are found.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use compare::{DigestReport, Finding, Scope};
use device::Disk;
use extents::Bitmap;
use link::Receiver;
use source::{Attended, There, View};

use crate::error::SyncError;
use crate::plan::dense::fill_dense;
use crate::report::RunningTotals;
use crate::transfer::pack::reading;
use crate::wire::messages::{CLAIM, expect};

/// Fails once the link is cut, with its error: what only reads for the other side ends with it.
pub(crate) fn while_linked(receiver: &Receiver) -> There {
    let watch = receiver.watch();
    Arc::new(move || watch().map_err(io::Error::other))
}

/// A comparison of a disk with a replica.
pub(crate) struct Comparison<'a> {
    pub receiver: &'a Receiver,
    pub disk: Arc<dyn Disk>,
    /// The disk, if it is a view of which only this reads.
    pub view: Option<&'a View>,
    pub scope: &'a Scope,
    /// Also pass on what is between differences where these are dense.
    pub fill: bool,
    pub totals: &'a RunningTotals<'a>,
}

impl Comparison<'_> {
    /// Receives the far side's digests and passes what differs from the disk to `found`.
    pub(crate) fn run(
        &self,
        mut found: impl FnMut(Finding<'_>) -> Result<(), SyncError>,
    ) -> Result<(), SyncError> {
        let Comparison { receiver, view, scope, totals, .. } = *self;
        // Keeps an error of the link, because the compare crate only passes on those of the system.
        let heard_trouble = Mutex::new(None);
        let mut trouble = None;
        let stopped = || io::Error::other("the far side stopped");
        let hear = || {
            let next = (|| -> Result<(DigestReport, Vec<u8>), SyncError> {
                let message = expect(receiver, CLAIM)?;
                Ok((message.json::<DigestReport>()?, message.body.to_vec()))
            })();
            next.map(Some).map_err(|error| {
                *heard_trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                stopped()
            })
        };
        totals.expect(scope.bytes());
        let mut seen = RangeCounter { ranges: &scope.ranges, before: 0 };
        let disk: Arc<dyn Disk> = Arc::new(Attended::new(self.disk.clone(), while_linked(receiver)));
        let widen = |blocks: &Bitmap| {
            if self.fill {
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
                // What was read is in memory: the writers need not save it any more.
                view.iter().for_each(|view| view.taken(upto));
                totals.progress(seen.below(upto));
            }
            Ok(())
        });
        let heard_trouble = heard_trouble.into_inner().unwrap_or_else(PoisonError::into_inner);
        compared.map_err(|error| {
            let own = || match device::is_unreadable(&error) {
                true => reading(error),
                false => SyncError::io("compare the source")(error),
            };
            match (trouble, heard_trouble) {
                // The link broke because of what the other side had said.
                (Some(SyncError::Link(_)), Some(said @ SyncError::Far { .. })) => said,
                (trouble, heard) => trouble.or(heard).unwrap_or_else(own),
            }
        })?;
        // The last chance to notice that the data read mixes several moments.
        view.map_or(Ok(()), View::verify).map_err(reading)
    }
}

/// Counts the bytes of ranges below an offset that rises.
struct RangeCounter<'a> {
    ranges: &'a [Range<u64>],
    before: u64,
}

impl RangeCounter<'_> {
    fn below(&mut self, upto: u64) -> u64 {
        while let Some((first, rest)) = self.ranges.split_first().filter(|(first, _)| first.end <= upto) {
            self.before += first.end - first.start;
            self.ranges = rest;
        }
        self.before + self.ranges.first().map_or(0, |r| upto.saturating_sub(r.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_counts_what_is_asked_for_alone() {
        let mut seen = RangeCounter { ranges: &[10..20, 30..50], before: 0 };
        assert_eq!([10, 15, 20, 30, 40, 50].map(|upto| seen.below(upto)), [0, 5, 10, 10, 20, 30]);
    }
}
