//! Jobs that continue at another aggregator: their sums keep the same bits, or an error names every
//! aggregator.

use std::sync::{Barrier, Mutex};
use std::time::Duration;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::error::OpError;
use racksum_test_report::time;
use racksum_worker::{Blocks, Client, ConnectError, ConnectOptions, Error, Faults};

use crate::inputs::{Values, seed, tensor};
use crate::oracle::{Expected, reduce};
use crate::ports::own_port;
use crate::rig::{Rig, bounded, with_limits};
use crate::waits::{await_that, timed};

pub(crate) const WORLD: u16 = 3;

/// Returns descriptors that cover each kind of op that needs special care in a migration.
fn descriptors() -> Vec<Descriptor> {
    let sum = |elements, dtype| Descriptor::sum(elements, dtype);
    let narrow = |elements, wire| Descriptor { wire, ..sum(elements, DType::F32) };
    vec![
        sum(60 * 256 * 40 + 9, DType::F32),
        sum(3, DType::I32),
        Descriptor { reduction: Reduction::Avg, ..sum(60 * 256 * 20, DType::F32) },
        narrow(60 * 256 * 20, WireType::Int8),
        narrow(60 * 256 * 9, WireType::Fixed32),
        Descriptor { reduction: Reduction::Min, ..sum(60 * 512 * 7, DType::F16) },
        narrow(60 * 512 * 8, WireType::Bf16),
    ]
}

pub(crate) struct Case {
    descriptor: Descriptor,
    inputs: Vec<Vec<u8>>,
    expected: Expected,
}

pub(crate) fn cases(seed: u64) -> Vec<Case> {
    let case = |(i, descriptor): (u64, Descriptor)| {
        let values = if i % 2 == 0 { Values::Ordinary } else { Values::Wide };
        let of = |rank| {
            let block = descriptor.block_elements();
            tensor(descriptor.dtype, descriptor.elements, block, values, rank, seed + i)
        };
        let inputs: Vec<_> = (0..WORLD).map(of).collect();
        Case { descriptor, expected: reduce(&descriptor, &inputs), inputs }
    };
    (0..).zip(descriptors()).map(case).collect()
}

/// Reduces all tensors and a list of blocks in each round, with all these ops in flight together.
pub(crate) fn run(client: &Client, rank: u16, cases: &[Case], rounds: usize) {
    for round in 0..rounds {
        let started: Vec<_> = cases
            .iter()
            .map(|case| {
                let input = case.inputs[usize::from(rank)].clone();
                client.submit(input, case.descriptor).unwrap()
            })
            .collect();
        let (descriptor, own) = (cases[0].descriptor, usize::from(rank));
        let list = list(&descriptor, &cases[0].inputs[own]);
        let list = client.submit(list, descriptor).unwrap();
        for (i, (case, handle)) in cases.iter().zip(started).enumerate() {
            let sum = handle.wait().unwrap_or_else(|error| panic!("round {round}: {error}"));
            assert!(
                sum.tensor == case.expected.tensor,
                "round {round}, op {i}: wrong sum at rank {rank}"
            );
        }
        let sums = list.wait().unwrap().tensor;
        let Expected { tensor, union, .. } = &cases[0].expected;
        assert_eq!(&sums.indices, union, "round {round}");
        assert!(sums.values == blocks(&descriptor, tensor, union).values, "round {round}");
    }
}

fn list(descriptor: &Descriptor, tensor: &[u8]) -> Blocks {
    let union = reduce(descriptor, &[tensor.to_vec()]).union;
    blocks(descriptor, tensor, &union)
}

fn blocks(descriptor: &Descriptor, tensor: &[u8], indices: &[u32]) -> Blocks {
    let len = descriptor.block_elements() * descriptor.dtype.size();
    let block = |index: &u32| {
        let start = *index as usize * len;
        tensor[start..tensor.len().min(start + len)].to_vec()
    };
    Blocks { indices: indices.to_vec(), values: indices.iter().flat_map(block).collect() }
}

/// Starts a rig with room for one job, at a port where a later rig can start again.
fn lone(port: u16) -> Rig {
    Rig::start(|config| (config.port, config.max_jobs) = (port, 1))
}

/// Returns the options of a rank that may move from the first rig to the next ones.
fn options(rigs: &[&Rig], job: &str, rank: u16) -> ConnectOptions {
    let addr = |rig: &&Rig| vec![rig.aggregator.addr().to_string()];
    ConnectOptions {
        standbys: rigs[1..].iter().map(addr).collect(),
        ..rigs[0].options(job, rank, WORLD)
    }
}

