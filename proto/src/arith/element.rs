//! Single elements: how each type is loaded, reduced and rounded.

use half::{bf16, f16};

use super::Fold;
use crate::dtype::Reduction;

/// A number that contributions are folded in.
pub(super) trait Accumulator: Copy {
    /// What an absent rank holds.
    const ZERO: Self;

    /// The sum; of integers, wrapped.
    fn add(self, other: Self) -> Self;

    /// This divided by the number of ranks; of integers, rounded toward zero.
    fn divide(self, world: u32) -> Self;

    /// The lesser value; NaN if either is.
    fn minimum(self, other: Self) -> Self;

    /// The greater value; NaN if either is.
    fn maximum(self, other: Self) -> Self;

    /// This, with any NaN replaced by the quiet NaN.
    fn canonical(self) -> Self;
}

/// Reduces the values of one element over the ranks. There is at least one value.
pub(super) fn reduce<A: Accumulator>(
    reduction: Reduction,
    fold: Fold,
    values: impl Iterator<Item = A>,
) -> A {
    let combine = match reduction {
        Reduction::Sum | Reduction::Avg => A::add,
        Reduction::Min => A::minimum,
        Reduction::Max => A::maximum,
    };
    let folded = values.reduce(combine).expect("check_fold refuses a fold of nothing");
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
                // Equal values differ in the sign of a zero at most.
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
                self / $int::try_from(world).expect("check_fold refuses a world so large")
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

/// The bytes of one element.
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

/// The nearest f32, ties to even; past the largest, an infinity.
#[expect(clippy::cast_possible_truncation, reason = "rounding is what this is for")]
pub(super) fn f64_to_f32(x: f64) -> f32 {
    x as f32
}

/// The nearest whole number, ties to even, of an `x` within ±2^22.
pub(super) fn round_ties_even_f32(x: f32) -> f32 {
    // So far above `x` the distance between neighbours is one, and the sum rounds to it.
    const SHIFT: f32 = 12_582_912.0; // 1.5 * 2^23
    (x + SHIFT) - SHIFT
}

/// The nearest whole number, ties to even, of an `x` within ±2^51.
pub(super) fn round_ties_even_f64(x: f64) -> f64 {
    const SHIFT: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    (x + SHIFT) - SHIFT
}

/// `x` with every NaN as the quiet one. `f32::NAN` is not promised to have these bits.
fn canonical_f32(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(F32_NAN) } else { x }
}

const F32_NAN: u32 = 0x7fc0_0000;
const F64_NAN: u64 = 0x7ff8_0000_0000_0000;
const F16_NAN: u16 = 0x7e00;
const BF16_NAN: u16 = 0x7fc0;
