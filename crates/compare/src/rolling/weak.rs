//! The weak sum: a polynomial over the field of 2^61 - 1, at a point drawn for each sync.
//!
//! For any two different blocks of `n` bytes at most `n` of 2^60 points give equal sums (they are the zeroes of a polynomial;
//! Karp and Rabin, "Efficient randomized pattern-matching algorithms"). Without the point, blocks with equal sums cannot be
//! crafted, as they can with an unkeyed sum: whatever the content, a match of sums is a match of blocks except once in
//! millions.

use std::ops::Range;

/// The field's size.
const P: u64 = (1 << 61) - 1;
/// Bytes of one dot product.
const STEP: usize = 1024;
/// Bytes whose products with 15 bits add up to less than 2^31.
const PART: usize = 256;
/// Limbs of a power, 15 bits each, so that a product with a byte fits the processor's 16-bit multiplication.
const LIMBS: usize = 5;
/// Parts of a search that are rolled in parallel: one alone waits for its own multiplications.
pub(super) const LANES: usize = 4;

/// Reduces a sum below 2^64 to the field.
fn fold(x: u64) -> u64 {
    let x = (x & P) + (x >> 61);
    if x >= P { x - P } else { x }
}

/// A product of two numbers below 2^61, or of one below 2^63 and one below 2^60, to below 2^63.
fn times(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    ((product as u64) & P) + (product >> 61) as u64
}

fn power(base: u64, mut exponent: u64) -> u64 {
    let (mut result, mut square) = (1, fold(base));
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = fold(times(result, square));
        }
        square = fold(times(square, square));
        exponent >>= 1;
    }
    result
}

/// The weak sums of one sync.
pub(super) struct Weak {
    point: u64,
    step: u64,
    /// What each byte subtracts from the sum when it leaves the block.
    leaves: [u64; 256],
    /// The powers of the last [`STEP`] places, by limbs.
    powers: Box<[[i16; STEP]; LIMBS]>,
    /// The processor has AVX2 and BMI2.
    #[cfg(target_arch = "x86_64")]
    wide: bool,
}

/// A match: the place of the block's first byte, and its sum.
pub(super) type Hit = (usize, u64);

impl Weak {
    /// Sums of blocks of `block` bytes, at a point made of `seed`.
    pub(super) fn new(seed: u64, block: usize) -> Weak {
        // Below 2^60, so that a step needs no more than one folding; never so small that sums of short blocks are small.
        let point = (seed & ((1 << 60) - 1)) | 1 << 59;
        let out = power(point, block as u64);
        let mut leaves = [0; 256];
        for (byte, leave) in leaves.iter_mut().enumerate() {
            *leave = fold(P - fold(times(out, byte as u64)));
        }
        let mut powers = Box::new([[0; STEP]; LIMBS]);
        let mut value = 1;
        for place in (0..STEP).rev() {
            for (limb, powers) in powers.iter_mut().enumerate() {
                powers[place] = (value >> (15 * limb) & 0x7fff) as i16;
            }
            value = fold(times(value, point));
        }
        Weak {
            point,
            step: power(point, STEP as u64),
            leaves,
            powers,
            #[cfg(target_arch = "x86_64")]
            wide: is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2"),
        }
    }

    /// The sum of a block of any length.
    pub(super) fn sum(&self, block: &[u8]) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.wide {
            // SAFETY: `wide` says that the processor has what the function is compiled for.
            return unsafe { self.sum_wide(block) };
        }
        self.sum_by(block)
    }

    /// The sum of a block of any length, with the registers of AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi2")]
    unsafe fn sum_wide(&self, block: &[u8]) -> u64 {
        self.sum_by(block)
    }

    #[inline(always)]
    fn sum_by(&self, block: &[u8]) -> u64 {
        // The short step comes first: every later one moves what is before it by a whole step.
        let (short, whole) = block.split_at(block.len() % STEP);
        let mut sum = self.dot(short, STEP - short.len());
        for step in whole.chunks_exact(STEP) {
            sum = fold(fold(times(sum, self.step)) + self.dot(step, 0));
        }
        sum
    }

    /// The sum of at most a step of bytes, whose first has the power at this place.
    #[inline(always)]
    fn dot(&self, bytes: &[u8], place: usize) -> u64 {
        let mut value = 0;
        for (limb, powers) in self.powers.iter().enumerate() {
            let mut total = 0u64;
            for (bytes, powers) in bytes.chunks(PART).zip(powers[place..].chunks(PART)) {
                let part: i32 =
                    bytes.iter().zip(powers).map(|(b, p)| i32::from(i16::from(*b)) * i32::from(*p)).sum();
                total += part as u64;
            }
            let shifted = u128::from(total) << (15 * limb);
            value = fold(value + fold(((shifted as u64) & P) + (shifted >> 61) as u64));
        }
        value
    }

    /// Moves a sum on by one byte.
    fn roll(&self, sum: u64, out: u8, next: u8) -> u64 {
        // Below 2^62 + 2^61, plus 2^61, plus a byte.
        times(sum, self.point) + self.leaves[usize::from(out)] + u64::from(next)
    }

    /// Finds the first block of `data` that begins at one of `places` and whose sum passes `filter` and `known`.
    pub(super) fn search(
        &self,
        data: &[u8],
        block: usize,
        places: Range<usize>,
        filter: &SumFilter,
        known: &impl Fn(u64) -> bool,
    ) -> Option<Hit> {
        // In parallel only where that pays for the initial sums.
        if places.len() < 4 * block.max(LANES * STEP) {
            return self.search_one(data, block, places, filter, known);
        }
        let part = places.len() / LANES;
        let begin: [usize; LANES] = std::array::from_fn(|lane| places.start + lane * part);
        let mut sums = begin.map(|at| self.sum(&data[at..at + block]));
        let outs = begin.map(|at| &data[at..at + part - 1]);
        let ins = begin.map(|at| &data[at + block..at + block + part - 1]);
        let mut first: [Option<Hit>; LANES] = [None; LANES];
        let look = |first: &mut [Option<Hit>; LANES], sums: &[u64; LANES], i: usize| {
            for lane in 0..LANES {
                let sum = fold(sums[lane]);
                if filter.has(sum) && first[lane].is_none() && known(sum) {
                    first[lane] = Some((begin[lane] + i, sum));
                }
            }
            first[0].is_some()
        };
        for i in 0..part - 1 {
            if look(&mut first, &sums, i) {
                return first[0];
            }
            for lane in 0..LANES {
                sums[lane] = self.roll(sums[lane], outs[lane][i], ins[lane][i]);
            }
        }
        // The last place of each: there may be no byte to go on with.
        look(&mut first, &sums, part - 1);
        let rest = places.start + part * LANES..places.end;
        first.into_iter().flatten().next().or_else(|| self.search_one(data, block, rest, filter, known))
    }

    fn search_one(
        &self,
        data: &[u8],
        block: usize,
        places: Range<usize>,
        filter: &SumFilter,
        known: &impl Fn(u64) -> bool,
    ) -> Option<Hit> {
        if places.is_empty() {
            return None;
        }
        let mut sum = self.sum(&data[places.start..places.start + block]);
        let mut ins = data[places.start + block..].iter();
        for (at, out) in places.clone().zip(&data[places]) {
            let whole = fold(sum);
            if filter.has(whole) && known(whole) {
                return Some((at, whole));
            }
            sum = self.roll(sum, *out, *ins.next()?);
        }
        None
    }
}

