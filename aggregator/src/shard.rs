//! A shard: one thread with one socket, and the aggregator half of every job.

mod floods;
mod handle;
mod outbox;
mod parent_stream;
mod proof;
mod receive;
mod report;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use bytes::BytesMut;
use racksum_net::auth::{Opener, Sealer};
use racksum_net::clock::Clock;
use racksum_net::udp::{self, Gather, RECV_BATCH, RecvRing, UdpSocket, Waker};
use racksum_proto::aggregator::{Aggregation, Config, Failed, Transmit};
use racksum_proto::auth::Key;
use racksum_proto::geometry::WINDOW_BYTES;
use racksum_proto::ids::{JobId, Rank};
use racksum_proto::observer::EventCounts;
use racksum_proto::schedule::{DeficitRoundRobin, Schedule, Turn};
use racksum_proto::status::Buffers;
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::Header;
use tokio::sync::oneshot;

use crate::arena::Arena;
use crate::destinations::{Destinations, To};
use crate::failure::Failure;
use crate::job_keys::JobKeys;
use crate::slots::Slots;

use floods::Floods;
use handle::OtherShards;
pub(crate) use handle::{ShardHandle, connect_shards};
use outbox::Outbox;
pub(crate) use parent_stream::NewParent;
use parent_stream::ParentStream;
pub(crate) use proof::Proof;
use proof::Proofs;
pub use report::ShardStats;
pub(crate) use report::{JobReport, ShardReport};

/// A new job, as announced to a shard.
#[derive(Debug)]
pub(crate) struct NewJob {
    pub(crate) config: Config,
    /// The data address of each rank.
    pub(crate) ranks: Vec<SocketAddr>,
    /// The number that identifies each rank in messages: its number in the whole job or, for an
    /// aggregator below this one, the smallest of its ranks.
    pub(crate) names: Vec<Rank>,
    /// The link to the parent, if there is one.
    pub(crate) parent: Option<NewParent>,
    /// The group that results are multicast to, if any.
    pub(crate) group: Option<SocketAddr>,
    pub(crate) job_keys: JobKeys,
    /// The job's share of the shard, in per cent.
    pub(crate) share: f64,
}

/// A command to a shard.
#[derive(Debug)]
pub(crate) enum Command {
    /// Add a job, all of whose ranks have joined.
    Add(Box<NewJob>),
    /// Send a ping to the job's group.
    Ping(JobId),
    /// Multicast to the ranks marked true, and send copies to the others.
    Listeners(JobId, Vec<bool>),
    /// Note that a rank of the job has left.
    Left(JobId, Rank),
    /// Note that a rank of a member aggregator has left: `rank` identifies the aggregator, and
    /// `name` the rank that has left.
    LeftBelow { job: JobId, rank: Rank, name: Rank },
    /// Fail an op that has failed at another shard.
    Failed(JobId, Failed),
    /// Readmit a rank.
    Rejoin(Box<Rejoin>),
    /// Continue the job without a rank.
    Gone(JobId, Rank),
    /// Raise (true) or lower a fence around a job that may be about to end. While a fence stands,
    /// no window of the job is folded, unless the job has a parent.
    Fence(JobId, bool),
    /// Remove a job that has ended.
    Remove(JobId),
    /// Report the progress of one job, or of all jobs.
    Report(Option<JobId>, oneshot::Sender<ShardReport>),
    /// Begin a proof of the data path from a caller to this shard, or from this shard to the
    /// parent. The pings of the proof carry this token.
    Prove(Key, Proof),
    /// Send a ping of this size in bytes to the parent.
    SendPing { to: SocketAddr, token: Key, size: u16 },
    /// End a proof.
    Proven(Key),
    /// Stop the shard, because the aggregator stops.
    Stop,
    /// Panic, to simulate a bug.
    #[cfg(test)]
    Panic,
}

/// A rank that rejoins.
#[derive(Debug, Clone)]
pub(crate) struct Rejoin {
    pub(crate) job: JobId,
    pub(crate) rank: Rank,
    /// The address from which the rank's data now comes.
    pub(crate) addr: SocketAddr,
    /// The job's keys, with the rank's new key.
    pub(crate) job_keys: JobKeys,
}

