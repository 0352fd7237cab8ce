//! The client: connects to a listener, and opens a session of as many connections as the distance needs.
//!
//! The number of connections follows the distance: one for every 20 ms that it took to make the first one, which is one round trip, and 8
//! at most; `--connections` sets another number. At the kernel's usual send buffer of 4 MiB a connection carries 1 Gbit/s over 20 ms, but
//! 130 Mbit/s over 150 ms. Where one is enough, more of them only cost processor time.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::connection::{TlsConnection, tune};
use super::handshake::ClientHandshake;
use super::hello::{BUSY, HELLO, Id, MAX_CONNECTIONS, NO_SESSION, SessionHello, WELCOME};
use super::session;
use crate::{Error, Keys, Link, Result, Roles};

/// The port on which [`Listener`](crate::Listener)s are expected: ten thousand above rsync's, not assigned.
pub const PORT: u16 = 10_873;

/// How to connect to a [`Listener`](crate::Listener).
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Connections, from 1 to [`MAX_CONNECTIONS`]; `None` for as many as the distance needs.
    pub connections: Option<usize>,
    /// How long each step until the link is open may take.
    pub patience: Duration,
    /// Give up on a peer that sends nothing for this long.
    pub timeout: Duration,
    /// What the peer's key must be pinned for: [`Roles::PUSH`] or [`Roles::PULL`].
    pub role: Roles,
}

impl Default for ConnectOptions {
    /// As many connections as the distance needs, a patience of 10 and a timeout of 30 seconds, to push.
    fn default() -> ConnectOptions {
        ConnectOptions {
            connections: None,
            patience: Duration::from_secs(10),
            timeout: Duration::from_secs(30),
            role: Roles::PUSH,
        }
    }
}

impl Link {
    /// Connects to the [`Listener`](crate::Listener) at `host` and `port`, presents the own key of `keys`, accepts only the one
    /// that is pinned there for `HOST:PORT` or `HOST`, and waits for its hello.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Tls`], [`Error::Unknown`], [`Error::Swapped`], [`Error::Expired`], [`Error::NotFor`], [`Error::NotTrusted`],
    /// [`Error::Busy`], [`Error::Keys`], [`Error::Version`], each naming the host and a way out.
    pub fn tls(keys: &Keys, host: &str, port: u16, options: &ConnectOptions) -> Result<Link> {
        let dialer = Dialer { client: ClientHandshake::new(keys, host, port, options.role)?, options };
        let link = dialer.open(host, port)?;
        link.ready()?;
        Ok(link)
    }
}

/// One connection fills 1 Gbit/s over a round trip of up to this: the kernel's send buffer of 4 MiB holds about 2.4 MB of data.
const REACH: Duration = Duration::from_millis(20);
/// More would fill more than 1 Gbit/s over 150 ms.
const MOST: usize = 8;

/// How many connections a round trip needs. If one is enough, others only cost processor time.
fn needed(round_trip: Duration) -> usize {
    let reaches = round_trip.as_micros().div_ceil(REACH.as_micros());
    usize::try_from(reaches).unwrap_or(MOST).clamp(1, MOST)
}

/// Opens the connections of one session.
struct Dialer<'a> {
    client: ClientHandshake,
    options: &'a ConnectOptions,
}

impl Dialer<'_> {
    fn open(&self, host: &str, port: u16) -> Result<Link> {
        let (socket, address, round_trip) = self.reach(&self.resolve(host, port)?)?;
        let wanted = self.options.connections.map_or(needed(round_trip), |n| n.clamp(1, MAX_CONNECTIONS));
        // At most 16.
        let hello = SessionHello { what: 0, connections: wanted as u8, session: Id::default() };
        let (first, session) = self.enter(socket, hello)?;
        let join =
            |number| self.enter(self.connect(address)?, SessionHello { what: number, session, ..hello });
        let join = &join;
        let others: Vec<Result<TlsConnection>> = thread::scope(|scope| {
            let start = |number| thread::Builder::new().spawn_scoped(scope, move || join(number));
            let joining: Vec<_> = (1..hello.connections).map(start).collect();
            let joined = joining.into_iter().map(|thread| match thread {
                Ok(thread) => {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).map(|(c, _)| c)
                }
                Err(error) => Err(self.unreached(format!("cannot start a thread: {error}"))),
            });
            joined.collect()
        });
        let mut connections = vec![first];
        for other in others {
            connections.push(other?);
        }
        let key = connections[0].key().ok_or_else(|| self.unreached("it showed no key"))?;
        let trust = self.client.trust(key);
        session::open(self.client.peer(), connections, self.options.patience, self.options.timeout, trust)
    }

    fn unreached(&self, why: impl Into<String>) -> Error {
        Error::Connect { peer: self.client.peer().to_string(), why: why.into() }
    }

    fn resolve(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>> {
        // As in a URL, an IPv6 address may be in brackets.
        let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let found = (plain, port).to_socket_addrs().map_err(|error| self.unreached(error.to_string()))?;
        Ok(found.collect())
    }

    /// Connects to the first address that answers, and measures how long that takes: one round trip.
    fn reach(&self, addresses: &[SocketAddr]) -> Result<(TcpStream, SocketAddr, Duration)> {
        let mut failed = self.unreached("the name has no address");
        for address in addresses {
            let began = Instant::now();
            match self.connect(*address) {
                Ok(socket) => return Ok((socket, *address, began.elapsed())),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    fn connect(&self, address: SocketAddr) -> Result<TcpStream> {
        let socket = TcpStream::connect_timeout(&address, self.options.patience)
            .map_err(|error| self.unreached(error.to_string()))?;
        tune(&socket, self.options.timeout);
        Ok(socket)
    }

    /// Performs the handshake, sends this connection's hello, and reads the answer. Returns the session's name too.
    fn enter(&self, socket: TcpStream, hello: SessionHello) -> Result<(TlsConnection, Id)> {
        let until = Instant::now() + self.options.patience;
        let mut connection = self.client.handshake(socket, until)?;
        let mut answer = [0; HELLO];
        // A side that refuses the key sends an alert instead of its answer, and may have closed before the hello.
        let said = connection.write_all(&hello.to_bytes(), until);
        connection
            .read_exact(&mut answer, until)
            .or_else(|failed| said.and(Err(failed)))
            .map_err(|failed| self.client.error(failed))?;
        let peer = self.client.peer().to_string();
        let answer = SessionHello::parse(&answer)
            .map_err(|what| Error::Tls { peer: peer.clone(), why: format!("it sent {what}") })?;
        match answer.what {
            WELCOME => Ok((connection, answer.session)),
            BUSY => Err(Error::Busy { peer, why: "it has as many as it accepts: try again later".into() }),
            NO_SESSION => Err(Error::Busy { peer, why: "it no longer knows this one: try again".into() }),
            other => Err(Error::Tls {
                peer,
                why: format!("it answered {other}: install the same version of dsync on both sides"),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_host_gets_one_connection_and_a_far_one_several() {
        let of = |ms| needed(Duration::from_millis(ms));
        assert_eq!([0, 1, 10, 20].map(of), [1; 4]);
        assert_eq!([21, 40, 75, 150, 10_000].map(of), [2, 2, 4, 8, 8]);
    }
}
