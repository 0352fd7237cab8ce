//! Chunks of the outgoing stream that wait for a free connection.

use std::collections::VecDeque;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};

use device::Buf;

use crate::flow::lock;

/// Chunks in the order of the stream, each with room for its header in front.
pub(super) struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    /// The most that may wait.
    most: usize,
}

#[derive(Default)]
struct QueueState {
    chunks: VecDeque<Buf>,
    /// The next one's number.
    number: u64,
    closed: bool,
    /// Why it was cut.
    why: Option<String>,
}

impl Queue {
    /// One that holds up to `most` chunks.
    pub(super) fn new(most: usize) -> Queue {
        Queue { state: Mutex::default(), changed: Condvar::new(), most }
    }

    /// Adds a chunk, waiting for room.
    pub(super) fn put(&self, chunk: Buf) -> io::Result<()> {
        let mut state = lock(&self.state);
        while state.chunks.len() >= self.most && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            let why = state.why.clone().unwrap_or_else(|| "the link has ended".into());
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, why));
        }
        state.chunks.push_back(chunk);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// The next chunk and its number; `None` after the last, and at once after a cut.
    pub(super) fn take(&self) -> Option<(u64, Buf)> {
        let mut state = lock(&self.state);
        loop {
            if state.why.is_some() {
                return None;
            }
            if let Some(chunk) = state.chunks.pop_front() {
                let number = state.number;
                state.number += 1;
                drop(state);
                self.changed.notify_all();
                return Some((number, chunk));
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
