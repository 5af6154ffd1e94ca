//! Properties of plans that hold whatever the measurements are.

use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::{Instance, Shape, instances};
use crate::job::{Auto, Setting};
use crate::network::{LinkRecord, Measurement};
use crate::placement::Placement;
use crate::plan::{Plan, PlanError, plan};
use crate::running::RunningJob;

const SMALL: Shape = Shape { hosts: 1..=9, ranks: 1..=6, aggregators: 1..=2 };

fn plan_of(instance: &Instance) -> Result<Plan, PlanError> {
    let topology = instance.topology();
    plan(&topology, &instance.links(&topology), &instance.job)
}

/// An odd factor, so that different numbers have different products.
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Makes the links of a host worse. The host keeps all measurements that it has.
fn degrade(instance: &mut Instance, host: usize, factor: f64, more_loss: f64, more_rtt_us: f64) {
    let name = instance.inventory.hosts[host].name.clone();
    let nic_mbit = instance.inventory.hosts[host].nic_mbit;
    let links = &mut instance.network.links;
    if !links.iter().any(|link| link.of == name) {
        let of = name.clone();
        links.push(LinkRecord { of, up: None, down: None, rtt_us: None, rtt_p99_us: None });
    }
    let link = links.iter_mut().find(|link| link.of == name).expect("added above");
    for way in [&mut link.up, &mut link.down] {
        // Without a measurement the nominal rate counts, less what headers take.
        let nominal = Measurement {
            mbit: nic_mbit * 0.94,
            loss: 0.0,
            age_s: 0.0,
            confidence: 1.0,
            is_inferred: false,
            is_least: false,
        };
        let measured = way.get_or_insert(nominal);
        measured.mbit *= factor;
        measured.loss = (measured.loss + more_loss).min(1.0);
    }
    link.rtt_us = Some(link.rtt_us.unwrap_or(0.0) + more_rtt_us);
}

/// Returns whether a job has aggregators in racks.
fn racks() -> impl Strategy<Value = Setting<bool>> {
    select(vec![Setting::Given(false), Setting::Given(false), Setting::Auto(Auto::Auto)])
}

/// Returns the factor of a worse rate, and what is added to loss and round trip.
fn worse() -> impl Strategy<Value = (f64, f64, f64)> {
    let factor = prop_oneof![4 => 0.1..=1.0, 1 => Just(0.0)];
    let more_loss = prop_oneof![4 => 0.0..=0.1, 1 => Just(1.0)];
    (factor, more_loss, 0.0..=1000.0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_host_that_becomes_worse_is_never_preferred(
        instance in instances(SMALL),
        racks in racks(),
        host: Index,
        (factor, more_loss, more_rtt_us) in worse(),
    ) {
        let mut instance = instance;
        instance.job.racks = racks;
        let host = host.index(instance.inventory.hosts.len());
        let mut worse = instance.clone();
        degrade(&mut worse, host, factor, more_loss, more_rtt_us);
        let (before, after) = (plan_of(&instance), plan_of(&worse));
        if let (Ok(before), Ok(after)) = (&before, &after) {
            prop_assert!(after.time.total_s() >= before.time.total_s() * (1.0 - 1e-8));
            let topology = instance.topology();
            let name = &instance.inventory.hosts[host].name;
            let place = topology.hosts().iter().position(|host| host.name == *name).unwrap();
            let used = |Plan { placement, tree, .. }: &Plan| {
                let of_racks = tree.as_ref().map_or(&[][..], |tree| &tree.racks);
                let has_rack_aggregator = of_racks.iter().any(|host| host.0 == place);
                placement.uses(place) || has_rack_aggregator
            };
            prop_assert!(used(before) || !used(after), "{before:?} {after:?}");
        }
        prop_assert!(before.is_ok() || after.is_err());
    }

    #[test]
    fn a_domain_whose_links_other_jobs_load_more_is_never_preferred(
        instance in instances(SMALL),
        (factor, job) in (2..=50u64, any::<Index>()),
    ) {
        let mut busier = instance.clone();
        let topology = instance.topology();
        let jobs = &mut busier.running.jobs;
        if jobs.is_empty() {
            return Ok(());
        }
        let index = job.index(jobs.len());
        jobs[index].job.bytes *= factor;
        let RunningJob { job, placement, .. } = jobs[index].clone();
        let (before, after) = (plan_of(&instance), plan_of(&busier));
        // The links between the hosts of the job are in the narrowest domain that contains these.
        let placement = Placement::of_record(&topology, &job, &placement).unwrap();
        let hosts = placement.hosts().map(|(host, _, _)| topology.leaf(host));
        let domain = hosts.reduce(|one, other| topology.meet(one, other)).unwrap();
        if let (Ok(before), Ok(after)) = (&before, &after) {
            prop_assert!(after.time.total_s() >= before.time.total_s() * (1.0 - 1e-8));
            let hosts = topology.hosts_of(domain);
            let uses = |plan: &Plan| hosts.clone().any(|host| plan.placement.uses(host));
            prop_assert!(uses(before) || !uses(after), "{before:?} {after:?}");
        }
        prop_assert!(before.is_ok() || after.is_err());
    }

    #[test]
    fn names_and_order_of_hosts_do_not_matter(
        instance in instances(SMALL),
        seed in any::<u64>(),
    ) {
        let mut renamed = instance.clone();
        let new_name = |name: &str| {
            let number = name.strip_prefix('h').and_then(|number| number.parse::<u64>().ok());
            // Domains keep their names.
            number.map_or_else(|| name.into(), |n| format!("node-{}", (n ^ seed).wrapping_mul(ODD)))
        };
        for host in &mut renamed.inventory.hosts {
            host.name = new_name(&host.name);
        }
        for link in &mut renamed.network.links {
            link.of = new_name(&link.of);
        }
        for host in renamed.running.jobs.iter_mut().flat_map(|job| &mut job.placement.hosts) {
            host.host = new_name(&host.host);
        }
        for pair in &mut renamed.network.pairs {
            (pair.from, pair.to) = (new_name(&pair.from), new_name(&pair.to));
        }
        renamed.inventory.hosts.reverse();
        match (plan_of(&instance), plan_of(&renamed)) {
            (Ok(one), Ok(other)) => {
                let (one_s, other_s) = (one.time.total_s(), other.time.total_s());
                prop_assert!((one_s - other_s).abs() <= 1e-8 * one_s, "{one_s} {other_s}");
            }
            (one, other) => prop_assert_eq!(one.is_ok(), other.is_ok()),
        }
    }

    #[test]
    fn the_same_input_gives_the_same_plan(instance in instances(SMALL)) {
        prop_assert_eq!(plan_of(&instance), plan_of(&instance));
    }
}
