//! Racks and a root. Each rack's aggregator is one rank of the root's job.

use super::*;
use racksum_proto::aggregator::{Aggregation, Failed};
use racksum_proto::geometry::WINDOW_BYTES;

use crate::child::ChildNode;
use crate::inputs::{Inputs, Values};

/// The recipient of a datagram.
#[derive(Debug, Clone, Copy)]
enum End {
    /// A shard of the root.
    Root(u8),
    /// A rack's shard, for a datagram from one of its ranks.
    Below(usize, u8),
    /// A rack's shard, for a datagram from the root.
    Above(usize, u8),
    /// A rank of a rack.
    Worker(usize, u16),
}

/// The root, the racks and the ranks of each rack.
struct Tree {
    root: Vec<ShardNode>,
    racks: Vec<Vec<ChildNode>>,
    workers: Vec<Vec<WorkerNode>>,
    wire: std::collections::BTreeMap<(u64, u64), (End, Datagram)>,
    dice: Random,
    sent: u64,
    steps: u64,
    now: Time,
    /// The percentage of datagrams that get an extra copy, with one bit flipped in its first 96
    /// bytes.
    garbled: u64,
    faults: Faults,
}

impl Tree {
    /// Creates a tree. `racks` holds the number of ranks of each rack.
    fn new(racks: &[u16], shards: u8, lanes: u8, seed: u64, faults: Faults) -> Self {
        let total: u16 = racks.iter().sum();
        let first = |rack: usize| Rank(racks[..rack].iter().sum());
        let pool_slots = [8, 64][usize::try_from(seed % 2).unwrap()];
        let grant = |world| Grant { world, shards, lanes, pool_slots, moved_at: None };
        let top = grant(u16::try_from(racks.len()).unwrap());
        let mut root = top.shards(Time(0));
        for shard in &mut root {
            let config = *shard.machine.config();
            *shard = ShardNode::new(
                aggregator::Config { weight: Some(total), ..config },
                false,
                Time(0),
            );
            name(&mut shard.machine, (0..racks.len()).map(first));
        }
        // With some seeds, a rack has fewer slots than the root, or its ranks may have only two
        // windows in flight.
        let rack_slots = [8, 64, 2, 3][usize::try_from(seed % 4).unwrap()];
        let in_flight = [1 << 18, 2 * WINDOW_BYTES][usize::try_from(seed / 4 % 2).unwrap()];
        let grant = |world| Grant { pool_slots: rack_slots, ..grant(world) };
        let child = |rack: usize, below: ShardNode| {
            let config = aggregator::Config { has_parent: true, ..*below.machine.config() };
            let above = worker::Config {
                child: Some(worker::ChildShard { shard: config.shard, slots: rack_slots }),
                may_move: false,
                ..top.worker(u16::try_from(rack).unwrap())
            };
            let mut below = ShardNode::new(config, false, Time(0));
            name(&mut below.machine, (first(rack).0..).map(Rank));
            ChildNode::new(below, above, Time(0))
        };
        let rack = |(i, world): (usize, &u16)| {
            grant(*world).shards(Time(0)).into_iter().map(|below| child(i, below)).collect()
        };
        let ranks = |world: &u16| {
            let config =
                |rank| worker::Config { may_move: false, in_flight, ..grant(*world).worker(rank) };
            (0..*world).map(|rank| WorkerNode::new(config(rank), total, Time(0))).collect()
        };
        Self {
            root,
            racks: racks.iter().enumerate().map(rack).collect(),
            workers: racks.iter().map(ranks).collect(),
            wire: std::collections::BTreeMap::new(),
            dice: Random::new(seed),
            sent: 0,
            steps: 0,
            now: Time(0),
            garbled: 0,
            faults,
        }
    }

    fn post(&mut self, datagrams: Vec<(End, Datagram)>) {
        for (end, datagram) in datagrams {
            if self.dice.below(100) < self.garbled {
                let mut bytes = datagram.bytes.to_vec();
                let at = usize::try_from(self.dice.below(bytes.len().min(96) as u64)).unwrap();
                bytes[at] ^= 1 << self.dice.below(8);
                self.sent += 1;
                let garbled = Datagram { to: datagram.to, bytes: bytes.into() };
                self.wire.insert((self.now.0 + 50_000, self.sent), (end, garbled));
            }
            let copies = if self.dice.below(100) < self.faults.double { 2 } else { 1 };
            for _ in 0..copies {
                if self.dice.below(100) < self.faults.drop {
                    continue;
                }
                let late = self.dice.below(100) < self.faults.delay;
                let spike = if late { self.dice.bits() % 20_000_000 } else { 0 };
                self.sent += 1;
                self.wire.insert((self.now.0 + 50_000 + spike, self.sent), (end, datagram.clone()));
            }
        }
    }

