use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use bytes::BytesMut;
use racksum_net::auth::{Opener, Sealer};
use racksum_net::udp::{
    self, ECT0, RECV_BATCH, RECV_CAPACITY, RecvRing, SendRing, Transmit, UdpConfig, tos_of_lane,
};
use racksum_proto::auth::{DataAuth, Key, Keys};
use racksum_proto::dtype::DType;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::{Generation, JobId, WindowId};
use racksum_proto::wire::{self, Disagreement, Header, Kind};

use super::*;
use crate::tensor::tests::shared_region_of;

/// An engine with sockets in place of its shards. The sockets send only the messages of a test.
pub(crate) struct Bench {
    pub(crate) engine: Engine,
    pub(crate) socket: Arc<UdpSocket>,
    pub(crate) shards: Vec<UdpSocket>,
}

impl Engine {
    /// Starts an op on `data`.
    pub(crate) fn start(
        &mut self,
        descriptor: Descriptor,
        data: Data,
        timeout: Span,
    ) -> Result<OpId, SubmitError> {
        let payload = self.payload(descriptor, data);
        self.submit(payload, timeout)
    }
}

impl Bench {
    pub(crate) fn new(shards: u8, lanes: u8, ip: impl Into<IpAddr>) -> Self {
        Self::with_datagrams(1408, shards, lanes, ip.into(), false)
    }

    /// Creates a bench for a job that may move.
    pub(crate) fn migration() -> Self {
        Self::with_datagrams(1408, 1, 1, Ipv4Addr::LOCALHOST.into(), true)
    }

    /// Creates a bench with fragments of up to `payload` bytes.
    fn with_datagrams(payload: usize, shards: u8, lanes: u8, ip: IpAddr, may_move: bool) -> Self {
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
            cut: Fragmentation::new(payload).unwrap(),
            in_flight: 1 << 20,
            first_op: OpId(0),
            may_move,
            acks_at_rest: false,
            child: None,
        };
        let link = |shard: &UdpSocket| Link { addr: shard.local_addr(), job: JobId(1), auth: None };
        let links = Links {
            socket: Arc::clone(&socket),
            groups: Arc::from([]),
            shards_each: 1,
            shards: sockets.iter().map(link).collect(),
        };
        let engine = Engine::new(config, 2, links, Clock::start(), &Faults::default());
        Self { engine, socket, shards: sockets }
    }

    /// Creates a bench with authenticated datagrams. Also returns the shard's sealer.
    fn sealed(payload: usize, auth: DataAuth) -> (Self, Sealer) {
        let mut bench = Self::with_datagrams(payload, 1, 1, Ipv4Addr::LOCALHOST.into(), false);
        let keys = Keys { up: Key([1; Key::LEN]), down: Key([2; Key::LEN]) };
        let opener = Opener::of_shard(auth, &keys, Generation(0), 0).unwrap();
        let sealer = Sealer::of_rank(auth, &keys, Rank(0), 0).unwrap();
        bench.engine.links.shards[0].auth = Some((sealer, opener));
        (bench, Sealer::of_shard(auth, &keys.down, 0).unwrap())
    }

    /// Starts an op of one window per shard.
    fn submit(&mut self, lane: u8, timeout: Span) -> OpId {
        let elements = 60 * 256 * self.shards.len() as u64;
        let descriptor = Descriptor { lane, ..Descriptor::sum(elements, DType::F32) };
        let tensor = 1f32.to_le_bytes().repeat(usize::try_from(elements).unwrap());
        self.engine.start(descriptor, Data::Owned(tensor), timeout).unwrap()
    }

    /// Sends a datagram from a shard's address, and steps the engine.
    pub(crate) fn send(&mut self, shard: usize, contents: &[u8]) {
        send(&self.shards[shard], self.socket.local_addr(), contents);
        self.engine.step(Readable::ALL);
    }

    fn is_empty(&self) -> bool {
        let Engine { payloads, finished, abandoned, .. } = &self.engine;
        payloads.is_empty() && finished.is_empty() && abandoned.is_empty()
    }
}

