//! Programs that the races need: a release build of racksum, and the peers. A missing program is
//! reported in one line, and the races run without it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use racksum_tools::machine;
use racksum_tools::python;
use racksum_tools::shell::{Cmd, path, target};

use crate::before::{Before, Package};
use crate::case::{Build, Case, Net, Program, Race};

/// Programs that the caller provides.
#[derive(Debug, Clone, Default)]
pub(crate) struct Given {
    /// A Python with torch.
    pub(crate) python: Option<PathBuf>,
    /// A build of racksum to race against: an executable, or a checkout.
    pub(crate) before: Option<PathBuf>,
}

/// The programs of the races. An error holds the reason why a program is missing.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) racksum: PathBuf,
    /// Another build of racksum, to race against.
    before: Option<Before>,
    /// The folder of the peer programs.
    pub(crate) peers: PathBuf,
    pub(crate) python: Result<PathBuf, String>,
    pub(crate) mpi: Result<PathBuf, String>,
    pub(crate) floor: Result<PathBuf, String>,
    /// Whether slow links are available.
    pub(crate) links: Result<(), String>,
    /// Whether PyTorch can use a GPU.
    pub(crate) gpu: Result<(), String>,
    /// The folder of logs and results.
    pub(crate) work: PathBuf,
}

impl Setup {
    /// Returns the program of a build.
    pub(crate) fn program(&self, build: Build) -> &Path {
        match build {
            Build::Own => &self.racksum,
            Build::Before => &self.before().racksum,
        }
    }

    /// Returns the Python package of a build, or `None` if the interpreter has it.
    pub(crate) fn package(&self, build: Build) -> Option<&Package> {
        match build {
            Build::Own => None,
            Build::Before => self.before().package.as_ref(),
        }
    }

    fn before(&self) -> &Before {
        self.before.as_ref().expect("only `--against` adds sides of an earlier build")
    }

    /// Builds and installs the programs that `cases` need, except for those in `given`.
    pub(crate) fn prepare(root: &Path, cases: &[Case], given: &Given) -> Result<Self> {
        let work = target(root).join("peers");
        let peers = root.join("benches/peers");
        fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
        Cmd::cargo(&["build", "--release", "--locked", "-p", "racksum-cli"]).run(root)?;
        let racksum = work.with_file_name("release").join("racksum");

        let needs = |is: fn(&Program) -> bool| {
            let races = cases.iter().filter_map(|case| match case {
                Case::Race(race) => Some(race),
                Case::Memory(_) => None,
            });
            races.flat_map(|race| &race.sides).any(|side| is(&side.program))
        };
        let unneeded = "no case needs it".to_owned();
        let python = match &given.python {
            Some(python) => Ok(python.clone()),
            None if needs(Program::uses_package) => {
                let installed = python::installed(root);
                report_missing(
                    "the Python package",
                    installed.map_err(|error| format!("{error:#}")),
                )
            }
            None if needs(|program| matches!(program, Program::Gloo { .. })) => {
                report_missing("Gloo", python::venv(root).map_err(|error| format!("{error:#}")))
            }
            None => Err(unneeded.clone()),
        };
        let package_python = python.as_deref().ok().filter(|_| needs(Program::uses_package));
        let before = given.before.as_deref();
        let before = before.map(|before| Before::prepare(before, package_python)).transpose()?;
        let mpi = if needs(|program| matches!(program, Program::OpenMpi { .. })) {
            report_missing("Open MPI", openmpi(root, &work, &peers))
        } else {
            Err(unneeded.clone())
        };
        let floor = if needs(|program| matches!(program, Program::Floor { .. })) {
            report_missing("the floor", floor(root, &work, &peers))
        } else {
            Err(unneeded.clone())
        };
        let slow = |case: &Case| matches!(case, Case::Race(race) if race.net != Net::Loopback);
        let links = if cases.iter().any(slow) {
            let why = machine::link_tools(root).unwrap_or_else(|error| Some(error.to_string()));
            report_missing("the cases on 1 Gbit/s links", why.map_or(Ok(()), Err))
        } else {
            Err(unneeded.clone())
        };
        let on_gpu = |case: &Case| matches!(case, Case::Race(race) if race.needs_gpu());
        let gpu = if cases.iter().any(on_gpu) {
            let there = python.as_ref().map_err(Clone::clone).and_then(|python| gpu(root, python));
            report_missing("the cases on a GPU", there)
        } else {
            Err(unneeded)
        };
        Ok(Self { racksum, before, peers, python, mpi, floor, links, gpu, work })
    }

