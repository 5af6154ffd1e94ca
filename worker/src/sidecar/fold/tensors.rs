//! The fold of tensors: they are summed where they lie.

#![expect(unsafe_code, reason = "the memory is shared with other processes")]

use racksum_kernels::fold::fold_run;
use racksum_proto::arith;
use racksum_proto::descriptor::Descriptor;

use super::place::Place;
use super::{CHUNK, Chunks};

/// Tensors of one descriptor, each of a rank.
#[derive(Debug)]
pub(super) struct Tensors {
    descriptor: Descriptor,
    /// In rank order.
    places: Vec<Place>,
    /// How many ranks the job has: the divisor of an average.
    world: u32,
    /// How many of the places get the sum: of one host's part in a job the first.
    targets: usize,
    len: usize,
    chunks: Chunks,
}

impl Tensors {
    pub(super) fn new(descriptor: Descriptor, places: Vec<Place>, world: u32) -> Self {
        let targets = if places.len() == world as usize { places.len() } else { 1 };
        let len = places.first().map_or(0, Place::len);
        let chunks = Chunks::new(len.div_ceil(CHUNK));
        Self { descriptor, places, world, targets, len, chunks }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn is_taken(&self) -> bool {
        self.chunks.are_taken()
    }

    /// Folds chunks until all have been taken. Returns true to the one thread that ends the last.
    pub(super) fn work(&self, sum: &mut [u8]) -> bool {
        self.chunks.work(|chunk| {
            let from = chunk * CHUNK;
            self.fold_chunk(from, &mut sum[..CHUNK.min(self.len - from)]);
        })
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
