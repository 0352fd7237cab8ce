//! The gate that every tracked write passes: it tells when all writes that began before a moment have ended.

use std::ops::Deref;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Counts the writes inside, in two generations, so that one can drain while the next fills.
///
/// The counts are in shared memory: if the process dies, the next one sees whether writes were in flight.
pub(crate) struct Gate {
    generation: AtomicUsize,
    words: Box<dyn Deref<Target = [AtomicU64]> + Send + Sync>,
    /// Held while draining: two generations serve one waiter.
    turn: Mutex<()>,
}

/// Set in the generation while the gate is closed.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// The words of the two counts: cache lines apart, as both are touched by every write of every connection.
pub(crate) const LANES: [usize; 2] = [32, 64];

/// Writes that are inside, or were when the process died.
pub(crate) fn inside(words: &[AtomicU64]) -> u64 {
    LANES.iter().map(|lane| words[*lane].load(SeqCst)).sum()
}

impl Gate {
    /// An empty gate over at least 128 words.
    pub(crate) fn new(words: impl Deref<Target = [AtomicU64]> + Send + Sync + 'static) -> Gate {
        LANES.iter().for_each(|lane| words[*lane].store(0, SeqCst));
        Gate { generation: AtomicUsize::new(0), words: Box::new(words), turn: Mutex::new(()) }
    }

    fn lane(&self, side: usize) -> &AtomicU64 {
        &self.words[LANES[side]]
    }

    /// True if writes are inside.
    pub(crate) fn is_busy(&self) -> bool {
        inside(&self.words) > 0
    }

    /// Enters. Returns the side to leave by.
    ///
    /// Sequentially consistent throughout: what a waiter published before [`Gate::drain`] is seen by every write that the
    /// waiter does not wait for. A write that counts itself into a generation which has just been closed may have missed
    /// the waiter's last look, so it looks again and moves over.
    ///
    /// Waits while the gate is closed.
    pub(crate) fn enter(&self) -> usize {
        loop {
            let now = self.generation.load(SeqCst);
            if now & CLOSED != 0 {
                self.wait_for_opening();
                continue;
            }
            let side = now & 1;
            self.lane(side).fetch_add(1, SeqCst);
            if self.generation.load(SeqCst) & (CLOSED | 1) == side {
                return side;
            }
            self.leave(side);
        }
    }

    #[cold]
    fn wait_for_opening(&self) {
        let mut looks = 0u32;
        while self.generation.load(SeqCst) & CLOSED != 0 {
            looks += 1;
            if looks < 64 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }

    /// Keeps every write out until the gate is opened. Those inside stay, and are not waited for: no write may be
    /// waited for until the gate is open again.
    pub(crate) fn close(&self) {
        self.generation.fetch_or(CLOSED, SeqCst);
    }

    /// Opens a closed gate.
    pub(crate) fn open(&self) {
        self.generation.fetch_and(!CLOSED, SeqCst);
    }

    /// Leaves by the side that [`Gate::enter`] gave.
    pub(crate) fn leave(&self, side: usize) {
        self.lane(side).fetch_sub(1, SeqCst);
    }

    /// Waits until every write that entered before the call has left.
    pub(crate) fn drain(&self) {
        let _turn = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        let side = self.generation.fetch_add(1, SeqCst) & 1;
        let mut looks = 0u32;
        while self.lane(side).load(SeqCst) != 0 {
            looks += 1;
            if looks < 64 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

/// Several gates, closed as long as this lives.
pub(crate) struct ClosedGates<'a>(Vec<&'a Gate>);

impl<'a> ClosedGates<'a> {
    /// Closes the gates, one after the other.
    pub(crate) fn close(gates: impl Iterator<Item = &'a Gate>) -> ClosedGates<'a> {
        ClosedGates(gates.inspect(|gate| gate.close()).collect())
    }
}

impl Drop for ClosedGates<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|gate| gate.open());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn nobody_enters_a_closed_gate_and_who_is_inside_may_leave() {
        let words: Box<[AtomicU64]> = (0..128).map(|_| AtomicU64::new(0)).collect();
        let gate = Arc::new(Gate::new(words));
        let early = gate.enter();
        let closed = ClosedGates::close(std::iter::once(&*gate));
        let entered = Arc::new(AtomicBool::new(false));
        let late = std::thread::spawn({
            let (gate, entered) = (gate.clone(), entered.clone());
            move || {
                let side = gate.enter();
                entered.store(true, SeqCst);
                gate.leave(side);
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!entered.load(SeqCst));
        gate.leave(early);
        gate.drain();
        assert!(!entered.load(SeqCst));
        drop(closed);
        late.join().unwrap();
        assert!(entered.load(SeqCst) && !gate.is_busy());
    }

    /// Writers read a published number inside the gate; after a drain none may still be working with an old one.
    #[test]
    fn nobody_is_inside_with_an_old_state_after_a_drain() {
        let words: Box<[AtomicU64]> = (0..128).map(|_| AtomicU64::new(0)).collect();
        let gate = Arc::new(Gate::new(words));
        let published = Arc::new(AtomicU64::new(0));
        let busy: Arc<Vec<AtomicU64>> = Arc::new((0..4).map(|_| AtomicU64::new(u64::MAX)).collect());
        let stop = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> = (0..4)
            .map(|i| {
                let (gate, published, busy, stop) =
                    (gate.clone(), published.clone(), busy.clone(), stop.clone());
                std::thread::spawn(move || {
                    while !stop.load(SeqCst) {
                        let side = gate.enter();
                        busy[i].store(published.load(SeqCst), SeqCst);
                        std::hint::spin_loop();
                        busy[i].store(u64::MAX, SeqCst);
                        gate.leave(side);
                    }
                })
            })
            .collect();
        for round in 1..100 {
            published.store(round, SeqCst);
            gate.drain();
            for slot in busy.iter() {
                let seen = slot.load(SeqCst);
                assert!(seen == u64::MAX || seen >= round, "a write still works with {seen} after {round}");
            }
        }
        stop.store(true, SeqCst);
        for writer in writers {
            writer.join().unwrap();
        }
    }
}
