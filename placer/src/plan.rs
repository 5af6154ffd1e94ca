//! Plans: where a job's ranks and aggregators go, how long a step takes, and how good that is.

use crate::constraint::{Constraint, Relief, lifted, names, pairs, reliefs, without_all};
use crate::job::{Job, Setting};
use crate::model::{StepTime, step_time};
use crate::network::Links;
use crate::placement::Placement;
use crate::problem::{JobError, Problem};
use crate::racks::{Tree, tree_step_time};
use crate::search::{self, Found};
use crate::standby::{Standby, standbys};
use crate::topology::{Topology, VertexId};
use crate::unmatched::{Unmatched, few, unmatched};

/// The hosts chosen for a job's ranks and aggregators.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The ranks and aggregators of each host.
    pub placement: Placement,
    /// The expected time of a step.
    pub time: StepTime,
    /// No placement in `domain` has a shorter step, in seconds.
    pub bound_s: f64,
    /// The domain that the job stays in.
    pub domain: VertexId,
    /// The aggregators that can take over, in the order in which the job moves to them.
    pub standbys: Vec<Standby>,
    /// The aggregators of racks, if the job has any.
    pub tree: Option<Tree>,
}

/// The error for a job that has no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The job's own numbers are wrong.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The domains that the job may use have too few seats.
    #[error(
        "job {job:?} has {ranks} ranks, and there is room for {room}{}{}{}",
        level.as_ref().map_or_else(String::new, |level| format!(" in one {level}")),
        relief_texts(reliefs, *ranks),
        unmatched.iter().map(|unmatched| format!("; {unmatched}")).collect::<String>()
    )]
    Room {
        /// The job's name.
        job: String,
        /// The ranks that the job needs.
        ranks: u32,
        /// The ranks that fit.
        room: u32,
        /// The level of the domain that the job must not leave, if there is any.
        level: Option<String>,
        /// The constraints without which more ranks would fit.
        reliefs: Vec<Relief>,
        /// Values of the constraints that no host has.
        unmatched: Vec<Unmatched>,
    },
    /// Ranks fit, but not together with the aggregators, or links that carry nothing separate them.
    #[error("job {job:?}: no placement of its ranks and aggregators found; {cause}")]
    NoPlacement {
        /// The job's name.
        job: String,
        /// The reason, and what would help.
        cause: Cause,
    },
    /// No hosts for a standby are outside the domains of the other aggregators.
    #[error(
        "job {job:?}: no placement of standby {number} found outside each {level} with \
         aggregators; {}",
        standby_advice(help.as_ref())
    )]
    NoStandby {
        /// The job's name.
        job: String,
        /// The number of the first standby without hosts, from 1.
        number: usize,
        /// The level of whose domains none may hold aggregators of two sets.
        level: String,
        /// A change with which all standbys have hosts.
        help: Option<StandbyHelp>,
    },
}

/// The reason why ranks and aggregators that each have seats have no placement together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// Without these constraints, there is a placement.
    #[error("without {}, there is one", names(.0))]
    Constraints(Vec<Constraint>),
    /// If these links carried anything, there would be a placement.
    #[error(
        "nothing passes {}; measure again, or exclude these hosts",
        few(.0.iter().map(String::as_str))
    )]
    Dead(Vec<String>),
    /// The hosts have too few seats for aggregators.
    #[error(
        "the hosts have room for {room} of {needed} aggregators; lower `aggregators` or \
         `cpus_per_aggregator`, or raise `max_aggregators`"
    )]
    Aggregators {
        /// The aggregators that fit.
        room: u32,
        /// The aggregators of the job.
        needed: u32,
    },
    /// With much fewer bytes, there would be a placement.
    #[error(
        "each step would take more than {:e} s; lower `bytes`, or measure the links again",
        search::LONGEST_S
    )]
    TooLong,
    /// Hosts that have room for aggregators have no room for ranks besides.
    #[error(
        "lifting one or two constraints does not help; free GPUs or CPU cores, or lower `ranks`"
    )]
    Unknown,
}

/// A change with which all standbys of a job have hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StandbyHelp {
    /// A narrower `standby_level`.
    Level(String),
    /// The job lacks a constraint.
    Without(Constraint),
}

