//! The fold of whole tensors, in place.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use racksum_kernels::codec;
use racksum_kernels::fold::fold_shared;
use racksum_kernels::shared::SharedBytes;
use racksum_proto::arith;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::schedule::Turn;

use super::place::LentRange;
use super::{CHUNK, SCANNED};
use crate::blocks::full_len;
use crate::sidecar::chunks::Chunks;

/// Number of bytes of a lone rank's tensor that are folded, compared and scanned together. It is a
/// multiple of every block size, and small enough that the bytes stay in the L1 cache.
const ALONE: usize = 8 << 10;

/// A fold of tensors with the same descriptor, one from each rank.
#[derive(Debug)]
pub(super) struct Tensors {
    descriptor: Descriptor,
    /// The ranks' tensors, in rank order.
    places: Vec<LentRange>,
    /// The number of ranks in the job, which is the divisor of an average.
    world: u32,
    /// The number of places, from the first on, that receive the sum: 1 if the job has ranks on
    /// other hosts, otherwise all.
    targets: usize,
    len: usize,
    chunks: Chunks,
    /// One bit for each block, set if the block is non-zero at any rank. Empty if this host has all
    /// ranks of the job.
    held: Vec<AtomicU64>,
}

impl Tensors {
    pub(super) fn new(descriptor: Descriptor, places: Vec<LentRange>, world: u32) -> Self {
        let is_part = places.len() < world as usize;
        let targets = if is_part { 1 } else { places.len() };
        let len = places.first().map_or(0, LentRange::len);
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

    /// Returns the indices of the blocks that are non-zero at any rank of this host. Call this
    /// after the fold has finished. Returns no blocks if this host has all ranks of the job.
    pub(super) fn held(&self) -> impl Iterator<Item = u32> {
        let bits = |word: &AtomicU64| {
            let word = word.load(Relaxed);
            (0..u64::BITS).filter(move |bit| word >> bit & 1 == 1)
        };
        let words = (0..).step_by(SCANNED).zip(&self.held);
        words.flat_map(move |(first, word)| bits(word).map(move |bit| first + bit))
    }

    /// Folds chunks until the turn is over. Returns true only in the thread that finishes the last
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
        let inputs: Vec<_> = self.places.iter().map(|place| place.part(from, len)).collect();
        let blocks = len.div_ceil(full);
        let mut first = 0;
        while first < blocks {
            let is_same =
                |nth: &usize| masks.iter().all(|mask| has(mask, *nth) == has(mask, first));
            let end = (first + 1..blocks).find(|nth| !is_same(nth)).unwrap_or(blocks);
            let run = first * full..len.min(end * full);
            let holders = inputs.iter().zip(&masks).filter(|(_, mask)| has(mask, first));
            let holders: Vec<_> = holders.map(|(input, _)| input.part(run.clone())).collect();
            self.fold_blocks(&holders, &mut sum[run]);
            first = end;
        }
        for place in &self.places[..self.targets] {
            place.part(from, len).write(sum);
        }
    }

    /// Folds a chunk of a lone rank's tensor. The sum equals the input except for NaN payloads, so
    /// usually nothing is written. Each part is scanned right after its fold, while it is still in
    /// the cache.
    fn fold_alone(&self, own: &LentRange, from: usize, sum: &mut [u8]) {
        for (nth, sum) in sum.chunks_mut(ALONE).enumerate() {
            let (from, len) = (from + nth * ALONE, sum.len());
            let input = own.part(from, len);
            self.fold_blocks(&[input], sum);
            if !input.equals(sum) {
                input.write(sum);
            }
            self.scan(own, from, len);
        }
    }

    /// Folds blocks that are non-zero at the same ranks. `holders` holds the blocks of these ranks.
    /// As in an aggregator's fold, the sum leaves out the other ranks.
    fn fold_blocks(&self, holders: &[SharedBytes<'_>], sum: &mut [u8]) {
        if holders.is_empty() {
            return sum.fill(0);
        }
        let is_part = self.places.len() < self.world as usize;
        let partial = self.descriptor.of_partial_sum();
        let descriptor = if is_part { partial } else { self.descriptor };
        let absent = holders.len() < self.places.len();
        let terms = arith::FoldTerms { world: self.world, absent };
        fold_shared(descriptor.dtype, descriptor.reduction, terms, holders, sum)
            .expect("operands with a valid descriptor can be folded");
    }

    /// Returns the non-zero blocks of a rank's chunk, and records them in `held`. Sets every
    /// element of the other blocks to +0.0.
    fn scan(&self, place: &LentRange, from: usize, len: usize) -> Mask {
        let Descriptor { dtype, .. } = self.descriptor;
        let (full, mut mask) = (full_len(&self.descriptor), Mask::default());
        for (nth, blocks) in place.part(from, len).chunks(SCANNED * full).enumerate() {
            mask[nth] = codec::scan_shared(dtype, self.descriptor.block_elements(), blocks);
            if !self.held.is_empty() {
                // A chunk of large blocks fills only part of a `u64`, so threads update the `u64`
                // atomically.
                let first = from / full + nth * SCANNED;
                self.held[first / SCANNED].fetch_or(mask[nth] << (first % SCANNED), Relaxed);
            }
        }
        mask
    }
}

/// One bit for each block of a chunk, set if the block is non-zero. The mask is large enough for a
/// chunk of the smallest blocks, which have 64 bytes.
type Mask = [u64; CHUNK / 64 / SCANNED];

const fn has(mask: &Mask, block: usize) -> bool {
    mask[block / SCANNED] >> (block % SCANNED) & 1 == 1
}
