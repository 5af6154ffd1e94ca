//! Results that a rank lacks: finds the fragments that may be lost, and reports the loss to
//! congestion control.

use super::{Progress, Stream};
use crate::ids::Rank;
use crate::time::Time;

impl Stream {
    /// Notes that `rank` lacks `len` bytes of the result at `position`. Every rank gets every
    /// result, so the slowest path sets the pace. Congestion control therefore considers the
    /// largest loss at any one rank, not the total over all ranks. Each result counts once per
    /// rank, because the loss of a retransmission proves nothing new about the path.
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

    /// Returns the fragments of `wanted` that may be lost: all except those that were sent to
    /// `rank` again less than a round trip ago.
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

    /// Notes that fragments of the result at `position` are sent to `rank` again.
    pub(in crate::aggregator) fn note_again(
        &mut self,
        now: Time,
        rank: Rank,
        position: u64,
        fragments: u64,
    ) {
        let progress = &mut self.ranks[rank.index()];
        let again =
            fragments & self.pool.get(position).map_or(0, |slot| slot.cut.all(slot.result_len));
        progress.flow.results_again += u64::from(again.count_ones());
        let round_trip = progress.round_trip();
        self.pool.contribution_mut(position, rank).again.note(fragments, now, round_trip);
    }
}
