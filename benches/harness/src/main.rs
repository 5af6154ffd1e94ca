//! `cargo xtask bench` compares racksum with other programs and with its bounds (`peers`), times
//! failures (`failures`) and moves of running jobs (`moves`), and compares training results
//! (`learning`) and placements (`placement`).
//!
//! `benches/README.md` explains the measurements to a reader of the results. In this program,
//! [`cases`] defines the cases, [`race`] the procedure, [`side`] the programs and [`network`] the
//! links. The peer programs are in `benches/peers`. Racksum's own ranks run `racksum bench
//! --interactive`, which obeys the same commands on standard input as the peers. `cargo xtask`
//! builds and starts this program (`xtask/src/bench.rs`).

mod background_job;
mod before;
mod case;
mod cases;
mod failures;
mod host;
mod learning;
mod memory;
mod moves;
mod network;
mod peers;
mod placement;
mod process_group;
mod race;
mod report;
mod setup;
mod side;
mod stats;
mod volume;

use std::io::{IsTerminal, stderr};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use racksum_tools::root;

use crate::failures::FailuresArgs;
use crate::learning::LearningArgs;
use crate::moves::MovesArgs;
use crate::peers::PeersArgs;
use crate::placement::PlacementArgs;

/// Compare racksum with other programs and with its bounds.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Cli {
    #[command(subcommand)]
    what: What,
}

/// The measurement to run.
#[derive(Debug, Subcommand)]
enum What {
    /// Race racksum against Gloo and Open MPI, and compare it with its own bounds.
    ///
    /// Builds and installs what it needs, and prints what is missing. As root it creates network
    /// namespaces for the cases on slow links, and removes them afterwards.
    Peers(PeersArgs),
    /// Measure how long users wait when something fails: a killed rank, a lost aggregator.
    ///
    /// Runs the end-to-end tests that record such times, one at a time. The machine should be
    /// idle.
    Failures(FailuresArgs),
    /// Move a live job of 4 ranks again and again, and measure its longest op.
    Moves(MovesArgs),
    /// Train the examples with Gloo and with racksum, and compare what they learn.
    Learning(LearningArgs),
    /// Measure links of small clusters, place jobs in them, and compare their steps with those of
    /// other placements and with predictions.
    ///
    /// As root it creates network namespaces, and removes them afterwards.
    Placement(PlacementArgs),
    /// Run small races of racksum with itself, as `cargo xtask test --only smoke` does.
    #[command(hide = true)]
    Smoke,
}

/// Runs the measurement; returns `true` if nothing failed and, where bounds are enforced, all hold.
fn run(what: &What) -> Result<bool> {
    match what {
        What::Peers(args) => peers::run(root(), args),
        What::Failures(args) => failures::run(root(), args),
        What::Moves(args) => moves::run(root(), args),
        What::Learning(args) => learning::run(root(), args).map(|()| true),
        What::Placement(args) => placement::run(root(), args),
        What::Smoke => peers::smoke(root()),
    }
}

/// Shows the progress if standard error is a terminal.
fn show_progress(what: &str) {
    if stderr().is_terminal() {
        eprint!("\r\x1b[K{what}");
    }
}

fn main() -> ExitCode {
    match run(&Cli::parse().what) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Cli;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
