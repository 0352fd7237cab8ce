//! A model of the kernel's tracker of a live disk: a record that outlives processes, writes in flight that are marked
//! on both sides of a checkpoint, and what a power cut leaves.

use std::collections::BTreeSet;

use extents::Bitmap;
use uuid::Uuid;

/// Bytes of a block.
pub const BLOCK: u64 = 4096;
/// Blocks of a region of dm-track's log.
const REGION: u64 = 8;

/// Which tracker it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// In memory: a power cut loses it.
    Bpf,
    /// With a metadata device: after a power cut active regions are marked as a whole.
    Dm,
}

/// What the kernel knows of one disk.
#[derive(Debug, Clone)]
pub struct Kernel {
    kind: Kind,
    pub(crate) size: u64,
    pub(crate) active: BTreeSet<u64>,
    pub(crate) frozen: BTreeSet<u64>,
    /// Blocks of writes that were begun and have not ended.
    flying: Vec<(u64, Vec<u8>)>,
    pub(crate) released: Option<Uuid>,
    /// Checkpoints so far.
    pub(crate) checkpoints: u64,
    /// Regions whose intent is on the metadata device.
    intents: BTreeSet<u64>,
    /// A fault, to see that it is found: what is in flight at a checkpoint is not marked again.
    pub(crate) forgetful: bool,
}

impl Kernel {
    /// Starts tracking a disk of this size.
    pub fn new(kind: Kind, size: u64) -> Kernel {
        Kernel {
            kind,
            size,
            active: BTreeSet::new(),
            frozen: BTreeSet::new(),
            flying: Vec::new(),
            released: None,
            checkpoints: 0,
            intents: BTreeSet::new(),
            forgetful: false,
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
            // Tracking starts again, with a new record.
            Kind::Bpf => *self = Kernel { forgetful: self.forgetful, ..Kernel::new(self.kind, self.size) },
            Kind::Dm => {
                let blocks = self.size.div_ceil(BLOCK);
                let regions = self.intents.clone();
                self.active.extend(regions.iter().flat_map(|r| r * REGION..((r + 1) * REGION).min(blocks)));
            }
        }
    }

    /// Queues a write: it is marked, and reaches the disk later.
    pub fn begin(&mut self, offset: u64, data: Vec<u8>) {
        self.mark(offset, data.len() as u64);
        self.flying.push((offset, data));
    }

    /// Queued writes reach the disk, in order.
    pub(crate) fn land(&mut self) -> Vec<(u64, Vec<u8>)> {
        std::mem::take(&mut self.flying)
    }

    /// Regions become idle: their marks are durable, and the intents are dropped.
    pub fn idle(&mut self) {
        if self.flying.is_empty() {
            self.intents.clear();
        }
    }

    /// Freezes what is marked, and returns the number of the checkpoint. What is in flight is marked again; where dm-track would
    /// wait for it, that is the same.
    pub(crate) fn checkpoint(&mut self) -> u64 {
        self.checkpoints += 1;
        let active = std::mem::take(&mut self.active);
        self.frozen.extend(active);
        let flying: Vec<_> = self.flying.iter().map(|(at, data)| (*at, data.len() as u64)).collect();
        if !self.forgetful {
            flying.into_iter().for_each(|(at, len)| self.mark(at, len));
        }
        self.checkpoints
    }

    /// Releases what was frozen: it is in a history as of an epoch.
    pub(crate) fn release(&mut self, epoch: Uuid) {
        self.frozen.clear();
        self.released = Some(epoch);
    }

    /// Another program ends an epoch, and releases it to a history of its own.
    pub fn take_record(&mut self, epoch: Uuid) {
        self.checkpoint();
        self.release(epoch);
    }

    pub(crate) fn bitmap(&self, blocks: &BTreeSet<u64>) -> Bitmap {
        let bitmap = Bitmap::new(self.size.div_ceil(BLOCK));
        for block in blocks {
            bitmap.set(*block..*block + 1);
        }
        bitmap
    }
}
