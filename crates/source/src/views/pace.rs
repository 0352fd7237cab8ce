//! How fast a disk may be read while its guest writes: as fast as the guest does not feel it.
//!
//! As in TCP Vegas and in the kernel's `blk-wbt`, what decides is the latency of those who were there first. While the guest writes, the
//! reader keeps still for a moment to see how long its changes take then, and reads for a while; if they take longer now, it slows down,
//! else it speeds up. Bytes in flight are the rate times the latency of the disk, so a rate limits the depth as well.
//!
//! Nothing here waits or asks for the time: [`Pacer::look`] is told both.

use std::time::Duration;

use trackers::Felt;

/// A guest that has written nothing for so long is at rest.
const REST: Duration = Duration::from_millis(50);
/// What is measured at once, and the most where too few changes end in that.
const WINDOW: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_millis(100);
/// Changes of which a mean says something.
const ENOUGH: u64 = 8;
/// How often the reader keeps still for a window.
const STILL_EVERY: Duration = Duration::from_secs(1);

/// Bytes a second: at first, at least, and the most.
const FIRST: u64 = 16 << 20;
const LEAST: u64 = 8 << 20;
const MOST: u64 = 1 << 30;

/// Reads a second that a rate is made of, as far as the least and the most bytes of one allow. Each read, and what is done with its data,
/// holds up who waits for the processor or the disk: few are felt by few changes, and small ones by none for long.
const READS: u64 = 256;
const SMALLEST: u64 = 64 << 10;
const LARGEST: u64 = 1 << 20;

/// What a reader may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadRate {
    /// All it can.
    All,
    /// Nothing now.
    Nothing,
    /// So many bytes a second.
    Rate(u64),
}

