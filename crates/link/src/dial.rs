//! The side that calls: opens a session and its lanes.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::ends::Shared;
use crate::lanes;
use crate::session::{BUSY, Id, MAX_LANES, NO_SESSION, WELCOME, WORD, Word};
use crate::tls::{Caller, Secured};
use crate::{Error, Keys, Result};

/// The port on which [`Listener`](crate::Listener)s are expected: ten thousand above rsync's, assigned to nobody.
pub const PORT: u16 = 10_873;

/// How a far side is called.
#[derive(Debug, Clone)]
pub struct Call {
    /// Connections, from 1 to [`MAX_LANES`].
    pub lanes: usize,
    /// How long each step until the link stands may take.
    pub patience: Duration,
    /// A peer from which nothing comes for so long is given up.
    pub timeout: Duration,
}

impl Default for Call {
    /// As many lanes as cores, from two to four; 10 and 30 seconds.
    fn default() -> Call {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Call { lanes: cores.clamp(2, 4), patience: Duration::from_secs(10), timeout: Duration::from_secs(30) }
    }
}

/// Calls `host` and opens a link.
pub(crate) fn dial(keys: &Keys, host: &str, port: u16, call: &Call) -> Result<Arc<Shared>> {
    let caller = Caller::new(keys, host, port)?;
    let address = resolve(&caller, host, port)?;
    let lanes = call.lanes.clamp(1, MAX_LANES);
    let (first, address, session) = address.first(&caller, call, lanes)?;
    let mut secured = vec![first];
    let others: Vec<Result<Secured>> = thread::scope(|scope| {
        let caller = &caller;
        let join = |lane| {
            let join = move || lane_of(caller, address, call, lane, lanes, session);
            thread::Builder::new().spawn_scoped(scope, join).map_err(|error| Error::Cut {
                peer: caller.peer().to_string(),
                why: format!("can't start a thread: {error}"),
            })
        };
        let joining: Vec<_> = (1..lanes).map(join).collect();
        let joined = joining
            .into_iter()
            .map(|lane| lane?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect()
    });
    for lane in others {
        secured.push(lane?);
    }
    lanes::open(caller.peer(), secured, call.patience, call.timeout)
}

/// What a name stands for.
struct Addresses(Vec<SocketAddr>);

fn resolve(caller: &Caller, host: &str, port: u16) -> Result<Addresses> {
    // As in a URL, an IPv6 address may stand in brackets.
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let failed = |why: String| Error::Connect { peer: caller.peer().to_string(), why };
    let found: Vec<SocketAddr> =
        (plain, port).to_socket_addrs().map_err(|error| failed(error.to_string()))?.collect();
    if found.is_empty() { Err(failed("the name has no address".into())) } else { Ok(Addresses(found)) }
}

impl Addresses {
    /// The first lane, to the first address that answers, and the session that it makes.
    fn first(self, caller: &Caller, call: &Call, lanes: usize) -> Result<(Secured, SocketAddr, Id)> {
        let mut unreached = None;
        for address in self.0 {
            match connect(caller, address, call) {
                Ok(socket) => {
                    let (secured, session) = enter(caller, socket, call, 0, lanes, Id::default())?;
                    return Ok((secured, address, session));
                }
                Err(error) => unreached = Some(error),
            }
        }
        let peer = caller.peer().to_string();
        Err(unreached.unwrap_or(Error::Connect { peer, why: "the name has no address".into() }))
    }
}

fn connect(caller: &Caller, address: SocketAddr, call: &Call) -> Result<TcpStream> {
    let failed =
        |error: std::io::Error| Error::Connect { peer: caller.peer().to_string(), why: error.to_string() };
    let socket = TcpStream::connect_timeout(&address, call.patience).map_err(failed)?;
    lanes::tune(&socket, call.timeout);
    Ok(socket)
}

fn lane_of(
    caller: &Caller,
    address: SocketAddr,
    call: &Call,
    lane: usize,
    lanes: usize,
    session: Id,
) -> Result<Secured> {
    let socket = connect(caller, address, call)?;
    enter(caller, socket, call, lane, lanes, session).map(|(secured, _)| secured)
}

/// Greets, says which lane this is, and hears whether it is welcome.
fn enter(
    caller: &Caller,
    socket: TcpStream,
    call: &Call,
    lane: usize,
    lanes: usize,
    session: Id,
) -> Result<(Secured, Id)> {
    let until = Instant::now() + call.patience;
    let mut secured = caller.shake(socket, until)?;
    let number = |count: usize| u8::try_from(count).unwrap_or(u8::MAX);
    let word = Word { what: number(lane), lanes: number(lanes), session };
    let mut answer = [0; WORD];
    // A side that refuses the key says so in place of its answer, and may have closed before it was asked.
    let said = secured.write_all(&word.to_bytes(), until);
    secured
        .read_exact(&mut answer, until)
        .or_else(|failed| said.and(Err(failed)))
        .map_err(|failed| caller.error(failed))?;
    let peer = caller.peer().to_string();
    let answer = Word::parse(&answer)
        .map_err(|what| Error::Tls { peer: peer.clone(), why: format!("it said {what}") })?;
    match answer.what {
        WELCOME => Ok((secured, answer.session)),
        BUSY => Err(Error::Busy { peer, why: "it has as many as it takes: try again later".into() }),
        NO_SESSION => {
            Err(Error::Busy { peer, why: "it knows nothing of this one any more: try again".into() })
        }
        other => Err(Error::Tls {
            peer,
            why: format!("it answered {other}: install the same dsync on both sides"),
        }),
    }
}
