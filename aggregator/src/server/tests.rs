use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use racksum_net::quic::{
    self, Connection, ControlConnection, Credentials, Ended, connect, frames, server as endpoint,
};
use racksum_proto::control::{
    CONTROL_VERSION, FromAggregator, FromWorker, Join, LostRank, OnRankLoss,
};
use racksum_proto::ids::Generation;
use racksum_proto::loss::Loss;
use racksum_proto::time::Span;
use tokio::time::Instant;

use super::*;
use crate::caller_limits::UNJOINED_OF_ONE;
use crate::config::Config;
use crate::control_stream::send_message;
use crate::failure::Failure;
use crate::registry::{Registry, Seat};

/// Runs a test on one thread. The test fails if it does not end in time.
fn bounded<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        timeout(Duration::from_secs(300), test).await.expect("the test ends in time")
    })
}

/// Serves a registry without shards. Returns the server's address, the registry, and the failure
/// that stops the server.
fn serving(unjoined: usize) -> (SocketAddr, SharedRegistry, Failure) {
    serving_as(Config::default(), unjoined)
}

fn serving_as(config: Config, unjoined: usize) -> (SocketAddr, SharedRegistry, Failure) {
    let (addr, registry, failure, _) = serving_with(config, unjoined);
    (addr, registry, failure)
}

/// Like `serving_as`, and also returns the sender that signals a change of the trusted authorities.
fn serving_with(
    config: Config,
    unjoined: usize,
) -> (SocketAddr, SharedRegistry, Failure, watch::Sender<()>) {
    let (credentials, failure) = (Credentials::new(None, false).unwrap(), Failure::new());
    let served = endpoint("127.0.0.1:0".parse().unwrap(), &credentials).unwrap();
    let addr = served.local_addr().unwrap();
    let registry = Arc::new(Mutex::new(Registry::new(config, Vec::new(), false, 0)));
    let change_authorities = watch::Sender::new(());
    let (failures, authorities_changed) = (failure.subscribe(), change_authorities.subscribe());
    let drain_requested = watch::Sender::new(false);
    tokio::spawn(serve(
        served,
        Arc::clone(&registry),
        unjoined,
        failures,
        authorities_changed,
        drain_requested,
    ));
    (addr, registry, failure, change_authorities)
}

async fn call(addr: SocketAddr) -> Result<Connection, racksum_net::NetError> {
    let credentials = Credentials::new(None, false).unwrap();
    connect(addr, &credentials, Span::from_secs(100)).await
}

/// Returns the join of rank 0 of a job of two ranks.
fn wish(job: &str) -> Join {
    Join {
        version: CONTROL_VERSION,
        job: job.into(),
        generation: Generation(0),
        secret: None,
        begun_by: None,
        rank: 0,
        world: 2,
        lanes: 1,
        data_ports: vec![9],
        aggregates: false,
        receive_buffer: 1 << 20,
        max_datagram: 1472,
        multicast: false,
        data_auth: None,
        stripe: (0, 1),
        pool_slots: 0,
        wait: false,
        on_rank_loss: OnRankLoss::Abort,
        may_move: false,
        rejoin: false,
        resume: None,
    }
}

/// Joins a job. Returns the streams, and the first message after the lifeline's offer. The rank
/// keeps its seat until the streams are dropped.
async fn join_as(
    connection: &Connection,
    wish: Join,
) -> (quinn::SendStream, quinn::RecvStream, FromAggregator) {
    let (mut send, mut recv) = connection.quic().open_bi().await.unwrap();
    frames::send(&mut send, &FromWorker::Join(wish)).await.unwrap();
    let offered = frames::recv(&mut recv).await.unwrap();
    assert!(matches!(offered, Some(FromAggregator::Lifeline { .. })), "{offered:?}");
    let received = frames::recv(&mut recv).await.unwrap().unwrap();
    (send, recv, received)
}

/// Joins as rank 0 of a job of two ranks, which then waits for the other rank.
async fn join(connection: &Connection, job: &str) -> (quinn::SendStream, quinn::RecvStream) {
    let (send, recv, received) = join_as(connection, wish(job)).await;
    assert!(matches!(received, FromAggregator::Waiting { .. }), "{received:?}");
    (send, recv)
}

