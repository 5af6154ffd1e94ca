//! Detection of zero blocks, which are not sent.

use crate::dtype::DType;

/// The maximum number of blocks in a window: one `u64` holds the occupancy of a window.
pub const WINDOW_BLOCKS: usize = 64;

/// Returns the bits to compare with zero in a `u64` that holds elements: all bits except the signs
/// of floats.
#[must_use]
pub const fn magnitude_mask(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 0x7fff_ffff_7fff_ffff,
        DType::F64 => 0x7fff_ffff_ffff_ffff,
        DType::F16 | DType::Bf16 => 0x7fff_7fff_7fff_7fff,
        DType::I32 | DType::I64 => u64::MAX,
    }
}

/// Returns the occupancy of `window`: bit `b` is set if block `b`, of `block_elements` elements,
/// has a non-zero element. The last block may be short.
///
/// -0.0 counts as zero; NaN, infinities and denormals do not. Every element of a zero block is
/// rewritten to +0.0: if no rank sends the block, every rank keeps its own copy, and all copies
/// must have the same bits.
///
/// # Panics
///
/// If `block_elements` is zero, or `window` has more than [`WINDOW_BLOCKS`] blocks or ends
/// within an element.
pub fn scan_window(dtype: DType, block_elements: usize, window: &mut [u8]) -> u64 {
    assert!(window.len().is_multiple_of(dtype.size()), "a window must have whole elements");
    assert!(block_elements > 0, "a block must have at least one element");
    let block_len = block_elements * dtype.size();
    assert!(
        window.len().div_ceil(block_len) <= WINDOW_BLOCKS,
        "a window must have at most 64 blocks"
    );
    // wire: W-48
    let mut occupancy = 0;
    for (b, block) in window.chunks_mut(block_len).enumerate() {
        if block.chunks_exact(dtype.size()).all(|x| is_zero(dtype, x)) {
            block.fill(0);
        } else {
            occupancy |= 1 << b;
        }
    }
    occupancy
}

/// Returns whether an element is +0 or -0.
fn is_zero(dtype: DType, x: &[u8]) -> bool {
    let mut bytes = [0; 8];
    bytes[..x.len()].copy_from_slice(x);
    u64::from_le_bytes(bytes) & magnitude_mask(dtype) == 0
}
