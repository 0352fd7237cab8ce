//! `dsync track`: trackers of live disks.

use std::path::Path;

use anyhow::Result;
use serde::Serialize;
use source::{Live, StateDir};
use trackers::bpf::{self, Restored};
use trackers::{TrackError, Tracker, dm};

use crate::args::{Track, TrackAction, With};
use crate::failure::Failure;
use crate::output::Output;
use crate::units;

/// The status of a tracker.
#[derive(Serialize)]
struct TrackerStatus {
    kind: &'static str,
    path: std::path::PathBuf,
    tracker: &'static str,
    size: u64,
    block_size: u32,
    /// Blocks written since the last checkpoint; `None` if that cannot be told.
    dirty: Option<u64>,
    lost: Option<String>,
}

/// Starts or stops tracking a disk; saves and restores its record.
pub(crate) fn run(args: &Track, state: &StateDir, output: &Output) -> Result<()> {
    if let TrackAction::Add { device, .. } = &args.action {
        refuse_folder(device)?;
    }
    let joins = match &args.action {
        TrackAction::Add { device, group: Some(group), .. } => Some((device, group)),
        _ => None,
    };
    if let Some((device, group)) = joins {
        source::check_name(group)?;
        if trackers::find(device)?.is_some() {
            return join(device, group, state, output);
        }
    }
    act(args, state, output)?;
    // Another name is of the disk that dm-track has made.
    joins.map_or(Ok(()), |(device, group)| join(device, group, state, output))
}

/// Names the disk whose mount point was given in its place.
fn refuse_folder(place: &Path) -> Result<(), Failure> {
    let folder = std::fs::canonicalize(place).ok().filter(|place| place.is_dir());
    folder.and_then(|folder| device::mounted_at(&folder)).map_or(Ok(()), |disk| {
        Err(Failure::refused(format!(
            "{} is a directory, on which {disk} is mounted: run \"dsync track add {disk}\"",
            place.display(),
            disk = disk.display()
        )))
    })
}

/// Takes a tracked disk into a group.
fn join(device: &Path, group: &str, state: &StateDir, output: &Output) -> Result<()> {
    let Some(tracker) = trackers::find(device)? else {
        let why =
            "is not tracked itself: run \"dsync track add --group\" again with the name of the new device";
        return Err(Failure::refused(format!("{} {why}", device.display())).into());
    };
    let live = Live::open(state, device, tracker)?;
    // With an epoch it is a source that stays.
    live.checkpoint()?;
    drop(live);
    let identity = ::device::identity(device)?;
    let member = source::Membership::first(group).called(device, &identity);
    source::join_group(state, &identity.path, member)?;
    output.say(&format!("{} is in group {group}", identity.path.display()));
    Ok(())
}

fn act(args: &Track, state: &StateDir, output: &Output) -> Result<()> {
    match &args.action {
        TrackAction::Add { device, with: With::Dm, block_size, name, meta, .. } => {
            let name = match (name, device.file_name()) {
                (Some(name), _) => name.clone(),
                (None, Some(file)) => format!("{}-tracked", file.to_string_lossy()),
                (None, None) => {
                    return Err(
                        Failure::usage("pass --name: the path has no file name to derive it from").into()
                    );
                }
            };
            let block_size = crate::block_size(*block_size)?;
            sync::refuse_replica(device, state, "")?;
            let tracker = dm::add(device, &name, block_size, meta.as_deref())?;
            let mapped = dm::path(&name);
            output.say(&format!(
                "{} is now tracked as {}, in blocks of {}; writes to {0} itself are not recorded",
                device.display(),
                mapped.display(),
                units::size(tracker.block_size().into())
            ));
            if meta.is_none() {
                output.more("the record is lost with the device: --meta keeps it across reboots and crashes");
            }
            say(&mapped, &*tracker, output)
        }
        TrackAction::Add { name: Some(_), .. } | TrackAction::Add { meta: Some(_), .. } => {
            Err(Failure::usage("--name and --meta need --with dm").into())
        }
        TrackAction::Add { device, block_size, .. } => {
            let block_size = crate::block_size(*block_size)?;
            sync::refuse_replica(device, state, "")?;
            let tracker = bpf::add(device, block_size)?;
            output.say(&format!(
                "{} is tracked from now on, in blocks of {}; the next \"dsync sync\" compares or copies all of it, later ones \
                 send what changed",
                device.display(),
                units::size(tracker.block_size().into())
            ));
            output.more("the record is lost at the next reboot unless dsync-track@.service saves it");
            say(device, &*tracker, output)
        }
        TrackAction::Remove { device } => {
            if !bpf::remove(device)? && !dm::remove(device)? {
                return Err(Failure::refused(format!(
                    "{} is not tracked: \"dsync status\" lists tracked devices",
                    device.display()
                ))
                .into());
            }
            output.say(&format!("{} is no longer tracked; its record is discarded", device.display()));
            Ok(())
        }
        TrackAction::Save { device } => {
            bpf::save(device, &folder(device, state)?)?;
            output.say(&format!("saved the record of {}", device.display()));
            Ok(())
        }
        TrackAction::Restore { device } => {
            output.say(&match bpf::restore(device, &folder(device, state)?)? {
                Restored::WentOn => format!("{} was tracked without interruption", device.display()),
                Restored::Trusted => format!("{} is tracked again, from its saved record", device.display()),
                Restored::Lost(why) => {
                    format!("{} is tracked from now on; earlier changes are lost: {why}", device.display())
                }
            });
            Ok(())
        }
    }
}

fn folder(device: &Path, state: &StateDir) -> Result<device::Dir> {
    let canonical = std::fs::canonicalize(device).unwrap_or_else(|_| device.to_path_buf());
    let place = state.tracker_folder(&canonical);
    Ok(device::Dir::open(&place).map_err(TrackError::state("cannot create a directory", &place))?)
}

/// Prints the status of one tracker or of all. Returns their number.
pub(crate) fn status(device: Option<&Path>, output: &Output) -> Result<usize> {
    let devices = match device {
        Some(device) => vec![device.to_path_buf()],
        None => trackers::list()?,
    };
    let mut found = 0;
    for device in devices {
        if let Some(tracker) = trackers::find(&device)? {
            found += 1;
            say(&device, &*tracker, output)?;
        } else if !trackers::list().is_ok_and(|tracked| tracked.contains(&device)) {
            continue;
        } else if device.exists() {
            found += 1;
            output.say(&format!(
                "device {} is tracked; only root can read its record: run \"sudo dsync status\"",
                device.display()
            ));
        } else {
            found += 1;
            output.say(&format!(
                "tracked device {} no longer exists: discard its tracker with \"dsync track remove {0}\"",
                device.display()
            ));
        }
    }
    Ok(found)
}

fn say(device: &Path, tracker: &dyn Tracker, output: &Output) -> Result<()> {
    let status = TrackerStatus {
        kind: "tracker",
        path: device.to_path_buf(),
        tracker: tracker.kind(),
        size: tracker.size(),
        block_size: tracker.block_size(),
        dirty: tracker.dirty().ok().map(|dirty| dirty.count()),
        lost: tracker.lost()?,
    };
    output.say(&format!(
        "device {} ({}, blocks of {}) is tracked by {}",
        device.display(),
        units::size(status.size),
        units::size(status.block_size.into()),
        status.tracker
    ));
    if let Some(dirty) = status.dirty {
        output.say(&format!("  {} written since the last checkpoint", units::many(dirty, "block")));
    }
    if let Some(why) = &status.lost {
        output.say(&format!("  earlier changes are not known: {why}"));
    }
    output.summary(&status);
    Ok(())
}
