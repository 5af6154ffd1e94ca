//! Every reduction of every dtype over every wire type that carries it, bit for bit.

use racksum_aggregator::Fanout;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::error::OpError;
use racksum_worker::{Client, Error, Stats};

use crate::inputs::{Values, floats, seed, tensor};
use crate::oracle::{self, Expected, kinds, reduce};
use crate::rig::{Rig, bounded};

/// An op, its inputs' seed, and its expected result.
struct Case {
    descriptor: Descriptor,
    values: Values,
    seed: u64,
    expected: Expected,
}

impl Case {
    fn new(descriptor: Descriptor, values: Values, seed: u64, world: u16) -> Self {
        let mut case = Self {
            descriptor,
            values,
            seed,
            expected: Expected { tensor: vec![], overflows: false, union: vec![] },
        };
        let inputs: Vec<_> = (0..world).map(|rank| case.input(rank)).collect();
        case.expected = reduce(&descriptor, &inputs);
        if descriptor.dtype.is_float() && values != Values::Special {
            let error = oracle::error(&descriptor, &inputs, &case.expected.tensor);
            assert!(error <= 1.0, "{descriptor}: the error is {error} times the limit");
        }
        case
    }

    fn input(&self, rank: u16) -> Vec<u8> {
        let Descriptor { dtype, elements, .. } = self.descriptor;
        tensor(dtype, elements, self.descriptor.block_elements(), self.values, rank, self.seed)
    }

    /// Runs the op at one rank and checks the result.
    fn check(&self, client: &Client, rank: u16) {
        let Self { descriptor, values, seed, expected } = self;
        let mut tensor = self.input(rank);
        let result = client.reduce(&mut tensor, *descriptor);
        match &result {
            Ok(_) => assert!(!expected.overflows, "{descriptor}: the overflow is not reported"),
            Err(Error::Op(OpError::Overflow { .. })) => {
                assert!(expected.overflows, "{descriptor}: {result:?}");
            }
            Err(error) => panic!("{descriptor}: {error}"),
        }
        if tensor == expected.tensor {
            return;
        }
        let size = descriptor.dtype.size();
        let pairs = tensor.chunks(size).zip(expected.tensor.chunks(size));
        let wrong: Vec<_> = pairs.enumerate().filter(|(_, (got, due))| got != due).collect();
        let (at, (got, due)) = wrong[0];
        panic!(
            "{descriptor}, {values:?}, seed {seed}: rank {rank} has {} wrong elements, the first \
             at {at}: {got:02x?}, not {due:02x?}",
            wrong.len()
        );
    }
}

/// Returns lengths whose last block or window has only one element, or lacks one.
fn lengths(block: u64) -> [u64; 5] {
    [1, block - 1, block + 1, 64 * block + 1, 60 * 256 + 1]
}

/// Returns all cases for a job of `world` ranks, with `lengths_each` lengths for each kind of op.
/// Block sizes and lengths rotate over the kinds, so that every combination of the two occurs.
fn cases(world: u16, lengths_each: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let seed = seed(u64::from(world));
    for (i, kind) in kinds().into_iter().enumerate() {
        for j in 0..lengths_each {
            let block = [256, 32, 1024, 256][(i + j) % 4];
            let descriptor = kind.with_block(block).unwrap();
            // Shorten the longest case, which has 64 blocks of 1024 elements, to save time.
            let length = lengths(block as u64)[(i + 2 * j) % 5].min(20_000);
            let descriptor = Descriptor { elements: length, ..descriptor };
            let number = cases.len() as u64;
            for values in [Values::Ordinary, Values::Wide, Values::Special] {
                cases.push(Case::new(descriptor, values, seed.wrapping_add(number << 8), world));
            }
        }
    }
    cases
}

