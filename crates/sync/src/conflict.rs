//! Why a sync cannot be planned.

use std::fmt;
use std::path::PathBuf;

use uuid::Uuid;

/// Why a sync cannot be planned. Its text names the thing, the reason and the way out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The source remembers a replica where none is.
    #[error(
        "the replica at {name} is missing: it was last synced on {time}, to epoch {epoch}. If its file system is not mounted \
         or its disk not attached, bring it back and run again; if it is gone for good, \"dsync sync --create\" begins a new \
         replica there, with all of the source, and \"dsync forget {} {name}\" forgets it here", path.display()
    )]
    Vanished {
        /// The source.
        path: PathBuf,
        /// The replica, as the user named it.
        name: String,
        /// When it was last synced.
        time: String,
        /// The epoch it was at then.
        epoch: u64,
    },
    /// What is left of a replica is its state.
    #[error(
        "the file of replica {replica} is gone. If its file system is not mounted, mount it and run again; if it is gone for good, \"dsync \
         sync --create\" begins a new replica there, with all of the source, and \"dsync forget {replica}\" where it was forgets it", replica = .0.display()
    )]
    Gone(PathBuf),
    /// The replica follows another source.
    #[error(
        "replica {} is a copy of another source ({other}), not of {}: choose another destination. \"dsync sync --adopt\" would \
         compare everything, overwrite what differs, and make it a replica of this source", replica.display(), path.display()
    )]
    OtherSource {
        /// The replica.
        replica: PathBuf,
        /// The source it follows.
        other: Uuid,
        /// The source given.
        path: PathBuf,
    },
    /// The source holds nothing, and how it came to that is not known.
    #[error(
        "{0} is empty, and what was written to it is not known ({why}), but replica {name} holds data, and may be the only copy. Nothing was \
         changed. If the disk was lost, \"dsync sync --adopt {name} {0}\" brings it back. If it is meant to be empty, \"dsync sync --adopt {0} \
         {name}\" empties the replica too", path.display()
    )]
    Emptied {
        /// The source.
        path: PathBuf,
        /// The replica, as the user named it.
        name: String,
        /// Why what was written is not known.
        why: String,
    },
    /// The source holds other content than its record ends with, and the replica may be newer.
    #[error(
        "{0} is not the disk that {name} was brought up to date from ({why}), and {name} may be the newest copy. Nothing was changed. If the \
         disk was lost, \"dsync sync --adopt {name} {0}\" brings it back. If {0} is the source as it is now, \"dsync sync --accept-source {0} \
         {name}\" compares everything, and overwrites what differs in {name}", path.display()
    )]
    OtherContent {
        /// The source.
        path: PathBuf,
        /// The replica, as the user named it.
        name: String,
        /// What shows it, and which is the older.
        why: String,
    },
    /// What is to be adopted is larger than the source.
    #[error(
        "{} has {}, and source {} only {}: it may be the wrong destination. If what it has beyond that can be lost, \"dsync sync \
         --adopt --allow-shrink\" cuts it to the size of the source", replica.display(), device::exact_size(*has), path.display(),
        device::exact_size(*size)
    )]
    Larger {
        /// What is to be adopted.
        replica: PathBuf,
        /// Its size in bytes.
        has: u64,
        /// The source.
        path: PathBuf,
        /// The size of the source in bytes.
        size: u64,
    },
    /// The destination is a device that cannot hold the source.
    #[error(
        "{name} has {}, and its source {} has {}: give a device at least that large", device::exact_size(*has), path.display(),
        device::exact_size(*size)
    )]
    Smaller {
        /// The device, as the user named it.
        name: String,
        /// Its size in bytes.
        has: u64,
        /// The source.
        path: PathBuf,
        /// The size of the source in bytes.
        size: u64,
    },
    /// What is to be adopted is not a copy of the source.
    #[error(
        "{} of the {} of data that were compared in {} differ from source {}: it may be the wrong destination. Nothing was changed. If what it holds can be \
         lost, pass --adopt=overwrite", device::human_size(*differing), device::human_size(*held), replica.display(), path.display()
    )]
    Unlike {
        /// What is to be adopted.
        replica: PathBuf,
        /// Bytes of those of its blocks that were compared and are not zeroes: of a large disk, a sample.
        held: u64,
        /// Bytes of the compared blocks that differ.
        differing: u64,
        /// The source.
        path: PathBuf,
    },
    /// What is to be adopted has what the source has not.
    #[error(
        "--adopt gives up nothing that only the replica has (if that can be lost, pass --adopt=overwrite): {0}"
    )]
    Newer(Box<Conflict>),
    /// A source has ended with its group, and is not a replica yet.
    #[error(
        "the demotion of {} with its group {group} was interrupted: run \"dsync demote --group {group}\" again, which completes it",
        path.display()
    )]
    Ending {
        /// The source.
        path: PathBuf,
        /// The group.
        group: String,
    },
    /// `tracked` was demanded, and there is no replica yet.
    #[error("no replica at {} yet: run the first sync without --method tracked", .0.display())]
    NoReplica(PathBuf),
    /// A source is to end with a last sync, and there is no replica.
    #[error(
        "there is no replica of {} at {name} that could take over: \"dsync status {0}\" lists those that it has. To give it a \
         new one, run \"dsync sync {0} {name}\" before the switch", path.display()
    )]
    NoSuccessor {
        /// The replica, as the user named it.
        name: String,
        /// The source.
        path: PathBuf,
    },
    /// The replica's epoch is not in the source's history.
    #[error("replica {} does not fit source {}: {why}", replica.display(), path.display())]
    Foreign {
        /// The replica.
        replica: PathBuf,
        /// The source.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// Source and destination were written to apart from each other, or follow sources that were.
    #[error("{0}")]
    Diverged(Box<Diverged>),
    /// What is to be given up was to be saved, and is in no record.
    #[error(
        "what only {name} has cannot be saved as a delta: {why}. Nothing was changed. Copy that disk first if it is wanted; then \"dsync sync \
         --discard-there SRC DST\" compares everything and overwrites what differs"
    )]
    Unsaveable {
        /// The destination, as the user named it.
        name: String,
        /// Why it cannot be saved.
        why: String,
    },
    /// `tracked` was demanded, and what changed is not known.
    #[error("what changed on {} is not known ({why}): omit --method tracked to compare everything", path.display())]
    Lost {
        /// The source.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A disk in use has no view.
    #[error("{} is not served, so no view of it is open: omit --at-view", .0.display())]
    NoView(PathBuf),
    /// A disk in use cannot be copied in part.
    #[error(
        "{} is a disk in use, and what a pass over it left out could not be told from what it sent: omit --keep-going, or \
         copy the disk while it is not in use", .0.display()
    )]
    LiveInPart(PathBuf),
    /// A disk in use cannot be searched for moved data.
    #[error("{} is a disk in use, and --method rolling looks for moved data in a file: omit it", .0.display())]
    LiveRolling(PathBuf),
    /// What is written to a disk in use stays unknown.
    #[error(
        "what is written to {0} is not known ({why}), and a checkpoint does not help: run \"dsync track remove {0}\" and \"dsync \
         track add {0}\", then sync again", path.display()
    )]
    Unfollowed {
        /// The source.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

/// How a source and a destination have diverged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diverged {
    /// The source.
    pub path: PathBuf,
    /// Its term.
    pub term: u64,
    /// The destination, as the user named it.
    pub destination: String,
    /// Its path where it is.
    pub there: PathBuf,
    /// The term there.
    pub other_term: u64,
    /// The last epoch in common, if that is known.
    pub common: Option<u64>,
    /// What the destination is.
    pub divergence: Divergence,
}

