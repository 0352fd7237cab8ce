//! Files and block devices as disks.

mod uring;

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use rustix::fs::{Advice, FallocateFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};

use crate::Buf;
use crate::disk::threads::ThreadQueue;
use crate::disk::{Disk, InlineQueue, Queue};
use crate::error::{DeviceError, DeviceErrorKind, at, within};
use crate::identity::sysfs;
use crate::{sys, usage};

use self::uring::UringQueue;

/// How to open a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskOptions {
    /// Open for reading and writing, rather than reading only.
    pub write: bool,
    /// Bypass the page cache, with many requests in flight. A file system that has no direct I/O is used through the
    /// page cache all the same. Block devices are always direct: their page cache is stale beside a mounted file system.
    pub direct: bool,
    /// Refuse if another program uses it: a block device that is mounted, held or opened
    /// exclusively, a file behind a loop device or swapped on. Programs that merely have it open are
    /// handled by [`lock_image`](crate::lock_image).
    pub exclusive: bool,
}

/// What a direct request takes where the kernel does not tell. A file that ends within a unit has its last page in the page cache, all of it: one that
/// is half direct and half cached could be written back whole from the cache, over what the direct half has just written.
const PAGE: u64 = 4096;
/// Bounce buffers, and zeroes written by hand.
const STEP: u64 = 1 << 20;
/// More than most file systems read ahead.
const AHEAD: u64 = 8 << 20;

/// A file or a block device, open.
pub(crate) struct FileDisk {
    pub(crate) path: PathBuf,
    /// Through the page cache for files; direct for block devices.
    pub(crate) plain: File,
    /// For direct I/O to a file.
    direct: Option<File>,
    block: bool,
    write: bool,
    len: AtomicU64,
    /// Direct requests start and end at multiples of this; 1 if none are direct.
    unit: u64,
    /// Direct requests use memory at multiples of this.
    memory: usize,
    /// Bytes that the kernel reads ahead.
    ahead: u64,
    /// Held alone while parts of units are read, changed and written, shared while whole units are written by threads. A queue of io_uring
    /// minds its own; what others write at the same time to the same bytes may be lost, as on any disk.
    edges: RwLock<()>,
    /// As if there were no io_uring.
    threads: bool,
    /// The flush that failed, if one has.
    failed: OnceLock<(io::ErrorKind, String)>,
    /// A second opening of a file that is written to, which is told of each failed flush by itself.
    witness: Option<File>,
}

/// Opens a file or a block device as a disk.
pub fn open(path: &Path, options: &DiskOptions) -> Result<Arc<dyn Disk>, DeviceError> {
    Ok(Arc::new(FileDisk::open(path, options)?))
}

/// [`open`] as if the kernel had no io_uring, for tests of the fallback.
#[doc(hidden)]
pub fn open_without_uring(path: &Path, options: &DiskOptions) -> Result<Arc<dyn Disk>, DeviceError> {
    Ok(Arc::new(FileDisk { threads: true, ..FileDisk::open(path, options)? }))
}

/// Makes a disk of an open file or block device. `path` is what messages call it.
///
/// Opens `file` again if `options` needs more than it was opened with: direct I/O, exclusive use.
pub fn adopt(file: File, path: &Path, options: &DiskOptions) -> Result<Arc<dyn Disk>, DeviceError> {
    Ok(Arc::new(FileDisk::adopt(file, path, options)?))
}

/// Makes a disk of a file that is open for writing, whose whole pages are written past the page cache. `None` where that is not supported.
pub(crate) fn past_cache(file: File) -> Option<Arc<dyn Disk>> {
    let path = std::fs::read_link(by_descriptor(&file)).ok()?;
    let options = DiskOptions { write: true, direct: true, exclusive: false };
    let disk = FileDisk::adopt(file, &path, &options).ok()?;
    disk.direct().is_some().then(|| Arc::new(disk) as Arc<dyn Disk>)
}

