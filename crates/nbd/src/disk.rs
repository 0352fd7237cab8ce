//! An export of an NBD server as a disk.
//!
//! One connection carries all requests: over several, a flush covers what the others wrote only where the server promises it, and
//! requests of many threads fill one. When it breaks, the disk is gone for good: what was written since the last flush may be lost, and
//! whoever writes must begin again from what it knows to be durable.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use device::{Disk, ExportUri, NbdServer, Queue, ThreadQueue};

use crate::client::{
    ALLOCATION, Address, BLOCK_STATUS, Dialed, FAST_ZERO, FLUSH, FUA, NO_HOLE, Order, READ, TRIM, WRITE,
    ZERO, ZEROES,
};
use crate::connection::Connection;
use crate::protocol::CMD_FLAG_REQ_ONE;

const READ_ONLY: u16 = 1 << 1;
const SEND_FLUSH: u16 = 1 << 2;
const SEND_FUA: u16 = 1 << 3;
const SEND_TRIM: u16 = 1 << 5;
const SEND_ZEROES: u16 = 1 << 6;
const SEND_FAST_ZERO: u16 = 1 << 11;

/// Bytes of one request at most: servers need not take more.
const MOST: u64 = 32 << 20;
/// Bytes that one block status asks about.
const STATUS: u64 = 1 << 30;
/// Bytes that are written where the server cannot make zeroes.
const ZEROS: u64 = 1 << 20;

/// An export of an NBD server. Any offset and length works; those that are multiples of the server's minimum block are passed on as
/// they are.
pub struct NbdDisk {
    connection: Connection,
    size: u64,
    flags: u16,
    /// Minimum block, and bytes of one payload at most.
    block: u64,
    most: u64,
    /// The ids of the contexts that were asked for, where the server has them.
    contexts: HashMap<String, u32>,
    /// Counts changes through this disk, at their begin and end.
    changes: AtomicU64,
    /// Others write to the disk as well: what the server has said of it holds no longer than it takes to answer.
    beside_writers: bool,
    map: Mutex<Map>,
    /// Held while a part of a block is changed.
    edges: Mutex<()>,
}

/// What a server has said of a part of the export.
#[derive(Default)]
struct Map {
    /// The changes before it was asked: after others it says nothing.
    changes: u64,
    covered: Range<u64>,
    /// What there does not read as zeroes, in order.
    data: Vec<Range<u64>>,
}

/// Holds the mutex, of a thread that panicked too: nothing is left half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

