//! The relaxed optimum of a tree: a lower bound of the transfer time, and aggregators for it.
//!
//! For a transfer time, dynamic programming from the leaves up gives the least and the greatest
//! number of ranks for each subtree and each number of aggregators in it. It relaxes the problem:
//! it treats all numbers between these two as possible, and it ignores round trips and paths with a
//! ceiling of their own. So if the relaxed problem has no solution within a time, the job has none.

use super::Aggregators;
use super::latency::least_latency_s;
use super::link_load::{Capacity, LinkLoads};
use crate::problem::Problem;
use crate::topology::{HostId, Topology, VertexId};

/// The relaxed optimum of a domain.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Relaxed {
    /// No placement in the domain has a shorter step, in seconds.
    pub(crate) bound_s: f64,
    /// No placement in the domain has a shorter transfer, in seconds.
    pub(crate) transfer_s: f64,
    pub(crate) aggregators: Aggregators,
}

/// Returns the relaxed optimum of a domain, if ranks and aggregators fit into it and its bound is
/// below `below_s` seconds.
pub(crate) fn relax(problem: &Problem<'_>, domain: VertexId, below_s: f64) -> Option<Relaxed> {
    // Most domains that are left out fail this test, which takes less time than the round trips.
    if !Table::new(problem, domain).fits(LONGEST_S.min(below_s)) {
        return None;
    }
    let latency_s = least_latency_s(problem, domain);
    let (transfer_s, aggregators) =
        least_transfer(problem, domain, below_s - latency_s, PRECISION)?;
    Some(Relaxed { bound_s: transfer_s + latency_s, transfer_s, aggregators })
}

/// Returns a time that no transfer in a domain beats, and the aggregators of the relaxed optimum,
/// if its transfer is shorter than `below_s` seconds.
pub(super) fn least_transfer(
    problem: &Problem<'_>,
    domain: VertexId,
    below_s: f64,
    precision: f64,
) -> Option<(f64, Aggregators)> {
    let mut table = Table::new(problem, domain);
    let (mut too_short, mut enough) = (0.0, LONGEST_S.min(below_s));
    if !table.fits(enough) {
        return None;
    }
    while enough - too_short > enough * precision {
        let middle = middle(too_short, enough);
        if middle <= SHORTEST_S {
            break;
        }
        *if table.fits(middle) { &mut enough } else { &mut too_short } = middle;
    }
    table.fits(enough).then(|| (too_short, table.aggregators()))
}

/// Returns a time between two others. Times span many orders of magnitude, so it halves the
/// exponent first.
pub(crate) fn middle(too_short: f64, enough: f64) -> f64 {
    let least = f64::max(too_short, SHORTEST_S);
    if enough > 4.0 * least { (enough * least).sqrt() } else { f64::midpoint(too_short, enough) }
}

/// Numbers of ranks: the least and the greatest. None if the least is greater.
type Range = (u32, u32);

/// For each vertex of a domain and each number of aggregators in its subtree, the ranks that a
/// transfer time allows there.
struct Table<'a> {
    problem: &'a Problem<'a>,
    domain: VertexId,
    /// One more than the greatest number of aggregators.
    width: usize,
    /// `width` ranges per vertex.
    ranges: Vec<Range>,
    loads: LinkLoads,
    /// Per vertex, `width` ranges: what its parent's later children allow together.
    later: Vec<Range>,
}

impl<'a> Table<'a> {
    fn new(problem: &'a Problem<'a>, domain: VertexId) -> Self {
        let vertices = problem.topology.subtree(domain).len();
        let width = problem.traffic.aggregators as usize + 1;
        let ranges = vec![NO_RANKS; vertices * width];
        let loads = LinkLoads::of(problem.traffic);
        Self { problem, domain, width, later: ranges.clone(), ranges, loads }
    }

    /// Fills the table for a transfer time, and returns whether all ranks and aggregators fit.
    fn fits(&mut self, time_s: f64) -> bool {
        self.seat_hosts();
        for index in (1..self.ranges.len() / self.width).rev() {
            self.limit(index, time_s);
            self.add_to_parent(index);
        }
        let (least, greatest) = self.row(0)[self.width - 1];
        let most = greatest.min(self.problem.limits[self.domain.0]);
        (least..=most).contains(&self.problem.traffic.ranks)
    }

    fn row(&self, index: usize) -> &[Range] {
        &self.ranges[index * self.width..][..self.width]
    }

