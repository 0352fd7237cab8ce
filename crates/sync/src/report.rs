//! The summary of a sync, and its progress.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use delta::{Frame, Method, Record};
use serde::{Deserialize, Serialize};
use source::SourceMetadata;

use crate::extents::ListedExtents;

/// Progress of a transfer: bytes done, bytes in total.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// What was found and how, what it cost, and what was committed.
///
/// More than fifteen fields: they are the keys of its JSON object, which is flat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summary {
    /// The source.
    pub source: PathBuf,
    /// The replica.
    pub destination: String,
    /// How the changes were found: tracked, compare, rolling or copy.
    pub method: Method,
    /// `tracked`, `compared` or `seeded`: the basis of the replica's equality; with the reason if it is not the
    /// tracker, and `without a cut` if the replica is of several moments.
    pub trust: String,
    /// Bytes of the source.
    pub disk_size: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// Blocks that the delta names.
    pub blocks_changed: u64,
    /// Runs of such blocks.
    pub extents: u64,
    /// Bytes of such blocks.
    pub bytes_changed: u64,
    /// Bytes of such blocks that the replica had elsewhere.
    pub bytes_copied: u64,
    /// Bytes that the destination had beyond the end of the source, and that were cut off.
    pub bytes_cut: u64,
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Bytes sent over the link, framing included.
    pub bytes_sent: u64,
    /// Bytes received over the link.
    pub bytes_received: u64,
    /// Bytes written at the destination, journal included.
    pub bytes_written: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// The number of the epoch of the replica's last commit.
    pub epoch: Option<u64>,
    /// How long a file system was frozen, in milliseconds; `None` where nothing had to be.
    pub freeze_ms: Option<u64>,
    /// An interrupted transfer was resumed.
    pub resumed: bool,
    /// Nothing was sent, only counted.
    pub dry_run: bool,
    /// What became of the digests that were to be kept.
    pub digests: Option<String>,
    /// They stood for the replica, which was not read.
    #[serde(skip)]
    pub by_digests: bool,
    /// The replica knows of no differences that a verification has found.
    #[serde(skip)]
    pub sound: bool,
    /// What could not be read at the source, and is missing at the replica.
    pub unreadable: ListedExtents,
    /// What could not be read at the replica, and was sent, whatever it held.
    pub unreadable_there: ListedExtents,
    /// What opening the replica had to mend.
    pub recovered: Option<String>,
    /// What the replica's side says of the commit.
    pub warnings: Vec<String>,
    /// Bytes that writers had to save for the view.
    pub view_bytes: u64,
    /// Reads that waited for the guest.
    #[serde(default)]
    pub reads_waited: u64,
    /// What the destination gave up first, by its user's consent.
    pub given_up: Option<GivenUpWrites>,
    /// Bytes in which the replica differed when it was verified last, and when, if that was not repaired since.
    #[serde(skip)]
    pub unrepaired: Option<(u64, u64)>,
}

/// What was written to a destination that another disk has not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenUpWrites {
    /// The number of the last epoch in common; `None` if that is not known.
    pub since: Option<u64>,
    /// Bytes that were written to it since; `None` if that is not known.
    pub bytes: Option<u64>,
    /// The file in which they were saved, where the destination is.
    pub saved: Option<PathBuf>,
}

impl Summary {
    /// The summary of a sync that has done nothing yet.
    pub(crate) fn new(about: &SourceMetadata, destination: &str, dry_run: bool) -> Summary {
        Summary {
            source: about.path.clone(),
            destination: destination.to_owned(),
            method: Method::Tracked,
            trust: String::new(),
            disk_size: 0,
            block_size: about.block_size,
            blocks_changed: 0,
            extents: 0,
            bytes_changed: 0,
            bytes_copied: 0,
            bytes_cut: 0,
            bytes_read: 0,
            bytes_sent: 0,
            bytes_received: 0,
            bytes_written: 0,
            seconds: 0.0,
            epoch: None,
            freeze_ms: None,
            resumed: false,
            dry_run,
            digests: None,
            by_digests: false,
            sound: false,
            unreadable: ListedExtents::default(),
            unreadable_there: ListedExtents::default(),
            recovered: None,
            warnings: Vec::new(),
            view_bytes: 0,
            reads_waited: 0,
            given_up: None,
            unrepaired: None,
        }
    }

    /// Copies the totals.
    pub(crate) fn count(&mut self, totals: &RunningTotals<'_>) {
        (self.unreadable, self.unreadable_there) = totals.unreadable();
        self.blocks_changed = totals.blocks.load(Relaxed);
        self.extents = totals.extents.load(Relaxed);
        self.bytes_changed = totals.bytes.load(Relaxed);
        self.bytes_copied = totals.copied.load(Relaxed);
        self.bytes_read = totals.read.load(Relaxed);
    }
}

