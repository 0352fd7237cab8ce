//! Making a source a replica. A demotion gives up its role and nothing else; what was written to it is given up by the consent of who
//! syncs to it, and is the unsure set of the replica then: the next delta carries that, and what the new source has written since, and
//! nothing else. First the lineage is durable, then the source's state is removed; the same command completes what a crash left in
//! between.

use std::path::{Path, PathBuf};

use delta::Epoch;
use device::{WriteCounts, WriteWatch};
use extents::Bitmap;
use lineage::Lives;
use replica::{Demotion, GaveUp, Lineage, Released, Replica, Role, Unsure, UnsureSet};
use serde::Serialize;
use source::{
    AtRest, DeviceTrust, Handle, History, SourceError, SourceMembership, SourceMetadata, SourceOptions,
};
use uuid::Uuid;

use crate::error::SyncError;
use crate::options::GiveUp;
use crate::report::{Progress, Summary};
use crate::roles::promote::{PromoteOptions, promote};
use crate::roles::refuse_unfinished;
use crate::site::{Site, list};
use crate::transfer::saved::save;

/// How to demote.
#[derive(Debug, Clone, Default)]
pub struct DemoteOptions {
    /// Only report what would be done.
    pub dry_run: bool,
    /// Where the new replica keeps lineage and journal.
    pub journal_dir: Option<PathBuf>,
    /// How the source is opened.
    pub open: SourceOptions,
}

/// What a demotion did.
#[derive(Debug, Clone, Serialize)]
pub struct DemoteSummary {
    /// The disk.
    pub path: PathBuf,
    /// The source that it was, and now follows.
    pub source: Uuid,
    /// Its last term as that.
    pub term: u64,
    /// The lives that led to what it is.
    #[serde(skip)]
    pub lives: Lives,
    /// The epoch at which it counts as a replica; `None` if what was given up is not known.
    pub epoch: Option<u64>,
    /// The last epoch.
    pub last_epoch: Option<u64>,
    /// Bytes written after that epoch, which are given up; `None` if that is not known.
    pub bytes_unsure: Option<u64>,
    /// Others may have written to it since it ended as a source, or since it is a replica.
    pub others_wrote: bool,
    /// Where they were saved.
    pub saved: Option<PathBuf>,
    /// It was demoted before.
    pub again: bool,
    /// Nothing was done.
    pub dry_run: bool,
    /// What is to be told to the replica that succeeds it: nothing was written after this epoch.
    #[serde(skip)]
    pub released: Option<Released>,
    /// What its replica is called in the folder of a group.
    #[serde(skip)]
    pub file: String,
}

/// The last sync of a source.
pub type LastSync<'a> = &'a mut dyn FnMut(&Handle) -> Result<Summary, SyncError>;

/// At which of its moments a source becomes a replica.
pub(crate) enum At<'a> {
    /// The epoch of a last sync; refused if anything was written after it.
    Synced(LastSync<'a>),
    /// The present one, of which nothing is given up: the epoch of its promotion, if nothing was written since; otherwise one that is cut now.
    Now,
    /// The epoch at which it has ended already, with its group. What was written since was written to a replica, by others.
    Ended(Epoch),
    /// An epoch that it has in common with a disk that goes on, by its number, if there is one: what was written since is given up.
    Apart(Option<u64>, GiveUp),
}

/// Makes the source `what` a replica, which holds all that was written to it. With `last_sync`, of the replica that this brings up to date.
///
/// # Errors
/// Refused if it is in use or not a source. It is the source that it was then.
pub fn demote(
    state: &dyn Site,
    what: &str,
    options: &DemoteOptions,
    last_sync: Option<LastSync<'_>>,
    progress: Progress<'_>,
) -> Result<DemoteSummary, SyncError> {
    let at = last_sync.map_or(At::Now, At::Synced);
    demote_if(state, what, options, at, progress, &|place, path| refuse_member(state, place, path))
}

