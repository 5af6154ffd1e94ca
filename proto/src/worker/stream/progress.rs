//! The progress of a stream through the windows of its ops.

use core::ops::Range;

use crate::descriptor::Descriptor;
use crate::geometry::{Geometry, Stripe};
use crate::ids::{OpId, WindowId};
use crate::sequence::{Sequence, StreamOp};

/// The ops of a stream and its positions, which only grow: `cursor <= sent <= opened <= scanned`.
#[derive(Debug)]
pub(super) struct Progress {
    ops: Sequence,
    /// The position before which the non-zero blocks of all windows are known.
    scanned: u64,
    /// The position before which opens have been sent for all windows.
    opened: u64,
    /// The position before which all non-zero windows have been sent.
    sent: u64,
    /// The lowest window that some rank has not acknowledged: the base of the credit.
    low: u64,
    /// The position before which all results have arrived.
    cursor: u64,
}

impl Progress {
    pub(super) const fn new(ops: Sequence) -> Self {
        Self { ops, scanned: 0, opened: 0, sent: 0, low: 0, cursor: 0 }
    }

    /// Returns the ops that are not settled.
    #[inline]
    pub(super) const fn ops(&self) -> &Sequence {
        &self.ops
    }

    /// Returns the position before which all results have arrived.
    #[inline]
    pub(super) const fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Returns the lowest window that some rank has not acknowledged.
    #[inline]
    pub(super) const fn low(&self) -> u64 {
        self.low
    }

    /// Returns the position before which all windows are opened.
    #[inline]
    pub(super) const fn opened(&self) -> u64 {
        self.opened
    }

    /// Returns the position before which all non-zero windows have been sent.
    #[inline]
    pub(super) const fn sent(&self) -> u64 {
        self.sent
    }

    /// Returns whether results are awaited.
    #[inline]
    pub(super) const fn awaits(&self) -> bool {
        self.cursor < self.opened
    }

    /// Returns whether there is room for `ops` more ops.
    pub(super) fn has_room_for(&mut self, ops: usize) -> bool {
        let cursor = self.cursor;
        self.ops.make_room_for(ops, |failed| failed.end() <= cursor)
    }

    /// Appends an op. The caller must have checked that there is room.
    pub(super) fn push(&mut self, op: OpId, descriptor: &Descriptor, stripe: Stripe) {
        self.ops.push(op, descriptor, stripe);
    }

    /// Advances `scanned`; `scanned_of` returns how many windows of an op are scanned.
    pub(super) fn note_scanned(&mut self, scanned_of: impl Fn(OpId) -> u32) {
        while let Some(entry) = self.ops.at(self.scanned) {
            let scanned = if entry.failed {
                entry.end()
            } else {
                entry.base + u64::from(entry.stripe.before(scanned_of(entry.op)))
            };
            self.scanned = self.scanned.max(scanned);
            if scanned < entry.end() {
                break;
            }
        }
    }

    /// Returns the position up to which windows of an op may be opened now.
    pub(super) fn openable(&self, entry: &StreamOp) -> u64 {
        // wire: W-35
        let reach = self.low + crate::wire::OPEN_AHEAD;
        self.scanned.min(entry.end()).min(reach)
    }

    /// Notes that `op` was opened up to `end`. Returns whether any window was opened for the first
    /// time.
    pub(super) fn note_opened(&mut self, op: OpId, end: u64) -> bool {
        self.ops.note_opened(op);
        let is_new = end > self.opened;
        self.opened = self.opened.max(end);
        is_new
    }

    /// Returns the next opened window, which the caller sends unless the window is empty.
    pub(super) fn next_to_send(&mut self) -> Option<(WindowId, Geometry)> {
        while self.sent < self.opened {
            let entry = *self.ops.at(self.sent)?;
            if !entry.failed {
                return Some((entry.window(self.sent), entry.geometry));
            }
            self.skip_failed();
        }
        None
    }

    /// Passes the window that [`Self::next_to_send`] returned: it was sent, or is empty.
    #[inline]
    pub(super) const fn pass_next(&mut self) {
        self.sent += 1;
    }

    /// Updates the lowest window that some rank has not acknowledged (wire: W-33). Returns whether
    /// it moved.
    pub(super) fn note_low(&mut self, low: WindowId) -> bool {
        let low = self.ops.position_from(low);
        let moves = low > self.low;
        if moves {
            self.low = low;
            self.settle();
        }
        moves
    }

    /// Moves the cursor past the result at `position`. Returns the op if this was its last window.
    pub(super) fn note_result(&mut self, position: u64) -> Option<OpId> {
        let entry = self.ops.at(position).copied();
        self.cursor = position + 1;
        self.skip_failed();
        entry.filter(|entry| entry.end() == position + 1).map(|entry| entry.op)
    }

    /// Skips the windows before `position`: they need no results and no opens.
    pub(super) fn pass(&mut self, position: u64) {
        let Self { cursor, scanned, opened, sent, .. } = self;
        for at in [cursor, scanned, opened, sent] {
            *at = position.max(*at);
        }
        self.skip_failed();
    }

    /// Marks an op as failed and skips it. Returns its positions, if it is in this stream.
    pub(super) fn fail(&mut self, op: OpId) -> Option<Range<u64>> {
        let failed = self.ops.get(op).map(|entry| entry.base..entry.end())?;
        self.ops.fail(op);
        self.skip_failed();
        Some(failed)
    }

    /// Moves every position that lies in a failed op past that op.
    pub(super) fn skip_failed(&mut self) {
        let Self { ops, scanned, opened, sent, cursor, low } = self;
        if ops.has_failed() {
            for position in [scanned, opened, sent, cursor, low] {
                while let Some(entry) = ops.at(*position).filter(|entry| entry.failed) {
                    *position = entry.end();
                }
            }
        }
        self.settle();
    }

    /// Drops the ops that lie before both the cursor and the credit. An op that has ended at this
    /// rank stays while the credit may still name one of its windows. Also advances `sent`, since
    /// windows before the cursor or the credit do not need this rank's share.
    fn settle(&mut self) {
        self.sent = self.sent.max(self.cursor.max(self.low).min(self.opened));
        let done = self.cursor.min(self.low);
        while self.ops.settle_before(done).is_some() {}
    }
}
