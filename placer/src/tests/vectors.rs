//! Placements that the documents and issues of other schedulers describe.
//!
//! Where racksum chooses another placement, the test says why.

use crate::inventory::{Amount, Host, Inventory};
use crate::job::Job;
use crate::model::step_time;
use crate::network::{Links, Network};
use crate::placement::Placement;
use crate::plan::{Plan, PlanError, plan};
use crate::problem::Problem;
use crate::topology::{HostId, Topology};

/// Returns a cluster of racks whose hosts have these numbers of free GPUs.
pub(crate) fn cluster(racks: &[&[u32]]) -> Inventory {
    let host = |rack: usize, (number, gpus): (usize, &u32)| Host {
        name: format!("r{rack}h{number}"),
        labels: [("rack".into(), format!("r{rack}"))].into(),
        address: None,
        nic_mbit: 100.0,
        cpus: Amount { total: *gpus, used: 0 },
        gpus: [("h100".into(), Amount { total: *gpus, used: 0 })].into(),
        aggregator: None,
        taints: vec![],
        max_aggregators: None,
    };
    let racks = racks.iter().enumerate();
    let hosts =
        racks.flat_map(|(rack, hosts)| hosts.iter().enumerate().map(move |h| host(rack, h)));
    Inventory { levels: vec!["rack".into()], hosts: hosts.collect() }
}

pub(crate) fn job(text: &str) -> Job {
    toml::from_str(&format!("name = 'job'\ngpus_per_rank = 1\nbytes = 1_000_000\n{text}")).unwrap()
}

pub(super) fn planned(inventory: &Inventory, job: &Job) -> Result<Plan, PlanError> {
    let topology = Topology::new(inventory).unwrap();
    let links = Links::new(&topology, &Network::default()).unwrap();
    plan(&topology, &links, job)
}

fn ranks(racks: &[&[u32]], text: &str) -> Vec<u32> {
    planned(&cluster(racks), &job(text)).unwrap().placement.ranks
}

/// Returns the step time in seconds with these ranks per host and the aggregator on host 0.
fn step_s(racks: &[&[u32]], text: &str, ranks: &[u32]) -> f64 {
    let topology = Topology::new(&cluster(racks)).unwrap();
    let links = Links::new(&topology, &Network::default()).unwrap();
    let problem = Problem::new(&topology, &links, &job(text)).unwrap();
    let mut aggregators = vec![0; ranks.len()];
    aggregators[0] = 1;
    step_time(&problem, &Placement { ranks: ranks.into(), aggregators }).total_s()
}

/// Kueue spreads evenly over the fewest hosts. racksum fills the host of the aggregator, since the
/// ranks on other hosts decide how long a step takes.
#[test]
fn kueue_balanced() {
    let racks: &[&[u32]] = &[&[15], &[15]];
    assert_eq!(ranks(racks, "ranks = 25"), [15, 10]);
    let balanced_s = step_s(racks, "ranks = 25", &[13, 12]);
    assert!((step_s(racks, "ranks = 25", &[15, 10]) / balanced_s - 10.0 / 12.0).abs() < 1e-9);

    // The last host is the smallest that fits.
    assert_eq!(ranks(&[&[15, 13, 10]], "ranks = 23"), [15, 0, 8]);
    assert_eq!(ranks(&[&[20, 10], &[15, 15]], "ranks = 22"), [20, 2, 0, 0]);
    // As in Kueue.
    assert_eq!(ranks(&[&[20, 10], &[15, 15]], "ranks = 20"), [20, 0, 0, 0]);
    assert_eq!(ranks(&[&[10, 5], &[5, 5, 5]], "ranks = 15"), [10, 5, 0, 0, 0]);
    // As in Kueue: only the third rack has room for all. racksum has no slices, but 15 and 10 are
    // whole slices of 5.
    let within = "ranks = 25\nscope = 'rack'";
    assert_eq!(ranks(&[&[15], &[15], &[15, 15]], within), [0, 0, 15, 10]);
}

/// The leader of Kueue's vector is an aggregator here. A rank needs two cores and an aggregator
/// three, so that hosts of two cores have room for a rank but not for an aggregator.
#[test]
fn kueue_leader_and_workers() {
    let mut inventory = cluster(&[&[9], &[1; 6], &[4], &[1; 2]]);
    for host in &mut inventory.hosts {
        let gpus = host.gpus["h100"].total;
        host.cpus.total = if gpus == 1 { 2 } else { 2 * gpus + 1 };
    }
    let job = |ranks: u32| Job {
        cpus_per_rank: 2,
        cpus_per_aggregator: 3,
        ..job(&format!("ranks = {ranks}"))
    };
    let racks = |ranks: u32| {
        let placed = planned(&inventory, &job(ranks)).unwrap().placement.ranks;
        [0..1, 1..7, 7..8, 8..10].map(|hosts| placed[hosts].iter().sum::<u32>())
    };
    assert_eq!(racks(5), [5, 0, 0, 0]);
    // Kueue takes the second and the third domain, which fit more tightly. racksum puts eight ranks
    // beside the aggregator, so that only one sends over a link.
    assert_eq!(racks(9), [8, 0, 0, 1]);
    assert_eq!(racks(10), [8, 0, 0, 2]);
    let PlanError::Room { room: 21, .. } = planned(&inventory, &job(22)).unwrap_err() else {
        panic!("21 ranks fit")
    };
}

