//! Messages framed over two byte streams: the transport of every link that leaves the process.
//!
//! [`format`] has the bytes. A thread reads ([`reader`]), two more keep the link alive and notice a silent peer
//! ([`keepalive`]); a thread that sends a message writes it.

pub(crate) mod pipe;
pub(crate) mod ssh;
pub(crate) mod stream;

mod format;
mod keepalive;
mod reader;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError, mpsc};
use std::thread;
use std::time::Duration;

use device::Buf;

pub(crate) use self::format::NEVER;
pub use self::format::VERSION;
use self::format::{FrameHead, Hello};
pub(crate) use self::keepalive::Activity;
use self::keepalive::Keepalive;
use crate::flow::lock;
use crate::flow::rate::Rate;
use crate::flow::transport::{Shared, Transport, WINDOW};
use crate::message::MAX_COST;
use crate::{Error, Message, Result};

/// How long a peer that is no longer trusted may take to be told, and to end its side.
const LAST_WORD: Duration = Duration::from_millis(500);

type Reading = Box<dyn Incoming>;
type Writing = Box<dyn Outgoing>;

/// A stream that is read, and may have a body in memory of its own.
pub(crate) trait Incoming: Read + Send {
    /// The next `len` bytes, if they lie in a buffer that can be given away; `None` if they must be read.
    fn whole(&mut self, _len: usize) -> io::Result<Option<Buf>> {
        Ok(None)
    }
}

/// A stream that is written, and may take the memory of a body.
pub(crate) trait Outgoing: Write + Send {
    /// Sends a message whose body it keeps until that is sent. Gives the body back where it must be copied: nothing is sent then.
    fn hand_over(&mut self, _before: [&[u8]; 2], body: Buf) -> io::Result<Option<Buf>> {
        Ok(Some(body))
    }
}

/// A stream of the system's: the kernel copies all that passes.
struct Copied<S>(S);

impl<S: Read> Read for Copied<S> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl<S: Write> Write for Copied<S> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write(buf)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl<S: Read + Send> Incoming for Copied<S> {}
impl<S: Write + Send> Outgoing for Copied<S> {}

/// The process or socket behind the byte streams: it can be ended by force, and knows better why the streams ended.
pub(crate) trait StreamOwner: Send + Sync {
    /// The peer's hello has come.
    fn greeted(&self) {}
    /// Ends it, so that every read and write of the streams returns. Data sent before may still be delivered, for a moment.
    fn kill(&self);
    /// Waits up to `patience` until what was sent before the goodbye is delivered, then ends it.
    fn settle(&self, patience: Duration);
    /// The error for streams that ended without a goodbye.
    fn why_it_ended(&self, greeted: bool, why: String) -> Error;
}

/// Whether the two sides still trust each other, where that depends on keys.
pub(crate) trait Trust: Send + Sync {
    /// Judges the peer's key as it is pinned now.
    ///
    /// # Errors
    /// Why it is no longer trusted.
    fn check(&self) -> Result<()>;

    /// The error for a peer that no longer trusts this side's key.
    fn refused(&self) -> Error;
}

/// Options of one side.
pub(crate) struct StreamOptions {
    /// What may be in transit to this end, in bytes; a single message may exceed it.
    pub(crate) window: u32,
    /// Give up on a peer that sends nothing for this long.
    pub(crate) timeout: Duration,
    /// Raised by layers below that hear of the peer before this one reads it.
    pub(crate) activity: Activity,
    /// Checked while the link is open.
    pub(crate) trust: Option<Arc<dyn Trust>>,
}

impl StreamOptions {
    /// Options of a side that hears of its peer only through the streams.
    pub(crate) fn of(timeout: Duration) -> StreamOptions {
        StreamOptions { window: WINDOW, timeout, activity: Activity::default(), trust: None }
    }
}

/// A link's end over two byte streams.
pub(crate) struct FramedStream {
    shared: Arc<Shared>,
    out: Mutex<Out>,
    /// Bytes that the receiver has taken and not yet credited.
    owed: AtomicU64,
    /// Bytes received and not yet credited: the peer must keep them bounded.
    inside: AtomicU64,
    abandoned: AtomicBool,
    /// Why the peer is no longer trusted.
    distrust: OnceLock<Error>,
    options: StreamOptions,
    keepalive: Keepalive,
    owner: Option<Arc<dyn StreamOwner>>,
}

