//! Making replicas of the sources of a group, all or none. All that could refuse one is asked of all first, with the last sync. Then
//! an intent names all of them, in one step: from there on none is a source any more, and each is demoted by itself. The same command
//! completes what a crash left in between, and says again what was done.

use std::collections::BTreeMap;

use delta::Epoch;
use replica::{Intent, Member, ReplicaMembership};
use source::{DeviceTrust, GroupHandle, Handle, SourceOptions};
use uuid::Uuid;

use crate::error::SyncError;
use crate::report::{Progress, Summary};
use crate::roles::attach::attach_group;
use crate::roles::demote::{At, DemoteOptions, DemoteSummary, demote_if, follow, refuse_in_use};
use crate::roles::ended::{Ended, Ending, promotion_of};
use crate::site::Site;
use crate::source_end::push::GroupSummary;

/// The last sync of a group.
pub type LastGroupSync<'a> =
    &'a mut dyn FnMut(&GroupHandle) -> Result<(GroupSummary, Vec<Summary>), SyncError>;

/// What is done when all are demoted, and repeated after a crash.
pub type Afterwards<'a> = &'a mut dyn FnMut(&[DemoteSummary]) -> Result<(), SyncError>;

/// Makes the sources of a group replicas, which hold all that was written to them. With `last_sync`, of those that this brings up to date.
///
/// # Errors
/// As [`crate::demote()`] of each. On an error all of them remain the sources that they were, unless it says otherwise.
pub fn demote_group(
    state: &dyn Site,
    name: &str,
    options: &DemoteOptions,
    last_sync: Option<LastGroupSync<'_>>,
    afterwards: Afterwards<'_>,
    progress: Progress<'_>,
) -> Result<Vec<DemoteSummary>, SyncError> {
    source::check_name(name)?;
    let mut ending = Ending::open(state, name)?;
    let mut ended = ending.disks(state)?;
    let unfinished = ended.iter().any(|disk| disk.is_source);
    if options.dry_run && unfinished {
        return Err(SyncError::Refused(format!(
            "the demotion of the group {name} was interrupted: run \"dsync demote --group {name}\" again without -n, which completes it"
        )));
    }
    // What was demoted is so again, until there is another group of that name.
    let another = !unfinished && !state.group_members(name)?.is_empty();
    if ended.is_empty() || another {
        let group = attach_group(state, name, &options.open)?;
        let planned = plan(state, &group, options, last_sync, progress).and_then(|(summaries, intent)| {
            if !options.dry_run {
                group.members().iter().try_for_each(refuse_written)?;
                // The sources are held until it is there: nobody serves one in between.
                ending.begin(intent)?;
            }
            Ok(summaries)
        });
        let closed = group.close();
        let summaries = planned?;
        closed?;
        if options.dry_run {
            return Ok(summaries);
        }
        ended = ending.disks(state)?;
    } else if options.dry_run {
        return Err(SyncError::Refused(format!(
            "the disks of the group {name} are demoted already: without -n the command tells the replicas again that they can take over"
        )));
    } else {
        refuse_promoting(state, name, &ended)?;
    }
    let mut summaries = Vec::new();
    for disk in ended {
        let device_trust = options.open.device_trust.max(DeviceTrust::Counted);
        let open = SourceOptions { device_trust, ..options.open.clone() };
        let how = DemoteOptions { open, ..DemoteOptions::default() };
        let at = At::Ended(disk.epoch);
        let summary = demote_if(state, &disk.path.to_string_lossy(), &how, at, progress, &|_, _| Ok(()))?;
        summaries.push(DemoteSummary { file: disk.file, ..summary });
    }
    afterwards(&summaries)?;
    Ok(summaries)
}

/// Refuses to say again that others can take over from disks whose own promotion was begun since.
fn refuse_promoting(state: &dyn Site, name: &str, ended: &[Ended]) -> Result<(), SyncError> {
    for disk in ended {
        let folder = disk.path.parent().map(|dir| ReplicaMembership::folder_in(dir, name));
        // A group is not made by asking for it.
        let Some(Ok(_)) = folder.map(|folder| state.find_group(&folder)) else { continue };
        let (dir, group) = state.group(&disk.path, name)?;
        if group.intent().is_some_and(Intent::promotes) {
            return Err(SyncError::Refused(format!(
                "the promotion of the group {name} was interrupted: complete it with \"dsync promote --group {}\", and demote it then",
                dir.display()
            )));
        }
    }
    Ok(())
}

/// Refuses a demotion for which not all was seen that was written. Nothing is decided yet.
fn refuse_written(handle: &Handle) -> Result<(), SyncError> {
    if handle.has_rested()? {
        return Ok(());
    }
    Err(SyncError::Refused(format!(
        "{} was written to while it was demoted: stop what writes to it, and run the command again",
        handle.about().path.display()
    )))
}

/// What each will be, and the intent that makes them that.
fn plan(
    state: &dyn Site,
    group: &GroupHandle,
    options: &DemoteOptions,
    last_sync: Option<LastGroupSync<'_>>,
    progress: Progress<'_>,
) -> Result<(Vec<DemoteSummary>, Intent), SyncError> {
    group.members().iter().try_for_each(refuse_in_use)?;
    let synced = last_sync.map(|sync| sync(group)).transpose()?;
    let cut = match &synced {
        Some((group, _)) => group.epoch.zip(group.epoch_id).map(|(number, id)| Epoch { number, id }),
        None if options.dry_run => None,
        None => Some(group.cut()?.0),
    };
    let (mut summaries, mut members) = (Vec::new(), BTreeMap::new());
    let mut files = BTreeMap::new();
    for (at, (handle, file)) in group.members().iter().zip(group.files()).enumerate() {
        let about = handle.about();
        files.insert(about.uuid, file.clone());
        let mut of_group = |_: &Handle| match synced.as_ref().and_then(|(_, members)| members.get(at)) {
            Some(member) => Ok(member.clone()),
            None => Err(SyncError::Stopped),
        };
        let moment = if synced.is_some() { At::Synced(&mut of_group) } else { At::Now };
        let (summary, demotion) = follow(handle, options, moment, progress)?;
        summaries.push(DemoteSummary { file: file.clone(), ..summary });
        // Of a dry run there may be none.
        let Some((epoch, _)) = demotion.since else { continue };
        let (ended, promoted) = (Some(about.term), promotion_of(state, &about.path)?);
        members.insert(about.path.clone(), Member { ended, promoted, ..Member::at(about.uuid, epoch) });
    }
    let cut = cut.unwrap_or(Epoch { number: 0, id: Uuid::nil() });
    Ok((summaries, Intent { files, ..Intent::new(group.name(), cut, members) }))
}
