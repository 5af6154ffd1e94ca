//! What a run came to: its machines, how their ops ended, and what was counted.

use std::collections::BTreeMap;
use std::fmt;

use racksum_proto::error::OpError;
use racksum_proto::ids::{OpId, Rank};

use crate::engine::Picos;

/// What a run came to.
#[derive(Debug, Clone)]
pub struct Run {
    /// A hash of all that was sent, when and by whom: runs with the same trace are the same.
    pub trace: u64,
    /// How each op ended at each rank.
    pub ended: BTreeMap<(Machine, OpId), Ended>,
    /// When the last op ended.
    pub took: Picos,
    /// What the network and the machines counted.
    pub totals: Totals,
}

/// How an op ended at a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// When the rank called it.
    pub called: Picos,
    /// When it ended.
    pub at: Picos,
    /// A hash of its result, or why there is none.
    pub result: Result<u64, OpError>,
}

/// What was counted in a run, over all hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Totals {
    /// Events of the engine.
    pub events: u64,
    /// Datagrams that hosts sent.
    pub sent: u64,
    /// Datagrams that hosts took.
    pub received: u64,
    /// Datagrams lost to faults.
    pub lost: u64,
    /// Datagrams that came twice.
    pub doubled: u64,
    /// Datagrams that were held up.
    pub delayed: u64,
    /// Datagrams that found a queue or a socket full.
    pub dropped: u64,
    /// Datagrams with a congestion mark.
    pub marked: u64,
    /// Datagrams of strangers.
    pub foreign: u64,
    /// Windows folded.
    pub folds: u64,
    /// Fragments sent again, by ranks and shards.
    pub again: u64,
    /// Fragments that had arrived before.
    pub duplicates: u64,
    /// Times ranks asked for results, and shards for fragments.
    pub asks: u64,
    /// Of the ranks' asks, those because nothing was heard.
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

/// One of the machines of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Machine {
    /// A rank.
    Worker {
        /// The job's place in the plan.
        job: usize,
        /// The rank.
        rank: Rank,
    },
    /// A shard's part in a job.
    Shard {
        /// The job's place in the plan.
        job: usize,
        /// The shard.
        shard: u8,
    },
}

impl Machine {
    /// The machine's job.
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
