//! Trackers of live disks, as they behave: a record in the kernel that outlives processes, writes in flight that are marked on
//! both sides of a checkpoint, and what a power cut leaves.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use extents::Bitmap;
use trackers::{TrackError, Tracker};
use uuid::Uuid;

use crate::destination::Held;
use crate::host::{Call, Process, State};

/// Bytes of a block.
pub const BLOCK: u64 = 4096;
/// Blocks of a region of dm-track's log.
const REGION: u64 = 8;

/// Which tracker it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// In memory: a power cut loses it.
    Bpf,
    /// With a metadata device: regions that were active are marked whole after a power cut.
    Dm,
}

/// What the kernel knows of one disk.
#[derive(Debug, Clone)]
pub struct Kernel {
    kind: Kind,
    size: u64,
    active: BTreeSet<u64>,
    frozen: BTreeSet<u64>,
    /// Blocks of writes that were begun and have not ended.
    flying: Vec<(u64, Vec<u8>)>,
    released: Option<Uuid>,
    lost: Option<String>,
    /// Checkpoints so far.
    checkpoints: u64,
    /// Regions whose intent is on the metadata device.
    intents: BTreeSet<u64>,
}

impl Kernel {
    /// Begins to follow a disk of so many bytes.
    pub fn new(kind: Kind, size: u64) -> Kernel {
        Kernel {
            kind,
            size,
            active: BTreeSet::new(),
            frozen: BTreeSet::new(),
            flying: Vec::new(),
            released: None,
            lost: None,
            checkpoints: 0,
            intents: BTreeSet::new(),
        }
    }

    fn blocks(offset: u64, len: u64) -> std::ops::Range<u64> {
        offset / BLOCK..(offset + len).div_ceil(BLOCK)
    }

    fn mark(&mut self, offset: u64, len: u64) {
        self.active.extend(Self::blocks(offset, len));
        self.intents.extend(Self::blocks(offset, len).map(|block| block / REGION));
    }

    pub(crate) fn crash(&mut self) {
        self.flying.clear();
        match self.kind {
            // The tracking is begun anew, and its record with it.
            Kind::Bpf => *self = Kernel::new(self.kind, self.size),
            Kind::Dm => {
                let blocks = self.size.div_ceil(BLOCK);
                let regions = self.intents.clone();
                self.active.extend(regions.iter().flat_map(|r| r * REGION..((r + 1) * REGION).min(blocks)));
            }
        }
    }

    fn bitmap(&self, blocks: &BTreeSet<u64>) -> Bitmap {
        let bitmap = Bitmap::new(self.size.div_ceil(BLOCK));
        for block in blocks {
            bitmap.set(*block..*block + 1);
        }
        bitmap
    }
}

impl State {
    /// A write to a followed disk is queued: it is marked, and lands later.
    pub fn begin_write(&mut self, inode: u64, offset: u64, data: Vec<u8>) {
        if let Some(kernel) = self.trackers.get_mut(&inode) {
            kernel.mark(offset, data.len() as u64);
            kernel.flying.push((offset, data));
        }
    }

    /// What was queued lands, in the order in which it was begun.
    pub fn end_writes(&mut self, inode: u64) {
        let flying = self.trackers.get_mut(&inode).map(|kernel| std::mem::take(&mut kernel.flying));
        let time = self.tick();
        for (offset, data) in flying.into_iter().flatten() {
            if let Some(disk) = self.inodes.get_mut(&inode) {
                disk.write(offset, &data, time);
            }
        }
    }

    /// Regions fall idle: their marks are durable, and the intents go.
    pub fn idle(&mut self, inode: u64) {
        if let Some(kernel) = self.trackers.get_mut(&inode).filter(|kernel| kernel.flying.is_empty()) {
            kernel.intents.clear();
        }
    }

    /// Another program ends an epoch, and releases it to a history of its own.
    pub fn take_record(&mut self, inode: u64, epoch: Uuid) {
        if let Some(kernel) = self.trackers.get_mut(&inode) {
            kernel.checkpoints += 1;
            kernel.active.clear();
            kernel.frozen.clear();
            let flying: Vec<_> = kernel.flying.iter().map(|(at, data)| (*at, data.len() as u64)).collect();
            flying.into_iter().for_each(|(at, len)| kernel.mark(at, len));
            (kernel.released, kernel.lost) = (Some(epoch), None);
        }
    }

    /// Something was missed.
    pub fn lose_track(&mut self, inode: u64) {
        if let Some(kernel) = self.trackers.get_mut(&inode) {
            kernel.lost = Some("an event was missed".into());
        }
    }
}

/// A tracker as a process sees it.
pub struct SimTracker {
    _held: Arc<Held>,
    process: Arc<Process>,
    inode: u64,
    /// The kernel's count at this object's last checkpoint.
    last: AtomicU64,
}

impl SimTracker {
    /// The tracker that follows a device.
    pub fn new(held: Arc<Held>, process: &Arc<Process>, inode: u64) -> SimTracker {
        SimTracker { _held: held, process: process.clone(), inode, last: AtomicU64::new(0) }
    }

    fn call<T>(&self, call: Call, act: impl FnOnce(&mut Kernel) -> T) -> Result<T, TrackError> {
        let done = self.process.host.call(&self.process, call, |state| {
            state.trackers.get_mut(&self.inode).map(act).ok_or_else(|| io::ErrorKind::NotFound.into())
        });
        done.map_err(|error| TrackError::State {
            what: "can't ask the tracker",
            place: "kernel".into(),
            error,
        })
    }
}

impl Tracker for SimTracker {
    fn kind(&self) -> &'static str {
        "sim"
    }

    fn block_size(&self) -> u32 {
        BLOCK as u32
    }

    fn size(&self) -> u64 {
        self.process.host.state().trackers.get(&self.inode).map_or(0, |kernel| kernel.size)
    }

    fn lost(&self) -> Result<Option<String>, TrackError> {
        self.call(Call::Read, |kernel| kernel.lost.clone())
    }

    fn checkpoint(&self) -> Result<Bitmap, TrackError> {
        self.call(Call::Name, |kernel| {
            kernel.checkpoints += 1;
            self.last.store(kernel.checkpoints, SeqCst);
            let active = std::mem::take(&mut kernel.active);
            kernel.frozen.extend(active);
            let flying: Vec<_> = kernel.flying.iter().map(|(at, data)| (*at, data.len() as u64)).collect();
            match kernel.kind {
                Kind::Bpf => flying.into_iter().for_each(|(at, len)| kernel.mark(at, len)),
                // The reference of the epoch is waited for: in this model, what is in flight is marked again.
                Kind::Dm => flying.into_iter().for_each(|(at, len)| kernel.mark(at, len)),
            }
            kernel.bitmap(&kernel.frozen)
        })
    }

    fn release(&self, epoch: Uuid) -> Result<(), TrackError> {
        let last = self.last.load(SeqCst);
        let released = self.call(Call::Name, |kernel| {
            let mine = kernel.checkpoints == last;
            if mine {
                kernel.frozen.clear();
                (kernel.released, kernel.lost) = (Some(epoch), None);
            }
            mine
        })?;
        match released {
            true => Ok(()),
            false => Err(TrackError::Refused("another program has ended an epoch meanwhile".into())),
        }
    }

    fn released(&self) -> Result<Option<Uuid>, TrackError> {
        self.call(Call::Read, |kernel| kernel.released)
    }

    fn dirty(&self) -> Result<Bitmap, TrackError> {
        self.call(Call::Read, |kernel| {
            let mut all = kernel.active.clone();
            all.extend(&kernel.frozen);
            kernel.bitmap(&all)
        })
    }
}