/// The stream that is written, until it has failed or was given up.
struct Out {
    writer: Option<Writing>,
    rate: Option<Rate>,
}

impl FramedStream {
    /// Starts an end over streams of the system's.
    pub(crate) fn open(
        peer: &str,
        reader: impl Read + Send + 'static,
        writer: impl Write + Send + 'static,
        options: StreamOptions,
        owner: Option<Arc<dyn StreamOwner>>,
    ) -> Arc<FramedStream> {
        FramedStream::start(peer, Box::new(Copied(reader)), Box::new(Copied(writer)), options, owner)
    }

    /// Starts an end: writes the hello and starts the thread that reads.
    pub(crate) fn start(
        peer: &str,
        reader: Reading,
        writer: Writing,
        options: StreamOptions,
        owner: Option<Arc<dyn StreamOwner>>,
    ) -> Arc<FramedStream> {
        let hello = Hello { window: options.window, timeout: options.timeout }.to_bytes();
        let stream = Arc::new(FramedStream {
            shared: Shared::new(peer),
            out: Mutex::new(Out { writer: Some(writer), rate: None }),
            owed: AtomicU64::new(0),
            inside: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
            distrust: OnceLock::new(),
            keepalive: Keepalive::new(options.activity.clone()),
            options,
            owner,
        });
        // If the peer is gone already, the reader reports it with the cause.
        let _ = stream.put(&mut lock(&stream.out), [&hello, &[], &[]]);
        let for_reader = Arc::clone(&stream);
        let read = move || reader::run(&for_reader, reader);
        if let Err(error) = thread::Builder::new().name("link reader".into()).spawn(read) {
            stream.shared.fail(stream.shared.cut(format!("cannot start a thread: {error}")));
        }
        stream
    }

    /// Sends a ping, unless a message is being sent anyway. False when nothing can be sent any more.
    fn ping(&self) -> bool {
        let Some(mut out) = self.try_out() else { return true };
        let sent = self.put(&mut out, [&FrameHead::Ping.to_bytes(), &[], &[]]);
        drop(out);
        self.close_if_abandoned();
        self.send_credit();
        sent.is_ok()
    }

    /// Counts a received message. False if the peer had no credit for it.
    fn has_room_for(&self, cost: u64) -> bool {
        let inside = self.inside.fetch_add(cost, Ordering::SeqCst) + cost;
        inside < u64::from(self.options.window) + MAX_COST
    }

    /// The peer is gone: stop waiting for it.
    fn give_up(&self, why: &str) {
        self.shared.fail(self.shared.cut(why));
        self.close(true);
    }

    /// Gives the peer up if its hello does not come within this time.
    pub(crate) fn greeted_within(&self, patience: Duration) {
        if !self.shared.window.is_open_within(patience) {
            self.give_up(&format!("dsync did not answer there within {:.1} s", patience.as_secs_f64()));
        }
    }

    /// The peer is no longer trusted: tells it, and ends the link whether it listens or not.
    fn distrust(&self, error: Error) {
        // First, as the peer's end of the link must not pass for the reason.
        let error = self.distrust.get_or_init(|| error).clone();
        let (told, wait) = mpsc::channel();
        thread::scope(|scope| {
            // A peer that does not read would block the write until the owner is killed below.
            let tell = move || {
                let _ = self.put(&mut lock(&self.out), [&FrameHead::Distrust.to_bytes(), &[], &[]]);
                let _ = told.send(());
            };
            if thread::Builder::new().name("link distrust".into()).spawn_scoped(scope, tell).is_ok() {
                let _ = wait.recv_timeout(LAST_WORD);
            }
            self.shared.fail(error);
            if let Some(owner) = &self.owner {
                // Time for the peer to read it: an end by force can overtake what was sent.
                owner.settle(LAST_WORD);
            }
            self.close(true);
        });
    }

    fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    /// The writing side, unless another thread is writing: that one handles credit and closing afterwards.
    fn try_out(&self) -> Option<MutexGuard<'_, Out>> {
        match self.out.try_lock() {
            Ok(out) => Some(out),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn send_credit(&self) {
        // In portions of a quarter of the window, to limit the cost.
        while self.owed.load(Ordering::SeqCst) >= u64::from(self.options.window / 4) {
            let Some(mut out) = self.try_out() else { return };
            let owed = self.owed.swap(0, Ordering::SeqCst);
            self.inside.fetch_sub(owed, Ordering::SeqCst);
            let credit = FrameHead::Credit(u32::try_from(owed).unwrap_or(u32::MAX)).to_bytes();
            if self.put(&mut out, [&credit, &[], &[]]).is_err() {
                return;
            }
            drop(out);
            self.close_if_abandoned();
        }
    }

    fn close_if_abandoned(&self) {
        if self.is_abandoned() {
            if let Some(mut out) = self.try_out() {
                out.writer = None;
            }
        }
    }

    fn write(&self, before: [&[u8]; 2], body: Buf) -> Result<()> {
        let written = self.put_message(&mut lock(&self.out), before, body);
        self.close_if_abandoned();
        self.send_credit();
        written.map_err(|error| {
            // The reader gets a better reason from the owner.
            let patience = Duration::from_secs(if self.owner.is_some() { 2 } else { 0 });
            let shared = &self.shared;
            let error = shared.inbox.failure(patience).unwrap_or_else(|| shared.cut(error.to_string()));
            shared.window.close(error.clone());
            error
        })
    }

    fn put_message(&self, out: &mut Out, before: [&[u8]; 2], mut body: Buf) -> io::Result<()> {
        let bytes = before.iter().map(|part| part.len()).sum::<usize>() + body.len();
        // A limited rate sends piece by piece.
        if let Out { writer: Some(stream), rate: None } = out {
            match stream.hand_over(before, body) {
                Ok(Some(back)) => body = back,
                Ok(None) => {
                    self.shared.traffic.add_sent(bytes as u64);
                    return Ok(());
                }
                Err(error) => {
                    out.writer = None;
                    return Err(error);
                }
            }
        }
        self.put(out, [before[0], before[1], &body])
    }

    fn put(&self, out: &mut Out, mut parts: [&[u8]; 3]) -> io::Result<()> {
        let Out { writer, rate } = out;
        let Some(stream) = writer else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let result = loop {
            let mut left = rate.as_ref().map_or(usize::MAX, Rate::chunk);
            let slices = parts.map(|part| {
                let part = &part[..part.len().min(left)];
                left -= part.len();
                IoSlice::new(part)
            });
            if slices.iter().all(|slice| slice.is_empty()) {
                break stream.flush();
            }
            if let Some(rate) = rate {
                rate.wait();
            }
            let mut sent = match stream.write_vectored(&slices) {
                Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => break Err(error),
            };
            self.shared.traffic.add_sent(sent as u64);
            if let Some(rate) = rate {
                rate.charge(sent as u64);
                if rate.is_slow() {
                    if let Err(error) = stream.flush() {
                        break Err(error);
                    }
                }
            }
            for part in &mut parts {
                let gone = sent.min(part.len());
                *part = &part[gone..];
                sent -= gone;
            }
        };
        if result.is_err() {
            // Half a message may have gone out: nothing may follow it.
            *writer = None;
        }
        result
    }

    /// Closes the stream, so that the peer notices; by force, its owner too.
    fn close(&self, by_force: bool) {
        self.abandoned.store(true, Ordering::SeqCst);
        if let (Some(owner), true) = (&self.owner, by_force) {
            owner.kill();
        }
        self.close_if_abandoned();
    }
}

impl Transport for FramedStream {
    fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn send(&self, message: Message) -> Result<()> {
        let Message { kind, head, body } = message;
        let header = FrameHead::Message { kind, head: head.len(), body: body.len() }.to_bytes();
        self.write([&header, &head], body)
    }

    fn goodbye(&self) -> Result<()> {
        self.write([&FrameHead::Goodbye.to_bytes(), &[]], Buf::default())
    }

    fn consumed(&self, cost: u64) {
        self.owed.fetch_add(cost, Ordering::SeqCst);
        self.send_credit();
    }

    fn limit(&self, rate: Option<Rate>) {
        lock(&self.out).rate = rate;
    }

    fn abandon(&self) {
        self.close(!self.shared.is_finished());
    }

    fn hang_up(&self) {
        self.keepalive.end();
        self.abandon();
        if let Some(owner) = &self.owner {
            // After a goodbye, allow time to deliver it.
            let patience = if self.shared.is_finished() { Duration::from_secs(10) } else { Duration::ZERO };
            owner.settle(patience);
        }
    }
}
