//! Datagrams that do not belong to the job: noise, and datagrams of other jobs, generations and
//! senders. They change nothing but a counter (I6, I7).

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::ids::{Generation, JobId, OpId, Rank, WindowId};
use racksum_proto::reject::Reject;
use racksum_proto::wire::{Flags, Header, Kind};
use racksum_worker::Client;

use crate::impostor::Impostor;
use crate::inputs::{Random, floats, seed};
use crate::rig::{Rig, bounded};
use crate::waits::await_that;

/// Reduces until `stop` is set, and checks each sum.
fn work(client: &Client, world: f32, done: &AtomicU32, stop: &AtomicBool) {
    let elements = 60 * 256 * 6 + 100;
    let one = || floats((0..elements).map(|i| (i % 11) as f32));
    let sum = floats((0..elements).map(|i| (i % 11) as f32 * world));
    loop {
        // The second op of each round sums the stop flags, so that all ranks stop together.
        let mut tensor = one();
        client.reduce(&mut tensor, Descriptor::sum(elements, DType::F32)).unwrap();
        assert!(tensor == sum, "a stranger changed a sum");
        let mut stops = i32::from(stop.load(Ordering::Relaxed)).to_le_bytes();
        client.reduce(&mut stops, Descriptor::sum(1, DType::I32)).unwrap();
        if stops != [0; 4] {
            return;
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs a job of three ranks, and calls `disturb` while the job reduces.
pub(crate) fn disturbed(rig: &Rig, disturb: impl FnOnce()) {
    let (done, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let job = scope.spawn(|| {
            rig.ranks("victim", 3, |_| {}, |client, _| work(client, 3.0, &done, &stop));
        });
        // A panic in `disturb` must not leave the job running forever.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            await_that("the job runs", || done.load(Ordering::Relaxed) > 0);
            disturb();
        }));
        stop.store(true, Ordering::Relaxed);
        job.join().unwrap();
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    rig.await_peace();
}

/// Returns the header of a valid acknowledgement, which the caller may change.
pub(crate) fn header(job: JobId, generation: Generation, sender: Rank) -> Header {
    let none = WindowId::new(OpId(0), 0);
    Header {
        kind: Kind::Ack,
        job,
        generation,
        sender,
        lane: 0,
        shard: 0,
        window: none,
        ack: none,
        mask: 0,
        previous: 0,
        length: 0,
        fragment: 0,
        flags: Flags::NONE,
    }
}

pub(crate) fn datagram(header: &Header, body: &[u8]) -> Vec<u8> {
    let mut bytes = [0; Header::LEN];
    let length = u16::try_from(body.len()).unwrap();
    Header { length, ..*header }.encode(&mut bytes);
    [&bytes[..], body].concat()
}

#[test]
fn noise_at_every_port_of_an_aggregator_is_counted_and_changes_nothing() {
    bounded(60, || {
        let seed = seed(51);
        let rig = Rig::start(|config| config.shards = 2);
        let ports = rig.aggregator.data_addrs();
        let control = rig.aggregator.addr();
        let count = 3000;
        disturbed(&rig, || {
            let mut random = Random::new(seed);
            let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
            for i in 0..count {
                let len = usize::try_from(random.below(1473)).unwrap();
                let mut noise: Vec<u8> = (0..len).map(|_| random.next().to_le_bytes()[0]).collect();
                if i % 3 == 0 && len > 4 {
                    // Some noise begins with our magic bytes.
                    noise[..3].copy_from_slice(b"RS\x01");
                    noise[3] %= 12;
                }
                for to in ports.iter().chain([&control]) {
                    stranger.send_to(&noise, to).unwrap();
                }
                if i % 32 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let rejects = rig.rejects();
        // Half of the noise suffices, because some datagrams of a flood are lost.
        assert!(rejects.total() > 2 * count / 2, "{rejects:?}; seed {seed}");
        for reason in [Reject::Magic, Reject::Truncated, Reject::Kind] {
            assert!(rejects.of(reason) > 0, "{reason:?}: {rejects:?}; seed {seed}");
        }
    });
}

#[test]
fn a_stranger_who_knows_the_protocol_changes_nothing() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let port = rig.aggregator.data_addrs()[0];
        // Job ids are consecutive, so the victim has the next one.
        let mut impostor = Impostor::connect(&rig);
        let JobId(last) = impostor.join(impostor.wish("last", 0, 1)).job;
        impostor.vanish();
        let victim = last.wrapping_add(1);
        disturbed(&rig, || {
            let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
            // The aggregator identifies the victim's ranks by their addresses, and the stranger has
            // another one.
            for round in 0..300u32 {
                for sender in [0, 1, 2, 3, u16::MAX] {
                    for job in [0, last, victim, victim.wrapping_add(1)] {
                        for kind in [Kind::Ack, Kind::Data, Kind::Nack, Kind::Open] {
                            let ack = WindowId::new(OpId(u32::MAX), u32::MAX);
                            let window = WindowId::new(OpId(round), 0);
                            let life = Generation(round % 2);
                            let head = header(JobId(job), life, Rank(sender));
                            let mask = u64::from(kind == Kind::Data);
                            let head = Header { kind, ack, window, mask, ..head };
                            let body = if kind == Kind::Ack { 0 } else { 1024 };
                            stranger.send_to(&datagram(&head, &vec![1; body]), port).unwrap();
                        }
                    }
                }
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let rejects = rig.rejects();
        assert!(rejects.of(Reject::Job) > 1000, "{rejects:?}");
        assert!(rejects.of(Reject::Sender) > 1000, "{rejects:?}");
    });
}

#[test]
fn a_rank_of_another_job_changes_nothing_and_each_reason_is_counted() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        // The impostor is a genuine rank of a job of its own, with the right address.
        let mut impostor = Impostor::connect(&rig);
        let welcome = impostor.join(impostor.wish("own", 0, 1));
        let (mine, theirs) = (welcome.job, JobId(welcome.job.0 + 1));
        let own = header(mine, Generation(0), Rank(0));
        let data = Header { kind: Kind::Data, mask: 1, ..own };
        let open = Header { kind: Kind::Open, ..own };
        let mut wrong_version = datagram(&own, &[]);
        wrong_version[2] = 77;
        let mut wrong_magic = datagram(&own, &[]);
        wrong_magic[0] = b'X';
        let mut wrong_kind = datagram(&own, &[]);
        wrong_kind[3] = 99;
        let mut reserved = datagram(&own, &[]);
        reserved[46] = 1;
        let datagrams = [
            (Reject::Truncated, datagram(&own, &[])[..47].to_vec()),
            (Reject::Magic, wrong_magic),
            (Reject::Version, wrong_version),
            (Reject::Kind, wrong_kind),
            (Reject::Kind, datagram(&Header { kind: Kind::Credit, ..own }, &[])),
            (Reject::Reserved, reserved),
            (Reject::Job, datagram(&Header { job: JobId(77), ..own }, &[])),
            (Reject::Generation, datagram(&Header { generation: Generation(1), ..own }, &[])),
            (Reject::Sender, datagram(&Header { sender: Rank(1), ..own }, &[])),
            (Reject::Sender, datagram(&Header { job: theirs, ..own }, &[])),
            (Reject::Sender, datagram(&Header { job: theirs, sender: Rank(2), ..own }, &[])),
            (Reject::Stream, datagram(&Header { lane: 1, ..own }, &[])),
            (Reject::Stream, datagram(&Header { shard: 1, ..own }, &[])),
            (Reject::Body, datagram(&own, &[1])),
            (Reject::Body, datagram(&open, &[1, 2, 3])),
            (Reject::Descriptor, datagram(&open, &[&[0xff; 21][..], &[0; 19]].concat())),
            (Reject::Unopened, datagram(&data, &[0; 1024])),
        ];
        disturbed(&rig, || {
            for _ in 0..10 {
                for (_, datagram) in &datagrams {
                    impostor.send(0, datagram);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            for (reason, _) in &datagrams {
                let due = 10 * datagrams.iter().filter(|(why, _)| why == reason).count() as u64;
                let what = format!("{due} datagrams are rejected for {reason:?}");
                rig.await_stats(&what, |_| rig.rejects().of(*reason) >= due);
            }
            impostor.vanish();
        });
    });
}

#[test]
fn a_rank_that_sends_nonsense_of_its_own_spoils_no_other_job() {
    bounded(60, || {
        let seed = seed(52);
        let rig = Rig::start(|config| config.shards = 2);
        let mut impostor = Impostor::connect(&rig);
        let welcome = impostor.join(impostor.wish("own", 0, 1));
        let mut random = Random::new(seed);
        disturbed(&rig, || {
            let kinds = [Kind::Open, Kind::Data, Kind::Ack, Kind::Nack];
            for i in 0..4000 {
                let [op, index, ack_op, ack_index] =
                    [4, 70, 4, 70].map(|end| u32::try_from(random.below(end)).unwrap());
                let kind = kinds[usize::try_from(random.below(4)).unwrap()];
                let own = header(welcome.job, Generation(0), Rank(0));
                let shard = usize::try_from(random.below(2)).unwrap();
                let windowed = kind == Kind::Data;
                let head = Header {
                    kind,
                    shard: u8::try_from(shard).unwrap(),
                    window: WindowId::new(OpId(op), index),
                    ack: WindowId::new(OpId(ack_op), ack_index),
                    mask: if windowed { random.next() >> random.below(64) } else { 0 },
                    fragment: u8::try_from(random.below(45)).unwrap() * u8::from(windowed),
                    ..own
                };
                let body: Vec<u8> = match kind {
                    Kind::Open => {
                        let elements = random.below(60 * 256 * 80);
                        let descriptor = Descriptor::sum(elements, DType::F32);
                        let mut body = [0; Descriptor::LEN];
                        descriptor.encode(&mut body);
                        let after = if op == 0 { u32::MAX } else { op - 1 };
                        let windows = u32::try_from(random.below(80)).unwrap();
                        let encoding = random.below(5);
                        let mut body =
                            [&body[..], &after.to_be_bytes(), &windows.to_be_bytes()].concat();
                        body.extend(encoding.to_be_bytes());
                        body.extend((0..random.below(12)).map(|_| random.next().to_le_bytes()[0]));
                        body
                    }
                    Kind::Data => {
                        let whole = usize::from(welcome.fragment_payload);
                        vec![1; [whole, 1024, 100, 0][usize::try_from(random.below(4)).unwrap()]]
                    }
                    Kind::Nack => {
                        (0..random.below(30)).map(|_| random.next().to_le_bytes()[0]).collect()
                    }
                    _ => Vec::new(),
                };
                impostor.send(shard, &datagram(&head, &body));
                if i % 16 == 0 {
                    std::thread::sleep(Duration::from_micros(500));
                }
            }
            impostor.vanish();
        });
    });
}
