//! An aggregator with a parent: it puts each sum into the worker half of the same protocol, as the
//! contribution of all its ranks, and hands on to them what comes of it.
//!
//! The driver has a [`Worker`](crate::worker::Worker) beside this half. For each op that
//! [`Aggregation::poll_begun`] names it starts one there; it answers what the worker wants to have
//! scanned with [`Aggregation::summed`], and sends the sum where the worker wants to send data. It
//! puts fragments of results where [`Aggregation::handle_from_parent`] says, and says how far they
//! are by [`Aggregation::handle_parent_at`].

use super::{Aggregation, Place};
use crate::descriptor::Descriptor;
use crate::ids::{OpId, WindowId};
use crate::worker::Delivery;

impl Aggregation {
    /// The next op that some rank has begun, and what it is.
    pub fn poll_begun(&mut self) -> Option<(OpId, Descriptor)> {
        (0..self.config.lanes).find_map(|lane| {
            let stream = &mut self.streams[usize::from(lane)];
            let op = stream.pop_begun()?;
            Some((op, self.agreement.descriptor(op)?))
        })
    }

    /// The blocks of a window that the ranks have contributed to, none being a sum of nothing;
    /// `None` while its sum is not there.
    #[must_use]
    pub fn summed(&self, lane: u8, window: WindowId) -> Option<u64> {
        self.streams.get(usize::from(lane))?.summed(window)
    }

    /// The slot that holds the sum of a window.
    #[must_use]
    pub fn slot_of(&self, lane: u8, window: WindowId) -> Option<u32> {
        let stream = self.streams.get(usize::from(lane))?;
        Some(stream.pool.number(stream.sequence.position(window)?))
    }

    /// Where a fragment of a result belongs that has come from the parent; `None` if nobody needs
    /// it any more.
    pub fn handle_from_parent(&mut self, delivery: &Delivery) -> Option<Place> {
        let Delivery { window, mask, len, cut, fragment, complete, .. } = *delivery;
        let lane = delivery.descriptor.lane;
        let stream = self.streams.get_mut(usize::from(lane))?;
        let slot = stream.expect_from_parent(window)?;
        if complete {
            stream.take_from_parent(window, mask);
        }
        let fragments = u8::try_from(cut.count(len)).unwrap_or(u8::MAX);
        Some(Place { lane, slot, rank: stream.parent(), fragment, fragments, cut })
    }

    /// Notes that all results of windows of a lane before `done` have come, and that windows before
    /// `low` that have none will have none.
    pub fn handle_parent_at(&mut self, lane: u8, done: WindowId, low: WindowId) {
        if let Some(stream) = self.streams.get_mut(usize::from(lane)) {
            stream.handle_parent_at(done, low);
        }
    }
}
