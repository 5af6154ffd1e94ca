//! An aggregator with a parent: it puts each sum into the worker half of the same protocol, as the
//! contribution of all its ranks, and hands on to them what comes of it.
//!
//! The driver has a [`Worker`](crate::worker::Worker) beside this half. For each op that
//! [`Aggregation::poll_begun`] names it starts one there; it answers what the worker wants to have
//! scanned with [`Aggregation::summed`], and sends the sum where the worker wants to send data. It
//! puts fragments of results where [`Aggregation::handle_from_parent`] says, and says how far they
//! are by [`Aggregation::handle_parent_at`]. What fails on one side is told to the other:
//! [`Aggregation::poll_failed`], [`Aggregation::has_dropped`],
//! [`Aggregation::handle_parent_failed`]. The parent is an aggregator like any other.

use super::stream::Stream;
use super::{Aggregation, Place};
use crate::descriptor::Descriptor;
use crate::ids::{OpId, Rank, WindowId};
use crate::observer::{Event, Observer};
use crate::reject::Reject;
use crate::time::{Span, Time};
use crate::wire::{Disagreement, Header, MissingRanks};
use crate::worker::Delivery;

/// An op of a tree of aggregators that failed.
///
/// A rank that hears of it at one shard drops the op at all, where others may wait for it. So the
/// other shards of the aggregator are told, by [`Aggregation::handle_failed_beside`], and unless it
/// is the parent that said so, the parent.
#[derive(Debug, Clone, Copy)]
pub struct Failed {
    /// Which.
    pub op: OpId,
    /// Who disagrees.
    pub why: Disagreement,
    /// The parent has said so.
    pub from_parent: bool,
}

impl Aggregation {
    /// The next op that some rank has begun, and what it is, of the lanes that have room for one.
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

    /// Whom the next window of a lane waits for here or below, and how long nothing was heard of
    /// each; nobody if it waits for the parent.
    pub fn awaited(&self, now: Time, lane: u8) -> impl Iterator<Item = (Rank, Span)> + '_ {
        let stream = self.streams.get(usize::from(lane)).filter(|stream| stream.is_behind());
        let ranks = stream.into_iter().flat_map(Stream::awaited);
        ranks.flat_map(move |rank| self.awaited_of(now, lane, rank, true))
    }

    /// Whom it means that a rank is waited for: the rank, or those whom it waits for below. One
    /// that has left is `missed` if something needs it.
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
            false => (self.names[rank.index()], now.since(self.heard[rank.index()])),
        });
        itself.into_iter().chain(below)
    }

    /// An aggregator says whom it waits for.
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

    /// Notes that a rank below one of these has left, which is why that one opens no more.
    pub fn handle_left_below(&mut self, rank: Rank, name: Rank) {
        // Whoever was first is the reason why others left.
        if self.left.get(rank.index()) == Some(&false) {
            self.set_name(rank, name);
            self.left[rank.index()] = true;
        }
    }

    /// Notes whom the parent waits for in a lane, and how long nothing was heard of each.
    pub fn handle_parent_waits(&mut self, lane: u8, ranks: &[(Rank, Span)]) {
        if let Some(stream) = self.streams.get_mut(usize::from(lane)) {
            stream.handle_parent_waits(ranks);
        }
    }

    /// The next op that failed, of which others are to be told.
    pub fn poll_failed(&mut self) -> Option<Failed> {
        self.failed.pop_front()
    }

    /// Fails an op that has failed at another shard of the same aggregator.
    pub fn handle_failed_beside(
        &mut self,
        op: OpId,
        why: Disagreement,
        observer: &mut impl Observer,
    ) {
        self.fail_elsewhere(op, why, observer);
    }

    /// Whether an op that has begun has no use for a result any more.
    #[must_use]
    pub fn has_dropped(&self, lane: u8, op: OpId) -> bool {
        let stream = self.streams.get(usize::from(lane));
        stream.and_then(|stream| stream.sequence.get(op)).is_none_or(|entry| entry.failed)
    }

    /// Fails an op that ranks elsewhere disagree on, as the parent says.
    pub fn handle_parent_failed(
        &mut self,
        op: OpId,
        why: Disagreement,
        observer: &mut impl Observer,
    ) {
        if self.fail_elsewhere(op, why, observer) {
            self.failed.push_back(Failed { op, why, from_parent: true });
        }
    }

    /// A rank of a rack disagrees with another of the same: their aggregator says so.
    pub(super) fn handle_failure(
        &mut self,
        header: &Header,
        body: &[u8],
        observer: &mut impl Observer,
    ) -> Result<(), Reject> {
        // wire: W-65
        let why = Disagreement::decode(body)?;
        let (op, lane, rank) = (header.window.op, header.lane, header.sender);
        self.note_reached(rank, op);
        if !self.agreement.is_past(op) {
            self.agreement.admits(op)?;
            if self.fail_elsewhere(op, why, observer) {
                self.failed.push_back(Failed { op, why, from_parent: false });
            }
        }
        // Also when it is told again: it waits for an answer.
        self.queue.note(lane, rank, |due| due.failed = Some(op));
        Ok(())
    }

    /// Returns whether that is new.
    fn fail_elsewhere(
        &mut self,
        op: OpId,
        why: Disagreement,
        observer: &mut impl Observer,
    ) -> bool {
        if self.agreement.admits(op).is_err() || !self.agreement.fail_elsewhere(op, why) {
            return false;
        }
        for stream in &mut self.streams {
            // What has all its results has not failed.
            let entry = stream.sequence.get(op);
            if entry.is_some_and(|entry| entry.end() > stream.resulted) {
                stream.sequence.fail(op);
            }
        }
        self.queue.broadcast_failure(op);
        observer.on_event(&Event::Failed { op, error: None });
        true
    }

    /// A disagreement with the names that people know the ranks by.
    pub(super) fn named(&self, disagreement: Disagreement) -> Disagreement {
        let name = |(rank, descriptor): (Rank, Descriptor)| {
            (self.names.get(rank.index()).copied().unwrap_or(rank), descriptor)
        };
        Disagreement { one: name(disagreement.one), other: name(disagreement.other) }
    }
}
