//! One stream of a job: who opened what, what has arrived, what may be folded next.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;

use super::occupancy::{OPEN_AHEAD, Occupancy};
use super::pool::{Contribution, Pool};
use crate::congestion::Congestion;
use crate::error::Reject;
use crate::geometry::{Fragmentation, Stripe};
use crate::ids::{OpId, Rank, WindowId};
use crate::rtt::Rtt;
use crate::sequence::{Sequence, StreamOp};
use crate::time::{Span, Time};
use crate::wire::{AskEntry, Flags, Header, Open};

/// What one rank has done in a stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    /// Which windows before this position the rank owes is known.
    pub(super) opened: u64,
    /// The rank has the results of all windows before this position.
    pub(super) acked: u64,
    /// The lowest window the rank owes and has not sent whole; a hint, never too high.
    oldest_missing: u64,
    /// After the highest window the rank has sent whole.
    newest_complete: u64,
    /// When the rank was last asked for fragments, until it answers.
    asked_at: Option<Time>,
    /// When the rank was last asked for opens, until it moves on.
    open_asked_at: Option<Time>,
    /// Round trips from an ask to what it brought.
    rtt: Rtt,
}

impl Progress {
    const NEW: Self = Self {
        opened: 0,
        acked: 0,
        oldest_missing: 0,
        newest_complete: 0,
        asked_at: None,
        open_asked_at: None,
        rtt: Rtt::new(Span::from_millis(1)),
    };

    /// Whether an ask is out whose answer may still be under way.
    fn awaits_answer(&self, now: Time) -> bool {
        self.asked_at.is_some_and(|at| now.since(at) < self.rtt.timeout())
    }
}

/// The next window of a stream whose contributions are complete.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ready {
    pub(super) position: u64,
    pub(super) entry: StreamOp,
    pub(super) union: u64,
    pub(super) contributors: u32,
}

/// Where an op that a rank opens belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placed {
    /// At this position.
    At(u64),
    /// After an op whose open is missing.
    Missing,
    /// Nowhere: it failed.
    Failed,
}

/// What a stored fragment means for the rank that sent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// It had arrived before.
    Duplicate,
    /// It is new; the slot's number.
    New(u32),
    /// It is new, and windows before it are missing although they were sent earlier.
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
    /// Every rank's open covers the windows before this.
    agreed: u64,
    /// The first window that is not folded.
    pub(super) next: u64,
    /// Folded windows that some rank has not acknowledged, in order.
    pub(super) folded: VecDeque<u64>,
    /// The last window with a result of the op that `next` lies in.
    previous: u32,
    /// The lowest unacknowledged window that the ranks have been told of.
    announced: u64,
    cut: Fragmentation,
}

impl Stream {
    pub(super) fn new(
        pool: Pool,
        world: usize,
        max_ops: usize,
        results: Congestion,
        cut: Fragmentation,
    ) -> Self {
        let slots = usize::try_from(pool.len()).unwrap_or(usize::MAX);
        Self {
            sequence: Sequence::new(max_ops),
            ranks: vec![Progress::NEW; world].into(),
            pool,
            results,
            occupancy: Occupancy::new(world),
            agreed: 0,
            next: 0,
            folded: VecDeque::with_capacity(slots),
            previous: Header::NO_PREVIOUS,
            announced: 0,
            cut,
        }
    }

    /// The lowest window that some rank has not acknowledged: the base of all credits.
    pub(super) fn low(&self) -> u64 {
        self.folded.front().copied().unwrap_or(self.next)
    }

    /// The credit to write into a header (wire: W-33).
    pub(super) fn announce(&mut self) -> WindowId {
        self.announced = self.low();
        self.sequence.window(self.announced)
    }

    /// Whether the ranks should be told of credits although there is no result to tell them with.
    pub(super) fn owes_credit(&self) -> bool {
        self.low() - self.announced > self.pool.len() / 4
    }

    /// Takes the acknowledgement of a rank.
    pub(super) fn handle_ack(&mut self, rank: Rank, ack: WindowId) {
        // wire: W-32
        // What is not folded cannot have been received, whatever a rank says.
        let acked = self.sequence.position_from(ack).min(self.next);
        let progress = &mut self.ranks[rank.index()];
        progress.acked = progress.acked.max(acked);
    }

    /// Gives back the oldest slot if every rank has acknowledged its window.
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

