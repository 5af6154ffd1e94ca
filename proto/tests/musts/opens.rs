//! How an aggregator handles opens, and ranks that disagree.

use racksum_proto::aggregator::{self, Aggregation, Recipient};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::reject::Reject;
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{Disagreement, Header, Kind, Open};

use crate::shard::{Shard, block, entries, everything_from, sum};
use crate::support::{datagram, header, open, shard, window};

#[test]
fn a_stretch_beyond_its_op_or_of_another_lane_is_rejected() {
    // wire: W-20, W-24
    let mut machine = Shard::of(Aggregation::new(shard(1, 2), Time(0)));
    let of = |bytes: Vec<u8>| {
        let (header, body) = Header::decode(&bytes).unwrap();
        datagram(Header { shard: 1, ..header }, body)
    };
    // Windows 1 and 3 of op 0 belong to the second shard.
    for (index, occupied) in [(0, &[true][..]), (1, &[true; 3]), (3, &[true; 2]), (5, &[true])] {
        let open = of(open(0, 0, index, &sum(4), None, occupied));
        assert_eq!(machine.reject(&open), Reject::Shape, "{index}");
    }
    assert_eq!(machine.take(&of(open(0, 0, 1, &sum(4), None, &[true; 2]))), Verdict::Control);
    let other_lane = Descriptor { lane: 1, ..sum(4) };
    let open = of(open(0, 0, 1, &other_lane, None, &[true; 2]));
    assert_eq!(machine.reject(&open), Reject::Body);
}

#[test]
fn stretches_are_taken_in_order_only() {
    // wire: W-34
    let mut shard = Shard::new();
    // The late opens are a later stretch of an op, and the first stretch of an op whose predecessor
    // has not been opened.
    for late in
        [open(0, 0, 2, &sum(4), None, &[true; 2]), open(0, 1, 0, &sum(4), Some(0), &[true; 4])]
    {
        shard.now = shard.now + Span::from_secs(1);
        assert_eq!(shard.take(&late), Verdict::Control);
        let (_, header, body) = shard.sent_one();
        assert_eq!(header.kind, Kind::Nack);
        assert_eq!(entries(&body), everything_from(window(0, 0)));
    }
    shard.take(&open(0, 0, 0, &sum(4), None, &[true; 2]));
    assert_eq!(shard.reject(&block(0, window(0, 2))), Reject::Unopened);
    shard.take(&open(0, 0, 2, &sum(4), None, &[true; 2]));
    shard.store(&block(0, window(0, 2)));
}

#[test]
fn what_is_opened_too_far_ahead_is_not_taken() {
    // wire: W-35
    let mut shard = Shard::new();
    let large = sum(40_000);
    for start in [0, 8192, 16_384, 24_576] {
        for rank in [0, 1] {
            shard.take(&open(rank, 0, start, &large, None, &[false; Open::MAX_WINDOWS]));
        }
    }
    // No rank owes any of these windows, so the search for a fold passes all windows whose opens
    // the shard has accepted.
    assert!(shard.fold().is_none());
    for rank in [0, 1] {
        let (header, body) = shard.sent_to(rank, Kind::Nack);
        assert_eq!(header.ack, window(0, 16_384));
        assert_eq!(entries(&body), everything_from(window(0, 16_384)));
    }
}

#[test]
fn a_disagreement_is_told_to_every_rank_and_the_next_op_runs() {
    // wire: W-40
    let mut shard = Shard::new();
    shard.take(&open(0, 0, 0, &sum(4), None, &[true; 4]));
    shard.take(&open(1, 0, 0, &sum(3), None, &[true; 3]));
    let sent = shard.sent();
    let expected = Disagreement { one: (Rank(0), sum(4)), other: (Rank(1), sum(3)) };
    for (_, header, body) in &sent {
        assert_eq!((header.kind, header.window.op), (Kind::Fail, OpId(0)));
        assert_eq!(Disagreement::decode(body), Ok(expected));
    }
    assert!(sent.iter().any(|(to, ..)| *to == Recipient::All));
    shard.open(1, Some(0), &[true]);
    assert_eq!(shard.finish(window(1, 0)).window, window(1, 0));
}

#[test]
fn ops_further_ahead_than_any_rank_may_be_are_rejected() {
    // wire: W-43
    let mut shard = Shard::new();
    // The limit is twice the four ops in flight, plus one for the only shard.
    for op in 0u32..9 {
        let after = op.checked_sub(1);
        assert_eq!(shard.take(&open(0, op, 0, &sum(1), after, &[true])), Verdict::Control);
    }
    let beyond = open(0, 9, 0, &sum(1), Some(8), &[true]);
    assert_eq!(shard.reject(&beyond), Reject::BeyondOps);
    // An open of op 4 shows that the other rank has ended op 0.
    shard.take(&open(1, 4, 0, &sum(1), Some(3), &[true]));
    assert_eq!(shard.take(&beyond), Verdict::Control);
    assert_eq!(shard.reject(&open(1, 0, 0, &sum(1), None, &[true])), Reject::Stale);
}

