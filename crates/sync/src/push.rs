//! The source's end: find what the replica lacks, read it from a view, pack it, send it.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use compare::rolling::InPlace;
use compare::{Hash, Scope, in_order};
use delta::{Compressor, Encoder, Epoch, Frame, Header, Method, Unit, encode_frame};
use device::Disk;
use extents::Bitmap;
use link::{Link, Receiver, Sender};
use serde::Serialize;
use source::{CutOptions, Handle, Position, SourceError, View};
use uuid::Uuid;

use crate::compared::send_differences;
use crate::digests::Digests;
use crate::error::{Class, SyncError};
use crate::extents::Extents;
use crate::live::{Caught, catch_up};
use crate::messages::{
    COMMITTED, Commit, Committed, FAILED, Open, PLAN, Part, Plan, Standing, expect, of_unit, open, part,
    text, unexpected,
};
use crate::read::{FrameReader, FrameSize, Wanted};
use crate::rolling::send_moved;

/// How the changes are to be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum How {
    /// By the tracker; by digests where it knows nothing; everything where there is no replica.
    #[default]
    Auto,
    /// By the tracker alone.
    Tracked,
    /// By digests.
    Compare,
    /// By sums of blocks wherever they stand: finds what has moved too.
    Rolling,
    /// Not at all: everything is sent.
    Copy,
}

/// What to do.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// How the changes are to be found.
    pub how: How,
    /// How the replica steps to the new epoch.
    pub commit: Commit,
    /// Only say what would be moved.
    pub dry_run: bool,
    /// Take over a file that is no replica, by comparing all of it.
    pub adopt: bool,
    /// Begin a new replica where the source knows of one and none is to be found.
    pub create: bool,
    /// Send the view that is open as `@view`.
    pub at_view: bool,
    /// How blocks are digested.
    pub hash: Hash,
    /// Go on behind what can't be read at the replica, and, where it is `lacking`, at the source.
    pub keep_going: bool,
    /// Leave out what can't be read at the source: the replica is incomplete then.
    pub lacking: bool,
    /// Keep digests of the replica from this sync to the next: in this file, or in the replica's folder.
    pub digests: Option<Option<PathBuf>>,
    /// How what has moved is put in order, where it is moved in place.
    pub in_place: InPlace,
    /// A zstd level.
    pub compress: Option<i32>,
    /// Bytes a second.
    pub bwlimit: Option<u64>,
    /// Where the replica keeps lineage and journal.
    pub journal_dir: Option<PathBuf>,
    /// The link leads to another host, and may be cut.
    pub may_be_cut: bool,
    /// How many passes over a live disk may be made before the cut.
    pub passes: u32,
    /// How a live disk is cut.
    pub cut: CutOptions,
}

impl Options {
    fn packing(&self, block_size: u64, pass: bool) -> Packing {
        let size = FrameSize::new(self.may_be_cut, block_size);
        Packing { compress: self.compress, size, lacking: self.lacking, pass, fill: self.fills() && !pass }
    }

    /// On one host, and with nothing stored in between, a dense region is moved whole: that costs less than picking.
    fn fills(&self) -> bool {
        !self.may_be_cut && self.commit == Commit::InPlace
    }
}

