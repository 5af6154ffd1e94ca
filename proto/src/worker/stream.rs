//! One stream of a worker: what is scanned, opened, sent, and which results are in.

use alloc::collections::VecDeque;

use super::Config;
use crate::descriptor::Descriptor;
use crate::geometry::{Stripe, WINDOW_BYTES};
use crate::ids::{OpId, WindowId};
use crate::rtt::Rtt;
use crate::sequence::Sequence;
use crate::time::{Span, Time};
use crate::wire::AskEntry;

/// A window that was sent and has no result yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    pub(super) position: u64,
    pub(super) len: usize,
    pub(super) at: Time,
    /// Fragments that the aggregator asked for again.
    pub(super) again: u64,
    /// Whether any was ever sent again, so that its round trip says nothing (Karn).
    pub(super) repeated: bool,
}

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
}

impl Arrival {
    pub(super) const fn complete(&self) -> bool {
        self.have == self.all
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
    /// When results were last asked for, until an answer.
    pub(super) asked_at: Option<Time>,
    /// When something last moved, or was last asked for.
    pub(super) quiet_since: Time,
    /// Questions since something last moved.
    pub(super) probes: u32,
    /// Windows and bytes of results since the last acknowledgement, and since when.
    pub(super) unacked: Unacked,
    pub(super) ack_due: bool,
    /// Results arrive with congestion marks, and the aggregator has not been told.
    pub(super) congested: bool,
    pool: u64,
    max_stretch: u64,
}

/// Whether an ask is sent because nothing is heard, or because of a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stalled(pub(super) bool);

/// Results that have not been acknowledged.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unacked {
    windows: u64,
    bytes: usize,
    since: Option<Time>,
}

impl Stream {
    pub(super) fn new(lane: u8, shard: u8, config: &Config, now: Time) -> Self {
        let pool = u64::from(config.pool_slots.max(1));
        let slots = config.pool_slots.max(1) as usize;
        Self {
            lane,
            shard,
            // Between the credit and the cursor each op has a result, and so a slot.
            sequence: Sequence::new(usize::from(config.max_ops) + slots),
            scanned: 0,
            opened: 0,
            sent: 0,
            low: 0,
            cursor: 0,
            in_flight: VecDeque::with_capacity(slots),
            repeats: 0,
            arrivals: VecDeque::with_capacity(slots),
            reopen: None,
            stretch: Self::MIN_STRETCH,
            ask: None,
            asked_at: None,
            quiet_since: now,
            probes: 0,
            unacked: Unacked::default(),
            ack_due: false,
            congested: false,
            pool,
            // All shards together scan no further ahead than this allows each of them.
            max_stretch: (Self::MAX_STRETCH / u64::from(config.shards.max(1))).max(1),
        }
    }

    /// Notes that a stretch was opened up to `end`.
    pub(super) fn note_opened(&mut self, end: u64) {
        if end > self.opened {
            self.opened = end;
            self.stretch = (self.stretch * 2).min(self.max_stretch);
        }
    }

    /// Slots of the pool.
    pub(super) const fn pool(&self) -> u64 {
        self.pool
    }

    /// Appends an op.
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

    /// Skips an op that failed.
    pub(super) fn fail(&mut self, op: OpId) {
        if self.sequence.fail(op) {
            self.skip_failed();
        }
    }

    /// Moves every position that lies in a failed op past it.
    pub(super) fn skip_failed(&mut self) {
        let Self { sequence, scanned, opened, sent, cursor, low, .. } = self;
        for position in [scanned, opened, sent, cursor, low] {
            while let Some(entry) = sequence.at(*position).filter(|entry| entry.failed) {
                *position = entry.end();
            }
        }
        self.settle();
    }

    /// Drops results that lie before the cursor, and ops that lie before the credit as well: its
    /// base may still be named by a window of an op that ended here.
    fn settle(&mut self) {
        while self.arrivals.front().is_some_and(|arrival| arrival.position < self.cursor) {
            self.arrivals.pop_front();
        }
        let done = self.cursor.min(self.low);
        while self.sequence.settle_before(done).is_some() {}
    }

    /// Takes the lowest window that some rank has not acknowledged (wire: W-33).
    pub(super) fn handle_low(&mut self, low: WindowId) {
        let low = self.sequence.position_from(low);
        if low > self.low {
            self.low = low;
            self.settle();
        }
    }

