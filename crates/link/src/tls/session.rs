//! The connections of a session: one stream each way over several of them.
//!
//! One connection carries no more than the kernel's send buffer (`net.ipv4.tcp_wmem`, 4 MiB unless changed) in each round
//! trip, so a far link needs several. What is written is cut into chunks, of which any connection that is free takes the next;
//! the other side puts them in order. Two threads serve each connection. A connection that breaks cuts the link: the layers
//! above know how to resume.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use device::Buf;
use rustls::Connection;

use super::chunk::{self, Assembler, CHUNK, CHUNK_HEADER};
use super::connection::TlsConnection;
use super::queue::Queue;
use super::reorder::Reorder;
use super::share::{self, Share};
use crate::flow::lock;
use crate::framed::{Activity, FramedStream, StreamOptions, StreamOwner, Trust};
use crate::{Error, Link, Result};

/// How long what was sent before a link is given up may take to go out.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What is read from a connection at a time.
const READ: usize = 256 << 10;

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
        out: Queue::new(2 * count),
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
    let reader = Reader { session: Arc::clone(&session), chunk: Buf::default(), at: 0 };
    let writer = Writer { session: Arc::clone(&session), chunk: Buf::default() };
    let options = StreamOptions { window, timeout, activity: session.activity.clone(), trust: Some(trust) };
    Ok(Link::over(FramedStream::open(peer, reader, writer, options, Some(session))))
}

/// What carries a link over TLS.
struct TlsSession {
    peer: String,
    connections: Vec<SessionConnection>,
    out: Queue,
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

    /// Sends what `tls` has encrypted.
    fn send(&self, mut tls: MutexGuard<'_, Connection>, out: &mut Vec<u8>) -> Result<(), String> {
        out.clear();
        while tls.wants_write() {
            tls.write_tls(out).map_err(|error| error.to_string())?;
        }
        drop(tls);
        (&*self.socket).write_all(out).map_err(|error| error.to_string())
    }
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
    while let Some((number, mut chunk)) = session.out.take() {
        chunk::number(&mut chunk, number);
        let mut tls = lock(&connection.tls);
        tls.writer().write_all(&chunk).map_err(|error| error.to_string())?;
        connection.send(tls, &mut out)?;
    }
    let mut tls = lock(&connection.tls);
    tls.send_close_notify();
    connection.send(tls, &mut out)?;
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

impl Read for Reader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.at == self.chunk.len() {
            match self.session.order.take().map_err(io::Error::other)? {
                Some(chunk) => (self.chunk, self.at) = (chunk, 0),
                None => return Ok(0),
            }
        }
        let len = buf.len().min(self.chunk.len() - self.at);
        buf[..len].copy_from_slice(&self.chunk[self.at..self.at + len]);
        self.at += len;
        Ok(len)
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
    /// With room for the header, and of the length of a full chunk with it: whole records of TLS.
    chunk: Buf,
}

impl Write for Writer {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut taken = 0;
        for slice in slices {
            if self.chunk.is_empty() {
                self.chunk = Buf::scratch(CHUNK);
                self.chunk.set_len(CHUNK_HEADER);
            }
            let at = self.chunk.len();
            let room = CHUNK - at;
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
        match self.chunk.len() > CHUNK_HEADER {
            true => self.session.out.put(std::mem::take(&mut self.chunk)),
            false => Ok(()),
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.session.out.close(None);
    }
}
