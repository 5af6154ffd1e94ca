//! The plan of a fold: which bytes of a window's contributions are folded together.

use alloc::vec::Vec;
use core::ops::Range;

use crate::geometry::Geometry;
use crate::ids::Rank;

/// The place of a run in one rank's packed payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input {
    /// The contributing rank.
    pub rank: Rank,
    /// The number of bytes of the rank's payload before the run.
    pub offset: usize,
}

/// A run of elements with the same contributors: one range of bytes in each packed payload.
#[derive(Debug)]
pub struct Run<'a> {
    /// The run's range of bytes in the result's packed payload. The run is equally long in each
    /// input.
    pub out: Range<usize>,
    /// The contributors in rank order.
    pub inputs: &'a [Input],
    /// Whether some participating rank contributes nothing to the run. Its share counts as zeros.
    pub absent: bool,
}

/// A planner of folds that allocates its buffers once.
#[derive(Debug)]
pub struct FoldPlan {
    /// For each rank, the mask of the blocks that it contributes.
    masks: Vec<u64>,
    /// The number of bytes of each rank's payload that the runs so far cover.
    offsets: Vec<usize>,
    inputs: Vec<Input>,
}

impl FoldPlan {
    /// Creates a planner for up to `world` ranks.
    #[must_use]
    pub fn new(world: usize) -> Self {
        Self {
            masks: Vec::with_capacity(world),
            offsets: Vec::with_capacity(world),
            inputs: Vec::with_capacity(world),
        }
    }

    /// Calls `visit` for each run of window `index`, in order. `masks` holds, for each rank, the
    /// mask of the blocks that it contributes, and `present` is the number of ranks that take part.
    /// Neighbouring blocks with the same contributors form one run, unless the wire type scales
    /// each block.
    pub fn runs(
        &mut self,
        geometry: &Geometry,
        index: u32,
        masks: impl Iterator<Item = u64>,
        present: u16,
        mut visit: impl FnMut(Run<'_>),
    ) {
        let Self { masks: ranks, offsets, inputs } = self;
        ranks.clear();
        ranks.extend(masks);
        offsets.clear();
        offsets.resize(ranks.len(), 0);
        let mut rest = ranks.iter().fold(0, |union, mask| union | mask);
        let mut at = 0;
        while rest != 0 {
            let block = rest.trailing_zeros();
            let holds = |mask: u64| mask >> block & 1 == 1;
            let run = if geometry.wire().is_scaled() {
                1 << block
            } else {
                let alike = |mask: &u64| if holds(*mask) { *mask } else { !*mask };
                let other = ranks.iter().map(alike).fold(rest, |run, alike| run & alike) ^ rest;
                // The blocks before the first one with other contributors, or all remaining blocks
                // if all have the same contributors.
                rest & (other & other.wrapping_neg()).wrapping_sub(1)
            };
            rest ^= run;
            let len = geometry.payload_len(index, run);
            inputs.clear();
            for ((rank, mask), offset) in (0..).zip(ranks.iter()).zip(offsets.iter_mut()) {
                if holds(*mask) {
                    inputs.push(Input { rank: Rank(rank), offset: *offset });
                    *offset += len;
                }
            }
            let absent = inputs.len() < usize::from(present);
            visit(Run { out: at..at + len, inputs, absent });
            at += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;
    use crate::descriptor::Descriptor;
    use crate::dtype::{DType, WireType};

    /// The bytes of a run in the result, and each contributor with the run's offset in its payload.
    type Seen = (Range<usize>, Vec<(u16, usize)>);

    fn runs(descriptor: &Descriptor, masks: &[u64]) -> Vec<Seen> {
        let mut runs = vec![];
        let geometry = Geometry::new(descriptor);
        let present = u16::try_from(masks.len()).unwrap();
        FoldPlan::new(4).runs(&geometry, 0, masks.iter().copied(), present, |run| {
            assert_eq!(run.absent, run.inputs.len() < masks.len());
            let inputs = run.inputs.iter().map(|input| (input.rank.0, input.offset)).collect();
            runs.push((run.out, inputs));
        });
        runs
    }

    #[test]
    fn a_dense_window_is_one_run() {
        let descriptor = Descriptor::sum(60 * 256, DType::F32);
        let full = (1 << 60) - 1;
        assert_eq!(runs(&descriptor, &[full, full]), [(0..61_440, vec![(0, 0), (1, 0)])]);
    }

    #[test]
    fn runs_follow_the_contributors() {
        let descriptor = Descriptor::sum(60 * 256, DType::F32);
        let expected = [
            (0..1024, vec![(0, 0)]),
            (1024..2048, vec![(0, 1024), (1, 0)]),
            (2048..4096, vec![(1, 1024)]),
        ];
        assert_eq!(runs(&descriptor, &[0b00011, 0b11010]), expected);
    }

    #[test]
    fn runs_are_those_that_a_look_at_each_block_gives() {
        // This window is the tensor's last, and its last block is short.
        let descriptor = Descriptor::sum(59 * 256 + 7, DType::F32);
        let bytes = |block: u32| if block == 59 { 28 } else { 1024 };
        let contributors = |masks: [u64; 3], block: u32| masks.map(|mask| mask >> block & 1 == 1);
        let mut random = 1_u64;
        for _ in 0..2_000 {
            // Masks that are products of two random words have long runs with the same
            // contributors.
            let masks = [(); 3].map(|()| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let (one, other) = (random >> 32, random >> (random >> 58));
                one.wrapping_mul(other) & ((1 << 60) - 1)
            });
            let union = masks.iter().fold(0, |union, mask| union | mask);
            let mut expected: Vec<([bool; 3], usize)> = vec![];
            for block in (0..60).filter(|block| union >> block & 1 == 1) {
                let ranks = contributors(masks, block);
                match expected.last_mut() {
                    Some((before, len)) if *before == ranks => *len += bytes(block),
                    _ => expected.push((ranks, bytes(block))),
                }
            }
            let mut ends = [0; 3];
            let mut end = 0;
            let seen = runs(&descriptor, &masks);
            assert_eq!(seen.len(), expected.len(), "{masks:x?}");
            for ((out, inputs), (ranks, len)) in seen.into_iter().zip(expected) {
                assert_eq!(out, end..end + len, "{masks:x?}");
                end += len;
                let of = |rank: usize| (u16::try_from(rank).unwrap(), ends[rank]);
                let wanted: Vec<_> = (0..3).filter(|rank| ranks[*rank]).map(of).collect();
                assert_eq!(inputs, wanted, "{masks:x?}");
                (0..3).filter(|rank| ranks[*rank]).for_each(|rank| ends[rank] += len);
            }
        }
    }

    #[test]
    fn a_rank_that_takes_no_part_holds_no_zeros() {
        let geometry = Geometry::new(&Descriptor::sum(256, DType::F32));
        for (present, absent) in [(3, true), (2, false)] {
            FoldPlan::new(3).runs(&geometry, 0, [1, 0, 1].into_iter(), present, |run| {
                assert_eq!(run.absent, absent);
            });
        }
    }

    #[test]
    fn scaled_blocks_are_folded_one_by_one() {
        let descriptor = Descriptor { wire: WireType::Int8, ..Descriptor::sum(300, DType::F32) };
        let expected = [(0..260, vec![(0, 0)]), (260..308, vec![(0, 260)])];
        assert_eq!(runs(&descriptor, &[0b11]), expected);
    }
}
