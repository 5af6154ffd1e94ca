//! A reduction on one host: an aggregator in this process, a process for each rank's file.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;

use clap::ValueEnum;
use racksum_aggregator::{Aggregator, Config, MAX_WORLD};

use super::Args;
use super::file::GradientFile;
use super::out::OutFile;
use super::rank::{Report, Said};
use super::report::Table;
use crate::exit::Failure;

/// Reduces the files and prints what it took.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let world = u16::try_from(args.files.len()).ok().filter(|world| *world <= MAX_WORLD);
    let world = world.ok_or_else(|| {
        Failure::usage(format!("a job has 1 to {MAX_WORLD} ranks, not {}", args.files.len()))
    })?;
    let files =
        args.files.iter().map(|path| GradientFile::open(path)).collect::<Result<Vec<_>, _>>()?;
    let (first, others) = files.split_first().ok_or_else(|| Failure::usage("no file is named"))?;
    for other in others {
        first.check_same(other)?;
    }
    args.descriptors(first)?;
    let out = args.out.as_deref().map(OutFile::create).transpose()?;
    let aggregator = Aggregator::start(Config {
        port: 0,
        shards: args.shards,
        max_jobs: 1,
        fanout: args.fanout.into(),
        ..Config::default()
    })?;
    for warning in aggregator.warnings() {
        eprintln!("racksum: warning: {warning}");
    }
    let workers = Workers::start(args, world, &aggregator, out.as_ref().map(OutFile::temporary))?;
    let reports = workers.finish()?;
    if let Some(rank) = reports.iter().position(|report| report.digest != reports[0].digest) {
        return Err(Failure::failed(format!(
            "rank {rank} ended with other bits than rank 0; nothing is written"
        )));
    }
    if let Some(out) = out {
        out.commit()?;
    }
    Table { args, tensors: &first.tensors, rank: None, reports: &reports }.print()
}

/// The processes of the ranks; those that still run are killed when it is dropped.
struct Workers(Vec<Child>);

impl Drop for Workers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that has ended cannot be killed, and need not be.
            drop(child.kill());
            drop(child.wait());
        }
    }
}

impl Workers {
    /// Starts a process for each rank; the first writes the result.
    fn start(
        args: &Args,
        world: u16,
        aggregator: &Aggregator,
        into: Option<&Path>,
    ) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::failed(format!("cannot find this program: {error}")))?;
        let mut workers = Self(Vec::new());
        for (rank, file) in (0..world).zip(&args.files) {
            let mut command = Command::new(&program);
            command
                .args(["reduce", "--raw"])
                .args(["--aggregator", &aggregator.addr().to_string()])
                .args(["--rank", &rank.to_string(), "--world", &world.to_string()])
                .args(args.for_ranks());
            if let Some(into) = into.filter(|_| rank == 0) {
                command.arg("--into").arg(into);
            }
            let child = command
                .arg("--")
                .arg(file)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(|error| Failure::failed(format!("cannot start rank {rank}: {error}")))?;
            workers.0.push(child);
        }
        Ok(workers)
    }

    /// Waits for all ranks; the first that fails ends the others.
    fn finish(mut self) -> Result<Vec<Report>, Failure> {
        let (tell, hear) = channel();
        for (rank, child) in self.0.iter_mut().enumerate() {
            let mut out = child
                .stdout
                .take()
                .ok_or_else(|| Failure::failed(format!("rank {rank} has no standard output")))?;
            let tell = tell.clone();
            std::thread::spawn(move || {
                let mut said = String::new();
                // What cannot be read is as good as nothing said.
                drop(out.read_to_string(&mut said));
                // Nobody listens any more once another rank has failed.
                drop(tell.send((rank, said)));
            });
        }
        drop(tell);
        let mut reports = vec![None; self.0.len()];
        while let Ok((rank, said)) = hear.recv() {
            match serde_json::from_str(&said) {
                Ok(Said::Done(report)) => reports[rank] = Some(*report),
                Ok(Said::Failed(failure)) => {
                    let why = format!("rank {rank}: {failure}");
                    return Err(Failure { why, ..failure });
                }
                Err(_) => {
                    let status = self.0[rank].wait();
                    let status = status.map_or_else(|e| e.to_string(), |status| status.to_string());
                    return Err(Failure::failed(format!("rank {rank} ended early ({status})")));
                }
            }
        }
        reports
            .into_iter()
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Failure::failed("a rank said nothing"))
    }
}

impl Args {
    /// The flags that the ranks' processes share with their parent.
    fn for_ranks(&self) -> Vec<String> {
        let Self { op, wire, block, drop, dup, reorder, seed, timeout, .. } = self;
        let mut flags: Vec<String> = [
            ("op", op.name().to_owned()),
            ("block", block.to_string()),
            ("drop", drop.to_string()),
            ("dup", dup.to_string()),
            ("reorder", reorder.to_string()),
            ("seed", seed.to_string()),
            ("timeout", timeout.to_string()),
        ]
        .into_iter()
        .map(|(flag, value)| format!("--{flag}={value}"))
        .collect();
        flags.extend(wire.map(|wire| format!("--wire={}", wire.name())));
        let format = self.format.to_possible_value();
        flags.extend(format.map(|format| format!("--format={}", format.get_name())));
        flags
    }
}
