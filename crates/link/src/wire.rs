//! A link over two byte streams.
//!
//! Each side begins with a hello of 16 bytes: magic (8), version (u16), timeout in tenths of a second (u16), window in bytes
//! (u32). Then come units of 12 bytes: what it is (u8: 0 message, 1 credit, 2 goodbye, 3 ping), the message's kind (u8), zero
//! (u16), length of the head (u32), length of the body or bytes of credit (u32); a message's head and body follow. All
//! little-endian. Pings may follow the goodbye: a side that has said all still hears the other out.

use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread;
use std::time::Duration;

use device::Buf;

use crate::ends::{Road, Shared};
use crate::flow::{End, lock};
use crate::message::{self, HEADER, MAX_BODY, MAX_COST, MAX_HEAD};
use crate::pulse::{self, Heard, Pulse};
use crate::rate::Rate;
use crate::{Error, Message, Result};

/// The version of the link and of everything that is said over it.
pub const VERSION: u16 = 2;

const MAGIC: [u8; 8] = *b"\x93dsync\r\n";
const HELLO: usize = 16;

const MESSAGE: u8 = 0;
const CREDIT: u8 = 1;
const GOODBYE: u8 = 2;
const PING: u8 = 3;

/// What carries a link's streams, where that can be ended by force and knows more than they of why they ended.
pub(crate) trait Carrier: Send + Sync {
    /// The peer has said its hello.
    fn greeted(&self) {}
    /// Ends it, and so wakes whoever is stuck in a write. What was sent before may still go out, for a moment.
    fn kill(&self);
    /// Waits that long until what was sent before the goodbye is delivered, then ends it.
    fn settle(&self, patience: Duration);
    /// The error for streams that ended without a goodbye.
    fn why_it_ended(&self, greeted: bool, why: String) -> Error;
}

/// Makes a pipe hold 1 MiB where the system allows it: it carries three times as much then. Does nothing to what is no pipe.
pub fn widen(pipe: &impl AsFd) {
    let _ = rustix::pipe::fcntl_setpipe_size(pipe, 1 << 20);
}

/// What a side tells of itself, and how it knows that its peer is there.
pub(crate) struct Terms {
    /// What may be on its way to this end, in bytes; one message may exceed it.
    pub(crate) window: u32,
    /// A peer of which nothing comes for so long is given up.
    pub(crate) timeout: Duration,
    /// Noted by whatever hears of the peer before it is read here.
    pub(crate) heard: Heard,
}

/// The sending side of the streams, and what the reader shares with it.
pub(crate) struct Wire {
    out: Mutex<Out>,
    /// Bytes taken by the receiver for which no credit was sent yet.
    owed: AtomicU64,
    /// Bytes that came in and whose credit was not sent yet: what the peer must keep bounded.
    inside: AtomicU64,
    abandoned: AtomicBool,
    terms: Terms,
    pub(crate) pulse: Pulse,
    carrier: Option<Arc<dyn Carrier>>,
}

struct Out {
    writer: Option<Box<dyn Write + Send>>,
    rate: Option<Rate>,
}

/// Starts a link: writes the hello, which tells the terms, and starts the thread that reads.
pub(crate) fn open(
    peer: &str,
    reader: Box<dyn Read + Send>,
    writer: Box<dyn Write + Send>,
    terms: Terms,
    carrier: Option<Arc<dyn Carrier>>,
) -> Arc<Shared> {
    let wire = Wire {
        out: Mutex::new(Out { writer: Some(writer), rate: None }),
        owed: AtomicU64::new(0),
        inside: AtomicU64::new(0),
        abandoned: AtomicBool::new(false),
        pulse: Pulse::new(terms.heard.clone()),
        terms,
        carrier,
    };
    let shared = Arc::new(Shared::new(peer, Road::Wire(wire)));
    if let Road::Wire(wire) = &shared.road {
        let mut hello = [0; HELLO];
        hello[..8].copy_from_slice(&MAGIC);
        hello[8..10].copy_from_slice(&VERSION.to_le_bytes());
        hello[10..12].copy_from_slice(&pulse::to_hello(wire.terms.timeout).to_le_bytes());
        hello[12..].copy_from_slice(&wire.terms.window.to_le_bytes());
        // A peer that has gone already is reported by the reader, which knows why.
        let _ = wire.put(&mut lock(&wire.out), &shared, [&hello, &[], &[]]);
    }
    let for_reader = Arc::clone(&shared);
    let started = thread::Builder::new().name("link reader".into()).spawn(move || read(&for_reader, reader));
    if let Err(error) = started {
        let error = shared.cut(format!("can't start a thread: {error}"));
        shared.window.close(error.clone());
        shared.inbox.end(End::Failed(error));
    }
    shared
}

