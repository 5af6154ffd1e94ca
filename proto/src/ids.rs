//! Identities, one newtype each, so that a rank is never taken for a job.

use serde::{Deserialize, Serialize};

/// The number an aggregator gives a job when its first rank joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub u32);

/// One life of a job; a restart takes a greater one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Generation(pub u32);

/// A worker's number within its job, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub u16);

/// One collective call of a job; ops are numbered in call order, from 0, the same at each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OpId(pub u32);

/// A window of an op. Ordered by op, then by place in the tensor; never reused in a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WindowId {
    /// The op.
    pub op: OpId,
    /// The window's place in the tensor, from 0, counted over all shards.
    pub index: u32,
}

impl Rank {
    /// The sender number that stands for the aggregator.
    pub const AGGREGATOR: Self = Self(u16::MAX);

    /// The rank as an index into a table of the world.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl WindowId {
    /// The window `index` of op `op`.
    #[must_use]
    pub const fn new(op: OpId, index: u32) -> Self {
        Self { op, index }
    }
}
