//! The host whose state directory is given.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use device::{Dir, Folder, FolderLock, Storage};
use extents::Bitmap;
use replica::{Group, Intent, KnownReplicas, Lineage, Replica};
use source::{
    DeviceTrust, Gap, Handle, History, Members, SourceError, SourceMembership, SourceMetadata, SourceOptions,
    StateDir, Succession,
};
use uuid::Uuid;

use crate::error::SyncError;
use crate::replica_end::opening::{known_replicas, open_options};
use crate::site::Site;

impl Site for StateDir {
    fn real(&self, path: &Path) -> PathBuf {
        std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
    }

    fn state_dir(&self) -> Option<PathBuf> {
        Some(self.absolute())
    }

    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn size(&self, path: &Path) -> Result<u64, SyncError> {
        Ok(device::identity(path).map_err(replica::ReplicaError::from)?.size)
    }

    fn storage(&self, path: &Path) -> Option<Storage> {
        Storage::of(path)
    }

    fn opening(&self, journal_dir: Option<&Path>) -> replica::ReplicaOptions {
        open_options(journal_dir, self)
    }

    fn lineage(&self, path: &Path, options: &replica::ReplicaOptions) -> replica::Result<Option<Lineage>> {
        replica::inspect(path, options)
    }

    fn open(&self, path: &Path, options: &replica::ReplicaOptions) -> replica::Result<Replica> {
        Replica::open(path, options)
    }

    fn names_of(&self, path: &Path) -> Vec<(PathBuf, Option<PathBuf>)> {
        let mut names = vec![(path.to_path_buf(), None)];
        names.extend(device::parts_of(path).into_iter().map(|part| (part, None)));
        let known = known_replicas(self);
        let listed: Vec<_> =
            names.iter().flat_map(|(name, _)| known.of_file(name).unwrap_or_default()).collect();
        names.extend(listed.into_iter().map(|(name, folder)| (name, Some(folder))));
        names
    }

    fn settle(&self, path: &Path, options: &replica::ReplicaOptions) -> replica::Result<()> {
        replica::settle(path, options)
    }

    fn is_committing(
        &self,
        path: &Path,
        lineage: &Lineage,
        options: &replica::ReplicaOptions,
    ) -> replica::Result<bool> {
        replica::is_committing(path, lineage, options)
    }

    fn source(&self, what: &str) -> Result<Option<(PathBuf, SourceMetadata)>, SourceError> {
        StateDir::source(self, what)
    }

    fn sources(&self) -> Result<Vec<SourceMetadata>, SourceError> {
        Ok(self.survey()?.sources.into_iter().map(|(_, about)| about).collect())
    }

    fn folder(&self, place: &Path) -> io::Result<Box<dyn Folder>> {
        Ok(Box::new(Dir::existing(place)?))
    }

    fn attach(&self, what: &str, options: &SourceOptions) -> Result<Handle, SourceError> {
        Handle::attach(self, what, options)
    }

    fn succeed(&self, path: &Path, succession: &Succession) -> Result<bool, SourceError> {
        source::succeed(self, path, succession)
    }

    fn doubt(
        &self,
        place: &Path,
        about: &SourceMetadata,
        trust: DeviceTrust,
    ) -> Result<Option<Gap>, SourceError> {
        source::doubt(place, about, trust)
    }

    fn written_since(
        &self,
        place: &Path,
        about: &SourceMetadata,
        history: &History,
        into: &Bitmap,
    ) -> Result<Option<Gap>, SourceError> {
        Ok(source::written_since(place, about, history, into)?.unknown)
    }

    fn is_recorded(&self, place: &Path, about: &SourceMetadata) -> Result<bool, SourceError> {
        source::is_recorded(place, about)
    }

    fn forget(&self, place: &Path, about: &SourceMetadata) -> Result<(), SourceError> {
        source::forget_source(self, place, about)
    }

    fn known(&self) -> Option<KnownReplicas> {
        Some(known_replicas(self))
    }

    fn group(&self, replica: &Path, name: &str) -> replica::Result<(PathBuf, Group)> {
        let dir = replica::folder_of_replicas(replica)?;
        let group = Group::open(&dir, name)?;
        Ok((dir, group))
    }

    fn find_group(&self, dir: &Path) -> replica::Result<(PathBuf, String)> {
        replica::find_group(dir)
    }

    fn members(&self, group: &Group, dir: &Path, apart: bool) -> replica::Result<Vec<Replica>> {
        group.open_members(dir, &open_options(None, self), apart)
    }

    fn replicas_in(&self, dir: &Path) -> Vec<(PathBuf, Lineage)> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let visible = entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
        let paths = visible.map(|entry| entry.path()).filter(|path| path.exists() && !path.is_dir());
        let found = paths.filter_map(|path| Some((self.lineage(&path, &self.opening(None)).ok()??, path)));
        found.map(|(lineage, path)| (path, lineage)).collect()
    }

    fn name_in(&self, dir: &Path, path: &Path) -> String {
        replica::name_in(dir, path)
    }

    fn group_members(&self, name: &str) -> Result<Members, SourceError> {
        source::group_members(self, name)
    }

    fn check_term(&self, path: &Path, source: Uuid, term: u64) -> Result<(), SourceError> {
        source::check_term(self, path, source, term)
    }

    fn join_group(&self, path: &Path, group: SourceMembership) -> Result<bool, SourceError> {
        source::join_group(self, path, group)
    }

    fn promotes_still(&self, path: &Path, lineage: &Lineage) -> replica::Result<Option<(String, PathBuf)>> {
        replica::promotes_still(path, lineage)
    }

    fn demoting(&self, name: &str) -> Result<(Box<dyn Folder>, Option<FolderLock>), SyncError> {
        let path = demotions(self).join(name);
        let failed = |what: &str| SyncError::io(format!("{what} {}", path.display()));
        let folder = Dir::open(&path).map_err(failed("make"))?;
        let lock = FolderLock::of(&folder).map_err(failed("lock"))?.map_err(|holder| {
            replica::ReplicaError::GroupBusy { group: name.into(), dir: path.clone(), holder }
        })?;
        Ok((Box::new(folder), Some(lock)))
    }

    fn endings(&self) -> Result<Vec<Intent>, SyncError> {
        let root = demotions(self);
        let failed = |e| SyncError::io(format!("look into {}", root.display()))(e);
        let entries = match std::fs::read_dir(&root) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut intents = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            let folder = match Dir::existing(&path) {
                Ok(folder) => folder,
                // Another command has removed it, or it is none of ours.
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
                Err(e) => return Err(SyncError::io(format!("open {}", path.display()))(e)),
            };
            intents.extend(Intent::read(&folder)?);
        }
        Ok(intents)
    }
}

/// Where the demotions of all groups are.
fn demotions(state: &StateDir) -> PathBuf {
    state.path().join("demoting")
}
