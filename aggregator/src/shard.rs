//! A shard: one thread, one socket, and the halves of all jobs that are there.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use bytes::BytesMut;
use racksum_net::NetError;
use racksum_net::clock::Clock;
use racksum_net::interface::Interface;
use racksum_net::udp::{
    self, BATCH, Received, RecvRing, SendRing, Transmit as Message, UdpConfig, UdpSocket, Waker,
};
use racksum_proto::aggregator::{
    Aggregation, Config, Place, Recipient, ResultFragments, Transmit, Verdict,
};
use racksum_proto::error::{Reject, Rejects};
use racksum_proto::ids::JobId;
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::{self, Header};

use crate::arena::Arena;
use crate::slots::Slots;

/// A job as a shard is told of it.
#[derive(Debug)]
pub(crate) struct NewJob {
    pub(crate) config: Config,
    /// Where each rank's data goes.
    pub(crate) ranks: Vec<SocketAddr>,
    /// The group that results are multicast to, if any.
    pub(crate) group: Option<SocketAddr>,
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
    /// The job is gone.
    Remove(JobId),
    /// The aggregator stops.
    Stop,
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
    /// Datagrams that changed nothing, by reason.
    pub rejects: Rejects,
    /// Packet buffers in all, and free.
    pub buffers: [usize; 2],
}

/// A running shard.
#[derive(Debug)]
pub(crate) struct ShardHandle {
    pub(crate) addr: SocketAddr,
    /// Bytes that the receive buffer holds.
    pub(crate) receive_buffer: usize,
    /// What the receive buffer lacks of what was asked for, as a sentence.
    pub(crate) shortfall: Option<String>,
    socket: Arc<UdpSocket>,
    commands: Sender<Command>,
    waker: Waker,
    stats: Arc<Mutex<ShardStats>>,
    thread: Option<JoinHandle<()>>,
}

impl ShardHandle {
    /// Opens the socket and starts the thread.
    pub(crate) fn start(
        bind: SocketAddr,
        number: usize,
        buffers: usize,
        clock: Clock,
    ) -> Result<Self, NetError> {
        let socket = Arc::new(UdpSocket::open(&UdpConfig::new(bind))?);
        let addr = socket.local_addr();
        let io = |cause: std::io::Error| NetError::Bind { addr, cause };
        let waker = Waker::new().map_err(io)?;
        let (commands, inbox) = channel();
        let stats = Arc::new(Mutex::new(ShardStats::default()));
        let (receive_buffer, shortfall) =
            (socket.report().got_receive, socket.report().shortfall());
        let mut shard = Shard {
            socket: Arc::clone(&socket),
            clock,
            inbox,
            waker: waker.clone(),
            jobs: BTreeMap::new(),
            arena: Arena::new(buffers + 2 * BATCH),
            incoming: Vec::with_capacity(BATCH),
            recv: RecvRing::new(),
            out: Outbox::new(),
            stats: ShardStats::default(),
            shared: Arc::clone(&stats),
            published: Time(0),
        };
        let thread = std::thread::Builder::new()
            .name(format!("shard-{number}"))
            .spawn(move || shard.run())
            .map_err(io)?;
        let thread = Some(thread);
        Ok(Self { addr, receive_buffer, shortfall, socket, commands, waker, stats, thread })
    }

    /// Makes the interface the one that results are multicast from; returns whether it can be.
    pub(crate) fn set_multicast(&self, interface: &Interface) -> bool {
        let set = self.socket.set_multicast_sender(interface, MULTICAST_TTL);
        set.inspect_err(|error| tracing::debug!(%error, "no multicast")).is_ok()
    }

    /// Tells the shard something.
    pub(crate) fn tell(&self, command: Command) {
        // A shard that is gone has nothing left to do it with.
        drop(self.commands.send(command));
        self.waker.wake();
    }

    /// What the shard has counted, up to a moment ago.
    pub(crate) fn stats(&self) -> ShardStats {
        self.stats.lock().map_or_else(|broken| broken.into_inner().clone(), |stats| stats.clone())
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        self.tell(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic in the shard was printed where it happened.
            drop(thread.join());
        }
    }
}

