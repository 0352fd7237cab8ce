//! `dsync status --check` and `--prometheus`: what a monitor asks for. Nothing is changed, and no lock is taken, so that a monitor
//! never makes a sync fail.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use replica::KnownReplica;
use serde::Serialize;
use source::{JobEnd, LastVerify, SourceMetadata, StateDir, Tally};

use crate::args;
use crate::failure;
use crate::failure::Failure;
use crate::output::Output;
use crate::status::exposition::{Exposition, Metric};
use crate::status::job_copies;
use crate::status::job_copies::{Fetch, JobCopy, Jobs, JudgedJob, Known};
use crate::status::local::{LocalReplica, ROLES, STATES, made_elsewhere, path_of};
use crate::status::membership::{self, DividedGroup};
use crate::status::{Lacking, SourceStatus, first_copy, is_forgotten, missing, unreadable};
use crate::terms::machine_name::{self, MachineWord};
use crate::terms::units;

/// What this host knows of sources and replicas.
#[derive(Default)]
pub(crate) struct Inventory {
    pub sources: Vec<SourceStatus>,
    /// The sources on this host of a replica that is asked for, with what they know of that alone.
    origins: Vec<SourceStatus>,
    pub replicas: Vec<KnownReplica>,
    /// The source that each replica on this host follows, those that are not asked for included.
    follow: BTreeMap<PathBuf, uuid::Uuid>,
    /// What the jobs of this host are to copy.
    pub copies: Vec<JobCopy>,
    /// The jobs that are judged.
    jobs: Vec<JudgedJob>,
    /// Replicas that are sources with another state directory, and that.
    pub elsewhere: Vec<(PathBuf, PathBuf)>,
    /// Groups that could not be promoted as they are.
    apart: Vec<DividedGroup>,
    /// Why nothing more can be written down.
    full: Option<String>,
    /// Sources whose state could not be read, and jobs that cannot be run.
    pub errors: Vec<anyhow::Error>,
}

impl Inventory {
    /// Everything; or the source or the replica that is meant.
    pub(crate) fn read(what: Option<&str>, state: &StateDir) -> Result<Inventory> {
        let mut found = Inventory { full: full(state), ..Inventory::default() };
        let replicas = || sync::known_replicas(state).all().context("cannot read the list of replicas");
        let Some(what) = what else {
            let survey = state.survey()?;
            let unreadable = survey.damaged.into_iter().chain(survey.nameless);
            unreadable.for_each(|(place, error)| found.fail(&place, error.into()));
            survey.sources.into_iter().for_each(|(place, about)| found.read_source(&place, about));
            // After the sources: a sync commits to a replica before its source knows.
            let all = replicas()?;
            found.follow = follow(&all);
            found.read_jobs(&all, state, None);
            found.apart = membership::apart(&all, state);
            found.replicas = all;
            found.drop_promoted(state);
            return Ok(found);
        };
        let all = replicas()?;
        found.follow = follow(&all);
        if let Some(named) = MachineWord::read(what) {
            found.read_machine(&named.name(state), &all, state)?;
            return Ok(found);
        }
        let path = path_of(what)?;
        let source = state.source(what)?;
        let is_source = source.is_some();
        source.into_iter().for_each(|(place, about)| found.read_source(&place, about));
        let is_other = |replica: &KnownReplica| replica.is_source() && is_source;
        let mut here = all.iter().filter(|replica| replica.path == path);
        if !is_source || here.any(|replica| !is_other(replica) && made_elsewhere(replica, state).is_none()) {
            found.read_origins(&path, state)?;
        }
        // What the sources of a replica know of it is known by now.
        found.read_jobs(&all, state, Some(what));
        found.replicas = all.into_iter().filter(|replica| replica.path == path).collect();
        found.drop_promoted(state);
        let nothing = found.replicas.is_empty() && found.copies.is_empty() && found.elsewhere.is_empty();
        if !is_source && nothing && found.origins.is_empty() {
            bail!(Failure::usage(format!(
                "{what} is neither a known source nor a listed replica: \"dsync status\" lists them"
            )));
        }
        Ok(found)
    }

    /// Reads what the sources of this host know of the replica at `path`: how old it is, it does not know itself.
    fn read_origins(&mut self, path: &Path, state: &StateDir) -> Result<()> {
        let is_it = |name: &str| Path::new(name) == path;
        for (place, about) in state.survey()?.sources {
            // One that cannot be read is a problem of its own.
            let Ok((mut source, _)) = SourceStatus::read(&place, about) else { continue };
            source.replicas.retain(|replica| is_it(&replica.replica));
            source.first_copies.retain(|tally| is_it(&tally.replica));
            if !source.replicas.is_empty() || !source.first_copies.is_empty() {
                self.origins.push(source);
            }
        }
        Ok(())
    }

