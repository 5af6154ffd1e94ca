//! One stream of a job: opens, received contributions, and the next window to fold.

mod credit;
mod departures;
mod flow;
mod lost_contributions;
mod lost_results;
mod parent;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;

use self::flow::Flow;
use self::parent::ParentProgress;
use super::Config;
use super::occupancy::Occupancy;
use super::pool::Pool;
use crate::congestion::Congestion;
use crate::density::Density;
use crate::geometry::{Fragmentation, Stripe};
use crate::ids::{OpId, Rank, WindowId};
use crate::recovery::{self, Answered};
use crate::reject::Reject;
use crate::rtt::Rtt;
use crate::sequence::{Sequence, StreamOp};
use crate::status::Transfers;
use crate::time::{Span, Time};
use crate::wire::{Flags, Header, OPEN_AHEAD, Open};

/// The progress of one rank in a stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    /// The position before which the rank has opened all windows. The aggregator knows which of
    /// these windows the rank owes.
    pub(super) opened: u64,
    /// The position before which the rank has all results.
    pub(super) acked: u64,
    /// A lower bound on the position of the first window that the rank owes and has not sent
    /// completely.
    oldest_missing: u64,
    /// The position before which the rank must have sent all that it owes.
    sent: u64,
    /// The position before which windows have been searched for losses.
    searched: u64,
    /// The first window with lost fragments to request.
    lacking: Option<u64>,
    /// The latest nack that the rank has answered.
    answered: Answered,
    /// The last congestion round in which the rank lacked results, and how many bytes it lacked.
    lost: (u64, usize),
    /// The position before which the results that the rank lacks have been counted as lost.
    counted: u64,
    /// The time of the last request for the rank's opens; cleared when the rank opens more windows.
    open_nacked_at: Option<Time>,
    /// The estimate of the round trip from a nack to its answer.
    rtt: Rtt,
    /// The shortest round trip from a nack to its answer.
    nack_trip: Option<Span>,
    /// The shortest time from a result to its acknowledgement, at most [`Self::GUESS`]. This
    /// includes the time for which the rank delayed the acknowledgement.
    acked_trip: Span,
    /// The counters of the rank's transfers.
    pub(super) flow: Flow,
}

impl Progress {
    const NEW: Self = Self {
        opened: 0,
        acked: 0,
        oldest_missing: 0,
        sent: 0,
        searched: 0,
        lacking: None,
        answered: Answered::NONE,
        lost: (0, 0),
        counted: 0,
        open_nacked_at: None,
        rtt: Rtt::new(Self::GUESS),
        nack_trip: None,
        acked_trip: Self::GUESS,
        flow: Flow::NEW,
    };

    /// The assumed round trip before the first measurement.
    const GUESS: Span = Span::from_millis(1);

    /// Returns the shortest round trip from a nack to its answer or, before the first such answer,
    /// from a result to its acknowledgement. A longer estimate would delay repairs.
    fn round_trip(&self) -> Span {
        self.nack_trip.unwrap_or(self.acked_trip)
    }
}

/// The position of a lost rank: the rank counts as having opened and acknowledged all windows.
const GONE: u64 = u64::MAX;

/// A window that can be folded next: all its contributions, or the parent's result, have arrived.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ready {
    pub(super) position: u64,
    pub(super) entry: StreamOp,
    pub(super) union: u64,
    pub(super) contributors: u32,
    /// The contributor, if any, whose contribution is already the sum: a rank, or the number that
    /// stands for the parent.
    pub(super) whole: Option<Rank>,
}

/// The place of an op that a rank opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placed {
    /// The op starts at this position.
    At(u64),
    /// The op follows an op whose open is missing.
    Missing,
    /// The op failed and has no place.
    Failed,
}

/// The outcome of storing a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// The fragment had arrived before.
    Duplicate,
    /// The fragment is new and belongs to the slot with this number.
    New(u32),
    /// The fragment is new and belongs to the slot with this number. Other fragments from the rank
    /// are lost, and should be requested now.
    Gap(u32),
}

