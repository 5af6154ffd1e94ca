//! Aggregators in racks against all placements.

use proptest::bool::weighted;
use proptest::prelude::*;

use super::optimum::for_each_choice;
use super::vectors::{cluster, job, planned};
use super::{Shape, instances};
use crate::job::Setting;
use crate::network::{LinkRecord, Links, Measurement, Network};
use crate::placement::Placement;
use crate::plan::plan;
use crate::problem::Problem;
use crate::racks::{Tree, allows, tree_step_time};
use crate::topology::{HostId, Topology};

/// Returns the least step time of all placements with an aggregator in each rack with ranks.
fn best_of_all(problem: &Problem<'_>) -> f64 {
    let topology = problem.topology;
    let hosts = topology.hosts().len();
    let mut best = f64::INFINITY;
    for_each_choice(hosts, problem.traffic.ranks, &mut |ranks| {
        for root in topology.host_ids() {
            let mut aggregators = vec![0; hosts];
            aggregators[root.0] = 1;
            let placement = Placement { ranks: ranks.into(), aggregators };
            let racks = topology.domains(topology.levels().len());
            let has_ranks =
                |rack: &_| ranks[topology.hosts_of(*rack)].iter().any(|ranks| *ranks > 0);
            let racks = racks.filter(|rack| *rack != topology.domain_of(root)).filter(has_ranks);
            // All choices of one host for each rack.
            let mut trees = vec![vec![]];
            for rack in racks {
                let more = |tree: &Vec<HostId>| {
                    let tree = tree.clone();
                    let hosts = topology.hosts_of(rack).map(HostId);
                    hosts.map(move |host| [&tree[..], &[host]].concat()).collect::<Vec<_>>()
                };
                trees = trees.iter().flat_map(more).collect();
            }
            for racks in trees {
                let tree = Tree { root, racks };
                if allows(problem, &placement, &tree) {
                    best = best.min(tree_step_time(problem, &placement, &tree).total_s());
                }
            }
        }
    });
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn a_plan_with_racks_is_the_best_of_all_placements(
        mut instance in instances(Shape { hosts: 1..=6, ranks: 1..=5, aggregators: 1..=1 }),
        is_spread in weighted(0.8),
    ) {
        // With these the search is a heuristic.
        instance.network.pairs.clear();
        instance.network.links.iter_mut().for_each(|link| link.rtt_us = None);
        instance.job.max_ranks_per_domain.clear();
        instance.job.racks = Setting::Given(true);
        if is_spread {
            instance.job.max_ranks_per_host = Some(1);
        }
        let topology = instance.topology();
        let links = instance.links(&topology);
        let problem = Problem::new(&topology, &links, &instance.job).unwrap();
        let best_s = best_of_all(&problem);
        match plan(&topology, &links, &instance.job) {
            Ok(plan) => {
                let tree = plan.tree.as_ref().unwrap();
                prop_assert!(allows(&problem, &plan.placement, tree), "{plan:?}");
                prop_assert_eq!(tree_step_time(&problem, &plan.placement, tree), plan.time);
                let step_s = plan.time.total_s();
                // The search stops within a millionth.
                prop_assert!((step_s - best_s).abs() <= best_s * 2e-6, "{} {}", step_s, best_s);
                prop_assert!(plan.bound_s <= best_s, "{} {}", plan.bound_s, best_s);
            }
            Err(error) => prop_assert!(best_s.is_infinite() || best_s > 1e9, "{error} {best_s}"),
        }
    }
}

/// Two racks of four hosts with one rank each, whose uplinks carry as much as one host.
fn with_uplinks(mbit: f64, text: &str) -> (Topology, Links, crate::job::Job) {
    let topology = Topology::new(&cluster(&[&[1; 4], &[1; 4]])).unwrap();
    let measured = Measurement {
        mbit,
        loss: 0.0,
        age_s: 0.0,
        confidence: 1.0,
        is_inferred: false,
        is_least: false,
    };
    let link = |of: &str| LinkRecord {
        of: of.into(),
        up: Some(measured),
        down: Some(measured),
        rtt_us: None,
        rtt_p99_us: None,
    };
    let network = Network { links: vec![link("r0"), link("r1")], ..Network::default() };
    let links = Links::new(&topology, &network).unwrap();
    (topology, links, job(text))
}

#[test]
fn one_sum_leaves_a_rack_in_place_of_four_contributions() {
    for mbit in [94.0, 1000.0] {
        let (topology, links, job) = with_uplinks(mbit, "ranks = 8\nracks = 'auto'");
        let plan = plan(&topology, &links, &job).unwrap();
        let tree = plan.tree.unwrap();
        assert_eq!((tree.root, &tree.racks[..]), (HostId(0), &[HostId(4)][..]));
        // The root receives three contributions and a sum, and sends four results.
        let one_s = 1_000_000.0 * 1.06 / (94e6 / 8.0);
        assert!((plan.time.total_s() / one_s - 4.0).abs() < 1e-5, "{:?}", plan.time);
    }
    // With several aggregators, each host carries less than the root of a tree.
    let (topology, links, job) = with_uplinks(1000.0, "ranks = 8\nracks = 'auto'\naggregators = 8");
    assert_eq!(plan(&topology, &links, &job).unwrap().tree, None);
}

#[test]
fn racks_and_what_they_do_not_work_with_are_errors() {
    let error = |text: &str| planned(&cluster(&[&[1]]), &job(text)).unwrap_err().to_string();
    assert_eq!(
        error("ranks = 1\nracks = true\naggregators = 2"),
        "job \"job\": racks is true, so aggregators must be 1, the root"
    );
    assert_eq!(
        error("ranks = 1\nracks = true\nstandbys = 1"),
        "job \"job\": racks is true, so standbys must be 0"
    );
}