    fn drive(&mut self) {
        while self.drive_once() {}
    }

    /// Drives every machine once. Returns whether any shard passed a failure to other shards.
    fn drive_once(&mut self) -> bool {
        let (mut out, mut passed) = (Vec::new(), false);
        let (mut down, mut up) = (Vec::new(), Vec::new());
        for (rack, ranks) in self.workers.iter_mut().enumerate() {
            for worker in ranks {
                worker.drive(self.now, usize::MAX, &mut up, &mut ());
            }
            out.extend(up.drain(..).map(|datagram| (End::Below(rack, shard(&datagram)), datagram)));
        }
        for (rack, shards) in self.racks.iter_mut().enumerate() {
            for child in shards {
                child.drive(self.now, &mut down, &mut up, &mut ());
            }
            out.extend(
                down.drain(..).map(|datagram| (End::Worker(rack, rank(&datagram)), datagram)),
            );
            out.extend(up.drain(..).map(|datagram| (End::Root(shard(&datagram)), datagram)));
        }
        for shards in &mut self.racks {
            let failed: Vec<_> =
                shards.iter_mut().flat_map(|child| child.failed.drain(..)).collect();
            for Failed { op, why, .. } in failed {
                passed = true;
                for child in &mut *shards {
                    child.shard.machine.handle_failed_beside(op, why, &mut ());
                }
            }
        }
        passed |= pass_failures(&mut self.root);
        for (number, root) in (0..).zip(&mut self.root) {
            root.drive(self.now, &mut down, &mut ());
            let to = |datagram: &Datagram| End::Above(usize::from(rank(datagram)), number);
            out.extend(down.drain(..).map(|datagram| (to(&datagram), datagram)));
        }
        self.post(out);
        passed
    }

    fn run_until(&mut self, mut done: impl FnMut(&Self) -> bool) {
        self.drive();
        while !done(self) {
            let ranks = self.workers.iter().flatten().map(|w| w.machine.poll_timeout());
            let children = self.racks.iter().flatten().map(|child| child.worker.poll_timeout());
            let timer = ranks.chain(children).min().unwrap();
            let arrival = self.wire.first_key_value().map_or(u64::MAX, |((at, _), _)| *at);
            self.now = Time(timer.0.min(arrival).max(self.now.0));
            self.steps += 1;
            assert!(
                self.steps < 1_000_000,
                "livelock: not done after 1,000,000 steps, at {:?}",
                self.now
            );
            assert!(self.now < Time::NEVER, "deadlock: nothing is due, but the run is not done");
            if arrival <= timer.0 {
                let (_, (end, datagram)) = self.wire.pop_first().unwrap();
                let (now, bytes) = (self.now, &datagram.bytes);
                match end {
                    End::Root(shard) => {
                        self.root[usize::from(shard)].handle(now, bytes, false, &mut ());
                    }
                    End::Below(rack, shard) => {
                        let child = &mut self.racks[rack][usize::from(shard)];
                        child.shard.handle(now, bytes, false, &mut ());
                    }
                    End::Above(rack, shard) => {
                        let child = &mut self.racks[rack][usize::from(shard)];
                        child.handle_from_parent(now, bytes, &mut ());
                    }
                    End::Worker(rack, rank) => {
                        let worker = &mut self.workers[rack][usize::from(rank)];
                        worker.handle(now, bytes, false, &mut ());
                    }
                }
            } else {
                let now = self.now;
                for worker in self.workers.iter_mut().flatten() {
                    worker.handle_timeout(now, &mut ());
                }
                for child in self.racks.iter_mut().flatten() {
                    child.handle_timeout(now, &mut ());
                }
            }
            self.drive();
        }
    }
}

fn shard(datagram: &Datagram) -> u8 {
    match datagram.to {
        Endpoint::Shard(shard) => shard,
        other => unreachable!("{other:?} is not a shard"),
    }
}