#[test]
fn a_job_that_would_wait_for_room_goes_first_where_there_is_some() {
    bounded(60, || {
        let [home, full, free] = [(); 3].map(|()| Rig::start(|config| config.max_jobs = 1));
        let other = Client::connect(&full.options("other", 0, 1)).unwrap();
        let each: Vec<_> =
            (0..WORLD).map(|rank| options(&[&home, &full, &free], "waits", rank)).collect();
        let (joined, cases) = (&Barrier::new(usize::from(WORLD) + 1), &cases(seed(88)));
        std::thread::scope(|scope| {
            for options in each {
                // This is less than the time for which a rank waits for room.
                let op_timeout = Duration::from_secs(18);
                let options = ConnectOptions { wait: true, op_timeout, ..options };
                scope.spawn(move || {
                    let client = Client::connect(&options).unwrap();
                    run(&client, options.rank, cases, 1);
                    joined.wait();
                    run(&client, options.rank, cases, 3);
                });
            }
            joined.wait();
            drop(home);
        });
        drop(other);
    });
}

#[test]
fn an_aggregator_that_stops_at_any_time_costs_no_bits() {
    bounded(120, || {
        let seed = seed(81);
        let cases = cases(seed);
        for (attempt, faults) in [0.0, 0.02, 0.05].into_iter().enumerate() {
            // With faults, the ranks handle datagrams one by one, as they do with a small MTU.
            let faults = Faults { drop: faults, duplicate: faults, reorder: faults, seed };
            let rigs = [1, 2, 1, 3].map(|shards| Rig::start(|config| config.shards = shards));
            let rigs = Mutex::new(rigs.map(Some));
            let all: Vec<_> = {
                let rigs = rigs.lock().unwrap();
                let rigs: Vec<&Rig> = rigs.iter().flatten().collect();
                (0..WORLD).map(|rank| options(&rigs, "move", rank)).collect()
            };
            std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..WORLD)
                    .zip(all)
                    .map(|(rank, options)| {
                        let cases = &cases;
                        scope.spawn(move || {
                            let mtu = (attempt != 1).then_some(1500);
                            let options = ConnectOptions { faults, mtu, ..options };
                            let client = Client::connect(&options).unwrap();
                            run(&client, rank, cases, 60);
                        })
                    })
                    .collect();
                for i in 0..3 {
                    std::thread::sleep(Duration::from_millis(400));
                    if ranks.iter().all(|rank| rank.is_finished()) {
                        break;
                    }
                    drop(rigs.lock().unwrap()[i].take());
                }
            });
            for rig in rigs.into_inner().unwrap().iter().flatten() {
                rig.await_peace();
            }
        }
    });
}

#[test]
fn an_aggregator_that_drains_hands_its_jobs_over_and_takes_no_others() {
    bounded(60, || {
        let cases = cases(seed(83));
        let [one, other] = [1, 2].map(|shards| Rig::start(|config| config.shards = shards));
        std::thread::scope(|scope| {
            for rank in 0..WORLD {
                let options = options(&[&one, &other], "drain", rank);
                let cases = &cases;
                scope.spawn(move || {
                    run(&Client::connect(&options).unwrap(), rank, cases, 30);
                });
            }
            std::thread::sleep(Duration::from_millis(300));
            one.aggregator.drain();
            one.await_peace();
            let why = "the aggregator refused: it is draining and takes no more jobs; use another \
                       aggregator";
            with_limits(Duration::from_secs(2), |join_timeout| {
                let new = ConnectOptions { join_timeout, ..one.options("new", 0, 1) };
                let error = Client::connect(&new).unwrap_err().to_string();
                if error == why { Ok(()) } else { Err(error) }
            });
            // A rank that also knows the other aggregator joins that one.
            drop(Client::connect(&ConnectOptions {
                world: 1,
                ..options(&[&one, &other], "new", 0)
            }));
        });
        other.await_peace();
    });
}

#[test]
fn a_job_that_knows_no_other_place_is_served_to_its_end_by_one_that_drains() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let cases = cases(seed(84));
        let options = |_: &mut ConnectOptions| {};
        rig.ranks("stay", WORLD, options, |client, rank| {
            if rank == 0 {
                rig.aggregator.drain();
            }
            run(client, rank, &cases, 5);
        });
        rig.await_peace();
    });
}

