//! Processes that die or hang in the middle of a job: the other processes end and name the reason.

use std::time::Duration;

use racksum_test_report::time;
use safetensors::Dtype;
use serde_json::Value;

use crate::files::{Folder, Tensor};
use crate::process::{Process, Serving, bench_rank, run, signal, stop};
use crate::waits::{await_that, timed};

/// Starts ranks of an endless benchmark.
fn busy(serving: &Serving, world: u16, timeout: &str) -> Vec<Process> {
    let flags = ["-b", "4K", "-e", "4K", "-n", "100000000", "--timeout", timeout];
    let ranks: Vec<_> =
        (0..world).map(|rank| bench_rank(&serving.addr, rank, world, &flags)).collect();
    // The table's header appears once a rank has joined.
    await_that("the ranks run", || ranks.iter().all(|rank| rank.out().contains('#')));
    std::thread::sleep(Duration::from_millis(300));
    ranks
}

const LOST: &str = "lost rank 1: its process exited unexpectedly; check its log";

#[test]
fn a_rank_that_is_killed_is_lost_to_the_others() {
    let serving = Serving::start(&[]);
    let mut ranks = busy(&serving, 3, "60");
    signal(ranks[1].id(), "KILL");
    drop(ranks.remove(1));
    let (ended, ms) = timed(|| ranks.into_iter().map(|rank| rank.end(30)).collect::<Vec<_>>());
    for ended in ended {
        assert_eq!(ended.failed(1), LOST);
    }
    time("a killed rank is named", ms, 3_000);
    // The aggregator serves the next job of that name.
    let again: Vec<_> =
        (0..2).map(|rank| bench_rank(&serving.addr, rank, 2, &["-e", "4K"])).collect();
    for rank in again {
        rank.end(30).ok();
    }
}

#[test]
fn a_rank_of_a_benchmark_on_one_host_that_is_killed_ends_it_at_once() {
    let flags = ["bench", "-b", "1M", "-e", "1M", "-n", "1000000", "--timeout", "60"];
    let bench = Process::start(&flags);
    await_that("the ranks run", || bench.children().len() == 4);
    std::thread::sleep(Duration::from_millis(500));
    signal(bench.children()[2], "KILL");
    let (ended, ms) = timed(|| bench.end(30));
    let why = ended.failed(1);
    assert!(why.starts_with("rank 2 exited early") && why.contains("SIGKILL"), "{why}");
    time("a local benchmark ends when a rank is killed", ms, 10_000);
}

#[test]
fn ranks_end_with_the_parent_that_started_them() {
    let flags = ["bench", "-b", "1M", "-e", "1M", "-n", "1000000", "--timeout", "60"];
    let bench = Process::start(&flags);
    await_that("the ranks run", || bench.children().len() == 4);
    let ranks = bench.children();
    std::thread::sleep(Duration::from_millis(500));
    signal(bench.id(), "KILL");
    let runs = |id: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // A zombie has ended, and waits for its new parent to read its exit status.
        !stat.is_empty() && !stat.contains(") Z ")
    };
    await_that("the ranks end", || !ranks.iter().any(runs));
    drop(bench);
}

#[test]
fn a_rank_that_is_stopped_is_named_at_the_timeout() {
    let serving = Serving::start(&[]);
    let ranks = busy(&serving, 3, "2");
    stop(ranks[2].id());
    let mut ranks = ranks.into_iter();
    for ended in ranks.by_ref().take(2).map(|rank| rank.end(30)) {
        let why = ended.failed(1);
        assert!(why.contains("waiting for rank 2 (silent for "), "{why}");
    }
    let stopped = ranks.next().unwrap();
    // The stopped rank continues, and finds that the others have left.
    signal(stopped.id(), "CONT");
    let ended = stopped.end(30);
    assert_eq!(ended.code, Some(1), "{ended:?}");
}

#[test]
fn a_rank_that_is_stopped_for_ten_seconds_is_waited_for() {
    let serving = Serving::start(&["--log", "info"]);
    let flags = ["-b", "4M", "-e", "4M", "-n", "400", "--density", "1", "--timeout", "60"];
    let mut ranks: Vec<_> = (0..3).map(|rank| bench_rank(&serving.addr, rank, 3, &flags)).collect();
    await_that("the ranks run", || ranks.iter().all(|rank| rank.out().contains('#')));
    std::thread::sleep(Duration::from_millis(300));
    stop(ranks[2].id());
    std::thread::sleep(Duration::from_secs(10));
    assert!(ranks.iter_mut().all(Process::runs), "no rank may end while one is stopped");
    signal(ranks[2].id(), "CONT");
    for rank in ranks {
        rank.end(60).ok();
    }
    assert!(!serving.process.err().contains("rank lost"), "{}", serving.process.err());
}

