//! One stream of a worker: windows scanned, opened and sent, and the results that have arrived.

use alloc::collections::VecDeque;
use core::ops::Range;

use super::sent::{Probe, Sent, Stalled};
use super::{Config, Path};
use crate::density::Density;
use crate::descriptor::Descriptor;
use crate::geometry::{Stripe, WINDOW_BYTES};
use crate::ids::{OpId, WindowId};
use crate::recovery::{self, Answered, Asked};
use crate::rtt::Rtt;
use crate::sequence::Sequence;
use crate::time::{Span, Time};
use crate::waited::Waited;
use crate::wire::{AskEntries, AskEntry};

/// A window whose result has arrived, at least in part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) position: u64,
    /// No window from here up to `position` has a result.
    pub(super) start: u64,
    pub(super) mask: u64,
    pub(super) have: u64,
    pub(super) all: u64,
    pub(super) len: usize,
    /// The fragments that must have been sent, since later ones have arrived.
    pub(super) sent: u64,
    /// The fragments that were asked for.
    pub(super) asked: Asked,
    /// Asks for the windows between the previous arrival and `start`.
    pub(super) gap_asked: Asked,
}

impl Arrival {
    pub(super) const fn complete(&self) -> bool {
        self.have == self.all
    }
}

/// A request for the missing part of an arrival and the gap before it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Lack {
    position: u64,
    /// The windows before `position` that have results, none of which has arrived.
    gap: Range<u64>,
    fragments: u64,
}

impl Lack {
    /// Returns how many entries the lack takes in an ask.
    const fn entries(&self) -> usize {
        let gap = match self.gap.end.saturating_sub(self.gap.start) {
            0 => 0,
            1 => 1,
            _ => 2,
        };
        gap + (self.fragments != 0) as usize
    }
}

/// One stream at a worker. Positions only grow: `cursor <= sent <= opened <= scanned`.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) lane: u8,
    pub(super) shard: u8,
    pub(super) sequence: Sequence,
    /// The position before which the non-zero blocks of all windows are known.
    pub(super) scanned: u64,
    /// The position before which opens have been sent for all windows.
    pub(super) opened: u64,
    /// The position before which all non-zero windows have been sent.
    pub(super) sent: u64,
    /// The lowest window that some rank has not acknowledged: the base of the credit.
    pub(super) low: u64,
    /// The first window without a result.
    pub(super) cursor: u64,
    /// The windows that were sent and have no result, in order.
    pub(super) in_flight: VecDeque<Sent>,
    /// How many windows in flight have fragments to send again.
    pub(super) repeats: usize,
    /// The results beyond the cursor, in order.
    pub(super) arrivals: VecDeque<Arrival>,
    /// The position from which to send opens again.
    pub(super) reopen: Option<u64>,
    /// The minimum size in windows of the next stretch; doubles within an op.
    pub(super) stretch: u64,
    /// The ask for results to send, if any, and whether it is a probe.
    pub(super) ask: Option<Stalled>,
    /// The position before which all results must have been sent.
    pub(super) results_sent: u64,
    /// The asks for windows after the last arrival.
    tail: Tail,
    /// The latest ask for results that was answered.
    pub(super) answered: Answered,
    /// When the stream last made progress, sent a probe, or was asked for data.
    pub(super) quiet_since: Time,
    /// Probes since the last progress; a wait that shows no lost result rounds it up to a step.
    pub(super) probes: u32,
    /// The last probe, until its answer.
    pub(super) probe: Option<Probe>,
    /// How many repetitions of data or asks in a row brought nothing. Then the path may drop all
    /// but small datagrams.
    pub(super) fruitless: u32,
    /// When results were last asked for.
    asked_at: Time,
    /// Whether the aggregator has reported since then that it has sent them.
    pub(super) is_told: bool,
    /// The results since the last acknowledgement.
    pub(super) unacked: Unacked,
    /// The mean size of results per window.
    density: Density,
    pub(super) ack_due: bool,
    /// The ranks that the stream waits for.
    pub(super) waited: Waited,
    /// Whether results arrive with congestion marks that have not been reported to the aggregator.
    pub(super) congested: bool,
    /// Whether sums are kept until every rank has them.
    keeps: bool,
    /// Whether results are acknowledged even while none is awaited.
    acks_at_rest: bool,
    pool: u64,
    max_stretch: u64,
}