/// What was found how, what it cost, and what was committed.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// The source.
    pub source: PathBuf,
    /// The replica.
    pub destination: String,
    /// How the changes were found: tracked, compare, rolling or copy.
    pub method: Method,
    /// `tracked`, `compared` or `seeded`: what the equality of the replica rests on; with the reason if it is not the
    /// tracker, and `without a cut` if the replica is of several moments.
    pub trust: String,
    /// Bytes of the source.
    pub disk_size: u64,
    /// Bytes a block.
    pub block_size: u32,
    /// Blocks that the delta names.
    pub blocks_changed: u64,
    /// Runs of such blocks.
    pub extents: u64,
    /// Bytes of such blocks.
    pub bytes_changed: u64,
    /// Those of them that the replica had elsewhere.
    pub bytes_copied: u64,
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
    /// The number of the epoch at which the replica stands now.
    pub epoch: Option<u64>,
    /// How long a file system was frozen, in milliseconds; `None` where nothing had to be.
    pub freeze_ms: Option<u64>,
    /// A transfer that had been cut was taken up.
    pub resumed: bool,
    /// Nothing was moved, only counted.
    pub dry_run: bool,
    /// What became of the digests that were to be kept.
    pub digests: Option<String>,
    /// What could not be read at the source, and is missing at the replica.
    pub unreadable: Extents,
    /// What could not be read at the replica, and was sent, whatever it held.
    pub unreadable_there: Extents,
    /// What opening the replica had to mend.
    pub recovered: Option<String>,
    /// Bytes that writers had to keep for the view.
    pub view_bytes: u64,
}

/// Told how far the transfer is: bytes done, bytes in all.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// What is to be sent, as found.
pub(crate) struct Found {
    pub method: Method,
    /// Blocks, extents and bytes that changed, where that is less than what is moved.
    changed: Option<(u64, u64, u64)>,
    pub trust: String,
    header: Header,
    pub wanted: Wanted,
    /// It is a pass over a live disk, not yet the whole.
    pub pass: bool,
}

/// The chosen way.
pub(crate) enum Way {
    Tracked(Vec<Position>),
    Compare(String),
    Rolling(String),
    Copy(String),
}

/// Brings the replica at the other end of `link` up to date. `name` is how the user named the destination.
pub fn push(
    handle: &Handle,
    link: Link,
    destination: &Path,
    name: &str,
    options: &Options,
    progress: Progress<'_>,
) -> Result<Summary, SyncError> {
    let replica = Open {
        adopt: options.adopt,
        create: options.create,
        digests: options.digests.clone().map(|file| Digests { file, hash: options.hash }),
        ..Open::new(destination, &options.journal_dir, options.commit, handle.about())
    };
    let (sender, receiver, standing) = open(link, &replica, options.bwlimit)?;
    let pushed = bring(handle, (&sender, &receiver, standing), name, options, progress);
    part(sender, &receiver, pushed)
}

