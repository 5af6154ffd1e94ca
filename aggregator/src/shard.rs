//! A shard: one thread, one socket, and the halves of all jobs that are there.

mod handle;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use bytes::BytesMut;
use racksum_net::auth::{Opener, Sealer};
use racksum_net::clock::Clock;
use racksum_net::udp::{self, Gather, RECV_BATCH, Received, RecvRing, UdpSocket, Waker};
use racksum_proto::aggregator::{Aggregation, Config, Place, RankProgress, Transmit, Verdict};
use racksum_proto::error::{Reject, Rejects};
use racksum_proto::ids::{JobId, Rank};
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::{self, Header};
use tokio::sync::oneshot;

use crate::arena::Arena;
use crate::failure::Failure;
use crate::locks::Locks;
use crate::outbox::Outbox;
use crate::slots::Slots;
use crate::turn::Turn;

pub(crate) use handle::ShardHandle;

/// A job as a shard is told of it.
#[derive(Debug)]
pub(crate) struct NewJob {
    pub(crate) config: Config,
    /// Where each rank's data goes.
    pub(crate) ranks: Vec<SocketAddr>,
    /// The group that results are multicast to, if any.
    pub(crate) group: Option<SocketAddr>,
    pub(crate) locks: Locks,
    /// Its share of the shard, in per cent.
    pub(crate) share: f64,
}

/// What a shard is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// A job's ranks have all joined.
    Add(Box<NewJob>),
    /// Send a probe to the job's group.
    Probe(JobId),
    /// These ranks hear the group; the others are sent their own copies.
    Listeners(JobId, Vec<bool>),
    /// A rank of the job has left.
    Left(JobId, Rank),
    /// A rank is back.
    Rejoin(Box<Rejoin>),
    /// The job goes on without a rank.
    Gone(JobId, Rank),
    /// The job is gone.
    Remove(JobId),
    /// Say how far the jobs are.
    Report(oneshot::Sender<ShardReport>),
    /// The aggregator stops.
    Stop,
    /// The shard is to fail, as a bug would make it.
    #[cfg(test)]
    Panic,
}

/// A rank that comes back.
#[derive(Debug, Clone)]
pub(crate) struct Rejoin {
    pub(crate) job: JobId,
    pub(crate) rank: Rank,
    /// Where its data comes from now.
    pub(crate) addr: SocketAddr,
    /// With its new key.
    pub(crate) locks: Locks,
}

/// What a shard has counted.
#[derive(Debug, Clone, Default)]
pub struct ShardStats {
    /// Datagrams received and sent.
    pub datagrams: [u64; 2],
    /// Bytes of them.
    pub bytes: [u64; 2],
    /// Windows folded.
    pub folds: u64,
    /// Messages that the kernel dropped because the receive buffer was full.
    pub kernel_drops: u64,
    /// Messages that the kernel refused to send, or had no room for too long; they are in what was
    /// sent all the same.
    pub send_failures: u64,
    /// Datagrams that changed nothing, by reason.
    pub rejects: Rejects,
    /// Packet buffers in all, and free.
    pub buffers: [usize; 2],
}

/// How far the jobs of a shard are.
#[derive(Debug, Default)]
pub(crate) struct ShardReport {
    pub(crate) jobs: BTreeMap<JobId, JobReport>,
}

/// How far a job is at a shard.
#[derive(Debug)]
pub(crate) struct JobReport {
    /// How long no window was folded, if some are to be.
    pub(crate) stalled: Option<Span>,
    /// By rank.
    pub(crate) ranks: Vec<RankProgress>,
    /// Every rank has acknowledged all results.
    pub(crate) settled: bool,
    /// Datagrams sealed.
    pub(crate) sealed: u64,
}

/// A job at the shard.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) machine: Aggregation,
    pub(crate) slots: Slots,
    pub(crate) ranks: Vec<SocketAddr>,
    pub(crate) group: Option<SocketAddr>,
    /// Ranks that do not hear the group.
    pub(crate) unicast: Vec<SocketAddr>,
    /// When a window was last folded, or the first was yet to come.
    pub(crate) moved: Time,
    /// Whose turn it is to fold, and for how long, among the jobs.
    pub(crate) turn: Turn,
    /// Seals what is sent, if datagrams are authenticated.
    pub(crate) sealer: Option<Sealer>,
    /// Open what is heard, by rank; none if datagrams are not authenticated.
    pub(crate) openers: Vec<Opener>,
}

/// The thread's state.
struct Shard {
    socket: Arc<UdpSocket>,
    clock: Clock,
    inbox: Receiver<Command>,
    waker: Waker,
    gather: Gather,
    jobs: BTreeMap<JobId, Job>,
    arena: Arena,
    incoming: Vec<BytesMut>,
    recv: RecvRing,
    out: Outbox,
    stats: ShardStats,
    shared: Arc<Mutex<ShardStats>>,
    published: Time,
    failure: Failure,
    /// Some job has had its turn and has more to fold.
    unserved: bool,
}