fn unit(what: u8, kind: u8, head: u32, body: u32) -> [u8; HEADER] {
    let mut unit = [0; HEADER];
    unit[0] = what;
    unit[1] = kind;
    unit[4..8].copy_from_slice(&head.to_le_bytes());
    unit[8..].copy_from_slice(&body.to_le_bytes());
    unit
}

impl Wire {
    pub(crate) fn send(&self, shared: &Shared, message: &Message) -> Result<()> {
        // Checked by the caller to be within bounds.
        let header = unit(MESSAGE, message.kind, message.head.len() as u32, message.body.len() as u32);
        self.write(shared, [&header, &message.head, &message.body])
    }

    pub(crate) fn goodbye(&self, shared: &Shared) -> Result<()> {
        self.write(shared, [&unit(GOODBYE, 0, 0, 0), &[], &[]])
    }

    /// Sends a ping, unless somebody is sending anyway. False when nothing can be sent any more.
    pub(crate) fn ping(&self, shared: &Shared) -> bool {
        let mut out = match self.out.try_lock() {
            Ok(out) => out,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        let sent = self.put(&mut out, shared, [&unit(PING, 0, 0, 0), &[], &[]]);
        drop(out);
        self.close_if_abandoned();
        self.give_credit(shared);
        sent.is_ok()
    }

    pub(crate) fn limit(&self, rate: Option<Rate>) {
        lock(&self.out).rate = rate;
    }

    /// Notes what the receiver has taken, and gives credit for it. Never waits for a message that is being sent: whoever
    /// sends it gives the credit afterwards.
    pub(crate) fn consumed(&self, shared: &Shared, bytes: u64) {
        self.owed.fetch_add(bytes, Ordering::SeqCst);
        self.give_credit(shared);
    }

    #[cfg(test)]
    pub(crate) fn window(&self) -> u64 {
        self.terms.window.into()
    }

    fn give_credit(&self, shared: &Shared) {
        // In portions of a quarter of the window, so that it costs next to nothing.
        while self.owed.load(Ordering::SeqCst) >= u64::from(self.terms.window / 4) {
            let mut out = match self.out.try_lock() {
                Ok(out) => out,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The holder looks again after it has let go.
                Err(TryLockError::WouldBlock) => return,
            };
            let owed = self.owed.swap(0, Ordering::SeqCst);
            self.inside.fetch_sub(owed, Ordering::SeqCst);
            let credit = unit(CREDIT, 0, 0, u32::try_from(owed).unwrap_or(u32::MAX));
            if self.put(&mut out, shared, [&credit, &[], &[]]).is_err() {
                return;
            }
            drop(out);
            self.close_if_abandoned();
        }
    }

    fn close_if_abandoned(&self) {
        if self.abandoned.load(Ordering::SeqCst) {
            match self.out.try_lock() {
                Ok(mut out) => out.writer = None,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().writer = None,
                // Whoever holds it comes here afterwards.
                Err(TryLockError::WouldBlock) => {}
            }
        }
    }

    fn write(&self, shared: &Shared, parts: [&[u8]; 3]) -> Result<()> {
        let written = self.put(&mut lock(&self.out), shared, parts);
        self.close_if_abandoned();
        self.give_credit(shared);
        written.map_err(|error| {
            // The reader learns more from the carrier: how it ended, and what it said.
            let patience = Duration::from_secs(if self.carrier.is_some() { 2 } else { 0 });
            let error = shared.inbox.failure(patience).unwrap_or_else(|| shared.cut(error.to_string()));
            shared.window.close(error.clone());
            error
        })
    }

    fn put(&self, out: &mut Out, shared: &Shared, mut parts: [&[u8]; 3]) -> io::Result<()> {
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
            shared.traffic.sent.fetch_add(sent as u64, Ordering::Relaxed);
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

    /// One half gave up: closes the stream, so that the peer notices.
    pub(crate) fn abandon(&self, finished: bool) {
        self.abandoned.store(true, Ordering::SeqCst);
        if let (Some(carrier), false) = (&self.carrier, finished) {
            carrier.kill();
        }
        self.close_if_abandoned();
    }

    /// Both halves have gone.
    pub(crate) fn hang_up(&self, finished: bool) {
        self.pulse.end();
        self.abandon(finished);
        if let Some(carrier) = &self.carrier {
            // After a goodbye it gets time to deliver it.
            carrier.settle(if finished { Duration::from_secs(10) } else { Duration::ZERO });
        }
    }
}

/// The reading thread. It only ever waits for the stream: never for the sender, never for the receiver. So whatever the
/// peer writes is taken from the stream, and two peers that write at once can't block each other.
fn read(shared: &Arc<Shared>, reader: Box<dyn Read + Send>) {
    let Road::Wire(wire) = &shared.road else { return };
    let noting = Noting { reader, heard: wire.terms.heard.clone() };
    let mut reader = BufReader::with_capacity(16 << 10, noting);
    let mut greeted = false;
    let failure = match read_all(shared, wire, &mut reader, &mut greeted) {
        Failure::Ended(why) => match &wire.carrier {
            Some(carrier) if !wire.abandoned.load(Ordering::SeqCst) => carrier.why_it_ended(greeted, why),
            _ => shared.cut(why),
        },
        Failure::Wrong(error) => error,
    };
    // Closed before anybody is told, so that the peer is not left writing to nobody.
    drop(reader);
    // What has ended is not watched any more.
    wire.pulse.end();
    shared.window.close(failure.clone());
    shared.inbox.end(End::Failed(failure));
}

/// Notes that something has come.
struct Noting {
    reader: Box<dyn Read + Send>,
    heard: Heard,
}

impl Read for Noting {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.reader.read(buf)?;
        self.heard.note();
        Ok(len)
    }
}

enum Failure {
    Ended(String),
    Wrong(Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Failure::Ended(String::new()),
            _ => Failure::Ended(error.to_string()),
        }
    }
}

