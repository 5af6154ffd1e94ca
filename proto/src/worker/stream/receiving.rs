//! Handles the aggregator's messages to a stream.

use alloc::vec::Vec;

use super::{Nack, Stream};
use crate::congestion::Congestion;
use crate::geometry::Fragmentation;
use crate::ids::{OpId, Rank, WindowId};
use crate::reject::Reject;
use crate::rtt::Rtt;
use crate::time::Time;
use crate::wire::{Header, MissingRanks, NackEntries};
use crate::worker::Path;

impl Stream {
    /// Notes whether a datagram arrived with a congestion mark. The next message to the aggregator
    /// reports the mark.
    #[inline]
    pub(in crate::worker) const fn note_mark(&mut self, congested: bool) {
        self.congested |= congested;
    }

    /// Updates the lowest window that some rank has not acknowledged. Returns whether it moved.
    pub(in crate::worker) fn handle_low(&mut self, low: WindowId) -> bool {
        self.progress.note_low(low)
    }

    /// Handles a credit: all data of windows before `window` has arrived or is lost.
    pub(in crate::worker) fn handle_credit(
        &mut self,
        window: WindowId,
        congestion: &mut Congestion,
    ) {
        let arrived = self.progress.ops().position_from(window);
        self.in_flight.note_off_path(arrived, congestion);
    }

    /// Returns the position of a window that has no result yet.
    #[inline]
    pub(in crate::worker) fn awaited(&self, window: WindowId) -> Result<u64, Reject> {
        let ops = self.progress.ops();
        let Some(position) = ops.position(window) else {
            let settled = ops.is_settled(window.op);
            return Err(if settled { Reject::Stale } else { Reject::Unopened });
        };
        // wire: W-42
        let failed = ops.get(window.op).is_none_or(|entry| entry.failed);
        if failed || position < self.progress.cursor() {
            return Err(Reject::Stale);
        }
        Ok(position)
    }

    /// Handles a fragment of the result at `position`, and queues a nack for losses that it
    /// reveals. `cut` is the job's fragmentation. Returns the window's length in bytes, and whether
    /// the fragment completes the window; `None` if the fragment has already arrived.
    pub(in crate::worker) fn handle_result(
        &mut self,
        now: Time,
        position: u64,
        header: &Header,
        cut: Fragmentation,
        nacks: &mut Rtt,
    ) -> Result<Option<(usize, bool)>, Reject> {
        if position >= self.progress.opened() {
            return Err(Reject::Unopened);
        }
        let place = self.results.place(position, header, cut, self.pool, &self.progress)?;
        let is_new = self.results.take(place, header, now, nacks);
        if is_new {
            self.probes.note_progress(now);
            self.backoff.note_fragment();
        }
        let proves_more = self.results.note_overtaken(place, header);
        let (len, complete) = self.results.arrived(place);
        // wire: W-38
        // For a complete window, `nack_lost` searches for losses after the delivery.
        if !complete && (place == 0 || proves_more) {
            let search = self.search(now, nacks);
            if place == 0 && self.results.is_to_nack_of_first(search)
                || proves_more && self.results.is_to_nack(search)
            {
                self.nack.get_or_insert(Nack::Lost);
            }
        }
        if !is_new {
            return Ok(None);
        }
        self.waited.forget(header.window.op);
        if complete {
            // wire: W-37
            self.in_flight.cancel_repeats(position);
        }
        Ok(Some((len, complete)))
    }

    /// Moves the cursor over complete results. Returns an op once the cursor passes its last
    /// window; call again until `None`.
    pub(in crate::worker) fn advance(&mut self, now: Time) -> Option<OpId> {
        loop {
            let cursor = self.progress.cursor();
            let (position, len) = self.results.pop_complete(cursor)?;
            self.probes.note_progress(now);
            self.backoff.note_delivered();
            self.density.note(position + 1 - cursor, len);
            self.acks.note_result(now, len, position + 1);
            let ended = self.progress.note_result(position);
            self.results.pass(self.progress.cursor());
            if ended.is_some() {
                return ended;
            }
        }
    }

