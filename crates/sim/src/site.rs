//! A simulated machine as commands that ask for the role of a disk, or change it, see a host. The state of the source on a disk is in
//! a folder of its own, as that of the replica is.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use device::{Folder, FolderLock, Storage};
use extents::Bitmap;
use replica::{FoundMembers, Group, Intent, KnownReplicas, Lineage, Replica, ReplicaError, ReplicaOptions};
use source::{
    Backing, DeviceTrust, Gap, Handle, History, Members, Source, SourceError, SourceMembership,
    SourceMetadata, SourceOptions, Succession,
};
use sync::{Site, SyncError};
use trackers::TrackedDisk;
use uuid::Uuid;

use crate::cell::Target;
use crate::machine::backing::SimBacking;
use crate::machine::files::{SimDisk, SimFolder, group_folder};
use crate::machine::host::{Held, Process, lock};
use crate::machine::kernel::BLOCK;
use crate::world::{IMAGES, REGION, World, folder_of};

/// The folder of the state of the source on a disk.
pub(crate) fn source_folder(name: &str) -> String {
    format!("source of {name}")
}

/// Who reads a disk.
type Reader = Arc<Mutex<Arc<Process>>>;

/// The name of the group, where there is one.
pub(crate) const GROUP: &str = "db";

/// A source that a process serves.
#[derive(Clone)]
pub(crate) struct Served {
    pub process: Arc<Process>,
    pub source: Arc<Source>,
    /// Who reads the disk beside it.
    pub reader: Reader,
}

/// A machine, as one of its processes sees it.
pub(crate) struct SimSite {
    pub process: Arc<Process>,
    /// What is served, by the names of the disks.
    pub served: BTreeMap<String, Served>,
    /// The id of the next source.
    pub fresh: Uuid,
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn busy(name: &str) -> SourceError {
    SourceError::Busy { path: name.into(), holder: "another process".into() }
}

impl SimSite {
    fn number(&self, name: &str) -> Option<u64> {
        self.process.host.state().files.find(IMAGES, name)
    }

    fn is_device(&self, name: &str) -> bool {
        let state = self.process.host.state();
        let number = state.files.find(IMAGES, name);
        number.and_then(|number| state.files.inodes.get(&number)).is_some_and(|inode| inode.is_device)
    }

    fn folder_named(&self, name: &str) -> SimFolder {
        SimFolder::new(&self.process, name)
    }

    /// The names of all disks.
    fn disks(&self) -> Vec<String> {
        let state = self.process.host.state();
        let names = state.files.folders.get(IMAGES).into_iter().flat_map(|names| names.now.keys());
        names.filter(|name| !name.ends_with(".partial")).cloned().collect()
    }

    /// The folder of the group.
    pub(crate) fn group_folder(&self) -> SimFolder {
        self.folder_named(&group_folder(GROUP))
    }

    /// The replicas of the group.
    pub(crate) fn found(&self, dir: &Path) -> replica::Result<FoundMembers> {
        let mut all = Vec::new();
        for name in self.disks() {
            let lineage = Lineage::load(&self.folder_named(&folder_of(&name)))?;
            all.extend(lineage.map(|lineage| (dir.join(&name), lineage)));
        }
        replica::choose_members(dir, GROUP, &self.group_folder(), all)
    }

    /// Opens the source on a disk, which becomes one if it is none.
    pub(crate) fn open_source(&self, name: &str, read_only: bool) -> Result<(Source, Reader), SourceError> {
        let held = Held::take(&self.process, name).ok_or_else(|| busy(name))?;
        let reader = Arc::new(Mutex::new(self.process.clone()));
        let folder = Arc::new(self.folder_named(&source_folder(name)));
        let backing = SimBacking::new(held, &self.process, &reader, IMAGES, name);
        let identity = backing.identity()?;
        let about = match source::about_in(&*folder)? {
            Some(known) => SourceMetadata { identity, ..known },
            None => SourceMetadata::new(self.fresh, identity, BLOCK as u32),
        };
        source::write_about(&*folder, &about)?;
        let options = SourceOptions {
            read_only,
            region: REGION,
            device_trust: DeviceTrust::Said,
            ..SourceOptions::default()
        };
        let disk = Arc::new(SimDisk::new(&self.process, self.number(name).unwrap_or(0)));
        Ok((Source::over(about, disk, folder, Box::new(backing), &options)?, reader))
    }
}

impl Site for SimSite {
    fn real(&self, path: &Path) -> PathBuf {
        path.to_path_buf()
    }