    /// Reads the disks of a machine, and what jobs are to copy of it.
    fn read_machine(&mut self, name: &str, replicas: &[KnownReplica], state: &StateDir) -> Result<()> {
        let members = machine_name::members(name, state);
        for (place, about) in members.iter().flatten().cloned() {
            self.read_source(&place, about);
        }
        let own = std::mem::take(&mut self.errors);
        self.read_jobs(replicas, state, None);
        self.errors = own;
        let (sources, machine) = (&self.sources, format!("vm:{name}"));
        let is_its = |copy: &JobCopy| sources.iter().any(|source| source.path == Path::new(&copy.source));
        self.copies.retain(|copy| copy.source == machine || is_its(copy));
        let copies = &self.copies;
        self.jobs.retain(|job| copies.iter().any(|copy| copy.job == job.job));
        match members {
            Err(unknown) if self.copies.is_empty() => Err(unknown),
            _ => Ok(()),
        }
    }

    /// A replica that was promoted is among the sources: of this state directory, or of another one, where it is judged.
    fn drop_promoted(&mut self, state: &StateDir) {
        let sources = &self.sources;
        self.replicas
            .retain(|replica| !(replica.is_source() && sources.iter().any(|s| s.path == replica.path)));
        let elsewhere = &mut self.elsewhere;
        self.replicas.retain(|replica| {
            let made = made_elsewhere(replica, state);
            elsewhere.extend(made.iter().map(|made| (replica.path.clone(), made.clone())));
            made.is_none()
        });
    }

    fn read_source(&mut self, place: &Path, about: SourceMetadata) {
        match SourceStatus::read(place, about) {
            Ok((status, _)) => self.sources.push(status),
            Err(_) if is_forgotten(place) => {}
            Err(error) => self.fail(place, error),
        }
    }

    /// Reads what jobs are to copy; with `what`, that source or that replica alone.
    fn read_jobs(&mut self, replicas: &[KnownReplica], state: &StateDir, what: Option<&str>) {
        let sources = self.sources.iter().chain(&self.origins).collect();
        let known = Known { sources, replicas, is_part: what.is_some() };
        let Jobs { copies, judged, errors } = job_copies::all(&known, state, what);
        (self.copies, self.jobs) = (copies, judged);
        if what.is_none() {
            self.errors.extend(errors);
        }
    }

    fn fail(&mut self, place: &Path, error: anyhow::Error) {
        self.errors.push(error.context(unreadable(place)));
    }
}

/// The sources that replicas follow, by their paths.
pub(crate) fn follow(replicas: &[KnownReplica]) -> BTreeMap<PathBuf, uuid::Uuid> {
    let source = |known: &KnownReplica| Some((known.path.clone(), known.lineage.as_ref()?.source?));
    replicas.iter().filter_map(source).collect()
}

/// Something that needs attention.
#[derive(Serialize)]
pub(crate) struct Problem {
    kind: &'static str,
    /// A word that does not change between versions.
    pub problem: &'static str,
    pub source: Option<PathBuf>,
    pub replica: Option<String>,
    pub message: String,
}

/// Problems of a source or a replica with which its jobs fail, or which such a failure leaves. Others hide no failure.
const FAILS: [&str; 16] = [
    "apart",
    "changed",
    "diverged",
    "failing",
    "flush-failed",
    "incomplete",
    "interrupted",
    "missing",
    "never-copied",
    "not-mirrored",
    "other-content",
    "promoted",
    "resized",
    "stale",
    "taken-over",
    "unreadable",
];

/// The last line of a check.
#[derive(Serialize)]
struct Checked {
    kind: &'static str,
    problems: usize,
}

/// Prints one line per problem, or that there is none. Returns the exit code.
pub(crate) fn check(args: &args::StatusArgs, state: &StateDir, output: &Output) -> Result<u8> {
    let found = Inventory::read(args.path.as_deref(), state)?;
    let mut problems = problems(&found, args)?;
    let is_empty = found.sources.is_empty() && found.replicas.is_empty() && found.elsewhere.is_empty();
    let nothing = is_empty && found.origins.is_empty() && problems.is_empty();
    // What is tracked in the kernel is not for a directory to judge that is not there.
    if nothing && (!state.path().is_dir() || trackers::list()?.is_empty()) {
        problems.push(Problem::of("nothing-known", nothing_known(state)));
    }
    problems.extend(args.path.as_ref().and(args.max_age).and_then(|_| of_unknown_age(&found)));
    for problem in &problems {
        // One line, whatever the names in it are.
        output.say(&link::printable(&problem.message));
        output.status(problem);
    }
    if problems.is_empty() {
        output.say("OK");
    }
    output.summary(&Checked { kind: "check", problems: problems.len() });
    let is_unknown = |problem: &Problem| ["nothing-known", "age-unknown"].contains(&problem.problem);
    Ok(match problems.iter().all(is_unknown) {
        _ if problems.is_empty() => 0,
        true => failure::UNKNOWN,
        false => failure::FAILED,
    })
}