/// Sends a datagram.
pub(crate) fn send(from: &UdpSocket, to: SocketAddr, contents: &[u8]) {
    let message = Transmit::new(to, contents, contents.len());
    assert_eq!(from.send(&mut SendRing::new(), &[message]).sent, 1);
}

/// Returns the datagram with which a shard ends an op because the ranks' calls do not match.
pub(crate) fn fail(op: OpId, shard: u8) -> Vec<u8> {
    let one = Descriptor::sum(1, DType::F32);
    let other = Descriptor { tag: 1, ..one };
    let mut body = [0; Disagreement::LEN];
    Disagreement { one: (Rank(0), one), other: (Rank(1), other) }.encode(&mut body);
    let mut head = [0; Header::LEN];
    let window = WindowId::new(op, 0);
    let length = u16::try_from(body.len()).unwrap();
    let ping = Header::ping(JobId(1), Generation(0), shard);
    Header { kind: Kind::Fail, window, ack: window, length, ..ping }.encode(&mut head);
    [&head[..], &body].concat()
}

/// Returns the result of one window of an op that only shard 0 sums. Each element is `value`.
fn result(op: OpId, index: u32, mask: u64, value: f32) -> Vec<u8> {
    let body = value.to_le_bytes().repeat(256 * mask.count_ones() as usize);
    let previous = index.checked_sub(1).unwrap_or(Header::NO_PREVIOUS);
    let length = u16::try_from(body.len()).unwrap();
    let window = WindowId::new(op, index);
    let header = Header {
        kind: Kind::Result,
        window,
        ack: WindowId::new(op, 0),
        mask,
        previous,
        length,
        ..Header::ping(JobId(1), Generation(0), 0)
    };
    let mut head = [0; Header::LEN];
    header.encode(&mut head);
    [&head[..], &body].concat()
}

const LONG: Span = Span::from_secs(60);
/// The mask of all blocks of a window of f32.
const ALL: u64 = (1 << 60) - 1;
/// The number of elements in a window of f32.
const WINDOW: usize = 60 * 256;

#[test]
fn a_datagram_that_names_another_shard_than_it_comes_from_changes_nothing() {
    // wire: W-9
    let mut bench = Bench::new(2, 1, Ipv4Addr::LOCALHOST);
    let op = bench.submit(0, LONG);
    bench.send(0, &fail(op, 1));
    bench.send(1, &fail(op, 0));
    assert!(bench.engine.is_in_flight(op));
    assert_eq!(bench.engine.stats().rejects, 2);
    bench.send(1, &fail(op, 1));
    assert!(!bench.engine.is_in_flight(op), "a message from the shard itself counts");
    assert_eq!(bench.engine.stats().rejects, 2);
}

#[test]
fn an_op_ends_with_a_result_that_arrived_before_the_session_ended() {
    let ends: [fn(&mut Engine); 2] =
        [|engine| engine.end("it is over"), |engine| engine.lose(&[Rank(1)], Loss::Died)];
    for end in ends {
        let mut bench = Bench::with_datagrams(61_440, 1, 1, Ipv4Addr::LOCALHOST.into(), false);
        let [first, second] = [(); 2].map(|()| bench.submit(0, LONG));
        bench.engine.step(Readable::ALL);
        // The result is in the socket's queue when the session ends.
        send(&bench.shards[0], bench.socket.local_addr(), &result(first, 0, ALL, 2.0));
        end(&mut bench.engine);
        let [first, second] = [first, second].map(|op| bench.engine.take(op).unwrap().result);
        assert!(first.is_ok(), "{first:?}");
        assert!(matches!(second, Err(OpError::Ended { .. } | OpError::PeerLost { .. })));
    }
}

