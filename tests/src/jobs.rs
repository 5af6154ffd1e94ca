//! Jobs that run at the same time and one after another. Each job has its own sums, and returns its
//! resources.

use std::time::Duration;

use racksum_aggregator::Fanout;
use racksum_proto::auth::DataAuth;
use racksum_proto::control::{FromAggregator, FromWorker, Join};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_worker::Client;

use crate::impostor::Impostor;
use crate::inputs::floats;
use crate::rig::{Rig, bounded};
use crate::waits::timed;

/// Runs ops with inputs that differ from those of other jobs, and checks the sums.
fn work(client: &Client, job: u16, ops: u16, world: u16) {
    for op in 0..ops {
        let elements = 60 * 256 * u64::from(op % 4 + 1) + 9;
        let value = f32::from(job) * 100.0 + f32::from(op);
        let mut tensor = floats((0..elements).map(|_| value));
        client.reduce(&mut tensor, Descriptor::sum(elements, DType::F32)).unwrap();
        assert!(tensor == floats((0..elements).map(|_| value * f32::from(world))));
    }
}

#[test]
fn two_jobs_at_once_do_not_mix() {
    bounded(60, || {
        for fanout in [Fanout::Unicast, Fanout::Multicast] {
            let rig = Rig::start(|config| {
                config.shards = 2;
                config.fanout = fanout;
            });
            std::thread::scope(|scope| {
                for job in 1..=2 {
                    let rig = &rig;
                    scope.spawn(move || {
                        rig.ranks(
                            &format!("job {job}"),
                            3,
                            |_| {},
                            |client, _| {
                                work(client, job, 20, 3);
                            },
                        );
                    });
                }
            });
            rig.await_peace();
        }
    });
}

#[test]
fn a_client_that_is_closed_has_left_at_every_aggregator() {
    bounded(60, || {
        let rigs = [(); 2].map(|()| Rig::start(|_| {}));
        let mut known = 0;
        for nth in 0..20 {
            let mut options = rigs[0].options(&format!("closes {nth}"), 0, 1);
            options.aggregators =
                rigs.iter().map(|rig| rig.aggregator.addr().to_string()).collect();
            let client = Client::connect(&options).unwrap();
            let ((), ms) = timed(|| client.close());
            // The client waits a second for the answers, and on a busy machine an aggregator may
            // take longer.
            if ms < 900 {
                // Count the jobs before dropping the client, because the drop would also leave.
                let jobs = rigs.each_ref().map(|rig| rig.aggregator.jobs());
                assert_eq!(jobs, [0, 0], "job {nth}");
                known += 1;
            }
            drop(client);
        }
        assert!(known > 0, "the aggregators never answered in time");
    });
}

#[test]
fn a_job_gives_back_its_buffers() {
    bounded(30, || {
        let rig = Rig::start(|config| config.shards = 2);
        let free = |rig: &Rig| -> Vec<usize> {
            rig.aggregator.stats().iter().map(|shard| shard.buffers.free).collect()
        };
        rig.await_peace();
        let before = free(&rig);
        rig.ranks("buffers", 3, |_| {}, |client, _| work(client, 1, 5, 3));
        rig.await_peace();
        assert_eq!(free(&rig), before);
        // A job that ends in the middle of an op returns its buffers as well.
        rig.ranks(
            "broken",
            2,
            |_| {},
            |client, rank| {
                if rank == 0 {
                    let sum = Descriptor::sum(60 * 256 * 100, DType::F32);
                    drop(client.submit(vec![1u8; 60 * 256 * 400], sum).unwrap());
                }
            },
        );
        rig.await_peace();
        assert_eq!(free(&rig), before);
    });
}

#[test]
fn twenty_jobs_in_sequence_leave_nothing_behind() {
    bounded(60, || {
        let rig = Rig::start(|config| {
            config.shards = 2;
            config.max_jobs = 2;
        });
        rig.await_peace();
        let before: Vec<_> = rig.aggregator.stats().iter().map(|shard| shard.buffers).collect();
        let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mut open = 0;
        for job in 0..20 {
            // Each job is new although all have the same name.
            rig.ranks("same", 3, |_| {}, |client, _| work(client, job, 3, 3));
            if job == 0 {
                open = files();
            }
        }
        rig.await_peace();
        let after: Vec<_> = rig.aggregator.stats().iter().map(|shard| shard.buffers).collect();
        assert_eq!(after, before);
        // Other tests of this process also open files, but fewer than ten during each job.
        assert!(files() < open + 200, "{open} files were open, and now {} are", files());
    });
}

