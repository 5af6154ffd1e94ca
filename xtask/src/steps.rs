//! The steps of a test run: the commands of each step, its time and its result.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use racksum_test_report as report;
use racksum_tools::machine;
use racksum_tools::shell::{Cmd, path, target};
use serde::{Deserialize, Serialize};

use crate::{bench, crate_imports, deploy, python, tidy};

/// A step of the test run. Steps run in this order, so that cheap checks fail first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Step {
    /// Check for the tools that the tests need, and install missing ones if permitted.
    Setup,
    /// Check that the source is formatted.
    Fmt,
    /// Check that clippy has no warnings.
    Clippy,
    /// Build the documentation without warnings.
    Doc,
    /// Check the rules of `cargo xtask tidy`.
    Tidy,
    /// Package every crate that may be published.
    Package,
    /// Run every test of the workspace.
    Test,
    /// Check the manifests in deploy/, and the operator's writes, against Kubernetes' schemas.
    Deploy,
    /// Check the Python package's style and types and run its tests, with the pinned PyTorch.
    Python,
    /// Run the process-group tests that torch ships, with Gloo and with racksum.
    Upstream,
    /// Run 2000 fixed seeds through an optimised simulator.
    Swarm,
    /// Run every bench once.
    Bench,
    /// Run small races of racksum against itself: real processes and, as root, real links.
    Smoke,
}

impl Step {
    /// Runs the step. Its tests and races append their skips to `report`; the result lists all
    /// other skips.
    fn run(self, root: &Path, report: &Path) -> Result<Vec<Skip>> {
        let done = match self {
            Self::Setup => return set_up(root).map(|why| skips("slow links", why)),
            Self::Deploy => {
                return deploy::check(root).map(|why| skips("schemas of Kubernetes", why));
            }
            Self::Smoke => bench::smoke(root, report),
            Self::Python => python::test(root, report),
            Self::Upstream => python::upstream(root),
            Self::Tidy => match tidy::report(root)? {
                true => Ok(()),
                false => bail!(
                    "the tree breaks rules; fix the errors above and rerun `cargo xtask tidy`"
                ),
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
            Self::Package => package(root),
            // With `--no-fail-fast`, the other test binaries still run after one fails.
            Self::Test => Cmd::cargo(&["test", "--workspace", "--locked", "--no-fail-fast"])
                .env(report::FILE, path(report)?)
                .run(root),
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
            // Without `--bench`, cargo would run every unit test a second time.
            Self::Bench => {
                Cmd::cargo(&["bench", "--workspace", "--locked", "--bench", "*", "--", "--test"])
                    .run(root)
            }
        };
        done.map(|()| Vec::new())
    }
}

/// Checks the machine and installs missing tools if it may. Returns the reason if tests of links
/// will be skipped.
fn set_up(root: &Path) -> Result<Option<String>> {
    let lacks = machine::link_tools(root)?;
    match &lacks {
        None => println!("ip, tc and network namespaces: available"),
        Some(why) => println!("{why}: skipping the tests of slow and lossy links"),
    }
    Ok(lacks)
}

/// Packages every crate that may be published. Does not build the packages, which have the same
/// sources as the workspace.
fn package(root: &Path) -> Result<()> {
    let published = crate_imports::published(root)?;
    let mut args = vec!["package", "--no-verify", "--allow-dirty", "--locked", "--quiet"];
    args.extend(published.iter().flat_map(|name| ["-p", name]));
    Cmd::cargo(&args).run(root)
}

/// Returns one skip of `what` if there is a reason, and otherwise no skip.
fn skips(what: &str, why: Option<String>) -> Vec<Skip> {
    why.map(|why| Skip { what: what.to_owned(), why }).into_iter().collect()
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.to_possible_value().expect("no step is hidden").get_name())
    }
}

/// Runs the steps in `only`, or all if it is empty; a failure does not stop the later steps.
/// Returns `true` if all passed.
pub(crate) fn run(root: &Path, only: &[Step]) -> Result<bool> {
    let steps = chosen(only);
    let report = target(root).join("test-report.jsonl");
    let mut history = History::load(root);
    let mut records = Vec::with_capacity(steps.len());
    for (nth, &step) in steps.iter().enumerate() {
        let left = history.left(&steps[nth..]);
        println!("\n=== {step} ({} of {}{left})", nth + 1, steps.len());
        clear(&report)?;
        let (result, took) = timed(|| step.run(root, &report));
        println!("--- {step}: {}", Wall(took));
        let mut skips = from_report(&report)?;
        match &result {
            Ok(more) => skips.extend_from_slice(more),
            Err(error) => println!("failed: {error:#}"),
        }
        history.note(step, took);
        records.push(Record { step, passed: result.is_ok(), took, skips });
    }
    history.store(root)?;
    println!("\n=== summary");
    print!("{}", summary(&records));
    Ok(records.iter().all(|record| record.passed))
}

/// A skipped part of a step, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Skip {
    /// A test, or another part of the step.
    what: String,
    why: String,
}

/// Removes the report of an earlier step.
fn clear(report: &Path) -> Result<()> {
    if report.exists() {
        fs::remove_file(report).with_context(|| format!("cannot remove {}", report.display()))?;
    }
    Ok(())
}

/// Reads the tests that a step has skipped.
fn from_report(file: &Path) -> Result<Vec<Skip>> {
    let entries = report::read(file).map_err(|why| anyhow!(why))?;
    let skip = |entry| match entry {
        report::Entry::Skip { test, why } => Some(Skip { what: test, why }),
        report::Entry::Time { .. } => None,
    };
    Ok(entries.into_iter().filter_map(skip).collect())
}