impl ReadRate {
    /// The most bytes of one read.
    pub(crate) fn at_once(self) -> u64 {
        match self {
            ReadRate::All => u64::MAX,
            ReadRate::Nothing => SMALLEST,
            ReadRate::Rate(rate) => (rate / READS / SMALLEST * SMALLEST).clamp(SMALLEST, LARGEST),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The guest is at rest.
    Free,
    /// Nobody reads.
    Still,
    /// It is read since this window was at an end.
    Reading(Duration),
}

/// The decision, and what it remembers. Times count from any moment.
#[derive(Debug)]
pub(crate) struct Pacer {
    phase: Phase,
    rate: u64,
    /// What a change takes while nobody reads, in nanoseconds, as far as that is known.
    alone: Option<u64>,
    /// The window: its begin, what was counted then, and bytes read since.
    begun: Duration,
    before: Felt,
    read: u64,
    last: Option<Felt>,
    /// When the guest was last seen to write.
    stirred: Option<Duration>,
}

impl Pacer {
    pub(crate) fn new() -> Pacer {
        Pacer {
            phase: Phase::Free,
            rate: FIRST,
            alone: None,
            begun: Duration::ZERO,
            before: Felt::default(),
            read: 0,
            last: None,
            stirred: None,
        }
    }

    /// Counts what was read.
    pub(crate) fn took(&mut self, bytes: u64) {
        self.read += bytes;
    }

    /// What is allowed at a time, at which so much was counted.
    pub(crate) fn look(&mut self, now: Duration, felt: Felt) -> ReadRate {
        let last = self.last.replace(felt);
        if felt.inside > 0 || last.is_some_and(|last| last.ended != felt.ended) {
            self.stirred = Some(now);
        }
        if self.stirred.is_none_or(|stirred| now.saturating_sub(stirred) >= REST) {
            self.phase = Phase::Free;
            return ReadRate::All;
        }
        match self.phase {
            Phase::Free => self.turn(Phase::Still, now, felt),
            Phase::Still if self.is_over(now, felt) => {
                self.alone = self.each(now, felt, felt.ended.wrapping_sub(self.before.ended));
                self.turn(Phase::Reading(now), now, felt);
            }
            Phase::Reading(since) if self.is_over(now, felt) => {
                self.rate = self.next(now, felt);
                let still = now.saturating_sub(since) >= STILL_EVERY;
                self.turn(if still { Phase::Still } else { self.phase }, now, felt);
            }
            Phase::Still | Phase::Reading(_) => {}
        }
        if self.phase == Phase::Still { ReadRate::Nothing } else { ReadRate::Rate(self.rate) }
    }

    fn turn(&mut self, phase: Phase, now: Duration, felt: Felt) {
        (self.phase, self.begun, self.before, self.read) = (phase, now, felt, 0);
    }

    fn is_over(&self, now: Duration, felt: Felt) -> bool {
        let lasted = now.saturating_sub(self.begun);
        lasted >= LONGEST || lasted >= WINDOW && felt.ended.wrapping_sub(self.before.ended) >= ENOUGH
    }

    /// What a change has taken in this window, in nanoseconds; of one that has not ended, at least the window.
    fn each(&self, now: Duration, felt: Felt, ended: u64) -> Option<u64> {
        match ended {
            0 if felt.inside == 0 => None,
            0 => Some(now.saturating_sub(self.begun).as_nanos() as u64),
            ended => Some(felt.nanos.wrapping_sub(self.before.nanos) / ended),
        }
    }

    /// The rate after a window.
    fn next(&self, now: Duration, felt: Felt) -> u64 {
        let each = self.each(now, felt, felt.ended.wrapping_sub(self.before.ended));
        let allowed = now.saturating_sub(self.begun).as_micros() as u64 * (self.rate >> 10) / 1_000_000;
        next_rate(self.rate, self.alone, each, self.read >> 10 >= allowed / 2)
    }
}

/// The next rate, from what a change takes without and with the reader, in nanoseconds, and whether the rate was made use of. It may take
/// a quarter longer: then a guest that waits for each makes four fifths of them.
fn next_rate(rate: u64, alone: Option<u64>, beside: Option<u64>, used: bool) -> u64 {
    let (Some(alone), Some(beside)) = (alone, beside) else { return rate };
    let next = match beside.saturating_mul(100) / alone.max(1) {
        // What was not used says nothing about more of it.
        0..=112 if used => rate / 4 * 5,
        0..=125 => rate,
        _ => rate / 2,
    };
    next.clamp(LEAST, MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_rate_follows_what_the_guest_feels() {
        let table = [
            // rate, alone, beside, used: next
            ((16, Some(100), Some(100), true), 20),
            ((16, Some(100), Some(112), true), 20),
            ((16, Some(100), Some(90), false), 16),
            ((16, Some(100), Some(125), true), 16),
            ((16, Some(100), Some(126), true), 8),
            ((64, Some(100), Some(200), true), 32),
            ((64, Some(100), Some(200), false), 32),
            ((8, Some(100), Some(100_000), true), 8),
            ((1024, Some(100), Some(100), true), 1024),
            ((64, None, Some(100), true), 64),
            ((64, Some(100), None, true), 64),
        ];
        for ((rate, alone, beside, used), next) in table {
            let is = next_rate(rate * MIB, alone, beside, used);
            assert_eq!(is, next * MIB, "{rate} {alone:?} {beside:?} {used}");
        }
    }

    #[test]
    fn reads_are_small_where_few_bytes_are_allowed() {
        let at_once = |rate: u64| ReadRate::Rate(rate * MIB).at_once() >> 10;
        assert_eq!([8, 16, 40, 128, 1024].map(at_once), [64, 64, 128, 512, 1024]);
        assert_eq!((ReadRate::Nothing.at_once(), ReadRate::All.at_once()), (64 << 10, u64::MAX));
    }

    /// A guest whose changes take what they are told to.
    struct Guest {
        pace: Pacer,
        now: u64,
        felt: Felt,
    }

    impl Guest {
        fn new() -> Guest {
            Guest { pace: Pacer::new(), now: 0, felt: Felt::default() }
        }

        /// Lets 5 ms pass in which so many changes end, each of which took so many nanoseconds.
        fn pass(&mut self, changes: u64, nanos: u64) -> ReadRate {
            self.now += 5;
            self.felt.ended += changes;
            self.felt.nanos += changes * nanos;
            let allowed = self.pace.look(Duration::from_millis(self.now), self.felt);
            if let ReadRate::Rate(rate) = allowed {
                self.pace.took(rate / 200);
            }
            allowed
        }
    }

    #[test]
    fn nobody_waits_for_a_guest_at_rest_and_everybody_for_one_that_begins() {
        let mut guest = Guest::new();
        assert!((0..100).all(|_| guest.pass(0, 0) == ReadRate::All));
        assert_eq!(guest.pass(1, 100), ReadRate::Nothing, "at the first look");
        let until = (0..).find(|_| guest.pass(0, 0) == ReadRate::All).unwrap() * 5;
        assert!((40..=50).contains(&until), "at rest after {until} ms");
        // One that hangs is no rest.
        guest.felt.inside = 1;
        assert!((0..100).all(|_| guest.pass(0, 0) != ReadRate::All));
    }

    #[test]
    fn it_speeds_up_until_that_is_felt_and_keeps_still_now_and_then() {
        let mut guest = Guest::new();
        let (mut fastest, mut still) = (0, 0);
        guest.pass(0, 0);
        for at in 0..2000 {
            // Above 100 MiB a second the changes take twice as long.
            let slow = matches!(guest.pace.phase, Phase::Reading(_)) && guest.pace.rate > 100 * MIB;
            match guest.pass(100, if slow { 200 } else { 100 }) {
                ReadRate::Rate(rate) => fastest = fastest.max(rate),
                ReadRate::Nothing => still += 1,
                ReadRate::All => panic!("at {at}"),
            }
        }
        assert!((100 * MIB..130 * MIB).contains(&fastest), "{fastest}");
        // 20 of every 1020 ms.
        assert!((30..60).contains(&still), "{still}");
    }
}
