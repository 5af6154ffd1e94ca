//! Aggregators with a parent: errors name the lost or missing ranks of every rack. The `mixture`
//! tests check the sums.

use std::sync::Barrier;
use std::time::Duration;

use racksum_aggregator::Fanout;
use racksum_proto::control::OnRankLoss;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::{Generation, Rank};
use racksum_proto::loss::Loss;
use racksum_test_report::time;
use racksum_worker::{Client, ConnectError, ConnectOptions, Error};

use crate::rig::{Rig, Shape, Tree, bounded, in_a_process_of_its_own, with_limits};
use crate::waits::{await_that, timed};

/// Returns the shape of two racks of two ranks each.
fn racks() -> Shape {
    Shape::new(&[0, 0], &[1, 2, 1, 2])
}

fn ones(client: &Client, elements: usize) -> Result<Vec<u8>, Error> {
    let mut tensor = vec![1; elements];
    client.reduce(&mut tensor, Descriptor::sum(elements as u64 / 4, DType::I32))?;
    Ok(tensor)
}

/// Runs ops until one fails; returns the error.
fn until_the_end(client: &Client) -> Error {
    loop {
        if let Err(error) = ones(client, 4 * 60 * 256 * 3) {
            return error;
        }
    }
}

fn lost(error: &Error) -> (Vec<u16>, Loss) {
    // The loss may also appear between two ops, at `submit`.
    let (Error::Op(OpError::PeerLost { ranks, why })
    | Error::Submit(SubmitError::PeerLost { ranks, why })) = error
    else {
        panic!("{error}")
    };
    (ranks.iter().map(|rank| rank.0).collect(), *why)
}

#[test]
fn a_rank_that_leaves_is_named_in_every_rack() {
    bounded(60, || {
        for shards in [1, 3] {
            let tree = Tree::start(&racks(), |config| config.shards = shards);
            let barrier = Barrier::new(3);
            tree.ranks(
                "leaves",
                |_| {},
                |client, rank| {
                    assert_eq!(ones(client, 40).unwrap(), [4; 40]);
                    if rank != 3 {
                        let error = until_the_end(client);
                        assert_eq!(lost(&error), (vec![3], Loss::Left), "rank {rank}: {error}");
                        barrier.wait();
                    }
                },
            );
            tree.await_peace();
        }
    });
}

#[test]
fn the_largest_job_is_summed_through_racks_and_names_whom_it_loses() {
    const WORLD: u16 = 256;
    const NAME: &str = "tree::the_largest_job_is_summed_through_racks_and_names_whom_it_loses";
    // The test opens thousands of files.
    in_a_process_of_its_own(NAME, || {
        // Nine racks are below the root, seven more below the first of these, and some ranks are at
        // the root itself.
        let parents = [[0; 9].as_slice(), &[1; 7]].concat();
        let racks = parents.len() + 1;
        let at: Vec<_> = (0..usize::from(WORLD)).map(|rank| rank * 7 % racks).collect();
        let tree = Tree::start(&Shape::new(&parents, &at), |_| {});
        let barrier = Barrier::new(usize::from(WORLD) - 1);
        tree.ranks(
            "largest",
            |_| {},
            |client, rank| {
                assert_eq!(ones(client, 40_000).unwrap(), [0, 1, 1, 1].repeat(10_000));
                if rank != WORLD - 1 {
                    let error = until_the_end(client);
                    assert_eq!(lost(&error), (vec![WORLD - 1], Loss::Left), "rank {rank}: {error}");
                    barrier.wait();
                }
            },
        );
        tree.await_peace();
    });
}

