//! The engine: drives the worker half of the protocol over sockets, on whichever thread waits.

mod migration;
mod receive;
mod seal;
mod send;
mod staged;

#[cfg(test)]
pub(crate) mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use racksum_net::auth::{Opener, Sealer};
use racksum_net::clock::Clock;
use racksum_net::udp::UdpSocket;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::time::{Span, Time};
use racksum_proto::worker::{Config, Outcome, Scan, Worker};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

use crate::fault::{Dice, Faults};
use crate::payload::{Data, Payload};
use crate::tensor::{Region, meet};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::ids::JobId;
use receive::{Inbox, RecvStatus};
use send::Staging;

/// What a worker has sent and received, in UDP payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stats {
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Datagrams sent.
    pub tx_datagrams: u64,
    /// Datagrams received.
    pub rx_datagrams: u64,
    /// Fragments of data sent again.
    pub retransmits: u64,
    /// Times results were asked for.
    pub asks: u64,
    /// Of those, how many because nothing was heard.
    pub probes: u64,
    /// Datagrams that changed nothing.
    pub rejects: u64,
    /// Messages that the kernel dropped because the receive buffer was full.
    pub kernel_drops: u64,
    /// Messages that the kernel refused to send, or had no room for too long; they are in what was
    /// sent all the same.
    pub send_failures: u64,
}

/// The sockets and addresses of a job.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) socket: Arc<UdpSocket>,
    pub(crate) groups: Arc<[UdpSocket]>,
    pub(crate) shards: Vec<Link>,
    /// How many of them each aggregator has.
    pub(crate) shards_each: u8,
}

/// The way to a shard.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) addr: SocketAddr,
    /// The job's number there.
    pub(crate) job: JobId,
    /// Seals what is sent, and opens what is heard, if datagrams are authenticated.
    pub(crate) auth: Option<(Sealer, Opener)>,
}

/// What one step came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Some op has ended.
    pub(crate) ended: bool,
    pub(crate) next: Next,
}

/// What a step leaves to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// There may be more to do at once.
    Step,
    /// There may be a few datagrams at once, or many a little later: about this many bytes are to
    /// come.
    Gather(u64),
    /// Wait for datagrams, but not longer than this.
    Wait(Option<Span>),
    /// Wait to be told something, but not longer than this: datagrams are not looked at.
    Sleep(Option<Span>),
}

/// An op that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) result: Result<(), OpError>,
    /// The ranks that some of the result lacks.
    pub(crate) absent: Vec<Rank>,
    pub(crate) payload: Payload,
}

/// The engine of one rank.
pub(crate) struct Engine {
    machine: Worker,
    world: u16,
    clock: Clock,
    links: Links,
    payloads: BTreeMap<OpId, Payload>,
    finished: BTreeMap<OpId, Finished>,
    /// What is kept of ops that have ended, for ranks that may lack it if the job moves.
    kept: BTreeMap<OpId, Payload>,
    /// The job is between two aggregators: what has become of those that were tried.
    migration: Option<String>,
    /// Ops in flight that nobody will wait for.
    abandoned: BTreeSet<OpId>,
    /// Ops that have not begun, and the earlier ones on the same memory that they wait for.
    held: BTreeMap<OpId, Vec<OpId>>,
    /// Of the rank's own socket, and of those of multicast groups.
    inboxes: [Inbox; 2],
    /// The last result was a large piece of a tensor, so that the next may be one.
    in_place: bool,
    staging: Staging,
    stats: Stats,
    /// Memory for the sums of ops on lists of blocks.
    spare: Vec<Vec<u8>>,
    /// Faults on the way out and in.
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

    /// What an op on some data is to have in flight.
    pub(crate) fn payload(&self, descriptor: Descriptor, data: Data) -> Payload {
        Payload::new(descriptor, data, self.world, self.machine.config().may_move)
    }

