//! The step time of a placement.
//!
//! All transfers of a step run at once, so the slowest link or path decides: the transfer time is
//! the greatest quotient of bytes and goodput. The step time adds one round trip, the longest
//! between a rank and an aggregator. docs/placement.md has the formulas and their sources.

use crate::network::Bottleneck;
use crate::placement::Placement;
use crate::problem::{Problem, Traffic};
use crate::topology::{HostId, Topology, VertexId};

/// The expected time of a step's all-reduce.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTime {
    /// The time of the slowest transfer in seconds.
    pub transfer_s: f64,
    /// The longest round trip between a rank and an aggregator in seconds.
    pub latency_s: f64,
    /// The link or path of the slowest transfer.
    pub bottleneck: Bottleneck,
}

impl StepTime {
    /// Returns the expected time in seconds. Infinite if a transfer needs a link that carries
    /// nothing.
    #[must_use]
    pub fn total_s(&self) -> f64 {
        self.transfer_s + self.latency_s
    }
}

/// The bytes that a placement sends in a step.
#[derive(Debug)]
pub(crate) struct Loads {
    /// Per vertex: over its link to the parent and back.
    pub(crate) links: Vec<(f64, f64)>,
    /// By sender and receiver: over paths with a ceiling of their own.
    pub(crate) paths: Vec<((HostId, HostId), f64)>,
}

/// Returns the bytes that a placement without a tree sends in a step.
pub(crate) fn loads(problem: &Problem<'_>, placement: &Placement) -> Loads {
    let traffic = problem.traffic;
    let behind = placement.by_vertex(problem.topology, Topology::ROOT).into_iter();
    let links = behind.map(|(ranks, aggregators)| {
        (traffic.up(ranks, aggregators), traffic.down(ranks, aggregators))
    });
    let paths = Paths::new(problem, Topology::ROOT, &placement.aggregator_hosts());
    let transfers =
        paths.capped.iter().flat_map(|path| path.transfers(traffic, placement.ranks[path.host.0]));
    let paths = transfers.map(|transfer| ((transfer.from, transfer.to), transfer.bytes));
    Loads { links: links.collect(), paths: paths.collect() }
}

/// Returns the expected step time of a placement.
#[must_use]
pub fn step_time(problem: &Problem<'_>, placement: &Placement) -> StepTime {
    let paths = Paths::new(problem, Topology::ROOT, &placement.aggregator_hosts());
    step_time_in(problem, Topology::ROOT, &paths, placement)
}

/// Like [`step_time`], for a placement in one domain. Takes the domain's paths to the aggregators.
pub(crate) fn step_time_in(
    problem: &Problem<'_>,
    domain: VertexId,
    paths: &Paths,
    placement: &Placement,
) -> StepTime {
    let mut slowest = (0.0, Bottleneck::None);
    let mut offer = |time: f64, bottleneck| {
        if time > slowest.0 {
            slowest = (time, bottleneck);
        }
    };
    let behind = placement.by_vertex(problem.topology, domain);
    for (index, behind) in behind.into_iter().enumerate().skip(1).rev() {
        if behind != (0, 0) {
            let vertex = VertexId(domain.0 + index);
            let (up_s, down_s) = link_times(problem, vertex, behind);
            offer(up_s, Bottleneck::Up(vertex));
            offer(down_s, Bottleneck::Down(vertex));
        }
    }
    for path in &paths.capped {
        for transfer in path.transfers(problem.traffic, placement.ranks[path.host.0]) {
            offer(transfer.time_s(), Bottleneck::Path(transfer.from, transfer.to));
        }
    }
    let used = placement.ranks[problem.topology.hosts_of(domain)].iter().zip(&paths.rtts_s);
    let used = used.filter(|(ranks, _)| **ranks > 0);
    let latency_s = used.map(|(_, rtt_s)| *rtt_s).fold(0.0, f64::max);
    StepTime { transfer_s: slowest.0, latency_s, bottleneck: slowest.1 }
}

/// Returns the times of the transfers from a vertex to its parent and back, in seconds, given the
/// ranks and aggregators in its subtree.
pub(crate) fn link_times(
    problem: &Problem<'_>,
    vertex: VertexId,
    (ranks, aggregators): (u32, u32),
) -> (f64, f64) {
    let (traffic, links) = (problem.traffic, problem.links);
    (
        transfer_s(traffic.up(ranks, aggregators), links.up[vertex.0].bytes_per_s),
        transfer_s(traffic.down(ranks, aggregators), links.down[vertex.0].bytes_per_s),
    )
}

/// The paths between the hosts of a domain and the aggregators.
#[derive(Debug)]
pub(crate) struct Paths {
    /// Per host of the domain: the longest round trip to an aggregator, in seconds.
    pub(crate) rtts_s: Vec<f64>,
    /// Paths between a host and an aggregator on another one that were measured by themselves, in
    /// the order of the hosts.
    pub(crate) capped: Vec<CappedPath>,
}