/// A job at this shard.
#[derive(Debug)]
pub(crate) struct ShardJob {
    pub(crate) machine: Aggregation,
    /// The events of the aggregator half and the worker half, and the rejected datagrams that reach
    /// neither.
    events: EventCounts,
    pub(crate) slots: Slots,
    pub(crate) destinations: Destinations,
    /// The link to the parent, if there is one.
    pub(crate) parent: Option<ParentStream>,
    /// The last time at which a window was folded or no window was waiting.
    pub(crate) moved: Time,
    /// The debt, in bytes, above which the shard rejects the job's datagrams, because the job's own
    /// ranks flood the shard.
    pub(crate) most_debt: usize,
    /// Whether the job's last turn ended in the middle of sending.
    pub(crate) sending: bool,
    /// The number of fences, each for one reason why the job may be about to end.
    pub(crate) fences: u32,
    /// Openers of received datagrams, by rank; empty if datagrams are not authenticated.
    pub(crate) openers: Vec<Opener>,
}

/// The state of a shard's thread.
struct Shard {
    socket: Arc<UdpSocket>,
    clock: Clock,
    inbox: Receiver<Command>,
    waker: Waker,
    gather: Gather,
    jobs: BTreeMap<JobId, ShardJob>,
    schedule: DeficitRoundRobin<JobId>,
    /// The jobs with a parent, by the job's number at the parent and the address of the parent's
    /// shard.
    parent_jobs: BTreeMap<(JobId, SocketAddr), JobId>,
    /// The proofs of data paths that are in progress, by token.
    proofs: Proofs,
    floods: Floods,
    /// The other shards of the aggregator.
    other_shards: OtherShards,
    arena: Arena,
    incoming: Vec<BytesMut>,
    recv: RecvRing,
    out: Outbox,
    /// The counters of this thread. The events are those of ended jobs and of datagrams without a
    /// job; [`Self::publish`] adds those of present jobs.
    stats: ShardStats,
    shared: Arc<Mutex<ShardStats>>,
    published: Time,
    failure: Failure,
    /// Whether the turn of some job ended with work left to do.
    unserved: bool,
    /// Whether more commands may be waiting.
    more_commands: bool,
}

impl Shard {
    fn run(&mut self) {
        while let Some(received) = self.turn() {
            // A full batch means that more messages may be waiting. Two large messages already fill
            // a batch.
            if self.unserved || self.more_commands || self.recv.is_full() {
                continue;
            }
            if received > 0 && self.gather.is_due(self.backlog()) {
                // Ignore an error: the next receive reports it.
                drop(self.gather.pause(&self.waker));
            } else {
                let fds = [self.socket.as_fd(), self.waker.as_fd()];
                let ready = udp::wait(&fds, Some(self.patience())).unwrap_or(0);
                if ready & 2 != 0 {
                    self.waker.drain();
                }
            }
        }
    }

    /// Returns the longest time that the thread may sleep.
    fn patience(&self) -> Span {
        let of_jobs = self.jobs.values().map(ShardJob::timeout).min().unwrap_or(Time::NEVER);
        let due = of_jobs.min(self.floods.timeout());
        // Wake at least once a second to publish the counters.
        let most = Span::from_secs(1);
        if due == Time::NEVER { most } else { due.since(self.clock.now()).min(most) }
    }

    /// Returns whether a timeout is due.
    fn is_due(&self) -> bool {
        let parent_jobs = !self.parent_jobs.is_empty();
        let of_jobs = self.jobs.values().map(ShardJob::timeout).min().filter(|_| parent_jobs);
        of_jobs.unwrap_or(Time::NEVER).min(self.floods.timeout()) <= self.clock.now()
    }

    /// Returns an estimate of the bytes of outstanding sums, for the job that has the most.
    fn backlog(&self) -> u64 {
        self.jobs.values().map(|job| job.machine.backlog_bytes()).max().unwrap_or(0)
    }