    /// The ops in flight that have some of a tensor's memory.
    pub(crate) fn users_of(&self, data: &Data) -> Vec<OpId> {
        let Some(tensor) = data.region().map(Region::extent) else { return Vec::new() };
        let has_some = |other: &Payload| {
            other.data.region().is_some_and(|other| meet(&other.extent(), &tensor))
        };
        let users = self.payloads.iter().filter(|(_, other)| has_some(other));
        users.map(|(op, _)| *op).collect()
    }

    /// Starts an op, or numbers it and holds it until those before it on the same memory have
    /// ended: nothing of an op is sent before it is scanned, so one that is not scanned only waits.
    pub(crate) fn submit(
        &mut self,
        mut payload: Payload,
        timeout: Span,
    ) -> Result<OpId, SubmitError> {
        let (now, descriptor) = (self.clock.now(), payload.descriptor);
        if let Data::Blocks(blocks) = &mut payload.data {
            blocks.reuse(self.spare.pop().unwrap_or_default());
        }
        let before = self.users_of(&payload.data);
        // The blocks of a held op may be known, but not sent: the scan names them when it begins.
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

    /// Takes back the memory of sums that are of no more use, for those of later ops.
    pub(crate) fn recycle(&mut self, memory: Vec<u8>) {
        if self.spare.len() < MAX_SPARE {
            self.spare.push(memory);
        }
    }

    /// Receives, times out, scans and sends what is due.
    pub(crate) fn step(&mut self) -> Progress {
        if self.migration.is_some() {
            return self.wait_for_aggregator();
        }
        let received = self.receive();
        let now = self.clock.now();
        let due = self.machine.poll_timeout();
        // What has arrived may hold what is awaited, but a flood must not put off every timeout.
        if due <= now && (received == RecvStatus::Nothing || now.since(due) > GRACE) {
            self.machine.handle_timeout(now, &mut ());
        }
        self.transmit(now);
        let scanned = self.scan();
        if scanned {
            self.transmit(now);
        }
        self.flush();
        // An op may end because nothing came: whoever waits for it must look before it sleeps.
        let ended = self.collect();
        let next = match received {
            _ if scanned || ended => Next::Step,
            RecvStatus::Batch => Next::Step,
            RecvStatus::Some => Next::Gather(self.machine.backlog()),
            RecvStatus::Nothing => Next::Wait(self.patience()),
        };
        Progress { ended, next }
    }

    /// Finds the non-zero blocks of a few windows.
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

    /// The next window to scan, lanes in priority order. A lane waits for its first op that is not
    /// scanned, which may wait for one of another lane.
    fn next_scan(&self) -> Option<Scan> {
        let may_begin = |scan: &Scan| !self.held.contains_key(&scan.op);
        let lanes = 0..self.machine.config().lanes;
        lanes.into_iter().find_map(|lane| self.machine.poll_scan_of(lane).filter(may_begin))
    }

    /// Sets aside the ops that have ended. Returns whether any had.
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

    /// Keeps an op's outcome for whoever waits for it.
    fn finish(&mut self, op: OpId, finished: Finished) {
        if !self.abandoned.remove(&op) {
            self.finished.insert(op, finished);
        }
    }

    /// The outcome of an op that has ended, with what it worked on.
    pub(crate) fn take(&mut self, op: OpId) -> Option<Finished> {
        self.finished.remove(&op)
    }

    /// Notes that nobody will wait for an op: what it works on is freed once it ends.
    pub(crate) fn abandon(&mut self, op: OpId) {
        if self.finished.remove(&op).is_none() && self.is_in_flight(op) {
            self.abandoned.insert(op);
        }
    }

    /// Whether an op has started and not ended.
    pub(crate) fn is_in_flight(&self, op: OpId) -> bool {
        self.payloads.contains_key(&op)
    }

    /// Whether one more op of a lane may be in flight.
    pub(crate) fn has_room(&mut self, lane: u8) -> bool {
        self.machine.has_room(lane)
    }

    /// Whether so many more ops of a lane may be in flight.
    pub(crate) fn has_room_for(&mut self, lane: u8, ops: usize) -> bool {
        self.machine.has_room_for(lane, ops)
    }

    /// Whether nothing is in flight, not even what other ranks may lack.
    pub(crate) fn is_idle(&self) -> bool {
        self.machine.is_idle()
    }

    /// Whether there is nothing to do until an op is started.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.machine.is_at_rest()
    }

