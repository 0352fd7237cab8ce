//! `dsync rewind`: the moments of a replica, and going back to one.

use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use replica::{History, Moment, Options};
use serde::Serialize;
use source::{SourceError, StateDir};
use uuid::Uuid;

use crate::args;
use crate::failure::Failure;
use crate::location;
use crate::output::Output;
use crate::{status, units};

/// The moments, for JSON.
#[derive(Serialize)]
struct Listed<'a> {
    kind: &'static str,
    path: &'a Path,
    #[serde(flatten)]
    history: &'a History,
}

/// What was done.
#[derive(Serialize)]
struct Rewound {
    path: PathBuf,
    epoch: u64,
    epoch_id: Uuid,
    /// It is after that epoch, where batches of a mirror had brought it.
    ahead: bool,
    /// When the replica first came to it, in seconds since 1970.
    at: u64,
    bytes_written: u64,
    seconds: f64,
    dry_run: bool,
    /// What the user should know.
    warnings: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &args::Rewind, state: &StateDir, output: &Output) -> Result<()> {
    let path = std::path::absolute(&args.destination)?;
    let options = sync::open_options(args.journal_dir.as_deref(), state);
    location::refuse_host(&args.destination, "rewind")?;
    refuse_others(&path, &options, state)?;
    let Some(to) = &args.to else {
        list(&path, &replica::history(&path, &options)?, output);
        return Ok(());
    };
    let began = Instant::now();
    let mut replica = if args.dry_run { None } else { Some(sync::open_replica(&path, &options, state)?) };
    let history = match &replica {
        Some(replica) => replica.history()?,
        None => replica::history(&path, &options)?,
    };
    let Some(moment) = choose(&path, &history, to)? else {
        output.say(&format!("{} is at that moment already", path.display()));
        return Ok(());
    };
    let ahead = if moment.ahead { "the state ahead of " } else { "" };
    let said = format!("{ahead}epoch {} of {}", moment.epoch.number, device::moment(moment.at));
    let mut rewound = Rewound {
        path,
        epoch: moment.epoch.number,
        epoch_id: moment.epoch.id,
        ahead: moment.ahead,
        at: moment.at,
        bytes_written: 0,
        seconds: 0.0,
        dry_run: args.dry_run,
        warnings: Vec::new(),
    };
    if let Some(replica) = &mut replica {
        replica.status().recovered.iter().for_each(|recovered| output.warn(recovered));
        rewound.bytes_written = replica.rewind(moment.state)?.bytes_written;
        rewound.seconds = began.elapsed().as_secs_f64();
        rewound.warnings = replica.take_warnings();
        rewound.warnings.iter().for_each(|warning| output.warn(warning));
    }
    let path = rewound.path.display();
    output.say(&match args.dry_run {
        true => format!("{path} would go back to {said}"),
        false => format!(
            "{path} is at {said} again: {} written in {}",
            units::size(rewound.bytes_written),
            units::seconds(rewound.seconds)
        ),
    });
    output.summary(&rewound);
    Ok(())
}

/// Refuses what is no replica, and so has no past.
fn refuse_others(path: &Path, options: &Options, state: &StateDir) -> Result<()> {
    let lineage = replica::inspect(path, options)?;
    if lineage.as_ref().is_some_and(|lineage| lineage.role.promoted.is_none()) {
        return Ok(());
    }
    let shown = path.display();
    let is_source = lineage.is_some() || state.source(&path.to_string_lossy())?.is_some();
    if !is_source && !path.exists() {
        let none = status::no_replica(path, state)?;
        bail!(SourceError::Unknown(format!("{none} (\"dsync status\" lists sources and replicas)")));
    }
    if !is_source {
        // One whose state is elsewhere is told from what is none.
        if sync::known_replicas(state).folder_of(path)?.is_some() {
            sync::open_replica(path, options, state)?;
        }
        return Err(Failure::refused(format!(
            "{shown} is not a replica, and only those keep moments: \"dsync status\" lists the replicas of this host; pass \
             --journal-dir if its state is in a folder of its own"
        ))
        .into());
    }
    Err(Failure::refused(format!(
        "{shown} is a source, and only replicas keep moments: \"dsync status {shown}\" lists its replicas. To go back, run \"dsync \
         rewind\" on one of those, and promote it in place of {shown}, or restore {shown} from it"
    ))
    .into())
}

