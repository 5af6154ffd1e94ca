//! Plans against the best of all placements.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::{Instance, Shape, instances};
use crate::model::step_time;
use crate::placement::Placement;
use crate::plan::{Plan, plan};
use crate::problem::Problem;
use crate::search;
use crate::topology::Topology;

/// Returns the least step time of all placements in seconds, if any is finite.
fn best_of_all(instance: &Instance) -> Option<f64> {
    let topology = instance.topology();
    let links = instance.links(&topology);
    let problem = Problem::new(&topology, &links, &instance.job).unwrap();
    let hosts = topology.hosts().len();
    let mut best = f64::INFINITY;
    for_each_way(hosts, instance.job.aggregators, &mut |aggregators| {
        for_each_way(hosts, instance.job.ranks, &mut |ranks| {
            let placement = Placement { ranks: ranks.into(), aggregators: aggregators.into() };
            if problem.allows(&placement) {
                best = best.min(step_time(&problem, &placement).total_s());
            }
        });
    });
    best.is_finite().then_some(best)
}

/// Visits all ways to place `count` things on hosts.
fn for_each_way(hosts: usize, count: u32, visit: &mut dyn FnMut(&[u32])) {
    fn extend(way: &mut [u32], first: usize, left: u32, visit: &mut dyn FnMut(&[u32])) {
        if first + 1 == way.len() {
            way[first] = left;
            return visit(way);
        }
        for count in 0..=left {
            way[first] = count;
            extend(way, first + 1, left - count, visit);
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
            prop_assert!(problem.allows(&placement), "{:?}", placement);
            prop_assert_eq!(step_time(&problem, &placement), time);
            prop_assert!((time.total_s() - best).abs() <= best * 1e-8, "{:?} {}", time, best);
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
        let relaxed = search::relax(&problem, Topology::ROOT);
        let heuristic = relaxed.and_then(|r| search::heuristic(&problem, Topology::ROOT, r));
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
