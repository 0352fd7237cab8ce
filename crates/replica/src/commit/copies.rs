//! Carrying copies out: what they copy is read ahead and checked, and they become data. What comes out is in the delta's
//! order, each frame once everything that it and those before it copy has been read: a caller that writes it at once overwrites
//! nothing that an earlier copy still needs.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Frame, MAX_DATA, Record};
use device::{Buf, Disk, Piece, Pieces, Queue, Request, RequestKind, Sharing};
use twox_hash::XxHash3_128;

/// Operations kept on their way.
const DEPTH: u32 = 64;
/// Bytes read ahead.
const AHEAD: usize = 8 << 20;
/// Copies that are read with one request.
const MOST_PIECES: usize = 1024;

/// Why a copy could not be made.
pub(crate) enum CopyError {
    /// The disk's reason.
    Disk(io::Error),
    /// The source of the copy has other content.
    Other { offset: u64, from: u64 },
}

/// A frame on its way out.
struct Job {
    /// The records as they came in.
    records: Vec<Record>,
    /// `None` while it is read.
    data: Option<Buf>,
}

/// Turns copies into data.
pub(crate) struct Copies {
    disk: Arc<dyn Disk>,
    queue: Box<dyn Queue>,
    jobs: VecDeque<Job>,
    /// The token of the first job.
    first: u64,
    /// How many of the first jobs are read or on their way.
    begun: usize,
    /// Bytes of the jobs that are read or on their way.
    bytes: usize,
    /// Lets the place that is written to share what is copied.
    sharing: Option<Sharing>,
    /// A read has failed: its frame never comes.
    failed: bool,
    /// Bytes read so far.
    pub read: u64,
}

impl Copies {
    /// Copies of what `disk` holds.
    pub(crate) fn new(disk: &Arc<dyn Disk>) -> io::Result<Copies> {
        let queue = disk.clone().queue(DEPTH)?;
        let (disk, jobs) = (disk.clone(), VecDeque::new());
        Ok(Copies { disk, queue, jobs, first: 0, begun: 0, bytes: 0, sharing: None, failed: false, read: 0 })
    }

    /// Lets `sharing` share what can be shared, which remains a copy in the frames that come out: carried out already.
    pub(crate) fn sharing(self, sharing: Option<Sharing>) -> Copies {
        Copies { sharing, ..self }
    }

    /// Takes a frame.
    pub(crate) fn push(&mut self, frame: Frame) {
        let Frame { records, data } = frame;
        let copies = |record: &Record| matches!(record, Record::Copy { .. });
        if !records.iter().any(copies) {
            self.jobs.push_back(Job { records, data: Some(data) });
            return self.ahead();
        }
        let mut at = 0;
        for run in records.chunk_by(|a, b| copies(a) == copies(b)) {
            if !run.first().is_some_and(copies) {
                let len: u64 =
                    run.iter().map(|r| if let Record::Data { len, .. } = r { *len } else { 0 }).sum();
                let end = at + len as usize;
                self.jobs.push_back(Job { records: run.to_vec(), data: Some(Buf::from(&data[at..end])) });
                at = end;
                continue;
            }
            let mut run = run;
            while !run.is_empty() {
                // No more than one frame's data at a time.
                let mut bytes = 0;
                let count = run.iter().take(MOST_PIECES).take_while(|r| {
                    bytes += r.len();
                    bytes <= MAX_DATA as u64
                });
                let (now, later) = run.split_at(count.count().max(1));
                self.jobs.push_back(Job { records: now.to_vec(), data: None });
                run = later;
            }
        }
        self.ahead();
    }

    /// Begins jobs as far as the bound allows, one at least.
    fn ahead(&mut self) {
        while self.begun < self.jobs.len() && (self.begun == 0 || self.bytes < AHEAD) {
            self.begin();
        }
        self.queue.start();
    }

    /// Begins the next job.
    fn begin(&mut self) {
        let Some(job) = self.jobs.get_mut(self.begun) else { return };
        let token = self.first + self.begun as u64;
        self.begun += 1;
        if let Some(data) = &job.data {
            self.bytes += data.len();
            return;
        }
        let mut pieces: Pieces = Pieces::with_capacity(job.records.len());
        for record in &job.records {
            let Record::Copy { from, len, .. } = *record else { continue };
            match pieces.last_mut() {
                Some(last) if last.offset.checked_add(last.len) == Some(from) => last.len += len,
                _ => pieces.push(Piece { offset: from, len }),
            }
        }
        let mut buf = Buf::scratch(pieces.iter().map(|piece| piece.len as usize).sum());
        self.bytes += buf.len();
        self.read += buf.len() as u64;
        if cached(&*self.disk, &pieces, &mut buf) {
            job.data = Some(buf);
        } else {
            self.queue.submit(Request { kind: RequestKind::Read, pieces, buf, token });
        }
    }

