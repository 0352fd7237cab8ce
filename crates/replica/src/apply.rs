//! Bringing frames onto a disk: many requests on their way at once, dense regions as whole spans.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Frame, Record};
use device::{Buf, Disk, Done, Kind, Piece, Pieces, Queue, Request};

/// Operations kept on their way.
const DEPTH: u32 = 64;
/// Bytes kept on their way: some frames more than the disk works on, so that it never waits for the next.
const FLIGHT: usize = 8 << 20;

/// Where scattered blocks cover more than one part in this of a span, the span is written whole.
const DENSE_PART: u64 = 4;
/// The longest span that is written whole, in bytes.
const DENSE_SPAN: u64 = 8 << 20;
/// The widest gap that is read to fill a span, in bytes.
const DENSE_GAP: u64 = 128 << 10;

/// A run of a frame's data: its place on the disk and in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    offset: u64,
    len: u64,
    at: usize,
}

impl Run {
    fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// What is done with a frame.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// Written one by one.
    picked: Vec<Run>,
    /// Read, overlaid, and written whole.
    spans: Vec<Vec<Run>>,
    /// Zeroed.
    zeroes: Vec<Range<u64>>,
}

/// Decides what is done with a frame's records. `cursor` is where the records before it end. From `known` on, what no record
/// names becomes zero.
fn plan(records: &[Record], mut cursor: u64, known: u64) -> Plan {
    let mut plan = Plan::default();
    let mut group: Vec<Run> = Vec::new();
    let mut at = 0;
    for record in records {
        let (offset, len) = (record.offset(), record.len());
        let gap = cursor.max(known)..offset;
        if !gap.is_empty() {
            plan.zeroes.push(gap);
        }
        if let Record::Data { .. } = record {
            let joins = group.first().zip(group.last()).is_some_and(|(first, last)| {
                // Beyond `known` a gap is not the disk's to fill.
                offset - last.end() <= DENSE_GAP
                    && offset + len - first.offset <= DENSE_SPAN
                    && offset <= known
            });
            if !joins {
                plan.close(&mut group);
            }
            group.push(Run { offset, len, at });
            at += len as usize;
        } else {
            plan.close(&mut group);
            if let Record::Zero { .. } = record {
                plan.zeroes.push(offset..offset + len);
            }
        }
        cursor = offset + len;
    }
    plan.close(&mut group);
    plan
}

impl Plan {
    /// Puts a group of neighbouring runs where it belongs.
    fn close(&mut self, group: &mut Vec<Run>) {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { return };
        let span = last.end() - first.offset;
        let data: u64 = group.iter().map(|r| r.len).sum();
        // A few long runs are as good as a span.
        let scattered = group.len() > 4 && data / (group.len() as u64) < 64 << 10;
        if scattered && data < span && data * DENSE_PART > span {
            self.spans.push(std::mem::take(group));
        } else {
            self.picked.append(group);
        }
    }
}

/// A request on its way.
struct Flying {
    /// Its first byte on the disk.
    first: u64,
    /// Memory it holds.
    bytes: usize,
    /// For a span being read: what goes over it.
    overlay: Option<(Arc<Buf>, Vec<Run>)>,
}

/// Brings the frames of one delta onto a disk.
pub(crate) struct Applier {
    disk: Arc<dyn Disk>,
    queue: Box<dyn Queue>,
    flying: BTreeMap<u64, Flying>,
    token: u64,
    bytes: usize,
    cursor: u64,
    known: u64,
    blank: bool,
    /// Bytes written to the disk, the filled gaps of spans included.
    pub written: u64,
    /// Bytes read to fill the gaps of spans.
    pub read: u64,
}

impl Applier {
    /// For a disk whose content ends at `known`: beyond, what no record names becomes zero. A `blank` disk reads as zeroes
    /// everywhere, and making zeroes costs nothing.
    pub fn new(disk: Arc<dyn Disk>, known: u64, blank: bool) -> io::Result<Applier> {
        let queue = disk.clone().queue(DEPTH)?;
        Ok(Applier {
            disk,
            queue,
            flying: BTreeMap::new(),
            token: 0,
            bytes: 0,
            cursor: 0,
            known,
            blank,
            written: 0,
            read: 0,
        })
    }

    /// Where all records that end before it are complete.
    pub fn position(&self) -> u64 {
        self.flying.values().map(|f| f.first).min().unwrap_or(self.cursor).min(self.cursor)
    }

    /// The next part of the delta begins at the disk's start again. Everything before is complete on return.
    pub fn rewind(&mut self, known: u64) -> io::Result<()> {
        self.drain()?;
        (self.cursor, self.known) = (0, known);
        Ok(())
    }

