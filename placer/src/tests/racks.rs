//! Aggregators in racks against all placements.

use proptest::bool::weighted;
use proptest::prelude::*;
use proptest::sample::Index;

use super::optimum::for_each_choice;
use super::vectors::{cluster, job, planned};
use super::{Instance, Shape, instances};
use crate::job::Setting;
use crate::network::{LinkRecord, Links, Measurement, Network};
use crate::placement::Placement;
use crate::placement::PlacementError;
use crate::plan::plan;
use crate::present::Present;
use crate::problem::Problem;
use crate::racks::{Tree, allows, tree_step_time};
use crate::rebalance::{Proposal, rebalance};
use crate::running::{RunningJobs, remaining};
use crate::search::{self, LONGEST_S};
use crate::topology::{HostId, Topology};

/// Returns all allowed placements with an aggregator in each rack with ranks whose steps end, each
/// with its step time in seconds.
fn placements(problem: &Problem<'_>) -> Vec<(Placement, Tree, f64)> {
    let topology = problem.topology;
    let hosts = topology.hosts().len();
    let mut all = vec![];
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
                let step_s = tree_step_time(problem, &placement, &tree).total_s();
                if allows(problem, &placement, &tree) && step_s < LONGEST_S {
                    all.push((placement.clone(), tree, step_s));
                }
            }
        }
    });
    all
}

fn least_s<'a>(placements: impl IntoIterator<Item = &'a (Placement, Tree, f64)>) -> f64 {
    placements.into_iter().map(|(.., step_s)| *step_s).fold(f64::INFINITY, f64::min)
}

