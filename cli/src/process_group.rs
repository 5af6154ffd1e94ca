//! The processes that run a job's ranks on this host.

mod cause;

use std::io::{self, BufRead, BufReader, ErrorKind};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};

use racksum_net::with_limit;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::environment;
use crate::exit::{Exit, Failure, print_line};
use crate::thread::spawn;

/// One process for each rank. Dropping the group kills the ranks that are still running.
#[derive(Debug)]
pub(crate) struct ProcessGroup {
    ranks: Vec<Child>,
    /// The pipe to each rank's standard input. A rank ends when its pipe closes; see
    /// [`end_with_parent`].
    _leashes: Vec<ChildStdin>,
    output: Receiver<(usize, Option<String>)>,
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // Ignore errors: the rank may have ended already.
            drop(rank.kill());
            drop(rank.wait());
        }
    }
}

impl ProcessGroup {
    /// Starts this program once for each rank, with the arguments that `command` adds.
    pub(crate) fn start(world: u16, command: impl Fn(u16, &mut Command)) -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(|error| {
            Failure::failed(format!("cannot find the racksum executable: {error}"))
        })?;
        let (sender, output) = channel();
        let mut process_group = Self { ranks: Vec::new(), _leashes: Vec::new(), output };
        for rank in 0..world {
            let cannot = |error: io::Error| cannot_start(rank, &program, &error);
            let mut start = Command::new(&program);
            // The ranks connect over loopback, with an identity that their flags name, so none of
            // these variables applies.
            let unused = [environment::IDENTITY, environment::INSECURE, environment::INTERFACE];
            unused.iter().for_each(|name| _ = start.env_remove(name));
            command(rank, &mut start);
            let mut child =
                start.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(cannot)?;
            // Take the pipes, because `Child::wait` closes a standard input that the `Child` still
            // holds.
            let pipes = child.stdin.take().zip(child.stdout.take());
            process_group.ranks.push(child);
            let (leash, out) =
                pipes.ok_or_else(|| cannot(io::Error::other("its pipes are missing")))?;
            process_group._leashes.push(leash);
            let sender = sender.clone();
            spawn(move || {
                // A read error counts as the end of the output. Sending fails once another rank has
                // failed and the receiver is dropped.
                let lines = BufReader::new(out).lines().map_while(Result::ok).map(Some);
                lines.chain([None]).try_for_each(|line| sender.send((rank.into(), line))).ok();
            })?;
        }
        Ok(process_group)
    }

    /// Receives the next result that any rank reports. Returns `None` instead of a result if the
    /// rank's output has ended.
    ///
    /// # Errors
    /// The reason why the job failed, if a rank reports a failure.
    pub(crate) fn recv<T: DeserializeOwned>(&mut self) -> Result<(usize, Option<T>), Failure> {
        let received = self.output.recv();
        let (rank, line) = received
            .map_err(|_| Failure::failed("the ranks ended before they reported all results"))?;
        let Some(line) = line else { return Ok((rank, None)) };
        match serde_json::from_str(&line) {
            Ok(Ok(message)) => Ok((rank, Some(message))),
            Ok(Err(failure)) => Err(self.cause(rank, failure)),
            Err(error) => Err(Failure::failed(format!(
                "cannot parse the output {line:?} of rank {rank}: {error}"
            ))),
        }
    }

    /// Waits until a rank's process exits, and returns its exit status.
    pub(crate) fn end(&mut self, rank: usize) -> Result<ExitStatus, Failure> {
        let cannot =
            |error: io::Error| Failure::failed(format!("cannot wait for rank {rank}: {error}"));
        self.ranks[rank].wait().map_err(cannot)
    }

    /// Returns the failure for a rank that exited before it finished its work. The exit codes
    /// `USAGE` and `UNAVAILABLE` are kept, because their causes apply to all ranks.
    pub(crate) fn ended_early(&mut self, rank: usize) -> Failure {
        match self.end(rank) {
            Err(failure) => failure,
            Ok(status) => {
                let hint = if status.code().is_some() { "; its message is above" } else { "" };
                let why = format!("rank {rank} exited early ({status}){hint}");
                Failure { exit: Exit::of(status), ..Failure::failed(why) }
            }
        }
    }
}

/// Returns the failure for a rank's process that could not be started.
fn cannot_start(rank: u16, program: &Path, error: &io::Error) -> Failure {
    match error.kind() {
        // fork(2) fails with this error at a process limit of the user, the control group or the
        // host.
        ErrorKind::WouldBlock => Failure::unavailable(format!(
            "cannot start a process for rank {rank}: {error}; use fewer ranks, or raise the limit \
             on processes (ulimit -u)"
        )),
        ErrorKind::NotFound => Failure::failed(format!(
            "cannot start rank {rank}: {}: {error}; the program was removed or replaced while it \
             ran, so start it again",
            program.display()
        )),
        _ => {
            let why = format!("cannot start rank {rank}: {}", with_limit(error));
            Failure::of_host(why, error)
        }
    }
}

/// Reports a rank's result or failure to the process that started its [`ProcessGroup`].
pub(crate) fn send_to_parent<T: Serialize>(result: &Result<T, Failure>) -> Result<(), Failure> {
    print_line(&serde_json::to_string(result).unwrap_or_default())
}

/// Ends this rank of a [`ProcessGroup`] when its parent process exits. Otherwise the rank would
/// wait for an aggregator that exited with the parent process.
pub(crate) fn end_with_parent() -> Result<(), Failure> {
    spawn(|| {
        let ended = io::copy(&mut io::stdin().lock(), &mut io::sink());
        // The parent process never writes to this pipe, so the copy ends only when the pipe closes
        // or breaks.
        drop(ended);
        std::process::exit(1);
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_a_rank_has_no_process_says_what_to_do() {
        // EAGAIN and EMFILE.
        for (limited, advice) in [(11, "processes (ulimit -u)"), (24, "open files (ulimit -n)")] {
            let error = io::Error::from_raw_os_error(limited);
            let failure = cannot_start(0, Path::new("racksum"), &error);
            assert!(failure.why.contains(advice), "{failure}");
            assert!(failure.exit == Exit::UNAVAILABLE, "{failure:?}");
        }
        let removed = Command::new("/none/racksum").spawn().unwrap_err();
        let why = cannot_start(3, Path::new("/none/racksum"), &removed).to_string();
        assert!(why.starts_with("cannot start rank 3: /none/racksum: "), "{why}");
        assert!(why.ends_with("start it again"), "{why}");
    }
}
