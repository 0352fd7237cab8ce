//! The connections of a session: one stream each way over several of them.
//!
//! One connection carries no more than the kernel's send buffer (`net.ipv4.tcp_wmem`, 4 MiB unless changed) in each round
//! trip, so a far link needs several. What is written is cut into chunks, of which any connection that is free takes the next;
//! the other side puts them in order. Two threads serve each connection. A connection that breaks cuts the link: the layers
//! above know how to resume.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use device::Buf;
use rustls::Connection;

use super::chunk::{Assembler, CHUNK};
use super::connection::TlsConnection;
use super::queue::{ChunkQueue, Pair};
use super::reorder::Reorder;
use super::share::{self, Share};
use crate::flow::lock;
use crate::framed::{Activity, FramedStream, Incoming, Outgoing, StreamOptions, StreamOwner, Trust};
use crate::{Error, Link, Result};

/// How long what was sent before a link is given up may take to go out.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What is read from a connection at a time.
const READ: usize = 256 << 10;

/// What is encrypted at a time: rustls has memory of its own for each record, and more of them at once would be given back to the system
/// and asked for again and again.
const PART: usize = 64 << 10;
/// What is sent at a time.
const SEND: usize = 256 << 10;
/// The longest chunk of what is collected.
const COLLECTED: usize = 128 << 10;
/// Shorter bodies are collected: to copy them costs less than a chunk.
const MOVED: usize = 64 << 10;

/// What a thread does for its connection, and where it is counted.
type Work = fn(&TlsSession, &SessionConnection) -> Result<(), String>;
type Count = fn(&mut Threads) -> &mut usize;

/// Opens a link over connections whose other ends have shown the same key. The peer must say something within `patience`,
/// and go on doing so within every `timeout`; the link ends when `trust` does.
pub(super) fn open(
    peer: &str,
    connections: Vec<TlsConnection>,
    patience: Duration,
    timeout: Duration,
    trust: Arc<dyn Trust>,
) -> Result<Link> {
    let count = connections.len();
    let share = share::ALL.share();
    let window = share.window();
    let carriers = connections
        .into_iter()
        .map(|TlsConnection { socket, tls }| SessionConnection { socket, tls: Mutex::new(tls) });
    let session = Arc::new(TlsSession {
        peer: peer.to_string(),
        connections: carriers.collect(),
        out: ChunkQueue::new(2 * count),
        order: Reorder::new(count, window as usize),
        _share: share,
        threads: Mutex::default(),
        ended: Condvar::new(),
        activity: Activity::default(),
    });
    for at in 0..count {
        let kinds: [(&str, Work, Count); 2] =
            [("tls sender", send, |t| &mut t.senders), ("tls reader", receive, |t| &mut t.readers)];
        for (name, work, count) in kinds {
            let started = session.connections[at].prepare(patience).and_then(|()| {
                *count(&mut lock(&session.threads)) += 1;
                let worker = Arc::clone(&session);
                let run = move || worker.run(&worker.connections[at], work, count);
                thread::Builder::new().name(name.into()).spawn(run)
            });
            if let Err(error) = started {
                session.cut("the session cannot start");
                return Err(Error::Cut { peer: peer.to_string(), why: error.to_string() });
            }
        }
    }
    let reader = Box::new(Reader { session: Arc::clone(&session), chunk: Buf::default(), at: 0 });
    let writer = Box::new(Writer { session: Arc::clone(&session), chunk: Buf::default() });
    let options = StreamOptions { window, timeout, activity: session.activity.clone(), trust: Some(trust) };
    Ok(Link::over(FramedStream::start(peer, reader, writer, options, Some(session))))
}

/// What carries a link over TLS.
struct TlsSession {
    peer: String,
    connections: Vec<SessionConnection>,
    out: ChunkQueue,
    order: Reorder,
    _share: Share,
    threads: Mutex<Threads>,
    ended: Condvar,
    /// Also of what must wait for an earlier chunk.
    activity: Activity,
}

/// Threads that are running.
#[derive(Default)]
struct Threads {
    senders: usize,
    readers: usize,
}

/// A connection of the session.
struct SessionConnection {
    socket: Arc<TcpStream>,
    /// Held to encrypt and decrypt, never while anything is waited for.
    tls: Mutex<Connection>,
}

impl SessionConnection {
    fn prepare(&self, patience: Duration) -> io::Result<()> {
        self.socket.set_write_timeout(None)?;
        // Until the first chunk has come.
        self.socket.set_read_timeout(Some(patience))
    }

    /// Encrypts and sends.
    fn send(&self, mut parts: [&[u8]; 4], out: &mut Vec<u8>) -> io::Result<()> {
        while parts.iter().any(|part| !part.is_empty()) {
            out.clear();
            let mut tls = lock(&self.tls);
            while out.len() < SEND && parts.iter().any(|part| !part.is_empty()) {
                let mut left = PART;
                let slices = parts.each_mut().map(|part| {
                    let now = part.split_off(..part.len().min(left)).unwrap_or_default();
                    left -= now.len();
                    IoSlice::new(now)
                });
                // It takes all of it, as its buffer has no limit.
                let _ = tls.writer().write_vectored(&slices)?;
                drain(&mut tls, out)?;
            }
            drop(tls);
            (&*self.socket).write_all(out)?;
        }
        Ok(())
    }
}