#[test]
fn a_rejected_open_changes_nothing() {
    // wire: W-20, W-40
    let mut shard = Shard::new();
    assert_eq!(shard.reject(&open(0, 0, 0, &sum(2), None, &[true; 3])), Reject::Shape);
    shard.open(0, None, &[true]);
    shard.finish(window(0, 0));
    assert!(shard.sent().iter().all(|(_, header, _)| header.kind == Kind::Result));
}

/// Returns a shard of a job of three ranks.
fn of_three(max_ops: u16) -> Shard {
    let config = aggregator::Config { world: 3, max_ops, ..shard(0, 1) };
    Shard::of(Aggregation::new(config, Time(0)))
}

/// Makes ranks 0 and 1 open an op with different descriptors.
fn disagree(shard: &mut Shard, op: u32) {
    let after = op.checked_sub(1);
    shard.take(&open(0, op, 0, &sum(1), after, &[true]));
    shard.take(&open(1, op, 0, &sum(2), after, &[true; 2]));
    assert!(shard.sent().iter().any(|(to, header, _)| {
        (*to, header.kind, header.window.op) == (Recipient::All, Kind::Fail, OpId(op))
    }));
}

#[test]
fn a_disagreement_is_remembered_until_every_rank_has_ended_the_op() {
    // wire: W-40, W-43
    let mut shard = of_three(64);
    (0..129).for_each(|op| disagree(&mut shard, op));
    for op in 0u32..129 {
        shard.take(&open(2, op, 0, &sum(1), op.checked_sub(1), &[true]));
        let fails =
            shard.sent().into_iter().map(|(to, header, _)| (to, header.kind, header.window));
        let fail = (Recipient::Rank(Rank(2)), Kind::Fail, window(op, 0));
        assert_eq!(fails.collect::<Vec<_>>(), [fail]);
    }
}

#[test]
fn ranks_whose_ops_all_fail_wait_for_one_that_has_not_heard_of_it() {
    // wire: W-43
    let mut shard = of_three(4);
    (0..9).for_each(|op| disagree(&mut shard, op));
    let next = [0, 1, 2].map(|rank| open(rank, 9, 0, &sum(1), None, &[true]));
    assert_eq!(shard.reject(&next[0]), Reject::BeyondOps);
    assert_eq!(shard.reject(&next[1]), Reject::BeyondOps);
    // Rank 2 has received a fail for each op, so it may open an op this far ahead.
    assert_eq!(shard.take(&next[2]), Verdict::Control);
    assert_eq!(shard.take(&next[0]), Verdict::Control);
    assert_eq!(shard.take(&next[1]), Verdict::Control);
    assert!(shard.fold().is_none(), "the shard skips the failed ops");
    (0..3).for_each(|rank| shard.store(&block(rank, window(9, 0))));
    assert_eq!(shard.fold().map(|fold| fold.window), Some(window(9, 0)));
}

#[test]
fn an_op_that_every_rank_has_left_holds_up_no_other() {
    // wire: W-43
    let mut shard = Shard::new();
    shard.open(0, None, &[true]);
    for op in 1..30 {
        // `after` names the previous op, whatever its outcome.
        shard.open(op, Some(op - 1), &[true]);
        shard.fold();
    }
    shard.sent();
    for op in 26..30 {
        shard.finish(window(op, 0));
    }
}

#[test]
fn a_disagreement_about_the_lane_is_seen_in_a_lane_that_is_past_the_op() {
    // wire: W-40
    let config = aggregator::Config { lanes: 2, ..shard(0, 1) };
    let mut shard = Shard::of(Aggregation::new(config, Time(0)));
    let in_lane = |lane, tag| Descriptor { lane, tag, ..sum(1) };
    let open_in = |rank, op, lane, tag, after| {
        let bytes = open(rank, op, 0, &in_lane(lane, tag), after, &[true]);
        let (header, body) = Header::decode(&bytes).unwrap();
        datagram(Header { lane, ..header }, body)
    };
    shard.take(&open_in(0, 0, 0, 0, None));
    // The ranks disagree about op 1 in lane 1, so the lane skips that op.
    shard.take(&open_in(0, 1, 1, 1, None));
    shard.take(&open_in(1, 1, 1, 2, None));
    while shard.fold().is_some() {}
    for rank in [0, 1] {
        let header = Header { lane: 1, ack: window(2, 0), ..header(Kind::Ack, Rank(rank)) };
        shard.take(&datagram(header, &[]));
    }
    shard.sent();
    // The open of rank 1's first op arrives only now.
    shard.take(&open_in(1, 0, 1, 0, None));
    let (_, body) = shard.sent_to(1, Kind::Fail);
    let Disagreement { one, other } = Disagreement::decode(&body).unwrap();
    assert_eq!((one, other), ((Rank(0), in_lane(0, 0)), (Rank(1), in_lane(1, 0))));
}
