//! A file that gets its name only once it is whole, and takes it from no other: what was written to a source that is given up is saved in one.
//!
//! Until then it is NAME.partial, which the process that writes it holds locked. One that is not locked is what a process that was killed
//! has left, and is begun anew.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, RenameFlags, flock, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;

use crate::folder::{Dir, open_within};

/// A file that is being written; removed when dropped, if it has no name then.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    folder: Dir,
    partial: OsString,
    named: bool,
}

impl NewFile {
    /// Begins the file that is to be at a path. It is made anew, so that no other user has it open; what of another user is in its place
    /// stays there.
    ///
    /// # Errors
    /// Of kind `AlreadyExists` if there is one, `WouldBlock` if another process is writing it, and `InvalidData` if what has its name
    /// until then is not a file that this user has left.
    pub fn begin(path: &Path) -> io::Result<NewFile> {
        let path = std::path::absolute(path)?;
        let (folder, name) = (Dir::existing(path.parent().unwrap_or(Path::new("/")))?, name_of(&path)?);
        let mut partial = name.to_owned();
        partial.push(".partial");
        // Whoever may remove it could keep this going.
        for _ in 0..100 {
            if exists(&folder, name) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            // What it holds is for no other eyes than the disk itself is.
            let (flags, mode) = (OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, Mode::from_raw_mode(0o600));
            match open_within(folder.held(), &partial, flags, mode) {
                Ok(file) if is_ours_alone(&folder, &partial, &file)? => {
                    return Ok(NewFile { file, folder, partial, named: false });
                }
                Ok(_) => {}
                Err(Errno::EXIST) => remove_left(&folder, &partial)?,
                Err(e) => return Err(e.into()),
            }
        }
        Err(io::Error::other("another process removes it again and again"))
    }

    /// Where it is written to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives it its name, in the folder where it is. All of it is durable when this returns.
    ///
    /// # Errors
    /// Of kind `AlreadyExists` if there is a file with that name by now: then another one may be tried.
    pub fn name(&mut self, path: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        let (held, to) = (self.folder.held(), name_of(path)?);
        match renameat_with(held, &self.partial, held, to, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            // Where the file system knows no such rename, a look before it must do.
            Err(Errno::INVAL | Errno::NOSYS) if !exists(&self.folder, to) => {
                renameat(held, &self.partial, held, to)?;
            }
            Err(Errno::INVAL | Errno::NOSYS) => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(e) => return Err(e.into()),
        }
        self.named = true;
        held.sync_all()
    }
}

fn name_of(path: &Path) -> io::Result<&OsStr> {
    path.file_name().ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn exists(folder: &Dir, name: &OsStr) -> bool {
    statat(folder.held(), name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

/// Locks a file. False if it has lost this name by then.
///
/// # Errors
/// Of kind `WouldBlock` if another process holds it locked.
fn is_ours_alone(folder: &Dir, name: &OsStr, file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        // Some file systems have no locks.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOLCK | Errno::NOSYS | Errno::INVAL) => {}
        Err(e) => return Err(e.into()),
    }
    let (ours, here) = (file.metadata()?, statat(folder.held(), name, AtFlags::SYMLINK_NOFOLLOW));
    Ok(here.is_ok_and(|here| (here.st_dev, here.st_ino) == (ours.dev(), ours.ino())))
}

/// Removes what a process that was killed has left.
fn remove_left(folder: &Dir, name: &OsStr) -> io::Result<()> {
    let file = match open_within(folder.held(), name, OFlags::RDWR, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => return Err(not_left(name)),
        opened => opened?,
    };
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(not_left(name));
    }
    if is_ours_alone(folder, name, &file)? {
        unlinkat(folder.held(), name, AtFlags::empty())?;
    }
    Ok(())
}

fn not_left(name: &OsStr) -> io::Error {
    let text = format!("{} was not left by dsync as this user: move it away", name.to_string_lossy());
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.named {
            let _ = unlinkat(self.folder.held(), &self.partial, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn one_process_writes_it_and_no_other_file_is_replaced() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("new");
        let kind = |error: io::Result<NewFile>| error.err().map(|error| error.kind());
        // Of one that was killed.
        std::fs::write(temp.path().join("new.partial"), b"much of another").unwrap();
        let mut first = NewFile::begin(&path).unwrap();
        assert_eq!(kind(NewFile::begin(&path)), Some(io::ErrorKind::WouldBlock));
        first.file().write_all(b"first").unwrap();
        std::fs::write(&path, b"copied here meanwhile").unwrap();
        assert_eq!(first.name(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(kind(NewFile::begin(&path)), Some(io::ErrorKind::AlreadyExists));
        first.name(&temp.path().join("other")).unwrap();
        drop(first);
        assert_eq!(std::fs::read(&path).unwrap(), b"copied here meanwhile");
        let other = temp.path().join("other");
        assert_eq!(
            (std::fs::read(&other).unwrap(), other.metadata().unwrap().mode() & 0o777),
            (b"first".into(), 0o600)
        );
        // What gets no name is gone.
        drop(NewFile::begin(&temp.path().join("third")).unwrap());
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 2);
    }

    #[test]
    fn nothing_of_another_user_is_written_to() {
        let temp = tempfile::tempdir().unwrap();
        let (path, partial, target) =
            (temp.path().join("new"), temp.path().join("new.partial"), temp.path().join("target"));
        let refused = || {
            let error = NewFile::begin(&path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            std::fs::remove_file(&partial).unwrap();
        };
        std::os::unix::fs::symlink(&target, &partial).unwrap();
        refused();
        assert!(!target.exists(), "made through a link");
        assert!(std::process::Command::new("mkfifo").arg(&partial).status().unwrap().success());
        refused();
        // What was left is not written to again: who has it open would read on.
        std::fs::write(&partial, b"left").unwrap();
        let left = File::open(&partial).unwrap();
        NewFile::begin(&path).unwrap().file().write_all(b"secret").unwrap();
        assert_eq!(io::read_to_string(left).unwrap(), "left");
        if testing::need_root("a file of another user") {
            std::fs::write(&partial, b"").unwrap();
            std::os::unix::fs::chown(&partial, Some(65534), None).unwrap();
            refused();
        }
    }
}
