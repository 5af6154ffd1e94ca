//! A shard's reports: its counters, and the progress of its jobs.

use std::collections::BTreeMap;

use racksum_proto::aggregator::RankProgress;
use racksum_proto::ids::JobId;
use racksum_proto::observer::EventCounts;
use racksum_proto::status::{Buffers, ShardStatus, Traffic};
use racksum_proto::time::Span;

/// The counters of a shard.
#[derive(Debug, Clone, Default)]
pub struct ShardStats {
    /// The numbers of received and sent datagrams.
    pub datagrams: Traffic,
    /// The numbers of bytes in the received and sent datagrams.
    pub bytes: Traffic,
    /// The events of all jobs, including ended ones, and of datagrams that belong to no job.
    pub events: EventCounts,
    /// Messages that the kernel dropped because the receive buffer was full or their sender was
    /// refused.
    pub kernel_drops: u64,
    /// Messages that the kernel refused to send, or for which the send buffer stayed full too long.
    /// They also count as sent.
    pub send_failures: u64,
    /// The total number of packet buffers, and the number of free ones.
    pub buffers: Buffers,
}

/// The progress of the jobs of a shard.
#[derive(Debug, Default)]
pub(crate) struct ShardReport {
    pub(crate) jobs: BTreeMap<JobId, JobReport>,
}

/// The progress of a job at a shard.
#[derive(Debug)]
pub(crate) struct JobReport {
    /// How long windows have waited without any fold; `None` if no window waits.
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
        let Self { datagrams, bytes, events, kernel_drops, send_failures, buffers } = self;
        let EventCounts { folds, duplicates, fragments_again, asks, probes: _, rejects } = events;
        let rejects = rejects.iter().filter(|(_, count)| *count > 0);
        ShardStatus {
            addr,
            datagrams: *datagrams,
            bytes: *bytes,
            folds: *folds,
            duplicates: *duplicates,
            fragments_again: *fragments_again,
            asks: *asks,
            kernel_drops: *kernel_drops,
            send_failures: *send_failures,
            rejects: rejects.map(|(why, count)| (why.name().to_owned(), count)).collect(),
            buffers: *buffers,
        }
    }
}
