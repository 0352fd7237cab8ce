//! Several deltas into one.

use std::io::Read;
use std::ops::Range;

use device::Buf;
use uuid::Uuid;

use crate::{
    Encoder, Error, Event, Frame, Header, MAX_DATA, MAX_RECORDS, Method, Reader, Record, Result, Totals, Unit,
};

/// The delta that does what several do, one after the other, unit by unit. Where two name a byte, the later one wins.
///
/// Each must begin, or pass, where the one before ends, and be tracked; one that is bound to a state must be bound to that
/// which the one before leaves. What the first is bound to, or if it is a seed, the result is too; it is fuzzy if any is.
///
/// All are read once, in parallel: memory holds a frame of each. They are verified to their ends: after an error there is no
/// trailer, so what has come out is not taken for a delta.
pub struct Combined<R> {
    /// The later above the earlier ones.
    layers: Vec<Layer<R>>,
    /// All before it is done.
    at: u64,
    header: Option<Unit>,
    /// `None` after the trailer.
    encoder: Option<Encoder>,
    frame: Frame,
    totals: Totals,
}

/// What hides everything beneath it.
enum Layer<R> {
    /// What a delta writes, up to the least size that the disk has from then on.
    Delta(Box<Feed<R>>, u64),
    /// What a delta adds to the disk of the first epoch in its chain begins as zeroes, whatever was there before: at a later epoch that one cut off,
    /// or in the disk of which it adds less.
    Grown(Range<u64>),
}

impl<R: Read> Combined<R> {
    /// Combines deltas, the earliest first. `compression` is a zstd level.
    ///
    /// # Errors
    /// Deltas that do not follow each other, that copy, or that go on from interrupted ones; and what reading their headers
    /// may refuse.
    pub fn new(deltas: Vec<R>, compression: Option<i32>) -> Result<Combined<R>> {
        let (mut layers, mut joined) = (Vec::with_capacity(2 * deltas.len()), None::<Header>);
        for (number, delta) in (1..).zip(deltas) {
            let mut reader = Reader::new(delta);
            let header = reader.header().map_err(|e| of(number, e))?;
            let size = header.size_after;
            joined = Some(match &joined {
                None => header.clone(),
                Some(before) => {
                    let size_before = if header.binds.is_some() { u64::MAX } else { header.size_before };
                    let known = before.size_after.min(size_before);
                    if known < size {
                        layers.push(Layer::Grown(known..size));
                    }
                    join(before, header, number)?
                }
            });
            layers.push(Layer::Delta(Box::new(Feed::new(number, reader)), size));
        }
        // What is cut off later does not return.
        let mut least = u64::MAX;
        for layer in layers.iter_mut().rev() {
            match layer {
                Layer::Delta(_, size) => {
                    least = least.min(*size);
                    *size = least;
                }
                Layer::Grown(zeroes) => zeroes.end = zeroes.end.min(least),
            }
        }
        let header = joined.ok_or(Error::Header { why: "there is none" })?;
        let (encoder, unit) = Encoder::new(&header, compression)?;
        let (header, encoder) = (Some(unit), Some(encoder));
        Ok(Combined { layers, at: 0, header, encoder, frame: Frame::default(), totals: Totals::default() })
    }