fn bad(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl NbdDisk {
    /// Connects to an export.
    ///
    /// # Errors
    /// If the server cannot be reached, has no such export, or one whose size or block sizes make no sense.
    pub fn connect(address: &Address, export: &str) -> io::Result<NbdDisk> {
        NbdDisk::with(address, export, None)
    }

    fn with(address: &Address, export: &str, context: Option<&str>) -> io::Result<NbdDisk> {
        let contexts: Vec<&str> = [ALLOCATION].into_iter().chain(context).collect();
        let dialed = Dialed::new(address, export, &contexts)?;
        let size = dialed.size;
        let (block, _, most) = dialed.block_sizes.unwrap_or((1, 4096, MOST as u32));
        if !block.is_power_of_two() || block > 1 << 16 || most < block {
            return Err(bad(format!("the server names impossible block sizes: {block} to {most} bytes")));
        }
        let (block, most) = (u64::from(block), u64::from(most).min(MOST));
        if i64::try_from(size).is_err() || size % block != 0 {
            return Err(bad(format!(
                "the server names an impossible size: {size} bytes in blocks of {block}"
            )));
        }
        Ok(NbdDisk {
            size,
            flags: dialed.flags,
            block,
            most: most / block * block,
            contexts: dialed.contexts,
            connection: Connection::new(dialed.input, dialed.output),
            changes: AtomicU64::new(1),
            beside_writers: false,
            map: Mutex::default(),
            edges: Mutex::default(),
        })
    }

    /// A disk to which others write meanwhile.
    pub fn beside_writers(mut self) -> NbdDisk {
        self.beside_writers = true;
        self
    }

    /// Connects to the export at a URI, with a metadata context for [`NbdDisk::marked`].
    ///
    /// # Errors
    /// As [`NbdDisk::connect`].
    pub fn open(uri: &ExportUri, context: Option<&str>) -> io::Result<NbdDisk> {
        let address = match &uri.server {
            NbdServer::Unix(socket) => Address::Unix(socket.clone()),
            NbdServer::Tcp(host, port) if host.contains(':') => Address::Tcp(format!("[{host}]:{port}")),
            NbdServer::Tcp(host, port) => Address::Tcp(format!("{host}:{port}")),
        };
        NbdDisk::with(&address, &uri.export, context)
    }

    /// Calls `mark` for each range, ascending, to which a context gives any flag, such as what is dirty in a bitmap of QEMU. What the server
    /// does not say is an error, and never clean.
    ///
    /// # Errors
    /// `NotFound` if the server has not granted the context.
    pub fn marked(&self, context: &str, mut mark: impl FnMut(Range<u64>)) -> io::Result<()> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, format!("the server has no {context}"));
        let id = *self.contexts.get(context).ok_or_else(missing)?;
        let mut at = 0;
        while at < self.size {
            for (range, flags) in self.status(at, id)? {
                at = range.end;
                if flags != 0 {
                    mark(range);
                }
            }
        }
        Ok(())
    }

    /// True if the server takes no writes to this export.
    pub fn is_read_only(&self) -> bool {
        self.has(READ_ONLY)
    }

    /// True if the server can make writes durable.
    pub fn can_flush(&self) -> bool {
        self.has(SEND_FLUSH)
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// The parts of a range, in order: whole blocks, and what is less than one at its ends (true).
    fn parts(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, bool)> {
        let first = range.start.next_multiple_of(self.block).min(range.end);
        let last = (range.end / self.block * self.block).max(first);
        let parts = [(range.start..first, true), (first..last, false), (last..range.end, true)];
        parts.into_iter().filter(|(part, _)| !part.is_empty())
    }

    /// The block in which a part of one lies.
    fn around(&self, part: &Range<u64>) -> (u64, Vec<u8>, Range<usize>) {
        let start = part.start / self.block * self.block;
        let within = (part.start - start) as usize..(part.end - start) as usize;
        (start, vec![0; self.block as usize], within)
    }

    fn get(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        for (at, part) in (offset..).step_by(self.most as usize).zip(buf.chunks_mut(self.most as usize)) {
            let order = Order { kind: READ, flags: 0, offset: at, len: part.len() as u32 };
            self.connection.ask(order, &[], part)?;
        }
        Ok(())
    }

    fn put(&self, offset: u64, buf: &[u8], flags: u16) -> io::Result<()> {
        for (at, part) in (offset..).step_by(self.most as usize).zip(buf.chunks(self.most as usize)) {
            let order = Order { kind: WRITE, flags, offset: at, len: part.len() as u32 };
            self.connection.ask(order, part, &mut [])?;
        }
        Ok(())
    }

    /// Changes a part of a block.
    fn patch(&self, part: &Range<u64>, flags: u16, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
        let _edges = lock(&self.edges);
        let (start, mut block, within) = self.around(part);
        self.get(start, &mut block)?;
        change(&mut block[within]);
        self.put(start, &block, flags)
    }

    /// Sends requests without payload for whole blocks.
    fn each(&self, kind: u16, flags: u16, range: Range<u64>) -> io::Result<()> {
        for offset in range.clone().step_by(MOST as usize) {
            let len = MOST.min(range.end - offset) as u32;
            self.connection.ask(Order { kind, flags, offset, len }, &[], &mut [])?;
        }
        Ok(())
    }

    fn zero_blocks(&self, range: Range<u64>, unmap: bool, fast: bool) -> io::Result<()> {
        let hole = if unmap { 0 } else { NO_HOLE };
        if fast {
            // Without the flag the server would not tell whether it is fast.
            return match self.has(SEND_ZEROES) && self.has(SEND_FAST_ZERO) {
                true => self.each(ZEROES, hole | FAST_ZERO, range),
                false => Err(io::ErrorKind::Unsupported.into()),
            };
        }
        if self.has(SEND_ZEROES) {
            match self.each(ZEROES, hole, range.clone()) {
                // Some servers offer the command, and cannot do it on every disk.
                Err(e) if matches!(e.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput) => {}
                done => return done,
            }
        }
        let zeroes = vec![0; ZEROS.min(range.end - range.start) as usize];
        for offset in range.clone().step_by(ZEROS as usize) {
            self.put(offset, &zeroes[..ZEROS.min(range.end - offset) as usize], 0)?;
        }
        Ok(())
    }

    /// A range that a change may touch; refused otherwise.
    fn changed(&self, offset: u64, len: u64) -> io::Result<Range<u64>> {
        if self.is_read_only() {
            return Err(self.read_only());
        }
        self.within(offset, len, io::ErrorKind::InvalidInput)
    }

    fn within(&self, offset: u64, len: u64, kind: io::ErrorKind) -> io::Result<Range<u64>> {
        let end = offset.checked_add(len).filter(|end| *end <= self.size);
        let text = || format!("{len} bytes at {offset} are not within the export's {} bytes", self.size);
        end.map(|end| offset..end).ok_or_else(|| io::Error::new(kind, text()))
    }

    /// Makes a change, after which what is known of the allocation is no longer.
    fn change<T>(&self, change: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.changes.fetch_add(1, Ordering::SeqCst);
        let result = change();
        self.changes.fetch_add(1, Ordering::SeqCst);
        result
    }

    fn write(&self, offset: u64, buf: &[u8], flags: u16) -> io::Result<()> {
        let range = self.changed(offset, buf.len() as u64)?;
        self.change(|| {
            for (part, partial) in self.parts(range) {
                let bytes = &buf[(part.start - offset) as usize..(part.end - offset) as usize];
                match partial {
                    true => self.patch(&part, flags, |block| block.copy_from_slice(bytes))?,
                    false => self.put(part.start, bytes, flags)?,
                }
            }
            Ok(())
        })
    }

    /// Asks the server for the flags of the ranges at `from` and behind it. They follow one another from the block of `from`, and go beyond it.
    fn status(&self, from: u64, context: u32) -> io::Result<Vec<(Range<u64>, u32)>> {
        let start = from / self.block * self.block;
        let len = STATUS.min(self.size - start) as u32;
        // Then no more is used of the answer.
        let flags = if self.beside_writers { CMD_FLAG_REQ_ONE } else { 0 };
        let order = Order { kind: BLOCK_STATUS, flags, offset: start, len };
        let mut arrived = self.connection.ask(order, &[], &mut [])?;
        let (mut at, mut ranges) = (start, Vec::new());
        for (len, flags) in arrived.status.remove(&context).unwrap_or_default() {
            let end = (at + u64::from(len)).min(self.size);
            ranges.push((at..end, flags));
            at = end;
        }
        if at <= from {
            return Err(bad("the server's block status covers nothing".into()));
        }
        Ok(ranges)
    }

    /// Asks the server what is at `from` and behind it.
    fn ask_map(&self, from: u64, context: u32) -> io::Result<Map> {
        let changes = self.changes.load(Ordering::SeqCst);
        let ranges = self.status(from, context)?;
        let start = ranges.first().map_or(from, |(first, _)| first.start);
        let covered = start..ranges.last().map_or(from, |(last, _)| last.end);
        let mut data = Vec::<Range<u64>>::new();
        for (range, _) in ranges.into_iter().filter(|(_, flags)| flags & ZERO == 0) {
            match data.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => data.push(range),
            }
        }
        Ok(Map { changes, covered, data })
    }
}

