//! Scan that finds the zero blocks of a window.
#![expect(unsafe_code, reason = "lines are copied from memory that processes share")]

use super::prefetch::{self, AHEAD};
use crate::copy::LINE;
use crate::level::Task;
use crate::shared::SharedBytes;
use crate::simd::Simd;

/// Task that scans `window`, cut into blocks of `block_len` bytes.
pub(super) struct Scan<W> {
    pub(super) window: W,
    pub(super) block_len: usize,
    /// Mask for a `u64` of elements, with all bits but the sign bits of floats. An element is zero
    /// if none of these bits is set.
    pub(super) mask: u64,
}

/// Window to scan, or a block of it: private bytes, or bytes that another process may write.
pub(super) trait Window: Sized {
    /// The bytes to read.
    type Source<'a>: Source
    where
        Self: 'a;

    /// Returns the bytes to read.
    fn source(&self) -> Self::Source<'_>;

    /// Removes the first `len` bytes, and returns them.
    fn split_off(&mut self, len: usize) -> Self;

    /// Overwrites the bytes with zeros.
    fn clear(self);
}

/// Bytes that a scan reads in order.
pub(super) trait Source: Copy {
    /// Returns the number of bytes.
    fn len(self) -> usize;

    /// Returns the address of the first byte.
    fn start(self) -> *const u8;

    /// Splits off the first `LEN` bytes, which are whole lines. Returns the OR of their words and
    /// the remaining bytes, or `None` if there are fewer than `LEN` bytes.
    fn split<S: Simd, const LEN: usize>(self, simd: S) -> Option<(u64, Self)>;

    /// Returns the OR of the words of all bytes. There must be fewer bytes than a line holds.
    fn union_of_rest(self) -> u64;
}

impl Window for &mut [u8] {
    type Source<'a>
        = &'a [u8]
    where
        Self: 'a;

    #[inline(always)]
    fn source(&self) -> &[u8] {
        self
    }

    #[inline(always)]
    fn split_off(&mut self, len: usize) -> Self {
        let (first, rest) = std::mem::take(self).split_at_mut(len);
        *self = rest;
        first
    }

    #[inline(always)]
    fn clear(self) {
        self.fill(0);
    }
}

impl Source for &[u8] {
    #[inline(always)]
    fn len(self) -> usize {
        <[u8]>::len(self)
    }

    #[inline(always)]
    fn start(self) -> *const u8 {
        self.as_ptr()
    }

    #[inline(always)]
    fn split<S: Simd, const LEN: usize>(self, _: S) -> Option<(u64, Self)> {
        let (first, rest) = self.split_first_chunk::<LEN>()?;
        Some((union_of_words(first), rest))
    }

    #[inline(always)]
    fn union_of_rest(self) -> u64 {
        union_of_words(self)
    }
}

impl Window for SharedBytes<'_> {
    type Source<'a>
        = Self
    where
        Self: 'a;

    #[inline(always)]
    fn source(&self) -> Self {
        *self
    }

    #[inline(always)]
    fn split_off(&mut self, len: usize) -> Self {
        let first = self.part(0..len);
        *self = self.part(len..self.len());
        first
    }

    #[inline(always)]
    fn clear(self) {
        Self::clear(self);
    }
}

impl Source for SharedBytes<'_> {
    #[inline(always)]
    fn len(self) -> usize {
        Self::len(self)
    }

    #[inline(always)]
    fn start(self) -> *const u8 {
        Self::start(self).as_ptr()
    }

    #[inline(always)]
    fn split<S: Simd, const LEN: usize>(self, simd: S) -> Option<(u64, Self)> {
        if self.len() < LEN {
            return None;
        }
        let mut bits = 0;
        if LEN < size_of::<S::Span>() {
            for line in (0..LEN).step_by(LINE) {
                // SAFETY: the line lies within the first `LEN` bytes, and `self` is not shorter.
                bits |= union_of_words(&unsafe { self.line(simd, line) });
            }
        } else {
            for span in (0..LEN).step_by(size_of::<S::Span>()) {
                // SAFETY: the span lies within the first `LEN` bytes, and `self` is not shorter.
                bits |= union_of_words(unsafe { self.span(simd, span) }.as_ref());
            }
        }
        Some((bits, self.part(LEN..self.len())))
    }

    #[inline(always)]
    fn union_of_rest(self) -> u64 {
        let mut line = [0; LINE];
        let copy = &mut line[..self.len()];
        self.read(copy);
        union_of_words(copy)
    }
}

impl<W: Window> Task for Scan<W> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> u64 {
        let (mut occupancy, mut b) = (0, 0);
        while self.window.source().len() > 0 {
            let block = self.window.split_off(self.block_len.min(self.window.source().len()));
            prefetch::line(block.source().start(), BLOCKS_AHEAD * self.block_len);
            match union(simd, block.source(), self.mask) {
                // No bit is set, not even a sign bit, so the block is already +0.0.
                0 => {}
                bits if bits & self.mask == 0 => block.clear(),
                _ => occupancy |= 1 << b,
            }
            b += 1;
        }
        occupancy
    }
}

/// Returns the OR of the words of a block, up to the first step that has bits of `mask`.
///
/// In a dense tensor, the first cache line usually has such bits. The later steps are longer than a
/// line, because a test of each line would take more time.
#[inline(always)]
fn union<S: Simd>(simd: S, block: impl Source, mask: u64) -> u64 {
    let (mut bits, mut rest) = (0, block);
    if let Some((line, after)) = rest.split::<S, LINE>(simd) {
        if line & mask != 0 {
            return line;
        }
        (bits, rest) = (line, after);
    }
    while let Some((step, after)) = rest.split::<S, STEP>(simd) {
        prefetch::to_read(rest.start(), STEP, AHEAD);
        bits |= step;
        if bits & mask != 0 {
            return bits;
        }
        rest = after;
    }
    while let Some((line, after)) = rest.split::<S, LINE>(simd) {
        prefetch::line(rest.start(), AHEAD);
        bits |= line;
        rest = after;
    }
    if rest.len() > 0 {
        bits |= rest.union_of_rest();
    }
    bits
}

/// Returns the OR of the words of `bytes`. Pads the last word with zeros.
#[inline(always)]
fn union_of_words(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks();
    let mut last = [0; size_of::<u64>()];
    last[..rest.len()].copy_from_slice(rest);
    words.iter().fold(u64::from_le_bytes(last), |bits, word| bits | u64::from_le_bytes(*word))
}

/// Distance in blocks from the scan's position to the block whose first line it prefetches. In a
/// dense tensor, a scan reads only these first lines.
const BLOCKS_AHEAD: usize = 8;

/// Number of bytes that each test covers in a block whose first line is zero.
const STEP: usize = 256;