/// Everything of a sync between the greeting and the goodbye.
fn bring(
    handle: &Handle,
    (sender, receiver, standing): (&Sender, &Receiver, Standing),
    name: &str,
    options: &Options,
    progress: Progress<'_>,
) -> Result<Summary, SyncError> {
    let began = Instant::now();
    let traffic = sender.traffic();
    let about = handle.about();
    if !options.create {
        refuse_vanished(handle, name, &standing)?;
    }
    let way = choose(handle, &standing, options)?;
    let mut summary = Summary {
        source: about.path.clone(),
        destination: name.to_owned(),
        method: Method::Tracked,
        trust: String::new(),
        disk_size: 0,
        block_size: about.block_size,
        blocks_changed: 0,
        extents: 0,
        bytes_changed: 0,
        bytes_copied: 0,
        bytes_read: 0,
        bytes_sent: 0,
        bytes_received: 0,
        bytes_written: 0,
        seconds: 0.0,
        epoch: None,
        freeze_ms: None,
        resumed: standing.under_way || standing.resumes.is_some(),
        dry_run: options.dry_run,
        digests: None,
        unreadable: Extents::default(),
        unreadable_there: Extents::default(),
        recovered: standing.recovered.clone(),
        view_bytes: 0,
    };
    if options.dry_run {
        estimate(handle, &way, &mut summary)?;
        summary.seconds = began.elapsed().as_secs_f64();
        return Ok(summary);
    }
    let total = Totals::default();
    let bookmark = bookmark(name, &standing);
    let mut first = None;
    let (view, found, standing) = match handle.live() {
        None => {
            let view = Arc::new(handle.view(options.at_view)?);
            let fill = options.fills();
            let mut found = find(handle, &view, way, &standing, options.how, fill)?;
            if standing.ahead && found.method == Method::Tracked && stands(&standing, &view) {
                // A mirror brought it something that the source does not know it ever had.
                let why =
                    "the replica is ahead of its epoch, and the source is not: it was restored from a copy";
                if options.how == How::Tracked {
                    return Err(SyncError::Lost { path: about.path.clone(), why: why.into() });
                }
                found = find(handle, &view, Way::Compare(why.into()), &standing, options.how, fill)?;
            }
            found.header.lacking = options.lacking;
            (view, found, standing)
        }
        Some(live) => {
            let line = (sender, receiver);
            let caught = catch_up(handle, live, line, standing, way, options, &total, progress)
                .and_then(|caught| of_cut(handle, caught, &mut summary, &mut first));
            heard(receiver, caught)?
        }
    };
    (summary.method, summary.trust) = first.clone().unwrap_or((found.method, found.trust.clone()));
    if found.header.fuzzy {
        summary.trust.push_str(", without a cut: the disk was written to during the last pass");
    }
    summary.disk_size = view.len();

    // Nothing changed and the replica stands at this epoch already: there is nothing to commit.
    let epoch = view.epoch();
    if found.method == Method::Tracked
        && stands(&standing, &view)
        && !summary.resumed
        && !options.lacking
        && first.is_none()
    {
        handle.acknowledge(&bookmark, epoch)?;
        summary.epoch = Some(epoch.number);
        summary.bytes_sent = traffic.sent();
        summary.bytes_received = traffic.received();
        summary.seconds = began.elapsed().as_secs_f64();
        return Ok(summary);
    }

    let result = match found.method {
        Method::Rolling => {
            let how = options.packing(about.block_size.into(), false);
            let in_place = standing.in_place.then_some(options.in_place);
            let keep_going = options.keep_going;
            send_moved(sender, receiver, &view, &found.header, in_place, keep_going, how, &total, progress)
        }
        _ => send(sender, receiver, &view, &found, options, &total, progress),
    };
    let committed = committed(receiver, epoch, result)?;
    (summary.unreadable, summary.unreadable_there) = total.unreadable();
    summary.digests = committed.digests.as_deref().map(text);
    if !options.lacking {
        handle.acknowledge(&bookmark, committed.epoch)?;
        summary.epoch = Some(committed.epoch.number);
    }
    (summary.blocks_changed, summary.extents, summary.bytes_changed) = found
        .changed
        .filter(|(blocks, ..)| *blocks < total.blocks.load(Relaxed))
        .unwrap_or((total.blocks.load(Relaxed), total.extents.load(Relaxed), total.bytes.load(Relaxed)));
    summary.bytes_copied = total.copied.load(Relaxed);
    summary.bytes_read = total.read.load(Relaxed);
    summary.bytes_written = committed.bytes_written;
    summary.bytes_sent = traffic.sent();
    summary.bytes_received = traffic.received();
    summary.view_bytes = view.kept_bytes();
    summary.seconds = began.elapsed().as_secs_f64();
    Ok(summary)
}

/// True if the replica stands at the epoch of a view, or ahead of it.
fn stands(standing: &Standing, view: &View) -> bool {
    matches!(standing.positions[..], [Part { epoch: Some(e), upto }] if e == view.epoch() && upto == view.len())
}

/// What a cut of a live disk leaves to be sent.
fn of_cut(
    handle: &Handle,
    caught: Caught,
    summary: &mut Summary,
    first: &mut Option<(Method, String)>,
) -> Result<(Arc<View>, Found, Standing), SyncError> {
    let Caught { standing, positions, cut, first: begun } = caught;
    *first = begun;
    summary.freeze_ms = cut.freeze.map(|lasted| lasted.as_millis() as u64);
    let view = Arc::new(cut.view.clone());
    // Only what was read at the cut may be sent: nothing but the record can say what that must be.
    let mut found = find(handle, &view, Way::Tracked(positions), &standing, How::Tracked, false)?;
    if found.wanted.all_from < view.len() || !cut.holds(&found.wanted.changes) {
        let why = "more was missing at the end than had been read";
        return Err(SyncError::Lost { path: handle.about().path.clone(), why: why.into() });
    }
    found.header.fuzzy = cut.fuzzy;
    Ok((view, found, standing))
}

