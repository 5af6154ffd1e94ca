//! Racks and a root on separate hosts: the ranks of every rack name the killed ranks and
//! aggregators.

use std::time::Duration;

use racksum_test_report::time;
use serde_json::json;

use crate::chaos::FOREVER;
use crate::cluster::{Cluster, cluster};
use crate::files::{Tensor, read};
use crate::process::{Ended, Process, Serving, signal};
use crate::waits::{await_that, timed};

/// Number of ranks, two in each rack, and the hosts of the racks' aggregators.
const RANKS: u16 = 4;
const RACKS: [u16; 2] = [4, 5];

/// A root, and the aggregators of two racks.
struct Racks {
    cluster: Cluster,
    root: Serving,
    racks: [Serving; 2],
}

impl Racks {
    /// Starts the aggregators; if that fails, reports a skip and returns `None`.
    fn start(name: &str) -> Option<Self> {
        let cluster = cluster(name, RANKS + 2)?;
        let root = cluster.serve();
        let racks = RACKS.map(|host| cluster.serve_rack(host, &root));
        Some(Self { cluster, root, racks })
    }

    fn ranks(&self, flags: &[&str]) -> Vec<Process> {
        let [one, other] = &self.racks;
        self.cluster.ranks_at(&[one, one, other, other], flags)
    }

    /// Waits until the root and these racks have no job and no buffer in use.
    fn await_peace(&self, racks: &[u16]) {
        await_that("all jobs have ended and all buffers are free", || {
            let statuses = racks.iter().map(|rack| self.cluster.status_of_rack(*rack));
            statuses.chain([self.cluster.status()]).all(|status| {
                let [all, free] = ["total", "free"].map(|of| &status["shards"][0]["buffers"][of]);
                status["jobs"] == json!([]) && all == free
            })
        });
    }
}

/// Waits for the ranks to end. Returns their results and the time in milliseconds.
fn end_all(ranks: Vec<Process>) -> (Vec<Ended>, u64) {
    timed(|| ranks.into_iter().map(|rank| rank.end(30)).collect())
}

#[test]
fn what_is_killed_in_one_rack_is_named_in_all_in_time_and_leaves_nothing_behind() {
    let Some(racks) = Racks::start("r") else { return };
    let status = || racks.cluster.status();
    assert_eq!(racks.cluster.status_of_rack(4)["parent"], json!(racks.root.addr));
    // Kill a rank, then the aggregator of the other rack.
    let mut ranks = racks.ranks(&FOREVER);
    await_that("the root knows the ranks of each rack", || {
        let members = &status()["jobs"][0]["ranks"];
        members[0]["rack"] == json!([0, 1]) && members[1]["rack"] == json!([2, 3])
    });
    std::thread::sleep(Duration::from_millis(300));
    signal(ranks[1].id(), "KILL");
    drop(ranks.remove(1));
    let (ended, ms) = end_all(ranks);
    let why = "lost rank 1: its process exited unexpectedly; check its log";
    ended.iter().for_each(|ended| assert_eq!(ended.failed(1), why));
    time("a rank killed in one rack is named in all", ms, 3_000);
    racks.await_peace(&RACKS);
    let flags = [&FOREVER[..], &["--generation", "1"]].concat();
    let ranks = racks.ranks(&flags);
    std::thread::sleep(Duration::from_millis(300));
    signal(racks.racks[1].process.id(), "KILL");
    let (ended, ms) = end_all(ranks);
    for (rank, ended) in ended.iter().enumerate() {
        let why = match rank {
            0 | 1 => {
                "lost ranks 2, 3: their rack's aggregator is lost or has ended the job; check the \
                      aggregator's log"
                    .to_owned()
            }
            _ => format!("the session ended: the aggregator {} is gone", racks.racks[1].addr),
        };
        assert_eq!(ended.failed(1), why);
    }
    time("a killed aggregator of a rack is noticed in all racks", ms, 3_000);
    racks.await_peace(&RACKS[..1]);
}

#[test]
fn a_root_that_is_killed_ends_the_job_in_every_rack_and_they_serve_the_next() {
    let Some(racks) = Racks::start("o") else { return };
    let ranks = racks.ranks(&FOREVER);
    std::thread::sleep(Duration::from_millis(300));
    signal(racks.root.process.id(), "KILL");
    let (ended, ms) = end_all(ranks);
    let why = "the session ended: the aggregator lost its parent at ";
    ended.iter().for_each(|ended| assert!(ended.failed(1).starts_with(why), "{ended:?}"));
    time("a killed root is noticed in all racks", ms, 3_000);
    for rack in RACKS {
        assert_eq!(racks.cluster.status_of_rack(rack)["jobs"], json!([]));
    }
    // The racks' aggregators keep running and find the next root at the address of the first.
    let (_, port) = racks.root.addr.rsplit_once(':').unwrap();
    let _root = racks.cluster.serve_on(port);
    let flags = ["-b", "64K", "-e", "64K", "-n", "3", "--generation", "1"];
    racks.ranks(&flags).into_iter().for_each(|rank| drop(rank.end(60).ok()));
}

#[test]
fn files_are_summed_to_the_same_bits_through_racks_as_at_one_aggregator() {
    let Some(racks) = Racks::start("f") else { return };
    let folder = &racks.cluster.folder;
    let numbers = |rank: u16| (0..100_000u32).map(move |i| f32::from(rank + 1) / (i + 1) as f32);
    let file = |rank: u16| {
        let bytes: Vec<u8> = numbers(rank).flat_map(f32::to_le_bytes).collect();
        let tensor = Tensor { dtype: safetensors::Dtype::F32, shape: vec![100_000], bytes };
        folder.write(&format!("in{rank}"), &[("it", tensor)])
    };
    let files: Vec<_> = (0..RANKS).map(file).collect();
    let identity = folder.path("node.pem");
    let sums = |name: &str, at: [&Serving; RANKS as usize]| {
        let out = |rank: u16| folder.path(&format!("{name}{rank}"));
        let start = |(rank, at): (u16, &Serving)| {
            let (number, out) = (rank.to_string(), out(rank));
            let who = ["--aggregator", &at.addr, "--identity", &identity, "--rank", &number];
            let what = ["reduce", &files[usize::from(rank)], "--wire", "fixed32", "--world", "4"];
            let args = [&what[..], &who, &["--out", &out, "--job", name]].concat();
            racks.cluster.start(&racks.cluster.worker(rank), &args)
        };
        let ranks: Vec<_> = (0..).zip(at).map(start).collect();
        ranks.into_iter().for_each(|rank| drop(rank.end(60).ok()));
        let sums: Vec<_> = (0..RANKS).map(|rank| std::fs::read(out(rank)).unwrap()).collect();
        assert!(sums.iter().all(|sum| *sum == sums[0]));
        (read(out(0))["it"].numbers(), sums[0].clone())
    };
    let [one, other] = &racks.racks;
    let (numbers, racked) = sums("racks", [one, other, other, one]);
    assert!((numbers[0] - 10.0).abs() < 1e-4 && (numbers[99] - 0.1).abs() < 1e-6);
    assert_eq!(sums("flat", [&racks.root; 4]).1, racked);
}
