//! The lower bound of large clusters, whose best step no test can find.

use crate::inventory::{Amount, Host, Inventory};
use crate::job::Job;
use crate::network::{LinkRecord, Links, Measurement, Network};
use crate::plan::plan;
use crate::topology::Topology;

/// Random numbers: splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % most
    }
}

/// Returns five zones with racks of hosts, all of whose links were measured. Round trips differ by
/// a factor of four, and rates by two.
fn cluster(random: &mut Random, (racks, hosts): (u64, u64)) -> (Inventory, Network) {
    let mut inventory = Inventory { levels: vec!["zone".into(), "rack".into()], hosts: vec![] };
    let mut links = vec![];
    let mut link = |random: &mut Random, of: String, mbit: u64, rtt_us: u64| {
        let mut measured = || Measurement {
            mbit: (mbit / 2 + random.below(mbit / 2)) as f64,
            loss: 0.0,
            age_s: 0.0,
            confidence: 1.0,
            is_inferred: false,
            is_least: false,
        };
        let (up, down) = (Some(measured()), Some(measured()));
        let rtt_us = Some((rtt_us / 2 + random.below(rtt_us * 3 / 2)) as f64);
        links.push(LinkRecord { of, up, down, rtt_us });
    };
    for zone in 0..5 {
        link(random, format!("z{zone}"), 4_000_000, 200);
        for rack in 0..racks {
            link(random, format!("z{zone}/r{rack}"), 400_000, 50);
            for host in 0..hosts {
                let name = format!("z{zone}r{rack}h{host}");
                link(random, name.clone(), 25_000, 20);
                let used = [0, 0, 0, 4, 8][random.below(5) as usize];
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
    let (inventory, network) = cluster(&mut Random(0), (25, 40));
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
