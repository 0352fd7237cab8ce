//! What `dsync status` says of groups.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use delta::Epoch;
use replica::{Intent, KnownReplica, Lineage};
use serde::Serialize;
use source::StateDir;

use crate::output::Output;
use crate::terms::machine_name;

/// The group of a source or a replica.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct GroupInfo {
    /// Its name.
    pub name: String,
    /// The number of its last common epoch; `None` before the first.
    pub epoch: Option<u64>,
    /// The source has not ended an epoch since; the replica is there.
    pub at_it: bool,
    /// The machine whose group it is.
    pub machine: Option<String>,
    /// What the replica of a source is called.
    #[serde(skip)]
    pub file: Option<String>,
}

impl GroupInfo {
    /// The group of a source whose last epoch this is.
    pub(crate) fn of_source(folder: &device::Dir, last: Option<delta::Epoch>) -> Result<Option<GroupInfo>> {
        let Some(group) = source::SourceMembership::read(folder)? else { return Ok(None) };
        let committed = group.committed(folder)?;
        Ok(Some(GroupInfo {
            epoch: committed.map(|(cut, _)| cut.number),
            at_it: committed.is_some_and(|(_, epoch)| Some(epoch) == last),
            machine: machine_name::of_group(&group.name).map(str::to_owned),
            name: group.name,
            file: group.file,
        }))
    }

    /// The group of a replica, and where its last common commit left that.
    pub(crate) fn of_replica(path: &Path, lineage: &replica::Lineage) -> Option<GroupInfo> {
        let group = lineage.group.as_ref()?;
        let folder = device::Dir::existing(&group.folder_for(path)).ok();
        let intent = folder.and_then(|folder| replica::Intent::read(&folder).ok()).flatten();
        let member = intent.as_ref().and_then(|intent| intent.members.get(path));
        Some(GroupInfo {
            name: group.name.clone(),
            epoch: intent.as_ref().map(|intent| intent.cut.number),
            at_it: member.is_some_and(|member| Some(member.epoch) == lineage.epoch),
            machine: machine_name::of_group(&group.name).map(str::to_owned),
            file: None,
        })
    }

    /// Says where a source of it is.
    pub(crate) fn say_of_source(&self, output: &Output) {
        let at = match (self.epoch, self.at_it) {
            (None, _) => "before its first common epoch".to_owned(),
            (Some(epoch), true) => format!("at its common epoch {epoch}"),
            (Some(epoch), false) => format!("past its common epoch {epoch}"),
        };
        output.say(&format!("  in group {}, {at}", self.name));
    }

    /// The membership, as the end of a sentence about a replica.
    pub(crate) fn told(&self) -> String {
        match (self.epoch, self.at_it) {
            (None, _) => format!("in group {}, before its first common epoch", self.name),
            (Some(epoch), true) => format!("at common epoch {epoch} of group {}", self.name),
            (Some(epoch), false) => format!("in group {}, not at its common epoch {epoch}", self.name),
        }
    }
}

/// A group of sources on this host.
#[derive(Serialize)]
struct Listing<'a> {
    kind: &'static str,
    name: &'a str,
    /// The machine whose group it is.
    machine: Option<&'a str>,
    members: Vec<&'a Path>,
    /// The number of its last common epoch.
    epoch: Option<u64>,
}

/// Prints the groups of sources.
pub(crate) fn say_groups(members: &[(PathBuf, GroupInfo)], output: &Output) {
    let names: BTreeSet<&str> = members.iter().map(|(_, group)| group.name.as_str()).collect();
    for name in names {
        let of_it = members.iter().filter(|(_, group)| group.name == name);
        let paths: Vec<&Path> = of_it.clone().map(|(path, _)| path.as_path()).collect();
        let epoch = of_it.filter_map(|(_, group)| group.epoch).max();
        let listed: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        let at = epoch.map_or("no common epoch yet".to_owned(), |epoch| format!("last common epoch {epoch}"));
        let machine = machine_name::of_group(name);
        let of = machine.map_or(String::new(), |machine| format!(" of the VM {machine}"));
        output.say(&format!("group {name}{of}: {}; {at}", listed.join(", ")));
        output.summary(&Listing { kind: "group", name, machine, members: paths, epoch });
    }
}

/// Why the replicas of a group on this host could not take over together.
pub(crate) struct DividedGroup {
    pub name: String,
    pub dir: PathBuf,
    pub why: String,
    /// One was promoted, and another one was not.
    pub in_part: bool,
}

/// The groups in the folders of these replicas whose replicas are not of one moment, or of which a part was promoted.
pub(crate) fn apart(replicas: &[KnownReplica], state: &StateDir) -> Vec<DividedGroup> {
    let parents: BTreeSet<&Path> = replicas.iter().filter_map(|replica| replica.path.parent()).collect();
    let mut suspects: Vec<(&Path, PathBuf, String)> = Vec::new();
    for dir in parents {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_str().and_then(|name| name.strip_prefix('.')?.strip_suffix(".dsync-group"));
            let name = name.filter(|_| parted(dir, &entry.path(), state).is_some());
            suspects.extend(name.map(|name| (dir, entry.path(), name.to_owned())));
        }
    }
    // Where a commit is under way, the next look finds it done.
    if !suspects.is_empty() {
        std::thread::sleep(COMMITTING);
    }
    let again = suspects.into_iter().filter_map(|(dir, folder, name)| {
        let (why, in_part) = parted(dir, &folder, state)?;
        Some(DividedGroup { name, dir: dir.into(), why, in_part })
    });
    again.collect()
}

/// How long the commit of the last replica of a group may come after that of the first.
const COMMITTING: Duration = Duration::from_secs(2);

/// Why the replicas of one group could not take over together, and whether a part was promoted. One that cannot be read is reported by itself.
fn parted(dir: &Path, folder: &Path, state: &StateDir) -> Option<(String, bool)> {
    let intent = Intent::read(&device::Dir::existing(folder).ok()?).ok()??;
    let options = sync::open_options(None, state);
    let mut members: Vec<(PathBuf, Epoch, Lineage)> = Vec::new();
    for (path, member) in &intent.members {
        // Folders are moved.
        let path =
            path.file_name().map(|name| dir.join(name)).filter(|here| here.exists()).unwrap_or(path.clone());
        let lineage = replica::inspect(&path, &options).ok()??;
        (lineage.source == Some(member.source)).then(|| members.push((path, member.epoch, lineage)));
    }
    let is_promoted = |(_, _, lineage): &&(PathBuf, Epoch, Lineage)| lineage.role.promoted.is_some();
    let promoted: Vec<_> = members.iter().filter(is_promoted).collect();
    if let (Some((one, ..)), Some((other, ..))) = (promoted.first(), members.iter().find(|m| !is_promoted(m)))
    {
        return Some((format!("{} was promoted, and {} was not", one.display(), other.display()), true));
    }
    // What sources and former sources have written is theirs.
    let own = !promoted.is_empty() || members.iter().any(|(_, _, lineage)| lineage.role.demoted.is_some());
    // What the next command completes will be there.
    let committing = |path: &Path, lineage| replica::is_committing(path, lineage, &options).unwrap_or(true);
    let (path, at, lineage) = members
        .iter()
        .find(|(path, at, lineage)| !own && lineage.epoch != Some(*at) && !committing(path, lineage))?;
    let is = lineage.epoch.map_or("no epoch".into(), |epoch| format!("epoch {}", epoch.number));
    let (path, cut) = (path.display(), intent.cut.number);
    Some((format!("{path} is at {is} of its source, and common epoch {cut} is epoch {}", at.number), false))
}
