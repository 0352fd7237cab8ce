//! Making a replica the source.
//!
//! The mark in the lineage comes first: from then on no delta is merged. Then the state of the source is made, whose description is
//! written last. The same command completes what a crash left in between.
//!
//! The replica is opened as by every command, so an interrupted commit is completed first. The mark in the lineage is durable before
//! anything else (`replica/src/roles/promoted.rs`). Then the state of the source is made (`source/src/succeed.rs`): the id of the source that
//! the replica followed, a history that begins with the replica's trail and ends in its epoch, an epoch for the moment of the promotion,
//! whose changes are the replica's unsure set (what batches of a mirror brought further), a clean record, and a stamp. The description
//! comes last: what a crash leaves before that is not a source, and the same command makes it anew. Before it the lineage notes the state
//! directory in which the source is made: with another one, the promotion is not taken for interrupted. Nothing of this takes time with
//! the size of the disk. If the disk was a source before, its old folder is taken over; on the host of a source of the same id, the
//! folder is named `UUID-TERM`.
//!
//! Without `--force` a promotion wants the word of the source that there was no more: `released` in the lineage, with the epoch and the
//! term. A commit and a promotion clear it. The former source keeps in its own lineage to whom it was given (`sync/src/roles/last_word.rs`),
//! before it is sent: a second replica at the same epoch is not told.

use std::path::{Path, PathBuf};

use delta::Epoch;
use device::Format;
use extents::Bitmap;
use lineage::Point;
use replica::{GaveUp, Outlook, Promoted, Replica, ReplicaError, Verdict};
use serde::Serialize;
use source::{Bookmarks, SourceError, Succession};
use uuid::Uuid;

use crate::error::SyncError;
use crate::roles::{refuse_made_elsewhere, refuse_older_folder};
use crate::site::Site;

/// How to promote.
#[derive(Debug, Clone, Default)]
pub struct PromoteOptions {
    /// Without the word of its source that there was no more.
    pub force: bool,
    /// Only report what would be done.
    pub dry_run: bool,
    /// Where the replica keeps lineage and journal.
    pub journal_dir: Option<PathBuf>,
}

/// What a promotion did.
///
/// More than fifteen fields: they are the keys of its JSON object, which is flat.
#[derive(Debug, Clone, Serialize)]
pub struct Promotion {
    /// The disk.
    pub path: PathBuf,
    /// The source that it followed, and now is.
    pub source: Uuid,
    /// Its term as that.
    pub term: u64,
    /// The epoch of the replica's last commit.
    pub epoch: u64,
    /// When that was, in seconds since 1970, if it is known.
    pub time: Option<u64>,
    /// Bytes in which the disk is at a later moment than that epoch.
    pub bytes_ahead: u64,
    /// Earlier moments that were kept, of which none can be reached any more.
    pub moments_lost: usize,
    /// A later epoch that the old source is known to have had.
    pub lacks_epoch: Option<u64>,
    /// The old source has said that there was no more.
    pub released: bool,
    /// It is a former source, and this replica was told that it had ended.
    pub told: Option<String>,
    /// It is a former source, which has taken nothing since.
    #[serde(skip)]
    pub former: bool,
    /// The promotion that had made it that, where its own source had not ended.
    #[serde(skip)]
    pub gave_up: Option<GaveUp>,
    /// What it is called there: for a disk behind a link, as that.
    #[serde(skip)]
    pub file: String,
    /// Its parts are of different moments.
    pub fuzzy: bool,
    /// A verification found that it differed from its source, which was not repaired.
    pub verdict: Option<Verdict>,
    /// Copies that were made of it while it was a replica, as a source of another id: they lose that.
    pub copies: Vec<String>,
    /// An interrupted promotion was completed.
    pub completed: bool,
    /// Nothing was done.
    pub dry_run: bool,
    /// What opening the replica had to mend.
    pub recovered: Option<String>,
}