#[test]
fn kueue_multi_layer() {
    assert_eq!(ranks(&[&[8; 4], &[8; 4]], "ranks = 64"), [8; 8]);
}

/// Kueue issue 3533: ranks of one rack have consecutive numbers.
#[test]
fn a_ring_of_all_ranks_crosses_racks_as_rarely_as_possible() {
    let inventory = cluster(&[&[1; 4], &[1; 4], &[1; 4]]);
    let topology = Topology::new(&inventory).unwrap();
    let plan = planned(&inventory, &job("ranks = 10")).unwrap();
    let racks: Vec<_> = plan
        .placement
        .hosts()
        .flat_map(|(host, ranks, _)| ranks.map(move |_| host))
        .map(|host| topology.domain_of(host))
        .collect();
    let next = racks.iter().cycle().skip(1);
    assert_eq!(racks.iter().zip(next).filter(|(one, other)| one != other).count(), 3);
}

/// Volcano issues 5205 and 4343.
#[test]
fn volcano_pairs() {
    let apart = "ranks = 2\nmax_ranks_per_host = 1\nscope = 'rack'";
    assert_eq!(ranks(&[&[1, 1], &[1, 0], &[1, 0]], apart), [1, 1, 0, 0, 0, 0]);
    let mut pairs = ranks(&[&[1, 1], &[1, 1], &[1, 1]], "ranks = 4");
    let mut pairs: Vec<_> = pairs.chunks_mut(2).map(|pair| pair.iter().sum::<u32>()).collect();
    pairs.sort_unstable();
    assert_eq!(pairs, [0, 2, 2]);
}

/// Both zones of KAI's vector do equally well here, so the first one is chosen, as in KAI.
#[test]
fn kai_zone_and_rack() {
    let mut inventory = cluster(&[&[2], &[1], &[1], &[1], &[2], &[2], &[2]]);
    inventory.levels.insert(0, "zone".into());
    for (number, host) in inventory.hosts.iter_mut().enumerate() {
        let zone = if number < 4 { "a" } else { "b" };
        host.labels.insert("zone".into(), zone.into());
    }
    let job = job("ranks = 3\nscope = 'zone'\nrequires_scope = true");
    let ranks = planned(&inventory, &job).unwrap().placement.ranks;
    assert_eq!((ranks[0], ranks[1..4].iter().sum()), (2, 1u32));
}

/// Koordinator fills the second block from its first host; here, the smallest host that fits comes
/// last. racksum has no multiples of blocks.
#[test]
fn koordinator_blocks() {
    assert_eq!(ranks(&[&[5, 7], &[6, 4]], "ranks = 15"), [5, 7, 0, 3]);
}

/// Slurm's block topology: blocks of four hosts, and sizes 4 and 8.
///
/// racksum has no segments: Slurm's `--segment=2` asks for pairs of hosts in one block each. A
/// limit per block is the nearest constraint. It refuses 5 ranks because blocks have room for 4,
/// and Slurm refuses them because 5 is not a multiple of 2.
#[test]
fn slurm_blocks() {
    let job = |ranks: u32| job(&format!("ranks = {ranks}\nscope = 'rack'\nrequires_scope = true"));
    let run = |inventory: &mut Inventory, job: &Job| {
        let placement = planned(inventory, job)?.placement;
        for (host, ranks) in inventory.hosts.iter_mut().zip(&placement.ranks) {
            host.gpus.get_mut("h100").unwrap().used += ranks;
        }
        Ok::<_, PlanError>(placement.ranks)
    };
    let empty = cluster(&[&[1; 4], &[1; 4]]);
    // A job that fits in one block does not get parts of two.
    let mut inventory = empty.clone();
    run(&mut inventory, &job(2)).unwrap();
    run(&mut inventory, &job(3)).unwrap();
    let error = run(&mut inventory, &job(3)).unwrap_err().to_string();
    assert_eq!(
        error,
        "job \"job\" has 3 ranks, and there is room for 2 in one rack; without `scope`, all fit; \
         without other jobs, all fit"
    );
    // A job of more than one block may span blocks. In Slurm, the size of the job says so; here,
    // the job itself does.
    let mut inventory = empty.clone();
    run(&mut inventory, &job(3)).unwrap();
    let wide = Job { requires_scope: false, ..job(5) };
    let ranks = run(&mut inventory, &wide).unwrap();
    assert_eq!(ranks.iter().sum::<u32>(), 5);
    // Segments.
    let limit = |ranks: u32| Job {
        requires_scope: false,
        max_ranks_per_domain: [("rack".into(), 2)].into(),
        ..job(ranks)
    };
    let ranks = run(&mut empty.clone(), &limit(4)).unwrap();
    assert_eq!((ranks[..4].iter().sum(), ranks[4..].iter().sum()), (2u32, 2u32));
    let PlanError::Room { room: 4, .. } = run(&mut empty.clone(), &limit(5)).unwrap_err() else {
        panic!("blocks have room for 4 ranks")
    };
}

