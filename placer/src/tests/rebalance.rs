//! Moves of running jobs against all placements.

use proptest::prelude::*;
use proptest::sample::Index;

use super::optimum::{best_of_all, for_each_choice};
use super::{Shape, instances};
use crate::model::step_time;
use crate::placement::Placement;
use crate::problem::Problem;
use crate::rebalance::{Move, Proposal, present_plan, rebalance};

/// Returns numbers per host after some moves.
fn after(mut counts: Vec<u32>, moves: &[Move]) -> Vec<u32> {
    for Move { from, to, count } in moves {
        counts[from.0] -= count;
        counts[to.0] += count;
    }
    counts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn moves_reach_the_shortest_step_and_only_if_they_save_enough(
        instance in instances(Shape { hosts: 1..=7, ranks: 1..=4, aggregators: 1..=2 }),
        choice: Index,
        threshold in 0.0..0.5,
    ) {
        let topology = instance.topology();
        let links = instance.links(&topology);
        let problem = Problem::new(&topology, &links, &instance.job).unwrap();
        let hosts = topology.hosts().len();
        // Any placement that the job allows may be the present one.
        let mut allowed = vec![];
        for_each_choice(hosts, problem.traffic.aggregators, &mut |aggregators| {
            for_each_choice(hosts, problem.traffic.ranks, &mut |ranks| {
                let placement = Placement { ranks: ranks.into(), aggregators: aggregators.into() };
                let step_s = step_time(&problem, &placement).total_s();
                if problem.allows(&placement) && step_s.is_finite() {
                    allowed.push(placement);
                }
            });
        });
        if allowed.is_empty() {
            return Ok(());
        }
        let present = present_plan(&problem, allowed[choice.index(allowed.len())].clone());
        let now_s = present.time.total_s();
        let found = rebalance(&problem, &present, threshold);
        prop_assert!(found.is_allowed);
        let same_ranks = allowed.iter().filter(|other| other.ranks == present.placement.ranks);
        let steps_s = same_ranks.map(|placement| step_time(&problem, placement).total_s());
        let least_s = steps_s.fold(f64::INFINITY, f64::min);
        let check = |proposal: &Option<Proposal>, least_s: f64, from_s: f64| {
            if let Some(proposal) = proposal {
                let step_s = proposal.time.total_s();
                prop_assert!((step_s - least_s).abs() <= least_s * 1e-8, "{} {}", step_s, least_s);
                prop_assert!(step_s < from_s * (1.0 - threshold));
                let Placement { ranks, aggregators } = present.placement.clone();
                prop_assert_eq!(after(ranks, &proposal.rank_moves), &proposal.placement.ranks[..]);
                let moved = after(aggregators, &proposal.aggregator_moves);
                prop_assert_eq!(moved, &proposal.placement.aggregators[..]);
            } else {
                prop_assert!(least_s >= from_s * (1.0 - threshold) * (1.0 - 1e-8));
            }
            Ok(())
        };
        check(&found.aggregators, least_s, now_s)?;
        prop_assert!(found.aggregators.iter().all(|proposal| proposal.rank_moves.is_empty()));
        let from_s = found.aggregators.map_or(now_s, |proposal| proposal.time.total_s());
        check(&found.ranks, best_of_all(&instance).unwrap(), from_s)?;
    }
}
