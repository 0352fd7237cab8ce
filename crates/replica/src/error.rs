//! What can go wrong with a replica, by what its user can do about it.

use std::io;
use std::path::{Path, PathBuf};

use uuid::Uuid;

/// An error of this crate. In the commands that a text names, SRC and DST are the source and the replica: a caller that knows their names
/// puts them in. Unless the text says otherwise, the destination is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// Another process uses the replica.
    #[error("replica {} is in use ({holder}): wait for it, as --wait does, or stop it", path.display())]
    Busy {
        /// The destination.
        path: PathBuf,
        /// Which process.
        holder: String,
    },
    /// What is at the path was never a replica.
    #[error("{} exists but is not a dsync replica: choose another path, or run \"dsync sync --adopt SRC DST\", which compares it in full and overwrites what differs", .0.display())]
    NotAReplica(PathBuf),
    /// A file was adopted, and the compare did not complete.
    #[error("the adoption of {} was interrupted before all of it was compared: run \"dsync sync --adopt SRC DST\" again, which compares it in full", .0.display())]
    Unproven(PathBuf),
    /// A replica's file was moved, and its state was not.
    #[error("{} is the replica that was at {}, moved without its state: move {} to {} as well, then run \"dsync verify --repair SRC DST\", which compares it: its times do not tell a move from a write", path.display(), was.display(), from.display(), to.display())]
    Moved {
        /// Where the file is.
        path: PathBuf,
        /// Where it was.
        was: PathBuf,
        /// Where its state is.
        from: PathBuf,
        /// Where that state belongs.
        to: PathBuf,
    },
    /// A file is in the way of the seed.
    #[error("{} is in the way of the new copy and was not created by dsync: move it aside", .0.display())]
    PartialTaken(PathBuf),
    /// The destination is not as the last commit left it.
    #[error("replica {} was modified outside dsync since its last commit ({why}): find out who writes there first; {}", path.display(), mends(path, group.as_deref(), *former, *as_old))]
    Changed {
        /// The destination.
        path: PathBuf,
        /// In what way it differs.
        why: String,
        /// The group that it is committed with.
        group: Option<String>,
        /// It was the source before: what was written to it may be wanted.
        former: bool,
        /// Its content is as long and as old as it was left.
        as_old: bool,
    },
    /// The replica was made the source itself.
    #[error(
        "{} {promoted}, after {at}: it is a source itself now, and merging into it would overwrite what was written there since. \
         To make it a replica again, run \"dsync demote {}\" where it is: it keeps its writes, and a sync to it then says how they are saved or given up", path.display(), path.display()
    )]
    Promoted {
        /// The destination.
        path: PathBuf,
        /// What happened to it, and when.
        promoted: String,
        /// What it was at.
        at: String,
    },
    /// The replica is committed with the others of a group.
    #[error(
        "{} is a replica of the group {group}, whose replicas are committed together: \"dsync sync --group {group} DIR\" brings all \
         of them up to date, and \"dsync rewind --group DIR\" takes them back. To sync it by itself, run \"dsync forget --group {group} DISK\" where its source is: \
         the next sync of that takes it out of the group", path.display()
    )]
    InGroup {
        /// The destination.
        path: PathBuf,
        /// The group.
        group: String,
    },
    /// Another process works on the replicas of a group.
    #[error("group {group} in {} is in use ({holder}): wait for it, as --wait does, or stop it", dir.display())]
    GroupBusy {
        /// The name of the group.
        group: String,
        /// Where its replicas are.
        dir: PathBuf,
        /// Which process.
        holder: String,
    },
    /// A state file is damaged.
    #[error("{} is damaged ({why}): {way_out}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// In what way.
        why: String,
        /// What to do.
        way_out: String,
    },
    /// The delta is of another source.
    #[error("replica {} is a copy of source {has}, but the delta is of source {given}: give the right destination", path.display())]
    WrongSource {
        /// The destination.
        path: PathBuf,
        /// The source it follows.
        has: Uuid,
        /// The source of the delta.
        given: Uuid,
    },
    /// The delta goes on from an epoch, and nothing was ever committed here.
    #[error("replica {} {has}, and {given}: merge a whole copy first, made with \"dsync extract --since 0\", or run \"dsync sync\"", path.display())]
    Unseeded {
        /// The destination.
        path: PathBuf,
        /// What is there.
        has: String,
        /// What the delta is.
        given: String,
    },
    /// The delta does not fit what the replica holds.
    #[error("replica {} {has}, {given}", path.display())]
    WrongEpoch {
        /// The destination.
        path: PathBuf,
        /// What it is at.
        has: String,
        /// What the delta needs, and the way out.
        given: String,
    },
    /// The sizes do not fit.
    #[error("replica {} holds {}, {given}", path.display(), device::exact_size(*has))]
    WrongSize {
        /// The destination.
        path: PathBuf,
        /// Its size in bytes.
        has: u64,
        /// What the delta says, and the way out.
        given: String,
    },
    /// The delta is damaged, cut short, or of a kind that is not understood.
    #[error("replica {}: the delta is refused: {error}", path.display())]
    Delta {
        /// The destination.
        path: PathBuf,
        /// What is wrong with it.
        error: String,
    },
    /// The destination is not there; its disk or file system may come back.
    #[error("{0}")]
    Away(String),
    /// Not possible with this destination.
    #[error("{0}")]
    Refused(String),
    /// No space.
    #[error("no space left {place}; {state}: free {} and run again{otherwise}", missing.map_or("some".into(), |m| format!("about {}", device::human_size(m))))]
    Full {
        /// For what, and where.
        place: String,
        /// Bytes that are missing, as far as is known: zeroes and compressed data take less.
        missing: Option<u64>,
        /// What became of the destination.
        state: &'static str,
        /// What helps besides, as the end of the sentence.
        otherwise: &'static str,
    },
    /// The disk could not be opened or locked.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// A call failed.
    #[error("cannot {what} {}: {error}{}", path.display(), way_out(error))]
    Io {
        /// What was tried, as a verb.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        error: io::Error,
    },
}

