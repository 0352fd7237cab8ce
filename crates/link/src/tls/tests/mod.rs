//! The link over TLS, and what strangers and liars do to it.

mod hostile;
mod session;
mod trust;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use device::Buf;
use tempfile::TempDir;

use crate::flow::lock;
use crate::tls::MAX_CONNECTIONS;
use crate::tls::chunk::CHUNK;
use crate::tls::connection::{TlsConnection, tune};
use crate::tls::handshake::ClientHandshake;
use crate::tls::hello::{HELLO, NO_SESSION, SessionHello, WELCOME};
use crate::tls::session as sessions;
use crate::{
    ConnectOptions, Error, Keys, Link, Listener, ListenerLimits, Message, Peer, Result, Roles, Stop,
};

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
    near.keys.trust("127.0.0.1", far.keys.own().unwrap(), None, Roles::ALL).unwrap();
    far.keys.trust("near", near.keys.own().unwrap(), None, Roles::ALL).unwrap();
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
    fn start(
        site: &Site,
        limits: ListenerLimits,
        serve: impl Fn(Link, &Peer) + Send + Sync + 'static,
    ) -> Server {
        let said = Arc::new(Mutex::new(Vec::new()));
        let says = Arc::clone(&said);
        let address = "127.0.0.1:0".parse().unwrap();
        let says = move |line: &str| lock(&says).push(line.to_string());
        let listener = Listener::bind(address, &site.keys, limits, says).unwrap();
        let (address, stop) = (listener.address(), listener.stop());
        let runs = Some(thread::spawn(move || listener.run(serve)));
        Server { address, said, stop, runs }
    }

    /// Waits for a line with all these hellos.
    fn says(&self, hellos: &[&str]) {
        let until = Instant::now() + Duration::from_secs(20);
        while !lock(&self.said).iter().any(|line| hellos.iter().all(|hello| line.contains(hello))) {
            assert!(Instant::now() < until, "it does not say {hellos:?}: {:#?}", lock(&self.said));
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn call(&self, site: &Site, connections: usize) -> Result<Link> {
        let patience = Duration::from_secs(20);
        let options =
            ConnectOptions { connections: Some(connections), patience, ..ConnectOptions::default() };
        Link::tls(&site.keys, "127.0.0.1", self.address.port(), &options)
    }

    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket
    }

    /// A connection with the site's key, that has said nothing yet.
    fn shaken(&self, site: &Site) -> TlsConnection {
        let client = ClientHandshake::new(&site.keys, "127.0.0.1", self.address.port(), Roles::PUSH).unwrap();
        client.handshake(self.connect(), soon()).unwrap()
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Both ends of a link over TLS.
pub(crate) fn over_tls(connections: usize) -> (Link, Link) {
    let (near, far) = two();
    let (sender, ends) = mpsc::channel();
    let sender = Mutex::new(sender);
    let server =
        Server::start(&far, ListenerLimits::default(), move |link, _| lock(&sender).send(link).unwrap());
    let here = server.call(&near, connections).unwrap();
    let there = ends.recv().unwrap();
    // The link does not need the listener any more; stopping it would cut what it serves.
    std::mem::forget(server);
    // The keys stay for as long as the link does.
    let ends = [&here, &there].map(|link| Arc::downgrade(link.endpoint()));
    thread::spawn(move || {
        while ends.iter().any(|end| end.strong_count() > 0) {
            thread::sleep(Duration::from_millis(10));
        }
        drop((near, far));
    });
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
            let mut body = Buf::new([1 << 20, 5, 0, 77_777, (1 << 20) + 1][at % 5]);
            body.fill(at as u8);
            tx.send(Message { kind: at as u8, head: vec![at as u8; at % 50], body })?;
        }
        tx.finish()
    });
    for at in 0..count {
        let message = rx.recv()?.expect("an echo");
        assert_eq!((message.kind, message.head.len()), (at as u8, at % 50));
        assert_eq!(message.body.len(), [1 << 20, 5, 0, 77_777, (1 << 20) + 1][at % 5]);
        assert!(message.body.iter().all(|&byte| byte == at as u8));
    }
    assert!(rx.recv()?.is_none());
    sender.join().unwrap()
}

/// Opens a session by hand; its first connection and its name.
fn begun(server: &Server, site: &Site, connections: u8) -> (TlsConnection, [u8; 16]) {
    let mut first = server.shaken(site);
    let (went, answer) = said(&mut first, SessionHello { what: 0, connections, session: [0; 16] });
    assert_eq!((went, answer.what), (true, WELCOME));
    (first, answer.session)
}

/// Says a hello; whether it went out, and the answer.
fn said(connection: &mut TlsConnection, hello: SessionHello) -> (bool, SessionHello) {
    let went = connection.write_all(&hello.to_bytes(), soon()).is_ok();
    let mut answer = [0; HELLO];
    connection.read_exact(&mut answer, soon()).unwrap();
    (went, SessionHello::parse(&answer).unwrap())
}

/// A server that listens to its end of every link until that ends, and what ended it.
fn ending(site: &Site) -> (Server, mpsc::Receiver<Error>) {
    let (sender, ends) = mpsc::channel();
    let sender = Mutex::new(sender);
    let server = Server::start(site, ListenerLimits::default(), move |link, _| {
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
