//! Bytes that another process may write at any time: memory that processes share.
//!
//! # Rule
//!
//! No `&[u8]` or `&mut [u8]` over such memory ever exists. The compiler may read through a
//! reference twice and assume the same bytes, so a concurrent write would be undefined behavior.
//! [`SharedBytes`] holds an address and copies from it and to it. [`fold_shared`], [`scan_shared`]
//! and the methods of [`SharedBytes`] compute only with private copies: registers, or buffers of
//! this process.
//!
//! # Why this is sound
//!
//! On x86-64, inline assembly makes each copy. The compiler treats assembly as a black box that
//! accesses memory as a foreign function does, and the outputs of assembly are defined values
//! ([inline assembly][asm]). The processor alone decides the outcome of a race: some old bytes and
//! some new ones. Elsewhere, and under Miri, copies are volatile accesses of aligned words. Rust
//! defines these for memory outside of its allocations, such as mapped memory ([`read_volatile`]).
//! rust-vmm accesses the memory of guests in the same way: no references, and volatile copies
//! ([`vm-memory`][vm], [discussion][ucg]).
//!
//! Relaxed atomics do not fit. The other process may write words of other sizes, which Rust's
//! atomics exclude, and copies in words of eight bytes would slow folds down.
//!
//! A copy that races with a write may mix old and new bytes, and two copies may differ. So memory
//! safety must not depend on these bytes: an index, length or branch that it relies on may come
//! only from a checked private copy.
//!
//! [`fold_shared`]: crate::fold::fold_shared
//! [`scan_shared`]: crate::codec::scan_shared
//! [`read_volatile`]: std::ptr::read_volatile
//! [asm]: https://doc.rust-lang.org/reference/inline-assembly.html#rules-for-inline-assembly
//! [vm]: https://docs.rs/vm-memory/latest/vm_memory/volatile_memory/
//! [ucg]: https://github.com/rust-lang/unsafe-code-guidelines/issues/152
#![expect(unsafe_code, reason = "other processes write to the memory")]

#[cfg(test)]
pub(crate) mod tests;

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use crate::copy::{self, LINE};
use crate::level::{Level, Task};
use crate::simd::Simd;

/// A range of memory that another process may write at any time.
#[derive(Debug, Clone, Copy)]
pub struct SharedBytes<'a> {
    start: NonNull<u8>,
    len: usize,
    /// The mapping that the memory belongs to.
    mapping: PhantomData<&'a ()>,
}

// SAFETY: every method tolerates concurrent writes to the memory, from any thread or process.
unsafe impl Send for SharedBytes<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedBytes<'_> {}

