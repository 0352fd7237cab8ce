//! The intent of a group: the one file that says which deltas its replicas commit together. Before it names them, none of them is
//! merged; once it does, all of them are, as soon as the replicas are opened next.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use delta::Epoch;
use device::Folder;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{ReplicaError, Result, io_error};
use crate::state::role::{Promoted, now};
use crate::state::version::of_version;

/// The group of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaMembership {
    /// The name of the group.
    pub name: String,
    /// The group's folder; `None` for the one beside the replica's file, which moves with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
}

impl ReplicaMembership {
    /// The folder of a group whose replicas are in `dir`.
    pub fn folder_in(dir: &Path, name: &str) -> PathBuf {
        dir.join(format!(".{name}.dsync-group"))
    }

    /// The name of the group whose folder this is.
    pub(crate) fn name_of(folder: &Path) -> Option<String> {
        let name = folder.file_name()?.to_str()?.strip_prefix('.')?.strip_suffix(".dsync-group")?;
        (!name.is_empty()).then(|| name.to_owned())
    }

    /// The membership of a replica at this path, without links, in the group of that name whose replicas are in `dir`.
    pub fn of(path: &Path, dir: &Path, name: &str) -> ReplicaMembership {
        let folder = (path.parent() != Some(dir)).then(|| Self::folder_in(dir, name));
        ReplicaMembership { name: name.to_owned(), folder }
    }

    /// The folder of the group: a name beside the replica's file, or a path.
    pub(crate) fn folder(&self) -> PathBuf {
        self.folder.clone().unwrap_or_else(|| Self::folder_in(Path::new(""), &self.name))
    }

    /// The folder of the replicas, for the one at this path.
    pub fn dir_for(&self, path: &Path) -> PathBuf {
        self.folder_for(path).parent().unwrap_or(Path::new("/")).to_path_buf()
    }

    /// Where the folder of the group is, for the replica at this path.
    pub fn folder_for(&self, path: &Path) -> PathBuf {
        let beside = || Self::folder_in(path.parent().unwrap_or(Path::new("/")), &self.name);
        self.folder.clone().unwrap_or_else(beside)
    }
}

/// What a replica is at a common commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its source.
    pub source: Uuid,
    /// The epoch of that source.
    pub epoch: Epoch,
    /// The delta that brings the replica there; `None` if it was there already.
    pub stream: Option<Uuid>,
    /// Names the state that this makes of the replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<Uuid>,
    /// The replica becomes a source, of that term.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promoted: Option<Promoted>,
    /// The replica was a source, and has ended in that term.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
}

impl Member {
    /// A replica at an epoch of a source, brought there by no delta.
    pub fn at(source: Uuid, epoch: Epoch) -> Member {
        Member { source, epoch, stream: None, state: None, promoted: None, ended: None }
    }
}

/// A common commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// Version of this format.
    pub version: u32,
    /// The name of the group.
    pub group: String,
    /// The cut of the sources: its number and its id.
    pub cut: Epoch,
    /// When that was committed, in seconds since 1970.
    pub time: u64,
    /// The replicas, by their paths without links.
    pub members: BTreeMap<PathBuf, Member>,
    /// What earlier commits owe to replicas that have taken no part since, and may not have completed theirs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub owed: BTreeMap<PathBuf, Member>,
    /// Of a demotion: what the replicas of the sources are called, in the place of the names of their files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<Uuid, String>,
}

impl Intent {
    /// The file's name in the group's folder.
    pub const NAME: &str = "intent";
    /// The version that is written, and the only one that is read.
    pub const VERSION: u32 = 1;

    /// An intent of these members, as of now.
    pub fn new(group: &str, cut: Epoch, members: BTreeMap<PathBuf, Member>) -> Intent {
        Intent {
            version: Self::VERSION,
            group: group.to_owned(),
            cut,
            time: now(),
            members,
            owed: BTreeMap::new(),
            files: BTreeMap::new(),
        }
    }

    /// The intent in a group's folder; `None` if nothing was committed yet.
    ///
    /// # Errors
    /// If it cannot be read or understood: then nothing tells whether a delta was committed.
    pub fn read(folder: &dyn Folder) -> Result<Option<Intent>> {
        let path = folder.path().join(Self::NAME);
        let file = match folder.open(Self::NAME, false) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error("open", &path)(e)),
        };
        let len = file.len().map_err(io_error("read", &path))?;
        let mut bytes = vec![0; len.min(MOST) as usize];
        file.read_at(0, &mut bytes).map_err(io_error("read", &path))?;
        let damaged = |why: String| {
            ReplicaError::Damaged {
            path: path.clone(),
            why,
            way_out: "it says which commits of the group are to be completed: restore it, or move it away and run \"dsync \
                      sync --adopt --group NAME DIR\", which compares all replicas of the group with their sources"
                .into(),
        }
        };
        of_version(&bytes, Self::VERSION, &path)?.map(Some).map_err(|e| damaged(e.to_string()))
    }

    /// Writes it down: durable on return, and all or nothing.
    ///
    /// # Errors
    /// Also if it is longer than what is read: it would commit what nobody could complete.
    pub fn store(&self, folder: &dyn Folder) -> Result<()> {
        let failed = || io_error("write", &folder.path().join(Self::NAME));
        let bytes = serde_json::to_vec_pretty(self).map_err(|e| failed()(e.into()))?;
        if bytes.len() as u64 > MOST {
            return Err(ReplicaError::Refused(format!(
                "the group {} has too many replicas with long paths to be committed together: its intent would take {}, and at most {} \
                 are read. Give a folder with a shorter path, or make smaller groups",
                self.group,
                device::human_size(bytes.len() as u64),
                device::human_size(MOST)
            )));
        }
        device::replace(folder, Self::NAME, &bytes).map_err(failed())
    }

    /// True if it commits this delta, or owes it to a replica.
    pub fn commits(&self, stream: Uuid) -> bool {
        self.members.values().chain(self.owed.values()).any(|member| member.stream == Some(stream))
    }

    /// True if it is what made a source of the replica of this one.
    pub(crate) fn marks(&self, source: Option<Uuid>, mark: &Promoted) -> bool {
        self.members.values().any(|m| Some(m.source) == source && m.promoted == Some(*mark))
    }

    /// True if the replica of this source has a part in it.
    pub(crate) fn names(&self, source: Option<Uuid>) -> bool {
        self.members.values().any(|member| Some(member.source) == source)
    }

    /// True if it makes sources of the replicas.
    pub fn promotes(&self) -> bool {
        self.members.values().any(|member| member.promoted.is_some())
    }

    /// What was committed of the replica at this path.
    pub(crate) fn of(&self, path: &Path) -> Option<&Member> {
        self.members.get(path).or_else(|| self.owed.get(path))
    }
}

/// The longest intent, in bytes.
const MOST: u64 = 1 << 20;
