//! Files that describe a cluster: its hosts, its links and its jobs.

use std::path::Path;

use racksum_net::clock::Clock;
use racksum_net::file::read_text;
use racksum_placer::inventory::Inventory;
use racksum_placer::network::Network;
use racksum_placer::topology::Topology;
use racksum_proto::peer_text::PeerText;
use serde::de::DeserializeOwned;

use crate::exit::Failure;
use crate::stderr;

/// Reads a file as TOML, or as JSON if its name ends in `.json`.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let text = text_of(path)?;
    if path.extension().is_some_and(|extension| extension == "json") {
        serde_json::from_str(&text).map_err(|error| wrong(path, error))
    } else {
        toml::from_str(&text).map_err(|error| {
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            let at = line.map_or_else(String::new, |line| format!("line {line}: "));
            wrong(path, format!("{at}{}", error.message()))
        })
    }
}

/// Reads the text of a file.
pub(crate) fn text_of(path: &Path) -> Result<String, Failure> {
    read_text(path, MOST_BYTES).map_err(|error| {
        Failure::of_file(format!("cannot read {}: {error}", path.display()), &error)
    })
}

/// Reads a network file, with the ages that its measurements have now.
pub(crate) fn network_today(path: &Path) -> Result<Network, Failure> {
    let network: Network = read(path)?;
    network.check().map_err(|error| wrong(path, error))?;
    let now = now();
    if network.measured_at.is_some_and(|at| at > now.saturating_add(SKEW_S)) {
        stderr::warn(format_args!(
            "{}: measured_at is in the future, so all measurements count as new; correct it, or \
             this host's clock",
            path.display()
        ));
    }
    Ok(network.at(now))
}

/// Reads a network file like [`network_today`]. Warns if some measurements are old.
pub(crate) fn read_network(path: &Path) -> Result<Network, Failure> {
    let network = network_today(path)?;
    if let Some(oldest_s) = network.stale_s() {
        stderr::warn(format_args!(
            "{}: some measurements are {:.1} hours old and count little or, after four \
             half-lives, not at all; measure again with `racksum probe run`",
            path.display(),
            oldest_s / 3600.0
        ));
    }
    Ok(network)
}

/// Returns the topology of the inventory in the file `nodes`, with the hosts where the network file
/// `net` shows them, and the network without what is too old to count. Warns of hosts whose places
/// are too old or not known.
pub(crate) fn placed(
    (nodes, inventory): (&Path, Inventory),
    (net, mut network): (&Path, Network),
) -> Result<(Topology, Network), Failure> {
    let warn = |hosts: &[String], why: &str| {
        if !hosts.is_empty() {
            stderr::warn(PeerText::of(format!(
                "{}: {why} {}; measure again with `racksum probe run`",
                net.display(),
                few(hosts)
            )));
        }
    };
    warn(&network.forget(), "too old to count are the places of");
    let Some(tree) = &network.tree else {
        let topology = Topology::new(&inventory).map_err(|error| wrong(nodes, error))?;
        return Ok((topology, network));
    };
    if inventory.levels.is_empty() {
        let names = inventory.hosts.iter().map(|host| host.name.clone());
        let missing: Vec<_> = names.filter(|name| !tree.hosts.contains_key(name)).collect();
        warn(&missing, "no measurement places");
    }
    let topology = Topology::new(&inventory.placed_by(tree));
    Ok((topology.map_err(|error| wrong(nodes, error))?, network))
}

/// Formats a list that may be long: its first items, and how many more there are.
pub(crate) fn few(items: &[String]) -> String {
    let (first, more) = items.split_at(items.len().min(MOST_LISTED));
    let first = first.join(", ");
    if more.is_empty() { first } else { format!("{first} and {} more", more.len()) }
}

/// Returns the time in seconds since 1970.
pub(crate) fn now() -> u64 {
    u64::try_from(Clock::start().wall() / 1_000_000_000).unwrap_or(0)
}

/// Returns the failure for a file whose content is wrong.
pub(crate) fn wrong(path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::usage(PeerText::of(format!("{}: {why}", path.display())).as_str())
}

/// Clocks of two hosts may differ by this many seconds.
const SKEW_S: u64 = 600;
/// The greatest number of items of a list that a message names.
pub(crate) const MOST_LISTED: usize = 8;
/// The greatest size of a file: a network file of 5,000 hosts with a record each has 2 MB, and a
/// list of as many nodes of Kubernetes has 50 MB.
const MOST_BYTES: u64 = 256 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_a_few_items_of_a_long_list() {
        let items = |count: usize| (0..count).map(|it| format!("h{it}")).collect::<Vec<_>>();
        assert_eq!(few(&items(2)), "h0, h1");
        assert_eq!(few(&items(8)), "h0, h1, h2, h3, h4, h5, h6, h7");
        assert_eq!(few(&items(45)), "h0, h1, h2, h3, h4, h5, h6, h7 and 37 more");
    }
}
