//! Chunks of the incoming stream, put back in order.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};

use device::Buf;

use super::chunk::{CHUNK, Chunk};
use crate::flow::lock;

/// What a waiting chunk costs besides its bytes.
const KEPT: usize = 64;

/// What it costs in all: a short one takes whole pages too.
fn cost(bytes: &Buf) -> usize {
    bytes.capacity() + KEPT
}

/// Received chunks, returned in the order of the stream.
pub(super) struct Reorder {
    state: Mutex<ReorderState>,
    changed: Condvar,
    ahead: usize,
}

struct ReorderState {
    next: u64,
    /// Those that came before their turn, and the one whose turn it is.
    held: BTreeMap<u64, Buf>,
    /// What they cost.
    bytes: usize,
    /// Connections that have not ended.
    connections: usize,
    begun: bool,
    /// Nothing is accepted any more.
    discarding: bool,
    failed: Option<String>,
}

impl ReorderState {
    fn of(connections: usize) -> ReorderState {
        ReorderState {
            next: 0,
            held: BTreeMap::new(),
            bytes: 0,
            connections,
            begun: false,
            discarding: false,
            failed: None,
        }
    }
}

impl Reorder {
    /// Takes the chunks of so many connections.
    ///
    /// `ahead` is what may wait for an earlier chunk that another connection still carries, in bytes: as much as the window. Then only that
    /// connection is read, so a receiver holds this and the window at most, whatever comes.
    pub(super) fn new(connections: usize, ahead: usize) -> Reorder {
        Reorder { state: Mutex::new(ReorderState::of(connections)), changed: Condvar::new(), ahead }
    }

    /// Adds a chunk. Waits while too much waits for an earlier one, unless this is that one.
    pub(super) fn put(&self, chunk: Chunk) -> Result<(), String> {
        let Chunk { number, bytes } = chunk;
        let cost = cost(&bytes);
        let mut state = lock(&self.state);
        while state.bytes + cost > self.ahead
            && number != state.next
            && !state.discarding
            && state.failed.is_none()
        {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(why) = &state.failed {
            return Err(why.clone());
        }
        if state.discarding {
            return Ok(());
        }
        if number < state.next || state.held.contains_key(&number) {
            return Err(format!("chunk {number} was received twice"));
        }
        state.begun = true;
        state.bytes += cost;
        let turn = number == state.next;
        state.held.insert(number, bytes);
        drop(state);
        if turn {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// The next chunk's bytes; `None` after the last.
    pub(super) fn take(&self) -> Result<Option<Buf>, String> {
        let mut state = lock(&self.state);
        loop {
            let next = state.next;
            if let Some(bytes) = state.held.remove(&next) {
                let full = state.bytes + CHUNK + KEPT > self.ahead;
                state.next += 1;
                state.bytes -= cost(&bytes);
                drop(state);
                if full {
                    self.changed.notify_all();
                }
                return Ok(Some(bytes));
            }
            match &state.failed {
                Some(why) => return Err(why.clone()),
                None if state.connections == 0 && state.held.is_empty() => return Ok(None),
                None if state.connections == 0 => return Err(format!("chunk {next} is missing")),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// True once a chunk has come.
    pub(super) fn has_begun(&self) -> bool {
        lock(&self.state).begun
    }

    /// One of the connections ended in order.
    pub(super) fn connection_ended(&self) {
        lock(&self.state).connections -= 1;
        self.changed.notify_all();
    }

    /// Discards what still arrives, so that a peer's last bytes, such as a credit, do not block it.
    pub(super) fn discard(&self) {
        let mut state = lock(&self.state);
        state.discarding = true;
        state.held.clear();
        state.bytes = 0;
        drop(state);
        self.changed.notify_all();
    }

    /// Ends it at once; the first reason counts.
    pub(super) fn fail(&self, why: &str) {
        lock(&self.state).failed.get_or_insert_with(|| why.to_string());
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn what_waits_for_an_earlier_chunk_is_bounded() {
        const AHEAD: usize = 4 << 20;
        let order = Reorder::new(2, AHEAD);
        let chunk = |number| Chunk { number, bytes: Buf::from(&vec![number as u8; CHUNK][..]) };
        let count = 2 * (AHEAD / CHUNK) as u64;
        thread::scope(|scope| {
            scope.spawn(|| (1..count).for_each(|number| order.put(chunk(number)).unwrap()));
            let until = Instant::now() + Duration::from_secs(20);
            while lock(&order.state).bytes + CHUNK + KEPT <= AHEAD {
                assert!(Instant::now() < until, "it takes less than it may");
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(50));
            assert!(lock(&order.state).bytes <= AHEAD);
            // The chunk whose turn it is never waits.
            order.put(chunk(0)).unwrap();
            for number in 0..count {
                assert_eq!(order.take().unwrap().unwrap()[..], chunk(number).bytes[..]);
            }
        });
        assert_eq!(lock(&order.state).bytes, 0);
        assert!(order.put(chunk(count - 1)).is_err(), "one that came before");
        order.connection_ended();
        order.connection_ended();
        assert!(matches!(order.take(), Ok(None)));
    }
}
