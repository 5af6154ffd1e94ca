//! The hosts of a simulated network.

use racksum_proto::ids::Rank;

/// A host of the simulated network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// The host of one rank of one job.
    Worker {
        /// The job's index in the plan.
        job: usize,
        /// The rank.
        rank: Rank,
    },
    /// The host of one shard, which serves all jobs.
    Shard(u8),
}