/// The end of the windows after the last arrival that were asked for, and the asks.
#[derive(Debug, Clone, Copy, Default)]
struct Tail {
    to: u64,
    asked: Asked,
}

/// The results that have not been acknowledged.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unacked {
    /// The first unacknowledged window, with a result or not.
    from: u64,
    bytes: usize,
    since: Option<Time>,
}

impl Stream {
    pub(super) fn new(lane: u8, shard: u8, config: &Config, now: Time) -> Self {
        let pool = u64::from(config.pool_slots.max(1));
        // The limit on scanning ahead covers all shards together, so each shard gets a part of it.
        let stretch = (Self::MAX_STRETCH / u64::from(config.shards.max(1))).max(1);
        let reach = config.relay.map_or(u64::MAX, |relay| u64::from(relay.slots));
        let stretch = stretch.min(reach / 4).max(1);
        let slots = config.pool_slots.max(1) as usize;
        Self {
            lane,
            shard,
            // Room for the ops in flight; for ops between credit and cursor, each of which has a
            // result in a slot; and for the last op, which stays even if it failed.
            sequence: Sequence::new(usize::from(config.max_ops) + slots + 1, config.first_op),
            scanned: 0,
            opened: 0,
            sent: 0,
            low: 0,
            cursor: 0,
            in_flight: VecDeque::with_capacity(slots),
            repeats: 0,
            arrivals: VecDeque::with_capacity(slots),
            reopen: None,
            stretch: Self::MIN_STRETCH.min(stretch),
            ask: None,
            results_sent: 0,
            tail: Tail::default(),
            answered: Answered::NONE,
            quiet_since: now,
            probes: 0,
            probe: None,
            fruitless: 0,
            asked_at: Time(0),
            is_told: false,
            unacked: Unacked::default(),
            density: Density::default(),
            waited: Waited::new(),
            ack_due: false,
            congested: false,
            keeps: config.may_move,
            acks_at_rest: config.acks_at_rest || config.may_move,
            pool,
            max_stretch: stretch,
        }
    }

    /// Notes that a stretch was opened up to `end`.
    pub(super) fn note_opened(&mut self, end: u64) {
        if end > self.opened {
            self.opened = end;
            self.stretch = (self.stretch * 2).min(self.max_stretch);
        }
    }

    /// Returns the minimum size in windows of an op's first stretch.
    pub(super) fn min_stretch(&self) -> u64 {
        Self::MIN_STRETCH.min(self.max_stretch)
    }

    /// Returns the number of slots in the pool.
    pub(super) const fn pool(&self) -> u64 {
        self.pool
    }

    /// Returns whether there is room for `ops` more ops.
    pub(super) fn has_room_for(&mut self, ops: usize) -> bool {
        let cursor = self.cursor;
        self.sequence.make_room_for(ops, |failed| failed.end() <= cursor)
    }

    /// Appends an op. The caller has checked that there is room.
    pub(super) fn push(&mut self, now: Time, op: OpId, descriptor: &Descriptor, stripe: Stripe) {
        if self.cursor == self.sequence.end() {
            self.quiet_since = now;
            self.probes = 0;
        }
        self.sequence.push(op, descriptor, stripe);
    }

