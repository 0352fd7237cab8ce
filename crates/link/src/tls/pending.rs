//! Connections that belong to no session yet. Most of them have not presented a trusted key, so their number is limited.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::flow::lock;

/// All of them. At the limit, each new one replaces one that has sent nothing: connections that only hold
/// a place keep no client out.
pub(super) struct Pending {
    most: usize,
    most_of_network: usize,
    state: Mutex<PendingState>,
}

#[derive(Default)]
struct PendingState {
    next: u64,
    /// In order of arrival.
    here: BTreeMap<u64, Connection>,
}

struct Connection {
    network: IpAddr,
    socket: Arc<TcpStream>,
    /// It has sent something.
    spoke: bool,
}

/// One of them; counted until this is dropped.
pub(super) struct PendingConnection {
    all: Arc<Pending>,
    number: u64,
}

impl Pending {
    pub(super) fn new(most: usize, most_of_network: usize) -> Arc<Pending> {
        Arc::new(Pending { most, most_of_network, state: Mutex::default() })
    }

    /// Adds one. Also returns the network of which one was dropped for it.
    pub(super) fn enter(
        self: &Arc<Pending>,
        socket: &Arc<TcpStream>,
        address: IpAddr,
    ) -> (PendingConnection, Option<IpAddr>) {
        let network = network_of(address);
        let mut state = lock(&self.state);
        let full = if state.count(network) >= self.most_of_network {
            Some(network)
        } else if state.here.len() >= self.most {
            state.largest_network()
        } else {
            None
        };
        if let Some(network) = full {
            state.drop_one(network);
        }
        let number = state.next;
        state.next += 1;
        state.here.insert(number, Connection { network, socket: Arc::clone(socket), spoke: false });
        (PendingConnection { all: Arc::clone(self), number }, full)
    }

    /// Drops one of the network that has the most, if the system has no room for more.
    pub(super) fn drop_one(&self) {
        let mut state = lock(&self.state);
        if let Some(network) = state.largest_network() {
            state.drop_one(network);
        }
    }

    /// True if something has come from one of them.
    #[cfg(test)]
    pub(super) fn any_spoke(&self) -> bool {
        lock(&self.state).here.values().any(|connection| connection.spoke)
    }
}

/// Addresses that are counted together: a client with one address of an IPv6 network of 64 bits has them all.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        ip => ip,
    }
}

impl PendingState {
    fn count(&self, network: IpAddr) -> usize {
        self.here.values().filter(|connection| connection.network == network).count()
    }

    fn largest_network(&self) -> Option<IpAddr> {
        let networks: HashSet<IpAddr> = self.here.values().map(|connection| connection.network).collect();
        networks.into_iter().max_by_key(|network| self.count(*network))
    }

    /// Drops one of a network: the oldest that has sent nothing, else the oldest.
    fn drop_one(&mut self, network: IpAddr) {
        let of = self.here.iter().filter(|(_, connection)| connection.network == network);
        if let Some((&number, _)) = of.min_by_key(|(number, connection)| (connection.spoke, **number)) {
            if let Some(connection) = self.here.remove(&number) {
                // Its thread wakes, and ends.
                let _ = connection.socket.shutdown(Shutdown::Both);
            }
        }
    }
}

impl PendingConnection {
    /// Waits until something comes, but no longer than `until`.
    pub(super) fn hear(&self, socket: &TcpStream, until: Instant) {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        // An error here shows again at the next read.
        let _ = socket.set_read_timeout(Some(left));
        if matches!(socket.peek(&mut [0]), Ok(1..)) {
            if let Some(connection) = lock(&self.all.state).here.get_mut(&self.number) {
                connection.spoke = true;
            }
        }
    }
}

impl Drop for PendingConnection {
    fn drop(&mut self) {
        lock(&self.all.state).here.remove(&self.number);
    }
}
