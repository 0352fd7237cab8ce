//! Two deltas into one.

use std::io::{Read, Seek, SeekFrom, Write};
use std::iter::Peekable;
use std::ops::Range;

use device::Buf;
use extents::Extents;
use uuid::Uuid;

use crate::{
    Encoder, Error, Event, Frame, Header, MAX_CHAIN, MAX_DATA, MAX_RECORDS, Method, Reader, Record, Result,
    Totals, Writer,
};

/// Writes to `out` the delta that does what `first` and then `second` do. Where both name a byte, the second wins.
///
/// The second must be tracked and begin, or pass, where the first ends. What the first is bound to, or if it is a seed, the
/// result is too; it is fuzzy if either is. `compression` is a zstd level.
///
/// The second is read twice, from where it stands. Memory holds the extents of the second, and a frame of each.
///
/// # Errors
/// Deltas that do not follow each other, that copy, or that go on from interrupted ones; and everything that reading them
/// may refuse. What was written by then has no trailer, so it cannot be taken for a delta.
pub fn combine<A: Read, B: Read + Seek, W: Write>(
    first: A,
    mut second: B,
    out: &mut Writer<W>,
    compression: Option<i32>,
) -> Result<Totals> {
    let unseekable = |error| of("second", Error::Read { unit: 0, error });
    let begin = second.stream_position().map_err(unseekable)?;
    let mut first = Reader::new(first);
    let earlier = first.header().map_err(|e| of("first", e))?;
    let mut survey = Reader::new(&mut second);
    let later = survey.header().map_err(|e| of("second", e))?.clone();
    let header = join(earlier, &later)?;
    let mut covered = coverage(&mut survey).map_err(|e| of("second", e))?;
    let digest = survey.decoder().digest();
    second.seek(SeekFrom::Start(begin)).map_err(unseekable)?;
    // What the second adds to the disk begins as zeroes, whatever stood there before the first cut it off.
    let grown = match earlier.size_after {
        between if between < later.size_after => covered.complement(between..later.size_after),
        _ => Extents::new(),
    };
    // What the first writes does not show where the second writes too, nor behind the end.
    covered.insert(later.size_after..u64::MAX);
    let nothing = Extents::new();

    let mut first = Feed::new("first", first, &covered);
    let mut grown = grown.iter().peekable();
    let mut second = Feed::new("second", Reader::new(second), &nothing);
    let (encoder, unit) = Encoder::new(&header, compression)?;
    out.unit(&unit)?;
    let mut packer = Packer { encoder, out, frame: Frame::default() };
    loop {
        // All three ascend, and none has a byte that another has.
        let starts =
            [first.next()?, grown.peek().cloned(), second.next()?].map(|run| run.map(|run| run.start));
        let Some(least) = starts.iter().flatten().min() else { break };
        if starts[0] == Some(*least) {
            first.give(&mut packer)?;
        } else if starts[2] == Some(*least) {
            second.give(&mut packer)?;
        } else if let Some(zeroes) = grown.next() {
            packer.add(zeroes, None)?;
        }
    }
    if second.reader.decoder().digest() != digest {
        return Err(Error::Changed);
    }
    packer.finish()
}

fn of(which: &'static str, error: Error) -> Error {
    Error::Of { which, error: Box::new(error) }
}

/// Reads a delta through, for the bytes that it writes.
fn coverage<R: Read>(reader: &mut Reader<R>) -> Result<Extents> {
    let mut covered = Extents::new();
    while let Some(event) = reader.next()? {
        if let Event::Frame(frame) = event {
            covered.extend(frame.records.iter().map(|r| r.offset()..r.end()));
        }
    }
    Ok(covered)
}

/// The header of both in one.
fn join(first: &Header, second: &Header) -> Result<Header> {
    let refuse = |which, why| Err(Error::Uncombinable { which, why });
    if first.source != second.source {
        return Err(Error::Sources { first: first.source, second: second.source });
    }
    if first.batch {
        return refuse("first", "is a batch of a mirror and ends within an epoch");
    }
    if first.partial {
        return refuse("first", "mends a part of one replica");
    }
    if first.method == Method::Rolling {
        return refuse("first", "may copy within the replica");
    }
    if second.method != Method::Tracked || second.binds.is_some() {
        return refuse("second", "was not tracked and fits one replica only");
    }
    for (which, header) in [("first", first), ("second", second)] {
        if header.resumes.is_some() {
            return refuse(which, "continues an interrupted one");
        }
    }
    let (Some(&to), Some(&begins), Some(&ends)) = (first.to(), second.chain.first(), second.to()) else {
        return Err(Error::Header { why: "its chain of epochs is empty" });
    };
    let Some(at) = second.position(&to) else {
        return Err(Error::Apart { to, begins, ends });
    };
    // Further on in its chain the second does not say which size it expects.
    if at == 0 && first.size_after != second.size_before {
        return refuse("second", "starts with another disk size than the first ends with");
    }
    let mut chain = first.chain.clone();
    if first.binds.is_some() || first.is_seed() {
        chain.clear();
        chain.push(ends);
    } else {
        chain.extend(&second.chain[at + 1..]);
    }
    if chain.len() > MAX_CHAIN {
        // The earliest position is the one that the first was asked for.
        chain.drain(1..chain.len() - MAX_CHAIN + 1);
    }
    Ok(Header {
        stream: Uuid::new_v4(),
        source: first.source,
        chain,
        size_before: first.size_before,
        size_after: second.size_after,
        block_size: first.block_size.min(second.block_size),
        method: first.method,
        binds: first.binds,
        resumes: None,
        fuzzy: first.fuzzy || second.fuzzy,
        batch: false,
        partial: false,
    })
}