    /// Advances `scanned`; `scanned_of` returns how many windows of an op are scanned.
    pub(super) fn note_scanned(&mut self, scanned_of: impl Fn(OpId) -> u32) {
        while let Some(entry) = self.sequence.at(self.scanned) {
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

    /// Skips a failed op and forgets what was in flight for it. Calls `forgotten` with the bytes of
    /// each window that may still be on the path.
    pub(super) fn fail(&mut self, op: OpId, mut forgotten: impl FnMut(usize)) {
        let Some(failed) = self.sequence.get(op).map(|entry| entry.base..entry.end()) else {
            return;
        };
        self.sequence.fail(op);
        let Self { in_flight, repeats, arrivals, .. } = self;
        arrivals.retain(|arrival| !failed.contains(&arrival.position));
        in_flight.retain(|sent| {
            let keep = !failed.contains(&sent.position);
            if !keep {
                *repeats -= usize::from(sent.again != 0);
                forgotten(sent.on_path);
            }
            keep
        });
        self.skip_failed();
    }

    /// Moves every position that lies in a failed op past that op.
    pub(super) fn skip_failed(&mut self) {
        let Self { sequence, scanned, opened, sent, cursor, low, .. } = self;
        if sequence.has_failed() {
            for position in [scanned, opened, sent, cursor, low] {
                while let Some(entry) = sequence.at(*position).filter(|entry| entry.failed) {
                    *position = entry.end();
                }
            }
        }
        self.settle();
    }

    /// Drops results before the cursor, and ops before both the cursor and the credit: the credit
    /// may still name a window of an op that ended here. Also moves `sent` on, since windows before
    /// the cursor or the credit do not need this rank's share.
    fn settle(&mut self) {
        self.sent = self.sent.max(self.cursor.max(self.low).min(self.opened));
        while self.arrivals.front().is_some_and(|arrival| arrival.position < self.cursor) {
            self.arrivals.pop_front();
        }
        let done = self.cursor.min(self.low);
        while self.sequence.settle_before(done).is_some() {}
    }

    /// Returns whether the sum of a window has arrived.
    pub(super) fn is_summed(&self, position: u64) -> bool {
        let found = self.arrivals.binary_search_by_key(&position, |arrival| arrival.position);
        position < self.cursor || found.is_ok_and(|i| self.arrivals[i].complete())
    }

    /// Cancels the repetitions of a window whose sum has arrived. No shard lacks the window any
    /// more, and the tensor now holds the sum, which may have other blocks.
    pub(super) fn forget_repeats(&mut self, position: u64) {
        let sent = self.in_flight.binary_search_by_key(&position, |sent| sent.position);
        if let Ok(i) = sent {
            let again = core::mem::take(&mut self.in_flight[i].again);
            self.repeats -= usize::from(again != 0);
        }
    }

    /// Updates the lowest window that some rank has not acknowledged (wire: W-33). Returns whether
    /// it moved.
    pub(super) fn handle_low(&mut self, low: WindowId) -> bool {
        let low = self.sequence.position_from(low);
        let moves = low > self.low;
        if moves {
            self.low = low;
            self.settle();
        }
        moves
    }

    /// Moves the cursor over complete results. Returns an op once the cursor passes its last
    /// window; call again until `None`.
    pub(super) fn advance(&mut self, now: Time) -> Option<OpId> {
        loop {
            let first = *self.arrivals.front()?;
            if !first.complete() || first.start > self.cursor {
                return None;
            }
            self.unacked.bytes += first.len;
            self.unacked.since.get_or_insert(now);
            self.quiet_since = now;
            (self.probes, self.fruitless) = (0, 0);
            let entry = self.sequence.at(first.position).copied();
            self.density.note(first.position + 1 - self.cursor, first.len);
            self.cursor = first.position + 1;
            // Windows of zeros take up the pool as well.
            self.ack_due |= self.cursor - self.unacked.from >= (self.pool / 4).max(1)
                || self.unacked.bytes >= Self::MAX_UNACKED_BYTES;
            self.skip_failed();
            if let Some(entry) = entry.filter(|entry| entry.end() == first.position + 1) {
                return Some(entry.op);
            }
        }
    }

    /// Skips the windows before `position`: they need no results and no opens.
    pub(super) fn pass(&mut self, position: u64) {
        let Self { cursor, scanned, opened, sent, .. } = self;
        for at in [cursor, scanned, opened, sent] {
            *at = position.max(*at);
        }
        self.skip_failed();
    }

    /// Returns the acknowledgement to write into a header, and marks it as sent (wire: W-32).
    pub(super) fn acknowledge(&mut self) -> WindowId {
        self.unacked = Unacked { from: self.cursor, bytes: 0, since: None };
        self.ack_due = false;
        self.sequence.window(self.cursor)
    }

    /// Notes that the next window has no slot, which only acknowledgements free. Schedules this
    /// rank's acknowledgement at once if it has no data in flight.
    pub(super) fn note_no_slot(&mut self) {
        self.ack_due |= self.in_flight.is_empty() && self.unacked.from < self.cursor;
    }

    /// Estimates how many bytes of results are still to come.
    pub(super) fn backlog(&self) -> u64 {
        self.density.of(self.sequence.end() - self.cursor)
    }

    /// Returns whether results are awaited.
    pub(super) fn awaits(&self) -> bool {
        self.cursor < self.opened
    }

    /// Returns whether this rank keeps sums that some rank may lack.
    fn is_unsettled(&self) -> bool {
        self.keeps && self.low < self.cursor
    }

    /// Stops keeping sums for other ranks.
    pub(super) fn forget_kept(&mut self) {
        self.keeps = false;
    }

    /// Returns whether to probe after a silence.
    fn listens(&self) -> bool {
        self.awaits() || self.is_unsettled()
    }

    /// Returns whether to acknowledge even a few results after a delay.
    fn acknowledges(&self) -> bool {
        self.awaits() || self.acks_at_rest
    }

    /// Returns when to probe. Results may queue behind those of other streams, so the last result
    /// of any stream, at `heard`, puts the probe off by up to twice the patience.
    fn probe_at(&self, path: &Path, heard: Time) -> Time {
        let patience = path.patience(self.probes / Self::PROBES_A_STEP);
        let patience = match self.probes {
            probes if self.awaits() || probes == 0 => patience,
            // No result is awaited, so the probe is not urgent.
            probes => {
                let longer = Self::REST_PATIENCE.0 << probes.min(Self::REST_STEPS);
                Span(patience.0.max(longer))
            }
        };
        let patience = patience.max(self.fruitless_pause());
        let most = self.quiet_since + patience + patience;
        self.quiet_since.max(heard.min(most)) + patience
    }

    /// Returns the delay before the next repetition, after several that brought nothing.
    fn fruitless_pause(&self) -> Span {
        match self.fruitless.checked_sub(Self::FRUITLESS) {
            None => Span::ZERO,
            Some(more) => Span(Self::FRUITLESS_PATIENCE.0 << more.min(5)),
        }
    }

    pub(super) fn timeout(&self, path: &Path, heard: Time) -> Time {
        let probe = if self.listens() && self.ask.is_none() {
            self.probe_at(path, heard)
        } else {
            Time::NEVER
        };
        let ack = match self.unacked.since {
            Some(since) if !self.ack_due && self.acknowledges() => since + Self::MAX_ACK_DELAY,
            _ => Time::NEVER,
        };
        probe.min(ack)
    }

    pub(super) fn handle_timeout(&mut self, now: Time, path: &Path, heard: Time) {
        if let Some(since) = self.unacked.since.filter(|_| self.acknowledges()) {
            self.ack_due |= since + Self::MAX_ACK_DELAY <= now;
        }
        // wire: W-39, W-63
        if self.listens() && self.probe_at(path, heard) <= now {
            self.ask = Some(Stalled(true));
            self.quiet_since = now;
            self.probes += 1;
        }
    }

    /// Returns whether to ask for lost results now: the first lost one holds up all others, or
    /// enough windows lack some (wire: W-38).
    pub(super) fn is_to_ask(&self, now: Time, asks: &Rtt) -> bool {
        let first = self.lacking(now, asks).enumerate().find(|(_, lack)| lack.entries() > 0);
        first.is_some_and(|(at, lack)| {
            at == 0 || self.results_sent >= lack.position + recovery::GATHERED_WINDOWS
        }) || self.lack_of_tail(now, asks).entries() > 0
    }

    /// Returns whether to ask now for lost fragments of the first arrival.
    pub(super) fn is_to_ask_of_first(&self, now: Time, asks: &Rtt) -> bool {
        let first = self.arrivals.front();
        first.is_some_and(|first| self.lack(first, 0..0, now, asks).entries() > 0)
    }

    /// Returns the entries of an ask: results that must have been lost, except those whose answer
    /// may still arrive. If `stalled`, adds a request for a wait, which arrives behind all results
    /// on the path, so that no result is repeated needlessly.
    pub(super) fn missing<'a>(
        &'a self,
        now: Time,
        asks: &'a Rtt,
        stalled: bool,
    ) -> impl Iterator<Item = AskEntry> + 'a {
        let entry = |position: u64, fragments: u64| AskEntry {
            window: self.sequence.window(position),
            fragments,
        };
        self.lacking(now, asks)
            .chain([self.lack_of_tail(now, asks)])
            .flat_map(move |Lack { position, gap, fragments }| {
                // A gap is known only by its last window, and may hold more results.
                let last = (!gap.is_empty()).then(|| gap.end - 1);
                let more = last.filter(|last| *last > gap.start).map(|_| entry(gap.start, 0));
                let last = last.map(|last| entry(last, u64::MAX));
                let rest = (fragments != 0).then(|| entry(position, fragments));
                [more, last, rest].into_iter().flatten()
            })
            .chain(stalled.then(|| entry(self.cursor, 0)))
    }