/// One stream at the aggregator.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) sequence: Sequence,
    pub(super) ranks: Box<[Progress]>,
    pub(super) pool: Pool,
    pub(super) results: Congestion,
    occupancy: Occupancy,
    /// The position before which every rank has opened all windows.
    agreed: u64,
    /// The position of the first window that is not folded.
    pub(super) next: u64,
    /// The position of the first window without a result. Equals `next` if there is no parent.
    pub(super) resulted: u64,
    /// The positions of the windows with results that some rank has not acknowledged, in order.
    pub(super) folded: VecDeque<u64>,
    /// The position after the newest result and after any failed ops that follow that result.
    pub(super) results_end: u64,
    /// The mean size of results per window.
    density: Density,
    /// The index of the last window with a result in the op that contains `resulted`, or
    /// [`Header::NO_PREVIOUS`].
    previous: u32,
    /// The value of `low` that was last announced to the ranks.
    announced: u64,
    /// The position that the last credit announced: all data of earlier windows has arrived or is
    /// lost.
    reported_arrived: u64,
    cut: Fragmentation,
    /// The results, all of which go to every rank.
    pub(super) sent: Transfers,
    /// The time at which the latest contribution of the folded windows was complete.
    complete_at: Time,
    /// The parent's progress, if sums go to a parent.
    pub(super) at_parent: Option<ParentProgress>,
}

impl Stream {
    pub(super) fn new(
        pool: Pool,
        occupancy: Occupancy,
        sequence: Sequence,
        results: Congestion,
        config: Config,
    ) -> Self {
        let slots = usize::try_from(pool.len()).unwrap_or(usize::MAX);
        Self {
            sequence,
            ranks: vec![Progress::NEW; config.world.into()].into(),
            pool,
            results,
            occupancy,
            agreed: 0,
            next: 0,
            resulted: 0,
            folded: VecDeque::with_capacity(slots),
            results_end: 0,
            density: Density::default(),
            previous: Header::NO_PREVIOUS,
            announced: 0,
            reported_arrived: 0,
            cut: config.cut,
            sent: Transfers::default(),
            complete_at: Time(0),
            at_parent: config.has_parent.then(|| ParentProgress::new(slots)),
        }
    }

    /// Returns the number of windows that some rank has opened and that are not folded.
    pub(super) fn backlog(&self) -> u64 {
        let opened = self.ranks.iter().map(|progress| progress.opened);
        let opened = opened.filter(|opened| *opened != GONE).max().unwrap_or(0);
        opened.saturating_sub(self.next)
    }

    /// Estimates the size of the backlog's results, in bytes.
    pub(super) fn backlog_bytes(&self) -> u64 {
        self.density.of(self.backlog())
    }

    /// Handles an acknowledgement from a rank.
    pub(super) fn handle_ack(&mut self, now: Time, rank: Rank, ack: WindowId) {
        // wire: W-32
        // A rank cannot have received a result that does not exist, whatever it acknowledges.
        let acked = self.sequence.position_from(ack).min(self.resulted);
        let progress = &mut self.ranks[rank.index()];
        if acked <= progress.acked {
            return;
        }
        progress.acked = acked;
        if acked >= progress.opened {
            progress.flow.busy.end(now);
        }
        let newest = self.folded.partition_point(|position| *position < acked).checked_sub(1);
        let newest = newest.and_then(|newest| self.pool.get(self.folded[newest]));
        if let Some(slot) = newest.filter(|slot| slot.sent_at <= now) {
            progress.acked_trip = progress.acked_trip.min(now.since(slot.sent_at));
        }
    }

    /// Frees the oldest slot if every rank has acknowledged its window. Returns that window.
    pub(super) fn retire(&mut self) -> Option<WindowId> {
        let oldest = *self.folded.front()?;
        // wire: W-32
        if self.ranks.iter().any(|progress| progress.acked <= oldest) {
            return None;
        }
        self.folded.pop_front();
        if let Some(slot) = self.pool.get(oldest) {
            self.results.on_delivered(slot.result_len);
        }
        Some(self.sequence.window(oldest))
    }

    /// Drops the oldest op if all its windows are before `low`. Returns whether an op was dropped.
    pub(super) fn settle(&mut self) -> bool {
        self.sequence.settle_before(self.low()).is_some()
    }

