//! An aggregator with a parent. It contributes the sum of its ranks to the parent, through the
//! worker half of the same protocol, and forwards the parent's results to its ranks.
//!
//! The driver also runs a [`Worker`](crate::worker::Worker), which contributes to the parent. The
//! driver's duties are:
//!
//! - It submits each op from [`Aggregation::poll_begun`] to the worker.
//! - It answers the worker's scans with [`Aggregation::summed`], and uses the sum as the payload of
//!   the data that the worker sends.
//! - It stores fragments of results where [`Aggregation::handle_from_parent`] says, and reports the
//!   worker's progress with [`Aggregation::handle_parent_at`].
//! - It reports the failures of each half to the other: [`Aggregation::poll_failed`],
//!   [`Aggregation::has_dropped`], [`Aggregation::handle_parent_failed`].
//!
//! The parent is an aggregator like any other.

use super::stream::Stream;
use super::{Aggregation, FragmentPlace};
use crate::descriptor::Descriptor;
use crate::ids::{OpId, Rank, WindowId};
use crate::reject::Reject;
use crate::time::{Span, Time};
use crate::wire::{Header, MissingRanks};
use crate::worker::Delivery;

impl Aggregation {
    /// Returns the next op that some rank has begun, and its descriptor. Polls only lanes for which
    /// `has_room` returns true.
    pub fn poll_begun(
        &mut self,
        mut has_room: impl FnMut(u8) -> bool,
    ) -> Option<(OpId, Descriptor)> {
        (0..self.config.lanes).filter(|lane| has_room(*lane)).find_map(|lane| {
            let stream = &mut self.streams[usize::from(lane)];
            let op = stream.pop_begun()?;
            Some((op, self.agreement.descriptor(op)?))
        })
    }

    /// Returns the mask of the blocks that the ranks have contributed to a window; 0 means none.
    /// Returns `None` until the window's sum is known.
    #[must_use]
    pub fn summed(&self, lane: u8, window: WindowId) -> Option<u64> {
        self.streams.get(usize::from(lane))?.summed(window)
    }

    /// Returns the number of the slot that holds the sum of a window.
    #[must_use]
    pub fn slot_of(&self, lane: u8, window: WindowId) -> Option<u32> {
        let stream = self.streams.get(usize::from(lane))?;
        Some(stream.pool.number(stream.sequence.position(window)?))
    }

    /// Handles a fragment of a result from the parent. Returns the place where the driver stores
    /// it; `None` if no rank needs it.
    pub fn handle_from_parent(&mut self, delivery: &Delivery) -> Option<FragmentPlace> {
        let Delivery { window, mask, len, cut, fragment, complete, .. } = *delivery;
        let lane = delivery.descriptor.lane;
        let stream = self.streams.get_mut(usize::from(lane))?;
        let slot = stream.expect_from_parent(window)?;
        if complete {
            stream.take_from_parent(window, mask);
        }
        let fragments = u8::try_from(cut.count(len)).unwrap_or(u8::MAX);
        Some(FragmentPlace { lane, slot, rank: stream.parent(), fragment, fragments, cut })
    }

    /// Notes the parent's progress in a lane. All results before the window `done` have arrived. A
    /// window before `low` that has no result will not get one.
    pub fn handle_parent_at(&mut self, lane: u8, done: WindowId, low: WindowId) {
        if let Some(stream) = self.streams.get_mut(usize::from(lane)) {
            stream.handle_parent_at(done, low);
        }
    }

    /// Returns the ranks that the next window of a lane waits for, at this aggregator or at one of
    /// its children, and how long each has been silent. Returns no ranks if all opened windows are
    /// folded: the lane is then idle or waits for the parent.
    pub fn awaited(&self, now: Time, lane: u8) -> impl Iterator<Item = (Rank, Span)> + '_ {
        let stream = self.streams.get(usize::from(lane)).filter(|stream| stream.is_behind());
        let ranks = stream.into_iter().flat_map(Stream::awaited);
        ranks.flat_map(move |rank| self.awaited_of(now, lane, rank, true))
    }

    /// Returns the workers that the lane waits for at `rank`, and how long each has been silent.
    /// The workers are the rank itself or, for a child aggregator, the ranks that it last reported
    /// waiting for. If `missed` is set, a rank that has left is marked as left.
    pub(super) fn awaited_of(
        &self,
        now: Time,
        lane: u8,
        rank: Rank,
        missed: bool,
    ) -> impl Iterator<Item = (Rank, Span)> + '_ {
        let at = usize::from(lane) * self.names.len() + rank.index();
        let below = self.below.get(at).into_iter().flat_map(move |below| below.ranks_now(now));
        let mut below = below.peekable();
        let itself = below.peek().is_none().then(|| match self.left[rank.index()] && missed {
            // wire: W-61
            true => (self.names[rank.index()], MissingRanks::LEFT),
            false => (self.names[rank.index()], now.since(self.last_received[rank.index()])),
        });
        itself.into_iter().chain(below)
    }

    /// Handles a wait from a child aggregator: records the ranks that it waits for.
    pub(super) fn handle_waits_below(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
    ) -> Result<(), Reject> {
        // wire: W-66
        let ranks = MissingRanks::decode(body)?;
        let at = usize::from(header.lane) * self.names.len() + header.sender.index();
        if let Some(below) = self.below.get_mut(at) {
            below.set(now, header.window.op, ranks);
        }
        Ok(())
    }

    /// Notes that the worker `name` of the child aggregator `rank` has left. As a result, the child
    /// opens no more windows.
    pub fn handle_left_below(&mut self, rank: Rank, name: Rank) {
        // Name the first worker that left: the others leave because that worker left.
        if self.left.get(rank.index()) == Some(&false) {
            self.set_name(rank, name);
            self.left[rank.index()] = true;
        }
    }

    /// Records the ranks that the parent waits for in a lane, and how long each has been silent.
    pub fn handle_parent_waits(&mut self, lane: u8, ranks: &[(Rank, Span)]) {
        if let Some(stream) = self.streams.get_mut(usize::from(lane)) {
            stream.handle_parent_waits(ranks);
        }
    }

    /// Returns whether an op that has begun needs no more results: it has them all, or it failed.
    #[must_use]
    pub fn has_dropped(&self, lane: u8, op: OpId) -> bool {
        let stream = self.streams.get(usize::from(lane));
        stream.and_then(|stream| stream.sequence.get(op)).is_none_or(|entry| entry.failed)
    }
}
