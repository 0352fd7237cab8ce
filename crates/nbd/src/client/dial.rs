//! Reaching a server and agreeing with it on an export.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock, RwLockWriteGuard, TryLockError};
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_keepalive, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::{array, bad, bytes, u16, u32, u64};

const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

const OPT_EXPORT_NAME: u32 = 1;
const OPT_ABORT: u32 = 2;
const OPT_LIST: u32 = 3;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_SET_META_CONTEXT: u32 = 10;

const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
const REP_ERROR: u32 = 1 << 31;
const ERR_UNSUPPORTED: u32 = REP_ERROR + 1;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// How long each step of a connection and its handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// How long a server may take over requests before it says anything: a flush of a slow disk takes minutes.
const REQUEST: Duration = Duration::from_secs(300);

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// One direction of a connection.
pub(crate) trait ByteStream: Read + Write + Send {
    /// Limits how long a read or write may wait.
    fn limit(&self, limit: Duration) -> io::Result<()>;
}

impl ByteStream for UnixStream {
    fn limit(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

impl ByteStream for TcpStream {
    fn limit(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

fn unix(path: &Path) -> io::Result<UnixStream> {
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // A server that accepts nobody while its queue is full would let a connect wait for ever.
    set_socket_timeout(&fd, Timeout::Send, Some(HANDSHAKE))?;
    let address = SocketAddrUnix::new(path)?;
    // A call with a time limit is interrupted where a process, or its machine, was stopped for a while.
    retry_on_intr(|| connect(&fd, &address))?;
    Ok(fd.into())
}

fn tcp(name: &str) -> io::Result<TcpStream> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in name.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, HANDSHAKE) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                set_socket_keepalive(&stream, true)?;
                return Ok(stream);
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// A connection that has entered transmission.
pub(crate) struct Dialed {
    pub input: BufReader<Box<dyn ByteStream>>,
    pub output: Box<dyn ByteStream>,
    pub size: u64,
    pub flags: u16,
    pub block_sizes: Option<(u32, u32, u32)>,
    pub contexts: HashMap<String, u32>,
}

/// Held while a connection is negotiated; alone by who lets none begin.
static NEGOTIATING: RwLock<()> = RwLock::new(());
/// How often it is asked for.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// Lets this process begin no connection while the guard is there, after those that are being negotiated have come to an end. QEMU 7.2 hangs for good
/// where its server is stopped in the middle of a negotiation. `None` if that takes longer than `limit`.
pub fn hold_connections(limit: Duration) -> Option<RwLockWriteGuard<'static, ()>> {
    let until = Instant::now() + limit;
    loop {
        match NEGOTIATING.try_write() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= until => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(ASK_EVERY),
        }
    }
}

impl Dialed {
    /// Connects to an export and requests these contexts. Those that the server lacks are omitted.
    pub(crate) fn new(address: &Address, export: &str, contexts: &[&str]) -> io::Result<Dialed> {
        let _negotiating = NEGOTIATING.read().unwrap_or_else(PoisonError::into_inner);
        let mut shake = Handshake::begin(address)?;
        let mut ids = HashMap::new();
        if shake.fixed && shake.try_ask(OPT_STRUCTURED_REPLY, &[])?.is_some() && !contexts.is_empty() {
            ids = shake.contexts(export, contexts)?;
        }
        let (size, flags, block_sizes) = shake.enter(export)?;
        shake.output.limit(REQUEST)?;
        let Handshake { input, output, .. } = shake;
        // The first flag says whether the others mean anything.
        let flags = if flags & 1 == 0 { 0 } else { flags };
        Ok(Dialed { input, output, size, flags, block_sizes, contexts: ids })
    }
}

/// Size, transmission flags, and the block sizes where the server names them.
type Entered = (u64, u16, Option<(u32, u32, u32)>);

/// Replies to an option: kind and content.
type Replies = Vec<(u32, Vec<u8>)>;

/// The handshake's state: connected, options may follow.
struct Handshake {
    input: BufReader<Box<dyn ByteStream>>,
    output: Box<dyn ByteStream>,
    /// The server answers options.
    fixed: bool,
    /// The server pads its answer to the oldest option.
    padded: bool,
}

impl Handshake {
    fn begin(address: &Address) -> io::Result<Handshake> {
        let (input, output): (Box<dyn ByteStream>, Box<dyn ByteStream>) = match address {
            Address::Unix(path) => {
                let stream = unix(path)?;
                (Box::new(stream.try_clone()?), Box::new(stream))
            }
            Address::Tcp(name) => {
                let stream = tcp(name)?;
                (Box::new(stream.try_clone()?), Box::new(stream))
            }
        };
        output.limit(HANDSHAKE)?;
        let mut input = BufReader::new(input);
        if &array::<8>(&mut input)? != b"NBDMAGIC" || u64(&mut input)? != OPTION_MAGIC {
            return Err(bad("not an NBD newstyle server"));
        }
        let flags = u16(&mut input)?;
        let (fixed, padded) = (flags & FIXED_NEWSTYLE != 0, flags & NO_ZEROES == 0);
        let mut shake = Handshake { input, output, fixed, padded };
        let ours = flags & (FIXED_NEWSTYLE | NO_ZEROES);
        shake.output.write_all(&u32::from(ours).to_be_bytes())?;
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

    /// Sends an option and returns the replies before the acknowledgement; `None` if the server does not know the option.
    fn try_ask(&mut self, option: u32, data: &[u8]) -> io::Result<Option<Replies>> {
        self.option(option, data)?;
        let mut replies = Vec::new();
        loop {
            let (kind, content) = self.reply(option)?;
            match kind {
                REP_ACK => return Ok(Some(replies)),
                ERR_UNSUPPORTED => return Ok(None),
                _ if kind & REP_ERROR != 0 => return Err(refusal(kind, &content)),
                _ => replies.push((kind, content)),
            }
        }
    }

    fn ask(&mut self, option: u32, data: &[u8]) -> io::Result<Replies> {
        let unknown =
            || io::Error::new(io::ErrorKind::Unsupported, format!("option {option} is unknown to it"));
        self.try_ask(option, data)?.ok_or_else(unknown)
    }

    /// The ids of the contexts that the server grants.
    fn contexts(&mut self, export: &str, contexts: &[&str]) -> io::Result<HashMap<String, u32>> {
        let mut query = name_field(export);
        query.extend((contexts.len() as u32).to_be_bytes());
        contexts.iter().for_each(|context| query.extend(name_field(context)));
        let mut ids = HashMap::new();
        for (kind, content) in self.try_ask(OPT_SET_META_CONTEXT, &query)?.unwrap_or_default() {
            if kind == REP_META_CONTEXT && content.len() > 4 {
                let id = u32(&mut &content[..4])?;
                let name = String::from_utf8_lossy(&content[4..]).into_owned();
                // One would be read as the other.
                if ids.values().any(|other| *other == id) || ids.insert(name, id).is_some() {
                    return Err(bad(format!(
                        "the server grants two contexts under the id {id}, or one twice"
                    )));
                }
            }
        }
        Ok(ids)
    }

    /// Enters transmission.
    fn enter(&mut self, export: &str) -> io::Result<Entered> {
        let mut go = name_field(export);
        // One information request: the block sizes.
        go.extend(1u16.to_be_bytes());
        go.extend(INFO_BLOCK_SIZE.to_be_bytes());
        let replies = if self.fixed { self.try_ask(OPT_GO, &go)? } else { None };
        let Some(replies) = replies else { return self.enter_old(export) };
        let (mut found, mut block_sizes) = (None, None);
        for (kind, content) in replies {
            let mut rest = &content[..];
            if kind != REP_INFO {
                continue;
            }
            match u16(&mut rest)? {
                INFO_EXPORT => found = Some((u64(&mut rest)?, u16(&mut rest)?)),
                INFO_BLOCK_SIZE => {
                    block_sizes = Some((u32(&mut rest)?, u32(&mut rest)?, u32(&mut rest)?));
                }
                _ => {}
            }
        }
        let (size, flags) = found.ok_or_else(|| bad("the server did not name the export's size"))?;
        Ok((size, flags, block_sizes))
    }

    /// Enters as servers of old want it: one that has no such export closes the connection.
    fn enter_old(&mut self, export: &str) -> io::Result<Entered> {
        self.option(OPT_EXPORT_NAME, export.as_bytes())?;
        let size = match u64(&mut self.input) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(io::Error::new(io::ErrorKind::NotFound, "the server has no such export"));
            }
            size => size?,
        };
        let flags = u16(&mut self.input)?;
        if self.padded {
            bytes(&mut self.input, 124)?;
        }
        Ok((size, flags, None))
    }
}

