//! A qcow2 file as a disk, by a qemu-nbd.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use device::{Access, DeviceError, DeviceErrorKind, Disk, Queue, ThreadQueue};
use nbd::NbdDisk;
use nbd::client::Address;

use crate::head::ImageHeader;
use crate::server::{QemuNbd, Use, hold};
use crate::tools;

/// How long the qemu-nbd of a process that was killed may take to end.
const ORPHAN_ENDS_WITHIN: Duration = Duration::from_secs(10);
/// How long a server that answers no more is waited for, to learn why.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of the largest cluster that the format has.
const LARGEST_CLUSTER: u64 = 2 << 20;
/// What a cluster of QEMU's default size has.
const CLUSTER: u64 = 64 << 10;

/// The disk in a qcow2 file. The file is locked as QEMU locks it. Ended in order when dropped.
pub struct Image {
    file: File,
    path: PathBuf,
    access: Use,
    /// Where other processes connect.
    place: Option<PathBuf>,
    /// `None` where a change of the size has failed.
    running: RwLock<Option<Running>>,
    /// QEMU may hold tables in memory that are not in the file.
    written: AtomicBool,
    /// Held while they are written out.
    settling: Mutex<()>,
    /// Held by what writes, and alone by what may free clusters: a QEMU that frees a cluster while a write into it is under way enters it
    /// into its tables again, and gives it to others.
    clusters: RwLock<()>,
    /// Bytes of one.
    cluster: u64,
    reserved: Mutex<Reserved>,
}

/// The room that was asked for since the last flush.
#[derive(Default)]
struct Reserved {
    bytes: u64,
    /// The cluster up to which they count.
    upto: u64,
}

struct Running {
    /// Before the server: the connection ends first.
    disk: NbdDisk,
    server: QemuNbd,
}

impl Running {
    fn start(file: &File, access: Use, place: Option<&Path>) -> io::Result<Running> {
        let server = QemuNbd::start(file, access, place)?;
        match NbdDisk::connect(&Address::Unix(server.address()), "") {
            Ok(disk) => Ok(Running { disk, server }),
            Err(e) => Err(match server.last_words(LAST_WORDS_WITHIN) {
                Some(text) => io::Error::other(format!("qemu-nbd: {}", tools::said(&text))),
                None => e,
            }),
        }
    }
}

impl Image {
    /// Opens the disk in a file that is open, at least for what is to be done. `path` is for messages.
    ///
    /// # Errors
    /// Of kind `ResourceBusy` if another program uses it, and says which; if qemu-nbd is missing or cannot open it.
    pub fn open(file: File, path: &Path, access: Use) -> io::Result<Image> {
        Image::open_at(file, path, access, None)
    }

    /// Opens the disk for writing; other processes may [`connect`] to it at `socket`. What was written gets into the file even if this
    /// process is killed.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn serve(file: File, path: &Path, socket: &Path) -> io::Result<Image> {
        Image::open_at(file, path, Use::Write, Some(socket))
    }

    fn open_at(file: File, path: &Path, access: Use, place: Option<&Path>) -> io::Result<Image> {
        if let Some(lock) = access.lock() {
            free(path, lock)?;
        }
        let running = Running::start(&file, access, place).map_err(|e| {
            // Since it was free, another may have taken it.
            let taken = access.lock().and_then(|lock| free(path, lock).err());
            taken.map_or_else(
                || io::Error::new(e.kind(), format!("cannot open {}: {e}", path.display())),
                io::Error::from,
            )
        })?;
        let cluster = ImageHeader::of(&file)?.map_or(LARGEST_CLUSTER, |head| head.cluster);
        Ok(Image {
            file,
            cluster,
            path: path.to_path_buf(),
            access,
            place: place.map(Path::to_path_buf),
            running: RwLock::new(Some(running)),
            written: AtomicBool::new(false),
            settling: Mutex::default(),
            clusters: RwLock::default(),
            reserved: Mutex::default(),
        })
    }

    /// Has QEMU write out what it holds in memory, if it may hold anything: nothing changes the file any more until the next write.
    ///
    /// # Errors
    /// If it cannot. Then nothing tells what the file holds, and it has to be opened anew.
    pub fn settle(&self) -> io::Result<()> {
        let _settling = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        match self.written.swap(false, SeqCst) {
            false => Ok(()),
            true => self.ask(|disk| disk.flush()).inspect_err(|_| self.written.store(true, SeqCst)),
        }
    }

    /// Frees clusters that are allocated and used by nothing, as a kill of QEMU may leave them.
    ///
    /// # Errors
    /// If QEMU finds more than that, or fails. Then the disk has to be opened anew.
    pub fn reclaim(&self) -> io::Result<()> {
        self.without_server(tools::reclaim)
    }

    /// Does something to the file for which QEMU must not have it open.
    fn without_server(&self, act: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        if self.access != Use::Write {
            return Err(self.read_only());
        }
        let mut running = self.running.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = running.take() {
            running.disk.flush()?;
        }
        act(&self.file)?;
        *running = Some(Running::start(&self.file, self.access, self.place.as_deref())?);
        self.written.store(false, SeqCst);
        Ok(())
    }

    /// Zeroes the rest of the cluster in which a disk ends at `from`, as far as `to`.
    fn zero_cluster(&self, from: u64, to: u64) -> io::Result<()> {
        let end = from.next_multiple_of(LARGEST_CLUSTER).min(to);
        if from < end { self.zero(from, end - from, true, false) } else { Ok(()) }
    }

    fn reserved(&self) -> MutexGuard<'_, Reserved> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> RwLockReadGuard<'_, Option<Running>> {
        self.running.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask<T>(&self, ask: impl FnOnce(&NbdDisk) -> io::Result<T>) -> io::Result<T> {
        let running = self.running();
        let Some(running) = &*running else {
            return Err(io::Error::other(format!("{} could not be opened again", self.path.display())));
        };
        ask(&running.disk).map_err(|e| {
            // An error of the disk itself has a number.
            let gone =
                e.raw_os_error().is_none().then(|| running.server.last_words(Duration::ZERO)).flatten();
            gone.map_or(e, |text| {
                io::Error::other(format!(
                    "qemu-nbd for {} is gone: {}",
                    self.path.display(),
                    tools::said(&text)
                ))
            })
        })
    }

    fn write(&self, write: impl FnOnce(&NbdDisk) -> io::Result<()>) -> io::Result<()> {
        let _shared = self.clusters.read().unwrap_or_else(PoisonError::into_inner);
        self.change(write)
    }

    fn free(&self, free: impl FnOnce(&NbdDisk) -> io::Result<()>) -> io::Result<()> {
        let _alone = self.clusters.write().unwrap_or_else(PoisonError::into_inner);
        self.change(free)
    }

    fn change(&self, change: impl FnOnce(&NbdDisk) -> io::Result<()>) -> io::Result<()> {
        if self.access != Use::Write {
            return Err(self.read_only());
        }
        // Before and after: a flush in between covers only what was done before it.
        self.written.store(true, SeqCst);
        let changed = self.ask(change);
        self.written.store(true, SeqCst);
        changed
    }
}

