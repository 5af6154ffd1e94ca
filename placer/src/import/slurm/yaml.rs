//! `topology.yaml`: a list of named topologies.

use serde::Deserialize;
use serde_saphyr::{Spanned, UserMessageFormatter};

use super::super::{ImportError, ImportErrorKind, Place};
use super::{Names, Topology, chosen};

/// A topology. Kinds that are not listed here, such as rings, are errors only if they are chosen.
#[derive(Deserialize)]
struct Named {
    topology: Spanned<String>,
    #[serde(default)]
    cluster_default: bool,
    #[serde(default)]
    tree: Option<Tree>,
    #[serde(default)]
    block: Option<Blocks>,
    #[serde(default)]
    flat: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tree {
    switches: Vec<Switch>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Switch {
    switch: Spanned<String>,
    #[serde(default)]
    children: Option<String>,
    #[serde(default)]
    nodes: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Blocks {
    #[serde(default)]
    block_sizes: Vec<Spanned<u32>>,
    blocks: Vec<Block>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Block {
    block: Spanned<String>,
    #[serde(default)]
    nodes: Option<String>,
}

/// Returns the topology of a file that `name` chooses, or the default of the cluster.
pub(super) fn read(
    text: &str,
    name: Option<&str>,
    names: &mut Names,
) -> Result<Topology, ImportError> {
    let topologies: Vec<Named> = serde_saphyr::from_str(text).map_err(|error| wrong(&error))?;
    for (index, named) in topologies.iter().enumerate() {
        let of_name = |other: &&Named| other.topology.value == named.topology.value;
        if let Some(first) = topologies[..index].iter().find(of_name) {
            let (name, first) = (named.topology.value.clone(), Place::Line(line(&first.topology)));
            let kind = ImportErrorKind::Duplicate { what: "topology", name, first };
            return Err(kind.at(line(&named.topology)));
        }
    }
    let default = topologies.iter().find(|named| named.cluster_default);
    let default = default.map(|named| named.topology.value.clone());
    let named = topologies.into_iter().map(|named| (named.topology.value.clone(), named));
    let Named { topology, tree, block, flat, .. } =
        chosen(named.collect(), name.or(default.as_deref()))?;
    match (tree, block, flat) {
        (Some(tree), None, false) => {
            let switches = tree.switches.iter().map(|switch| {
                let below = (switch.children.as_deref(), switch.nodes.as_deref());
                names.switch(line(&switch.switch), &switch.switch.value, below)
            });
            Ok(Topology::Tree(switches.collect::<Result<_, _>>()?))
        }
        (None, Some(block), false) => {
            let blocks = block.blocks.iter().map(|block| {
                names.block(line(&block.block), &block.block.value, block.nodes.as_deref())
            });
            let sizes = block.block_sizes.iter().map(|size| (line(size), size.value)).collect();
            Ok(Topology::Block { blocks: blocks.collect::<Result<_, _>>()?, sizes })
        }
        (None, None, true) => Ok(Topology::Flat),
        _ => Err(ImportErrorKind::Unsupported(topology.value.clone()).at(line(&topology))),
    }
}

/// Returns the line of a value, from 1.
fn line<T>(value: &Spanned<T>) -> usize {
    usize::try_from(value.referenced.line()).unwrap_or(usize::MAX)
}

fn wrong(error: &serde_saphyr::Error) -> ImportError {
    // The parser's default messages name functions that its caller could use instead.
    let message = error.without_snippet().render_with_formatter(&UserMessageFormatter);
    let kind = ImportErrorKind::Syntax(super::super::without_position(message));
    match error.location() {
        Some(location) => kind.at(usize::try_from(location.line()).unwrap_or(usize::MAX)),
        None => kind.nowhere(),
    }
}
