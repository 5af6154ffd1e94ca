//! Equal inputs give equal result bits for every shard count, fan-out and fault (I2).

use racksum_aggregator::Fanout;
use racksum_proto::auth::DataAuth;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_worker::Faults;

use crate::inputs::{Values, seed, tensor};
use crate::oracle::reduce;
use crate::rig::{Rig, bounded};

const WORLD: u16 = 4;
const ELEMENTS: u64 = 60 * 256 * 5 + 77;

fn input(dtype: DType, rank: u16, seed: u64) -> Vec<u8> {
    tensor(dtype, ELEMENTS, 256, Values::Wide, rank, seed)
}

#[test]
fn twenty_runs_end_with_the_same_bits() {
    bounded(100, || {
        let seed = seed(11);
        let descriptor = Descriptor::sum(ELEMENTS, DType::F32);
        let inputs: Vec<_> = (0..WORLD).map(|rank| input(DType::F32, rank, seed)).collect();
        let expected = reduce(&descriptor, &inputs).tensor;
        let mut backwards = inputs.clone();
        backwards.reverse();
        assert_ne!(reduce(&descriptor, &backwards).tensor, expected, "the order must matter");
        let mut again = 0;
        for run in 0..20 {
            let shards = u8::try_from(run % 4 + 1).unwrap();
            let fanout = if run % 8 < 4 { Fanout::Unicast } else { Fanout::Multicast };
            let faults = match run % 5 {
                0 => Faults::default(),
                _ => Faults { drop: 0.05, duplicate: 0.05, reorder: 0.05, seed: seed + run },
            };
            let rig = Rig::start(|config| {
                config.shards = shards;
                config.fanout = fanout;
                config.data_auth = Some(DataAuth::ALL[usize::try_from(run % 3).unwrap()]);
            });
            let ends = rig.ranks(
                "same",
                WORLD,
                |o| o.faults = faults,
                |client, rank| {
                    let mut tensor = inputs[usize::from(rank)].clone();
                    client.reduce(&mut tensor, descriptor).unwrap();
                    assert_eq!(client.grant().multicast, fanout == Fanout::Multicast);
                    (tensor, client.stats().retransmits)
                },
            );
            for (rank, (tensor, retransmits)) in ends.into_iter().enumerate() {
                assert!(tensor == expected, "run {run}, rank {rank}: wrong bits; seed {seed}");
                again += retransmits;
            }
        }
        assert!(again > 0, "no fault caused a retransmission");
    });
}

#[test]
fn faults_change_no_bit_of_any_kind_of_op() {
    bounded(60, || {
        let seed = seed(12);
        let faults = Faults { drop: 0.05, duplicate: 0.05, reorder: 0.05, seed };
        let rig = Rig::start(|config| config.shards = 2);
        let kinds = [
            (DType::F32, WireType::Bf16, Reduction::Avg),
            (DType::F32, WireType::Int8, Reduction::Sum),
            (DType::F64, WireType::Fixed32, Reduction::Sum),
            (DType::Bf16, WireType::Bf16, Reduction::Sum),
            (DType::I64, WireType::I64, Reduction::Sum),
            (DType::F16, WireType::F16, Reduction::Max),
        ];
        let cases = kinds.map(|(dtype, wire, reduction)| {
            let descriptor = Descriptor { wire, reduction, ..Descriptor::sum(ELEMENTS, dtype) };
            let inputs: Vec<_> = (0..WORLD).map(|rank| input(dtype, rank, seed)).collect();
            let expected = reduce(&descriptor, &inputs).tensor;
            (descriptor, inputs, expected)
        });
        rig.ranks(
            "faults",
            WORLD,
            |o| o.faults = faults,
            |client, rank| {
                for (descriptor, inputs, expected) in &cases {
                    let mut tensor = inputs[usize::from(rank)].clone();
                    client.reduce(&mut tensor, *descriptor).unwrap();
                    assert!(tensor == *expected, "{descriptor}; seed {seed}");
                }
            },
        );
    });
}

#[test]
fn small_ops_survive_a_lossy_path() {
    bounded(60, || {
        let seed = seed(13);
        let faults = Faults { drop: 0.1, duplicate: 0.1, reorder: 0.1, seed };
        let rig = Rig::start(|config| config.shards = 3);
        rig.ranks(
            "small",
            3,
            |o| o.faults = faults,
            |client, rank| {
                for op in 0..100u32 {
                    let mut tensor = (op + u32::from(rank)).to_le_bytes();
                    client.reduce(&mut tensor, Descriptor::sum(1, DType::I32)).unwrap();
                    assert_eq!(u32::from_le_bytes(tensor), 3 * op + 3);
                }
            },
        );
    });
}
