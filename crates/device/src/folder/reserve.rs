//! A spare descriptor for servers: with none left, a client that connects would wait without an answer.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// One descriptor, closed so that a client that cannot be served can be accepted and disconnected.
#[derive(Debug)]
pub struct Reserve(Option<OwnedFd>);

impl Default for Reserve {
    fn default() -> Reserve {
        Reserve::new()
    }
}

impl Reserve {
    /// Takes a descriptor, if one is left.
    pub fn new() -> Reserve {
        Reserve(eventfd(0, EventfdFlags::CLOEXEC).ok())
    }

    /// True if `error` says that this process, or the system, has no descriptor left.
    pub fn is_exhausted(error: &io::Error) -> bool {
        matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
    }

    /// Takes the descriptor again if another thread was given it. To be called before a client gets one: the last one is for this.
    pub fn hold(&mut self) {
        if self.0.is_none() {
            *self = Reserve::new();
        }
    }

    /// Accepts the client that has waited longest, if there is one, and closes its connection.
    pub fn turn_away<T>(&mut self, listener: impl AsFd, accept: impl FnOnce() -> io::Result<T>) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let waits = poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&now));
        if waits == Ok(1) && self.0.take().is_some() {
            drop(accept());
        }
        self.hold();
    }
}
