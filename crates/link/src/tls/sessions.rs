//! The sessions of a listener: how many there are, which wait for their connections, which are open.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use ring::rand::{SecureRandom, SystemRandom};

use super::connection::TlsConnection;
use super::hello::{Id, SessionHello};
use crate::endpoint::Endpoint;
use crate::flow::lock;
use crate::{Key, Link};

/// All of them.
pub(super) struct Sessions {
    most: usize,
    most_of_key: usize,
    state: Mutex<SessionsState>,
    /// A connection has joined, or a session has ended.
    changed: Condvar,
}

#[derive(Default)]
struct SessionsState {
    /// None begins any more.
    closed: bool,
    by_key: HashMap<Key, usize>,
    all: usize,
    gathering: HashMap<Id, PartialSession>,
    open: HashMap<Id, Weak<Endpoint>>,
}

/// A session that waits for its connections.
struct PartialSession {
    key: Key,
    connections: Vec<Option<TlsConnection>>,
}

/// A session's place among all of them; free again when this is dropped.
pub(super) struct SessionSlot {
    all: Arc<Sessions>,
    key: Key,
    pub(super) session: Id,
}

impl Sessions {
    pub(super) fn new(most: usize, most_of_key: usize) -> Arc<Sessions> {
        Arc::new(Sessions { most, most_of_key, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Takes a place for a new session of so many connections. Returns why there is none otherwise.
    pub(super) fn begin(
        self: &Arc<Sessions>,
        key: Key,
        connections: u8,
    ) -> Result<SessionSlot, &'static str> {
        let mut session = Id::default();
        SystemRandom::new().fill(&mut session).map_err(|_| "refused, the system has no random numbers")?;
        let mut state = lock(&self.state);
        let of_key = state.by_key.get(&key).copied().unwrap_or(0);
        if state.closed {
            return Err("refused, the listener is shutting down");
        }
        if state.all >= self.most || of_key >= self.most_of_key {
            return Err("refused, too many sessions at once");
        }
        state.all += 1;
        *state.by_key.entry(key).or_default() += 1;
        let connections = (0..connections).map(|_| None).collect();
        state.gathering.insert(session, PartialSession { key, connections });
        drop(state);
        Ok(SessionSlot { all: Arc::clone(self), key, session })
    }

    /// True if a session of this key waits for the connection.
    pub(super) fn waits_for(&self, key: Key, hello: SessionHello) -> bool {
        lock(&self.state).slot(key, hello).is_some()
    }

    /// Adds a connection to its session, if that still waits for it.
    pub(super) fn join(&self, key: Key, hello: SessionHello, connection: TlsConnection) {
        if let Some(slot) = lock(&self.state).slot(key, hello) {
            *slot = Some(connection);
        }
        self.changed.notify_all();
    }

    /// No session begins any more.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }

    /// Cuts the sessions that are left, and waits until they have ended, but no longer than `patience`.
    pub(super) fn end(&self, patience: Duration) {
        let mut state = lock(&self.state);
        state.gathering.clear();
        let open: Vec<Arc<Endpoint>> = state.open.values().filter_map(Weak::upgrade).collect();
        drop(state);
        self.changed.notify_all();
        for link in open {
            link.abandon("this side is shutting down");
        }
        let _ = self.changed.wait_timeout_while(lock(&self.state), patience, |state| state.all > 0);
    }
}

impl SessionsState {
    /// The free slot that a connection claims.
    fn slot(&mut self, key: Key, hello: SessionHello) -> Option<&mut Option<TlsConnection>> {
        let gathering = self.gathering.get_mut(&hello.session).filter(|gathering| gathering.key == key)?;
        let same = gathering.connections.len() == usize::from(hello.connections);
        gathering.connections.get_mut(usize::from(hello.what)).filter(|slot| same && slot.is_none())
    }
}

impl SessionSlot {
    /// Waits for the session's connections until then.
    pub(super) fn gather(&self, until: Instant) -> Option<Vec<TlsConnection>> {
        let is_whole = |state: &SessionsState| {
            let gathering = state.gathering.get(&self.session);
            gathering.is_none_or(|gathering| gathering.connections.iter().all(Option::is_some))
        };
        let mut state = lock(&self.all.state);
        while !is_whole(&state) {
            let left = until.checked_duration_since(Instant::now())?;
            state = self.all.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.gathering.remove(&self.session)?.connections.into_iter().collect()
    }

    /// The session is open: it is cut when the listener stops. False if that has begun already.
    pub(super) fn open(&self, link: &Link) -> bool {
        let mut state = lock(&self.all.state);
        state.open.insert(self.session, Arc::downgrade(link.endpoint()));
        !state.closed
    }
}

impl Drop for SessionSlot {
    fn drop(&mut self) {
        let mut state = lock(&self.all.state);
        state.all -= 1;
        state.gathering.remove(&self.session);
        state.open.remove(&self.session);
        if let Some(count) = state.by_key.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                state.by_key.remove(&self.key);
            }
        }
        drop(state);
        self.all.changed.notify_all();
    }
}
