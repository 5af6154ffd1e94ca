//! The lower bound of large clusters, whose best step no test can find.

use fastrand::Rng;

use crate::inventory::{Amount, Host, Inventory};
use crate::job::Job;
use crate::network::{LinkRecord, Links, Measurement, Network};
use crate::plan::plan;
use crate::topology::Topology;

/// Returns five zones with racks of hosts, all of whose links were measured. Round trips differ by
/// a factor of four, and rates by two.
fn cluster(random: &mut Rng, (racks, hosts): (u32, u32)) -> (Inventory, Network) {
    let mut inventory = Inventory { levels: vec!["zone".into(), "rack".into()], hosts: vec![] };
    let mut links = vec![];
    let mut link = |random: &mut Rng, of: String, mbit: u32, rtt_us: u32| {
        let mut measured = || Measurement {
            mbit: f64::from(mbit) * (0.5 + random.f64() / 2.0),
            loss: 0.0,
            age_s: 0.0,
            confidence: 1.0,
            is_inferred: false,
            is_least: false,
        };
        let (up, down) = (Some(measured()), Some(measured()));
        let rtt_us = Some(f64::from(rtt_us) * (0.5 + random.f64() * 1.5));
        links.push(LinkRecord { of, up, down, rtt_us, rtt_p99_us: None });
    };
    for zone in 0..5 {
        link(random, format!("z{zone}"), 4_000_000, 200);
        for rack in 0..racks {
            link(random, format!("z{zone}/r{rack}"), 400_000, 50);
            for host in 0..hosts {
                let name = format!("z{zone}r{rack}h{host}");
                link(random, name.clone(), 25_000, 20);
                let used = [0, 0, 0, 4, 8][random.usize(..5)];
                let labels = [("zone", format!("z{zone}")), ("rack", format!("r{rack}"))]
                    .map(|(key, of)| (key.into(), of));
                inventory.hosts.push(Host {
                    name,
                    labels: labels.into(),
                    nic_mbit: 25_000.0,
                    cpus: Amount { total: 64, used: 0 },
                    gpus: [("h100".into(), Amount { total: 8, used })].into(),
                    address: None,
                    aggregator: None,
                    taints: vec![],
                    max_aggregators: None,
                });
            }
        }
    }
    (inventory, Network { links, ..Network::default() })
}

#[test]
fn plans_are_close_to_the_bound_whatever_the_size_of_messages() {
    let (inventory, network) = cluster(&mut Rng::with_seed(0), (25, 40));
    let topology = Topology::new(&inventory).unwrap();
    let links = Links::new(&topology, &network).unwrap();
    for (bytes, most) in [(1_000, 0.15), (10_000, 0.10), (100_000, 0.05), (1_000_000_000, 0.001)] {
        let job: Job = toml::from_str(&format!(
            "name = 'job'\nranks = 512\ngpus_per_rank = 1\ncpus_per_rank = 4\naggregators = 16\n\
             cpus_per_aggregator = 4\nbytes = {bytes}"
        ))
        .unwrap();
        let plan = plan(&topology, &links, &job).unwrap();
        let gap = plan.gap().unwrap();
        assert!(gap <= most, "{bytes} bytes: {:?}, gap {gap:.4}", plan.time);
    }
}
