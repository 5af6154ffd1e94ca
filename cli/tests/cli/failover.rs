//! Aggregators that are killed or drained under load: the sums continue at another aggregator.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_test_report::time;
use racksum_worker::{Client, ConnectOptions};
use safetensors::tensor::Dtype;

use crate::files::{Folder, Tensor, read};
use crate::ports::own_port;
use crate::process::{Process, RACKSUM, Serving, run, signal};
use crate::waits::{await_that, timed};

pub(crate) const WORLD: u16 = 4;

/// Ranks that run in threads, reduce the same tensor again and again, and check each result.
pub(crate) struct Load {
    elements: usize,
    /// Addresses of the sets of aggregators, in order of preference.
    addrs: Vec<Vec<String>>,
    /// Number of ops that each rank has completed.
    pub(crate) ended: [AtomicU64; WORLD as usize],
    /// Duration of the longest op, in milliseconds.
    pub(crate) longest: AtomicU64,
    stop: AtomicBool,
}

impl Load {
    pub(crate) fn new(elements: usize, aggregators: &[&Serving]) -> Self {
        let addrs = aggregators.iter().map(|serving| vec![serving.addr.clone()]).collect();
        Self {
            elements,
            addrs,
            ended: Default::default(),
            longest: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        }
    }

    /// Like [`Self::new`], for a job whose windows are spread over these aggregators.
    pub(crate) fn spread(elements: usize, aggregators: &[&Serving]) -> Self {
        let set = aggregators.iter().map(|serving| serving.addr.clone()).collect();
        Self { addrs: vec![set], ..Self::new(elements, &[]) }
    }

    pub(crate) fn options(&self, rank: u16) -> ConnectOptions {
        ConnectOptions {
            rank,
            world: WORLD,
            aggregators: self.addrs[0].clone(),
            standbys: self.addrs[1..].to_vec(),
            join_timeout: Duration::from_secs(30),
            ..ConnectOptions::new(self.addrs[0][0].clone(), "load")
        }
    }

    /// Runs one rank until `stop` is set.
    fn rank(&self, rank: u16) {
        let client = Client::connect(&self.options(rank)).unwrap();
        // The bits of the sum reveal an element that is added twice, out of order or not at all.
        let value = |i: usize| (i % 1013) as f32 * 1.7f32.powi(i32::from(rank)) + 0.1;
        let input: Vec<u8> = (0..self.elements).flat_map(|i| value(i).to_le_bytes()).collect();
        let descriptor = Descriptor::sum(self.elements as u64, DType::F32);
        let mut expected = Vec::new();
        let mut tensor = input.clone();
        // The last op of a round distributes `stop`, so that all ranks end after the same op.
        let mut going = true;
        for op in 0.. {
            tensor.copy_from_slice(&input);
            let (reduced, ms) = timed(|| client.reduce(&mut tensor, descriptor));
            reduced.unwrap_or_else(|error| panic!("rank {rank}, op {op}: {error}"));
            if expected.is_empty() {
                expected.clone_from(&tensor);
            }
            assert!(tensor == expected, "rank {rank}, op {op}: the bits of the sum have changed");
            self.longest.fetch_max(ms, SeqCst);
            self.ended[usize::from(rank)].fetch_add(1, SeqCst);
            let mut stop = i32::from(self.stop.load(SeqCst)).to_le_bytes();
            client.reduce(&mut stop, Descriptor::sum(1, DType::I32)).unwrap();
            going &= i32::from_le_bytes(stop) == 0;
            if !going {
                break;
            }
        }
    }

