//! Errors of a sync, by what the user can do about them.

use serde::{Deserialize, Serialize};

use crate::conflict::Conflict;

/// The class of an error, which decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Something failed.
    Failed,
    /// `tracked` was demanded, and what changed is not known.
    Lost,
    /// Lineage, state or a lock forbids it.
    Refused,
    /// The destination is a disk of the same source that has gone another way, which is refused.
    Diverged,
    /// The replica was modified outside dsync, which is refused.
    Changed,
    /// Another program uses the source or the replica, which may be free soon.
    Busy,
    /// The replica is not where it was: its disk or file system may come back.
    Away,
    /// A part of the source cannot be read.
    Unreadable,
}

impl Class {
    /// True if something forbids it, and nothing failed.
    pub fn is_refusal(self) -> bool {
        matches!(self, Class::Refused | Class::Diverged | Class::Changed)
    }
}

/// Why a sync failed.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// At the source.
    #[error(transparent)]
    Source(#[from] source::SourceError),
    /// At the replica, on this side of a link.
    #[error(transparent)]
    Replica(#[from] replica::ReplicaError),
    /// Between them.
    #[error(transparent)]
    Link(#[from] link::Error),
    /// The delta.
    #[error(transparent)]
    Delta(#[from] delta::Error),
    /// Reading or writing.
    #[error("cannot {what}: {error}")]
    Io {
        /// The action that failed.
        what: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// The far side failed.
    #[error("{message}")]
    Far {
        /// Its message.
        message: String,
        /// Its class.
        class: Class,
    },
    /// The sync cannot be planned.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// Another stage failed, or a stop was requested: not an error of its own.
    #[error("stopped")]
    Stopped,
    /// A part of the source cannot be read.
    #[error(
        "the source cannot be read ({0}), so nothing was committed: \"dsync sync --keep-going\" copies the rest and leaves the replica incomplete"
    )]
    Unreadable(String),
    /// A part of the source cannot be read to verify a replica.
    #[error(
        "the source cannot be read ({0}), so the replica was not verified: --keep-going compares the rest, and \"dsync sync --method compare --keep-going\" mends it"
    )]
    Unverifiable(String),
    /// What changed at the source since the replica's epoch is not known, which the verification was to know.
    #[error(
        "what changed at the source since the replica's epoch {epoch} is not known ({why}), so a difference need not be damage"
    )]
    Inexact {
        /// The replica's epoch.
        epoch: u64,
        /// Why it is not known.
        why: String,
    },
    /// A part of the replica cannot be read.
    #[error("the replica cannot be read: {0}: --keep-going skips what cannot be read")]
    UnreadableReplica(#[source] std::io::Error),
    /// What is held open around the cut has failed before it.
    #[error("{0}")]
    Hook(String),
    /// Something is in the way.
    #[error("{0}")]
    Refused(String),
    /// The disks of a group there have gone another way.
    #[error("{0}")]
    Diverged(String),
    /// The replica was modified outside dsync.
    #[error("{0}")]
    Changed(String),
    /// With one of a group.
    #[error("{}: {error}", path.display())]
    Member {
        /// The source.
        path: std::path::PathBuf,
        /// What is wrong.
        error: Box<SyncError>,
    },
    /// With a group, some of whose replicas have given up what only they had.
    #[error("{error}. Before that, {given_up}")]
    GaveUp {
        /// What they gave up.
        given_up: String,
        /// What is wrong.
        error: Box<SyncError>,
    },
    /// The replica is not where it was.
    #[error("{0}")]
    Away(String),
}

impl SyncError {
    /// The class of the error, from which the exit code follows.
    pub fn class(&self) -> Class {
        let refused = match self {
            SyncError::Conflict(Conflict::Lost { .. })
            | SyncError::Source(source::SourceError::Lost { .. }) => return Class::Lost,
            SyncError::Conflict(Conflict::Vanished { .. } | Conflict::Gone(_)) => return Class::Away,
            SyncError::Conflict(Conflict::Newer(newer)) if !matches!(**newer, Conflict::Diverged(_)) => {
                return Class::Refused;
            }
            SyncError::Conflict(Conflict::Diverged(_) | Conflict::Newer(_)) | SyncError::Diverged(_) => {
                return Class::Diverged;
            }
            SyncError::Conflict(_) => true,
            SyncError::Far { class, .. } => return *class,
            SyncError::Source(e) if e.is_busy() => return Class::Busy,
            SyncError::Replica(e) if e.is_busy() => return Class::Busy,
            SyncError::Link(e) if e.is_busy() => return Class::Busy,
            SyncError::Member { error, .. } | SyncError::GaveUp { error, .. } => return error.class(),
            SyncError::Replica(replica::ReplicaError::Changed { .. }) | SyncError::Changed(_) => {
                return Class::Changed;
            }
            SyncError::Replica(replica::ReplicaError::Away(_)) | SyncError::Away(_) => return Class::Away,
            SyncError::Unreadable(_) | SyncError::Unverifiable(_) => return Class::Unreadable,
            SyncError::Io { error, .. } if device::is_unreadable(error) => return Class::Unreadable,
            SyncError::Source(e) => e.is_refusal(),
            SyncError::Replica(e) => e.is_refusal(),
            SyncError::Link(e) => e.is_refusal(),
            SyncError::Refused(_) | SyncError::Inexact { .. } => true,
            _ => false,
        };
        if refused { Class::Refused } else { Class::Failed }
    }

    /// True if only a part of the source cannot be read.
    pub fn is_unreadable(&self) -> bool {
        self.class() == Class::Unreadable
    }

    /// The error of reading the replica.
    pub(crate) fn of_replica(error: std::io::Error) -> SyncError {
        if device::is_unreadable(&error) {
            SyncError::UnreadableReplica(error)
        } else {
            SyncError::io("read the replica")(error)
        }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> SyncError {
        let what = what.into();
        move |error| match error.get_ref().and_then(|error| error.downcast_ref::<link::Error>()) {
            // A read for a peer that has left.
            Some(cut) => cut.clone().into(),
            None => SyncError::Io { what, error },
        }
    }
}
