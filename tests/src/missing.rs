//! Missing ranks: errors name them in time (I5).

use std::sync::Barrier;
use std::time::Duration;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::Rank;
use racksum_proto::loss::Loss;
use racksum_test_report::time;
use racksum_worker::{Client, ConnectError, ConnectOptions, Error, Faults};

use crate::impostor::Impostor;
use crate::inputs::seed;
use crate::rig::{Rig, bounded, with_limits};
use crate::waits::timed;

fn sum_of(client: &Client, elements: usize) -> Result<(), Error> {
    let mut tensor = vec![1; 4 * elements];
    client.reduce(&mut tensor, Descriptor::sum(elements as u64, DType::I32)).map(|_| ())
}

/// Returns how many milliseconds after its limit an op or a join gave up; panics if it gave up
/// before its limit.
fn past(limit: Duration, ms: u64) -> u64 {
    let limit = u64::try_from(limit.as_millis()).unwrap();
    ms.checked_sub(limit)
        .unwrap_or_else(|| panic!("the rank gave up after {ms} ms, before its limit of {limit} ms"))
}

#[test]
fn ranks_that_do_not_join_are_named() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        with_limits(Duration::from_millis(1500), |limit| {
            let connect = |rank| {
                let options = ConnectOptions { join_timeout: limit, ..rig.options("job", rank, 4) };
                timed(|| Client::connect(&options).unwrap_err())
            };
            let refusals = std::thread::scope(|scope| {
                let ranks = [0, 2].map(|rank| scope.spawn(move || connect(rank)));
                ranks.map(|rank| rank.join().unwrap())
            });
            for (error, ms) in refusals {
                let sentence = error.to_string();
                let ConnectError::Incomplete { missing, .. } = error else { return Err(sentence) };
                time("a join gives up after its timeout", past(limit, ms), 2_500);
                // The other rank may have given up a moment earlier.
                assert!(missing.starts_with(&[1]) || missing.starts_with(&[0, 1]), "{sentence}");
                assert!(missing.ends_with(&[3]), "{sentence}");
                let after = format!("after {} s ranks ", limit.as_secs());
                assert!(sentence.starts_with(&after), "{sentence}");
            }
            Ok(())
        });
        // The ranks that gave up may join again, with all others.
        let sums = rig.ranks("job", 4, |_| {}, |client, _| sum_of(client, 10));
        assert!(sums.iter().all(Result::is_ok));
    });
}

#[test]
fn ranks_that_do_not_call_an_op_are_named_at_its_timeout() {
    bounded(30, || {
        for shards in [1, 3] {
            for elements in [1, 60 * 256 * 50] {
                with_limits(Duration::from_millis(700), |limit| {
                    an_op_that_rank_1_does_not_call(shards, elements, limit)
                });
            }
        }
    });
}

/// Runs an op that only two of three ranks call, until its limit. Returns an error if the limit was
/// too short for this machine.
fn an_op_that_rank_1_does_not_call(
    shards: u8,
    elements: usize,
    limit: Duration,
) -> Result<(), String> {
    let rig = Rig::start(|config| config.shards = shards);
    let limited = |options: &mut ConnectOptions| options.op_timeout = limit;
    let end = Barrier::new(3);
    let outcomes = rig.ranks("op", 3, limited, |client, rank| {
        let begun = sum_of(client, 5);
        let called = (rank != 1).then(|| (timed(|| sum_of(client, elements)), sum_of(client, 1)));
        end.wait();
        begun.map(|()| called)
    });
    for outcome in outcomes {
        let Some(((called, ms), next)) = outcome.map_err(|error| error.to_string())? else {
            continue;
        };
        let error = called.unwrap_err();
        let sentence = error.to_string();
        let Error::Op(OpError::Timeout { missing, .. }) = error else { panic!("{sentence}") };
        // On a busy machine, the limit may pass before a rank has been silent for long, or has
        // called the op.
        if missing.iter().all(|(_, silent)| silent.as_millis() < 200) {
            return Err(sentence);
        }
        time("an op gives up after its timeout", past(limit, ms), 1_800);
        let [(Rank(1), silent)] = missing[..] else { panic!("{sentence}") };
        assert!(silent.as_millis() >= 200, "{sentence}");
        assert!(sentence.contains("waiting for rank 1 (silent for "), "{sentence}");
        let why = "an earlier op timed out";
        assert_eq!(next, Err(Error::Submit(SubmitError::Ended { why: why.into() })));
    }
    Ok(())
}

