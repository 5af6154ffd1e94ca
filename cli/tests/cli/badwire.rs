//! A network link that loses, duplicates, delays, reorders and corrupts packets must not change any
//! sum.
//!
//! The hosts are network namespaces, each with a TUN device as its network card. The kernel passes
//! the packets to this process, which applies the faults and writes them to the destination's
//! device.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::time::{Span, Time};
use racksum_test_report::skip;
use safetensors::tensor::Dtype;
use serde_json::Value;

use crate::files::{Folder, Tensor};
use crate::namespaces::ip;
use crate::process::{Process, RACKSUM, Serving, run};
use crate::tun;

/// Fault rates of the wire, in packets per million.
const LOST: u64 = 50_000;
const DOUBLED: u64 = 10_000;
const CORRUPTED: u64 = 5_000;
/// Largest delay of a packet.
const JITTER: Span = Span::from_millis(20);
/// Layout of an IPv4 header without options: its length, and the offsets of the protocol and of the
/// last byte of the destination.
const IPV4: usize = 20;
const PROTOCOL: usize = 9;
const DESTINATION: usize = 19;
/// Protocol number of UDP, and the offset of its checksum in a packet.
const UDP: u8 = 17;
const CHECKSUM: usize = IPV4 + 6;

/// Numbers of packets that the wire forwarded, lost, doubled, corrupted or reordered.
#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    lost: AtomicU64,
    doubled: AtomicU64,
    corrupted: AtomicU64,
    overtaken: AtomicU64,
}

/// Hosts and the wire between them. Dropping this value removes them.
struct Hosts {
    name: String,
    count: u8,
    counts: Arc<Counts>,
}

/// A packet in flight: its arrival time, number, destination host and bytes.
type Late = Reverse<(Time, u64, u8, Vec<u8>)>;

impl Hosts {
    /// Creates hosts; host `i` has the address 10.79.0.`i + 1`. The error says why they cannot be
    /// created.
    fn make(name: &str, count: u8, seed: u64) -> Result<Self, String> {
        let name = format!("rb{}{name}", std::process::id());
        let hosts = Self { name, count, counts: Arc::default() };
        let (send, arrive) = channel();
        let mut devices = Vec::new();
        for host in 0..count {
            let (space, device) = (hosts.space(host), format!("{}-{host}", hosts.name));
            ip(&["netns", "add", &space])?;
            let tun = tun::make(&device)
                .map_err(|error| format!("cannot create a TUN device: {error}"))?;
            // This process keeps the device open after the interface has moved to the namespace.
            ip(&["link", "set", &device, "netns", &space])?;
            ip(&["-n", &space, "link", "set", "lo", "up"])?;
            ip(&["-n", &space, "link", "set", &device, "mtu", "1500", "up"])?;
            let addr = format!("10.79.0.{}/24", host + 1);
            ip(&["-n", &space, "addr", "add", &addr, "dev", &device])?;
            devices.push(Arc::new(tun));
        }
        for (i, device) in (0u64..).zip(&devices) {
            let (device, send, counts) = (Arc::clone(device), send.clone(), hosts.counts.clone());
            std::thread::spawn(move || leave(&device, &send, &counts, seed * 100 + i));
        }
        let counts = hosts.counts.clone();
        std::thread::spawn(move || deliver(&devices, &arrive, &counts));
        Ok(hosts)
    }

    fn space(&self, host: u8) -> String {
        format!("{}{host}", self.name)
    }

    fn start(&self, host: u8, args: &[&str]) -> Process {
        let space = self.space(host);
        Process::spawn(Command::new("ip").args(["netns", "exec", &space, RACKSUM]).args(args))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // The kernel removes the devices with their namespaces, so the threads end.
        for host in 0..self.count {
            ip(&["netns", "del", &self.space(host)]).unwrap_or(());
        }
    }
}

/// Returns a pseudo-random number below `limit` and advances the state (xorshift64*, Vigna 2016).
fn draw(state: &mut u64, limit: u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % limit
}

