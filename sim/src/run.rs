//! The outcome of a run: how the ops of its machines ended, and the counters.

use std::collections::BTreeMap;
use std::fmt;

use racksum_proto::error::OpError;
use racksum_proto::ids::{OpId, Rank};

use crate::engine::Picos;

/// The outcome of a run.
#[derive(Debug, Clone)]
pub struct Run {
    /// A hash of the time, the sender, the size and the first header of every datagram sent. Equal
    /// traces mean equal runs.
    pub trace: u64,
    /// How each op ended at each rank.
    pub ended: BTreeMap<(Machine, OpId), Ended>,
    /// The time at which the last op ended.
    pub took: Picos,
    /// Counters of the network and the machines.
    pub totals: Totals,
}

/// How an op ended at a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The time at which the rank called the op.
    pub called: Picos,
    /// The time at which the op ended.
    pub at: Picos,
    /// A hash of the op's result, or its error.
    pub result: Result<u64, OpError>,
}

/// Counters of a run, summed over all hosts and all their lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Totals {
    /// Events that the engine scheduled.
    pub events: u64,
    /// Datagrams that hosts sent.
    pub sent: u64,
    /// Datagrams that the hosts' sockets accepted.
    pub received: u64,
    /// Datagrams lost to faults.
    pub lost: u64,
    /// Datagrams that a fault duplicated.
    pub doubled: u64,
    /// Datagrams that a fault delayed.
    pub delayed: u64,
    /// Datagrams dropped because a queue or a socket was full.
    pub dropped: u64,
    /// Datagrams that arrived with a congestion mark.
    pub marked: u64,
    /// Datagrams from strangers.
    pub foreign: u64,
    /// Windows folded.
    pub folds: u64,
    /// Fragments retransmitted by ranks and shards.
    pub again: u64,
    /// Fragments that had arrived before.
    pub duplicates: u64,
    /// Nacks that ranks sent for results, including probes, and nacks that shards sent for
    /// fragments.
    pub asks: u64,
    /// Probes: the nacks of ranks that had received nothing for a while.
    pub probes: u64,
}

impl Totals {
    /// Adds another run's counts to these.
    pub fn add(&mut self, other: &Self) {
        let Self { events, sent, received, lost, doubled, delayed, dropped, .. } = *other;
        self.events += events;
        self.sent += sent;
        self.received += received;
        self.lost += lost;
        self.doubled += doubled;
        self.delayed += delayed;
        self.dropped += dropped;
        let Self { marked, foreign, folds, again, duplicates, asks, probes, .. } = *other;
        self.marked += marked;
        self.foreign += foreign;
        self.folds += folds;
        self.again += again;
        self.duplicates += duplicates;
        self.asks += asks;
        self.probes += probes;
    }
}

/// A state machine of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Machine {
    /// A rank.
    Worker {
        /// The job's index in the plan.
        job: usize,
        /// The rank.
        rank: Rank,
    },
    /// A shard's part in a job.
    Shard {
        /// The job's index in the plan.
        job: usize,
        /// The shard.
        shard: u8,
    },
}

impl Machine {
    /// Returns the index of the machine's job in the plan.
    #[must_use]
    pub const fn job(self) -> usize {
        match self {
            Self::Worker { job, .. } | Self::Shard { job, .. } => job,
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker { job, rank } => write!(f, "rank {} of job {job}", rank.0),
            Self::Shard { job, shard } => write!(f, "shard {shard} of job {job}"),
        }
    }
}
