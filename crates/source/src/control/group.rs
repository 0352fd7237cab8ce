//! Groups: sources whose epochs end at one moment, so that their replicas can be brought to that moment together.
//!
//! A source belongs to at most one group, by a file in its folder, which also says where the group's last cut found it. A
//! **cut** has a number and an id, like an epoch. It is common if all members name the same one and are still at the epochs that
//! they had there: then nothing was written since, and the next cut is the same. Another file says which cut replicas have
//! committed last: the one is written at the cut, the other after the commit.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use delta::Epoch;
use device::{Dir, Folder, FolderLock, Identity};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::SourceError;
use crate::record::bookmarks::is_plain;
use crate::record::state::{SourceMetadata, StateDir, file_name};
use crate::source::{Checkpoint, Source};

const NAME: &str = "group";
const COMMITTED: &str = "group-committed";

/// The group of a source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceMembership {
    /// The name of the group.
    pub name: String,
    /// The last cut, and the epoch of this source there. `None` before the first.
    pub cut: Option<(Epoch, Epoch)>,
    /// Names the last promotion of the group, with which the members took over from others. `None` before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promotion: Option<Uuid>,
    /// What its replica is called, where that is not the name of its file: that of the link by which it joined. The kernel may give a device
    /// another name at the next boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

impl SourceMembership {
    /// The membership of a source that joins.
    pub fn first(name: &str) -> SourceMembership {
        SourceMembership { name: name.to_owned(), cut: None, promotion: None, file: None }
    }

    /// Notes the file name under which the user gave the disk, if it is a device or was given by a link.
    pub fn called(self, given: &Path, is: &Identity) -> SourceMembership {
        let other = is.is_block() || given.file_name() != is.path.file_name();
        let file = given.file_name().filter(|_| other).map(|name| name.to_string_lossy().into_owned());
        SourceMembership { file, ..self }
    }

    /// What the replica of the source at a path without links is called.
    pub fn file_of(&self, path: &Path) -> String {
        self.file.clone().unwrap_or_else(|| file_name(path))
    }

    /// The group of the source whose folder this is; `None` if it has none.
    pub fn read(folder: &dyn Folder) -> Result<Option<SourceMembership>, SourceError> {
        crate::record::json::read_json(folder, NAME)
    }

    fn write(&self, folder: &dyn Folder) -> Result<(), SourceError> {
        crate::record::json::write_json(folder, NAME, self)
    }

    /// The last cut at which replicas are known to be, and the epoch of this source there. `None` before the first.
    pub fn committed(&self, folder: &dyn Folder) -> Result<Option<(Epoch, Epoch)>, SourceError> {
        let found = crate::record::json::read_json::<SourceMembership>(folder, COMMITTED)?;
        Ok(found.filter(|committed| committed.name == self.name).and_then(|committed| committed.cut))
    }
}

/// Writes down that the replicas of a group have committed a cut, of which the source with this state folder is a member at this epoch.
fn write_commit(folder: &dyn Folder, name: &str, at: (Epoch, Epoch)) -> Result<(), SourceError> {
    let committed = SourceMembership { cut: Some(at), ..SourceMembership::first(name) };
    crate::record::json::write_json(folder, COMMITTED, &committed)
}

/// Writes down a commit as [`write_commit`] does, unless that of a later cut is known: the replicas in one folder may have committed after those in
/// another one, which were cut later. For the process that holds the source.
pub(crate) fn record_commit(folder: &dyn Folder, name: &str, at: (Epoch, Epoch)) -> Result<(), SourceError> {
    match SourceMembership::first(name).committed(folder)? {
        Some((known, _)) if known.number > at.0.number => Ok(()),
        _ => write_commit(folder, name, at),
    }
}

/// Sources of a group: where the state of each is, and what it knows of the group.
pub type Members = Vec<(PathBuf, SourceMetadata, SourceMembership)>;

