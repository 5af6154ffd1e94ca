//! `cargo xtask bench failures` measures how long users wait when something fails.
//!
//! The end-to-end tests cause the failures and record the times (`racksum_test_report::time`), each
//! with a limit that holds on an otherwise idle machine. No test fails because of a time, but this
//! command does. It runs the tests one at a time. Further rounds repeat only the tests that record
//! a time.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use racksum_test_report::{self as report, Entry};
use racksum_tools::interrupt;
use racksum_tools::shell::{Cmd, path, target};
use serde::Deserialize;

use crate::show_progress;
use crate::stats::Summary;

/// Number of rounds, and the tests to run.
#[derive(Debug, Args)]
pub(crate) struct FailuresArgs {
    /// Number of rounds; a useful median needs at least five.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Run only tests whose path contains this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    test: String,
}

/// Arguments of cargo for each test binary that records times.
const BINARIES: [&[&str]; 2] = [&["-p", "racksum-tests", "--lib"], CLI_TESTS];

/// Arguments of cargo for the tests of the program.
pub(crate) const CLI_TESTS: &[&str] = &["-p", "racksum-cli", "--test", "cli"];

/// Times of one measurement, in the order of the rounds, and their limit.
#[derive(Debug, Default, PartialEq, Eq)]
struct Times {
    ms: Vec<u64>,
    most: u64,
}

/// Runs the tests and prints the times; returns `true` if every median is below its limit.
pub(crate) fn run(root: &Path, args: &FailuresArgs) -> Result<bool> {
    let FailuresArgs { rounds, test } = args;
    interrupt::listen()?;
    let file = target(root).join("failures.jsonl");
    let mut tests = Vec::new();
    for binary in BINARIES {
        let program = build(root, binary)?;
        let listed = Cmd::new(path(&program)?, &["--list", "--format", "terse"]).output(root)?;
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        let chosen = names.filter(|name| name.contains(test.as_str()));
        tests.extend(chosen.map(|name| (program.clone(), name.to_owned())));
    }
    let mut times: BTreeMap<String, Times> = BTreeMap::new();
    for round in 1..=*rounds {
        let mut timed = Vec::new();
        for (nth, (program, name)) in tests.iter().enumerate() {
            interrupt::check()?;
            show_progress(&format!("round {round}: test {} of {}: {name}", nth + 1, tests.len()));
            let entries = record(root, program, name, &file)?;
            if collect(entries, &mut times) {
                timed.push((program.clone(), name.clone()));
            }
        }
        tests = timed;
    }
    show_progress("");
    if times.is_empty() {
        bail!("no test whose path contains {test:?} records a time; pass another text to --test");
    }
    print!("{}", table(&times));
    Ok(times.values().all(Times::is_kept))
}

/// Builds a test binary and returns its path.
pub(crate) fn build(root: &Path, binary: &[&str]) -> Result<PathBuf> {
    /// The part of cargo's messages that names a build product.
    #[derive(Deserialize)]
    struct Message {
        executable: PathBuf,
        profile: Profile,
    }
    #[derive(Deserialize)]
    struct Profile {
        test: bool,
    }
    let args = [&["test", "--locked", "--no-run", "--message-format", "json"], binary].concat();
    let output = Cmd::cargo(&args).output(root)?;
    let mut messages = output.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok());
    // Skip the program that the tests start: cargo builds that too.
    let built = messages.rfind(|message| message.profile.test);
    built
        .map(|message| message.executable)
        .with_context(|| format!("cargo built no test program for {}", binary.join(" ")))
}

/// Runs one test alone and returns its records.
fn record(root: &Path, program: &Path, name: &str, file: &Path) -> Result<Vec<Entry>> {
    if file.exists() {
        fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    // Pass the name too, so that records of the test's other threads and processes carry it.
    Cmd::new(path(program)?, &["--exact", name, "--test-threads", "1"])
        .env(report::FILE, path(file)?)
        .env(report::TEST, name)
        .output(root)
        .with_context(|| format!("{name} failed"))?;
    report::read(file).map_err(|why| anyhow!(why))
}

/// Adds the longest time of each measurement of a test; returns `true` if the test recorded a time.
fn collect(entries: Vec<Entry>, times: &mut BTreeMap<String, Times>) -> bool {
    let mut longest: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for entry in entries {
        let Entry::Time { what, ms, most, .. } = entry else { continue };
        let of = longest.entry(what).or_default();
        *of = (of.0.max(ms), most);
    }
    let any = !longest.is_empty();
    for (what, (ms, most)) in longest {
        let times = times.entry(what).or_default();
        times.ms.push(ms);
        times.most = most;
    }
    any
}

impl Times {
    fn summary(&self) -> Option<Summary> {
        Summary::of(&self.ms.iter().map(|ms| *ms as f64).collect::<Vec<_>>())
    }

    fn is_kept(&self) -> bool {
        self.summary().is_some_and(|summary| summary.median < self.most as f64)
    }
}

/// Formats a line for each measurement.
fn table(times: &BTreeMap<String, Times>) -> String {
    let width = times.keys().map(|what| what.chars().count()).max().unwrap_or(0);
    let mut text =
        format!("{:<width$} {:>9} {:>9} {:>9}\n", "what (ms)", "median", "max", "must be <");
    for (what, times) in times {
        let (median, max) = times.summary().map_or((0.0, 0.0), |all| (all.median, all.max));
        let verdict = if times.is_kept() { "PASS" } else { "FAIL" };
        text += &format!("{what:<width$} {median:>9.0} {max:>9.0} {:>9}  {verdict}\n", times.most);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(what: &str, ms: u64) -> Entry {
        Entry::Time { test: "t".into(), what: what.into(), ms, most: 3000 }
    }

    #[test]
    fn the_longest_of_a_round_counts_and_the_median_of_the_rounds() {
        let mut times = BTreeMap::new();
        assert!(!collect(vec![Entry::Skip { test: "t".into(), why: "w".into() }], &mut times));
        for ms in [100, 9000, 2999] {
            assert!(collect(vec![time("a", 1), time("a", ms)], &mut times));
        }
        assert_eq!(times["a"], Times { ms: vec![100, 9000, 2999], most: 3000 });
        assert!(times["a"].is_kept());
        let last = table(&times);
        let words: Vec<_> = last.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(words, ["a", "2999", "9000", "3000", "PASS"]);
        collect(vec![time("a", 3001)], &mut times);
        assert!(!times["a"].is_kept(), "the median is 3000, which is not below the limit");
    }
}
