//! Opening what is to be read.

use std::path::{Path, PathBuf};

use replica::ReplicaError;
use source::{AtRest, GroupHandle, Handle, SourceError, SourceOptions, StateDir};

use crate::error::SyncError;
use crate::roles::ended::demoted_disks;
use crate::roles::{SeenReplica, look_at, refuse_demoted, refuse_unfinished, restored, written_since};
use crate::site::Site;

/// Attaches to a source. A replica is read only when it holds what its source was: an interrupted step is completed first. So is one that is read
/// as the moment of another disk.
pub fn attach(state: &dyn Site, what: &str, options: &SourceOptions) -> Result<Handle, SyncError> {
    let path = path_of(state, what)?;
    let seen = ready(state, &path)?;
    let place = options.elsewhere();
    let there = place.map(|place| settled(state, place, look_at(place, state)?)).transpose()?;
    // A replica is read as the disk that it is.
    let own = seen.iter().find(|seen| seen.path == path).map(|seen| seen.lineage.format);
    let format = options.format.or(own.filter(|format| !format.is_raw()));
    let handle = unshrunk(state.attach(what, &SourceOptions { format, ..options.clone() })?)?;
    // It was not held before.
    let as_seen = [(Some(&*path), Some(&seen)), (place, there.as_ref())];
    for (path, seen) in as_seen.into_iter().filter_map(|(path, seen)| path.zip(seen)) {
        if look_at(path, state)? != *seen {
            let (path, holder) = (path.to_path_buf(), "a sync to it has begun".into());
            return Err(SourceError::Busy { path, holder }.into());
        }
    }
    let passes_on = seen.first().filter(|seen| seen.is_replica());
    passes_on.map_or(Ok(()), |seen| handle.passes_on(&seen.lineage.role.lives))?;
    Ok(handle)
}

/// Attaches to a source whose writes are recorded. Its disk is not held, so that its server can be started again.
///
/// # Errors
/// `Refused` by a source if its writes are not recorded.
pub fn follow(state: &StateDir, what: &str) -> Result<Handle, SyncError> {
    ready(state, &path_of(state, what)?)?;
    unshrunk(Handle::attach_followed(state, what)?)
}

/// What a server offers beyond the end of its disk cannot be read, and what is written there makes the disk larger again.
fn unshrunk(handle: Handle) -> Result<Handle, SyncError> {
    match handle.resized().filter(|(now, offers)| now < offers) {
        Some(sizes) => Err(SyncError::Refused(resized(&handle.about().path, sizes))),
        None => Ok(handle),
    }
}

/// What is said of a disk that has other bytes than its server offers.
pub fn resized(path: &Path, (now, offers): (u64, u64)) -> String {
    let (now, offers) = (device::human_size(now), device::human_size(offers));
    format!(
        "{} was resized while it was served: it has {now}, and its server offers {offers}: restart the server",
        path.display()
    )
}

/// The present path of a disk, or of what is known by that name.
fn path_of(state: &dyn Site, what: &str) -> Result<PathBuf, SyncError> {
    Ok(state.source(what)?.map_or_else(|| PathBuf::from(what), |(_, about)| about.path))
}

/// Completes what was interrupted of a disk, before it is read as a source. The replicas that it is.
fn ready(state: &dyn Site, path: &Path) -> Result<Vec<SeenReplica>, SyncError> {
    let seen = look_at(path, state)?;
    if !state.exists(path) {
        return Ok(seen);
    }
    refuse_demoted(path, &seen, state)?;
    let own = seen.iter().find(|seen| seen.path == path && seen.is_replica());
    let restored = own.and_then(|seen| restored(path, &seen.lineage, state));
    settled(state, path, seen).map_err(|error| match (error, restored) {
        (SyncError::Replica(ReplicaError::Changed { why, .. }), Some(uuid)) => {
            written_since(path, uuid, &why)
        }
        (error, _) => error,
    })
}

/// Completes what was interrupted of a disk, before it is read. Where its replica is, if it is one.
///
/// # Errors
/// As [`replica::settle`].
pub fn settle(state: &dyn Site, path: &Path) -> Result<Option<PathBuf>, SyncError> {
    let seen = settled(state, path, look_at(path, state)?)?;
    Ok(seen.into_iter().find(SeenReplica::is_replica).map(|seen| seen.path))
}

/// Completes what was interrupted of these replicas, which the disk at `path` is.
fn settled(state: &dyn Site, path: &Path, seen: Vec<SeenReplica>) -> Result<Vec<SeenReplica>, SyncError> {
    for SeenReplica { path, folder, .. } in &seen {
        state.settle(path, &state.opening(folder.as_deref()))?;
    }
    if seen.is_empty() { Ok(seen) } else { look_at(path, state) }
}

