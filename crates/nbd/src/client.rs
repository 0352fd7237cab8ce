//! A small NBD client: fixed newstyle, structured replies, meta contexts, requests in flight as many as the caller
//! starts. It shares no code with the server, so that both cannot be wrong in the same way.
//!
//! [`Client`] is for one thread, and shows the protocol as it is. [`crate::NbdDisk`] is an export as a disk.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::path::Path;

mod dial;
mod wire;

pub use dial::{Address, hold_connections, list};
pub(crate) use dial::{ByteStream, Dialed};
pub(crate) use wire::{
    Arrived, BLOCK_STATUS, DISCONNECT, FLUSH, Order, READ, ReplyHead, TRIM, WRITE, ZEROES, error_of,
};

/// Command flag: durable when answered.
pub const FUA: u16 = 1;
/// Command flag of write-zeroes: do not punch a hole.
pub const NO_HOLE: u16 = 2;
/// Command flag of write-zeroes: fail with ENOTSUP rather than be slow.
pub const FAST_ZERO: u16 = 16;

/// Status flag of `base:allocation`: not allocated.
pub const HOLE: u32 = 1;
/// Status flag of `base:allocation`: reads as zeroes.
pub const ZERO: u32 = 2;
/// The context of the dirty bitmap.
pub const DIRTY: &str = "qemu:dirty-bitmap:dsync";
/// The context of allocation.
pub const ALLOCATION: &str = "base:allocation";

/// What a request does.
#[derive(Debug, Clone)]
pub enum NbdCommand {
    /// Read `len` bytes.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Write these bytes.
    Write {
        /// First byte.
        offset: u64,
        /// The content.
        data: Vec<u8>,
        /// Command flags, as [`FUA`].
        flags: u16,
    },
    /// Make a range zero.
    Zero {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Command flags, as [`NO_HOLE`].
        flags: u16,
    },
    /// Trim a range.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Make durable what was answered.
    Flush,
}

/// The answer to a request.
#[derive(Debug, Default)]
pub struct Reply {
    /// The cookie that [`Client::start`] returned.
    pub cookie: u64,
    /// NBD's error number; zero is success.
    pub error: u32,
    /// What was read.
    pub data: Vec<u8>,
    /// Per context id: lengths and flags.
    pub status: HashMap<u32, Vec<(u32, u32)>>,
}

/// A connection to one export.
pub struct Client {
    input: BufReader<Box<dyn ByteStream>>,
    output: Box<dyn ByteStream>,
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Minimum, preferred and maximum block size, where the server names them.
    pub block_sizes: Option<(u32, u32, u32)>,
    contexts: HashMap<String, u32>,
    next: u64,
    /// Per request in flight: the offset, the buffer of a read, and what else has arrived.
    pending: HashMap<u64, (u64, Vec<u8>, Arrived)>,
}

