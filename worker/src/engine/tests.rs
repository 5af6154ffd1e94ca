use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;

use racksum_net::udp::{
    self, ECT0, RECV_BATCH, RecvRing, SendRing, Transmit, UdpConfig, tos_of_lane,
};
use racksum_proto::dtype::DType;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::{Generation, JobId, WindowId};
use racksum_proto::wire::{self, Disagreement, Header, Kind};

use super::*;

/// An engine, and sockets in the place of its shards, which say only what a test says.
pub(crate) struct Bench {
    pub(crate) engine: Engine,
    pub(crate) socket: Arc<UdpSocket>,
    shards: Vec<UdpSocket>,
}

impl Bench {
    pub(crate) fn new(shards: u8, lanes: u8, ip: impl Into<IpAddr>) -> Self {
        let ip = ip.into();
        let open = || UdpSocket::open(&UdpConfig::new(SocketAddr::new(ip, 0))).unwrap();
        let socket = Arc::new(open());
        let sockets: Vec<_> = (0..shards).map(|_| open()).collect();
        let config = Config {
            job: JobId(1),
            generation: Generation(0),
            rank: Rank(0),
            lanes,
            shards,
            pool_slots: 8,
            max_ops: 8,
            cut: Fragmentation::new(1408).unwrap(),
            in_flight: 1 << 20,
        };
        let links = Links {
            socket: Arc::clone(&socket),
            groups: Arc::from([]),
            shards: sockets.iter().map(|shard| (shard.local_addr(), JobId(1))).collect(),
        };
        let engine = Engine::new(config, 2, links, Clock::start(), &Faults::default());
        Self { engine, socket, shards: sockets }
    }

    /// Starts an op of one window a shard.
    fn submit(&mut self, lane: u8, timeout: Span) -> OpId {
        let elements = 60 * 256 * self.shards.len() as u64;
        let descriptor = Descriptor { lane, ..Descriptor::sum(elements, DType::F32) };
        let tensor = 1f32.to_le_bytes().repeat(usize::try_from(elements).unwrap());
        self.engine.submit(descriptor, Data::Owned(tensor), timeout).unwrap()
    }

    /// Sends a datagram from a shard's address, and lets the engine take it.
    fn say(&mut self, shard: usize, contents: &[u8]) {
        let to = self.socket.local_addr();
        let message = Transmit::new(to, contents, contents.len());
        assert_eq!(self.shards[shard].send(&mut SendRing::new(), &[message]).sent, 1);
        self.engine.step();
    }

    fn is_empty(&self) -> bool {
        let Engine { payloads, finished, abandoned, .. } = &self.engine;
        payloads.is_empty() && finished.is_empty() && abandoned.is_empty()
    }
}

/// The datagram by which a shard ends an op that the ranks disagree on.
fn fail(op: OpId, shard: u8) -> Vec<u8> {
    let one = Descriptor::sum(1, DType::F32);
    let other = Descriptor { tag: 1, ..one };
    let mut body = [0; Disagreement::LEN];
    Disagreement { one: (Rank(0), one), other: (Rank(1), other) }.encode(&mut body);
    let mut head = [0; Header::LEN];
    let window = WindowId::new(op, 0);
    let length = u16::try_from(body.len()).unwrap();
    let probe = Header::probe(JobId(1), Generation(0), shard);
    Header { kind: Kind::Fail, window, ack: window, length, ..probe }.encode(&mut head);
    [&head[..], &body].concat()
}

const LONG: Span = Span::from_secs(60);

#[test]
fn a_datagram_that_names_another_shard_than_it_comes_from_changes_nothing() {
    // wire: W-9
    let mut bench = Bench::new(2, 1, Ipv4Addr::LOCALHOST);
    let op = bench.submit(0, LONG);
    bench.say(0, &fail(op, 1));
    bench.say(1, &fail(op, 0));
    assert!(bench.engine.is_in_flight(op));
    assert_eq!(bench.engine.stats().rejects, 2);
    bench.say(1, &fail(op, 1));
    assert!(!bench.engine.is_in_flight(op), "the shard itself is believed");
    assert_eq!(bench.engine.stats().rejects, 2);
}

#[test]
fn a_flood_puts_no_timeout_off() {
    let mut bench = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    let op = bench.submit(0, Span::from_millis(1));
    let clock = Clock::start();
    let start = clock.now();
    while bench.engine.is_in_flight(op) {
        assert!(clock.now().since(start) < Span::from_secs(5), "the flood lasts longer");
        bench.say(0, b"noise");
    }
    let (result, _) = bench.engine.take(op).unwrap();
    assert!(matches!(result, Err(OpError::Timeout { .. })), "{result:?}");
}

#[test]
fn an_op_that_nobody_waits_for_keeps_nothing_once_it_ends() {
    let mut bench = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    let early = bench.submit(0, LONG);
    let late = bench.submit(0, LONG);
    bench.engine.abandon(early);
    assert!(bench.engine.is_in_flight(early), "other ranks need it");
    bench.engine.end("the test is over");
    assert!(
        bench.engine.finished.contains_key(&late) && !bench.engine.finished.contains_key(&early)
    );
    bench.engine.abandon(late);
    assert!(bench.is_empty());
    bench.engine.abandon(late);
    assert!(bench.is_empty(), "once more is the same as once");
}

#[test]
fn what_is_sent_bears_the_mark_of_its_lane() {
    let ips: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for ip in ips.into_iter().filter(|ip| racksum_net::interface::interface_of(*ip).is_some()) {
        let mut bench = Bench::new(1, 4, ip);
        for lane in [3, 0, 2, 1] {
            bench.submit(lane, LONG);
        }
        bench.engine.step();
        bench.engine.step();
        let mut kinds = 0;
        for (header, tos) in arrived(&bench.shards[0]) {
            assert_eq!(Some(tos), tos_of_lane(header.lane, 4), "{:?}", header.kind);
            assert_eq!(tos & 0b11, ECT0, "queues may mark it");
            kinds |= 1 << header.lane | u32::from(header.kind == Kind::Open) << 8;
        }
        assert_eq!(kinds, 0x10f, "opens, and data of every lane");
    }
}

/// The messages that have arrived, and the TOS of each.
fn arrived(socket: &UdpSocket) -> Vec<(Header, u8)> {
    let mut ring = RecvRing::new();
    let mut buffers: Vec<_> =
        (0..RECV_BATCH).map(|_| BytesMut::with_capacity(RECV_CAPACITY)).collect();
    let mut all = Vec::new();
    while udp::wait(&[socket.as_fd()], Some(Span::ZERO)).unwrap() != 0 {
        let count = socket.recv(&mut ring, &mut buffers).unwrap();
        for (meta, buffer) in ring.received().iter().zip(&buffers[..count]) {
            let datagrams = buffer.chunks(meta.stride);
            let messages = datagrams.flat_map(wire::messages).map(|message| message.unwrap());
            all.extend(messages.map(|(header, _)| (header, meta.tos)));
        }
    }
    all
}
