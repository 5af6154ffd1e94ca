//! The constraints of a job that can be lifted one by one, to find out which of them binds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::job::Job;
use crate::network::Links;
use crate::problem::Problem;
use crate::topology::Topology;

/// A constraint of a job, or the room that other jobs take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Constraint {
    /// `scope` and `requires_scope`: the domain that the job should or must not leave.
    Scope,
    /// `widen_gain`: the share of the step that a wider domain must save.
    WidenGain,
    /// Taints that the job does not tolerate.
    Taints,
    /// `only`: the hosts that the job may use.
    Only,
    /// `except`: the hosts that the job may not use.
    Except,
    /// `gpu_type`: the type of GPU that the job needs.
    GpuType,
    /// `max_ranks_per_host`.
    RanksPerHost,
    /// `max_ranks_per_domain`.
    RanksPerDomain,
    /// `has_dedicated_aggregators`: no aggregator on the host of a rank.
    DedicatedAggregators,
    /// The GPUs and CPU cores that other jobs use.
    OtherJobs,
}

/// The room that a job would have without some of its constraints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relief {
    /// The constraints.
    pub without: Vec<Constraint>,
    /// The number of the job's ranks for which there would be room.
    pub room: u32,
}

/// Returns the constraints without which a job would have more room than `room`. If no single one
/// binds, returns the first two that do so together, or else all of them.
pub(crate) fn reliefs(topology: &Topology, links: &Links, job: &Job, room: u32) -> Vec<Relief> {
    let relief = |without: Vec<Constraint>| {
        let more = without_all(topology, links, job, &without)?.room();
        (more > room).then_some(Relief { without, room: more })
    };
    let single: Vec<_> =
        Constraint::ALL.into_iter().filter_map(|constraint| relief(vec![constraint])).collect();
    if !single.is_empty() {
        return single;
    }
    let all = || {
        let has = |constraint: &Constraint| {
            *constraint == Constraint::OtherJobs || constraint.lifted(topology, job).is_some()
        };
        Constraint::ALL.into_iter().filter(has).collect()
    };
    pairs().find_map(|pair| relief(pair.into())).or_else(|| relief(all())).into_iter().collect()
}

/// Returns the problem without each constraint of a job in turn.
pub(crate) fn lifted<'a>(
    topology: &'a Topology,
    links: &'a Links,
    job: &Job,
) -> impl Iterator<Item = (Constraint, Problem<'a>)> {
    Constraint::ALL.into_iter().filter_map(move |constraint| {
        Some((constraint, without_all(topology, links, job, &[constraint])?))
    })
}

/// Returns all pairs of constraints.
pub(crate) fn pairs() -> impl Iterator<Item = [Constraint; 2]> {
    let all = Constraint::ALL.into_iter().enumerate();
    all.flat_map(|(index, one)| Constraint::ALL[..index].iter().map(move |other| [*other, one]))
}

/// Returns the problem without some constraints, or `None` if the job lacks one of these.
pub(crate) fn without_all<'a>(
    topology: &'a Topology,
    links: &'a Links,
    job: &Job,
    constraints: &[Constraint],
) -> Option<Problem<'a>> {
    let of_job = constraints.iter().filter(|constraint| **constraint != Constraint::OtherJobs);
    let job = of_job.into_iter().try_fold(job.clone(), |job, it| it.lifted(topology, &job))?;
    let problem = match constraints.contains(&Constraint::OtherJobs) {
        true => Problem::without_other_jobs(topology, links, &job),
        false => Problem::new(topology, links, &job),
    };
    // Only a wrong number of the job is an error, and lifting a constraint adds none.
    problem.ok()
}

/// Names constraints that are lifted together.
pub(crate) fn names(constraints: &[Constraint]) -> String {
    let names: Vec<_> = constraints.iter().map(ToString::to_string).collect();
    names.join(" and ")
}

impl Constraint {
    const ALL: [Self; 10] = [
        Self::Scope,
        Self::WidenGain,
        Self::Taints,
        Self::Only,
        Self::Except,
        Self::GpuType,
        Self::RanksPerHost,
        Self::RanksPerDomain,
        Self::DedicatedAggregators,
        Self::OtherJobs,
    ];

    /// Returns a job that differs in lacking the constraint, or `None` if the job does not have it.
    fn lifted(self, topology: &Topology, job: &Job) -> Option<Job> {
        let mut lifted = job.clone();
        match self {
            Self::Scope => (lifted.scope, lifted.requires_scope) = (None, false),
            Self::WidenGain => lifted.widen_gain = 0.0,
            Self::Taints => lifted.tolerates = taints(topology),
            Self::Only => lifted.only = vec![],
            Self::Except => lifted.except = vec![],
            Self::GpuType => lifted.gpu_type = None,
            Self::RanksPerHost => lifted.max_ranks_per_host = None,
            Self::RanksPerDomain => lifted.max_ranks_per_domain = BTreeMap::new(),
            Self::DedicatedAggregators => lifted.has_dedicated_aggregators = false,
            Self::OtherJobs => {}
        }
        (lifted != *job).then_some(lifted)
    }
}

/// Returns all taints of the hosts.
fn taints(topology: &Topology) -> Vec<String> {
    let taints: BTreeSet<_> = topology.hosts().iter().flat_map(|host| &host.taints).collect();
    taints.into_iter().cloned().collect()
}

impl fmt::Display for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scope => "`scope`",
            Self::WidenGain => "`widen_gain`",
            Self::Taints => "taints",
            Self::Only => "`only`",
            Self::Except => "`except`",
            Self::GpuType => "`gpu_type`",
            Self::RanksPerHost => "`max_ranks_per_host`",
            Self::RanksPerDomain => "`max_ranks_per_domain`",
            Self::DedicatedAggregators => "`has_dedicated_aggregators`",
            Self::OtherJobs => "other jobs",
        })
    }
}