    /// Removes the windows before the cursor or the credit from those in flight. If all ranks turn
    /// out to have the sum of a window, no result for the window arrives, and only the credit
    /// passes the window.
    pub(in crate::worker) fn release(&mut self, now: Time, path: &mut Path) {
        let cursor = self.progress.cursor();
        self.in_flight.release(now, cursor.max(self.progress.low()), cursor, path);
    }

    /// Queues a nack if results must have been lost (wire: W-38).
    pub(in crate::worker) fn nack_lost(&mut self, now: Time, nacks: &Rtt) {
        if self.results.is_to_nack(self.search(now, nacks)) {
            self.nack.get_or_insert(Nack::Lost);
        }
    }

    /// Handles a nack: queues the fragments and opens that the aggregator lacks. `cut` is the job's
    /// fragmentation.
    pub(in crate::worker) fn handle_nack(
        &mut self,
        now: Time,
        entries: &NackEntries<'_>,
        cut: Fragmentation,
        congestion: &mut Congestion,
    ) {
        let (ops, end) = (self.progress.ops(), self.probes.note_nack());
        let position = |window| ops.position(window).filter(|at| *at < end);
        let lacked = entries.iter().filter(|entry| entry.fragments != 0);
        // All data up to the last window that the nack names has left the path: it has arrived or
        // is lost.
        if let Some(last) = lacked.filter_map(|entry| position(entry.window)).max() {
            self.in_flight.note_off_path(last + 1, congestion);
        }
        let mut fruitless: Option<u32> = None;
        for entry in entries.iter() {
            // wire: W-36
            if entry.fragments == 0 {
                let from = ops.position_from(entry.window).min(self.progress.opened());
                self.opens.note_lacked(from);
                continue;
            }
            // wire: W-37
            let Some(position) = position(entry.window).filter(|at| !self.is_summed(*at)) else {
                continue;
            };
            let op = ops.at(position);
            let cut_of = |len| op.map_or(cut, |op| op.geometry.cut(cut, len));
            let fragments = entry.fragments;
            let in_vain = self.in_flight.note_lacked(position, fragments, cut_of, congestion);
            let Some(in_vain) = in_vain else { continue };
            fruitless = Some(fruitless.map_or(in_vain, |least| least.min(in_vain)));
            self.probes.note_progress(now);
        }
        if let Some(fruitless) = fruitless {
            self.backoff.note_lacked(fruitless);
        }
    }

    /// Returns whether the sum of a window has arrived.
    fn is_summed(&self, position: u64) -> bool {
        position < self.progress.cursor() || self.results.is_complete(position)
    }

    /// Handles a wait: the aggregator has sent all results of windows before `end`, and waits for
    /// the `missing` ranks. Returns the missing ranks that have left, if results are awaited.
    pub(in crate::worker) fn handle_wait(
        &mut self,
        now: Time,
        end: WindowId,
        missing: MissingRanks<'_>,
        nacks: &mut Rtt,
    ) -> Vec<Rank> {
        if let Some(took) = self.probes.note_answer(now) {
            nacks.sample(took);
        }
        let sent = self.progress.ops().position_from(end).min(self.progress.opened());
        self.results.note_all_sent(sent);
        // wire: W-38
        if sent > self.progress.cursor() {
            self.probes.note_lack(now);
            self.backoff.note_reported();
            self.nack_lost(now, nacks);
            self.waited.forget_all();
            return Vec::new();
        }
        self.probes.note_wait(now);
        self.waited.set(now, end.op, missing);
        // The wait is obsolete if the results of all opened windows have arrived since.
        if !self.progress.awaits() {
            return Vec::new();
        }
        let ranks = self.waited.ranks(now).iter();
        ranks.filter(|(_, silent)| *silent == MissingRanks::LEFT).map(|(rank, _)| *rank).collect()
    }
}
