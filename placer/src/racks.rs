//! Jobs with an aggregator in each rack, whose parent is the job's own aggregator.
//!
//! A rack's aggregator sums its ranks, so that one sum leaves the rack in place of the contribution
//! of each rank. The parent, which is the root of the tree, serves the ranks of its own rack. All
//! aggregators and their members send at once, so their loads of a link add up.

use std::collections::BTreeMap;

use crate::model::{Loads, StepTime, transfer_s};
use crate::network::Bottleneck;
use crate::placement::Placement;
use crate::problem::Problem;
use crate::topology::{HostId, Topology, VertexId};

/// The aggregators of a job with one in each rack that it uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// The host of the root, which the placement counts as the job's aggregator.
    pub root: HostId,
    /// The hosts of the aggregators whose parent is the root: one in each other rack with ranks.
    pub racks: Vec<HostId>,
}

/// An aggregator, and the hosts that send to it.
struct Star {
    center: HostId,
    members: Vec<Member>,
}

/// The contributions of a host to an aggregator.
struct Member {
    host: HostId,
    /// The number of its ranks or rack aggregators.
    count: u32,
    /// The bytes that it sends.
    bytes: f64,
}

impl Star {
    /// Adds the bytes that the star sends in a step over each link, to and from the parent vertex.
    fn load(&self, problem: &Problem<'_>, loads: &mut [(f64, f64)]) {
        let (topology, traffic) = (problem.topology, problem.traffic);
        // Links with neither the center nor a member in their subtree carry nothing.
        let mut inside: BTreeMap<VertexId, (u32, f64)> = BTreeMap::new();
        for vertex in topology.climb(topology.leaf(self.center)) {
            inside.insert(vertex, (0, 0.0));
        }
        let (mut all, mut all_bytes) = (0, 0.0);
        for member in &self.members {
            all += member.count;
            all_bytes += member.bytes;
            for vertex in topology.climb(topology.leaf(member.host)) {
                let (count, bytes) = inside.entry(vertex).or_default();
                *count += member.count;
                *bytes += member.bytes;
            }
        }
        for (vertex, (count, bytes)) in inside {
            let (up, down) = &mut loads[vertex.0];
            if topology.hosts_of(vertex).contains(&self.center.0) {
                *up += traffic.copies(all - count) * traffic.result;
                // With nothing outside, rounding may leave a difference.
                *down += if count == all { 0.0 } else { all_bytes - bytes };
            } else {
                *up += bytes;
                *down += traffic.copies(count) * traffic.result;
            }
        }
    }
}

/// Returns the stars of a tree: the root's first.
fn stars(problem: &Problem<'_>, placement: &Placement, tree: &Tree) -> Vec<Star> {
    let Problem { topology, traffic, .. } = problem;
    let ranks_in = |center: HostId| {
        let hosts = topology.hosts_of(topology.domain_of(center)).map(HostId);
        let placed = hosts.map(|host| (host, placement.ranks[host.0]));
        let placed = placed.filter(|(_, count)| *count > 0);
        placed.map(|(host, count)| Member {
            host,
            count,
            bytes: f64::from(count) * traffic.contribution,
        })
    };
    let racks = tree.racks.iter();
    // The sum of a rack is no larger than the sum of all ranks.
    let sums = racks.map(|host| Member { host: *host, count: 1, bytes: traffic.result });
    let root = Star { center: tree.root, members: ranks_in(tree.root).chain(sums).collect() };
    let stars = tree.racks.iter();
    let stars = stars.map(|rack| Star { center: *rack, members: ranks_in(*rack).collect() });
    std::iter::once(root).chain(stars).collect()
}

/// Returns the bytes that a placement with a tree sends in a step.
pub(crate) fn tree_loads(problem: &Problem<'_>, placement: &Placement, tree: &Tree) -> Loads {
    let Problem { topology, links, traffic, .. } = problem;
    let stars = stars(problem, placement, tree);
    let mut loads = Loads { links: vec![(0.0, 0.0); topology.vertices()], paths: vec![] };
    stars.iter().for_each(|star| star.load(problem, &mut loads.links));
    for star in &stars {
        for Member { host, count, bytes } in &star.members {
            let results = traffic.copies(*count) * traffic.result;
            let ends = [((*host, star.center), *bytes), ((star.center, *host), results)];
            let measured =
                ends.into_iter().filter(|((from, to), _)| links.ceiling(*from, *to).is_some());
            loads.paths.extend(measured);
        }
    }
    loads
}

/// Returns the expected step time of a placement with a tree. All ranks are in racks with an
/// aggregator.
pub(crate) fn tree_step_time(
    problem: &Problem<'_>,
    placement: &Placement,
    tree: &Tree,
) -> StepTime {
    let (topology, links) = (problem.topology, problem.links);
    let mut slowest = (0.0, Bottleneck::None);
    let mut offer = |time_s: f64, bottleneck| {
        if time_s > slowest.0 {
            slowest = (time_s, bottleneck);
        }
    };
    let loads = tree_loads(problem, placement, tree);
    for (vertex, (up, down)) in loads.links.into_iter().enumerate().skip(1).rev() {
        let id = VertexId(vertex);
        offer(transfer_s(up, links.up[vertex].bytes_per_s), Bottleneck::Up(id));
        offer(transfer_s(down, links.down[vertex].bytes_per_s), Bottleneck::Down(id));
    }
    for ((from, to), bytes) in loads.paths {
        let ceiling = links.ceiling(from, to).unwrap_or(f64::INFINITY);
        offer(transfer_s(bytes, ceiling), Bottleneck::Path(from, to));
    }
    let mut latency_s = 0.0f64;
    for star in stars(problem, placement, tree) {
        let to_root_s = links.rtt(topology, star.center, tree.root);
        for Member { host, .. } in &star.members {
            if placement.ranks[host.0] > 0 || star.center != tree.root {
                latency_s = latency_s.max(links.rtt(topology, *host, star.center) + to_root_s);
            }
        }
    }
    StepTime { transfer_s: slowest.0, latency_s, bottleneck: slowest.1 }
}

/// Returns whether a placement with a tree keeps to the seats and limits of the problem.
pub(crate) fn allows(problem: &Problem<'_>, placement: &Placement, tree: &Tree) -> bool {
    let topology = problem.topology;
    let mut aggregators = placement.aggregators.clone();
    tree.racks.iter().for_each(|host| aggregators[host.0] += 1);
    let mut has = vec![false; topology.vertices()];
    for host in topology.host_ids().filter(|host| aggregators[host.0] > 0) {
        has[topology.domain_of(host).0] = true;
    }
    let hosts = topology.host_ids();
    let mut seated = hosts.map(|host| {
        let (ranks, count) = (placement.ranks[host.0], aggregators[host.0]);
        count <= problem.seats[host.0].aggregators
            && ranks <= problem.ranks_beside(host.0, count)
            && (ranks == 0 || has[topology.domain_of(host).0])
    });
    let behind = placement.by_vertex(topology, Topology::ROOT);
    seated.all(|is_seated| is_seated)
        && behind[0] == (problem.traffic.ranks, 1)
        && behind.iter().zip(&problem.limits).all(|((ranks, _), limit)| ranks <= limit)
}
