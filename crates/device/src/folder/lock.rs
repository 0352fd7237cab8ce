//! The lock on a folder of state: one process at a time works on it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, openat, statat};
use rustix::io::Errno;

use crate::folder::{Dir, Folder};

/// The lock on a folder of state, held as long as this lives.
#[derive(Debug)]
pub struct FolderLock {
    file: File,
    folder: Dir,
}

impl FolderLock {
    /// The name of the lock's file.
    pub const NAME: &str = "lock";

    /// Takes the lock of the folder at a path; an inner `Err` names the holder.
    pub fn take(folder: &Path) -> io::Result<Result<FolderLock, String>> {
        FolderLock::of(&Dir::existing(folder)?)
    }

    /// True if a process of this machine holds the lock of the folder at a path, as far as the kernel tells without taking it.
    #[allow(clippy::disallowed_methods, reason = "in procfs")]
    pub fn is_held(folder: &Path) -> bool {
        let Ok(inode) = std::fs::metadata(folder.join(Self::NAME)).map(|found| found.ino()) else {
            return false;
        };
        // The device that it has there is not always that of the file: on Btrfs it is another one.
        let inode = format!(":{inode}");
        let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
        locks.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            words.next() == Some("FLOCK") && words.nth(3).is_some_and(|file| file.ends_with(&inode))
        })
    }

    /// Takes the lock of a folder; an inner `Err` names the holder.
    pub fn of(folder: &Dir) -> io::Result<Result<FolderLock, String>> {
        // Whoever may remove the file could keep this going.
        for _ in 0..100 {
            let opened = folder.file(Self::NAME, OFlags::RDWR | OFlags::CREATE, 0o666);
            let mut file = match opened {
                Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                    return FolderLock::read_only(folder);
                }
                opened => opened?,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(Err(holder(&mut file)?)),
                Err(e) => return Err(e.into()),
            }
            // Its last holder may have removed it between the opening and the lock.
            let here =
                statat(folder.held(), Self::NAME, AtFlags::SYMLINK_NOFOLLOW).map(|m| (m.st_dev, m.st_ino));
            let ours = file.metadata()?;
            if here.is_ok_and(|here| here == (ours.dev(), ours.ino())) {
                // The text is optional: a full file system must not prevent locking.
                let _ = file.set_len(0);
                let _ = write!(file, "{}", own_name());
                return Ok(Ok(FolderLock { file, folder: folder.clone() }));
            }
        }
        Ok(Err("a process that removes the lock again and again".into()))
    }

    /// On a file system that is mounted read-only, where the file can be locked but not created: the folder is locked instead.
    fn read_only(folder: &Dir) -> io::Result<Result<FolderLock, String>> {
        let mut file = match folder.file(Self::NAME, OFlags::RDONLY, 0) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                openat(folder.held(), ".", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?.into()
            }
            opened => opened?,
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Ok(FolderLock { file, folder: folder.clone() })),
            Err(Errno::WOULDBLOCK) => Ok(Err(holder(&mut file).unwrap_or_else(|_| "another process".into()))),
            Err(e) => Err(e.into()),
        }
    }

    /// Releases the lock and removes its file, and the folder if it is then empty: for a folder that was created only to
    /// hold a lock.
    pub fn remove(self) {
        let _ = self.folder.remove(Self::NAME);
        if self.folder.is_at_path().is_ok_and(|at_path| at_path) {
            let _ = std::fs::remove_dir(self.folder.path());
        }
        drop(self.file);
    }
}

/// What this process is called where it holds a lock: `dsync mirror, process 12 on host`.
fn own_name() -> String {
    let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let command = std::env::args_os().nth(1).filter(|_| program.trim() == "dsync");
    let command = command.and_then(|word| word.into_string().ok());
    let command = command.filter(|word| word.bytes().all(|byte| byte.is_ascii_lowercase()));
    let command = command.map_or_else(String::new, |word| format!(" {word}"));
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    format!("{}{command}, process {} on {host}", program.trim(), std::process::id())
}

fn holder(file: &mut File) -> io::Result<String> {
    let mut text = String::new();
    file.take(256).read_to_string(&mut text)?;
    Ok(if text.is_empty() { "another process".into() } else { text })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What lies under the name instead was put there by somebody else.
    #[test]
    fn only_a_file_of_the_folder_is_locked() {
        let temp = tempfile::tempdir().unwrap();
        let (name, other) = (temp.path().join(FolderLock::NAME), temp.path().join("other"));
        std::fs::write(&other, "kept").unwrap();
        std::os::unix::fs::symlink(&other, &name).unwrap();
        let refused = FolderLock::take(temp.path()).unwrap_err();
        assert!(refused.to_string().contains("lock is a symbolic link"), "{refused}");
        std::fs::remove_file(&name).unwrap();
        std::fs::create_dir(&name).unwrap();
        FolderLock::take(temp.path()).unwrap_err();
        assert_eq!(std::fs::read(&other).unwrap(), b"kept");
    }

    #[test]
    fn one_holder_at_a_time() {
        let temp = tempfile::tempdir().unwrap();
        let lock = FolderLock::take(temp.path()).unwrap().unwrap();
        let told = FolderLock::take(temp.path()).unwrap().unwrap_err();
        assert!(told.contains(&format!("process {}", std::process::id())), "{told}");
        assert!(FolderLock::is_held(temp.path()));
        drop(lock);
        assert!(!FolderLock::is_held(temp.path()));
        drop(FolderLock::take(temp.path()).unwrap().unwrap());
        let folder = temp.path().join("inner");
        std::fs::create_dir(&folder).unwrap();
        FolderLock::take(&folder).unwrap().unwrap().remove();
        assert!(!folder.exists());
    }
}
