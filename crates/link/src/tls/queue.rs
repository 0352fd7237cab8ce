//! Chunks of the outgoing stream that wait for a free connection.

use std::collections::VecDeque;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};

use device::Buf;

use super::chunk::{CHUNK_HEADER, header};
use crate::flow::lock;

/// What is sent together: a chunk of what was collected, and one of a body in its own memory. Either may be empty, which is no chunk.
#[derive(Debug, Default)]
pub(super) struct Pair {
    pub(super) collected: Buf,
    pub(super) body: Buf,
}

impl Pair {
    /// What is sent, the headers of the chunks included, from this number on.
    pub(super) fn parts<'a>(
        &'a self,
        number: u64,
        headers: &'a mut [[u8; CHUNK_HEADER]; 2],
    ) -> [&'a [u8]; 4] {
        let numbers = [number, number + u64::from(!self.collected.is_empty())];
        *headers = [header(numbers[0], self.collected.len()), header(numbers[1], self.body.len())];
        let [first, second] = headers;
        let of = |header: &'a [u8], chunk: &'a Buf| [if chunk.is_empty() { &[] } else { header }, &chunk[..]];
        let ([a, b], [c, d]) = (of(first, &self.collected), of(second, &self.body));
        [a, b, c, d]
    }

    fn chunks(&self) -> u64 {
        u64::from(!self.collected.is_empty()) + u64::from(!self.body.is_empty())
    }
}

/// Chunks in the order of the stream.
pub(super) struct ChunkQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
    /// The most that may wait.
    most: usize,
}

#[derive(Default)]
struct QueueState {
    chunks: VecDeque<Pair>,
    /// The next one's number.
    number: u64,
    closed: bool,
    /// Why it was cut.
    why: Option<String>,
}

impl ChunkQueue {
    /// One that holds up to `most` pairs of chunks.
    pub(super) fn new(most: usize) -> ChunkQueue {
        ChunkQueue { state: Mutex::default(), changed: Condvar::new(), most }
    }

    /// Adds chunks, waiting for room.
    pub(super) fn put(&self, chunks: Pair) -> io::Result<()> {
        let mut state = lock(&self.state);
        while state.chunks.len() >= self.most && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            let why = state.why.clone().unwrap_or_else(|| "the link has ended".into());
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, why));
        }
        state.chunks.push_back(chunks);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// The next chunks and the number of the first; `None` after the last, and at once after a cut.
    pub(super) fn take(&self) -> Option<(u64, Pair)> {
        let mut state = lock(&self.state);
        loop {
            if state.why.is_some() {
                return None;
            }
            if let Some(chunks) = state.chunks.pop_front() {
                let number = state.number;
                state.number += chunks.chunks();
                drop(state);
                self.changed.notify_all();
                return Some((number, chunks));
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Refuses further chunks; after a cut, nothing is taken either.
    pub(super) fn close(&self, cut: Option<&str>) {
        let mut state = lock(&self.state);
        if let Some(why) = cut {
            state.why.get_or_insert_with(|| why.to_string());
        }
        state.closed = true;
        drop(state);
        self.changed.notify_all();
    }
}
