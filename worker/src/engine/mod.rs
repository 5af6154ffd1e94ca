//! The engine: drives the worker half of the protocol over sockets, on whichever thread waits.

mod receive;
mod send;

use std::collections::BTreeMap;
use std::net::SocketAddr;

use bytes::BytesMut;
use racksum_net::clock::Clock;
use racksum_net::udp::{RECV_CAPACITY, RecvRing, UdpSocket};
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::geometry::Geometry;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::time::{Span, Time};
use racksum_proto::worker::{Config, Worker};
use std::sync::Arc;

use crate::blocks::BlockSet;
use crate::fault::{Dice, Faults};
use crate::payload::{Data, Payload};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::ids::JobId;
use send::Staging;

/// What a worker has sent and received, in UDP payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
}

/// The sockets and addresses of a job.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) socket: Arc<UdpSocket>,
    pub(crate) groups: Arc<[UdpSocket]>,
    /// Each shard's address, and the job's number there.
    pub(crate) shards: Vec<(SocketAddr, JobId)>,
}

/// The engine of one rank.
pub(crate) struct Engine {
    machine: Worker,
    world: u16,
    clock: Clock,
    links: Links,
    payloads: BTreeMap<OpId, Payload>,
    finished: BTreeMap<OpId, (Result<(), OpError>, Payload)>,
    recv: RecvRing,
    buffers: Vec<BytesMut>,
    staging: Staging,
    stats: Stats,
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
        for (shard, (_, job)) in (0..).zip(&links.shards) {
            machine.set_shard_job(shard, *job);
        }
        let dice = |direction: u64| Dice::new(*faults, u64::from(config.rank.0) * 2 + direction);
        Self {
            machine,
            world,
            clock,
            links,
            payloads: BTreeMap::new(),
            finished: BTreeMap::new(),
            recv: RecvRing::new(),
            buffers: (0..RECEIVE_BATCH).map(|_| BytesMut::with_capacity(RECV_CAPACITY)).collect(),
            staging: Staging::new(),
            stats: Stats::default(),
            faults: faults.any().then(|| [dice(0), dice(1)]),
        }
    }

    /// Starts an op on a tensor.
    pub(crate) fn submit(
        &mut self,
        descriptor: Descriptor,
        data: Data,
        timeout: Span,
    ) -> Result<OpId, SubmitError> {
        let op = self.machine.submit(self.clock.now(), descriptor, timeout)?;
        self.payloads.insert(op, Payload::new(descriptor, data, self.world));
        Ok(op)
    }

    /// Starts an op on a list of blocks.
    pub(crate) fn submit_blocks(
        &mut self,
        descriptor: Descriptor,
        blocks: BlockSet,
        timeout: Span,
    ) -> Result<OpId, SubmitError> {
        let masks = blocks.masks(&Geometry::new(&descriptor));
        let op = self.machine.submit_scanned(self.clock.now(), descriptor, masks, timeout)?;
        let payload = Payload::new(descriptor, Data::Blocks(blocks), self.world);
        self.payloads.insert(op, payload);
        Ok(op)
    }

    /// Receives, times out, scans and sends what is due. Returns whether there may be more to do
    /// at once.
    pub(crate) fn step(&mut self) -> bool {
        let received = self.receive();
        let now = self.clock.now();
        if !received && self.machine.poll_timeout() <= now {
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
        received || scanned || ended
    }

    /// Finds the non-zero blocks of a few windows.
    fn scan(&mut self) -> bool {
        let mut any = false;
        for _ in 0..SCAN_BATCH {
            let Some(scan) = self.machine.poll_scan() else { break };
            let Some(payload) = self.payloads.get_mut(&scan.op) else { break };
            let mask = payload.scan(scan.index);
            self.machine.handle_scanned(scan, mask);
            any = true;
        }
        any
    }

    /// Sets aside the ops that have ended. Returns whether any had.
    fn collect(&mut self) -> bool {
        let mut any = false;
        while let Some(outcome) = self.machine.poll_outcome() {
            any = true;
            if let Some(payload) = self.payloads.remove(&outcome.op) {
                self.finished.insert(outcome.op, (outcome.result, payload));
            }
        }
        any
    }

    /// The outcome of an op that has ended, with what it worked on.
    pub(crate) fn take(&mut self, op: OpId) -> Option<(Result<(), OpError>, Payload)> {
        self.finished.remove(&op)
    }

    /// Whether an op has ended.
    pub(crate) fn has_ended(&self, op: OpId) -> bool {
        self.finished.contains_key(&op)
    }

    /// Whether any op is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.machine.is_idle()
    }

    /// How long to wait for datagrams before something is due.
    pub(crate) fn patience(&self) -> Option<Span> {
        let at = self.machine.poll_timeout();
        (at < Time::NEVER).then(|| at.since(self.clock.now()))
    }

    /// Ends every op in flight: ranks are gone.
    pub(crate) fn lose(&mut self, ranks: &[Rank]) {
        self.machine.handle_peers_lost(ranks, &mut ());
        self.collect();
    }

    /// Ends every op in flight.
    pub(crate) fn end(&mut self, why: &'static str) {
        self.machine.end(why, &mut ());
        self.collect();
    }

    pub(crate) fn stats(&self) -> Stats {
        let counters = self.machine.counters();
        let sockets = std::iter::once(&*self.links.socket).chain(self.links.groups.iter());
        Stats {
            retransmits: counters.fragments_again,
            asks: counters.asks,
            probes: counters.probes,
            rejects: self.stats.rejects + counters.rejects.total(),
            kernel_drops: sockets.map(UdpSocket::drops).sum(),
            ..self.stats
        }
    }
}

/// Messages received at a time: few, so that they stay in the processor's cache.
const RECEIVE_BATCH: usize = 8;
/// Windows scanned at a time, between looks at the socket.
const SCAN_BATCH: usize = 8;
