//! The reasons for a plan, and the changes that would shorten its step.

use std::cmp::Reverse;
use std::ops::Range;

use crate::constraint::{Constraint, lifted};
use crate::inventory::Host;
use crate::job::Job;
use crate::network::{Bottleneck, Rate};
use crate::placement::Placement;
use crate::plan::{Plan, best_plan, plan_in};
use crate::problem::{Exclusion, Problem, free_gpus};
use crate::racks::{Tree, allows, tree_step_time};
use crate::rank_moves::RankMoves;
use crate::topology::{HostId, Topology, VertexId};

/// The reasons for a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// Per host, in the order of the topology.
    pub hosts: Vec<Reason>,
    /// The other domains of the level of the plan's domain.
    pub domains: Vec<(VertexId, Alternative)>,
    /// Changes that would shorten the step, the greatest saving first.
    pub helps: Vec<Help>,
}

/// The reason why a plan uses a host or does not.
#[derive(Debug, Clone, PartialEq)]
pub enum Reason {
    /// The plan uses the host.
    Used,
    /// The plan uses the host only for aggregators of a standby: the one with this number, from 1.
    Standby(usize),
    /// No rank of the job may be there.
    Excluded(Exclusion),
    /// The plan has an aggregator in each rack that it uses, and none in the host's rack.
    NoAggregator,
    /// The plan stays in a domain that does not contain the host.
    Outside,
    /// The job has as many ranks as it allows in this domain, which holds the host.
    Full(VertexId),
    /// A rank there would need a link that carries nothing, or a path if it is none.
    Dead(Bottleneck),
    /// If one rank were there, the step would take this long, in seconds. It equals a plan's step
    /// if the plan prefers the used hosts only to keep domains whole.
    Step(f64),
}

/// The result of planning a job in another domain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Alternative {
    /// The domain has room for fewer ranks than the job has.
    Room(u32),
    /// No placement was found there.
    None,
    /// The best step found there takes this long, in seconds.
    Step(f64),
}

/// A change, and the step time with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Help {
    /// The change.
    pub change: Change,
    /// The step time of the best plan with the change, in seconds.
    pub step_s: f64,
    /// The share of the step time that the change saves, compared with the best plan without it.
    pub saving: f64,
}

/// A change that would shorten a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The link or path that limits the step carries twice as much, in both directions.
    Faster(Bottleneck),
    /// The job lacks this constraint.
    Without(Constraint),
    /// Other jobs free some resources in a domain.
    Freed {
        /// The domain.
        domain: VertexId,
        /// The number of GPUs.
        gpus: u32,
        /// The number of CPU cores.
        cpus: u32,
    },
}

/// Explains a plan of a problem.
#[must_use]
pub fn explain(problem: &Problem<'_>, plan: &Plan) -> Explanation {
    Explanation {
        hosts: reasons(problem, plan),
        domains: alternatives(problem, plan),
        helps: helps(problem, plan),
    }
}

fn reasons(problem: &Problem<'_>, plan: &Plan) -> Vec<Reason> {
    let moves = RankMoves::new(problem, &plan.placement);
    let ranks = &plan.placement.ranks;
    let mut from: Vec<_> = problem.topology.host_ids().filter(|host| ranks[host.0] > 0).collect();
    from.sort_by_key(|host| Reverse(ranks[host.0]));
    from.truncate(MOST_SOURCES);
    let hosts = problem.topology.host_ids();
    hosts.map(|host| reason(problem, plan, &moves, &from, host)).collect()
}

/// Returns why a plan uses a host or does not. If one rank could be there, it is the one of the
/// `from` hosts that gives the shortest step.
fn reason(
    problem: &Problem<'_>,
    plan: &Plan,
    moves: &RankMoves<'_>,
    from: &[HostId],
    host: HostId,
) -> Reason {
    let is_rack_aggregator = plan.tree.as_ref().is_some_and(|tree| tree.racks.contains(&host));
    if plan.placement.uses(host.0) || is_rack_aggregator {
        return Reason::Used;
    }
    let mut standbys = plan.standbys.iter();
    if let Some(index) = standbys.position(|standby| standby.aggregators[host.0] > 0) {
        return Reason::Standby(index + 1);
    }
    if let Some(exclusion) = &problem.seats[host.0].excluded {
        return Reason::Excluded(exclusion.clone());
    }
    if !problem.topology.hosts_of(plan.domain).contains(&host.0) {
        return Reason::Outside;
    }
    if let Some(tree) = &plan.tree {
        return with_tree(problem, plan, tree, from, host);
    }
    let steps_s: Vec<_> = from.iter().filter_map(|from| moves.step_s(*from, host)).collect();
    match steps_s.iter().copied().reduce(f64::min) {
        Some(step_s) if step_s.is_finite() => Reason::Step(step_s),
        Some(_) => Reason::Dead(dead_link(problem, plan, host)),
        None => Reason::Full(full_domain(problem, &plan.placement, host)),
    }
}