/// Attaches to the members of a group, which have to be of one promotion.
pub fn attach_group(state: &dyn Site, name: &str, options: &SourceOptions) -> Result<GroupHandle, SyncError> {
    // Clones of several images are of several moments: a file system that is frozen makes none, as FICLONE waits for the thaw.
    let options = SourceOptions { at_rest: AtRest::Needed, ..options.clone() };
    attach_members(state, name, |path| attach(state, path, &options))
}

/// Attaches to the members of a group whose writes are recorded. None of its disks is held, so that their server can be started again.
///
/// # Errors
/// `Refused` by a source if the writes to one of them are not recorded.
pub fn follow_group(state: &StateDir, name: &str) -> Result<GroupHandle, SyncError> {
    attach_members(state, name, |path| {
        ready(state, &path_of(state, path)?)?;
        let unserved = || {
            SourceError::Refused(format!(
                "{path} is not served, so its writes are not recorded: serve all members with \"dsync serve --group {name}\""
            ))
        };
        unshrunk(Handle::followed(state, path)?.ok_or_else(unserved)?)
    })
}

/// A disk of a group of which somebody else says what was written to it.
#[derive(Debug, Clone)]
pub struct ToldMember {
    /// The path of its source.
    pub path: PathBuf,
    /// What its replica is called, if it is not a member yet.
    pub file: String,
    /// How it is opened: with the moment that is read, unless the disk is at rest.
    pub options: SourceOptions,
}

/// Attaches to the disks that are the members of a group by what its user says, such as those of a machine. Those that are not members yet become so
/// at the first cut; those that no longer are stay members until they are taken out.
///
/// # Errors
/// As [`attach`]; `Refused` by a source that is in another group.
pub fn attach_told_group(
    state: &dyn Site,
    name: &str,
    members: &[ToldMember],
) -> Result<GroupHandle, SyncError> {
    source::check_name(name)?;
    let known = state.group_members(name)?;
    known.iter().try_for_each(|(_, about, _)| refuse_unfinished(&about.path, state))?;
    source::check_promotion(name, &known)?;
    let mut handles = Vec::new();
    for member in members {
        let at_rest = member.options.at_rest.max(AtRest::Needed);
        let options = SourceOptions { at_rest, ..member.options.clone() };
        let handle = attach(state, &member.path.to_string_lossy(), &options)?;
        let uuid = handle.about().uuid;
        let known = known.iter().find(|(_, about, _)| about.uuid == uuid);
        let file = known.map_or_else(|| member.file.clone(), |(_, about, group)| group.file_of(&about.path));
        handles.push((handle, file));
    }
    Ok(GroupHandle::joining(name, handles)?)
}

fn attach_members(
    state: &dyn Site,
    name: &str,
    attach: impl Fn(&str) -> Result<Handle, SyncError>,
) -> Result<GroupHandle, SyncError> {
    source::check_name(name)?;
    let known = state.group_members(name)?;
    if known.is_empty() {
        if let Some(demoted) = demoted_group(state, name)? {
            return Err(demoted);
        }
        return Err(SyncError::Refused(format!(
            "there is no group {name}: make it with \"dsync serve --group {name} IMAGE...\""
        )));
    }
    // What completes a promotion comes before what ends it.
    known.iter().try_for_each(|(_, about, _)| refuse_unfinished(&about.path, state))?;
    source::check_promotion(name, &known)?;
    let mut members = Vec::new();
    for (_, about, _) in &known {
        members.push(attach(&about.path.to_string_lossy())?);
    }
    Ok(GroupHandle::new(name, members)?)
}

/// Why there is no group of a name any more, if its disks were demoted here.
fn demoted_group(state: &dyn Site, name: &str) -> Result<Option<SyncError>, SyncError> {
    let disks = demoted_disks(state, name)?;
    if disks.is_empty() {
        return Ok(None);
    }
    let each: Vec<String> =
        disks.iter().map(|(path, _)| format!("\"dsync promote --force {}\"", path.display())).collect();
    let files: Vec<&str> = disks.iter().map(|(_, file)| file.as_str()).collect();
    Ok(Some(SyncError::Refused(format!(
        "the disks of the group {name} were demoted here ({}). Sync the group from where it was promoted. If it was promoted nowhere, {} make \
         them the sources again and lose nothing; then \"dsync serve --group {name}\" with all of them, by these names",
        files.join(", "),
        each.join(" and ")
    ))))
}

/// Closes a source after what was done with it, also if that failed: then its error is the one to report.
pub(crate) fn close<T>(handle: Handle, done: Result<T, SyncError>) -> Result<T, SyncError> {
    let closed = handle.close();
    let done = done?;
    closed?;
    Ok(done)
}