fn read_all(
    shared: &Arc<Shared>,
    wire: &Wire,
    reader: &mut BufReader<Noting>,
    greeted: &mut bool,
) -> Failure {
    let (window, timeout) = match read_hello(shared, reader) {
        Ok(hello) => hello,
        Err(failure) => return failure,
    };
    if let Err(error) = pulse::start(shared, timeout.min(wire.terms.timeout)) {
        return Failure::Ended(format!("can't start a thread: {error}"));
    }
    *greeted = true;
    if let Some(carrier) = &wire.carrier {
        carrier.greeted();
    }
    shared.window.release(window);
    loop {
        match read_unit(shared, wire, reader) {
            Ok(()) if wire.abandoned.load(Ordering::SeqCst) => return Failure::Ended(String::new()),
            Ok(()) => {}
            Err(failure) => return failure,
        }
    }
}

/// The peer's window and timeout.
fn read_hello(shared: &Shared, reader: &mut BufReader<Noting>) -> Result<(u64, Duration), Failure> {
    let mut hello = [0; HELLO];
    let mut have = 0;
    while have < HELLO {
        let bytes = match reader.fill_buf() {
            Ok([]) if have == 0 => return Err(Failure::Ended("it ended without a word".into())),
            Ok([]) => return Err(Failure::Ended(String::new())),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        };
        let take = bytes.len().min(HELLO - have);
        hello[have..have + take].copy_from_slice(&bytes[..take]);
        let magic = (have + take).min(MAGIC.len());
        if hello[..magic] != MAGIC[..magic] {
            let mut said = hello[..have].to_vec();
            said.extend_from_slice(&bytes[..bytes.len().min(200)]);
            let text = String::from_utf8_lossy(&said);
            let said = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().to_string();
            return Err(Failure::Wrong(Error::NotDsync { peer: shared.peer.clone(), said }));
        }
        reader.consume(take);
        have += take;
    }
    shared.traffic.received.fetch_add(HELLO as u64, Ordering::Relaxed);
    let theirs = u16::from_le_bytes([hello[8], hello[9]]);
    if theirs != VERSION {
        let peer = shared.peer.clone();
        return Err(Failure::Wrong(Error::Version { peer, ours: VERSION, theirs }));
    }
    let window = u32::from_le_bytes([hello[12], hello[13], hello[14], hello[15]]);
    let timeout = u16::from_le_bytes([hello[10], hello[11]]);
    if timeout == 0 || window == 0 {
        return Err(bad(shared, "a hello that is not whole"));
    }
    Ok((window.into(), pulse::from_hello(timeout)))
}

