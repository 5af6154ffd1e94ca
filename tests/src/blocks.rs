//! Ops on lists of blocks: they give the same sums as ops on whole tensors, and return the union's
//! blocks.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_worker::{Blocks, Client, Error, Faults};

use crate::inputs::{Random, Values, floats, seed, tensor};
use crate::oracle::{Expected, reduce};
use crate::rig::{Rig, bounded};

/// Returns the tensor's blocks at `indices`, in that order.
fn list(descriptor: &Descriptor, tensor: &[u8], indices: &[u32]) -> Blocks {
    let len = descriptor.block_elements() * descriptor.dtype.size();
    let block = |index: &u32| tensor.chunks(len).nth(*index as usize).unwrap();
    Blocks { indices: indices.to_vec(), values: indices.iter().flat_map(block).copied().collect() }
}

/// Returns the indices of the blocks that are not zero.
fn held(descriptor: &Descriptor, tensor: &[u8]) -> Vec<u32> {
    reduce(descriptor, &[tensor.to_vec()]).union
}

fn run(client: &Client, descriptor: Descriptor, blocks: Blocks) -> Result<Blocks, Error> {
    Ok(client.submit(blocks, descriptor)?.wait()?.tensor)
}

/// Returns the expected result as a list of blocks.
fn expected(descriptor: &Descriptor, of: &Expected) -> Blocks {
    list(descriptor, &of.tensor, &of.union)
}

#[test]
fn lists_are_reduced_as_the_tensors_they_stand_for() {
    bounded(60, || {
        let seed = seed(21);
        let kinds = [
            (DType::F32, WireType::F32, Reduction::Sum, 256),
            (DType::F32, WireType::Bf16, Reduction::Sum, 32),
            (DType::F64, WireType::F64, Reduction::Avg, 256),
            (DType::Bf16, WireType::Bf16, Reduction::Max, 1024),
            (DType::I32, WireType::I32, Reduction::Min, 64),
            (DType::F32, WireType::Int8, Reduction::Sum, 256),
            (DType::F32, WireType::Fixed32, Reduction::Sum, 128),
        ];
        let mut cases = Vec::new();
        for (number, (dtype, wire, reduction, block)) in kinds.into_iter().enumerate() {
            // The last block is whole, one element long, or one element short.
            for tail in [0, 1, block as u64 - 1] {
                let elements = 150 * block as u64 + tail;
                let descriptor = Descriptor { wire, reduction, ..Descriptor::sum(elements, dtype) };
                let descriptor = descriptor.with_block(block).unwrap();
                let seed = seed + number as u64;
                let input = |rank| tensor(dtype, elements, block, Values::Wide, rank, seed);
                let inputs: Vec<_> = (0..3).map(input).collect();
                let sums = reduce(&descriptor, &inputs);
                cases.push((descriptor, inputs, sums));
            }
        }
        for shards in [1, 3] {
            let rig = Rig::start(|config| config.shards = shards);
            rig.ranks(
                "lists",
                3,
                |_| {},
                |client, rank| {
                    let mut random = Random::new(seed ^ u64::from(rank));
                    for (descriptor, inputs, sums) in &cases {
                        let tensor = &inputs[usize::from(rank)];
                        let mut indices = held(descriptor, tensor);
                        if random.below(2) == 0 {
                            // Any order of blocks is valid.
                            indices.sort_by_cached_key(|_| random.next());
                        }
                        let blocks = list(descriptor, tensor, &indices);
                        let got = run(client, *descriptor, blocks).unwrap();
                        assert_eq!(got, expected(descriptor, sums), "{descriptor}");
                        // Remains of these sums must not appear in the result of the next op.
                        client.recycle(got);
                        // A whole tensor must give the same result as the list.
                        let mut dense = tensor.clone();
                        client.reduce(&mut dense, *descriptor).unwrap();
                        assert_eq!(dense, sums.tensor, "{descriptor}");
                    }
                },
            );
        }
    });
}

#[test]
fn ranks_may_list_and_give_whole_tensors_in_one_op() {
    bounded(30, || {
        let descriptor = Descriptor::sum(60 * 256 * 3 + 9, DType::F32);
        let input = |rank| tensor(DType::F32, descriptor.elements, 256, Values::Wide, rank, 5);
        let inputs: Vec<_> = (0..3).map(input).collect();
        let sums = reduce(&descriptor, &inputs);
        let rig = Rig::start(|_| {});
        rig.ranks(
            "mixed",
            3,
            |_| {},
            |client, rank| {
                let mut tensor = inputs[usize::from(rank)].clone();
                if rank == 1 {
                    let blocks = list(&descriptor, &tensor, &held(&descriptor, &tensor));
                    let got = run(client, descriptor, blocks).unwrap();
                    assert_eq!(got, expected(&descriptor, &sums));
                } else {
                    client.reduce(&mut tensor, descriptor).unwrap();
                    assert_eq!(tensor, sums.tensor);
                }
            },
        );
    });
}

#[test]
fn an_empty_list_at_some_or_all_ranks_is_reduced() {
    bounded(30, || {
        let descriptor = Descriptor::sum(256 * 100 + 3, DType::F32);
        let whole = floats((0..256 * 100 + 3).map(|i| (i % 9) as f32 + 1.0));
        let rig = Rig::start(|config| config.shards = 2);
        rig.ranks(
            "empty",
            3,
            |_| {},
            |client, rank| {
                // Only rank 1 has blocks, including the short last one.
                let indices: &[u32] = if rank == 1 { &[100, 7, 61] } else { &[] };
                let got = run(client, descriptor, list(&descriptor, &whole, indices)).unwrap();
                assert_eq!(got, list(&descriptor, &whole, &[7, 61, 100]));
                let got = run(client, descriptor, Blocks::default()).unwrap();
                assert_eq!(got, Blocks::default());
                let empty = Descriptor::sum(0, DType::F32);
                assert_eq!(run(client, empty, Blocks::default()).unwrap(), Blocks::default());
            },
        );
    });
}

