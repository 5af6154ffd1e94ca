//! Moves of running jobs against all placements.

use proptest::prelude::*;
use proptest::sample::Index;

use super::optimum::{best_of_all, for_each_choice};
use super::vectors::{cluster, job};
use super::{Shape, instances};
use crate::model::step_time;
use crate::network::Links;
use crate::placement::{Placement, PlacementRecord};
use crate::present::Present;
use crate::problem::Problem;
use crate::rebalance::{Move, Proposal, Rebalance, rebalance};
use crate::topology::{HostId, Topology};

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
        let placement = allowed[choice.index(allowed.len())].clone();
        let present = Present { placement, standbys: vec![], tree: None }.plan(&problem);
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

/// A job in one rack with a standby in another. The last host has a slow link, and the one before
/// it a very slow one.
const JOB: &str = "ranks = 2\nstandbys = 1\nstandby_level = 'host'\nscope = 'rack'";

/// Returns the present placement of ranks on hosts 0 and 1 with a standby, and the moves with a
/// threshold of 10 %.
fn rebalanced(record: &str) -> (Vec<f64>, Rebalance) {
    let mut inventory = cluster(&[&[1, 1, 0, 0, 0]]);
    for (host, nic_mbit) in inventory.hosts.iter_mut().zip([100.0, 100.0, 100.0, 10.0, 50.0]) {
        host.nic_mbit = nic_mbit;
    }
    let topology = Topology::new(&inventory).unwrap();
    let links = Links::nominal(&topology);
    let job = job(JOB);
    let record: PlacementRecord = toml::from_str(record).unwrap();
    let present = Present::of_record(&topology, &job, &record).unwrap();
    let problem = Problem::new(&topology, &links, &job).unwrap();
    let plan = present.plan(&problem);
    let steps_s = std::iter::once(plan.time).chain(plan.standbys.iter().map(|one| one.time));
    (steps_s.map(|time| time.total_s()).collect(), rebalance(&problem, &plan, 0.1))
}

#[test]
fn standbys_are_priced_and_kept_out_of_the_way_of_moves() {
    let hosts = "hosts = [{ host = 'r0h0', ranks = [0] }, { host = 'r0h1', ranks = [1] }, \
                 { host = 'r0h3', aggregators = 1 }]\n";
    let standby = |host: &str| {
        format!("{hosts}[[standbys]]\nhosts = [{{ host = '{host}', aggregators = 1 }}]")
    };
    // The only fast host without ranks is the standby's, so the aggregator moves beside a rank.
    let (steps_s, found) = rebalanced(&standby("r0h2"));
    assert!((steps_s[0] / steps_s[1] - 10.0).abs() < 1e-9, "{steps_s:?}");
    assert!(found.is_allowed && found.are_standbys_allowed);
    let moved = found.aggregators.unwrap();
    assert_eq!(moved.aggregator_moves, [Move { from: HostId(3), to: HostId(0), count: 1 }]);
    assert_eq!(moved.standbys[0].aggregators, [0, 0, 1, 0, 0]);
    // Beside the other rank, a standby is twice as fast.
    let standbys = found.standbys.unwrap();
    assert_eq!(standbys.standbys[0].aggregators, [0, 1, 0, 0, 0]);
    assert!((standbys.saving - 0.5).abs() < 1e-9, "{}", standbys.saving);

    // A standby on the aggregator's host is no standby, so any other one will do.
    let (_, found) = rebalanced(&standby("r0h3"));
    assert!(found.is_allowed && !found.are_standbys_allowed);
    assert!(found.standbys.is_some());
    let (steps_s, found) = rebalanced(hosts);
    assert_eq!((steps_s.len(), found.are_standbys_allowed), (1, false));
    assert!(found.standbys.is_some());
    // The best one stays.
    let (_, found) = rebalanced(&standby("r0h1"));
    assert!(found.are_standbys_allowed && found.standbys.is_none(), "{found:?}");
}

#[test]
fn aggregators_leave_the_domain_of_a_job_only_for_its_widen_gain() {
    let mut inventory = cluster(&[&[2, 0], &[0]]);
    inventory.hosts[0].max_aggregators = Some(0);
    inventory.hosts[1].nic_mbit = 10.0;
    let topology = Topology::new(&inventory).unwrap();
    let links = Links::nominal(&topology);
    let moved = |gain: &str| {
        let job = job(&format!("ranks = 2\nscope = 'rack'\nwiden_gain = {gain}"));
        let problem = Problem::new(&topology, &links, &job).unwrap();
        let placement = Placement { ranks: vec![2, 0, 0], aggregators: vec![0, 1, 0] };
        let present = Present { placement, standbys: vec![], tree: None }.plan(&problem);
        rebalance(&problem, &present, 0.1).aggregators
    };
    let out = Move { from: HostId(1), to: HostId(2), count: 1 };
    assert_eq!(moved("0.5").unwrap().aggregator_moves, [out]);
    assert_eq!(moved("1.0"), None);
}
