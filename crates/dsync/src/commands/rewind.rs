//! `dsync rewind`: the moments of a replica, and going back to one.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use delta::Epoch;
use replica::{Moment, ReplicaOptions, ReplicaPast};
use serde::Serialize;
use source::{SourceError, StateDir};
use uuid::Uuid;

use crate::args;
use crate::failure::Failure;
use crate::output::Output;
use crate::reach::location;
use crate::status;
use crate::terms::units;

/// The moments, for JSON.
#[derive(Serialize)]
struct Listed<'a> {
    kind: &'static str,
    path: &'a Path,
    #[serde(flatten)]
    history: &'a ReplicaPast,
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
    let path = device::absolute(&args.destination)?;
    let options = sync::open_options(args.journal_dir.as_deref(), state);
    location::refuse_host(&args.destination, "rewind")?;
    refuse_others(&path, &options, state)?;
    let Some(to) = &args.to else {
        let history = replica::history_at_work(&path, &options)?;
        list(&path, &history, output);
        if !history.moments.is_empty() {
            warn_if_changed(&path, state, output)?;
        }
        return Ok(());
    };
    let began = Instant::now();
    let mut replica = if args.dry_run { None } else { Some(sync::open_replica(&path, &options, state)?) };
    let history = match &replica {
        Some(replica) => replica.history()?,
        None => replica::history_at_work(&path, &options)?,
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

/// Says that none of the moments can be gone back to just now, as another program has changed the replica.
fn warn_if_changed(path: &Path, state: &StateDir, output: &Output) -> Result<()> {
    let known = sync::known_replicas(state).all()?;
    let changed = known.iter().filter(|known| known.path == path).find_map(|known| match &known.condition {
        replica::Condition::Changed(why) => Some(why),
        _ => None,
    });
    if let Some(why) = changed {
        output.warn(&format!(
            "{} was changed by another program since its last commit ({why}), and cannot go back to any of these before it is compared: \"dsync verify \
             --repair SRC DST\" keeps them if nothing was written. If its source is gone, \"dsync recover --accept {0}\" takes it for what it was, by \
             your word",
            path.display()
        ));
    }
    Ok(())
}

/// Refuses what is no replica, and so has no past.
fn refuse_others(path: &Path, options: &ReplicaOptions, state: &StateDir) -> Result<()> {
    let lineage = replica::inspect(path, options)?;
    let replica = lineage.as_ref().filter(|lineage| lineage.role.promoted.is_none());
    // Before its first copy is complete it has no file.
    let is_gone = !device::is_there(path) && replica.is_none_or(|lineage| lineage.epoch.is_some());
    if replica.is_some() && !is_gone {
        return Ok(());
    }
    let shown = path.display();
    let is_source =
        replica.is_none() && (lineage.is_some() || state.source(&path.to_string_lossy())?.is_some());
    if !is_source && is_gone {
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

/// The moment that is meant: of an epoch, of a state ahead of it (`2+`), of an id, or the last one that is not later than a time. `None`
/// if it is the present state.
pub(crate) fn choose(path: &Path, history: &ReplicaPast, to: &str) -> Result<Option<Moment>, Failure> {
    let moments: Vec<RewindPoint> = history.moments.iter().map(RewindPoint::of).collect();
    let found =
        pick(to, &RewindPoint::present(history), &moments, &format!("dsync rewind {}", path.display()))?;
    Ok(found.and_then(|at| history.moments.get(at)).cloned())
}

/// A moment, or the present state, as [`pick`] sees it.
#[derive(Debug)]
pub(crate) struct RewindPoint {
    /// `None` for an incomplete replica.
    pub epoch: Option<Epoch>,
    /// It is after that epoch.
    pub ahead: bool,
    /// Names the state of a single replica.
    pub state: Option<Uuid>,
    pub at: Option<u64>,
}

impl RewindPoint {
    fn of(moment: &Moment) -> RewindPoint {
        let Moment { at, epoch, ahead, state, .. } = *moment;
        RewindPoint { epoch: Some(epoch), ahead, state: Some(state), at: Some(at) }
    }

    fn present(history: &ReplicaPast) -> RewindPoint {
        let ReplicaPast { epoch, ahead, state, at, .. } = *history;
        RewindPoint { epoch, ahead, state: Some(state), at }
    }

    /// What tells it from others of the same number: those of one epoch are the same content, those ahead of it need not be.
    fn id(&self) -> Option<Uuid> {
        if self.ahead { self.state } else { self.epoch.map(|epoch| epoch.id) }
    }

    /// True if `other` has the same number, and is another moment.
    fn is_confused_with(&self, other: &RewindPoint) -> bool {
        let number = |point: &RewindPoint| point.epoch.map(|epoch| (epoch.number, point.ahead));
        number(self) == number(other) && self.id() != other.id()
    }
}

/// The exact name of a moment.
#[derive(Debug, Clone, Copy)]
enum Name {
    Epoch(u64),
    Ahead(u64),
    Id(Uuid),
}

impl Name {
    /// `None` for what is to be a time.
    fn parse(to: &str) -> Option<Name> {
        let ahead = to.strip_suffix('+').and_then(|epoch| epoch.parse().ok()).map(Name::Ahead);
        let epoch = || to.parse().ok().map(Name::Epoch);
        ahead.or_else(epoch).or_else(|| Uuid::try_parse(to).ok().map(Name::Id))
    }

    fn is_of(self, point: &RewindPoint) -> bool {
        let number = |ahead| point.epoch.filter(|_| point.ahead == ahead).map(|epoch| epoch.number);
        match self {
            Name::Epoch(epoch) => number(false) == Some(epoch),
            Name::Ahead(epoch) => number(true) == Some(epoch),
            Name::Id(id) => point.id() == Some(id) || point.state == Some(id),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Epoch(number) => write!(f, "of epoch {number}"),
            Name::Ahead(number) => write!(f, "ahead of epoch {number}"),
            Name::Id(id) => write!(f, "with id {id}"),
        }
    }
}

/// Picks the moment named `to`: its index in `moments`, the latest first; `None` is the present one. `list` is the command that lists them.
pub(crate) fn pick(
    to: &str,
    present: &RewindPoint,
    moments: &[RewindPoint],
    list: &str,
) -> Result<Option<usize>, Failure> {
    let refuse = |what: String| {
        Failure::refused(format!("no moment {what} was kept: \"{list}\" lists those that were"))
    };
    if let Some(name) = Name::parse(to) {
        let mut meant: Vec<&RewindPoint> = Vec::new();
        for point in [present].into_iter().chain(moments).filter(|point| name.is_of(point)) {
            if !meant.iter().any(|other| other.id() == point.id()) {
                meant.push(point);
            }
        }
        if meant.len() > 1 {
            return Err(ambiguous(name, &meant));
        }
        if name.is_of(present) {
            return Ok(None);
        }
        let found = moments.iter().position(|point| name.is_of(point));
        return found.map(Some).ok_or_else(|| refuse(name.to_string()));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let time = units::parse_moment(to, now).map_err(Failure::usage)?;
    let not_later = |point: &RewindPoint| point.at.filter(|at| *at <= time);
    let found = moments.iter().position(|point| not_later(point).is_some());
    let is_later = |point: &RewindPoint, than: u64| {
        // Of one second, the state ahead of an epoch is the later one.
        let ahead = point.ahead && present.epoch.is_some() && !present.ahead;
        point.at.is_some_and(|at| at > than || at == than && ahead)
    };
    let later = |found: usize, than| moments.get(found).is_some_and(|moment| is_later(moment, than));
    match (not_later(present), found) {
        (Some(present), Some(found)) if later(found, present) => Ok(Some(found)),
        (Some(_), _) => Ok(None),
        (None, Some(found)) => Ok(Some(found)),
        (None, None) => Err(refuse(format!("of {} or before", device::moment(time)))),
    }
}

/// Where a replica was promoted, both sources count on from one number; a replica that has followed both keeps moments of both.
fn ambiguous(name: Name, meant: &[&RewindPoint]) -> Failure {
    let times: Vec<u64> = meant.iter().map(|point| point.at.unwrap_or(0)).collect();
    let each = meant.iter().zip(device::moments(&times)).map(|(point, at)| {
        let at = if point.at.is_some() { at } else { "at an unknown time".into() };
        point.id().map_or(at.clone(), |id| format!("{id} ({at})"))
    });
    let each: Vec<String> = each.collect();
    Failure::refused(format!(
        "several moments {name} were kept: {}; name the one that is meant by its id or its time",
        each.join(", ")
    ))
}

/// Lists the moments.
fn list(path: &Path, history: &ReplicaPast, output: &Output) {
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
    let points: Vec<RewindPoint> = [RewindPoint::present(history)]
        .into_iter()
        .chain(history.moments.iter().map(RewindPoint::of))
        .collect();
    for ((moment, at), point) in history.moments.iter().zip(&times).zip(&points[1..]) {
        let fuzzy = if moment.fuzzy { ", fuzzy" } else { "" };
        let doubted = if moment.doubted { ", from before a repair" } else { "" };
        let number = moment.epoch.number;
        let epoch = match moment.ahead {
            true => format!("ahead of epoch {number}"),
            false => format!("epoch {number}"),
        };
        let to = match point.id().filter(|_| points.iter().any(|other| point.is_confused_with(other))) {
            Some(id) => format!(" (--to {id})"),
            None if moment.ahead => format!(" (--to {number}+)"),
            None => String::new(),
        };
        output.say(&format!("  {at}  {epoch}{to}{fuzzy}{doubted}, {}", units::size(moment.bytes)));
    }
    output.summary(&Listed { kind: "past", path, history });
}