    /// Gives back the oldest op if all its windows are folded and acknowledged.
    pub(super) fn settle(&mut self) -> Option<StreamOp> {
        self.sequence.settle_before(self.low())
    }

    /// Finds a place for an op that a rank opens, given the op it names before it.
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
        // Others have gone past an op that they do not have in this stream: a disagreement, which
        // the shard of the op's first window reports. Here it fails without a word.
        let base = self.sequence.position_from(WindowId::new(op, 0));
        if !self.joined_up(rank, open.after, op, base) {
            return Placed::Missing;
        }
        self.sequence.insert_failed(op, &open.descriptor);
        Placed::Failed
    }

    /// Whether the rank has opened all that it has in this stream before `op` at `base`. Ops that
    /// it skips are not the same at every rank: they fail here without a word.
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

    /// Takes the stretch of an open that starts at `position`. Returns false when the stretch
    /// before it is missing.
    pub(super) fn handle_stretch(&mut self, rank: Rank, position: u64, open: &Open) -> bool {
        let opened = self.ranks[rank.index()].opened;
        // wire: W-34
        if position > opened {
            return false;
        }
        // wire: W-35
        let end = (position + u64::from(open.windows)).min(self.low() + OPEN_AHEAD);
        if end > opened {
            let [from, to] = [opened, end].map(|at| usize::try_from(at - position).unwrap_or(0));
            self.occupancy.set(rank, opened, &open.occupancy()[from..to]);
            self.ranks[rank.index()].opened = end;
            self.ranks[rank.index()].open_asked_at = None;
            self.update_agreed();
        }
        true
    }

    pub(super) fn update_agreed(&mut self) {
        self.agreed = self.ranks.iter().map(|progress| progress.opened).min().unwrap_or(0);
    }

    /// Takes a fragment of `entry`'s window at `position`, whose shape has been checked.
    pub(super) fn handle_fragment(
        &mut self,
        now: Time,
        rank: Rank,
        position: u64,
        header: &Header,
        len: usize,
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
        contribution.complete = contribution.have == self.cut.all(len);
        let complete = contribution.complete;
        let progress = &mut self.ranks[rank.index()];
        if header.flags.has(Flags::AGAIN)
            && let Some(asked_at) = progress.asked_at.take()
        {
            progress.rtt.sample(now.since(asked_at));
        }
        let number = self.pool.number(position);
        if !complete {
            return Ok(Stored::New(number));
        }
        self.pool.claim(position).complete += 1;
        let gap = self.note_complete(rank, position);
        let due = gap && !self.ranks[rank.index()].awaits_answer(now);
        Ok(if due { Stored::Gap(number) } else { Stored::New(number) })
    }

    /// Notes that `rank` is complete at `position`; returns whether it lacks windows before it.
    fn note_complete(&mut self, rank: Rank, position: u64) -> bool {
        let mut progress = self.ranks[rank.index()];
        progress.newest_complete = progress.newest_complete.max(position + 1);
        let mut oldest = progress.oldest_missing.max(self.next);
        while let Some(owed) = self.occupancy.next_of(rank, oldest, progress.newest_complete) {
            oldest = owed;
            if !self.pool.contribution(owed, rank).complete {
                break;
            }
            oldest += 1;
        }
        progress.oldest_missing = oldest;
        self.ranks[rank.index()] = progress;
        oldest + 1 < progress.newest_complete
    }

    /// What `rank` owes and has not sent. Unless it is `stalled`, only windows before the newest
    /// that it has sent whole: the others may be under way.
    pub(super) fn missing_of(
        &self,
        rank: Rank,
        stalled: bool,
    ) -> impl Iterator<Item = AskEntry> + '_ {
        let progress = &self.ranks[rank.index()];
        let end = if stalled {
            progress.opened.min(self.low() + self.pool.len())
        } else {
            progress.newest_complete
        };
        let mut at = self.next;
        core::iter::from_fn(move || {
            loop {
                let position = self.occupancy.next_of(rank, at, end)?;
                at = position + 1;
                let contribution = self.pool.contribution(position, rank);
                if !contribution.complete {
                    return Some(self.ask_entry(position, contribution));
                }
            }
        })
    }

    fn ask_entry(&self, position: u64, contribution: Contribution) -> AskEntry {
        let window = self.sequence.window(position);
        let len = self
            .sequence
            .at(position)
            .map_or(0, |entry| entry.geometry.payload_len(window.index, contribution.mask));
        let all = if contribution.mask == 0 { u64::MAX } else { self.cut.all(len) };
        AskEntry { window, fragments: all & !contribution.have }
    }

    /// From where on the opens of `rank` are missing. Between two ops it is whatever the rank has
    /// after the first of them, which may be none that others have.
    pub(super) fn unopened(&self, rank: Rank) -> WindowId {
        let opened = self.ranks[rank.index()].opened;
        match self.sequence.at(opened) {
            Some(entry) if opened > entry.base => entry.window(opened),
            Some(entry) => self.sequence.after_previous(entry.op),
            None => self.sequence.window(opened),
        }
    }

    /// Whether to ask `rank` for its opens: once a round trip, or answers would breed questions.
    pub(super) fn may_ask_open(&mut self, rank: Rank, now: Time) -> bool {
        let progress = &mut self.ranks[rank.index()];
        let patience = progress.rtt.timeout();
        if progress.open_asked_at.is_some_and(|at| now.since(at) < patience) {
            return false;
        }
        progress.open_asked_at = Some(now);
        true
    }

    /// Notes that `rank` has been asked for fragments.
    pub(super) fn note_asked(&mut self, rank: Rank, now: Time) {
        self.ranks[rank.index()].asked_at = Some(now);
    }

    /// Whether the next window waits for `rank`.
    pub(super) fn waits_for(&self, rank: Rank) -> bool {
        if self.next < self.agreed {
            self.occupancy.owes(rank, self.next)
                && !self.pool.contribution(self.next, rank).complete
        } else {
            self.ranks[rank.index()].opened <= self.next
        }
    }

    /// Moves on over windows that nobody owes, and returns the next that is complete, if the
    /// pool has room for its result and the path for its bytes. Call again after folding it.
    pub(super) fn poll_ready(&mut self) -> Option<Ready> {
        loop {
            let entry = *self.sequence.at(self.next)?;
            if entry.failed {
                self.skip_failed(&entry);
                continue;
            }
            let end = entry.end().min(self.agreed);
            let owed = self.occupancy.next(self.next, end);
            // wire: W-31
            // The last window of an op always has a result, so that every rank sees the op's end.
            let last = (self.agreed >= entry.end()).then(|| entry.end() - 1);
            let Some(position) = owed.or(last) else {
                self.move_to(end);
                return None;
            };
            self.move_to(position);
            return self.ready_at(position, entry);
        }
    }

    fn ready_at(&mut self, position: u64, entry: StreamOp) -> Option<Ready> {
        if position >= self.low() + self.pool.len() {
            return None;
        }
        let contributors = self.occupancy.owing(position);
        let complete = self.pool.get(position).map_or(0, |slot| slot.complete);
        // wire: W-30
        if complete < contributors {
            return None;
        }
        self.pool.claim(position);
        let union = self.pool.contributions(position).iter().fold(0, |union, c| union | c.mask);
        let len = entry.geometry.payload_len(entry.window(position).index, union);
        self.results.admits(len).then_some(Ready { position, entry, union, contributors })
    }

    /// Notes that `ready` has been folded: its result is in flight from now on.
    pub(super) fn handle_folded(&mut self, ready: &Ready) -> usize {
        let window = ready.entry.window(ready.position);
        let len = ready.entry.geometry.payload_len(window.index, ready.union);
        let previous = core::mem::replace(&mut self.previous, window.index);
        let slot = self.pool.claim(ready.position);
        slot.union = ready.union;
        slot.result_len = len;
        slot.previous = previous;
        self.results.on_sent(len);
        self.folded.push_back(ready.position);
        self.move_to(ready.position + 1);
        if ready.position + 1 == ready.entry.end() {
            self.previous = Header::NO_PREVIOUS;
        }
        len
    }

    fn skip_failed(&mut self, entry: &StreamOp) {
        for progress in &mut self.ranks {
            progress.opened = progress.opened.max(entry.end());
        }
        self.update_agreed();
        self.previous = Header::NO_PREVIOUS;
        self.move_to(entry.end());
    }

    fn move_to(&mut self, position: u64) {
        if position > self.next {
            self.occupancy.clear(self.next, position);
            self.next = position;
        }
    }
}
