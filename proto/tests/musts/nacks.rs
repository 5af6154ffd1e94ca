//! How an aggregator answers nacks.

use racksum_proto::aggregator::{self, Aggregation, Recipient};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::geometry::WINDOW_BYTES;
use racksum_proto::ids::Rank;
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::{Disagreement, Header, Kind, MissingRanks, NackEntry};

use crate::shard::{Shard, WINDOW, ack, block, entries, everything_from, nack, names, sum};
use crate::support::{datagram, header, open, shard, window};

#[test]
fn a_nack_is_answered_with_what_it_takes() {
    // wire: W-22
    let mut shard = Shard::new();
    let start = window(0, 0);
    let probe = nack(0, start, &everything_from(start));

    // The aggregator lacks the rank's own open.
    shard.take(&probe);
    let (_, body) = shard.sent_to(0, Kind::Nack);
    assert_eq!(entries(&body), everything_from(start));

    // The aggregator lacks the other rank's open.
    shard.unread.clear();
    shard.now = Time(2_000_000_000);
    shard.take(&open(0, 0, 0, &sum(2), None, &[true; 2]));
    shard.take(&probe);
    let (header, body) = shard.sent_to(0, Kind::Wait);
    assert_eq!(header.window, start);
    assert_eq!(names(&body), [(Rank(1), Span::from_secs(2))]);

    // The aggregator lacks the rank's own data.
    shard.unread.clear();
    shard.take(&open(1, 0, 0, &sum(2), None, &[true; 2]));
    shard.take(&probe);
    let (_, body) = shard.sent_to(0, Kind::Nack);
    let all = u64::MAX;
    let lacks = [0, 1].map(|index| NackEntry { window: window(0, index), fragments: all });
    assert_eq!(entries(&body), lacks);

    // The result exists, so the answer is a wait that shows it, although the rank owes the next
    // window.
    shard.finish(start);
    shard.sent();
    shard.take(&probe);
    let (header, body) = shard.sent_to(0, Kind::Wait);
    assert_eq!(header.window, window(0, 1));
    assert_eq!(names(&body), [(Rank(1), Span::ZERO)]);

    // The op has failed.
    shard.take(&open(1, 0, 0, &sum(3), None, &[true; 3]));
    shard.sent();
    shard.take(&probe);
    assert!(
        shard.sent().iter().any(|(to, header, _)| {
            (*to, header.kind) == (Recipient::Rank(Rank(0)), Kind::Fail)
        })
    );
}

#[test]
fn a_nack_for_an_op_that_failed_at_another_shard_is_answered_with_the_fail() {
    // wire: W-22, W-40
    let [mut first, mut second] =
        [0, 1].map(|nth| Shard::of(Aggregation::new(shard(nth, 2), Time(0))));
    let at_second = |mut message: Vec<u8>| {
        message[15] = 1;
        message
    };
    let other = Descriptor::sum(2 * WINDOW, DType::I32);
    first.take(&open(1, 0, 0, &sum(2), None, &[true]));
    second.take(&at_second(open(1, 0, 1, &sum(2), None, &[true])));
    // The other rank's open reaches the first shard only.
    first.take(&open(0, 0, 0, &other, None, &[true]));
    let failed = first.machine.poll_failed().expect("the shard reports the failure");
    second.machine.handle_failed_beside(failed.op, failed.why, &mut second.events);
    // The first shard has told all ranks, so the second tells only those that ask.
    assert!(second.sent().iter().all(|(_, header, _)| header.kind != Kind::Fail));
    assert!(second.machine.poll_failed().is_none());
    let from = window(0, 1);
    second.take(&at_second(nack(1, from, &everything_from(from))));
    let (_, body) = second.sent_to(1, Kind::Fail);
    assert_eq!(Disagreement::decode(&body), Ok(failed.why));

    // A job's only shard has no shard to tell.
    let mut only = Shard::new();
    only.take(&open(0, 0, 0, &sum(1), None, &[true]));
    only.take(&open(1, 0, 0, &sum(2), None, &[true; 2]));
    assert!(only.machine.poll_failed().is_none());
}

#[test]
fn a_wait_names_others_than_the_rank_that_asks() {
    // wire: W-22
    let mut shard = Shard::new();
    let start = window(0, 0);
    let probe = nack(0, start, &everything_from(start));
    let missing = |shard: &mut Shard| {
        shard.now = shard.now + Span::from_secs(1);
        shard.take(&probe);
        let (_, body) = shard.sent_to(0, Kind::Wait);
        shard.unread.clear();
        names(&body).iter().map(|(rank, _)| *rank).collect::<Vec<_>>()
    };
    // Neither rank has opened the op.
    assert_eq!(missing(&mut shard), [Rank(1)]);
    // The aggregator waits only for the rank that sends the nack.
    shard.take(&open(1, 0, 0, &sum(1), None, &[true]));
    assert_eq!(missing(&mut shard), [Rank(0)]);
}

