//! The side that is called: takes sessions from those whose keys are pinned, and from nobody else.
//!
//! Until a connection has shown such a key it costs little, for a short time, and there are few of it at once.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use ring::rand::{SecureRandom, SystemRandom};

use crate::ends::Shared;
use crate::flow::lock;
use crate::lanes;
use crate::session::{BUSY, Id, NO_SESSION, WELCOME, WORD, Word};
use crate::tls::{Callee, Failed, Secured};
use crate::{Error, Key, Keys, Link, Result};

/// What a listener takes at once.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Sessions.
    pub sessions: usize,
    /// Sessions of one key.
    pub sessions_of_key: usize,
    /// Connections that are no session's yet: most of them have not shown a key that is trusted.
    pub strangers: usize,
    /// Of these, from one address (of IPv6, one network of 64 bits).
    pub strangers_of_address: usize,
    /// How long a connection may be a stranger, a session wait for its lanes, and a link for its first word.
    pub patience: Duration,
    /// A peer from which nothing comes for so long is given up.
    pub timeout: Duration,
    /// If any are named, only these of the pinned keys are let in.
    pub from: Vec<String>,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            sessions: 64,
            sessions_of_key: 32,
            strangers: 256,
            strangers_of_address: 64,
            patience: Duration::from_secs(10),
            timeout: Duration::from_secs(30),
            from: Vec::new(),
        }
    }
}

/// Who is at the other end of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The name under which its key is pinned here.
    pub name: String,
    /// Its key.
    pub key: Key,
    /// Where it calls from.
    pub address: SocketAddr,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, from {})", self.name, self.key.fingerprint(), self.address.ip())
    }
}

/// What a session is given to.
type Serve = dyn Fn(Link, &Peer) + Send + Sync;

/// A port on which sessions are taken.
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
    state: Arc<State>,
}

/// Ends a [`Listener`] from another thread.
#[derive(Clone)]
pub struct Stop {
    socket: Arc<TcpListener>,
    state: Weak<State>,
}

pub(crate) struct State {
    callee: Callee,
    keys: Keys,
    limits: Limits,
    pub(crate) strangers: Mutex<Strangers>,
    sessions: Mutex<Sessions>,
    /// A lane has joined, or a session has ended.
    changed: Condvar,
    stopping: AtomicBool,
    says: Says,
}

/// Connections that are no session's yet, by the order in which they came.
#[derive(Default)]
pub(crate) struct Strangers {
    next: u64,
    pub(crate) here: BTreeMap<u64, Caller>,
}

/// One of them.
pub(crate) struct Caller {
    network: IpAddr,
    socket: Arc<TcpStream>,
    /// Something has come from it.
    pub(crate) spoke: bool,
}

impl Strangers {
    fn count(&self, of: impl Fn(IpAddr) -> bool) -> usize {
        self.here.values().filter(|caller| of(caller.network)).count()
    }

    /// The network with the most callers.
    fn crowd(&self) -> Option<IpAddr> {
        let networks: HashSet<IpAddr> = self.here.values().map(|caller| caller.network).collect();
        networks.into_iter().max_by_key(|network| self.count(|other| other == *network))
    }

    /// Sends away the one of a network that deserves its place least: the oldest that has said nothing, else the oldest.
    fn drop_one(&mut self, network: IpAddr) {
        let of = self.here.iter().filter(|(_, caller)| caller.network == network);
        if let Some((&number, _)) = of.min_by_key(|(number, caller)| (caller.spoke, **number)) {
            if let Some(caller) = self.here.remove(&number) {
                // Its thread wakes, and ends.
                let _ = caller.socket.shutdown(std::net::Shutdown::Both);
            }
        }
    }
}

#[derive(Default)]
struct Sessions {
    by_key: HashMap<Key, usize>,
    all: usize,
    /// Those that wait for their lanes.
    gathering: HashMap<Id, Gathering>,
    /// Those that are at work.
    open: HashMap<Id, Weak<Shared>>,
}

struct Gathering {
    key: Key,
    lanes: Vec<Option<Secured>>,
}