#[test]
fn a_rank_that_left_is_named_by_an_op_that_needs_it_long_before_its_timeout() {
    bounded(30, || {
        for elements in [5, 60 * 256 * 50] {
            let rig = Rig::start(|config| config.shards = 2);
            rig.ranks(
                "left",
                3,
                |_| {},
                |client, rank| {
                    sum_of(client, elements).unwrap();
                    if rank != 1 {
                        let (error, ms) = timed(|| sum_of(client, elements).unwrap_err());
                        let (ranks, why) = (vec![Rank(1)], Loss::Left);
                        assert_eq!(error, Error::Op(OpError::PeerLost { ranks, why }));
                        let expected = "lost rank 1: it left the job, and this op needs it";
                        assert_eq!(error.to_string(), expected);
                        time("a rank that left is named", ms, 3_000);
                    }
                },
            );
            rig.await_peace();
        }
    });
}

#[test]
fn ranks_may_leave_as_soon_as_they_have_what_they_need() {
    bounded(60, || {
        let seed = seed(71);
        let rig = Rig::start(|config| config.shards = 2);
        // The last rank to leave still requests missing results and gets them.
        for round in 0..20 {
            let faults = Faults { drop: 0.1, duplicate: 0.0, reorder: 0.0, seed: seed + round };
            rig.ranks(
                "leave",
                4,
                |options| options.faults = faults,
                |client, _| sum_of(client, 60 * 256 * 30).unwrap(),
            );
        }
        rig.await_peace();
    });
}

#[test]
fn a_rank_that_vanishes_fails_the_ops_of_the_others_at_once() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let submitted = Barrier::new(3);
        std::thread::scope(|scope| {
            for rank in [0, 2] {
                let (options, submitted) = (rig.options("lost", rank, 3), &submitted);
                scope.spawn(move || {
                    let client = Client::connect(&options).unwrap();
                    let handle =
                        client.submit(vec![0u8; 4], Descriptor::sum(1, DType::I32)).unwrap();
                    submitted.wait();
                    let (error, ms) = timed(|| handle.wait().unwrap_err());
                    let (ranks, why) = (vec![Rank(1)], Loss::Broke);
                    assert_eq!(error, Error::Op(OpError::PeerLost { ranks, why }));
                    time("a rank that broke its connection is named", ms, 3_000);
                    let next = sum_of(&client, 1).unwrap_err();
                    let (ranks, why) = (vec![Rank(1)], Loss::Broke);
                    assert_eq!(next, Error::Submit(SubmitError::PeerLost { ranks, why }));
                });
            }
            let mut impostor = Impostor::connect(&rig);
            impostor.join(impostor.wish("lost", 1, 3));
            submitted.wait();
            std::thread::sleep(Duration::from_millis(200));
            impostor.vanish();
        });
        rig.await_peace();
        // The job's name is free again.
        let sums = rig.ranks("lost", 2, |_| {}, |client, _| sum_of(client, 10));
        assert!(sums.iter().all(Result::is_ok));
    });
}

#[test]
fn an_aggregator_that_stops_ends_the_ops_in_flight() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let options: Vec<_> = (0..2).map(|rank| rig.options("stop", rank, 2)).collect();
        let (ready, joined) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            for options in options {
                let ready = ready.clone();
                scope.spawn(move || {
                    let client = Client::connect(&options).unwrap();
                    sum_of(&client, 5).unwrap();
                    let rank = options.rank;
                    // Rank 1 has no op in flight when the aggregator stops.
                    let handle = (rank == 0).then(|| {
                        client.submit(vec![0u8; 4], Descriptor::sum(1, DType::I32)).unwrap()
                    });
                    ready.send(()).unwrap();
                    let gone = format!("the aggregator {} is gone", options.aggregators[0]);
                    let (error, ms) = timed(|| match handle {
                        Some(handle) => handle.wait().unwrap_err(),
                        None => loop {
                            std::thread::sleep(Duration::from_millis(50));
                            if let Err(error) = sum_of(&client, 1) {
                                break error;
                            }
                        },
                    });
                    time("the end of an aggregator is noticed", ms, 3_000);
                    let sentence = error.to_string();
                    match error {
                        Error::Op(OpError::Ended { why })
                        | Error::Submit(SubmitError::Ended { why }) => {
                            assert_eq!(why, gone);
                        }
                        _ => panic!("rank {rank}: {sentence}"),
                    }
                });
            }
            joined.recv().unwrap();
            joined.recv().unwrap();
            drop(rig);
        });
    });
}
