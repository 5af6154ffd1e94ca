//! The engine, which drives the worker's side of the protocol over sockets. It runs on a thread
//! that waits for an op, or on a background thread if no thread waits.

mod receive;
mod seal;
mod send;
mod staged;
mod suspension;

#[cfg(test)]
pub(crate) mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Range;

use racksum_net::auth::{Opener, Sealer};
use racksum_net::clock::Clock;
use racksum_net::udp::UdpSocket;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::observer::EventCounts;
use racksum_proto::stats::Stats;
use racksum_proto::status::OwnCounters;
use racksum_proto::time::{Span, Time};
use racksum_proto::worker::{Config, Outcome, Scan, Worker};
use std::sync::Arc;

use crate::fault::{Dice, Faults};
use crate::payload::{Data, Payload};
use crate::tensor::{Region, meet};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::ids::JobId;
pub(crate) use receive::Readable;
use receive::{Inbox, RecvStatus};
use send::Staging;

/// The sockets and addresses of a job.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) socket: Arc<UdpSocket>,
    pub(crate) groups: Arc<[UdpSocket]>,
    pub(crate) shards: Vec<Link>,
    /// The number of shards of each aggregator.
    pub(crate) shards_each: u8,
}

/// The address and keys of a shard.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) addr: SocketAddr,
    /// The job's number at the shard.
    pub(crate) job: JobId,
    /// The sealer and the opener of datagrams, if datagrams are authenticated.
    pub(crate) auth: Option<(Sealer, Opener)>,
}

/// The result of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Whether some op has ended.
    pub(crate) ended: bool,
    pub(crate) next: Next,
}

/// The action to take after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Step again immediately, because there may be more to do.
    Step,
    /// Wait for datagrams, at most for `patience`. If datagrams are arriving, about `backlog` bytes
    /// have yet to arrive; otherwise `backlog` is 0.
    Wait { patience: Option<Span>, backlog: u64 },
    /// Wait for a wake-up, at most this long, and ignore datagrams.
    Sleep(Option<Span>),
}

/// An op that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) result: Result<(), OpError>,
    /// The ranks that are missing from parts of the result.
    pub(crate) absent: Vec<Rank>,
    pub(crate) payload: Payload,
}

/// The engine of one rank.
pub(crate) struct Engine {
    machine: Worker,
    /// The counts of the machine's events, and of rejected datagrams that never reach the machine.
    events: EventCounts,
    world: u16,
    clock: Clock,
    links: Links,
    payloads: BTreeMap<OpId, Payload>,
    finished: BTreeMap<OpId, Finished>,
    /// Sums of ended ops, kept for ranks that may lack them if the job moves.
    kept: BTreeMap<OpId, Payload>,
    /// During a migration, the outcome at each aggregator tried so far, as text.
    migration: Option<String>,
    /// Ops in flight that no caller will wait for.
    abandoned: BTreeSet<OpId>,
    /// Ops that have not begun, each with the earlier ops on the same memory that it waits for.
    held: BTreeMap<OpId, Vec<OpId>>,
    /// The inboxes of the rank's own socket and of the multicast sockets.
    inboxes: [Inbox; 2],
    /// Whether the last message was a result that could be received in place. If so, the next
    /// message may be one too.
    in_place: bool,
    staging: Staging,
    /// The counts of bytes and datagrams, and the kernel's counts for the sockets that were used
    /// before the last move.
    stats: Stats,
    /// Spare memory for the sums of ops on lists of blocks.
    spare: Vec<Vec<u8>>,
    /// Injected faults for sent and for received datagrams.
    faults: Option<[Dice; 2]>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("links", &self.links).finish_non_exhaustive()
    }
}