    /// Notes that the entries of [`Self::missing`] were asked for, as many as fit an ask.
    pub(super) fn note_asked(&mut self, now: Time, asks: &Rtt) {
        let mut room = AskEntries::MAX;
        let mut expected = self.cursor;
        let tail = self.lack_of_tail(now, asks);
        if self.lacking(now, asks).any(|lack| lack.entries() > 0) || tail.entries() > 0 {
            // wire: W-77
            self.fruitless += u32::from(core::mem::take(&mut self.is_told));
            self.asked_at = now;
        }
        for at in 0..self.arrivals.len() {
            let arrival = self.arrivals[at];
            let lack = self.lack(&arrival, expected..arrival.start, now, asks);
            let Some(left) = room.checked_sub(lack.entries()) else { return };
            room = left;
            expected = arrival.position + 1;
            let arrival = &mut self.arrivals[at];
            arrival.asked.note(lack.fragments, now);
            if !lack.gap.is_empty() {
                arrival.gap_asked.note(u64::MAX, now);
            }
        }
        if !tail.gap.is_empty() && room >= tail.entries() {
            if self.tail.to <= expected {
                self.tail.asked = Asked::default();
            }
            self.tail.to = tail.gap.end;
            self.tail.asked.note(u64::MAX, now);
        }
    }

