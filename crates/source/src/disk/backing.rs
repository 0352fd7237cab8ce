//! What a source must know of its file or device, besides its bytes.
//!
//! A source that is not tracked is read as it is, and must not change meanwhile. For an image file, its times are compared before and
//! after; for a block device, the kernel's count of written sectors (`device::WriteWatch`); for a partition also the sectors that its
//! disk has counted outside all its partitions, since those were written through the disk. The device's page cache is flushed first, so
//! that reading does not cause a write. If the count changed, the sync, verify or extract fails, and nothing is committed. Where the
//! kernel does not count (`queue/iostats` is 0, brd), only a mount for writing is detected, not a program that writes to the device
//! itself.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use device::{Boot, Clock, DeviceError, Disk, Format, Identity, WriteCounts, WriteWatch};
use extents::Extents;
use qcow2::{Image, ImageHeader, Use};
use trackers::WriteMark;

use crate::SourceError;

/// What a source must know of its file or device, besides its bytes.
pub trait Backing: Send + Sync {
    /// The present identity of the file or device.
    fn identity(&self) -> Result<Identity, SourceError>;
    /// The boot of the machine.
    fn boot(&self) -> Boot;
    /// The clock that stamps it.
    fn clock(&self) -> Clock {
        Clock::system()
    }
    /// A second way to the same bytes, for readers, bypassing the page cache.
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError>;
    /// A second way to the same bytes, for recent writes, through the page cache.
    fn cached_reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        self.reader()
    }
    /// The kernel's count of writes to a block device; `None` where there is none.
    fn written(&self) -> Option<WriteCounts> {
        None
    }
    /// The kernel's count with writes to a partition past it, through its disk. `None` also while the disk is too busy to be counted.
    fn counted(&self) -> Option<WriteCounts> {
        None
    }
    /// False for a block device whose disk has no identifier: its name may be that of another one after a reboot.
    fn is_named(&self) -> bool {
        true
    }
    /// Makes a file durable with its times, and returns the time of change that it had before, and that of its content, in nanoseconds since 1970; 0
    /// where there is none.
    fn durable_times(&self) -> Result<(i64, i64), SourceError> {
        Ok((0, 0))
    }
    /// True if it is a clone of the source's image, which is one moment of that.
    fn is_clone(&self) -> bool {
        false
    }
    /// What is dirty in a bitmap that is offered with the disk, in bytes.
    ///
    /// # Errors
    /// `Refused` if there is none.
    fn bitmap(&self, context: &str) -> Result<Extents, SourceError> {
        Err(SourceError::Refused(format!(
            "{context} is a bitmap of an NBD server, and the moment is not behind one: give its URI with --moment"
        )))
    }
    /// Where it is, if that is not the source's path.
    fn elsewhere(&self) -> Option<&Path> {
        None
    }
    /// Fails if what was read so far may not have been one moment, of a disk that another program shows.
    fn still(&self) -> io::Result<()> {
        Ok(())
    }
    /// Detects writes by other programs from now on; `None` if the identity shows them.
    fn watch(&self) -> Result<Option<WriteWatch>, SourceError> {
        Ok(None)
    }
}

/// An image file or a block device at a path, also after a move.
pub(crate) struct PathBacking {
    identity: Mutex<Identity>,
    /// Only used to find its path after a move.
    object: Option<File>,
    boot: Boot,
    format: Format,
    /// The disk in it where it is no raw one, and this process has it open.
    image: Option<Arc<Image>>,
    /// Where the process that serves such a disk is reached.
    socket: PathBuf,
}

impl PathBacking {
    /// The backing of a source whose state is in `folder`.
    #[allow(clippy::disallowed_methods, reason = "nothing can be done with it but to ask for its path")]
    pub(crate) fn new(identity: Identity, folder: &Path, format: Format) -> PathBacking {
        let object = File::options().read(true).custom_flags(libc::O_PATH).open(&identity.path).ok();
        let boot = Boot::of(&[&identity.path, folder]);
        let socket = folder.join(SOCKET);
        PathBacking { identity: Mutex::new(identity), object, boot, format, image: None, socket }
    }

    /// Reads through `image`, the qcow2 file that this process has open.
    pub(crate) fn over(self, image: Arc<Image>) -> PathBacking {
        PathBacking { image: Some(image), ..self }
    }

    /// The identity of the disk when it was last checked.
    fn known(&self) -> std::sync::MutexGuard<'_, Identity> {
        self.identity.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn moved(&self, known: &Identity) -> Option<Identity> {
        let link = format!("/proc/self/fd/{}", self.object.as_ref()?.as_raw_fd());
        let now = device::identity(&std::fs::read_link(link).ok()?).ok()?;
        now.same_object(known).then_some(now)
    }

    fn open(&self, direct: bool) -> Result<Arc<dyn Disk>, SourceError> {
        if let Some(image) = &self.image {
            return Ok(image.clone());
        }
        if !self.format.is_raw() {
            let served = qcow2::connect(&self.socket);
            return Ok(Arc::new(
                served.map_err(SourceError::state("read the disk served at", &self.socket))?,
            ));
        }
        let now = self.identity()?;
        open_reader(&now.path, &self.known(), direct)
    }
}

