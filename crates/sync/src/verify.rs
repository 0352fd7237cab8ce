//! Proving a replica: its checksums are compared with those of the source, leaving out what has changed there since the
//! replica's epoch.
//!
//! A view is taken first. What changed between the replica's epoch and the view stands in the history, exactly; everything
//! else must be equal. So a source may be written to meanwhile, and no difference is a false alarm.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use compare::{Finding, Hash, Scope};
use delta::{Epoch, Header, Method};
use device::Disk;
use extents::Bitmap;
use link::{Link, Receiver, Sender};
use serde::Serialize;
use source::{Handle, Position, SourceError};
use uuid::Uuid;

use crate::compared::{Sending, compare};
use crate::error::SyncError;
use crate::extents::Extents;
use crate::messages::{Commit, Open, PLAN, Plan, Standing, open, part};
use crate::push::{Packing, Progress, Totals, bookmark, committed, refuse_vanished};
use crate::read::FrameSize;

/// What to prove, and how.
#[derive(Debug, Clone, Default)]
pub struct VerifyOptions {
    /// Send what differs, and commit it. Of the whole disk: the replica then stands at the source's epoch of now. Of
    /// ranges: it stays at its epoch.
    pub repair: bool,
    /// How a repair is committed.
    pub commit: Commit,
    /// Compare only these bytes; all, if empty.
    pub ranges: Vec<Range<u64>>,
    /// How blocks are digested.
    pub hash: Hash,
    /// Bytes that may be read in a second, on each side.
    pub rate: Option<u64>,
    /// Bytes that may be sent in a second.
    pub bwlimit: Option<u64>,
    /// Go on behind what can't be read.
    pub keep_going: bool,
    /// Where the replica keeps lineage and journal.
    pub journal_dir: Option<PathBuf>,
    /// The link leads to another host, and may be cut.
    pub may_be_cut: bool,
}

/// What a verification found.
#[derive(Debug, Clone, Serialize)]
pub struct Verified {
    /// The source.
    pub source: PathBuf,
    /// The replica.
    pub destination: String,
    /// The epoch at which the replica stood.
    pub epoch: u64,
    /// The epoch of the source that it was compared with.
    pub source_epoch: u64,
    /// `exact`: what changed since is known, and every difference is damage. Else why differences may be changes.
    pub trust: String,
    /// How others changed the replica since its last commit, as far as can be seen from outside.
    pub changed: Option<String>,
    /// Bytes that the replica has, where it should have others.
    pub wrong_size: Option<u64>,
    /// Bytes of the source.
    pub disk_size: u64,
    /// Bytes a block.
    pub block_size: u32,
    /// Bytes that were to be compared.
    pub bytes_compared: u64,
    /// Bytes of these that have changed at the source since the replica's epoch: nothing can be said of them.
    pub bytes_changed_since: u64,
    /// Where the replica is not what it should be.
    pub differing: Extents,
    /// What could not be read at the source.
    pub unreadable: Extents,
    /// What could not be read at the replica. It counts as differing too.
    pub unreadable_there: Extents,
    /// What differed was sent and committed.
    pub repaired: bool,
    /// The epoch at which the replica stands now.
    pub epoch_after: u64,
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Bytes sent over the link.
    pub bytes_sent: u64,
    /// Bytes received over the link.
    pub bytes_received: u64,
    /// Bytes written at the replica, journal included.
    pub bytes_written: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// What opening the replica had to mend.
    pub recovered: Option<String>,
}

/// Compares the replica at the other end of `link` with a view of the source. `name` is how the user named the destination.
pub fn verify(
    handle: &Handle,
    link: Link,
    destination: &Path,
    name: &str,
    options: &VerifyOptions,
    progress: Progress<'_>,
) -> Result<Verified, SyncError> {
    let replica =
        Open { verify: true, ..Open::new(destination, &options.journal_dir, options.commit, handle.about()) };
    let (sender, receiver, standing) = open(link, &replica, options.bwlimit)?;
    let verified = prove(handle, (&sender, &receiver, standing), name, options, progress);
    part(sender, &receiver, verified)
}

