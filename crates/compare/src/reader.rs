//! Reading a disk from front to back, ahead of who hashes it, and past what can't be read.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk, Kind, Piece, Pieces, Queue, Request};
use link::Rate;

use crate::Scope;
use crate::scope::CHUNK;

/// Chunks on their way at a time: as deep as disks go faster for.
const AHEAD: usize = 16;

/// A stretch of a disk.
pub(crate) enum Stretch {
    /// Known to read as zeroes.
    Hole(Range<u64>),
    /// Its bytes, and which of its blocks can't be read.
    Data(Range<u64>, Buf, Vec<Range<u64>>),
}

/// Cuts the ranges of a scope into holes and chunks, ascending.
struct Chunks {
    disk: Arc<dyn Disk>,
    ranges: std::vec::IntoIter<Range<u64>>,
    /// What is left of the range under way.
    left: Range<u64>,
    data: Option<Range<u64>>,
}

impl Chunks {
    /// The next stretch, and whether it is a hole: of any length, or allocated bytes up to the next multiple of a chunk.
    fn next(&mut self) -> io::Result<Option<(Range<u64>, bool)>> {
        while self.left.is_empty() {
            let Some(next) = self.ranges.next() else { return Ok(None) };
            self.left = next;
        }
        let (start, end) = (self.left.start, self.left.end);
        if self.data.as_ref().is_none_or(|d| d.end <= start) {
            self.data = self.disk.allocated(start)?;
        }
        let hole_end = self.data.as_ref().map_or(end, |data| data.start.clamp(start, end));
        // Holes are told in whole chunks alone: what is not aligned is read with its neighbours.
        let hole_end = if hole_end == end { hole_end } else { hole_end / CHUNK * CHUNK };
        let hole = hole_end > start;
        let upto = if hole { hole_end } else { ((start / CHUNK + 1) * CHUNK).min(end) };
        self.left.start = upto;
        Ok(Some((start..upto, hole)))
    }
}

/// Reads the stretches of a disk in order.
pub(crate) struct Reader {
    disk: Arc<dyn Disk>,
    block_size: u32,
    keep_going: bool,
    rate: Option<Rate>,
    chunks: Chunks,
    queue: Box<dyn Queue>,
    /// Stretches on their way: `None` while the read is.
    ahead: VecDeque<(Range<u64>, bool, Option<io::Result<Buf>>)>,
    /// The token of the first of them.
    first: u64,
    ended: bool,
}

impl Reader {
    pub(crate) fn new(disk: &Arc<dyn Disk>, scope: &Scope) -> io::Result<Reader> {
        Ok(Reader {
            disk: disk.clone(),
            block_size: scope.block_size,
            keep_going: scope.keep_going,
            rate: scope.rate.map(Rate::new),
            chunks: Chunks {
                disk: disk.clone(),
                ranges: scope.ranges.clone().into_iter(),
                left: 0..0,
                data: None,
            },
            queue: disk.clone().queue(AHEAD as u32)?,
            ahead: VecDeque::new(),
            first: 0,
            ended: false,
        })
    }

    /// The part of a stretch that the disk has: what lies beyond its end reads as zeroes.
    fn here(&self, range: &Range<u64>) -> u64 {
        range.end.min(self.disk.len()).saturating_sub(range.start)
    }

    fn fill(&mut self) -> io::Result<()> {
        while !self.ended && self.ahead.len() < AHEAD {
            let Some((range, hole)) = self.chunks.next()? else {
                self.ended = true;
                break;
            };
            let len = self.here(&range);
            if hole || len == 0 {
                self.ahead.push_back((range, true, Some(Ok(Buf::default()))));
                continue;
            }
            if let Some(rate) = &mut self.rate {
                // What is on its way goes while we wait.
                self.queue.start();
                rate.wait();
                rate.charge(len);
            }
            self.queue.submit(Request {
                kind: Kind::Read,
                pieces: Pieces::from_slice(&[Piece { offset: range.start, len }]),
                buf: Buf::scratch(len as usize),
                token: self.first + self.ahead.len() as u64,
            });
            self.ahead.push_back((range, false, None));
            if self.rate.is_some() {
                break;
            }
        }
        self.queue.start();
        Ok(())
    }

    /// The next stretch; `None` at the end.
    pub(crate) fn next(&mut self) -> io::Result<Option<Stretch>> {
        self.fill()?;
        loop {
            match self.ahead.front() {
                None => return Ok(None),
                Some((_, _, Some(_))) => break,
                Some((_, _, None)) => {}
            }
            let Some(done) = self.queue.complete(true) else {
                return Err(io::Error::other("the disk's queue lost a request"));
            };
            let index = done.request.token.wrapping_sub(self.first) as usize;
            if let Some(slot) = self.ahead.get_mut(index) {
                slot.2 = Some(done.result.map(|()| done.request.buf));
            }
        }
        let Some((range, hole, Some(result))) = self.ahead.pop_front() else { return Ok(None) };
        self.first += 1;
        if hole {
            return Ok(Some(Stretch::Hole(range)));
        }
        let here = self.here(&range) as usize;
        let (mut buf, bad) = match result {
            Ok(buf) => (buf, Vec::new()),
            Err(error) if !device::is_unreadable(&error) => return Err(error),
            Err(_) => {
                let mut buf = Buf::scratch(here);
                let bad = salvage(&*self.disk, range.start, &mut buf, self.block_size, self.keep_going)?;
                (buf, bad)
            }
        };
        let len = (range.end - range.start) as usize;
        if buf.len() < len {
            let mut whole = Buf::new(len);
            whole[..buf.len()].copy_from_slice(&buf);
            buf = whole;
        }
        Ok(Some(Stretch::Data(range, buf, bad)))
    }
}

/// After a read has failed because of the medium: reads its blocks one by one, so that no more than what is broken is lost.
/// With `keep_going` the blocks that can't be read are returned, joined, and read as zeroes; an error that has another cause
/// ends it all the same.
///
/// # Errors
/// Of the first block that can't be read, with its offset.
pub fn salvage(
    disk: &dyn Disk,
    offset: u64,
    buf: &mut [u8],
    block_size: u32,
    keep_going: bool,
) -> io::Result<Vec<Range<u64>>> {
    let mut bad: Vec<Range<u64>> = Vec::new();
    let mut at = offset;
    for block in buf.chunks_mut(block_size as usize) {
        let end = at + block.len() as u64;
        if let Err(error) = disk.read_at(at, block) {
            if !keep_going || !device::is_unreadable(&error) {
                return Err(device::unreadable(at, error));
            }
            block.fill(0);
            match bad.last_mut() {
                Some(last) if last.end == at => last.end = end,
                _ => bad.push(at..end),
            }
        }
        at = end;
    }
    Ok(bad)
}
