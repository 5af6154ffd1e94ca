//! Several ops in flight, on several lanes and from several threads, with and without waits.

use std::sync::mpsc::channel;
use std::time::Duration;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::error::SubmitError;
use racksum_worker::{Client, Error, Faults, Handle};

use crate::inputs::{floats, seed};
use crate::rig::{Rig, bounded};
use crate::waits::await_that;

/// Returns the number of elements of op `i`. Some ops are small, and some have many windows.
fn elements(i: u16) -> u64 {
    [1, 300, 60 * 256 * 4 + 1, 17, 60 * 256][usize::from(i) % 5]
}

fn submit(client: &Client, i: u16, rank: u16) -> Handle<Vec<u8>> {
    let elements = elements(i);
    let tensor = floats((0..elements).map(|_| f32::from(i) + f32::from(rank)));
    let lane = u8::try_from(i % 2).unwrap();
    let descriptor =
        Descriptor { lane, tag: u64::from(i), ..Descriptor::sum(elements, DType::F32) };
    client.submit(tensor, descriptor).unwrap()
}

fn check(i: u16, handle: Handle<Vec<u8>>, world: u16) {
    let sum = handle.wait().unwrap().tensor;
    let of_ranks: f32 = (0..world).map(|rank| f32::from(i) + f32::from(rank)).sum();
    assert!(sum == floats((0..elements(i)).map(|_| of_ranks)), "op {i}: wrong sum");
}

#[test]
fn ops_of_two_lanes_are_waited_for_in_any_order() {
    bounded(60, || {
        let seed = seed(31);
        for faults in
            [Faults::default(), Faults { drop: 0.03, duplicate: 0.03, reorder: 0.03, seed }]
        {
            let rig = Rig::start(|config| config.shards = 2);
            let lanes = |options: &mut racksum_worker::ConnectOptions| {
                options.lanes = 2;
                options.faults = faults;
            };
            rig.ranks("lanes", 3, lanes, |client, rank| {
                let mut handles: Vec<_> = (0..40).map(|i| (i, submit(client, i, rank))).collect();
                // Each rank waits in a different order.
                handles.rotate_left(usize::from(rank) * 13);
                if rank == 1 {
                    handles.reverse();
                }
                for (i, handle) in handles {
                    check(i, handle, 3);
                }
            });
        }
    });
}

#[test]
fn one_thread_submits_while_others_wait() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        rig.ranks(
            "threads",
            2,
            |options| options.lanes = 2,
            |client, rank| {
                std::thread::scope(|scope| {
                    let waiters: Vec<_> = (0..3)
                        .map(|_| {
                            let (give, take) = channel::<(u16, Handle<Vec<u8>>)>();
                            scope.spawn(move || {
                                for (i, handle) in take {
                                    check(i, handle, 2);
                                }
                            });
                            give
                        })
                        .collect();
                    for i in 0..50 {
                        waiters[usize::from(i) % 3].send((i, submit(client, i, rank))).unwrap();
                        if i % 10 == 9 {
                            // Pause, so that the waiters sometimes have nothing to wait for.
                            std::thread::sleep(Duration::from_millis(5));
                        }
                    }
                });
            },
        );
    });
}

#[test]
fn an_op_that_nobody_waits_for_goes_on() {
    bounded(30, || {
        let rig = Rig::start(|config| config.shards = 2);
        let (done, others) = channel();
        let others = std::sync::Mutex::new(others);
        rig.ranks(
            "background",
            3,
            |options| options.lanes = 2,
            |client, rank| {
                let handles: Vec<_> = (0..10).map(|i| (i, submit(client, i, rank))).collect();
                if rank == 0 {
                    // The ops of ranks 1 and 2 end although this rank does not wait for any op.
                    let others = others.lock().unwrap();
                    for _ in 0..2 {
                        others.recv_timeout(Duration::from_secs(200)).unwrap();
                    }
                }
                for (i, handle) in handles {
                    check(i, handle, 3);
                }
                done.clone().send(()).unwrap();
            },
        );
    });
}

#[test]
fn no_more_ops_are_taken_than_were_granted() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let (full, filled) = channel();
        let filled = std::sync::Mutex::new(filled);
        rig.ranks(
            "full",
            2,
            |options| options.lanes = 2,
            |client, rank| {
                if rank == 1 {
                    filled.lock().unwrap().recv().unwrap();
                }
                let max = client.grant().max_ops;
                let mut handles: Vec<_> = (0..max).map(|i| (i, submit(client, i, rank))).collect();
                if rank == 0 {
                    let error =
                        client.submit(vec![0u8; 4], Descriptor::sum(1, DType::F32)).unwrap_err();
                    let max = usize::from(max);
                    assert_eq!(error, Error::Submit(SubmitError::TooManyOps { max }));
                    assert!(!client.has_room_within(0, Duration::from_millis(20)));
                    full.clone().send(()).unwrap();
                    assert!(client.has_room_within(0, Duration::from_secs(200)));
                }
                // An op beyond the limit takes no number, so both ranks give the next op the same
                // number.
                let last = handles.split_off(1);
                for (i, handle) in handles {
                    check(i, handle, 2);
                }
                let next = submit(client, max, rank);
                for (i, handle) in last {
                    check(i, handle, 2);
                }
                check(max, next, 2);
            },
        );
    });
}

#[test]
fn a_lane_that_was_not_joined_with_is_refused() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        rig.ranks(
            "lane",
            1,
            |options| options.lanes = 3,
            |client, _| {
                let of_lane = |lane| Descriptor { lane, ..Descriptor::sum(1, DType::F32) };
                let error = client.reduce(&mut [0; 4], of_lane(3)).unwrap_err();
                let why = "lane 3 does not exist: the job joined with 3 lanes, numbered from 0";
                assert_eq!(error.to_string(), why);
                client.reduce(&mut [0; 4], of_lane(2)).unwrap();
            },
        );
    });
}

#[test]
fn a_client_that_is_dropped_with_ops_in_flight_ends() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        rig.ranks(
            "dropped",
            2,
            |options| options.lanes = 2,
            |client, rank| {
                // Rank 1 submits none of these ops.
                if rank == 0 {
                    for i in 0..5 {
                        drop(submit(client, i, rank));
                    }
                }
            },
        );
        rig.await_peace();
        // The client has left the job although its ops had not ended.
        await_that("the job's name is free", || rig.aggregator.jobs() == 0);
    });
}
