use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use racksum_net::quic::{
    self, Connection, Credentials, Ended, Line, connect, frames, server as endpoint,
};
use racksum_proto::control::{
    Absent, CONTROL_VERSION, FromAggregator, FromWorker, Join, OnRankLoss,
};
use racksum_proto::ids::Generation;
use racksum_proto::loss::Loss;
use racksum_proto::time::Span;
use tokio::time::Instant;

use super::*;
use crate::config::Config;
use crate::control_stream::send_message;
use crate::door::STRANGERS_OF_ONE;
use crate::failure::Failure;
use crate::registry::{Registry, Seat};

/// Runs a test on one thread, and fails it if it hangs.
fn bounded<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(300), test).await.expect("ends in time") })
}

/// Serves a registry without shards; returns its address.
fn serving(strangers: usize) -> (SocketAddr, Shared, Failure) {
    serving_as(Config::default(), strangers)
}

fn serving_as(config: Config, strangers: usize) -> (SocketAddr, Shared, Failure) {
    let (addr, registry, failure, _) = serving_with(config, strangers);
    (addr, registry, failure)
}

/// Like `serving_as`, and also returns the sender that signals distrusted certificates.
fn serving_with(
    config: Config,
    strangers: usize,
) -> (SocketAddr, Shared, Failure, watch::Sender<()>) {
    let (credentials, failure) = (Credentials::new(None, false).unwrap(), Failure::new());
    let served = endpoint("127.0.0.1:0".parse().unwrap(), &credentials).unwrap();
    let addr = served.local_addr().unwrap();
    let registry = Arc::new(Mutex::new(Registry::new(config, Vec::new(), false, 0)));
    let disbelieve = watch::Sender::new(());
    let (told, disbelieved) = (failure.subscribe(), disbelieve.subscribe());
    tokio::spawn(serve(served, Arc::clone(&registry), strangers, told, disbelieved));
    (addr, registry, failure, disbelieve)
}

async fn call(addr: SocketAddr) -> Result<Connection, racksum_net::NetError> {
    let credentials = Credentials::new(None, false).unwrap();
    connect(addr, &credentials, Span::from_secs(100)).await
}

/// Returns the join of rank 0 of a job of two.
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
        relays: false,
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

/// Joins; returns the streams, which keep the seat, and the first message received.
async fn join_as(
    connection: &Connection,
    wish: Join,
) -> (quinn::SendStream, quinn::RecvStream, FromAggregator) {
    let (mut send, mut recv) = connection.quic().open_bi().await.unwrap();
    frames::send(&mut send, &FromWorker::Join(wish)).await.unwrap();
    let offered = frames::recv(&mut recv).await.unwrap();
    assert!(matches!(offered, Some(FromAggregator::Lifeline { .. })), "{offered:?}");
    let heard = frames::recv(&mut recv).await.unwrap().unwrap();
    (send, recv, heard)
}

/// Joins as rank 0 of a job of two, and waits for the other rank.
async fn join(connection: &Connection, job: &str) -> (quinn::SendStream, quinn::RecvStream) {
    let (send, recv, heard) = join_as(connection, wish(job)).await;
    assert!(matches!(heard, FromAggregator::Waiting { .. }), "{heard:?}");
    (send, recv)
}

/// Returns the first message that is not about the queue, and the number of queue messages before
/// it.
async fn heard_behind_the_queue(recv: &mut quinn::RecvStream) -> (FromAggregator, usize) {
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
        for (nth, of, told) in [(0, 1, Loss::Died), (1, 0, Loss::Broke)] {
            let (first, second) = (call(addr).await.unwrap(), call(addr).await.unwrap());
            let job = format!("job-{nth}");
            let (_send, mut recv) = join(&first, &job).await;
            let other = Join { rank: 1, data_ports: vec![10], ..wish(&job) };
            let (mut send, _recv, _welcome) = join_as(&second, other).await;
            let gone = FromWorker::Parted(Absent { rank: of, why: Loss::Died });
            frames::send(&mut send, &gone).await.unwrap();
            let lost = loop {
                match frames::recv(&mut recv).await.unwrap().unwrap() {
                    FromAggregator::PeerLost { ranks, why } => break (ranks, why),
                    _ => continue,
                }
            };
            assert_eq!(lost, (vec![1], told));
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
        let (mut send, mut recv, heard) =
            join_as(&waits, Join { wait: true, ..wish("waits") }).await;
        assert!(matches!(heard, FromAggregator::Queued { .. }), "{heard:?}");
        // The aggregator did not ask whether the rank stays.
        for _ in 0..1_000 {
            frames::send(&mut send, &FromWorker::Stay).await.unwrap();
        }
        frames::send(&mut send, &FromWorker::Withdraw).await.unwrap();
        let (heard, queued) = heard_behind_the_queue(&mut recv).await;
        assert!(heard == FromAggregator::Free && queued < 100, "{heard:?} after {queued}");
        // A rank that may withdraw does not use free room.
        drop((held, holder));
        while lock(&registry).jobs() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        frames::send(&mut send, &FromWorker::Stay).await.unwrap();
        let (heard, _) = heard_behind_the_queue(&mut recv).await;
        assert!(matches!(heard, FromAggregator::Waiting { .. }), "{heard:?}");
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
        let (heard, _) = heard_behind_the_queue(&mut recv).await;
        assert_eq!(heard, FromAggregator::Free);
        assert_eq!(frames::recv::<FromAggregator>(&mut recv).await.unwrap(), None);
        assert_eq!(lock(&registry).connections(), 1);
    });
}

