//! The hosts of a job's ranks and aggregators.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::job::{Job, MOST_AGGREGATORS};
use crate::topology::{HostId, Topology, VertexId};

/// The hosts of a job: per host, the number of ranks and of aggregators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Ranks per host.
    pub ranks: Vec<u32>,
    /// Aggregators per host.
    pub aggregators: Vec<u32>,
}

/// The hosts of a job as `racksum place --format json` prints them. Other keys are ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlacementRecord {
    /// The hosts in use.
    pub hosts: Vec<HostRecord>,
    /// The aggregators of racks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub racks: Vec<RackRecord>,
    /// The standbys, in the order in which the job moves to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub standbys: Vec<StandbyRecord>,
}

/// The numbers of the ranks of each host that has any.
pub type RankNumbers = BTreeMap<HostId, Vec<u32>>;

impl PlacementRecord {
    /// Returns the numbers of the ranks. Ignores hosts that the topology lacks.
    #[must_use]
    pub fn rank_numbers(&self, topology: &Topology) -> RankNumbers {
        let known = topology.host_numbers();
        let hosts = self.hosts.iter().filter(|host| !host.ranks.is_empty());
        let numbered = hosts.filter_map(|host| {
            let mut ranks = host.ranks.clone();
            ranks.sort_unstable();
            Some((*known.get(host.host.as_str())?, ranks))
        });
        numbered.collect()
    }

    /// Returns the record after aggregators have moved as in a placement. Ranks and standbys stay.
    #[must_use]
    pub fn with_aggregators(&self, topology: &Topology, placement: &Placement) -> Self {
        let mut record = self.clone();
        record.hosts.iter_mut().for_each(|host| host.aggregators = 0);
        for (host, aggregators) in placement.aggregator_hosts() {
            let host = &topology.host(host).name;
            match record.hosts.iter_mut().find(|known| known.host == *host) {
                Some(known) => known.aggregators = aggregators,
                None => {
                    record.hosts.push(HostRecord {
                        host: host.clone(),
                        ranks: vec![],
                        aggregators,
                    });
                }
            }
        }
        record.hosts.retain(|host| host.aggregators > 0 || !host.ranks.is_empty());
        record
    }
}

/// The aggregator of a rack.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RackRecord {
    /// The host's name.
    pub host: String,
}

/// The aggregators of a standby.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StandbyRecord {
    /// The hosts with its aggregators.
    pub hosts: Vec<HostRecord>,
}

/// The ranks and aggregators of a host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostRecord {
    /// The host's name.
    pub host: String,
    /// The numbers of the ranks.
    #[serde(default)]
    pub ranks: Vec<u32>,
    /// The number of aggregators.
    #[serde(default)]
    pub aggregators: u32,
}

/// The error for a placement that does not fit its job or the cluster.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlacementError {
    /// The inventory does not list a host.
    #[error("the placement of job {job:?} names host {host:?}, which the inventory does not list")]
    Unknown {
        /// The job's name.
        job: String,
        /// The host's name.
        host: String,
    },
    /// A host is listed twice.
    #[error("the placement of job {job:?} lists host {host:?} twice; list each host once")]
    Twice {
        /// The job's name.
        job: String,
        /// The host's name.
        host: String,
    },
    /// A rank is missing, placed twice, or none of the job's.
    #[error(
        "the placement of job {job:?} does not have each rank from 0 to {last} once; see \
         rank {rank}"
    )]
    Rank {
        /// The job's name.
        job: String,
        /// The last rank of the job.
        last: u32,
        /// A rank that is missing, placed twice, or none of the job's.
        rank: u32,
    },
    /// The job has racks, and its placement not one root.
    #[error(
        "job {job:?} has racks, and its placement has {placed} aggregators besides those of racks; \
         it must have one, the root"
    )]
    Root {
        /// The job's name.
        job: String,
        /// The aggregators in the placement.
        placed: u64,
    },
    /// Two aggregators of racks are in one rack, or one is in the root's rack.
    #[error("the placement of job {job:?} has a second aggregator in the rack of host {host:?}")]
    TwoInRack {
        /// The job's name.
        job: String,
        /// The host of the second aggregator.
        host: String,
    },
    /// The job has racks, and its placement no aggregator in a rack that has ranks.
    #[error(
        "job {job:?} has racks, and its placement has no aggregator in the rack of host {host:?}, \
         which has ranks"
    )]
    NoAggregator {
        /// The job's name.
        job: String,
        /// A host with ranks.
        host: String,
    },
    /// The placement has more standbys than the job.
    #[error(
        "the placement of job {job:?} has more standbys ({placed}) than the job ({needed}); raise \
         `standbys`"
    )]
    Standbys {
        /// The job's name.
        job: String,
        /// The number in the placement.
        placed: usize,
        /// The number in the job.
        needed: u32,
    },
    /// A standby has another number of aggregators than the job.
    #[error(
        "standby {number} in the placement of job {job:?} has {placed} aggregators, and the job \
         has {needed}"
    )]
    Standby {
        /// The job's name.
        job: String,
        /// The number of the standby, from 1.
        number: usize,
        /// The number of aggregators in the placement.
        placed: u64,
        /// The number of the job's aggregators.
        needed: u64,
    },
    /// The number of aggregators is not the job's.
    #[error("the placement of job {job:?} has {placed} aggregators, and the job has {needed}")]
    Aggregators {
        /// The job's name.
        job: String,
        /// The number in the placement.
        placed: u64,
        /// The number in the job.
        needed: u32,
    },
}

