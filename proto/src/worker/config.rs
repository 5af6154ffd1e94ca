//! The configuration of a worker, as granted at join.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;

use super::Path;
use super::stream::Stream;
use crate::congestion::Congestion;
use crate::geometry::{Fragmentation, WINDOW_BYTES};
use crate::ids::{Generation, JobId, OpId, Rank};
use crate::rtt::Rtt;
use crate::status::Transfers;
use crate::time::{Span, Time};

/// The configuration and the resources granted to a rank at join.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// The job's number.
    pub job: JobId,
    /// The job's generation.
    pub generation: Generation,
    /// This worker's number.
    pub rank: Rank,
    /// How many lanes the job has.
    pub lanes: u8,
    /// How many shards the job's windows are spread over.
    pub shards: u8,
    /// The number of slots in each stream's pool.
    pub pool_slots: u32,
    /// How many ops may be in flight.
    pub max_ops: u16,
    /// How windows are cut into datagrams.
    pub cut: Fragmentation,
    /// The maximum bytes in flight to a shard: the rank's share of the shard's receive buffer.
    pub in_flight: usize,
    /// The first op that the aggregator accepts; 0 unless the job has moved to this aggregator.
    pub first_op: OpId,
    /// Whether the job may move to another aggregator. If so, this rank keeps sums for other ranks.
    pub may_move: bool,
    /// Whether some rank keeps sums until all ranks have them. If so, this rank acknowledges
    /// results even while it awaits no result.
    pub acks_at_rest: bool,
    /// The source of the worker's contributions, if the worker belongs to an aggregator with a
    /// parent.
    pub child: Option<ChildShard>,
}

/// The shard of a child aggregator whose sums a worker contributes to the parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChildShard {
    /// The shard's number. The worker sends only to the parent's shard of the same number.
    pub shard: u8,
    /// How many slots each of the aggregator's own streams has. The slots limit how far sums run
    /// ahead of the results.
    pub slots: u32,
}

impl Config {
    /// Returns the shards that the worker sends to.
    pub(super) fn own_shards(&self) -> Range<u8> {
        self.child.map_or(0..self.shards, |ChildShard { shard, .. }| shard..shard + 1)
    }

    /// Returns new streams, each with room for at least `kept_ops` ops.
    pub(super) fn streams(&self, now: Time, kept_ops: usize) -> Box<[Stream]> {
        let streams = (0..self.lanes)
            .flat_map(|lane| (0..self.shards).map(move |shard| (lane, shard)))
            .map(|(lane, shard)| Stream::new(lane, shard, self, kept_ops, now))
            .collect::<Vec<_>>();
        streams.into()
    }

    pub(super) fn paths(&self) -> Box<[Path]> {
        let max = self.in_flight.min(self.pool_slots as usize * WINDOW_BYTES);
        let path = || Path {
            job: self.job,
            congestion: Congestion::new(Congestion::LEAST, max),
            rtt: Rtt::new(Span::from_millis(2)),
            nacks: Rtt::new(Span::from_millis(1)),
            gone: Vec::new(),
            sent: Transfers::default(),
            results: Transfers::default(),
        };
        (0..self.shards).map(|_| path()).collect()
    }

    /// Returns the index of a stream in the table of streams.
    pub(super) fn stream(&self, lane: u8, shard: u8) -> usize {
        usize::from(lane) * usize::from(self.shards) + usize::from(shard)
    }
}