    /// Handles commands and received datagrams. Returns the number of received messages, or `None`
    /// once the shard must stop.
    fn turn(&mut self) -> Option<usize> {
        self.more_commands = true;
        for _ in 0..MOST_COMMANDS {
            let Ok(command) = self.inbox.try_recv() else {
                self.more_commands = false;
                break;
            };
            if !self.handle_command(command) {
                return None;
            }
        }
        let received = self.receive()?;
        self.publish();
        Some(received)
    }

    fn handle_command(&mut self, command: Command) -> bool {
        match command {
            Command::Add(new) => self.add(*new),
            Command::Ping(id) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    self.out.ping(&self.socket, job);
                }
            }
            Command::Listeners(id, receives) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.destinations.set_listeners(&receives);
                }
            }
            Command::Left(id, rank) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.machine.handle_left(rank, &mut job.events);
                }
            }
            Command::LeftBelow { job, rank, name } => {
                if let Some(job) = self.jobs.get_mut(&job) {
                    job.machine.handle_left_below(rank, name);
                }
            }
            Command::Failed(id, Failed { op, why, .. }) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.machine.handle_failed_beside(op, why, &mut job.events);
                    self.unserved = true;
                }
            }
            Command::Rejoin(back) => self.let_back(*back),
            Command::Gone(id, rank) => self.continue_without(id, rank),
            Command::Fence(id, begins) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    let fences = job.fences;
                    job.fences = if begins { fences + 1 } else { fences.saturating_sub(1) };
                    // Windows that became complete while the fence stood can be folded now.
                    self.unserved = true;
                }
            }
            Command::Remove(id) => self.remove(id),
            Command::Report(of, reply) => {
                let now = self.clock.now();
                let report = |(id, job): (&JobId, &ShardJob)| (*id, job.report(now));
                let jobs = match of {
                    Some(id) => self.jobs.get_key_value(&id).into_iter().map(report).collect(),
                    None => self.jobs.iter().map(report).collect(),
                };
                // Ignore a failed send: the requester may have stopped waiting.
                drop(reply.send(ShardReport { jobs }));
            }
            Command::Prove(token, proof) => self.proofs.begin(token, proof),
            Command::SendPing { to, token, size } => {
                self.proofs.send(&self.socket, to, token, size);
            }
            Command::Proven(token) => self.proofs.end(token),
            Command::Stop => return false,
            #[cfg(test)]
            Command::Panic => panic!("the test requested this panic"),
        }
        true
    }

    fn add(&mut self, new: NewJob) {
        let (id, now) = (new.config.job, self.clock.now());
        if let Some(parent) = &new.parent {
            self.parent_jobs.insert((parent.config.job, parent.addr), id);
        }
        self.schedule.add(id, new.share / 100.0);
        if let Some(old) = self.jobs.insert(id, ShardJob::new(new, now)) {
            self.release(old);
        }
    }

    fn remove(&mut self, id: JobId) {
        let Some(job) = self.jobs.remove(&id) else { return };
        self.schedule.remove(id);
        self.parent_jobs.retain(|_, below| *below != id);
        self.release(job);
    }

    /// Frees the packet buffers of a job that has ended, and keeps its counts.
    fn release(&mut self, mut job: ShardJob) {
        job.slots.release(&mut self.arena);
        self.stats.events.add(&job.events);
    }

    /// Continues a job without a rank.
    fn continue_without(&mut self, id: JobId, rank: Rank) {
        let now = self.clock.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.machine.handle_gone(rank, &mut job.events);
        let gone = job.destinations.ranks.get(rank.index());
        job.destinations.unicast.retain(|addr| Some(addr) != gone);
        // The windows that waited for the rank can be folded now, even if no further message
        // arrives.
        job.moved = now;
        self.unserved = true;
    }

    /// Readmits a rank, which may have a new address.
    fn let_back(&mut self, back: Rejoin) {
        let now = self.clock.now();
        let Rejoin { job, rank, addr, job_keys } = back;
        let Some(job) = self.jobs.get_mut(&job) else { return };
        job.machine.handle_rejoined(now, rank);
        job.destinations.ranks[rank.index()] = addr;
        let opener = job_keys.opener(job.machine.config(), rank);
        if let Some((place, opener)) = job.openers.get_mut(rank.index()).zip(opener) {
            *place = opener;
        }
    }

    /// Handles received datagrams, and gives every job a turn to fold and send. Returns the number
    /// of received messages, or `None` if the socket has failed.
    fn receive(&mut self) -> Option<usize> {
        while self.incoming.len() < RECV_BATCH {
            let Some(buffer) = self.arena.take() else { break };
            self.incoming.push(buffer);
        }
        let count = match self.socket.recv(&mut self.recv, &mut self.incoming) {
            Ok(0) if !self.unserved && !self.is_due() => return Some(0),
            Ok(count) => count,
            Err(error) => {
                let addr = self.socket.local_addr();
                self.failure
                    .report(format!("the data socket {addr} failed: {error}; all jobs have ended"));
                return None;
            }
        };
        let now = self.clock.now();
        for i in 0..count {
            let meta = self.recv.meta(i);
            self.take_datagrams(now, i, &meta);
        }
        let is_peer = |addr| self.jobs.values().any(|job| job.destinations.is_peer(addr));
        let is_full = || self.socket.is_full();
        if let Some(senders) = self.floods.check(now, self.socket.drops(), is_full, is_peer)
            && let Err(error) = self.socket.refuse(&senders)
        {
            tracing::debug!(%error, "cannot set the filter that drops flooding senders");
        }
        self.serve(now);
        Some(count)
    }

    /// Gives every job one turn.
    fn serve(&mut self, now: Time) {
        self.jobs.keys().for_each(|id| self.schedule.enqueue(*id));
        self.unserved = false;
        for _ in 0..self.schedule.waiting() {
            let Some(mut turn) = self.schedule.next() else { break };
            self.serve_job(now, &mut turn);
            if turn.is_over() {
                self.unserved = true;
                self.schedule.enqueue(turn.job);
            }
            self.schedule.finish(turn);
        }
        self.out.flush_counts(&mut self.stats);
    }

    /// Serves a job until its turn is over or nothing is left to do.
    fn serve_job(&mut self, now: Time, turn: &mut Turn<JobId>) {
        let Self { jobs, arena, socket, out, other_shards, .. } = self;
        let Some(job) = jobs.get_mut(&turn.job) else { return };
        let mut failed = Vec::new();
        loop {
            job.poll_parent(now);
            job.serve(now, turn, arena, socket, out);
            let any = job.send_to_parent(now, turn, socket, out, &mut failed);
            for failed in failed.drain(..) {
                other_shards.send(|| Command::Failed(turn.job, failed));
            }
            if turn.is_over() || !any {
                return;
            }
        }
    }

    /// Publishes the counters to the other threads, at most once every 100 ms.
    fn publish(&mut self) {
        let now = self.clock.now();
        if now.since(self.published) < Span::from_millis(100) {
            return;
        }
        self.published = now;
        let mut stats = self.stats.clone();
        self.jobs.values().for_each(|job| stats.events.add(&job.events));
        stats.kernel_drops = self.socket.drops();
        stats.send_failures = self.socket.send_failures();
        let free = self.arena.available() + self.incoming.len();
        stats.buffers = Buffers { total: self.arena.total(), free };
        if let Ok(mut shared) = self.shared.lock() {
            *shared = stats;
        }
    }
}

