//! Finds the placement with the shortest step in a domain.
//!
//! [`ranks`] places the ranks exactly, given the aggregators. If there are few ways to place these,
//! [`exact`] tries all. Otherwise [`tree`] solves a relaxed problem, whose optimum no placement can
//! beat, and [`local`] moves single aggregators from there.

mod counts;
mod exact;
mod link_load;
mod local;
mod ranks;
mod tree;

pub(crate) use self::tree::{Relaxed, relax};
use crate::model::StepTime;
use crate::placement::Placement;
use crate::problem::Problem;
use crate::topology::VertexId;

/// A placement and its step time.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    pub(crate) placement: Placement,
    pub(crate) time: StepTime,
}

/// Returns the best placement found in a domain, and a step time in seconds that no placement there
/// can beat. `None` if none was found. Takes the domain's relaxed optimum.
pub(crate) fn search(
    problem: &Problem<'_>,
    domain: VertexId,
    relaxed: Relaxed,
) -> Option<(Found, f64)> {
    let vertices = problem.topology.subtree(domain).len();
    match exact::ways(problem, domain, EXACT_VISITS / vertices) {
        Some(ways) => {
            let found = exact::search(problem, domain, ways)?;
            let bound_s = found.time.total_s();
            Some((found, bound_s))
        }
        None => heuristic(problem, domain, relaxed),
    }
}

/// Like [`search`], without trying all ways to place the aggregators.
///
/// Starts from the best of the relaxed optima of the domain and of the domains within it that have
/// room, since moves of single aggregators hardly ever lead from one of these to another.
pub(crate) fn heuristic(
    problem: &Problem<'_>,
    domain: VertexId,
    relaxed: Relaxed,
) -> Option<(Found, f64)> {
    let bound_s = relaxed.transfer_s;
    let subtree = problem.topology.subtree(domain);
    let tries = LOCAL_VISITS / subtree.len();
    let narrower = subtree.skip(1).filter(|vertex| problem.rooms[*vertex] >= problem.traffic.ranks);
    let narrower = narrower.filter_map(|vertex| relax(problem, VertexId(vertex)));
    let starts = std::iter::once(relaxed).chain(narrower).map(|relaxed| relaxed.aggregators);
    let mut start = exact::search(problem, domain, starts);
    if start.is_none() || problem.topology.hosts_of(domain).len() <= FEW_HOSTS {
        let other = exact::search(problem, domain, consecutive(problem, domain));
        let improved = [start, other].into_iter().flatten();
        let improved =
            improved.map(|start| local::search(problem, domain, start, bound_s, tries / 2));
        start = improved.reduce(shorter);
    }
    Some((local::search(problem, domain, start?, bound_s, tries), bound_s))
}

/// Returns the placement with the shorter step, or the first if both are equal.
fn shorter(one: Found, other: Found) -> Found {
    if other.time.total_s() < one.time.total_s() { other } else { one }
}

/// Returns ways to place the aggregators on consecutive hosts, once with as many per host as fit
/// and once with one. A relaxed optimum may use a host that no path reaches; some of these do not.
fn consecutive(problem: &Problem<'_>, domain: VertexId) -> impl Iterator<Item = Vec<u32>> {
    let hosts = problem.topology.hosts_of(domain);
    let from = move |(first, per_host): (usize, u32)| {
        let mut way = vec![0; problem.seats.len()];
        let mut left = problem.traffic.aggregators;
        for host in (first..hosts.end).chain(hosts.start..first) {
            way[host] = problem.seats[host].aggregators.min(per_host).min(left);
            left -= way[host];
        }
        (left == 0).then_some(way)
    };
    let firsts = problem.topology.hosts_of(domain);
    firsts.flat_map(|first| [(first, u32::MAX), (first, 1)]).filter_map(from)
}

/// Returns the best placement in a domain, however long the search takes.
#[cfg(test)]
pub(crate) fn exhaustive(problem: &Problem<'_>, domain: VertexId) -> Option<Found> {
    exact::search(problem, domain, exact::ways(problem, domain, usize::MAX)?)
}

/// Vertices that the exact search may visit in total, at one visit per vertex and way.
const EXACT_VISITS: usize = 1_000_000;
/// In a domain with at most as many hosts, the search starts from more placements.
const FEW_HOSTS: usize = 64;
/// Vertices that the local search may visit in total.
const LOCAL_VISITS: usize = 2_000_000;