#[test]
fn ranks_that_passed_over_an_aggregator_come_back_to_it_when_it_is_there() {
    bounded(60, || {
        let port = own_port();
        let (one, other) = (lone(port), Rig::start(|_| {}));
        let all = [0, 1, 2].map(|rank| options(&[&one, &other], "back", rank));
        drop(one);
        let cases = cases(seed(86));
        std::thread::scope(|scope| {
            for (rank, options) in (0..WORLD).zip(all) {
                if rank == WORLD - 1 {
                    await_that("the first ranks wait at the second aggregator", || {
                        other.aggregator.jobs() == 1
                    });
                    // The last rank finds the first aggregator running again, and waits there for
                    // the others.
                    let one = lone(port);
                    let client = Client::connect(&options).unwrap();
                    run(&client, rank, &cases, 3);
                    drop(client);
                    one.await_peace();
                } else {
                    let cases = &cases;
                    scope.spawn(move || {
                        run(&Client::connect(&options).unwrap(), rank, cases, 3);
                    });
                }
            }
        });
        other.await_peace();
    });
}

#[test]
fn a_rank_that_waits_leaves_its_place_for_no_aggregator_where_it_would_wait_alone() {
    bounded(60, || {
        let port = own_port();
        let [one, other] = [port, own_port()].map(lone);
        let [first, last] = [0, 1].map(|rank| ConnectOptions {
            world: 2,
            join_timeout: Duration::from_secs(20),
            ..options(&[&one, &other], "stay", rank)
        });
        drop(one);
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| Client::connect(&first).unwrap());
            await_that("the first rank waits", || other.aggregator.jobs() == 1);
            // Another job takes the only place of the preferred aggregator.
            let one = lone(port);
            let another = one.options("another", 0, 2);
            let another = scope.spawn(move || Client::connect(&another));
            await_that("the other job has begun to join", || one.aggregator.jobs() == 1);
            // Another rank waits for the first job's place, while the first job waits for its last
            // rank.
            let next = ConnectOptions { wait: true, ..other.options("next", 0, 1) };
            let next = scope.spawn(move || drop(Client::connect(&next).unwrap()));
            std::thread::sleep(Duration::from_secs(2));
            drop((Client::connect(&last).unwrap(), joined.join().unwrap()));
            next.join().unwrap();
            drop(Client::connect(&one.options("another", 1, 2)).unwrap());
            drop(another.join().unwrap().unwrap());
        });
    });
}

#[test]
fn a_rank_that_waits_for_room_goes_to_where_others_wait_and_leaves_the_queue() {
    bounded(60, || {
        let [full, other] = [(); 2].map(|()| Rig::start(|config| config.max_jobs = 1));
        let holds = Client::connect(&full.options("holds", 0, 1)).unwrap();
        let first = ConnectOptions { world: 2, wait: true, ..options(&[&full, &other], "room", 0) };
        let last = other.options("room", 1, 2);
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| Client::connect(&first).unwrap());
            let both = (Client::connect(&last).unwrap(), joined.join().unwrap());
            drop(holds);
            // The full aggregator has room again, and its queue is empty.
            drop(Client::connect(&full.options("next", 0, 1)).unwrap());
            drop(both);
            [full, other].iter().for_each(Rig::await_peace);
        });
    });
}

#[test]
fn ranks_that_move_meet_although_some_of_them_passed_over_an_aggregator() {
    bounded(60, || {
        let port = own_port();
        let [one, next, last] = [own_port(), port, own_port()].map(lone);
        // One rank knows only the first two aggregators, while the others could wait at the third.
        let known = [&[&one, &next, &last][..], &[&one, &next, &last], &[&one, &next]];
        let all: Vec<_> =
            (0..).zip(known).map(|(rank, known)| options(known, "meet", rank)).collect();
        drop(next);
        let done = Barrier::new(usize::from(WORLD) + 1);
        std::thread::scope(|scope| {
            for options in &all {
                let done = &done;
                scope.spawn(move || {
                    let client = Client::connect(options).unwrap();
                    for _ in 0..2 {
                        let mut tensor = [1, 0, 0, 0];
                        client.reduce(&mut tensor, Descriptor::sum(1, DType::I32)).unwrap();
                        assert_eq!(tensor, [3, 0, 0, 0]);
                        done.wait();
                    }
                });
            }
            done.wait();
            drop(one);
            await_that("the other ranks wait at the last aggregator", || {
                last.aggregator.jobs() == 1
            });
            let next = lone(port);
            done.wait();
            [next, last].iter().for_each(Rig::await_peace);
        });
    });
}

#[test]
fn one_that_knows_another_place_closes_at_once_although_others_know_none() {
    bounded(60, || {
        let rigs = [1, 1].map(|shards| Rig::start(|config| config.shards = shards));
        let (cases, closed) = (cases(seed(85)), Barrier::new(WORLD.into()));
        std::thread::scope(|scope| {
            for rank in 0..WORLD {
                let (rigs, cases, closed) = (&rigs, &cases, &closed);
                scope.spawn(move || {
                    let known = if rank == 0 { &[&rigs[0], &rigs[1]][..] } else { &[&rigs[0]] };
                    let client = Client::connect(&options(known, "mixed", rank)).unwrap();
                    run(&client, rank, cases, 3);
                    if rank > 0 {
                        // This rank stays and starts no op.
                        closed.wait();
                        return;
                    }
                    let ((), ms) = timed(|| drop(client));
                    closed.wait();
                    time("a client closes while other ranks call nothing", ms, 3_000);
                });
            }
        });
        rigs.iter().for_each(Rig::await_peace);
    });
}

