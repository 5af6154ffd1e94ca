//! Who owes what: which windows of a stream each rank said are non-zero.

use alloc::boxed::Box;
use alloc::vec::Vec;

use bitvec::boxed::BitBox;
use bitvec::order::Lsb0;
use bitvec::slice::BitSlice;
use bitvec::vec::BitVec;

use crate::ids::Rank;

/// How far ahead of the lowest window a rank may open: the span of the rings below.
pub const OPEN_AHEAD: u64 = 2 * crate::wire::Open::MAX_WINDOWS as u64;

/// One ring of bits a rank, and one for the union, by position modulo [`OPEN_AHEAD`].
#[derive(Debug)]
pub(super) struct Occupancy {
    ranks: Box<[BitBox<u64, Lsb0>]>,
    union: BitBox<u64, Lsb0>,
}

impl Occupancy {
    pub(super) fn new(world: usize) -> Self {
        let ring = || BitVec::repeat(false, slot(OPEN_AHEAD - 1) + 1).into_boxed_bitslice();
        Self {
            ranks: (0..world).map(|_| ring()).collect::<Vec<_>>().into_boxed_slice(),
            union: ring(),
        }
    }

    /// Records which windows from `position` on `rank` owes.
    pub(super) fn set(&mut self, rank: Rank, position: u64, owed: &BitSlice<u64, Lsb0>) {
        let ring = &mut self.ranks[rank.index()];
        let (first, rest) = owed.split_at(owed.len().min(ring.len() - slot(position)));
        for (at, part) in [(slot(position), first), (0, rest)] {
            ring[at..at + part.len()].copy_from_bitslice(part);
            let union = &mut self.union[at..at + part.len()];
            *union |= part;
        }
    }

    /// Forgets positions `from..to`, which have been folded or skipped.
    pub(super) fn clear(&mut self, from: u64, to: u64) {
        // An op that failed may have more windows than the ring has places.
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

    /// Forgets all that `rank` owes.
    pub(super) fn forget(&mut self, rank: Rank) {
        self.ranks[rank.index()].fill(false);
        self.union.fill(false);
        for ring in &self.ranks {
            self.union |= ring;
        }
    }

    /// Whether `rank` owes the window at `position`.
    pub(super) fn owes(&self, rank: Rank, position: u64) -> bool {
        self.ranks[rank.index()][slot(position)]
    }

    /// How many ranks owe the window at `position`.
    pub(super) fn owing(&self, position: u64) -> u32 {
        self.ranks.iter().map(|ring| u32::from(ring[slot(position)])).sum()
    }

    /// The first position in `from..to` that some rank owes.
    pub(super) fn next(&self, from: u64, to: u64) -> Option<u64> {
        first_one(&self.union, from, to)
    }

    /// The first position in `from..to` that `rank` owes.
    pub(super) fn next_of(&self, rank: Rank, from: u64, to: u64) -> Option<u64> {
        first_one(&self.ranks[rank.index()], from, to)
    }
}

/// A position's place in a ring.
fn slot(position: u64) -> usize {
    usize::try_from(position % OPEN_AHEAD).unwrap_or(usize::MAX)
}

/// The first set bit of positions `from..to`, at most a ring's length.
fn first_one(ring: &BitSlice<u64, Lsb0>, from: u64, to: u64) -> Option<u64> {
    if from >= to {
        return None;
    }
    let start = slot(from);
    // The common case of a dense tensor.
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
        let mut occupancy = Occupancy::new(2);
        let at = OPEN_AHEAD - 2;
        occupancy.set(Rank(1), at, bits![u64, Lsb0; 0, 0, 1, 0, 1]);
        occupancy.set(Rank(0), at, bits![u64, Lsb0; 0, 0, 0, 0, 1]);
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
        let mut occupancy = Occupancy::new(2);
        occupancy.set(Rank(0), 0, bits![u64, Lsb0; 1, 0, 1]);
        occupancy.set(Rank(1), 0, bits![u64, Lsb0; 1, 1, 0]);
        occupancy.forget(Rank(0));
        assert_eq!([0, 1, 2].map(|at| occupancy.owing(at)), [1, 1, 0]);
        assert_eq!((occupancy.next(1, 3), occupancy.next(2, 3)), (Some(1), None));
    }

    #[test]
    fn more_positions_than_the_ring_has_places_can_be_skipped() {
        let mut occupancy = Occupancy::new(1);
        occupancy.set(Rank(0), 5, bits![u64, Lsb0; 1, 1]);
        occupancy.clear(3, 3 + 4 * OPEN_AHEAD);
        assert_eq!(occupancy.next(5, 5 + OPEN_AHEAD), None);
    }
}
