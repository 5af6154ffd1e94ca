//! The counters of what ranks transfer, and of how long the folds wait for them.

use racksum_proto::aggregator::RankProgress;
use racksum_proto::ids::Rank;
use racksum_proto::status::Transfers;
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::{Flags, Header, Kind, NackEntry};

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
