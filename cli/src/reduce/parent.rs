//! A reduction on one host: an aggregator in this process, and a process for each rank's file.

use std::path::Path;

use clap::ValueEnum;
use racksum_aggregator::{Config, MAX_WORLD};
use racksum_proto::auth::DataAuth;

use super::Args;
use super::file::GradientFile;
use super::rank::check_memory;
use super::report::Report;
use super::report::Table;
use crate::embedded::Embedded;
use crate::exit::Failure;
use crate::out_file::OutFile;
use crate::process_group::ProcessGroup;

/// Reduces the files and prints the report.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let world = u16::try_from(args.files.len()).ok().filter(|world| *world <= MAX_WORLD);
    let world = world.ok_or_else(|| {
        Failure::usage(format!(
            "give 1 to {MAX_WORLD} files, one per rank, not {}",
            args.files.len()
        ))
    })?;
    let files =
        args.files.iter().map(|path| GradientFile::open(path)).collect::<Result<Vec<_>, _>>()?;
    let (first, others) = files.split_first().ok_or_else(|| Failure::usage("no file given"))?;
    for other in others {
        first.check_same(other)?;
    }
    check_memory(first, world)?;
    args.warn_unnarrowed(first)?;
    args.descriptors(first)?;
    let out = args.out.as_deref().map(OutFile::create).transpose()?;
    if let Some(out) = &out {
        out.remove_at_signal()?;
    }
    let aggregator = Embedded::start(config(args))?;
    let into = out.as_ref().map(OutFile::temporary);
    let process_group = start(args, world, &aggregator, into.as_deref())?;
    let reports = reports(process_group, world)?;
    if let Some(rank) = reports.iter().position(|report| report.digest != reports[0].digest) {
        return Err(Failure::failed(format!(
            "rank {rank} and rank 0 have different results; no file was written"
        )));
    }
    if let Some(out) = out {
        out.commit()?;
    }
    Table { args, tensors: &first.tensors, rank: None, reports: &reports }.print()
}

/// Returns the configuration of the aggregator in this process.
fn config(args: &Args) -> Config {
    Config {
        port: 0,
        shards: args.shards,
        max_jobs: 1,
        // Encrypt by default: users of this host who may not read the files could otherwise read
        // the multicast results.
        data_auth: Some(args.member.data_auth.unwrap_or(DataAuth::Aead)),
        fanout: args.fanout.into(),
        ..Config::default()
    }
}

/// Starts a process for each rank. Rank 0 writes the result.
fn start(
    args: &Args,
    world: u16,
    aggregator: &Embedded,
    into: Option<&Path>,
) -> Result<ProcessGroup, Failure> {
    ProcessGroup::start(world, |rank, command| {
        command.args(["reduce", "--raw"]);
        aggregator.call(command, rank, world);
        command.args(args.for_ranks());
        if let Some((into, out)) = into.filter(|_| rank == 0).zip(args.out.as_deref()) {
            // Errors name the file by its `--out` path.
            command.arg("--into").arg(into).arg("--out").arg(out);
        }
        command.arg("--").arg(&args.files[usize::from(rank)]);
    })
}

/// Returns the reports of all ranks. If a rank fails, the others are killed.
fn reports(mut process_group: ProcessGroup, world: u16) -> Result<Vec<Report>, Failure> {
    let mut reports = vec![None; usize::from(world)];
    while reports.iter().any(Option::is_none) {
        match process_group.recv()? {
            (rank, Some(report)) => reports[rank] = Some(report),
            (rank, None) if reports[rank].is_none() => return Err(process_group.ended_early(rank)),
            (_, None) => {}
        }
    }
    Ok(reports.into_iter().flatten().collect())
}

impl Args {
    /// Returns the flags that the parent process passes on to the ranks' processes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::parsed;

    #[test]
    fn datagrams_are_sealed_unless_something_else_is_asked_for() {
        for (flags, auth) in [
            (&[][..], DataAuth::Aead),
            (&["--data-auth", "mac"], DataAuth::Mac),
            (&["--data-auth", "none"], DataAuth::None),
        ] {
            let line = [&["reduce", "file"][..], flags].concat();
            assert_eq!(config(&parsed(&line)).data_auth, Some(auth), "{flags:?}");
        }
    }

    #[test]
    fn a_rank_joins_with_the_mtu_that_it_is_given() {
        let joins = ["--aggregator", "127.0.0.1:1", "--rank", "0", "--world", "2"];
        let line = [&["reduce", "file", "--mtu", "1400"], &joins[..]].concat();
        let args: Args = parsed(&line);
        let member = args.member.member("job").unwrap().unwrap();
        assert_eq!(args.connect_options(&member).mtu, Some(1400));
    }
}
