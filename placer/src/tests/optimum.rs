//! Plans against the best of all placements.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::{Instance, Shape, instances};
use crate::model::step_time;
use crate::placement::Placement;
use crate::plan::{Plan, plan, plan_problem};
use crate::problem::Problem;
use crate::rank_moves::RankMoves;
use crate::search;
use crate::topology::Topology;

/// Returns the least step time of all placements in seconds, if any is finite.
pub(super) fn best_of_all(instance: &Instance) -> Option<f64> {
    let topology = instance.topology();
    let links = instance.links(&topology);
    let problem = Problem::new(&topology, &links, &instance.job).unwrap();
    let hosts = topology.hosts().len();
    let mut best = f64::INFINITY;
    for_each_choice(hosts, problem.traffic.aggregators, &mut |aggregators| {
        for_each_choice(hosts, instance.job.ranks, &mut |ranks| {
            let placement = Placement { ranks: ranks.into(), aggregators: aggregators.into() };
            if problem.allows(&placement) {
                best = best.min(step_time(&problem, &placement).total_s());
            }
        });
    });
    best.is_finite().then_some(best)
}

/// Visits all choices of hosts for `count` things.
pub(super) fn for_each_choice(hosts: usize, count: u32, visit: &mut dyn FnMut(&[u32])) {
    fn extend(choice: &mut [u32], first: usize, left: u32, visit: &mut dyn FnMut(&[u32])) {
        if first + 1 == choice.len() {
            choice[first] = left;
            return visit(choice);
        }
        for count in 0..=left {
            choice[first] = count;
            extend(choice, first + 1, left - count, visit);
        }
    }
    extend(&mut vec![0; hosts], 0, count, visit);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_plan_for_a_small_cluster_is_the_best_of_all_placements(
        instance in instances(Shape { hosts: 1..=9, ranks: 1..=6, aggregators: 1..=2 })
    ) {
        let best = best_of_all(&instance);
        let topology = instance.topology();
        let links = instance.links(&topology);
        let plan = plan(&topology, &links, &instance.job).ok();
        prop_assert_eq!(plan.is_some(), best.is_some(), "{:?} {:?}", plan, best);
        if let (Some(Plan { time, placement, .. }), Some(best)) = (plan, best) {
            let problem = Problem::new(&topology, &links, &instance.job).unwrap();
            let relaxed = search::relax(&problem, Topology::ROOT, f64::INFINITY).unwrap();
            prop_assert!(relaxed.bound_s <= best, "{} {}", relaxed.bound_s, best);
            prop_assert!(problem.allows(&placement), "{:?}", placement);
            prop_assert_eq!(step_time(&problem, &placement), time);
            prop_assert!((time.total_s() - best).abs() <= best * 1e-8, "{:?} {}", time, best);
        }
    }
}

proptest! {
    #[test]
    fn a_moved_rank_takes_the_step_that_the_model_gives_its_placement(
        instance in instances(Shape { hosts: 2..=9, ranks: 1..=6, aggregators: 1..=2 })
    ) {
        let topology = instance.topology();
        let links = instance.links(&topology);
        let problem = Problem::new(&topology, &links, &instance.job).unwrap();
        if let Ok(plan) = plan_problem(&problem) {
            let moves = RankMoves::new(&problem, &plan.placement);
            for from in topology.host_ids().filter(|host| plan.placement.ranks[host.0] > 0) {
                for to in topology.host_ids().filter(|to| *to != from) {
                    let mut moved = plan.placement.clone();
                    moved.ranks[from.0] -= 1;
                    moved.ranks[to.0] += 1;
                    let step_s = || step_time(&problem, &moved).total_s();
                    let step_s = problem.allows(&moved).then(step_s);
                    prop_assert_eq!(moves.step_s(from, to), step_s, "{:?} {:?}", from, to);
                }
            }
        }
    }
}

#[test]
fn the_heuristic_search_is_close_to_the_exact_one() {
    let mut gaps = vec![];
    let shape = Shape { hosts: 2..=14, ranks: 1..=12, aggregators: 1..=3 };
    let mut runner = TestRunner::deterministic();
    while gaps.len() < 200 {
        let instance = instances(shape.clone()).new_tree(&mut runner).unwrap().current();
        let topology = instance.topology();
        let links = instance.links(&topology);
        let problem = Problem::new(&topology, &links, &instance.job).unwrap();
        let exact = search::exhaustive(&problem, Topology::ROOT);
        let relaxed = search::relax(&problem, Topology::ROOT, f64::INFINITY);
        let heuristic = relaxed.and_then(|r| search::heuristic(&problem, Topology::ROOT, &r));
        assert_eq!(exact.is_some(), heuristic.is_some(), "{instance:?}");
        let (Some(exact), Some((heuristic, bound_s))) = (exact, heuristic) else { continue };
        let (exact_s, heuristic_s) = (exact.time.total_s(), heuristic.time.total_s());
        assert!(bound_s <= exact_s, "{instance:?}: {bound_s} is above {exact_s}");
        gaps.push(if heuristic_s > exact_s { heuristic_s / exact_s - 1.0 } else { 0.0 });
    }
    let mean = gaps.iter().sum::<f64>() / 200.0;
    let worst = gaps.iter().copied().fold(0.0, f64::max);
    let equal = gaps.iter().filter(|gap| **gap < 1e-8).count();
    println!("gap to the optimum: mean {mean:.6}, worst {worst:.6}; {equal} of 200 equal");
    assert!(mean <= 0.01 && worst <= 0.05 && equal >= 190);
}
