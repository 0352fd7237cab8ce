//! What of this host a remote client may reach: where it may create replicas, or which sources it may read.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::error::SyncError;

/// The paths of this host that a client may use.
#[derive(Debug, Clone)]
pub enum AllowedPaths {
    /// Everything that this process may use: the client has a shell here anyway.
    Anything,
    /// Files within these folders, and these devices.
    Within {
        /// Without links in their paths.
        folders: Vec<PathBuf>,
        /// Devices and files, as given, and with links resolved.
        named: Vec<(PathBuf, PathBuf)>,
        /// The option that names all of them.
        option: &'static str,
        /// Names with a leading dot too.
        hidden: bool,
    },
}

/// The option that names sources.
const OFFER: &str = "--offer";
/// The option that names places of replicas.
const INTO: &str = "--into";

/// Refuses a folder for replicas to which another user may write, where this is root: that user could exchange what is in it at any moment, and
/// have root write elsewhere.
fn refuse_foreign(folder: &Path, found: &Metadata) -> Result<(), SyncError> {
    // What an access control list lets others do shows in the bits of the group. A sticky bit keeps them from no new name.
    let is_open = found.uid() != 0 || found.mode() & 0o022 != 0;
    if is_open && rustix::process::geteuid().is_root() {
        return Err(SyncError::Refused(format!(
            "other users may write to {}, and replicas are received here as root: run \"dsync receive\" as the user whose folder it is, such as by \
             User= in its unit, or let root alone write there (chown root, chmod go-w)",
            folder.display()
        )));
    }
    Ok(())
}

impl AllowedPaths {
    /// Replicas within the folders in `places`, or on one of its devices.
    ///
    /// # Errors
    /// [`SyncError::Refused`] if one of them is neither; [`SyncError::Io`] if it cannot be looked at.
    pub fn replicas(places: &[PathBuf]) -> Result<AllowedPaths, SyncError> {
        AllowedPaths::within(places, INTO)
    }

    /// Sources within the folders in `places`, and those that it names: files and devices.
    ///
    /// # Errors
    /// As [`AllowedPaths::replicas`].
    pub fn sources(places: &[PathBuf]) -> Result<AllowedPaths, SyncError> {
        AllowedPaths::within(places, OFFER)
    }

    fn within(places: &[PathBuf], option: &'static str) -> Result<AllowedPaths, SyncError> {
        use std::os::unix::fs::FileTypeExt;
        let (mut folders, mut named) = (Vec::new(), Vec::new());
        for place in places {
            let found = std::fs::canonicalize(place).and_then(|path| Ok((std::fs::metadata(&path)?, path)));
            let (what, path) = found.map_err(SyncError::io(format!("find {}", place.display())))?;
            if what.is_dir() {
                if option == INTO {
                    refuse_foreign(&path, &what)?;
                }
                folders.push(path);
            } else if what.file_type().is_block_device() || (option == OFFER && what.is_file()) {
                named.push((place.clone(), path));
            } else {
                return Err(SyncError::Refused(format!(
                    "{} is neither a folder nor a block device: name the folder that holds the {}",
                    place.display(),
                    if option == OFFER { "sources" } else { "replicas" }
                )));
            }
        }
        Ok(AllowedPaths::Within { folders, named, option, hidden: false })
    }

    /// Also allows names in the folders that begin with a dot if `hidden`: they may be a user's keys and settings.
    pub fn with_hidden(mut self, hidden: bool) -> AllowedPaths {
        if let AllowedPaths::Within { hidden: with, .. } = &mut self {
            *with = hidden;
        }
        self
    }

    /// The absolute path of the requested replica or source.
    ///
    /// A relative path starts at the user's home if everything is allowed, as with every copy over ssh; otherwise at the first
    /// folder. No symbolic link is followed between a folder and the file.
    pub(crate) fn find(&self, asked: &Path) -> Result<PathBuf, SyncError> {
        let AllowedPaths::Within { folders, named, option, hidden } = self else {
            return device::absolute(asked).map_err(SyncError::io(format!("find {}", asked.display())));
        };
        let refused = |why: &str| {
            Err(SyncError::Refused(format!("{} is not allowed for remote clients: {why}", asked.display())))
        };
        if let Some((_, path)) = named.iter().find(|(given, path)| asked == given || asked == path) {
            return Ok(path.clone());
        }
        let found = match asked.is_absolute() {
            true => folders.iter().find_map(|folder| Some((folder, asked.strip_prefix(folder).ok()?))),
            false => folders.first().map(|folder| (folder, asked)),
        };
        let Some((folder, rest)) = found else {
            return refused(&format!("it is neither in a folder nor a device that {option} names there"));
        };
        let mut path = folder.clone();
        let mut parts = rest.components().peekable();
        if parts.peek().is_none() {
            return refused("name a file within the folder");
        }
        if rest.components().any(|part| !matches!(part, Component::Normal(_))) {
            return refused("the path must not contain . or ..");
        }
        while let Some(part) = parts.next() {
            let Component::Normal(name) = part else { continue };
            let name = name.to_string_lossy();
            let state = [".dsync", ".dsync-group"].iter().any(|end| name.ends_with(end));
            if (name.starts_with('.') && state) || name.ends_with(".partial") {
                return refused("the name is reserved for dsync");
            }
            if name.starts_with('.') && !hidden {
                return refused(
                    "a name in it begins with a dot, and the listener was started without --hidden-files",
                );
            }
            if link::printable(&name) != name {
                return refused("it contains control characters or marks of the direction of writing");
            }
            path.push(part);
            match (std::fs::symlink_metadata(&path), parts.peek()) {
                (Ok(what), _) if what.is_symlink() => return refused("the path contains a symbolic link"),
                (Ok(what), Some(_)) if !what.is_dir() => {
                    return refused("there is a file where a folder should be");
                }
                (Ok(what), Some(_)) if *option == INTO => refuse_foreign(&path, &what)?,
                (Ok(what), None) if !what.is_file() => return refused("it is not a file"),
                (Err(_), Some(_)) => {
                    return Err(SyncError::Away(format!(
                        "there is no folder {}: mount its file system, or create it there",
                        path.display()
                    )));
                }
                (Ok(_), _) | (Err(_), None) => {}
            }
        }
        Ok(path)
    }

