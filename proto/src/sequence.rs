//! The ops of one stream in order, and the stream's window positions.
//!
//! On the wire, a window is identified by its op and its place in the tensor. This identifier stays
//! unambiguous after any error. Within a stream, windows also have consecutive numbers over all
//! ops: slots and credits count these *positions*. Each side numbers its windows itself. After an
//! op fails because the descriptors differ, the numbers of the two sides may diverge, which costs
//! at most a retransmission.

use alloc::collections::VecDeque;

use crate::descriptor::Descriptor;
use crate::geometry::{Geometry, Stripe};
use crate::ids::{OpId, WindowId};

/// An op within one stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamOp {
    pub(crate) op: OpId,
    /// The position of the op's first window in this stream.
    pub(crate) base: u64,
    pub(crate) stripe: Stripe,
    pub(crate) geometry: Geometry,
    /// Whether the op failed. The positions of a failed op are skipped.
    pub(crate) failed: bool,
    /// At a worker, whether it has opened some windows of the op; unused at an aggregator.
    pub(crate) opened: bool,
}

impl StreamOp {
    /// Returns the position after the op's last window in this stream.
    pub(crate) fn end(&self) -> u64 {
        self.base + u64::from(self.stripe.len())
    }

    /// Returns the window at `position`, which must lie within the op.
    pub(crate) fn window(&self, position: u64) -> WindowId {
        debug_assert!((self.base..self.end()).contains(&position));
        // A stripe's length is a u32, so the difference fits a u32.
        let nth = u32::try_from(position - self.base).unwrap_or(u32::MAX);
        WindowId::new(self.op, self.stripe.index(nth))
    }
}

/// The unsettled ops of a stream, oldest first.
#[derive(Debug)]
pub(crate) struct Sequence {
    ops: VecDeque<StreamOp>,
    /// The position after the last op.
    end: u64,
    /// The last op that was removed from the front.
    settled: Option<OpId>,
    /// The last removed op that was opened and did not fail.
    opened: Option<OpId>,
    /// The maximum number of ops that the sequence may hold.
    capacity: usize,
}

impl Sequence {
    /// Creates an empty sequence for at most `capacity` ops, the earliest of which is `first`.
    pub(crate) fn new(capacity: usize, first: OpId) -> Self {
        let ops = VecDeque::with_capacity(capacity);
        Self { ops, end: 0, settled: first.0.checked_sub(1).map(OpId), opened: None, capacity }
    }

    /// Makes room for one more op, like [`Self::make_room_for`].
    pub(crate) fn make_room(&mut self, passed: impl Fn(&StreamOp) -> bool) -> bool {
        self.make_room_for(1, passed)
    }

    /// Makes room for `ops` more ops, and returns whether there is enough room. If necessary,
    /// removes the failed ops for which `passed` returns true, since nothing looks up their
    /// positions again. The last op stays, since the next op follows it.
    pub(crate) fn make_room_for(&mut self, ops: usize, passed: impl Fn(&StreamOp) -> bool) -> bool {
        if self.ops.len().saturating_add(ops) > self.capacity {
            let last = self.last();
            self.ops.retain(|entry| !entry.failed || Some(entry.op) == last || !passed(entry));
        }
        self.ops.len().saturating_add(ops) <= self.capacity
    }

    /// Appends an op and returns its first position. The caller must make room first.
    pub(crate) fn push(&mut self, op: OpId, descriptor: &Descriptor, stripe: Stripe) -> u64 {
        debug_assert!(self.ops.len() < self.capacity, "the caller makes room first");
        let base = self.end;
        let geometry = Geometry::new(descriptor);
        self.end += u64::from(stripe.len());
        self.ops.push_back(StreamOp { op, base, stripe, geometry, failed: false, opened: false });
        base
    }

    /// Inserts, in op order, a failed op that has no windows. The caller must make room first.
    pub(crate) fn insert_failed(&mut self, op: OpId, descriptor: &Descriptor) {
        debug_assert!(self.ops.len() < self.capacity, "the caller makes room first");
        let i = self.ops.partition_point(|entry| entry.op < op);
        let base = self.ops.get(i).map_or(self.end, |next| next.base);
        let stripe = Stripe::new(op, 0, 0, 1);
        let geometry = Geometry::new(descriptor);
        let entry = StreamOp { op, base, stripe, geometry, failed: true, opened: false };
        self.ops.insert(i, entry);
    }

