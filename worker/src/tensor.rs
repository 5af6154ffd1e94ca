//! Memory that ops reduce in place: borrowed for a blocking call, or owned while an op runs.

#![expect(unsafe_code, reason = "an op in flight refers to memory that its caller lent it")]

mod bytes;

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use racksum_kernels::shared::SharedBytes;
use racksum_net::local::SharedMemory;
use racksum_proto::dtype::DType;

pub(crate) use self::bytes::{TensorBytes, TensorBytesMut};

/// A Rust type that a tensor's elements may have.
pub trait Element: Copy + Default + Send + sealed::Sealed + 'static {
    /// The dtype of the elements.
    const DTYPE: DType;
}

mod sealed {
    /// Restricts [`super::Element`] to types for which every bit pattern is valid.
    #[expect(unnameable_types, reason = "a trait that other crates cannot name seals `Element`")]
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

/// Returns a mutable view of the bytes of a slice of elements.
#[must_use]
pub fn as_bytes_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    let len = size_of_val(elements);
    // SAFETY: `Element` is sealed to types without padding for which every bit pattern is valid, so
    // any bytes may be read and written. The length is the slice's own.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), len) }
}

/// Returns a read-only view of the bytes of a slice of elements.
#[must_use]
pub fn as_bytes<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: `Element` is sealed to types without padding, and the length is the slice's own.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// Memory of the caller that an op in flight reads and writes in place.
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    /// Whether other processes may write to the memory.
    is_shared: bool,
    /// The memory's owner, which the region keeps alive. If the memory is lent, this is a reference
    /// to the loan's counter, which shows whether the region outlives the loan.
    owner: Box<dyn Any + Send>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { start, len, is_shared, .. } = self;
        let mut region = f.debug_struct("Region");
        region.field("start", start).field("len", len).field("is_shared", is_shared);
        region.finish_non_exhaustive()
    }
}

/// The borrow behind a [`Region`]. If it ends before the region is dropped, the process aborts.
#[derive(Debug)]
pub(crate) struct Loan<'a> {
    held: Arc<()>,
    _bytes: PhantomData<&'a mut [u8]>,
}

/// Lends memory to an op. The op gets the region, and the caller keeps the loan.
pub(crate) fn lend(bytes: &mut [u8]) -> (Loan<'_>, Region) {
    let held = Arc::new(());
    let start = NonNull::from(&mut *bytes).cast();
    let owner = Box::new(Arc::clone(&held));
    let region = Region { start, len: bytes.len(), is_shared: false, owner };
    (Loan { held, _bytes: PhantomData }, region)
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if Arc::strong_count(&self.held) > 1 {
            // Abort, because the owner is about to use the memory while an op still writes to it.
            eprintln!(
                "racksum bug: a call ends while an op still writes to the call's tensor; aborting"
            );
            std::process::abort();
        }
    }
}

/// Returns whether two ranges have an address in common.
pub(crate) fn meet(one: &Range<usize>, other: &Range<usize>) -> bool {
    !one.is_empty() && !other.is_empty() && one.start < other.end && other.start < one.end
}

// SAFETY: only ops of one client access the bytes of a region, and ops on the same bytes take
// turns. The caller of `Region::new` guarantees that any thread may use the bytes.
unsafe impl Send for Region {}

