//! Finds the placement with the shortest step in a domain.
//!
//! [`ranks`] places the ranks exactly, given the aggregators. If there are few choices for these,
//! [`exact`] tries all. Otherwise [`tree`] solves a relaxed problem, whose optimum no placement can
//! beat, and [`local`] moves single aggregators from there.

mod around;
mod counts;
mod exact;
mod latency;
mod link_load;
mod local;
pub(crate) mod racks;
mod ranks;
mod tree;
mod within;

pub(crate) use self::tree::LONGEST_S;
pub(crate) use self::tree::{Relaxed, relax};
use crate::model::StepTime;
use crate::placement::Placement;
use crate::problem::Problem;
use crate::racks::Tree;
use crate::topology::{HostId, VertexId};

/// Hosts with aggregators, in ascending order, and how many each has.
pub(crate) type Aggregators = Vec<(HostId, u32)>;

/// A placement and its step time.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    pub(crate) placement: Placement,
    /// The aggregators in racks, if the job has any.
    pub(crate) tree: Option<Tree>,
    pub(crate) time: StepTime,
}

/// Returns the best placement found in a domain, and a step time in seconds that no placement there
/// can beat. `None` if none was found. Takes the domain's relaxed optimum.
pub(crate) fn search(
    problem: &Problem<'_>,
    domain: VertexId,
    relaxed: &Relaxed,
) -> Option<(Found, f64)> {
    let vertices = problem.topology.subtree(domain).len();
    let choices = exact::choices(problem, domain, EXACT_VISITS / vertices);
    let choices = match choices {
        Some(choices) if choices.len() <= FEW_CHOICES => choices,
        choices => {
            let start = start(problem, domain, relaxed);
            let start = start.filter(|start| start.is_close_to(relaxed.bound_s));
            match (start, choices) {
                (Some(start), _) => return Some((start, relaxed.bound_s)),
                (None, Some(choices)) => choices,
                (None, None) => return heuristic(problem, domain, relaxed),
            }
        }
    };
    let found = exact::search(problem, domain, choices)?;
    let bound_s = found.time.total_s();
    Some((found, bound_s))
}

/// Returns the best placement with the aggregators of the relaxed optimum.
pub(crate) fn start(problem: &Problem<'_>, domain: VertexId, relaxed: &Relaxed) -> Option<Found> {
    exact::search(problem, domain, [relaxed.aggregators.clone()])
}

/// Like [`search`], without trying all choices of hosts for the aggregators.
///
/// Starts from the best of the relaxed optima of the domain and of the domains within it that have
/// room, since moves of single aggregators hardly ever lead from one of these to another.
pub(crate) fn heuristic(
    problem: &Problem<'_>,
    domain: VertexId,
    relaxed: &Relaxed,
) -> Option<(Found, f64)> {
    let subtree = problem.topology.subtree(domain);
    let (subtree_len, tries) = (subtree.len(), LOCAL_VISITS / subtree.len());
    let narrower = subtree.skip(1).filter(|vertex| problem.rooms[*vertex] >= problem.traffic.ranks);
    let start = start(problem, domain, relaxed);
    let start = narrower.fold(start, |start, vertex| {
        let below_s = start.as_ref().map_or(LONGEST_S, |start| start.time.total_s());
        let aggregators = relax(problem, VertexId(vertex), below_s).map(|found| found.aggregators);
        aggregators.and_then(|found| exact::better_with(problem, domain, found, below_s)).or(start)
    });
    let (mut start, bound_s) =
        around::search(problem, domain, relaxed, start, AROUND_VISITS / subtree_len);
    if start.is_none() || problem.topology.hosts_of(domain).len() <= FEW_HOSTS {
        let other = exact::search(problem, domain, consecutive(problem, domain));
        let improved = [start, other].into_iter().flatten();
        let improved =
            improved.map(|start| local::search(problem, domain, start, bound_s, tries / 2));
        start = improved.reduce(shorter);
    }
    Some((local::search(problem, domain, start?, bound_s, tries), bound_s))
}

impl Found {
    /// Returns whether the step is so close to a bound that a search ends.
    fn is_close_to(&self, bound_s: f64) -> bool {
        self.time.total_s() <= bound_s * CLOSE_ENOUGH
    }
}

/// Returns the placement with the shorter step, or the first if both are equal.
fn shorter(one: Found, other: Found) -> Found {
    if other.time.total_s() < one.time.total_s() { other } else { one }
}

/// Returns choices of consecutive hosts for the aggregators, once with as many per host as fit
/// and once with one. A relaxed optimum may use a host that no path reaches; some of these do not.
fn consecutive(problem: &Problem<'_>, domain: VertexId) -> impl Iterator<Item = Aggregators> {
    let hosts = problem.topology.hosts_of(domain);
    let from = move |(first, per_host): (usize, u32)| {
        let mut aggregators = vec![];
        let mut left = problem.traffic.aggregators;
        for host in (first..hosts.end).chain(hosts.start..first) {
            let count = problem.seats[host].aggregators.min(per_host).min(left);
            if count > 0 {
                aggregators.push((HostId(host), count));
            }
            left -= count;
        }
        aggregators.sort_unstable();
        (left == 0).then_some(aggregators)
    };
    let firsts = problem.topology.hosts_of(domain);
    firsts.flat_map(|first| [(first, u32::MAX), (first, 1)]).filter_map(from)
}

/// Returns the best placement in a domain, however long the search takes.
#[cfg(test)]
pub(crate) fn exhaustive(problem: &Problem<'_>, domain: VertexId) -> Option<Found> {
    exact::search(problem, domain, exact::choices(problem, domain, usize::MAX)?)
}

/// Vertices that the exact search may visit in total, at one visit per vertex and choice.
const EXACT_VISITS: usize = 100_000;
/// The search tries all choices if there are at most as many, even if one is close to the bound.
const FEW_CHOICES: usize = 100;
/// A step that is longer than the bound by less than this factor counts as optimal.
const CLOSE_ENOUGH: f64 = 1.001;
/// In a domain with at most as many hosts, the search starts from more placements.
const FEW_HOSTS: usize = 64;
/// Vertices in the relaxed problems that the search around centers may solve in total.
const AROUND_VISITS: usize = 500_000;
/// Vertices that the local search may visit in total.
const LOCAL_VISITS: usize = 100_000;