    /// Returns the position after the last op.
    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Returns the last appended op, settled or not.
    pub(crate) fn last(&self) -> Option<OpId> {
        self.ops.back().map(|entry| entry.op).or(self.settled)
    }

    /// Returns whether `op`, or a later op, was settled in this stream.
    pub(crate) fn is_settled(&self, op: OpId) -> bool {
        self.settled.is_some_and(|settled| op <= settled)
    }

    /// Returns whether the sequence has reached the number of `op` and does not hold `op`: it never
    /// did, or no longer does.
    pub(crate) fn has_passed(&self, op: OpId) -> bool {
        Some(op) <= self.last() && self.get(op).is_none()
    }

    pub(crate) fn get(&self, op: OpId) -> Option<&StreamOp> {
        self.ops.binary_search_by_key(&op, |entry| entry.op).ok().map(|i| &self.ops[i])
    }

    /// Returns the last op before `op` in this stream that was opened and did not fail. The opens
    /// of a failed op may be lost, and are not sent again.
    pub(crate) fn before(&self, op: OpId) -> Option<OpId> {
        let earlier = self.ops.iter().rev().skip_while(|entry| entry.op >= op);
        let mut opened = earlier.filter(|entry| entry.opened && !entry.failed);
        opened.next().map(|entry| entry.op).or(self.opened)
    }

    /// Records that some windows of `op` were opened.
    pub(crate) fn note_opened(&mut self, op: OpId) {
        if let Ok(i) = self.ops.binary_search_by_key(&op, |entry| entry.op) {
            self.ops[i].opened = true;
        }
    }

    /// Returns the unsettled ops after `after`, oldest first, as mutable references.
    pub(crate) fn iter_after_mut(
        &mut self,
        after: Option<OpId>,
    ) -> impl Iterator<Item = &mut StreamOp> {
        self.ops.iter_mut().filter(move |entry| after.is_none_or(|after| entry.op > after))
    }

    /// Returns the unsettled ops after `after`, oldest first.
    pub(crate) fn iter_after(&self, after: Option<OpId>) -> impl Iterator<Item = &StreamOp> {
        self.ops.iter().filter(move |entry| after.is_none_or(|after| entry.op > after))
    }

    /// Returns the op that holds `position`.
    pub(crate) fn at(&self, position: u64) -> Option<&StreamOp> {
        let i = self.ops.partition_point(|entry| entry.end() <= position);
        self.ops.get(i).filter(|entry| entry.base <= position)
    }

    /// Returns the position of `window`, if it is an unsettled window of this stream.
    pub(crate) fn position(&self, window: WindowId) -> Option<u64> {
        let entry = self.get(window.op)?;
        Some(entry.base + u64::from(entry.stripe.nth(window.index)?))
    }

    /// Returns the first position that is not before `window`.
    pub(crate) fn position_from(&self, window: WindowId) -> u64 {
        let i = self.ops.partition_point(|entry| entry.op < window.op);
        match self.ops.get(i) {
            Some(entry) if entry.op == window.op => {
                entry.base + u64::from(entry.stripe.before(window.index))
            }
            Some(entry) => entry.base,
            None => self.end,
        }
    }

    /// Returns the window at `position`; past the end, returns the first window of the next op.
    pub(crate) fn window(&self, position: u64) -> WindowId {
        self.at(position).map_or_else(
            || WindowId::new(OpId(self.last().map_or(0, |op| op.0.saturating_add(1))), 0),
            |entry| entry.window(position),
        )
    }

    /// Returns the earliest window that can follow the op before `op`.
    pub(crate) fn after_previous(&self, op: OpId) -> WindowId {
        let i = self.ops.partition_point(|entry| entry.op < op);
        let previous = i.checked_sub(1).map(|i| self.ops[i].op).or(self.settled);
        WindowId::new(OpId(previous.map_or(0, |op| op.0.saturating_add(1))), 0)
    }

    /// Marks an op as failed. Returns whether the op is in this stream.
    pub(crate) fn fail(&mut self, op: OpId) -> bool {
        let found = self.ops.binary_search_by_key(&op, |entry| entry.op);
        found.is_ok_and(|i| {
            self.ops[i].failed = true;
            true
        })
    }

