//! The worker half of the sliding-window sum: one [`Worker`] a rank and job.
//!
//! The machine decides; the driver owns the tensors and the sockets. The calling order is:
//! [`Worker::submit`] ops; then, as often as anything happens, [`Worker::handle_datagram`] for
//! each datagram (and [`Worker::handle_delivered`] once a window is written),
//! [`Worker::handle_timeout`] once [`Worker::poll_timeout`] has passed and all that has arrived is
//! taken (what is still unread is not lost),
//! [`Worker::poll_scan`] with [`Worker::handle_scanned`] for windows whose non-zero blocks are to
//! be found, [`Worker::poll_transmit`] until `None`, and [`Worker::poll_outcome`] until `None`.

mod config;
mod op;
mod receive;
mod resume;
mod sent;
mod stream;
mod sum;
mod transmit;

#[cfg(test)]
mod tests;

use alloc::borrow::Cow;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

pub use config::{Config, Relay};
use op::{Lacked, Op};
pub use receive::{Delivery, Verdict};
use resume::FAILED_BEFORE;
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
use crate::reject::Rejects;
use crate::rtt::Rtt;
use crate::time::{Span, Time};
use crate::wire::{Flags, OpenEncoder};

/// How an op ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The op.
    pub op: OpId,
    /// Its result is in place, or why there is none.
    pub result: Result<(), OpError>,
    /// The ranks that were lost before they had contributed to all of it, in ascending order. An
    /// average is of those that did contribute, window by window.
    pub absent: Vec<Rank>,
}

/// A window whose non-zero blocks the driver is to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scan {
    /// The op.
    pub op: OpId,
    /// The window's place in the tensor.
    pub index: u32,
}

/// What has happened at the worker half, in numbers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counters {
    /// Fragments of data that were sent again.
    pub fragments_again: u64,
    /// Times results were asked for.
    pub asks: u64,
    /// Of those, how many because nothing was heard.
    pub probes: u64,
    /// Fragments that had arrived before.
    pub duplicates: u64,
    /// Datagrams that changed nothing, by reason.
    pub rejects: Rejects,
}

/// The way to one shard.
#[derive(Debug)]
struct Path {
    /// The job's number at the shard's aggregator.
    job: JobId,
    congestion: Congestion,
    /// From a window's data to its result, which waits for other ranks too.
    rtt: Rtt,
    /// From an ask to what it brings.
    asks: Rtt,
    /// The ranks that the shard's aggregator goes on without, in the order in which it lost them.
    gone: Vec<Rank>,
}

impl Path {
    /// How long a silence may last after so many questions that brought nothing.
    fn patience(&self, attempts: u32) -> Span {
        self.rtt.patience(&self.asks, attempts)
    }
}

/// The worker half of one rank.
#[derive(Debug)]
pub struct Worker {
    config: Config,
    /// Ops in flight by number; ended ones go once they are the oldest.
    ops: VecDeque<Op>,
    next_op: u32,
    /// Lane by lane, shard by shard.
    streams: Box<[Stream]>,
    paths: Box<[Path]>,
    /// The shard that is sent to next.
    turn: u8,
    /// When the last result came, of whatever stream.
    heard: Time,
    outcomes: VecDeque<Outcome>,
    opens: OpenEncoder,
    ended: Option<Cow<'static, str>>,
    /// The ranks whose loss ended the session, and what became of them.
    lost: Option<(Vec<Rank>, Loss)>,
    /// Ops that failed below, until the parent has heard of it.
    failures: Vec<Failure>,
    /// Whom ops wait for below.
    waits: Waits,
    counters: Counters,
}

impl Worker {
    /// The half of a rank that has joined at `now`. But for the block masks of each op, all
    /// memory it will ever use is allocated here.
    #[must_use]
    pub fn new(config: Config, now: Time) -> Self {
        Self {
            ops: VecDeque::with_capacity(usize::from(config.max_ops)),
            next_op: config.first_op.0,
            streams: config.streams(now),
            paths: config.paths(),
            turn: 0,
            heard: now,
            outcomes: VecDeque::with_capacity(usize::from(config.max_ops)),
            opens: OpenEncoder::new(),
            ended: None,
            lost: None,
            failures: Vec::new(),
            waits: Waits::default(),
            counters: Counters::default(),
            config,
        }
    }

    /// The configuration.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The number of the op that is started next.
    #[must_use]
    pub const fn next_op(&self) -> OpId {
        OpId(self.next_op)
    }

    /// Sets the job's number at one shard, where an aggregator of its own gave it another.
    pub fn set_shard_job(&mut self, shard: u8, job: JobId) {
        if let Some(path) = self.paths.get_mut(usize::from(shard)) {
            path.job = job;
        }
    }

