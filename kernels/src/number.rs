//! Single numbers without branches, so that the compiler makes vectors of a few of them.

/// A number that contributions are folded in.
pub(crate) trait Number: Copy {
    /// What an absent rank holds.
    const ZERO: Self;

    /// The sum; of integers, wrapped.
    fn add(self, other: Self) -> Self;

    /// This divided by `divisor`. Integers stay what they are: no vector divides them, so their
    /// averages are made of the sums of a run.
    fn divide(self, divisor: Self) -> Self;

    /// The lesser value; a NaN if either is one.
    fn least(self, other: Self) -> Self;

    /// The greater value; a NaN if either is one.
    fn greatest(self, other: Self) -> Self;

    /// This, with *the* quiet NaN for any NaN.
    fn canonical(self) -> Self;

    /// The number of ranks, as a divisor.
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
                // Of two zeros, the bits of either sign. A NaN in `other` fails both tests.
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
                // check_fold refuses a world so large.
                Self::try_from(world).unwrap_or(Self::MAX)
            }
        }
    };
}

integer_number!(i32);
integer_number!(i64);

/// The value of the bf16 with the bits `x`.
#[inline(always)]
pub(crate) fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// The bits of the bf16 nearest to `x`.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper half of 32 bits")]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    // Half a step, less the bit that makes an even one of a tie; past the largest, the carry
    // makes an infinity.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if x.is_nan() { 0x7fc0 } else { rounded }) as u16
}

/// The value of the f16 with the bits `x`.
#[inline(always)]
pub(crate) fn f16_to_f32(x: u16) -> f32 {
    let x = u32::from(x);
    // The exponent and fraction in their f32 places, where the exponent is 112 too small. The
    // product with 2^112 is exact, and makes normal numbers of denormals.
    let shifted = (x & 0x7fff) << 13;
    let scaled = f32::from_bits(shifted) * f32::from_bits((112 + 127) << 23);
    let special = shifted | 0x7f80_0000;
    let magnitude = if shifted >= 0x0f80_0000 { special } else { scaled.to_bits() };
    f32::from_bits(magnitude | ((x & 0x8000) << 16))
}

/// The bits of the f16 nearest to `x`.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a 16-bit pattern in 32 bits")]
pub(crate) fn f32_to_f16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16) & 0x8000;
    let bits = x.to_bits() & 0x7fff_ffff;
    // Denormals: at 0.5 the distance between f32 neighbours is the least f16, so that the sum
    // rounds to it and has the result in its low bits.
    let denormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    // The rest: exponent less 112, and half a step less the bit that makes an even one of a tie.
    let rounded = bits.wrapping_add(0x0fff + ((bits >> 13) & 1)).wrapping_sub(112 << 23) >> 13;
    let finite = if bits < (113 << 23) { denormal } else { rounded };
    // From 65520 on the nearest is infinity.
    let ordered = if bits >= 0x477f_f000 { 0x7c00 } else { finite };
    (if bits > 0x7f80_0000 { 0x7e00 } else { ordered | sign }) as u16
}