impl Engine {
    pub(crate) fn new(
        config: Config,
        world: u16,
        links: Links,
        clock: Clock,
        faults: &Faults,
    ) -> Self {
        let mut machine = Worker::new(config, clock.now());
        for (shard, link) in (0..).zip(&links.shards) {
            machine.set_shard_job(shard, link.job);
        }
        let dice = |direction: u64| Dice::new(*faults, u64::from(config.rank.0) * 2 + direction);
        Self {
            machine,
            events: EventCounts::default(),
            world,
            clock,
            links,
            payloads: BTreeMap::new(),
            finished: BTreeMap::new(),
            kept: BTreeMap::new(),
            migration: None,
            abandoned: BTreeSet::new(),
            held: BTreeMap::new(),
            inboxes: [Inbox::new(), Inbox::new()],
            in_place: false,
            staging: Staging::new(config.lanes),
            stats: Stats::default(),
            spare: Vec::new(),
            faults: faults.any().then(|| [dice(0), dice(1)]),
        }
    }

    /// Creates the payload of an op on `data`.
    pub(crate) fn payload(&self, descriptor: Descriptor, data: Data) -> Payload {
        Payload::new(descriptor, data, self.world, self.machine.config().may_move)
    }

    /// Returns the ops in flight whose memory overlaps a tensor's.
    pub(crate) fn users_of(&self, data: &Data) -> Vec<OpId> {
        let Some(tensor) = data.region().map(Region::extent) else { return Vec::new() };
        let has_some = |other: &Payload| {
            other.data.region().is_some_and(|other| meet(&other.extent(), &tensor))
        };
        let users = self.payloads.iter().filter(|(_, other)| has_some(other));
        users.map(|(op, _)| *op).collect()
    }

    /// Numbers an op and starts it. If earlier ops use the same memory, the op is held until they
    /// have ended. A held op is not scanned, and the engine sends nothing of an op before its scan.
    pub(crate) fn submit(
        &mut self,
        mut payload: Payload,
        timeout: Span,
    ) -> Result<OpId, SubmitError> {
        let (now, descriptor) = (self.clock.now(), payload.descriptor);
        if let Data::Blocks(blocks) = &mut payload.data {
            blocks.reuse(self.spare.pop().unwrap_or_default());
        }
        // The rank may have been prepared to move since the payload was created.
        payload.note_may_move(self.machine.config().may_move);
        let before = self.users_of(&payload.data);
        // The blocks of a held op may be known, but must not be sent yet. The scan names them when
        // the op begins.
        let op = match payload.masks().filter(|_| before.is_empty()) {
            Some(masks) => self.machine.submit_scanned(now, descriptor, masks, timeout),
            None => self.machine.submit(now, descriptor, timeout),
        }?;
        self.payloads.insert(op, payload);
        if !before.is_empty() {
            self.held.insert(op, before);
        }
        Ok(op)
    }

    /// Takes memory of sums that are no longer needed. Keeps it for the sums of later ops, or frees
    /// it if there is enough spare memory.
    pub(crate) fn recycle(&mut self, memory: Vec<u8>) {
        if self.spare.len() < MAX_SPARE {
            self.spare.push(memory);
        }
    }

    /// Performs one step: receives datagrams from the readable sockets, handles timeouts, scans
    /// windows and sends messages. During a migration, only checks deadlines.
    pub(crate) fn step(&mut self, readable: Readable) -> Progress {
        if self.migration.is_some() {
            return self.wait_for_aggregator();
        }
        // Datagrams that have arrived may hold the awaited results, so read all sockets before
        // handling timeouts. But a flood must not delay timeouts forever.
        let is_due = self.machine.poll_timeout() <= self.clock.now();
        let received = self.receive(if is_due { Readable::ALL } else { readable });
        let now = self.clock.now();
        let due = self.machine.poll_timeout();
        let has_read = received == RecvStatus::Nothing || now.since(due) > GRACE;
        if is_due && due <= now && has_read {
            self.machine.handle_timeout(now, &mut self.events);
        }
        self.transmit(now);
        if self.scan() {
            self.transmit(now);
        }
        self.flush();
        // An op may end by timeout. A thread that waits for the op must see that before it sleeps.
        let ended = self.collect();
        let next = match received {
            _ if ended || self.next_scan().is_some() => Next::Step,
            RecvStatus::Batch => Next::Step,
            RecvStatus::Some => self.wait(self.machine.backlog()),
            RecvStatus::Nothing => self.wait(0),
        };
        Progress { ended, next }
    }

