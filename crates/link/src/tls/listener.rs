//! The server: accepts sessions only from clients whose keys are pinned.
//!
//! Until a connection has presented such a key it may cost only little, for a short time, and there are few of them at once.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use device::Bell;

use super::connection::{ConnectError, TlsConnection, tune};
use super::handshake::ServerHandshake;
use super::hello::{BUSY, HELLO, NO_SESSION, SessionHello, WELCOME};
use super::pending::{Pending, PendingConnection};
use super::session;
use super::sessions::Sessions;
use crate::flow::log::RateLimitedLog;
use crate::{Error, Key, Keys, Link, Result, Roles};

/// Limits of a listener.
#[derive(Debug, Clone)]
pub struct ListenerLimits {
    /// Sessions.
    pub sessions: usize,
    /// Sessions of one key.
    pub sessions_of_key: usize,
    /// Connections that belong to no session yet: most of them have not presented a trusted key.
    pub pending: usize,
    /// Pending connections from one address (of IPv6, one network of 64 bits).
    pub pending_of_address: usize,
    /// How long a connection may be pending, a session wait for its connections, and a link for its first message.
    pub patience: Duration,
    /// A peer from which nothing comes for this long is given up.
    pub timeout: Duration,
    /// If not empty, only the keys pinned under these names are accepted.
    pub from: Vec<String>,
}

impl Default for ListenerLimits {
    fn default() -> ListenerLimits {
        ListenerLimits {
            sessions: 64,
            sessions_of_key: 32,
            pending: 256,
            pending_of_address: 64,
            patience: Duration::from_secs(10),
            timeout: Duration::from_secs(30),
            from: Vec::new(),
        }
    }
}

/// The client of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The name under which its key is pinned here.
    pub name: String,
    /// Its key.
    pub key: Key,
    /// Where it connects from.
    pub address: SocketAddr,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, from {})", self.name, self.key.fingerprint(), self.address.ip())
    }
}

/// Serves one session.
type Serve = dyn Fn(Link, &Peer) + Send + Sync;

/// A port on which sessions are accepted.
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
    bell: Arc<Bell>,
    state: Arc<ListenerState>,
}

/// Ends a [`Listener`] from another thread.
#[derive(Clone)]
pub struct Stop {
    bell: Arc<Bell>,
    state: Weak<ListenerState>,
}

struct ListenerState {
    server: ServerHandshake,
    keys: Keys,
    limits: ListenerLimits,
    pending: Arc<Pending>,
    sessions: Arc<Sessions>,
    log: RateLimitedLog,
}

