//! The two halves of a link's end, and the link within one process.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use serde::Serialize;

use crate::dial::{Call, dial};
use crate::flow::{End, Heard, Inbox, Window, lock};
use crate::pulse::{Heard as Noted, NEVER};
use crate::rate::Rate;
use crate::wire::{self, Terms, Wire};
use crate::{Error, Keys, Message, Result, ssh, stream};

/// What may be on its way to one receiver, in bytes; one message may exceed it. Enough for what is near, and for ssh, which
/// has a window of its own.
pub(crate) const WINDOW: u32 = 8 << 20;

/// One end of a link.
pub struct Link {
    sender: Sender,
    receiver: Receiver,
}

/// The half that sends. Dropped before [`Sender::finish`], it cuts the link.
pub struct Sender {
    end: Arc<Owned>,
}

/// The half that receives. Dropped before the peer's goodbye, it cuts the link.
pub struct Receiver {
    end: Arc<Owned>,
}

/// Bytes that went over one end of a link, framing included.
#[derive(Debug, Default)]
pub struct Traffic {
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
}

impl Traffic {
    /// Bytes sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Bytes received so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}

/// What both halves, and a pipe's reader, share.
pub(crate) struct Shared {
    /// The other end's name in messages.
    pub(crate) peer: String,
    pub(crate) inbox: Inbox,
    pub(crate) window: Window,
    pub(crate) traffic: Arc<Traffic>,
    /// The goodbye was sent.
    pub(crate) finished: AtomicBool,
    pub(crate) road: Road,
}

pub(crate) enum Road {
    Pair(Pair),
    Wire(Wire),
}

/// The way to the other end in the same process.
#[derive(Default)]
pub(crate) struct Pair {
    other: OnceLock<Weak<Shared>>,
    rate: Mutex<Option<Rate>>,
}

/// Hangs up when both halves have gone. A pipe's reader outlives it when nothing wakes it.
struct Owned(Arc<Shared>);

impl Drop for Owned {
    fn drop(&mut self) {
        if let Road::Wire(wire) = &self.0.road {
            wire.hang_up(self.0.finished.load(Ordering::SeqCst));
        }
    }
}

impl Shared {
    pub(crate) fn cut(&self, why: impl Into<String>) -> Error {
        Error::Cut { peer: self.peer.clone(), why: why.into() }
    }

    /// Ends the link at this end without a goodbye.
    fn abandon(&self) {
        self.abandon_because("it was given up on this side");
    }

    /// The same from outside, whatever the halves do.
    pub(crate) fn abandon_because(&self, why: &str) {
        self.abandon_with(self.cut(why), self.finished.load(Ordering::SeqCst));
    }

    /// The peer is there no more: nothing that was said can be waited for.
    pub(crate) fn give_up(&self, why: &str) {
        self.abandon_with(self.cut(why), false);
    }

    fn abandon_with(&self, error: Error, finished: bool) {
        // Told first: what ends because of it has other reasons to give.
        self.window.close(error.clone());
        self.inbox.end(End::Failed(error));
        match &self.road {
            Road::Pair(pair) => {
                if let Some(other) = pair.other() {
                    let error = other.cut("the other side gave up");
                    other.window.close(error.clone());
                    other.inbox.end(End::Failed(error));
                }
            }
            Road::Wire(wire) => wire.abandon(finished),
        }
    }
}

impl Pair {
    fn other(&self) -> Option<Arc<Shared>> {
        self.other.get().and_then(Weak::upgrade)
    }
}

impl Link {
    /// Two ends in one process. Messages are moved, never copied.
    pub fn pair() -> (Link, Link) {
        let ends = [(); 2].map(|()| {
            let shared = Shared::new("the other side", Road::Pair(Pair::default()));
            shared.window.release(WINDOW.into());
            Arc::new(shared)
        });
        for (one, other) in [(0, 1), (1, 0)] {
            if let Road::Pair(pair) = &ends[one].road {
                let _ = pair.other.set(Arc::downgrade(&ends[other]));
            }
        }
        let [a, b] = ends.map(Link::from_shared);
        (a, b)
    }

    /// An end over two byte streams. A thread reads `reader` until it ends, and no longer than both halves live unless it
    /// is stuck in a read. The peer's hello is awaited by [`Link::ready`] or the first message.
    pub fn pipe(reader: impl Read + Send + 'static, writer: impl Write + Send + 'static) -> Link {
        Link::from_shared(wire::open("the far side", Box::new(reader), Box::new(writer), terms(NEVER), None))
    }