fn check_world(world: u16, shards: u8, lengths_each: usize) {
    bounded(100, move || {
        let rig = Rig::start(|config| config.shards = shards);
        let cases = cases(world, lengths_each);
        rig.ranks(
            "all",
            world,
            |_| {},
            |client, rank| {
                cases.iter().for_each(|case| case.check(client, rank));
            },
        );
    });
}

#[test]
fn a_world_of_1_gets_the_bits_of_the_definition() {
    check_world(1, 1, 5);
}

#[test]
fn a_world_of_2_gets_the_bits_of_the_definition() {
    check_world(2, 2, 5);
}

#[test]
fn a_world_of_3_gets_the_bits_of_the_definition() {
    check_world(3, 1, 5);
}

#[test]
fn a_world_of_16_gets_the_bits_of_the_definition() {
    check_world(16, 1, 2);
}

#[test]
fn a_world_of_64_gets_the_bits_of_the_definition() {
    bounded(100, || {
        let rig = Rig::start(|config| {
            config.fanout = Fanout::Auto;
            config.shards = 2;
            config.max_jobs = 1;
        });
        let cases: Vec<_> = kinds()
            .into_iter()
            .enumerate()
            .filter(|(i, _)| i % 5 == 0)
            .map(|(i, kind)| {
                let elements = [1, 255, 257, 64 * 256 + 1][i % 4];
                Case::new(Descriptor { elements, ..kind }, Values::Special, i as u64, 64)
            })
            .collect();
        rig.ranks(
            "wide",
            64,
            |_| {},
            |client, rank| {
                cases.iter().for_each(|case| case.check(client, rank));
            },
        );
    });
}

#[test]
fn blocks_of_minus_zero_end_as_plus_zero_at_every_rank() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        for reduction in Reduction::ALL {
            let sums = rig.ranks(
                "minus",
                3,
                |_| {},
                |client, rank| {
                    // The ranks have different zeroes, which exposes a rank that keeps its own.
                    let own = [-0.0, 0.0, -0.0][usize::from(rank)];
                    let mut tensor = floats((0..1000).map(|i| if i == 300 { 1.0 } else { own }));
                    let sum = Descriptor::sum(1000, DType::F32);
                    client.reduce(&mut tensor, Descriptor { reduction, ..sum }).unwrap();
                    tensor
                },
            );
            for sum in sums {
                let of_union = match reduction {
                    Reduction::Sum => 3.0,
                    _ => 1.0,
                };
                let expected = (0..1000).map(|i| match i {
                    300 => of_union,
                    // Rank 1's zeroes are positive, and so are the sum, average and maximum.
                    256..512 if reduction == Reduction::Min => -0.0,
                    _ => 0.0,
                });
                assert_eq!(sum, floats(expected), "{reduction:?}");
            }
        }
    });
}

#[test]
fn what_nobody_holds_is_zero_and_costs_next_to_nothing() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let stats = rig.ranks(
            "zero",
            3,
            |_| {},
            |client, _| {
                let mut tensor = vec![0; 40_000_000];
                client.reduce(&mut tensor, Descriptor::sum(10_000_000, DType::F32)).unwrap();
                assert!(tensor.iter().all(|byte| *byte == 0));
                client.stats()
            },
        );
        for stats in stats {
            // The op has 652 windows without non-zero blocks.
            assert!(stats.tx_bytes < 4000 && stats.rx_bytes < 4000, "{stats:?}");
        }
    });
}

