//! A process group: processes that start together and read the same commands from standard input.
//! Each process answers each command with one line.
//!
//! Every wait ends with all answers, the end of a process, a timeout or Ctrl-C. Dropping the group
//! closes the processes' input, then terminates and finally kills them.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use racksum_tools::deadline::Deadline;
use racksum_tools::interrupt;
use racksum_tools::shell::terminate;
use serde_json::Value;

/// Timeout of an iteration.
pub(crate) const ITERATION_TIMEOUT: Duration = Duration::from_secs(120);

/// Processes that read the same commands from standard input.
#[derive(Debug)]
pub(crate) struct ProcessGroup {
    name: String,
    members: Vec<Member>,
    /// Lines that the members print, each with the member's index; `None` marks the end of a
    /// member's output.
    output: Receiver<(usize, Option<String>)>,
}

#[derive(Debug)]
struct Member {
    child: Child,
    stdin: Option<ChildStdin>,
    log: PathBuf,
}

impl ProcessGroup {
    /// Starts the processes; their standard error goes to files in `logs`.
    pub(crate) fn start(
        name: &str,
        commands: impl IntoIterator<Item = Command>,
        logs: &Path,
    ) -> Result<Self> {
        fs::create_dir_all(logs).with_context(|| format!("cannot create {}", logs.display()))?;
        let (sender, output) = channel();
        let mut process_group = Self { name: name.to_owned(), members: Vec::new(), output };
        for (i, command) in commands.into_iter().enumerate() {
            let log = logs.join(format!("{name}-{i}.log"));
            process_group.members.push(Member::start(command, log, i, &sender)?);
        }
        Ok(process_group)
    }

    /// Returns the process id of a member.
    pub(crate) fn pid(&self, member: usize) -> u32 {
        self.members[member].child.id()
    }

    /// Tells all members to end. Servers need this, because they do not read standard input.
    pub(crate) fn terminate(&mut self) {
        for member in self.members.iter_mut().filter_map(Member::running) {
            terminate(&member.child);
        }
    }

    /// Sends a line to all members.
    pub(crate) fn send_line(&mut self, line: &str) -> Result<()> {
        for i in 0..self.members.len() {
            let stdin = self.members[i].stdin.as_mut();
            let written = stdin.map(|stdin| stdin.write_all(format!("{line}\n").as_bytes()));
            if !matches!(written, Some(Ok(()))) {
                return Err(self.lost(i));
            }
        }
        Ok(())
    }

    /// Waits for a line from each member.
    pub(crate) fn lines(&mut self, timeout: Duration) -> Result<Vec<String>> {
        let mut lines = vec![None; self.members.len()];
        let deadline = Deadline::after(timeout);
        while lines.contains(&None) {
            interrupt::check()?;
            match self.output.recv_timeout(POLL) {
                Ok((i, Some(line))) if lines[i].is_none() => lines[i] = Some(line),
                Ok((i, Some(line))) => {
                    bail!("{} {i} printed an unexpected line: {line}", self.name)
                }
                Ok((i, None)) => return Err(self.lost(i)),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("{}: all processes have ended", self.name)
                }
                Err(RecvTimeoutError::Timeout) if deadline.is_over() => {
                    let silent = (0..lines.len()).filter(|i| lines[*i].is_none());
                    let silent: Vec<_> = silent.map(|i| i.to_string()).collect();
                    bail!(
                        "{}: no answer from {} within {} s",
                        self.name,
                        silent.join(" "),
                        timeout.as_secs()
                    );
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        Ok(lines.into_iter().flatten().collect())
    }

    /// Waits for a JSON object from each member; an object with the key `error` becomes an error.
    pub(crate) fn answers(&mut self, timeout: Duration) -> Result<Vec<Value>> {
        let lines = self.lines(timeout)?;
        let name = &self.name;
        let read = |(i, line): (usize, &String)| {
            let value: Value = serde_json::from_str(line)
                .with_context(|| format!("{name} {i} printed {line:?}, which is not JSON"))?;
            ensure!(value.get("error").is_none(), "{name} {i}: {}", value["error"]);
            Ok(value)
        };
        lines.iter().enumerate().map(read).collect()
    }

    /// Sends a line to all members and waits for the answers.
    pub(crate) fn ask(&mut self, line: &str, timeout: Duration) -> Result<Vec<Value>> {
        self.send_line(line)?;
        self.answers(timeout)
    }

    /// Returns the error for a member that no longer answers.
    fn lost(&mut self, i: usize) -> anyhow::Error {
        let member = &mut self.members[i];
        let status = match member.ended_within(Duration::from_secs(2)) {
            Some(status) => status,
            None => "still running".to_owned(),
        };
        let tail = tail(&member.log);
        let log = member.log.display();
        anyhow::anyhow!("{} {i} no longer answers ({status}; {log}): {tail}", self.name)
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        for member in &mut self.members {
            // Closing standard input tells a process to quit.
            drop(member.stdin.take());
        }
        for patience in [Duration::from_secs(3), Duration::from_secs(2)] {
            let deadline = Deadline::after(patience);
            while self.members.iter_mut().any(Member::is_running) && !deadline.is_over() {
                thread::sleep(Duration::from_millis(10));
            }
            for member in self.members.iter_mut().filter_map(Member::running) {
                // Send SIGTERM before SIGKILL, because `mpirun` passes SIGTERM on to its ranks.
                terminate(&member.child);
            }
        }
        for member in &mut self.members {
            drop(member.child.kill());
            drop(member.child.wait());
        }
    }
}

impl Member {
    fn start(
        mut command: Command,
        log: PathBuf,
        i: usize,
        sender: &Sender<(usize, Option<String>)>,
    ) -> Result<Self> {
        let stderr =
            File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            // Only this program receives Ctrl-C; it then stops the members in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("a process has no standard output")?;
        let sender = sender.clone();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                if sender.send((i, Some(line))).is_err() {
                    // The group has ended. Keep reading, so that the process does not block on a
                    // full pipe.
                    continue;
                }
            }
            drop(sender.send((i, None)));
        });
        Ok(Self { child, stdin, log })
    }

    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    fn running(&mut self) -> Option<&mut Self> {
        self.is_running().then_some(self)
    }

    fn ended_within(&mut self, patience: Duration) -> Option<String> {
        let deadline = Deadline::after(patience);
        while self.is_running() && !deadline.is_over() {
            thread::sleep(Duration::from_millis(10));
        }
        self.child.try_wait().ok().flatten().map(|status| status.to_string())
    }
}

