//! Links over TLS, without ssh: each side presents its own key and trusts only pinned keys.
//!
//! A client ([`client`]) opens a session of one or several connections to a [`Listener`]. Each begins with a handshake
//! ([`handshake`], judged by [`verify`]) and a hello ([`hello`]); from then on the connections carry one stream each way in
//! chunks ([`chunk`], [`session`]), over which the link is framed like any other.
//!
//! `dsync receive --listen` and `dsync send --listen` accept sessions from clients whose keys are pinned; others do not get past the
//! handshake. It is TLS 1.3 with raw public keys (RFC 7250): each side presents its own Ed25519 key and accepts the other's only if it is
//! pinned (`link/src/keys/mod.rs`). There are no certificates, authorities, trusted names or resumption: every connection presents its key.
//! The client looks for the key under `HOST:PORT`, then `HOST`; the server accepts any key that is pinned (`--from` narrows that) and has
//! not expired. Pins are read at every handshake and, on both sides, once a second while a session is open: when a key was forgotten or
//! has expired, the session ends with an error that says so on both sides, and neither a sync nor a mirror tries again.
//!
//! **Loss.** Connections use BBR if the kernel offers it and lets the user choose it. One packet lost in a thousand ruins cubic, the
//! usual control: it takes the loss for congestion and carries less than a hundredth of 1 Gbit/s at 150 ms. BBR loses about a third
//! there, with one connection as with four.
//!
//! **Bounds.** The window over TLS is 64 MiB (8 MiB over ssh and pipes): three times what a link of 1 Gbit/s carries in 150 ms. As much
//! again may wait for an earlier chunk; then only the connection that carries that chunk is read. So a session holds at most 128 MiB, and
//! 512 KiB and four chunks of 1 MiB for each connection: a message is charged for the memory that it takes, so many small ones are no
//! exception.
//!
//! **Memory.** A long body is a chunk of its own, so that it goes from its message to the thread that encrypts it, and from the one that
//! decrypted it to its message, without being copied. rustls copies it once on each side, in pieces that stay in the processor's caches.
//!
//! There may be 64 sessions, 32 of one key, and 256 pending connections, which belong to no session yet, 64 of them from one address,
//! each for 10 seconds at most, however slowly it sends. When these places are taken, each new connection replaces the oldest one that
//! has sent nothing, so idle connections keep no client out. Nothing is allocated before its length is checked. A log line names the
//! address, the fingerprint, and what to do; the same line is written at most once a second.

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
pub use self::listener::{Listener, ListenerLimits, Peer, Stop};

/// The most that may be in transit to one receiver, in bytes: three times what 1 Gbit/s carries in 150 ms.
const WINDOW: u32 = 64 << 20;