/// What needs attention, of all that was found.
pub(crate) fn problems(found: &Inventory, args: &args::StatusArgs) -> Result<Vec<Problem>> {
    let mut problems: Vec<Problem> =
        found.errors.iter().map(|error| Problem::of("unreadable", failure::text(error))).collect();
    problems.extend(found.full.iter().map(|message| Problem::of("state-full", message.clone())));
    for source in &found.sources {
        problems.extend(of_source(source));
        problems.extend(of_clone(source));
        let of_server = [("resized", source.resized()), ("flush-failed", source.flush_failed())];
        problems.extend(of_server.into_iter().filter_map(|(problem, message)| {
            Some(Problem { source: Some(source.path.clone()), ..Problem::of(problem, message?) })
        }));
        problems.extend(of_replicas(source, found, args.max_age));
    }
    problems.extend(found.origins.iter().flat_map(|source| of_replicas(source, found, args.max_age)));
    if args.path.is_none() {
        problems.extend(of_trackers(&found.sources)?);
    }
    let first_copies = || found.sources.iter().chain(&found.origins).flat_map(|source| &source.first_copies);
    let is_copied = |known: &&KnownReplica| {
        first_copies().any(|tally| known.path == Path::new(&tally.replica) && is_under_way(tally))
    };
    problems.extend(found.replicas.iter().filter(|known| !is_copied(known)).filter_map(of_local));
    problems
        .extend(found.replicas.iter().filter_map(|known| of_differing(known, &problems)).collect::<Vec<_>>());
    problems.extend(found.replicas.iter().filter_map(of_diverged));
    problems
        .extend(found.replicas.iter().filter_map(|known| of_past(known).or_else(|| of_short_past(known))));
    problems.extend(found.replicas.iter().filter_map(of_rewound));
    problems.extend(found.apart.iter().map(of_apart));
    problems.extend(found.copies.iter().filter(|copy| !copy.made && !copy.begun).map(of_copy));
    let made = found.copies.iter().filter(|copy| copy.made);
    problems.extend(made.clone().filter_map(|copy| of_fetch(copy, copy.fetch.as_ref()?, args.max_age)));
    let mirrors = made.filter_map(|copy| of_mirror(copy, &found.sources));
    let is_new = |mirror: &Problem| problems.iter().all(|other| other.replica != mirror.replica);
    problems.extend(mirrors.filter(is_new).collect::<Vec<_>>());
    let is_told = |job: &&JudgedJob| problems.iter().any(|problem| problem.tells_of(job));
    problems.extend(found.jobs.iter().filter(|job| !is_told(job)).filter_map(of_job).collect::<Vec<_>>());
    Ok(problems)
}

/// Bytes of a file system that are as good as none: what is written down takes some pages.
const NO_ROOM: u64 = 64 << 10;

/// Why nothing more can be written down in the state directory: what fails then may leave no trace.
fn full(state: &StateDir) -> Option<String> {
    let found = rustix::fs::statvfs(state.path()).ok()?;
    // What is reserved is for root.
    let blocks = if rustix::process::geteuid().is_root() { found.f_bfree } else { found.f_bavail };
    let free = blocks.saturating_mul(found.f_frsize);
    let what = match free < NO_ROOM {
        true => format!("{} are free", units::size(free)),
        // Some file systems have no number of them.
        false if found.f_files > 0 && found.f_favail == 0 => "no inode is free".to_owned(),
        false => return None,
    };
    Some(format!(
        "state directory is full: {what} on the file system of {}, so syncs fail, and what they report may not be kept: free some space there",
        state.path().display()
    ))
}

/// What is wrong with the replicas of a source, as that knows them.
fn of_replicas(source: &SourceStatus, found: &Inventory, max_age: Option<Duration>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for replica in &source.replicas {
        let follows = found.follow.get(Path::new(&replica.replica)).copied();
        let worst = of_replica(source, replica, max_age, follows.filter(|id| *id != source.uuid));
        // These two say it themselves.
        let says = worst.as_ref().is_some_and(|worst| ["taken-over", "stale"].contains(&worst.problem));
        problems.extend(worst.or_else(|| of_older(source, replica, &found.replicas)));
        problems.extend(of_failing(source, replica).filter(|_| !says));
    }
    // One on this host is judged by its own state.
    let is_own = |local: &KnownReplica| {
        local.lineage.as_ref().and_then(|lineage| lineage.source).is_none_or(|of| of == source.uuid)
    };
    let elsewhere =
        |name: &str| !found.replicas.iter().any(|local| local.path == Path::new(name) && is_own(local));
    let stopped = |tally: &&Tally| !is_under_way(tally) && elsewhere(&tally.replica);
    let begun = source.first_copies.iter().filter(stopped);
    problems.extend(begun.map(|tally| of_first_copy(source, tally)));
    problems
}