    /// Returns whether the stream already has `op` or has room for it. Drops failed ops to make
    /// room.
    pub(super) fn has_room_for(&mut self, op: OpId) -> bool {
        let Self { sequence, folded, resulted, .. } = self;
        sequence.get(op).is_some()
            || sequence.make_room(|failed| {
                let result = folded.partition_point(|position| *position < failed.base);
                let result = folded.get(result).is_some_and(|at| *at < failed.end());
                failed.end() <= *resulted && !result
            })
    }

    /// Finds a place for an op that a rank opens. The open names the rank's previous op in the
    /// stream.
    pub(super) fn place(&mut self, op: OpId, open: &Open, rank: Rank, stripe: Stripe) -> Placed {
        if let Some(entry) = self.sequence.get(op) {
            let (base, failed) = (entry.base, entry.failed);
            return match self.joined_up(rank, open.after, op, base) {
                false => Placed::Missing,
                true if failed => Placed::Failed,
                true => Placed::At(base),
            };
        }
        let last = self.sequence.last();
        if last < Some(op) {
            if open.after > last || !self.joined_up(rank, open.after, op, self.sequence.end()) {
                return Placed::Missing;
            }
            return Placed::At(self.sequence.push(op, &open.descriptor, stripe));
        }
        // Other ranks are past the number of `op`, but did not open the op in this stream. The
        // shard of the op's first window reports this disagreement; this stream fails the op
        // silently.
        let base = self.sequence.position_from(WindowId::new(op, 0));
        if !self.joined_up(rank, open.after, op, base) {
            return Placed::Missing;
        }
        self.sequence.insert_failed(op, &open.descriptor);
        Placed::Failed
    }

    /// Moves the rank forward to `base`, the position of `op`. Returns false if the rank has not
    /// opened all its earlier ops in this stream. Ops that the rank skips fail silently in this
    /// stream: the ranks disagree about them.
    fn joined_up(&mut self, rank: Rank, after: Option<OpId>, op: OpId, base: u64) -> bool {
        let opened = self.ranks[rank.index()].opened;
        if opened > base {
            return true;
        }
        if let Some(after) = after.filter(|after| !self.sequence.is_settled(*after)) {
            let Some(before) = self.sequence.get(after) else { return false };
            if opened < if before.failed { before.base } else { before.end() } {
                return false;
            }
        }
        for skipped in self.sequence.iter_after_mut(after) {
            if skipped.op < op && skipped.end() > opened {
                skipped.failed = true;
            }
        }
        self.ranks[rank.index()].opened = base;
        true
    }

    /// Handles the stretch of windows in an open; the stretch starts at `position`. Returns false
    /// if the preceding stretch is missing.
    pub(super) fn handle_stretch(
        &mut self,
        now: Time,
        rank: Rank,
        position: u64,
        open: &Open,
    ) -> bool {
        let opened = self.ranks[rank.index()].opened;
        // wire: W-34
        if position > opened {
            return false;
        }
        // wire: W-35
        let end = (position + u64::from(open.windows)).min(self.low() + OPEN_AHEAD);
        if end > opened {
            let [from, to] = [opened, end].map(|at| usize::try_from(at - position).unwrap_or(0));
            self.occupancy.set(rank, opened, &open.occupancy()[from..to], &open.held()[from..to]);
            let progress = &mut self.ranks[rank.index()];
            progress.opened = end;
            progress.open_nacked_at = None;
            progress.flow.busy.begin(now);
            self.update_agreed();
        }
        true
    }

    pub(super) fn update_agreed(&mut self) {
        self.agreed = self.ranks.iter().map(|progress| progress.opened).min().unwrap_or(0);
    }