#[test]
fn two_aggregators_share_a_job() {
    bounded(30, || {
        // The two aggregators number the job differently, because the second has served another job
        // before.
        let rigs = [2, 1].map(|shards| {
            Rig::start(|config| {
                config.shards = shards;
                config.fanout = Fanout::Multicast;
            })
        });
        rigs[1].ranks("earlier", 1, |_| {}, |client, _| work(client, 1, 2, 1));
        // Connecting fails, because the aggregators have different shard counts.
        let both = |options: &mut racksum_worker::ConnectOptions| {
            options.aggregators =
                rigs.iter().map(|rig| rig.aggregator.addr().to_string()).collect();
        };
        let mut options = rigs[0].options("both", 0, 1);
        both(&mut options);
        let why = "the aggregators differ in `racksum aggregator --shards`; start them with the \
                   same value";
        assert_eq!(Client::connect(&options).unwrap_err().to_string(), why);
        drop(rigs);

        let rigs = [(); 2].map(|()| {
            Rig::start(|config| {
                config.shards = 2;
                config.fanout = Fanout::Multicast;
            })
        });
        rigs[1].ranks("earlier", 1, |_| {}, |client, _| work(client, 1, 2, 1));
        let both = |options: &mut racksum_worker::ConnectOptions| {
            options.aggregators =
                rigs.iter().map(|rig| rig.aggregator.addr().to_string()).collect();
        };
        rigs[0].ranks("both", 3, both, |client, _| {
            assert_eq!(client.grant().shards, 4);
            work(client, 7, 12, 3);
        });
        let folds = |rig: &Rig| rig.aggregator.stats().iter().all(|shard| shard.events.folds > 0);
        for rig in &rigs {
            rig.await_stats("each shard has folded", |_| folds(rig));
            rig.await_peace();
        }
    });
}

#[test]
fn two_aggregators_that_are_reached_by_different_ways_share_a_job() {
    let all = racksum_net::interface::interfaces().unwrap();
    let beyond = all.iter().filter(|interface| interface.is_usable() && !interface.is_loopback);
    let mut addrs = beyond.flat_map(|interface| &interface.addrs);
    let Some(own) = addrs.find(|addr| addr.is_ipv4()).copied() else {
        racksum_test_report::skip("this host has only loopback IPv4 addresses");
        return;
    };
    bounded(30, move || {
        // A rank must send its data to each aggregator from the address of its control connection
        // to that aggregator.
        let rigs = [std::net::Ipv4Addr::LOCALHOST.into(), own].map(|bind| {
            Rig::start(|config| {
                config.bind = bind;
                config.insecure = true;
                config.data_auth = Some(DataAuth::Mac);
            })
        });
        let both = |options: &mut racksum_worker::ConnectOptions| {
            options.insecure = true;
            options.aggregators =
                rigs.iter().map(|rig| rig.aggregator.addr().to_string()).collect();
        };
        rigs[0].ranks("both", 2, both, |client, _| work(client, 7, 12, 2));
        for rig in &rigs {
            rig.await_stats("each shard has folded", |_| {
                rig.aggregator.stats()[0].events.folds > 0
            });
            rig.await_peace();
        }
    });
}

#[test]
fn jobs_run_over_ipv6() {
    bounded(30, || {
        let rig = Rig::start(|config| {
            config.bind = std::net::Ipv6Addr::LOCALHOST.into();
            // Linux does not multicast IPv6 over loopback, so the aggregator falls back to unicast.
            config.fanout = Fanout::Auto;
            config.shards = 2;
        });
        rig.ranks(
            "six",
            3,
            |_| {},
            |client, _| {
                assert!(!client.grant().multicast);
                work(client, 6, 8, 3);
            },
        );
    });
}

