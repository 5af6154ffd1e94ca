//! [`WireType::Fixed32`](crate::dtype::WireType::Fixed32): a block has one exponent and one i32 per
//! element. The value of an element is its integer times two to the power of the block's exponent.
//!
//! This is the arithmetic of SwitchML (Sapio et al., "Scaling Distributed Machine Learning with
//! In-Network Aggregation", NSDI 2021), which uses it because switches cannot add floats. There are
//! two differences. In SwitchML, the workers agree on the exponent of a packet one round ahead,
//! because a switch cannot rescale. Here, each rank picks the exponent of each block, which is
//! finer, and the fold rescales to the greatest exponent. In SwitchML, an infinity or a NaN becomes
//! a meaningless number; here it marks the block as overflowed.

use alloc::vec::Vec;

use super::FoldTerms;
use super::element::{element, round_ties_even_f64};
use crate::dtype::{Reduction, SCALE_LEN};

/// The exponent that marks a block as overflowed: an input was NaN or infinite, or a sum left the
/// range of i32. The block's integers are zero, and the block decodes to NaN.
pub const FIXED32_OVERFLOW: i32 = i32::MAX;

/// The least exponent that an encoder picks. Encoding multiplies by two to the power of the negated
/// exponent, which must be a normal f64. Only f64 tensors can reach the least exponent. If a
/// block's largest magnitude is less than about 2^-970, the block's resolution stays at 2^-1000
/// instead of shrinking with the magnitude.
pub const FIXED32_MIN_EXPONENT: i32 = -1000;

/// Returns the largest magnitude of an encoded integer in a job of `world` ranks: at least 1, and
/// small enough that the sum of one such integer per rank fits in an i32.
///
/// # Panics
///
/// If `world` is zero.
#[must_use]
#[inline]
pub fn fixed32_limit(world: u32) -> i32 {
    i32::try_from(i32::MAX.unsigned_abs() / world)
        .expect("a value of at most i32::MAX fits in an i32")
        .max(1)
}

/// Returns the exponent of a block whose largest magnitude is `max_abs`. The exponent is the least
/// for which `round(max_abs / 2^exponent)`, with ties to even, is within [`fixed32_limit`], but at
/// least [`FIXED32_MIN_EXPONENT`].
///
/// If any element is NaN or infinite, the caller passes NaN or infinity. The result is then
/// [`FIXED32_OVERFLOW`]. Returns 0 if all elements are zero.
///
/// # Panics
///
/// If `world` is zero.
#[must_use]
#[inline]
pub fn fixed32_exponent(max_abs: f64, world: u32) -> i32 {
    if !max_abs.is_finite() {
        return FIXED32_OVERFLOW;
    }
    if max_abs == 0.0 {
        return 0;
    }
    let limit = fixed32_limit(world);
    // If 2^k <= max_abs < 2^(k+1), and likewise for `limit`, the exponent is the difference of the
    // two values of k, or one more if `max_abs` would round to more than `limit`.
    let exponent = (floor_log2(max_abs) - floor_log2(f64::from(limit))).max(FIXED32_MIN_EXPONENT);
    let fits = round_ties_even_f64(max_abs * power_of_two(-exponent)) <= f64::from(limit);
    if fits { exponent } else { exponent + 1 }
}

/// Returns whether `block` is marked as overflowed. Returns false if the block is too short to have
/// an exponent.
#[must_use]
pub fn fixed32_overflowed(block: &[u8]) -> bool {
    block.first_chunk().is_some_and(|head| i32::from_le_bytes(*head) == FIXED32_OVERFLOW)
}

/// Returns the exponent of `block`, if the block takes part in the choice of the greatest exponent,
/// to which all blocks are rescaled. Returns `None` if the block is marked as overflowed or all its
/// integers are zero.
///
/// # Panics
///
/// If the block is too short to have an exponent.
#[must_use]
pub fn fixed32_counting_exponent(block: &[u8]) -> Option<i32> {
    let elements = (block.len() - SCALE_LEN) / 4;
    let counts = !fixed32_overflowed(block) && (0..elements).any(|i| integer(block, i) != 0);
    counts.then(|| exponent_of(block))
}

/// Rescales a block to a greater exponent, with the same result as in a fold with a block of that
/// exponent. Leaves a block unchanged if it is marked as overflowed, or if its own exponent is
/// already `exponent` or greater.
///
/// # Panics
///
/// If the block is too short to have an exponent.
pub fn fixed32_rescale(block: &mut [u8], exponent: i32) {
    let shift = i64::from(exponent) - i64::from(exponent_of(block));
    // The integers are never scaled up, so a smaller exponent would change the block's values.
    if fixed32_overflowed(block) || shift <= 0 {
        return;
    }
    let (head, data) = block.split_at_mut(SCALE_LEN);
    head.copy_from_slice(&exponent.to_le_bytes());
    for q in data.as_chunks_mut().0 {
        // The quotient fits, because its magnitude is at most that of the integer.
        *q = i32::try_from(rescale(i32::from_le_bytes(*q), shift)).unwrap_or(0).to_le_bytes();
    }
}