fn read_unit(shared: &Shared, wire: &Wire, reader: &mut BufReader<Noting>) -> Result<(), Failure> {
    let mut unit = [0; HEADER];
    reader.read_exact(&mut unit)?;
    let received = |bytes: u64| shared.traffic.received.fetch_add(bytes, Ordering::Relaxed);
    received(HEADER as u64);
    let [what, kind, zero_1, zero_2, h0, h1, h2, h3, b0, b1, b2, b3] = unit;
    let (head, body) = (u32::from_le_bytes([h0, h1, h2, h3]), u32::from_le_bytes([b0, b1, b2, b3]));
    if (zero_1, zero_2) != (0, 0) {
        return Err(bad(shared, "what is no message"));
    }
    match what {
        MESSAGE => {
            let (head, body) = (head as usize, body as usize);
            if head > MAX_HEAD || body > MAX_BODY {
                return Err(bad(shared, &format!("a message of {head} + {body} bytes, more than may be")));
            }
            let cost = message::cost(head, body);
            let inside = wire.inside.fetch_add(cost, Ordering::SeqCst) + cost;
            if inside >= u64::from(wire.terms.window) + MAX_COST {
                return Err(bad(shared, "more than it had credit for"));
            }
            if shared.inbox.ended().is_some() {
                return Err(bad(shared, "a message after its goodbye"));
            }
            let mut message = Message { kind, head: vec![0; head], body: Buf::scratch(body) };
            reader.read_exact(&mut message.head)?;
            received(head as u64);
            reader.read_exact(&mut message.body)?;
            received(body as u64);
            shared.inbox.push(message);
        }
        CREDIT if (kind, head) == (0, 0) => shared.window.release(body.into()),
        GOODBYE if (kind, head, body) == (0, 0, 0) => shared.inbox.end(End::Goodbye),
        PING if (kind, head, body) == (0, 0, 0) => {}
        _ => return Err(bad(shared, "what is no message")),
    }
    Ok(())
}

