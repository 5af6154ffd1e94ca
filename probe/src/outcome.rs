//! The settings of a measurement, its results and its errors.

use std::collections::BTreeSet;

use racksum_net::NetError;
use racksum_net::quic::Credentials;
use racksum_placer::network::{Network, Passed};
use racksum_placer::survey::Sample;
use racksum_placer::topology::{InventoryError, Topology};
use racksum_proto::counted::counted;
use racksum_proto::peer_text::PeerText;

use crate::agent::{PATIENCE, SILENCE};

/// Settings of a measurement.
#[derive(Debug)]
pub struct Options {
    /// Identity of the coordinator, and the certificates that it trusts.
    pub credentials: Credentials,
    /// The share of each host's interface that measurements may use on average, above 0 and at
    /// most 1.
    pub share: f64,
    /// The bytes that measurements may send and receive at each host.
    pub budget: u64,
    /// Pairs of hosts to measure for each two innermost domains; `None` measures all pairs.
    pub samples: Option<usize>,
    /// The seed that decides which pairs are measured first.
    pub seed: u64,
}

/// Results of a measurement, and hosts and pairs that were not measured.
#[derive(Debug)]
pub struct Outcome {
    /// The rates, losses and round-trip times of links.
    pub network: Network,
    /// The greatest rates that passed the directions of links, also of those that limit nothing.
    pub passed: Vec<Passed>,
    /// The paths that were measured, each with its fastest measurement.
    pub samples: Vec<Sample>,
    /// The topology of `samples`: that of the labels, or the one that was measured.
    pub topology: Topology,
    /// Hosts that were measured elsewhere than their labels say.
    pub wrong_labels: Vec<WrongLabel>,
    /// Whether the hosts have no labels, and too few pairs were measured to find racks.
    pub has_unknown_racks: bool,
    /// Pairs of hosts between which no ping passed.
    pub dead: Vec<(String, String)>,
    /// Paths whose trains were too short to show a rate, from the first host to the second.
    pub without_rate: Vec<(String, String)>,
    /// Hosts whose agents did not answer or failed, and why.
    pub failed: Vec<(String, String)>,
    /// Pairs that would have exceeded the budget.
    pub unaffordable: usize,
    /// The host that sent and received most bytes for the measurement.
    pub busiest: Usage,
}

/// The bytes that a measurement used at a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// The name of the host.
    pub host: String,
    /// Bytes that it sent and received, with headers. Lost datagrams count as received.
    pub bytes: u64,
}

/// A host that was measured in another domain than its labels say.
#[derive(Debug, Clone, PartialEq)]
pub struct WrongLabel {
    /// The name of the host.
    pub host: String,
    /// The path of the domain that its labels name.
    pub labelled: String,
    /// The path of the domain whose hosts are closest.
    pub measured: String,
    /// How many times as close they are as those of the labelled domain.
    pub ratio: f64,
}

/// The error of a measurement that yields nothing.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The inventory is inconsistent.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// The credentials cannot be used.
    #[error(transparent)]
    Net(#[from] NetError),
    /// Two hosts have the same agent.
    #[error("{one} and {other} have the same agent, {address}; give each its own `address`")]
    SameAgent {
        /// The name of one host.
        one: String,
        /// The name of the other host.
        other: String,
        /// The address of the agent.
        address: String,
    },
    /// An agent serves another coordinator.
    #[error(
        "the agent of {host} serves another measurement, of {} for {held_s} s; run this one once \
         that has ended. An agent is free {} s after it has last heard of its coordinator, and \
         {} s after the last order",
        PeerText::of(holder),
        SILENCE.as_millis() / 1000,
        PATIENCE.as_secs()
    )]
    Busy {
        /// The name of the agent's host.
        host: String,
        /// The name and the address of the other coordinator, as the agent says.
        holder: String,
        /// The seconds for which the agent has served it.
        held_s: u64,
    },
    /// Fewer than two agents answered.
    #[error("a measurement needs two agents, and {answered} answered{}", listed(failed))]
    NoPair {
        /// The number of agents that answered.
        answered: usize,
        /// Hosts whose agents did not answer, and why.
        failed: Vec<(String, String)>,
    },
    /// No pair was measured.
    #[error("no pair of hosts was measured{}", listed(failed))]
    Nothing {
        /// Hosts whose agents failed, and why.
        failed: Vec<(String, String)>,
    },
}

fn listed(failed: &[(String, String)]) -> String {
    let first = failed.iter().take(MOST_LISTED);
    let mut text: String = first.map(|(host, why)| format!("; {host}: {why}")).collect();
    if let Some(more) = failed.len().checked_sub(MOST_LISTED).filter(|more| *more > 0) {
        text += &format!("; and {}", counted(more as u64, "more host"));
    }
    text
}

impl Outcome {
    /// Returns the paths about which this measurement says something, as the names of the sender
    /// and the receiver. Older measurements of all other paths still count.
    #[must_use]
    pub fn measured(&self) -> BTreeSet<(String, String)> {
        let name = |host| self.topology.host(host).name.clone();
        let samples = self.samples.iter().map(|sample| (name(sample.from), name(sample.to)));
        let both = |(one, other): &(String, String)| {
            [(one.clone(), other.clone()), (other.clone(), one.clone())]
        };
        samples.chain(self.dead.iter().flat_map(both)).collect()
    }
}

/// The greatest number of hosts that an error names.
const MOST_LISTED: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_a_few_hosts_and_counts_the_others() {
        let failed = |count: usize| {
            let failed = (0..count).map(|number| (format!("h{number}"), "it is gone".into()));
            MeasureError::NoPair { answered: 0, failed: failed.collect() }.to_string()
        };
        assert!(failed(8).ends_with("; h7: it is gone"), "{}", failed(8));
        assert!(failed(9).ends_with("; h7: it is gone; and 1 more host"), "{}", failed(9));
        assert!(failed(2000).ends_with("; and 1992 more hosts"), "{}", failed(2000));
        assert!(failed(2000).len() < 300);
    }
}
