//! Measures how fast and how well the placer plans in a cluster of 5,000 hosts. Run `cargo bench -p
//! racksum-benches --bench placement`.
//!
//! Each row is one kind of cluster. The time of a plan is the median over the clusters of the row,
//! and the gap is the worst excess of a step over its lower bound of all plans. An explanation is
//! for one cluster. The ranks per second are those of jobs that take their seats one after another.

use std::error::Error;
use std::fs;
use std::hint::black_box;

use racksum_net::clock::Clock;
use racksum_placer::explain::explain;
use racksum_placer::inventory::{Amount, Host, Inventory};
use racksum_placer::job::Job;
use racksum_placer::network::{LinkRecord, Links, Measurement, Network, PairRecord};
use racksum_placer::plan::{plan, plan_problem};
use racksum_placer::problem::Problem;
use racksum_placer::topology::Topology;
use racksum_proto::time::Span;
use racksum_sim::random::Random;

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench -- --test` runs everything once, as criterion does.
    let seeds = if std::env::args().any(|argument| argument == "--test") { 1 } else { SEEDS };
    let clock = Clock::start();
    println!("cluster   plan ms  worst gap %  explain ms  ranks/s  peak MB  plans in ms");
    for (name, has_pairs) in [("tree", false), ("measured", true)] {
        let clusters: Vec<_> = (0..seeds).map(|seed| Cluster::new(seed, has_pairs)).collect();
        let (mut times_ms, mut worst_gap) = (vec![], 0.0f64);
        for cluster in &clusters {
            let (time_s, gap) = cluster.plan(clock)?;
            times_ms.push(time_s * 1e3);
            worst_gap = worst_gap.max(gap);
        }
        let explain_ms = clusters[0].explain(clock)? * 1e3;
        times_ms.sort_unstable_by(f64::total_cmp);
        let jobs = if seeds == 1 { 1 } else { JOBS };
        let (ranks_per_s, gap_in_sequence) = clusters[0].ranks_per_s(clock, jobs)?;
        worst_gap = worst_gap.max(gap_in_sequence);
        let (plan_ms, gap, peak_mb) = (times_ms[times_ms.len() / 2], worst_gap * 100.0, peak_mb()?);
        print!("{name:<8}  {plan_ms:<7.1}  {gap:<11.2}  {explain_ms:<10.0}  ");
        println!("{ranks_per_s:<7.0}  {peak_mb:<7}  {times_ms:.0?}");
    }
    Ok(())
}

/// A cluster of zones, racks and hosts with eight GPUs each, all of whose links were measured.
struct Cluster {
    inventory: Inventory,
    network: Network,
}

impl Cluster {
    fn new(seed: u64, has_pairs: bool) -> Self {
        let mut random = Random::new(seed);
        let mut cluster = Self {
            inventory: Inventory { levels: vec!["zone".into(), "rack".into()], hosts: vec![] },
            network: Network::default(),
        };
        for zone in 0..ZONES {
            cluster.link(&mut random, format!("z{zone}"), 4_000_000, 200);
            for rack in 0..RACKS {
                cluster.link(&mut random, format!("z{zone}/r{rack}"), 400_000, 50);
                for host in 0..HOSTS {
                    let name = format!("z{zone}r{rack}h{host}");
                    cluster.link(&mut random, name.clone(), NIC_MBIT, 20);
                    let used = random.pick(&[0, 0, 0, 4, 8]);
                    cluster.inventory.hosts.push(Host {
                        name,
                        labels: [
                            ("zone".into(), format!("z{zone}")),
                            ("rack".into(), format!("r{rack}")),
                        ]
                        .into(),
                        nic_mbit: NIC_MBIT as f64,
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
        if has_pairs {
            cluster.add_pairs(&mut random);
        }
        cluster
    }

    fn link(&mut self, random: &mut Random, of: String, mbit: u64, rtt_us: u64) {
        let mut direction = || measured(random, mbit);
        let (up, down) = (Some(direction()), Some(direction()));
        let rtt_us = Some(random.within(rtt_us / 2..=rtt_us * 2) as f64);
        self.network.links.push(LinkRecord { of, up, down, rtt_us, rtt_p99_us: None });
    }

    /// Adds paths that may be slower than their links, from each host to some hosts of its zone.
    fn add_pairs(&mut self, random: &mut Random) {
        let (hosts, in_zone) = (ZONES * RACKS * HOSTS, RACKS * HOSTS);
        for from in 0..hosts {
            for _ in 0..SLOW_PATHS {
                let zone = from - from % in_zone;
                let to = zone + (from + random.within(1..=in_zone - 1)) % in_zone;
                let [from, to] = [from, to].map(|host| {
                    let (zone, host) = (host / in_zone, host % in_zone);
                    format!("z{zone}r{}h{}", host / HOSTS, host % HOSTS)
                });
                let mbit = random.pick(&[NIC_MBIT, NIC_MBIT / 4, NIC_MBIT / 20]);
                let path = measured(random, mbit);
                let rtt_us = Some(500.0);
                let record = PairRecord { from, to, path, rtt_us, rtt_p99_us: None };
                self.network.pairs.push(record);
            }
        }
        let pairs = &mut self.network.pairs;
        pairs.sort_by(|one, other| (&one.from, &one.to).cmp(&(&other.from, &other.to)));
        pairs.dedup_by(|one, other| (&one.from, &one.to) == (&other.from, &other.to));
    }

    /// Plans one large job. Returns the time that this took in seconds, and the excess of the step
    /// over its lower bound.
    fn plan(&self, clock: Clock) -> Result<(f64, f64), Box<dyn Error>> {
        let topology = Topology::new(&self.inventory)?;
        let links = Links::new(&topology, &self.network)?;
        let job = job(512, 16)?;
        let started = clock.now();
        let plan = plan(&topology, &links, &job)?;
        Ok((seconds(clock.now().since(started)), plan.gap().unwrap_or(f64::INFINITY)))
    }

    /// Returns the time that the explanation of a plan takes, in seconds.
    fn explain(&self, clock: Clock) -> Result<f64, Box<dyn Error>> {
        let topology = Topology::new(&self.inventory)?;
        let links = Links::new(&topology, &self.network)?;
        let problem = Problem::new(&topology, &links, &job(512, 16)?)?;
        let plan = plan_problem(&problem)?;
        let started = clock.now();
        black_box(explain(&problem, &plan));
        Ok(seconds(clock.now().since(started)))
    }

    /// Plans jobs one after another, each of which takes its seats. Returns the ranks per
    /// second, and the greatest excess of a step over its lower bound.
    fn ranks_per_s(&self, clock: Clock, jobs: u32) -> Result<(f64, f64), Box<dyn Error>> {
        let mut topology = Topology::new(&self.inventory)?;
        let links = Links::new(&topology, &self.network)?;
        let (mut ranks, mut worst_gap) = (0, 0.0f64);
        let started = clock.now();
        for number in 0..jobs {
            let job = job([32, 64, 128, 256, 512][number as usize % 5], 1 + number % 16)?;
            let plan = plan(&topology, &links, &job)?;
            plan.occupy(&mut topology, &job);
            ranks += job.ranks;
            worst_gap = worst_gap.max(plan.gap().unwrap_or(f64::INFINITY));
        }
        Ok((f64::from(ranks) / seconds(clock.now().since(started)), worst_gap))
    }
}

fn seconds(span: Span) -> f64 {
    span.0 as f64 / 1e9
}

fn job(ranks: u32, aggregators: u32) -> Result<Job, serde_json::Error> {
    serde_json::from_value(serde_json::json!({
        "name": "job",
        "ranks": ranks,
        "gpus_per_rank": 1,
        "cpus_per_rank": 4,
        "aggregators": aggregators,
        "cpus_per_aggregator": 4,
        "bytes": 1_000_000_000u64,
    }))
}

fn measured(random: &mut Random, mbit: u64) -> Measurement {
    Measurement {
        mbit: random.within(mbit / 2..=mbit) as f64,
        loss: random.pick(&[0.0, 0.0, 0.0, 0.001]),
        age_s: random.within(0..=86_400) as f64,
        confidence: 1.0,
        is_inferred: false,
        is_least: false,
    }
}

/// Returns the peak of this process' resident memory in MB.
fn peak_mb() -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")).ok_or("no VmHWM")?;
    Ok(kib.trim().parse::<u64>()? * 1024 / 1_000_000)
}

const SEEDS: u64 = 5;
const JOBS: u32 = 100;
const ZONES: u64 = 5;
const RACKS: u64 = 25;
const HOSTS: u64 = 40;
const NIC_MBIT: u64 = 25_000;
/// Slow paths from each host.
const SLOW_PATHS: u64 = 40;