impl Plan {
    /// Marks the GPUs and CPU cores that this plan of a job needs as used, so that the next job
    /// finds what is left. Ranks take the types of GPUs in the order of their names.
    pub fn occupy(&self, topology: &mut Topology, job: &Job) {
        let mut aggregators = self.placement.aggregators.clone();
        for (host, count) in self.standbys.iter().flat_map(Standby::hosts) {
            aggregators[host.0] += count;
        }
        for host in self.tree.iter().flat_map(|tree| &tree.racks) {
            aggregators[host.0] += 1;
        }
        for (id, aggregators) in topology.host_ids().zip(aggregators) {
            let host = topology.host_mut(id);
            let mut ranks = self.placement.ranks[id.0];
            let cpus = ranks.saturating_mul(job.cpus_per_rank);
            let cpus = cpus.saturating_add(aggregators.saturating_mul(job.cpus_per_aggregator));
            host.cpus.take(cpus);
            for (_, gpus) in host.gpus.iter_mut().filter(|(name, _)| job.uses_gpu(name)) {
                let taken = gpus.free().checked_div(job.gpus_per_rank).unwrap_or(0).min(ranks);
                gpus.take(taken * job.gpus_per_rank);
                ranks -= taken;
            }
        }
    }

    /// Returns the step times if all rates are at the better and at the worse end of their
    /// uncertainty, in seconds. Takes the problem that the plan solves.
    #[must_use]
    pub fn range_s(&self, problem: &Problem<'_>) -> (f64, f64) {
        let at = |is_best: bool| {
            let links = problem.links.at_limit(is_best);
            let problem = problem.with_links(&links);
            let time = self.tree.as_ref().map_or_else(
                || step_time(&problem, &self.placement),
                |tree| tree_step_time(&problem, &self.placement, tree),
            );
            time.total_s()
        };
        (at(true), at(false))
    }

    /// Returns how much longer the step is than the bound, as a share of the bound. `None` if the
    /// bound is zero and the step is not.
    #[must_use]
    pub fn gap(&self) -> Option<f64> {
        let total_s = self.time.total_s();
        if total_s <= self.bound_s {
            return Some(0.0);
        }
        (self.bound_s > 0.0).then(|| total_s / self.bound_s - 1.0)
    }
}

/// Plans a job.
///
/// The job stays in one domain of its scope's level if one has room: in the one with the shortest
/// step. Level by level, a wider domain is chosen if none was found before, or if it shortens the
/// step by more than the job's `widen_gain`, unless the job requires its scope. This extends the
/// rule of Lee et al. (Electronics 12(14):3021, 2023), who keep a job in one zone.
///
/// # Errors
/// If the job's numbers are wrong, or the job does not fit.
pub fn plan(topology: &Topology, links: &Links, job: &Job) -> Result<Plan, PlanError> {
    let job = with_aggregators(topology, links, job)?;
    plan_problem(&Problem::new(topology, links, &job)?)
}

/// Returns a job whose number of aggregators is given: where the job leaves it to the planner, the
/// least number from 1 to 16 whose step is at most 1 % longer than the shortest one.
///
/// # Errors
/// If the job's numbers are wrong.
pub fn with_aggregators(topology: &Topology, links: &Links, job: &Job) -> Result<Job, JobError> {
    let with = |aggregators: u32| Job { aggregators: aggregators.into(), ..job.clone() };
    if job.aggregators.given().is_some() {
        return Ok(job.clone());
    }
    if job.racks == Setting::Given(true) {
        return Ok(with(1));
    }
    let mut steps_s = vec![];
    for aggregators in 1..=MOST_CHOSEN {
        let problem = Problem::new(topology, links, &with(aggregators))?;
        let plan = if problem.room() < job.ranks { None } else { best_plan(&problem) };
        steps_s.extend(plan.map(|plan| (aggregators, plan.time.total_s())));
    }
    let least_s = steps_s.iter().map(|(_, step_s)| *step_s).fold(f64::INFINITY, f64::min);
    let chosen = steps_s.iter().find(|(_, step_s)| *step_s <= least_s * SHORT_ENOUGH);
    // Without any plan, one aggregator gives the reason.
    Ok(with(chosen.map_or(1, |(aggregators, _)| *aggregators)))
}

