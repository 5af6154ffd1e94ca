//! A shard: one thread with one socket, and the aggregator half of every job.

mod floods;
mod handle;
mod outbox;
mod parent;
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
use handle::Siblings;
pub(crate) use handle::{ShardHandle, make_siblings};
use outbox::Outbox;
pub(crate) use parent::NewParent;
use parent::ParentStream;
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
    /// The numbers by which messages name the ranks.
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
    /// Note that a rank of a member aggregator has left: `rank` is the aggregator, and `name` its
    /// rank.
    LeftBelow { job: JobId, rank: Rank, name: Rank },
    /// Fail an op of the job that has failed at another shard.
    Failed(JobId, Failed),
    /// Readmit a rank.
    Rejoin(Box<Rejoin>),
    /// Continue the job without a rank.
    Gone(JobId, Rank),
    /// Raise a fence around a job that may be about to end, or lower it. Nothing is folded
    /// meanwhile.
    Fence(JobId, bool),
    /// Remove a job that has ended.
    Remove(JobId),
    /// Report the progress of one job, or of all jobs.
    Report(Option<JobId>, oneshot::Sender<ShardReport>),
    /// Begin a proof of a data path, of a caller here or of this aggregator at its parent. Its
    /// pings carry this token.
    Prove(Key, Proof),
    /// Send a ping of this size in bytes to the parent.
    SendPing { to: SocketAddr, token: Key, size: u16 },
    /// End a proof.
    Proven(Key),
    /// Stop the shard, because the aggregator stops.
    Stop,
    /// Panic, as a bug would make the shard do.
    #[cfg(test)]
    Panic,
}

/// A rank that rejoins.
#[derive(Debug, Clone)]
pub(crate) struct Rejoin {
    pub(crate) job: JobId,
    pub(crate) rank: Rank,
    /// The new address of its data.
    pub(crate) addr: SocketAddr,
    /// The job's keys, with the rank's new key.
    pub(crate) job_keys: JobKeys,
}

/// A job at this shard.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) machine: Aggregation,
    pub(crate) slots: Slots,
    pub(crate) destinations: Destinations,
    /// The link to the parent, if there is one.
    pub(crate) parent: Option<ParentStream>,
    /// When a window was last folded, or when no window was waiting.
    pub(crate) moved: Time,
    /// The debt, in bytes, above which the job counts as flooded by its own ranks.
    pub(crate) most_debt: usize,
    /// Whether its last turn ended in the middle of sending.
    pub(crate) sending: bool,
    /// The number of fences: reasons for which the job may be about to end.
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
    jobs: BTreeMap<JobId, Job>,
    schedule: DeficitRoundRobin<JobId>,
    /// The jobs with a parent, by their job numbers at the parent and the addresses of its shards.
    parent_jobs: BTreeMap<(JobId, SocketAddr), JobId>,
    /// The proofs of data paths that are in progress, by token.
    proofs: Proofs,
    floods: Floods,
    /// The other shards of the aggregator.
    siblings: Siblings,
    arena: Arena,
    incoming: Vec<BytesMut>,
    recv: RecvRing,
    out: Outbox,
    stats: ShardStats,
    shared: Arc<Mutex<ShardStats>>,
    published: Time,
    failure: Failure,
    /// Whether some job's turn ended with work left.
    unserved: bool,
    /// Whether more commands may be waiting.
    more_commands: bool,
}

