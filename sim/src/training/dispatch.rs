//! Which job starts next, and on which workers: first in, first out, without overtaking.

use std::collections::VecDeque;

use crate::random::Random;
use crate::workload::arrivals::Arrival;
use crate::workload::placement::{Placement, PlacementError, Policy, Rack, Worker};

/// The jobs that wait, and the GPUs that are free.
#[derive(Debug)]
pub struct Dispatcher {
    policy: Policy,
    racks: Vec<Rack>,
    waiting: VecDeque<Arrival>,
    running: usize,
    random: Random,
}

/// A reason why a job cannot start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DispatchError {
    /// The job has no placement.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The job does not even fit into the empty cluster.
    #[error("job {job} asks for {gpus} GPUs, for which the empty cluster has no placement")]
    TooLarge {
        /// The job.
        job: u64,
        /// The number of GPUs that it asks for.
        gpus: u32,
    },
}

impl Dispatcher {
    /// Creates a dispatcher of a cluster whose GPUs are all free.
    #[must_use]
    pub const fn new(policy: Policy, racks: Vec<Rack>, random: Random) -> Self {
        Self { policy, racks, waiting: VecDeque::new(), running: 0, random }
    }

    /// Adds a job behind those that wait.
    pub fn submit(&mut self, arrival: Arrival) {
        self.waiting.push_back(arrival);
    }

    /// Starts the first job that waits, if it fits.
    ///
    /// # Errors
    /// If the job can never start.
    pub fn start_next(&mut self) -> Result<Option<(Arrival, Placement)>, DispatchError> {
        let Some(first) = self.waiting.front() else { return Ok(None) };
        let (job, gpus) = (first.job, first.gpus);
        let placement = self.policy.place(job, gpus, &self.racks, &mut self.random)?;
        let Some(placement) = placement else {
            let (job, gpus) = (job.0, gpus.get());
            let is_too_large = self.running == 0;
            return if is_too_large {
                Err(DispatchError::TooLarge { job, gpus })
            } else {
                Ok(None)
            };
        };
        self.change(&placement, |worker, gpus| worker.free_gpus -= gpus);
        self.running += 1;
        Ok(self.waiting.pop_front().map(|arrival| (arrival, placement)))
    }

    /// Frees the GPUs of a job that has finished.
    pub fn free(&mut self, placement: &Placement) {
        self.change(placement, |worker, gpus| worker.free_gpus += gpus);
        self.running -= 1;
    }

    fn change(&mut self, placement: &Placement, change: impl Fn(&mut Worker, u32)) {
        for worker in self.racks.iter_mut().flat_map(|rack| &mut rack.workers) {
            if let Some(share) = placement.iter().find(|share| share.worker == worker.id) {
                change(worker, share.gpus);
            }
        }
    }
}