    fn lacking<'a>(&'a self, now: Time, asks: &'a Rtt) -> impl Iterator<Item = Lack> + 'a {
        let mut expected = self.cursor;
        self.arrivals.iter().map(move |arrival| {
            let gap = expected..arrival.start;
            expected = arrival.position + 1;
            self.lack(arrival, gap, now, asks)
        })
    }

    /// Returns the first window after the last arrival.
    fn tail_start(&self) -> u64 {
        self.arrivals.back().map_or(self.cursor, |last| last.position + 1)
    }

    /// Returns what to ask for after the last arrival: results that were sent and never arrived.
    fn lack_of_tail(&self, now: Time, asks: &Rtt) -> Lack {
        let start = self.tail_start();
        let Tail { to, asked } = self.tail;
        let again = asked.due(u64::MAX, start, self.answered, now, asks) != 0;
        let again = again && !self.is_held_back(now);
        let start = if again { start } else { start.max(to) };
        Lack { position: start, gap: start..self.results_sent.max(start), fragments: 0 }
    }

    /// Returns what to ask for of an arrival and of the gap before it.
    fn lack(&self, arrival: &Arrival, gap: Range<u64>, now: Time, asks: &Rtt) -> Lack {
        let Arrival { position, all, have, sent, asked, gap_asked, .. } = *arrival;
        if self.is_held_back(now) {
            return Lack { position, gap: 0..0, fragments: 0 };
        }
        let missing = all & !have;
        let lost = if position < self.results_sent { missing } else { missing & sent };
        let fragments = asked.due(lost, position, self.answered, now, asks);
        let lost = if position <= self.results_sent { u64::MAX } else { 0 };
        let due = gap_asked.due(lost, gap.start, self.answered, now, asks) != 0;
        Lack { position, gap: if due { gap } else { 0..0 }, fragments }
    }

