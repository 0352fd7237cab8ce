//! Folders of state files: the few calls that everything durable uses.
//!
//! A trait, so that a test can stop the world before each of them, and keep or lose what was not flushed.
//!
//! # Mapped files
//!
//! On a file system that copies on write (Btrfs, bcachefs, ZFS, F2FS, NILFS, and overlays, which may be above one) a store to a mapped
//! page may need room, and raises SIGBUS where there is none. There a [`Mapping`] is a copy in memory, which is brought to the file word
//! by word where that must survive a kill.

pub(crate) mod lock;
pub(crate) mod new_file;
pub(crate) mod reserve;

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use rustix::fs::{AtFlags, Mode, OFlags, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::disk::Disk;

/// A folder of state files. Names are plain file names.
pub trait Folder: Send + Sync {
    /// Opens a file for reading and writing. `NotFound` if it is missing, unless `create` is set.
    fn open(&self, name: &str, create: bool) -> io::Result<Box<dyn StateFile>>;
    /// Renames a file over another. Durable after [`Folder::sync`].
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file; a missing file is not an error. Durable after [`Folder::sync`].
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes creations, renames and removals durable.
    fn sync(&self) -> io::Result<()>;
    /// The names in the folder, sorted.
    fn list(&self) -> io::Result<Vec<String>>;
    /// The folder's path, for messages and locks.
    fn path(&self) -> &Path;
    /// When a file was last written to, in nanoseconds since 1970; `None` if not known.
    fn modified(&self, _name: &str) -> Option<u64> {
        None
    }
    /// Bytes by which its files may grow; `None` if not known.
    fn free(&self) -> Option<u64> {
        crate::free_space(self.path()).ok()
    }
}

/// A state file, open.
pub trait StateFile: Send + Sync {
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// True if there is not a byte.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Fills `buf` from `offset`.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    /// Writes at `offset`, growing the file if needed.
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()>;
    /// Changes the length. Added bytes read as zeroes.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Reserves space for the first `len` bytes, so that writing them, through a mapping too, cannot run out of it.
    fn reserve(&self, len: u64) -> io::Result<()>;
    /// Makes the file's content and length durable, what was written through mappings included.
    fn sync(&self) -> io::Result<()>;
    /// Fails if writing back what was written earlier, through a mapping too, failed since this file was opened. Reported once:
    /// by this call or by [`StateFile::sync`], whichever comes first. Does not start write-back.
    fn failed(&self) -> io::Result<()> {
        Ok(())
    }
    /// Maps the first `len` bytes, a multiple of 8, shared. Where a store to a mapping may find no room, or another user owns the file, the
    /// mapping is a copy in memory, which [`Mapping::put`] brings to the file.
    fn map(&self, len: u64) -> io::Result<Mapping>;
    /// Starts writing a range back without waiting, so that a later [`StateFile::sync`] finds little to do. A hint.
    fn write_back(&self, _offset: u64, _len: u64) {}
    /// Drops what the page cache holds of a range that is durable already. A hint.
    fn uncache(&self, _offset: u64, _len: u64) {}
    /// When the file was made, in nanoseconds since 1970: one that was copied or restored was made later. `None` where that is not known.
    fn born_ns(&self) -> Option<i64> {
        None
    }
    /// The file as a disk that is written past the page cache, in whole pages. `None` where that is not supported.
    fn past_cache(&self) -> Option<Arc<dyn Disk>> {
        None
    }
}

/// Puts `content` in place of the file `name`, durably and whole: after a crash the old or the new content is there.
pub fn replace(folder: &dyn Folder, name: &str, content: &[u8]) -> io::Result<()> {
    replace_with(folder, name, |_| Ok(content))
}

/// Puts content in place of the file `name`, as [`replace`] does, that depends on the file which it will be in.
pub fn replace_with<B: AsRef<[u8]>>(
    folder: &dyn Folder,
    name: &str,
    content: impl FnOnce(&dyn StateFile) -> io::Result<B>,
) -> io::Result<()> {
    let fresh = reserved(name);
    let file = folder.open(&fresh, true)?;
    let content = content(&*file)?;
    let content = content.as_ref();
    file.write_at(0, content)?;
    file.set_len(content.len() as u64)?;
    file.sync()?;
    folder.rename(&fresh, name)?;
    folder.sync()
}

/// Reserves space for the next [`replace`] of the file `name` by up to `len` bytes, however full the file system becomes
/// until then. The reservation is held by the file [`reserved`].
pub fn reserve(folder: &dyn Folder, name: &str, len: u64) -> io::Result<()> {
    folder.open(&reserved(name), true)?.reserve(len)
}

/// The file that a replacement of `name` is written to first.
pub fn reserved(name: &str) -> String {
    format!("{name}.new")
}

/// The real folder. It is held open: what is done in it stays there, whatever is mounted over its path meanwhile.
#[derive(Debug, Clone)]
pub struct Dir {
    path: PathBuf,
    held: Arc<File>,
}

impl Dir {
    /// Opens a folder, creating it (for the owner only) and its parents if they are missing.
    pub fn open(path: &Path) -> io::Result<Dir> {
        use std::os::unix::fs::DirBuilderExt;
        let missing = path.ancestors().take_while(|at| !at.as_os_str().is_empty() && !at.exists());
        let missing: Vec<&Path> = missing.collect();
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        // The outermost first: each belongs to whom the one around it belongs.
        for made in missing.iter().rev() {
            let (Some(parent), Some(name)) = (made.parent(), made.file_name()) else { continue };
            // A relative one may have none.
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            let _ = give(&Dir::existing(made)?.held, &File::open(parent)?, name);
        }
        Dir::existing(path)
    }

    /// Opens an existing folder. Root follows no link of another user to it.
    pub fn existing(path: &Path) -> io::Result<Dir> {
        use std::os::unix::fs::MetadataExt;
        let open = |flags| OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | flags).open(path);
        let held = match open(libc::O_NOFOLLOW) {
            Ok(held) => held,
            Err(_) if !rustix::process::geteuid().is_root() => open(0)?,
            Err(_) => {
                let link = std::fs::symlink_metadata(path)?;
                if link.is_symlink() && link.uid() != 0 {
                    let text = format!("{} is a symbolic link of another user", path.display());
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                open(0)?
            }
        };
        Ok(Dir { path: path.to_path_buf(), held: Arc::new(held) })
    }

    /// True if its path still leads to it: nothing was mounted over it, and it was not unmounted or moved.
    pub fn is_at_path(&self) -> io::Result<bool> {
        use std::os::unix::fs::MetadataExt;
        let held = self.held.metadata()?;
        match std::fs::metadata(&self.path) {
            Ok(found) => Ok((found.dev(), found.ino()) == (held.dev(), held.ino())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Opens a file of the folder, which may belong to a user with fewer rights than this process, who could have put anything under the
    /// name: nothing is followed, waited for or opened but a file of its own. `mode` is for one that is created, which is [given](give)
    /// to the folder's owner. Every file of state is opened here.
    ///
    /// # Errors
    /// `InvalidData` for anything else.
    pub fn file(&self, name: &str, flags: OFlags, mode: u32) -> io::Result<File> {
        use std::os::unix::fs::MetadataExt;
        let refused = |what: &str| {
            let text = format!("{name} is {what}, and not made by dsync: remove it");
            Err(io::Error::new(io::ErrorKind::InvalidData, text))
        };
        let file = match open_within(&self.held, name.as_ref(), flags, Mode::from_raw_mode(mode)) {
            Err(Errno::LOOP) => return refused("a symbolic link"),
            Err(Errno::NXIO) => return refused("not a file"),
            opened => opened?,
        };
        let (found, folder) = (file.metadata()?, self.held.metadata()?);
        if !found.is_file() {
            return refused("not a file");
        }
        let is_foreign = found.nlink() > 1 || ![0, folder.uid()].contains(&found.uid());
        let is_open_to_others = folder.uid() != 0 || folder.mode() & 0o002 != 0;
        if is_open_to_others && rustix::process::geteuid().is_root() && is_foreign {
            return refused("a file of another user, or has another name as well");
        }
        if flags.contains(OFlags::CREATE) {
            let _ = give(&file, &self.held, name.as_ref());
        }
        Ok(file)
    }

    /// The open folder, for calls that take names within it.
    pub fn held(&self) -> &File {
        &self.held
    }
}

impl Folder for Dir {
    fn open(&self, name: &str, create: bool) -> io::Result<Box<dyn StateFile>> {
        let flags = if create { OFlags::RDWR | OFlags::CREATE } else { OFlags::RDWR };
        let opened = self.file(name, flags, 0o666);
        // Reading needs no check.
        let is_read_only = |error: &io::Error| error.kind() == io::ErrorKind::ReadOnlyFilesystem;
        let read_only = !create && opened.as_ref().is_err_and(is_read_only);
        let file = if read_only { self.file(name, OFlags::RDONLY, 0)? } else { opened? };
        Ok(Box::new(RealFile { file, read_only }))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.held, from, &self.held, to)?)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.held, name, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            // The kernel asks this before it looks for the name.
            Err(Errno::ROFS) => match statat(&self.held, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => Ok(()),
                _ => Err(Errno::ROFS.into()),
            },
            other => Ok(other?),
        }
    }
    fn sync(&self) -> io::Result<()> {
        self.held.sync_all()
    }
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.held)? {
            let name = entry?.file_name().to_owned();
            names.extend(name.into_string().ok().filter(|name| name != "." && name != ".."));
        }
        names.sort();
        Ok(names)
    }
    fn path(&self) -> &Path {
        &self.path
    }
    fn modified(&self, name: &str) -> Option<u64> {
        let found = statat(&self.held, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        u64::try_from(found.st_mtime)
            .ok()?
            .checked_mul(1_000_000_000)?
            .checked_add(found.st_mtime_nsec as u64)
    }
    fn free(&self) -> Option<u64> {
        let found = rustix::fs::fstatvfs(&self.held).ok()?;
        found.f_bavail.checked_mul(found.f_frsize)
    }
}

