//! `dsync status` and `dsync recover`.

pub(crate) mod exposition;
pub(crate) mod job_copies;
pub(crate) mod local;
pub(crate) mod membership;
pub(crate) mod metrics;
pub(crate) mod monitor;
pub(crate) mod table;
pub(crate) mod watch;

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use extents::Bitmap;
use replica::State;
use serde::ser::Error as _;
use serde::{Serialize, Serializer};
use source::{
    Bookmark, Bookmarks, ControlClient, Gap, History, KeptClone, KnownPosition, LastFailure, LastVerify,
    ServerStatus, SourceError, SourceMetadata, StateDir, Tally, Work,
};
use sync::SyncError;

use crate::args;
use crate::commands::checkpoint::{self, Listed};
use crate::commands::track;
use crate::failure;
use crate::failure::Failure;
use crate::output::Output;
use crate::reach::location;
use crate::status::membership::{GroupInfo, say_groups};
use crate::terms::machine_name::{self, MachineWord};
use crate::terms::units;
use local::{LocalReplica, completion, made_elsewhere, say_readers};

/// What is known of a source.
///
/// More than fifteen fields: they are the keys of its JSON object, which is flat.
#[derive(Serialize)]
pub(crate) struct SourceStatus {
    kind: &'static str,
    pub path: std::path::PathBuf,
    pub uuid: uuid::Uuid,
    pub term: u64,
    /// The epoch at which that term began.
    began: Option<u64>,
    pub block_size: u32,
    pub size: Option<u64>,
    /// The size that its server offers, else that of its disk, else the one when it was last seen.
    #[serde(skip)]
    pub tracked: u64,
    /// The last epoch.
    pub epoch: Option<u64>,
    epochs: Vec<source::EpochInfo>,
    /// Why what was written since the last epoch is not known: the next sync compares, or is refused. `None` if it is known, and before the
    /// first epoch.
    #[serde(serialize_with = "gap_in_words")]
    pub lost: Option<Gap>,
    /// Nobody has asked to record what is written to it: an image that is compared now and then.
    #[serde(skip)]
    pub is_untracked: bool,
    /// What its clone takes, if it is an image that is tracked by clones.
    pub clone: Option<KeptClone>,
    /// The name that its last epoch was given by who told what changed up to it.
    moment: Option<String>,
    #[serde(serialize_with = "in_words")]
    pub served: Option<ServerStatus>,
    pub replicas: Vec<Lacking>,
    /// Replicas of which no copy was ever complete.
    pub first_copies: Vec<Tally>,
    /// The named checkpoints, as "dsync checkpoint --list" has them.
    checkpoints: Vec<Listed>,
    /// The group that it is in.
    pub group: Option<GroupInfo>,
}

fn gap_in_words<S: Serializer>(gap: &Option<Gap>, to: S) -> Result<S::Ok, S::Error> {
    gap.as_ref().map(Gap::to_string).serialize(to)
}

/// What a server says of itself, with why changes are not known in words.
fn in_words<S: Serializer>(served: &Option<ServerStatus>, to: S) -> Result<S::Ok, S::Error> {
    let mut value = serde_json::to_value(served).map_err(S::Error::custom)?;
    if let Some(why) = served.as_ref().and_then(|served| served.lost.as_ref()) {
        value["lost"] = why.to_string().into();
    }
    value.serialize(to)
}

/// A replica in its source's bookmarks.
#[derive(Serialize)]
pub(crate) struct Lacking {
    pub replica: String,
    pub epoch: u64,
    /// Seconds since 1970 when it was last brought up to date, or found to be so.
    pub time: u64,
    /// A mirror has brought it up to date since its epoch.
    pub mirrored: bool,
    /// Blocks that it lacks, of which a mirror may have brought it some; `None` if that is not known.
    pub blocks: Option<u64>,
    /// Blocks that it is known to lack where there may be more.
    pub blocks_at_least: u64,
    /// Why that is not known.
    pub why: Option<String>,
    /// Bytes that could not be read at its last sync: the next one sends them.
    pub unread: u64,
    /// It will be compared: what changed between its epoch and the last one is not known.
    pub compared: bool,
    /// It will be neither compared nor brought anything, until its user says that the source is one.
    #[serde(skip)]
    pub refused: bool,
    /// Nothing was written to the source since: by its record, or because it is as the last command has left it.
    #[serde(skip)]
    pub is_current: bool,
    /// What was done for it so far.
    pub tally: Tally,
}

