//! What carries the messages of one end of a link, as its halves see it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::flow::rate::Rate;
use crate::flow::{Inbox, StreamEnd, Window};
use crate::{Error, Message, Result};

/// The usual bound on what is on its way to one receiver, in bytes; a single message may exceed it. Enough for near hosts,
/// and for ssh, which has a window of its own.
pub(crate) const WINDOW: u32 = 8 << 20;

/// Carries messages between two ends: through memory, or framed over byte streams.
pub(crate) trait Transport: Send + Sync {
    /// What the transport shares with the halves.
    fn shared(&self) -> &Arc<Shared>;

    /// Sends a message that is within bounds and whose cost was taken from the window.
    fn send(&self, message: Message) -> Result<()>;

    /// Tells the peer that nothing more will come.
    fn goodbye(&self) -> Result<()>;

    /// Gives the peer credit for messages that were taken from the inbox. Never waits for a message that is being sent.
    fn consumed(&self, cost: u64);

    /// Bounds what is sent from now on.
    fn limit(&self, rate: Option<Rate>);

    /// One half gave up: the peer gets to know. After a goodbye what was sent before is still delivered.
    fn abandon(&self);

    /// Both halves were dropped.
    fn hang_up(&self);
}

/// State that the two halves of an end share with its transport.
pub(crate) struct Shared {
    /// The other end's name in messages.
    pub(crate) peer: String,
    pub(crate) inbox: Inbox,
    pub(crate) window: Window,
    pub(crate) traffic: Arc<Traffic>,
    finished: AtomicBool,
}

impl Shared {
    pub(crate) fn new(peer: &str) -> Arc<Shared> {
        Arc::new(Shared {
            peer: peer.to_string(),
            inbox: Inbox::default(),
            window: Window::default(),
            traffic: Arc::default(),
            finished: AtomicBool::new(false),
        })
    }

    /// True once the goodbye was sent.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::SeqCst)
    }

    pub(crate) fn set_finished(&self) {
        self.finished.store(true, Ordering::SeqCst);
    }

    /// The error for a link that was cut.
    pub(crate) fn cut(&self, why: impl Into<String>) -> Error {
        Error::Cut { peer: self.peer.clone(), why: why.into() }
    }

    /// Ends both directions. The first error counts.
    pub(crate) fn fail(&self, error: Error) {
        self.window.close(error.clone());
        self.inbox.end(StreamEnd::Failed(error));
    }
}

/// Bytes that went over one end of a link, framing included.
#[derive(Debug, Default)]
pub struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Traffic {
    /// Bytes sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Bytes received so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub(crate) fn add_sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add_received(&self, bytes: u64) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
    }
}