    /// The end of a process that was started to be the far side: its standard input and output. Later prints to standard
    /// output go to standard error, so that they can't damage the link. It has no timeout of its own: the near side's holds.
    ///
    /// # Errors
    /// [`Error::Stdio`] if the descriptors can't be duplicated.
    pub fn stdio() -> Result<Link> {
        let (reader, writer, wake) = stream::take_stdio().map_err(|error| Error::Stdio(error.to_string()))?;
        widen_both(&reader, &writer);
        let (reader, writer) = (Box::new(reader), Box::new(writer));
        Ok(Link::from_shared(wire::open("the far side", reader, writer, terms(NEVER), Some(wake))))
    }

    /// Starts `command` on `host` through a remote shell (`["ssh"]`, perhaps with options), and waits for its hello. The
    /// command's words arrive as they are given here, whatever is in them. What the far side writes to its standard error
    /// is shown once the link stands, and is part of the error if it falls. From then on a far side from which nothing comes
    /// for `timeout` is given up; what the remote shell may take before is its own business.
    ///
    /// # Errors
    /// [`Error::Start`], [`Error::Rsh`], [`Error::Absent`], [`Error::Command`], [`Error::NotDsync`], [`Error::Version`],
    /// each naming the host and a way out.
    pub fn ssh(rsh: &[String], host: &str, command: &[String], timeout: Duration) -> Result<Link> {
        let (remote, reader, writer) = ssh::start(rsh, host, command)?;
        widen_both(&reader, &writer);
        let (reader, writer) = (Box::new(reader), Box::new(writer));
        let link = Link::from_shared(wire::open(host, reader, writer, terms(timeout), Some(remote)));
        link.ready()?;
        Ok(link)
    }

    /// Calls the [`Listener`](crate::Listener) at `host` and `port`, shows the own key of `keys`, believes only the one that is
    /// pinned there for `HOST:PORT` or `HOST`, and waits for its hello.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Tls`], [`Error::Unknown`], [`Error::Swapped`], [`Error::Expired`], [`Error::NotTrusted`],
    /// [`Error::Busy`], [`Error::Keys`], [`Error::Version`], each naming the host and a way out.
    pub fn tls(keys: &Keys, host: &str, port: u16, call: &Call) -> Result<Link> {
        let link = Link::from_shared(dial(keys, host, port, call)?);
        link.ready()?;
        Ok(link)
    }

    /// Waits for the peer's hello.
    ///
    /// # Errors
    /// Whatever came instead of it.
    pub fn ready(&self) -> Result<()> {
        self.sender.end.0.window.wait_open()
    }

    /// Both halves, for two threads.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// The counters, readable while the link works.
    pub fn traffic(&self) -> Arc<Traffic> {
        self.sender.traffic()
    }

    pub(crate) fn from_shared(shared: Arc<Shared>) -> Link {
        let end = Arc::new(Owned(shared));
        Link { sender: Sender { end: Arc::clone(&end) }, receiver: Receiver { end } }
    }
}

impl Shared {
    pub(crate) fn new(peer: &str, road: Road) -> Shared {
        Shared {
            peer: peer.to_string(),
            inbox: Inbox::default(),
            window: Window::default(),
            traffic: Arc::default(),
            finished: AtomicBool::new(false),
            road,
        }
    }
}

/// The terms of a side that hears of its peer by the streams alone.
fn terms(timeout: Duration) -> Terms {
    Terms { window: WINDOW, timeout, heard: Noted::default() }
}

fn widen_both(reader: &impl std::os::fd::AsFd, writer: &impl std::os::fd::AsFd) {
    wire::widen(reader);
    wire::widen(writer);
}

impl Sender {
    /// Sends a message, waiting while the peer's window is used up.
    ///
    /// # Errors
    /// [`Error::TooLong`] leaves the link as it was; any other error ends it. What the peer said before the end can still
    /// be received, and often tells more than this error.
    pub fn send(&self, message: Message) -> Result<()> {
        message.check()?;
        let shared = &self.end.0;
        let cost = message.cost();
        shared.window.acquire(cost)?;
        match &shared.road {
            Road::Pair(pair) => {
                if let Some(rate) = lock(&pair.rate).as_mut() {
                    rate.wait();
                    rate.charge(message.bytes());
                }
                let other = pair.other().ok_or_else(|| shared.cut(""))?;
                other.traffic.received.fetch_add(message.bytes(), Ordering::Relaxed);
                shared.traffic.sent.fetch_add(message.bytes(), Ordering::Relaxed);
                other.inbox.push(message);
                Ok(())
            }
            Road::Wire(wire) => wire.send(shared, &message),
        }
    }

