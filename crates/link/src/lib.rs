//! Messages and credits between two sites: in one process, over any pair of pipes, or through the system's ssh.
//!
//! A [`Link`] is split into a [`Sender`] and a [`Receiver`], which two threads may use. What is on its way to a receiver is
//! bounded by credits: [`Sender::send`] waits while the peer's window is used up, and the peer's [`Receiver::recv`] gives
//! credit back. A thread reads each pipe and never waits for anybody else, so both sides may send at the same time, as much
//! as they like, as long as each also receives.
//!
//! A conversation ends with a goodbye from each side ([`Sender::finish`]). Any other end is a cut, and an error: a half that
//! is dropped too early cuts the link, so hold both until the end, even if only one is used.
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

mod ends;
mod error;
mod flow;
mod message;
mod rate;
mod ssh;
mod wire;

pub use ends::{Link, Receiver, Sender, Traffic};
pub use error::{Error, Result};
pub use flow::Heard;
pub use message::{MAX_BODY, MAX_HEAD, Message};
pub use rate::{Limited, Rate};
pub use wire::{VERSION, widen};
