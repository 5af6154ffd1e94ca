//! Tests of whole plans, on random clusters.

mod bound;
mod edge_cases;
mod explain;
mod optimum;
mod order;
mod racks;
mod rebalance;
mod standby;
pub(crate) mod vectors;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use proptest::collection::{btree_map, vec};
use proptest::option::{of, weighted};
use proptest::prelude::*;
use proptest::sample::select;

use crate::inventory::{Amount, Host, Inventory};
use crate::job::Job;
use crate::network::{LinkRecord, Links, Measurement, Network, PairRecord};
use crate::placement::{HostRecord, PlacementRecord};
use crate::running::{RunningJob, RunningJobs, remaining};
use crate::topology::Topology;

/// A cluster, what is known about its links, and a job.
#[derive(Debug, Clone)]
struct Instance {
    inventory: Inventory,
    network: Network,
    job: Job,
    running: RunningJobs,
}

impl Instance {
    fn topology(&self) -> Topology {
        Topology::new(&self.inventory).unwrap()
    }

    fn links(&self, topology: &Topology) -> Links {
        let links = Links::new(topology, &self.network).unwrap();
        remaining(topology, &links, &self.running).unwrap()
    }
}

/// How large and how irregular random clusters are.
#[derive(Debug, Clone)]
struct Shape {
    hosts: RangeInclusive<usize>,
    ranks: RangeInclusive<u32>,
    aggregators: RangeInclusive<u32>,
}

fn instances(shape: Shape) -> impl Strategy<Value = Instance> {
    let Shape { hosts, ranks, aggregators } = shape;
    let levels = select(vec![vec![], vec!["zone"], vec!["zone", "rack"]]);
    (levels, hosts, any::<bool>()).prop_flat_map(move |(levels, hosts, is_uniform)| {
        let inventory = inventory(&levels, hosts, is_uniform);
        let job = job(ranks.clone(), aggregators.clone(), !levels.is_empty());
        let network = network(hosts, if is_uniform { 0 } else { 6 });
        let running = vec(running(hosts), 0..=2);
        let parts = (inventory, network, job, running);
        parts.prop_map(|(inventory, mut network, job, mut running)| {
            let topology = Topology::new(&inventory).unwrap();
            network.links.retain(|link| topology.vertex(&link.of).is_some());
            network.pairs.retain(|pair| pair.from != pair.to);
            for (number, running) in running.iter_mut().enumerate() {
                running.job.name = format!("running{number}");
            }
            Instance { inventory, network, job, running: RunningJobs { jobs: running } }
        })
    })
}

