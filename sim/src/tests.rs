//! Scenarios that test the invariants, and sequences of events that break other systems.

use std::cell::Cell;
use std::rc::Rc;

use racksum_proto::auth::DataAuth;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::error::OpError;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::{OpId, Rank, WindowId};
use racksum_proto::time::Span;
use racksum_proto::wire::{self, Kind};

use crate::check::oracle::Oracle;
use crate::check::{Checker, Checkers, FewBytes, Foreign, SameBits, Sight, Violation};
use crate::cluster::Cluster;
use crate::engine::Picos;
use crate::fault::{Effect, Leg, Match, Rule};
use crate::inputs::{Inputs, Values};
use crate::plan::{Absence, JobPlan, Missing, Move, Network, Plan};
use crate::run::Run;
use crate::run::{Ended, Machine};
use crate::swarm;

fn network() -> Network {
    Network::ideal(1_000_000_000, Picos::from_micros(50))
}

fn job(world: u16) -> JobPlan {
    let cut = Fragmentation::new(1424).unwrap();
    JobPlan { pool_slots: 8, ..JobPlan::new(world, cut) }
}

/// Returns the descriptor of a sum of `elements` floats in blocks of 32, and inputs in which about
/// half of each rank's blocks are zero.
fn floats(elements: u64, seed: u64) -> (Descriptor, Inputs) {
    let descriptor = Descriptor::sum(elements, DType::F32).with_block(32).unwrap();
    (descriptor, Inputs { density_ppm: 500_000, ..Inputs::dense(seed) })
}

/// Returns a job of three ops: a sparse one with many windows, a dense one, and one with a single
/// element.
fn busy_job(world: u16) -> JobPlan {
    let (sparse, halves) = floats(60_000, 1);
    let dense = Descriptor::sum(40_000, DType::F32);
    job(world)
        .with(sparse, halves, Picos::ZERO)
        .with(dense, Inputs::dense(2), Picos::from_micros(100))
        .with(Descriptor::sum(1, DType::F32), Inputs::dense(3), Picos::from_micros(200))
}

/// Returns rules that drop, duplicate and delay datagrams in both directions. Copies arrive up to
/// 20 ms later, among the datagrams of later ops.
fn faults(loss_ppm: u32) -> Vec<Rule> {
    let late = Picos::ZERO..Picos::from_millis(20);
    [Leg::Up, Leg::Down]
        .into_iter()
        .flat_map(|leg| {
            [
                Rule::chance(leg, loss_ppm, Effect::Drop),
                Rule::chance(leg, 100_000, Effect::Copy(late.clone())),
                Rule::chance(leg, 50_000, Effect::Delay(Picos::ZERO..Picos::from_millis(3))),
            ]
        })
        .collect()
}

fn check(plan: &Plan) -> Run {
    Cluster::check(plan).unwrap_or_else(|violation| panic!("{violation}"))
}

#[test]
fn i1_every_contribution_is_folded_exactly_once() {
    for seed in 0..10 {
        let mut plan = Plan::new(seed, network(), vec![busy_job(4)]);
        plan.faults = faults(50_000);
        let totals = check(&plan).totals;
        assert!(totals.lost > 0 && totals.doubled > 0 && totals.delayed > 0);
    }
}

#[test]
fn i2_the_same_inputs_give_the_same_bits_in_every_run() {
    let quiet = check(&Plan::new(0, network(), vec![busy_job(5)]));
    for seed in 1..=20 {
        let shards = u8::try_from(1 + seed % 4).unwrap();
        let network = Network { shards, multicast: seed % 3 == 0, ..network() };
        let job = JobPlan { pool_slots: u32::try_from(seed).unwrap(), ..busy_job(5) };
        let mut plan = Plan::new(seed, network, vec![job]);
        plan.faults = faults(20_000);
        SameBits::compare(&quiet, &check(&plan)).unwrap();
    }
}

#[test]
fn i2_turns_at_a_shard_do_not_change_the_bits() {
    let run = |quantum| {
        let network = Network { quantum, work: Picos(200_000), ..network() };
        check(&Plan::new(1, network, vec![busy_job(4), busy_job(3)]))
    };
    let whole = run(1 << 24);
    for bits in [12, 14, 16] {
        let run = run(1 << bits);
        assert_ne!(run.trace, whole.trace, "smaller turns must change the order of events");
        SameBits::compare(&whole, &run).unwrap();
    }
}

