//! The origin of a measurement: the commit and the machine.

use std::fs;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::{SystemTime, UNIX_EPOCH};

use racksum_tools::shell::Cmd;
use serde::Serialize;

/// The commit, the machine and the time of a measurement.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Provenance {
    pub(crate) commit: String,
    /// Whether tracked files differ from the commit.
    pub(crate) dirty: bool,
    pub(crate) kernel: String,
    pub(crate) cores: usize,
    pub(crate) cpu: String,
    /// Load average of the minute before the case began.
    pub(crate) load: f64,
    pub(crate) unix_seconds: u64,
}

impl Provenance {
    /// Collects the current state.
    pub(crate) fn now(root: &Path) -> Self {
        let git = |line: &str| Cmd::line(line).output(root).map(|text| text.trim().to_owned());
        let changes = git("git status --porcelain --untracked-files=no");
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let loadavg = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            commit: git("git rev-parse HEAD").unwrap_or_else(|_| "unknown".to_owned()),
            dirty: changes.map_or(true, |changes| !changes.is_empty()),
            kernel: kernel.trim().to_owned(),
            cores: available_parallelism().map_or(0, usize::from),
            cpu: cpu_model(&cpuinfo).unwrap_or("unknown").to_owned(),
            load: loadavg.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
            unix_seconds: unix_seconds(),
        }
    }

    /// Describes the commit and the machine in one line for people.
    pub(crate) fn line(&self) -> String {
        let Self { commit, dirty, kernel, cores, cpu, load, .. } = self;
        let commit = commit.get(..12).unwrap_or(commit);
        let dirty = if *dirty { " with changes" } else { "" };
        format!("commit {commit}{dirty}, Linux {kernel}, {cores} cores of {cpu}, load {load}")
    }
}

fn cpu_model(cpuinfo: &str) -> Option<&str> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim())
}

/// Returns the date of the measurement, in seconds since 1970.
#[expect(clippy::disallowed_methods, reason = "the value is a date, not a measured time")]
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_the_first_core_is_told() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU: 3 GHz\nmodel name\t: Other\n";
        assert_eq!(cpu_model(cpuinfo), Some("Some CPU: 3 GHz"));
        assert_eq!(cpu_model(""), None);
    }
}