/// Sends a delta: what is wanted, or what a comparison finds.
pub(crate) fn send(
    sender: &Sender,
    receiver: &Receiver,
    view: &Arc<View>,
    found: &Found,
    options: &Options,
    totals: &Totals,
    progress: Progress<'_>,
) -> Result<(), SyncError> {
    match found.method {
        Method::Compare => {
            let block_size = found.header.block_size;
            let scope = Scope {
                hash: options.hash,
                keep_going: options.keep_going,
                ..Scope::whole(view.len(), block_size)
            };
            let how = options.packing(block_size.into(), found.pass);
            send_differences(sender, receiver, view, &found.header, &scope, how, totals, progress)
        }
        _ => send_wanted(sender, view, found, options, totals, progress),
    }
}

/// The name under which a source remembers a replica.
pub(crate) fn bookmark(name: &str, standing: &Standing) -> String {
    let far = name.contains(':') && !name.starts_with('/');
    if far { name.to_owned() } else { standing.path.display().to_string() }
}

/// What the far side makes of a delta that was sent, or of what went wrong here. Where the far side gave its reason, that is
/// the error, and not the broken link that came of it.
pub(crate) fn committed(
    receiver: &Receiver,
    epoch: Epoch,
    sent: Result<(), SyncError>,
) -> Result<Committed, SyncError> {
    let committed = sent.and_then(|()| expect(receiver, COMMITTED));
    let committed: Committed = heard(receiver, committed)?.json()?;
    // What is noted of it here is what was sent, and nothing else.
    if committed.epoch != epoch {
        return Err(SyncError::Far {
            message: format!("the far side committed epoch {}, which was not sent", committed.epoch.number),
            class: Class::Failed,
        });
    }
    Ok(committed)
}

/// Learns from the far side why the link broke, if it said so.
fn heard<T>(receiver: &Receiver, result: Result<T, SyncError>) -> Result<T, SyncError> {
    result.map_err(|error| match error {
        error @ SyncError::Link(_) => loop {
            match receiver.recv() {
                Ok(Some(message)) if message.kind == FAILED => return unexpected(&message),
                // What it said before.
                Ok(Some(_)) => {}
                _ => return error,
            }
        },
        error => error,
    })
}

/// Refuses to begin a replica where there was one: most likely its disk is not attached, or its file system not mounted.
pub(crate) fn refuse_vanished(handle: &Handle, name: &str, standing: &Standing) -> Result<(), SyncError> {
    if !standing.positions.is_empty() || standing.source.is_some() {
        return Ok(());
    }
    match handle.bookmarks()?.0.get(&bookmark(name, standing)) {
        Some(known) => Err(SyncError::Away(format!(
            "the replica at {name} is missing: it was last synced on {}, to epoch {}. If its file system is not mounted or \
             its disk not attached, bring it back and run again; if it is gone for good, \"dsync sync --create\" begins a new \
             replica there, with all of the source",
            device::moment(known.time),
            known.epoch.number
        ))),
        None => Ok(()),
    }
}

