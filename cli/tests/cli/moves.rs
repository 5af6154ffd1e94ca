//! Jobs that an operator moves to aggregators that their ranks did not know.

use std::sync::Barrier;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_test_report::time;
use racksum_worker::Client;
use serde_json::Value;

use crate::failover::{Load, WORLD, serve};
use crate::identity::{authority, issue};
use crate::ports::own_port;
use crate::process::{Ended, Serving, bench_rank, run};
use crate::waits::await_that;

/// The number of moves and the bytes of a tensor, which `cargo xtask bench moves` sets.
const MOVES: &str = "RACKSUM_TEST_MOVES";
const BYTES: &str = "RACKSUM_TEST_MOVE_BYTES";

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

/// Moves the job "load".
fn move_load(from: &str, to: &str) -> Ended {
    run(&["move", "load", "--from", from, "--to", to])
}

fn status(addr: &str) -> Value {
    serde_json::from_str(&run(&["status", addr, "--format", "json"]).ok().out).unwrap()
}

#[test]
fn a_live_job_moves_again_and_again_and_costs_no_bit() {
    let (moves, bytes) = (number(MOVES, 8), number(BYTES, 8 << 20));
    let serving = [(); 3].map(|()| serve(own_port()));
    // The ranks know the first aggregator only.
    let load = Load::new(bytes / 4, &[&serving[0]]);
    load.run(|load| {
        for nth in 0..moves {
            let [from, to] = [nth, nth + 1].map(|nth| &*serving[nth % 3].addr);
            // Vary the delay, so that moves hit an op at different points.
            std::thread::sleep(Duration::from_millis(nth as u64 * 37 % 200));
            let moved = move_load(from, to).ok();
            assert_eq!(moved.out, format!("job \"load\" runs at {to}\n"));
            load.await_ops(1);
        }
        let last = &serving[moves % 3].addr;
        assert_eq!(status(last)["jobs"][0]["job"], "load");
        let before = status(&serving[(moves - 1) % 3].addr);
        assert_eq!(before["jobs"], Value::Array(Vec::new()));
        assert_eq!(before["moved"].as_array().unwrap().last().unwrap()["to"], **last);
    });
    let ops = load.ended.iter().map(|ops| ops.load(SeqCst)).min().unwrap();
    let longest = load.longest.load(SeqCst);
    time("the longest op while its job is moved", longest, 1_000);
    // Each rank has compared each sum with its first one, and any error would have ended the test.
    println!(
        "{moves} moves of a job of {WORLD} ranks at {bytes} B: same bits in {ops} ops, 0 failed, \
         longest op {longest} ms"
    );
}

#[test]
fn a_job_between_two_ops_moves_without_waiting_for_the_next() {
    let [serving, other] = [(); 2].map(|()| serve(own_port()));
    let load = Load::new(0, &[&serving]);
    let (load, turn) = (&load, &Barrier::new(usize::from(WORLD) + 1));
    std::thread::scope(|scope| {
        for rank in 0..WORLD {
            scope.spawn(move || {
                let client = Client::connect(&load.options(rank)).unwrap();
                let sum = || {
                    let mut tensor = [1i32.to_le_bytes(); 1000].concat();
                    client.reduce(&mut tensor, Descriptor::sum(1000, DType::I32)).unwrap();
                    assert_eq!(tensor, [i32::from(WORLD).to_le_bytes(); 1000].concat());
                };
                sum();
                turn.wait();
                turn.wait();
                sum();
            });
        }
        turn.wait();
        let moved = move_load(&serving.addr, &other.addr);
        turn.wait();
        moved.ok();
    });
}