    fn exists(&self, path: &Path) -> bool {
        self.number(&name_of(path)).is_some()
    }

    fn size(&self, path: &Path) -> Result<u64, SyncError> {
        let number = self.number(&name_of(path)).unwrap_or(0);
        Ok(self.process.host.state().files.len(number))
    }

    fn storage(&self, _path: &Path) -> Option<Storage> {
        None
    }

    fn opening(&self, _journal_dir: Option<&Path>) -> ReplicaOptions {
        ReplicaOptions::default()
    }

    fn lineage(&self, path: &Path, _options: &ReplicaOptions) -> replica::Result<Option<Lineage>> {
        Lineage::load(&self.folder_named(&folder_of(&name_of(path))))
    }

    fn open(&self, path: &Path, options: &ReplicaOptions) -> replica::Result<Replica> {
        let name = name_of(path);
        let target = if self.is_device(&name) { Target::Device } else { Target::File };
        World::open_replica(&self.process, target, &name, options)
    }

    fn settle(&self, _path: &Path, _options: &ReplicaOptions) -> replica::Result<()> {
        // None but former sources are read.
        Ok(())
    }

    fn source(&self, what: &str) -> Result<Option<(PathBuf, SourceMetadata)>, SourceError> {
        let place = source_folder(&name_of(Path::new(what)));
        let about = source::about_in(&self.folder_named(&place))?;
        Ok(about.map(|about| (PathBuf::from(place), about)))
    }

    fn sources(&self) -> Result<Vec<SourceMetadata>, SourceError> {
        let all = self.disks().into_iter().map(|name| self.source(&name));
        Ok(all.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().map(|(_, about)| about).collect())
    }

    fn folder(&self, place: &Path) -> io::Result<Box<dyn Folder>> {
        Ok(Box::new(self.folder_named(&place.to_string_lossy())))
    }

    fn unsaid(&self) -> SourceOptions {
        // No other program writes to its devices.
        open_options()
    }

    fn attach(&self, what: &str, _options: &SourceOptions) -> Result<Handle, SourceError> {
        let name = name_of(Path::new(what));
        match self.served.get(&name) {
            Some(server) => {
                *lock(&server.reader) = self.process.clone();
                Handle::of_server(&server.source)
            }
            None => Ok(Handle::of_source(self.open_source(&name, true)?.0)),
        }
    }

    fn succeed(&self, path: &Path, succession: &Succession) -> Result<bool, SourceError> {
        let name = name_of(path);
        let known = self.source(&name)?;
        if known.is_some_and(|(_, about)| succession.is_done(&about)) {
            return Ok(false);
        }
        let place = source_folder(&name);
        let held = Held::take(&self.process, &place).ok_or_else(|| busy(&name))?;
        let reader = Arc::new(Mutex::new(self.process.clone()));
        let backing = SimBacking::new(held, &self.process, &reader, IMAGES, &name);
        let disk = Arc::new(SimDisk::new(&self.process, self.number(&name).unwrap_or(0)));
        source::succeed_in(succession, disk, Arc::new(self.folder_named(&place)), Box::new(backing))?;
        Ok(true)
    }

    fn doubt(
        &self,
        place: &Path,
        about: &SourceMetadata,
        trust: DeviceTrust,
    ) -> Result<Option<Gap>, SourceError> {
        let (name, place) = (name_of(&about.path), place.to_string_lossy());
        let held = Held::take(&self.process, &place).ok_or_else(|| busy(&name))?;
        let reader = Arc::new(Mutex::new(self.process.clone()));
        let backing = SimBacking::new(held, &self.process, &reader, IMAGES, &name);
        Source::doubt_in(&self.folder_named(&place), &backing, trust)
    }

