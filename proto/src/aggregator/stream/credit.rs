//! Credits: how far the ranks may send.

use super::{Progress, Stream};
use crate::ids::WindowId;

impl Stream {
    /// Returns the position of the first result that some rank has not acknowledged. If all results
    /// are acknowledged, returns the position of the first window without a result. Credits count
    /// from this position.
    pub(in crate::aggregator) fn low(&self) -> u64 {
        self.folded.front().copied().unwrap_or(self.resulted)
    }

    /// Returns the credit to write into a header, and notes it as announced (wire: W-33).
    pub(in crate::aggregator) fn announce(&mut self) -> WindowId {
        self.announced = self.low();
        self.sequence.window(self.announced)
    }

    /// Returns the window of the next credit, if a credit is due and no result can carry it. All
    /// data of the windows before the returned one has arrived or is lost. A credit is due when
    /// `low` has moved by more than a quarter of the pool since it was last announced, or when
    /// enough new windows have arrived from every rank.
    pub(in crate::aggregator) fn poll_credit(&mut self) -> Option<WindowId> {
        let far = self.reported_arrived.max(self.resulted) + Self::REPORTED_WINDOWS;
        let is_due = self.low() - self.announced > self.pool.len() / 4
            || self.arrived().all(|arrived| arrived >= far);
        // If a window can be folded and its result sent, the result carries the credit. This check
        // is made last, since it may move `next` past windows that no rank owes.
        if !is_due || self.poll_ready().is_some() {
            return None;
        }
        self.reported_arrived = self.arrived().min().unwrap_or(0).max(self.resulted);
        Some(self.sequence.window(self.reported_arrived))
    }

    /// Returns, for each rank in order, the position before which all data of that rank has arrived
    /// or is lost.
    fn arrived(&self) -> impl Iterator<Item = u64> {
        self.ranks().zip(&self.ranks).map(|(rank, progress)| {
            let Progress { sent, opened, .. } = *progress;
            self.occupancy.next_of(rank, sent.max(self.next), opened).unwrap_or(opened)
        })
    }

    /// How many more windows must arrive from every rank before a credit reports them. More
    /// frequent credits would be a burden, since handling a credit costs a rank about as much as
    /// handling a window.
    const REPORTED_WINDOWS: u64 = 2;
}
