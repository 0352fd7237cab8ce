//! When the image was last written through the tracker: what tells, after an unclean stop, our own last write from a
//! foreign one.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use device::{Folder, Mapping, StateFile};

use crate::record::raise;

const NAME: &str = "served";

/// The clock by which file systems stamp their files, read without entering the kernel. They may stamp to the nanosecond
/// or by the tick before (Linux 6.13 does both), so a note is exact, and a stamp as early as a tick before it.
#[derive(Debug, Clone, Copy)]
pub struct Clock;

impl Clock {
    /// Nanoseconds since 1970: not before the stamp of any file written until now.
    pub fn now() -> u64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        (t.tv_sec.max(0) as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec.max(0) as u64)
    }

    /// Nanoseconds from one tick to the next.
    pub fn tick() -> u64 {
        let t = rustix::time::clock_getres(rustix::time::ClockId::RealtimeCoarse);
        (t.tv_nsec.max(1) as u64).max(1_000_000)
    }
}

/// The time of the last served write, in a mapped file: the latest value outlives the process, a recent one a power cut.
pub struct Served {
    file: Box<dyn StateFile>,
    mapping: Mapping,
    durable: AtomicU64,
}

impl Served {
    /// Opens the stamp, making it where it is missing. What it holds from an earlier run is kept.
    pub fn open(folder: &dyn Folder) -> io::Result<Served> {
        let file = folder.open(NAME, true)?;
        if file.len()? < 4096 {
            file.reserve(4096)?;
            file.sync()?;
            folder.sync()?;
        }
        let mapping = file.map(4096)?;
        let durable = AtomicU64::new(mapping[0].load(Relaxed));
        Ok(Served { file, mapping, durable })
    }

    /// Notes that a write is about to go down, or has just come back.
    pub fn note(&self) {
        raise(&self.mapping[0], Clock::now());
    }

    /// Nanoseconds since 1970 at the last served write; 0 if there was none.
    pub fn last(&self) -> u64 {
        self.mapping[0].load(Relaxed)
    }

    /// The words of the gate, shared with it.
    pub(crate) fn words(&self) -> Mapping {
        self.mapping.clone()
    }

    /// True if writes were in flight when the process died that had this open before.
    pub fn was_busy(&self) -> bool {
        crate::gate::inside(&self.mapping) > 0
    }

    /// Makes the stamp durable if it moved.
    pub fn sync(&self) -> io::Result<()> {
        let last = self.last();
        if last != self.durable.load(Relaxed) {
            self.file.sync()?;
            self.durable.store(last, Relaxed);
        }
        Ok(())
    }
}
