//! A stream whose sums go to a parent. A sum that this aggregator folds is one contribution at the
//! parent, and the parent's result becomes the result for this aggregator's ranks.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::{Ready, Stream};
use crate::ids::{OpId, Rank, WindowId};
use crate::time::Span;
use crate::wire::Header;

/// The parent's progress in a stream.
#[derive(Debug)]
pub(in crate::aggregator) struct ParentProgress {
    /// Positions of the windows whose results have arrived, in order, each with the mask of its
    /// blocks.
    results: VecDeque<(u64, u64)>,
    /// The position before which all results have arrived.
    done: u64,
    /// The last op that the driver has begun at the parent.
    begun: Option<OpId>,
    /// The ranks that the parent waits for, and how long each has been silent.
    waits: Vec<(Rank, Span)>,
}

impl ParentProgress {
    pub(super) fn new(slots: usize) -> Self {
        Self { results: VecDeque::with_capacity(slots), done: 0, begun: None, waits: Vec::new() }
    }
}

impl Stream {
    /// Returns the rank number under which the pool stores the parent's results.
    pub(in crate::aggregator) fn parent(&self) -> Rank {
        Rank(u16::try_from(self.ranks.len()).unwrap_or(u16::MAX))
    }

    /// Returns the next op that some rank has begun but the driver has not, and notes it as begun.
    pub(in crate::aggregator) fn pop_begun(&mut self) -> Option<OpId> {
        let parent = self.at_parent.as_mut()?;
        let op = self.sequence.iter_after(parent.begun).find(|entry| !entry.failed)?.op;
        parent.begun = Some(op);
        Some(op)
    }

    /// Records the ranks that the parent waits for.
    pub(in crate::aggregator) fn handle_parent_waits(&mut self, ranks: &[(Rank, Span)]) {
        if let Some(parent) = &mut self.at_parent {
            parent.waits.clear();
            parent.waits.extend_from_slice(ranks);
        }
    }

    /// Returns whether some rank has opened windows that are not folded yet.
    pub(in crate::aggregator) fn is_behind(&self) -> bool {
        self.backlog() > 0
    }

    /// Returns the ranks that the parent waits for, if this stream waits for the parent.
    pub(in crate::aggregator) fn awaited_at_parent(&self) -> &[(Rank, Span)] {
        match &self.at_parent {
            Some(parent) if self.resulted < self.next => &parent.waits,
            _ => &[],
        }
    }

    /// Returns the mask of the blocks that this aggregator's ranks have contributed to a window; 0
    /// means none. Returns `None` until the window is folded.
    pub(in crate::aggregator) fn summed(&self, window: WindowId) -> Option<u64> {
        // wire: W-64
        let entry = self.sequence.get(window.op)?;
        let position = self.sequence.position(window)?;
        // `next` also moves past windows of failed ops, but those have no sum.
        let is_known = position < self.next && !entry.failed;
        is_known.then(|| self.pool.get(position).map_or(0, |slot| slot.union))
    }

    /// Notes that the result of a window has arrived from the parent, with the blocks `mask`. The
    /// caller has claimed the window's slot with [`Self::expect_from_parent`].
    pub(in crate::aggregator) fn take_from_parent(&mut self, window: WindowId, mask: u64) {
        let rank = self.parent();
        let Self { sequence, pool, at_parent: Some(parent), .. } = self else { return };
        let Some(position) = sequence.position(window) else { return };
        pool.contribution_mut(position, rank).mask = mask;
        let at = parent.results.partition_point(|(earlier, _)| *earlier < position);
        parent.results.insert(at, (position, mask));
    }

    /// Claims and returns the slot for a window's result from the parent; `None` if no result is
    /// needed.
    pub(in crate::aggregator) fn expect_from_parent(&mut self, window: WindowId) -> Option<u32> {
        let position = self.sequence.position(window)?;
        let entry = self.sequence.at(position)?;
        if entry.failed || !(self.resulted..self.next).contains(&position) {
            return None;
        }
        self.pool.claim(position);
        Some(self.pool.number(position))
    }

    /// Notes the parent's progress. All results before the window `done` have arrived. A window
    /// before `low` that has no result will not get one.
    pub(in crate::aggregator) fn handle_parent_at(&mut self, done: WindowId, low: WindowId) {
        let done = self.sequence.position_from(done);
        let low = self.sequence.position_from(low).min(self.next);
        let Some(parent) = &mut self.at_parent else { return };
        parent.done = parent.done.max(done);
        self.skip_without_results();
        let waits = self.at_parent.as_ref().is_some_and(|parent| !parent.results.is_empty());
        // Stop before the op's last window. It always has a result, unless the op failed, in which
        // case the parent reports the failure.
        let last = self.sequence.at(self.resulted).map_or(low, |entry| entry.end() - 1);
        if !waits {
            self.resulted = self.resulted.max(low.min(last));
        }
    }

    /// Advances the end of the results to `end`, past windows of failed ops, which have no results.
    pub(super) fn pass_results(&mut self, end: u64) {
        self.previous = Header::NO_PREVIOUS;
        self.results_end = end;
        self.resulted = end;
    }

    /// Advances the end of the results past failed ops.
    fn skip_without_results(&mut self) {
        while let Some(entry) = self.sequence.at(self.resulted).filter(|entry| entry.failed) {
            let (base, end) = (entry.base, entry.end());
            self.pass_results(end);
            if let Some(parent) = &mut self.at_parent {
                parent.results.retain(|(position, _)| !(base..end).contains(position));
            }
        }
    }

    /// Returns the next result from the parent, if congestion control admits its bytes.
    pub(super) fn poll_from_parent(&mut self) -> Option<Ready> {
        self.at_parent.as_ref()?;
        self.skip_without_results();
        let parent = self.at_parent.as_ref()?;
        let (position, union) = *parent.results.front().filter(|(at, _)| *at < parent.done)?;
        let entry = *self.sequence.at(position)?;
        let len = entry.geometry.payload_len(entry.window(position).index, union);
        let whole = Some(self.parent());
        self.results.admits(len).then_some(Ready { position, entry, union, contributors: 1, whole })
    }

    /// Removes the parent's next result from the queue, and records it in its slot as the result
    /// for the ranks.
    pub(super) fn pass_from_parent(&mut self, ready: &Ready) {
        if let Some(parent) = &mut self.at_parent {
            parent.results.pop_front();
        }
        if self.resulted < ready.entry.base {
            // An earlier op has failed at the parent, and the failure has not reached this stream
            // yet.
            self.pass_results(ready.entry.base);
        }
        self.keep(ready);
    }
}
