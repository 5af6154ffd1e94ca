//! Plans: complete descriptions of runs. Running the same plan again repeats the run exactly.

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

/// The description of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The seed of faults and strangers; inputs have their own seeds.
    pub seed: u64,
    /// The jobs, which share the shards' hosts.
    pub jobs: Vec<JobPlan>,
    /// The hosts and their links.
    pub network: Network,
    /// The faults on the links.
    pub faults: Vec<Rule>,
    /// The times at which hosts pause.
    pub pauses: Vec<Pause>,
    /// The times at which all shards die or ranks begin to leave them, in ascending order. The jobs
    /// move to new shards on the same hosts.
    pub moves: Vec<Move>,
    /// Whether the ranks know no standby before the first move. They are then prepared, and the
    /// shards die once all ranks are ready.
    pub prepares: bool,
    /// How often the preparation of the first move is cancelled before it succeeds.
    pub cancels: u64,
    /// How many datagrams strangers send.
    pub noise: u32,
}

/// A star network: every host is connected to one switch.
#[derive(Debug, Clone, Copy)]
pub struct Network {
    /// The number of shards, each on its own host.
    pub shards: u8,
    /// Whether each shard is a separate aggregator with its own job ids.
    pub own_numbers: bool,
    /// The connection of a worker to the switch.
    pub worker: PortPlan,
    /// The connection of a shard to the switch.
    pub shard: PortPlan,
    /// Whether the switch copies a shard's datagram to all ranks. If not, the shard sends a copy to
    /// each rank.
    pub multicast: bool,
    /// Bytes that a job with a share of 1 may spend at a shard in one turn.
    pub quantum: usize,
    /// Time that a shard needs for 1 KiB of work in its turns. Receiving is not part of this work.
    pub work: Picos,
}

/// A host's network card and socket.
#[derive(Debug, Clone, Copy)]
pub struct PortPlan {
    /// The link to the switch.
    pub up: LinkConfig,
    /// The link from the switch.
    pub down: LinkConfig,
    /// Capacity of the socket in bytes, for datagrams that the host has not read yet.
    pub receive_buffer: usize,
    /// Bytes that may wait for the uplink. A rank that has filled the buffer sends again once half
    /// of it is free, as with a real socket. Shards ignore this limit, because they send no more
    /// than the ranks can buffer.
    pub send_buffer: usize,
    /// Time for which each received datagram occupies the host.
    pub service: Picos,
}

/// A job and its ops.
#[derive(Debug, Clone)]
pub struct JobPlan {
    /// The number of ranks.
    pub world: u16,
    /// The number of lanes.
    pub lanes: u8,
    /// The job's share of each shard, between 0 and 1.
    pub share: f64,
    /// The number of slots of each stream.
    pub pool_slots: u32,
    /// The maximum number of ops in flight.
    pub max_ops: u16,
    /// The rule that cuts windows into datagrams.
    pub cut: Fragmentation,
    /// The maximum number of bytes that a rank may have in flight to each shard.
    pub in_flight: usize,
    /// The maximum number of bytes of results that a shard may have in flight.
    pub results_in_flight: usize,
    /// The ops, in call order.
    pub ops: Vec<OpPlan>,
    /// A rank that stops taking part before the end of the run.
    pub missing: Option<Missing>,
}

/// An op of a job.
#[derive(Debug, Clone)]
pub struct OpPlan {
    /// The descriptor of the op.
    pub descriptor: Descriptor,
    /// The tensors that the ranks contribute.
    pub inputs: Inputs,
    /// The timeout of the op at each rank.
    pub timeout: Span,
    /// The earliest time at which each rank calls the op. The job's limit on ops in flight may
    /// delay the call.
    pub starts: Vec<Picos>,
    /// A rank that calls the op with a different descriptor.
    pub odd: Option<(Rank, Descriptor)>,
}

/// A rank that is missing from some ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// The missing rank.
    pub rank: Rank,
    /// The kind of absence.
    pub absence: Absence,
}

/// A kind of absence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// The rank calls only this many ops, but continues to handle datagrams.
    Calls(usize),
    /// The rank dies at this time.
    Dies(Picos),
}

/// A death of all shards, after which the jobs move to new ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The time at which the shards die, or the ranks begin to leave them.
    pub at: Picos,
    /// Time from the death until the jobs continue at new shards.
    pub lasts: Picos,
    /// Time in which the ranks leave the shards one by one before these die, and join the new ones
    /// one by one, as in a move that an operator asks for. If it is zero, no rank leaves before the
    /// shards die, and all join at once.
    pub spread: Picos,
}

impl Move {
    /// Returns the time from the first rank's leaving until the last one has joined.
    #[must_use]
    pub fn length(self) -> Picos {
        self.spread + self.lasts + self.spread
    }
}

