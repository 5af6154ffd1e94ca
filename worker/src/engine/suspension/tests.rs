use racksum_net::clock::Clock;
use racksum_net::udp::{SendRing, Transmit};
use racksum_proto::arith::encode_block;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, WireType};
use racksum_proto::error::OpError;
use racksum_proto::ids::{Generation, JobId};
use racksum_proto::time::Span;
use racksum_proto::wire::{Header, Kind};

use super::super::tests::{Bench, arrived, send};
use super::*;
use crate::driver::Driver;
use crate::engine::Readable;
use crate::payload::Data;

/// Returns a message about op 0, which has one window. According to the message, all ranks have
/// acknowledged the results of the ops before `low`.
fn message(kind: Kind, low: OpId, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).unwrap();
    let header = Header {
        kind,
        window: WindowId::new(OpId(0), 0),
        ack: WindowId::new(low, 0),
        mask: u64::from(kind == Kind::Result),
        previous: if kind == Kind::Result { Header::NO_PREVIOUS } else { 0 },
        length,
        ..Header::ping(JobId(1), Generation(0), 0)
    };
    let mut head = [0; Header::LEN];
    header.encode(&mut head);
    [&head[..], body].concat()
}

#[test]
fn between_two_aggregators_nobody_waits_for_datagrams() {
    let mut bench = Bench::migration();
    bench.engine.leave("it is about to stop".into());
    // A late datagram that stays unread would repeatedly wake a thread that waits for datagrams.
    bench.send(0, &message(Kind::Credit, OpId(0), &[]));
    assert_eq!(bench.engine.step(Readable::ALL).next, Next::Sleep(None));
}

#[test]
fn what_the_old_sockets_counted_stays() {
    let mut bench = Bench::migration();
    // An IPv4 socket cannot send to an IPv6 address.
    let unsendable = Transmit::new("[::1]:9".parse().unwrap(), b"bad", 3);
    bench.socket.send_patiently(&mut SendRing::new(), &[unsendable], 2);
    assert_eq!(bench.engine.stats().send_failures, 1);
    bench.engine.leave("it is about to stop".into());
    let (config, links) = (*bench.engine.machine.config(), Bench::migration().engine.links);
    assert!(bench.engine.resume(config, links));
    assert_eq!(bench.engine.stats().send_failures, 1);
}

#[test]
fn the_background_thread_rests_as_soon_as_no_rank_lacks_a_sum() {
    let mut bench = Bench::migration();
    let descriptor = Descriptor::sum(256, DType::F32);
    let timeout = Span::from_secs(60);
    let op = bench.engine.start(descriptor, Data::Owned(vec![1; 1024]), timeout).unwrap();
    bench.engine.step(Readable::ALL);
    bench.send(0, &message(Kind::Result, OpId(0), &[2; 1024]));
    assert_eq!(bench.engine.take(op).unwrap().result, Ok(()));
    let Bench { engine, socket, shards } = bench;
    let driver = Driver::new(engine).unwrap();
    let clock = Clock::start();
    let comes = |is: &dyn Fn() -> bool| {
        let began = clock.now();
        loop {
            let late = clock.now().since(began) > Span::from_secs(200);
            if is() || late {
                return !late;
            }
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| driver.drive_in_background());
        let drives = comes(&|| driver.lock().driving);
        // Once the rank has acknowledged the result, it has nothing left to do but probe.
        let probes = |(header, _): &(Header, _)| header.kind == Kind::Nack;
        let asks = comes(&|| arrived(&shards[0]).iter().any(probes));
        // This message ends no op, but tells the rank that all others have its sums.
        send(&shards[0], socket.local_addr(), &message(Kind::Credit, OpId(1), &[]));
        let rests = comes(&|| !driver.lock().driving);
        driver.lock().closed = true;
        driver.work.notify_all();
        driver.waker.wake();
        assert_eq!([drives, asks, rests], [true; 3]);
    });
}

#[test]
fn the_sum_of_an_op_is_kept_until_all_have_it_also_where_it_overflowed() {
    for value in [1.0, f32::INFINITY] {
        let mut bench = Bench::migration();
        let wire = WireType::Fixed32;
        let descriptor = Descriptor { wire, ..Descriptor::sum(256, DType::F32) };
        let tensor = value.to_le_bytes().repeat(256);
        let mut sum = vec![0; wire.block_len(256)];
        encode_block(DType::F32, wire, 2, &tensor, &mut sum).unwrap();
        let timeout = Span::from_secs(60);
        let op = bench.engine.start(descriptor, Data::Owned(tensor), timeout).unwrap();
        bench.engine.step(Readable::ALL);
        bench.send(0, &message(Kind::Result, OpId(0), &sum));
        let result = bench.engine.take(op).unwrap().result;
        let overflowed = matches!(result, Err(OpError::Overflow { .. }));
        assert_eq!((overflowed, result.is_ok()), (value.is_infinite(), value.is_finite()));
        // Another rank may lack the sum, so the engine still has work although no caller waits.
        assert!(!bench.engine.is_idle());
        assert_eq!(bench.engine.kept.keys().collect::<Vec<_>>(), [&op]);
        bench.send(0, &message(Kind::Credit, OpId(1), &[]));
        let Stats { rx_datagrams, rejects, .. } = bench.engine.stats();
        assert_eq!((rx_datagrams, rejects), (2, 0));
        assert!(bench.engine.is_idle());
        assert!(bench.engine.kept.is_empty());
    }
}
