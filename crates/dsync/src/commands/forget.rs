//! `dsync forget`: removes a source, a replica, or a bookmark.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use replica::{Condition, KnownReplica, KnownReplicas, Replica, ReplicaError};
use serde::Serialize;
use source::{Bookmarks, SourceError, SourceMetadata, StateDir, Tally, Work};

use crate::args;
use crate::failure::Failure;
use crate::output::Output;
use crate::status::local;

/// What was forgotten.
#[derive(Serialize)]
struct Forgotten<'a> {
    kind: &'static str,
    path: &'a Path,
    bookmark: Option<&'a str>,
    /// What it costs, as text.
    cost: String,
    dry_run: bool,
}

impl Forgotten<'_> {
    fn say(&self, output: &Output) {
        let done = if self.dry_run { "would be forgotten" } else { "forgotten" };
        let path = self.path.display();
        let what = match self.bookmark {
            Some(bookmark) => format!("{bookmark} of {path}"),
            None => format!("{} {path}", self.kind),
        };
        output.say(&format!("{what} {done}: {}", self.cost));
        output.summary(self);
    }
}

/// Forgets what the arguments name.
pub(crate) fn run(args: &args::Forget, state: &StateDir, output: &Output) -> Result<()> {
    if let Some(name) = &args.bookmark {
        return bookmark(&args.what, name, args.dry_run, state, output);
    }
    if let Some(name) = &args.group {
        return group(name, &args.what, args.dry_run, state, output);
    }
    match state.source(&args.what)? {
        Some((place, about)) if args.journal_dir.is_none() && !args.replica => {
            if is_replica(&args.what, state) {
                refuse_both(&args.what, &about)?;
                replica(&args.what, None, args.dry_run, state, output)?;
            }
            source(&place, &about, args.dry_run, state, output)
        }
        _ => {
            replica(&args.what, args.journal_dir.as_deref(), args.dry_run, state, output)?;
            say_listed(&local::path_of(&args.what)?, state, output)
        }
    }
}

/// Takes a source or a replica out of its group.
fn group(name: &str, what: &str, dry_run: bool, state: &StateDir, output: &Output) -> Result<()> {
    let (path, options) = (device::absolute(what)?, sync::open_options(None, state));
    let known = state.source(what)?;
    let lineage = if known.is_none() { replica::inspect(&path, &options)? } else { None };
    let is_member = lineage.and_then(|lineage| lineage.group).is_some_and(|group| group.name == name);
    let (path, cost) = if is_member {
        if !dry_run {
            Replica::open(&path, &options)?.leave_group()?;
        }
        let cost = "it is promoted, rewound and synced by itself; the next \"dsync sync --group\" to it takes it in again";
        (path, cost)
    } else {
        let (place, about) = crate::reach::source::known(what, state)?;
        if !dry_run {
            source::leave_group(&place, &about, name)?;
        }
        let cost = "its replica stays as it is, and the next \"dsync sync --group\" does without it; \"dsync forget\" of the replica takes it out of \
                    those that are promoted together";
        (about.path, cost)
    };
    Forgotten { kind: "membership", path: &path, bookmark: Some(name), cost: cost.into(), dry_run }
        .say(output);
    Ok(())
}

fn is_replica(what: &str, state: &StateDir) -> bool {
    let options = sync::open_options(None, state);
    let lineage = device::absolute(what).map(|path| replica::inspect(&path, &options));
    lineage.is_ok_and(|lineage| lineage.is_ok_and(|lineage| lineage.is_some()))
}

/// Refuses a path that is a source and a replica: one was meant, and the other is not to be lost. Of a disk that is gone, neither is of use.
fn refuse_both(what: &str, about: &SourceMetadata) -> Result<()> {
    if device::is_there(&about.path) {
        bail!(Failure::refused(format!(
            "{what} is a source and a replica: run \"dsync forget --replica {what}\" to forget that it is a replica, or \"dsync forget \
             {}\" to forget the source",
            about.uuid
        )));
    }
    Ok(())
}