    /// Returns the reason why a race cannot take place, or `None` if it can.
    pub(crate) fn lacks(&self, race: &Race) -> Option<String> {
        let links = self.links.as_ref().err().filter(|_| race.net != Net::Loopback);
        let gpu = self.gpu.as_ref().err().filter(|_| race.needs_gpu());
        links.or(gpu).cloned()
    }

    /// Returns the reason why a program cannot race, or `None` if it can.
    pub(crate) fn missing(&self, program: &Program) -> Option<String> {
        match program {
            Program::Racksum(_) => None,
            Program::Gloo { .. } | Program::Training(_) | Program::Sidecar { .. } => {
                self.python.as_ref().err().cloned()
            }
            Program::OpenMpi { .. } => self.mpi.as_ref().err().cloned(),
            Program::Floor { .. } => self.floor.as_ref().err().cloned(),
        }
    }
}

/// Returns `had`. If it is an error, first prints in one line that `what` is skipped, and why.
fn report_missing<T>(what: &str, had: Result<T, String>) -> Result<T, String> {
    if let Err(why) = &had {
        println!("skipping {what}: {}", why.replace('\n', " "));
    }
    had
}

/// Checks that this Python's torch can use a GPU.
fn gpu(root: &Path, python: &Path) -> Result<(), String> {
    let ask = "import torch; raise SystemExit(not torch.cuda.is_available())";
    let python = path(python).map_err(|error| format!("{error:#}"))?;
    let there = Cmd::new(python, &["-c", ask]).succeeds(root);
    if there { Ok(()) } else { Err("CUDA finds no GPU".to_owned()) }
}

/// Builds the program that times Open MPI.
fn openmpi(root: &Path, work: &Path, peers: &Path) -> Result<PathBuf, String> {
    provided(root, &["mpirun", "mpicc"], &["openmpi-bin", "libopenmpi-dev"])?;
    compiled(root, work, &peers.join("mpi_allreduce.c"), "mpicc", &["-O2"])
}

/// Builds the program that times bare sockets.
fn floor(root: &Path, work: &Path, peers: &Path) -> Result<PathBuf, String> {
    provided(root, &["cc"], &["gcc", "libc6-dev"])?;
    let flags = ["-O3", "-march=native", "-pthread"];
    compiled(root, work, &peers.join("loopback_floor.c"), "cc", &flags)
}

/// Installs the missing `tools` from `packages`, or returns the reason why that is impossible.
fn provided(root: &Path, tools: &[&str], packages: &[&str]) -> Result<(), String> {
    let missing = machine::provide(root, tools, packages);
    missing.map_err(|error| format!("{error:#}"))?.map_or(Ok(()), Err)
}

/// Compiles `source` if it is newer than the program; returns the program's path.
fn compiled(
    root: &Path,
    work: &Path,
    source: &Path,
    compiler: &str,
    flags: &[&str],
) -> Result<PathBuf, String> {
    let program = work.join(source.file_stem().unwrap_or_default());
    let changed = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    if changed(&program) < changed(source) {
        let compile = || -> Result<()> {
            let flags = [&["-std=c11", "-Wall", "-Wextra"], flags].concat();
            let files = ["-o", path(&program)?, path(source)?];
            Cmd::new(compiler, &[&flags[..], &files].concat()).run(root)
        };
        compile().map_err(|error| format!("{error:#}"))?;
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases;

    #[test]
    fn a_race_that_needs_what_is_missing_does_not_take_place_and_says_why() {
        let setup = Setup {
            racksum: PathBuf::new(),
            before: None,
            peers: PathBuf::new(),
            python: Ok(PathBuf::new()),
            mpi: Ok(PathBuf::new()),
            floor: Ok(PathBuf::new()),
            links: Err("no links".to_owned()),
            gpu: Err("no GPU".to_owned()),
            work: PathBuf::new(),
        };
        let lacks = |name: &str| match cases::chosen(&[name.to_owned()], 1).unwrap().remove(0) {
            Case::Race(race) => setup.lacks(&race),
            Case::Memory(_) => panic!("the case is not a race"),
        };
        assert_eq!(lacks("train-gpu-w2").as_deref(), Some("no GPU"));
        assert_eq!(lacks("dense-1g-w8").as_deref(), Some("no links"));
        assert_eq!(lacks("dense-loopback-w2"), None);
    }
}