/// The moment that is meant: of an epoch, of a state ahead of it (`2+`), or the last one that is not later than a time. `None` if it
/// is the present state.
pub(crate) fn choose(path: &Path, history: &History, to: &str) -> Result<Option<Moment>, Failure> {
    let present = (history.epoch.filter(|_| !history.ahead).map(|epoch| epoch.number), history.at);
    if let Some(number) = to.strip_suffix('+').and_then(|epoch| epoch.parse::<u64>().ok()) {
        if history.ahead && history.epoch.is_some_and(|epoch| epoch.number == number) {
            return Ok(None);
        }
        let found = history.moments.iter().find(|moment| moment.ahead && moment.epoch.number == number);
        return found.cloned().map(Some).ok_or_else(|| {
            Failure::refused(format!(
                "no moment ahead of epoch {number} was kept: \"dsync rewind {}\" lists those that were",
                path.display()
            ))
        });
    }
    let of = |moment: &Moment| (Some(moment.epoch.number).filter(|_| !moment.ahead), moment.at);
    let moments: Vec<_> = history.moments.iter().map(of).collect();
    let found = pick(to, present, &moments, &format!("dsync rewind {}", path.display()))?;
    Ok(found.and_then(|at| history.moments.get(at)).cloned())
}

/// The same of the numbers and times of the present state and of earlier ones, the latest first; one that is ahead of its epoch has no
/// number. `list` is the command that lists them.
pub(crate) fn pick(
    to: &str,
    (present, at): (Option<u64>, Option<u64>),
    moments: &[(Option<u64>, u64)],
    list: &str,
) -> Result<Option<usize>, Failure> {
    let refuse = |what: String| {
        Failure::refused(format!("no moment {what} was kept: \"{list}\" lists those that were"))
    };
    if let Ok(number) = to.parse::<u64>() {
        if present == Some(number) {
            return Ok(None);
        }
        let found = moments.iter().position(|(epoch, _)| *epoch == Some(number));
        return found.map(Some).ok_or_else(|| refuse(format!("of epoch {number}")));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let time = units::parse_moment(to, now).map_err(Failure::usage)?;
    let found = moments.iter().position(|(_, at)| *at <= time);
    let is_later = |(epoch, at): &(Option<u64>, u64), than: u64| {
        // Of one second, the state ahead of an epoch is the later one.
        *at > than || *at == than && epoch.is_none() && present.is_some()
    };
    let later = |found: usize, than| moments.get(found).is_some_and(|moment| is_later(moment, than));
    match (at.filter(|at| *at <= time), found) {
        (Some(present), Some(found)) if later(found, present) => Ok(Some(found)),
        (Some(_), _) => Ok(None),
        (None, Some(found)) => Ok(Some(found)),
        (None, None) => Err(refuse(format!("of {} or before", device::moment(time)))),
    }
}

/// Lists the moments.
fn list(path: &Path, history: &History, output: &Output) {
    let moments = history.moments.iter().map(|moment| moment.at);
    let times: Vec<u64> = moments.chain(history.at.filter(|_| !history.ahead)).collect();
    let times = device::moments(&times);
    let at = match (history.epoch, times.get(history.moments.len())) {
        (Some(epoch), _) if history.ahead => format!("ahead of epoch {}", epoch.number),
        (Some(epoch), Some(at)) => format!("at epoch {} of {at}", epoch.number),
        (Some(epoch), None) => format!("at epoch {}", epoch.number),
        (None, _) => "incomplete".into(),
    };
    let keeps = match history.keep.is_nothing() {
        true => "no moments are kept (\"dsync sync --keep\" does)".into(),
        false => format!("keeps {}", history.keep),
    };
    output.say(&format!("replica {}: {at}; {keeps}", path.display()));
    for (moment, at) in history.moments.iter().zip(&times) {
        let fuzzy = if moment.fuzzy { ", fuzzy" } else { "" };
        let number = moment.epoch.number;
        let epoch = match moment.ahead {
            true => format!("ahead of epoch {number} (--to {number}+)"),
            false => format!("epoch {number}"),
        };
        output.say(&format!("  {at}  {epoch}{fuzzy}, {}", units::size(moment.bytes)));
    }
    output.summary(&Listed { kind: "past", path, history });
}