impl Backing for PathBacking {
    fn identity(&self) -> Result<Identity, SourceError> {
        let mut known = self.known();
        // QEMU may change it for what was written before.
        let settled = self.image.as_ref().map_or(Ok(()), |image| image.settle());
        settled.map_err(SourceError::state("write to", &known.path))?;
        let found = match device::identity(&known.path) {
            Ok(now) if now.same_object(&known) => return disk_in(now, self.format),
            other => other,
        };
        match self.moved(&known) {
            Some(now) => {
                known.path.clone_from(&now.path);
                disk_in(now, self.format)
            }
            None => disk_in(found?, self.format),
        }
    }
    fn boot(&self) -> Boot {
        self.boot.clone()
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        self.open(true)
    }
    fn cached_reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        self.open(false)
    }
    fn is_named(&self) -> bool {
        let known = self.known();
        !known.is_block() || device::disk_id(known.dev).is_some()
    }
    fn written(&self) -> Option<WriteCounts> {
        WriteCounts::settled(&self.identity().ok().filter(Identity::is_block)?)
    }
    fn counted(&self) -> Option<WriteCounts> {
        WriteCounts::settled_whole(&self.identity().ok().filter(Identity::is_block)?)
    }
    fn durable_times(&self) -> Result<(i64, i64), SourceError> {
        let now = self.identity()?;
        if now.is_block() {
            return Ok((0, 0));
        }
        // A flush of the content alone may leave the times behind.
        #[allow(clippy::disallowed_methods, reason = "the image, which its user names")]
        let synced = File::open(&now.path).and_then(|file| file.sync_all());
        synced.map_err(SourceError::state("flush", &now.path))?;
        Ok((now.ctime_ns, now.mtime_ns))
    }
    fn watch(&self) -> Result<Option<WriteWatch>, SourceError> {
        let known = self.known();
        let watch = known.is_block().then(|| WriteWatch::begin(&known)).transpose();
        watch.map_err(SourceError::state("flush", &known.path))
    }
}

/// The name of the socket of a server's qemu-nbd, in the source's folder.
const SOCKET: &str = "disk";

/// What each write moves of a disk, whoever writes; `None` where nothing tells. A block device that is not `served` is not written to by this
/// process, and [`Backing::watch`] tells.
pub(crate) fn write_mark(backing: &dyn Backing, served: bool) -> Option<WriteMark> {
    mark_of(&backing.identity().ok()?, backing, served)
}

/// The mark of a disk as of the time at which it was found to be this.
pub(crate) fn mark_of(found: &Identity, backing: &dyn Backing, served: bool) -> Option<WriteMark> {
    match found.is_block() {
        false => Some(WriteMark::Changed(found.ctime_ns.max(0) as u64)),
        true if !served => None,
        // Own writes go past its page cache, and are counted when they end.
        true => backing.written().map(WriteMark::Counted),
    }
}

/// What identifies a disk: its file, and the size of the disk in that.
///
/// # Errors
/// If the head of a file that is not raw cannot be read.
pub fn disk_in(file: Identity, format: Format) -> Result<Identity, SourceError> {
    if format.is_raw() {
        return Ok(file);
    }
    #[allow(clippy::disallowed_methods, reason = "the image, which its user names")]
    let head = File::open(&file.path).and_then(|open| ImageHeader::of(&open));
    // What is no such file any more has no disk: another size is another disk.
    let size = head.map_err(SourceError::state("read", &file.path))?.map_or(0, |head| head.size);
    Ok(Identity { size, ..file })
}

/// Opens the disk in a qcow2 file; with the folder of its source's state where it is served.
///
/// # Errors
/// `Refused` if that cannot be served.
pub(crate) fn open_image(path: &Path, access: Use, serves: Option<&Path>) -> Result<Arc<Image>, SourceError> {
    let failed = SourceError::state("open", path);
    #[allow(clippy::disallowed_methods, reason = "the image, which its user names")]
    let opened = File::options().read(true).write(access == Use::Write).open(path);
    let file = opened.map_err(SourceError::state("open", path))?;
    let head = ImageHeader::of(&file).map_err(SourceError::state("read", path))?;
    let refuses = if access == Use::Read { ImageHeader::refusal_of_reader } else { ImageHeader::refusal };
    let refusal = head.as_ref().map_or(Some(("it is no qcow2 file any more", "restore it")), refuses);
    if let Some((why, way_out)) = refusal {
        return Err(SourceError::Refused(format!("{} cannot be a source: {why}: {way_out}", path.display())));
    }
    let image = match serves {
        Some(folder) => Image::serve(file, path, &folder.join(SOCKET)),
        None => Image::open(file, path, access),
    };
    match image {
        Ok(image) => Ok(Arc::new(image)),
        Err(e) => Err(match e.downcast::<DeviceError>() {
            Ok(in_use) => in_use.into(),
            Err(e) => failed(e),
        }),
    }
}

/// The disk in a qcow2 file, to be read as long as nobody writes to it.
///
/// # Errors
/// `Refused` if it cannot be read alone.
pub fn read_image(path: &Path) -> Result<Arc<dyn Disk>, SourceError> {
    Ok(open_image(path, Use::Read, None)?)
}

/// Opens the image for reading: the tracked one, not what may be at its path by now.
pub(crate) fn open_reader(
    path: &Path,
    followed: &Identity,
    direct: bool,
) -> Result<Arc<dyn Disk>, SourceError> {
    let disk = device::open(path, &device::DiskOptions { write: false, direct, exclusive: false })?;
    if !device::identity(path)?.same_object(followed) {
        return Err(SourceError::Replaced(path.to_path_buf()));
    }
    Ok(disk)
}
