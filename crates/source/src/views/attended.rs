//! A disk that is read for somebody, and fails once nobody is there any more.
//!
//! A peer may leave while its answer is being prepared. Where nothing is sent for long, as zeroes or what is equal are not, only the
//! reads notice.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Disk, Done, Queue, Request};

/// Fails once nobody is there.
pub type There = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// A disk to be read as long as somebody is there.
pub struct Attended {
    disk: Arc<dyn Disk>,
    there: There,
}

impl Attended {
    /// Every read of it fails with the error of `there`.
    pub fn new(disk: Arc<dyn Disk>, there: There) -> Attended {
        Attended { disk, there }
    }
}

impl Disk for Attended {
    fn len(&self) -> u64 {
        self.disk.len()
    }
    fn align(&self) -> u32 {
        self.disk.align()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (self.there)()?;
        self.disk.read_at(offset, buf)
    }
    fn read_cached(&self, offset: u64, buf: &mut [u8]) -> bool {
        self.disk.read_cached(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.disk.prefetch(offset, len)
    }
    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        (self.there)()?;
        self.disk.allocated(from)
    }
    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(AttendedQueue { inner: self.disk.clone().queue(depth)?, there: self.there.clone() }))
    }
}

struct AttendedQueue {
    inner: Box<dyn Queue>,
    there: There,
}

impl Queue for AttendedQueue {
    fn submit(&mut self, request: Request) {
        self.inner.submit(request)
    }
    fn start(&mut self) {
        self.inner.start()
    }
    fn complete(&mut self, wait: bool) -> Option<Done> {
        let mut done = self.inner.complete(wait)?;
        if done.result.is_ok() {
            done.result = (self.there)();
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use device::{Buf, Piece, Pieces, RamDisk, RequestKind};

    use super::*;

    #[test]
    fn no_read_succeeds_once_nobody_is_there() {
        let left = Arc::new(AtomicBool::new(false));
        let asked = left.clone();
        let there = move || if asked.load(SeqCst) { Err(io::Error::other("left")) } else { Ok(()) };
        let disk = Arc::new(Attended::new(Arc::new(RamDisk::new(1 << 20)), Arc::new(there)));
        let mut queue = disk.clone().queue(4).unwrap();
        let mut read = |token| {
            let pieces = Pieces::from_slice(&[Piece { offset: 0, len: 4096 }]);
            queue.submit(Request { kind: RequestKind::Read, pieces, buf: Buf::new(4096), token });
            queue.start();
            queue.complete(true).unwrap().result
        };
        assert!(read(0).is_ok() && disk.read_at(0, &mut [0; 512]).is_ok() && disk.allocated(0).is_ok());
        left.store(true, SeqCst);
        for error in [read(1), disk.read_at(0, &mut [0; 512]), disk.allocated(0).map(drop)] {
            assert_eq!(error.unwrap_err().to_string(), "left");
        }
    }

    #[test]
    fn a_disk_that_is_only_read_refuses_all_writes() {
        let disk = Attended::new(Arc::new(RamDisk::new(4096)), Arc::new(|| Ok(())));
        let writes = [disk.write_at(0, &[1]), disk.write_through(0, &[1]), disk.zero(0, 1, true, false)];
        for refused in writes.into_iter().chain([disk.discard(0, 1), disk.resize(0)]) {
            refused.unwrap_err();
        }
        assert_eq!(disk.write_at(0, &[1]).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
