//! Processes that die, or stop answering, in the middle of a job: the others end, and say why.

use std::time::Duration;

use crate::process::{Process, Serving, bench_rank, signal};
use crate::waits::{await_that, timed};

/// Ranks of a benchmark that would take for ever.
fn busy(serving: &Serving, world: u16, timeout: &str) -> Vec<Process> {
    let flags = ["-b", "4K", "-e", "4K", "-n", "100000000", "--timeout", timeout];
    let ranks: Vec<_> =
        (0..world).map(|rank| bench_rank(&serving.addr, rank, world, &flags)).collect();
    // The table's head is printed once a rank has joined.
    await_that("the ranks run", || ranks.iter().all(|rank| rank.out().contains('#')));
    std::thread::sleep(Duration::from_millis(300));
    ranks
}

#[test]
fn a_rank_that_is_killed_is_lost_to_the_others() {
    let serving = Serving::start(&[]);
    let mut ranks = busy(&serving, 3, "60");
    signal(ranks[1].id(), "KILL");
    drop(ranks.remove(1));
    let (ended, ms) = timed(|| ranks.into_iter().map(|rank| rank.end(30)).collect::<Vec<_>>());
    for ended in ended {
        assert_eq!(ended.failed(1), "lost rank 1");
    }
    assert!(ms < 15_000, "{ms} ms");
    // The aggregator serves the next job of that name.
    let again: Vec<_> =
        (0..2).map(|rank| bench_rank(&serving.addr, rank, 2, &["-e", "4K"])).collect();
    for rank in again {
        rank.end(30).ok();
    }
}

#[test]
fn a_rank_that_is_stopped_is_named_at_the_timeout() {
    let serving = Serving::start(&[]);
    let ranks = busy(&serving, 3, "2");
    signal(ranks[2].id(), "STOP");
    let mut ranks = ranks.into_iter();
    for ended in ranks.by_ref().take(2).map(|rank| rank.end(30)) {
        let why = ended.failed(1);
        assert!(why.contains("waiting for rank 2 (silent for "), "{why}");
    }
    let stopped = ranks.next().unwrap();
    // It may go on, and finds that the others are gone.
    signal(stopped.id(), "CONT");
    let ended = stopped.end(30);
    assert_eq!(ended.code, Some(1), "{ended:?}");
}

#[test]
fn an_aggregator_that_is_told_to_stop_ends_its_ranks_at_once() {
    let serving = Serving::start(&[]);
    let ranks = busy(&serving, 2, "60");
    signal(serving.process.id(), "TERM");
    serving.process.end(10).ok();
    let (ended, ms) = timed(|| ranks.into_iter().map(|rank| rank.end(30)).collect::<Vec<_>>());
    for ended in ended {
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert_eq!(ended.failed(1), "the session ended: the aggregator is gone");
    }
    assert!(ms < 5000, "{ms} ms");
}

#[test]
fn an_aggregator_that_is_killed_is_missed_by_its_ranks() {
    let serving = Serving::start(&[]);
    let ranks = busy(&serving, 2, "60");
    signal(serving.process.id(), "KILL");
    let (ended, ms) = timed(|| ranks.into_iter().map(|rank| rank.end(30)).collect::<Vec<_>>());
    for ended in ended {
        assert_eq!(ended.failed(1), "the session ended: the aggregator is gone");
    }
    assert!(ms < 15_000, "{ms} ms");
}