fn not_a_disk(path: &Path, kind: std::fs::FileType) -> Option<DeviceError> {
    let what = if kind.is_file() || kind.is_block_device() {
        return None;
    } else if kind.is_dir() {
        "it is a directory"
    } else if kind.is_fifo() {
        "it is a pipe"
    } else if kind.is_char_device() {
        "it is a character device"
    } else {
        "it is a socket"
    };
    Some(DeviceError::new(DeviceErrorKind::NotADisk, "open", path, what, "give a file or a block device"))
}

/// Adds the known user to an error.
fn refuse_used(path: &Path) -> Result<(), DeviceError> {
    let way_out = "unmount it, or stop what uses it";
    match usage::in_use(path) {
        Some(why) => {
            Err(DeviceError::new(DeviceErrorKind::InUse, "open", path, format!("it is {why}"), way_out))
        }
        None => Ok(()),
    }
}

fn open_file(path: &Path, options: &DiskOptions, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).write(options.write).custom_flags(flags).open(path)
}

impl FileDisk {
    fn open(path: &Path, options: &DiskOptions) -> Result<FileDisk, DeviceError> {
        let fail = |e| DeviceError::from_io("open", path, e);
        // Checked before it is opened: opening a pipe would wait, opening a tape would rewind it.
        let metadata = std::fs::metadata(path).map_err(fail)?;
        let kind = metadata.file_type();
        if let Some(error) = not_a_disk(path, kind) {
            return Err(error);
        }
        // Some kernels open a read-only device for writing, and fail each write.
        if kind.is_block_device() && options.write && usage::is_read_only(metadata.rdev()) {
            return Err(fail(io::ErrorKind::ReadOnlyFilesystem.into()));
        }
        let flags = match (kind.is_block_device(), options.exclusive) {
            (true, true) => libc::O_DIRECT | libc::O_EXCL,
            (true, false) => libc::O_DIRECT,
            (false, _) => 0,
        };
        match open_file(path, options, flags) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                refuse_used(path)?;
                // Who had it has let go of it meanwhile.
                Self::new(open_file(path, options, flags).map_err(fail)?, path, options)
            }
            Err(e) => Err(fail(e)),
            Ok(file) => Self::new(file, path, options),
        }
    }

    fn adopt(file: File, path: &Path, options: &DiskOptions) -> Result<FileDisk, DeviceError> {
        let fail = |e| DeviceError::from_io("open", path, e);
        let kind = file.metadata().map_err(fail)?.file_type();
        if kind.is_block_device() {
            let flags = if options.exclusive { libc::O_DIRECT | libc::O_EXCL } else { libc::O_DIRECT };
            let file = open_file(&by_descriptor(&file), options, flags).map_err(fail)?;
            return Self::new(file, path, options);
        }
        Self::new(file, path, options)
    }

    fn new(plain: File, path: &Path, options: &DiskOptions) -> Result<FileDisk, DeviceError> {
        let fail = |e| DeviceError::from_io("open", path, e);
        if options.exclusive && !plain.metadata().map_err(fail)?.file_type().is_block_device() {
            refuse_used(path)?;
        }
        let metadata = plain.metadata().map_err(fail)?;
        if let Some(error) = not_a_disk(path, metadata.file_type()) {
            return Err(error);
        }
        let block = metadata.file_type().is_block_device();
        let (mut direct, mut unit, mut memory) = (None, 1, 1);
        let len = if block {
            unit = u64::from(rustix::fs::ioctl_blksszget(&plain).map_err(|e| fail(e.into()))?);
            // A sector is enough for memory if the kernel does not tell.
            let asked = sys::direct_alignment(&plain).map(|(memory, _)| u64::from(memory)).filter(|m| *m > 0);
            memory = asked.unwrap_or(unit) as usize;
            rustix::fs::seek(&plain, SeekFrom::End(0)).map_err(|e| fail(e.into()))?
        } else {
            if options.direct {
                direct = open_direct(&plain, &metadata, options);
            }
            if let Some(file) = &direct {
                // What is read ahead would be more than the last page.
                let _ = rustix::fs::fadvise(&plain, 0, None, Advice::Random);
                let asked = sys::direct_alignment(file);
                (memory, unit) = asked
                    .map_or((PAGE as usize, PAGE), |(memory, offset)| (memory as usize, u64::from(offset)));
            }
            metadata.len()
        };
        let watched = (options.write && !block)
            .then(|| open_file(&by_descriptor(&plain), &DiskOptions::default(), 0).ok());
        Ok(FileDisk {
            path: path.to_path_buf(),
            witness: watched.flatten(),
            failed: OnceLock::new(),
            plain,
            direct,
            block,
            write: options.write,
            len: AtomicU64::new(len),
            unit,
            memory,
            ahead: if block { 0 } else { read_ahead(metadata.dev()) },
            edges: RwLock::new(()),
            threads: false,
        })
    }

    /// Opens the disk once more, for reading, which is enough to flush it. Of a device flushes tell their own errors alone.
    pub(crate) fn open_once_more(&self) -> io::Result<File> {
        if self.block {
            return self.plain.try_clone();
        }
        open_file(&by_descriptor(&self.plain), &DiskOptions::default(), 0)
    }

    pub(crate) fn is_block(&self) -> bool {
        self.block
    }

    /// The descriptor that takes direct requests, if there is one.
    pub(crate) fn direct(&self) -> Option<&File> {
        if self.block { Some(&self.plain) } else { self.direct.as_ref() }
    }

    /// Where the units end. What is behind that goes through the page cache.
    fn units_end(&self) -> u64 {
        let len = self.len();
        if len % self.unit == 0 { len } else { len - len % PAGE }
    }

    /// True if a request at this place and from this memory can be direct.
    pub(crate) fn fits(&self, offset: u64, memory: usize, len: u64) -> bool {
        (offset | len) % self.unit == 0 && memory % self.memory == 0 && offset + len <= self.units_end()
    }

    /// The whole units within a range; empty if there are none.
    pub(crate) fn units(&self, offset: u64, len: u64) -> Range<u64> {
        let (end, limit) = (offset + len, (offset + len).min(self.units_end()));
        let first = offset.checked_next_multiple_of(self.unit).unwrap_or(end).min(end);
        first..(limit - limit % self.unit).max(first)
    }

    /// The units that a range touches.
    pub(crate) fn around(&self, offset: u64, len: u64) -> Range<u64> {
        offset - offset % self.unit..(offset + len).next_multiple_of(self.unit)
    }

    pub(crate) fn check(&self, doing: &'static str, offset: u64, len: u64) -> io::Result<()> {
        if doing != "read" && !self.write {
            let path = self.path.display();
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("{path}: {doing} refused: it is open for reading only"),
            ));
        }
        within(&self.path, doing, offset, len, self.len())
    }

    pub(crate) fn read_raw(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let Some(direct) = self.direct() else { return self.plain.read_exact_at(buf, offset) };
        if self.fits(offset, buf.as_ptr() as usize, buf.len() as u64) {
            return direct.read_exact_at(buf, offset);
        }
        let whole = self.units(offset, buf.len() as u64);
        let (head, rest) = buf.split_at_mut((whole.start - offset) as usize);
        let (middle, tail) = rest.split_at_mut((whole.end - whole.start) as usize);
        self.read_edge(direct, offset, head)?;
        if middle.as_ptr() as usize % self.memory == 0 {
            direct.read_exact_at(middle, whole.start)?;
        } else {
            let mut bounce = Buf::new(middle.len().min(STEP as usize));
            let mut from = whole.start;
            for part in middle.chunks_mut(STEP as usize) {
                direct.read_exact_at(&mut bounce[..part.len()], from)?;
                part.copy_from_slice(&bounce[..part.len()]);
                from += part.len() as u64;
            }
        }
        self.read_edge(direct, whole.end, tail)
    }

    pub(crate) fn write_raw(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let Some(direct) = self.direct() else { return self.plain.write_all_at(buf, offset) };
        let whole = self.units(offset, buf.len() as u64);
        let (head, rest) = buf.split_at((whole.start - offset) as usize);
        let (middle, tail) = rest.split_at((whole.end - whole.start) as usize);
        self.write_edge(direct, offset, head)?;
        let beside = self.edges.read().unwrap_or_else(PoisonError::into_inner);
        if middle.as_ptr() as usize % self.memory == 0 {
            direct.write_all_at(middle, whole.start)?;
        } else {
            let mut bounce = Buf::new(middle.len().min(STEP as usize));
            let mut to = whole.start;
            for part in middle.chunks(STEP as usize) {
                bounce[..part.len()].copy_from_slice(part);
                direct.write_all_at(&bounce[..part.len()], to)?;
                to += part.len() as u64;
            }
        }
        drop(beside);
        self.write_edge(direct, whole.end, tail)
    }

    /// A write of which this much is durable at its end. `Unsupported` if only parts could be direct.
    fn write_forced(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let file = match self.direct() {
            None => &self.plain,
            Some(direct) if self.fits(offset, buf.as_ptr() as usize, buf.len() as u64) => direct,
            Some(_) => return Err(io::ErrorKind::Unsupported.into()),
        };
        let _beside = self.edges.read().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        while done < buf.len() {
            let rest = [io::IoSlice::new(&buf[done..])];
            let written =
                retry(|| rustix::io::pwritev2(file, &rest, offset + done as u64, ReadWriteFlags::DSYNC));
            match self.forced(written.map_err(Into::into))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    /// What a flush came to. After one that has failed every other one fails: the system says once that it could not write something, and takes
    /// it for written from then on. What it has in memory is not what the disk has, so that is dropped.
    pub(crate) fn flushed(&self, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = &result {
            let _ = self.failed.set((error.kind(), error.to_string()));
            let _ = rustix::fs::fadvise(&self.plain, 0, None, Advice::DontNeed);
        }
        let Some((kind, why)) = self.failed.get() else { return result };
        result.and_then(|()| {
            Err(io::Error::new(
                *kind,
                format!("an earlier flush failed ({why}), and what was written before that may be lost: stop what uses the disk, and start it again"),
            ))
        })
    }

    /// What a write that is to be durable came to. Its error may be that of a flush, which another descriptor is told as well.
    pub(crate) fn forced<T>(&self, result: io::Result<T>) -> io::Result<T> {
        if let (Err(_), Some(witness)) = (&result, &self.witness) {
            if let Err(error) = witness.sync_data() {
                let _ = self.flushed(Err(error));
            }
        }
        self.flushed(Ok(())).and(result)
    }

    /// Reads what is no whole unit.
    fn read_edge(&self, direct: &File, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        if offset >= self.units_end() {
            return self.plain.read_exact_at(buf, offset);
        }
        let (start, units) = self.read_units(direct, offset, buf.len() as u64)?;
        let from = (offset - start) as usize;
        buf.copy_from_slice(&units[from..from + buf.len()]);
        Ok(())
    }

    fn write_edge(&self, direct: &File, offset: u64, buf: &[u8]) -> io::Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        if offset >= self.units_end() {
            return self.plain.write_all_at(buf, offset);
        }
        let _alone = self.edges.write().unwrap_or_else(PoisonError::into_inner);
        let (start, mut units) = self.read_units(direct, offset, buf.len() as u64)?;
        let from = (offset - start) as usize;
        units[from..from + buf.len()].copy_from_slice(buf);
        direct.write_all_at(&units, start)
    }

    fn read_units(&self, direct: &File, offset: u64, len: u64) -> io::Result<(u64, Buf)> {
        let around = self.around(offset, len);
        let mut units = Buf::new((around.end - around.start) as usize);
        direct.read_exact_at(&mut units, around.start)?;
        Ok((around.start, units))
    }

    /// Zeroes by the kernel's own means. `Unsupported` if it has none, or (with `fast`) none that is fast.
    fn zero_by_kernel(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        let mut result = Err(Errno::OPNOTSUPP);
        if unmap {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            result = retry(|| rustix::fs::fallocate(&self.plain, flags, offset, len));
        }
        // A block device without the command writes zeroes for ZERO_RANGE, which is not fast, but avoids copies.
        if matches!(result, Err(Errno::OPNOTSUPP | Errno::NOSYS))
            && !(fast && self.block && !self.zeroes_itself())
        {
            let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            result = retry(|| rustix::fs::fallocate(&self.plain, flags, offset, len));
        }
        Ok(result?)
    }

    /// True if the block device has a command that writes zeroes.
    fn zeroes_itself(&self) -> bool {
        let Ok(metadata) = self.plain.metadata() else { return false };
        let limit = |file| std::fs::read_to_string(sysfs(metadata.rdev()).join(file)).ok();
        // A partition has its disk's queue.
        let bytes =
            limit("queue/write_zeroes_max_bytes").or_else(|| limit("../queue/write_zeroes_max_bytes"));
        bytes.is_some_and(|bytes| bytes.trim() != "0")
    }

    pub(crate) fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        let zeroes = Buf::new(len.min(STEP) as usize);
        let mut done = 0;
        while done < len {
            let count = (len - done).min(STEP);
            self.write_raw(offset + done, &zeroes[..count as usize])?;
            done += count;
        }
        Ok(())
    }

    pub(crate) fn zero_raw(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        // Of a unit, only what is read, changed and written under the lock is safe from another part of it.
        let whole = self.units(offset, len);
        if !whole.is_empty() {
            match self.zero_by_kernel(whole.start, whole.end - whole.start, unmap, fast) {
                Err(e) if e.kind() == io::ErrorKind::Unsupported && !fast => {
                    self.write_zeroes(whole.start, whole.end - whole.start)?
                }
                other => other?,
            }
        }
        self.write_zeroes(offset, whole.start - offset)?;
        self.write_zeroes(whole.end, offset + len - whole.end)
    }

    pub(crate) fn discard_raw(&self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let whole = self.units(offset, len);
        if whole.is_empty() {
            return Ok(());
        }
        let result = if self.block {
            sys::block_discard(&self.plain, whole.start, whole.end - whole.start)
        } else {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let len = whole.end - whole.start;
            retry(|| rustix::fs::fallocate(&self.plain, flags, whole.start, len)).map_err(io::Error::from)
        };
        match result {
            // A failed hint is not an error.
            Err(e) if e.kind() == io::ErrorKind::Unsupported => Ok(()),
            other => other,
        }
    }
}

