//! Links over TLS, without ssh: each side presents its own key and trusts only pinned keys.
//!
//! A client ([`client`]) opens a session of one or several connections to a [`Listener`]. Each begins with a handshake
//! ([`handshake`], judged by [`verify`]) and a hello ([`hello`]); from then on the connections carry one stream each way in
//! chunks ([`chunk`], [`session`]), over which the link is framed like any other.

mod chunk;
mod client;
mod connection;
mod handshake;
mod hello;
mod listener;
mod pending;
mod queue;
mod reorder;
mod session;
mod sessions;
mod share;
#[cfg(test)]
pub(crate) mod tests;
mod verify;

#[doc(hidden)]
pub use self::chunk::read_connection;
pub use self::client::{ConnectOptions, PORT};
pub use self::hello::MAX_CONNECTIONS;
pub use self::listener::{Limits, Listener, Peer, Stop};

/// The most that may be in transit to one receiver, in bytes: three times what 1 Gbit/s carries in 150 ms.
const WINDOW: u32 = 64 << 20;
