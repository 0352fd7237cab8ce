//! Streams of a link to another process: standard input and output, or a remote shell's. If they are pipes or sockets, a
//! waiting read or write can be ended from another thread, even if other processes hold the other end open.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{FileType, OFlags};

use crate::Error;
use crate::framed::StreamOwner;

/// One of the two streams.
pub(crate) struct PipeStream {
    file: File,
    wake: Arc<OwnedFd>,
}

/// Ends both streams of a link: every read and write of them returns.
pub(crate) struct Wake(Arc<OwnedFd>);

impl Wake {
    pub(crate) fn new() -> io::Result<Wake> {
        Ok(Wake(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// A stream that this ends.
    pub(crate) fn stream(&self, fd: OwnedFd) -> io::Result<PipeStream> {
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
        // A terminal or a file is shared with others, and is left as it is.
        if matches!(kind, FileType::Fifo | FileType::Socket) {
            rustix::fs::fcntl_setfl(&fd, rustix::fs::fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        }
        Ok(PipeStream { file: fd.into(), wake: Arc::clone(&self.0) })
    }

    pub(crate) fn end(&self) {
        // It can fail only after 2^64 calls.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

impl PipeStream {
    /// Waits until `what` is possible, or both streams were ended.
    fn wait(&self, what: PollFlags) -> io::Result<()> {
        let mut fds = [PollFd::new(&self.file, what), PollFd::new(&*self.wake, PollFlags::IN)];
        while let Err(error) = poll(&mut fds, None) {
            if error != rustix::io::Errno::INTR {
                return Err(error.into());
            }
        }
        match fds[1].revents().is_empty() {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "it was given up on this side")),
        }
    }
}

impl AsFd for PipeStream {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Read for PipeStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.file.read(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::IN)?,
                other => return other,
            }
        }
    }
}

impl Write for PipeStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[io::IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        loop {
            match self.file.write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::OUT)?,
                other => return other,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl StreamOwner for Wake {
    fn kill(&self) {
        self.end();
    }

    /// The system delivers what was written: only the reading thread must end.
    fn settle(&self, _patience: Duration) {
        self.end();
    }

    fn why_it_ended(&self, _greeted: bool, why: String) -> Error {
        Error::Cut { peer: "the far side".into(), why }
    }
}