/// Everything of a verification between the greeting and the goodbye.
fn prove(
    handle: &Handle,
    (sender, receiver, standing): (&Sender, &Receiver, Standing),
    name: &str,
    options: &VerifyOptions,
    progress: Progress<'_>,
) -> Result<Verified, SyncError> {
    let began = Instant::now();
    let traffic = sender.traffic();
    let about = handle.about();
    refuse_vanished(handle, name, &standing)?;
    let position = [stands(handle, &standing)?];
    let lost = known(handle, &position, &standing)?;
    let partly = !options.ranges.is_empty();
    if options.repair && partly {
        if let Some(why) = standing.changed.as_ref().or(lost.as_ref()) {
            return Err(SyncError::Refused(format!(
                "a part of {} can't be mended by itself ({why}): leave --range out",
                standing.path.display()
            )));
        }
    }

    if handle.live().is_some() {
        return Err(SyncError::Refused(format!(
            "{} is followed in the kernel, which keeps no view of it for a verify: \"dsync sync --method compare\" compares it with \
             {name} and mends what differs; so does a verify after \"dsync track remove\", while nobody uses it",
            about.path.display()
        )));
    }
    // The view first, then what changed up to it: no write can fall between.
    let view = Arc::new(handle.view(false)?);
    let (size, block_size) = (view.len(), about.block_size);
    let block = u64::from(block_size);
    let since = match lost {
        Some(_) => Bitmap::new(size.div_ceil(block)),
        None => handle.changes_since(&position, &view)?.0,
    };
    if standing.size < size && lost.is_none() {
        since.set(standing.size / block..since.blocks());
    }
    let scope = Scope {
        hash: options.hash,
        rate: options.rate,
        keep_going: options.keep_going,
        ..Scope::whole(size, block_size)
    };
    let scope = if partly { scope.within(&options.ranges) } else { scope };
    if partly && scope.ranges.is_empty() {
        return Err(SyncError::Refused(format!(
            "the ranges are beyond the end of {}, which has {}",
            about.path.display(),
            device::exact_size(size)
        )));
    }
    // A repair of the whole brings the replica to the view; all else looks at what has not changed since alone.
    let to_view = options.repair && !partly;
    if !to_view {
        let needed = Bitmap::new(since.blocks());
        for range in &scope.ranges {
            needed.set(range.start / block..range.end.div_ceil(block));
        }
        needed.subtract(&since);
        view.narrow(&needed);
    }

    let mut verified = Verified {
        source: about.path.clone(),
        destination: name.to_owned(),
        epoch: position[0].epoch.number,
        source_epoch: view.epoch().number,
        trust: lost.map_or("exact".to_owned(), |why| format!("differences may be changes: {why}")),
        changed: standing.changed.clone(),
        wrong_size: standing.wrong_size,
        disk_size: size,
        block_size,
        bytes_compared: scope.bytes(),
        bytes_changed_since: scope.ranges.iter().map(|r| marked(&since, r, block)).sum(),
        differing: Extents::default(),
        unreadable: Extents::default(),
        unreadable_there: Extents::default(),
        repaired: false,
        epoch_after: position[0].epoch.number,
        bytes_read: 0,
        bytes_sent: 0,
        bytes_received: 0,
        bytes_written: 0,
        seconds: 0.0,
        recovered: standing.recovered.clone(),
    };
    let plan = Plan { compare: Some(scope.clone()), delta: options.repair, ..Plan::default() };
    sender.send_json(PLAN, &plan)?;
    let totals = Totals::default();
    if options.repair {
        let header = header(
            &standing,
            if to_view { Some((view.epoch(), size)) } else { None },
            about.uuid,
            block_size,
        )?;
        let size = FrameSize::new(options.may_be_cut, block);
        let sent = (|| {
            let mut sending = Sending::begin(
                sender,
                &header,
                Packing { compress: None, size, lacking: false, pass: false, fill: false },
                &totals,
            )?;
            compare(receiver, &view, &scope, false, &totals, progress, |finding| {
                note(&mut verified, &finding, &since, block);
                if to_view {
                    sending.add(&finding)
                } else {
                    outside(&finding, &since, block, |part| sending.add(&part))
                }
            })?;
            if let Some(first) = verified.unreadable.list.first() {
                return Err(SyncError::Unreadable(first.offset));
            }
            sending.end()
        })();
        let committed = committed(receiver, if to_view { view.epoch() } else { position[0].epoch }, sent)?;
        if to_view {
            handle.acknowledge(&bookmark(name, &standing), committed.epoch)?;
        }
        verified.repaired = true;
        verified.epoch_after = committed.epoch.number;
        verified.bytes_written = committed.bytes_written;
    } else {
        compare(receiver, &view, &scope, false, &totals, progress, |finding| {
            note(&mut verified, &finding, &since, block);
            Ok(())
        })?;
    }
    verified.bytes_read = totals.read.load(Relaxed);
    verified.bytes_sent = traffic.sent();
    verified.bytes_received = traffic.received();
    verified.seconds = began.elapsed().as_secs_f64();
    Ok(verified)
}

impl Verified {
    /// True if the replica is not what it should be, and was not mended.
    pub fn differs(&self) -> bool {
        !self.repaired && (self.differing.extents > 0 || self.wrong_size.is_some())
    }
}

