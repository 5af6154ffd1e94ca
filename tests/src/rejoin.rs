//! Ranks that leave a job between two ops and rejoin it.

use std::net::UdpSocket;
use std::sync::Barrier;
use std::time::Duration;

use racksum_aggregator::Fanout;
use racksum_proto::auth::DataAuth;
use racksum_proto::control::OnRankLoss;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::ids::OpId;
use racksum_worker::{Client, ConnectOptions};

use crate::rig::{Rig, bounded};

const WORLD: u16 = 3;

fn sum(client: &Client, elements: u64) {
    let mut tensor = 1i32.to_le_bytes().repeat(usize::try_from(elements).unwrap());
    client.reduce(&mut tensor, Descriptor::sum(elements, DType::I32)).unwrap();
    assert!(tensor.chunks(4).all(|sum| *sum == i32::from(WORLD).to_le_bytes()));
}

#[test]
fn ranks_leave_between_ops_and_come_back_as_often_as_they_like() {
    bounded(60, || {
        // Cases: without authentication, with authentication and a multicast group, and with a
        // standby.
        for (auth, fanout, moves) in [
            (DataAuth::None, Fanout::Unicast, false),
            (DataAuth::Mac, Fanout::Auto, false),
            (DataAuth::Mac, Fanout::Unicast, true),
        ] {
            let rig = |shards| {
                Rig::start(|config| {
                    config.shards = shards;
                    config.data_auth = Some(auth);
                    config.fanout = fanout;
                })
            };
            let rigs = [rig(2), rig(2)];
            let between = Barrier::new(WORLD.into());
            std::thread::scope(|scope| {
                for rank in 0..WORLD {
                    let options = ConnectOptions {
                        aggregators: rigs
                            .each_ref()
                            .map(|it| it.aggregator.addr().to_string())
                            .into(),
                        standbys: if moves { vec![vec!["127.0.0.1:9".into()]] } else { vec![] },
                        ..rigs[0].options("rejoin", rank, WORLD)
                    };
                    let between = &between;
                    scope.spawn(move || {
                        let mut client = Client::connect(&options).unwrap();
                        for life in 0..5u32 {
                            sum(&client, 1);
                            sum(&client, 200_000);
                            between.wait();
                            // In each life, rank 2 leaves together with rank 0 or rank 1, in turn.
                            // In the last life, ranks 0 and 1 leave.
                            if [life % 2, 2 - life / 4].contains(&u32::from(rank)) {
                                drop(client);
                                let options = ConnectOptions { rejoin: true, ..options.clone() };
                                client = Client::connect(&options).unwrap();
                                assert_eq!(client.grant().first_op, OpId(2 * (life + 1)));
                            }
                            between.wait();
                        }
                    });
                }
            });
            rigs.iter().for_each(Rig::await_peace);
        }
    });
}

#[test]
fn one_that_fails_to_come_back_may_try_again() {
    bounded(60, || {
        let rigs = [(); 2].map(|()| Rig::start(|_| {}));
        let both: Vec<_> = rigs.iter().map(|rig| rig.aggregator.addr().to_string()).collect();
        let options = |rank| ConnectOptions {
            aggregators: both.clone(),
            ..rigs[0].options("again", rank, 2)
        };
        let other = std::thread::scope(|scope| {
            let other = scope.spawn(|| Client::connect(&options(0)).unwrap());
            drop(Client::connect(&options(1)).unwrap());
            other.join().unwrap()
        });
        let back = ConnectOptions { rejoin: true, ..options(1) };
        let wrong = ConnectOptions { data_auth: Some(DataAuth::Aead), ..back.clone() };
        assert!(Client::connect(&wrong).is_err());
        let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let gone = ConnectOptions {
            aggregators: vec![both[0].clone(), nobody.to_string()],
            join_timeout: Duration::from_secs(2),
            ..back.clone()
        };
        assert!(Client::connect(&gone).is_err());
        std::thread::scope(|scope| {
            let client = scope.spawn(|| Client::connect(&back).unwrap());
            let client = client.join().unwrap();
            let one = |client: &Client| {
                let mut tensor = 1i32.to_le_bytes().to_vec();
                client.reduce(&mut tensor, Descriptor::sum(1, DType::I32)).unwrap();
                assert_eq!(tensor, 2i32.to_le_bytes());
            };
            scope.spawn(move || one(&client));
            one(&other);
        });
    });
}

#[test]
fn who_cannot_come_back_is_told_why() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let options = |rank| rig.options("job", rank, 2);
        let back = |rank| ConnectOptions { rejoin: true, ..options(rank) };
        let refused = |options: &ConnectOptions| Client::connect(options).unwrap_err().to_string();
        assert!(refused(&back(0)).contains("job \"job\" is not running here"));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| Client::connect(&options(1)).unwrap());
            let client = Client::connect(&options(0)).unwrap();
            let mut other = other.join().unwrap();
            assert!(refused(&back(1)).contains("rank 1 has not left job \"job\""));
            drop(other);
            assert!(refused(&options(1)).contains("rank 1 has left job \"job\"; a rank that left"));
            let world = ConnectOptions { world: 3, ..back(1) };
            assert!(refused(&world).contains("was opened with world 2, but rank 1 has 3"));
            let small = ConnectOptions { mtu: Some(1280), ..back(1) };
            assert!(refused(&small).contains("give the rank its former MTU"));
            let goes_on = ConnectOptions { on_rank_loss: OnRankLoss::Continue, ..back(1) };
            assert!(refused(&goes_on).contains("its `on_rank_loss` is continue"));
            other = Client::connect(&back(1)).unwrap();
            // This rank leaves in the middle of an op.
            let started = other.submit(vec![0u8; 4], Descriptor::sum(1, DType::I32)).unwrap();
            drop((started, other));
            assert!(refused(&back(1)).contains("during an op"));
            drop(client);
        });
        rig.await_peace();
    });
}
