//! Tests of a job that loses a rank and continues without it.

use super::*;

/// The number of ranks. The last rank is lost.
const WORLD: u16 = 3;
const LOST: Rank = Rank(WORLD - 1);
const WINDOW: usize = 60 * 256;

/// The sizes of the ops, in elements. Rank r contributes 10^r to every element, so a sum shows
/// which ranks took part.
const SIZES: [usize; 3] = [WINDOW * 12, 700, WINDOW * 5];

fn submit(cluster: &mut Cluster, elements: usize, ranks: u16) {
    let now = cluster.now;
    for (rank, worker) in (0..ranks).zip(&mut cluster.workers) {
        let tensor = bytes(&vec![10i32.pow(u32::from(rank)); elements]);
        let descriptor = Descriptor::sum(elements as u64, DType::I32);
        worker.submit(now, descriptor, tensor, TIMEOUT).unwrap();
    }
}

/// Checks that the survivors' results are the same, and that a result lists the lost rank as absent
/// if and only if some window lacks its contribution. Returns how many windows include that rank,
/// and how many lack it.
fn check(cluster: &Cluster, seed: u64, ops: usize) -> [usize; 2] {
    let mut windows = [0, 0];
    for op in 0..ops {
        let of = |rank: usize| {
            let worker = &cluster.workers[rank];
            let id = OpId(u32::try_from(op).unwrap());
            let (_, result) = worker.done.iter().find(|(op, _)| *op == id).unwrap();
            (result.as_ref().unwrap(), &worker.absent[&id])
        };
        let (result, absent) = of(0);
        for rank in 1..usize::from(WORLD - 1) {
            let (others, others_absent) = of(rank);
            assert!(result == others, "seed {seed}, op {op}: rank {rank} has different sums");
            assert_eq!(absent, others_absent, "seed {seed}, op {op}");
        }
        let sums: Vec<_> =
            result.chunks(4).map(|x| i32::from_le_bytes(x.try_into().unwrap())).collect();
        let (mut with, mut without) = (0, 0);
        for window in sums.chunks(WINDOW) {
            match window[0] {
                111 => with += 1,
                11 => without += 1,
                other => panic!("seed {seed}, op {op}: the sum is {other}, not 111 or 11"),
            }
            assert!(
                window.iter().all(|sum| *sum == window[0]),
                "seed {seed}, op {op}: the elements of a window have different sums"
            );
        }
        let lacks = if without > 0 { vec![LOST] } else { vec![] };
        assert_eq!(
            *absent, lacks,
            "seed {seed}, op {op}: {with} windows include the lost rank, {without} lack it"
        );
        windows[0] += with;
        windows[1] += without;
    }
    windows
}

#[test]
fn a_job_goes_on_without_a_rank_that_is_lost_at_any_time() {
    let (mut mixed, mut seen) = (0, [0, 0]);
    for seed in 0..300 {
        let faults = Faults { drop: seed % 4 * 7, double: seed % 5 * 3, delay: seed % 3 * 8 };
        let shards = 1 + u8::try_from(seed % 2).unwrap();
        let mut cluster = Cluster::new(WORLD, shards, 1, seed, faults);
        SIZES.iter().for_each(|elements| submit(&mut cluster, *elements, WORLD));
        // The last rank stops after a random number of steps. Each survivor learns of the loss
        // later.
        let mut left = 1 + Random::new(seed).below(3500);
        cluster.run_until(|_| {
            left -= 1;
            left == 0
        });
        cluster.lose(LOST);
        let done = |worker: &WorkerNode, ops| worker.done.len() >= ops;
        for shard in &mut cluster.shards {
            shard.machine.handle_gone(LOST, &mut ());
        }
        let mut names = [seed % 7, seed % 11].map(|late| late * 200);
        let all = SIZES.len() + 1;
        submit(&mut cluster, WINDOW * 2, WORLD - 1);
        cluster.run_until(|cluster| {
            for (late, worker) in names.iter_mut().zip(&mut cluster.workers) {
                match late {
                    0 => {
                        worker.machine.handle_gone(0..shards, LOST, &mut ());
                        worker.collect();
                    }
                    late => *late -= 1,
                }
            }
            let survivors = usize::from(WORLD - 1);
            cluster.workers[..survivors].iter().all(|worker| done(worker, all))
        });
        let windows = check(&cluster, seed, all);
        mixed += usize::from(windows.iter().all(|count| *count > 2));
        seen = [seen[0] + windows[0], seen[1] + windows[1]];
    }
    assert!(
        mixed > 100,
        "only {mixed} losses happened while ops were folded; windows with and without the lost \
         rank: {seen:?}"
    );
}

