//! What the tests share: a client that speaks the protocol byte by byte, so that it can also speak it wrongly; and a disk
//! that can be told to fail, to wait, and to complete out of order.
#![allow(dead_code, missing_docs)]

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use device::{Disk, Done, InlineQueue, Queue, RamDisk, Request, RequestKind, ThreadQueue};
use nbd::{Export, ExportInfo, ExportRefusal, Exports, Server, ServerLimits};

pub(crate) const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
pub(crate) const ACK: u32 = 1;
pub(crate) const ERR: u32 = 1 << 31;
pub(crate) const UNSUP: u32 = ERR + 1;
pub(crate) const POLICY: u32 = ERR + 2;
pub(crate) const INVALID: u32 = ERR + 3;
pub(crate) const UNKNOWN: u32 = ERR + 6;
pub(crate) const SHUTDOWN: u32 = ERR + 7;
pub(crate) const TOO_BIG: u32 = ERR + 9;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISC: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const CACHE: u16 = 5;
pub(crate) const ZEROES: u16 = 6;
pub(crate) const STATUS: u16 = 7;

pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;
pub(crate) const DF: u16 = 4;
pub(crate) const REQ_ONE: u16 = 8;
pub(crate) const FAST: u16 = 16;

/// What an answered request came to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub error: u32,
    pub message: String,
    pub data: Vec<u8>,
    /// Content chunks of a structured read: offset, length, true for a hole.
    pub chunks: Vec<(u64, u32, bool)>,
    /// By context id.
    pub status: HashMap<u32, Vec<(u32, u32)>>,
}

pub(crate) struct Client {
    pub stream: UnixStream,
    pub structured: bool,
    pending: HashMap<u64, (u16, u64, u32, Answer)>,
    cookie: u64,
}

impl Client {
    /// Connected, greeted, both flags set.
    pub(crate) fn connect(server: &Server) -> Client {
        let (ours, theirs) = UnixStream::pair().unwrap();
        server.serve_stream(theirs).unwrap();
        Client::over(ours, 3)
    }

    pub(crate) fn over(stream: UnixStream, flags: u32) -> Client {
        // Long enough for a busy machine, and no test hangs.
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut client =
            Client { stream, structured: false, pending: HashMap::new(), cookie: 0x1234_5678_9abc_0000 };
        let greeting: [u8; 18] = client.read();
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        client.send(&flags.to_be_bytes());
        client
    }

