//! The counters of what ranks transfer, and of how long the folds wait for them.

use racksum_proto::aggregator::RankProgress;
use racksum_proto::ids::Rank;
use racksum_proto::status::{OwnCounters, Transfers};
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::{Flags, Header, Kind, NackEntry};

use crate::rank::{Machine, nack as nack_of_aggregator, result};
use crate::shard::{Shard, ack, block, nack, sum};
use crate::support::{datagram, header, open, window};

fn progress(shard: &Shard) -> [RankProgress; 2] {
    shard.machine.progress(shard.now).try_into().expect("the job has two ranks")
}

#[test]
fn a_fold_waits_for_the_last_rank_since_it_opened_and_the_others_were_complete() {
    let mut shard = Shard::new();
    let at = |shard: &mut Shard, millis: u64| shard.now = Time(0) + Span::from_millis(millis);
    at(&mut shard, 10);
    shard.take(&open(0, 0, 0, &sum(2), None, &[true; 2]));
    shard.store(&block(0, window(0, 0)));
    shard.store(&block(0, window(0, 1)));
    // Until it opens the windows, the other rank computes, and is not what is waited for.
    at(&mut shard, 50);
    shard.take(&open(1, 0, 0, &sum(2), None, &[true; 2]));
    at(&mut shard, 53);
    shard.complete(1, window(0, 0));
    at(&mut shard, 60);
    shard.complete(1, window(0, 1));
    let [first, second] = progress(&shard);
    assert_eq!((first.waited, second.waited), (Span::ZERO, Span::from_millis(10)));

    // A rank is busy until it has all results.
    at(&mut shard, 70);
    shard.take(&ack(0, window(1, 0)));
    at(&mut shard, 100);
    let [first, second] = progress(&shard);
    assert_eq!((first.busy, second.busy), (Span::from_millis(60), Span::from_millis(50)));
    assert_eq!(first.contributed, Transfers { bytes: 2048, fragments: 2, again: 0 });
    assert_eq!(first.results, Transfers { bytes: 2048, fragments: 2, again: 0 });
    // The result went out in no time, but only one rank has acknowledged it.
    assert_eq!((first.round_trip, second.round_trip), (None, None));
}

#[test]
fn fragments_count_as_sent_again_where_the_first_copy_was_lost() {
    let mut shard = Shard::new();
    shard.open(0, None, &[true]);
    let again = |rank: u16| {
        let header = Header {
            window: window(0, 0),
            mask: 1,
            flags: Flags::AGAIN,
            ..header(Kind::Data, Rank(rank))
        };
        datagram(header, &[0; 1024])
    };
    shard.store(&again(0));
    // The first copy was only late, so the second one is a duplicate.
    shard.store(&block(1, window(0, 0)));
    shard.take(&again(1));
    shard.fold().expect("both ranks have sent what they owe");
    shard.sent();
    shard.now = Time(0) + Span::from_micros(400);
    shard.take(&ack(0, window(1, 0)));
    // The other rank lacks the result.
    let lost = NackEntry { window: window(0, 0), fragments: u64::MAX };
    shard.take(&nack(1, window(0, 0), &[lost]));
    shard.sent();
    let [first, second] = progress(&shard);
    let transfers = |again| Transfers { bytes: 1024, fragments: 1, again };
    assert_eq!((first.contributed, second.contributed), (transfers(1), transfers(0)));
    assert_eq!((first.results, second.results), (transfers(0), transfers(1)));
    assert_eq!(first.round_trip, Some(Span::from_micros(400)));
}

#[test]
fn a_rank_counts_what_it_sends_receives_and_awaits() {
    let mut rank = Machine::new();
    let counters = |rank: &Machine| rank.machine.counters(rank.now, 0..1);
    rank.now = Time(0) + Span::from_millis(10);
    rank.start(&[true, false, true]);
    assert_eq!(counters(&rank), OwnCounters::default());
    rank.sent();
    let sent = |again| Transfers { bytes: 2048, fragments: 2, again };
    assert_eq!(counters(&rank).sent, sent(0));
    rank.take(&nack_of_aggregator(&[NackEntry { window: window(0, 2), fragments: u64::MAX }]));
    rank.sent();
    assert_eq!(counters(&rank).sent, sent(1));
    // One fragment of a result arrives only as a copy. A copy of another is a duplicate.
    rank.now = Time(0) + Span::from_millis(13);
    rank.deliver(&result(window(0, 0), None));
    let of = |window, previous, fragment, flags| {
        let header = header(Kind::Result, Rank::AGGREGATOR);
        let header = Header { window, mask: 0b11, previous, fragment, flags, ..header };
        datagram(header, &[0; 1024])
    };
    rank.deliver(&of(window(0, 2), 0, 0, Flags::NONE));
    rank.take(&of(window(0, 2), 0, 0, Flags::AGAIN));
    assert_eq!(counters(&rank).results.again, 0);
    rank.now = Time(0) + Span::from_millis(20);
    rank.deliver(&of(window(0, 2), 0, 1, Flags::AGAIN));
    rank.now = Time(0) + Span::from_millis(90);
    let all = counters(&rank);
    assert_eq!(all.results, Transfers { bytes: 3072, fragments: 3, again: 1 });
    assert_eq!((all.busy_ms, all.kernel_drops), (10, 0));
    // The round trip of the window that was sent once.
    assert_eq!(all.round_trip_us, Some(3_000));
    // Another aggregator of the job has other shards.
    assert_eq!(rank.machine.counters(rank.now, 1..2), OwnCounters::default());
}

#[test]
fn a_report_that_cannot_follow_the_last_one_is_told() {
    // wire: W-80
    let transfers = |bytes, fragments| Transfers { bytes, fragments, again: 5 };
    let last = OwnCounters {
        sent: transfers(1000, 1),
        results: transfers(2000, 2),
        busy_ms: 7,
        round_trip_us: Some(400),
        kernel_drops: 1,
    };
    assert!(last.may_follow(&OwnCounters::default()) && last.may_follow(&last));
    assert!(OwnCounters { round_trip_us: Some(399), busy_ms: 8, ..last }.may_follow(&last));
    for wrong in [
        OwnCounters { sent: transfers(999, 1), ..last },
        OwnCounters { results: transfers(2000, 1), ..last },
        OwnCounters { results: Transfers { again: 4, ..last.results }, ..last },
        OwnCounters { busy_ms: 6, ..last },
        OwnCounters { kernel_drops: 0, ..last },
        OwnCounters { round_trip_us: Some(401), ..last },
        OwnCounters { round_trip_us: None, ..last },
        OwnCounters { sent: transfers(61_441, 1), ..last },
        OwnCounters { sent: transfers(u64::MAX, 1), ..last },
    ] {
        assert!(!wrong.may_follow(&last), "{wrong:?}");
    }
}
