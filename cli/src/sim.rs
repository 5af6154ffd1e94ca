//! `racksum sim`: runs the protocol in the simulator.

use std::io::IsTerminal;
use std::ops::Range;

use clap::Subcommand;
use racksum_proto::counted::counted;
use racksum_sim::swarm::{self, Summary};

use crate::args::{self, Format};
use crate::exit::{Failure, say};
use crate::stderr;
use crate::thread::not_started;

/// Runs the protocol's own code, packet by packet, on simulated links with faults.
#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run one plan per seed, each with its own world, sizes, links and faults, and check the
    /// invariants. A failed seed prints the command that replays it.
    Swarm {
        /// Seeds from A up to, but not including, B.
        #[arg(long, value_name = "A..B", value_parser = seeds, default_value = "0..100")]
        seeds: Range<u64>,
        /// Number of threads [default: one per core].
        #[arg(long, value_parser = args::number::<usize>(args::THREADS))]
        threads: Option<usize>,
        /// Also print how many seeds covered each feature; JSON output always has it.
        #[arg(long)]
        coverage: bool,
        /// Output format.
        #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
        format: Format,
    },
}

/// Parses a range of seeds, `A..B`.
fn seeds(text: &str) -> Result<Range<u64>, String> {
    let bad = || format!("{text:?} is not a range of seeds; give A..B, with A below B");
    let (from, to) = text.split_once("..").ok_or_else(bad)?;
    let [from, to] = [from, to].map(|seed| seed.trim().parse::<u64>());
    match (from, to) {
        (Ok(from), Ok(to)) if from < to => Ok(from..to),
        _ => Err(bad()),
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let Command::Swarm { seeds, threads, coverage, format } = &args.command;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let progress = *format == Format::Text && std::io::stderr().is_terminal();
    let total = seeds.end - seeds.start;
    let (mut told, mut said) = (0, Ok(()));
    let summary = swarm::run(seeds.clone(), threads.unwrap_or(cores), |summary| {
        if *format == Format::Text && summary.failed > told {
            told = summary.failed;
            if let (Some(failure), Ok(())) = (summary.failures.last(), &said) {
                said = say(&failure.to_string());
            }
        }
        if progress && summary.seeds.is_multiple_of(100) {
            stderr::draw(format_args!(
                "\r{} of {} …\x1b[K\r",
                summary.seeds,
                counted(total, "seed")
            ));
        }
    });
    let summary = summary.map_err(|error| not_started(&error))?;
    if progress {
        stderr::draw("\x1b[K");
    }
    said?;
    match format {
        Format::Json => say(&serde_json::to_string(&summary).unwrap_or_default())?,
        Format::Text => {
            say(&format!(
                "{}, {} failed; {} at all ranks in {} s of simulated time",
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
    say(&format!(
        "{} datagrams sent, {} lost, {} duplicated, {} delayed, {} dropped at a full queue, {} \
         marked; {} fragments retransmitted, {} arrived twice, {} asks, {} probes",
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
    summary.coverage.iter().try_for_each(|(feature, seeds)| say(&format!("{seeds:>9}  {feature}")))
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
