//! Fold of [`WireType::Int8`](racksum_proto::dtype::WireType::Int8) blocks: decode, fold as f32,
//! encode again.

use std::marker::PhantomData;

use racksum_proto::arith::{INT8_MAX, MAX_BLOCK_ELEMENTS, int8_scale};
use racksum_proto::dtype::SCALE_LEN;

use super::combine::Combine;
use crate::level::Task;
use crate::number::Number;
use crate::simd::Simd;

/// Task that folds the blocks `inputs` into the block `out`. All of them have the same length.
pub(super) struct Run<'a, C> {
    pub(super) inputs: &'a [&'a [u8]],
    pub(super) out: &'a mut [u8],
    /// The divisor for an average, applied at the end.
    pub(super) divisor: Option<f32>,
    /// Whether some rank is absent. If so, a zero takes part in a minimum or maximum.
    pub(super) absent: bool,
    pub(super) combine: PhantomData<C>,
}

impl<C: Combine> Task for Run<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let elements = self.out.len() - SCALE_LEN;
        // Use a small buffer if possible: clearing a buffer for the longest block takes as long as
        // the fold of a short block.
        if elements <= COMMON_ELEMENTS {
            self.fold(&mut [0.0; COMMON_ELEMENTS][..elements]);
        } else {
            self.fold(&mut [0.0; MAX_BLOCK_ELEMENTS][..elements]);
        }
    }
}

impl<C: Combine> Run<'_, C> {
    #[inline(always)]
    fn fold(self, values: &mut [f32]) {
        let (first, rest) = self.inputs.split_first().expect("check_fold refuses an empty fold");
        let (scale, bytes) = split(first);
        for (value, byte) in values.iter_mut().zip(bytes) {
            *value = decode(*byte, scale);
        }
        for block in rest {
            let (scale, bytes) = split(block);
            for (value, byte) in values.iter_mut().zip(bytes) {
                *value = C::numbers(*value, decode(*byte, scale));
            }
        }
        if let Some(divisor) = self.divisor {
            for value in values.iter_mut() {
                *value /= divisor;
            }
        }
        if C::COUNTS_ABSENT && self.absent {
            for value in values.iter_mut() {
                *value = C::numbers(*value, f32::ZERO);
            }
        }
        encode(values, self.out);
    }
}

/// Splits a block into its scale and its bytes.
#[inline(always)]
fn split(block: &[u8]) -> (f32, &[u8]) {
    let (scale, bytes) = block.split_first_chunk().expect("check_fold refuses a short block");
    (f32::from_le_bytes(*scale), bytes)
}

#[inline(always)]
fn decode(byte: u8, scale: f32) -> f32 {
    f32::from(byte.cast_signed()) * scale
}

/// Encodes `values` as the block `out`.
#[inline(always)]
fn encode(values: &[f32], out: &mut [u8]) {
    // The bits of magnitudes, read as integers, sort like the magnitudes, with infinity and the
    // NaNs last.
    let mut max_bits = 0;
    for value in values {
        max_bits = Ord::max(max_bits, value.to_bits() & 0x7fff_ffff);
    }
    let scale = int8_scale(f32::from_bits(max_bits));
    let (head, bytes) = out.split_first_chunk_mut().expect("check_fold refuses a short block");
    *head = scale.canonical().to_le_bytes();
    if scale > 0.0 {
        for (value, byte) in values.iter().zip(bytes) {
            *byte = quantise(*value, scale);
        }
    } else {
        bytes.fill(0);
    }
}

#[inline(always)]
fn quantise(value: f32, scale: f32) -> u8 {
    // Adjacent f32 values near 1.5 * 2^23 differ by one. So the sum rounds the quotient to an
    // integer, ties to even, and holds that integer in its low bits.
    const SHIFT: f32 = 12_582_912.0;
    let [byte, ..] = ((value / scale).clamp(-INT8_MAX, INT8_MAX) + SHIFT).to_bits().to_le_bytes();
    byte
}

/// Limit on the elements of a block that is folded in a small buffer: the default block size.
const COMMON_ELEMENTS: usize = 256;