/// Returns the first message that is not about the queue, and the number of queue messages before
/// it.
async fn recv_after_queue(recv: &mut quinn::RecvStream) -> (FromAggregator, usize) {
    let mut queued = 0;
    loop {
        match frames::recv(recv).await.unwrap().unwrap() {
            FromAggregator::Queued { .. } => queued += 1,
            other => return (other, queued),
        }
    }
}

#[test]
fn a_rank_that_says_why_it_is_lost_is_lost_for_that() {
    bounded(async {
        let (addr, _registry, _failure) = serving(MAX_STRANGERS);
        // A rank may report its own loss, but not the loss of another rank.
        for (nth, of, expected) in [(0, 1, Loss::Died), (1, 0, Loss::Broke)] {
            let (first, second) = (call(addr).await.unwrap(), call(addr).await.unwrap());
            let job = format!("job-{nth}");
            let (_send, mut recv) = join(&first, &job).await;
            let other = Join { rank: 1, data_ports: vec![10], ..wish(&job) };
            let (mut send, _recv, _welcome) = join_as(&second, other).await;
            let gone = FromWorker::RankLost(LostRank { rank: of, why: Loss::Died });
            frames::send(&mut send, &gone).await.unwrap();
            let lost = loop {
                match frames::recv(&mut recv).await.unwrap().unwrap() {
                    FromAggregator::PeerLost { ranks, why } => break (ranks, why),
                    _ => continue,
                }
            };
            assert_eq!(lost, (vec![1], expected));
        }
    });
}

#[test]
fn a_rank_in_a_queue_is_let_go_and_may_stay_and_is_not_looked_at_more_often_for_it() {
    // wire: W-67
    bounded(async {
        let (addr, registry, _failure) =
            serving_as(Config { max_jobs: 1, ..Config::default() }, MAX_STRANGERS);
        let (holder, waits) = (call(addr).await.unwrap(), call(addr).await.unwrap());
        let held = join(&holder, "holder").await;
        let (mut send, mut recv, received) =
            join_as(&waits, Join { wait: true, ..wish("waits") }).await;
        assert!(matches!(received, FromAggregator::Queued { .. }), "{received:?}");
        // The rank sends many answers to a question that the aggregator has not asked. They must
        // not make the aggregator check the queue more often.
        for _ in 0..1_000 {
            frames::send(&mut send, &FromWorker::Stay).await.unwrap();
        }
        frames::send(&mut send, &FromWorker::Withdraw).await.unwrap();
        let (received, queued) = recv_after_queue(&mut recv).await;
        assert!(
            received == FromAggregator::MayLeave && queued < 100,
            "{received:?} after {queued}"
        );
        // A rank that has been told that it may leave takes no free room.
        drop((held, holder));
        while lock(&registry).jobs() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        frames::send(&mut send, &FromWorker::Stay).await.unwrap();
        let (received, _) = recv_after_queue(&mut recv).await;
        assert!(matches!(received, FromAggregator::Waiting { .. }), "{received:?}");
    });
}

#[test]
fn a_rank_in_a_queue_that_was_let_go_and_says_nothing_more_has_left() {
    bounded(async {
        let (addr, registry, _failure) =
            serving_as(Config { max_jobs: 1, ..Config::default() }, MAX_STRANGERS);
        let (holder, waits) = (call(addr).await.unwrap(), call(addr).await.unwrap());
        let _held = join(&holder, "holder").await;
        let (mut send, mut recv, _) = join_as(&waits, Join { wait: true, ..wish("waits") }).await;
        assert_eq!(lock(&registry).connections(), 2);
        frames::send(&mut send, &FromWorker::Withdraw).await.unwrap();
        let (received, _) = recv_after_queue(&mut recv).await;
        assert_eq!(received, FromAggregator::MayLeave);
        assert_eq!(frames::recv::<FromAggregator>(&mut recv).await.unwrap(), None);
        assert_eq!(lock(&registry).connections(), 1);
    });
}

