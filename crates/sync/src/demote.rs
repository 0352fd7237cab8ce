//! Making a source a replica of the one that succeeds it, and telling that one that there was no more.
//!
//! What was written after the epoch in common becomes the unsure set of the replica, so the next sync sends that, and what the new
//! source has written since, and nothing else. First the lineage is durable, then the source's state is removed; the same
//! command completes what a crash left in between.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use delta::Epoch;
use device::WriteWatch;
use extents::Bitmap;
use lineage::Lives;
use replica::{Demoted, Demotion, GaveUp, Lineage, Released, Replica, UnsureSet};
use serde::Serialize;
use source::{About, Handle, History, Membership, SourceError, SourceOptions};
use uuid::Uuid;

use crate::error::SyncError;
use crate::extract::fed;
use crate::far::list;
use crate::report::{Progress, Summary};
use crate::roles::refuse_unfinished;
use crate::saved::{save, whole_delta};
use crate::site::Site;

/// How to demote.
#[derive(Debug, Clone, Default)]
pub struct DemoteOptions {
    /// The epoch in common, by its number or as a checkpoint. Without it, the oldest at which a replica is known to be; where none is
    /// known, the one at which the source was promoted.
    pub since: Option<String>,
    /// The same for the disks of a group, by the names of their files.
    pub each: Vec<(String, String)>,
    /// The group that is demoted with it.
    pub group: Option<String>,
    /// Write what was written since as a delta to this file, which must not exist, or be what an interrupted demotion has written.
    pub save: Option<PathBuf>,
    /// Give up what was written since.
    pub discard: bool,
    /// Only report what would be done.
    pub dry_run: bool,
    /// Where the new replica keeps lineage and journal.
    pub journal_dir: Option<PathBuf>,
    /// How the source is opened.
    pub open: SourceOptions,
    /// Watches the device since before what was written to it was found; without it, one that begins with the demotion.
    pub watch: Option<Arc<WriteWatch>>,
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
    /// The epoch in common; `None` if what was written is not known.
    pub epoch: Option<u64>,
    /// The last epoch.
    pub last_epoch: Option<u64>,
    /// Bytes written after the epoch in common; `None` if that is not known.
    pub bytes_unsure: Option<u64>,
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

/// Makes the source `what` a replica. With `last_sync`, of the replica that this brings up to date.
///
/// # Errors
/// Refused if it is in use or not a source, and if it was written to after the epoch in common and the options say neither to save
/// nor to discard that. It is the source that it was then.
pub fn demote(
    state: &dyn Site,
    what: &str,
    options: &DemoteOptions,
    last_sync: Option<LastSync<'_>>,
    progress: Progress<'_>,
) -> Result<DemoteSummary, SyncError> {
    demote_if(state, what, options, last_sync, progress, &|place, path| refuse_member(state, place, path))
}

/// The same, if nothing speaks against it for the source whose state is in this folder, at this path, and that is no replica yet.
pub(crate) fn demote_if(
    state: &dyn Site,
    what: &str,
    options: &DemoteOptions,
    last_sync: Option<LastSync<'_>>,
    progress: Progress<'_>,
    admit: &dyn Fn(&Path, &Path) -> Result<(), SyncError>,
) -> Result<DemoteSummary, SyncError> {
    let known = state.source(what)?;
    let path = known.as_ref().map_or_else(|| PathBuf::from(what), |(_, about)| about.path.clone());
    let path = state.real(&path);
    let opening = state.opening(options.journal_dir.as_deref());
    let lineage = if state.exists(&path) { state.lineage(&path, &opening)? } else { None };
    if let Some(lineage) = lineage.filter(|lineage| lineage.role.promoted.is_none()) {
        return again(state, &path, known, &lineage, (options, &opening));
    }
    refuse_unfinished(&path, state)?;
    let Some((place, _)) = known else {
        return Err(SyncError::Refused(format!(
            "{what} is not a source: \"dsync status\" lists them; an interrupted promotion is completed by \"dsync promote {what}\""
        )));
    };
    admit(&place, &path)?;
    let handle = state.attach(what, &options.open)?;
    let watch = options.watch.clone().map_or_else(|| watch(&handle, options), |watch| Ok(Some(watch)))?;
    let found = follow(&handle, options, last_sync, progress);
    let about = handle.about().clone();
    handle.close()?;
    let (mut summary, demotion) = found?;
    if options.dry_run {
        return Ok(summary);
    }
    let undoubted = || match &watch {
        Some(watch) => watch.is_still(),
        // Of a device that was closed only its user can know.
        None if about.identity.is_block() => options.open.trust_device,
        None => state.doubt(&place, &about).is_ok_and(|doubt| doubt.is_none()),
    };
    let unwritten = || demotion.since.is_none() || undoubted();
    let mut replica = state.open(&about.path, &replica::Options { adopt: true, ..opening })?;
    replica.demote(&demotion, &|_| unwritten())?;
    list(&replica, state.known().as_ref());
    leave_knowledge(state, &place, &replica);
    drop(replica);
    state.forget(&place, &about)?;
    summary.released = released(summary.term, &demotion);
    Ok(summary)
}

/// Refuses a member of a group whose disks are all sources together: without it their replicas could not take over. What is left of a group of which
/// some were promoted is demoted one by one.
fn refuse_member(state: &dyn Site, place: &Path, path: &Path) -> Result<(), SyncError> {
    let folder = state.folder(place).map_err(SyncError::io(format!("open {}", place.display())))?;
    let Some(group) = Membership::read(&*folder)? else { return Ok(()) };
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

/// Watches a device from now on, unless its user says that nothing else writes to it: it has no times that tell.
pub(crate) fn watch(handle: &Handle, options: &DemoteOptions) -> Result<Option<Arc<WriteWatch>>, SyncError> {
    let identity = &handle.about().identity;
    let watches = identity.is_block() && !options.open.trust_device && !options.dry_run;
    let watch = watches.then(|| WriteWatch::begin(identity).map(Arc::new)).transpose();
    watch.map_err(SyncError::io(format!("flush {}", identity.path.display())))
}

/// Leaves what the source knew to the replica that it is now, so that its history goes on where it is promoted again. Where that
/// fails, it begins anew then.
fn leave_knowledge(state: &dyn Site, place: &Path, replica: &Replica) {
    if let Ok(from) = state.folder(place) {
        let _ = History::read(&*from).and_then(|history| replica.take_trail(&history));
    }
}

fn released(term: u64, demotion: &Demotion) -> Option<Released> {
    let exact = demotion.since.as_ref().filter(|(_, also, unsure)| also.is_empty() && unsure.is_empty());
    exact.map(|(epoch, ..)| Released { epoch: *epoch, term })
}

/// Where the source of a replica is, as far as that is known here.
fn whereabouts(state: &dyn Site, source: Option<Uuid>) -> String {
    let Some(id) = source else { return "where its source is".into() };
    match state.sources().unwrap_or_default().into_iter().find(|about| about.uuid == id) {
        Some(about) => format!("with its source, which is {} on this host", about.path.display()),
        None => format!("on the host of its source, where \"dsync status\" lists the id {id}"),
    }
}

/// A source that was demoted before; what a crash left of its state goes.
fn again(
    state: &dyn Site,
    path: &Path,
    known: Option<(PathBuf, About)>,
    lineage: &Lineage,
    (options, opening): (&DemoteOptions, &replica::Options),
) -> Result<DemoteSummary, SyncError> {
    let (Some(source), Some(demoted)) = (lineage.source, &lineage.role.demoted) else {
        return Err(SyncError::Refused(format!(
            "{} is a replica, and not the source: run this {}. To make it the source, run \"dsync promote {0}\"",
            path.display(),
            whereabouts(state, lineage.source)
        )));
    };
    if let Some((place, about)) = known.filter(|(_, about)| about.uuid == source) {
        if let Ok(replica) = state.open(path, opening) {
            leave_knowledge(state, &place, &replica);
        }
        state.forget(&place, &about)?;
    }
    let saved =
        still_saved(path, (source, lineage, demoted), options, &|| state.demotes_anew(path, opening))?;
    let term = lineage.role.term;
    let exact = lineage.unsure.is_nothing() && lineage.role.also().is_empty();
    Ok(DemoteSummary {
        path: path.to_path_buf(),
        source,
        term,
        lives: lineage.role.all_lives().clone(),
        epoch: lineage.epoch.map(|epoch| epoch.number),
        last_epoch: lineage.role.also().last().copied().or(lineage.epoch).map(|epoch| epoch.number),
        bytes_unsure: lineage.epoch.map(|_| lineage.unsure_bytes()),
        saved,
        again: true,
        dry_run: false,
        released: lineage.epoch.filter(|_| exact).map(|epoch| Released { epoch, term }),
        file: source::file_name(path),
    })
}

/// The file of `--save`, if the demotion has written it. A disk that was demoted without it, or at another epoch than is asked for, is refused:
/// what was written to it is there until the next sync, and nothing says that it is not wanted.
fn still_saved(
    path: &Path,
    (source, lineage, demoted): (Uuid, &Lineage, &Demoted),
    options: &DemoteOptions,
    anew: &dyn Fn() -> Vec<Epoch>,
) -> Result<Option<PathBuf>, SyncError> {
    let here = lineage.epoch.map(|epoch| epoch.number);
    let asked = options.since.as_ref().and_then(|since| since.parse::<u64>().ok());
    let elsewhere = asked.is_some() && asked != here;
    let file = options.save.as_ref();
    if file.is_none() && (!elsewhere || options.discard) {
        return Ok(None);
    }
    if let (Some(file), Some(epoch), false) = (file.filter(|file| file.exists()), lineage.epoch, elsewhere) {
        if demoted.saved.is_some() && whole_delta(file, source, &epoch)? == demoted.saved {
            return Ok(Some(file.clone()));
        }
    }
    // A promotion for nothing would leave a second source.
    let since = asked.or(here).filter(|number| anew().iter().any(|epoch| epoch.number == *number));
    let path = path.display();
    let way = match (since, asked.or(here)) {
        (Some(since), _) => format!(
            "\"dsync promote --force {path}\" makes it the source again; before anything uses it, \"dsync demote --since {since} --save \
             FILE {path}\" saves what was written in a new file, and demotes it at epoch {since}"
        ),
        (None, Some(number)) => format!(
            "what was written after epoch {number} cannot be saved as a delta, so copy the disk first if it is wanted"
        ),
        (None, None) => "copy the disk first if it is wanted".into(),
    };
    Err(SyncError::Refused(format!(
        "{path} was demoted before, {}, so --save and --since were not heeded, and nothing was saved now. Until the next sync to it, what \
         was written to it is there: {way}",
        match here {
            Some(epoch) =>
                format!("at epoch {epoch}, with {} written since", device::human_size(lineage.unsure_bytes())),
            None => "without knowing what was written to it".into(),
        },
    )))
}

/// Finds what the replica will be, and saves what was written.
pub(crate) fn follow(
    handle: &Handle,
    options: &DemoteOptions,
    last_sync: Option<LastSync<'_>>,
    progress: Progress<'_>,
) -> Result<(DemoteSummary, Demotion), SyncError> {
    let about = handle.about();
    let path = about.path.display();
    refuse_in_use(handle)?;
    let planned = last_sync.is_some();
    let epoch = match last_sync {
        Some(last_sync) => {
            let synced = last_sync(handle)?;
            refuse_unrepaired(&about.path, &synced)?;
            match synced.epoch {
                Some(epoch) => handle.epoch(&epoch.to_string())?,
                // A dry run.
                None => in_common(handle, options)?,
            }
        }
        None => in_common(handle, options)?,
    };
    let mut written = written(handle, &epoch)?;
    let clean = written.as_ref().is_ok_and(|(blocks, _)| blocks.is_clean());
    let mut saved = None;
    match &options.save {
        _ if planned && !clean && !options.dry_run => {
            return Err(SyncError::Refused(format!(
                "{path} was written to after its last sync: stop what writes to it, and run the command again"
            )));
        }
        _ if planned => {}
        // A promotion is of a certain epoch, and that of a replica that was rewound is an earlier one.
        Some(file) if clean && options.since.is_none() && about.began.is_none() => {
            return Err(nothing_to_save(handle, &epoch, file));
        }
        Some(_) if written.is_err() => return Err(unknown(handle, &epoch, options, written.err())),
        _ if options.dry_run => {}
        Some(file) => {
            save(handle, &epoch, file, progress)?;
            saved = Some(file.clone());
            // The delta has ended an epoch.
            written = self::written(handle, &epoch)?;
        }
        None if clean || options.discard => {}
        None => return Err(unsaved(handle, &epoch, &written, options.group.as_deref())),
    }
    let block_size = u64::from(about.block_size);
    let (since, lives) = (written.ok(), handle.lives()?);
    let gave_up = about.began.filter(|_| about.gave_up);
    let summary = DemoteSummary {
        path: about.path.clone(),
        source: about.uuid,
        term: about.term,
        lives: lives.clone(),
        epoch: since.as_ref().map(|_| epoch.number),
        last_epoch: handle.last_epoch()?.map(|last| last.number),
        bytes_unsure: since.as_ref().map(|(blocks, _)| blocks.count().saturating_mul(block_size)),
        saved,
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
        since: since.map(|(blocks, also)| (epoch, also, UnsureSet::of_blocks(&blocks, block_size))),
        saved: summary.saved.as_ref().and(handle.last_epoch()?),
    };
    Ok((summary, demotion))
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
            "{path} is tracked in the kernel, and may be written to: unmount it, sync it a last time, and stop tracking it with \
             \"dsync track remove {path}\""
        ),
        (false, None) => return Ok(()),
    };
    Err(SyncError::Refused(why))
}