/// Returns the widest domain of a host that has as many ranks as the job allows there.
fn full_domain(problem: &Problem<'_>, placement: &Placement, host: HostId) -> VertexId {
    let topology = problem.topology;
    let leaf = topology.leaf(host);
    let is_full = |vertex: &VertexId| {
        let ranks = &placement.ranks[topology.hosts_of(*vertex)];
        ranks.iter().sum::<u32>() >= problem.limits[vertex.0]
    };
    topology.climb(leaf).filter(is_full).last().unwrap_or(leaf)
}

/// Returns a link that carries nothing between a host and the plan's aggregators: the closest one
/// above the host if there is any.
fn dead_link(problem: &Problem<'_>, plan: &Plan, host: HostId) -> Bottleneck {
    let Problem { topology, links, .. } = problem;
    let is_dead = |rate: Rate| rate.bytes_per_s <= 0.0;
    let dead = |from: HostId, to: HostId| {
        let meet = topology.meet(topology.leaf(from), topology.leaf(to));
        let mut below = topology.climb(topology.leaf(from)).take_while(move |it| *it != meet);
        below.find_map(|vertex| {
            let up = is_dead(links.up(vertex)).then_some(Bottleneck::Up(vertex));
            up.or_else(|| is_dead(links.down(vertex)).then_some(Bottleneck::Down(vertex)))
        })
    };
    let aggregators = plan.placement.aggregator_hosts();
    let mut own = aggregators.iter().filter_map(|(aggregator, _)| dead(host, *aggregator));
    let mut others = aggregators.iter().filter_map(|(aggregator, _)| dead(*aggregator, host));
    own.next().or_else(|| others.next()).unwrap_or(Bottleneck::None)
}

/// Returns why a plan with aggregators in racks does not use a host for ranks.
fn with_tree(
    problem: &Problem<'_>,
    plan: &Plan,
    tree: &Tree,
    from: &[HostId],
    host: HostId,
) -> Reason {
    let rack = problem.topology.domain_of(host);
    let mut aggregators = tree.racks.iter().chain([&tree.root]);
    if !aggregators.any(|aggregator| problem.topology.domain_of(*aggregator) == rack) {
        return Reason::NoAggregator;
    }
    let mut moved = from.iter().map(|from| {
        let mut moved = plan.placement.clone();
        moved.ranks[from.0] -= 1;
        moved.ranks[host.0] += 1;
        moved
    });
    let moved = moved.find(|moved| allows(problem, moved, tree));
    let step_s = moved.map(|moved| tree_step_time(problem, &moved, tree).total_s());
    match step_s {
        Some(step_s) if step_s.is_finite() => Reason::Step(step_s),
        Some(_) => Reason::Dead(dead_link(problem, plan, host)),
        None => Reason::Full(full_domain(problem, &plan.placement, host)),
    }
}

fn alternatives(problem: &Problem<'_>, plan: &Plan) -> Vec<(VertexId, Alternative)> {
    let topology = problem.topology;
    // A plan for the whole cluster is compared with its widest domains.
    let depth = topology.depth(plan.domain).max(1);
    if depth > topology.levels().len() {
        return vec![];
    }
    let others = topology.domains(depth).filter(|domain| *domain != plan.domain);
    let alternative = |domain: VertexId| {
        let room = problem.rooms[domain.0];
        let alternative = if room < problem.traffic.ranks {
            Alternative::Room(room)
        } else {
            let plan = plan_in(problem, domain, f64::INFINITY);
            plan.map_or(Alternative::None, |plan| Alternative::Step(plan.time.total_s()))
        };
        (domain, alternative)
    };
    others.map(alternative).collect()
}

