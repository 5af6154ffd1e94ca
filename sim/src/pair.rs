//! In-memory clusters without links. Each datagram may be lost, duplicated or delayed at random.

use racksum_proto::aggregator::{self, Failed};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::error::OpError;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::{Generation, JobId, OpId, Rank};
use racksum_proto::time::{Span, Time};
use racksum_proto::worker;

use crate::node::{Datagram, Endpoint, ShardNode, WorkerNode};
use crate::random::Random;

mod calls;
mod failed_ops;
mod failover;
mod loss;
mod rejoin;
mod tree;

struct Cluster {
    workers: Vec<WorkerNode>,
    shards: Vec<ShardNode>,
    dice: Random,
    /// Datagrams in flight, by arrival time and send order.
    wire: std::collections::BTreeMap<(u64, u64), Datagram>,
    sent: u64,
    steps: u64,
    now: Time,
    faults: Faults,
    /// The maximum size of a datagram that arrives at a shard, and at a worker, in bytes.
    largest: [usize; 2],
    /// The number of datagrams that were lost because they exceeded `largest`.
    too_large: u64,
}

#[derive(Clone, Copy, Default)]
struct Faults {
    drop: u64,
    double: u64,
    delay: u64,
}

/// The parameters of a job.
#[derive(Debug, Clone, Copy)]
struct Grant {
    world: u16,
    shards: u8,
    lanes: u8,
    pool_slots: u32,
    /// The job's first op after a move, or `None` if it has not moved.
    moved_at: Option<OpId>,
}

impl Grant {
    const MAX_OPS: u16 = 16;

    fn cut() -> Fragmentation {
        Fragmentation::new(1424).unwrap()
    }

    fn worker(&self, rank: u16) -> worker::Config {
        worker::Config {
            job: JobId(7),
            generation: Generation(3),
            rank: Rank(rank),
            lanes: self.lanes,
            shards: self.shards,
            pool_slots: self.pool_slots,
            max_ops: Self::MAX_OPS,
            cut: Self::cut(),
            in_flight: 1 << 18,
            first_op: self.moved_at.unwrap_or(OpId(0)),
            may_move: true,
            acks_at_rest: false,
            child: None,
        }
    }

    fn shards(&self, now: Time) -> Vec<ShardNode> {
        let shard = |shard| aggregator::Config {
            job: JobId(7),
            generation: Generation(3),
            world: self.world,
            lanes: self.lanes,
            shard,
            shards: self.shards,
            pool_slots: self.pool_slots,
            max_ops: Self::MAX_OPS,
            cut: Self::cut(),
            results_in_flight: 1 << 20,
            moved_at: self.moved_at,
            weight: None,
            has_parent: false,
        };
        (0..self.shards).map(|i| ShardNode::new(shard(i), false, now)).collect()
    }
}

/// Reports the ops that have failed at a shard to the other shards. Returns whether there were any.
fn pass_failures(shards: &mut [ShardNode]) -> bool {
    let mut any = false;
    for at in 0..shards.len() {
        while let Some(Failed { op, why, .. }) = shards[at].machine.poll_failed() {
            any = true;
            let (before, after) = shards.split_at_mut(at);
            for other in before.iter_mut().chain(&mut after[1..]) {
                other.machine.handle_failed_beside(op, why, &mut ());
            }
        }
    }
    any
}

impl Cluster {
    fn new(world: u16, shards: u8, lanes: u8, seed: u64, faults: Faults) -> Self {
        let grant = Grant { world, shards, lanes, pool_slots: 8, moved_at: None };
        let worker = |rank| WorkerNode::new(grant.worker(rank), world, Time(0));
        Self {
            workers: (0..world).map(worker).collect(),
            shards: grant.shards(Time(0)),
            dice: Random::new(seed),
            wire: std::collections::BTreeMap::new(),
            sent: 0,
            steps: 0,
            now: Time(0),
            faults,
            largest: [usize::MAX; 2],
            too_large: 0,
        }
    }

