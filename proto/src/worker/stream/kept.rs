//! The state of a stream that matters when the job moves: the sums that other ranks may lack, and
//! the ops that all ranks have ended.

use super::Stream;
use crate::geometry::Stripe;
use crate::ids::{OpId, WindowId};

impl Stream {
    /// Returns the first window whose result may be missing, and the lowest window that some rank
    /// has not acknowledged.
    pub(in crate::worker) fn reached(&self) -> (WindowId, WindowId) {
        let ops = self.progress.ops();
        (ops.window(self.progress.cursor()), ops.window(self.progress.low()))
    }

    /// Starts to keep sums for other ranks, from the next op on.
    pub(in crate::worker) fn keep_from_now(&mut self) {
        self.keeps = true;
        self.keeps_from = self.progress.ops().end();
        self.acks.set_at_rest(true);
    }

    /// Returns whether every rank has acknowledged all sums that this rank does not keep.
    pub(in crate::worker) const fn keeps_all(&self) -> bool {
        self.progress.low() >= self.keeps_from
    }

    /// Stops keeping sums because the job does not move. `acks_at_rest` says whether other ranks
    /// still keep some.
    pub(in crate::worker) const fn stop_keeping(&mut self, acks_at_rest: bool) {
        self.forget_kept();
        self.acks.set_at_rest(acks_at_rest);
    }

    /// Stops keeping sums for other ranks.
    pub(in crate::worker) const fn forget_kept(&mut self) {
        self.keeps = false;
    }

    /// Returns whether this rank or another may lack results of an op.
    pub(in crate::worker) fn has(&self, op: OpId) -> bool {
        self.progress.ops().get(op).is_some()
    }

    /// Returns whether another rank may lack the sum of a window.
    pub(in crate::worker) fn may_lack(&self, window: WindowId) -> bool {
        let position = self.progress.ops().position(window);
        position.is_some_and(|position| position >= self.progress.low())
    }

    /// Returns the tensor indices of an op's windows whose sums another rank may lack.
    pub(in crate::worker) fn may_lack_of(&self, op: OpId) -> impl Iterator<Item = u32> + use<> {
        let (entry, low) = (self.progress.ops().get(op).copied(), self.progress.low());
        entry.into_iter().flat_map(move |entry| {
            (entry.base.max(low)..entry.end()).map(move |position| entry.window(position).index)
        })
    }

    /// Returns two counts of an op's windows: those that every rank has acknowledged, and those
    /// that no longer need a result at this rank. If the op is settled, both counts include all its
    /// windows.
    pub(in crate::worker) fn settled_of(&self, op: OpId, stripe: &Stripe) -> (u32, u32) {
        let Some(entry) = self.progress.ops().get(op) else { return (stripe.len(), stripe.len()) };
        let before =
            |position: u64| u32::try_from(position.saturating_sub(entry.base)).unwrap_or(u32::MAX);
        (before(self.progress.low()), before(self.progress.cursor()))
    }

    /// Returns the op at the cursor, if every rank has acknowledged all of it.
    pub(in crate::worker) fn acknowledged_op(&self) -> Option<OpId> {
        let entry = self.progress.ops().at(self.progress.cursor())?;
        (entry.end() <= self.progress.low()).then_some(entry.op)
    }

    /// Skips the op at the cursor: its windows need no results and no opens.
    pub(in crate::worker) fn pass_op(&mut self) {
        if let Some(end) = self.progress.ops().at(self.progress.cursor()).map(|entry| entry.end()) {
            self.progress.pass(end);
            self.results.pass(self.progress.cursor());
        }
    }
}
