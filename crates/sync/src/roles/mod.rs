//! What a disk may be used for, by what it is: a source is read and written to, a replica is neither by the way.

pub(crate) mod attach;
pub(crate) mod demote;
pub(crate) mod ended;
pub(crate) mod group_demote;
pub(crate) mod group_promote;
pub(crate) mod last_word;
pub(crate) mod promote;

use std::path::{Path, PathBuf};

use replica::Lineage;
use source::{SourceMetadata, StateDir};
use uuid::Uuid;

use crate::conflict::Conflict;
use crate::error::SyncError;
use crate::roles::ended::ended_with;
use crate::site::Site;

/// What is written down of the replica at `path` where its state is usually; `None` if there is none, or nothing at all.
fn lineage(path: &Path, state: &dyn Site) -> Result<Option<Lineage>, SyncError> {
    match state.lineage(path, &state.opening(None)) {
        // Opening it next reports a better error.
        Err(_) if !state.exists(path) => Ok(None),
        other => Ok(other?),
    }
}

/// What is written down of a replica, and whether a commit may be under way.
#[derive(PartialEq)]
pub(crate) struct SeenReplica {
    pub path: PathBuf,
    pub folder: Option<PathBuf>,
    pub lineage: Lineage,
    commits: bool,
}

impl SeenReplica {
    /// True unless it was made a source.
    pub(crate) fn is_replica(&self) -> bool {
        self.lineage.role.promoted.is_none()
    }

    /// How commands name it.
    fn named(&self) -> String {
        match &self.folder {
            Some(folder) => format!("--journal-dir {} {}", folder.display(), self.path.display()),
            None => self.path.display().to_string(),
        }
    }

    /// The command that makes it the source, together with those of its group.
    fn promotion(&self) -> String {
        match &self.lineage.group {
            Some(group) => format!("dsync promote --group {}", group.dir_for(&self.path).display()),
            None => format!("dsync promote {}", self.named()),
        }
    }
}

/// The replicas that the disk at `path` is: by its name, or by that of a file or disk of which it is all or a part. By another name one that was
/// promoted is a disk like any.
pub(crate) fn look_at(path: &Path, state: &dyn Site) -> Result<Vec<SeenReplica>, SyncError> {
    let mut seen = Vec::new();
    for (at, folder) in state.names_of(path) {
        let options = state.opening(folder.as_deref());
        let lineage = match state.lineage(&at, &options) {
            // Opening it next reports a better error.
            Err(_) if !state.exists(&at) => continue,
            other => other?,
        };
        let is_its_own = at == path && folder.is_none();
        let Some(lineage) = lineage.filter(|lineage| is_its_own || lineage.role.promoted.is_none()) else {
            continue;
        };
        let commits = state.is_committing(&at, &lineage, &options)?;
        seen.push(SeenReplica { path: at, folder, lineage, commits });
    }
    Ok(seen)
}

/// Refuses a replica whose promotion was interrupted: it is neither.
pub(crate) fn refuse_unfinished(path: &Path, state: &dyn Site) -> Result<(), SyncError> {
    let Some(lineage) = lineage(path, state)? else { return Ok(()) };
    refuse_older_folder(path, &lineage, state)?;
    let Some(promoted) = lineage.role.promoted else { return Ok(()) };
    if let Some((group, dir)) = state.promotes_still(&state.real(path), &lineage)? {
        return Err(SyncError::Refused(format!(
            "the promotion of {} with its group {group} was interrupted, and the others may not be sources yet: run \"dsync promote --group \
             {}\" again, which completes it",
            path.display(),
            dir.display()
        )));
    }
    let known = state.source(&path.to_string_lossy())?;
    let done =
        known.is_some_and(|(_, about)| (Some(about.uuid), about.term) == (lineage.source, promoted.term));
    if done {
        return Ok(());
    }
    refuse_made_elsewhere(path, &lineage, state)?;
    let path = path.display();
    Err(SyncError::Refused(format!(
        "the promotion of {path} was interrupted, or its state directory is another one: run \"dsync promote {path}\" again, \
         which completes it"
    )))
}

/// The state directory with which a disk is the source, if that is not the given one. One that cannot be read is believed.
pub fn made_elsewhere(path: &Path, lineage: &Lineage, state_dir: &Path) -> Option<PathBuf> {
    let (promoted, made_in) = (lineage.role.promoted?, lineage.role.made_in.clone()?);
    if made_in == state_dir {
        return None;
    }
    let is_there = match StateDir::find(Some(&made_in)).source(&path.to_string_lossy()) {
        Ok(known) => {
            known.is_some_and(|(_, about)| (Some(about.uuid), about.term) == (lineage.source, promoted.term))
        }
        Err(_) => true,
    };
    is_there.then_some(made_in)
}

/// Refuses a disk that is the source with another state directory: one disk would be the source twice.
pub(crate) fn refuse_made_elsewhere(
    path: &Path,
    lineage: &Lineage,
    state: &dyn Site,
) -> Result<(), SyncError> {
    let made = state.state_dir().and_then(|here| made_elsewhere(&state.real(path), lineage, &here));
    made.map_or(Ok(()), |made| {
        Err(SyncError::Refused(format!(
            "{} is the source already (term {}), with the state directory {2}: pass --state-dir {2}, as a user who may write there",
            path.display(),
            lineage.role.term,
            made.display()
        )))
    })
}

