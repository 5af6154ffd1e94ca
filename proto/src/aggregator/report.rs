//! How far the ranks are, for people who wonder what a job waits for.

use alloc::vec::Vec;

use super::Aggregation;
use crate::ids::{OpId, Rank};
use crate::time::{Span, Time};

/// How far a rank is at a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankProgress {
    /// The op after the last that it has opened here.
    pub next_op: OpId,
    /// Windows that it has opened, over all lanes and ops.
    pub opened: u64,
    /// Windows whose results it has, or that had none.
    pub delivered: u64,
    /// It has not acknowledged all results that there are.
    pub lacks: bool,
    /// How long nothing was heard of it.
    pub silent: Span,
    /// Others have opened windows, and the next of them waits for this rank.
    pub behind: bool,
}

impl Aggregation {
    /// How far each rank is. The time that it takes grows with their number, and not faster.
    #[must_use]
    pub fn progress(&self, now: Time) -> Vec<RankProgress> {
        let waiting: Vec<_> = self.streams.iter().map(|stream| stream.backlog() > 0).collect();
        (0..self.config.world).map(|rank| self.progress_of(now, Rank(rank), &waiting)).collect()
    }

    /// How far a rank is; `waiting` says of each stream whether windows of it are yet to be summed.
    fn progress_of(&self, now: Time, rank: Rank, waiting: &[bool]) -> RankProgress {
        let mut all = RankProgress {
            next_op: self.agreement.reached(rank),
            opened: 0,
            delivered: 0,
            lacks: false,
            silent: self.heard.get(rank.index()).map_or(Span::ZERO, |heard| now.since(*heard)),
            behind: false,
        };
        for (stream, waiting) in self.streams.iter().zip(waiting) {
            let Some(own) = stream.ranks.get(rank.index()) else { continue };
            // One that is gone is beyond all windows, and one that has left has all results.
            all.opened += own.opened.min(stream.sequence.end());
            all.delivered += own.acked.min(stream.resulted);
            all.lacks |= stream.folded.back().is_some_and(|newest| own.acked <= *newest);
            all.behind |= *waiting && stream.waits_for(rank);
        }
        all
    }
}