    /// What has happened so far.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether the session has ended, so that no op can be started any more.
    #[must_use]
    pub const fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Whether nothing is in flight: every op has ended, and if the job may move, every rank is
    /// known to have its results.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty()
    }

    /// Whether there is nothing to do until an op is started. A rank that keeps no sums itself does
    /// not know when those that do have heard that it has all.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        let answers = self.config.acks_at_rest && !self.config.may_move && !self.has_ended();
        self.is_idle() && !answers
    }

    /// The most bytes of results that are still to come in any stream, if its windows are like the
    /// last.
    #[must_use]
    pub fn backlog(&self) -> u64 {
        self.streams.iter().map(Stream::backlog).max().unwrap_or(0)
    }

    /// Starts an op, whose windows are scanned as they are about to be sent.
    ///
    /// # Errors
    /// When the descriptor cannot be, or no more ops may be started.
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
        let masks = vec![0; windows as usize];
        Ok(self.start(now, Op::new(descriptor, masks, 0, now, timeout)))
    }

    /// Starts an op whose non-zero blocks are known: one mask a window.
    ///
    /// # Errors
    /// As [`Self::submit`].
    ///
    /// # Panics
    /// When the masks are not as many as the op has windows.
    pub fn submit_scanned(
        &mut self,
        now: Time,
        descriptor: Descriptor,
        masks: Vec<u64>,
        timeout: Span,
    ) -> Result<OpId, SubmitError> {
        let windows = self.check(&descriptor)?;
        assert_eq!(masks.len(), windows as usize, "one mask a window");
        if let Some(op) = self.start_late() {
            return Ok(op);
        }
        Ok(self.start(now, Op::new(descriptor, masks, windows, now, timeout)))
    }

    /// Whether an op may start; returns how many windows it has.
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

    /// Whether one more op of a lane may be in flight. For an unknown lane it is that of lane 0,
    /// where refused calls go.
    pub fn has_room(&mut self, lane: u8) -> bool {
        self.has_room_for(lane, 1)
    }

    /// Returns whether so many more ops of a lane may be in flight at once, as [`Self::has_room`]
    /// does of one.
    pub fn has_room_for(&mut self, lane: u8, ops: usize) -> bool {
        let lane = if lane < self.config.lanes { lane } else { 0 };
        // wire: W-43
        // An op whose outcome has not been polled is in flight as well.
        let running = self.ops.iter().filter(|op| !op.ended).count();
        let since_oldest = self.ops.iter().skip_while(|op| op.ended).count();
        let own = self.config.own_shards();
        let own = self.config.stream(lane, own.start)..self.config.stream(lane, own.end);
        let in_flight = since_oldest.max(running + self.outcomes.len());
        in_flight.saturating_add(ops) <= usize::from(self.config.max_ops)
            && self.streams[own].iter_mut().all(|stream| stream.has_room_for(ops))
    }

    /// Ends an op at once that all others have done with: they had been told that it failed before
    /// the job moved.
    fn start_late(&mut self) -> Option<OpId> {
        let op = OpId(self.next_op);
        if op >= self.config.first_op {
            return None;
        }
        self.next_op += 1;
        let result = Err(OpError::Ended { why: FAILED_BEFORE.into() });
        self.outcomes.push_back(Outcome { op, result, absent: Vec::new() });
        Some(op)
    }

    fn start(&mut self, now: Time, mut op: Op) -> OpId {
        let id = OpId(self.next_op);
        if self.config.may_move {
            op.held = vec![false; op.masks.len()];
        }
        self.insert(now, id, op);
        id
    }

    fn insert(&mut self, now: Time, id: OpId, mut op: Op) {
        op.id = id;
        self.next_op = self.next_op.max(id.0 + 1);
        let lane = op.descriptor.lane;
        self.enter(now, &mut op);
        let at = self.ops.partition_point(|earlier| earlier.id < id);
        self.ops.insert(at, op);
        self.note_scanned(lane);
    }

    /// Appends an op to its streams.
    fn enter(&mut self, now: Time, op: &mut Op) {
        // wire: W-45
        for shard in self.config.own_shards() {
            let stripe = Stripe::new(op.id, op.geometry.windows(), shard, self.config.shards);
            if stripe.is_empty() {
                continue;
            }
            op.streams_left += 1;
            let stream = &mut self.streams[self.config.stream(op.descriptor.lane, shard)];
            stream.push(now, op.id, &op.descriptor, stripe);
        }
    }

    /// The next window to scan, lanes in priority order; `None` when enough is scanned ahead.
    #[must_use]
    pub fn poll_scan(&self) -> Option<Scan> {
        (0..self.config.lanes).find_map(|lane| self.poll_scan_of(lane))
    }

    /// The same of one lane.
    #[must_use]
    pub fn poll_scan_of(&self, lane: u8) -> Option<Scan> {
        let due = |op: &&Op| !op.ended && op.scanned < op.geometry.windows();
        // Within a lane ops are scanned one after the other, as they are sent.
        let op = self.ops.iter().filter(|op| op.descriptor.lane == lane).find(due)?;
        (op.scanned < op.passed.saturating_add(Self::SCAN_AHEAD))
            .then_some(Scan { op: op.id, index: op.scanned })
    }

    /// Takes the non-zero blocks of the window that [`Self::poll_scan`] named.
    pub fn handle_scanned(&mut self, scan: Scan, mask: u64) {
        let Some(op) = self.op_mut(scan.op) else { return };
        debug_assert_eq!(scan.index, op.scanned, "windows are scanned in order");
        op.masks[scan.index as usize] = mask;
        op.scanned += 1;
        let lane = op.descriptor.lane;
        self.note_scanned(lane);
    }

    /// Tells the streams of a lane how far its ops are scanned.
    fn note_scanned(&mut self, lane: u8) {
        for shard in self.config.own_shards() {
            let stream = &mut self.streams[self.config.stream(lane, shard)];
            let ops = &self.ops;
            stream.note_scanned(|op| find(ops, op).map_or(u32::MAX, |at| ops[at].scanned));
        }
    }

    /// What an op in flight is.
    #[must_use]
    pub fn descriptor(&self, op: OpId) -> Option<Descriptor> {
        self.op(op).map(|op| op.descriptor)
    }

    /// The blocks of a window that this rank contributes.
    #[must_use]
    pub fn mask(&self, window: WindowId) -> u64 {
        self.op(window.op).and_then(|op| op.masks.get(window.index as usize)).copied().unwrap_or(0)
    }

    /// The next op that ended.
    pub fn poll_outcome(&mut self) -> Option<Outcome> {
        self.outcomes.pop_front()
    }

    /// When [`Self::handle_timeout`] is due; [`Time::NEVER`] when nothing is awaited.
    #[must_use]
    pub fn poll_timeout(&self) -> Time {
        let ops = self.ops.iter().filter(|op| !op.ended).map(|op| op.deadline);
        let streams = self.streams.iter().map(|stream| {
            let path = &self.paths[usize::from(stream.shard)];
            stream.timeout(path, self.heard)
        });
        let failures = self.failures.iter().map(Failure::due);
        let waits = core::iter::once(self.waits_due());
        ops.chain(streams).chain(failures).chain(waits).min().unwrap_or(Time::NEVER)
    }

    /// Acts on what did not happen in time.
    pub fn handle_timeout(&mut self, now: Time, observer: &mut impl Observer) {
        for stream in &mut self.streams {
            let path = &self.paths[usize::from(stream.shard)];
            stream.handle_timeout(now, path, self.heard);
        }
        self.note_waits_due(now);
        let mut late = false;
        while let Some((id, started)) = self.late(now) {
            let (after, idle) = (now.since(started), now.since(self.heard));
            let missing = self.waited_for(now, id);
            self.fail(id, OpError::Timeout { op: id, after, missing, idle }, observer);
            late = true;
        }
        if late {
            self.end("an earlier op timed out", observer);
        }
    }

    /// The ranks that the streams of an op wait for, or that an op before it in its lane does.
    fn waited_for(&self, now: Time, id: OpId) -> Vec<(Rank, Span)> {
        let mut missing = Vec::new();
        let lane = self.op(id).map(|op| op.descriptor.lane);
        for stream in self.streams.iter().filter(|stream| lane == Some(stream.lane)) {
            for said in stream.waited.ranks(now) {
                if missing.iter().all(|(rank, _)| *rank != said.0) {
                    missing.push(*said);
                }
            }
        }
        missing
    }

    /// An op that should have ended by now, and when it started.
    fn late(&self, now: Time) -> Option<(OpId, Time)> {
        let late = self.ops.iter().find(|op| !op.ended && op.deadline <= now)?;
        Some((late.id, late.started))
    }

    /// Notes that the aggregator of `shards` goes on without a rank. Ops whose results lack it may
    /// have waited for its name.
    pub fn handle_gone(&mut self, shards: Range<u8>, rank: Rank, observer: &mut impl Observer) {
        for path in self.paths.iter_mut().take(shards.end.into()).skip(shards.start.into()) {
            if path.gone.len() < Flags::MAX_ABSENT && !path.gone.contains(&rank) {
                path.gone.push(rank);
            }
        }
        self.conclude_all(observer);
    }

    /// Ends the ops that have all their results and waited for a name.
    fn conclude_all(&mut self, observer: &mut impl Observer) {
        let done = |op: &&Op| !op.ended && op.streams_left == 0;
        let done: Vec<_> = self.ops.iter().filter(done).map(|op| op.id).collect();
        done.into_iter().for_each(|op| self.conclude(op, observer));
    }

    /// Ends the session because ranks are gone: every op in flight fails.
    pub fn handle_peers_lost(&mut self, ranks: &[Rank], why: Loss, observer: &mut impl Observer) {
        self.fail_all(&OpError::PeerLost { ranks: ranks.to_vec(), why }, observer);
        if self.ended.is_none() {
            self.lost = Some((ranks.to_vec(), why));
        }
        self.end("a rank is gone", observer);
    }

    fn fail_all(&mut self, error: &OpError, observer: &mut impl Observer) {
        while let Some(id) = self.ops.iter().find(|op| !op.ended).map(|op| op.id) {
            self.fail(id, error.clone(), observer);
        }
    }

    /// Ends the session: every op in flight fails, and none can be started any more.
    pub fn end(&mut self, why: impl Into<Cow<'static, str>>, observer: &mut impl Observer) {
        let why = why.into();
        self.ended.get_or_insert_with(|| why.clone());
        self.fail_all(&OpError::Ended { why }, observer);
        // The job goes on nowhere with this rank, so nobody lacks what it has.
        self.streams.iter_mut().for_each(Stream::forget_kept);
        self.drop_ended();
    }

    /// Notes that the result of `op` holds a block that overflowed. The op runs to its end, since
    /// the other ranks need this one, and then fails.
    pub fn handle_overflow(&mut self, op: OpId, element: u64) {
        if let Some(op) = self.op_mut(op) {
            let error = OpError::Overflow { op: op.id, element };
            op.error.get_or_insert(error);
        }
    }

    /// Ends an op with an error; its windows are skipped from now on.
    fn fail(&mut self, id: OpId, error: OpError, observer: &mut impl Observer) {
        let Some(op) = self.op_mut(id).filter(|op| !op.ended) else { return };
        op.ended = true;
        op.failed = true;
        observer.on_event(&Event::Failed { op: id, error: Some(&error) });
        self.outcomes.push_back(Outcome { op: id, result: Err(error), absent: Vec::new() });
        for stream in &mut self.streams {
            let congestion = &mut self.paths[usize::from(stream.shard)].congestion;
            stream.fail(id, |len| congestion.on_forgotten(len));
        }
        self.drop_ended();
        // Ops behind it may be scanned already, and only this one's windows held them back.
        (0..self.config.lanes).for_each(|lane| self.note_scanned(lane));
    }

    /// Notes that one more stream has all results of an op.
    fn finish_stream(&mut self, id: OpId, observer: &mut impl Observer) {
        let Some(op) = self.op_mut(id).filter(|op| !op.failed) else { return };
        op.streams_left -= 1;
        if op.streams_left == 0 && !op.ended {
            self.conclude(id, observer);
        }
    }

    /// The ranks that the results of an op lack; `None` while the name of one is yet to come.
    fn absent(&self, op: &Op) -> Option<Vec<Rank>> {
        let Lacked { mut ranks, unnamed } = self.lacked(op);
        if unnamed > 0 {
            return None;
        }
        ranks.sort_unstable();
        ranks.dedup();
        Some(ranks)
    }

    /// Ends an op that has all its results, unless it is not known yet whom they lack.
    fn conclude(&mut self, id: OpId, observer: &mut impl Observer) {
        let Some(absent) = self.op(id).and_then(|op| self.absent(op)) else { return };
        let Some(op) = self.op_mut(id) else { return };
        op.ended = true;
        let result = op.error.take().map_or(Ok(()), Err);
        match &result {
            Ok(()) => observer.on_event(&Event::Done { op: id }),
            Err(error) => observer.on_event(&Event::Failed { op: id, error: Some(error) }),
        }
        self.outcomes.push_back(Outcome { op: id, result, absent });
        self.drop_ended();
    }

    /// Drops the oldest ops that ended, but for those whose sums another rank may yet lack.
    fn drop_ended(&mut self) {
        while self.ops.front().is_some_and(|op| op.ended && !self.is_kept(op)) {
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

    /// How many windows an op is scanned ahead of being sent.
    const SCAN_AHEAD: u32 = 1024;
}

/// The place of an op among those in flight, whose numbers are in a row but for those of other
/// shards.
fn find(ops: &VecDeque<Op>, id: OpId) -> Option<usize> {
    let at = id.0.checked_sub(ops.front()?.id.0)? as usize;
    if ops.get(at).is_some_and(|op| op.id == id) {
        return Some(at);
    }
    ops.binary_search_by_key(&id, |op| op.id).ok()
}
