//! The traits of disks and their queues.

pub(crate) mod bell;
pub(crate) mod buffer;
pub(crate) mod container;
pub(crate) mod file;
pub(crate) mod overlay;
pub(crate) mod ram;
pub(crate) mod table;
pub(crate) mod threads;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::Buf;

/// A run of bytes on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub offset: u64,
    /// Bytes; above zero.
    pub len: u64,
}

/// The runs of one request. One is the common case and costs no allocation.
pub type Pieces = SmallVec<[Piece; 1]>;

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Fill the buffer from the pieces, one after the other.
    Read,
    /// Write the buffer to the pieces, one after the other. With `fua` the data is durable at completion.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Make the pieces read as zeroes.
    Zero {
        /// The space may be deallocated.
        unmap: bool,
        /// Fail with `ErrorKind::Unsupported` rather than write zeroes by hand.
        fast: bool,
        /// Durable at completion.
        fua: bool,
    },
    /// The content is no longer needed. The disk may ignore this, or leave any content.
    Discard {
        /// Durable at completion.
        fua: bool,
    },
    /// What was completed before is durable at completion.
    Flush,
}

/// One request: pieces, and for reads and writes a buffer that holds their bytes one after the other.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub kind: RequestKind,
    /// Where. Empty for a flush.
    pub pieces: Pieces,
    /// The data: as long as the pieces together for reads and writes, empty otherwise.
    pub buf: Buf,
    /// The caller's token, returned with the completion.
    pub token: u64,
}

impl Request {
    /// Refuses a buffer that is not as long as the pieces together.
    pub fn check(&self) -> io::Result<()> {
        if !matches!(self.kind, RequestKind::Read | RequestKind::Write { .. }) {
            return Ok(());
        }
        let total = self.pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.len));
        if total == Some(self.buf.len() as u64) {
            return Ok(());
        }
        let text =
            format!("a request of {} pieces has a buffer of {} bytes", self.pieces.len(), self.buf.len());
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }

    /// Executes it by the plain methods.
    pub fn run<D: Disk + ?Sized>(&mut self, disk: &D) -> io::Result<()> {
        self.check()?;
        let (mut at, mut durable) = (0, false);
        for piece in &self.pieces {
            match self.kind {
                RequestKind::Read => {
                    let end = at + piece.len as usize;
                    disk.read_at(piece.offset, &mut self.buf[at..end])?;
                    at = end;
                }
                // For many pieces one flush is cheaper than as many forced writes.
                RequestKind::Write { fua: true } if self.pieces.len() == 1 => {
                    disk.write_through(piece.offset, &self.buf)?;
                }
                RequestKind::Write { fua } => {
                    durable |= fua;
                    let end = at + piece.len as usize;
                    disk.write_at(piece.offset, &self.buf[at..end])?;
                    at = end;
                }
                RequestKind::Zero { unmap, fast, fua } => {
                    durable |= fua;
                    disk.zero(piece.offset, piece.len, unmap, fast)?;
                }
                RequestKind::Discard { fua } => {
                    durable |= fua;
                    disk.discard(piece.offset, piece.len)?;
                }
                RequestKind::Flush => {}
            }
        }
        if durable || self.kind == RequestKind::Flush { disk.flush() } else { Ok(()) }
    }
}

/// A completed request, with its buffer.
#[derive(Debug)]
pub struct Done {
    /// The request as it was submitted.
    pub request: Request,
    /// The result. After an error the content of the pieces (or the buffer, for a read) is undefined.
    pub result: io::Result<()>,
}

/// A queue of requests to one disk, used by one thread. Requests may complete in any order: one that must see another's
/// effect is submitted after the other's completion. Dropping a queue waits for started requests; the rest is discarded.
pub trait Queue: Send {
    /// Submits a request. May execute it at once; may block while the queue is full.
    fn submit(&mut self, request: Request);

    /// Starts everything submitted. Cheap if there is nothing to start.
    fn start(&mut self);

    /// The next completion. `None` if nothing has completed and `wait` is false, or if nothing is in flight.
    fn complete(&mut self, wait: bool) -> Option<Done>;

    /// Requests submitted and not yet returned.
    fn in_flight(&self) -> usize;

