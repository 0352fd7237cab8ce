//! A connected socket, with the few ways of reading and writing that the server needs.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, recvmsg, send, sendmsg,
    shutdown, sockopt,
};

/// A connected stream socket, Unix or TCP.
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
    /// The client has entered transmission: its connection yields to no other.
    pub(crate) entered: AtomicBool,
}

/// The connection is over: closed, broken or stalled. There is no one left to report to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Disconnected;

/// The result of an attempt to receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketRead {
    Bytes(usize),
    /// Nothing is there now.
    Nothing,
    /// The other side sends no more.
    End,
}

/// Enough that replies of the size of [`crate::transmission::CHUNK`] leave without waiting for the client.
const SEND_BUFFER: usize = 1 << 20;

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Stream {
        // The system's usual limit makes large replies go in several steps, each waiting for the client. A smaller buffer
        // than requested is not an error.
        let _ = sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER);
        Stream { fd: stream.into(), entered: AtomicBool::new(false) }
    }
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Stream {
        // Replies are already gathered before they are sent; holding them back would only add to the client's wait.
        let _ = sockopt::set_tcp_nodelay(&stream, true);
        let _ = sockopt::set_socket_keepalive(&stream, true);
        Stream { fd: stream.into(), entered: AtomicBool::new(false) }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Stream {
    /// Receives into `first`, and what then is left into `second`; waits if `wait` is set and nothing is there.
    pub(crate) fn receive(&self, first: &mut [u8], second: &mut [u8], wait: bool) -> SocketRead {
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        loop {
            // The plain call is the cheaper one, and the common one.
            let result = if first.is_empty() {
                recv(&self.fd, &mut *second, flags).map(|(got, _)| got)
            } else if second.is_empty() {
                recv(&self.fd, &mut *first, flags).map(|(got, _)| got)
            } else {
                let mut parts = [IoSliceMut::new(first), IoSliceMut::new(second)];
                recvmsg(&self.fd, &mut parts, &mut RecvAncillaryBuffer::default(), flags).map(|got| got.bytes)
            };
            return match result {
                Ok(0) => SocketRead::End,
                Ok(got) => SocketRead::Bytes(got),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => SocketRead::Nothing,
                Err(_) => SocketRead::End,
            };
        }
    }

    /// Sends all of `parts`, waiting as long as it takes. Before it waits for the client, `idle` is called repeatedly,
    /// as long as it returns that it did something.
    pub(crate) fn send(
        &self,
        mut parts: &mut [IoSlice<'_>],
        mut idle: impl FnMut() -> bool,
    ) -> Result<(), Disconnected> {
        let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            let result = match parts {
                [] => return Ok(()),
                [one] => send(&self.fd, one, flags),
                _ => sendmsg(&self.fd, parts, &mut SendAncillaryBuffer::default(), flags),
            };
            match result {
                Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if flags.contains(SendFlags::DONTWAIT) => {
                    if !idle() {
                        flags = SendFlags::NOSIGNAL;
                    }
                }
                Err(_) => return Err(Disconnected),
            }
        }
    }

    /// Fills `buf` before the deadline.
    pub(crate) fn receive_by(&self, mut buf: &mut [u8], deadline: Instant) -> Result<(), Disconnected> {
        while !buf.is_empty() {
            match self.receive(buf, &mut [], false) {
                SocketRead::Bytes(got) => buf = &mut buf[got..],
                SocketRead::Nothing => self.wait_by(PollFlags::IN, deadline)?,
                SocketRead::End => return Err(Disconnected),
            }
        }
        // A client that trickles its bytes never lets us wait.
        if Instant::now() < deadline { Ok(()) } else { Err(Disconnected) }
    }

    /// Sends all of `bytes` before the deadline.
    pub(crate) fn send_by(&self, mut bytes: &[u8], deadline: Instant) -> Result<(), Disconnected> {
        while !bytes.is_empty() {
            match send(&self.fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait_by(PollFlags::OUT, deadline)?,
                Err(_) => return Err(Disconnected),
            }
        }
        Ok(())
    }

    fn wait_by(&self, what: PollFlags, deadline: Instant) -> Result<(), Disconnected> {
        let left = deadline.saturating_duration_since(Instant::now());
        let ready =
            !left.is_zero() && matches!(wait(&mut [PollFd::new(&self.fd, what)], Some(left)), Ok(true));
        if ready { Ok(()) } else { Err(Disconnected) }
    }

    /// Lets a thread that waits in [`Stream::receive`] go on, with the end of the input.
    pub(crate) fn end_input(&self) {
        let _ = shutdown(&self.fd, Shutdown::Read);
    }

    /// Ends the connection both ways, whatever waits on it.
    pub(crate) fn cut(&self) {
        let _ = shutdown(&self.fd, Shutdown::Both);
    }
}

/// Waits until one of the descriptors is ready: true if one is, false if the time is over.
pub(crate) fn wait(fds: &mut [PollFd<'_>], time: Option<Duration>) -> io::Result<bool> {
    // A time beyond what the system can count means no limit.
    let time = time.and_then(|time| Timespec::try_from(time).ok());
    loop {
        match poll(fds, time.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
