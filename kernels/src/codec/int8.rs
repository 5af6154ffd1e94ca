//! [`WireType::Int8`](racksum_proto::dtype::WireType::Int8) blocks: one f32 scale per block and one
//! signed byte per element.

use std::marker::PhantomData;

use racksum_proto::arith::{INT8_MAX, int8_scale};

use super::element::{Element, F32};
use crate::level::Task;
use crate::simd::Simd;

/// Task that encodes elements of `E` as one block.
pub(super) struct Encode<'a, E> {
    pub(super) src: &'a [u8],
    pub(super) block: &'a mut [u8],
    pub(super) element: PhantomData<E>,
}

/// Task that decodes one block to elements of `E`.
pub(super) struct Decode<'a, E> {
    pub(super) block: &'a [u8],
    pub(super) dst: &'a mut [u8],
    pub(super) element: PhantomData<E>,
}

impl<E: Element> Task for Encode<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let elements = E::elements(self.src);
        // The bits of magnitudes, read as integers, sort like the magnitudes, with infinity and the
        // NaNs last.
        let mut max_bits = 0;
        for x in elements {
            max_bits = Ord::max(max_bits, E::load(*x).to_bits() & 0x7fff_ffff);
        }
        let scale = int8_scale(f32::from_bits(max_bits));
        let (head, bytes) =
            self.block.split_first_chunk_mut().expect("check_encode_block refuses a short block");
        *head = F32::store(scale);
        if scale > 0.0 {
            for (x, byte) in elements.iter().zip(bytes) {
                *byte = quantise(E::load(*x), scale);
            }
        } else {
            bytes.fill(0);
        }
    }
}

impl<E: Element> Task for Decode<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (head, bytes) =
            self.block.split_first_chunk().expect("check_decode_block refuses a short block");
        let scale = f32::from_le_bytes(*head);
        for (byte, y) in bytes.iter().zip(E::elements_mut(self.dst)) {
            *y = E::store(f32::from(byte.cast_signed()) * scale);
        }
    }
}

#[inline(always)]
fn quantise(x: f32, scale: f32) -> u8 {
    // Adjacent f32 values near 1.5 * 2^23 differ by one. So the sum rounds the quotient to an
    // integer, ties to even, and holds that integer in its low bits.
    const SHIFT: f32 = 12_582_912.0;
    let [byte, ..] = ((x / scale).clamp(-INT8_MAX, INT8_MAX) + SHIFT).to_bits().to_le_bytes();
    byte
}
