//! The project's chores behind one command. Developers and CI run `cargo xtask test`.
//!
//! [`steps`] holds the steps of a test run and [`tidy`] the rules that rustfmt and clippy do not
//! check. [`mod@bench`] starts the harness that races racksum against other programs, and [`soak`]
//! runs jobs for a long time while it kills ranks and aggregators. [`sanitize`] needs a nightly
//! toolchain. A new chore needs a module here and a variant of [`Chore`]. A new step of the test
//! run needs a variant of [`steps::Step`].

mod attack;
mod bench;
mod crate_imports;
mod deploy;
mod english;
mod import_cycles;
mod problem;
mod python;
mod sample;
mod sanitize;
mod soak;
mod source;
mod steps;
mod tidy;
mod wire;

use std::env;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use racksum_tools::root;

use crate::attack::AttackArgs;
use crate::bench::BenchArgs;
use crate::sample::SampleArgs;
use crate::soak::SoakArgs;
use crate::steps::Step;

/// The project's chores.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

/// One chore.
#[derive(Debug, Subcommand)]
enum Chore {
    /// Set the machine up, then lint, document, test, simulate and try the benches.
    Test(TestArgs),
    /// Run the CI checks: the same as `test`.
    Ci(TestArgs),
    /// Check the rules that rustfmt and clippy do not check.
    Tidy,
    /// Compare racksum with other programs and with its bounds.
    #[command(disable_help_flag = true)]
    Bench(BenchArgs),
    /// Attack aggregators on this host as a tenant or a stranger could, and measure the effect on
    /// others.
    Attack(AttackArgs),
    /// Draw sentences from comments and messages at random, to judge their English.
    Sample(SampleArgs),
    /// Start and end jobs for a while, and kill ranks and aggregators.
    Soak(SoakArgs),
    /// Test the code for shared memory with ThreadSanitizer and Miri. Needs a nightly toolchain.
    Sanitize,
}

/// The selected steps of the test run.
#[derive(Debug, Args)]
struct TestArgs {
    /// Run only this step; may be given more than once.
    #[arg(long, value_name = "STEP")]
    only: Vec<Step>,
}

fn run(chore: &Chore) -> Result<ExitCode> {
    let passed = match chore {
        Chore::Test(args) | Chore::Ci(args) => steps::run(root(), &args.only)?,
        Chore::Tidy => tidy::report(root())?,
        Chore::Sample(args) => sample::run(root(), args).map(|()| true)?,
        Chore::Bench(args) => return Err(bench::exec(root(), args)),
        Chore::Attack(args) => attack::run(root(), args)?,
        Chore::Soak(args) => soak::run(root(), args)?,
        Chore::Sanitize => sanitize::run(root())?,
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> ExitCode {
    let cli = Cli::parse_from(bench::with_own_help(env::args_os()));
    run(&cli.chore).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
