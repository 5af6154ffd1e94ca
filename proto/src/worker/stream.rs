//! One stream of a worker: what is scanned, opened, sent, and which results are in.

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

/// A window of which some of the result has arrived.
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
    /// What of them was asked for.
    pub(super) asked: Asked,
    /// What was asked for of the windows between `start` and the arrival before.
    pub(super) gap_asked: Asked,
}

impl Arrival {
    pub(super) const fn complete(&self) -> bool {
        self.have == self.all
    }
}

/// What to ask for of a window of which some has arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Lack {
    position: u64,
    /// The windows before it that have results, none of which has arrived.
    gap: Range<u64>,
    fragments: u64,
}

impl Lack {
    /// The entries that it takes in an ask.
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
    /// Blocks are known of all windows before this.
    pub(super) scanned: u64,
    /// Opens have been sent for all windows before this.
    pub(super) opened: u64,
    /// All windows before this that are non-zero have been sent.
    pub(super) sent: u64,
    /// The lowest window that some rank has not acknowledged: the base of the credit.
    pub(super) low: u64,
    /// The first window without a result.
    pub(super) cursor: u64,
    /// Windows sent and not resulted, in order.
    pub(super) in_flight: VecDeque<Sent>,
    /// How many of them are asked for again.
    pub(super) repeats: usize,
    /// Results beyond the cursor, in order.
    pub(super) arrivals: VecDeque<Arrival>,
    /// Opens are to be sent again from here.
    pub(super) reopen: Option<u64>,
    /// Least windows of the next stretch to open; doubles within an op.
    pub(super) stretch: u64,
    /// Results are to be asked for, and whether because nothing is heard.
    pub(super) ask: Option<Stalled>,
    /// All results of windows before this must have been sent.
    pub(super) results_sent: u64,
    /// What was asked for behind the last arrival.
    tail: Tail,
    /// The latest ask for results that was answered.
    pub(super) answered: Answered,
    /// When something last moved, or was last asked for.
    pub(super) quiet_since: Time,
    /// Questions since something last moved, and more for each answer that others are waited for.
    pub(super) probes: u32,
    /// The last of them, until an answer.
    pub(super) probe: Option<Probe>,
    /// How often nothing has come of all that was sent or asked for again: the path may take small
    /// datagrams and no others.
    pub(super) fruitless: u32,
    /// When results were last asked for, and whether the aggregator has said since that it has sent
    /// them.
    asked_at: Time,
    pub(super) is_told: bool,
    /// Results since the last acknowledgement.
    pub(super) unacked: Unacked,
    /// Bytes of the results of windows.
    density: Density,
    pub(super) ack_due: bool,
    /// Whom it waits for.
    pub(super) waited: Waited,
    /// Results arrive with congestion marks, and the aggregator has not been told.
    pub(super) congested: bool,
    /// Sums are kept until every rank has them.
    keeps: bool,
    /// Results are acknowledged also when nothing is waited for.
    acks_at_rest: bool,
    pool: u64,
    max_stretch: u64,
}

/// The windows behind the last arrival whose results were asked for: up to which.
#[derive(Debug, Clone, Copy, Default)]
struct Tail {
    to: u64,
    asked: Asked,
}

/// Results that have not been acknowledged.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unacked {
    /// The first window that is not, with a result or not.
    from: u64,
    bytes: usize,
    since: Option<Time>,
}

