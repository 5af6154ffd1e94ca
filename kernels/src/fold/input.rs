//! Inputs of a fold: private bytes, or bytes that another process may write.
#![expect(unsafe_code, reason = "spans are copied from memory that processes share")]

use crate::shared::SharedBytes;
use crate::simd::{SPAN, Simd};

/// Contribution to an elementwise fold.
pub(super) trait Input: Copy {
    /// Some of the contribution's bytes, in memory that no other process can write.
    type Span<S: Simd>: AsRef<[u8]>;

    /// Whether a fold pads a contribution that is shorter than [`SPAN`] vectors. Otherwise the fold
    /// reads such a contribution vector by vector.
    const IS_PADDED: bool;

    /// Returns the number of bytes.
    fn len(self) -> usize;

    /// Returns the bytes of the `VECTORS` vectors that begin at byte `at`. `by_halves` is true if
    /// the caller will convert each half of a vector separately. If `PADDED` is true, zeros replace
    /// the bytes past the end.
    ///
    /// # Safety
    ///
    /// The contribution has these bytes, unless `PADDED` is true.
    unsafe fn span<S: Simd, const VECTORS: usize, const PADDED: bool>(
        self,
        simd: S,
        at: usize,
        by_halves: bool,
    ) -> Self::Span<S>;
}

impl<'a> Input for &'a [u8] {
    type Span<S: Simd> = &'a [u8];

    const IS_PADDED: bool = false;

    #[inline(always)]
    fn len(self) -> usize {
        <[u8]>::len(self)
    }

    #[inline(always)]
    unsafe fn span<S: Simd, const VECTORS: usize, const PADDED: bool>(
        self,
        _: S,
        at: usize,
        _by_halves: bool,
    ) -> &'a [u8] {
        assert!(!PADDED, "private bytes are not padded");
        &self[at..][..VECTORS * S::BYTES]
    }
}

impl Input for SharedBytes<'_> {
    type Span<S: Simd> = S::Span;

    const IS_PADDED: bool = true;

    #[inline(always)]
    fn len(self) -> usize {
        Self::len(self)
    }

    #[inline(always)]
    unsafe fn span<S: Simd, const VECTORS: usize, const PADDED: bool>(
        self,
        simd: S,
        at: usize,
        by_halves: bool,
    ) -> S::Span {
        assert_eq!(VECTORS, SPAN, "shared bytes are read in whole spans");
        if PADDED {
            return self.padded_span(simd, at);
        }
        // SAFETY: the caller guarantees that the contribution has the span.
        unsafe {
            if by_halves { self.span_by_halves(simd, at) } else { Self::span(self, simd, at) }
        }
    }
}