impl Placement {
    /// Returns the placement of nothing.
    pub(crate) fn none(topology: &Topology) -> Self {
        let none = vec![0; topology.hosts().len()];
        Self { ranks: none.clone(), aggregators: none }
    }

    /// Reads the ranks of a job, and the aggregators that serve it or are the root of its racks.
    ///
    /// # Errors
    /// If a host is unknown or listed twice, or the ranks and aggregators are not those of the job.
    pub fn of_record(
        topology: &Topology,
        job: &Job,
        record: &PlacementRecord,
    ) -> Result<Self, PlacementError> {
        let name = || job.name.clone();
        let hosts = Hosts::new(topology, &job.name);
        let none = vec![0; topology.hosts().len()];
        let mut placement = Self { ranks: none.clone(), aggregators: none };
        let mut ranks = vec![];
        for HostRecord { host, ranks: of_host, aggregators } in &record.hosts {
            let HostId(index) = hosts.find(host)?;
            if placement.uses(index) {
                return Err(PlacementError::Twice { job: name(), host: host.clone() });
            }
            placement.ranks[index] = u32::try_from(of_host.len()).unwrap_or(u32::MAX);
            placement.aggregators[index] = *aggregators;
            ranks.extend(of_host);
        }
        ranks.sort_unstable();
        let wrong = (0..).zip(&ranks).find(|(expected, rank)| expected != *rank);
        let wrong = wrong.map(|(expected, rank)| expected.min(*rank));
        let placed = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let differing = || (placed != job.ranks).then(|| placed.min(job.ranks));
        if let Some(rank) = wrong.or_else(differing) {
            let last = job.ranks.saturating_sub(1);
            return Err(PlacementError::Rank { job: name(), last, rank });
        }
        let placed = placement.aggregators.iter().copied().map(u64::from).sum();
        let needed = job.aggregators.given();
        // A job that leaves the number to the planner has at least one.
        let is_possible = (1..=u64::from(MOST_AGGREGATORS)).contains(&placed);
        let needed = needed.or(if is_possible { None } else { Some(1) });
        if let Some(needed) = needed
            && placed != u64::from(needed)
        {
            return Err(PlacementError::Aggregators { job: name(), placed, needed });
        }
        Ok(placement)
    }

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

    /// Returns the numbers of the ranks as [`Self::hosts`] gives them.
    #[must_use]
    pub fn rank_numbers(&self) -> RankNumbers {
        let hosts = self.hosts().filter(|(_, ranks, _)| !ranks.is_empty());
        hosts.map(|(host, ranks, _)| (host, ranks.collect())).collect()
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

    /// Returns whether a host has a rank or an aggregator.
    #[must_use]
    pub fn uses(&self, host: usize) -> bool {
        self.ranks[host] > 0 || self.aggregators[host] > 0
    }

    /// Returns the hosts that run aggregators, and how many each runs.
    #[must_use]
    pub fn aggregator_hosts(&self) -> Vec<(HostId, u32)> {
        let hosts = self.aggregators.iter().enumerate().filter(|(_, count)| **count > 0);
        hosts.map(|(host, count)| (HostId(host), *count)).collect()
    }
}

/// The hosts of a topology by name.
pub(crate) struct Hosts<'a> {
    by_name: BTreeMap<&'a str, HostId>,
    /// The job whose placement is read, for errors.
    job: &'a str,
}

impl<'a> Hosts<'a> {
    pub(crate) fn new(topology: &'a Topology, job: &'a str) -> Self {
        Self { by_name: topology.host_numbers(), job }
    }

    pub(crate) fn find(&self, name: &str) -> Result<HostId, PlacementError> {
        let unknown = || PlacementError::Unknown { job: self.job.into(), host: name.into() };
        self.by_name.get(name).copied().ok_or_else(unknown)
    }
}
