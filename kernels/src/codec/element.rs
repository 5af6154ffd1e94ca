//! Single elements without branches, so that loops over them become vectors.

/// An element of a floating-point tensor, and as such of an elementwise wire type.
pub(super) trait Element {
    /// Its bytes.
    type Bytes: Copy;

    /// The elements of a run.
    fn elements(run: &[u8]) -> &[Self::Bytes];

    /// The elements of a run to be written.
    fn elements_mut(run: &mut [u8]) -> &mut [Self::Bytes];

    /// The nearest f32; exact, but for f64.
    fn load(bytes: Self::Bytes) -> f32;

    /// The nearest element, and *the* quiet NaN for any NaN.
    fn store(x: f32) -> Self::Bytes;
}

/// An element that is a number of its own to the machine.
pub(super) trait Wide: Element {
    /// The value; exact.
    fn load_wide(bytes: Self::Bytes) -> f64;

    /// The nearest element, and *the* quiet NaN for any NaN.
    fn store_wide(x: f64) -> Self::Bytes;
}

macro_rules! element {
    ($name:ident, $size:literal, $load:expr, $store:expr) => {
        /// Elements of this name.
        pub(super) struct $name;

        impl Element for $name {
            type Bytes = [u8; $size];

            #[inline(always)]
            fn elements(run: &[u8]) -> &[[u8; $size]] {
                run.as_chunks().0
            }

            #[inline(always)]
            fn elements_mut(run: &mut [u8]) -> &mut [[u8; $size]] {
                run.as_chunks_mut().0
            }

            #[inline(always)]
            fn load(bytes: [u8; $size]) -> f32 {
                $load(bytes)
            }

            #[inline(always)]
            fn store(x: f32) -> [u8; $size] {
                $store(x).to_le_bytes()
            }
        }
    };
}

element!(F32, 4, f32::from_le_bytes, canonical);
element!(F64, 8, |x| f64_to_f32(f64::from_le_bytes(x)), |x| canonical_wide(f64::from(x)));
element!(F16, 2, |x| f16_to_f32(u16::from_le_bytes(x)), f32_to_f16);
element!(Bf16, 2, |x| f32::from_bits(u32::from(u16::from_le_bytes(x)) << 16), f32_to_bf16);

impl Wide for F32 {
    #[inline(always)]
    fn load_wide(bytes: [u8; 4]) -> f64 {
        f64::from(f32::from_le_bytes(bytes))
    }

    #[inline(always)]
    fn store_wide(x: f64) -> [u8; 4] {
        Self::store(f64_to_f32(x))
    }
}

impl Wide for F64 {
    #[inline(always)]
    fn load_wide(bytes: [u8; 8]) -> f64 {
        f64::from_le_bytes(bytes)
    }

    #[inline(always)]
    fn store_wide(x: f64) -> [u8; 8] {
        canonical_wide(x).to_le_bytes()
    }
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "rounding is what this is for")]
fn f64_to_f32(x: f64) -> f32 {
    x as f32
}

#[inline(always)]
fn canonical(x: f32) -> f32 {
    f32::from_bits(if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() })
}

#[inline(always)]
fn canonical_wide(x: f64) -> f64 {
    f64::from_bits(if x.is_nan() { 0x7ff8_0000_0000_0000 } else { x.to_bits() })
}

/// The bits of the bf16 nearest to `x`.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper half of 32 bits")]
fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    // Half a step, less the bit that makes an even one of a tie; past the largest, the carry
    // makes an infinity.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if x.is_nan() { 0x7fc0 } else { rounded }) as u16
}

/// The value of the f16 with the bits `x`.
#[inline(always)]
fn f16_to_f32(x: u16) -> f32 {
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
fn f32_to_f16(x: f32) -> u16 {
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
