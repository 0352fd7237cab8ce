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

/// Memory made ready before it is needed, so that filling it waits for nothing but the disk.
pub(crate) struct Memory {
    ready: Vec<Buf>,
    limit: u64,
}

impl Memory {
    /// Touches so many bytes; up to `limit` may be used.
    pub fn prepare(bytes: u64, limit: u64) -> Memory {
        let chunks = bytes.min(limit).div_ceil(CHUNK) + 1;
        let touched = |_| {
            let mut buf = Buf::new(CHUNK as usize);
            buf.fill(0);
            buf
        };
        Memory { ready: (0..chunks).map(touched).collect(), limit }
    }
}

/// Some blocks of a disk as they were when they were read. All others read as zeroes.
pub(crate) struct Captured {
    size: u64,
    block_size: u64,
    blocks: Bitmap,
    /// For each run its first byte, its length, its buffer, and its place there; ascending.
    runs: Vec<(u64, u64, usize, usize)>,
    bufs: Vec<Buf>,
}

impl Captured {
    /// Reads `blocks` of `disk`. `None` if they need more memory than they may.
    pub fn read(
        disk: &Arc<dyn Disk>,
        blocks: Bitmap,
        block_size: u64,
        memory: Memory,
    ) -> io::Result<Option<Captured>> {
        let size = disk.len();
        let Memory { mut ready, limit } = memory;
        let mut runs: Vec<(u64, u64, usize, usize)> = Vec::new();
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
            if total > limit {
                return Ok(None);
            }
        }
        requests.retain(|(pieces, _)| !pieces.is_empty());
        let mut bufs: Vec<Buf> = (0..requests.len()).map(|_| Buf::default()).collect();
        let mut queue = disk.clone().queue(DEPTH)?;
        for (token, (pieces, len)) in requests.into_iter().enumerate() {
            let mut buf = ready.pop().unwrap_or_else(|| Buf::scratch(CHUNK as usize));
            buf.set_len(len as usize);
            queue.submit(Request { kind: Kind::Read, pieces, buf, token: token as u64 });
        }
        queue.start();
        while queue.in_flight() > 0 {
            let Some(done) = queue.complete(true) else {
                return Err(io::Error::other("the disk's queue lost a request"));
            };
            done.result?;
            if let Some(place) = bufs.get_mut(done.request.token as usize) {
                *place = done.request.buf;
            }
        }
        Ok(Some(Captured { size, block_size, blocks, runs, bufs }))
    }

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
        let first = self.runs.partition_point(|(start, len, ..)| start + len <= offset);
        for (start, len, index, place) in self.runs.iter().skip(first).take_while(|(start, ..)| *start < end)
        {
            let (from, to) = ((*start).max(offset), (start + len).min(end));
            let at = place + (from - start) as usize;
            let data = &self.bufs[*index][at..at + (to - from) as usize];
            buf[(from - offset) as usize..(to - offset) as usize].copy_from_slice(data);
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

    #[test]
    fn what_was_captured_reads_back_and_the_rest_is_zero() {
        const BLOCK: u64 = 4096;
        let size = 5000 * BLOCK - 100;
        let content: Vec<u8> = (0..size).map(|n| (n / 7 % 251 + 1) as u8).collect();
        let disk: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&content));
        let blocks = Bitmap::new(5000);
        // A long run, many single blocks, and the short last one.
        blocks.set(10..700);
        (1000..4000).step_by(2).for_each(|b| {
            blocks.set(b..b + 1);
        });
        blocks.set(4999..5000);
        let mut expected = vec![0; size as usize];
        for run in blocks.runs() {
            let bytes = (run.start * BLOCK) as usize..((run.end * BLOCK).min(size)) as usize;
            expected[bytes.clone()].copy_from_slice(&content[bytes]);
        }
        let copy = Bitmap::new(5000);
        copy.union_with(&blocks);
        let captured =
            Captured::read(&disk, blocks, BLOCK, Memory::prepare(1 << 20, 64 << 20)).unwrap().unwrap();
        for step in [size, 4096, 100_001] {
            let mut found = vec![1; size as usize];
            let mut at = 0;
            for part in found.chunks_mut(step as usize) {
                captured.read_at(at, part).unwrap();
                at += part.len() as u64;
            }
            assert!(found == expected);
        }
        assert!(captured.holds(&copy));
        copy.set(0..1);
        assert!(!captured.holds(&copy));
        assert!(Captured::read(&disk, copy, BLOCK, Memory::prepare(0, 1 << 20)).unwrap().is_none());
    }
}
