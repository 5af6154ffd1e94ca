//! The hosts of a job's ranks and aggregators.

use std::ops::Range;

use crate::topology::HostId;

/// The hosts of a job: per host, the number of ranks and of aggregators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Ranks per host.
    pub ranks: Vec<u32>,
    /// Aggregators per host.
    pub aggregators: Vec<u32>,
}

impl Placement {
    /// Returns the hosts in use, each with the numbers of its ranks and of its aggregators.
    ///
    /// Ranks are numbered in the order of the hosts, so that ranks of one domain have
    /// consecutive numbers.
    pub fn hosts(&self) -> impl Iterator<Item = (HostId, Range<u32>, u32)> {
        let numbered = self.ranks.iter().scan(0, |next, ranks| {
            let first = *next;
            *next += ranks;
            Some(first..*next)
        });
        let hosts = numbered.zip(&self.aggregators).enumerate();
        let used = hosts.filter(|(_, (ranks, aggregators))| !ranks.is_empty() || **aggregators > 0);
        used.map(|(host, (ranks, aggregators))| (HostId(host), ranks, *aggregators))
    }

    /// Returns whether a host has a rank or an aggregator.
    #[must_use]
    pub fn uses(&self, host: usize) -> bool {
        self.ranks[host] + self.aggregators[host] > 0
    }

    /// Returns the hosts that run aggregators, and how many each runs.
    #[must_use]
    pub fn aggregator_hosts(&self) -> Vec<(HostId, u32)> {
        let hosts = self.aggregators.iter().enumerate().filter(|(_, count)| **count > 0);
        hosts.map(|(host, count)| (HostId(host), *count)).collect()
    }
}
