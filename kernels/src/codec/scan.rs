//! Scan that finds the zero blocks of a window.

use super::prefetch::{self, AHEAD, LINE};
use crate::level::Task;
use crate::simd::Simd;

/// Task that scans `window`, cut into blocks of `block_len` bytes.
pub(super) struct Scan<'a> {
    pub(super) window: &'a mut [u8],
    pub(super) block_len: usize,
    /// The bits of a `u64` that make an element differ from zero.
    pub(super) mask: u64,
}

impl Task for Scan<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u64 {
        let mut occupancy = 0;
        for (b, block) in self.window.chunks_mut(self.block_len).enumerate() {
            prefetch::line(block, BLOCKS_AHEAD * self.block_len);
            match union(block, self.mask) {
                // No bit is set, not even a sign bit, so the block is already +0.0.
                0 => {}
                bits if bits & self.mask == 0 => block.fill(0),
                _ => occupancy |= 1 << b,
            }
        }
        occupancy
    }
}

/// Returns the OR of the words of `block`, up to the first step that has bits of `mask`.
///
/// In a dense tensor, the first cache line decides. The later steps are longer, because a test of
/// each line would take more time.
#[inline(always)]
fn union(block: &[u8], mask: u64) -> u64 {
    let mut bits = 0;
    let mut rest = block;
    if let Some((line, after)) = block.split_first_chunk::<LINE>() {
        bits = union_of_words(line.as_chunks().0);
        if bits & mask != 0 {
            return bits;
        }
        rest = after;
    }
    let (steps, rest) = rest.as_chunks::<STEP>();
    for step in steps {
        prefetch::to_read(step, AHEAD);
        bits |= union_of_words(step.as_chunks().0);
        if bits & mask != 0 {
            return bits;
        }
    }
    let (lines, rest) = rest.as_chunks::<LINE>();
    for line in lines {
        prefetch::to_read(line, AHEAD);
        bits |= union_of_words(line.as_chunks().0);
    }
    let (words, rest) = rest.as_chunks();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    bits | union_of_words(words) | u64::from_le_bytes(last)
}

#[inline(always)]
fn union_of_words(words: &[[u8; 8]]) -> u64 {
    words.iter().fold(0, |bits, word| bits | u64::from_le_bytes(*word))
}

/// Blocks ahead whose first lines are prefetched. A scan of a dense tensor reads only these lines.
const BLOCKS_AHEAD: usize = 8;

/// Bytes per test in a block whose first line is zero.
const STEP: usize = 256;
