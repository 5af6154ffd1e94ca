//! An earlier build of racksum, to race against.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use racksum_tools::shell::{Cmd, path};

/// An earlier build of racksum: its program and, for a checkout, its Python package.
#[derive(Debug)]
pub(crate) struct Before {
    pub(crate) racksum: PathBuf,
    pub(crate) package: Option<Package>,
}

/// The Python package of a checkout.
#[derive(Debug)]
pub(crate) struct Package {
    /// The folder that holds the package. Python searches it before the interpreter's own packages.
    pub(crate) folder: PathBuf,
    /// The folder of the checkout's peer programs. This source's programs may not fit the package,
    /// whose functions may have other names.
    pub(crate) peers: PathBuf,
}

impl Before {
    /// Prepares the build at `given`: an executable, or a checkout. For a checkout, builds its
    /// program and, if `python` is given, installs its package for that interpreter.
    pub(crate) fn prepare(given: &Path, python: Option<&Path>) -> Result<Self> {
        if !given.is_dir() {
            Cmd::new(path(given)?, &["--version"]).run(Path::new(".")).with_context(|| {
                format!(
                    "--against {} is not a racksum program; pass the path of a `racksum` \
                     executable, or of a checkout",
                    given.display()
                )
            })?;
            return Ok(Self { racksum: given.to_owned(), package: None });
        }
        let checkout = given
            .canonicalize()
            .with_context(|| format!("cannot open --against {}", given.display()))?;
        let package = checkout.join("python");
        ensure!(
            package.join("pyproject.toml").is_file(),
            "{} is not a checkout of racksum; pass the path of one, or of a `racksum` executable",
            given.display()
        );
        let target = checkout.join("target");
        let build = |command: Cmd| command.env("CARGO_TARGET_DIR", path(&target)?).run(&checkout);
        build(Cmd::cargo(&["build", "--release", "--locked", "-p", "racksum-cli"]))?;
        let racksum = target.join("release/racksum");
        let Some(python) = python else { return Ok(Self { racksum, package: None }) };
        let folder = target.join("packages");
        let pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"];
        let folders = [path(&folder)?, path(&package)?];
        build(Cmd::new(path(python)?, &[&pip[..], &folders].concat()))
            .context("cannot install the Python package of the earlier build")?;
        let peers = checkout.join("benches/peers");
        Ok(Self { racksum, package: Some(Package { folder, peers }) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_neither_a_program_nor_a_checkout_is_refused_by_its_path() {
        for given in [std::env::temp_dir(), "/nowhere/racksum".into()] {
            let refusal = Before::prepare(&given, None).unwrap_err().to_string();
            assert!(refusal.contains(&given.display().to_string()), "{refusal}");
        }
    }
}
