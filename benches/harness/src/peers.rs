//! `cargo xtask bench peers` races racksum against other programs, and judges the bounds of each
//! case.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use clap::Args;
use racksum_tools::interrupt;

use crate::case::Case;
use crate::host::Provenance;
use crate::race::Rounds;
use crate::report::{Ending, Record};
use crate::setup::{Given, Setup};
use crate::{cases, memory, network, race, report, show_progress};

/// The cases to run, and the settings of the runs.
#[derive(Debug, Args)]
pub(crate) struct PeersArgs {
    /// Cases, by name or by the beginning of a name up to a dash. [default: all but `smoke`]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    case: Vec<String>,
    /// Number of measured rounds; a useful median needs at least five.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of warm-up rounds before the measured rounds.
    #[arg(long, default_value_t = 2)]
    warmup: u32,
    /// Set up all sides this many times, each time for all rounds; with --against, the number must
    /// be even. [default: 1; with --against 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    setups: Option<u32>,
    /// Append the results to this file, one JSON object per line. [default: peers/results.jsonl in
    /// cargo's target folder]
    #[arg(long, value_name = "FILE.jsonl")]
    out: Option<PathBuf>,
    /// Print the cases and their bounds, and run nothing.
    #[arg(long)]
    list: bool,
    /// Fail if a bound is not met or not measured.
    #[arg(long)]
    strict: bool,
    /// Run the cases with tensors of N bytes instead of their usual size, without bounds on times.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(4..))]
    bytes: Option<u64>,
    /// Race this source against another build of racksum instead of the peers: an executable, or a
    /// checkout, whose Python package races too. No case may take more than 2 % longer.
    #[arg(long, value_name = "PATH", conflicts_with = "bytes")]
    against: Option<PathBuf>,
    /// Use this Python, which must have torch and numpy, instead of a new virtual environment.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Seed of the data.
    #[arg(long, default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(..=u64::from(u32::MAX)))]
    seed: u64,
}

/// Runs the cases; returns `true` if nothing failed and, with `--strict`, every bound holds.
pub(crate) fn run(root: &Path, args: &PeersArgs) -> Result<bool> {
    let mut cases = cases::chosen(&args.case, args.seed).map_err(|why| anyhow!(why))?;
    if args.list {
        list(&cases);
        return Ok(true);
    }
    if let Some(bytes) = args.bytes {
        cases.iter_mut().for_each(|case| resize(case, bytes / 4 * 4));
    }
    let usual = if args.against.is_some() { 2 } else { 1 };
    let setups = args.setups.unwrap_or(usual);
    if args.against.is_some() && setups % 2 == 1 {
        bail!(
            "--setups {setups} is odd, but --against runs set-ups in mirrored pairs; pass an even \
             number"
        );
    }
    let rounds = Rounds { setups, warmup: args.warmup, counted: args.rounds };
    if let Some(before) = &args.against {
        cases.iter_mut().for_each(|case| case.against_before(before.is_dir()));
        cases.retain(|case| !matches!(case, Case::Race(race) if race.sides.is_empty()));
    }
    let given = Given { python: args.python.clone(), before: args.against.clone() };
    let results = run_cases(root, &cases, rounds, &given, args.out.as_deref())?;
    println!("\n{}", report::verdicts_head());
    for (case, ending) in cases.iter().zip(&results) {
        ending.verdicts(case.name()).iter().for_each(|row| println!("{}", row.trim_end()));
    }
    let failed = results.iter().any(Ending::is_failed);
    Ok(!failed && (!args.strict || results.iter().all(Ending::is_as_demanded)))
}

/// Runs the small cases, which cover every mechanism without peers, as a step of the test run.
/// Returns `false` if a case fails or moves more bytes than invariant I3 allows. Skipped cases go
/// to the test report.
pub(crate) fn smoke(root: &Path) -> Result<bool> {
    let rounds = Rounds { setups: 1, warmup: 0, counted: 2 };
    let cases = cases::smoke(1);
    let endings = run_cases(root, &cases, rounds, &Given::default(), None)?;
    for (case, ending) in cases.iter().zip(&endings) {
        if let Ending::Skipped(why) = ending {
            racksum_test_report::skipped(case.name(), why);
        }
    }
    Ok(endings.iter().all(|ending| ending.is_skipped() || ending.is_as_demanded()))
}

fn run_cases(
    root: &Path,
    cases: &[Case],
    rounds: Rounds,
    given: &Given,
    out: Option<&Path>,
) -> Result<Vec<Ending>> {
    interrupt::listen()?;
    let setup = Setup::prepare(root, cases, given)?;
    interrupt::check()?;
    if setup.links.is_ok() {
        network::sweep();
    }
    println!("{}", Provenance::now(root).line());
    let Rounds { setups, warmup, counted } = rounds;
    println!("{counted} round(s) after {warmup} warm-up round(s), in each of {setups} set-up(s)");
    println!("slow links: {} at a host, {} at the switch", network::HOST_TBF, network::SWITCH_TBF);
    let out = out.map_or_else(|| setup.work.join("results.jsonl"), Path::to_owned);
    let mut results = Vec::new();
    for case in cases {
        println!("\n{}: {}", case.name(), case.about());
        let provenance = Provenance::now(root);
        let ending = run_case(case, rounds, &setup);
        interrupt::check()?;
        print!("{}", ending.table());
        Record::new(case, provenance, rounds, &ending).append(&out)?;
        results.push(ending);
    }
    println!("\nresults: {}", out.display());
    Ok(results)
}

fn run_case(case: &Case, rounds: Rounds, setup: &Setup) -> Ending {
    let logs = setup.work.join("logs").join(case.name());
    let show_progress = &mut show_progress;
    let ended = match case {
        Case::Memory(memory) => {
            memory::run(memory, rounds, setup, &logs, show_progress).map(Ending::Memory)
        }
        Case::Race(race) => {
            if let Some(why) = setup.lacks(race) {
                return Ending::Skipped(why);
            }
            race::run(race, rounds, setup, &logs, show_progress).map(Ending::Race)
        }
    };
    show_progress("");
    ended.unwrap_or_else(|error| Ending::Failed(format!("{error:#}")))
}

fn list(cases: &[Case]) {
    for case in cases {
        println!("{:<20} {}", case.name(), case.about());
        if let Case::Race(race) = case
            && !race.bounds.is_empty()
        {
            println!("{:<20} {}", "", report::demands(&race.bounds));
        }
    }
}

/// Changes the size of a case. Removes the bounds of a race, which hold for its original size only.
fn resize(case: &mut Case, bytes: u64) {
    match case {
        Case::Memory(memory) => memory.bytes = bytes,
        Case::Race(race) => {
            race.data.bytes = bytes;
            race.bounds.clear();
        }
    }
}
