//! Failover: an aggregator dies at a random time, and the job continues at another aggregator. The
//! results have the same bits as without the failover.

use super::*;
use crate::inputs::{Inputs, Values};

/// Returns ops that cover every path through a fold.
fn descriptors() -> Vec<Descriptor> {
    let sum = |elements, dtype| Descriptor::sum(elements, dtype);
    let narrow = |elements, wire| Descriptor { wire, ..sum(elements, DType::F32) };
    vec![
        sum(60 * 256 * 14 + 9, DType::F32),
        sum(3, DType::I32),
        Descriptor { reduction: Reduction::Avg, lane: 1, ..sum(60 * 256 * 6, DType::F32) },
        narrow(60 * 256 * 5, WireType::Int8),
        narrow(9_000, WireType::Fixed32),
        sum(0, DType::F32),
        Descriptor { reduction: Reduction::Max, ..sum(60 * 512 * 3, DType::F16) },
        Descriptor { reduction: Reduction::Avg, ..narrow(60 * 512 * 4, WireType::Bf16) },
        sum(700, DType::I64),
    ]
}

fn submit(cluster: &mut Cluster, seed: u64, op: u64, descriptor: Descriptor) {
    let now = cluster.now;
    for (rank, worker) in (0..).zip(&mut cluster.workers) {
        let inputs = Inputs {
            seed: seed * 100 + op,
            density_ppm: [1_000_000, 300_000, 20_000][usize::try_from((seed + op) % 3).unwrap()],
            aligned: op.is_multiple_of(2),
            values: if seed.is_multiple_of(2) { Values::Wide } else { Values::Wild },
        };
        let tensor = inputs.tensor(&descriptor, Rank(rank));
        worker.submit(now, descriptor, tensor, TIMEOUT).unwrap();
    }
}

/// Returns whether the aggregator dies now, given the steps that are `left` until its death.
fn dies(_: &mut Cluster, _: &mut Random, left: &mut u64) -> bool {
    let is_due = *left == 0;
    *left = left.saturating_sub(1);
    is_due
}

/// Like [`dies`], for an aggregator that first prepares the ranks, one after the other at random
/// times, and dies once all of them are ready to move.
fn hands_over(cluster: &mut Cluster, random: &mut Random, left: &mut u64) -> bool {
    if !dies(cluster, random, left) {
        return false;
    }
    let unprepared = cluster.workers.iter_mut().find(|worker| !worker.machine.config().may_move);
    if let Some(worker) = unprepared {
        worker.machine.prepare_to_move();
        *left = random.below(40);
        return false;
    }
    cluster.workers.iter().all(|worker| worker.machine.is_ready_to_move())
}

/// Like [`hands_over`], for an aggregator that cancels some of its moves while it prepares them.
fn hesitates(cluster: &mut Cluster, random: &mut Random, left: &mut u64) -> bool {
    // The ranks take up to thousands of steps to become ready, and each of these steps draws.
    if *left == 0 && random.below(1_000) == 0 {
        for worker in &mut cluster.workers {
            worker.machine.stop_keeping();
        }
        *left = random.below(40);
    }
    hands_over(cluster, random, left)
}

