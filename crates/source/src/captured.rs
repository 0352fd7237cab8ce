//! Blocks read in one go, kept in memory, as a disk.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk, InlineQueue, Kind, Piece, Pieces, Queue, Request};
use extents::Bitmap;

/// Bytes of a request, and of a buffer.
const CHUNK: u64 = 1 << 20;
/// Pieces of a request.
const PIECES: usize = 512;
const DEPTH: u32 = 64;

/// Reads blocks of a disk into memory, again and again: what was read last counts.
pub(crate) struct Capture {
    queue: Box<dyn Queue>,
    ready: Vec<Buf>,
    left: u64,
    captured: Captured,
}

impl Capture {
    /// Nothing is read yet. At most `most` bytes will be, those read again counted again.
    pub fn new(disk: &Arc<dyn Disk>, block_size: u64, most: u64) -> io::Result<Capture> {
        let (size, queue) = (disk.len(), disk.clone().queue(DEPTH)?);
        let blocks = Bitmap::new(size.div_ceil(block_size));
        let captured = Captured { size, block_size, blocks, layers: Vec::new() };
        Ok(Capture { queue, ready: Vec::new(), left: most, captured })
    }

    /// Touches so many bytes of memory, so that filling them waits for nothing but the disk.
    pub fn prepare(&mut self, bytes: u64) {
        let chunks = bytes.min(self.left).div_ceil(CHUNK) as usize + 1;
        while self.ready.len() < chunks {
            let mut buf = Buf::new(CHUNK as usize);
            buf.fill(0);
            self.ready.push(buf);
        }
    }

    /// Reads blocks. False if they need more memory than is left; then none is read.
    pub fn read(&mut self, blocks: &Bitmap) -> io::Result<bool> {
        let Captured { size, block_size, .. } = self.captured;
        let mut runs: Vec<Run> = Vec::new();
        let mut total = 0u64;
        let mut requests: Vec<(Pieces, u64)> = vec![(Pieces::new(), 0)];
        for run in blocks.runs() {
            let bytes = run.start * block_size..(run.end * block_size).min(size);
            let mut at = bytes.start;
            while at < bytes.end {
                if requests.last().is_none_or(|(pieces, used)| *used == CHUNK || pieces.len() == PIECES) {
                    requests.push((Pieces::new(), 0));
                }
                let index = requests.len() - 1;
                let Some((pieces, used)) = requests.last_mut() else { break };
                let len = (bytes.end - at).min(CHUNK - *used);
                runs.push((at, len, index, *used as usize));
                pieces.push(Piece { offset: at, len });
                *used += len;
                at += len;
                total += len;
            }
            if total > self.left {
                return Ok(false);
            }
        }
        self.left -= total;
        requests.retain(|(pieces, _)| !pieces.is_empty());
        let mut bufs: Vec<Buf> = (0..requests.len()).map(|_| Buf::default()).collect();
        for (token, (pieces, len)) in requests.into_iter().enumerate() {
            let mut buf = self.ready.pop().unwrap_or_else(|| Buf::scratch(CHUNK as usize));
            buf.set_len(len as usize);
            self.queue.submit(Request { kind: Kind::Read, pieces, buf, token: token as u64 });
        }
        self.queue.start();
        while self.queue.in_flight() > 0 {
            let Some(done) = self.queue.complete(true) else {
                return Err(io::Error::other("the disk's queue lost a request"));
            };
            done.result?;
            if let Some(place) = bufs.get_mut(done.request.token as usize) {
                *place = done.request.buf;
            }
        }
        self.captured.blocks.union_with(blocks);
        self.captured.layers.push(Layer { runs, bufs });
        Ok(true)
    }

    /// What was read.
    pub fn finish(self) -> Captured {
        self.captured
    }
}

/// First byte, length, buffer, and place there.
type Run = (u64, u64, usize, usize);

/// What was read at once; its runs ascend.
struct Layer {
    runs: Vec<Run>,
    bufs: Vec<Buf>,
}

/// Some blocks of a disk as they were when they were read last. All others read as zeroes.
pub(crate) struct Captured {
    size: u64,
    block_size: u64,
    blocks: Bitmap,
    /// Later ones cover earlier ones.
    layers: Vec<Layer>,
}

