//! A flood from forged addresses: raw sockets send with the ranks' addresses, as anyone on the same
//! network could.

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::auth::DataAuth;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::time::Span;
use racksum_worker::Client;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::inputs::floats;
use crate::rig::{Rig, in_a_process_of_its_own};

/// Number of datagrams per second.
const RATE: u64 = 50_000;
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// Length of the IPv4 and UDP headers of a datagram.
const HEADERS: usize = 28;

/// Raw sockets that send datagrams with any source port, and receive all UDP datagrams to
/// 127.0.0.1.
struct Wire {
    out: Socket,
    incoming: Socket,
}

impl Wire {
    /// Opens the sockets. This needs root.
    fn open() -> std::io::Result<Self> {
        let raw =
            |protocol: i32| Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)));
        // IPPROTO_RAW takes packets with their IP header.
        let out = raw(255)?;
        let incoming = raw(17)?;
        incoming.bind(&SockAddr::from(SocketAddrV4::new(LOOPBACK, 0)))?;
        incoming.set_read_timeout(Some(Duration::from_millis(20)))?;
        incoming.set_recv_buffer_size(8 << 20)?;
        Ok(Self { out, incoming })
    }

    /// Receives one datagram. Returns its source port and its contents if it was sent to port `to`.
    fn recv(&mut self, to: u16) -> Option<(u16, Vec<u8>)> {
        let mut packet = vec![0; 65_536];
        let len = self.incoming.read(&mut packet).ok().filter(|len| *len >= HEADERS)?;
        let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
        (port(22) == to).then(|| (port(20), packet[HEADERS..len].to_vec()))
    }

    /// Sends a datagram with the source port of another socket.
    fn send(&mut self, from: u16, to: u16, contents: &[u8]) {
        let len = |bytes: usize| u16::try_from(bytes).unwrap().to_be_bytes();
        let [total, udp] = [HEADERS, 8].map(|head| len(head + contents.len()));
        let own = LOOPBACK.octets();
        let ip = [0x45, 0, total[0], total[1], 0, 0, 0, 0, 64, 17, 0, 0];
        let ports = [from.to_be_bytes(), to.to_be_bytes(), udp, [0, 0]].concat();
        let packet = [&ip[..], &own, &own, &ports, contents].concat();
        let to = SockAddr::from(SocketAddrV4::new(LOOPBACK, to));
        // Ignore the error of a full buffer: a flood may lose some of its datagrams.
        drop(self.out.send_to(&packet, &to));
    }
}