#[test]
fn duplicates_are_combined_in_the_order_they_are_listed() {
    bounded(30, || {
        let descriptor = Descriptor::sum(64 * 3, DType::F32).with_block(64).unwrap();
        let parts = [1e8f32, 1.0, -1e8, 0.5];
        let rig = Rig::start(|_| {});
        for reduction in Reduction::ALL {
            let descriptor = Descriptor { reduction, ..descriptor };
            let all = rig.ranks(
                "twice",
                2,
                |_| {},
                |client, rank| {
                    let mut blocks = Blocks::default();
                    for part in parts {
                        blocks.indices.extend([2, 0]);
                        blocks.values.extend(floats([part; 64]));
                        blocks.values.extend(floats([1.0; 64]));
                    }
                    if rank == 1 {
                        blocks = Blocks::default();
                    }
                    run(client, descriptor, blocks).unwrap()
                },
            );
            let (two, zero) = match reduction {
                Reduction::Sum => (((1e8 + 1.0) - 1e8) + 0.5, 4.0),
                Reduction::Avg => ((((1e8 + 1.0) - 1e8) + 0.5) / 2.0, 2.0),
                // The rank without these blocks contributes zeroes.
                Reduction::Min => (-1e8, 0.0),
                Reduction::Max => (1e8, 1.0),
            };
            for got in all {
                assert_eq!(got.indices, [0, 2], "{reduction:?}");
                assert_eq!(got.values, [floats([zero; 64]), floats([two; 64])].concat());
            }
        }
    });
}

#[test]
fn a_list_of_all_blocks_at_all_ranks_under_faults() {
    bounded(60, || {
        let seed = seed(22);
        let faults = Faults { drop: 0.05, duplicate: 0.05, reorder: 0.05, seed };
        let descriptor = Descriptor::sum(256 * 500 + 100, DType::F32);
        let input =
            |rank: u16| floats((0..256 * 500 + 100).map(|i| (i % 97) as f32 + f32::from(rank)));
        let inputs: Vec<_> = (0..4).map(input).collect();
        let sums = reduce(&descriptor, &inputs);
        let rig = Rig::start(|config| config.shards = 2);
        rig.ranks(
            "all",
            4,
            |o| o.faults = faults,
            |client, rank| {
                for _ in 0..3 {
                    let indices: Vec<u32> = (0..501).rev().collect();
                    let blocks = list(&descriptor, &inputs[usize::from(rank)], &indices);
                    let got = run(client, descriptor, blocks).unwrap();
                    assert_eq!(got.indices, (0..501).collect::<Vec<_>>());
                    assert!(got.values == sums.tensor, "seed {seed}");
                }
            },
        );
    });
}

#[test]
fn a_listed_block_of_zeros_is_like_one_that_is_not_listed() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let descriptor = Descriptor::sum(3 * 256, DType::F32);
        let block = |value: f32| value.to_le_bytes().repeat(256);
        rig.ranks(
            "zeros",
            2,
            |_| {},
            |client, rank| {
                let values = [block(0.0), block(f32::from(rank)), block(-0.0)].concat();
                let sums = run(client, descriptor, Blocks { indices: vec![0, 1, 2], values });
                assert_eq!(sums, Ok(Blocks { indices: vec![1], values: block(1.0) }));
                let stats = client.stats();
                // On a busy machine, ranks also send nacks and retransmissions.
                let again = stats.retransmits + stats.asks;
                let most = 1024 * u64::from(rank) + 500 + 1100 * again;
                assert!(stats.tx_bytes < most, "rank {rank}: {stats:?}");
            },
        );
    });
}

#[test]
fn a_list_that_cannot_be_is_refused_and_the_session_goes_on() {
    bounded(30, || {
        let descriptor = Descriptor::sum(300, DType::F32);
        let rig = Rig::start(|_| {});
        rig.ranks(
            "bad",
            2,
            |_| {},
            |client, _| {
                for (indices, values, why) in [
                    (vec![2], 1024, "block 2 is beyond the tensor's 2 blocks of 256 elements"),
                    (
                        vec![0, 1],
                        2048,
                        "the values have 2048 bytes, but the listed blocks need 1200 (2 listed, \
                         256 elements in a full block)",
                    ),
                    (
                        vec![0],
                        0,
                        "the values have 0 bytes, but the listed blocks need 1024 (1 listed, \
                         256 elements in a full block)",
                    ),
                    (
                        vec![1; 65_536],
                        65_536 * 44 * 4,
                        "block 1 is listed 65536 times; the limit is 65535",
                    ),
                ] {
                    let blocks = Blocks { indices, values: vec![1; values] };
                    let error = client.submit(blocks, descriptor).unwrap_err();
                    assert_eq!(error.to_string(), why);
                }
                let bad = Descriptor { block_log2: 20, ..descriptor };
                let listed = client.submit(Blocks::default(), bad).unwrap_err();
                assert_eq!(listed, client.submit(vec![0u8; 1200], bad).unwrap_err());
                let error = client.submit(vec![0u8; 1199], descriptor).unwrap_err();
                let why = "the tensor has 1199 bytes, but 300 elements of f32 have 1200";
                assert_eq!(error.to_string(), why);
                let mut one = 1i32.to_le_bytes();
                client.reduce(&mut one, Descriptor::sum(1, DType::I32)).unwrap();
                assert_eq!(one, 2i32.to_le_bytes());
            },
        );
    });
}