#[test]
fn a_wait_promises_no_result_of_windows_that_nobody_owes() {
    // wire: W-22
    let mut shard = Shard::new();
    shard.open(0, None, &[true, false, false, true]);
    shard.finish(window(0, 0));
    shard.sent();
    for from in [window(0, 0), window(0, 1)] {
        shard.take(&nack(0, from, &everything_from(from)));
        // The aggregator requests the rank's own data of the last window, or sends a wait.
        let sent = shard.sent();
        let waits = sent.iter().filter(|(_, header, _)| header.kind == Kind::Wait);
        let windows: Vec<_> = waits.map(|(_, header, _)| header.window).collect();
        assert!(windows.iter().all(|end| *end == window(0, 1)), "{windows:?}");
        assert_eq!(windows.is_empty(), from == window(0, 1), "{sent:?}");
    }
}

#[test]
fn a_wait_names_the_ranks_that_keep_the_pool_full() {
    // wire: W-22, W-32
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 9]);
    for index in 0..8 {
        shard.finish(window(0, index));
    }
    shard.take(&ack(0, window(0, 8)));
    shard.sent();
    shard.take(&nack(0, window(0, 8), &everything_from(window(0, 8))));
    let (_, body) = shard.sent_to(0, Kind::Wait);
    assert_eq!(names(&body), [(Rank(1), Span::ZERO)]);
}

/// Returns a shard that holds 128 results, none of them acknowledged.
fn of_many_results() -> Shard {
    let config = aggregator::Config { pool_slots: 128, ..shard(0, 1) };
    let mut shard = Shard::of(Aggregation::new(config, Time(0)));
    shard.open(0, None, &[true; 128]);
    for index in 0..128 {
        shard.finish(window(0, index));
    }
    shard.sent();
    shard
}

#[test]
fn a_result_that_is_asked_for_twice_is_sent_once() {
    // wire: W-22
    let mut shard = Shard::new();
    let two_blocks = Descriptor::sum(512, DType::F32);
    let data = |rank| Header { mask: 0b11, ..header(Kind::Data, Rank(rank)) };
    for rank in [0, 1] {
        shard.take(&open(rank, 0, 0, &two_blocks, None, &[true]));
        shard.store(&datagram(data(rank), &[0; 1024]));
        shard.store(&datagram(Header { fragment: 1, ..data(rank) }, &[0; 1024]));
    }
    shard.fold();
    shard.sent();
    for fragments in [0b01, 0b11, 0b10] {
        let lost = [NackEntry { window: window(0, 0), fragments }];
        shard.take(&nack(0, window(0, 0), &lost));
    }
    let (_, fragments) = shard.sent_to(0, Kind::Result);
    assert_eq!(fragments, 0b11u64.to_be_bytes());
    assert_eq!(shard.events.fragments_again, 2);
}

#[test]
fn a_nack_costs_no_more_than_64_windows_and_no_other_rank_its_turn() {
    let mut shard = of_many_results();
    let [start, end] = [0, 128].map(|index| NackEntry { window: window(0, index), fragments: 0 });
    let greedy = [[start, end]; 32].concat();
    for _ in 0..5 {
        shard.take(&nack(0, window(0, 0), &greedy));
    }
    let one = [NackEntry { window: window(0, 100), fragments: 1 }];
    shard.take(&nack(1, window(0, 100), &one));
    let sent = shard.sent();
    let results = sent.iter().filter(|(_, header, _)| header.kind == Kind::Result);
    let ranks: Vec<_> = results.map(|(to, ..)| *to).collect();
    // The ranks take turns of a few windows each.
    assert_eq!(ranks[..5], [0, 0, 0, 0, 1].map(|rank| Recipient::Rank(Rank(rank))));
    assert_eq!(ranks.len(), 64 + 1);
}

#[test]
fn a_window_that_is_no_more_is_not_taken_for_another() {
    let mut shard = Shard::new();
    shard.open(0, None, &[true]);
    shard.finish(window(0, 0));
    for rank in 0..2 {
        shard.take(&ack(rank, window(1, 0)));
    }
    shard.open(1, Some(0), &[true]);
    shard.finish(window(1, 0));
    shard.sent();
    shard.take(&nack(0, window(1, 0), &[NackEntry { window: window(0, 0), fragments: 1 }]));
    assert!(shard.sent().iter().all(|(_, header, _)| header.kind != Kind::Result));
}