    /// Returns whether asks are delayed because several in a row brought nothing.
    fn is_held_back(&self, now: Time) -> bool {
        now.since(self.asked_at) < self.fruitless_pause()
    }

    /// Handles the answer to a probe: all results of windows before `end` have been sent. Returns
    /// true if none of them is missing. The stream then waits for other ranks, so its patience
    /// grows more than after an unanswered probe, which may just be lost.
    pub(super) fn note_wait(&mut self, now: Time, end: WindowId, asks: &Rtt) -> bool {
        let end = self.sequence.position_from(end).min(self.opened);
        self.results_sent = self.results_sent.max(end);
        self.quiet_since = now;
        if end <= self.cursor {
            self.probes = (self.probes / Self::PROBES_A_STEP + 1) * Self::PROBES_A_STEP;
            return true;
        }
        // Lost results are urgent. `probes` is 1, not 0: an answer to another probe may still
        // arrive, so the next probe must not count as the first.
        self.probes = 1;
        self.is_told = true;
        if self.is_to_ask(now, asks) {
            self.ask.get_or_insert(Stalled(false));
        }
        false
    }

    /// Returns the asks that cover the window at `position`, which had not arrived, and those that
    /// cover the gap between the last arrival and the window.
    pub(super) fn asked_behind(&self, position: u64) -> (Asked, Asked) {
        match self.tail {
            Tail { to, asked } if position < to => (asked, Asked::default()),
            Tail { to, asked } if self.tail_start() < to => (Asked::default(), asked),
            _ => Default::default(),
        }
    }

    /// The base probe interval at rest; doubles with each probe, up to `REST_STEPS` times.
    const REST_PATIENCE: Span = Span::from_millis(8);
    const REST_STEPS: u32 = 7;
    /// Fruitless repetitions after which the next is delayed; the delay doubles up to a second.
    const FRUITLESS: u32 = 3;
    const FRUITLESS_PATIENCE: Span = Span::from_millis(32);
    /// How many probes without an answer double the patience once.
    const PROBES_A_STEP: u32 = 4;
    /// Windows in the first stretch of an op; stretches double up to [`Self::MAX_STRETCH`].
    const MIN_STRETCH: u64 = 4;
    /// The maximum stretch: opening larger ones would save too little to justify the wait.
    const MAX_STRETCH: u64 = 64;
    /// The maximum delay before a result is acknowledged.
    const MAX_ACK_DELAY: Span = Span::from_millis(1);
    /// How many unacknowledged bytes of results trigger an acknowledgement at once.
    const MAX_UNACKED_BYTES: usize = 4 * WINDOW_BYTES;
}
