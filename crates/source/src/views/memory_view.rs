//! An in-memory view: blocks that were read into memory, as a disk.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk, InlineQueue, Piece, Pieces, Queue, Request, RequestKind};
use extents::Bitmap;

/// Bytes of a request, and of a buffer.
const CHUNK: u64 = 1 << 20;
/// Pieces of a request.
const PIECES: usize = 512;
const DEPTH: u32 = 64;

/// Reads blocks of a disk into memory repeatedly; the last read of a block counts.
pub(crate) struct MemoryReader {
    queue: Box<dyn Queue>,
    ready: Vec<Buf>,
    most: u64,
    /// Data that was read and not yet stored.
    fresh: Vec<(Pieces, Buf)>,
    captured: MemoryView,
}

impl MemoryReader {
    /// Holds at most `most` bytes, and reads at most that many at once.
    pub(crate) fn new(disk: &Arc<dyn Disk>, block_size: u64, most: u64) -> io::Result<MemoryReader> {
        let (size, queue) = (disk.len(), disk.clone().queue(DEPTH)?);
        let captured = MemoryView { size, block_size, slots: BTreeMap::new(), chunks: Vec::new() };
        Ok(MemoryReader { queue, ready: Vec::new(), most, fresh: Vec::new(), captured })
    }

    /// Touches that many bytes of memory, so that a later read waits for the disk only.
    pub(crate) fn prepare(&mut self, bytes: u64) {
        let chunks = bytes.min(self.most).div_ceil(CHUNK) as usize + 1;
        while self.ready.len() < chunks {
            let mut buf = Buf::new(CHUNK as usize);
            buf.fill(0);
            self.ready.push(buf);
        }
    }

    /// Reads blocks. False if there are too many; then none is read.
    pub(crate) fn read(&mut self, blocks: &Bitmap) -> io::Result<bool> {
        let MemoryView { size, block_size, .. } = self.captured;
        if blocks.count().saturating_mul(block_size) > self.most {
            return Ok(false);
        }
        let mut requests: Vec<(Pieces, u64)> = vec![(Pieces::new(), 0)];
        for run in blocks.runs() {
            let bytes = run.start * block_size..(run.end * block_size).min(size);
            let mut at = bytes.start;
            while at < bytes.end {
                if requests.last().is_none_or(|(pieces, used)| *used == CHUNK || pieces.len() == PIECES) {
                    requests.push((Pieces::new(), 0));
                }
                let Some((pieces, used)) = requests.last_mut() else { break };
                let len = (bytes.end - at).min(CHUNK - *used);
                pieces.push(Piece { offset: at, len });
                *used += len;
                at += len;
            }
        }
        requests.retain(|(pieces, _)| !pieces.is_empty());
        for (token, (pieces, len)) in requests.into_iter().enumerate() {
            let mut buf = self.ready.pop().unwrap_or_else(|| Buf::scratch(CHUNK as usize));
            buf.set_len(len as usize);
            self.queue.submit(Request { kind: RequestKind::Read, pieces, buf, token: token as u64 });
        }
        self.queue.start();
        while self.queue.in_flight() > 0 {
            let Some(done) = self.queue.complete(true) else {
                return Err(io::Error::other("the disk's queue lost a request"));
            };
            done.result?;
            self.fresh.push((done.request.pieces, done.request.buf));
        }
        Ok(true)
    }

    /// Stores what was read. False if it is too much to hold. Not part of `read`, which may be urgent.
    pub(crate) fn keep(&mut self) -> bool {
        for (pieces, buf) in self.fresh.drain(..) {
            let mut from = 0;
            for Piece { offset, len } in pieces {
                self.captured.put(offset, &buf[from..from + len as usize]);
                from += len as usize;
            }
            self.ready.push(buf);
        }
        self.captured.slots.len() as u64 * self.captured.block_size <= self.most
    }

    /// The blocks that were stored.
    pub(crate) fn finish(self) -> MemoryView {
        self.captured
    }
}

/// Some blocks of a disk as of their last read. All others read as zeroes.
pub(crate) struct MemoryView {
    size: u64,
    block_size: u64,
    /// The slot of each block.
    slots: BTreeMap<u64, usize>,
    chunks: Vec<Box<[u8]>>,
}

impl MemoryView {
    /// Chunk and place of a slot.
    fn place(&self, slot: usize) -> (usize, usize) {
        let in_chunk = (CHUNK / self.block_size) as usize;
        (slot / in_chunk, slot % in_chunk * self.block_size as usize)
    }

    /// Stores whole blocks; the last one of the disk may be short.
    fn put(&mut self, offset: u64, data: &[u8]) {
        for (i, block) in data.chunks(self.block_size as usize).enumerate() {
            let next = self.slots.len();
            let slot = *self.slots.entry(offset / self.block_size + i as u64).or_insert(next);
            let (chunk, at) = self.place(slot);
            if chunk == self.chunks.len() {
                self.chunks.push(vec![0; CHUNK as usize].into());
            }
            self.chunks[chunk][at..at + block.len()].copy_from_slice(block);
        }
    }

    /// True if all these blocks were read.
    pub(crate) fn holds(&self, blocks: &Bitmap) -> bool {
        blocks.runs().flatten().all(|block| self.slots.contains_key(&block))
    }
}

impl Disk for MemoryView {
    fn len(&self) -> u64 {
        self.size
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset + buf.len() as u64;
        buf.fill(0);
        for (block, &slot) in self.slots.range(offset / self.block_size..end.div_ceil(self.block_size)) {
            let start = block * self.block_size;
            let (from, to) = (start.max(offset), (start + self.block_size).min(end));
            let (chunk, place) = self.place(slot);
            let at = place + (from - start) as usize;
            let data = &self.chunks[chunk][at..at + (to - from) as usize];
            buf[(from - offset) as usize..(to - offset) as usize].copy_from_slice(data);
        }
        Ok(())
    }
    fn read_only(&self) -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, "a view is read-only")
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let mut blocks = self.slots.range(from / self.block_size..).map(|(block, _)| *block);
        let Some(first) = blocks.next() else { return Ok(None) };
        let after = first + 1 + (first + 1..).zip(blocks).take_while(|(a, b)| a == b).count() as u64;
        Ok(Some((first * self.block_size).max(from)..(after * self.block_size).min(self.size)))
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
        let mut capture = MemoryReader::new(&disk, BLOCK, 64 << 20).unwrap();
        capture.prepare(1 << 20);
        assert!(capture.read(&blocks).unwrap());
        // Some of the blocks again, and some new ones.
        disk.write_at(0, &after).unwrap();
        let again = Bitmap::new(5000);
        again.set(600..800);
        (1000..4000).step_by(6).for_each(|b| {
            again.set(b..b + 1);
        });
        assert!(capture.keep());
        assert!(capture.read(&again).unwrap() && capture.keep());
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
        let mut capture = MemoryReader::new(&disk, BLOCK, 300 * BLOCK).unwrap();
        let blocks = Bitmap::new(5000);
        blocks.set(100..300);
        // The same ones need no more memory.
        assert!(capture.read(&blocks).unwrap() && capture.keep());
        assert!(capture.read(&blocks).unwrap() && capture.keep());
        blocks.set(0..100);
        assert!(capture.read(&blocks).unwrap() && capture.keep());
        blocks.set(300..301);
        assert!(!capture.read(&blocks).unwrap());
        blocks.clear(0..300);
        assert!(capture.read(&blocks).unwrap() && !capture.keep());
    }
}
