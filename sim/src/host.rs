//! The hosts of a simulated network.

use racksum_proto::ids::Rank;

/// A host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// Of one rank of one job.
    Worker {
        /// The job's place in the plan.
        job: usize,
        /// The rank.
        rank: Rank,
    },
    /// Of one shard, for all jobs.
    Shard(u8),
}