#[test]
fn a_job_that_cannot_move_stays_and_the_reason_is_named_at_once() {
    let [serving, other] = [(); 2].map(|()| serve(own_port()));
    let full = Serving::start(&["--max-jobs", "1"]);
    let holds = bench_rank(&full.addr, 0, 2, &[]);
    await_that("another job holds the room", || status(&full.addr)["jobs"][0].is_object());
    let waiting = bench_rank(&other.addr, 0, 2, &["--job", "waiting"]);
    await_that("a job waits", || status(&other.addr)["jobs"][0].is_object());
    let nobody = format!("127.0.0.1:{}", own_port());
    let load = Load::new(1 << 18, &[&serving]);
    load.run(|load| {
        for (from, to, why) in [
            (&serving.addr, &nobody, "no answer from"),
            (&serving.addr, &full.addr, "--max-jobs of the aggregator allows 1; room is held by"),
            (&serving.addr, &serving.addr, "is this aggregator itself"),
            (&other.addr, &serving.addr, "job \"load\" is not here"),
        ] {
            let ended = move_load(from, to);
            let sentence = ended.failed(3).to_owned();
            assert!(sentence.contains(why), "{sentence}");
            load.await_ops(1);
        }
        let ended = run(&["move", "waiting", "--from", &other.addr, "--to", &serving.addr]);
        assert!(ended.failed(3).contains("has not started: it waits for rank 1"), "{ended:?}");
        let ended = run(&["move", "load", "--from", &serving.addr, "--to", "nowhere"]);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        let here = status(&serving.addr);
        assert_eq!(
            (&here["jobs"][0]["job"], &here["moved"]),
            (&"load".into(), &Value::Array(vec![]))
        );
        // After all these refusals, the job still moves.
        move_load(&serving.addr, &other.addr).ok();
        load.await_ops(1);
    });
    drop((holds, waiting));
}

#[test]
fn an_aggregator_that_is_drained_to_another_hands_its_jobs_over_and_stops() {
    let [serving, other] = [(); 2].map(|()| serve(own_port()));
    let load = Load::new(1 << 18, &[&serving]);
    load.run(|load| {
        let drained = run(&["drain", "--from", &serving.addr, "--to", &other.addr]).ok();
        assert_eq!(drained.out, format!("1 job moved to {}; the aggregator stops\n", other.addr));
        serving.process.end(20).ok();
        load.await_ops(1);
        assert_eq!(status(&other.addr)["jobs"][0]["job"], "load");
    });
    // An aggregator without jobs is drained too, and its caller gets the answer.
    let nobody = format!("127.0.0.1:{}", own_port());
    let drained = run(&["drain", "--from", &other.addr, "--to", &nobody]).ok();
    assert!(drained.out.starts_with("0 jobs moved"), "{drained:?}");
    other.process.end(20).ok();
}

#[test]
fn with_identities_only_an_operator_moves_jobs_and_only_within_its_authority() {
    let (folder, ours) = authority("moves", "rack");
    let (elsewhere, theirs) = authority("moves", "elsewhere");
    let agg = issue(&folder, &ours, "agg", "aggregator");
    let node = issue(&folder, &ours, "node", "worker");
    let ops = issue(&folder, &ours, "ops", "operator");
    let foreign = issue(&elsewhere, &theirs, "agg", "aggregator");
    let [serving, other] = [(); 2].map(|()| Serving::start(&["--identity", &agg]));
    let stranger = Serving::start(&["--identity", &foreign]);
    let long = ["-b", "1M", "-e", "1M", "-n", "1000000", "--job", "long", "--identity", &node];
    let ranks = [0, 1].map(|rank| bench_rank(&serving.addr, rank, 2, &long));
    let ask = |identity: &str, addr: &str| {
        run(&["status", addr, "--identity", identity, "--format", "json"]).ok().out
    };
    let runs_at = |addr: &str| ask(&ops, addr).contains("\"state\":\"running\"");
    await_that("the job runs", || runs_at(&serving.addr));
    let moves = |identity: &str, to: &str| {
        run(&["move", "long", "--from", &serving.addr, "--to", to, "--identity", identity])
    };
    let drain = |identity: &str| {
        run(&["drain", "--from", &serving.addr, "--to", &other.addr, "--identity", identity])
    };
    for (identity, who) in
        [(&node, "\"node\" has role worker"), (&agg, "\"agg\" has role aggregator")]
    {
        let why = format!(
            "{who}, but only an identity with the role operator may move jobs; issue one with \
             `racksum identity issue NAME --role operator`"
        );
        for ended in [moves(identity, &other.addr), drain(identity)] {
            assert!(ended.failed(3).ends_with(&why), "{ended:?}");
        }
    }
    let ended = moves(&ops, &stranger.addr);
    assert!(ended.failed(3).contains("another authority"), "{ended:?}");
    assert!(runs_at(&serving.addr));
    moves(&ops, &other.addr).ok();
    assert!(runs_at(&other.addr) && !runs_at(&serving.addr));
    // Only those that may know of the job see where it went.
    assert!(ask(&node, &serving.addr).contains("\"moved\":[{\"job\":{\"name\":\"long\""));
    drop(ranks);
}
