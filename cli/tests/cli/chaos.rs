//! Faults between hosts. The hosts are network namespaces on a bridge; their processes have
//! identities and authenticate datagrams. The ranks get the sum, or a timely error that names the
//! cause.

use std::time::Duration;

use racksum_test_report::time;
use safetensors::tensor::Dtype;
use serde_json::Value;

use crate::cluster::cluster;
use crate::files::{Tensor, read};
use crate::process::{Process, signal};
use crate::waits::{await_that, timed};

/// Number of elements in a window, for elements of four bytes.
const WINDOW: usize = 60 * 256;
/// Flags for ops that outlast a test.
pub(crate) const FOREVER: [&str; 8] =
    ["-b", "4M", "-e", "4M", "-n", "100000000", "--timeout", "60"];

#[test]
fn a_rank_that_is_killed_in_the_middle_of_an_op_is_named_in_time_and_leaves_nothing_behind() {
    let Some(cluster) = cluster("k", 8) else { return };
    let serving = cluster.serve();
    let mut ranks = cluster.ranks(&serving, &FOREVER);
    std::thread::sleep(Duration::from_millis(500));
    signal(ranks[5].id(), "KILL");
    drop(ranks.remove(5));
    let (ended, ms) = timed(|| ranks.into_iter().map(|rank| rank.end(30)).collect::<Vec<_>>());
    for ended in ended {
        let why = "lost rank 5: its process exited unexpectedly; check its log";
        assert_eq!(ended.failed(1), why);
    }
    time("a rank killed in an op over a network is named", ms, 3_000);
    let status = cluster.status();
    assert_eq!(status["jobs"], serde_json::json!([]), "{status}");
    await_that("all buffers are free", || {
        let [all, free] =
            ["total", "free"].map(|of| cluster.status()["shards"][0]["buffers"][of].clone());
        all == free
    });
    // The job's next generation runs.
    let flags = ["-b", "64K", "-e", "64K", "-n", "3", "--generation", "1"];
    for rank in cluster.ranks(&serving, &flags) {
        rank.end(60).ok();
    }
}

#[test]
fn a_job_that_wants_to_goes_on_without_a_rank_that_is_killed_in_the_middle_of_an_op() {
    let Some(cluster) = cluster("g", 8) else { return };
    let serving = cluster.serve();
    let windows = 800;
    let ones = |windows: usize| {
        let elements = windows * WINDOW;
        Tensor {
            dtype: Dtype::I32,
            shape: vec![elements],
            bytes: 1i32.to_le_bytes().repeat(elements),
        }
    };
    let file = cluster.folder.write("ones", &[("during", ones(windows)), ("later", ones(1))]);
    let out = |rank: u16| cluster.folder.path(&format!("sum{rank}"));
    let identity = cluster.folder.path("node.pem");
    let start = |rank: u16| {
        let args = ["reduce", &file, "--aggregator", &serving.addr, "--identity", &identity];
        let who = ["--rank", &rank.to_string(), "--world", "8", "--format", "json"];
        let more = ["--on-rank-loss", "continue", "--out", &out(rank)];
        cluster.start(&cluster.worker(rank), &[&args[..], &who, &more].concat())
    };
    let mut ranks: Vec<_> = (0..8).map(start).collect();
    await_that("rank 5 has part of the first sum", || {
        cluster.status()["jobs"][0]["ranks"][5]["delivered"].as_u64() > Some(20)
    });
    signal(ranks[5].id(), "KILL");
    drop(ranks.remove(5));
    for rank in ranks {
        let ended = rank.end(60).ok();
        let rows: Vec<Value> =
            ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        // The absent ranks appear in the rows of both tensors and of the total.
        let absent: Vec<_> = rows.iter().map(|row| row["absent"].clone()).collect();
        assert_eq!(absent, [5, 5, 5].map(|rank| serde_json::json!([rank])));
    }
    let sums = [0, 1, 2, 3, 4, 6, 7].map(|rank| std::fs::read(out(rank)).unwrap());
    assert!(sums.iter().all(|sum| *sum == sums[0]), "the sums of the ranks differ");
    let sums = read(out(0));
    assert_eq!(sums["later"].numbers(), vec![7.0; WINDOW]);
    let during = sums["during"].numbers();
    let of_window: Vec<_> = during
        .chunks(WINDOW)
        .map(|window| {
            assert!(
                window.iter().all(|sum| *sum == window[0]),
                "a window mixes sums with and without rank 5"
            );
            window[0]
        })
        .collect();
    let with = of_window.iter().take_while(|sum| **sum == 8.0).count();
    assert!(with > 20, "{with}");
    assert!(of_window[with..].iter().all(|sum| *sum == 7.0) && with < windows, "{with}");
}

#[test]
fn a_network_that_is_down_for_a_second_costs_a_second() {
    let Some(cluster) = cluster("p", 3) else { return };
    let serving = cluster.serve();
    let flags = ["-b", "4M", "-e", "4M", "-n", "400", "--timeout", "60", "--density", "1"];
    let mut ranks = cluster.ranks(&serving, &flags);
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(300));
        assert!(ranks.iter_mut().all(Process::runs), "a rank ended before the cut");
        cluster.cut_off(1, true);
        std::thread::sleep(Duration::from_secs(1));
        cluster.cut_off(1, false);
    }
    for rank in ranks {
        rank.end(60).ok();
    }
}

#[test]
fn a_rank_that_stays_cut_off_is_named_to_the_others_and_they_to_it() {
    let Some(cluster) = cluster("c", 3) else { return };
    let serving = cluster.serve();
    let ranks = cluster.ranks(&serving, &FOREVER);
    std::thread::sleep(Duration::from_millis(300));
    cluster.cut_off(1, true);
    let (ended, ms) = timed(|| ranks.into_iter().map(|rank| rank.end(60)).collect::<Vec<_>>());
    for (rank, ended) in ended.iter().enumerate() {
        let why = match rank {
            1 => format!(
                "the session ended: {}: the aggregator is silent; it is suspended, down or",
                serving.addr
            ),
            _ => "lost rank 1: it is silent; its process is suspended, or its host is down"
                .to_owned(),
        };
        assert!(ended.failed(1).starts_with(&why), "{ended:?}");
    }
    // The connection's idle timeout ends the wait before the op's timeout does.
    assert!(ms >= 15_000, "{ms} ms");
    time("a host that is cut off is noticed after 20 s of silence", ms, 40_000);
    assert_eq!(cluster.status()["jobs"], serde_json::json!([]));
}
