//! Lost contributions: finds the fragments that a rank sent and that were lost, and decides when to
//! request them.

use super::{Progress, Stream};
use crate::ids::Rank;
use crate::recovery;
use crate::time::Time;
use crate::wire::NackEntry;

impl Stream {
    /// Searches for losses in the windows that `rank` must have sent. Each window is searched once.
    /// If `complete` is set, a window has just become complete, and the oldest incomplete window is
    /// searched again.
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

    /// Records the window at `position` as lacking fragments, if any of them should be requested
    /// from `rank`.
    pub(super) fn note_if_lacking(&mut self, now: Time, rank: Rank, position: u64) {
        if self.due_of(now, rank, position, false) != 0 {
            let lacking = &mut self.ranks[rank.index()].lacking;
            *lacking = Some(lacking.map_or(position, |first| first.min(position)));
        }
    }

    /// Returns whether to request the lost fragments of `rank` now. They are requested if the next
    /// fold waits for them, or if the rank has sent enough later windows for one nack to cover the
    /// losses in those windows too.
    pub(super) fn is_to_be_nacked(&self, rank: Rank) -> bool {
        let Progress { lacking, sent, .. } = self.ranks[rank.index()];
        lacking
            .is_some_and(|first| first <= self.next || sent >= first + recovery::GATHERED_WINDOWS)
    }

    /// Returns the ranks from which to request lost fragments now that `next` has moved.
    pub(in crate::aggregator) fn to_be_nacked(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks().filter(|rank| self.is_to_be_nacked(*rank))
    }

    /// Notes that fragments of a window were requested from `rank`.
    pub(in crate::aggregator) fn note_nacked(&mut self, now: Time, rank: Rank, entry: NackEntry) {
        let Some(position) = self.sequence.position(entry.window) else { return };
        self.pool.claim(position);
        self.pool.contribution_mut(position, rank).nacked.note(entry.fragments, now);
    }

    /// Notes that a fragment that `rank` sent again had arrived before.
    pub(in crate::aggregator) fn note_needless(&mut self, now: Time, rank: Rank) {
        self.ranks[rank.index()].rtt.note_again(now, false);
    }

    /// Notes that all lost fragments of `rank` were requested.
    pub(in crate::aggregator) fn note_all_nacked(&mut self, rank: Rank) {
        self.ranks[rank.index()].lacking = None;
    }

    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let world = u16::try_from(self.ranks.len()).unwrap_or(u16::MAX);
        (0..world).map(Rank)
    }

    /// Returns the fragments of a window to request from `rank`: those that were sent and must be
    /// lost, or all missing ones if the rank is `stalled`. Excludes fragments that were requested
    /// and may still arrive.
    fn due_of(&self, now: Time, rank: Rank, position: u64, stalled: bool) -> u64 {
        let contribution = self.pool.contribution(position, rank);
        if contribution.complete {
            return 0;
        }
        let Progress { sent, answered, rtt, .. } = &self.ranks[rank.index()];
        let all = self.all_of(position, contribution.mask) & !contribution.have;
        let lost = if stalled || position < *sent { all } else { all & contribution.sent };
        contribution.nacked.due(lost, position, *answered, now, rtt)
    }

    /// Returns the fragments of a contribution with the blocks `mask`, or a mask with every bit set
    /// if `mask` is 0 because nothing has arrived.
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

    /// Returns the entries of a nack to `rank`. Unless the rank is `stalled`, the entries request
    /// only fragments that the rank must have sent; other fragments may still be on the path.
    pub(in crate::aggregator) fn missing_of(
        &self,
        now: Time,
        rank: Rank,
        stalled: bool,
    ) -> impl Iterator<Item = NackEntry> + '_ {
        let progress = &self.ranks[rank.index()];
        let end = progress.opened.min(self.low() + self.pool.len());
        // Some data of the window at `sent` has arrived, so this window may have gaps as well.
        let end = if stalled { end } else { end.min(progress.sent + 1) };
        let mut at = self.next;
        core::iter::from_fn(move || {
            loop {
                let position = self.occupancy.next_of(rank, at, end)?;
                at = position + 1;
                let fragments = self.due_of(now, rank, position, stalled);
                if fragments != 0 {
                    return Some(NackEntry { window: self.sequence.window(position), fragments });
                }
            }
        })
    }
}