    /// True unless everything is allowed.
    pub(crate) fn is_restricted(&self) -> bool {
        matches!(self, AllowedPaths::Within { .. })
    }

    /// Refuses a path other than the replica's own, unless everything is allowed.
    pub(crate) fn only_beside(&self, what: &str, path: Option<&Path>) -> Result<(), SyncError> {
        match (self, path) {
            (AllowedPaths::Within { .. }, Some(path)) => Err(SyncError::Refused(format!(
                "{what} {} is not allowed for remote clients: omit it",
                path.display()
            ))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_outside_the_folders_is_reached() {
        let root = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(root.path()).unwrap();
        let at = |name: &str| root.join(name);
        for folder in ["into/a", "into/.vm.raw.dsync", "other", "into-not"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        for file in ["into/vm.raw", "other/x", "secret"] {
            fs::write(at(file), "").unwrap();
        }
        symlink(at("secret"), at("into/link")).unwrap();
        symlink(&root, at("into/up")).unwrap();
        symlink(at("into/a"), at("into/inside")).unwrap();
        symlink(at("into"), at("named")).unwrap();
        fifo(&at("into/pipe"));
        let allowed = AllowedPaths::replicas(&[at("named"), at("other")]).unwrap();
        let find = |path: &str| allowed.find(Path::new(path));
        let inside = |path: &Path| path.to_str().unwrap().to_string();
        for (asked, found) in [
            ("vm.raw".to_string(), "into/vm.raw"),
            ("new.raw".into(), "into/new.raw"),
            ("a/new.raw".into(), "into/a/new.raw"),
            (inside(&at("into/vm.raw")), "into/vm.raw"),
            (inside(&at("other/x")), "other/x"),
        ] {
            assert_eq!(find(&asked).unwrap(), at(found), "{asked}");
        }
        for asked in [
            "",
            ".",
            "..",
            "../secret",
            "a/../../secret",
            "a/..",
            "link",
            "up/secret",
            "inside/x",
            "a",
            "pipe",
            "vm.raw/x",
            ".vm.raw.dsync/journal",
            ".db.dsync-group/intent",
            "vm.raw.partial",
            ".ssh",
            ".hidden/x",
            "a/.new",
            "new\nvm.raw",
            "new\u{1b}[2J",
            "a/\u{202e}war.mv",
            "a/\u{200f}new",
            "/etc/passwd",
            "/",
        ] {
            assert!(matches!(find(asked), Err(SyncError::Refused(_))), "{asked}: {:?}", find(asked));
        }
        assert!(matches!(find("none/x"), Err(SyncError::Away(_))));
        let all = allowed.clone().with_hidden(true);
        assert_eq!(all.find(Path::new(".hidden")).unwrap(), at("into/.hidden"));
        for asked in [".vm.raw.dsync/journal", ".db.dsync-group/intent", ".new\n", "..", "../secret"] {
            assert!(matches!(all.find(Path::new(asked)), Err(SyncError::Refused(_))), "{asked}");
        }
        for asked in [
            inside(&at("secret")),
            inside(&at("into")),
            inside(&at("into-not/x")),
            inside(&at("into/../secret")),
        ] {
            assert!(matches!(find(&asked), Err(SyncError::Refused(_))), "{asked}");
        }
        assert!(allowed.only_beside("a journal in", Some(Path::new("/tmp"))).is_err());
        assert!(allowed.only_beside("a journal in", None).is_ok());
        assert!(
            AllowedPaths::replicas(&[at("secret")]).is_err()
                && AllowedPaths::replicas(&[at("nothing")]).is_err()
        );
        assert_eq!(AllowedPaths::Anything.find(Path::new("/etc/passwd")).unwrap(), Path::new("/etc/passwd"));
    }

    fn fifo(path: &Path) {
        let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
        assert!(made.success());
    }
}
