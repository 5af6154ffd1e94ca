//! Improves a placement by moving one aggregator, or two at once.

use super::exact::better_with;
use super::{Aggregators, Found};
use crate::problem::Problem;
use crate::topology::{HostId, VertexId};

/// Moves one aggregator or two at a time while that shortens the step, and tries at most `most`
/// placements. Stops early at `bound_s`, which no placement can beat.
pub(crate) fn search(
    problem: &Problem<'_>,
    domain: VertexId,
    start: Found,
    bound_s: f64,
    most: usize,
) -> Found {
    let mut search = Search { problem, domain, bound_s, left: most };
    let mut best = start;
    while let Some(better) = search.improve(&best) {
        best = better;
    }
    best
}

struct Search<'a> {
    problem: &'a Problem<'a>,
    domain: VertexId,
    bound_s: f64,
    /// The number of placements that may still be tried.
    left: usize,
}

impl Search<'_> {
    /// Returns a better placement one or two moves away.
    fn improve(&mut self, best: &Found) -> Option<Found> {
        let moves = self.moves(&best.placement.aggregators);
        let single = moves.iter().map(|first| (first, None));
        let double = moves.iter().enumerate().flat_map(|(index, first)| {
            moves[index..].iter().map(move |second| (first, Some(second)))
        });
        for (first, second) in single.chain(double) {
            if self.left == 0 || best.is_close_to(self.bound_s) {
                return None;
            }
            let moved = std::iter::once(first).chain(second);
            if let Some(aggregators) = self.moved(&best.placement.aggregators, moved) {
                self.left -= 1;
                let below_s = best.time.total_s();
                let better = better_with(self.problem, self.domain, aggregators, below_s);
                if better.is_some() {
                    return better;
                }
            }
        }
        None
    }

    /// Returns the aggregators after some moves, if all of these have a seat.
    fn moved<'m>(
        &self,
        aggregators: &[u32],
        moves: impl Iterator<Item = &'m (usize, usize)>,
    ) -> Option<Aggregators> {
        let mut aggregators = aggregators.to_vec();
        for &(from, to) in moves {
            aggregators[from] = aggregators[from].checked_sub(1)?;
            aggregators[to] += 1;
            if aggregators[to] > self.problem.seats[to].aggregators {
                return None;
            }
        }
        let hosts = self.problem.topology.hosts_of(self.domain);
        let placed = hosts.filter(|host| aggregators[*host] > 0);
        Some(placed.map(|host| (HostId(host), aggregators[host])).collect())
    }

    /// Returns the hosts between which an aggregator can move. Of hosts that are alike, one counts.
    fn moves(&self, aggregators: &[u32]) -> Vec<(usize, usize)> {
        let repeats = |host: usize| {
            self.problem.is_like_previous(self.domain, host)
                && aggregators[host] == aggregators[host - 1]
        };
        let hosts = self.problem.topology.hosts_of(self.domain);
        let hosts: Vec<_> = hosts.filter(|host| !repeats(*host)).collect();
        let from = hosts.iter().copied().filter(|host| aggregators[*host] > 0);
        let free = |host: &usize| aggregators[*host] < self.problem.seats[*host].aggregators;
        let to: Vec<_> = hosts.iter().copied().filter(free).collect();
        let moves = from.flat_map(|from| to.iter().map(move |to| (from, *to)));
        moves.filter(|(from, to)| from != to).collect()
    }
}
