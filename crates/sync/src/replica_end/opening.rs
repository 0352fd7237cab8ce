//! Opens the replicas that a conversation is about: one, or those of a group, which are in one folder. All that can be refused is refused before
//! anything is received.

use std::io;
use std::path::{Path, PathBuf};

use device::Storage;
use replica::{Group, Herald, KnownReplicas, Lineage, Replica, ReplicaError, ReplicaMembership, SourceTime};
use source::{SourceError, StateDir};

use crate::conflict::ways_of_group;
use crate::error::SyncError;
use crate::plan::primary::{primary_at, refuse_adoption};
use crate::roles::demote::complete;
use crate::roles::promote::{PromoteOptions, promote};
use crate::roles::{restored, written_since};
use crate::site::{Site, list};
use crate::wire::messages::{Open, Opening, Primary};

/// What was opened at a path.
pub(crate) enum Opened {
    /// The requested replica.
    Replica(Box<Replica>),
    /// A source with the same id as the one at the other end of the link.
    Primary(PathBuf, Primary),
}

impl Opened {
    /// The disk.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Opened::Replica(replica) => replica.path(),
            Opened::Primary(path, _) => path,
        }
    }

    /// The replica, if it is one.
    pub(crate) fn replica(&self) -> Option<&Replica> {
        match self {
            Opened::Replica(replica) => Some(replica),
            Opened::Primary(..) => None,
        }
    }
}

/// What a conversation is about.
pub(crate) struct OpenedDisks {
    pub members: Vec<Opened>,
    /// `None` for a single one, which commits by itself.
    pub group: Option<Group>,
}

/// Opens what is requested.
pub(crate) type Opener<'a> = &'a dyn Fn(&Opening) -> Result<OpenedDisks, SyncError>;

/// Opens the requested replicas of this host, at these paths. `consents`: the peer may give up what a source of this host has.
pub(crate) fn open_here(
    asked: &Opening,
    paths: &[PathBuf],
    state: &dyn Site,
    consents: bool,
) -> Result<OpenedDisks, SyncError> {
    match (&asked.group, &*asked.members, paths) {
        (None, [open], [path]) => {
            Ok(OpenedDisks { members: vec![open_member((open, consents), path, state, None)?], group: None })
        }
        (None, ..) => Err(crate::wire::messages::nonsense("several replicas that are no group")),
        (Some(name), members, paths) => open_group(name, (members, consents), paths, state),
    }
}

/// Opens a replica of this host, as a member of the group if one is given.
fn open_member(
    (open, consents): (&Open, bool),
    path: &Path,
    state: &dyn Site,
    group: Option<replica::ReplicaMembership>,
) -> Result<Opened, SyncError> {
    refuse_source(open.source.as_ref(), path, state)?;
    let here = replica::ReplicaOptions { group, ..state.opening(open.journal_dir.as_deref()) };
    let options = asked_for(open, here);
    if let Ok(Some(lineage)) = state.lineage(path, &options) {
        let known = state.source(&path.to_string_lossy())?;
        complete(state, path, known, &lineage, &state.opening(open.journal_dir.as_deref()))?;
    }
    if open.give_up.is_some() && open.keep_anyway && consents {
        complete_promotion(path, open, state)?;
    }
    if let Some(origin) = &open.origin {
        if let Some(primary) = primary_at(path, &options, state, origin)? {
            return Ok(Opened::Primary(path.to_path_buf(), primary));
        }
    }
    if open.adopt {
        refuse_adoption(path, &options, state)?;
    }
    if !open.create {
        refuse_missing_source(path, &options, state)?;
    }
    let replica = open_replica(path, &options, state)?;
    // A repair would overwrite what was written.
    if let Some(why) = replica.status().changed.as_ref().filter(|_| open.verify) {
        restored_as(path, &options, state).map_or(Ok(()), |uuid| Err(written_since(path, uuid, why)))?;
    }
    Ok(Opened::Replica(Box::new(replica)))
}

/// Completes the promotion of a disk whose writes are to be given up: the command that gave them up may have been cut off in it, and a disk that is
/// neither a source nor a replica has no history of them.
fn complete_promotion(path: &Path, open: &Open, state: &dyn Site) -> Result<(), SyncError> {
    let lineage = state.lineage(path, &state.opening(open.journal_dir.as_deref()))?;
    let origin = open.origin.as_ref().map(|origin| origin.uuid);
    let own = lineage.filter(|lineage| lineage.source.is_some() && lineage.source == origin);
    let Some((lineage, promoted)) = own.and_then(|lineage| lineage.role.promoted.map(|it| (lineage, it)))
    else {
        return Ok(());
    };
    let known = state.source(&path.to_string_lossy())?;
    if known.is_some_and(|(_, about)| (Some(about.uuid), about.term) == (lineage.source, promoted.term)) {
        return Ok(());
    }
    let options =
        PromoteOptions { force: true, journal_dir: open.journal_dir.clone(), ..PromoteOptions::default() };
    promote(state, path, &options).map(drop)
}

