//! Outgoing replies, collected so that many are sent in one call.

use std::io::IoSlice;

use device::Buf;

use crate::pool::Pool;
use crate::protocol::*;
use crate::socket::{Disconnected, Stream};

/// Replies in order: small parts are in one run of bytes, data stays in the buffers that the disk filled.
pub(crate) struct Replies {
    small: Vec<u8>,
    /// Buffers, each with the bytes of `small` that go before it.
    data: Vec<(usize, Buf)>,
    bytes: usize,
    replies: usize,
}

/// Room that `small` keeps between flushes.
const SMALL_KEEP: usize = 64 << 10;
/// Slices that go to the system in one call.
const SLICES: usize = 64;

impl Replies {
    pub(crate) fn new() -> Replies {
        Replies { small: Vec::new(), data: Vec::new(), bytes: 0, replies: 0 }
    }

    /// Bytes that wait.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Replies and chunks that wait.
    pub(crate) fn replies(&self) -> usize {
        self.replies
    }

    /// The head of a simple reply.
    pub(crate) fn simple(&mut self, cookie: u64, error: u32) {
        let mut head = [0; 16];
        head[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        head[4..8].copy_from_slice(&error.to_be_bytes());
        head[8..].copy_from_slice(&cookie.to_be_bytes());
        self.add(&head);
        self.replies += 1;
    }

    /// The head of a structured reply's chunk whose payload is `len` bytes.
    pub(crate) fn chunk(&mut self, cookie: u64, kind: u16, done: bool, len: u32) {
        let mut head = [0; 20];
        head[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        head[4..6].copy_from_slice(&(if done { CHUNK_FLAG_DONE } else { 0 }).to_be_bytes());
        head[6..8].copy_from_slice(&kind.to_be_bytes());
        head[8..16].copy_from_slice(&cookie.to_be_bytes());
        head[16..].copy_from_slice(&len.to_be_bytes());
        self.add(&head);
        self.replies += 1;
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.small.extend_from_slice(bytes);
        self.bytes += bytes.len();
    }

    pub(crate) fn add_data(&mut self, buf: Buf) {
        self.bytes += buf.len();
        self.data.push((self.small.len(), buf));
    }

    /// Sends everything and returns the buffers. While the client takes nothing, `idle` is called as long as it returns
    /// that it did something.
    pub(crate) fn flush(
        &mut self,
        stream: &Stream,
        pool: &mut Pool,
        mut idle: impl FnMut() -> bool,
    ) -> Result<(), Disconnected> {
        if self.bytes == 0 {
            return Ok(());
        }
        let mut from = 0;
        let mut groups = self.data.chunks(SLICES / 2 - 1).peekable();
        while let Some(group) = groups.next() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let mut used = 0;
            for (before, buf) in group {
                slices[used] = IoSlice::new(&self.small[from..*before]);
                slices[used + 1] = IoSlice::new(buf);
                used += 2;
                from = *before;
            }
            if groups.peek().is_none() {
                slices[used] = IoSlice::new(&self.small[from..]);
                used += 1;
                from = self.small.len();
            }
            stream.send(&mut slices[..used], &mut idle)?;
        }
        if from < self.small.len() {
            stream.send(&mut [IoSlice::new(&self.small[from..])], &mut idle)?;
        }
        self.data.drain(..).for_each(|(_, buf)| pool.give(buf));
        self.small.clear();
        self.small.shrink_to(SMALL_KEEP);
        self.bytes = 0;
        self.replies = 0;
        Ok(())
    }
}