/// Opens what has this name in a folder, where another user may have put anything under it: no link is followed, and nothing is waited for.
/// What was opened may still be anything but a link.
pub fn open_within(folder: &File, name: &OsStr, flags: OFlags, mode: Mode) -> rustix::io::Result<File> {
    // A pipe would wait for its other end, and a leased file for its holder.
    let safe = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file: File = openat(folder, name, flags | safe, mode)?.into();
    if !flags.contains(OFlags::PATH) {
        rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    }
    Ok(file)
}

/// Gives what root has made to whom its folder belongs: a service that runs as another user goes on with it.
///
/// # Errors
/// If that is not possible, as on some network file systems. Then root has it.
pub fn give(made: &File, folder: &File, name: &OsStr) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let (made_by, owner) = (made.metadata()?, folder.metadata()?);
    if made_by.uid() != 0 || owner.uid() == 0 {
        return Ok(());
    }
    // Nothing that is elsewhere as well, and was only put under this name.
    let here = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
    let is_here = here.is_ok_and(|here| (here.st_dev, here.st_ino) == (made_by.dev(), made_by.ino()));
    if is_here && (made_by.is_dir() || made_by.nlink() == 1) {
        fchown(made, Some(owner.uid()), Some(owner.gid()))?;
    }
    Ok(())
}

