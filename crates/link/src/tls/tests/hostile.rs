//! What clients that are unknown, lie or wait too long can do to a listener.

use super::*;

/// A session that works all the time, until this is dropped.
struct Good {
    done: Arc<AtomicBool>,
    rounds: Arc<AtomicUsize>,
    working: Option<JoinHandle<()>>,
}

impl Good {
    fn new(link: Link) -> Good {
        let (done, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (over, counted) = (Arc::clone(&done), Arc::clone(&rounds));
        let working = thread::spawn(move || {
            let (tx, rx) = link.split();
            while !over.load(Ordering::SeqCst) {
                tx.send(Message { body: Buf::new(100_000), ..Message::default() }).unwrap();
                assert_eq!(rx.recv().unwrap().unwrap().body.len(), 100_000);
                counted.fetch_add(1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(1));
            }
            tx.finish().unwrap();
            assert!(rx.recv().unwrap().is_none());
        });
        Good { done, rounds, working: Some(working) }
    }

    fn goes_on(&self) {
        let before = self.rounds.load(Ordering::SeqCst);
        let until = soon();
        while self.rounds.load(Ordering::SeqCst) < before + 3 {
            assert!(Instant::now() < until, "the good session does not go on");
            assert!(self.working.as_ref().is_some_and(|working| !working.is_finished()), "it ended");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// It ends in order.
    fn end(mut self) {
        self.done.store(true, Ordering::SeqCst);
        self.working.take().unwrap().join().unwrap();
    }
}

impl Drop for Good {
    fn drop(&mut self) {
        self.done.store(true, Ordering::SeqCst);
    }
}

/// A listener with a good session and small limits, and the two sites.
fn busy() -> ([Site; 2], Server, Good) {
    let (near, far) = two();
    let limits = ListenerLimits {
        pending: 40,
        pending_of_address: 30,
        patience: Duration::from_millis(1500),
        ..ListenerLimits::default()
    };
    let server = Server::start(&far, limits, echo);
    let good = Good::new(server.call(&near, 3).unwrap());
    ([near, far], server, good)
}

#[test]
fn what_is_not_tls_is_dropped_at_once() {
    let (_sites, server, good) = busy();
    for noise in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 5000], &[0x16; 5000], &[0xff; 5000], b"\x93dsync\r\n"]
    {
        let mut socket = server.connect();
        socket.write_all(noise).unwrap();
        let began = Instant::now();
        let _ = socket.shutdown(Shutdown::Write);
        let _ = socket.read_to_end(&mut Vec::new());
        assert!(began.elapsed() < Duration::from_secs(4));
    }
    server.says(&["127.0.0.1", "not TLS"]);
    good.goes_on();
    good.end();
}

#[test]
fn connections_that_send_nothing_or_little_are_few_and_not_kept_for_long() {
    let ([near, _far], server, good) = busy();
    let began = Instant::now();
    let silent: Vec<TcpStream> = (0..200).map(|_| server.connect()).collect();
    server.says(&["127.0.0.1", "too many connections"]);
    good.goes_on();
    for mut socket in silent {
        let _ = socket.read_to_end(&mut Vec::new());
        assert!(began.elapsed() < Duration::from_secs(12), "silent ones were kept");
    }
    server.says(&["127.0.0.1", "in time"]);
    converse(server.call(&near, 1).unwrap(), 3).unwrap();

    let mut slow = server.connect();
    let began = Instant::now();
    let hello = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    let mut sent = 0;
    while slow.write_all(&[hello.get(sent).copied().unwrap_or(0)]).is_ok() {
        sent += 1;
        assert!(began.elapsed() < Duration::from_secs(10), "a slow one is kept");
        thread::sleep(Duration::from_millis(100));
    }
    good.goes_on();
    good.end();
}

#[test]
fn a_trusted_key_does_not_excuse_silence_or_nonsense() {
    let ([near, _far], server, good) = busy();
    let began = Instant::now();
    assert!(server.shaken(&near).read_exact(&mut [0; HELLO], soon()).is_err());
    assert!(began.elapsed() < Duration::from_secs(10));
    let hello = SessionHello { what: 0, connections: 1, session: [0; 16] };
    for (at, value) in [(0, 0), (8, 9), (11, 0), (11, 99)] {
        let mut bytes = hello.to_bytes();
        bytes[at] = value;
        let mut liar = server.shaken(&near);
        liar.write_all(&bytes, soon()).unwrap();
        assert!(liar.read_exact(&mut [0; HELLO], soon()).is_err());
    }
    server.says(&["near", "version 9"]);
    // One whose other connections do not come, and one that opens a session and says nothing in it.
    for connections in [2, 1] {
        let (mut lonely, _) = begun(&server, &near, connections);
        let began = Instant::now();
        while lonely.read_exact(&mut [0; 1], soon()).is_ok() {}
        assert!(began.elapsed() < Duration::from_secs(10));
    }
    good.goes_on();
    good.end();
}

/// Whoever holds all places and says nothing keeps nobody out, however many come.
#[test]
fn silent_connections_keep_nobody_out() {
    let (near, far) = two();
    for (pending, pending_of_address) in [(8, 8), (8, 100), (100, 8)] {
        let limits = ListenerLimits {
            pending,
            pending_of_address,
            // Long enough for none of them to leave by itself.
            patience: Duration::from_secs(60),
            ..ListenerLimits::default()
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
        while !server.stop.any_pending_spoke() {
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
fn a_connection_joins_only_the_session_of_its_own_key() {
    let (near, far) = two();
    let other = site();
    other.keys.trust("127.0.0.1", far.keys.own().unwrap(), None, Roles::ALL).unwrap();
    far.keys.trust("other", other.keys.own().unwrap(), None, Roles::ALL).unwrap();
    let served = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&served);
    let server = Server::start(&far, ListenerLimits::default(), move |link, peer| {
        counted.fetch_add(1, Ordering::SeqCst);
        assert_eq!(peer.name, "near");
        echo(link, peer);
    });
    let (first, session) = begun(&server, &near, 2);
    let answer = |site: &Site, hello: SessionHello| said(&mut server.shaken(site), hello).1.what;
    let join = SessionHello { what: 1, connections: 2, session };
    assert_eq!(answer(&other, join), NO_SESSION, "another key knows the name");
    server.says(&["other", "no such session of its key"]);
    assert_eq!(answer(&near, SessionHello { session: [1; 16], ..join }), NO_SESSION, "a session that is not");
    assert_eq!(answer(&near, SessionHello { what: 2, ..join }), NO_SESSION, "a connection that is not");
    assert_eq!(answer(&near, SessionHello { connections: 3, ..join }), NO_SESSION, "another count");
    assert_eq!(served.load(Ordering::SeqCst), 0);
    // The session still waits for its second connection.
    let mut second = server.shaken(&near);
    assert_eq!(said(&mut second, join).1.what, WELCOME);
    let client = ClientHandshake::new(&near.keys, "127.0.0.1", server.address.port(), Roles::PUSH).unwrap();
    let trust = client.trust(far.keys.own().unwrap());
    let link =
        sessions::open("far", vec![first, second], Duration::from_secs(20), Duration::from_secs(30), trust)
            .unwrap();
    converse(link, 20).unwrap();
    assert_eq!(served.load(Ordering::SeqCst), 1);
    assert_eq!(answer(&near, join), NO_SESSION, "the session has all its connections");
}

#[test]
fn what_no_connection_carries_cuts_the_session() {
    let (near, far) = two();
    let (server, ends) = ending(&far);
    let header = |number: u64, len: u32| [&number.to_le_bytes()[..], &len.to_le_bytes()].concat();
    let chunk =
        |number: u64| [header(number, 16), b"\x93dsync\r\n\x02\0\xff\xff\0\0\x10\0".to_vec()].concat();
    for (bytes, why) in [
        (header(0, CHUNK as u32 + 1), "a chunk of 1048577 bytes"),
        (header(0, 0), "a chunk of 0 bytes"),
        (header(0, u32::MAX), "a chunk of 4294967295 bytes"),
        ([chunk(0), chunk(0)].concat(), "chunk 0 after chunk 0"),
        (header(u64::MAX, 1), "chunk"),
    ] {
        let (mut connection, _) = begun(&server, &near, 1);
        connection.write_all(&bytes, soon()).unwrap();
        let said = ends.recv_timeout(Duration::from_secs(20)).unwrap().to_string();
        assert!(said.contains("cut") && said.contains(why), "{why}: {said}");
    }
    // A stream with a hole, cleanly ended.
    let (mut connection, _) = begun(&server, &near, 1);
    connection.write_all(&chunk(1), soon()).unwrap();
    connection.tls.send_close_notify();
    let _ = connection.write_all(&[], soon());
    let said = ends.recv_timeout(Duration::from_secs(20)).unwrap().to_string();
    assert!(said.contains("chunk 0 is missing"), "{said}");
    // One that ends within a chunk.
    let (mut connection, _) = begun(&server, &near, 1);
    connection.write_all(&header(0, 500), soon()).unwrap();
    drop(connection);
    assert!(ends.recv_timeout(Duration::from_secs(20)).unwrap().is_cut());
}

#[test]
fn sessions_are_bounded() {
    let (near, far) = two();
    let other = site();
    other.keys.trust("127.0.0.1", far.keys.own().unwrap(), None, Roles::ALL).unwrap();
    far.keys.trust("other", other.keys.own().unwrap(), None, Roles::ALL).unwrap();
    let limits = ListenerLimits { sessions: 3, sessions_of_key: 2, ..ListenerLimits::default() };
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
