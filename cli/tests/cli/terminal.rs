//! What a terminal shows while a command waits or works, and nothing else does.

use std::process::Command;

use crate::process::{Ended, Process, RACKSUM, Serving};

/// Runs a rank whose other never comes, with a terminal or without.
fn alone(terminal: bool) -> Option<Ended> {
    let serving = Serving::start(&[]);
    let rank = format!(
        "{RACKSUM} bench --aggregator {} --rank 0 --world 2 --join-timeout 5",
        serving.addr
    );
    if !terminal {
        return Some(Process::spawn(Command::new("sh").args(["-c", &rank])).end(60));
    }
    // It gives its child a terminal, and prints what the terminal shows.
    let script = ["-q", "-e", "-f", "-c", &rank, "/dev/null"];
    if Command::new("script").arg("--version").output().is_err() {
        eprintln!("skipped: this takes `script` of util-linux");
        return None;
    }
    Some(Process::spawn(Command::new("script").args(script)).end(60))
}

#[test]
fn who_is_awaited_is_shown_on_a_terminal_alone() {
    let told = "rank 0 of job \"bench\" waits for rank 1 (";
    if let Some(ended) = alone(true) {
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.out.contains(told), "{ended:?}");
        assert!(ended.out.contains("after 5 s rank 1 had not joined"), "{ended:?}");
    }
    let ended = alone(false).unwrap();
    assert_eq!(ended.failed(1), "after 5 s rank 1 had not joined");
    assert_eq!(ended.err.lines().count(), 1, "{ended:?}");
}