#[test]
fn i7_a_busy_job_delays_another_by_no_more_than_its_share() {
    // The shard processes 1 GB/s, far less than the links deliver.
    let (rate, work) = (100_000_000_000, Picos(1_024_000));
    let busy = Descriptor::sum(1_000_000, DType::F32);
    let busy = JobPlan { pool_slots: 64, ..job(4) }.with(busy, Inputs::dense(1), Picos::ZERO);
    let small = Descriptor::sum(1_000, DType::F32);
    let small = job(2).with(small, Inputs::dense(2), Picos::from_millis(1));
    let latency = |quantum, jobs: &[&JobPlan]| {
        let network = Network { quantum, work, ..Network::ideal(rate, Picos::from_micros(5)) };
        let run = check(&Plan::new(1, network, jobs.iter().map(|job| (*job).clone()).collect()));
        let last = Machine::Worker { job: jobs.len() - 1, rank: Rank(0) };
        let Ended { called, at, .. } = &run.ended[&(last, OpId(0))];
        at.0 - called.0
    };
    let alone = latency(1 << 17, &[&small]);
    let [fair, unfair] = [1 << 17, 1 << 40].map(|quantum| latency(quantum, &[&busy, &small]));
    // Folding a window of the busy job reads and writes about 5 * 64 KiB, which takes 0.33 ms.
    let window = Picos::from_micros(330).0;
    assert!(
        fair <= alone + 3 * window,
        "the small op took {fair} ps with a busy job, and {alone} ps alone"
    );
    assert!(
        unfair > alone + 6 * window,
        "the small op took only {unfair} ps without turns, and {alone} ps alone"
    );
}

#[test]
fn i3_a_rank_moves_its_own_non_zero_bytes_and_the_unions_and_little_more() {
    // With tags, longer ops whose blocks are few and at random places break I3: the acks of a rank
    // that sends little and receives much do not fit in the 6 %.
    let inputs = [(1_000_000, true), (100_000, false), (10_000, true)];
    let cases = [DataAuth::None, DataAuth::Mac]
        .into_iter()
        .flat_map(|auth| inputs.map(|(density_ppm, aligned)| (auth, density_ppm, aligned)));
    for (auth, density_ppm, aligned) in cases {
        for multicast in [true, false] {
            let inputs = Inputs { density_ppm, aligned, ..Inputs::dense(4) };
            let descriptor = Descriptor::sum(400_000, DType::F32);
            let cut = Fragmentation::new(1424 - auth.trailer()).unwrap().with_trailer(auth);
            let job = JobPlan { pool_slots: 64, ..JobPlan::new(4, cut) };
            let job = job.with(descriptor, inputs, Picos::ZERO);
            let plan = Plan::new(1, Network { multicast, ..network() }, vec![job]);
            let few = FewBytes::new(&plan, Rc::new(Oracle::new(&plan)));
            let run = Cluster::new(&plan, Checkers::of(&plan).with(few)).run();
            let totals = run.map(|run| run.totals.lost);
            assert_eq!(totals, Ok(0), "{auth} {density_ppm} {multicast}");
        }
    }
}

#[test]
fn i4_no_more_is_in_flight_than_the_pool_has_slots() {
    for pool_slots in [1, 2, 3, 7] {
        let job = JobPlan { pool_slots, ..busy_job(3) };
        let mut plan = Plan::new(u64::from(pool_slots), network(), vec![job]);
        plan.faults = faults(50_000);
        assert!(check(&plan).totals.folds > 30);
    }
}