impl Drop for NbdDisk {
    fn drop(&mut self) {
        self.connection.close();
    }
}

impl Disk for NbdDisk {
    fn len(&self) -> u64 {
        self.size
    }

    fn align(&self) -> u32 {
        self.block as u32
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = self.within(offset, buf.len() as u64, io::ErrorKind::UnexpectedEof)?;
        for (part, partial) in self.parts(range) {
            let bytes = &mut buf[(part.start - offset) as usize..(part.end - offset) as usize];
            if partial {
                let (start, mut block, within) = self.around(&part);
                self.get(start, &mut block)?;
                bytes.copy_from_slice(&block[within]);
            } else {
                self.get(part.start, bytes)?;
            }
        }
        Ok(())
    }

    fn read_only(&self) -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, "the NBD server exports it read-only")
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write(offset, buf, 0)
    }

    fn write_through(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        if self.has(SEND_FUA) {
            return self.write(offset, buf, FUA);
        }
        self.write(offset, buf, 0)?;
        self.flush()
    }

    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        let range = self.changed(offset, len)?;
        self.change(|| {
            self.parts(range).try_for_each(|(part, partial)| match partial {
                true => self.patch(&part, 0, |block| block.fill(0)),
                false => self.zero_blocks(part, unmap, fast),
            })
        })
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let range = self.changed(offset, len)?;
        if !self.has(SEND_TRIM) {
            return Ok(());
        }
        self.change(|| {
            let mut whole = self.parts(range).filter(|(_, partial)| !partial);
            whole.try_for_each(|(part, _)| self.each(TRIM, 0, part))
        })
    }

    fn flush(&self) -> io::Result<()> {
        if self.is_read_only() {
            return Ok(());
        }
        if !self.can_flush() {
            let text = "the NBD server cannot make writes durable: it offers no flush";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        self.connection.ask(Order { kind: FLUSH, flags: 0, offset: 0, len: 0 }, &[], &mut []).map(drop)
    }

    fn allocated(&self, mut from: u64) -> io::Result<Option<Range<u64>>> {
        let Some(&context) = self.contexts.get(ALLOCATION) else {
            return Ok((from < self.size).then_some(from..self.size));
        };
        while from < self.size {
            let mut map = lock(&self.map);
            let is_known = map.covered.contains(&from) && map.changes == self.changes.load(Ordering::SeqCst);
            if self.beside_writers || !is_known {
                drop(map);
                let asked = self.ask_map(from, context)?;
                map = lock(&self.map);
                *map = asked;
            }
            let next = map.data.partition_point(|data| data.end <= from);
            if let Some(data) = map.data.get(next) {
                return Ok(Some(data.start.max(from)..data.end));
            }
            from = map.covered.end;
        }
        Ok(None)
    }

    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(ThreadQueue::new(Arc::new(move |request| request.run(&*self)), depth)?))
    }
}
