//! `cargo xtask bench moves` moves a live job again and again, and judges its longest op.
//!
//! An end-to-end test (`cli/tests/cli/moves.rs`) moves the job with `racksum move`. It fails if an
//! op fails, or if a sum has other bits than the first one.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use racksum_test_report::{self as report, Entry};
use racksum_tools::interrupt;
use racksum_tools::shell::{Cmd, path, target};

use crate::failures::{CLI_TESTS, build};

/// Number of moves, and the size of the tensors.
#[derive(Debug, Args)]
pub(crate) struct MovesArgs {
    /// Number of moves.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    moves: u32,
    /// Size of each rank's tensor in bytes, a multiple of four.
    #[arg(long, default_value_t = 100_000_000, value_parser = clap::value_parser!(u32).range(4..))]
    bytes: u32,
}

/// The test that moves a job.
const TEST: &str = "moves::a_live_job_moves_again_and_again_and_costs_no_bit";
/// The longest op in milliseconds that users would not notice.
const REACH_MS: u64 = 300;

/// Moves a job, and prints its outcome; returns `true` if the longest op is below its limit.
pub(crate) fn run(root: &Path, args: &MovesArgs) -> Result<bool> {
    interrupt::listen()?;
    let file = target(root).join("moves.jsonl");
    if file.exists() {
        fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    let program = build(root, CLI_TESTS)?;
    let printed = Cmd::new(path(&program)?, &["--exact", TEST, "--nocapture"])
        .env("RACKSUM_TEST_MOVES", args.moves.to_string())
        .env("RACKSUM_TEST_MOVE_BYTES", args.bytes.to_string())
        .env(report::FILE, path(&file)?)
        .env(report::TEST, TEST)
        .output(root)
        .context("an op failed, a sum had other bits, or the job did not move")?;
    let outcome = printed.lines().find(|line| line.contains(" moves of a job of "));
    println!("{}", outcome.context("the test printed no outcome")?);
    let entries = report::read(&file).map_err(|why| anyhow!(why))?;
    let longest = entries.iter().find_map(|entry| match entry {
        Entry::Time { ms, most, .. } => Some((*ms, *most)),
        Entry::Skip { .. } => None,
    });
    let (ms, most) = longest.context("the test recorded no time")?;
    let verdict = if ms < most { "PASS" } else { "FAIL" };
    println!("longest op: {ms} ms; must be < {most} ms, reach {REACH_MS} ms: {verdict}");
    Ok(ms < most)
}
