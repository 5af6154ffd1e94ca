//! The messages about a measurement: what was measured, and what was not.

use std::collections::BTreeSet;

use racksum_placer::inventory::Inventory;
use racksum_placer::network::Network;
use racksum_placer::notes::misplaced;
use racksum_placer::survey::faster_interfaces;
use racksum_placer::topology::Topology;
use racksum_probe::Outcome;
use racksum_proto::counted::counted;
use racksum_proto::peer_text::PeerText;

use crate::cluster_file::MOST_LISTED;
use crate::exit::{Failure, print_line, with_flags};
use crate::stderr;

/// Prints what was measured, and warns of what was not.
pub(super) fn print(outcome: &Outcome, budget: u64) -> Result<(), Failure> {
    warn_all(warnings(outcome));
    warn_of_faster_interfaces(&outcome.topology, &outcome.network);
    let measured = outcome.samples.iter().flat_map(|sample| [sample.from, sample.to]);
    let measured: BTreeSet<_> = measured.collect();
    print_line(&format!(
        "{} between {}, at most {} bytes of {budget} sent and received at one host ({})",
        counted(outcome.samples.len() as u64, "measured path"),
        counted(measured.len() as u64, "host"),
        outcome.busiest.bytes,
        outcome.busiest.host,
    ))
}

/// Warns of hosts whose interfaces were measured to be faster than the inventory says.
pub(super) fn warn_of_faster_interfaces(topology: &Topology, network: &Network) {
    let faster = faster_interfaces(topology, network).into_iter().map(|faster| {
        let host = topology.host(faster.host);
        format!(
            "{}: nic_mbit is {}, but {:.1} Mbit/s were measured; correct it and measure again, \
             because a measurement tests at most 1.25 times nic_mbit",
            host.name, host.nic_mbit, faster.mbit
        )
    });
    warn_all(bounded(faster.collect(), ("more host", "with a wrong nic_mbit")));
}

/// Warns of hosts that were measured in other domains than their labels say.
pub(super) fn warn_of_wrong_labels(labelled: &Inventory, network: &Network) {
    let notes = network.tree.iter().flat_map(|tree| misplaced(labelled, tree));
    let lines = notes.map(|note| note.to_string()).collect();
    warn_all(bounded(lines, ("more host", "with a wrong label")));
}

/// Prints warnings. They may quote other programs.
pub(super) fn warn_all(lines: Vec<String>) {
    lines.into_iter().for_each(|line| stderr::warn(PeerText::of(line)));
}

fn warnings(outcome: &Outcome) -> Vec<String> {
    let failed = outcome.failed.iter();
    let failed = failed.map(|(host, why)| format!("{host} was not measured: {}", with_flags(why)));
    let dead = outcome.dead.iter();
    let dead = dead.map(|(one, other)| {
        format!(
            "nothing passes between {one} and {other}; firewalls must let the UDP ports of their \
             agents through"
        )
    });
    let without_rate = outcome.without_rate.iter().map(|(from, to)| {
        format!("no rate from {from} to {to}: all that was sent arrived at one moment")
    });
    let labels = outcome.wrong_labels.iter().map(|wrong| {
        format!(
            "{} is labelled {} but was measured in {}, to whose hosts it is {:.1} times as close",
            wrong.host, wrong.labelled, wrong.measured, wrong.ratio
        )
    });
    let mut lines = bounded(failed.collect(), ("more host", "not measured"));
    if outcome.unaffordable > 0 {
        let pairs = counted(outcome.unaffordable as u64, "pair");
        lines.push(format!("{pairs} not measured, because that would exceed --budget"));
    }
    if outcome.has_unknown_racks {
        let why = "too few pairs were measured to find racks; label the hosts with their racks, or \
                   raise --budget";
        lines.push(why.into());
    }
    lines.extend(bounded(dead.collect(), ("more pair", "between which nothing passes")));
    lines.extend(bounded(without_rate.collect(), ("more path", "without a rate")));
    lines.extend(bounded(labels.collect(), ("more host", "with a wrong label")));
    lines
}

/// Returns the first lines, and one that counts the others with a noun and what they are.
pub(super) fn bounded(mut lines: Vec<String>, (noun, are): (&str, &str)) -> Vec<String> {
    let more = lines.len().saturating_sub(MOST_LISTED);
    if more > 0 {
        lines.truncate(MOST_LISTED);
        lines.push(format!("{} {are}", counted(more as u64, noun)));
    }
    lines
}

#[cfg(test)]
mod tests {
    use racksum_probe::{Usage, WrongLabel};

    use super::*;

    #[test]
    fn the_warnings_about_thousands_of_hosts_are_few() {
        let inventory = "[[hosts]]\nname = 'h'\nnic_mbit = 100";
        let inventory: Inventory = toml::from_str(inventory).unwrap();
        let pairs = |count: usize| {
            let pairs = (0..count).map(|number| (format!("a{number}"), format!("b{number}")));
            pairs.collect::<Vec<_>>()
        };
        let wrong =
            WrongLabel { host: "h".into(), labelled: "a".into(), measured: "b".into(), ratio: 2.0 };
        let outcome = Outcome {
            network: Network::default(),
            passed: vec![],
            samples: vec![],
            topology: Topology::new(&inventory).unwrap(),
            wrong_labels: vec![wrong; 9],
            has_unknown_racks: true,
            dead: pairs(1_000_000),
            without_rate: pairs(8),
            failed: pairs(45),
            unaffordable: 3,
            busiest: Usage { host: "h".into(), bytes: 0 },
        };
        let lines = warnings(&outcome);
        assert_eq!(lines.len(), 9 + 2 + 9 + 8 + 9, "{lines:#?}");
        assert_eq!(lines[7], "a7 was not measured: b7");
        assert_eq!(lines[8], "37 more hosts not measured");
        assert_eq!(lines[19], "999992 more pairs between which nothing passes");
        assert_eq!(lines[36], "1 more host with a wrong label");
    }
}
