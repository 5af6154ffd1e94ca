//! The `racksum` binary. Each subcommand has a module.

// A full or closed standard error must not stop a server, so all code writes to it through module
// `stderr`.
#![warn(clippy::print_stderr)]

mod aggregator;
mod args;
mod bench;
mod cluster_file;
mod embedded;
mod environment;
mod exit;
mod identity;
mod inventory;
mod logs;
mod member;
mod memory;
mod moves;
mod option_source;
mod out_file;
mod place;
mod probe;
mod process_group;
mod progress;
mod reduce;
mod remote;
mod signals;
mod sim;
mod standby;
mod status;
mod stderr;
mod table;
mod thread;
mod unnamed;
mod worker;

use std::fs::File;
use std::io;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use exit::{Exit, Failure, stdout_failure};
use racksum_net::local::fail_at_file_limit;
use racksum_net::runtime::single_threaded;

/// Sums the gradients of training jobs near the rack.
#[derive(Debug, Parser)]
#[command(name = "racksum", version, propagate_version = true)]
#[command(after_long_help = args::EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Log level: off, error, warn, info, debug or trace; or module=level, with level warn for all
    /// other modules [default: warn] [env: RACKSUM_LOG].
    #[arg(long, global = true)]
    log: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve jobs: receive their gradients over UDP, sum them, and send the sums back.
    Aggregator(aggregator::Args),
    /// Issue and show the certificates that identify the nodes of a cluster.
    Identity(identity::Args),
    /// Measure and check allreduce, with all ranks on this host or as one rank of a distributed
    /// run.
    Bench(Box<bench::Args>),
    /// Sum the gradients in safetensors files, one file per rank.
    Reduce(Box<reduce::Args>),
    /// Show the jobs of aggregators or of a sidecar, and the ranks that the jobs wait for.
    Status(status::Args),
    /// Move a running job to another aggregator, which its ranks need not know.
    Move(moves::MoveArgs),
    /// Move all jobs of an aggregator to another one, and then stop the aggregator.
    Drain(moves::DrainArgs),
    /// Run a sidecar, which sums the tensors of this host's ranks in shared memory.
    Worker(worker::Args),
    /// Choose hosts for the ranks and aggregators of a job.
    Place(Box<place::Args>),
    /// Make the nodes file of `place` from a topology of Slurm, Topograph or Kubernetes.
    Inventory(inventory::Args),
    /// Measure the links between hosts.
    #[command(subcommand)]
    Probe(probe::Command),
    /// Run the protocol in the simulator.
    Sim(sim::Args),
}

fn main() -> Exit {
    fail_at_file_limit();
    let cli = match parse() {
        Ok(cli) => cli,
        Err(error) => return end(print_parse_error(error)),
    };
    let started = logs::start(cli.log).and_then(|()| check_descriptors());
    let done = started.and_then(|()| match cli.command {
        Command::Aggregator(args) => aggregator::run(&args),
        Command::Identity(args) => identity::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Reduce(args) => reduce::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Move(args) => moves::run_move(&args),
        Command::Drain(args) => moves::run_drain(&args),
        Command::Worker(args) => worker::run(&args),
        Command::Place(args) => place::run(&args),
        Command::Inventory(args) => inventory::run(&args),
        Command::Probe(command) => probe::run(&command),
        Command::Sim(args) => sim::run(&args),
    });
    end(done.map(|()| Exit::OK))
}

/// Returns the exit code of a command. If the command failed, first prints the reason, except for
/// [`Exit::UNREAD`].
fn end(done: Result<Exit, Failure>) -> Exit {
    match done {
        Ok(exit) => exit,
        Err(Failure { exit: Exit::UNREAD, .. }) => Exit::UNREAD,
        Err(failure) => {
            stderr::print_line(&failure);
            failure.exit
        }
    }
}

/// Prints a command-line error, or the help or version that the user asked for. Returns success for
/// help and version.
fn print_parse_error(mut error: clap::Error) -> Result<Exit, Failure> {
    let hidden = hidden_flags(&Cli::command());
    let is_hidden = |text: &str| hidden.iter().any(|flag| text.contains(flag));
    // Do not suggest hidden flags: they are not meant for users.
    match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(flag)) if is_hidden(flag) => {
            error.remove(ContextKind::SuggestedArg);
        }
        _ => {}
    }
    if let Some(ContextValue::StyledStrs(mut tips)) = error.remove(ContextKind::Suggested) {
        tips.retain(|tip| !is_hidden(&tip.to_string()));
        if !tips.is_empty() {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
    }
    if lacks_rank(&error) {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![OF_ONE_RANK.into()]));
    }
    let printed = error.print();
    if error.use_stderr() {
        return Ok(Exit::USAGE);
    }
    printed.map(|()| Exit::OK).map_err(stdout_failure)
}

/// Returns whether a flag for one rank of a distributed run is given without `--rank` or `--world`.
fn lacks_rank(error: &clap::Error) -> bool {
    let lacking = error.get(ContextKind::InvalidArg);
    let of_rank = |flag: &String| flag.starts_with("--rank ") || flag.starts_with("--world ");
    error.kind() == ErrorKind::MissingRequiredArgument
        && matches!(lacking, Some(ContextValue::Strings(flags)) if flags.iter().any(of_rank))
}

/// Tip for a user who gives a flag for one rank without `--rank` or `--world`.
const OF_ONE_RANK: &str = "these flags configure one rank of a distributed run; add --rank and \
                           --world, or leave the flags out to run all ranks on this host";

/// Builds the clap command. Each flag with a value also accepts a negative number, so that its own
/// parser can reject the number and name the valid range. Otherwise clap would report the number as
/// an unknown flag.
fn command() -> clap::Command {
    fn taking_numbers(command: clap::Command) -> clap::Command {
        let takes = |arg: &clap::Arg| arg.get_action().takes_values() && !arg.is_positional();
        command
            .mut_args(|arg| if takes(&arg) { arg.allow_negative_numbers(true) } else { arg })
            .mut_subcommands(taking_numbers)
    }
    taking_numbers(Cli::command())
}

/// Parses the command line.
fn parse() -> Result<Cli, clap::Error> {
    let mut command = command();
    let mut matches = command.try_get_matches_from_mut(std::env::args_os())?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Returns the flags that are hidden in the help of a command and of its subcommands.
fn hidden_flags(command: &clap::Command) -> Vec<String> {
    let own = command.get_arguments().filter(|flag| flag.is_hide_set());
    let own = own.filter_map(|flag| Some(format!("--{}", flag.get_long()?)));
    own.chain(command.get_subcommands().flat_map(hidden_flags)).collect()
}

/// Number of file descriptors that every subcommand needs. Code that needs more reports its own
/// errors.
const DESCRIPTORS: usize = 8;

/// Checks that this process can open as many files as every subcommand needs.
fn check_descriptors() -> Result<(), Failure> {
    let opened: io::Result<Vec<File>> =
        std::iter::repeat_with(|| File::open("/dev/null")).take(DESCRIPTORS).collect();
    // Start a runtime too: the first one opens descriptors that all later ones share.
    opened.map(drop).and_then(|()| single_threaded().map(drop)).map_err(|error| {
        let advice = "raise the limit on open files (ulimit -n)";
        Failure::unavailable(format!("cannot open {DESCRIPTORS} files: {error}; {advice}"))
    })
}
