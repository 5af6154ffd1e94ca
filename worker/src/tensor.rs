//! Memory that is reduced in place: borrowed for a blocking call, or owned while an op runs.

#![expect(unsafe_code, reason = "an op in flight refers to memory that its caller lent it")]

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use racksum_proto::dtype::DType;

/// An element type of Rust's that a tensor may have.
pub trait Element: Copy + sealed::Sealed {
    /// What it is on the wire.
    const DTYPE: DType;
}

mod sealed {
    /// Keeps [`super::Element`] to types whose every bit pattern is valid.
    #[expect(unnameable_types, reason = "that is what seals the trait")]
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements!(f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => Bf16, i32 => I32, i64 => I64);

/// The bytes of a slice of elements.
#[must_use]
pub fn as_bytes_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    let len = size_of_val(elements);
    // SAFETY: `Element` is sealed to types without padding for which every bit pattern is valid,
    // so any bytes may be read and written; the length is the slice's own.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), len) }
}

/// Memory of a caller's that an op in flight reads and writes where it is.
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    /// What must not go before the region: the memory's owner, or what a loan looks for.
    _owner: Box<dyn Send>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { start, len, .. } = self;
        f.debug_struct("Region").field("start", start).field("len", len).finish_non_exhaustive()
    }
}

/// A borrow that a [`Region`] was made of. It must not end before the region does.
#[derive(Debug)]
pub(crate) struct Loan<'a> {
    held: Arc<()>,
    _bytes: PhantomData<&'a mut [u8]>,
}

/// Lends memory to an op in flight.
pub(crate) fn lend(bytes: &mut [u8]) -> (Loan<'_>, Region) {
    let held = Arc::new(());
    let start = NonNull::from(&mut *bytes).cast();
    let region = Region { start, len: bytes.len(), _owner: Box::new(Arc::clone(&held)) };
    (Loan { held, _bytes: PhantomData }, region)
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if Arc::strong_count(&self.held) > 1 {
            // The memory is about to be used by its owner while an op still writes to it.
            eprintln!("racksum: a lent tensor was to be given back while its op runs");
            std::process::abort();
        }
    }
}

/// Whether some bytes are of both.
pub(crate) fn meet(one: &Range<usize>, other: &Range<usize>) -> bool {
    !one.is_empty() && !other.is_empty() && one.start < other.end && other.start < one.end
}

// SAFETY: a region is a borrow of its bytes that is unique but for ops that have yet to begin;
// whoever holds it may use it on any thread.
unsafe impl Send for Region {}

impl Region {
    /// The `len` bytes from `start`. Their owner is kept until the op that works on them has ended
    /// and was waited for, or was abandoned; it may be dropped on any thread.
    ///
    /// # Safety
    /// As long as `owner` is kept, the bytes are in one allocation that stays where it is, may be
    /// read and written from any thread, and are read and written by nobody else but ops of the
    /// same client, which take turns.
    #[must_use]
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: impl Send + 'static) -> Self {
        Self { start, len, _owner: Box::new(owner) }
    }

    /// How many bytes there are.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// The addresses of the bytes.
    pub(crate) fn extent(&self) -> Range<usize> {
        let start = self.start.addr().get();
        start..start + self.len
    }

    /// Bytes `range` of the memory, to be read.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "beyond the tensor");
        // SAFETY: within the region, whose memory is there as long as its owner is kept, and as
        // its loan, which does not end before the region.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len()) }
    }

    /// Bytes `range` of the memory, to be written.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "beyond the tensor");
        // SAFETY: as in `bytes`, and `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.len()) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A region of memory of its own, with an owner besides.
    pub(crate) fn region_of(mut bytes: Vec<u8>, owner: impl Send + 'static) -> Region {
        let (start, len) = (NonNull::from(&mut *bytes).cast(), bytes.len());
        // SAFETY: the vector, which is kept, stays where it is, and nobody else looks at it.
        unsafe { Region::new(start, len, (bytes, owner)) }
    }

    /// Regions of the same memory. Those that overlap may be used one after the other.
    pub(crate) fn regions_of<const N: usize>(
        mut bytes: Vec<u8>,
        ranges: [Range<usize>; N],
    ) -> [Region; N] {
        let start: NonNull<u8> = NonNull::from(&mut *bytes).cast();
        let bytes = Arc::new(bytes);
        ranges.map(|range| {
            assert!(range.end <= bytes.len(), "beyond the memory");
            // SAFETY: within the vector, which is kept, stays where it is, and nobody looks at;
            // those that overlap are used one after the other.
            unsafe { Region::new(start.add(range.start), range.len(), Arc::clone(&bytes)) }
        })
    }

    #[test]
    fn a_region_is_the_memory_it_was_made_of() {
        let mut floats = [1f32, 2.0, 3.0];
        let (loan, mut region) = lend(as_bytes_mut(&mut floats));
        region.bytes_mut(4..8).copy_from_slice(&5f32.to_le_bytes());
        assert_eq!(region.bytes(8..12), 3f32.to_le_bytes());
        drop(region);
        drop(loan);
        assert_eq!(floats, [1.0, 5.0, 3.0]);
    }

    #[test]
    fn regions_overlap_where_they_have_bytes_in_common() {
        for (one, other, overlap) in [
            (0..8, 4..12, true),
            (0..12, 4..8, true),
            (0..4, 4..8, false),
            (0..12, 4..4, false),
            (4..4, 4..4, false),
        ] {
            let [one, other] = regions_of(vec![0; 12], [one, other]);
            assert_eq!(meet(&one.extent(), &other.extent()), overlap);
            assert_eq!(meet(&other.extent(), &one.extent()), overlap);
        }
    }

    #[test]
    #[should_panic(expected = "beyond the tensor")]
    fn a_region_ends_where_it_ends() {
        let mut bytes = [0u8; 4];
        let (_loan, region) = lend(&mut bytes);
        region.bytes(2..5);
    }
}
