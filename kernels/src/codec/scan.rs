//! Which blocks of a window are zero.

use super::prefetch::{self, AHEAD, LINE};
use crate::level::Task;
use crate::simd::Simd;

/// A scan of `window`, cut into blocks of `block_len` bytes.
pub(super) struct Scan<'a> {
    pub(super) window: &'a mut [u8],
    pub(super) block_len: usize,
    /// The bits of a word that make an element other than zero.
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
                // Not a bit set, also of the signs.
                0 => {}
                bits if bits & self.mask == 0 => block.fill(0),
                _ => occupancy |= 1 << b,
            }
        }
        occupancy
    }
}

/// The union of the words of `block`, up to a place where it has bits of `mask`.
///
/// The first line of cache decides on a dense tensor; from there on, steps are longer than a
/// test of each line would allow.
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

/// Of a dense tensor, whose blocks are known by their first lines: how many of these are on their
/// way at a time.
const BLOCKS_AHEAD: usize = 8;

/// Bytes between tests in a block whose first line is zero.
const STEP: usize = 256;
