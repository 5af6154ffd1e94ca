//! Ranks that leave a stream, come back, or are lost.

use super::{GONE, Stream};
use crate::ids::Rank;

impl Stream {
    /// Notes that a rank has left: slots are no longer kept for it.
    pub(in crate::aggregator) fn handle_left(&mut self, rank: Rank) {
        if let Some(progress) = self.ranks.get_mut(rank.index()) {
            progress.acked = GONE;
        }
    }

    /// Notes the return of a rank that had left. The rank has all results of the windows that it
    /// opened before it left.
    pub(in crate::aggregator) fn handle_rejoined(&mut self, rank: Rank) {
        let progress = &mut self.ranks[rank.index()];
        progress.acked = progress.opened.min(self.resulted);
        progress.open_nacked_at = None;
        progress.flow.busy.forget();
    }

    /// Continues without a lost rank. Forgets the rank's contributions to windows that are not
    /// folded, even complete contributions. As a result, the number of ranks that a result lacks is
    /// enough to identify them.
    pub(in crate::aggregator) fn handle_gone(&mut self, rank: Rank) {
        self.handle_left(rank);
        if let Some(progress) = self.ranks.get_mut(rank.index()) {
            progress.opened = GONE;
            progress.lacking = None;
            self.occupancy.forget(rank);
            self.pool.forget(rank, self.next);
            self.update_agreed();
        }
    }
}