/// The time that each step took when it last ran here.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
struct History(BTreeMap<String, f64>);

impl History {
    fn file(root: &Path) -> PathBuf {
        target(root).join("test-times.json")
    }

    /// Reads the file. A missing or unreadable file costs only the estimate.
    fn load(root: &Path) -> Self {
        let text = fs::read_to_string(Self::file(root)).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    fn store(&self, root: &Path) -> Result<()> {
        let file = Self::file(root);
        let text =
            serde_json::to_string(self).context("cannot encode the recorded times as JSON")?;
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    fn note(&mut self, step: Step, took: Duration) {
        self.0.insert(step.to_string(), took.as_secs_f64());
    }

    /// Formats the time left, if every remaining step has run here before.
    fn left(&self, steps: &[Step]) -> String {
        let each: Option<Vec<_>> = steps.iter().map(|step| self.0.get(&step.to_string())).collect();
        let Some(each) = each else { return String::new() };
        format!("; about {} left", Wall(Duration::from_secs_f64(each.into_iter().sum())))
    }
}

/// Formats the last lines of a run: the result of each step, and the skips with their reasons.
fn summary(records: &[Record]) -> String {
    let mut text: String = records.iter().map(|record| format!("{record}\n")).collect();
    let skips: Vec<_> = records.iter().flat_map(skip_lines).collect();
    if !skips.is_empty() {
        text += "skipped:\n";
        text.extend(skips.iter().map(|line| format!("  {line}\n")));
    }
    let total = records.iter().map(|record| record.took).sum();
    let passed = records.iter().all(|record| record.passed);
    text + &format!("{} in {}\n", if passed { "passed" } else { "FAILED" }, Wall(total))
}

/// Formats one line for each reason why a step skipped something.
fn skip_lines(record: &Record) -> Vec<String> {
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for Skip { what, why } in &record.skips {
        match reasons.iter_mut().find(|(known, _)| known == why) {
            Some((_, whats)) => whats.push(what),
            None => reasons.push((why, vec![what])),
        }
    }
    let line = |(why, whats): (&str, Vec<&str>)| match whats[..] {
        [what] => format!("{}: {what}: {why}", record.step),
        _ => format!("{}: {} tests, the first {}: {why}", record.step, whats.len(), whats[0]),
    };
    reasons.into_iter().map(line).collect()
}

/// The result and the time of a step.
#[derive(Debug)]
struct Record {
    step: Step,
    passed: bool,
    took: Duration,
    skips: Vec<Skip>,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, took, .. } = self;
        if self.passed {
            return write!(f, "{step:<8} passed   {}", Wall(*took));
        }
        write!(f, "{step:<8} FAILED   {}   (again: cargo xtask test --only {step})", Wall(*took))
    }
}

/// Wall time, formatted for a reader.
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

/// Returns the steps to run, each once and in order.
fn chosen(only: &[Step]) -> Vec<Step> {
    let all = Step::value_variants().iter().copied();
    all.filter(|step| only.is_empty() || only.contains(step)).collect()
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

    fn record(step: Step, passed: bool, skips: &[(&str, &str)]) -> Record {
        let skip = |(what, why): &(&str, &str)| Skip { what: (*what).into(), why: (*why).into() };
        let skips = skips.iter().map(skip).collect();
        Record { step, passed, took: Duration::from_millis(61_500), skips }
    }

    #[test]
    fn only_picks_steps_and_keeps_their_order() {
        assert_eq!(chosen(&[Step::Test, Step::Fmt, Step::Test]), [Step::Fmt, Step::Test]);
        assert_eq!(chosen(&[]), Step::value_variants());
    }

    #[test]
    fn a_summary_names_what_failed_how_to_run_it_again_and_every_reason_for_a_skip() {
        let [gpu, raw] = ["no CUDA device", "raw sockets need root"];
        let python = record(Step::Python, true, &[("t::a", gpu), ("t::b", raw), ("t::c", gpu)]);
        assert_eq!(
            summary(&[record(Step::Doc, false, &[]), python]),
            "doc      FAILED   1 min 01 s   (again: cargo xtask test --only doc)\n\
             python   passed   1 min 01 s\n\
             skipped:\n  \
             python: 2 tests, the first t::a: no CUDA device\n  \
             python: t::b: raw sockets need root\n\
             FAILED in 2 min 03 s\n"
        );
    }

    #[test]
    fn what_is_left_is_told_once_every_step_has_run() {
        let mut history = History::default();
        history.note(Step::Fmt, Duration::from_secs(2));
        assert_eq!(history.left(&[Step::Fmt, Step::Doc]), "");
        history.note(Step::Doc, Duration::from_secs(3));
        assert_eq!(history.left(&[Step::Fmt, Step::Doc]), "; about 5.0 s left");
    }

    #[test]
    fn skips_are_read_from_what_the_tests_have_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("report.jsonl");
        assert_eq!(from_report(&file).unwrap(), []);
        let lines = "{\"time\":{\"test\":\"a\",\"what\":\"b\",\"ms\":1,\"most\":2}}\n\
                     {\"skip\":{\"test\":\"t\",\"why\":\"w\"}}\n";
        fs::write(&file, lines).unwrap();
        assert_eq!(from_report(&file).unwrap(), skips("t", Some("w".into())));
        clear(&file).unwrap();
        assert_eq!(from_report(&file).unwrap(), []);
    }
}