/// The sources of a group.
///
/// # Errors
/// If a folder cannot be read: its source may be a member.
pub fn group_members(state: &StateDir, name: &str) -> Result<Members, SourceError> {
    let survey = state.survey()?;
    if let Some((_, error)) = survey.damaged.into_iter().next() {
        return Err(error);
    }
    let mut members = Vec::new();
    for (place, about) in survey.sources {
        let folder = match Dir::existing(&place) {
            // It was forgotten since it was found.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            folder => folder.map_err(SourceError::state("open", &place))?,
        };
        if let Some(group) = SourceMembership::read(&folder)?.filter(|group| group.name == name) {
            members.push((place, about, group));
        }
    }
    Ok(members)
}

/// Makes the source at a path a member of a group, which goes on from a cut at which this source was at an epoch, if that is known. One
/// that joins belongs to the promotion of the others. False if it is a member already.
///
/// # Errors
/// If it is not a source, or its folder cannot be written.
pub fn join_group(state: &StateDir, path: &Path, group: SourceMembership) -> Result<bool, SourceError> {
    let Some((place, _)) = state.source(&path.to_string_lossy())? else {
        return Err(SourceError::Unknown(format!("{} is not a known source", path.display())));
    };
    let folder = Dir::existing(&place).map_err(SourceError::state("open", &place))?;
    join_in(&folder, path, group, &|name| group_members(state, name))
}

/// Makes the source with this state folder a member, as [`join_group`] does; `members` lists the sources of a group.
///
/// # Errors
/// As [`join_group`].
#[doc(hidden)]
pub fn join_in(
    folder: &dyn Folder,
    path: &Path,
    group: SourceMembership,
    members: &dyn Fn(&str) -> Result<Members, SourceError>,
) -> Result<bool, SourceError> {
    match SourceMembership::read(folder)? {
        Some(known) if known.name != group.name => return Err(in_another(path, &known.name)),
        Some(known) if group.promotion.is_none() || known.promotion == group.promotion => return Ok(false),
        _ => {}
    }
    let promotion = match group.promotion {
        None => members(&group.name)?.first().and_then(|(.., other)| other.promotion),
        known => known,
    };
    // Those whose place it takes were committed there together.
    if let Some((cut, epoch)) = group.cut {
        write_commit(folder, &group.name, (cut, epoch))?;
    }
    SourceMembership { promotion, ..group }.write(folder)?;
    Ok(true)
}

/// Takes a source out of its group.
///
/// # Errors
/// `Unknown` if it is in none of that name; `Busy` while a command or a server holds it.
pub fn leave_group(place: &Path, about: &SourceMetadata, name: &str) -> Result<(), SourceError> {
    let folder = Dir::existing(place).map_err(SourceError::state("open", place))?;
    if SourceMembership::read(&folder)?.is_none_or(|group| group.name != name) {
        return Err(SourceError::Unknown(format!(
            "{} is not in a group \"{name}\": \"dsync status\" lists sources and their groups",
            about.path.display()
        )));
    }
    let taken = FolderLock::take(place).map_err(SourceError::state("lock", place))?;
    let _lock = taken.map_err(|holder| SourceError::Busy { path: about.path.clone(), holder })?;
    leave_in(&folder)
}

/// Takes the source with this state folder out of its group, whichever that is and whoever holds the source.
///
/// # Errors
/// If the folder cannot be written.
#[doc(hidden)]
pub fn leave_in(folder: &dyn Folder) -> Result<(), SourceError> {
    let left = folder.remove(NAME).and_then(|()| folder.remove(COMMITTED)).and_then(|()| folder.sync());
    left.map_err(SourceError::state("remove the group of a source in", folder.path()))
}

