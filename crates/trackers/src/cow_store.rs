//! The copy-before-write store of a view: a map and old data, shared between the writing server and the view's reader.
//!
//! Before a write overwrites a block that a view still needs, the old content goes to the view's file, then the block's bit
//! is set, then the write proceeds. A reader reads the image first and checks the bit *after*: if it is clear, no write to
//! the block had begun when the image was read.
//!
//! The file has a slot for each stripe of the disk of which something was saved, in the order of saving: a disk
//! may be larger than a file can be.
//!
//! # Orderings
//!
//! Two processes work with the map, and the image is written and read by the kernel for them, so the orderings that a mutex
//! would give are explicit here. x86 has them anyway; ARM does not.
//!
//! ```text
//! writer                             reader
//! A  bits and slots of what is kept  R  read the image
//! F  fence                           G  fence
//! W  write the image                 L  look at the bits
//! ```
//!
//! If R sees any of W, L must see A. F keeps W after A, G keeps L after R. A system call is no fence: what it stores may
//! become visible before an earlier store of its caller. F is also needed if a writer skips a block because another
//! writer has saved it or the view has failed: its own write must not be seen without that.
//!
//! Conversely, a writer that skips a block because the reader has taken it must not overwrite what the
//! reader is still reading: R is before the reader's release of `TAKEN`, and the writer's acquire of it before W.
//!
//! The map is in memory shared by descriptor, the saved data in an unlinked file: when both processes are gone,
//! so is the view.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};

use device::{Disk, Mapping, Room};
use extents::Bitmap;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use crate::bitmap_file::Section;

const MAGIC: u64 = u64::from_le_bytes(*b"dsyncvew");
const HEAD_WORDS: usize = 512;
/// Words of the head.
const BROKEN: usize = 4;
const NARROWED: usize = 5;
const TAKEN: usize = 6;
const KEPT: usize = 7;
const SLOTS: usize = 8;

/// Bytes of the disk that share a slot of the file: the largest block size.
const STRIPE: u64 = 1 << 20;
/// Of runs of so many bytes the disk is asked whether they are a hole.
const ASK_HOLES: u64 = 128 << 10;
/// Writers to the same block must not both save it: the later one would save the earlier one's data. One lock per
/// stripe, round robin; it guards the stripe's slot too.
const LOCKS: usize = 64;

/// Where the parts of a map begin, in words: after the head come the blocks needed, the blocks saved, and the slots.
struct Layout {
    kept: usize,
    slots: usize,
    end: usize,
}

impl Layout {
    fn of(size: u64, block_size: u32) -> Layout {
        let words = Bitmap::<Section>::words(size.div_ceil(u64::from(block_size))) as usize;
        let kept = HEAD_WORDS + words;
        let slots = kept + words;
        Layout { kept, slots, end: slots + size.div_ceil(STRIPE) as usize }
    }
}

/// The shared state of one view.
pub struct CowStore {
    map: File,
    head: Mapping,
    size: u64,
    block_size: u32,
    limit: u64,
    data: File,
    /// Of the file system of the data, which is that of the record as well: the writes need that.
    room: Room,
    needed: Bitmap<Section>,
    kept: Bitmap<Section>,
    /// For each stripe the number of its slot, from 1; 0 for none. Written before the bits of the stripe's blocks.
    slots: Section,
    locks: Vec<Mutex<()>>,
}

/// Neither end can cut the map short: what the other one maps would end by SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK;

