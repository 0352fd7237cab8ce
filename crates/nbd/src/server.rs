//! Listening, counting connections, and ending them.

use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use device::{Bell, Reserve};

use crate::export::Exports;
use crate::handshake::{negotiate, turn_away};
use crate::socket::Stream;
use crate::transmission;

/// Limits of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerLimits {
    /// The most connections. A further one takes the place of the oldest that has not chosen its export yet; if all have, it gets an
    /// error and is closed.
    pub connections: usize,
    /// The time that a client has to choose its export.
    pub handshake: Duration,
}

impl Default for ServerLimits {
    /// 128 connections, 30 seconds.
    fn default() -> ServerLimits {
        ServerLimits { connections: 128, handshake: Duration::from_secs(30) }
    }
}

/// The most connections over the limit that get an error; more are closed without one.
const TURNED_AWAY: usize = 16;
/// How long a client over the limit is served.
const TURN_AWAY_TIME: Duration = Duration::from_secs(5);
/// How often problems are reported.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// How long to wait when the system has no descriptor or no thread left.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// An NBD server: a thread for each listener, and one for each connection.
///
/// Dropping it is like [`Server::shutdown`] without grace.
pub struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    exports: Arc<dyn Exports>,
    limits: ServerLimits,
    closing: AtomicBool,
    registry: Arc<Registry>,
    trouble: OnceLock<Box<Tell>>,
    told: Mutex<Option<Instant>>,
}

/// Listeners and connections. Separate from the exports, so that a thread unregisters when it holds none of them any more.
#[derive(Default)]
struct Registry {
    state: Mutex<RegistryState>,
    changed: Condvar,
}

impl Registry {
    /// A panic leaves the state consistent: every change is a single step.
    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Tell = dyn Fn(&str) + Send + Sync;

#[derive(Default)]
struct RegistryState {
    next: u64,
    /// Wakes each accepting thread.
    listeners: HashMap<u64, Arc<Bell>>,
    connections: HashMap<u64, Arc<Stream>>,
    /// Connections over the limit that are getting an error, or had to yield.
    turned_away: HashMap<u64, Arc<Stream>>,
}

impl RegistryState {
    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn streams(&self) -> impl Iterator<Item = &Arc<Stream>> {
        self.connections.values().chain(self.turned_away.values())
    }

    /// Ends the oldest connection that is still negotiating: connections that only hold a place keep no client out.
    fn make_room(&mut self) {
        let waits = |(_, stream): &(&u64, &Arc<Stream>)| !stream.entered.load(Ordering::SeqCst);
        let oldest = self.connections.iter().filter(waits).map(|(id, _)| *id).min();
        // Its thread is counted until it has ended.
        let oldest = oldest.filter(|_| self.turned_away.len() < TURNED_AWAY);
        if let Some((id, stream)) = oldest.and_then(|id| self.connections.remove_entry(&id)) {
            stream.cut();
            self.turned_away.insert(id, stream);
        }
    }

    fn is_idle(&self) -> bool {
        self.listeners.is_empty() && self.connections.is_empty() && self.turned_away.is_empty()
    }
}

impl Server {
    /// A server with the usual limits, that does not listen yet.
    pub fn new(exports: Arc<dyn Exports>) -> Server {
        Server::with_limits(exports, ServerLimits::default())
    }

    /// A server that does not listen yet.
    pub fn with_limits(exports: Arc<dyn Exports>, limits: ServerLimits) -> Server {
        let (closing, registry, trouble, told) = Default::default();
        Server { shared: Arc::new(Shared { exports, limits, closing, registry, trouble, told }) }
    }

    /// Sets a function that is called from any thread with what keeps the server from accepting clients, at most once a minute.
    pub fn on_trouble(&self, tell: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.shared.trouble.set(Box::new(tell));
    }

    /// Accepts connections on a Unix socket, in a thread of its own, until the server ends. The socket's file is the
    /// caller's to remove.
    pub fn serve_unix(&self, listener: UnixListener) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        self.listen(listener, |listener| listener.accept().map(|(stream, _)| stream.into()))
    }