impl Paths {
    /// Finds the paths to aggregators, all of which are in the domain.
    pub(crate) fn new(
        problem: &Problem<'_>,
        domain: VertexId,
        aggregators: &[(HostId, u32)],
    ) -> Self {
        let (topology, links) = (problem.topology, problem.links);
        let hosts = topology.hosts_of(domain);
        let mut paths = Self { rtts_s: farthest_s(problem, domain, aggregators), capped: vec![] };
        let mut measured = vec![];
        for &(peer, count) in aggregators {
            for path in links.peers(peer).iter().filter(|path| hosts.contains(&path.host.0)) {
                paths.capped.push(CappedPath {
                    host: path.host,
                    peer,
                    share: problem.traffic.share(count),
                    // The aggregator's record has the opposite direction.
                    to_peer: path.ceiling_from(),
                    from_peer: path.ceiling_to(),
                });
                if path.rtt().is_some() {
                    measured.push((path.host, peer));
                }
            }
        }
        paths.capped.sort_by_key(|path| (path.host, path.peer));
        measured.sort_unstable();
        for of_host in measured.chunk_by(|one, other| one.0 == other.0) {
            let host = of_host[0].0;
            let by_links_s = paths.rtts_s[host.0 - hosts.start];
            // The farthest aggregator over links may be closer by its measured path.
            let is_nearer = |(host, peer): &(HostId, HostId)| {
                links.rtt_of_links(topology, *host, *peer) < by_links_s * NEARER
            };
            let rtt_s = |peer| links.rtt(topology, host, peer);
            paths.rtts_s[host.0 - hosts.start] = if of_host.iter().all(is_nearer) {
                of_host.iter().map(|(_, peer)| rtt_s(*peer)).fold(by_links_s, f64::max)
            } else {
                aggregators.iter().map(|(peer, _)| rtt_s(*peer)).fold(0.0, f64::max)
            };
        }
        paths
    }
}

/// Sums of the same delays differ by less than this factor.
pub(crate) const NEARER: f64 = 1.0 - 1e-12;

/// Returns, per host of a domain, the longest round trip over links to an aggregator, in seconds.
fn farthest_s(problem: &Problem<'_>, domain: VertexId, aggregators: &[(HostId, u32)]) -> Vec<f64> {
    let (topology, links) = (problem.topology, problem.links);
    let subtree = topology.subtree(domain);
    let index = |vertex: VertexId| vertex.0 - domain.0;
    let parent = |vertex: usize| index(topology.parent(VertexId(vertex)).unwrap_or(domain));
    // Per vertex: the round trips to the farthest aggregator in its subtree, and to the farthest
    // one that is below another of its children.
    let mut inside = vec![[f64::NEG_INFINITY; 2]; subtree.len()];
    for (host, _) in aggregators {
        inside[index(topology.leaf(*host))] = [0.0, f64::NEG_INFINITY];
    }
    for vertex in subtree.clone().skip(1).rev() {
        let through = inside[vertex - domain.0][0] + links.rtt[vertex];
        let [first, second] = &mut inside[parent(vertex)];
        if through > *first {
            (*first, *second) = (through, *first);
        } else {
            *second = second.max(through);
        }
    }
    // Per vertex: the round trip to the farthest aggregator that is not in its subtree.
    let mut outside = vec![f64::NEG_INFINITY; subtree.len()];
    for vertex in subtree.skip(1) {
        let parent = parent(vertex);
        let [first, second] = inside[parent];
        let through = inside[vertex - domain.0][0] + links.rtt[vertex];
        let beside = if through < first { first } else { second };
        outside[vertex - domain.0] = outside[parent].max(beside) + links.rtt[vertex];
    }
    let leaves = topology.hosts_of(domain).map(|host| index(topology.leaf(HostId(host))));
    leaves.map(|leaf| outside[leaf].max(0.0)).collect()
}

/// The paths between a host and an aggregator on another host, at least one of which was measured
/// by itself.
#[derive(Debug)]
pub(crate) struct CappedPath {
    pub(crate) host: HostId,
    peer: HostId,
    /// The share of the windows that the aggregator sums.
    share: f64,
    /// The ceilings in bytes per second.
    to_peer: Option<f64>,
    from_peer: Option<f64>,
}

impl CappedPath {
    /// Returns the transfers of `ranks` ranks on the host.
    pub(crate) fn transfers(&self, traffic: Traffic, ranks: u32) -> impl Iterator<Item = Transfer> {
        let Self { host, peer, share, .. } = *self;
        let sent = f64::from(ranks) * share * traffic.contribution;
        let received = traffic.copies(ranks) * share * traffic.result;
        let to_peer = self.to_peer.map(|ceiling| (host, peer, sent, ceiling));
        let from_peer = self.from_peer.map(|ceiling| (peer, host, received, ceiling));
        let transfers = to_peer.into_iter().chain(from_peer);
        transfers.map(|(from, to, bytes, ceiling)| Transfer { from, to, bytes, ceiling })
    }
}

/// A transfer over a path with a ceiling of its own.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) from: HostId,
    pub(crate) to: HostId,
    pub(crate) bytes: f64,
    /// In bytes per second.
    ceiling: f64,
}

impl Transfer {
    /// Returns the time of the transfer in seconds.
    pub(crate) fn time_s(&self) -> f64 {
        transfer_s(self.bytes, self.ceiling)
    }
}

/// Returns the time that `bytes` take at a rate: none for no bytes, even at rate zero.
pub(crate) fn transfer_s(bytes: f64, bytes_per_s: f64) -> f64 {
    if bytes > 0.0 { bytes / bytes_per_s } else { 0.0 }
}
