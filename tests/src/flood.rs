//! Floods from addresses that are forged: raw sockets send in the name of the ranks, as anyone in
//! the same network could.

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

/// Datagrams a second.
const RATE: u64 = 50_000;
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// What IPv4 and UDP put before a datagram.
const HEADERS: usize = 28;

/// Sends datagrams with any source, and hears all that come to this host.
struct Wire {
    out: Socket,
    heard: Socket,
}

impl Wire {
    /// Takes root.
    fn open() -> std::io::Result<Self> {
        let raw =
            |protocol: i32| Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)));
        // IPPROTO_RAW: with headers of one's own.
        let out = raw(255)?;
        let heard = raw(17)?;
        heard.bind(&SockAddr::from(SocketAddrV4::new(LOOPBACK, 0)))?;
        heard.set_read_timeout(Some(Duration::from_millis(20)))?;
        heard.set_recv_buffer_size(8 << 20)?;
        Ok(Self { out, heard })
    }

    /// A datagram to a port, as it came: the port it came from, and its contents.
    fn hear(&mut self, to: u16) -> Option<(u16, Vec<u8>)> {
        let mut packet = vec![0; 65_536];
        let len = self.heard.read(&mut packet).ok().filter(|len| *len >= HEADERS)?;
        let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
        (port(22) == to).then(|| (port(20), packet[HEADERS..len].to_vec()))
    }

    /// Sends a datagram in the name of another.
    fn send(&mut self, from: u16, to: u16, contents: &[u8]) {
        let len = |bytes: usize| u16::try_from(bytes).unwrap().to_be_bytes();
        let [total, udp] = [HEADERS, 8].map(|head| len(head + contents.len()));
        let own = LOOPBACK.octets();
        let ip = [0x45, 0, total[0], total[1], 0, 0, 0, 0, 64, 17, 0, 0];
        let ports = [from.to_be_bytes(), to.to_be_bytes(), udp, [0, 0]].concat();
        let packet = [&ip[..], &own, &own, &ports, contents].concat();
        let to = SockAddr::from(SocketAddrV4::new(LOOPBACK, to));
        // A buffer that is full is a flood as well.
        drop(self.out.send_to(&packet, &to));
    }
}

/// Records some of what ranks send to a shard, and then floods it with that, and worse.
fn flood(mut wire: Wire, shard: u16, sent: &AtomicU64, stop: &AtomicBool) {
    let mut genuine = Vec::new();
    while genuine.len() < 200 {
        genuine.extend(wire.hear(shard).filter(|(_, datagram)| datagram.len() < 2_000));
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
                // Replayed.
                0 => {}
                // Forged: another number, and another byte.
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

/// Bytes that this process has in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// Runs ops until it is enough for rank 0; returns how many, and how long they took.
fn ops(client: &Client, rank: u16, enough: impl Fn(Span) -> bool) -> (u64, Span) {
    let descriptor = Descriptor::sum(40_000, DType::F32);
    let input = floats((0..40_000u16).map(|i| f32::from(i % 97) * f32::from(rank + 1)));
    let expected = floats((0..40_000u16).map(|i| f32::from(i % 97) * 6.0));
    let clock = Clock::start();
    let start = clock.now();
    for op in 1.. {
        let mut tensor = input.clone();
        client.allreduce(&mut tensor, descriptor).unwrap();
        assert!(tensor == expected, "rank {rank}, op {op}");
        // All end after the same op: rank 0 says when.
        let took = clock.now().since(start);
        let mut over = i32::from(rank == 0 && enough(took)).to_le_bytes();
        client.allreduce(&mut over, Descriptor::sum(1, DType::I32)).unwrap();
        if over != [0; 4] {
            return (op, took);
        }
    }
    unreachable!("ops are numbered without end")
}

#[test]
fn fifty_thousand_datagrams_a_second_in_the_ranks_names_change_no_sum() {
    // The memory of a process is what all of its tests have.
    let test = "flood::fifty_thousand_datagrams_a_second_in_the_ranks_names_change_no_sum";
    in_a_process_of_its_own(test, || {
        let Ok(wire) = Wire::open() else {
            racksum_test_report::skip("raw sockets take root");
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
                let before = told(&rig);
                let quiet = ops(client, rank, |took| took > lasts);
                let (between, memory) = (told(&rig), resident());
                // A moment's datagrams are recorded before they are sent again.
                begin.store(true, SeqCst);
                // On a busy machine the flood takes its time.
                let flooded = |took| took > lasts && sent.load(SeqCst) > RATE;
                let noisy = ops(client, rank, flooded);
                let grown = resident().saturating_sub(memory);
                let each = [(between - before) / quiet.0, (told(&rig) - between) / noisy.0];
                (quiet, noisy, each, grown)
            });
            stop.store(true, SeqCst);
            flooder.join().unwrap();
            let [(quiet, noisy, _, memory), ..] = counts[..] else { panic!("nobody ran") };
            // What goes out is what ops take: nothing is said to a stranger.
            let [before, flooded] = counts[0].2;
            assert!(flooded <= before + before / 2, "{before} datagrams an op, then {flooded}");
            (quiet, noisy, memory)
        });
        let sent = sent.into_inner();
        let rate = |(count, took): (u64, Span)| count * Span::from_secs(1).0 / took.0;
        println!(
            "{} ops/s, and {} ops/s with {sent} datagrams of others; memory grew by {} KiB",
            rate(quiet),
            rate(noisy),
            memory >> 10
        );
        rig.await_stats("most of the flood is counted", |_| rig.rejects().total() > sent / 2);
        assert!(memory < 16 << 20, "{memory} bytes");
        rig.await_peace();
    });
}

/// Datagrams that the aggregator has sent.
fn told(rig: &Rig) -> u64 {
    rig.aggregator.stats().iter().map(|shard| shard.datagrams[1]).sum()
}