    /// Handles a fragment of the window at `position`. The caller has checked its shape.
    pub(super) fn handle_fragment(
        &mut self,
        now: Time,
        rank: Rank,
        position: u64,
        header: &Header,
        (len, all): (usize, u64),
    ) -> Result<Stored, Reject> {
        // wire: W-42
        if position < self.next {
            return Err(Reject::Stale);
        }
        // wire: W-28
        if position >= self.low() + self.pool.len() {
            return Err(Reject::BeyondPool);
        }
        // wire: W-27
        if position >= self.ranks[rank.index()].opened {
            return Err(Reject::Unopened);
        }
        if !self.occupancy.owes(rank, position) {
            return Err(Reject::Unowed);
        }
        self.pool.claim(position);
        let contribution = self.pool.contribution_mut(position, rank);
        // wire: W-29
        if contribution.mask != 0 && contribution.mask != header.mask {
            return Err(Reject::Shape);
        }
        let bit = 1 << header.fragment;
        if contribution.have & bit != 0 {
            return Ok(Stored::Duplicate);
        }
        contribution.mask = header.mask;
        contribution.have |= bit;
        contribution.complete = contribution.have == all;
        let complete = contribution.complete;
        let progress = &mut self.ranks[rank.index()];
        let Progress { answered, rtt, .. } = progress;
        contribution.nacked.limit(all);
        let again = header.flags.has(Flags::AGAIN);
        if let Some(took) = contribution.nacked.answer(bit, again, position, now, answered) {
            rtt.answered(took);
            progress.nack_trip = progress.nack_trip.into_iter().chain(took).min();
        }
        contribution.sent |= recovery::sent_before(header.fragment, again);
        if again {
            rtt.note_again(now, true);
            progress.flow.contributed.again += 1;
        }
        if recovery::proves_earlier(header.fragment, complete, again) {
            progress.sent = progress.sent.max(position);
        }
        let hole = contribution.sent & !contribution.have != 0 && !complete;
        if complete {
            progress.flow.contributed.add(len, all.count_ones());
            self.pool.claim(position).note_complete(rank, now);
        }
        if hole {
            self.note_if_lacking(now, rank, position);
        }
        self.search(now, rank, complete);
        let number = self.pool.number(position);
        Ok(if self.is_to_be_nacked(rank) { Stored::Gap(number) } else { Stored::New(number) })
    }

    /// Returns the first window that `rank` has not opened. Between two ops, this is the first
    /// window that can follow the earlier op: it is possible that no other rank has opened the
    /// rank's next op yet.
    pub(super) fn unopened(&self, rank: Rank) -> WindowId {
        let opened = self.ranks[rank.index()].opened;
        match self.sequence.at(opened) {
            Some(entry) if opened > entry.base => entry.window(opened),
            Some(entry) => self.sequence.after_previous(entry.op),
            None => self.sequence.window(opened),
        }
    }

    /// Returns whether to request opens from `rank` now, and if so, notes the time. Opens are
    /// requested at most once per retransmission timeout, since the answer to the last request may
    /// still be on its way.
    pub(super) fn may_nack_open(&mut self, rank: Rank, now: Time) -> bool {
        let progress = &mut self.ranks[rank.index()];
        let patience = progress.rtt.timeout();
        if progress.open_nacked_at.is_some_and(|at| now.since(at) < patience) {
            return false;
        }
        progress.open_nacked_at = Some(now);
        true
    }

    /// Returns the ranks that the next window waits for.
    pub(super) fn awaited(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks().filter(|rank| self.waits_for(*rank))
    }

    /// Returns whether the next window waits for `rank`: for its open, for its data or, when there
    /// is no room for one more result, for its acknowledgement of the oldest result.
    pub(super) fn waits_for(&self, rank: Rank) -> bool {
        let progress = &self.ranks[rank.index()];
        let low = self.low();
        if self.next >= low + self.pool.len() {
            // No rank may send this window until the oldest slot is free.
            low < self.resulted && progress.acked <= low
        } else if self.next >= self.agreed {
            progress.opened <= self.next
        } else if self.is_complete(self.next) {
            low < self.resulted && progress.acked <= low
        } else {
            self.owes_still(rank, self.next)
        }
    }

    fn owes_still(&self, rank: Rank, position: u64) -> bool {
        self.occupancy.owes(rank, position) && !self.pool.contribution(position, rank).complete
    }

    /// Returns whether every rank that owes the window at `position` has sent it completely.
    fn is_complete(&self, position: u64) -> bool {
        let complete = self.pool.get(position).map_or(0, |slot| slot.complete);
        complete >= self.occupancy.owing(position)
    }

    /// Returns the next window to fold, if its contributions are complete, the pool has room for
    /// its result, and congestion control admits the result's bytes. A window whose result has
    /// arrived from the parent comes first. Call this method again after the fold.
    pub(super) fn poll_ready(&mut self) -> Option<Ready> {
        if let Some(ready) = self.poll_from_parent() {
            return Some(ready);
        }
        let (position, entry) = self.advance()?;
        self.ready_at(position, entry)
    }

