//! The link over TLS, and what strangers, liars and the impatient do to it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use device::Buf;
use tempfile::TempDir;

use crate::flow::lock;
use crate::session::{CHUNK, NO_SESSION, WELCOME, WORD, Word};
use crate::tls::{Caller, Secured};
use crate::{Call, Error, Keys, Limits, Link, Listener, Message, Peer, Result, Stop};

/// A side with keys of its own.
struct Site {
    _folder: TempDir,
    keys: Keys,
}

fn site() -> Site {
    let folder = tempfile::tempdir().unwrap();
    let keys = Keys::new(folder.path().join("keys"));
    Site { _folder: folder, keys }
}

/// Two sides that trust each other.
fn two() -> (Site, Site) {
    let (near, far) = (site(), site());
    near.keys.trust("127.0.0.1", far.keys.own().unwrap(), None).unwrap();
    far.keys.trust("near", near.keys.own().unwrap(), None).unwrap();
    (near, far)
}

/// A listener in the background, with what it said; stopped when dropped.
struct Server {
    address: SocketAddr,
    said: Arc<Mutex<Vec<String>>>,
    stop: Stop,
    runs: Option<JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.stop(Duration::from_secs(10));
        self.runs.take().unwrap().join().unwrap();
    }
}

impl Server {
    fn start(site: &Site, limits: Limits, serve: impl Fn(Link, &Peer) + Send + Sync + 'static) -> Server {
        let said = Arc::new(Mutex::new(Vec::new()));
        let says = Arc::clone(&said);
        let address = "127.0.0.1:0".parse().unwrap();
        let says = move |line: &str| lock(&says).push(line.to_string());
        let listener = Listener::bind(address, &site.keys, limits, says).unwrap();
        let (address, stop) = (listener.address(), listener.stop().unwrap());
        let runs = Some(thread::spawn(move || listener.run(serve)));
        Server { address, said, stop, runs }
    }

