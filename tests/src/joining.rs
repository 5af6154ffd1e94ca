//! Joining a job: admission, refusals and their messages.

use std::net::Ipv4Addr;
use std::time::Duration;

use racksum_proto::auth::Key;
use racksum_proto::control::{FromAggregator, FromWorker, Join};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::error::OpError;
use racksum_proto::ids::Generation;
use racksum_worker::{Client, ConnectError, ConnectOptions, Error};

use crate::impostor::Impostor;
use crate::inputs::floats;
use crate::ports::own_port;
use crate::rig::{Rig, bounded};
use crate::waits::await_that;

fn refusal(options: &ConnectOptions) -> String {
    match Client::connect(options).unwrap_err() {
        ConnectError::Refused(reason) => reason,
        error => panic!("{error}"),
    }
}

fn check(client: &Client, world: f32) {
    let elements = 60 * 256 * 7 + 3;
    let mut tensor = floats((0..elements).map(|i| (i % 5) as f32));
    client.reduce(&mut tensor, Descriptor::sum(elements, DType::F32)).unwrap();
    assert!(tensor == floats((0..elements).map(|i| (i % 5) as f32 * world)));
}

#[test]
fn a_rank_that_does_not_fit_its_job_is_refused_and_the_job_goes_on() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        std::thread::scope(|scope| {
            let first = rig.options("job", 0, 2);
            let first = scope.spawn(move || check(&Client::connect(&first).unwrap(), 2.0));
            await_that("rank 0 has joined", || rig.aggregator.jobs() == 1);
            let of = |rank, world| rig.options("job", rank, world);
            let again = refusal(&of(0, 2));
            assert!(
                again.starts_with("rank 0 of job \"job\" has already joined from 127.0.0.1 (data"),
                "{again}"
            );
            let world = refusal(&of(1, 3));
            assert_eq!(
                world,
                "job \"job\" was opened with world 2, but rank 1 has 3; set the same value at all \
                 ranks"
            );
            let lanes = refusal(&ConnectOptions { lanes: 2, ..of(1, 2) });
            assert_eq!(
                lanes,
                "job \"job\" was opened with lanes 1, but rank 1 has 2; set the same value at all \
                 ranks"
            );
            let second = Client::connect(&of(1, 2)).unwrap();
            let late = refusal(&of(1, 2));
            let why =
                "job \"job\" is running in generation 0, begun by 127.0.0.1, and all its ranks (2)";
            assert!(late.starts_with(why), "{late}");
            check(&second, 2.0);
            first.join().unwrap();
        });
        rig.await_peace();
    });
}

#[test]
fn a_new_generation_fences_the_one_before_and_no_earlier_one_comes_back() {
    bounded(60, || {
        let rig = Rig::start(|config| config.max_jobs = 1);
        let of = |rank, world, life| ConnectOptions {
            generation: Generation(life),
            ..rig.options("job", rank, world)
        };
        std::thread::scope(|scope| {
            // The first generation runs, and one of its ranks waits for an op.
            let old = scope.spawn(|| Client::connect(&of(1, 2, 0)).unwrap());
            let waiting = Client::connect(&of(0, 2, 0)).unwrap();
            let old = old.join().unwrap();
            let handle = waiting.submit(vec![0u8; 4], Descriptor::sum(1, DType::F32)).unwrap();
            // The second generation begins to join, and its first rank waits for the other.
            let second = scope.spawn(|| Client::connect(&of(0, 2, 3)));
            let lives = |new, old| {
                format!(
                    "a greater generation of the job has begun: generation {new} of job \"job\", \
                     begun by 127.0.0.1, replaced generation {old}, begun by 127.0.0.1"
                )
            };
            let error = handle.wait().unwrap_err();
            assert_eq!(error, Error::Op(OpError::Ended { why: lives(3, 0).into() }));
            let late = refusal(&of(1, 2, 0));
            let expected = "job \"job\" is in generation 3, begun by 127.0.0.1, and generation 0 \
                            has ended; start the rank with the job's current `generation`";
            assert_eq!(late, expected);
            // The third generation begins before the second is complete.
            let third = Client::connect(&of(0, 1, 4)).unwrap();
            let error = second.join().unwrap().unwrap_err().to_string();
            assert_eq!(error, format!("the aggregator refused: {}", lives(4, 3)));
            drop((old, waiting));
            // When ranks of earlier generations leave, the running job must not change.
            check(&third, 1.0);
        });
        rig.await_peace();
    });
}

