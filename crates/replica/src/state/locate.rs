//! Where a replica's state is kept, and whose it is.
//!
//! The state of a file's replica is in `.NAME.dsync/` beside the file; that of a device's in a folder named after the disk, and
//! that of one behind an NBD server in one named after its URI, both below [`ReplicaOptions::devices`]. [`ReplicaOptions::folder`] overrides both. Nothing here takes a lock or changes anything.
//!
//! # A replica that is away
//!
//! The source remembers where its replicas are (bookmarks), and a replica's folder outlives its file. So if there was a replica and none
//! is found, because its disk is not attached or its file system not mounted, sync and mirror do not create another unless `--create` is
//! given. A mirror that has worked waits and tries again. The folder of a replica's file and that of its state are held open while it is
//! worked on, and all names are resolved within them (`device::Dir`): a file system that is mounted over them meanwhile is not touched.
//! At the next commit the path is checked; if it leads elsewhere, the session ends as an outage, and the next one uses what is there. A
//! replica's name that the source does not know (another spelling of the host, another state directory) is a new one. A replica that is
//! pulled is remembered as `pull://HOST/PATH`, where HOST is what its host calls itself, over TLS the name of its pinned key: no
//! destination of a push has such a name.

use std::path::{Path, PathBuf};

use device::ExportUri;
use rustix::fs::FileType;

use crate::error::{ReplicaError, Result, io_error};
use crate::state::lineage::Lineage;
use crate::state::options::ReplicaOptions;

/// The folder of a file's replica.
pub(crate) fn folder_beside(file: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(file.file_name().unwrap_or_default());
    name.push(".dsync");
    file.with_file_name(name)
}

/// What is at a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DestinationKind {
    File,
    Device,
    /// An export of an NBD server: whether that has it is seen when it is opened.
    Export,
    /// What can be no replica.
    Other,
}

/// Where a destination is, without links; what is there; and where its state is kept.
pub(crate) fn locate(
    path: &Path,
    options: &ReplicaOptions,
) -> Result<(PathBuf, Option<DestinationKind>, PathBuf)> {
    if let Some(uri) = ExportUri::of(path) {
        let uri = uri.map_err(|error| ReplicaError::Refused(error.to_string()))?.without_links().to_string();
        let folder = match &options.folder {
            Some(folder) => folder.clone(),
            None => {
                let name = format!("nbd-{:016x}", twox_hash::XxHash3_64::oneshot(uri.as_bytes()));
                folder_for_devices(path, options)?.join(name)
            }
        };
        return Ok((uri.into(), Some(DestinationKind::Export), folder));
    }
    let canonical = match std::fs::canonicalize(path) {
        Ok(path) => path,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let absolute = std::path::absolute(path).map_err(io_error("find", path))?;
            let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
                return Err(ReplicaError::Refused(format!(
                    "{} does not name a file: give the path of one",
                    path.display()
                )));
            };
            if std::fs::symlink_metadata(&absolute).is_ok() {
                return Err(ReplicaError::Refused(format!(
                    "{} is a symbolic link to nothing: remove it, or give another path",
                    path.display()
                )));
            }
            match std::fs::canonicalize(parent) {
                // What is made there is gone with the next boot, and takes the name of a device that is not attached.
                Ok(parent) if parent.starts_with("/dev") && !parent.starts_with("/dev/shm") => {
                    return Err(ReplicaError::Away(format!(
                        "device {} does not exist: attach it, or give another path",
                        path.display()
                    )));
                }
                Ok(parent) => parent.join(name),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    return Err(ReplicaError::Away(format!(
                        "folder {} does not exist: mount its file system, create it, or give another path",
                        parent.display()
                    )));
                }
                Err(e) => return Err(io_error("find", parent)(e)),
            }
        }
        Err(e) => return Err(io_error("find", path)(e)),
    };
    let kind = match rustix::fs::stat(&canonical) {
        Ok(found) => Some(match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => DestinationKind::File,
            FileType::BlockDevice => DestinationKind::Device,
            _ => DestinationKind::Other,
        }),
        Err(rustix::io::Errno::NOENT) => None,
        Err(e) => return Err(io_error("look at", &canonical)(e.into())),
    };
    let folder = match (&options.folder, kind) {
        (Some(folder), _) => folder.clone(),
        (None, Some(DestinationKind::Device)) => {
            folder_of_device(&canonical, folder_for_devices(path, options)?)?
        }
        (None, _) => folder_beside(&canonical),
    };
    Ok((canonical, kind, folder))
}

