//! Writing an undo delta: what ranges hold is read and kept, most of it while the delta that replaces it still arrives.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use delta::{Encoder, Header};
use device::{Disk, Folder};

use crate::journal::{Growing, Relief};
use crate::old::Old;
use crate::past::GROWING;

/// An undo delta that grows. Dropped before it has its name, it is removed.
pub(crate) struct UndoWriter {
    folder: Arc<dyn Folder>,
    header: Header,
    /// `None` once it has its name.
    open: Option<Open>,
    /// Bytes of the ranges so far.
    bytes: u64,
    /// Its room was given to the journal. One thread receives a delta, writes the journal, and asks this.
    gone: Arc<AtomicBool>,
}

struct Open {
    encoder: Encoder,
    file: Growing,
    old: Old,
}

impl UndoWriter {
    /// Begins one of what a disk holds.
    pub(crate) fn begin(
        folder: Arc<dyn Folder>,
        disk: Arc<dyn Disk>,
        header: Header,
    ) -> io::Result<UndoWriter> {
        let (encoder, unit) = Encoder::new(&header, None).map_err(io::Error::other)?;
        let old = Old::new(disk)?;
        let mut file = Growing::begin(&*folder, GROWING)?;
        file.unit(&unit)?;
        let open = Some(Open { encoder, file, old });
        Ok(UndoWriter { folder, header, open, bytes: 0, gone: Arc::default() })
    }

    /// Keeps what a range holds. Ranges ascend.
    pub(crate) fn read(&mut self, range: Range<u64>) -> io::Result<()> {
        self.bytes += range.end - range.start;
        let Open { encoder, file, old } = self.open()?;
        old.read(range, |frame| file.unit(&encoder.frame(frame).map_err(io::Error::other)?))
    }

    /// Makes it durable, under its name.
    pub(crate) fn finish(mut self, name: &str) -> io::Result<()> {
        let Open { encoder, file, old } = self.open()?;
        old.finish(|frame| file.unit(&encoder.frame(frame).map_err(io::Error::other)?))?;
        let Some(Open { encoder, mut file, .. }) = self.open.take() else { return Err(lost()) };
        let named = file.unit(&encoder.trailer()).and_then(|()| file.name(&*self.folder, GROWING, name));
        named.inspect_err(|_| self.remove())
    }

    /// Its header.
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes of the ranges so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A way to make room: first it goes, which costs nothing but time, then what `next` gives.
    pub(crate) fn gives_way_before(&self, mut next: Option<Relief>) -> Option<Relief> {
        let gone = self.gone.clone();
        let file = Arc::downgrade(&self.open.as_ref()?.file.file());
        Some(Box::new(move || {
            let file = file.upgrade().filter(|_| !gone.swap(true, Relaxed));
            file.is_some_and(|file| file.set_len(0).is_ok()) || next.as_mut().is_some_and(|next| next())
        }))
    }

    fn open(&mut self) -> io::Result<&mut Open> {
        match &mut self.open {
            Some(open) if !self.gone.load(Relaxed) => Ok(open),
            _ => Err(lost()),
        }
    }

    fn remove(&self) {
        // If it stays, it goes when the past is aged.
        let _ = self.folder.remove(GROWING);
    }
}

fn lost() -> io::Error {
    io::Error::other("the room of the undo delta was needed")
}

impl Drop for UndoWriter {
    fn drop(&mut self) {
        if self.open.is_some() {
            self.remove();
        }
    }
}
