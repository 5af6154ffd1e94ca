//! Faults between hosts: a network namespace each, a bridge between them, processes with identities
//! and sealed datagrams. What the ranks get is the sum, or an error that names the cause in time.

use std::process::Command;
use std::time::Duration;

use safetensors::tensor::Dtype;
use serde_json::Value;

use crate::files::{Folder, Tensor, read};
use crate::namespaces::ip;
use crate::process::{Process, RACKSUM, Serving, run, signal};
use crate::waits::{await_that, timed};

/// An aggregator's host with a bridge, and workers' hosts on it. Removed when it is dropped.
struct Cluster {
    name: String,
    workers: u16,
    folder: Folder,
}

impl Cluster {
    /// Makes it; says why it cannot.
    fn make(name: &str, workers: u16) -> Result<Self, String> {
        let folder = Folder::new(&format!("chaos-{name}"));
        let name = format!("rc{}{name}", std::process::id());
        let cluster = Self { name, workers, folder };
        let hub = cluster.hub();
        ip(&["netns", "add", &hub])?;
        ip(&["-n", &hub, "link", "set", "lo", "up"])?;
        // An address of its own: with that of a port, what comes by the port when it is cut off
        // would be for this host all the same.
        let own = ["address", "02:00:00:00:78:01"];
        let bridge = ["-n", &hub, "link", "add", "bridge"];
        ip(&[&bridge[..], &own, &["type", "bridge"]].concat())?;
        ip(&["-n", &hub, "addr", "add", "10.78.0.1/24", "dev", "bridge"])?;
        ip(&["-n", &hub, "link", "set", "bridge", "up"])?;
        for worker in 0..workers {
            let (host, port) = (cluster.worker(worker), port(worker));
            ip(&["netns", "add", &host])?;
            let pair = ["link", "add", &port, "netns", &hub, "type", "veth", "peer"];
            ip(&[&pair[..], &["name", "wire", "netns", &host]].concat())?;
            ip(&["-n", &hub, "link", "set", &port, "master", "bridge", "up"])?;
            ip(&["-n", &host, "link", "set", "lo", "up"])?;
            let addr = format!("10.78.0.{}/24", worker + 2);
            ip(&["-n", &host, "addr", "add", &addr, "dev", "wire"])?;
            ip(&["-n", &host, "link", "set", "wire", "up"])?;
        }
        cluster.issue();
        Ok(cluster)
    }

    fn hub(&self) -> String {
        format!("{}h", self.name)
    }

    fn worker(&self, worker: u16) -> String {
        format!("{}w{worker}", self.name)
    }

    /// Issues the identities of all hosts.
    fn issue(&self) {
        let authority = self.folder.path("authority.pem");
        run(&["identity", "init", "--out", &authority]).ok();
        for (name, role) in [("agg", "aggregator"), ("node", "worker")] {
            let out = self.folder.path(&format!("{name}.pem"));
            let issue = ["identity", "issue", name, "--role", role];
            run(&[&issue[..], &["--authority", &authority, "--out", &out]].concat()).ok();
        }
    }

    fn start(&self, host: &str, args: &[&str]) -> Process {
        Process::spawn(Command::new("ip").args(["netns", "exec", host, RACKSUM]).args(args))
    }

    fn serve(&self) -> Serving {
        let (identity, status) = (self.folder.path("agg.pem"), self.folder.path("status.sock"));
        let args = ["aggregator", "--port", "0", "--pool-mib", "64", "--bind", "10.78.0.1"];
        let more = ["--identity", &identity, "--status-socket", &status];
        Serving::of(self.start(&self.hub(), &[&args[..], &more].concat()))
    }

    /// What the aggregator tells of itself.
    fn status(&self) -> Value {
        let status = self.folder.path("status.sock");
        serde_json::from_str(&run(&["status", &status, "--format", "json"]).ok().out).unwrap()
    }

