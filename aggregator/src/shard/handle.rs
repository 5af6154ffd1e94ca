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
use crate::StartError;
use crate::arena::Arena;
use crate::failure::Failure;

/// The command channel of a shard.
#[derive(Debug, Clone)]
struct Mouth {
    commands: Sender<Command>,
    waker: Waker,
}

impl Mouth {
    fn tell(&self, command: Command) {
        // A shard that has ended needs no commands.
        drop(self.commands.send(command));
        self.waker.wake();
    }
}

/// The shards of an aggregator, as each of them knows the others once all have started.
#[derive(Debug, Clone, Default)]
pub(super) struct Siblings {
    number: usize,
    all: Arc<OnceLock<Vec<Mouth>>>,
}

impl Siblings {
    /// Sends a command to all other shards.
    pub(super) fn tell(&self, command: impl Fn() -> Command) {
        let all = self.all.get().map_or(&[][..], Vec::as_slice);
        let others = all.iter().enumerate().filter(|(i, _)| *i != self.number);
        others.for_each(|(_, other)| other.tell(command()));
    }
}

/// Introduces the shards to each other.
pub(crate) fn make_siblings(shards: &[ShardHandle]) {
    let mouths: Vec<_> = shards.iter().map(|shard| shard.mouth.clone()).collect();
    for shard in shards {
        // Each value is set only once.
        drop(shard.siblings.set(mouths.clone()));
    }
}

/// A running shard.
#[derive(Debug)]
pub(crate) struct ShardHandle {
    pub(crate) addr: SocketAddr,
    /// The size of the receive buffer in bytes.
    pub(crate) receive_buffer: usize,
    /// A warning if the receive buffer is smaller than requested.
    pub(crate) shortfall: Option<String>,
    socket: Arc<UdpSocket>,
    mouth: Mouth,
    siblings: Arc<OnceLock<Vec<Mouth>>>,
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
        let siblings = Arc::default();
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
            siblings: Siblings { number, all: Arc::clone(&siblings) },
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
        let (thread, mouth) = (Some(thread), Mouth { commands, waker });
        Ok(Self { addr, receive_buffer, shortfall, socket, mouth, siblings, stats, thread })
    }

    /// Sets the interface that results are multicast from.
    pub(crate) fn set_multicast(&self, interface: &Interface) -> Result<(), NetError> {
        let set = self.socket.set_multicast_sender(interface, MULTICAST_TTL);
        set.inspect_err(|error| tracing::debug!(%error, "cannot multicast from this interface"))
    }

    /// Sends the shard a command.
    pub(crate) fn tell(&self, command: Command) {
        self.mouth.tell(command);
    }

    /// Asks the shard for the progress of one job, or of all its jobs.
    pub(crate) fn ask(&self, job: Option<JobId>) -> oneshot::Receiver<ShardReport> {
        let (tell, report) = oneshot::channel();
        self.tell(Command::Report(job, tell));
        report
    }

    /// Returns the shard's counters, which may lag slightly.
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
