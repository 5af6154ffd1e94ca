//! `cargo xtask bench learning` compares what the examples learn with racksum and with Gloo.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use racksum_tools::python;
use racksum_tools::shell::{Cmd, path, target};

/// Lengths of the trainings, and the folder for their curves.
#[derive(Debug, Args)]
pub(crate) struct LearningArgs {
    /// Training steps of each example.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Training steps of the runs with compressors.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    compressed_steps: u32,
    /// Folder for the curves. [default: learning in cargo's target folder]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Trains the examples; returns an error if a loss misses its bound.
pub(crate) fn run(root: &Path, args: &LearningArgs) -> Result<()> {
    let python = python::installed(root)?;
    Cmd::cargo(&["build", "--release", "--locked", "-p", "racksum-cli"]).run(root)?;
    let out = args.out.clone().unwrap_or_else(|| target(root).join("learning"));
    let racksum = target(root).join("release/racksum");
    let (steps, compressed) = (args.steps.to_string(), args.compressed_steps.to_string());
    let arguments = [
        "benches/learning.py",
        "--racksum",
        path(&racksum)?,
        "--out",
        path(&out)?,
        "--steps",
        &steps,
        "--compressed-steps",
        &compressed,
    ];
    Cmd::new(path(&python)?, &arguments).run(root)
}
