//! `dsync status --check` and `--prometheus`: what a monitor asks for. Nothing is changed, and no lock is taken, so that a monitor
//! never makes a sync fail.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use replica::KnownReplica;
use serde::Serialize;
use source::{About, StateDir};

use crate::exposition::{Exposition, Metric};
use crate::failure::Failure;
use crate::local::{LocalReplica, STATES, path_of};
use crate::output::Output;
use crate::status::{Lacking, SourceStatus, missing, unreadable};
use crate::{args, failure, units};

/// What this host knows of sources and replicas.
#[derive(Default)]
struct Found {
    sources: Vec<SourceStatus>,
    replicas: Vec<KnownReplica>,
    /// What could not be read.
    errors: Vec<String>,
}

impl Found {
    /// Everything; or the source or the replica that is meant.
    fn read(what: Option<&str>, state: &StateDir) -> Result<Found> {
        let mut found = Found::default();
        let all = sync::known_replicas(state).all().context("cannot read the list of replicas")?;
        let Some(what) = what else {
            let survey = state.survey()?;
            survey.damaged.into_iter().for_each(|(place, error)| found.fail(&place, error.into()));
            survey.sources.into_iter().for_each(|(place, about)| found.read_source(&place, about));
            found.replicas = all;
            found.drop_promoted();
            return Ok(found);
        };
        let path = path_of(what)?;
        found.replicas = all.into_iter().filter(|replica| replica.path == path).collect();
        match state.source(what)? {
            Some((place, about)) => found.read_source(&place, about),
            None if found.replicas.is_empty() => bail!(Failure::usage(format!(
                "{what} is neither a known source nor a listed replica: \"dsync status\" lists them"
            ))),
            None => {}
        }
        found.drop_promoted();
        Ok(found)
    }

    /// A replica that was promoted is among the sources.
    fn drop_promoted(&mut self) {
        let sources = &self.sources;
        self.replicas
            .retain(|replica| !(replica.is_source() && sources.iter().any(|s| s.path == replica.path)));
    }

    fn read_source(&mut self, place: &Path, about: About) {
        match SourceStatus::read(place, about) {
            Ok((status, _)) => self.sources.push(status),
            Err(error) => self.fail(place, error),
        }
    }

    fn fail(&mut self, place: &Path, error: anyhow::Error) {
        self.errors.push(failure::text(&error.context(unreadable(place))));
    }
}

/// Something that needs attention.
#[derive(Serialize)]
struct Problem {
    kind: &'static str,
    /// A word that does not change between versions.
    problem: &'static str,
    source: Option<PathBuf>,
    replica: Option<String>,
    message: String,
}

/// The last line of a check.
#[derive(Serialize)]
struct Checked {
    kind: &'static str,
    problems: usize,
}

/// Prints one line per problem, or that there is none. Returns the exit code.
pub(crate) fn check(args: &args::Status, state: &StateDir, output: &Output) -> Result<u8> {
    let found = Found::read(args.path.as_deref(), state)?;
    let mut problems: Vec<Problem> = Vec::new();
    for error in found.errors {
        problems.push(Problem::of("unreadable", error));
    }
    for source in &found.sources {
        problems.extend(of_source(source));
        let replicas = source.replicas.iter().filter_map(|r| of_replica(source, r, args.max_age));
        problems.extend(replicas);
    }
    if args.path.is_none() {
        problems.extend(of_trackers(&found.sources)?);
    }
    problems.extend(found.replicas.iter().filter_map(of_local));
    let nothing = found.sources.is_empty() && found.replicas.is_empty() && problems.is_empty();
    if nothing && trackers::list()?.is_empty() {
        problems.push(Problem::of("nothing-known", nothing_known(state)));
    }
    for problem in &problems {
        // One line, whatever the names in it are.
        output.say(&link::printable(&problem.message));
        output.status(problem);
    }
    if problems.is_empty() {
        output.say("OK");
    }
    output.summary(&Checked { kind: "check", problems: problems.len() });
    Ok(match problems.first() {
        None => 0,
        Some(Problem { problem: "nothing-known", .. }) => failure::UNKNOWN,
        Some(_) => failure::FAILED,
    })
}

/// Why there is nothing to judge: most likely it was looked for in the wrong place.
fn nothing_known(state: &StateDir) -> String {
    let path = state.path().display();
    let what = match state.path().is_dir() {
        true => format!("state directory {path} knows no source and no replica"),
        false => format!("state directory {path} does not exist"),
    };
    format!(
        "nothing is watched: {what}; run this as the user who runs dsync, or give the directory with --state-dir"
    )
}

impl Problem {
    fn of(problem: &'static str, message: String) -> Problem {
        Problem { kind: "problem", problem, source: None, replica: None, message }
    }
}

