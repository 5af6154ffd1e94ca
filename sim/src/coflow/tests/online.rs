use super::{BYTE_PER_NANO, MIXED, NANO, draw, seeds};
use crate::coflow::admission::admit;
use crate::coflow::fluid;
use crate::coflow::online::{self, Epochs, EpochsError};
use crate::coflow::order::Order;
use crate::coflow::rates::Rates;
use crate::coflow::workload::{Coflow, Fabric, Flow, Workload};
use crate::engine::Picos;
use crate::random::Random;

fn epochs(unit_ns: u64) -> Epochs {
    Epochs::new(Picos(unit_ns * NANO), Epochs::PER_CYCLE).unwrap()
}

fn one_port(coflows: impl IntoIterator<Item = (u64, u64)>) -> Workload {
    let coflows = coflows.into_iter().zip(0..).map(|((release_ns, bytes), id)| {
        let flows = vec![Flow { source: 0, destination: 0, bytes }];
        Coflow::new(id, Picos(release_ns * NANO), flows)
    });
    Workload::new(Fabric::uniform(1, BYTE_PER_NANO).unwrap(), coflows.collect()).unwrap()
}

#[test]
fn a_lone_coflow_takes_its_oracle_time_whenever_it_comes() {
    for release_ns in [0, 1, 511, 512, 513, 123_456_789_012] {
        let workload = one_port([(release_ns, 40)]);
        let outcome = online::run(&workload, epochs(2)).unwrap();
        assert_eq!(outcome.completed, [Picos((release_ns + 40) * NANO)]);
    }
}

#[test]
fn one_port_is_never_idle_while_it_has_work() {
    for seed in seeds(200) {
        let mut random = Random::new(seed).child("arrivals");
        let coflows = (0..40).map(|_| (random.below(900), random.within(1..=60)));
        let workload = one_port(coflows.collect::<Vec<_>>());
        let online = online::run(&workload, epochs(3)).unwrap();
        // On one port, every work-conserving schedule ends at the same time.
        let offline = fluid::run(&workload, &Order::Scf.of(&workload), Rates::Greedy).unwrap();
        assert_eq!(online.makespan(), offline.makespan(), "seed {seed}");
    }
}

#[test]
fn every_coflow_completes_and_none_before_it_could_alone() {
    for seed in seeds(200) {
        let workload = draw(MIXED, seed);
        let outcome = online::run(&workload, epochs(100)).unwrap();
        let coflows = workload.coflows().iter().zip(workload.oracle_ps());
        for (&at, (coflow, alone)) in outcome.completed.iter().zip(coflows) {
            let took = u128::from(at.since(coflow.release).0);
            assert!(at >= coflow.release && took >= alone, "seed {seed}: {coflow:?} at {at:?}");
        }
        assert_eq!(online::run(&workload, epochs(100)).unwrap(), outcome, "seed {seed}");
    }
}

#[test]
fn a_large_coflow_is_not_starved_by_small_ones() {
    // A small coflow arrives as soon as the port has sent the last one.
    let small = (0..6_000).map(|at| (at, 1));
    let workload = one_port([(0, 100)].into_iter().chain(small));
    let offline = fluid::run(&workload, &Order::Scf.of(&workload), Rates::Greedy).unwrap();
    assert_eq!(offline.completed[0], Picos(6_100 * NANO));
    let online = online::run(&workload, epochs(1)).unwrap();
    println!("the large coflow completes at {} ns", online.completed[0].0 / NANO);
    assert!(online.completed[0] < Picos(1_000 * NANO), "{:?}", online.completed[0]);
}

