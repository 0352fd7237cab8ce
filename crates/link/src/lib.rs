//! Messages and credits between two sites: in one process, over any pair of pipes, through the system's ssh, or over TLS.
//!
//! A [`Link`] is split into a [`Sender`] and a [`Receiver`], which two threads may use. What is in transit to a receiver is
//! bounded by credits: [`Sender::send`] waits while the peer's window is full, and the peer's [`Receiver::recv`] returns
//! credit. A thread reads each stream and never waits for anything else, so both sides may send at the same time, as much
//! as they like, as long as each also receives.
//!
//! A conversation ends with a goodbye from each side ([`Sender::finish`]): a side that has said its own receives until it gets
//! the other's. Any other end is a cut, and an error: a half that is dropped too early cuts the link, so hold both until
//! then, even if only one is used.
//!
//! A peer that sends nothing for the timeout is given up. While there is nothing to send, the link itself sends pings, so a
//! side may be busy for as long as it likes.
//!
//! Over TLS ([`Link::tls`], [`Listener`]) each side presents its own key ([`Keys`]) and accepts only keys that are pinned
//! there. A session has one connection to a near host, and several to a far one.
//!
//! Code common to all links is in `endpoint`: it knows only the `Transport` trait. There are two transports: `memory`,
//! and `framed`, which frames messages over two byte streams that `pipe`, `ssh` and `tls` open.
//!
//! ```
//! use link::{Link, Message};
//! # fn main() -> link::Result<()> {
//! let (here, there) = Link::pair();
//! let (sender, _answers) = here.split();
//! let (_nothing, receiver) = there.split();
//! sender.send(Message { kind: 1, head: b"hello".to_vec(), ..Message::default() })?;
//! sender.finish()?;
//! assert_eq!(receiver.recv()?.map(|message| message.head), Some(b"hello".to_vec()));
//! assert!(receiver.recv()?.is_none());
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod endpoint;
mod error;
mod flow;
mod framed;
mod keys;
mod message;
#[cfg(test)]
mod tests;
mod tls;

pub use endpoint::{Link, Receiver, Sender};
pub use error::{Error, Result};
pub use flow::Received;
pub use flow::rate::{Limited, Pace, Rate};
pub use flow::transport::Traffic;
pub use framed::VERSION;
pub use framed::pipe::widen;
pub use keys::key::{InvalidKey, Key};
pub use keys::roles::{InvalidRoles, Roles};
pub use keys::text::{printable, printable_lines};
pub use keys::{Keys, Pin, host_name};
pub use message::{MAX_BODY, MAX_HEAD, Message};
#[doc(hidden)]
pub use tls::read_connection;
pub use tls::{ConnectOptions, Listener, ListenerLimits, MAX_CONNECTIONS, PORT, Peer, Stop};
