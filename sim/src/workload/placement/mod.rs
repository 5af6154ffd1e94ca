//! Placement: which workers a job runs on.
//!
//! [`Policy::place`] is a function of the job, the free GPUs and a random number generator. It does
//! not queue: if it finds no placement, the job waits, and the caller decides whether others may
//! overtake it. CoInNetFlow's dispatcher lets none.
//!
//! The random policies are those of CoInNetFlow. [`Policy::Assigned`] follows a list, which comes
//! from its custom string or from the placer's plan.

mod assigned;
mod random;

use std::num::NonZeroU32;

use crate::random::Random;
use crate::workload::arrivals::JobNumber;

pub use assigned::{Assignments, CustomError, CustomErrorKind};

/// A worker's number in its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u32);

/// A worker with its free GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worker {
    /// The worker's number, unique in the cluster.
    pub id: WorkerId,
    /// The number of its GPUs that no job uses.
    pub free_gpus: u32,
}

/// The workers below one switch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rack {
    /// The workers.
    pub workers: Vec<Worker>,
}

/// A job's GPUs on one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// The worker.
    pub worker: WorkerId,
    /// The number of GPUs.
    pub gpus: u32,
}

/// A job's workers. The order is that of the job's ranks.
pub type Placement = Vec<Share>;

/// A way to place jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Policy {
    /// Draws GPUs at random, so that each allowed choice is equally likely.
    Random {
        /// The choices that are allowed.
        spread: Spread,
        /// Whether a job with no allowed choice falls back to the next wider spread: from several
        /// racks to one rack, to several workers, to any.
        fallback: bool,
    },
    /// Follows a list.
    Assigned(Assignments),
}

/// How far a random placement spreads. A job with one GPU goes anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Any GPUs.
    Any,
    /// At least two workers.
    Distributed,
    /// At least two workers of one rack. The rack must have more free GPUs than the job needs, and
    /// is drawn in proportion to its free GPUs.
    SingleRack,
    /// At least two racks.
    MultiRack,
}

impl Policy {
    /// Returns a placement of the job on free GPUs, or none if the job has to wait.
    ///
    /// # Errors
    /// If the job can never be placed: a list lacks it, does not give it its number of GPUs, or
    /// names a worker that does not exist.
    pub fn place(
        &self,
        job: JobNumber,
        gpus: NonZeroU32,
        racks: &[Rack],
        random: &mut Random,
    ) -> Result<Option<Placement>, PlacementError> {
        match self {
            Self::Random { spread, fallback } => {
                Ok(random::place(*spread, *fallback, gpus.get(), racks, random))
            }
            Self::Assigned(assignments) => assignments.place(job, gpus.get(), racks),
        }
    }
}

/// A reason why a job can never be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The list lacks the job.
    #[error("job {} has no placement; add it to the list", .0.0)]
    NoAssignment(JobNumber),
    /// The list gives the job another number of GPUs.
    #[error("job {} asks for {asked} GPUs, but its placement has {placed}", job.0)]
    Gpus {
        /// The job.
        job: JobNumber,
        /// The number of GPUs that it asks for.
        asked: u32,
        /// The number of GPUs in the list.
        placed: u64,
    },
    /// The list names a worker that does not exist.
    #[error("the placement of job {} has worker {}, which does not exist", job.0, worker.0)]
    UnknownWorker {
        /// The job.
        job: JobNumber,
        /// The worker.
        worker: WorkerId,
    },
}

#[cfg(test)]
mod tests;
