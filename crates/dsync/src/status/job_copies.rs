//! What the jobs of this host are to do, and did last, for monitors. A copy that never began leaves no trace but its job: the unit was not
//! started, or failed from its first second on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use replica::KnownReplica;
use source::{Bookmarks, FetchedCopy, JobEnd, JobRecord, StateDir};
use sync::Site;

use crate::args::{Cli, Command};
use crate::jobs::job;
use crate::reach::location::{Ends, Location};
use crate::status::SourceStatus;
use crate::status::local;
use crate::terms::machine_name::{self, MachineWord};

/// Where the units of a host keep their state.
const STATE: &str = "/var/lib/dsync";

/// A copy that a job is to make.
#[derive(Debug)]
pub(crate) struct JobCopy {
    pub job: String,
    /// `sync` or `mirror`.
    pub command: &'static str,
    /// The path of the source; what the job calls it, where that is not known here or is on another host.
    pub source: String,
    /// The replica, as its source remembers it; its path, where the source is on another host.
    pub replica: String,
    /// It was complete once.
    pub made: bool,
    /// It has begun, so what is known of it says how it is.
    pub begun: bool,
    /// Of a replica that is fetched from another host: how that went.
    pub fetch: Option<Fetch>,
    /// Of a mirror: how far it may fall behind.
    pub rpo: Option<Duration>,
    /// The source was a replica before: what was copied from it in an earlier term, it does not know.
    pub took_over: bool,
    /// The failure of its job that stands.
    pub failed: Option<JobEnd>,
}

/// A job of this host, and how its last attempts went.
#[derive(Debug)]
pub(crate) struct JudgedJob {
    pub job: String,
    pub command: &'static str,
    /// The failure that stands.
    pub failed: Option<JobEnd>,
    pub subjects: Vec<JobSubject>,
}

/// A source that a job is about, and its replica if there is one, as problems name them.
pub(crate) type JobSubject = (PathBuf, Option<String>);

/// The jobs of this host.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    pub copies: Vec<JobCopy>,
    /// Those that are judged: not one that waits until its source is one again.
    pub judged: Vec<JudgedJob>,
    /// What is wrong with those that cannot be run.
    pub errors: Vec<anyhow::Error>,
}

/// A copy that this host fetches from another one, which alone knows how old it is otherwise.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// When the last one came to its end, in seconds since 1970.
    pub time: Option<u64>,
}

impl Fetch {
    /// How fetching went from the source that the job names now, which is not known to be the one of before, and whether that copy was
    /// ever complete.
    fn of(
        (source, replica): (&str, &str),
        here: Option<&KnownReplica>,
        record: Option<&JobRecord>,
        state: &StateDir,
    ) -> (Fetch, bool) {
        let has_epoch = here.and_then(|here| here.lineage.as_ref()?.epoch).is_some();
        let is_of = |record: &JobRecord| record.fetched.as_ref()?.is_of(source, replica);
        // One that was made by hand, of which there is no record, is only judged by itself and by the job's last run. It
        // is another source's if a record says that the replica was fetched from that.
        let all: Vec<bool> = JobRecord::all(&state.jobs_folder()).iter().filter_map(is_of).collect();
        let made = has_epoch && (all.contains(&true) || all.is_empty());
        let committed = here.and_then(|here| here.written).map(|nanoseconds| nanoseconds / 1_000_000_000);
        let own = record.filter(|record| is_of(record) == Some(true));
        let own = own.and_then(|record| record.fetched.as_ref()).map(|fetched| fetched.time);
        (Fetch { time: own.max(committed.filter(|_| made)) }, made)
    }
}

/// What is known of sources and replicas.
pub(crate) struct Known<'a> {
    pub sources: Vec<&'a SourceStatus>,
    /// All replicas of this host.
    pub replicas: &'a [KnownReplica],
    /// There may be other sources: one was asked for.
    pub is_part: bool,
}

impl Known<'_> {
    /// True if this, which may be called by the name of its export, is a replica here that was a source once: its lineage says that it was
    /// demoted, or that there was a promotion since.
    fn was_source(&self, named: &str) -> bool {
        let path = local::path_of(named).ok();
        let is_it = |replica: &&KnownReplica| {
            Some(&replica.path) == path.as_ref() || source::export_name(&replica.path) == named
        };
        let mut replicas = self.replicas.iter().filter(is_it);
        let was = |lineage: &replica::Lineage| {
            lineage.source.is_some() && (lineage.role.demoted.is_some() || lineage.role.term > 1)
        };
        replicas.any(|replica| replica.lineage.as_ref().is_some_and(was))
    }

    /// True if the sources of this group were demoted: its job waits for the day on which they are sources again.
    fn is_demoted(&self, group: &str, state: &StateDir) -> Result<bool> {
        let endings = state.endings()?;
        let mut paths =
            endings.iter().filter(|ended| ended.group == group).flat_map(|ended| ended.members.keys());
        Ok(paths.any(|path| self.was_source(&path.to_string_lossy())))
    }
}

