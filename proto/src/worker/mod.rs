//! The worker half of the sliding-window sum: one [`Worker`] per rank and job.
//!
//! The machine decides; the driver owns the tensors and the sockets. The driver starts ops with
//! [`Worker::submit`]. Whenever something happens, it must call these methods in order:
//!
//! - [`Worker::handle_datagram`] for each datagram, and [`Worker::handle_delivered`] once a window
//!   is written;
//! - [`Worker::handle_timeout`] at the time that [`Worker::poll_timeout`] returns, but only after
//!   all datagrams that have arrived are read: the worker would treat unread datagrams as lost;
//! - [`Worker::poll_scan`] and [`Worker::handle_scanned`], to find the non-zero blocks of windows;
//! - [`Worker::poll_transmit`] until `None`, then [`Worker::poll_outcome`] until `None`.

mod config;
mod op;
mod receive;
mod resume;
mod stream;
mod sum;
mod transmit;

#[cfg(test)]
mod tests;

use alloc::borrow::Cow;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;

pub use config::{ChildShard, Config};
use op::{Op, Share};
pub use receive::Delivery;
use stream::Stream;
use sum::{Failure, Waits};
pub use transmit::{DataFragments, Transmit};

use crate::congestion::Congestion;
use crate::descriptor::Descriptor;
use crate::error::{OpError, SubmitError};
use crate::geometry::{Geometry, Stripe};
use crate::ids::{JobId, OpId, Rank, WindowId};
use crate::loss::Loss;
use crate::observer::{Event, Observer};
use crate::rtt::Rtt;
use crate::status::{OwnCounters, Transfers};
use crate::time::{Span, Time};
use crate::wire::{Flags, OpenEncoder};

/// The outcome of an op: how it ended, and which ranks its result lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The op.
    pub op: OpId,
    /// Success with the result in place, or the reason for the failure.
    pub result: Result<(), OpError>,
    /// The ranks that were lost before they had contributed to every window, in ascending order. An
    /// average divides each window by the number of ranks that took part in it.
    pub absent: Vec<Rank>,
}

/// A window that the driver must scan for non-zero blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scan {
    /// The op.
    pub op: OpId,
    /// The window's index in the tensor.
    pub index: u32,
}

/// The path to one shard.
#[derive(Debug)]
struct Path {
    /// The job's number at the shard's aggregator.
    job: JobId,
    congestion: Congestion,
    /// The time from sending a window's data to receiving its result, including the wait for other
    /// ranks.
    rtt: Rtt,
    /// The time from sending a nack to receiving its answer.
    nacks: Rtt,
    /// The ranks that the shard's aggregator has lost, in the order of their loss.
    gone: Vec<Rank>,
    /// The contributions that were sent.
    sent: Transfers,
    /// The results that have arrived completely.
    results: Transfers,
}

impl Path {
    /// Returns how long to wait without progress after `attempts` unanswered nacks.
    fn patience(&self, attempts: u32) -> Span {
        self.rtt.patience(&self.nacks, attempts)
    }
}

/// The worker half of one rank.
#[derive(Debug)]
pub struct Worker {
    config: Config,
    /// The ops in flight, ordered by number. An ended op stays until all older ops are dropped and
    /// no other rank can still lack its sums.
    ops: VecDeque<Op>,
    next_op: u32,
    /// The streams, ordered by lane and then by shard.
    streams: Box<[Stream]>,
    paths: Box<[Path]>,
    /// The shard to send to next.
    turn: u8,
    /// The time at which the last result of any stream arrived.
    last_received: Time,
    outcomes: VecDeque<Outcome>,
    opens: OpenEncoder,
    ended: Option<Cow<'static, str>>,
    /// Whether the job has moved to other aggregators.
    moved: bool,
    /// The ranks whose loss ended the session, and the reason for their loss.
    lost: Option<(Vec<Rank>, Loss)>,
    /// In a tree of aggregators, the ops that failed at the ranks below, until the parent confirms
    /// each failure.
    failures: Vec<Failure>,
    /// In a tree of aggregators, the ranks below that ops wait for.
    waits: Waits,
}