impl Region {
    /// Creates a region of the `len` bytes from `start`. The region keeps `owner` until its op has
    /// ended and its caller has waited for the op or abandoned it. Any thread may drop `owner`.
    ///
    /// # Safety
    /// While `owner` is kept, the bytes must stay in place in one allocation, and must be readable
    /// and writable from any thread. Only ops of one client may access them; that client makes ops
    /// on the same bytes take turns.
    ///
    /// If the bytes lie in memory that a rank has lent to its sidecar, only that rank's client may
    /// get the region. The client finds the memory by the region's address, and sends the sidecar
    /// an offset.
    #[must_use]
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: impl Send + 'static) -> Self {
        Self { start, len, is_shared: false, owner: Box::new(owner) }
    }

    /// Creates a region that owns `tensor` and covers all of it.
    pub(crate) fn owned<T: Element>(mut tensor: Vec<T>) -> Self {
        let start = NonNull::from(&mut *tensor).cast();
        // SAFETY: the region keeps the vector, whose elements stay in place, and no other code uses
        // them. Any bytes are valid elements.
        unsafe { Self::new(start, size_of_val(&*tensor), tensor) }
    }

    /// Creates a region of memory that other processes may write, like [`new`](Self::new).
    pub(crate) fn of_shared(
        memory: &Arc<SharedMemory>,
        range: Range<usize>,
        owner: impl Send + 'static,
    ) -> Self {
        let bytes = shared_bytes(memory).part(range);
        let owner = Box::new((Arc::clone(memory), owner));
        Self { start: bytes.start(), len: bytes.len(), is_shared: true, owner }
    }

    /// Returns the vector that [`owned`](Self::owned) created the region from. Returns the region
    /// itself if it owns no vector of this element type.
    pub(crate) fn into_tensor<T: Element>(self) -> Result<Vec<T>, Self> {
        let Self { start, len, is_shared, owner } = self;
        let rest = |owner| Self { start, len, is_shared, owner };
        owner.downcast().map_err(rest).map(|tensor| *tensor)
    }

    /// Returns the length in bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Returns the address range of the memory.
    pub(crate) fn extent(&self) -> Range<usize> {
        let start = self.start.addr().get();
        start..start + self.len
    }

    /// Returns bytes `range` of the memory.
    pub(crate) fn bytes(&self, range: Range<usize>) -> TensorBytes<'_> {
        if self.is_shared {
            // SAFETY: the region is shared.
            return TensorBytes::Shared(unsafe { self.by_address() }.part(range));
        }
        assert!(range.start <= range.end && range.end <= self.len, "beyond the tensor");
        let start = self.start.as_ptr().wrapping_add(range.start);
        // SAFETY: the range is within the region, to which no other process writes. The memory
        // lives as long as its owner, which the region keeps, or as its loan, which does not end
        // before the region.
        TensorBytes::Own(unsafe { std::slice::from_raw_parts(start, range.len()) })
    }

    /// Returns a mutable view of bytes `range` of the memory.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> TensorBytesMut<'_> {
        if self.is_shared {
            return TensorBytesMut::Shared(self.as_shared().part(range));
        }
        assert!(range.start <= range.end && range.end <= self.len, "beyond the tensor");
        let start = self.start.as_ptr().wrapping_add(range.start);
        // SAFETY: as in `bytes`; `&mut self` makes the borrow unique.
        TensorBytesMut::Own(unsafe { std::slice::from_raw_parts_mut(start, range.len()) })
    }

    /// Returns a view that accesses all bytes by address, whether or not other processes may write
    /// to them.
    pub(crate) fn as_shared(&mut self) -> SharedBytes<'_> {
        // SAFETY: `&mut self` makes the borrow unique.
        unsafe { self.by_address() }
    }

    /// Returns a view that accesses all bytes by address.
    ///
    /// # Safety
    /// The region must be shared, or must have no other borrow.
    const unsafe fn by_address(&self) -> SharedBytes<'_> {
        // SAFETY: the memory lives as long as the region. Shared memory is mapped, and no reference
        // to its bytes exists. For other memory, the caller guarantees that there is no borrow.
        unsafe { SharedBytes::new(self.start, self.len) }
    }
}

