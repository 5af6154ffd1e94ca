//! Hands out the messages that a stream sends next.

use core::ops::Range;

use super::{Nack, Stream};
use crate::congestion::Congestion;
use crate::geometry::Geometry;
use crate::ids::{OpId, WindowId};
use crate::rtt::Rtt;
use crate::sequence::StreamOp;
use crate::time::Time;
use crate::wire::{NackEntries, NackEntry};

impl Stream {
    /// Returns the next windows to open, all of one op.
    pub(in crate::worker) fn poll_open(&mut self) -> Option<(StreamOp, Range<u64>)> {
        self.opens.poll(&mut self.progress)
    }

    /// Returns the op that an open of `op` names as its predecessor.
    pub(in crate::worker) fn opened_before(&self, op: OpId) -> Option<OpId> {
        self.progress.ops().before(op)
    }

    /// Notes that an open of the windows of `op` before `end` is sent.
    pub(in crate::worker) fn note_opened(&mut self, now: Time, op: OpId, end: u64) {
        self.opens.note_sent(op, end, &mut self.progress);
        self.busy.begin(now);
    }

    /// Returns the next fragments to send again, as the aggregator requested, with their window.
    #[inline]
    pub(in crate::worker) fn poll_repeat(&mut self) -> Option<(WindowId, u64)> {
        let (position, fragments) = self.in_flight.poll_repeat()?;
        // A failed op has no windows in flight.
        Some((self.progress.ops().at(position)?.window(position), fragments))
    }

    /// Returns the next opened window, which the caller sends unless the window is empty.
    pub(in crate::worker) fn next_to_send(&mut self) -> Option<(WindowId, Geometry)> {
        self.progress.next_to_send()
    }

    /// Passes the window that [`Self::next_to_send`] returned, which is empty.
    pub(in crate::worker) const fn pass_empty(&mut self) {
        self.progress.pass_next();
    }

    /// Sends the window of `len` bytes that [`Self::next_to_send`] returned, if the pool has a slot
    /// for it and congestion control admits it. Returns whether it is sent.
    pub(in crate::worker) fn send(
        &mut self,
        now: Time,
        len: usize,
        congestion: &mut Congestion,
    ) -> bool {
        let position = self.progress.sent();
        // wire: W-28 The aggregator may have skipped a failed op before this rank received the
        // failure. At this rank, the op's windows still count against the pool.
        if position >= self.progress.low() + self.pool {
            // Only acknowledgements free a slot.
            if self.in_flight.is_empty() {
                self.acks.note_stopped(self.progress.cursor());
            }
            return false;
        }
        if !self.in_flight.admits(len, self.pool, congestion) {
            return false;
        }
        self.progress.pass_next();
        self.in_flight.push(now, position, len, congestion);
        true
    }

    /// Returns the nack to send, if one is due.
    #[inline]
    pub(in crate::worker) const fn poll_nack(&mut self) -> Option<Nack> {
        self.nack.take()
    }

    /// Writes the body of a nack. Returns its length, or `None` if it has no entries. A probe also
    /// requests a wait. Results that are still on the path arrive before the wait, so they are not
    /// repeated needlessly.
    pub(in crate::worker) fn write_nack(
        &mut self,
        now: Time,
        nack: Nack,
        nacks: &Rtt,
        body: &mut [u8],
    ) -> Option<usize> {
        let (search, ops) = (self.search(now, nacks), self.progress.ops());
        let wait = (nack == Nack::Probe)
            .then(|| NackEntry { window: ops.window(self.progress.cursor()), fragments: 0 });
        let len = NackEntries::encode(self.results.missing(ops, search).chain(wait), body);
        if len == NackEntries::NONE_LEN {
            return None;
        }
        self.results.note_nacked(search, &mut self.backoff);
        if nack == Nack::Probe {
            self.probes.note_sent(now, self.progress.sent());
        }
        Some(len)
    }

    #[inline]
    pub(in crate::worker) const fn is_ack_due(&self) -> bool {
        self.acks.is_due()
    }

    /// Returns the acknowledgement to write into a header, and marks it as sent (wire: W-32).
    #[inline]
    pub(in crate::worker) fn acknowledge(&mut self) -> WindowId {
        let cursor = self.progress.cursor();
        self.acks.note_sent(cursor);
        self.progress.ops().window(cursor)
    }

    /// Returns whether to report congestion marks to the aggregator. The caller must report them,
    /// since the stream forgets them.
    #[inline]
    pub(in crate::worker) const fn report_mark(&mut self) -> bool {
        core::mem::replace(&mut self.congested, false)
    }
}