#[test]
fn a_job_that_has_another_ones_name_neither_ends_it_nor_joins_it() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let of = |rank, world, life, secret: u8| ConnectOptions {
            generation: Generation(life),
            secret: Some(Key([secret; Key::LEN])),
            ..rig.options("train", rank, world)
        };
        let running = Client::connect(&of(0, 1, 7, 1)).unwrap();
        let why = "job \"train\" is in generation 7, begun by 127.0.0.1, and 127.0.0.1 with \
                   generation 9 does not prove that it belongs to the same job; give each job its \
                   own name (`job`), or wait until that job ends";
        assert_eq!(refusal(&of(0, 2, 9, 2)), why);
        assert!(
            refusal(&of(0, 1, 7, 2)).contains("does not prove that it belongs to the same job")
        );
        check(&running, 1.0);
        // The job's own next generation may end it.
        let next = Client::connect(&of(0, 1, 8, 1)).unwrap();
        check(&next, 1.0);
        assert!(running.is_over() || running.reduce(&mut [0; 4], one()).is_err());
    });
}

fn one() -> Descriptor {
    Descriptor::sum(1, DType::F32)
}

#[test]
fn what_no_job_can_have_is_refused() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        for (change, why) in [
            (ConnectOptions { rank: 2, ..rig.options("job", 0, 2) }, "rank 2 must be below"),
            (ConnectOptions { world: 257, ..rig.options("job", 0, 1) }, "1 to 256 ranks, not 257"),
            (ConnectOptions { lanes: 0, ..rig.options("job", 0, 1) }, "1 to 8 lanes, not 0"),
            (ConnectOptions { lanes: 9, ..rig.options("job", 0, 1) }, "1 to 8 lanes, not 9"),
            (rig.options("", 0, 1), "have 1 to 128 bytes, not 0"),
            (rig.options(&"x".repeat(129), 0, 1), "have 1 to 128 bytes, not 129"),
            (
                ConnectOptions { mtu: Some(1279), ..rig.options("job", 0, 1) },
                "MTU 1279 is too small",
            ),
            (
                ConnectOptions { aggregators: vec![], ..rig.options("job", 0, 1) },
                "no aggregator is given",
            ),
            (
                ConnectOptions { aggregators: vec!["here".into()], ..rig.options("job", 0, 1) },
                "\"here\" is not an aggregator address (HOST:PORT)",
            ),
        ] {
            let error = Client::connect(&change).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert_eq!(rig.aggregator.jobs(), 0);
    });
}

#[test]
fn another_version_of_the_protocol_is_refused() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let mut impostor = Impostor::connect(&rig);
        let wish = impostor.wish("job", 0, 1);
        let version = wish.version + 1;
        impostor.send_message(&FromWorker::Join(Join { version, ..wish }));
        let answer = impostor.recv_message();
        assert_eq!(answer, Some(FromAggregator::WrongVersion { speaks: version - 1 }));
    });
}

#[test]
fn more_jobs_than_there_is_room_for_are_refused_until_one_ends() {
    bounded(30, || {
        let rig = Rig::start(|config| config.max_jobs = 2);
        let one = Client::connect(&rig.options("one", 0, 1)).unwrap();
        let two = Client::connect(&rig.options("two", 0, 1)).unwrap();
        let reason = refusal(&rig.options("three", 0, 1));
        let expected = "there are 2 jobs, and --max-jobs of the aggregator allows 2; room is held \
                        by \"one\" with 1 rank, \"two\" with 1 rank; try again later, set \
                        `wait`, or ask the operator of the aggregator for room";
        assert_eq!(reason, expected);
        drop(one);
        await_that("the job is gone", || rig.aggregator.jobs() == 1);
        let three = Client::connect(&rig.options("three", 0, 1)).unwrap();
        check(&two, 1.0);
        check(&three, 1.0);
    });
}

