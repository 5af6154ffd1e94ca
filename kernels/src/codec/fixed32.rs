//! [`WireType::Fixed32`](racksum_proto::dtype::WireType::Fixed32) blocks: one exponent per block
//! and one i32 per element.

use std::marker::PhantomData;

use racksum_proto::arith::{FIXED32_OVERFLOW, fixed32_exponent};

use super::element::Wide;
use crate::level::Task;
use crate::simd::Simd;

/// Task that encodes elements of `E` as one block.
pub(super) struct Encode<'a, E> {
    pub(super) src: &'a [u8],
    pub(super) block: &'a mut [u8],
    pub(super) world: u32,
    pub(super) element: PhantomData<E>,
}

/// Task that decodes one block to elements of `E`.
pub(super) struct Decode<'a, E> {
    pub(super) block: &'a [u8],
    pub(super) dst: &'a mut [u8],
    pub(super) element: PhantomData<E>,
}

impl<E: Wide> Task for Encode<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let elements = E::elements(self.src);
        // The bits of magnitudes, read as integers, sort like the magnitudes, with infinity and the
        // NaNs last.
        let mut max_bits = 0;
        for x in elements {
            max_bits = Ord::max(max_bits, E::load_wide(*x).to_bits() & (u64::MAX >> 1));
        }
        let exponent = fixed32_exponent(f64::from_bits(max_bits), self.world);
        let (head, words) =
            self.block.split_first_chunk_mut().expect("check_encode_block refuses a short block");
        *head = exponent.to_le_bytes();
        if exponent == FIXED32_OVERFLOW {
            words.fill(0);
            return;
        }
        let scale = power_of_two(-exponent);
        for (x, word) in elements.iter().zip(words.as_chunks_mut().0) {
            *word = round(E::load_wide(*x) * scale).to_le_bytes();
        }
    }
}

impl<E: Wide> Task for Decode<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (head, words) =
            self.block.split_first_chunk().expect("check_decode_block refuses a short block");
        let exponent = i32::from_le_bytes(*head);
        let dst = E::elements_mut(self.dst);
        if exponent == FIXED32_OVERFLOW {
            dst.fill(E::store_wide(f64::NAN));
            return;
        }
        // Use two factors, as `racksum_proto::arith` does: some exponents are beyond the range of a
        // single power of two.
        let exponent = exponent.clamp(-2000, 2000);
        let (first, second) = (power_of_two(exponent / 2), power_of_two(exponent - exponent / 2));
        for (word, y) in words.as_chunks().0.iter().zip(dst) {
            *y = E::store_wide(f64::from(i32::from_le_bytes(*word)) * first * second);
        }
    }
}

/// Rounds `x` to the nearest integer, ties to even. `x` must be within the range of i32.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the low half of the bits is wanted")]
fn round(x: f64) -> i32 {
    // Adjacent f64 values near 1.5 * 2^52 differ by one, so the sum rounds `x` to an integer and
    // holds that integer in its low bits.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    ((x + SHIFT).to_bits() as u32).cast_signed()
}

/// Returns two to the power of `exponent`, which must be the exponent of a normal f64.
#[inline(always)]
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(u64::from((exponent + 1023).cast_unsigned()) << 52)
}
