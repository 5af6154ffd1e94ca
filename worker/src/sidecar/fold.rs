//! The fold of an op in shared memory: the ranks' tensors are summed where they lie.

#![expect(unsafe_code, reason = "the memory is shared with other processes")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use racksum_kernels::fold::fold_run;
use racksum_net::local::SharedMemory;
use racksum_proto::arith;
use racksum_proto::descriptor::Descriptor;

use crate::tensor::Region;

/// Bytes of a tensor that are folded at a time: those of all ranks of a host stay in a cache until
/// the sum is written over them. Whole elements of every type.
const CHUNK: usize = 32 << 10;

/// Where a rank's tensor lies.
#[derive(Debug, Clone)]
pub(super) struct Place {
    memory: Arc<SharedMemory>,
    at: usize,
    len: usize,
}

impl Place {
    /// `len` bytes of a memory from `at` on; nothing if it does not have them.
    pub(super) fn new(memory: &Arc<SharedMemory>, at: u64, len: u64) -> Option<Self> {
        let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
        let is_within = at.checked_add(len).is_some_and(|end| end <= memory.len());
        is_within.then(|| Self { memory: Arc::clone(memory), at, len })
    }

    /// The tensor, as an op of a client's.
    pub(super) fn region(&self) -> Region {
        let start = self.memory.start().as_ptr().wrapping_add(self.at);
        let start = NonNull::new(start).unwrap_or(NonNull::dangling());
        // SAFETY: within the memory, which stays where it is as long as it is kept. That the rank
        // leaves it alone, nothing but the job's sums depends on.
        unsafe { Region::new(start, self.len, Arc::clone(&self.memory)) }
    }

    /// Writes what another place has, of the same length, which nobody else has or writes to.
    pub(super) fn copy_from(&self, other: &Self) {
        let len = self.len.min(other.len);
        // SAFETY: the tensors are of two ranks, and nobody in this process works on them.
        unsafe { self.bytes_mut(0, len).copy_from_slice(other.bytes(0, len)) };
    }

    /// Bytes of the tensor, to be read.
    ///
    /// # Safety
    /// Nobody in this process writes to them.
    unsafe fn bytes(&self, from: usize, len: usize) -> &[u8] {
        // SAFETY: as the caller says; a rank that writes to its tensor while an op runs spoils its
        // job's sums, and nothing else depends on the values.
        unsafe { self.memory.bytes(self.at + from..self.at + from + len) }
    }

    /// Bytes of the tensor, to be written.
    ///
    /// # Safety
    /// Nobody in this process has them.
    #[expect(clippy::mut_from_ref, reason = "the caller sees to it that nobody else has them")]
    unsafe fn bytes_mut(&self, from: usize, len: usize) -> &mut [u8] {
        // SAFETY: as the caller says, and as above.
        unsafe { self.memory.bytes_mut(self.at + from..self.at + from + len) }
    }
}

/// An op that all ranks have called. Any number of threads may work on it.
#[derive(Debug)]
pub(super) struct Fold {
    descriptor: Descriptor,
    /// In rank order.
    places: Vec<Place>,
    /// How many ranks the job has: the divisor of an average.
    world: u32,
    /// How many of the places get the sum: of one host's part in a job the first.
    targets: usize,
    /// Chunks that nobody has begun begin here.
    next: AtomicUsize,
    /// Chunks that are not done.
    left: AtomicUsize,
}

impl Fold {
    /// A fold of tensors of one descriptor, each of a rank, in rank order. If these are not all
    /// ranks of the job, it makes their part of the sum, for the first.
    pub(super) fn new(descriptor: Descriptor, places: Vec<Place>, world: u32) -> Self {
        let targets = if places.len() == world as usize { places.len() } else { 1 };
        let chunks = places.first().map_or(0, |place| place.len.div_ceil(CHUNK));
        let (next, left) = (AtomicUsize::new(0), AtomicUsize::new(chunks));
        Self { descriptor, places, world, targets, next, left }
    }

    /// Whether there is nothing to fold.
    pub(super) fn is_empty(&self) -> bool {
        self.places.first().is_none_or(|place| place.len == 0)
    }

    /// What was folded.
    pub(super) const fn descriptor(&self) -> Descriptor {
        self.descriptor
    }

    /// Where the tensors lie.
    pub(super) fn places(&self) -> &[Place] {
        &self.places
    }

    /// Whether every chunk has been begun by some thread.
    pub(super) fn is_taken(&self) -> bool {
        self.next.load(Relaxed) * CHUNK >= self.places.first().map_or(0, |place| place.len)
    }

    /// Folds chunks until all have been begun. Returns true to the one thread that ends the last.
    pub(super) fn work(&self, sum: &mut Vec<u8>) -> bool {
        let len = self.places.first().map_or(0, |place| place.len);
        sum.resize(CHUNK, 0);
        loop {
            let from = self.next.fetch_add(1, Relaxed) * CHUNK;
            if from >= len {
                return false;
            }
            self.fold_chunk(from, &mut sum[..CHUNK.min(len - from)]);
            // What the others have written is there once this thread sees that they are done.
            if self.left.fetch_sub(1, AcqRel) == 1 {
                return true;
            }
        }
    }

    fn fold_chunk(&self, from: usize, sum: &mut [u8]) {
        let Self { places, world, targets, .. } = self;
        let is_part = *targets < places.len() || *targets < *world as usize;
        let partial = self.descriptor.of_partial_sum();
        let descriptor = if is_part { partial } else { self.descriptor };
        let len = sum.len();
        // SAFETY: a chunk is one thread's, and it writes only to `sum` while it reads these.
        let read = |place| unsafe { Place::bytes(place, from, len) };
        let inputs: Vec<&[u8]> = places.iter().map(read).collect();
        let terms = arith::Fold { world: *world, absent: false };
        let wire = descriptor.dtype.native_wire();
        fold_run(wire, descriptor.reduction, terms, &inputs, sum)
            .expect("a valid descriptor folds");
        if let [own] = &inputs[..]
            && *own == sum
        {
            // One rank's tensor is its own sum, but for what NaNs carry: nothing is to be written.
            return;
        }
        for place in &places[..*targets] {
            // SAFETY: a chunk is one thread's, and it reads none of them any more.
            unsafe { place.bytes_mut(from, len) }.copy_from_slice(sum);
        }
    }
}