impl Shard {
    fn run(&mut self) {
        while let Some(received) = self.turn() {
            // A full batch means that more messages may be waiting. A batch of large messages holds
            // few, so each is worth waking for.
            if self.unserved || self.more_commands {
                continue;
            }
            if received > 0 && !self.recv.is_full() && self.gather.is_due(self.backlog()) {
                // An error counts as readiness: the next receive reports it.
                drop(self.gather.pause(&self.waker));
            }
            if received == 0 {
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
        let of_jobs = self.jobs.values().map(Job::timeout).min().unwrap_or(Time::NEVER);
        let due = of_jobs.min(self.floods.timeout());
        // This only bounds how stale the published counters can be.
        let most = Span::from_secs(1);
        if due == Time::NEVER { most } else { due.since(self.clock.now()).min(most) }
    }

    /// Returns whether a timeout is due.
    fn is_due(&self) -> bool {
        let parent_jobs = !self.parent_jobs.is_empty();
        let of_jobs = self.jobs.values().map(Job::timeout).min().filter(|_| parent_jobs);
        of_jobs.unwrap_or(Time::NEVER).min(self.floods.timeout()) <= self.clock.now()
    }

    /// Returns about how many bytes of sums are outstanding for the job with the most.
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
            Command::Listeners(id, hears) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.destinations.set_listeners(&hears);
                }
            }
            Command::Left(id, rank) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.machine.handle_left(rank, &mut self.stats.events);
                }
            }
            Command::LeftBelow { job, rank, name } => {
                if let Some(job) = self.jobs.get_mut(&job) {
                    job.machine.handle_left_below(rank, name);
                }
            }
            Command::Failed(id, Failed { op, why, .. }) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.machine.handle_failed_beside(op, why, &mut self.stats.events);
                    self.unserved = true;
                }
            }
            Command::Rejoin(back) => self.let_back(*back),
            Command::Gone(id, rank) => self.go_on_without(id, rank),
            Command::Fence(id, begins) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    let fences = job.fences;
                    job.fences = if begins { fences + 1 } else { fences.saturating_sub(1) };
                    // Windows that became complete during the fence can be folded now.
                    self.unserved = true;
                }
            }
            Command::Remove(id) => self.remove(id),
            Command::Report(of, tell) => {
                let now = self.clock.now();
                let report = |(id, job): (&JobId, &Job)| (*id, job.report(now));
                let jobs = match of {
                    Some(id) => self.jobs.get_key_value(&id).into_iter().map(report).collect(),
                    None => self.jobs.iter().map(report).collect(),
                };
                // The requester may have given up waiting.
                drop(tell.send(ShardReport { jobs }));
            }
            Command::Prove(token, proof) => self.proofs.begin(token, proof),
            Command::SendPing { to, token, size } => {
                self.proofs.send(&self.socket, to, token, size);
            }
            Command::Proven(token) => self.proofs.end(token),
            Command::Stop => return false,
            #[cfg(test)]
            Command::Panic => panic!("the test said so"),
        }
        true
    }

    fn add(&mut self, new: NewJob) {
        let (id, now) = (new.config.job, self.clock.now());
        if let Some(parent) = &new.parent {
            self.parent_jobs.insert((parent.config.job, parent.addr), id);
        }
        self.schedule.add(id, new.share / 100.0);
        if let Some(mut old) = self.jobs.insert(id, Job::new(new, now)) {
            old.slots.release(&mut self.arena);
        }
    }

    fn remove(&mut self, id: JobId) {
        let Some(mut job) = self.jobs.remove(&id) else { return };
        self.schedule.remove(id);
        self.parent_jobs.retain(|_, below| *below != id);
        job.slots.release(&mut self.arena);
    }

    /// Continues a job without a rank.
    fn go_on_without(&mut self, id: JobId, rank: Rank) {
        let now = self.clock.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.machine.handle_gone(rank, &mut self.stats.events);
        let gone = job.destinations.ranks.get(rank.index());
        job.destinations.unicast.retain(|addr| Some(addr) != gone);
        // The windows that waited for the rank can be folded now, and no further message may come
        // to trigger that.
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

    /// Handles received datagrams, and sends what they make due. Returns the number of received
    /// messages, or `None` if the socket has failed.
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
                self.failure.tell(format!("the data socket {addr} failed: {error}"));
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
        if let Some(senders) = self.floods.look(now, self.socket.drops(), is_full, is_peer)
            && let Err(error) = self.socket.refuse(&senders)
        {
            tracing::debug!(%error, "the kernel takes no filter");
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

    /// Works for a job until its turn is over or it has nothing left to do.
    fn serve_job(&mut self, now: Time, turn: &mut Turn<JobId>) {
        let Self { jobs, arena, socket, out, siblings, stats, .. } = self;
        let events = &mut stats.events;
        let Some(job) = jobs.get_mut(&turn.job) else { return };
        let mut failed = Vec::new();
        loop {
            job.poll_parent(now, events);
            job.serve(now, turn, arena, socket, out, events);
            let any = job.send_to_parent(now, turn, socket, out, &mut failed, events);
            for failed in failed.drain(..) {
                siblings.tell(|| Command::Failed(turn.job, failed));
            }
            if turn.is_over() || !any {
                return;
            }
        }
    }

    /// Publishes the counters to the other threads, at most every 100 ms.
    fn publish(&mut self) {
        let now = self.clock.now();
        if now.since(self.published) < Span::from_millis(100) {
            return;
        }
        self.published = now;
        let mut stats = self.stats.clone();
        stats.kernel_drops = self.socket.drops();
        stats.send_failures = self.socket.send_failures();
        let free = self.arena.available() + self.incoming.len();
        stats.buffers = Buffers { total: self.arena.total(), free };
        if let Ok(mut shared) = self.shared.lock() {
            *shared = stats;
        }
    }
}

impl Job {
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

    /// Folds and sends what is due, for as long as the job's turn lasts.
    fn serve(
        &mut self,
        now: Time,
        turn: &mut Turn<JobId>,
        arena: &mut Arena,
        socket: &UdpSocket,
        out: &mut Outbox,
        events: &mut EventCounts,
    ) {
        let mut any = true;
        while any && !turn.is_over() {
            if !std::mem::take(&mut self.sending) {
                any = !self.is_fenced() && self.fold(now, turn, arena, events);
            }
            // Sending follows even if there was nothing to fold: finding that out may have freed
            // credits.
            self.sending = self.send(now, turn, socket, out, events);
        }
        out.send_joined(socket, self);
        turn.spend(out.take_cost());
    }

    /// Returns whether folding is suspended because the job is about to end. With a parent it is
    /// not, since results of the parent are passed on.
    const fn is_fenced(&self) -> bool {
        self.fences > 0 && self.parent.is_none()
    }

    /// Folds the next complete window, if there is one. Returns whether there was.
    fn fold(
        &mut self,
        now: Time,
        turn: &mut Turn<JobId>,
        arena: &mut Arena,
        events: &mut EventCounts,
    ) -> bool {
        let fold = self.machine.poll_fold();
        if fold.is_some() || self.machine.backlog() == 0 {
            self.moved = now;
        }
        if let Some(fold) = &fold {
            turn.spend(self.slots.fold(fold, &self.machine, arena));
            self.machine.handle_folded(fold, events);
        }
        fold.is_some()
    }

    /// Sends what is due. Returns whether the turn ended before everything was sent.
    fn send(
        &mut self,
        now: Time,
        turn: &mut Turn<JobId>,
        socket: &UdpSocket,
        out: &mut Outbox,
        events: &mut EventCounts,
    ) -> bool {
        while !turn.is_over() {
            match self.machine.poll_transmit(now, &mut out.datagram[..], events) {
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

    /// Returns the type-of-service value for a datagram, by the lane of its first message.
    pub(crate) fn tos(&self, datagram: &[u8]) -> Option<u8> {
        if self.machine.config().lanes < 2 {
            return None;
        }
        let (header, _, _) = Header::decode_first(datagram).ok()?;
        self.tos_of_lane(header.lane)
    }
}

/// Bytes that all jobs together may spend in a round: a few windows for each of many jobs.
const QUANTUM: usize = 16 << 20;
/// The maximum number of commands handled between two receives. Joining and leaving ranks must not
/// leave the others' data in the socket.
const MOST_COMMANDS: usize = 16;
/// The longest time for which contributions to bulk ops are gathered to fold them in batches.
const LONGEST_PAUSE: Span = Span::from_micros(50);
/// The multicast TTL: results go to hosts of one rack.
const MULTICAST_TTL: u8 = 1;

#[cfg(test)]
mod tests;