/// Forgets a source.
pub(crate) fn source(
    place: &Path,
    about: &SourceMetadata,
    dry_run: bool,
    state: &StateDir,
    output: &Output,
) -> Result<()> {
    let bookmarks = Bookmarks::read(&device::Dir::existing(place)?)?;
    let names = |names: Vec<&String>| names.into_iter().cloned().collect::<Vec<_>>().join(", ");
    let replicas = names(bookmarks.replicas().map(|(name, _)| name).collect());
    let readers = names(bookmarks.checkpoints().map(|(name, _)| name).collect());
    let mut cost = Vec::new();
    if !replicas.is_empty() {
        cost.push(format!(
            "its replicas ({replicas}) lose their source: the next \"dsync sync\" to each needs --adopt and compares everything"
        ));
    }
    if !readers.is_empty() {
        cost.push(format!("the readers of its checkpoints ({readers}) must read everything the next time"));
    }
    if cost.is_empty() {
        cost.push("no replica and no checkpoint depends on it".into());
    }
    if !dry_run {
        source::forget_source(state, place, about)?;
    } else if let Some(first) = source::in_use(place, about)? {
        cost.push(first);
    }
    Forgotten { kind: "source", path: &about.path, bookmark: None, cost: cost.join("; "), dry_run }
        .say(output);
    Ok(())
}

/// Forgets the bookmark of a replica, or a named checkpoint.
pub(crate) fn bookmark(
    what: &str,
    name: &str,
    dry_run: bool,
    state: &StateDir,
    output: &Output,
) -> Result<()> {
    let (place, about) = crate::reach::source::known(what, state)?;
    let bookmarks = Bookmarks::read(&device::Dir::existing(&place)?)?;
    let begun: Vec<String> =
        Tally::all(&place).into_iter().filter(Tally::is_first_copy).map(|tally| tally.replica).collect();
    let is_remembered =
        |name: &str| bookmarks.named(name).is_some() || begun.iter().any(|known| known == name);
    // A replica on this host is remembered by its path without links.
    let path = local::path_of(name).ok().map(|path| path.display().to_string());
    let name = match path.as_deref().filter(|path| is_remembered(path)) {
        Some(path) if !is_remembered(name) => path,
        _ => name,
    };
    let is_remembered = is_remembered(name);
    let is_known = bookmarks.named(name).is_some();
    let name = bookmarks.named(name).map_or(name, |(key, _)| key);
    let work = Tally::read(&place, name).work.filter(Work::is_alive);
    if let Some(work) = work {
        bail!(Failure::busy(format!(
            "a {} to {name} is under way (process {}): stop it first",
            work.what, work.mark.process
        )));
    }
    if is_remembered && !source::is_plain(name) {
        remains(&about, name, dry_run, state, output)?;
    }
    if !dry_run {
        source::forget_bookmark(&place, &about, name)?;
    } else if !is_remembered {
        bail!(SourceError::Unknown(format!(
            "{} has no checkpoint or replica \"{name}\": \"dsync status {0}\" lists them",
            about.path.display()
        )));
    }
    let cost = match source::is_plain(name) {
        true => "its reader must read everything the next time",
        false if !is_known && Path::new(name).is_relative() && !device::is_export(Path::new(name)) => {
            "its first copy was never completed; \"dsync forget\" of it where it is removes what has come of it"
        }
        false if !is_known => "its first copy was never completed",
        false => "after the history is compacted, the next sync of that replica compares all of it",
    };
    let (kind, cost) = ("bookmark", cost.into());
    Forgotten { kind, path: &about.path, bookmark: Some(name), cost, dry_run }.say(output);
    Ok(())
}

/// Forgets what a source had here and no disk of it is left: a first copy that did not end, or a replica that is gone.
fn remains(
    source: &SourceMetadata,
    name: &str,
    dry_run: bool,
    state: &StateDir,
    output: &Output,
) -> Result<()> {
    let known = sync::known_replicas(state);
    let is_its = |replica: &KnownReplica| {
        let lineage = replica.lineage.as_ref();
        let follows = lineage.and_then(|it| it.source.or(Some(it.step.as_ref()?.toward.source)));
        let never = |lineage: &replica::Lineage| lineage.epoch.is_none() && lineage.role.demoted.is_none();
        replica.path == Path::new(name)
            && follows.is_none_or(|follows| follows == source.uuid)
            && match replica.condition {
                Condition::Missing => true,
                Condition::Incomplete => lineage.is_none_or(never),
                _ => false,
            }
    };
    if !known.all()?.iter().any(is_its) {
        return Ok(());
    }
    let folder = known.folder_of(Path::new(name))?;
    replica(name, folder.as_deref(), dry_run, state, output)
}

