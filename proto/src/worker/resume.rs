//! Failover: moves a job to another aggregator, even in the middle of its ops.
//!
//! When the job moves, the sums of some windows in flight have arrived, and those of others have
//! not. If a window's sum has not arrived, the tensor still holds this rank's share. If it has
//! arrived, the share is no longer needed: a rank that has the sum sends it in place of all shares.
//! So every rank ends with the same bits as if the job had not moved. An ended op, and the driver's
//! copy of its sums, are kept as long as another rank may lack some of its results (wire: W-63).

use alloc::vec::Vec;

use super::{Config, Op, Stream, Worker};
use crate::error::OpError;
use crate::geometry::Stripe;
use crate::ids::{OpId, WindowId};
use crate::observer::Observer;
use crate::time::Time;

impl Worker {
    /// Starts to keep sums for other ranks, because the job is about to move. Sums of ops that have
    /// already started are not kept, so the job may move only once [`Self::is_ready_to_move`]
    /// returns true at every rank.
    pub fn prepare_to_move(&mut self) {
        if !core::mem::replace(&mut self.config.may_move, true) {
            self.streams.iter_mut().for_each(Stream::keep_from_now);
        }
    }

    /// Stops keeping sums for other ranks, because the move is cancelled and the rank knows no
    /// other aggregator. Ops in flight continue: what they have kept goes with them.
    pub fn stop_keeping(&mut self) {
        if core::mem::take(&mut self.config.may_move) {
            let acks_at_rest = self.config.acks_at_rest;
            self.streams.iter_mut().for_each(|stream| stream.stop_keeping(acks_at_rest));
            self.drop_ended();
        }
    }

    /// Returns whether this rank keeps every sum that another rank may lack.
    #[must_use]
    pub fn is_ready_to_move(&self) -> bool {
        // wire: W-78
        self.config.may_move && self.streams.iter().all(Stream::keeps_all)
    }

    /// Returns whether this rank keeps the sums of an op that has started.
    #[must_use]
    pub fn keeps_sums_of(&self, op: OpId) -> bool {
        self.op(op).is_some_and(|op| op.share().keeps_sums())
    }

    /// Returns the oldest op whose results some rank may lack. No rank needs earlier ops.
    #[must_use]
    pub fn first_kept(&self) -> OpId {
        self.ops.front().map_or(OpId(self.next_op), Op::id)
    }

    /// Returns whether another rank may lack results of an ended op. This rank then keeps the op.
    pub(super) fn is_kept(&self, op: &Op) -> bool {
        let lane = op.descriptor().lane;
        self.config.may_move
            && self.ended.is_none()
            && !op.has_failed()
            && self.streams.iter().any(|stream| stream.lane() == lane && stream.has(op.id()))
    }

