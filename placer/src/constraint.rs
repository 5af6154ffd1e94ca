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

/// The room that a job would have without one of its constraints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relief {
    /// The constraint.
    pub without: Constraint,
    /// The number of the job's ranks for which there would be room.
    pub room: u32,
}

/// Returns the constraints without which a job would have more room than `room`.
pub(crate) fn reliefs(topology: &Topology, links: &Links, job: &Job, room: u32) -> Vec<Relief> {
    let relief = |(without, problem): (Constraint, Problem<'_>)| {
        let more = problem.room();
        (more > room).then_some(Relief { without, room: more })
    };
    lifted(topology, links, job).filter_map(relief).collect()
}

/// Returns the problem without each constraint of a job in turn.
pub(crate) fn lifted<'a>(
    topology: &'a Topology,
    links: &'a Links,
    job: &Job,
) -> impl Iterator<Item = (Constraint, Problem<'a>)> {
    Constraint::ALL.into_iter().filter_map(move |constraint| {
        let problem = match constraint {
            Constraint::OtherJobs => Problem::without_other_jobs(topology, links, job),
            _ => Problem::new(topology, links, &constraint.lifted(topology, job)?),
        };
        // Only a wrong number of the job is an error, and lifting a constraint adds none.
        Some((constraint, problem.ok()?))
    })
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
