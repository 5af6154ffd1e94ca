//! Plans: all that a run is made of, in numbers. The same plan gives the same run.

use racksum_proto::aggregator;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::{Generation, JobId, OpId, Rank};
use racksum_proto::time::Span;
use racksum_proto::worker;

use crate::engine::Picos;
use crate::fault::Rule;
use crate::host::Host;
use crate::inputs::Inputs;
use crate::link::LinkConfig;
use crate::random::Random;

/// A run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Where faults and noise come from; inputs have seeds of their own.
    pub seed: u64,
    /// The jobs, which share the shards' hosts.
    pub jobs: Vec<JobPlan>,
    /// The hosts and their links.
    pub network: Network,
    /// What goes wrong on the way.
    pub faults: Vec<Rule>,
    /// When hosts stand still.
    pub pauses: Vec<Pause>,
    /// When all shards die, in ascending order. The jobs go on at others, on the same hosts.
    pub moves: Vec<Move>,
    /// How many datagrams strangers send.
    pub noise: u32,
}

/// A star: every host is joined to one switch.
#[derive(Debug, Clone, Copy)]
pub struct Network {
    /// How many shards, each on a host of its own.
    pub shards: u8,
    /// Whether each shard is an aggregator of its own, with its own numbers for jobs.
    pub own_numbers: bool,
    /// How a worker is joined.
    pub worker: PortPlan,
    /// How a shard is.
    pub shard: PortPlan,
    /// Whether the switch copies what is for every rank, or the shard sends it to each.
    pub multicast: bool,
}

/// A host's network card and socket.
#[derive(Debug, Clone, Copy)]
pub struct PortPlan {
    /// To the switch.
    pub up: LinkConfig,
    /// From the switch.
    pub down: LinkConfig,
    /// Bytes that may wait in the socket until the host takes them.
    pub receive_buffer: usize,
    /// Bytes that may wait for the uplink. A rank that has filled it sends on once half of it is
    /// free, as a socket would let it; a shard only sends what ranks can take.
    pub send_buffer: usize,
    /// How long the host is busy with each datagram it takes.
    pub service: Picos,
}

/// A job and what it does.
#[derive(Debug, Clone)]
pub struct JobPlan {
    /// How many ranks.
    pub world: u16,
    /// How many lanes.
    pub lanes: u8,
    /// Slots of each stream.
    pub pool_slots: u32,
    /// Ops that may be in flight.
    pub max_ops: u16,
    /// How windows are cut into datagrams.
    pub cut: Fragmentation,
    /// Bytes that a rank starts with in flight, a shard.
    pub in_flight: usize,
    /// Bytes of results that a shard starts with in flight.
    pub results_in_flight: usize,
    /// Its ops, in the order of the calls.
    pub ops: Vec<OpPlan>,
    /// A rank that does not take part to the end.
    pub missing: Option<Missing>,
}

/// An op of a job.
#[derive(Debug, Clone)]
pub struct OpPlan {
    /// What it is.
    pub descriptor: Descriptor,
    /// What the ranks contribute.
    pub inputs: Inputs,
    /// How long each rank waits for it.
    pub timeout: Span,
    /// When each rank calls it, if the job's limit on ops lets it.
    pub starts: Vec<Picos>,
    /// A rank that calls it with another descriptor.
    pub odd: Option<(Rank, Descriptor)>,
}

/// A rank that is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// Which.
    pub rank: Rank,
    /// How.
    pub absence: Absence,
}

/// How a rank is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// It calls only this many ops, but goes on answering.
    Calls(usize),
    /// It is dead from then on.
    Dies(Picos),
}

/// The death of the shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// When they stop.
    pub at: Picos,
    /// How much later the jobs go on elsewhere.
    pub lasts: Picos,
}

/// A host that handles nothing for a while; what its socket cannot hold is lost.
#[derive(Debug, Clone, Copy)]
pub struct Pause {
    /// The host.
    pub host: Host,
    /// When it stops.
    pub at: Picos,
    /// For how long.
    pub lasts: Picos,
}

/// One life of the shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// How often they have died before.
    pub number: u8,
    /// The first op of the job in it.
    pub first_op: OpId,
}

impl Life {
    /// The first.
    pub const FIRST: Self = Self { number: 0, first_op: OpId(0) };
}

impl Plan {
    /// A plan without faults: one job on a network.
    #[must_use]
    pub const fn new(seed: u64, network: Network, jobs: Vec<JobPlan>) -> Self {
        Self {
            seed,
            jobs,
            network,
            faults: Vec::new(),
            pauses: Vec::new(),
            moves: Vec::new(),
            noise: 0,
        }
    }