impl Use {
    /// What others must not do meanwhile.
    fn lock(self) -> Option<Access> {
        match self {
            Use::Write => Some(Access::Write),
            Use::Read => Some(Access::ReadShared),
            Use::ReadBesideWriter => None,
        }
    }
}

/// The disk that another process [serves](Image::serve) at this socket, to be read.
///
/// # Errors
/// If nobody does.
pub fn connect(socket: &Path) -> io::Result<NbdDisk> {
    let held = hold(socket)?;
    let socket = Address::Unix(format!("/proc/self/fd/{}", held.as_raw_fd()).into());
    Ok(NbdDisk::connect(&socket, "")?.beside_writers())
}

/// Fails if another program uses the file at `path` in a way that forbids this. The qemu-nbd that a process has left that was killed is
/// waited for.
///
/// # Errors
/// Of kind [`InUse`](device::DeviceErrorKind::InUse), with who uses it.
pub fn free(path: &Path, access: Access) -> Result<(), DeviceError> {
    let began = Instant::now();
    loop {
        let error = match device::lock_image(path, access) {
            Ok(_) => return Ok(()),
            // A file system without locks knows nothing of other users.
            Err(e) if e.kind() == DeviceErrorKind::Unsupported => return Ok(()),
            Err(e) => e,
        };
        if !error.to_string().contains("(qemu-nbd") || began.elapsed() >= ORPHAN_ENDS_WITHIN {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Disk for Image {
    fn len(&self) -> u64 {
        self.running().as_ref().map_or(0, |running| running.disk.len())
    }

    fn align(&self) -> u32 {
        self.running().as_ref().map_or(1, |running| running.disk.align())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.ask(|disk| disk.read_at(offset, buf))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write(|disk| disk.write_at(offset, buf))
    }

    fn write_through(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write(|disk| disk.write_through(offset, buf))
    }

    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        let first = offset.checked_next_multiple_of(self.cluster);
        let whole = |first: u64| first.saturating_add(self.cluster) <= offset.saturating_add(len);
        // Parts of a cluster have no place of their own.
        let unmap = unmap && first.is_some_and(whole);
        let zero = |disk: &NbdDisk| disk.zero(offset, len, unmap, fast);
        if unmap { self.free(zero) } else { self.write(zero) }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.free(|disk| disk.discard(offset, len))
    }

    /// QEMU cannot reserve anything: this looks whether there is room, for all that was asked since the last flush, in ascending order.
    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut asked = self.reserved();
        let first = (offset / CLUSTER).max(asked.upto);
        asked.upto = asked.upto.max((offset + len).div_ceil(CLUSTER));
        asked.bytes += asked.upto.saturating_sub(first) * CLUSTER;
        let free = rustix::fs::fstatvfs(&self.file)?;
        // Tables take one part in some thousands.
        if asked.bytes + asked.bytes / 1024 + CLUSTER <= free.f_bavail.saturating_mul(free.f_frsize) {
            return Ok(());
        }
        *asked = Reserved::default();
        Err(rustix::io::Errno::NOSPC.into())
    }

    fn flush(&self) -> io::Result<()> {
        *self.reserved() = Reserved::default();
        let _settling = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        self.written.store(false, SeqCst);
        self.ask(|disk| disk.flush()).inspect_err(|_| self.written.store(true, SeqCst))
    }

    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        self.ask(|disk| disk.allocated(from))
    }

    fn resize(&self, len: u64) -> io::Result<()> {
        if self.len() == len {
            return Ok(());
        }
        tools::check_size(len)?;
        let was = self.len();
        // The last cluster keeps what is behind a new end, and a disk that grows again would show it. Before the cut, so that a crash
        // leaves a disk that is cut once more; and behind what another program cut.
        self.zero_cluster(len, was)?;
        self.without_server(|file| tools::resize(file, len))?;
        if self.len() != len {
            let is = self.len();
            return Err(io::Error::other(format!("{} has {is} bytes instead of {len}", self.path.display())));
        }
        self.zero_cluster(was, len)
    }

    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(ThreadQueue::new(Arc::new(move |request| request.run(&*self)), depth)?))
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // What is not durable by now need not be, but QEMU should not have to hurry with it once it is told to end.
        let _ = self.settle();
        if let Some(place) = &self.place {
            let _ = std::fs::remove_file(place);
        }
    }
}
