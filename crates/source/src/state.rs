//! The state directory: where sources keep their records, and who holds them.

use std::path::{Path, PathBuf};

use device::{Dir, Folder, Identity};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::SourceError;

const ABOUT: &str = "source";

/// The state directory.
#[derive(Debug, Clone)]
pub struct StateDir {
    root: PathBuf,
}

/// What a source's folder says of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct About {
    /// Version of the folder's format.
    pub version: u32,
    /// The source's UUID.
    pub uuid: Uuid,
    /// Its path, without links.
    pub path: PathBuf,
    /// Inode and device numbers when it was last opened.
    pub identity: Identity,
    /// Bytes a block.
    pub block_size: u32,
}

impl About {
    /// The version this program writes.
    pub const VERSION: u32 = 1;

    /// The name under which the source is served: the stem of its file name.
    pub fn name(&self) -> String {
        export_name(&self.path)
    }
}

/// The export's name of an image: the stem of its file name.
pub fn export_name(path: &Path) -> String {
    path.file_stem().map_or_else(|| "disk".into(), |s| s.to_string_lossy().into_owned())
}

/// A device's path as one name.
fn device_name(device: &Path) -> String {
    device.to_string_lossy().trim_start_matches('/').replace('/', "-")
}

impl StateDir {
    /// The given directory, else the one of `DSYNC_STATE_DIR`, else `/var/lib/dsync` for root, else the user's own.
    pub fn find(given: Option<&Path>) -> StateDir {
        let root = match (given, std::env::var_os("DSYNC_STATE_DIR"), std::env::var_os("XDG_STATE_HOME")) {
            (Some(path), ..) => path.to_path_buf(),
            (None, Some(path), _) => path.into(),
            _ if rustix::process::geteuid().is_root() => "/var/lib/dsync".into(),
            (None, None, Some(path)) => Path::new(&path).join("dsync"),
            _ => PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/".into()))
                .join(".local/state/dsync"),
        };
        StateDir { root }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The folder for the replica on a block device, by its canonical path.
    pub fn replica_folder(&self, device: &Path) -> PathBuf {
        self.root.join("replicas").join(device_name(device))
    }

    /// The folder for the saved record of a tracked device, by its canonical path.
    pub fn tracker_folder(&self, device: &Path) -> PathBuf {
        self.root.join("trackers").join(device_name(device))
    }

    /// The folder for this site's key and those that it trusts.
    pub fn keys_folder(&self) -> PathBuf {
        self.root.join("keys")
    }

    /// The known sources.
    pub fn sources(&self) -> Result<Vec<(PathBuf, About)>, SourceError> {
        let root = self.root.join("sources");
        let entries = match std::fs::read_dir(&root) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(SourceError::state("read", &root)(e)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(SourceError::state("read", &root))?.path();
            let Ok(folder) = Dir::open(&path) else { continue };
            if let Some(about) = read_json::<About>(&folder, ABOUT)? {
                found.push((path, about));
            }
        }
        found.sort_by(|a, b| a.1.path.cmp(&b.1.path));
        Ok(found)
    }

    /// The source that a path, or the name under which it is served, means. A moved image is known by its inode.
    pub fn source(&self, what: &str) -> Result<Option<(PathBuf, About)>, SourceError> {
        let sources = self.sources()?;
        if let Ok(path) = std::fs::canonicalize(what) {
            if let Some(found) = sources.iter().find(|(_, a)| a.path == path) {
                return Ok(Some(found.clone()));
            }
            match device::identity(&path) {
                Ok(identity) => {
                    let moved = |a: &About| a.identity.same_object(&identity) && !a.path.exists();
                    return Ok(sources.into_iter().find(|(_, a)| moved(a)));
                }
                // A folder that happens to be here does not hide what is served under its name.
                Err(error) if what.contains('/') => return Err(error.into()),
                Err(_) => {}
            }
        }
        if what.contains('/') {
            return Ok(None);
        }
        let mut named = sources.into_iter().filter(|(_, a)| a.name() == what);
        match (named.next(), named.next()) {
            (Some(one), Some(other)) => Err(SourceError::Unknown(format!(
                "\"{what}\" may be {} or {}: give the path",
                one.1.path.display(),
                other.1.path.display()
            ))),
            (one, _) => Ok(one),
        }
    }

    /// The folder for a source of this UUID.
    pub(crate) fn source_folder(&self, uuid: Uuid) -> PathBuf {
        self.root.join("sources").join(uuid.to_string())
    }
}

pub(crate) fn write_about(folder: &dyn Folder, about: &About) -> Result<(), SourceError> {
    write_json(folder, ABOUT, about)
}

pub(crate) fn read_json<T: DeserializeOwned>(
    folder: &dyn Folder,
    name: &str,
) -> Result<Option<T>, SourceError> {
    let path = folder.path().join(name);
    let file = match folder.open(name, false) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(SourceError::state("open", &path)(e)),
    };
    let len = file.len().map_err(SourceError::state("read", &path))?;
    if len > 16 << 20 {
        return Err(SourceError::Damaged { path, why: "it is far too large".into() });
    }
    let mut bytes = vec![0u8; len as usize];
    file.read_at(0, &mut bytes).map_err(SourceError::state("read", &path))?;
    match serde_json::from_slice(&bytes) {
        Ok(value) => Ok(Some(value)),
        Err(e) => Err(SourceError::Damaged { path, why: e.to_string() }),
    }
}

pub(crate) fn write_json<T: Serialize>(
    folder: &dyn Folder,
    name: &str,
    value: &T,
) -> Result<(), SourceError> {
    let path = folder.path().join(name);
    let bytes = serde_json::to_vec_pretty(value).map_err(|e| SourceError::state("write", &path)(e.into()))?;
    device::replace(folder, name, &bytes).map_err(SourceError::state("write", &path))
}