#[test]
fn whoever_has_not_joined_shows_anew_who_it_is_once_other_authorities_are_believed() {
    bounded(async {
        let config = Config { max_jobs: 1, ..Config::default() };
        let (addr, registry, _failure, disbelieve) = serving_with(config, MAX_STRANGERS);
        let (holder, waits) = (call(addr).await.unwrap(), call(addr).await.unwrap());
        let _held = join(&holder, "holder").await;
        let (_send, _recv, heard) = join_as(&waits, Join { wait: true, ..wish("waits") }).await;
        assert!(matches!(heard, FromAggregator::Queued { .. }), "{heard:?}");
        disbelieve.send_replace(());
        let why = waits.quic().closed().await.to_string();
        assert!(why.contains("the aggregator now trusts other authorities"), "{why}");
        // The waiting rank has left the queue, and later callers are served.
        while lock(&registry).connections() > 1 {
            tokio::task::yield_now().await;
        }
        let again = call(addr).await.unwrap();
        let (_send, _recv, heard) = join_as(&again, Join { wait: true, ..wish("waits") }).await;
        assert!(matches!(heard, FromAggregator::Queued { .. }), "{heard:?}");
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
async fn call_from(from: [u8; 4], to: SocketAddr, first: &FromWorker) -> Result<Line, Ended> {
    let credentials = Credentials::new(None, false).unwrap();
    let patience = Span::from_secs(100);
    let caller = quic::Caller { from: Some(from.into()), credentials, patience };
    let mut line = quic::call(to, &caller).await?;
    line.say(first).await?;
    Ok(line)
}

#[test]
fn callers_that_do_not_join_keep_nobody_from_joining_whatever_they_do() {
    bounded(async {
        for asked in [
            FromWorker::Prove { version: CONTROL_VERSION },
            FromWorker::Look(wish("job")),
            FromWorker::AskStatus { version: CONTROL_VERSION },
            FromWorker::Join(Join { world: 0, ..wish("job") }),
        ] {
            let (addr, _registry, _failure) = serving(2);
            let mut crowd = Vec::new();
            for _ in 0..2 {
                let mut line = call_from([127, 0, 0, 9], addr, &asked).await.unwrap();
                // The server has answered the caller, which stays connected.
                line.hear().await.unwrap();
                crowd.push(line);
            }
            let joins = FromWorker::Join(wish("job"));
            let mut joins = call_from([127, 0, 0, 1], addr, &joins).await.expect("is let in");
            while !matches!(joins.hear().await.unwrap(), FromAggregator::Waiting { .. }) {}
            if matches!(asked, FromWorker::Prove { .. }) {
                // The oldest caller has given up its place.
                let why = crowd[0].hear().await.unwrap_err().to_string();
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
        // The job ends as if it had gathered ranks for too long.
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
        assert_eq!(answers, 1, "the caller is asked whether it hears");
        assert!(answered < len, "{answered} bytes for {len}");
    });
}

/// Asks to prove a data path; returns the streams, and the answer if there is one.
async fn prove(
    connection: &Connection,
) -> (quinn::SendStream, quinn::RecvStream, Option<FromAggregator>) {
    let (mut send, mut recv) = connection.quic().open_bi().await.unwrap();
    frames::send(&mut send, &FromWorker::Prove { version: CONTROL_VERSION }).await.unwrap();
    let heard = frames::recv(&mut recv).await.ok().flatten();
    (send, recv, heard)
}

#[test]
fn an_address_proves_few_paths_at_a_time_each_for_a_while_and_asks_once_what_arrived() {
    bounded(async {
        let (addr, _registry, _failure) = serving(MAX_STRANGERS);
        let mut proving = Vec::new();
        for _ in 0..STRANGERS_OF_ONE {
            let connection = call(addr).await.unwrap();
            let (send, recv, heard) = prove(&connection).await;
            assert!(matches!(heard, Some(FromAggregator::Prove { .. })), "{heard:?}");
            proving.push((connection, send, recv));
        }
        // A further caller is not answered, and retries until a place is free.
        let more = timeout(Duration::from_secs(2), call(addr)).await;
        assert!(more.is_err(), "{more:?}");
        // A caller that joins or disconnects frees its place.
        let (joins, mut send, mut recv) = proving.pop().unwrap();
        frames::send(&mut send, &FromWorker::Arrived).await.unwrap();
        let sizes = frames::recv(&mut recv).await.unwrap();
        assert_eq!(sizes, Some(FromAggregator::Arrived { sizes: Vec::new() }));
        frames::send(&mut send, &FromWorker::Join(wish("job"))).await.unwrap();
        let offered = frames::recv(&mut recv).await.unwrap();
        assert!(matches!(offered, Some(FromAggregator::Lifeline { .. })), "{offered:?}");
        let other = call(addr).await.unwrap();
        let (mut asks, mut answers, heard) = prove(&other).await;
        assert!(matches!(heard, Some(FromAggregator::Prove { .. })), "{heard:?}");
        let mut answers_to = [true; 2];
        for answered in &mut answers_to {
            frames::send(&mut asks, &FromWorker::Arrived).await.unwrap();
            let heard = frames::recv::<FromAggregator>(&mut answers).await;
            *answered = matches!(heard, Ok(Some(FromAggregator::Arrived { .. })));
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
        let (mut asks, mut hears) = caller.quic().open_bi().await.unwrap();
        frames::send(&mut asks, &FromWorker::Look(wish("job"))).await.unwrap();
        let (mut send, _recv) = connection.accept_bi().await.unwrap();
        let ranks = vec![10_000; frames::MAX_FRAME / 4];
        assert!(send_message(&mut send, &FromAggregator::Present { ranks }).await);
        let heard = frames::recv::<FromAggregator>(&mut hears).await.unwrap();
        let Some(FromAggregator::Refused { reason }) = heard else { panic!("{heard:?}") };
        assert!(reason.ends_with("more than one message may have"), "{reason}");
    });
}
