//! Byte streams in memory, between two machines, that are cut at random.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use link::Link;

use crate::machine::host::{Cut, Process, lock};

/// Bytes that a stream holds.
const ROOM: usize = 256 << 10;

/// One direction.
struct Stream {
    state: Mutex<Flow>,
    changed: Condvar,
}

struct Flow {
    bytes: VecDeque<u8>,
    /// No more will be written, or read.
    ended: bool,
    /// Bytes until the stream is cut.
    left: u64,
}

impl Stream {
    fn new(left: u64) -> Arc<Stream> {
        let state = Flow { bytes: VecDeque::new(), ended: false, left };
        Arc::new(Stream { state: Mutex::new(state), changed: Condvar::new() })
    }

    fn end(&self) {
        lock(&self.state).ended = true;
        self.changed.notify_all();
    }
}

/// Both directions of a link.
struct Line(Arc<Stream>, Arc<Stream>);

impl Cut for Line {
    fn cut(&self) {
        self.0.end();
        self.1.end();
    }
}

struct Reader(Arc<Stream>);
struct Writer(Arc<Stream>, Arc<Line>);

impl Read for Reader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut flow = lock(&self.0.state);
        loop {
            if !flow.bytes.is_empty() {
                let len = buf.len().min(flow.bytes.len());
                for (to, from) in buf.iter_mut().zip(flow.bytes.drain(..len)) {
                    *to = from;
                }
                self.0.changed.notify_all();
                return Ok(len);
            }
            if flow.ended {
                return Ok(0);
            }
            flow = self.0.changed.wait(flow).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Write for Writer {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let mut flow = lock(&self.0.state);
        while flow.bytes.len() >= ROOM && !flow.ended {
            flow = self.0.changed.wait(flow).unwrap_or_else(PoisonError::into_inner);
        }
        if flow.ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let len = buf.len().min(ROOM).min(flow.left as usize);
        flow.bytes.extend(&buf[..len]);
        flow.left -= len as u64;
        let over = flow.left == 0;
        drop(flow);
        self.0.changed.notify_all();
        if over {
            self.1.cut();
        }
        if len == 0 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(len) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A link between two processes, which is cut after so many bytes one way or the other, or with either process.
pub fn far_link(near: &Process, far: &Process, out: u64, back: u64) -> (Link, Link) {
    let (there, here) = (Stream::new(out), Stream::new(back));
    let line = Arc::new(Line(there.clone(), here.clone()));
    near.on_end(line.clone());
    far.on_end(line.clone());
    let ours = Link::pipe(Reader(here.clone()), Writer(there.clone(), line.clone()));
    let theirs = Link::pipe(Reader(there), Writer(here, line));
    (ours, theirs)
}