impl Lacking {
    /// What is known of a replica: blocks that it lacks, and why there may be more; or why it will be compared. A mirror has brought it up to date as
    /// of `upto`, in seconds since 1970. `is_left`: what no record has is known by the disk, which is as the last command has left it.
    fn of(
        (replica, bookmark): (&str, &Bookmark),
        (lacking, known): (&Bitmap, Result<Option<&Gap>, SourceError>),
        (upto, is_left): (u64, bool),
        tally: Tally,
    ) -> Lacking {
        let refused = match &known {
            Err(SourceError::Lost { why, .. }) => Some(why),
            Ok(why) => *why,
            _ => None,
        };
        let refused = refused.is_some_and(|why| matches!(why, Gap::OtherContent(_)));
        let (blocks, why, compared) = match known {
            Err(why) => (None, Some(why.to_string()), true),
            Ok(Some(why)) => (None, Some(why.to_string()), false),
            Ok(None) => (Some(lacking.count()), None, false),
        };
        let blocks_at_least = if compared { 0 } else { lacking.count() };
        let Bookmark { epoch, time, unread, .. } = *bookmark;
        // What a mirror says is newer than a time that is still to come.
        let is_known = units::elapsed(time, table::now()).is_some();
        let mirrored = upto > time || (upto > 0 && !is_known);
        Lacking {
            replica: replica.to_owned(),
            epoch: epoch.number,
            time: if mirrored { upto } else { time },
            mirrored,
            blocks,
            blocks_at_least,
            why,
            unread,
            compared,
            refused,
            is_current: !compared && blocks_at_least == 0 && (blocks.is_some() || is_left),
            tally,
        }
    }

    /// How long ago it was last up to date, in seconds; 0 if nothing was written since. `None` if that is not known, because a clock was
    /// wrong.
    pub(crate) fn lag(&self, now: u64) -> Option<u64> {
        if self.is_current { Some(0) } else { units::elapsed(self.time, now) }
    }

    /// The failure that no success has ended.
    pub(crate) fn failed(&self) -> Option<&LastFailure> {
        self.tally.failed.as_ref().filter(|failed| !failed.ended)
    }

    /// What is under way for it.
    pub(crate) fn work(&self) -> Option<&Work> {
        self.tally.work.as_ref().filter(|work| work.is_alive())
    }
}

/// True if all that is known is asked for: of one disk, by a program, or with -v. Otherwise a table does.
pub(crate) fn is_long(args: &args::StatusArgs, output: &Output) -> bool {
    args.path.is_some() || output.is_json() || output.is_verbose()
}

/// Why nothing is shown.
pub(crate) fn nothing(state: &StateDir) -> String {
    // Only root can see what is tracked in the kernel.
    let unseen =
        if rustix::process::geteuid().is_root() { "" } else { "; tracked disks are shown to root only" };
    format!(
        "no sources yet (state directory {}{unseen}): start with \"dsync serve\", \"dsync track\" or \"dsync sync\"",
        state.path().display()
    )
}

/// Prints sources, trackers, and what each replica lacks.
pub(crate) fn run(args: &args::StatusArgs, state: &StateDir, output: &Output) -> Result<()> {
    let mut failed = Vec::new();
    let machine = args.path.as_deref().and_then(MachineWord::read).map(|named| named.name(state));
    let sources = match &args.path {
        _ if machine.is_some() => machine_name::members(machine.as_deref().unwrap_or_default(), state)?,
        Some(what) => match state.source(what)? {
            Some(found) => vec![found],
            None if track::status(Some(Path::new(what)), output)? > 0 => return Ok(()),
            None => return replica(Path::new(what), None, state, output, false),
        },
        None => {
            let survey = state.survey()?;
            let damaged = survey.damaged.into_iter().chain(survey.nameless);
            failed
                .extend(damaged.map(|(place, error)| anyhow::Error::new(error).context(unreadable(&place))));
            survey.sources
        }
    };
    let trackers = match &args.path {
        // Printed with its source below.
        Some(_) => 0,
        None => track::status(None, output)?,
    };
    let replicas = match &args.path {
        Some(_) => Vec::new(),
        None => sync::known_replicas(state).all().context("cannot read the list of replicas")?,
    };
    if sources.is_empty() && failed.is_empty() && trackers == 0 && replicas.is_empty() {
        output.say(&nothing(state));
    }
    let paths: Vec<_> = sources.iter().map(|(_, about)| about.path.clone()).collect();
    let mut groups = Vec::new();
    for (place, about) in sources {
        let path = about.path.clone();
        match source_status(&place, about, output) {
            Ok(group) => groups.extend(group.map(|group| (path.clone(), group))),
            Err(_) if args.path.is_none() && is_forgotten(&place) => continue,
            Err(error) => failed.push(error.context(unreadable(&place))),
        }
        if args.path.is_some() && machine.is_none() {
            track::status(Some(&path), output)?;
            let options = sync::open_options(None, state);
            let lineage = match replica::inspect(&path, &options) {
                // A source that is on another machine has no folder here either.
                Err(replica::ReplicaError::Away(_)) => None,
                inspected => inspected?,
            };
            if lineage.is_some_and(|lineage| lineage.role.promoted.is_none()) {
                replica(&path, None, state, output, false)?;
            }
        }
    }
    if args.path.is_none() || machine.is_some() {
        say_groups(&groups, output);
    }
    // One that was promoted is among the sources.
    for replica in replicas.iter().filter(|replica| !(replica.is_source() && paths.contains(&replica.path))) {
        match made_elsewhere(replica, state) {
            Some(made) => output.say(&format!(
                "replica {} is the source itself now, with the state directory {}",
                replica.path.display(),
                made.display()
            )),
            None => LocalReplica::of(replica).say(output),
        }
    }
    // An unreadable source must not hide the others.
    let Some(last) = failed.pop() else { return Ok(()) };
    failed.iter().for_each(|error| output.error(&failure::text(error), failure::code(error)));
    Err(last)
}

