//! One stream of a worker: one lane at one shard. Each of its parts is a separate state machine:
//!
//! - [`Progress`] holds the ops, and the positions up to which windows are scanned, opened, sent
//!   and summed;
//! - [`Opens`], [`InFlight`] and [`Acks`] decide what to send;
//! - [`Results`] records which results have arrived, and finds those that must have been lost;
//! - [`Probes`] and [`Backoff`] decide when to probe, and when to nack again.

mod acks;
mod backoff;
mod in_flight;
mod kept;
mod opens;
mod probes;
mod progress;
mod receiving;
mod results;
mod sending;

use self::acks::Acks;
use self::backoff::Backoff;
use self::in_flight::InFlight;
use self::opens::Opens;
use self::probes::Probes;
use self::progress::Progress;
use self::results::{Results, Search};
use super::{Config, Path};
use crate::busy::Busy;
use crate::congestion::Congestion;
use crate::density::Density;
use crate::descriptor::Descriptor;
use crate::geometry::Stripe;
use crate::ids::{OpId, Rank};
use crate::rtt::Rtt;
use crate::sequence::Sequence;
use crate::time::{Span, Time};
use crate::waited::Waited;

/// A nack that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nack {
    /// Requests results that must have been lost.
    Lost,
    /// Probes the aggregator, because nothing arrives.
    Probe,
}

/// One stream at a worker.
#[derive(Debug)]
pub(super) struct Stream {
    lane: u8,
    shard: u8,
    progress: Progress,
    opens: Opens,
    in_flight: InFlight,
    results: Results,
    acks: Acks,
    probes: Probes,
    backoff: Backoff,
    /// The nack to send, if any.
    nack: Option<Nack>,
    /// How long the stream has awaited results.
    busy: Busy,
    /// The mean size of results per window.
    density: Density,
    /// The ranks that the stream waits for.
    waited: Waited,
    /// Whether there are congestion marks to report to the aggregator.
    congested: bool,
    /// Whether sums are kept until every rank has them.
    keeps: bool,
    /// The position from which sums are kept.
    keeps_from: u64,
    /// The number of slots in the pool.
    pool: u64,
}

impl Stream {
    /// Creates a stream with room for at least `kept_ops` ops.
    pub(super) fn new(lane: u8, shard: u8, config: &Config, kept_ops: usize, now: Time) -> Self {
        let slots = config.pool_slots.max(1) as usize;
        let pool = u64::from(config.pool_slots.max(1));
        // There must be room for the ops in flight, for the ops between credit and cursor, and for
        // the last op, which stays even if it failed. At most `slots` ops are between credit and
        // cursor, since each has a result in a slot.
        let ops = usize::from(config.max_ops) + slots + 1;
        Self {
            lane,
            shard,
            progress: Progress::new(Sequence::new(ops.max(kept_ops), config.first_op)),
            opens: Opens::new(config),
            in_flight: InFlight::new(slots),
            results: Results::new(slots),
            acks: Acks::new(pool, config.acks_at_rest || config.may_move),
            probes: Probes::new(now),
            backoff: Backoff::new(),
            nack: None,
            busy: Busy::NEW,
            density: Density::default(),
            waited: Waited::new(),
            congested: false,
            keeps: config.may_move,
            keeps_from: 0,
            pool,
        }
    }

    #[inline]
    pub(super) const fn lane(&self) -> u8 {
        self.lane
    }

    #[inline]
    pub(super) const fn shard(&self) -> u8 {
        self.shard
    }

    /// Returns whether there is room for `ops` more ops.
    pub(super) fn has_room_for(&mut self, ops: usize) -> bool {
        self.progress.has_room_for(ops)
    }

    /// Appends an op. The caller must have checked that there is room.
    pub(super) fn push(&mut self, now: Time, op: OpId, descriptor: &Descriptor, stripe: Stripe) {
        if self.progress.cursor() == self.progress.ops().end() {
            self.probes.note_progress(now);
        }
        self.progress.push(op, descriptor, stripe);
    }

    /// Notes that more windows are scanned; `scanned_of` returns how many windows of an op are
    /// scanned.
    pub(super) fn note_scanned(&mut self, scanned_of: impl Fn(OpId) -> u32) {
        self.progress.note_scanned(scanned_of);
    }

    /// Skips a failed op, and forgets its results and its windows in flight.
    pub(super) fn fail(&mut self, op: OpId, congestion: &mut Congestion) {
        let Some(failed) = self.progress.fail(op) else { return };
        self.results.forget(&failed);
        self.results.pass(self.progress.cursor());
        self.in_flight.forget(&failed, congestion);
    }

    /// Estimates how many bytes of results are still to come.
    pub(super) fn backlog(&self) -> u64 {
        self.density.of(self.progress.ops().end() - self.progress.cursor())
    }

    /// Returns the ranks that the stream waits for, and how long each had been silent when the
    /// aggregator reported it.
    pub(super) fn waited(&self, now: Time) -> &[(Rank, Span)] {
        self.waited.ranks(now)
    }

    /// Notes whether results are still awaited.
    #[inline]
    pub(super) fn note_awaited(&mut self, now: Time) {
        if !self.progress.awaits() {
            self.busy.end(now);
        }
    }

    /// Returns how long the stream has awaited results.
    pub(super) fn busy(&self, now: Time) -> Span {
        self.busy.total(now)
    }

    /// Returns the time at which [`Self::handle_timeout`] is due. `last_received` is the time at
    /// which the last result of any stream arrived.
    pub(super) fn timeout(&self, path: &Path, last_received: Time) -> Time {
        let awaits = self.progress.awaits();
        let probe = if self.nack.is_none() {
            self.probe_due(path, last_received, awaits)
        } else {
            Time::NEVER
        };
        probe.min(self.acks.timeout(awaits))
    }

    /// Queues the probe and the acknowledgement that are due.
    pub(super) fn handle_timeout(&mut self, now: Time, path: &Path, last_received: Time) {
        let awaits = self.progress.awaits();
        self.acks.handle_timeout(now, awaits);
        // wire: W-39, W-63
        if self.probe_due(path, last_received, awaits) <= now {
            self.nack = Some(Nack::Probe);
            self.probes.note_due(now);
        }
    }

    /// Returns the time of the next probe. The stream probes while it awaits results, or keeps sums
    /// that some rank may lack.
    fn probe_due(&self, path: &Path, last_received: Time, awaits: bool) -> Time {
        let is_unsettled = self.keeps && self.progress.low() < self.progress.cursor();
        if awaits || is_unsettled {
            self.probes.due(path, last_received, awaits, self.backoff.pause())
        } else {
            Time::NEVER
        }
    }

    fn search<'a>(&self, now: Time, nacks: &'a Rtt) -> Search<'a> {
        Search::new(self.progress.cursor(), now, nacks, &self.backoff)
    }
}