    /// Sends a message whose head is `value` as JSON, without a body.
    ///
    /// # Errors
    /// [`Error::Json`] if JSON can't hold the value; else as [`Sender::send`].
    pub fn send_json<T: Serialize>(&self, kind: u8, value: &T) -> Result<()> {
        let head = serde_json::to_vec(value).map_err(|error| Error::Json { kind, why: error.to_string() })?;
        self.send(Message { kind, head, ..Message::default() })
    }

    /// Says goodbye: the peer's [`Receiver::recv`] gives `None` after what was sent before. Receive until the peer has said
    /// goodbye too: one that is left before can't say its own, and must take the link for cut.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn finish(self) -> Result<()> {
        let shared = &self.end.0;
        match &shared.road {
            Road::Pair(pair) => pair.other().ok_or_else(|| shared.cut(""))?.inbox.end(End::Goodbye),
            Road::Wire(wire) => {
                // A peer that has said all may have ended its stream already, and still hears this.
                if !matches!(shared.inbox.ended(), Some(End::Goodbye)) {
                    shared.window.wait_usable()?;
                }
                wire.goodbye(shared)?;
            }
        }
        shared.finished.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Bounds what is sent to so many bytes a second, smoothly; 0 lifts the bound.
    pub fn limit(&self, bytes_per_second: u64) {
        let rate = (bytes_per_second > 0).then(|| Rate::new(bytes_per_second));
        match &self.end.0.road {
            Road::Pair(pair) => *lock(&pair.rate) = rate,
            Road::Wire(wire) => wire.limit(rate),
        }
    }

    /// The counters, readable while the link works.
    pub fn traffic(&self) -> Arc<Traffic> {
        Arc::clone(&self.end.0.traffic)
    }

    /// Cuts the link. Whoever waits in one of its halves, on this side or the other, gets an error.
    pub fn cut(&self) {
        self.end.0.abandon();
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.end.0.finished.load(Ordering::SeqCst) {
            self.end.0.abandon();
        }
    }
}

impl Receiver {
    /// The next message, waiting for it. `None` after the peer's goodbye.
    ///
    /// # Errors
    /// [`Error::Cut`] if the link ended without a goodbye; [`Error::Bad`], [`Error::NotDsync`] and [`Error::Version`] if
    /// the peer is not what it should be. All that arrived before is given out first.
    pub fn recv(&self) -> Result<Option<Message>> {
        let message = self.end.0.inbox.pop()?;
        message.iter().for_each(|message| self.taken(message));
        Ok(message)
    }

    /// As [`Receiver::recv`], but waits no longer than that.
    ///
    /// # Errors
    /// As [`Receiver::recv`].
    pub fn recv_within(&self, patience: Duration) -> Result<Heard> {
        let heard = self.end.0.inbox.pop_within(patience)?;
        if let Heard::Message(message) = &heard {
            self.taken(message);
        }
        Ok(heard)
    }

