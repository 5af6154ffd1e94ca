//! The numbers of ranks behind a link for which its transfers end in time.

use super::counts::Counts;
use crate::model::transfer_s;
use crate::problem::Problem;
use crate::topology::VertexId;

/// A limit on the time in which each link carries its share of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinkLoad<'a> {
    pub(crate) problem: &'a Problem<'a>,
    pub(crate) time_s: f64,
}

/// Numbers of ranks behind a link: none, all, and a range between.
///
/// No result crosses a link to a side without ranks, so the ends can be allowed where the range
/// beside them is not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Carried {
    none: bool,
    /// The number of all ranks, if it is allowed.
    all: Option<u32>,
    between: (u32, u32),
}

impl LinkLoad<'_> {
    /// Returns the greatest number of ranks up to `most` behind a link without aggregators behind
    /// it. All smaller numbers are allowed too.
    pub(crate) fn greatest(&self, vertex: VertexId, most: u32) -> u32 {
        let fits = |ranks| self.fits(vertex, 0, ranks);
        let bytes = self.problem.links.up[vertex.0].bytes_per_s * self.time_s;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the cast saturates, and the guess is checked"
        )]
        let guess = most.min((bytes / self.problem.traffic.contribution) as u32);
        // Rounding may make the guess one off, and it ignores the results.
        match (fits(guess), guess < most && fits(guess + 1)) {
            (_, true) => guess + 1,
            (true, false) => guess,
            (false, false) => greatest(guess.saturating_sub(1), fits),
        }
    }

    /// Returns the numbers of ranks up to `most` behind a link that has `aggregators` aggregators
    /// behind it.
    pub(crate) fn carried(&self, vertex: VertexId, aggregators: u32, most: u32) -> Carried {
        let all = self.problem.traffic.ranks;
        let fits = |ranks| self.fits(vertex, aggregators, ranks);
        // Between the ends, the load of each direction rises or falls steadily.
        let between = (1, all.saturating_sub(1).min(most));
        let between = steady(between, |ranks| self.up_fits(vertex, aggregators, ranks));
        let between = steady(between, |ranks| self.down_fits(vertex, aggregators, ranks));
        Carried { none: fits(0), all: (all <= most && fits(all)).then_some(all), between }
    }

    fn fits(&self, vertex: VertexId, aggregators: u32, ranks: u32) -> bool {
        self.up_fits(vertex, aggregators, ranks) && self.down_fits(vertex, aggregators, ranks)
    }

    fn up_fits(&self, vertex: VertexId, aggregators: u32, ranks: u32) -> bool {
        let bytes = self.problem.traffic.up(ranks, aggregators);
        transfer_s(bytes, self.problem.links.up[vertex.0].bytes_per_s) <= self.time_s
    }

    fn down_fits(&self, vertex: VertexId, aggregators: u32, ranks: u32) -> bool {
        let bytes = self.problem.traffic.down(ranks, aggregators);
        transfer_s(bytes, self.problem.links.down[vertex.0].bytes_per_s) <= self.time_s
    }
}

impl Carried {
    fn parts(self) -> impl Iterator<Item = (u32, u32)> {
        let none = self.none.then_some((0, 0));
        let all = self.all.map(|all| (all, all));
        let between = (self.between.0 <= self.between.1).then_some(self.between);
        [none, between, all].into_iter().flatten()
    }

    /// Returns the least and the greatest number, or `None` if there is none.
    pub(crate) fn hull(self) -> Option<(u32, u32)> {
        self.parts().reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))
    }
}

impl From<Carried> for Counts {
    fn from(carried: Carried) -> Self {
        Self::union(carried.parts())
    }
}

/// Returns the greatest number up to `most` that fits, if all numbers below it fit; zero fits.
pub(crate) fn greatest(most: u32, fits: impl Fn(u32) -> bool) -> u32 {
    if fits(most) {
        return most;
    }
    let (mut low, mut high) = (0, most);
    while high - low > 1 {
        let middle = u32::midpoint(low, high);
        *if fits(middle) { &mut low } else { &mut high } = middle;
    }
    low
}

/// Returns the part of a range that fits. All numbers of the range that fit are at one end of it.
fn steady(range: (u32, u32), fits: impl Fn(u32) -> bool) -> (u32, u32) {
    let (low, high) = range;
    if low > high {
        return range;
    }
    match (fits(low), fits(high)) {
        (true, true) => range,
        (true, false) => (low, low + greatest(high - low, |more| fits(low + more))),
        (false, true) => (high - greatest(high - low, |fewer| fits(high - fewer)), high),
        (false, false) => NO_NUMBERS,
    }
}

const NO_NUMBERS: (u32, u32) = (1, 0);
