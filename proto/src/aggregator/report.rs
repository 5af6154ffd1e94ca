//! The progress of the ranks, to show users which ranks a job waits for.

use alloc::vec::Vec;

use super::Aggregation;
use crate::ids::{OpId, Rank};
use crate::status::Transfers;
use crate::time::{Span, Time};

/// The progress of a rank at a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankProgress {
    /// The op after the last one that the rank has opened at this shard.
    pub next_op: OpId,
    /// How many windows the rank has opened, over all lanes and ops.
    pub opened: u64,
    /// How many windows the rank has finished: it has their results, or they have no result.
    pub delivered: u64,
    /// Whether the rank still has results to acknowledge.
    pub lacks: bool,
    /// How long the rank has been silent.
    pub silent: Span,
    /// Whether the next opened window of some stream waits for this rank.
    pub behind: bool,
    /// The contributions of the rank that have arrived completely.
    pub contributed: Transfers,
    /// The results, all of which go to the rank.
    pub results: Transfers,
    /// How long the rank had windows open without their results, summed over the lanes.
    pub busy: Span,
    /// How long windows have waited for the rank's data alone, after the rank had opened them.
    pub waited: Span,
    /// The shortest measured round trip to the rank, if there is any.
    pub round_trip: Option<Span>,
}

impl Aggregation {
    /// Returns the progress of each rank. In the worst case, the cost grows with the square of the
    /// number of ranks.
    #[must_use]
    pub fn progress(&self, now: Time) -> Vec<RankProgress> {
        let waiting: Vec<_> = self.streams.iter().map(|stream| stream.backlog() > 0).collect();
        (0..self.config.world).map(|rank| self.progress_of(now, Rank(rank), &waiting)).collect()
    }

    /// Returns the progress of a rank; `waiting` says for each stream whether it has windows to
    /// fold.
    fn progress_of(&self, now: Time, rank: Rank, waiting: &[bool]) -> RankProgress {
        let mut all = RankProgress {
            next_op: self.agreement.reached(rank),
            opened: 0,
            delivered: 0,
            lacks: false,
            silent: self
                .last_received
                .get(rank.index())
                .map_or(Span::ZERO, |last_received| now.since(*last_received)),
            behind: false,
            contributed: Transfers::default(),
            results: Transfers::default(),
            busy: Span::ZERO,
            waited: Span::ZERO,
            round_trip: None,
        };
        for (stream, waiting) in self.streams.iter().zip(waiting) {
            let Some(own) = stream.ranks.get(rank.index()) else { continue };
            // Limit the positions to windows that exist: a lost rank counts as beyond all windows,
            // and a rank that left counts as having all results.
            all.opened += own.opened.min(stream.sequence.end());
            all.delivered += own.acked.min(stream.resulted);
            all.lacks |= stream.folded.back().is_some_and(|newest| own.acked <= *newest);
            all.behind |= *waiting && stream.waits_for(rank);
            all.contributed += own.flow.contributed;
            all.results += Transfers { again: own.flow.results_again, ..stream.sent };
            all.busy = Span(all.busy.0 + own.flow.busy.total(now).0);
            all.waited = Span(all.waited.0 + own.flow.waited.0);
            all.round_trip = all.round_trip.into_iter().chain(own.measured_trip()).min();
        }
        all
    }
}
