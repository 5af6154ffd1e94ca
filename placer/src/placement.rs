//! The hosts of a job's ranks and aggregators.

use std::ops::Range;

use crate::job::Job;
use crate::topology::{HostId, Topology, VertexId};

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

    /// Returns the numbers of ranks and aggregators in the subtree of each vertex of a domain.
    pub(crate) fn by_vertex(&self, topology: &Topology, domain: VertexId) -> Vec<(u32, u32)> {
        let mut behind = vec![(0, 0); topology.subtree(domain).len()];
        for host in topology.hosts_of(domain) {
            let leaf = topology.leaf(HostId(host)).0 - domain.0;
            behind[leaf] = (self.ranks[host], self.aggregators[host]);
        }
        for index in (1..behind.len()).rev() {
            let (ranks, aggregators) = behind[index];
            let parent = topology.parent(VertexId(domain.0 + index)).unwrap_or(domain);
            behind[parent.0 - domain.0].0 += ranks;
            behind[parent.0 - domain.0].1 += aggregators;
        }
        behind
    }

    /// Marks the GPUs and CPU cores that this placement of a job needs as used, so that the next
    /// job finds what is left. Ranks take the types of GPUs in the order of their names.
    pub fn occupy(&self, topology: &mut Topology, job: &Job) {
        for (id, ranks, aggregators) in self.hosts() {
            let host = topology.host_mut(id);
            let mut ranks = ranks.end - ranks.start;
            let cpus = ranks.saturating_mul(job.cpus_per_rank);
            host.cpus
                .take(cpus.saturating_add(aggregators.saturating_mul(job.cpus_per_aggregator)));
            for (_, gpus) in host.gpus.iter_mut().filter(|(name, _)| job.uses_gpu(name)) {
                let taken = gpus.free().checked_div(job.gpus_per_rank).unwrap_or(0).min(ranks);
                gpus.take(taken * job.gpus_per_rank);
                ranks -= taken;
            }
        }
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
