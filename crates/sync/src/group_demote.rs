//! Making replicas of the sources of a group, all or none. All that could refuse one is asked of all first, with the last sync. Then
//! an intent names all of them, in one step: from there on none is a source any more, and each is demoted by itself. The same command
//! completes what a crash left in between, and says again what was done.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use delta::Epoch;
use device::WriteWatch;
use replica::{Intent, Member, Membership};
use source::{GroupHandle, Handle, SourceOptions};
use uuid::Uuid;

use crate::attach::attach_group;
use crate::demote::{DemoteOptions, DemoteSummary, demote_if, first_fed, follow, in_common, watch, written};
use crate::ended::{Ended, Ending, promotion_of};
use crate::error::SyncError;
use crate::group::GroupSummary;
use crate::report::{Progress, Summary};
use crate::site::Site;

/// The last sync of a group.
pub type LastGroupSync<'a> =
    &'a mut dyn FnMut(&GroupHandle) -> Result<(GroupSummary, Vec<Summary>), SyncError>;

/// What is done when all are demoted, and repeated after a crash.
pub type Afterwards<'a> = &'a mut dyn FnMut(&[DemoteSummary]) -> Result<(), SyncError>;

/// Makes the sources of a group replicas. With `last_sync`, of those that this brings up to date. The folder that is given to save to
/// gets a delta of each disk that was written to.
///
/// # Errors
/// As for [`crate::demote`] of each. Unless they say otherwise, all of them are the sources that they were then.
pub fn demote_group(
    state: &dyn Site,
    name: &str,
    options: &DemoteOptions,
    last_sync: Option<LastGroupSync<'_>>,
    afterwards: Afterwards<'_>,
    progress: Progress<'_>,
) -> Result<Vec<DemoteSummary>, SyncError> {
    source::check_name(name)?;
    if let (Some(dir), false) = (&options.save, options.dry_run) {
        make_folder(dir)?;
    }
    let mut watches = Watches::new();
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
        let planned = watch_all(&group, options).and_then(|begun| {
            watches = begun;
            let (summaries, intent) = plan(state, &group, options, last_sync, progress)?;
            if !options.dry_run {
                all_still(&watches)?;
                // A record that was doubted now is doubted when it is opened again.
                watches.retain(|path, _| {
                    summaries.iter().any(|disk| disk.path == *path && disk.bytes_unsure.is_some())
                });
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
    if !options.discard {
        for disk in ended.iter().filter(|disk| disk.is_source) {
            still_known(state, name, disk, &opening(&disk.path, &watches, options))?;
        }
    }
    let summaries = carry_out(state, ended, &watches, options, progress)?;
    afterwards(&summaries)?;
    Ok(summaries)
}

/// Refuses to say again that others can take over from disks whose own promotion was begun since.
fn refuse_promoting(state: &dyn Site, name: &str, ended: &[Ended]) -> Result<(), SyncError> {
    for disk in ended {
        let folder = disk.path.parent().map(|dir| Membership::folder_in(dir, name));
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

/// Makes a replica of each disk, as it was decided and said for all of them.
fn carry_out(
    state: &dyn Site,
    ended: Vec<Ended>,
    watches: &Watches,
    options: &DemoteOptions,
    progress: Progress<'_>,
) -> Result<Vec<DemoteSummary>, SyncError> {
    let (mut summaries, mut refused) = (Vec::new(), Vec::new());
    for disk in ended {
        // Each that was demoted before says what is to be done with it; the others wait for that.
        if disk.is_source && !refused.is_empty() {
            continue;
        }
        let save = save_of(&disk.file, options);
        let given = since_of((&disk.file, &disk.path), options).filter(|_| !disk.is_source);
        let how = DemoteOptions {
            since: Some(given.map_or_else(|| disk.epoch.number.to_string(), |(_, epoch)| epoch.clone())),
            discard: save.is_none(),
            save,
            open: opening(&disk.path, watches, options),
            watch: watches.get(&disk.path).cloned(),
            ..DemoteOptions::default()
        };
        match demote_if(state, &disk.path.to_string_lossy(), &how, None, progress, &|_, _| Ok(())) {
            Ok(summary) => summaries.push(DemoteSummary { file: disk.file, ..summary }),
            Err(SyncError::Refused(why)) if !disk.is_source => refused.push(why),
            Err(error) => return Err(error),
        }
    }
    if refused.is_empty() { Ok(summaries) } else { Err(SyncError::Refused(refused.join(". "))) }
}

/// Those of the members that are block devices and whose record was believed when they were watched, by their paths.
type Watches = BTreeMap<PathBuf, Arc<WriteWatch>>;

/// Watches the block devices of a group, unless their user says that nothing else writes to them.
fn watch_all(group: &GroupHandle, options: &DemoteOptions) -> Result<Watches, SyncError> {
    let mut watches = Watches::new();
    for handle in group.members() {
        watches.extend(watch(handle, options)?.map(|watch| (handle.about().path.clone(), watch)));
    }
    Ok(watches)
}

/// Refuses a demotion for which not all was seen that was written. Nothing is decided yet.
fn all_still(watches: &Watches) -> Result<(), SyncError> {
    let Some((path, _)) = watches.iter().find(|(_, watch)| !watch.is_still()) else { return Ok(()) };
    Err(SyncError::Refused(format!(
        "{} was written to while it was demoted: stop what writes to it, and run the command again",
        path.display()
    )))
}

/// How the source at a path is opened again. The record of a device that was believed is so as long as nothing has written to that since it
/// was watched.
fn opening(path: &Path, watches: &Watches, options: &DemoteOptions) -> SourceOptions {
    let is_still = watches.get(path).is_some_and(|watch| watch.is_still());
    SourceOptions { trust_device: options.open.trust_device || is_still, ..options.open.clone() }
}

/// Makes the folder that what was written is saved in, in one that is there.
fn make_folder(dir: &Path) -> Result<(), SyncError> {
    match std::fs::create_dir(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(SyncError::io(format!("make the folder {}", dir.display()))(e))
        }
        _ => Ok(()),
    }
}

/// Refuses to carry a demotion out where a disk may have been written to since it was decided: nothing would say what is given up, and
/// nothing has saved it.
fn still_known(state: &dyn Site, name: &str, disk: &Ended, open: &SourceOptions) -> Result<(), SyncError> {
    let what = disk.path.to_string_lossy();
    let is_done = || {
        let lineage = state.lineage(&disk.path, &state.opening(None))?;
        Ok::<_, SyncError>(lineage.is_some_and(|lineage| lineage.role.promoted.is_none()))
    };
    // The replica tells what was written to it.
    if !state.exists(&disk.path) || is_done()? {
        return Ok(());
    }
    let handle = state.attach(&what, open)?;
    let written = written(&handle, &disk.epoch);
    handle.close()?;
    let Err(why) = written? else { return Ok(()) };
    let (number, path) = (disk.epoch.number, disk.path.display());
    Err(SyncError::Refused(format!(
        "the demotion of the group {name} was interrupted, and what was written to {path} after epoch {number} is not known since ({why}), so \
         none of it can be saved: the next sync to it compares everything, and overwrites what differs. Copy the disk first if it is wanted; then \
         complete the demotion with \"dsync demote --group {name} --discard\""
    )))
}

/// Where what was written to a disk is saved.
fn save_of(file: &str, options: &DemoteOptions) -> Option<PathBuf> {
    options.save.as_ref().map(|dir| dir.join(format!("{file}.delta")))
}

/// What is given of a disk: its name and the epoch in common.
fn since_of<'a>((file, path): (&str, &Path), options: &'a DemoteOptions) -> Option<&'a (String, String)> {
    let is_it = |disk: &str| file == disk || path == Path::new(disk);
    options.each.iter().find(|(disk, _)| is_it(disk))
}

/// The command that makes replicas of the sources of a group, with the epochs that they have in common with those that were promoted.
pub fn demotion_since<'a>(
    name: &str,
    disks: impl Iterator<Item = (&'a str, impl std::fmt::Display)>,
) -> String {
    let mut command = format!("dsync demote --group {name}");
    for (file, epoch) in disks {
        let _ = write!(command, " --since {file}={epoch}");
    }
    command + " --save FOLDER"
}

/// Refuses to guess the epochs that the sources have in common with those that were promoted: replicas may have been rewound before,
/// and what was written since would neither be named nor saved.
fn check_since(group: &GroupHandle, options: &DemoteOptions) -> Result<(), SyncError> {
    let name = group.name();
    let members = || group.files().iter().map(String::as_str).zip(group.members());
    let given = |file: &str, handle: &Handle| {
        since_of((file, &handle.about().path), options).map(|(disk, _)| disk.clone())
    };
    let named = |(disk, _): &&(String, String)| {
        !members().any(|(file, handle)| given(file, handle).is_some_and(|known| known == *disk))
    };
    if let Some((disk, _)) = options.each.iter().find(named) {
        return Err(SyncError::Refused(format!(
            "--since names {disk}, which is not a disk of the group {name}, or is named twice: give DISK=EPOCH once for each of its disks, as \
             \"dsync promote --group\" has printed it"
        )));
    }
    // What was promoted itself knows where, unless a replica of it was promoted since.
    let guessed = |(file, handle): &(&str, &Handle)| {
        (handle.about().began.is_none() || first_fed(handle).is_some()) && given(file, handle).is_none()
    };
    let Some((_, unknown)) = members().find(guessed).filter(|_| !options.discard) else { return Ok(()) };
    let last = members().map(|(file, handle)| {
        let known = first_fed(handle).map_or_else(|| in_common(handle, &DemoteOptions::default()), Ok);
        (file, known.map_or("EPOCH".into(), |epoch| epoch.number.to_string()))
    });
    Err(SyncError::Refused(format!(
        "the epoch that {} has in common with the disk that was promoted is not known here. \"dsync promote --group\" has printed the \
         command that names it for each disk. If the replicas were not rewound before that, it is \"{}\". In a planned switch name the folder \
         of the replicas that take over, \"dsync demote --group {name} DIR\". --discard gives up what was written after the epochs of the \
         oldest replicas",
        unknown.about().path.display(),
        demotion_since(name, last)
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
    for handle in group.members() {
        crate::demote::refuse_in_use(handle)?;
    }
    if last_sync.is_none() {
        check_since(group, options)?;
    }
    let synced = last_sync.map(|sync| sync(group)).transpose()?;
    let (mut summaries, mut members) = (Vec::new(), BTreeMap::new());
    let mut files = BTreeMap::new();
    for (at, (handle, file)) in group.members().iter().zip(group.files()).enumerate() {
        let about = handle.about();
        files.insert(about.uuid, file.clone());
        let save = save_of(file, options);
        let since = since_of((file, &about.path), options).map(|(_, epoch)| epoch.clone());
        let own = DemoteOptions { save, since, group: Some(group.name().to_owned()), ..options.clone() };
        let member = synced.as_ref().and_then(|(_, members)| members.get(at)).cloned();
        let (summary, demotion) = match member {
            Some(member) => follow(handle, &own, Some(&mut |_| Ok(member.clone())), progress)?,
            None => follow(handle, &own, None, progress)?,
        };
        let epoch = match &demotion.since {
            Some((epoch, ..)) => *epoch,
            // What was written since is not known, and will not be either when this is carried out.
            None => in_common(handle, &own)?,
        };
        let (ended, promoted) = (Some(about.term), promotion_of(state, &about.path)?);
        members.insert(about.path.clone(), Member { ended, promoted, ..Member::at(about.uuid, epoch) });
        summaries.push(DemoteSummary { file: file.clone(), ..summary });
    }
    let cut = synced.and_then(|(group, _)| Some(Epoch { number: group.epoch?, id: group.epoch_id? }));
    let cut = cut.unwrap_or(Epoch { number: 0, id: Uuid::nil() });
    Ok((summaries, Intent { files, ..Intent::new(group.name(), cut, members) }))
}
