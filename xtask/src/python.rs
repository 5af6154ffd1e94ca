//! The tests of the Python package.

use std::path::Path;

use anyhow::Result;
use racksum_tools::python::installed;
use racksum_tools::shell::{Cmd, path};

/// Installs the package as a user would, checks it and runs its tests, which append their skips and
/// times to `report`.
pub(crate) fn test(root: &Path, report: &Path) -> Result<()> {
    let python = installed(root)?;
    let package = root.join("python");
    // Build the aggregator that the tests start.
    Cmd::cargo(&["build", "--release", "--locked", "-p", "racksum-cli"]).run(root)?;
    for check in ["ruff check", "ruff format --check", "mypy", "pytest"] {
        let module: Vec<&str> = ["-m"].into_iter().chain(check.split(' ')).collect();
        Cmd::new(path(&python)?, &module)
            .env(racksum_test_report::FILE, path(report)?)
            .run(&package)?;
    }
    Ok(())
}

/// Runs the process-group tests that torch's wheel ships, and compares the results with
/// docs/c10d.md.
pub(crate) fn upstream(root: &Path) -> Result<()> {
    let python = installed(root)?;
    Cmd::cargo(&["build", "--release", "--locked", "-p", "racksum-cli"]).run(root)?;
    Cmd::new(path(&python)?, &["tests/upstream/run.py"]).run(&root.join("python"))
}
