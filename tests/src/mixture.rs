//! Random ops of every kind on a lossy path: tensors and lists, small and large, several in flight
//! over lanes and shards, and some on which the ranks disagree.

use racksum_aggregator::Fanout;
use racksum_proto::auth::DataAuth;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::OpError;
use racksum_worker::{Blocks, Client, ConnectOptions, Error, Faults, Handle};

use crate::inputs::{Random, Values, seed, tensor};
use crate::oracle::{Expected, Place, kinds, reduce, reduce_at};
use crate::rig::{Shape, Tree, bounded};

const WORLD: u16 = 3;

/// An op of the mixture.
struct Op {
    descriptor: Descriptor,
    /// A rank that calls the op with a different descriptor, and that descriptor.
    odd: Option<(u16, Descriptor)>,
    inputs: Vec<Vec<u8>>,
    expected: Expected,
    /// Whether each rank passes a list of blocks.
    lists: [bool; WORLD as usize],
}

impl Op {
    fn draw(random: &mut Random, lanes: u8, root: &Place) -> Self {
        let kinds = kinds();
        let kind = kinds[usize::try_from(random.below(kinds.len() as u64)).unwrap()];
        let block = [32, 64, 128, 256, 512, 1024][usize::try_from(random.below(6)).unwrap()];
        let longest = [2, 300, 20_000, 200_000][usize::try_from(random.below(4)).unwrap()];
        let lane = u8::try_from(random.below(u64::from(lanes))).unwrap();
        let elements = random.below(longest);
        let descriptor = Descriptor { elements, lane, ..kind }.with_block(block).unwrap();
        let odd = (random.below(6) == 0).then(|| {
            let rank = u16::try_from(random.below(WORLD.into())).unwrap();
            let other = match random.below(3) {
                0 => Descriptor { elements: random.below(60_000) + 200_000, ..descriptor },
                1 => Descriptor { lane: (lane + 1) % lanes, tag: 1, ..descriptor },
                _ => Descriptor { tag: 1, ..descriptor },
            };
            (rank, other)
        });
        let seed = random.next();
        let input = |rank| {
            let own = odd.filter(|(odd, _)| *odd == rank).map_or(descriptor, |(_, other)| other);
            tensor(own.dtype, own.elements, block, Values::Wide, rank, seed)
        };
        let inputs: Vec<_> = (0..WORLD).map(input).collect();
        let expected = if odd.is_some() {
            Expected { tensor: vec![], overflows: false, union: vec![] }
        } else {
            reduce_at(&descriptor, &inputs, root)
        };
        let lists = [0; WORLD as usize].map(|_| random.below(3) == 0);
        Self { descriptor, odd, inputs, expected, lists }
    }

    fn of_rank(&self, rank: u16) -> Descriptor {
        self.odd.filter(|(odd, _)| *odd == rank).map_or(self.descriptor, |(_, other)| other)
    }

    fn start(&self, client: &Client, rank: u16) -> Running {
        let descriptor = self.of_rank(rank);
        let input = self.inputs[usize::from(rank)].clone();
        if !self.lists[usize::from(rank)] {
            return client.submit(input, descriptor).map_or_else(Running::Failed, Running::Whole);
        }
        let blocks =
            blocks(&descriptor, &input, &reduce(&descriptor, std::slice::from_ref(&input)).union);
        client.submit(blocks, descriptor).map_or_else(Running::Failed, Running::List)
    }

    fn finish(&self, running: Running, what: &str) {
        let Self { descriptor, expected, .. } = self;
        let result = match running {
            Running::Whole(handle) => handle.wait().map(|got| got.tensor == expected.tensor),
            Running::List(handle) => handle
                .wait()
                .map(|got| got.tensor == blocks(descriptor, &expected.tensor, &expected.union)),
            Running::Failed(error) => Err(error),
        };
        match (result, self.odd) {
            (Ok(right), None) => assert!(right, "{what}: {descriptor}: wrong sums"),
            (Err(Error::Op(OpError::Mismatch { .. })), Some(_)) => {}
            (Err(error), _) => panic!("{what}: {descriptor}: {error}"),
            (Ok(_), Some(_)) => panic!("{what}: {descriptor}: no mismatch"),
        }
    }
}