/// A job at the shard.
#[derive(Debug)]
struct Job {
    machine: Aggregation,
    slots: Slots,
    ranks: Vec<SocketAddr>,
    group: Option<SocketAddr>,
    /// Ranks that do not hear the group.
    unicast: Vec<SocketAddr>,
}

/// The thread's state.
struct Shard {
    socket: Arc<UdpSocket>,
    clock: Clock,
    inbox: Receiver<Command>,
    waker: Waker,
    jobs: BTreeMap<JobId, Job>,
    arena: Arena,
    incoming: Vec<BytesMut>,
    recv: RecvRing,
    out: Outbox,
    stats: ShardStats,
    shared: Arc<Mutex<ShardStats>>,
    published: Time,
}

impl Shard {
    fn run(&mut self) {
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                if !self.obey(command) {
                    return;
                }
            }
            if self.receive() == 0 {
                self.publish();
                let fds = [self.socket.as_fd(), self.waker.as_fd()];
                // The timeout only bounds how stale the published counters can be.
                let ready = udp::wait(&fds, Some(Span::from_secs(1))).unwrap_or(0);
                if ready & 2 != 0 {
                    self.waker.drain();
                }
            }
        }
    }

    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Add(new) => {
                let NewJob { config, ranks, group } = *new;
                let slots = Slots::new(&config, &mut self.arena);
                let machine = Aggregation::new(config, self.clock.now());
                let unicast = ranks.clone();
                let job = Job { machine, slots, ranks, group, unicast };
                self.jobs.insert(config.job, job);
            }
            Command::Probe(id) => {
                if let Some(job) = self.jobs.get(&id) {
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
            Command::Remove(id) => {
                if let Some(mut job) = self.jobs.remove(&id) {
                    let counters = job.machine.counters();
                    self.stats.folds += counters.folds;
                    self.stats.rejects.add(&counters.rejects);
                    job.slots.release(&mut self.arena);
                }
            }
            Command::Stop => return false,
        }
        true
    }

    /// Takes what has arrived, and sends what that makes due. Returns how many messages it was.
    fn receive(&mut self) -> usize {
        while self.incoming.len() < BATCH {
            let Some(buffer) = self.arena.take() else { break };
            self.incoming.push(buffer);
        }
        // An error here is a peer's ICMP message: the data path learns of it by silence.
        let count = self.socket.recv(&mut self.recv, &mut self.incoming).unwrap_or(0);
        if count == 0 {
            return 0;
        }
        let now = self.clock.now();
        for i in 0..count {
            self.take_datagrams(now, i);
        }
        for job in self.jobs.values_mut() {
            job.serve(now, &mut self.arena, &self.socket, &mut self.out);
        }
        self.out.flush_counts(&mut self.stats);
        count
    }

    /// Takes what the kernel handed over as one: datagrams of one sender, `stride` apart.
    fn take_datagrams(&mut self, now: Time, i: usize) {
        let Self { jobs, stats, incoming, arena, recv, .. } = self;
        let meta = recv.meta(i);
        let buffer = &incoming[i];
        let count = buffer.len().div_ceil(meta.stride.max(1));
        stats.datagrams[0] += count as u64;
        stats.bytes[0] += buffer.len() as u64;
        let mut stores = [None; udp::MAX_SEGMENTS];
        // The kernel may join more datagrams than a window has fragments.
        let whole = count <= stores.len() && may_be_whole(buffer, meta.stride);
        for (n, datagram) in buffer.chunks(meta.stride.max(1)).enumerate() {
            for message in wire::messages(datagram) {
                let Some((id, place, body)) =
                    take_message(jobs, &mut stats.rejects, now, message, &meta)
                else {
                    continue;
                };
                if whole {
                    stores[n] = Some((id, place));
                } else if let Some(job) = jobs.get_mut(&id) {
                    job.slots.copy(place, body, arena);
                }
            }
        }
        if whole {
            self.keep_or_copy(i, &stores[..count]);
        }
    }

    /// Keeps a buffer that holds a whole contribution, or copies those of its fragments that are
    /// wanted.
    fn keep_or_copy(&mut self, i: usize, stores: &[Option<(JobId, Place)>]) {
        let Self { jobs, incoming, arena, recv, .. } = self;
        let stride = recv.meta(i).stride;
        if let Some((id, place)) = whole_window(stores)
            && let Some(job) = jobs.get_mut(&id)
            && job.slots.fits(place.fragments, stride)
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
            if let (Some(job), Some(body)) = (jobs.get_mut(id), datagram.get(Header::LEN..)) {
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

/// Whether a buffer looks as if it held the fragments of one window, a message a datagram.
fn may_be_whole(buffer: &[u8], stride: usize) -> bool {
    buffer.chunks(stride.max(1)).all(|datagram| Header::decode(datagram).is_ok())
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
    /// Folds and sends all that is due.
    fn serve(&mut self, now: Time, arena: &mut Arena, socket: &UdpSocket, out: &mut Outbox) {
        loop {
            while let Some(transmit) =
                self.machine.poll_transmit(now, &mut out.datagram[..], &mut ())
            {
                match transmit {
                    Transmit::Datagram { to, len } => out.send_datagram(socket, self, to, len),
                    Transmit::Result { to, result } => out.send_result(socket, self, to, &result),
                }
            }
            let Some(fold) = self.machine.poll_fold() else { break };
            self.slots.fold(&fold, &self.machine, arena);
            self.machine.handle_folded(&fold, &mut ());
        }
        out.send_joined(socket, self);
    }
}

/// The addresses a transmit goes to: the group if there is one, then the ranks that do not hear
/// it; or a single rank.
fn addresses<'a>(
    to: Recipient,
    group: Option<SocketAddr>,
    unicast: &'a [SocketAddr],
    ranks: &'a [SocketAddr],
) -> impl Iterator<Item = SocketAddr> + Clone + 'a {
    let (group, ranks) = match to {
        Recipient::All => (group, unicast),
        Recipient::Rank(rank) => (None, ranks.get(rank.index()..=rank.index()).unwrap_or(&[])),
    };
    group.into_iter().chain(ranks.iter().copied())
}

