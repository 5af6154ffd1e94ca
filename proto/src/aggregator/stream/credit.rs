//! Credits: how far the ranks may send.

use super::{Progress, Stream};
use crate::ids::WindowId;

impl Stream {
    /// Returns the lowest window that some rank has not acknowledged: the base of all credits.
    pub(in crate::aggregator) fn low(&self) -> u64 {
        self.folded.front().copied().unwrap_or(self.resulted)
    }

    /// Returns the credit to write into a header, and notes it as announced (wire: W-33).
    pub(in crate::aggregator) fn announce(&mut self) -> WindowId {
        self.announced = self.low();
        self.sequence.window(self.announced)
    }

    /// Returns the window of a credit, if one is due and no result can carry it. All data that the
    /// ranks sent before this window has arrived or is lost. A credit is due when `low` has moved
    /// by more than a quarter of the pool, or when enough new windows have arrived from every rank.
    pub(in crate::aggregator) fn poll_credit(&mut self) -> Option<WindowId> {
        let far = self.told_arrived.max(self.resulted) + Self::TOLD_WINDOWS;
        let is_due = self.low() - self.announced > self.pool.len() / 4
            || self.arrived().all(|arrived| arrived >= far);
        // The result of a window that can be folded and sent makes the credit redundant. This check
        // comes last, since it moves `next` over windows that no rank owes.
        if !is_due || self.poll_ready().is_some() {
            return None;
        }
        self.told_arrived = self.arrived().min().unwrap_or(0).max(self.resulted);
        Some(self.sequence.window(self.told_arrived))
    }

    /// Returns a position for each rank: all that the rank sent before it has arrived or is lost.
    fn arrived(&self) -> impl Iterator<Item = u64> {
        self.ranks().zip(&self.ranks).map(|(rank, progress)| {
            let Progress { sent, opened, .. } = *progress;
            self.occupancy.next_of(rank, sent.max(self.next), opened).unwrap_or(opened)
        })
    }

    /// How many more windows must arrive from every rank before a credit reports them. A credit
    /// costs each rank about as much as a window.
    const TOLD_WINDOWS: u64 = 2;
}
