//! Swarms: each seed determines a plan with its own mix of sizes, links and faults, and all
//! checkers verify its run. A seed that fails once fails in every later run, on any machine.

mod coverage;
mod draw;

use std::io;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

use serde::Serialize;

pub use self::coverage::Coverage;
pub use self::draw::plan;
use crate::check::{Foreign, Invariant, SameBits, Violation};
use crate::cluster::Cluster;
use crate::plan::Plan;
use crate::random::Random;
use crate::run::{Run, Totals};

/// The outcome of a seed whose run broke no invariant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The trace of the run.
    pub trace: u64,
    /// Simulated microseconds until the last op ended.
    pub took_us: u64,
    /// Ended ops, counted once for each rank.
    pub ops: u64,
    /// The counters of the run.
    pub totals: Totals,
    /// The features of the plan and the run.
    pub features: Vec<String>,
}

/// A seed whose run broke an invariant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("seed {seed}: {invariant}: {sentence}; replay with `{replay}`")]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The broken invariant.
    pub invariant: Invariant,
    /// A sentence that describes the violation.
    pub sentence: String,
    /// The command that runs this seed again.
    pub replay: String,
}

/// The outcome of a swarm.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Summary {
    /// Seeds run so far.
    pub seeds: u64,
    /// Seeds that failed.
    pub failed: u64,
    /// The first failures to be found, up to a limit. [`run`] sorts them by seed at the end.
    pub failures: Vec<Failure>,
    /// Ended ops, counted once for each rank.
    pub ops: u64,
    /// Simulated microseconds, summed over all runs.
    pub took_us: u64,
    /// The counters, summed over all runs.
    pub totals: Totals,
    /// The number of passed seeds that had each feature.
    pub coverage: Coverage,
}

/// Runs the plan of one seed.
///
/// # Errors
/// Returns the violated invariant. A panic counts as a violation of I5, because nothing may abort
/// the process.
pub fn run_seed(seed: u64) -> Result<Report, Failure> {
    let run = panic::catch_unwind(AssertUnwindSafe(|| judge(seed)));
    let violation = match run {
        Ok(Ok(report)) => return Ok(report),
        Ok(Err(violation)) => violation,
        Err(panic) => {
            let message = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            let sentence = format!("the run panicked: {message}");
            Violation { invariant: Invariant::I5, sentence }
        }
    };
    let Violation { invariant, sentence } = violation;
    let replay = format!("racksum sim swarm --seeds {seed}..{}", seed.saturating_add(1));
    Err(Failure { seed, invariant, sentence, replay })
}

/// Runs the plans of many seeds on `threads` threads. Calls `progress` after each seed.
///
/// # Errors
/// Returns the operating system's error if a thread cannot start.
pub fn run(
    seeds: Range<u64>,
    threads: usize,
    mut progress: impl FnMut(&Summary),
) -> io::Result<Summary> {
    let next = AtomicU64::new(seeds.start);
    let mut summary = Summary::default();
    thread::scope(|scope| {
        let (results, collected) = mpsc::channel();
        for _ in 0..threads.max(1) {
            let (next, results) = (&next, results.clone());
            let work = move || {
                loop {
                    let after = |seed| (seed < seeds.end).then(|| seed + 1);
                    let Ok(seed) = next.try_update(Ordering::Relaxed, Ordering::Relaxed, after)
                    else {
                        break;
                    };
                    // The receiver outlives every sender.
                    if results.send(run_seed(seed)).is_err() {
                        break;
                    }
                }
            };
            thread::Builder::new().spawn_scoped(scope, work)?;
        }
        drop(results);
        for result in collected {
            summary.add(result);
            progress(&summary);
        }
        Ok::<_, io::Error>(())
    })?;
    summary.failures.sort_by_key(|failure| failure.seed);
    Ok(summary)
}

/// Runs the plan of `seed`. For some seeds, it also runs variants that must have the same outcome.
fn judge(seed: u64) -> Result<Report, Violation> {
    let plan = plan(seed);
    let run = Cluster::check(&plan)?;
    if plan.noise > 0 {
        let quiet = Plan { noise: 0, ..plan.clone() };
        Foreign::compare(&Cluster::check(&quiet)?, &run)?;
    }
    let mut random = Random::new(seed).child("again");
    if random.once_in(AGAIN_ONCE_IN) {
        let again = Cluster::check(&plan)?;
        if again.trace != run.trace {
            return Invariant::I2.broken("the same seed gave a different trace");
        }
    }
    if plan.jobs.iter().all(|job| job.missing.is_none()) && random.once_in(AGAIN_ONCE_IN) {
        let other = draw::other(&plan, &mut random);
        SameBits::compare(&run, &Cluster::check(&other)?)?;
    }
    Ok(report(&plan, &run))
}

fn report(plan: &Plan, run: &Run) -> Report {
    let Run { trace, took, totals, .. } = *run;
    let ops = run.ended.len() as u64;
    let features = coverage::features(plan, &totals);
    Report { seed: plan.seed, trace, took_us: took.as_micros(), ops, totals, features }
}

impl Summary {
    fn add(&mut self, result: Result<Report, Failure>) {
        self.seeds += 1;
        match result {
            Ok(report) => {
                self.ops += report.ops;
                self.took_us += report.took_us;
                self.totals.add(&report.totals);
                for feature in report.features {
                    *self.coverage.entry(feature).or_default() += 1;
                }
            }
            Err(failure) => {
                self.failed += 1;
                if self.failures.len() < MAX_FAILURES {
                    self.failures.push(failure);
                }
            }
        }
    }
}

/// One in this many seeds runs again, to check that the outcome is the same.
const AGAIN_ONCE_IN: u64 = 16;
/// The maximum number of failures that a summary keeps.
const MAX_FAILURES: usize = 100;