#[test]
fn a_rank_that_does_not_call_an_op_is_named_at_its_timeout_in_every_rack() {
    bounded(60, || {
        let tree = Tree::start(&racks(), |_| {});
        // Rank 3 is not the rank that represents its rack at the root.
        with_limits(Duration::from_secs(2), |limit| {
            let short = |options: &mut ConnectOptions| options.op_timeout = limit;
            let done = Barrier::new(4);
            let outcomes = tree.ranks("missing", short, |client, rank| {
                let begun = ones(client, 40);
                let called = (rank != 3).then(|| ones(client, 40).unwrap_err());
                done.wait();
                begun.map(|_| called)
            });
            tree.await_peace();
            for outcome in outcomes {
                let Some(error) = outcome.map_err(|error| error.to_string())? else { continue };
                let Error::Op(OpError::Timeout { missing, .. }) = &error else { panic!("{error}") };
                let ranks: Vec<_> = missing.iter().map(|(rank, _)| *rank).collect();
                if ranks.is_empty() {
                    return Err(error.to_string());
                }
                assert_eq!(ranks, [Rank(3)], "{error}");
            }
            Ok(())
        });
    });
}

#[test]
fn ranks_that_have_not_joined_are_named_wherever_they_would() {
    bounded(30, || {
        let tree = Tree::start(&racks(), |_| {});
        with_limits(Duration::from_secs(2), |join_timeout| {
            let connect = |rank| {
                let options = ConnectOptions { join_timeout, ..tree.options("absent", rank) };
                Client::connect(&options).unwrap_err()
            };
            let refusals = std::thread::scope(|scope| {
                let ranks = [0, 1, 2].map(|rank| scope.spawn(move || connect(rank)));
                ranks.map(|rank| rank.join().unwrap())
            });
            tree.await_peace();
            for error in refusals {
                let sentence = error.to_string();
                let ConnectError::Incomplete { missing, .. } = error else { return Err(sentence) };
                // Other ranks may have given up a moment earlier.
                assert!(missing.contains(&3), "{sentence}");
            }
            Ok(())
        });
        // The ranks that gave up may join again, with all others.
        let sums = tree.ranks("absent", |_| {}, |client, _| ones(client, 40).unwrap());
        assert!(sums.iter().all(|sum| *sum == [4; 40]));
        tree.await_peace();
    });
}