#[test]
fn a_flood_puts_no_timeout_off() {
    let mut bench = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    let op = bench.submit(0, Span::from_millis(1));
    let clock = Clock::start();
    let start = clock.now();
    while bench.engine.is_in_flight(op) {
        assert!(clock.now().since(start) < Span::from_secs(100), "the flood delays the timeout");
        bench.send(0, b"noise");
    }
    let Finished { result, .. } = bench.engine.take(op).unwrap();
    assert!(matches!(result, Err(OpError::Timeout { .. })), "{result:?}");
}

#[test]
fn a_flood_of_a_group_puts_no_timeout_off() {
    let mut bench = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    let open = || UdpSocket::open(&UdpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
    let group = open();
    let to = group.local_addr();
    bench.engine.links.groups = Arc::from([group]);
    let op = bench.submit(0, Span::from_millis(1));
    // Each datagram holds many messages, so that it takes longer to handle than to send.
    let mut head = [0; Header::LEN];
    Header::ping(JobId(9), Generation(0), 0).encode(&mut head);
    let noise = head.repeat(1000);
    let batch = [Transmit::new(to, &noise, noise.len()); 8];
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let stranger = open();
                while !over.load(Relaxed) {
                    stranger.send(&mut SendRing::new(), &batch);
                }
            });
        }
        let (clock, limit) = (Clock::start(), Span::from_secs(100));
        let start = clock.now();
        while bench.engine.is_in_flight(op) && clock.now().since(start) < limit {
            // The engine must assume that this datagram follows the group's datagrams.
            bench.send(0, b"noise");
        }
        let waited = clock.now().since(start);
        over.store(true, Relaxed);
        assert!(waited < limit, "the flood delays the timeout for {waited:?}");
    });
    let Finished { result, .. } = bench.engine.take(op).unwrap();
    assert!(matches!(result, Err(OpError::Timeout { .. })), "{result:?}");
}

