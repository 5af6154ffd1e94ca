//! Results that a rank lacks: what may be lost of them, and what that says about the path.

use super::{Progress, Stream};
use crate::ids::Rank;
use crate::time::Time;

impl Stream {
    /// Notes that `rank` lacks `len` bytes of the result at `position`. Every rank gets every
    /// result, and the slowest way sets the pace: what counts is the most that one rank lost, not
    /// what all lost together; and an answer that is lost says no more than its question did.
    pub(in crate::aggregator) fn note_result_lost(
        &mut self,
        rank: Rank,
        position: u64,
        len: usize,
    ) {
        let round = self.results.round();
        let Progress { lost: (of_round, lost), counted, .. } = &mut self.ranks[rank.index()];
        if position < *counted {
            return;
        }
        *counted = position + 1;
        if *of_round != round {
            (*of_round, *lost) = (round, 0);
        }
        *lost += len;
        self.results.on_lost_in_round(*lost);
    }

    /// What of a result that `rank` asks for may be lost: all but what was sent to it again less
    /// than a round trip ago.
    pub(in crate::aggregator) fn may_be_lost(
        &self,
        now: Time,
        rank: Rank,
        position: u64,
        wanted: u64,
    ) -> u64 {
        let round_trip = self.ranks[rank.index()].round_trip();
        self.pool.contribution(position, rank).again.may_be_lost(wanted, now, round_trip)
    }

    /// Notes that fragments of the result at `position` go to `rank` again.
    pub(in crate::aggregator) fn note_again(
        &mut self,
        now: Time,
        rank: Rank,
        position: u64,
        fragments: u64,
    ) {
        let round_trip = self.ranks[rank.index()].round_trip();
        self.pool.contribution_mut(position, rank).again.note(fragments, now, round_trip);
    }
}
