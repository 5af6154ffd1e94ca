//! Moves of a job that runs, and the step time that they save.
//!
//! An aggregator moves while the job runs. A rank moves only if the job restarts, so moves of ranks
//! must save enough beyond what moves of aggregators alone save. Ranks learn their standbys when
//! they start. Moves of aggregators therefore keep the standbys, and stay out of their domains. If
//! a job has racks, its aggregators move only if the job restarts too.

use crate::model::StepTime;
use crate::placement::Placement;
use crate::plan::{Plan, best_plan, plan_in};
use crate::problem::Problem;
use crate::racks::{self, Tree};
use crate::standby::{self, Standby, standbys, taken_hosts};
use crate::topology::{HostId, VertexId};

/// The placements that are worth a move.
#[derive(Debug, Clone, PartialEq)]
pub struct Rebalance {
    /// Whether the job's seats and limits allow its present placement.
    pub is_allowed: bool,
    /// Whether the job has all its standbys, and each is on hosts that the job allows.
    pub are_standbys_allowed: bool,
    /// The placement after moves of aggregators alone.
    pub aggregators: Option<Proposal>,
    /// The placement after moves of ranks too.
    pub ranks: Option<Proposal>,
    /// Other standbys, if ranks stay and aggregators move as in `aggregators`.
    pub standbys: Option<StandbyProposal>,
}

/// Standbys to have in place of the present ones.
#[derive(Debug, Clone, PartialEq)]
pub struct StandbyProposal {
    /// All standbys, in the order in which the job moves to them.
    pub standbys: Vec<Standby>,
    /// The share of the longest step after a failover that these save.
    pub saving: f64,
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
    /// Moves of aggregators that are not those of racks.
    pub aggregator_moves: Vec<Move>,
    /// Moves of ranks.
    pub rank_moves: Vec<Move>,
    /// The aggregators of racks, if the job has any.
    pub tree: Option<Tree>,
    /// The standbys of the placement: the present ones unless ranks move.
    pub standbys: Vec<Standby>,
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

/// Returns the moves that save more than the share `threshold` of a job's step time. Moves of ranks
/// are compared with the step after the moves of aggregators. If the job's seats and limits do not
/// allow its present placement, any saving will do.
#[must_use]
pub fn rebalance(problem: &Problem<'_>, present: &Plan, threshold: f64) -> Rebalance {
    let is_allowed = match &present.tree {
        Some(tree) => racks::allows(problem, &present.placement, tree),
        None => problem.allows(&present.placement),
    };
    let now_s = present.time.total_s();
    let proposal = |found: Plan| Proposal {
        aggregator_moves: moves(&present.placement.aggregators, &found.placement.aggregators),
        rank_moves: moves(&present.placement.ranks, &found.placement.ranks),
        placement: found.placement,
        saving: saving(now_s, found.time.total_s()),
        time: found.time,
        tree: found.tree,
        standbys: found.standbys,
    };
    let saves = |step_s: f64, found: &Plan| found.time.total_s() < step_s * (1.0 - threshold);
    let aggregators = with_ranks(problem, present).filter(|found| saves(now_s, found));
    let step_s = aggregators.as_ref().map_or(now_s, |found| found.time.total_s());
    let ranks = best_plan(problem).and_then(|found| {
        let is_worth_it = !is_allowed || saves(step_s, &found);
        let standbys =
            if is_worth_it { standbys(problem, &found.placement, found.domain) } else { vec![] };
        let is_complete = standbys.len() == problem.job.standbys as usize;
        (is_worth_it && is_complete).then_some(Plan { standbys, ..found })
    });
    let placement = aggregators.as_ref().map_or(&present.placement, |moved| &moved.placement);
    Rebalance {
        is_allowed,
        are_standbys_allowed: standby::allows(problem, &present.placement, &present.standbys),
        standbys: other_standbys(problem, present, placement, threshold),
        aggregators: aggregators.map(proposal),
        ranks: ranks.map(proposal),
    }
}

/// Returns standbys for a placement with the present ranks, if they save more than the share
/// `threshold` of the longest step after a failover, or if the job does not allow the present ones.
fn other_standbys(
    problem: &Problem<'_>,
    present: &Plan,
    placement: &Placement,
    threshold: f64,
) -> Option<StandbyProposal> {
    let domain = domains_in_scope(problem, present.domain).last()?;
    let others = standbys(problem, placement, domain);
    let [now_s, others_s] = [&present.standbys, &others].map(|all| Standby::longest_s(all));
    let is_allowed = standby::allows(problem, placement, &present.standbys);
    let is_worth_it = !is_allowed || others_s < now_s * (1.0 - threshold);
    let is_complete = others.len() == problem.job.standbys as usize;
    (is_worth_it && is_complete)
        .then(|| StandbyProposal { saving: saving(now_s, others_s), standbys: others })
}

/// Returns the share of a time that a shorter one saves.
fn saving(now_s: f64, then_s: f64) -> f64 {
    if now_s > 0.0 { 1.0 - then_s / now_s } else { 0.0 }
}

/// Returns the placement with the shortest step whose ranks and standbys are where they are now.
fn with_ranks(problem: &Problem<'_>, present: &Plan) -> Option<Plan> {
    let standbys: Vec<_> = present.standbys.iter().map(|standby| &standby.aggregators).collect();
    let is_taken = taken_hosts(problem, &standbys);
    let fixed = problem.with_changed_seats(|host, seats| {
        seats.ranks = seats.ranks.min(present.placement.ranks[host]);
        if is_taken[host] {
            seats.aggregators = 0;
        }
    });
    // A wider domain must save as much as in a plan.
    let saved = 1.0 - problem.job.widen_gain;
    let found =
        domains_in_scope(problem, present.domain).fold(None, |best: Option<Plan>, domain| {
            let below_s = best.as_ref().map_or(f64::INFINITY, |best| best.time.total_s() * saved);
            plan_in(&fixed, domain, below_s).or(best)
        })?;
    Some(Plan { standbys: present.standbys.clone(), ..found })
}

/// Returns the domains around another one that the job may use, the narrowest first.
fn domains_in_scope(
    problem: &Problem<'_>,
    domain: VertexId,
) -> impl Iterator<Item = VertexId> + use<> {
    let (topology, depths) = (problem.topology, problem.depths());
    let ancestors = std::iter::successors(Some(domain), |vertex| topology.parent(*vertex));
    let domains = ancestors.filter(|vertex| depths.contains(&topology.depth(*vertex)));
    domains.collect::<Vec<_>>().into_iter()
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