impl Shard {
    fn run(&mut self) {
        while let Some(received) = self.turn() {
            // After as many messages as were asked for there may be more. Of large ones these are
            // few: each is worth waking for.
            if self.unserved {
                continue;
            }
            if received > 0 && !self.recv.is_full() && self.gather.is_due(self.backlog()) {
                // An error is as good as readiness: the next receive finds out.
                drop(self.gather.pause(&self.waker));
            }
            if received == 0 {
                let fds = [self.socket.as_fd(), self.waker.as_fd()];
                // The timeout only bounds how stale the published counters can be.
                let ready = udp::wait(&fds, Some(Span::from_secs(1))).unwrap_or(0);
                if ready & 2 != 0 {
                    self.waker.drain();
                }
            }
        }
    }

    /// The most windows that any job has yet to fold.
    fn backlog(&self) -> u64 {
        self.jobs.values().map(|job| job.machine.backlog()).max().unwrap_or(0)
    }

    /// Does what it was told and takes what has arrived. Returns how many messages that was, or
    /// none once the shard is to stop, or cannot go on.
    fn turn(&mut self) -> Option<usize> {
        while let Ok(command) = self.inbox.try_recv() {
            if !self.obey(command) {
                return None;
            }
        }
        let received = self.receive()?;
        self.publish();
        Some(received)
    }

    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Add(new) => {
                let NewJob { config, ranks, group, locks, share } = *new;
                let slots = Slots::new(&config);
                let moved = self.clock.now();
                let machine = Aggregation::new(config, moved);
                let unicast = ranks.clone();
                let (sealer, openers) = (locks.sealer(&config), locks.openers(&config));
                let turn = Turn::new(share);
                let job =
                    Job { machine, slots, ranks, group, unicast, moved, turn, sealer, openers };
                self.jobs.insert(config.job, job);
            }
            Command::Probe(id) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    self.out.probe(&self.socket, job);
                }
            }
            Command::Listeners(id, hears) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    let deaf = job.ranks.iter().zip(&hears).filter(|(_, hears)| !**hears);
                    job.unicast = deaf.map(|(addr, _)| *addr).collect();
                    if job.unicast.len() == job.ranks.len() {
                        job.group = None;
                    }
                }
            }
            Command::Left(id, rank) => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.machine.handle_left(rank, &mut ());
                }
            }
            Command::Rejoin(back) => {
                let now = self.clock.now();
                let Rejoin { job, rank, addr, locks } = *back;
                if let Some(job) = self.jobs.get_mut(&job) {
                    job.machine.handle_rejoined(now, rank);
                    job.ranks[rank.index()] = addr;
                    let opener = locks.opener(job.machine.config(), rank);
                    if let Some((place, opener)) = job.openers.get_mut(rank.index()).zip(opener) {
                        *place = opener;
                    }
                }
            }
            Command::Gone(id, rank) => {
                let now = self.clock.now();
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.machine.handle_gone(rank, &mut ());
                    let gone = job.ranks.get(rank.index());
                    job.unicast.retain(|addr| Some(addr) != gone);
                    // Nothing may come any more that what waited for the rank would be seen at.
                    job.moved = now;
                    self.unserved = true;
                }
            }
            Command::Remove(id) => {
                if let Some(mut job) = self.jobs.remove(&id) {
                    let counters = job.machine.counters();
                    self.stats.folds += counters.folds;
                    self.stats.rejects.add(&counters.rejects);
                    job.slots.release(&mut self.arena);
                }
            }
            Command::Report(tell) => {
                let now = self.clock.now();
                let jobs = self.jobs.iter().map(|(id, job)| (*id, job.report(now))).collect();
                // Whoever asked may have lost patience.
                drop(tell.send(ShardReport { jobs }));
            }
            Command::Stop => return false,
            #[cfg(test)]
            Command::Panic => panic!("the test said so"),
        }
        true
    }

    /// Takes what has arrived, and sends what that makes due. Returns how many messages it was, or
    /// none if the socket is of no use any more.
    fn receive(&mut self) -> Option<usize> {
        while self.incoming.len() < RECV_BATCH {
            let Some(buffer) = self.arena.take() else { break };
            self.incoming.push(buffer);
        }
        let count = match self.socket.recv(&mut self.recv, &mut self.incoming) {
            Ok(0) if !self.unserved => return Some(0),
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
        self.serve(now);
        Some(count)
    }

    /// Gives every job its turn.
    fn serve(&mut self, now: Time) {
        let alone = self.jobs.len() < 2;
        self.unserved = false;
        for job in self.jobs.values_mut() {
            let more = job.serve(now, &mut self.arena, &self.socket, &mut self.out, alone);
            self.unserved |= more;
        }
        self.out.flush_counts(&mut self.stats);
    }

    /// Takes what the kernel handed over as one: datagrams of one sender, `stride` apart.
    fn take_datagrams(&mut self, now: Time, i: usize, meta: &Received) {
        let Self { jobs, stats, incoming, arena, .. } = self;
        let buffer = &mut incoming[i];
        let count = buffer.len().div_ceil(meta.stride.max(1));
        stats.datagrams[0] += count as u64;
        stats.bytes[0] += buffer.len() as u64;
        let mut stores = [None; udp::MAX_SEGMENTS];
        // The kernel may join more datagrams than a window has fragments.
        let whole = count <= stores.len() && may_be_whole(jobs, buffer, meta.stride);
        for (n, datagram) in buffer.chunks_mut(meta.stride.max(1)).enumerate() {
            let origin = Header::origin(datagram);
            let Some(messages) = open(jobs, datagram, meta) else { continue };
            for message in wire::messages(messages) {
                // wire: W-60
                let message = message.and_then(|(header, body)| {
                    let same = origin.is_some_and(|(job, sender)| header.is_of(job, sender));
                    if same { Ok((header, body)) } else { Err(Reject::Sender) }
                });
                let taken = take_message(jobs, &mut stats.rejects, now, message, meta);
                let Some((id, place, body)) = taken else { continue };
                if whole {
                    stores[n] = Some((id, place));
                } else if let Some(job) = jobs.get_mut(&id) {
                    job.slots.copy(place, body, arena);
                }
            }
        }
        if whole {
            self.keep_or_copy(i, meta.stride, &stores[..count]);
        }
    }

    /// Keeps a buffer that holds a whole contribution, or copies those of its fragments that are
    /// wanted.
    fn keep_or_copy(&mut self, i: usize, stride: usize, stores: &[Option<(JobId, Place)>]) {
        let Self { jobs, incoming, arena, .. } = self;
        if let Some((id, place)) = whole_window(stores)
            && let Some(job) = jobs.get_mut(&id)
            && Slots::fits(&place, stride)
            && let Some(fresh) = arena.take()
        {
            let buffer = std::mem::replace(&mut incoming[i], fresh);
            if let Some(old) = job.slots.keep(place, buffer) {
                arena.give(old);
            }
            return;
        }
        for (datagram, store) in incoming[i].chunks(stride.max(1)).zip(stores) {
            let Some((id, place)) = store else { continue };
            let Some(job) = jobs.get_mut(id) else { continue };
            let end = datagram.len().saturating_sub(place.cut.trailer());
            if let Some(body) = datagram.get(Header::LEN..end) {
                job.slots.copy(*place, body, arena);
            }
        }
    }

    /// Shows the counters to the other threads, now and then.
    fn publish(&mut self) {
        let now = self.clock.now();
        if now.since(self.published) < Span::from_millis(100) {
            return;
        }
        self.published = now;
        let mut stats = self.stats.clone();
        stats.kernel_drops = self.socket.drops();
        stats.send_failures = self.socket.send_failures();
        stats.buffers = [self.arena.total(), self.arena.available() + self.incoming.len()];
        for job in self.jobs.values() {
            let counters = job.machine.counters();
            stats.folds += counters.folds;
            stats.rejects.add(&counters.rejects);
        }
        if let Ok(mut shared) = self.shared.lock() {
            *shared = stats;
        }
    }
}