/// Decides how to find the changes, before a checkpoint is taken: a refused sync leaves no epoch behind.
pub(crate) fn choose(handle: &Handle, standing: &Standing, options: &Options) -> Result<Way, SyncError> {
    let about = handle.about();
    if let Some(other) = standing.source.filter(|s| *s != about.uuid && !options.adopt) {
        return Err(SyncError::Refused(format!(
            "replica {} is a copy of another source ({other}), not of {}: choose another destination. \"dsync sync --adopt\" would \
             compare everything, overwrite what differs, and make it a replica of this source",
            standing.path.display(),
            about.path.display()
        )));
    }
    if standing.positions.is_empty() && standing.source.is_none() && !options.adopt {
        return match options.how {
            How::Tracked => Err(SyncError::Refused(format!(
                "there is no replica at {} yet: make it first, without --method tracked",
                standing.path.display()
            ))),
            _ => Ok(Way::Copy("seeded".into())),
        };
    }
    let positions: Option<Vec<Position>> =
        standing.positions.iter().map(|p| Some(Position { epoch: p.epoch?, upto: p.upto })).collect();
    if options.how == How::Compare {
        return Ok(Way::Compare("asked for".into()));
    }
    let stands = standing.epoch.is_some() || !standing.positions.is_empty();
    if options.how == How::Rolling && options.lacking {
        return Ok(Way::Compare("a part of the source can't be read".into()));
    }
    if options.how == How::Rolling && (options.adopt || stands) {
        return Ok(Way::Rolling("asked for".into()));
    }
    if standing.positions.is_empty() && stands && options.how == How::Auto {
        return Ok(Way::Compare("the replica was empty".into()));
    }
    if standing.positions.is_empty() {
        // A seed that had not come far enough to keep anything.
        return Ok(Way::Copy("seeded".into()));
    }
    if options.how == How::Copy {
        return Ok(Way::Copy("copied: asked for".into()));
    }
    let lost = match positions.filter(|_| !options.adopt) {
        Some(positions) => match handle.reaches(&positions) {
            Ok(()) => return Ok(Way::Tracked(positions)),
            Err(lost @ SourceError::Lost { .. }) => lost,
            Err(SourceError::Foreign(why)) => {
                return Err(SyncError::Refused(format!(
                    "replica {} does not fit source {}: {why}",
                    standing.path.display(),
                    about.path.display()
                )));
            }
            Err(other) => return Err(other.into()),
        },
        None => {
            let why = match (options.adopt, standing.source) {
                (false, Some(_)) => {
                    "a part of the source could not be read the last time, or moving its parts in place was cut off"
                }
                _ => "the replica was adopted",
            };
            SourceError::Lost { since: 0, why: why.into() }
        }
    };
    let why = match lost {
        SourceError::Lost { why, .. } => why,
        other => other.to_string(),
    };
    if options.how == How::Tracked {
        return Err(SyncError::Lost { path: about.path.clone(), why });
    }
    Ok(Way::Compare(why))
}