/// The cut of these members at these epochs: the last one where nothing was written since, else the next. Written down in all of
/// their folders.
pub(crate) fn record_cut(name: &str, members: &[(&dyn Folder, Epoch)]) -> Result<Epoch, SourceError> {
    let mut before = Vec::new();
    for (folder, _) in members {
        let known = SourceMembership::read(*folder)?.filter(|group| group.name == name);
        before.push(known.unwrap_or_else(|| SourceMembership::first(name)));
    }
    let first = before.first().and_then(|group| group.cut);
    let stands = first.filter(|(cut, _)| {
        before.iter().zip(members).all(|(last, (_, epoch))| last.cut == Some((*cut, *epoch)))
    });
    if let Some((cut, _)) = stands {
        return Ok(cut);
    }
    let last = before.iter().filter_map(|group| group.cut).map(|(cut, _)| cut.number).max().unwrap_or(0);
    let cut = Epoch { number: last + 1, id: Uuid::new_v4() };
    for (group, (folder, epoch)) in before.into_iter().zip(members) {
        SourceMembership { cut: Some((cut, *epoch)), ..group }.write(*folder)?;
    }
    Ok(cut)
}

pub(crate) fn in_another(path: &Path, group: &str) -> SourceError {
    let path = path.display();
    SourceError::Refused(format!(
        "{path} is in the group {group}: take it out first, with \"dsync forget --group {group} {path}\""
    ))
}

/// Refuses a group whose sources, which are these, are not those of one promotion: each would be at the end of another history. That
/// happens on one host only, where the replicas take over beside their old sources.
///
/// # Errors
/// `Refused` then.
pub fn check_promotion(
    name: &str,
    members: &[(PathBuf, SourceMetadata, SourceMembership)],
) -> Result<(), SourceError> {
    let later = |about: &SourceMetadata| {
        let known = members.iter().map(|(_, other, _)| other);
        known.filter(|other| other.uuid == about.uuid).max_by_key(|other| other.term)
    };
    let (mut old, mut new) = (Vec::new(), Vec::new());
    for (_, about, _) in members {
        let Some(other) = later(about).filter(|other| other.term > about.term) else { continue };
        let (from, to) = (other.path.display(), about.path.display());
        old.push(format!("\"dsync sync {from} {to} --save-there FILE\""));
        new.push(format!("{} (term {})", other.path.display(), other.term));
    }
    if old.is_empty() {
        return one_promotion(name, members);
    }
    Err(SourceError::Refused(format!(
        "the group {name} has the promoted disks here as well as their old sources: {} went on from them. To make replicas of the old ones, \
         run {}. To give up the promoted ones instead, sync in the other direction. \"dsync forget --group {name} DISK\" leaves one as it is",
        new.join(", "),
        old.join(" and ")
    )))
}

/// Refuses these members if some of them took over without the others.
fn one_promotion(
    name: &str,
    members: &[(PathBuf, SourceMetadata, SourceMembership)],
) -> Result<(), SourceError> {
    let last = members.iter().max_by_key(|(_, about, group)| (group.promotion.is_some(), about.term));
    let Some((_, first, group)) = last else { return Ok(()) };
    let others = members.iter().filter(|(.., other)| other.promotion != group.promotion);
    let others: Vec<_> = others.map(|(_, about, _)| about.path.display().to_string()).collect();
    if others.is_empty() {
        return Ok(());
    }
    Err(SourceError::Refused(format!(
        "the disks of the group {name} are of different moments: {} was promoted with the group, and not together with {}. Demote what was given up, or \
         take it out with \"dsync forget --group {name} DISK\"; \"dsync serve --group {name}\" adds it again as it is then",
        first.path.display(),
        others.join(", ")
    )))
}

/// A group whose members this process serves.
pub struct SourceGroup {
    name: String,
    members: Vec<Arc<Source>>,
    /// One cut at a time.
    cutting: Mutex<()>,
}

