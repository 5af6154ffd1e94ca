//! The step time of a placement.
//!
//! All transfers of a step run at once, so the slowest link or path decides: the transfer time is
//! the greatest quotient of bytes and goodput. The step time adds one round trip, the longest
//! between a rank and an aggregator. docs/placement.md has the formulas and their sources.

use crate::network::Bottleneck;
use crate::placement::Placement;
use crate::problem::Problem;
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

/// Returns the expected step time of a placement.
#[must_use]
pub fn step_time(problem: &Problem<'_>, placement: &Placement) -> StepTime {
    let mut slowest = (0.0, Bottleneck::None);
    let mut offer = |time: f64, bottleneck| {
        if time > slowest.0 {
            slowest = (time, bottleneck);
        }
    };
    let (topology, traffic) = (problem.topology, problem.traffic);
    let mut ranks = vec![0; topology.vertices()];
    let mut aggregators = vec![0; topology.vertices()];
    for host in 0..topology.hosts().len() {
        let leaf = topology.leaf(HostId(host));
        ranks[leaf.0] = placement.ranks[host];
        aggregators[leaf.0] = placement.aggregators[host];
    }
    for vertex in (1..topology.vertices()).rev() {
        let id = VertexId(vertex);
        let (up, down) = (problem.links.up[vertex], problem.links.down[vertex]);
        let sent = traffic.up(ranks[vertex], aggregators[vertex]);
        let received = traffic.down(ranks[vertex], aggregators[vertex]);
        offer(transfer_s(sent, up.bytes_per_s), Bottleneck::Up(id));
        offer(transfer_s(received, down.bytes_per_s), Bottleneck::Down(id));
        let parent = topology.parent(id).unwrap_or(Topology::ROOT);
        ranks[parent.0] += ranks[vertex];
        aggregators[parent.0] += aggregators[vertex];
    }
    let mut latency_s = 0.0f64;
    let aggregators = placement.aggregator_hosts();
    for (host, &ranks) in placement.ranks.iter().enumerate().filter(|(_, ranks)| **ranks > 0) {
        let path = PathsOf::new(problem, HostId(host), &aggregators);
        latency_s = latency_s.max(path.rtt);
        for path in path.capped(problem, ranks) {
            let bottleneck = Bottleneck::Path(path.from, path.to);
            offer(transfer_s(path.bytes, path.ceiling), bottleneck);
        }
    }
    StepTime { transfer_s: slowest.0, latency_s, bottleneck: slowest.1 }
}

/// Returns the step times of a placement if all rates are at the better and at the worse end of
/// their uncertainty, in seconds.
pub(crate) fn step_range_s(problem: &Problem<'_>, placement: &Placement) -> (f64, f64) {
    let at = |is_best: bool| {
        let links = problem.links.at_limit(is_best);
        step_time(&problem.with_links(&links), placement).total_s()
    };
    (at(true), at(false))
}

/// The paths between a host and the aggregators.
#[derive(Debug)]
pub(crate) struct PathsOf {
    host: HostId,
    /// The longest round trip to an aggregator, in seconds.
    pub(crate) rtt: f64,
    /// Aggregators on other hosts whose path was measured by itself.
    peers: Vec<(HostId, u32)>,
}

impl PathsOf {
    pub(crate) fn new(problem: &Problem<'_>, host: HostId, aggregators: &[(HostId, u32)]) -> Self {
        let mut paths = Self { host, rtt: 0.0, peers: vec![] };
        for &(peer, count) in aggregators {
            paths.rtt = paths.rtt.max(problem.links.rtt(problem.topology, host, peer));
            let is_capped = problem.links.ceiling(host, peer).is_some()
                || problem.links.ceiling(peer, host).is_some();
            if peer != host && is_capped {
                paths.peers.push((peer, count));
            }
        }
        paths
    }

    /// Returns the transfers of `ranks` ranks on the host over paths with a ceiling of their own.
    pub(crate) fn capped(
        &self,
        problem: &Problem<'_>,
        ranks: u32,
    ) -> impl Iterator<Item = CappedPath> {
        let traffic = problem.traffic;
        self.peers.iter().flat_map(move |&(peer, count)| {
            let share = traffic.share(count);
            let sent = f64::from(ranks) * share * traffic.contribution;
            let received = traffic.copies(ranks) * share * traffic.result;
            let ways = [(self.host, peer, sent), (peer, self.host, received)];
            ways.into_iter().filter_map(|(from, to, bytes)| {
                let ceiling = problem.links.ceiling(from, to)?;
                Some(CappedPath { from, to, bytes, ceiling })
            })
        })
    }
}

/// A transfer over a path with a ceiling of its own.
#[derive(Debug)]
pub(crate) struct CappedPath {
    from: HostId,
    to: HostId,
    pub(crate) bytes: f64,
    /// In bytes per second.
    pub(crate) ceiling: f64,
}

/// Returns the time that `bytes` take at a rate: none for no bytes, even at rate zero.
pub(crate) fn transfer_s(bytes: f64, bytes_per_s: f64) -> f64 {
    if bytes > 0.0 { bytes / bytes_per_s } else { 0.0 }
}
