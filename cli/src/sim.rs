//! `racksum sim`: runs the protocol and training jobs in the simulator.

mod scenarios;

use std::io::IsTerminal;
use std::ops::Range;

use clap::Subcommand;
use racksum_proto::counted::counted;
use racksum_sim::swarm::{self, Summary};

use crate::args::{self, Format};
use crate::exit::{Failure, print_line};
use crate::stderr;
use crate::thread::not_started;

/// Runs the protocol's own code, or training jobs that share a cluster, packet by packet.
#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run one plan per seed, each with its own world, sizes, links and faults, and check the
    /// invariants. If a seed fails, print the command that replays it.
    Swarm {
        /// Seeds from A up to, but not including, B.
        #[arg(long, value_name = "A..B", value_parser = seeds, default_value = "0..100")]
        seeds: Range<u64>,
        /// Number of threads [default: one per core].
        #[arg(long, value_parser = args::number::<usize>(args::THREADS))]
        threads: Option<usize>,
        /// Also print how many seeds covered each feature; JSON output always includes this.
        #[arg(long)]
        coverage: bool,
        /// Output format.
        #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
        format: Format,
    },
    /// Run training jobs that share a cluster, as scenario files describe them, once per seed, and
    /// print how much longer each job takes than alone. docs/simulation.md explains the files.
    Run(scenarios::Args),
}

/// Parses a range of seeds, `A..B`.
fn seeds(text: &str) -> Result<Range<u64>, String> {
    let bad = || format!("{text:?} is not a range of seeds; give A..B, with A less than B");
    let (from, to) = text.split_once("..").ok_or_else(bad)?;
    let [from, to] = [from, to].map(|seed| seed.trim().parse::<u64>());
    match (from, to) {
        (Ok(from), Ok(to)) if from < to => Ok(from..to),
        _ => Err(bad()),
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (seeds, threads, coverage, format) = match &args.command {
        Command::Swarm { seeds, threads, coverage, format } => (seeds, threads, coverage, format),
        Command::Run(args) => return scenarios::run(args),
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let progress = *format == Format::Text && std::io::stderr().is_terminal();
    let total = seeds.end - seeds.start;
    let (mut reported, mut printed) = (0, Ok(()));
    let summary = swarm::run(seeds.clone(), threads.unwrap_or(cores), |summary| {
        if *format == Format::Text && summary.failed > reported {
            reported = summary.failed;
            if let (Some(failure), Ok(())) = (summary.failures.last(), &printed) {
                printed = print_line(&failure.to_string());
            }
        }
        if progress && summary.seeds.is_multiple_of(100) {
            stderr::overwrite_line(format_args!(
                "\r{} of {} …\x1b[K\r",
                summary.seeds,
                counted(total, "seed")
            ));
        }
    });
    let summary = summary.map_err(|error| not_started(&error))?;
    if progress {
        stderr::overwrite_line("\x1b[K");
    }
    printed?;
    match format {
        Format::Json => print_line(&serde_json::to_string(&summary).unwrap_or_default())?,
        Format::Text => {
            print_line(&format!(
                "{}, {} failed; {} over all ranks in {} s of simulated time",
                counted(summary.seeds, "seed"),
                summary.failed,
                counted(summary.ops, "op"),
                summary.took_us / 1_000_000
            ))?;
            if *coverage {
                print_coverage(&summary)?;
            }
        }
    }
    if summary.failed > 0 {
        let all = counted(total, "seed");
        return Err(Failure::failed(format!("{} of {all} failed", summary.failed)));
    }
    Ok(())
}

fn print_coverage(summary: &Summary) -> Result<(), Failure> {
    let totals = &summary.totals;
    print_line(&format!(
        "{} datagrams sent, {} lost, {} duplicated, {} delayed, {} dropped at a full queue, {} \
         marked; {} fragments retransmitted, {} arrived twice, {} nacks, {} of them probes",
        totals.sent,
        totals.lost,
        totals.doubled,
        totals.delayed,
        totals.dropped,
        totals.marked,
        totals.again,
        totals.duplicates,
        totals.asks,
        totals.probes
    ))?;
    summary
        .coverage
        .iter()
        .try_for_each(|(feature, seeds)| print_line(&format!("{seeds:>9}  {feature}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_a_range() {
        assert_eq!(seeds("3..7"), Ok(3..7));
        for bad in ["7", "7..3", "a..b", "1..", "3..3"] {
            assert!(seeds(bad).is_err(), "{bad}");
        }
    }
}