/// What a destination is that has diverged from a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Divergence {
    /// A source with the same id.
    TwoSources {
        /// The source.
        here: Since,
        /// The destination.
        there: Since,
    },
    /// A replica of a later term of the source.
    Superseded,
    /// A replica, at an epoch of another term, which this one does not have.
    OtherBranch {
        /// The epoch.
        epoch: u64,
        /// It is a former source.
        demoted: bool,
    },
    /// A replica, which a mirror brought ahead of an epoch of another term.
    Ahead {
        /// The epoch.
        epoch: u64,
        /// Bytes of a later moment.
        bytes: u64,
    },
}

/// What one of two sources has since the epoch in common.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Since {
    /// Its history goes back to that epoch.
    pub reaches: bool,
    /// That epoch is known to be in its past. Where it is not, it may be that of another branch, and the other source have more than it wrote since.
    pub has: bool,
    /// Bytes written to it since, as far as that is known.
    pub bytes: Option<u64>,
    /// Others may have written to it since, which is in no record.
    pub doubted: bool,
}

impl Since {
    /// `None`: its history does not go back so far.
    pub(crate) fn of(bytes: Option<Option<u64>>) -> Since {
        Since { reaches: bytes.is_some(), has: bytes.is_some(), bytes: bytes.flatten(), doubted: false }
    }

    /// True if it is known what was written to this source since an epoch that both have.
    pub(crate) fn tells(&self) -> bool {
        self.reaches && !self.doubted && self.bytes.is_some()
    }

    fn told(&self, least: &str) -> String {
        match self.bytes {
            Some(0) if least.is_empty() => "nothing".into(),
            Some(0) => "nothing that is known of".into(),
            Some(bytes) => format!("{least}{}", device::human_size(bytes)),
            None => "an unknown amount".into(),
        }
    }
}