impl Captured {
    /// True if all these blocks were read.
    pub fn holds(&self, blocks: &Bitmap) -> bool {
        blocks.runs().all(|run| self.blocks.all(run))
    }
}

fn read_only() -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, "a view is read-only")
}

impl Disk for Captured {
    fn len(&self) -> u64 {
        self.size
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset + buf.len() as u64;
        buf.fill(0);
        for Layer { runs, bufs } in &self.layers {
            let first = runs.partition_point(|(start, len, ..)| start + len <= offset);
            for (start, len, index, place) in runs.iter().skip(first).take_while(|(start, ..)| *start < end) {
                let (from, to) = ((*start).max(offset), (start + len).min(end));
                let at = place + (from - start) as usize;
                let data = &bufs[*index][at..at + (to - from) as usize];
                buf[(from - offset) as usize..(to - offset) as usize].copy_from_slice(data);
            }
        }
        Ok(())
    }
    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(read_only())
    }
    fn zero(&self, _: u64, _: u64, _: bool, _: bool) -> io::Result<()> {
        Err(read_only())
    }
    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(read_only())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let block = from / self.block_size;
        let run = self.blocks.runs_in(block..self.blocks.blocks()).next();
        Ok(run.map(|r| (r.start * self.block_size).max(from)..(r.end * self.block_size).min(self.size)))
    }
    fn queue(self: Arc<Self>, _: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(InlineQueue::new(self)))
    }
}

#[cfg(test)]
mod tests {
    use device::RamDisk;

    use super::*;

    const BLOCK: u64 = 4096;
    const SIZE: u64 = 5000 * BLOCK - 100;

    /// Every byte of the disk's content times `factor`.
    fn content(factor: u64) -> Vec<u8> {
        (0..SIZE).map(|n| (n / 7 % 251 + 1) as u8).map(|byte| byte.wrapping_mul(factor as u8)).collect()
    }

    fn put(blocks: &Bitmap, from: &[u8], to: &mut [u8]) {
        for run in blocks.runs() {
            let bytes = (run.start * BLOCK) as usize..((run.end * BLOCK).min(SIZE)) as usize;
            to[bytes.clone()].copy_from_slice(&from[bytes]);
        }
    }

    #[test]
    fn what_was_captured_last_reads_back_and_the_rest_is_zero() {
        let (before, after) = (content(1), content(3));
        let disk: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&before));
        let blocks = Bitmap::new(5000);
        // A long run, many single blocks, and the short last one.
        blocks.set(10..700);
        (1000..4000).step_by(2).for_each(|b| {
            blocks.set(b..b + 1);
        });
        blocks.set(4999..5000);
        let mut capture = Capture::new(&disk, BLOCK, 64 << 20).unwrap();
        capture.prepare(1 << 20);
        assert!(capture.read(&blocks).unwrap());
        // Some of it once more, and some that was not read before.
        disk.write_at(0, &after).unwrap();
        let again = Bitmap::new(5000);
        again.set(600..800);
        (1000..4000).step_by(6).for_each(|b| {
            again.set(b..b + 1);
        });
        assert!(capture.read(&again).unwrap());
        let captured = capture.finish();
        let mut expected = vec![0; SIZE as usize];
        put(&blocks, &before, &mut expected);
        put(&again, &after, &mut expected);
        for step in [SIZE, 4096, 100_001] {
            let mut found = vec![1; SIZE as usize];
            let mut at = 0;
            for part in found.chunks_mut(step as usize) {
                captured.read_at(at, part).unwrap();
                at += part.len() as u64;
            }
            assert!(found == expected);
        }
        assert!(captured.holds(&blocks) && captured.holds(&again));
        blocks.set(0..1);
        assert!(!captured.holds(&blocks));
    }

    #[test]
    fn there_is_a_limit() {
        let disk: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&content(1)));
        let mut capture = Capture::new(&disk, BLOCK, 300 * BLOCK).unwrap();
        let blocks = Bitmap::new(5000);
        blocks.set(100..300);
        assert!(capture.read(&blocks).unwrap());
        assert!(!capture.read(&blocks).unwrap());
        blocks.clear(0..200);
        assert!(capture.read(&blocks).unwrap());
    }
}