/// Takes what `tls` has encrypted.
fn drain(tls: &mut Connection, out: &mut Vec<u8>) -> io::Result<()> {
    while tls.wants_write() {
        tls.write_tls(out)?;
    }
    Ok(())
}

impl TlsSession {
    fn run(&self, connection: &SessionConnection, work: Work, count: Count) {
        if let Err(why) = work(self, connection) {
            self.cut(&why);
        }
        *count(&mut lock(&self.threads)) -= 1;
        self.ended.notify_all();
    }

    /// True if so many threads have ended within `patience`.
    fn wait(&self, patience: Duration, ended: fn(&Threads) -> bool) -> bool {
        let threads = lock(&self.threads);
        let waited = self.ended.wait_timeout_while(threads, patience, |threads| !ended(threads));
        ended(&waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Ends everything at once; the first reason counts.
    fn cut(&self, why: &str) {
        self.order.fail(why);
        self.out.close(Some(why));
        for connection in &self.connections {
            let _ = connection.socket.shutdown(Shutdown::Both);
        }
    }
}

impl StreamOwner for TlsSession {
    fn kill(&self) {
        // What was sent before still goes out, as from a pipe, if the peer takes it.
        self.out.close(None);
        self.wait(LAST_WORDS, |threads| threads.senders == 0);
        self.cut("it was given up on this side");
    }

    fn settle(&self, patience: Duration) {
        self.out.close(None);
        if !self.wait(patience, |threads| threads.senders == 0 && threads.readers == 0) {
            self.cut("the peer did not end in time");
        }
    }

    fn why_it_ended(&self, _greeted: bool, why: String) -> Error {
        Error::Cut { peer: self.peer.clone(), why }
    }
}

/// Encrypts and sends what the queue holds, to its end.
fn send(session: &TlsSession, connection: &SessionConnection) -> Result<(), String> {
    send_all(session, connection).inspect_err(|why| {
        session.out.close(Some(why));
        // The peer may have said why it closed: what has arrived is read before the session is cut.
        session.wait(LAST_WORDS, |threads| threads.readers == 0);
    })
}

fn send_all(session: &TlsSession, connection: &SessionConnection) -> Result<(), String> {
    let mut out = Vec::new();
    let failed = |error: io::Error| error.to_string();
    while let Some((number, chunks)) = session.out.take() {
        connection.send(chunks.parts(number, &mut Default::default()), &mut out).map_err(failed)?;
    }
    out.clear();
    let mut tls = lock(&connection.tls);
    tls.send_close_notify();
    drain(&mut tls, &mut out).map_err(failed)?;
    drop(tls);
    (&*connection.socket).write_all(&out).map_err(failed)?;
    // A peer that has gone by now has all it wants.
    let _ = connection.socket.shutdown(Shutdown::Write);
    Ok(())
}

/// Receives and decrypts to the peer's end.
fn receive(session: &TlsSession, connection: &SessionConnection) -> Result<(), String> {
    let mut assembler = Assembler::default();
    let mut encrypted = vec![0; READ];
    let mut whole = Vec::new();
    // What came with the peer's hello is decrypted already.
    let mut have = 0..0;
    loop {
        let mut tls = lock(&connection.tls);
        let mut ended = false;
        loop {
            match tls.reader().read(assembler.room()) {
                Ok(0) => {
                    ended = true;
                    break;
                }
                Ok(len) => whole.extend(assembler.filled(len)?),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !have.is_empty() => {
                    let mut rest = &encrypted[have.clone()];
                    have.start += tls.read_tls(&mut rest).map_err(|error| error.to_string())?;
                    tls.process_new_packets().map_err(|error| error.to_string())?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        drop(tls);
        for chunk in whole.drain(..) {
            session.order.put(chunk)?;
        }
        if ended {
            if assembler.is_within() {
                return Err("it ended in the middle of a chunk".into());
            }
            session.order.connection_ended();
            return Ok(());
        }
        have = match (&*connection.socket).read(&mut encrypted) {
            // Without TLS's own goodbye.
            Ok(0) => return Err("the other side closed a connection".into()),
            Ok(len) => {
                session.activity.note();
                0..len
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0..0,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !session.order.has_begun() {
                    return Err("the other side sent nothing in time".into());
                }
                connection.socket.set_read_timeout(None).map_err(|error| error.to_string())?;
                0..0
            }
            Err(error) => return Err(error.to_string()),
        };
    }
}

/// The stream that comes in.
struct Reader {
    session: Arc<TlsSession>,
    chunk: Buf,
    at: usize,
}

impl Reader {
    /// Has bytes at hand; false after the last.
    fn fill(&mut self) -> io::Result<bool> {
        if self.at == self.chunk.len() {
            match self.session.order.take().map_err(io::Error::other)? {
                Some(chunk) => (self.chunk, self.at) = (chunk, 0),
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

impl Read for Reader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if !self.fill()? {
            return Ok(0);
        }
        let len = buf.len().min(self.chunk.len() - self.at);
        buf[..len].copy_from_slice(&self.chunk[self.at..self.at + len]);
        self.at += len;
        Ok(len)
    }
}

impl Incoming for Reader {
    fn whole(&mut self, len: usize) -> io::Result<Option<Buf>> {
        let whole = self.fill()? && self.at == 0 && self.chunk.len() == len;
        Ok(whole.then(|| std::mem::take(&mut self.chunk)))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.session.order.discard();
    }
}

/// The stream that goes out.
struct Writer {
    session: Arc<TlsSession>,
    /// What is collected.
    chunk: Buf,
}

impl Write for Writer {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut taken = 0;
        for slice in slices {
            if self.chunk.capacity() == 0 {
                self.chunk = Buf::scratch(COLLECTED);
                self.chunk.set_len(0);
            }
            let at = self.chunk.len();
            let room = COLLECTED - at;
            let len = room.min(slice.len());
            self.chunk.set_len(at + len);
            self.chunk[at..].copy_from_slice(&slice[..len]);
            taken += len;
            if len == room {
                self.flush()?;
                break;
            }
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.chunk.is_empty() {
            true => Ok(()),
            false => self.put(Buf::default()),
        }
    }
}

impl Writer {
    /// Sends what was collected, and a body behind it.
    fn put(&mut self, body: Buf) -> io::Result<()> {
        self.session.out.put(Pair { collected: std::mem::take(&mut self.chunk), body })
    }
}

impl Outgoing for Writer {
    fn hand_over(&mut self, before: [&[u8]; 2], body: Buf) -> io::Result<Option<Buf>> {
        if !(MOVED..=CHUNK).contains(&body.len()) {
            return Ok(Some(body));
        }
        before.into_iter().try_for_each(|part| self.write_all(part))?;
        self.put(body).map(|()| None)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.session.out.close(None);
    }
}

#[cfg(test)]
mod tests {
    use super::super::chunk::Chunk;
    use super::*;

    fn session() -> Arc<TlsSession> {
        Arc::new(TlsSession {
            peer: "the peer".into(),
            connections: Vec::new(),
            out: ChunkQueue::new(2),
            order: Reorder::new(1, 8 << 20),
            _share: share::ALL.share(),
            threads: Mutex::default(),
            ended: Condvar::new(),
            activity: Activity::default(),
        })
    }

    #[test]
    fn a_long_body_is_moved_and_not_copied() {
        let session = session();
        let mut writer = Writer { session: Arc::clone(&session), chunk: Buf::default() };
        let short = Buf::from(&[1; MOVED - 1][..]);
        assert!(writer.hand_over([b"head", b""], short).unwrap().is_some(), "nothing was sent of it");
        let body = Buf::from(&vec![7; CHUNK][..]);
        let place = body.as_ptr();
        assert!(writer.hand_over([b"frame", b"head"], body).unwrap().is_none());
        let (number, pair) = session.out.take().unwrap();
        assert_eq!((number, &pair.collected[..], pair.body.as_ptr()), (0, &b"framehead"[..], place));

        let mut reader = Reader { session: Arc::clone(&session), chunk: Buf::default(), at: 0 };
        let (first, second) = (pair.collected, pair.body);
        session.order.put(Chunk { number: 0, bytes: first }).unwrap();
        session.order.put(Chunk { number: 1, bytes: second }).unwrap();
        assert!(reader.whole(5).unwrap().is_none(), "it is not all of the chunk");
        reader.read_exact(&mut [0; 5]).unwrap();
        assert!(reader.whole(4).unwrap().is_none(), "it is the rest of a chunk");
        reader.read_exact(&mut [0; 4]).unwrap();
        assert_eq!(reader.whole(CHUNK).unwrap().map(|body| body.as_ptr()), Some(place));
    }

    #[test]
    fn what_is_sent_together_is_numbered_in_order() {
        let buf = |len| Buf::from(&vec![9; len][..]);
        for (collected, body, lens) in [(3, 4, [12, 3, 12, 4]), (3, 0, [12, 3, 0, 0]), (0, 4, [0, 0, 12, 4])]
        {
            let pair = Pair { collected: buf(collected), body: buf(body) };
            let mut headers = Default::default();
            let parts = pair.parts(5, &mut headers);
            assert_eq!(parts.map(<[u8]>::len), lens);
            let numbers = parts.iter().filter(|part| part.len() == 12).map(|header| header[0]);
            assert!(numbers.eq(5..5 + lens.iter().filter(|len| **len == 12).count() as u8));
        }
    }
}