/// Returns the number of jobs that wait for room, as the aggregator reports it to one more waiting
/// job.
fn jobs_that_wait(rig: &Rig) -> u16 {
    let mut asks = Impostor::connect(rig);
    let wish = asks.wish("asks", 0, 1);
    asks.send_message(&FromWorker::Join(Join { wait: true, ..wish }));
    loop {
        match asks.recv_message() {
            Some(FromAggregator::Queued { before, .. }) => return before,
            Some(FromAggregator::Lifeline { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn jobs_that_wait_for_room_are_served_in_turn() {
    bounded(60, || {
        let rig = Rig::start(|config| config.max_jobs = 1);
        let waits =
            |name, rank, world| ConnectOptions { wait: true, ..rig.options(name, rank, world) };
        let holder = Client::connect(&rig.options("holder", 0, 1)).unwrap();
        let (served, order) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            for (waiting, name) in [(1, "first"), (2, "second")] {
                // Both ranks of a job wait, and are admitted together.
                for rank in 0..2 {
                    let (options, served) = (waits(name, rank, 2), served.clone());
                    scope.spawn(move || {
                        let client = Client::connect(&options).unwrap();
                        check(&client, 2.0);
                        served.send(name).unwrap();
                    });
                }
                await_that("the job waits", || jobs_that_wait(&rig) == waiting);
            }
            // A job that does not set `wait` is not admitted before the waiting jobs.
            let error = refusal(&rig.options("hasty", 0, 1));
            assert!(
                error.starts_with("there is 1 job, and --max-jobs of the aggregator allows 1"),
                "{error}"
            );
            // A rank whose join times out gets the reason.
            let nobody = format!("127.0.0.1:{}", own_port());
            let short = waits("impatient", 0, 1);
            let short = ConnectOptions {
                join_timeout: Duration::from_secs(8),
                standbys: vec![short.aggregators],
                aggregators: vec![nobody.clone()],
                ..short
            };
            let error = Client::connect(&short).unwrap_err();
            assert!(matches!(error, ConnectError::NoRoom { .. }), "{error}");
            let error = error.to_string();
            assert!(error.contains("held by \"holder\" with 1 rank"), "{error}");
            assert!(error.contains(&format!("; {nobody}: ")), "{error}");
            drop(holder);
            let order: Vec<_> = order.iter().take(4).collect();
            assert_eq!(order, ["first", "first", "second", "second"]);
        });
        rig.await_peace();
    });
}

#[test]
fn a_job_that_needs_more_memory_than_its_share_is_refused_at_every_rank() {
    bounded(30, || {
        let rig = Rig::start(|config| config.pool_mib = 1);
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let options = ConnectOptions { lanes: 8, ..rig.options("big", rank, 3) };
                scope.spawn(move || {
                    let reason = refusal(&options);
                    assert!(reason.contains("raise --pool-mib or lower --max-jobs"), "{reason}");
                });
            }
        });
        assert_eq!(rig.aggregator.jobs(), 0);
        rig.await_peace();
    });
}

#[test]
fn a_pool_as_small_as_can_be_is_enough() {
    bounded(30, || {
        for shards in [1, 2] {
            let rig = Rig::start(|config| config.shards = shards);
            rig.ranks(
                "small",
                3,
                |options| options.pool_slots = 2,
                |client, _| {
                    assert_eq!(client.grant().pool_slots, 2);
                    check(client, 3.0);
                },
            );
        }
    });
}

#[test]
fn datagrams_fit_the_smallest_mtu_of_the_ranks() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        for mtus in [[1280, 1280], [1500, 9000], [65_535, 65_535], [9001, 1281]] {
            std::thread::scope(|scope| {
                for (rank, mtu) in (0..).zip(mtus) {
                    let options = ConnectOptions { mtu: Some(mtu), ..rig.options("mtu", rank, 2) };
                    scope.spawn(move || {
                        let client = Client::connect(&options).unwrap();
                        let payload = usize::from(client.grant().fragment_payload);
                        let room = mtus[0].min(mtus[1]) - 28 - 48;
                        assert!(
                            payload <= room,
                            "a payload of {payload} bytes does not fit the MTUs {mtus:?}"
                        );
                        check(&client, 2.0);
                    });
                }
            });
            rig.await_peace();
        }
    });
}

