//! A file that gets its name only once it is whole, and takes it from no other: what is written to a rehearsal or to a source that is given
//! up is saved in one.
//!
//! Until then it is NAME.partial, which the process that writes it holds locked. One that is not locked is what a process that was killed
//! has left, and is begun anew.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FallocateFlags, FlockOperation, RenameFlags, fallocate, flock, renameat_with};
use rustix::io::Errno;

/// A file that is being written; removed when dropped, if it has no name then.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    partial: PathBuf,
    named: bool,
}

impl NewFile {
    /// Begins the file that is to be at a path.
    ///
    /// # Errors
    /// Of kind `AlreadyExists` if there is one, and `WouldBlock` if another process is writing it.
    pub fn begin(path: &Path) -> io::Result<NewFile> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        loop {
            if path.symlink_metadata().is_ok() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            // What it holds is for no other eyes than the disk itself is.
            let (mut options, mode) = (File::options(), 0o600);
            let file =
                options.read(true).write(true).create(true).truncate(false).mode(mode).open(&partial)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Some file systems have no locks.
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOLCK | Errno::NOSYS | Errno::INVAL) => {}
                Err(e) => return Err(e.into()),
            }
            // It may have got its name between the opening and the lock.
            let (ours, here) = (file.metadata()?, partial.symlink_metadata());
            if here.is_ok_and(|here| (here.dev(), here.ino()) == (ours.dev(), ours.ino())) {
                file.set_len(0)?;
                file.set_permissions(std::fs::Permissions::from_mode(mode))?;
                return Ok(NewFile { file, partial, named: false });
            }
        }
    }

    /// Where it is written to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Makes sure that it can be so many bytes long, where its file system can promise that.
    ///
    /// # Errors
    /// If there is no room for them.
    pub fn reserve(&self, bytes: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), 0, bytes.max(1)) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV) => Ok(()),
            reserved => Ok(reserved?),
        }
    }

    /// Gives it its name, in the folder where it is. All of it is durable when this returns.
    ///
    /// # Errors
    /// Of kind `AlreadyExists` if there is a file with that name by now: then another one may be tried.
    pub fn name(&mut self, path: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        match renameat_with(CWD, &self.partial, CWD, path, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            // Where the file system knows no such rename, a look before it must do.
            Err(Errno::INVAL | Errno::NOSYS) if path.symlink_metadata().is_err() => {
                std::fs::rename(&self.partial, path)?;
            }
            Err(Errno::INVAL | Errno::NOSYS) => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(e) => return Err(e.into()),
        }
        self.named = true;
        let path = std::path::absolute(path)?;
        File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.named {
            let _ = std::fs::remove_file(&self.partial);
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
        assert_eq!(std::fs::read(temp.path().join("other")).unwrap(), b"first");
        // What gets no name is gone.
        drop(NewFile::begin(&temp.path().join("third")).unwrap());
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 2);
    }
}
