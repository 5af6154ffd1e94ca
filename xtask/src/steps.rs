//! The test run, step by step: what each step runs, how long it took and how it ended.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::shell::Cmd;
use crate::{bench, machine, python, tidy};

/// One step of the test run. The order here is the order they run in: cheap verdicts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Step {
    /// Check what the tests need of the machine, and install it where we may.
    Setup,
    /// Source is formatted.
    Fmt,
    /// Clippy is silent.
    Clippy,
    /// Documentation builds without a warning.
    Doc,
    /// The rules of `cargo xtask tidy`.
    Tidy,
    /// Every test of the workspace.
    Test,
    /// The Python package: its style, its types and its tests, with the PyTorch of its users.
    Python,
    /// Two thousand fixed seeds through the simulator, optimised.
    Swarm,
    /// Every bench, once.
    Bench,
    /// Small races of racksum with itself: real processes and, as root, real links.
    Smoke,
}

impl Step {
    fn run(self, root: &Path) -> Result<()> {
        match self {
            Self::Setup => machine::set_up(root),
            Self::Smoke => bench::smoke(root),
            Self::Python => python::test(root),
            Self::Tidy => match tidy::report(root)? {
                true => Ok(()),
                false => bail!("cargo xtask tidy"),
            },
            Self::Fmt => Cmd::cargo(&["fmt", "--all", "--check"]).run(root),
            Self::Clippy => Cmd::cargo(&[
                "clippy",
                "--workspace",
                "--all-targets",
                "--locked",
                "--",
                "-D",
                "warnings",
            ])
            .run(root),
            Self::Doc => Cmd::cargo(&[
                "doc",
                "--workspace",
                "--no-deps",
                "--document-private-items",
                "--locked",
            ])
            .env("RUSTDOCFLAGS", "-D warnings")
            .run(root),
            Self::Test => Cmd::cargo(&["test", "--workspace", "--locked"]).run(root),
            Self::Swarm => Cmd::cargo(&[
                "run",
                "--release",
                "--locked",
                "-p",
                "racksum-cli",
                "--",
                "sim",
                "swarm",
                "--seeds",
                "0..2000",
            ])
            .run(root),
            // Without `--bench` cargo would run every unit test a second time.
            Self::Bench => {
                Cmd::cargo(&["bench", "--workspace", "--locked", "--bench", "*", "--", "--test"])
                    .run(root)
            }
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.to_possible_value().expect("no step is hidden").get_name())
    }
}

/// Runs the steps named in `only`, or all; `true` when each of them passed.
pub(crate) fn run(root: &Path, only: &[Step], keep_going: bool) -> bool {
    let steps = chosen(only);
    let count = steps.len();
    let mut nth = 0;
    let records = walk(&steps, keep_going, |step| {
        nth += 1;
        println!("\n=== {step} ({nth} of {count})");
        let (result, took) = timed(|| step.run(root));
        match &result {
            Ok(()) => println!("--- {step}: {}", Wall(took)),
            Err(error) => println!("--- {step}: {}\nfailed: {error:#}", Wall(took)),
        }
        (result.is_ok(), took)
    });

    println!("\n=== summary");
    for record in &records {
        println!("{record}");
    }
    let total = records.iter().map(|record| record.took).sum();
    let passed = records.iter().all(|record| record.end == End::Passed);
    println!("{} in {}", if passed { "passed" } else { "FAILED" }, Wall(total));
    passed
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Passed,
    Failed,
    NotRun,
}

/// A step, how it ended and the time it took.
#[derive(Debug)]
struct Record {
    step: Step,
    end: End,
    took: Duration,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<8}", self.step)?;
        match self.end {
            End::Passed => write!(f, "passed   {}", Wall(self.took)),
            End::Failed => write!(
                f,
                "FAILED   {}   (again: cargo xtask test --only {})",
                Wall(self.took),
                self.step
            ),
            End::NotRun => f.write_str("not run"),
        }
    }
}

/// Wall time as a reader wants it.
struct Wall(Duration);

impl fmt::Display for Wall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        if seconds < 60 {
            write!(f, "{:.1} s", self.0.as_secs_f64())
        } else {
            write!(f, "{} min {:02} s", seconds / 60, seconds % 60)
        }
    }
}

/// The steps to run, each once and in their own order.
fn chosen(only: &[Step]) -> Vec<Step> {
    let all = Step::value_variants().iter().copied();
    all.filter(|step| only.is_empty() || only.contains(step)).collect()
}

/// Takes the steps in order through `run`, which says whether one passed and how long it took;
/// stops at the first failure unless told to keep going.
fn walk(
    steps: &[Step],
    keep_going: bool,
    mut run: impl FnMut(Step) -> (bool, Duration),
) -> Vec<Record> {
    let mut stopped = false;
    let mut records = Vec::with_capacity(steps.len());
    for &step in steps {
        if stopped {
            records.push(Record { step, end: End::NotRun, took: Duration::ZERO });
            continue;
        }
        let (passed, took) = run(step);
        records.push(Record { step, end: if passed { End::Passed } else { End::Failed }, took });
        stopped = !passed && !keep_going;
    }
    records
}

#[expect(clippy::disallowed_methods, reason = "wall time of a chore, shown to a person")]
fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let done = work();
    (done, start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(keep_going: bool) -> Vec<(Step, End)> {
        let steps = [Step::Fmt, Step::Clippy, Step::Doc];
        walk(&steps, keep_going, |step| (step != Step::Clippy, Duration::ZERO))
            .iter()
            .map(|record| (record.step, record.end))
            .collect()
    }

    #[test]
    fn the_first_failure_stops_the_run() {
        assert_eq!(
            ends(false),
            [(Step::Fmt, End::Passed), (Step::Clippy, End::Failed), (Step::Doc, End::NotRun)]
        );
    }

    #[test]
    fn keep_going_runs_the_rest() {
        assert_eq!(
            ends(true),
            [(Step::Fmt, End::Passed), (Step::Clippy, End::Failed), (Step::Doc, End::Passed)]
        );
    }

    #[test]
    fn only_picks_steps_and_keeps_their_order() {
        assert_eq!(chosen(&[Step::Test, Step::Fmt, Step::Test]), [Step::Fmt, Step::Test]);
        assert_eq!(chosen(&[]), Step::value_variants());
    }

    #[test]
    fn a_summary_line_tells_how_to_run_a_failed_step_again() {
        let took = Duration::from_millis(61_500);
        let record = Record { step: Step::Doc, end: End::Failed, took };
        assert_eq!(
            record.to_string(),
            "doc     FAILED   1 min 01 s   (again: cargo xtask test --only doc)"
        );
    }
}