#[test]
fn an_aggregator_whose_name_is_unknown_is_passed_over() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let unknown = ConnectOptions {
            aggregators: vec!["no-such-host.invalid:7177".into()],
            standbys: vec![vec![rig.aggregator.addr().to_string()]],
            ..rig.options("unknown", 0, 1)
        };
        drop(Client::connect(&unknown).unwrap());
        let alone = ConnectOptions { standbys: Vec::new(), ..unknown };
        with_limits(Duration::from_secs(2), |join_timeout| {
            match Client::connect(&ConnectOptions { join_timeout, ..alone.clone() }).unwrap_err() {
                ConnectError::Unresolved { .. } => Ok(()),
                early => Err(early.to_string()),
            }
        });
    });
}

#[test]
fn a_rank_that_others_did_not_come_to_in_time_says_where_it_waited() {
    bounded(60, || {
        let [one, other] = [(); 2].map(|()| Rig::start(|_| {}));
        let name = other.aggregator.addr().to_string();
        let known = [&[&one, &other][..], &[&one], &[&one]];
        let all: Vec<_> =
            (0..).zip(known).map(|(rank, known)| options(known, "alone", rank)).collect();
        let started = Barrier::new(usize::from(WORLD) + 1);
        std::thread::scope(|scope| {
            for options in all {
                let (started, name) = (&started, &name);
                scope.spawn(move || {
                    let op_timeout = Duration::from_secs(3);
                    let options = ConnectOptions { op_timeout, ..options };
                    let client = Client::connect(&options).unwrap();
                    let one = Descriptor::sum(1, DType::I32);
                    client.reduce(&mut [0; 4], one).unwrap();
                    started.wait();
                    // The test drops the aggregator here.
                    started.wait();
                    let error = client.reduce(&mut [0; 4], one).unwrap_err().to_string();
                    if options.rank == 0 {
                        assert!(error.contains(&format!("{name}: not joined in time")), "{error}");
                    }
                });
            }
            started.wait();
            drop(one);
            started.wait();
        });
        other.await_peace();
    });
}

#[test]
fn when_no_aggregator_is_left_the_error_says_what_became_of_each() {
    bounded(60, || {
        let mut rigs = [(); 2].map(|()| Some(Rig::start(|_| {})));
        let all: Vec<_> = rigs.iter().flatten().collect();
        let names: Vec<_> = all.iter().map(|rig| rig.aggregator.addr().to_string()).collect();
        let mut options: Vec<_> = (0..WORLD).map(|rank| options(&all, "none", rank)).collect();
        options.iter_mut().for_each(|options| options.op_timeout = Duration::from_secs(4));
        let started = Barrier::new(usize::from(WORLD) + 1);
        std::thread::scope(|scope| {
            for options in options {
                let (started, names) = (&started, &names);
                scope.spawn(move || {
                    let client = Client::connect(&options).unwrap();
                    let one = Descriptor::sum(1, DType::I32);
                    client.reduce(&mut [0; 4], one).unwrap();
                    started.wait();
                    // The test drops the aggregators here.
                    started.wait();
                    let (error, ms) = timed(|| client.reduce(&mut [0; 4], one).unwrap_err());
                    assert!(ms >= 3_000, "{ms} ms");
                    time("an op without any aggregator gives up after its 4 s", ms, 6_000);
                    let sentence = error.to_string();
                    let Error::Op(OpError::NoAggregator { tried }) = error else {
                        panic!("{sentence}")
                    };
                    for name in names {
                        assert!(tried.contains(name.as_str()), "{sentence}");
                    }
                    assert!(!tried.contains("not tried"), "{sentence}");
                });
            }
            started.wait();
            rigs.iter_mut().for_each(|rig| drop(rig.take()));
            started.wait();
        });
        let gone = ConnectOptions {
            standbys: vec![vec![names[1].clone()]],
            ..ConnectOptions::new(names[0].clone(), "none")
        };
        let error = with_limits(Duration::from_secs(2), |join_timeout| {
            match Client::connect(&ConnectOptions { join_timeout, ..gone.clone() }).unwrap_err() {
                error @ ConnectError::NoAggregator(_) => Ok(error.to_string()),
                early => Err(early.to_string()),
            }
        });
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
    });
}
