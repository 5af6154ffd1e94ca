//! Ranks that call an op with different descriptors: every rank gets the mismatch error, and the
//! job continues.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::error::OpError;
use racksum_proto::ids::Rank;
use racksum_worker::{Blocks, Client, Error, Faults};

use crate::inputs::{floats, seed};
use crate::rig::{Rig, bounded};

/// Returns pairs of a descriptor and a variant, one pair for each possible difference.
fn differences() -> Vec<(Descriptor, Descriptor)> {
    let one = Descriptor::sum(1000, DType::F32);
    let windows = |count: u64| Descriptor::sum(60 * 256 * count, DType::F32);
    vec![
        (one, Descriptor { elements: 1001, ..one }),
        (one, Descriptor { tag: 7, ..one }),
        (one, Descriptor { wire: WireType::Bf16, ..one }),
        (one, Descriptor { reduction: Reduction::Max, ..one }),
        (one, Descriptor { lane: 1, ..one }),
        (one, one.with_block(32).unwrap()),
        (one, Descriptor::sum(1000, DType::I32)),
        (one, Descriptor::sum(500, DType::F64)),
        (one, Descriptor::sum(0, DType::F32)),
        (one, windows(9)),
        (windows(9), windows(10)),
        (windows(9), Descriptor { lane: 1, ..windows(1) }),
        (windows(2), windows(40)),
    ]
}

/// Returns a tensor of the descriptor's length. Each of its bytes is 0 if `zero`, and otherwise 1.
fn tensor(descriptor: &Descriptor, zero: bool) -> Vec<u8> {
    let len = usize::try_from(descriptor.elements).unwrap() * descriptor.dtype.size();
    vec![u8::from(!zero); len]
}

/// Runs an op on which all ranks agree.
fn agree(client: &Client, world: f32) {
    let elements = 60 * 256 * 3 + 5;
    let mut tensor = floats((0..elements).map(|_| 1.0));
    client.reduce(&mut tensor, Descriptor::sum(elements, DType::F32)).unwrap();
    assert!(tensor == floats((0..elements).map(|_| world)));
}

fn check(result: Result<(), Error>, expected: [(Descriptor, Descriptor); 2]) {
    let Err(Error::Op(error)) = result else { panic!("{result:?}") };
    let sentence = error.to_string();
    let OpError::Mismatch { one: (one, mine), other: (other, theirs), .. } = error else {
        panic!("{sentence}")
    };
    assert_ne!(one, other, "{sentence}");
    assert!(expected.contains(&(mine, theirs)), "{sentence}");
    assert!(
        sentence.contains(&format!("rank {} has {}", one.0, mine.beside(&theirs))),
        "{sentence}"
    );
    assert!(
        sentence.contains(&format!("rank {} has {}", other.0, theirs.beside(&mine))),
        "{sentence}"
    );
}

fn disagree(shards: u8, odd: u16, faults: Faults, zero: bool) {
    bounded(60, move || {
        let rig = Rig::start(|config| config.shards = shards);
        let options = |options: &mut racksum_worker::ConnectOptions| {
            options.lanes = 2;
            options.faults = faults;
        };
        rig.ranks("differ", 3, options, |client, rank| {
            for (most, odd_one) in differences() {
                let mine = if rank == odd { odd_one } else { most };
                let result = client.reduce(&mut tensor(&mine, zero), mine);
                check(result.map(|_| ()), [(most, odd_one), (odd_one, most)]);
                agree(client, 3.0);
            }
        });
    });
}

#[test]
fn all_ranks_learn_both_descriptors_and_whose_they_are() {
    disagree(1, 1, Faults::default(), false);
}

#[test]
fn all_ranks_learn_it_over_several_shards() {
    disagree(3, 0, Faults::default(), false);
}

#[test]
fn all_ranks_learn_it_of_tensors_of_zeroes() {
    disagree(2, 2, Faults::default(), true);
}

#[test]
fn all_ranks_learn_it_on_a_lossy_path() {
    let seed = seed(41);
    disagree(2, 1, Faults { drop: 0.05, duplicate: 0.05, reorder: 0.05, seed }, false);
}

#[test]
fn ops_around_a_disagreement_are_not_disturbed() {
    bounded(60, || {
        let rig = Rig::start(|config| config.shards = 2);
        rig.ranks(
            "around",
            3,
            |options| options.lanes = 2,
            |client, rank| {
                for (most, odd_one) in differences() {
                    let submit = |i: u8| {
                        let elements = [400, 60 * 256 * 5][usize::from(i) % 2];
                        let descriptor =
                            Descriptor { lane: i % 2, ..Descriptor::sum(elements, DType::F32) };
                        let tensor = floats((0..elements).map(|_| f32::from(i)));
                        client.submit(tensor, descriptor).unwrap()
                    };
                    let before: Vec<_> = (0..4).map(submit).collect();
                    let mine = if rank == 2 { odd_one } else { most };
                    let between = client.submit(tensor(&mine, false), mine).unwrap();
                    let after: Vec<_> = (4..8).map(submit).collect();
                    let result = between.wait().map(|_| ());
                    check(result, [(most, odd_one), (odd_one, most)]);
                    for (i, handle) in (0u8..).zip(before.into_iter().chain(after)) {
                        let sum = handle.wait().unwrap().tensor;
                        assert!(
                            sum.chunks(4).all(|x| x == (3.0 * f32::from(i)).to_le_bytes()),
                            "op {i}: wrong sum"
                        );
                    }
                }
            },
        );
    });
}

#[test]
fn every_rank_may_mean_something_else() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        rig.ranks(
            "all",
            4,
            |_| {},
            |client, rank| {
                for _ in 0..5 {
                    let mine = Descriptor::sum(100 + u64::from(rank), DType::F32);
                    let result = client.reduce(&mut tensor(&mine, false), mine);
                    let Err(Error::Op(OpError::Mismatch { one, other, .. })) = result else {
                        panic!("{result:?}")
                    };
                    for (Rank(rank), descriptor) in [one, other] {
                        assert_eq!(descriptor, Descriptor::sum(100 + u64::from(rank), DType::F32));
                    }
                    agree(client, 4.0);
                }
            },
        );
    });
}

#[test]
fn lists_of_blocks_disagree_alike() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        rig.ranks(
            "lists",
            2,
            |_| {},
            |client, rank| {
                let tag = u64::from(rank);
                let descriptor = Descriptor { tag, ..Descriptor::sum(1000, DType::F32) };
                let handle = client.submit(Blocks::default(), descriptor).unwrap();
                let error = handle.wait().unwrap_err();
                assert!(matches!(error, Error::Op(OpError::Mismatch { .. })), "{error}");
                agree(client, 2.0);
            },
        );
    });
}
