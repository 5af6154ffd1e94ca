//! Virtual environments: one for the Python package's tests and the peers of the benches, and
//! others with packages that single steps need.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::machine;
use crate::shell::{Cmd, path, target};

/// Installs the package from the working tree. Returns the path of a Python interpreter that has it
/// and the pinned packages.
///
/// # Errors
/// Returns an error if the environment cannot be created, or a package cannot be installed.
pub fn installed(root: &Path) -> Result<PathBuf> {
    let python = venv(root)?;
    let package = root.join("python");
    Cmd::new(path(&python)?, &["-m", "pip", "install", "--quiet", "--no-deps", path(&package)?])
        .run(root)?;
    Ok(python)
}

/// Returns the path of a Python interpreter with the pinned packages. Installs them on first use
/// and when the pins change.
///
/// # Errors
/// Returns an error if the environment cannot be created, or a package cannot be installed.
pub fn venv(root: &Path) -> Result<PathBuf> {
    environment(root, "venv", "python/requirements.txt")
}

/// Returns the path of a Python interpreter with the packages that a file pins, in an environment
/// of this name. Installs them on first use and when the pins change.
///
/// # Errors
/// Returns an error if the environment cannot be created, or a package cannot be installed.
pub fn environment(root: &Path, name: &str, pins: &str) -> Result<PathBuf> {
    let venv = target(root).join(name);
    let python = venv.join("bin/python");
    let pins = root.join(pins);
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
