//! Sessions that work, and those that break.

use super::*;

/// Carries connections to a listener, and cuts one of them, or stands still, when told.
struct Proxy {
    address: SocketAddr,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
    still: Arc<AtomicBool>,
}

#[test]
fn everything_arrives_over_any_number_of_connections() {
    let (near, far) = two();
    let server = Server::start(&far, ListenerLimits::default(), echo);
    for connections in [1, 2, 5, MAX_CONNECTIONS] {
        converse(server.call(&near, connections).unwrap(), 100).unwrap();
    }
    assert_eq!(*lock(&server.said), Vec::<String>::new());
}

#[test]
fn a_line_that_is_slow_because_it_is_bounded_is_not_silent() {
    let (near, far) = two();
    let server = Server::start(&far, ListenerLimits::default(), echo);
    let options =
        ConnectOptions { connections: Some(2), timeout: Duration::from_secs(1), ..ConnectOptions::default() };
    let link = Link::tls(&near.keys, "127.0.0.1", server.address.port(), &options).unwrap();
    let (tx, rx) = link.split();
    tx.limit(4 << 10);
    tx.send(Message { body: Buf::new(16 << 10), ..Message::default() }).unwrap();
    assert_eq!(rx.recv().unwrap().expect("an echo").body.len(), 16 << 10);
    tx.finish().unwrap();
    assert!(rx.recv().unwrap().is_none());
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
        let options = ConnectOptions {
            connections: Some(2),
            timeout: Duration::from_secs(1),
            ..ConnectOptions::default()
        };
        let (tx, rx) = Link::tls(&near.keys, "127.0.0.1", proxy.address.port(), &options).unwrap().split();
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
fn a_connection_that_breaks_cuts_the_link_at_both_ends() {
    let (near, far) = two();
    let (server, ends) = ending(&far);
    for broken in 0..3 {
        let proxy = proxy(server.address);
        let options = ConnectOptions { connections: Some(3), ..ConnectOptions::default() };
        let link = Link::tls(&near.keys, "127.0.0.1", proxy.address.port(), &options).unwrap();
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
    let server = Server::start(&far, ListenerLimits::default(), echo);
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
    tune(&socket, Duration::from_secs(30));
    use rustix::net::sockopt;
    assert!(sockopt::socket_keepalive(&socket).unwrap() && sockopt::tcp_nodelay(&socket).unwrap());
    assert_eq!(sockopt::tcp_user_timeout(&socket).unwrap(), 30_000);
    let idle = sockopt::tcp_keepidle(&socket).unwrap();
    let between = sockopt::tcp_keepintvl(&socket).unwrap() * sockopt::tcp_keepcnt(&socket).unwrap();
    assert_eq!(idle + between, Duration::from_secs(30));
}