    /// Waits for a line with all these words.
    fn says(&self, words: &[&str]) {
        let until = Instant::now() + Duration::from_secs(20);
        while !lock(&self.said).iter().any(|line| words.iter().all(|word| line.contains(word))) {
            assert!(Instant::now() < until, "it does not say {words:?}: {:#?}", lock(&self.said));
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn call(&self, site: &Site, lanes: usize) -> Result<Link> {
        let call = Call { lanes, patience: Duration::from_secs(20), ..Call::default() };
        Link::tls(&site.keys, "127.0.0.1", self.address.port(), &call)
    }

    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket
    }

    /// A connection with the site's key, that has said nothing yet.
    fn shaken(&self, site: &Site) -> Secured {
        let caller = Caller::new(&site.keys, "127.0.0.1", self.address.port()).unwrap();
        caller.shake(self.connect(), soon()).unwrap()
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Both ends of a link over TLS.
pub(crate) fn over_tls(lanes: usize) -> (Link, Link) {
    let (near, far) = two();
    let (sender, ends) = mpsc::channel();
    let sender = Mutex::new(sender);
    let server = Server::start(&far, Limits::default(), move |link, _| lock(&sender).send(link).unwrap());
    let here = server.call(&near, lanes).unwrap();
    let there = ends.recv().unwrap();
    // The link does not need the listener any more; stopping it would cut what it serves.
    std::mem::forget(server);
    (here, there)
}

/// Sends everything back.
fn echo(link: Link, _: &Peer) {
    let (tx, rx) = link.split();
    while let Ok(Some(message)) = rx.recv() {
        if tx.send(message).is_err() {
            return;
        }
    }
    let _ = tx.finish();
}

/// Sends so many messages through an echo, and takes them back.
fn converse(link: Link, count: usize) -> Result<()> {
    let (tx, rx) = link.split();
    let sender = thread::spawn(move || {
        for at in 0..count {
            let mut body = Buf::new([1 << 20, 5, 0, 77_777][at % 4]);
            body.fill(at as u8);
            tx.send(Message { kind: at as u8, head: vec![at as u8; at % 50], body })?;
        }
        tx.finish()
    });
    for at in 0..count {
        let message = rx.recv()?.expect("an echo");
        assert_eq!((message.kind, message.head.len()), (at as u8, at % 50));
        assert_eq!(message.body.len(), [1 << 20, 5, 0, 77_777][at % 4]);
        assert!(message.body.iter().all(|&byte| byte == at as u8));
    }
    assert!(rx.recv()?.is_none());
    sender.join().unwrap()
}

#[test]
fn everything_arrives_over_any_number_of_lanes() {
    let (near, far) = two();
    let server = Server::start(&far, Limits::default(), echo);
    for lanes in [1, 2, 5, crate::MAX_LANES] {
        converse(server.call(&near, lanes).unwrap(), 100).unwrap();
    }
    assert_eq!(*lock(&server.said), Vec::<String>::new());
}

#[test]
fn an_unknown_key_is_refused_on_either_side_with_the_way_out() {
    let (near, far) = (site(), site());
    let server = Server::start(&far, Limits::default(), |_, _| panic!("a stranger was served"));
    let theirs = far.keys.own().unwrap();
    let error = server.call(&near, 2).map(drop).unwrap_err();
    assert!(matches!(error, Error::Unknown { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(&theirs.fingerprint()), "{text}");
    assert!(text.contains(&format!("dsync key trust 127.0.0.1 {theirs}")), "{text}");

    near.keys.trust("127.0.0.1", theirs, None).unwrap();
    let ours = near.keys.own().unwrap();
    let error = server.call(&near, 2).map(drop).unwrap_err();
    assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
    assert!(error.to_string().contains(&ours.to_string()), "{error}");
    server.says(&["127.0.0.1", &ours.fingerprint(), &format!("dsync key trust NAME {ours}")]);
}

#[test]
fn a_swapped_key_is_refused_loudly() {
    let (near, far) = two();
    let liar = site();
    liar.keys.trust("near", near.keys.own().unwrap(), None).unwrap();
    let server = Server::start(&liar, Limits::default(), |_, _| panic!("it was believed"));
    let error = server.call(&near, 1).map(drop).unwrap_err();
    assert!(matches!(error, Error::Swapped { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("HAS CHANGED"), "{text}");
    for key in [far.keys.own().unwrap(), liar.keys.own().unwrap()] {
        assert!(text.contains(&key.fingerprint()), "{text}");
    }
}

#[test]
fn a_pin_of_the_port_comes_before_one_of_the_host() {
    let (near, far) = two();
    let server = Server::start(&far, Limits::default(), echo);
    let other = site();
    let name = format!("127.0.0.1:{}", server.address.port());
    near.keys.trust(&name, other.keys.own().unwrap(), None).unwrap();
    assert!(matches!(server.call(&near, 1), Err(Error::Swapped { .. })));
}

#[test]
fn an_expired_pin_is_refused_on_either_side() {
    let (near, far) = two();
    let server = Server::start(&far, Limits::default(), echo);
    let (ours, theirs) = (near.keys.own().unwrap(), far.keys.own().unwrap());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    near.keys.trust("127.0.0.1", theirs, Some(now)).unwrap();
    let error = server.call(&near, 1).map(drop).unwrap_err();
    assert!(matches!(error, Error::Expired { .. }), "{error}");
    assert!(error.to_string().contains("dsync key trust 127.0.0.1"), "{error}");
    near.keys.trust("127.0.0.1", theirs, Some(now + 1000)).unwrap();
    converse(server.call(&near, 1).unwrap(), 3).unwrap();
    far.keys.trust("near", ours, Some(now)).unwrap();
    let error = server.call(&near, 1).map(drop).unwrap_err();
    assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
    server.says(&["has expired", &ours.fingerprint(), "dsync key trust near"]);
    far.keys.forget("near").unwrap();
    assert!(matches!(server.call(&near, 1), Err(Error::NotTrusted { .. })), "forgotten at once");
}

#[test]
fn a_listener_may_take_only_some_of_the_pinned() {
    let (near, far) = two();
    let limits = Limits { from: vec!["other".into()], ..Limits::default() };
    let server = Server::start(&far, limits, |_, _| panic!("it was let in"));
    assert!(matches!(server.call(&near, 1), Err(Error::NotTrusted { .. })));
    server.says(&["near", "--from"]);
    let limits = Limits { from: vec!["other".into(), "near".into()], ..Limits::default() };
    let server = Server::start(&far, limits, |link, peer| {
        assert_eq!(peer.name, "near");
        echo(link, peer);
    });
    converse(server.call(&near, 1).unwrap(), 3).unwrap();
}

#[test]
fn nobody_there_is_said() {
    let near = site();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = Link::tls(&near.keys, "127.0.0.1", port, &Call::default()).map(drop).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error}");
    let error = Link::tls(&near.keys, "no.such.host.invalid", 1, &Call::default()).map(drop).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error}");
    // Somebody who talks, but not so; somebody who does not; and somebody who leaves at once.
    for (says, patience, talks) in
        [("220 mail ESMTP\r\n", 20_000, true), ("", 300, true), ("", 20_000, false)]
    {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let other = thread::spawn(move || {
            let (mut socket, _) = other.accept().unwrap();
            socket.write_all(says.as_bytes()).unwrap();
            if talks {
                let _ = socket.read_to_end(&mut Vec::new());
            }
        });
        let call = Call { patience: Duration::from_millis(patience), ..Call::default() };
        let error = Link::tls(&near.keys, "127.0.0.1", port, &call).map(drop).unwrap_err();
        match says {
            // Nothing says that it could not talk TLS.
            "" => assert!(matches!(error, Error::Connect { .. }), "{error}"),
            _ => assert!(matches!(error, Error::Tls { .. }), "{error}"),
        }
        other.join().unwrap();
    }
}

/// While a good session works, everything bad that a network brings.
#[test]
fn bad_peers_do_not_disturb_good_ones() {
    let (near, far) = two();
    let limits = Limits {
        strangers: 40,
        strangers_of_address: 30,
        patience: Duration::from_millis(1500),
        ..Limits::default()
    };
    let server = Server::start(&far, limits, echo);
    let good = server.call(&near, 3).unwrap();
    /// Ends the good session, also where the test fails.
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let (done, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let (done, rounds) = (&done, &rounds);
        let _done = Done(done);
        let working = scope.spawn(move || {
            let (tx, rx) = good.split();
            while !done.load(Ordering::SeqCst) {
                tx.send(Message { body: Buf::new(100_000), ..Message::default() }).unwrap();
                assert_eq!(rx.recv().unwrap().unwrap().body.len(), 100_000);
                rounds.fetch_add(1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(1));
            }
            tx.finish().unwrap();
            assert!(rx.recv().unwrap().is_none());
        });
        let went_on = |what: &str| {
            let before = rounds.load(Ordering::SeqCst);
            let until = soon();
            while rounds.load(Ordering::SeqCst) < before + 3 {
                assert!(Instant::now() < until, "the good session stands still: {what}");
                assert!(!working.is_finished(), "the good session ended: {what}");
                thread::sleep(Duration::from_millis(1));
            }
        };

        // Plain text, and noise: dropped at once.
        for noise in
            [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 5000], &[0x16; 5000], &[0xff; 5000], b"\x93dsync\r\n"]
        {
            let mut socket = server.connect();
            socket.write_all(noise).unwrap();
            let began = Instant::now();
            let _ = socket.shutdown(Shutdown::Write);
            let _ = socket.read_to_end(&mut Vec::new());
            assert!(began.elapsed() < Duration::from_secs(4));
        }
        server.says(&["127.0.0.1", "no TLS"]);
        went_on("noise");

        // A flood of connections that say nothing: no more than so many are kept, and those not for long.
        let began = Instant::now();
        let silent: Vec<TcpStream> = (0..200).map(|_| server.connect()).collect();
        server.says(&["127.0.0.1", "too many connections"]);
        went_on("a flood");
        for mut socket in silent {
            let _ = socket.read_to_end(&mut Vec::new());
            assert!(began.elapsed() < Duration::from_secs(12), "silent ones were kept");
        }
        server.says(&["127.0.0.1", "in time"]);
        converse(server.call(&near, 1).unwrap(), 3).unwrap();

        // One that says a little now and then is not kept longer.
        let mut slow = server.connect();
        let began = Instant::now();
        let hello = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
        let mut sent = 0;
        while slow.write_all(&[hello.get(sent).copied().unwrap_or(0)]).is_ok() {
            sent += 1;
            assert!(began.elapsed() < Duration::from_secs(10), "a slow one is kept");
            thread::sleep(Duration::from_millis(100));
        }
        went_on("a slow one");

        // One with a good key that says nothing, or nonsense, or what no version says.
        let began = Instant::now();
        assert!(server.shaken(&near).read_exact(&mut [0; WORD], soon()).is_err());
        assert!(began.elapsed() < Duration::from_secs(10));
        let word = Word { what: 0, lanes: 1, session: [0; 16] };
        for (at, value) in [(0, 0), (8, 9), (11, 0), (11, 99)] {
            let mut bytes = word.to_bytes();
            bytes[at] = value;
            let mut liar = server.shaken(&near);
            liar.write_all(&bytes, soon()).map_err(|failed| failed.error("")).unwrap();
            assert!(liar.read_exact(&mut [0; WORD], soon()).is_err());
        }
        server.says(&["near", "version 9"]);
        // One whose lanes do not come, and one that opens a session and says nothing in it.
        for lanes in [2, 1] {
            let mut lonely = server.shaken(&near);
            lonely
                .write_all(&Word { lanes, ..word }.to_bytes(), soon())
                .map_err(|failed| failed.error(""))
                .unwrap();
            let mut answer = [0; WORD];
            lonely.read_exact(&mut answer, soon()).map_err(|failed| failed.error("")).unwrap();
            assert_eq!(Word::parse(&answer).unwrap().what, WELCOME);
            let began = Instant::now();
            while lonely.read_exact(&mut [0; 1], soon()).is_ok() {}
            assert!(began.elapsed() < Duration::from_secs(10));
        }
        went_on("liars");
    });
}

/// Whoever holds all places and says nothing keeps nobody out, however many come.
#[test]
fn silent_callers_keep_nobody_out() {
    let (near, far) = two();
    for (strangers, strangers_of_address) in [(8, 8), (8, 100), (100, 8)] {
        let limits = Limits {
            strangers,
            strangers_of_address,
            // Long enough for none of them to leave by itself.
            patience: Duration::from_secs(60),
            ..Limits::default()
        };
        let server = Server::start(&far, limits, echo);
        let silent: Vec<TcpStream> = (0..20).map(|_| server.connect()).collect();
        let began = Instant::now();
        for _ in 0..3 {
            converse(server.call(&near, 3).unwrap(), 3).unwrap();
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        // One that has begun to talk outlives those that have not.
        let mut begun = server.connect();
        begun.write_all(&[0x16, 3, 1]).unwrap();
        let until = soon();
        while !lock(&server.stop.strangers().unwrap().strangers).here.values().any(|caller| caller.spoke) {
            assert!(Instant::now() < until);
            thread::sleep(Duration::from_millis(5));
        }
        let more: Vec<TcpStream> = (0..20).map(|_| server.connect()).collect();
        converse(server.call(&near, 1).unwrap(), 3).unwrap();
        begun.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let error = begun.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "it was dropped: {error}");
        drop((silent, more));
    }
}

#[test]
fn a_line_that_is_slow_because_it_is_bounded_is_not_silent() {
    let (near, far) = two();
    let server = Server::start(&far, Limits::default(), echo);
    let call = Call { lanes: 2, timeout: Duration::from_secs(1), ..Call::default() };
    let link = Link::tls(&near.keys, "127.0.0.1", server.address.port(), &call).unwrap();
    let (tx, rx) = link.split();
    tx.limit(4 << 10);
    tx.send(Message { body: Buf::new(16 << 10), ..Message::default() }).unwrap();
    assert_eq!(rx.recv().unwrap().expect("an echo").body.len(), 16 << 10);
    tx.finish().unwrap();
    assert!(rx.recv().unwrap().is_none());
}

/// Opens a session of `lanes` by hand; its first lane and its name.
fn begun(server: &Server, site: &Site, lanes: u8) -> (Secured, [u8; 16]) {
    let mut lane = server.shaken(site);
    let (word, answer) = said(&mut lane, Word { what: 0, lanes, session: [0; 16] });
    assert_eq!((word, answer.what), (true, WELCOME));
    (lane, answer.session)
}

/// Says a word; the answer.
fn said(lane: &mut Secured, word: Word) -> (bool, Word) {
    let went = lane.write_all(&word.to_bytes(), soon()).is_ok();
    let mut answer = [0; WORD];
    lane.read_exact(&mut answer, soon()).map_err(|failed| failed.error("")).unwrap();
    (went, Word::parse(&answer).unwrap())
}

#[test]
fn a_lane_joins_only_the_session_of_its_own_key() {
    let (near, far) = two();
    let other = site();
    other.keys.trust("127.0.0.1", far.keys.own().unwrap(), None).unwrap();
    far.keys.trust("other", other.keys.own().unwrap(), None).unwrap();
    let served = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&served);
    let server = Server::start(&far, Limits::default(), move |link, peer| {
        counted.fetch_add(1, Ordering::SeqCst);
        assert_eq!(peer.name, "near");
        echo(link, peer);
    });
    let (first, session) = begun(&server, &near, 2);
    let answer = |site: &Site, word: Word| said(&mut server.shaken(site), word).1.what;
    let join = Word { what: 1, lanes: 2, session };
    assert_eq!(answer(&other, join), NO_SESSION, "another key knows the name");
    server.says(&["other", "no such session of its key"]);
    assert_eq!(answer(&near, Word { session: [1; 16], ..join }), NO_SESSION, "a session that is not");
    assert_eq!(answer(&near, Word { what: 2, ..join }), NO_SESSION, "a lane that is not");
    assert_eq!(answer(&near, Word { lanes: 3, ..join }), NO_SESSION, "another count");
    assert_eq!(served.load(Ordering::SeqCst), 0);
    // Nobody has disturbed the session that waits for its second lane.
    let mut second = server.shaken(&near);
    assert_eq!(said(&mut second, join).1.what, WELCOME);
    let link =
        crate::lanes::open("far", vec![first, second], Duration::from_secs(20), Duration::from_secs(30))
            .unwrap();
    converse(Link::from_shared(link), 20).unwrap();
    assert_eq!(served.load(Ordering::SeqCst), 1);
    assert_eq!(answer(&near, join), NO_SESSION, "the session has all its lanes");
}

/// A server that listens to its end of every link until that ends, and what ended it.
fn ending(site: &Site) -> (Server, mpsc::Receiver<Error>) {
    let (sender, ends) = mpsc::channel();
    let sender = Mutex::new(sender);
    let server = Server::start(site, Limits::default(), move |link, _| {
        let (_tx, rx) = link.split();
        let error = loop {
            match rx.recv() {
                Ok(Some(_)) => {}
                end => break end.map(drop).unwrap_err(),
            }
        };
        lock(&sender).send(error).unwrap();
    });
    (server, ends)
}

#[test]
fn what_no_lane_carries_cuts_the_session() {
    let (near, far) = two();
    let (server, ends) = ending(&far);
    let header = |number: u64, len: u32| [&number.to_le_bytes()[..], &len.to_le_bytes()].concat();
    let chunk =
        |number: u64| [header(number, 16), b"\x93dsync\r\n\x02\0\xff\xff\0\0\x10\0".to_vec()].concat();
    for (bytes, why) in [
        (header(0, CHUNK as u32 + 1), "a chunk of 131073 bytes"),
        (header(0, 0), "a chunk of 0 bytes"),
        (header(0, u32::MAX), "a chunk of 4294967295 bytes"),
        ([chunk(0), chunk(0)].concat(), "chunk 0 after chunk 0"),
        (header(u64::MAX, 1), "chunk"),
    ] {
        let (mut lane, _) = begun(&server, &near, 1);
        lane.write_all(&bytes, soon()).map_err(|failed| failed.error("")).unwrap();
        let said = ends.recv_timeout(Duration::from_secs(20)).unwrap().to_string();
        assert!(said.contains("cut") && said.contains(why), "{why}: {said}");
    }
    // A stream with a hole, cleanly ended.
    let (mut lane, _) = begun(&server, &near, 1);
    lane.write_all(&chunk(1), soon()).map_err(|failed| failed.error("")).unwrap();
    lane.tls.send_close_notify();
    let _ = lane.write_all(&[], soon());
    let said = ends.recv_timeout(Duration::from_secs(20)).unwrap().to_string();
    assert!(said.contains("chunk 0 never came"), "{said}");
    // One that ends within a chunk.
    let (mut lane, _) = begun(&server, &near, 1);
    lane.write_all(&header(0, 500), soon()).map_err(|failed| failed.error("")).unwrap();
    drop(lane);
    assert!(ends.recv_timeout(Duration::from_secs(20)).unwrap().is_cut());
}

#[test]
fn sessions_are_bounded() {
    let (near, far) = two();
    let other = site();
    other.keys.trust("127.0.0.1", far.keys.own().unwrap(), None).unwrap();
    far.keys.trust("other", other.keys.own().unwrap(), None).unwrap();
    let limits = Limits { sessions: 3, sessions_of_key: 2, ..Limits::default() };
    let server = Server::start(&far, limits, echo);
    let held: Vec<Link> = (0..2).map(|_| server.call(&near, 2).unwrap()).collect();
    let error = server.call(&near, 2).map(drop).unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    server.says(&["near", "too many sessions"]);
    let third = server.call(&other, 1).unwrap();
    assert!(matches!(server.call(&other, 1), Err(Error::Busy { .. })), "all places are taken");
    converse(third, 5).unwrap();
    drop(held);
    // A place is free again as soon as the session has ended.
    let until = soon();
    while let Err(error) = server.call(&near, 2).and_then(|link| converse(link, 5)) {
        assert!(Instant::now() < until, "{error}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Carries connections to a listener, and cuts one of them, or stands still, when told.
struct Proxy {
    address: SocketAddr,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
    still: Arc<AtomicBool>,
}

/// Carries bytes until told to stand still, and then no more.
fn carry(mut from: TcpStream, mut to: TcpStream, still: &AtomicBool) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        while still.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(10));
        }
        if to.write_all(&bytes[..len]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn proxy(to: SocketAddr) -> Proxy {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let sockets: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
    let still = Arc::new(AtomicBool::new(false));
    let (kept, stands) = (Arc::clone(&sockets), Arc::clone(&still));
    thread::spawn(move || {
        for here in listener.incoming().map_while(std::result::Result::ok) {
            let there = TcpStream::connect(to).unwrap();
            lock(&kept).push(here.try_clone().unwrap());
            for (from, to) in [(here.try_clone().unwrap(), there.try_clone().unwrap()), (there, here)] {
                let stands = Arc::clone(&stands);
                thread::spawn(move || carry(from, to, &stands));
            }
        }
    });
    Proxy { address, sockets, still }
}

#[test]
fn a_network_that_falls_silent_ends_the_link_at_both_ends_whatever_they_do() {
    let (near, far) = two();
    // One that sends as much as it can is stuck in a write; one that waits hears nothing.
    for sending in [false, true] {
        let (server, ends) = ending(&far);
        let proxy = proxy(server.address);
        let call = Call { lanes: 2, timeout: Duration::from_secs(1), ..Call::default() };
        let (tx, rx) = Link::tls(&near.keys, "127.0.0.1", proxy.address.port(), &call).unwrap().split();
        let (connected, traffic) = (Instant::now(), tx.traffic());
        let stuck = thread::spawn(move || {
            while sending && connected.elapsed() < Duration::from_secs(20) {
                let body = Buf::new(1 << 20);
                if let Err(error) = tx.send(Message { body, ..Message::default() }) {
                    return Some((error, tx));
                }
            }
            None.or_else(|| (!sending).then(|| (Error::NoPin(String::new()), tx)))
        });
        // Longer than the timeout: an idle link lives.
        thread::sleep(Duration::from_millis(2500));
        assert!(!sending || traffic.sent() > 1 << 20);
        proxy.still.store(true, Ordering::SeqCst);
        let still = Instant::now();
        for error in [rx.recv().unwrap_err(), ends.recv_timeout(Duration::from_secs(20)).unwrap()] {
            assert!(error.to_string().ends_with("nothing came from it for 1.0 s"), "{error}");
        }
        let (error, _tx) = stuck.join().unwrap().expect("an end");
        assert!(!sending || error.is_cut(), "{error}");
        assert!(still.elapsed() < Duration::from_secs(15), "{:?}", still.elapsed());
        proxy.still.store(false, Ordering::SeqCst);
    }
}

#[test]
fn a_lane_that_breaks_cuts_the_link_at_both_ends() {
    let (near, far) = two();
    let (server, ends) = ending(&far);
    for broken in 0..3 {
        let proxy = proxy(server.address);
        let call = Call { lanes: 3, ..Call::default() };
        let link = Link::tls(&near.keys, "127.0.0.1", proxy.address.port(), &call).unwrap();
        let (tx, rx) = link.split();
        for _ in 0..30 {
            tx.send(Message { body: Buf::new(1 << 20), ..Message::default() }).unwrap();
        }
        lock(&proxy.sockets)[broken].shutdown(Shutdown::Both).unwrap();
        let error = (0..1000)
            .find_map(|_| tx.send(Message { body: Buf::new(1 << 20), ..Message::default() }).err())
            .expect("a cut");
        assert!(error.is_cut(), "{error}");
        assert!(rx.recv().unwrap_err().is_cut());
        assert!(ends.recv_timeout(Duration::from_secs(20)).unwrap().is_cut());
    }
}

#[test]
fn a_listener_that_ends_cuts_what_it_serves() {
    let (near, far) = two();
    let server = Server::start(&far, Limits::default(), echo);
    let (tx, rx) = server.call(&near, 2).unwrap().split();
    tx.send(Message::default()).unwrap();
    rx.recv().unwrap().unwrap();
    let began = Instant::now();
    let address = server.address;
    drop(server);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(rx.recv().unwrap_err().is_cut());
    assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
}

#[test]
fn a_peer_that_vanishes_is_noticed() {
    // What the system is told; a network that swallows everything is another machine's business.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    crate::lanes::tune(&socket, Duration::from_secs(30));
    use rustix::net::sockopt;
    assert!(sockopt::socket_keepalive(&socket).unwrap() && sockopt::tcp_nodelay(&socket).unwrap());
    assert_eq!(sockopt::tcp_user_timeout(&socket).unwrap(), 30_000);
    let idle = sockopt::tcp_keepidle(&socket).unwrap();
    let between = sockopt::tcp_keepintvl(&socket).unwrap() * sockopt::tcp_keepcnt(&socket).unwrap();
    assert_eq!(idle + between, Duration::from_secs(30));
}
