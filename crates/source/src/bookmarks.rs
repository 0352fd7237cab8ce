//! Bookmarks: the epochs of a source that something still needs, by name. Epochs that have one are not folded.
//!
//! A replica's bookmark has the replica's name, which has a slash or a colon in it, and moves when the replica has committed.
//! A *named checkpoint* has a plain name, and belongs to a reader of which dsync knows nothing else: it moves when that
//! reader asks for it, to the epoch that the reader has, never to the present by itself.

use std::collections::BTreeMap;
use std::path::Path;

use delta::Epoch;
use device::Folder;
use serde::{Deserialize, Serialize};

use crate::SourceError;
use crate::history::History;

const NAME: &str = "bookmarks";
/// The longest name of a checkpoint, in bytes.
const NAME_MAX: usize = 64;

/// The epoch at which a reader was last known to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bookmark {
    /// The epoch.
    pub epoch: Epoch,
    /// When that was, in seconds since 1970.
    pub time: u64,
    /// Bytes of a replica that could not be read here for that epoch.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unread: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The bookmarks of a source, by the name of the replica or the checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bookmarks(pub BTreeMap<String, Bookmark>);

/// True for a valid name of a checkpoint or of a private view: a letter, then letters, digits, dots, dashes and
/// underscores, 64 bytes at most. Replicas never have such names.
pub fn is_plain(name: &str) -> bool {
    name.len() <= NAME_MAX
        && name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
}

impl Bookmarks {
    /// Reads the bookmarks in a source's folder.
    pub fn read(folder: &dyn Folder) -> Result<Bookmarks, SourceError> {
        crate::json::read_json(folder, NAME).map(Option::unwrap_or_default)
    }

    /// The named checkpoints.
    pub fn checkpoints(&self) -> impl Iterator<Item = (&String, &Bookmark)> {
        self.0.iter().filter(|(name, _)| is_plain(name))
    }

    /// The epochs of all of them.
    pub(crate) fn epochs(&self) -> Vec<Epoch> {
        self.0.values().map(|bookmark| bookmark.epoch).collect()
    }

    /// The bookmarks of replicas.
    pub fn replicas(&self) -> impl Iterator<Item = (&String, &Bookmark)> {
        self.0.iter().filter(|(name, _)| !is_plain(name))
    }

    /// Moves a bookmark; durable on return.
    pub(crate) fn set(
        folder: &dyn Folder,
        name: &str,
        epoch: Epoch,
        unread: u64,
    ) -> Result<Bookmarks, SourceError> {
        let mut bookmarks = Self::read(folder)?;
        let time =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        bookmarks.0.insert(name.to_owned(), Bookmark { epoch, time, unread });
        crate::json::write_json(folder, NAME, &bookmarks)?;
        Ok(bookmarks)
    }

    /// Removes a bookmark; durable on return.
    ///
    /// # Errors
    /// `Unknown` if there is none of that name.
    pub(crate) fn remove(folder: &dyn Folder, source: &Path, name: &str) -> Result<(), SourceError> {
        let mut bookmarks = Self::read(folder)?;
        if bookmarks.0.remove(name).is_none() {
            return Err(SourceError::Unknown(format!(
                "{} has no checkpoint or replica \"{name}\": \"dsync status {0}\" lists them",
                source.display()
            )));
        }
        crate::json::write_json(folder, NAME, &bookmarks)
    }

    /// Checks whether the checkpoint `name` may be set at `at`, or at the present.
    ///
    /// # Errors
    /// `Refused` for an invalid name, for a name in use if no epoch is given, for a step back, and for an epoch
    /// that the history does not hold.
    pub(crate) fn admits(
        &self,
        source: &Path,
        history: &History,
        name: &str,
        at: Option<Epoch>,
    ) -> Result<(), SourceError> {
        let source = source.display();
        if !is_plain(name) {
            return Err(SourceError::Refused(format!(
                "invalid checkpoint name \"{name}\": use a letter, then up to {} letters, digits, dots, dashes or underscores",
                NAME_MAX - 1
            )));
        }
        if let Some(at) = at.filter(|at| !history.knows(at.id)) {
            return Err(SourceError::Refused(format!(
                "{source} has no epoch {} in its history: \"dsync status -v {source}\" lists those it has",
                at.number
            )));
        }
        let stands = self.0.get(name).map(|b| b.epoch.number);
        match (stands, at) {
            (Some(stands), None) => Err(SourceError::Refused(format!(
                "checkpoint {name} of {source} exists already, at epoch {stands}: move it with --at EPOCH to the \
                 epoch that its reader has stored. To start over, delete it with --delete {name}; the changes since epoch {stands} are lost then"
            ))),
            (Some(stands), Some(at)) if at.number < stands => Err(SourceError::Refused(format!(
                "checkpoint {name} of {source} is at epoch {stands} and cannot move back to {}: if its reader lost \
                 what it read since, delete it with --delete {name} and set it again at the older epoch",
                at.number
            ))),
            _ => Ok(()),
        }
    }
}
