//! The replicas of a group as they are found in their folder, and the moments that all of them can be brought to.
//!
//! A replica is known by its source, not by its path: folders are moved, and devices get other names.

use std::path::{Path, PathBuf};

use delta::Epoch;
use device::{Dir, Folder};
use serde::Serialize;
use uuid::Uuid;

use crate::error::{ReplicaError, Result, io_error};
use crate::moments::rewind::{ReplicaPast, history};
use crate::past::commits::PastCommits;
use crate::state::intent::{Intent, Member, ReplicaMembership};
use crate::state::lineage::Lineage;
use crate::state::locate::inspect;
use crate::state::options::ReplicaOptions;

/// The past of a group.
#[derive(Debug, Clone, Serialize)]
pub struct GroupHistory {
    /// Its name.
    #[serde(rename = "group")]
    pub name: String,
    /// Where its replicas are, without links.
    pub dir: PathBuf,
    /// The last common commit: its cut.
    #[serde(flatten)]
    pub present: GroupMoment,
    /// The replicas.
    pub members: Vec<PathBuf>,
    /// Replicas that are not at the last common commit, and what they lack: a sentence each.
    pub apart: Vec<String>,
    /// The moments that all can be brought to, the latest first.
    pub moments: Vec<GroupMoment>,
}

/// A common commit.
#[derive(Debug, Clone, Serialize)]
pub struct GroupMoment {
    /// The cut of the sources.
    pub epoch: Epoch,
    /// When it was committed, in seconds since 1970.
    pub at: u64,
    /// Replicas that have joined since, or that have left, and stay as they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<PathBuf>,
    /// What the replicas were there.
    #[serde(skip)]
    pub(crate) members: Vec<Member>,
}

impl GroupMoment {
    pub(crate) fn of(intent: &Intent) -> GroupMoment {
        let members = intent.members.values().copied().collect();
        GroupMoment { epoch: intent.cut, at: intent.time, without: Vec::new(), members }
    }

    /// What the replica of a source was.
    pub(crate) fn member(&self, source: Option<Uuid>) -> Option<&Member> {
        self.members.iter().find(|member| Some(member.source) == source)
    }
}

/// The names of the groups whose replicas are in a folder.
///
/// # Errors
/// If it cannot be looked into.
pub fn groups_in(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| io_error("look into", dir)(e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        names.extend(ReplicaMembership::name_of(&path).filter(|_| path.is_dir()));
    }
    names.sort();
    Ok(names)
}

/// The folder without links, and the group, that are meant by the folder of replicas, or by that of the group in it.
///
/// # Errors
/// Refused if there is none, or several.
pub fn find_group(given: &Path) -> Result<(PathBuf, String)> {
    let dir = std::fs::canonicalize(given).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => ReplicaError::Away(format!(
            "folder {} does not exist: mount its file system, or create it",
            given.display()
        )),
        _ => io_error("find", given)(e),
    })?;
    if let (Some(name), Some(parent)) = (ReplicaMembership::name_of(&dir), dir.parent()) {
        return Ok((parent.to_path_buf(), name));
    }
    if let (false, Some(parent)) = (dir.is_dir(), given.parent()) {
        return Err(ReplicaError::Refused(format!(
            "{} is a disk, and a group is named by the folder of its disks: give {}",
            given.display(),
            parent.display()
        )));
    }
    let names = groups_in(&dir)?;
    match names.as_slice() {
        [name] => Ok((dir, name.clone())),
        [] => Err(ReplicaError::Refused(format!(
            "there are no replicas of a group in {0}: \"dsync sync --group NAME {0}\" makes some",
            dir.display()
        ))),
        [first, ..] => Err(ReplicaError::Refused(format!(
            "there are replicas of several groups in {0} ({1}): name the folder of the group that is meant, such as {2}",
            dir.display(),
            names.join(", "),
            ReplicaMembership::folder_in(&dir, first).display()
        ))),
    }
}

/// The last common commit, and replicas by their paths.
pub type FoundMembers = (Intent, Vec<(PathBuf, Lineage)>);