#[test]
fn a_rank_that_multicast_does_not_reach_is_refused_where_it_is_demanded() {
    bounded(30, || {
        let rig = Rig::start(|config| config.fanout = Fanout::Multicast);
        let error = Client::connect(&racksum_worker::ConnectOptions {
            multicast: false,
            ..rig.options("deaf", 0, 1)
        });
        let why = "the aggregator refused: multicast does not reach rank 0 at 127.0.0.1; start the \
                   aggregator with --fanout auto or unicast";
        assert_eq!(error.unwrap_err().to_string(), why);
        rig.await_peace();
    });
}

#[test]
fn a_rank_that_hears_the_group_late_is_waited_for_only_where_multicast_is_demanded() {
    bounded(30, || {
        for (fanout, world, multicast) in [(Fanout::Multicast, 1, true), (Fanout::Auto, 3, false)] {
            let rig = Rig::start(|config| config.fanout = fanout);
            let mut ranks: Vec<_> = (0..world).map(|_| Impostor::connect(&rig)).collect();
            for (impostor, rank) in ranks.iter_mut().zip(0..) {
                let wish = impostor.wish("late", rank, world);
                impostor.send_message(&FromWorker::Join(Join { multicast: true, ..wish }));
            }
            // Answer the pings late, as if on a new link, which forwards multicast only after about
            // a second.
            std::thread::sleep(Duration::from_millis(1200));
            for impostor in &mut ranks {
                impostor.send_message(&FromWorker::PingArrived);
            }
            for impostor in &mut ranks {
                let ready = loop {
                    match impostor.recv_message() {
                        Some(FromAggregator::Ready { multicast }) => break multicast,
                        Some(FromAggregator::Refused { reason }) => panic!("{reason}"),
                        other => assert!(other.is_some()),
                    }
                };
                assert_eq!(ready, multicast, "{fanout:?}");
            }
        }
    });
}

#[test]
fn an_aggregator_that_is_ready_late_costs_no_other_its_multicast() {
    bounded(30, || {
        let late = Rig::start(|config| config.fanout = Fanout::Unicast);
        let other = Rig::start(|config| config.fanout = Fanout::Auto);
        let mut peer = Impostor::connect(&other);
        let wish = Join { multicast: true, stripe: (1, 2), ..peer.wish("job", 1, 2) };
        peer.send_message(&FromWorker::Join(wish));
        peer.send_message(&FromWorker::PingArrived);
        let mut options = late.options("job", 0, 2);
        options.aggregators.push(other.aggregator.addr().to_string());
        let client = std::thread::spawn(move || Client::connect(&options));
        // The first aggregator is ready long after the second has stopped pinging its group.
        std::thread::sleep(Duration::from_millis(1_000));
        let mut peer = Impostor::connect(&late);
        peer.join(Join { stripe: (0, 2), ..peer.wish("job", 1, 2) });
        assert!(client.join().unwrap().unwrap().grant().multicast);
    });
}

#[test]
fn ranks_that_hear_the_group_and_ranks_that_do_not_end_alike() {
    bounded(30, || {
        let rig = Rig::start(|config| config.fanout = Fanout::Auto);
        let unicast_only = |options: &mut racksum_worker::ConnectOptions| {
            options.multicast = options.rank != 1;
        };
        rig.ranks("some", 4, unicast_only, |client, rank| {
            assert_eq!(client.grant().multicast, rank != 1);
            work(client, 3, 12, 4);
        });
    });
}

#[test]
fn ranks_of_many_jobs_come_and_go_at_random() {
    bounded(60, || {
        let rig = Rig::start(|config| config.max_jobs = 8);
        std::thread::scope(|scope| {
            for job in 0..6u16 {
                let rig = &rig;
                scope.spawn(move || {
                    for life in 0..5 {
                        let world = (job + life) % 4 + 1;
                        rig.ranks(
                            &format!("job {job}"),
                            world,
                            |_| {},
                            |client, _| {
                                work(client, job, life, world);
                            },
                        );
                    }
                });
            }
        });
        rig.await_peace();
    });
}