/// What a job copies.
struct Aim<'a> {
    command: &'static str,
    /// A source, or the name of a group or a machine.
    source: &'a str,
    /// Its replica, or the folder of those of the group.
    destination: &'a str,
    is_group: bool,
    rpo: Option<Duration>,
}

impl<'a> Aim<'a> {
    /// The machine whose disks are copied.
    fn machine(&self) -> Option<MachineWord<'a>> {
        MachineWord::read(self.source).filter(|_| self.is_group)
    }

    /// True if the members of this group are copied.
    fn is_of(&self, group: &str, state: &StateDir) -> bool {
        let is_its = |named: MachineWord<'_>| machine_name::is_group_of(&named.name(state), group);
        self.machine().map_or(group == self.source, is_its)
    }

    /// `None` for a job that copies nothing.
    fn of(cli: &'a Cli) -> Option<Aim<'a>> {
        let rpo = if let Command::Mirror(args) = &cli.command { Some(args.rpo) } else { None };
        let (command, source, destination, group) = match &cli.command {
            Command::Sync(args) if !args.dry_run => ("sync", &args.source, &args.destination, &args.group),
            Command::Mirror(args) => ("mirror", &args.source, &args.destination, &args.group),
            _ => return None,
        };
        match (group, destination) {
            // With a group, the one place is the folder of the replicas.
            (Some(group), _) => {
                Some(Aim { command, source: group, destination: source, is_group: true, rpo })
            }
            (None, Some(destination)) => {
                let is_group = MachineWord::read(source).is_some();
                Some(Aim { command, source, destination, is_group, rpo })
            }
            (None, None) => None,
        }
    }
}

/// The jobs of this host that have this state directory.
///
/// With `what`, those alone that are about this source, or this replica on this host.
pub(crate) fn all(known: &Known<'_>, state: &StateDir, what: Option<&str>) -> Jobs {
    let mut found = Jobs::default();
    let is_here = |named: Option<&Path>| same(&state_of(named), state.path());
    let jobs = job::all(&job::usual_folder()).unwrap_or_else(|error| {
        found.errors.extend(is_here(None).then_some(error));
        Vec::new()
    });
    for job in jobs.into_iter().filter(|job| is_here(job.state.as_deref())) {
        let name = job.name;
        if let Err(error) = job.cli.and_then(|cli| found.add(&name, &cli, known, state)) {
            found.errors.push(error.context(format!("cannot run job {name}")));
        }
    }
    if let Some(what) = what {
        let is_here = |replica: &str| replica.starts_with('/') && is_meant(replica, what);
        found.copies.retain(|copy| is_meant(&copy.source, what) || is_here(&copy.replica));
        // Also by the name of its export.
        let path = state.source(what).ok().flatten().map(|(_, about)| about.path);
        found.judged.retain(|job| {
            let is_its = |(source, replica): &JobSubject| {
                is_meant(&source.to_string_lossy(), what)
                    || path.as_ref() == Some(source)
                    || replica.as_deref().is_some_and(is_here)
            };
            job.subjects.iter().any(is_its)
        });
    }
    found
}

impl Jobs {
    /// Adds what a job is to do, and how it failed.
    fn add(&mut self, name: &str, cli: &Cli, known: &Known<'_>, state: &StateDir) -> Result<()> {
        let record = JobRecord::read(&state.jobs_folder(), name);
        let mut copies = of_job(name, cli, known, record.as_ref(), state)?;
        let (command, is_service, mut subjects) = subjects(cli, state)?;
        let failed = record.filter(|record| !(is_service && record.is_running()));
        let failed = failed.and_then(|record| record.standing());
        copies.iter_mut().for_each(|copy| copy.failed = failed.clone());
        if Aim::of(cli).is_none() || !copies.is_empty() {
            let copied = copies.iter().map(|copy| (copy.source.clone().into(), Some(copy.replica.clone())));
            subjects.extend(copied);
            self.judged.push(JudgedJob { job: name.to_owned(), command, failed, subjects });
        }
        self.copies.extend(copies);
        Ok(())
    }
}

/// The command of a job, whether it is a service, and what it is about beside copies that it makes.
fn subjects(cli: &Cli, state: &StateDir) -> Result<(&'static str, bool, Vec<JobSubject>)> {
    let path = |named: &str| match state.source(named) {
        Ok(Some((_, about))) => about.path,
        _ => local::path_of(named).unwrap_or_else(|_| named.into()),
    };
    Ok(match &cli.command {
        Command::Sync(_) => ("sync", false, Vec::new()),
        Command::Mirror(_) => ("mirror", true, Vec::new()),
        Command::Verify(args) if MachineWord::read(&args.source).is_none() => {
            let ends = Ends::parse(&args.source, &args.destination)?;
            let replica = remembered(&ends.destination)?;
            ("verify", false, vec![(path(&args.source), Some(replica))])
        }
        Command::Verify(_) => ("verify", false, Vec::new()),
        Command::Serve(args) => {
            let images = args.images.iter().map(|image| (path(&image.to_string_lossy()), None));
            ("serve", true, images.collect())
        }
        Command::Receive(_) => ("receive", true, Vec::new()),
        Command::Send(_) => ("send", true, Vec::new()),
        _ => ("rehearse", false, Vec::new()),
    })
}

