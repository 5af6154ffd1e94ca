//! [`WireType::Fixed32`](crate::dtype::WireType::Fixed32): a block is an exponent and an i32 an
//! element; an element is worth its integer times two to the exponent.
//!
//! This is the arithmetic of SwitchML (Sapio et al., "Scaling Distributed Machine Learning with
//! In-Network Aggregation", NSDI 2021), where it made up for switches that cannot add floats.
//! Two things differ. SwitchML agrees on the exponent of a packet one round ahead, because a
//! switch cannot rescale; here each rank picks the exponent of each block, finer than any
//! agreement, and the fold rescales to the greatest. And SwitchML lets an infinity or a NaN
//! through as garbage; here it marks the block.

use alloc::vec::Vec;

use super::Fold;
use super::element::{element, round_ties_even_f64};
use crate::dtype::{Reduction, SCALE_LEN};

/// The exponent that marks a block with a value that cannot be represented: a NaN or an infinity
/// went in, or a sum left the range of i32. Its integers are zero, and it decodes to NaN.
pub const FIXED32_OVERFLOW: i32 = i32::MAX;

/// The least exponent an encoder picks, so that two to its inverse is a normal f64. Only f64
/// tensors can get there: in a block whose largest magnitude is below about 2^-970 the resolution
/// is 2^-1000 and no longer relative.
pub const FIXED32_MIN_EXPONENT: i32 = -1000;

/// The largest magnitude of an encoded integer in a world of `world` ranks, so that their sum
/// fits an i32. At least one.
///
/// # Panics
///
/// If `world` is zero.
#[must_use]
#[inline]
pub fn fixed32_limit(world: u32) -> i32 {
    i32::try_from(i32::MAX.unsigned_abs() / world).expect("at most i32::MAX").max(1)
}

/// The exponent of a block whose largest magnitude is `max_abs`: the least, but for
/// [`FIXED32_MIN_EXPONENT`], with which `round(x / 2^exponent)`, ties to even, is within
/// [`fixed32_limit`].
///
/// If any element is NaN or infinite (say so with a `max_abs` that is), it is
/// [`FIXED32_OVERFLOW`]; if all are zero, it is 0.
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
    // With 2^k <= max_abs < 2^(k+1), and the same for `limit`, the exponent is the difference of
    // the two k, or one more where the fractions do not fit.
    let exponent = (floor_log2(max_abs) - floor_log2(f64::from(limit))).max(FIXED32_MIN_EXPONENT);
    let fits = round_ties_even_f64(max_abs * power_of_two(-exponent)) <= f64::from(limit);
    if fits { exponent } else { exponent + 1 }
}

/// Whether `block` is marked as holding a value that cannot be represented. A block too short to
/// have an exponent is not.
#[must_use]
pub fn fixed32_overflowed(block: &[u8]) -> bool {
    block.first_chunk().is_some_and(|head| i32::from_le_bytes(*head) == FIXED32_OVERFLOW)
}

/// The exponent by which a block counts when blocks are rescaled to the greatest; `None` if it is
/// marked, or all its integers are zero.
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

/// Rescales a block to a greater exponent, as a fold of blocks does of which one has it. One that
/// is marked stays so, and one that has a greater exponent, which none should, stays as it is.
///
/// # Panics
///
/// If the block is too short to have an exponent.
pub fn fixed32_rescale(block: &mut [u8], exponent: i32) {
    let shift = i64::from(exponent) - i64::from(exponent_of(block));
    // Integers of a smaller exponent would be worth something else.
    if fixed32_overflowed(block) || shift <= 0 {
        return;
    }
    let (head, data) = block.split_at_mut(SCALE_LEN);
    head.copy_from_slice(&exponent.to_le_bytes());
    for q in data.as_chunks_mut().0 {
        // A quotient is no greater.
        *q = i32::try_from(rescale(i32::from_le_bytes(*q), shift)).unwrap_or(0).to_le_bytes();
    }
}

/// Encodes `values` as the block `out` (wire: W-51).
///
/// The products with a power of two are exact, but for those below the normal f64 range, which
/// round to the integer 0 either way.
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

/// The value of element `i` of `block`, rounded once where f64 cannot hold it.
pub(super) fn decode(block: &[u8], i: usize) -> f64 {
    let exponent = exponent_of(block);
    if exponent == FIXED32_OVERFLOW {
        return f64::NAN;
    }
    // In two steps, because two to the exponent alone may be out of range where the product is
    // not; the first is exact. Past ±2000 the product is infinite, or zero, all the same.
    let exponent = exponent.clamp(-2000, 2000);
    let half = exponent / 2;
    f64::from(integer(block, i)) * power_of_two(half) * power_of_two(exponent - half)
}

/// Rescales each block to the greatest exponent of those that are not all zero (of all, if all
/// are), and folds the integers.
///
/// A marked block marks the result, and so does a result that no i32 holds. An average is
/// rounded once, ties to even.
pub(super) fn fold_block(reduction: Reduction, fold: Fold, inputs: &[&[u8]], out: &mut [u8]) {
    if inputs.iter().any(|block| fixed32_overflowed(block)) {
        return mark(out);
    }
    let elements = (out.len() - SCALE_LEN) / 4;
    let exponent = inputs
        .iter()
        .filter_map(|block| fixed32_counting_exponent(block))
        .max()
        .or_else(|| inputs.iter().map(|block| exponent_of(block)).max())
        .expect("check_fold refuses a fold of nothing");
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

/// Folds the integers of one element over the ranks. There is at least one.
fn fold_integers(reduction: Reduction, fold: Fold, values: impl Iterator<Item = i64>) -> i64 {
    let absent = fold.absent.then_some(0);
    let folded = match reduction {
        Reduction::Sum => return values.sum(),
        Reduction::Avg => return divide_ties_even(values.sum(), i64::from(fold.world)),
        Reduction::Min => values.chain(absent).min(),
        Reduction::Max => values.chain(absent).max(),
    };
    folded.expect("check_fold refuses a fold of nothing")
}

/// `q / 2^shift`, ties to even. A negative shift is that of a block whose integers are all zero.
fn rescale(q: i32, shift: i64) -> i64 {
    let q = i64::from(q);
    if shift <= 0 {
        return q;
    }
    // Half of 2^32 is no less than any magnitude of an i32, and a tie at one half goes to zero.
    if shift >= 32 { 0 } else { divide_ties_even(q, 1 << shift) }
}

/// `a / b`, ties to even, for a positive `b`.
fn divide_ties_even(a: i64, b: i64) -> i64 {
    let (quotient, remainder) = (a.div_euclid(b), a.rem_euclid(b));
    let up = match (2 * remainder).cmp(&b) {
        core::cmp::Ordering::Less => false,
        core::cmp::Ordering::Equal => quotient % 2 != 0,
        core::cmp::Ordering::Greater => true,
    };
    quotient + i64::from(up)
}

/// The exponent of two in a positive finite `x`; for a denormal, the one below all normal ones.
fn floor_log2(x: f64) -> i32 {
    let field = (x.to_bits() >> 52) & 0x7ff;
    i32::try_from(field).expect("eleven bits") - 1023
}

/// Two to the `exponent`, which must be one of a normal f64.
fn power_of_two(exponent: i32) -> f64 {
    let field = u64::try_from(exponent + 1023).expect("exponents are at least -1022");
    f64::from_bits(field << 52)
}

#[expect(clippy::cast_possible_truncation, reason = "a whole number within the limit")]
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