struct RealFile {
    file: File,
    /// Its file system is mounted read-only.
    read_only: bool,
}

impl RealFile {
    fn writable(&self) -> io::Result<()> {
        if self.read_only { Err(Errno::ROFS.into()) } else { Ok(()) }
    }
}

impl StateFile for RealFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.writable()?;
        self.file.write_all_at(buf, offset)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.writable()?;
        self.file.set_len(len)
    }
    fn reserve(&self, len: u64) -> io::Result<()> {
        self.writable()?;
        if len == 0 {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.file, rustix::fs::FallocateFlags::empty(), 0, len) {
            // If the file system cannot reserve space, set the length only.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
                if self.len()? < len {
                    self.file.set_len(len)
                } else {
                    Ok(())
                }
            }
            other => Ok(other?),
        }
    }
    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
    fn failed(&self) -> io::Result<()> {
        // SAFETY: no memory is passed; the descriptor is open as long as `self` lives.
        let failed =
            unsafe { libc::sync_file_range(self.file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WAIT_BEFORE) };
        if failed != 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
    fn map(&self, len: u64) -> io::Result<Mapping> {
        use std::os::unix::fs::MetadataExt;
        // Its owner can cut it short, and a load from beyond its end would end this process by SIGBUS.
        let is_foreign = self.file.metadata()?.uid() != rustix::process::geteuid().as_raw();
        // What is only looked at may be a copy as well.
        match self.read_only || is_foreign || copies_on_write(&self.file)? {
            true => Mapping::copy(&self.file, len),
            false => Mapping::new(&self.file, len),
        }
    }
    fn write_back(&self, offset: u64, len: u64) {
        if let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) {
            // SAFETY: no memory is passed; the descriptor is open as long as `self` lives.
            unsafe { libc::sync_file_range(self.file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE) };
        }
    }
    fn uncache(&self, offset: u64, len: u64) {
        let len = std::num::NonZeroU64::new(len);
        let _ = rustix::fs::fadvise(&self.file, offset, len, rustix::fs::Advice::DontNeed);
    }
    fn born_ns(&self) -> Option<i64> {
        crate::identity::born_ns(&self.file.metadata().ok()?, || rustix::fs::fstatfs(&self.file))
    }
    fn past_cache(&self) -> Option<Arc<dyn Disk>> {
        self.writable().ok()?;
        crate::disk::file::past_cache(self.file.try_clone().ok()?)
    }
}