    /// Returns whether any op has failed. The positions of a failed op are skipped.
    pub(crate) fn has_failed(&self) -> bool {
        self.ops.iter().any(|entry| entry.failed)
    }

    /// Marks the ops before `op` as failed if they have positions at or after `from`.
    pub(crate) fn fail_before(&mut self, op: OpId, from: u64) {
        for entry in self.ops.iter_mut().take_while(|entry| entry.op < op) {
            entry.failed |= entry.end() > from;
        }
    }

    /// Removes and returns the oldest op if all its positions are before `position`.
    pub(crate) fn settle_before(&mut self, position: u64) -> Option<StreamOp> {
        self.ops.front().filter(|entry| entry.end() <= position)?;
        let entry = self.ops.pop_front()?;
        self.settled = Some(entry.op);
        if entry.opened && !entry.failed {
            self.opened = Some(entry.op);
        }
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn push(sequence: &mut Sequence, op: u32, windows: u32) -> u64 {
        let descriptor = Descriptor::sum(1, DType::F32);
        sequence.push(OpId(op), &descriptor, Stripe::new(OpId(op), windows, 0, 1))
    }

    #[test]
    fn positions_run_on_over_ops() {
        let mut sequence = Sequence::new(4, OpId(0));
        assert_eq!(push(&mut sequence, 3, 5), 0);
        assert_eq!(push(&mut sequence, 7, 2), 5);
        let window = |op, index| WindowId::new(OpId(op), index);
        assert_eq!(sequence.position(window(7, 1)), Some(6));
        assert_eq!(sequence.position(window(7, 2)), None);
        assert_eq!(sequence.window(6), window(7, 1));
        assert_eq!(sequence.window(7), window(8, 0));
        assert_eq!(sequence.position_from(window(4, 9)), 5);
        assert_eq!(sequence.position_from(window(3, 2)), 2);
        assert_eq!(sequence.position_from(window(9, 0)), 7);
        assert_eq!(sequence.before(OpId(7)), None);
        sequence.note_opened(OpId(3));
        assert_eq!(sequence.before(OpId(7)), Some(OpId(3)));
    }

    #[test]
    fn ops_settle_in_order_once_they_are_passed() {
        let mut sequence = Sequence::new(4, OpId(0));
        push(&mut sequence, 0, 2);
        push(&mut sequence, 1, 2);
        sequence.note_opened(OpId(0));
        assert!(sequence.settle_before(1).is_none());
        assert_eq!(sequence.settle_before(3).map(|entry| entry.op), Some(OpId(0)));
        assert!(sequence.settle_before(3).is_none());
        assert!(sequence.is_settled(OpId(0)) && !sequence.is_settled(OpId(1)));
        assert_eq!(sequence.before(OpId(1)), Some(OpId(0)));
    }

    #[test]
    fn failed_ops_make_room_and_no_others() {
        let mut sequence = Sequence::new(3, OpId(0));
        let passed = |failed: &StreamOp| failed.end() <= 3;
        for op in 0..3 {
            assert!(sequence.make_room(passed));
            push(&mut sequence, op, 1);
        }
        assert!(!sequence.make_room(passed));
        sequence.fail(OpId(1));
        sequence.fail(OpId(2));
        assert!(sequence.make_room(passed));
        assert!(sequence.get(OpId(1)).is_none());
        assert!(sequence.get(OpId(2)).is_some(), "the last op stays, although it failed");
        assert_eq!(push(&mut sequence, 3, 1), 3);
        sequence.fail(OpId(3));
        assert!(sequence.make_room(passed), "op 2 is no longer the last");
        assert_eq!(push(&mut sequence, 4, 1), 4);
        assert!(!sequence.make_room(passed), "op 3 is not passed");
        assert_eq!(sequence.position(WindowId::new(OpId(4), 0)), Some(4));
        assert_eq!(sequence.position_from(WindowId::new(OpId(1), 0)), 3);
    }

    #[test]
    fn what_is_left_unfinished_fails_and_what_is_done_does_not() {
        let mut sequence = Sequence::new(4, OpId(0));
        for op in 0..4 {
            push(&mut sequence, op, 2);
        }
        sequence.fail_before(OpId(3), 3);
        let failed = [0, 1, 2, 3].map(|op| sequence.get(OpId(op)).map(|entry| entry.failed));
        assert_eq!(failed, [false, true, true, false].map(Some));
    }
}