/// The replicas of a group in a folder without links, and the last common commit. Takes no lock.
///
/// # Errors
/// Refused if nothing was committed yet, or a replica is missing.
pub(crate) fn find_members(dir: &Path, name: &str, options: &ReplicaOptions) -> Result<FoundMembers> {
    let path = ReplicaMembership::folder_in(dir, name);
    let folder = Dir::existing(&path).map_err(io_error("open", &path))?;
    let failed = |e| io_error("look into", dir)(e);
    let mut members = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let hidden = path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
        if hidden || !path.exists() || path.is_dir() {
            continue;
        }
        members.extend(inspect(&path, options)?.map(|lineage| (path, lineage)));
    }
    choose_members(dir, name, &folder, members)
}

/// The replicas of a group among all in its folder, and their last common commit, as the group's folder records them.
///
/// # Errors
/// Refused if nothing was committed yet, or a replica is missing.
#[doc(hidden)]
pub fn choose_members(
    dir: &Path,
    name: &str,
    folder: &dyn Folder,
    all: Vec<(PathBuf, Lineage)>,
) -> Result<FoundMembers> {
    let Some(intent) = Intent::read(folder)? else {
        return Err(ReplicaError::Refused(format!(
            "the group {name} in {0} has no common commit yet: run \"dsync sync --group {name} {0}\"",
            dir.display()
        )));
    };
    let mut members = Vec::new();
    for (path, lineage) in all {
        let of_group = lineage.group.as_ref().is_some_and(|group| group.name == name);
        let known = intent.members.values().any(|member| Some(member.source) == lineage.source);
        if of_group || known {
            members.push((path, lineage));
        }
    }
    members.sort_by(|a, b| a.0.cmp(&b.0));
    let members = one_of_each(name, members)?;
    let there = |source: Uuid| members.iter().any(|(_, lineage)| lineage.source == Some(source));
    match intent.members.iter().find(|(_, member)| !there(member.source)) {
        None => Ok((intent, members)),
        Some((path, member)) => Err(ReplicaError::Away(format!(
            "the group {name} in {} lacks its replica of source {}, which was at {}: put it back, or bring the group to one moment \
             without it with \"dsync sync --group {name} DIR\" where the sources are. If it is gone for good, and the sources too, \"dsync forget \
             --group {name} REPLICA\" takes each of the others out, to be promoted by itself as it is, at the end of its past; an earlier moment of each can be copied from \"dsync serve \
             REPLICA@EPOCH\" before that",
            dir.display(),
            member.source,
            path.display()
        ))),
    }
}

/// Leaves out other replicas of the same sources, such as one that a single sync has made in this folder.
fn one_of_each(name: &str, found: Vec<(PathBuf, Lineage)>) -> Result<Vec<(PathBuf, Lineage)>> {
    let joined = |lineage: &Lineage| lineage.group.as_ref().is_some_and(|group| group.name == name);
    let has_joined = |source| found.iter().any(|(_, lineage)| lineage.source == source && joined(lineage));
    let (taken, _): (Vec<_>, Vec<_>) = found
        .iter()
        .map(|(path, lineage)| (path, lineage, joined(lineage) || !has_joined(lineage.source)))
        .partition(|(.., is_taken)| *is_taken);
    for (at, (path, lineage, _)) in taken.iter().enumerate() {
        if let Some((other, ..)) = taken[..at].iter().find(|(_, other, _)| other.source == lineage.source) {
            return Err(ReplicaError::Refused(format!(
                "{} and {} are replicas of the same source, and either could be that of the group {name}: move one of them to \
                 another folder",
                other.display(),
                path.display()
            )));
        }
    }
    let taken: Vec<PathBuf> = taken.into_iter().map(|(path, ..)| path.clone()).collect();
    Ok(found.into_iter().filter(|(path, _)| taken.contains(path)).collect())
}

/// In what way replicas are not at a common commit: a sentence for each.
pub(crate) fn apart<'a>(
    intent: &Intent,
    members: impl Iterator<Item = (&'a Path, &'a Lineage)>,
) -> Vec<String> {
    let members: Vec<_> = members.collect();
    // What former sources have written since is theirs: together they can be the sources again.
    let former = members.iter().all(|(_, lineage)| lineage.role.demoted.is_some());
    let cut = intent.cut.number;
    let told = |(path, lineage): &(&Path, &Lineage)| {
        let path = path.display();
        let member = intent.members.values().find(|member| Some(member.source) == lineage.source);
        let at = lineage.epoch.map_or("no epoch".into(), |epoch| format!("epoch {}", epoch.number));
        match member {
            Some(member) if lineage.epoch == Some(member.epoch) => {
                let bytes = device::human_size(lineage.unsure_bytes());
                let is_there = former || lineage.unsure.is_nothing();
                (!is_there).then(|| {
                    format!("{path} is not as it was at common epoch {cut}: {bytes} in it are not of {at} of its source")
                })
            }
            Some(member) => Some(format!(
                "{path} is at {at} of its source, and common epoch {cut} is epoch {}",
                member.epoch.number
            )),
            None => Some(format!("{path} is at {at} of its source, and has no part in common epoch {cut}")),
        }
    };
    members.iter().filter_map(told).collect()
}