/// Makes a disk a replica again that went its own way as a source since an epoch, or since one that is not known. A former source is
/// promoted before: that loses nothing, and what was cut off then is done again. Members of a group are given up one by one.
///
/// # Errors
/// As [`demote`]; refused also if what was written is to be saved and is not known.
pub(crate) fn give_up(
    state: &dyn Site,
    path: &Path,
    journal_dir: Option<&Path>,
    (since, how): (Option<u64>, &GiveUp),
    progress: Progress<'_>,
) -> Result<(), SyncError> {
    let journal_dir = journal_dir.map(Path::to_path_buf);
    let lineage = state.lineage(path, &state.opening(journal_dir.as_deref()))?;
    let (open, own) = (state.unsaid(), journal_dir.clone());
    let mut options = DemoteOptions { journal_dir: own, open, ..DemoteOptions::default() };
    let former =
        lineage.is_some_and(|lineage| lineage.role.demoted.is_some() && lineage.role.promoted.is_none());
    if former {
        let device = device::identity(path).ok().filter(device::Identity::is_block);
        let watch = device.as_ref().map(WriteWatch::begin).transpose();
        let watch = watch.map_err(SyncError::io(format!("flush {}", path.display())))?;
        promote(state, path, &PromoteOptions { force: true, journal_dir, ..PromoteOptions::default() })?;
        // Opened as a replica, it was found to be as it was left.
        if watch.is_some_and(|watch| watch.is_still()) {
            options.open.device_trust = DeviceTrust::Counted;
        }
    }
    let demote =
        |at: At<'_>| demote_if(state, &path.to_string_lossy(), &options, at, progress, &|_, _| Ok(()));
    demote(At::Apart(since, how.clone())).map(drop).inspect_err(|_| {
        // It was a replica before, and is one again.
        let _ = former.then(|| demote(At::Now));
    })
}

/// Makes `what` a replica as [`demote`] does, if `admit` accepts the folder of its state and its path, or if that was done before.
pub(crate) fn demote_if(
    state: &dyn Site,
    what: &str,
    options: &DemoteOptions,
    at: At<'_>,
    progress: Progress<'_>,
    admit: &dyn Fn(&Path, &Path) -> Result<(), SyncError>,
) -> Result<DemoteSummary, SyncError> {
    let known = state.source(what)?;
    let path = known.as_ref().map_or_else(|| PathBuf::from(what), |(_, about)| about.path.clone());
    let path = state.real(&path);
    let opening = state.opening(options.journal_dir.as_deref());
    let lineage = if state.exists(&path) { state.lineage(&path, &opening)? } else { None };
    refuse_unfinished(&path, state)?;
    if let Some(lineage) = lineage.filter(|lineage| lineage.role.promoted.is_none()) {
        return again(state, &path, known, &lineage, &opening);
    }
    let Some((place, _)) = known else {
        return Err(SyncError::Refused(format!(
            "{what} is not a source: \"dsync status\" lists them; an interrupted promotion is completed by \"dsync promote {what}\""
        )));
    };
    admit(&place, &path)?;
    let handle = state.attach(what, &SourceOptions { at_rest: AtRest::Needed, ..options.open.clone() })?;
    let found = follow(&handle, options, at, progress);
    let about = handle.about().clone();
    let lives = lives_in(state, &place)?;
    handle.close()?;
    let (mut summary, demotion) = found?;
    if options.dry_run {
        return Ok(summary);
    }
    let trust = options.open.device_trust.max(DeviceTrust::Counted);
    // Where the kernel does not count, nobody may be able to write.
    let is_counted = !about.identity.is_block() || WriteCounts::of(about.identity.dev).is_some();
    let undoubted = || match is_counted {
        true => state.doubt(&place, &about, trust).is_ok_and(|doubt| doubt.is_none()),
        false => device::may_change(&about.path).is_none(),
    };
    // Held by nobody until the replica was opened, it may have been served; since then it cannot be.
    let unserved = || lives_in(state, &place).is_ok_and(|now| now == lives);
    // Of what is not known nothing is said that a write would make wrong.
    let is_known = demotion.since.is_some() && !demotion.others_wrote;
    let unwritten = || unserved() && (!is_known || undoubted());
    let mut replica = state
        .open(&about.path, &replica::ReplicaOptions { adopt: true, format: Some(about.format), ..opening })?;
    replica.demote(&demotion, &|_| unwritten())?;
    list(&replica, state.known().as_ref());
    leave_knowledge(state, &place, &replica);
    drop(replica);
    state.forget(&place, &about)?;
    summary.released = released(summary.term, &demotion);
    Ok(summary)
}