/// Whether the file system of a file may need room for a write to what is allocated, and has none: then a store to a mapping raises
/// SIGBUS. Attributes against that (`chattr +C`) do not hold for what a snapshot shares.
fn copies_on_write(file: &File) -> io::Result<bool> {
    const BTRFS: i64 = 0x9123_683e;
    const BCACHEFS: i64 = 0xca45_1a4e;
    const F2FS: i64 = 0xf2f5_2010;
    const NILFS: i64 = 0x3434;
    const ZFS: i64 = 0x2fc1_2fc1;
    /// The upper layer of an overlay may be any of these.
    const OVERLAYFS: i64 = 0x794c_7630;
    // The type is an unsigned number of 32 bits, extended in different ways.
    let kind = rustix::fs::fstatfs(file)?.f_type as i64 & 0xffff_ffff;
    Ok([BTRFS, BCACHEFS, F2FS, NILFS, ZFS, OVERLAYFS].contains(&kind))
}

/// The words of a file, shared by all who map it: a writable mapping, or a copy in memory where a mapping could not be written to
/// on a full file system, or another user could cut the file short.
///
/// What is stored in a mapping outlives the process, and is durable after [`StateFile::sync`]. For a copy both are true of what
/// [`Mapping::put`] has brought to the file, so a word that must be found after a kill is put.
#[derive(Clone)]
pub struct Mapping(Arc<Mapped>);

struct Mapped {
    start: *mut std::ffi::c_void,
    len: usize,
    /// Of a copy, where it belongs. Held while words are brought there: of two who put one word, the later one must not be
    /// overtaken.
    file: Option<Mutex<File>>,
}

// SAFETY: the memory is only reached as atomics, and unmapped once, by the last holder.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapping {
    /// Maps the first `len` bytes of a file, a multiple of 8, shared.
    pub fn new(file: &File, len: u64) -> io::Result<Mapping> {
        let len = Mapping::check(file, len)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases no Rust memory.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        let mapped = Mapped { start, len, file: None };
        // Access is random, so reading ahead is useless. Only a hint.
        // SAFETY: the advice changes no content, and the range is the mapping just made.
        let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::Random) };
        Ok(Mapping(Arc::new(mapped)))
    }

    /// Copies the first `len` bytes of a file, a multiple of 8, to memory.
    pub fn copy(file: &File, len: u64) -> io::Result<Mapping> {
        let len = Mapping::check(file, len)?;
        let (read_write, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: as above. Memory that is not touched is never allocated.
        let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, read_write, private)? };
        let mapping = Mapping(Arc::new(Mapped { start, len, file: Some(Mutex::new(file.try_clone()?)) }));
        let (mut at, mut chunk) = (0, vec![0; 1 << 16]);
        while at < len as u64 {
            at = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => data & !7,
                Err(Errno::NXIO) => break,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
                Err(e) => return Err(e.into()),
            };
            let bytes = &mut chunk[..(len as u64).saturating_sub(at).min(1 << 16) as usize];
            file.read_exact_at(bytes, at)?;
            for (word, bytes) in mapping[at as usize / 8..].iter().zip(bytes.chunks_exact(8)) {
                let content = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
                if content != 0 {
                    word.store(content, SeqCst);
                }
            }
            at += bytes.len() as u64;
        }
        Ok(mapping)
    }

    fn check(file: &File, len: u64) -> io::Result<usize> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        match len == 0 || len % 8 != 0 || file.metadata()?.len() < len as u64 {
            true => {
                Err(io::Error::new(io::ErrorKind::InvalidInput, "a mapping has whole words within the file"))
            }
            false => Ok(len),
        }
    }

    /// True for a copy in memory.
    pub fn is_copy(&self) -> bool {
        self.0.file.is_some()
    }

    /// Brings these words of a copy to the file, as they are now; does nothing for a mapping.
    ///
    /// # Errors
    /// If they cannot be written: the file may have older ones, and another try may succeed.
    pub fn put(&self, words: Range<usize>) -> io::Result<()> {
        let Some(file) = &self.0.file else { return Ok(()) };
        let file = file.lock().unwrap_or_else(|e| e.into_inner());
        let bytes: Vec<u8> =
            self[words.clone()].iter().flat_map(|word| word.load(SeqCst).to_ne_bytes()).collect();
        file.write_all_at(&bytes, words.start as u64 * 8)
    }
}

