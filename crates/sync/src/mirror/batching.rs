//! How long a mirror collects before it sends: adaptive batching, after "A Remote Mirroring Architecture with Adaptively
//! Cooperative Pipelining" (formulas 1 to 3 there).
//!
//! The interval follows both sites: after a batch is sent it moves towards the time that this took, after the
//! confirmation towards the time that the replica's site took, and it is not shorter than the time a batch is in transit, so the replica
//! is at most two intervals behind while the link keeps up. A batch is cut earlier if as much was written as both sites can process in an
//! interval. If the link does not keep up, batches are cut less often, and a block written twice meanwhile is sent once: writers never
//! wait.

use std::time::Duration;

/// How batches are cut.
#[derive(Debug, Clone)]
pub struct Batching {
    /// How fast the interval follows the source's time for a batch: α of formula 1, 0 to 1.
    pub alpha: f64,
    /// How fast it follows the replica's time: β of formula 2, 0 to 1.
    pub beta: f64,
    /// The first interval.
    pub first: Duration,
    /// The shortest interval.
    pub least: Duration,
    /// How far the replica may be behind, as long as the link keeps up. The interval is at most half of it: what is written
    /// just after a cut waits one interval for the next, and no longer than another to be confirmed.
    pub rpo: Duration,
    /// The fixed-rate variant: bytes of changed blocks a second that the mirror may move, on average over each interval.
    pub rate: Option<u64>,
    /// False keeps the first interval, and sends batches as fast as possible: to measure the effect of adapting.
    pub adaptive: bool,
}

impl Default for Batching {
    fn default() -> Batching {
        Batching {
            alpha: 0.5,
            beta: 0.5,
            first: Duration::from_millis(30),
            least: Duration::from_millis(10),
            rpo: Duration::from_secs(5),
            rate: None,
            adaptive: true,
        }
    }
}

/// By how much an interval exceeds the time a batch is in transit: what is written just after a cut is confirmed before two
/// intervals have passed, with room for what varies.
const ROOM: f64 = 1.125;
/// The weight of past statistics with each batch.
const MEMORY: f64 = 0.98;

/// The adaptive interval.
#[derive(Debug, Clone)]
pub(crate) struct Interval {
    how: Batching,
    seconds: f64,
    /// The time from a batch's cut to its confirmation: a shorter interval would only put more batches in transit, each
    /// of them as late.
    whole: f64,
    /// The sums of N and T of formula 3.
    blocks: f64,
    busy: f64,
}

impl Interval {
    pub(crate) fn new(how: &Batching) -> Interval {
        let seconds = how.first.as_secs_f64();
        Interval { how: how.clone(), seconds, whole: 0.0, blocks: 0.0, busy: 0.0 }
    }

    fn bounded(&self, seconds: f64) -> f64 {
        let most = self.how.rpo.as_secs_f64() / 2.0;
        let least = self.how.least.as_secs_f64().max(self.whole * ROOM).min(most);
        seconds.clamp(least, most)
    }

    /// The time from one cut to the next.
    pub(crate) fn current(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Formula 1: the source's site has finished a batch.
    pub(crate) fn primary(&mut self, took: Duration) {
        if self.how.adaptive {
            let next = (1.0 - self.how.alpha) * self.seconds + self.how.alpha * took.as_secs_f64();
            self.seconds = self.bounded(next);
        }
    }

    /// Formula 2: the replica's site has confirmed a batch of so many blocks, which took it so long; `whole` is the time
    /// since the cut.
    pub(crate) fn backup(&mut self, took: Duration, whole: Duration, blocks: u64) {
        let (took, whole) = (took.as_secs_f64(), whole.as_secs_f64());
        let beta = self.how.beta;
        self.whole = if self.whole == 0.0 { whole } else { (1.0 - beta) * self.whole + beta * whole };
        self.blocks = self.blocks * MEMORY + blocks as f64;
        self.busy = self.busy * MEMORY + took.max(1e-6);
        if self.how.adaptive {
            self.seconds = self.bounded((1.0 - beta) * self.seconds + beta * took);
        }
    }

    /// Formula 3: the blocks of the next batch at which it is cut before its time. There is no such bound before the first batch.
    pub(crate) fn threshold(&self) -> u64 {
        if self.busy == 0.0 || !self.how.adaptive {
            return u64::MAX;
        }
        (self.blocks / self.busy * self.seconds).max(1.0) as u64
    }

    /// The fixed-rate variant: how long the interval after a batch of so many bytes must be.
    pub(crate) fn at_least(&self, bytes: u64) -> Duration {
        match self.how.rate {
            Some(rate) => Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64),
            None => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1000.0)
    }

    /// Sites whose work has a fixed and a proportional part: the interval settles where both are served, from either side.
    #[test]
    fn the_interval_converges_from_both_sides() {
        let settle = |first: f64, rounds: usize| {
            let how = Batching { first: ms(first), least: ms(1.0), ..Batching::default() };
            let mut interval = Interval::new(&how);
            let mut seen = Vec::new();
            for _ in 0..rounds {
                let t = interval.current().as_secs_f64() * 1000.0;
                let (primary, backup) = (2.0 + 0.3 * t, 6.0 + 0.5 * t);
                interval.primary(ms(primary));
                interval.backup(ms(backup), ms(backup), (t * 100.0) as u64);
                seen.push(interval.current().as_secs_f64() * 1000.0);
            }
            seen
        };
        let (low, high) = (settle(15.0, 20), settle(30.0, 20));
        let (low, high) = (low[19], high[19]);
        assert!((low - high).abs() < 0.1, "{low} and {high}");
        // The slower site needs 6 + t/2 for t: it keeps up from 12 ms on, and with an eighth of room from 15.4.
        assert!((15.0..16.0).contains(&low), "{low}");
    }

    #[test]
    fn bounds_hold_whatever_the_sites_take() {
        let how = Batching { least: ms(20.0), rpo: ms(200.0), ..Batching::default() };
        let mut interval = Interval::new(&how);
        for _ in 0..50 {
            interval.primary(ms(10_000.0));
            interval.backup(ms(10_000.0), ms(10_000.0), 1);
        }
        assert_eq!(interval.current(), ms(100.0));
        for _ in 0..100 {
            interval.primary(ms(0.0));
            interval.backup(ms(0.0), ms(0.0), 1);
        }
        assert!(interval.current() < ms(21.0), "{:?}", interval.current());
        assert!(interval.current() >= ms(20.0));
    }

    #[test]
    fn an_interval_is_longer_than_a_batch_is_on_its_way() {
        let mut interval = Interval::new(&Batching::default());
        for _ in 0..50 {
            interval.primary(ms(1.0));
            interval.backup(ms(2.0), ms(300.0), 10);
        }
        assert!(interval.current() >= ms(330.0), "{:?}", interval.current());
    }

    #[test]
    fn the_threshold_is_what_can_be_processed_in_an_interval() {
        let how = Batching { rpo: ms(10_000.0), ..Batching::default() };
        let mut interval = Interval::new(&how);
        assert_eq!(interval.threshold(), u64::MAX);
        for _ in 0..200 {
            interval.primary(ms(100.0));
            interval.backup(ms(100.0), ms(100.0), 1000);
        }
        assert!((1115..=1135).contains(&interval.threshold()), "{}", interval.threshold());
        assert_eq!(interval.at_least(1 << 30), Duration::ZERO);
        let fixed = Interval::new(&Batching { rate: Some(1 << 20), ..how });
        assert_eq!(fixed.at_least(3 << 20), ms(3000.0));
    }
}
