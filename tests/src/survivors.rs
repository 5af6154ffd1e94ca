//! Jobs that continue after they lose a rank: the sums of the other ranks, and which ranks
//! contributed to each sum.

use std::sync::Barrier;
use std::time::Duration;

use racksum_proto::control::{FromWorker, Join, OnRankLoss};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction};
use racksum_proto::ids::Rank;
use racksum_test_report::time;
use racksum_worker::{Client, ConnectOptions, Reduced};

use crate::impostor::Impostor;
use crate::inputs::floats;
use crate::rig::{Rig, bounded};
use crate::waits::timed;

const GO_ON: OnRankLoss = OnRankLoss::Continue;

fn average(client: &Client, value: f32, elements: u16) -> (Vec<u8>, Vec<Rank>) {
    let mut tensor = floats((0..elements).map(|_| value));
    let descriptor = Descriptor {
        reduction: Reduction::Avg,
        ..Descriptor::sum(u64::from(elements), DType::F32)
    };
    let Reduced { absent, .. } = client.reduce(&mut tensor, descriptor).unwrap();
    (tensor, absent)
}

#[test]
fn an_op_that_loses_a_rank_ends_with_the_average_of_the_others() {
    bounded(60, || {
        for shards in [1, 2] {
            let rig = Rig::start(|config| config.shards = shards);
            std::thread::scope(|scope| {
                for (rank, value) in [(0, 2.0), (2, 8.0)] {
                    let options =
                        ConnectOptions { on_rank_loss: GO_ON, ..rig.options("lost", rank, 3) };
                    scope.spawn(move || {
                        let client = Client::connect(&options).unwrap();
                        for elements in [1, 30_000] {
                            let (got, ms) = timed(|| average(&client, value, elements));
                            let fives = floats((0..elements).map(|_| 5.0));
                            assert!(got == (fives, vec![Rank(1)]), "{elements} elements");
                            time("an op continues without a lost rank", ms, 3_000);
                        }
                    });
                }
                let mut impostor = Impostor::connect(&rig);
                impostor.join(Join { on_rank_loss: GO_ON, ..impostor.wish("lost", 1, 3) });
                std::thread::sleep(Duration::from_millis(200));
                impostor.vanish();
            });
            rig.await_peace();
        }
    });
}

#[test]
fn a_rank_may_leave_a_job_that_goes_on() {
    bounded(60, || {
        let rig = Rig::start(|config| config.shards = 2);
        let go_on = |options: &mut ConnectOptions| options.on_rank_loss = GO_ON;
        let rounds = [(0.0 + 4.0 + 8.0) / 3.0, (0.0 + 4.0) / 2.0, 0.0];
        rig.ranks("leave", 3, go_on, |client, rank| {
            for (round, expected) in (0..3 - rank).zip(rounds) {
                let (got, absent) = average(client, 4.0 * f32::from(rank), 40_000);
                assert!(got == floats((0..40_000).map(|_| expected)), "round {round}");
                let left: Vec<_> = (3 - round..3).map(Rank).collect();
                assert_eq!(absent, left, "round {round}");
            }
        });
        rig.await_peace();
    });
}

#[test]
fn whoever_is_left_of_many_goes_on_elsewhere_and_knows_whom_it_lacks() {
    const WORLD: u16 = 40;
    const LEFT: u16 = 3;
    bounded(60, || {
        let rigs = [(); 2].map(|()| Rig::start(|_| {}));
        let options = |rank| ConnectOptions {
            standbys: vec![vec![rigs[1].aggregator.addr().to_string()]],
            on_rank_loss: GO_ON,
            ..rigs[0].options("few", rank, WORLD)
        };
        let (gone, drained) = (Barrier::new(WORLD.into()), Barrier::new(usize::from(LEFT) + 1));
        std::thread::scope(|scope| {
            for rank in 0..WORLD {
                let (options, gone, drained) = (options(rank), &gone, &drained);
                scope.spawn(move || {
                    let client = Client::connect(&options).unwrap();
                    assert_eq!(average(&client, 1.0, 1), (floats([1.0]), vec![]));
                    if rank >= LEFT {
                        drop(client);
                        gone.wait();
                        return;
                    }
                    gone.wait();
                    drained.wait();
                    let ((_, absent), ms) = timed(|| average(&client, 1.0, 1));
                    assert_eq!(absent, (LEFT..WORLD).map(Rank).collect::<Vec<_>>());
                    time("a job that has lost most of its ranks moves", ms, 5_000);
                });
            }
            drained.wait();
            rigs[0].aggregator.drain();
        });
        rigs.iter().for_each(Rig::await_peace);
    });
}

#[test]
fn ranks_that_want_different_things_of_a_loss_are_no_job() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let mut first = Impostor::connect(&rig);
        let wish = first.wish("job", 0, 2);
        first.send_message(&FromWorker::Join(wish));
        assert!(first.recv_message().is_some());
        let mut other = Impostor::connect(&rig);
        let wish = Join { on_rank_loss: GO_ON, ..other.wish("job", 1, 2) };
        let why = "job \"job\" was opened with `on_rank_loss` abort, but rank 1 has continue";
        let refused = other.refused(wish);
        assert!(refused.starts_with(why), "{refused}");
    });
}