/// What brings a replica that others have changed back to its source.
fn mends(path: &Path, group: Option<&str>, former: bool, as_old: bool) -> String {
    let path = path.display();
    let accept = match as_old {
        true => format!(
            ". If nothing was written to it, \"dsync recover --accept {path}\" takes it for what it was, {}",
            if former { "and nothing is compared" } else { "also where its source is gone" }
        ),
        false => String::new(),
    };
    if former {
        return format!(
            "it was the source until it was demoted. If another disk was promoted in its place, \"dsync sync --adopt SRC DST\" from there \
             compares both and overwrites what differs. If none was, \"dsync forget {path}\" makes it a plain disk as it is, and \"dsync sync --adopt \
             {path} REPLICA\" then compares each of its replicas with it and overwrites what differs there{accept}"
        );
    }
    let looks = "\"dsync verify SRC DST\" shows what differs and changes nothing";
    match group {
        Some(group) => format!(
            "{looks}; \"dsync sync --group {group} --adopt DIR\" compares all replicas of the group with their sources and overwrites what \
             differs{accept}"
        ),
        None => format!(
            "{looks}; \"dsync verify --repair SRC DST\" overwrites what differs with the source and accepts the rest; if nothing was written, \
             the moments kept by --keep stay. \"dsync sync --adopt SRC DST\" does the same, and gives them up{accept}"
        ),
    }
}

/// What this crate returns.
pub type Result<T> = std::result::Result<T, ReplicaError>;

impl ReplicaError {
    /// True if another program uses the replica, and may release it soon.
    pub fn is_busy(&self) -> bool {
        match self {
            ReplicaError::Busy { .. } | ReplicaError::GroupBusy { .. } => true,
            ReplicaError::Device(e) => e.is_busy(),
            _ => false,
        }
    }

    /// True if lineage, state or a lock refuses, and nothing failed.
    pub fn is_refusal(&self) -> bool {
        match self {
            ReplicaError::Full { .. } | ReplicaError::Io { .. } | ReplicaError::Delta { .. } => false,
            ReplicaError::Device(e) => e.is_busy(),
            _ => true,
        }
    }
}

/// What became of the destination when space or a disk failed.
pub(crate) const SAFE: &str = "the delta is safe in the journal, and the next command completes the commit";
/// What helps where a journal finds no room. Where it is, the first copy has decided.
pub(crate) const IN_PLACE: &str = ". \"dsync sync --commit in-place\" needs no journal; but if the replica is sparse, and its file system fills up, \
                                   it is incomplete until a sync finds room to complete it";
pub(crate) const INTERRUPTED: &str =
    "the replica is unchanged, or incomplete until the next sync completes it (\"dsync status\" says which)";

fn way_out(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => ": its file system is mounted read-only: remount it for writing",
        io::ErrorKind::PermissionDenied => ": run as a user who may do this, or change its owner or mode",
        io::ErrorKind::StorageFull => ": free some space on its file system and run again",
        io::ErrorKind::QuotaExceeded => ": raise the quota of its owner, or free some space, and run again",
        _ => "",
    }
}

/// Names the thing and the place in a failed call's error.
pub(crate) fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ReplicaError + use<> {
    let path = path.to_path_buf();
    move |error| ReplicaError::Io { what, path, error }
}

/// Names the thing and the place in an error of the destination; `state` tells what became of the replica.
pub(crate) fn disk_error(
    what: &'static str,
    path: &Path,
    state: &'static str,
) -> impl FnOnce(io::Error) -> ReplicaError + use<> {
    let path = path.to_path_buf();
    move |error| match is_full(&error) {
        true => {
            let place = format!("to {what} {}", path.display());
            ReplicaError::Full { place, missing: None, state, otherwise: "" }
        }
        false => ReplicaError::Io { what, path, error },
    }
}

/// True where only room is missing.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
