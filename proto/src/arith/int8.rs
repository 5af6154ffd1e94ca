//! [`WireType::Int8`](crate::dtype::WireType::Int8): a block has one f32 scale and one signed byte
//! per element. The value of an element is its byte times the scale.

use alloc::vec::Vec;

use super::FoldTerms;
use super::element::{element, f32_store, reduce, round_ties_even_f32};
use crate::dtype::{Reduction, SCALE_LEN};

/// The largest magnitude of an encoded element. The range is symmetric: the encoder never produces
/// -128.
pub const INT8_MAX: f32 = 127.0;

/// Returns the scale of a block whose largest magnitude is `max_abs`. An element is encoded as
/// `round(x / scale)`, ties to even, within ±127.
///
/// - If any element is NaN or infinite, the caller passes NaN or infinity as `max_abs`. The scale
///   is then the quiet NaN, and the block decodes to NaN.
/// - If all elements are zero, the scale is +0.
/// - The smallest normal f32 replaces a denormal scale, since denormals are too coarse for scales.
///   The error stays within half a scale, here 2^-127.
/// - The scale is at most the greatest f32 whose product with 127 is finite.
#[must_use]
#[inline]
pub fn int8_scale(max_abs: f32) -> f32 {
    if !max_abs.is_finite() {
        f32::NAN
    } else if max_abs == 0.0 {
        0.0
    } else {
        (max_abs / INT8_MAX).clamp(f32::MIN_POSITIVE, MAX_SCALE)
    }
}

/// Encodes `values` as the block `out` (wire: W-50).
pub(super) fn encode(values: impl Iterator<Item = f32> + Clone, out: &mut [u8]) {
    let finite = values.clone().all(f32::is_finite);
    let max_abs = values.clone().map(f32::abs).fold(0.0, f32::max);
    let max_abs = if finite { max_abs } else { f32::NAN };
    let scale = int8_scale(max_abs);
    let (head, data) = out.split_at_mut(SCALE_LEN);
    head.copy_from_slice(&f32_store(scale));
    for (x, q) in values.zip(data) {
        *q = quantise(x, scale).to_le_bytes()[0];
    }
}

/// Returns the value of element `i` of `block`.
pub(super) fn decode(block: &[u8], i: usize) -> f32 {
    let (head, data) = block.split_at(SCALE_LEN);
    f32::from(i8::from_le_bytes([data[i]])) * f32::from_le_bytes(element(head))
}

/// Decodes each block, folds the values as f32, and encodes the result again.
pub(super) fn fold_block(reduction: Reduction, fold: FoldTerms, inputs: &[&[u8]], out: &mut [u8]) {
    let folded: Vec<f32> = (0..out.len() - SCALE_LEN)
        .map(|i| reduce(reduction, fold, inputs.iter().map(|block| decode(block, i))))
        .collect();
    encode(folded.into_iter(), out);
}

#[expect(clippy::cast_possible_truncation, reason = "the whole number is within ±127")]
fn quantise(x: f32, scale: f32) -> i8 {
    if scale > 0.0 { round_ties_even_f32((x / scale).clamp(-INT8_MAX, INT8_MAX)) as i8 } else { 0 }
}

/// The greatest scale whose product with 127 is finite. The division rounds up, so 127 times the
/// quotient itself would be infinite.
const MAX_SCALE: f32 = (f32::MAX / INT8_MAX).next_down();
