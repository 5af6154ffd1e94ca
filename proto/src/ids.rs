//! Identifiers: each is a separate newtype, so that a rank cannot be mistaken for a job.

use alloc::format;
use alloc::string::{String, ToString};

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

/// Formats ranks as a list: `3, 5, 9`. A peer may name thousands, so the list counts the ranks past
/// [`MAX_LISTED`] instead of naming them.
#[must_use]
pub fn listed(ranks: impl IntoIterator<Item = u16>) -> String {
    let (mut text, mut ranks) = (String::new(), ranks.into_iter());
    for rank in ranks.by_ref().take(MAX_LISTED) {
        text += if text.is_empty() { "" } else { ", " };
        text += &rank.to_string();
    }
    match ranks.count() {
        0 => text,
        more => text + " and " + &more.to_string() + " more",
    }
}

/// Names ranks in a sentence: `rank 3`, or `ranks 3, 5, 9`. Lists them as [`listed`] does.
#[must_use]
pub fn named(ranks: impl IntoIterator<Item = u16>) -> String {
    let mut ranks = ranks.into_iter();
    let (first, second) = (ranks.next(), ranks.next());
    let plural = if second.is_some() { "s" } else { "" };
    format!("rank{plural} {}", listed(first.into_iter().chain(second).chain(ranks)))
}

/// The maximum number of ranks that [`listed`] names.
pub const MAX_LISTED: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_names_few_ranks_and_counts_the_rest() {
        assert_eq!(listed([]), "");
        assert_eq!(listed([7]), "7");
        assert_eq!(listed([3, 5, 9]), "3, 5, 9");
        assert_eq!(named([7]), "rank 7");
        assert_eq!(named([3, 5, 9]), "ranks 3, 5, 9");
        assert!(listed(0..64).ends_with("62, 63"), "{}", listed(0..64));
        let long = listed(0..=u16::MAX);
        assert!(long.ends_with("62, 63 and 65472 more"), "{long}");
    }
}