impl Worker {
    /// Creates the worker half of a rank that joined at `now`. Allocates all memory up front,
    /// except for each op's masks and lists, the lists of lost ranks and, in a tree of aggregators,
    /// the failures and waits.
    #[must_use]
    pub fn new(config: Config, now: Time) -> Self {
        Self {
            ops: VecDeque::with_capacity(usize::from(config.max_ops)),
            next_op: config.first_op.0,
            streams: config.streams(now, 0),
            paths: config.paths(),
            turn: 0,
            last_received: now,
            outcomes: VecDeque::with_capacity(usize::from(config.max_ops)),
            opens: OpenEncoder::new(),
            ended: None,
            moved: false,
            lost: None,
            failures: Vec::new(),
            waits: Waits::default(),
            config,
        }
    }

    /// Returns the configuration.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the number of the op that starts next.
    #[must_use]
    pub const fn next_op(&self) -> OpId {
        OpId(self.next_op)
    }

    /// Sets the job's number at one shard. Each aggregator numbers jobs on its own.
    pub fn set_shard_job(&mut self, shard: u8, job: JobId) {
        if let Some(path) = self.paths.get_mut(usize::from(shard)) {
            path.job = job;
        }
    }

    /// Returns whether the session has ended. Once it has, no more ops can start.
    #[must_use]
    pub const fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Returns whether no op is in flight and, if the job may move, every rank is known to have all
    /// results.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty()
    }

    /// Returns whether there is nothing to do until an op starts. While the session lasts, a rank
    /// that keeps no sums is never at rest if other ranks keep some: it cannot know whether they
    /// have received its last acknowledgement.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        let answers = self.config.acks_at_rest && !self.config.may_move && !self.has_ended();
        // Before a planned move, the rank still has to learn that all ranks have the results of
        // earlier ops, which it did not keep.
        let is_ready = !self.config.may_move || self.has_ended() || self.is_ready_to_move();
        self.is_idle() && !answers && is_ready
    }

    /// Estimates how many bytes of results are still to come in the stream that expects the most.
    #[must_use]
    pub fn backlog(&self) -> u64 {
        self.streams.iter().map(Stream::backlog).max().unwrap_or(0)
    }

    /// Returns what this rank has counted at one aggregator: the one that has these shards. The
    /// driver adds what the kernel dropped.
    #[must_use]
    pub fn counters(&self, now: Time, shards: Range<u8>) -> OwnCounters {
        let mut all = OwnCounters::default();
        let mut shortest: Option<Span> = None;
        for (shard, path) in (0..).zip(&self.paths).filter(|(shard, _)| shards.contains(shard)) {
            all.sent += path.sent;
            all.results += path.results;
            // After a move, the sum of a window may come from another rank without a wait for this
            // rank's data.
            let of_windows = path.rtt.shortest().filter(|_| !self.moved);
            shortest = shortest.into_iter().chain(path.nacks.shortest()).chain(of_windows).min();
            let streams = self.streams.iter().filter(|stream| stream.shard() == shard);
            let busy = Span(streams.map(|stream| stream.busy(now).0).sum());
            all.busy_ms = all.busy_ms.max(busy.as_millis());
        }
        OwnCounters { round_trip_us: shortest.map(|trip| trip.0 / 1000), ..all }
    }

    /// Starts an op. Its windows are scanned shortly before they are sent.
    ///
    /// # Errors
    /// Returns an error if the descriptor is invalid, or if no more ops can start.
    pub fn submit(
        &mut self,
        now: Time,
        descriptor: Descriptor,
        timeout: Span,
    ) -> Result<OpId, SubmitError> {
        let windows = self.check(&descriptor)?;
        if let Some(op) = self.start_late() {
            return Ok(op);
        }
        Ok(self.start(now, descriptor, Share::unscanned(windows), timeout))
    }

    /// Starts an op whose non-zero blocks are known: `masks` has one mask for each window.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::submit`].
    ///
    /// # Panics
    /// Panics if the number of masks differs from the op's number of windows.
    pub fn submit_scanned(
        &mut self,
        now: Time,
        descriptor: Descriptor,
        masks: Vec<u64>,
        timeout: Span,
    ) -> Result<OpId, SubmitError> {
        let windows = self.check(&descriptor)?;
        assert_eq!(masks.len(), windows as usize, "there must be one mask for each window");
        if let Some(op) = self.start_late() {
            return Ok(op);
        }
        Ok(self.start(now, descriptor, Share::scanned(masks), timeout))
    }

    /// Checks whether an op may start. Returns its number of windows.
    fn check(&mut self, descriptor: &Descriptor) -> Result<u32, SubmitError> {
        descriptor.validate()?;
        let (lane, lanes) = (descriptor.lane, self.config.lanes);
        if lane >= lanes {
            return Err(SubmitError::NoSuchLane { lane, lanes });
        }
        if let Some((ranks, why)) = self.lost.clone() {
            return Err(SubmitError::PeerLost { ranks, why });
        }
        if let Some(why) = &self.ended {
            return Err(SubmitError::Ended { why: why.clone() });
        }
        if !self.has_room(lane) {
            return Err(SubmitError::TooManyOps { max: usize::from(self.config.max_ops) });
        }
        if self.next_op == u32::MAX {
            return Err(SubmitError::OpsExhausted);
        }
        Ok(Geometry::new(descriptor).windows())
    }

    /// Returns whether one more op of a lane may be in flight. For an unknown lane, returns the
    /// answer for lane 0, where refused calls go.
    pub fn has_room(&mut self, lane: u8) -> bool {
        self.has_room_for(lane, 1)
    }

    /// Returns whether `ops` more ops of a lane may be in flight at once; see [`Self::has_room`].
    pub fn has_room_for(&mut self, lane: u8, ops: usize) -> bool {
        let lane = if lane < self.config.lanes { lane } else { 0 };
        // wire: W-43
        // An op whose outcome has not been polled still counts as in flight.
        let running = self.ops.iter().filter(|op| op.is_in_flight()).count();
        let since_oldest = self.ops.iter().skip_while(|op| !op.is_in_flight()).count();
        let own = self.config.own_shards();
        let own = self.config.stream(lane, own.start)..self.config.stream(lane, own.end);
        let in_flight = since_oldest.max(running + self.outcomes.len());
        in_flight.saturating_add(ops) <= usize::from(self.config.max_ops)
            && self.streams[own].iter_mut().all(|stream| stream.has_room_for(ops))
    }

    /// Ends and returns the next op if the other ranks are done with it: they learned before the
    /// job moved that the op had failed. Otherwise returns `None`.
    fn start_late(&mut self) -> Option<OpId> {
        let op = OpId(self.next_op);
        if op >= self.config.first_op {
            return None;
        }
        self.next_op += 1;
        let result = Err(OpError::Dropped { op });
        self.outcomes.push_back(Outcome { op, result, absent: Vec::new() });
        Some(op)
    }

    fn start(
        &mut self,
        now: Time,
        descriptor: Descriptor,
        mut share: Share,
        timeout: Span,
    ) -> OpId {
        let id = OpId(self.next_op);
        if self.config.may_move {
            share.keep_sums();
        }
        self.insert(now, Op::new(id, descriptor, share, now, timeout));
        id
    }

    fn insert(&mut self, now: Time, mut op: Op) {
        let (id, lane) = (op.id(), op.descriptor().lane);
        self.next_op = self.next_op.max(id.0 + 1);
        self.enter(now, &mut op);
        let at = self.ops.partition_point(|earlier| earlier.id() < id);
        self.ops.insert(at, op);
        self.note_scanned(lane);
    }

    /// Appends an op to its streams.
    fn enter(&mut self, now: Time, op: &mut Op) {
        // wire: W-45
        for shard in self.config.own_shards() {
            let stripe = Stripe::new(op.id(), op.geometry().windows(), shard, self.config.shards);
            if stripe.is_empty() {
                continue;
            }
            op.enter_stream();
            let stream = &mut self.streams[self.config.stream(op.descriptor().lane, shard)];
            stream.push(now, op.id(), op.descriptor(), stripe);
        }
    }

    /// Returns the next window to scan, from the first lane that has one. Returns `None` if every
    /// window is scanned, or enough windows are scanned ahead.
    #[must_use]
    pub fn poll_scan(&self) -> Option<Scan> {
        (0..self.config.lanes).find_map(|lane| self.poll_scan_of(lane))
    }

    /// Returns the next window to scan in one lane; see [`Self::poll_scan`].
    #[must_use]
    pub fn poll_scan_of(&self, lane: u8) -> Option<Scan> {
        let due = |op: &&Op| op.is_in_flight() && !op.share().is_scanned();
        // Within a lane, ops are scanned one after another, in the order in which they are sent.
        let op = self.ops.iter().filter(|op| op.descriptor().lane == lane).find(due)?;
        let index = op.share().next_scan(Self::SCAN_AHEAD)?;
        Some(Scan { op: op.id(), index })
    }

    /// Records the non-zero blocks of the window that [`Self::poll_scan`] returned.
    pub fn handle_scanned(&mut self, scan: Scan, mask: u64) {
        let Some(op) = self.op_mut(scan.op) else { return };
        op.share_mut().note_scanned(scan.index, mask);
        let lane = op.descriptor().lane;
        self.note_scanned(lane);
    }

    /// Tells the streams of a lane how many windows of its ops are scanned.
    fn note_scanned(&mut self, lane: u8) {
        for shard in self.config.own_shards() {
            let stream = &mut self.streams[self.config.stream(lane, shard)];
            let ops = &self.ops;
            stream.note_scanned(|op| {
                find(ops, op).map_or(u32::MAX, |at| ops[at].share().scanned_windows())
            });
        }
    }

    /// Returns the descriptor of an op, unless the op is unknown or was dropped.
    #[must_use]
    pub fn descriptor(&self, op: OpId) -> Option<Descriptor> {
        self.op(op).map(|op| *op.descriptor())
    }

    /// Returns the mask of the blocks that this rank would send for a window: those of its own
    /// share, or of the sum once the sum has arrived and is kept. Returns 0 for an unknown window.
    #[must_use]
    pub fn mask(&self, window: WindowId) -> u64 {
        self.op(window.op).map_or(0, |op| op.share().mask(window.index))
    }

    /// Returns the outcome of an op that has ended, oldest outcome first.
    pub fn poll_outcome(&mut self) -> Option<Outcome> {
        self.outcomes.pop_front()
    }

    /// Returns the time at which [`Self::handle_timeout`] is due, or [`Time::NEVER`] if no timeout
    /// is pending.
    #[must_use]
    pub fn poll_timeout(&self) -> Time {
        let ops = self.ops.iter().map(Op::deadline);
        let streams = self.streams.iter().map(|stream| {
            let path = &self.paths[usize::from(stream.shard())];
            stream.timeout(path, self.last_received)
        });
        let failures = self.failures.iter().map(Failure::due);
        let waits = core::iter::once(self.waits_due());
        ops.chain(streams).chain(failures).chain(waits).min().unwrap_or(Time::NEVER)
    }

    /// Queues the messages that are due, and fails the ops whose deadline has passed. If any op
    /// fails, the session ends.
    pub fn handle_timeout(&mut self, now: Time, observer: &mut impl Observer) {
        for stream in &mut self.streams {
            let path = &self.paths[usize::from(stream.shard())];
            stream.handle_timeout(now, path, self.last_received);
        }
        self.note_waits_due(now);
        let mut late = false;
        while let Some((id, started)) = self.late(now) {
            let (after, idle) = (now.since(started), now.since(self.last_received));
            let missing = self.waited_for(now, id);
            self.fail(id, OpError::Timeout { op: id, after, missing, idle }, observer);
            late = true;
        }
        if late {
            self.end("an earlier op timed out", observer);
        }
    }

    /// Returns the ranks that hold up an op, or an earlier op of its lane, and how long each had
    /// been silent when the aggregator reported it.
    fn waited_for(&self, now: Time, id: OpId) -> Vec<(Rank, Span)> {
        let mut missing = Vec::new();
        let lane = self.op(id).map(|op| op.descriptor().lane);
        for stream in self.streams.iter().filter(|stream| lane == Some(stream.lane())) {
            for entry in stream.waited(now) {
                if missing.iter().all(|(rank, _)| *rank != entry.0) {
                    missing.push(*entry);
                }
            }
        }
        missing
    }

    /// Returns an op whose deadline has passed, and the time at which the op started.
    fn late(&self, now: Time) -> Option<(OpId, Time)> {
        self.ops.iter().find_map(|op| Some((op.id(), op.late_since(now)?)))
    }

    /// Notes that the aggregator of `shards` continues without a lost rank. Ends the ops that
    /// waited only to learn which ranks their results lack.
    pub fn handle_gone(&mut self, shards: Range<u8>, rank: Rank, observer: &mut impl Observer) {
        for path in self.paths.iter_mut().take(shards.end.into()).skip(shards.start.into()) {
            if path.gone.len() < Flags::MAX_ABSENT && !path.gone.contains(&rank) {
                path.gone.push(rank);
            }
        }
        self.conclude_all(observer);
    }

    /// Ends each op that has all its results, once the ranks missing from those results are known.
    fn conclude_all(&mut self, observer: &mut impl Observer) {
        let done = self.ops.iter().filter(|op| op.is_complete());
        let done: Vec<_> = done.map(Op::id).collect();
        done.into_iter().for_each(|op| self.conclude(op, observer));
    }

    /// Ends the session because ranks are lost: every op in flight fails.
    pub fn handle_peers_lost(&mut self, ranks: &[Rank], why: Loss, observer: &mut impl Observer) {
        self.fail_all(&OpError::PeerLost { ranks: ranks.to_vec(), why }, observer);
        if self.ended.is_none() {
            self.lost = Some((ranks.to_vec(), why));
        }
        self.end("a rank is lost", observer);
    }

    fn fail_all(&mut self, error: &OpError, observer: &mut impl Observer) {
        while let Some(id) = self.ops.iter().find(|op| op.is_in_flight()).map(Op::id) {
            self.fail(id, error.clone(), observer);
        }
    }

    /// Ends the session: every op in flight fails, and no more ops can start.
    pub fn end(&mut self, why: impl Into<Cow<'static, str>>, observer: &mut impl Observer) {
        let why = why.into();
        self.ended.get_or_insert_with(|| why.clone());
        self.fail_all(&OpError::Ended { why }, observer);
        // The job does not continue with this rank, so no rank needs its sums.
        self.streams.iter_mut().for_each(Stream::forget_kept);
        self.drop_ended();
    }

    /// Notes that, in the result of `op`, the block that starts at `element` overflowed. The op
    /// continues, because other ranks need this rank's data, and fails at its end.
    pub fn handle_overflow(&mut self, op: OpId, element: u64) {
        if let Some(op) = self.op_mut(op) {
            op.note_error(OpError::Overflow { op: op.id(), element });
        }
    }

    /// Ends an op in flight with an error. The streams skip the op's windows from now on.
    fn fail(&mut self, id: OpId, error: OpError, observer: &mut impl Observer) {
        let Some(op) = self.op_mut(id).filter(|op| op.is_in_flight()) else { return };
        op.fail();
        observer.on_event(&Event::Failed { op: id, error: Some(&error) });
        self.outcomes.push_back(Outcome { op: id, result: Err(error), absent: Vec::new() });
        for stream in &mut self.streams {
            let path = &mut self.paths[usize::from(stream.shard())];
            stream.fail(id, &mut path.congestion);
        }
        self.drop_ended();
        // Later ops may have scanned windows that only the failed op's unscanned windows held back.
        (0..self.config.lanes).for_each(|lane| self.note_scanned(lane));
    }

    /// Notes that one more stream has all results of an op. Ends the op after its last stream.
    fn finish_stream(&mut self, id: OpId, observer: &mut impl Observer) {
        let Some(op) = self.op_mut(id).filter(|op| !op.has_failed()) else { return };
        op.leave_stream();
        if op.is_complete() {
            self.conclude(id, observer);
        }
    }

    /// Ends an op that has all its results, once the ranks missing from those results are known.
    fn conclude(&mut self, id: OpId, observer: &mut impl Observer) {
        let Some(absent) = self.op(id).and_then(|op| op.absent(&self.paths)) else { return };
        let Some(op) = self.op_mut(id) else { return };
        let result = op.end();
        match &result {
            Ok(()) => observer.on_event(&Event::Done { op: id }),
            Err(error) => observer.on_event(&Event::Failed { op: id, error: Some(error) }),
        }
        self.outcomes.push_back(Outcome { op: id, result, absent });
        self.drop_ended();
    }

    /// Drops the oldest ops, up to the first that is in flight or whose sums another rank may lack.
    fn drop_ended(&mut self) {
        while self.ops.front().is_some_and(|op| !op.is_in_flight() && !self.is_kept(op)) {
            self.ops.pop_front();
        }
    }

    fn op(&self, id: OpId) -> Option<&Op> {
        self.ops.get(find(&self.ops, id)?)
    }

    fn op_mut(&mut self, id: OpId) -> Option<&mut Op> {
        let at = find(&self.ops, id)?;
        self.ops.get_mut(at)
    }

    /// The maximum number of windows of an op that are scanned ahead of sending.
    const SCAN_AHEAD: u32 = 1024;
}

/// Returns the index of an op in `ops`. The ops have consecutive numbers, except at a child
/// aggregator, where a worker has only the ops with a window on its shard.
fn find(ops: &VecDeque<Op>, id: OpId) -> Option<usize> {
    let at = id.0.checked_sub(ops.front()?.id().0)? as usize;
    if ops.get(at).is_some_and(|op| op.id() == id) {
        return Some(at);
    }
    ops.binary_search_by_key(&id, Op::id).ok()
}
