//! Jobs that wait for room must not keep other jobs out.

use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_test_report::time;
use racksum_worker::{Client, ConnectOptions, Error};
use tokio::sync::oneshot;

use crate::inputs::floats;
use crate::ports::own_port;
use crate::rig::{Rig, in_a_process_of_its_own, with_retries};
use crate::waiters::{Waiters, gather};
use crate::waits::{await_that, timed};

/// Number of ranks in the crowd: more than the number of callers that may be connected without
/// having joined, and almost as many as may wait from the crowd's two addresses.
const CROWD: usize = 2000;

fn reduce(client: &Client) -> Result<(), Error> {
    let mut tensor = floats([1.0, 2.0]);
    client.reduce(&mut tensor, Descriptor::sum(2, DType::F32))?;
    assert_eq!(tensor, floats([1.0, 2.0]));
    Ok(())
}

#[test]
fn a_crowd_that_waits_keeps_out_nobody_for_whom_there_is_room() {
    let name = "queues::a_crowd_that_waits_keeps_out_nobody_for_whom_there_is_room";
    in_a_process_of_its_own(name, || with_retries(come_and_move_beside_a_crowd));
}

/// Joins one job at an aggregator and moves another to it, while a crowd waits there for room.
/// Returns an error if a rank that should hold a place fell silent because the machine gave its
/// threads no time.
fn come_and_move_beside_a_crowd() -> Result<(), String> {
    let crowded = Rig::start(|config| (config.port, config.max_ranks) = (own_port(), 3));
    let full = crowded.options("there", 0, 1);
    let there = [full.clone(), ConnectOptions { job: "too".into(), ..full }]
        .map(|options| Client::connect(&options).unwrap());
    let places_are_held = || match there.iter().find(|client| client.is_over()) {
        Some(lost) => Err(format!("a place is free again: {}", reduce(lost).unwrap_err())),
        None => Ok(()),
    };
    let first = Rig::start(|_| {});
    let moves = ConnectOptions {
        standbys: vec![vec![crowded.aggregator.addr().to_string()]],
        ..first.options("moves", 0, 1)
    };
    let moving = Client::connect(&moves).unwrap();
    reduce(&moving).unwrap();
    // The aggregator has room for one more rank, so the crowd's jobs of two ranks must wait.
    let crowd = Crowd::gather(crowded.aggregator.addr());
    let (small, ms) = timed(|| Client::connect(&crowded.options("small", 0, 1)));
    places_are_held()?;
    time("a rank joins while a crowd waits", ms, 2_000);
    let small = small.unwrap();
    reduce(&small).unwrap();
    drop(small);
    await_that("the small job is gone", || crowded.aggregator.jobs() <= 2);
    drop(first);
    let (moved, ms) = timed(|| reduce(&moving));
    places_are_held()?;
    time("a job fails over while a crowd waits", ms, 3_000);
    moved.unwrap();
    // This frees three places, so one two-rank job of the crowd fits.
    drop((moving, there));
    await_that("a job of the crowd gets room", || crowded.aggregator.jobs() == 1);
    crowd.leave();
    Ok(())
}

/// Connects ranks until the whole crowd waits, or the aggregator refuses some. On a busy host, slow
/// handshakes time out, and their ranks connect again.
async fn gather_all(at: SocketAddr, from: &[IpAddr]) -> Waiters {
    let mut crowd = Waiters::default();
    for round in 0..10 {
        let more = gather(at, from, &format!("crowd-{round}"), CROWD - crowd.waiting.len()).await;
        crowd.waiting.extend(more.waiting);
        crowd.refused = more.refused;
        let is_late = |why: &String| {
            why.contains("closed during the handshake") || why.starts_with("no answer from ")
        };
        if !crowd.refused.iter().any(is_late) {
            break;
        }
    }
    crowd
}

/// A thread in which jobs of two ranks each wait for room.
struct Crowd {
    over: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Crowd {
    fn gather(at: SocketAddr) -> Self {
        let (over, is_over) = oneshot::channel::<()>();
        let (sender, gathered) = channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let from = [1, 2].map(|last| IpAddr::from([127, 0, 0, last]));
                let crowd = gather_all(at, &from).await;
                sender.send((crowd.waiting.len(), crowd.refused.clone())).unwrap();
                drop(is_over.await);
            });
        });
        assert_eq!(gathered.recv().unwrap(), (CROWD, Vec::new()));
        Self { over, thread }
    }

    fn leave(self) {
        drop(self.over);
        self.thread.join().unwrap();
    }
}