    fn post(&mut self, datagrams: Vec<Datagram>) {
        for datagram in datagrams {
            let way = usize::from(!matches!(datagram.to, Endpoint::Shard(_)));
            if datagram.bytes.len() > self.largest[way] {
                self.too_large += 1;
                continue;
            }
            let copies = if self.dice.below(100) < self.faults.double { 2 } else { 1 };
            for _ in 0..copies {
                if self.dice.below(100) < self.faults.drop {
                    continue;
                }
                let spike = if self.dice.below(100) < self.faults.delay {
                    self.dice.bits() % 20_000_000
                } else {
                    0
                };
                self.sent += 1;
                let at = self.now.0 + 50_000 + spike;
                self.wire.insert((at, self.sent), datagram.clone());
            }
        }
    }

    /// Stops the last rank without notice. Its datagrams in flight still arrive.
    fn lose(&mut self, rank: Rank) {
        assert_eq!(rank.index() + 1, self.workers.len());
        self.workers.pop();
    }

    /// Moves the job to a new aggregator. All datagrams in flight are lost with the old aggregator.
    fn move_to(&mut self, grant: Grant) {
        self.wire.clear();
        self.shards = grant.shards(self.now);
        for (rank, worker) in (0..).zip(&mut self.workers) {
            worker.resume(grant.worker(rank), self.now, &mut ());
        }
    }

    fn drive(&mut self) {
        let mut out = Vec::new();
        for worker in &mut self.workers {
            worker.drive(self.now, usize::MAX, &mut out, &mut ());
        }
        loop {
            for shard in &mut self.shards {
                shard.drive(self.now, &mut out, &mut ());
            }
            if !pass_failures(&mut self.shards) {
                break;
            }
        }
        self.post(out);
    }

    /// Runs until this many ops have ended at every rank.
    fn run(&mut self, ops: usize) {
        self.run_until(|cluster| cluster.workers.iter().all(|worker| worker.done.len() >= ops));
    }

    /// Runs until `done` returns true. Calls `done` before each step.
    fn run_until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        self.drive();
        while !done(self) {
            let timer = self.workers.iter().map(|w| w.machine.poll_timeout()).min().unwrap();
            let arrival = self.wire.first_key_value().map_or(u64::MAX, |((at, _), _)| *at);
            self.now = Time(timer.0.min(arrival).max(self.now.0));
            self.steps += 1;
            assert!(self.steps < 3_000_000, "livelock: not done after 3,000,000 steps");
            assert!(self.now < Time::NEVER, "deadlock: nothing is due, but the run is not done");
            if arrival <= timer.0 {
                let ((_, _), datagram) = self.wire.pop_first().unwrap();
                match datagram.to {
                    // A lost rank receives nothing.
                    Endpoint::Worker(rank) => {
                        if let Some(worker) = self.workers.get_mut(usize::from(rank)) {
                            worker.handle(self.now, &datagram.bytes, false, &mut ());
                        }
                    }
                    Endpoint::Shard(shard) => self.shards[usize::from(shard)].handle(
                        self.now,
                        &datagram.bytes,
                        false,
                        &mut (),
                    ),
                    Endpoint::Workers => unreachable!("these shards do not multicast"),
                }
            } else {
                for worker in &mut self.workers {
                    worker.handle_timeout(self.now, &mut ());
                }
            }
            self.drive();
        }
    }
}

/// Returns a tensor of small integers in which about `density` percent of the blocks are non-zero.
fn tensor(dice: &mut Random, elements: usize, density: u64) -> Vec<i32> {
    let mut tensor = vec![0; elements];
    for block in tensor.chunks_mut(256) {
        if dice.below(100) < density {
            for element in block {
                *element = i32::try_from(dice.bits() % 2000).unwrap() - 1000;
            }
        }
    }
    tensor
}