impl fmt::Display for Diverged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.said(&self.ways()))
    }
}

impl Diverged {
    /// The message, with these ways out.
    pub(crate) fn said(&self, ways: &str) -> String {
        format!("{}. Nothing was changed{ways}", self.what())
    }

    /// What is, and what would be lost.
    fn what(&self) -> String {
        let Diverged { path, term, destination, other_term, common, .. } = self;
        let path = path.display();
        let since = common.map_or("an epoch that is not known".into(), |epoch| format!("epoch {epoch}"));
        match self.divergence {
            Divergence::TwoSources { here, there } => format!(
                "{path} (term {term}) and {destination} (term {other_term}) have diverged: both are sources with the same id, apart since {since}. \
                 Since then {} was written to {path}, and {} to {destination}",
                here.told(""),
                there.told("at least "),
            ),
            Divergence::Superseded => format!(
                "{destination} follows a later term of this source (term {other_term}) than {path} (term {term}): a replica was promoted meanwhile"
            ),
            Divergence::Ahead { epoch, bytes } => format!(
                "{destination} has diverged from {path}: a mirror of term {other_term} brought it ahead of epoch {epoch} ({} are of a later \
                 moment), and term {term}, which goes on from {since}, need not have that. It may be the only copy of what was written last",
                device::human_size(bytes)
            ),
            Divergence::OtherBranch { epoch, demoted: true } => format!(
                "{destination} was the source until it was demoted at epoch {epoch}, and {path} (term {term}) goes on from {since}: what was \
                 written to {destination} after that would be overwritten"
            ),
            Divergence::OtherBranch { epoch, demoted: false } => format!(
                "{destination} has diverged from {path}: it is at epoch {epoch} of term {other_term}, and term {term} goes on from {since}. What \
                 the source of term {other_term} wrote after that is lost with it"
            ),
        }
    }

    /// Each way out, on a line of its own.
    fn ways(&self) -> String {
        let Diverged { path, destination, other_term, common, .. } = self;
        let (path, place) = (path.display(), self.there.display());
        match self.divergence {
            Divergence::TwoSources { here, there } => {
                let saves = |side: Since, other: Since| side.tells() && other.has;
                format!(
                    "\nTo keep {path}, run {}\nTo keep {destination}, run {}",
                    consent("SRC DST", destination, saves(there, here)),
                    consent("DST SRC", &path, saves(here, there)),
                )
            }
            Divergence::Superseded => format!(
                "\nTo go on with that term, sync from its source to {path}: it says what was written to {path} since, and how that is saved\nIf that \
                 term was given up, run {}",
                consent("SRC DST", destination, false)
            ),
            Divergence::Ahead { epoch, .. } => format!(
                "\nTo go on with {destination}, run \"dsync promote --force {place}\" where it is\nTo give that up where its past is kept, run \"dsync \
                 rewind {place} --to {epoch}\" there, and sync again, which sends the differences\nTo give it up otherwise, run {}",
                consent("SRC DST", destination, false)
            ),
            Divergence::OtherBranch { demoted: true, .. } => format!(
                "\nTo keep {path}, run {}\nTo keep {destination}, run \"dsync promote --force {place}\" where it is, and sync from there",
                consent("SRC DST", destination, common.is_some()),
            ),
            Divergence::OtherBranch { demoted: false, .. } => format!(
                "\nTo keep {path}, run {}\nTo keep {destination}, go on syncing to it from the source of term {other_term}",
                consent("SRC DST", destination, false),
            ),
        }
    }
}

/// The command that gives up what only one of the two ends has.
fn consent(ends: &str, other: &dyn fmt::Display, saves: bool) -> String {
    match saves {
        true => format!(
            "\"dsync sync --save-there FILE {ends}\", which saves what only {other} has in FILE where that is (--discard-there: without saving it), \
             and sends the differences"
        ),
        false => format!(
            "\"dsync sync --discard-there {ends}\", which compares everything and overwrites what differs in {other}: what only that has cannot be \
             saved as a delta, so copy it first if it is wanted"
        ),
    }
}

/// The ways out for a group and its disks in another folder.
pub(crate) fn ways_of_group(name: &str) -> String {
    format!(
        "\nTo keep the group here, run \"dsync sync --group {name} --save-there FOLDER DIR\", which saves what only the disks there have in FOLDER \
         where they are (--discard-there: without saving it), and sends the differences\nTo keep the disks there, run that on their host, with the \
         folder of the disks here"
    )
}

/// A message with the two ends in the commands that it names.
pub fn with_ends(message: &str, source: &str, destination: &str) -> String {
    let there = message.replace("SRC DST", &format!("{source} {destination}"));
    there.replace("DST SRC", &format!("{destination} {source}"))
}
