//! Tests of ops that failed, but of whose failure not all ranks were told before the job moved.

use racksum_proto::wire::{self, Kind};

use super::*;

const WINDOW: usize = 60 * 256;
/// The size of each op, in elements. Rank r contributes 10^r to every element.
const SIZE: usize = WINDOW * 3;
/// The last rank, which disagrees with the others.
const ODD: Rank = Rank(2);

fn sum() -> Descriptor {
    Descriptor::sum(SIZE as u64, DType::I32)
}

/// Starts an op at a rank.
fn submit(cluster: &mut Cluster, rank: usize, descriptor: Descriptor) {
    let share = bytes(&vec![10i32.pow(u32::try_from(rank).unwrap()); SIZE]);
    let now = cluster.now;
    cluster.workers[rank].submit(now, descriptor, share, TIMEOUT).unwrap();
}

/// Removes from the wire what `is_lost` selects. Called before each step of a run.
fn lose(cluster: &mut Cluster, is_lost: impl Fn(Endpoint, &wire::Header) -> bool) {
    cluster.wire.retain(|_, datagram| {
        let mut messages = wire::messages(&datagram.bytes).flatten();
        !messages.any(|(header, _)| is_lost(datagram.to, &header))
    });
}

fn move_on(cluster: &mut Cluster, lanes: u8) {
    let first = cluster.workers.iter().map(|w| w.machine.first_kept()).max();
    cluster.move_to(Grant { world: 3, shards: 1, lanes, pool_slots: 8, moved_at: first });
}

/// Names the odd rank, which is lost, to the shard and to the survivors.
fn name_lost(cluster: &mut Cluster) {
    cluster.shards[0].machine.handle_gone(ODD, &mut ());
    for worker in &mut cluster.workers {
        worker.machine.handle_gone(0..1, ODD, &mut ());
        worker.collect();
    }
}

/// Checks that an op failed, or that its result is the sum of both survivors.
fn check_survivors(cluster: &Cluster, op: OpId) {
    for (rank, worker) in cluster.workers.iter().enumerate() {
        let (_, result) = worker.done.iter().find(|(id, _)| *id == op).unwrap();
        let is_right = result.as_ref().map_or(true, |sums| *sums == bytes(&vec![11; SIZE]));
        assert!(is_right, "rank {rank}: the result is not the sum of both survivors");
    }
}

#[test]
fn an_op_of_whose_failure_no_survivor_was_told_is_summed_after_a_move() {
    let mut cluster = Cluster::new(3, 1, 1, 1, Faults::default());
    for rank in 0..3 {
        let odd = Descriptor { reduction: Reduction::Max, ..sum() };
        submit(&mut cluster, rank, if rank == ODD.index() { odd } else { sum() });
        submit(&mut cluster, rank, sum());
    }
    // The fails are lost, but the credit passes the failed op.
    cluster.run_until(|cluster| {
        lose(cluster, |_, header| header.kind == Kind::Fail);
        cluster.now > Time(0) + Span::from_millis(200)
    });
    assert!(cluster.workers.iter().all(|worker| worker.done.is_empty()));
    cluster.lose(ODD);
    move_on(&mut cluster, 1);
    name_lost(&mut cluster);
    cluster.run(2);
    check_survivors(&cluster, OpId(0));
}

#[test]
fn an_op_that_a_lost_rank_called_in_another_lane_is_summed_after_a_move() {
    let mut cluster = Cluster::new(3, 1, 2, 1, Faults::default());
    let elsewhere = Descriptor { lane: 1, ..sum() };
    for op in 0..2 {
        for rank in 0..3 {
            let is_odd = rank == ODD.index() && op == 0;
            submit(&mut cluster, rank, if is_odd { elsewhere } else { sum() });
        }
        // The odd rank's messages in the other lane are lost.
        let mut steps = 0;
        cluster.run_until(|cluster| {
            lose(cluster, |_, header| header.sender == ODD && header.lane == 1);
            steps += 1;
            steps > 300
        });
    }
    cluster.lose(ODD);
    name_lost(&mut cluster);
    let mut steps = 0;
    cluster.run_until(|_| {
        steps += 1;
        steps > 300
    });
    move_on(&mut cluster, 2);
    name_lost(&mut cluster);
    cluster.run(2);
    check_survivors(&cluster, OpId(0));
}