#[test]
fn whoever_has_not_joined_shows_anew_who_it_is_once_other_authorities_are_believed() {
    bounded(async {
        let config = Config { max_jobs: 1, ..Config::default() };
        let (addr, registry, _failure, change_authorities) = serving_with(config, MAX_STRANGERS);
        let (holder, waits) = (call(addr).await.unwrap(), call(addr).await.unwrap());
        let _held = join(&holder, "holder").await;
        let (_send, _recv, received) = join_as(&waits, Join { wait: true, ..wish("waits") }).await;
        assert!(matches!(received, FromAggregator::Queued { .. }), "{received:?}");
        change_authorities.send_replace(());
        let why = waits.quic().closed().await.to_string();
        assert!(why.contains("the aggregator now trusts other authorities"), "{why}");
        // The waiting rank has left the queue, and later callers are served.
        while lock(&registry).connections() > 1 {
            tokio::task::yield_now().await;
        }
        let again = call(addr).await.unwrap();
        let (_send, _recv, received) = join_as(&again, Join { wait: true, ..wish("waits") }).await;
        assert!(matches!(received, FromAggregator::Queued { .. }), "{received:?}");
        assert_eq!((holder.quic().close_reason(), again.quic().close_reason()), (None, None));
    });
}

#[test]
fn connections_that_do_not_join_are_few_and_those_that_joined_do_not_count() {
    bounded(async {
        let (addr, registry, _failure) = serving(2);
        let silent = call(addr).await.unwrap();
        let joined = call(addr).await.unwrap();
        let _streams = join(&joined, "first").await;
        // The rank that has joined frees its place; the silent connection does not.
        let other = call(addr).await.unwrap();
        let error = call(addr).await.unwrap_err().to_string();
        assert!(error.contains("refused"), "{error}");
        let _more = join(&other, "second").await;
        assert_eq!(lock(&registry).jobs(), 2);
        // A silent connection is closed after a while, which frees its place.
        silent.quic().closed().await;
        let third = loop {
            if let Ok(third) = call(addr).await {
                break third;
            }
        };
        let _last = join(&third, "third").await;
    });
}

/// Calls from an address, and sends a first message.
async fn call_from(
    from: [u8; 4],
    to: SocketAddr,
    first: &FromWorker,
) -> Result<ControlConnection, Ended> {
    let credentials = Credentials::new(None, false).unwrap();
    let patience = Span::from_secs(100);
    let caller = quic::CallOptions { from: Some(from.into()), credentials, patience };
    let mut line = quic::call(to, &caller).await?;
    line.send(first).await?;
    Ok(line)
}

#[test]
fn callers_that_do_not_join_keep_nobody_from_joining_whatever_they_do() {
    bounded(async {
        for asked in [
            FromWorker::Prove { version: CONTROL_VERSION },
            FromWorker::AskPresent(wish("job")),
            FromWorker::AskStatus { version: CONTROL_VERSION },
            FromWorker::Join(Join { world: 0, ..wish("job") }),
        ] {
            let (addr, _registry, _failure) = serving(2);
            let mut crowd = Vec::new();
            for _ in 0..2 {
                let mut line = call_from([127, 0, 0, 9], addr, &asked).await.unwrap();
                // The server has answered the caller, which stays connected.
                line.recv().await.unwrap();
                crowd.push(line);
            }
            let joins = FromWorker::Join(wish("job"));
            let mut joins = call_from([127, 0, 0, 1], addr, &joins).await.expect("a place is free");
            while !matches!(joins.recv().await.unwrap(), FromAggregator::Waiting { .. }) {}
            if matches!(asked, FromWorker::Prove { .. }) {
                // The oldest caller has given up its place.
                let why = crowd[0].recv().await.unwrap_err().to_string();
                assert!(why.contains("too many callers have not joined yet"), "{why}");
            }
        }
    });
}

#[test]
fn a_refusal_arrives_although_the_connection_ends_with_it() {
    bounded(async {
        let (addr, registry, _failure) = serving(2);
        let connection = call(addr).await.unwrap();
        let (_send, mut recv) = join(&connection, "job").await;
        // Pretend that the job has gathered ranks for too long, which ends it.
        let late = Instant::now() + Duration::from_secs(1 << 20);
        lock(&registry).check_timeouts(&Seat::of("job", 1, 0), late);
        let received = loop {
            match frames::recv(&mut recv).await.unwrap() {
                Some(FromAggregator::Waiting { .. }) => {}
                other => break other,
            }
        };
        assert!(matches!(received, Some(FromAggregator::Refused { .. })), "{received:?}");
        assert_eq!(frames::recv::<FromAggregator>(&mut recv).await.unwrap(), None);
    });
}

