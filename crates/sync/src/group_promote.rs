//! Making sources of the replicas of a group, all or none: the group's intent marks all of them. Then the state of each source is made;
//! the same command completes what a crash left in between.

use std::path::{Path, PathBuf};

use replica::{Group, Replica, find_group};
use serde::Serialize;
use source::StateDir;

use crate::error::SyncError;
use crate::far::{known_replicas, open_options};
use crate::promote::{PromoteOptions, Promotion, already, succession, told};

/// What the promotion of a group did.
#[derive(Debug, Clone, Serialize)]
pub struct GroupPromotion {
    kind: &'static str,
    /// The name of the group.
    pub group: String,
    /// Where its disks are.
    pub dir: PathBuf,
    /// The number of the common epoch from which they go on.
    pub epoch: u64,
    /// Nothing was done.
    pub dry_run: bool,
    /// What it did of each disk.
    #[serde(skip)]
    pub members: Vec<Promotion>,
}

/// Makes the replicas of the group in a folder the sources, which are a group of the same name from then on.
///
/// # Errors
/// As for [`crate::promote`] of each; refused if one is missing, or they are not at one common epoch. They are the replicas that they
/// were then.
pub fn promote_group(
    state: &StateDir,
    dir: &Path,
    options: &PromoteOptions,
) -> Result<GroupPromotion, SyncError> {
    let (dir, name) = find_group(dir)?;
    let mut group = Group::open(&dir, &name)?;
    let mut replicas = group.open_members(&dir, &open_options(None, state), false)?;
    let cut = group.intent().map(|intent| intent.cut);
    let before: Vec<_> = replicas.iter().map(|replica| replica.recorded().role.promoted).collect();
    let mut outlooks = Vec::new();
    for (replica, before) in replicas.iter().zip(&before) {
        // What was marked was allowed then.
        outlooks.push(replica.outlook(options.force || before.is_some())?);
    }
    let mut members: Vec<Promotion> =
        replicas.iter().zip(&outlooks).map(|(replica, outlook)| told(replica, outlook)).collect();
    let completes = before.iter().any(Option::is_some);
    if let (true, false, Some(first)) = (
        before.iter().all(Option::is_some),
        group.intent().is_some_and(replica::Intent::promotes),
        members.first(),
    ) {
        return Err(already(&first.path, first.term));
    }
    group.check_promoted(&replicas)?;
    for member in &mut members {
        (member.dry_run, member.completed) = (options.dry_run, completes);
    }
    let done = GroupPromotion {
        kind: "group",
        group: name.clone(),
        dir: dir.clone(),
        epoch: cut.map_or(0, |cut| cut.number),
        dry_run: options.dry_run,
        members: Vec::new(),
    };
    if options.dry_run {
        return Ok(GroupPromotion { members, ..done });
    }
    let marks = group.promote(&mut replicas)?;
    let mut made = false;
    for (at, mark) in marks.iter().enumerate() {
        let (replica, outlook, member): (&Replica, _, _) = (&replicas[at], &outlooks[at], &mut members[at]);
        member.term = mark.term;
        let completes = before[at].is_some();
        made |= source::succeed(state, replica.path(), &succession(replica, outlook, *mark, completes)?)?;
        made |= source::join_group(state, replica.path(), &name, cut.zip(Some(outlook.epoch)))?;
        let _ = known_replicas(state).remove(replica.path());
    }
    group.end_promotion()?;
    match (made, members.first()) {
        (false, Some(first)) => Err(already(&first.path, first.term)),
        _ => Ok(GroupPromotion { members, ..done }),
    }
}