/// A replica that is asked for, whose age is asked for, and known at its source alone.
fn of_unknown_age(found: &Inventory) -> Option<Problem> {
    let is_fetched =
        found.copies.iter().any(|copy| copy.fetch.as_ref().is_some_and(|fetch| fetch.time.is_some()));
    if is_fetched || !found.origins.is_empty() || !found.sources.is_empty() {
        return None;
    }
    let local = LocalReplica::of(found.replicas.first()?);
    let path = local.path.display();
    let place = local.origin.as_ref().map_or(String::new(), |origin| format!(", {origin}"));
    let message = format!(
        "age is not known: when {path} was last brought up to date is known where its source is{place}: run \"dsync status --check --max-age\" there"
    );
    Some(Problem { replica: Some(path.to_string()), ..Problem::of("age-unknown", message) })
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

    /// True if it tells why this job fails, or that it does.
    fn tells_of(&self, job: &JudgedJob) -> bool {
        let tells = FAILS.contains(&self.problem);
        tells
            && job.subjects.iter().any(|(source, replica)| match &self.replica {
                Some(_) => self.replica == *replica && self.source.as_ref().is_none_or(|of| of == source),
                None => self.source.as_ref() == Some(source),
            })
    }
}

fn of_source(source: &SourceStatus) -> Option<Problem> {
    let path = source.path.display();
    let problem = match &source.lost {
        _ if source.size.is_none() => {
            Problem::of("missing", format!("source is missing: {}", missing(source)))
        }
        Some(_) if source.is_untracked && !source.is_another() => return None,
        Some(why) if source.is_another() => Problem::of(
            "other-content",
            format!(
                "source is not what it was: syncs of {path} are refused, as a replica may be the newest copy: {why}"
            ),
        ),
        Some(_) if is_fresh(&source.path) => {
            if source.replicas.is_empty() && source.checkpoints.is_empty() {
                return None;
            }
            Problem::of(
                "tracking-lost",
                format!(
                    "{path} was not synced since tracking began: changes since epoch {} are not known, and the next sync compares all of it",
                    source.epoch.unwrap_or_default()
                ),
            )
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

/// An image whose clone keeps more of what was overwritten than there is room left.
fn of_clone(source: &SourceStatus) -> Option<Problem> {
    let clone = source.clone.filter(|clone| clone.kept_bytes > clone.free_bytes)?;
    let message = format!(
        "file system is filling up: the clone of {0} keeps {1} of what was overwritten since its last sync, and {2} are free: sync it, or run \
         \"dsync track remove {0}\"",
        source.path.display(),
        units::size(clone.kept_bytes),
        units::size(clone.free_bytes)
    );
    Some(Problem { source: Some(source.path.clone()), ..Problem::of("clone-space", message) })
}

/// The worst of what is wrong with a replica of a source here.
fn of_replica(
    source: &SourceStatus,
    replica: &Lacking,
    max_age: Option<Duration>,
    taken: Option<uuid::Uuid>,
) -> Option<Problem> {
    let (path, name) = (source.path.display(), &replica.replica);
    let failed = replica.failed();
    let differs = |verified: &&LastVerify| verified.differs();
    let behind = |rpo: &f64| is_beyond(replica, *rpo);
    let (word, message) = if let Some(other) = taken {
        let now = format!("it follows source {other} now, and syncs of {path} to it are refused");
        let out =
            "give it another replica, and \"dsync forget\" this one; or \"dsync sync --adopt\" takes it back";
        ("taken-over", format!("replica was taken over: {name} was a replica of {path}: {now}: {out}"))
    } else if let Some(verified) = replica.tally.verified.as_ref().filter(differs) {
        let (bytes, time) = (units::size(verified.bytes_differing), device::moment(verified.time));
        (
            "differs",
            format!("replica differs: {name} differed from {path} in {bytes} when it was verified on {time}"),
        )
    } else if let Some(late) = max_age.and_then(|max| late(replica.time, max)).filter(|_| !replica.is_current)
    {
        // What was not written to since is not out of date.
        let why = failed.map_or(String::new(), |f| format!("; the last attempt failed: {}", f.message));
        ("stale", format!("replica is out of date: {name} of {path} {late}{why}"))
    } else if let Some(rpo) = replica.work().and_then(|work| work.rpo.filter(|_| !work.paused)).filter(behind)
    {
        let (lag, rpo) = (lag(replica), units::seconds(rpo));
        let late =
            format!("{name} of {path} is {lag} behind, and its mirror is to keep it within {rpo} (--rpo)");
        ("stale", format!("replica is out of date: {late}: the link or the other host is too slow, or hangs"))
    } else if replica.refused && !source.is_another() {
        let why = replica.why.as_deref().unwrap_or_default();
        (
            "other-content",
            format!("source is not what it was: the next sync of {path} to {name} is refused: {why}"),
        )
    } else if replica.compared && !source.is_untracked {
        let why = replica.why.as_deref().unwrap_or_default();
        let gap = format!("history has a gap: the next sync of {path} to {name} compares all of it: {why}");
        ("history-gap", gap)
    } else if replica.unread > 0 {
        let lacks = units::size(replica.unread);
        let part = format!(
            "{name} lacks {lacks} of {path} that could not be read at its last sync; the next one sends them"
        );
        ("incomplete", format!("replica is incomplete: {part}"))
    } else {
        return None;
    };
    Some(Problem {
        source: Some(source.path.clone()),
        replica: Some(name.clone()),
        ..Problem::of(word, message)
    })
}

/// A replica on this host that is older than its source has made it.
fn of_older(source: &SourceStatus, replica: &Lacking, local: &[KnownReplica]) -> Option<Problem> {
    let known = local.iter().find(|known| known.path == Path::new(&replica.replica))?;
    let lineage = known.lineage.as_ref().filter(|lineage| lineage.source == Some(source.uuid))?;
    let at = lineage.epoch.filter(|epoch| epoch.number < replica.epoch && !known.past.rewound)?;
    let message = format!(
        "replica is older than it was: {0} is at epoch {1}, and a sync of {2} has brought it to epoch {3}: another disk, or an older copy, is in its \
         place; \"findmnt -T {0}\" says which file system it is on. The next sync brings it up to date",
        replica.replica,
        at.number,
        source.path.display(),
        replica.epoch
    );
    let (source, replica) = (Some(source.path.clone()), Some(replica.replica.clone()));
    Some(Problem { source, replica, ..Problem::of("older", message) })
}

/// True if a replica is further behind than it may be. Times are those of whole seconds.
fn is_beyond(replica: &Lacking, rpo: f64) -> bool {
    replica.lag(now().as_secs()).is_none_or(|lag| lag as f64 > rpo + 1.0)
}

/// How far a replica is behind, in words.
fn lag(replica: &Lacking) -> String {
    let lag = replica.lag(now().as_secs());
    lag.map_or("for a time that is not known".into(), |lag| units::seconds(lag as f64))
}

/// That a replica was brought up to date at this time, as the part of a sentence, if that is longer ago than it may be, or not known.
fn late(time: u64, max: Duration) -> Option<String> {
    let (then, age) = (device::moment(time), units::elapsed(time, now().as_secs()));
    match age {
        None => Some(format!(
            "was last brought up to date on {then}, which is still to come: a clock was wrong, so it is not known how old it is"
        )),
        Some(_) if now().saturating_sub(Duration::from_secs(time)) > max => Some(format!(
            "was last brought up to date on {then}, longer ago than {}",
            units::seconds(max.as_secs_f64())
        )),
        Some(_) => None,
    }
}

/// A replica that a job is to mirror, and nothing does: its mirror was killed, or was stopped and not started again.
fn of_mirror(copy: &JobCopy, sources: &[SourceStatus]) -> Option<Problem> {
    let source = sources.iter().find(|source| source.path == Path::new(&copy.source))?;
    let replica = source.replicas.iter().find(|replica| replica.replica == copy.replica)?;
    let rpo = copy.rpo.filter(|_| replica.work().is_none())?;
    let left = replica.tally.work.as_ref().filter(|work| work.what == "mirror");
    let how = match left {
        Some(work) => format!("its mirror, process {}, was killed", work.mark.process),
        None if is_beyond(replica, rpo.as_secs_f64()) => {
            format!("it is {} behind", lag(replica))
        }
        None => return None,
    };
    let JobCopy { job, replica: name, .. } = copy;
    let message = format!(
        "replica is not mirrored: job {job} is to mirror {} to {name}, and none is at work; {how}: \"systemctl status dsync-mirror@{job}\" says \
         why; start it again, or remove the job if it is not wanted",
        copy.source
    );
    let problem = Problem::of("not-mirrored", message);
    Some(Problem { source: Some(source.path.clone()), replica: Some(name.clone()), ..problem })
}

/// True if a first copy is being made.
fn is_under_way(tally: &Tally) -> bool {
    tally.work.as_ref().is_some_and(|work| work.is_alive() && !work.only_looks())
}

/// A replica whose last sync failed.
fn of_failing(source: &SourceStatus, replica: &Lacking) -> Option<Problem> {
    let failed = replica.failed()?;
    let (path, name) = (source.path.display(), &replica.replica);
    let (time, why) = (device::moment(failed.time), &failed.message);
    let message = format!(
        "replica is not brought up to date: the last attempt for {name} of {path} failed on {time}: {why}"
    );
    let problem = Problem::of("failing", message);
    Some(Problem { source: Some(source.path.clone()), replica: Some(name.clone()), ..problem })
}

/// A replica of which no copy was ever complete, or another disk of the source that was not given up for it.
fn of_first_copy(source: &SourceStatus, tally: &Tally) -> Problem {
    let (path, name) = (source.path.display(), &tally.replica);
    let out = format!("to give it up: dsync forget {path} {name}");
    let how = first_copy(tally);
    let problem = match tally.refused {
        true => Problem::of(
            "failing",
            format!("replica is not brought up to date: the first sync of {path} to {name} {how}; {out}"),
        ),
        false => Problem::of(
            "incomplete",
            format!("replica is incomplete: the first copy of {path} to {name} {how}; {out}"),
        ),
    };
    Problem { source: Some(source.path.clone()), replica: Some(name.clone()), ..problem }
}

/// A copy that a job is to make, and that never began since its source is one.
fn of_copy(copy: &JobCopy) -> Problem {
    let JobCopy { job, command, source, replica, took_over, .. } = copy;
    let (never, what) = match copy.fetch {
        _ if *took_over => ("not synced", "no sync has come since that took over"),
        Some(_) => ("never made", "none was ever complete"),
        None => ("never made", "no copy has begun"),
    };
    let failed =
        copy.failed.as_ref().map_or(String::new(), |failed| format!("; an attempt {}", ended(failed)));
    let message = format!(
        "replica was {never}: job {job} is to {command} {source} to {replica}, and {what}: \"dsync run {job}\", or \
         \"systemctl status dsync-{command}@{job}\", says why; remove the job if it is not wanted{failed}"
    );
    let problem = Problem::of("never-copied", message);
    Problem { source: Some(source.into()), replica: Some(replica.clone()), ..problem }
}

/// A copy that a job of this host fetches from another one: if that cannot be asked, nobody else knows how old it is.
fn of_fetch(copy: &JobCopy, fetch: &Fetch, max_age: Option<Duration>) -> Option<Problem> {
    let JobCopy { job, source, replica, .. } = copy;
    let late = late(fetch.time?, max_age?)?;
    let why =
        copy.failed.as_ref().map_or(String::new(), |failed| format!("; the last attempt {}", ended(failed)));
    let message =
        format!("replica is out of date: {replica}, which job {job} fetches from {source}, {late}{why}");
    Some(Problem { replica: Some(replica.clone()), ..Problem::of("stale", message) })
}

/// How an attempt of a job has failed, as the part of a sentence.
fn ended(failed: &JobEnd) -> String {
    let (time, message) = (device::moment(failed.time), &failed.message);
    match failed.code {
        None => {
            format!("was killed: its process, which began on {time}, is gone and has not said how it ended")
        }
        Some(code) if message.is_empty() => format!("failed on {time}, with exit code {code}"),
        Some(_) => format!("failed on {time}: {message}"),
    }
}

/// A job that failed, and has not succeeded since.
fn of_job(judged: &JudgedJob) -> Option<Problem> {
    let JudgedJob { job, command, failed, subjects } = judged;
    let message = format!(
        "job fails: an attempt of {job} ({command}) {}; none has succeeded since: \"dsync run {job}\" tries again",
        ended(failed.as_ref()?)
    );
    let problem = Problem::of("failing", message);
    Some(match subjects.as_slice() {
        [(source, replica)] => Problem { source: Some(source.clone()), replica: replica.clone(), ..problem },
        _ => problem,
    })
}

/// True if the tracking of the disk at `path` has begun, and no epoch has ended since.
fn is_fresh(path: &Path) -> bool {
    let tracker = trackers::find(path).ok().flatten();
    tracker.is_some_and(|tracker| trackers::is_fresh(&*tracker).is_ok_and(|is_fresh| is_fresh))
}

/// Trackers of disks that are not sources yet: those of the others are judged with them. One whose tracking has just begun lacks nothing: its first
/// sync reads all of it.
fn of_trackers(sources: &[SourceStatus]) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    for device in trackers::list()? {
        let is_source = sources.iter().any(|source| source.path == device);
        let lost = if is_source || is_fresh(&device) {
            None
        } else {
            trackers::find(&device)?.map(|tracker| tracker.lost())
        };
        if let Some(why) = lost.transpose()?.flatten() {
            let message = format!("tracking is lost: the tracker of {} says: {why}", device.display());
            problems.push(Problem { source: Some(device), ..Problem::of("tracker-lost", message) });
        }
    }
    Ok(problems)
}

fn of_local(known: &KnownReplica) -> Option<Problem> {
    let LocalReplica { path, state, problem, .. } = LocalReplica::of(known);
    let message = format!("replica {} {}", path.display(), problem?);
    Some(Problem { replica: Some(path.display().to_string()), ..Problem::of(state, message) })
}

/// A replica that a source on another host found to differ; one on this host says so itself.
fn of_differing(known: &KnownReplica, others: &[Problem]) -> Option<Problem> {
    let (path, found) = (known.path.display().to_string(), known.past.verdict?);
    if others.iter().any(|other| other.problem == "differs" && other.replica.as_ref() == Some(&path)) {
        return None;
    }
    let message = format!(
        "replica differs: {path} differed from its source in {} when it was verified on {}",
        units::size(found.bytes_differing),
        device::moment(found.time)
    );
    Some(Problem { replica: Some(path), ..Problem::of("differs", message) })
}

/// A former source that holds what no other disk has.
fn of_diverged(known: &KnownReplica) -> Option<Problem> {
    let path = known.path.display();
    // What others may have written has its own problem.
    let told = |lineage: &&replica::Lineage| {
        lineage.role.demoted.is_some() && lineage.unsure != replica::Unsure::Everything
    };
    let lineage = known.lineage.as_ref().filter(told)?;
    let written = Some(lineage.unsure_bytes()).filter(|bytes| *bytes > 0)?;
    let message = format!(
        "replica has diverged: {path} was demoted with {} that its new source does not have, and the next sync to it overwrites them: \
         to look at them before, run \"dsync serve --read-only {path}\", or copy the disk",
        units::size(written)
    );
    Some(Problem { replica: Some(path.to_string()), ..Problem::of("diverged", message) })
}

/// A past that is asked for, and was given up: that is told for a day, and for as long as there is no other, unless another one is asked for.
fn of_past(known: &KnownReplica) -> Option<Problem> {
    let (path, given_up) = (known.path.display(), known.past.given_up.as_ref()?);
    let recent = units::elapsed(given_up.at, now().as_secs()).is_none_or(|age| age < 24 * 60 * 60);
    if !recent && !known.past.is_empty {
        return None;
    }
    let (left, ends) = match known.past.is_empty {
        true => (
            ", and none is kept since",
            "until the next sync that brings changes keeps a moment, and for a day at least",
        ),
        false => ("", "for a day; moments are kept again"),
    };
    let message = format!(
        "past is given up: what --keep had kept of {path} cannot be reached since {}{left}, because {}: if the reason is lack of space, free some \
         there or keep less; if it is a block that cannot be read, that disk is failing. This is reported {ends}; a sync with another --keep or --keep-last than before ends it now",
        device::moment(given_up.at),
        given_up.why
    );
    Some(Problem { replica: Some(path.to_string()), ..Problem::of("past-given-up", message) })
}

/// A past of which less is kept than is asked for.
fn of_short_past(known: &KnownReplica) -> Option<Problem> {
    let (path, lacks) = (known.path.display(), known.past.lacks?);
    let message = format!(
        "past is too short: moments of {path} up to {} were dropped for want of room, which --keep would keep: free some space there, or keep less. \
         This is reported until what is kept since is as much as is asked for",
        device::moment(lacks)
    );
    Some(Problem { replica: Some(path.to_string()), ..Problem::of("past-short", message) })
}

/// A replica that stands still at an earlier moment.
fn of_rewound(known: &KnownReplica) -> Option<Problem> {
    let path = known.path.display();
    let at = known.past.at.filter(|_| known.past.rewound && !known.is_source())?;
    let message = format!(
        "replica was rewound: {path} is of {}, to which \"dsync rewind\" has brought it, and no sync has come since: sync to it again, or promote it",
        device::moment(at)
    );
    Some(Problem { replica: Some(path.to_string()), ..Problem::of("rewound", message) })
}

/// Replicas that were to take over together, and cannot.
fn of_apart(apart: &DividedGroup) -> Problem {
    let DividedGroup { name, dir, why, in_part } = apart;
    let shown = dir.display();
    let way = match in_part {
        true => format!(
            "\"dsync promote --group {shown}\" completes a promotion of all of them that was interrupted; else make the promoted one a replica \
             again, with \"dsync demote\""
        ),
        false => {
            format!(
                "\"dsync sync {} DIR\" where the sources are brings them to one",
                machine_name::as_source(name)
            )
        }
    };
    let message = format!(
        "group cannot be promoted: the replicas of the group {name} in {shown} are not of one moment, because {why}: {way}"
    );
    Problem { replica: Some(dir.display().to_string()), ..Problem::of("apart", message) }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// What this host knows, as metrics, and what could not be read.
pub(crate) struct Metrics {
    pub text: String,
    errors: Vec<anyhow::Error>,
}

impl Metrics {
    /// Reads all of it.
    ///
    /// # Errors
    /// If the state directory cannot be read at all.
    pub(crate) fn read(state: &StateDir) -> Result<Metrics> {
        let found = Inventory::read(None, state)?;
        let mut out = Exposition::default();
        found.sources.iter().for_each(|source| add_source(source, &mut out));
        found.replicas.iter().for_each(|known| add_local(&LocalReplica::of(known), &mut out));
        found.copies.iter().for_each(|copy| add_copy(copy, &mut out));
        for JudgedJob { job, command, failed, .. } in &found.jobs {
            let labels = [("job", job.as_str()), ("command", *command)];
            out.add(Metric::JobFailing, &labels, u64::from(failed.is_some()));
        }
        out.add(Metric::Errors, &[], found.errors.len());
        Ok(Metrics { text: out.text(), errors: found.errors })
    }
}

/// What a host knows of its source, and of the replicas of that.
fn add_source(source: &SourceStatus, out: &mut Exposition) {
    let (path, id) = (source.path.display().to_string(), source.uuid.to_string());
    let labels = [("source", path.as_str()), ("source_id", &id)];
    if let Some(epoch) = source.epoch {
        out.add(Metric::SourceEpoch, &labels, epoch);
        // What the disk of a machine has lost is known as it is synced.
        if source.machine().is_none() {
            out.add(Metric::SourceTracking, &labels, u64::from(source.lost.is_none()));
        }
    }
    out.add(Metric::SourceTerm, &labels, source.term);
    for replica in &source.replicas {
        let (tally, labels) = (&replica.tally, [labels[0], labels[1], ("replica", &replica.replica)]);
        out.add(Metric::ReplicaEpoch, &labels, replica.epoch);
        out.add(Metric::ReplicaLastSuccess, &labels, replica.time);
        let lag = replica.lag(now().as_secs());
        out.add(Metric::ReplicaLag, &labels, lag.map_or("+Inf".to_owned(), |lag| lag.to_string()));
        if let Some(blocks) = replica.blocks {
            out.add(Metric::ReplicaLacks, &labels, blocks.saturating_mul(source.block_size.into()));
        }
        out.add(Metric::ReplicaSyncs, &labels, tally.syncs);
        out.add(Metric::ReplicaFailures, &labels, tally.failures);
        out.add(Metric::ReplicaSent, &labels, tally.bytes_sent);
        if let Some(ms) = tally.freeze_ms {
            out.add(Metric::ReplicaFreeze, &labels, Duration::from_millis(ms).as_secs_f64());
        }
        if let Some(verified) = &tally.verified {
            let differing = if verified.repaired { 0 } else { verified.bytes_differing };
            out.add(Metric::ReplicaLastVerify, &labels, verified.time);
            out.add(Metric::ReplicaDiffering, &labels, differing);
        }
        for what in ["sync", "mirror", "verify"] {
            let [source, id, replica_label] = labels;
            let is_it = replica.work().is_some_and(|work| work.what == what);
            out.add(Metric::ReplicaWork, &[source, id, replica_label, ("command", what)], u64::from(is_it));
        }
    }
}

/// What a host knows of a replica that it has.
fn add_local(local: &LocalReplica<'_>, out: &mut Exposition) {
    let path = local.path.display().to_string();
    let id = local.source.map(|id| id.to_string()).unwrap_or_default();
    let labels = [("replica", path.as_str()), ("source_id", &id)];
    for state in STATES {
        out.add(
            Metric::LocalState,
            &[labels[0], labels[1], ("state", state)],
            u64::from(state == local.state),
        );
    }
    for role in ROLES {
        out.add(Metric::LocalRole, &[labels[0], labels[1], ("role", role)], u64::from(role == local.role));
    }
    if let Some(epoch) = local.epoch {
        out.add(Metric::LocalEpoch, &labels, epoch);
    }
    if let Some(written) = local.written {
        out.add(Metric::LocalTerm, &labels, local.term);
        out.add(Metric::LocalCommitted, &labels, written);
    }
    out.add(Metric::LocalUnsure, &labels, local.unsure);
    out.add(Metric::LocalAhead, &labels, u64::from(local.ahead));
}

/// Whether a copy was ever complete that a job is to make.
fn add_copy(copy: &JobCopy, out: &mut Exposition) {
    let JobCopy { job, command, source, replica, .. } = copy;
    let labels = [("job", job.as_str()), ("command", command), ("source", source), ("replica", replica)];
    out.add(Metric::JobCopied, &labels, u64::from(copy.made));
}

/// Prints metrics. Returns the exit code.
pub(crate) fn prometheus(state: &StateDir, output: &Output) -> Result<u8> {
    let metrics = Metrics::read(state)?;
    let mut stdout = std::io::stdout().lock();
    let printed = stdout.write_all(metrics.text.as_bytes()).and_then(|()| stdout.flush());
    // A part would be taken for the whole.
    printed.context("cannot print the metrics")?;
    for error in &metrics.errors {
        output.error(&failure::text(error), failure::FAILED);
    }
    Ok(if metrics.errors.is_empty() { 0 } else { failure::FAILED })
}
