//! Jobs at a placement: an aggregator, and ranks that run `racksum bench` or train with DDP.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::scene::Seats;
use super::zones::Zones;
use super::{Bench, START};
use crate::network::{Host, INTERFACE};
use crate::process_group::ProcessGroup;
use crate::stats::Summary;

/// The program that ranks run.
#[derive(Debug, Clone, Copy)]
pub(super) enum Program<'a> {
    /// `racksum bench` with the bytes of the scene's job.
    Bench,
    /// The example `words` with DDP, by this Python.
    Ddp(&'a Path),
}

/// The ranks and the aggregator of a job.
pub(super) struct RunningJob {
    ranks: ProcessGroup,
    _aggregator: Server,
}

/// Servers, which end when this value is dropped.
pub(super) struct Server(pub(super) ProcessGroup);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.terminate();
    }
}

impl RunningJob {
    /// Runs a step. Returns the time of the slowest rank in seconds.
    pub(super) fn step_s(&mut self) -> Result<f64> {
        let answers = self.ranks.ask("go", RUN)?;
        let us = answers.iter().filter_map(|answer| answer["us"].as_f64());
        Ok(us.fold(0.0, f64::max) / 1e6)
    }
}

impl Bench<'_> {
    /// Runs a job at a placement. Returns the median time of its steps in seconds.
    pub(super) fn step_s(&self, zones: &Zones, seats: &Seats, program: Program<'_>) -> Result<f64> {
        let mut job = self.start(zones, seats, program)?;
        job.step_s()?;
        let mut steps = vec![];
        // Long steps differ little, so three of them are enough.
        while steps.len() < STEPS && (steps.len() < 3 || steps.iter().sum::<f64>() < LONG_S) {
            steps.push(job.step_s()?);
        }
        Ok(Summary::of(&steps).context("no step was measured")?.median)
    }

    /// Starts a job at a placement.
    pub(super) fn start(
        &self,
        zones: &Zones,
        seats: &Seats,
        program: Program<'_>,
    ) -> Result<RunningJob> {
        let server = &zones.hosts[seats.aggregator];
        let mut command = server.command(&self.racksum);
        command.args(["aggregator", "--insecure", "--fanout", "unicast", "--pool-mib", "64"]);
        command.args(["--bind", &server.addr.to_string()]);
        let mut aggregator = ProcessGroup::start("aggregator", [command], &self.work)?;
        aggregator.lines(START)?;
        let hosts = seats.ranks.iter().zip(&zones.hosts);
        let hosts = hosts.flat_map(|(ranks, host)| std::iter::repeat_n(host, *ranks as usize));
        let hosts: Vec<_> = hosts.collect();
        let addr = format!("{}:7177", server.addr);
        let rank = |rank: usize| match program {
            Program::Bench => self.bench_rank(&hosts, rank, &addr),
            Program::Ddp(python) => self.ddp_rank(&hosts, rank, &addr, python),
        };
        let ranks = (0..hosts.len()).map(rank);
        let mut ranks = ProcessGroup::start("rank", ranks, &self.work)?;
        ranks.answers(READY)?;
        Ok(RunningJob { ranks, _aggregator: Server(aggregator) })
    }

    fn bench_rank(&self, hosts: &[&Host], rank: usize, addr: &str) -> Command {
        let mut command = hosts[rank].command(&self.racksum);
        let size = self.args.bytes.to_string();
        command.args(["bench", "--insecure", "--interactive", "-b", &size]);
        command.args(["-e", &size, "--timeout", "120", "--aggregator", addr]);
        command.args(["--rank", &rank.to_string(), "--world", &hosts.len().to_string()]);
        command
    }

    fn ddp_rank(&self, hosts: &[&Host], rank: usize, addr: &str, python: &Path) -> Command {
        let mut command = hosts[rank].command(python);
        command.arg(self.root.join("benches/peers/training.py"));
        command.args(["words", "--backend", "racksum", "--steps", "1"]);
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", hosts.len().to_string())
            .env("MASTER_ADDR", hosts[0].addr.to_string())
            .env("MASTER_PORT", "29500")
            .env("OMP_NUM_THREADS", "1")
            // Otherwise, Gloo resolves the machine's name, which no namespace can reach.
            .env("GLOO_SOCKET_IFNAME", INTERFACE)
            .env("RACKSUM_AGGREGATOR", addr)
            .env("RACKSUM_INSECURE", "1")
            .env("RACKSUM_JOB", "words");
        command
    }
}

/// Time limit for the ranks to be ready; DDP trains some steps before.
const READY: Duration = Duration::from_secs(300);
/// Time limit for a step.
const RUN: Duration = Duration::from_secs(120);
/// The number of steps, of which the median counts.
const STEPS: usize = 5;
/// The time in seconds after which fewer steps suffice.
const LONG_S: f64 = 10.0;