/// Where the replica stands, if it is whole.
fn stands(handle: &Handle, standing: &Standing) -> Result<Position, SyncError> {
    let (path, about) = (standing.path.display(), handle.about());
    if let Some(other) = standing.source.filter(|source| *source != about.uuid) {
        return Err(SyncError::Refused(format!(
            "replica {path} is a copy of another source ({other}), not of {}: give the right source or destination",
            about.path.display()
        )));
    }
    match standing.epoch.filter(|_| !standing.under_way) {
        Some(epoch) => Ok(Position { epoch, upto: standing.size }),
        None if standing.source.is_none() => {
            Err(SyncError::Refused(format!("no replica at {path} yet: create it with \"dsync sync\"")))
        }
        None => Err(SyncError::Refused(format!("replica {path} is incomplete: run \"dsync sync\" first"))),
    }
}

/// Why it is not known what changed since the replica's epoch; `None` if it is.
fn known(handle: &Handle, position: &[Position], standing: &Standing) -> Result<Option<String>, SyncError> {
    match handle.reaches(position) {
        Ok(()) => Ok(None),
        Err(SourceError::Lost { why, .. }) => Ok(Some(why)),
        Err(SourceError::Foreign(why)) => Err(SyncError::Refused(format!(
            "replica {} does not fit source {}: {why}",
            standing.path.display(),
            handle.about().path.display()
        ))),
        Err(other) => Err(other.into()),
    }
}

/// The header of a repair: to a view, or at the replica's own epoch.
fn header(
    standing: &Standing,
    view: Option<(Epoch, u64)>,
    source: Uuid,
    block_size: u32,
) -> Result<Header, SyncError> {
    let own = standing.epoch.map(|epoch| (epoch, standing.size));
    let Some((epoch, size_after)) = view.or(own) else {
        return Err(SyncError::Refused(format!("replica {} has no epoch", standing.path.display())));
    };
    Ok(Header {
        stream: Uuid::new_v4(),
        source,
        chain: vec![epoch],
        size_before: standing.size,
        size_after,
        block_size,
        method: Method::Compare,
        binds: Some(standing.nonce),
        resumes: None,
        // A part says nothing of the rest.
        fuzzy: view.is_none() && standing.fuzzy,
        lacking: false,
        ahead: false,
    })
}

/// Bytes of a range whose blocks are marked.
fn marked(marks: &Bitmap, range: &Range<u64>, block: u64) -> u64 {
    let runs = marks.runs_in(range.start / block..range.end.div_ceil(block));
    runs.map(|run| (run.end * block).min(range.end) - (run.start * block).max(range.start)).sum()
}

/// The parts of a range whose blocks are not marked.
fn unmarked(marks: &Bitmap, range: &Range<u64>, block: u64, mut part: impl FnMut(Range<u64>)) {
    let mut at = range.start;
    for run in marks.runs_in(range.start / block..range.end.div_ceil(block)) {
        let (start, end) = ((run.start * block).max(range.start), (run.end * block).min(range.end));
        if start > at {
            part(at..start);
        }
        at = end.max(at);
    }
    if at < range.end {
        part(at..range.end);
    }
}

/// Notes what was found, unless the source has changed there since.
fn note(verified: &mut Verified, finding: &Finding<'_>, since: &Bitmap, block: u64) {
    let (range, list) = match finding {
        Finding::Data { offset, data } => (*offset..offset + data.len() as u64, &mut verified.differing),
        Finding::Zero(range) => (range.clone(), &mut verified.differing),
        Finding::Unreadable(range) => (range.clone(), &mut verified.unreadable),
        Finding::UnreadableThere(range) => return verified.unreadable_there.add(range),
        Finding::Between { .. } | Finding::Upto(..) => return,
    };
    unmarked(since, &range, block, |part| list.add(&part));
}

/// Hands on the parts of a finding where the source has not changed since.
fn outside(
    finding: &Finding<'_>,
    since: &Bitmap,
    block: u64,
    mut hand: impl FnMut(Finding<'_>) -> Result<(), SyncError>,
) -> Result<(), SyncError> {
    let mut result = Ok(());
    match finding {
        Finding::Data { offset, data } => {
            unmarked(since, &(*offset..offset + data.len() as u64), block, |part| {
                let data = &data[(part.start - offset) as usize..(part.end - offset) as usize];
                if result.is_ok() {
                    result = hand(Finding::Data { offset: part.start, data });
                }
            });
        }
        Finding::Zero(range) => unmarked(since, range, block, |part| {
            if result.is_ok() {
                result = hand(Finding::Zero(part));
            }
        }),
        _ => {}
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_since_is_left_out() {
        let marks = Bitmap::new(10);
        marks.set(1..2);
        marks.set(4..6);
        let left = |range: Range<u64>| {
            let mut parts = Vec::new();
            unmarked(&marks, &range, 100, |part| parts.push(part));
            assert_eq!(
                parts.iter().map(|p| p.end - p.start).sum::<u64>() + marked(&marks, &range, 100),
                range.end - range.start
            );
            parts
        };
        assert_eq!(left(0..950), [0..100, 200..400, 600..950]);
        assert_eq!(left(100..200), []);
        assert_eq!(left(400..700), [Range { start: 600, end: 700 }]);
    }
}
