//! The processes of the ranks of a job on this host.

mod cause;

use std::io::{self, BufRead, BufReader, ErrorKind};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};

use racksum_net::with_limit;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::environment;
use crate::exit::{Exit, Failure, say};
use crate::thread::spawn;

/// A process for each rank. Those that still run are killed when it is dropped.
#[derive(Debug)]
pub(crate) struct ProcessGroup {
    ranks: Vec<Child>,
    /// Held open for as long as the ranks are to run: see [`end_with_parent`].
    _leashes: Vec<ChildStdin>,
    said: Receiver<(usize, Option<String>)>,
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // One that has ended cannot be killed, and need not be.
            drop(rank.kill());
            drop(rank.wait());
        }
    }
}

impl ProcessGroup {
    /// Starts this program for each rank, with the arguments that `command` adds.
    pub(crate) fn start(world: u16, command: impl Fn(u16, &mut Command)) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::failed(format!("cannot find this program: {error}")))?;
        let (tell, said) = channel();
        let mut process_group = Self { ranks: Vec::new(), _leashes: Vec::new(), said };
        for rank in 0..world {
            let cannot = |error: io::Error| cannot_start(rank, &program, &error);
            let mut start = Command::new(&program);
            // Neither is of use towards the aggregator of this process, which has an identity for
            // its ranks.
            start.env_remove(environment::IDENTITY).env_remove(environment::INTERFACE);
            command(rank, &mut start);
            let mut child =
                start.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(cannot)?;
            // Taken, since waiting for a child closes what it still has.
            let pipes = child.stdin.take().zip(child.stdout.take());
            process_group.ranks.push(child);
            let (leash, out) = pipes.ok_or_else(|| cannot(io::Error::other("it has no pipes")))?;
            process_group._leashes.push(leash);
            let tell = tell.clone();
            spawn(move || {
                // What cannot be read is as good as the end; and nobody listens any more once
                // another rank has failed.
                let lines = BufReader::new(out).lines().map_while(Result::ok).map(Some);
                lines.chain([None]).try_for_each(|line| tell.send((rank.into(), line))).ok();
            })?;
        }
        Ok(process_group)
    }

    /// Returns the next message of any rank, or none from a rank that has ended.
    ///
    /// # Errors
    /// Why the job failed, if the rank tells that it did.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<(usize, Option<T>), Failure> {
        let heard = self.said.recv();
        let (rank, line) = heard.map_err(|_| Failure::failed("the ranks said nothing"))?;
        let Some(line) = line else { return Ok((rank, None)) };
        match serde_json::from_str(&line) {
            Ok(Ok(told)) => Ok((rank, Some(told))),
            Ok(Err(failure)) => Err(self.cause(rank, failure)),
            Err(error) => Err(Failure::failed(format!("rank {rank} said {line:?}: {error}"))),
        }
    }

    /// How a rank ended that says no more.
    pub(crate) fn end(&mut self, rank: usize) -> Result<ExitStatus, Failure> {
        self.ranks[rank].wait().map_err(|error| Failure::failed(error.to_string()))
    }

    /// Why a rank that said no more did not do its part: what was wrong for it is wrong for all.
    pub(crate) fn ended_early(&mut self, rank: usize) -> Failure {
        match self.end(rank) {
            Err(failure) => failure,
            Ok(status) => {
                let said = if status.code().is_some() { "; its message is above" } else { "" };
                let why = format!("rank {rank} ended early ({status}){said}");
                Failure { exit: Exit::of(status), ..Failure::failed(why) }
            }
        }
    }
}

/// Why a rank has no process.
fn cannot_start(rank: u16, program: &Path, error: &io::Error) -> Failure {
    match error.kind() {
        // What fork(2) says at a limit of the user, of a control group or of the host.
        ErrorKind::WouldBlock => Failure::unavailable(format!(
            "cannot start a process for rank {rank}: {error}; use fewer ranks, or raise the limit \
             on processes (ulimit -u)"
        )),
        ErrorKind::NotFound => Failure::failed(format!(
            "cannot start rank {rank}: {}: {error}; this program was removed or replaced while it \
             ran, so start it again",
            program.display()
        )),
        _ => {
            let why = format!("cannot start rank {rank}: {}", with_limit(error));
            Failure::of_host(why, error)
        }
    }
}

/// Tells the process that started this rank of a [`ProcessGroup`] what the rank did, or why it
/// failed.
pub(crate) fn tell_parent<T: Serialize>(told: &Result<T, Failure>) -> Result<(), Failure> {
    say(&serde_json::to_string(told).unwrap_or_default())
}

/// Ends this rank of a [`ProcessGroup`] when the process that started it is gone: the rank would
/// wait for an aggregator that went with it.
pub(crate) fn end_with_parent() -> Result<(), Failure> {
    spawn(|| {
        let ended = io::copy(&mut io::stdin().lock(), &mut io::sink());
        // Nothing is ever said to a rank: the pipe is closed, or broken.
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
        for (limited, told) in [(11, "processes (ulimit -u)"), (24, "open files (ulimit -n)")] {
            let error = io::Error::from_raw_os_error(limited);
            let failure = cannot_start(0, Path::new("racksum"), &error);
            assert!(failure.why.contains(told), "{failure}");
            assert!(failure.exit == Exit::UNAVAILABLE, "{failure:?}");
        }
        let removed = Command::new("/none/racksum").spawn().unwrap_err();
        let why = cannot_start(3, Path::new("/none/racksum"), &removed).to_string();
        assert!(why.starts_with("cannot start rank 3: /none/racksum: "), "{why}");
        assert!(why.ends_with("start it again"), "{why}");
    }
}