/// Makes the replica at `path` the source.
///
/// # Errors
/// Refused if the replica is not one moment of its source, is in use, was changed by others, or is the source already; without
/// `force` also if its source has not said that there was no more. It is the replica that it was then.
pub fn promote(state: &dyn Site, path: &Path, options: &PromoteOptions) -> Result<Promotion, SyncError> {
    if device::is_export(path) {
        return Err(source::unrecorded(path).into());
    }
    let opening = state.opening(options.journal_dir.as_deref());
    let lineage = state.lineage(path, &opening)?;
    if lineage.is_none() {
        if let Some((_, about)) = state.source(&path.to_string_lossy())? {
            return Err(already(path, about.term));
        }
    }
    lineage.as_ref().map_or(Ok(()), |lineage| refuse_older_folder(path, lineage, state))?;
    let marked = lineage.as_ref().and_then(|lineage| lineage.role.promoted);
    let opened = replica::to_promote(path, lineage, &opening, &|options| state.open(path, options));
    let mut replica = opened.map_err(|error| match (&error, marked) {
        // It is served, most likely.
        (ReplicaError::Busy { .. }, Some(mark)) if is_source(state, path, mark.term) => {
            already(path, mark.term)
        }
        _ => error.into(),
    })?;
    let before = replica.recorded().role.promoted;
    // One that was begun was allowed then.
    let outlook = replica.outlook(options.force || before.is_some(), None)?;
    let mut promotion = told(&replica, &outlook);
    promotion.dry_run = options.dry_run;
    promotion.completed = before.is_some();
    promotion.copies = may_succeed(state, &replica, &promotion)?;
    if options.dry_run {
        return Ok(promotion);
    }
    let mark = replica.promote()?;
    (promotion.term, promotion.bytes_ahead) = (mark.term, replica.status().unsure.bytes());
    // For those who have another state directory, as the service may that received it: before the source is there, so that it never has
    // two.
    let _ = state.state_dir().map(|place| replica.made_in(&place));
    if !state.succeed(replica.path(), &succession(state, &replica, &outlook, mark, before.is_some())?)? {
        return Err(already(path, mark.term));
    }
    // Those of devices are found by their folders, and all by their lineage.
    let _ = state.known().map(|known| known.remove(replica.path()));
    Ok(promotion)
}

/// Refuses what could only be begun: nothing takes the mark back. Returns the copies that lose their source.
pub(crate) fn may_succeed(
    state: &dyn Site,
    replica: &Replica,
    promotion: &Promotion,
) -> Result<Vec<String>, SyncError> {
    let path = replica.path();
    refuse_made_elsewhere(path, replica.recorded(), state)?;
    refuse_older_folder(path, replica.recorded(), state)?;
    let copies = if promotion.completed { Vec::new() } else { copies(state, path, promotion.source)? };
    state.check_term(path, promotion.source, promotion.term).map_err(|error| match promotion.completed {
        true if error.is_refusal() => SyncError::Refused(format!(
            "{error}. So the promotion of {0} cannot be completed: \"dsync forget {0}\" makes it a plain disk as it is, and \"dsync sync --adopt \
             SRC {0}\" then compares it and makes it a replica again",
            path.display()
        )),
        _ => SyncError::from(error),
    })?;
    Ok(copies)
}

/// The copies of a disk that is to be that source, and was copied onward while it was a replica: as a source of another id, which ends.
///
/// # Errors
/// Refused if the disk is more than that: its writes were recorded, or it has checkpoints that others read.
fn copies(state: &dyn Site, path: &Path, source: Uuid) -> Result<Vec<String>, SyncError> {
    let known = state.source(&path.to_string_lossy())?.filter(|(_, about)| about.uuid != source);
    let Some((place, about)) = known else { return Ok(Vec::new()) };
    let failed = |error| SourceError::State { what: "read", path: place.clone(), error };
    let bookmarks = Bookmarks::read(&*state.folder(&place).map_err(failed)?)?;
    if state.is_recorded(&place, &about)? || bookmarks.checkpoints().next().is_some() {
        let path = path.display();
        return Err(SyncError::Refused(format!(
            "{path} is a source itself ({}) and a replica of another one, as a disk is that was restored: \"dsync forget --replica {path}\" makes it \
             that source alone, and \"dsync forget {0}\" gives that up, with what it knows of its replicas, so that it can be promoted",
            about.uuid
        )));
    }
    Ok(bookmarks.replicas().map(|(name, _)| name.clone()).collect())
}