#[test]
fn an_aggregator_that_is_told_twice_to_stop_ends_its_ranks_at_once() {
    let serving = Serving::start(&[]);
    let ranks = busy(&serving, 2, "60");
    signal(serving.process.id(), "TERM");
    await_that("the aggregator drains", || serving.process.out().contains("is draining"));
    signal(serving.process.id(), "TERM");
    serving.process.end(10).ok();
    let (ended, ms) = timed(|| ranks.into_iter().map(|rank| rank.end(30)).collect::<Vec<_>>());
    for ended in ended {
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let why = format!("the session ended: the aggregator {} is gone", serving.addr);
        assert_eq!(ended.failed(1), why);
    }
    time("ranks end when their aggregator is told twice to stop", ms, 5_000);
}

#[test]
fn an_aggregator_ends_alike_at_each_signal_that_tells_it_to() {
    for name in ["TERM", "INT", "QUIT"] {
        let serving = Serving::start(&[]);
        signal(serving.process.id(), name);
        let ended = serving.process.end(10).ok();
        assert!(ended.out.ends_with("racksum aggregator stops\n"), "{name}: {ended:?}");
    }
}

#[test]
fn two_signals_right_after_each_other_are_both_heard() {
    let serving = Serving::start(&[]);
    let ranks = busy(&serving, 2, "60");
    // The aggregator gets both signals when it continues.
    for name in ["STOP", "TERM", "INT", "CONT"] {
        signal(serving.process.id(), name);
    }
    serving.process.end(10).ok();
    ranks.into_iter().for_each(|rank| drop(rank.end(30).failed(1).to_owned()));
}

#[test]
fn an_aggregator_that_stops_while_ranks_are_gathered_says_so_to_those_that_came() {
    for through_a_rack in [false, true] {
        let root = Serving::start(&[]);
        let rack = through_a_rack.then(|| Serving::start(&["--parent", &root.addr]));
        let at = rack.as_ref().unwrap_or(&root);
        let first = bench_rank(&at.addr, 0, 2, &["--log", "info"]);
        await_that("the first rank waits", || first.err().contains("waiting for ranks"));
        // A rank may log this before the aggregator of its rack has called the root.
        await_that("the root has the job", || {
            let answer = run(&["status", &root.addr, "--format", "json"]).ok();
            let answer: Value = serde_json::from_str(&answer.out).unwrap();
            !answer["jobs"].as_array().unwrap().is_empty()
        });
        root.end().ok();
        let ended = first.end(20);
        assert!(ended.err.contains("is draining"), "{ended:?}");
    }
}

#[test]
fn an_aggregator_that_is_killed_is_missed_by_its_ranks() {
    let serving = Serving::start(&[]);
    let ranks = busy(&serving, 2, "60");
    signal(serving.process.id(), "KILL");
    let (ended, ms) = timed(|| ranks.into_iter().map(|rank| rank.end(30)).collect::<Vec<_>>());
    for ended in ended {
        let why = format!("the session ended: the aggregator {} is gone", serving.addr);
        assert_eq!(ended.failed(1), why);
    }
    // Each rank waits up to a second for the aggregator to acknowledge the rank's departure.
    time("a killed aggregator is noticed", ms, 4_000);
}

#[test]
fn a_reduction_that_goes_on_without_a_rank_marks_the_tensors_that_lack_it() {
    let folder = Folder::new("lacks");
    let status = folder.path("status");
    let serving = Serving::start(&["--status-socket", &status]);
    let ones = |elements| Tensor::of(Dtype::F32, &[elements], &vec![1.0; elements]);
    let file = folder.write("rank", &[("early", ones(1)), ("late", ones(4_000_000))]);
    let start = |rank: u16| {
        let who = ["--rank", &rank.to_string(), "--world", "3", "--on-rank-loss", "continue"];
        // Only rank 1 drops datagrams, so it is slow and is killed in the middle of the op.
        let drop = if rank == 1 { "0.5" } else { "0" };
        let args = ["reduce", &file, "--aggregator", &serving.addr, "--drop", drop];
        Process::start(&[&args[..], &who].concat())
    };
    let mut ranks: Vec<_> = (0..3).map(start).collect();
    await_that("rank 1 has part of the second sum", || {
        let answer = run(&["status", &status, "--format", "json"]).ok();
        let answer: Value = serde_json::from_str(&answer.out).unwrap();
        answer["jobs"][0]["ranks"][1]["delivered"].as_u64() > Some(20)
    });
    signal(ranks[1].id(), "KILL");
    drop(ranks.remove(1));
    for rank in ranks {
        let ended = rank.end(60).ok();
        let row = |name: &str| ended.out.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(row("late").ends_with("  lacks rank 1"), "{ended:?}");
        assert!(!row("early").contains("lacks"), "{ended:?}");
        assert!(ended.out.contains("\n# rank 1 was lost: 1 of 2 tensors lack"), "{ended:?}");
    }
}
