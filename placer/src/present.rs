//! The present placement of a job: where its ranks, aggregators and standbys are now, as `racksum
//! place --format json` printed it.

use crate::job::{Job, Setting};
use crate::model::step_time;
use crate::placement::{Hosts, Placement, PlacementError, PlacementRecord, StandbyRecord};
use crate::plan::Plan;
use crate::problem::Problem;
use crate::racks::{Tree, tree_step_time};
use crate::search;
use crate::standby::Standby;
use crate::topology::{HostId, Topology};

/// The hosts of a job that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Present {
    /// The ranks and aggregators of each host.
    pub placement: Placement,
    /// Per standby, the aggregators of each host.
    pub standbys: Vec<Vec<u32>>,
    /// The aggregators of racks, if there are any.
    pub tree: Option<Tree>,
}

impl Present {
    /// Reads the placement of a job. The placement may have fewer standbys than the job.
    ///
    /// # Errors
    /// If a host is unknown or listed twice, or the members are not those of the job.
    pub fn of_record(
        topology: &Topology,
        job: &Job,
        record: &PlacementRecord,
    ) -> Result<Self, PlacementError> {
        let placement = Placement::of_record(topology, job, record)?;
        let (placed, needed) = (record.standbys.len(), job.standbys);
        if placed > needed as usize {
            return Err(PlacementError::Standbys { job: job.name.clone(), placed, needed });
        }
        let standbys = (1..).zip(&record.standbys).map(|(number, standby)| {
            aggregators_of(topology, &job.name, (number, standby), &placement)
        });
        let standbys = standbys.collect::<Result<_, _>>()?;
        let tree = tree_of(topology, job, record, &placement)?;
        Ok(Self { placement, standbys, tree })
    }

    /// Returns the job with what this placement decides: the number of its aggregators, and
    /// whether it has racks.
    #[must_use]
    pub fn decided(&self, job: &Job) -> Job {
        let aggregators = self.placement.aggregators.iter().sum::<u32>().into();
        Job { aggregators, racks: Setting::Given(self.tree.is_some()), ..job.clone() }
    }

    /// Returns the placement as a plan: with its step time, and that of each standby.
    #[must_use]
    pub fn plan(self, problem: &Problem<'_>) -> Plan {
        let Self { placement, standbys, tree } = self;
        let topology = problem.topology;
        let racks = tree.iter().flat_map(|tree| &tree.racks).copied();
        let hosts = placement.hosts().map(|(host, _, _)| host).chain(racks);
        let domains = hosts.map(|host| topology.domain_of(host));
        let domain =
            domains.reduce(|one, other| topology.meet(one, other)).unwrap_or(Topology::ROOT);
        let standbys = standbys.into_iter().map(|aggregators| {
            let placement = Placement { ranks: placement.ranks.clone(), aggregators };
            let time = step_time(problem, &placement);
            Standby { aggregators: placement.aggregators, time }
        });
        let standbys = standbys.collect();
        let (time, bound_s) = match &tree {
            Some(tree) => {
                let found = search::racks::search(problem, domain, f64::INFINITY);
                let bound_s = found.map_or(0.0, |(_, bound_s)| bound_s);
                (tree_step_time(problem, &placement, tree), bound_s)
            }
            None => {
                let relaxed = search::relax(problem, domain, f64::INFINITY);
                let bound_s = relaxed.map_or(0.0, |relaxed| relaxed.bound_s);
                (step_time(problem, &placement), bound_s)
            }
        };
        let bound_s = bound_s.min(time.total_s());
        Plan { placement, time, bound_s, domain, standbys, tree }
    }
}

/// Returns the aggregators of a standby per host: as many as the job has.
fn aggregators_of(
    topology: &Topology,
    job: &str,
    (number, standby): (usize, &StandbyRecord),
    placement: &Placement,
) -> Result<Vec<u32>, PlacementError> {
    let hosts = Hosts::new(topology, job);
    let mut aggregators = vec![0; topology.hosts().len()];
    for record in &standby.hosts {
        let HostId(host) = hosts.find(&record.host)?;
        if aggregators[host] > 0 {
            return Err(PlacementError::Twice { job: job.into(), host: record.host.clone() });
        }
        aggregators[host] = record.aggregators;
    }
    let sum = |counts: &[u32]| counts.iter().copied().map(u64::from).sum::<u64>();
    let (placed, needed) = (sum(&aggregators), sum(&placement.aggregators));
    if placed != needed {
        return Err(PlacementError::Standby { job: job.into(), number, placed, needed });
    }
    Ok(aggregators)
}

/// Returns the aggregators of racks in a record, if it or the job has racks: at most one in each
/// rack, and one for each rank. If all ranks are in the root's rack, the record has none.
fn tree_of(
    topology: &Topology,
    job: &Job,
    record: &PlacementRecord,
    placement: &Placement,
) -> Result<Option<Tree>, PlacementError> {
    if record.racks.is_empty() && job.racks != Setting::Given(true) {
        return Ok(None);
    }
    let job = &*job.name;
    let &[(root, 1)] = &placement.aggregator_hosts()[..] else {
        let placed = placement.aggregators.iter().copied().map(u64::from).sum();
        return Err(PlacementError::Root { job: job.into(), placed });
    };
    let hosts = Hosts::new(topology, job);
    let mut has_aggregator = vec![false; topology.vertices()];
    has_aggregator[topology.domain_of(root).0] = true;
    let mut racks = vec![];
    for record in &record.racks {
        let host = hosts.find(&record.host)?;
        if std::mem::replace(&mut has_aggregator[topology.domain_of(host).0], true) {
            return Err(PlacementError::TwoInRack { job: job.into(), host: record.host.clone() });
        }
        racks.push(host);
    }
    let mut with_ranks = topology.host_ids().filter(|host| placement.ranks[host.0] > 0);
    match with_ranks.find(|host| !has_aggregator[topology.domain_of(*host).0]) {
        Some(host) => {
            let host = topology.host(host).name.clone();
            Err(PlacementError::NoAggregator { job: job.into(), host })
        }
        None => Ok(Some(Tree { root, racks })),
    }
}