/// Hands a message to its job. Returns its body and where it belongs, if it has one that is
/// wanted.
fn take_message<'a>(
    jobs: &mut BTreeMap<JobId, Job>,
    rejects: &mut Rejects,
    now: Time,
    message: Result<(Header, &'a [u8]), Reject>,
    meta: &Received,
) -> Option<(JobId, Place, &'a [u8])> {
    let (header, body) = match message {
        Ok(message) => message,
        Err(reject) => {
            rejects.count(reject);
            return None;
        }
    };
    let Some(job) = jobs.get_mut(&header.job) else {
        rejects.count(Reject::Job);
        return None;
    };
    // wire: W-9
    if job.ranks.get(header.sender.index()) != Some(&meta.from) {
        job.machine.reject(Reject::Sender, &mut ());
        return None;
    }
    match job.machine.handle_decoded(now, &header, body, meta.ce, &mut ()) {
        Verdict::Store(place) => Some((header.job, place, body)),
        Verdict::Duplicate | Verdict::Control | Verdict::Reject(_) => None,
    }
}

/// The messages of a datagram, if it is authentic; where nothing is authenticated, of any.
fn open<'a>(
    jobs: &mut BTreeMap<JobId, Job>,
    datagram: &'a mut [u8],
    meta: &Received,
) -> Option<&'a [u8]> {
    // One that is of no job here says what is wrong with it when it is decoded.
    let Some((id, rank)) = Header::origin(datagram) else { return Some(datagram) };
    let Some(job) = jobs.get_mut(&id).filter(|job| !job.openers.is_empty()) else {
        return Some(datagram);
    };
    // wire: W-9
    // Looked at first, since that costs less than the tag.
    let sender = job.ranks.get(rank.index()).filter(|addr| **addr == meta.from);
    let opened = match (sender, job.openers.get_mut(rank.index())) {
        (Some(_), Some(opener)) => opener.open(datagram),
        _ => Err(Reject::Sender),
    };
    match opened {
        Ok(messages) => Some(messages),
        Err(reject) => {
            job.machine.reject(reject, &mut ());
            None
        }
    }
}