/// Returns the last lines of a log, joined into one line.
fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join(" | ")
}

/// Interval at which a wait checks for Ctrl-C and its timeout.
const POLL: Duration = Duration::from_millis(100);

/// Number of log lines that an error quotes.
const LOG_LINES: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// Creates a group of shells that run the scripts, and the folder of their logs.
    fn shells(scripts: &[&str]) -> (ProcessGroup, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let sh = |script: &&str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let process_group = ProcessGroup::start("sh", scripts.iter().map(sh), dir.path()).unwrap();
        (process_group, dir)
    }

    #[test]
    fn all_are_asked_and_all_answer() {
        let echo = r#"while read -r line; do echo "{\"got\": \"$line\"}"; done"#;
        let (mut process_group, _logs) = shells(&[echo, echo]);
        for word in ["go", "set"] {
            let answers = process_group.ask(word, SOON).unwrap();
            assert_eq!(answers, vec![serde_json::json!({ "got": word }); 2]);
        }
    }

    #[test]
    fn one_that_ends_is_an_error_with_its_last_words() {
        let (mut process_group, _logs) =
            shells(&["read x; echo broken pipe dream >&2; exit 7", "read x; read x"]);
        let error = process_group.ask("go", SOON).unwrap_err().to_string();
        assert!(error.contains("sh 0") && error.contains("broken pipe dream"), "{error}");
        assert!(error.contains('7'), "{error}");
    }

    #[test]
    fn one_that_is_silent_is_named() {
        let (mut process_group, _logs) = shells(&["read x; echo '{}'; read x", "read x; read x"]);
        let error = process_group.ask("go", Duration::from_millis(300)).unwrap_err().to_string();
        assert!(error.contains("no answer from 1 "), "{error}");
    }

    #[test]
    fn an_error_that_is_told_is_an_error() {
        let (mut process_group, _logs) = shells(&[r#"echo '{"error": "no such case"}'; read x"#]);
        let error = process_group.answers(SOON).unwrap_err().to_string();
        assert!(error.contains("no such case"), "{error}");
    }

    #[test]
    fn a_dropped_group_leaves_nobody_behind() {
        let (mut process_group, logs) =
            shells(&["echo $$; trap '' TERM; while :; do sleep 0.05; done"]);
        let pid = process_group.lines(SOON).unwrap().remove(0);
        assert_eq!(pid, process_group.pid(0).to_string());
        drop(process_group);
        assert!(!Path::new("/proc").join(pid).exists());
        drop(logs);
    }
}