/// Encodes `values` as the block `out` (wire: W-51).
///
/// Multiplication by a power of two is exact, except for products below the normal f64 range, which
/// round to the integer 0 anyway.
pub(super) fn encode(values: impl Iterator<Item = f64> + Clone, world: u32, out: &mut [u8]) {
    let finite = values.clone().all(f64::is_finite);
    let max_abs = values.clone().map(f64::abs).fold(0.0, f64::max);
    let exponent = fixed32_exponent(if finite { max_abs } else { f64::NAN }, world);
    if exponent == FIXED32_OVERFLOW {
        return mark(out);
    }
    let scale = power_of_two(-exponent);
    store(exponent, values.map(|x| to_i32(round_ties_even_f64(x * scale))), out);
}

/// Returns the value of element `i` of `block`, rounded once if f64 cannot hold it.
pub(super) fn decode(block: &[u8], i: usize) -> f64 {
    let exponent = exponent_of(block);
    if exponent == FIXED32_OVERFLOW {
        return f64::NAN;
    }
    // The product takes two steps, because two to the power of the exponent may be out of range
    // even if the product is in range. The first step is exact. For exponents beyond ±2000, the
    // product is infinite or zero anyway.
    let exponent = exponent.clamp(-2000, 2000);
    let half = exponent / 2;
    f64::from(integer(block, i)) * power_of_two(half) * power_of_two(exponent - half)
}

/// Rescales each block to the greatest exponent of the blocks that are not all zero, and folds the
/// integers. If all blocks are zero, the result has the greatest of their exponents.
///
/// The result is marked as overflowed if an input is, or if an integer of the result is outside the
/// range of i32. An average is rounded once, ties to even.
pub(super) fn fold_block(reduction: Reduction, fold: FoldTerms, inputs: &[&[u8]], out: &mut [u8]) {
    if inputs.iter().any(|block| fixed32_overflowed(block)) {
        return mark(out);
    }
    let elements = (out.len() - SCALE_LEN) / 4;
    let exponent = inputs
        .iter()
        .filter_map(|block| fixed32_counting_exponent(block))
        .max()
        .or_else(|| inputs.iter().map(|block| exponent_of(block)).max())
        .expect("check_fold refuses a fold without inputs");
    let folded: Option<Vec<i32>> = (0..elements)
        .map(|i| {
            let values = inputs.iter().map(|block| {
                let shift = i64::from(exponent) - i64::from(exponent_of(block));
                rescale(integer(block, i), shift)
            });
            i32::try_from(fold_integers(reduction, fold, values)).ok()
        })
        .collect();
    match folded {
        Some(integers) => store(exponent, integers.into_iter(), out),
        None => mark(out),
    }
}

/// Folds the integers of one element over the ranks. `values` must not be empty.
fn fold_integers(reduction: Reduction, fold: FoldTerms, values: impl Iterator<Item = i64>) -> i64 {
    let absent = fold.absent.then_some(0);
    let folded = match reduction {
        Reduction::Sum => return values.sum(),
        Reduction::Avg => return divide_ties_even(values.sum(), i64::from(fold.world)),
        Reduction::Min => values.chain(absent).min(),
        Reduction::Max => values.chain(absent).max(),
    };
    folded.expect("check_fold refuses a fold without inputs")
}

/// Returns `q / 2^shift`, ties to even, for a positive `shift`, and otherwise `q`. A negative shift
/// occurs only for a block whose integers are all zero.
fn rescale(q: i32, shift: i64) -> i64 {
    let q = i64::from(q);
    if shift <= 0 {
        return q;
    }
    // For a shift of 32 or more, the quotient is at most one half, which rounds to zero.
    if shift >= 32 { 0 } else { divide_ties_even(q, 1 << shift) }
}

/// Returns `a / b`, ties to even, for a positive `b`.
fn divide_ties_even(a: i64, b: i64) -> i64 {
    let (quotient, remainder) = (a.div_euclid(b), a.rem_euclid(b));
    let up = match (2 * remainder).cmp(&b) {
        core::cmp::Ordering::Less => false,
        core::cmp::Ordering::Equal => quotient % 2 != 0,
        core::cmp::Ordering::Greater => true,
    };
    quotient + i64::from(up)
}

/// Returns the binary logarithm of a positive finite `x`, rounded down; -1023 for a denormal.
fn floor_log2(x: f64) -> i32 {
    let field = (x.to_bits() >> 52) & 0x7ff;
    i32::try_from(field).expect("an exponent field of eleven bits fits an i32") - 1023
}

/// Returns two to the power of `exponent`; the result must be a normal f64.
fn power_of_two(exponent: i32) -> f64 {
    let field = u64::try_from(exponent + 1023).expect("the exponent is at least -1022");
    f64::from_bits(field << 52)
}

#[expect(clippy::cast_possible_truncation, reason = "the whole number is within `fixed32_limit`")]
fn to_i32(x: f64) -> i32 {
    x as i32
}

fn exponent_of(block: &[u8]) -> i32 {
    i32::from_le_bytes(element(&block[..SCALE_LEN]))
}

fn integer(block: &[u8], i: usize) -> i32 {
    i32::from_le_bytes(element(&block[SCALE_LEN + 4 * i..][..4]))
}

fn store(exponent: i32, integers: impl Iterator<Item = i32>, out: &mut [u8]) {
    let (head, data) = out.split_at_mut(SCALE_LEN);
    head.copy_from_slice(&exponent.to_le_bytes());
    for (q, y) in integers.zip(data.chunks_exact_mut(4)) {
        y.copy_from_slice(&q.to_le_bytes());
    }
}

fn mark(out: &mut [u8]) {
    out.fill(0);
    out[..SCALE_LEN].copy_from_slice(&FIXED32_OVERFLOW.to_le_bytes());
}
