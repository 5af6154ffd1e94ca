//! Tries all ways to place the aggregators.

use super::Found;
use super::ranks::{Limit, RankSearch};
use super::tree::LONGEST_S;
use crate::problem::Problem;
use crate::topology::VertexId;

/// Returns the placement with the shortest step in a domain, given the ways to place the
/// aggregators.
pub(crate) fn search(
    problem: &Problem<'_>,
    domain: VertexId,
    ways: impl IntoIterator<Item = Vec<u32>>,
) -> Option<Found> {
    ways.into_iter().fold(None, |best: Option<Found>, way| {
        let below_s = best.as_ref().map_or(LONGEST_S, |found| found.time.total_s());
        better_with(problem, domain, way, below_s).or(best)
    })
}

/// Returns the best placement with these aggregators, if its step is shorter than `below_s`.
pub(crate) fn better_with(
    problem: &Problem<'_>,
    domain: VertexId,
    aggregators: Vec<u32>,
    below_s: f64,
) -> Option<Found> {
    let ranks = RankSearch::new(problem, domain, aggregators);
    ranks
        .fits(Limit { transfer_s: below_s, latency_s: below_s })
        .then(|| ranks.shortest(below_s))?
}

/// Returns the ways to place the aggregators in a domain, as aggregators per host, or `None` if
/// there are more than `most`. Of ways that differ only in hosts that are alike, one counts.
pub(crate) fn ways(problem: &Problem<'_>, domain: VertexId, most: usize) -> Option<Vec<Vec<u32>>> {
    let hosts = problem.topology.hosts_of(domain);
    let mut rooms = vec![0u32; problem.seats.len() + 1];
    for host in hosts.clone().rev() {
        rooms[host] = rooms[host + 1].saturating_add(problem.seats[host].aggregators);
    }
    let mut ways = Ways { problem, domain, most, rooms, found: vec![] };
    let mut way = vec![0; problem.seats.len()];
    ways.extend(&mut way, hosts.start, problem.traffic.aggregators).then_some(ways.found)
}

struct Ways<'a> {
    problem: &'a Problem<'a>,
    domain: VertexId,
    most: usize,
    /// Per host: the aggregators for which it and the later hosts have seats.
    rooms: Vec<u32>,
    found: Vec<Vec<u32>>,
}

impl Ways<'_> {
    /// Adds all ways that place `left` more aggregators on hosts from `first` on. Returns false if
    /// there are too many.
    fn extend(&mut self, way: &mut Vec<u32>, first: usize, left: u32) -> bool {
        if left == 0 {
            self.found.push(way.clone());
            return self.found.len() <= self.most;
        }
        for host in first..self.problem.topology.hosts_of(self.domain).end {
            if self.rooms[host] < left {
                break;
            }
            // Of hosts that are alike, the first have the most aggregators.
            let most =
                if self.problem.is_like_previous(self.domain, host) { way[host - 1] } else { left };
            let most = most.min(left).min(self.problem.seats[host].aggregators);
            for count in 1..=most {
                way[host] = count;
                if !self.extend(way, host + 1, left - count) {
                    return false;
                }
            }
            way[host] = 0;
        }
        true
    }
}
