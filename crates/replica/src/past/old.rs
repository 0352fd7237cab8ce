//! Reading what is about to be replaced.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Frame, MAX_DATA, Record};
use device::{Buf, Disk, Piece, Pieces, Queue, Request, RequestKind};

/// Reads kept on their way, of [`MAX_DATA`] each.
const DEPTH: usize = 8;
/// Operations kept on their way: scattered blocks are read as many at once.
const OPERATIONS: u32 = 64;
/// Pieces of a read.
const MOST_PIECES: usize = 1024;
/// What reads as zeroes is found in parts of so many bytes.
const GRAIN: usize = 4096;

/// Reads ranges of a disk, several at once, and returns what they hold in the order in which they came.
pub(crate) struct Old {
    queue: Box<dyn Queue>,
    /// The pieces of the next read, and their bytes.
    gathered: Pieces,
    bytes: u64,
    flying: VecDeque<u64>,
    done: BTreeMap<u64, (Pieces, Buf)>,
    token: u64,
}

impl Old {
    fn new(disk: Arc<dyn Disk>) -> io::Result<Old> {
        let queue = disk.queue(OPERATIONS)?;
        let (flying, done) = (VecDeque::new(), BTreeMap::new());
        Ok(Old { queue, gathered: Pieces::new(), bytes: 0, flying, done, token: 0 })
    }

    /// Reads these ranges, and hands over what they hold, until nothing is left.
    pub(crate) fn each(
        disk: Arc<dyn Disk>,
        ranges: impl Iterator<Item = Range<u64>>,
        mut take: impl FnMut(Frame) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut old = Old::new(disk)?;
        for range in ranges {
            old.read(range, &mut take)?;
        }
        old.finish(take)
    }

    /// Takes a range, and hands over what earlier ones held where too many reads are on their way.
    fn read(
        &mut self,
        mut range: Range<u64>,
        mut take: impl FnMut(Frame) -> io::Result<()>,
    ) -> io::Result<()> {
        while !range.is_empty() {
            let len = (range.end - range.start).min(MAX_DATA as u64 - self.bytes);
            self.gathered.push(Piece { offset: range.start, len });
            range.start += len;
            self.bytes += len;
            if self.gathered.len() == MOST_PIECES || self.bytes == MAX_DATA as u64 {
                self.start();
                if self.flying.len() >= DEPTH {
                    self.first()?.map_or(Ok(()), &mut take)?;
                }
            }
        }
        Ok(())
    }

    /// Hands over what is left.
    fn finish(&mut self, mut take: impl FnMut(Frame) -> io::Result<()>) -> io::Result<()> {
        if self.bytes > 0 {
            self.start();
        }
        while let Some(frame) = self.first()? {
            take(frame)?;
        }
        Ok(())
    }

    fn start(&mut self) {
        let (pieces, bytes) = (std::mem::take(&mut self.gathered), std::mem::take(&mut self.bytes));
        self.flying.push_back(self.token);
        let buf = Buf::scratch(bytes as usize);
        self.queue.submit(Request { kind: RequestKind::Read, pieces, buf, token: self.token });
        self.queue.start();
        self.token += 1;
    }

    /// What the first of the reads on their way has found; `None` if there is none.
    fn first(&mut self) -> io::Result<Option<Frame>> {
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