    /// A descriptor that is readable as soon as something completes after `complete(false)` has returned `None`, so that one thread
    /// can wait for a completion and for something else in one `poll`. Whatever else was called in between, it must have returned
    /// `None` last: one call may take several completions from the system, of which the others wake nobody. `None` if there is no
    /// such descriptor: because all work is done as it is submitted, or because only `complete(true)` can wait.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A disk as bytes. Offsets and lengths may be any within the size; multiples of [`Disk::align`] are fast.
///
/// The plain methods block and are for single steps; streams of requests go through a [`Queue`].
pub trait Disk: Send + Sync {
    /// Size in bytes.
    fn len(&self) -> u64;

    /// True if the size is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The alignment of offsets, lengths and memory at which requests take the fast way: a power of two, from 1.
    fn align(&self) -> u32 {
        1
    }

    /// The most bytes that one request should ask for now, for the sake of others who use the disk: at least 64 KiB.
    fn at_once(&self) -> u64 {
        u64::MAX
    }

    /// Fills `buf` from `offset`. Reading past the end is an error of kind `UnexpectedEof`.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Fills `buf` from `offset` if memory has all of it already, and as much after it as the system reads ahead. Returns
    /// whether it did. A file's page cache is read at the speed of memory, and nothing is added to it. For callers that
    /// need only the content: it does not check the medium. After `false` the content of `buf` is
    /// undefined.
    fn read_cached(&self, _offset: u64, _buf: &mut [u8]) -> bool {
        false
    }

    /// Why flushes fail for good: one has failed, and what was written before that may be lost.
    fn failed(&self) -> Option<String> {
        None
    }
    /// The error of what would change the disk, where that cannot be changed: what is not implemented of writing returns it.
    fn read_only(&self) -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, "this disk is only read")
    }

    /// Writes `buf` at `offset`. Writing past the end is an error; a disk never grows by a write.
    fn write_at(&self, _offset: u64, _buf: &[u8]) -> io::Result<()> {
        Err(self.read_only())
    }

    /// Writes as [`Disk::write_at`] does, and returns when that much is durable. Other writes need not be.
    fn write_through(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_at(offset, buf)?;
        self.flush()
    }

    /// Makes a range read as zeroes. With `unmap` the space may be deallocated; with `fast` the call fails with
    /// `Unsupported` where it would have to write the zeroes.
    fn zero(&self, _offset: u64, _len: u64, _unmap: bool, _fast: bool) -> io::Result<()> {
        Err(self.read_only())
    }

    /// Declares that a range is no longer needed.
    fn discard(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Err(self.read_only())
    }

    /// Makes sure that a write to this range finds room, beyond the disk's end too, where the disk can do that. What is there
    /// does not change.
    fn reserve(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Announces that a range will be read soon. A hint: may do nothing.
    fn prefetch(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Writes out what other programs have written and the system still holds in memory, so that the disk's count of writes has
    /// it. Does not flush the disk's own cache.
    fn write_back(&self) -> io::Result<()> {
        Ok(())
    }

    /// Makes everything completed so far durable.
    fn flush(&self) -> io::Result<()>;

    /// The first allocated run at or after `from`, `None` if there is none. The bytes in between read as zeroes.
    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        Ok((from < self.len()).then(|| from..self.len()))
    }

    /// True if it is known, without much ado, that no byte of a range is allocated: all read as zeroes.
    fn is_hole(&self, _offset: u64, _len: u64) -> bool {
        false
    }

    /// Changes the size. `Unsupported` for disks of fixed size.
    fn resize(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// A queue that keeps up to about `depth` operations in flight.
    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>>;
}

/// The queue of synchronous disks: every request is executed by the plain methods as it is submitted.
pub struct InlineQueue<D: Disk + ?Sized> {
    disk: Arc<D>,
    done: VecDeque<Done>,
}

impl<D: Disk + ?Sized> InlineQueue<D> {
    /// A queue over `disk`.
    pub fn new(disk: Arc<D>) -> Self {
        InlineQueue { disk, done: VecDeque::new() }
    }
}

impl<D: Disk + ?Sized> Queue for InlineQueue<D> {
    fn submit(&mut self, mut request: Request) {
        let result = request.run(&*self.disk);
        self.done.push_back(Done { request, result });
    }

    fn start(&mut self) {}

    fn complete(&mut self, _wait: bool) -> Option<Done> {
        self.done.pop_front()
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}