impl Disk for FileDisk {
    fn failed(&self) -> Option<String> {
        self.failed.get().map(|(_, why)| why.clone())
    }
    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn align(&self) -> u32 {
        self.unit as u32
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let len = buf.len() as u64;
        self.check("read", offset, len)?;
        self.read_raw(offset, buf).map_err(|e| at(&self.path, "read", offset, len, e))
    }

    fn read_cached(&self, offset: u64, buf: &mut [u8]) -> bool {
        let len = buf.len() as u64;
        // The kernel would read ahead, as far as this.
        let end = offset.saturating_add(len).saturating_add(len.max(self.ahead)).min(self.len());
        !self.block
            && self.check("read", offset, len).is_ok()
            && sys::is_cached(&self.plain, offset, end - offset)
            && self.plain.read_exact_at(buf, offset).is_ok()
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let len = buf.len() as u64;
        self.check("write", offset, len)?;
        self.write_raw(offset, buf).map_err(|e| at(&self.path, "write", offset, len, e))
    }

    fn write_through(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let len = buf.len() as u64;
        self.check("write", offset, len)?;
        match self.write_forced(offset, buf) {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                self.write_at(offset, buf)?;
                self.flush()
            }
            other => other.map_err(|e| at(&self.path, "write", offset, len, e)),
        }
    }

    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        self.check("zeroing", offset, len)?;
        self.zero_raw(offset, len, unmap, fast).map_err(|e| at(&self.path, "zeroing", offset, len, e))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check("discard", offset, len)?;
        self.discard_raw(offset, len).map_err(|e| at(&self.path, "discard", offset, len, e))
    }

    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.block || len == 0 {
            return Ok(());
        }
        match retry(|| rustix::fs::fallocate(&self.plain, FallocateFlags::KEEP_SIZE, offset, len)) {
            // If the file system cannot reserve space, a write must do.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            other => other.map_err(|e| at(&self.path, "reserving", offset, len, e.into())),
        }
    }

    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check("read", offset, len)?;
        let Some(len) = std::num::NonZeroU64::new(len).filter(|_| self.direct().is_none()) else {
            return Ok(());
        };
        Ok(rustix::fs::fadvise(&self.plain, offset, Some(len), rustix::fs::Advice::WillNeed)?)
    }

    fn write_back(&self) -> io::Result<()> {
        if self.block { sys::write_back(&self.plain) } else { Ok(()) }
    }

    fn flush(&self) -> io::Result<()> {
        self.flushed(self.plain.sync_data()).map_err(|e| at(&self.path, "flush", 0, self.len(), e))
    }

    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let len = self.len();
        if from >= len {
            return Ok(None);
        }
        if self.block {
            return Ok(Some(from..len));
        }
        let seek = |to| retry(|| rustix::fs::seek(&self.plain, to));
        let start = match seek(SeekFrom::Data(from)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // If the file system does not support holes, all is data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some(from..len)),
            Err(e) => return Err(at(&self.path, "search for data", from, len - from, e.into())),
        };
        if start >= len {
            return Ok(None);
        }
        match seek(SeekFrom::Hole(start)) {
            Ok(end) if end > start => Ok(Some(start..end.min(len))),
            // Punched or truncated since: in doubt it counts as data.
            Ok(_) | Err(Errno::NXIO) => Ok(Some(start..len)),
            Err(e) => Err(at(&self.path, "search for a hole", start, len - start, e.into())),
        }
    }

    /// Where the data before it ends, which takes long of a file in many pieces, is not asked.
    fn is_hole(&self, offset: u64, len: u64) -> bool {
        match retry(|| rustix::fs::seek(&self.plain, SeekFrom::Data(offset))) {
            _ if self.block => false,
            Ok(data) => data >= offset + len,
            // There is none behind it.
            Err(error) => error == Errno::NXIO,
        }
    }

    fn resize(&self, len: u64) -> io::Result<()> {
        if self.block {
            let path = self.path.display();
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("{path}: a block device cannot be resized here: use the tool that created it"),
            ));
        }
        self.check("resize", 0, 0)?;
        self.plain.set_len(len).map_err(|e| at(&self.path, "resize", 0, len, e))?;
        self.len.store(len, Ordering::Release);
        Ok(())
    }

    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        if self.direct().is_none() {
            return Ok(Box::new(InlineQueue::new(self)));
        }
        if !self.threads {
            // Missing, forbidden or short of memory: threads reach the same rate at twice the cost.
            if let Ok(queue) = UringQueue::new(Arc::clone(&self), depth) {
                return Ok(Box::new(queue));
            }
        }
        Ok(Box::new(ThreadQueue::new(Arc::new(move |request| request.run(&*self)), depth)?))
    }
}

/// Opens the same file once more for direct I/O. `None` if that is not supported.
fn open_direct(plain: &File, metadata: &std::fs::Metadata, options: &DiskOptions) -> Option<File> {
    let file = open_file(&by_descriptor(plain), options, libc::O_DIRECT).ok()?;
    let same = file.metadata().is_ok_and(|m| (m.dev(), m.ino()) == (metadata.dev(), metadata.ino()));
    let possible = sys::direct_alignment(&file).is_none_or(|(memory, offset)| {
        offset > 0 && PAGE % u64::from(offset) == 0 && (1..=PAGE).contains(&u64::from(memory))
    });
    (same && possible).then_some(file)
}

/// Bytes that the kernel reads ahead on a file system.
fn read_ahead(device: u64) -> u64 {
    let told = |file| std::fs::read_to_string(sysfs(device).join(file)).ok();
    // A partition has its disk's queue.
    let kib = told("queue/read_ahead_kb").or_else(|| told("../queue/read_ahead_kb"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok()).map_or(AHEAD, |kib| kib.saturating_mul(1024))
}

/// The open file by its number: the path may lead elsewhere by now.
fn by_descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
