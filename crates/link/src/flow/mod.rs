//! Flow control: the receiver waits for messages, the sender for credit.

pub(crate) mod log;
pub(crate) mod memory;
pub(crate) mod rate;
pub(crate) mod transport;

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{Error, Message, Result};

/// What was received within a given time.
#[derive(Debug)]
pub enum Received {
    /// A message.
    Message(Message),
    /// The peer's goodbye.
    Goodbye,
    /// Nothing.
    Nothing,
}

/// Locks in spite of a panic elsewhere: every change of a guarded state is a single step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How a direction ended.
#[derive(Clone)]
pub(crate) enum StreamEnd {
    Goodbye,
    Failed(Error),
}

/// Messages that have arrived, bounded by credits.
#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
}

#[derive(Default)]
struct InboxState {
    queue: VecDeque<Message>,
    end: Option<StreamEnd>,
}

impl Inbox {
    pub(crate) fn push(&self, message: Message) {
        lock(&self.state).queue.push_back(message);
        self.changed.notify_one();
    }

    /// The first end counts: a stream that closes after the goodbye changes nothing.
    pub(crate) fn end(&self, end: StreamEnd) {
        lock(&self.state).end.get_or_insert(end);
        self.changed.notify_all();
    }

    pub(crate) fn ended(&self) -> Option<StreamEnd> {
        lock(&self.state).end.clone()
    }

    /// Messages that arrived before the end are still returned.
    pub(crate) fn pop(&self) -> Result<Option<Message>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(message) = state.queue.pop_front() {
                return Ok(Some(message));
            }
            match &state.end {
                Some(StreamEnd::Goodbye) => return Ok(None),
                Some(StreamEnd::Failed(error)) => return Err(error.clone()),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits at most `patience` for the next message; those that arrived before the end are still returned.
    pub(crate) fn pop_within(&self, patience: Duration) -> Result<Received> {
        let until = Instant::now() + patience;
        let mut state = lock(&self.state);
        loop {
            if let Some(message) = state.queue.pop_front() {
                return Ok(Received::Message(message));
            }
            match &state.end {
                Some(StreamEnd::Goodbye) => return Ok(Received::Goodbye),
                Some(StreamEnd::Failed(error)) => return Err(error.clone()),
                None => {}
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                return Ok(Received::Nothing);
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The error that ended it, waiting a little for the reader to notice.
    pub(crate) fn failure(&self, patience: Duration) -> Option<Error> {
        let until = Instant::now() + patience;
        let mut state = lock(&self.state);
        loop {
            match &state.end {
                Some(StreamEnd::Failed(error)) => return Some(error.clone()),
                // The first end counts.
                Some(StreamEnd::Goodbye) => return None,
                None => {}
            }
            let left = until.checked_duration_since(Instant::now())?;
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// What may still be sent to the peer.
#[derive(Default)]
pub(crate) struct Window {
    state: Mutex<WindowState>,
    changed: Condvar,
}

#[derive(Default)]
struct WindowState {
    /// `None` until the peer's hello has come.
    credit: Option<i64>,
    closed: Option<Error>,
}

impl Window {
    /// Adds credit; the first time, opens the window.
    pub(crate) fn release(&self, bytes: u64) {
        let mut state = lock(&self.state);
        let credit = i64::try_from(bytes).unwrap_or(i64::MAX);
        state.credit = Some(state.credit.unwrap_or(0).saturating_add(credit));
        self.changed.notify_all();
    }

    /// Takes credit for one message, waiting until there is any. It may overdraw: a message longer than what is left would
    /// otherwise wait for credit that the peer, which returns it in portions, withholds.
    pub(crate) fn acquire(&self, bytes: u64) -> Result<()> {
        let mut state = self.opened(|credit| credit > 0)?;
        if let Some(credit) = &mut state.credit {
            *credit = credit.saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        Ok(())
    }

    /// Waits for the peer's hello. Later errors are ignored.
    pub(crate) fn wait_open(&self) -> Result<()> {
        let opened = self.opened(|_| true).map(drop);
        if lock(&self.state).credit.is_some() { Ok(()) } else { opened }
    }

    /// True if the peer's hello came, or the link ended, within this time.
    pub(crate) fn is_open_within(&self, patience: Duration) -> bool {
        let state = lock(&self.state);
        let waits = |state: &mut WindowState| state.closed.is_none() && state.credit.is_none();
        let (_state, waited) =
            self.changed.wait_timeout_while(state, patience, waits).unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }

    /// What is left of it; `None` until the peer's hello has come.
    #[cfg(test)]
    pub(crate) fn credit(&self) -> Option<i64> {
        lock(&self.state).credit
    }

    /// Waits for the peer's hello, and fails if the link has ended since.
    pub(crate) fn wait_usable(&self) -> Result<()> {
        self.opened(|_| true).map(drop)
    }

    pub(crate) fn close(&self, error: Error) {
        lock(&self.state).closed.get_or_insert(error);
        self.changed.notify_all();
    }

    fn opened(&self, enough: impl Fn(i64) -> bool) -> Result<MutexGuard<'_, WindowState>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(error) = &state.closed {
                return Err(error.clone());
            }
            if state.credit.is_some_and(&enough) {
                return Ok(state);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
