//! Whether anybody writes to a raw disk, on a loop device: what a tracker takes to be in flight is no sign of a writer, a
//! write is.
#![allow(missing_docs)]

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use device::{Dir, Disk};
use extents::Bitmap;
use source::{CutOptions, Live, SourceMetadata};
use trackers::{TrackError, Tracker};
use uuid::Uuid;

const BLOCKS: u64 = 1024;
/// The write that is said to be in flight.
const STUCK: u64 = 77;

/// Knows of one write that never ends, and of no other.
#[derive(Default)]
struct Stuck(Mutex<Option<Uuid>>);

fn stuck() -> Bitmap {
    let blocks = Bitmap::new(BLOCKS);
    blocks.set(STUCK..STUCK + 1);
    blocks
}

impl Tracker for Stuck {
    fn kind(&self) -> &'static str {
        "stuck"
    }
    fn block_size(&self) -> u32 {
        4096
    }
    fn size(&self) -> u64 {
        BLOCKS * 4096
    }
    fn lost(&self) -> Result<Option<String>, TrackError> {
        Ok(None)
    }
    fn checkpoint(&self) -> Result<Bitmap, TrackError> {
        Ok(stuck())
    }
    fn release(&self, epoch: Uuid) -> Result<(), TrackError> {
        *self.0.lock().unwrap() = Some(epoch);
        Ok(())
    }
    fn released(&self) -> Result<Option<Uuid>, TrackError> {
        Ok(*self.0.lock().unwrap())
    }
    fn dirty(&self) -> Result<Bitmap, TrackError> {
        Ok(stuck())
    }
    fn in_flight(&self) -> Option<Bitmap> {
        Some(stuck())
    }
}

/// A disk whose reads take their time: a writer gets to write meanwhile.
struct Slow {
    disk: Arc<dyn Disk>,
    device: std::fs::File,
    writes: Arc<AtomicBool>,
}

impl Disk for Slow {
    fn len(&self) -> u64 {
        self.disk.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        self.disk.read_at(offset, buf)?;
        if self.writes.load(SeqCst) {
            self.device.write_all_at(&[1; 4096], STUCK * 4096)?;
            self.device.sync_all()?;
        }
        Ok(())
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.disk.write_at(offset, data)
    }
    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> std::io::Result<()> {
        self.disk.zero(offset, len, unmap, fast)
    }
    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.disk.discard(offset, len)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.disk.flush()
    }
    fn allocated(&self, from: u64) -> std::io::Result<Option<std::ops::Range<u64>>> {
        self.disk.allocated(from)
    }
    fn queue(self: Arc<Self>, _: u32) -> std::io::Result<Box<dyn device::Queue>> {
        Ok(Box::new(device::InlineQueue::new(self)))
    }
}

#[test]
fn a_write_in_flight_is_no_writer_and_one_to_the_same_block_is() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(BLOCKS * 4096).unwrap();
    let Some(device) = testing::Loop::new(&image) else {
        return testing::skipped("cuts of a raw disk", "they need root and a loop device");
    };
    let path = device.device().to_path_buf();
    let options = device::DiskOptions { write: false, direct: true, exclusive: false };
    let writes = Arc::new(AtomicBool::new(false));
    let writer = std::fs::File::options().write(true).open(&path).unwrap();
    let disk = Slow { disk: device::open(&path, &options).unwrap(), device: writer, writes: writes.clone() };
    let identity = device::identity(&path).unwrap();
    let about = SourceMetadata { path, ..SourceMetadata::new(Uuid::from_u128(5), identity, 4096) };
    let state = Arc::new(Dir::open(&folder.path().join("state")).unwrap());
    let live = Live::over(about, Arc::new(disk), state, Box::<Stuck>::default()).unwrap();
    let cut = live.cut(&Bitmap::new(BLOCKS), &CutOptions::default()).unwrap();
    assert!(!cut.fuzzy && cut.holds(&stuck()));
    writes.store(true, SeqCst);
    let refused =
        live.cut(&Bitmap::new(BLOCKS), &CutOptions::default()).err().expect("a refusal").to_string();
    assert!(refused.contains("is being written to"), "{refused}");
}