impl Deref for Mapping {
    type Target = [AtomicU64];
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: page-aligned, whole words, mapped as long as `self` lives; other processes that share the file reach it
        // as atomics too, so no access is ever a data race.
        unsafe { std::slice::from_raw_parts(self.0.start as *const AtomicU64, self.0.len / 8) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `Mapping` with this length; no reference is left.
        let _ = unsafe { rustix::mm::munmap(self.start, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_folders_that_root_makes_are_given_away() {
        use std::os::unix::fs::{MetadataExt, chown};
        if !testing::need_root("folders that root makes for another user") {
            return;
        }
        let (temp, nobody) = (tempfile::tempdir().unwrap(), 65534);
        chown(temp.path(), Some(nobody), Some(nobody)).unwrap();
        let made = temp.path().join("a/b/c");
        Dir::open(&made).unwrap().open("file", true).unwrap();
        for path in [made.join("file"), made].iter().flat_map(|path| path.ancestors().take(3)) {
            let found = std::fs::metadata(path).unwrap();
            assert_eq!((found.uid(), found.gid()), (nobody, nobody), "{}", path.display());
        }
    }

    #[test]
    fn nothing_but_a_file_is_opened_or_waited_for() {
        let temp = tempfile::tempdir().unwrap();
        let folder = Dir::open(temp.path()).unwrap();
        let at = |name: &str| temp.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink(at("target"), at("link")).unwrap();
        for name in ["pipe", "socket", "link"] {
            for flags in [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR, OFlags::RDWR | OFlags::CREATE] {
                let error = folder.file(name, flags, 0o600).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}: {error}");
            }
        }
        assert!(!at("target").exists());
        let file = folder.file("file", OFlags::RDWR | OFlags::CREATE, 0o600).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
    }

    #[test]
    fn what_another_user_may_cut_short_is_not_mapped() {
        use std::os::unix::fs::chown;
        if !testing::need_root("a file that another user cuts short") {
            return;
        }
        let temp = tempfile::tempdir().unwrap();
        let (folder, path) = (Dir::open(temp.path()).unwrap(), temp.path().join("file"));
        let file = folder.open("file", true).unwrap();
        file.reserve(8192).unwrap();
        chown(&path, Some(65534), None).unwrap();
        let copy = file.map(8192).unwrap();
        assert!(copy.is_copy());
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        copy[1000].store(7, SeqCst);
        copy.put(1000..1001).unwrap();
        let mut word = [0; 8];
        file.read_at(8000, &mut word).unwrap();
        assert_eq!(u64::from_ne_bytes(word), 7);
    }

    #[test]
    fn a_copy_is_brought_to_the_file_word_by_word() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&7u64.to_ne_bytes(), 8).unwrap();
        file.write_all_at(&9u64.to_ne_bytes(), (1 << 20) - 8).unwrap();
        let (copy, mapped) = (Mapping::copy(&file, 1 << 20).unwrap(), Mapping::new(&file, 1 << 20).unwrap());
        let last = (1 << 17) - 1;
        assert!(copy.is_copy() && !mapped.is_copy() && copy.len() == last + 1);
        assert_eq!([0, 1, 2, last].map(|at| copy[at].load(SeqCst)), [0, 7, 0, 9]);
        copy[1].store(70, SeqCst);
        copy[last].store(90, SeqCst);
        assert_eq!([1, last].map(|at| mapped[at].load(SeqCst)), [7, 9]);
        copy.put(last..last + 1).unwrap();
        assert_eq!([1, last].map(|at| mapped[at].load(SeqCst)), [7, 90]);
        mapped[2].store(5, SeqCst);
        mapped.put(0..3).unwrap();
        assert_eq!(copy[2].load(SeqCst), 0);
    }
}