fn inventory(
    levels: &[&'static str],
    hosts: usize,
    is_uniform: bool,
) -> impl Strategy<Value = Inventory> + use<> {
    let levels: Vec<String> = levels.iter().map(ToString::to_string).collect();
    vec(host(is_uniform), hosts).prop_map(move |mut hosts| {
        for (number, host) in hosts.iter_mut().enumerate() {
            host.name = format!("h{number}");
        }
        Inventory { levels: levels.clone(), hosts }
    })
}

fn host(is_uniform: bool) -> impl Strategy<Value = Host> {
    let labels = (select(vec!["a", "b"]), select(vec!["r1", "r2"])).prop_map(|(zone, rack)| {
        BTreeMap::from([("zone".into(), zone.into()), ("rack".into(), rack.into())])
    });
    let nic_mbit = if is_uniform { vec![100.0] } else { vec![10.0, 40.0, 100.0, 1000.0] };
    let (cpus, gpus) = if is_uniform { (0..=0u32, 2..=2u32) } else { (0..=8, 0..=4) };
    let taints = weighted(0.05, Just("maintenance".into())).prop_map(Vec::from_iter);
    let max_aggregators = weighted(0.3, 0..=2u32);
    let max_aggregators = max_aggregators.prop_map(move |most| most.filter(|_| !is_uniform));
    (labels, select(nic_mbit), cpus, gpus, taints, max_aggregators).prop_map(
        |(labels, nic_mbit, used, gpus, taints, max_aggregators)| Host {
            name: String::new(),
            labels,
            address: None,
            nic_mbit,
            cpus: Amount { total: 8, used },
            gpus: [("h100".into(), Amount { total: gpus, used: 0 })].into(),
            aggregator: None,
            taints,
            max_aggregators,
        },
    )
}

fn network(hosts: usize, most_pairs: usize) -> impl Strategy<Value = Network> {
    let host = move || (0..hosts).prop_map(|number| format!("h{number}"));
    let domain = select(vec!["a", "b", "a/r1", "a/r2", "b/r1", "b/r2"]).prop_map(Into::into);
    let rtt = || of(select(vec![50.0, 1000.0, 500_000.0]));
    let links = btree_map(
        prop_oneof![host(), domain],
        (weighted(0.8, measurement()), weighted(0.8, measurement()), rtt()),
        0..=hosts,
    );
    let links = links.prop_map(|links| {
        let record =
            |(of, (up, down, rtt_us))| LinkRecord { of, up, down, rtt_us, rtt_p99_us: None };
        links.into_iter().map(record).collect::<Vec<_>>()
    });
    let pairs = btree_map((host(), host()), (measurement(), rtt()), 0..=most_pairs);
    let pairs = pairs.prop_map(|pairs| {
        let record =
            |((from, to), (path, rtt_us))| PairRecord { from, to, path, rtt_us, rtt_p99_us: None };
        pairs.into_iter().map(record).collect()
    });
    (links, pairs).prop_map(|(links, pairs)| Network {
        half_life_s: 1000.0,
        links,
        pairs,
        ..Network::default()
    })
}

/// Returns a job that runs on some hosts, with one aggregator.
fn running(hosts: usize) -> impl Strategy<Value = RunningJob> {
    let ranks = vec(0..hosts, 1..=4);
    let period_s = of(select(vec![0.1, 1.0, 100.0]));
    (ranks, 0..hosts, period_s).prop_map(move |(ranks, aggregator, period_s)| {
        let job = format!("name = 'running'\nranks = {}\nbytes = 1_000_000", ranks.len());
        let host = |number: usize| HostRecord {
            host: format!("h{number}"),
            ranks: (0..).zip(&ranks).filter(|(_, host)| **host == number).map(|(r, _)| r).collect(),
            aggregators: u32::from(number == aggregator),
        };
        let used = |number: &usize| *number == aggregator || ranks.contains(number);
        let hosts = (0..hosts).filter(used).map(host).collect();
        let placement = PlacementRecord { hosts, racks: vec![], standbys: vec![] };
        RunningJob { job: toml::from_str(&job).unwrap(), placement, period_s }
    })
}

fn measurement() -> impl Strategy<Value = Measurement> {
    let mbit = select(vec![0.0, 5.0, 20.0, 50.0, 80.0, 500.0]);
    let loss = select(vec![0.0, 0.0, 0.001, 0.01, 0.05]);
    let age_s = select(vec![0.0, 500.0]);
    let confidence = select(vec![1.0, 0.5]);
    (mbit, loss, age_s, confidence).prop_map(|(mbit, loss, age_s, confidence)| Measurement {
        mbit,
        loss,
        age_s,
        confidence,
        is_inferred: false,
        is_least: false,
    })
}

fn job(
    ranks: RangeInclusive<u32>,
    aggregators: RangeInclusive<u32>,
    has_zones: bool,
) -> impl Strategy<Value = Job> {
    let densities = select(vec![(1.0, 1.0), (0.01, 0.01), (0.01, 0.5), (0.3, 1.0)]);
    // Round trips decide over small messages, and rates over large ones.
    let bytes = select(vec![1_000, 10_000, 1_000_000, 10_000_000]);
    let traffic = (densities, any::<bool>(), bytes);
    let needs = (select(vec![0, 1, 1, 2]), 0..=1u32, select(vec![0, 2, 4]));
    let limits = (weighted(0.2, Just(1)), weighted(0.2, 1..=4u32), weighted(0.3, Just(())));
    (ranks, aggregators, traffic, needs, limits).prop_map(
        move |(ranks, aggregators, traffic, needs, limits)| {
            let limit = limits.1.filter(|_| has_zones);
            Job {
                ranks,
                aggregators: aggregators.into(),
                own_density: traffic.0.0,
                union_density: traffic.0.1,
                is_multicast: traffic.1,
                bytes: traffic.2,
                gpus_per_rank: needs.0,
                cpus_per_rank: needs.1,
                cpus_per_aggregator: needs.2,
                max_ranks_per_host: limits.0,
                max_ranks_per_domain: limit
                    .map(|limit| ("zone".into(), limit))
                    .into_iter()
                    .collect(),
                has_dedicated_aggregators: limits.2.is_some(),
                // Prefer the shortest step to the narrowest domain.
                widen_gain: 0.0,
                ..toml::from_str("name = 'job'\nranks = 1\nbytes = 1").unwrap()
            }
        },
    )
}
