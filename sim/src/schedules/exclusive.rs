//! Jobs take turns in which nobody else uses their ports.

use std::collections::{BTreeMap, BTreeSet};

use racksum_proto::schedule::{Demand, Schedule, Turn};

/// A rule that chooses among the jobs that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// The job that has waited longest, even if another one's ports are free before.
    Fifo,
    /// The job that was served least of those whose ports are free.
    LeastServed,
}

/// A schedule in which turns with a port in common exclude each other.
#[derive(Debug)]
pub struct Exclusive<J> {
    rule: Rule,
    chunk_bytes: usize,
    jobs: BTreeMap<J, Job>,
    /// The ports of turns that have begun and not ended.
    used: BTreeSet<u32>,
    /// The number of calls of `enqueue`.
    enqueued: u64,
}

#[derive(Debug, Default)]
struct Job {
    ports: Vec<u32>,
    /// The place in the queue, if it waits.
    waits: Option<u64>,
    /// The ports of its turn.
    using: Vec<u32>,
    served: u64,
}

impl<J> Exclusive<J> {
    /// Creates a schedule without jobs whose turns are chunks of `chunk_bytes` bytes.
    #[must_use]
    pub const fn new(rule: Rule, chunk_bytes: usize) -> Self {
        Self { rule, chunk_bytes, jobs: BTreeMap::new(), used: BTreeSet::new(), enqueued: 0 }
    }
}

impl<J: Ord + Copy> Schedule<J> for Exclusive<J> {
    fn add(&mut self, job: J, _share: f64) {
        self.remove(job);
        self.jobs.insert(job, Job::default());
    }

    fn remove(&mut self, job: J) {
        if let Some(job) = self.jobs.remove(&job) {
            job.using.iter().for_each(|port| _ = self.used.remove(port));
        }
    }

    fn demand(&mut self, job: J, demand: Demand) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.ports = demand.ports;
        }
    }

    fn enqueue(&mut self, job: J) {
        if let Some(job) = self.jobs.get_mut(&job)
            && job.waits.is_none()
        {
            job.waits = Some(self.enqueued);
            self.enqueued += 1;
        }
    }

    fn waiting(&self) -> usize {
        self.jobs.values().filter(|job| job.waits.is_some()).count()
    }

    fn next(&mut self) -> Option<Turn<J>> {
        let is_free = |job: &Job| job.ports.iter().all(|port| !self.used.contains(port));
        let waiting = self.jobs.iter().filter(|(_, job)| job.waits.is_some());
        let (id, _) = match self.rule {
            Rule::Fifo => {
                waiting.min_by_key(|(_, job)| job.waits).filter(|(_, job)| is_free(job))?
            }
            Rule::LeastServed => waiting
                .filter(|(_, job)| is_free(job))
                .min_by_key(|(_, job)| (job.served, job.waits))?,
        };
        let id = *id;
        let job = self.jobs.get_mut(&id)?;
        job.waits = None;
        job.using.clone_from(&job.ports);
        self.used.extend(&job.using);
        Some(Turn::new(id, self.chunk_bytes))
    }

    fn finish(&mut self, turn: Turn<J>) {
        if let Some(job) = self.jobs.get_mut(&turn.job) {
            std::mem::take(&mut job.using).iter().for_each(|port| _ = self.used.remove(port));
            job.served = job.served.saturating_add(turn.spent() as u64);
        }
    }

    fn charge(&mut self, job: J, bytes: usize) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.served = job.served.saturating_add(bytes as u64);
        }
    }

    fn debt(&self, _job: J) -> usize {
        0
    }
}
