//! Identifiers: each is a separate newtype, so that a rank cannot be mistaken for a job.

use serde::{Deserialize, Serialize};

/// The number that an aggregator assigns to a job when its first rank joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub u32);

/// The number of one life of a job; each restart uses a greater number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Generation(pub u32);

/// A worker's number within its job, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub u16);

/// The number of a collective call of a job. Ops are numbered from 0 in call order, identically at
/// each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OpId(pub u32);

/// The identifier of a window. Windows are ordered by op, then by place in the tensor. No
/// identifier is reused within a generation.
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

    /// Returns the rank as an index into a table with one entry for each rank of the job.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl WindowId {
    /// Returns the identifier of window `index` of op `op`.
    #[must_use]
    pub const fn new(op: OpId, index: u32) -> Self {
        Self { op, index }
    }
}
