//! Branch-free operations on single elements. The compiler turns loops over elements into vector
//! code.

use crate::number::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Element of a floating-point tensor, and therefore of an elementwise wire type.
pub(super) trait Element {
    /// The bytes of one element.
    type Bytes: Copy;

    /// Splits a run into its elements.
    fn elements(run: &[u8]) -> &[Self::Bytes];

    /// Splits a run into its elements, which the caller may overwrite.
    fn elements_mut(run: &mut [u8]) -> &mut [Self::Bytes];

    /// Converts an element to the nearest f32. The conversion is exact for all types but f64.
    fn load(bytes: Self::Bytes) -> f32;

    /// Converts a number to the nearest element, and any NaN to the canonical quiet NaN.
    fn store(x: f32) -> Self::Bytes;
}

/// Element of type f32 or f64: the types that the wire type `Fixed32` can carry.
pub(super) trait Wide: Element {
    /// Converts an element to f64, exactly.
    fn load_wide(bytes: Self::Bytes) -> f64;

    /// Converts a number to the nearest element, and any NaN to the canonical quiet NaN.
    fn store_wide(x: f64) -> Self::Bytes;
}

macro_rules! element {
    ($name:ident, $size:literal, $load:expr, $store:expr) => {
        /// Marker type for one element type.
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
element!(Bf16, 2, |x| bf16_to_f32(u16::from_le_bytes(x)), f32_to_bf16);

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
#[expect(clippy::cast_possible_truncation, reason = "this function rounds on purpose")]
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