/// What goes out: the ring to send with, and room to write a datagram in.
struct Outbox {
    ring: SendRing,
    datagram: Box<[u8; MAX_CONTROL]>,
    /// Messages to all ranks of the job that is being served, to go as one datagram.
    joined: Vec<u8>,
    datagrams: u64,
    bytes: u64,
}

/// Bytes of the largest result that shares a datagram with others.
const MAX_JOINED: usize = 16 << 10;
/// Bytes of the largest datagram without tensor data: an ask or a wait.
const MAX_CONTROL: usize = 2048;

impl Outbox {
    fn new() -> Self {
        Self {
            ring: SendRing::new(),
            datagram: Box::new([0; MAX_CONTROL]),
            joined: Vec::with_capacity(udp::MAX_DATAGRAM),
            datagrams: 0,
            bytes: 0,
        }
    }

    fn send_datagram(&mut self, socket: &UdpSocket, job: &Job, to: Recipient, len: usize) {
        let Self { ring, datagram, datagrams, bytes, .. } = self;
        let contents = &datagram[..len];
        let addresses = addresses(to, job.group, &job.unicast, &job.ranks);
        send(socket, ring, addresses, &[(contents, len)], &mut [datagrams, bytes]);
    }

    /// Adds a message to those that go to all ranks as one datagram.
    fn join(&mut self, socket: &UdpSocket, job: &Job, message: &[u8]) {
        let cut = job.machine.config().cut;
        if self.joined.len() + message.len() > Header::LEN + cut.payload() {
            self.send_joined(socket, job);
        }
        self.joined.extend_from_slice(message);
    }

    /// Sends the messages that were joined.
    fn send_joined(&mut self, socket: &UdpSocket, job: &Job) {
        let Self { ring, joined, datagrams, bytes, .. } = self;
        if !joined.is_empty() {
            let addresses = addresses(Recipient::All, job.group, &job.unicast, &job.ranks);
            let contents = [(&joined[..], joined.len())];
            send(socket, ring, addresses, &contents, &mut [datagrams, bytes]);
            joined.clear();
        }
    }