/// Runs all ops, `OPEN` of them at a time. Each number in `deaths` is the number of steps until the
/// next death of the aggregator, which `dies` then decides on. Returns each rank's results, by op.
fn results(
    seed: u64,
    faults: Faults,
    deaths: &[u64],
    dies: impl Fn(&mut Cluster, &mut Random, &mut u64) -> bool,
    may_move: bool,
) -> Vec<Vec<Result<Vec<u8>, OpError>>> {
    // A job that knows no standby moves only after its first ops.
    let descriptors = descriptors().repeat(if may_move { 1 } else { 3 });
    let grant = Grant { world: 3, shards: 2, lanes: 2, pool_slots: 8, moved_at: None };
    let mut cluster = Cluster::new(grant.world, grant.shards, grant.lanes, seed, faults);
    for (rank, worker) in (0..).zip(&mut cluster.workers) {
        let config = worker::Config { may_move, ..grant.worker(rank) };
        *worker = WorkerNode::new(config, grant.world, Time(0));
    }
    let mut random = Random::new(seed ^ 0x5eed);
    let mut deaths = deaths.iter().copied();
    let mut left = deaths.next();
    let mut started = 0;
    let ended = |cluster: &Cluster| cluster.workers.iter().map(|w| w.done.len()).min().unwrap();
    while ended(&cluster) < descriptors.len() {
        while started < descriptors.len() && started - ended(&cluster) < OPEN {
            submit(&mut cluster, seed, started as u64, descriptors[started]);
            started += 1;
        }
        let before = ended(&cluster);
        let mut is_dead = false;
        cluster.run_until(|cluster| {
            let left = left.as_mut();
            is_dead = left.is_some_and(|left| dies(cluster, &mut random, left));
            is_dead || ended(cluster) > before
        });
        if is_dead {
            left = deaths.next();
            let first = cluster.workers.iter().map(|w| w.machine.first_kept()).max();
            let shards = 1 + u8::try_from(random.below(3)).unwrap();
            let pool_slots = 2 + u32::try_from(random.below(12)).unwrap();
            cluster.move_to(Grant { shards, pool_slots, moved_at: first, ..grant });
        }
    }
    let of = |worker: &WorkerNode| {
        let mut done = worker.done.clone();
        done.sort_by_key(|(op, _)| *op);
        done.into_iter().map(|(_, result)| result).collect()
    };
    cluster.workers.iter().map(of).collect()
}

#[test]
fn an_aggregator_may_die_at_any_time_and_the_sums_are_the_same() {
    for seed in 0..120 {
        let faults = Faults { drop: seed % 3 * 6, double: seed % 4 * 3, delay: seed % 5 * 5 };
        let undisturbed = results(seed, Faults::default(), &[], dies, true);
        assert!(undisturbed.iter().all(|results| *results == undisturbed[0]));
        let mut random = Random::new(seed);
        let deaths: Vec<_> = (0..1 + seed % 4).map(|_| random.below(3_000)).collect();
        assert_same(seed, &undisturbed, &results(seed, faults, &deaths, dies, true));
    }
}

#[test]
fn a_job_that_knew_no_standby_moves_once_all_its_ranks_are_prepared() {
    // wire: W-78
    moves_once_prepared(0..60, hands_over);
}

#[test]
fn moves_that_are_cancelled_cost_nothing_and_the_job_can_still_move() {
    // wire: W-78
    moves_once_prepared(60..120, hesitates);
}

fn moves_once_prepared(
    seeds: std::ops::Range<u64>,
    hands_over: impl Fn(&mut Cluster, &mut Random, &mut u64) -> bool,
) {
    let moves = std::cell::Cell::new(0);
    for seed in seeds {
        let faults = Faults { drop: seed % 3 * 6, double: seed % 4 * 3, delay: seed % 5 * 5 };
        let undisturbed = results(seed, Faults::default(), &[], dies, false);
        let mut random = Random::new(seed);
        let deaths: Vec<_> = (0..1 + seed % 4).map(|_| random.below(300)).collect();
        let counted = |cluster: &mut Cluster, random: &mut Random, left: &mut u64| {
            let moves_now = hands_over(cluster, random, left);
            moves.set(moves.get() + u64::from(moves_now));
            moves_now
        };
        assert_same(seed, &undisturbed, &results(seed, faults, &deaths, counted, false));
    }
    assert!(moves.get() > 60, "only {} moves happened before all ops had ended", moves.get());
}