impl Stream {
    pub(super) fn new(lane: u8, shard: u8, config: &Config, now: Time) -> Self {
        let pool = u64::from(config.pool_slots.max(1));
        // All shards together scan no further ahead than this allows each of them.
        let stretch = (Self::MAX_STRETCH / u64::from(config.shards.max(1))).max(1);
        let reach = config.relay.map_or(u64::MAX, |relay| u64::from(relay.slots));
        let stretch = stretch.min(reach / 4).max(1);
        let slots = config.pool_slots.max(1) as usize;
        Self {
            lane,
            shard,
            // Those in flight; those between the credit and the cursor, each of which has a result
            // in a slot; and the last, which stays although it failed.
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

    /// Least windows of the first stretch of an op.
    pub(super) fn min_stretch(&self) -> u64 {
        Self::MIN_STRETCH.min(self.max_stretch)
    }

    /// Slots of the pool.
    pub(super) const fn pool(&self) -> u64 {
        self.pool
    }

    /// Whether there is room for so many more ops.
    pub(super) fn has_room_for(&mut self, ops: usize) -> bool {
        let cursor = self.cursor;
        self.sequence.make_room_for(ops, |failed| failed.end() <= cursor)
    }

    /// Appends an op. There is room for it.
    pub(super) fn push(&mut self, now: Time, op: OpId, descriptor: &Descriptor, stripe: Stripe) {
        if self.cursor == self.sequence.end() {
            self.quiet_since = now;
            self.probes = 0;
        }
        self.sequence.push(op, descriptor, stripe);
    }

    /// Moves `scanned` as far as the ops are, given how many windows of an op are scanned.
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

    /// Skips an op that failed, and forgets what was in flight for it: `forgotten` is told how
    /// much.
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

    /// Moves every position that lies in a failed op past it.
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

    /// Drops results that lie before the cursor, and ops that lie before the credit as well: its
    /// base may still be named by a window of an op that ended here. What lies before either has
    /// no use for this rank's share, sent or not.
    fn settle(&mut self) {
        self.sent = self.sent.max(self.cursor.max(self.low).min(self.opened));
        while self.arrivals.front().is_some_and(|arrival| arrival.position < self.cursor) {
            self.arrivals.pop_front();
        }
        let done = self.cursor.min(self.low);
        while self.sequence.settle_before(done).is_some() {}
    }

    /// Whether the sum of a window has arrived.
    pub(super) fn is_summed(&self, position: u64) -> bool {
        let found = self.arrivals.binary_search_by_key(&position, |arrival| arrival.position);
        position < self.cursor || found.is_ok_and(|i| self.arrivals[i].complete())
    }

    /// Repeats nothing of a window whose sum has arrived: no shard lacks it any more, and in its
    /// place in the tensor lies the sum, which may be of other blocks.
    pub(super) fn forget_repeats(&mut self, position: u64) {
        let sent = self.in_flight.binary_search_by_key(&position, |sent| sent.position);
        if let Ok(i) = sent {
            let again = core::mem::take(&mut self.in_flight[i].again);
            self.repeats -= usize::from(again != 0);
        }
    }

    /// Takes the lowest window that some rank has not acknowledged (wire: W-33). Returns whether it
    /// is another than before.
    pub(super) fn handle_low(&mut self, low: WindowId) -> bool {
        let low = self.sequence.position_from(low);
        let moves = low > self.low;
        if moves {
            self.low = low;
            self.settle();
        }
        moves
    }

    /// Moves the cursor over results that are complete. Returns the op whose last window it
    /// passed, if it did; call again until `None`.
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

    /// Needs no result of windows before `position`, nor need anybody be told of them.
    pub(super) fn pass(&mut self, position: u64) {
        let Self { cursor, scanned, opened, sent, .. } = self;
        for at in [cursor, scanned, opened, sent] {
            *at = position.max(*at);
        }
        self.skip_failed();
    }

    /// The acknowledgement to write into a header; it is owed no more (wire: W-32).
    pub(super) fn acknowledge(&mut self) -> WindowId {
        self.unacked = Unacked { from: self.cursor, bytes: 0, since: None };
        self.ack_due = false;
        self.sequence.window(self.cursor)
    }

    /// Notes that the next window has no slot, which only acknowledgements free: this rank's comes
    /// at once if nothing else of its own will take it along.
    pub(super) fn note_no_slot(&mut self) {
        self.ack_due |= self.in_flight.is_empty() && self.unacked.from < self.cursor;
    }

    /// About how many bytes of results are still to come.
    pub(super) fn backlog(&self) -> u64 {
        self.density.of(self.sequence.end() - self.cursor)
    }

    /// Whether results are awaited.
    pub(super) fn awaits(&self) -> bool {
        self.cursor < self.opened
    }

    /// Whether sums are kept of which it is not known that every rank has them.
    fn is_unsettled(&self) -> bool {
        self.keeps && self.low < self.cursor
    }

    /// Keeps nothing for others any more.
    pub(super) fn forget_kept(&mut self) {
        self.keeps = false;
    }

    /// Whether a silence is to be ended by a question.
    fn listens(&self) -> bool {
        self.awaits() || self.is_unsettled()
    }

    /// Whether results are to be acknowledged although there are few of them.
    fn acknowledges(&self) -> bool {
        self.awaits() || self.acks_at_rest
    }

    /// When the silence has lasted too long. While results of other streams come in, those of this
    /// one may wait behind them: then `heard`, when the last came, puts the probe off for a while.
    fn probe_at(&self, path: &Path, heard: Time) -> Time {
        let patience = path.patience(self.probes / Self::PROBES_A_STEP);
        let patience = match self.probes {
            probes if self.awaits() || probes == 0 => patience,
            // Nobody waits for it.
            probes => {
                let longer = Self::REST_PATIENCE.0 << probes.min(Self::REST_STEPS);
                Span(patience.0.max(longer))
            }
        };
        let patience = patience.max(self.fruitless_pause());
        let most = self.quiet_since + patience + patience;
        self.quiet_since.max(heard.min(most)) + patience
    }

    /// How long the next repetition is put off, after several of which nothing came.
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

    /// Whether results are lost that are to be asked for now: the first of them holds up all
    /// others, or enough has gathered (wire: W-38).
    pub(super) fn is_to_ask(&self, now: Time, asks: &Rtt) -> bool {
        let first = self.lacking(now, asks).enumerate().find(|(_, lack)| lack.entries() > 0);
        first.is_some_and(|(at, lack)| {
            at == 0 || self.results_sent >= lack.position + recovery::GATHERED_WINDOWS
        }) || self.lack_of_tail(now, asks).entries() > 0
    }

    /// The same of the first arrival alone.
    pub(super) fn is_to_ask_of_first(&self, now: Time, asks: &Rtt) -> bool {
        let first = self.arrivals.front();
        first.is_some_and(|first| self.lack(first, 0..0, now, asks).entries() > 0)
    }

    /// What results to ask for: those that must have been lost, but for what is asked for and may
    /// still come. When `stalled`, also for a sign of what else there is: if it is on its way, the
    /// sign comes behind it, and nothing is sent in vain.
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
                // All that is known of a gap is its last window, and that it may hold more.
                let last = (!gap.is_empty()).then(|| gap.end - 1);
                let more = last.filter(|last| *last > gap.start).map(|_| entry(gap.start, 0));
                let last = last.map(|last| entry(last, u64::MAX));
                let rest = (fragments != 0).then(|| entry(position, fragments));
                [more, last, rest].into_iter().flatten()
            })
            .chain(stalled.then(|| entry(self.cursor, 0)))
    }

    /// Notes that what [`Self::missing`] names is asked for, as far as it fits an ask.
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

    /// The first window behind the last arrival.
    fn tail_start(&self) -> u64 {
        self.arrivals.back().map_or(self.cursor, |last| last.position + 1)
    }

    /// What to ask for behind the last arrival, of which nothing is known but that it was sent.
    fn lack_of_tail(&self, now: Time, asks: &Rtt) -> Lack {
        let start = self.tail_start();
        let Tail { to, asked } = self.tail;
        let again = asked.due(u64::MAX, start, self.answered, now, asks) != 0;
        let again = again && !self.is_held_back(now);
        let start = if again { start } else { start.max(to) };
        Lack { position: start, gap: start..self.results_sent.max(start), fragments: 0 }
    }

    /// What to ask for of a window and of the gap before it.
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

    /// Whether nothing is asked for again yet, since nothing came of it several times.
    fn is_held_back(&self, now: Time) -> bool {
        now.since(self.asked_at) < self.fruitless_pause()
    }

    /// Notes that a probe was answered, behind all results of windows before `end`. Returns whether
    /// none of them is missing: then it is others that are waited for, and that may take long. A
    /// probe without an answer may just be lost, which makes less patient.
    pub(super) fn note_wait(&mut self, now: Time, end: WindowId, asks: &Rtt) -> bool {
        let end = self.sequence.position_from(end).min(self.opened);
        self.results_sent = self.results_sent.max(end);
        self.quiet_since = now;
        if end <= self.cursor {
            self.probes = (self.probes / Self::PROBES_A_STEP + 1) * Self::PROBES_A_STEP;
            return true;
        }
        // What is lost waits for nobody. But the answer to another probe may still come, so the
        // next is not the first.
        self.probes = 1;
        self.is_told = true;
        if self.is_to_ask(now, asks) {
            self.ask.get_or_insert(Stalled(false));
        }
        false
    }

    /// What was asked for of the window at `position`, of which nothing has arrived, and of those
    /// behind the last arrival before it.
    pub(super) fn asked_behind(&self, position: u64) -> (Asked, Asked) {
        match self.tail {
            Tail { to, asked } if position < to => (asked, Asked::default()),
            Tail { to, asked } if self.tail_start() < to => (Asked::default(), asked),
            _ => Default::default(),
        }
    }

    /// Until a rank that waits for nothing asks again if all have what it has; doubles so often.
    const REST_PATIENCE: Span = Span::from_millis(8);
    const REST_STEPS: u32 = 7;
    /// From so many fruitless repetitions on the next is put off so long, doubling up to a second.
    const FRUITLESS: u32 = 3;
    const FRUITLESS_PATIENCE: Span = Span::from_millis(32);
    /// This many probes without an answer double the patience once.
    const PROBES_A_STEP: u32 = 4;
    /// Windows sent at first in an op; stretches double up to [`Self::MAX_STRETCH`].
    const MIN_STRETCH: u64 = 4;
    /// Stretches grow no further: opening in larger pieces would save nothing worth the wait.
    const MAX_STRETCH: u64 = 64;
    /// A result is acknowledged this late at the latest.
    const MAX_ACK_DELAY: Span = Span::from_millis(1);
    /// This many bytes of results are acknowledged at once.
    const MAX_UNACKED_BYTES: usize = 4 * WINDOW_BYTES;
}
