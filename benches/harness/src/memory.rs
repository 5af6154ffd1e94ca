//! Compares the memory use of an aggregator that serves many jobs to its configured pool.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::case::{Grade, Memory};
use crate::process_group::{ITERATION_TIMEOUT, ProcessGroup};
use crate::race::Rounds;
use crate::setup::Setup;
use crate::side::{START_TIMEOUT, aggregator, rank_of, ready};

/// The results of a memory case. All sizes are in bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// Configured size: the pools of all shards.
    pub(crate) pool: u64,
    /// Resident size before the first job.
    pub(crate) at_start: u64,
    /// Resident size after the last op.
    pub(crate) after: u64,
    /// Largest resident size.
    pub(crate) peak: u64,
    /// Limit on the peak.
    pub(crate) most: u64,
    pub(crate) verdict: Grade,
}

/// Runs all jobs at the same time; `show_progress` receives progress messages.
pub(crate) fn run(
    case: &Memory,
    rounds: Rounds,
    setup: &Setup,
    logs: &Path,
    show_progress: &mut dyn FnMut(&str),
) -> Result<Outcome> {
    let flags = [
        format!("--shards={}", case.shards),
        format!("--pool-mib={}", case.pool_mib),
        format!("--max-jobs={}", case.jobs),
    ];
    let (server, addr) = aggregator(&setup.racksum, None, &flags, logs)?;
    let at_start = Resident::of(server.pid(0))?;
    show_progress("setting up the jobs");
    let rank = |job: u16, rank: u16| {
        let name = format!("{}-{job}", case.name);
        rank_of(&setup.racksum, None, &addr.to_string(), &name, rank, case.world)
    };
    let ranks = (0..case.jobs).flat_map(|job| (0..case.world).map(move |rank| (job, rank)));
    let mut process_group =
        ProcessGroup::start("rank", ranks.map(|(job, nth)| rank(job, nth)), logs)?;
    ready(&process_group.answers(START_TIMEOUT)?)?;
    let setting = serde_json::json!({ "bytes": case.bytes, "mode": "dense" });
    ready(&process_group.ask(&format!("set {setting}"), START_TIMEOUT)?)?;
    let total = rounds.warmup + rounds.counted;
    for round in 1..=total {
        show_progress(&format!("round {round} of {total}"));
        process_group.ask("go", ITERATION_TIMEOUT).with_context(|| format!("round {round}"))?;
    }
    let after = Resident::of(server.pid(0))?;
    Ok(Outcome::of(case, at_start, after))
}

impl Outcome {
    fn of(case: &Memory, at_start: Resident, after: Resident) -> Self {
        let pool = u64::from(case.shards) * (u64::from(case.pool_mib) << 20);
        let most = pool + case.spare_bytes;
        let peak = after.peak;
        let verdict = if peak <= most { Grade::Pass } else { Grade::Missed };
        Self { pool, at_start: at_start.now, after: after.now, peak, most, verdict }
    }
}

/// Resident memory of a process, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Resident {
    now: u64,
    peak: u64,
}

impl Resident {
    fn of(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/status");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        Self::parse(&text).with_context(|| format!("{path} lacks VmRSS or VmHWM"))
    }

    fn parse(status: &str) -> Option<Self> {
        let bytes = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            Some(kib * 1024)
        };
        Some(Self { now: bytes("VmRSS:")?, peak: bytes("VmHWM:")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: Memory = Memory {
        name: "memory",
        jobs: 1,
        world: 1,
        bytes: 4,
        shards: 2,
        pool_mib: 1,
        spare_bytes: 1000,
    };

    #[test]
    fn memory_is_read_from_a_process_status() {
        let status = "Name:\tracksum\nVmHWM:\t    2000 kB\nVmRSS:\t    1000 kB\n";
        let resident = Resident { now: 1_024_000, peak: 2_048_000 };
        assert_eq!(Resident::parse(status), Some(resident));
        assert_eq!(Resident::parse("Name:\tkthreadd\n"), None);
        assert!(Resident::of(std::process::id()).unwrap().now > 0);
    }

    #[test]
    fn the_peak_may_be_the_pool_and_the_spare() {
        let judged = |peak| {
            let at = |peak| Resident { now: 1, peak };
            Outcome::of(&CASE, at(1), at(peak)).verdict
        };
        assert_eq!(judged((2 << 20) + 1000), Grade::Pass);
        assert_eq!(judged((2 << 20) + 1001), Grade::Missed);
    }
}