impl ShardJob {
    fn new(new: NewJob, now: Time) -> Self {
        let NewJob { config, ranks, names, parent, group, job_keys, .. } = new;
        let windows = usize::from(config.world) * usize::from(config.lanes);
        let in_flight = windows * config.pool_slots as usize * WINDOW_BYTES;
        let mut machine = Aggregation::new(config, now);
        (0..).map(Rank).zip(names).for_each(|(rank, name)| machine.set_name(rank, name));
        let (unicast, sealer) = (ranks.clone(), job_keys.sealer(&config));
        let mut destinations =
            Destinations { ranks, group, unicast, sealer, ..Destinations::default() };
        let parent = parent.map(|parent| {
            let NewParent { config, addr, sealer, opener } = parent;
            (destinations.parent, destinations.parent_sealer) = (Some(addr), sealer);
            ParentStream::new(config, opener, now)
        });
        Self {
            machine,
            events: EventCounts::default(),
            slots: Slots::new(&config),
            destinations,
            parent,
            moved: now,
            most_debt: in_flight.saturating_mul(2).saturating_add(QUANTUM),
            sending: false,
            fences: 0,
            openers: job_keys.openers(&config),
        }
    }

    /// Folds complete windows and sends due datagrams, for as long as the job's turn lasts.
    fn serve(
        &mut self,
        now: Time,
        turn: &mut Turn<JobId>,
        arena: &mut Arena,
        socket: &UdpSocket,
        out: &mut Outbox,
    ) {
        let mut any = true;
        while any && !turn.is_over() {
            if !std::mem::take(&mut self.sending) {
                any = !self.is_fenced() && self.fold(now, turn, arena);
            }
            // Send even if there was nothing to fold, because `poll_fold` may have freed credits.
            self.sending = self.send(now, turn, socket, out);
        }
        out.send_joined(socket, self);
        turn.spend(out.take_cost());
    }

