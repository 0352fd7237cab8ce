//! Bookmarks: the epochs of a source that something still needs, by name. Epochs that have one are not folded.
//!
//! A replica's bookmark has the replica's name, which has a slash or a colon in it, and moves when the replica has committed. Where a replica is
//! reached by several names, it has one bookmark, of the name that was used last: it is told by the state in which its last sync has left it.
//! A *named checkpoint* has a plain name, and belongs to a reader of which dsync knows nothing else: it moves when that
//! reader asks for it, to the epoch that the reader has, never to the present by itself.
//!
//! A view records the epochs of all checkpoints when it is created. For each one without a gap of the history in between, its export has
//! the context `qemu:dirty-bitmap:NAME`: what changed from there up to this view, the same for all its readers, wherever the name moves
//! meanwhile. What is not known exactly is not offered. The view's description begins with `epoch NUMBER`: a reader moves its checkpoint
//! to that number when it has stored what it read. The number must come from the connection itself: after a crash there may be another
//! view of that name. While a view is open its epoch is not folded, so that this step is possible. `dsync changes` does the same for
//! disks that are not served; data read from a disk tracked in the kernel is of that epoch or newer.

use std::collections::BTreeMap;
use std::path::Path;

use delta::Epoch;
use device::Folder;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::SourceError;
use crate::record::history::History;

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
    /// The state of the replica then. `None` for a checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<Uuid>,
    /// Other names of the replica.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<String>,
}

/// Where a reader is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reached {
    /// At this epoch.
    pub epoch: Epoch,
    /// Bytes of a replica that could not be read here for it.
    pub unread: u64,
    /// The state in which a replica was before.
    pub was: Option<Uuid>,
    /// The state in which it is now.
    pub state: Option<Uuid>,
}

impl Reached {
    /// An epoch, of no replica that is known by its state.
    pub fn epoch(epoch: Epoch) -> Reached {
        Reached { epoch, unread: 0, was: None, state: None }
    }
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
        crate::record::json::read_json(folder, NAME).map(Option::unwrap_or_default)
    }

    /// The named checkpoints.
    pub fn checkpoints(&self) -> impl Iterator<Item = (&String, &Bookmark)> {
        self.0.iter().filter(|(name, _)| is_plain(name))
    }

    /// The one that is called this, by its own name or by another name of its replica.
    pub fn named(&self, name: &str) -> Option<(&String, &Bookmark)> {
        let also = || self.0.iter().find(|(_, bookmark)| bookmark.also.iter().any(|also| also == name));
        self.0.get_key_value(name).or_else(also)
    }

    /// The names by which the replica in this state is known, unless `name` is one of them.
    pub fn others(&self, name: &str, state: Uuid) -> Option<&String> {
        let (key, bookmark) = self.0.iter().find(|(_, bookmark)| bookmark.state == Some(state))?;
        (key != name && !bookmark.also.iter().any(|also| also == name)).then_some(key)
    }

    /// The epochs of all of them.
    pub(crate) fn epochs(&self) -> Vec<Epoch> {
        self.0.values().map(|bookmark| bookmark.epoch).collect()
    }

    /// The bookmarks of replicas.
    pub fn replicas(&self) -> impl Iterator<Item = (&String, &Bookmark)> {
        self.0.iter().filter(|(name, _)| !is_plain(name))
    }

    /// Moves a bookmark, which takes the place of those that its replica has by other names; durable on return.
    pub(crate) fn set(folder: &dyn Folder, name: &str, at: Reached) -> Result<Bookmarks, SourceError> {
        let mut bookmarks = Self::read(folder)?;
        let time =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let mut also = bookmarks.0.remove(name).map_or(Vec::new(), |before| before.also);
        bookmarks.0.retain(|key, other| {
            if at.was.is_none() || other.state != at.was {
                other.also.retain(|also| also != name);
                return true;
            }
            also.push(key.clone());
            also.append(&mut other.also);
            false
        });
        also.retain(|also| also != name);
        also.sort();
        also.dedup();
        let Reached { epoch, unread, state, .. } = at;
        bookmarks.0.insert(name.to_owned(), Bookmark { epoch, time, unread, state, also });
        crate::record::json::write_json(folder, NAME, &bookmarks)?;
        Ok(bookmarks)
    }

    /// Removes a bookmark; durable on return.
    ///
    /// # Errors
    /// `Unknown` if there is none of that name.
    pub(crate) fn remove(folder: &dyn Folder, source: &Path, name: &str) -> Result<(), SourceError> {
        let mut bookmarks = Self::read(folder)?;
        let key = bookmarks.named(name).map(|(key, _)| key.clone());
        if key.and_then(|key| bookmarks.0.remove(&key)).is_none() {
            return Err(SourceError::Unknown(format!(
                "{} has no checkpoint or replica \"{name}\": \"dsync status {0}\" lists them",
                source.display()
            )));
        }
        crate::record::json::write_json(folder, NAME, &bookmarks)
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
        // Readers of a view find epochs by their ids, and checkpoints by their names.
        if !is_plain(name) || Uuid::try_parse(name).is_ok() {
            return Err(SourceError::Refused(format!(
                "invalid checkpoint name \"{name}\": use a letter, then up to {} letters, digits, dots, dashes or underscores, and no id of an epoch",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_names_of_a_replica_are_one_and_two_copies_of_it_become_two() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = device::Dir::open(scratch.path()).unwrap();
        let mut bookmarks = Bookmarks::default();
        let mut sync = |name: &str, was: u128, state: u128| {
            let (was, state) = (Some(Uuid::from_u128(was)), Some(Uuid::from_u128(state)));
            let epoch = Epoch { number: 1, id: Uuid::nil() };
            bookmarks =
                Bookmarks::set(&folder, name, Reached { was, state, ..Reached::epoch(epoch) }).unwrap();
            bookmarks
                .0
                .iter()
                .map(|(name, known)| format!("{name} {:?}", known.also))
                .collect::<Vec<_>>()
                .join(", ")
        };
        assert_eq!(sync("/a", 0, 1), "/a []");
        assert_eq!(sync("/other", 8, 9), "/a [], /other []");
        assert_eq!(sync("far:/a", 1, 2), "/other [], far:/a [\"/a\"]");
        assert_eq!(sync("/a", 2, 3), "/a [\"far:/a\"], /other []");
        // A copy of what is in state 3: it counts for the first until that is synced itself.
        assert_eq!(sync("copy:/a", 3, 4), "/other [], copy:/a [\"/a\", \"far:/a\"]");
        assert_eq!(sync("/a", 3, 5), "/a [], /other [], copy:/a [\"far:/a\"]");
        assert_eq!(sync("copy:/a", 4, 6), "/a [], /other [], copy:/a [\"far:/a\"]");
        // What was not told by its state before.
        assert_eq!(sync("far:/a", 5, 7), "/other [], copy:/a [], far:/a [\"/a\"]");
    }
}
