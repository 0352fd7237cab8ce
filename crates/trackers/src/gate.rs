//! The gate every tracked write passes: knowing when all writes that began before a moment have ended.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Counts the writes inside, in two generations, so that one generation can run dry while the next fills.
#[derive(Default)]
pub(crate) struct Gate {
    generation: AtomicUsize,
    inside: [Lane; 2],
    /// Held by the one that waits: two generations serve one waiter.
    turn: Mutex<()>,
}

/// A counter on a cache line of its own: both are touched by every write of every connection.
#[derive(Default)]
#[repr(align(128))]
struct Lane(AtomicUsize);

impl Gate {
    /// Enters. Returns the side to leave by.
    ///
    /// Sequentially consistent throughout: what a waiter published before [`Gate::drain`] is seen by every write that the
    /// waiter does not wait for. A write that counts itself into a generation which has just been closed may have missed
    /// the waiter's last look, so it looks again and moves over.
    pub fn enter(&self) -> usize {
        loop {
            let side = self.generation.load(SeqCst) & 1;
            self.inside[side].0.fetch_add(1, SeqCst);
            if self.generation.load(SeqCst) & 1 == side {
                return side;
            }
            self.leave(side);
        }
    }

    /// Leaves by the side that [`Gate::enter`] gave.
    pub fn leave(&self, side: usize) {
        self.inside[side].0.fetch_sub(1, SeqCst);
    }

    /// Waits until every write that entered before the call has left.
    pub fn drain(&self) {
        let _turn = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        let side = self.generation.fetch_add(1, SeqCst) & 1;
        let mut looks = 0u32;
        while self.inside[side].0.load(SeqCst) != 0 {
            looks += 1;
            if looks < 64 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    /// Writers read a published number inside the gate; after a drain none may still be working with an old one.
    #[test]
    fn nobody_is_inside_with_an_old_state_after_a_drain() {
        let gate = Arc::new(Gate::default());
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
        for round in 1..400 {
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
