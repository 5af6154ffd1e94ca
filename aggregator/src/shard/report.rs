//! What a shard says of itself: what it has counted, and how far its jobs are.

use std::collections::BTreeMap;

use racksum_proto::aggregator::RankProgress;
use racksum_proto::ids::JobId;
use racksum_proto::reject::Rejects;
use racksum_proto::status::ShardStatus;
use racksum_proto::time::Span;

/// What a shard has counted.
#[derive(Debug, Clone, Default)]
pub struct ShardStats {
    /// Datagrams received and sent.
    pub datagrams: [u64; 2],
    /// Bytes of them.
    pub bytes: [u64; 2],
    /// Windows folded.
    pub folds: u64,
    /// Messages that the kernel dropped because the receive buffer was full.
    pub kernel_drops: u64,
    /// Messages that the kernel refused to send, or had no room for too long; they are in what was
    /// sent all the same.
    pub send_failures: u64,
    /// Datagrams that changed nothing, by reason.
    pub rejects: Rejects,
    /// Packet buffers in all, and free.
    pub buffers: [usize; 2],
}

/// How far the jobs of a shard are.
#[derive(Debug, Default)]
pub(crate) struct ShardReport {
    pub(crate) jobs: BTreeMap<JobId, JobReport>,
}

/// How far a job is at a shard.
#[derive(Debug)]
pub(crate) struct JobReport {
    /// How long no window was folded, if some are to be.
    pub(crate) stalled: Option<Span>,
    /// By rank.
    pub(crate) ranks: Vec<RankProgress>,
    /// Every rank has acknowledged all results.
    pub(crate) settled: bool,
    /// Datagrams sealed.
    pub(crate) sealed: u64,
}

impl ShardStats {
    /// Returns the counts as they are shown, of the shard whose data socket is at `addr`.
    pub(crate) fn status(&self, addr: String) -> ShardStatus {
        let Self { datagrams, bytes, folds, kernel_drops, send_failures, buffers, .. } = *self;
        let rejects = self.rejects.iter().filter(|(_, count)| *count > 0);
        let rejects = rejects.map(|(why, count)| (why.name().to_owned(), count)).collect();
        ShardStatus { addr, datagrams, bytes, folds, kernel_drops, send_failures, rejects, buffers }
    }
}