/// True if the disk at a path is known as a source of this term.
fn is_source(state: &dyn Site, path: &Path, term: u64) -> bool {
    let known = state.source(&path.to_string_lossy()).unwrap_or(None);
    known.is_some_and(|(_, about)| about.term == term)
}

pub(crate) fn already(path: &Path, term: u64) -> SyncError {
    SyncError::Refused(format!(
        "{} is a source already (term {term}): serve it with \"dsync serve\", or sync from it. Its replica is promoted where that is",
        path.display()
    ))
}

pub(crate) fn told(replica: &Replica, outlook: &Outlook) -> Promotion {
    let (status, recorded) = (replica.status(), replica.recorded());
    Promotion {
        path: replica.path().to_path_buf(),
        source: status.source.unwrap_or_default(),
        term: recorded.role.promoted.map_or(recorded.role.term + 1, |promoted| promoted.term),
        epoch: outlook.epoch.number,
        time: outlook.time,
        bytes_ahead: status.unsure.bytes(),
        moments_lost: outlook.moments,
        lacks_epoch: outlook.later.map(|later| later.number),
        released: outlook.released,
        told: recorded.role.demoted.as_ref().and_then(|demoted| demoted.told.clone()),
        former: recorded.role.demoted.is_some(),
        gave_up: recorded.gave_up().copied(),
        file: source::file_name(replica.path()),
        fuzzy: outlook.fuzzy,
        verdict: outlook.verdict,
        copies: Vec::new(),
        completed: false,
        dry_run: false,
        recovered: status.recovered.clone(),
    }
}

/// What the replica takes over from its source. `completes`: it was marked by an earlier command, and not held since.
pub(crate) fn succession(
    state: &dyn Site,
    replica: &Replica,
    outlook: &Outlook,
    mark: Promoted,
    completes: bool,
) -> Result<Succession, SyncError> {
    let (status, recorded) = (replica.status(), replica.recorded());
    let block_size = if status.block_size.is_power_of_two() { status.block_size.max(4096) } else { 4096 };
    let size = match recorded.format {
        Format::Raw => state.size(replica.path())?,
        Format::Qcow2 => recorded.size,
    };
    let changed = if completes { replica.changed_since_mark()? } else { None };
    let changes = match changed {
        Some(why) => Err(format!("the disk was changed while its promotion was interrupted: {why}")),
        // Other replicas at its epoch need not hold what it holds of later moments.
        None if outlook.fuzzy => Err("it was copied from a disk in use without a freeze".into()),
        // Where it differs is in no record.
        None if outlook.verdict.is_some() => {
            Err("it differed from its source when it was verified, before it was promoted".into())
        }
        None => {
            let blocks = Bitmap::new(size.div_ceil(block_size.into()));
            status.unsure.mark(&blocks, block_size.into());
            Ok(blocks)
        }
    };
    // Numbers rise along its lives, also where those of a former source go further.
    let furthest = recorded.role.lives.lives().iter().map(Point::cut).max().unwrap_or(0);
    let last = outlook.epoch.number.max(furthest);
    let mut moments = vec![Epoch { number: last + 1, id: mark.id }];
    if changes.is_err() {
        // The disk may differ from what it was at the mark, and replicas may be at that epoch: what it holds now gets one of its own.
        moments.push(Epoch { number: last + 2, id: Uuid::new_v4() });
    }
    Ok(Succession {
        uuid: status.source.unwrap_or_default(),
        term: mark.term,
        lives: recorded.role.lives.and(mark.id),
        gave_up: !mark.released && recorded.role.demoted.is_none(),
        base: outlook.epoch,
        trail: replica.trail(),
        moments,
        format: recorded.format,
        block_size,
        changes,
    })
}
