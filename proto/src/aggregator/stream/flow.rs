//! Counters of each rank's transfers, and of how long the folds wait for it. They change once for
//! each window, or when a fragment is sent again.

use super::{Progress, Ready, Stream};
use crate::busy::Busy;
use crate::status::Transfers;
use crate::time::Span;

/// The counters of a rank's transfers in a stream.
#[derive(Debug, Clone, Copy)]
pub(in crate::aggregator) struct Flow {
    /// The contributions that have arrived completely.
    pub(in crate::aggregator) contributed: Transfers,
    /// The fragments of results that were sent to the rank again.
    pub(in crate::aggregator) results_again: u64,
    /// How long windows have waited for the rank's data alone, after the rank had opened them.
    pub(in crate::aggregator) waited: Span,
    /// How long the rank had windows open without their results.
    pub(in crate::aggregator) busy: Busy,
}

impl Flow {
    pub(super) const NEW: Self = Self {
        contributed: Transfers { bytes: 0, fragments: 0, again: 0 },
        results_again: 0,
        waited: Span::ZERO,
        busy: Busy::NEW,
    };
}

impl Progress {
    /// Returns the round trip if one was measured.
    pub(in crate::aggregator) fn measured_trip(&self) -> Option<Span> {
        Some(self.round_trip())
            .filter(|_| self.nack_trip.is_some() || self.acked_trip < Self::GUESS)
    }
}

impl Stream {
    /// Adds the time for which a window that is about to be folded has waited for one rank alone:
    /// since the other contributions and those of all earlier windows were complete, and the rank
    /// had opened the window. Times of different windows therefore never overlap.
    pub(super) fn note_waited(&mut self, ready: &Ready) {
        let Some(slot) = self.pool.get(ready.position) else { return };
        let Some((last, at)) = slot.last_complete else { return };
        let idle_until = self.complete_at.max(slot.others_complete_at);
        self.complete_at = self.complete_at.max(at);
        if ready.contributors < 2 {
            return;
        }
        let flow = &mut self.ranks[last.index()].flow;
        let since = idle_until.max(flow.busy.since().unwrap_or(at));
        flow.waited = Span(flow.waited.0 + at.since(since).0);
    }
}
