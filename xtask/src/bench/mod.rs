//! `cargo xtask bench` compares racksum with other programs and with its bounds (`peers`), times
//! failures (`failures`) and compares training results (`learning`).
//!
//! `benches/README.md` explains the measurements to a reader of the results. In this module,
//! [`cases`] defines the cases, [`race`] the procedure, [`side`] the programs and [`network`] the
//! links. The peer programs are in `benches/peers`. Racksum's own ranks obey the same command lines
//! (`racksum bench --interactive`).

mod background_job;
mod case;
mod cases;
pub(crate) mod failures;
mod host;
mod learning;
mod memory;
mod network;
mod process_group;
mod race;
mod report;
mod setup;
mod side;
mod stats;
mod volume;

use std::io::{IsTerminal, stderr};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use clap::{Args, Subcommand};

use self::case::Case;
use self::failures::FailuresArgs;
use self::host::Provenance;
use self::learning::LearningArgs;
use self::race::Rounds;
use self::report::{Ending, Record};
use self::setup::{Given, Setup};
use crate::interrupt;
use crate::skip::Skip;

/// The measurement to run.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Race racksum against Gloo and Open MPI, in turns, and against its own bounds.
    ///
    /// Builds and installs what it needs, and prints what is missing. As root it makes network
    /// namespaces for the cases on slow links, and removes them.
    Peers(PeersArgs),
    /// Measure how long users wait when something fails: a killed rank, a lost aggregator.
    ///
    /// Runs the end-to-end tests that record such times, one at a time. The machine should be
    /// quiet.
    Failures(FailuresArgs),
    /// Train the examples with Gloo and with racksum, and compare what they learn.
    Learning(LearningArgs),
}

#[derive(Debug, Args)]
struct PeersArgs {
    /// Cases, by name or by the beginning of a name up to a dash. [default: all but `smoke`]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    case: Vec<String>,
    /// Rounds that count. A median needs at least five.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Warm-up rounds before the rounds that count.
    #[arg(long, default_value_t = 2)]
    warmup: u32,
    /// Set up all sides this many times, each time for all rounds. [default: 1; with --against 2,
    /// and an even number]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    setups: Option<u32>,
    /// Append the results to this file, one JSON object a line. [default: peers/results.jsonl in
    /// cargo's target folder]
    #[arg(long, value_name = "FILE.jsonl")]
    out: Option<PathBuf>,
    /// Print the cases and their bounds, and run nothing.
    #[arg(long)]
    list: bool,
    /// Fail when a bound is not kept or not measured.
    #[arg(long)]
    strict: bool,
    /// Run the cases with tensors of this size instead, without bounds.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(4..))]
    bytes: Option<u64>,
    /// Race this source against another build of racksum instead. No case may take more than 2 %
    /// longer.
    #[arg(long, value_name = "PATH", conflicts_with = "bytes")]
    against: Option<PathBuf>,
    /// Python with torch and numpy to use, instead of a virtual environment.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Seed of the data.
    #[arg(long, default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(..=u64::from(u32::MAX)))]
    seed: u64,
}

/// Runs the measurement; returns `true` if nothing failed and, if demanded, every bound holds.
pub(crate) fn run(root: &Path, args: &BenchArgs) -> Result<bool> {
    match &args.what {
        What::Peers(args) => peers(root, args),
        What::Failures(args) => failures::run(root, args),
        What::Learning(args) => learning::run(root, args).map(|()| true),
    }
}

fn peers(root: &Path, args: &PeersArgs) -> Result<bool> {
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
        bail!("--setups {setups} is odd: with --against every set-up has a mirror; give one more");
    }
    let rounds = Rounds { setups, warmup: args.warmup, counted: args.rounds };
    if args.against.is_some() {
        cases.iter_mut().for_each(Case::against_before);
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

/// Runs every mechanism once, small and without peers, as a step of the test run. Returns the
/// skipped cases. A case that moves more bytes than invariant I3 allows fails.
pub(crate) fn smoke(root: &Path) -> Result<Vec<Skip>> {
    let rounds = Rounds { setups: 1, warmup: 0, counted: 2 };
    let cases = cases::smoke(1);
    let endings = run_cases(root, &cases, rounds, &Given::default(), None)?;
    if !endings.iter().all(|ending| ending.is_skipped() || ending.is_as_demanded()) {
        bail!("cargo xtask bench peers --case smoke --strict");
    }
    let skip = |(case, ending): (&Case, &Ending)| match ending {
        Ending::Skipped(why) => Some(Skip { what: case.name().to_owned(), why: why.clone() }),
        _ => None,
    };
    Ok(cases.iter().zip(&endings).filter_map(skip).collect())
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
    println!("{counted} round(s) after {warmup}, in {setups} set-up(s)");
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
    let tell = &mut tell;
    let ended = match case {
        Case::Memory(memory) => memory::run(memory, rounds, setup, &logs, tell).map(Ending::Memory),
        Case::Race(race) => {
            if let Some(why) = setup.lacks(race) {
                return Ending::Skipped(why);
            }
            race::run(race, rounds, setup, &logs, tell).map(Ending::Race)
        }
    };
    tell("");
    ended.unwrap_or_else(|error| Ending::Failed(format!("{error:#}")))
}

/// Shows the progress on a terminal.
fn tell(what: &str) {
    if stderr().is_terminal() {
        eprint!("\r\x1b[K{what}");
    }
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

/// Changes the size of a case and removes its bounds, which hold for the original size only.
fn resize(case: &mut Case, bytes: u64) {
    match case {
        Case::Memory(memory) => memory.bytes = bytes,
        Case::Race(race) => {
            race.data.bytes = bytes;
            race.bounds.clear();
        }
    }
}
