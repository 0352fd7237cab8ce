//! Views: the source as it was at a checkpoint, as a read-only disk.
//!
//! Map and file are passed by descriptor over the source's control socket, so `dsync sync` reads the disk itself, past the page cache,
//! and never through the server. Readers report what they still need and what they have read; the writer saves nothing else. If the limit
//! on saved data is reached, the view fails and its reader gets an error; the writer continues.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::Epoch;
use device::{Disk, Done, Queue, Request, RequestKind};
use extents::Bitmap;
use trackers::CowStore;

use crate::views::attended::{Attended, There};
use crate::views::courtesy::Courtesy;

/// Checks that the view is still kept exact.
pub(crate) type Alive = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// The source as it was at a checkpoint.
#[derive(Clone)]
pub struct View {
    epoch: Epoch,
    disk: Arc<dyn Disk>,
    size: u64,
    saved: Option<Arc<CowStore>>,
    alive: Alive,
    /// Other readers hold it too, and need what this one does not.
    shared: bool,
    courtesy: Arc<Courtesy>,
}

impl View {
    pub(crate) fn new(
        epoch: Epoch,
        disk: Arc<dyn Disk>,
        size: u64,
        saved: Option<Arc<CowStore>>,
        alive: Alive,
    ) -> View {
        View { epoch, disk, size, saved, alive, shared: false, courtesy: Courtesy::none() }
    }

    /// A view that is read at full speed, also while the guest writes.
    pub fn at_full_speed(self) -> View {
        self.beside(&Courtesy::none())
    }

    /// Has its readers wait for the guest that this courtesy knows of.
    pub(crate) fn beside(self, courtesy: &Arc<Courtesy>) -> View {
        View { courtesy: courtesy.clone(), ..self }
    }

    /// Marks the view as shared with other readers: all of it is saved for them, whatever this reader has read.
    pub(crate) fn shared(self) -> View {
        View { shared: true, ..self }
    }

    /// A copy of the view whose reads fail once nobody is there to read it for.
    pub fn attended(&self, there: There) -> View {
        View { disk: Arc::new(Attended::new(self.disk.clone(), there)), ..self.clone() }
    }

    /// The store, if this reader alone decides what it needs.
    fn own(&self) -> Option<&CowStore> {
        self.saved.as_deref().filter(|_| !self.shared)
    }

    /// The checkpoint that it shows.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Declares that only these blocks will be read: the writer need not save others.
    pub fn narrow(&self, blocks: &Bitmap) {
        if let Some(saved) = self.own() {
            saved.narrow(blocks);
        }
    }

    /// Declares that everything below this offset has been read.
    pub fn taken(&self, offset: u64) {
        if let Some(saved) = self.own() {
            saved.taken(offset / u64::from(saved.block_size()));
        }
    }

    /// How many reads have waited for the guest, of this view and of others of the same reader.
    pub fn waits(&self) -> u64 {
        self.courtesy.waits()
    }

    /// Bytes saved for this view so far.
    pub fn kept_bytes(&self) -> u64 {
        self.saved.as_ref().map_or(0, |s| s.kept_bytes())
    }

    /// Checks that everything read so far was exact. To be called before the data is used.
    pub fn verify(&self) -> io::Result<()> {
        (self.alive)()
    }

    /// Waits for the guest, unless what is saved meanwhile may not suffice for that.
    fn give_way(&self, bytes: usize, first: impl FnOnce()) {
        if self.saved.as_ref().is_none_or(|saved| saved.kept_bytes() < saved.limit() / 2) {
            self.courtesy.wait(bytes as u64, first);
        }
    }

    /// Corrects what was read from the image.
    fn mend(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match &self.saved {
            Some(saved) => saved.mend(offset, buf),
            None => Ok(()),
        }
    }

    /// A writer that is gone is noticed at once. Without a writer, [`View::verify`] at the end is enough, and a
    /// read needs no check of the file.
    fn still_kept(&self) -> io::Result<()> {
        if self.saved.is_some() { self.verify() } else { Ok(()) }
    }
}

impl Disk for View {
    fn len(&self) -> u64 {
        self.size
    }
    fn align(&self) -> u32 {
        self.disk.align()
    }
    fn at_once(&self) -> u64 {
        self.courtesy.at_once()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.give_way(buf.len(), || ());
        self.disk.read_at(offset, buf)?;
        self.mend(offset, buf)?;
        self.still_kept()
    }
    fn read_cached(&self, offset: u64, buf: &mut [u8]) -> bool {
        self.disk.read_cached(offset, buf) && self.mend(offset, buf).is_ok() && self.still_kept().is_ok()
    }
    fn read_only(&self) -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, "a view is read-only")
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.disk.prefetch(offset, len)
    }
    /// The image is asked before the saved blocks: a hole that the writer fills or makes in between was saved before.
    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let image = self.disk.allocated(from)?.filter(|run| run.start < self.size);
        let kept = self.saved.as_ref().map_or(Ok(None), |saved| saved.next_kept(from))?;
        self.still_kept()?;
        Ok(match (image, kept) {
            // Overlapping runs are returned as one, up to the end of the first: the next call finds the rest.
            (Some(a), Some(b)) if a.start <= b.start => Some(a.start..a.end.min(self.size)),
            (_, Some(b)) => Some(b),
            (Some(a), None) => Some(a.start..a.end.min(self.size)),
            (None, None) => None,
        })
    }
    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(ViewQueue { inner: self.disk.clone().queue(depth)?, view: self }))
    }
}

struct ViewQueue {
    inner: Box<dyn Queue>,
    view: Arc<View>,
}

impl ViewQueue {
    fn mend(&self, done: &mut Done) -> io::Result<()> {
        let Request { pieces, buf, .. } = &mut done.request;
        let mut at = 0;
        for piece in pieces.iter() {
            let end = at + piece.len as usize;
            self.view.mend(piece.offset, &mut buf[at..end])?;
            at = end;
        }
        self.view.still_kept()
    }
}

impl Queue for ViewQueue {
    fn submit(&mut self, request: Request) {
        // What was submitted before need not wait with this.
        self.view.give_way(request.buf.len(), || self.inner.start());
        self.inner.submit(request)
    }
    fn start(&mut self) {
        self.inner.start()
    }
    fn complete(&mut self, wait: bool) -> Option<Done> {
        let mut done = self.inner.complete(wait)?;
        match done.request.kind {
            RequestKind::Read if done.result.is_ok() => done.result = self.mend(&mut done),
            RequestKind::Read | RequestKind::Flush => {}
            // Views are only given to readers, and the disk beneath is opened read-only.
            _ => done.result = Err(self.view.read_only()),
        }
        Some(done)
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
    fn wait_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}
