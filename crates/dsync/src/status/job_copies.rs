//! The copies that the jobs of this host are to make, for monitors. One that never began leaves no trace but its job: the unit was not
//! started, or failed from its first second on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use replica::KnownReplica;
use source::{LastFailure, StateDir, Tally};
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
    /// The folder of the source.
    place: Option<PathBuf>,
}

/// A copy that this host fetches from another one, which alone knows how old it is otherwise.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// Names the copy: its source, as the job calls it, and the replica.
    name: String,
    /// When the last one came to its end, in seconds since 1970.
    pub time: Option<u64>,
    /// The last attempt failed.
    pub failed: Option<LastFailure>,
}

impl Fetch {
    fn name(source: &str, replica: &str) -> String {
        format!("{source} {replica}")
    }

    /// How fetching went from the source that the job names now, which is not known to be the one of before, and whether that copy was
    /// ever complete.
    fn of(source: &str, replica: &str, here: Option<&KnownReplica>, state: &StateDir) -> (Fetch, bool) {
        let name = Fetch::name(source, replica);
        let Tally { syncs, failed, fetched, .. } = Tally::read(&state.fetches_folder(), &name);
        let has_epoch = here.and_then(|here| here.lineage.as_ref()?.epoch).is_some();
        // One that was made by hand, of which there is no record, is only judged by itself and by the job's last run. It
        // is another source's if a record says that the replica was fetched from that.
        let of_replica = format!(" {replica}");
        let is_recorded = |tally: &Tally| tally.syncs > 0 && tally.replica.ends_with(&of_replica);
        let is_of_another = || Tally::all(&state.fetches_folder()).iter().any(is_recorded);
        let made = has_epoch && (syncs > 0 || failed.is_none() || !is_of_another());
        let committed = here.and_then(|here| here.written).map(|nanoseconds| nanoseconds / 1_000_000_000);
        let failed =
            failed.filter(|failed| syncs == 0 || fetched.is_none_or(|fetched| failed.time >= fetched));
        (Fetch { name, time: fetched.max(committed.filter(|_| made)), failed }, made)
    }
}

/// What is known of sources and replicas.
pub(crate) struct Known<'a> {
    pub sources: &'a [SourceStatus],
    /// All replicas of this host.
    pub replicas: &'a [KnownReplica],
    /// There may be other sources: one was asked for.
    pub is_part: bool,
}

impl Known<'_> {
    /// True if this, which may be called by the name of its export, is a replica here.
    fn is_replica(&self, named: &str) -> bool {
        let path = local::path_of(named).ok();
        let is_it = |replica: &&KnownReplica| {
            Some(&replica.path) == path.as_ref() || source::export_name(&replica.path) == named
        };
        let mut replicas = self.replicas.iter().filter(is_it);
        replicas.any(|replica| replica.lineage.as_ref().is_some_and(|lineage| lineage.source.is_some()))
    }

    /// True if the sources of this group were demoted: its job waits for the day on which they are sources again.
    fn is_demoted(&self, group: &str, state: &StateDir) -> Result<bool> {
        let endings = state.endings()?;
        let mut paths =
            endings.iter().filter(|ended| ended.group == group).flat_map(|ended| ended.members.keys());
        Ok(paths.any(|path| self.is_replica(&path.to_string_lossy())))
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

/// The copies that the jobs of this host are to make with this state directory, and what is wrong with jobs that cannot be run.
///
/// With `what`, those alone that are about this source, or this replica on this host.
pub(crate) fn all(
    known: &Known<'_>,
    state: &StateDir,
    what: Option<&str>,
) -> (Vec<JobCopy>, Vec<anyhow::Error>) {
    let (mut copies, mut errors) = (Vec::new(), Vec::new());
    let folder = job::usual_folder();
    for (name, cli) in job::all(&folder) {
        let own = cli.as_ref().ok().and_then(|cli| cli.state_dir.as_deref());
        if !same(&state_of(own), state.path()) {
            continue;
        }
        match cli.and_then(|cli| of_job(&name, &cli, known, state)) {
            Ok(mine) => copies.extend(mine),
            Err(error) => errors.push(error.context(format!("cannot run job {name}"))),
        }
    }
    if let Some(what) = what {
        let is_here = |copy: &JobCopy| copy.replica.starts_with('/') && is_meant(&copy.replica, what);
        copies.retain(|copy| is_meant(&copy.source, what) || is_here(copy));
    }
    (copies, errors)
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
fn of_job(name: &str, cli: &Cli, known: &Known<'_>, state: &StateDir) -> Result<Vec<JobCopy>> {
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
        place: None,
    };
    if aim.is_group {
        let folder = Location::folder(aim.destination)?;
        let is_member =
            |source: &&SourceStatus| source.group.as_ref().is_some_and(|group| aim.is_of(&group.name, state));
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
        let (fetch, made) = Fetch::of(aim.source, &replica, here, state);
        // It is another source's otherwise.
        let begun = here.is_some() && (made || fetch.failed.is_none());
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
        return (!known.is_replica(named)).then_some(copy);
    };
    let source =
        known.sources.iter().find(|source| source.uuid == about.uuid && source.path == about.path)?;
    let made = source.replicas.iter().any(|replica| replica.replica == copy.replica);
    let begun = source.first_copies.iter().any(|tally| tally.replica == copy.replica);
    let (path, took_over) = (about.path.display().to_string(), source.term > 1);
    Some(JobCopy { source: path, made, begun, took_over, place: Some(place), ..copy })
}

/// Keeps why the job that this process runs has failed, of copies that never began: there is nothing else that would show it.
pub(crate) fn record(message: &str, state: &StateDir) -> Result<()> {
    let Some(job) = job::running() else { return Ok(()) };
    let message = &message.replace('\n', " ");
    let cli = job.read_again()?;
    let sources = state.survey()?.sources.into_iter();
    let sources: Vec<SourceStatus> =
        sources.filter_map(|(place, about)| Some(SourceStatus::read(&place, about).ok()?.0)).collect();
    let known = Known { sources: &sources, replicas: &sync::known_replicas(state).all()?, is_part: false };
    let copies = of_job(job.name(), &cli, &known, state)?;
    for fetch in copies.iter().filter_map(|copy| copy.fetch.as_ref()) {
        Tally::fetch(&state.fetches_folder(), &fetch.name, Err(message));
    }
    for copy in copies.iter().filter(|copy| !copy.made && !copy.begun) {
        copy.place.iter().for_each(|place| Tally::fail_first(place, &copy.replica, message));
    }
    Ok(())
}

/// Keeps that the job that this process runs has fetched a replica.
pub(crate) fn succeeded(cli: &Cli, state: &StateDir) -> Result<()> {
    let (Some(_), Some(aim)) = (job::running(), Aim::of(cli)) else { return Ok(()) };
    if aim.is_group {
        return Ok(());
    }
    let ends = Ends::parse(aim.source, aim.destination)?;
    if ends.source.host.is_some() {
        let name = Fetch::name(aim.source, &remembered(&ends.destination)?);
        Tally::fetch(&state.fetches_folder(), &name, Ok(()));
    }
    Ok(())
}
