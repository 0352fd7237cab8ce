//! Whether the loop of a mirror turns, for a watchdog.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The turns of a mirror's loop.
#[derive(Debug, Default)]
pub struct Turns {
    count: AtomicU64,
    /// The count when it was last asked for.
    seen: AtomicU64,
    /// Outside the loop the mirror syncs, connects or waits for its peer; there the link's timeout finds what is stuck.
    looping: AtomicBool,
}

impl Turns {
    /// True if the loop has turned since the last call, or is not running. For a watchdog.
    pub fn is_awake(&self) -> bool {
        let count = self.count.load(Relaxed);
        self.seen.swap(count, Relaxed) != count || !self.looping.load(Relaxed)
    }

    /// Runs the loop.
    pub(crate) fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        self.turn();
        self.looping.store(true, Relaxed);
        let result = run();
        self.looping.store(false, Relaxed);
        result
    }

    /// Counts a turn of the loop, or a step of a long one.
    pub(crate) fn turn(&self) {
        self.count.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_is_awake_while_it_turns() {
        let turns = Turns::default();
        assert!(turns.is_awake() && turns.is_awake(), "it does not run");
        turns.within(|| {
            assert!(turns.is_awake(), "it has begun");
            assert!(!turns.is_awake());
            turns.turn();
            assert!(turns.is_awake());
            assert!(!turns.is_awake());
        });
        assert!(turns.is_awake(), "it has ended");
    }
}
