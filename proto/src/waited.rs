//! The ranks that a stream waits for, as the other side last reported them. A timeout error names
//! them.

use alloc::vec::Vec;

use crate::ids::{OpId, Rank};
use crate::time::{Span, Time};
use crate::wire::MissingRanks;

/// The ranks in the last wait message. The buffer is allocated once and never grows.
#[derive(Debug)]
pub(crate) struct Waited {
    reported_at: Time,
    op: OpId,
    ranks: Vec<(Rank, Span)>,
}

impl Waited {
    pub(crate) fn new() -> Self {
        Self { reported_at: Time(0), op: OpId(0), ranks: Vec::with_capacity(MissingRanks::MAX) }
    }

    /// Records that a window of `op` waits for these ranks.
    pub(crate) fn set(&mut self, now: Time, op: OpId, ranks: MissingRanks<'_>) {
        self.reported_at = now;
        self.op = op;
        self.ranks.clear();
        self.ranks.extend(ranks.iter());
    }

    /// Forgets the ranks that `op` waits for: a result of the op has arrived, so the wait is over.
    pub(crate) fn forget(&mut self, op: OpId) {
        if self.op == op {
            self.ranks.clear();
        }
    }

    /// Forgets all ranks: the stream waits for the network, not for ranks.
    pub(crate) fn forget_all(&mut self) {
        self.ranks.clear();
    }

    /// Returns the ranks, and how long each had been silent at the time of the report. Returns an
    /// empty list if the report is too old to explain the wait.
    pub(crate) fn ranks(&self, now: Time) -> &[(Rank, Span)] {
        if now.since(self.reported_at) <= Self::FRESH { &self.ranks } else { &[] }
    }

    /// Returns the ranks and how long each has been silent by `now`.
    pub(crate) fn ranks_now(&self, now: Time) -> impl Iterator<Item = (Rank, Span)> + '_ {
        let since = now.since(self.reported_at);
        self.ranks(now).iter().map(move |(rank, silent)| {
            let left = *silent == MissingRanks::LEFT;
            (*rank, if left { *silent } else { Span(silent.0.saturating_add(since.0)) })
        })
    }

    /// The age up to which a report is valid. Each answered probe renews the report, and probes are
    /// usually far less than a second apart.
    const FRESH: Span = Span::from_secs(1);
}