#[test]
fn a_step_reads_the_readable_sockets_and_all_groups_with_the_own_one() {
    let mut bench = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    let group = UdpSocket::open(&UdpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
    let (own, to) = (bench.socket.local_addr(), group.local_addr());
    bench.engine.links.groups = Arc::from([group]);
    let mut counts = |readable| {
        send(&bench.shards[0], own, b"noise");
        send(&bench.shards[0], to, b"noise");
        bench.engine.step(readable);
        bench.engine.stats().rx_datagrams
    };
    assert_eq!(counts(Readable::NONE), 0);
    assert_eq!(counts(Readable { own: false, groups: true }), 2);
    assert_eq!(counts(Readable { own: true, groups: false }), 6);
}

#[test]
fn an_op_that_nobody_waits_for_keeps_nothing_once_it_ends() {
    let mut bench = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    let early = bench.submit(0, LONG);
    let late = bench.submit(0, LONG);
    bench.engine.abandon(early);
    assert!(bench.engine.is_in_flight(early), "an abandoned op must stay in flight");
    bench.engine.end("the test is over");
    assert!(
        bench.engine.finished.contains_key(&late) && !bench.engine.finished.contains_key(&early)
    );
    bench.engine.abandon(late);
    assert!(bench.is_empty());
    bench.engine.abandon(late);
    assert!(bench.is_empty(), "a second call changes nothing");
}

#[test]
fn what_is_sent_bears_the_mark_of_its_lane() {
    let ips: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for ip in ips.into_iter().filter(|ip| racksum_net::interface::interface_of(*ip).is_some()) {
        let mut bench = Bench::new(1, 4, ip);
        for lane in [3, 0, 2, 1] {
            bench.submit(lane, LONG);
        }
        bench.engine.step(Readable::ALL);
        bench.engine.step(Readable::ALL);
        let mut kinds = 0;
        for (header, tos) in marked(&bench.shards[0]) {
            assert_eq!(Some(tos), tos_of_lane(header.lane, 4), "{:?}", header.kind);
            assert_eq!(tos & 0b11, ECT0, "the datagram must allow congestion marks");
            kinds |= 1 << header.lane | u32::from(header.kind == Kind::Open) << 8;
        }
        assert_eq!(kinds, 0x10f, "opens and data of every lane must arrive");
    }
}

/// Returns the messages that have arrived.
pub(crate) fn arrived(socket: &UdpSocket) -> Vec<(Header, Vec<u8>)> {
    received(socket).into_iter().map(|(header, body, _)| (header, body)).collect()
}

/// Returns the header and the TOS value of each message that has arrived.
fn marked(socket: &UdpSocket) -> Vec<(Header, u8)> {
    received(socket).into_iter().map(|(header, _, tos)| (header, tos)).collect()
}

fn received(socket: &UdpSocket) -> Vec<(Header, Vec<u8>, u8)> {
    let mut ring = RecvRing::new();
    let mut buffers: Vec<_> =
        (0..RECV_BATCH).map(|_| BytesMut::with_capacity(RECV_CAPACITY)).collect();
    let mut all = Vec::new();
    while udp::wait(&[socket.as_fd()], Some(Span::ZERO)).unwrap() != 0 {
        let count = socket.recv(&mut ring, &mut buffers).unwrap();
        for (meta, buffer) in ring.received().iter().zip(&buffers[..count]) {
            let datagrams = buffer.chunks(meta.stride);
            let messages = datagrams.flat_map(wire::messages).map(|message| message.unwrap());
            all.extend(messages.map(|(header, body)| (header, body.to_vec(), meta.tos)));
        }
    }
    all
}

/// Returns a bench whose datagrams hold whole windows, and an op of eight windows. The result of
/// the first window has arrived.
fn in_large_pieces() -> (Bench, OpId) {
    in_large_pieces_of(Data::Owned)
}

/// Like [`in_large_pieces`], but the op works on the data that `data_of` makes from a tensor.
fn in_large_pieces_of(data_of: impl Fn(Vec<u8>) -> Data) -> (Bench, OpId) {
    let mut bench = Bench::with_datagrams(61_440, 1, 1, Ipv4Addr::LOCALHOST.into(), false);
    let tensor = 1f32.to_le_bytes().repeat(8 * WINDOW);
    let descriptor = Descriptor::sum(8 * WINDOW as u64, DType::F32);
    let op = bench.engine.start(descriptor, data_of(tensor), LONG).unwrap();
    while bench.engine.step(Readable::ALL).next == Next::Step {}
    bench.send(0, &result(op, 0, ALL, 0.5));
    assert!(bench.engine.in_place, "the next result may be received in place too");
    (bench, op)
}

/// Returns the value of each window in the tensor of an ended op, and checks that each window is
/// uniform.
fn sums(bench: &mut Bench, op: OpId) -> Vec<f32> {
    let Finished { result: outcome, payload, .. } =
        bench.engine.take(op).expect("the op has ended");
    assert_eq!(outcome, Ok(()));
    let tensor = payload.data.bytes(0..32 * WINDOW).to_vec();
    let element = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let window = |window: &[u8]| window.chunks(4).map(element).collect::<Vec<_>>();
    let windows: Vec<_> = tensor.chunks(4 * WINDOW).map(window).collect();
    for (i, window) in windows.iter().enumerate() {
        assert!(window.iter().all(|x| *x == window[0]), "window {i} is not uniform");
    }
    windows.iter().map(|window| window[0]).collect()
}

#[test]
fn large_results_are_received_where_they_belong() {
    for data_of in DATA {
        let (mut bench, op) = in_large_pieces_of(data_of);
        let before = bench.engine.stats().rx_bytes;
        for index in [2, 1, 4, 3, 5, 6, 7] {
            bench.send(0, &result(op, index, ALL, index as f32));
            assert!(bench.engine.in_place);
        }
        let bytes = bench.engine.stats().rx_bytes - before;
        assert_eq!(bytes, 7 * (Header::LEN + 4 * WINDOW) as u64);
        assert_eq!(sums(&mut bench, op), [0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    }
}

/// Functions that turn a tensor into data: in private memory, and in memory that other processes
/// may write.
const DATA: [fn(Vec<u8>) -> Data; 2] =
    [Data::Owned, |tensor| Data::InPlace(shared_region_of(&tensor))];

#[test]
fn what_is_not_believed_is_not_written_either() {
    let (mut bench, op) = in_large_pieces();
    let stranger = UdpSocket::open(&UdpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
    let forged = result(op, 1, ALL, 9.0);
    let message = Transmit::new(bench.socket.local_addr(), &forged, forged.len());
    assert_eq!(stranger.send(&mut SendRing::new(), &[message]).sent, 1);
    bench.engine.step(Readable::ALL);
    assert_eq!(bench.engine.stats().rejects, 1, "W-9: the stranger's datagram must be rejected");
    bench.send(0, &result(op, 0, ALL, 9.0));
    bench.send(0, &result(OpId(77), 1, ALL, 9.0));
    bench.send(0, &result(op, 8, ALL, 9.0));
    bench.send(0, &result(op, 1, 1 << 63 | ALL >> 4, 9.0));
    bench.send(0, &forged[..forged.len() - 1]);
    bench.send(0, b"noise");
    (1..8).for_each(|index| bench.send(0, &result(op, index, ALL, 1.5)));
    assert_eq!(sums(&mut bench, op), [0.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]);
}

/// Returns `contents` as one sealed datagram.
fn seal(sealer: &mut Sealer, contents: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    sealer.seal(&Transmit::new("0.0.0.0:0".parse().unwrap(), contents, contents.len()), &mut out);
    out
}

#[test]
fn of_what_comes_from_a_shards_address_only_the_authentic_is_written() {
    // wire: W-58, W-59
    for auth in [DataAuth::Mac, DataAuth::Aead] {
        let (mut bench, mut shard) = Bench::sealed(61_440, auth);
        let tensor = 1f32.to_le_bytes().repeat(8 * WINDOW);
        let descriptor = Descriptor::sum(8 * WINDOW as u64, DType::F32);
        let op = bench.engine.start(descriptor, Data::Owned(tensor), LONG).unwrap();
        while bench.engine.step(Readable::ALL).next == Next::Step {}
        for index in 0..8 {
            let genuine = seal(&mut shard, &result(op, index, ALL, index as f32));
            // The forger has the shard's address but not its key.
            let mut forged = genuine.clone();
            forged[Header::LEN] ^= 1;
            let bare = result(op, index, ALL, 9.0);
            bench.send(0, &bare);
            bench.send(0, &forged);
            bench.send(0, &genuine);
            assert!(!bench.engine.in_place, "nothing is written before it is authenticated");
            bench.send(0, &genuine);
        }
        assert_eq!(bench.engine.stats().rejects, 3 * 8, "{auth}");
        assert_eq!(sums(&mut bench, op), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    }
}

#[test]
fn what_is_sent_is_sealed_wherever_it_lies() {
    // wire: W-57
    for payload in [61_440, 1408] {
        for (auth, data_of) in [
            (DataAuth::Mac, DATA[0]),
            (DataAuth::Mac, DATA[1]),
            (DataAuth::Aead, DATA[0]),
            (DataAuth::Aead, DATA[1]),
        ] {
            let (mut bench, _) = Bench::sealed(payload, auth);
            let keys = Keys { up: Key([1; Key::LEN]), down: Key([2; Key::LEN]) };
            let life = Generation(0);
            let mut opener = Opener::of_rank(auth, &keys.up, life, Rank(0), 0).unwrap();
            let elements = 0..8 * WINDOW as u64;
            let descriptor = Descriptor::sum(elements.end, DType::F32);
            let tensor: Vec<u8> = elements.flat_map(|i| (i as f32).to_le_bytes()).collect();
            let op = bench.engine.start(descriptor, data_of(tensor.clone()), LONG).unwrap();
            let mut ring = RecvRing::new();
            let mut buffers: Vec<_> =
                (0..RECV_BATCH).map(|_| BytesMut::with_capacity(RECV_CAPACITY)).collect();
            let mut windows = 0;
            while windows < 2 {
                bench.engine.step(Readable::ALL);
                let count = bench.shards[0].recv(&mut ring, &mut buffers).unwrap();
                for (meta, buffer) in ring.received().iter().zip(&mut buffers[..count]) {
                    for datagram in buffer.chunks_mut(meta.stride) {
                        for message in wire::messages(opener.open(datagram).unwrap()) {
                            let (header, body) = message.unwrap();
                            if header.kind == Kind::Data {
                                let first = header.window.index as usize * 4 * WINDOW;
                                let start = first + usize::from(header.fragment) * payload;
                                let expected = &tensor[start..start + body.len()];
                                assert!(body == expected, "{auth}: {header:?}");
                                windows += usize::from(header.fragment == 0);
                            }
                        }
                    }
                }
            }
            // Sealing temporarily overwrites parts of the tensor with headers.
            let after = bench.engine.payloads[&op].data.bytes(0..tensor.len());
            assert!(after.to_vec() == tensor, "{auth}");
        }
    }
}

#[test]
fn large_and_small_results_and_other_messages_come_in_any_order() {
    let (mut bench, op) = in_large_pieces();
    let to = bench.socket.local_addr();
    let ping = Header::ping(JobId(1), Generation(0), 0);
    let mut credit = [0; Header::LEN];
    let ack = WindowId::new(op, 0);
    Header { kind: Kind::Credit, window: ack, ack, ..ping }.encode(&mut credit);
    // The results cover one run of blocks, two runs or one block. In blocks without a result, the
    // tensor keeps its values.
    let masks = [ALL, ALL & !(1 << 30), 1, ALL, ALL, ALL, ALL];
    let mut contents: Vec<_> = (1..).zip(masks).map(|(i, mask)| result(op, i, mask, 1.0)).collect();
    contents.insert(1, credit.to_vec());
    contents.insert(5, b"noise".to_vec());
    let messages: Vec<_> = contents.iter().map(|c| Transmit::new(to, c, c.len())).collect();
    assert_eq!(bench.shards[0].send(&mut SendRing::new(), &messages).sent, messages.len());
    while bench.engine.step(Readable::ALL).next == Next::Step {}
    assert_eq!(sums(&mut bench, op), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(bench.engine.stats().rejects, 1);
}

#[test]
fn what_is_held_back_goes_whole_behind_whatever_is_next() {
    let mut bench = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    let swap = Faults { reorder: 1.0, ..Faults::default() };
    bench.engine.faults = Some([Dice::new(swap, 0), Dice::new(Faults::default(), 1)]);
    bench.submit(0, LONG);
    let fragments = Fragmentation::new(1408).unwrap().count(WINDOW * 4);
    let mut seen = vec![0; fragments];
    // No fragment follows the last one, so it is held back until a nack is sent. The nack is
    // shorter, and must not cut the fragment to its own length.
    while seen.contains(&0) {
        bench.engine.step(Readable::ALL);
        for (header, _) in arrived(&bench.shards[0]) {
            if header.kind == Kind::Data {
                seen[usize::from(header.fragment)] += 1;
            }
        }
    }
    assert_eq!(seen, vec![1; fragments]);
    assert_eq!(bench.engine.stats().send_failures, 0);
}

#[test]
fn a_probe_counts_as_an_ask() {
    let mut bench = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    bench.submit(0, LONG);
    // No shard answers, so the rank probes.
    while bench.engine.stats().asks == 0 {
        bench.engine.step(Readable::ALL);
    }
    let Stats { asks, probes, retransmits, rejects, .. } = bench.engine.stats();
    assert_eq!([asks, probes, retransmits, rejects], [1, 1, 0, 0]);
}

#[test]
fn a_socket_that_fails_ends_every_op() {
    let mut bench = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    let op = bench.submit(0, LONG);
    bench.engine.give_in(&std::io::Error::other("the test says so"));
    let Finished { result, .. } = bench.engine.take(op).unwrap();
    assert_eq!(result, Err(OpError::Ended { why: "a data socket failed".into() }));
}