/// Which sums may be in the index: a sparse bitmap, small enough for the processor's cache.
pub(super) struct SumFilter {
    words: Vec<u64>,
    mask: u64,
}

impl SumFilter {
    /// A filter for that many sums.
    pub(super) fn new(sums: usize) -> SumFilter {
        // 32 bits per sum: one false positive in 32, and more from 2^27 sums on.
        let bits = (sums.max(1) as u64).saturating_mul(32).next_power_of_two().clamp(1 << 12, 1 << 32);
        SumFilter { words: vec![0; (bits / 64) as usize], mask: bits - 1 }
    }

    fn place(&self, sum: u64) -> (usize, u64) {
        let bit = sum & self.mask;
        ((bit >> 6) as usize, 1 << (bit & 63))
    }

    pub(super) fn insert(&mut self, sum: u64) {
        let (word, bit) = self.place(sum);
        if let Some(word) = self.words.get_mut(word) {
            *word |= bit;
        }
    }

    fn has(&self, sum: u64) -> bool {
        let (word, bit) = self.place(sum);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize, seed: u64) -> Vec<u8> {
        testing::Random::seeded(seed).bytes(len)
    }

    /// By the definition.
    fn slow(weak: &Weak, block: &[u8]) -> u64 {
        block.iter().fold(0, |sum, b| {
            ((u128::from(sum) * u128::from(weak.point) + u128::from(*b)) % u128::from(P)) as u64
        })
    }

    #[test]
    fn sums_are_those_of_the_polynomial() {
        for (seed, block) in [(1, 512), (u64::MAX, 1 << 17), (0, 1000), (77, 4096)] {
            let weak = Weak::new(seed, block);
            for len in [0, 1, 5, 1023, 1024, 1025, block] {
                for data in [bytes(len, seed), vec![255; len], vec![0; len]] {
                    assert_eq!(weak.sum(&data), slow(&weak, &data), "{len} bytes");
                }
            }
        }
    }

    #[test]
    fn a_search_finds_every_place() {
        for (len, block) in [(40_000, 512), (9000, 4096), (300_000, 1024), (513, 512), (512, 512)] {
            let weak = Weak::new(0x1234_5678_9abc_def0, block);
            let data = bytes(len, 3);
            let places: Vec<usize> = (0..=len - block).step_by(997).chain([len - block]).collect();
            let mut filter = SumFilter::new(places.len());
            for at in &places {
                filter.insert(weak.sum(&data[*at..at + block]));
            }
            let mut found = Vec::new();
            let mut at = 0;
            while let Some((place, sum)) = weak.search(&data, block, at..len - block + 1, &filter, &|_| true)
            {
                assert_eq!(sum, slow(&weak, &data[place..place + block]));
                found.push(place);
                at = place + 1;
            }
            assert!(places.iter().all(|p| found.contains(p)), "{len} {block}");
            let known = |sum| sum == slow(&weak, &data[places[places.len() - 1]..][..block]);
            let last = weak.search(&data, block, 0..len - block + 1, &filter, &known);
            assert_eq!(last.map(|hit| hit.0), places.last().copied());
        }
    }

    /// What makes sums equal that are the same for all: bytes moved so that plain sums, sums of sums, and sums modulo a power
    /// of two stay.
    #[test]
    fn no_content_makes_sums_equal() {
        let weak = Weak::new(0xfeed_beef, 2048);
        let thue: Vec<u8> = (0..2048u32).map(|n| (n.count_ones() % 2) as u8).collect();
        let other: Vec<u8> = thue.iter().map(|b| 1 - b).collect();
        assert_ne!(weak.sum(&thue), weak.sum(&other));
        let mut sums = std::collections::HashSet::new();
        for n in 0..1000 {
            let mut block = vec![7u8; 2048];
            // The same byte sum, and the same weighted sum.
            for (at, change) in [(n, 1i8), (n + 1, -2), (n + 2, 1)] {
                block[at] = block[at].wrapping_add_signed(change);
            }
            assert!(sums.insert(weak.sum(&block)));
        }
    }
}