/// Reads a host's packets and applies the wire's faults, until the host's device is removed.
fn leave(mut device: &File, send: &Sender<Late>, counts: &Counts, seed: u64) {
    let (clock, mut dice) = (Clock::start(), seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut buffer = vec![0; 1 << 16];
    while let Ok(len) = device.read(&mut buffer) {
        let packet = &buffer[..len];
        if len <= CHECKSUM + 1 || packet[0] != 0x45 {
            continue;
        }
        if draw(&mut dice, 1_000_000) < LOST {
            counts.lost.fetch_add(1, Relaxed);
            continue;
        }
        let twice = draw(&mut dice, 1_000_000) < DOUBLED;
        counts.doubled.fetch_add(u64::from(twice), Relaxed);
        for _ in 0..1 + u8::from(twice) {
            let mut packet = packet.to_vec();
            if draw(&mut dice, 1_000_000) < CORRUPTED {
                counts.corrupted.fetch_add(1, Relaxed);
                corrupt(&mut packet, &mut dice);
            }
            let due = clock.now() + Span(draw(&mut dice, JITTER.0));
            let number = counts.sent.fetch_add(1, Relaxed);
            if send.send(Reverse((due, number, packet[DESTINATION], packet))).is_err() {
                return;
            }
        }
    }
}

/// Flips a random bit after the IP header. Also clears the UDP checksum, because the kernel would
/// otherwise drop the datagram.
fn corrupt(packet: &mut [u8], dice: &mut u64) {
    let bits = 8 * (packet.len() - IPV4) as u64;
    let bit = usize::try_from(draw(dice, bits)).unwrap();
    packet[IPV4 + bit / 8] ^= 1 << (bit % 8);
    if packet[PROTOCOL] == UDP {
        packet[CHECKSUM..CHECKSUM + 2].fill(0);
    }
}

/// Delivers packets to their hosts, each at its arrival time.
fn deliver(devices: &[Arc<File>], arrive: &Receiver<Late>, counts: &Counts) {
    let clock = Clock::start();
    let mut late: BinaryHeap<Late> = BinaryHeap::new();
    let mut newest = 0;
    loop {
        let due = late.peek().map_or(Time::NEVER, |Reverse((due, ..))| *due);
        let wait = Duration::from_nanos(due.since(clock.now()).0).min(Duration::from_secs(1));
        match arrive.recv_timeout(wait) {
            Ok(packet) => late.push(packet),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = clock.now();
        while let Some(Reverse((due, ..))) = late.peek()
            && *due <= now
            && let Some(Reverse((_, number, host, packet))) = late.pop()
        {
            counts.overtaken.fetch_add(u64::from(number < newest), Relaxed);
            newest = newest.max(number);
            if let Some(mut device) =
                devices.get(usize::from(host).wrapping_sub(1)).map(|device| &**device)
            {
                // Ignore errors: the packet is lost if its host has been removed or has no room.
                device.write_all(&packet).unwrap_or(());
            }
        }
    }
}

#[test]
fn two_hundred_ops_over_a_wire_that_does_its_worst_have_the_same_bits() {
    const WORLD: u8 = 3;
    let folder = Folder::new("badwire");
    let seed = u64::from(std::process::id());
    let hosts = match Hosts::make("w", 1 + WORLD, seed) {
        Ok(hosts) => hosts,
        Err(why) => return skip(&format!("this test needs root, iproute2 and TUN: {why}")),
    };
    let tensors = |rank: u8| -> Vec<(String, Tensor)> {
        let one = |op: usize| {
            let dtype = [Dtype::F32, Dtype::I32, Dtype::BF16, Dtype::F32][op % 4];
            let elements = [40_000, 9_000, 30_000, 7][op % 4];
            let value = |i: usize| match i / 512 % 5 {
                0 => 0.0,
                _ => ((i * 31 + op * 7 + usize::from(rank) * 13) % 2003) as f64 / 8.0 - 100.0,
            };
            let values: Vec<f64> = (0..elements).map(value).collect();
            (format!("op{op:03}"), Tensor::of(dtype, &[elements], &values))
        };
        (0..200).map(one).collect()
    };
    let files: Vec<String> = (0..WORLD)
        .map(|rank| {
            let all = tensors(rank);
            let all: Vec<_> = all.iter().map(|(name, it)| (name.as_str(), it.clone())).collect();
            folder.write(&format!("in{rank}"), &all)
        })
        .collect();
    let undisturbed = folder.path("undisturbed");
    let inputs: Vec<_> = files.iter().map(String::as_str).collect();
    run(&[&["reduce"], &inputs[..], &["--out", &undisturbed]].concat()).ok();

    let path = |name: &str| folder.path(name);
    run(&["identity", "init", "--out", &path("authority.pem")]).ok();
    for (name, role) in [("agg", "aggregator"), ("node", "worker")] {
        let out = path(&format!("{name}.pem"));
        let issue = ["identity", "issue", name, "--role", role, "--out", &out];
        run(&[&issue[..], &["--authority", &path("authority.pem")]].concat()).ok();
    }
    let (agg, node, status) = (path("agg.pem"), path("node.pem"), path("status.sock"));
    let args = ["aggregator", "--port", "0", "--pool-mib", "64", "--bind", "10.79.0.1"];
    let more = ["--identity", &agg, "--status-socket", &status, "--fanout", "unicast"];
    let serving = Serving::of(hosts.start(0, &[&args[..], &more].concat()));
    let ranks: Vec<_> = (0..WORLD)
        .map(|rank| {
            let (number, world) = (rank.to_string(), WORLD.to_string());
            let out = path(&format!("out{rank}"));
            let args = ["reduce", &files[usize::from(rank)], "--aggregator", &serving.addr];
            let who = [
                "--rank",
                &number,
                "--world",
                &world,
                "--identity",
                &node,
                "--out",
                &out,
                "--timeout",
                "20",
            ];
            hosts.start(1 + rank, &[&args[..], &who].concat())
        })
        .collect();
    let ends: Vec<_> = ranks.into_iter().map(|rank| rank.end(240)).collect();
    assert!(ends.iter().all(|end| end.code == Some(0)), "seed {seed}: {ends:?}");
    let expected = std::fs::read(&undisturbed).unwrap();
    for rank in 0..WORLD {
        let sums = std::fs::read(path(&format!("out{rank}"))).unwrap();
        assert!(
            sums == expected,
            "the result of rank {rank} differs from the result without faults"
        );
    }
    let answer: Value =
        serde_json::from_str(&run(&["status", &status, "--format", "json"]).ok().out).unwrap();
    println!("seed {seed}: {:?}, rejected {}", hosts.counts, answer["shards"][0]["rejects"]);
    assert!(answer["shards"][0]["rejects"]["forged"].as_u64() > Some(20), "{answer}");
    let Counts { lost, doubled, corrupted, overtaken, .. } = &*hosts.counts;
    for (what, count) in [("lost", lost), ("doubled", doubled), ("corrupted", corrupted)] {
        assert!(count.load(Relaxed) > 20, "{what}: {count:?}");
    }
    assert!(overtaken.load(Relaxed) > 1000, "{overtaken:?}");
}