/// The lives in a source's folder: who opens it to write begins another.
fn lives_in(state: &dyn Site, place: &Path) -> Result<Option<Lives>, SyncError> {
    let folder = state.folder(place).map_err(SyncError::io(format!("open {}", place.display())))?;
    Ok(source::about_in(&*folder)?.map(|about| about.lives))
}

/// Refuses a member of a group whose disks are all sources together: without it their replicas could not take over. What is left of a group of which
/// some were promoted is demoted one by one.
fn refuse_member(state: &dyn Site, place: &Path, path: &Path) -> Result<(), SyncError> {
    let folder = state.folder(place).map_err(SyncError::io(format!("open {}", place.display())))?;
    let Some(group) = SourceMembership::read(&*folder)? else { return Ok(()) };
    let members = state.group_members(&group.name)?;
    if members.len() < 2 || source::check_promotion(&group.name, &members).is_err() {
        return Ok(());
    }
    let (name, path) = (&group.name, path.display());
    Err(SyncError::Refused(format!(
        "{path} is in the group {name}, whose disks take over together: demote all of them with \"dsync demote --group {name}\", or take this one \
         out first, with \"dsync forget --group {name} {path}\""
    )))
}

/// Leaves what the source knew to the replica that it is now, so that its history goes on where it is promoted again. Where that
/// fails, it begins anew then.
fn leave_knowledge(state: &dyn Site, place: &Path, replica: &Replica) {
    if let Ok(from) = state.folder(place) {
        let _ = History::read(&*from).and_then(|history| replica.take_trail(&history));
    }
}

fn released(term: u64, demotion: &Demotion) -> Option<Released> {
    demotion.last().map(|epoch| Released { epoch, term })
}

/// Where the source of a replica is, as far as that is known here.
fn whereabouts(state: &dyn Site, source: Option<Uuid>) -> String {
    let Some(id) = source else { return "where its source is".into() };
    match state.sources().unwrap_or_default().into_iter().find(|about| about.uuid == id) {
        Some(about) => format!("with its source, which is {} on this host", about.path.display()),
        None => format!("on the host of its source, where \"dsync status\" lists the id {id}"),
    }
}

/// Completes the demotion of a source that is a replica by now: what a crash left of its state goes.
pub(crate) fn complete(
    state: &dyn Site,
    path: &Path,
    known: Option<(PathBuf, SourceMetadata)>,
    lineage: &Lineage,
    opening: &replica::ReplicaOptions,
) -> Result<(), SyncError> {
    let is_left = |about: &SourceMetadata| {
        let Role { demoted, promoted, term, .. } = &lineage.role;
        demoted.is_some() && promoted.is_none() && lineage.source == Some(about.uuid) && about.term <= *term
    };
    let Some((place, about)) = known.filter(|(_, about)| is_left(about)) else { return Ok(()) };
    match state.open(path, opening) {
        Ok(replica) => leave_knowledge(state, &place, &replica),
        Err(busy) if busy.is_busy() => return Err(busy.into()),
        Err(_) => {}
    }
    Ok(state.forget(&place, &about)?)
}

