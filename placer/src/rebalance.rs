//! Moves of a job that runs, and the step time that they save.
//!
//! An aggregator moves while the job runs. A rank moves only if the job restarts, so moves of ranks
//! must save enough beyond what moves of aggregators alone save.

use crate::model::{StepTime, step_time};
use crate::placement::Placement;
use crate::plan::{Plan, best_plan};
use crate::problem::Problem;
use crate::search::{self, Found};
use crate::topology::{HostId, Topology, VertexId};

/// The placements that are worth a move.
#[derive(Debug, Clone, PartialEq)]
pub struct Rebalance {
    /// Whether the job's seats and limits allow its present placement.
    pub is_allowed: bool,
    /// The placement after moves of aggregators alone.
    pub aggregators: Option<Proposal>,
    /// The placement after moves of ranks too.
    pub ranks: Option<Proposal>,
}

/// A placement to move to.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// The ranks and aggregators of each host.
    pub placement: Placement,
    /// The expected time of a step.
    pub time: StepTime,
    /// The share of the present step time that the moves save.
    pub saving: f64,
    /// Moves of aggregators.
    pub aggregator_moves: Vec<Move>,
    /// Moves of ranks.
    pub rank_moves: Vec<Move>,
}

/// Ranks or aggregators that move from one host to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The present host.
    pub from: HostId,
    /// The next host.
    pub to: HostId,
    /// The number of ranks or aggregators.
    pub count: u32,
}

/// Returns the present placement of a job as a plan.
#[must_use]
pub fn present_plan(problem: &Problem<'_>, placement: Placement) -> Plan {
    let topology = problem.topology;
    let leaves = placement.hosts().map(|(host, _, _)| topology.domain_of(host));
    let domain = leaves.reduce(|one, other| topology.meet(one, other)).unwrap_or(Topology::ROOT);
    let time = step_time(problem, &placement);
    let relaxed = search::relax(problem, domain, f64::INFINITY);
    let bound_s = relaxed.map_or(0.0, |relaxed| relaxed.bound_s).min(time.total_s());
    Plan { placement, time, bound_s, domain, standbys: vec![], tree: None }
}

/// Returns the moves that save more than the share `threshold` of a job's step time. Moves of ranks
/// are compared with the step after the moves of aggregators. If the job's seats and limits do not
/// allow its present placement, any saving will do. The job must not have racks.
#[must_use]
pub fn rebalance(problem: &Problem<'_>, present: &Plan, threshold: f64) -> Rebalance {
    let is_allowed = problem.allows(&present.placement);
    let now_s = present.time.total_s();
    let proposal = |found: Found| Proposal {
        aggregator_moves: moves(&present.placement.aggregators, &found.placement.aggregators),
        rank_moves: moves(&present.placement.ranks, &found.placement.ranks),
        placement: found.placement,
        saving: if now_s > 0.0 { 1.0 - found.time.total_s() / now_s } else { 0.0 },
        time: found.time,
    };
    let saves = |step_s: f64, found: &Found, threshold: f64| {
        found.time.total_s() < step_s * (1.0 - threshold)
    };
    let aggregators = with_ranks(problem, present);
    let aggregators = aggregators.filter(|found| saves(now_s, found, threshold));
    let step_s = aggregators.as_ref().map_or(now_s, |found| found.time.total_s());
    let all = best_plan(problem).map(|Plan { placement, time, .. }| Found { placement, time });
    let all = all.filter(|found| !is_allowed || saves(step_s, found, threshold));
    Rebalance { is_allowed, aggregators: aggregators.map(proposal), ranks: all.map(proposal) }
}

/// Returns the placement with the shortest step whose ranks are where they are now.
fn with_ranks(problem: &Problem<'_>, present: &Plan) -> Option<Found> {
    let fixed = problem.with_changed_seats(|host, seats| {
        seats.ranks = seats.ranks.min(present.placement.ranks[host]);
    });
    let domain = domain_in_scope(problem, present.domain)?;
    let relaxed = search::relax(&fixed, domain, f64::INFINITY)?;
    Some(search::search(&fixed, domain, &relaxed)?.0)
}

/// Returns the widest domain around another one that the job may use.
fn domain_in_scope(problem: &Problem<'_>, domain: VertexId) -> Option<VertexId> {
    let widest = *problem.depths().start();
    let ancestors = std::iter::successors(Some(domain), |v| problem.topology.parent(*v));
    ancestors.into_iter().find(|vertex| problem.topology.depth(*vertex) == widest)
}

/// Returns the moves that turn the numbers per host of one placement into those of another.
fn moves(before: &[u32], after: &[u32]) -> Vec<Move> {
    let mut moves: Vec<Move> = vec![];
    let counts = |more: &'_ [u32], less: &'_ [u32]| {
        let hosts = more.iter().zip(less).map(|(more, less)| more.saturating_sub(*less));
        hosts.enumerate().filter(|(_, count)| *count > 0).collect::<Vec<_>>()
    };
    let (mut from, mut to) = (counts(before, after), counts(after, before));
    while let (Some((source, left)), Some((target, room))) = (from.last_mut(), to.last_mut()) {
        let count = (*left).min(*room);
        moves.push(Move { from: HostId(*source), to: HostId(*target), count });
        *left -= count;
        *room -= count;
        from.retain(|(_, count)| *count > 0);
        to.retain(|(_, count)| *count > 0);
    }
    moves.reverse();
    moves
}