fn not_a_map() -> io::Error {
    let text = "not the map of a snapshot: if dsync was upgraded, restart the server";
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// What another process needs to read the view: descriptors to pass over a socket.
#[derive(Debug)]
pub struct CowFiles {
    /// The shared map.
    pub map: OwnedFd,
    /// The saved data.
    pub data: OwnedFd,
}

impl CowStore {
    /// A store for a disk of `size` bytes that needs every block, and may save up to `limit` bytes in a file in `folder`.
    pub fn create(folder: &Path, size: u64, block_size: u32, limit: u64) -> io::Result<CowStore> {
        let bytes = Layout::of(size, block_size).end as u64 * 8;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let map = File::from(rustix::fs::memfd_create("dsync-view", flags)?);
        map.set_len(bytes)?;
        rustix::fs::fcntl_add_seals(&map, SEALS)?;
        let data = match rustix::fs::open(
            folder,
            OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        ) {
            Ok(fd) => File::from(fd),
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {
                let path = folder.join(format!("view-{}", uuid::Uuid::new_v4()));
                let file = File::options().read(true).write(true).create_new(true).open(&path)?;
                std::fs::remove_file(&path)?;
                file
            }
            Err(e) => return Err(e.into()),
        };
        let head = Mapping::new(&map, bytes)?;
        for (at, word) in [MAGIC, size, u64::from(block_size), limit].into_iter().enumerate() {
            head[at].store(word, Relaxed);
        }
        Self::over(map, head, data)
    }

    /// Opens the store of another process.
    pub fn from_parts(parts: CowFiles) -> io::Result<CowStore> {
        let map = File::from(parts.map);
        if !rustix::fs::fcntl_get_seals(&map).is_ok_and(|seals| seals.contains(SEALS)) {
            return Err(not_a_map());
        }
        let len = map.metadata()?.len();
        let head = Mapping::new(&map, len & !7)?;
        Self::over(map, head, File::from(parts.data))
    }

    fn over(map: File, head: Mapping, data: File) -> io::Result<CowStore> {
        let bad = not_a_map;
        if head.len() < HEAD_WORDS || head[0].load(Relaxed) != MAGIC {
            return Err(bad());
        }
        let (size, limit) = (head[1].load(Relaxed), head[3].load(Relaxed));
        let block_size = u32::try_from(head[2].load(Relaxed)).map_err(|_| bad())?;
        if !block_size.is_power_of_two() || u64::from(block_size) > STRIPE {
            return Err(bad());
        }
        let layout = Layout::of(size, block_size);
        if head.len() < layout.end {
            return Err(bad());
        }
        let blocks = size.div_ceil(u64::from(block_size));
        let bitmap = |words| Bitmap::over(Section::new(&head, words), blocks).map_err(|_| bad());
        let needed = bitmap(HEAD_WORDS..layout.kept)?;
        let kept = bitmap(layout.kept..layout.slots)?;
        let slots = Section::new(&head, layout.slots..layout.end);
        let locks = (0..LOCKS).map(|_| Mutex::new(())).collect();
        let room = Room::default();
        Ok(CowStore { map, head, size, block_size, limit, data, room, needed, kept, slots, locks })
    }

    /// The descriptors to pass to another process.
    pub fn parts(&self) -> io::Result<CowFiles> {
        Ok(CowFiles {
            map: self.map.as_fd().try_clone_to_owned()?,
            data: self.data.as_fd().try_clone_to_owned()?,
        })
    }

    /// Size in bytes of the disk at the view's moment.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Block size in bytes.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Bytes saved so far.
    pub fn kept_bytes(&self) -> u64 {
        self.head[KEPT].load(Relaxed)
    }

    /// The most bytes that may be saved.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// True once the view could not save what it needed. What was read before that is valid.
    pub fn is_broken(&self) -> bool {
        self.head[BROKEN].load(SeqCst) != 0
    }

    /// Fails the view, or ends it, and gives its space back. Ordered before the write that was not saved, and checked after every read.
    pub fn give_up(&self) {
        self.fail();
        let _ = self.data.set_len(0);
    }

    /// Whoever reads what is gone from then on sees that the view has failed.
    fn fail(&self) {
        self.head[BROKEN].store(1, SeqCst);
        fence(SeqCst);
    }

    /// Fails the view, within a write, which waits for no file system to free what may be gigabytes.
    fn give_up_soon(&self) {
        self.fail();
        let Ok(data) = self.data.try_clone() else { return };
        // Without a thread the space is given back at the view's end.
        let _ = std::thread::Builder::new().name("view".into()).spawn(move || data.set_len(0));
    }

    /// Restricts saving to these blocks. Until then every block is saved.
    pub fn narrow(&self, blocks: &Bitmap) {
        self.needed.union_with(blocks);
        self.head[NARROWED].store(1, Release);
    }

    /// Releases the blocks below this one: they have been read. Only rises.
    pub fn taken(&self, block: u64) {
        self.head[TAKEN].fetch_max(block, Release);
    }

    fn blocks_of(&self, offset: u64, len: u64) -> Range<u64> {
        let shift = self.block_size.trailing_zeros();
        offset >> shift..((offset + len - 1) >> shift) + 1
    }

    fn bytes_of(&self, blocks: &Range<u64>) -> Range<u64> {
        let bs = u64::from(self.block_size);
        blocks.start * bs..(blocks.end * bs).min(self.size)
    }

    /// Saves what the view needs of a byte range that is about to be overwritten on `disk`. Never fails: a view that cannot
    /// save its data fails, and the writer continues.
    pub fn keep(&self, disk: &dyn Disk, offset: u64, len: u64) {
        self.keep_all(disk, offset, len);
        // F: a reader that sees the following write sees what was saved.
        fence(SeqCst);
    }

    fn keep_all(&self, disk: &dyn Disk, offset: u64, len: u64) {
        if self.is_broken() || offset >= self.size || len == 0 {
            return;
        }
        let all = self.blocks_of(offset, len.min(self.size - offset));
        let narrowed = self.head[NARROWED].load(Acquire) != 0;
        let first = all.start.max(self.head[TAKEN].load(Acquire));
        let per_stripe = STRIPE / u64::from(self.block_size);
        let mut at = first;
        while at < all.end && !self.is_broken() {
            let end = ((at / per_stripe + 1) * per_stripe).min(all.end);
            if self.kept.all(at..end) || (narrowed && !self.needed.any(at..end)) {
                at = end;
                continue;
            }
            let lock = &self.locks[(at / per_stripe) as usize % LOCKS];
            let _held = lock.lock().unwrap_or_else(|e| e.into_inner());
            if let Err(_full) = self.keep_stripe(disk, at..end, narrowed) {
                self.give_up_soon();
                return;
            }
            at = end;
        }
    }

    /// Saves one stripe's part, with its lock held.
    fn keep_stripe(&self, disk: &dyn Disk, blocks: Range<u64>, narrowed: bool) -> io::Result<()> {
        let wanted = |b: u64| !self.kept.get(b) && (!narrowed || self.needed.get(b));
        let mut at = blocks.start;
        while at < blocks.end {
            if !wanted(at) {
                at += 1;
                continue;
            }
            let mut end = at + 1;
            while end < blocks.end && wanted(end) {
                end += 1;
            }
            let bytes = self.bytes_of(&(at..end));
            let len = bytes.end - bytes.start;
            // Small ones are read sooner than that is asked.
            let is_hole = len >= ASK_HOLES && disk.is_hole(bytes.start, len);
            let mut old = vec![0u8; if is_hole { 0 } else { len as usize }];
            disk.read_at(bytes.start, &mut old)?;
            if old.iter().any(|b| *b != 0) {
                if self.head[KEPT].fetch_add(len, Relaxed) + len > self.limit
                    || !self.room.take(&self.data, len)?
                {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                // Zeroes need no space: a block without a slot, or in a hole of it, reads as zeroes.
                let slot = &self.slots[(bytes.start / STRIPE) as usize];
                if slot.load(Relaxed) == 0 {
                    slot.store(self.head[SLOTS].fetch_add(1, Relaxed) + 1, Relaxed);
                }
                let place = self.place(bytes.start).ok_or(io::ErrorKind::InvalidData)?;
                self.data.write_all_at(&old, place)?;
            }
            // Release: a reader that sees the bit sees the slot, and the data in the file.
            self.kept.set(at..end);
            at = end;
        }
        Ok(())
    }

    /// Corrects what was read from the image: blocks overwritten since the view's moment are replaced by the saved copy.
    /// To be called *after* the image was read.
    pub fn mend(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        let end = offset + buf.len() as u64;
        // G: the bits are checked after the image was read.
        fence(SeqCst);
        for run in self.kept.runs_in(self.blocks_of(offset, buf.len() as u64)) {
            // Acquire: seeing a bit implies seeing its slot and data.
            fence(Acquire);
            let bytes = self.bytes_of(&run);
            let (from, to) = (bytes.start.max(offset), bytes.end.min(end));
            if from < to {
                self.read_kept(from, &mut buf[(from - offset) as usize..(to - offset) as usize])?;
            }
        }
        self.check()
    }

    /// Fails if the view has. Checked after what it is asked for: a view that failed meanwhile may have let a write through.
    fn check(&self) -> io::Result<()> {
        if !self.is_broken() {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the snapshot has failed: the disk was overwritten faster than the snapshot was read, and the {} that may be kept for it \
             (--view-limit of \"dsync serve\", or half of the space in the state directory) were not enough",
            device::human_size(self.limit)
        )))
    }

    /// The place in the file of the byte at `offset` of the disk, and how much follows up to the end of its stripe; `None` if
    /// the stripe has no slot.
    fn place(&self, offset: u64) -> Option<u64> {
        let slot = self.slots[(offset / STRIPE) as usize].load(Relaxed);
        slot.checked_sub(1)?.checked_mul(STRIPE)?.checked_add(offset % STRIPE)
    }

    /// Reads saved data.
    fn read_kept(&self, from: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut at = from;
        let mut rest = buf;
        while !rest.is_empty() {
            let len = (STRIPE - at % STRIPE).min(rest.len() as u64);
            let (part, others) = rest.split_at_mut(len as usize);
            match self.place(at) {
                Some(place) => self.read_slot(place, part)?,
                None => part.fill(0),
            }
            (at, rest) = (at + len, others);
        }
        Ok(())
    }

    /// Reads from one slot. The file ends where the last block ends that was not all zeroes.
    fn read_slot(&self, place: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut have = 0;
        while have < buf.len() {
            match self.data.read_at(&mut buf[have..], place + have as u64) {
                Ok(0) => {
                    buf[have..].fill(0);
                    return Ok(());
                }
                Ok(got) => have += got,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The first saved run of bytes at or after `from`: there the image's holes mean nothing for the view. To be called *after* the image was asked
    /// for them.
    ///
    /// # Errors
    /// If the view has failed: a hole may be newer than it.
    pub fn next_kept(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let blocks = self.size.div_ceil(u64::from(self.block_size));
        let shift = self.block_size.trailing_zeros();
        // G: the bits are checked after the image was asked for its holes.
        fence(SeqCst);
        let run = self.kept.runs_in(from >> shift..blocks).next().map(|run| self.bytes_of(&run));
        self.check()?;
        Ok(run.map(|bytes| bytes.start.max(from)..bytes.end))
    }
}

impl std::fmt::Debug for CowStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CowStore({} bytes kept)", self.kept_bytes())
    }
}
