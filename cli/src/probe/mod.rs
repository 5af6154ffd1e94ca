//! `racksum probe`: measures the links between the hosts of a cluster.

mod heat_map;
mod learn;
mod measure;
mod report;
mod serve;
mod show;

use crate::args;
use crate::exit::Failure;

#[derive(Debug, clap::Subcommand)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) enum Command {
    /// Serve on this host as an agent: measure paths to the agents of other hosts when `racksum
    /// probe run` orders it.
    Serve(serve::Args),
    /// Measure the paths between all hosts that run an agent, and write a network file for `racksum
    /// place`.
    Run(measure::Args),
    /// Improve a network file by the counters of running jobs.
    Learn(learn::Args),
    /// Show a network file as a table, and as a heat map with --svg.
    Show(show::Args),
}

pub(crate) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Serve(args) => serve::run(args),
        Command::Run(args) => measure::run(args),
        Command::Learn(args) => learn::run(args),
        Command::Show(args) => show::run(args),
    }
}
