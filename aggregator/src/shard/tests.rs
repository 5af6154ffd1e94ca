use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use racksum_net::udp::{Received, UdpConfig};
use racksum_proto::error::Reject;

use super::*;

/// A shard whose thread is the test.
fn shard() -> (Shard, Sender<Command>) {
    let socket = UdpSocket::open(&UdpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
    let (commands, inbox) = channel();
    let shard = Shard {
        socket: Arc::new(socket),
        clock: Clock::start(),
        inbox,
        waker: Waker::new().unwrap(),
        gather: Gather::new(0, LONGEST_PAUSE),
        jobs: BTreeMap::new(),
        risen: BTreeMap::new(),
        siblings: Siblings::default(),
        arena: Arena::new(2 * RECV_BATCH),
        incoming: Vec::with_capacity(RECV_BATCH),
        recv: RecvRing::new(),
        out: Outbox::new(),
        stats: ShardStats::default(),
        shared: Arc::default(),
        published: Time(0),
        failure: Failure::new(),
        unserved: false,
    };
    (shard, commands)
}

#[test]
fn more_datagrams_in_one_receive_than_a_window_has_are_all_taken() {
    let (mut shard, _commands) = shard();
    for count in [1, udp::MAX_SEGMENTS, udp::MAX_SEGMENTS + 1, 100, 1000] {
        let ack = Header::probe(JobId(7), racksum_proto::ids::Generation(0), 0);
        let mut header = [0; Header::LEN];
        ack.encode(&mut header);
        let mut joined = shard.arena.take().unwrap();
        joined.extend_from_slice(&header.repeat(count));
        let from = "127.0.0.1:9".parse().unwrap();
        let meta = Received { from, len: joined.len(), stride: Header::LEN, ce: false, tos: 0 };
        shard.incoming = vec![joined];
        let before = shard.stats.rejects.of(Reject::Job);
        shard.take_datagrams(Time(0), 0, &meta);
        assert_eq!(shard.stats.rejects.of(Reject::Job) - before, count as u64);
        let joined = shard.incoming.remove(0);
        shard.arena.give(joined);
    }
}

#[test]
fn a_shard_that_is_never_idle_shows_its_counters_all_the_same() {
    let (mut shard, commands) = shard();
    let stranger = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(b"noise", shard.socket.local_addr()).unwrap();
    // Counters are shown ten times a second.
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(shard.turn(), Some(1));
    assert_eq!(shard.shared.lock().unwrap().datagrams[0], 1);
    commands.send(Command::Stop).unwrap();
    assert_eq!(shard.turn(), None);
}