/// A source that was demoted before.
fn again(
    state: &dyn Site,
    path: &Path,
    known: Option<(PathBuf, SourceMetadata)>,
    lineage: &Lineage,
    opening: &replica::ReplicaOptions,
) -> Result<DemoteSummary, SyncError> {
    let (Some(source), Some(demoted)) = (lineage.source, &lineage.role.demoted) else {
        return Err(SyncError::Refused(format!(
            "{} is a replica, and not the source: run this {}. To make it the source, run \"dsync promote {0}\"",
            path.display(),
            whereabouts(state, lineage.source)
        )));
    };
    complete(state, path, known, lineage, opening)?;
    let (term, others_wrote) = (lineage.role.term, lineage.unsure == Unsure::Everything);
    Ok(DemoteSummary {
        path: path.to_path_buf(),
        source,
        term,
        lives: lineage.role.all_lives().clone(),
        epoch: lineage.epoch.map(|epoch| epoch.number),
        last_epoch: lineage.epoch.map(|epoch| epoch.number),
        bytes_unsure: lineage.epoch.map(|_| if others_wrote { 0 } else { lineage.unsure_bytes() }),
        others_wrote,
        saved: demoted.saved.clone(),
        again: true,
        dry_run: false,
        released: lineage.epoch.filter(|_| demoted.complete).map(|epoch| Released { epoch, term }),
        file: source::file_name(path),
    })
}

/// Finds what the replica will be, and saves what is given up if it is to be saved.
pub(crate) fn follow(
    handle: &Handle,
    options: &DemoteOptions,
    at: At<'_>,
    progress: Progress<'_>,
) -> Result<(DemoteSummary, Demotion), SyncError> {
    let about = handle.about();
    let path = about.path.display();
    refuse_in_use(handle)?;
    let has_ended = matches!(at, At::Ended(_));
    let (epoch, how) = epoch_of(handle, options, at)?;
    let not_known = "its history does not go back to an epoch that both have";
    let written = |epoch: &Option<Epoch>| match epoch {
        Some(epoch) => written(handle, epoch),
        None => Ok(Err(not_known.into())),
    };
    let mut found = written(&epoch)?;
    let clean = found.as_ref().is_ok_and(Bitmap::is_clean);
    let others_wrote = has_ended && !clean;
    if others_wrote {
        found = Ok(Bitmap::new(0));
    }
    let mut saved = None;
    match (&how, &epoch) {
        _ if options.dry_run => {}
        (None, _) if !clean && !has_ended => {
            return Err(SyncError::Refused(format!(
                "{path} was written to after its last epoch: stop what writes to it, and run the command again"
            )));
        }
        (Some(GiveUp::Save(file)), Some(epoch)) if found.is_ok() => {
            save(handle, epoch, file, progress)?;
            saved = Some(file.clone());
            // The delta has ended an epoch.
            found = written(&Some(*epoch))?;
        }
        (Some(GiveUp::Save(_)), _) => return Err(unsaveable(handle, &found.err().unwrap_or_default())),
        _ => {}
    }
    let block_size = u64::from(about.block_size);
    let (blocks, lives) = (found.ok(), handle.lives()?);
    let gave_up = about.began.filter(|_| about.gave_up);
    let summary = DemoteSummary {
        path: about.path.clone(),
        source: about.uuid,
        term: about.term,
        lives: lives.clone(),
        epoch: epoch.filter(|_| blocks.is_some()).map(|epoch| epoch.number),
        last_epoch: handle.last_epoch()?.map(|last| last.number),
        bytes_unsure: blocks.as_ref().map(|blocks| blocks.count().saturating_mul(block_size)),
        others_wrote,
        saved: saved.clone(),
        again: false,
        dry_run: options.dry_run,
        released: None,
        file: source::file_name(&about.path),
    };
    let demotion = Demotion {
        source: about.uuid,
        term: about.term,
        lives,
        gave_up: gave_up.map(|began| GaveUp { term: about.term, began }),
        block_size: about.block_size,
        size: handle.reader()?.len(),
        since: epoch.zip(blocks).map(|(epoch, blocks)| (epoch, UnsureSet::of_blocks(&blocks, block_size))),
        others_wrote,
        saved,
    };
    Ok((summary, demotion))
}