/// Finds what the replica lacks for the view.
pub(crate) fn find(
    handle: &Handle,
    view: &Arc<View>,
    way: Way,
    standing: &Standing,
    how: How,
    fill: bool,
) -> Result<Found, SyncError> {
    let about = handle.about();
    let block_size = u64::from(about.block_size);
    let size = view.len();
    let to = view.epoch();
    let mut header = Header {
        stream: Uuid::new_v4(),
        source: about.uuid,
        chain: vec![to],
        size_before: standing.size,
        size_after: size,
        block_size: about.block_size,
        method: Method::Compare,
        binds: Some(standing.nonce),
        resumes: standing.resumes,
        fuzzy: false,
        lacking: false,
        ahead: false,
    };
    let nothing =
        || Wanted { changes: Bitmap::new(0).into(), block_size, size, all_from: u64::MAX, to_end: false };
    match way {
        Way::Compare(_) | Way::Rolling(_) => {
            let (method, why) = match way {
                Way::Rolling(why) => (Method::Rolling, why),
                Way::Compare(why) => (Method::Compare, why),
                _ => (Method::Compare, String::new()),
            };
            // What a cut-off transfer left is compared away: digests are those of the destination itself.
            header.resumes = None;
            header.method = method;
            let trust = format!("compared: {why}");
            Ok(Found { method, changed: None, trust, header, wanted: nothing(), pass: false })
        }
        Way::Copy(trust) => {
            header.method = Method::Copy;
            header.resumes = None;
            let mut wanted = Wanted { all_from: 0, ..nothing() };
            if standing.positions.is_empty() {
                header.size_before = 0;
                header.binds = standing.under_way.then_some(standing.nonce);
            } else {
                // Something stands there: its zeroes must be named.
                wanted = Wanted { changes: Bitmap::new(size.div_ceil(block_size)).into(), ..nothing() };
                wanted.changes.set(0..wanted.changes.blocks());
            }
            Ok(Found { method: Method::Copy, changed: None, trust, header, wanted, pass: false })
        }
        Way::Tracked(positions) => {
            let (changes, chain) = match handle.changes_since(&positions, view) {
                Ok(found) => found,
                // The gap came up with the checkpoint itself.
                Err(SourceError::Lost { why, .. }) if how != How::Tracked => {
                    return find(handle, view, Way::Compare(why), standing, how, fill);
                }
                Err(error) => return Err(error.into()),
            };
            let upto = positions.last().map_or(0, |p| p.upto);
            let all_from = if upto < size { upto / block_size * block_size } else { u64::MAX };
            if all_from != u64::MAX {
                changes.set(all_from / block_size..(all_from / block_size + 1).min(changes.blocks()));
            }
            header.method = Method::Tracked;
            if standing.under_way {
                // Only this replica, in this very state, can use it.
                header.size_before = standing.size;
            } else {
                header.binds = None;
                if let Some(first) = standing.epoch.or(chain.first().copied()) {
                    header.size_before = handle.size_at(&first)?.unwrap_or(standing.size);
                }
                // A journal may reach farther than the last commit in all its parts: the replica still stands there.
                // One that is not below the chain is of another history, and must not hide where this delta leads.
                let begins = chain.first().map_or(0, |e| e.number);
                if let Some(epoch) = standing.epoch.filter(|e| e.number < begins) {
                    header.chain = vec![epoch];
                    header.chain.extend(chain.iter().filter(|e| e.number > epoch.number));
                } else {
                    header.chain = chain;
                }
            }
            let changed = fill.then(|| {
                let blocks = changes.count();
                let extents = changes.runs().count() as u64;
                fill_dense(&changes);
                (blocks, extents, blocks.saturating_mul(block_size).min(size))
            });
            let narrowed = Bitmap::new(changes.blocks());
            narrowed.union_with(&changes);
            if all_from != u64::MAX {
                narrowed.set(all_from / block_size..narrowed.blocks());
            }
            view.narrow(&narrowed);
            Ok(Found {
                method: Method::Tracked,
                changed,
                trust: "tracked".into(),
                header,
                wanted: Wanted { changes: changes.into(), block_size, size, all_from, to_end: false },
                pass: false,
            })
        }
    }
}

/// Blocks of a window, and the part of it that must be marked for all of it to be moved: one in so many.
const WINDOW: u64 = 2048;
const DENSE_PART: u64 = 3;

/// Marks what lies between the marked blocks of dense windows.
pub(crate) fn fill_dense(changes: &Bitmap) {
    let mut at = 0;
    while let Some(first) = changes.runs_in(at..changes.blocks()).next() {
        let window = first.start..(first.start + WINDOW).min(changes.blocks());
        let (mut marked, mut end) = (0, first.start);
        for run in changes.runs_in(window.clone()) {
            marked += run.end - run.start;
            end = run.end;
        }
        if marked * DENSE_PART >= window.end - window.start {
            changes.set(first.start..end);
        }
        at = window.end;
    }
}