fn rank(datagram: &Datagram) -> u16 {
    match datagram.to {
        Endpoint::Worker(rank) => rank,
        other => unreachable!("{other:?} is not a rank: no shard here multicasts"),
    }
}

/// Returns ops whose results do not depend on the order of summation.
fn descriptors() -> Vec<Descriptor> {
    let sum = |elements, dtype| Descriptor::sum(elements, dtype);
    vec![
        sum(60 * 256 * 20 + 9, DType::I32),
        sum(3, DType::I64),
        Descriptor { reduction: Reduction::Max, lane: 1, ..sum(60 * 256 * 6, DType::F32) },
        sum(0, DType::F32),
        Descriptor { reduction: Reduction::Min, ..sum(60 * 512 * 3, DType::F16) },
        sum(700, DType::I64),
        sum(60 * 256 * 40, DType::I32),
        Descriptor { lane: 1, ..sum(60 * 256 * 2, DType::I32) },
    ]
}

fn inputs(seed: u64, op: usize) -> Inputs {
    Inputs {
        seed: seed * 100 + op as u64,
        density_ppm: [1_000_000, 300_000, 10_000][(usize::try_from(seed).unwrap() + op) % 3],
        aligned: op.is_multiple_of(2),
        values: Values::Wide,
    }
}

/// Returns the results of a job in which all `world` ranks use a single aggregator.
fn flat(seed: u64, world: u16) -> Vec<Vec<u8>> {
    let mut cluster = Cluster::new(world, 1, 2, seed, Faults::default());
    let descriptors = descriptors();
    for (op, descriptor) in descriptors.iter().enumerate() {
        for (rank, worker) in (0..).zip(&mut cluster.workers) {
            let tensor = inputs(seed, op).tensor(descriptor, Rank(rank));
            worker.submit(Time(0), *descriptor, tensor, TIMEOUT).unwrap();
        }
    }
    cluster.run(descriptors.len());
    let mut done = std::mem::take(&mut cluster.workers[0].done);
    done.sort_by_key(|(op, _)| *op);
    done.into_iter().map(|(_, result)| result.unwrap()).collect()
}

fn name(machine: &mut Aggregation, names: impl Iterator<Item = Rank>) {
    let ranks = (0..machine.config().world).map(Rank);
    ranks.zip(names).for_each(|(rank, name)| machine.set_name(rank, name));
}

#[test]
fn racks_and_a_root_come_to_what_one_aggregator_does() {
    // wire: W-64
    for seed in 0..40 {
        let faults = Faults { drop: seed % 4 * 6, double: seed % 5 * 3, delay: seed % 3 * 6 };
        let racks = [&[2, 2][..], &[1, 3], &[3, 1, 2], &[2]][usize::try_from(seed % 4).unwrap()];
        let shards = 1 + u8::try_from(seed % 3).unwrap();
        let mut tree = Tree::new(racks, shards, 2, seed, faults);
        let descriptors = descriptors();
        for (op, descriptor) in descriptors.iter().enumerate() {
            for (rank, worker) in (0..).zip(tree.workers.iter_mut().flatten()) {
                let tensor = inputs(seed, op).tensor(descriptor, Rank(rank));
                worker.submit(Time(0), *descriptor, tensor, TIMEOUT).unwrap();
            }
        }
        tree.run_until(|tree| {
            tree.workers.iter().flatten().all(|worker| worker.done.len() >= descriptors.len())
        });
        let expected = flat(seed, racks.iter().sum());
        for (rank, worker) in tree.workers.iter_mut().flatten().enumerate() {
            worker.done.sort_by_key(|(op, _)| *op);
            for ((op, result), expected) in worker.done.iter().zip(&expected) {
                assert!(
                    result.as_ref() == Ok(expected),
                    "seed {seed}, rank {rank}, {op:?}: {:?}",
                    result.as_ref().err()
                );
            }
        }
    }
}