/// Refuses a disk that is the source in a later term than its folder of state knows: that was put back from before a promotion, and what it
/// says of the disk's role is over.
pub(crate) fn refuse_older_folder(path: &Path, lineage: &Lineage, state: &dyn Site) -> Result<(), SyncError> {
    let known = state.source(&path.to_string_lossy())?;
    let is_later =
        |about: &SourceMetadata| Some(about.uuid) == lineage.source && about.term > lineage.role.term;
    let Some((_, about)) = known.filter(|(_, about)| is_later(about)) else { return Ok(()) };
    Err(SyncError::Refused(format!(
        "{0} is the source in term {1}, and its folder of state is of before that, of term {2}, as after a restore of it: \"dsync forget --replica {0}\" \
         removes that folder, and the disk stays the source",
        path.display(),
        about.term,
        lineage.role.term
    )))
}

/// Refuses a source that has ended with its group, and is not demoted yet: it is neither.
fn refuse_ended(path: &Path, state: &dyn Site) -> Result<(), SyncError> {
    let Some((_, about)) = state.source(&path.to_string_lossy())? else { return Ok(()) };
    match ended_with(state, &about)? {
        None => Ok(()),
        Some(group) => Err(Conflict::Ending { path: path.to_path_buf(), group }.into()),
    }
}

/// The source that a disk is, if it was that before it was restored as a replica. One that passes on what it receives became a source later.
pub fn restored(path: &Path, lineage: &Lineage, state: &dyn Site) -> Option<Uuid> {
    let (_, about) = state.source(&path.to_string_lossy()).ok()??;
    (about.passed.is_none() && Some(about.uuid) != lineage.source).then_some(about.uuid)
}

/// Why a disk that was restored, and written to since, is neither read nor overwritten as the replica that it was restored as.
pub(crate) fn written_since(path: &Path, uuid: Uuid, why: &str) -> SyncError {
    let path = path.display();
    SyncError::Refused(format!(
        "{path} was restored as a replica, and is the source {uuid} of this host as well. It was written to since ({why}), which no replica has: \
         to go on with it as it is, run \"dsync forget --replica {path}\", and \"dsync sync --accept-source {path} REPLICA\"; \
         to restore it once more, run \"dsync sync --adopt REPLICA {path}\", which overwrites what differs"
    ))
}

/// Refuses to open a replica for writing: what is written to it is in no source. `otherwise` is what else can be done.
///
/// # Errors
/// [`SyncError::Refused`], or if its state cannot be read.
pub fn refuse_replica(path: &Path, state: &dyn Site, otherwise: &str) -> Result<(), SyncError> {
    refuse_unfinished(path, state)?;
    let Some(replica) = look_at(path, state)?.into_iter().find(SeenReplica::is_replica) else {
        return refuse_ended(path, state);
    };
    let (lineage, promote) = (&replica.lineage, replica.promotion());
    let restored = restored(path, lineage, state);
    let path = replica.path.display();
    let at = match (lineage.epoch, lineage.source) {
        (Some(epoch), Some(source)) => format!("a replica of source {source} at epoch {epoch}"),
        (None, Some(source)) => format!("a replica of source {source} that is not complete"),
        (_, None) => "a replica that is not complete".into(),
    };
    let way = match (&lineage.role.demoted, restored) {
        (_, Some(uuid)) => format!(
            "It was restored as one, and is the source {uuid} of this host as well: \"dsync forget --replica {path}\" makes it that alone"
        ),
        (Some(demoted), None) => format!(
            "It was the source until it was demoted on {}. If another disk was promoted in its place, use that; \"dsync promote {}\" says \
             what it takes to make it the source again",
            device::moment(demoted.since),
            replica.named()
        ),
        (None, None) if lineage.epoch.is_none() => format!(
            "Complete its first copy with \"dsync sync\" from its source; if that is gone, \"dsync forget {path}\" makes it a plain disk"
        ),
        (None, None) if lineage.role.released.is_some() => {
            format!("To take over from its source, run \"{promote}\" first")
        }
        (None, None) => format!(
            "To take over from its source, run \"{promote}\" first: it says what that gives up, and how to have it"
        ),
    };
    Err(SyncError::Refused(format!(
        "{path} is {at}: the next sync would overwrite what is written to it. {way}{otherwise}"
    )))
}

/// What the disk at `path` is, and how it becomes the source, if it is a replica that was never promoted: syncing from it restores
/// another disk.
pub fn unpromoted(path: &Path, state: &dyn Site) -> Option<String> {
    let replica = look_at(path, state).ok()?.into_iter().find(SeenReplica::is_replica)?;
    let (source, epoch) = (replica.lineage.source?, replica.lineage.epoch?);
    Some({
        format!(
            "{} is a replica itself, of source {source} at epoch {}, so this would restore another disk from it\n\
             - to bring it up to date, exchange SRC and DST\n\
             - to take over from its source, run \"{}\"\n\
             - to restore another disk from it all the same",
            path.display(),
            epoch.number,
            replica.promotion()
        )
    })
}

/// Refuses a source that was demoted, as which these were seen: it has nothing that is newer than what it follows.
pub(crate) fn refuse_demoted(path: &Path, seen: &[SeenReplica], state: &dyn Site) -> Result<(), SyncError> {
    refuse_unfinished(path, state)?;
    let Some(replica) = seen.iter().find(|seen| seen.is_replica()) else { return refuse_ended(path, state) };
    let Some(demoted) = &replica.lineage.role.demoted else { return Ok(()) };
    Err(SyncError::Refused(format!(
        "{0} was demoted on {1}, and is a replica of source {2} since: sync to it from the disk that was promoted. \
         \"dsync promote {3}\" says what it takes to make it the source again",
        replica.path.display(),
        device::moment(demoted.since),
        replica.lineage.source.unwrap_or_default(),
        replica.named()
    )))
}
