//! Errors of a source, by what the user can do about them.

use std::path::{Path, PathBuf};

use crate::Gap;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The disk or its identity.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The record.
    #[error(transparent)]
    Track(#[from] trackers::TrackError),
    /// A state file could not be read or written.
    #[error("cannot {what} {}: {error}{}", path.display(), way_out(error))]
    State {
        /// The action that failed, as a verb.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// A state file is damaged.
    #[error("{} is damaged ({why}): restore it from a backup, or move its directory aside to start a new source; \"dsync sync --adopt\" then compares each replica in full", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// In what way.
        why: String,
    },
    /// Another program holds the source.
    #[error("source {} is in use ({holder}): wait for it, as --wait does, or stop it", path.display())]
    Busy {
        /// The source.
        path: PathBuf,
        /// The holder.
        holder: String,
    },
    /// Its file systems were frozen, or its image cloned, too recently to be so again for a peer.
    #[error("writes to {} were stopped a short time ago, for a freeze or a clone, and for peers they are stopped for no more than a tenth of the time: run again later, or pass --wait", .0.display())]
    Rests(PathBuf),
    /// No such source.
    #[error("{0}")]
    Unknown(String),
    /// The replica is at an epoch that this source never had.
    #[error("{0}")]
    Foreign(String),
    /// What changed since then is not known.
    #[error("what changed since epoch {since} is not known: {why}")]
    Lost {
        /// The replica's epoch.
        since: u64,
        /// The reason.
        why: Gap,
    },
    /// The source is smaller than it was, and nobody has agreed to that.
    #[error("source {} shrank from {} to {}: pass --allow-shrink if that is intended", path.display(), device::exact_size(*was), device::exact_size(*is))]
    Shrank {
        /// The source.
        path: PathBuf,
        /// The size that it had, in bytes.
        was: u64,
        /// The size that it has, in bytes.
        is: u64,
    },
    /// A disk in use is written to in a way that leaves no moment to copy.
    #[error("{0}")]
    Restless(String),
    /// The source changed during a read, although it is not served.
    #[error("another program wrote to source {} while it was read, so the data read is not one moment of it: stop that program, or track the source (\"dsync track add\" for a disk, or an image on XFS or Btrfs; \"dsync serve\" for any image), and run again", .0.display())]
    Moved(PathBuf),
    /// Another program wrote to the image of a source that is tracked by clones, while that had to be at rest.
    #[error("another program wrote to source {} while it had to be at rest (for a demotion, for a group, or because no clone of it can be made): stop that program, and run again", .0.display())]
    NotAtRest(PathBuf),
    /// Another file is at the path of the served one.
    #[error("{} was replaced by another file while it is served: what clients have written is in the file that the server has open, and is gone when that stops. Copy it first (\"nbdcopy\" from the server); then stop the server, put the copy in its place, and serve it again", .0.display())]
    Replaced(PathBuf),
    /// The server of a source gave an error, or went away.
    #[error("{0}")]
    Server(String),
    /// The server of a source does not answer what it answers at once.
    #[error(
        "the server of the source has not answered for 10 seconds, so it hangs, or was stopped: look at its process, or end it and start it again"
    )]
    Hangs,
    /// The server of a source stopped.
    #[error("the server of {} went away: start it again with \"dsync serve\"", .0.display())]
    Away(PathBuf),
    /// The hook around the moment of a clone failed.
    #[error("{0}")]
    Hook(String),
    /// Refused for this source.
    #[error("{0}")]
    Refused(String),
}

fn way_out(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            ": choose another state directory with --state-dir, or run as a user with access to it"
        }
        std::io::ErrorKind::StorageFull => {
            ": free some space, or choose another state directory with --state-dir"
        }
        _ => "",
    }
}

impl SourceError {
    pub(crate) fn state(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> SourceError {
        let path = path.to_path_buf();
        move |error| SourceError::State { what, path, error }
    }

    /// The error where there is no memory for a bitmap of the source's blocks.
    pub(crate) fn memory(path: &Path) -> impl FnOnce(extents::OutOfMemory) -> SourceError {
        let failed = Self::state("follow the changes of", path);
        |error| failed(error.into())
    }

    /// True if another program holds the source, or it rests: it may be free soon.
    pub fn is_busy(&self) -> bool {
        match self {
            SourceError::Busy { .. } | SourceError::Rests(_) => true,
            SourceError::Device(e) => e.is_busy(),
            _ => false,
        }
    }

    /// True if lineage, state or a lock forbids it, rather than a failure.
    pub fn is_refusal(&self) -> bool {
        match self {
            SourceError::Device(e) => e.is_busy(),
            SourceError::Track(e) => e.is_refusal(),
            SourceError::Damaged { .. }
            | SourceError::Busy { .. }
            | SourceError::Rests(_)
            | SourceError::Foreign(_)
            | SourceError::Replaced(_)
            | SourceError::Shrank { .. }
            | SourceError::Restless(_)
            | SourceError::Refused(_) => true,
            _ => false,
        }
    }
}