    fn taken(&self, message: &Message) {
        let shared = &self.end.0;
        match &shared.road {
            Road::Pair(pair) => {
                if let Some(other) = pair.other() {
                    other.window.release(message.cost());
                }
            }
            Road::Wire(wire) => wire.consumed(shared, message.cost()),
        }
    }
}

impl Receiver {
    #[cfg(test)]
    pub(crate) fn shared(&self) -> &Shared {
        &self.end.0
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if !matches!(self.end.0.inbox.ended(), Some(End::Goodbye)) {
            self.end.0.abandon();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::File;
    use std::thread;
    use std::time::Instant;

    use device::Buf;

    use super::*;
    use crate::widen;

    fn message(kind: u8, len: usize) -> Message {
        Message { kind, head: vec![kind; 7], body: Buf::new(len) }
    }

    pub(crate) fn pipe() -> (File, File) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        (reader.into(), writer.into())
    }

    /// A link over two pipes within the process.
    fn piped() -> (Link, Link) {
        let (a_in, b_out) = pipe();
        let (b_in, a_out) = pipe();
        for fd in [&a_out, &b_out] {
            widen(fd);
        }
        (Link::pipe(a_in, a_out), Link::pipe(b_in, b_out))
    }

    /// What a link of any kind must do: in `check`, `a` and `b` are its ends.
    fn every_link(check: fn(Link, Link)) {
        every_near_link(check);
        let (a, b) = crate::tests::over_tls(3);
        check(a, b);
    }

    /// The same where time is measured, for links that need no more of a busy machine than a memory copy.
    fn every_near_link(check: fn(Link, Link)) {
        let (a, b) = Link::pair();
        check(a, b);
        let (a, b) = piped();
        check(a, b);
    }

    #[test]
    fn messages_arrive_in_order_and_the_end_is_clean() {
        every_link(|a, b| {
            let traffic = (a.traffic(), b.traffic());
            let ((a_tx, a_rx), (b_tx, b_rx)) = (a.split(), b.split());
            let far = thread::spawn(move || {
                while let Some(message) = b_rx.recv().unwrap() {
                    b_tx.send(message).unwrap();
                }
                b_tx.finish().unwrap();
                assert!(b_rx.recv().unwrap().is_none(), "the end stays the end");
            });
            for (kind, len) in [(0, 0), (255, 1), (7, 4096), (8, MAX), (9, 3)] {
                let mut sent = message(kind, len);
                if let Some(last) = sent.body.last_mut() {
                    *last = 42;
                }
                a_tx.send(sent).unwrap();
                let got = a_rx.recv().unwrap().unwrap();
                assert_eq!((got.kind, &got.head[..], got.body.len()), (kind, &[kind; 7][..], len));
                assert_eq!(got.body.last().copied(), (len > 0).then_some(42));
                assert!(len == 0 || got.body.as_ptr() as usize % Buf::ALIGN == 0);
            }
            a_tx.send_json(3, &vec!["x"]).unwrap();
            let got = a_rx.recv().unwrap().unwrap();
            assert_eq!(got.json::<Vec<String>>().unwrap(), ["x"]);
            assert!(matches!(got.json::<u32>(), Err(Error::Bad { .. })));
            a_tx.finish().unwrap();
            assert!(a_rx.recv().unwrap().is_none());
            far.join().unwrap();
            assert!(traffic.0.sent() > MAX as u64 && traffic.0.sent() == traffic.1.received());
            assert_eq!(traffic.0.received(), traffic.1.sent());
        });
        const MAX: usize = crate::MAX_BODY;
    }

    #[test]
    fn both_ways_flood() {
        every_link(|a, b| {
            let sides = [a, b].map(|link| {
                let (tx, rx) = link.split();
                let sender = thread::spawn(move || {
                    for i in 0..200usize {
                        // Small ones between, and some that overdraw the window.
                        let len = [17, crate::MAX_BODY, 300_000][i % 3];
                        let head = vec![1; if i % 50 == 0 { crate::MAX_HEAD } else { 10 }];
                        tx.send(Message { kind: i as u8, head, body: Buf::new(len) }).unwrap();
                    }
                    tx.finish().unwrap();
                });
                let receiver = thread::spawn(move || {
                    let mut count = 0usize;
                    while let Some(message) = rx.recv().unwrap() {
                        assert_eq!(message.kind, count as u8);
                        count += 1;
                        if count % 40 == 0 {
                            thread::sleep(Duration::from_millis(2));
                        }
                    }
                    count
                });
                (sender, receiver)
            });
            for (sender, receiver) in sides {
                sender.join().unwrap();
                assert_eq!(receiver.join().unwrap(), 200);
            }
        });
    }

    #[test]
    fn the_window_bounds_what_is_in_flight() {
        every_link(|a, b| {
            let window = match &b.receiver.end.0.road {
                Road::Pair(_) => u64::from(WINDOW),
                Road::Wire(wire) => wire.window(),
            };
            let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
            let traffic = tx.traffic();
            let sender = thread::spawn(move || {
                let mut sent = 0u64;
                while tx.send(message(1, 1 << 20)).is_ok() {
                    sent += 1;
                }
                sent
            });
            let until = Instant::now() + Duration::from_secs(20);
            while traffic.sent() < window && Instant::now() < until {
                thread::sleep(Duration::from_millis(10));
            }
            thread::sleep(Duration::from_millis(200));
            let bound = window + crate::message::MAX_COST;
            assert!((window..bound).contains(&traffic.sent()), "{} in flight", traffic.sent());
            for _ in 0..100 {
                rx.recv().unwrap().unwrap();
            }
            drop(rx);
            let most = 102 + (window >> 20);
            assert!((100..=most).contains(&sender.join().unwrap()));
        });
    }

    #[test]
    fn many_small_messages_are_as_bounded_as_few_large_ones() {
        // What one of them takes at least: its place in the queue, and a page for any body.
        for (body, takes) in [(0, 100), (1, 4096)] {
            for (a, b) in [Link::pair(), piped()] {
                let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
                let sent = Arc::new(AtomicU64::new(0));
                let count = Arc::clone(&sent);
                let sender = thread::spawn(move || {
                    while tx.send(Message { body: Buf::new(body), ..Message::default() }).is_ok() {
                        count.fetch_add(1, Ordering::SeqCst);
                    }
                });
                let (mut before, until) = (0, Instant::now() + Duration::from_secs(20));
                // Until it stands still.
                loop {
                    thread::sleep(Duration::from_millis(300));
                    let now = sent.load(Ordering::SeqCst);
                    if now == before && now > 0 {
                        break;
                    }
                    assert!(Instant::now() < until);
                    before = now;
                }
                assert!(before * takes <= u64::from(WINDOW), "{before} of {body} bytes");
                drop(rx);
                sender.join().unwrap();
            }
        }
    }

    #[test]
    fn a_half_that_is_dropped_cuts_the_link() {
        every_link(|a, b| {
            let ((a_tx, a_rx), (b_tx, b_rx)) = (a.split(), b.split());
            a_tx.send(message(1, 5)).unwrap();
            drop(a_tx);
            assert_eq!(b_rx.recv().unwrap().unwrap().kind, 1, "what was sent before still arrives");
            assert!(b_rx.recv().unwrap_err().is_cut());
            assert!(b_rx.recv().unwrap_err().is_cut());
            assert!((0..100).find_map(|_| b_tx.send(message(1, 1 << 20)).err()).unwrap().is_cut());
            assert!((0..100).find_map(|_| a_rx.recv().err()).unwrap().is_cut());
        });
        every_link(|a, b| {
            drop(a);
            let (b_tx, b_rx) = b.split();
            assert!(b_rx.recv().unwrap_err().is_cut());
            assert!(b_tx.send(message(1, 1)).unwrap_err().is_cut());
            assert!(b_tx.finish().unwrap_err().is_cut());
        });
    }

    #[test]
    fn a_sender_that_waits_for_credit_learns_of_the_cut() {
        every_link(|a, b| {
            let ((tx, _a_rx), far) = (a.split(), b);
            let sender = thread::spawn(move || {
                loop {
                    if let Err(error) = tx.send(message(1, 1 << 20)) {
                        return error;
                    }
                }
            });
            thread::sleep(Duration::from_millis(100));
            drop(far);
            assert!(sender.join().unwrap().is_cut());
        });
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_and_the_link_goes_on() {
        every_link(|a, b| {
            let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
            let error = tx.send(message(5, crate::MAX_BODY + 1)).unwrap_err();
            assert_eq!(
                error.to_string(),
                "a message of kind 5 has a body of 2097153 bytes; 2097152 is the most"
            );
            let head = vec![0; crate::MAX_HEAD + 1];
            assert!(tx.send(Message { head, ..Message::default() }).is_err());
            tx.send(message(6, 1)).unwrap();
            assert_eq!(rx.recv().unwrap().unwrap().kind, 6);
        });
    }

    #[test]
    fn the_limit_holds_within_a_tenth() {
        every_near_link(|a, b| {
            let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
            let rate = 16 << 20;
            tx.limit(rate);
            let far = thread::spawn(move || while let Ok(Some(_)) = rx.recv() {});
            let started = Instant::now();
            for _ in 0..64 {
                tx.send(message(1, 256 << 10)).unwrap();
            }
            // The last message of a pair is handed over before its time has passed.
            let seconds = started.elapsed().as_secs_f64();
            assert!((0.9..1.1).contains(&seconds), "16 MiB at 16 MiB/s took {seconds:.3} s");
            tx.limit(0);
            let started = Instant::now();
            for _ in 0..64 {
                tx.send(message(1, 256 << 10)).unwrap();
            }
            assert!(started.elapsed().as_secs_f64() < 0.5, "the limit was lifted");
            tx.finish().unwrap();
            far.join().unwrap();
        });
    }

    #[test]
    fn it_is_fast_enough_to_be_no_bottleneck() {
        every_near_link(|a, b| {
            let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
            let started = Instant::now();
            let far = thread::spawn(move || {
                let mut bytes = 0;
                while let Some(message) = rx.recv().unwrap() {
                    bytes += message.body.len();
                }
                bytes
            });
            for _ in 0..1024 {
                tx.send(message(1, 1 << 20)).unwrap();
            }
            tx.finish().unwrap();
            assert_eq!(far.join().unwrap(), 1 << 30);
            let rate = 1.0 / started.elapsed().as_secs_f64();
            println!("{rate:.2} GiB/s");
            // Far below what is usual, so that a busy machine does not fail the test.
            assert!(rate > 0.1, "{rate:.3} GiB/s");
        });
    }
}
