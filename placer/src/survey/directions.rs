//! Numbers of the directions of links: two for the link of each vertex.

use crate::topology::{HostId, Topology, VertexId};

/// Returns the numbers of the directions of links that the path from one host to another uses.
pub(super) fn directed_links(topology: &Topology, from: HostId, to: HostId) -> Vec<usize> {
    let sender = topology.leaf(from);
    let links = topology.links_between(from, to);
    let number = |vertex: VertexId| match topology.subtree(vertex).contains(&sender.0) {
        true => up(vertex.0),
        false => down(vertex.0),
    };
    links.map(number).collect()
}

/// Returns the number of one direction of a link, up if true.
pub(super) const fn directed(of: VertexId, is_up: bool) -> usize {
    if is_up { up(of.0) } else { down(of.0) }
}

pub(super) const fn up(vertex: usize) -> usize {
    2 * vertex
}

pub(super) const fn down(vertex: usize) -> usize {
    2 * vertex + 1
}