#[test]
fn what_is_sent_to_an_address_that_may_be_forged_is_no_longer_than_what_came() {
    bounded(async {
        let (addr, _registry, _failure) = serving(2);
        // The socket captures the caller's first packet.
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
        assert_eq!(answers, 1, "the caller is asked to validate its address");
        assert!(answered < len, "{answered} bytes for {len}");
    });
}

/// Asks to prove a data path; returns the streams, and the answer if there is one.
async fn prove(
    connection: &Connection,
) -> (quinn::SendStream, quinn::RecvStream, Option<FromAggregator>) {
    let (mut send, mut recv) = connection.quic().open_bi().await.unwrap();
    frames::send(&mut send, &FromWorker::Prove { version: CONTROL_VERSION }).await.unwrap();
    let received = frames::recv(&mut recv).await.ok().flatten();
    (send, recv, received)
}

#[test]
fn an_address_proves_few_paths_at_a_time_each_for_a_while_and_asks_once_what_arrived() {
    bounded(async {
        let (addr, _registry, _failure) = serving(MAX_STRANGERS);
        let mut proving = Vec::new();
        for _ in 0..UNJOINED_OF_ONE {
            let connection = call(addr).await.unwrap();
            let (send, recv, received) = prove(&connection).await;
            assert!(matches!(received, Some(FromAggregator::Prove { .. })), "{received:?}");
            proving.push((connection, send, recv));
        }
        // Another caller gets no answer, and retries until a place is free.
        let more = timeout(Duration::from_secs(2), call(addr)).await;
        assert!(more.is_err(), "{more:?}");
        // A caller that joins or disconnects frees its place.
        let (joins, mut send, mut recv) = proving.pop().unwrap();
        frames::send(&mut send, &FromWorker::AskPingSizes).await.unwrap();
        let sizes = frames::recv(&mut recv).await.unwrap();
        assert_eq!(sizes, Some(FromAggregator::PingSizes { sizes: Vec::new() }));
        frames::send(&mut send, &FromWorker::Join(wish("job"))).await.unwrap();
        let offered = frames::recv(&mut recv).await.unwrap();
        assert!(matches!(offered, Some(FromAggregator::Lifeline { .. })), "{offered:?}");
        let other = call(addr).await.unwrap();
        let (mut asks, mut answers, received) = prove(&other).await;
        assert!(matches!(received, Some(FromAggregator::Prove { .. })), "{received:?}");
        let mut answers_to = [true; 2];
        for answered in &mut answers_to {
            frames::send(&mut asks, &FromWorker::AskPingSizes).await.unwrap();
            let received = frames::recv::<FromAggregator>(&mut answers).await;
            *answered = matches!(received, Ok(Some(FromAggregator::PingSizes { .. })));
        }
        assert_eq!(answers_to, [true, false]);
        // A caller that sends nothing more is disconnected after a while.
        proving[0].0.quic().closed().await;
        assert_eq!(joins.quic().close_reason(), None);
    });
}

#[test]
fn what_is_too_long_to_be_said_is_refused_in_its_place() {
    bounded(async {
        let credentials = Credentials::new(None, false).unwrap();
        let served = endpoint("127.0.0.1:0".parse().unwrap(), &credentials).unwrap();
        let addr = served.local_addr().unwrap();
        let (caller, connection) =
            tokio::join!(call(addr), async { served.accept().await.unwrap().await.unwrap() });
        let caller = caller.unwrap();
        let (mut asks, mut answers) = caller.quic().open_bi().await.unwrap();
        frames::send(&mut asks, &FromWorker::AskPresent(wish("job"))).await.unwrap();
        let (mut send, _recv) = connection.accept_bi().await.unwrap();
        let ranks = vec![10_000; frames::MAX_FRAME / 4];
        assert!(send_message(&mut send, &FromAggregator::Present { ranks }).await);
        let received = frames::recv::<FromAggregator>(&mut answers).await.unwrap();
        let Some(FromAggregator::Refused { reason }) = received else { panic!("{received:?}") };
        assert!(reason.ends_with("exceeds the limit for one message"), "{reason}");
    });
}
