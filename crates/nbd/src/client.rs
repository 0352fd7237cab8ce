//! A small NBD client: fixed newstyle, structured replies, meta contexts, requests in flight as many as the caller
//! starts. It shares no code with the server, so that both cannot be wrong in the same way.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

const OPT_LIST: u32 = 3;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_SET_META_CONTEXT: u32 = 10;

const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
const REP_ERROR: u32 = 1 << 31;

const CHUNK_OFFSET_DATA: u16 = 1;
const CHUNK_OFFSET_HOLE: u16 = 2;
const CHUNK_BLOCK_STATUS: u16 = 5;
const CHUNK_ERROR: u16 = 1 << 15;
const CHUNK_DONE: u16 = 1;

const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const CMD_DISCONNECT: u16 = 2;
const CMD_FLUSH: u16 = 3;
const CMD_TRIM: u16 = 4;
const CMD_WRITE_ZEROES: u16 = 6;
const CMD_BLOCK_STATUS: u16 = 7;

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

/// Where a server listens.
#[derive(Debug, Clone)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// `HOST:PORT`.
    Tcp(String),
}

impl From<&Path> for Address {
    fn from(path: &Path) -> Address {
        Address::Unix(path.to_path_buf())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(name) => f.write_str(name),
        }
    }
}

/// What a request does.
#[derive(Debug, Clone)]
pub enum Command {
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

trait Stream: Read + Write + Send {}
impl<S: Read + Write + Send> Stream for S {}

/// A connection to one export.
pub struct Client {
    input: BufReader<Box<dyn Stream>>,
    output: Box<dyn Stream>,
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Minimum, preferred and maximum block size, where the server names them.
    pub block_sizes: Option<(u32, u32, u32)>,
    contexts: HashMap<String, u32>,
    next: u64,
    /// Per request in flight: the offset, and the buffer of a read.
    pending: HashMap<u64, (u64, Reply)>,
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

/// The handshake's state: connected, options may follow.
struct Handshake {
    input: BufReader<Box<dyn Stream>>,
    output: Box<dyn Stream>,
}

impl Handshake {
    fn begin(address: &Address) -> io::Result<Handshake> {
        // A server that hangs fails the test instead of hanging it.
        let limit = Some(Duration::from_secs(60));
        let (input, output): (Box<dyn Stream>, Box<dyn Stream>) = match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(limit)?;
                (Box::new(stream.try_clone()?), Box::new(stream))
            }
            Address::Tcp(name) => {
                let stream = TcpStream::connect(name)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(limit)?;
                (Box::new(stream.try_clone()?), Box::new(stream))
            }
        };
        let mut shake = Handshake { input: BufReader::with_capacity(1 << 18, input), output };
        if &array::<8>(&mut shake.input)? != b"NBDMAGIC" || u64(&mut shake.input)? != OPTION_MAGIC {
            return Err(bad("not an NBD newstyle server"));
        }
        let flags = u16(&mut shake.input)?;
        if flags & 1 == 0 {
            return Err(bad("the server is not fixed newstyle"));
        }
        // Fixed newstyle, and no zeroes where the server knows of that.
        shake.output.write_all(&u32::from(flags & 3).to_be_bytes())?;
        Ok(shake)
    }

    fn option(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let mut message = Vec::with_capacity(16 + data.len());
        message.extend(OPTION_MAGIC.to_be_bytes());
        message.extend(option.to_be_bytes());
        message.extend((data.len() as u32).to_be_bytes());
        message.extend(data);
        self.output.write_all(&message)
    }

    fn reply(&mut self, option: u32) -> io::Result<(u32, Vec<u8>)> {
        let magic = u64(&mut self.input)?;
        let answered = u32(&mut self.input)?;
        let kind = u32(&mut self.input)?;
        let len = u32(&mut self.input)?;
        if magic != OPTION_REPLY_MAGIC || answered != option || len > 1 << 20 {
            return Err(bad(format!("a malformed reply to option {option}")));
        }
        Ok((kind, bytes(&mut self.input, len as usize)?))
    }

    /// Sends an option and returns the replies before the acknowledgement.
    fn ask(&mut self, option: u32, data: &[u8]) -> io::Result<Vec<(u32, Vec<u8>)>> {
        self.option(option, data)?;
        let mut replies = Vec::new();
        loop {
            let (kind, content) = self.reply(option)?;
            match kind {
                REP_ACK => return Ok(replies),
                _ if kind & REP_ERROR != 0 => {
                    let text = String::from_utf8_lossy(&content).into_owned();
                    return Err(io::Error::other(format!("option {option}: error {kind:#x} {text}")));
                }
                _ => replies.push((kind, content)),
            }
        }
    }
}

fn name_field(name: &str) -> Vec<u8> {
    let mut field = (name.len() as u32).to_be_bytes().to_vec();
    field.extend(name.as_bytes());
    field
}