    /// Makes sure that all deltas end here, after their trailers, as [`Reader::expect_end`].
    ///
    /// # Errors
    /// If anything follows one.
    pub fn expect_end(&mut self) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| match layer {
            Layer::Delta(feed, _) => feed.reader.expect_end().map_err(|e| of(feed.number, e)),
            Layer::Grown(_) => Ok(()),
        })
    }

    /// The next unit; `None` after the trailer.
    ///
    /// # Errors
    /// Everything that reading the deltas may refuse.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator's result would hide the error that ends it"
    )]
    pub fn next(&mut self) -> Result<Option<Unit>> {
        if let Some(header) = self.header.take() {
            return Ok(Some(header));
        }
        while let Some((layer, run)) = self.run()? {
            if self.is_full() {
                return self.flush();
            }
            // Runs are kept whole unless that would leave frames half empty.
            let room = (MAX_DATA - self.frame.data.len()) as u64;
            let len = run.end - run.start;
            let taken = match &mut self.layers[layer] {
                Layer::Delta(feed, _) if feed.is_data() => {
                    let len = if len <= room { len } else { room & !(64 * 1024 - 1) };
                    if len == 0 {
                        return self.flush();
                    }
                    feed.give(run.start, len, &mut self.frame)?;
                    len
                }
                Layer::Delta(feed, _) => {
                    feed.give(run.start, len, &mut self.frame)?;
                    len
                }
                Layer::Grown(_) => {
                    add(&mut self.frame, Record::Zero { offset: run.start, len });
                    len
                }
            };
            self.at = run.start + taken;
        }
        if !self.frame.records.is_empty() {
            return self.flush();
        }
        Ok(self.encoder.take().map(|encoder| {
            self.totals = encoder.totals();
            encoder.trailer()
        }))
    }

    /// What the delta holds, once all of it has come.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// The next run of bytes that come from one layer.
    fn run(&mut self) -> Result<Option<(usize, Range<u64>)>> {
        let mut found: Option<(usize, Range<u64>)> = None;
        for (number, layer) in self.layers.iter_mut().enumerate().rev() {
            let run = match layer {
                Layer::Delta(feed, limit) => feed.run(self.at, *limit)?,
                Layer::Grown(zeroes) => {
                    Some(zeroes.start.max(self.at)..zeroes.end).filter(|run| !run.is_empty())
                }
            };
            let Some(run) = run else { continue };
            found = Some(match found {
                // What is beneath shows up to where the upper one begins.
                Some((_, upper)) if run.start < upper.start => (number, run.start..run.end.min(upper.start)),
                Some(upper) => upper,
                None => (number, run),
            });
        }
        Ok(found)
    }

    fn is_full(&self) -> bool {
        self.frame.records.len() == MAX_RECORDS || self.frame.data.len() == MAX_DATA
    }

    fn flush(&mut self) -> Result<Option<Unit>> {
        let frame = std::mem::take(&mut self.frame);
        self.encoder.as_mut().map(|encoder| encoder.frame(frame)).transpose()
    }
}

fn of(number: usize, error: Error) -> Error {
    Error::Of { number, error: Box::new(error) }
}

/// Adds a record, to the one before if it goes on from there.
fn add(frame: &mut Frame, record: Record) {
    if !frame.records.last_mut().is_some_and(|last| last.extend(record)) {
        frame.records.push(record);
    }
}

/// The header of two deltas in one, of which the second has this number.
fn join(first: &Header, second: &Header, number: usize) -> Result<Header> {
    let refuse = |number, why| Err(Error::Uncombinable { number, why });
    if first.source != second.source {
        return Err(Error::Sources { first: first.source, second: second.source });
    }
    // Made for the very state that the first leaves.
    let continues = first.binds.is_some() && second.binds == Some(first.stream);
    if first.batch && !continues {
        return refuse(number - 1, "is a batch of a mirror and ends within an epoch");
    }
    if first.partial {
        return refuse(number - 1, "mends a part of one replica");
    }
    if first.method == Method::Rolling {
        return refuse(number - 1, "may copy within the replica");
    }
    if second.method != Method::Tracked || second.binds.is_some() && !continues {
        return refuse(number, "was not tracked and fits one replica only");
    }
    for (number, header) in [(number - 1, first), (number, second)] {
        if header.resumes.is_some() {
            return refuse(number, "continues an interrupted one");
        }
    }
    let (Some(&to), Some(&begins), Some(&ends)) = (first.to(), second.chain.first(), second.to()) else {
        return Err(Error::Header { why: "its chain of epochs is empty" });
    };
    let at = if continues { Some(0) } else { second.position(&to) };
    let Some(at) = at else {
        return Err(Error::Apart { to, begins, ends });
    };
    // Further on in its chain the second does not say which size it expects.
    if at == 0 && first.size_after != second.size_before {
        return refuse(number, "starts with another disk size than the first ends with");
    }
    let mut chain = first.chain.clone();
    if first.binds.is_some() || first.is_seed() {
        chain.clear();
        chain.push(ends);
    } else {
        chain.extend(&second.chain[at + 1..]);
    }
    let mut header = Header {
        // The state that it leaves has this name.
        stream: if continues { second.stream } else { Uuid::new_v4() },
        source: first.source,
        chain,
        size_before: first.size_before,
        size_after: second.size_after,
        block_size: first.block_size.min(second.block_size),
        method: first.method,
        binds: first.binds,
        resumes: None,
        fuzzy: second.fuzzy || first.fuzzy && !continues,
        batch: second.batch,
        partial: false,
        lives: second.lives.clone(),
    };
    header.limit_chain();
    Ok(header)
}