impl Listener {
    /// Listens on the address. Each connection is judged by the keys that are pinned at that moment. What
    /// happens to connections before they belong to a session goes to `log`, a line at a time.
    ///
    /// # Errors
    /// [`Error::Listen`], [`Error::Keys`].
    pub fn bind(
        address: SocketAddr,
        keys: &Keys,
        limits: ListenerLimits,
        log: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Listener> {
        let socket = TcpListener::bind(address).map_err(cannot_listen(address))?;
        Listener::on(socket, keys, limits, log)
    }

    /// Serves a socket that listens already, unlike [`Listener::bind`], and does not shut it down at the end: other processes may hold it.
    ///
    /// # Errors
    /// [`Error::Listen`], [`Error::Keys`].
    pub fn on(
        socket: TcpListener,
        keys: &Keys,
        limits: ListenerLimits,
        log: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Listener> {
        let server = ServerHandshake::new(keys, limits.from.clone())?;
        let address = socket.local_addr().map_err(cannot_listen("the given socket"))?;
        let bell = socket.set_nonblocking(true).and_then(|()| Bell::new());
        let bell = Arc::new(bell.map_err(cannot_listen(address))?);
        let state = ListenerState {
            server,
            keys: keys.clone(),
            pending: Pending::new(limits.pending, limits.pending_of_address),
            sessions: Sessions::new(limits.sessions, limits.sessions_of_key),
            limits,
            log: RateLimitedLog::new(log),
        };
        Ok(Listener { socket, address, bell, state: Arc::new(state) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A handle that stops it.
    pub fn stop(&self) -> Stop {
        Stop { bell: Arc::clone(&self.bell), state: Arc::downgrade(&self.state) }
    }

    /// Accepts sessions until it is stopped, each in a thread that runs `serve`.
    pub fn run(self, serve: impl Fn(Link, &Peer) + Send + Sync + 'static) {
        let serve: Arc<Serve> = Arc::new(serve);
        while !self.state.sessions.is_closed() {
            let accepted = match self.bell.wait_for_client(&self.socket) {
                Ok(true) => self.socket.accept(),
                Ok(false) => {
                    self.bell.hear();
                    continue;
                }
                Err(error) => Err(error),
            };
            let (socket, address) = match accepted {
                Ok(accepted) => accepted,
                // The client has left.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => {
                    // Such as no descriptor left: connections free some when they end, and a silent one is dropped now.
                    self.state.log.line(&format!("cannot accept a connection: {error}"));
                    self.state.pending.drop_one();
                    thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            // On a socket for both kinds of addresses: all of IPv4 would count as one network of IPv6.
            let address = SocketAddr::new(address.ip().to_canonical(), address.port());
            let socket = Arc::new(socket);
            let (pending, full) = self.state.pending.enter(&socket, address.ip());
            if let Some(network) = full {
                self.state.log.line(&format!(
                    "{network}: too many connections at once, the oldest silent one was dropped"
                ));
            }
            let (state, serve) = (Arc::clone(&self.state), Arc::clone(&serve));
            let thread = thread::Builder::new().name("session".into());
            if let Err(error) = thread.spawn(move || state.admit(socket, address, pending, &*serve)) {
                self.state.log.line(&format!("cannot start a thread: {error}"));
            }
        }
    }
}

impl Stop {
    /// Accepts no more sessions, cuts open ones, and waits until they have ended, but no longer than `patience`.
    pub fn stop(&self, patience: Duration) {
        let Some(state) = self.state.upgrade() else { return };
        state.sessions.close();
        // Wakes the thread that accepts connections.
        self.bell.ring();
        state.sessions.end(patience);
    }

    /// True if the thread that accepts sessions was awake since the last call, or was not asked before. For a watchdog.
    pub fn is_awake(&self) -> bool {
        self.bell.ring()
    }

    /// True if something has come from a connection that belongs to no session yet.
    #[cfg(test)]
    pub(super) fn any_pending_spoke(&self) -> bool {
        self.state.upgrade().is_some_and(|state| state.pending.any_spoke())
    }
}

impl ListenerState {
    /// Performs the handshake, and serves the session if this connection is its first.
    fn admit(&self, socket: Arc<TcpStream>, address: SocketAddr, pending: PendingConnection, serve: &Serve) {
        let until = Instant::now() + self.limits.patience;
        tune(&socket, self.limits.timeout);
        pending.hear(&socket, until);
        let (mut connection, peer, hello) = match self.greet(socket, address, until) {
            Ok(greeted) => greeted,
            Err(line) => return self.log.line(&line),
        };
        if hello.what > 0 {
            return self.join(connection, &peer, hello, until);
        }
        let place = match self.sessions.begin(peer.key, hello.connections) {
            Ok(place) => place,
            Err(why) => {
                self.log.line(&format!("{peer}: {why}"));
                let _ = connection.write_all(&SessionHello { what: BUSY, ..hello }.to_bytes(), until);
                return connection.part(until);
            }
        };
        // From here on the session is counted instead.
        drop(pending);
        let hello = SessionHello { session: place.session, ..hello };
        if connection.write_all(&SessionHello { what: WELCOME, ..hello }.to_bytes(), until).is_err() {
            return;
        }
        self.sessions.join(peer.key, hello, connection);
        let Some(connections) = place.gather(Instant::now() + self.limits.patience) else {
            return self.log.line(&format!("{peer}: the session's connections did not come in time"));
        };
        let (ListenerLimits { patience, timeout, .. }, trust) =
            (&self.limits, self.server.trust(&peer.name, peer.key));
        match session::open(&peer.name, connections, *patience, *timeout, trust) {
            Ok(link) if place.open(&link) => serve(link, &peer),
            Ok(_) => self.log.line(&format!("{peer}: cut, the listener is shutting down")),
            Err(error) => self.log.line(&format!("{peer}: {error}")),
        }
    }

    /// The handshake, and the client's hello. Returns a line for the log if either fails.
    fn greet(
        &self,
        socket: Arc<TcpStream>,
        address: SocketAddr,
        until: Instant,
    ) -> Result<(TlsConnection, Peer, SessionHello), String> {
        let refused = |failed| refusal(address.ip(), failed);
        let mut connection = self.server.handshake(socket, until).map_err(refused)?;
        let key = connection.key().ok_or_else(|| format!("{}: it showed no key", address.ip()))?;
        let mut hello = [0; HELLO];
        connection.read_exact(&mut hello, until).map_err(refused)?;
        let peer = Peer { name: self.name_of(key), key, address };
        match SessionHello::parse(&hello) {
            Ok(hello) => Ok((connection, peer, hello)),
            Err(what) => {
                connection.part(until);
                Err(format!("{peer}: it sent {what}"))
            }
        }
    }

    fn name_of(&self, key: Key) -> String {
        let pins = self.keys.pins().unwrap_or_default();
        let from = &self.limits.from;
        let served = pins.into_iter().filter(|pin| pin.key == key && pin.roles.has(Roles::SERVE));
        let mut names = served.map(|pin| pin.name);
        names.find(|name| from.is_empty() || from.contains(name)).unwrap_or_else(|| "a peer".into())
    }

    /// Adds a further connection to a session of the same key.
    fn join(&self, mut connection: TlsConnection, peer: &Peer, hello: SessionHello, until: Instant) {
        // The answer goes out before the connection can carry anything else.
        let known = self.sessions.waits_for(peer.key, hello);
        let answer = SessionHello { what: if known { WELCOME } else { NO_SESSION }, ..hello };
        let told = connection.write_all(&answer.to_bytes(), until);
        let why = match (known, told) {
            (true, Ok(())) => return self.sessions.join(peer.key, hello, connection),
            (true, Err(_)) => "left before it had joined",
            (false, _) => "refused, there is no such session of its key",
        };
        self.log.line(&format!("{peer}: a connection: {why}"));
        connection.part(until);
    }
}

/// Why a listener cannot be.
fn cannot_listen(address: impl ToString) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::Listen { address: address.to_string(), why: error.to_string() }
}

/// Why a connection ended before it belonged to a session.
fn refusal(from: IpAddr, failed: ConnectError) -> String {
    let distrust = failed.is_distrust();
    let why = match failed.error("the client") {
        _ if distrust => "left, it does not trust this host's key".into(),
        Error::Unknown { key, command, roles, .. } => format!(
            "refused, its key is not pinned here: {}. To let it in, run: {command} trust NAME {key} --for {roles}",
            key.fingerprint()
        ),
        Error::Tls { why, .. } | Error::Connect { why, .. } => format!("dropped: {why}"),
        error => format!("refused: {error}"),
    };
    format!("{from}: {why}")
}