/// The epoch that the source has in common with what succeeds it.
pub(crate) fn in_common(handle: &Handle, options: &DemoteOptions) -> Result<Epoch, SyncError> {
    if let Some(what) = &options.since {
        return handle.epoch(what).map_err(|error| match error {
            SourceError::Unknown(why) => SyncError::Refused(format!(
                "{why}. If it was restored from a copy, or its host rolled back, it need not have had that epoch: \"dsync sync\" to it from the \
                 disk that was promoted names what the two have in common"
            )),
            other => other.into(),
        });
    }
    let oldest = fed(&handle.bookmarks()?).min_by_key(|epoch| epoch.number);
    // What succeeds a promoted source may be another branch, with nothing of this term.
    handle.about().began.or(oldest).ok_or_else(|| {
        SyncError::Refused(format!(
            "no replica of {} is known, so there is no epoch in common with another source: name it with --since EPOCH, as \
             \"dsync status\" shows it for the replica that was promoted",
            handle.about().path.display()
        ))
    })
}

/// The earliest epoch of this term at which a replica is known to be.
pub(crate) fn first_fed(handle: &Handle) -> Option<Epoch> {
    let bookmarks = handle.bookmarks().ok()?;
    let began = handle.about().began.map_or(0, |began| began.number);
    fed(&bookmarks).filter(|epoch| epoch.number > began).min_by_key(|epoch| epoch.number)
}

