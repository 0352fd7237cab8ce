//! The checkpoints that were made of a machine for this state directory, and of which disk in which QEMU each has a bitmap. The name of a bitmap
//! is the same in all images of a machine, and comes along where an image is copied: by the name alone, that of another disk would be believed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use source::StateDir;

use crate::failure::Failure;

/// A checkpoint of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    checkpoint: String,
    disk: String,
    /// Names the QEMU, and the image as it was opened there.
    mark: String,
    /// When libvirt made it, in its own words: one that was deleted and made again has the name, and not the bits.
    #[serde(default)]
    created: Option<String>,
}

/// The list of a machine.
pub(super) struct Made {
    path: PathBuf,
    entries: Vec<Entry>,
}

impl Made {
    /// Reads the list of the machine with this plain name. One that cannot be read is empty: what it had is compared.
    pub(super) fn of(state: &StateDir, machine: &str) -> Made {
        let path = state.machines_folder().join(format!("{machine}.checkpoints"));
        let entries = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        Made { path, entries: entries.unwrap_or_default() }
    }

    /// True if the checkpoint that was created then is of this disk, as it is open now.
    pub(super) fn has(&self, checkpoint: &str, disk: &str, mark: &str, created: &str) -> bool {
        let is = |entry: &Entry| {
            (&*entry.checkpoint, &*entry.disk, &*entry.mark) == (checkpoint, disk, mark)
                && entry.created.as_deref() == Some(created)
        };
        self.entries.iter().any(is)
    }

    /// True if one of the checkpoints was made in this QEMU.
    pub(super) fn is_in(&self, qemu: &str) -> bool {
        self.entries
            .iter()
            .any(|entry| entry.mark.strip_prefix(qemu).is_some_and(|rest| rest.starts_with('-')))
    }

    /// Notes when a checkpoint was created. Until then it is not believed.
    ///
    /// # Errors
    /// If the list cannot be written.
    pub(super) fn confirm(&mut self, checkpoint: &str, created: Option<String>) -> Result<(), Failure> {
        let new = self.entries.iter_mut().filter(|entry| entry.checkpoint == checkpoint);
        new.for_each(|entry| entry.created.clone_from(&created));
        self.write()
    }

    /// True if the checkpoint has a bitmap of this disk.
    pub(super) fn is_of(&self, checkpoint: &str, disk: &str) -> bool {
        self.entries.iter().any(|entry| entry.checkpoint == checkpoint && entry.disk == disk)
    }

    /// The names of the checkpoints.
    pub(super) fn names(&self) -> BTreeSet<&str> {
        self.entries.iter().map(|entry| &*entry.checkpoint).collect()
    }

    /// Adds a checkpoint that is about to be made of these disks, with their marks.
    ///
    /// # Errors
    /// If the list cannot be written.
    pub(super) fn add<'a>(
        &mut self,
        checkpoint: &str,
        disks: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), Failure> {
        let (disks, checkpoint) = (disks.collect::<Vec<_>>(), checkpoint.to_owned());
        let new = disks.into_iter().map(|(disk, mark)| Entry {
            checkpoint: checkpoint.clone(),
            disk: disk.to_owned(),
            mark: mark.to_owned(),
            created: None,
        });
        self.entries.extend(new);
        self.write()
    }

    /// Removes the list.
    ///
    /// # Errors
    /// If that fails.
    pub(super) fn remove(self) -> std::io::Result<()> {
        super::carry::remove(&self.path)
    }

    /// Forgets all but these checkpoints.
    ///
    /// # Errors
    /// If the list cannot be written.
    pub(super) fn keep(&mut self, checkpoints: &BTreeSet<String>) -> Result<(), Failure> {
        self.entries.retain(|entry| checkpoints.contains(&entry.checkpoint));
        self.write()
    }

    /// Replaces the list as a whole: a part of one would be none.
    fn write(&self) -> Result<(), Failure> {
        let text = serde_json::to_vec(&self.entries).unwrap_or_default();
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let replaced = device::Dir::open(folder).and_then(|dir| device::replace(&dir, &name, &text));
        replaced.map_err(|error| Failure::failed(format!("cannot write {}: {error}", self.path.display())))
    }
}
