//! Step times of placements that differ from one placement in the host of one rank.
//!
//! A moved rank changes the loads of the links between its two hosts only, so each step time takes
//! time in the depth of the tree.

use crate::model::{CappedPath, Paths, link_times};
use crate::placement::Placement;
use crate::problem::Problem;
use crate::topology::{HostId, Topology, VertexId};

/// A placement whose ranks can be moved one at a time.
#[derive(Debug)]
pub(crate) struct RankMoves<'a> {
    problem: &'a Problem<'a>,
    placement: &'a Placement,
    /// Ranks and aggregators in the subtree of each vertex.
    behind: Vec<(u32, u32)>,
    paths: Paths,
    /// The links of vertices by the time of their transfers, longest first.
    links: Vec<(f64, VertexId)>,
    /// The hosts by the time of their transfers over paths with a ceiling, longest first.
    capped: Vec<(f64, HostId)>,
    /// The hosts with ranks by their longest round trip, longest first.
    rtts: Vec<(f64, HostId)>,
}

impl<'a> RankMoves<'a> {
    pub(crate) fn new(problem: &'a Problem<'a>, placement: &'a Placement) -> Self {
        let behind = placement.by_vertex(problem.topology, Topology::ROOT);
        let paths = Paths::new(problem, Topology::ROOT, &placement.aggregator_hosts());
        let vertices = (1..behind.len()).filter(|vertex| behind[*vertex] != (0, 0)).map(VertexId);
        let links = vertices.map(|vertex| {
            let (up, down) = link_times(problem, vertex, behind[vertex.0]);
            (up.max(down), vertex)
        });
        let capped = paths
            .capped
            .iter()
            .map(|path| (slowest_s(problem, path, placement.ranks[path.host.0]), path.host));
        let used = problem.topology.host_ids().filter(|host| placement.ranks[host.0] > 0);
        let rtts = used.map(|host| (paths.rtts_s[host.0], host));
        Self {
            problem,
            placement,
            links: longest_first(links),
            capped: longest_first(capped),
            rtts: longest_first(rtts),
            behind,
            paths,
        }
    }

    /// Returns the step time in seconds if one rank moves from a host with ranks to another host,
    /// or `None` if the job allows no rank more there.
    pub(crate) fn step_s(&self, from: HostId, to: HostId) -> Option<f64> {
        let Self { problem, placement, .. } = self;
        let topology = problem.topology;
        let (from_leaf, to_leaf) = (topology.leaf(from), topology.leaf(to));
        let meet = topology.meet(from_leaf, to_leaf);
        let below = |leaf: VertexId| topology.climb(leaf).take_while(move |v| *v != meet);
        let has_seat =
            placement.ranks[to.0] < problem.ranks_beside(to.0, placement.aggregators[to.0]);
        let mut limits = below(to_leaf).map(|v| self.behind[v.0].0 < problem.limits[v.0]);
        if !has_seat || !limits.all(|is_within| is_within) {
            return None;
        }
        let is_moved = |vertex: VertexId| {
            let hosts = topology.hosts_of(vertex);
            hosts.contains(&from.0) != hosts.contains(&to.0)
        };
        let mut transfer_s = first(&self.links, |vertex| !is_moved(vertex));
        for (leaf, is_gain) in [(from_leaf, false), (to_leaf, true)] {
            for vertex in below(leaf) {
                let (ranks, aggregators) = self.behind[vertex.0];
                let ranks = if is_gain { ranks + 1 } else { ranks - 1 };
                let (up, down) = link_times(problem, vertex, (ranks, aggregators));
                transfer_s = transfer_s.max(up).max(down);
            }
        }
        let is_other = |host: HostId| host != from && host != to;
        transfer_s = transfer_s.max(first(&self.capped, is_other));
        let mut latency_s = first(&self.rtts, is_other).max(self.paths.rtts_s[to.0]);
        let left = placement.ranks[from.0] - 1;
        if left > 0 {
            latency_s = latency_s.max(self.paths.rtts_s[from.0]);
        }
        for (host, ranks) in [(from, left), (to, placement.ranks[to.0] + 1)] {
            let start = self.paths.capped.partition_point(|path| path.host < host);
            let paths = self.paths.capped[start..].iter().take_while(|path| path.host == host);
            transfer_s =
                paths.map(|path| slowest_s(problem, path, ranks)).fold(transfer_s, f64::max);
        }
        Some(transfer_s + latency_s)
    }
}

fn slowest_s(problem: &Problem<'_>, path: &CappedPath, ranks: u32) -> f64 {
    path.transfers(problem.traffic, ranks).map(|transfer| transfer.time_s()).fold(0.0, f64::max)
}

fn longest_first<T>(times: impl Iterator<Item = (f64, T)>) -> Vec<(f64, T)> {
    let mut times: Vec<_> = times.collect();
    times.sort_by(|one, other| other.0.total_cmp(&one.0));
    times
}

/// Returns the first time of an item that passes, or zero.
fn first<T: Copy>(times: &[(f64, T)], passes: impl Fn(T) -> bool) -> f64 {
    times.iter().find(|(_, item)| passes(*item)).map_or(0.0, |(time_s, _)| *time_s)
}
