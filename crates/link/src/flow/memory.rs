//! A link within one process.

use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::flow::rate::Rate;
use crate::flow::transport::{Shared, Transport, WINDOW};
use crate::flow::{StreamEnd, lock};
use crate::{Link, Message, Result};

/// Moves messages into the other end's inbox.
struct MemoryTransport {
    shared: Arc<Shared>,
    other: OnceLock<Weak<Shared>>,
    rate: Mutex<Option<Rate>>,
}

impl Link {
    /// Two ends in one process. Messages are moved, never copied.
    pub fn pair() -> (Link, Link) {
        let [a, b] = [(); 2].map(|()| {
            let shared = Shared::new("the other side");
            shared.window.release(WINDOW.into());
            Arc::new(MemoryTransport { shared, other: OnceLock::new(), rate: Mutex::default() })
        });
        // Set once, here.
        let _ = a.other.set(Arc::downgrade(&b.shared));
        let _ = b.other.set(Arc::downgrade(&a.shared));
        (Link::over(a), Link::over(b))
    }
}

impl MemoryTransport {
    /// The other end, if one of its halves still exists.
    fn other(&self) -> Option<Arc<Shared>> {
        self.other.get().and_then(Weak::upgrade)
    }
}

impl Transport for MemoryTransport {
    fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn send(&self, message: Message) -> Result<()> {
        if let Some(rate) = lock(&self.rate).as_mut() {
            rate.wait();
            rate.charge(message.bytes());
        }
        let other = self.other().ok_or_else(|| self.shared.cut(""))?;
        other.traffic.add_received(message.bytes());
        self.shared.traffic.add_sent(message.bytes());
        other.inbox.push(message);
        Ok(())
    }

    fn goodbye(&self) -> Result<()> {
        self.other().ok_or_else(|| self.shared.cut(""))?.inbox.end(StreamEnd::Goodbye);
        Ok(())
    }

    fn consumed(&self, cost: u64) {
        if let Some(other) = self.other() {
            other.window.release(cost);
        }
    }

    fn limit(&self, rate: Option<Rate>) {
        *lock(&self.rate) = rate;
    }

    fn abandon(&self) {
        if let Some(other) = self.other() {
            other.fail(other.cut("the other side gave up"));
        }
    }

    /// If a half was dropped too early, the other end has been told already.
    fn hang_up(&self) {}
}