/// What an error reply to an option means.
fn refusal(kind: u32, content: &[u8]) -> io::Error {
    use io::ErrorKind::{ConnectionAborted, NotFound, Other, PermissionDenied, Unsupported};
    let (error, meaning) = match kind - REP_ERROR {
        2 => (PermissionDenied, "the server's policy forbids it"),
        5 => (Unsupported, "the server demands TLS, which dsync does not speak to NBD servers"),
        6 => (NotFound, "the server has no such export"),
        7 => (ConnectionAborted, "the server is shutting down"),
        _ => (Other, "the server refuses the handshake"),
    };
    let said = String::from_utf8_lossy(content);
    let said = if said.is_empty() { said } else { format!(" (\"{}\")", said.escape_debug()).into() };
    io::Error::new(error, format!("{meaning}{said}"))
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
    // Whatever becomes of it, the server knows that this is the end.
    let _ = shake.ask(OPT_ABORT, &[]);
    let servers = replies.into_iter().filter(|(kind, _)| *kind == REP_SERVER);
    servers
        .map(|(_, content)| {
            let mut rest = &content[..];
            let len = u32(&mut rest)? as usize;
            let name = rest.get(..len).ok_or_else(|| bad("a name of an export without its end"))?;
            Ok(String::from_utf8_lossy(name).into_owned())
        })
        .collect()
}