    /// In transmission with an export, with structured replies if `structured`, and with these contexts.
    pub(crate) fn enter(server: &Server, name: &str, structured: bool, contexts: &[&str]) -> Client {
        let mut client = Client::connect(server);
        if structured {
            client.structure();
        }
        if !contexts.is_empty() {
            let replies = client.option(10, &meta(name, contexts));
            assert_eq!(replies.len(), contexts.len() + 1, "{replies:?}");
        }
        client.go(name);
        client
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn read<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub(crate) fn read_vec(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.read())
    }
    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.read())
    }
    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.read())
    }

    /// True if the server has closed the connection, with nothing left to read.
    pub(crate) fn is_closed(&mut self) -> bool {
        match self.stream.read(&mut [0; 1]) {
            Ok(got) => got == 0,
            Err(e) => e.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    pub(crate) fn send_option(&mut self, option: u32, data: &[u8]) {
        self.send(&option_bytes(option, data));
    }

    /// Sends an option and reads its replies, the final one included.
    pub(crate) fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send_option(option, data);
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.u64(), 0x3e889045565a9);
            assert_eq!(self.u32(), option);
            let kind = self.u32();
            let len = self.u32();
            let data = self.read_vec(len as usize);
            replies.push((kind, data));
            if kind == ACK || kind >= ERR {
                return replies;
            }
        }
    }

    /// The final reply to an option, its text if it is an error.
    pub(crate) fn verdict(&mut self, option: u32, data: &[u8]) -> (u32, String) {
        let (kind, data) = self.option(option, data).pop().unwrap();
        (kind, String::from_utf8(data).unwrap())
    }

    pub(crate) fn structure(&mut self) {
        assert_eq!(self.option(8, &[]), [(ACK, vec![])]);
        self.structured = true;
    }

    /// Enters transmission: size and flags.
    pub(crate) fn go(&mut self, name: &str) -> (u64, u16) {
        let replies = self.option(7, &info(name, &[]));
        assert_eq!(replies.len(), 2, "{replies:?}");
        let data = &replies[0].1;
        assert_eq!((replies[0].0, &data[..2], data.len()), (3, &[0, 0][..], 12));
        (
            u64::from_be_bytes(data[2..10].try_into().unwrap()),
            u16::from_be_bytes(data[10..].try_into().unwrap()),
        )
    }

    /// Sends a request and returns its cookie.
    pub(crate) fn request(&mut self, command: u16, flags: u16, offset: u64, len: u32, payload: &[u8]) -> u64 {
        self.cookie += 1;
        let cookie = self.cookie;
        let mut bytes = request_bytes(command, flags, cookie, offset, len);
        bytes.extend(payload);
        self.send(&bytes);
        self.pending.insert(cookie, (command, offset, len, Answer::default()));
        cookie
    }

    /// The next request to be answered whole, in whatever order.
    pub(crate) fn next(&mut self) -> (u64, Answer) {
        loop {
            match self.u32() {
                0x6744_6698 => {
                    let error = self.u32();
                    let cookie = self.u64();
                    let (command, _, len, mut answer) =
                        self.pending.remove(&cookie).expect("an answer to a request");
                    assert!(!(self.structured && command == READ), "a simple reply to a structured read");
                    answer.error = error;
                    if command == READ && error == 0 {
                        answer.data = self.read_vec(len as usize);
                    }
                    return (cookie, answer);
                }
                0x668e_33ef => {
                    assert!(self.structured);
                    let (flags, kind) = (self.u16(), self.u16());
                    let (cookie, len) = (self.u64(), self.u32());
                    let payload = self.read_vec(len as usize);
                    let (command, offset, asked, answer) =
                        self.pending.get_mut(&cookie).expect("an answer to a request");
                    let (command, offset, asked) = (*command, *offset, *asked);
                    let number = |at: usize| u64::from_be_bytes(payload[at..at + 8].try_into().unwrap());
                    let short = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
                    match kind {
                        0 => assert!(len == 0 && flags == 1),
                        1 | 2 => {
                            assert_eq!(command, READ);
                            answer.data.resize(asked as usize, 0xee);
                            let len = if kind == 1 { len - 8 } else { short(8) };
                            assert!(len > 0);
                            let at = (number(0) - offset) as usize;
                            let to = &mut answer.data[at..at + len as usize];
                            match kind {
                                1 => to.copy_from_slice(&payload[8..]),
                                _ => to.fill(0),
                            }
                            answer.chunks.push((number(0), len, kind == 2));
                        }
                        5 => {
                            assert_eq!(command, STATUS);
                            assert!(len > 4 && (len - 4) % 8 == 0);
                            let runs =
                                (0..(len as usize - 4) / 8).map(|i| (short(4 + 8 * i), short(8 + 8 * i)));
                            assert!(answer.status.insert(short(0), runs.collect()).is_none());
                        }
                        0x8001 => {
                            assert_eq!(
                                len as usize,
                                6 + usize::from(u16::from_be_bytes([payload[4], payload[5]]))
                            );
                            answer.error = short(0);
                            assert_ne!(answer.error, 0);
                            answer.message = String::from_utf8(payload[6..].to_vec()).unwrap();
                        }
                        _ => panic!("a chunk of kind {kind:#x}"),
                    }
                    if flags & 1 != 0 {
                        let (.., answer) = self.pending.remove(&cookie).unwrap();
                        if command == READ && answer.error == 0 {
                            let covered: u64 = answer.chunks.iter().map(|chunk| u64::from(chunk.1)).sum();
                            assert_eq!(covered, u64::from(asked));
                        }
                        return (cookie, answer);
                    }
                }
                other => panic!("a reply with magic {other:#x}"),
            }
        }
    }

    /// One request and its answer.
    pub(crate) fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u32, payload: &[u8]) -> Answer {
        let cookie = self.request(command, flags, offset, len, payload);
        let (answered, answer) = self.next();
        assert_eq!(answered, cookie);
        answer
    }

    pub(crate) fn read_at(&mut self, offset: u64, len: u32) -> Vec<u8> {
        let answer = self.ask(READ, 0, offset, len, &[]);
        assert_eq!(answer.error, 0, "{}", answer.message);
        answer.data
    }

    pub(crate) fn write_at(&mut self, offset: u64, bytes: &[u8]) {
        let answer = self.ask(WRITE, 0, offset, bytes.len() as u32, bytes);
        assert_eq!(answer.error, 0, "{}", answer.message);
    }

    /// Disconnects, and waits until the server has done so too.
    pub(crate) fn bye(mut self) {
        self.send(&request_bytes(DISC, 0, 0, 0, 0));
        assert!(self.is_closed());
    }
}

pub(crate) fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

pub(crate) fn request_bytes(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// The data of INFO and GO.
pub(crate) fn info(name: &str, asked: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.bytes());
    data.extend((asked.len() as u16).to_be_bytes());
    asked.iter().for_each(|one| data.extend(one.to_be_bytes()));
    data
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub(crate) fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.bytes());
    data.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend((query.len() as u32).to_be_bytes());
        data.extend(query.bytes());
    }
    data
}