    /// Accepts connections on a TCP socket, in a thread of its own, until the server ends. There is no encryption and no
    /// password: see [`is_loopback`].
    pub fn serve_tcp(&self, listener: TcpListener) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        self.listen(listener, |listener| listener.accept().map(|(stream, _)| stream.into()))
    }

    /// Serves a client that is connected already, in a thread of its own.
    ///
    /// # Errors
    /// `ConnectionAborted` if the server is stopping or has all the connections it allows; else what kept the
    /// thread from starting.
    pub fn serve_stream(&self, stream: impl Into<Stream>) -> io::Result<()> {
        self.shared.connect(stream.into())
    }

    /// Connections at this moment.
    pub fn connections(&self) -> usize {
        self.shared.registry.lock().connections.len()
    }

    /// True if every thread that accepts clients was awake since the last call, or was not asked before. For a watchdog.
    pub fn is_awake(&self) -> bool {
        let state = self.shared.registry.lock();
        // Each of them is asked, whatever the others answer.
        state.listeners.values().filter(|bell| !bell.ring()).count() == 0
    }

    /// Ends the server: accepts no more, lets every connection finish the requests that have arrived, and closes it. A connection that
    /// is not done after `grace`, because its client does not take its replies, is cut off. Returns when no thread of
    /// the server uses the exports any more; for that, disks must complete their requests.
    pub fn shutdown(&self, grace: Duration) {
        let shared = &*self.shared;
        let mut state = shared.registry.lock();
        shared.closing.store(true, Ordering::SeqCst);
        for bell in state.listeners.values() {
            bell.ring();
        }
        state.streams().for_each(|stream| stream.end_input());
        let deadline = after(grace);
        while !state.is_idle() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = match shared.registry.changed.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        state.streams().for_each(|stream| stream.cut());
        while !state.is_idle() {
            state = shared.registry.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn listen<L, A>(&self, listener: L, accept: A) -> io::Result<()>
    where
        L: AsFd + Send + 'static,
        A: Fn(&L) -> io::Result<Stream> + Send + 'static,
    {
        let bell = Arc::new(Bell::new()?);
        let shared = self.shared.clone();
        let id = {
            let mut state = self.shared.registry.lock();
            if shared.closing.load(Ordering::SeqCst) {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the server is stopping"));
            }
            let id = state.id();
            state.listeners.insert(id, bell.clone());
            id
        };
        let leave = Registration { registry: shared.registry.clone(), id };
        thread::Builder::new().name("nbd-accept".into()).spawn(move || {
            // Moved in, so that it also unregisters a thread that fails to start.
            let leave = leave;
            let shared = shared;
            let listener = listener;
            let mut reserve = Reserve::new();
            while !shared.closing.load(Ordering::SeqCst) {
                match bell.wait_for_client(&listener) {
                    Ok(true) => {}
                    Ok(false) => bell.hear(),
                    Err(_) => thread::sleep(EXHAUSTED),
                }
                reserve.hold();
                match accept(&listener) {
                    // A refused client sees its connection closed.
                    Ok(stream) => match shared.connect(stream) {
                        Err(error) if error.kind() != io::ErrorKind::ConnectionAborted => {
                            shared.tell(&format!("cannot start a thread for a client: {error}"));
                        }
                        _ => {}
                    },
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                    Err(error) => {
                        shared.tell(&format!("cannot accept a connection: {error}"));
                        if Reserve::is_exhausted(&error) {
                            reserve.turn_away(&listener, || accept(&listener));
                        }
                        // Trying again at once would only keep a core busy.
                        thread::sleep(EXHAUSTED);
                    }
                }
            }
            drop(listener);
            drop(shared);
            drop(leave);
        })?;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}

impl Shared {
    fn tell(&self, trouble: &str) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_none_or(|then| then.elapsed() >= TELL_EVERY) {
            *told = Some(Instant::now());
            self.trouble.get().inspect(|tell| tell(trouble));
        }
    }

    fn connect(self: &Arc<Shared>, stream: Stream) -> io::Result<()> {
        let stream = Arc::new(stream);
        let full;
        let id = {
            let mut state = self.registry.lock();
            let aborted = |why| Err(io::Error::new(io::ErrorKind::ConnectionAborted, why));
            if self.closing.load(Ordering::SeqCst) {
                return aborted("the server is stopping");
            }
            if state.connections.len() >= self.limits.connections {
                state.make_room();
            }
            full = state.connections.len() >= self.limits.connections;
            if full && state.turned_away.len() >= TURNED_AWAY {
                return aborted("too many connections");
            }
            let id = state.id();
            let place = if full { &mut state.turned_away } else { &mut state.connections };
            place.insert(id, stream.clone());
            id
        };
        let leave = Registration { registry: self.registry.clone(), id };
        let shared = self.clone();
        thread::Builder::new().name("nbd-client".into()).spawn(move || {
            let leave = leave;
            let shared = shared;
            match full {
                true => shared.turn_away(&stream),
                false => shared.converse(&stream),
            }
            // The client sees the end no later than the server does.
            stream.cut();
            drop(stream);
            drop(shared);
            drop(leave);
        })?;
        Ok(())
    }

    fn converse(&self, stream: &Stream) {
        let deadline = after(self.limits.handshake);
        if let Ok(Some(negotiated)) = negotiate(stream, &*self.exports, deadline) {
            transmission::run(stream, negotiated, &self.closing);
        }
    }

    fn turn_away(&self, stream: &Stream) {
        let allowed = self.limits.connections;
        let message = format!("too many connections ({allowed}): try again later");
        let _ = turn_away(stream, &message, after(TURN_AWAY_TIME));
    }
}

/// The moment after `time`; after a year where `time` is beyond what the clock can count.
fn after(time: Duration) -> Instant {
    Instant::now() + time.min(Duration::from_secs(365 * 24 * 3600))
}

/// Removes a thread from the registry when it ends, even by a panic.
struct Registration {
    registry: Arc<Registry>,
    id: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        state.listeners.remove(&self.id);
        state.connections.remove(&self.id);
        state.turned_away.remove(&self.id);
        self.registry.changed.notify_all();
    }
}

/// True if only this machine can reach the listener. A server without encryption should listen nowhere else.
pub fn is_loopback(listener: &TcpListener) -> io::Result<bool> {
    Ok(listener.local_addr()?.ip().to_canonical().is_loopback())
}
