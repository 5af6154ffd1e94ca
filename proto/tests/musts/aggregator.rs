//! How an aggregator handles data and sends results.

use racksum_proto::aggregator::{Aggregation, Recipient};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::geometry::Geometry;
use racksum_proto::ids::{Generation, JobId, Rank};
use racksum_proto::reject::Reject;
use racksum_proto::time::Time;
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{Flags, Header, Kind, NackEntry};

use crate::shard::{Shard, ack, block, entries, everything_from, nack, sum};
use crate::support::{datagram, header, open, shard, window};

#[test]
fn what_is_not_of_the_job_is_rejected_by_the_reason() {
    // wire: W-7, W-8, W-9, W-10
    let mut shard = Shard::new();
    let good = header(Kind::Ack, Rank(1));
    assert_eq!(shard.take(&datagram(good, &[])), Verdict::Control);
    for (bad, reject) in [
        (Header { job: JobId(8), ..good }, Reject::Job),
        (Header { generation: Generation(2), ..good }, Reject::Generation),
        (Header { generation: Generation(4), ..good }, Reject::Generation),
        (Header { sender: Rank(2), ..good }, Reject::Sender),
        (Header { sender: Rank::AGGREGATOR, ..good }, Reject::Sender),
        (Header { lane: 1, ..good }, Reject::Stream),
        (Header { shard: 1, ..good }, Reject::Stream),
    ] {
        assert_eq!(shard.reject(&datagram(bad, &[])), reject);
    }
    assert_eq!(shard.events.rejects.total(), 7);
    assert_eq!(shard.sent(), []);
}

#[test]
fn a_kind_that_workers_do_not_send_is_rejected() {
    // wire: W-25, W-26
    let mut shard = Shard::new();
    for kind in [Kind::Result, Kind::Credit, Kind::Wait, Kind::Fail, Kind::Ping] {
        assert_eq!(shard.reject(&datagram(header(kind, Rank(0)), &[])), Reject::Kind);
    }
    assert_eq!(shard.reject(&datagram(header(Kind::Ack, Rank(0)), &[0])), Reject::Body);
}

#[test]
fn data_of_another_shape_than_its_window_is_rejected() {
    // wire: W-11, W-21, W-29
    let mut shard = Shard::new();
    let two_blocks = Descriptor::sum(512, DType::F32);
    for rank in [0, 1] {
        shard.take(&open(rank, 0, 0, &two_blocks, None, &[true]));
    }
    let good = Header { mask: 0b11, ..header(Kind::Data, Rank(0)) };
    let first = [0; 1024];
    for (bad, body) in [
        (Header { window: window(0, 1), ..good }, &first[..]),
        (Header { mask: 0, ..good }, &[]),
        (Header { mask: 0b111, ..good }, &first),
        (Header { fragment: 2, ..good }, &[]),
        (good, &first[..1023]),
        (Header { fragment: 1, ..good }, &first[1..]),
    ] {
        assert_eq!(shard.reject(&datagram(bad, body)), Reject::Shape);
    }
    shard.store(&datagram(good, &first));
    let other_mask = Header { mask: 0b01, ..good };
    assert_eq!(shard.reject(&datagram(other_mask, &[0; 1024])), Reject::Shape);
    shard.store(&datagram(Header { fragment: 1, ..good }, &[0; 1024]));
}

#[test]
fn data_needs_an_open_that_says_it_comes() {
    // wire: W-27
    let mut shard = Shard::new();
    assert_eq!(shard.reject(&block(0, window(0, 0))), Reject::Unopened);
    let (to, header, body) = shard.sent_one();
    assert_eq!((to, header.kind), (Recipient::Rank(Rank(0)), Kind::Nack));
    assert_eq!(entries(&body), everything_from(window(0, 0)));

    shard.take(&open(0, 0, 0, &sum(4), None, &[true, false]));
    assert_eq!(shard.reject(&block(0, window(0, 1))), Reject::Unowed);
    assert_eq!(shard.reject(&block(0, window(0, 2))), Reject::Unopened);
    shard.store(&block(0, window(0, 0)));
}

#[test]
fn data_beyond_the_pool_is_rejected() {
    // wire: W-28
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 20]);
    assert_eq!(shard.reject(&block(0, window(0, 8))), Reject::BeyondPool);
    shard.store(&block(0, window(0, 7)));
    shard.finish(window(0, 0));
    assert_eq!(shard.reject(&block(0, window(0, 8))), Reject::BeyondPool);
    shard.take(&ack(0, window(0, 1)));
    assert_eq!(shard.reject(&block(0, window(0, 8))), Reject::BeyondPool);
    shard.take(&ack(1, window(0, 1)));
    shard.store(&block(0, window(0, 8)));
}