fn replica(
    what: &str,
    folder: Option<&Path>,
    dry_run: bool,
    state: &StateDir,
    output: &Output,
) -> Result<()> {
    let path: PathBuf = device::absolute(what)?;
    let options = sync::open_options(folder, state);
    let (known, listed) = (sync::known_replicas(state), local::path_of(what)?);
    let lineage = replica::inspect(&path, &options).unwrap_or(None);
    if lineage.is_none() {
        if known.lists(&listed)? {
            return missing(&known, &listed, dry_run, output);
        }
        if let Some(folder) = known.away(&listed)? {
            return away(&listed, &folder, &options, dry_run, output);
        }
        bail!(SourceError::Unknown(format!(
            "{what} is neither a known source nor a replica on this host: \"dsync status\" lists both"
        )));
    }
    let is_gone = !device::is_there(&path);
    // Opened, what is gone knows nothing of its moments.
    let kept_of_gone = is_gone.then(|| replica::history(&path, &options)).transpose();
    // Opening it completes an interrupted commit, so that the file that stays is consistent if possible. What others have written to it
    // stays, too.
    let open =
        |adopt| Replica::open(&path, &replica::ReplicaOptions { doubt: true, adopt, ..options.clone() });
    let replica = match open(false) {
        // What would say whether a commit is to be completed is lost: it stays as it was before that.
        Err(ReplicaError::Away(_) | ReplicaError::Damaged { .. }) if device::is_there(&path) => {
            // What was to be committed is dropped by that.
            if dry_run {
                return forgotten(&path, "remains as it is", 0, true, output);
            }
            open(true)?
        }
        opened => opened?,
    };
    let status = replica.status();
    let kept = match status.epoch {
        _ if status.state == replica::State::Incomplete => "remains incomplete".to_owned(),
        Some(epoch) => format!("remains as it is, at epoch {}", epoch.number),
        None => "remains as it is".to_owned(),
    };
    let history = kept_of_gone.and_then(|kept| kept.map_or_else(|| replica.history(), Ok));
    let moments = history.map_or(0, |history| history.moments.len());
    if !dry_run {
        replica.disown()?;
        known.remove(&listed)?;
    }
    if is_gone {
        let cost =
            format!("it has no file, and a \"dsync sync\" to it begins a new replica{}", lost_past(moments));
        Forgotten { kind: "replica", path: &path, bookmark: None, cost, dry_run }.say(output);
        return Ok(());
    }
    forgotten(&path, &kept, moments, dry_run, output)
}

/// Says which sources of this host remember a replica that is forgotten.
fn say_listed(path: &Path, state: &StateDir, output: &Output) -> Result<()> {
    for (place, about) in state.survey()?.sources {
        let bookmarks = Bookmarks::read(&device::Dir::existing(&place)?)?;
        if bookmarks.replicas().any(|(name, _)| Path::new(name) == path) {
            let (source, replica) = (about.path.display(), path.display());
            output.say(&format!("{source} still lists it: \"dsync forget {source} {replica}\" ends that"));
        }
    }
    Ok(())
}

/// Says that a replica is forgotten, and what becomes of its file and of the moments that are kept.
fn forgotten(path: &Path, state: &str, moments: usize, dry_run: bool, output: &Output) -> Result<()> {
    let past = lost_past(moments);
    let cost = format!(
        "the file {state}; the next \"dsync sync\" to it needs --adopt and compares everything{past}"
    );
    Forgotten { kind: "replica", path, bookmark: None, cost, dry_run }.say(output);
    Ok(())
}

fn lost_past(moments: usize) -> &'static str {
    match moments {
        0 => "",
        1 => "; the moment kept by --keep is lost",
        _ => "; the moments kept by --keep are lost",
    }
}

/// Forgets a replica on a device that is away.
fn away(
    path: &Path,
    folder: &Path,
    options: &replica::ReplicaOptions,
    dry_run: bool,
    output: &Output,
) -> Result<()> {
    let options = replica::ReplicaOptions { folder: Some(folder.to_path_buf()), ..options.clone() };
    let moments = replica::history(path, &options).map_or(0, |history| history.moments.len());
    if !dry_run {
        KnownReplicas::forget_state(folder)?;
    }
    let past = lost_past(moments);
    let cost = format!(
        "its disk is not attached; if it comes back, the next \"dsync sync\" to it needs --adopt and compares everything{past}"
    );
    Forgotten { kind: "replica", path, bookmark: None, cost, dry_run }.say(output);
    Ok(())
}

/// Forgets a replica of which nothing but its entry in the list is left.
fn missing(known: &KnownReplicas, path: &Path, dry_run: bool, output: &Output) -> Result<()> {
    if !dry_run {
        known.remove(path)?;
    }
    let cost =
        "it is missing, and is no longer listed; if it comes back, the next \"dsync sync\" lists it again";
    Forgotten { kind: "replica", path, bookmark: None, cost: cost.into(), dry_run }.say(output);
    Ok(())
}