/// Checks that every rank has the same results in both runs.
fn assert_same(
    seed: u64,
    undisturbed: &[Vec<Result<Vec<u8>, OpError>>],
    disturbed: &[Vec<Result<Vec<u8>, OpError>>],
) {
    for (rank, (one, other)) in undisturbed.iter().zip(disturbed).enumerate() {
        for (op, (one, other)) in one.iter().zip(other).enumerate() {
            assert!(
                one == other,
                "seed {seed}, rank {rank}, op {op}: different bits, {:?}",
                other.as_ref().err()
            );
        }
    }
}

#[test]
fn a_lane_that_is_idle_keeps_nothing_and_holds_up_no_other() {
    for seed in 0..20 {
        let faults = Faults { drop: seed % 4 * 8, double: seed % 3 * 4, delay: seed % 5 * 4 };
        let mut cluster = Cluster::new(3, 2, 2, seed, faults);
        let idle = |cluster: &mut Cluster| cluster.workers.iter().all(|w| w.machine.is_idle());
        for op in 0..60 {
            let elements = 60 * 256 * (1 + op % 3);
            let lane = u8::from(op > 0);
            submit(
                &mut cluster,
                seed,
                op,
                Descriptor { lane, ..Descriptor::sum(elements, DType::F32) },
            );
            let ended = usize::try_from(op).unwrap() + 1;
            cluster.run(ended);
            if op == 10 {
                cluster.run_until(idle);
            }
            for worker in &cluster.workers {
                let kept = op + 1 - u64::from(worker.machine.first_kept().0);
                assert!(op < 10 || kept <= op - 9, "seed {seed}: {kept} ops kept after op {op}");
            }
        }
        cluster.run_until(idle);
        let timers = cluster.workers.iter().map(|worker| worker.machine.poll_timeout());
        assert!(timers.min() == Some(Time::NEVER), "seed {seed}: an idle rank still has a timeout");
    }
}

#[test]
fn an_op_of_whose_failure_only_some_were_told_ends_after_a_move() {
    let mut partial = 0;
    for seed in 0..200 {
        let faults = Faults { drop: 10 + seed % 30, double: 5, delay: 5 };
        let grant = Grant { world: 3, shards: 2, lanes: 1, pool_slots: 8, moved_at: None };
        let mut cluster = Cluster::new(3, 2, 1, seed, faults);
        let good = Descriptor::sum(60 * 256 * 12, DType::I32);
        let bad = Descriptor { reduction: Reduction::Max, ..good };
        let ones = bytes(&vec![1; 60 * 256 * 12]);
        for (rank, worker) in cluster.workers.iter_mut().enumerate() {
            let second = if rank == 1 { bad } else { good };
            for descriptor in [good, second, good] {
                worker.submit(Time(0), descriptor, ones.clone(), TIMEOUT).unwrap();
            }
        }
        let has_failed = |w: &WorkerNode| w.done.iter().any(|(op, _)| *op == OpId(1));
        cluster.run_until(|cluster| cluster.workers.iter().any(has_failed));
        partial += usize::from(!cluster.workers.iter().all(has_failed));
        let first = cluster.workers.iter().map(|w| w.machine.first_kept()).max();
        cluster.move_to(Grant { moved_at: first, ..grant });
        let now = cluster.now;
        for worker in &mut cluster.workers {
            worker.submit(now, good, ones.clone(), TIMEOUT).unwrap();
        }
        cluster.run(4);
        let threes = bytes(&vec![3; 60 * 256 * 12]);
        let mut shown = 0;
        for (rank, worker) in cluster.workers.iter_mut().enumerate() {
            worker.done.sort_by_key(|(op, _)| *op);
            for (op, result) in &worker.done {
                shown += usize::from(matches!(result, Err(OpError::Mismatch { .. })));
                let right = match result {
                    Ok(sum) => *op != OpId(1) && *sum == threes,
                    Err(OpError::Mismatch { .. } | OpError::Dropped { .. }) => *op == OpId(1),
                    Err(_) => false,
                };
                assert!(right, "seed {seed}, rank {rank}, {op:?}: {:?}", result.as_ref().err());
            }
        }
        assert!(shown > 0, "seed {seed}: no rank's error shows the difference");
    }
    assert!(
        partial > 50,
        "only {partial} moves happened while some but not all ranks knew of the failure"
    );
}