/// Returns the bytes of memory that other processes may write.
pub(crate) fn shared_bytes(memory: &SharedMemory) -> SharedBytes<'_> {
    // SAFETY: the mapping lives as long as `memory`. It lies outside of every Rust allocation, and
    // no reference to its bytes exists.
    unsafe { SharedBytes::new(memory.start(), memory.len()) }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::Ordering::{Relaxed, Release};
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use std::thread::JoinHandle;

    use super::*;

    /// A thread that continuously overwrites shared memory, as a hostile process can. It ends when
    /// the scribbler is dropped.
    pub(crate) struct Scribbler {
        stop: Arc<AtomicBool>,
        thread: Option<JoinHandle<()>>,
    }

    impl Scribbler {
        /// Starts a thread that overwrites a range, which must consist of whole eight-byte words.
        /// Returns once the thread has written the whole range.
        pub(crate) fn start(memory: &Arc<SharedMemory>, range: Range<usize>) -> Self {
            assert!(range.end <= memory.len() && range.start.is_multiple_of(8));
            let [stop, begun] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
            let (memory, ended, begins) =
                (Arc::clone(memory), Arc::clone(&stop), Arc::clone(&begun));
            let scribble = move || {
                for round in 0_u64.. {
                    for at in range.clone().step_by(8) {
                        // Half of the rounds write only zero bytes or only bytes of 0x80.
                        let byte = [0, 0x80, round & 0xff, round >> 4 & 0xff];
                        let word = byte[(round & 3) as usize] * 0x0101_0101_0101_0101;
                        // SAFETY: the aligned word lies within the memory, which this thread keeps.
                        let place = unsafe { memory.start().add(at).cast() };
                        // SAFETY: as above; all other accesses are copies of shared bytes.
                        unsafe { AtomicU64::from_ptr(place.as_ptr()) }.store(word, Relaxed);
                    }
                    // The release lets ThreadSanitizer note the stores of each round.
                    begins.store(true, Release);
                    if ended.load(Relaxed) {
                        break;
                    }
                }
            };
            let thread = Some(std::thread::spawn(scribble));
            while !begun.load(Relaxed) {
                std::thread::yield_now();
            }
            Self { stop, thread }
        }
    }

    impl Drop for Scribbler {
        fn drop(&mut self) {
            self.stop.store(true, Relaxed);
            self.thread.take().unwrap().join().unwrap();
        }
    }

    /// Creates a region of `bytes` that keeps them and `owner`.
    pub(crate) fn region_of(mut bytes: Vec<u8>, owner: impl Send + 'static) -> Region {
        let (start, len) = (NonNull::from(&mut *bytes).cast(), bytes.len());
        // SAFETY: the region keeps the vector, which stays in place, and no other code uses it.
        unsafe { Region::new(start, len, (bytes, owner)) }
    }

    /// Creates a region of shared memory that holds `bytes`.
    pub(crate) fn shared_region_of(bytes: &[u8]) -> Region {
        let memory = Arc::new(SharedMemory::new(bytes.len().max(1)).unwrap().0);
        shared_bytes(&memory).part(0..bytes.len()).write(bytes);
        Region::of_shared(&memory, 0..bytes.len(), ())
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
            // SAFETY: the range is within the vector. The regions keep the vector, it stays in
            // place, and no other code uses it. Tests use overlapping regions one after the other.
            unsafe { Region::new(start.add(range.start), range.len(), Arc::clone(&bytes)) }
        })
    }

    #[test]
    fn a_region_is_the_memory_it_was_made_of() {
        let mut floats = [1f32, 2.0, 3.0];
        let (loan, mut region) = lend(as_bytes_mut(&mut floats));
        let TensorBytesMut::Own(bytes) = region.bytes_mut(4..8) else {
            panic!("the region is marked as shared")
        };
        bytes.copy_from_slice(&5f32.to_le_bytes());
        assert_eq!(region.bytes(8..12).to_vec(), 3f32.to_le_bytes());
        drop(region);
        drop(loan);
        assert_eq!(floats, [1.0, 5.0, 3.0]);
    }

    #[test]
    fn a_region_that_owns_a_tensor_gives_it_back() {
        let mut region = Region::owned(vec![1f32, 2.0]);
        let TensorBytesMut::Own(bytes) = region.bytes_mut(4..8) else {
            panic!("the region is marked as shared")
        };
        bytes.copy_from_slice(&5f32.to_le_bytes());
        let region = region.into_tensor::<i32>().expect_err("the region owns floats");
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