#[test]
fn floats_of_racks_have_the_same_bits_whatever_is_lost_on_the_way() {
    let sum = |elements| Descriptor::sum(elements, DType::F32);
    let descriptors = [
        sum(60 * 256 * 9 + 5),
        Descriptor { reduction: Reduction::Avg, ..sum(60 * 256 * 7) },
        Descriptor { wire: WireType::Bf16, lane: 1, ..sum(60 * 512 * 5) },
        Descriptor { wire: WireType::Int8, reduction: Reduction::Avg, ..sum(60 * 256 * 4) },
        Descriptor { wire: WireType::Fixed32, ..sum(60 * 256 * 3) },
    ];
    let results = |seed: u64, faults: Faults, dice: u64| -> Vec<Vec<Vec<u8>>> {
        let mut tree = Tree::new(&[2, 3], 2, 2, dice, faults);
        for (op, descriptor) in descriptors.iter().enumerate() {
            for (rank, worker) in (0..).zip(tree.workers.iter_mut().flatten()) {
                let tensor = inputs(seed, op).tensor(descriptor, Rank(rank));
                worker.submit(Time(0), *descriptor, tensor, TIMEOUT).unwrap();
            }
        }
        let done = |worker: &WorkerNode| worker.done.len() >= descriptors.len();
        tree.run_until(|tree| tree.workers.iter().flatten().all(done));
        let of = |worker: &mut WorkerNode| {
            worker.done.sort_by_key(|(op, _)| *op);
            worker.done.iter().map(|(_, result)| result.clone().unwrap()).collect()
        };
        tree.workers.iter_mut().flatten().map(of).collect()
    };
    for seed in 0..12 {
        let undisturbed = results(seed, Faults::default(), 1);
        assert!(undisturbed.iter().all(|results| *results == undisturbed[0]), "seed {seed}");
        let faults = Faults { drop: 3 + seed, double: seed % 5, delay: seed % 7 * 3 };
        assert!(results(seed, faults, seed) == undisturbed, "seed {seed}: different bits");
        // An average is over all ranks, not over racks.
        let average = |elements: &[u8]| f32::from_le_bytes(*elements.first_chunk().unwrap());
        let descriptor = &descriptors[1];
        let exact: f64 = (0..5)
            .map(|rank| inputs(seed, 1).tensor(descriptor, Rank(rank)))
            .map(|tensor| f64::from(average(&tensor)))
            .sum::<f64>()
            / 5.0;
        let got = f64::from(average(&undisturbed[0][1]));
        assert!(
            (got - exact).abs() <= 1e-5 * exact.abs().max(1e-3),
            "the average is {got}, not {exact}"
        );
    }
}

#[test]
fn ranks_that_disagree_within_a_rack_or_between_racks_are_told_who_and_the_job_goes_on() {
    // wire: W-65
    for seed in 0..120 {
        let faults = Faults { drop: seed % 4 * 6, double: seed % 5 * 3, delay: seed % 3 * 6 };
        let shards = 1 + u8::try_from(seed % 3).unwrap();
        let mut tree = Tree::new(&[2, 3], shards, 2, seed, faults);
        let good = Descriptor::sum(60 * 256 * 6, DType::I32);
        let bad = match seed / 5 % 3 {
            0 => Descriptor { reduction: Reduction::Max, ..good },
            1 => Descriptor::sum(60 * 256 * 2, DType::I32),
            _ => Descriptor { lane: 1, ..good },
        };
        // The disagreeing ranks are one rank of the first rack, one of the second, or both ranks of
        // the first.
        let strays = [&[1][..], &[3], &[0, 1]][usize::try_from(seed % 3).unwrap()];
        let ones = bytes(&vec![1; 60 * 256 * 6]);
        for (rank, worker) in tree.workers.iter_mut().flatten().enumerate() {
            let second = if strays.contains(&rank) { bad } else { good };
            for descriptor in [good, second, good] {
                let tensor = ones[..usize::try_from(descriptor.elements).unwrap() * 4].to_vec();
                worker.submit(Time(0), descriptor, tensor, TIMEOUT).unwrap();
            }
        }
        tree.run_until(|tree| tree.workers.iter().flatten().all(|w| w.done.len() >= 3));
        let fives = bytes(&vec![5; 60 * 256 * 6]);
        for (rank, worker) in tree.workers.iter_mut().flatten().enumerate() {
            worker.done.sort_by_key(|(op, _)| *op);
            for op in [0, 2] {
                let result = worker.done[op].1.as_ref();
                let right = result == Ok(&fives);
                assert!(right, "seed {seed}, rank {rank}, op {op}: {:?}", result.err());
            }
            let Err(OpError::Mismatch { one, other, .. }) = &worker.done[1].1 else {
                panic!("seed {seed}, rank {rank}: {:?}", worker.done[1].1.as_ref().err())
            };
            // A mismatch names each rank by its number in the whole tree, or by the number of the
            // first rank in its rack.
            let strange = |(rank, descriptor): &(Rank, Descriptor)| {
                (*descriptor == bad) == strays.contains(&rank.index())
            };
            assert!(strange(one) && strange(other), "seed {seed}: {one:?} and {other:?}");
            assert!((one.1 == bad) != (other.1 == bad), "seed {seed}");
        }
    }
}