/// Connects ranks of a job in a tree; returns each refusal and its delay in milliseconds.
fn refusals(tree: &Tree, ranks: u16, late: impl Fn(u16) -> Duration) -> Vec<(String, u64)> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..ranks)
            .map(|rank| {
                let (options, late) = (tree.options("refused", rank), late(rank));
                scope.spawn(move || {
                    std::thread::sleep(late);
                    timed(|| Client::connect(&options).unwrap_err().to_string())
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_job_that_is_refused_above_is_refused_to_all_ranks_with_the_reason() {
    bounded(60, || {
        let at_once = |_| Duration::ZERO;
        // The root sends to multicast groups only, but racks join no group. The root detects this
        // once all ranks have joined.
        let two = Shape::new(&[0, 0], &[1, 1, 1, 2, 2, 2]);
        let tree = Tree::start(&two, |config| config.fanout = Fanout::Multicast);
        for (sentence, _) in refusals(&tree, 6, at_once) {
            assert!(
                sentence.contains("start the parent with --fanout auto or unicast"),
                "{sentence}"
            );
        }
        tree.await_peace();
        // One rack joins later than the other, and rank 4 never joins. The root has a single
        // timeout for both racks.
        let tree = Tree::start(&Shape::new(&[0, 0], &[1, 1, 2, 2, 2]), |config| {
            config.join_timeout_s = 3;
        });
        let late = |rank| if rank < 2 { Duration::ZERO } else { Duration::from_secs(2) };
        for (sentence, after) in refusals(&tree, 4, late) {
            assert!(sentence.contains("waited 3 s for rank 4;"), "{sentence}");
            time("a root reports a missing rank to its racks after 3 s", after, 5_000);
        }
        tree.await_peace();
        // The root has no room, and refuses the whole job.
        let one = Shape::new(&[0], &[1, 1, 1, 1]);
        let tree = Tree::start(&one, |config| config.max_jobs = 1);
        let other = Client::connect(&tree.rigs[0].options("other", 0, 1)).unwrap();
        for (sentence, _) in refusals(&tree, 4, at_once) {
            assert!(sentence.contains("refused: there is 1 job, and --max-jobs"), "{sentence}");
        }
        drop(other);
        tree.await_peace();
        // The middle aggregator finds nothing at the root's address.
        let mut tree = Tree::start(&Shape::new(&[0, 1], &[2, 2, 2, 2]), |_| {});
        drop(tree.rigs.remove(0));
        tree.rigs.insert(0, Rig::start(|_| {}));
        for (sentence, after) in refusals(&tree, 4, at_once) {
            assert!(sentence.contains("parent at 127.0.0.1:"), "{sentence}");
            assert!(sentence.contains("has no connection to its parent"), "{sentence}");
            time("a missing root is named", after, 9_000);
        }
        tree.await_peace();
    });
}

#[test]
fn an_aggregator_that_stops_is_lost_with_its_rack_and_the_root_with_all() {
    bounded(60, || {
        for stops in [0, 1] {
            let Tree { rigs, .. } = &mut Tree::start(&racks(), |_| {});
            let options: Vec<_> = (0..4)
                .map(|rank| rigs[1 + usize::from(rank % 2)].options("stops", rank, 4))
                .collect();
            let joined = Barrier::new(5);
            std::thread::scope(|scope| {
                let ranks: Vec<_> = options
                    .iter()
                    .map(|options| {
                        scope.spawn(|| {
                            let client = Client::connect(options).unwrap();
                            joined.wait();
                            timed(|| until_the_end(&client))
                        })
                    })
                    .collect();
                joined.wait();
                std::thread::sleep(Duration::from_millis(700));
                drop(rigs.remove(stops));
                for (rank, ended) in ranks.into_iter().enumerate() {
                    let (error, ms) = ended.join().unwrap();
                    time("a rack or root that stops after 0.7 s is noticed", ms, 3_700);
                    let sentence = error.to_string();
                    let own = if stops == 0 || rank % 2 == 0 {
                        let own = &options[rank].aggregators[0];
                        let what = match stops {
                            0 => "the aggregator lost its parent".to_owned(),
                            _ => format!("the aggregator {own} is gone"),
                        };
                        sentence.contains(&what)
                    } else {
                        false
                    };
                    let is_reported = || lost(&error) == (vec![0, 2], Loss::Aggregator);
                    assert!(own || is_reported(), "rank {rank}: {sentence}");
                    assert!(
                        sentence.matches("parent").count() <= 1,
                        "the parent is named twice: {sentence}"
                    );
                }
            });
            rigs.iter().for_each(Rig::await_peace);
        }
    });
}

#[test]
fn a_parent_that_is_not_there_is_named() {
    bounded(60, || {
        // A socket holds the parent's port, and never answers.
        let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let gone = silent.local_addr().unwrap();
        let rack = Rig::start(|config| config.parent = Some(gone.to_string()));
        let error = Client::connect(&rack.options("job", 0, 1)).unwrap_err().to_string();
        let why = format!("the aggregator has no connection to its parent at {gone}");
        assert!(error.contains(&why), "{error}");
        rack.await_peace();
    });
}

#[test]
fn a_new_generation_of_a_rack_ends_the_one_before_in_all() {
    bounded(60, || {
        let tree = Tree::start(&racks(), |_| {});
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let options = tree.options("lives", rank);
                scope.spawn(move || {
                    let client = Client::connect(&options).unwrap();
                    let error = until_the_end(&client).to_string();
                    assert!(error.contains("a greater generation of the job has begun"), "{error}");
                });
            }
            await_that("the first generation runs", || {
                tree.rigs[0].aggregator.stats()[0].events.folds > 5
            });
            let next = |options: &mut ConnectOptions| options.generation = Generation(1);
            tree.ranks("lives", next, |client, _| assert_eq!(ones(client, 40).unwrap(), [4; 40]));
        });
        tree.await_peace();
    });
}

#[test]
fn what_a_tree_does_not_have_is_refused_with_what_to_do() {
    let tree = Tree::start(&racks(), |_| {});
    let refused = |change: &dyn Fn(&mut ConnectOptions)| {
        let mut options = tree.options("job", 0);
        change(&mut options);
        Client::connect(&options).unwrap_err().to_string()
    };
    let addr = tree.rigs[2].aggregator.addr().to_string();
    let error = refused(&|options| options.standbys = vec![vec![addr.clone()]]);
    assert!(error.contains("cannot move to a standby; set one aggregator"), "{error}");
    let error = refused(&|options| options.on_rank_loss = OnRankLoss::Continue);
    assert!(error.contains("set `on_rank_loss` to `abort`"), "{error}");
    let error = refused(&|options| options.rejoin = true);
    assert!(error.contains("cannot let a rank rejoin"), "{error}");
    tree.await_peace();
}

#[test]
fn a_rack_of_many_ranks_and_few_slots_sums_large_tensors() {
    bounded(60, || {
        let root = Rig::start(|_| {});
        let rack = |slots| {
            let parent = Some(root.aggregator.addr().to_string());
            Rig::start(|config| (config.parent, config.pool_slots) = (parent, slots))
        };
        for slots in [256, 4, 2] {
            let racks = [rack(slots), rack(256)];
            std::thread::scope(|scope| {
                for rank in 0..9 {
                    let mut options = racks[usize::from(rank == 8)].options("large", rank, 9);
                    options.op_timeout = Duration::from_secs(60);
                    scope.spawn(move || {
                        let client = Client::connect(&options).unwrap();
                        assert!(ones(&client, 4 << 20).unwrap() == vec![9; 4 << 20]);
                    });
                }
            });
            racks.iter().for_each(Rig::await_peace);
        }
        root.await_peace();
    });
}

#[test]
fn a_rank_that_is_started_twice_in_two_racks_costs_the_job_nothing() {
    bounded(60, || {
        let tree = Tree::start(&Shape::new(&[0, 0], &[1, 2]), |_| {});
        for nth in 0..10 {
            let job = format!("twice-{nth}");
            let (first, mut again) = (tree.options(&job, 0), tree.options(&job, 1));
            (again.rank, again.join_timeout) = (0, Duration::from_secs(3));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(ones(&Client::connect(&first).unwrap(), 40).unwrap(), [2; 40]);
                });
                await_that("rank 0 has joined", || tree.rigs[0].aggregator.jobs() == 1);
                std::thread::sleep(Duration::from_millis(nth));
                scope.spawn(|| {
                    let error = Client::connect(&again).unwrap_err().to_string();
                    // If the job is over already, this rank begins another job, which no other rank
                    // joins.
                    let why =
                        ["already joined", "is running", "is already running", "had not joined"];
                    assert!(why.iter().any(|why| error.contains(why)), "{error}");
                });
                let other = tree.options(&job, 1);
                scope.spawn(move || {
                    assert_eq!(ones(&Client::connect(&other).unwrap(), 40).unwrap(), [2; 40]);
                });
            });
            tree.await_peace();
        }
    });
}

#[test]
fn ops_in_fixed32_that_differ_between_racks_are_named_as_they_were_called() {
    bounded(30, || {
        let tree = Tree::start(&Shape::new(&[0, 0], &[1, 2]), |_| {});
        let of = |elements| Descriptor {
            wire: racksum_proto::dtype::WireType::Fixed32,
            ..Descriptor::sum(elements, DType::F32)
        };
        let ops = [of(100_000), of(200_000)];
        tree.ranks(
            "differ",
            |_| {},
            |client, rank| {
                let mine = ops[usize::from(rank)];
                let mut tensor = vec![1; usize::try_from(mine.elements).unwrap() * 4];
                let error = client.reduce(&mut tensor, mine).unwrap_err();
                let Error::Op(OpError::Mismatch { one, other, .. }) = error else {
                    panic!("{error}")
                };
                let mut named = [one, other];
                named.sort_by_key(|(rank, _)| *rank);
                assert_eq!(named, [(Rank(0), ops[0]), (Rank(1), ops[1])]);
                assert_eq!(ones(client, 40).unwrap(), [2; 40]);
            },
        );
        tree.await_peace();
    });
}
