//! Scenarios: TOML files that describe a cluster, its jobs and how their all-reduces are scheduled.

mod build;
mod file;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;

use crate::engine::Picos;
use crate::fabric::{NodeId, Topology, TwoLayers};
use crate::link::LinkConfig;
use crate::random::Random;
use crate::training::{Inputs, RunError, Simulation};
use crate::transport::reference::Config;
use crate::workload::arrivals::{Arrival, JobNumber};
use crate::workload::placement::{Assignments, Policy, WorkerId};
use crate::workload::profile::Profile;

use self::build::ScheduleRules;
pub use self::build::{ScenarioError, ScenarioErrorKind};

/// A scenario that was checked, and can be run with any seed.
#[derive(Debug, Clone)]
pub struct Scenario {
    name: String,
    topology: Topology,
    gpus_per_worker: u32,
    transport: Config,
    schedule: ScheduleRules,
    policy: Policy,
    arrivals: Vec<Arrival>,
    profiles: BTreeMap<String, Arc<Profile>>,
}

impl Scenario {
    /// Returns the scenario's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the jobs in the order of their submission.
    #[must_use]
    pub fn arrivals(&self) -> &[Arrival] {
        &self.arrivals
    }

    /// Returns the size of packets on the wire.
    #[must_use]
    pub const fn wire_bytes(&self) -> u32 {
        self.transport.format.wire_bytes
    }

    /// Returns the time that a model takes for some iterations on two workers of this cluster that
    /// have the network for themselves, without a schedule, and with an ideal network beyond their
    /// own links. This is the baseline of CoInNetFlow's study.
    ///
    /// # Errors
    /// If the model has no profile.
    pub fn alone(&self, model: &str, iterations: NonZeroU64, seed: u64) -> Result<Picos, RunError> {
        let first = self.topology.links().iter().find(|link| link.from == NodeId(0));
        let worker = first.map_or(LinkConfig::IDEAL, |link| link.config);
        let worker = LinkConfig { queue_bytes: u64::MAX, mark_bytes: u64::MAX, ..worker };
        let uplink = LinkConfig::IDEAL;
        let topology = TwoLayers { racks: 2, workers_per_rack: 1, worker, uplink }.build();
        let job = JobNumber(0);
        let assigned = Assignments::from_plan([(job, vec![WorkerId(0), WorkerId(1)])]);
        let arrival = Arrival {
            job,
            name: model.into(),
            submitted: Picos::ZERO,
            gpus: NonZeroU32::new(2).expect("not zero"),
            iterations,
            model: model.into(),
        };
        let inputs = Inputs {
            topology,
            gpus_per_worker: 1,
            transport: self.transport,
            coordination: ScheduleRules::default().coordination(),
            policy: Policy::Assigned(assigned),
            arrivals: vec![arrival],
            profiles: self.profiles.clone(),
        };
        let finished = Simulation::new(inputs, &Random::new(seed))?.next_finished()?;
        Ok(finished.map_or(Picos::ZERO, |finished| finished.finished))
    }

    /// Begins a run.
    ///
    /// # Errors
    /// If a job can never start.
    pub fn begin(&self, seed: u64) -> Result<Simulation, RunError> {
        let inputs = Inputs {
            topology: self.topology.clone(),
            gpus_per_worker: self.gpus_per_worker,
            transport: self.transport,
            coordination: self.schedule.coordination(),
            policy: self.policy.clone(),
            arrivals: self.arrivals.clone(),
            profiles: self.profiles.clone(),
        };
        Simulation::new(inputs, &Random::new(seed))
    }
}