    /// Finds the non-zero blocks of a few windows. Returns whether it scanned any.
    fn scan(&mut self) -> bool {
        let mut any = false;
        for _ in 0..SCAN_BATCH {
            let Some(scan) = self.next_scan() else { break };
            let Some(payload) = self.payloads.get_mut(&scan.op) else { break };
            let mask = payload.scan(scan.index);
            self.machine.handle_scanned(scan, mask);
            any = true;
        }
        any
    }

    /// Returns the next window to scan, from the first lane in priority order that has one. While
    /// the first unscanned op of a lane is held, the whole lane waits. The op may be held by an op
    /// of another lane.
    fn next_scan(&self) -> Option<Scan> {
        let may_begin = |scan: &Scan| !self.held.contains_key(&scan.op);
        let lanes = 0..self.machine.config().lanes;
        lanes.into_iter().find_map(|lane| self.machine.poll_scan_of(lane).filter(may_begin))
    }

    /// Collects the outcomes of ops that have ended. Returns whether there were any.
    fn collect(&mut self) -> bool {
        let mut any = false;
        while let Some(outcome) = self.machine.poll_outcome() {
            any = true;
            let Outcome { op, result, absent } = outcome;
            self.held.remove(&op);
            self.held.retain(|_, before| {
                before.retain(|earlier| *earlier != op);
                !before.is_empty()
            });
            if let Some(mut payload) = self.payloads.remove(&op) {
                if self.machine.config().may_move {
                    let windows: Vec<_> = self.machine.windows_to_keep(op).collect();
                    if !windows.is_empty() {
                        self.kept.insert(op, payload.keep(windows));
                    }
                }
                self.finish(op, Finished { result, absent, payload });
            }
        }
        self.drop_kept();
        any
    }

    /// Keeps an op's outcome for its caller, unless the op was abandoned.
    fn finish(&mut self, op: OpId, finished: Finished) {
        if !self.abandoned.remove(&op) {
            self.finished.insert(op, finished);
        }
    }

    /// Takes the outcome and the payload of an ended op.
    pub(crate) fn take(&mut self, op: OpId) -> Option<Finished> {
        self.finished.remove(&op)
    }

    /// Abandons an op that no caller will wait for. Its payload is freed when the op ends, or
    /// immediately if the op has already ended.
    pub(crate) fn abandon(&mut self, op: OpId) {
        if self.finished.remove(&op).is_none() && self.is_in_flight(op) {
            self.abandoned.insert(op);
        }
    }

    /// Returns whether an op has started and not ended.
    pub(crate) fn is_in_flight(&self, op: OpId) -> bool {
        self.payloads.contains_key(&op)
    }

    /// Returns whether a lane has room for one more op in flight.
    pub(crate) fn has_room(&mut self, lane: u8) -> bool {
        self.machine.has_room(lane)
    }

    /// Returns whether a lane has room for `ops` more ops in flight.
    pub(crate) fn has_room_for(&mut self, lane: u8, ops: usize) -> bool {
        self.machine.has_room_for(lane, ops)
    }

    /// Returns whether no op is in flight and no other rank can lack a sum that this rank has.
    pub(crate) fn is_idle(&self) -> bool {
        self.machine.is_idle()
    }

