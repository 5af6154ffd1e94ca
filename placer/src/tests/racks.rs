//! Aggregators in racks against all placements.

use proptest::bool::weighted;
use proptest::prelude::*;

use super::optimum::for_each_choice;
use super::vectors::{cluster, job, planned};
use super::{Shape, instances};
use crate::job::Setting;
use crate::network::{LinkRecord, Links, Measurement, Network};
use crate::placement::Placement;
use crate::placement::PlacementError;
use crate::plan::plan;
use crate::present::Present;
use crate::problem::Problem;
use crate::racks::{Tree, allows, tree_step_time};
use crate::running::{RunningJobs, remaining};
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