    fn written_since(
        &self,
        place: &Path,
        about: &SourceMetadata,
        history: &History,
        into: &Bitmap,
    ) -> Result<Option<Gap>, SourceError> {
        if let Some(server) = self.served.get(&name_of(&about.path)) {
            into.union_with(&server.source.dirty()?);
            return Ok(None);
        }
        let last = history.last().map_or(0, |last| last.number);
        let folder = self.folder_named(&place.to_string_lossy());
        TrackedDisk::add_recorded(&folder, last, about.block_size.into(), into)
            .map_err(|error| SourceError::State { what: "read the records in", path: place.into(), error })?;
        Ok(Some("nothing records its writes".into()))
    }

    fn is_recorded(&self, _place: &Path, _about: &SourceMetadata) -> Result<bool, SourceError> {
        // All of them are served.
        Ok(true)
    }

    fn forget(&self, place: &Path, about: &SourceMetadata) -> Result<(), SourceError> {
        if self.served.contains_key(&name_of(&about.path)) {
            return Err(SourceError::Refused("it is being served".into()));
        }
        let folder = self.folder_named(&place.to_string_lossy());
        source::clear(&folder).map_err(|error| SourceError::State {
            what: "remove",
            path: place.into(),
            error,
        })
    }

    fn known(&self) -> Option<KnownReplicas> {
        None
    }

    fn group(&self, replica: &Path, name: &str) -> replica::Result<(PathBuf, Group)> {
        let dir = replica.parent().unwrap_or(Path::new("/")).to_path_buf();
        let folder = group_folder(name);
        let busy = || ReplicaError::GroupBusy {
            group: name.into(),
            dir: dir.clone(),
            holder: "another process".into(),
        };
        let held = Held::take(&self.process, &folder).ok_or_else(busy)?;
        let group = Group::begin(Box::new(self.folder_named(&folder).held(held)), name)?;
        Ok((dir, group))
    }

    fn find_group(&self, dir: &Path) -> replica::Result<(PathBuf, String)> {
        Ok((dir.to_path_buf(), GROUP.into()))
    }

    fn members(&self, group: &Group, dir: &Path, apart: bool) -> replica::Result<Vec<Replica>> {
        let options = (&ReplicaOptions::default(), apart);
        group.open_found(dir, self.found(dir)?, options, &|path, options| self.open(path, options))
    }

    fn name_in(&self, _dir: &Path, path: &Path) -> String {
        // There are no links.
        source::file_name(path)
    }

    fn group_members(&self, name: &str) -> Result<Members, SourceError> {
        let mut members = Vec::new();
        for disk in self.disks() {
            let Some((place, about)) = self.source(&disk)? else { continue };
            let folder = self.folder_named(&place.to_string_lossy());
            if let Some(group) = SourceMembership::read(&folder)?.filter(|group| group.name == name) {
                members.push((place, about, group));
            }
        }
        Ok(members)
    }

    fn check_term(&self, _path: &Path, _source: Uuid, _term: u64) -> Result<(), SourceError> {
        // The state of each disk has a folder of its own.
        Ok(())
    }

    fn join_group(&self, path: &Path, group: SourceMembership) -> Result<bool, SourceError> {
        let folder = self.folder_named(&source_folder(&name_of(path)));
        source::join_in(&folder, path, group, &|name| self.group_members(name))
    }

    fn promotes_still(&self, path: &Path, lineage: &Lineage) -> replica::Result<Option<(String, PathBuf)>> {
        let group = replica::promotes_still_by(&self.group_folder(), lineage)?;
        Ok(group.map(|name| (name, path.parent().unwrap_or(Path::new("/")).to_path_buf())))
    }

    fn demoting(&self, name: &str) -> Result<(Box<dyn Folder>, Option<FolderLock>), SyncError> {
        let folder = format!("demotion of {name}");
        let busy = || ReplicaError::GroupBusy {
            group: name.into(),
            dir: folder.clone().into(),
            holder: "another process".into(),
        };
        let held = Held::take(&self.process, &folder).ok_or_else(busy)?;
        Ok((Box::new(self.folder_named(&folder).held(held)), None))
    }

    fn endings(&self) -> Result<Vec<Intent>, SyncError> {
        Ok(Intent::read(&self.folder_named(&format!("demotion of {GROUP}")))?.into_iter().collect())
    }
}

pub(crate) fn open_options() -> SourceOptions {
    SourceOptions { device_trust: DeviceTrust::Said, ..SourceOptions::default() }
}