type Open = dyn Fn(&str) -> Result<Export, ExportRefusal> + Send + Sync;

/// Exports made again for each connection by a function of the name.
pub(crate) struct Table {
    pub listed: Vec<ExportInfo>,
    pub open: Box<Open>,
}

impl Exports for Table {
    fn list(&self) -> Vec<ExportInfo> {
        self.listed.clone()
    }

    fn open(&self, name: &str) -> Result<Export, ExportRefusal> {
        (self.open)(name)
    }
}

/// A server with one export, `disk`, changed by `adjust`.
pub(crate) fn serve_one<F>(disk: Arc<dyn Disk>, limits: ServerLimits, adjust: F) -> Server
where
    F: Fn(&mut Export) + Send + Sync + 'static,
{
    let open = move |name: &str| {
        if name != "disk" {
            return Err(ExportRefusal::unknown(format!("there is no export {name}")));
        }
        let mut export = Export::new(name, disk.clone());
        adjust(&mut export);
        Ok(export)
    };
    let listed = vec![ExportInfo { name: "disk".into(), description: "for tests".into() }];
    Server::with_limits(Arc::new(Table { listed, open: Box::new(open) }), limits)
}

pub(crate) fn serve(disk: Arc<dyn Disk>) -> Server {
    serve_one(disk, ServerLimits::default(), |_| {})
}

/// How a [`Rig`] carries out what it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// At once.
    Inline,
    /// By threads, in any order; the queue can be waited for by descriptor.
    Polled,
    /// By threads, in any order; only `complete(true)` can wait.
    Blocking,
}

/// What to do before a step is carried out: by name, offset and length.
pub(crate) type Hook = Box<dyn Fn(&'static str, u64, u64) -> io::Result<()> + Send + Sync>;

/// A disk in memory that does as it is told.
pub(crate) struct Rig {
    pub ram: RamDisk,
    pub mode: Mode,
    pub hook: Hook,
    pub flushes: AtomicU64,
    pub most_in_flight: AtomicU64,
}

impl Rig {
    pub(crate) fn new(len: u64, mode: Mode, hook: Hook) -> Arc<Rig> {
        Arc::new(Rig { ram: RamDisk::new(len), mode, hook, flushes: 0.into(), most_in_flight: 0.into() })
    }

    pub(crate) fn plain(len: u64, mode: Mode) -> Arc<Rig> {
        Rig::new(len, mode, Box::new(|_, _, _| Ok(())))
    }
}

impl Disk for Rig {
    fn len(&self) -> u64 {
        self.ram.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (self.hook)("read", offset, buf.len() as u64)?;
        self.ram.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        (self.hook)("write", offset, buf.len() as u64)?;
        self.ram.write_at(offset, buf)
    }
    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        let what = match (unmap, fast) {
            (true, true) => "fast unmap",
            (true, false) => "unmap",
            (false, true) => "fast zero",
            (false, false) => "zero",
        };
        (self.hook)(what, offset, len)?;
        self.ram.zero(offset, len, unmap, fast)
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        (self.hook)("discard", offset, len)?;
        self.ram.discard(offset, len)
    }
    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        (self.hook)("prefetch", offset, len)
    }
    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        (self.hook)("flush", 0, 0)
    }
    fn allocated(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        (self.hook)("allocated", from, 0)?;
        self.ram.allocated(from)
    }
    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        (self.hook)("queue", 0, 0)?;
        if self.mode == Mode::Inline {
            return Ok(Box::new(InlineQueue::new(self)));
        }
        let disk = self.clone();
        let threads = ThreadQueue::new(Arc::new(move |request| request.run(&*self)), depth.min(4))?;
        Ok(Box::new(RigQueue { disk, threads, waiting: Vec::new() }))
    }
}

struct RigQueue {
    disk: Arc<Rig>,
    threads: ThreadQueue,
    /// As io_uring has it: nothing of them happens before they are started, or waited for.
    waiting: Vec<Request>,
}

impl Queue for RigQueue {
    fn submit(&mut self, request: Request) {
        if !matches!(request.kind, RequestKind::Flush) {
            assert!(request.pieces.iter().all(|piece| piece.len > 0));
        }
        self.waiting.push(request);
        self.disk.most_in_flight.fetch_max(self.in_flight() as u64, Ordering::SeqCst);
    }
    fn start(&mut self) {
        self.waiting.drain(..).for_each(|request| self.threads.submit(request));
    }
    fn complete(&mut self, wait: bool) -> Option<Done> {
        if wait {
            self.start();
        }
        self.threads.complete(wait)
    }
    fn in_flight(&self) -> usize {
        self.threads.in_flight() + self.waiting.len()
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.threads.wait_fd().filter(|_| self.disk.mode == Mode::Polled)
    }
}

/// The most memory this process has had, in bytes.
pub(crate) fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}