/// The exports a server lists.
pub fn list(address: &Address) -> io::Result<Vec<String>> {
    let mut shake = Handshake::begin(address)?;
    let replies = shake.ask(OPT_LIST, &[])?;
    let servers = replies.into_iter().filter(|(kind, _)| *kind == REP_SERVER);
    servers
        .map(|(_, content)| {
            let mut rest = &content[..];
            let len = u32(&mut rest)? as usize;
            Ok(String::from_utf8_lossy(&bytes(&mut rest, len)?).into_owned())
        })
        .collect()
}

impl Client {
    /// Connects to an export, with the contexts of allocation and of the dirty bitmap where the server has them.
    pub fn connect(address: &Address, export: &str) -> io::Result<Client> {
        Client::connect_with(address, export, &[ALLOCATION, DIRTY])
    }

    /// Connects to an export and requests these contexts. Those that the server lacks are omitted.
    pub fn connect_with(address: &Address, export: &str, contexts: &[&str]) -> io::Result<Client> {
        let mut shake = Handshake::begin(address)?;
        shake.ask(OPT_STRUCTURED_REPLY, &[])?;
        let mut ids = HashMap::new();
        if !contexts.is_empty() {
            let mut query = name_field(export);
            query.extend((contexts.len() as u32).to_be_bytes());
            contexts.iter().for_each(|context| query.extend(name_field(context)));
            for (kind, content) in shake.ask(OPT_SET_META_CONTEXT, &query)? {
                if kind == REP_META_CONTEXT && content.len() > 4 {
                    let id = u32(&mut &content[..4])?;
                    ids.insert(String::from_utf8_lossy(&content[4..]).into_owned(), id);
                }
            }
        }
        let mut go = name_field(export);
        // One information request: the block sizes.
        go.extend(1u16.to_be_bytes());
        go.extend(3u16.to_be_bytes());
        let (mut found, mut block_sizes) = (None, None);
        for (kind, content) in shake.ask(OPT_GO, &go)? {
            let mut rest = &content[..];
            if kind != REP_INFO {
                continue;
            }
            match u16(&mut rest)? {
                0 => found = Some((u64(&mut rest)?, u16(&mut rest)?)),
                3 => block_sizes = Some((u32(&mut rest)?, u32(&mut rest)?, u32(&mut rest)?)),
                _ => {}
            }
        }
        let (size, flags) = found.ok_or_else(|| bad("the server did not name the export's size"))?;
        let Handshake { input, output } = shake;
        Ok(Client {
            input,
            output,
            size,
            flags,
            block_sizes,
            contexts: ids,
            next: 1,
            pending: HashMap::new(),
        })
    }

    /// True if the server granted a context.
    pub fn has(&self, context: &str) -> bool {
        self.contexts.contains_key(context)
    }

    /// Sends a request and returns its cookie.
    pub fn start(&mut self, command: &Command) -> io::Result<u64> {
        let (kind, flags, offset, len, data): (_, _, _, _, &[u8]) = match command {
            Command::Read { offset, len } => (CMD_READ, 0, *offset, *len, &[]),
            Command::Write { offset, data, flags } => (CMD_WRITE, *flags, *offset, data.len() as u32, data),
            Command::Zero { offset, len, flags } => (CMD_WRITE_ZEROES, *flags, *offset, *len, &[]),
            Command::Trim { offset, len } => (CMD_TRIM, 0, *offset, *len, &[]),
            Command::Flush => (CMD_FLUSH, 0, 0, 0, &[]),
        };
        let room = if kind == CMD_READ { len as usize } else { 0 };
        self.send(kind, flags, offset, len, data, room)
    }

