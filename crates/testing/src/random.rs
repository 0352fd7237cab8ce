//! Randomness that can be repeated.

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

/// The seed of a test: `DSYNC_SEED`, or the clock. Prints it: a failing test shows it.
///
/// # Panics
/// If `DSYNC_SEED` is not a number.
pub fn seed(what: &str) -> u64 {
    // Short enough to be typed.
    let now =
        || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_nanos() as u64 % (1 << 40));
    let seed = number("DSYNC_SEED").unwrap_or_else(now);
    println!("{what}: DSYNC_SEED={seed}");
    seed
}

/// The number in an environment variable; `None` without the variable.
///
/// # Panics
/// If it is not a number.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

/// Which steps of a campaign that could try each one are tried: all of them in a soak, else others in each run.
pub struct Sample(u64);

impl Sample {
    /// By the test's [`seed()`].
    pub fn new(what: &str) -> Sample {
        Sample(seed(what))
    }

    /// True for one in `of` steps.
    pub fn takes(&self, step: u64, of: u64) -> bool {
        crate::soak() || step % of == self.0 % of
    }
}

/// A small generator, splitmix64. Of our own, because the sequence of a seed must stay the same for as long as seeds are kept:
/// in failures and in reports. Libraries change theirs.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// With the test's [`seed()`].
    pub fn new(what: &str) -> Random {
        Random(seed(what))
    }

    /// Seeded by hand.
    pub fn seeded(seed: u64) -> Random {
        Random(seed)
    }

    /// A generator that goes its own way.
    pub fn fork(&mut self) -> Random {
        Random(self.bits())
    }

    /// Any 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.bits() % end.max(1)
    }

    /// An index below `len`; 0 if that is 0.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number in `range`, which is not empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    /// True every other time.
    pub fn coin(&mut self) -> bool {
        self.bits() & 1 == 1
    }

    /// True one time in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.index(of.len())]
    }

    /// Fills a buffer with bytes that no compressor shrinks.
    pub fn fill(&mut self, buf: &mut [u8]) {
        for chunk in buf.chunks_mut(8) {
            let bytes = self.bits().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
    }

    /// So many bytes that no compressor shrinks.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut buf = vec![0; len];
        self.fill(&mut buf);
        buf
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seeds are written down: what they mean stays.
    #[test]
    fn the_sequence_of_a_seed_never_changes() {
        // The first numbers of the reference implementation, https://prng.di.unimi.it/splitmix64.c.
        let mut random = Random::seeded(1_234_567);
        let first = [(); 3].map(|()| random.bits());
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