    /// The next frame: without waiting while little is read ahead, unless `all` is wanted.
    pub(crate) fn next(&mut self, all: bool) -> Result<Option<Frame>, CopyError> {
        self.ahead();
        while self.jobs.front().is_some_and(|job| job.data.is_none()) {
            let wait = all || self.begun < self.jobs.len();
            let Some(done) = self.queue.complete(wait) else {
                // What failed is not on its way any more, and must not be taken for what has not come yet.
                let lost = || CopyError::Disk(io::Error::other("an earlier read has failed"));
                return if self.failed { Err(lost()) } else { Ok(None) };
            };
            self.failed |= done.result.is_err();
            done.result.map_err(CopyError::Disk)?;
            let at = done.request.token.wrapping_sub(self.first) as usize;
            if let Some(job) = self.jobs.get_mut(at) {
                job.data = Some(done.request.buf);
            }
        }
        let Some(Job { records, data: Some(data) }) = self.jobs.pop_front() else { return Ok(None) };
        self.first += 1;
        self.begun -= 1;
        self.bytes -= data.len();
        let mut at = 0;
        let mut out: Vec<Record> = Vec::with_capacity(records.len());
        // What of the data is shared, ascending.
        let mut shared: Vec<Range<usize>> = Vec::new();
        for record in records {
            let dataless = matches!(record, Record::Zero { .. } | Record::Unsure { .. });
            let len = if dataless { 0 } else { record.len() as usize };
            if let Record::Copy { offset, from, hash, .. } = record {
                if data.get(at..at + len).map(XxHash3_128::oneshot) != Some(u128::from_le_bytes(hash)) {
                    return Err(CopyError::Other { offset, from });
                }
                let part = self.share(offset..record.end(), from);
                for (start, end) in [(offset, part.start), (part.end, record.end())] {
                    if start < end {
                        out.push(Record::Data { offset: start, len: end - start });
                    }
                    if start == offset && !part.is_empty() {
                        let (from, len) = (from + (part.start - offset), part.end - part.start);
                        let begin = at + (part.start - offset) as usize;
                        shared.push(begin..begin + len as usize);
                        out.push(Record::Copy { offset: part.start, len, from, hash });
                    }
                }
            } else {
                out.push(record);
            }
            at += len;
        }
        Ok(Some(Frame { records: out, data: without(data, &shared) }))
    }

    /// Shares of a copy what can be shared, and returns that; nothing more is tried where the file system cannot.
    fn share(&mut self, range: Range<u64>, from: u64) -> Range<u64> {
        let nothing = range.end..range.end;
        let Some(sharing) = &self.sharing else { return nothing };
        let part = sharing.part(range.clone(), from);
        if part.is_empty() {
            return nothing;
        }
        match sharing.share(part.clone(), from + (part.start - range.start)) {
            Ok(()) => part,
            Err(_) => {
                self.sharing = None;
                nothing
            }
        }
    }
}

/// Data without some parts of it, ascending.
fn without(data: Buf, parts: &[Range<usize>]) -> Buf {
    if parts.is_empty() {
        return data;
    }
    let mut rest = Buf::scratch(data.len() - parts.iter().map(Range::len).sum::<usize>());
    let (mut from, mut to) = (0, 0);
    for (start, end) in parts.iter().map(|part| (part.start, part.end)).chain([(data.len(), data.len())]) {
        rest[to..to + (start - from)].copy_from_slice(&data[from..start]);
        (from, to) = (end, to + (start - from));
    }
    rest
}

/// Reads pieces if memory has all of them.
fn cached(disk: &dyn Disk, pieces: &Pieces, buf: &mut Buf) -> bool {
    let mut at = 0;
    pieces.iter().all(|piece| {
        let end = at + piece.len as usize;
        disk.read_cached(piece.offset, &mut buf[std::mem::replace(&mut at, end)..end])
    })
}

/// What a delta has written so far whose records are in no order: no byte may be written twice, or what it copies would depend on
/// when.
#[derive(Default)]
pub(crate) struct WrittenRanges(BTreeMap<u64, u64>);