/// The folder for the state of replicas that have no folder beside them.
fn folder_for_devices<'a>(path: &Path, options: &'a ReplicaOptions) -> Result<&'a Path> {
    match options.devices.as_os_str().is_empty() {
        false => Ok(&options.devices),
        true => Err(ReplicaError::Refused(format!(
            "{} is a device, and no folder is given for the state of its replica: give one with --journal-dir",
            path.display()
        ))),
    }
}

/// The folder of a replica on a device: by what names the disk; by the kernel's name for it where nothing does.
fn folder_of_device(canonical: &Path, root: &Path) -> Result<PathBuf> {
    let name = || canonical.to_string_lossy().trim_start_matches('/').replace('/', "-");
    Ok(root.join(device::disk_id(device::identity(canonical)?.dev).unwrap_or_else(name)))
}

/// The folder in which the state of the replica at `path` is kept, or would be.
pub(crate) fn state_folder(path: &Path, options: &ReplicaOptions) -> Result<PathBuf> {
    locate(path, options).map(|(_, _, folder)| folder)
}

/// A replica's file that was renamed in its folder, and left its state behind.
pub(crate) fn moved_from(path: &Path, folder: &Path) -> Option<ReplicaError> {
    use std::os::unix::fs::MetadataExt;
    let inode = std::fs::metadata(path).ok()?.ino();
    let beside = std::fs::read_dir(path.parent()?).ok()?.flatten().map(|entry| entry.path());
    let states = beside.filter(|at| at.extension().is_some_and(|end| end == "dsync") && at.is_dir());
    let mut known =
        states.filter_map(|at| Some((Lineage::load(&device::Dir::existing(&at).ok()?).ok()??, at)));
    let (lineage, from) = known.find(|(lineage, _)| {
        lineage.stamp.as_ref().is_some_and(|stamp| stamp.inode == inode) && !lineage.path.exists()
    })?;
    // As a source it is known by its new name.
    if let Some(promoted) = lineage.role.promoted {
        return Some(lineage.refusal(path, promoted));
    }
    let (path, to) = (path.to_path_buf(), folder.to_path_buf());
    Some(ReplicaError::Moved { path, was: lineage.path, from, to })
}

/// What is written down of the replica at `path`, `None` if it is none. Changes nothing, recovers nothing, and takes no lock.
///
/// # Errors
/// If the lineage cannot be read or understood.
pub fn inspect(path: &Path, options: &ReplicaOptions) -> Result<Option<Lineage>> {
    let (_, _, folder) = locate(path, options)?;
    if !folder.is_dir() {
        return Ok(None);
    }
    match device::Dir::existing(&folder) {
        // It was forgotten just now.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        dir => Lineage::load(&dir.map_err(io_error("open", &folder))?),
    }
}

/// A folder belongs to one replica, and to the disk it was made for.
pub(crate) fn refuse_others_state(
    lineage: &Lineage,
    path: &Path,
    folder: &Path,
    options: &ReplicaOptions,
) -> Result<()> {
    let disk = device::identity(path).ok().filter(device::Identity::is_block);
    let (had, has) = (&lineage.disk, disk.and_then(|identity| device::disk_id(identity.dev)));
    if options.adopt || (had.is_some() && *had == has) {
        return Ok(());
    }
    if let (Some(had), Some(has)) = (had, &has) {
        return Err(ReplicaError::Refused(format!(
            "{} holds the state of a replica on the disk {had}, and {} is the disk {has}: attach that one, give this one a \
             folder of its own with --journal-dir, or pass --adopt to \"dsync sync\", which overwrites {1} with a replica",
            folder.display(),
            path.display()
        )));
    }
    if lineage.path != path && device::is_there(&lineage.path) {
        return Err(ReplicaError::Refused(format!(
            "{} holds the state of another replica, {}: give one of its own with --journal-dir",
            folder.display(),
            lineage.path.display()
        )));
    }
    Ok(())
}
