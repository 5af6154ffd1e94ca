//! What a rank sent and is lost, and when to ask for it.

use super::{Progress, Stream};
use crate::ids::Rank;
use crate::recovery;
use crate::time::Time;
use crate::wire::AskEntry;

impl Stream {
    /// Notes what is lost of the windows that `rank` must have sent: of each window once, and of
    /// the oldest that is not whole whenever a window has become `complete`.
    pub(super) fn search(&mut self, now: Time, rank: Rank, complete: bool) {
        let Progress { sent, searched, oldest_missing, .. } = self.ranks[rank.index()];
        let mut at = searched.max(self.next);
        while let Some(owed) = self.occupancy.next_of(rank, at, sent) {
            self.note_if_lacking(now, rank, owed);
            at = owed + 1;
        }
        let mut oldest = oldest_missing.max(self.next);
        if complete {
            while let Some(owed) = self.occupancy.next_of(rank, oldest, sent) {
                oldest = owed;
                if !self.pool.contribution(owed, rank).complete {
                    self.note_if_lacking(now, rank, owed);
                    break;
                }
                oldest += 1;
            }
        }
        let progress = &mut self.ranks[rank.index()];
        progress.searched = at.max(sent);
        progress.oldest_missing = oldest;
    }

    /// Notes it if `rank` is to be asked for something of the window at `position`.
    pub(super) fn note_if_lacking(&mut self, now: Time, rank: Rank, position: u64) {
        if self.due_of(now, rank, position, false) != 0 {
            let lacking = &mut self.ranks[rank.index()].lacking;
            *lacking = Some(lacking.map_or(position, |first| first.min(position)));
        }
    }

    /// Whether what is lost of `rank`'s is to be asked for now: enough has gathered, or the next
    /// fold waits for it.
    pub(super) fn is_to_be_asked(&self, rank: Rank) -> bool {
        let Progress { lacking, sent, .. } = self.ranks[rank.index()];
        lacking
            .is_some_and(|first| first <= self.next || sent >= first + recovery::GATHERED_WINDOWS)
    }

    /// The ranks that are to be asked, now that `next` has moved.
    pub(in crate::aggregator) fn to_be_asked(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks().filter(|rank| self.is_to_be_asked(*rank))
    }

    /// Notes that `rank` is asked for all that is lost.
    pub(in crate::aggregator) fn note_all_asked(&mut self, rank: Rank) {
        self.ranks[rank.index()].lacking = None;
    }

    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let world = u16::try_from(self.ranks.len()).unwrap_or(u16::MAX);
        (0..world).map(Rank)
    }

    /// The fragments of a window to ask `rank` for, but for what was asked for and may still come:
    /// those that were sent and must be lost, or all that are missing if the rank is `stalled`.
    fn due_of(&self, now: Time, rank: Rank, position: u64, stalled: bool) -> u64 {
        let contribution = self.pool.contribution(position, rank);
        if contribution.complete {
            return 0;
        }
        let Progress { sent, answered, rtt, .. } = &self.ranks[rank.index()];
        let all = self.all_of(position, contribution.mask) & !contribution.have;
        let lost = if stalled || position < *sent { all } else { all & contribution.sent };
        contribution.asked.due(lost, position, *answered, now, rtt)
    }

    /// The fragments of a contribution with the blocks `mask`; all there can be if nothing of it
    /// has arrived.
    fn all_of(&self, position: u64, mask: u64) -> u64 {
        if mask == 0 {
            return u64::MAX;
        }
        let entry = self.sequence.at(position);
        entry.map_or(0, |entry| {
            let len = entry.geometry.payload_len(entry.window(position).index, mask);
            entry.geometry.cut(self.cut, len).all(len)
        })
    }

    /// What to ask `rank` for. Unless it is `stalled`, only what must have been sent: the rest
    /// may be under way.
    pub(in crate::aggregator) fn missing_of(
        &self,
        now: Time,
        rank: Rank,
        stalled: bool,
    ) -> impl Iterator<Item = AskEntry> + '_ {
        let progress = &self.ranks[rank.index()];
        let end = progress.opened.min(self.low() + self.pool.len());
        // The newest window may have gaps, although what is before it is sent for certain.
        let end = if stalled { end } else { end.min(progress.sent + 1) };
        let mut at = self.next;
        core::iter::from_fn(move || {
            loop {
                let position = self.occupancy.next_of(rank, at, end)?;
                at = position + 1;
                let fragments = self.due_of(now, rank, position, stalled);
                if fragments != 0 {
                    return Some(AskEntry { window: self.sequence.window(position), fragments });
                }
            }
        })
    }
}