#[test]
fn windows_are_folded_in_order_and_whole() {
    // wire: W-30
    let mut shard = Shard::new();
    shard.take(&open(0, 0, 0, &sum(2), None, &[true, true]));
    shard.store(&block(0, window(0, 0)));
    assert!(shard.fold().is_none(), "the other rank may owe the window");
    shard.take(&open(1, 0, 0, &sum(2), None, &[false, true]));
    shard.store(&block(1, window(0, 1)));
    assert_eq!(shard.fold().map(|fold| fold.window), Some(window(0, 0)));
    assert!(shard.fold().is_none(), "rank 0 owes the next window");
    let two_blocks = Header { mask: 0b11, ..header(Kind::Data, Rank(0)) };
    let two_blocks = Header { window: window(0, 1), ..two_blocks };
    shard.store(&datagram(Header { fragment: 1, ..two_blocks }, &[0; 1024]));
    assert!(shard.fold().is_none(), "half of the window is missing");
    shard.store(&datagram(two_blocks, &[0; 1024]));
    let fold = shard.fold().unwrap();
    assert_eq!((fold.window, fold.union), (window(0, 1), 0b11));
    let masks = [0, 1].map(|rank| shard.machine.contribution(&fold, Rank(rank)));
    assert_eq!(masks, [0b11, 0b01]);
    assert!(shard.fold().is_none());
}

#[test]
fn results_are_of_windows_that_somebody_owes_and_of_the_last() {
    // wire: W-31, W-23
    let mut shard = Shard::new();
    shard.open(0, None, &[false, true, false, true, false]);
    shard.open(1, Some(0), &[true]);
    shard.finish(window(0, 1));
    shard.store(&block(1, window(1, 0)));
    shard.finish(window(0, 3));
    assert_eq!(shard.fold().map(|fold| (fold.window, fold.union)), Some((window(0, 4), 0)));
    shard.complete(0, window(1, 0));
    let links: Vec<_> = shard
        .sent()
        .iter()
        .map(|(to, header, _)| {
            assert_eq!((*to, header.kind), (Recipient::All, Kind::Result));
            (header.window, header.mask, header.previous)
        })
        .collect();
    let first = Header::NO_PREVIOUS;
    assert_eq!(
        links,
        [
            (window(0, 1), 1, first),
            (window(0, 3), 1, 1),
            (window(0, 4), 0, 3),
            (window(1, 0), 1, first)
        ]
    );
}

#[test]
fn a_result_is_kept_until_every_rank_acknowledged_it() {
    // wire: W-32, W-33
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 20]);
    for index in 0..4 {
        shard.finish(window(0, index));
    }
    // A rank cannot acknowledge results that do not exist yet.
    shard.take(&ack(0, window(9, 9)));
    shard.take(&ack(1, window(0, 3)));
    for index in 4..7 {
        shard.finish(window(0, index));
    }
    let lows: Vec<_> = shard.sent().iter().map(|(_, header, _)| header.ack).collect();
    assert_eq!(lows, [window(0, 3); 7]);
    let lost = [NackEntry { window: window(0, 5), fragments: 1 }];
    shard.take(&nack(0, window(0, 3), &lost));
    let (to, header, fragments) = shard.sent_one();
    assert_eq!((to, header.window), (Recipient::Rank(Rank(0)), window(0, 5)));
    assert!(header.flags.has(Flags::AGAIN));
    assert_eq!(fragments, 1u64.to_be_bytes());
    // An older acknowledgement that arrives late changes nothing.
    shard.take(&ack(0, window(0, 7)));
    shard.take(&ack(1, window(0, 7)));
    shard.take(&ack(1, window(0, 2)));
    let (to, header, _) = shard.sent_one();
    assert_eq!((to, header.kind, header.ack), (Recipient::All, Kind::Credit, window(0, 7)));
    shard.take(&nack(0, window(0, 3), &lost));
    assert!(shard.sent().iter().all(|(_, header, _)| header.kind != Kind::Result));
}

#[test]
fn what_came_before_changes_nothing() {
    // wire: W-42
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 2]);
    shard.store(&block(0, window(0, 0)));
    assert_eq!(shard.take(&block(0, window(0, 0))), Verdict::Duplicate);
    shard.complete(1, window(0, 0));
    assert_eq!(shard.reject(&block(1, window(0, 0))), Reject::Stale);
    assert!(shard.fold().is_none());
    for rank in [0, 1] {
        shard.take(&ack(rank, window(0, 1)));
    }
    shard.finish(window(0, 1));
    for rank in [0, 1] {
        shard.take(&ack(rank, window(1, 0)));
    }
    assert_eq!(shard.reject(&block(0, window(0, 1))), Reject::Stale);
    assert_eq!(shard.reject(&open(0, 0, 0, &sum(2), None, &[true; 2])), Reject::Stale);
    assert_eq!(shard.events.folds, 2);
}

#[test]
fn the_windows_of_an_op_are_on_one_shard_each() {
    // wire: W-44
    let geometry = Geometry::new(&sum(5));
    let mut taken = 0;
    for number in 0..3 {
        let mut machine = Shard::of(Aggregation::new(shard(number, 3), Time(0)));
        for index in 0..geometry.windows() {
            let bytes = open(0, 7, index, &sum(5), None, &[true]);
            let (header, body) = Header::decode(&bytes).unwrap();
            let verdict = machine.take(&datagram(Header { shard: number, ..header }, body));
            let expected = (index + 7) % 3 == u32::from(number);
            assert_eq!(verdict != Verdict::Reject(Reject::Shape), expected, "{index}");
            taken += u32::from(expected);
        }
    }
    assert_eq!(taken, 5);
}