/// Runs an op whose results lack the lost rank. All results arrive at every survivor, but no
/// survivor learns whose contributions they lack.
fn lose_unnamed(seed: u64) -> Cluster {
    let faults = Faults { drop: seed % 4 * 7, double: seed % 5 * 3, delay: seed % 3 * 8 };
    let mut cluster = Cluster::new(WORLD, 2, 1, seed, faults);
    submit(&mut cluster, WINDOW * 12, WORLD);
    cluster.lose(LOST);
    for shard in &mut cluster.shards {
        shard.machine.handle_gone(LOST, &mut ());
    }
    cluster.run_until(|cluster| {
        let due = cluster.workers.iter().map(|worker| worker.machine.poll_timeout()).min();
        cluster.wire.is_empty() && due > Some(cluster.now + Span::from_secs(1))
    });
    assert!(cluster.workers.iter().all(|worker| worker.done.is_empty()), "seed {seed}");
    cluster
}

/// Moves the job. Returns the op with which it continues.
fn move_on(cluster: &mut Cluster) -> Option<OpId> {
    let first = cluster.workers.iter().map(|w| w.machine.first_kept()).max();
    let grant = Grant { world: WORLD, shards: 2, lanes: 1, pool_slots: 8, moved_at: first };
    cluster.move_to(grant);
    first
}

/// Names the lost rank to all shards and survivors.
fn name_lost(cluster: &mut Cluster) {
    for shard in &mut cluster.shards {
        shard.machine.handle_gone(LOST, &mut ());
    }
    for worker in &mut cluster.workers {
        worker.machine.handle_gone(0..2, LOST, &mut ());
        worker.collect();
    }
}

#[test]
fn a_rank_that_an_aggregator_lost_and_never_named_is_named_after_the_move() {
    for seed in 0..60 {
        let mut cluster = lose_unnamed(seed);
        move_on(&mut cluster);
        assert!(
            cluster.workers.iter().all(|worker| worker.done.is_empty()),
            "seed {seed}: an op ended before the lost rank was named"
        );
        name_lost(&mut cluster);
        cluster.run(1);
        let windows = check(&cluster, seed, 1);
        assert_eq!(windows, [0, 12], "seed {seed}");
    }
}

#[test]
fn an_op_ends_at_all_ranks_although_the_lost_rank_was_named_to_one_before_the_move() {
    let mut dropped = 0;
    for seed in 0..60 {
        let mut cluster = lose_unnamed(seed);
        let told = &mut cluster.workers[0];
        told.machine.handle_gone(0..2, LOST, &mut ());
        told.collect();
        assert_eq!(told.done.len(), 1, "seed {seed}");
        // A rank that has ended the op drops it once it knows that all ranks have its results.
        dropped += usize::from(move_on(&mut cluster) == Some(OpId(1)));
        submit(&mut cluster, WINDOW * 2, WORLD - 1);
        name_lost(&mut cluster);
        cluster.run(2);
        let windows = check(&cluster, seed, 2);
        assert_eq!(windows, [0, 14], "seed {seed}");
    }
    assert!(dropped > 40, "only {dropped} moves happened after a rank had dropped the op");
}

#[test]
fn a_rank_that_was_named_before_the_first_of_two_moves_is_not_awaited_again() {
    let mut cluster = Cluster::new(WORLD, 2, 1, 1, Faults::default());
    submit(&mut cluster, WINDOW * 40, WORLD);
    cluster.lose(LOST);
    for shard in &mut cluster.shards {
        shard.machine.handle_gone(LOST, &mut ());
    }
    let is_past = |worker: &WorkerNode| worker.machine.reached(0, 0).0.index > 2;
    cluster.run_until(|cluster| cluster.workers.iter().all(is_past));
    name_lost(&mut cluster);
    move_on(&mut cluster);
    // The other results arrive, but nobody names the rank again before the second move.
    for shard in &mut cluster.shards {
        shard.machine.handle_gone(LOST, &mut ());
    }
    cluster.run_until(|cluster| {
        let due = cluster.workers.iter().map(|worker| worker.machine.poll_timeout()).min();
        cluster.wire.is_empty() && due > Some(cluster.now + Span::from_secs(1))
    });
    assert!(cluster.workers.iter().all(|worker| worker.done.is_empty()));
    move_on(&mut cluster);
    name_lost(&mut cluster);
    cluster.run(1);
    let windows = check(&cluster, 1, 1);
    assert_eq!(windows, [0, 40]);
}