    /// Applies a frame. Returns once it is on its way. After an error nothing more may be applied.
    pub fn frame(&mut self, frame: Frame) -> io::Result<()> {
        let Frame { records, data } = frame;
        let plan = plan(&records, self.cursor, self.known);
        self.zero(&plan.zeroes)?;
        if plan.spans.is_empty() {
            if !plan.picked.is_empty() {
                self.write(&plan.picked, data)?;
            }
        } else {
            let mut picked = Buf::new(plan.picked.iter().map(|r| r.len as usize).sum());
            let mut at = 0;
            for run in &plan.picked {
                picked[at..at + run.len as usize].copy_from_slice(&data[run.at..run.at + run.len as usize]);
                at += run.len as usize;
            }
            if !plan.picked.is_empty() {
                self.write(&plan.picked, picked)?;
            }
            let data = Arc::new(data);
            for runs in plan.spans {
                self.span(runs, &data)?;
            }
        }
        if let Some(last) = records.last() {
            self.cursor = last.offset() + last.len();
        }
        self.queue.start();
        while let Some(done) = self.queue.complete(false) {
            self.done(done)?;
        }
        self.room(0)
    }

    /// Ends the delta of a disk of `size` bytes: what lies behind the last record is zeroed where it must be. All is complete
    /// on return, not durable.
    pub fn finish(&mut self, size: u64) -> io::Result<()> {
        let tail = self.cursor.max(self.known)..size;
        if !tail.is_empty() {
            self.zero(&[tail])?;
        }
        self.cursor = self.cursor.max(size);
        self.drain()
    }

    /// Waits until nothing is on its way any more.
    pub fn drain(&mut self) -> io::Result<()> {
        self.queue.start();
        let mut result = Ok(());
        while let Some(done) = self.queue.complete(true) {
            result = result.and(self.done(done));
        }
        result
    }

    /// Makes what is complete durable.
    pub fn flush(&self) -> io::Result<()> {
        self.disk.flush()
    }

    fn write(&mut self, runs: &[Run], buf: Buf) -> io::Result<()> {
        let mut pieces: Pieces = Pieces::with_capacity(runs.len());
        for run in runs {
            match pieces.last_mut() {
                Some(last) if last.offset + last.len == run.offset => last.len += run.len,
                _ => pieces.push(Piece { offset: run.offset, len: run.len }),
            }
        }
        self.written += buf.len() as u64;
        self.submit(Kind::Write { fua: false }, pieces, buf, None)
    }

    fn span(&mut self, runs: Vec<Run>, data: &Arc<Buf>) -> io::Result<()> {
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return Ok(()) };
        let piece = Piece { offset: first.offset, len: last.end() - first.offset };
        self.written += piece.len;
        self.read += piece.len;
        let buf = Buf::new(piece.len as usize);
        self.submit(Kind::Read, Pieces::from_slice(&[piece]), buf, Some((data.clone(), runs)))
    }

    fn zero(&mut self, ranges: &[Range<u64>]) -> io::Result<()> {
        if self.blank || ranges.is_empty() {
            return Ok(());
        }
        let pieces: Pieces = ranges.iter().map(|r| Piece { offset: r.start, len: r.end - r.start }).collect();
        self.submit(Kind::Zero { unmap: true, fast: false, fua: false }, pieces, Buf::default(), None)
    }

    fn submit(
        &mut self,
        kind: Kind,
        pieces: Pieces,
        buf: Buf,
        overlay: Option<(Arc<Buf>, Vec<Run>)>,
    ) -> io::Result<()> {
        self.room(buf.len())?;
        let first = pieces.iter().map(|p| p.offset).min().unwrap_or(0);
        let (token, bytes) = (self.token, buf.len());
        self.token += 1;
        self.bytes += bytes;
        self.flying.insert(token, Flying { first, bytes, overlay });
        self.queue.submit(Request { kind, pieces, buf, token });
        Ok(())
    }

    /// Waits until `more` bytes have room.
    fn room(&mut self, more: usize) -> io::Result<()> {
        while self.bytes > 0 && self.bytes + more > FLIGHT {
            self.queue.start();
            match self.queue.complete(true) {
                Some(done) => self.done(done)?,
                None => break,
            }
        }
        Ok(())
    }

    fn done(&mut self, done: Done) -> io::Result<()> {
        let Done { mut request, result } = done;
        let Some(mut flying) = self.flying.remove(&request.token) else { return result };
        if let Err(e) = result {
            // It stays in flight for `position`: nothing from here on may count as complete.
            flying.overlay = None;
            self.flying.insert(request.token, flying);
            return Err(e);
        }
        match flying.overlay.take() {
            Some((data, runs)) => {
                let start = flying.first;
                for run in runs {
                    let to = (run.offset - start) as usize;
                    request.buf[to..to + run.len as usize]
                        .copy_from_slice(&data[run.at..run.at + run.len as usize]);
                }
                self.flying.insert(request.token, flying);
                request.kind = Kind::Write { fua: false };
                self.queue.submit(request);
                self.queue.start();
            }
            None => self.bytes -= flying.bytes,
        }
        Ok(())
    }
}