impl SourceGroup {
    /// Makes a group of these sources, each with the path by which its user names it, or takes up the one that they are. Writes that down in
    /// their folders.
    ///
    /// # Errors
    /// `Refused` for an invalid name, if one of them is in another group, or if a known source is in this one and not among them:
    /// a cut without it would tear the group.
    pub fn new(
        state: &StateDir,
        name: &str,
        members: Vec<(PathBuf, Arc<Source>)>,
    ) -> Result<SourceGroup, SourceError> {
        check_name(name)?;
        let (given, members): (Vec<_>, Vec<_>) = members.into_iter().unzip();
        let known = group_members(state, name)?;
        for (_, about, _) in &known {
            let path = about.path.display();
            let served = members.iter().find(|member| member.about().uuid == about.uuid);
            if let Some(old) = served.filter(|member| member.about().term < about.term) {
                let old = old.about().path.display();
                return Err(SourceError::Refused(format!(
                    "{path} was promoted in the place of {old} (term {}), and is in the group {name}: a sync of the group would not know which is meant. \
                     Serve {path}; or give it up first, with \"dsync demote {path}\", or leave it as it is, with \"dsync forget --group {name} {path}\"",
                    about.term
                )));
            }
            if served.is_none() {
                return Err(SourceError::Refused(format!(
                    "{path} is in the group {name} as well: serve it together with the others, or take it out with \"dsync forget \
                     --group {name} {path}\""
                )));
            }
        }
        let is_served = |(_, about, _): &(PathBuf, SourceMetadata, SourceMembership)| {
            members
                .iter()
                .any(|member| (member.about().uuid, member.about().term) == (about.uuid, about.term))
        };
        let known: Vec<_> = known.into_iter().filter(is_served).collect();
        one_promotion(name, &known)?;
        let promotion = known.first().and_then(|(.., group)| group.promotion);
        let (mut joining, mut names) = (Vec::new(), Vec::new());
        for (member, given) in members.iter().zip(&given) {
            let about = member.about();
            let group = match SourceMembership::read(member.folder())? {
                Some(group) if group.name == name => group,
                Some(group) => return Err(in_another(&about.path, &group.name)),
                None => {
                    let first = SourceMembership::first(name).called(given, &about.identity);
                    joining.push((member, SourceMembership { promotion, ..first.clone() }));
                    first
                }
            };
            names.push(group.file_of(&about.path));
        }
        names.sort();
        if let Some(same) = names.windows(2).find(|two| two[0] == two[1]) {
            return Err(SourceError::Refused(format!(
                "two members of the group {name} are called {}, and so would be their replicas: rename one",
                same[0]
            )));
        }
        for (member, group) in joining {
            group.write(member.folder())?;
        }
        Ok(SourceGroup { name: name.to_owned(), members, cutting: Mutex::new(()) })
    }

    /// Ends the epochs of all members at one moment. Returns the cut, and for each member its checkpoint, whose view is open until
    /// it is dropped.
    ///
    /// # Errors
    /// If an epoch cannot be ended: then no view is left open.
    #[allow(clippy::type_complexity)]
    pub fn checkpoint(&self) -> Result<(Epoch, Vec<(Arc<Source>, Checkpoint)>), SourceError> {
        let _alone = self.cutting.lock().unwrap_or_else(|e| e.into_inner());
        let ended = Source::checkpoint_together(&self.members)?;
        let folders: Vec<_> =
            self.members.iter().zip(&ended).map(|(member, c)| (member.folder(), c.epoch)).collect();
        let cut = record_cut(&self.name, &folders);
        let ended: Vec<_> = self.members.iter().cloned().zip(ended).collect();
        if cut.is_err() {
            for (member, checkpoint) in &ended {
                checkpoint.saved.iter().for_each(|saved| member.disk().drop_view(saved));
            }
        }
        Ok((cut?, ended))
    }

    /// The members.
    pub(crate) fn members(&self) -> &[Arc<Source>] {
        &self.members
    }
}

/// Refuses an invalid name of a group.
pub fn check_name(name: &str) -> Result<(), SourceError> {
    if is_plain(name) {
        return Ok(());
    }
    Err(SourceError::Refused(format!(
        "invalid group name \"{name}\": use a letter, then up to 63 letters, digits, dots, dashes or underscores"
    )))
}
