//! What the role of a disk depends on at its host: the states of its sources, and what is written down of its replicas.

use std::io;
use std::path::{Path, PathBuf};

use delta::Epoch;
use device::{Folder, FolderLock, Storage};
use extents::Bitmap;
use replica::{Group, Intent, KnownReplicas, Lineage, Replica};
use source::{
    DeviceTrust, Gap, Handle, History, Members, SourceError, SourceMembership, SourceMetadata, SourceOptions,
    Succession,
};
use uuid::Uuid;

use crate::error::SyncError;

/// A host, as commands that ask for the role of a disk or change it see it: [`source::StateDir`]. A trait, so that the simulator can
/// stop the machine before each of their steps.
pub trait Site: Sync {
    /// A path without links, the same before and after there is a file.
    fn real(&self, path: &Path) -> PathBuf;
    /// The state directory, if it is one that another process can find.
    fn state_dir(&self) -> Option<PathBuf> {
        None
    }
    /// True if a disk is at the path.
    fn exists(&self, path: &Path) -> bool;
    /// Bytes of the disk at a path.
    ///
    /// # Errors
    /// If it cannot be looked at.
    fn size(&self, path: &Path) -> Result<u64, SyncError>;
    /// What the disk at a path is stored on, if that is known.
    fn storage(&self, path: &Path) -> Option<Storage>;
    /// How replicas are opened whose state is in that folder, or in the usual one.
    fn opening(&self, journal_dir: Option<&Path>) -> replica::ReplicaOptions;
    /// The lineage of the replica at a path, `None` if there is none: [`replica::inspect`].
    ///
    /// # Errors
    /// As [`replica::inspect`].
    fn lineage(&self, path: &Path, options: &replica::ReplicaOptions) -> replica::Result<Option<Lineage>>;
    /// Opens the replica at a path, or the path for a new one: [`Replica::open`].
    ///
    /// # Errors
    /// As [`Replica::open`].
    fn open(&self, path: &Path, options: &replica::ReplicaOptions) -> replica::Result<Replica>;
    /// The names by which the disk at a path may be a replica, and the folder of its state where that is not the usual one. The path itself is the
    /// first.
    fn names_of(&self, path: &Path) -> Vec<(PathBuf, Option<PathBuf>)> {
        vec![(path.to_path_buf(), None)]
    }
    /// Completes what a crash left of a commit, where a replica is to be read as a disk: [`replica::settle`].
    ///
    /// # Errors
    /// As [`replica::settle`].
    fn settle(&self, path: &Path, options: &replica::ReplicaOptions) -> replica::Result<()>;
    /// True if a commit to a replica may be under way: [`replica::is_committing`].
    ///
    /// # Errors
    /// As [`replica::is_committing`].
    fn is_committing(
        &self,
        _path: &Path,
        _lineage: &Lineage,
        _options: &replica::ReplicaOptions,
    ) -> replica::Result<bool> {
        Ok(false)
    }
    /// The source of a path, an export name or an id, and its present path: [`source::StateDir::source`].
    ///
    /// # Errors
    /// As [`source::StateDir::source`].
    fn source(&self, what: &str) -> Result<Option<(PathBuf, SourceMetadata)>, SourceError>;
    /// All known sources whose state can be read.
    ///
    /// # Errors
    /// If their folders cannot be listed.
    fn sources(&self) -> Result<Vec<SourceMetadata>, SourceError>;
    /// The folder of a source's state.
    ///
    /// # Errors
    /// If it is not there.
    fn folder(&self, place: &Path) -> io::Result<Box<dyn Folder>>;
    /// Opens a source, through its server if one runs: [`Handle::attach`].
    ///
    /// # Errors
    /// As [`Handle::attach`].
    fn attach(&self, what: &str, options: &SourceOptions) -> Result<Handle, SourceError>;
    /// How a source is opened whose user says nothing of that.
    fn unsaid(&self) -> SourceOptions {
        SourceOptions::default()
    }
    /// Makes the disk at a path the source that it followed; false if it is one already: [`source::succeed`].
    ///
    /// # Errors
    /// As [`source::succeed`].
    fn succeed(&self, path: &Path, succession: &Succession) -> Result<bool, SourceError>;
    /// Why a disk may not be as the last command left it: [`source::doubt`].
    ///
    /// # Errors
    /// As [`source::doubt`].
    fn doubt(
        &self,
        place: &Path,
        about: &SourceMetadata,
        trust: DeviceTrust,
    ) -> Result<Option<Gap>, SourceError>;
    /// Adds the blocks written since the last epoch to `into`, and says why not all are known: [`source::written_since`].
    ///
    /// # Errors
    /// As [`source::written_since`].
    fn written_since(
        &self,
        place: &Path,
        about: &SourceMetadata,
        history: &History,
        into: &Bitmap,
    ) -> Result<Option<Gap>, SourceError>;
    /// True if the writes to a source are recorded, or were: [`source::is_recorded`].
    ///
    /// # Errors
    /// As [`source::is_recorded`].
    fn is_recorded(&self, place: &Path, about: &SourceMetadata) -> Result<bool, SourceError>;
    /// Forgets a source, and leaves its disk alone: [`source::forget_source`].
    ///
    /// # Errors
    /// As [`source::forget_source`].
    fn forget(&self, place: &Path, about: &SourceMetadata) -> Result<(), SourceError>;
    /// The list of replicas, if the host has one.
    fn known(&self) -> Option<KnownReplicas>;
    /// The group of that name among the replicas in the folder of this one, and that folder, held.
    ///
    /// # Errors
    /// As [`Group::open`].
    fn group(&self, replica: &Path, name: &str) -> replica::Result<(PathBuf, Group)>;
    /// The group in a folder, and the folder of its replicas: [`replica::find_group`].
    ///
    /// # Errors
    /// As [`replica::find_group`].
    fn find_group(&self, dir: &Path) -> replica::Result<(PathBuf, String)>;
    /// Opens all replicas of a group: [`Group::open_members`].
    ///
    /// # Errors
    /// As [`Group::open_members`].
    fn members(&self, group: &Group, dir: &Path, apart: bool) -> replica::Result<Vec<Replica>>;
    /// The replicas in a folder, by the names and links that lead to them there, as far as they can be looked at.
    fn replicas_in(&self, _dir: &Path) -> Vec<(PathBuf, Lineage)> {
        Vec::new()
    }
    /// The name of a replica in the folder of its group: [`replica::name_in`].
    fn name_in(&self, dir: &Path, path: &Path) -> String;
    /// The sources of a group: [`source::group_members`].
    ///
    /// # Errors
    /// As [`source::group_members`].
    fn group_members(&self, name: &str) -> Result<Members, SourceError>;
    /// Refuses a second disk of this host that would be a source in one term: [`source::check_term`].
    ///
    /// # Errors
    /// As [`source::check_term`].
    fn check_term(&self, path: &Path, source: Uuid, term: u64) -> Result<(), SourceError>;
    /// Makes a source a member of a group; false if it is one already: [`source::join_group`].
    ///
    /// # Errors
    /// As [`source::join_group`].
    fn join_group(&self, path: &Path, group: SourceMembership) -> Result<bool, SourceError>;
    /// The folder of the demotion of a group, with its lock.
    ///
    /// # Errors
    /// If it cannot be made, or another process holds it.
    fn demoting(&self, name: &str) -> Result<(Box<dyn Folder>, Option<FolderLock>), SyncError>;
    /// What the demotions of groups have ended.
    ///
    /// # Errors
    /// If that cannot be read.
    fn endings(&self) -> Result<Vec<Intent>, SyncError>;
    /// The group whose interrupted promotion a disk is part of, and its folder: [`replica::promotes_still`].
    ///
    /// # Errors
    /// As [`replica::promotes_still`].
    fn promotes_still(&self, path: &Path, lineage: &Lineage) -> replica::Result<Option<(String, PathBuf)>>;

    /// The epochs at which a former source can be demoted anew, oldest first: [`replica::demotes_anew`].
    fn demotes_anew(&self, path: &Path, options: &replica::ReplicaOptions) -> Vec<Epoch> {
        replica::demotes_anew(path, options)
    }
}

/// Lists a replica. Only `dsync status` reads that: a sync does not fail where it cannot be written.
pub(crate) fn list(replica: &Replica, known: Option<&KnownReplicas>) {
    let _ = known.map(|known| known.add(replica));
}