/// What a verification found, which was not repaired since.
pub(crate) fn differed(verified: &LastVerify) -> String {
    let (bytes, time) = (units::size(verified.bytes_differing), device::moment(verified.time));
    format!("differed in {bytes} when verified on {time}, not repaired")
}

/// True if a source was forgotten since it was found.
pub(crate) fn is_forgotten(place: &Path) -> bool {
    !device::is_there(place)
}

pub(crate) fn unreadable(place: &Path) -> String {
    format!("cannot read the state of a source ({})", place.display())
}

impl SourceStatus {
    /// Reads what is known of a source, without holding it.
    pub(crate) fn read(place: &Path, about: SourceMetadata) -> Result<(SourceStatus, History)> {
        let folder = device::Dir::existing(place)?;
        let both = || anyhow::Ok((Bookmarks::read(&folder)?, History::read(&folder)?));
        let mut known = both()?;
        for _ in 0..ATTEMPTS {
            let status = SourceStatus::of(place, about.clone(), &known.1, &known.0);
            // All of one moment: what an epoch has that ended meanwhile is in the record no more, and not yet in this history.
            let before = std::mem::replace(&mut known, both()?);
            match status {
                Ok(status) if before.0 == known.0 && before.1.last() == known.1.last() => {
                    return Ok((status, before.1));
                }
                Ok(_) => {}
                Err(error) if matches!(error.downcast_ref(), Some(source::SourceError::Hangs)) => {
                    return Err(error);
                }
                // The server that was asked may have ended, or a file have been replaced that was looked at.
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
        Ok((SourceStatus::of(place, about, &known.1, &known.0)?, known.1))
    }

    fn of(
        place: &Path,
        about: SourceMetadata,
        history: &History,
        bookmarks: &Bookmarks,
    ) -> Result<SourceStatus> {
        let folder = device::Dir::existing(place)?;
        // A device without a byte has no disk, as a loop device that is detached.
        let found = device::identity(&about.path).ok().filter(|found| !found.is_block() || found.size > 0);
        let moment = source::moment_of(&folder, history.last())?;
        // A disk on another machine, or behind a server, is not looked for.
        let elsewhere =
            moment.as_ref().is_some_and(|moment| moment.elsewhere) || device::is_export(&about.path);
        let disk = |file| source::disk_in(file, about.format).map_or(about.identity.size, |disk| disk.size);
        let size = found.map(disk).or(elsewhere.then_some(about.identity.size));
        let served =
            ControlClient::connect_to_look(place)?.map(|client| client.status(history)).transpose()?;
        let block_size = about.block_size;
        // The server has its disk open, wherever the path leads now.
        let served_size = served.as_ref().map(|served| served.size).filter(|size| *size > 0);
        let tracked = served_size.or(size).unwrap_or(about.identity.size);
        let blocks = || Bitmap::new(tracked.div_ceil(u64::from(block_size)));
        let written = blocks();
        let lost = match history.last() {
            Some(_) if size.is_some() || served.is_some() => source::lost(place, &about, history)?,
            _ => None,
        };
        let source::SourceWrites { unknown, clone } =
            source::written_since(place, &about, history, &written)?;
        let is_left = served.is_none() && lost.is_none();
        let lacks = |replica: &str, bookmark: &Bookmark| {
            let upto = served.as_ref().and_then(|served| served.mirrored.get(replica)).copied().unwrap_or(0);
            let lacking = blocks();
            let position = KnownPosition { epoch: bookmark.epoch, upto: u64::MAX };
            // This tells first what is refused.
            let reached = history.reaches(&[position]);
            let known = reached.and_then(|()| history.changes_since(&[position], block_size, &lacking));
            lacking.union_with(&written);
            let known = known.map(|_| unknown.as_ref());
            let tally = Tally::read(place, replica);
            Lacking::of((replica, bookmark), (&lacking, known), (upto, is_left), tally)
        };
        let checkpoints = checkpoint::listed(history, bookmarks, block_size);
        let replicas = bookmarks.replicas().map(|(replica, bookmark)| lacks(replica, bookmark));
        let replicas: Vec<Lacking> = replicas.collect();
        let mut first_copies = Tally::all(place);
        first_copies.retain(|tally| tally.is_first_copy() && bookmarks.named(&tally.replica).is_none());
        let group = GroupInfo::of_source(&folder, history.last())?;
        let told = moment.as_ref().is_some_and(|moment| moment.elsewhere || moment.name.is_some());
        let asked = told || group.as_ref().is_some_and(|group| group.machine.is_some());
        let is_untracked = served.is_none() && (asked || !source::was_recorded(place, &about, history));
        Ok(SourceStatus {
            kind: "source",
            path: about.path,
            uuid: about.uuid,
            term: about.term,
            began: about.began.map(|epoch| epoch.number),
            block_size,
            size,
            tracked,
            epoch: history.last().map(|e| e.number),
            epochs: history.epochs(),
            lost,
            is_untracked,
            clone,
            moment: moment.and_then(|moment| moment.name),
            served,
            replicas,
            first_copies,
            checkpoints,
            group,
        })
    }

    /// The machine whose disk it is.
    pub(crate) fn machine(&self) -> Option<&str> {
        self.group.as_ref()?.machine.as_deref()
    }

    /// True if its content is not what its record ends with: nothing is brought to a replica until its user says that it is the source.
    pub(crate) fn is_another(&self) -> bool {
        matches!(self.lost, Some(Gap::OtherContent(_)))
    }

    /// What is wrong with its size, if it was resized while it was served.
    pub(crate) fn resized(&self) -> Option<String> {
        let sizes = self.size.zip(self.served.as_ref().map(|served| served.size).filter(|size| *size > 0));
        sizes.filter(|(now, offers)| now != offers).map(|sizes| sync::resized(&self.path, sizes))
    }

    /// What is wrong with what its server wrote.
    pub(crate) fn flush_failed(&self) -> Option<String> {
        let why = self.served.as_ref()?.flush_failed.as_ref()?;
        Some(format!(
            "{}: a flush failed ({why}), so what was written before it may be lost, and its server refuses to make anything durable: stop what uses \
             the disk, and start the server again",
            self.path.display()
        ))
    }

    /// Blocks of the disk, none of them set.
    fn no_blocks(&self) -> Bitmap {
        Bitmap::new(self.tracked.div_ceil(u64::from(self.block_size)))
    }
}

/// How often a source that is synced without a pause is read again.
const ATTEMPTS: u32 = 20;

/// How long what failed to be read is left alone before it is read again.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(5);

fn source_status(place: &Path, about: SourceMetadata, output: &Output) -> Result<Option<GroupInfo>> {
    let (status, history) = SourceStatus::read(place, about)?;
    say(&status, output);
    status.group.iter().for_each(|group| group.say_of_source(output));
    if output.is_verbose() {
        say_epochs(
            &status.epochs,
            |since, upto| {
                let changed = status.no_blocks();
                history.changes_between(since, upto, status.block_size, &changed).ok()?;
                Some(changed.count().saturating_mul(status.block_size.into()))
            },
            output,
        );
    }
    output.summary(&status);
    Ok(status.group)
}

/// Prints the history, one entry per line. `changed` counts the bytes that changed between two epochs, if known.
fn say_epochs(
    epochs: &[source::EpochInfo],
    changed: impl Fn(&delta::Epoch, &delta::Epoch) -> Option<u64>,
    output: &Output,
) {
    for (at, entry) in epochs.iter().enumerate() {
        let number = entry.epoch.number;
        let numbers = if entry.first == number {
            format!("epoch {number}")
        } else {
            format!("epochs {} to {number}", entry.first)
        };
        let before = at.checked_sub(1).map(|before| &epochs[before].epoch);
        let what = match (&entry.lost, before.and_then(|before| changed(before, &entry.epoch))) {
            (Some(why), _) => format!("changes not known ({why})"),
            (None, Some(bytes)) => format!("{} changed", units::size(bytes)),
            (None, None) => "changes not known".to_owned(),
        };
        output.say(&format!("  {numbers}, {}: {what}", device::moment(entry.time)));
    }
}

/// What to do about a source that is not where it was.
pub(crate) fn missing(status: &SourceStatus) -> String {
    let path = status.path.display();
    match status.served {
        Some(_) => {
            format!("{path} was moved or deleted while it is served: name its new path to \"dsync sync\"")
        }
        None if status.path.exists() => format!(
            "{path} has no disk: attach it, or the file behind a loop device; if it is gone for good: dsync forget {path}"
        ),
        None => format!(
            "{path} does not exist: mount its file system or attach its disk; if it was moved, name its new path to \"dsync \
             sync\"; if it is gone for good: dsync forget {path}"
        ),
    }
}

/// How far the first copy of a replica is.
pub(crate) fn first_copy(tally: &Tally) -> String {
    match (&tally.work, &tally.failed) {
        (None, Some(failed)) if tally.refused => format!(
            "has not begun: the last attempt failed on {}: {}",
            device::moment(failed.time),
            failed.message
        ),
        (Some(work), _) if work.is_alive() => match work.bytes_total {
            0 => "is under way".to_owned(),
            total => format!("is under way, {} of {}", units::size(work.bytes_done), units::size(total)),
        },
        (None, Some(failed)) => {
            format!(
                "is not complete: the last attempt failed on {}: {}",
                device::moment(failed.time),
                failed.message
            )
        }
        _ => "was interrupted: run it again".to_owned(),
    }
}

fn say(status: &SourceStatus, output: &Output) {
    let size = match status.size {
        Some(size) => units::size(size),
        None if status.path.exists() => "detached".to_owned(),
        None => "not at this path".to_owned(),
    };
    output.say(&format!(
        "source {} ({size}, blocks of {}), id {}",
        status.path.display(),
        units::size(status.block_size.into()),
        status.uuid
    ));
    if let Some(began) = status.began {
        output.say(&format!("  promoted: term {}, which began at epoch {began}", status.term));
    }
    say_tracked(status, output);
    if status.size.is_none() {
        output.say(&format!("  {}", missing(status)));
    }
    match (status.epoch, status.epochs.first()) {
        (Some(epoch), Some(first)) if first.first < epoch => {
            output.say(&format!("  at epoch {epoch}, with a history since epoch {}", first.first));
        }
        (Some(epoch), _) => output.say(&format!("  at epoch {epoch}")),
        (None, _) => output.say("  no checkpoint yet"),
    }
    for replica in &status.replicas {
        let lacks = match (replica.blocks, &replica.why) {
            _ if replica.mirrored => "brought further than its epoch by a mirror".to_owned(),
            (Some(0), _) => "nothing written since".to_owned(),
            (Some(blocks), _) => {
                let bytes = blocks.saturating_mul(status.block_size.into());
                format!("{} ({}) written since", units::many(blocks, "block"), units::size(bytes))
            }
            (None, Some(why)) if replica.refused => format!("the next sync is refused: {why}"),
            (None, Some(why)) if replica.compared => format!("the next sync compares all of it: {why}"),
            (None, why) => {
                let bytes = units::size(replica.blocks_at_least.saturating_mul(status.block_size.into()));
                let known = match replica.blocks_at_least {
                    0 => String::new(),
                    blocks => format!("{} ({bytes}) written since, and ", units::many(blocks, "block")),
                };
                format!(
                    "{known}later writes are not known: {}",
                    why.as_deref().unwrap_or("nothing records them")
                )
            }
        };
        let unread = match replica.unread {
            0 => String::new(),
            bytes => format!(", but for {} that could not be read", units::size(bytes)),
        };
        output.say(&format!(
            "  {} at epoch {}, up to date as of {}{unread}; {lacks}",
            replica.replica,
            replica.epoch,
            device::moment(replica.time)
        ));
        say_tally(replica, status.machine(), output);
    }
    for tally in &status.first_copies {
        let what = if tally.refused { "the first sync" } else { "the first copy" };
        output.say(&format!("  {}: {what} {}", tally.replica, link::printable(&first_copy(tally))));
    }
    for checkpoint in &status.checkpoints {
        output.say(&format!("  checkpoint {}", checkpoint.told(status.block_size)));
    }
}

/// Prints what was counted for a replica and wants to be known.
fn say_tally(replica: &Lacking, machine: Option<&str>, output: &Output) {
    if let Some(verified) = replica.tally.verified.as_ref().filter(|verified| verified.differs()) {
        let mends = match machine {
            Some(machine) => format!("dsync sync --method compare vm:{machine} DIR"),
            None => "dsync verify --repair".into(),
        };
        output.say(&format!("    {}: {mends}", differed(verified)));
    }
    if let Some(failed) = replica.failed() {
        output.say(&format!(
            "    the last attempt failed on {}: {}",
            device::moment(failed.time),
            link::printable(&failed.message)
        ));
    }
    if let Some(work) = replica.work().filter(|work| work.paused) {
        output.say(&format!("    {}: paused by --bwlimit since {}", work.what, device::moment(work.since)));
    }
}

/// Prints who records the writes to a source.
fn say_tracked(status: &SourceStatus, output: &Output) {
    match &status.served {
        Some(served) => {
            output.say(&format!(
                "  served by process {}, {} written since {}",
                served.process,
                units::many(served.dirty, "block"),
                if status.epoch.is_some() { "the last checkpoint" } else { "it was first served" }
            ));
            let wrong = status.resized().into_iter().chain(status.flush_failed());
            wrong.for_each(|what| output.say(&format!("  {what}")));
            if let Some(why) = &served.lost {
                output.say(&format!("  earlier changes are not known: {why}"));
            }
            if served.active_regions > 0 {
                output.say(&format!(
                    "  a power cut now would mark {} of {} as changed",
                    units::many(served.active_regions, "region"),
                    units::size(served.region)
                ));
            }
            if served.views > 0 {
                output.say(&format!(
                    "  {} open, with {} of old data kept",
                    units::many(served.views as u64, "snapshot"),
                    units::size(served.kept_bytes)
                ));
            }
        }
        None if trackers::find(&status.path).is_ok_and(|tracker| tracker.is_some()) => {
            output.say("  tracked in the kernel");
        }
        None => match status.clone {
            Some(clone) => output.say(&format!(
                "  tracked by clones: what was overwritten since the last one takes {}",
                units::size(clone.kept_bytes)
            )),
            None => match &status.moment {
                Some(name) => output.say(&format!("  not served; its last epoch is the moment \"{name}\"")),
                None => output.say("  not served"),
            },
        },
    }
}

/// What is known of a replica.
///
/// More than fifteen fields: they are the keys of its JSON object, which is flat.
#[derive(Serialize)]
struct ReplicaStatus {
    kind: &'static str,
    path: std::path::PathBuf,
    source: Option<uuid::Uuid>,
    epoch: Option<u64>,
    /// It is ahead of that epoch by batches of a mirror.
    ahead: bool,
    /// Bytes in which it may not be what that epoch was: the next sync sends them.
    unsure: u64,
    state: State,
    size: u64,
    recovered: Option<String>,
    /// Bytes of an interrupted transfer, kept to resume it.
    partial: bool,
    /// Its user: then the rest is what its lineage records.
    in_use: Option<String>,
    /// It was made the source itself since: a sync to it is refused.
    promoted: Option<String>,
    /// When it came to what it holds, in seconds since 1970: that is no newer.
    at: Option<u64>,
    /// The term of its source, at the last commit.
    term: u64,
    /// Its source has ended at its epoch.
    released: bool,
    /// It was the source itself until then, in seconds since 1970.
    demoted: Option<u64>,
    /// The group that it is committed with.
    group: Option<GroupInfo>,
    /// Where its source is.
    #[serde(skip)]
    origin: Option<String>,
    /// Its readers at moments.
    readers: Vec<replica::ReplicaReader>,
    /// A verification found that it differed from its source.
    verdict: Option<replica::Verdict>,
}

/// Prints what a replica was, or was told, where that decides what can be done with it.
fn say_role(role: &replica::Role, unsure: u64, group: Option<&GroupInfo>, output: &Output) {
    group.iter().for_each(|group| output.say(&format!("  {}", group.told())));
    if let Some(demoted) = &role.demoted {
        let written = match unsure {
            0 => String::new(),
            bytes => {
                format!(": {} written since will be overwritten by the next sync to it", units::size(bytes))
            }
        };
        let told = demoted.told.as_ref();
        let told = told.map_or(String::new(), |told| format!("; {told} was told that it can take over"));
        output.say(&format!(
            "  demoted on {}, at the end of term {}{written}{told}",
            device::moment(demoted.since),
            role.term
        ));
    }
    if let Some(released) = &role.released {
        output.say(&format!(
            "  released: its source ended at epoch {}, in term {}, and it can be promoted",
            released.epoch.number, released.term
        ));
    }
}

impl ReplicaStatus {
    /// Where it is, and how far that may be trusted.
    fn told(&self) -> String {
        let source = self.source.unwrap_or_default();
        match (self.epoch, self.state) {
            (Some(epoch), _) if self.demoted.is_some() => {
                format!("the former source {source}, at epoch {epoch}")
            }
            (None, _) if self.demoted.is_some() => format!(
                "the former source {source}, of which it is not known what was written: the next sync compares all of it"
            ),
            (Some(epoch), State::Exact) if self.ahead => {
                format!("consistent, at the last batch of a mirror after epoch {epoch} of source {source}")
            }
            (Some(epoch), State::Exact) => {
                format!("consistent, at epoch {epoch} of source {source}")
            }
            (Some(epoch), State::Fuzzy) => {
                format!("fuzzy, near epoch {epoch}: copied from a disk in use without a freeze")
            }
            (Some(epoch), State::Incomplete) if self.unsure > 0 && !self.partial => format!(
                "at epoch {epoch}, without {} that could not be read at the source or was not in what was merged (the next \"dsync \
                 sync\" sends it)",
                units::size(self.unsure)
            ),
            _ => "incomplete: a copy to it or a commit in place did not end".to_owned(),
        }
    }

    /// True if it does not hold one moment of its source, and nothing else that is said of it tells so.
    fn is_begun(&self) -> bool {
        self.demoted.is_none()
            && self.state == State::Incomplete
            && (self.epoch.is_none() || self.unsure == 0 || self.partial)
    }
}

fn replica(
    path: &Path,
    folder: Option<&Path>,
    state: &StateDir,
    output: &Output,
    recovering: bool,
) -> Result<()> {
    let absolute = device::absolute(path)?;
    let options = sync::open_options(folder, state);
    location::refuse_host(path, if recovering { "recover" } else { "status" })?;
    // A replica whose first copy is incomplete has a lineage, but no file.
    if !recovering
        && !device::is_there(&absolute)
        && replica::inspect(&absolute, &options).map_or(true, |l| l.is_none())
    {
        let name = path.display().to_string();
        let replica = match missing_replica(&absolute, state)? {
            None if !name.contains('/') => {
                format!("no source is called \"{name}\", and there is {}", no_replica(&absolute, state)?)
            }
            _ => no_replica(&absolute, state)?,
        };
        bail!(source::SourceError::Unknown(format!(
            "{replica} (\"dsync status\" lists sources and replicas)"
        )));
    }
    let replica = match sync::open_replica(&absolute, &options, state) {
        Err(SyncError::Replica(replica::ReplicaError::Busy { holder, .. })) if !recovering => {
            return written_down(absolute, (&options, state), Some(holder), output);
        }
        Err(SyncError::Replica(replica::ReplicaError::Promoted { .. }))
            if !recovering && replica::inspect(&absolute, &options)?.is_some() =>
        {
            return written_down(absolute, (&options, state), None, output);
        }
        Err(SyncError::Replica(replica::ReplicaError::NotAReplica(path))) if !recovering => {
            bail!(Failure::refused(format!(
                "{} is neither a source nor a replica that dsync knows: \"dsync status\" lists them",
                path.display()
            )));
        }
        // It is shown, and refused all the same.
        Err(error @ SyncError::Replica(replica::ReplicaError::Changed { .. })) if !recovering => {
            written_down(absolute, (&options, state), None, output)?;
            return Err(error.into());
        }
        other => other?,
    };
    let status = replica.status();
    if status.source.is_none() && status.positions.is_empty() {
        bail!(source::SourceError::Unknown(no_replica(&absolute, state)?));
    }
    let status = ReplicaStatus {
        kind: "replica",
        path: absolute.clone(),
        source: status.source,
        epoch: status.epoch.map(|e| e.number),
        ahead: status.ahead,
        unsure: status.unsure.bytes(),
        state: status.state,
        size: status.size,
        recovered: status.recovered.clone(),
        partial: status.under_way() || status.resumes.is_some(),
        in_use: None,
        promoted: None,
        at: replica.history().ok().and_then(|history| history.at).filter(|_| status.epoch.is_some()),
        term: status.role.term,
        released: status.role.released.is_some(),
        demoted: status.role.demoted.as_ref().map(|demoted| demoted.since),
        group: GroupInfo::of_replica(replica.path(), replica.recorded()),
        origin: replica::origin(&absolute, &options).as_deref().map(local::shown_origin),
        readers: replica::readers(&absolute, &options)?,
        verdict: replica.verdict(),
    };
    say_replica(&status, &replica.status().role, recovering, output);
    say_former_sources(&status, state, output)
}

/// Prints which sources of this host had a replica there, before another one took it over.
fn say_former_sources(status: &ReplicaStatus, state: &StateDir, output: &Output) -> Result<()> {
    let name = status.path.display().to_string();
    for (place, about) in state.survey()?.sources {
        if Some(about.uuid) == status.source {
            continue;
        }
        let bookmarks = Bookmarks::read(&device::Dir::existing(&place)?)?;
        if let Some((_, known)) = bookmarks.named(&name) {
            output.say(&format!(
                "  it was a replica of {} until {} (epoch {}): syncs from that are refused now",
                about.path.display(),
                device::moment(known.time),
                known.epoch.number
            ));
        }
    }
    Ok(())
}

/// Prints the state of a replica, and its readers.
fn say_replica(status: &ReplicaStatus, role: &replica::Role, recovering: bool, output: &Output) {
    let (at, size) = (status.told(), units::size(status.size));
    output.say(&format!("replica {}: {at}, {size}", status.path.display()));
    if let Some(at) = status.at.filter(|_| status.demoted.is_none()) {
        output.say(&format!("  of {} ({}), term {}", device::moment(at), units::age(at), status.term));
    }
    local::say_origin(status.origin.as_deref(), output);
    match &status.recovered {
        Some(recovered) => output.say(&format!("  {recovered}")),
        None if recovering && status.is_begun() => {
            output.say("  it is no moment of its source, and cannot be completed without that");
        }
        None if recovering => output.say("  nothing to recover"),
        None => {}
    }
    say_role(role, status.unsure, status.group.as_ref(), output);
    local::say_verdict(status.verdict, output);
    say_readers(&status.readers, output);
    if status.partial {
        output.say(
            "  a transfer was interrupted: the next \"dsync sync\" goes on from it, unless it compares all",
        );
    } else if status.is_begun() {
        output.say("  the next \"dsync sync\" from its source completes it");
    }
    output.summary(status);
}

/// The message for a path without a replica, with what is known of a former one.
pub(crate) fn no_replica(path: &Path, state: &StateDir) -> Result<String> {
    let unknown =
        || format!("no replica at {}: check the path, and that its file system is mounted", path.display());
    Ok(missing_replica(path, state)?.unwrap_or_else(unknown))
}

/// The message for a path at which a replica is known and missing; `None` if none is known there.
fn missing_replica(path: &Path, state: &StateDir) -> Result<Option<String>> {
    let name = path.display().to_string();
    let listed = local::path_of(&name)?;
    let known = sync::known_replicas(state).all().context("cannot read the list of replicas")?;
    let known = known.iter().find(|known| known.path == listed);
    for (place, about) in state.survey()?.sources {
        let bookmarks = Bookmarks::read(&device::Dir::existing(&place)?)?;
        if let Some((_, bookmark)) = bookmarks.named(&name) {
            return Ok(Some(format!(
                "the replica at {name} is missing: it was last synced on {}, to epoch {}, from {2}. If its file system is not \
                 mounted or its disk not attached, bring it back and run again; if it is gone for good, \"dsync sync --create {2} {name}\" \
                 begins a new replica there, and \"dsync forget {2} {name}\" forgets it",
                device::moment(bookmark.time),
                bookmark.epoch.number,
                about.path.display()
            )));
        }
    }
    if let Some(LocalReplica { epoch, source, problem: Some(problem), .. }) = known.map(LocalReplica::of) {
        let of = source.map_or(String::new(), |source| format!(" of source {source}"));
        let at = epoch.map_or(String::new(), |epoch| format!(", last at epoch {epoch}{of},"));
        return Ok(Some(format!("the replica at {name}{at} {problem}")));
    }
    Ok(None)
}

/// Prints the lineage of a replica that is in use, or was promoted.
fn written_down(
    path: std::path::PathBuf,
    (options, state): (&replica::ReplicaOptions, &StateDir),
    in_use: Option<String>,
    output: &Output,
) -> Result<()> {
    let Some(lineage) = replica::inspect(&path, options)? else {
        let holder = in_use.unwrap_or_default();
        bail!(replica::ReplicaError::Busy { path, holder });
    };
    let epoch = lineage.epoch.map(|e| e.number);
    let at = epoch.map_or("no epoch yet".to_owned(), |epoch| {
        format!("epoch {epoch} of source {}", lineage.source.unwrap_or_default())
    });
    let promoted = lineage.role.promoted.map(|promoted| promoted.said());
    match (&in_use, &promoted) {
        (Some(holder), _) => {
            output.say(&format!("replica {}: in use by {holder}; last recorded at {at}", path.display()))
        }
        (None, _) => output.say(&format!("replica {}: {at}, and written to since", path.display())),
    }
    if let Some(promoted) = &promoted {
        let what = match sync::made_elsewhere(&path, &lineage, &state.absolute()) {
            Some(made) => format!("is the source itself, with the state directory {}", made.display()),
            None => {
                let command = completion(&path, &lineage);
                format!("takes no deltas; \"{command}\" completes a promotion that was interrupted")
            }
        };
        output.say(&format!("  it {promoted}, and {what}"));
    }
    let group = GroupInfo::of_replica(&path, &lineage);
    // What others may have written is no part of that, and was said.
    let given_up = if lineage.unsure == replica::Unsure::Everything { 0 } else { lineage.unsure_bytes() };
    say_role(&lineage.role, given_up, group.as_ref(), output);
    let verdict = replica::verdict(&path, options).filter(|_| promoted.is_none());
    local::say_verdict(verdict, output);
    let origin = replica::origin(&path, options).as_deref().map(local::shown_origin);
    local::say_origin(origin.as_deref().filter(|_| promoted.is_none()), output);
    let readers = replica::readers(&path, options)?;
    say_readers(&readers, output);
    output.summary(&ReplicaStatus {
        kind: "replica",
        path,
        source: lineage.source,
        epoch,
        ahead: lineage.is_ahead(),
        unsure: lineage.unsure_bytes(),
        state: lineage.state,
        size: lineage.size,
        recovered: None,
        partial: lineage.step.is_some(),
        in_use,
        promoted,
        at: lineage.at,
        term: lineage.role.term,
        released: lineage.role.released.is_some(),
        demoted: lineage.role.demoted.as_ref().map(|demoted| demoted.since),
        group,
        origin,
        readers,
        verdict,
    });
    Ok(())
}

/// Completes or rolls back an interrupted commit of a replica.
pub(crate) fn recover(args: &args::Recover, state: &StateDir, output: &Output) -> Result<()> {
    location::refuse_host(&args.destination, "recover")?;
    if args.accept {
        let path = device::absolute(&args.destination)?;
        let options = sync::open_options(args.journal_dir.as_deref(), state);
        if replica::accept_unwritten(&path, &options)? {
            output.say(&format!("{} is taken for what it was", path.display()));
        }
    }
    replica(&args.destination, args.journal_dir.as_deref(), state, output, true)
}