/// The runs of bytes that a delta writes, one by one, without what is hidden.
struct Feed<'a, R> {
    which: &'static str,
    reader: Reader<R>,
    hidden: Peekable<extents::Iter<'a>>,
    frame: Frame,
    /// The record in the frame, how far into it, and where its data is.
    record: usize,
    within: u64,
    data: usize,
}

impl<'a, R: Read> Feed<'a, R> {
    fn new(which: &'static str, reader: Reader<R>, hidden: &'a Extents) -> Self {
        let hidden = hidden.iter().peekable();
        Feed { which, reader, hidden, frame: Frame::default(), record: 0, within: 0, data: 0 }
    }

    /// The next run; `None` after a trailer in order.
    fn next(&mut self) -> Result<Option<Range<u64>>> {
        loop {
            let Some(record) = self.frame.records.get(self.record) else {
                match self.reader.next().map_err(|e| of(self.which, e))? {
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
            while self.hidden.next_if(|h| h.end <= start).is_some() {}
            match self.hidden.peek() {
                Some(h) if h.start <= start => {
                    let skip = h.end.min(end) - start;
                    self.advance(skip);
                }
                Some(h) => return Ok(Some(start..end.min(h.start))),
                None => return Ok(Some(start..end)),
            }
        }
    }

    /// Hands the next run over.
    fn give<W: Write>(&mut self, packer: &mut Packer<'_, W>) -> Result<()> {
        if let Some(run) = self.next()? {
            let len = run.end - run.start;
            let data = match self.frame.records[self.record] {
                Record::Data { .. } => Some(&self.frame.data[self.data..self.data + len as usize]),
                Record::Zero { .. } => None,
                Record::Unsure { .. } => {
                    packer.record(Record::Unsure { offset: run.start, len })?;
                    self.advance(len);
                    return Ok(());
                }
                // Not in a delta of any method that came so far; for those who change that.
                Record::Copy { .. } => {
                    let why = "copies within the replica";
                    return Err(Error::Uncombinable { which: self.which, why });
                }
            };
            packer.add(run, data)?;
            self.advance(len);
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

/// Fills frames with runs.
struct Packer<'a, W> {
    encoder: Encoder,
    out: &'a mut Writer<W>,
    frame: Frame,
}

impl<W: Write> Packer<'_, W> {
    /// Adds bytes of data, or zeroes.
    fn add(&mut self, run: Range<u64>, data: Option<&[u8]>) -> Result<()> {
        let Some(mut data) = data else {
            self.record(Record::Zero { offset: run.start, len: run.end - run.start })?;
            return Ok(());
        };
        let mut offset = run.start;
        while !data.is_empty() {
            let room = MAX_DATA - self.frame.data.len();
            // Runs are kept whole unless that would leave frames half empty.
            let take = if data.len() <= room { data.len() } else { room & !(64 * 1024 - 1) };
            if take == 0 {
                self.flush()?;
                continue;
            }
            // First the record: it may need a new frame.
            self.record(Record::Data { offset, len: take as u64 })?;
            let at = self.frame.data.len();
            if self.frame.data.capacity() < MAX_DATA {
                self.frame.data = Buf::scratch(MAX_DATA);
            }
            self.frame.data.set_len(at + take);
            self.frame.data[at..].copy_from_slice(&data[..take]);
            data = &data[take..];
            offset += take as u64;
        }
        Ok(())
    }

    /// Adds a record, to the one before if it goes on from there.
    fn record(&mut self, record: Record) -> Result<()> {
        if self.frame.records.last_mut().is_some_and(|last| last.extend(record)) {
            return Ok(());
        }
        if self.frame.records.len() == MAX_RECORDS {
            self.flush()?;
        }
        self.frame.records.push(record);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if !self.frame.records.is_empty() {
            let unit = self.encoder.frame(std::mem::take(&mut self.frame))?;
            self.out.unit(&unit)?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Totals> {
        self.flush()?;
        let totals = self.encoder.totals();
        self.out.unit(&self.encoder.trailer())?;
        Ok(totals)
    }
}