impl<'a> SharedBytes<'a> {
    /// Creates a range of the `len` bytes that begin at `start`.
    ///
    /// # Safety
    ///
    /// Throughout `'a`, the bytes are readable and writable, and no reference to any of them is
    /// used. If another thread of this process may access the bytes during `'a`, they lie outside
    /// of every Rust allocation, as mapped memory does.
    #[must_use]
    pub const unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Self { start, len, mapping: PhantomData }
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub const fn start(self) -> NonNull<u8> {
        self.start
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn len(self) -> usize {
        self.len
    }

    /// Returns whether the range is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the part of these bytes that `range` selects.
    ///
    /// # Panics
    ///
    /// If `range` ends beyond these bytes.
    #[inline]
    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "the range ends beyond the shared bytes"
        );
        // SAFETY: the assertion keeps the part within `self`, so the guarantees that `self` was
        // created with also hold for the part.
        unsafe { Self::new(self.start.add(range.start), range.len()) }
    }

    /// Returns consecutive parts of `len` bytes. The last one may be shorter.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = Self> {
        let starts = (0..self.len).step_by(len);
        starts.map(move |start| self.part(start..self.len.min(start + len)))
    }

    /// Fills `into` with a copy of the bytes.
    ///
    /// # Panics
    ///
    /// If `into` has another length.
    #[inline]
    pub fn read(self, into: &mut [u8]) {
        assert_eq!(into.len(), self.len, "a copy has the length of its source");
        // SAFETY: both ranges have this length, and the caller of `new` guarantees that the source
        // can be read. `into` is private, because no reference to shared bytes exists.
        unsafe { copy::read(self.start.as_ptr(), into.as_mut_ptr(), self.len) }
    }

    /// Appends a copy of the bytes to `out`.
    pub fn append_to(self, out: &mut Vec<u8>) {
        out.reserve(self.len);
        let used = out.len();
        // SAFETY: the caller of `new` guarantees that the source can be read. The vector has room
        // for the bytes, and the copy initializes them.
        unsafe {
            copy::read(self.start.as_ptr(), out.spare_capacity_mut().as_mut_ptr().cast(), self.len);
            out.set_len(used + self.len);
        }
    }

    /// Overwrites the bytes with `bytes`.
    ///
    /// # Panics
    ///
    /// If `bytes` has another length.
    #[inline]
    pub fn write(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "a copy has the length of its source");
        // SAFETY: both ranges have this length, and the caller of `new` guarantees that the target
        // can be written. `bytes` is private, because no reference to shared bytes exists.
        unsafe { copy::write(bytes.as_ptr(), self.start.as_ptr(), self.len) }
    }

    /// Overwrites the bytes with those of another range.
    ///
    /// # Panics
    ///
    /// If `other` has another length.
    pub fn copy_from(self, other: SharedBytes<'_>) {
        assert_eq!(other.len, self.len, "a copy has the length of its source");
        // SAFETY: both ranges have this length, and the callers of `new` guarantee access to both.
        // The copy tolerates concurrent writes to either.
        unsafe { copy::between(other.start.as_ptr(), self.start.as_ptr(), self.len) }
    }

    /// Overwrites the bytes with zeros.
    pub fn clear(self) {
        for part in self.chunks(ZEROS.len()) {
            part.write(&ZEROS[..part.len]);
        }
    }

    /// Returns whether a copy of the bytes equals `bytes`.
    ///
    /// # Panics
    ///
    /// If `bytes` has another length.
    #[must_use]
    pub fn equals(self, bytes: &[u8]) -> bool {
        assert_eq!(bytes.len(), self.len, "the compared ranges must have the same length");
        Level::best().run(Equals { shared: self, bytes })
    }

    /// Returns a copy of the span that begins at byte `at`. A span has [`SPAN`](crate::simd::SPAN)
    /// vectors of the level.
    ///
    /// # Safety
    ///
    /// The span lies within the range. This function does not check that, because a check of each
    /// span would slow a fold down.
    #[inline(always)]
    pub(crate) unsafe fn span<S: Simd>(self, simd: S, at: usize) -> S::Span {
        debug_assert!(
            at + size_of::<S::Span>() <= self.len,
            "the range ends beyond the shared bytes"
        );
        // SAFETY: the caller of `new` guarantees that the range can be read, and the caller of this
        // method that the span lies within the range.
        unsafe { simd.copy_span(self.start.as_ptr(), at) }
    }

    /// Returns a copy like [`span`](Self::span), made with registers of half a vector.
    ///
    /// # Safety
    ///
    /// The span lies within the range.
    #[inline(always)]
    pub(crate) unsafe fn span_by_halves<S: Simd>(self, simd: S, at: usize) -> S::Span {
        debug_assert!(
            at + size_of::<S::Span>() <= self.len,
            "the range ends beyond the shared bytes"
        );
        // SAFETY: the caller of `new` guarantees that the range can be read, and the caller of this
        // method that the span lies within the range.
        unsafe { simd.copy_span_by_halves(self.start.as_ptr(), at) }
    }

    /// Returns a copy of the line that begins at byte `at`.
    ///
    /// # Safety
    ///
    /// The line lies within the range.
    #[inline(always)]
    pub(crate) unsafe fn line<S: Simd>(self, simd: S, at: usize) -> [u8; LINE] {
        debug_assert!(at + LINE <= self.len, "the range ends beyond the shared bytes");
        // SAFETY: the caller of `new` guarantees that the range can be read, and the caller of this
        // method that the line lies within the range.
        unsafe { simd.copy_line(self.start.as_ptr(), at) }
    }

    /// Returns a copy of the bytes from byte `at` to the end, padded with zeros to a span. The
    /// bytes must fit into a span.
    #[inline(always)]
    pub(crate) fn padded_span<S: Simd>(self, simd: S, at: usize) -> S::Span {
        let (mut span, end) = (simd.zero_span(), self.part(at..self.len));
        end.read(&mut span.as_mut()[..end.len]);
        span
    }
}

/// Task that compares shared bytes with private bytes of the same length.
struct Equals<'a> {
    shared: SharedBytes<'a>,
    bytes: &'a [u8],
}

impl Task for Equals<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> bool {
        let spans = self.bytes.chunks_exact(size_of::<S::Span>());
        let rest = spans.remainder();
        let mut at = 0;
        for bytes in spans {
            // SAFETY: the span lies within `self.bytes`, and the shared range has the same length.
            let span = unsafe { self.shared.span(simd, at) };
            let (one, other) = (span.as_ref().as_chunks().0, bytes.as_chunks().0);
            let mut differences = 0;
            for (one, other) in one.iter().zip(other) {
                differences |= u64::from_le_bytes(*one) ^ u64::from_le_bytes(*other);
            }
            if differences != 0 {
                return false;
            }
            at += bytes.len();
        }
        rest.is_empty() || self.shared.padded_span(simd, at).as_ref()[..rest.len()] == *rest
    }
}

/// Zeros for [`SharedBytes::clear`]: as many bytes as the largest block has.
static ZEROS: [u8; 8 << 10] = [0; 8 << 10];