#[test]
fn a_large_tensor_may_be_zero_for_long_stretches() {
    bounded(60, || {
        let rig = Rig::start(|config| config.shards = 2);
        // Each window has 2,048 elements, so there are nearly 10,000 windows.
        let descriptor = Descriptor { block_log2: 5, ..Descriptor::sum(20_000_000, DType::F32) };
        for filled in [vec![], vec![19_999_999], vec![0, 7_000_000, 7_000_001, 18_000_000]] {
            rig.ranks(
                "stretches",
                2,
                |_| {},
                |client, rank| {
                    let mut tensor = vec![[0; 4]; 20_000_000];
                    let value = 1.0 + f32::from(rank);
                    filled.iter().for_each(|at| tensor[*at] = value.to_le_bytes());
                    client.reduce(tensor.as_flattened_mut(), descriptor).unwrap();
                    let sums: Vec<_> =
                        (0..tensor.len()).filter(|at| tensor[*at] != [0; 4]).collect();
                    assert_eq!(sums, filled);
                    assert!(filled.iter().all(|at| tensor[*at] == 3f32.to_le_bytes()));
                },
            );
        }
    });
}

#[test]
fn a_tensor_without_elements_is_reduced() {
    bounded(30, || {
        let rig = Rig::start(|config| config.shards = 3);
        rig.ranks(
            "empty",
            2,
            |_| {},
            |client, _| {
                for dtype in DType::ALL {
                    let descriptor = Descriptor::sum(0, dtype);
                    client.reduce(&mut [], descriptor).unwrap();
                    let handle = client.submit(Vec::<u8>::new(), descriptor).unwrap();
                    assert_eq!(handle.wait().unwrap().tensor, [0u8; 0]);
                }
            },
        );
    });
}

#[test]
fn a_rank_sends_its_own_bytes_and_receives_the_unions_and_little_else() {
    // I3 allows a surplus of 6 % and one datagram.
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let (world, elements) = (3, 60 * 256 * 20 + 5);
        let descriptor = Descriptor::sum(elements, DType::F32);
        let input = |rank| tensor(DType::F32, elements, 256, Values::Wide, rank, 7);
        let inputs: Vec<_> = (0..world).map(input).collect();
        let len_of = |blocks: usize| blocks as f64 * 1024.0 * 1.06 + 1500.0;
        let union = reduce(&descriptor, &inputs).union.len();
        let undisturbed = rig.ranks(
            "bytes",
            world,
            |_| {},
            |client, rank| {
                let input = &inputs[usize::from(rank)];
                let own = reduce(&descriptor, std::slice::from_ref(input)).union.len();
                let mut undisturbed = 0;
                for _ in 0..20 {
                    let before = client.stats();
                    client.reduce(&mut input.clone(), descriptor).unwrap();
                    let after = client.stats();
                    let tx = (after.tx_bytes - before.tx_bytes) as f64;
                    let rx = (after.rx_bytes - before.rx_bytes) as f64;
                    // Recovery costs bytes, and on a busy machine ranks send nacks even without
                    // loss.
                    let recovery = |stats: &Stats| stats.retransmits + stats.asks;
                    if recovery(&after) == recovery(&before) {
                        assert!(tx <= len_of(own), "{tx} bytes for {own} blocks");
                        assert!(rx <= len_of(union), "{rx} bytes for {union} blocks");
                        undisturbed += 1;
                    }
                }
                undisturbed
            },
        );
        assert!(undisturbed.iter().sum::<u32>() > 0, "every op of every rank needed recovery");
    });
}

#[test]
fn a_narrow_wire_sends_fewer_bytes() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let elements = 256 * 600;
        let sent = rig.ranks(
            "narrow",
            2,
            |_| {},
            |client, _| {
                let sent = |wire| {
                    let before = client.stats().tx_bytes;
                    let mut tensor = floats((0..600 * 256).map(|i| i as f32));
                    let descriptor = Descriptor { wire, ..Descriptor::sum(elements, DType::F32) };
                    client.reduce(&mut tensor, descriptor).unwrap();
                    (client.stats().tx_bytes - before) as f64
                };
                [WireType::F32, WireType::Bf16, WireType::Int8].map(sent)
            },
        );
        for [whole, half, quarter] in sent {
            assert!(
                half < 0.52 * whole && quarter < 0.28 * whole,
                "sent {whole} bytes as f32, {half} as bf16 and {quarter} as int8"
            );
        }
    });
}
