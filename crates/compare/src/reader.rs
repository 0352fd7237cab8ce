//! Reads a disk from front to back, ahead of the hashing threads, and past unreadable blocks.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk, Piece, Pieces, Queue, Request, RequestKind};
use link::Rate;

use crate::Scope;
use crate::scope::CHUNK;
use crate::segments::{Segment, Segments};

/// Chunks in flight: more do not make disks faster.
const AHEAD: usize = 16;

/// A hole, or a chunk of data as read.
pub(crate) enum ReadSegment {
    /// Known to read as zeroes.
    Hole(Range<u64>),
    /// Its bytes, and which of its blocks cannot be read.
    Data(Range<u64>, Buf, Vec<Range<u64>>),
}

/// Reads the chunks of a scope in order, ahead of its caller.
pub(crate) struct ScopeReader {
    disk: Arc<dyn Disk>,
    block_size: u32,
    keep_going: bool,
    rate: Option<Rate>,
    segments: Segments,
    queue: Box<dyn Queue>,
    /// Chunks in flight and done: range, whether a hole, and the result once there is one.
    ahead: VecDeque<(Range<u64>, bool, Option<io::Result<Buf>>)>,
    /// The request token of the first of them.
    first: u64,
    ended: bool,
}

impl ScopeReader {
    pub(crate) fn new(disk: &Arc<dyn Disk>, scope: &Scope) -> io::Result<ScopeReader> {
        Ok(ScopeReader {
            disk: disk.clone(),
            block_size: scope.block_size,
            keep_going: scope.keep_going,
            rate: scope.rate.map(Rate::new),
            segments: Segments::new(disk, scope.ranges.clone(), CHUNK),
            queue: disk.clone().queue(AHEAD as u32)?,
            ahead: VecDeque::new(),
            first: 0,
            ended: false,
        })
    }

    /// Bytes of a range that the disk has: beyond its end it reads as zeroes.
    fn here(&self, range: &Range<u64>) -> u64 {
        range.end.min(self.disk.len()).saturating_sub(range.start)
    }

    fn fill(&mut self) -> io::Result<()> {
        while !self.ended && self.ahead.len() < AHEAD {
            let (range, hole) = match self.segments.next()? {
                Some(Segment::Hole(range)) => (range, true),
                Some(Segment::Data(range)) => (range, false),
                None => {
                    self.ended = true;
                    break;
                }
            };
            let len = self.here(&range);
            if hole || len == 0 {
                self.ahead.push_back((range, true, Some(Ok(Buf::default()))));
                continue;
            }
            if let Some(rate) = &mut self.rate {
                // Requests so far proceed while this waits.
                self.queue.start();
                // A disk whose reader has left says so.
                rate.wait_while(|| self.disk.allocated(range.start).map(drop))?;
                rate.charge(len);
            }
            self.queue.submit(Request {
                kind: RequestKind::Read,
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

    /// The next chunk; `None` at the end.
    pub(crate) fn next(&mut self) -> io::Result<Option<ReadSegment>> {
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
            return Ok(Some(ReadSegment::Hole(range)));
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
        Ok(Some(ReadSegment::Data(range, buf, bad)))
    }
}

/// Repeats a read that failed because of the medium block by block, so that only unreadable blocks are lost. With
/// `keep_going` these are returned, joined, and read as zeroes; errors of another cause are returned all the same.
///
/// # Errors
/// Of the first unreadable block, with its offset.
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
