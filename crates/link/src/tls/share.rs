//! What sessions may hold of what was received and not yet taken: shares of one budget, so that many of them, which one key may open, do not
//! take the host's memory.

use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use super::WINDOW;

/// The bytes of all shares together, but for the least that each session has.
const BUDGET: i64 = 256 << 20;
/// What a session has at least, so that it never waits for others.
const LEAST: i64 = 4 << 20;

/// The bytes of a budget that nobody has.
#[derive(Debug)]
pub(super) struct Budget(AtomicI64);

/// The budget of this process.
pub(super) static ALL: Budget = Budget(AtomicI64::new(BUDGET));

/// A session's share, given back at its end.
#[derive(Debug)]
pub(super) struct Share {
    budget: &'static Budget,
    bytes: i64,
}

impl Budget {
    /// Takes half of what is left, within bounds.
    pub(super) fn share(&'static self) -> Share {
        let part = |left: i64| (left / 2).clamp(LEAST, WINDOW.into());
        let left = self.0.fetch_update(SeqCst, SeqCst, |left| Some(left - part(left)));
        Share { budget: self, bytes: part(left.unwrap_or_else(|left| left)) }
    }
}

impl Share {
    /// Bytes of the share, at most [`WINDOW`].
    pub(super) fn window(&self) -> u32 {
        self.bytes as u32
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.0.fetch_add(self.bytes, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_sessions_share_one_budget() {
        static BUDGET_HERE: Budget = Budget(AtomicI64::new(BUDGET));
        let shares: Vec<Share> = (0..64).map(|_| BUDGET_HERE.share()).collect();
        assert_eq!(shares[0].window(), WINDOW, "one alone lacks nothing");
        assert!(shares.iter().all(|share| i64::from(share.window()) >= LEAST));
        let all: i64 = shares.iter().map(|share| share.bytes).sum();
        assert!(all <= BUDGET + 64 * LEAST, "{all}");
        drop(shares);
        assert_eq!(BUDGET_HERE.0.load(SeqCst), BUDGET, "all is given back");
    }
}
