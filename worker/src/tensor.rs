//! Memory that ops reduce in place: borrowed for a blocking call, or owned while an op runs.

#![expect(unsafe_code, reason = "an op in flight refers to memory that its caller lent it")]

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use racksum_proto::dtype::DType;

/// A Rust type that a tensor's elements may have.
pub trait Element: Copy + Default + Send + sealed::Sealed + 'static {
    /// The type of the elements on the wire.
    const DTYPE: DType;
}

mod sealed {
    /// Restricts [`super::Element`] to types for which every bit pattern is valid.
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

/// Returns the bytes of a slice of elements.
#[must_use]
pub fn as_bytes_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    let len = size_of_val(elements);
    // SAFETY: `Element` is sealed to types without padding for which every bit pattern is valid, so
    // any bytes may be read and written. The length is the slice's own.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), len) }
}

/// Returns the bytes of a slice of elements, to read.
#[must_use]
pub fn as_bytes<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: `Element` is sealed to types without padding, and the length is the slice's own.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// Memory of the caller that an op in flight reads and writes in place.
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    /// The memory's owner, which must outlive the region. For a loan, the reference that the loan
    /// counts when it ends.
    owner: Box<dyn Any + Send>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { start, len, .. } = self;
        f.debug_struct("Region").field("start", start).field("len", len).finish_non_exhaustive()
    }
}

/// The borrow behind a [`Region`]. It must not end before the region does.
#[derive(Debug)]
pub(crate) struct Loan<'a> {
    held: Arc<()>,
    _bytes: PhantomData<&'a mut [u8]>,
}

/// Lends memory to an op in flight.
pub(crate) fn lend(bytes: &mut [u8]) -> (Loan<'_>, Region) {
    let held = Arc::new(());
    let start = NonNull::from(&mut *bytes).cast();
    let region = Region { start, len: bytes.len(), owner: Box::new(Arc::clone(&held)) };
    (Loan { held, _bytes: PhantomData }, region)
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if Arc::strong_count(&self.held) > 1 {
            // The owner is about to use the memory, and an op still writes to it.
            eprintln!("racksum: a lent tensor was to be given back while its op runs");
            std::process::abort();
        }
    }
}

/// Returns whether two ranges have an address in common.
pub(crate) fn meet(one: &Range<usize>, other: &Range<usize>) -> bool {
    !one.is_empty() && !other.is_empty() && one.start < other.end && other.start < one.end
}

// SAFETY: a region borrows its bytes exclusively, except from ops that have not begun. Its holder
// may use the bytes on any thread.
unsafe impl Send for Region {}

impl Region {
    /// Creates a region of the `len` bytes from `start`. The region keeps `owner` until its op has
    /// ended and its caller has waited for the op or abandoned it. Any thread may drop `owner`.
    ///
    /// # Safety
    /// While `owner` is kept, the bytes must stay in place in one allocation, and any thread may
    /// read and write them. Only ops of the same client may access them; these ops take turns.
    #[must_use]
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: impl Send + 'static) -> Self {
        Self { start, len, owner: Box::new(owner) }
    }

    /// Creates a region of a tensor that the region owns.
    pub(crate) fn owned<T: Element>(mut tensor: Vec<T>) -> Self {
        let start = NonNull::from(&mut *tensor).cast();
        // SAFETY: the region keeps the vector, whose elements stay in place, and no other code uses
        // them. Any bytes are valid elements.
        unsafe { Self::new(start, size_of_val(&*tensor), tensor) }
    }

    /// Returns the tensor that the region was created of, or the region if it owns no such tensor.
    pub(crate) fn into_tensor<T: Element>(self) -> Result<Vec<T>, Self> {
        let Self { start, len, owner } = self;
        owner.downcast().map_or_else(|owner| Err(Self { start, len, owner }), |tensor| Ok(*tensor))
    }

    /// Returns the length in bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Returns the addresses of the bytes.
    pub(crate) fn extent(&self) -> Range<usize> {
        let start = self.start.addr().get();
        start..start + self.len
    }

    /// Returns bytes `range` of the memory.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "beyond the tensor");
        // SAFETY: the range is within the region. The memory lives as long as its owner, which the
        // region keeps, or as its loan, which does not end before the region.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len()) }
    }

    /// Returns bytes `range` of the memory, mutable.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "beyond the tensor");
        // SAFETY: as in `bytes`; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.len()) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Creates a region that owns its memory and another owner.
    pub(crate) fn region_of(mut bytes: Vec<u8>, owner: impl Send + 'static) -> Region {
        let (start, len) = (NonNull::from(&mut *bytes).cast(), bytes.len());
        // SAFETY: the region keeps the vector, which stays in place, and no other code uses it.
        unsafe { Region::new(start, len, (bytes, owner)) }
    }

    /// Creates regions of the same memory. Tests use overlapping regions one after the other.
    pub(crate) fn regions_of<const N: usize>(
        mut bytes: Vec<u8>,
        ranges: [Range<usize>; N],
    ) -> [Region; N] {
        let start: NonNull<u8> = NonNull::from(&mut *bytes).cast();
        let bytes = Arc::new(bytes);
        ranges.map(|range| {
            assert!(range.end <= bytes.len(), "beyond the memory");
            // SAFETY: the range is within the vector, which the regions keep, which stays in place,
            // and which no other code uses. Tests use overlapping regions one after the other.
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
    fn a_region_that_owns_a_tensor_gives_it_back() {
        let mut region = Region::owned(vec![1f32, 2.0]);
        region.bytes_mut(4..8).copy_from_slice(&5f32.to_le_bytes());
        let region = region.into_tensor::<i32>().expect_err("it owns floats");
        assert_eq!(region.into_tensor::<f32>().unwrap(), [1.0, 5.0]);
        assert!(region_of(vec![0; 4], ()).into_tensor::<f32>().is_err());
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
