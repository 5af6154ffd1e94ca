//! Deterministic random numbers: one seeded generator with named children.

use std::ops::RangeInclusive;

/// A SplitMix64 generator (Steele, Lea, Flood 2014).
///
/// Each user takes its own child by name, so that extra draws by one user do not change those of
/// another.
#[derive(Debug, Clone)]
pub struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    /// Creates a generator from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, state: seed }
    }

    /// Returns the child called `name`. The child depends on the seed, but not on earlier draws.
    #[must_use]
    pub fn child(&self, name: &str) -> Self {
        let name = name
            .bytes()
            .fold(FNV_OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME));
        Self::new(mix(self.seed ^ mix(name)))
    }

    /// Returns the child with index `number`, for users that need several of the same kind.
    #[must_use]
    pub const fn nth(&self, number: u64) -> Self {
        Self::new(mix(self.seed ^ mix(number.wrapping_add(GOLDEN))))
    }

    /// Draws the next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        let bits = output(self.state, 0);
        self.state = self.state.wrapping_add(GOLDEN);
        bits
    }

    /// Draws a number below `end`, which must not be zero.
    pub const fn below(&mut self, end: u64) -> u64 {
        // The bias of the remainder is below 2^-25 for the ranges drawn here.
        self.bits() % end
    }

    /// Draws a number in `range`.
    pub fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.below((range.end() - range.start()).saturating_add(1))
    }

    /// Draws a number in `range`, with each binary order of magnitude equally likely.
    pub fn across(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (first, last) = ((*range.start()).max(1), (*range.end()).max(1));
        let log2 = self.within(u64::from(first.ilog2())..=u64::from(last.ilog2()));
        let low = (1 << log2).max(first);
        let high = ((1 << log2) * 2 - 1).min(last);
        self.within(low..=high)
    }

    /// Draws true with a probability of `ppm` in a million.
    pub const fn chance(&mut self, ppm: u32) -> bool {
        self.below(1_000_000) < ppm as u64
    }

    /// Draws true with a probability of one in `n`.
    pub const fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Draws one of `options`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, options: &[T]) -> T {
        options[usize::try_from(self.below(options.len() as u64))
            .expect("the remainder is below a length")]
    }
}

/// Returns output `index` of a SplitMix64 generator with this seed, without computing the earlier
/// outputs.
#[must_use]
pub const fn output(seed: u64, index: u64) -> u64 {
    mix(seed.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN)))
}

/// Scrambles 64 bits with a bijection, the output function of SplitMix64.
#[must_use]
pub const fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_splitmix64() {
        // The first outputs of the reference implementation for this seed.
        let mut random = Random::new(1_234_567);
        assert_eq!(random.bits(), 6_457_827_717_110_365_317);
        assert_eq!(random.bits(), 3_203_168_211_198_807_973);
        assert_eq!(output(1_234_567, 1), 3_203_168_211_198_807_973);
    }

    #[test]
    fn children_depend_on_the_seed_and_the_name_alone() {
        let mut parent = Random::new(7);
        let before = parent.child("faults").bits();
        parent.bits();
        assert_eq!(parent.child("faults").bits(), before);
        assert_ne!(parent.child("links").bits(), before);
        assert_ne!(Random::new(8).child("faults").bits(), before);
        assert_ne!(parent.nth(0).bits(), parent.nth(1).bits());
    }

    #[test]
    fn draws_stay_in_their_range() {
        let mut random = Random::new(1);
        for _ in 0..1000 {
            assert!((3..=9).contains(&random.within(3..=9)));
            assert!((5..=1000).contains(&random.across(5..=1000)));
        }
        assert_eq!(random.across(6..=6), 6);
        assert!(!random.chance(0) && random.chance(1_000_000));
    }
}
