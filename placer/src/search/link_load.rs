//! The numbers of ranks behind a link for which its transfers end in time.

use super::counts::Counts;
use crate::network::Links;
use crate::problem::Traffic;
use crate::topology::VertexId;

/// The bytes that a link carries in a step, by the number of aggregators behind it.
#[derive(Debug)]
pub(crate) struct LinkLoads {
    ranks: u32,
    /// Per number of aggregators: from the link's vertex to its parent, and back.
    loads: Vec<(Load, Load)>,
}

/// The bytes in one direction of a link, by the number of ranks behind it.
///
/// Between none and all of the ranks, they are a linear function of the number. No result crosses
/// a link to a side without ranks, so the ends are apart.
#[derive(Debug, Clone, Copy)]
struct Load {
    none: f64,
    all: f64,
    /// The value of the linear function at zero.
    fixed: f64,
    per_rank: f64,
}

/// The bytes that both directions of a link carry within a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capacity {
    up: f64,
    down: f64,
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

impl Capacity {
    /// Returns the bytes that a vertex's link carries within `time_s` seconds.
    pub(crate) fn of(links: &Links, vertex: VertexId, time_s: f64) -> Self {
        let bytes = |bytes_per_s: f64| bytes_per_s * time_s;
        Self {
            up: bytes(links.up[vertex.0].bytes_per_s),
            down: bytes(links.down[vertex.0].bytes_per_s),
        }
    }
}

impl LinkLoads {
    /// Returns the loads of a job.
    pub(crate) fn of(traffic: Traffic) -> Self {
        let load = |aggregators| {
            let up = Load::new(traffic.ranks, |ranks| traffic.up(ranks, aggregators));
            let down = Load::new(traffic.ranks, |ranks| traffic.down(ranks, aggregators));
            (up, down)
        };
        Self { ranks: traffic.ranks, loads: (0..=traffic.aggregators).map(load).collect() }
    }

    /// Returns the greatest number of ranks up to `most` behind a link without aggregators behind
    /// it. All smaller numbers are allowed too.
    pub(crate) fn greatest(&self, capacity: Capacity, most: u32) -> u32 {
        let carried = self.carried(capacity, 0, most);
        carried.hull().map_or(0, |(_, greatest)| greatest)
    }

    /// Returns the numbers of ranks up to `most` behind a link that has `aggregators` aggregators
    /// behind it.
    pub(crate) fn carried(&self, capacity: Capacity, aggregators: u32, most: u32) -> Carried {
        let Capacity { up: most_up, down: most_down } = capacity;
        let (up, down) = self.loads[aggregators as usize];
        let has_all = self.ranks <= most && up.all <= most_up && down.all <= most_down;
        let between = (1, (self.ranks - 1).min(most));
        Carried {
            none: up.none <= most_up && down.none <= most_down,
            all: has_all.then_some(self.ranks),
            between: down.within(up.within(between, most_up), most_down),
        }
    }
}

impl Load {
    fn new(ranks: u32, bytes: impl Fn(u32) -> f64) -> Self {
        let (none, all) = (bytes(0), bytes(ranks));
        if ranks < 3 {
            // One number at most is between the ends.
            return Self { none, all, fixed: bytes(1), per_rank: 0.0 };
        }
        let per_rank = (bytes(ranks - 1) - bytes(1)) / f64::from(ranks - 2);
        Self { none, all, fixed: bytes(1) - per_rank, per_rank }
    }

    /// Returns the part of a range between none and all of the ranks that fits into `most_bytes`.
    fn within(self, (low, high): (u32, u32), most_bytes: f64) -> (u32, u32) {
        let fits = |ranks: u32| self.per_rank.mul_add(f64::from(ranks), self.fixed) <= most_bytes;
        if low > high {
            return NO_NUMBERS;
        }
        match (fits(low), fits(high)) {
            (true, true) => (low, high),
            (false, false) => NO_NUMBERS,
            (is_low_end, _) => {
                let crossing = (most_bytes - self.fixed) / self.per_rank;
                let crossing = crossing.clamp(f64::from(low), f64::from(high));
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "between low and high"
                )]
                let crossing = crossing as u32;
                if is_low_end {
                    let guess = crossing - low;
                    (low, low + greatest_near(guess, high - low, |more| fits(low + more)))
                } else {
                    let guess = high - crossing;
                    (high - greatest_near(guess, high - low, |fewer| fits(high - fewer)), high)
                }
            }
        }
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
/// Tries a guess and the numbers beside it first.
fn greatest_near(guess: u32, most: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let beside = guess.saturating_sub(1)..=guess.saturating_add(1).min(most);
    match beside.clone().rev().find(|number| fits(*number)) {
        Some(last) if last < *beside.end() || last == most => last,
        _ => greatest(most, fits),
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

const NO_NUMBERS: (u32, u32) = (1, 0);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_numbers_that_a_link_carries_are_those_that_fit(
            ranks in 1..40u32,
            (aggregators, behind) in (1..6u32).prop_flat_map(|all| (Just(all), 0..=all)),
            (own, union) in (0.0..1e6, 0.0..1e6),
            is_multicast: bool,
            (most_up, most_down) in (0.0..5e6, 0.0..5e6),
            most in 0..50u32,
        ) {
            let traffic =
                Traffic { ranks, aggregators, contribution: own, result: union, is_multicast };
            let loads = LinkLoads::of(traffic);
            let carried = loads.carried(Capacity { up: most_up, down: most_down }, behind, most);
            let carried = Counts::from(carried);
            for count in 0..=ranks {
                let load = traffic.up(count, behind) - most_up;
                let other = traffic.down(count, behind) - most_down;
                // Skip numbers for which rounding decides.
                if load.abs().min(other.abs()) > 1e-6 {
                    let fits = count <= most && load < 0.0 && other < 0.0;
                    prop_assert_eq!(carried.contains(count), fits, "{}: {:?}", count, carried);
                }
            }
        }
    }
}