#[test]
fn a_control_connection_that_babbles_harms_nobody() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let client = Client::connect(&rig.options("job", 0, 1)).unwrap();
        let json = |text: &str| {
            let len = u32::try_from(text.len()).unwrap();
            [&len.to_be_bytes()[..], text.as_bytes()].concat()
        };
        for bytes in [
            vec![0; 100],
            vec![0xff; 100],
            json("{}"),
            json("\"leave\""),
            json("{\"join\":{\"rank\":-1}}"),
            json("[[[[[["),
        ] {
            let mut impostor = Impostor::connect(&rig);
            impostor.send_bytes(&bytes);
            assert_eq!(impostor.recv_message(), None, "{bytes:?}");
            check(&client, 1.0);
        }
        // A rank that joins and then sends garbage is lost, as if it had vanished.
        let mut impostor = Impostor::connect(&rig);
        impostor.join(impostor.wish("other", 0, 1));
        impostor.send_bytes(&json("nonsense"));
        await_that("the impostor's job is gone", || rig.aggregator.jobs() == 1);
        // A rank that joins twice is lost in the same manner.
        let mut impostor = Impostor::connect(&rig);
        let wish = impostor.wish("other", 0, 1);
        impostor.join(wish.clone());
        impostor.send_message(&FromWorker::Join(wish));
        await_that("the impostor's job is gone", || rig.aggregator.jobs() == 1);
        check(&client, 1.0);
    });
}

#[test]
fn a_rank_is_told_whom_it_waits_for() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let mut impostor = Impostor::connect(&rig);
        let wish = impostor.wish("job", 1, 3);
        impostor.send_message(&FromWorker::Join(wish));
        let Some(FromAggregator::Waiting { missing, waited_ms }) = impostor.recv_message() else {
            panic!("the aggregator does not report the missing ranks")
        };
        assert_eq!(missing, [0, 2]);
        assert!(waited_ms < 1000, "{waited_ms}");
        let second = rig.options("job", 2, 3);
        let second = std::thread::spawn(move || {
            let short = Duration::from_secs(3);
            Client::connect(&ConnectOptions { join_timeout: short, ..second })
        });
        loop {
            match impostor.recv_message() {
                Some(FromAggregator::Waiting { missing, .. }) if missing == [0] => break,
                Some(FromAggregator::Waiting { missing, .. }) => assert_eq!(missing, [0, 2]),
                other => panic!("{other:?}"),
            }
        }
        impostor.send_message(&FromWorker::Leave { next_op: None });
        let error = second.join().unwrap().unwrap_err().to_string();
        assert_eq!(error, "after 3 s ranks 0, 1 had not joined");
        await_that("the job is gone", || rig.aggregator.jobs() == 0);
    });
}

#[test]
fn an_aggregator_on_all_addresses_refuses_who_calls_one_that_it_does_not_answer_from() {
    bounded(30, || {
        let rig = Rig::start(|config| {
            config.bind = Ipv4Addr::UNSPECIFIED.into();
            config.insecure = true;
        });
        let port = rig.aggregator.addr().port();
        let at = |host: &str| ConnectOptions {
            aggregators: vec![format!("{host}:{port}")],
            insecure: true,
            ..rig.options("all", 0, 1)
        };
        let why = "this aggregator serves on all addresses, and would answer calls to 127.0.0.2 \
                   from 127.0.0.1; call it at 127.0.0.1, or start it with --bind 127.0.0.2";
        assert_eq!(refusal(&at("127.0.0.2")), why);
        check(&Client::connect(&at("127.0.0.1")).unwrap(), 1.0);
    });
}

#[test]
fn an_aggregator_that_goes_while_ranks_are_missing_is_told_of_with_them() {
    bounded(120, || {
        // The aggregator reports the missing ranks twice a second, unless the machine is busy.
        let mut stays = Duration::from_millis(900);
        loop {
            let rig = Rig::start(|_| {});
            let options = ConnectOptions { join_timeout: 4 * stays, ..rig.options("job", 1, 3) };
            let client = std::thread::spawn(move || Client::connect(&options).unwrap_err());
            std::thread::sleep(stays);
            drop(rig);
            let error = client.join().unwrap().to_string();
            if error.contains("the aggregator stops; until then ranks 0, 2 had not joined") {
                break;
            }
            // The call had not arrived yet, or the missing ranks had not been reported yet. On a
            // busy machine the connection may also break before the aggregator gives a reason.
            let is_early = error.starts_with("no answer from ")
                || error.contains("lost the connection to the aggregator");
            assert!(is_early, "{error}");
            stays *= 2;
        }
    });
}