    /// Returns whether the engine has nothing to do until an op starts.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.machine.is_at_rest()
    }

    /// Returns the number of the next op, if no op is in flight and the session has not ended.
    pub(crate) fn rests_at(&self) -> Option<OpId> {
        let rests = self.payloads.is_empty() && !self.machine.has_ended();
        rests.then(|| self.machine.next_op())
    }

    /// Returns a [`Next::Wait`] that ends at the next timeout.
    fn wait(&self, backlog: u64) -> Next {
        let at = self.machine.poll_timeout();
        let patience = (at < Time::NEVER).then(|| at.since(self.clock.now()));
        Next::Wait { patience, backlog }
    }

    /// Notes that the aggregator with index `place` continues without a rank.
    pub(crate) fn continue_without(&mut self, rank: Rank, place: u8) {
        self.machine.handle_gone(self.shards_at(place), rank, &mut self.events);
        self.collect();
    }

    /// Handles the datagrams that have arrived. Then ends the session and every op in flight,
    /// because ranks are lost.
    pub(crate) fn lose(&mut self, ranks: &[Rank], why: Loss) {
        self.drain();
        self.machine.handle_peers_lost(ranks, why, &mut self.events);
        self.collect();
    }

    /// Handles the datagrams that have arrived. Then ends the session and every op in flight.
    pub(crate) fn end(&mut self, why: impl Into<Cow<'static, str>>) {
        self.drain();
        self.end_at_once(why);
    }

    /// Ends the session and every op in flight, without first receiving the datagrams that have
    /// arrived.
    fn end_at_once(&mut self, why: impl Into<Cow<'static, str>>) {
        self.machine.end(why, &mut self.events);
        self.collect();
    }

    /// Receives the datagrams that have arrived, because they may hold results of ops in flight.
    /// The message that ends a session arrives over another connection, and may overtake results.
    fn drain(&mut self) {
        // The engine receives nothing during a migration.
        if self.migration.is_some() {
            return;
        }
        let began = self.clock.now();
        while self.receive(Readable::ALL) > RecvStatus::Nothing
            && self.clock.now().since(began) < DRAIN
        {}
    }

    /// Ends every op in flight without the machine, which cannot be trusted after a panic.
    pub(crate) fn give_up(&mut self, why: &'static str) {
        for (op, payload) in std::mem::take(&mut self.payloads) {
            let result = Err(OpError::Ended { why: why.into() });
            self.finish(op, Finished { result, absent: Vec::new(), payload });
        }
    }

    /// Returns the shards of the aggregator with index `place`.
    fn shards_at(&self, place: u8) -> Range<u8> {
        let first = place.saturating_mul(self.links.shards_each);
        first..first.saturating_add(self.links.shards_each)
    }

    /// Returns what this rank has counted at the aggregator with index `place`.
    pub(crate) fn own_counters(&self, place: u8) -> OwnCounters {
        let counters = self.machine.counters(self.clock.now(), self.shards_at(place));
        OwnCounters { kernel_drops: self.stats().kernel_drops, ..counters }
    }

    /// Returns the rank's own socket and the multicast sockets.
    pub(crate) fn sockets(&self) -> (Arc<UdpSocket>, Arc<[UdpSocket]>) {
        (Arc::clone(&self.links.socket), Arc::clone(&self.links.groups))
    }

    pub(crate) fn stats(&self) -> Stats {
        let EventCounts { fragments_again, asks, probes, rejects, .. } = self.events;
        let sockets = std::iter::once(&*self.links.socket).chain(self.links.groups.iter());
        Stats {
            retransmits: fragments_again,
            asks,
            probes,
            rejects: rejects.total(),
            kernel_drops: self.stats.kernel_drops + sockets.map(UdpSocket::drops).sum::<u64>(),
            send_failures: self.stats.send_failures + self.links.socket.send_failures(),
            ..self.stats
        }
    }
}

/// The longest time to receive datagrams before a session ends. Without this limit, a flood could
/// keep the session from ending.
const DRAIN: Span = Span::from_millis(200);
/// How long an expired timeout may wait while the engine handles datagrams that have already
/// arrived.
const GRACE: Span = Span::from_millis(10);
/// The number of spare buffers to keep for the sums of later ops.
const MAX_SPARE: usize = 4;
/// The number of windows to scan between two receive calls.
const SCAN_BATCH: usize = 8;