#[test]
fn a_disagreement_after_a_move_is_shown_to_all_ranks() {
    // wire: W-41
    let mut cluster = Cluster::new(3, 1, 1, 1, Faults::default());
    move_on(&mut cluster, 1);
    for rank in 0..3 {
        let odd = Descriptor { reduction: Reduction::Max, ..sum() };
        submit(&mut cluster, rank, if rank == ODD.index() { odd } else { sum() });
    }
    cluster.run(1);
    for (rank, worker) in cluster.workers.iter().enumerate() {
        let error = worker.done[0].1.as_ref().err();
        assert!(matches!(error, Some(OpError::Mismatch { .. })), "rank {rank}: {error:?}");
    }
}

#[test]
fn an_open_that_is_lost_in_a_lane_that_has_passed_its_op_is_sent_again() {
    // wire: W-22
    let mut cluster = Cluster::new(3, 1, 2, 1, Faults::default());
    // Rank 0 calls the first op in lane 0, and the others in lane 1.
    submit(&mut cluster, 0, sum());
    (1..3).for_each(|rank| submit(&mut cluster, rank, Descriptor { lane: 1, ..sum() }));
    // The others disagree about the second op in lane 0, so that lane passes both ops.
    submit(&mut cluster, 1, sum());
    submit(&mut cluster, 2, Descriptor { reduction: Reduction::Max, ..sum() });
    cluster.run_until(|cluster| {
        lose(cluster, |_, header| header.sender == Rank(0));
        [1, 2].iter().all(|rank| cluster.workers[*rank].done.len() == 1)
    });
    cluster.run_until(|cluster| {
        let mut ended = cluster.workers.iter().map(|worker| worker.done.iter());
        ended.all(|mut done| done.any(|(op, _)| *op == OpId(0)))
    });
    for (rank, worker) in cluster.workers.iter().enumerate() {
        let (_, result) = worker.done.iter().find(|(op, _)| *op == OpId(0)).unwrap();
        let error = result.as_ref().err();
        assert!(matches!(error, Some(OpError::Mismatch { .. })), "rank {rank}: {error:?}");
    }
}

#[test]
fn an_op_that_the_others_failed_ends_at_a_rank_that_starts_it_after_the_move() {
    let mut cluster = Cluster::new(3, 1, 1, 1, Faults::default());
    for rank in 0..3 {
        submit(&mut cluster, rank, sum());
        let odd = Descriptor { reduction: Reduction::Max, ..sum() };
        if rank != 1 {
            submit(&mut cluster, rank, if rank == ODD.index() { odd } else { sum() });
        }
    }
    // Nothing reaches rank 1, so the others keep the first op.
    cluster.run_until(|cluster| {
        lose(cluster, |to, _| to == Endpoint::Worker(1));
        [0, 2].iter().all(|rank| cluster.workers[*rank].done.len() == 2)
    });
    move_on(&mut cluster, 1);
    submit(&mut cluster, 1, sum());
    (0..3).for_each(|rank| submit(&mut cluster, rank, sum()));
    cluster.run(3);
    for (rank, worker) in cluster.workers.iter_mut().enumerate() {
        worker.done.sort_by_key(|(op, _)| *op);
        let error = worker.done[1].1.as_ref().err();
        let is_told = matches!(error, Some(OpError::Mismatch { .. } | OpError::Dropped { .. }));
        assert!(is_told, "rank {rank}: {error:?}");
        assert!(worker.done[2].1.is_ok(), "rank {rank}: {:?}", worker.done[2].1.as_ref().err());
    }
}
