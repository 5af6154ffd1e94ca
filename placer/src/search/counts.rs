//! Sets of numbers of ranks, as disjoint intervals.

/// A set of numbers of ranks.
///
/// Almost every set is one interval. A subtree with aggregators may also admit none or all of the
/// ranks where it admits no number near these: without ranks in it, no result enters it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Counts(Vec<(u32, u32)>);

impl Counts {
    /// Creates the set from zero to `last`.
    pub(crate) fn up_to(last: u32) -> Self {
        Self(vec![(0, last)])
    }

    /// Creates the union of inclusive intervals. Ignores intervals that end before they start.
    pub(crate) fn union(intervals: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let mut sorted: Vec<_> = intervals.into_iter().filter(|(low, high)| low <= high).collect();
        sorted.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(sorted.len());
        for (low, high) in sorted {
            match merged.last_mut() {
                Some(last) if low <= last.1.saturating_add(1) => last.1 = last.1.max(high),
                _ => merged.push((low, high)),
            }
        }
        Self(merged)
    }

    /// Returns whether the set contains a number.
    pub(crate) fn contains(&self, count: u32) -> bool {
        self.0.iter().any(|&(low, high)| (low..=high).contains(&count))
    }

    /// Returns the numbers that both sets contain.
    pub(crate) fn intersection(&self, other: &Self) -> Self {
        let pairs = self.0.iter().flat_map(|one| other.0.iter().map(move |other| (one, other)));
        Self::union(pairs.map(|(one, other)| (one.0.max(other.0), one.1.min(other.1))))
    }

    /// Returns all sums of a number of each set.
    pub(crate) fn sum(&self, other: &Self) -> Self {
        let pairs = self.0.iter().flat_map(|one| other.0.iter().map(move |other| (one, other)));
        Self::union(
            pairs
                .map(|(one, other)| (one.0.saturating_add(other.0), one.1.saturating_add(other.1))),
        )
    }

    /// Returns the numbers of the set, from the greatest to the least.
    pub(crate) fn descending(&self) -> impl Iterator<Item = u32> {
        self.0.iter().rev().flat_map(|&(low, high)| (low..=high).rev())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(counts: &Counts) -> Vec<u32> {
        counts.descending().collect()
    }

    #[test]
    fn sets_behave_as_sets_of_numbers() {
        let one = Counts::union([(5, 6), (0, 0), (1, 2), (9, 8)]);
        assert_eq!(numbers(&one), [6, 5, 2, 1, 0]);
        assert!(one.contains(5) && !one.contains(3));
        let other = Counts::union([(2, 5)]);
        assert_eq!(numbers(&one.intersection(&other)), [5, 2]);
        assert_eq!(
            numbers(&one.sum(&Counts::union([(0, 0), (10, 10)]))),
            [16, 15, 12, 11, 10, 6, 5, 2, 1, 0]
        );
        assert_eq!(numbers(&Counts::up_to(1).sum(&Counts::up_to(2))), [3, 2, 1, 0]);
    }
}
