//! Reading what is about to be replaced.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Frame, MAX_DATA, Record};
use device::{Buf, Disk, Kind, Piece, Pieces, Queue, Request};

/// Reads kept on their way, of [`MAX_DATA`] each.
const DEPTH: u32 = 8;
/// Pieces of a read.
const MOST_PIECES: usize = 1024;
/// What reads as zeroes is found in parts of so many bytes.
const GRAIN: usize = 4096;

/// Reads ranges of a disk in order, several at once.
pub(crate) struct Old<I> {
    queue: Box<dyn Queue>,
    ranges: I,
    /// What of the last range is still to be read.
    left: Range<u64>,
    flying: VecDeque<u64>,
    done: BTreeMap<u64, (Pieces, Buf)>,
    token: u64,
}

impl<I: Iterator<Item = Range<u64>>> Old<I> {
    pub(crate) fn new(disk: Arc<dyn Disk>, ranges: I) -> io::Result<Old<I>> {
        let queue = disk.queue(DEPTH)?;
        let (flying, done) = (VecDeque::new(), BTreeMap::new());
        Ok(Old { queue, ranges, left: 0..0, flying, done, token: 0 })
    }

    /// The pieces of the next read.
    fn pieces(&mut self) -> Pieces {
        let (mut pieces, mut bytes) = (Pieces::new(), 0);
        while pieces.len() < MOST_PIECES && bytes < MAX_DATA as u64 {
            if self.left.is_empty() {
                match self.ranges.next() {
                    Some(range) => self.left = range,
                    None => break,
                }
                continue;
            }
            let len = (self.left.end - self.left.start).min(MAX_DATA as u64 - bytes);
            pieces.push(Piece { offset: self.left.start, len });
            self.left.start += len;
            bytes += len;
        }
        pieces
    }

    /// The next frame.
    pub(crate) fn next(&mut self) -> io::Result<Option<Frame>> {
        while self.flying.len() < DEPTH as usize {
            let pieces = self.pieces();
            if pieces.is_empty() {
                break;
            }
            let buf = Buf::scratch(pieces.iter().map(|piece| piece.len as usize).sum());
            self.flying.push_back(self.token);
            self.queue.submit(Request { kind: Kind::Read, pieces, buf, token: self.token });
            self.token += 1;
        }
        self.queue.start();
        let Some(first) = self.flying.pop_front() else { return Ok(None) };
        loop {
            if let Some((pieces, data)) = self.done.remove(&first) {
                return Ok(Some(frame(&pieces, data)));
            }
            let lost = || io::Error::other("an earlier read has failed");
            let done = self.queue.complete(true).ok_or_else(lost)?;
            done.result?;
            self.done.insert(done.request.token, (done.request.pieces, done.request.buf));
        }
    }
}

/// What was read, as a frame: zeroes without data.
fn frame(pieces: &Pieces, data: Buf) -> Frame {
    let mut records: Vec<Record> = Vec::new();
    let (mut at, mut end) = (0, 0);
    let mut kept = data;
    for piece in pieces {
        for start in (0..piece.len as usize).step_by(GRAIN) {
            let len = GRAIN.min(piece.len as usize - start);
            let (offset, part) = (piece.offset + start as u64, at..at + len);
            at += len;
            let zero = kept[part.clone()].iter().all(|byte| *byte == 0);
            let record = match zero {
                true => Record::Zero { offset, len: len as u64 },
                false => Record::Data { offset, len: len as u64 },
            };
            if !records.last_mut().is_some_and(|last| last.extend(record)) {
                records.push(record);
            }
            if !zero {
                // What comes before has become shorter by its zeroes.
                if end < part.start {
                    kept.copy_within(part, end);
                }
                end += len;
            }
        }
    }
    kept.set_len(end);
    Frame { records, data: kept }
}
