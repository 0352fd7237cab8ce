//! What clients that are unknown, lie or wait too long can do to a listener.

use super::*;

/// While a good session works, everything bad that a network brings.
#[test]
fn bad_peers_do_not_disturb_good_ones() {
    let (near, far) = two();
    let limits = Limits {
        pending: 40,
        pending_of_address: 30,
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
        server.says(&["127.0.0.1", "not TLS"]);
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
        assert!(server.shaken(&near).read_exact(&mut [0; HELLO], soon()).is_err());
        assert!(began.elapsed() < Duration::from_secs(10));
        let hello = Hello { what: 0, connections: 1, session: [0; 16] };
        for (at, value) in [(0, 0), (8, 9), (11, 0), (11, 99)] {
            let mut bytes = hello.to_bytes();
            bytes[at] = value;
            let mut liar = server.shaken(&near);
            liar.write_all(&bytes, soon()).map_err(|failed| failed.error("")).unwrap();
            assert!(liar.read_exact(&mut [0; HELLO], soon()).is_err());
        }
        server.says(&["near", "version 9"]);
        // One whose connections do not come, and one that opens a session and says nothing in it.
        for connections in [2, 1] {
            let mut lonely = server.shaken(&near);
            lonely
                .write_all(&Hello { connections, ..hello }.to_bytes(), soon())
                .map_err(|failed| failed.error(""))
                .unwrap();
            let mut answer = [0; HELLO];
            lonely.read_exact(&mut answer, soon()).map_err(|failed| failed.error("")).unwrap();
            assert_eq!(Hello::parse(&answer).unwrap().what, WELCOME);
            let began = Instant::now();
            while lonely.read_exact(&mut [0; 1], soon()).is_ok() {}
            assert!(began.elapsed() < Duration::from_secs(10));
        }
        went_on("liars");
    });
}

/// Whoever holds all places and says nothing keeps nobody out, however many come.
#[test]
fn silent_connections_keep_nobody_out() {
    let (near, far) = two();
    for (pending, pending_of_address) in [(8, 8), (8, 100), (100, 8)] {
        let limits = Limits {
            pending,
            pending_of_address,
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
    let answer = |site: &Site, hello: Hello| said(&mut server.shaken(site), hello).1.what;
    let join = Hello { what: 1, connections: 2, session };
    assert_eq!(answer(&other, join), NO_SESSION, "another key knows the name");
    server.says(&["other", "no such session of its key"]);
    assert_eq!(answer(&near, Hello { session: [1; 16], ..join }), NO_SESSION, "a session that is not");
    assert_eq!(answer(&near, Hello { what: 2, ..join }), NO_SESSION, "a connection that is not");
    assert_eq!(answer(&near, Hello { connections: 3, ..join }), NO_SESSION, "another count");
    assert_eq!(served.load(Ordering::SeqCst), 0);
    // The session still waits for its second connection.
    let mut second = server.shaken(&near);
    assert_eq!(said(&mut second, join).1.what, WELCOME);
    let link =
        sessions::open("far", vec![first, second], Duration::from_secs(20), Duration::from_secs(30)).unwrap();
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
        (header(0, CHUNK as u32 + 1), "a chunk of 131073 bytes"),
        (header(0, 0), "a chunk of 0 bytes"),
        (header(0, u32::MAX), "a chunk of 4294967295 bytes"),
        ([chunk(0), chunk(0)].concat(), "chunk 0 after chunk 0"),
        (header(u64::MAX, 1), "chunk"),
    ] {
        let (mut connection, _) = begun(&server, &near, 1);
        connection.write_all(&bytes, soon()).map_err(|failed| failed.error("")).unwrap();
        let said = ends.recv_timeout(Duration::from_secs(20)).unwrap().to_string();
        assert!(said.contains("cut") && said.contains(why), "{why}: {said}");
    }
    // A stream with a hole, cleanly ended.
    let (mut connection, _) = begun(&server, &near, 1);
    connection.write_all(&chunk(1), soon()).map_err(|failed| failed.error("")).unwrap();
    connection.tls.send_close_notify();
    let _ = connection.write_all(&[], soon());
    let said = ends.recv_timeout(Duration::from_secs(20)).unwrap().to_string();
    assert!(said.contains("chunk 0 never came"), "{said}");
    // One that ends within a chunk.
    let (mut connection, _) = begun(&server, &near, 1);
    connection.write_all(&header(0, 500), soon()).map_err(|failed| failed.error("")).unwrap();
    drop(connection);
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