enum Running {
    Whole(Handle<Vec<u8>>),
    List(Handle<Blocks>),
    /// `submit` failed because the ranks could not agree on exponents.
    Failed(Error),
}

fn blocks(descriptor: &Descriptor, tensor: &[u8], indices: &[u32]) -> Blocks {
    let len = descriptor.block_elements() * descriptor.dtype.size();
    let values = indices.iter().flat_map(|index| {
        let start = *index as usize * len;
        tensor[start..(start + len).min(tensor.len())].iter().copied()
    });
    Blocks { indices: indices.to_vec(), values: values.collect() }
}

fn run(seed: u64, shape: &Shape) {
    let mut random = Random::new(seed);
    let lanes = u8::try_from(random.below(3) + 1).unwrap();
    let shards = u8::try_from(random.below(4) + 1).unwrap();
    let multicast = random.below(2) == 0;
    let share = [0.0, 0.01, 0.05][usize::try_from(random.below(3)).unwrap()];
    let pool_slots = [0, 2, 7][usize::try_from(random.below(3)).unwrap()];
    let auth = DataAuth::ALL[usize::try_from(random.below(3)).unwrap()];
    // A datagram carries a whole window, or few blocks if the MTU is 1500.
    let mtu = [None, Some(1500)][usize::try_from(random.below(2)).unwrap()];
    let faults = Faults { drop: share, duplicate: share, reorder: share, seed };
    let ops: Vec<_> = (0..40).map(|_| Op::draw(&mut random, lanes, &shape.place())).collect();
    let batches: Vec<_> = (0..40).map(|_| random.below(8) + 1).collect();
    let tree = Tree::start(shape, |config| {
        config.shards = shards;
        // Children of an aggregator need unicast copies, which `Auto` allows.
        let fanout = if shape.parents.is_empty() { Fanout::Multicast } else { Fanout::Auto };
        config.fanout = if multicast { fanout } else { Fanout::Unicast };
        config.max_jobs = 1;
        config.data_auth = Some(auth);
    });
    let change = |options: &mut ConnectOptions| {
        options.lanes = lanes;
        options.pool_slots = pool_slots;
        options.faults = faults;
        options.mtu = mtu;
    };
    tree.ranks("mixture", change, |client, rank| {
        let mut left = &ops[..];
        for batch in &batches {
            let (now, later) = left.split_at(left.len().min(usize::try_from(*batch).unwrap()));
            let running: Vec<_> = now.iter().map(|op| op.start(client, rank)).collect();
            for (op, running) in now.iter().zip(running) {
                op.finish(running, &format!("SEED={seed}, rank {rank}"));
            }
            left = later;
        }
    });
    tree.await_peace();
}

#[test]
fn a_mixture_of_ops_ends_as_the_definition_says() {
    bounded(100, || {
        let first = seed(61);
        for seed in first..first + 10 {
            run(seed, &Shape::flat(WORLD));
        }
    });
}

#[test]
fn a_mixture_of_ops_ends_as_the_definition_says_in_trees_of_aggregators() {
    bounded(100, || {
        let shapes = [
            // In this order: two racks; a rack, and a rank at the root; a rack below a rack, with
            // ranks at every aggregator; two racks below the root's only rack.
            Shape::new(&[0, 0], &[1, 2, 1]),
            Shape::new(&[0], &[1, 0, 1]),
            Shape::new(&[0, 1], &[2, 0, 1]),
            Shape::new(&[0, 1, 1], &[3, 2, 3]),
        ];
        let first = seed(62);
        for (seed, shape) in (first..first + 8).zip(shapes.iter().cycle()) {
            run(seed, shape);
        }
    });
}