    /// Returns whether folding is suspended because the job may be about to end. A job with a
    /// parent is never suspended, since it passes on the parent's results.
    const fn is_fenced(&self) -> bool {
        self.fences > 0 && self.parent.is_none()
    }

    /// Folds the next complete window. Returns false if there is none.
    fn fold(&mut self, now: Time, turn: &mut Turn<JobId>, arena: &mut Arena) -> bool {
        let fold = self.machine.poll_fold();
        if fold.is_some() || self.machine.backlog() == 0 {
            self.moved = now;
        }
        if let Some(fold) = &fold {
            turn.spend(self.slots.fold(fold, &self.machine, arena));
            self.machine.handle_folded(fold, &mut self.events);
        }
        fold.is_some()
    }

    /// Sends the datagrams that are due. Returns true if the turn ended first, in which case more
    /// may remain to be sent.
    fn send(
        &mut self,
        now: Time,
        turn: &mut Turn<JobId>,
        socket: &UdpSocket,
        out: &mut Outbox,
    ) -> bool {
        while !turn.is_over() {
            match self.machine.poll_transmit(now, &mut out.datagram[..], &mut self.events) {
                Some(Transmit::Datagram { to, len }) => {
                    out.send_datagram(socket, self, To::Ranks(to), len);
                }
                Some(Transmit::Result { to, result }) => {
                    out.send_result(socket, self, To::Ranks(to), &result);
                }
                None => return false,
            }
            turn.spend(out.take_cost());
        }
        true
    }

    /// Returns the job's progress.
    fn report(&self, now: Time) -> JobReport {
        let waits = self.machine.backlog() > 0;
        JobReport {
            stalled: waits.then(|| now.since(self.moved)),
            ranks: self.machine.progress(now),
            settled: (0..self.machine.config().lanes)
                .all(|lane| self.machine.results_held(lane) == 0),
            sealed: self.destinations.sealer.as_ref().map_or(0, Sealer::sealed),
        }
    }

    /// Returns the IP type-of-service value for the messages of a lane.
    pub(crate) fn tos_of_lane(&self, lane: u8) -> Option<u8> {
        udp::tos_of_lane(lane, self.machine.config().lanes)
    }

    /// Returns the type-of-service value for a datagram, which depends on the lane of its first
    /// message.
    pub(crate) fn tos(&self, datagram: &[u8]) -> Option<u8> {
        if self.machine.config().lanes < 2 {
            return None;
        }
        let (header, _, _) = Header::decode_first(datagram).ok()?;
        self.tos_of_lane(header.lane)
    }
}

/// The bytes that all jobs together may spend in a round: enough for many jobs with a few windows
/// each.
const QUANTUM: usize = 16 << 20;
/// The maximum number of commands handled between two receives. A burst of ranks that join and
/// leave must not delay the data that waits in the socket.
const MOST_COMMANDS: usize = 16;
/// The longest pause before a receive. Contributions to bulk ops accumulate during the pause, and
/// are folded as a batch after it.
const LONGEST_PAUSE: Span = Span::from_micros(50);
/// The multicast TTL: results go to hosts of one rack.
const MULTICAST_TTL: u8 = 1;

#[cfg(test)]
mod tests;
