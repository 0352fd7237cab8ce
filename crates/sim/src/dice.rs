//! Numbers that a seed determines (splitmix64).

use std::ops::Range;

/// Dice.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// Dice of a seed.
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `limit`; 0 if that is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.roll() % limit.max(1)
    }

    /// Within a range that is not empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// Dice that go their own way.
    pub fn fork(&mut self) -> Dice {
        Dice(self.roll())
    }
}