/// Records some datagrams from ranks to a shard, then floods the shard with these and with
/// forgeries.
fn flood(mut wire: Wire, shard: u16, sent: &AtomicU64, stop: &AtomicBool) {
    let mut genuine = Vec::new();
    while genuine.len() < 200 {
        genuine.extend(wire.recv(shard).filter(|(_, datagram)| datagram.len() < 2_000));
    }
    let clock = Clock::start();
    let start = clock.now();
    while !stop.load(SeqCst) {
        let due = clock.now().since(start).0 * RATE / Span::from_secs(1).0;
        for nth in sent.load(SeqCst)..due {
            let nth = usize::try_from(nth).unwrap();
            let (from, datagram) = &genuine[nth % genuine.len()];
            let mut bytes = datagram.clone();
            match nth / genuine.len() % 5 {
                // Replayed unchanged.
                0 => {}
                // Forged: with another sequence number, a flipped bit, a missing end, or other
                // bytes.
                1 => bytes[8..12].copy_from_slice(&u32::MAX.to_be_bytes()),
                2 => bytes[nth % datagram.len()] ^= 1 << (nth % 8),
                3 => bytes.truncate(nth % datagram.len()),
                _ => bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_mul(31) ^ 0x5a),
            }
            wire.send(*from, shard, &bytes);
            sent.fetch_add(1, SeqCst);
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Returns the resident memory of this process in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// Runs ops until `enough` returns true at rank 0; returns their number and their duration.
fn ops(client: &Client, rank: u16, enough: impl Fn(Span) -> bool) -> (u64, Span) {
    let descriptor = Descriptor::sum(40_000, DType::F32);
    let input = floats((0..40_000u16).map(|i| f32::from(i % 97) * f32::from(rank + 1)));
    let expected = floats((0..40_000u16).map(|i| f32::from(i % 97) * 6.0));
    let clock = Clock::start();
    let start = clock.now();
    for op in 1.. {
        let mut tensor = input.clone();
        client.reduce(&mut tensor, descriptor).unwrap();
        assert!(tensor == expected, "rank {rank}, op {op}: wrong sum");
        // Rank 0 decides when to stop, so that all ranks end after the same op.
        let took = clock.now().since(start);
        let mut over = i32::from(rank == 0 && enough(took)).to_le_bytes();
        client.reduce(&mut over, Descriptor::sum(1, DType::I32)).unwrap();
        if over != [0; 4] {
            return (op, took);
        }
    }
    unreachable!("ops are numbered without end")
}

#[test]
fn fifty_thousand_datagrams_a_second_in_the_ranks_names_change_no_sum() {
    // Memory is measured per process, so this test must not share its process with other tests.
    let test = "flood::fifty_thousand_datagrams_a_second_in_the_ranks_names_change_no_sum";
    in_a_process_of_its_own(test, || {
        let Ok(wire) = Wire::open() else {
            racksum_test_report::skip("raw sockets need root");
            return;
        };
        let rig = Rig::start(|config| config.data_auth = Some(DataAuth::Mac));
        let shard = rig.aggregator.data_addrs()[0].port();
        let (begin, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        let sent = AtomicU64::new(0);
        let lasts = Span::from_secs(4);
        let (quiet, noisy, memory) = std::thread::scope(|scope| {
            let flooder = scope.spawn(|| {
                while !begin.load(SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                flood(wire, shard, &sent, &stop);
            });
            let options = |options: &mut racksum_worker::ConnectOptions| options.mtu = Some(1500);
            let counts = rig.ranks("flooded", 3, options, |client, rank| {
                let before = datagrams_sent(&rig);
                let quiet = ops(client, rank, |took| took > lasts);
                let (between, memory) = (datagrams_sent(&rig), resident());
                // The flooding thread first records genuine datagrams, so the flood starts a moment
                // later.
                begin.store(true, SeqCst);
                // Wait for enough of the flood, which takes longer on a busy machine.
                let flooded = |took| took > lasts && sent.load(SeqCst) > RATE;
                let noisy = ops(client, rank, flooded);
                let grown = resident().saturating_sub(memory);
                let each =
                    [(between - before) / quiet.0, (datagrams_sent(&rig) - between) / noisy.0];
                (quiet, noisy, each, grown)
            });
            stop.store(true, SeqCst);
            flooder.join().unwrap();
            let [(quiet, noisy, _, memory), ..] = counts[..] else { panic!("no rank ran") };
            // An op must cost about as many datagrams as before, because the aggregator does not
            // answer strangers.
            let [before, flooded] = counts[0].2;
            assert!(
                flooded <= before + before / 2,
                "the aggregator sent {before} datagrams an op before the flood, and {flooded} \
                 during it"
            );
            (quiet, noisy, memory)
        });
        let sent = sent.into_inner();
        let rate = |(count, took): (u64, Span)| count * Span::from_secs(1).0 / took.0;
        println!(
            "{} ops/s, and {} ops/s under a flood of {sent} datagrams; memory grew by {} KiB",
            rate(quiet),
            rate(noisy),
            memory >> 10
        );
        rig.await_stats("most of the flood is counted", |_| rig.rejects().total() > sent / 2);
        assert!(memory < 16 << 20, "memory grew by {memory} bytes");
        rig.await_peace();
    });
}

/// Returns the number of datagrams that the aggregator has sent.
fn datagrams_sent(rig: &Rig) -> u64 {
    rig.aggregator.stats().iter().map(|shard| shard.datagrams.sent).sum()
}
