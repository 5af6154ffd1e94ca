//! Tests of the progress line, which a command draws only on a terminal.

use std::process::Command;

use crate::process::{Ended, Process, RACKSUM, Serving, signal};
use crate::waits::await_that;

/// Runs one rank of two, on a terminal if `terminal` is set; the other rank never joins. Returns
/// `None` if no terminal is available.
fn alone(terminal: bool) -> Option<Ended> {
    let serving = Serving::start(&[]);
    let rank = format!(
        "{RACKSUM} bench --aggregator {} --rank 0 --world 2 --join-timeout 5",
        serving.addr
    );
    if terminal { Some(on_terminal(&rank)?.end(60)) } else { Some(in_shell(&rank)) }
}

fn in_shell(line: &str) -> Ended {
    Process::spawn(Command::new("sh").args(["-c", line])).end(60)
}

/// Starts a command line on a terminal; returns `None` if no terminal is available.
fn on_terminal(line: &str) -> Option<Process> {
    // `script` gives its child a terminal, and prints the terminal's output.
    let script = ["-q", "-e", "-f", "-c", line, "/dev/null"];
    if Command::new("script").arg("--version").output().is_err() {
        racksum_test_report::skip("this test needs `script` from util-linux");
        return None;
    }
    Some(Process::spawn(Command::new("script").args(script)))
}

#[test]
fn who_is_awaited_is_shown_on_a_terminal_alone() {
    let expected = "rank 0 of job \"bench\" waits for rank 1 (";
    if let Some(ended) = alone(true) {
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.out.contains(expected), "{ended:?}");
        assert!(ended.out.contains("after 5 s rank 1 had not joined"), "{ended:?}");
    }
    let ended = alone(false).unwrap();
    assert_eq!(ended.failed(1), "after 5 s rank 1 had not joined");
    assert_eq!(ended.err.lines().count(), 1, "{ended:?}");
}

#[test]
fn how_far_a_benchmark_is_shows_within_a_size() {
    let serving = Serving::start(&[]);
    let all = "bench -b 4K -e 4K --density 1 -w 0 -n 100000000";
    let rank = format!("{all} --aggregator {} --rank 0 --world 1", serving.addr);
    for args in [format!("{all} --workers 2"), rank] {
        // `exec` replaces the shell that `script` starts, so the program is the child of `script`.
        let Some(process) = on_terminal(&format!("exec {RACKSUM} {args}")) else { return };
        // The whole run would take an hour, so the test ends it early.
        await_that("the progress is shown", || {
            let shown = process.out();
            shown.contains("measuring: 0 % in ") && shown.contains(" s left")
        });
        // Do not send SIGINT: if a script runs this test in the background, the program ignores it.
        process.children().into_iter().for_each(|child| signal(child, "TERM"));
        process.end(60);
    }
}
