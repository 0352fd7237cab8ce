//! The lanes of a session: one stream each way over several connections, so that several cores encrypt and several windows
//! of TCP carry it.
//!
//! What is written is cut into chunks, of which any lane that is free takes the next. The other side puts them in order.
//! Two threads serve each lane. A lane that breaks cuts the link: the layers above know how to go on.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt;
use rustls::Connection;

use crate::ends::Shared;
use crate::flow::lock;
use crate::pulse::Heard;
use crate::session::{CHUNK, CHUNK_HEADER, Chunk, Pieces};
use crate::tls::Secured;
use crate::wire::{self, Carrier, Terms};
use crate::{Error, Result};

/// What may be on its way to one receiver, in bytes: three times what 1 Gbit/s carries in 150 ms.
pub(crate) const WINDOW: u32 = 64 << 20;

/// What may wait for an earlier chunk that another lane still carries, in bytes. Then only that lane is read, so a receiver
/// holds this and the window at most, whatever comes.
const AHEAD: usize = WINDOW as usize;

/// What a waiting chunk costs beside its bytes.
const KEPT: usize = 64;

/// How long what was sent before a link is given up may take to go out.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What a thread does for its lane, and where it is counted.
type Work = fn(&Session, &Lane) -> Result<(), String>;
type Count = fn(&mut Threads) -> &mut usize;

/// What is read from a connection at a time.
const READ: usize = 256 << 10;

/// Makes a connection notice within `timeout` that its peer has vanished, and carry as much as it can.
pub(crate) fn tune(socket: &TcpStream, timeout: Duration) {
    // Each is a help, and none is needed: whatever the system refuses is left as it is.
    let _ = socket.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(socket, true);
    let second = Duration::from_secs(1);
    let _ = sockopt::set_tcp_keepidle(socket, (timeout / 3).max(second));
    let _ = sockopt::set_tcp_keepintvl(socket, (timeout / 6).max(second));
    let _ = sockopt::set_tcp_keepcnt(socket, 4);
    let _ = sockopt::set_tcp_user_timeout(socket, u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX));
    // One packet lost in a thousand makes the others crawl on a far link.
    let _ = sockopt::set_tcp_congestion(socket, "bbr");
}

/// Opens the link over lanes whose other ends have shown the same key. The peer must say something within `patience`, and go on
/// doing so within every `timeout`.
pub(crate) fn open(
    peer: &str,
    lanes: Vec<Secured>,
    patience: Duration,
    timeout: Duration,
) -> Result<Arc<Shared>> {
    let count = lanes.len();
    let lanes = lanes.into_iter().map(|Secured { socket, tls }| Lane { socket, tls: Mutex::new(tls) });
    let session = Arc::new(Session {
        peer: peer.to_string(),
        lanes: lanes.collect(),
        out: Queue { state: Mutex::default(), changed: Condvar::new(), most: 2 * count },
        order: Order { state: Mutex::new(OrderState::of(count)), changed: Condvar::new() },
        threads: Mutex::default(),
        ended: Condvar::new(),
        heard: Heard::default(),
    });
    for lane in 0..count {
        let kinds: [(&str, Work, Count); 2] =
            [("lane sender", send, |t| &mut t.senders), ("lane reader", receive, |t| &mut t.readers)];
        for (name, work, count) in kinds {
            let started = session.lanes[lane].prepare(patience).and_then(|()| {
                *count(&mut lock(&session.threads)) += 1;
                let worker = Arc::clone(&session);
                let run = move || worker.run(&worker.lanes[lane], work, count);
                thread::Builder::new().name(name.into()).spawn(run)
            });
            if let Err(error) = started {
                session.cut("the session can't begin");
                return Err(Error::Cut { peer: peer.to_string(), why: error.to_string() });
            }
        }
    }
    let reader = Box::new(Reader { session: Arc::clone(&session), chunk: Vec::new(), at: 0 });
    let writer = Box::new(Writer { session: Arc::clone(&session), chunk: Vec::new() });
    let terms = Terms { window: WINDOW, timeout, heard: session.heard.clone() };
    Ok(wire::open(peer, reader, writer, terms, Some(session)))
}

/// The session of a link that goes over lanes.
struct Session {
    peer: String,
    lanes: Vec<Lane>,
    out: Queue,
    order: Order,
    threads: Mutex<Threads>,
    ended: Condvar,
    /// Also of what must wait for an earlier chunk.
    heard: Heard,
}

