//! A delta to a byte stream, for whoever carries it on.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use delta::{Epoch, Header, Method, Unit, Writer};
use device::Disk;
use extents::Bitmap;
use serde::Serialize;
use source::{Cut, CutOptions, Handle, Live, Position, SourceError};
use uuid::Uuid;

use crate::error::SyncError;
use crate::push::{Packing, Progress, Sink, Totals, pack_wanted};
use crate::read::{FrameSize, Wanted};

/// The bookmark that `extract` moves: what it wrote is taken to have arrived.
const BOOKMARK: &str = "extract";

/// What an extract wrote.
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

/// Writes what changed since an epoch to `out`: since the given number, 0 meaning the whole disk; without one since the
/// sole bookmark, and the whole disk where there is none.
pub fn extract(
    handle: &Handle,
    since: Option<u64>,
    compress: Option<i32>,
    out: impl Write,
    progress: Progress<'_>,
) -> Result<Extracted, SyncError> {
    let began = Instant::now();
    let about = handle.about();
    let from = begin(handle, since)?;
    let positions = match &from {
        Some(epoch) => {
            let size = handle.size_at(epoch)?.unwrap_or(u64::MAX);
            let positions = vec![Position { epoch: *epoch, upto: size }];
            handle.reaches(&positions)?;
            Some(positions)
        }
        None => None,
    };
    let (view, cut) = match handle.live() {
        None => (Arc::new(handle.view(false)?), None),
        Some(live) => {
            let cut = cut(handle, live, positions.as_deref())?;
            (Arc::new(cut.view.clone()), Some(cut))
        }
    };
    let block_size = u64::from(about.block_size);
    let size = view.len();
    let mut header = Header {
        stream: Uuid::new_v4(),
        source: about.uuid,
        chain: vec![view.epoch()],
        size_before: 0,
        size_after: size,
        block_size: about.block_size,
        method: Method::Copy,
        binds: None,
        resumes: None,
        fuzzy: false,
        lacking: false,
        ahead: false,
    };
    let wanted = match &positions {
        None => Wanted { changes: Bitmap::new(0).into(), block_size, size, all_from: 0, to_end: false },
        Some(positions) => {
            let (changes, chain) = handle.changes_since(positions, &view)?;
            let upto = positions[0].upto;
            header.method = Method::Tracked;
            header.size_before = upto;
            header.chain = chain;
            let all_from = if upto < size { upto / block_size * block_size } else { u64::MAX };
            let needed = Bitmap::new(changes.blocks());
            needed.union_with(&changes);
            if all_from != u64::MAX {
                needed.set(all_from / block_size..needed.blocks());
            }
            view.narrow(&needed);
            Wanted { changes: changes.into(), block_size, size, all_from, to_end: false }
        }
    };
    if cut.is_some_and(|cut| wanted.all_from < size || !cut.holds(&wanted.changes)) {
        return Err(whole_live_disk(handle));
    }
    let (_, _, bytes) = wanted.count(&*view).map_err(SyncError::io("look at the view"))?;
    let totals = Totals::default();
    let mut writer = Writer::new(out);
    let size = FrameSize::new(false, block_size);
    let how = Packing { compress, size, lacking: false, pass: false, fill: false };
    pack_wanted(ToWriter(&mut writer), &view, &header, &wanted, how, &totals, &|done| progress(done, bytes))?;
    writer.flush()?;
    let epoch = view.epoch();
    handle.acknowledge(BOOKMARK, epoch)?;
    Ok(Extracted {
        source: about.path.clone(),
        method: header.method,
        since: from.map(|e| e.number),
        epoch: epoch.number,
        blocks_changed: totals.blocks.load(Relaxed),
        extents: totals.extents.load(Relaxed),
        bytes_read: totals.read.load(Relaxed),
        bytes_sent: writer.bytes(),
        seconds: began.elapsed().as_secs_f64(),
    })
}

/// A live disk is read in one go, while nobody writes.
fn cut(handle: &Handle, live: &Live, positions: Option<&[Position]>) -> Result<Cut, SyncError> {
    let positions = positions.ok_or_else(|| whole_live_disk(handle))?;
    Ok(live.cut(&handle.estimate(positions)?, &CutOptions::default())?)
}

fn whole_live_disk(handle: &Handle) -> SyncError {
    SyncError::Refused(format!(
        "{0} is a disk in use, and more of it is wanted than can be read in a moment: \"dsync sync {0}\" copies it in several \
         passes",
        handle.about().path.display()
    ))
}

/// Where the delta begins.
fn begin(handle: &Handle, since: Option<u64>) -> Result<Option<Epoch>, SyncError> {
    let path = handle.about().path.display();
    match since {
        Some(0) => Ok(None),
        Some(number) => match handle.epoch(number)? {
            Some(epoch) => Ok(Some(epoch)),
            None => Err(SyncError::Source(SourceError::Unknown(format!(
                "{path} has no epoch {number} in its history: \"dsync status {path}\" lists them, --since 0 takes the whole \
                 disk"
            )))),
        },
        None => {
            let bookmarks = handle.bookmarks()?.0;
            let mut epochs: Vec<Epoch> = bookmarks.values().map(|b| b.epoch).collect();
            epochs.sort_by_key(|e| e.number);
            epochs.dedup();
            match epochs[..] {
                [] => Ok(None),
                [epoch] => Ok(Some(epoch)),
                _ => {
                    let list: Vec<String> = bookmarks
                        .iter()
                        .map(|(name, b)| format!("{name} at epoch {}", b.epoch.number))
                        .collect();
                    Err(SyncError::Refused(format!(
                        "the replicas of {path} stand at different epochs ({}): say which one with --since EPOCH",
                        list.join(", ")
                    )))
                }
            }
        }
    }
}
