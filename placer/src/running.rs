//! Jobs that run already, and the rates that they leave on the links to another job.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::job::Job;
use crate::model::loads;
use crate::network::Links;
use crate::placement::{PlacementError, PlacementRecord};
use crate::present::Present;
use crate::problem::{JobError, Problem};
use crate::racks::tree_loads;
use crate::topology::{HostId, Topology};

/// The jobs that run, as a file lists them.
///
/// ```
/// let running: racksum_placer::running::RunningJobs = toml::from_str(
///     r#"
///     [[jobs]]
///     job = { name = "words", ranks = 2, bytes = 1_000_000 }
///     placement.hosts = [{ host = "h1", ranks = [0, 1] }, { host = "h2", aggregators = 1 }]
///     period_s = 0.5
///     "#,
/// )?;
/// assert_eq!(running.jobs[0].job.ranks, 2);
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunningJobs {
    /// The jobs, in any order.
    #[serde(default)]
    pub jobs: Vec<RunningJob>,
}

/// A job that runs and its hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunningJob {
    /// The job, as it was planned. Only what it sends counts.
    pub job: Job,
    /// The hosts of its ranks and aggregators, as `racksum place --format json` printed them.
    pub placement: PlacementRecord,
    /// The time from one step to the next, in seconds. Without it, the job is assumed to use all of
    /// its share of each link, all the time.
    #[serde(default)]
    pub period_s: Option<f64>,
}

/// The error for a list of running jobs that is wrong or that describes another cluster.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RunningError {
    /// The job's own numbers are wrong.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The placement does not fit the job or the cluster.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// Two jobs have one name.
    #[error("job {0:?} is listed twice; list each running job once")]
    Twice(String),
    /// The time between steps is not a positive number.
    #[error("job {job:?}: period_s is {period_s}; it must be a positive number")]
    Period {
        /// The job's name.
        job: String,
        /// The time given.
        period_s: f64,
    },
}

/// The average rates at which running jobs send, in bytes per second, one entry per job.
#[derive(Debug)]
struct Demands {
    /// Per vertex, towards its parent and back.
    up: Vec<Vec<f64>>,
    down: Vec<Vec<f64>>,
    /// By sender and receiver, for paths with a ceiling of their own.
    paths: BTreeMap<(HostId, HostId), Vec<f64>>,
}

/// Returns the rates of the links that remain for one more job beside running ones.
///
/// Congestion control divides a link evenly among the jobs that can use more (max-min fairness). A
/// running job can use its average rate: the bytes of a step over its period. The job to be planned
/// can use any rate.
///
/// # Errors
/// If a running job is wrong, or its placement does not fit the job or the cluster.
pub fn remaining(
    topology: &Topology,
    links: &Links,
    running: &RunningJobs,
) -> Result<Links, RunningError> {
    let mut demands = Demands {
        up: vec![vec![]; topology.vertices()],
        down: vec![vec![]; topology.vertices()],
        paths: BTreeMap::new(),
    };
    let mut names: Vec<_> = running.jobs.iter().map(|running| &running.job.name).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(RunningError::Twice(twice[0].clone()));
    }
    for running in &running.jobs {
        demands.add(topology, links, running)?;
    }
    let mut remaining = links.clone();
    for (rates, demands) in [(&mut remaining.up, demands.up), (&mut remaining.down, demands.down)] {
        for (rate, demands) in rates.iter_mut().zip(demands) {
            rate.bytes_per_s = fair_share(rate.bytes_per_s, demands);
        }
    }
    for ((from, to), demands) in demands.paths {
        remaining.change_ceiling(from, to, |bytes_per_s| fair_share(bytes_per_s, demands.clone()));
    }
    Ok(remaining)
}

impl Demands {
    fn add(
        &mut self,
        topology: &Topology,
        links: &Links,
        running: &RunningJob,
    ) -> Result<(), RunningError> {
        let RunningJob { job, placement, period_s } = running;
        let present = Present::of_record(topology, job, placement)?;
        let problem = Problem::new(topology, links, &sender(job, &present))?;
        let Present { placement, tree, .. } = present;
        if let Some(period_s) =
            period_s.filter(|period_s| !(period_s.is_finite() && *period_s > 0.0))
        {
            return Err(RunningError::Period { job: job.name.clone(), period_s });
        }
        let push = |demands: &mut Vec<f64>, bytes: f64| {
            if bytes > 0.0 {
                demands.push(period_s.map_or(f64::INFINITY, |period_s| bytes / period_s));
            }
        };
        let sent = match &tree {
            Some(tree) => tree_loads(&problem, &placement, tree),
            None => loads(&problem, &placement),
        };
        for (vertex, (up, down)) in sent.links.into_iter().enumerate().skip(1) {
            push(&mut self.up[vertex], up);
            push(&mut self.down[vertex], down);
        }
        for (ends, bytes) in sent.paths {
            push(self.paths.entry(ends).or_default(), bytes);
        }
        Ok(())
    }
}

/// Returns a running job with only the numbers that say how much it sends. Its constraints and
/// standbys do not.
fn sender(job: &Job, present: &Present) -> Job {
    let Job { aggregators, racks, .. } = present.decided(job);
    Job {
        gpu_type: None,
        shards: None,
        aggregators,
        racks,
        standbys: 0,
        standby_level: None,
        scope: None,
        requires_scope: false,
        only: vec![],
        except: vec![],
        max_ranks_per_host: None,
        max_ranks_per_domain: BTreeMap::new(),
        ..job.clone()
    }
}

/// Returns the rate that a job gets of a link if it can use all that running jobs leave, and these
/// demand fixed rates.
fn fair_share(bytes_per_s: f64, mut demands: Vec<f64>) -> f64 {
    demands.sort_unstable_by(f64::total_cmp);
    let mut left = bytes_per_s;
    let mut jobs = demands.len() as f64 + 1.0;
    for demand in demands {
        if demand > left / jobs {
            break;
        }
        left -= demand;
        jobs -= 1.0;
    }
    left / jobs
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_link_is_shared_evenly_among_those_who_can_use_more() {
        let left = |demands: &[f64]| fair_share(12.0, demands.to_vec());
        assert_eq!(left(&[]), 12.0);
        assert_eq!(left(&[2.0]), 10.0);
        // Neither running job can use more than a third, or one cannot.
        assert_eq!(left(&[100.0, 100.0]), 4.0);
        assert_eq!(left(&[f64::INFINITY, 2.0]), 5.0);
    }

    proptest! {
        #[test]
        fn shares_add_up_to_the_rate(rate in 0.0..100.0, demands in vec(0.0..50.0, 0..6)) {
            let share = fair_share(rate, demands.clone());
            let others: f64 = demands.iter().map(|demand: &f64| demand.min(share)).sum();
            prop_assert!((others + share - rate).abs() < 1e-9, "{} {}", share, others);
        }
    }
}
