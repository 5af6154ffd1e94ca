//! An op in flight at a worker.

mod absent;
mod share;

use alloc::vec::Vec;

use self::absent::Absent;
pub(super) use self::share::Share;
use super::Path;
use crate::descriptor::Descriptor;
use crate::error::OpError;
use crate::geometry::Geometry;
use crate::ids::{OpId, Rank};
use crate::time::{Span, Time};

/// Whether an op has ended, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    InFlight,
    /// All results have arrived.
    Done,
    /// The op ended without all its results.
    Failed,
}

/// An op that is in flight at this rank, or may still be in flight at another rank.
#[derive(Debug)]
pub(super) struct Op {
    id: OpId,
    descriptor: Descriptor,
    geometry: Geometry,
    share: Share,
    absent: Absent,
    started: Time,
    deadline: Time,
    /// How many streams still lack results of the op.
    streams_left: u32,
    /// The error with which the op fails once all its results have arrived.
    error: Option<OpError>,
    state: State,
    /// Whether the op was in flight or kept when the job moved. If so, its opens say which sums
    /// this rank holds.
    resumed: bool,
}

impl Op {
    pub(super) fn new(
        id: OpId,
        descriptor: Descriptor,
        share: Share,
        now: Time,
        timeout: Span,
    ) -> Self {
        Self {
            id,
            geometry: Geometry::new(&descriptor),
            descriptor,
            share,
            absent: Absent::default(),
            started: now,
            deadline: now + timeout,
            streams_left: 0,
            error: None,
            state: State::InFlight,
            resumed: false,
        }
    }

    #[inline]
    pub(super) const fn id(&self) -> OpId {
        self.id
    }

    #[inline]
    pub(super) const fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    #[inline]
    pub(super) const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    #[inline]
    pub(super) const fn share(&self) -> &Share {
        &self.share
    }

    #[inline]
    pub(super) const fn share_mut(&mut self) -> &mut Share {
        &mut self.share
    }

    /// Returns whether the op has not ended.
    #[inline]
    pub(super) const fn is_in_flight(&self) -> bool {
        matches!(self.state, State::InFlight)
    }

    /// Returns whether the op ended without all its results.
    #[inline]
    pub(super) const fn has_failed(&self) -> bool {
        matches!(self.state, State::Failed)
    }

    /// Returns the time at which the op times out, or [`Time::NEVER`] if it has ended.
    pub(super) const fn deadline(&self) -> Time {
        if self.is_in_flight() { self.deadline } else { Time::NEVER }
    }

    /// Returns the time at which the op started, if the op has timed out.
    pub(super) fn late_since(&self, now: Time) -> Option<Time> {
        (self.deadline() <= now).then_some(self.started)
    }

    /// Notes that one more stream has windows of the op.
    pub(super) const fn enter_stream(&mut self) {
        self.streams_left += 1;
    }

    /// Notes that one more stream no longer needs results of the op.
    pub(super) const fn leave_stream(&mut self) {
        self.streams_left -= 1;
    }

    /// Returns whether all results have arrived and the op has not ended.
    pub(super) const fn is_complete(&self) -> bool {
        self.is_in_flight() && self.streams_left == 0
    }

    /// Notes an error with which the op fails at its end. Later errors have no effect.
    pub(super) fn note_error(&mut self, error: OpError) {
        self.error.get_or_insert(error);
    }

    /// Ends the op without all its results.
    pub(super) const fn fail(&mut self) {
        self.state = State::Failed;
    }

    /// Ends the op, which has all its results. Returns its outcome.
    pub(super) fn end(&mut self) -> Result<(), OpError> {
        self.state = State::Done;
        self.error.take().map_or(Ok(()), Err)
    }

    /// Notes that a result of a shard lacks the first `ranks` ranks that the shard's aggregator
    /// lost.
    #[inline]
    pub(super) fn note_absent(&mut self, shard: u8, ranks: usize) {
        self.absent.note(shard, ranks);
    }

    /// Returns the ranks that the results lack; `None` while any of them is unknown.
    pub(super) fn absent(&self, paths: &[Path]) -> Option<Vec<Rank>> {
        self.absent.names(paths)
    }

    /// Saves which ranks the results of the shards at `paths` lack, and forgets the shards.
    pub(super) fn forget_shards(&mut self, paths: &[Path]) {
        self.absent.forget_shards(paths);
    }

    /// Resets the op, so that it can start again at other shards.
    pub(super) const fn resume(&mut self) {
        self.resumed = true;
        self.share.restart();
        self.streams_left = 0;
    }

    /// Returns whether the op was in flight or kept when the job moved.
    #[inline]
    pub(super) const fn is_resumed(&self) -> bool {
        self.resumed
    }
}
