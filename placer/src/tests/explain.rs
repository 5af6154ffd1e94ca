//! Explanations of plans and errors.

use super::vectors::{cluster, job, planned};
use crate::explain::{Change, Explanation, Reason, explain};
use crate::inventory::{Amount, Inventory, Place, Tree};
use crate::job::Job;
use crate::network::{Bottleneck, Links, Network};
use crate::notes::misplaced;
use crate::placement::Placement;
use crate::plan::plan;
use crate::present::Present;
use crate::problem::Problem;
use crate::topology::Topology;

/// Explains the plan of a job, or its present placement.
fn explained(
    inventory: &Inventory,
    network: &str,
    job: &Job,
    present: Option<Placement>,
) -> Explanation {
    let topology = Topology::new(inventory).unwrap();
    let network: Network = toml::from_str(network).unwrap();
    let links = Links::new(&topology, &network).unwrap();
    let problem = Problem::new(&topology, &links, job).unwrap();
    let plan = match present {
        Some(placement) => Present { placement, standbys: vec![], tree: None }.plan(&problem),
        None => plan(&topology, &links, job).unwrap(),
    };
    explain(&problem, &plan)
}

#[test]
fn a_bottleneck_helps_if_both_of_its_directions_are_faster() {
    let inventory = cluster(&[&[1, 1, 1]]);
    let leaf = Topology::new(&inventory).unwrap().vertex("r0h0").unwrap();
    let [help] = explained(&inventory, "", &job("ranks = 3"), None).helps[..] else {
        panic!("one change helps")
    };
    let Change::Faster(bottleneck) = help.change else { panic!("{help:?}") };
    assert!(bottleneck.is_link_of(leaf), "{help:?}");
    assert!((help.saving - 0.5).abs() < 1e-6, "{help:?}");
}

#[test]
fn no_change_is_credited_with_what_a_new_plan_saves() {
    let slow = "[[links]]\nof = 'r0h0'\nup = { mbit = 9 }\ndown = { mbit = 9 }";
    let present = Placement { ranks: vec![1, 1, 0], aggregators: vec![0, 1, 0] };
    let found = explained(&cluster(&[&[1, 1, 1]]), slow, &job("ranks = 2"), Some(present));
    assert_eq!(found.helps, []);
}

#[test]
fn other_jobs_must_free_only_what_a_rank_lacks() {
    let mut inventory = cluster(&[&[12], &[6]]);
    inventory.hosts[0].gpus.insert("h100".into(), Amount { total: 12, used: 4 });
    let job = Job { gpus_per_rank: 6, ..job("ranks = 2") };
    let freed = |inventory: &Inventory| {
        let helps = explained(inventory, "", &job, None).helps;
        helps.into_iter().find_map(|help| match help.change {
            Change::Freed { gpus, .. } => Some(gpus),
            _ => None,
        })
    };
    assert_eq!(freed(&inventory), Some(4));
    // Of two types, the one of which fewer are missing counts.
    inventory.hosts[0].gpus.insert("a100".into(), Amount { total: 8, used: 3 });
    assert_eq!(freed(&inventory), Some(1));
}

#[test]
fn a_dead_link_of_an_aggregator_is_named_at_the_hosts_that_it_cuts_off() {
    let inventory = cluster(&[&[2, 1]]);
    let leaf = Topology::new(&inventory).unwrap().vertex("r0h0").unwrap();
    let dead = "[[links]]\nof = 'r0h0'\nup = { mbit = 0 }";
    let found = explained(&inventory, dead, &job("ranks = 2"), None);
    assert_eq!(found.hosts, [Reason::Used, Reason::Dead(Bottleneck::Up(leaf))]);
}

#[test]
fn a_dead_link_is_the_reason_before_the_hosts_of_other_jobs() {
    let mut inventory = cluster(&[&[1, 1, 1]]);
    inventory.hosts[2].gpus.insert("h100".into(), Amount { total: 1, used: 1 });
    let topology = Topology::new(&inventory).unwrap();
    let dead = toml::from_str("[[links]]\nof = 'r0h1'\nup = { mbit = 0 }").unwrap();
    let links = Links::new(&topology, &dead).unwrap();
    let error = plan(&topology, &links, &job("ranks = 2")).unwrap_err().to_string();
    assert!(
        error.ends_with("nothing passes the link from r0h1; measure again, or exclude these hosts")
    );
}

#[test]
fn a_step_that_would_take_decades_is_said_to() {
    let job = Job { bytes: u64::MAX, ..job("ranks = 2") };
    let error = planned(&cluster(&[&[1, 1]]), &job).unwrap_err().to_string();
    let cause = "each step would take more than 1e9 s; lower `bytes`, or measure the links again";
    assert!(error.ends_with(cause), "{error}");
}

#[test]
fn a_host_that_was_measured_elsewhere_is_named() {
    let place = |rack: &str| Place { labels: vec![rack.into()], age_s: 0.0 };
    let mut tree = Tree {
        levels: vec!["rack".into()],
        hosts: [("r0h0".into(), place("r1")), ("r0h1".into(), place("r0"))].into(),
    };
    let inventory = cluster(&[&[1, 1], &[1]]);
    let texts = |tree: &Tree| {
        misplaced(&inventory, tree).iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let text = "r0h0 counts as a host of r1, where it was measured; its labels say r0";
    assert_eq!(texts(&tree), [text]);
    tree.levels = vec!["tier1".into()];
    assert_eq!(texts(&tree), [""; 0]);
}
