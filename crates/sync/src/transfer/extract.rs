//! A delta to a byte stream, to be carried to the replica by any means.
//!
//! It is not known what becomes of the stream: a delta that was merged cannot be told here from one whose pipe broke
//! after the last byte. So an extract moves no bookmark, and the next one begins where this one began. A delta fits a
//! replica at every epoch that it spans; it fits whether the ones before were merged or not. A bookmark moves when a replica
//! has reported its epoch: in a sync, or by the merge's answer to `dsync checkpoint --at -`.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use delta::{Epoch, Method, Unit, Writer};
use device::Disk;
use serde::Serialize;
use source::{Bookmarks, Cut, CutOptions, Handle, KnownPosition, Live, Reached};

use crate::error::SyncError;
use crate::options::SyncOptions;
use crate::plan::facts::moment;
use crate::plan::{Choice, positions};
use crate::report::{Progress, RunningTotals};
use crate::transfer::pack::{Packing, Sink, pack};
use crate::wire::messages::StatusReply;

/// The checkpoint of replicas that were only fed by extracts: where the first of them began.
const BOOKMARK: &str = "extract";

/// The result of an extract.
#[derive(Debug, Clone, Serialize)]
pub struct Extracted {
    /// The source.
    pub source: std::path::PathBuf,
    /// tracked, or copy for the whole disk.
    pub method: Method,
    /// The epoch that the delta begins at; `None` for the whole disk.
    pub since: Option<u64>,
    /// The epoch that it leads to.
    pub epoch: u64,
    /// Blocks that the delta names.
    pub blocks_changed: u64,
    /// Runs of such blocks.
    pub extents: u64,
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_sent: u64,
    /// Wall-clock time.
    pub seconds: f64,
}

struct ToWriter<'a, W: Write>(&'a mut Writer<W>);

impl<W: Write> Sink for ToWriter<'_, W> {
    fn unit(&mut self, unit: Unit) -> Result<(), SyncError> {
        Ok(self.0.unit(&unit)?)
    }
}

/// Writes what changed since an epoch to `out`: since the given number or checkpoint, 0 meaning the whole disk; without one
/// since the oldest epoch at which a replica is known to be and since which it is known what changed, and the whole disk where none is.
pub fn extract(
    handle: &Handle,
    since: Option<&str>,
    compress: Option<i32>,
    out: impl Write,
    progress: Progress<'_>,
) -> Result<Extracted, SyncError> {
    let began = Instant::now();
    let about = handle.about();
    let from = begin(handle, since)?;
    // As for a replica that is at that epoch, or for none.
    let status = match from {
        Some(epoch) => {
            let size = handle.size_at(&epoch)?.unwrap_or(u64::MAX);
            StatusReply::of(replica::Status::at(about.uuid, epoch, size))
        }
        None => StatusReply::of(replica::Status::nothing()),
    };
    let choice = match (from, positions(&status)) {
        (Some(_), Some(positions)) => {
            handle.reaches(&positions)?;
            Choice::tracked(positions)
        }
        _ => Choice::copy("seeded"),
    };
    let (view, cut) = match handle.live() {
        None => (Arc::new(handle.view(false)?), None),
        Some(live) => {
            let cut = cut(handle, live, &choice)?;
            (Arc::new(cut.view.clone()), Some(cut))
        }
    };
    let options = SyncOptions { method: Some(choice.method), compress, ..SyncOptions::default() };
    let moment = moment(handle, &view, &choice, &status, &options)?;
    let plan = choice.at(moment, &status, &options)?;
    if cut.is_some_and(|cut| plan.wanted.all_from < view.len() || !cut.holds(&plan.wanted.changes)) {
        return Err(whole_live_disk(handle));
    }
    if let Some(blocks) = plan.wanted.blocks() {
        view.narrow(&blocks);
    }
    let totals = RunningTotals::new(progress);
    totals.expect(plan.wanted.count(&*view).map_err(SyncError::io("look for data in the source"))?.bytes);
    let mut writer = Writer::new(out);
    pack(ToWriter(&mut writer), &view, &plan, Packing::new(&options, about.block_size), &totals)?;
    writer.flush()?;
    let epoch = view.epoch();
    if let Some(begins) = keeps(handle, since, from, epoch)? {
        handle.acknowledge(BOOKMARK, Reached::epoch(begins))?;
    }
    Ok(Extracted {
        source: about.path.clone(),
        method: plan.header.method,
        since: from.map(|e| e.number),
        epoch: epoch.number,
        blocks_changed: totals.blocks.load(Relaxed),
        extents: totals.extents.load(Relaxed),
        bytes_read: totals.read.load(Relaxed),
        bytes_sent: writer.bytes(),
        seconds: began.elapsed().as_secs_f64(),
    })
}

/// A live disk is read in one cut, without writes.
fn cut(handle: &Handle, live: &Live, choice: &Choice) -> Result<Cut, SyncError> {
    if choice.method != Method::Tracked {
        return Err(whole_live_disk(handle));
    }
    Ok(live.cut(&handle.estimate(&choice.positions)?, &CutOptions::default())?)
}

fn whole_live_disk(handle: &Handle) -> SyncError {
    SyncError::Refused(format!(
        "{0} is a disk in use, and more of it is needed than can be read in a moment: \"dsync sync {0}\" copies it in several \
         passes",
        handle.about().path.display()
    ))
}

/// Where the delta begins.
fn begin(handle: &Handle, since: Option<&str>) -> Result<Option<Epoch>, SyncError> {
    match since {
        Some("0") => Ok(None),
        Some(what) => Ok(Some(handle.epoch(what)?)),
        None => {
            let bookmarks = handle.bookmarks()?;
            let first = |reached: bool| {
                let known = fed(&bookmarks).filter(|epoch| !reached || reaches(handle, *epoch));
                known.min_by_key(|epoch| epoch.number)
            };
            // One behind a gap, which no delta fits, does not keep the others from theirs.
            Ok(first(true).or_else(|| first(false)))
        }
    }
}

/// True if it is known what changed since an epoch.
fn reaches(handle: &Handle, epoch: Epoch) -> bool {
    handle.reaches(&[KnownPosition { epoch, upto: u64::MAX }]).is_ok()
}

/// The epochs of replicas, without the checkpoints of other readers.
pub(crate) fn fed(bookmarks: &Bookmarks) -> impl Iterator<Item = Epoch> {
    bookmarks.replicas().chain(bookmarks.0.get_key_value(BOOKMARK)).map(|(_, bookmark)| bookmark.epoch)
}

/// The epoch to keep for later extracts: the earliest at which the replica of this one may be. `None` if there is one already, which a merge's
/// answer may be moving now, or none is needed.
fn keeps(
    handle: &Handle,
    since: Option<&str>,
    from: Option<Epoch>,
    epoch: Epoch,
) -> Result<Option<Epoch>, SyncError> {
    let bookmarks = handle.bookmarks()?;
    let kept = bookmarks.0.get(BOOKMARK).map(|bookmark| bookmark.epoch);
    Ok(match (from, kept) {
        (Some(_), Some(_)) => None,
        (None, kept) => kept.is_none_or(|kept| !reaches(handle, kept)).then_some(epoch),
        (Some(from), None) => {
            let number = since.is_some_and(|since| since.parse::<u64>().is_ok());
            (number && fed(&bookmarks).next().is_none()).then_some(from)
        }
    })
}
