//! A disk over another one: what is written goes to a scratch file, and the disk beneath is only read.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use extents::Bitmap;
use rustix::fs::{Mode, OFlags};

use crate::disk::buffer::Buf;
use crate::disk::file::{DiskOptions, adopt};
use crate::disk::threads::ThreadQueue;
use crate::disk::{Disk, Queue};
use crate::error::within;
use crate::room::Room;

/// The smallest part of the disk that is copied to the scratch file, in bytes; of a larger disk, parts are larger, so that a bitmap of
/// them stays small.
const BLOCK: u64 = 4096;
const MOST_BLOCKS: u64 = 1 << 30;
/// Bytes of the disk that share a lock.
const STRIPE: u64 = 1 << 20;
const LOCKS: usize = 64;

/// A disk over another one, with a scratch file that has no name and is gone with the process. The scratch file takes at most half of
/// the space that its file system would have without it; beyond that, writes fail.
pub struct Overlay {
    base: Arc<dyn Disk>,
    scratch: Arc<dyn Disk>,
    folder: PathBuf,
    block: u64,
    /// The blocks that the scratch file has.
    written: Bitmap,
    /// A block that is written in part is copied first: nobody else must write it meanwhile.
    locks: Vec<Mutex<()>>,
    /// The scratch file, to see what it takes.
    file: File,
    room: Room,
}

impl Overlay {
    /// A disk over `base`, with its scratch file in this folder.
    ///
    /// # Errors
    /// If the file cannot be made, or cannot be as long as the disk.
    pub fn new(base: Arc<dyn Disk>, folder: &Path) -> io::Result<Overlay> {
        let file = nameless(folder)?;
        file.set_len(base.len())?;
        let options = DiskOptions { write: true, direct: false, exclusive: false };
        let scratch = adopt(file.try_clone()?, &folder.join("scratch file"), &options);
        let scratch = scratch.map_err(io::Error::other)?;
        let mut block = BLOCK;
        while base.len().div_ceil(block) > MOST_BLOCKS {
            block *= 2;
        }
        Ok(Overlay {
            written: Bitmap::new(base.len().div_ceil(block)),
            base,
            scratch,
            folder: folder.to_path_buf(),
            block,
            locks: (0..LOCKS).map(|_| Mutex::default()).collect(),
            file,
            room: Room::default(),
        })
    }

    /// Bytes that the scratch file takes.
    pub fn taken(&self) -> io::Result<u64> {
        Room::taken(&self.file)
    }

    /// Gives the room back that the scratch file takes. Nothing can be written or read that was written from then on.
    pub fn give_up(&self) -> io::Result<()> {
        self.scratch.resize(0)
    }

    fn lock(&self, offset: u64) -> MutexGuard<'_, ()> {
        // A panic elsewhere leaves at worst a block that was not copied, whose bit is not set.
        self.locks[(offset / STRIPE) as usize % LOCKS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, doing: &'static str, offset: u64, len: u64) -> io::Result<()> {
        within(Path::new("the writable copy"), doing, offset, len, self.base.len())
    }

    /// The bytes of a block.
    fn bytes_of(&self, block: u64) -> Range<u64> {
        block * self.block..((block + 1) * self.block).min(self.base.len())
    }

    /// Makes sure that this much may be written.
    fn room(&self, bytes: u64) -> io::Result<()> {
        if self.room.take(&self.file, bytes)? {
            return Ok(());
        }
        let text =
            format!("what was written would take more than half of the space in {}", self.folder.display());
        Err(io::Error::new(io::ErrorKind::StorageFull, text))
    }

    /// Has a change made to a range, stripe by stripe. Blocks of which it covers only a part are copied first.
    fn change(&self, offset: u64, len: u64, make: &dyn Fn(Range<u64>) -> io::Result<()>) -> io::Result<()> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let part = at..end.min((at / STRIPE + 1) * STRIPE);
            let _alone = self.lock(at);
            let blocks = part.start / self.block..part.end.div_ceil(self.block);
            for block in [blocks.start, blocks.end - 1] {
                let whole = self.bytes_of(block);
                let covered = part.start <= whole.start && whole.end <= part.end;
                if !covered && !self.written.get(block) {
                    self.room(self.block)?;
                    let mut copy = Buf::new((whole.end - whole.start) as usize);
                    self.base.read_at(whole.start, &mut copy)?;
                    self.scratch.write_at(whole.start, &copy)?;
                    self.written.set(block..block + 1);
                }
            }
            make(part.clone())?;
            // Release: who sees the bits finds the content.
            self.written.set(blocks);
            at = part.end;
        }
        Ok(())
    }
}

/// A file without a name.
fn nameless(folder: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(file.into()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {
            let path = folder.join(format!("scratch-{}", std::process::id()));
            let file = File::options().read(true).write(true).create_new(true).open(&path)?;
            std::fs::remove_file(&path)?;
            Ok(file)
        }
        Err(e) => Err(e.into()),
    }
}

impl Disk for Overlay {
    fn len(&self) -> u64 {
        self.base.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check("read", offset, buf.len() as u64)?;
        let end = offset + buf.len() as u64;
        let mut at = offset;
        let blocks = offset / self.block..end.div_ceil(self.block);
        let ends = std::iter::once(blocks.end..blocks.end);
        let runs: Vec<Range<u64>> = self.written.runs_in(blocks).chain(ends).collect();
        for run in runs {
            let (start, stop) = ((run.start * self.block).clamp(at, end), (run.end * self.block).min(end));
            if at < start {
                self.base.read_at(at, &mut buf[(at - offset) as usize..(start - offset) as usize])?;
            }
            if start < stop {
                self.scratch.read_at(start, &mut buf[(start - offset) as usize..(stop - offset) as usize])?;
            }
            at = stop.max(start);
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check("write", offset, buf.len() as u64)?;
        self.change(offset, buf.len() as u64, &|part| {
            let within = (part.start - offset) as usize..(part.end - offset) as usize;
            self.room(within.len() as u64)?;
            self.scratch.write_at(part.start, &buf[within])
        })
    }

    fn write_through(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_at(offset, buf)
    }

    /// With a hole also where none is wanted: for a scratch file, space is not to be kept.
    fn zero(&self, offset: u64, len: u64, _unmap: bool, _fast: bool) -> io::Result<()> {
        self.check("zeroing", offset, len)?;
        self.change(offset, len, &|part| self.scratch.zero(part.start, part.end - part.start, true, false))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.zero(offset, len, true, false)
    }

    /// Nothing has to be durable that is gone with the process.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let base = self.base.allocated(from)?;
        let blocks = self.base.len().div_ceil(self.block);
        let run = self.written.runs_in(from / self.block..blocks).next();
        let own =
            run.map(|run| (run.start * self.block).max(from)..(run.end * self.block).min(self.base.len()));
        // What was made zero is told as data, which it may be.
        let runs = [base, own].into_iter().flatten().filter(|run| run.start < run.end);
        Ok(runs.min_by_key(|run| run.start))
    }

    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(ThreadQueue::new(Arc::new(move |request| request.run(&*self)), depth)?))
    }
}
