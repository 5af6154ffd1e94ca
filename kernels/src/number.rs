//! Branch-free operations on single numbers, which the compiler can vectorize.

/// Number type in which contributions are folded.
pub(crate) trait Number: Copy {
    /// Zero, which an absent rank contributes.
    const ZERO: Self;

    /// Adds two numbers. Integers wrap around.
    fn add(self, other: Self) -> Self;

    /// Divides by `divisor`. Integers stay unchanged: no vector instruction divides them, so the
    /// fold divides the integer sums of a run afterwards.
    fn divide(self, divisor: Self) -> Self;

    /// Returns the smaller value, or a NaN if either is NaN.
    fn least(self, other: Self) -> Self;

    /// Returns the greater value, or a NaN if either is NaN.
    fn greatest(self, other: Self) -> Self;

    /// Returns this number, or the canonical quiet NaN for any NaN.
    fn canonical(self) -> Self;

    /// Converts the number of ranks to a divisor.
    fn of_world(world: u32) -> Self;
}

macro_rules! float_number {
    ($float:ident, $nan:literal, $of_world:expr) => {
        impl Number for $float {
            const ZERO: Self = 0.0;

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn divide(self, divisor: Self) -> Self {
                self / divisor
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                // Two zeros differ only in sign, and the OR keeps a minus sign. A NaN in `other`
                // fails both comparisons, so `lesser` is that NaN.
                let either = Self::from_bits(self.to_bits() | other.to_bits());
                let lesser = if self < other { self } else { other };
                let lesser = if self == other { either } else { lesser };
                if self.is_nan() { self } else { lesser }
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                let both = Self::from_bits(self.to_bits() & other.to_bits());
                let greater = if self > other { self } else { other };
                let greater = if self == other { both } else { greater };
                if self.is_nan() { self } else { greater }
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                Self::from_bits(if self.is_nan() { $nan } else { self.to_bits() })
            }

            #[inline(always)]
            fn of_world(world: u32) -> Self {
                $of_world(world)
            }
        }
    };
}

float_number!(f32, 0x7fc0_0000, |world: u32| world as f32);
float_number!(f64, 0x7ff8_0000_0000_0000, f64::from);

macro_rules! integer_number {
    ($int:ident) => {
        impl Number for $int {
            const ZERO: Self = 0;

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn divide(self, _divisor: Self) -> Self {
                self
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                Ord::min(self, other)
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                Ord::max(self, other)
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                self
            }

            #[inline(always)]
            fn of_world(world: u32) -> Self {
                // `check_fold` rejects a world that does not fit into this type.
                Self::try_from(world).unwrap_or(Self::MAX)
            }
        }
    };
}

integer_number!(i32);
integer_number!(i64);

/// Returns the value of the bf16 with the bits `x`.
#[inline(always)]
pub(crate) fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Returns the bits of the bf16 nearest to `x`.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a 16-bit pattern in 32 bits")]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    // Add half a step, minus one if the upper half is even, so that ties round to even. Above the
    // largest value, the carry turns the result into infinity.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if x.is_nan() { 0x7fc0 } else { rounded }) as u16
}

/// Returns the value of the f16 with the bits `x`.
#[inline(always)]
pub(crate) fn f16_to_f32(x: u16) -> f32 {
    let x = u32::from(x);
    // The exponent and fraction move to their f32 places, where the exponent is 112 too small.
    // Multiplication by 2^112 is exact and turns denormals into normal numbers.
    let shifted = (x & 0x7fff) << 13;
    let scaled = f32::from_bits(shifted) * f32::from_bits((112 + 127) << 23);
    let special = shifted | 0x7f80_0000;
    let magnitude = if shifted >= 0x0f80_0000 { special } else { scaled.to_bits() };
    f32::from_bits(magnitude | ((x & 0x8000) << 16))
}

/// Returns the bits of the f16 nearest to `x`.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a 16-bit pattern in 32 bits")]
pub(crate) fn f32_to_f16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16) & 0x8000;
    let bits = x.to_bits() & 0x7fff_ffff;
    // Denormals: between 0.5 and 1, adjacent f32 values differ by the smallest positive f16. So the
    // sum rounds to a multiple of the smallest f16 and holds the result in its low bits.
    let denormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    // Normal numbers: reduce the exponent by 112, and round as `f32_to_bf16` does.
    let rounded = bits.wrapping_add(0x0fff + ((bits >> 13) & 1)).wrapping_sub(112 << 23) >> 13;
    let finite = if bits < (113 << 23) { denormal } else { rounded };
    // The f16 nearest to 65520, and to any larger number, is infinity.
    let ordered = if bits >= 0x477f_f000 { 0x7c00 } else { finite };
    (if bits > 0x7f80_0000 { 0x7e00 } else { ordered | sign }) as u16
}
