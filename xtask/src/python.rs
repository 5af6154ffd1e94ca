//! The tests of the Python package, and the virtual environment that runs them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::machine;
use crate::shell::{Cmd, path, target};

/// Installs the package as a user does, checks it and runs its tests, which append to `report`.
pub(crate) fn test(root: &Path, report: &Path) -> Result<()> {
    let python = installed(root)?;
    let package = root.join("python");
    // The tests start this aggregator.
    Cmd::cargo(&["build", "--release", "--locked", "-p", "racksum-cli"]).run(root)?;
    for check in ["ruff check", "ruff format --check", "mypy", "pytest"] {
        let module: Vec<&str> = ["-m"].into_iter().chain(check.split(' ')).collect();
        Cmd::new(path(&python)?, &module)
            .env(racksum_test_report::FILE, path(report)?)
            .run(&package)?;
    }
    Ok(())
}

/// Runs the tests of process groups in torch's wheel, and compares the results with docs/c10d.md.
pub(crate) fn upstream(root: &Path) -> Result<()> {
    let python = installed(root)?;
    Cmd::cargo(&["build", "--release", "--locked", "-p", "racksum-cli"]).run(root)?;
    Cmd::new(path(&python)?, &["tests/upstream/run.py"]).run(&root.join("python"))
}

/// Returns a Python with the pinned packages and the package as it is now.
pub(crate) fn installed(root: &Path) -> Result<PathBuf> {
    let python = venv(root)?;
    let package = root.join("python");
    Cmd::new(path(&python)?, &["-m", "pip", "install", "--quiet", "--no-deps", path(&package)?])
        .run(root)?;
    Ok(python)
}

/// Returns a Python with the pinned packages, installed at the first use and when the pins change.
pub(crate) fn venv(root: &Path) -> Result<PathBuf> {
    let venv = target(root).join("venv");
    let python = venv.join("bin/python");
    let pins = root.join("python/requirements.txt");
    let wanted = fs::read_to_string(&pins)?;
    // The stamp is written last, so that its presence means a complete installation.
    let stamp = venv.join("installed.txt");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    let packages = ["python3", "python3-venv", "python3-pip"];
    if let Some(why) = machine::provide(root, &["python3"], &packages)? {
        bail!("{why}; install Python 3.11 or newer, with venv and pip");
    }
    Cmd::new("python3", &["-m", "venv", "--clear", path(&venv)?]).run(root)?;
    let pip = ["-m", "pip", "install", "--quiet", "--requirement", path(&pins)?];
    Cmd::new(path(&python)?, &pip).run(root)?;
    fs::write(&stamp, &wanted)?;
    Ok(python)
}
