//! Standbys against all placements of their aggregators.

use proptest::prelude::*;
use proptest::sample::select;

use super::optimum::for_each_choice;
use super::vectors::{cluster, job, planned};
use super::{Shape, instances};
use crate::job::Job;
use crate::model::step_time;
use crate::placement::Placement;
use crate::plan::{PlanError, plan_problem};
use crate::problem::Problem;
use crate::topology::{HostId, Topology};

/// Returns the name of a host's domain at a level, or its own name at the level `host`.
fn domain_at(topology: &Topology, host: usize, level: &str) -> String {
    let host = topology.host(HostId(host));
    host.labels.get(level).filter(|_| level != "host").unwrap_or(&host.name).clone()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_standby_has_the_shortest_step_outside_the_domains_of_other_aggregators(
        mut instance in instances(Shape { hosts: 2..=9, ranks: 1..=6, aggregators: 1..=2 }),
        level in select(vec!["host", "zone"]),
    ) {
        let level = if instance.inventory.levels.is_empty() { "host" } else { level };
        instance.job.standbys = 1;
        instance.job.standby_level = Some(level.into());
        let topology = instance.topology();
        let links = instance.links(&topology);
        let problem = Problem::new(&topology, &links, &instance.job).unwrap();
        let job = Job { standbys: 0, standby_level: None, ..instance.job.clone() };
        let alone = Problem::new(&topology, &links, &job).unwrap();
        let Ok(alone) = plan_problem(&alone) else { return Ok(()) };
        let mut least_s = f64::INFINITY;
        let hosts = topology.hosts().len();
        for_each_choice(hosts, problem.traffic.aggregators, &mut |aggregators| {
            let is_apart = |host: usize| {
                let holds = |other: usize| alone.placement.aggregators[other] > 0;
                let is_same = |other: usize| {
                    domain_at(&topology, host, level) == domain_at(&topology, other, level)
                };
                aggregators[host] == 0 || !(0..hosts).any(|other| holds(other) && is_same(other))
            };
            let ranks = alone.placement.ranks.clone();
            let placement = Placement { ranks, aggregators: aggregators.into() };
            if problem.allows(&placement) && (0..hosts).all(is_apart) {
                least_s = least_s.min(step_time(&problem, &placement).total_s());
            }
        });
        match plan_problem(&problem) {
            Ok(plan) => {
                prop_assert_eq!(&plan.placement, &alone.placement);
                let standby_s = plan.standbys[0].time.total_s();
                let difference_s = (standby_s - least_s).abs();
                prop_assert!(difference_s <= least_s * 1e-8, "{standby_s} {least_s}");
            }
            Err(error) => {
                prop_assert!(matches!(error, PlanError::NoStandby { .. }), "{error}");
                prop_assert!(least_s.is_infinite(), "{least_s}");
            }
        }
    }
}

#[test]
fn standbys_are_apart_from_each_other_too() {
    let inventory = cluster(&[&[1, 1], &[1, 1], &[1, 1]]);
    let with = |standbys: u32| job(&format!("ranks = 2\nstandbys = {standbys}"));
    let plan = planned(&inventory, &with(2)).unwrap();
    let sets = std::iter::once(&plan.placement.aggregators);
    let sets = sets.chain(plan.standbys.iter().map(|standby| &standby.aggregators));
    let racks: Vec<_> =
        sets.map(|set| set.iter().position(|count| *count > 0).unwrap() / 2).collect();
    assert_eq!(racks, [0, 1, 2]);
    let error = planned(&inventory, &with(3)).unwrap_err().to_string();
    assert_eq!(
        error,
        "job \"job\": no placement of standby 3 found outside each rack with aggregators; set \
         `standby_level` to \"host\", or lower `standbys`"
    );
    let error = |text: &str| planned(&cluster(&[&[1, 1]]), &job(text)).unwrap_err().to_string();
    let advice = "outside each host with aggregators; lower `standbys`, or add hosts that can run \
                  aggregators";
    let found = error("ranks = 2\nstandbys = 2\nstandby_level = 'host'");
    assert!(found.ends_with(advice), "{found}");
    let advice = "with aggregators; without `only`, all standbys have hosts";
    let found =
        error("ranks = 1\nstandbys = 1\nstandby_level = 'host'\nonly = [{ host = 'r0h0' }]");
    assert!(found.ends_with(advice), "{found}");
}

#[test]
fn contradictory_standbys_are_errors() {
    let error = |text: &str| planned(&cluster(&[&[1]]), &job(text)).unwrap_err().to_string();
    assert_eq!(
        error("ranks = 1\nstandby_level = 'rack'"),
        "job \"job\": standby_level is given, but standbys is 0; raise standbys"
    );
    assert_eq!(
        error("ranks = 1\nstandbys = 1\nstandby_level = 'row'"),
        "job \"job\": unknown level \"row\"; the inventory has rack"
    );
    assert_eq!(
        error("ranks = 1\nstandbys = 9"),
        "job \"job\": standbys is 9; it must be from 0 to 8"
    );
}