    fn send_result(
        &mut self,
        socket: &UdpSocket,
        job: &mut Job,
        to: Recipient,
        result: &ResultFragments,
    ) {
        let ResultFragments { lane, slot, len, fragments, header } = result;
        let cut = job.machine.config().cut;
        if to == Recipient::All && Header::LEN + len <= MAX_JOINED {
            // Sparse windows are small, and a datagram costs the same whatever it holds.
            let mut message = [0; MAX_JOINED];
            let (result, _) = job.slots.result(*lane, *slot, *len, header);
            if result.len() <= Header::LEN + cut.payload() {
                let message = &mut message[..result.len()];
                message.copy_from_slice(result);
                return self.join(socket, job, message);
            }
        }
        if to == Recipient::All {
            // Results in order: one that overtakes another looks like a loss.
            self.send_joined(socket, job);
        }
        let Job { slots, ranks, group, unicast, .. } = job;
        let (datagrams, stride) = slots.result(*lane, *slot, *len, header);
        let Self { ring, datagrams: sent, bytes, .. } = self;
        let addresses = addresses(to, *group, unicast, ranks);
        if *fragments == cut.all(*len) {
            let counts = &mut [sent, bytes];
            send(socket, ring, addresses, &[(datagrams, stride)], counts);
            return;
        }
        for address in addresses {
            let wanted = datagrams.chunks(stride).enumerate();
            for (_, datagram) in wanted.filter(|(i, _)| fragments >> i & 1 == 1) {
                let message = [(datagram, datagram.len())];
                send(socket, ring, [address].into_iter(), &message, &mut [sent, bytes]);
            }
        }
    }

    /// Sends the probe that shows who hears the group.
    fn probe(&mut self, socket: &UdpSocket, job: &Job) {
        let Some(group) = job.group else { return };
        let config = job.machine.config();
        let header = Header::probe(config.job, config.generation, config.shard);
        let mut bytes = [0; Header::LEN];
        header.encode(&mut bytes);
        let counts = &mut [&mut self.datagrams, &mut self.bytes];
        send(socket, &mut self.ring, [group].into_iter(), &[(&bytes, Header::LEN)], counts);
    }

    fn flush_counts(&mut self, stats: &mut ShardStats) {
        stats.datagrams[1] += std::mem::take(&mut self.datagrams);
        stats.bytes[1] += std::mem::take(&mut self.bytes);
    }
}

/// Sends messages to each address; waits a little for room in the send buffer. What still does
/// not go is lost, and asked for again.
fn send(
    socket: &UdpSocket,
    ring: &mut SendRing,
    addresses: impl Iterator<Item = SocketAddr>,
    messages: &[(&[u8], usize)],
    counts: &mut [&mut u64; 2],
) {
    let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let mut batch = [Message { to: nowhere, contents: &[], stride: 1 }; BATCH];
    let mut full = 0;
    let all = addresses.flat_map(|to| {
        messages.iter().map(move |(contents, stride)| Message { to, contents, stride: *stride })
    });
    for message in all {
        *counts[0] += message.datagrams().unwrap_or(0) as u64;
        *counts[1] += message.contents.len() as u64;
        batch[full] = message;
        full += 1;
        if full == BATCH {
            send_batch(socket, ring, &batch);
            full = 0;
        }
    }
    send_batch(socket, ring, &batch[..full]);
}

fn send_batch(socket: &UdpSocket, ring: &mut SendRing, mut batch: &[Message<'_>]) {
    for _ in 0..MAX_SEND_WAITS {
        if batch.is_empty() {
            return;
        }
        let outcome = socket.send(ring, batch);
        batch = &batch[(outcome.sent + outcome.failed).min(batch.len())..];
        if outcome.blocked {
            // A timeout and readiness are the same here: try again.
            drop(udp::wait_writable(socket.as_fd(), Some(Span::from_millis(2))));
        }
    }
}

/// Results go to hosts of one rack.
const MULTICAST_TTL: u8 = 1;
/// How often a full send buffer is waited for before a batch is given up.
const MAX_SEND_WAITS: usize = 16;