impl Listener {
    /// Takes the address, with the keys that decide who is let in: each connection is judged by what is pinned then. What
    /// happens at the door is said by `says`, a line at a time.
    ///
    /// # Errors
    /// [`Error::Listen`], [`Error::Keys`].
    pub fn bind(
        address: SocketAddr,
        keys: &Keys,
        limits: Limits,
        says: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Listener> {
        let callee = Callee::new(keys, limits.from.clone())?;
        let bound = TcpListener::bind(address).and_then(|socket| Ok((socket.local_addr()?, socket)));
        let (address, socket) =
            bound.map_err(|error| Error::Listen { address: address.to_string(), why: error.to_string() })?;
        let state = State {
            callee,
            keys: keys.clone(),
            limits,
            strangers: Mutex::default(),
            sessions: Mutex::default(),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
            says: Says::new(Box::new(says)),
        };
        Ok(Listener { socket, address, state: Arc::new(state) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What ends it.
    ///
    /// # Errors
    /// [`Error::Listen`] if the system has no descriptor left.
    pub fn stop(&self) -> Result<Stop> {
        let socket = self.socket.try_clone();
        let socket = socket
            .map_err(|error| Error::Listen { address: self.address.to_string(), why: error.to_string() })?;
        Ok(Stop { socket: Arc::new(socket), state: Arc::downgrade(&self.state) })
    }

    /// Takes sessions until it is stopped, each in a thread that runs `serve`.
    pub fn run(self, serve: impl Fn(Link, &Peer) + Send + Sync + 'static) {
        let serve: Arc<Serve> = Arc::new(serve);
        while !self.state.stopping.load(Ordering::SeqCst) {
            let (socket, address) = match self.socket.accept() {
                Ok(accepted) => accepted,
                Err(_) if self.state.stopping.load(Ordering::SeqCst) => break,
                Err(error) => {
                    // Such as no descriptor left: those who are here will leave some, and a silent one leaves now.
                    self.state.says.now_and_then(&format!("can't take a connection: {error}"));
                    let mut strangers = lock(&self.state.strangers);
                    if let Some(network) = strangers.crowd() {
                        strangers.drop_one(network);
                    }
                    drop(strangers);
                    thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            let socket = Arc::new(socket);
            let stranger = Stranger::enter(&self.state, &socket, address);
            let (state, serve) = (Arc::clone(&self.state), Arc::clone(&serve));
            let door = thread::Builder::new().name("session".into());
            if let Err(error) = door.spawn(move || state.meet(socket, address, stranger, &*serve)) {
                self.state.says.now_and_then(&format!("can't start a thread: {error}"));
            }
        }
    }
}

impl Stop {
    /// Takes no more sessions, cuts those that are open, and waits until they have ended, but no longer than `patience`.
    pub fn stop(&self, patience: Duration) {
        let Some(state) = self.state.upgrade() else { return };
        state.stopping.store(true, Ordering::SeqCst);
        // Wakes whoever waits for a connection.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let mut sessions = lock(&state.sessions);
        sessions.gathering.clear();
        for link in sessions.open.values().filter_map(Weak::upgrade) {
            link.abandon_because("this side is ending");
        }
        state.changed.notify_all();
        let _ = state.changed.wait_timeout_while(sessions, patience, |sessions| sessions.all > 0);
    }
}

#[cfg(test)]
impl Stop {
    pub(crate) fn strangers(&self) -> Option<Arc<State>> {
        self.state.upgrade()
    }
}

/// A connection that is no session's yet; counted as long as this lives.
struct Stranger {
    state: Arc<State>,
    number: u64,
}

impl Stranger {
    /// Lets one in. Where there are as many as may be, one that says nothing goes for it: whoever only holds a place can't
    /// keep others out.
    fn enter(state: &Arc<State>, socket: &Arc<TcpStream>, address: SocketAddr) -> Stranger {
        let network = match address.ip().to_canonical() {
            // Whoever has one address of it has them all.
            IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
            ip => ip,
        };
        let mut strangers = lock(&state.strangers);
        let full = if strangers.count(|other| other == network) >= state.limits.strangers_of_address {
            Some(network)
        } else if strangers.here.len() >= state.limits.strangers {
            strangers.crowd()
        } else {
            None
        };
        if let Some(network) = full {
            strangers.drop_one(network);
        }
        let number = strangers.next;
        strangers.next += 1;
        strangers.here.insert(number, Caller { network, socket: Arc::clone(socket), spoke: false });
        drop(strangers);
        if let Some(network) = full {
            state.says.now_and_then(&format!(
                "{network}: too many connections at once, the oldest silent one was dropped"
            ));
        }
        Stranger { state: Arc::clone(state), number }
    }

    /// Waits until something comes, but no longer than `until`.
    fn hear(&self, socket: &TcpStream, until: Instant) {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        // What goes wrong here goes wrong again where it is read.
        let _ = socket.set_read_timeout(Some(left));
        if matches!(socket.peek(&mut [0]), Ok(1..)) {
            if let Some(caller) = lock(&self.state.strangers).here.get_mut(&self.number) {
                caller.spoke = true;
            }
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        lock(&self.state.strangers).here.remove(&self.number);
    }
}

/// A place among the sessions; free again when this is dropped.
struct Place {
    state: Arc<State>,
    key: Key,
    session: Id,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut sessions = lock(&self.state.sessions);
        sessions.all -= 1;
        sessions.gathering.remove(&self.session);
        sessions.open.remove(&self.session);
        if let Some(count) = sessions.by_key.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                sessions.by_key.remove(&self.key);
            }
        }
        drop(sessions);
        self.state.changed.notify_all();
    }
}

impl State {
    /// Greets one who has come, and serves the session if this is the one that makes it.
    fn meet(
        self: Arc<State>,
        socket: Arc<TcpStream>,
        address: SocketAddr,
        stranger: Stranger,
        serve: &Serve,
    ) {
        let until = Instant::now() + self.limits.patience;
        lanes::tune(&socket, self.limits.timeout);
        let from = address.ip();
        stranger.hear(&socket, until);
        let mut secured = match self.callee.shake(socket, until) {
            Ok(secured) => secured,
            Err(failed) => return self.refuse(from, failed),
        };
        let Some(key) = secured.key() else { return };
        let mut word = [0; WORD];
        if let Err(failed) = secured.read_exact(&mut word, until) {
            return self.refuse(from, failed);
        }
        let peer = Peer { name: self.name_of(key), key, address };
        let word = match Word::parse(&word) {
            Ok(word) => word,
            Err(what) => {
                self.says.now_and_then(&format!("{peer}: said {what}"));
                return secured.part(until);
            }
        };
        if word.what > 0 {
            return self.join(secured, &peer, word, until);
        }
        let place = match self.begin(key) {
            Ok(place) => place,
            Err(why) => {
                self.says.now_and_then(&format!("{peer}: {why}"));
                let _ = secured.write_all(&Word { what: BUSY, ..word }.to_bytes(), until);
                return secured.part(until);
            }
        };
        // From here on the session is what is counted.
        drop(stranger);
        let answer = Word { what: WELCOME, session: place.session, ..word };
        let lanes = usize::from(word.lanes);
        // Before the answer: the other lanes may be here as soon as that is heard.
        let gathering = Gathering { key, lanes: (0..lanes).map(|_| None).collect() };
        lock(&self.sessions).gathering.insert(place.session, gathering);
        if secured.write_all(&answer.to_bytes(), until).is_err() {
            return;
        }
        if let Some(gathering) = lock(&self.sessions).gathering.get_mut(&place.session) {
            gathering.lanes[0] = Some(secured);
        }
        let Some(lanes) = self.gather(place.session) else {
            return self.says.now_and_then(&format!("{peer}: the session's lanes did not come in time"));
        };
        let link = match lanes::open(&peer.name, lanes, self.limits.patience, self.limits.timeout) {
            Ok(shared) => {
                lock(&self.sessions).open.insert(place.session, Arc::downgrade(&shared));
                Link::from_shared(shared)
            }
            Err(error) => return self.says.now_and_then(&format!("{peer}: {error}")),
        };
        serve(link, &peer);
    }

    /// Why one who has come is sent away, for whoever runs this.
    fn refuse(&self, from: IpAddr, failed: Failed) {
        let distrust = failed.is_distrust();
        let why = match failed.error("the caller") {
            _ if distrust => "left, it does not trust this host's key".into(),
            Error::Unknown { key, .. } => format!(
                "refused, its key is not pinned here: {}. To let it in, run: dsync key trust NAME {key}",
                key.fingerprint()
            ),
            Error::Tls { why, .. } | Error::Connect { why, .. } => format!("dropped: {why}"),
            error => format!("refused: {error}"),
        };
        self.says.now_and_then(&format!("{from}: {why}"));
    }

    fn name_of(&self, key: Key) -> String {
        let pins = self.keys.pins().unwrap_or_default();
        let from = &self.limits.from;
        let mut names = pins.into_iter().filter(|pin| pin.key == key).map(|pin| pin.name);
        names.find(|name| from.is_empty() || from.contains(name)).unwrap_or_else(|| "a peer".into())
    }

    /// Takes a place for a new session.
    fn begin(self: &Arc<State>, key: Key) -> Result<Place, &'static str> {
        let mut session = Id::default();
        SystemRandom::new().fill(&mut session).map_err(|_| "refused, the system has no random numbers")?;
        let mut sessions = lock(&self.sessions);
        let of_key = sessions.by_key.get(&key).copied().unwrap_or(0);
        if self.stopping.load(Ordering::SeqCst) {
            return Err("refused, the listener is ending");
        }
        if sessions.all >= self.limits.sessions || of_key >= self.limits.sessions_of_key {
            return Err("refused, too many sessions at once");
        }
        sessions.all += 1;
        *sessions.by_key.entry(key).or_default() += 1;
        drop(sessions);
        Ok(Place { state: Arc::clone(self), key, session })
    }

    /// Adds a lane to a session of the same key.
    fn join(&self, mut secured: Secured, peer: &Peer, word: Word, until: Instant) {
        let open = |sessions: &mut Sessions| {
            let gathering = sessions.gathering.get_mut(&word.session).filter(|g| g.key == peer.key)?;
            let lanes = gathering.lanes.len() == usize::from(word.lanes);
            let lane = gathering.lanes.get(usize::from(word.what))?;
            (lanes && lane.is_none()).then_some(())
        };
        // The answer goes out before the lane can carry anything else.
        let known = open(&mut lock(&self.sessions)).is_some();
        let answer = Word { what: if known { WELCOME } else { NO_SESSION }, ..word };
        let told = secured.write_all(&answer.to_bytes(), until);
        if !known || told.is_err() {
            let why = if known {
                "left before it had joined"
            } else {
                "refused, there is no such session of its key"
            };
            self.says.now_and_then(&format!("{peer}: a lane: {why}"));
            return secured.part(until);
        }
        let mut sessions = lock(&self.sessions);
        // Another may have taken the place since.
        if open(&mut sessions).is_some() {
            if let Some(gathering) = sessions.gathering.get_mut(&word.session) {
                gathering.lanes[usize::from(word.what)] = Some(secured);
            }
        }
        drop(sessions);
        self.changed.notify_all();
    }

    /// Waits for the lanes of a session.
    fn gather(&self, session: Id) -> Option<Vec<Secured>> {
        let until = Instant::now() + self.limits.patience;
        let whole = |sessions: &Sessions| {
            sessions
                .gathering
                .get(&session)
                .is_none_or(|gathering| gathering.lanes.iter().all(Option::is_some))
        };
        let mut sessions = lock(&self.sessions);
        while !whole(&sessions) {
            let left = until.checked_duration_since(Instant::now())?;
            sessions = self.changed.wait_timeout(sessions, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        sessions.gathering.remove(&session)?.lanes.into_iter().collect()
    }
}

/// What is said of those at the door. Whoever knocks without end does not fill the log.
struct Says {
    says: Box<dyn Fn(&str) + Send + Sync>,
    state: Mutex<SaysState>,
}

struct SaysState {
    /// The second that is counted, and what was said in it.
    since: Instant,
    said: HashSet<String>,
    unsaid: u64,
}

impl Says {
    /// Lines in a second, each of them once.
    const MOST: usize = 20;

    fn new(says: Box<dyn Fn(&str) + Send + Sync>) -> Says {
        let state = SaysState { since: Instant::now(), said: HashSet::new(), unsaid: 0 };
        Says { says, state: Mutex::new(state) }
    }

    fn now_and_then(&self, line: &str) {
        let mut state = lock(&self.state);
        if state.since.elapsed() >= Duration::from_secs(1) {
            state.since = Instant::now();
            state.said.clear();
        }
        if state.said.len() >= Says::MOST || state.said.contains(line) {
            state.unsaid += 1;
            return;
        }
        state.said.insert(line.to_string());
        if state.unsaid > 0 {
            let unsaid = std::mem::take(&mut state.unsaid);
            (self.says)(&format!("{unsaid} more of this kind were not shown"));
        }
        (self.says)(line);
    }
}