/// Where a job keeps its state. A folder of jobs that is named has the state directory that is named with it.
fn state_of(own: Option<&Path>) -> PathBuf {
    let usual = (!job::is_folder_named()).then_some(Path::new(STATE));
    StateDir::find(own.or(usual)).path().to_path_buf()
}

fn same(a: &Path, b: &Path) -> bool {
    let whole = |path: &Path| local::path_of(&path.to_string_lossy()).ok();
    whole(a) == whole(b)
}

fn is_meant(name: &str, what: &str) -> bool {
    name == what || same(Path::new(name), Path::new(what))
}

/// The copies that one job is to make.
fn of_job(
    name: &str,
    cli: &Cli,
    known: &Known<'_>,
    record: Option<&JobRecord>,
    state: &StateDir,
) -> Result<Vec<JobCopy>> {
    let Some(aim) = Aim::of(cli) else { return Ok(Vec::new()) };
    let copy = |source: &str, replica: &str| JobCopy {
        job: name.to_owned(),
        command: aim.command,
        source: source.to_owned(),
        replica: replica.to_owned(),
        made: false,
        begun: false,
        fetch: None,
        rpo: aim.rpo,
        took_over: false,
        failed: None,
    };
    if aim.is_group {
        let folder = Location::folder(aim.destination)?;
        let is_member = |source: &&&SourceStatus| {
            source.group.as_ref().is_some_and(|group| aim.is_of(&group.name, state))
        };
        let mut copies = Vec::new();
        for member in known.sources.iter().filter(is_member) {
            let path = member.path.display().to_string();
            let file = member.group.as_ref().and_then(|group| group.file.clone());
            let replica = folder.within(Path::new(&file.unwrap_or_else(|| source::file_name(&member.path))));
            copies.extend(of_source(copy(&path, &remembered(&replica)?), &path, known, state));
        }
        return Ok(match copies.is_empty() && !known.is_part && !known.is_demoted(aim.source, state)? {
            true => {
                let kind = if aim.machine().is_some() { "" } else { "group " };
                vec![copy(&format!("{kind}{}", aim.source), &folder.name)]
            }
            false => copies,
        });
    }
    let ends = Ends::parse(aim.source, aim.destination)?;
    let replica = remembered(&ends.destination)?;
    let copy = copy(aim.source, &replica);
    if ends.source.host.is_some() {
        // The replica is on this host, and knows itself how it is.
        let here = known.replicas.iter().find(|here| here.path == Path::new(&replica));
        let (fetch, made) = Fetch::of((aim.source, &replica), here, record, state);
        // It is another source's otherwise.
        let begun =
            here.is_some_and(|here| made || here.lineage.as_ref().is_none_or(|of| of.epoch.is_none()));
        return Ok(vec![JobCopy { made, begun, fetch: Some(fetch), ..copy }]);
    }
    Ok(of_source(copy, aim.source, known, state).into_iter().collect())
}

/// The name under which its source remembers a replica.
pub(crate) fn remembered(replica: &Location) -> Result<String> {
    let (path, name) = replica.place()?;
    Ok(match replica.host {
        Some(_) => name,
        None => local::path_of(&path.to_string_lossy())?.display().to_string(),
    })
}

/// A copy of a source on this host. `None` if nothing can be said of it: the source cannot be read, which is reported by itself, or it
/// is a replica now, so that the job waits for the day on which it is the source again.
fn of_source(copy: JobCopy, named: &str, known: &Known<'_>, state: &StateDir) -> Option<JobCopy> {
    let Ok(Some((place, about))) = state.source(named) else {
        return (!known.was_source(named)).then_some(copy);
    };
    let source =
        known.sources.iter().find(|source| source.uuid == about.uuid && source.path == about.path)?;
    // It may have been copied to by another name of the same replica.
    let bookmarks = device::Dir::existing(&place).ok().and_then(|folder| Bookmarks::read(&folder).ok());
    let known = bookmarks.as_ref().and_then(|known| known.named(&copy.replica)).map(|(name, _)| name);
    let replica = known.unwrap_or(&copy.replica).clone();
    let made = source.replicas.iter().any(|known| known.replica == replica);
    let begun = source.first_copies.iter().any(|tally| tally.replica == replica);
    let (path, took_over) = (about.path.display().to_string(), source.term > 1);
    Some(JobCopy { source: path, replica, made, begun, took_over, ..copy })
}

/// What a job has fetched from another host, if this is such a one.
pub(crate) fn fetched(cli: &Cli) -> Option<FetchedCopy> {
    let aim = Aim::of(cli).filter(|aim| !aim.is_group)?;
    let ends = Ends::parse(aim.source, aim.destination).ok().filter(|ends| ends.source.host.is_some())?;
    Some(FetchedCopy::now(aim.source, &remembered(&ends.destination).ok()?))
}