    /// Starts a rank of a benchmark on each host; returns once they run.
    fn ranks(&self, serving: &Serving, flags: &[&str]) -> Vec<Process> {
        let (identity, world) = (self.folder.path("node.pem"), self.workers.to_string());
        let ranks: Vec<_> = (0..self.workers)
            .map(|rank| {
                let number = rank.to_string();
                let args = ["bench", "--aggregator", &serving.addr, "--identity", &identity];
                let who = ["--rank", &number, "--world", &world];
                self.start(&self.worker(rank), &[&args[..], &who, flags].concat())
            })
            .collect();
        await_that("the ranks run", || ranks.iter().all(|rank| rank.out().contains('#')));
        ranks
    }

    /// Cuts a worker off, or lets it be reached again: the bridge forwards nothing from or to it,
    /// and no end of the wire sees that.
    fn cut_off(&self, worker: u16, cut: bool) {
        let master: &[&str] = if cut { &["nomaster"] } else { &["master", "bridge"] };
        ip(&[&["-n", &self.hub(), "link", "set", &port(worker)], master].concat()).unwrap();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for host in (0..self.workers).map(|worker| self.worker(worker)).chain([self.hub()]) {
            // One that was never made cannot be removed.
            ip(&["netns", "del", &host]).unwrap_or(());
        }
    }
}

/// The bridge's port towards a worker.
fn port(worker: u16) -> String {
    format!("port{worker}")
}

/// The cluster, or `None` where it cannot be had, which it says.
fn cluster(name: &str, workers: u16) -> Option<Cluster> {
    match Cluster::make(name, workers) {
        Ok(cluster) => Some(cluster),
        Err(why) => {
            eprintln!("skipped: this takes root and iproute2: {why}");
            None
        }
    }
}

/// Elements of a window of four bytes each.
const WINDOW: usize = 60 * 256;
/// Ops for as long as a test takes.
const FOREVER: [&str; 8] = ["-b", "4M", "-e", "4M", "-n", "100000000", "--timeout", "60"];

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
        let why = "lost rank 5: its process ended without a word; see what it said last";
        assert_eq!(ended.failed(1), why);
    }
    assert!(ms < 3000, "{ms} ms");
    let status = cluster.status();
    assert_eq!(status["jobs"], serde_json::json!([]), "{status}");
    await_that("the buffers are back", || {
        let [all, free] = [0, 1].map(|i| cluster.status()["shards"][0]["buffers"][i].clone());
        all == free
    });
    // The next life of the job runs.
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
    await_that("some of the sum is there", || {
        cluster.status()["jobs"][0]["ranks"][5]["delivered"].as_u64() > Some(20)
    });
    signal(ranks[5].id(), "KILL");
    drop(ranks.remove(5));
    for rank in ranks {
        let ended = rank.end(60).ok();
        let rows: Vec<Value> =
            ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let absent: Vec<_> = rows[..2].iter().map(|row| row["absent"].clone()).collect();
        assert_eq!(absent, [serde_json::json!([5]), serde_json::json!([5])]);
    }
    let sums = [0, 1, 2, 3, 4, 6, 7].map(|rank| std::fs::read(out(rank)).unwrap());
    assert!(sums.iter().all(|sum| *sum == sums[0]), "the ranks have other sums");
    let sums = read(out(0));
    assert_eq!(sums["later"].numbers(), vec![7.0; WINDOW]);
    let during = sums["during"].numbers();
    let of_window: Vec<_> = during
        .chunks(WINDOW)
        .map(|window| {
            assert!(window.iter().all(|sum| *sum == window[0]), "torn");
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
        assert!(ranks.iter_mut().all(Process::runs), "the cut is in the middle");
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
            1 => "the session ended: the aggregator is gone",
            _ => "lost rank 1: nothing is heard of it; its host is down or cut off",
        };
        assert_eq!(ended.failed(1), why);
    }
    // The connection's idle timeout, and not the op's.
    assert!((15_000..40_000).contains(&ms), "{ms} ms");
    assert_eq!(cluster.status()["jobs"], serde_json::json!([]));
}
