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
    /// Datagrams.
    pub datagrams: Traffic,
    /// Bytes in those datagrams.
    pub bytes: Traffic,
    /// Events of all jobs, including those that have ended, and datagrams that belong to no job.
    pub events: EventCounts,
    /// Messages that the kernel dropped because the receive buffer was full.
    pub kernel_drops: u64,
    /// Messages that the kernel refused to send, or had no room for over too long a time. They are
    /// also counted as sent.
    pub send_failures: u64,
    /// Packet buffers.
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
        let Self { datagrams, bytes, events, kernel_drops, send_failures, buffers } = self;
        let EventCounts { folds, duplicates, fragments_again, asks, rejects } = events;
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
