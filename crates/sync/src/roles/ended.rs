//! The demotion of the sources of a group: an intent in the state directory names all of them. From the moment at which that is there,
//! none of them is a source any more. It stays, so that the command can be repeated, until a group of that name is demoted next.

use std::path::{Path, PathBuf};

use delta::Epoch;
use device::{Folder, FolderLock};
use replica::{Intent, Member, Promoted};
use source::SourceMetadata;

use crate::error::SyncError;
use crate::site::Site;

/// The demotion of a group, held by this process.
pub(crate) struct Ending {
    folder: Box<dyn Folder>,
    lock: Option<FolderLock>,
    /// The sources that have ended.
    pub intent: Option<Intent>,
}

impl Ending {
    /// Takes that of a group.
    pub(crate) fn open(state: &dyn Site, name: &str) -> Result<Ending, SyncError> {
        let (folder, lock) = state.demoting(name)?;
        let intent = Intent::read(&*folder)?;
        Ok(Ending { folder, lock, intent })
    }

    /// All of these have ended: durable on return.
    pub(crate) fn begin(&mut self, intent: Intent) -> Result<(), SyncError> {
        intent.store(&*self.folder)?;
        self.intent = Some(intent);
        Ok(())
    }

    /// The disks that it has ended, or made replicas, and that are nothing else since, by their present paths: each with where it was,
    /// and whether it is a source still.
    pub(crate) fn disks(&self, state: &dyn Site) -> Result<Vec<Ended>, SyncError> {
        let known = state.sources()?;
        let mut disks = Vec::new();
        let members = self.intent.iter().flat_map(|intent| intent.members.iter().map(move |of| (intent, of)));
        for (intent, (path, member)) in members {
            // By its source: a device may have another name by now, and another disk this one.
            let mut ended = None;
            for about in &known {
                if has_ended(member, about, state)? {
                    ended = Some(about);
                }
            }
            let (epoch, file) = (member.epoch, intent.files.get(&member.source).cloned());
            let file = file.unwrap_or_else(|| source::file_name(path));
            if let Some(about) = ended {
                disks.push(Ended { path: about.path.clone(), file, epoch, is_source: true });
            } else if was_demoted(path, member, state)? {
                disks.push(Ended { path: path.clone(), file, epoch, is_source: false });
            }
        }
        Ok(disks)
    }
}

/// A disk that a demotion names.
pub(crate) struct Ended {
    pub path: PathBuf,
    /// What its replica is called.
    pub file: String,
    /// Where it was when that was decided.
    pub epoch: Epoch,
    /// It is not demoted yet.
    pub is_source: bool,
}

/// True if the disk at this path is a replica since this demotion.
fn was_demoted(path: &Path, member: &Member, state: &dyn Site) -> Result<bool, SyncError> {
    if !state.exists(path) {
        return Ok(false);
    }
    let lineage = state.lineage(path, &state.opening(None))?;
    Ok(lineage.is_some_and(|lineage| {
        let role = &lineage.role;
        lineage.source == Some(member.source)
            && role.promoted.is_none()
            && role.demoted.is_some()
            && Some(role.term) == member.ended
    }))
}

/// The disks that the demotion of a group has made replicas, and that are that still, with what they were called in it.
pub(crate) fn demoted_disks(state: &dyn Site, name: &str) -> Result<Vec<(PathBuf, String)>, SyncError> {
    let mut disks = Vec::new();
    for intent in state.endings()?.iter().filter(|intent| intent.group == name) {
        for (path, member) in &intent.members {
            if was_demoted(path, member, state)? {
                let file = intent.files.get(&member.source).cloned();
                disks.push((path.clone(), file.unwrap_or_else(|| source::file_name(path))));
            }
        }
    }
    Ok(disks)
}

/// The promotion that made a source of the disk at this path; `None` if there was none.
pub(crate) fn promotion_of(state: &dyn Site, path: &Path) -> Result<Option<Promoted>, SyncError> {
    if !state.exists(path) {
        return Ok(None);
    }
    Ok(state.lineage(path, &state.opening(None))?.and_then(|lineage| lineage.role.promoted))
}

/// True if this source has ended so. Another term of it has not, and neither has one of the same number that another promotion began:
/// a source of an earlier term may have made a replica of it in between.
fn has_ended(member: &Member, about: &SourceMetadata, state: &dyn Site) -> Result<bool, SyncError> {
    if (member.source, member.ended) != (about.uuid, Some(about.term)) {
        return Ok(false);
    }
    let Some(then) = member.promoted else { return Ok(true) };
    Ok(promotion_of(state, &about.path)?.is_none_or(|now| now.id == then.id))
}

impl Drop for Ending {
    fn drop(&mut self) {
        // A folder that was made only for the lock goes again.
        if let Some(lock) = self.lock.take().filter(|_| self.intent.is_none()) {
            lock.remove();
        }
    }
}

/// The group whose demotion has ended this source, where it is not demoted yet.
pub(crate) fn ended_with(state: &dyn Site, about: &SourceMetadata) -> Result<Option<String>, SyncError> {
    for intent in state.endings()? {
        for member in intent.members.values() {
            if has_ended(member, about, state)? {
                return Ok(Some(intent.group));
            }
        }
    }
    Ok(None)
}