fn helps(problem: &Problem<'_>, plan: &Plan) -> Vec<Help> {
    let job = &problem.job;
    let step_s = |problem: &Problem<'_>| Some(best_plan(problem)?.time.total_s());
    // A present placement may be far from the best plan, which no change may be credited with.
    let least_s = step_s(problem).unwrap_or(f64::INFINITY).min(plan.time.total_s());
    let help = |change: Change, step_s: f64| {
        let saving = 1.0 - step_s / least_s;
        (saving >= LEAST_SAVING).then_some(Help { change, step_s, saving })
    };
    let bottleneck = plan.time.bottleneck;
    let faster = problem.links.faster(bottleneck);
    let faster = faster.and_then(|links| step_s(&problem.with_links(&links)));
    let faster = faster.and_then(|step_s| help(Change::Faster(bottleneck), step_s));
    let lifted = lifted(problem.topology, problem.links, job).filter_map(|(without, lifted)| {
        // Room in one domain is a more useful answer than room everywhere.
        let is_asked = without != Constraint::OtherJobs;
        is_asked.then(|| help(Change::Without(without), step_s(&lifted)?))?
    });
    let mut helps: Vec<Help> = faster.into_iter().chain(lifted).collect();
    if let Ok(freed) = Problem::without_other_jobs(problem.topology, problem.links, job) {
        let domains = crowded_domains(problem, &freed, &plan.placement);
        helps.extend(domains.into_iter().filter_map(|(domain, hosts)| {
            let freed = problem.with_seats_of(&freed, hosts);
            let plan = best_plan(&freed)?;
            let (gpus, cpus) = lacking(problem.topology, job, &plan);
            let change = Change::Freed { domain, gpus, cpus };
            (gpus + cpus > 0).then(|| help(change, plan.time.total_s()))?
        }));
    }
    helps.sort_by(|one, other| other.saving.total_cmp(&one.saving));
    helps
}

/// Returns the least numbers of GPUs and CPU cores that other jobs use and a plan needs.
fn lacking(topology: &Topology, job: &Job, plan: &Plan) -> (u32, u32) {
    let racks = plan.tree.as_ref().map_or(&[][..], |tree| &tree.racks);
    topology.host_ids().fold((0u32, 0u32), |(gpus, cpus), id| {
        let host = topology.host(id);
        let ranks = plan.placement.ranks[id.0];
        let aggregators = plan.placement.aggregators[id.0] + u32::from(racks.contains(&id));
        let needed = ranks * job.cpus_per_rank + aggregators * job.cpus_per_aggregator;
        let lacking = needed.saturating_sub(host.cpus.free());
        (gpus.saturating_add(lacking_gpus(host, job, ranks)), cpus.saturating_add(lacking))
    })
}

/// Returns the least number of a host's GPUs that other jobs must free for this many ranks.
fn lacking_gpus(host: &Host, job: &Job, ranks: u32) -> u32 {
    let per_rank = job.gpus_per_rank.max(1);
    let missing = ranks.saturating_sub(free_gpus(host, job) / per_rank) as usize;
    let usable = host.gpus.iter().filter(|(name, _)| job.uses_gpu(name));
    // The first rank more of a type takes the GPUs that its other ranks leave over.
    let mut costs: Vec<u32> = usable
        .flat_map(|(_, gpus)| {
            let more = gpus.total / per_rank - gpus.free() / per_rank;
            let first = per_rank - gpus.free() % per_rank;
            let costs = std::iter::once(first).chain(std::iter::repeat(per_rank));
            costs.take((more as usize).min(missing))
        })
        .collect();
    costs.sort_unstable();
    costs.into_iter().take(missing).fold(0, u32::saturating_add)
}

/// Returns the innermost domains in which other jobs use seats: those with most ranks of this job
/// first, then those with most seats.
fn crowded_domains(
    problem: &Problem<'_>,
    freed: &Problem<'_>,
    placement: &Placement,
) -> Vec<(VertexId, Range<usize>)> {
    let topology = problem.topology;
    let seats = |problem: &Problem<'_>, hosts: Range<usize>| {
        let seats = problem.seats[hosts].iter();
        seats.map(|seats| u64::from(seats.ranks) + u64::from(seats.aggregators)).sum::<u64>()
    };
    let crowded = |domain: VertexId| {
        let hosts = topology.hosts_of(domain);
        let ranks = placement.ranks[hosts.clone()].iter().sum::<u32>();
        let most = seats(freed, hosts.clone());
        (most > seats(problem, hosts.clone())).then_some(((ranks, most), domain, hosts))
    };
    let mut domains: Vec<_> =
        topology.domains(topology.levels().len()).filter_map(crowded).collect();
    domains.sort_by_key(|(key, domain, _)| (Reverse(*key), *domain));
    domains.truncate(MOST_DOMAINS);
    domains.into_iter().map(|(_, domain, hosts)| (domain, hosts)).collect()
}

/// A change that saves a smaller share of the step is not worth a line.
const LEAST_SAVING: f64 = 0.05;
/// Each domain costs one plan.
const MOST_DOMAINS: usize = 8;
/// Hosts from which a rank is moved to each unused host.
const MOST_SOURCES: usize = 8;