    /// Runs all ranks while `body` acts on the aggregators.
    pub(crate) fn run(&self, body: impl FnOnce(&Self)) {
        std::thread::scope(|scope| {
            let ranks: Vec<_> =
                (0..WORLD).map(|rank| scope.spawn(move || self.rank(rank))).collect();
            // A panic must not leave the ranks running forever.
            let done = catch_unwind(AssertUnwindSafe(|| {
                self.await_ops(2);
                body(self);
            }));
            self.stop.store(true, SeqCst);
            done.unwrap_or_else(|panic| resume_unwind(panic));
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }

    /// Waits until every rank has completed `more` further ops.
    pub(crate) fn await_ops(&self, more: u64) {
        let ended = || self.ended.iter().map(|ops| ops.load(SeqCst)).min().unwrap();
        let before = ended();
        await_that("ops complete", || ended() >= before + more);
    }
}

/// Starts an aggregator on a given port.
pub(crate) fn serve(port: u16) -> Serving {
    let port = port.to_string();
    Serving::of(Process::start(&["aggregator", "--port", &port, "--pool-mib", "64"]))
}

#[test]
fn fifty_aggregators_killed_in_a_row_cost_no_bit() {
    let ports = [own_port(), own_port()];
    let mut serving = ports.map(serve);
    let load = Load::new(25 << 20, &[&serving[0], &serving[1]]);
    load.run(|load| {
        for kill in 0..50 {
            let at = kill % 2;
            // Vary the delay, so that kills hit an op at different points.
            std::thread::sleep(Duration::from_millis(kill as u64 * 37 % 200));
            signal(serving[at].process.id(), "KILL");
            load.await_ops(1);
            serving[at] = serve(ports[at]);
        }
    });
    time("the longest op while aggregators are killed", load.longest.load(SeqCst), 3_000);
}

#[test]
fn an_aggregator_that_is_told_to_stop_ends_once_its_jobs_have_moved() {
    let ports = [own_port(), own_port()];
    let mut serving = ports.map(|port| Some(serve(port)));
    let load = Load::new(1 << 20, &[0, 1].map(|at| serving[at].as_ref().unwrap()));
    load.run(|load| {
        for stop in 0..6 {
            let at = stop % 2;
            let (ended, ms) = timed(|| serving[at].take().unwrap().end());
            assert!(
                ended.ok().out.contains("is draining: waiting for 1 job to end or move"),
                "{stop}"
            );
            time("an aggregator drains", ms, 5_000);
            load.await_ops(3);
            serving[at] = Some(serve(ports[at]));
        }
    });
}

#[test]
fn a_second_signal_stops_an_aggregator_whose_job_stays() {
    let serving = Serving::start(&[]);
    let options = ConnectOptions::new(serving.addr.clone(), "stays");
    let client = Client::connect(&options).unwrap();
    signal(serving.process.id(), "TERM");
    await_that("the aggregator drains", || serving.process.out().contains("is draining"));
    let one = Descriptor::sum(1, DType::I32);
    client.reduce(&mut [1, 0, 0, 0], one).unwrap();
    let (ended, ms) = timed(|| serving.end());
    ended.ok();
    time("a second signal stops an aggregator", ms, 5_000);
    await_that("the rank notices the loss of the aggregator", || {
        client.reduce(&mut [1, 0, 0, 0], one).is_err()
    });
}

#[test]
fn a_rank_that_hosts_a_standby_saves_its_job_when_the_aggregator_is_killed() {
    let folder = Folder::new("standby");
    let socket = folder.path("status.sock");
    let serving = Serving::start(&["--status-socket", &socket]);
    let elements = 24 << 20;
    let bytes: Vec<u8> =
        (0..elements).flat_map(|i: i32| (i.wrapping_mul(2_654_435) % 1000).to_le_bytes()).collect();
    let whole = Tensor { dtype: Dtype::I32, shape: vec![bytes.len() / 4], bytes: bytes.clone() };
    let file = folder.write("input", &[("one", whole.clone()), ("two", whole)]);
    let standby = format!("127.0.0.1:{}", own_port());
    let both = format!("{},{standby}", serving.addr);
    let start = |rank: u16| {
        let number = rank.to_string();
        let out = folder.path(&format!("sum{rank}"));
        let args = ["reduce", &file, "--rank", &number, "--world", "2", "--out", &out];
        let host: &[&str] = if rank == 1 { &["--standby", &standby] } else { &[] };
        let mut command = Command::new(RACKSUM);
        Process::spawn(command.args(args).args(host).env("RACKSUM_AGGREGATOR", &both))
    };
    let ranks = [0, 1].map(start);
    await_that("rank 0 has part of the first sum", || {
        let status = run(&["status", &socket, "--format", "json"]).ok().out;
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        status["jobs"][0]["ranks"][0]["delivered"].as_u64() > Some(20)
    });
    signal(serving.process.id(), "KILL");
    for (rank, process) in ranks.into_iter().enumerate() {
        process.end(60).ok();
        let sums = read(folder.path(&format!("sum{rank}")));
        let twice = |sum: &Tensor| {
            let sums = sum.bytes.chunks(4).map(|x| i32::from_le_bytes(x.try_into().unwrap()));
            let inputs = bytes.chunks(4).map(|x| i32::from_le_bytes(x.try_into().unwrap()));
            sums.eq(inputs.map(|x| 2 * x))
        };
        assert!(sums.len() == 2 && sums.values().all(twice), "rank {rank}: wrong sums");
    }
}