/// Runs coflows of one port, given by release, size and weight, in epochs of 8 ns
/// each. Returns their completion times in nanoseconds.
fn completed_ns(coflows: &[(u64, u64, u64)]) -> Vec<u64> {
    let flow = |bytes| Flow { source: 0, destination: 0, bytes };
    let coflows = coflows.iter().zip(0..).map(|(&(release_ns, bytes, weight), id)| Coflow {
        weight,
        ..Coflow::new(id, Picos(release_ns * NANO), vec![flow(bytes)])
    });
    let fabric = Fabric::uniform(1, BYTE_PER_NANO).unwrap();
    let workload = Workload::new(fabric, coflows.collect()).unwrap();
    let epochs = Epochs::new(Picos(4 * NANO), 2).unwrap();
    let outcome = online::run(&workload, epochs).unwrap();
    outcome.completed.iter().map(|at| at.0 / NANO).collect()
}

#[test]
fn admitted_coflows_are_ordered_by_bssi() {
    // The epoch has room for 4 bytes.
    assert_eq!(completed_ns(&[(0, 2, 1), (0, 2, 5)]), [4, 2]);
}

#[test]
fn a_coflow_that_is_not_admitted_follows_those_that_are() {
    // Both are smaller than the epoch, but the weight of one fills the room.
    assert_eq!(completed_ns(&[(0, 4, 1), (0, 4, 5)]), [8, 4]);
    // A large coflow would have no half in the room, so a newcomer overtakes it.
    assert_eq!(completed_ns(&[(0, 9, 1), (1, 1, 1)]), [10, 2]);
    // A coflow with half of it in the room is not overtaken.
    assert_eq!(completed_ns(&[(0, 8, 1), (1, 1, 1)]), [8, 9]);
}

#[test]
fn only_coflows_from_the_first_half_of_the_time_are_candidates() {
    // The second epoch begins after 8 ns, and the first coflow fills the time until then.
    assert_eq!(completed_ns(&[(0, 8, 1), (4, 4, 1), (5, 1, 1)]), [8, 12, 13]);
    assert_eq!(completed_ns(&[(0, 8, 1), (4, 4, 1), (4, 1, 1)]), [8, 13, 9]);
}

#[test]
fn other_coflows_follow_by_size_over_time_waited_for() {
    // After 7 ns, 12 bytes over 6 + 8 ns are less than 9 bytes over 0 + 8 ns, but not than 6.
    assert_eq!(completed_ns(&[(1, 12, 1), (7, 9, 1)]), [13, 22]);
    assert_eq!(completed_ns(&[(1, 12, 1), (7, 6, 1)]), [14, 19]);
}

#[test]
fn admitted_coflows_load_no_port_with_more_than_twice_its_room() {
    for seed in seeds(300) {
        let mut random = Random::new(seed).child("demands");
        let demands: Vec<Vec<u64>> =
            (0..30).map(|_| (0..6).map(|_| random.below(50)).collect()).collect();
        let room: Vec<u64> = (0..6).map(|_| random.within(0..=300)).collect();
        let order: Vec<usize> = (0..30).collect();
        let admitted = admit(&order, &demands, room.clone());
        for (port, &room) in room.iter().enumerate() {
            let load: u64 = admitted.iter().map(|&it| demands[it][port]).sum();
            assert!(load <= 2 * room, "seed {seed}: port {port} has {load}, more than 2 x {room}");
        }
        // Whatever fits whole from the first on is admitted.
        let fits = |count: usize| {
            (0..6).all(|port| demands[..count].iter().map(|it| it[port]).sum::<u64>() <= room[port])
        };
        let prefix = (0..=30).rev().find(|&count| fits(count)).unwrap();
        assert!(admitted.starts_with(&order[..prefix]), "seed {seed}");
    }
}

#[test]
fn epochs_that_do_not_fit_the_clock_are_refused() {
    assert_eq!(Epochs::new(Picos::ZERO, 8), Err(EpochsError::NoUnit));
    let count = |unit, per_cycle| Epochs::new(Picos(unit), per_cycle);
    assert_eq!(count(1, 0), Err(EpochsError::Count { per_cycle: 0, most: 62 }));
    assert_eq!(count(1, 63), Err(EpochsError::Count { per_cycle: 63, most: 62 }));
    assert!(count(1, 62).is_ok());
    assert_eq!(count(u64::MAX, 1), Err(EpochsError::Count { per_cycle: 1, most: 0 }));
}