#[test]
fn a_rank_that_is_missing_in_another_rack_is_missed_by_name() {
    // Rank 2 is the first of the second rack, so its number also names that rack. Rank 3 is the
    // rack's other rank.
    for absent in [2, 3] {
        let mut tree = Tree::new(&[2, 2], 1, 1, 1, Faults::default());
        let descriptor = Descriptor::sum(10, DType::I32);
        for (rank, worker) in tree.workers.iter_mut().flatten().enumerate() {
            if rank == absent {
                worker.done.push((OpId(0), Ok(Vec::new())));
            } else {
                let ones = bytes(&[1; 10]);
                worker.submit(Time(0), descriptor, ones, Span::from_millis(700)).unwrap();
            }
        }
        tree.run_until(|tree| tree.workers.iter().flatten().all(|worker| !worker.done.is_empty()));
        for rank in (0..4).filter(|rank| *rank != absent) {
            let done = &tree.workers[rank / 2][rank % 2].done;
            let Err(OpError::Timeout { missing, .. }) = &done[0].1 else { panic!("{done:?}") };
            let missing: Vec<_> = missing.iter().map(|(rank, _)| usize::from(rank.0)).collect();
            assert_eq!(missing, [absent], "rank {rank}");
        }
    }
}

#[test]
fn what_is_changed_on_the_way_makes_no_half_panic_or_go_on_for_ever() {
    for seed in 0..60 {
        let faults = Faults { drop: seed % 4 * 6, double: seed % 5 * 3, delay: seed % 3 * 6 };
        let racks = [&[2, 2][..], &[1, 3], &[3, 1, 2], &[2]][usize::try_from(seed % 4).unwrap()];
        let mut tree = Tree::new(racks, 1 + u8::try_from(seed % 3).unwrap(), 2, seed, faults);
        tree.garbled = 1 + seed % 20;
        let descriptors = descriptors();
        for (op, descriptor) in descriptors.iter().enumerate() {
            for (rank, worker) in (0..).zip(tree.workers.iter_mut().flatten()) {
                let tensor = inputs(seed, op).tensor(descriptor, Rank(rank));
                let timeout = Span::from_millis(400);
                worker.submit(Time(0), *descriptor, tensor, timeout).unwrap();
            }
        }
        // Without authentication, a changed datagram may spoil any sum and end any op.
        let done = |worker: &WorkerNode| worker.done.len() >= descriptors.len();
        tree.run_until(|tree| tree.workers.iter().flatten().all(done));
    }
}

#[test]
fn ranks_that_send_little_ahead_wait_for_no_probe() {
    // wire: W-64. With these seeds, racks have 2 to 64 slots, and each rank may have two windows in
    // flight.
    for seed in [5, 4, 6, 7] {
        let mut tree = Tree::new(&[8, 1], 1, 1, seed, Faults::default());
        let windows = 100;
        let descriptor = Descriptor::sum(60 * 256 * windows, DType::I32);
        let ones = bytes(&vec![1; usize::try_from(descriptor.elements).unwrap()]);
        for worker in tree.workers.iter_mut().flatten() {
            worker.submit(Time(0), descriptor, ones.clone(), TIMEOUT).unwrap();
        }
        tree.run_until(|tree| tree.workers.iter().flatten().all(|worker| !worker.done.is_empty()));
        // A window takes four hops of 50 µs each.
        println!("seed {seed}: {} us", tree.now.0 / 1000);
        let most = Time(windows * 4 * 50_000 + 10_000_000);
        assert!(tree.now < most, "seed {seed}: done at {:?}, not before {most:?}", tree.now);
    }
}
