//! Which bytes of a window's contributions belong together: the plan of a fold.

use alloc::vec::Vec;
use core::ops::Range;

use crate::geometry::Geometry;
use crate::ids::Rank;

/// Where a run lies in one rank's packed payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input {
    /// The rank.
    pub rank: Rank,
    /// Bytes of its payload before the run.
    pub offset: usize,
}

/// Elements that the same ranks contribute: one run of bytes in each packed payload.
#[derive(Debug)]
pub struct Run<'a> {
    /// Its bytes in the result's packed payload; as many in each input.
    pub out: Range<usize>,
    /// The contributors in rank order.
    pub inputs: &'a [Input],
    /// Whether some rank does not contribute: it holds zeros there.
    pub absent: bool,
}

/// Plans folds. Its buffers are allocated once.
#[derive(Debug)]
pub struct FoldPlan {
    /// Bytes of each rank's payload that are planned.
    offsets: Vec<usize>,
    inputs: Vec<Input>,
}

impl FoldPlan {
    /// A planner for up to `world` ranks.
    #[must_use]
    pub fn new(world: usize) -> Self {
        Self { offsets: Vec::with_capacity(world), inputs: Vec::with_capacity(world) }
    }

    /// Calls `visit` for each run of window `index`, in order, given the blocks that each rank
    /// contributes. Neighbouring blocks of the same contributors are one run, unless the wire
    /// type scales each block.
    pub fn runs(
        &mut self,
        geometry: &Geometry,
        index: u32,
        masks: impl Iterator<Item = u64> + Clone,
        mut visit: impl FnMut(Run<'_>),
    ) {
        let world = masks.clone().count();
        self.offsets.clear();
        self.offsets.resize(world, 0);
        let union = masks.clone().fold(0, |union, mask| union | mask);
        let same_ranks =
            |one: usize, other: usize| masks.clone().all(|m| m >> one & 1 == m >> other & 1);
        let mut rest = union;
        let mut at = 0;
        while rest != 0 {
            let block = rest.trailing_zeros() as usize;
            let mut len = 0;
            while rest != 0 {
                let next = rest.trailing_zeros() as usize;
                if next != block && (geometry.wire().is_scaled() || !same_ranks(block, next)) {
                    break;
                }
                rest &= rest - 1;
                len += geometry.wire().block_len(geometry.block_elements_of(index, next));
            }
            self.inputs.clear();
            for (rank, mask) in (0..).zip(masks.clone()) {
                if mask >> block & 1 == 1 {
                    let offset = self.offsets[usize::from(rank)];
                    self.inputs.push(Input { rank: Rank(rank), offset });
                    self.offsets[usize::from(rank)] += len;
                }
            }
            let absent = self.inputs.len() < world;
            visit(Run { out: at..at + len, inputs: &self.inputs, absent });
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

    /// A run: its bytes in the result, and where it lies at each rank.
    type Seen = (Range<usize>, Vec<(u16, usize)>);

    fn runs(descriptor: &Descriptor, masks: &[u64]) -> Vec<Seen> {
        let mut runs = vec![];
        let geometry = Geometry::new(descriptor);
        FoldPlan::new(4).runs(&geometry, 0, masks.iter().copied(), |run| {
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
    fn scaled_blocks_are_folded_one_by_one() {
        let descriptor = Descriptor { wire: WireType::Int8, ..Descriptor::sum(300, DType::F32) };
        let expected = [(0..260, vec![(0, 0)]), (260..308, vec![(0, 260)])];
        assert_eq!(runs(&descriptor, &[0b11]), expected);
    }
}
