//! Wakes a thread that waits for clients.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// Wakes a thread that waits for clients: to be stopped, or to show that it is not stuck.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// A bell that was not rung.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub fn new() -> io::Result<Bell> {
        Ok(Bell(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Waits until `listener` has a client or the bell is rung; true if it is the client alone.
    ///
    /// # Errors
    /// If poll(2) fails.
    pub fn wait_for_client(&self, listener: impl AsFd) -> io::Result<bool> {
        loop {
            let mut fds = [PollFd::new(&listener, PollFlags::IN), PollFd::new(&self.0, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) => return Ok(fds[1].revents().is_empty()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Rings it. Returns false if an earlier ring has not been heard yet.
    pub fn ring(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let heard = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now)) == Ok(0);
        // It cannot fail: the counter is far from its limit of 64 bits.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
        heard
    }

    /// Called by the thread that was woken: the bell is quiet again.
    pub fn hear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_ring_wakes_and_is_heard_once() {
        let (bell, listener) = (Bell::new().unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        assert!(bell.ring(), "nothing was rung before");
        assert!(!bell.ring(), "the first ring was not heard");
        assert!(!bell.wait_for_client(&listener).unwrap());
        bell.hear();
        assert!(bell.ring());
        bell.hear();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(bell.wait_for_client(&listener).unwrap());
    }
}
