//! Why a sync cannot be planned.

use std::path::PathBuf;

use uuid::Uuid;

/// Why a sync cannot be planned. Its text names the thing, the reason and the way out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The source remembers a replica where none is.
    #[error(
        "the replica at {name} is missing: it was last synced on {time}, to epoch {epoch}. If its file system is not mounted \
         or its disk not attached, bring it back and run again; if it is gone for good, \"dsync sync --create\" begins a new \
         replica there, with all of the source"
    )]
    Vanished {
        /// The replica, as the user named it.
        name: String,
        /// When it was last synced.
        time: String,
        /// The epoch it was at then.
        epoch: u64,
    },
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
    /// `tracked` was demanded, and there is no replica yet.
    #[error("no replica at {} yet: run the first sync without --method tracked", .0.display())]
    NoReplica(PathBuf),
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
