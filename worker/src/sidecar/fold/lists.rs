//! The fold of lists of blocks. It processes only the blocks in the union of the lists, not the
//! whole tensor.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use racksum_kernels::codec;
use racksum_kernels::fold::fold_shared;
use racksum_proto::arith;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::schedule::Turn;

use super::place::LentRange;
use super::{CHUNK, Handed, SCANNED, Share, budget_of};
use crate::blocks::{Blocks, Listed, Union, full_len, len_of};
use crate::sidecar::chunks::Chunks;
use crate::sidecar::fold_error::FoldError;
use crate::sidecar::sums::Sums;

/// A fold for which at least one rank has passed a list of blocks.
#[derive(Debug)]
pub(super) struct Lists {
    descriptor: Descriptor,
    /// The ranks' shares, in rank order.
    shares: Vec<Share>,
    /// The number of ranks in the job.
    world: u32,
    /// The fold in progress. The first thread that works on the fold creates it, so that a fold in
    /// the queue holds no memory for its sums.
    begun: OnceLock<Result<Begun, FoldError>>,
    /// Whether a thread has been admitted to begin the fold.
    is_admitted: AtomicBool,
}

/// A fold in progress.
#[derive(Debug)]
struct Begun {
    /// The place of each share's values.
    places: Vec<LentRange>,
    union: Union,
    sums: Sums,
    chunks: Chunks,
    /// The first error from writing the sums.
    failed: OnceLock<FoldError>,
}

impl Lists {
    pub(super) const fn new(descriptor: Descriptor, shares: Vec<Share>, world: u32) -> Self {
        let begun = OnceLock::new();
        let is_admitted = AtomicBool::new(false);
        Self { descriptor, shares, world, begun, is_admitted }
    }

    pub(super) fn is_taken(&self) -> bool {
        let taken = |begun: &Begun| begun.chunks.are_taken();
        self.begun.get().is_some_and(|begun| begun.as_ref().map_or(true, taken))
    }

    pub(super) fn admit(&self) -> bool {
        self.begun.get().is_some() || !self.is_admitted.swap(true, Relaxed)
    }

    /// Folds chunks until the turn is over or no chunk is left. Returns true only in the thread
    /// that finishes the last chunk. If there are no chunks or the fold cannot begin, returns true
    /// only in the thread that tried to begin it.
    pub(super) fn work<J>(
        &self,
        turn: &mut Turn<J>,
        sum: &mut [u8],
        has_begun: impl FnOnce(),
    ) -> bool {
        let mut is_first = false;
        let begun = self.begun.get_or_init(|| {
            is_first = true;
            self.begin()
        });
        if is_first {
            has_begun();
        }
        let per_chunk = CHUNK / full_len(&self.descriptor);
        match begun {
            Ok(begun) if begun.union.len() > 0 => begun.chunks.work(turn, |chunk| {
                let from = chunk * per_chunk;
                let blocks = from..begun.union.len().min(from + per_chunk);
                let cost = blocks.len() * full_len(&self.descriptor) * (self.shares.len() + 1);
                if let Err(error) = self.fold_chunk(begun, blocks, sum) {
                    begun.failed.get_or_init(|| error);
                }
                cost
            }),
            _ => is_first,
        }
    }

    /// Returns the sums of a finished fold.
    pub(super) fn sums(&self) -> Result<&Sums, FoldError> {
        let begun = self.begun.get().expect("a finished fold has begun");
        let Begun { sums, failed, .. } = begun.as_ref().map_err(Clone::clone)?;
        failed.get().map_or(Ok(sums), |failed| Err(failed.clone()))
    }

    /// Computes the union of the ranks' blocks, and creates the file that receives the sums.
    fn begin(&self) -> Result<Begun, FoldError> {
        let (mut listed, mut places) = (Vec::new(), Vec::new());
        for (list, share) in (0..).zip(&self.shares) {
            let add = |(index, at)| Listed { index, list, at: at * full_len(&self.descriptor) };
            match &share.handed {
                Handed::List(handed) => {
                    let read = handed.read(&self.descriptor);
                    let (indices, place) = read.ok_or(FoldError::By(share.rank))?;
                    listed.extend(indices.into_iter().zip(0..).map(add));
                    places.push(place);
                }
                Handed::Tensor(place) => {
                    let blocks = nonzero(&self.descriptor, place).into_iter();
                    listed.extend(blocks.map(|index| add((index, index as usize))));
                    places.push(place.clone());
                }
            }
        }
        let union = Union::new(listed);
        let indices: Vec<u32> = union.indices().collect();
        let sums = Sums::begin(&self.descriptor, &indices, budget_of(&self.shares))?;
        let chunks = Chunks::new(union.len().div_ceil(CHUNK / full_len(&self.descriptor)));
        Ok(Begun { places, union, sums, chunks, failed: OnceLock::new() })
    }

    /// Folds a range of the union's blocks, and writes their sums.
    fn fold_chunk(
        &self,
        begun: &Begun,
        blocks: Range<usize>,
        sum: &mut [u8],
    ) -> Result<(), FoldError> {
        let is_whole = self.shares.len() == self.world as usize;
        let partial = self.descriptor.of_partial_sum();
        let descriptor = if is_whole { self.descriptor } else { partial };
        let (mut inputs, mut used, first) = (Vec::new(), 0, blocks.start);
        for nth in blocks {
            let listed = begun.union.of(nth);
            let index = listed[0].index;
            let len = len_of(&descriptor, index);
            inputs.clear();
            let values = |it: &Listed| begun.places[it.list as usize].part(it.at, len);
            inputs.extend(listed.iter().map(values));
            let absent = inputs.len() < self.shares.len();
            let out = &mut sum[used..used + len];
            let terms = arith::FoldTerms { world: self.world, absent };
            fold_shared(descriptor.dtype, descriptor.reduction, terms, &inputs, out)
                .expect("operands with a valid descriptor can be folded");
            if is_whole {
                write_to_tensors(&self.shares, index as usize * full_len(&self.descriptor), out);
            }
            used += len;
        }
        begun.sums.write((first * full_len(&self.descriptor)) as u64, &sum[..used])
    }
}

/// Writes the job's sums into the tensors that ranks have passed. Blocks that are not in `sums` are
/// already zero in these tensors, because the host has contributed every non-zero block.
pub(in crate::sidecar) fn give(descriptor: &Descriptor, shares: &[Share], sums: &Blocks) {
    let full = full_len(descriptor);
    for (index, block) in sums.indices.iter().zip(sums.values.chunks(full)) {
        write_to_tensors(shares, *index as usize * full, block);
    }
}

fn write_to_tensors(shares: &[Share], at: usize, block: &[u8]) {
    for share in shares {
        if let Handed::Tensor(place) = &share.handed {
            place.part(at, block.len()).write(block);
        }
    }
}

/// Returns the indices of a tensor's non-zero blocks, and sets every element of the other blocks to
/// +0.0.
fn nonzero(descriptor: &Descriptor, place: &LentRange) -> Vec<u32> {
    let (dtype, elements) = (descriptor.dtype, descriptor.block_elements());
    let tensor = place.part(0, place.len());
    let mut found = Vec::new();
    let windows = tensor.chunks(SCANNED * elements * dtype.size());
    for (first, window) in (0..).step_by(SCANNED).zip(windows) {
        let mut mask = codec::scan_shared(dtype, elements, window);
        while mask != 0 {
            found.push(first + mask.trailing_zeros());
            mask &= mask - 1;
        }
    }
    found
}