/// The epoch at which a source becomes a replica, and how what was written since is given up, if that is asked for.
fn epoch_of(
    handle: &Handle,
    options: &DemoteOptions,
    at: At<'_>,
) -> Result<(Option<Epoch>, Option<GiveUp>), SyncError> {
    Ok(match at {
        At::Synced(last_sync) => {
            let synced = last_sync(handle)?;
            refuse_unrepaired(&handle.about().path, &synced)?;
            match synced.epoch {
                Some(epoch) => (Some(handle.epoch(&epoch.to_string())?), None),
                // A dry run.
                None => (handle.last_epoch()?, None),
            }
        }
        At::Now if options.dry_run => (handle.last_epoch()?, None),
        At::Now => (Some(present(handle, handle.about().began)?), None),
        At::Ended(epoch) => (Some(epoch), None),
        At::Apart(since, how) => {
            (since.map(|since| handle.epoch(&since.to_string())).transpose()?, Some(how))
        }
    })
}

/// The epoch that a source is at: an earlier one, if nothing was written since. A promotion after which nothing was written leaves the
/// replica that it was.
fn present(handle: &Handle, earlier: Option<Epoch>) -> Result<Epoch, SyncError> {
    let cut = handle.view(false)?.epoch();
    match earlier {
        Some(earlier) if written(handle, &earlier)?.is_ok_and(|blocks| blocks.is_clean()) => Ok(earlier),
        _ => Ok(cut),
    }
}

/// Blocks written after an epoch; or why they are not known.
pub(crate) fn written(handle: &Handle, epoch: &Epoch) -> Result<Result<Bitmap, String>, SyncError> {
    match handle.written_after(epoch) {
        Ok((blocks, _)) => Ok(Ok(blocks)),
        Err(SourceError::Lost { why, .. }) => Ok(Err(why.to_string())),
        Err(other) => Err(other.into()),
    }
}

/// Why what was written cannot be saved where it is not known.
fn unsaveable(handle: &Handle, why: &str) -> SyncError {
    let about = handle.about();
    let path = about.path.display();
    // Its user may know better.
    let trust = match about.identity.is_block() {
        true => format!(
            "if nothing else wrote to it since it was served or tracked, run \"dsync demote --trust-device {path}\" there, and the sync again; otherwise "
        ),
        false => String::new(),
    };
    SyncError::Refused(format!(
        "what was written to {path} is not known ({why}), so it cannot be saved as a delta: {trust}copy the disk first if it is wanted, and pass \
         --discard-there instead of --save-there"
    ))
}

/// Refuses to hand over to a replica that verification found different.
fn refuse_unrepaired(path: &Path, synced: &Summary) -> Result<(), SyncError> {
    let Some((bytes, time)) = synced.unrepaired else { return Ok(()) };
    Err(SyncError::Refused(format!(
        "{} differed from {path} in {} when it was verified on {}, and that was not repaired: run \"dsync verify --repair\" \
         before it takes over, or sync with --method compare. {path} is still the source",
        synced.destination,
        device::human_size(bytes),
        device::moment(time),
        path = path.display()
    )))
}

pub(crate) fn refuse_in_use(handle: &Handle) -> Result<(), SyncError> {
    let path = handle.about().path.display();
    let why = match (handle.is_served(), handle.live()) {
        (true, _) => {
            format!("{path} is being served: stop its server first, so that nothing writes to it any more")
        }
        (false, Some(_)) => format!(
            "{path} is tracked in the kernel, and may be written to: unmount it, and stop tracking it with \"dsync track remove {path}\", which \
             keeps what was recorded; for a planned switch, sync it a last time in between"
        ),
        (false, None) => return Ok(()),
    };
    Err(SyncError::Refused(why))
}