/// Like [`plan`], for a job that was combined with its cluster before.
///
/// # Errors
/// If the job does not fit.
pub fn plan_problem(problem: &Problem<'_>) -> Result<Plan, PlanError> {
    let Problem { topology, links, job, .. } = problem;
    let room = problem.room();
    if room < job.ranks {
        return Err(PlanError::Room {
            job: job.name.clone(),
            ranks: job.ranks,
            room,
            level: job.scope.clone().filter(|_| job.requires_scope),
            reliefs: reliefs(topology, links, job, room),
            unmatched: unmatched(topology, job),
        });
    }
    let plan = best_plan(problem)
        .ok_or_else(|| PlanError::NoPlacement { job: job.name.clone(), cause: cause(problem) })?;
    let standbys = standbys(problem, &plan.placement, plan.domain);
    if standbys.len() < job.standbys as usize {
        let level = job.standby_level.clone().or_else(|| topology.levels().last().cloned());
        return Err(PlanError::NoStandby {
            job: job.name.clone(),
            number: standbys.len() + 1,
            level: level.unwrap_or_else(|| "host".into()),
            help: standby_help(problem, &plan),
        });
    }
    Ok(Plan { standbys, ..plan })
}

/// Returns why a job with room for its ranks has no placement.
fn cause(problem: &Problem<'_>) -> Cause {
    let Problem { topology, links, job, .. } = problem;
    let helps = lifted(topology, links, job).filter(|(_, it)| best_plan(it).is_some());
    let mut helps = helps.map(|(constraint, _)| constraint).peekable();
    // Hosts of other jobs may only stand in for hosts that nothing reaches.
    if let Some(constraint) = helps.next_if(|constraint| *constraint != Constraint::OtherJobs) {
        return Cause::Constraints(vec![constraint]);
    }
    let needed = problem.traffic.aggregators;
    let seats = problem.seats.iter().map(|seats| seats.aggregators);
    let room = seats.fold(0, u32::saturating_add);
    let alive = links.alive();
    if room >= needed && best_plan(&problem.with_links(&alive)).is_some() {
        return Cause::Dead(links.dead(topology));
    }
    if let Some(constraint) = helps.next() {
        return Cause::Constraints(vec![constraint]);
    }
    if room < needed {
        return Cause::Aggregators { room, needed };
    }
    if best_plan(&problem.with_few_bytes()).is_some() {
        return Cause::TooLong;
    }
    let mut pairs = pairs().filter(|pair| {
        let without = without_all(topology, links, job, pair);
        without.is_some_and(|problem| best_plan(&problem).is_some())
    });
    pairs.next().map_or(Cause::Unknown, |pair| Cause::Constraints(pair.into()))
}

/// Returns a change with which all standbys of a plan have hosts: a narrower level if one helps.
fn standby_help(problem: &Problem<'_>, plan: &Plan) -> Option<StandbyHelp> {
    let Problem { topology, links, job, standby_depth, .. } = problem;
    let has_all = |problem: &Problem<'_>, plan: &Plan| {
        standbys(problem, &plan.placement, plan.domain).len() == job.standbys as usize
    };
    let levels = topology.levels().iter().skip(*standby_depth).map(String::as_str);
    let is_host = *standby_depth > topology.levels().len();
    let levels = levels.chain((!is_host && !topology.levels().is_empty()).then_some("host"));
    let narrower = levels.into_iter().find(|level| {
        let job = Job { standby_level: Some((*level).into()), ..job.clone() };
        let problem = Problem::new(topology, links, &job);
        problem.is_ok_and(|problem| has_all(&problem, plan))
    });
    if let Some(level) = narrower {
        return Some(StandbyHelp::Level(level.into()));
    }
    let mut lifted = lifted(topology, links, job);
    let without =
        lifted.find(|(_, problem)| best_plan(problem).is_some_and(|plan| has_all(problem, &plan)));
    without.map(|(constraint, _)| StandbyHelp::Without(constraint))
}

/// Returns the plan that [`plan`] describes.
pub(crate) fn best_plan(problem: &Problem<'_>) -> Option<Plan> {
    let widen_gain = problem.job.widen_gain;
    problem.depths().rev().fold(None, |best: Option<Plan>, depth| {
        let worth_s = best.as_ref().map(|best| best.time.total_s() * (1.0 - widen_gain));
        best_at(problem, depth, worth_s.unwrap_or(f64::INFINITY)).or(best)
    })
}