/// GKE orders pairs of hosts by the widest level in which they differ.
#[test]
fn gke_distance() {
    let inventory = cluster(&[&[1, 1], &[1]]);
    let topology = Topology::new(&inventory).unwrap();
    let depth = |one: usize, other: usize| {
        let (one, other) = (topology.leaf(HostId(one)), topology.leaf(HostId(other)));
        topology.depth(topology.meet(one, other))
    };
    assert!(depth(0, 0) > depth(0, 1) && depth(0, 1) > depth(0, 2));
}

/// BytePS (OSDI 2020), theorem 1: with *n* GPU hosts and *k* CPU hosts, a step takes at least
/// 2*n*(*n*-1)*M* / ((*n*² + *kn* - 2*k*)*B*). Aggregators with equal shares reach it if their
/// number allows the shares of the theorem: for *n* = 4 and *k* = 2, three aggregators per CPU
/// host and one per GPU host.
#[test]
fn byteps_closed_form() {
    let unit_s = |inventory: &Inventory| {
        // One rank and one aggregator, on different hosts.
        let apart = Job { has_dedicated_aggregators: true, ..job("ranks = 1") };
        planned(inventory, &apart).unwrap().time.total_s()
    };
    for (gpu_hosts, cpu_hosts, aggregators, expected) in
        [(4, 0, 4, 1.5), (4, 2, 10, 1.2), (4, 4, 4, 1.0)]
    {
        let hosts: Vec<_> = [vec![1; gpu_hosts], vec![0; cpu_hosts]].concat();
        let inventory = cluster(&[&hosts]);
        let job = job(&format!("ranks = {gpu_hosts}\naggregators = {aggregators}"));
        let step_s = planned(&inventory, &job).unwrap().time.total_s();
        let ratio = step_s / unit_s(&inventory);
        assert!((ratio - expected).abs() < 1e-6, "{gpu_hosts} {cpu_hosts}: {ratio}");
        let (n, k) = (
            f64::from(u8::try_from(gpu_hosts).unwrap()),
            f64::from(u8::try_from(cpu_hosts).unwrap()),
        );
        let theorem = 2.0 * n * (n - 1.0) / (n.mul_add(n, k * n) - 2.0 * k);
        assert!((theorem - expected).abs() < 1e-9, "{theorem}");
    }
}

/// The closed form allows any shares, so equal ones are never faster. The chosen number of
/// aggregators is the least that comes within 1 % of the best.
#[test]
fn the_chosen_number_of_aggregators_is_close_to_the_closed_form() {
    let unit_s = {
        let apart = Job { has_dedicated_aggregators: true, ..job("ranks = 1") };
        planned(&cluster(&[&[1, 1]]), &apart).unwrap().time.total_s()
    };
    for (gpu_hosts, cpu_hosts, expected) in [(4, 0, 4), (4, 2, 10), (4, 4, 4), (2, 1, 1), (3, 3, 3)]
    {
        let hosts: Vec<_> = [vec![1; gpu_hosts], vec![0; cpu_hosts]].concat();
        let inventory = cluster(&[&hosts]);
        let with = |aggregators: &str| {
            let job = job(&format!("ranks = {gpu_hosts}\naggregators = {aggregators}"));
            planned(&inventory, &job).unwrap()
        };
        let auto = with("'auto'");
        let number = auto.placement.aggregators.iter().sum::<u32>();
        assert_eq!(number, expected, "{gpu_hosts} {cpu_hosts}");
        let (n, k) = (gpu_hosts as f64, cpu_hosts as f64);
        let theorem = 2.0 * n * (n - 1.0) / (n.mul_add(n, k * n) - 2.0 * k);
        let ratio = auto.time.total_s() / unit_s;
        assert!((theorem * 0.999_999..=theorem * 1.01).contains(&ratio), "{theorem} {ratio}");
        for fewer in 1..number {
            let step_s = with(&fewer.to_string()).time.total_s();
            assert!(step_s > auto.time.total_s(), "{fewer}: {step_s}");
        }
    }
}