fn bytes(tensor: &[i32]) -> Vec<u8> {
    tensor.iter().flat_map(|element| element.to_le_bytes()).collect()
}

const TIMEOUT: Span = Span::from_secs(60);

fn check_sums(seed: u64, world: u16, shards: u8, sizes: &[(usize, u64)], faults: Faults) {
    let mut cluster = Cluster::new(world, shards, 1, seed, faults);
    let mut dice = Random::new(seed ^ 0xabcd);
    let mut expected = Vec::new();
    for (elements, density) in sizes {
        let mut sum = vec![0; *elements];
        for worker in &mut cluster.workers {
            let tensor = tensor(&mut dice, *elements, *density);
            sum.iter_mut().zip(&tensor).for_each(|(sum, element)| *sum += element);
            let descriptor = Descriptor::sum(*elements as u64, DType::I32);
            worker.submit(Time(0), descriptor, bytes(&tensor), TIMEOUT).unwrap();
        }
        expected.push(bytes(&sum));
    }
    cluster.run(sizes.len());
    for (rank, worker) in cluster.workers.iter().enumerate() {
        for (op, result) in &worker.done {
            let expected = &expected[op.0 as usize];
            let result = result.as_ref();
            assert!(result.is_ok(), "seed {seed}, rank {rank}, {op:?}: {:?}", result.err());
            assert!(result == Ok(expected), "seed {seed}, rank {rank}, {op:?}: wrong sum");
        }
    }
}

#[test]
fn sums_are_right_without_faults() {
    let sizes = [(1, 100), (300, 100), (60 * 256 * 20 + 5, 100), (60 * 256 * 40, 3)];
    for (world, shards) in [(1, 1), (2, 1), (3, 2), (5, 3)] {
        check_sums(1, world, shards, &sizes, Faults::default());
    }
}

#[test]
fn all_zero_and_empty_tensors_end() {
    check_sums(1, 3, 2, &[(60 * 256 * 100, 0), (0, 0), (1, 0), (100, 100)], Faults::default());
}

#[test]
fn sums_are_right_under_loss_duplication_and_reordering() {
    for seed in 0..60 {
        let faults = Faults { drop: seed % 31, double: seed % 7 * 5, delay: seed % 5 * 8 };
        let density = [100, 40, 5, 1][usize::try_from(seed % 4).unwrap()];
        let world = 1 + u16::try_from(seed % 5).unwrap();
        let shards = 1 + u8::try_from(seed % 3).unwrap();
        let sizes = [(60 * 256 * 9 + 17, density), (700, 100), (60 * 256 * 30, density)];
        check_sums(seed, world, shards, &sizes, faults);
    }
}

#[test]
fn a_disagreement_fails_the_op_at_every_rank_and_the_job_goes_on() {
    for seed in 0..200 {
        let faults = Faults { drop: seed % 20, double: 5, delay: 5 };
        let mut cluster = Cluster::new(3, 2, 2, seed, faults);
        let good = Descriptor::sum(60 * 256 * 12, DType::I32);
        let bad = match seed % 3 {
            0 => Descriptor::sum(60 * 256 * 3, DType::I32),
            1 => Descriptor { reduction: Reduction::Max, ..good },
            _ => Descriptor { lane: 1, ..good },
        };
        let ones = bytes(&vec![1; 60 * 256 * 12]);
        for (rank, worker) in cluster.workers.iter_mut().enumerate() {
            let len = |d: &Descriptor| usize::try_from(d.elements).unwrap() * 4;
            worker.submit(Time(0), good, ones.clone(), TIMEOUT).unwrap();
            let second = if rank == 1 { bad } else { good };
            worker.submit(Time(0), second, ones[..len(&second)].to_vec(), TIMEOUT).unwrap();
            worker.submit(Time(0), good, ones.clone(), TIMEOUT).unwrap();
        }
        cluster.run(3);
        let threes = bytes(&vec![3; 60 * 256 * 12]);
        for worker in &mut cluster.workers {
            worker.done.sort_by_key(|(op, _)| *op);
            for op in [0, 2] {
                let result = worker.done[op].1.as_ref();
                assert!(result == Ok(&threes), "seed {seed}, op {op}: {:?}", result.err());
            }
            let Err(OpError::Mismatch { op, one, other }) = &worker.done[1].1 else {
                panic!("seed {seed}: {:?}", worker.done[1].1)
            };
            assert_eq!(*op, OpId(1));
            let mut both = [*one, *other];
            both.sort_by_key(|(_, descriptor)| *descriptor == good);
            assert_eq!(both[0], (Rank(1), bad));
            assert_eq!(both[1].1, good);
        }
    }
}