/// What a sync would move, without taking a checkpoint.
fn estimate(handle: &Handle, way: &Way, summary: &mut Summary) -> Result<(), SyncError> {
    let disk = handle.reader()?;
    let block_size = u64::from(handle.about().block_size);
    let size = disk.len();
    let wanted = match way {
        Way::Tracked(positions) => {
            let upto = positions.last().map_or(0, |p| p.upto);
            let all_from = if upto < size { upto / block_size * block_size } else { u64::MAX };
            Wanted { changes: handle.estimate(positions)?.into(), block_size, size, all_from, to_end: false }
        }
        // What a compare will find can't be known before; everything is the bound.
        Way::Copy(_) | Way::Compare(_) | Way::Rolling(_) => {
            Wanted { changes: Bitmap::new(0).into(), block_size, size, all_from: 0, to_end: false }
        }
    };
    (summary.method, summary.trust) = match way {
        Way::Tracked(_) => (Method::Tracked, "tracked".into()),
        Way::Compare(why) => (Method::Compare, format!("compared: {why}")),
        Way::Rolling(why) => (Method::Rolling, format!("compared: {why}")),
        Way::Copy(trust) => (Method::Copy, trust.clone()),
    };
    summary.disk_size = size;
    let count =
        wanted.count(&*disk).map_err(SyncError::io(format!("look at {}", summary.source.display())))?;
    (summary.blocks_changed, summary.extents, summary.bytes_changed) =
        (count.blocks, count.extents, count.bytes);
    // Before compression, and without the few bytes that tell of a hole; what a compare sends is at most this.
    (summary.bytes_read, summary.bytes_sent) = (count.read, count.read);
    Ok(())
}

/// What was found so far.
#[derive(Default)]
pub(crate) struct Totals {
    pub blocks: AtomicU64,
    pub extents: AtomicU64,
    pub bytes: AtomicU64,
    pub copied: AtomicU64,
    pub read: AtomicU64,
    /// Where the last record ended.
    end: AtomicU64,
    /// At the source, and at the replica.
    unreadable: Mutex<(Extents, Extents)>,
}

impl Totals {
    /// Notes what could not be read at the source.
    pub fn left_out(&self, range: &Range<u64>) {
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).0.add(range);
    }

    /// Notes what could not be read at the replica.
    pub fn unreadable_there(&self, range: &Range<u64>) {
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).1.add(range);
    }

    fn unreadable(&self) -> (Extents, Extents) {
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts what a frame tells: frames are to be counted in their order.
    pub fn add(&self, frame: &Frame, block_size: u64) {
        for record in &frame.records {
            self.changed(record.offset()..record.end(), block_size);
        }
    }

    /// Counts a range that has changed. What begins where the last one ended belongs to its run.
    pub fn changed(&self, range: Range<u64>, block_size: u64) {
        let goes_on = self.end.swap(range.end, Relaxed) == range.start && range.start != 0;
        let first = if goes_on { range.start.div_ceil(block_size) } else { range.start / block_size };
        self.blocks.fetch_add(range.end.div_ceil(block_size) - first, Relaxed);
        self.extents.fetch_add(u64::from(!goes_on), Relaxed);
        self.bytes.fetch_add(range.end - range.start, Relaxed);
    }
}

/// Where the units of a delta go.
pub(crate) trait Sink {
    fn unit(&mut self, unit: Unit) -> Result<(), SyncError>;
}

impl Sink for &Sender {
    fn unit(&mut self, unit: Unit) -> Result<(), SyncError> {
        Ok(self.send(of_unit(unit))?)
    }
}

fn send_wanted(
    sender: &Sender,
    view: &Arc<View>,
    found: &Found,
    options: &Options,
    totals: &Totals,
    progress: Progress<'_>,
) -> Result<(), SyncError> {
    let bytes = found.wanted.count(&**view).map_err(SyncError::io("look for data in the source"))?.bytes;
    sender.send_json(PLAN, &Plan { bytes, delta: true, pass: found.pass, ..Plan::default() })?;
    let how = options.packing(found.wanted.block_size, found.pass);
    pack_wanted(sender, view, &found.header, &found.wanted, how, totals, &|done| progress(done, bytes))
}

/// How frames are packed.
pub(crate) struct Packing {
    pub compress: Option<i32>,
    pub size: FrameSize,
    /// Leave out what can't be read.
    pub lacking: bool,
    /// Send dense regions whole.
    pub fill: bool,
    /// It is a pass over a live disk: the last block is sent whatever it holds, so that the delta reaches the end.
    pub pass: bool,
}

