//! The number of shards of each aggregator.

use crate::placement::Placement;
use crate::problem::{MOST_SHARDS, Problem};
use crate::racks::Tree;
use crate::topology::HostId;

/// Returns the number of shards that each aggregator of a plan needs: the job's own number, or
/// as many as the fastest of their hosts' links keeps busy, but no more than the CPU cores that
/// each of them has.
///
/// Cores of aggregators are the job's `cpus_per_aggregator`, or else an equal part of what the
/// ranks of the job leave of the host's free cores. A host whose cores are unknown has enough.
#[must_use]
pub fn shards(problem: &Problem<'_>, placement: &Placement, tree: Option<&Tree>) -> u32 {
    let job = &problem.job;
    if let Some(shards) = job.shards {
        return shards;
    }
    let racks = tree.into_iter().flat_map(|tree| &tree.racks);
    let hosts = placement.aggregator_hosts().into_iter().chain(racks.map(|host| (*host, 1)));
    let hosts: Vec<_> = hosts.collect();
    let needed = hosts.iter().map(|&(host, count)| busy(problem, host, count)).max();
    let cores = hosts.iter().filter_map(|&(host, count)| {
        let cpus = problem.topology.host(host).cpus;
        let of_ranks = placement.ranks[host.0].saturating_mul(job.cpus_per_rank);
        match job.cpus_per_aggregator {
            0 if cpus.total == 0 => None,
            0 => Some(cpus.free().saturating_sub(of_ranks) / count),
            cores => Some(cores),
        }
    });
    needed.unwrap_or(1).min(cores.min().unwrap_or(MOST_SHARDS)).clamp(1, MOST_SHARDS)
}

/// Returns the number of shards that the link of a host with `count` aggregators keeps busy.
fn busy(problem: &Problem<'_>, host: HostId, count: u32) -> u32 {
    let leaf = problem.topology.leaf(host);
    let mbit = problem.links.up(leaf).mbit().max(problem.links.down(leaf).mbit());
    let most = MOST_SHARDS.saturating_mul(count);
    let shards = (1..most).find(|shards| f64::from(*shards) * MBIT_PER_SHARD >= mbit);
    shards.unwrap_or(most).div_ceil(count)
}

/// The contributions that one shard folds in Mbit/s. An assumption, which depends on the CPU.
const MBIT_PER_SHARD: f64 = 10_000.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Amount;
    use crate::network::Links;
    use crate::tests::vectors::{cluster, job};
    use crate::topology::Topology;

    #[test]
    fn shards_follow_the_rate_and_the_cores_of_the_hosts() {
        let shards_with = |nic_mbit: f64, total: u32, text: &str| {
            let mut inventory = cluster(&[&[1]]);
            inventory.hosts[0].nic_mbit = nic_mbit;
            inventory.hosts[0].cpus = Amount { total, used: 0 };
            let topology = Topology::new(&inventory).unwrap();
            let links = Links::nominal(&topology);
            let problem = Problem::new(&topology, &links, &job(text)).unwrap();
            let placement = Placement { ranks: vec![1], aggregators: vec![2] };
            shards(&problem, &placement, None)
        };
        let two = "ranks = 1\naggregators = 2";
        assert_eq!(shards_with(1_000.0, 64, two), 1);
        // 94 Gbit/s keep ten shards busy.
        assert_eq!(shards_with(100_000.0, 64, two), 5);
        assert_eq!(shards_with(100_000.0, 0, two), 5);
        assert_eq!(shards_with(100_000.0, 8, two), 4);
        let cores = format!("{two}\ncpus_per_rank = 4\ncpus_per_aggregator = 3");
        assert_eq!(shards_with(100_000.0, 64, &cores), 3);
        assert_eq!(shards_with(100_000.0, 8, &format!("{two}\ncpus_per_rank = 4")), 2);
        assert_eq!(shards_with(100_000.0, 8, &format!("{two}\nshards = 7")), 7);
    }

    #[test]
    fn the_aggregator_of_a_rack_has_no_more_shards_than_cores() {
        let mut inventory = cluster(&[&[1], &[1]]);
        for (host, total) in inventory.hosts.iter_mut().zip([64, 3]) {
            host.nic_mbit = 100_000.0;
            host.cpus = Amount { total, used: 0 };
        }
        let topology = Topology::new(&inventory).unwrap();
        let links = Links::nominal(&topology);
        let problem = Problem::new(&topology, &links, &job("ranks = 2\nracks = true")).unwrap();
        let placement = Placement { ranks: vec![1, 1], aggregators: vec![1, 0] };
        let tree = Tree { root: HostId(0), racks: vec![HostId(1)] };
        assert_eq!(shards(&problem, &placement, None), 10);
        assert_eq!(shards(&problem, &placement, Some(&tree)), 3);
    }
}
