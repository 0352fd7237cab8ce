//! `dsync rewind --group`: the moments that all replicas of a group can be brought to, and going back to one.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use replica::{Group, GroupHistory, GroupMoment, ReplicaOptions};
use serde::Serialize;
use source::StateDir;
use uuid::Uuid;

use crate::args;
use crate::commands::rewind::{self, RewindPoint, pick};
use crate::failure::Failure;
use crate::output::Output;
use crate::reach::location;
use crate::terms::units;

/// The moments, for JSON.
#[derive(Serialize)]
struct Listed<'a> {
    kind: &'static str,
    #[serde(flatten)]
    history: &'a GroupHistory,
}

/// What was done.
#[derive(Serialize)]
struct Rewound {
    kind: &'static str,
    group: String,
    dir: PathBuf,
    epoch: u64,
    epoch_id: Uuid,
    /// When the replicas came to it first, in seconds since 1970.
    at: u64,
    bytes_written: u64,
    seconds: f64,
    dry_run: bool,
    /// What the user should know.
    warnings: Vec<String>,
}

/// The common epoch that is meant; `None` if it is the present one.
pub(crate) fn choose_common(history: &GroupHistory, to: &str) -> Result<Option<GroupMoment>, Failure> {
    let there = history.apart.is_empty();
    let point = |moment: &GroupMoment| RewindPoint {
        epoch: Some(moment.epoch),
        ahead: false,
        state: None,
        at: Some(moment.at),
    };
    let nowhere = RewindPoint { epoch: None, ahead: false, state: None, at: None };
    let present = if there { point(&history.present) } else { nowhere };
    let moments: Vec<RewindPoint> = history.moments.iter().map(point).collect();
    let list = format!("dsync rewind --group {}", history.dir.display());
    let found = pick(to, &present, &moments, &list)?;
    Ok(found.and_then(|at| history.moments.get(at)).cloned())
}

/// Runs the command, of one replica or of a group.
pub(crate) fn run(args: &args::Rewind, state: &StateDir, output: &Output) -> Result<()> {
    if !args.group {
        return rewind::run(args, state, output);
    }
    location::refuse_host(&args.destination, "rewind --group")?;
    let options = sync::open_options(None, state);
    let (dir, name) = replica::find_group(&args.destination)?;
    let Some(to) = &args.to else {
        list(&replica::group_history(&dir, &name, &options)?, output);
        return Ok(());
    };
    let began = Instant::now();
    let mut held = match args.dry_run {
        true => None,
        false => {
            let group = Group::open(&dir, &name)?;
            let replicas = group.open_members(&dir, &options, true)?;
            Some((group, replicas))
        }
    };
    let history = replica::group_history(&dir, &name, &options)?;
    let shown = dir.display();
    refuse_sources(&history, &options)?;
    let Some(moment) = choose_common(&history, to)? else {
        refuse_written(&history, &options)?;
        output.say(&format!("group {name} in {shown} is at that moment already"));
        return Ok(());
    };
    let mut rewound = Rewound {
        kind: "group",
        group: name.clone(),
        dir: dir.clone(),
        epoch: moment.epoch.number,
        epoch_id: moment.epoch.id,
        at: moment.at,
        bytes_written: 0,
        seconds: 0.0,
        dry_run: args.dry_run,
        warnings: Vec::new(),
    };
    if let Some((group, replicas)) = &mut held {
        for replica in replicas.iter() {
            replica.status().recovered.iter().for_each(|recovered| output.warn(recovered));
        }
        let done = group.rewind(&moment, replicas)?;
        rewound.bytes_written = done.iter().flatten().map(|committed| committed.bytes_written).sum();
        rewound.seconds = began.elapsed().as_secs_f64();
        rewound.warnings = replicas.iter_mut().flat_map(|replica| replica.take_warnings()).collect();
        rewound.warnings.iter().for_each(|warning| output.warn(warning));
    }
    let said =
        format!("common epoch {} of {}{}", rewound.epoch, device::moment(rewound.at), without(&moment));
    output.say(&match args.dry_run {
        true => format!("group {name} in {shown} would go back to {said}"),
        false => format!(
            "group {name} in {shown} is at {said} again: {} written in {}",
            units::size(rewound.bytes_written),
            units::seconds(rewound.seconds)
        ),
    });
    output.summary(&rewound);
    Ok(())
}

/// Refuses disks that were promoted: they are sources, and keep no moments.
fn refuse_sources(history: &GroupHistory, options: &ReplicaOptions) -> Result<()> {
    for path in &history.members {
        let lineage = replica::inspect(path, options)?;
        if lineage.is_some_and(|lineage| lineage.role.promoted.is_some()) {
            let shown = path.display();
            return Err(Failure::refused(format!(
                "{shown} is a source, and only replicas keep moments: \"dsync status {shown}\" lists its replicas. To go back, run \"dsync \
                 rewind --group\" on their folder, and promote it in place of this one"
            ))
            .into());
        }
    }
    Ok(())
}

/// Refuses where former sources were written to after the moment: they are not at it.
fn refuse_written(history: &GroupHistory, options: &ReplicaOptions) -> Result<()> {
    for path in &history.members {
        let bytes = replica::inspect(path, options)?.map_or(0, |lineage| lineage.unsure_bytes());
        if bytes > 0 {
            return Err(Failure::refused(format!(
                "{} is not as it was at common epoch {}: {} were written to it since, and nothing keeps what was there before. The next sync of \
                 the group brings it back",
                path.display(),
                history.present.epoch.number,
                units::size(bytes)
            ))
            .into());
        }
    }
    Ok(())
}

/// The replicas that have no part in a moment, and stay as they are.
fn without(moment: &GroupMoment) -> String {
    let names: Vec<_> = moment.without.iter().filter_map(|path| path.file_name()?.to_str()).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!(" without {}", names.join(", ")),
    }
}

/// Lists the moments.
fn list(history: &GroupHistory, output: &Output) {
    let (name, epoch) = (&history.name, history.present.epoch.number);
    let times: Vec<u64> =
        [&history.present].into_iter().chain(&history.moments).map(|moment| moment.at).collect();
    let times = device::moments(&times);
    let at = &times[0];
    output.say(&format!("group {name} in {}: at common epoch {epoch} of {at}", history.dir.display()));
    history.apart.iter().for_each(|apart| output.say(&format!("  but {apart}")));
    for (moment, at) in history.moments.iter().zip(&times[1..]) {
        output.say(&format!("  {at}  common epoch {}{}", moment.epoch.number, without(moment)));
    }
    output.summary(&Listed { kind: "past", history });
}
