//! Occupancy of a stream: the windows that each rank declared non-zero, and so owes.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use bitvec::boxed::BitBox;
use bitvec::order::Lsb0;
use bitvec::slice::BitSlice;
use bitvec::vec::BitVec;

use crate::ids::Rank;
use crate::wire::OPEN_AHEAD;

/// A ring of one bit per position. A bit's index is the position modulo [`OPEN_AHEAD`].
type Ring = BitBox<u64, Lsb0>;

fn ring() -> Ring {
    BitVec::repeat(false, slot(OPEN_AHEAD - 1) + 1).into_boxed_bitslice()
}

/// One ring for each rank, and the union of these rings.
#[derive(Debug)]
struct Rings {
    ranks: Box<[Ring]>,
    union: Ring,
}

impl Rings {
    fn new(world: usize) -> Self {
        let ranks = (0..world).map(|_| ring()).collect::<Vec<_>>().into_boxed_slice();
        Self { ranks, union: ring() }
    }

    fn set(&mut self, rank: Rank, position: u64, bits: &BitSlice<u64, Lsb0>) {
        let ring = &mut self.ranks[rank.index()];
        let (first, rest) = bits.split_at(bits.len().min(ring.len() - slot(position)));
        for (at, part) in [(slot(position), first), (0, rest)] {
            ring[at..at + part.len()].copy_from_bitslice(part);
            let union = &mut self.union[at..at + part.len()];
            *union |= part;
        }
    }

    fn clear(&mut self, from: u64, to: u64) {
        // A failed op may have more windows than the ring has bits.
        let len = usize::try_from(to - from).unwrap_or(usize::MAX).min(self.union.len());
        for ring in self.ranks.iter_mut().chain([&mut self.union]) {
            if len == 1 {
                ring.set(slot(from), false);
                continue;
            }
            let end = slot(from) + len;
            let wrapped = end.saturating_sub(ring.len());
            let end = end.min(ring.len());
            ring[slot(from)..end].fill(false);
            ring[..wrapped].fill(false);
        }
    }

    fn forget(&mut self, rank: Rank) {
        self.ranks[rank.index()].fill(false);
        self.union.fill(false);
        for ring in &self.ranks {
            self.union |= ring;
        }
    }
}

/// The windows that each rank owes and, in a job that has moved to this aggregator, the sums that
/// each rank holds from before the move.
///
/// If some ranks hold the sum of a window, only the first of them can owe the window. If all ranks
/// hold the sum, no rank owes the window (wire: W-63).
#[derive(Debug)]
pub(super) struct Occupancy {
    owed: Rings,
    held: Option<Rings>,
    gone: Box<[bool]>,
}

impl Occupancy {
    /// Creates an empty occupancy for `world` ranks. `moved` says whether the job has moved to this
    /// aggregator.
    pub(super) fn new(world: usize, moved: bool) -> Self {
        Self {
            owed: Rings::new(world),
            held: moved.then(|| Rings::new(world)),
            gone: vec![false; world].into(),
        }
    }

    /// Records which windows `rank` owes and which sums it holds, starting at `position`.
    pub(super) fn set(
        &mut self,
        rank: Rank,
        position: u64,
        owed: &BitSlice<u64, Lsb0>,
        held: &BitSlice<u64, Lsb0>,
    ) {
        self.owed.set(rank, position, owed);
        if let Some(rings) = &mut self.held {
            rings.set(rank, position, held);
        }
    }

    /// Forgets positions `from..to`, which have been folded or skipped.
    pub(super) fn clear(&mut self, from: u64, to: u64) {
        self.owed.clear(from, to);
        if let Some(held) = &mut self.held {
            held.clear(from, to);
        }
    }

    /// Forgets all windows that the lost rank `rank` owes and all sums that it holds.
    pub(super) fn forget(&mut self, rank: Rank) {
        self.gone[rank.index()] = true;
        self.owed.forget(rank);
        if let Some(held) = &mut self.held {
            held.forget(rank);
        }
    }

    /// Returns the first rank that holds the sum of the window at `position` from before the move.
    pub(super) fn holder(&self, position: u64) -> Option<Rank> {
        let held = self.held.as_ref().filter(|held| held.union[slot(position)])?;
        let mut ranks = (0..).map(Rank).zip(&held.ranks);
        ranks.find(|(_, ring)| ring[slot(position)]).map(|(rank, _)| rank)
    }

    /// Returns whether all remaining ranks hold the sum of the window at `position`.
    fn is_held_by_all(&self, position: u64) -> bool {
        self.held.as_ref().is_some_and(|held| {
            held.ranks.iter().zip(&self.gone).all(|(ring, gone)| *gone || ring[slot(position)])
        })
    }

    /// Returns whether `rank` owes the window at `position`.
    pub(super) fn owes(&self, rank: Rank, position: u64) -> bool {
        let owes = self.owed.ranks[rank.index()][slot(position)];
        owes && self
            .holder(position)
            .is_none_or(|holder| holder == rank && !self.is_held_by_all(position))
    }

    /// Returns how many ranks owe the window at `position`.
    pub(super) fn owing(&self, position: u64) -> u32 {
        match self.holder(position) {
            Some(holder) => u32::from(self.owes(holder, position)),
            None => self.owed.ranks.iter().map(|ring| u32::from(ring[slot(position)])).sum(),
        }
    }

    /// Returns the first position in `from..to` that some rank owes.
    pub(super) fn next(&self, from: u64, to: u64) -> Option<u64> {
        let mut from = from;
        loop {
            let position = first_one(&self.owed.union, from, to)?;
            if self.holder(position).is_none() || self.owing(position) > 0 {
                return Some(position);
            }
            from = position + 1;
        }
    }

