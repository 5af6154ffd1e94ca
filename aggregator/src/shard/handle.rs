//! A handle to a shard, for the rest of the aggregator.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use racksum_net::NetError;
use racksum_net::clock::Clock;
use racksum_net::interface::Interface;
use racksum_net::udp::{Gather, RECV_BATCH, RECV_CAPACITY, RecvRing, UdpConfig, UdpSocket, Waker};
use racksum_proto::ids::JobId;
use racksum_proto::schedule::DeficitRoundRobin;
use racksum_proto::time::Time;
use tokio::sync::oneshot;

use super::floods::Floods;
use super::outbox::Outbox;
use super::proof::Proofs;
use super::{Command, LONGEST_PAUSE, MULTICAST_TTL, QUANTUM, Shard, ShardReport, ShardStats};
use crate::arena::Arena;
use crate::error::StartError;
use crate::failure::Failure;

/// The command channel of a shard.
#[derive(Debug, Clone)]
struct CommandSender {
    commands: Sender<Command>,
    waker: Waker,
}

impl CommandSender {
    fn send(&self, command: Command) {
        // Ignore a failed send: a shard that has ended needs no commands.
        drop(self.commands.send(command));
        self.waker.wake();
    }
}

/// A shard's view of the other shards. The command channels are set once all shards have started.
#[derive(Debug, Clone, Default)]
pub(super) struct OtherShards {
    number: usize,
    all: Arc<OnceLock<Vec<CommandSender>>>,
}

impl OtherShards {
    /// Sends a command to all other shards.
    pub(super) fn send(&self, command: impl Fn() -> Command) {
        let all = self.all.get().map_or(&[][..], Vec::as_slice);
        let others = all.iter().enumerate().filter(|(i, _)| *i != self.number);
        others.for_each(|(_, other)| other.send(command()));
    }
}

/// Gives each shard the command channels of all shards.
pub(crate) fn connect_shards(shards: &[ShardHandle]) {
    let senders: Vec<_> = shards.iter().map(|shard| shard.sender.clone()).collect();
    for shard in shards {
        // This cannot fail, because the channels of each shard are set only once.
        drop(shard.other_shards.set(senders.clone()));
    }
}

/// A running shard.
#[derive(Debug)]
pub(crate) struct ShardHandle {
    pub(crate) addr: SocketAddr,
    /// The size of the receive buffer in bytes.
    pub(crate) receive_buffer: usize,
    /// A warning if the receive or send buffer is smaller than requested.
    pub(crate) shortfall: Option<String>,
    socket: Arc<UdpSocket>,
    sender: CommandSender,
    other_shards: Arc<OnceLock<Vec<CommandSender>>>,
    stats: Arc<Mutex<ShardStats>>,
    thread: Option<JoinHandle<()>>,
}

impl ShardHandle {
    /// Starts a shard: allocates its packet buffers, opens its socket and starts its thread.
    pub(crate) fn start(
        bind: SocketAddr,
        number: usize,
        buffers: usize,
        clock: Clock,
        failure: &Failure,
    ) -> Result<Self, StartError> {
        let mib = (buffers * RECV_CAPACITY) >> 20;
        let no_memory = |_| StartError::Memory { mib };
        let arena = Arena::new(buffers + 2 * RECV_BATCH).map_err(no_memory)?;
        let socket = Arc::new(UdpSocket::open(&UdpConfig::new(bind))?);
        let addr = socket.local_addr();
        let waker = Waker::new()?;
        let (commands, inbox) = channel();
        let stats = Arc::new(Mutex::new(ShardStats::default()));
        let other_shards = Arc::default();
        let (receive_buffer, shortfall) =
            (socket.report().got_receive, socket.report().shortfall());
        let mut shard = Shard {
            socket: Arc::clone(&socket),
            clock,
            inbox,
            waker: waker.clone(),
            gather: Gather::new(receive_buffer, LONGEST_PAUSE),
            jobs: BTreeMap::new(),
            schedule: DeficitRoundRobin::new(QUANTUM),
            parent_jobs: BTreeMap::new(),
            proofs: Proofs::default(),
            floods: Floods::default(),
            other_shards: OtherShards { number, all: Arc::clone(&other_shards) },
            arena,
            incoming: Vec::with_capacity(RECV_BATCH),
            recv: RecvRing::new(),
            out: Outbox::new(),
            stats: ShardStats::default(),
            shared: Arc::clone(&stats),
            published: Time(0),
            failure: failure.clone(),
            unserved: false,
            more_commands: false,
        };
        let thread = failure.spawn(format!("shard-{number}"), move || shard.run())?;
        let (thread, sender) = (Some(thread), CommandSender { commands, waker });
        Ok(Self { addr, receive_buffer, shortfall, socket, sender, other_shards, stats, thread })
    }

    /// Sets the interface from which results are multicast.
    pub(crate) fn set_multicast(&self, interface: &Interface) -> Result<(), NetError> {
        let set = self.socket.set_multicast_sender(interface, MULTICAST_TTL);
        set.inspect_err(|error| tracing::debug!(%error, "cannot multicast from this interface"))
    }

    /// Sends the shard a command.
    pub(crate) fn send(&self, command: Command) {
        self.sender.send(command);
    }

    /// Asks the shard for the progress of one job, or of all its jobs.
    pub(crate) fn ask(&self, job: Option<JobId>) -> oneshot::Receiver<ShardReport> {
        let (sender, report) = oneshot::channel();
        self.send(Command::Report(job, sender));
        report
    }

    /// Returns the shard's counters, which may be slightly out of date.
    pub(crate) fn stats(&self) -> ShardStats {
        self.stats.lock().map_or_else(|broken| broken.into_inner().clone(), |stats| stats.clone())
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        self.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // Ignore a panic of the shard: the panic hook has already printed it.
            drop(thread.join());
        }
    }
}
