//! Congestion marks, their reports to the sender, and the independence of two lanes.

use racksum_proto::aggregator::{self, Aggregation, Recipient};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::ids::{Rank, WindowId};
use racksum_proto::time::Time;
use racksum_proto::wire::{Flags, Header, Kind, OpenEncoder, Opening};

use crate::rank::{Machine, Sent, nack, result};
use crate::shard::{Shard, ack, block, entries, sum};
use crate::support::{self, TIMEOUT, datagram, header, window};

#[test]
fn a_rank_is_told_once_that_its_datagrams_met_a_queue() {
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 3]);
    for index in 0..2 {
        let block = block(1, window(0, index));
        shard.machine.handle_datagram(shard.now, &block, true, &mut ());
    }
    let (to, header, body) = shard.sent_one();
    assert_eq!((to, header.kind), (Recipient::Rank(Rank(1)), Kind::Nack));
    assert!(header.flags.has(Flags::CONGESTED));
    assert_eq!(entries(&body), []);
    shard.store(&block(1, window(0, 2)));
    assert_eq!(shard.sent(), []);
}

#[test]
fn a_rank_says_in_its_next_datagram_alone_that_results_met_a_queue() {
    let mut rank = Machine::new();
    rank.start(&[true; 9]);
    rank.sent();
    rank.machine.handle_datagram(rank.now, &result(window(0, 0), None), true, &mut ());
    let next = |rank: &mut Machine| {
        rank.expire();
        let sent = rank.sent();
        let [Sent::Datagram(header, _)] = &sent[..] else { panic!("{sent:?}") };
        header.flags.has(Flags::CONGESTED)
    };
    assert!(next(&mut rank));
    assert!(!next(&mut rank));
}

#[test]
fn a_rank_that_is_told_of_a_queue_sends_less() {
    let sent_after = |flags| {
        let mut rank = Machine::new();
        let whole = u64::MAX >> 4;
        let op = rank.machine.submit_scanned(rank.now, sum(9), vec![whole; 9], TIMEOUT);
        let op = op.expect("the op is valid");
        // The congestion window starts at twice its minimum of two windows.
        assert_eq!(rank.sends(), [0, 1, 2, 3]);
        rank.take(&altered(&nack(&[]), |header| Header { flags, ..header }));
        let arrived = WindowId::new(op, 1);
        rank.take(&datagram(
            Header { window: arrived, ..header(Kind::Credit, Rank::AGGREGATOR) },
            &[],
        ));
        rank.sends()
    };
    assert_eq!(sent_after(Flags::NONE), [4, 5]);
    assert_eq!(sent_after(Flags::CONGESTED), []);
}

/// Returns a message with a changed header.
fn altered(message: &[u8], change: impl FnOnce(Header) -> Header) -> Vec<u8> {
    let (header, body) = Header::decode(message).expect("the bytes are a message");
    datagram(change(header), body)
}

/// Returns a message with its lane set to `lane`.
fn in_lane(lane: u8, message: &[u8]) -> Vec<u8> {
    altered(message, |header| Header { lane, ..header })
}

#[test]
fn what_ranks_acknowledge_in_one_lane_frees_nothing_in_another() {
    // wire: W-33
    let config = aggregator::Config { lanes: 2, ..support::shard(0, 1) };
    let mut shard = Shard::of(Aggregation::new(config, Time(0)));
    for lane in [0, 1] {
        let descriptor = Descriptor { lane, ..sum(8) };
        let mut body = [0; 1200];
        let windows = [Opening::of(true); 8].into_iter();
        let (len, _) = OpenEncoder::new().encode(&descriptor, None, windows, false, &mut body);
        for rank in [0, 1] {
            let open = Header { window: window(lane.into(), 0), ..header(Kind::Open, Rank(rank)) };
            shard.take(&in_lane(lane, &datagram(open, &body[..len])));
        }
        for index in 0..8 {
            for rank in [0, 1] {
                shard.store(&in_lane(lane, &block(rank, window(lane.into(), index))));
            }
            shard.fold().expect("both ranks have sent the window");
        }
    }
    shard.sent();
    for rank in [0, 1] {
        shard.take(&in_lane(1, &ack(rank, window(1, 7))));
    }
    let (to, credit, _) = shard.sent_one();
    assert_eq!((to, credit.kind, credit.lane), (Recipient::All, Kind::Credit, 1));
    assert_eq!(credit.ack, window(1, 7));
    for rank in [0, 1] {
        shard.take(&in_lane(0, &ack(rank, window(0, 5))));
    }
    let (_, credit, _) = shard.sent_one();
    assert_eq!((credit.lane, credit.ack), (0, window(0, 5)));
}