/// Returns the best plan in one domain of a depth, if its step is shorter than `below_s` seconds.
fn best_at(problem: &Problem<'_>, depth: usize, below_s: f64) -> Option<Plan> {
    let domains = problem.topology.domains(depth);
    let domains = domains.filter(|domain| problem.rooms[domain.0] >= problem.traffic.ranks);
    let mut domains: Vec<_> = domains.collect();
    if domains.len() > MOST_SEARCHED && problem.job.racks != Setting::Given(true) {
        domains = promising(problem, domains, below_s);
    }
    domains.into_iter().fold(None, |best: Option<Plan>, domain| {
        let below_s = best.as_ref().map_or(below_s, |best| best.time.total_s());
        plan_in(problem, domain, below_s).or(best)
    })
}

/// Returns the domains whose searches start with the shortest steps, the shortest first. Leaves out
/// those in which no step is shorter than `below_s` seconds or than the start of another search.
fn promising(problem: &Problem<'_>, domains: Vec<VertexId>, below_s: f64) -> Vec<VertexId> {
    let mut least_s = below_s;
    let mut starts = vec![];
    for domain in domains {
        if let Some(relaxed) = search::relax(problem, domain, least_s) {
            let start = search::start(problem, domain, &relaxed);
            let start_s = start.map_or(f64::INFINITY, |start| start.time.total_s());
            least_s = least_s.min(start_s);
            starts.push((start_s, domain));
        }
    }
    starts.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
    starts.truncate(MOST_SEARCHED);
    starts.into_iter().map(|(_, domain)| domain).collect()
}

/// Returns the best placement that the search finds in a domain, if its step is shorter than
/// `below_s` seconds.
pub(crate) fn plan_in(problem: &Problem<'_>, domain: VertexId, below_s: f64) -> Option<Plan> {
    if problem.rooms[domain.0] < problem.traffic.ranks {
        return None;
    }
    let flat = (problem.job.racks != Setting::Given(true))
        .then(|| flat_in(problem, domain, below_s))
        .flatten();
    if !problem.may_have_racks() {
        return flat;
    }
    let flat_s = flat.as_ref().map_or(below_s, |flat| flat.time.total_s());
    let tree = tree_in(problem, domain, flat_s);
    let flat_bound_s = flat.as_ref().map_or(f64::INFINITY, |flat| flat.bound_s);
    tree.map(|tree| Plan { bound_s: tree.bound_s.min(flat_bound_s), ..tree }).or(flat)
}

fn flat_in(problem: &Problem<'_>, domain: VertexId, below_s: f64) -> Option<Plan> {
    let relaxed = search::relax(problem, domain, below_s)?;
    shorter(domain, search::search(problem, domain, &relaxed)?, below_s)
}

/// Like [`flat_in`], with an aggregator in each rack.
fn tree_in(problem: &Problem<'_>, domain: VertexId, below_s: f64) -> Option<Plan> {
    if problem.topology.depth(domain) > problem.topology.levels().len() {
        return None;
    }
    shorter(domain, search::racks::search(problem, domain, below_s)?, below_s)
}

/// Returns what a search in a domain found, with its bound, as a plan, if its step is shorter than
/// `below_s` seconds.
fn shorter(domain: VertexId, (found, bound_s): (Found, f64), below_s: f64) -> Option<Plan> {
    let Found { placement, tree, time } = found;
    let bound_s = bound_s.min(time.total_s());
    let plan = Plan { placement, time, bound_s, domain, standbys: vec![], tree };
    (time.total_s() < below_s).then_some(plan)
}

fn relief_texts(reliefs: &[Relief], ranks: u32) -> String {
    if reliefs.is_empty() {
        return "; no constraint of the job binds, so add hosts or lower `ranks`".into();
    }
    let texts = reliefs.iter().map(|Relief { without, room }| {
        let names = names(without);
        if *room >= ranks {
            format!("; without {names}, all fit")
        } else {
            format!("; without {names}, {room} fit")
        }
    });
    texts.collect()
}

fn standby_advice(help: Option<&StandbyHelp>) -> String {
    match help {
        Some(StandbyHelp::Level(level)) => {
            format!("set `standby_level` to {level:?}, or lower `standbys`")
        }
        Some(StandbyHelp::Without(constraint)) => {
            format!("without {constraint}, all standbys have hosts")
        }
        None => "lower `standbys`, or add hosts that can run aggregators".into(),
    }
}

/// The greatest number of domains of one level that are searched.
const MOST_SEARCHED: usize = 16;
/// The greatest number of aggregators that the planner chooses. Each costs one plan.
const MOST_CHOSEN: u32 = 16;
/// Steps of different numbers of aggregators within this factor count as equal.
const SHORT_ENOUGH: f64 = 1.01;
