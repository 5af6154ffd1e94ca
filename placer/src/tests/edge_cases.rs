//! Inputs at the edges: many aggregators, dead paths, colliding names, and wrong numbers.

use super::vectors::{cluster, job, planned};
use crate::explain::{Reason, explain};
use crate::inventory::{Amount, Host, Inventory};
use crate::job::Job;
use crate::network::{Links, Network, NetworkError};
use crate::notes::{Note, notes};
use crate::plan::{PlanError, plan};
use crate::problem::{Exclusion, Problem};
use crate::topology::{InventoryError, Topology};

fn network(text: &str) -> Network {
    toml::from_str(text).unwrap()
}

#[test]
fn as_many_aggregators_as_hosts_take_one_each() {
    let mut inventory = cluster(&[&[1; 40]]);
    inventory.hosts.iter_mut().for_each(|host| host.cpus.total = 1);
    let job = Job { cpus_per_aggregator: 1, aggregators: 40.into(), ..job("ranks = 40") };
    assert_eq!(planned(&inventory, &job).unwrap().placement.aggregators, [1; 40]);
}

#[test]
fn aggregators_avoid_a_host_that_no_path_reaches() {
    let inventory = cluster(&[&[1; 60]]);
    let topology = Topology::new(&inventory).unwrap();
    let dead = |number: usize| {
        format!("[[pairs]]\nfrom = 'r0h{number}'\nto = 'r0h0'\npath = {{ mbit = 0 }}\n")
    };
    let links = Links::new(&topology, &network(&(1..60).map(dead).collect::<String>())).unwrap();
    let job = Job { aggregators: 3.into(), ..job("ranks = 20") };
    let plan = plan(&topology, &links, &job).unwrap();
    assert_eq!(plan.placement.aggregators[0], 0);
    assert!(plan.time.total_s().is_finite());
}

#[test]
fn each_host_is_excluded_for_its_own_reason() {
    let mut inventory = cluster(&[&[1; 4]]);
    inventory.hosts[1].taints = vec!["spot".into()];
    inventory.hosts[3].taints = vec!["maintenance".into()];
    let except = vec![[("host".into(), "r0h2".into())].into()];
    let job = Job { except, ..job("ranks = 1") };
    let topology = Topology::new(&inventory).unwrap();
    let links = Links::new(&topology, &Network::default()).unwrap();
    let plan = plan(&topology, &links, &job).unwrap();
    let problem = Problem::new(&topology, &links, &job).unwrap();
    assert_eq!(
        explain(&problem, &plan).hosts,
        [
            Reason::Used,
            Reason::Excluded(Exclusion::Taint("spot".into())),
            Reason::Excluded(Exclusion::Excepted),
            Reason::Excluded(Exclusion::Taint("maintenance".into())),
        ]
    );
}

#[test]
fn a_link_that_was_dead_long_ago_is_tried_again() {
    let topology = Topology::new(&cluster(&[&[1, 1]])).unwrap();
    let mbit = |age_s: f64| {
        let text = format!("[[links]]\nof = 'r0h0'\nup = {{ mbit = 0, age_s = {age_s:?} }}");
        let links = Links::new(&topology, &network(&text)).unwrap();
        links.up(topology.vertex("r0h0").unwrap()).mbit()
    };
    assert!(mbit(0.0).abs() < 1e-9);
    assert!((mbit(24.0 * 3600.0) - 94.0 / 8.0).abs() < 1e-9);
    assert!((mbit(1e9) - 94.0).abs() < 1e-9);
}

#[test]
fn names_that_collide_are_errors() {
    let error = |change: fn(&mut Host)| {
        let mut inventory = cluster(&[&[1, 1]]);
        change(&mut inventory.hosts[1]);
        Topology::new(&inventory).unwrap_err()
    };
    let domain = error(|host| host.name = "r0".into());
    assert_eq!(domain, InventoryError::Ambiguous("r0".into()));
    for bad in [error(|host| host.name = "a\u{1b}[31m".into()), error(|host| host.name.clear())] {
        assert!(matches!(bad, InventoryError::Name { .. }), "{bad:?}");
    }
    let slash = error(|host| _ = host.labels.insert("rack".into(), "r0/x".into()));
    assert!(matches!(slash, InventoryError::Name { .. }), "{slash:?}");
    let topology = Topology::new(&cluster(&[&[1, 1]])).unwrap();
    let twice = "[[links]]\nof = 'r0h0'\n[[links]]\nof = 'r0h0'";
    let error = Links::new(&topology, &network(twice)).unwrap_err().to_string();
    assert_eq!(error, "the network file has two records of \"r0h0\"; remove the older one");
}

