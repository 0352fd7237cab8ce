//! When an epoch of a mirror ends because the replica keeps a moment of each period, and moments are epochs.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::wire::messages::Moments;

/// The periods of which the replica keeps a moment, by its clock.
#[derive(Debug, Clone)]
pub(super) struct Grid {
    /// Microseconds.
    every: u64,
    /// The replica's clock minus this one, in microseconds.
    offset: i64,
    /// The period in which the last epoch ended.
    ended: u64,
}

/// Microseconds since 1970.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_micros().try_into().unwrap_or(u64::MAX)
}

impl Grid {
    /// The grid of a replica that has just said what it keeps; the last epoch ended so long ago.
    pub(super) fn new(moments: Option<Moments>, ago: Duration) -> Option<Grid> {
        let moments = moments.filter(|moments| moments.every > 0)?;
        Some(Grid::at(moments, ago, now()))
    }

    fn at(moments: Moments, ago: Duration, now: u64) -> Grid {
        let offset = i64::try_from(i128::from(moments.now) - i128::from(now)).unwrap_or(0);
        let mut grid = Grid { every: moments.every.saturating_mul(1_000_000), offset, ended: 0 };
        let ago = ago.as_micros().try_into().unwrap_or(u64::MAX);
        // By the replica's clock first: this one may be as far behind as it likes.
        grid.ended = now.saturating_add_signed(offset).saturating_sub(ago) / grid.every;
        grid
    }

    fn period(&self, now: u64) -> u64 {
        now.saturating_add_signed(self.offset) / self.every
    }

    /// True if no epoch has ended in the present period. What changed before is to be a moment of the last one.
    pub(super) fn is_due(&self) -> bool {
        self.period(now()) != self.ended
    }

    /// An epoch ends now.
    pub(super) fn ends(&mut self) {
        self.ended = self.period(now());
    }

    /// Until the next period begins.
    pub(super) fn until_next(&self) -> Duration {
        Duration::from_micros(self.every - now().saturating_add_signed(self.offset) % self.every)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    #[test]
    fn periods_are_those_of_the_replica() {
        let moments = Moments { every: 10, now: 1_009 * SECOND };
        // This clock is far behind, and the last epoch ended 5 s ago.
        let grid = Grid::at(moments, Duration::from_secs(5), 7 * SECOND);
        assert_eq!(grid.ended, 100);
        assert_eq!(grid.period(7 * SECOND + SECOND - 1), 100);
        assert_eq!(grid.period(8 * SECOND), 101);
        let before = Grid::at(moments, Duration::from_secs(11), 7 * SECOND);
        assert_eq!((before.ended, before.period(7 * SECOND)), (99, 100));
        let ahead = Grid::at(moments, Duration::ZERO, 5_000 * SECOND);
        assert_eq!((ahead.ended, ahead.period(5_001 * SECOND)), (100, 101));
    }

    #[test]
    fn one_epoch_is_due_in_each_period() {
        assert!(Grid::new(None, Duration::ZERO).is_none());
        assert!(Grid::new(Some(Moments { every: 0, now: 1 }), Duration::ZERO).is_none());
        let hour = Moments { every: 3600, now: 1000 * 3600 * SECOND + SECOND };
        let mut grid = Grid::new(Some(hour), Duration::from_secs(2)).unwrap();
        assert!(grid.is_due());
        grid.ends();
        assert!(!grid.is_due());
        assert!(grid.until_next() > Duration::from_secs(3000));
    }
}