#[test]
fn i5_every_op_ends_although_a_rank_is_missing() {
    let absences = [Absence::Calls(0), Absence::Calls(1), Absence::Dies(Picos::from_micros(900))];
    for absence in absences {
        let mut job = busy_job(3);
        job.missing = Some(Missing { rank: Rank(2), absence });
        for op in &mut job.ops {
            op.timeout = Span::from_millis(500);
        }
        let run = check(&Plan::new(1, network(), vec![job]));
        let machine = Machine::Worker { job: 0, rank: Rank(0) };
        let errors: Vec<_> = (0..3)
            .filter_map(|op| run.ended.get(&(machine, OpId(op))))
            .filter_map(|ended| ended.result.as_ref().err())
            .collect();
        let Some(OpError::Timeout { missing, .. }) = errors.first() else {
            panic!("{absence:?}: {errors:?}")
        };
        assert_eq!(missing.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [Rank(2)]);
    }
}

#[test]
fn i5_a_rank_that_dies_holding_all_slots_is_the_one_that_is_named() {
    // The slots hold results that the dead rank will never acknowledge. The other ranks owe the
    // next window, but have no credit to send it, so the timeout must not name them.
    let (descriptor, halves) = floats(200_000, 1);
    let inputs = Inputs { density_ppm: 10_000, ..halves };
    for micros in (100..900).step_by(20) {
        let absence = Absence::Dies(Picos::from_micros(micros));
        let missing = Some(Missing { rank: Rank(2), absence });
        let job = JobPlan { pool_slots: 2, missing, ..job(3) };
        let mut job = job.with(descriptor, inputs, Picos::ZERO);
        job.ops[0].timeout = Span::from_millis(300);
        check(&Plan::new(1, network(), vec![job]));
    }
}

#[test]
fn i5_every_op_ends_with_its_result_under_heavy_loss() {
    for seed in 0..5 {
        let mut plan = Plan::new(seed, network(), vec![busy_job(3)]);
        plan.faults = faults(300_000);
        check(&plan);
    }
}

#[test]
fn i6_strangers_change_nothing_but_a_counter() {
    for seed in 0..5 {
        let mut quiet = Plan::new(seed, network(), vec![busy_job(3), busy_job(2)]);
        quiet.faults = faults(10_000);
        let noisy = Plan { noise: 300, ..quiet.clone() };
        let (quiet, noisy) = (check(&quiet), check(&noisy));
        assert!(noisy.totals.foreign > 30);
        Foreign::compare(&quiet, &noisy).unwrap();
    }
}

/// Counts the datagrams of a window that reach the shard after the window was folded.
struct Late {
    window: WindowId,
    folded: bool,
    count: Rc<Cell<u32>>,
}

impl Checker for Late {
    fn see(&mut self, _: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        use racksum_proto::observer::Event;
        match sight {
            Sight::Event(Event::Folded { window, .. }) if *window == self.window => {
                self.folded = true;
            }
            Sight::Received(datagram) if matches!(machine, Machine::Shard { .. }) => {
                let late = wire::messages(datagram).flatten().any(|(header, _)| {
                    self.folded && header.kind == Kind::Data && header.window == self.window
                });
                self.count.set(self.count.get() + u32::from(late));
            }
            _ => {}
        }
        Ok(())
    }
}

/// SwitchML distinguishes the uses of a slot by one bit. It therefore counts an old duplicate as a
/// new contribution if the duplicate arrives two uses of the slot later.
#[test]
fn an_old_duplicate_is_not_taken_for_a_later_window_of_its_slot() {
    // With one slot, every window uses the same slot.
    let descriptor = Descriptor::sum(30 * 64 * 32, DType::F32).with_block(32).unwrap();
    let job = JobPlan { pool_slots: 1, ..job(2) };
    let job = job.with(descriptor, Inputs::dense(7), Picos::ZERO);
    let mut plan = Plan::new(1, network(), vec![job]);
    let data = |sender, window| Match {
        leg: Some(Leg::Up),
        kind: Some(Kind::Data),
        sender: Some(Rank(sender)),
        window,
        ..Match::default()
    };
    // Rank 1 is always late, so rank 0's part of a window waits alone in the slot for a while. Each
    // run delivers another copy of rank 0's data for the first window at a different time.
    let window = WindowId::new(OpId(0), 0);
    let late = Picos::from_micros(300)..Picos::from_micros(300);
    plan.faults = vec![Rule::always(data(1, None), Effect::Delay(late))];
    let count = Rc::new(Cell::new(0));
    for nth in 1..60 {
        let after = Picos::from_micros(170 * nth);
        let copy = Rule::always(data(0, Some(window)), Effect::Copy(after..after)).at_most(3);
        let mut plan = plan.clone();
        plan.faults.push(copy);
        let watch = Late { window, folded: false, count: Rc::clone(&count) };
        Cluster::new(&plan, Checkers::of(&plan).with(watch)).run().unwrap();
    }
    assert!(count.get() > 100, "only {} copies arrived late", count.get());
}