/// The runs of bytes that a delta writes, one by one.
struct Feed<R> {
    /// Of the deltas, counted from 1.
    number: usize,
    reader: Reader<R>,
    frame: Frame,
    /// The record in the frame, how far into it, and where its data is.
    record: usize,
    within: u64,
    data: usize,
}

impl<R: Read> Feed<R> {
    fn new(number: usize, reader: Reader<R>) -> Self {
        Feed { number, reader, frame: Frame::default(), record: 0, within: 0, data: 0 }
    }

    /// What of it comes next from `at` on and below `limit`; `None` after a trailer in order.
    fn run(&mut self, at: u64, limit: u64) -> Result<Option<Range<u64>>> {
        loop {
            let Some(record) = self.frame.records.get(self.record) else {
                match self.reader.next().map_err(|e| of(self.number, e))? {
                    Some(Event::Frame(frame)) => {
                        self.frame = frame;
                        (self.record, self.within, self.data) = (0, 0, 0);
                    }
                    Some(_) => {}
                    None => return Ok(None),
                }
                continue;
            };
            let (start, end) = (record.offset() + self.within, record.end());
            if start >= limit {
                self.advance(end - start);
            } else if start < at {
                self.advance(at.min(end) - start);
            } else {
                return Ok(Some(start..end.min(limit)));
            }
        }
    }

    /// True if the next run is of data.
    fn is_data(&self) -> bool {
        matches!(self.frame.records.get(self.record), Some(Record::Data { .. }))
    }

    /// Hands over the first `len` bytes of the run at `offset`.
    fn give(&mut self, offset: u64, len: u64, to: &mut Frame) -> Result<()> {
        match self.frame.records[self.record] {
            Record::Data { .. } => {
                add(to, Record::Data { offset, len });
                let at = to.data.len();
                if to.data.capacity() < MAX_DATA {
                    to.data = Buf::scratch(MAX_DATA);
                }
                to.data.set_len(at + len as usize);
                to.data[at..].copy_from_slice(&self.frame.data[self.data..self.data + len as usize]);
            }
            Record::Zero { .. } => add(to, Record::Zero { offset, len }),
            Record::Unsure { .. } => add(to, Record::Unsure { offset, len }),
            // Not in a delta of any method that came so far; for those who change that.
            Record::Copy { .. } => {
                let why = "copies within the replica";
                return Err(Error::Uncombinable { number: self.number, why });
            }
        }
        Ok(())
    }

    fn advance(&mut self, len: u64) {
        let record = self.frame.records[self.record];
        if matches!(record, Record::Data { .. }) {
            self.data += len as usize;
        }
        self.within += len;
        if self.within == record.len() {
            (self.record, self.within) = (self.record + 1, 0);
        }
    }
}