    /// All hosts, workers before shards.
    pub fn hosts(&self) -> impl Iterator<Item = Host> + '_ {
        let workers = self.jobs.iter().enumerate().flat_map(|(job, plan)| {
            (0..plan.world).map(move |rank| Host::Worker { job, rank: Rank(rank) })
        });
        workers.chain((0..self.network.shards).map(Host::Shard))
    }

    /// The place of a host among [`Self::hosts`].
    #[must_use]
    pub fn place(&self, host: Host) -> usize {
        let before = |job: usize| self.jobs[..job].iter().map(|job| usize::from(job.world)).sum();
        match host {
            Host::Worker { job, rank } => {
                let first: usize = before(job);
                first + rank.index()
            }
            Host::Shard(shard) => {
                let workers: usize = before(self.jobs.len());
                workers + usize::from(shard)
            }
        }
    }

    /// The number that job `job` goes by on the wire, to and from a shard, in a life of the shards.
    #[must_use]
    pub fn job_id(&self, job: usize, shard: u8, life: Life) -> JobId {
        let own = if self.network.own_numbers { u32::from(shard) * 1_000 } else { 0 };
        let own = own + u32::from(life.number) * 1_000_000;
        JobId(u32::try_from(job).unwrap_or(u32::MAX).saturating_add(1 + own))
    }

    /// What a rank is granted.
    #[must_use]
    pub fn worker(&self, job: usize, rank: Rank, life: Life) -> worker::Config {
        let plan = &self.jobs[job];
        worker::Config {
            job: self.job_id(job, 0, life),
            generation: Self::GENERATION,
            rank,
            lanes: plan.lanes,
            shards: self.network.shards,
            pool_slots: plan.pool_slots,
            max_ops: plan.max_ops,
            cut: plan.cut,
            in_flight: plan.in_flight,
            first_op: life.first_op,
            may_move: !self.moves.is_empty(),
            acks_at_rest: false,
            relay: None,
        }
    }

    /// What a job is granted at a shard.
    #[must_use]
    pub fn aggregator(&self, job: usize, shard: u8, life: Life) -> aggregator::Config {
        let plan = &self.jobs[job];
        aggregator::Config {
            job: self.job_id(job, shard, life),
            generation: Self::GENERATION,
            world: plan.world,
            lanes: plan.lanes,
            shard,
            shards: self.network.shards,
            pool_slots: plan.pool_slots,
            max_ops: plan.max_ops,
            cut: plan.cut,
            results_in_flight: plan.results_in_flight,
            moved_at: (life.number > 0).then_some(life.first_op),
            weight: None,
            has_parent: false,
        }
    }

    /// The longest that hosts stand still, in all.
    #[must_use]
    pub fn paused(&self) -> Picos {
        let lasts = self.pauses.iter().map(|pause| pause.lasts);
        lasts.chain(self.moves.iter().map(|it| it.lasts)).fold(Picos::ZERO, |all, it| all + it)
    }

    /// The life of every job.
    pub const GENERATION: Generation = Generation(3);
}

impl JobPlan {
    /// A job without ops, in one lane.
    #[must_use]
    pub fn new(world: u16, cut: Fragmentation) -> Self {
        Self {
            world,
            lanes: 1,
            pool_slots: 64,
            max_ops: 8,
            cut,
            in_flight: (4 << 20) / usize::from(world.max(1)),
            results_in_flight: 1 << 20,
            ops: Vec::new(),
            missing: None,
        }
    }

    /// The job with one op more, which all ranks call at `start`.
    #[must_use]
    pub fn with(mut self, descriptor: Descriptor, inputs: Inputs, start: Picos) -> Self {
        let starts = vec![start; usize::from(self.world)];
        let timeout = Span::from_secs(60);
        self.ops.push(OpPlan { descriptor, inputs, timeout, starts, odd: None });
        self
    }

    /// The ops that `rank` calls.
    #[must_use]
    pub fn calls(&self, rank: Rank) -> usize {
        match self.missing {
            Some(Missing { rank: missing, absence: Absence::Calls(calls) }) if missing == rank => {
                calls.min(self.ops.len())
            }
            _ => self.ops.len(),
        }
    }

    /// When `rank` dies, if it does.
    #[must_use]
    pub fn dies(&self, rank: Rank) -> Option<Picos> {
        match self.missing {
            Some(Missing { rank: missing, absence: Absence::Dies(at) }) if missing == rank => {
                Some(at)
            }
            _ => None,
        }
    }
}

impl OpPlan {
    /// What `rank` calls the op with.
    #[must_use]
    pub fn descriptor(&self, rank: Rank) -> Descriptor {
        match self.odd {
            Some((odd, descriptor)) if odd == rank => descriptor,
            _ => self.descriptor,
        }
    }

    /// What `rank` contributes.
    #[must_use]
    pub fn tensor(&self, rank: Rank) -> Vec<u8> {
        self.inputs.tensor(&self.descriptor(rank), rank)
    }
}

impl Network {
    /// One shard; workers and the shard at `rate_bps`, `delay` from the switch, with multicast
    /// and queues that never fill.
    #[must_use]
    pub const fn ideal(rate_bps: u64, delay: Picos) -> Self {
        let link = LinkConfig::lossless(rate_bps, delay);
        let port = PortPlan {
            up: link,
            down: link,
            receive_buffer: usize::MAX,
            send_buffer: usize::MAX,
            service: Picos::ZERO,
        };
        Self { shards: 1, own_numbers: false, worker: port, shard: port, multicast: true }
    }
}

impl Pause {
    /// A pause that is drawn: of any host of `plan`, before `until`.
    #[must_use]
    pub fn draw(plan: &Plan, random: &mut Random, until: Picos, longest: Picos) -> Self {
        let hosts: Vec<Host> = plan.hosts().collect();
        Self {
            host: random.pick(&hosts),
            at: Picos(random.below(until.0)),
            lasts: Picos(random.below(longest.0)),
        }
    }
}