    fn send(
        &mut self,
        kind: u16,
        flags: u16,
        offset: u64,
        len: u32,
        data: &[u8],
        room: usize,
    ) -> io::Result<u64> {
        let cookie = self.next;
        self.next += 1;
        let mut message = Vec::with_capacity(28 + data.len());
        message.extend(REQUEST_MAGIC.to_be_bytes());
        message.extend(flags.to_be_bytes());
        message.extend(kind.to_be_bytes());
        message.extend(cookie.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend(len.to_be_bytes());
        message.extend(data);
        self.output.write_all(&message)?;
        let reply = Reply { cookie, data: vec![0; room], ..Reply::default() };
        self.pending.insert(cookie, (offset, reply));
        Ok(cookie)
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Waits for the next request to be answered completely.
    pub fn finish(&mut self) -> io::Result<Reply> {
        loop {
            let magic = u32(&mut self.input)?;
            if magic == SIMPLE_REPLY_MAGIC {
                let error = u32(&mut self.input)?;
                let cookie = u64(&mut self.input)?;
                let (_, mut reply) = self.pending.remove(&cookie).ok_or_else(|| bad("an unknown cookie"))?;
                reply.error = error;
                if !reply.data.is_empty() {
                    return Err(bad("a simple reply to a read, with structured replies negotiated on"));
                }
                return Ok(reply);
            }
            if magic != STRUCTURED_REPLY_MAGIC {
                return Err(bad(format!("{magic:#x} where a reply should begin")));
            }
            if let Some(reply) = self.chunk()? {
                return Ok(reply);
            }
        }
    }

    /// Takes one chunk of a structured reply; the reply if it was the last.
    fn chunk(&mut self) -> io::Result<Option<Reply>> {
        let flags = u16(&mut self.input)?;
        let kind = u16(&mut self.input)?;
        let cookie = u64(&mut self.input)?;
        let len = u32(&mut self.input)? as usize;
        let (start, reply) = self.pending.get_mut(&cookie).ok_or_else(|| bad("an unknown cookie"))?;
        let place = |offset: u64, len: usize, buf: &mut Vec<u8>| -> io::Result<Range<usize>> {
            let at = offset.checked_sub(*start).ok_or_else(|| bad("data before the request"))? as usize;
            if at + len > buf.len() {
                return Err(bad("data beyond the request"));
            }
            Ok(at..at + len)
        };
        match kind {
            CHUNK_OFFSET_DATA if len > 8 => {
                let range = place(u64(&mut self.input)?, len - 8, &mut reply.data)?;
                self.input.read_exact(&mut reply.data[range])?;
            }
            CHUNK_OFFSET_HOLE if len == 12 => {
                let (offset, hole) = (u64(&mut self.input)?, u32(&mut self.input)?);
                let range = place(offset, hole as usize, &mut reply.data)?;
                reply.data[range].fill(0);
            }
            CHUNK_BLOCK_STATUS if len >= 12 && len % 8 == 4 => {
                let context = u32(&mut self.input)?;
                let extents = reply.status.entry(context).or_default();
                for _ in 0..len / 8 {
                    extents.push((u32(&mut self.input)?, u32(&mut self.input)?));
                }
            }
            _ if kind & CHUNK_ERROR != 0 && len >= 6 => {
                reply.error = u32(&mut self.input)?;
                bytes(&mut self.input, len - 4)?;
            }
            0 if len == 0 => {}
            _ => return Err(bad(format!("a chunk of kind {kind} with {len} bytes"))),
        }
        if flags & CHUNK_DONE == 0 {
            return Ok(None);
        }
        Ok(self.pending.remove(&cookie).map(|(_, reply)| reply))
    }

    /// Waits until the request with this cookie is answered. Meant for a connection with nothing else in flight.
    fn only(&mut self, cookie: u64) -> io::Result<Reply> {
        loop {
            let reply = self.finish()?;
            if reply.cookie == cookie {
                return match reply.error {
                    0 => Ok(reply),
                    // NBD's error numbers are Linux's, as far as they go.
                    error => Err(io::Error::from_raw_os_error(error as i32)),
                };
            }
        }
    }

    /// Does one request and waits for it.
    pub fn run(&mut self, command: Command) -> io::Result<Vec<u8>> {
        let cookie = self.start(&command)?;
        Ok(self.only(cookie)?.data)
    }

    /// Reads.
    pub fn read(&mut self, offset: u64, len: u32) -> io::Result<Vec<u8>> {
        self.run(Command::Read { offset, len })
    }

    /// Writes.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.run(Command::Write { offset, data: data.to_vec(), flags: 0 }).map(drop)
    }

    /// Makes a range zero.
    pub fn zero(&mut self, offset: u64, len: u32, flags: u16) -> io::Result<()> {
        self.run(Command::Zero { offset, len, flags }).map(drop)
    }

    /// Trims a range.
    pub fn trim(&mut self, offset: u64, len: u32) -> io::Result<()> {
        self.run(Command::Trim { offset, len }).map(drop)
    }

    /// Makes durable what was answered.
    pub fn flush(&mut self) -> io::Result<()> {
        self.run(Command::Flush).map(drop)
    }

    /// The ranges of the export in which a context's flags have a bit of `mask`.
    pub fn ranges(&mut self, context: &str, mask: u32) -> io::Result<Vec<Range<u64>>> {
        let id =
            *self.contexts.get(context).ok_or_else(|| bad(format!("the server has no context {context}")))?;
        let (mut ranges, mut at) = (Vec::<Range<u64>>::new(), 0);
        while at < self.size {
            let len = (self.size - at).min(1 << 30) as u32;
            let cookie = self.send(CMD_BLOCK_STATUS, 0, at, len, &[], 0)?;
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
        self.send(CMD_DISCONNECT, 0, 0, 0, &[], 0).map(drop)
    }
}
