use std::time::Duration;

use racksum_proto::aggregator::{Aggregation, Config};
use racksum_proto::geometry::{Fragmentation, WINDOW_BYTES};
use racksum_proto::ids::{Generation, JobId, OpId, Rank, WindowId};
use racksum_proto::observer::EventCounts;
use racksum_proto::time::Time;
use racksum_proto::wire::{Flags, Kind, messages};

use super::*;
use crate::destinations::Destinations;
use crate::slots::Slots;

/// Returns a job of one rank. Slot `i` holds a result of `lens[i]` bytes.
fn job(rank: SocketAddr, lens: &[usize]) -> ShardJob {
    let config = Config {
        job: JobId(1),
        generation: Generation(0),
        world: 1,
        lanes: 1,
        shard: 0,
        shards: 1,
        pool_slots: 8,
        max_ops: 8,
        cut: Fragmentation::new(1408).unwrap(),
        results_in_flight: 1 << 20,
        moved_at: None,
        weight: None,
        has_parent: false,
    };
    let mut slots = Slots::new(&config);
    for (slot, len) in (0..).zip(lens) {
        slots.put_result(slot, *len, config.cut);
    }
    let machine = Aggregation::new(config, Time(0));
    ShardJob {
        machine,
        slots,
        destinations: Destinations {
            ranks: vec![rank],
            unicast: vec![rank],
            ..Destinations::default()
        },
        parent: None,
        most_debt: 0,
        sending: false,
        fences: 0,
        moved: Time(0),
        events: EventCounts::default(),
        openers: Vec::new(),
    }
}

/// Returns the result of window `index`, which lies in the slot with the same number.
fn result(index: u32, len: usize, job: &ShardJob) -> ResultFragments {
    let window = WindowId::new(OpId(0), index);
    let header = Header {
        kind: Kind::Result,
        job: JobId(1),
        generation: Generation(0),
        sender: Rank::AGGREGATOR,
        lane: 0,
        shard: 0,
        window,
        ack: window,
        mask: 1,
        previous: index.checked_sub(1).unwrap_or(Header::NO_PREVIOUS),
        length: 0,
        fragment: 0,
        flags: Flags::NONE,
    };
    let cut = job.machine.config().cut;
    ResultFragments { lane: 0, slot: index, len, cut, fragments: cut.all(len), header }
}

#[test]
fn a_large_result_does_not_overtake_small_ones_that_share_a_datagram() {
    let rank = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    rank.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    let config = udp::UdpConfig::new("127.0.0.1:0".parse().unwrap());
    let socket = UdpSocket::open(&config).unwrap();
    let lens = [300, 300, WINDOW_BYTES, 300, 5000, 300];
    let mut job = job(rank.local_addr().unwrap(), &lens);
    let mut out = Outbox::new();
    for (index, len) in (0..).zip(lens) {
        let result = result(index, len, &job);
        out.send_result(&socket, &mut job, To::Ranks(Recipient::All), &result);
    }
    out.send_joined(&socket, &mut job);
    let due: usize = lens.iter().map(|len| job.machine.config().cut.count(*len)).sum();
    let mut order = Vec::new();
    let mut datagram = [0; 2048];
    while order.len() < due {
        let len = rank.recv(&mut datagram).unwrap();
        for message in messages(&datagram[..len]) {
            let (header, _) = message.unwrap();
            order.push((header.window.index, header.fragment));
        }
    }
    assert!(order.is_sorted(), "{order:?}");
    assert_eq!(order.iter().filter(|(window, _)| *window == 1).count(), 1, "{order:?}");
}
