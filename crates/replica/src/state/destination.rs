//! A destination: everything that is done to it besides reading and writing its bytes.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use device::{Boot, Clock, DeviceError, Dir, Disk, ExportUri, Folder, Format, Gauge, Medium, Sharing};
use nbd::NbdDisk;
use qcow2::{Image, ImageHeader};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, openat, renameat, renameat_with, unlinkat};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::error::{ReplicaError, Result, io_error};
use crate::state::attributes;
use crate::state::fingerprint::fingerprint;
use crate::state::intent::ReplicaMembership;
use crate::state::lineage::Stamp;

/// One of the two names of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// NAME, the destination.
    Final,
    /// NAME.partial, what will take its place.
    Temporary,
}

/// Where a replica is kept. A trait, so that tests can stop the machine before each of these steps.
pub trait Destination: Send {
    /// The destination's path, for messages.
    fn path(&self) -> &Path;
    /// The boot, by which own writes are told from others'; without an id where it is not known.
    fn boot(&self) -> Boot {
        Boot { id: String::new(), began: 0 }
    }
    /// The clock by which the file is stamped.
    fn clock(&self) -> Clock {
        Clock::system()
    }
    /// True for a block device, and for an export of an NBD server: it has its size, its content before the first seed may be anything,
    /// and nothing can be renamed over it.
    fn is_device(&self) -> bool;
    /// True for an export: what is behind its name, only its content tells.
    fn is_export(&self) -> bool {
        false
    }
    /// True if the path still leads to where the destination is: nothing was mounted over it, or unmounted.
    fn is_at_path(&self) -> io::Result<bool> {
        Ok(true)
    }
    /// What names the disk, of a block device.
    fn disk(&self) -> Option<String> {
        None
    }
    /// Fails with `Unsupported` and the reason for a size that it can never have. A whole journal that leads there could never be merged.
    fn check_size(&self, _len: u64) -> io::Result<()> {
        Ok(())
    }
    /// The stamp of what is at one of the names; `None` if nothing is.
    fn stamp(&self, name: Name) -> io::Result<Option<Stamp>>;
    /// Has the stamps of a device show these blocks as well from now on, by where they begin.
    fn mark(&self, _blocks: &[u64]) {}
    /// The destination's stamp at a glance, at next to no cost unless others have written to it.
    fn glance(&self) -> io::Result<Option<Stamp>> {
        Ok(self.stamp(Name::Final)?.map(Stamp::glance))
    }
    /// How the disk lies in it.
    fn format(&self) -> Format {
        Format::Raw
    }
    /// Brings in order what a kill may have left of own writes; to be called among own writes.
    fn mend(&self, _name: Name) -> Result<()> {
        Ok(())
    }
    /// Refuses what another program has made and is no file for a replica.
    fn examine(&self) -> Result<()> {
        Ok(())
    }
    /// True if whatever writes to it moves the time of its content.
    fn times_writes(&self) -> bool {
        false
    }
    /// Makes the destination durable with its times, and returns a stamp which no later change can bear.
    fn settle(&self) -> io::Result<Stamp>;
    /// Opens for reading and writing.
    fn open(&self, name: Name) -> Result<Arc<dyn Disk>>;
    /// Makes an empty NAME.partial, which must not exist, and returns its inode. A device has none.
    fn create(&self) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Makes NAME.partial share the destination's content. A device has none.
    fn clone_final(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Gives the clone the attributes of the destination: all of them, or it fails and names one.
    fn carry_attributes(&self) -> io::Result<()> {
        Ok(())
    }
    /// What lets NAME.partial share parts of the destination's content; `None` where that is not to be had.
    fn sharing(&self) -> Option<Sharing> {
        None
    }
    /// Renames NAME.partial to NAME; over an existing file only with `replace`. Durable after [`Destination::sync`]. A device has none.
    fn rename(&self, _replace: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Removes NAME.partial; one that is missing is not an error.
    fn remove(&self) -> io::Result<()> {
        Ok(())
    }
    /// Bytes that the destination's file system has left; `None` where that is not known.
    fn free(&self) -> Option<u64> {
        None
    }
    /// The folder of the group of a replica.
    fn group(&self, group: &ReplicaMembership) -> io::Result<Box<dyn Folder>> {
        Ok(Box::new(Dir::existing(&group.folder_for(self.path()))?))
    }
    /// Makes names durable.
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A file. Its folder is held open: what is mounted over that meanwhile is not touched.
pub(crate) struct FileDestination {
    path: PathBuf,
    folder: Dir,
    name: OsString,
    partial: OsString,
    format: Format,
    /// The disks in its files that were opened, by inode, if these are no raw ones.
    images: Mutex<Vec<(u64, Arc<Image>)>>,
    /// The boot, which a test may invent.
    pub boot: Boot,
    /// Whether the file system of the folder stamps changes apart, once that was asked, and its number.
    apart: OnceLock<Option<u64>>,
    /// The number of the folder's file system, once it was asked, if that gives its files other inodes at each mount.
    renumbers: OnceLock<Option<u64>>,
}

impl FileDestination {
    /// The file at an absolute path, which need not exist; with a disk of this format.
    ///
    /// # Errors
    /// If its folder cannot be opened.
    pub(crate) fn new(path: PathBuf, format: Format) -> io::Result<FileDestination> {
        let folder = Dir::existing(path.parent().unwrap_or(Path::new("/")))?;
        let name = path.file_name().unwrap_or_default().to_owned();
        let mut partial = name.clone();
        partial.push(".partial");
        let boot = Boot::of(&[path.parent().unwrap_or(Path::new("/"))]);
        Ok(FileDestination {
            path,
            folder,
            name,
            partial,
            format,
            images: Mutex::default(),
            boot,
            apart: OnceLock::new(),
            renumbers: OnceLock::new(),
        })
    }

    fn file_name(&self, name: Name) -> &OsString {
        match name {
            Name::Final => &self.name,
            Name::Temporary => &self.partial,
        }
    }

    /// True if no change can bear the time that a look at this file has shown.
    fn stamps_apart(&self, looked_at: &std::fs::Metadata) -> bool {
        let ask = || -> io::Result<Option<u64>> {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            let file = File::from(openat(self.folder.held(), ".", flags, Mode::RUSR | Mode::WUSR)?);
            Ok(device::stamps_apart(&file)?.then_some(file.metadata()?.dev()))
        };
        // A file may be mounted over the one of this name.
        *self.apart.get_or_init(|| ask().unwrap_or(None)) == Some(looked_at.dev())
    }

    /// The kind of the folder's file system, by its magic number.
    fn file_system(&self) -> io::Result<u32> {
        Ok(rustix::fs::fstatfs(self.folder.held())?.f_type as u32)
    }

    /// The disk in a file that is not raw. It is opened once, and closed when its file has no name any more.
    fn image(&self, name: Name) -> Result<Arc<Image>> {
        let path = self.path.with_file_name(self.file_name(name));
        let failed = |what| io_error(what, &path);
        let (file, access) = match self.file(name, OFlags::RDWR) {
            // To be compared it is only read.
            Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                (self.file(name, OFlags::RDONLY), qcow2::Use::Read)
            }
            opened => (opened, qcow2::Use::Write),
        };
        let file = file.map_err(failed("open"))?;
        let inode = file.metadata().map_err(failed("look at"))?.ino();
        let named = |at| Some(self.file(at, OFlags::PATH).ok()?.metadata().ok()?.ino());
        let names = [named(Name::Final), named(Name::Temporary)];
        let mut images = self.images();
        images.retain(|(inode, _)| names.contains(&Some(*inode)));
        if let Some((_, image)) = images.iter().find(|(open, _)| *open == inode) {
            return Ok(image.clone());
        }
        self.fit(&file)?;
        let image = Image::open(file, &path, access).map_err(|e| match e.downcast::<DeviceError>() {
            Ok(in_use) => in_use.into(),
            Err(e) => failed("open")(e),
        })?;
        let image = Arc::new(image);
        images.push((inode, image.clone()));
        Ok(image)
    }

    /// Refuses a file in which no replica can be, by what its head says.
    fn fit(&self, file: &File) -> Result<()> {
        let head = ImageHeader::of(file).map_err(io_error("read", &self.path))?;
        let none = Some(("it is no qcow2 file", "give another path"));
        head.as_ref().map_or(none, ImageHeader::refusal_of_replica).map_or(Ok(()), |(why, way_out)| {
            Err(ReplicaError::Refused(format!(
                "{} cannot be a replica: {why}: {way_out}",
                self.path.display()
            )))
        })
    }

    fn images(&self) -> MutexGuard<'_, Vec<(u64, Arc<Image>)>> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has written out what is to be in its files: they are at rest until the next own write.
    fn write_out(&self) -> io::Result<()> {
        self.images().iter().try_for_each(|(_, image)| image.settle())
    }

    /// Bytes of the disk in a file; 0 if there is none.
    fn size_of(&self, name: Name, file: &std::fs::Metadata) -> io::Result<u64> {
        if self.format.is_raw() || !file.is_file() {
            return Ok(file.len());
        }
        Ok(ImageHeader::of(&self.file(name, OFlags::RDONLY)?)?.map_or(0, |head| head.size))
    }

    fn stamp_of(&self, name: Name, file: &std::fs::Metadata) -> io::Result<Stamp> {
        // FAT, exFAT, FUSE, and the three of SMB. On NFS they are the server's.
        const RENUMBER: [u32; 6] = [0x4d44, 0x2011_bab0, 0x6573_5546, 0x517b, 0xff53_4d42, 0xfe53_4d42];
        let ask = || -> io::Result<Option<u64>> {
            let renumbers = RENUMBER.contains(&self.file_system()?);
            Ok(if renumbers { Some(self.folder.held().metadata()?.dev()) } else { None })
        };
        let changed = file.ctime().saturating_mul(1_000_000_000).saturating_add(file.ctime_nsec());
        let written = file.mtime().saturating_mul(1_000_000_000).saturating_add(file.mtime_nsec());
        Ok(Stamp {
            inode: file.ino(),
            // A file may be mounted over the one of this name.
            renumbered: *self.renumbers.get_or_init(|| ask().unwrap_or(None)) == Some(file.dev()),
            size: self.size_of(name, file)?,
            changed,
            written: Some(written),
            ..Stamp::default()
        })
    }

    /// Opens one of the files; `create` makes it, which must not exist.
    fn file(&self, name: Name, flags: OFlags) -> io::Result<File> {
        // A disk holds what its files' modes would hide: for the owner alone.
        let mode = Mode::from_raw_mode(0o600);
        // The path has no links; one that is here was put in the file's place.
        Ok(device::open_within(self.folder.held(), self.file_name(name), flags, mode)?)
    }
}

impl Destination for FileDestination {
    fn path(&self) -> &Path {
        &self.path
    }

    fn boot(&self) -> Boot {
        self.boot.clone()
    }

    fn is_device(&self) -> bool {
        false
    }

    fn format(&self) -> Format {
        self.format
    }

    fn mend(&self, name: Name) -> Result<()> {
        if self.format.is_raw() {
            return Ok(());
        }
        self.image(name)?.reclaim().map_err(io_error("reclaim unused space in", &self.path))
    }

    fn examine(&self) -> Result<()> {
        if self.format.is_raw() {
            return Ok(());
        }
        let refused = |why: String| {
            Err(ReplicaError::Refused(format!("{} cannot be a replica: {why}", self.path.display())))
        };
        let file = self.file(Name::Final, OFlags::RDWR).map_err(io_error("open", &self.path))?;
        // First: QEMU would open what it names.
        self.fit(&file)?;
        match qcow2::check(&file) {
            Ok(false) => Ok(()),
            // What moves when it is written to, readers would look for where it was.
            Ok(true) => {
                refused("parts of it are compressed: convert it with \"qemu-img convert -O qcow2\"".into())
            }
            Err(e) => refused(format!("{e}: repair it with \"qemu-img check -r all\"")),
        }
    }

    fn stamp(&self, name: Name) -> io::Result<Option<Stamp>> {
        self.write_out()?;
        // Looked at without being opened: it may be anything by now.
        match self.file(name, OFlags::PATH).and_then(|file| file.metadata()) {
            Ok(found) => Ok(Some(self.stamp_of(name, &found)?)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn times_writes(&self) -> bool {
        // Memory's file systems write nothing back, so that only the first store to a mapped page is noticed.
        const IN_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];
        self.file_system().is_ok_and(|kind| !IN_MEMORY.contains(&kind))
    }

    fn settle(&self) -> io::Result<Stamp> {
        self.write_out()?;
        let file = self.file(Name::Final, OFlags::RDONLY)?;
        // Not only the data: after a power cut the inode must not wake up with an older time than the stamp's.
        file.sync_all()?;
        let found = file.metadata()?;
        let stamp = self.stamp_of(Name::Final, &found)?;
        if self.stamps_apart(&found) {
            return Ok(stamp);
        }
        // A change within the same tick of the clock, or of the file system's times, would bear the same time.
        let next = stamp.changed.saturating_add(device::grain(stamp.changed));
        let now = || {
            let now = clock_gettime(ClockId::RealtimeCoarse);
            now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
        };
        // The bound is for a clock that was set back.
        let until =
            Instant::now() + Duration::from_nanos(next.abs_diff(stamp.changed)) + Duration::from_millis(50);
        while now() < next && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(stamp)
    }

    fn open(&self, name: Name) -> Result<Arc<dyn Disk>> {
        if !self.format.is_raw() {
            return Ok(self.image(name)?);
        }
        let mut options = device::DiskOptions { write: true, direct: true, exclusive: false };
        let path = self.path.with_file_name(self.file_name(name));
        let file = match self.file(name, OFlags::RDWR) {
            // To be compared it is only read.
            Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                options.write = false;
                self.file(name, OFlags::RDONLY)
            }
            opened => opened,
        };
        let file = file.map_err(io_error("open", &path))?;
        Ok(device::adopt(file, &path, &options)?)
    }

    fn create(&self) -> io::Result<u64> {
        let file = self.file(Name::Temporary, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
        if !self.format.is_raw() {
            let made = self.file(Name::Temporary, OFlags::RDWR).and_then(|file| qcow2::create(&file));
            made.inspect_err(|_| drop(self.remove()))?;
        }
        Ok(file.metadata()?.ino())
    }

    fn clone_final(&self) -> io::Result<()> {
        self.write_out()?;
        let from = self.file(Name::Final, OFlags::RDONLY)?;
        let to = self.file(Name::Temporary, OFlags::WRONLY)?;
        // One that cannot be had is named when the rest is carried over.
        let _ = attributes::carry_flags(&from, &to);
        Ok(rustix::fs::ioctl_ficlone(&to, &from)?)
    }

    fn carry_attributes(&self) -> io::Result<()> {
        let from = self.file(Name::Final, OFlags::RDONLY)?;
        attributes::carry(&from, &self.file(Name::Temporary, OFlags::WRONLY)?)
    }

    fn sharing(&self) -> Option<Sharing> {
        if !self.format.is_raw() {
            return None;
        }
        let from = self.file(Name::Final, OFlags::RDONLY).ok()?;
        Sharing::new(from, self.file(Name::Temporary, OFlags::WRONLY).ok()?).ok()
    }

    fn rename(&self, replace: bool) -> io::Result<()> {
        self.write_out()?;
        let held = self.folder.held();
        let over = || Ok(renameat(held, &self.partial, held, &self.name)?);
        if replace {
            return over();
        }
        match renameat_with(held, &self.partial, held, &self.name, RenameFlags::NOREPLACE) {
            // Where the file system knows no such rename, a look before it must do.
            Err(Errno::INVAL | Errno::NOSYS) if self.stamp(Name::Final)?.is_none() => over(),
            Err(Errno::INVAL | Errno::NOSYS) => Err(io::ErrorKind::AlreadyExists.into()),
            other => Ok(other?),
        }
    }

    fn remove(&self) -> io::Result<()> {
        match unlinkat(self.folder.held(), &self.partial, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            other => Ok(other?),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.folder.held().sync_all()
    }

    fn free(&self) -> Option<u64> {
        self.folder.free()
    }

    fn is_at_path(&self) -> io::Result<bool> {
        self.folder.is_at_path()
    }

    fn check_size(&self, len: u64) -> io::Result<()> {
        if self.format.is_raw() {
            // No file system lets a place be sought at which no file of it can end.
            let Ok(mut file) = self.file(Name::Final, OFlags::RDONLY) else { return Ok(()) };
            return file.seek(SeekFrom::Start(len)).map(drop).map_err(|_| {
                let most = "its file system has no files of";
                io::Error::new(io::ErrorKind::Unsupported, format!("{most} {}", device::human_size(len)))
            });
        }
        match self.file(Name::Final, OFlags::RDONLY).and_then(|file| ImageHeader::of(&file)) {
            Ok(Some(head)) => head.check_size(len),
            _ => qcow2::check_size(len),
        }
    }
}

/// A block device, held open exclusively as long as this lives.
pub struct DeviceDestination {
    path: PathBuf,
    /// Its device number, and what the kernel says of it; `None` if it is simulated.
    kernel: Option<(u64, Gauge)>,
    boot: Boot,
    disk: Arc<dyn Disk>,
    marks: Mutex<Vec<u64>>,
}

impl DeviceDestination {
    /// Opens a device exclusively.
    pub fn new(path: PathBuf) -> Result<DeviceDestination> {
        let disk = device::open(&path, &device::DiskOptions { write: true, direct: true, exclusive: true })?;
        let number = device::identity(&path)?.dev;
        let kernel = Some((number, Gauge::of(number)));
        Ok(DeviceDestination { path, kernel, boot: Boot::current(), disk, marks: Mutex::default() })
    }

    fn look(&self) -> io::Result<Stamp> {
        self.disk.write_back()?;
        Ok(Stamp {
            medium: self.kernel.as_ref().map(|(_, gauge)| Medium::of(gauge, &*self.disk)).transpose()?,
            ..printed(&*self.disk, &self.marks)?
        })
    }

    /// A device that is open already.
    pub fn over(path: PathBuf, disk: Arc<dyn Disk>) -> DeviceDestination {
        let boot = Boot { id: String::new(), began: 0 };
        DeviceDestination { path, kernel: None, boot, disk, marks: Mutex::default() }
    }
}

/// An export of an NBD server. Of all marks of a disk it has its size and its content.
pub(crate) struct ExportDestination {
    path: PathBuf,
    disk: Arc<NbdDisk>,
    marks: Mutex<Vec<u64>>,
}

impl ExportDestination {
    /// Connects to the export whose URI is `path`; `looks` where nothing is written to it.
    ///
    /// # Errors
    /// If its server cannot be reached or does not have it; refused if it could not hold a replica.
    pub(crate) fn new(path: &Path, looks: bool) -> Result<ExportDestination> {
        let opened = ExportUri::of(path).unwrap_or(Err(io::ErrorKind::InvalidInput.into()));
        let disk = opened.and_then(|uri| NbdDisk::open(&uri, None)).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported => {
                ReplicaError::Refused(format!(
                    "cannot use {}: {error}: have its NBD server export it otherwise, or give another URI",
                    path.display()
                ))
            }
            // No refusal: a server is started, and a service that tries again finds it.
            kind => {
                let text = format!("{error}: start its NBD server, or give another URI");
                io_error("reach", path)(io::Error::new(kind, text))
            }
        })?;
        if !looks && disk.is_read_only() {
            return Err(ReplicaError::Refused(format!(
                "{} is exported read-only by its NBD server, so it can be no destination: export it for writing, or give another URI",
                path.display()
            )));
        }
        if !looks && !disk.can_flush() {
            return Err(ReplicaError::Refused(format!(
                "the NBD server of {} offers no flush, so no write there would be known to be durable: use a server that does",
                path.display()
            )));
        }
        Ok(ExportDestination { path: path.to_path_buf(), disk: Arc::new(disk), marks: Mutex::default() })
    }
}

impl Destination for ExportDestination {
    fn path(&self) -> &Path {
        &self.path
    }

    fn is_device(&self) -> bool {
        true
    }

    fn is_export(&self) -> bool {
        true
    }

    fn stamp(&self, name: Name) -> io::Result<Option<Stamp>> {
        Ok(match name {
            Name::Final => Some(printed(&*self.disk, &self.marks)?),
            Name::Temporary => None,
        })
    }

    fn mark(&self, blocks: &[u64]) {
        set(&self.marks, blocks);
    }

    fn glance(&self) -> io::Result<Option<Stamp>> {
        Ok(Some(Stamp { size: self.disk.len(), ..Stamp::default() }))
    }

    fn settle(&self) -> io::Result<Stamp> {
        self.disk.flush()?;
        printed(&*self.disk, &self.marks)
    }

    fn open(&self, _name: Name) -> Result<Arc<dyn Disk>> {
        Ok(self.disk.clone())
    }
}

/// A disk's size and its fingerprint, with the blocks that are marked.
fn printed(disk: &dyn Disk, marks: &Mutex<Vec<u64>>) -> io::Result<Stamp> {
    let marks = marks.lock().unwrap_or_else(|e| e.into_inner()).clone();
    Ok(Stamp { size: disk.len(), print: fingerprint(disk, &marks)?, marks, ..Stamp::default() })
}

fn set(marks: &Mutex<Vec<u64>>, blocks: &[u64]) {
    *marks.lock().unwrap_or_else(|e| e.into_inner()) = blocks.to_vec();
}

impl Destination for DeviceDestination {
    fn path(&self) -> &Path {
        &self.path
    }

    fn is_device(&self) -> bool {
        true
    }

    fn boot(&self) -> Boot {
        self.boot.clone()
    }

    fn disk(&self) -> Option<String> {
        device::disk_id(self.kernel.as_ref()?.0)
    }

    fn stamp(&self, name: Name) -> io::Result<Option<Stamp>> {
        Ok(match name {
            Name::Final => Some(self.look()?),
            Name::Temporary => None,
        })
    }

    fn mark(&self, blocks: &[u64]) {
        set(&self.marks, blocks);
    }

    fn glance(&self) -> io::Result<Option<Stamp>> {
        // The kernel counts what has left its memory, and as long as the device is open nothing else makes that leave soon.
        self.disk.write_back()?;
        let medium = self.kernel.as_ref().map(|(_, gauge)| gauge.read());
        Ok(Some(Stamp { size: self.disk.len(), medium, ..Stamp::default() }))
    }

    fn settle(&self) -> io::Result<Stamp> {
        self.disk.flush()?;
        self.look()
    }

    fn open(&self, _name: Name) -> Result<Arc<dyn Disk>> {
        Ok(self.disk.clone())
    }
}

// Lists of one range are just that.
#[allow(clippy::single_range_in_vec_init)]
#[cfg(test)]
mod tests {
    use std::ops::Range;

    use device::{RamDisk, agree};
    use testing::faulty::{FaultyDisk, Outage, Power};

    use super::*;

    const EIO: i32 = 5;

    #[test]
    fn blocks_that_cannot_be_read_say_nothing() {
        let disk = Arc::new(RamDisk::new(16 << 20));
        for at in 0..16 << 8 {
            disk.write_at(at << 12, &[at as u8; 100]).unwrap();
        }
        let print = |bad: &[Range<u64>]| {
            let faulty = FaultyDisk::new(&Power::new(Outage::Kill), disk.clone());
            bad.iter().for_each(|bad| faulty.fail_reads(bad.clone(), EIO));
            fingerprint(&faulty, &[]).unwrap()
        };
        let (sound, last) = (print(&[]), print(&[(16 << 20) - 512..16 << 20]));
        assert!(sound != last && agree(&sound, &last) && agree(&last, &sound) && agree(&last, &last));
        let nothing = print(&[0..16 << 20]);
        assert!(!agree(&nothing, &nothing) && !agree(&sound, &nothing));
        assert!(agree("", "") && !agree("", &sound) && !agree(&sound, &sound[..120]));
        disk.write_at(5, &[7]).unwrap();
        assert!(!agree(&sound, &print(&[])) && !agree(&last, &print(&[])));
        assert!(agree(&sound, &print(&[0..1])));
    }
}