/// Reads what is wanted from a view, packs it as a delta, and hands its units on, in order.
pub(crate) fn pack_wanted(
    mut sink: impl Sink,
    view: &Arc<View>,
    header: &Header,
    wanted: &Wanted,
    how: Packing,
    totals: &Totals,
    progress: &dyn Fn(u64),
) -> Result<(), SyncError> {
    let reading = "read the source";
    let (mut encoder, unit) = Encoder::new(header, None)?;
    sink.unit(unit)?;
    let mut frames = FrameReader::new(wanted, view, &how, totals).map_err(SyncError::io(reading))?;
    let stream = header.stream;
    match how.compress {
        None => {
            while let Some((frame, end)) = frames.next(None).map_err(SyncError::io(reading))? {
                totals.add(&frame, wanted.block_size);
                let unit = encoder.frame(frame)?;
                sink.unit(unit)?;
                view.taken(end);
                progress(totals.bytes.load(Relaxed));
            }
            totals.read.fetch_add(frames.bytes_read(), Relaxed);
        }
        Some(level) => {
            let read = AtomicU64::new(0);
            let mut sequence = 0;
            in_order(
                std::thread::available_parallelism().map_or(2, |n| n.get()),
                || -> Result<_, SyncError> {
                    let next = frames.next(None).map_err(SyncError::io(reading))?;
                    read.store(frames.bytes_read(), Relaxed);
                    sequence += 1;
                    if let Some((frame, _)) = &next {
                        totals.add(frame, wanted.block_size);
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
                    progress(totals.bytes.load(Relaxed));
                    Ok(())
                },
            )?;
            totals.read.fetch_add(read.load(Relaxed), Relaxed);
        }
    }
    // The last moment to notice that what was read was no one moment: without a trailer nothing is committed.
    view.verify().map_err(SyncError::io(reading))?;
    sink.unit(encoder.trailer())
}

#[cfg(test)]
mod tests {
    use delta::Record;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_run_that_several_frames_share_is_one_extent() {
        let totals = Totals::default();
        let frame = |ranges: &[Range<u64>]| {
            let records = ranges.iter().map(|r| Record::Zero { offset: r.start, len: r.end - r.start });
            Frame { records: records.collect(), data: device::Buf::default() }
        };
        totals.add(&frame(&[0..4096, 8192..16384]), 4096);
        totals.add(&frame(std::slice::from_ref(&(16384..20480))), 4096);
        totals.add(&frame(&[20480..24576, 40960..45056]), 4096);
        assert_eq!(totals.extents.into_inner(), 3);
        assert_eq!(totals.blocks.into_inner(), 6);
    }

    #[test]
    fn dense_windows_are_filled_and_others_left() {
        let changes = Bitmap::new(10 * WINDOW);
        // Every second block of the first window, every tenth of a later one, and two strays.
        (0..WINDOW).step_by(2).for_each(|b| {
            changes.set(b..b + 1);
        });
        (4 * WINDOW..5 * WINDOW).step_by(10).for_each(|b| {
            changes.set(b..b + 1);
        });
        changes.set(9 * WINDOW..9 * WINDOW + 1);
        changes.set(10 * WINDOW - 1..10 * WINDOW);
        let sparse = changes.count() - WINDOW / 2;
        fill_dense(&changes);
        assert!(changes.all(0..WINDOW - 1));
        assert_eq!(changes.count(), WINDOW - 1 + sparse);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// However it comes in pieces, and whatever is sent besides: a block counts once, and so does a run of them.
        #[test]
        fn what_has_changed_counts_once(
            blocks in proptest::collection::vec((any::<bool>(), any::<bool>()), 1..200),
            short in 1u64..4097,
        ) {
            let totals = Totals::default();
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
            let Totals { blocks, extents, bytes, .. } = totals;
            prop_assert_eq!((blocks.into_inner(), extents.into_inner(), bytes.into_inner()), expected);
        }
    }
}
