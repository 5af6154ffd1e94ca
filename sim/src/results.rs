//! The results of scenarios: one JSON object a line.
//!
//! docs/simulation.md documents the fields.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::engine::Picos;
use crate::scenario::Scenario;
use crate::training::{Finished, RunError};
use crate::workload::duration::{SECOND, to_units};

/// A line of results.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Line {
    /// A job has finished.
    Job(JobLine),
    /// A run has ended.
    Run(RunLine),
}

/// A job that has finished.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobLine {
    /// The name of the scenario.
    pub scenario: String,
    /// The seed of the run.
    pub seed: u64,
    /// The number of the job.
    pub job: u64,
    /// The job's name in the trace, or its model.
    pub name: String,
    /// The name of the profile.
    pub model: String,
    /// The number of iterations.
    pub iterations: u64,
    /// The numbers of the job's workers.
    pub workers: Vec<u32>,
    /// The time of the submission.
    pub submitted_s: f64,
    /// The time of the start.
    pub started_s: f64,
    /// The time at which the last worker finished.
    pub finished_s: f64,
    /// The time from start to finish.
    pub jct_s: f64,
    /// The time from start to finish of two workers that have the network for themselves.
    pub alone_s: f64,
    /// `jct_s` divided by `alone_s`.
    pub inflation: f64,
}

/// A run that has ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunLine {
    /// The name of the scenario.
    pub scenario: String,
    /// The seed.
    pub seed: u64,
    /// The number of jobs.
    pub jobs: usize,
    /// The median of the jobs' inflations.
    pub median_inflation: f64,
    /// The 99th percentile of the jobs' inflations.
    pub p99_inflation: f64,
    /// The time at which the last job finished.
    pub makespan_s: f64,
    /// The bytes that workers sent, with headers.
    pub sent_bytes: u64,
    /// Packets that workers sent again.
    pub sent_again: u64,
    /// Packets that found a full queue.
    pub dropped: u64,
    /// Arrivals of packets at nodes.
    pub hops: u64,
    /// Events of the simulation.
    pub events: u64,
    /// The time that the run took.
    pub wall_s: f64,
}

/// Runs a scenario with one seed. `wall_s` returns the seconds since the run began, and `report`
/// gets each line as it comes.
///
/// # Errors
/// If a job can never start.
pub fn run(
    scenario: &Scenario,
    seed: u64,
    wall_s: impl Fn() -> f64,
    mut report: impl FnMut(Line),
) -> Result<RunLine, RunError> {
    let mut simulation = scenario.begin(seed)?;
    let mut alone = BTreeMap::new();
    let (mut inflations, mut makespan) = (vec![], Picos::ZERO);
    while let Some(finished) = simulation.next_finished()? {
        let Finished { arrival, placement, started, finished } = finished;
        let key = (arrival.model.clone(), arrival.iterations);
        let alone = match alone.get(&key) {
            Some(alone) => *alone,
            None => {
                let time = scenario.alone(&arrival.model, arrival.iterations, seed)?;
                alone.insert(key, time);
                time
            }
        };
        let jct = finished.since(started);
        let inflation = to_units(jct, SECOND) / to_units(alone, SECOND);
        inflations.push(inflation);
        makespan = makespan.max(finished);
        report(Line::Job(JobLine {
            scenario: scenario.name().into(),
            seed,
            job: arrival.job.0,
            name: arrival.name,
            model: arrival.model,
            iterations: arrival.iterations.get(),
            workers: placement.iter().map(|share| share.worker.0).collect(),
            submitted_s: to_units(arrival.submitted, SECOND),
            started_s: to_units(started, SECOND),
            finished_s: to_units(finished, SECOND),
            jct_s: to_units(jct, SECOND),
            alone_s: to_units(alone, SECOND),
            inflation,
        }));
    }
    inflations.sort_unstable_by(f64::total_cmp);
    let counts = simulation.counts();
    let line = RunLine {
        scenario: scenario.name().into(),
        seed,
        jobs: inflations.len(),
        median_inflation: quantile(&inflations, 0.5),
        p99_inflation: quantile(&inflations, 0.99),
        makespan_s: to_units(makespan, SECOND),
        sent_bytes: (counts.sent + counts.sent_again) * u64::from(scenario.wire_bytes()),
        sent_again: counts.sent_again,
        dropped: counts.dropped,
        hops: counts.hops,
        events: simulation.events(),
        wall_s: wall_s(),
    };
    report(Line::Run(line.clone()));
    Ok(line)
}

/// Returns a quantile of sorted numbers, with linear interpolation; NaN of none.
#[must_use]
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = share * last as f64;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a length"
    )]
    let below = (place.floor() as usize).min(last);
    let above = (below + 1).min(last);
    let part = place - below as f64;
    sorted[below].mul_add(1.0 - part, sorted[above] * part)
}
