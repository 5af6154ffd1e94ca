//! Processes that tests start. A test fails if its process does not end in time. Processes that are
//! still running when the test ends are killed.

use std::fs;
use std::io::{self, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::clock::Clock;

use crate::waits::{BUSY, await_that};

/// The program under test.
pub(crate) const RACKSUM: &str = env!("CARGO_BIN_EXE_racksum");

/// The result of a process.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit code; `None` if a signal ended the process.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    /// Checks that the process succeeded.
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// Checks the exit code and that the user sees one sentence; returns the sentence.
    pub(crate) fn failed(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "{self:?}");
        let sentences: Vec<_> = self
            .err
            .lines()
            .filter_map(|line| line.strip_prefix("racksum: "))
            .filter(|line| !line.starts_with("warning: "))
            .collect();
        assert_eq!(sentences.len(), 1, "{self:?}");
        assert!(!self.err.contains("panicked"), "{self:?}");
        sentences[0]
    }
}

/// A running process, killed when this value is dropped.
pub(crate) struct Process {
    child: Child,
    out: Reader,
    err: Reader,
}

/// A pipe that a thread reads as it fills.
struct Reader {
    read: Arc<Mutex<String>>,
    thread: JoinHandle<()>,
}

impl Reader {
    fn start(pipe: impl Read + Send + 'static) -> Self {
        let read = Arc::new(Mutex::new(String::new()));
        let into = Arc::clone(&read);
        let thread = std::thread::spawn(move || {
            let mut line = Vec::new();
            let take = |line: &mut Vec<u8>| {
                into.lock().unwrap().push_str(str::from_utf8(line).unwrap());
                line.clear();
            };
            for byte in BufReader::new(pipe).bytes() {
                line.push(byte.unwrap());
                // On a terminal, a carriage return precedes each redraw of a line.
                if line.ends_with(b"\n") || line.ends_with(b"\r") {
                    take(&mut line);
                }
            }
            take(&mut line);
        });
        Self { read, thread }
    }

    fn of_nothing() -> Self {
        Self::start(io::empty())
    }

    fn so_far(&self) -> String {
        self.read.lock().unwrap().clone()
    }
}

impl Process {
    /// Starts the program.
    pub(crate) fn start<S: AsRef<str>>(args: &[S]) -> Self {
        Self::spawn(Command::new(RACKSUM).args(args.iter().map(AsRef::as_ref)))
    }

    /// Starts a command.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        Self::spawn_into(command, Stdio::piped(), Stdio::piped())
    }

    /// Starts a command with the given outputs. The test reads only outputs that are pipes.
    pub(crate) fn spawn_into(command: &mut Command, out: Stdio, err: Stdio) -> Self {
        let mut child = command
            .env_remove("RACKSUM_LOG")
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .unwrap();
        let out = child.stdout.take().map_or_else(Reader::of_nothing, Reader::start);
        let err = child.stderr.take().map_or_else(Reader::of_nothing, Reader::start);
        Self { child, out, err }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the processes that this process has started.
    pub(crate) fn children(&self) -> Vec<u32> {
        let id = self.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        children.unwrap_or_default().split_whitespace().map(|id| id.parse().unwrap()).collect()
    }

    /// Returns the standard output so far.
    pub(crate) fn out(&self) -> String {
        self.out.so_far()
    }

    /// Returns the standard error so far.
    pub(crate) fn err(&self) -> String {
        self.err.so_far()
    }

    /// Returns whether the process is still running.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the process to end. Panics after `seconds` times [`BUSY`]. `seconds` is the limit
    /// on a quiet machine.
    pub(crate) fn end(mut self, seconds: u64) -> Ended {
        let clock = Clock::start();
        let start = clock.now();
        while self.runs() {
            let waited = clock.now().since(start).as_millis();
            assert!(
                waited < seconds * 1000 * BUSY,
                "the process is still running after {waited} ms: {} {}",
                self.out(),
                self.err.so_far()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let code = self.child.wait().unwrap().code();
        // A grandchild may keep the pipes open a little longer.
        await_that("the pipes of the process are closed", || {
            self.out.thread.is_finished() && self.err.thread.is_finished()
        });
        Ended { code, out: self.out.so_far(), err: self.err.so_far() }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Ignore errors: the process may have ended already.
        self.child.kill().unwrap_or(());
        drop(self.child.wait());
    }
}

/// Runs the program to completion.
pub(crate) fn run<S: AsRef<str>>(args: &[S]) -> Ended {
    Process::start(args).end(60)
}

/// Sends a signal to a process.
pub(crate) fn signal(id: u32, name: &str) {
    let kill = Command::new("kill").args([&format!("-{name}"), &id.to_string()]).status();
    assert!(kill.unwrap().success());
}

/// Stops a process, and waits until it has stopped: on a busy machine, its threads may keep running
/// for a while after the signal.
pub(crate) fn stop(id: u32) {
    signal(id, "STOP");
    let is_stopped = |thread: io::Result<fs::DirEntry>| {
        // A thread that has ended has no such file.
        let stat = fs::read_to_string(thread.unwrap().path().join("stat")).unwrap_or_default();
        // The state follows the name of the program, which is in parentheses.
        stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('T'))
    };
    await_that("the process has stopped", || {
        fs::read_dir(format!("/proc/{id}/task")).unwrap().all(is_stopped)
    });
}

/// An aggregator process.
pub(crate) struct Serving {
    pub(crate) process: Process,
    /// Address of the aggregator's control plane, `HOST:PORT`.
    pub(crate) addr: String,
}

impl Serving {
    pub(crate) fn start(flags: &[&str]) -> Self {
        let args = [&["aggregator", "--port", "0", "--pool-mib", "64"], flags].concat();
        Self::of(Process::start(&args))
    }

    /// Waits until the aggregator in `process` serves.
    pub(crate) fn of(mut process: Process) -> Self {
        await_that("the aggregator serves", || {
            assert!(process.runs(), "{}", process.err.so_far());
            process.out().contains('\n')
        });
        let out = process.out();
        let (_, rest) = out.split_once(" on ").unwrap();
        let (addr, _) = rest.split_once(": ").unwrap();
        Self { addr: addr.to_owned(), process }
    }

    /// Stops the aggregator, and waits for it to end.
    pub(crate) fn end(self) -> Ended {
        signal(self.process.id(), "TERM");
        self.process.end(20)
    }

    /// Returns the port of the aggregator's control plane.
    pub(crate) fn port(&self) -> &str {
        self.addr.rsplit_once(':').unwrap().1
    }
}

/// Starts one rank of a benchmark at an aggregator.
pub(crate) fn bench_rank(addr: &str, rank: u16, world: u16, flags: &[&str]) -> Process {
    let (rank, world) = (rank.to_string(), world.to_string());
    let args = ["bench", "--aggregator", addr, "--rank", &rank, "--world", &world];
    Process::start(&[&args, flags].concat())
}
