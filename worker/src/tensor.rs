//! Memory that is reduced in place: borrowed for a blocking call, or owned while an op runs.

#![expect(unsafe_code, reason = "an op in flight refers to memory that its caller lent it")]

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

/// Memory that an op in flight reads and writes.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    len: usize,
    /// Shared with the loan, which sees by it whether the region is gone.
    _held: Arc<()>,
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
    let region = Region { start, len: bytes.len(), _held: Arc::clone(&held) };
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

// SAFETY: a region is a unique borrow of its bytes; whoever holds it may use it on any thread.
unsafe impl Send for Region {}

impl Region {
    /// Bytes `range` of the memory, to be read.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "beyond the tensor");
        // SAFETY: within the region, whose memory is borrowed for as long as its loan, which
        // does not end before the region.
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
mod tests {
    use super::*;

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
    #[should_panic(expected = "beyond the tensor")]
    fn a_region_ends_where_it_ends() {
        let mut bytes = [0u8; 4];
        let (_loan, region) = lend(&mut bytes);
        region.bytes(2..5);
    }
}
