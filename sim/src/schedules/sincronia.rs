//! CoInNetFlow's use of Sincronia: all jobs may send, with priorities in the order of BSSI.

use std::collections::BTreeMap;

use racksum_proto::schedule::{Demand, Schedule, Turn};
use serde::Deserialize;

use crate::coflow::bssi::{self, Jobs};

/// A weight of a job's next tensor. BSSI puts heavy jobs first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Weight {
    /// One, for all jobs.
    #[default]
    None,
    /// The share of the tensor that is left.
    LeftMore,
    /// The share of the tensor that is done.
    LeftLess,
    /// The distance of the tensor from the back of the model, as a share of the model.
    Layer,
    /// The time for which the job's workers have been idle.
    Idle,
}

impl Weight {
    /// Returns the weight of a demand, in units of 2^-20 of a share, or of microseconds.
    fn of(self, demand: &Demand) -> u64 {
        let share = |part: u64, whole: u64| {
            let scaled = (u128::from(part) << FRACTION_BITS).checked_div(u128::from(whole));
            u64::try_from(scaled.unwrap_or(0)).unwrap_or(u64::MAX)
        };
        match self {
            Self::None => 1 << FRACTION_BITS,
            Self::LeftMore => share(demand.left, demand.bytes),
            Self::LeftLess => share(demand.bytes.saturating_sub(demand.left), demand.bytes),
            Self::Layer => {
                share(demand.layers.saturating_sub(demand.layer).into(), demand.layers.into())
            }
            Self::Idle => demand.waited.0 / 1000,
        }
    }
}

/// A schedule in which all jobs send, and those that BSSI puts first go first in all queues.
///
/// Whenever a job asks or a chunk ends, the next tensors of all jobs are ordered anew by BSSI over
/// the ports that they use. Priorities are the places in that order, from one.
///
/// Source: Ho, *Network Optimizations for Distributed Training*, KAUST 2023, and the code of its
/// simulator.
#[derive(Debug)]
pub struct Sincronia<J> {
    weight: Weight,
    chunk_bytes: usize,
    /// The demand of jobs on ports that they do not use.
    d0: u64,
    jobs: BTreeMap<J, Job>,
    is_ordered: bool,
}

#[derive(Debug, Default)]
struct Job {
    demand: Demand,
    is_waiting: bool,
    priority: u32,
}

impl<J: Ord + Copy> Sincronia<J> {
    /// Creates a schedule without jobs whose turns are chunks of `chunk_bytes` bytes. `d0` is the
    /// demand that a job has on ports that it does not use: 1 in the study's code, by accident, and
    /// otherwise 0.
    #[must_use]
    pub const fn new(weight: Weight, chunk_bytes: usize, d0: u64) -> Self {
        Self { weight, chunk_bytes, d0, jobs: BTreeMap::new(), is_ordered: true }
    }

    /// Gives all jobs with a demand their places in the order.
    fn order(&mut self) {
        let mut jobs: Vec<&mut Job> =
            self.jobs.values_mut().filter(|job| job.demand.left > 0).collect();
        let mut ports: Vec<u32> = jobs.iter().flat_map(|job| &job.demand.ports).copied().collect();
        ports.sort_unstable();
        ports.dedup();
        let weights: Vec<u64> = jobs.iter().map(|job| self.weight.of(&job.demand)).collect();
        let mut demands = vec![0; jobs.len() * ports.len()];
        for (row, job) in demands.chunks_mut(ports.len().max(1)).zip(&jobs) {
            for port in &job.demand.ports {
                let port = ports.binary_search(port).expect("all ports are in the list");
                row[port] = job.demand.left;
            }
        }
        let rates = vec![1; ports.len()];
        let all = Jobs { weights: &weights, demands: &demands, rates: &rates, d0: self.d0 };
        for (priority, job) in (1..).zip(bssi::order(&all)) {
            jobs[job].priority = priority;
        }
        self.is_ordered = true;
    }
}

impl<J: Ord + Copy> Schedule<J> for Sincronia<J> {
    fn add(&mut self, job: J, _share: f64) {
        self.jobs.insert(job, Job::default());
    }

    fn remove(&mut self, job: J) {
        self.jobs.remove(&job);
        self.is_ordered = false;
    }

    fn demand(&mut self, job: J, demand: Demand) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.demand = demand;
            self.is_ordered = false;
        }
    }

    fn enqueue(&mut self, job: J) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.is_waiting = true;
        }
    }

    fn waiting(&self) -> usize {
        self.jobs.values().filter(|job| job.is_waiting).count()
    }

    fn next(&mut self) -> Option<Turn<J>> {
        if !self.is_ordered {
            self.order();
        }
        let waiting = self.jobs.iter_mut().filter(|(_, job)| job.is_waiting);
        let (id, job) = waiting.min_by_key(|(_, job)| job.priority)?;
        job.is_waiting = false;
        Some(Turn::new(*id, self.chunk_bytes))
    }

    fn finish(&mut self, _turn: Turn<J>) {}

    fn charge(&mut self, _job: J, _bytes: usize) {}

    fn debt(&self, _job: J) -> usize {
        0
    }

    fn priority(&self, job: J) -> u32 {
        self.jobs.get(&job).map_or(0, |job| job.priority)
    }
}

const FRACTION_BITS: u32 = 20;
