//! The replicas' end of a sync of a group: all replicas are opened before anything is received, and commit together.

use std::path::{Path, PathBuf};

use delta::Epoch;
use replica::{CommitMode, Coverage, Group, KnownReplicas, Lineage, Replica, ReplicaMembership};

use crate::conflict::ways_of_group;
use crate::error::SyncError;
use crate::plan::primary::primary_at;
use crate::replica_end::far::{Opened, ReplicaEnd, Taken, list_received, open_member, say_status};
use crate::site::{Site, list};
use crate::wire::messages::{
    COMMIT_GROUP, COMMITTED, CommitReply, GROUP_COMMITTED, Open, OpenGroup, PLAN, PREPARED, Plan, nonsense,
    unexpected,
};

/// The replicas of a group.
pub(crate) struct OpenedGroup {
    group: Group,
    replicas: Vec<Replica>,
    known: Option<KnownReplicas>,
}

/// Opens the requested replicas of a group.
pub(crate) type GroupOpener<'a> = &'a dyn Fn(&OpenGroup) -> Result<OpenedGroup, SyncError>;

/// Opens the replicas of a group, at these paths of one folder.
pub(crate) fn open_group(
    asked: &OpenGroup,
    paths: &[PathBuf],
    state: &dyn Site,
) -> Result<OpenedGroup, SyncError> {
    let (dir, group) = state.group(paths.first().map_or(Path::new("/"), |path| path), &asked.name)?;
    refuse_another(&group, asked, &dir, state)?;
    let mut replicas = Vec::new();
    for (open, path) in asked.members.iter().zip(paths) {
        let at = match state.exists(path) {
            true => state.real(path),
            false => {
                refuse_renamed(open, path, &dir, state)?;
                dir.join(path.file_name().unwrap_or_default())
            }
        };
        match open_member(open, path, state, Some(ReplicaMembership::of(&at, &dir, &asked.name)))? {
            Opened::Replica(replica) => replicas.push(*replica),
            Opened::Primary(_, primary) => return Err(diverged(asked, paths, primary.term, (&dir, state))),
        }
    }
    Ok(OpenedGroup { group, replicas, known: state.known() })
}

/// Why nothing is received for disks that are the sources of the group themselves, of this term.
fn diverged(asked: &OpenGroup, paths: &[PathBuf], term: u64, (dir, state): (&Path, &dyn Site)) -> SyncError {
    let primary = |open: &Open, path: &Path| {
        primary_at(path, &state.opening(None), state, open.origin.as_ref()?).ok().flatten()
    };
    let name = &asked.name;
    let other = asked.members.iter().find_map(|open| open.origin.as_ref()).map_or(0, |origin| origin.term);
    let also = match asked
        .members
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
fn refuse_another(group: &Group, asked: &OpenGroup, dir: &Path, state: &dyn Site) -> Result<(), SyncError> {
    let Some(intent) = group.intent() else { return Ok(()) };
    let (mut ours, mut others) = (false, Vec::new());
    for (path, member) in &intent.members {
        let is_asked = |open: &Open| {
            open.path.file_name() == path.file_name()
                || open.origin.as_ref().is_some_and(|origin| origin.uuid == member.source)
        };
        ours |= asked.members.iter().any(is_asked);
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
        asked.name,
        others.join(", ")
    )))
}

impl ReplicaEnd<'_> {
    /// The conversation, from the statuses of the replicas to the source's goodbye.
    pub(crate) fn converse_group(&self, asked: &OpenGroup, opened: GroupOpener<'_>) -> Result<(), SyncError> {
        let OpenedGroup { mut group, mut replicas, known } = opened(asked)?;
        let followed = replicas.iter().filter(|replica| replica.status().source.is_some());
        followed.for_each(|replica| list(replica, known.as_ref()));
        loop {
            for replica in &mut replicas {
                say_status(self.sender, replica, CommitMode::Journal)?;
            }
            let mut covered = vec![Coverage::Part; replicas.len()];
            let Some(cut) =
                self.take_deltas(&asked.members, &mut replicas, known.as_ref(), &mut group, &mut covered)?
            else {
                return Ok(());
            };
            let done = group.commit(cut, &mut replicas)?;
            replicas.iter().zip(covered).for_each(|(replica, covered)| replica.note_committed(covered));
            // Of those to which nothing was sent as well.
            replicas.iter_mut().try_for_each(Replica::apply_options)?;
            let committed = done.iter().zip(&mut replicas).map(|(done, replica)| {
                let warnings = replica.take_warnings();
                done.as_ref().map(|done| CommitReply { warnings, ..CommitReply::of(done) })
            });
            self.sender.send_json(GROUP_COMMITTED, &committed.collect::<Vec<_>>())?;
        }
    }

    /// Receives deltas until all are to be committed; `None` at the source's goodbye. `proven` are the members that will not differ from
    /// their sources, once they are committed.
    fn take_deltas(
        &self,
        members: &[Open],
        replicas: &mut [Replica],
        known: Option<&KnownReplicas>,
        group: &mut Group,
        covered: &mut [Coverage],
    ) -> Result<Option<Epoch>, SyncError> {
        loop {
            let plan: Plan = match self.receiver.recv()? {
                None => return Ok(None),
                Some(message) if message.kind == COMMIT_GROUP => return Ok(Some(message.json()?)),
                Some(message) if message.kind == PLAN => message.json()?,
                Some(message) => return Err(unexpected(&message)),
            };
            plan.check()?;
            let member = plan.member;
            let (Some(open), Some(replica), Some(covered)) =
                (members.get(member), replicas.get_mut(member), covered.get_mut(member))
            else {
                return Err(nonsense("a member of the group"));
            };
            if let (Some(scope), true, false) = (&plan.compare, plan.looks_first, plan.delta) {
                self.answer(&replica.content()?, scope, None).map_err(SyncError::of_replica)?;
                say_status(self.sender, replica, open.commit)?;
                continue;
            }
            if !plan.delta || plan.mirror.is_some() || plan.release.is_some() {
                return Err(nonsense("what is to be done with a member of a group"));
            }
            replica.mergeable()?;
            group.counts();
            list_received(replica, known, open);
            match self.take_delta(replica, open, plan)? {
                Taken::Prepared(covers) => {
                    *covered = covers;
                    self.sender.send_json(PREPARED, &())?;
                }
                Taken::Committed(committed) => {
                    self.sender.send_json(COMMITTED, &committed)?;
                    say_status(self.sender, replica, open.commit)?;
                }
                Taken::Kept => say_status(self.sender, replica, open.commit)?,
            }
        }
    }
}
