//! Hosts for the aggregators that a job moves to when its own are gone.
//!
//! A standby is a set of as many aggregators as the job has. The ranks stay where they are, so the
//! search is that for the job with seats for exactly these ranks.

use crate::model::StepTime;
use crate::placement::Placement;
use crate::problem::Problem;
use crate::search;
use crate::topology::{HostId, Topology, VertexId};

/// A set of aggregators that can take over.
#[derive(Debug, Clone, PartialEq)]
pub struct Standby {
    /// Aggregators per host.
    pub aggregators: Vec<u32>,
    /// The expected time of a step once these have taken over.
    pub time: StepTime,
}

impl Standby {
    /// Returns the longest step once one of these standbys has taken over, in seconds.
    pub(crate) fn longest_s(standbys: &[Self]) -> f64 {
        standbys.iter().map(|standby| standby.time.total_s()).fold(0.0, f64::max)
    }

    /// Returns the hosts with aggregators, and how many each has.
    pub fn hosts(&self) -> impl Iterator<Item = (HostId, u32)> {
        let hosts = self.aggregators.iter().enumerate().filter(|(_, count)| **count > 0);
        hosts.map(|(host, count)| (HostId(host), *count))
    }
}

/// Returns the standbys of a placement in the order in which the job moves to them, as many as
/// there is room for, each with the shortest step that it can give. `domain` is the job's.
///
/// No standby is in a domain of the job's standby level that holds an aggregator of the placement
/// or of an earlier standby.
pub(crate) fn standbys(
    problem: &Problem<'_>,
    placement: &Placement,
    domain: VertexId,
) -> Vec<Standby> {
    let domain = if problem.job.requires_scope { domain } else { Topology::ROOT };
    let mut standbys: Vec<Standby> = vec![];
    for _ in 0..problem.job.standbys {
        let earlier = standbys.iter().map(|standby| &standby.aggregators);
        let taken: Vec<_> = std::iter::once(&placement.aggregators).chain(earlier).collect();
        let problem = apart(problem, placement, &taken);
        let relaxed = search::relax(&problem, domain, f64::INFINITY);
        let Some((found, _)) =
            relaxed.and_then(|relaxed| search::search(&problem, domain, &relaxed))
        else {
            break;
        };
        let search::Found { placement: Placement { aggregators, .. }, time, .. } = found;
        standbys.push(Standby { aggregators, time });
    }
    standbys
}

/// Returns whether a job allows standbys beside a placement: as many as it has, on hosts with seats
/// for them, and no two sets of aggregators in one domain of its standby level.
pub(crate) fn allows(problem: &Problem<'_>, placement: &Placement, standbys: &[Standby]) -> bool {
    let mut taken = vec![&placement.aggregators];
    standbys.len() == problem.job.standbys as usize
        && standbys.iter().all(|standby| {
            let Placement { ranks, .. } = placement.clone();
            let aggregators = standby.aggregators.clone();
            let is_allowed =
                apart(problem, placement, &taken).has_seats_for(&Placement { ranks, aggregators });
            taken.push(&standby.aggregators);
            is_allowed
        })
}

/// Returns, per host, whether a domain of the job's standby level holds it and aggregators of one
/// of these sets.
#[must_use]
pub fn taken_hosts(problem: &Problem<'_>, taken: &[&Vec<u32>]) -> Vec<bool> {
    let topology = problem.topology;
    let mut is_taken = vec![false; topology.hosts().len()];
    for host in topology.host_ids() {
        if taken.iter().any(|aggregators| aggregators[host.0] > 0) {
            let domain = topology.domain_at(host, problem.standby_depth);
            is_taken[topology.hosts_of(domain)].fill(true);
        }
    }
    is_taken
}

/// Returns a problem with seats for exactly these ranks, and for aggregators only outside the
/// domains that hold those of `taken`.
fn apart<'a>(problem: &Problem<'a>, placement: &Placement, taken: &[&Vec<u32>]) -> Problem<'a> {
    let is_taken = taken_hosts(problem, taken);
    problem.with_changed_seats(|host, seats| {
        seats.ranks = placement.ranks[host];
        if is_taken[host] {
            seats.aggregators = 0;
        }
    })
}