/// Opens the replicas of a group.
fn open_group(
    name: &str,
    (asked, consents): (&[Open], bool),
    paths: &[PathBuf],
    state: &dyn Site,
) -> Result<OpenedDisks, SyncError> {
    let (dir, group) = state.group(paths.first().map_or(Path::new("/"), |path| path), name)?;
    refuse_another(&group, (name, asked), &dir, state)?;
    let mut members = Vec::new();
    for (open, path) in asked.iter().zip(paths) {
        let at = match state.exists(path) {
            true => state.real(path),
            false => {
                refuse_renamed(open, path, &dir, state)?;
                dir.join(path.file_name().unwrap_or_default())
            }
        };
        let member = ReplicaMembership::of(&at, &dir, name);
        let member = open_member((open, consents), path, state, Some(member))?;
        if let (Opened::Primary(_, primary), None) = (&member, &open.give_up) {
            return Err(diverged((name, asked), paths, primary.term, (&dir, state)));
        }
        members.push(member);
    }
    Ok(OpenedDisks { members, group: Some(group) })
}

/// Refuses to begin a replica in the place of a source that is missing: most likely its file system is not mounted, and what was written to it
/// since its last sync is nowhere else.
fn refuse_missing_source(
    path: &Path,
    options: &replica::ReplicaOptions,
    state: &dyn Site,
) -> Result<(), SyncError> {
    if state.exists(path) || state.lineage(path, options)?.is_some() {
        return Ok(());
    }
    let Some((_, about)) = state.source(&path.to_string_lossy())? else { return Ok(()) };
    Err(SyncError::Away(format!(
        "{} is a source of its host (term {}), and is missing there. If it is gone for good, run this again with --create, which restores it. If its \
         file system is not mounted or its disk not attached, bring that back first: what was written to it since its last sync is nowhere else",
        path.display(),
        about.term
    )))
}

/// Why nothing is received for disks that are the sources of the group themselves, of this term.
fn diverged(
    (name, asked): (&str, &[Open]),
    paths: &[PathBuf],
    term: u64,
    (dir, state): (&Path, &dyn Site),
) -> SyncError {
    let primary = |open: &Open, path: &Path| {
        primary_at(path, &state.opening(None), state, open.origin.as_ref()?).ok().flatten()
    };
    let other = asked.iter().find_map(|open| open.origin.as_ref()).map_or(0, |origin| origin.term);
    let also = match asked
        .iter()
        .zip(paths)
        .find(|(open, path)| state.exists(path) && primary(open, path).is_none())
    {
        Some((_, path)) => {
            format!(", but for {}, which is a replica: one was promoted without the others", path.display())
        }
        None => String::new(),
    };
    SyncError::Diverged(format!(
        "the group {name} and its disks in {} have diverged: both are sources, of the terms {other} and {term}, apart since{also}. Nothing was \
         changed{}",
        dir.display(),
        ways_of_group(name)
    ))
}

/// Refuses to begin another replica of a source that has one in the folder by another name.
fn refuse_renamed(open: &Open, path: &Path, dir: &Path, state: &dyn Site) -> Result<(), SyncError> {
    let Some(origin) = &open.origin else { return Ok(()) };
    let follows = |(_, lineage): &(PathBuf, Lineage)| lineage.source == Some(origin.uuid);
    let Some((other, _)) = state.replicas_in(dir).into_iter().find(follows) else { return Ok(()) };
    let (other, name) = (source::file_name(&other), source::file_name(path));
    Err(SyncError::Refused(format!(
        "{} has no {name}, and {other} there is a replica of the same source: rename {other} to {name}. A link is \
         renamed by itself; a file together with its folder .{other}.dsync, and --adopt then compares it once. If it is not wanted any more, run \
         \"dsync forget\" there first",
        dir.display()
    )))
}

/// Refuses a folder in which the replicas of another group of that name are: each commit would leave out those of the other.
fn refuse_another(
    group: &Group,
    (name, asked): (&str, &[Open]),
    dir: &Path,
    state: &dyn Site,
) -> Result<(), SyncError> {
    let Some(intent) = group.intent() else { return Ok(()) };
    let (mut ours, mut others) = (false, Vec::new());
    for (path, member) in &intent.members {
        let is_asked = |open: &Open| {
            open.path.file_name() == path.file_name()
                || open.origin.as_ref().is_some_and(|origin| origin.uuid == member.source)
        };
        ours |= asked.iter().any(is_asked);
        let there = state.exists(path).then(|| state.lineage(path, &state.opening(None))).transpose()?;
        if there.flatten().is_some_and(|lineage| lineage.source == Some(member.source)) {
            others.push(path.display().to_string());
        }
    }
    if ours || others.is_empty() {
        return Ok(());
    }
    Err(SyncError::Refused(format!(
        "{} has the replicas of another group {}: {}. Give these a folder of their own, or serve their sources as a group of another name. If \
         those are given up, \"dsync forget\" each of them first",
        dir.display(),
        name,
        others.join(", ")
    )))
}