#[test]
fn of_a_rank_that_has_left_a_wait_says_so_and_no_slot_is_kept_for_it() {
    // wire: W-61
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 2]);
    shard.finish(window(0, 0));
    shard.sent();
    shard.machine.handle_left(Rank(1), &mut ());
    assert_eq!(shard.machine.results_held(0), 1, "the other rank has not acknowledged the result");
    let lacks = window(0, 1);
    shard.take(&nack(0, lacks, &everything_from(lacks)));
    shard.sent();
    shard.store(&block(0, lacks));
    shard.take(&nack(0, lacks, &everything_from(lacks)));
    let (_, body) = shard.sent_to(0, Kind::Wait);
    assert_eq!(names(&body), [(Rank(1), MissingRanks::LEFT)]);
    shard.take(&ack(0, lacks));
    assert_eq!(shard.machine.results_held(0), 0);
}

/// Returns how many bytes of results the shard sends to this rank alone.
fn again(shard: &mut Shard, rank: u16) -> usize {
    let sent = shard.sent();
    let results = sent.iter().filter(|(to, header, _)| {
        (*to, header.kind) == (Recipient::Rank(Rank(rank)), Kind::Result)
    });
    results.map(|(_, header, _)| Header::LEN + 1024 * header.mask.count_ones() as usize).sum()
}

#[test]
fn a_result_goes_again_once_a_round_trip_at_most() {
    // wire: W-68
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 2]);
    shard.finish(window(0, 0));
    shard.finish(window(0, 1));
    shard.sent();
    let lost = [NackEntry { window: window(0, 1), fragments: 1 }];
    let resent_after = |shard: &mut Shard, wait: Span| {
        shard.now = shard.now + wait;
        shard.take(&nack(0, window(0, 1), &lost));
        again(shard, 0) > 0
    };
    let [trip, less] = [300, 299].map(Span::from_micros);
    shard.now = shard.now + trip;
    shard.take(&ack(0, window(0, 1)));
    assert!(resent_after(&mut shard, Span::ZERO));
    assert!(!resent_after(&mut shard, less), "the repeated result may still be in flight");
    assert!(resent_after(&mut shard, Span::from_micros(1)));
    assert!(!resent_after(&mut shard, less));
    // Each rank has its own round-trip time.
    shard.take(&nack(1, window(0, 1), &lost));
    assert!(again(&mut shard, 1) > 0);
}

#[test]
fn a_rank_that_repeats_a_small_nack_is_sent_no_more_than_it_has_earned() {
    // wire: W-68
    let mut shard = of_many_results();
    let [start, end] = [0, 64].map(|index| NackEntry { window: window(0, index), fragments: 0 });
    let question = nack(0, window(0, 0), &[start, end]);
    let (mut received, mut sent) = (0, 0);
    for _ in 0..1_000 {
        shard.now = shard.now + Span::from_millis(5);
        shard.take(&question);
        received += question.len();
        sent += again(&mut shard, 0);
    }
    // The limit is the sum of the initial budget, the bytes of the first transmissions, the bytes
    // of the nacks, and 16 KiB/s for 5 s.
    let first = 128 * (Header::LEN + 1024);
    let most = 8 * WINDOW_BYTES + first + received + 5 * (16 << 10);
    assert!(sent > first, "no loss was repaired: only {sent} bytes were sent");
    assert!(sent <= most, "{sent} bytes were sent for {received} received");
    // Each rank has its own budget.
    shard.take(&nack(1, window(0, 0), &[start, end]));
    assert_eq!(again(&mut shard, 1), 64 * (Header::LEN + 1024));
}

#[test]
fn a_rank_that_has_spent_its_budget_is_told_of_fewer_ranks() {
    // wire: W-68
    let config = aggregator::Config { world: 100, ..shard(0, 1) };
    let mut shard = Shard::of(Aggregation::new(config, Time(0)));
    let start = window(0, 0);
    let probe = nack(0, start, &everything_from(start));
    shard.take(&open(0, 0, 0, &sum(1), None, &[true]));
    shard.sent();
    let (mut received, mut sent) = (0, 0);
    let mut named = |shard: &mut Shard| {
        shard.take(&probe);
        received += probe.len();
        let (_, body) = shard.sent_to(0, Kind::Wait);
        sent += Header::LEN + body.len();
        names(&body).len()
    };
    assert_eq!(named(&mut shard), 99);
    let most = (0..2_000).map(|_| named(&mut shard)).skip(1_000).max();
    assert_eq!(most, Some(3));
    assert!(sent <= received + 9 * WINDOW_BYTES, "{sent} bytes were sent for {received} received");
}
