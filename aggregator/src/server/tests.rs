use racksum_net::quic::{Connection, Credentials, connect, server as endpoint};
use racksum_proto::control::{CONTROL_VERSION, OnRankLoss};
use racksum_proto::ids::Generation;
use racksum_proto::time::Span;

use super::*;
use crate::config::Config;
use crate::failure::Failure;

/// Runs a test on one thread, with time for everything but hanging.
fn bounded<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(20), test).await.expect("ends in time") })
}

/// A served registry without shards; returns where it is called.
fn serving(strangers: usize) -> (std::net::SocketAddr, Shared, Failure) {
    let (credentials, failure) = (Credentials::new(None, false).unwrap(), Failure::new());
    let served = endpoint("127.0.0.1:0".parse().unwrap(), &credentials).unwrap();
    let addr = served.local_addr().unwrap();
    let registry = Arc::new(Mutex::new(Registry::new(Config::default(), Vec::new(), false, 0)));
    tokio::spawn(serve(served, Arc::clone(&registry), strangers, failure.subscribe()));
    (addr, registry, failure)
}

async fn call(addr: std::net::SocketAddr) -> Result<Connection, racksum_net::NetError> {
    let credentials = Credentials::new(None, false).unwrap();
    connect(addr, &credentials, Span::from_secs(5)).await
}

/// Joins as rank 0 of a job of two; returns the streams, which keep the seat.
async fn join(connection: &Connection, job: &str) -> (quinn::SendStream, quinn::RecvStream) {
    let (mut send, mut recv) = connection.quic().open_bi().await.unwrap();
    let join = Join {
        version: CONTROL_VERSION,
        job: job.to_owned(),
        generation: Generation(0),
        rank: 0,
        world: 2,
        lanes: 1,
        data_ports: vec![9],
        relays: false,
        receive_buffer: 1 << 20,
        max_datagram: 1472,
        multicast: false,
        stripe: (0, 1),
        pool_slots: 0,
        wait: false,
        on_rank_loss: OnRankLoss::Abort,
        may_move: false,
        rejoin: false,
        resume: None,
    };
    frames::send(&mut send, &FromWorker::Join(join)).await.unwrap();
    let offered = frames::recv(&mut recv).await.unwrap();
    assert!(matches!(offered, Some(FromAggregator::Lifeline { .. })), "{offered:?}");
    let heard = frames::recv(&mut recv).await.unwrap();
    assert!(matches!(heard, Some(FromAggregator::Waiting { .. })), "{heard:?}");
    (send, recv)
}

#[test]
fn connections_that_do_not_join_are_few_and_those_that_joined_do_not_count() {
    bounded(async {
        let (addr, registry, _failure) = serving(2);
        let silent = call(addr).await.unwrap();
        let joined = call(addr).await.unwrap();
        let _streams = join(&joined, "first").await;
        // The place of the one that has joined is free again, that of the silent one is not.
        let other = call(addr).await.unwrap();
        let error = call(addr).await.unwrap_err().to_string();
        assert!(error.contains("refused"), "{error}");
        let _more = join(&other, "second").await;
        assert_eq!(lock(&registry).jobs(), 2);
        // A silent connection is given up, and then there is room again.
        silent.quic().closed().await;
        let third = loop {
            if let Ok(third) = call(addr).await {
                break third;
            }
        };
        let _last = join(&third, "third").await;
    });
}

#[test]
fn a_refusal_arrives_although_the_connection_ends_with_it() {
    bounded(async {
        let (addr, registry, _failure) = serving(2);
        let connection = call(addr).await.unwrap();
        let (_send, mut recv) = join(&connection, "job").await;
        // Ends the job as its gathering for too long does.
        let late = Instant::now() + Duration::from_secs(1 << 20);
        lock(&registry).look_after(&Seat::of("job", 1, 0), late);
        let heard = loop {
            match frames::recv(&mut recv).await.unwrap() {
                Some(FromAggregator::Waiting { .. }) => {}
                other => break other,
            }
        };
        assert!(matches!(heard, Some(FromAggregator::Refused { .. })), "{heard:?}");
        assert_eq!(frames::recv::<FromAggregator>(&mut recv).await.unwrap(), None);
    });
}

#[test]
fn what_is_sent_to_an_address_that_may_be_forged_is_no_longer_than_what_came() {
    bounded(async {
        let (addr, _registry, _failure) = serving(2);
        // The caller's first packet, caught on its way.
        let caught = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let to = caught.local_addr().unwrap();
        let caller = tokio::spawn(async move { call(to).await });
        let mut first = [0; 2048];
        let len = caught.recv(&mut first).await.unwrap();
        caller.abort();
        let victim = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        victim.send_to(&first[..len], addr).await.unwrap();
        let (mut answers, mut answered) = (0, 0);
        let mut answer = [0; 2048];
        while let Ok(len) = timeout(Duration::from_millis(500), victim.recv(&mut answer)).await {
            answers += 1;
            answered += len.unwrap();
        }
        assert_eq!(answers, 1, "the caller is asked whether it hears");
        assert!(answered < len, "{answered} bytes for {len}");
    });
}