#[test]
fn an_op_that_the_others_dropped_fails_at_a_rank_that_starts_it_after_the_move() {
    for seed in 0..20 {
        let grant = Grant { world: 3, shards: 2, lanes: 1, pool_slots: 8, moved_at: None };
        let mut cluster = Cluster::new(3, 2, 1, seed, Faults::default());
        let sum = Descriptor::sum(700, DType::I32);
        let max = Descriptor { reduction: Reduction::Max, ..sum };
        let ones = bytes(&[1; 700]);
        let now = cluster.now;
        for (rank, descriptor) in [(0, sum), (1, max)] {
            cluster.workers[rank].submit(now, descriptor, ones.clone(), TIMEOUT).unwrap();
        }
        cluster.run_until(|cluster| cluster.workers[..2].iter().all(|w| w.done.len() == 1));
        let first = cluster.workers.iter().map(|w| w.machine.first_kept()).max();
        assert_eq!(first, Some(OpId(1)));
        cluster.move_to(Grant { moved_at: first, ..grant });
        let now = cluster.now;
        cluster.workers[2].submit(now, sum, ones.clone(), TIMEOUT).unwrap();
        for worker in &mut cluster.workers {
            worker.submit(now, sum, ones.clone(), TIMEOUT).unwrap();
        }
        cluster.run(2);
        let late = &cluster.workers[2].done[0];
        assert!(matches!(late, (OpId(0), Err(OpError::Dropped { op: OpId(0) }))), "{:?}", late.1);
        let threes = bytes(&[3; 700]);
        for worker in &cluster.workers {
            assert!(worker.done[1].1.as_ref() == Ok(&threes));
        }
    }
}

#[test]
fn small_ops_of_a_job_that_has_moved_end_although_opens_come_late_and_twice() {
    for seed in 0..12 {
        let faults = Faults { drop: 0, double: 20, delay: 20 };
        let mut cluster = Cluster::new(2, 1, 1, seed, faults);
        let moved_at = Some(OpId(0));
        cluster.move_to(Grant { world: 2, shards: 1, lanes: 1, pool_slots: 8, moved_at });
        let descriptor = Descriptor::sum(8, DType::I32);
        for op in 0..600 {
            let now = cluster.now;
            for worker in &mut cluster.workers {
                worker.submit(now, descriptor, bytes(&[1; 8]), Span::from_secs(2)).unwrap();
            }
            // A few ops are in flight at once, so that late opens overtake many others.
            cluster.run((op + 1_usize).saturating_sub(8));
            let failed = cluster.workers[0].done.iter().find(|(_, result)| result.is_err());
            assert!(failed.is_none(), "seed {seed}: {failed:?}");
        }
        cluster.run(600);
        assert!(cluster.workers[1].done.iter().all(|(_, sum)| *sum == Ok(bytes(&[2; 8]))));
    }
}

#[test]
fn a_rank_at_rest_asks_less_and_less_whether_all_have_what_it_has() {
    let mut cluster = Cluster::new(3, 2, 2, 1, Faults::default());
    submit(&mut cluster, 1, 0, Descriptor::sum(60 * 256 * 9, DType::F32));
    cluster.run(1);
    // The last rank stops before it has acknowledged the result.
    cluster.lose(Rank(2));
    let (end, sent) = (cluster.now + Span::from_secs(60), cluster.sent);
    cluster.run_until(|cluster| cluster.now >= end);
    let sent = cluster.sent - sent;
    assert!(
        (60..800).contains(&sent),
        "two idle ranks, with two streams each, sent {sent} datagrams in 60 s, not 60 to 799"
    );
}

/// The number of ops in flight at a time.
const OPEN: usize = 3;
