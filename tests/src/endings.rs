//! The end of a job's generation while a rank lacks a result: the job waits until the rank has it.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::control::{FromAggregator, FromWorker, Join, Welcome};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::ids::{Generation, JobId, OpId, Rank, WindowId};
use racksum_proto::time::Span;
use racksum_proto::wire::{Header, Kind, NackEntries, NackEntry, OpenEncoder, Opening};

use crate::impostor::Impostor;
use crate::rig::{Rig, bounded};
use crate::strangers::{datagram, header};
use crate::waits::await_that;

/// Joins a job as both of its ranks and runs its only op, whose result neither rank acknowledges.
fn ranks(rig: &Rig) -> ([Impostor; 2], JobId) {
    let mut ranks = [Impostor::connect(rig), Impostor::connect(rig)];
    for (rank, impostor) in (0..).zip(&mut ranks) {
        let wish = impostor.wish("ends", rank, 2);
        impostor.send_message(&FromWorker::Join(wish));
    }
    let [first, second] = ranks.each_mut().map(welcomed);
    assert_eq!(first.job, second.job);
    for (rank, impostor) in (0..).zip(&ranks) {
        let of_kind = |kind| Header { kind, ..header(first.job, Generation(0), Rank(rank)) };
        let sum = Descriptor::sum(256, DType::F32);
        let mut body = [0; 100];
        let windows = std::iter::once(Opening::of(true));
        let (len, _) = OpenEncoder::new().encode(&sum, None, windows, false, &mut body);
        impostor.send(0, &datagram(&of_kind(Kind::Open), &body[..len]));
        impostor.send(0, &datagram(&Header { mask: 1, ..of_kind(Kind::Data) }, &[0; 1024]));
    }
    rig.await_stats("the op is folded", |shards| shards[0].events.folds == 1);
    (ranks, first.job)
}

/// Waits until all ranks have joined, and returns this rank's welcome.
fn welcomed(impostor: &mut Impostor) -> Welcome {
    let mut welcome = None;
    loop {
        match impostor.recv_message() {
            Some(FromAggregator::Welcome(granted)) => welcome = Some(granted),
            Some(FromAggregator::Ready { .. }) => return welcome.unwrap(),
            Some(FromAggregator::Waiting { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Ends a job with `end` while rank 1 lacks a result. Rank 1 repeats its nack, as if the result
/// were lost, and half a second after the end it acknowledges the result. Returns the last message
/// that rank 1 receives, or `None` if that message arrives before the acknowledgement. `end`
/// returns the connections that must stay open until the message has arrived.
fn last_message<T>(end: impl FnOnce(&Rig, Impostor) -> T) -> Option<FromAggregator> {
    let rig = Rig::start(|_| {});
    let ([zero, mut one], job) = ranks(&rig);
    let of_kind = |kind| Header { kind, ..header(job, Generation(0), Rank(1)) };
    let window = WindowId::new(OpId(0), 0);
    let lost = std::iter::once(NackEntry { window, fragments: 1 });
    let mut body = [0; 100];
    let len = NackEntries::encode(lost, &mut body);
    let nack = datagram(&Header { window, ..of_kind(Kind::Nack) }, &body[..len]);
    let ack = datagram(&Header { ack: WindowId::new(OpId(1), 0), ..of_kind(Kind::Ack) }, &[]);
    let [ending, acknowledged, over] = [(); 3].map(|()| AtomicBool::new(false));
    let received = || rig.aggregator.stats()[0].datagrams.received;
    let before = received();
    let socket = one.socket.try_clone().unwrap();
    let shard = rig.aggregator.data_addrs()[0];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let send = || {
                socket.send_to(&nack, shard).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            };
            while !ending.load(SeqCst) {
                send();
            }
            // A job that did not wait would end during these nacks.
            let clock = Clock::start();
            let until = clock.now() + Span::from_millis(500);
            while clock.now() < until {
                send();
            }
            acknowledged.store(true, SeqCst);
            while !over.load(SeqCst) {
                socket.send_to(&ack, shard).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        // Wait for a nack, because the job does not wait for a silent rank.
        await_that("a nack has arrived", || received() > before);
        ending.store(true, SeqCst);
        let open = end(&rig, zero);
        let message = one.recv_message().unwrap();
        let had = acknowledged.load(SeqCst);
        over.store(true, SeqCst);
        drop(open);
        had.then_some(message)
    })
}

/// Calls [`last_message`] up to five times, because on a busy machine the job may end before rank 1
/// acknowledges: the job does not wait for a rank that is silent for half a second.
fn last_message_after_result<T>(end: impl Fn(&Rig, Impostor) -> T) -> FromAggregator {
    let message = (0..5).find_map(|_| last_message(&end));
    message.expect("the job ended before rank 1 acknowledged the result, in all five attempts")
}

#[test]
fn a_new_generation_begins_once_the_ranks_of_the_old_have_the_results_that_were_sent() {
    bounded(60, || {
        let message = last_message_after_result(|rig, mut zero| {
            zero.send_message(&FromWorker::Leave { next_op: Some(OpId(1)) });
            let mut next = Impostor::connect(rig);
            let wish = next.wish("ends", 0, 2);
            next.send_message(&FromWorker::Join(Join { generation: Generation(1), ..wish }));
            [zero, next]
        });
        assert!(
            matches!(message, FromAggregator::Superseded { by: Generation(1), .. }),
            "{message:?}"
        );
    });
}

#[test]
fn a_job_that_has_lost_a_rank_ends_once_the_others_have_the_results_that_were_sent() {
    bounded(60, || {
        let message = last_message_after_result(|_, zero| zero.vanish());
        assert!(matches!(message, FromAggregator::PeerLost { .. }), "{message:?}");
    });
}
