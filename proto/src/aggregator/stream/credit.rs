//! What ranks are told of how far they may send.

use super::{Progress, Stream};
use crate::ids::WindowId;

impl Stream {
    /// The lowest window that some rank has not acknowledged: the base of all credits.
    pub(in crate::aggregator) fn low(&self) -> u64 {
        self.folded.front().copied().unwrap_or(self.resulted)
    }

    /// The credit to write into a header (wire: W-33).
    pub(in crate::aggregator) fn announce(&mut self) -> WindowId {
        self.announced = self.low();
        self.sequence.window(self.announced)
    }

    /// What the ranks should be told although there is no result to tell them with: of credits, or
    /// that all they sent before a window has left the path. A result says so itself.
    pub(in crate::aggregator) fn poll_credit(&mut self) -> Option<WindowId> {
        let far = self.told_arrived.max(self.resulted) + Self::TOLD_WINDOWS;
        let is_due = self.low() - self.announced > self.pool.len() / 4
            || self.arrived().all(|arrived| arrived >= far);
        // The result of a window that can be folded and sent says as much. Looked for last, since
        // it moves on over windows that nobody owes.
        if !is_due || self.poll_ready().is_some() {
            return None;
        }
        self.told_arrived = self.arrived().min().unwrap_or(0).max(self.resulted);
        Some(self.sequence.window(self.told_arrived))
    }

    /// For each rank, what it sent of the windows before this has arrived, or is lost.
    fn arrived(&self) -> impl Iterator<Item = u64> {
        self.ranks().zip(&self.ranks).map(|(rank, progress)| {
            let Progress { sent, opened, .. } = *progress;
            self.occupancy.next_of(rank, sent.max(self.next), opened).unwrap_or(opened)
        })
    }

    /// Windows more than were told that arrive from every rank before it is told: a credit costs
    /// each rank about what a window costs.
    const TOLD_WINDOWS: u64 = 2;
}