fn bad(shared: &Shared, what: &str) -> Failure {
    Failure::Wrong(Error::Bad { peer: shared.peer.clone(), what: what.to_string() })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use proptest::prelude::*;

    use super::*;
    use crate::Link;
    use crate::ends::WINDOW;
    use crate::ends::tests::pipe;

    /// Runs `check` in a thread, and fails when it hangs.
    fn in_time<T: Send + 'static>(check: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, wait) = mpsc::channel();
        let worker = thread::spawn(move || done.send(check()));
        match wait.recv_timeout(Duration::from_secs(20)) {
            Ok(value) => value,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
            Err(mpsc::RecvTimeoutError::Disconnected) => match worker.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(_) => unreachable!("a value was sent"),
            },
        }
    }

    /// A writer that keeps what is written.
    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            lock(&self.0).extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn hello() -> Vec<u8> {
        let mut hello = [&MAGIC[..], &VERSION.to_le_bytes(), &[0xff, 0xff]].concat();
        hello.extend_from_slice(&WINDOW.to_le_bytes());
        hello
    }

    /// What one side of a short conversation writes.
    fn conversation() -> Vec<u8> {
        let kept = Kept::default();
        let link = Link::pipe(io::Cursor::new(hello()), kept.clone());
        let (tx, _rx) = link.split();
        let _ = tx.send(Message { kind: 1, head: b"head".to_vec(), body: Buf::from(&b"a body"[..]) });
        // The scripted peer has gone by now, which may be known or not: write on all the same.
        let mut bytes = lock(&kept.0).clone();
        bytes.truncate(HELLO);
        for (kind, head, body) in [(1, &b"head"[..], &b"a body"[..]), (2, b"", b""), (3, b"x", b"")] {
            bytes.extend_from_slice(&unit(MESSAGE, kind, head.len() as u32, body.len() as u32));
            bytes.extend_from_slice(head);
            bytes.extend_from_slice(body);
        }
        bytes.extend_from_slice(&unit(CREDIT, 0, 0, 100));
        bytes.extend_from_slice(&unit(GOODBYE, 0, 0, 0));
        bytes
    }

    /// Receives until the end.
    fn hear(bytes: &[u8]) -> (usize, Result<()>) {
        let input = io::Cursor::new(bytes.to_vec());
        in_time(move || {
            let (_tx, rx) = Link::pipe(input, Kept::default()).split();
            let mut count = 0;
            loop {
                match rx.recv() {
                    Ok(Some(_)) => count += 1,
                    Ok(None) => return (count, Ok(())),
                    Err(error) => return (count, Err(error)),
                }
            }
        })
    }

    #[test]
    fn a_cut_at_every_byte_is_a_cut() {
        let whole = conversation();
        assert_eq!(whole[..HELLO], hello()[..]);
        for at in 0..whole.len() {
            let (count, result) = hear(&whole[..at]);
            assert!(result.unwrap_err().is_cut(), "cut at {at}");
            assert!(count <= 3);
        }
        assert_eq!(hear(&whole), (3, Ok(())));
    }

    #[test]
    fn a_cut_of_the_other_direction_at_every_byte_is_a_cut() {
        /// A writer that fails after so many bytes.
        struct Cut(usize);
        impl Write for Cut {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                let take = bytes.len().min(self.0);
                self.0 -= take;
                if take == 0 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(take) }
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        // The hello, a message of 12 + 4 + 6 bytes, the goodbye.
        for at in 0..HELLO + 22 + HEADER {
            let error = in_time(move || {
                let (reader, keep) = pipe();
                (&keep).write_all(&hello()).unwrap();
                let (tx, _rx) = Link::pipe(reader, Cut(at)).split();
                let message = Message { kind: 1, head: b"head".to_vec(), body: Buf::from(&b"a body"[..]) };
                tx.send(message).and_then(|()| tx.finish()).unwrap_err()
            });
            assert!(error.is_cut(), "cut at {at}: {error}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let mut other = conversation();
        other[8..10].copy_from_slice(&7u16.to_le_bytes());
        let error = hear(&other).1.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the far side speaks version 7 of the link, this dsync speaks version 2: install the same version of dsync on both sides"
        );
    }

    #[test]
    fn what_is_not_dsync_is_shown() {
        for (said, shown) in [
            ("Welcome to Ubuntu!\nlast login: ...\n", "Welcome to Ubuntu!"),
            ("bash: dsync: command not found", "bash: dsync: command not found"),
            ("\n\n  hi", "  hi"),
            ("x", "x"),
            ("\u{93}", "\u{93}"),
        ] {
            match hear(said.as_bytes()).1 {
                Err(Error::NotDsync { said, .. }) => assert_eq!(said, shown),
                other => panic!("{said:?}: {other:?}"),
            }
        }
        // It need not end, nor write a whole line.
        let (reader, keep) = pipe();
        (&keep).write_all(b"login: ").unwrap();
        let error = in_time(move || Link::pipe(reader, Kept::default()).ready().unwrap_err());
        assert!(matches!(error, Error::NotDsync { .. }));
    }

    #[test]
    fn what_no_peer_sends_is_refused() {
        let with = |units: &[[u8; HEADER]]| {
            let mut bytes = hello();
            units.iter().for_each(|unit| bytes.extend_from_slice(unit));
            hear(&bytes).1
        };
        for units in [
            &[unit(4, 0, 0, 0)][..],
            &[unit(PING, 1, 0, 0)],
            &[unit(PING, 0, 0, 1)],
            &[unit(MESSAGE, 0, MAX_HEAD as u32 + 1, 0)],
            &[unit(MESSAGE, 0, 0, MAX_BODY as u32 + 1)],
            &[unit(MESSAGE, 0, u32::MAX, u32::MAX)],
            &[unit(CREDIT, 1, 0, 0)],
            &[unit(CREDIT, 0, 1, 0)],
            &[[0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
        ] {
            assert!(matches!(with(units), Err(Error::Bad { .. })), "{units:?}");
        }
        let mut none = hello();
        none[12..].fill(0);
        assert!(matches!(hear(&none).1, Err(Error::Bad { .. })));
        let mut none = hello();
        none[10..12].fill(0);
        assert!(matches!(hear(&none).1, Err(Error::Bad { .. })));
        // After the goodbye the end stands, whatever comes.
        assert_eq!(with(&[unit(GOODBYE, 0, 0, 0), unit(MESSAGE, 0, 0, 0), unit(9, 9, 9, 9)]), Ok(()));
        // Sending on without credit is noticed.
        let error = in_time(|| {
            let (reader, mut peer) = pipe();
            let (_tx, rx) = Link::pipe(reader, Kept::default()).split();
            peer.write_all(&hello()).unwrap();
            let body = vec![0; MAX_BODY];
            for _ in 0..7 {
                let unit = unit(MESSAGE, 0, 0, MAX_BODY as u32);
                if peer.write_all(&unit).and_then(|()| peer.write_all(&body)).is_err() {
                    break;
                }
            }
            drop(peer);
            loop {
                match rx.inbox_end() {
                    Some(error) => break error,
                    None => thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        assert!(matches!(error, Error::Bad { .. }), "{error}");
    }

    impl crate::Receiver {
        fn inbox_end(&self) -> Option<Error> {
            self.shared().inbox.failure(Duration::ZERO)
        }
    }

    proptest! {
        #[test]
        fn garbage_never_hangs_and_never_panics(
            tail in proptest::collection::vec(any::<u8>(), 0..300), whole in 0usize..100, flip in any::<(usize, u8)>()
        ) {
            let mut bytes = conversation();
            bytes.truncate(whole);
            bytes.extend_from_slice(&tail);
            let _ = hear(&bytes);
            let mut bytes = conversation();
            let at = flip.0 % bytes.len();
            bytes[at] ^= flip.1;
            let _ = hear(&bytes);
        }
    }
}