#[test]
fn jobs_in_sequence_take_what_earlier_ones_left() {
    let mut inventory = cluster(&[&[4, 4], &[4, 4]]);
    inventory.hosts[0].gpus.insert("a100".into(), Amount { total: 1, used: 0 });
    let mut topology = Topology::new(&inventory).unwrap();
    let job = Job {
        gpus_per_rank: 2,
        cpus_per_aggregator: 1,
        ..job("ranks = 2\nstandbys = 1\nstandby_level = 'host'")
    };
    let mut plans = 0;
    let error = loop {
        match plan(&topology, &Links::nominal(&topology), &job) {
            Ok(plan) => plan.occupy(&mut topology, &job),
            Err(error) => break error,
        }
        plans += 1;
    };
    // Sixteen GPUs of one type are four jobs; the GPU of the other type is no use to them.
    assert_eq!(plans, 4);
    assert!(matches!(error, PlanError::Room { room: 0, .. }), "{error}");
    let free = |name: &str| -> u32 {
        let of_type = topology.hosts().iter().filter_map(|host| host.gpus.get(name));
        of_type.map(|gpus| gpus.free()).sum()
    };
    assert_eq!((free("h100"), free("a100")), (0, 1));
    assert_eq!(topology.hosts().iter().map(|host| host.cpus.used).sum::<u32>(), 8);
}

#[test]
fn wrong_amounts_are_errors() {
    let parsed = |cpus: &str| {
        let host = format!("hosts = [{{ name = 'h', nic_mbit = 1, cpus = {cpus} }}]");
        toml::from_str::<Inventory>(&host).map_err(|error| error.message().to_owned())
    };
    assert_eq!(parsed("{ total = 8, used = 2 }").unwrap().hosts[0].cpus.free(), 6);
    for wrong in ["{ total = 8, usd = 8 }", "-1", "'8'"] {
        assert_eq!(parsed(wrong).unwrap_err(), "expected a number, or a table of total and used");
    }
    for (text, why) in [
        ("ranks = 65537", "job \"job\": ranks is 65537; it must be from 1 to 65536"),
        (
            "ranks = 1\naggregators = 1025",
            "job \"job\": aggregators is 1025; it must be from 1 to 1024",
        ),
    ] {
        assert_eq!(planned(&cluster(&[&[1]]), &job(text)).unwrap_err().to_string(), why);
    }
}

#[test]
fn rates_and_round_trips_without_end_are_errors() {
    let topology = Topology::new(&cluster(&[&[1, 1]])).unwrap();
    for (field, value) in
        [("mbit", "inf"), ("mbit", "1e300"), ("rtt_us", "inf"), ("rtt_us", "1e13")]
    {
        let up = if field == "mbit" { format!("up = {{ mbit = {value} }}") } else { String::new() };
        let rtt = if field == "mbit" { String::new() } else { format!("rtt_us = {value}") };
        let text = format!("[[links]]\nof = 'r0h0'\n{up}\n{rtt}");
        let error = Links::new(&topology, &network(&text)).unwrap_err();
        assert!(
            matches!(error, NetworkError::Value { field: wrong, .. } if wrong == field),
            "{error}"
        );
    }
    let mut inventory = cluster(&[&[1, 1]]);
    for rate in [f64::INFINITY, f64::NAN, 1e300, 0.0, -1.0] {
        inventory.hosts[1].nic_mbit = rate;
        let error = Topology::new(&inventory).unwrap_err();
        assert!(matches!(error, InventoryError::Rate { .. }), "{error}");
    }
}

#[test]
fn a_link_that_carries_nothing_is_named_if_no_placement_avoids_it() {
    let topology = Topology::new(&cluster(&[&[1, 1]])).unwrap();
    let dead = "[[links]]\nof = 'r0h1'\nup = { mbit = 0 }";
    let links = Links::new(&topology, &network(dead)).unwrap();
    let error = plan(&topology, &links, &job("ranks = 2\naggregators = 2")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "job \"job\": no placement of its ranks and aggregators found; nothing passes the link \
         from r0h1; measure again, or exclude these hosts"
    );
}

#[test]
fn what_binds_is_named_even_if_several_constraints_do_together() {
    let inventory = cluster(&[&[2, 2], &[2, 2]]);
    let error = |text: &str| planned(&inventory, &job(text)).unwrap_err().to_string();
    assert_eq!(
        error("ranks = 4\nonly = [{ rack = 'r0' }]\nexcept = [{ rack = 'r0' }]"),
        "job \"job\" has 4 ranks, and there is room for 0; without `only`, all fit; without \
         `except`, all fit"
    );
    assert_eq!(
        error("ranks = 3\nmax_ranks_per_host = 0\nmax_ranks_per_domain = { rack = 0 }"),
        "job \"job\" has 3 ranks, and there is room for 0; without `max_ranks_per_host` and \
         `max_ranks_per_domain`, all fit"
    );
    assert_eq!(
        error("ranks = 9"),
        "job \"job\" has 9 ranks, and there is room for 8; no constraint of the job binds, so add \
         hosts or lower `ranks`"
    );
    let limit = "ranks = 2\naggregators = 9\ncpus_per_aggregator = 1";
    assert_eq!(
        error(limit),
        "job \"job\": no placement of its ranks and aggregators found; the hosts have room for 8 \
         of 9 aggregators; lower `aggregators` or `cpus_per_aggregator`, or raise `max_aggregators`"
    );
}