    fn seat_hosts(&mut self) {
        self.ranges.fill(NO_RANKS);
        for index in 0..self.ranges.len() / self.width {
            self.ranges[index * self.width] = (0, 0);
        }
        for host in self.problem.topology.hosts_of(self.domain) {
            let most = self.problem.seats[host].aggregators;
            let index = self.problem.topology.leaf(HostId(host)).0 - self.domain.0;
            for (aggregators, range) in (0..=most).zip(&mut self.ranges[index * self.width..]) {
                *range = (0, self.problem.ranks_beside(host, aggregators));
            }
        }
    }

    /// Removes from a vertex's ranges what its link does not carry in time.
    fn limit(&mut self, index: usize, time_s: f64) {
        let vertex = VertexId(self.domain.0 + index);
        let capacity = Capacity::of(self.problem.links, vertex, time_s);
        let limit = self.problem.limits[vertex.0];
        for (aggregators, range) in (0..).zip(&mut self.ranges[index * self.width..][..self.width])
        {
            if range.0 > range.1 {
                continue;
            }
            let carried = self.loads.carried(capacity, aggregators, limit.min(range.1)).hull();
            *range = carried.map_or(NO_RANKS, |hull| (range.0.max(hull.0), range.1.min(hull.1)));
        }
    }

    fn add_to_parent(&mut self, index: usize) {
        let vertex = VertexId(self.domain.0 + index);
        let parent = self.problem.topology.parent(vertex).unwrap_or(Topology::ROOT);
        let parent = (parent.0 - self.domain.0) * self.width;
        let own = index * self.width;
        let later = &mut self.later[own..][..self.width];
        later.copy_from_slice(&self.ranges[parent..][..self.width]);
        // A parent precedes its children, so its row ends before this one starts.
        let (before, from) = self.ranges.split_at_mut(own);
        let (sums, own) = (&mut before[parent..][..self.width], &from[..self.width]);
        sums.fill(NO_RANKS);
        for (more, own) in own.iter().enumerate().filter(|(_, range)| range.0 <= range.1) {
            for (sum, later) in sums[more..].iter_mut().zip(&*later) {
                if later.0 <= later.1 {
                    *sum = (sum.0.min(own.0 + later.0), sum.1.max(own.1.saturating_add(later.1)));
                }
            }
        }
    }

    /// Returns aggregators that the table allows.
    ///
    /// Where the numbers of ranks between the ends of a range are not possible, no placement may
    /// exist; the numbers of ranks then are as close as possible.
    fn aggregators(&self) -> Aggregators {
        let topology = self.problem.topology;
        let mut wanted = vec![(0, 0); topology.subtree(self.domain).len()];
        wanted[0] = (self.width - 1, self.problem.traffic.ranks);
        for index in 0..wanted.len() {
            let mut left = wanted[index];
            for child in topology.children(VertexId(self.domain.0 + index)) {
                let child = child.0 - self.domain.0;
                wanted[child] = self.part_of(child, left);
                left.0 -= wanted[child].0;
                left.1 = left.1.saturating_sub(wanted[child].1);
            }
        }
        let hosts = topology.hosts_of(self.domain).map(HostId);
        let placed = hosts.map(|host| (host, wanted[topology.leaf(host).0 - self.domain.0].0));
        let placed = placed.filter(|(_, count)| *count > 0);
        let number = |count| u32::try_from(count).expect("at most the job's number");
        placed.map(|(host, count)| (host, number(count))).collect()
    }

    /// Returns a child's part of the aggregators and ranks that it shares with later children: as
    /// many aggregators as it can take.
    fn part_of(&self, child: usize, (aggregators, ranks): (usize, u32)) -> (usize, u32) {
        let later = &self.later[child * self.width..][..self.width];
        let parts = self.row(child)[..=aggregators].iter().enumerate().rev();
        let parts = parts.filter_map(|(own, range)| {
            let later = later[aggregators - own];
            let is_empty = range.0 > range.1 || later.0 > later.1;
            let low = range.0.max(ranks.saturating_sub(later.1));
            let high = range.1.min(ranks.saturating_sub(later.0));
            (!is_empty).then(|| (low.saturating_sub(high), own, high.max(range.0)))
        });
        let closest = parts.min_by_key(|(gap, own, _)| (*gap, std::cmp::Reverse(*own)));
        closest.map_or((0, 0), |(_, own, ranks)| (own, ranks))
    }
}

const NO_RANKS: Range = (u32::MAX, 0);
/// The relative difference between the bound and the relaxed optimum.
pub(crate) const PRECISION: f64 = 1e-6;
/// A shorter transfer counts as none.
pub(crate) const SHORTEST_S: f64 = 1e-9;
/// A longer transfer counts as one that never ends.
pub(crate) const LONGEST_S: f64 = 1e9;