#[test]
fn a_missing_rank_is_named_at_the_timeout() {
    let mut cluster = Cluster::new(3, 1, 1, 1, Faults::default());
    let descriptor = Descriptor::sum(10, DType::I32);
    for rank in [0, 2] {
        let tensor = bytes(&[1; 10]);
        cluster.workers[rank].submit(Time(0), descriptor, tensor, Span::from_millis(300)).unwrap();
    }
    cluster.workers[1].done.push((OpId(0), Ok(Vec::new())));
    cluster.run(1);
    for rank in [0, 2] {
        let Err(OpError::Timeout { missing, .. }) = &cluster.workers[rank].done[0].1 else {
            panic!("{:?}", cluster.workers[rank].done)
        };
        assert_eq!(missing.len(), 1, "{missing:?}");
        assert_eq!(missing[0].0, Rank(1));
        assert!(missing[0].1 > Span::from_millis(100));
    }
}

#[test]
fn fixed32_overflow_fails_at_every_rank_and_the_job_goes_on() {
    let mut cluster = Cluster::new(2, 1, 1, 1, Faults::default());
    let wire = WireType::Fixed32;
    let descriptor = Descriptor { wire, ..Descriptor::sum(600, DType::F32) };
    let floats = |value: f32| -> Vec<u8> {
        (0..600).flat_map(|i| if i == 300 { value } else { 1.0 }.to_le_bytes()).collect()
    };
    for (rank, worker) in cluster.workers.iter_mut().enumerate() {
        let value = if rank == 0 { f32::INFINITY } else { 1.0 };
        worker.submit(Time(0), descriptor, floats(value), TIMEOUT).unwrap();
        worker.submit(Time(0), descriptor, floats(1.0), TIMEOUT).unwrap();
    }
    cluster.run(2);
    for worker in &cluster.workers {
        let error = OpError::Overflow { op: OpId(0), element: 256 };
        assert!(worker.done[0].1.as_ref() == Err(&error));
        let twos: Vec<u8> = (0..600).flat_map(|_| 2f32.to_le_bytes()).collect();
        assert!(worker.done[1].1.as_ref() == Ok(&twos));
    }
}

#[test]
fn what_never_arrives_is_sent_again_more_and_more_rarely() {
    // wire: W-77
    for largest in [[1200, usize::MAX], [usize::MAX, 1200]] {
        let mut cluster = Cluster::new(2, 1, 1, 1, Faults::default());
        cluster.largest = largest;
        let elements = 60 * 256 * 12;
        let descriptor = Descriptor::sum(elements as u64, DType::I32);
        for worker in &mut cluster.workers {
            let timeout = Span::from_secs(15);
            worker.submit(Time(0), descriptor, bytes(&vec![1; elements]), timeout).unwrap();
        }
        cluster.run(1);
        assert!(cluster.workers.iter().all(|worker| worker.done[0].1.is_err()));
        // Each rank has 8 windows of 44 fragments in flight to the shard, and the shard has as many
        // in flight to each rank. Each fragment is sent at most 25 times.
        let sent = cluster.too_large;
        assert!(
            (44..2 * 25 * 8 * 44).contains(&sent),
            "{largest:?}: {sent} datagrams were too large to arrive, not 44 to 17,599"
        );
    }
}