/// Threads that are at work.
#[derive(Default)]
struct Threads {
    senders: usize,
    readers: usize,
}

struct Lane {
    socket: Arc<TcpStream>,
    /// Held to encrypt and decrypt, never while anything is waited for.
    tls: Mutex<Connection>,
}

impl Lane {
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

impl Session {
    fn run(&self, lane: &Lane, work: Work, count: Count) {
        if let Err(why) = work(self, lane) {
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

    /// Ends everything at once; the first reason stands.
    fn cut(&self, why: &str) {
        self.order.fail(why);
        self.out.close(Some(why));
        for lane in &self.lanes {
            let _ = lane.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Carrier for Session {
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
fn send(session: &Session, lane: &Lane) -> Result<(), String> {
    let mut out = Vec::new();
    while let Some((number, mut chunk)) = session.out.take() {
        let len = u32::try_from(chunk.len() - CHUNK_HEADER).unwrap_or(u32::MAX);
        chunk[..8].copy_from_slice(&number.to_le_bytes());
        chunk[8..CHUNK_HEADER].copy_from_slice(&len.to_le_bytes());
        let mut tls = lock(&lane.tls);
        tls.writer().write_all(&chunk).map_err(|error| error.to_string())?;
        lane.send(tls, &mut out)?;
    }
    let mut tls = lock(&lane.tls);
    tls.send_close_notify();
    lane.send(tls, &mut out)?;
    // A peer that has gone by now has all it wants.
    let _ = lane.socket.shutdown(Shutdown::Write);
    Ok(())
}

/// Receives and decrypts to the peer's end.
fn receive(session: &Session, lane: &Lane) -> Result<(), String> {
    let mut pieces = Pieces::default();
    let mut encrypted = vec![0; READ];
    let mut whole = Vec::new();
    // What came with the peer's word is decrypted already.
    let mut have = 0..0;
    loop {
        let mut tls = lock(&lane.tls);
        let mut ended = false;
        loop {
            match tls.reader().read(pieces.room()) {
                Ok(0) => {
                    ended = true;
                    break;
                }
                Ok(len) => whole.extend(pieces.filled(len)?),
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
            if pieces.is_within() {
                return Err("it ended within a chunk".into());
            }
            session.order.lane_ended();
            return Ok(());
        }
        have = match (&*lane.socket).read(&mut encrypted) {
            // Without a word of goodbye.
            Ok(0) => return Err("the other side closed a connection".into()),
            Ok(len) => {
                session.heard.note();
                0..len
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0..0,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !session.order.has_begun() {
                    return Err("the other side says nothing".into());
                }
                lane.socket.set_read_timeout(None).map_err(|error| error.to_string())?;
                0..0
            }
            Err(error) => return Err(error.to_string()),
        };
    }
}

/// Chunks that wait for a lane, each with room for its header in front.
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    /// The most that may wait.
    most: usize,
}

#[derive(Default)]
struct QueueState {
    chunks: VecDeque<Vec<u8>>,
    /// The next one's number.
    number: u64,
    closed: bool,
    why: Option<String>,
}

impl Queue {
    fn put(&self, chunk: Vec<u8>) -> io::Result<()> {
        let mut state = lock(&self.state);
        while state.chunks.len() >= self.most && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            let why = state.why.clone().unwrap_or_else(|| "it has ended".into());
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, why));
        }
        state.chunks.push_back(chunk);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// The next chunk; `None` after the last, and at once after a cut.
    fn take(&self) -> Option<(u64, Vec<u8>)> {
        let mut state = lock(&self.state);
        loop {
            if state.why.is_some() {
                return None;
            }
            if let Some(chunk) = state.chunks.pop_front() {
                let number = state.number;
                state.number += 1;
                drop(state);
                self.changed.notify_all();
                return Some((number, chunk));
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// No more is put here; after a cut, nothing is taken either.
    fn close(&self, cut: Option<&str>) {
        let mut state = lock(&self.state);
        if !state.closed || cut.is_some() {
            state.why = state.why.take().or(cut.map(str::to_string));
        }
        state.closed = true;
        drop(state);
        self.changed.notify_all();
    }
}

/// Chunks that have come, put in order.
struct Order {
    state: Mutex<OrderState>,
    changed: Condvar,
}

struct OrderState {
    next: u64,
    /// Those that came before their turn, and the one whose turn it is.
    held: BTreeMap<u64, Vec<u8>>,
    /// What they cost.
    bytes: usize,
    /// Lanes whose end has not come.
    lanes: usize,
    begun: bool,
    /// Nobody takes them any more.
    deaf: bool,
    failed: Option<String>,
}

impl OrderState {
    fn of(lanes: usize) -> OrderState {
        OrderState {
            next: 0,
            held: BTreeMap::new(),
            bytes: 0,
            lanes,
            begun: false,
            deaf: false,
            failed: None,
        }
    }
}

impl Order {
    /// Takes a chunk. Waits while too much waits for an earlier one: never the lane that carries that.
    fn put(&self, chunk: Chunk) -> Result<(), String> {
        let Chunk { number, bytes } = chunk;
        let cost = bytes.len() + KEPT;
        let mut state = lock(&self.state);
        while state.bytes + cost > AHEAD && number != state.next && !state.deaf && state.failed.is_none() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(why) = &state.failed {
            return Err(why.clone());
        }
        if state.deaf {
            return Ok(());
        }
        if number < state.next || state.held.contains_key(&number) {
            return Err(format!("chunk {number} came twice"));
        }
        state.begun = true;
        state.bytes += cost;
        let turn = number == state.next;
        state.held.insert(number, bytes);
        drop(state);
        if turn {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// The next chunk's bytes; `None` after the last.
    fn take(&self) -> Result<Option<Vec<u8>>, String> {
        let mut state = lock(&self.state);
        loop {
            let next = state.next;
            if let Some(bytes) = state.held.remove(&next) {
                let full = state.bytes + CHUNK + KEPT > AHEAD;
                state.next += 1;
                state.bytes -= bytes.len() + KEPT;
                drop(state);
                if full {
                    self.changed.notify_all();
                }
                return Ok(Some(bytes));
            }
            match &state.failed {
                Some(why) => return Err(why.clone()),
                None if state.lanes == 0 && state.held.is_empty() => return Ok(None),
                None if state.lanes == 0 => return Err(format!("chunk {next} never came")),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn has_begun(&self) -> bool {
        lock(&self.state).begun
    }

    fn lane_ended(&self) {
        lock(&self.state).lanes -= 1;
        self.changed.notify_all();
    }

    /// What still comes is dropped: a peer that has a last word, such as a credit, does not hold up what is said to it.
    fn listen_no_more(&self) {
        let mut state = lock(&self.state);
        state.deaf = true;
        state.held.clear();
        state.bytes = 0;
        drop(state);
        self.changed.notify_all();
    }

    fn fail(&self, why: &str) {
        lock(&self.state).failed.get_or_insert_with(|| why.to_string());
        self.changed.notify_all();
    }
}

/// The stream that comes in.
struct Reader {
    session: Arc<Session>,
    chunk: Vec<u8>,
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
        self.session.order.listen_no_more();
    }
}

/// The stream that goes out.
struct Writer {
    session: Arc<Session>,
    /// With room for the header.
    chunk: Vec<u8>,
}

impl Write for Writer {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut taken = 0;
        for slice in slices {
            if self.chunk.is_empty() {
                self.chunk.reserve_exact(CHUNK_HEADER + CHUNK);
                self.chunk.resize(CHUNK_HEADER, 0);
            }
            let room = CHUNK_HEADER + CHUNK - self.chunk.len();
            let len = room.min(slice.len());
            self.chunk.extend_from_slice(&slice[..len]);
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn what_waits_for_an_earlier_chunk_is_bounded() {
        let order = Order { state: Mutex::new(OrderState::of(2)), changed: Condvar::new() };
        let chunk = |number| Chunk { number, bytes: vec![number as u8; CHUNK] };
        let count = 2 * (AHEAD / CHUNK) as u64;
        thread::scope(|scope| {
            scope.spawn(|| (1..count).for_each(|number| order.put(chunk(number)).unwrap()));
            let until = Instant::now() + Duration::from_secs(20);
            while lock(&order.state).bytes + CHUNK + KEPT <= AHEAD {
                assert!(Instant::now() < until, "it takes less than it may");
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(50));
            assert!(lock(&order.state).bytes <= AHEAD);
            // The lane whose turn it is never waits.
            order.put(chunk(0)).unwrap();
            for number in 0..count {
                assert_eq!(order.take().unwrap().unwrap()[..], chunk(number).bytes[..]);
            }
        });
        assert_eq!(lock(&order.state).bytes, 0);
        assert!(order.put(chunk(count - 1)).is_err(), "one that came before");
        order.lane_ended();
        order.lane_ended();
        assert_eq!(order.take(), Ok(None));
    }
}
