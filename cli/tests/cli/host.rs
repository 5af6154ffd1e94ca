//! Faulty hosts: full disks, closed pipes, too few file descriptors, small buffers, and a wall
//! clock that jumps. An aggregator keeps serving, and reports the fault once.

use std::fs::{File, OpenOptions};
use std::io::{PipeReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::files::{Folder, captured};
use crate::identity::{authority, issue};
use crate::process::{Process, RACKSUM, Serving, bench_rank, signal};
use crate::status::status_of;
use crate::waits::await_that;

/// Opens an output that is always full, like a full disk.
fn full_disk() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// Creates a full pipe and its reader, which stays open and reads nothing.
fn full_pipe() -> (Stdio, PipeReader) {
    let (idle, full) = std::io::pipe().unwrap();
    // Fill the pipe through a second open file, which does not block; `full` itself still blocks.
    let same = format!("/proc/self/fd/{}", full.as_raw_fd());
    let mut options = OpenOptions::new();
    let mut filler = options.write(true).custom_flags(libc::O_NONBLOCK).open(same).unwrap();
    while filler.write(&[b'.'; 4096]).is_ok() {}
    (full.into(), idle)
}

#[test]
fn an_aggregator_serves_on_when_nobody_reads_what_it_says() {
    let (pipe, _idle) = full_pipe();
    for full in [full_disk(), pipe] {
        let mut command = Command::new(RACKSUM);
        command.args(["aggregator", "--port", "0", "--pool-mib", "16"]);
        let mut aggregator = Process::spawn_into(&mut command, full, Stdio::piped());
        let warnings = || aggregator.err().matches("cannot write to standard output").count();
        await_that("the aggregator warns", || warnings() == 1);
        std::thread::sleep(Duration::from_millis(500));
        assert!(aggregator.runs(), "the aggregator must keep serving");
        signal(aggregator.id(), "TERM");
        aggregator.end(10).ok();
    }
}

#[test]
fn an_aggregator_serves_on_when_its_log_is_full_or_nobody_reads_it() {
    let (reader, unread) = std::io::pipe().unwrap();
    drop(reader);
    let (stuck, _idle) = full_pipe();
    for log in [full_disk(), unread.into(), stuck] {
        let mut command = Command::new(RACKSUM);
        command.args(["aggregator", "--port", "0", "--pool-mib", "16", "--log", "debug"]);
        let serving = Serving::of(Process::spawn_into(&mut command, Stdio::piped(), log));
        for generation in ["0", "1"] {
            let flags = ["-b", "64K", "-e", "64K", "-n", "3", "--generation", generation];
            let ranks = [0, 1].map(|rank| bench_rank(&serving.addr, rank, 2, &flags));
            ranks.into_iter().for_each(|rank| drop(rank.end(30).ok()));
        }
        serving.end().ok();
    }
}

#[test]
fn an_aggregator_with_no_files_to_spare_serves_on_and_says_so_once() {
    let mut idle = 0;
    // The limit is the number of open files before any rank has joined, plus one. It is too low for
    // the lifelines of four ranks.
    let probe = Serving::start(&[]);
    await_that("the aggregator has opened its files", || {
        let files = std::fs::read_dir(format!("/proc/{}/fd", probe.process.id())).unwrap().count();
        std::mem::replace(&mut idle, files) == files
    });
    drop(probe);
    let limited =
        format!("ulimit -n {}; exec {RACKSUM} aggregator --port 0 --pool-mib 64", idle + 1);
    let serving = Serving::of(Process::spawn(Command::new("sh").args(["-c", &limited])));
    let flags = ["-b", "64K", "-e", "1M", "-n", "20"];
    let ranks: Vec<_> = (0..4).map(|rank| bench_rank(&serving.addr, rank, 4, &flags)).collect();
    for rank in ranks {
        rank.end(60).ok();
    }
    let ended = serving.end();
    assert_eq!(ended.err.matches("cannot accept a lifeline").count(), 1, "{}", ended.err);
    assert!(ended.err.contains("raise the limit (ulimit -n)"), "{}", ended.err);
}

#[test]
fn too_few_files_are_an_error_and_never_a_panic() {
    let alone = "bench -b 4K -e 4K -n 1 -w 0".to_owned();
    let folder = Folder::new("files");
    let reduced = format!("reduce {}", captured("digits")[..2].join(" "));
    let written = format!("{reduced} --out {}", folder.path("sums"));
    // The aggregator refuses these two flags together, so the process ends by itself.
    let served =
        "aggregator --port 0 --pool-mib 64 --parent localhost:1 --fanout multicast".to_owned();
    for (command, files) in [&alone, &reduced, &written, &served]
        .into_iter()
        .flat_map(|it| (4..=16).map(move |n| (it, n)))
    {
        let limited = format!("ulimit -n {files}; exec {RACKSUM} {command}");
        let ended = Process::spawn(Command::new("sh").args(["-c", &limited])).end(60);
        // The program may inherit so many open files that it cannot even load.
        if files < 16 && ended.err.contains("error while loading shared libraries") {
            continue;
        }
        assert!(ended.code.is_some_and(|code| code <= 3), "{files} files: {}", ended.err);
        assert!(!ended.err.contains("panicked"), "{files} files: {}", ended.err);
        if ended.err.contains("Too many open files") {
            assert!(ended.err.contains("(ulimit -n)"), "{command}, {files} files: {}", ended.err);
            let exit = ended.code == Some(3) || ended.code == Some(0);
            assert!(exit, "{command}, {files} files: {ended:?}");
        }
    }
}

/// Starts the program with the library of `tests/preload`, which replaces functions of the C
/// library.
fn preloaded(args: &[&str], setting: (&str, &str)) -> Process {
    // Cargo places the library in the folder of this test's binary.
    let library = std::env::current_exe().unwrap().with_file_name("libracksum_preload.so");
    assert!(library.exists(), "{}", library.display());
    let mut command = Command::new(RACKSUM);
    command.args(args).env("LD_PRELOAD", library).env(setting.0, setting.1);
    Process::spawn(&mut command)
}

#[test]
fn small_receive_buffers_are_told_once_and_cost_no_sum() {
    let small = ("RACKSUM_PRELOAD_RMEM_MAX", "65536");
    let aggregator = ["aggregator", "--port", "0", "--pool-mib", "64", "--shards", "2"];
    let serving = Serving::of(preloaded(&aggregator, small));
    let ranks = ["0", "1", "2", "3"].map(|rank| {
        let args = ["bench", "--aggregator", &serving.addr, "--rank", rank, "--world", "4"];
        preloaded(
            &[&args[..], &["-b", "1M", "-e", "16M", "-n", "5", "--density", "1"]].concat(),
            small,
        )
    });
    let warning =
        "receive buffer is 64 KiB, not the requested 4 MiB; raise net.core.rmem_max to 4194304";
    let ended = ranks.into_iter().map(|rank| rank.end(60).ok());
    for ended in ended.collect::<Vec<_>>().into_iter().chain([serving.end().ok()]) {
        assert_eq!(ended.err.matches(warning).count(), 1, "{}", ended.err);
    }
}

/// A file that holds the wall clock's offset in seconds. The preloaded library reads it.
struct WallClock(PathBuf);

impl WallClock {
    fn new(folder: &Folder) -> Self {
        let clock = Self(folder.path("wall-clock").into());
        clock.set_off_by_days(0);
        clock
    }

    fn set_off_by_days(&self, days: i64) {
        // Rename atomically, so that no process reads a half-written file.
        let new = self.0.with_extension("new");
        std::fs::write(&new, (days * 86_400).to_string()).unwrap();
        std::fs::rename(new, &self.0).unwrap();
    }

    fn start(&self, args: &[&str]) -> Process {
        preloaded(args, ("RACKSUM_PRELOAD_WALL_CLOCK", self.0.to_str().unwrap()))
    }
}

#[test]
fn jobs_go_on_when_the_wall_clock_is_set_and_only_certificates_go_by_it() {
    let (folder, ours) = authority("wall-clock", "rack");
    let served = issue(&folder, &ours, "agg", "aggregator");
    let node = issue(&folder, &ours, "node", "worker");
    let clock = WallClock::new(&folder);
    let socket = folder.path("status.sock");
    let args = ["aggregator", "--port", "0", "--pool-mib", "64", "--identity", &served];
    let serving = Serving::of(clock.start(&[&args[..], &["--status-socket", &socket]].concat()));
    let member = ["bench", "--aggregator", &serving.addr, "--identity", &node, "--timeout", "20"];
    let long = ["--world", "2", "-b", "64K", "-e", "64K", "-n", "100000000"];
    // The clocks of the aggregator and of rank 1 jump; rank 0 keeps the right time.
    let steady = Process::start(&[&member[..], &long, &["--rank", "0"]].concat());
    let mut ranks = [steady, clock.start(&[&member[..], &long, &["--rank", "1"]].concat())];
    await_that("the ranks run", || ranks.iter().all(|rank| rank.out().contains('#')));
    let join = || {
        let short = ["--rank", "0", "--world", "1", "-b", "4K", "-e", "4K", "-n", "2"];
        Process::start(&[&member[..], &short, &["--job", "short"]].concat()).end(40)
    };
    let next_op = || status_of(&socket)["jobs"][0]["ranks"][0]["next_op"].as_u64().unwrap();
    for (step, days, expected, valid) in [
        (1, 3650, "jumped forward by 315360000 s;", false),
        (2, 0, "jumped back by 315360000 s;", true),
        (3, -3650, "jumped back by 315360000 s;", false),
    ] {
        clock.set_off_by_days(days);
        await_that(expected, || serving.process.err().matches("the wall clock").count() == step);
        assert!(serving.process.err().lines().last().unwrap().contains(expected));
        let before = next_op();
        await_that("ops continue", || next_op() > before + 100);
        let ended = join();
        if valid {
            ended.ok();
        } else {
            let why = "has expired, or the clock of one of the two hosts is wrong";
            assert!(ended.failed(3).contains(why), "{ended:?}");
        }
    }
    assert!(ranks.iter_mut().all(Process::runs));
    let err = serving.process.err();
    assert_eq!(err.matches("the wall clock").count(), 3, "{err}");
    assert!(!err.contains("lost"), "{err}");
}