/// The most separate places that one delta may write to: some 150 MB of them. It is enough for every second block of a disk
/// of 1 TiB.
const MOST_PLACES: usize = 1 << 22;

impl WrittenRanges {
    /// Notes a record's bytes.
    ///
    /// # Errors
    /// What is wrong, if one of them was written before, or there are too many places.
    pub(crate) fn add(&mut self, record: &Record) -> Result<(), String> {
        self.add_within(record, MOST_PLACES)
    }

    fn add_within(&mut self, record: &Record, most: usize) -> Result<(), String> {
        let (mut start, mut end) = (record.offset(), record.end());
        if let Some((&before, &stop)) = self.0.range(..end).next_back() {
            if stop > start {
                return Err(format!("it writes byte {start} twice"));
            }
            if stop == start {
                start = before;
            }
        }
        if let Some(stop) = self.0.remove(&end) {
            end = stop;
        }
        self.0.insert(start, end);
        if self.0.len() > most {
            return Err(format!("it writes to more than {most} separate places: pass --commit journal"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_is_written_once() {
        let mut written = WrittenRanges::default();
        let data = |offset, len| Record::Data { offset, len };
        for (offset, len, fine) in [
            (10, 10, true),
            (20, 5, true),
            (0, 10, true),
            (24, 1, false),
            (25, 1, true),
            (9, 2, false),
            (0, 100, false),
            (100, 10, true),
            (90, 11, false),
            (26, 74, true),
            (50, 1, false),
            (110, 1, true),
        ] {
            assert_eq!(written.add(&data(offset, len)).is_ok(), fine, "{offset} {len}");
        }
        assert_eq!(written.0.len(), 1);
        // What is told of memory by one who only says where it writes is bounded.
        let mut written = WrittenRanges::default();
        let all = (0..2000).take_while(|n| written.add_within(&data(n * 2, 1), 1000).is_ok()).count();
        assert_eq!(all, 1000);
        assert!(written.add_within(&data(1 << 40, 1), 1000).unwrap_err().contains("separate places"));
    }

    #[test]
    fn copies_become_data_in_order() {
        let bytes: Vec<u8> = (0..3 << 20).map(|n: u32| (n % 253) as u8).collect();
        let disk: Arc<dyn Disk> = Arc::new(device::RamDisk::from_bytes(&bytes));
        let copy = |offset: u64, from: u64, len: u64| {
            let hash = XxHash3_128::oneshot(&bytes[from as usize..(from + len) as usize]).to_le_bytes();
            Record::Copy { offset, len, from, hash }
        };
        let records = vec![
            copy(900, 0, 1 << 20),
            copy(5, 77, 3),
            copy(2000, 80, 1 << 20),
            Record::Data { offset: 3, len: 2 },
            Record::Zero { offset: 1 << 40, len: 1 << 50 },
            Record::Data { offset: 0, len: 1 },
            copy(7, 1, 1),
        ];
        let mut copies = Copies::new(&disk).unwrap();
        copies.push(Frame { records: records.clone(), data: Buf::from(&[1, 2, 3][..]) });
        let mut out = Vec::new();
        while let Ok(Some(frame)) = copies.next(true) {
            let mut at = 0;
            for record in frame.records {
                if let Record::Data { offset, len } = record {
                    out.push((offset, frame.data[at..at + len as usize].to_vec()));
                    at += len as usize;
                } else {
                    out.push((record.offset(), vec![]));
                }
            }
            assert!(at == frame.data.len() && at <= MAX_DATA);
        }
        let offsets: Vec<u64> = out.iter().map(|(offset, _)| *offset).collect();
        assert_eq!(offsets, records.iter().map(Record::offset).collect::<Vec<_>>());
        assert_eq!(out[1].1, bytes[77..80]);
        assert_eq!((&out[3].1[..], &out[5].1[..], &out[6].1[..]), (&[1, 2][..], &[3][..], &[1][..]));

        let lie = Record::Copy { offset: 4, len: 9, from: 100, hash: [0; 16] };
        copies.push(Frame { records: vec![lie], data: Buf::default() });
        assert!(matches!(copies.next(true), Err(CopyError::Other { offset: 4, from: 100 })));
        let far = Record::Copy { offset: 4, len: 9, from: 1 << 62, hash: [0; 16] };
        let mut copies = Copies::new(&disk).unwrap();
        copies.push(Frame { records: vec![far], data: Buf::default() });
        assert!(matches!(copies.next(true), Err(CopyError::Disk(_))));
    }
}
