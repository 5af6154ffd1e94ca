//! An aggregator process of a soak.

use std::fs;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use racksum_tools::deadline::Deadline;
use racksum_tools::shell::{Cmd, terminate};
use serde_json::Value;

/// A running aggregator.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) addr: String,
    pub(super) name: String,
    port: u16,
    parent: Option<String>,
    program: PathBuf,
    socket: PathBuf,
    child: Child,
    /// Number of files that were open before the first rank joined.
    idle_files: usize,
}

/// Resources that an aggregator uses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resources {
    pub(super) resident_mb: u64,
    pub(super) files: usize,
    /// Number of files that were open before the first rank joined.
    pub(super) idle_files: usize,
    pub(super) jobs: u64,
    pub(super) buffers_taken: u64,
}

impl Served {
    /// Starts an aggregator on a port of this host, with or without a parent. Returns once the
    /// aggregator accepts ranks.
    pub(super) fn start(
        program: &Path,
        logs: &Path,
        name: &str,
        port: u16,
        parent: Option<&str>,
    ) -> Result<Self> {
        let socket = logs.join(format!("{name}.sock"));
        let [out, err] = ["log", "err"].map(|it| logs.join(format!("{name}.{it}")));
        let mut child = Command::new(program)
            .args(["aggregator", "--port", &port.to_string()])
            .args(["--pool-mib", "256", "--max-jobs", "40"])
            .args(["--shards", "2", "--data-auth", "mac", "--status-socket"])
            .arg(&socket)
            .args(parent.iter().flat_map(|parent| ["--parent", parent]))
            .stdin(Stdio::null())
            .stdout(File::create(&out)?)
            .stderr(File::create(&err)?)
            .spawn()
            .context("cannot start an aggregator")?;
        let patience = Deadline::after(PATIENCE);
        let addr = loop {
            let line = fs::read_to_string(&out)?;
            if let Some(rest) = line.strip_prefix("racksum aggregator on ")
                && let Some((addr, _)) = rest.split_once(": ")
            {
                break addr.to_owned();
            }
            if child.try_wait()?.is_some() {
                bail!("the aggregator exited: {}", fs::read_to_string(&err)?.trim());
            }
            ensure!(!patience.is_over(), "the aggregator did not print its address in time");
            sleep(POLL);
        };
        let (name, parent) = (name.to_owned(), parent.map(str::to_owned));
        let program = program.to_owned();
        let mut served = Self { addr, name, port, parent, program, socket, child, idle_files: 0 };
        served.idle_files = served.files()?;
        Ok(served)
    }

    /// Kills the aggregator.
    pub(super) fn kill(&mut self) -> Result<()> {
        self.child.kill().context("cannot kill the aggregator")?;
        self.child.wait().context("cannot wait for the aggregator")?;
        Ok(())
    }

    /// Sends SIGTERM to the aggregator and waits until its jobs have moved and it has ended. After
    /// a timeout, kills the aggregator and returns an error.
    pub(super) fn drain(&mut self) -> Result<()> {
        ensure!(terminate(&self.child), "cannot signal the aggregator");
        let patience = Deadline::after(PATIENCE);
        while self.child.try_wait()?.is_none() {
            if patience.is_over() {
                self.kill()?;
                bail!(
                    "the aggregator has not exited {} s after the signal to stop",
                    PATIENCE.as_secs()
                );
            }
            sleep(POLL);
        }
        Ok(())
    }

    /// Starts the aggregator again on the same port.
    pub(super) fn again(&mut self, program: &Path, logs: &Path) -> Result<()> {
        let (name, parent) = (self.name.clone(), self.parent.clone());
        *self = Self::start(program, logs, &name, self.port, parent.as_deref())?;
        Ok(())
    }

    /// Returns the resources that the aggregator uses now.
    pub(super) fn resources(&self) -> Result<Resources> {
        let id = self.child.id();
        let status = fs::read_to_string(format!("/proc/{id}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        let answer = Cmd::new(
            &self.program.display().to_string(),
            &["status", &self.socket.display().to_string(), "--format", "json"],
        )
        .output(Path::new("."))?;
        let answer: Value =
            serde_json::from_str(&answer).context("the aggregator's status is not JSON")?;
        let shards =
            answer["shards"].as_array().context("the aggregator's status has no array `shards`")?;
        let taken = |shard: &Value| {
            let of = |which: &str| shard["buffers"][which].as_u64().unwrap_or(0);
            of("total") - of("free")
        };
        Ok(Resources {
            resident_mb: kib.context("/proc shows no VmRSS for the aggregator")? / 1024,
            files: self.files()?,
            idle_files: self.idle_files,
            jobs: answer["jobs"].as_array().map_or(0, |jobs| jobs.len() as u64),
            buffers_taken: shards.iter().map(taken).sum(),
        })
    }

    /// Waits until the aggregator has no jobs, has freed all its buffers and has closed the files
    /// of its ranks, or until the timeout.
    pub(super) fn await_peace(&self) -> Result<()> {
        let patience = Deadline::after(PATIENCE);
        while !patience.is_over() {
            let Resources { jobs, buffers_taken, files, idle_files, .. } = self.resources()?;
            if jobs + buffers_taken == 0 && files <= idle_files {
                break;
            }
            sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    fn files(&self) -> Result<usize> {
        Ok(fs::read_dir(format!("/proc/{}/fd", self.child.id()))?.count())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // `kill` fails if the process has ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

const POLL: Duration = Duration::from_millis(20);
/// Timeout of each wait for an aggregator: to start, to drain, or to free its buffers and close its
/// ranks' files.
const PATIENCE: Duration = Duration::from_secs(60);
