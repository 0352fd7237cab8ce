//! Making sources of the replicas of a group, all or none: the group's intent marks all of them. Then the state of each source is made;
//! the same command completes what a crash left in between.

use std::path::{Path, PathBuf};

use replica::Replica;
use serde::Serialize;
use source::SourceMembership;

use crate::error::SyncError;
use crate::roles::promote::{PromoteOptions, Promotion, already, may_succeed, succession, told};
use crate::site::Site;

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
/// As [`crate::promote()`] of each; refused if one is missing, or they are not at one common epoch. On an error they remain replicas.
pub fn promote_group(
    state: &dyn Site,
    dir: &Path,
    options: &PromoteOptions,
) -> Result<GroupPromotion, SyncError> {
    let (dir, name) = state.find_group(dir)?;
    // Whatever its replicas are called.
    let (dir, mut group) = state.group(&dir.join("replica"), &name)?;
    let mut replicas = state.members(&group, &dir, false)?;
    let cut = group.intent().map(|intent| intent.cut);
    let before: Vec<_> = replicas.iter().map(|replica| replica.recorded().role.promoted).collect();
    let mut outlooks = Vec::new();
    for (replica, before) in replicas.iter().zip(&before) {
        // What was marked was allowed then.
        outlooks.push(replica.outlook(options.force || before.is_some(), Some(&dir))?);
    }
    let mut members: Vec<Promotion> =
        replicas.iter().zip(&outlooks).map(|(replica, outlook)| told(replica, outlook)).collect();
    let completes = before.iter().any(Option::is_some);
    if let (true, false, Some(first)) = (
        before.iter().all(Option::is_some),
        group.intent().is_some_and(replica::Intent::promotes),
        members.first(),
    ) {
        return Err(refuse_lost(state, &members, &name).unwrap_or_else(|| already(&first.path, first.term)));
    }
    group.check_promoted(&replicas)?;
    for member in &mut members {
        (member.dry_run, member.completed) = (options.dry_run, completes);
        member.file = state.name_in(&dir, &member.path);
    }
    let done = GroupPromotion {
        kind: "group",
        group: name.clone(),
        dir: dir.clone(),
        epoch: cut.map_or(0, |cut| cut.number),
        dry_run: options.dry_run,
        members: Vec::new(),
    };
    // Before any of them is marked, which nothing takes back.
    for ((member, replica), before) in members.iter_mut().zip(&replicas).zip(&before) {
        let asked = Promotion { completed: before.is_some(), ..member.clone() };
        member.copies = may_succeed(state, replica, &asked)?;
    }
    if options.dry_run {
        return Ok(GroupPromotion { members, ..done });
    }
    let marks = group.promote(&mut replicas)?;
    if let Some(place) = state.state_dir() {
        replicas.iter_mut().for_each(|replica| drop(replica.made_in(&place)));
    }
    // The same for all of them, also where the command is run again.
    let promotion = marks.iter().map(|mark| mark.id).min();
    let mut made = false;
    for (at, mark) in marks.iter().enumerate() {
        let (replica, outlook, member): (&Replica, _, _) = (&replicas[at], &outlooks[at], &mut members[at]);
        member.term = mark.term;
        let completes = before[at].is_some();
        made |= state.succeed(replica.path(), &succession(state, replica, outlook, *mark, completes)?)?;
        let (name, cut) = (name.clone(), cut.zip(Some(outlook.epoch)));
        let file = Some(member.file.clone()).filter(|_| replica.path().parent() != Some(&dir));
        made |= state.join_group(replica.path(), SourceMembership { name, cut, promotion, file })?;
        let _ = state.known().map(|known| known.remove(replica.path()));
    }
    group.end_promotion()?;
    match (made, members.first()) {
        (false, Some(first)) => Err(already(&first.path, first.term)),
        _ => Ok(GroupPromotion { members, ..done }),
    }
}

/// Why disks that were promoted are not promoted again where what one of them is as a source is lost.
fn refuse_lost(state: &dyn Site, members: &[Promotion], name: &str) -> Option<SyncError> {
    let lost = |member: &&Promotion| {
        let known = state.source(&member.path.to_string_lossy());
        known.is_ok_and(|known| known.is_none())
    };
    let lost = members.iter().find(lost)?;
    Some(SyncError::Refused(format!(
        "{} was promoted, and what it is as a source is not in this state directory: run \"dsync promote DISK\" for each disk of the group {name}, \
         which makes that anew, and then \"dsync serve --group {name}\" with all of them",
        lost.path.display()
    )))
}
