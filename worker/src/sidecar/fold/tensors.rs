//! The fold of whole tensors, in place.

#![expect(unsafe_code, reason = "the memory is shared with other processes")]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use racksum_kernels::codec;
use racksum_kernels::fold::fold_run;
use racksum_proto::arith;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::schedule::Turn;

use super::place::Place;
use super::{CHUNK, SCANNED};
use crate::blocks::full_len;
use crate::sidecar::chunks::Chunks;

/// The bytes of a single rank's tensor that are folded, compared and scanned together, so that they
/// stay in the L1 cache. A multiple of every block size.
const ALONE: usize = 8 << 10;

/// A fold of tensors with the same descriptor, one from each rank.
#[derive(Debug)]
pub(super) struct Tensors {
    descriptor: Descriptor,
    /// The ranks' tensors, in rank order.
    places: Vec<Place>,
    /// The number of ranks in the job, which is the divisor of an average.
    world: u32,
    /// The number of places that receive the sum: all, or only the first if the job has ranks on
    /// other hosts.
    targets: usize,
    len: usize,
    chunks: Chunks,
    /// One bit for each block that is non-zero at any rank. Empty if this host has all ranks of the
    /// job.
    held: Vec<AtomicU64>,
}

impl Tensors {
    pub(super) fn new(descriptor: Descriptor, places: Vec<Place>, world: u32) -> Self {
        let is_part = places.len() < world as usize;
        let targets = if is_part { 1 } else { places.len() };
        let len = places.first().map_or(0, Place::len);
        let chunks = Chunks::new(len.div_ceil(CHUNK));
        let full = full_len(&descriptor);
        let words = if is_part { len.div_ceil(full).div_ceil(SCANNED) } else { 0 };
        let held = std::iter::repeat_with(AtomicU64::default).take(words).collect();
        Self { descriptor, places, world, targets, len, chunks, held }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn is_taken(&self) -> bool {
        self.chunks.are_taken()
    }

    /// Returns the blocks that are non-zero at any rank, after the fold has finished. Returns none
    /// if this host has all ranks of the job.
    pub(super) fn held(&self) -> impl Iterator<Item = u32> {
        let bits = |word: &AtomicU64| {
            let word = word.load(Relaxed);
            (0..u64::BITS).filter(move |bit| word >> bit & 1 == 1)
        };
        let words = (0..).step_by(SCANNED).zip(&self.held);
        words.flat_map(move |(first, word)| bits(word).map(move |bit| first + bit))
    }

    /// Folds chunks until the turn is over. Returns true to the thread that finishes the last
    /// chunk.
    pub(super) fn work<J>(&self, turn: &mut Turn<J>, sum: &mut [u8]) -> bool {
        self.chunks.work(turn, |chunk| {
            let from = chunk * CHUNK;
            let len = CHUNK.min(self.len - from);
            self.fold_chunk(from, &mut sum[..len]);
            len * (self.places.len() + self.targets)
        })
    }

    fn fold_chunk(&self, from: usize, sum: &mut [u8]) {
        if let [own] = &self.places[..] {
            return self.fold_alone(own, from, sum);
        }
        let (full, len) = (full_len(&self.descriptor), sum.len());
        let masks: Vec<_> = self.places.iter().map(|place| self.scan(place, from, len)).collect();
        // SAFETY: only this thread accesses the chunk, and it writes only to `sum` while it reads
        // the inputs.
        let read = |place| unsafe { Place::bytes(place, from, len) };
        let inputs: Vec<&[u8]> = self.places.iter().map(read).collect();
        let blocks = len.div_ceil(full);
        let mut first = 0;
        while first < blocks {
            let is_same =
                |nth: &usize| masks.iter().all(|mask| has(mask, *nth) == has(mask, first));
            let end = (first + 1..blocks).find(|nth| !is_same(nth)).unwrap_or(blocks);
            let run = first * full..len.min(end * full);
            let holders = inputs.iter().zip(&masks).filter(|(_, mask)| has(mask, first));
            let holders: Vec<_> = holders.map(|(input, _)| &input[run.clone()]).collect();
            self.fold_blocks(&holders, &mut sum[run]);
            first = end;
        }
        for place in &self.places[..self.targets] {
            // SAFETY: only this thread accesses the chunk, and it no longer reads the inputs.
            unsafe { place.bytes_mut(from, len) }.copy_from_slice(sum);
        }
    }

    /// Folds a chunk of a single rank. Its sum equals its input except for NaN payloads, so almost
    /// nothing is written. Each part is scanned last, while it is in the cache.
    fn fold_alone(&self, own: &Place, from: usize, sum: &mut [u8]) {
        for (nth, sum) in sum.chunks_mut(ALONE).enumerate() {
            let (from, len) = (from + nth * ALONE, sum.len());
            // SAFETY: only this thread accesses the chunk, and it writes only to `sum` while it
            // reads the input.
            let input = unsafe { own.bytes(from, len) };
            self.fold_blocks(&[input], sum);
            if input != sum {
                // SAFETY: only this thread accesses the chunk, and it no longer reads the input.
                unsafe { own.bytes_mut(from, len) }.copy_from_slice(sum);
            }
            self.scan(own, from, len);
        }
    }

    /// Folds blocks that are non-zero at the same ranks. The sum leaves out all other ranks, as an
    /// aggregator's sum does.
    fn fold_blocks(&self, holders: &[&[u8]], sum: &mut [u8]) {
        if holders.is_empty() {
            return sum.fill(0);
        }
        let is_part = self.places.len() < self.world as usize;
        let partial = self.descriptor.of_partial_sum();
        let descriptor = if is_part { partial } else { self.descriptor };
        let absent = holders.len() < self.places.len();
        let terms = arith::Fold { world: self.world, absent };
        let wire = descriptor.dtype.native_wire();
        fold_run(wire, descriptor.reduction, terms, holders, sum)
            .expect("a valid descriptor folds");
    }

    /// Returns the non-zero blocks of a rank's chunk, and sets every element of the other blocks to
    /// +0.0.
    fn scan(&self, place: &Place, from: usize, len: usize) -> Mask {
        let Descriptor { dtype, .. } = self.descriptor;
        let (full, mut mask) = (full_len(&self.descriptor), Mask::default());
        // SAFETY: only this thread accesses the chunk, and it holds no reference to it yet.
        let chunk = unsafe { place.bytes_mut(from, len) };
        for (nth, blocks) in chunk.chunks_mut(SCANNED * full).enumerate() {
            mask[nth] = codec::scan_window(dtype, self.descriptor.block_elements(), blocks);
            if !self.held.is_empty() {
                // Chunks of a few large blocks share a `u64`, so threads update it atomically.
                let first = from / full + nth * SCANNED;
                self.held[first / SCANNED].fetch_or(mask[nth] << (first % SCANNED), Relaxed);
            }
        }
        mask
    }
}

/// One bit for each non-zero block of a chunk. The smallest blocks have 64 bytes.
type Mask = [u64; CHUNK / 64 / SCANNED];

const fn has(mask: &Mask, block: usize) -> bool {
    mask[block / SCANNED] >> (block % SCANNED) & 1 == 1
}