/// A pause, during which a host handles nothing. Datagrams that do not fit in its socket are lost.
#[derive(Debug, Clone, Copy)]
pub struct Pause {
    /// The host that pauses.
    pub host: Host,
    /// The time at which the pause begins.
    pub at: Picos,
    /// How long the pause lasts.
    pub lasts: Picos,
}

/// One life of the shards, between two deaths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// The number of earlier lives.
    pub number: u8,
    /// The first op of the job in this life.
    pub first_op: OpId,
}

impl Life {
    /// The life in which a run begins.
    pub const FIRST: Self = Self { number: 0, first_op: OpId(0) };
}

impl Plan {
    /// Creates a plan that runs `jobs` on a network without faults.
    #[must_use]
    pub const fn new(seed: u64, network: Network, jobs: Vec<JobPlan>) -> Self {
        Self {
            seed,
            jobs,
            network,
            faults: Vec::new(),
            pauses: Vec::new(),
            moves: Vec::new(),
            prepares: false,
            cancels: 0,
            noise: 0,
        }
    }

    /// Returns all hosts, workers before shards.
    pub fn hosts(&self) -> impl Iterator<Item = Host> + '_ {
        let workers = self.jobs.iter().enumerate().flat_map(|(job, plan)| {
            (0..plan.world).map(move |rank| Host::Worker { job, rank: Rank(rank) })
        });
        workers.chain((0..self.network.shards).map(Host::Shard))
    }

    /// Returns the index of a host in [`Self::hosts`].
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

    /// Returns the wire id of job `job` at a shard, in a given life of the shards.
    #[must_use]
    pub fn job_id(&self, job: usize, shard: u8, life: Life) -> JobId {
        let own = if self.network.own_numbers { u32::from(shard) * 1_000 } else { 0 };
        let own = own + u32::from(life.number) * 1_000_000;
        JobId(u32::try_from(job).unwrap_or(u32::MAX).saturating_add(1 + own))
    }

    /// Returns the worker configuration of a rank.
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
            may_move: !self.moves.is_empty() && (!self.prepares || life.number > 0),
            acks_at_rest: false,
            child: None,
        }
    }

    /// Returns the aggregator configuration of a job at a shard.
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

    /// Returns the total length of all pauses and moves, an upper bound on how long a host stands
    /// still.
    #[must_use]
    pub fn paused(&self) -> Picos {
        let lasts = self.pauses.iter().map(|pause| pause.lasts);
        lasts.chain(self.moves.iter().map(|it| it.length())).fold(Picos::ZERO, |all, it| all + it)
    }

    /// The generation of every job.
    pub const GENERATION: Generation = Generation(3);
}

impl JobPlan {
    /// Creates a job with one lane and no ops.
    #[must_use]
    pub fn new(world: u16, cut: Fragmentation) -> Self {
        Self {
            world,
            lanes: 1,
            share: 1.0,
            pool_slots: 64,
            max_ops: 8,
            cut,
            in_flight: (4 << 20) / usize::from(world.max(1)),
            results_in_flight: 1 << 20,
            ops: Vec::new(),
            missing: None,
        }
    }

    /// Adds an op that all ranks call at `start`.
    #[must_use]
    pub fn with(mut self, descriptor: Descriptor, inputs: Inputs, start: Picos) -> Self {
        let starts = vec![start; usize::from(self.world)];
        let timeout = Span::from_secs(60);
        self.ops.push(OpPlan { descriptor, inputs, timeout, starts, odd: None });
        self
    }

    /// Returns how many ops `rank` calls.
    #[must_use]
    pub fn calls(&self, rank: Rank) -> usize {
        match self.missing {
            Some(Missing { rank: missing, absence: Absence::Calls(calls) }) if missing == rank => {
                calls.min(self.ops.len())
            }
            _ => self.ops.len(),
        }
    }

    /// Returns the time at which `rank` dies, if it does.
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
    /// Returns the descriptor with which `rank` calls the op.
    #[must_use]
    pub fn descriptor(&self, rank: Rank) -> Descriptor {
        match self.odd {
            Some((odd, descriptor)) if odd == rank => descriptor,
            _ => self.descriptor,
        }
    }

    /// Returns the tensor that `rank` contributes.
    #[must_use]
    pub fn tensor(&self, rank: Rank) -> Vec<u8> {
        self.inputs.tensor(&self.descriptor(rank), rank)
    }
}

impl Network {
    /// Creates a network with one shard, multicast and queues that never fill. Every host has links
    /// of `rate_bps` and `delay` to the switch.
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
        Self {
            shards: 1,
            own_numbers: false,
            worker: port,
            shard: port,
            multicast: true,
            quantum: 1 << 24,
            work: Picos::ZERO,
        }
    }
}

impl Pause {
    /// Draws a pause of a random host of `plan`. The pause begins before `until` and is shorter
    /// than `longest`.
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