    /// Returns the windows of an op whose non-zero sums this rank has and another rank may lack.
    /// Each item is the window's index in the tensor and the mask of its blocks.
    pub fn windows_to_keep(&self, op: OpId) -> impl Iterator<Item = (u32, u64)> + '_ {
        let op = self.op(op).filter(|op| !op.has_failed());
        let lane = op.map(|op| op.descriptor().lane);
        let streams = self.streams.iter().filter(move |stream| lane == Some(stream.lane()));
        let windows = streams.filter_map(move |stream| Some(stream.may_lack_of(op?.id())));
        windows.flatten().filter_map(move |index| {
            let share = op?.share();
            let mask = share.mask(index);
            (mask != 0 && share.holds(index)).then_some((index, mask))
        })
    }

    /// Returns whether another rank may lack the sum of a window.
    #[must_use]
    pub fn may_lack(&self, window: WindowId) -> bool {
        let Some(lane) = self.op(window.op).map(|op| op.descriptor().lane) else { return false };
        let mut streams = self.streams.iter().filter(|stream| stream.lane() == lane);
        streams.any(|stream| stream.may_lack(window))
    }

    /// Returns the earliest deadline of the ops in flight; [`Time::NEVER`] if there are none.
    #[must_use]
    pub fn deadline(&self) -> Time {
        self.ops.iter().map(Op::deadline).min().unwrap_or(Time::NEVER)
    }

    /// Ends the session because no aggregator is left to move to. `tried` holds the last error of
    /// each aggregator.
    pub fn handle_no_aggregator(&mut self, tried: &str, observer: &mut impl Observer) {
        self.fail_all(&OpError::NoAggregator { tried: tried.into() }, observer);
        self.end("no aggregator is left", observer);
    }

    /// Continues at other aggregators with the grants in `config`. `config.first_op` is the
    /// greatest [`Self::first_kept`] of all ranks. If only a part of a window's sum has arrived,
    /// the driver must first restore this rank's share of the window.
    ///
    /// # Panics
    /// Panics if this rank is not [ready to move](Self::is_ready_to_move).
    pub fn resume(&mut self, config: Config, now: Time, observer: &mut impl Observer) {
        assert!(self.is_ready_to_move(), "the job cannot move: some sums were not kept");
        self.forget_shards(observer);
        // Other ranks are done with earlier ops, so no aggregator will send their results.
        let is_late = |op: &Op| op.id() < config.first_op;
        let late = self.ops.iter().filter(|op| is_late(op) && op.is_in_flight());
        let lacking: Vec<_> = late.filter(|op| !op.is_complete()).map(Op::id).collect();
        for op in lacking {
            self.fail(op, OpError::Dropped { op }, observer);
        }
        let mut ops = core::mem::take(&mut self.ops);
        // A late op that is complete lacks only the names of lost ranks.
        ops.retain(|op| !is_late(op) || op.is_complete());
        self.config = config;
        self.moved = true;
        self.streams = config.streams(now, ops.len());
        self.paths = config.paths();
        self.turn = 0;
        self.last_received = now;
        for op in ops.iter_mut().filter(|op| !is_late(op) && !op.has_failed()) {
            op.resume();
            self.enter(now, op);
        }
        self.ops = ops;
        (0..config.lanes).for_each(|lane| self.note_scanned(lane));
    }

    /// Saves in each op the state that was recorded only for the old shards. Ends each op that has
    /// all its results, if the ranks missing from those results are known.
    fn forget_shards(&mut self, observer: &mut impl Observer) {
        let mut ops = core::mem::take(&mut self.ops);
        for op in ops.iter_mut().filter(|op| !op.has_failed()) {
            self.settle_windows(op);
            op.forget_shards(&self.paths);
        }
        self.ops = ops;
        self.conclude_all(observer);
    }

    /// After a move, skips the ops that the credit has passed: no more results will arrive for
    /// them. If such an op is still in flight at this rank, it fails.
    pub(super) fn pass_ended(&mut self, at: usize, observer: &mut impl Observer) {
        if !self.moved {
            return;
        }
        while let Some(id) = self.streams[at].acknowledged_op() {
            let Some(op) = self.op_mut(id).filter(|op| !op.has_failed()) else { return };
            if op.is_in_flight() {
                // Other ranks have passed this op without a result: they know that it failed.
                self.fail(id, OpError::Dropped { op: id }, observer);
            } else {
                op.leave_stream();
                self.streams[at].pass_op();
            }
        }
    }

    /// Records for every window of an op whether its sum has arrived. If every rank has the sum of
    /// a window, the window's mask becomes empty, since no rank needs the sum.
    fn settle_windows(&self, op: &mut Op) {
        let (shards, windows) = (self.config.shards, op.geometry().windows());
        for shard in 0..shards {
            let stripe = Stripe::new(op.id(), windows, shard, shards);
            let stream = &self.streams[self.config.stream(op.descriptor().lane, shard)];
            let (acknowledged, passed) = stream.settled_of(op.id(), &stripe);
            let share = op.share_mut();
            for nth in 0..stripe.len() {
                let index = stripe.index(nth);
                // The credit also passes windows of a failed op, whose sums no rank has.
                if nth < acknowledged && (nth < passed || share.holds(index)) {
                    share.note_held(index, 0);
                } else if nth < passed {
                    // A window without a result is zero at every rank, so its mask is 0 already.
                    share.note_held(index, share.mask(index));
                }
            }
        }
    }
}
