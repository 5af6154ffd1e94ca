//! Fold of [`WireType::Fixed32`](racksum_proto::dtype::WireType::Fixed32) blocks: rescale to one
//! exponent, then fold the integers in 64 bits.

use std::marker::PhantomData;

use racksum_proto::arith::{FIXED32_OVERFLOW, fixed32_overflowed};

use super::combine::Combine;
use crate::level::Task;
use crate::simd::Simd;

/// Task that folds the blocks `inputs` into the block `out`. All of them have the same length.
pub(super) struct Run<'a, C> {
    pub(super) inputs: &'a [&'a [u8]],
    pub(super) out: &'a mut [u8],
    /// The divisor for an average, applied at the end.
    pub(super) divisor: Option<f64>,
    /// Whether some rank is absent. If so, a zero takes part in a minimum or maximum.
    pub(super) absent: bool,
    pub(super) combine: PhantomData<C>,
}

impl<C: Combine> Task for Run<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let (head, words) =
            self.out.split_first_chunk_mut().expect("check_fold refuses a short block");
        let words = words.as_chunks_mut().0;
        let exponent = common_exponent(self.inputs);
        let mut overflow = self.inputs.iter().any(|block| fixed32_overflowed(block));
        let mut start = 0;
        for words in words.chunks_mut(CHUNK) {
            let sums = &mut [0; CHUNK][..words.len()];
            fold::<C>(self.inputs, exponent, start, sums);
            if let Some(divisor) = self.divisor {
                for sum in sums.iter_mut() {
                    *sum = divide(*sum, divisor);
                }
            }
            if C::COUNTS_ABSENT && self.absent {
                for sum in sums.iter_mut() {
                    *sum = C::numbers(*sum, 0);
                }
            }
            overflow |= store(sums, words);
            start += words.len();
        }
        if overflow {
            *head = FIXED32_OVERFLOW.to_le_bytes();
            words.fill([0; 4]);
        } else {
            *head = exponent.to_le_bytes();
        }
    }
}

/// Folds elements into `sums`, rescaled to the exponent `common`: as many as `sums` holds, starting
/// with the element at index `start`.
#[inline(always)]
fn fold<C: Combine>(inputs: &[&[u8]], common: i32, start: usize, sums: &mut [i64]) {
    let (first, rest) = inputs.split_first().expect("check_fold refuses an empty fold");
    let (exponent, words) = split(first);
    let scaling = Rescale::new(common, exponent);
    for (sum, word) in sums.iter_mut().zip(&words[start..]) {
        *sum = scaling.apply(i32::from_le_bytes(*word));
    }
    for block in rest {
        let (exponent, words) = split(block);
        if exponent >= common {
            // Usually the exponents are equal, and no word needs rescaling. Only a block of zeros
            // can have an exponent greater than `common`.
            for (sum, word) in sums.iter_mut().zip(&words[start..]) {
                *sum = C::numbers(*sum, i64::from(i32::from_le_bytes(*word)));
            }
        } else {
            let scaling = Rescale::new(common, exponent);
            for (sum, word) in sums.iter_mut().zip(&words[start..]) {
                *sum = C::numbers(*sum, scaling.apply(i32::from_le_bytes(*word)));
            }
        }
    }
}

/// Writes `sums` to `words`, and returns whether any sum does not fit into i32.
#[inline(always)]
fn store(sums: &[i64], words: &mut [[u8; 4]]) -> bool {
    let mut excess = 0;
    for (sum, word) in sums.iter().zip(words) {
        let low = low_half(*sum);
        excess |= *sum ^ i64::from(low);
        *word = low.to_le_bytes();
    }
    excess != 0
}

/// Division of an i32 by a power of two, which rounds ties to even.
#[derive(Clone, Copy)]
struct Rescale {
    shift: u32,
    /// The bits that are shifted out.
    mask: u32,
    /// The value of these bits at a tie.
    tie: u32,
    /// Mask of the result: all ones, or zero if every quotient is zero.
    keep: i32,
}

impl Rescale {
    /// Creates the division that converts words of exponent `from` to exponent `to`. If `to` is
    /// less than `from`, the block has only zeros.
    #[inline(always)]
    fn new(to: i32, from: i32) -> Self {
        let shift = u32::try_from(i64::from(to) - i64::from(from)).unwrap_or(0);
        if shift == 0 {
            // No remainder exceeds this tie, so nothing rounds up.
            Self { shift: 0, mask: 0, tie: u32::MAX, keep: -1 }
        } else if shift < 32 {
            Self { shift, mask: (1 << shift) - 1, tie: 1 << (shift - 1), keep: -1 }
        } else {
            // Every quotient is at most a half in magnitude, and a tie rounds to zero.
            Self { shift: 0, mask: 0, tie: u32::MAX, keep: 0 }
        }
    }

    #[inline(always)]
    fn apply(self, q: i32) -> i64 {
        let floor = q >> self.shift;
        let remainder = q.cast_unsigned() & self.mask;
        // Round up above the tie, and also at the tie if the floor is odd.
        let up = remainder + (floor & 1).cast_unsigned() > self.tie;
        i64::from((floor + i32::from(up)) & self.keep)
    }
}

/// Returns the quotient, rounded to the nearest integer with ties to even.
///
/// The result is exact: a sum of 2^16 i32 values fits into f64, and the division errs by less than
/// the distance between a tie and the nearest quotient that is not a tie.
#[inline(always)]
fn divide(sum: i64, divisor: f64) -> i64 {
    // Adjacent f64 values near 1.5 * 2^52 differ by one, and so do their bit patterns.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    const SHIFT_BITS: i64 = SHIFT.to_bits().cast_signed();
    let sum = f64::from_bits((sum + SHIFT_BITS).cast_unsigned()) - SHIFT;
    (sum / divisor + SHIFT).to_bits().cast_signed() - SHIFT_BITS
}

/// Returns the greatest exponent of the blocks that are not all zero, or of all blocks if every
/// block is zero.
#[inline(always)]
fn common_exponent(inputs: &[&[u8]]) -> i32 {
    let (first, _) = split(inputs[0]);
    if inputs.iter().all(|block| split(block).0 == first) {
        return first;
    }
    let mut common = None;
    for block in inputs {
        let (exponent, words) = split(block);
        if common.is_none_or(|common| exponent > common) && words.iter().any(|word| *word != [0; 4])
        {
            common = Some(exponent);
        }
    }
    let greatest = || inputs.iter().map(|block| split(block).0).max().unwrap_or(first);
    common.unwrap_or_else(greatest)
}

/// Splits a block into its exponent and its words.
#[inline(always)]
fn split(block: &[u8]) -> (i32, &[[u8; 4]]) {
    let (exponent, words) = block.split_first_chunk().expect("check_fold refuses a short block");
    (i32::from_le_bytes(*exponent), words.as_chunks().0)
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower half is wanted")]
fn low_half(x: i64) -> i32 {
    x as i32
}

/// Number of elements folded at a time.
const CHUNK: usize = 256;