    /// Returns the first position in `from..to` that `rank` owes.
    pub(super) fn next_of(&self, rank: Rank, from: u64, to: u64) -> Option<u64> {
        let mut from = from;
        loop {
            let position = first_one(&self.owed.ranks[rank.index()], from, to)?;
            if self.owes(rank, position) {
                return Some(position);
            }
            from = position + 1;
        }
    }
}

/// Returns the index of a position in a ring.
fn slot(position: u64) -> usize {
    usize::try_from(position % OPEN_AHEAD).unwrap_or(usize::MAX)
}

/// Returns the first position in `from..to` whose bit is set. Searches at most as many positions as
/// the ring has bits.
fn first_one(ring: &BitSlice<u64, Lsb0>, from: u64, to: u64) -> Option<u64> {
    if from >= to {
        return None;
    }
    let start = slot(from);
    // With a dense tensor, the search usually ends here.
    if ring[start] {
        return Some(from);
    }
    let len = usize::try_from(to - from).unwrap_or(usize::MAX).min(ring.len());
    let straight = len.min(ring.len() - start);
    let found = ring[start..start + straight]
        .first_one()
        .or_else(|| ring[..len - straight].first_one().map(|i| straight + i))?;
    Some(from + found as u64)
}

#[cfg(test)]
mod tests {
    use bitvec::bits;

    use super::*;

    #[test]
    fn stretches_wrap_around_the_ring() {
        let mut occupancy = Occupancy::new(2, false);
        let at = OPEN_AHEAD - 2;
        occupancy.set(Rank(1), at, bits![u64, Lsb0; 0, 0, 1, 0, 1], bits![u64, Lsb0;]);
        occupancy.set(Rank(0), at, bits![u64, Lsb0; 0, 0, 0, 0, 1], bits![u64, Lsb0;]);
        assert_eq!(occupancy.next(at, at + 5), Some(at + 2));
        assert_eq!(occupancy.next_of(Rank(0), at, at + 5), Some(at + 4));
        assert_eq!(occupancy.next(at, at + 2), None);
        assert_eq!((occupancy.owing(at + 2), occupancy.owing(at + 4)), (1, 2));
        occupancy.clear(at, at + 4);
        assert_eq!(occupancy.next(at, at + 5), Some(at + 4));
        assert!(!occupancy.owes(Rank(1), at + 2) && occupancy.owes(Rank(1), at + 4));
    }

    #[test]
    fn what_a_rank_alone_owed_nobody_owes_once_it_is_forgotten() {
        let mut occupancy = Occupancy::new(2, false);
        occupancy.set(Rank(0), 0, bits![u64, Lsb0; 1, 0, 1], bits![u64, Lsb0;]);
        occupancy.set(Rank(1), 0, bits![u64, Lsb0; 1, 1, 0], bits![u64, Lsb0;]);
        occupancy.forget(Rank(0));
        assert_eq!([0, 1, 2].map(|at| occupancy.owing(at)), [1, 1, 0]);
        assert_eq!((occupancy.next(1, 3), occupancy.next(2, 3)), (Some(1), None));
    }

    #[test]
    fn where_a_rank_has_the_sum_the_first_that_has_it_owes_it_alone() {
        // wire: W-63
        let mut occupancy = Occupancy::new(3, true);
        // The ranks that hold the sums of the five windows are: none, the last, the last two, all,
        // and all but the first. The last window's sum is zero, so no rank owes it.
        occupancy.set(Rank(0), 0, bits![u64, Lsb0; 1, 1, 1, 1, 0], bits![u64, Lsb0; 0, 0, 0, 1, 0]);
        occupancy.set(Rank(1), 0, bits![u64, Lsb0; 0, 0, 1, 1, 0], bits![u64, Lsb0; 0, 0, 1, 1, 1]);
        occupancy.set(Rank(2), 0, bits![u64, Lsb0; 1, 1, 1, 0, 0], bits![u64, Lsb0; 0, 1, 1, 1, 1]);
        let owing = |occupancy: &Occupancy, at| {
            let owes = (0..3).filter(|rank| occupancy.owes(Rank(*rank), at)).collect::<Vec<_>>();
            assert_eq!(occupancy.owing(at) as usize, owes.len());
            owes
        };
        let all = |occupancy: &Occupancy| [0, 1, 2, 3, 4].map(|at| owing(occupancy, at));
        assert_eq!(all(&occupancy), [vec![0, 2], vec![2], vec![1], vec![], vec![]]);
        assert_eq!(
            [0, 1, 2, 3].map(|from| occupancy.next(from, 5)),
            [Some(0), Some(1), Some(2), None]
        );
        assert_eq!([0, 1].map(|from| occupancy.next_of(Rank(0), from, 5)), [Some(0), None]);
        // Once the holder is lost, the next holder owes the window. If no other rank holds the sum,
        // each remaining rank owes its own contribution again.
        occupancy.forget(Rank(2));
        assert_eq!(all(&occupancy), [vec![0], vec![0], vec![1], vec![], vec![]]);
    }

    #[test]
    fn more_positions_than_the_ring_has_places_can_be_skipped() {
        let mut occupancy = Occupancy::new(1, false);
        occupancy.set(Rank(0), 5, bits![u64, Lsb0; 1, 1], bits![u64, Lsb0;]);
        occupancy.clear(3, 3 + 4 * OPEN_AHEAD);
        assert_eq!(occupancy.next(5, 5 + OPEN_AHEAD), None);
    }
}
