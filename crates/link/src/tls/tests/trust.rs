//! Which keys are accepted, and what is said where one is not.

use super::*;

#[test]
fn an_unknown_key_is_refused_on_either_side_with_the_way_out() {
    let (near, far) = (site(), site());
    let server = Server::start(&far, ListenerLimits::default(), |_, _| panic!("an unknown key was served"));
    let theirs = far.keys.own().unwrap();
    let error = server.call(&near, 2).map(drop).unwrap_err();
    assert!(matches!(error, Error::Unknown { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(&theirs.fingerprint()), "{text}");
    assert!(text.contains(&format!("dsync key trust 127.0.0.1 {theirs}")), "{text}");

    near.keys.trust("127.0.0.1", theirs, None, Roles::ALL).unwrap();
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
    liar.keys.trust("near", near.keys.own().unwrap(), None, Roles::ALL).unwrap();
    let server = Server::start(&liar, ListenerLimits::default(), |_, _| panic!("it was believed"));
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
    let server = Server::start(&far, ListenerLimits::default(), echo);
    let other = site();
    let name = format!("127.0.0.1:{}", server.address.port());
    near.keys.trust(&name, other.keys.own().unwrap(), None, Roles::ALL).unwrap();
    assert!(matches!(server.call(&near, 1), Err(Error::Swapped { .. })));
}

#[test]
fn an_expired_pin_is_refused_on_either_side() {
    let (near, far) = two();
    let server = Server::start(&far, ListenerLimits::default(), echo);
    let (ours, theirs) = (near.keys.own().unwrap(), far.keys.own().unwrap());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    near.keys.trust("127.0.0.1", theirs, Some(now), Roles::ALL).unwrap();
    let error = server.call(&near, 1).map(drop).unwrap_err();
    assert!(matches!(error, Error::Expired { .. }), "{error}");
    assert!(error.to_string().contains("dsync key trust 127.0.0.1"), "{error}");
    near.keys.trust("127.0.0.1", theirs, Some(now + 1000), Roles::ALL).unwrap();
    converse(server.call(&near, 1).unwrap(), 3).unwrap();
    far.keys.trust("near", ours, Some(now), Roles::ALL).unwrap();
    let error = server.call(&near, 1).map(drop).unwrap_err();
    assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
    server.says(&["has expired", &ours.fingerprint(), "dsync key trust near"]);
    far.keys.forget("near").unwrap();
    assert!(matches!(server.call(&near, 1), Err(Error::NotTrusted { .. })), "forgotten at once");
}

#[test]
fn a_session_ends_at_both_ends_when_either_key_is_trusted_no_longer() {
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    type Distrust = fn(&Site, &Site, u64);
    let ways: [(&str, Distrust); 3] = [
        ("forgotten by the server", |_, far, _| far.keys.forget("near").unwrap()),
        ("forgotten by the client", |near, _, _| near.keys.forget("127.0.0.1").unwrap()),
        ("expired", |near, far, now| {
            far.keys.trust("near", near.keys.own().unwrap(), Some(now + 1), Roles::ALL).unwrap()
        }),
    ];
    for (way, distrust) in ways {
        for busy in [false, true] {
            let (near, far) = two();
            let (server, ends) = ending(&far);
            let (tx, rx) = server.call(&near, 2).unwrap().split();
            let message = || Message { kind: 1, body: Buf::new(1 << 20), ..Message::default() };
            tx.send(message()).unwrap();
            let began = Instant::now();
            distrust(&near, &far, now());
            let sender = thread::spawn(move || {
                while busy && tx.send(message()).is_ok() {}
                // Kept until the other end is known: a half that is dropped would cut the link.
                tx
            });
            let here = rx.recv().unwrap_err();
            let there = ends.recv_timeout(Duration::from_secs(20)).unwrap();
            assert!(began.elapsed() < Duration::from_secs(10), "{way}: {:?}", began.elapsed());
            drop(sender.join().unwrap());
            let client_forgot = matches!(here, Error::Forgotten { .. });
            assert_eq!(client_forgot, way == "forgotten by the client", "{way}: {here}");
            let (judge, judged) = if client_forgot { (here, there) } else { (there, here) };
            assert!(matches!(judge, Error::Forgotten { .. } | Error::Expired { .. }), "{way}: {judge}");
            assert!(judge.to_string().contains("dsync key trust "), "{way}: {judge}");
            assert!(matches!(judged, Error::NotTrusted { .. }), "{way}, busy {busy}: {judged}");
        }
    }
}

#[test]
fn a_listener_may_take_only_some_of_the_pinned() {
    let (near, far) = two();
    let limits = ListenerLimits { from: vec!["other".into()], ..ListenerLimits::default() };
    let server = Server::start(&far, limits, |_, _| panic!("it was let in"));
    assert!(matches!(server.call(&near, 1), Err(Error::NotTrusted { .. })));
    server.says(&["near", "--from"]);
    let limits = ListenerLimits { from: vec!["other".into(), "near".into()], ..ListenerLimits::default() };
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
    let error = Link::tls(&near.keys, "127.0.0.1", port, &ConnectOptions::default()).map(drop).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error}");
    let error =
        Link::tls(&near.keys, "no.such.host.invalid", 1, &ConnectOptions::default()).map(drop).unwrap_err();
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
        let options =
            ConnectOptions { patience: Duration::from_millis(patience), ..ConnectOptions::default() };
        let error = Link::tls(&near.keys, "127.0.0.1", port, &options).map(drop).unwrap_err();
        match says {
            // Nothing says that it could not talk TLS.
            "" => assert!(matches!(error, Error::Connect { .. }), "{error}"),
            _ => assert!(matches!(error, Error::Tls { .. }), "{error}"),
        }
        other.join().unwrap();
    }
}

#[test]
fn a_key_is_good_for_what_it_was_pinned_for() {
    let (near, far) = two();
    let server = Server::start(&far, ListenerLimits::default(), echo);
    let (ours, theirs) = (near.keys.own().unwrap(), far.keys.own().unwrap());
    // Pinned at the server only because it connects to the client.
    for role in [Roles::PUSH, Roles::PULL, Roles::PUSH.and(Roles::PULL)] {
        far.keys.trust("near", ours, None, role).unwrap();
        let error = server.call(&near, 1).map(drop).unwrap_err();
        assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
        server.says(&["not for serve", &format!("dsync key trust near --for {},serve", role)]);
    }
    // Under another name it may be served.
    far.keys.trust("served", ours, None, Roles::SERVE).unwrap();
    server.call(&near, 1).unwrap();
    // And at the client only because the server connects to it.
    near.keys.trust("127.0.0.1", theirs, None, Roles::SERVE.and(Roles::PULL)).unwrap();
    let error = server.call(&near, 1).map(drop).unwrap_err();
    assert!(matches!(error, Error::NotFor { needed: Roles::PUSH, roles: Roles::ALL, .. }), "{error}");
}
