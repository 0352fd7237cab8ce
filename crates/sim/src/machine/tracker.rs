//! The tracker of a live disk, as a process sees it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use extents::Bitmap;
use trackers::{TrackError, Tracker};
use uuid::Uuid;

use crate::machine::host::{Call, Held, Process};
use crate::machine::kernel::{BLOCK, Kernel};

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
        done.map_err(TrackError::state("cannot ask the tracker", Path::new("kernel")))
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
        self.call(Call::Read, |_| None)
    }

    fn checkpoint(&self) -> Result<Bitmap, TrackError> {
        self.call(Call::Name, |kernel| {
            self.last.store(kernel.checkpoint(), SeqCst);
            kernel.bitmap(&kernel.frozen)
        })
    }

    fn release(&self, epoch: Uuid) -> Result<(), TrackError> {
        let last = self.last.load(SeqCst);
        let released = self.call(Call::Name, |kernel| {
            let mine = kernel.checkpoints == last;
            if mine {
                kernel.release(epoch);
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
