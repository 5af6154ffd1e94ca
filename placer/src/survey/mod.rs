//! Measurements of pairs of hosts: their order, and the network that they imply.
//!
//! [`sampled_pairs`] and [`rounds()`] say which pairs are measured, and which at the same time.
//! [`fit()`] turns samples of paths into rates, losses and round trips of links. It keeps the paths
//! that these do not explain. [`unconfirmed`] names uplinks to measure again,
//! and [`passed`] says what passed links that limit nothing. [`tiers()`] finds
//! domains without labels, [`misplaced`] finds hosts whose labels are wrong, and [`found_tree`]
//! says where all hosts are. [`faster_interfaces`] finds hosts whose `nic_mbit` is too low.
//! [`learn`] infers links from the counters of running jobs.

mod counters;
mod directions;
mod fit;
mod rates;
mod rounds;
mod sample;
mod tiers;
mod totals;

pub use counters::{Difference, Figure, OwnCounters, RankCounters, Side, Transfers, learn};
pub use fit::{FasterInterface, faster_interfaces, fit};
pub use rates::{HostRates, passed, unconfirmed};
pub use rounds::{Pair, circle, contended_pairs, rounds, sampled_pairs};
pub use sample::{Contended, ContendedPair, Sample};
pub use tiers::{Misplaced, found_tree, misplaced, tiers};

#[cfg(test)]
pub(crate) mod tests {
    use crate::inventory::{Host, Inventory};
    use crate::topology::Topology;

    /// Returns the topology of racks with these numbers of hosts.
    pub(crate) fn racks(hosts: &[usize]) -> Topology {
        let host = |rack: usize, host: usize| Host {
            name: format!("r{rack}h{host}"),
            labels: [("rack".into(), format!("r{rack}"))].into(),
            address: None,
            nic_mbit: 100.0,
            cpus: <_>::default(),
            gpus: <_>::default(),
            aggregator: None,
            taints: vec![],
            max_aggregators: None,
        };
        let hosts = hosts.iter().enumerate();
        let hosts =
            hosts.flat_map(|(rack, hosts)| (0..*hosts).map(move |number| host(rack, number)));
        Topology::new(&Inventory { levels: vec!["rack".into()], hosts: hosts.collect() }).unwrap()
    }
}
