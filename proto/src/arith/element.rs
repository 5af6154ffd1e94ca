//! Operations on single elements: loading, reducing and rounding.

use half::{bf16, f16};

use super::FoldTerms;
use crate::dtype::Reduction;

/// A number type in which contributions are folded.
pub(super) trait Accumulator: Copy {
    /// The value that stands for a rank that sent nothing.
    const ZERO: Self;

    /// Returns the sum; integers wrap.
    fn add(self, other: Self) -> Self;

    /// Returns the value divided by the number of ranks; integers round toward zero.
    fn divide(self, world: u32) -> Self;

    /// Returns the lesser value, or NaN if either is NaN.
    fn minimum(self, other: Self) -> Self;

    /// Returns the greater value, or NaN if either is NaN.
    fn maximum(self, other: Self) -> Self;

    /// Returns the value, or the quiet NaN if the value is NaN.
    fn canonical(self) -> Self;
}

/// Reduces the values of one element over the ranks. `values` must not be empty.
pub(super) fn reduce<A: Accumulator>(
    reduction: Reduction,
    fold: FoldTerms,
    values: impl Iterator<Item = A>,
) -> A {
    let combine = match reduction {
        Reduction::Sum | Reduction::Avg => A::add,
        Reduction::Min => A::minimum,
        Reduction::Max => A::maximum,
    };
    let folded = values.reduce(combine).expect("check_fold refuses a fold without inputs");
    let reduced = match reduction {
        Reduction::Sum => folded,
        Reduction::Avg => folded.divide(fold.world),
        Reduction::Min | Reduction::Max if fold.absent => combine(folded, A::ZERO),
        Reduction::Min | Reduction::Max => folded,
    };
    reduced.canonical()
}

macro_rules! float_accumulator {
    ($float:ident, $world:expr) => {
        impl Accumulator for $float {
            const ZERO: Self = 0.0;

            fn add(self, other: Self) -> Self {
                self + other
            }

            fn divide(self, world: u32) -> Self {
                self / $world(world)
            }

            fn minimum(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    return Self::NAN;
                }
                // Equal values differ at most in the sign of a zero.
                let first = self < other || (self == other && self.is_sign_negative());
                if first { self } else { other }
            }

            fn maximum(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    return Self::NAN;
                }
                let first = self > other || (self == other && self.is_sign_positive());
                if first { self } else { other }
            }

            fn canonical(self) -> Self {
                if self.is_nan() { Self::NAN } else { self }
            }
        }
    };
}

float_accumulator!(f32, |world: u32| world as f32);
float_accumulator!(f64, |world: u32| f64::from(world));

macro_rules! integer_accumulator {
    ($int:ident) => {
        impl Accumulator for $int {
            const ZERO: Self = 0;

            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn divide(self, world: u32) -> Self {
                self / $int::try_from(world).expect("check_fold refuses a world this large")
            }

            fn minimum(self, other: Self) -> Self {
                Ord::min(self, other)
            }

            fn maximum(self, other: Self) -> Self {
                Ord::max(self, other)
            }

            fn canonical(self) -> Self {
                self
            }
        }
    };
}

integer_accumulator!(i32);
integer_accumulator!(i64);

/// Returns the bytes of one element as an array.
pub(super) fn element<const SIZE: usize>(bytes: &[u8]) -> [u8; SIZE] {
    bytes.try_into().expect("the callers cut runs at multiples of the element size")
}

pub(super) fn f32_load(x: [u8; 4]) -> f32 {
    f32::from_le_bytes(x)
}

pub(super) fn f32_store(x: f32) -> [u8; 4] {
    canonical_f32(x).to_le_bytes()
}

pub(super) fn f64_load(x: [u8; 8]) -> f64 {
    f64::from_le_bytes(x)
}

pub(super) fn f64_store(x: f64) -> [u8; 8] {
    let bits = if x.is_nan() { F64_NAN } else { x.to_bits() };
    bits.to_le_bytes()
}

pub(super) fn f16_load(x: [u8; 2]) -> f32 {
    f16::from_le_bytes(x).to_f32()
}

pub(super) fn f16_store(x: f32) -> [u8; 2] {
    let bits = if x.is_nan() { F16_NAN } else { f16::from_f32(x).to_bits() };
    bits.to_le_bytes()
}

pub(super) fn bf16_load(x: [u8; 2]) -> f32 {
    bf16::from_le_bytes(x).to_f32()
}

pub(super) fn bf16_store(x: f32) -> [u8; 2] {
    let bits = if x.is_nan() { BF16_NAN } else { bf16::from_f32(x).to_bits() };
    bits.to_le_bytes()
}

/// Returns the nearest f32, ties to even. Values beyond the largest f32 become infinite.
#[expect(clippy::cast_possible_truncation, reason = "the function rounds on purpose")]
pub(super) fn f64_to_f32(x: f64) -> f32 {
    x as f32
}

/// Returns the whole number nearest to `x`, ties to even, for `x` within ±2^22.
pub(super) fn round_ties_even_f32(x: f32) -> f32 {
    // The sum of `x` and `SHIFT` has a magnitude at which neighbouring floats are one apart, so the
    // sum rounds to a whole number.
    const SHIFT: f32 = 12_582_912.0; // 1.5 * 2^23
    (x + SHIFT) - SHIFT
}

/// Returns the whole number nearest to `x`, ties to even, for `x` within ±2^51.
pub(super) fn round_ties_even_f64(x: f64) -> f64 {
    const SHIFT: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    (x + SHIFT) - SHIFT
}

/// Returns `x`, or the positive quiet NaN if `x` is NaN. The bits are written out because Rust does
/// not guarantee the bits of `f32::NAN`.
fn canonical_f32(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(F32_NAN) } else { x }
}

const F32_NAN: u32 = 0x7fc0_0000;
const F64_NAN: u64 = 0x7ff8_0000_0000_0000;
const F16_NAN: u16 = 0x7e00;
const BF16_NAN: u16 = 0x7fc0;