#[test]
fn constraints_that_no_host_matches_are_named() {
    let mut inventory = cluster(&[&[2, 2], &[2, 2]]);
    inventory.hosts[3].taints = vec!["spot".into()];
    let error = |text: &str| planned(&inventory, &job(text)).unwrap_err().to_string();
    assert_eq!(
        error("ranks = 2\nonly = [{ rack = 'r7' }]"),
        "job \"job\" has 2 ranks, and there is room for 0; without `only`, all fit; `only` names { \
         rack = \"r7\" }, which no host has; the values of rack are r0, r1"
    );
    assert_eq!(
        error("ranks = 2\ngpu_type = 'h200'"),
        "job \"job\" has 2 ranks, and there is room for 0; without `gpu_type`, all fit; `gpu_type` \
         names \"h200\", which no host has; the types of GPUs are h100"
    );
    // Constraints that leave hosts are notes.
    let topology = Topology::new(&inventory).unwrap();
    let links = Links::nominal(&topology);
    let notes = |text: &str| {
        let job = job(text);
        let plan = plan(&topology, &links, &job).unwrap();
        let problem = Problem::new(&topology, &links, &job).unwrap();
        notes(&problem, &plan).iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(
        notes(
            "ranks = 2\nonly = [{ host = 'r0h0' }, { host = 'r9' }]\nexcept = [{ row = 'a' }, \
             { rack = 'r0', host = 'r1h1' }]\ntolerates = ['spot', 'spt']"
        ),
        [
            "`only` names { host = \"r9\" }, which no host has; no host has the name \"r9\"",
            "`except` names { row = \"a\" }, which no host has; no host has the label \"row\"; the \
             labels are rack",
            "`except` names { host = \"r1h1\", rack = \"r0\" }, which no host has; hosts have each \
             of these labels, and none has all of them",
            "`tolerates` names \"spt\", which no host has; the taints are spot",
        ]
    );
    assert_eq!(
        notes("ranks = 5\nscope = 'rack'"),
        ["the plan leaves `scope`: no rack has room for more than 4 ranks"]
    );
    assert_eq!(notes("ranks = 2\nscope = 'rack'"), [""; 0]);
    let unused = "ranks = 2\ngpu_type = 'x'\ngpus_per_rank = 0";
    let unused = unused.replace("gpus_per_rank = 0", "max_ranks_per_host = 2");
    let unused = Job { gpus_per_rank: 0, ..job(&unused) };
    let plan = plan(&topology, &links, &unused).unwrap();
    let problem = Problem::new(&topology, &links, &unused).unwrap();
    assert_eq!(crate::notes::notes(&problem, &plan), [Note::NoGpus]);
}

#[test]
fn links_in_use_without_a_measurement_are_named_if_others_have_one() {
    let topology = Topology::new(&cluster(&[&[1, 1], &[1]])).unwrap();
    let notes = |network_text: &str| {
        let links = Links::new(&topology, &network(network_text)).unwrap();
        let job = job("ranks = 2\nscope = 'rack'");
        let plan = plan(&topology, &links, &job).unwrap();
        notes(&Problem::new(&topology, &links, &job).unwrap(), &plan)
    };
    assert_eq!(notes(""), []);
    let measured = "[[links]]\nof = 'r0h0'\nup = { mbit = 90 }\ndown = { mbit = 90 }\n";
    assert_eq!(notes(measured), [Note::Unmeasured(vec!["r0h1".into()])]);
}

#[test]
fn gpus_of_all_types_count_but_a_rank_uses_one_type() {
    let mut inventory = cluster(&[&[3]]);
    let more = inventory.hosts[0].gpus["h100"];
    inventory.hosts[0].gpus.insert("a100".into(), more);
    let with = |ranks: u32| Job { gpus_per_rank: 2, ..job(&format!("ranks = {ranks}")) };
    assert_eq!(planned(&inventory, &with(2)).unwrap().placement.ranks, [2]);
    let error = planned(&inventory, &with(3)).unwrap_err().to_string();
    assert!(error.starts_with("job \"job\" has 3 ranks, and there is room for 2"), "{error}");
}

#[test]
fn a_host_takes_at_most_its_limit_of_aggregators_and_all_its_ranks() {
    let mut inventory = cluster(&[&[2, 0, 0]]);
    let placed = |inventory: &Inventory| {
        let job = Job { gpus_per_rank: 1, ..job("ranks = 2\naggregators = 3") };
        planned(inventory, &job).map(|plan| plan.placement)
    };
    assert_eq!(placed(&inventory).unwrap().aggregators, [3, 0, 0]);
    for (limits, expected) in [([1, 1, 3], [1, 1, 1]), ([0, 0, 3], [0, 0, 3])] {
        for (host, limit) in inventory.hosts.iter_mut().zip(limits) {
            host.max_aggregators = Some(limit);
        }
        let placement = placed(&inventory).unwrap();
        assert_eq!((placement.ranks, placement.aggregators), (vec![2, 0, 0], expected.into()));
    }
    inventory.hosts[2].max_aggregators = Some(0);
    let error = placed(&inventory).unwrap_err().to_string();
    let expected = "the hosts have room for 0 of 3 aggregators; ";
    assert!(error.contains(expected), "{error}");
}
