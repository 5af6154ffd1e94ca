//! `cargo xtask bench` builds and starts the harness of `benches/harness`, and passes its arguments
//! on.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Error, Result, bail};
use clap::Args;
use racksum_test_report as report;
use racksum_tools::interrupt;

/// The command line of the harness.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Arguments for the harness.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// Turns `help bench` into `bench help`, because only the harness knows the help of its
/// subcommands.
pub(crate) fn with_own_help(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<_> = words.into_iter().collect();
    if let [_, help, bench, ..] = &mut words[..]
        && help == "help"
        && bench == "bench"
    {
        std::mem::swap(help, bench);
    }
    words
}

/// Replaces this process with the harness. Signals then reach the harness, and the caller sees its
/// exit status. Returns only if the harness cannot start.
pub(crate) fn exec(root: &Path, args: &BenchArgs) -> Error {
    let error = harness(root).args(&args.words).exec();
    Error::new(error).context("cannot start cargo")
}

/// Runs small races of racksum against itself, and appends the skipped ones to `report`.
pub(crate) fn smoke(root: &Path, report: &Path) -> Result<()> {
    if !succeeds(harness(root).arg("smoke").env(report::FILE, report))? {
        bail!("a race failed; repeat with `cargo xtask bench peers --case smoke --strict`");
    }
    Ok(())
}

/// Runs the tests whose path contains `test` and prints the times that they record. Returns `true`
/// if every median is within its bound.
pub(crate) fn failures(root: &Path, test: &str, rounds: u32) -> Result<bool> {
    succeeds(harness(root).args(["failures", "--test", test, "--rounds", &rounds.to_string()]))
}

/// Returns the command that builds and starts the harness. The caller adds the harness's arguments.
fn harness(root: &Path) -> Command {
    let mut command = Command::new("cargo");
    command
        .args(["run", "--quiet", "--locked", "--package", "racksum-harness", "--manifest-path"])
        .arg(root.join("Cargo.toml"))
        .arg("--");
    command
}

/// Runs the harness and returns whether it succeeded. After a signal, waits until the harness has
/// removed its processes and namespaces, and returns an error.
fn succeeds(harness: &mut Command) -> Result<bool> {
    interrupt::listen()?;
    let mut child = harness.spawn().context("cannot start cargo")?;
    let status = interrupt::wait(&mut child)?;
    interrupt::check()?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{Chore, Cli};

    #[test]
    fn the_harness_gets_every_word_and_option() {
        let words = |line: &str| match Cli::parse_from(line.split(' ')).chore {
            Chore::Bench(args) => args.words,
            other => panic!("{other:?}"),
        };
        assert_eq!(words("xtask bench"), [""; 0]);
        for option in ["-h", "--help", "--version", "help"] {
            assert_eq!(words(&format!("xtask bench {option}")), [option]);
        }
        assert_eq!(
            words("xtask bench peers --case a b --list"),
            ["peers", "--case", "a", "b", "--list"]
        );
    }

    #[test]
    fn help_of_the_bench_is_the_harness_s_and_other_words_stay() {
        let words = |line: &str| {
            let words = with_own_help(line.split(' ').map(OsString::from));
            words.join(OsString::from(" ").as_os_str()).into_string().unwrap()
        };
        assert_eq!(words("xtask help bench"), "xtask bench help");
        assert_eq!(words("xtask help bench peers"), "xtask bench help peers");
        for line in ["xtask", "xtask help", "xtask help test", "xtask bench peers --list"] {
            assert_eq!(words(line), line);
        }
    }
}