/// Returns an instance whose job has racks.
fn with_racks(mut instance: Instance, is_spread: bool) -> Instance {
    instance.job.racks = Setting::Given(true);
    if is_spread {
        instance.job.max_ranks_per_host = Some(1);
    }
    instance
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn a_plan_with_racks_is_the_best_of_all_placements(
        instance in instances(Shape { hosts: 1..=6, ranks: 1..=5, aggregators: 1..=1 }),
        is_spread in weighted(0.8),
    ) {
        let instance = with_racks(instance, is_spread);
        let topology = instance.topology();
        let links = instance.links(&topology);
        let problem = Problem::new(&topology, &links, &instance.job).unwrap();
        let best_s = least_s(&placements(&problem));
        match plan(&topology, &links, &instance.job) {
            Ok(plan) => {
                let tree = plan.tree.as_ref().unwrap();
                prop_assert!(allows(&problem, &plan.placement, tree), "{plan:?}");
                prop_assert_eq!(tree_step_time(&problem, &plan.placement, tree), plan.time);
                let step_s = plan.time.total_s();
                prop_assert!((step_s - best_s).abs() <= best_s * 1e-8, "{} {}", step_s, best_s);
                prop_assert!(plan.bound_s <= best_s * (1.0 + 1e-8), "{} {}", plan.bound_s, best_s);
            }
            Err(error) => prop_assert!(best_s.is_infinite(), "{error} {best_s}"),
        }
    }

    #[test]
    fn the_search_for_many_racks_is_exact_without_pairs_and_round_trips(
        instance in instances(Shape { hosts: 1..=9, ranks: 1..=6, aggregators: 1..=1 }),
        is_spread in weighted(0.8),
        is_plain in weighted(0.8),
    ) {
        let mut instance = with_racks(instance, is_spread);
        if is_plain {
            instance.network.pairs.clear();
            instance.network.links.iter_mut().for_each(|link| link.rtt_us = None);
            instance.job.max_ranks_per_domain.clear();
        }
        let topology = instance.topology();
        let links = instance.links(&topology);
        let problem = Problem::new(&topology, &links, &instance.job).unwrap();
        let best_s = search::racks::search(&problem, Topology::ROOT, LONGEST_S)
            .map_or(f64::INFINITY, |(best, _)| best.time.total_s());
        if let Some((found, bound_s)) = search::racks::heuristic(&problem, Topology::ROOT) {
            let tree = found.tree.as_ref().unwrap();
            prop_assert!(allows(&problem, &found.placement, tree), "{found:?}");
            let step_s = tree_step_time(&problem, &found.placement, tree).total_s();
            prop_assert_eq!(step_s, found.time.total_s());
            prop_assert!(step_s >= best_s * (1.0 - 1e-8), "{} {}", step_s, best_s);
            prop_assert!(bound_s <= best_s * (1.0 + 1e-8), "{} {}", bound_s, best_s);
            // The search stops within a millionth.
            prop_assert!(!is_plain || step_s <= best_s * (1.0 + 2e-6), "{} {}", step_s, best_s);
        } else {
            prop_assert!(!is_plain || best_s.is_infinite(), "{best_s}");
        }
    }

    #[test]
    fn moves_of_a_job_with_racks_reach_the_shortest_step_and_only_if_they_save_enough(
        instance in instances(Shape { hosts: 1..=6, ranks: 1..=4, aggregators: 1..=1 }),
        is_spread in weighted(0.8),
        choice: Index,
        threshold in 0.01..0.5,
    ) {
        let instance = with_racks(instance, is_spread);
        let topology = instance.topology();
        let links = instance.links(&topology);
        let problem = Problem::new(&topology, &links, &instance.job).unwrap();
        let all = placements(&problem);
        if all.is_empty() {
            return Ok(());
        }
        let (placement, tree, now_s) = all[choice.index(all.len())].clone();
        let present = Present { placement, standbys: vec![], tree: Some(tree) }.plan(&problem);
        prop_assert_eq!(present.time.total_s(), now_s);
        let found = rebalance(&problem, &present, threshold);
        prop_assert!(found.is_allowed && found.standbys.is_none());
        let check = |proposal: &Option<Proposal>, least_s: f64, from_s: f64| {
            if let Some(proposal) = proposal {
                let tree = proposal.tree.as_ref().unwrap();
                let time = tree_step_time(&problem, &proposal.placement, tree);
                prop_assert!(allows(&problem, &proposal.placement, tree), "{proposal:?}");
                prop_assert_eq!(time, proposal.time);
                let step_s = time.total_s();
                prop_assert!((step_s - least_s).abs() <= least_s * 1e-8, "{} {}", step_s, least_s);
                prop_assert!(step_s < from_s * (1.0 - threshold));
            } else {
                prop_assert!(least_s >= from_s * (1.0 - threshold) * (1.0 - 1e-8));
            }
            Ok(())
        };
        let ranks = &present.placement.ranks;
        check(&found.aggregators, least_s(all.iter().filter(|it| it.0.ranks == *ranks)), now_s)?;
        prop_assert!(found.aggregators.iter().all(|it| it.placement.ranks == *ranks));
        let from_s = found.aggregators.map_or(now_s, |proposal| proposal.time.total_s());
        check(&found.ranks, least_s(&all), from_s)?;
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

/// The hosts of eight ranks, with the aggregator of each rack on its first host.
const HOSTS: &str = r#"
placement.hosts = [
    { host = "r0h0", ranks = [0], aggregators = 1 }, { host = "r0h1", ranks = [1] },
    { host = "r0h2", ranks = [2] }, { host = "r0h3", ranks = [3] },
    { host = "r1h0", ranks = [4] }, { host = "r1h1", ranks = [5] },
    { host = "r1h2", ranks = [6] }, { host = "r1h3", ranks = [7] },
]
"#;

#[test]
fn a_running_job_with_racks_loads_links_with_sums() {
    let (topology, links, _) = with_uplinks(1000.0, "ranks = 8");
    let uplink = topology.vertex("r1").unwrap();
    let sum_mbit = 1.06 * 8.0;
    for (racks, setting, sums) in [
        ("placement.racks = [{ host = 'r1h0', domain = 'r1', parent = 'r0h0' }]", "true", 1.0),
        ("placement.racks = [{ host = 'r1h0' }]", "'auto'", 1.0),
        ("", "'auto'", 4.0),
    ] {
        let job = format!(
            "[[jobs]]\nperiod_s = 1.0\njob = {{ name = 'other', ranks = 8, bytes = 1_000_000, \
             aggregators = 'auto', racks = {setting} }}\n{HOSTS}{racks}"
        );
        let running: RunningJobs = toml::from_str(&job).unwrap();
        let left = remaining(&topology, &links, &running).unwrap().up(uplink).mbit();
        assert!((left - (1000.0 - sums * sum_mbit)).abs() < 1e-6, "{setting} {sums} {left}");
    }
}

#[test]
fn the_placement_of_a_job_with_racks_has_an_aggregator_for_each_rank() {
    let (topology, links, job) = with_uplinks(1000.0, "ranks = 8\nracks = true");
    let read = |racks: &str| {
        let record = toml::from_str::<RunningJobs>(&format!(
            "[[jobs]]\njob = {{ name = 'x', ranks = 8, bytes = 1 }}\n{HOSTS}{racks}"
        ));
        Present::of_record(&topology, &job, &record.unwrap().jobs[0].placement)
    };
    let present = read("placement.racks = [{ host = 'r1h0' }]").unwrap();
    let problem = Problem::new(&topology, &links, &present.decided(&job)).unwrap();
    let (best, present) = (plan(&topology, &links, &job).unwrap(), present.plan(&problem));
    assert_eq!((present.time, present.domain), (best.time, best.domain));
    let none = read("").unwrap_err().to_string();
    assert!(none.ends_with("has no aggregator in the rack of host \"r1h0\", which has ranks"));
    let host = |host: &str| (String::from("job"), String::from(host));
    let (job, host) = host("r1h1");
    let second = read("placement.racks = [{ host = 'r1h0' }, { host = 'r1h1' }]").unwrap_err();
    assert_eq!(second, PlacementError::TwoInRack { job, host });
    let of_root = read("placement.racks = [{ host = 'r0h2' }]").unwrap_err().to_string();
    assert!(of_root.ends_with("has a second aggregator in the rack of host \"r0h2\""), "{of_root}");
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