fn of_source(source: &SourceStatus) -> Option<Problem> {
    let path = source.path.display();
    let problem = match &source.lost {
        _ if source.size.is_none() => {
            Problem::of("missing", format!("source is missing: {}", missing(source)))
        }
        Some(why) => Problem::of(
            "tracking-lost",
            format!(
                "tracking is lost: changes of {path} since epoch {} are not known, and the next sync compares all of it: {why}",
                source.epoch.unwrap_or_default()
            ),
        ),
        None => return None,
    };
    Some(Problem { source: Some(source.path.clone()), ..problem })
}

fn of_replica(source: &SourceStatus, replica: &Lacking, max_age: Option<Duration>) -> Option<Problem> {
    let (path, name) = (source.path.display(), &replica.replica);
    let age = now().saturating_sub(Duration::from_secs(replica.time));
    let problem = match max_age {
        // What was not written to since is not out of date.
        Some(max) if age > max && replica.blocks != Some(0) => Problem::of(
            "stale",
            format!(
                "replica is out of date: {name} of {path} was last brought up to date on {}, longer ago than {}",
                device::moment(replica.time),
                units::seconds(max.as_secs_f64())
            ),
        ),
        _ if replica.compared => Problem::of(
            "history-gap",
            format!(
                "history has a gap: the next sync of {path} to {name} compares all of it: {}",
                replica.why.as_deref().unwrap_or_default()
            ),
        ),
        _ if replica.unread > 0 => Problem::of(
            "incomplete",
            format!(
                "replica is incomplete: {name} lacks {} of {path} that could not be read at its last sync; the next one sends them",
                units::size(replica.unread)
            ),
        ),
        _ => return None,
    };
    Some(Problem { source: Some(source.path.clone()), replica: Some(name.clone()), ..problem })
}

/// Trackers of disks that are not sources yet: those of the others are judged with them.
fn of_trackers(sources: &[SourceStatus]) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    for device in trackers::list()? {
        let is_source = sources.iter().any(|source| source.path == device);
        let lost = if is_source { None } else { trackers::find(&device)?.map(|tracker| tracker.lost()) };
        if let Some(why) = lost.transpose()?.flatten() {
            let message = format!("tracking is lost: the tracker of {} says: {why}", device.display());
            problems.push(Problem { source: Some(device), ..Problem::of("tracker-lost", message) });
        }
    }
    Ok(problems)
}

fn of_local(known: &KnownReplica) -> Option<Problem> {
    let LocalReplica { path, state, problem, .. } = LocalReplica::of(known);
    let message = format!("replica is {state}: {} {}", path.display(), problem?);
    Some(Problem { replica: Some(path.display().to_string()), ..Problem::of(state, message) })
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Prints metrics. Returns the exit code.
pub(crate) fn prometheus(state: &StateDir, output: &Output) -> Result<u8> {
    let found = Found::read(None, state)?;
    let mut out = Exposition::default();
    for source in &found.sources {
        let (path, id) = (source.path.display().to_string(), source.uuid.to_string());
        let labels = [("source", path.as_str()), ("source_id", &id)];
        if let Some(epoch) = source.epoch {
            out.add(Metric::SourceEpoch, &labels, epoch);
            out.add(Metric::SourceTracking, &labels, u64::from(source.lost.is_none()));
        }
        for replica in &source.replicas {
            let labels = [labels[0], labels[1], ("replica", &replica.replica)];
            out.add(Metric::ReplicaEpoch, &labels, replica.epoch);
            out.add(Metric::ReplicaLastSuccess, &labels, replica.time);
            if let Some(blocks) = replica.blocks {
                let bytes = blocks.saturating_mul(source.block_size.into());
                out.add(Metric::ReplicaLacks, &labels, bytes);
            }
        }
    }
    for known in &found.replicas {
        let local = LocalReplica::of(known);
        let path = local.path.display().to_string();
        let id = local.source.map(|id| id.to_string()).unwrap_or_default();
        let labels = [("replica", path.as_str()), ("source_id", &id)];
        for state in STATES {
            let labels = [labels[0], labels[1], ("state", state)];
            out.add(Metric::LocalState, &labels, u64::from(state == local.state));
        }
        out.add(Metric::LocalUnsure, &labels, local.unsure);
        out.add(Metric::LocalAhead, &labels, u64::from(local.ahead));
    }
    out.add(Metric::Errors, &[], found.errors.len() as u64);
    let mut stdout = std::io::stdout().lock();
    let printed = stdout.write_all(out.text().as_bytes()).and_then(|()| stdout.flush());
    // A part would be taken for the whole.
    printed.context("cannot print the metrics")?;
    for error in &found.errors {
        output.error(error, failure::FAILED);
    }
    Ok(if found.errors.is_empty() { 0 } else { failure::FAILED })
}
