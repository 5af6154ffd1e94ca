//! Which blocks of a window are zero, and so are not sent.

use crate::dtype::DType;

/// The most blocks a window has: its occupancy is one `u64`.
pub const WINDOW_BLOCKS: usize = 64;

/// Which bits of an element count when it is compared with zero: all but the sign of a float,
/// in each element of a `u64`.
#[must_use]
pub const fn magnitude_mask(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 0x7fff_ffff_7fff_ffff,
        DType::F64 => 0x7fff_ffff_ffff_ffff,
        DType::F16 | DType::Bf16 => 0x7fff_7fff_7fff_7fff,
        DType::I32 | DType::I64 => u64::MAX,
    }
}

/// The occupancy of `window`: bit `b` is set if block `b`, of `block_elements` elements, has an
/// element other than zero. The last block may be short.
///
/// -0.0 counts as zero; NaN, infinities and denormals do not. A zero block is rewritten to +0.0
/// throughout: if no rank sends it, every rank keeps what it has, and that must be the same bits.
///
/// # Panics
///
/// If `block_elements` is zero, or `window` has more than [`WINDOW_BLOCKS`] blocks or ends
/// within an element.
pub fn scan_window(dtype: DType, block_elements: usize, window: &mut [u8]) -> u64 {
    assert!(window.len().is_multiple_of(dtype.size()), "a window has whole elements");
    assert!(block_elements > 0, "a block has elements");
    let block_len = block_elements * dtype.size();
    assert!(window.len().div_ceil(block_len) <= WINDOW_BLOCKS, "a window has at most 64 blocks");
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

/// Whether an element is zero, of either sign.
fn is_zero(dtype: DType, x: &[u8]) -> bool {
    let mut bytes = [0; 8];
    bytes[..x.len()].copy_from_slice(x);
    u64::from_le_bytes(bytes) & magnitude_mask(dtype) == 0
}