/// Blocks written after an epoch, and the later epochs.
pub(crate) type Written = (Bitmap, Vec<Epoch>);

/// What was written after an epoch; or why that is not known.
pub(crate) fn written(handle: &Handle, epoch: &Epoch) -> Result<Result<Written, String>, SyncError> {
    match handle.written_after(epoch) {
        Ok(written) => Ok(Ok(written)),
        Err(SourceError::Lost { why, .. }) => Ok(Err(why.to_string())),
        Err(other) => Err(other.into()),
    }
}

/// Why what was written cannot be saved where it is not known.
fn unknown(handle: &Handle, epoch: &Epoch, options: &DemoteOptions, why: Option<String>) -> SyncError {
    let (about, why) = (handle.about(), why.unwrap_or_default());
    // Its user may know better.
    let trust = match about.identity.is_block() && !options.open.trust_device {
        true => "if nothing else wrote to it since it was served, pass --trust-device; otherwise ",
        false => "",
    };
    SyncError::Refused(format!(
        "what was written to {} since epoch {epoch} is not known ({why}), so it cannot be saved as a delta: {trust}copy the disk first if it is \
         wanted, and pass --discard instead of --save",
        about.path.display()
    ))
}

fn unsaved(
    handle: &Handle,
    epoch: &Epoch,
    written: &Result<Written, String>,
    group: Option<&str>,
) -> SyncError {
    let about = handle.about();
    let path = about.path.display();
    let when = handle.history().ok().and_then(|history| {
        let entry = history.epochs().into_iter().find(|entry| entry.epoch == *epoch)?;
        Some(format!(" ({})", device::moment(entry.time)))
    });
    let when = when.unwrap_or_default();
    let (planned, save) = match group {
        Some(name) => {
            (format!("folder of the replicas that take over, \"dsync demote --group {name} DIR\""), "FOLDER")
        }
        None => (format!("replica that takes over, \"dsync demote {path} DST\""), "FILE"),
    };
    SyncError::Refused(match written {
        Ok((blocks, _)) => {
            let bytes = device::human_size(blocks.count().saturating_mul(about.block_size.into()));
            let count = blocks.count();
            format!(
                "{count} block{} ({bytes}) written to {path} since epoch {}{when}, the last one known here to be in common, will be overwritten by \
                 the next sync to it. In a planned switch name the {planned}, which sends them to it. If it was promoted without them, pass \
                 --save {save} to keep them as a delta, or --discard to give them up",
                if count == 1 { "" } else { "s" },
                epoch.number
            )
        }
        Err(why) => format!(
            "what was written to {path} since epoch {}{when}, the last one known here to be in common, is not known ({why}): the next sync \
             to it compares everything, and overwrites what differs. In a planned switch name the {planned}, which sends what is lacking. If it was promoted without that, copy the disk first if it is wanted; then pass --discard",
            epoch.number
        ),
    })
}

/// With an epoch that is guessed, there is nothing to be saved: a file that is asked for is not left out without a word.
fn nothing_to_save(handle: &Handle, epoch: &Epoch, file: &Path) -> SyncError {
    SyncError::Refused(format!(
        "nothing was written to {} since epoch {}, the last one known here to be in common, so there is nothing to save in {}. \
         If the replica that was promoted had been rewound, the one in common is earlier: name it with --since EPOCH, as \
         \"dsync promote\" has said it. Otherwise omit --save",
        handle.about().path.display(),
        epoch.number,
        file.display(),
    ))
}
