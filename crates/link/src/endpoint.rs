//! One end of a link, and its two halves, over any [`Transport`].

use std::sync::Arc;
use std::time::Duration;

use device::Buf;
use serde::Serialize;

use crate::flow::rate::{Pace, Rate};
use crate::flow::transport::{Shared, Traffic, Transport};
use crate::flow::{Received, StreamEnd};
use crate::{Error, Message, Result};

/// One end of a link.
pub struct Link {
    sender: Sender,
    receiver: Receiver,
}

/// The half that sends. Dropped before [`Sender::finish`], it cuts the link.
pub struct Sender {
    end: Arc<Endpoint>,
}

/// The half that receives. Dropped before the peer's goodbye, it cuts the link.
pub struct Receiver {
    end: Arc<Endpoint>,
}

/// Shared by both halves. Hangs up when both are dropped.
pub(crate) struct Endpoint {
    transport: Arc<dyn Transport>,
}

impl Endpoint {
    pub(crate) fn shared(&self) -> &Shared {
        self.transport.shared()
    }

    /// Ends the link at this end without a goodbye, whatever the halves do.
    pub(crate) fn abandon(&self, why: &str) {
        let shared = self.shared();
        // Before the transport ends, which would report another reason.
        shared.fail(shared.cut(why));
        self.transport.abandon();
    }

    fn give_up(&self) {
        self.abandon("it was given up on this side");
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.transport.hang_up();
        // A server that has nothing to do needs little of it.
        Buf::free_kept();
    }
}

impl Link {
    /// An end over a transport.
    pub(crate) fn over(transport: Arc<dyn Transport>) -> Link {
        let end = Arc::new(Endpoint { transport });
        Link { sender: Sender { end: Arc::clone(&end) }, receiver: Receiver { end } }
    }

    /// Waits for the peer's hello.
    ///
    /// # Errors
    /// If something else came instead.
    pub fn ready(&self) -> Result<()> {
        self.endpoint().shared().window.wait_open()
    }

    /// Both halves, for two threads.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// The counters, readable while the link works.
    pub fn traffic(&self) -> Arc<Traffic> {
        self.sender.traffic()
    }

    /// What both halves hold.
    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.sender.end
    }
}

impl Sender {
    /// Sends a message, waiting while the peer's window is full.
    ///
    /// # Errors
    /// [`Error::TooLong`] leaves the link as it was; any other error ends it. What the peer sent before the end can still
    /// be received, and often explains more than this error.
    pub fn send(&self, message: Message) -> Result<()> {
        message.check()?;
        self.end.shared().window.acquire(message.cost())?;
        self.end.transport.send(message)
    }

    /// Sends a message whose head is `value` as JSON, without a body.
    ///
    /// # Errors
    /// [`Error::Json`] if the value is not representable in JSON; otherwise as [`Sender::send`].
    pub fn send_json<T: Serialize>(&self, kind: u8, value: &T) -> Result<()> {
        let head = serde_json::to_vec(value).map_err(|error| Error::Json { kind, why: error.to_string() })?;
        self.send(Message { kind, head, ..Message::default() })
    }

    /// Says goodbye: the peer's [`Receiver::recv`] gives `None` after what was sent before. Receive until the peer has said
    /// goodbye too: otherwise the peer cannot say its own, and must treat the link as cut.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn finish(self) -> Result<()> {
        let shared = self.end.shared();
        // A peer that has said goodbye may have ended its stream already.
        if !matches!(shared.inbox.ended(), Some(StreamEnd::Goodbye)) {
            shared.window.wait_usable()?;
        }
        self.end.transport.goodbye()?;
        shared.set_finished();
        Ok(())
    }

    /// Limits sending to this many bytes per second, smoothly; 0 removes the limit.
    pub fn limit(&self, bytes_per_second: u64) {
        self.end.transport.limit((bytes_per_second > 0).then(|| Rate::new(bytes_per_second)));
    }

    /// Limits sending by a pace that others may change meanwhile.
    pub fn pace(&self, pace: &Pace) {
        self.end.transport.limit(Some(Rate::at(pace.clone())));
    }

    /// The counters, readable while the link works.
    pub fn traffic(&self) -> Arc<Traffic> {
        Arc::clone(&self.end.shared().traffic)
    }

    /// Cuts the link. Every call that waits in one of its halves, on this side or the other, returns an error.
    pub fn cut(&self) {
        self.end.give_up();
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.end.shared().is_finished() {
            self.end.give_up();
        }
    }
}

impl Receiver {
    /// The next message, waiting for it. `None` after the peer's goodbye.
    ///
    /// # Errors
    /// [`Error::Cut`] if the link ended without a goodbye; [`Error::Bad`], [`Error::NotDsync`] and [`Error::Version`] if
    /// the peer is not a valid one. All that arrived before is returned first.
    pub fn recv(&self) -> Result<Option<Message>> {
        let message = self.end.shared().inbox.pop()?;
        message.iter().for_each(|message| self.end.transport.consumed(message.cost()));
        Ok(message)
    }

    /// Waits at most `patience` for the next message or the peer's goodbye.
    ///
    /// # Errors
    /// As [`Receiver::recv`].
    pub fn recv_within(&self, patience: Duration) -> Result<Received> {
        let heard = self.end.shared().inbox.pop_within(patience)?;
        if let Received::Message(message) = &heard {
            self.end.transport.consumed(message.cost());
        }
        Ok(heard)
    }

    /// Fails once the link is cut: for work in which nothing is sent for long.
    pub fn watch(&self) -> impl Fn() -> Result<()> + Send + Sync + 'static {
        let shared = Arc::clone(self.end.transport.shared());
        move || match shared.inbox.ended() {
            Some(StreamEnd::Failed(error)) => Err(error),
            _ => Ok(()),
        }
    }

    #[cfg(test)]
    pub(crate) fn shared(&self) -> &Shared {
        self.end.shared()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if !matches!(self.end.shared().inbox.ended(), Some(StreamEnd::Goodbye)) {
            self.end.give_up();
        }
    }
}
