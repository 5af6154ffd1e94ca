//! A shard's reports: its counters, and the progress of its jobs.

use std::collections::BTreeMap;

use racksum_proto::aggregator::RankProgress;
use racksum_proto::ids::JobId;
use racksum_proto::reject::Rejects;
use racksum_proto::status::ShardStatus;
use racksum_proto::time::Span;

/// The counters of a shard.
#[derive(Debug, Clone, Default)]
pub struct ShardStats {
    /// Datagrams received and sent.
    pub datagrams: [u64; 2],
    /// Bytes received and sent.
    pub bytes: [u64; 2],
    /// Windows folded.
    pub folds: u64,
    /// Messages that the kernel dropped because the receive buffer was full.
    pub kernel_drops: u64,
    /// Messages that the kernel refused to send, or had no room for over too long a time. They are
    /// also counted as sent.
    pub send_failures: u64,
    /// Datagrams that changed nothing, by reason.
    pub rejects: Rejects,
    /// Packet buffers: total and free.
    pub buffers: [usize; 2],
}

/// The progress of the jobs of a shard.
#[derive(Debug, Default)]
pub(crate) struct ShardReport {
    pub(crate) jobs: BTreeMap<JobId, JobReport>,
}

/// The progress of a job at a shard.
#[derive(Debug)]
pub(crate) struct JobReport {
    /// How long no window has been folded, if windows are outstanding.
    pub(crate) stalled: Option<Span>,
    /// The progress of each rank.
    pub(crate) ranks: Vec<RankProgress>,
    /// Whether every rank has acknowledged all results.
    pub(crate) settled: bool,
    /// The number of sealed datagrams.
    pub(crate) sealed: u64,
}

impl ShardStats {
    /// Returns the counters in their status form, for the shard with the data socket at `addr`.
    pub(crate) fn status(&self, addr: String) -> ShardStatus {
        let Self { datagrams, bytes, folds, kernel_drops, send_failures, buffers, .. } = *self;
        let rejects = self.rejects.iter().filter(|(_, count)| *count > 0);
        let rejects = rejects.map(|(why, count)| (why.name().to_owned(), count)).collect();
        ShardStatus { addr, datagrams, bytes, folds, kernel_drops, send_failures, rejects, buffers }
    }
}