#[test]
fn worlds_of_every_size_come_to_the_right_sum() {
    for world in [1, 2, 3, 16, 64] {
        let mut plan = Plan::new(u64::from(world), network(), vec![busy_job(world)]);
        plan.faults = faults(10_000);
        check(&plan);
    }
}

#[test]
fn every_dtype_wire_type_and_reduction_comes_to_the_right_bits() {
    for dtype in DType::ALL {
        for wire in WireType::ALL.into_iter().filter(|wire| wire.carries(dtype)) {
            let mut job = job(3);
            for reduction in Reduction::ALL {
                let descriptor = Descriptor { wire, reduction, ..Descriptor::sum(3_001, dtype) };
                if descriptor.validate().is_ok() {
                    for values in [Values::Wide, Values::Wild] {
                        let (_, halves) = floats(0, 5);
                        job = job.with(descriptor, Inputs { values, ..halves }, Picos::ZERO);
                    }
                }
            }
            let mut plan = Plan::new(1, network(), vec![job]);
            plan.faults = faults(10_000);
            check(&plan);
        }
    }
}

#[test]
fn queues_that_are_longer_than_anyones_patience_make_nothing_be_sent_twice() {
    // Sending the results of both ops to 16 ranks occupies the shard's 100 Mbit/s link for 0.4 s. A
    // window is one datagram.
    let mut network = Network { multicast: false, ..network() };
    network.shard.up.rate_bps = 100_000_000;
    let cut = Fragmentation::new(65_456).unwrap();
    let dense = Descriptor::sum(40_000, DType::F32);
    let job = JobPlan { cut, ..job(16) }.with(dense, Inputs::dense(1), Picos::ZERO).with(
        dense,
        Inputs::dense(2),
        Picos::ZERO,
    );
    let run = check(&Plan::new(1, network, vec![job]));
    assert!(run.totals.probes > 100, "{:?}", run.totals);
    assert_eq!(run.totals.again, 0, "{:?}", run.totals);
}

#[test]
fn the_counts_of_a_shard_outlive_it() {
    let plan = Plan::new(1, network(), vec![busy_job(3)]);
    let quiet = check(&plan);
    let (at, lasts) = (Picos(quiet.took.0 / 2), Picos::from_millis(1));
    let moved = check(&Plan { moves: vec![Move { at, lasts, spread: Picos::ZERO }], ..plan });
    // Each life of the shard folds only some windows, so the total must include both lives.
    let [quiet, moved] = [quiet, moved].map(|run| run.totals.folds);
    assert!(moved >= quiet, "{moved} windows were folded with a move, and {quiet} without");
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in 0..5 {
        let plan = swarm::plan(seed);
        let [one, other] = [check(&plan), check(&plan)];
        assert_eq!((one.trace, one.took), (other.trace, other.took));
    }
}

#[test]
fn ranks_that_leave_and_join_one_by_one_get_the_same_sums() {
    let is_gradual = |plan: &Plan| plan.moves.iter().any(|it| it.spread > Picos::ZERO);
    let mut after_joins = 0;
    for plan in (0..).map(swarm::plan).filter(is_gradual).take(30) {
        let joins_late = |it: &[Move]| it[1].at < it[0].at + it[0].length();
        after_joins += usize::from(plan.moves.windows(2).any(joins_late));
        check(&plan);
    }
    assert!(after_joins > 5, "in {after_joins} plans, a move begins before all ranks have joined");
}

#[test]
fn a_swarm_of_seeds_finds_nothing() {
    let seeds = match std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..60,
    };
    let summary = swarm::run(seeds, 2, |_| {}).unwrap();
    let failures: Vec<_> = summary.failures.iter().map(ToString::to_string).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