    /// Moves the cursor over results that are complete. Returns the op whose last window it
    /// passed, if it did; call again until `None`.
    pub(super) fn advance(&mut self, now: Time) -> Option<OpId> {
        loop {
            let first = *self.arrivals.front()?;
            if !first.complete() || first.start > self.cursor {
                return None;
            }
            self.unacked.windows += 1;
            self.unacked.bytes += first.len;
            self.unacked.since.get_or_insert(now);
            self.ack_due |= self.unacked.windows >= (self.pool / 4).max(1)
                || self.unacked.bytes >= Self::MAX_UNACKED_BYTES;
            self.quiet_since = now;
            self.probes = 0;
            let entry = self.sequence.at(first.position).copied();
            self.cursor = first.position + 1;
            self.skip_failed();
            self.settle();
            if let Some(entry) = entry.filter(|entry| entry.end() == first.position + 1) {
                return Some(entry.op);
            }
        }
    }

    /// The acknowledgement to write into a header; it is owed no more (wire: W-32).
    pub(super) fn acknowledge(&mut self) -> WindowId {
        self.unacked = Unacked::default();
        self.ack_due = false;
        self.sequence.window(self.cursor)
    }

    /// Whether results are awaited.
    fn awaits(&self) -> bool {
        self.cursor < self.opened
    }

    /// Whether an ask is out whose answer may still be under way.
    pub(super) fn awaits_answer(&self, now: Time, rtt: &Rtt) -> bool {
        self.asked_at.is_some_and(|at| now.since(at) < rtt.timeout())
    }

    pub(super) fn timeout(&self, rtt: &Rtt) -> Time {
        let probe = if self.awaits() && self.ask.is_none() {
            self.quiet_since + rtt.backed_off(self.probes)
        } else {
            Time::NEVER
        };
        let ack = match self.unacked.since {
            Some(since) if !self.ack_due && self.awaits() => since + Self::MAX_ACK_DELAY,
            _ => Time::NEVER,
        };
        probe.min(ack)
    }

    pub(super) fn handle_timeout(&mut self, now: Time, rtt: &Rtt) {
        let Some(since) = self.unacked.since.filter(|_| self.awaits()) else {
            return self.probe_if_quiet(now, rtt);
        };
        self.ack_due |= since + Self::MAX_ACK_DELAY <= now;
        self.probe_if_quiet(now, rtt);
    }

    fn probe_if_quiet(&mut self, now: Time, rtt: &Rtt) {
        // wire: W-39
        if self.awaits() && self.quiet_since + rtt.backed_off(self.probes) <= now {
            self.ask = Some(Stalled(true));
            self.quiet_since = now;
            self.probes += 1;
        }
    }

    /// What results are missing: the fragments of those that arrived in part, and the windows
    /// before one that arrived. When `stalled`, also all after the last that arrived.
    pub(super) fn missing(&self, stalled: bool) -> impl Iterator<Item = AskEntry> + '_ {
        let whole = |position: u64, fragments: u64| AskEntry {
            window: self.sequence.window(position),
            fragments,
        };
        let after = self.arrivals.back().map_or(self.cursor, |last| last.position + 1);
        let mut expected = self.cursor;
        self.arrivals
            .iter()
            .flat_map(move |arrival| {
                // All that is known of a gap is its last window, and that it may hold more.
                let gap = arrival.start > expected;
                let more = (gap && arrival.start - 1 > expected).then(|| whole(expected, 0));
                let last = gap.then(|| whole(arrival.start - 1, u64::MAX));
                let rest = (!arrival.complete())
                    .then(|| whole(arrival.position, arrival.all & !arrival.have));
                expected = arrival.position + 1;
                [more, last, rest].into_iter().flatten()
            })
            .chain(stalled.then(|| whole(after, 0)))
    }

    /// Windows sent at first in an op; stretches double up to [`Self::MAX_STRETCH`].
    pub(super) const MIN_STRETCH: u64 = 4;
    /// Stretches grow no further: opening in larger pieces would save nothing worth the wait.
    const MAX_STRETCH: u64 = 64;
    /// A result is acknowledged this late at the latest.
    const MAX_ACK_DELAY: Span = Span::from_millis(1);
    /// This many bytes of results are acknowledged at once.
    const MAX_UNACKED_BYTES: usize = 4 * WINDOW_BYTES;
}
