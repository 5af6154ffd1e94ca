//! The nacks of ranks: requests for lost results, and probes.

use super::Aggregation;
use crate::ids::Rank;
use crate::reject::Reject;
use crate::time::Time;
use crate::wire::{Header, NackEntries};

impl Aggregation {
    /// Handles a nack: queues the results that it requests and, where due, the failure of its op, a
    /// request for opens, and the answer to a probe.
    pub(super) fn handle_nack(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
    ) -> Result<(), Reject> {
        let entries = NackEntries::decode(body)?;
        let (lane, rank) = (header.lane, header.sender);
        let from = self.resend_nacked(now, lane, rank, &entries);
        // wire: W-22
        let stream = &self.streams[usize::from(lane)];
        let reached = header.window.op;
        let failed = self.agreement.disagreement(reached).is_some();
        let at = stream.sequence.position_from(header.window);
        let opened = stream.ranks[rank.index()].opened;
        let next = stream.next;
        let is_due = !failed && !self.agreement.is_past(reached);
        let passed = (is_due && stream.sequence.has_passed(reached)).then_some(reached);
        let may_lack = |from: u64| stream.folded.back().is_some_and(|newest| *newest >= from);
        let probed = from.map(may_lack);
        self.queue.note(lane, rank, |due| {
            due.failed = failed.then_some(reached).or(due.failed);
            due.passed = due.passed.into_iter().chain(passed).min();
            due.open |= passed.is_some() || (!failed && opened <= at.max(next));
            due.sign |= probed == Some(true);
            due.stalled |= probed == Some(false);
        });
        Ok(())
    }

    /// Queues the results that the nack requests and that may be lost, as far as the rank's budget
    /// allows. If the last entry asks which results exist from some window onward, returns the
    /// position of that window.
    fn resend_nacked(
        &mut self,
        now: Time,
        lane: u8,
        rank: Rank,
        entries: &NackEntries<'_>,
    ) -> Option<u64> {
        let stream = &mut self.streams[usize::from(lane)];
        let mut entries = entries.iter().peekable();
        // Limit the number of windows that one nack can request, even if its entries overlap.
        let mut left = NackEntries::MAX;
        while let Some(entry) = entries.next() {
            let (from, to) = match entries.peek() {
                _ if entry.fragments != 0 => {
                    let Some(position) = stream.sequence.position(entry.window) else { continue };
                    (position, position + 1)
                }
                Some(next) => {
                    let [from, to] = [entry.window, next.window]
                        .map(|window| stream.sequence.position_from(window));
                    (from, to)
                }
                None => return Some(stream.sequence.position_from(entry.window)),
            };
            let first = stream.folded.partition_point(|position| *position < from);
            for i in first..stream.folded.len() {
                let position = stream.folded[i];
                if position >= to || left == 0 {
                    break;
                }
                left -= 1;
                let Some(slot) = stream.pool.get(position).copied() else { continue };
                let all = slot.cut.all(slot.result_len);
                let wanted = if entry.fragments == 0 { all } else { entry.fragments & all };
                let wanted = stream.may_be_lost(now, rank, position, wanted);
                // wire: W-68
                let most = self.budgets.left(now, rank) / slot.datagram_len();
                let lost = self.queue.resend(lane, rank, position, wanted, most);
                let lost = lost.count_ones() as usize;
                self.budgets.spend(rank, lost * slot.datagram_len());
                let lost = (slot.cut.payload() * lost).min(slot.result_len);
                stream.note_result_lost(rank, position, lost);
            }
        }
        None
    }
}