    /// The number of the next op, if none is in flight and any may be started.
    pub(crate) fn rests_at(&self) -> Option<OpId> {
        let rests = self.payloads.is_empty() && !self.machine.has_ended();
        rests.then(|| self.machine.next_op())
    }

    /// How long to wait for datagrams before something is due.
    fn patience(&self) -> Option<Span> {
        let at = self.machine.poll_timeout();
        (at < Time::NEVER).then(|| at.since(self.clock.now()))
    }

    /// Goes on without a rank, as the aggregator does that comes `place`th.
    pub(crate) fn go_on_without(&mut self, rank: Rank, place: u8) {
        let first = place.saturating_mul(self.links.shards_each);
        let shards = first..first.saturating_add(self.links.shards_each);
        self.machine.handle_gone(shards, rank, &mut ());
        self.collect();
    }

    /// Ends every op in flight: ranks are gone.
    pub(crate) fn lose(&mut self, ranks: &[Rank], why: Loss) {
        self.drain();
        self.machine.handle_peers_lost(ranks, why, &mut ());
        self.collect();
    }

    /// Ends every op in flight.
    pub(crate) fn end(&mut self, why: impl Into<Cow<'static, str>>) {
        self.drain();
        self.end_at_once(why);
    }

    /// Ends every op in flight, of a session whose socket is of no use any more.
    fn end_at_once(&mut self, why: impl Into<Cow<'static, str>>) {
        self.machine.end(why, &mut ());
        self.collect();
    }

    /// Takes what has arrived, so that ops end with the results that are there: what ends a session
    /// is said on another way, and may overtake them.
    fn drain(&mut self) {
        // Of a job that moves, nothing is taken.
        if self.migration.is_some() {
            return;
        }
        let began = self.clock.now();
        while self.receive() > RecvStatus::Nothing && self.clock.now().since(began) < DRAIN {}
    }

    /// Ends every op in flight without the machine, which cannot be trusted after a panic.
    pub(crate) fn give_up(&mut self, why: &'static str) {
        for (op, payload) in std::mem::take(&mut self.payloads) {
            let result = Err(OpError::Ended { why: why.into() });
            self.finish(op, Finished { result, absent: Vec::new(), payload });
        }
    }

    /// The rank's own socket, and those of multicast groups.
    pub(crate) fn sockets(&self) -> (Arc<UdpSocket>, Arc<[UdpSocket]>) {
        (Arc::clone(&self.links.socket), Arc::clone(&self.links.groups))
    }

    pub(crate) fn stats(&self) -> Stats {
        let counters = self.machine.counters();
        let sockets = std::iter::once(&*self.links.socket).chain(self.links.groups.iter());
        Stats {
            retransmits: counters.fragments_again,
            asks: counters.asks,
            probes: counters.probes,
            rejects: counters.rejects.total(),
            kernel_drops: sockets.map(UdpSocket::drops).sum(),
            send_failures: self.links.socket.send_failures(),
            ..self.stats
        }
    }
}

/// How long what has arrived is taken before a session ends: a flood has no end.
const DRAIN: Span = Span::from_millis(200);
/// How long a timeout waits for what has arrived already.
const GRACE: Span = Span::from_millis(10);
/// Sums whose memory is kept for later ops.
const MAX_SPARE: usize = 4;
/// Windows scanned at a time, between looks at the socket.
const SCAN_BATCH: usize = 8;