/// The past of the group of this name whose replicas are in `dir`, a path without links. Takes no lock and changes nothing.
///
/// # Errors
/// Refused if nothing was committed yet, or a replica is missing.
pub fn group_history(dir: &Path, name: &str, options: &ReplicaOptions) -> Result<GroupHistory> {
    let found = find_members(dir, name, options)?;
    let path = ReplicaMembership::folder_in(dir, name);
    let folder = Dir::existing(&path).map_err(io_error("open", &path))?;
    past_of(dir, name, &folder, found, &|path| history(path, options))
}

/// The past of the group whose members were found, by the past of each.
///
/// # Errors
/// As [`group_history`].
#[doc(hidden)]
pub fn past_of(
    dir: &Path,
    name: &str,
    folder: &dyn Folder,
    (intent, members): FoundMembers,
    past_of_one: &dyn Fn(&Path) -> Result<ReplicaPast>,
) -> Result<GroupHistory> {
    let past = PastCommits::load(folder).map_err(io_error("look into", folder.path()))?;
    let mut histories = Vec::new();
    for (path, lineage) in &members {
        histories.push((lineage.source, past_of_one(path)?));
    }
    let present = GroupMoment::of(&intent);
    let listed = members.iter().map(|(path, lineage)| (path.as_path(), lineage));
    let apart = apart(&intent, listed);
    let is_member = |source: Uuid| members.iter().any(|(_, lineage)| lineage.source == Some(source));
    let mut moments: Vec<(GroupMoment, Vec<PathBuf>)> = Vec::new();
    // Those that are not there may be able to go back to the last one, too.
    let last = Some(&intent).filter(|_| !apart.is_empty());
    for intent in last.into_iter().chain(past.intents.iter().rev()) {
        let mut moment = GroupMoment::of(intent);
        // What cannot be reached has no state.
        for (source, history) in &histories {
            let member = moment.members.iter_mut().find(|member| Some(member.source) == *source);
            member.into_iter().for_each(|member| member.state = history.state_of(member));
        }
        let moment = moment;
        // Who has joined since stays as it is.
        let joined = |source: Option<Uuid>| moment.member(source).is_none();
        let reaches = |source: &Option<Uuid>| moment.member(*source).is_none_or(|at| at.state.is_some());
        let is_reached = histories.iter().all(|(source, _)| reaches(source));
        let since = members.iter().filter(|(_, lineage)| joined(lineage.source));
        let without: Vec<PathBuf> = since.map(|(path, _)| path.clone()).collect();
        let is_present = moment.epoch == present.epoch && (apart.is_empty() || !without.is_empty());
        if is_present || !is_reached || without.len() == members.len() {
            continue;
        }
        // One cut may have been committed by more of them, and by fewer.
        let left = intent.members.iter().filter(|(_, member)| !is_member(member.source));
        let left: Vec<PathBuf> = left.map(|(path, _)| path.clone()).collect();
        match moments.iter_mut().find(|(m, _)| m.epoch == moment.epoch) {
            Some((known, _)) if known.without.len() <= without.len() => {}
            Some(known) => *known = (GroupMoment { without, ..moment }, left),
            None => moments.push((GroupMoment { without, ..moment }, left)),
        }
    }
    let told = |(mut moment, left): (GroupMoment, Vec<PathBuf>)| {
        moment.without.extend(left);
        moment
    };
    let mut moments: Vec<GroupMoment> = moments.into_iter().map(told).collect();
    moments.sort_by_key(|moment| std::cmp::Reverse((moment.at, moment.epoch.number)));
    Ok(GroupHistory {
        name: name.to_owned(),
        dir: dir.to_path_buf(),
        apart,
        present,
        members: members.into_iter().map(|(path, _)| path).collect(),
        moments,
    })
}