/// What the source's side asks for, beside what is said here.
pub(crate) fn asked_for(open: &Open, here: replica::ReplicaOptions) -> replica::ReplicaOptions {
    replica::ReplicaOptions {
        adopt: open.adopt,
        create: open.create,
        format: open.format,
        container: open.container,
        doubt: open.verify,
        keep: open.keep.clone(),
        source_group: open.origin.as_ref().and_then(|origin| origin.group.clone()),
        term: open.origin.as_ref().map_or(0, |origin| origin.term),
        source_time: open.origin.as_ref().and_then(|origin| origin.now).map(SourceTime::said),
        ..here
    }
}

/// Opens a replica. One whose state is in another folder than is said is told from what is none.
///
/// # Errors
/// As [`Replica::open`].
pub fn open_replica(
    path: &Path,
    options: &replica::ReplicaOptions,
    state: &dyn Site,
) -> Result<Replica, SyncError> {
    state.open(path, options).map_err(|error| match error {
        ReplicaError::NotAReplica(path) => not_a_replica(path, options.doubt, state),
        ReplicaError::Changed { ref why, .. } => match restored_as(path, options, state) {
            Some(uuid) => written_since(path, uuid, why),
            None => error.into(),
        },
        other => other.into(),
    })
}

/// The source that the replica at a path is as well, as a disk that was restored.
fn restored_as(path: &Path, options: &replica::ReplicaOptions, state: &dyn Site) -> Option<uuid::Uuid> {
    restored(path, &state.lineage(path, options).ok()??, state)
}

/// What is at a path that is not that of a replica with its state where it is looked for. Who only looks is not offered to overwrite it.
fn not_a_replica(path: PathBuf, looks: bool, state: &dyn Site) -> SyncError {
    let shown = path.display();
    if let Some(Ok(Some(folder))) = state.known().map(|known| known.folder_of(&path)) {
        return SyncError::Refused(format!(
            "{shown} is a replica whose state is in {}: pass --journal-dir {0}",
            folder.display()
        ));
    }
    match state.source(&path.to_string_lossy()) {
        source if looks => SyncError::Refused(format!(
            "{shown} is not a dsync replica{}, so there is nothing to verify: give the source first, and its replica second, as \"dsync status\" \
             shows both",
            if matches!(source, Ok(Some(_))) { " but a source itself" } else { "" }
        )),
        Ok(Some((_, about))) => SyncError::Refused(format!(
            "{shown} is not a dsync replica but a source itself (term {}), and what was written to it since its last sync is \
             nowhere else. If a replica is to take over from it, run \"dsync promote\" on that. To restore it from one of its own replicas, add \
             --adopt, which compares it in full and overwrites what differs",
            about.term
        )),
        _ => ReplicaError::NotAReplica(path).into(),
    }
}

/// The replicas of the host whose state directory this is.
pub fn known_replicas(state: &StateDir) -> KnownReplicas {
    KnownReplicas::new(state.replica_list(), state.replicas_folder())
}

/// Lists a replica that something is received for, with where that comes from.
pub(crate) fn list_received(replica: &Replica, known: Option<&KnownReplicas>, open: &Open) {
    list(replica, known);
    if let Some(origin) = open.origin.as_ref().filter(|origin| !origin.place.is_empty()) {
        replica.note_origin(origin.uuid, &origin.place);
    }
}

/// Refuses a destination that shares storage with the source, under whatever names, if both are on this host.
fn refuse_source(source: Option<&Storage>, path: &Path, state: &dyn Site) -> Result<(), SyncError> {
    match (source, state.storage(path)) {
        (Some(source), Some(here)) if source.overlaps(&here) => Err(SyncError::Refused(format!(
            "{} is the source itself under some name, or shares storage with it: what is written to the one changes the \
             other. Give a destination on another disk or in another file",
            path.display()
        ))),
        _ => Ok(()),
    }
}

/// How a replica of the host whose state directory this is is opened, with its state in a folder if one is given.
pub fn open_options(journal_dir: Option<&Path>, state: &StateDir) -> replica::ReplicaOptions {
    let here = state.clone();
    let herald = move |disk: &Path, goes_back| {
        source::overwritten(&here, disk, goes_back).map_err(|error| told(disk, error))
    };
    replica::ReplicaOptions {
        folder: journal_dir.map(Path::to_path_buf),
        devices: state.replicas_folder(),
        herald: Some(Herald::new(herald)),
        ..replica::ReplicaOptions::default()
    }
}

/// Why a device that is a source is not written to.
fn told(device: &Path, error: SourceError) -> ReplicaError {
    let path = device.to_path_buf();
    match error {
        SourceError::Busy { holder, .. } => ReplicaError::Busy { path, holder },
        refusal if refusal.is_refusal() => ReplicaError::Refused(refusal.to_string()),
        failed => ReplicaError::Io {
            what: "note that a source is overwritten:",
            path,
            error: io::Error::other(failed),
        },
    }
}