fn bad(what: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

fn array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u16(from: &mut impl Read) -> io::Result<u16> {
    Ok(u16::from_be_bytes(array(from)?))
}

fn u32(from: &mut impl Read) -> io::Result<u32> {
    Ok(u32::from_be_bytes(array(from)?))
}

fn u64(from: &mut impl Read) -> io::Result<u64> {
    Ok(u64::from_be_bytes(array(from)?))
}

fn bytes(from: &mut impl Read, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

impl Client {
    /// Connects to an export, with the contexts of allocation and of the dirty bitmap where the server has them.
    pub fn connect(address: &Address, export: &str) -> io::Result<Client> {
        Client::connect_with(address, export, &[ALLOCATION, DIRTY])
    }

    /// Connects to an export and requests these contexts. Those that the server lacks are omitted.
    pub fn connect_with(address: &Address, export: &str, contexts: &[&str]) -> io::Result<Client> {
        let Dialed { input, output, size, flags, block_sizes, contexts, .. } =
            Dialed::new(address, export, contexts)?;
        Ok(Client { input, output, size, flags, block_sizes, contexts, next: 1, pending: HashMap::new() })
    }

    /// True if the server granted a context.
    pub fn has(&self, context: &str) -> bool {
        self.contexts.contains_key(context)
    }

    /// Sends a request and returns its cookie.
    pub fn start(&mut self, command: &NbdCommand) -> io::Result<u64> {
        let (kind, flags, offset, len, data): (_, _, _, _, &[u8]) = match command {
            NbdCommand::Read { offset, len } => (READ, 0, *offset, *len, &[]),
            NbdCommand::Write { offset, data, flags } => (WRITE, *flags, *offset, data.len() as u32, data),
            NbdCommand::Zero { offset, len, flags } => (ZEROES, *flags, *offset, *len, &[]),
            NbdCommand::Trim { offset, len } => (TRIM, 0, *offset, *len, &[]),
            NbdCommand::Flush => (FLUSH, 0, 0, 0, &[]),
        };
        self.send(Order { kind, flags, offset, len }, data)
    }

    fn send(&mut self, order: Order, data: &[u8]) -> io::Result<u64> {
        let cookie = self.next;
        self.next += 1;
        order.send(&mut self.output, cookie, data)?;
        let room = if order.kind == READ { order.len as usize } else { 0 };
        self.pending.insert(cookie, (order.offset, vec![0; room], Arrived::default()));
        Ok(cookie)
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Waits for the next request to be answered completely.
    pub fn finish(&mut self) -> io::Result<Reply> {
        loop {
            let head = ReplyHead::read(&mut self.input)?;
            let (start, data, arrived) =
                self.pending.get_mut(&head.cookie).ok_or_else(|| bad("an unknown cookie"))?;
            arrived.take(head.part, &mut self.input, *start, data)?;
            if head.last {
                arrived.check(data.len())?;
                let (_, data, Arrived { error, status, .. }) =
                    self.pending.remove(&head.cookie).unwrap_or_default();
                return Ok(Reply { cookie: head.cookie, error, data, status });
            }
        }
    }

    /// Waits until the request with this cookie is answered. Meant for a connection with nothing else in flight.
    fn only(&mut self, cookie: u64) -> io::Result<Reply> {
        loop {
            let reply = self.finish()?;
            if reply.cookie == cookie {
                return match reply.error {
                    0 => Ok(reply),
                    error => Err(error_of(error)),
                };
            }
        }
    }

    /// Does one request and waits for it.
    pub fn run(&mut self, command: NbdCommand) -> io::Result<Vec<u8>> {
        let cookie = self.start(&command)?;
        Ok(self.only(cookie)?.data)
    }

    /// Reads.
    pub fn read(&mut self, offset: u64, len: u32) -> io::Result<Vec<u8>> {
        self.run(NbdCommand::Read { offset, len })
    }

    /// Writes.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.run(NbdCommand::Write { offset, data: data.to_vec(), flags: 0 }).map(drop)
    }

    /// Makes a range zero.
    pub fn zero(&mut self, offset: u64, len: u32, flags: u16) -> io::Result<()> {
        self.run(NbdCommand::Zero { offset, len, flags }).map(drop)
    }

    /// Trims a range.
    pub fn trim(&mut self, offset: u64, len: u32) -> io::Result<()> {
        self.run(NbdCommand::Trim { offset, len }).map(drop)
    }

    /// Makes durable what was answered.
    pub fn flush(&mut self) -> io::Result<()> {
        self.run(NbdCommand::Flush).map(drop)
    }

    /// The ranges of the export in which a context's flags have a bit of `mask`.
    pub fn ranges(&mut self, context: &str, mask: u32) -> io::Result<Vec<Range<u64>>> {
        let id =
            *self.contexts.get(context).ok_or_else(|| bad(format!("the server has no context {context}")))?;
        let (mut ranges, mut at) = (Vec::<Range<u64>>::new(), 0);
        while at < self.size {
            let len = (self.size - at).min(1 << 30) as u32;
            let cookie = self.send(Order { kind: BLOCK_STATUS, flags: 0, offset: at, len }, &[])?;
            let mut reply = self.only(cookie)?;
            let extents = reply.status.remove(&id).filter(|list| !list.is_empty());
            let before = at;
            for (len, flags) in extents.ok_or_else(|| bad("no status for the context asked for"))? {
                let end = (at + u64::from(len)).min(self.size);
                if flags & mask != 0 {
                    match ranges.last_mut() {
                        Some(last) if last.end == at => last.end = end,
                        _ => ranges.push(at..end),
                    }
                }
                at = end;
            }
            if at == before {
                return Err(bad("a status that covers nothing"));
            }
        }
        Ok(ranges)
    }

    /// The ranges that the server reports dirty.
    pub fn dirty(&mut self) -> io::Result<Vec<Range<u64>>> {
        self.ranges(DIRTY, 1)
    }

    /// Copies the whole export into a sparse file.
    pub fn save(&mut self, path: &Path) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(path)?;
        file.set_len(self.size)?;
        let mut at = 0;
        while at < self.size {
            let len = (self.size - at).min(1 << 20);
            let data = self.read(at, len as u32)?;
            if data.iter().any(|b| *b != 0) {
                file.write_all_at(&data, at)?;
            }
            at += len;
        }
        Ok(())
    }

    /// Ends the connection in good order.
    pub fn close(mut self) -> io::Result<()> {
        self.send(Order { kind: DISCONNECT, flags: 0, offset: 0, len: 0 }, &[]).map(drop)
    }
}
