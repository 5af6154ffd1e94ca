//! A plan as a graph for Graphviz.

use std::collections::BTreeMap;

use racksum_placer::topology::{HostId, Topology, VertexId};
use racksum_proto::counted::counted;

use super::Planned;
use super::text::rank_numbers;
use super::words::step;

/// Returns a graph of the hosts in use and of the domains above them. Each edge shows the rates of
/// the link in Mbit/s, and the link that limits the step is bold.
pub(super) fn of(planned: &Planned<'_>) -> String {
    let Planned { topology, links, job, plan, .. } = planned;
    let title = format!("{}: {}", job.name, step(plan.time.total_s()));
    let mut lines = vec![
        format!("graph {:?} {{", job.name),
        format!("  label={title:?};"),
        "  node [shape=box];".into(),
    ];
    let mut drawn = vec![];
    let mut nodes: BTreeMap<HostId, Vec<String>> = BTreeMap::new();
    for (host, ranks, aggregators) in planned.hosts() {
        let parts = [
            (!ranks.is_empty()).then(|| rank_numbers(ranks)),
            (aggregators > 0).then(|| counted(aggregators, "aggregator")),
        ];
        nodes.entry(host).or_default().extend(parts.into_iter().flatten());
    }
    for (number, standby) in (1..).zip(&plan.standbys) {
        for (host, aggregators) in standby.hosts() {
            let aggregators = counted(aggregators, "aggregator");
            nodes.entry(host).or_default().push(format!("{aggregators} of standby {number}"));
        }
    }
    if let Some(tree) = &plan.tree {
        let parent = &topology.host(tree.root).name;
        for rack in &tree.racks {
            nodes.entry(*rack).or_default().push(format!("rack aggregator, parent {parent}"));
        }
    }
    for (host, parts) in nodes {
        let leaf = topology.leaf(host);
        let label = format!("{}\n{}", topology.name(leaf), parts.join("\n"));
        lines.push(format!("  {:?} [label={label:?}];", id(topology, leaf)));
        let mut vertex = leaf;
        while let Some(parent) = topology.parent(vertex).filter(|_| !drawn.contains(&vertex)) {
            let (up, down) = (links.up(vertex).mbit(), links.down(vertex).mbit());
            let style = if plan.time.bottleneck.is_link_of(vertex) { ", style=bold" } else { "" };
            lines.push(format!(
                "  {:?} -- {:?} [label=\"{up:.0} up, {down:.0} down\"{style}];",
                id(topology, parent),
                id(topology, vertex)
            ));
            drawn.push(vertex);
            vertex = parent;
        }
    }
    lines.push("}".into());
    lines.join("\n")
}

/// Returns the name of a vertex in the graph. The root is a slash, in which no domain's name ends.
fn id(topology: &Topology, vertex: VertexId) -> &str {
    match topology.name(vertex) {
        "" => "/",
        name => name,
    }
}
