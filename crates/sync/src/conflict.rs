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
        /// Those of blocks that differ.
        differing: u64,
        /// The source.
        path: PathBuf,
    },
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
    /// The same source itself.
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
    /// Longer than a screen: one sentence for each way to have diverged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Diverged { path, term, destination, other_term, common, .. } = self;
        let (path, place) = (path.display(), self.there.display());
        let since = common.map_or("an epoch that is not known".into(), |epoch| format!("epoch {epoch}"));
        match self.divergence {
            Divergence::TwoSources { here, there } => {
                // Its history has to go back to an epoch that the other has, too: nothing else tells what only it has.
                let saves = |side: Since, other: Since| side.reaches && !side.doubted && other.has;
                let demote = |name: &dyn fmt::Display, side: Since, other: Since| match common
                    .filter(|_| side.reaches)
                {
                    Some(epoch) if saves(side, other) => {
                        format!("run \"dsync demote --since {epoch} --save FILE")
                    }
                    since => format!(
                        "copy {name} first if what only that has is wanted (it cannot be saved as a delta), run \"dsync demote {}--discard",
                        since.map_or(String::new(), |epoch| format!("--since {epoch} "))
                    ),
                };
                let adopt = |saves: bool| if saves { "" } else { " with --adopt, which compares everything" };
                let (saves_here, saves_there) = (saves(here, there), saves(there, here));
                let cost =
                    if saves_here && saves_there { ". Either sync sends the differences alone" } else { "" };
                write!(
                    f,
                    "{path} (term {term}) and {destination} (term {other_term}) have diverged: both are sources with the same \
                     id, apart since {since}. Nothing was changed. Since then {} was written to {path}, and {} to \
                     {destination}; one of the two has to be given up, or saved. To keep {path}, {} {place}\" \
                     where {destination} is, then sync again{}. To keep {destination}, {} {path}\" here, then sync from \
                     there{}{cost}",
                    here.told(""),
                    there.told("at least "),
                    demote(destination, there, here),
                    adopt(saves_there),
                    demote(&path, here, there),
                    adopt(saves_here),
                )
            }
            Divergence::Superseded => write!(
                f,
                "{destination} follows a later term of this source (term {other_term}) than {path} (term {term}): a replica was \
                 promoted meanwhile. Nothing was changed. Run \"dsync demote {}{path}\" here and sync to it from the source of \
                 term {other_term}; it names what was written to {path} since, and saves it with --save FILE. If that term was \
                 given up, \"dsync sync --adopt\" compares everything and overwrites what differs in {destination}",
                common.map_or(String::new(), |epoch| format!("--since {epoch} "))
            ),
            Divergence::Ahead { epoch, bytes } => write!(
                f,
                "{destination} has diverged from {path}: a mirror of term {other_term} brought it ahead of epoch {epoch} ({} are \
                 of a later moment), and term {term}, which goes on from {since}, need not have that. Nothing was changed. It may \
                 be the only copy of what was written last: to go on with it, run \"dsync promote --force\" where it is. To give it \
                 up, run \"dsync rewind --to {epoch}\" there if its past is kept (\"dsync rewind\" lists it), and sync again, which sends \
                 the differences; otherwise \"dsync sync --adopt\" compares everything, and overwrites what differs",
                device::human_size(bytes)
            ),
            Divergence::OtherBranch { epoch, demoted: true } => {
                write!(
                    f,
                    "{destination} was demoted at epoch {epoch}, which {path} (term {term}) does not have. Nothing was changed. "
                )?;
                match common {
                    Some(common) => write!(
                        f,
                        "Epoch {common} is in the past of both. Where {destination} is, promote it with \"dsync promote --force \
                         {place}\", and demote it again with \"dsync demote --since {common} --save FILE {place}\", which saves what \
                         was written there since. Then sync again. \"dsync sync --adopt\" would compare everything, and overwrite \
                         that without saving it"
                    ),
                    None => write!(
                        f,
                        "No earlier epoch is known to be in the past of both, so what was written there cannot be saved as a delta: \
                         copy the disk there first if it is wanted. Then \"dsync sync --adopt\" compares everything, and overwrites \
                         what differs"
                    ),
                }
            }
            Divergence::OtherBranch { epoch, demoted: false } => write!(
                f,
                "{destination} has diverged from {path}: it is at epoch {epoch} of term {other_term}, and term {term} goes on \
                 from {since}. Nothing was changed. What the source of term {other_term} wrote after that is lost with it: if \
                 it is wanted, copy {destination} first. Then \"dsync sync --adopt\" compares everything, overwrites what \
                 differs, and makes it a replica of {path}; or go on syncing to it from the source of term {other_term}"
            ),
        }
    }
}
