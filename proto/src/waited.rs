//! Whom the other side last said a stream waits for, to name them when an op times out.

use alloc::vec::Vec;

use crate::ids::{OpId, Rank};
use crate::time::{Span, Time};
use crate::wire::MissingRanks;

/// What the last wait said. Allocated at start, never grown.
#[derive(Debug)]
pub(crate) struct Waited {
    heard: Time,
    op: OpId,
    ranks: Vec<(Rank, Span)>,
}

impl Waited {
    pub(crate) fn new() -> Self {
        Self { heard: Time(0), op: OpId(0), ranks: Vec::with_capacity(MissingRanks::MAX) }
    }

    /// A window of `op` waits for these ranks.
    pub(crate) fn set(&mut self, now: Time, op: OpId, ranks: MissingRanks<'_>) {
        self.heard = now;
        self.op = op;
        self.ranks.clear();
        self.ranks.extend(ranks.iter());
    }

    /// A result of `op` has come: what was said of it holds no longer.
    pub(crate) fn forget(&mut self, op: OpId) {
        if self.op == op {
            self.ranks.clear();
        }
    }

    /// It is the network that this rank waits for.
    pub(crate) fn forget_all(&mut self) {
        self.ranks.clear();
    }

    /// The ranks, and how long each was silent; none when that was said too long ago to be
    /// the reason still.
    pub(crate) fn ranks(&self, now: Time) -> &[(Rank, Span)] {
        if now.since(self.heard) <= Self::FRESH { &self.ranks } else { &[] }
    }

    /// The same as they are now.
    pub(crate) fn ranks_now(&self, now: Time) -> impl Iterator<Item = (Rank, Span)> + '_ {
        let since = now.since(self.heard);
        self.ranks(now).iter().map(move |(rank, silent)| {
            let left = *silent == MissingRanks::LEFT;
            (*rank, if left { *silent } else { Span(silent.0.saturating_add(since.0)) })
        })
    }

    /// Many times the longest wait between two probes, each of which is answered.
    const FRESH: Span = Span::from_secs(1);
}
