//! `dsync track`: trackers of live disks, and images that are tracked by clones.

use std::io;
use std::path::Path;
use std::time::Duration;

use ::device::WriteWatch;
use anyhow::Result;
use serde::Serialize;
use source::{AtRest, Live, Recorded, SourceMetadata, SourceOptions, StateDir, Told, ToldChanges};
use trackers::bpf::{self, Restored};
use trackers::{TrackError, Tracker, dm};

use crate::args::{Track, TrackAction, With};
use crate::failure::{self, Failure};
use crate::output::Output;
use crate::terms::units;

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
    /// What happens to it unnoticed on the running kernel.
    unnoticed: Option<&'static str>,
}

/// Starts or stops tracking a disk; saves and restores its record.
pub(crate) fn run(args: &Track, state: &StateDir, output: &Output) -> Result<()> {
    if let TrackAction::Add { device, .. } = &args.action {
        refuse_folder(device)?;
    }
    if let Some(done) = of_image(&args.action, state, output) {
        return done;
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

/// Tracks an image, or ends that; `None` if the disk is a device.
fn of_image(action: &TrackAction, state: &StateDir, output: &Output) -> Option<Result<()>> {
    let (TrackAction::Add { device: image, .. }
    | TrackAction::Remove { device: image }
    | TrackAction::Save { device: image }
    | TrackAction::Restore { device: image }) = action;
    // One that is gone was an image if it is known as one.
    let known = || state.source(&image.to_string_lossy()).ok().flatten();
    let is_image = match std::fs::metadata(image) {
        Ok(found) => found.is_file(),
        Err(_) => known().is_some_and(|(_, about)| !about.identity.is_block()),
    };
    is_image.then(|| match action {
        TrackAction::Add { with: None, group: None, name: None, meta: None, block_size, .. } => {
            let block_size = crate::reach::source::block_size(*block_size)?;
            add_image(image, block_size, state, output)
        }
        TrackAction::Add { .. } => Err(Failure::usage(format!(
            "--with, --group, --name and --meta are for block devices, and {} is a file: run \"dsync track add {0}\"; images of one \
             group are served together, with \"dsync serve --group\"",
            image.display()
        ))
        .into()),
        TrackAction::Remove { .. } => {
            let found = source::untrack(state, image)?.ok_or_else(|| not_tracked(image))?;
            let clone = if found { "its clone is removed" } else { "no clone of it was found" };
            output.say(&format!("{} is no longer tracked; {clone}", image.display()));
            Ok(())
        }
        TrackAction::Save { .. } | TrackAction::Restore { .. } => Err(Failure::usage(format!(
            "{} is a file, and has no record to be saved: its clone is kept across reboots",
            image.display()
        ))
        .into()),
    })
}

fn add_image(image: &Path, block_size: Option<u32>, state: &StateDir, output: &Output) -> Result<()> {
    sync::refuse_replica(image, state, "")?;
    let (epoch, waited) = source::track_by_clones(state, image, block_size)?;
    let image = image.display();
    output.say(&format!(
        "{image} is tracked by clones from now on, its epoch {}: what is written after this, each \"dsync sync\" finds without reading the rest",
        epoch.number
    ));
    output
        .more("until the next sync, what is overwritten takes space twice: its old content is in the clone");
    if waited > LONG {
        output.more(&format!(
            "its writers waited {} while it was cloned, as they will at each sync: it is in many pieces",
            units::seconds(waited.as_secs_f64())
        ));
    }
    Ok(())
}

/// A time for which writers may wait without a word.
const LONG: Duration = Duration::from_millis(500);

fn not_tracked(disk: &Path) -> Failure {
    let disk = disk.display();
    Failure::refused(format!("{disk} is not tracked: \"dsync status\" lists what is"))
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
    let member = source::SourceMembership::first(group).called(device, &identity);
    source::join_group(state, &identity.path, member)?;
    output.say(&format!("{} is in group {group}", identity.path.display()));
    Ok(())
}

fn act(args: &Track, state: &StateDir, output: &Output) -> Result<()> {
    match &args.action {
        TrackAction::Add { device, .. } if ::device::is_export(device) => {
            Err(source::unrecorded(device).into())
        }
        TrackAction::Add { device, with: Some(With::Dm), block_size, name, meta, .. } => {
            let name = match (name, device.file_name()) {
                (Some(name), _) => name.clone(),
                (None, Some(file)) => format!("{}-tracked", file.to_string_lossy()),
                (None, None) => {
                    return Err(
                        Failure::usage("pass --name: the path has no file name to derive it from").into()
                    );
                }
            };
            let block_size = crate::reach::source::block_size(*block_size)?;
            sync::refuse_replica(device, state, "")?;
            discard_saved(device, state)?;
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
            let block_size = crate::reach::source::block_size(*block_size)?;
            sync::refuse_replica(device, state, "")?;
            discard_saved(device, state)?;
            let tracker = bpf::add(device, block_size)?;
            output.say(&format!(
                "{} is tracked from now on, in blocks of {}; the next \"dsync sync\" compares or copies all of it, later ones \
                 send what changed",
                device.display(),
                units::size(tracker.block_size().into())
            ));
            if let Some(what) = tracker.unnoticed()? {
                output.warn(&format!("{}: {what}", device.display()));
            }
            output.more("the record is lost at the next reboot unless dsync-track@.service saves it");
            say(device, &*tracker, output)
        }
        TrackAction::Remove { device } => remove(device, state, output),
        TrackAction::Save { device } => {
            bpf::save(device, &folder(device, state)?)?;
            output.say(&format!(
                "saved the record of {0}, which is read-only until the machine restarts or \"dsync track restore {0}\" makes it \
                 writable again",
                device.display()
            ));
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

/// Ends the tracking of a device.
fn remove(device: &Path, state: &StateDir, output: &Output) -> Result<()> {
    discard_saved(device, state)?;
    let kept = match state.source(&device.to_string_lossy())? {
        None => None,
        Some((_, about)) => {
            let watch = WriteWatch::begin(&about.identity);
            match Recorded::begin(&about.path) {
                // Whoever is at work with it would fail.
                Err(busy) if busy.is_busy() => return Err(busy.into()),
                Err(error) => Some(Err(error.into())),
                // That of a target goes on as no disk.
                Ok(recorded) => recorded
                    .filter(|recorded| recorded.kind() == "bpf")
                    .map(|recorded| keep_record(&about, (recorded, watch), state)),
            }
        }
    };
    if !bpf::remove(device)? && !dm::remove(device)? {
        return Err(not_tracked(device).into());
    }
    let shown = device.display();
    output.say(&match kept {
        None => format!("{shown} is no longer tracked; its record is discarded"),
        Some(Ok(())) => format!(
            "{shown} is no longer tracked; what was recorded is kept, and counts as long as nobody writes to it (--trust-device)"
        ),
        Some(Err(why)) => {
            format!("{shown} is no longer tracked, and its record is discarded: {}", failure::text(&why))
        }
    });
    Ok(())
}

/// Ends an epoch of a disk that nobody uses with what was recorded of it, from which it goes on as a source at rest.
/// `watch` began before the record was ended.
fn keep_record(
    about: &SourceMetadata,
    (recorded, watch): (Recorded, io::Result<WriteWatch>),
    state: &StateDir,
) -> Result<()> {
    if let Some(who) = ::device::opened_for_writing(&about.path) {
        return Err(Failure::busy(format!("{} is in use ({who})", about.path.display())).into());
    }
    let path = about.path.to_string_lossy();
    let place = state.source(&path)?.map(|(place, _)| ::device::Dir::existing(&place)).transpose()?;
    let member = place.map(|place| source::SourceMembership::read(&place)).transpose()?.flatten();
    let (changes, group) = (ToldChanges::Recorded(recorded), member.map(|member| member.name));
    let told = Some(Told { changes, group, ..Told::default() });
    let options = SourceOptions { told, at_rest: AtRest::Needed, ..SourceOptions::default() };
    let handle = sync::attach(state, &path, &options)?;
    let kept = match handle.lost()? {
        Some(why) => Err(Failure::failed(why.to_string()).into()),
        // What is written from here on is counted from a moment before it.
        None if !watch?.is_still() => Err(Failure::failed("it was written to meanwhile").into()),
        None => handle.view(false).map(drop).map_err(Into::into),
    };
    handle.close()?;
    kept
}

/// What was saved at the end of an earlier boot is not believed any more. One that this boot has saved is the tracker's to remove.
fn discard_saved(device: &Path, state: &StateDir) -> Result<()> {
    let canonical = std::fs::canonicalize(device).unwrap_or_else(|_| device.to_path_buf());
    let place = state.tracker_folder(&canonical);
    match device::Dir::existing(&place) {
        Ok(folder) => Ok(bpf::discard(&folder)?),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(TrackError::state("cannot open a directory", &place)(error).into()),
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
        unnoticed: tracker.unnoticed()?,
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
    if let Some(what) = status.unnoticed {
        output.say(&format!("  {what}"));
    }
    output.summary(&status);
    Ok(())
}