    /// Moves `next` past windows that no rank owes, and returns the next window to fold.
    pub(super) fn advance(&mut self) -> Option<(u64, StreamOp)> {
        loop {
            let entry = *self.sequence.at(self.next)?;
            if entry.failed {
                self.skip_failed(&entry);
                continue;
            }
            let mut end = entry.end().min(self.agreed);
            if self.at_parent.is_some() {
                // Even a window that no rank here owes may have a result from the parent, and that
                // result needs a slot.
                end = end.min(self.low() + self.pool.len());
            }
            let owed = self.occupancy.next(self.next, end);
            // wire: W-31
            // The last window of an op always has a result, so that every rank sees the op's end.
            let last = (end == entry.end()).then(|| entry.end() - 1);
            let Some(position) = owed.or(last) else {
                self.move_to(end);
                return None;
            };
            self.move_to(position);
            return Some((position, entry));
        }
    }

    fn ready_at(&mut self, position: u64, entry: StreamOp) -> Option<Ready> {
        if position >= self.low() + self.pool.len() {
            return None;
        }
        // wire: W-63
        // Forget the contributions that ranks sent before the aggregator knew that another rank
        // holds the sum.
        let whole = self.occupancy.holder(position);
        if whole.is_some() {
            for rank in self.ranks().filter(|rank| !self.occupancy.owes(*rank, position)) {
                self.pool.forget_window(rank, position);
            }
        }
        // wire: W-30
        if !self.is_complete(position) {
            return None;
        }
        let contributors = self.occupancy.owing(position);
        self.pool.claim(position);
        let union = self.pool.contributions(position).iter().fold(0, |union, c| union | c.mask);
        let len = entry.geometry.payload_len(entry.window(position).index, union);
        let admits = self.at_parent.is_some() || self.results.admits(len);
        admits.then_some(Ready { position, entry, union, contributors, whole })
    }

    /// Notes that `ready` has been folded.
    pub(super) fn handle_folded(&mut self, ready: &Ready) {
        self.keep(ready);
        self.note_waited(ready);
        self.move_to(ready.position + 1);
    }

    /// Records the result's mask, length and cut in the slot of its window.
    fn keep(&mut self, ready: &Ready) {
        let window = ready.entry.window(ready.position);
        let len = ready.entry.geometry.payload_len(window.index, ready.union);
        let slot = self.pool.claim(ready.position);
        slot.union = ready.union;
        slot.result_len = len;
        slot.cut = ready.entry.geometry.cut(self.cut, len);
    }

    /// Notes that the result of `ready` exists and is in flight from now on; `absent` lost ranks
    /// took no part in it.
    pub(super) fn handle_resulted(&mut self, ready: &Ready, absent: usize) {
        if self.at_parent.is_some() {
            self.pass_from_parent(ready);
        }
        let window = ready.entry.window(ready.position);
        let previous = core::mem::replace(&mut self.previous, window.index);
        let slot = self.pool.claim(ready.position);
        slot.previous = previous;
        slot.absent = absent;
        let len = slot.result_len;
        self.sent.add(len, u32::try_from(slot.cut.count(len)).unwrap_or(0));
        self.density.note((ready.position + 1).saturating_sub(self.results_end), len);
        self.results.on_sent(len);
        self.folded.push_back(ready.position);
        self.results_end = ready.position + 1;
        self.resulted = ready.position + 1;
        if ready.position + 1 == ready.entry.end() {
            self.previous = Header::NO_PREVIOUS;
        }
    }

    fn skip_failed(&mut self, entry: &StreamOp) {
        for progress in &mut self.ranks {
            progress.opened = progress.opened.max(entry.end());
        }
        self.update_agreed();
        self.move_to(entry.end());
        if self.at_parent.is_none() {
            self.pass_results(entry.end());
        }
    }

    fn move_to(&mut self, position: u64) {
        if position > self.next {
            self.occupancy.clear(self.next, position);
            self.next = position;
            if self.at_parent.is_none() {
                self.resulted = position;
            }
        }
    }
}