/// The totals so far, and the progress callback.
pub(crate) struct RunningTotals<'a> {
    pub blocks: AtomicU64,
    pub extents: AtomicU64,
    pub bytes: AtomicU64,
    pub copied: AtomicU64,
    pub read: AtomicU64,
    /// Where the last record ended.
    end: AtomicU64,
    /// At the source, and at the replica.
    unreadable: Mutex<(ListedExtents, ListedExtents)>,
    all: AtomicU64,
    progress: Progress<'a>,
}

impl<'a> RunningTotals<'a> {
    pub(crate) fn new(progress: Progress<'a>) -> RunningTotals<'a> {
        RunningTotals {
            blocks: AtomicU64::new(0),
            extents: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            read: AtomicU64::new(0),
            end: AtomicU64::new(0),
            unreadable: Mutex::default(),
            all: AtomicU64::new(0),
            progress,
        }
    }

    /// Sets the total of the work in bytes.
    pub(crate) fn expect(&self, all: u64) {
        self.all.store(all, Relaxed);
    }

    /// Reports the bytes done.
    pub(crate) fn progress(&self, done: u64) {
        (self.progress)(done, self.all.load(Relaxed));
    }

    /// Notes what could not be read at the source.
    pub(crate) fn left_out(&self, range: &Range<u64>) {
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).0.add(range);
    }

    /// Notes what could not be read at the replica.
    pub(crate) fn unreadable_there(&self, range: &Range<u64>) {
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).1.add(range);
    }

    fn unreadable(&self) -> (ListedExtents, ListedExtents) {
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts a frame's records, without zeroes from `grown` on, which a disk got with its size. Frames must be counted in order.
    pub(crate) fn add(&self, frame: &Frame, block_size: u64, grown: u64) {
        for record in &frame.records {
            let end =
                if matches!(record, Record::Zero { .. }) { record.end().min(grown) } else { record.end() };
            if record.offset() < end {
                self.changed(record.offset()..end, block_size);
            }
        }
    }

    /// Counts a range that has changed. What begins where the last one ended belongs to its run.
    pub(crate) fn changed(&self, range: Range<u64>, block_size: u64) {
        let goes_on = self.end.swap(range.end, Relaxed) == range.start && range.start != 0;
        let first = if goes_on { range.start.div_ceil(block_size) } else { range.start / block_size };
        self.blocks.fetch_add(range.end.div_ceil(block_size) - first, Relaxed);
        self.extents.fetch_add(u64::from(!goes_on), Relaxed);
        self.bytes.fetch_add(range.end - range.start, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use delta::Record;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_run_that_several_frames_share_is_one_extent() {
        let totals = RunningTotals::new(&|_, _| {});
        let frame = |ranges: &[Range<u64>]| {
            let records = ranges.iter().map(|r| Record::Zero { offset: r.start, len: r.end - r.start });
            Frame { records: records.collect(), data: device::Buf::default() }
        };
        totals.add(&frame(&[0..4096, 8192..16384]), 4096, u64::MAX);
        totals.add(&frame(std::slice::from_ref(&(16384..20480))), 4096, u64::MAX);
        totals.add(&frame(&[20480..24576, 40960..45056]), 4096, u64::MAX);
        assert_eq!(totals.extents.into_inner(), 3);
        assert_eq!(totals.blocks.into_inner(), 6);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// A block counts once, and so does a run of them, however they are cut and whatever else is sent.
        #[test]
        fn what_has_changed_counts_once(
            blocks in proptest::collection::vec((any::<bool>(), any::<bool>()), 1..200),
            short in 1u64..4097,
        ) {
            let totals = RunningTotals::new(&|_, _| {});
            let size = blocks.len() as u64 * 4096 - (4096 - short);
            let changed = |n: usize| blocks.get(n).is_some_and(|(changed, _)| *changed);
            let (mut start, mut bytes) = (0, 0);
            for (n, (_, cut)) in blocks.iter().enumerate() {
                let end = ((n as u64 + 1) * 4096).min(size);
                if !changed(n) {
                    start = end;
                } else if !changed(n + 1) || *cut {
                    totals.changed(start..end, 4096);
                    bytes += end - start;
                    start = end;
                }
            }
            let runs = (0..blocks.len()).filter(|n| changed(*n) && !changed(*n + 1)).count() as u64;
            let expected = ((0..blocks.len()).filter(|n| changed(*n)).count() as u64, runs, bytes);
            let RunningTotals { blocks, extents, bytes, .. } = totals;
            prop_assert_eq!((blocks.into_inner(), extents.into_inner(), bytes.into_inner()), expected);
        }
    }
}
