//! The benchmark on one host: an aggregator in this process, a process for each rank.

use std::io::{BufRead, BufReader, IsTerminal};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use racksum_aggregator::{Aggregator, Config};

use super::rank::Measured;
use super::report::Row;
use super::{Args, WORKERS, print, verdict};
use crate::args::{Fanout, Format};
use crate::exit::{Exit, Failure, say};

/// The workers; those that still run are killed when it is dropped.
struct Workers(Vec<(Child, BufReader<ChildStdout>)>);

impl Drop for Workers {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            // One that has ended cannot be killed, and need not be.
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// Runs the benchmark and prints its rows.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let defaults = Config::default();
    let config = Config {
        port: 0,
        shards: args.shards.unwrap_or(1),
        pool_slots: if args.pool_slots == 0 { defaults.pool_slots } else { args.pool_slots },
        max_jobs: 1,
        fanout: args.fanout.unwrap_or(Fanout::Auto).into(),
        ..defaults
    };
    let aggregator = Aggregator::start(config)?;
    for warning in aggregator.warnings() {
        eprintln!("racksum: warning: {warning}");
    }
    let world = args.workers.unwrap_or(WORKERS);
    let mut workers = spawn(world, &aggregator)?;
    let progress = args.format == Format::Text && std::io::stderr().is_terminal();
    let mut wrong = 0;
    for density in args.densities() {
        let pattern = args.pattern(world, density);
        if args.format == Format::Text {
            say(&Row::head(&pattern, None))?;
        }
        for bytes in args.sizes() {
            if progress {
                eprint!("\rmeasuring {bytes} bytes …\x1b[K\r");
            }
            let measured = workers
                .0
                .iter_mut()
                .enumerate()
                .map(|(rank, worker)| next(rank, worker))
                .collect::<Result<Vec<_>, _>>()?;
            if let Some(row) = Row::new(args, &pattern, None, &measured) {
                wrong += row.wrong();
                if progress {
                    eprint!("\x1b[K");
                }
                print(args.format, &row)?;
            }
        }
    }
    for (rank, (child, _)) in workers.0.iter_mut().enumerate() {
        let status = child.wait().map_err(|error| Failure::failed(error.to_string()))?;
        if !status.success() && wrong == 0 {
            return Err(ended(format!("worker {rank} ended badly"), status));
        }
    }
    verdict(wrong)
}

/// Starts a process for each rank, with the flags of this one.
fn spawn(world: u16, aggregator: &Aggregator) -> Result<Workers, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::failed(format!("cannot find this program: {error}")))?;
    let mut workers = Workers(Vec::new());
    for rank in 0..world {
        let mut child = Command::new(&program)
            .args(std::env::args_os().skip(1))
            .arg("--raw")
            .args(["--aggregator", &aggregator.addr().to_string()])
            .args(["--rank", &rank.to_string(), "--world", &world.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::failed(format!("cannot start worker {rank}: {error}")))?;
        let Some(out) = child.stdout.take() else {
            return Err(Failure::failed(format!("worker {rank} has no standard output")));
        };
        workers.0.push((child, BufReader::new(out)));
    }
    Ok(workers)
}

/// What a worker measured next.
fn next(
    rank: usize,
    (child, out): &mut (Child, BufReader<ChildStdout>),
) -> Result<Measured, Failure> {
    let mut line = String::new();
    let read = out.read_line(&mut line);
    if matches!(read, Ok(len) if len > 0) {
        return serde_json::from_str(&line)
            .map_err(|error| Failure::failed(format!("worker {rank} said {line:?}: {error}")));
    }
    let status = child.wait().map_err(|error| Failure::failed(error.to_string()))?;
    Err(ended(format!("worker {rank} ended early, see its message above"), status))
}

/// A worker that did not do its part: what was wrong for it is wrong for all.
fn ended(what: String, status: ExitStatus) -> Failure {
    Failure { why: format!("{what} ({status})"), exit: Exit::of(status) }
}