/// Whether a buffer looks as if it held the fragments of one window, a message a datagram.
fn may_be_whole(jobs: &BTreeMap<JobId, Job>, buffer: &[u8], stride: usize) -> bool {
    let job = Header::origin(buffer).and_then(|(id, _)| jobs.get(&id));
    let trailer = job.map_or(0, |job| job.machine.config().cut.trailer());
    buffer.chunks(stride.max(1)).all(|datagram| {
        let messages = datagram.len().checked_sub(trailer).and_then(|len| datagram.get(..len));
        messages.is_some_and(|message| Header::decode(message).is_ok())
    })
}

/// The window that a buffer holds whole and in order, if it does.
fn whole_window(stores: &[Option<(JobId, Place)>]) -> Option<(JobId, Place)> {
    let (job, first) = (*stores.first()?)?;
    if first.fragment != 0 || usize::from(first.fragments) != stores.len() {
        return None;
    }
    let in_order = stores
        .iter()
        .zip(0..)
        .all(|(store, fragment)| *store == Some((job, Place { fragment, ..first })));
    in_order.then_some((job, first))
}

impl Job {
    /// Folds and sends what is due, as long as it is this job's turn, or all if it is `alone`.
    /// Returns whether there is more to fold.
    fn serve(
        &mut self,
        now: Time,
        arena: &mut Arena,
        socket: &UdpSocket,
        out: &mut Outbox,
        alone: bool,
    ) -> bool {
        self.turn.begin();
        let more = loop {
            if !alone && self.turn.is_over() {
                break true;
            }
            let fold = self.machine.poll_fold();
            if fold.is_some() || self.machine.backlog() == 0 {
                self.moved = now;
            }
            if let Some(fold) = &fold {
                self.turn.spend(self.slots.fold(fold, &self.machine, arena));
                self.machine.handle_folded(fold, &mut ());
            }
            // Also when there is nothing to fold: finding that out may have freed credits.
            while let Some(transmit) =
                self.machine.poll_transmit(now, &mut out.datagram[..], &mut ())
            {
                match transmit {
                    Transmit::Datagram { to, len } => out.send_datagram(socket, self, to, len),
                    Transmit::Result { to, result } => out.send_result(socket, self, to, &result),
                }
            }
            if fold.is_none() {
                self.turn.end();
                break false;
            }
        };
        out.send_joined(socket, self);
        more
    }

    /// How far it is.
    fn report(&self, now: Time) -> JobReport {
        let waits = self.machine.backlog() > 0;
        let ranks =
            (0..self.machine.config().world).map(|rank| self.machine.progress(now, Rank(rank)));
        JobReport {
            stalled: waits.then(|| now.since(self.moved)),
            ranks: ranks.collect(),
            settled: (0..self.machine.config().lanes)
                .all(|lane| self.machine.results_held(lane) == 0),
            sealed: self.sealer.as_ref().map_or(0, Sealer::sealed),
        }
    }

    /// What the messages of a lane are marked with.
    pub(crate) fn tos_of_lane(&self, lane: u8) -> Option<u8> {
        udp::tos_of_lane(lane, self.machine.config().lanes)
    }

    /// What a datagram is marked with, by the lane of its first message.
    pub(crate) fn tos(&self, datagram: &[u8]) -> Option<u8> {
        if self.machine.config().lanes < 2 {
            return None;
        }
        let (header, _, _) = Header::decode_first(datagram).ok()?;
        self.tos_of_lane(header.lane)
    }
}

/// Contributions to bulk ops are folded at most this much later, and in batches.
const LONGEST_PAUSE: Span = Span::from_micros(50);
/// Results go to hosts of one rack.
const MULTICAST_TTL: u8 = 1;

#[cfg(test)]
mod tests;
